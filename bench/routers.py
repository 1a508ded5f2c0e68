"""CPU per request of routers: Baton's before the same HTTP puppets as sglang-router's, and before gRPC puppets.

    cargo build --release -p baton
    cargo build --release -p baton-router --example puppets
    python3 -m venv /tmp/peer && /tmp/peer/bin/pip install sglang-router==0.3.2
    python3 bench/routers.py --peer /tmp/peer/bin/python --json report.json

A router runs alone on one core, puppets and clients on another. The routers take turns in each round. The prompt is
1 KiB of text, or 512 token ids before gRPC puppets. HTTP puppets pair the two requests of a prompt by its room, so a
skipped prefill is a failed request, and a failed request ends the run.
"""

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request

TICKS = os.sysconf("SC_CLK_TCK")
PORTS = {name: 23100 + nth for nth, name in enumerate(
    ["router", "admin", "grpc", "prefill", "decode", "bootstrap", "peer-metrics"])}
# name: connections, chunks of an answer, milliseconds between two chunks
LOADS = {"one": (32, 1, 0), "hundred": (32, 100, 0), "paced": (100, 50, 20)}


def at(name):
    return f"127.0.0.1:{PORTS[name]}"


def baton_config(folder, of):
    lines = [
        "[router]", f'http = "{at("router")}"', f'admin = "{at("admin")}"', f'grpc = "{at("grpc")}"',
        "[log]", 'level = "warn"',
    ]
    if of == "http":
        lines += [
            "[model]", 'name = "mock"', "[expert.upstream]", 'kind = "sglang"',
            f'prefill = ["http://{at("prefill")}?bootstrap_port={PORTS["bootstrap"]}"]',
            f'decode = ["http://{at("decode")}"]',
        ]
    path = os.path.join(folder, f"router-{of}.toml")
    with open(path, "w") as file:
        file.write("\n".join(lines) + "\n")
    return path


def peer_command(python):
    return [
        python, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--policy", "round_robin",
        "--host", "127.0.0.1", "--port", str(PORTS["router"]), "--log-level", "warn",
        "--prefill", f"http://{at('prefill')}", str(PORTS["bootstrap"]), "--decode", f"http://{at('decode')}",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(PORTS["peer-metrics"]),
    ]


@contextlib.contextmanager
def running(command, core, log):
    with open(log, "w") as file:
        pinned = ["taskset", "-c", str(core), *command]
        process = subprocess.Popen(pinned, stdout=file, stderr=file, env={**os.environ, "BATON_LOG": "warn"})
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(condition, what, log):
    for _ in range(300):
        if condition():
            return
        time.sleep(0.1)
    with open(log) as file:
        raise SystemExit(f"{what}: not within 30 s\n{file.read()[-2000:]}")


def is_open(name):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", PORTS[name])) == 0


def is_ready():
    """A request of one chunk is answered."""
    body = {"model": "mock", "max_tokens": 1, "stream": True, "messages": [{"role": "user", "content": "a"}]}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(
        f"http://{at('router')}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        return b"[DONE]" in urllib.request.urlopen(request, timeout=5).read()
    except OSError:
        return False


def cpu_seconds(pid):
    """The CPU time of a process and its children."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    own = (int(fields[11]) + int(fields[12])) / TICKS
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return own + sum(cpu_seconds(int(child)) for child in file.read().split())


def measure(pid, args, kind, load):
    connections, chunks, gap_ms = LOADS[load]
    command = ["taskset", "-c", str(args.load_core), args.puppets, "load", at("router"), kind]
    before = cpu_seconds(pid)
    ran = subprocess.run(
        [*command, str(connections), str(args.seconds), str(chunks), str(gap_ms)],
        stdout=subprocess.PIPE, text=True, check=True)
    spent = cpu_seconds(pid) - before
    seen = json.loads(ran.stdout)
    if seen["failed"] or seen["chunks"] != seen["requests"] * chunks:
        raise SystemExit(f"{kind} {load}: {seen}")
    per_request = 1e6 * spent / seen["requests"]
    return {
        "cpu_us_per_request": per_request,
        "cpu_us_per_chunk": per_request / chunks,
        "requests_per_s": seen["requests"] / seen["seconds"],
        "p50_us": seen["p50_us"],
        "p99_us": seen["p99_us"],
    }


def turns(args, folder):
    """The routers by name: their command, puppets, and the kind of request."""
    baton = [args.baton, "router", "--config"]
    http = [args.puppets, "http", at("prefill"), at("decode")]
    grpc = [args.puppets, "grpc", at("grpc"), at("prefill"), at("decode")]
    all_turns = {
        "baton, HTTP": ([*baton, baton_config(folder, "http")], http, "chat"),
        "baton, gRPC": ([*baton, baton_config(folder, "grpc")], grpc, "tokens"),
    }
    if args.peer:
        all_turns["sglang-router"] = (peer_command(args.peer), http, "chat")
    return all_turns


def turn(args, folder, name, command, puppets, kind):
    logs = [os.path.join(folder, f"{part}.log") for part in ("router", "puppets")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(puppets, args.load_core, logs[1]))
        if puppets[1] == "http":
            wait_for(lambda: is_open("decode"), "puppets", logs[1])
        router = stack.enter_context(running(command, args.router_core, logs[0]))
        wait_for(lambda: is_open("router"), name, logs[0])
        wait_for(is_ready, f"{name} answers", logs[0])
        return {load: measure(router.pid, args, kind, load) for load in LOADS}


def summary(rounds):
    table = {}
    for name in rounds[0]:
        for load in LOADS:
            for figure in rounds[0][name][load]:
                values = [one[name][load][figure] for one in rounds]
                table.setdefault(name, {}).setdefault(load, {})[figure] = {
                    "median": statistics.median(values), "min": min(values), "max": max(values)}
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", default="target/release/baton")
    parser.add_argument("--puppets", default="target/release/examples/puppets")
    parser.add_argument("--peer", help="the Python of a venv with sglang-router")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=4, help="of each load")
    parser.add_argument("--router-core", type=int, default=0)
    parser.add_argument("--load-core", type=int, default=1)
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            rounds.append({
                name: turn(args, folder, name, *parts) for name, parts in turns(args, folder).items()})
    table = summary(rounds)
    report = {"machine": platform.platform(), "cores": os.cpu_count(), "median": table, "rounds": rounds}
    with open(args.json, "w") as file:
        json.dump(report, file, indent=1)
    for name, loads in table.items():
        for load, figures in loads.items():
            shown = "  ".join(
                f"{figure} {of['median']:.1f} ({of['min']:.1f} to {of['max']:.1f})" for figure, of in figures.items())
            print(f"{name:14} {load:8} {shown}")


if __name__ == "__main__":
    main()
