"""Tolerance: accept drafted tokens that are nearly as good as the target's own (lossy).

Generalised Aggressive Decoding, Xia et al. 2022 (arXiv 2205.10350 with 2203.16487): a token is
accepted if it is one of the target's ``tolerance_beta`` best and its score is at most
``tolerance_tau`` below the best one. At temperature 0, scores are log-probabilities; above it, they
are the scores of coupled sampling (over temperature, plus its noise), so beta 1 or tau 0 gives AR's
own tokens at any temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.acceptance.base import PathLogits, walk
from paceline.knobs import Knob
from paceline.sampling import Probs, gumbel, scaled_scores
from paceline.types import Acceptance, Draft, Draws, Need

BETA = Knob[int](
    "tolerance_beta", int, 1,
    "The rule `tolerance` accepts a token among this many best ones; 1 is exact.",
    ge=1, le=1000, search=(1, 3, 5),
)  # fmt: skip
TAU = Knob[float](
    "tolerance_tau", float, 0.0,
    "The rule `tolerance` accepts scores up to this far below the best; 0 is exact.",
    ge=0.0, le=1e6, search=(1.0, 3.0),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Walk down to the best child as long as it is within the tolerance."""

    tolerance_beta: int = BETA.default
    tolerance_tau: float = TAU.default

    knobs = (BETA, TAU)
    name = "tolerance"
    lossless = False
    chain_only = False
    draws = Draws.COUPLED
    needs = frozenset[Need]()

    def accept(self, draft: Draft, target: PathLogits) -> Acceptance:
        def tolerated(nodes: list[int], own: int, tokens: list[int], parent: int) -> int:
            """The child with the highest score, if it is within the tolerance, else -1."""
            if self.tolerance_beta == 1 or self.tolerance_tau == 0.0:
                return -1
            scores = _scores(target, tokens, parent)
            child = max(nodes, key=lambda c: float(scores[draft.token_ids[c]]))
            score = scores[draft.token_ids[child]]
            rank = 1 + int(np.count_nonzero(scores > score))
            close = scores[own] - score <= self.tolerance_tau
            return child if close and rank <= self.tolerance_beta else -1

        return walk(draft, target.token, tolerated)


def _scores(target: PathLogits, tokens: list[int], node: int) -> Probs:
    """The scores whose argmax is the target's own token.  # [vocab_size]"""
    row = target.row(tokens, node)
    if target.params.temperature == 0:
        return row.astype(np.float64)
    noise = gumbel(target.params.seed, target.position + len(tokens), len(row))
    result: Probs = scaled_scores(row, target.params) + noise
    return result
