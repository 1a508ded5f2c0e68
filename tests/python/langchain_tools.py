"""Runs a tool loop with LangChain's model of OpenAI's API, unmodified, whole and streamed.

The model calls `get_weather` and then answers with its result (tests/mocks/tools.toml).

Usage: langchain_tools.py http://127.0.0.1:8000/v1
"""

import sys

import openai
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: 14 degrees"


def whole(model, messages):
    return model.invoke(messages)


def streamed(model, messages):
    """Returns the same as whole, joined by LangChain."""
    chunks = list(model.stream(messages))
    assert len(chunks) > 2, "the answer comes in pieces"
    return sum(chunks[1:], chunks[0])


def loop(model, ask):
    messages = [HumanMessage("What is the weather in Paris?")]
    for _ in range(3):
        answer = ask(model, messages)
        messages.append(answer)
        if not answer.tool_calls:
            break
        messages += [get_weather.invoke(call) for call in answer.tool_calls]
    texts = [message.text for message in messages]
    assert texts[1:] == ["I look.", "Paris: 14 degrees", "It is mild in Paris: 14 degrees."], messages


def main(base_url):
    name = openai.OpenAI(base_url=base_url, api_key="none").models.list().data[0].id
    model = ChatOpenAI(base_url=base_url, api_key="none", model=name, max_retries=0, timeout=30)
    model = model.bind_tools([get_weather])
    loop(model, whole)
    loop(model, streamed)
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
