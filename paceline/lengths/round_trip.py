"""The length with the most tokens per second where the target is a round trip away.

A draft of ``d`` tokens that is made while nothing is under way costs drafting, the round trip and
verification one after the other. One that was made and sent ahead costs the longer of drafting and
verification, as a pipeline does; that needs the whole draft before it, and the guess about the
target's own token, to be right. All four quantities are measured as rounds go by. Without a round
trip this is the goodput of SmartSpec (Liu et al. 2024, arXiv 2406.14066); the cost of rounds that
overlap is that of PEARL (Liu et al. 2024, arXiv 2408.11850).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.lengths.base import LengthBounds, StopRule
from paceline.tree import height
from paceline.types import Budget, Load, Need, Outcome

if TYPE_CHECKING:
    from paceline.session import Session

MEMORY = 0.9  # of seconds, for each round
ACCEPTANCE_MEMORY = 0.97  # for each drafted token
PRIOR_ACCEPTED, PRIOR_TRIED = 1.4, 2.0
TRY_EVERY = 16  # rounds without a draft, until a short one is tried again
TRY_DEPTH = 2


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Seconds.

    Attributes:
        draft: for each drafted token.
        verify_first, verify_each: the target's part of a round, without a draft and for each token.
        travel: there and back.
        overlaps: the next draft is made and sent while the answer travels.
    """

    draft: float
    verify_first: float
    verify_each: float = 0.0
    travel: float = 0.0
    overlaps: bool = False

    def round(self, depth: int, acceptance: float) -> float:
        """Expected seconds from one round's tokens to the next one's."""
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


def best_depth(acceptance: float, costs: RoundCosts, shortest: int, longest: int) -> int:
    """The depth with the most expected tokens per second; of equals the smallest."""
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
        # Somebody else may have had the machine for a moment.
        value = min(value, 4.0 * self.value) if self.known and self.value > 0 else value
        self.value = MEMORY * self.value + (1.0 - MEMORY) * value if self.known else value
        self.known = True


class RoundTrip:
    """Chooses anew in every round.

    Attributes:
        ahead: depth of drafts that are made before an answer has come.
    """

    needs: frozenset[Need] = frozenset()
    stop_rule: StopRule | None = None

    def __init__(self, bounds: LengthBounds) -> None:
        self._bounds = bounds
        self.ahead = bounds.clip(bounds.start)
        self._accepted, self._tried = PRIOR_ACCEPTED, PRIOR_TRIED
        self._draft = _Mean()
        self._shallow, self._deep = _Mean(), _Mean()  # verification without and with a draft
        self._deep_at = _Mean()
        self._travel = _Mean()
        self._overlaps = False
        self._rounds_without = 0

    @property
    def acceptance(self) -> float:
        """Recent chance that a drafted token is accepted when those before it were."""
        return self._accepted / self._tried

    @property
    def costs(self) -> RoundCosts | None:
        """What was measured; None before the first draft."""
        if not self._draft.known or not self._deep.known:
            return None
        first, each = self._deep.value, 0.0
        if self._shallow.known and self._deep_at.value > 0:
            first = min(self._shallow.value, self._deep.value)
            each = (self._deep.value - first) / self._deep_at.value
        return RoundCosts(self._draft.value, first, each, self._travel.value, self._overlaps)

    def budget(self, session: Session, load: Load) -> Budget:
        """Depth for this round; see :func:`best_depth`."""
        bounds, costs = self._bounds, self.costs
        if costs is None:
            self.ahead = bounds.clip(bounds.start)
        else:
            self.ahead = best_depth(self.acceptance, costs, bounds.shortest, bounds.longest)
        if self.ahead == 0 and self._rounds_without >= TRY_EVERY:
            self.ahead = min(TRY_DEPTH, bounds.longest)
        return bounds.budget(self.ahead)

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        verdict = outcome.verification.verdict
        depth = height(outcome.draft.parent_indices)
        if verdict is not None:
            if not verdict.verify_seconds:
                return  # a server's own round in a stream: its draft and its time are not ours
            verify_seconds = verdict.verify_seconds
            self._overlaps |= verdict.sent_ahead
            self._travel.add(verdict.travel_seconds)
        if not depth:
            self._rounds_without += 1
            self._shallow.add(verify_seconds)
            return
        self._rounds_without = 0
        self._deep.add(verify_seconds)
        self._deep_at.add(depth)
        if verdict is None or not verdict.sent_ahead:  # else it was drafted beside something else
            self._draft.add(draft_seconds / depth)
        tried = min(outcome.num_accepted + 1, depth)
        memory = ACCEPTANCE_MEMORY**tried
        self._accepted = memory * self._accepted + outcome.num_accepted
        self._tried = memory * self._tried + tried
