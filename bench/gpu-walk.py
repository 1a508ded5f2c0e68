#!/usr/bin/env python3
"""Tests requests between two GPUs with real processes: equal tokens, cancelled requests, killed and stopped nodes.

Usage: bench/gpu-walk.py BATON OUT.json [CONNECTOR...]     two GPUs, CUDA's libraries on the loader's path, no packages

Each connector gets a new prefill node on the first GPU and a new decode node on the second. Compared requests run one at
a time, so that both sides compute in the same shapes, and their prompts are new. The reference is one node on the first
GPU that does both.
Streams of a dead node continue in other shapes. There a token may differ if the reference's lead between its two best is
under NEAR, and another text follows. With EXACT=1 all nodes are deterministic, and every token must equal the reference.
TP="2 1" gives prefill nodes two GPUs and decode nodes one, beginning with those of DEVICES="cuda:0 cuda:2". The reference
has the ranks of decode nodes. If the two numbers differ, sums differ too, and all tokens are compared like those of
continued streams.
PROCESSES="2 1" gives prefill nodes two processes with a pipeline stage each, and decode nodes one: the first stage runs on
the other node's GPU. The norm after a stage's last layer is another kernel than within a model, so without EXACT all
tokens are compared like those of continued streams.
NODES='{"BATON_MODEL__KV_DTYPE": "fp8"}' adds settings for all nodes.
"""
import json, os, random, signal, subprocess, sys, tempfile, threading, time, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor

BATON, OUT, CONNECTORS = sys.argv[1], sys.argv[2], sys.argv[3:] or ["cuda-ipc", "nccl", "shm", "tcp"]
SHAPE = os.environ.get("SHAPE", "bench/shapes/llama-3.2-1b")
HTTP, LOGS = "http://127.0.0.1:8000", tempfile.mkdtemp(prefix="gpu-walk-")
DEVICES = os.environ.get("DEVICES", "cuda:0 cuda:1").split()
TP = os.environ.get("TP", "1 1").split()
PROCESSES = [int(n) for n in os.environ.get("PROCESSES", "1 1").split()]
NODES = json.loads(os.environ.get("NODES", "{}"))
VOCABULARY = int(os.environ.get("VOCABULARY", 100_000))
WITHIN, READY_WITHIN = 30, 150
EXACT = bool(os.environ.get("EXACT"))
NEAR, LONG = 0.0 if EXACT else 0.3, 600


def fetch(path, body=None, timeout=WITHIN, **headers):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(HTTP + path, data, {"content-type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return answer.read().decode()


def prompt(seed):
    draw = random.Random(seed)
    return [draw.randrange(10, VOCABULARY) for _ in range(draw.choice([17, 160, 700, 1500, 3000]))]


def model():
    return json.loads(fetch("/v1/models"))["data"][0]["id"]


def ask(seed, tokens=48, timeout=WITHIN):
    """The tokens, or the code of the error."""
    deadline = {"x-baton-timeout-ms": str(int(timeout * 1000))}
    try:
        body = {"model": model(), "prompt": prompt(seed), "max_tokens": tokens, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True}
        return json.loads(fetch("/v1/completions", body, timeout + 3, **deadline))["choices"][0]["token_ids"]
    except urllib.error.HTTPError as refused:
        return "refused: " + json.loads(refused.read() or "{}").get("error", {}).get("code", str(refused.code))
    except Exception as lost:
        return f"lost: {type(lost).__name__}"


def ask_with_leads(seed, tokens=LONG):
    """The tokens, and the lead of each over the next best one."""
    body = {"model": model(), "prompt": prompt(seed), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "logprobs": 2}
    choice = json.loads(fetch("/v1/completions", body))["choices"][0]
    best = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
    return choice["token_ids"], [values[0] - values[1] if len(values) > 1 else 0.0 for values in best]


def agree(reference, seen):
    """Whether two answers are equal, or first differ where the reference's lead is small."""
    wanted, leads = reference
    if isinstance(seen, str) or len(seen) != len(wanted):
        return False
    first = next((n for n in range(len(wanted)) if wanted[n] != seen[n]), None)
    return first is None or ((TP[0] != TP[1] or PROCESSES != [1, 1]) and leads[first] < NEAR)


def until(what, look, within=WITHIN):
    end = time.time() + within
    while time.time() < end:
        try:
            if look():
                return
        except (OSError, ValueError, KeyError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"not within {within} s: {what}")


class Cluster:
    def __init__(self, nodes, connector=None):
        self.connector, self.nodes, self.ranks, self.others = connector, {}, {}, {}
        settings = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        settings["BATON_LOG__LEVEL"] = "info"
        self.router = self.spawn("router", settings)
        for port, (role, device) in enumerate(nodes, 7200):
            of_node = {**settings, "BATON_NODE__ID": role, "BATON_NODE__LISTEN": f"127.0.0.1:{port}",
                       "BATON_TRANSFER__LISTEN": f"127.0.0.1:{port + 50}", "BATON_MODEL__PATH": SHAPE,
                       "BATON_EXPERT__MODEL__LOAD_FORMAT": "dummy", "BATON_MODEL__DEVICE": device,
                       "BATON_MODEL__TP": TP[0] if role.startswith("prefill") else TP[1],
                       "BATON_MODEL__KV_MEMORY": "4GiB", "BATON_EXPERT__SCHEDULER__STEP_TOKENS_MAX": "4096", **NODES}
            if EXACT:
                of_node["BATON_MODEL__DETERMINISTIC"] = "true"
            if connector:
                of_node["BATON_TRANSFER__CONNECTORS"] = json.dumps([connector])
            n_processes = PROCESSES[0] if role.startswith("prefill") else PROCESSES[1] if role.startswith("decode") else 1
            if n_processes > 1:
                join = f"127.0.0.1:{port + 100}"
                of_node |= {"BATON_EXPERT__MODEL__PROCESSES": str(n_processes), "BATON_EXPERT__MODEL__JOIN": join}
                other = {**of_node, "BATON_TRANSFER__LISTEN": "127.0.0.1:0", "BATON_RANK_OF": join,
                         "BATON_MODEL__DEVICE": DEVICES[1 if role.startswith("prefill") else 0]}
                self.ranks[role] = [{**other, "BATON_RANK_PLACE": str(place)} for place in range(n_processes - 1)]
            self.nodes[role] = (of_node, self.spawn(role, of_node))
            self.start_ranks(role)
        self.ready()

    def start_ranks(self, role):
        """Starts the other processes of a node, which end with it."""
        self.others[role] = [self.spawn(f"rank-{nth}-{role}", of_rank) for nth, of_rank in enumerate(self.ranks.get(role, []))]

    def spawn(self, name, settings):
        log = open(f"{LOGS}/{self.connector}-{name}.log", "a")
        return subprocess.Popen([BATON, name.split("-")[0]], env=settings, stdout=log, stderr=log)

    def ready(self):
        def all_ready():
            known = {node["id"]: node for node in json.loads(fetch("/debug/cluster", timeout=2))["nodes"]}
            is_ready = lambda role, pid: known[role]["state"] == "ready" and known[role]["pid"] == pid
            return all(is_ready(role, process.pid) for role, (_, process) in self.nodes.items())
        until("every node to be usable", all_ready, READY_WITHIN)

    def signal(self, role, which):
        first = role.removesuffix("'s first stage")
        process = self.others[first][0] if first != role else self.nodes[role][1]
        os.kill(process.pid, which)

    def revive(self, role):
        settings, process = self.nodes[role]
        for process in [process, *self.others[role]]:
            process.kill(), process.wait()
        self.nodes[role] = (settings, self.spawn(role, settings))
        self.start_ranks(role)
        self.ready()

    def baseline(self):
        def quiet():
            nodes = json.loads(fetch("/debug/kv", timeout=2))["nodes"]
            return len(nodes) == len(self.nodes) and all(node["leased"] == node["quarantined"] == 0 for node in nodes)
        until("no block leased or quarantined", quiet)

    def stop(self):
        for process in [*(process for _, process in self.nodes.values()), *sum(self.others.values(), [])]:
            process.kill(), process.wait()
        self.router.kill(), self.router.wait()


def disturbed(cluster, seeds, disturb):
    """Runs sixteen requests and a fault among them; returns how each ended."""
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask, seed, 200, 20) for seed in seeds]
        time.sleep(0.3)
        disturb()
        ended = [answer.result() for answer in asked]
    words = {}
    for answer in ended:
        word = answer if isinstance(answer, str) else "all tokens" if len(answer) == 200 else "too few tokens"
        words[word] = words.get(word, 0) + 1
    assert not any("too few" in word or word.startswith("lost: Timeout") for word in words), words
    return words


def cut(connector, long):
    """Two nodes of each kind and sixteen streams: one decode node dies, then one prefill node, while all streams run."""
    cluster = Cluster([("prefill-0", DEVICES[0]), ("decode-0", DEVICES[1]), ("prefill-1", DEVICES[0]), ("decode-1", DEVICES[1])], connector)
    try:
        with ThreadPoolExecutor(16) as pool:
            asked = {seed: pool.submit(ask, seed, LONG) for seed in long}
            time.sleep(0.8)
            running = [n["leased"] for n in json.loads(fetch("/debug/kv"))["nodes"] if n["id"].startswith("decode")]
            cluster.signal("decode-0", signal.SIGKILL), time.sleep(0.3), cluster.signal("prefill-0", signal.SIGKILL)
            in_time = sum(not answer.done() for answer in asked.values())
            seen = {seed: answer.result() for seed, answer in asked.items()}
        continued = next(line for line in fetch("/metrics").splitlines() if line.startswith("baton_router_continuations_total"))
    finally:
        cluster.stop()
    assert all(isinstance(tokens, list) and len(tokens) == LONG for tokens in seen.values()), [a for a in seen.values() if isinstance(a, str)]
    equal, leads = 0, []
    for seed, (wanted, lead) in long.items():
        first = next((n for n in range(LONG) if wanted[n] != seen[seed][n]), None)
        equal += first is None
        leads += [] if first is None else [round(lead[first], 4)]
    assert in_time and all(lead < NEAR for lead in leads), (in_time, leads)
    return {"streams": len(seen), "running when the blows fell": in_time, "blocks of decode nodes then": running,
            "continued": continued.split()[-1], "all tokens": len(seen), "equal to the last token": equal,
            "leads where others part": sorted(leads)}


def storm(n=120):
    def one(seed):
        try:
            body = {"model": model(), "prompt": prompt(seed), "max_tokens": 200, "temperature": 0,
                    "ignore_eos": True, "stream": True}
            fetch("/v1/completions", body, timeout=0.02 + seed % 40 * 0.02)
        except Exception:
            pass
    with ThreadPoolExecutor(40) as pool:
        list(pool.map(one, range(50_000, 50_000 + n)))


def walk(connector, expected, long):
    steps, seeds = {}, iter(expected)
    def equal(n):
        pairs = [(expected[seed], ask(seed)) for seed in (next(seeds) for _ in range(n))]
        assert all(agree(*pair) for pair in pairs), [seen for wanted, seen in pairs if wanted[0] != seen][:2]
        return f"{sum(wanted[0] == seen for wanted, seen in pairs)} of {n} equal"
    def step(name, run):
        began = time.time()
        steps[name] = {"passed": False}
        outcome = run()
        steps[name] = {"passed": True, "outcome": outcome, "seconds": round(time.time() - began, 1)}
        print(connector, name, steps[name], flush=True)
    cluster = Cluster([("prefill", DEVICES[0]), ("decode", DEVICES[1])], connector)
    try:
        step("equal tokens", lambda: equal(10))
        step("the connector was used", lambda: next(
            line for line in fetch("/metrics").splitlines()
            if line.startswith(f'baton_router_kv_arrived_bytes_total{{connector="{connector}"}}')))
        step("cancel storm", lambda: (storm(), cluster.baseline()) and "120 cancelled, blocks at the baseline")
        step("equal after the storm", lambda: equal(2))
        # A node of several processes ends if one of them stands still.
        faults = [("prefill", "kill -9"), *[("decode", "SIGSTOP")] * (PROCESSES[1] == 1), ("decode", "kill -9")]
        faults += [(f"{role}'s first stage", "kill -9") for role, n in zip(("prefill", "decode"), PROCESSES) if n > 1]
        for nth, (role, what) in enumerate(faults):
            many = range(60_000 + 100 * nth, 60_016 + 100 * nth)
            def stop():
                cluster.signal(role, signal.SIGSTOP), time.sleep(7), cluster.signal(role, signal.SIGCONT)
            strike = stop if what == "SIGSTOP" else lambda: cluster.signal(role, signal.SIGKILL)
            step(f"{what} of the {role} node", lambda: disturbed(cluster, many, strike))
            if what == "kill -9":
                node = role.removesuffix("'s first stage")
                step(f"the {role} node is back at its address", lambda: cluster.revive(node) or "ready")
            step(f"baseline after {what} of the {role} node", lambda: (cluster.ready(), cluster.baseline()) and "no block held")
            step(f"equal after {what} of the {role} node", lambda: equal(3))
        cluster.stop()
        step("tokens of streams that were cut", lambda: cut(connector, long))
    except Exception as error:
        steps["error"] = {"passed": False, "outcome": f"{type(error).__name__}: {error}"}
        print(connector, steps["error"], flush=True)
        for role in ("router", "prefill", "rank-0-prefill", "decode", "rank-0-decode"):
            print(subprocess.run(["tail", "-n", "12", f"{LOGS}/{connector}-{role}.log"], capture_output=True, text=True).stdout[-2500:])
    finally:
        cluster.stop()
    return steps


def main():
    began = time.time()
    colocated = Cluster([("both", DEVICES[1])])
    expected = {seed: ask_with_leads(seed, 48) for seed in range(1000, 1024)}
    long = {seed: ask_with_leads(seed) for seed in range(70_000, 70_016)}
    colocated.stop()
    assert all(len(tokens) == 48 for tokens, _ in expected.values()), expected
    print(f"reference after {time.time() - began:.0f} s", flush=True)
    steps = {connector: walk(connector, expected, long) for connector in CONNECTORS}
    passed = all(step["passed"] for of in steps.values() for step in of.values())
    with open(OUT, "w") as out:
        json.dump({"command": ("EXACT=1 " if EXACT else "") + "bench/gpu-walk.py", "shape": SHAPE, "tp": TP, "processes": PROCESSES, "nodes": NODES, "passed": passed, "connectors": steps}, out, indent=1)
        out.write("\n")
    print("all passed" if passed else "FAILED")
    sys.exit(0 if passed else 1)


main()
