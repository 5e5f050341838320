"""Speculative (rejection) sampling with its residual.

Leviathan, Kalman, Matias 2022 (arXiv 2211.17192, algorithm 1) and Chen et al. 2023
(arXiv 2302.01318): accept a token x drawn from q with probability ``min(1, p(x) / q(x))``; after a
rejection, draw from ``norm(max(p - q, 0))``. The output has the target's distribution, but a seed
gives other tokens than coupled sampling. At temperature 0 the rule is exact match.
"""

from __future__ import annotations

from paceline.acceptance.base import PathLogits, exact_match, reject_in_turn
from paceline.tree import children
from paceline.types import Acceptance, Draft, Draws, Need


class Rejection:
    """Accept or reject along a chain. A draft without ``probs`` counts as a point mass."""

    name = "rejection"
    lossless = True
    chain_only = True
    draws = Draws.WITH_REPLACEMENT
    knobs = ()
    needs = frozenset[Need]()

    def accept(self, draft: Draft, target: PathLogits) -> Acceptance:
        if target.params.temperature == 0:
            return exact_match(draft, target, target.argmax)
        followers = children(draft.parent_indices)
        path: list[int] = []
        tokens: list[int] = []
        while True:
            node = path[-1] if path else -1
            p = target.probs(tokens, node)
            accepted, left = reject_in_turn(p, draft, followers[node], target, len(tokens))
            if accepted is None:
                return Acceptance(tuple(path), target.draw(left, len(tokens)))
            path.append(accepted)
            tokens.append(int(draft.token_ids[accepted]))


class RecursiveRejection(Rejection):
    """Try siblings in order, each against what the rejected ones before it have left.

    The recursive rejection sampling of RSD (Jeon et al. 2024, arXiv 2402.14160): siblings are drawn
    without replacement, so each node's q is renormalised without its earlier siblings. On trees
    without ``probs`` the rule is multi-candidate rejection of point masses.
    """

    name = "recursive_rejection"
    chain_only = False
    draws = Draws.WITHOUT_REPLACEMENT
