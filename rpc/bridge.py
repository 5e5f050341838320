"""From the engine's thread to the event loop of the gRPC server, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from paceline.config import SpeculationConfig
from paceline.sampling import SamplingParams
from paceline.session import Session

if TYPE_CHECKING:
    from paceline.engine import EventHandler, RoundEvent

T = TypeVar("T")


class Serving(Protocol):
    """What serves prompts: an EngineThread, or another engine with the same face.

    ``engine`` has of :class:`paceline.engine.Engine` what the services and the metrics ask for.
    """

    @property
    def engine(self) -> Any: ...

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        speculation: SpeculationConfig | None = None,
        *,
        session_id: str | None = None,
        on_event: EventHandler | None = None,
        traceparent: str = "",
        cache_scope: str = "",
        prediction: Sequence[int] = (),
        committed: Sequence[int] = (),
    ) -> Future[Session]: ...

    def cancel(self, session_id: str) -> Future[bool]: ...

    def call(self, function: Callable[[Any], T]) -> Future[T]: ...

    def stop(self, timeout: float = 10.0) -> None: ...


def hand_over(
    loop: asyncio.AbstractEventLoop, handler: Callable[[RoundEvent], Any]
) -> Callable[[RoundEvent], None]:
    """An ``on_event`` that runs ``handler`` on ``loop``, and does nothing once that is closed."""

    def on_event(event: RoundEvent) -> None:
        with suppress(RuntimeError):  # the server is gone; the engine goes on
            loop.call_soon_threadsafe(handler, event)

    return on_event


async def on_engine(thread: Serving, function: Callable[[Any], T]) -> T:
    """Run ``function`` between two steps of the engine and wait for its result."""
    return await asyncio.wrap_future(thread.call(function))
