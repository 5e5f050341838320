"""Takes the length with the most committed tokens per second; length 0 is AR.

SmartSpec, Liu et al. 2024 (arXiv 2406.14066): goodput = expected tokens of a round / its seconds.
A moving average of acceptance at each depth gives the expected tokens. The seconds come from
measurements on this machine when the models were loaded (:mod:`paceline.profile`), and every round
corrects them; without measurements, they are learnt from the rounds alone. The sessions of an
engine share what they learn about a round's costs and about the acceptance to expect at first.

:class:`Goodput` chooses the length itself. :class:`WhilePays` lets another controller choose, and
drafts nothing while that controller's drafts promise fewer tokens per second than AR.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline.lengths.base import (
    COST_MEMORY,
    LENGTH_MAX,
    LENGTH_MIN,
    TRY_SHARE,
    LengthBounds,
    LengthContext,
    LengthController,
    LengthPart,
    Line,
    depth_ahead,
    length_bounds,
    rounds_for_a_try,
)
from paceline.tree import accepted_path
from paceline.types import Budget, Load, Need, Outcome, RoundCosts, ShadowDraft, StopRule

if TYPE_CHECKING:
    from paceline.knobs import Knobs
    from paceline.view import SessionView

Costs = Callable[[int, Load], float]  # seconds of a round with drafts of this depth

PRIOR_ACCEPTANCE = 0.7  # expected before anything was drafted; soon outweighed
PRIOR_WEIGHT = 2.0  # weight of that expectation, in tokens
HALF_MISSES = 1.0 / 0.85  # how many times as often a tree of half the nodes misses, until tried
MEMORY = 0.95  # decay of acceptance in each round that drafted: about the last 20 count
AR_MEMORY = 0.8  # decay of the ratio of observed to measured seconds in rounds without a draft
LOW_OF = 6  # of how many rounds the lowest value counts
FRESH = 8  # rounds with drafts after which the cost of rounds without a draft counts as outdated
SURPRISE = 1.4  # factor by which costs must change for a round without a draft to be worth seeing
CATCH_UP = 4  # rounds without a draft for which a drafter catches up at negligible cost
# While drafting does not pay, it is tried again after a pause (in rounds). The pause doubles each
# time and is long enough for the tries to take no more than their share of the time.
TRY_DEPTH, TRY_ROUNDS = 2, 2
FIRST_PAUSE, LONGEST_PAUSE = 2, 16
LEAST_GAIN = 1.01  # required gain of drafting over AR: estimates are no more accurate than this
# While drafting does not pay, shadow drafts are still made now and then and judged by the tokens
# that AR commits, which is far cheaper than a try. They get a share of the time, too.
SHADOW_SHARE = 0.03
SHADOW_LEAST = 0.05  # least cost of one, in rounds without a draft: it may delay other sessions
SHADOW_MEMORY = 0.9  # decay of acceptance for each of their tokens: they look for a change
FAR_APART = 2.0  # tokens: drafts whose depths differ so much show well what a token costs
# Each batch size begins with AR_SAMPLES steps without drafts; more follow at doubling intervals.
# If costs were measured, only the latter happen.
AR_SAMPLES = 2
STEADY_STEPS = 2  # short drafts that an engine begins with: a single one may be disturbed
AR_INTERVALS = 16, 128
HOPELESS_SHARE = 0.005  # share of the time for tries if not even perfect drafts would pay
UNLIKELY = 0.002  # probability of reaching a depth below which the depth is not considered
READ_LEAST = 32  # tokens that a drafter must read at once to show what reading costs
HORIZON = 128  # tokens within which a drafter must earn back the cost of reading a text first
RECONSIDER = 8  # rounds without a draft after which the costs are computed again


def expected_tokens(acceptance: Sequence[float], depth: int) -> float:
    """Committed tokens of a round that drafts ``depth`` tokens, the target's own included.

    Args:
        acceptance: probability that depth ``i + 1`` is accepted, given that depth ``i`` was; the
            last entry holds for all greater depths.
    """
    total = reached = 1.0
    for level in range(depth):
        reached *= acceptance[min(level, len(acceptance) - 1)]
        total += reached
    return total


def best_length(
    acceptance: Sequence[float], costs: Costs, load: Load, shortest: int = 0, longest: int = 16
) -> int:
    """The depth in ``[shortest, longest]`` with the highest goodput; the smallest of equals."""
    best, highest = shortest, -1.0
    tokens = reached = 1.0  # as in expected_tokens, one depth after another
    for depth in range(longest + 1):
        if depth:
            reached *= acceptance[min(depth, len(acceptance)) - 1]
            tokens += reached
        if depth >= shortest:
            goodput = tokens / costs(depth, load)
            if goodput > highest * (1 + 1e-9):
                best, highest = depth, goodput
    return best


class AcceptanceEstimate:
    """Moving acceptance rate of each depth, given that the depth before was accepted.

    Args:
        prior: gives the expected rate of a token while nothing is known.
    """

    def __init__(self, longest: int, prior: Callable[[], float], memory: float = MEMORY) -> None:
        self._prior = prior
        self._memory = memory
        self._tried = [0.0] * longest
        self._hit = [0.0] * longest

    def observe(self, asked: int, accepted: int, memory: float | None = None) -> None:
        """Learn from a round that asked for ``asked`` tokens; undrafted ones count as wrong."""
        memory = memory or self._memory
        for level in range(len(self._tried)):
            self._tried[level] *= memory
            self._hit[level] *= memory
        for level in range(min(asked, accepted + 1, len(self._tried))):
            self._tried[level] += 1.0
            self._hit[level] += level < accepted

    def mean(self) -> float:
        """Rate over all depths."""
        return self._shrunk(sum(self._hit), sum(self._tried), self._prior())

    def rates(self) -> list[float]:
        """Rate of each depth; near the mean for depths at which few tokens were tried."""
        mean = self.mean()
        return [self._shrunk(h, t, mean) for h, t in zip(self._hit, self._tried, strict=True)]

    @staticmethod
    def _shrunk(hit: float, tried: float, prior: float) -> float:
        return (hit + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT)


class Sizes:
    """The acceptance rates of drafts with different node budgets, the largest first.

    The rate of an untried size is estimated from the size that was tried last: drafts with fewer
    nodes miss more often.

    Args:
        prior: gives the expected rate of a token, by size, while nothing is known.
    """

    def __init__(
        self, longest: int, count: int, prior: Callable[[int], float], memory: float = MEMORY
    ) -> None:
        self._last: int | None = None  # the size tried last
        self._prior = prior
        self._each = [
            AcceptanceEstimate(longest, lambda size=size: self._guess(size), memory)  # type: ignore[misc]
            for size in range(count)
        ]

    def of(self, size: int) -> AcceptanceEstimate:
        return self._each[size]

    def observe(self, size: int, asked: int, accepted: int, memory: float | None = None) -> None:
        """As :meth:`AcceptanceEstimate.observe`."""
        self._each[size].observe(asked, accepted, memory)
        self._last = size

    def _guess(self, size: int) -> float:
        known = self._last
        if known is None or known == size:
            return self._prior(size)
        return 1.0 - min(1.0, (1.0 - self.of(known).mean()) * HALF_MISSES ** (size - known))


class _Batch:
    """Costs of rounds at one batch size: rounds without drafts, drafting, verifying drafts."""

    def __init__(self, interval: int) -> None:
        self.ar = Line()
        self.draft = Line()
        self.verify = Line()
        self.steps_since_ar = 0
        self.ar_interval = interval


class _Step:
    """The sessions of one step; the :class:`Load` that the loop asks with identifies it."""

    def __init__(self, load: Load, measures_ar: bool) -> None:
        self.load = load
        self.measures_ar = measures_ar
        self.asked: list[Budget] = []
        self.steady = True  # no drafter must first catch up with a prompt or a pause
        self.behind = 0  # tokens that drafters must read before they draft
        self.has_shadow = False
        self.overlaps = False  # drafts are made while the target verifies
        self.num_looking = 0  # sessions of method auto that look for drafts
        self.more_than_looks = False  # for one of them a model drafts, or a lookup reads a prompt
        self.first = ""  # id of its first session
        self.recorded = False

    @property
    def deepest(self) -> int:
        return max(budget.depth for budget in self.asked)


class _Low:
    """The lowest of the last few values: other work on the machine may have raised some of them."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=LOW_OF)

    def add(self, value: float) -> float:
        self._values.append(value)
        return min(self._values)

    def clear(self) -> None:
        self._values.clear()

    def __len__(self) -> int:
        return len(self._values)


class _Measured:
    """Seconds of a verification: measured when the models were loaded, corrected by the rounds."""

    def __init__(self, profile: RoundCosts) -> None:
        self._profile = profile
        # By batch size and rows; kept because every length of a round needs them.
        self._by_rows: dict[int, list[float]] = defaultdict(list)
        # Observed over measured seconds. _drift: in rounds without a draft, where texts are longer
        # than the measured context, caches are colder, and other work uses the machine. _beyond: by
        # what further factor rounds with a draft differ, as a drafter may work at the same time.
        # Only rounds without a draft show whether the machine has changed.
        self._drift, self._beyond = 1.0, 1.0
        self._seen = 1.0  # their product when a round without a draft was last seen
        self._since_ar = FRESH + 1  # rounds that drafted since then
        self._num_drafted = 0
        self._ratios = _Low(), _Low()  # in rounds without and with a draft
        self._measures_anew = False  # whether rounds without a draft are being measured anew

    @property
    def wants_ar(self) -> bool:
        """Whether costs have changed so much that a round without a draft is worth observing."""
        moved = self._drift * self._beyond / self._seen
        return self._since_ar > FRESH and not 1.0 / SURPRISE < moved < SURPRISE

    def verify(self, tokens: float, batch: int, drafts: bool) -> float:
        """Seconds to verify ``tokens`` tokens of each session of a batch."""
        seconds = self._measured(tokens, batch) * self._drift
        return seconds * self._beyond if drafts else seconds

    def observe(self, tokens: float, batch: int, drafts: bool, seconds: float) -> None:
        """Learn from a verification that took ``seconds``."""
        if seconds <= 0:
            return
        stale = self._since_ar > FRESH
        ratios = self._ratios[drafts]
        if not drafts and self.wants_ar and not self._measures_anew:
            ratios.clear()
            self._measures_anew = True
        ratio = ratios.add(seconds / self._measured(tokens, batch))
        if len(ratios) < (2 if drafts else 3):
            return
        if drafts:
            self._since_ar += 1
            self._num_drafted += 1
            memory = min(COST_MEMORY, self._num_drafted / (self._num_drafted + 1))
            self._beyond = _moved(self._beyond, ratio / self._drift, memory)
            return
        both = self._drift * self._beyond
        self._drift = _moved(self._drift, ratio, 0.0 if stale else AR_MEMORY)
        if stale and self._num_drafted:  # the change was the machine's, not the drafts'
            self._beyond = both / self._drift
        self._since_ar, self._seen, self._measures_anew = 0, self._drift * self._beyond, False

    def _measured(self, tokens: float, batch: int) -> float:
        known, rows = self._by_rows[batch], tokens * batch
        below = int(rows)
        while len(known) <= below + 1:
            known.append(self._profile.verify(max(1.0, len(known) / batch), batch))
        return known[below] + (rows - below) * (known[below + 1] - known[below])


def _moved(value: float, new: float, memory: float) -> float:
    """The next value of a moving average; one disturbed round moves it little."""
    return memory * value + (1.0 - memory) * min(new, 4.0 * value)


class Learnt:
    """What the sessions of an engine with equal speculation configs have learnt together.

    Args:
        sizes: node budgets of drafts, the largest first.
        profile: measured costs of this machine.
        method: name in the catalogue; tells whether the profile covers its drafts.
    """

    def __init__(
        self,
        longest: int,
        sizes: Sequence[int] = (0,),
        profile: RoundCosts | None = None,
        method: str = "",
    ) -> None:
        self.acceptance = Sizes(
            longest,
            len(sizes),
            lambda size: 1.0 - (1.0 - PRIOR_ACCEPTANCE) * HALF_MISSES**size,
            memory=0.99,
        )
        self.measured = _Measured(profile) if profile else None
        self._profile = profile if profile and method in profile.methods else None
        self.knows_drafting = self._profile is not None
        # Measured and observed seconds of drafts. What they take beyond the measured ones is added
        # and no factor: in actors and on devices it is mostly the way there, for every depth alike.
        self._drafts = Line()
        self._last_drafts: deque[tuple[float, float]] = deque(maxlen=LOW_OF)
        if self._profile is not None:
            self._drafts.add(one := self._profile.draft(1, 1), one)
        # Seconds for a drafter to read one token of a text for which it has not drafted yet.
        self.read_seconds = self._profile.read_seconds if self._profile else 0.0
        self._readings = _Low()
        # Rounds without a draft, over all sessions, that are left to pay for tries and for shadow
        # drafts.
        self.rounds_without = 0.0
        self.shadow_rounds = 0.0
        # Seconds of a round beside drafting and verifying, mostly to deliver its tokens.
        self.overhead = 0.0
        self._overheads = _Low()
        self._last_round: tuple[str, float] = "", 0.0  # its session, and when it ended
        self._waited = 1.0  # share of the drafts that had not arrived when they were needed
        self._steady_steps = 0
        # Nodes that drafts had, out of those asked for; and drafts that were found, out of those
        # asked for: drafters that copy often find none.
        self._nodes = self._asked_nodes = PRIOR_WEIGHT * max(1, longest)
        self._found = self._asked = PRIOR_WEIGHT
        self._ar_interval = AR_INTERVALS[self.measured is not None]
        # By the next power of two above the batch size: few enough classes to learn soon.
        self._batches: dict[int, _Batch] = defaultdict(lambda: _Batch(self._ar_interval))
        self._step: _Step | None = None
        self._fitted: tuple[Load | None, float, float, float] = None, 0.0, 0.0, 0.0
        self._drafting: tuple[Load | None, float, float] = None, 0.0, 0.0

    def step(self, load: Load) -> _Step:
        """The step that ``load`` belongs to; a new one decides whether it measures AR."""
        if self._step is None or self._step.load is not load:
            batch = self._batches[_size(load)]
            batch.steps_since_ar += 1
            if self.measured is not None:
                unknown = self.measured.wants_ar
            else:
                unknown = batch.ar.weight < AR_SAMPLES - 0.5
            self._step = _Step(load, unknown or batch.steps_since_ar >= batch.ar_interval)
        return self._step

    def record(
        self, step: _Step, outcome: Outcome, draft_seconds: float, verify_seconds: float
    ) -> None:
        """Record the cost of a step. The first of its sessions calls this, with its own outcome."""
        if step.recorded:
            return
        step.recorded = True
        self._see_overhead(step, draft_seconds + verify_seconds)
        if step.overlaps:
            return  # the seconds are of both, and tell of neither
        batch = self._batches[_size(step.load)]
        deepest, nodes = step.deepest, outcome.draft.num_nodes
        if self.measured is not None:
            if len(step.asked) > 1:  # for the other sessions, only what they asked for is known
                others = sum(budget.nodes for budget in step.asked[1:])
                nodes += round(self.found * self._fill * others)
            sessions = max(len(step.asked), step.load.num_running)
            tokens = 1 + nodes / sessions
            if not step.has_shadow:  # made in another process, it may slow this one down
                self.measured.observe(tokens, sessions, nodes > 0, verify_seconds)
        if deepest == 0:
            batch.ar.add(0, verify_seconds + (0.0 if step.has_shadow else draft_seconds))
            batch.steps_since_ar = 0
            batch.ar_interval = min(2 * batch.ar_interval, AR_INTERVALS[1])
            return
        if step.steady and not self.knows_drafting:
            self._steady_steps += 1
            if self._steady_steps == 1:
                batch.draft = Line()  # it held only a first guess
            self.knows_drafting = self._steady_steps >= STEADY_STEPS
        if step.has_shadow:
            pass  # the seconds of shadow drafts and others cannot be told apart
        elif draft_seconds == 0.0:
            self._waited *= MEMORY
        elif step.steady or not batch.draft.weight or draft_seconds < batch.draft.at(deepest):
            batch.draft.add(deepest, draft_seconds)
            self._waited = MEMORY * self._waited + 1.0 - MEMORY
            if self._profile is not None and step.steady and draft_seconds > 0:
                measured = self._profile.draft(deepest, max(1, step.load.num_running))
                self._last_drafts.append((measured, draft_seconds))
                # the one that other work on the machine disturbed least
                self._drafts.add(*min(self._last_drafts, key=lambda each: each[1] - each[0]))
        elif step.behind >= READ_LEAST and len(step.asked) == 1:
            reading = max(0.0, draft_seconds - self.draft_seconds(deepest, step.load))
            self.read_seconds = self._readings.add(reading / step.behind)
        mean = sum(budget.depth for budget in step.asked) / len(step.asked)
        batch.verify.add(mean, verify_seconds)

    def _see_overhead(self, step: _Step, seconds: float) -> None:
        """Learn what a round took beyond ``seconds``, if its session had the last round, too."""
        (session_id, ended), now = self._last_round, time.perf_counter()
        self._last_round = step.first, now
        if step.first == session_id:
            self.overhead = self._overheads.add(max(0.0, now - ended - seconds))

    def observe(self, asked: Budget, size: int, num_nodes: int, num_accepted: int) -> None:
        """Learn from the outcome of a session's draft."""
        found = num_nodes > 0
        self._found = MEMORY * self._found + found
        self._asked = MEMORY * self._asked + 1.0
        if not found:
            return
        self.acceptance.observe(size, asked.depth, num_accepted)
        self._nodes = MEMORY * self._nodes + min(asked.nodes, num_nodes)
        self._asked_nodes = MEMORY * self._asked_nodes + asked.nodes

    @property
    def found(self) -> float:
        """Share of the drafts that are not empty."""
        return self._found / self._asked

    @property
    def _fill(self) -> float:
        return self._nodes / self._asked_nodes if self._asked_nodes else 1.0

    def costs(self, nodes: Callable[[int], int]) -> Costs:
        """Seconds of a round by depth and load; ``nodes`` gives the nodes of a draft by depth."""
        measured = self.measured
        if measured is None:
            return self.seconds
        fill, found = self._fill, self.found

        def seconds(depth: int, load: Load) -> float:
            batch = max(1, load.num_running)
            without = measured.verify(1.0, batch, False) + self.overhead
            if depth == 0:
                return without
            verify = measured.verify(1.0 + fill * nodes(depth), batch, True) + self.overhead
            return found * verify + (1.0 - found) * without + self.draft_seconds(depth, load)

        return seconds

    def verify_seconds(self, nodes: float, load: Load) -> float:
        """Seconds of a round in which each session verifies ``nodes`` nodes; drafting left out."""
        if self.measured is not None:
            batch = max(1, load.num_running)
            return self.measured.verify(1.0 + nodes, batch, nodes > 0) + self.overhead
        ar = self._nearest(_size(load), lambda batch: batch.ar)
        seconds = ar.ar.at(0) if ar else 1.0
        near = self._nearest(_size(load), lambda batch: batch.verify) if nodes else None
        if near is None:
            return seconds
        first, slope = near.verify.fit(near.ar.at(0) if near.ar.weight else None)
        return max(seconds, first + slope * nodes)

    def row_seconds(self, nodes: int, load: Load) -> float:
        """Seconds that ``nodes`` rows of one session add to a round that has drafts.

        0 where no costs were measured: rounds do not tell rows of one session from those of all.
        """
        if self.measured is None:
            return 0.0
        batch = max(1, load.num_running)
        with_rows = self.measured.verify(1.0 + nodes / batch, batch, True)
        return with_rows - self.measured.verify(1.0, batch, True)

    def draft_seconds(self, depth: int, load: Load) -> float:
        """Seconds to wait for a draft: learnt or measured; 0 while unknown, so that it is tried."""
        if self._drafting[0] is not load:  # computed once: it is needed for every depth
            self._drafting = load, *self._draft_line(load)
        _, first, slope = self._drafting
        return self._waited * (first + slope * depth)

    def _draft_line(self, load: Load) -> tuple[float, float]:
        """Seconds until a draft arrives: for any draft, and for each of its tokens."""
        if self._profile is not None:
            batch = max(1, load.num_running)
            one, more = self._profile.draft(1, batch), self._profile.draft(1 + _SPAN, batch)
            slope = (more - one) / _SPAN
            measured, observed = self._drafts.mean
            factor = min(1.0, observed / measured)
            return observed - factor * (measured - one + slope), factor * slope
        if not self.knows_drafting:
            return 0.0, 0.0  # a single draft may have been disturbed
        known = self._nearest(_size(load), lambda batch: batch.draft)
        return known.draft.fit(least_spread=FAR_APART) if known is not None else (0.0, 0.0)

    def seconds(self, depth: int, load: Load) -> float:
        """Expected seconds of a round if nothing was measured. An unknown batch size uses the
        nearest known one."""
        if self._fitted[0] is not load:  # computed once for all depths and sessions of a step
            self._fitted = load, *self._fit(_size(load))
        _, ar, first, slope = self._fitted
        return first + slope * depth if depth else ar

    def _fit(self, size: int) -> tuple[float, float, float]:
        """Seconds of a round without a draft; of one with a draft: at depth 0, and per token."""
        ar = self._nearest(size, lambda batch: batch.ar)
        ar_seconds = ar.ar.at(0) if ar else 1.0
        near = self._nearest(size, lambda batch: batch.draft)
        if near is None:
            return ar_seconds, ar_seconds, 0.0  # drafting counts as free until it is tried
        origin = near.ar.at(0) if near.ar.weight else None
        scale = ar_seconds / origin if ar and origin else 1.0
        verify, draft = near.verify.fit(origin), near.draft.fit()
        return ar_seconds, scale * verify[0] + draft[0], scale * verify[1] + draft[1]

    def _nearest(self, size: int, line: Callable[[_Batch], Line]) -> _Batch | None:
        """The costs of the batch size nearest to ``size`` for which ``line`` is known."""
        known = [s for s, batch in self._batches.items() if line(batch).weight]
        return self._batches[min(known, key=lambda s: abs(s - size))] if known else None


_SPAN = 3  # difference of the depths from which a profile gives a draft's cost per token


def _size(load: Load) -> int:
    return load.num_running.bit_length()


class _Sharing:
    """Decides between drafting and AR, with what the sessions of an engine learn together."""

    def __init__(
        self,
        name: str,
        bounds: LengthBounds,
        sizes: Sequence[int],
        config: Knobs,
        context: LengthContext,
    ) -> None:
        self._bounds = bounds
        self._sizes = sizes
        profile = context.costs if bounds.longest else None
        self._learnt = context.shared(
            (name, config), lambda: Learnt(bounds.longest, sizes, profile, config.method)
        )
        learnt = self._learnt.acceptance
        self._acceptance = Sizes(bounds.longest, len(sizes), lambda size: learnt.of(size).mean())
        self._step: _Step | None = None
        self._asked = Budget(0, 0)
        self._size = 0  # index of the size that was asked for
        self._has_drafted = False
        self._rounds_without = self._unread = 0
        self._shadow: ShadowDraft | None = None
        self._shadow_share = context.shadow_share
        self._pause = FIRST_PAUSE
        self._tries_left = 0
        # What tries would cost, in rounds without a draft; and when that was computed, by load and
        # number of those rounds. It holds until one of them changes.
        self._price = 0.0
        self._priced_at: tuple[int, int] | None = None

    def _ask(self, budget: Budget, session: SessionView, step: _Step) -> Budget:
        """Note in the step what this session asks for; returns the budget."""
        depth = max(0, min(budget.depth, session.remaining - 1))
        step.first = step.first or session.session_id
        step.overlaps |= budget.beside
        self._asked = Budget(depth, budget.nodes if depth else 0, beside=budget.beside)
        step.asked.append(self._asked)
        if budget.shadow is not None:
            step.has_shadow = True
            self._shadow, self._has_drafted, self._unread = budget.shadow, True, 0
        if depth:
            self._shadow = None
            behind = self._behind(session)
            step.behind += behind
            step.steady &= behind == 0
        return budget

    def _behind(self, session: SessionView) -> int:
        """Tokens that the drafter must read before it drafts; 0 if they are few."""
        if not self._has_drafted:
            return session.length
        return self._unread if self._unread > CATCH_UP else 0

    def _earns(self, session: SessionView, expected: float, spent: float, ar: float) -> bool:
        """Whether rounds of ``expected`` tokens and ``spent`` seconds save time against rounds of
        ``ar`` seconds without a draft, although the drafter must first read what it missed."""
        saved = (ar - LEAST_GAIN * spent / expected) * min(session.remaining, HORIZON)
        return saved > 0 and saved >= self._learnt.read_seconds * self._behind(session)

    def _price_try(
        self, session: SessionView, load: Load, costs: Costs, short: int, longest: int
    ) -> None:
        """Compute what it costs to try drafts of depth ``short`` while drafts do not pay.

        If not even fully accepted drafts would pay, tries get a smaller share of the time: they can
        only reveal that verification costs less than measured.
        """
        learnt, ar = self._learnt, costs(0, load)
        lost = TRY_ROUNDS * (costs(short, load) - ar) + learnt.read_seconds * self._behind(session)
        hopeful = any(
            (d + 1) * ar > costs(d, load) for d in {short, (short + longest) // 2, longest}
        )
        share = TRY_SHARE if hopeful else HOPELESS_SHARE
        self._price = rounds_for_a_try(lost, ar, share)
        self._priced_at = self._moment(load)

    def _found_nothing(self, load: Load, seconds: float) -> None:
        """Continue a try that found no draft, as long as AR rounds have paid for its time."""
        if self._tries_left:
            learnt = self._learnt
            ar = learnt.costs(lambda depth: depth)(0, load)
            learnt.rounds_without -= max(0.0, seconds / ar - 1.0) / TRY_SHARE
            if learnt.rounds_without < 0:
                self._tries_left = 0

    def _rates(self, size: int) -> list[float]:
        """Acceptance by depth; empty drafts count as rejected at the first depth."""
        rates = self._acceptance.of(size).rates()
        if rates:
            rates[0] *= self._learnt.found
        return rates

    def _moment(self, load: Load) -> tuple[int, int]:
        return load.num_running, self._rounds_without // RECONSIDER

    def _next_shadow(self, session: SessionView, load: Load, wanted: Budget) -> ShadowDraft | None:
        """A shadow draft like ``wanted``, to judge the drafter by.

        None while one is under way, or until AR rounds have paid for its time.
        """
        depth = min(wanted.depth, session.remaining - 1)
        share = None if self._shadow is not None or depth < 1 else self._shadow_share(session)
        if share is None:
            return None
        learnt = self._learnt
        ar = learnt.costs(lambda depth: depth)(0, load)
        seconds = learnt.draft_seconds(depth, load) + learnt.read_seconds * self._behind(session)
        price = rounds_for_a_try(max(share * seconds, SHADOW_LEAST * ar), ar, SHADOW_SHARE)
        if learnt.shadow_rounds < price:
            return None
        learnt.shadow_rounds -= price
        return ShadowDraft(session.length, Budget(depth, wanted.nodes))

    def _judge_shadow(self, session: SessionView) -> None:
        """Learn from a shadow draft, token by token, by comparing it with what AR commits.

        After the same context, a token is drafted with the same probability wherever the draft
        began, so each token counts as a draft of one token.
        """
        shadow = self._shadow
        if shadow is None:
            return
        if shadow.failed or session.length < shadow.length:
            self._shadow = None
        if shadow.draft is None:
            return
        tokens, depth = session.token_ids[shadow.length :], shadow.budget.depth
        num_right = len(accepted_path(shadow.draft, [*tokens, -1]))
        for _ in range(num_right - shadow.num_judged):
            self._acceptance.observe(self._size, 1, 1, SHADOW_MEMORY)
        if num_right > shadow.num_judged:
            shadow.num_judged, self._priced_at = num_right, None
        if num_right == len(tokens) < depth:
            return  # right so far, and not complete yet
        self._shadow, nodes = None, shadow.draft.num_nodes
        self._learnt.observe(shadow.budget, self._size, nodes, num_right)
        if num_right < min(depth, nodes):
            self._acceptance.observe(self._size, 1, 0, SHADOW_MEMORY)
        self._priced_at = None

    def _tries(self) -> bool:
        """Whether to try a draft although drafting does not pay."""
        if not self._tries_left:
            if self._rounds_without < self._pause or self._learnt.rounds_without < self._price:
                return False
            self._learnt.rounds_without -= self._price
            self._tries_left = TRY_ROUNDS
        return True

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        """As :meth:`paceline.lengths.base.LengthController.observe`."""
        step, asked = self._step, self._asked
        if step is None:
            return  # the round verified a draft that this controller did not ask for
        self._step = None
        self._learnt.record(step, outcome, draft_seconds, verify_seconds)
        if asked.depth == 0:
            self._rounds_without += 1
            self._unread += 1
            self._learnt.rounds_without += 1 / len(step.asked)
            self._learnt.shadow_rounds += 1 / len(step.asked)
            return
        self._has_drafted, self._priced_at = True, None
        self._rounds_without = self._unread = 0
        if asked.beside and not outcome.draft.num_nodes:
            return  # nothing was ready, which a draft made in turn always is
        self._learnt.observe(asked, self._size, outcome.draft.num_nodes, outcome.num_accepted)
        if not outcome.draft.num_nodes:
            self._found_nothing(step.load, draft_seconds + verify_seconds)
            return
        self._acceptance.observe(self._size, asked.depth, outcome.num_accepted)
        if self._tries_left:
            self._tries_left -= 1
            if outcome.num_accepted >= asked.depth:  # continue while drafts are accepted whole
                self._tries_left, self._pause = max(1, self._tries_left), FIRST_PAUSE
            elif not self._tries_left:
                self._pause = min(2 * self._pause, LONGEST_PAUSE)


def _reach(rates: Sequence[float]) -> int:
    """The depth beyond which drafts are hardly ever accepted, so that none need be considered."""
    reached = 1.0
    for depth, rate in enumerate(rates):
        reached *= rate
        if reached < UNLIKELY:
            return depth
    return len(rates)


class Goodput(_Sharing):
    """Chooses the length anew in every round; tries short drafts now and then if none pay.

    For trees, it also chooses the best of a few node budgets.
    """

    needs: frozenset[Need] = frozenset()
    stop_rule: StopRule | None = None

    def __init__(self, bounds: LengthBounds, config: Knobs, context: LengthContext) -> None:
        super().__init__("goodput", bounds, bounds.sizes, config, context)

    def budget(self, session: SessionView, load: Load) -> Budget:
        """Budget for this round; see :func:`best_length`."""
        step = self._step = self._learnt.step(load)
        self._judge_shadow(session)
        depth, shadow = self._choose(session, load, step), None
        if depth == 0 and not step.measures_ar:
            usual = self._bounds.clip(self._bounds.start)
            shadow = self._next_shadow(session, load, Budget(usual, self._nodes(self._size, usual)))
        nodes = self._nodes(self._size, depth)
        return self._ask(Budget(depth, nodes, shadow=shadow), session, step)

    def _nodes(self, size: int, depth: int) -> int:
        if depth == 0 or not self._bounds.is_tree:
            return depth
        return self._sizes[size]

    def _choose(self, session: SessionView, load: Load, step: _Step) -> int:
        bounds, learnt = self._bounds, self._learnt
        if bounds.longest == 0:
            return 0
        if step.measures_ar and bounds.shortest == 0:
            return 0
        if learnt.measured is None and not learnt.knows_drafting:
            return max(1, bounds.shortest)
        short = min(TRY_DEPTH, bounds.longest)
        if self._priced_at == self._moment(load):
            return short if self._tries() else 0
        depth = self._best(session, load)
        if depth == 0:
            self._size = len(self._sizes) - 1
            costs = learnt.costs(lambda depth: self._nodes(self._size, depth))
            self._price_try(session, load, costs, short, min(bounds.longest, bounds.nodes))
            return short if self._tries() else 0
        self._tries_left = 0
        return depth

    def _best(self, session: SessionView, load: Load) -> int:
        """The depth with the highest goodput over all sizes; ``shortest`` if none gains.

        Sets ``_size``.
        """
        bounds, learnt = self._bounds, self._learnt
        chosen, highest, gains = 0, -1.0, True
        for size, nodes in enumerate(self._sizes if learnt.measured else self._sizes[:1]):
            longest = bounds.longest
            if size:
                longest = max(bounds.shortest, min(longest, nodes))
            costs = learnt.costs(lambda depth, size=size: self._nodes(size, depth))  # type: ignore[misc]
            rates = self._rates(size)
            longest = max(bounds.shortest, min(longest, _reach(rates)))
            depth = best_length(rates, costs, load, bounds.shortest, longest)
            expected, spent = expected_tokens(rates, depth), costs(depth, load)
            if expected / spent > highest * (1 + 1e-9):
                self._size, chosen, highest = size, depth, expected / spent
                gains = depth <= bounds.shortest or self._earns(
                    session, expected, spent, costs(0, load)
                )
        return chosen if gains else bounds.shortest


class WhilePays(_Sharing):
    """Lets another controller choose while its drafts give more tokens per second than AR.

    While they do not, that controller observes no rounds and needs nothing from the target; its
    drafts are tried again as :class:`Goodput` tries its own. A draft that was made ahead, without
    being asked for, is verified in any case.

    Args:
        inner: the method's default controller.
    """

    def __init__(
        self,
        inner: LengthController,
        bounds: LengthBounds,
        config: Knobs,
        context: LengthContext,
    ) -> None:
        super().__init__("while pays", bounds, (bounds.nodes,), config, context)
        self._inner = inner
        self.stop_rule = inner.stop_rule
        self._drafts = False  # in this round

    @property
    def needs(self) -> frozenset[Need]:
        """The inner controller's needs, in rounds that draft."""
        return self._inner.needs if self._drafts else frozenset()

    @property
    def ahead(self) -> int:
        """The inner controller's depth; see :func:`paceline.lengths.base.depth_ahead`."""
        return depth_ahead(self._inner, self._bounds.start)

    def budget(self, session: SessionView, load: Load) -> Budget:
        """The inner controller's budget, a smaller one if only that pays, or none."""
        step = self._step = self._learnt.step(load)
        self._judge_shadow(session)
        budget = wanted = self._inner.budget(session, load)
        if budget.depth:
            depth = self._depth(session, budget, load, step)
            if depth == 0:
                shadow = None if step.measures_ar else self._next_shadow(session, load, wanted)
                budget = Budget(0, 0, shadow=shadow)
            elif depth < budget.depth:
                nodes = budget.nodes if self._bounds.is_tree else depth
                budget = Budget(depth, nodes, budget.exit_layer)
            self._drafts = depth > 0
        else:
            self._drafts = True  # the inner controller's own choice
        return self._ask(budget, session, step)

    def _depth(self, session: SessionView, wanted: Budget, load: Load, step: _Step) -> int:
        """The depth to draft, at most what the inner controller wants."""
        learnt = self._learnt
        if step.measures_ar:
            return 0
        if learnt.measured is None and not learnt.knows_drafting:
            return wanted.depth
        if self._priced_at != self._moment(load):
            costs = learnt.costs(lambda depth: wanted.nodes if depth == wanted.depth else depth)
            rates, shorter = self._rates(0), 0
            if not self._bounds.is_tree and wanted.exit_layer is None:
                shorter = best_length(rates, costs, load, 0, wanted.depth)
            for depth in (wanted.depth, shorter):
                expected = expected_tokens(rates, depth)
                if depth and self._earns(session, expected, costs(depth, load), costs(0, load)):
                    self._tries_left = 0
                    return depth
            self._price_try(session, load, costs, min(wanted.depth, TRY_DEPTH), wanted.depth)
        return min(wanted.depth, TRY_DEPTH) if self._tries() else 0

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        drafted = self._drafts
        super().observe(outcome, draft_seconds, verify_seconds)
        if drafted:
            self._inner.observe(outcome, draft_seconds, verify_seconds)


GOODPUT = LengthPart(
    make=lambda knobs, context: Goodput(length_bounds(knobs), knobs, context),
    knobs=(LENGTH_MIN, LENGTH_MAX),
    guarded=False,
    replayable=True,
)
