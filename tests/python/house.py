#!/usr/bin/env python3
"""Draws docs/house.svg (crates and their dependencies) and docs/request.svg (the path of a request).

    python3 tests/python/house.py            writes both files
    python3 tests/python/house.py --check    fails if a file is not what this script writes

The crates and arrows come from the manifests, and must be in the table of tests/tests/tidy.rs. The path comes from the
numbered steps of docs/walk.md: each begins with a name in bold, and its first file says in which crate it runs.
"""

import pathlib
import re
import sys
from html import escape

ROOT = pathlib.Path(__file__).resolve().parents[2]
FONT = "font-family='Helvetica, Arial, sans-serif'"
MARKER = (
    "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
    "<path d='M0,0 L8,4 L0,8 z' fill='#556'/></marker></defs>"
)


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


# The crates.


def members():
    listed = re.search(r"^members = \[(.*?)\]", read("Cargo.toml"), re.MULTILINE | re.DOTALL)
    return re.findall(r'"([^"]+)"', listed[1])


def dependencies(crate, crates):
    """The crates of this tree in `[dependencies]` of one manifest."""
    section = re.search(r"^\[dependencies\]\n(.*?)(?=^\[|\Z)", read(f"{crate}/Cargo.toml"), re.MULTILINE | re.DOTALL)
    names = re.findall(r"^([a-z0-9_-]+)", section[1], re.MULTILINE) if section else []
    return [name for name in names if name in crates]


def allowed():
    """The table of tests/tests/tidy.rs."""
    table = re.search(r"MAY_DEPEND_ON.*?= &\[(.*?)^\];", read("tests/tests/tidy.rs"), re.MULTILINE | re.DOTALL)
    rows = re.findall(r'\(\s*"([^"]+)",\s*&\[(.*?)\],?\s*\)', table[1], re.DOTALL)
    return {crate: re.findall(r'"([^"]+)"', names) for crate, names in rows}


def unsafe_crates():
    return re.findall(r'"([^"]+)"', re.search(r"MAY_BE_UNSAFE.*?= &\[(.*?)\]", read("tests/tests/tidy.rs"))[1])


def sentence(crate):
    for name in ("src/lib.rs", "src/main.rs"):
        if (ROOT / crate / name).exists():
            return read(f"{crate}/{name}").splitlines()[0].removeprefix("//! ")
    return crate


def graph():
    """Each crate with the crates that it uses directly only. `tests` uses all crates and is left out."""
    crates = [crate for crate in members() if crate != "tests"]
    uses = {crate: dependencies(crate, crates) for crate in crates}
    table = allowed()
    for crate, used in uses.items():
        extra = set(used) - set(table.get(crate, used))
        assert not extra, f"{crate} may not depend on {extra}: tests/tests/tidy.rs"
    reach = {}

    def reached(crate):
        if crate not in reach:
            reach[crate] = set(uses[crate]).union(*(reached(other) for other in uses[crate]))
        return reach[crate]

    return {
        crate: [one for one in used if not any(one in reached(other) for other in used)] for crate, used in uses.items()
    }


def levels(uses):
    """The row of a crate: above all crates that it uses."""
    found = {}

    def level(crate):
        if crate not in found:
            found[crate] = 1 + max((level(other) for other in uses[crate]), default=-1)
        return found[crate]

    for crate in uses:
        level(crate)
    users = {crate: [user for user in uses if crate in uses[user]] for crate in uses}
    for crate in uses:  # a crate that uses none stands right below its users
        if not uses[crate] and users[crate]:
            found[crate] = min(found[user] for user in users[crate]) - 1
    return found


# Layers: boxes in rows, and a bend for each row that an arrow crosses.

BOX, BEND, GAP, ROW, HEIGHT = 116, 10, 26, 92, 36


def chains(uses, level):
    """Rows of boxes and bends, and each arrow as a chain through them."""
    rows = [sorted(crate for crate in uses if level[crate] == row) for row in range(max(level.values()) + 1)]
    arrows = []
    for user in sorted(uses):
        for used in sorted(uses[user]):
            bends = [f"{user}>{used}@{row}" for row in range(level[user] - 1, level[used], -1)]
            for row, bend in zip(range(level[user] - 1, level[used], -1), bends):
                rows[row].append(bend)
            arrows.append([user, *bends, used])
    return rows, arrows


def crossings(rows, arrows):
    place = {name: at for row in rows for at, name in enumerate(row)}
    row_of = {name: nth for nth, row in enumerate(rows) for name in row}
    steps = [(row_of[a], place[a], place[b]) for arrow in arrows for a, b in zip(arrow, arrow[1:])]
    return sum(
        one[0] == other[0] and (one[1] - other[1]) * (one[2] - other[2]) < 0
        for nth, one in enumerate(steps)
        for other in steps[:nth]
    )


def order(rows, arrows):
    """Sorts each row by the mean position of its neighbours, up and down, and keeps the order with the fewest crossings."""
    neighbours = {name: [] for row in rows for name in row}
    for arrow in arrows:
        for upper, lower in zip(arrow, arrow[1:]):
            neighbours[upper].append(lower)
            neighbours[lower].append(upper)
    best = [list(row) for row in rows]
    for sweep in range(24):
        for row in rows if sweep % 2 else rows[::-1]:
            place = {name: (at + 0.5) / len(other) for other in rows for at, name in enumerate(other)}
            row.sort(key=lambda name: (sum(place[n] for n in neighbours[name]) / max(1, len(neighbours[name])), name))
        if crossings(rows, arrows) < crossings(best, arrows):
            best = [list(row) for row in rows]
    return best, neighbours


def width(name):
    return BEND if "@" in name else BOX


def positions(rows, neighbours):
    """The position of each name: near the mean of its neighbours, without overlap."""
    at = {}
    for row in rows:
        edge = 0
        for name in row:
            at[name] = edge + width(name) / 2
            edge += width(name) + GAP
    for sweep in range(60):
        for row in rows if sweep % 2 else rows[::-1]:
            wanted = [sum(at[n] for n in neighbours[name]) / max(1, len(neighbours[name])) for name in row]
            spread(row, wanted, at)
    for one, other in ((a, b) for row in rows for a, b in zip(row, row[1:])):
        assert at[other] - at[one] >= (width(one) + width(other)) / 2, f"{one} and {other} overlap"
    left = min(at[name] - width(name) / 2 for row in rows for name in row)
    return {name: round(x - left + GAP) for name, x in at.items()}


def spread(row, wanted, at):
    """Two passes, from the left and from the right; the mean of both keeps every distance."""
    right, left = [], []
    for nth, name in enumerate(row):
        least = right[-1] + (width(row[nth - 1]) + width(name)) / 2 + GAP if right else wanted[nth]
        right.append(max(wanted[nth], least))
    for nth in reversed(range(len(row))):
        most = left[-1] - (width(row[nth + 1]) + width(row[nth])) / 2 - GAP if left else wanted[nth]
        left.append(min(wanted[nth], most))
    for name, one, other in zip(row, right, reversed(left)):
        at[name] = (one + other) / 2


def curve(points):
    """A line through the points that crosses every row vertically."""
    path = f"M{points[0][0]},{points[0][1]}"
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        middle = (y0 + y1) / 2
        path += f" C{x0},{middle:g} {x1},{middle:g} {x1},{y1}"
    return f"<path d='{path}' fill='none' stroke='#556' stroke-width='1.2' marker-end='url(#head)'/>"


def svg(wide, high, parts):
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {wide} {high}' width='{wide}' height='{high}' {FONT}>"
    ground = f"<rect width='{wide}' height='{high}' fill='white'/>"
    return "\n".join([head, MARKER, ground, *parts, "</svg>"]) + "\n"


def box(x, y, wide, text, fill, title):
    return (
        f"<g><title>{escape(title)}</title>"
        f"<rect x='{x - wide / 2:g}' y='{y}' width='{wide}' height='{HEIGHT}' rx='5' fill='{fill}' stroke='#556'/>"
        f"<text x='{x}' y='{y + HEIGHT / 2 + 5:g}' font-size='14' text-anchor='middle'>{escape(text)}</text></g>"
    )


def house():
    uses = graph()
    level = levels(uses)
    rows, arrows = chains(uses, level)
    rows, neighbours = order(rows, arrows)
    at = positions(rows, neighbours)
    top = {name: GAP + (len(rows) - 1 - nth) * ROW for nth, row in enumerate(rows) for name in row}
    parts = []
    for arrow in arrows:
        points = [(at[arrow[0]], top[arrow[0]] + HEIGHT)]
        for bend in arrow[1:-1]:
            points += [(at[bend], top[bend]), (at[bend], top[bend] + HEIGHT)]
        parts.append(curve([*points, (at[arrow[-1]], top[arrow[-1]])]))
    unsafe = unsafe_crates()
    for crate in sorted(uses):
        fill = "#fbe3d0" if crate in unsafe else "#e4ecf7"
        parts.append(box(at[crate], top[crate], BOX, crate, fill, sentence(crate)))
    wide = max(at[name] + width(name) // 2 for name in at) + GAP
    high = max(top.values()) + HEIGHT + GAP + 40
    notes = [
        "An arrow points from a crate to a crate that it uses. Arrows that follow from others are left out.",
        "Orange crates may hold unsafe code. The crate tests, which uses most of the others, is left out.",
    ]
    for nth, note in enumerate(notes):
        y = high - 30 + 18 * nth
        parts.append(f"<text x='{GAP}' y='{y}' font-size='12' fill='#556'>{note}</text>")
    return svg(wide, high, parts)


# The path of a request.

LANE, STEP = 168, 62


def steps():
    """Number, name, crate and file of each numbered step of the walk."""
    page = read("docs/walk.md")
    found = []
    for number, name, rest in re.findall(r"^(\d+)\. \*\*(.+?)\.\*\*(.*?)(?=^\d+\. |^## |\Z)", page, re.MULTILINE | re.DOTALL):
        path = re.search(r"`([a-z-]+)/src/([^`]+\.rs)`", rest)
        assert path, f"docs/walk.md: step {number} names no file"
        found.append((int(number), name, path[1], path[2]))
    assert [step[0] for step in found] == list(range(1, len(found) + 1)), "docs/walk.md: a step has no name in bold"
    return found


def request():
    path = steps()
    lanes = list(dict.fromkeys(crate for _, _, crate, _ in path))
    middle = {crate: GAP + LANE * nth + LANE // 2 for nth, crate in enumerate(lanes)}
    high = 40 + STEP * len(path)
    parts = []
    for nth, crate in enumerate(lanes):
        fill = "#f4f6fa" if nth % 2 else "#fafbfd"
        parts.append(f"<rect x='{GAP + LANE * nth}' y='40' width='{LANE}' height='{high - 40}' fill='{fill}'/>")
        parts.append(
            f"<text x='{middle[crate]}' y='30' font-size='15' font-weight='bold' text-anchor='middle'>{crate}</text>"
        )
    tops = [56 + STEP * nth for nth in range(len(path))]
    for (one, above), (other, below) in zip(zip(path, tops), zip(path[1:], tops[1:])):
        parts.append(curve([(middle[one[2]], above + HEIGHT), (middle[other[2]], below)]))
    for (number, name, crate, file), y in zip(path, tops):
        parts.append(box(middle[crate], y, LANE - 12, f"{number} {name}", "#e4ecf7", f"{crate}/src/{file}"))
    return svg(LANE * len(lanes) + 2 * GAP, high, parts)


def main():
    drawn = {"docs/house.svg": house(), "docs/request.svg": request()}
    for name, text in drawn.items():
        if "--check" not in sys.argv:
            (ROOT / name).write_text(text, encoding="utf-8")
        elif not (ROOT / name).exists() or read(name) != text:
            sys.exit(f"{name} is not what the tree says: run python3 tests/python/house.py")


if __name__ == "__main__":
    main()
