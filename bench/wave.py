"""A square wave of load on clusters of four paced mocks with fixed ratios, and on one whose router moves nodes.

    cargo build --release -p baton
    python3 bench/wave.py --baton target/release/baton --json wave.json

Each half of a wave takes 60 s: prompts of 8,192 tokens with answers of 16, then prompts of 256 with answers of 512.
Arrivals are Poisson, and the same for all clusters, which take turns. `--constant` sends 10 minutes of one kind of
request instead, as much as 70 % of what two prefill and two decode nodes can do, and prints the moves.
"""

import argparse
import json
import os
import random
import subprocess
import tempfile
import urllib.request

MODEL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scenarios/mocks/wave.toml")
HALF_S = 60
# requests per second, tokens of a prompt, tokens of an answer
LONG_PROMPTS, LONG_ANSWERS, CONSTANT = (5.0, 8192, 16), (6.0, 256, 512), (3.2, 7500, 350)
CLUSTERS = {"1+3": (1, 3, False), "2+2": (2, 2, False), "3+1": (3, 1, False), "balance": (2, 2, True)}


def trace(path, phases, seed):
    """Writes the arrivals of phases (seconds, kind) and returns their number."""
    draws, begin, lines = random.Random(seed), 0.0, []
    for seconds, (rate, n_prompt, n_answer) in phases:
        at = begin + draws.expovariate(rate)
        while at < begin + seconds:
            # Each id stands for 512 tokens that no other prompt has.
            ids = [len(lines) * 64 + nth for nth in range(-(-n_prompt // 512))]
            lines.append({"timestamp": at * 1e3, "input_length": n_prompt, "output_length": n_answer, "hash_ids": ids})
            at += draws.expovariate(rate)
        begin += seconds
    with open(path, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return len(lines)


class Cluster:
    def __init__(self, args, name, balance):
        n_prefill, n_decode, balanced = CLUSTERS[name]
        self.port = args.port
        env = dict(os.environ, BATON_ROUTER__ADMIN=f"127.0.0.1:{args.port + 1}", BATON_LOG__LEVEL="warn")
        if balanced:
            env |= {f"BATON_BALANCE__{key.upper()}": str(value) for key, value in balance.items()}
        command = [
            args.baton, "up", "--kv-memory", "1GiB", "--prefill", str(n_prefill), "--decode", str(n_decode),
            "--model", f"mock:{MODEL}", "--http", f"127.0.0.1:{args.port}", "--grpc", f"127.0.0.1:{args.port + 2}",
        ]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        if not self.process.stdout.readline().startswith("ready"):
            raise SystemExit("the cluster did not start")

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port + 1}{path}", timeout=10) as answer:
            return answer.read().decode()

    def moves(self):
        balance = json.loads(self.get("/debug/cluster"))["balance"]
        return [] if balance is None else balance["moves"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(timeout=60)


def bench(args, data, slo, out):
    command = [
        args.baton, "bench", "serve", "--url", f"http://127.0.0.1:{args.port}", "--workload", "mooncake", "--data", data,
        "--slo", slo, "--timeout", "120s", "--seed", "1", "--lag-limit", "1s", "--quiet", "--out", out,
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with open(out) as file:
        return json.load(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--baton", default="target/release/baton")
    parser.add_argument("--port", type=int, default=18000, help="the first of three ports")
    parser.add_argument("--waves", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slo", default="ttft=5s,tbt.mean=18ms")
    parser.add_argument("--constant", type=float, metavar="SECONDS", help="a constant load for this long")
    parser.add_argument("--for-ms", type=int, help="balance.for_ms")
    parser.add_argument("--pause-ms", type=int, help="balance.pause_ms")
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS), choices=CLUSTERS)
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()
    phases = [(HALF_S, LONG_PROMPTS), (HALF_S, LONG_ANSWERS)] * args.waves
    if args.constant:
        phases, args.clusters = [(args.constant, CONSTANT)], ["balance"]
    balance = {"enabled": "true", "for_ms": args.for_ms, "pause_ms": args.pause_ms}
    balance = {key: value for key, value in balance.items() if value is not None}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "wave.jsonl")
        print(f"{trace(data, phases, args.seed)} requests in {sum(phase[0] for phase in phases):.0f} s")
        for name in args.clusters:
            with Cluster(args, name, balance) as cluster:
                report = bench(args, data, args.slo, os.path.join(folder, f"{name}.json"))
                results[name] = {"report": report, "moves": cluster.moves()}
            print(name, json.dumps(summary(report)), flush=True)
            for move in results[name]["moves"]:
                print("   ", move["why"], "->", move["outcome"])
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file)


def summary(report):
    good = report["attainment"]
    return {
        "good_share": round(good["share"], 3), "good": good["good"], "sent": good["sent"], "held": good["held"],
        "goodput_per_s": round(report["rates"]["goodput_per_s"], 3), "failed": report["requests"]["failed"],
    }


if __name__ == "__main__":
    main()
