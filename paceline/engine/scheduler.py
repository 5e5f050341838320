"""Which sessions run: waiting queue, places in KV memory, shares of prefill, batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paceline.admission import Admission, PrefillPace
from paceline.batching import STRATEGIES, Batching, BatchStrategy
from paceline.errors import InvalidArgument
from paceline.session import Session, SessionState
from paceline.types import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """How much an engine takes on.

    Attributes:
        max_sessions: sessions that run at the same time.
        max_waiting: sessions that may queue; beyond that, submit is refused.
        prefill_chunk: prompt tokens computed in one step, all sessions together.
        prefill_stretch: a step that reads prompts beside sessions that decode may take so many
            times as long as one without; None sets no limit but ``prefill_chunk``.
        prefix_cache: keep KV entries of sessions that have ended for those that begin alike.
        batch_strategy: see :mod:`paceline.batching`.
        batch_size: sessions that one step verifies; None is all who are ready.
    """

    max_sessions: int = 64
    max_waiting: int = 1024
    prefill_chunk: int = 256
    prefill_stretch: float | None = None
    prefix_cache: bool = True
    batch_strategy: BatchStrategy = "ragged"
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.prefill_stretch is not None and not self.prefill_stretch > 1:
            raise InvalidArgument("prefill_stretch", self.prefill_stretch, "above 1, or None")
        if self.batch_strategy not in STRATEGIES:
            allowed = f"one of {', '.join(STRATEGIES)}"
            raise InvalidArgument("batch_strategy", self.batch_strategy, allowed)
        if self.batch_size is not None and self.batch_size < 1:
            raise InvalidArgument("batch_size", self.batch_size, "an integer >= 1, or None")
        for name in ("max_sessions", "max_waiting", "prefill_chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidArgument(name, value, "an integer >= 1")


class Scheduler:
    """The sessions of an engine, and which of them a step is for.

    Args:
        capacity: KV entries in all.
    """

    def __init__(self, limits: EngineLimits, capacity: int) -> None:
        self.sessions: dict[str, Session] = {}
        self.batching = Batching(limits.batch_strategy, limits.batch_size)
        self._max_waiting = limits.max_waiting
        self._waiting: deque[Session] = deque()
        self._admission = Admission(capacity, limits.max_sessions)
        self._pace = PrefillPace(limits.prefill_chunk, limits.prefill_stretch)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether no more sessions may wait."""
        return len(self._waiting) >= self._max_waiting

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits or holds a place."""
        return not (self.sessions or self._waiting or self._admission.num_admitted)

    @property
    def load(self) -> Load:
        """As length controllers see it."""
        running = [s for s in self.sessions.values() if s.state is not SessionState.WAITING]
        return Load(len(running), len(self._waiting), sum(s.length for s in running))

    def add(self, session: Session) -> None:
        """A new session waits for its place."""
        self.sessions[session.session_id] = session
        self._waiting.append(session)

    def remove(self, session: Session) -> bool:
        """A session has ended; whether it held a place."""
        self.sessions.pop(session.session_id, None)
        if session in self._waiting:
            self._waiting.remove(session)
        return self._admission.remove(session)

    def admit(self) -> Iterator[Session]:
        """Give places to those who wait, while there are some.

        First come, first served: a long request is not starved by short ones.
        """
        while self._waiting and self._admission.fits(self._waiting[0]):
            session = self._waiting.popleft()
            self._admission.add(session)
            session.state = SessionState.PREFILLING
            yield session

    def overdrawn(self) -> list[Session]:
        """Those whom KV memory cannot hold any more, the youngest first."""
        return self._admission.overdrawn()

    def suspend(self, session: Session) -> None:
        """It gives up its place and waits for another one, before all others."""
        self._admission.remove(session)
        session.state = SessionState.WAITING
        self._waiting.appendleft(session)

    def in_state(self, *states: SessionState) -> list[Session]:
        """The sessions in one of these states, in the order in which they came."""
        return [session for session in self.sessions.values() if session.state in states]

    def share_prefill(self, left: Callable[[Session], int]) -> list[tuple[Session, int]]:
        """Prompt tokens to read in this step: equal shares for all prompts.

        Who needs less than that leaves the rest to the others.

        Args:
            left: prompt tokens of a session that are not read yet.
        """
        prefilling = self.in_state(SessionState.PREFILLING)
        if not prefilling:
            return []
        wanted = sorted(((left(s), s) for s in prefilling), key=lambda item: item[0])
        running = self._admission.num_admitted
        room, chosen = self._pace.room(running > len(prefilling)), []
        for i, (count, session) in enumerate(wanted):
            count = min(count, max(1, room // (len(wanted) - i)))
            if count and room:
                chosen.append((session, count))
                room -= count
        return chosen

    def choose(self) -> list[Session]:
        """Who of those who are ready is verified in this step."""
        return self.batching.choose(self.in_state(SessionState.READY))

    def observe(
        self, seconds: float, num_verified: int, prefill: Sequence[tuple[Session, int]]
    ) -> None:
        """What a step took."""
        self._pace.observe(seconds, num_verified, sum(count for _, count in prefill))
