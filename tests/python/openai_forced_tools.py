"""Demands tool calls with the official OpenAI client, unmodified, of a Baton endpoint that serves the demo model.

`tool_choice` is `required` or names a function, whole and streamed, with several calls and with one. The calls' names
and arguments are valid whatever the model would have written.

Usage: openai_forced_tools.py http://127.0.0.1:8000/v1
"""

import enum
import sys

import openai
import pydantic


class Unit(enum.Enum):
    celsius = "celsius"
    kelvin = "kelvin"


class GetWeather(pydantic.BaseModel):
    """The weather in a city."""

    city: str = pydantic.Field(pattern="^[A-Z][a-z]{1,8}$")
    unit: Unit


class Stop(pydantic.BaseModel):
    """Ends the work."""

    code: int = pydantic.Field(ge=0, le=99)


MODELS = {"GetWeather": GetWeather, "Stop": Stop}
TOOLS = [openai.pydantic_function_tool(model) for model in MODELS.values()]
NAMED = {"type": "function", "function": {"name": "GetWeather"}}
# With this seed an answer has several calls.
SEED = 1


def whole(client, request):
    """Returns an answer's choice, with calls that the client's helper has parsed."""
    return client.chat.completions.parse(**request).choices[0]


def streamed(client, request):
    """Returns the same as whole, joined from a stream by the client's own helper."""
    with client.chat.completions.stream(**request) as stream:
        kinds = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    assert kinds.count("tool_calls.function.arguments.delta") > len(choice.message.tool_calls), kinds
    assert kinds.count("tool_calls.function.arguments.done") == len(choice.message.tool_calls), kinds
    return choice


def calls_of(choice, reason):
    assert choice.finish_reason == reason, choice
    assert not choice.message.content, choice
    calls = choice.message.tool_calls
    assert calls and len({call.id for call in calls}) == len(calls), choice
    for call in calls:
        parsed = call.function.parsed_arguments
        assert isinstance(parsed, MODELS[call.function.name]), call
    return [(call.function.name, call.function.arguments) for call in calls]


def main(base_url):
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is the weather?"}]
    common = {"model": model, "messages": messages, "tools": TOOLS, "temperature": 1.5, "seed": SEED}
    demands = (
        ({"tool_choice": "required"}, "tool_calls", lambda names: len(names) > 1),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "tool_calls", lambda names: len(names) == 1),
        ({"tool_choice": NAMED}, "stop", lambda names: names == ["GetWeather"]),
    )
    for fields, reason, fits in demands:
        calls = calls_of(whole(client, {**common, **fields}), reason)
        assert fits([name for name, _ in calls]), calls
        assert calls_of(streamed(client, {**common, **fields}), reason) == calls, fields
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
