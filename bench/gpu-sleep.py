#!/usr/bin/env python3
"""Tests sleep and wake of GPUs with real processes: KV over cuda-ipc before and after, and two nodes that share one GPU.

Usage: bench/gpu-sleep.py BATON OUT.json     two GPUs, CUDA's libraries on the loader's path, no packages

First a prefill and a decode node have one GPU each. Both sleep and wake in turn, the memory in nvidia-smi goes down and
up, and the same prompts get the same tokens over the same connector. Then two nodes each use most of one GPU: the second
starts while the first sleeps, the first cannot wake beside it and reports the sizes, and wakes when the second sleeps.
All nodes are deterministic, because a cached prompt is computed in other shapes than a new one.
"""
import json, os, random, signal, subprocess, sys, tempfile, time, urllib.error, urllib.request

BATON, OUT = sys.argv[1], sys.argv[2]
SHAPE = os.environ.get("SHAPE", "bench/shapes/llama-3.2-1b")
KV = os.environ.get("KV", "20GiB")
MOST = os.environ.get("MOST", "90GiB")  # more than half of one GPU
ROUTER, LOGS = "http://127.0.0.1:8000", tempfile.mkdtemp(prefix="gpu-sleep-")
WITHIN, READY_WITHIN = 60, 120
# Every token must be the same, whatever is cached.
NODE = {"BATON_EXPERT__MODEL__LOAD_FORMAT": "dummy", "BATON_MODEL__DETERMINISTIC": "true"}
report = {"command": " ".join(sys.argv), "shape": SHAPE, "checks": {}, "naps": [], "used_mib": []}


def call(url, body=None, method=None):
    """Sends a request; returns status and JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=WITHIN) as answer:
            return answer.status, json.loads(answer.read() or "null")
    except urllib.error.HTTPError as refused:
        return refused.code, json.loads(refused.read() or "null")


def check(name, holds, what=None):
    report["checks"][name] = {"holds": bool(holds), "what": what}
    print("ok " if holds else "WRONG", name, "" if holds else what, file=sys.stderr, flush=True)


def used():
    """Used MiB of each GPU, by all processes."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    mib = [int(line) for line in subprocess.run(query, capture_output=True, text=True).stdout.split()]
    report["used_mib"].append(mib)
    return mib


def prompt(seed):
    draw = random.Random(seed)
    return [draw.randrange(10, 100_000) for _ in range(draw.choice([17, 160, 700, 1500]))]


def ask(seed, router=ROUTER):
    model = call(router + "/v1/models")[1]["data"][0]["id"]
    status, body = call(router + "/v1/completions", {"model": model, "prompt": prompt(seed), "max_tokens": 48,
                        "temperature": 0, "ignore_eos": True, "return_token_ids": True})
    return body["choices"][0]["token_ids"] if status == 200 else (status, body["error"]["code"])


def nodes(router=ROUTER):
    return {node["id"]: node for node in call(router + "/debug/cluster")[1]["nodes"]}


def until(what, look, within=READY_WITHIN):
    start = time.monotonic()
    while time.monotonic() - start < within:
        try:
            if look():
                return
        except (OSError, KeyError):
            pass
        time.sleep(0.1)
    raise SystemExit(f"waited {within} s for {what}; logs: {LOGS}")


def baton(*words):
    done = subprocess.run([BATON, *words], capture_output=True, text=True, timeout=WITHIN)
    return done.returncode, (done.stdout + done.stderr).strip()


def start(name, words, **env):
    log = open(os.path.join(LOGS, name), "w")
    env = {**os.environ, "BATON_LOG__LEVEL": "info", **env}
    return subprocess.Popen([BATON, *words], env=env, stdout=log, stderr=log)


def stop(process):
    process.send_signal(signal.SIGTERM)
    return process.wait(timeout=60)


def nap(node, admin, gpu):
    """Lets a node sleep and wake by the command line."""
    before = used()
    asleep = baton("sleep", node)
    time.sleep(1)  # the peer releases its mappings
    while_asleep = used()
    awake = baton("wake", f"http://{admin}")
    report["naps"].append({"node": node, "sleep": asleep, "wake": awake,
                           "used_mib": [before[gpu], while_asleep[gpu], used()[gpu]]})
    check(f"{node} sleeps and wakes", asleep[0] == 0 and awake[0] == 0, (asleep, awake))
    kv_mib = int(KV.removesuffix("GiB")) * 1024
    check(f"the GPU of {node} is given back", before[gpu] - while_asleep[gpu] > 0.95 * kv_mib, report["naps"][-1])


def in_turn():
    """Tests a prefill and a decode node."""
    up = start("up", ["up", "--model", SHAPE, "--device", "cuda:0,cuda:1", "--kv-memory", KV, "--connector", "cuda-ipc"], **NODE)
    until("the cluster", lambda: all(n["state"] == "ready" for n in nodes().values()) and len(nodes()) == 2)
    expected = [ask(seed) for seed in range(6)]
    admins = {name: node["admin"] for name, node in nodes().items()}
    for node, gpu in [("decode-0", 1), ("prefill-0", 0), ("decode-0", 1)]:
        nap(node, admins[node], gpu)
        until(f"{node} to be back", lambda: len(nodes()) == 2 and nodes()[node]["state"] == "ready", 20)
        found = [ask(seed) for seed in range(6)]
        check(f"the same tokens after {node} slept ({len(report['naps'])})", found == expected, (found, expected))
    page = urllib.request.urlopen(ROUTER + "/metrics").read().decode()
    arrived = [line for line in page.splitlines() if "kv_arrived_bytes_total{" in line]
    check("KV went over cuda-ipc", len(arrived) == 1 and "cuda-ipc" in arrived[0], arrived)
    check("it stops as it should", stop(up) == 0)


def sharing():
    """Tests two nodes that each use most of one GPU."""
    router = start("router", ["router"])
    node = lambda name: start(name, ["both"], BATON_NODE__ID=name, BATON_MODEL__PATH=SHAPE, BATON_MODEL__DEVICE="cuda:0",
                              BATON_MODEL__KV_MEMORY=MOST, BATON_TRANSFER__CONNECTORS='["tcp"]', **NODE)
    until("the router", lambda: nodes() == {})
    first = node("first")
    until("the first node", lambda: nodes()["first"]["state"] == "ready")
    expected = [ask(seed) for seed in range(4)]
    admin = "http://" + nodes()["first"]["admin"]
    check("the first sleeps", baton("sleep", "first")[0] == 0)
    second = node("second")
    until("the second node", lambda: nodes()["second"]["state"] == "ready")
    check("the second serves on the same GPU", [ask(seed) for seed in range(4)] == expected)
    refused = call(admin + "/wake", method="POST")
    said = (refused[1].get("error") or {}).get("message", "")
    check("the first cannot wake beside it", refused[0] == 503 and "MiB of KV =" in said, refused)
    report["refused"] = refused
    check("the second sleeps", baton("sleep", "second")[0] == 0)
    woken = call(admin + "/wake", method="POST")
    check("then the first wakes", woken[0] == 200, woken)
    until("the first to be back", lambda: nodes()["first"]["state"] == "ready", 20)
    check("and says what it said", [ask(seed) for seed in range(4)] == expected)
    check("asleep, it stops at once", stop(second) == 0)
    check("awake, it stops", stop(first) == 0)
    stop(router)


try:
    in_turn()
    sharing()
finally:
    report["ok"] = bool(report["checks"]) and all(check["holds"] for check in report["checks"].values())
    json.dump(report, open(OUT, "w"), indent=2)
    for name in sorted(os.listdir(LOGS)) if not report["ok"] else []:
        text = open(os.path.join(LOGS, name)).read()
        print(f"--- {name}\n{text[-3000:]}", file=sys.stderr)
sys.exit(0 if report["ok"] else 1)
