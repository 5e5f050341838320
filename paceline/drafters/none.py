"""No drafts: plain autoregressive decoding on the same engine, the baseline of every speedup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.types import EMPTY_DRAFT, Budget, Draft, Need, Outcome

if TYPE_CHECKING:
    from paceline.session import Session


class NoDrafter:
    """Proposes nothing."""

    needs: frozenset[Need] = frozenset()

    def open(self, session: Session) -> None:
        pass

    def close(self, session: Session) -> None:
        pass

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        return [EMPTY_DRAFT] * len(sessions)

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        pass
