"""No drafts: plain autoregressive decoding on the same engine, the baseline of every speedup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.drafters.base import Drafter
from paceline.types import EMPTY_DRAFT, Budget, Draft

if TYPE_CHECKING:
    from paceline.view import SessionView


class NoDrafter(Drafter):
    """Proposes nothing."""

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        return [EMPTY_DRAFT] * len(sessions)
