"""Stops drafting after a token of which the drafter itself is not confident.

The successor of DISCO (Mamou et al. 2024, arXiv 2405.04304) in transformers:
``assistant_confidence_threshold``, 0.4 there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lengths.base import (
    LENGTH_MAX,
    LENGTH_MIN,
    STOP_THRESHOLD,
    ConfidenceStop,
    LengthBounds,
    LengthPart,
    length_bounds,
)
from paceline.types import Budget, Load, Need, Outcome, StopRule

if TYPE_CHECKING:
    from paceline.view import SessionView


class Confidence:
    """Always asks for the longest draft, which :class:`ConfidenceStop` ends early.

    Only chains can stop after a single token; other drafts keep their full depth.
    """

    needs: frozenset[Need] = frozenset()

    def __init__(self, bounds: LengthBounds, threshold: float) -> None:
        self._budget = bounds.budget(bounds.longest)
        self.stop_rule: StopRule | None = ConfidenceStop(bounds.shortest, threshold)

    def budget(self, session: SessionView, load: Load) -> Budget:
        return self._budget

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        pass


CONFIDENCE = LengthPart(
    make=lambda knobs, context: Confidence(length_bounds(knobs), knobs[STOP_THRESHOLD]),
    knobs=(LENGTH_MIN.but(1), LENGTH_MAX.but(20), STOP_THRESHOLD.but(0.4)),
)
