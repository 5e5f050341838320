"""Streams of requests with a time limit for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from paceline.rpc.errors import DeadlineExceeded

T = TypeVar("T")


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
