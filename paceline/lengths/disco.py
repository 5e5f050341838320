"""A classifier decides after each drafted token whether to continue.

DISCO, Mamou et al. 2024 (arXiv 2405.04304). The features are the drafter's top probability, its
entropy, and the token's place in the draft. Here the classifier is a logistic regression.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from paceline.lengths.base import (
    LENGTH_MAX,
    LENGTH_MIN,
    TRAINED_THRESHOLD,
    LengthBounds,
    LengthContext,
    LengthPart,
    length_bounds,
    load_head,
    sigmoid,
    trained_threshold,
)
from paceline.types import Budget, DraftStep, FloatArray, Load, Need, Outcome, StopRule

if TYPE_CHECKING:
    from paceline.view import SessionView

NUM_FEATURES = 3


def features(step: DraftStep) -> FloatArray:
    """Top probability, entropy in nats, and log of the depth.  # [NUM_FEATURES]"""
    scores = np.asarray(step.scores, np.float32)
    shifted = scores - scores.max()
    weights = np.exp(shifted)
    total = float(weights.sum())
    # A score of -inf has no weight and adds nothing; 0 * -inf would be nan.
    mean = float(weights @ np.where(weights > 0, shifted, 0.0)) / total
    entropy = math.log(total) - mean
    return np.array([1.0 / total, entropy, math.log(step.depth)], np.float32)


class ClassifierStop(StopRule):
    """Ends the draft when a token's chance of acceptance is below ``threshold``.

    Args:
        weights: ``weight`` [NUM_FEATURES], ``bias`` [1].
    """

    def __init__(self, shortest: int, threshold: float, weights: dict[str, FloatArray]) -> None:
        self._shortest = shortest
        self._threshold = threshold
        self._weight, self._bias = weights["weight"], weights["bias"]

    def stop_after(self, step: DraftStep) -> bool:
        if step.depth < self._shortest:
            return False
        accepted = sigmoid(features(step) @ self._weight + self._bias[0])
        return bool(accepted < self._threshold)


class Disco:
    """Always asks for the longest draft, which :class:`ClassifierStop` ends early.

    Args:
        threshold: None: what was best on held-out text in training.
    """

    needs: frozenset[Need] = frozenset()

    def __init__(
        self, bounds: LengthBounds, threshold: float | None, context: LengthContext
    ) -> None:
        self._budget = bounds.budget(bounds.longest)
        weights = load_head(context, "disco")
        threshold = trained_threshold(weights, 0.5) if threshold is None else threshold
        self.stop_rule: StopRule | None = ClassifierStop(bounds.shortest, threshold, weights)

    def budget(self, session: SessionView, load: Load) -> Budget:
        return self._budget

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        pass


DISCO = LengthPart(
    make=lambda knobs, context: Disco(length_bounds(knobs), knobs[TRAINED_THRESHOLD], context),
    knobs=(LENGTH_MIN.but(1), LENGTH_MAX.but(20), TRAINED_THRESHOLD),
)
