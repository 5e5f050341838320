"""Drafts two tokens more after a draft that was accepted whole, otherwise one fewer.

The schedule `heuristic` of assisted generation in transformers (Gante 2023,
huggingface.co/blog/assisted-generation).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lengths.base import LENGTH_MAX, LENGTH_MIN, LengthBounds, LengthPart, length_bounds
from paceline.types import Budget, Load, Need, Outcome, StopRule

if TYPE_CHECKING:
    from paceline.view import SessionView


class Heuristic:
    """Starts at ``bounds.start``; a round without a draft does not change the length."""

    needs: frozenset[Need] = frozenset()
    stop_rule: StopRule | None = None

    def __init__(self, bounds: LengthBounds) -> None:
        self._bounds = bounds
        self._depth = bounds.clip(bounds.start)
        self._asked = 0

    def budget(self, session: SessionView, load: Load) -> Budget:
        self._asked = min(self._depth, session.remaining - 1)
        return self._bounds.budget(self._depth)

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        if outcome.draft.num_nodes:
            whole = outcome.num_accepted >= self._asked
            self._depth = self._bounds.clip(self._depth + (2 if whole else -1))


HEURISTIC = LengthPart(
    make=lambda knobs, context: Heuristic(length_bounds(knobs)),
    knobs=(LENGTH_MIN.but(1), LENGTH_MAX.but(32)),
)
