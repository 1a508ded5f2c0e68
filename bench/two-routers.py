#!/usr/bin/env python3
"""Compares two routers, each with half of the load, with one router that has all of it. All use one etcd and one set of
paced mocks: four prefill and four decode nodes.

Usage: bench/two-routers.py BATON ETCD OUT.json     the executables; no packages

A round has one run with one router, and one with both at the same time. The skew is the largest number of prompt tokens
that a node computed, over the mean of its kind. For decode nodes it is that of answers' tokens.
"""
import json, os, re, subprocess, sys, tempfile, time, urllib.request

BATON, ETCD, OUT = sys.argv[1:4]
HERE, WORK = os.path.dirname(os.path.abspath(__file__)), tempfile.mkdtemp(prefix="two-routers-")
ROUNDS, RATE, REQUESTS = int(os.environ.get("ROUNDS", 3)), int(os.environ.get("RATE", 10)), int(os.environ.get("REQUESTS", 300))
POLICY, SLO = os.environ.get("POLICY", "cost"), os.environ.get("SLO", "ttft=1s,tbt=25ms")
REGISTRY = "etcd://127.0.0.1:23790/two-routers"
URLS = ["http://127.0.0.1:8100", "http://127.0.0.1:8200"]
processes = []


def start(name, command, **env):
    log = open(os.path.join(WORK, name + ".log"), "w")
    clean = {"PATH": os.environ["PATH"], "HOME": WORK, "BATON_LOG__LEVEL": "warn"}
    processes.append(subprocess.Popen(command, env={**clean, **env}, stdout=log, stderr=log))


def fetch(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def nodes(url):
    return json.loads(fetch(url + "/debug/cluster"))["nodes"]


def until_ready(url):
    end = time.time() + 60
    while time.time() < end:
        try:
            if sum(node["state"] == "ready" for node in nodes(url)) == 8:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the nodes are not ready for {url}: logs are in {WORK}")


def work():
    """The tokens that each node has computed so far: of prompts on prefill nodes, of answers on decode nodes."""
    done = {}
    for node in nodes(URLS[0]):
        metric = "prefill_tokens" if node["role"] == "prefill" else "sampled_tokens"
        page = fetch(f"http://{node['admin']}/metrics")
        found = re.search(rf"^baton_node_{metric}_total(?:{{.*}})? (\d+)", page, re.M)
        done[node["role"], node["id"]] = int(found[1])
    return done


def skew(before, after):
    worst = {}
    for role in ("prefill", "decode"):
        grown = [after[key] - before[key] for key in after if key[0] == role]
        worst[role] = max(grown) / (sum(grown) / len(grown))
    return worst


def run(urls, seed):
    """Returns the reports of runs that share the load, and the skew of the nodes' work."""
    before, runs = work(), []
    for nth, url in enumerate(urls):
        out = os.path.join(WORK, f"{seed}-{len(urls)}-{nth}.json")
        command = [BATON, "bench", "serve", "--url", url, "--quiet", "--out", out, "--seed", str(seed * 10 + nth),
                   "--workload", "shared-prefix", "--prefix-groups", "60", "--prefix-tokens", "4000", "--salt", str(seed),
                   "--input-tokens", "lognormal:1000,0.7", "--output-tokens", "uniform:16..128", "--slo", SLO,
                   "--rate", str(RATE / len(urls)), "--requests", str(REQUESTS // len(urls)), "--lag-limit", "50ms"]
        runs.append((out, subprocess.Popen(command, stdout=subprocess.DEVNULL)))
    for out, process in runs:
        process.wait(timeout=600)
    reports = [json.load(open(out)) for out, _ in runs]
    good, sent = (sum(report["attainment"][key] for report in reports) for key in ("good", "sent"))
    return {"attainment": good / sent, "good": good, "sent": sent, "skew": skew(before, work()),
            "failed": sum(report["requests"]["failed"] for report in reports),
            "ttft_ms": [report["latency_ms"]["ttft"] for report in reports],
            "lag_ms": max(report["lag"]["send_ms"]["p99"] for report in reports)}


def main():
    start("etcd", [ETCD, "--data-dir", os.path.join(WORK, "etcd"), "--listen-client-urls", "http://127.0.0.1:23790",
                   "--advertise-client-urls", "http://127.0.0.1:23790", "--listen-peer-urls", "http://127.0.0.1:23800"])
    time.sleep(2)
    model = f"mock:{HERE}/scenarios/mocks/paced.toml"
    for role in ("prefill", "decode"):
        for nth in range(4):
            start(f"{role}-{nth}", [BATON, role], BATON_NODE__ID=f"{role}-{nth}", BATON_REGISTRY__URL=REGISTRY,
                  BATON_MODEL__PATH=model, BATON_MODEL__KV_MEMORY="1GiB")
    for nth, base in enumerate((8100, 8200)):
        start(f"router-{nth}", [BATON, "router"], BATON_REGISTRY__URL=REGISTRY, BATON_ROUTER__POLICY=POLICY,
              BATON_ROUTER__HTTP=f"127.0.0.1:{base}", BATON_ROUTER__ADMIN=f"127.0.0.1:{base + 1}",
              BATON_ROUTER__GRPC=f"127.0.0.1:{base + 2}")
    for url in URLS:
        until_ready(url)
    run(URLS, 99)  # the nodes learn their speeds
    rounds = []
    for seed in range(1, ROUNDS + 1):
        rounds.append({"one": run(URLS[:1], seed), "two": run(URLS, 100 + seed)})
        for name, result in rounds[-1].items():
            print(seed, name, f"attained {result['attainment']:.3f}", f"skew {result['skew']}", f"failed {result['failed']}",
                  f"lag p99 {result['lag_ms']:.1f} ms", flush=True)
    share = {name: sum(one[name]["good"] for one in rounds) / sum(one[name]["sent"] for one in rounds) for name in ("one", "two")}
    worst = max(max(one["two"]["skew"].values()) for one in rounds)
    print(f"one router attains {share['one']:.3f}, two {share['two']:.3f}; the largest skew of two is {worst:.2f}")
    json.dump({"policy": POLICY, "slo": SLO, "rate": RATE, "rounds": rounds, "attained": share, "largest_skew": worst},
              open(OUT, "w"), indent=1)


try:
    main()
finally:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(timeout=60)
