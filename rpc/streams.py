"""Streams: a time limit for each request, and replies that are not read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Generic, TypeVar

from paceline.rpc.errors import DeadlineExceeded, ServerUnavailable

T = TypeVar("T")

UNREAD_S = 0.25
"""Seconds that a reader may keep one item of a stream before the next ones are read for it."""


async def within(
    requests: AsyncIterator[T], first_s: float, *, later_s: float | None
) -> AsyncIterator[T]:
    """``requests``, while each comes in time after the handler asks for it.

    Args:
        first_s: seconds for the first one.
        later_s: seconds for each of the others; None: no limit.

    Raises:
        DeadlineExceeded: one did not come in time.
    """
    iterator = aiter(requests)
    timeout_s: float | None = first_s
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                request = await anext(iterator)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise DeadlineExceeded(
                f"no frame within {timeout_s:g} s: the stream is closed, and its session"
            ) from None
        yield request
        timeout_s = later_s


class Unread(ServerUnavailable):
    """The reader of a stream has left so much of it unread that the rest was given up."""


async def read_ahead(
    items: AsyncGenerator[T],
    size: Callable[[T], int],
    most: int,
    *,
    may_stop: Callable[[], bool] = lambda: True,
    patience_s: float = UNREAD_S,
) -> AsyncGenerator[T]:
    """``items``, which no slow reader holds up: then they are read into a buffer.

    A fast reader costs nothing: it gets each item when it comes.

    Args:
        size: bytes of an item.
        most: bytes in the buffer beyond which ``items`` are closed.
        may_stop: whether the stream may be given up at the item that came last.
        patience_s: seconds with one item after which a reader is slow.

    Raises:
        Unread: the buffer was full; the reader has all that was in it.
    """
    ahead: _Ahead[T] | None = None

    def begin() -> None:
        nonlocal ahead
        ahead = _Ahead(items, size, may_stop, most)

    async with aclosing(items):
        try:
            while ahead is None:
                item = await anext(items, None)
                if item is None:
                    return
                timer = asyncio.get_running_loop().call_later(patience_s, begin)
                try:
                    yield item
                finally:
                    timer.cancel()
            async for item in ahead.items():
                yield item
        finally:
            if ahead is not None:
                await ahead.stop()


class _Ahead(Generic[T]):
    """Reads a stream to its end, or until its buffer is full."""

    def __init__(
        self,
        items: AsyncGenerator[T],
        size: Callable[[T], int],
        may_stop: Callable[[], bool],
        most: int,
    ) -> None:
        self._items, self._size = items, size
        self._may_stop, self._most = may_stop, most
        self._buffer: deque[T] = deque()
        self._num_bytes = 0
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def items(self) -> AsyncGenerator[T]:
        """The buffered items and those that still come."""
        while True:
            while self._buffer:
                item = self._buffer.popleft()
                self._num_bytes -= self._size(item)
                yield item
            if self._task.done():
                if self._error is not None:
                    raise self._error
                return
            self._news.clear()
            await self._news.wait()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        try:
            async for item in self._items:
                self._buffer.append(item)
                self._num_bytes += self._size(item)
                self._news.set()
                if self._num_bytes > self._most and self._may_stop():
                    await self._items.aclose()
                    raise Unread(f"{self._num_bytes} bytes are unread: the rest waits")
        except Exception as error:
            self._error = error
        finally:
            # After the task's end, which the reader looks at.
            asyncio.get_running_loop().call_soon(self._news.set)
