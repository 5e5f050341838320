"""From the targets to the client: whole answers, and server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager, suppress
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response

from paceline.deployments.openai.answers import Answer
from paceline.deployments.openai.errors import as_sent
from paceline.deployments.openai.server import Receive, Scope, Send, error_body
from paceline.errors import InvalidArgument
from paceline.rpc.errors import Cancelled
from paceline.rpc.gen.paceline.v1 import generate_pb2

T = TypeVar("T")
Body = dict[str, Any]


class Targets(Protocol):
    """What the API needs of :class:`paceline.deployments.gateway.Relay`."""

    def generate(
        self, request: bytes, timeout_s: float | None = None, traceparent: str = ""
    ) -> AsyncGenerator[tuple[bytes, generate_pb2.GenerateReply]]: ...

    async def get_model(self, request: bytes = b"", timeout_s: float | None = None) -> bytes: ...

    async def tokenize(self, request: bytes, timeout_s: float | None = None) -> bytes: ...

    async def detokenize(self, request: bytes, timeout_s: float | None = None) -> bytes: ...


@contextmanager
def named_as_sent(keys: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the keys that the request has (:func:`as_sent`)."""
    try:
        yield
    except InvalidArgument as error:
        raise as_sent(error, keys) from None


async def respond(answer: Answer, targets: Targets, request: Request) -> Response:
    """Generate all choices of an answer, and send it whole or as a stream."""
    replies = _together(targets, answer.messages, request.headers.get("traceparent", ""))
    with named_as_sent(answer.keys):
        if not answer.body.stream:
            return await while_connected(request.receive, _collect(answer, replies))
        try:
            # Wait for the first token before sending anything: a refusal can still set the status.
            first = await while_connected(request.receive, anext(replies))
        except BaseException:
            await replies.aclose()
            raise
    return _EventStream(_events(answer, first, replies))


async def _collect(answer: Answer, replies: AsyncGenerator[_Reply]) -> Response:
    async with aclosing(replies):
        async for index, reply in replies:
            answer.add(index, reply)
    return JSONResponse(answer.result())


async def _events(
    answer: Answer, first: _Reply, replies: AsyncGenerator[_Reply]
) -> AsyncGenerator[bytes]:
    """The server-sent events of a stream."""
    try:
        async with aclosing(replies):
            for body in answer.opening():
                yield _event(body)
            async for index, reply in _after(first, replies):
                answer.add(index, reply)
                choice = answer.choices[index]
                for body in answer.events(choice, reply):
                    yield _event(body)
            for last in answer.ending():
                yield _event(last)
    except Exception as error:
        yield _event(answer.failure(error_body(error)))


def _event(body: Body | str) -> bytes:
    """An event; one whose body has a ``type`` is called so."""
    if isinstance(body, str):
        return f"data: {body}\n\n".encode()
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {text}\n\n".encode()


_Reply = tuple[int, generate_pb2.GenerateReply]


async def _after(first: _Reply, rest: AsyncIterator[_Reply]) -> AsyncIterator[_Reply]:
    yield first
    async for reply in rest:
        yield reply


async def _together(
    targets: Targets, messages: Sequence[generate_pb2.GenerateRequest], traceparent: str
) -> AsyncGenerator[_Reply]:
    """Run all generations at once; yields each reply with the index of its request.

    The first error ends all of them, as closing this generator does.
    """
    arrived: asyncio.Queue[_Reply | None] = asyncio.Queue()

    async def relay(index: int, message: generate_pb2.GenerateRequest) -> None:
        call = targets.generate(message.SerializeToString(), traceparent=traceparent)
        try:
            async with aclosing(call) as replies:
                async for _, reply in replies:
                    arrived.put_nowait((index, reply))
        finally:
            arrived.put_nowait(None)

    tasks = [asyncio.create_task(relay(i, message)) for i, message in enumerate(messages)]
    try:
        left = len(tasks)
        while left:
            item = await arrived.get()
            if item is not None:
                yield item
                continue
            left -= 1
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; cancels it when the client disconnects.

    Raises:
        Cancelled: the client disconnected.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client has gone")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _EventStream(Response):
    """Server-sent events. When the client disconnects, their generator ends at once."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self.init_headers(
            {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async with aclosing(self._events):
            with suppress(Cancelled):
                await while_connected(receive, write())
