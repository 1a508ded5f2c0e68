"""Runs a tool loop with the official OpenAI client, unmodified: with chats and with responses, whole and streamed.

The model calls `get_weather` and then answers with its result (tests/mocks/tools.toml).

Usage: openai_tools.py http://127.0.0.1:8000/v1
"""

import json
import sys

import openai

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def get_weather(city):
    return {"city": city, "weather": "14 degrees"}


def whole(client, request):
    """Returns an assistant message and its finish reason."""
    choice = client.chat.completions.create(**request).choices[0]
    return choice.message.model_dump(exclude_none=True), choice.finish_reason


def streamed(client, request):
    """Returns the same as whole, joined from a stream by the client's own helper."""
    with client.chat.completions.stream(**request) as stream:
        events = list(stream)
        choice = stream.get_final_completion().choices[0]
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    if choice.message.tool_calls:
        assert len(deltas) > 1, "the arguments come in pieces"
    return choice.message.model_dump(exclude_none=True), choice.finish_reason


def loop(client, model, ask):
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    request = {"model": model, "messages": messages, "tools": TOOLS, "temperature": 0}
    message, reason = ask(client, request)
    assert reason == "tool_calls", reason
    assert message["content"] == "I look.", message
    messages.append(message)
    for call in message["tool_calls"]:
        result = get_weather(**json.loads(call["function"]["arguments"]))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)})
    message, reason = ask(client, request)
    assert (message["content"], reason) == ("It is mild in Paris: 14 degrees.", "stop"), message
    assert not message.get("tool_calls"), message


def whole_response(client, request):
    return client.responses.create(**request)


def streamed_response(client, request):
    """Returns the same as whole_response, from a stream that the client's own helper checks."""
    with client.responses.stream(**request) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
    pieces = [kind for kind in kinds if kind.endswith(".delta")]
    assert len(pieces) > 1, "the answer comes in pieces"
    return response


def loop_of_responses(client, model, ask):
    function = TOOLS[0]["function"]
    tools = [{"type": "function", "strict": False, **function}]
    items = [{"role": "user", "content": "What is the weather in Paris?"}]
    request = {"model": model, "instructions": "Be brief.", "input": items, "tools": tools, "temperature": 0}
    response = ask(client, request)
    assert response.status == "completed" and response.output_text == "I look.", response
    assert [item.type for item in response.output] == ["message", "function_call"], response
    items += [item.model_dump(exclude_none=True) for item in response.output]
    call = response.output[1]
    output = json.dumps(get_weather(**json.loads(call.arguments)))
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    response = ask(client, request)
    assert response.output_text == "It is mild in Paris: 14 degrees.", response
    assert response.usage.output_tokens == len(response.output_text) + 1, response.usage


def main(base_url):
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=30)
    model = client.models.list().data[0].id
    loop(client, model, whole)
    loop(client, model, streamed)
    loop_of_responses(client, model, whole_response)
    loop_of_responses(client, model, streamed_response)
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
