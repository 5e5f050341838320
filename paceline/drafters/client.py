"""Drafts that arrive from outside: a client that runs its own drafter and asks for verification."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from paceline.drafters.base import Drafter
from paceline.errors import FailedPrecondition, SessionNotFound
from paceline.types import Budget, Draft, Outcome, Verification

if TYPE_CHECKING:
    from paceline.view import SessionView


class StatesSink(Protocol):
    """Takes the target's states of one session, on the engine's thread."""

    def open(self, session: SessionView) -> None:
        """The target reads the session from its first token."""
        ...

    def read_prompt(self, session: SessionView, read: Verification) -> None:
        """As :meth:`paceline.drafters.base.Drafter.read_prompt`."""
        ...

    def observe(self, session: SessionView, outcome: Outcome) -> None:
        """Take what a round computed; the session has its tokens."""
        ...


class ClientDrafter(Drafter):
    """Holds one draft per session until the engine requests it, or the request until it comes.

    It passes the target's states on for sessions whose clients read them.
    """

    elsewhere = True
    from_client = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[str] = set()
        self._waiting: dict[str, Future[Draft]] = {}
        self._offered: dict[str, Draft] = {}
        self._sinks: dict[str, StatesSink] = {}

    @property
    def is_idle(self) -> bool:
        """Whether it keeps nothing for any session."""
        with self._lock:
            return not (self._open or self._waiting or self._offered or self._sinks)

    def expect(self, session_id: str, sink: StatesSink | None = None) -> None:
        """Accept drafts for a session that waits for its place in the engine; thread-safe.

        The caller must also call :meth:`forget`: the engine neither opens nor closes a session that
        ends while it waits.

        Args:
            sink: takes the target's states for the client; None: it reads none.
        """
        with self._lock:
            self._open.add(session_id)
            if sink is not None:
                self._sinks[session_id] = sink

    def forget(self, session_id: str) -> None:
        """Drop what is kept for a session that has ended or is about to; thread-safe."""
        with self._lock:
            self._open.discard(session_id)
            self._offered.pop(session_id, None)
            self._sinks.pop(session_id, None)
            future = self._waiting.pop(session_id, None)
        if future is not None:
            future.cancel()

    def suspend(self, session: SessionView, draft: Draft | Future[Draft] | None) -> None:
        """Keep a draft, arrived or pending, until the engine requests it again."""
        with self._lock:
            self._waiting.pop(session.session_id, None)
            if isinstance(draft, Future):
                draft = draft.result() if draft.done() else None
            if draft is not None:
                self._offered[session.session_id] = draft

    def open(self, session: SessionView) -> None:
        self.expect(session.session_id)
        if (sink := self._sink(session)) is not None:
            sink.open(session)

    def _sink(self, session: SessionView) -> StatesSink | None:
        with self._lock:
            return self._sinks.get(session.session_id)

    def read_prompt(self, session: SessionView, read: Verification) -> None:
        if (sink := self._sink(session)) is not None:
            sink.read_prompt(session, read)

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        for session, outcome in zip(sessions, outcomes, strict=True):
            if (sink := self._sink(session)) is not None:
                sink.observe(session, outcome)

    def close(self, session: SessionView) -> None:
        self.forget(session.session_id)

    def offer(self, session_id: str, draft: Draft) -> None:
        """Hand a draft over; thread-safe.

        Raises:
            SessionNotFound: no such session is open or expected.
            FailedPrecondition: its previous draft has not been verified yet.
        """
        with self._lock:
            if session_id not in self._open:
                raise SessionNotFound(session_id)
            future = self._waiting.pop(session_id, None)
            if future is not None:
                future.set_result(draft)
            elif session_id in self._offered:
                raise FailedPrecondition("the previous draft has not been verified yet")
            else:
                self._offered[session_id] = draft

    def propose(
        self, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[Future[Draft]]:
        futures = []
        for session in sessions:
            future: Future[Draft] = Future()
            with self._lock:
                draft = self._offered.pop(session.session_id, None)
                if draft is None:
                    self._waiting[session.session_id] = future
            if draft is not None:
                future.set_result(draft)
            futures.append(future)
        return futures
