"""The length with the most committed tokens per second, 0 included.

SmartSpec, Liu et al. 2024 (arXiv 2406.14066): goodput = expected tokens of a round / its seconds.
Expected tokens come from a moving average of acceptance at each depth, seconds from the cost
profile of this machine where one is loaded, and are learnt from the rounds themselves otherwise.
Sessions of an engine learn together what a round costs and what acceptance to expect at first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline.lengths.base import LengthBounds, LengthContext, StopRule
from paceline.types import Budget, Load, Need, Outcome

if TYPE_CHECKING:
    from paceline.config import SpeculationConfig
    from paceline.session import Session

Costs = Callable[[int, Load], float]  # seconds of a round with drafts of this depth

PRIOR_ACCEPTANCE = 0.7  # before anything was drafted; soon outweighed
PRIOR_WEIGHT = 2.0  # in tokens
MEMORY = 0.95  # of acceptance, for each round that drafted: about the last 20 count
COST_MEMORY = 0.9  # of seconds, for each step
CATCH_UP = 4  # rounds without a draft that a drafter makes up for at no cost worth counting
# While drafting does not pay, it is tried again after a pause (in rounds), which doubles each
# time and is long enough for the tries to take no more than their share of the time.
TRY_DEPTH, TRY_ROUNDS, TRY_SHARE = 2, 2, 0.02
FIRST_PAUSE, LONGEST_PAUSE = 8, 256
# A batch size begins with so many steps without drafts; more follow at doubling intervals.
AR_SAMPLES = 2
STEADY_STEPS = 2  # short drafts that an engine begins with: one alone may have been disturbed
AR_INTERVALS = 16, 128


def expected_tokens(acceptance: Sequence[float], depth: int) -> float:
    """Committed tokens of a round that drafts ``depth`` tokens, the target's own included.

    Args:
        acceptance: chance that depth ``i + 1`` is accepted when depth ``i`` was; the last one
            holds for all deeper ones.
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
    tokens = reached = 1.0  # as expected_tokens, one depth after the other
    for depth in range(longest + 1):
        if depth:
            reached *= acceptance[min(depth, len(acceptance)) - 1]
            tokens += reached
        if depth >= shortest:
            goodput = tokens / costs(depth, load)
            if goodput > highest * (1 + 1e-9):
                best, highest = depth, goodput
    return best


class Acceptance:
    """Moving acceptance rate of each depth, given that the depth before was accepted.

    Args:
        prior: expected rate of a token as long as nothing is known.
    """

    def __init__(self, longest: int, prior: Callable[[], float], memory: float = MEMORY) -> None:
        self._prior = prior
        self._memory = memory
        self._tried = [0.0] * longest
        self._hit = [0.0] * longest

    def observe(self, asked: int, accepted: int) -> None:
        """A round that asked for ``asked`` tokens; those that were not drafted count as wrong."""
        for level in range(len(self._tried)):
            self._tried[level] *= self._memory
            self._hit[level] *= self._memory
        for level in range(min(asked, accepted + 1, len(self._tried))):
            self._tried[level] += 1.0
            self._hit[level] += level < accepted

    def mean(self) -> float:
        """Rate over all depths."""
        return self._shrunk(sum(self._hit), sum(self._tried), self._prior())

    def rates(self) -> list[float]:
        """Rate of each depth; where few tokens were tried, near the mean."""
        mean = self.mean()
        return [self._shrunk(h, t, mean) for h, t in zip(self._hit, self._tried, strict=True)]

    @staticmethod
    def _shrunk(hit: float, tried: float, prior: float) -> float:
        return (hit + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT)


class Line:
    """A straight line through recent points ``(depth, seconds)``, older ones counting less."""

    def __init__(self) -> None:
        self.weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, depth: float, seconds: float) -> None:
        """Learn a point.

        One far above the line (somebody else had the machine) counts as twice the line; one far
        below says that the points so far were disturbed, and outweighs them.
        """
        memory = COST_MEMORY
        if self.weight:
            expected = self.at(depth)
            memory = 0.1 if seconds < 0.5 * expected else memory
            seconds = min(seconds, 2.0 * expected)
        self.weight = memory * self.weight + 1.0
        self._x = memory * self._x + depth
        self._y = memory * self._y + seconds
        self._xx = memory * self._xx + depth * depth
        self._xy = memory * self._xy + depth * seconds

    def at(self, depth: float, origin: float | None = None) -> float:
        """Seconds at ``depth``; see :meth:`fit`."""
        first, slope = self.fit(origin)
        return first + slope * depth

    def fit(self, origin: float | None = None) -> tuple[float, float]:
        """Seconds at depth 0 and for each token.

        While only one depth is known, the line starts at ``origin`` seconds, or else at half of
        the known ones: a hopeful guess about deeper drafts, which the first of them puts right.
        """
        x, y = self._x / self.weight, self._y / self.weight
        if x == 0:
            return y, 0.0
        variance = self._xx / self.weight - x * x
        if variance > 1e-3:
            slope = (self._xy / self.weight - x * y) / variance
        else:
            slope = (y - (0.5 * y if origin is None else origin)) / x
        slope = min(max(slope, 0.0), y / x)
        return y - slope * x, slope


class _Batch:
    """What rounds cost at one batch size: without drafts, drafting, verifying drafts."""

    def __init__(self) -> None:
        self.ar = Line()
        self.draft = Line()
        self.verify = Line()
        self.steps_since_ar = 0
        self.ar_interval = AR_INTERVALS[0]


class _Step:
    """The sessions of one step, known by the :class:`Load` that the loop asks with."""

    def __init__(self, load: Load, measures_ar: bool) -> None:
        self.load = load
        self.measures_ar = measures_ar
        self.asked: list[int] = []
        self.steady = True  # no drafter has to catch up with a prompt or a pause first
        self.recorded = False


class Learnt:
    """What the sessions of an engine that speculate alike have learnt together."""

    def __init__(self, longest: int) -> None:
        self.acceptance = Acceptance(longest, lambda: PRIOR_ACCEPTANCE, memory=0.99)
        self.knows_drafting = False
        self._steady_steps = 0
        # By the power of two that the batch size is below: few enough to be learnt soon.
        self._batches: dict[int, _Batch] = defaultdict(_Batch)
        self._step: _Step | None = None
        self._fitted: tuple[Load | None, float, float, float] = None, 0.0, 0.0, 0.0

    def step(self, load: Load) -> _Step:
        """The step that ``load`` belongs to; a new one decides whether it measures AR."""
        if self._step is None or self._step.load is not load:
            batch = self._batches[_size(load)]
            batch.steps_since_ar += 1
            unknown = batch.ar.weight < AR_SAMPLES - 0.5
            self._step = _Step(load, unknown or batch.steps_since_ar >= batch.ar_interval)
        return self._step

    def record(self, step: _Step, draft_seconds: float, verify_seconds: float) -> None:
        """The cost of a step, told by the first of its sessions."""
        if step.recorded:
            return
        step.recorded = True
        batch = self._batches[_size(step.load)]
        deepest = max(step.asked)
        if deepest == 0:
            batch.ar.add(0, draft_seconds + verify_seconds)
            batch.steps_since_ar = 0
            batch.ar_interval = min(2 * batch.ar_interval, AR_INTERVALS[1])
            return
        if step.steady and not self.knows_drafting:
            self._steady_steps += 1
            if self._steady_steps == 1:
                batch.draft = Line()  # what it held was a first guess
            self.knows_drafting = self._steady_steps >= STEADY_STEPS
        if step.steady or not batch.draft.weight or draft_seconds < batch.draft.at(deepest):
            batch.draft.add(deepest, draft_seconds)
        batch.verify.add(sum(step.asked) / len(step.asked), verify_seconds)

    def seconds(self, depth: int, load: Load) -> float:
        """Expected seconds of a round; an unknown batch size takes after the nearest known one."""
        if self._fitted[0] is not load:  # asked for every depth of every session of a step
            self._fitted = load, *self._fit(_size(load))
        _, ar, first, slope = self._fitted
        return first + slope * depth if depth else ar

    def _fit(self, size: int) -> tuple[float, float, float]:
        """Seconds of a round without a draft; of one with a draft: at depth 0, for each token."""
        ar = self._nearest(size, lambda batch: batch.ar)
        ar_seconds = ar.ar.at(0) if ar else 1.0
        near = self._nearest(size, lambda batch: batch.draft)
        if near is None:
            return ar_seconds, ar_seconds, 0.0  # drafting is free until somebody has tried
        origin = near.ar.at(0) if near.ar.weight else None
        scale = ar_seconds / origin if ar and origin else 1.0
        verify, draft = near.verify.fit(origin), near.draft.fit()
        return ar_seconds, scale * verify[0] + draft[0], scale * verify[1] + draft[1]

    def _nearest(self, size: int, line: Callable[[_Batch], Line]) -> _Batch | None:
        """The batch size nearest to ``size`` for which ``line`` is known."""
        known = [s for s, batch in self._batches.items() if line(batch).weight]
        return self._batches[min(known, key=lambda s: abs(s - size))] if known else None


def _size(load: Load) -> int:
    return load.num_running.bit_length()


class Goodput:
    """Chooses anew in every round; tries a short draft now and then while drafting does not pay."""

    needs: frozenset[Need] = frozenset()
    stop_rule: StopRule | None = None

    def __init__(
        self, bounds: LengthBounds, config: SpeculationConfig, context: LengthContext
    ) -> None:
        self._bounds = bounds
        self._learnt = context.shared(("goodput", config), lambda: Learnt(bounds.longest))
        profiled = context.profile.costs(config.method, bounds) if context.profile else None
        self._is_profiled = profiled is not None
        self._costs: Costs = profiled or self._learnt.seconds
        self._acceptance = Acceptance(bounds.longest, self._learnt.acceptance.mean)
        self._step: _Step | None = None
        self._asked = 0
        self._has_drafted = False
        self._rounds_without = 0
        self._pause = FIRST_PAUSE
        self._tries_left = 0

    def budget(self, session: Session, load: Load) -> Budget:
        """Depth for this round; see :func:`best_length`."""
        step = self._step = self._learnt.step(load)
        depth = self._choose(load, step)
        self._asked = max(0, min(depth, session.remaining - 1))
        step.asked.append(self._asked)
        caught_up = self._has_drafted and self._rounds_without <= CATCH_UP
        step.steady &= caught_up or self._asked == 0
        return self._bounds.budget(depth)

    def _choose(self, load: Load, step: _Step) -> int:
        bounds, costs = self._bounds, self._costs
        if bounds.longest == 0:
            return 0
        if not self._is_profiled:
            if step.measures_ar and bounds.shortest == 0:
                return 0
            if not self._learnt.knows_drafting:
                return max(1, bounds.shortest)
        depth = best_length(self._acceptance.rates(), costs, load, bounds.shortest, bounds.longest)
        if depth:
            self._tries_left = 0
            return depth
        short = min(TRY_DEPTH, bounds.longest)
        if not self._tries_left:
            lost = TRY_ROUNDS * (costs(short, load) / costs(0, load) - 1.0)  # in AR rounds
            if self._rounds_without < max(self._pause, lost / TRY_SHARE):
                return 0
            self._tries_left = TRY_ROUNDS
        return short

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        step, asked = self._step, self._asked
        if step is None:
            return  # nobody asked for this round's draft
        self._step = None
        self._learnt.record(step, draft_seconds, verify_seconds)
        if asked == 0:
            self._rounds_without += 1
            return
        self._has_drafted, self._rounds_without = True, 0
        self._acceptance.observe(asked, outcome.num_accepted)
        self._learnt.acceptance.observe(asked, outcome.num_accepted)
        if self._tries_left:
            self._tries_left -= 1
            if outcome.num_accepted >= asked:  # go on as long as that lasts
                self._tries_left, self._pause = max(1, self._tries_left), FIRST_PAUSE
            elif not self._tries_left:
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
