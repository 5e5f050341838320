"""Drafts the same speculation length in every round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lengths.base import LengthPart
from paceline.types import Budget, Load, Need, Outcome, StopRule

if TYPE_CHECKING:
    from paceline.view import SessionView


class FixedLength:
    """Always asks for ``num_speculative_tokens`` levels and ``node_budget`` nodes."""

    needs: frozenset[Need] = frozenset()
    stop_rule: StopRule | None = None

    def __init__(self, depth: int, nodes: int) -> None:
        self._budget = Budget(depth, nodes)

    def budget(self, session: SessionView, load: Load) -> Budget:
        return self._budget

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        pass


FIXED = LengthPart(
    make=lambda knobs, context: FixedLength(
        knobs.num_speculative_tokens or 0, knobs.node_budget or 0
    ),
    guarded=False,
    replayable=True,
)
