"""From the engine's thread to the event loop of the gRPC server, and back."""

from __future__ import annotations

import asyncio
import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from paceline.config import SpeculationConfig
from paceline.engine import EventHandler, RoundEvent
from paceline.sampling import SamplingParams
from paceline.session import Session

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
    """An ``on_event`` that runs ``handler`` on ``loop``, and does nothing once that is closed.

    Call it on the loop; what it returns may be called from any thread.
    """
    if not hasattr(os, "eventfd"):  # not Linux

        def on_event(event: RoundEvent) -> None:
            with suppress(RuntimeError):  # the server is gone; the engine goes on
                loop.call_soon_threadsafe(handler, event)

        return on_event
    mailbox = _mailboxes.get(loop)
    if mailbox is None:
        mailbox = _mailboxes[loop] = _Mailbox(loop)
    put = mailbox.put
    return lambda event: put(handler, event)


class _Mailbox:
    """``call_soon_threadsafe``, but its caller keeps the interpreter's lock.

    asyncio wakes a loop with a system call that gives the lock away, once for each event, and the
    engine gets it back when the loop is done with sending: the next forward waits for that. Here
    the loop wakes up, finds the lock taken and has it during the forward.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._letters: deque[tuple[Callable[[RoundEvent], Any], RoundEvent]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)
        loop.add_reader(self._wake, self._read)

    def put(self, handler: Callable[[RoundEvent], Any], event: RoundEvent) -> None:
        """Thread-safe."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            return  # the server is gone; the engine goes on
        self._letters.append((handler, event))
        _keeping_the_lock.eventfd_write(self._wake, ctypes.c_uint64(1))

    def _read(self) -> None:
        os.eventfd_read(self._wake)
        loop = self._loop()
        while self._letters and loop is not None:
            handler, event = self._letters.popleft()
            loop.call_soon(handler, event)


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = (
    weakref.WeakKeyDictionary()
)
_keeping_the_lock = ctypes.PyDLL(None)


async def on_engine(thread: Serving, function: Callable[[Any], T]) -> T:
    """Run ``function`` between two steps of the engine and wait for its result."""
    return await asyncio.wrap_future(thread.call(function))
