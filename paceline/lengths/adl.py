"""Takes the length from running averages of how many tokens were drafted and accepted.

ADL, the adaptive draft length of DiffuSpec (Li et al. 2025, arXiv 2510.02358).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.lengths.base import LENGTH_MAX, LENGTH_MIN, LengthBounds, LengthPart, length_bounds
from paceline.tree import height
from paceline.types import Budget, Load, Need, Outcome, StopRule

if TYPE_CHECKING:
    from paceline.view import SessionView

RHO = 0.5  # weight of the newest round in the averages
GROWTH = 10  # tokens to add to the accepted average while drafts are accepted whole


class AdaptiveDraftLength:
    """Drafts one token more than the accepted average; far more while drafts are accepted whole.

    Args:
        rho: weight of the newest round.
        growth: tokens to add, instead of one, when the accepted average reaches the drafted one.
    """

    needs: frozenset[Need] = frozenset()
    stop_rule: StopRule | None = None

    def __init__(self, bounds: LengthBounds, rho: float = RHO, growth: int = GROWTH) -> None:
        self._bounds = bounds
        self._rho = rho
        self._growth = growth
        self._generated = self._accepted = float(bounds.clip(bounds.start))
        self._depth = bounds.clip(bounds.start)

    def budget(self, session: SessionView, load: Load) -> Budget:
        return self._bounds.budget(self._depth)

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        if not outcome.draft.num_nodes:
            return
        generated = height(outcome.draft.parent_indices)
        self._generated += self._rho * (generated - self._generated)
        self._accepted += self._rho * (outcome.num_accepted - self._accepted)
        whole = self._accepted >= self._generated - 0.5  # to the nearest token
        wanted = math.ceil(self._accepted) + (self._growth if whole else 1)
        self._depth = self._bounds.clip(wanted)


ADL = LengthPart(
    make=lambda knobs, context: AdaptiveDraftLength(length_bounds(knobs)),
    knobs=(LENGTH_MIN.but(2), LENGTH_MAX.but(30)),
)
