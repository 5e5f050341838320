"""Stops drafting when a rejection in the draft is likely enough.

SpecDec++, Huang, Guo, Wang 2024 (arXiv 2405.19715): the optimal policy of their decision process
is a threshold on ``P(at least one rejection) = 1 - prod p_i``, where ``p_i`` is the probability
that token ``i`` is accepted, given that the tokens before it were. A small head on the draft
model's hidden state predicts ``p_i``. It reads the state that the token was drafted from, so it
costs no forward of the draft model.

OmniDraft (Ramakrishnan et al. 2025, arXiv 2507.02659) ends the drafts of a model with tokens of its
own with such a head as well, which learns as it serves (:mod:`paceline.train.online`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from paceline.errors import InvalidArgument
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

Predictor = Callable[[DraftStep], float]  # probability that the step's token is accepted

NUM_BLOCKS = 3


class AcceptanceHead:
    """``NUM_BLOCKS`` of ``x + SiLU(W x + b)`` and a linear layer.

    Args:
        weights: ``blocks.{i}.weight`` [hidden, hidden], ``blocks.{i}.bias`` [hidden],
            ``out.weight`` [1, hidden], ``out.bias`` [1].

    Attributes:
        threshold: of :class:`RejectionStop`, as its training chose it.
    """

    def __init__(self, weights: dict[str, FloatArray]) -> None:
        self.threshold = trained_threshold(weights, 0.7)
        self.use(weights)

    def use(self, weights: dict[str, FloatArray]) -> None:
        """Predict with these weights from now on, as the draft model learns."""
        self._blocks = [
            (weights[f"blocks.{i}.weight"], weights[f"blocks.{i}.bias"]) for i in range(NUM_BLOCKS)
        ]
        self._out, self._bias = weights["out.weight"][0], float(weights["out.bias"][0])

    def __call__(self, step: DraftStep) -> float:
        """Probability that the token is accepted, given that those before it were.

        Raises:
            InvalidArgument: the drafter has no hidden states, so it is not a draft model; or they
                have another size than the head was trained for.
        """
        if step.hidden is None:
            raise InvalidArgument("length", "specdecpp", "a controller that needs no draft model")
        x: FloatArray = step.hidden.float().cpu().numpy()
        if len(x) != len(self._out):
            raise InvalidArgument(
                "length", f"specdecpp, trained for hidden states of {len(self._out)} numbers",
                f"a head for this draft model, with {len(x)}",
            )  # fmt: skip
        for weight, bias in self._blocks:
            pre = weight @ x + bias
            x = x + pre * sigmoid(pre)
        return float(sigmoid(np.float32(self._out @ x + self._bias)))


class RejectionStop(StopRule):
    """Ends the draft when ``1 - prod p_i`` is above ``threshold``."""

    wants_hidden = True

    def __init__(self, shortest: int, threshold: float, predict: Predictor) -> None:
        self._shortest = shortest
        self._threshold = threshold
        self._predict = predict
        self._all_accepted = 1.0

    def stop_after(self, step: DraftStep) -> bool:
        if step.depth == 1:
            self._all_accepted = 1.0
        self._all_accepted *= self._predict(step)
        return step.depth >= self._shortest and 1.0 - self._all_accepted > self._threshold


def acceptance_head(context: LengthContext, method: str) -> AcceptanceHead:
    """The head that all sessions of an engine share.

    Args:
        method: `omnidraft` has a head of its own, beside those of the draft heads.

    Raises:
        InvalidArgument: as :func:`paceline.lengths.base.load_head`.
    """
    folder = "omnidraft" if method == "omnidraft" else None
    return context.shared(
        ("specdecpp", folder), lambda: AcceptanceHead(load_head(context, "specdecpp", folder))
    )


class SpecDecPP:
    """Always asks for the longest draft, which :class:`RejectionStop` ends early.

    Args:
        threshold: None: what was best on held-out text in training.
        method: as :func:`acceptance_head`.
    """

    needs: frozenset[Need] = frozenset()

    def __init__(
        self,
        bounds: LengthBounds,
        threshold: float | None,
        context: LengthContext,
        method: str = "",
    ) -> None:
        self._budget = bounds.budget(bounds.longest)
        head = acceptance_head(context, method)
        threshold = head.threshold if threshold is None else threshold
        self.stop_rule: StopRule | None = RejectionStop(bounds.shortest, threshold, head)

    def budget(self, session: SessionView, load: Load) -> Budget:
        return self._budget

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        pass


SPECDECPP = LengthPart(
    make=lambda knobs, context: SpecDecPP(
        length_bounds(knobs), knobs[TRAINED_THRESHOLD], context, knobs.method
    ),
    knobs=(LENGTH_MIN.but(2), LENGTH_MAX.but(20), TRAINED_THRESHOLD),
)
