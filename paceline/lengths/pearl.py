"""Pre-verify and post-verify: draft and target at work at the same time.

PEARL, Liu et al. 2024 (arXiv 2408.11850). After a rejection the target verifies without a draft
while the drafter makes the next one, so that the draft's *first* token is checked before the rest
is even there (pre-verify). While everything is accepted, the target verifies one draft and the
drafter makes the next (post-verify), and runs may exceed gamma.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.types import Budget, Load, Need, Outcome, StopRule

if TYPE_CHECKING:
    from paceline.view import SessionView


class Pearl:
    """Asks for no draft where one has to be waited for, and for ``gamma`` tokens ahead.

    A draft that was made ahead on a right guess is verified whatever this says. So it is asked at
    the start and after a rejection: both mean pre-verify. Where the target is in this process, it
    cannot verify while drafts are made, and every draft has ``gamma`` tokens.

    Attributes:
        ahead: gamma, the depth of drafts that are made while the target verifies.
    """

    needs: frozenset[Need] = frozenset()
    stop_rule: StopRule | None = None

    def __init__(self, gamma: int, nodes: int) -> None:
        self.ahead = gamma
        self._nodes = nodes
        self._works_beside = True  # until a round says otherwise

    def budget(self, session: SessionView, load: Load) -> Budget:
        """No draft (pre-verify), or gamma tokens where nothing can be drafted ahead."""
        if self._works_beside:
            return Budget(0, 0)
        return Budget(self.ahead, self._nodes)

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        self._works_beside = outcome.verification.verdict is not None
