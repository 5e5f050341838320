"""One draft length for the whole batch, set by the session that accepted most.

BASS, Qian et al. 2024 (arXiv 2404.15778), section 3.2: after a step in which any session accepted
its whole draft, the length grows by 2 (up to the cap). Otherwise it shrinks by
``ceil(length / 10) + s``, where ``s`` is 1 if the step before shrank it as well, but not below the
most tokens that a session accepted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.lengths.base import (
    LENGTH_MAX,
    LENGTH_MIN,
    LengthBounds,
    LengthContext,
    LengthPart,
    length_bounds,
)
from paceline.types import Budget, Load, Need, Outcome, StopRule

if TYPE_CHECKING:
    from paceline.knobs import Knobs
    from paceline.view import SessionView

START = 7


class BatchLength:
    """The length that all sessions of a step share, and the step's accepted tokens.

    The :class:`Load` identifies a step: the loop asks for all budgets of a step with the same one.
    """

    def __init__(self, bounds: LengthBounds) -> None:
        self._bounds = bounds
        self.depth = bounds.clip(START)
        self._shrank = 0
        self._load: Load | None = None
        self._accepted: list[int] = []

    def length_for(self, load: Load) -> int:
        """The length for the step with this load; a new step first learns from the last one."""
        if load is not self._load:
            self._load = load
            if self._accepted:
                self._move(max(self._accepted))
                self._accepted.clear()
        return self.depth

    def observe(self, num_accepted: int) -> None:
        """Record how many tokens of a session's draft were accepted."""
        self._accepted.append(num_accepted)

    def _move(self, most: int) -> None:
        if most >= self.depth:
            self.depth, self._shrank = self._bounds.clip(self.depth + 2), 0
        else:
            shorter = self.depth - math.ceil(self.depth / 10) - self._shrank
            self.depth, self._shrank = self._bounds.clip(max(1, most, shorter)), 1


class Bass:
    """A session's view of the length that its engine's batch shares."""

    needs: frozenset[Need] = frozenset()
    stop_rule: StopRule | None = None

    def __init__(self, bounds: LengthBounds, config: Knobs, context: LengthContext) -> None:
        self._bounds = bounds
        self._batch = context.shared(("bass", config), lambda: BatchLength(bounds))

    def budget(self, session: SessionView, load: Load) -> Budget:
        return self._bounds.budget(self._batch.length_for(load))

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        if outcome.draft.num_nodes:
            self._batch.observe(outcome.num_accepted)


BASS = LengthPart(
    make=lambda knobs, context: Bass(length_bounds(knobs), knobs, context),
    knobs=(LENGTH_MIN.but(1), LENGTH_MAX.but(32)),
)
