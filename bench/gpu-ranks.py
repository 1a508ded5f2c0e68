#!/usr/bin/env python3
"""Tests nodes whose ranks are in several processes, on GPUs: tokens near those of one GPU, and lost processes.

Usage: bench/gpu-ranks.py BATON OUT.json     one GPU or two, CUDA's libraries and NCCL on the loader's path, no packages

DEVICES="cuda:0 cuda:1" gives each process of a pair its own GPU. By default both are on one, where NCCL takes each process
for another machine (NCCL_HOSTID) and sends over sockets; times mean nothing then. DEVICES=cpu tests processors.
Sums in bf16 of two ranks differ from those of one GPU, so a token may differ where the lead of the best one is under NEAR.
"""
import json, os, random, signal, subprocess, sys, tempfile, time, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor

BATON, OUT = sys.argv[1], sys.argv[2]
MODELS = os.environ.get("MODELS", "qwen3 mixtral deepseek-v2 qwen3-fp8").split()
DEVICES = os.environ.get("DEVICES", "cuda:0").split()
DEMO, TINY = "models/demo", "engine/tests/models/"
HTTP, LOGS = "http://127.0.0.1:8000", tempfile.mkdtemp(prefix="gpu-ranks-")
NEAR, LENGTHS, WITHIN = 0.3, [5, 17, 40, 90, 130], 60
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    with opener.open(urllib.request.Request(HTTP + path, data, {"content-type": "application/json"}), timeout=WITHIN) as answer:
        return json.load(answer)


def ask(model, length, tokens=20):
    """The tokens of an answer, the log-probability of each, and its lead over the next best one."""
    with open(f"{model}/config.json") as config:
        vocabulary = json.load(config)["vocab_size"]
    draw = random.Random(length)
    prompt = [draw.randrange(3, vocabulary) for _ in range(length)]
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 2}
    choice = fetch("/v1/completions", body)["choices"][0]
    best = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
    leads = [values[0] - values[1] if len(values) > 1 else 0.0 for values in best]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], leads


def together(model, lengths, tokens=20):
    with ThreadPoolExecutor(len(lengths)) as pool:
        return list(pool.map(lambda length: ask(model, length, tokens), lengths))


def compared(reference, seen):
    """How many tokens are equal before two answers part, and the leads where they do."""
    equal, total, apart, leads = 0, 0, 0.0, []
    for (wanted, logprobs, lead), (tokens, others, _) in zip(reference, seen):
        first = next((n for n in range(len(wanted)) if wanted[n] != tokens[n]), len(wanted))
        equal, total = equal + first, total + min(first + 1, len(wanted))
        leads += [round(lead[first], 3)] if first < len(wanted) else []
        apart = max([apart, *(abs(ours - theirs) for ours, theirs in zip(logprobs[:first], others))])
    assert all(lead < NEAR for lead in leads), leads
    return {"equal": equal, "of": total, "log-probabilities within": round(apart, 4), "leads where others part": leads}


class Cluster:
    """A router and nodes. A node is a name with its role, and its numbers of stages and processes."""

    def __init__(self, model, nodes, **settings):
        self.processes = {}
        self.settings = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        self.settings |= {"BATON_MODEL__PATH": model, "BATON_LOG__LEVEL": "info"}
        sockets = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"} if len(DEVICES) == 1 else {}
        of_nodes = {**sockets, "BATON_MODEL__KV_MEMORY": "256MiB", "BATON_EXPERT__SCHEDULER__STEP_TOKENS_MAX": "64",
                    "BATON_EXPERT__SCHEDULER__SEQUENCES_MAX": "16", "BATON_TRANSFER__CONNECTORS": '["tcp"]', **settings}
        self.ids = [name for name, *_ in nodes]
        self.spawn("router", "router", {})
        for nth, (name, role, stages, processes) in enumerate(nodes):
            of_node = {**of_nodes, "BATON_NODE__ID": name}
            if processes > 1:
                join = f"127.0.0.1:{7400 + nth}"
                of_node |= {"BATON_EXPERT__MODEL__PROCESSES": str(processes), "BATON_EXPERT__MODEL__STAGES": str(stages),
                            "BATON_MODEL__TP": str(processes // stages), "BATON_EXPERT__MODEL__JOIN": join}
            self.spawn(name, role, of_node, 0)
            for place in range(processes - 1):
                of_rank = {**of_node, "BATON_RANK_OF": join, "BATON_RANK_PLACE": str(place)}
                self.spawn(f"{name}'s {place}", "rank", of_rank, place + 1)

    def spawn(self, name, role, settings, nth=0):
        device = {} if role == "router" else {"BATON_MODEL__DEVICE": DEVICES[nth % len(DEVICES)]}
        apart = {"NCCL_HOSTID": name} if len(DEVICES) == 1 else {}
        log = open(f"{LOGS}/{name}.log", "w")
        self.processes[name] = subprocess.Popen([BATON, role], env={**self.settings, **device, **apart, **settings}, stdout=log, stderr=log)

    def ready(self):
        end = time.time() + WITHIN
        while time.time() < end:
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            assert not ended, f"{ended} ended: {log_of(ended[0])}"
            try:
                nodes = {node["id"]: node["state"] for node in fetch("/debug/cluster")["nodes"]}
                if all(nodes.get(name) == "ready" for name in self.ids):
                    return self
            except OSError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not ready within {WITHIN} s")

    def wait(self, name, within=20):
        """How a process has ended, and after how many seconds."""
        began = time.time()
        return {"code": self.processes[name].wait(within), "seconds": round(time.time() - began, 1)}

    def __enter__(self):
        return self.ready()

    def __exit__(self, *_):
        self.processes.pop("router").kill()
        for process in self.processes.values():
            process.poll() is None and process.terminate()
        try:
            self.codes = {name: process.wait(20) for name, process in self.processes.items()}
        finally:
            for process in self.processes.values():
                process.kill()


def log_of(name):
    return open(f"{LOGS}/{name}.log").read().strip().split("\n")[-1]


def answers(model, nodes, tokens=20, **settings):
    with Cluster(model, nodes, **settings) as cluster:
        seen = together(model, LENGTHS, tokens)
        alone = [ask(model, length, tokens) for length in LENGTHS[:2]]
    assert all(code == 0 for code in cluster.codes.values()), cluster.codes
    return seen, alone


ONE, TWO = [("one", "both", 1, 1)], [("two", "both", 1, 2)]


def lost(victim, which):
    """Eight streams on one node of two processes and one other, and a process that is killed or stands still."""
    with Cluster(DEMO, [*TWO, ("spare", "both", 1, 1)]) as cluster, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, DEMO, 20 + nth, 200) for nth in range(8)]
        time.sleep(1.5)
        cluster.processes[victim].send_signal(which)
        other = ({"two", "two's 0"} - {victim}).pop()
        outcome = {"the other process": cluster.wait(other), "complete": sum(len(answer.result()[0]) == 200 for answer in asked)}
        if which == signal.SIGSTOP:
            cluster.processes[victim].send_signal(signal.SIGCONT)
            outcome["itself, after SIGCONT"] = cluster.wait(victim)
        assert outcome["complete"] == 8, outcome
        return outcome


def drained():
    """A rank with SIGTERM lets the node finish its answers."""
    with Cluster(DEMO, TWO) as cluster, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, DEMO, length, 100) for length in (20, 30)]
        time.sleep(1)
        cluster.processes["two's 0"].terminate()
        complete = sum(len(answer.result()[0]) == 100 for answer in asked)
        outcome = {"complete": complete, **{name: cluster.wait(name) for name in ("two", "two's 0")}}
        assert complete == 2 and all(outcome[name]["code"] == 0 for name in ("two", "two's 0")), outcome
        return outcome


def refused():
    """NCCL without a network: both processes end, with its words."""
    cluster = Cluster(DEMO, TWO, NCCL_SOCKET_IFNAME="=none")
    outcome = {name: {**cluster.wait(name), "says": log_of(name)[:300]} for name in ("two", "two's 0")}
    cluster.processes["router"].kill()
    assert all(of["code"] for of in outcome.values()), outcome
    return outcome


def main():
    steps, failed = {}, False

    def step(name, run):
        nonlocal failed
        try:
            steps[name] = {"passed": True, "outcome": run()}
        except Exception as error:
            steps[name], failed = {"passed": False, "outcome": f"{type(error).__name__}: {error}"}, True
        print(name, steps[name], flush=True)

    for model in MODELS:
        step(model, lambda: compared(answers(TINY + model, ONE)[0], answers(TINY + model, TWO)[0]))
    one = answers(DEMO, ONE)[0]
    for name, nodes in {
        "one stage": TWO,
        "two stages of two ranks": [("four", "both", 2, 4)],
        "two ranks to two": [("sends", "prefill", 1, 2), ("takes", "decode", 1, 2)],
        "two ranks to one": [("sends", "prefill", 1, 2), ("takes", "decode", 1, 1)],
    }.items():
        step(f"demo, {name}", lambda: compared(one, answers(DEMO, nodes)[0]))

    def exact():
        seen, alone = answers(TINY + "qwen3", TWO, BATON_MODEL__DETERMINISTIC="true")
        assert alone == seen[:2], (alone, seen[:2])
        return "alone and together to the last bit"

    step("deterministic", exact)
    step("kill -9 of a rank", lambda: lost("two's 0", signal.SIGKILL))
    step("SIGSTOP of a rank", lambda: lost("two's 0", signal.SIGSTOP))
    step("kill -9 of the head", lambda: lost("two", signal.SIGKILL))
    step("SIGTERM of a rank", drained)
    if DEVICES != ["cpu"]:
        step("no network for NCCL", refused)
    with open(OUT, "w") as out:
        json.dump({"command": "bench/gpu-ranks.py", "devices": DEVICES, "passed": not failed, "steps": steps}, out, indent=1)
        out.write("\n")
    print("FAILED" if failed else "all passed")
    sys.exit(failed)


main()
