"""What an engine has done so far, for exporters.

Counting costs a round nothing: the counters are sums of the sessions' own statistics. Ended
sessions are added once, when they end; running ones are added at each reading.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.session import Session, SessionStatistics

if TYPE_CHECKING:  # it loads torch, which a gateway does without
    from paceline.target import Target

MAX_KEPT = 4096
"""How many ended requests and how many steps are kept until they are read, the latest ones."""


@dataclass(slots=True)
class MethodCounters:
    """Totals of the sessions that asked for one method.

    Attributes:
        num_rounds: verifications of one session; with ``engine: diffusion``, finished blocks.
        num_forwards: of the target, for its sessions.
        num_drafts: rounds that drafted something.
        num_draft_tokens: sum of the drafts' depths, which is what :attr:`acceptance_rate` counts.
        num_draft_nodes: nodes of the drafts.
        num_accepted_tokens: drafted tokens that were committed.
        num_tokens: generated tokens.
        drafts_per_position: entry ``i`` counts rounds whose draft reached depth ``i + 1``.
        accepted_per_position: entry ``i`` counts accepted tokens at depth ``i + 1``.
        draft_seconds, verify_seconds: sums over rounds.
        num_drafters_lost: sessions that lost their drafter and continued as AR.
        states_bytes: of the target's states, sent to drafters in other processes.
    """

    num_rounds: int = 0
    num_forwards: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_draft_nodes: int = 0
    num_accepted_tokens: int = 0
    num_tokens: int = 0
    drafts_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    num_drafters_lost: int = 0
    states_bytes: int = 0

    def add(self, stats: SessionStatistics) -> None:
        """Add a session's statistics."""
        self.num_rounds += stats.num_rounds
        self.num_forwards += stats.num_target_forwards
        self.num_drafts += stats.drafted_by_depth[0] if stats.drafted_by_depth else 0
        self.num_draft_tokens += stats.num_drafted
        self.num_draft_nodes += stats.num_draft_nodes
        self.num_accepted_tokens += stats.num_accepted
        self.num_tokens += stats.num_tokens
        self.draft_seconds += stats.draft_seconds
        self.verify_seconds += stats.verify_seconds
        self.num_drafters_lost += stats.drafter_lost
        self.states_bytes += stats.states_bytes
        _add(self.drafts_per_position, stats.drafted_by_depth)
        _add(self.accepted_per_position, stats.accepted_by_depth)

    def copy(self) -> MethodCounters:
        """An independent copy."""
        result = MethodCounters()
        for name in self.__slots__:
            value = getattr(self, name)
            setattr(result, name, list(value) if isinstance(value, list) else value)
        return result

    def lengths(self) -> dict[int, int]:
        """Number of rounds by the depth of their draft; depth 0 is AR."""
        reached = [self.num_rounds, *self.drafts_per_position, 0]
        depths = range(len(reached) - 1)
        return {d: reached[d] - reached[d + 1] for d in depths if reached[d] > reached[d + 1]}


def _add(totals: list[int], counts: list[int]) -> None:
    totals += [0] * (len(counts) - len(totals))
    for i, count in enumerate(counts):
        totals[i] += count


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """One session that has ended; seconds are None if it ended before that point.

    Attributes:
        method: the method that it asked for.
        queue_seconds: from submission to admission.
        first_token_seconds: from submission to the first token.
        seconds_per_token: mean over the tokens after the first one.
        seconds: from submission to the end.
    """

    method: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    queue_seconds: float | None
    first_token_seconds: float | None
    seconds_per_token: float | None
    seconds: float

    @staticmethod
    def of(session: Session) -> EndedRequest:
        """The record of a finished session."""
        stats = session.stats
        begin, first, end = stats.started_at, stats.first_token_at, stats.finished_at or 0.0
        later = stats.num_tokens - 1
        return EndedRequest(
            method=session.method_name,
            finish_reason=session.finish_reason or "",
            prompt_tokens=session.prompt_length,
            output_tokens=stats.num_tokens,
            queue_seconds=None if stats.admitted_at is None else stats.admitted_at - begin,
            first_token_seconds=None if first is None else first - begin,
            seconds_per_token=(end - first) / later if first is not None and later > 0 else None,
            seconds=end - begin,
        )


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine started; of ``requests``, ``steps``, ``gaps`` what is new.

    Attributes:
        methods: totals by the method that sessions asked for.
        states: number of sessions in each state now.
        kv_used, kv_capacity: KV entries; 0 if the target is on another machine.
        kv_cached: KV entries that hold a cached prefix and that no session uses.
        prefix_queried, prefix_hit, prefix_evicted: tokens that admitted sessions looked up in the
            prefix cache, tokens found there, and tokens evicted from it.
        num_prompt_tokens: prompt tokens of admitted sessions.
        num_preemptions: how often a session had to give its KV memory back for a while.
        finished: sessions by finish reason.
        requests: the requests that have ended.
        steps: seconds of each step that computed something.
        gaps: method, and seconds between two outputs of a request (a round commits one output).
    """

    methods: dict[str, MethodCounters] = field(default_factory=dict)
    states: Counter[str] = field(default_factory=Counter)
    kv_used: int = 0
    kv_capacity: int = 0
    kv_cached: int = 0
    prefix_queried: int = 0
    prefix_hit: int = 0
    prefix_evicted: int = 0
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    requests: list[EndedRequest] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    gaps: list[tuple[str, float]] = field(default_factory=list)


class CounterBook:
    """The counters of one engine. Used only by the thread that steps it."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_preemptions = 0
        self.steps: deque[float] = deque(maxlen=MAX_KEPT)
        self._methods: dict[str, MethodCounters] = {}
        self._finished: Counter[str] = Counter()
        self._requests: deque[EndedRequest] = deque(maxlen=MAX_KEPT)
        self._gaps: deque[tuple[str, float]] = deque(maxlen=MAX_KEPT)

    def ended(self, session: Session) -> None:
        """Count a session that has ended."""
        self._finished[session.finish_reason or ""] += 1
        self._requests.append(EndedRequest.of(session))
        self._take_gaps(session)
        self._methods.setdefault(session.method_name, MethodCounters()).add(session.stats)

    def _take_gaps(self, session: Session) -> None:
        self._gaps.extend((session.method_name, gap) for gap in session.gaps)
        session.gaps.clear()

    def rounds(self, running: Iterable[Session]) -> tuple[int, float]:
        """Number of rounds of all sessions so far, and the seconds that they spent verifying."""
        totals = self.methods(running).values()
        return sum(t.num_rounds for t in totals), sum(t.verify_seconds for t in totals)

    def methods(self, running: Iterable[Session]) -> dict[str, MethodCounters]:
        """Totals by the method that sessions asked for, running sessions included."""
        totals = {name: counters.copy() for name, counters in self._methods.items()}
        for session in running:
            totals.setdefault(session.method_name, MethodCounters()).add(session.stats)
        return totals

    def take(self, running: list[Session], target: Target | None = None) -> EngineCounters:
        """The counters, running sessions included; empties ``requests``, ``steps``, ``gaps``.

        Args:
            target: its KV memory is counted if the target is in this process.
        """
        for session in running:
            self._take_gaps(session)
        result = EngineCounters(
            methods=self.methods(running),
            states=Counter(session.state.value for session in running),
            num_prompt_tokens=self.num_prompt_tokens,
            num_preemptions=self.num_preemptions,
            finished=Counter(self._finished),
            requests=list(self._requests),
            steps=list(self.steps),
            gaps=list(self._gaps),
        )
        from paceline.target import ModelTarget

        if isinstance(target, ModelTarget):
            result.kv_capacity = target.kv_capacity
            result.kv_used = target.kv_capacity - target.num_free
            if target.prefixes is not None:
                result.kv_cached = target.prefixes.num_idle
                result.prefix_queried = target.prefixes.num_queried
                result.prefix_hit = target.prefixes.num_hit
                result.prefix_evicted = target.prefixes.num_evicted
        self._requests.clear()
        self.steps.clear()
        self._gaps.clear()
        return result
