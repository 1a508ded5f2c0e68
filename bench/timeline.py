#!/usr/bin/env python3
"""Draws the stages of one request from the logs of a cluster on one machine.

The processes run with BATON_LOG__FORMAT=json BATON_LOG__LEVEL=warn,walk=trace, which writes a line for each mark of the
walk. The times of layers come from events of the GPUs.

Usage: bench/timeline.py OUT.svg LOG…              the request with the median hand-over gap
       bench/timeline.py OUT.svg --request ID LOG…

In a cluster with a pool, KV goes to a pool node first. That node's marks do not name the request: all of its marks from
the same time are drawn, also those of other requests.
"""
import ast
import json
import re
import sys
from datetime import datetime

ROWS = ["router", "decode: request", "decode: KV in place", "decode: steps", "prefill: request", "prefill: layers on the GPU",
        "prefill: layers to the wire", "pool: KV in and out"]
COLORS = {"wait": "#d9dee5", "work": "#4878cf", "kv": "#6acc65", "step": "#b47cc7", "own": "#d65f5f"}
WIDTH, LEFT, ROW, TOP = 1180, 190, 46, 64


def marks(paths):
    for path in paths:
        for line in open(path, errors="replace"):
            if '"target":"walk"' not in line:
                continue
            mark = json.loads(line)
            mark["at"] = datetime.fromisoformat(mark["ts"].replace("Z", "+00:00")).timestamp() * 1e3
            yield mark


# Messages of marks, as the processes log them.
PROMPT = "prompt received from the router"
ROOM_GRANTED = "KV room granted to the router"
ROOM_RESERVED = "KV room reserved on the decode node"
KV_COMPLETE = "all KV is in place"
FIRST_LAUNCH = "first engine step of the sequence launched"
LAYERS_WRITTEN = "KV of all layers written on the GPU"
LAYERS_SENT = "KV of layers handed to the connector"
PAGES_IN_PLACE = "KV pages are in place"
TOKEN = "token received for the client"
POOL_MARKS = {PAGES_IN_PLACE: "layers {layers} came", LAYERS_SENT: "layers {layers} go to the decode node"}


class Request:
    """The marks of one request, by process and message. Marks without its id are found by its transfer."""

    def __init__(self, name, all_marks):
        self.name = name
        self.own = [m for m in all_marks if m.get("request") == name]
        granted = [m for m in self.own if m["message"] == ROOM_GRANTED]
        self.transfer = granted[0]["transfer"] if granted else None
        self.kv = [m for m in all_marks if self.transfer and m.get("transfer") == self.transfer and "request" not in m]

    @property
    def through_pool(self):
        return any(mark["process"] == "pool" for mark in self.kv)

    def at(self, process, message, index=None):
        for mark in self.own:
            if (mark["process"], mark["message"]) == (process, message) and index in (None, mark.get("index")):
                return mark["at"]
        return None

    def gap(self):
        first, second = (self.at("router", TOKEN, index) for index in (0, 1))
        return None if first is None or second is None else second - first

    def is_whole(self):
        return self.gap() is not None and self.at("decode", KV_COMPLETE) and self.at("prefill", FIRST_LAUNCH)


def layers_of(mark):
    first, end = re.fullmatch(r"(\d+)\.\.(\d+)", mark["layers"]).groups()
    return int(first), int(end)


def bars(request, all_marks):
    """(row, from, to, kind, label), with milliseconds since the request was accepted."""
    zero = request.at("router", "prompt accepted")
    at = lambda *what: request.at(*what) - zero
    first, second = at("router", TOKEN, 0), at("router", TOKEN, 1)
    came, granted, whole = at("decode", PROMPT), at("decode", ROOM_GRANTED), at("decode", KV_COMPLETE)
    joined, stepped = at("decode", FIRST_LAUNCH), at("decode", "token sampled", 1)
    begun, sampled = at("prefill", FIRST_LAUNCH), at("prefill", "token sampled", 0)
    arrived = at("prefill", PROMPT)
    room = 0
    # With `prefill-first`, a decode node is asked for room when the KV is there.
    if request.at("router", ROOM_RESERVED) is not None:
        room = at("router", ROOM_RESERVED)
        yield 0, 0, room, "work", "asks for room"
    yield 0, room, first, "wait", "waits for prefill"
    yield 0, first, second, "own", "hand-over gap"
    yield 1, came, granted, "work", "reserves"
    yield 1, granted, whole, "wait", "waits for KV"
    yield 1, whole, joined, "own", "waits for a launch"
    yield 1, joined, stepped, "step", "launched, then computed"
    yield 4, arrived, begun, "wait", "queued"
    yield 4, begun, sampled, "work", "computed"
    previous = begun
    for mark in request.kv:
        when = mark["at"] - zero
        if mark["process"] == "pool":
            continue
        if mark["message"] == PAGES_IN_PLACE:
            yield 2, when - 0.25, when, "kv", f"layers {mark['layers']}, {mark['bytes'] / 2**20:.1f} MiB in place"
        elif mark["message"] == LAYERS_SENT:
            yield 6, when - 0.25, when, "kv", f"layers {mark['layers']} computed"
        elif mark["message"] == "handoff received":
            yield 2, when - 0.25, when, "own", "handoff"
    for mark in all_marks:
        when = mark["at"] - zero
        if mark["process"] == "pool" and begun <= when <= second and mark["message"] in POOL_MARKS:
            yield 7, when - 0.25, when, "kv", POOL_MARKS[mark["message"]].format(**mark)
        # Layers that go to a pool node have a transfer of their own.
        to_pool = mark["process"] == "prefill" and mark["message"] == LAYERS_SENT and mark not in request.kv
        if to_pool and request.through_pool and begun <= when <= second:
            yield 6, when - 0.25, when, "kv", f"layers {mark['layers']} computed"
        if mark["message"] == "engine step collected" and mark["process"] == "decode" and begun - 5 <= when <= second + 20:
            yield 3, when - mark["took_us"] / 1e3, when, "step", f"{mark['n_running']} sequences, {mark['took_us'] / 1e3:.2f} ms"
        # The GPU reports the time of each layer. The host reports when it collected the step with the first token.
        if mark["message"] == LAYERS_WRITTEN and mark["process"] == "prefill" and begun < when <= sampled + 5:
            layers = ast.literal_eval(mark["layers_ms"])
            start = when - layers[-1]
            previous = 0.0
            for nth, end in enumerate(layers):
                yield 5, start + previous, start + end, "work", f"layer {nth}: {end - previous:.2f} ms"
                previous = end


def panel(out, title, begin, end, top, drawn):
    scale = (WIDTH - LEFT - 20) / (end - begin)
    x = lambda ms: LEFT + (min(max(ms, begin), end) - begin) * scale
    out.append(f'<text x="{LEFT}" y="{top - 22}" font-weight="bold">{title}</text>')
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000) if (end - begin) / s <= 16)
    tick = -(-begin // step) * step
    while tick <= end:
        out.append(f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{top - 4}" y2="{top + ROW * len(ROWS)}" stroke="#e4e7eb"/>')
        out.append(f'<text x="{x(tick):.1f}" y="{top - 7}" text-anchor="middle" fill="#667">{tick:g} ms</text>')
        tick += step
    for nth, row in enumerate(ROWS):
        out.append(f'<text x="{LEFT - 8}" y="{top + nth * ROW + 20}" text-anchor="end">{row}</text>')
    labelled_to = {}
    for row, start, stop, kind, what in drawn:
        if stop < begin or start > end:
            continue
        left, width = x(start), max(x(stop) - x(start), 1.0)
        y = top + row * ROW
        out.append(f'<rect x="{left:.2f}" y="{y}" width="{width:.2f}" height="28" fill="{COLORS[kind]}" stroke="#fff" stroke-width="0.5">'
                   f'<title>{what} ({start:.2f} to {stop:.2f} ms)</title></rect>')
        label = what if row in (0, 1, 4) else ""
        text = f"{label} {stop - start:.1f} ms" if label else ""
        if text and width > 6.2 * len(text):
            ink = "#222" if kind == "wait" else "#fff"
            out.append(f'<text x="{left + 4:.1f}" y="{y + 18}" fill="{ink}">{text}</text>')
        elif text and left + 5.4 * len(text) < WIDTH and left > labelled_to.get(row, 0):
            labelled_to[row] = left + 5.4 * len(text)
            out.append(f'<text x="{left:.1f}" y="{y + 40}" fill="#444" font-size="10">{text}</text>')


def draw(request, all_marks):
    drawn = list(bars(request, all_marks))
    zero = request.at("router", "prompt accepted")
    first, second = (request.at("router", TOKEN, index) - zero for index in (0, 1))
    height = 2 * (TOP + ROW * len(ROWS)) + 30
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>']
    panel(out, f"One request: first token after {first:.1f} ms, second after {second:.1f} ms", 0, second + 10, TOP, drawn)
    zoom = TOP * 2 + ROW * len(ROWS)
    panel(out, "The same, around the hand-over", first - 12, second + 2, zoom, drawn)
    return "\n".join([*out, "</svg>\n"])


def main(arguments):
    target, wanted, logs = arguments[0], None, arguments[1:]
    if logs and logs[0] == "--request":
        wanted, logs = logs[1], logs[2:]
    all_marks = list(marks(logs))
    names = {m["request"] for m in all_marks if "request" in m}
    requests = [Request(name, all_marks) for name in names if wanted in (None, name)]
    requests = sorted((r for r in requests if r.is_whole()), key=Request.gap)
    if not requests:
        sys.exit("timeline: no request in these logs has all of its marks; were they written with walk=trace, as json?")
    chosen = requests[len(requests) // 2]
    with open(target, "w") as file:
        file.write(draw(chosen, all_marks))
    print(f"{target}: {chosen.name}, hand-over gap {chosen.gap():.2f} ms, of {len(requests)} requests")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1:])
