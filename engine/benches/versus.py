"""This engine against the machine, against the best matrix library, and against llama.cpp: in turns, in one run.

    pip install numpy torch gguf llama-cpp-python
    cargo bench -p baton-engine --bench cpu --no-run          # prints where the executable is
    python3 versus.py EXECUTABLE ../../bench/shapes/qwen3-0.6b 2 5 > versus.json

Each round measures everyone once, so that whatever else the machine does befalls all of them. Printed are each one's
best round and the median, and ratios of the same round. A prefix such as `chrt -f 10`, given as TEST_PREFIX, goes in
front of every command.
"""

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
EXECUTABLE, SHAPE, THREADS, ROUNDS = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
PREFIX = os.environ.get("TEST_PREFIX", "").split()
N_PROMPT = 512
UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def output_of(command):
    done = subprocess.run(PREFIX + command, capture_output=True, text=True, env=os.environ | {"THREADS": THREADS})
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def ours(arithmetic):
    text = output_of([EXECUTABLE, "--bench", f"bf16 weights, {arithmetic}/", "--measurement-time", "2",
                      "--warm-up-time", "0.5"])
    found = {}
    for name in ("prefill 512", "decode 1", "plain read"):
        # A short name stands on the line of its times.
        times = re.search(re.escape(f"{arithmetic}/{name}") + r"\s+time:\s+\[\S+ \S+ (\S+) (\S+)", text)
        found[name] = float(times[1]) * UNITS[times[2]]
    found["share of a plain read"] = int(re.search(f"bf16 weights, {arithmetic}: decode reads at (\\d+) %", text)[1]) / 100
    return found


def theirs():
    text = output_of([sys.executable, str(HERE / "reference.py"), SHAPE, THREADS])
    rates = lambda name: [int(rate) for rate in re.findall(re.escape(name) + r" (\d+) GFLOP/s", text)]
    times = re.search(r"llama.cpp (\S+) bf16: prefill of \d+ (\S+) ms.*decode (\S+) ms", text)
    return {"numpy f32": rates("numpy f32"), "torch f32": rates("torch torch.float32"),
            "torch bf16": rates("torch torch.bfloat16"), "llama.cpp": times[1],
            "prefill": float(times[2]) * 1e-3, "decode": float(times[3]) * 1e-3}


def prompt_gflop():
    """Products of the layers, for all tokens; the last layer's for one. With and without attention's own."""
    config = json.loads((pathlib.Path(SHAPE) / "config.json").read_text())
    hidden, dim, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    heads, kv_heads, layers = config["num_attention_heads"], config["num_key_value_heads"], config["num_hidden_layers"]
    weights = layers * (2 * hidden * heads * dim + 2 * hidden * kv_heads * dim + 3 * hidden * inner)
    products = 2 * N_PROMPT * weights + 2 * config["vocab_size"] * hidden
    attention = layers * heads * dim * 2 * 2 * N_PROMPT * (N_PROMPT + 1) / 2
    return products / 1e9, attention / 1e9


def summary(rounds):
    products, attention = prompt_gflop()
    best = lambda values: min(values)
    lines = {"prompt, GFLOP of products": products, "prompt, GFLOP of attention": attention}
    for arithmetic, library in (("bf16", ["torch bf16"]), ("f32", ["numpy f32", "torch f32"])):
        mine = [one[arithmetic] for one in rounds]
        library_best = max(statistics.mean(one["theirs"][name]) for one in rounds for name in library)
        prefill = best(one["prefill 512"] for one in mine)
        lines[arithmetic] = {
            "prefill, ms": round(1e3 * prefill, 1),
            "prefill, ms, median": round(1e3 * statistics.median(one["prefill 512"] for one in mine), 1),
            "decode, ms": round(1e3 * best(one["decode 1"] for one in mine), 2),
            "decode, ms, median": round(1e3 * statistics.median(one["decode 1"] for one in mine), 2),
            "decode / plain read, median of rounds": statistics.median(one["share of a plain read"] for one in mine),
            "best library, GFLOP/s": round(library_best),
            "prefill, products only, GFLOP/s": round(products / prefill),
            "prefill / best library, products only": round(products / prefill / library_best, 3),
            "prefill / best library, with attention": round((products + attention) / prefill / library_best, 3),
        }
    for step in ("prefill", "decode"):
        mine = "prefill 512" if step == "prefill" else "decode 1"
        lines[f"llama.cpp, {step}, ms"] = round(1e3 * best(one["theirs"][step] for one in rounds), 1)
        lines[f"{step}, times as quick as llama.cpp, of bests"] = round(
            best(one["theirs"][step] for one in rounds) / best(one["bf16"][mine] for one in rounds), 2)
        lines[f"{step}, times as quick as llama.cpp, median of rounds"] = round(
            statistics.median(one["theirs"][step] / one["bf16"][mine] for one in rounds), 2)
    return lines


def main():
    rounds = []
    for nth in range(ROUNDS):
        rounds.append({"bf16": ours("bf16"), "f32": ours("f32"), "theirs": theirs()})
        print(f"round {nth + 1} of {ROUNDS}: {rounds[-1]}", file=sys.stderr)
    print(json.dumps({"summary": summary(rounds), "rounds": rounds}, indent=1))


main()
