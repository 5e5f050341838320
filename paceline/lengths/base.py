"""What a length controller is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from paceline.types import Budget, Load, Outcome

if TYPE_CHECKING:
    from paceline.session import Session


class LengthController(Protocol):
    """Decides how much to draft. One instance for each session; a depth of 0 is legal."""

    def budget(self, session: Session, load: Load) -> Budget:
        """Depth and nodes for the next round of ``session``."""
        ...

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        """Learn from a round: what became of the draft, and what it cost."""
        ...
