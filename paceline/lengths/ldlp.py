"""Predicts the length before drafting begins, from the target's hidden state.

AdaEAGLE, Zhang et al. 2024 (arXiv 2412.18910): the Lightweight Draft Length Predictor is a
three-layer MLP over the target's last hidden state and the embedding of the last token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.lengths.base import (
    LENGTH_MAX,
    LENGTH_MIN,
    LengthBounds,
    LengthContext,
    LengthPart,
    length_bounds,
    load_head,
)
from paceline.types import Budget, FloatArray, Load, Need, Outcome, StopRule

if TYPE_CHECKING:
    from paceline.view import SessionView

NUM_LAYERS = 3


class LengthHead:
    """An MLP with ReLU that gives the number of tokens to draft.

    Args:
        weights: ``embedding`` [vocab, e], the target's embedding projected to few numbers, and
            ``layers.{i}.weight`` / ``layers.{i}.bias``; the first layer takes hidden + e numbers.
    """

    def __init__(self, weights: dict[str, FloatArray]) -> None:
        self._embedding = weights["embedding"]
        self._layers = [
            (weights[f"layers.{i}.weight"], weights[f"layers.{i}.bias"]) for i in range(NUM_LAYERS)
        ]

    def __call__(self, hidden: FloatArray, token_id: int) -> float:
        """Number of tokens to draft after ``token_id``, which ``hidden`` [hidden_size] gave."""
        x = np.concatenate([hidden, self._embedding[token_id]])
        for i, (weight, bias) in enumerate(self._layers):
            x = weight @ x + bias
            if i < NUM_LAYERS - 1:
                x = np.maximum(x, 0.0)
        return float(x[0])


class LengthPredictor:
    """Predicts the next draft's length after every round.

    A session's first round has no hidden state yet and drafts ``bounds.start`` tokens.

    Args:
        draft_head: kind of the head that drafts; each has a predictor of its own. None: another
            drafter.
    """

    needs = frozenset({Need.HIDDEN_STATES})
    stop_rule: StopRule | None = None

    def __init__(
        self, bounds: LengthBounds, context: LengthContext, draft_head: str | None = None
    ) -> None:
        self._bounds = bounds
        self._head = LengthHead(load_head(context, "ldlp", draft_head))
        self._depth = bounds.clip(bounds.start)

    def budget(self, session: SessionView, load: Load) -> Budget:
        return self._bounds.budget(self._depth)

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        if outcome.finish_reason is not None:
            return
        states = outcome.verification.extras.get(Need.HIDDEN_STATES)  # [num_nodes + 1, hidden]
        if states is None:
            return  # without hidden states, every draft is as long as the first
        row = outcome.path[-1] + 1 if outcome.path else 0
        hidden: FloatArray = states[row].float().cpu().numpy()
        predicted = self._head(hidden, outcome.next_token)
        self._depth = self._bounds.clip(round(predicted))


LDLP = LengthPart(
    make=lambda knobs, context: LengthPredictor(
        length_bounds(knobs), context, context.head_of(knobs.method)
    ),
    knobs=(LENGTH_MIN.but(1), LENGTH_MAX.but(20)),
)
