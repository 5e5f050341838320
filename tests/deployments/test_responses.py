"""/v1/responses with OpenAI's own client: items, and the events that make them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from paceline.config import SpeculationConfig
from paceline.deployments.openai.responses import Items
from paceline.engine import Engine, EngineThread
from paceline.rpc.generate_service import ModelInfo
from tests.deployments.conftest import eventually
from tests.deployments.http_serving import http_serving
from tests.deployments.test_vllm_keys import ask

MODEL = ModelInfo(name="demo", default_speculation=SpeculationConfig())
ASKED = "Write a stack."


@pytest.fixture(scope="module")
def target(demo: Engine) -> Iterator[EngineThread]:
    thread = EngineThread(demo.sibling()).start()
    yield thread
    thread.stop()


@pytest.fixture(scope="module")
def url(target: EngineThread) -> Iterator[str]:
    with http_serving(target, MODEL) as url:
        yield url


@pytest.fixture
def client(target: EngineThread, url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unknown", max_retries=0) as client:
        yield client
    assert eventually(lambda: not target.engine.sessions), "sessions leaked"


@pytest.mark.parametrize("method", ["ar", "draft_model"])
def test_the_text_is_the_chats(client: openai.OpenAI, method: str) -> None:
    extra = {"speculation": {"method": method}, "seed": 3}
    chat = client.chat.completions.create(
        model="demo", max_tokens=24, extra_body=extra,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED}],
    )  # fmt: skip
    for given in (
        ASKED,
        [{"role": "user", "content": ASKED}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASKED}]}],
        [{"type": "reasoning", "summary": []}, {"role": "user", "content": ASKED}],
    ):
        response = client.responses.create(
            model="demo", input=given, instructions="Be brief.", max_output_tokens=24,  # type: ignore[arg-type]
            extra_body=extra,
        )  # fmt: skip
        assert response.output_text == chat.choices[0].message.content
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage is not None
        assert chat.usage is not None
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        assert response.usage.output_tokens == 24


def test_events_make_the_response(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "demo", "input": ASKED, "max_output_tokens": 24, "temperature": 0,
        "top_logprobs": 2, "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    whole = client.responses.create(**request)
    events = list(client.responses.create(**request, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.incomplete",
    ]  # fmt: skip
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3
    assert "".join(event.delta for event in deltas) == whole.output_text
    last: Any = events[-1]
    message: Any = whole.output[0]
    streamed: Any = last.response.output[0]
    assert streamed.content[0].text == message.content[0].text
    assert streamed.content[0].logprobs == message.content[0].logprobs
    assert len(message.content[0].logprobs) == 24
    assert last.response.usage == whole.usage
    with client.responses.stream(
        model="demo", input=ASKED, max_output_tokens=24, temperature=0
    ) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert text == whole.output_text


def test_a_schema_holds(client: openai.OpenAI) -> None:
    schema = {"enum": ["yes", "no"]}
    response = client.responses.create(
        model="demo", input="Is it?", max_output_tokens=24,
        text={"format": {"type": "json_schema", "name": "answer", "schema": schema}},
    )  # fmt: skip
    assert response.output_text in ('"yes"', '"no"')
    assert response.status == "completed"


def test_thoughts_and_calls_are_items_of_their_own() -> None:
    items = Items()
    call = {"index": 0, "id": "call_1", "function": {"name": "ping", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": "{}"}}
    events = [
        event
        for delta in (
            {"reasoning_content": "hm"}, {"content": "I "}, {"content": "call."},
            {"tool_calls": [call]}, {"tool_calls": [more]},
        )
        for event in items.add(delta, [])
    ]  # fmt: skip
    events += items.close()
    assert [item["type"] for item in items.items] == ["reasoning", "message", "function_call"]
    assert items.items[0]["content"][0] == {"type": "reasoning_text", "text": "hm"}
    assert items.items[1]["content"][0]["text"] == "I call."
    assert items.items[2]["arguments"] == "{}"
    assert {item["status"] for item in items.items} == {"completed"}
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in done] == [0, 1, 2]


def test_bad_requests_name_their_own_keys(url: str) -> None:
    for given, field in (
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format"),
        ({"reasoning": {"effort": "a lot"}}, "reasoning.effort"),
        ({"include": ["web_search_call.action.sources"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
    ):  # fmt: skip
        status, told, _ = ask(url, "/v1/responses", {"input": "x", "max_output_tokens": 1, **given})
        assert (status, told["error"]["param"]) == (400, field), told
