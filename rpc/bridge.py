"""From the engine's thread to the event loop of the gRPC server, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from paceline.engine import RoundEvent, Serving

T = TypeVar("T")


def hand_over(
    loop: asyncio.AbstractEventLoop, handler: Callable[[RoundEvent], Any]
) -> Callable[[RoundEvent], None]:
    """An ``on_event`` that runs ``handler`` on ``loop``, and does nothing after its end."""

    def on_event(event: RoundEvent) -> None:
        with suppress(RuntimeError):  # the server is gone; the engine goes on
            loop.call_soon_threadsafe(handler, event)

    return on_event


async def on_engine(thread: Serving, function: Callable[[Any], T]) -> T:
    """Run ``function`` between two steps of the engine and wait for its result."""
    return await asyncio.wrap_future(thread.call(function))
