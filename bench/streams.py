"""Many open streams through a router: its memory, `/ready`, and the way of a token from a decode node to its client.

    cargo build --release -p baton
    cargo build --release -p baton-router --example puppets
    python3 bench/streams.py --json report.json

gRPC puppets play a prefill node and three decode nodes. Prompts are token ids, each stream gets a token per second, and
a token's id is the time at which the puppet sent it. Router, puppets and clients are one process each.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import subprocess
import tempfile
import time
import urllib.request

PORTS = {name: 23200 + nth for nth, name in enumerate(["router", "admin", "grpc", "prefill", "decode", "b", "c"])}


def at(name):
    return f"127.0.0.1:{PORTS[name]}"


def config(folder, streams):
    path = os.path.join(folder, "router.toml")
    with open(path, "w") as file:
        file.write(
            f'[router]\nhttp = "{at("router")}"\nadmin = "{at("admin")}"\ngrpc = "{at("grpc")}"\n'
            f'requests_max = {2 * streams}\ndeadline_max_ms = 3600000\n[log]\nlevel = "warn"\n')
    return path


@contextlib.contextmanager
def running(command, log):
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "BATON_LOG": "warn"})
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def is_ready():
    try:
        return urllib.request.urlopen(f"http://{at('admin')}/ready", timeout=5).status == 200
    except OSError:
        return False


def memory_mib(pid):
    with open(f"/proc/{pid}/status") as file:
        fields = dict(re.findall(r"(Vm\w+):\s+(\d+) kB", file.read()))
    return {name: int(fields[name]) / 1024 for name in ("VmRSS", "VmHWM")}


def measured(router, args, folder):
    command = [args.puppets, "streams", at("router"), str(args.streams), str(args.seconds), str(args.prompt), "1000"]
    with open(os.path.join(folder, "clients.log"), "w") as errors:
        clients = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        first = clients.stdout.readline()
        if not first:
            clients.wait()
            with open(errors.name) as file:
                raise SystemExit(f"the streams did not open: {file.read()}")
        report, ready, memory = json.loads(first), [], []
        while clients.poll() is None:
            ready.append(is_ready())
            memory.append(memory_mib(router.pid))
            time.sleep(1)
        report |= json.loads(clients.stdout.read())
    report["ready"] = f"{sum(ready)} of {len(ready)} times"
    report["rss_mib"] = max(one["VmRSS"] for one in memory)
    report["peak_mib"] = memory[-1]["VmHWM"]
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baton", default="target/release/baton")
    parser.add_argument("--puppets", default="target/release/examples/puppets")
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--seconds", type=int, default=30, help="of measuring, while all streams are open")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        router = [args.baton, "router", "--config", config(folder, args.streams)]
        router = stack.enter_context(running(router, os.path.join(folder, "router.log")))
        nodes = [args.puppets, "grpc", at("grpc"), at("prefill"), at("decode"), at("b"), at("c")]
        stack.enter_context(running(nodes, os.path.join(folder, "puppets.log")))
        for _ in range(300):
            if is_ready():
                break
            time.sleep(0.1)
        else:
            with open(os.path.join(folder, "router.log")) as file:
                raise SystemExit(f"the router is not ready within 30 s\n{file.read()[-2000:]}")
        idle = memory_mib(router.pid)["VmRSS"]
        report = {"machine": platform.platform(), "cores": os.cpu_count(), "streams": args.streams,
                  "prompt_tokens": args.prompt, "idle_mib": idle, **measured(router, args, folder)}
    with open(args.json, "w") as file:
        json.dump(report, file, indent=1)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
