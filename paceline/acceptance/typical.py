"""Typical acceptance: keep drafted tokens that the target finds plausible enough (lossy).

Medusa, Cai et al. 2024 (arXiv 2401.10774, section 2.3.1): above temperature 0 a token x is
accepted if ``p(x) > min(epsilon, delta * exp(-H(p)))``, so a flat distribution lets more tokens
pass than a peaked one. The longest accepted path wins, and the likeliest of equally long ones. At
temperature 0 the rule is exact match with the argmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.acceptance.base import PathLogits, exact_match
from paceline.exact_math import exp_of, log64, log_of, sum64
from paceline.knobs import Knob
from paceline.sampling import Probs
from paceline.tree import children, path_to
from paceline.types import Acceptance, Draft, Draws, Need

EPSILON = Knob[float](
    "typical_epsilon", float, 0.09,
    "Upper limit of the probability that the rule `typical` requires (epsilon).",
    ge=0.0, le=1.0, search=(0.05, 0.09, 0.2),
)  # fmt: skip
DELTA = Knob[float](
    "typical_delta", float, 0.3,
    "The rule `typical` requires a probability above this times exp(-entropy), up to epsilon.",
    ge=0.0, le=1e6, search=(0.1, 0.3, 0.6),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Typical:
    """Accept tokens that are likelier than a threshold that depends on the entropy."""

    typical_epsilon: float = EPSILON.default
    typical_delta: float = DELTA.default

    knobs = (EPSILON, DELTA)
    name = "typical"
    lossless = False
    chain_only = False
    draws = Draws.TOP
    needs = frozenset[Need]()

    def accept(self, draft: Draft, target: PathLogits) -> Acceptance:
        if target.params.temperature == 0:
            return exact_match(draft, target, target.argmax)
        followers = children(draft.parent_indices)
        # For each accepted node: its tokens from the root, and their log-likelihood.
        accepted: dict[int, tuple[list[int], float]] = {-1: ([], 0.0)}
        best = -1
        for node in (-1, *range(draft.num_nodes)):  # parents come before their children
            if node not in accepted:
                continue
            tokens, likelihood = accepted[node]
            if (len(tokens), likelihood) > (len(accepted[best][0]), accepted[best][1]):
                best = node
            if not followers[node]:
                continue
            p = target.probs(tokens, node)
            threshold = self.threshold(p)
            for child in followers[node]:
                token = int(draft.token_ids[child])
                if p[token] > threshold:
                    accepted[child] = ([*tokens, token], likelihood + log_of(float(p[token])))
        path = path_to(draft.parent_indices, best)
        return Acceptance(path, target.token(accepted[best][0], best))

    def threshold(self, p: Probs) -> float:
        """The probability that a token must exceed, given the target's distribution."""
        entropy = -sum64(p * log64(np.where(p > 0.0, p, 1.0)))  # in nats
        return min(self.typical_epsilon, self.typical_delta * exp_of(-entropy))
