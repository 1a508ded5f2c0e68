"""Uses the official OpenAI client, unmodified, with a router in front of another engine.

Usage: openai_upstream.py http://127.0.0.1:8000/v1
"""

import sys

import openai

TEXT = "The prompt has arrived"


def main(base_url):
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=30)
    assert [model.id for model in client.models.list()] == ["m"]
    messages = [{"role": "user", "content": "What is prefill?"}]
    whole = client.chat.completions.create(model="m", messages=messages, max_completion_tokens=24)
    assert whole.choices[0].message.content == TEXT, whole
    assert whole.usage.completion_tokens == 4, whole
    chunks = client.chat.completions.create(
        model="m", messages=messages, stream=True, stream_options={"include_usage": True}, extra_body={"top_k": 4},
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == TEXT, streamed
    completed = client.completions.create(model="m", prompt="ROMEO:\n", max_tokens=16)
    assert completed.choices[0].text == TEXT, completed
    chunks = client.completions.create(model="m", prompt=[1, 2, 3], max_tokens=16, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT


main(sys.argv[1])
