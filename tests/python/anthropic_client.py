"""Uses the official Anthropic client, unmodified, with a Baton endpoint: text, a tool loop, streams and errors.

The model calls `get_weather` and then answers with its result (tests/mocks/tools.toml).

Usage: anthropic_client.py http://127.0.0.1:8000/v1
"""

import json
import sys

import anthropic

TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def whole(client, request):
    return client.messages.create(**request)


def streamed(client, request):
    """Returns the same as whole, joined from a stream by the client's own helper."""
    with client.messages.stream(**request) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds
    assert kinds.count("content_block_delta") > 1, "the answer comes in pieces"
    return message


def loop(client, model, ask):
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    request = {"model": model, "max_tokens": 200, "system": "Be brief.", "messages": messages, "tools": [TOOL]}
    message = ask(client, request)
    counted = client.messages.count_tokens(**{name: request[name] for name in ("model", "system", "messages", "tools")})
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens, (counted, usage)
    assert message.stop_reason == "tool_use", message
    assert [block.type for block in message.content] == ["text", "tool_use"], message
    assert message.content[0].text == "I look.", message
    call = message.content[1]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"}), call
    messages.append({"role": "assistant", "content": message.content})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": json.dumps({"weather": "14 degrees"})}
    messages.append({"role": "user", "content": [result]})
    message = ask(client, request)
    assert message.content[0].text == "It is mild in Paris: 14 degrees.", message
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None), message
    assert message.usage.output_tokens == len(message.content[0].text) + 1, message.usage
    message = ask(client, {**request, "stop_sequences": [" in Paris"]})
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " in Paris"), message
    assert message.content[0].text == "It is mild", message
    message = ask(client, {**request, "max_tokens": 5})
    assert (message.stop_reason, message.content[0].text) == ("max_tokens", "It is"), message


def main(base_url):
    # The client adds /v1 itself.
    base_url = base_url.removesuffix("/v1")
    client = anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=30)
    model = client.models.list().data[0].id
    loop(client, model, whole)
    loop(client, model, streamed)
    try:
        client.messages.create(model=model, max_tokens=5, messages=[{"role": "wizard", "content": "a"}])
    except anthropic.BadRequestError as error:
        assert error.body["error"]["type"] == "invalid_request_error", error.body
        assert "messages[0].role" in error.body["error"]["message"], error.body
    else:
        raise AssertionError("an unknown role was accepted")
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
