"""Which sessions run: waiting queue, places in KV memory, shares of prefill, batches."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.admission import KvAdmission, PrefillPace
from paceline.batching import STRATEGIES, Batching, BatchStrategy
from paceline.counters import CounterBook
from paceline.engine.drafting import Drafting
from paceline.engine.fairness import WAIT_S, FairShares
from paceline.engine.returns import Returns
from paceline.engine.waiting import WaitEstimate
from paceline.errors import InvalidArgument, ResourceExhausted
from paceline.session import Session, SessionState
from paceline.target import Target
from paceline.types import Load, Outcome

logger = logging.getLogger(__name__)
EXPECTED_QUEUES = 4
"""Refused sessions that are expected back, in full queues."""
MASK_WAIT_S = 0.005
"""Seconds that a step waits for the masks of constraints, all together."""
MASK_LOOK_S = 0.001
"""Seconds between two looks at masks that take long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """How much an engine takes on.

    Attributes:
        max_sessions: how many sessions may run at the same time.
        max_waiting: how many sessions may queue; submit refuses more.
        max_wait_s: submit refuses a request whose first token would come later, by what was
            measured; None: it waits as long as it takes.
        prefill_chunk: most prompt tokens that a step computes, over all sessions.
        prefill_stretch: how many times as long a step may take when it also reads prompts, while
            other sessions decode; None: only ``prefill_chunk`` limits it.
        prefix_cache: keep KV entries of ended sessions for later ones with the same beginning.
        batch_strategy: see :mod:`paceline.batching`.
        batch_size: most sessions that one step verifies; None: all that are ready.
    """

    max_sessions: int = 64
    max_waiting: int = 1024
    max_wait_s: float | None = None
    prefill_chunk: int = 256
    prefill_stretch: float | None = None
    prefix_cache: bool = True
    batch_strategy: BatchStrategy = "ragged"
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.prefill_stretch is not None and not self.prefill_stretch > 1:
            raise InvalidArgument("prefill_stretch", self.prefill_stretch, "above 1, or None")
        if self.max_wait_s is not None and not self.max_wait_s > 0:
            raise InvalidArgument("max_wait_s", self.max_wait_s, "above 0, or None")
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
    """Decides which of an engine's sessions wait, hold a place in KV memory, and join a step.

    It opens a session at the target and at its drafter when the session gets a place, and closes it
    there when the session gives the place up.
    """

    def __init__(
        self, limits: EngineLimits, target: Target, drafting: Drafting, book: CounterBook
    ) -> None:
        self.sessions: dict[str, Session] = {}
        self.batching = Batching(limits.batch_strategy, limits.batch_size)
        self._target = target
        self._drafting = drafting
        drafting.shares_prefixes = limits.prefix_cache
        self._book = book
        self._max_waiting = limits.max_waiting
        self._max_wait_s = limits.max_wait_s
        self._wait = WaitEstimate(limits.max_sessions)
        self._returns = Returns(EXPECTED_QUEUES * limits.max_waiting)
        self._waiting: deque[Session] = deque()
        self._admission = KvAdmission(target.kv_capacity, limits.max_sessions)
        self._pace = PrefillPace(limits.prefill_chunk, limits.prefill_stretch)
        self._shares = FairShares()

    @property
    def is_idle(self) -> bool:
        """Whether no session waits or holds a place."""
        return not (self.sessions or self._waiting or self._admission.num_admitted)

    @property
    def load(self) -> Load:
        """The engine's load, as length controllers see it."""
        running = [s for s in self.sessions.values() if s.state is not SessionState.WAITING]
        return Load(len(running), len(self._waiting), sum(s.length for s in running))

    def in_state(self, *states: SessionState) -> list[Session]:
        """The sessions in any of these states, in order of arrival."""
        return [session for session in self.sessions.values() if session.state in states]

    # --- places ---------------------------------------------------------------------------------

    def add(self, session: Session) -> None:
        """Queue a new session.

        Raises:
            InvalidArgument: its id is in use.
            ResourceExhausted: the first token would come too late.
        """
        if session.session_id in self.sessions:
            raise InvalidArgument("session_id", session.session_id, "an id that is not in use")
        key = _key_of(session.tenant, session.priority, session.token_ids)
        try:
            self._check_wait(session, self._returns.num_before(*key))
        except ResourceExhausted as error:
            error.retry_after_s = self._returns.promise(*key, error.retry_after_s)
            raise
        self._returns.came(*key)
        self.sessions[session.session_id] = session
        self._shares.add(session)
        self._waiting.append(session)

    def check_queue(self, tenant: str, priority: int, token_ids: Sequence[int]) -> None:
        """Refuse a request if the queue is full, before anything is made for it.

        Raises:
            ResourceExhausted: its place is another's.
        """
        key = _key_of(tenant, priority, token_ids)
        # Of refused ones that come back before it; half of the queue is kept for them.
        num_first = self._returns.num_before(*key)
        room = self._max_waiting - min(num_first, self._max_waiting // 2)
        if len(self._waiting) >= room:
            self.admit()  # some of them may fit already and wait only for the next step
        if len(self._waiting) < room:
            return
        waiting = Counter(each.tenant for each in self._waiting)
        if not self._shares.may_wait(tenant, waiting, room):
            seconds = self._wait.seconds(1 + num_first, 0)
            raise ResourceExhausted(
                f"{len(self._waiting)} sessions are waiting already",
                retry_after_s=self._returns.promise(*key, seconds),
            )

    def _check_wait(self, session: Session, num_first: int) -> None:
        """Refuse a session that would wait too long; those that come back go first."""
        if self._max_wait_s is None or self.is_idle:
            return
        prefilling = self.in_state(SessionState.PREFILLING)
        num_tokens = session.num_to_read + sum(map(self._target.prefill_left, prefilling))
        num_ahead = 0
        if self._waiting or not self._admission.fits(session):
            ahead = [each for each in self._waiting if each.priority <= session.priority]
            tenants = Counter(each.tenant for each in ahead)
            # Tenants take turns.
            turns = len(tenants | Counter({session.tenant: 1})) * (1 + tenants[session.tenant])
            num_ahead = min(1 + len(ahead), turns)
            num_tokens += sum(each.num_to_read for each in ahead[:num_ahead])
        seconds = self._wait.seconds(num_ahead, num_tokens)
        if seconds > self._max_wait_s / 2:  # else there is room, if they come or not
            seconds = self._wait.seconds(num_ahead + num_first, num_tokens)
        if seconds > self._max_wait_s:
            raise ResourceExhausted(
                f"the first token would come after about {seconds:.0f} s ({len(self._waiting)} "
                f"sessions wait for a place); the limit is {self._max_wait_s:g} s",
                retry_after_s=seconds - self._max_wait_s,
            )

    def remove(self, session: Session) -> None:
        """Remove a session that has ended."""
        if session in self._waiting:
            self._waiting.remove(session)
        if self._admission.remove(session):
            self._shares.left_place(session)
            self._wait.place_left(len(self._waiting))
            self._target.close(session)
            self._drafting.close(session)
        if self.sessions.pop(session.session_id, None) is not None:
            self._book.ended(session)
            self._shares.remove(session)

    def make_room(self) -> None:
        """Before a step, move sessions that must give way to the head of the queue.

        Those are the ones that KV memory can no longer hold and, while a session waits whose tenant
        has less than its share of the places, one of the tenant that has most.
        """
        leaving = self._admission.overdrawn()
        if not leaving and self._waiting and self._shares.contested:
            first = self._shares.first(self._waiting)
            if not self._admission.fits(first):
                other = self._shares.gives_way(first, self._admission.admitted)
                leaving = [] if other is None else [other]
        for session in leaving:
            logger.info("session %s gives way to others", session.session_id)
            self._give_up_place(session)
            self._waiting.appendleft(session)

    def _give_up_place(self, session: Session) -> None:
        self._book.num_preemptions += 1
        self._drafting.suspend(session)
        self._admission.remove(session)
        self._shares.left_place(session)
        self._target.close(session)
        session.state = SessionState.WAITING

    def park(self, session_id: str) -> None:
        """Between two steps: take a session's place away until :meth:`unpark`.

        Its KV memory goes; it keeps its tokens. A session that has ended is ignored.
        """
        session = self.sessions.get(session_id)
        if session is None:
            return
        if session.state is not SessionState.WAITING:
            self._give_up_place(session)
        elif session in self._waiting:
            self._waiting.remove(session)

    def unpark(self, session_id: str) -> None:
        """Let a parked session wait for a place."""
        session = self.sessions.get(session_id)
        if session is not None:
            self._waiting.append(session)

    def admit(self) -> None:
        """Give places to waiting sessions while they fit.

        First come, first served among those of a tenant with the same priority, so short requests
        cannot starve a long one. The tenants take turns.
        """
        while self._waiting and self._admission.fits(session := self._shares.first(self._waiting)):
            self._waiting.remove(session)
            self._admission.add(session)
            self._shares.took_place(session)
            self._drafting.open(session)  # first: what its drafter knows need not be computed
            self._target.open(session)
            session.state = SessionState.PREFILLING
            if session.stats.admitted_at is None:
                session.stats.admitted_at = time.perf_counter()
                nodes = 0 if session.branches is None else session.branches.num_nodes
                self._book.num_prompt_tokens += session.prompt_length + nodes
            self.after_prefill(session)

    # --- steps ----------------------------------------------------------------------------------

    def share_prefill(self) -> list[tuple[Session, int]]:
        """How many prompt tokens of which sessions to read in this step."""
        prefilling = self.in_state(SessionState.PREFILLING)
        if prefilling and self._shares.contested:
            served = self._shares.served(self._could_run())
            prefilling = [session for session in prefilling if session.tenant in served]
        any_decoding = self._admission.num_admitted > len(prefilling)
        return self._pace.share(prefilling, self._target.prefill_left, any_decoding)

    def _could_run(self) -> list[Session]:
        """The sessions that a step could serve now."""
        drafted = filter(self._drafting.has_draft, self.in_state(SessionState.DRAFTING))
        return [*self.in_state(SessionState.PREFILLING, SessionState.READY), *drafted]

    def await_turn(self, wakeup: threading.Condition, deliver: Callable[[], object]) -> None:
        """Before a step, wait a moment for drafts of tenants whose turn it is, if others could run.

        Args:
            wakeup: notified of each draft that arrives.
            deliver: sends what clients must have before they draft.
        """
        if not self._shares.contested:
            return
        drafting = self.in_state(SessionState.DRAFTING)
        drafting = [each for each in drafting if not self._drafting.has_draft(each)]
        ready = self._could_run()
        tenants = self._shares.awaited(ready, drafting) if drafting and ready else set()
        if not tenants:
            return
        mine = [session for session in drafting if session.tenant in tenants]
        started = time.perf_counter()
        deliver()
        with wakeup:
            wakeup.wait_for(lambda: any(map(self._drafting.has_draft, mine)), WAIT_S)
        arrived = {session.tenant for session in mine if self._drafting.has_draft(session)}
        self._shares.waited(time.perf_counter() - started, tenants, arrived)

    def is_read(self, session: Session) -> bool:
        """Whether a session's last step has read the rest of its prompt."""
        prefilling = session.state is SessionState.PREFILLING
        return prefilling and self._target.prefill_left(session) == 0

    def ends_read(self, session: Session) -> bool:
        """Whether a session ends now that its prompt is read, because no round is to follow."""
        return session.branches is not None and self.is_read(session)

    def after_prefill(self, session: Session) -> None:
        """Start a session's first round if its whole prompt is read, and a round is to follow."""
        if self.is_read(session) and session.branches is None:
            self.next_round(session)
            if session.stats.prefilled_at is None:
                session.stats.prefilled_at = time.perf_counter()
            self._drafting.want(session)

    def next_round(self, session: Session) -> None:
        """Set the state in which a session waits for its next round."""
        later = self._drafting.comes_later(session)
        session.state = SessionState.DRAFTING if later else SessionState.READY

    def ask_for_drafts(self) -> None:
        """Ask drafters in other processes, for all sessions that have no draft under way."""
        states = SessionState.PREFILLING, SessionState.DRAFTING
        self._drafting.ask(self.in_state(*states), self.load)

    @property
    def has_ready(self) -> bool:
        """Whether any session can be verified without waiting."""
        drafted = filter(self._drafting.has_draft, self.in_state(SessionState.DRAFTING))
        return bool(_with_masks([*self.in_state(SessionState.READY), *drafted]))

    @property
    def patience_left(self) -> float:
        """Seconds until a session may be ready without a draft: the mask of its constraint."""
        ready = self.in_state(SessionState.READY)
        known = all(s.constraint is None or s.constraint.ready(False) for s in ready)
        return math.inf if known else MASK_LOOK_S

    def choose(self, prefill: Sequence[tuple[Session, int]] = ()) -> list[Session]:
        """Choose the sessions that this step verifies from those that are ready.

        Args:
            prefill: what the step reads.
        """
        for session in self._drafting.arrive(self.in_state(SessionState.DRAFTING)):
            session.state = SessionState.READY
        ready = _with_masks(self.in_state(SessionState.READY))
        if self._shares.contested:
            served = self._shares.served([*ready, *(session for session, _ in prefill)])
            ready = [session for session in ready if session.tenant in served]
        # Neighbours with the same adapter share its products.
        chosen = sorted(self.batching.choose(ready), key=lambda session: session.adapter)
        for session in chosen:
            session.state = SessionState.VERIFYING
        return chosen

    def observe(
        self,
        seconds: float,
        rounds: Sequence[tuple[Session, Outcome]],
        prefill: Sequence[tuple[Session, int]],
    ) -> None:
        """Record a step that took ``seconds``."""
        self._book.steps.append(seconds)
        num_read = sum(count for _, count in prefill)
        self._pace.observe(seconds, len(rounds), num_read)
        # A step that reads all there is could have read more: it does not tell how long more takes.
        if any(map(self._target.prefill_left, self.in_state(SessionState.PREFILLING))):
            self._wait.prompts_read(num_read, seconds)
        if self._shares.contested:
            drafted = ((session, 1 + outcome.draft.num_nodes) for session, outcome in rounds)
            self._shares.charge(seconds, [*drafted, *prefill])
        for session, _ in prefill:
            self.after_prefill(session)


def _key_of(
    tenant: str, priority: int, token_ids: Sequence[int]
) -> tuple[tuple[str, int], Callable[[], int]]:
    """How :class:`Returns` knows a request: its group, and a hash of its tokens."""
    return (tenant, priority), lambda: hash(tuple(token_ids))


def _with_masks(sessions: Sequence[Session]) -> list[Session]:
    """The sessions whose round need not wait for the mask of their constraint.

    Masks are computed side by side; a step waits a moment for them, not for those that are late.
    """
    for session in sessions:
        if session.constraint is not None:
            session.constraint.begin()
    until = time.perf_counter() + MASK_WAIT_S
    found = [
        session
        for session in sessions
        if session.constraint is None or session.constraint.ready(time.perf_counter() < until)
    ]
    # One that was late may hold up those that were ready before it.
    return [each for each in found if each.constraint is None or not each.constraint.is_held]
