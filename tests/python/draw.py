#!/usr/bin/env python3
"""Draws comments, log lines and type names from the tree, for a reader who has not seen the code.

    python3 tests/python/draw.py [SEED]

One seed gives one draw of one tree. A comment is shown with the line of code that it describes. The reader marks each
item that is not clear at the first reading.
"""

import pathlib
import random
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = {"target", ".cache", ".git"}
LOG = re.compile(r'\b(?:trace|debug|info|warn|error)!\((?:target: "[a-z]+", )?(?:[^";]*?)"((?:[^"\\]|\\.)+)"')
TESTS = re.compile(r"(^|/)(tests|examples|benches)(/|\.rs)|_tests\.rs")
TYPE = re.compile(r"^\s*(?:pub(?:\([a-z]+\))? )?(?:struct|enum|trait|type) ([A-Z]\w*)", re.MULTILINE)


def sources():
    """Rust files of the tree with their text, in a fixed order."""
    for path in sorted(ROOT.rglob("*.rs")):
        name = path.relative_to(ROOT)
        if not SKIPPED & set(name.parts):
            yield str(name), path.read_text(encoding="utf-8")


def comments(text):
    """Comments of one file and the code after each, with the number of their first line.

    Adjacent comment lines are one comment.
    """
    lines = [line.strip() for line in text.splitlines()]
    block, first = [], 0
    for number, line in enumerate([*lines, ""], 1):
        if line.startswith("//"):
            first = first if block else number
            block.append(line.lstrip("/!").strip())
        elif block:
            code = next((after for after in lines[number - 1 :] if not after.startswith("#[")), "")
            yield first, " ".join(block).strip() + (f"\n      {code}" if code else "")
            block = []


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


def drawn(seed):
    found = {"comments": [], "log lines": [], "type names": []}
    for name, text in sources():
        found["comments"] += [(name, line, words) for line, words in comments(text) if " " in words]
        for kind, pattern in (("log lines", LOG), ("type names", TYPE)):
            if TESTS.search(name):
                continue
            found[kind] += [(name, line_of(text, hit.start(1)), hit[1]) for hit in pattern.finditer(text)]
    chance = random.Random(seed)
    return {
        kind: chance.sample(found[kind], count)
        for kind, count in (("comments", 20), ("log lines", 10), ("type names", 10))
    }


def main():
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    for kind, items in drawn(seed).items():
        print(f"## {len(items)} {kind} (seed {seed})\n")
        for name, line, words in items:
            print(f"- {words}\n  ({name}:{line})")
        print()


if __name__ == "__main__":
    main()
