"""/v1/responses: a chat completion told as items, and as the events that make them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.deployments.openai.answers import AnswerChoice, Body, ChatAnswer
from paceline.deployments.openai.output import Delta
from paceline.deployments.openai.responses_schema import ResponsesRequest
from paceline.deployments.openai.schema import ChatRequest
from paceline.rpc.gen.paceline.v1 import generate_pb2

Event = dict[str, Any]

_PARTS = {
    "reasoning_content": ("reasoning", "reasoning_text"),
    "content": ("message", "output_text"),
}


class Items:
    """The items of an output, and the events that tell how they grow."""

    def __init__(self) -> None:
        self.items: list[Body] = []
        self._open: Body | None = None  # the last of them, while it grows

    def add(self, delta: Delta, logprobs: list[Body]) -> Iterator[Event]:
        """Add a piece of the output.

        Args:
            logprobs: of the tokens that it comes from.
        """
        for key, (kind, part_kind) in _PARTS.items():
            if delta.get(key):
                if self._open is None or self._open["type"] != kind:
                    yield from self._begin(_text_item(kind))
                    yield from self._begin_part(part_kind)
                yield from self._text(part_kind, delta[key], logprobs)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                yield from self._begin(_call_item(call["id"], function["name"]))
            if function["arguments"]:
                item = self.items[-1]
                item["arguments"] += function["arguments"]
                yield self._event(
                    "response.function_call_arguments.delta", delta=function["arguments"]
                )

    def close(self) -> Iterator[Event]:
        """End the last item."""
        item, self._open = self._open, None
        if item is None:
            return
        if item["type"] == "function_call":
            yield self._event(
                "response.function_call_arguments.done",
                arguments=item["arguments"], name=item["name"],
            )  # fmt: skip
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._event(
                f"response.{part['type']}.done", content_index=0, text=part["text"], **more
            )
            yield self._event("response.content_part.done", content_index=0, part={**part})
        item["status"] = "completed"
        yield self._item_event("response.output_item.done")

    def _begin(self, item: Body) -> Iterator[Event]:
        yield from self.close()
        self.items.append(item)
        self._open = item
        yield self._item_event("response.output_item.added")

    def _begin_part(self, kind: str) -> Iterator[Event]:
        part: Body = {"type": kind, "text": ""}
        if kind == "output_text":
            part |= {"annotations": [], "logprobs": []}
        self.items[-1]["content"].append(part)
        yield self._event("response.content_part.added", content_index=0, part={**part})

    def _text(self, kind: str, text: str, logprobs: list[Body]) -> Iterator[Event]:
        part = self.items[-1]["content"][0]
        part["text"] += text
        more: Body = {}
        if kind == "output_text":
            part["logprobs"] = [*part["logprobs"], *logprobs]
            more["logprobs"] = logprobs
        yield self._event(f"response.{kind}.delta", content_index=0, delta=text, **more)

    def _event(self, kind: str, **values: Any) -> Event:
        place = len(self.items) - 1
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": place, **values}

    def _item_event(self, kind: str) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1, "item": {**self.items[-1]}}


def _text_item(kind: str) -> Body:
    item: Body = {
        "id": _new_id("rs" if kind == "reasoning" else "msg"),
        "type": kind, "status": "in_progress", "content": [],
    }  # fmt: skip
    return {**item, **({"summary": []} if kind == "reasoning" else {"role": "assistant"})}


def _call_item(call_id: str, name: str) -> Body:
    return {
        "id": _new_id("fc"), "type": "function_call", "status": "in_progress",
        "call_id": call_id, "name": name, "arguments": "",
    }  # fmt: skip


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


class ResponseAnswer(ChatAnswer):
    """The answer to a request of /v1/responses."""

    id_prefix = "resp"

    def __init__(
        self,
        asked: ResponsesRequest,
        chat: ChatRequest,
        model: generate_pb2.Model,
        marker_id: int | None = None,
    ) -> None:
        self._asked = asked
        super().__init__(chat, model, marker_id)
        self.id = _new_id("resp")
        self._items = Items()
        self._num_events = 0

    @property
    def keys(self) -> dict[str, str]:
        return {**super().keys, **self._asked.keys}

    def result(self) -> Body:
        (choice,) = self.choices
        logprobs = self._logprobs(choice.logprobs)
        entries = logprobs["content"] if logprobs is not None else []
        for delta in self.deltas(choice, choice.text):
            for _ in self._items.add(delta, []):
                pass
        for _ in self._items.close():
            pass
        for item in self._items.items:
            if item["type"] == "message":
                item["content"][0]["logprobs"] = entries
        return self._response()

    def opening(self) -> Iterable[Body]:
        yield self._numbered({"type": "response.created", "response": self._response()})
        yield self._numbered({"type": "response.in_progress", "response": self._response()})

    def events(self, choice: AnswerChoice, reply: generate_pb2.GenerateReply) -> Iterable[Body]:
        logprobs = self._logprobs(reply.logprobs)
        entries = logprobs["content"] if logprobs is not None else []
        for delta in self.deltas(choice, reply.text):
            for event in self._items.add(delta, entries):
                yield self._numbered(event)
            if "content" in delta:
                entries = []

    def ending(self) -> Iterable[Body | str]:
        for event in self._items.close():
            yield self._numbered(event)
        response = self._response()
        yield self._numbered({"type": f"response.{response['status']}", "response": response})

    def failure(self, error: Body) -> Body:
        found = error["error"]
        return self._numbered(
            {"type": "error", **{key: found[key] for key in ("code", "message", "param")}}
        )

    def _numbered(self, event: Event) -> Event:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events - 1}

    def _response(self) -> Body:
        """The response as far as it has come."""
        asked, (choice,) = self._asked, self.choices
        status, details = "in_progress", None
        if choice.last is not None:
            cut = choice.last.finish_reason == "length"
            status = "incomplete" if cut else "completed"
            details = {"reason": "max_output_tokens"} if cut else None
        closing = self.closing() if choice.last is not None else {}
        usage = closing.pop("usage", None)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self.adapter or self.model.name,
            "output": [dict(item) for item in self._items.items],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": _format(asked)},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            **closing,
        }


def _format(asked: ResponsesRequest) -> Body:
    given = None if asked.text is None else asked.text.format
    if given is None:
        return {"type": "text"}
    return given.model_dump(by_alias=True, exclude_none=True)


def _usage(usage: Body) -> Body:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
