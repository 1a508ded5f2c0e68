"""Renders router/src/text/template/fixtures/features.jinja as `transformers` does, for router/src/text/template/tests.rs.

    pip install jinja2
    python tests/python/template_fixtures.py
"""

import json
from pathlib import Path

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

FIXTURES = Path(__file__).resolve().parents[2] / "router/src/text/template/fixtures"


class Generation(Extension):
    """`{% generation %}`, an addition of transformers. Only its body is rendered."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body, lineno=line)


def raise_exception(message):
    raise TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda _: "2026-01-01"
    return made


def main():
    template = environment().from_string((FIXTURES / "features.jinja").read_text())
    context = json.loads((FIXTURES / "features.json").read_text())
    text = template.render(bos_token="<s>", eos_token="</s>", add_generation_prompt=True, **context)
    (FIXTURES / "features.txt").write_text(text)


if __name__ == "__main__":
    main()
