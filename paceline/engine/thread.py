"""An engine on its own thread, and the interface that services use."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from paceline.engine.engine import Engine
from paceline.engine.events import EventHandler
from paceline.errors import FailedPrecondition
from paceline.request import Request
from paceline.session import Session

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Serving(Protocol):
    """What serves prompts: an EngineThread, or another engine with the same interface.

    ``engine`` has those members of :class:`paceline.engine.Engine` that services and metrics use.
    """

    @property
    def engine(self) -> Any: ...

    def submit(self, request: Request, on_event: EventHandler | None = None) -> Future[Session]: ...

    def cancel(self, session_id: str) -> Future[bool]: ...

    def call(self, function: Callable[[Any], T]) -> Future[T]: ...

    def park(self, session_id: str, parked: bool) -> Future[None]: ...

    def stop(self, timeout: float = 10.0) -> None: ...


def _stopped() -> FailedPrecondition:
    return FailedPrecondition("the engine has stopped")


class EngineThread:
    """Steps an engine on its own thread; any thread may call any method."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._calls: deque[tuple[Callable[[Engine], object], Future[object]]] = deque()
        self._wakeup = engine.wakeup  # notified of calls and of arrived drafts
        self._stopping = False
        engine.interrupted = lambda: bool(self._calls) or self._stopping
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)

    def start(self) -> EngineThread:
        self._thread.start()
        return self

    def stop(self, timeout: float = 10.0) -> None:
        """Cancel every session, finish the current step and end the thread."""
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)
        else:  # the thread was never started
            while self._calls:
                self._calls.popleft()[1].set_exception(_stopped())

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run ``function(engine)`` between two steps."""
        future: Future[T] = Future()
        with self._wakeup:
            if self._stopping:
                future.set_exception(_stopped())
                return future
            self._calls.append((function, future))  # type: ignore[arg-type]
            self._wakeup.notify_all()
        return future

    def submit(self, request: Request, on_event: EventHandler | None = None) -> Future[Session]:
        """:meth:`Engine.submit` on the engine's thread."""
        return self.call(lambda engine: engine.submit(request, on_event))

    def cancel(self, session_id: str) -> Future[bool]:
        """:meth:`Engine.cancel` on the engine's thread."""
        return self.call(lambda engine: engine.cancel(session_id))

    def park(self, session_id: str, parked: bool) -> Future[None]:
        """Take a session's place in KV memory away, or let it wait for one again."""
        if parked:
            return self.call(lambda engine: engine.scheduler.park(session_id))
        return self.call(lambda engine: engine.scheduler.unpark(session_id))

    def _run(self) -> None:
        engine = self.engine
        while True:
            self._run_calls()
            if self._stopping:
                self._run_calls()  # the last ones: call() refuses new ones by now
                for session_id in list(engine.sessions):
                    engine.cancel(session_id)
                return
            if engine.has_work:
                try:
                    engine.step(wait_s=1.0)
                except Exception as error:  # a bug: without this, callers would wait for ever
                    logger.exception("a step failed; all sessions end")
                    engine.fail(list(engine.sessions.values()), error)
            else:
                with self._wakeup:
                    self._wakeup.wait_for(lambda: self._calls or self._stopping, 1.0)

    def _run_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(self.engine)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
