"""Stop drafting after a token that the drafter itself does not believe in.

The successor of DISCO (Mamou et al. 2024, arXiv 2405.04304) in transformers:
``assistant_confidence_threshold``, 0.4 there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lengths.base import DraftStep, LengthBounds, StopRule, top_probability
from paceline.types import Budget, Load, Need, Outcome

if TYPE_CHECKING:
    from paceline.session import Session


class ConfidenceStop:
    """Ends the draft when the drafter's highest probability is below ``threshold``."""

    wants_hidden = False

    def __init__(self, shortest: int, threshold: float) -> None:
        self._shortest = shortest
        self._threshold = threshold

    def stop_after(self, step: DraftStep) -> bool:
        return step.depth >= self._shortest and top_probability(step.scores) < self._threshold


class Confidence:
    """Always the longest draft, ended early by :class:`ConfidenceStop`.

    Only chains have single tokens to stop after; other drafts keep their full depth.
    """

    needs: frozenset[Need] = frozenset()

    def __init__(self, bounds: LengthBounds, threshold: float) -> None:
        self._budget = bounds.budget(bounds.longest)
        self.stop_rule: StopRule | None = ConfidenceStop(bounds.shortest, threshold)

    def budget(self, session: Session, load: Load) -> Budget:
        return self._budget

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        pass
