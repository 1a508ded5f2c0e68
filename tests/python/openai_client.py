"""Uses the official OpenAI client, unmodified, with a Baton endpoint.

Usage: openai_client.py http://127.0.0.1:8000/v1
"""

import pathlib
import re
import sys

import openai
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat

PAGE = pathlib.Path(__file__).parents[2] / "docs/api.md"


def check_fields():
    """Every request field of this release of the client is in docs/api.md."""
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    for params, endpoint in ((chat, "chat"), (completions, "completions")):
        known = {name for row in rows if row[1] in (endpoint, "both") for name in re.findall(r"`(\w+)`", row[0])}
        kinds = (params.CompletionCreateParamsStreaming, params.CompletionCreateParamsNonStreaming)
        missing = {name for kind in kinds for name in kind.__annotations__} - known
        assert not missing, f"docs/api.md does not have these fields of {endpoint}: {sorted(missing)}"


def main(base_url):
    check_fields()
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=30)

    models = [model.id for model in client.models.list()]
    assert models, "a model is served"
    model = models[0]
    assert client.models.retrieve(model).id == model

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is prefill?"}]
    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0)
    text = whole.choices[0].message.content
    assert text, whole
    assert whole.choices[0].finish_reason in ("stop", "length"), whole
    assert whole.usage.completion_tokens > 0 and whole.usage.prompt_tokens > 0, whole

    chunks = list(
        client.chat.completions.create(
            model=model, messages=messages, max_tokens=24, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == text, (streamed, text)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1]

    completed = client.completions.create(model=model, prompt="ROMEO:\n", max_tokens=16, temperature=0)
    chunks = list(client.completions.create(model=model, prompt="ROMEO:\n", max_tokens=16, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == completed.choices[0].text, chunks

    ids = client.completions.create(model=model, prompt=[82, 79, 77, 69, 79, 58, 10], max_tokens=16, temperature=0)
    assert ids.choices[0].text == completed.choices[0].text, ids

    try:
        client.chat.completions.create(model=model, messages=messages, top_p=2)
    except openai.BadRequestError as error:
        assert error.param == "top_p", error
    else:
        raise AssertionError("top_p = 2 was accepted")
    try:
        client.chat.completions.create(model="no-such-model", messages=messages)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error
    else:
        raise AssertionError("an unknown model was served")
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
