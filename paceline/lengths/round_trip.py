"""Takes the length with the most tokens per second if the target is a network round trip away.

A draft of ``d`` tokens that is made while nothing is under way costs drafting, the round trip and
verification, one after the other. A draft that is made and sent ahead costs the longer of drafting
and verification, like a pipeline; this requires that the whole draft before it and the guess of the
target's own token are right. The controller measures all four quantities from the rounds. Without a
round trip this is the goodput of SmartSpec (Liu et al. 2024, arXiv 2406.14066); the cost of
overlapping rounds is PEARL's (Liu et al. 2024, arXiv 2408.11850).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.lengths.base import (
    LENGTH_MAX,
    LENGTH_MIN,
    LengthBounds,
    LengthContext,
    LengthPart,
    Line,
    length_bounds,
    rounds_for_a_try,
)
from paceline.tree import height
from paceline.types import Budget, Load, Need, Outcome, StopRule

if TYPE_CHECKING:
    from paceline.view import SessionView

MEMORY = 0.9  # factor by which the weight of older seconds shrinks in each round
ACCEPTANCE_MEMORY = 0.97  # the same for acceptance, for each drafted token
PRIOR_ACCEPTED, PRIOR_TRIED = 1.4, 2.0
SHORTEST = 1e-6  # least seconds of a verification
TRY_EVERY = 16  # least number of rounds without a draft before a short one is tried again
TRY_DEPTH = 2  # depth of such a try, and of the first draft, before anything is known


@dataclass(frozen=True, slots=True)
class RoundTripCosts:
    """Costs in seconds.

    Attributes:
        draft: drafting one token.
        verify_first, verify_each: the target's part of a round: without a draft, and what each
            drafted token adds.
        travel: the way to the target and back.
        overlaps: whether the next draft is made and sent while the answer travels.
    """

    draft: float
    verify_first: float
    verify_each: float = 0.0
    travel: float = 0.0
    overlaps: bool = False

    def round(self, depth: int, acceptance: float) -> float:
        """Expected seconds between the tokens of one round and those of the next."""
        verify = self.verify_first + depth * self.verify_each
        in_turn = depth * self.draft + self.travel + verify
        if not self.overlaps or depth == 0:
            return in_turn
        right: float = acceptance ** (depth + 1)
        return right * max((depth + 1) * self.draft, verify) + (1.0 - right) * in_turn


def expected_tokens(acceptance: float, depth: int) -> float:
    """Committed tokens of a round, the target's own included (1 + a + ... + a^depth)."""
    if acceptance >= 1.0:
        return depth + 1.0
    return (1.0 - acceptance ** (depth + 1)) / (1.0 - acceptance)


def best_depth(acceptance: float, costs: RoundTripCosts, shortest: int, longest: int) -> int:
    """The depth with the most expected tokens per second; the smallest of equals."""
    return max(
        range(shortest, longest + 1),
        key=lambda depth: expected_tokens(acceptance, depth) / costs.round(depth, acceptance),
    )


class _Mean:
    """A moving average."""

    def __init__(self) -> None:
        self.value = 0.0
        self.known = False

    def add(self, value: float) -> None:
        # Another process may have had the machine for a moment.
        value = min(value, 4.0 * self.value) if self.known and self.value > 0 else value
        self.value = MEMORY * self.value + (1.0 - MEMORY) * value if self.known else value
        self.known = True


class _Seconds:
    """Seconds that the rounds of all sessions took."""

    def __init__(self) -> None:
        self.draft = _Mean()  # of each token
        self.verify = Line()  # by depth
        self.travel = _Mean()


class RoundTrip:
    """Chooses the length anew in every round.

    Attributes:
        ahead: depth of drafts that are made ahead, before an answer has come.
    """

    needs: frozenset[Need] = frozenset()
    stop_rule: StopRule | None = None

    def __init__(self, bounds: LengthBounds, context: LengthContext | None = None) -> None:
        self._bounds = bounds
        self.ahead = bounds.clip(bounds.start)
        self._accepted, self._tried = PRIOR_ACCEPTED, PRIOR_TRIED
        self._seconds = context.shared(("round_trip", bounds), _Seconds) if context else _Seconds()
        self._overlaps = False
        self._rounds_without = 0

    @property
    def acceptance(self) -> float:
        """Recent probability that a drafted token is accepted, given that those before it were."""
        return self._accepted / self._tried

    @property
    def costs(self) -> RoundTripCosts | None:
        """The measured costs; None before the first draft."""
        known = self._seconds
        if not known.draft.known or not known.verify.weight:
            return None
        first, each = known.verify.fit()
        first = max(first, SHORTEST)
        return RoundTripCosts(known.draft.value, first, each, known.travel.value, self._overlaps)

    def budget(self, session: SessionView, load: Load) -> Budget:
        """Depth for this round; see :func:`best_depth`."""
        bounds, costs = self._bounds, self.costs
        if costs is None:
            self.ahead = bounds.clip(min(bounds.start, TRY_DEPTH))
        else:
            self.ahead = best_depth(self.acceptance, costs, bounds.shortest, bounds.longest)
        if self.ahead == 0 and costs is not None:
            short = min(TRY_DEPTH, bounds.longest)
            ar = costs.round(0, self.acceptance)
            lost = costs.round(short, self.acceptance) - ar
            if self._rounds_without >= max(TRY_EVERY, rounds_for_a_try(lost, ar)):
                self.ahead = short
        return bounds.budget(self.ahead)

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        verdict = outcome.verification.verdict
        depth = height(outcome.draft.parent_indices)
        if verdict is not None:
            if not verdict.verify_seconds:
                return  # a round that the server made by itself: draft and time are its own
            verify_seconds = verdict.verify_seconds
            self._overlaps |= verdict.sent_ahead
            self._seconds.travel.add(verdict.travel_seconds)
        self._seconds.verify.add(depth, verify_seconds)
        if not depth:
            self._rounds_without += 1
            return
        self._rounds_without = 0
        if verdict is None or not verdict.sent_ahead:  # else drafting overlapped other work
            self._seconds.draft.add(draft_seconds / depth)
        tried = min(outcome.num_accepted + 1, depth)
        memory = ACCEPTANCE_MEMORY**tried
        self._accepted = memory * self._accepted + outcome.num_accepted
        self._tried = memory * self._tried + tried


ROUND_TRIP = LengthPart(
    make=lambda knobs, context: RoundTrip(length_bounds(knobs), context),
    knobs=(LENGTH_MIN, LENGTH_MAX),
    guarded=False,
)
