"""What programs do that were written for OpenAI's API: LangChain and LiteLLM, unmodified.

    python foreign_clients.py http://127.0.0.1:8000/v1 MODEL

It prints one JSON document. It runs in an environment of its own and imports nothing of Paceline.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

QUESTION = "What is the capital of Germany?"


@tool
def get_weather(city: str, unit: str) -> str:
    """Weather of a city, in C or F."""
    return f"12 {unit} in {city}"


def langchain(url: str, model: str) -> dict[str, Any]:
    """Whole answers, streams, tools, structured output, and completions, through LangChain."""
    given: dict[str, Any] = {"base_url": url, "api_key": "unused", "model": model, "temperature": 0}
    chat, longer = (ChatOpenAI(**given, max_tokens=most) for most in (24, 150))
    whole = chat.invoke(QUESTION)
    pieces = [piece.content for piece in chat.stream(QUESTION)]
    asked: list[Any] = [HumanMessage("What is the weather in Rome? Use the tool, in C.")]
    calls = longer.bind_tools([get_weather], tool_choice="required")
    message = calls.invoke(asked)
    call = message.tool_calls[0]
    asked += [message, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    streamed = None
    for piece in calls.stream(asked[:1]):
        streamed = piece if streamed is None else streamed + piece
    schema = {
        "title": "Place",
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    structured = longer.with_structured_output(schema, method="json_schema")
    completion = OpenAI(**given, max_tokens=12)
    return {
        "whole": whole.content,
        "usage": whole.usage_metadata["output_tokens"],
        "pieces": pieces,
        "call": [call["name"], sorted(call["args"])],
        "streamed_call": [streamed.tool_calls[0]["name"], sorted(streamed.tool_calls[0]["args"])],
        "after_the_tool": chat.invoke(asked).content,
        "structured": sorted(structured.invoke("Name the capital of Germany.")),
        "completion": completion.invoke("The capital of Germany is"),
    }


def lite(url: str, model: str) -> dict[str, Any]:
    """The same through LiteLLM, with keys of its own for Paceline."""
    given: dict[str, Any] = {
        "model": f"openai/{model}", "api_base": url, "api_key": "unused", "temperature": 0,
        "max_tokens": 24, "messages": [{"role": "user", "content": QUESTION}],
    }  # fmt: skip
    whole = litellm.completion(**given)
    stream = litellm.completion(**given, stream=True)
    method = {"extra_body": {"speculation": {"method": "prompt_lookup"}}}
    try:
        litellm.completion(**{**given, "temperature": 1000})
        refused = None
    except litellm.BadRequestError as error:
        refused = str(error)
    return {
        "whole": whole.choices[0].message.content,
        "pieces": [piece.choices[0].delta.content or "" for piece in stream],
        "with_a_method": litellm.completion(**given, **method).choices[0].message.content,
        "refused": refused,
    }


if __name__ == "__main__":
    print(json.dumps({"langchain": langchain(*sys.argv[1:3]), "litellm": lite(*sys.argv[1:3])}))
