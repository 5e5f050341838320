"""The same speculation length in every round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lengths.base import StopRule
from paceline.types import Budget, Load, Need, Outcome

if TYPE_CHECKING:
    from paceline.session import Session


class FixedLength:
    """Always ``num_speculative_tokens`` deep, ``node_budget`` nodes wide in all."""

    needs: frozenset[Need] = frozenset()
    stop_rule: StopRule | None = None

    def __init__(self, depth: int, nodes: int) -> None:
        self._budget = Budget(depth, nodes)

    def budget(self, session: Session, load: Load) -> Budget:
        return self._budget

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        pass
