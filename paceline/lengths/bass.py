"""One draft length for the whole batch, which follows its luckiest session.

BASS, Qian et al. 2024 (arXiv 2404.15778), section 3.2: after a step in which some session
accepted its whole draft the length grows by 2 (up to the cap); otherwise it shrinks by
``ceil(length / 10) + s``, where ``s`` is 1 if the step before it shrank as well, but not below
the most tokens that a session accepted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.lengths.base import LengthBounds, LengthContext
from paceline.types import Budget, Load, Need, Outcome, StopRule

if TYPE_CHECKING:
    from paceline.config import SpeculationConfig
    from paceline.view import SessionView

START = 7


class BatchLength:
    """The length that all sessions of a step share, and what became of the step.

    A step is known by its :class:`Load`: the loop asks for all budgets of a step with the same one.
    """

    def __init__(self, bounds: LengthBounds) -> None:
        self._bounds = bounds
        self.depth = bounds.clip(START)
        self._shrank = 0
        self._load: Load | None = None
        self._accepted: list[int] = []

    def length_for(self, load: Load) -> int:
        """The length of the step with this load; a new step first learns from the last."""
        if load is not self._load:
            self._load = load
            if self._accepted:
                self._move(max(self._accepted))
                self._accepted.clear()
        return self.depth

    def observe(self, num_accepted: int) -> None:
        """A session's draft of the current length was verified."""
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

    def __init__(
        self, bounds: LengthBounds, config: SpeculationConfig, context: LengthContext
    ) -> None:
        self._bounds = bounds
        self._batch = context.shared(("bass", config), lambda: BatchLength(bounds))

    def budget(self, session: SessionView, load: Load) -> Budget:
        return self._bounds.budget(self._batch.length_for(load))

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        if outcome.draft.num_nodes:
            self._batch.observe(outcome.num_accepted)
