#!/usr/bin/env python3
"""Measures how much longer a GPU takes for a prompt while its KV leaves over cuda-ipc, by the GPU's own events.

Usage: bench/gpu-disturbance.py BATON OUT.json [PROMPTS]     two GPUs, CUDA's libraries on the loader's path, no packages

Clusters on the same first GPU get prompts in turns, one at a time: a prefill node that sends to a decode node on the
second GPU, and a node that does both and sends nothing. The times from the first layer's KV to the last layer's KV are
compared pair by pair, because the first layer has nothing to send yet, and other work follows the last layer.
MULTIPROCESSORS="16 64" compares senders with these values of expert.transfer.gpu_multiprocessors; 0 is the default.
"""
import json, os, random, re, statistics, subprocess, sys, tempfile, time, urllib.request

BATON, OUT, PROMPTS = sys.argv[1], sys.argv[2], int((sys.argv[3:] or [24])[0])
SHAPE, TOKENS = os.environ.get("SHAPE", "bench/shapes/llama-3.1-8b"), int(os.environ.get("TOKENS", 8192))
REST = 0.5  # seconds between prompts: after work a GPU is slowed down by its power limit
LOGS = tempfile.mkdtemp(prefix="gpu-disturbance-")
SENDERS = os.environ.get("MULTIPROCESSORS", "0").split()
KEEPS = "keeps"


def fetch(port, path, body=None, timeout=60):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read())


def port_of(name):
    return 8000 + [KEEPS, *SENDERS].index(name)


def start(name):
    nodes = [("both", "cuda:0")] if name == KEEPS else [("prefill", "cuda:0"), ("decode", "cuda:1")]
    port = port_of(name)
    registry = f"127.0.0.1:{port + 42051}"
    shared = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
    shared |= {"BATON_LOG__FORMAT": "json", "BATON_LOG__LEVEL": "warn,walk=trace"}
    router = shared | {"BATON_ROUTER__HTTP": f"127.0.0.1:{port}", "BATON_ROUTER__GRPC": registry}
    processes = [spawn(f"{name}-router", "router", router)]
    for role, device in nodes:
        node = shared | {"BATON_REGISTRY__URL": f"embedded://{registry}", "BATON_MODEL__PATH": SHAPE,
                         "BATON_EXPERT__MODEL__LOAD_FORMAT": "dummy", "BATON_MODEL__DEVICE": device, "BATON_MODEL__KV_MEMORY": "8GiB",
                         "BATON_EXPERT__SCHEDULER__STEP_TOKENS_MAX": str(TOKENS)}
        if name != KEEPS:
            node |= {"BATON_TRANSFER__CONNECTORS": '["cuda-ipc"]', "BATON_EXPERT__TRANSFER__GPU_MULTIPROCESSORS": name}
        processes.append(spawn(f"{name}-{role}", role, node))
    end = time.time() + 150
    while time.time() < end:
        try:
            ready = [node for node in fetch(port, "/debug/cluster", timeout=2)["nodes"] if node["state"] == "ready"]
            if len(ready) == len(nodes):
                return processes
        except (OSError, ValueError, KeyError):
            pass
        time.sleep(0.2)
    raise SystemExit(f"{name}: not ready within 150 s; logs are in {LOGS}")


def spawn(log, role, settings):
    out = open(f"{LOGS}/{log}.log", "a")
    return subprocess.Popen([BATON, role], env=settings, stdout=out, stderr=out)


def ask(port, seed):
    draw = random.Random(seed)
    model = fetch(port, "/v1/models")["data"][0]["id"]
    body = {"model": model, "prompt": [draw.randrange(10, 100_000) for _ in range(TOKENS)], "max_tokens": 2,
            "temperature": 0, "ignore_eos": True}
    fetch(port, "/v1/completions", body)


def prompts(log):
    """The time from the first layer's KV to the last layer's, for each step that was a whole prompt."""
    spans = []
    for line in open(f"{LOGS}/{log}.log", errors="replace"):
        found = re.search(r'"layers_ms":"\[(.*?)\]"', line)
        layers = [float(number) for number in found.group(1).split(",")] if found and found.group(1) else []
        if layers and layers[-1] > 20:  # milliseconds: leaves out decode steps and short chunks
            spans.append(layers[-1] - layers[0])
    return spans


def compared(name, sends, keeps):
    assert len(sends) == len(keeps) == PROMPTS, (name, len(sends), len(keeps), LOGS)
    ratios = [a / b for a, b in zip(sends, keeps)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    report = {"gpu_multiprocessors": int(name), "sends_ms": statistics.median(sends), "keeps_ms": statistics.median(keeps),
              "ratio": {"median": middle, "quartiles": [low, high]}, "all_sends_ms": sends, "all_keeps_ms": keeps}
    print(f"{PROMPTS} prompts of {TOKENS}, gpu_multiprocessors {name}: {report['sends_ms']:.2f} ms where KV leaves, "
          f"{report['keeps_ms']:.2f} where it stays; ratio {middle:.4f} ({low:.4f} to {high:.4f})")
    return report


def main():
    names = [KEEPS, *SENDERS]
    processes = [process for name in names for process in start(name)]
    try:
        for nth in range(PROMPTS + 2):
            for name in names if nth % 2 else reversed(names):
                ask(port_of(name), 10_000 + len(names) * nth + names.index(name))
                time.sleep(REST)
    finally:
        for process in processes:
            process.kill(), process.wait()
    # The first ones create graphs, links and connections.
    keeps = prompts(f"{KEEPS}-both")[2:]
    senders = [compared(name, prompts(f"{name}-prefill")[2:], keeps) for name in SENDERS]
    with open(OUT, "w") as out:
        json.dump({"command": "bench/gpu-disturbance.py", "shape": SHAPE, "tokens": TOKENS, "prompts": PROMPTS, "senders": senders},
                  out, indent=1)
        out.write("\n")


main()
