#!/usr/bin/env python3
"""Compares the policy `cost` with two fixed arms on real processes: always remote, and always local.

Usage: bench/never-worse.py BATON OUT.json     the executable; no packages

Each arm is a cluster of one prefill and one decode node with paced mocks; always local has the decode node only. In each
round of a cell the arms take turns. The result of a cell is the median over the rounds of the 99th percentiles of the
time to the first token, of the gap before the second, and of the gaps after it.
"""
import base64, json, os, statistics, subprocess, sys, tempfile, zlib

BATON, OUT = sys.argv[1:3]
HERE, WORK = os.path.dirname(os.path.abspath(__file__)), tempfile.mkdtemp(prefix="never-worse-")
ROUNDS = int(os.environ.get("ROUNDS", 5))
ARMS = {"remote": ["--policy", "least-loaded"], "local": ["--policy", "least-loaded", "--prefill", "0"], "cost": ["--policy", "cost"]}
PORTS = {name: 8300 + 10 * nth for nth, name in enumerate(ARMS)}
TIMES = ["first token", "second token", "later tokens"]
BOUND = 1.05
# tokens of a prompt, tokens of an answer, concurrent requests, percent of the prompt that all prompts share, requests
CELLS = {
    "short-alone": (128, 16, 1, 0, 40),
    "medium-few": (1024, 256, 8, 0, 24),
    "long-few-shared": (4096, 16, 8, 90, 64),
    "long-few": (4096, 256, 8, 0, 24),
    "longest-alone": (16384, 16, 1, 0, 10),
    "medium-many-shared": (1024, 16, 32, 90, 128),
}


def start(name):
    port = PORTS[name]
    env = {"PATH": os.environ["PATH"], "HOME": WORK, "BATON_LOG__LEVEL": "warn", "BATON_ROUTER__ADMIN": f"127.0.0.1:{port + 1}"}
    command = [BATON, "up", "--kv-memory", "1GiB", "--model", f"mock:{HERE}/scenarios/mocks/paced.toml",
               "--http", f"127.0.0.1:{port}", "--grpc", f"127.0.0.1:{port + 2}", *ARMS[name]]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    if not process.stdout.readline().startswith("ready"):
        raise SystemExit(f"the cluster {name} did not start")
    return process


def records(report):
    """Yields the times of the chunks of each answer, as bench/src/report/samples.rs describes."""
    data, at = zlib.decompress(base64.b64decode(report["samples"]["data"]), -15), 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    for _ in range(report["samples"]["n_requests"]):
        outcome = [number() for _ in range(15)][-1]
        if outcome != 0:
            raise SystemExit("a request failed")
        times, time = [], 0
        for _ in range(number()):
            time += number()
            times.append((time, number()))
        yield [time / 1e3 for time, _ in times]


def p99(times):
    return sorted(times)[-(-len(times) * 99 // 100) - 1]


def run(name, cell, n_requests, seed):
    n_prompt, n_answer, concurrency, shared, _ = cell
    prefix, out = n_prompt * shared // 100, os.path.join(WORK, f"{name}.json")
    command = [BATON, "bench", "serve", "--url", f"http://127.0.0.1:{PORTS[name]}", "--quiet", "--out", out, "--seed", str(seed),
               "--input-tokens", str(n_prompt - prefix), "--output-tokens", str(n_answer), "--concurrency", str(concurrency),
               "--requests", str(n_requests), "--warmup", "0s", "--lag-limit", "50ms"]
    if shared:
        command += ["--workload", "shared-prefix", "--prefix-groups", "1", "--prefix-tokens", str(prefix), "--salt", "1"]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300, check=True)
    report = json.load(open(out))
    answers = list(records(report))
    gaps = [[b - a for a, b in zip(times, times[1:])] for times in answers]
    found = [[times[0] for times in answers], [one[0] for one in gaps], [gap for one in gaps for gap in one[1:]]]
    return {"p99_ms": [p99(times) for times in found], "lag_ms": report["lag"]["send_ms"]["p99"]}


def main():
    processes = [start(name) for name in ARMS]
    results = {}
    try:
        for nth, (title, cell) in enumerate(CELLS.items()):
            for name in ARMS:  # caches and learned speeds
                run(name, cell, 2 * cell[2] + 8, 1000 * nth)
            rounds = [{name: run(name, cell, cell[4], 1000 * nth + seed) for name in ARMS} for seed in range(1, ROUNDS + 1)]
            median = {name: [statistics.median(one[name]["p99_ms"][time] for one in rounds) for time in range(3)] for name in ARMS}
            ratios = [median["cost"][time] / min(median["remote"][time], median["local"][time]) for time in range(3)]
            results[title] = {"cell": cell, "rounds": rounds, "median_p99_ms": median, "ratios": ratios}
            shown = ", ".join(f"{what} {ratio:.2f}" for what, ratio in zip(TIMES, ratios))
            print(f"{title}: {'holds' if max(ratios) <= BOUND else 'misses'}; cost over the better arm: {shown}", flush=True)
            for name in ARMS:
                print(f"    {name:6} " + " ".join(f"{value:8.1f}" for value in median[name]), flush=True)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=60)
    json.dump({"times": TIMES, "bound": BOUND, "cells": results}, open(OUT, "w"), indent=1)


main()
