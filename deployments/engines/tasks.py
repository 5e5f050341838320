"""An engine whose sessions are tasks on the event loop of its services.

:class:`TaskEngine` has the interface of :class:`paceline.engine.EngineThread`, so gateway,
GenerateService, the OpenAI endpoint, metrics and access control do not know the difference.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from typing import Self, TypeVar

from paceline.counters import CounterBook, EngineCounters
from paceline.engine import EngineLimits, EventHandler, RoundEvent
from paceline.errors import PacelineError, ResourceExhausted
from paceline.request import Request
from paceline.rpc.errors import InternalError
from paceline.sampling import TokenLogprobs
from paceline.session import Session
from paceline.types import Load

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens that a session has committed together: a round of the engine.

    Attributes:
        num_accepted: how many of them a draft brought.
    """

    token_ids: tuple[int, ...]
    num_accepted: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


class TaskEngine(ABC):
    """Sessions in, events out, without a thread that steps. Runs on one event loop.

    A subclass checks requests (:meth:`_session`) and generates (:meth:`_outputs`).

    Attributes:
        sessions: the unfinished sessions by id.
    """

    name: str
    """What failed, in the errors of sessions."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.sessions: dict[str, Session] = {}
        self._book = CounterBook()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @abstractmethod
    def _session(self, request: Request) -> Session:
        """The session of a request.

        Raises:
            InvalidArgument, FailedPrecondition: this engine cannot run it.
        """

    @abstractmethod
    def _outputs(self, session: Session, request: Request) -> AsyncGenerator[Committed]:
        """Generate, commit and count the tokens of a session, until it is finished."""

    # --- the engine thread's interface ------------------------------------------------------------

    @property
    def engine(self) -> Self:
        """The engine itself: it has no thread of its own."""
        return self

    def call(self, function: Callable[[Self], T]) -> Future[T]:
        """Run ``function(engine)`` at once."""
        future: Future[T] = Future()
        try:
            future.set_result(function(self))
        except Exception as error:
            future.set_exception(error)
        return future

    def submit(self, request: Request, on_event: EventHandler | None = None) -> Future[Session]:
        """See :meth:`paceline.engine.Engine.submit`."""
        return self.call(lambda engine: engine._submit(request, on_event))

    def _submit(self, request: Request, on_event: EventHandler | None) -> Session:
        session = self._session(request)
        if len(self.sessions) >= self.limits.max_sessions + self.limits.max_waiting:
            raise ResourceExhausted(f"{len(self.sessions)} sessions are running or waiting already")
        session.tenant = request.tenant
        if len(request.committed):
            session.resume(tuple(request.committed))
        self.sessions[session.session_id] = session
        self._book.num_prompt_tokens += session.prompt_length
        run = self._run(session, request, on_event or (lambda event: None))
        self._tasks[session.session_id] = asyncio.get_running_loop().create_task(run)
        return session

    def park(self, session_id: str, parked: bool) -> Future[None]:
        """The engine places its sessions itself: nothing to do."""
        return self.call(lambda engine: None)

    def cancel(self, session_id: str) -> Future[bool]:
        """End a session; False if there is none."""
        return self.call(lambda engine: engine._cancel(session_id))

    def _cancel(self, session_id: str) -> bool:
        task = self._tasks.get(session_id)
        if task is not None:  # one that has just been made begins first, and so ends its session
            task.get_loop().call_soon(task.cancel)
        return task is not None

    async def _run(self, session: Session, request: Request, tell: EventHandler) -> None:
        """Run a session from its submission to its last event."""
        sent = session.streamable_length  # of committed tokens
        try:
            # To leave the loop, as at a stop string, ends the generation.
            async with aclosing(self._outputs(session, request)) as outputs:
                async for output in outputs:
                    # Text that could still turn out to be the start of a stop string is held back.
                    done = session.finished
                    safe = len(session.text) if done else session.streamable_length
                    text, sent = session.text[sent:safe], max(sent, safe)
                    if output.token_ids or done:
                        tell(
                            RoundEvent(
                                session, session.stats.num_rounds, output.token_ids,
                                output.num_accepted, text, None, done, output.logprobs,
                            )
                        )  # fmt: skip
                    if done:
                        break
        except asyncio.CancelledError:
            session.finish("cancelled")
            tell(RoundEvent(session, 0, (), 0, session.text[sent:], None, True))
        except Exception as error:
            known = isinstance(error, PacelineError)
            session.error = error if known else InternalError(f"{self.name}: {error}")
            session.finish("error")
            tell(RoundEvent(session, 0, (), 0, "", None, True))
        finally:
            self.sessions.pop(session.session_id, None)
            self._tasks.pop(session.session_id, None)
            self._book.ended(session)

    def count_rounds(self) -> tuple[int, float]:
        """Rounds of all sessions so far, and the seconds that their verifications took."""
        return self._book.rounds(self.sessions.values())

    def take_counters(self) -> EngineCounters:
        """Counters since the start, and the requests that ended since the last call."""
        return self._book.take(list(self.sessions.values()))

    def _load(self, num_waiting: int) -> Load:
        """How many sessions run and wait, and their tokens."""
        num_tokens = sum(session.length for session in self.sessions.values())
        return Load(len(self.sessions) - num_waiting, num_waiting, num_tokens)

    def cancel_all(self) -> None:
        """End every session; any thread may call it."""
        for task in list(self._tasks.values()):
            task.get_loop().call_soon_threadsafe(task.cancel)
