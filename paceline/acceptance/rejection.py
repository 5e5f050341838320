"""Speculative (rejection) sampling with its residual.

Leviathan, Kalman, Matias 2022 (arXiv 2211.17192, algorithm 1) and Chen et al. 2023
(arXiv 2302.01318): accept a token x drawn from q with probability ``min(1, p(x) / q(x))``; after a
rejection draw from ``norm(max(p - q, 0))``. The output law is the target's; the tokens of a seed
are not those of coupled sampling. At temperature 0 both reduce to exact match.
"""

from __future__ import annotations

import numpy as np

from paceline.acceptance.base import PathLogits
from paceline.sampling import Salt, probabilities, sample_from, uniform
from paceline.types import Acceptance, Draft, Draws


class Rejection:
    """Accept or reject along a chain. A draft without ``probs`` counts as a point mass."""

    name = "rejection"
    lossless = True
    chain_only = True
    draws = Draws.WITH_REPLACEMENT

    def accept(self, draft: Draft, target: PathLogits) -> Acceptance:
        seed = target.params.seed
        path: list[int] = []
        tokens: list[int] = []
        for node, token in enumerate(draft.token_ids.tolist()):
            position = target.position + node
            p = probabilities(target.row(tokens, node - 1), target.params)
            if draft.probs is None:
                support, q = np.array([token]), np.ones(1)
            else:
                support, q = draft.probs.row(node)[0], draft.probs.row(node)[1].astype(np.float64)
            q_token = float(q[support == token].sum())
            # u < p/q, written so that p >= q always accepts.
            if uniform(seed, position, token, Salt.ACCEPT) * q_token < p[token]:
                path.append(node)
                tokens.append(token)
                continue
            residual = p.copy()
            residual[support] = np.maximum(residual[support] - q, 0.0)
            total = residual.sum()
            if total <= 0.0:  # p == q up to rounding: nothing is left to correct
                residual, total = p, p.sum()
            next_token = sample_from(residual / total, seed, position, Salt.RESIDUAL)
            return Acceptance(tuple(path), next_token)
        position = target.position + len(tokens)
        p = probabilities(target.row(tokens, len(tokens) - 1), target.params)
        return Acceptance(tuple(path), sample_from(p, seed, position, Salt.RESIDUAL))
