"""Uses the official OpenAI client's structured output, unmodified, with a Baton endpoint that serves the demo model.

Usage: openai_structured.py http://127.0.0.1:8000/v1
"""

import enum
import json
import re
import sys

import openai
import pydantic


class Phase(enum.Enum):
    prefill = "prefill"
    decode = "decode"


class Part(pydantic.BaseModel):
    phase: Phase
    steps: int = pydantic.Field(ge=0, le=99)


class Answer(pydantic.BaseModel):
    name: str = pydantic.Field(pattern="^[a-z]{1,8}$")
    is_short: bool
    parts: list[Part] = pydantic.Field(min_length=1, max_length=2)


def streamed(client, **fields):
    chunks = client.chat.completions.create(stream=True, **fields)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def check_refusals(client, ask):
    for fields, what in (
        ({"guided_json": {"properties": {"a": {"not": {}}}}}, "/properties/a"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ):
        try:
            client.chat.completions.create(extra_body=fields, **ask)
        except openai.BadRequestError as error:
            assert what in error.message, error.message
        else:
            raise AssertionError(f"{fields} was not refused")


def main(base_url):
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is prefill?"}]
    ask = {"model": model, "messages": messages, "temperature": 1, "seed": 3}

    parsed = client.chat.completions.parse(response_format=Answer, **ask).choices[0]
    assert parsed.finish_reason == "stop" and isinstance(parsed.message.parsed, Answer), parsed
    with client.chat.completions.stream(response_format=Answer, **ask) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == parsed.message.parsed

    for fields, fits in (
        ({"guided_regex": "[0-9]{4}-[0-9]{2}"}, lambda text: re.fullmatch("[0-9]{4}-[0-9]{2}", text)),
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"structured_outputs": {"grammar": 'start: "<" /[a-z]{1,5}/ ">"'}}, lambda text: re.fullmatch("<[a-z]{1,5}>", text)),
        ({"structured_outputs": {"json": {"enum": [1, "two", None]}}}, lambda text: json.loads(text) in (1, "two", None)),
    ):
        whole = client.chat.completions.create(extra_body=fields, **ask).choices[0]
        assert whole.finish_reason == "stop" and fits(whole.message.content), whole
        assert streamed(client, extra_body=fields, **ask) == whole.message.content

    cut = client.chat.completions.create(response_format={"type": "json_object"}, max_tokens=2, **ask).choices[0]
    assert cut.finish_reason == "length", cut
    check_refusals(client, ask)


main(sys.argv[1])
