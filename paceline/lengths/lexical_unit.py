"""Drafts end before the first token of which the draft head is not sure.

Lexical Unit Decoding, Sun et al. 2024 (arXiv 2405.15208): contiguous tokens that the model predicts
in parallel, each with a probability above a threshold, form a lexical unit. With the acceptance
rule `unverified`, a unit is written whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.knobs import Knob
from paceline.lengths.base import LengthBounds, LengthPart, length_bounds, top_probability
from paceline.types import Budget, DraftStep, Load, Need, Outcome, StopRule

if TYPE_CHECKING:
    from paceline.view import SessionView

THRESHOLD = Knob[float](
    "unit_threshold", float, 0.5,
    "The controller `lexical_unit` ends a draft before the first token with a probability up to "
    "this; 1 drafts nothing.",
    ge=0.0, le=1.0, search=(0.3, 0.5, 0.7),
)  # fmt: skip


class UnitStop(StopRule):
    """Ends the draft before a token whose probability is not above ``threshold``."""

    drops = True

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def stop_after(self, step: DraftStep) -> bool:
        return top_probability(step.scores) <= self._threshold


class LexicalUnit:
    """Always asks for the longest draft, which :class:`UnitStop` ends early. Only chains end so."""

    needs: frozenset[Need] = frozenset()

    def __init__(self, bounds: LengthBounds, threshold: float) -> None:
        self._budget = bounds.budget(bounds.start)
        self.stop_rule: StopRule | None = UnitStop(threshold)

    def budget(self, session: SessionView, load: Load) -> Budget:
        return self._budget

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        pass


LEXICAL_UNIT = LengthPart(
    make=lambda knobs, context: LexicalUnit(length_bounds(knobs), knobs[THRESHOLD]),
    knobs=(THRESHOLD,),
)
