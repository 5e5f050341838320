"""Pre-verify and post-verify: drafter and target work at the same time.

PEARL, Liu et al. 2024 (arXiv 2408.11850). After a rejection, the target runs a round without a
draft while the drafter makes the next one. This checks the draft's *first* token before the rest of
the draft exists (pre-verify). While everything is accepted, the target verifies one draft as the
drafter makes the next (post-verify), so more than gamma tokens in a row may be accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lengths.base import LengthPart
from paceline.types import Budget, Load, Need, Outcome, StopRule

if TYPE_CHECKING:
    from paceline.view import SessionView


class Pearl:
    """Asks for no draft when the round would wait for it; drafts ahead have ``gamma`` tokens.

    The target verifies a draft made ahead on a right guess without asking this controller. So the
    loop asks only at the start and after a rejection, and both mean pre-verify. A target in this
    process cannot verify while drafts are made; then every draft has ``gamma`` tokens.

    Attributes:
        ahead: gamma, the depth of drafts that are made while the target verifies.
    """

    needs: frozenset[Need] = frozenset()
    stop_rule: StopRule | None = None

    def __init__(self, gamma: int, nodes: int) -> None:
        self.ahead = gamma
        self._nodes = nodes
        self._works_beside = True  # drafter and target at once, until a round shows otherwise

    def budget(self, session: SessionView, load: Load) -> Budget:
        """No draft (pre-verify), or gamma tokens if drafting ahead is impossible."""
        if self._works_beside:
            return Budget(0, 0)
        return Budget(self.ahead, self._nodes)

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        self._works_beside = outcome.verification.verdict is not None


PEARL = LengthPart(
    make=lambda knobs, context: Pearl(knobs.num_speculative_tokens or 0, knobs.node_budget or 0)
)
