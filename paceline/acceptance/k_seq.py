"""SpecTr's k-SEQ: several independent drafts, verified as one optimal-transport problem.

Sun et al. 2023 (arXiv 2310.15141, algorithm 3). Each of k independent draws x from q passes a test
with probability ``min(1, p(x) / (rho * q(x)))``; the rule keeps the first that passes. With
``beta = sum of min(q, p / rho)``, some draw passes with probability ``1 - (1 - beta)^k``. rho is
the smallest number in [1, k] for which the passing probability never exceeds p; if no draw passes,
the next token is drawn from what is missing to p. The acceptance is at least (1 - 1/e) of the best
that any rule has.

Drafts that agree so far are verified together: the rule walks over sets of nodes with the same
token path, whose children are all independent draws from the same q.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.acceptance.base import PathLogits, exact_match, q_row, reject_in_turn
from paceline.exact_math import sum64
from paceline.sampling import Probs
from paceline.tree import children, path_to
from paceline.types import Acceptance, Draft, Draws, FloatArray, IntArray, Need


class KSeq:
    """Walk down the tree over all nodes that share the accepted token path."""

    name = "k_seq"
    lossless = True
    chain_only = False
    draws = Draws.WITH_REPLACEMENT
    knobs = ()
    needs = frozenset[Need]()

    def accept(self, draft: Draft, target: PathLogits) -> Acceptance:
        if target.params.temperature == 0:
            return exact_match(draft, target, target.argmax)
        followers = children(draft.parent_indices)
        active, tokens = [-1], list[int]()
        while True:
            p = target.probs(tokens, active[0])
            candidates = sorted(child for node in active for child in followers[node])
            accepted, left = _select(p, draft, candidates, target, len(tokens))
            if accepted is None:
                path = path_to(draft.parent_indices, active[0])
                return Acceptance(path, target.draw(left, len(tokens)))
            token = int(draft.token_ids[accepted])
            active = [node for node in candidates if draft.token_ids[node] == token]
            tokens.append(token)


def _select(
    p: Probs, draft: Draft, candidates: Sequence[int], target: PathLogits, depth: int
) -> tuple[int | None, Probs]:
    """The accepted candidate, or None and the distribution to draw from instead."""
    if not candidates:
        return None, p
    support, q = q_row(draft, candidates[0])
    if not all(_same(draft, node, support, q) for node in candidates[1:]):
        # The candidates come from different q: trying them in turn is exact for any q.
        return reject_in_turn(p, draft, candidates, target, depth)
    k, p_support, q_support = len(candidates), p[support], q.astype(np.float64)
    rho = ratio(p_support, q_support, k)
    for number, node in enumerate(candidates):
        place = int(np.flatnonzero(support == draft.token_ids[node])[0])
        if target.toss(float(p_support[place]) / (rho * float(q[place])), depth, number):
            return node, p
    left = p.copy()
    left[support] = np.maximum(p_support - passed(p_support, q_support, rho, k), 0.0)
    total = sum64(left)
    # If p equals q up to rounding, nothing is missing.
    return None, left / total if total > 0.0 else p


def _same(draft: Draft, node: int, support: IntArray, q: FloatArray) -> bool:
    other_support, other_q = q_row(draft, node)
    return np.array_equal(other_support, support) and np.array_equal(other_q, q)


def passed(p: Probs, q: Probs, rho: float, k: int) -> Probs:
    """For each token, the probability that it is the first of k draws to pass.

    # as p, on q's support
    """
    kept = np.minimum(q, p / rho)
    beta = sum64(kept)
    if not 0.0 < beta < 1.0:  # no draw ever passes, or the first one always does
        return kept
    tries = (
        0.0  # the expected number: (1 - (1 - beta)^k) / beta = 1 + (1 - beta) + (1 - beta)^2 ...
    )
    for _ in range(k):
        tries = tries * (1.0 - beta) + 1.0
    result: Probs = kept * tries
    return result


def ratio(p: Probs, q: Probs, k: int) -> float:
    """rho, the fixed point ``rho = (1 - (1 - beta)^k) / beta`` in [1, k], by bisection.

    The right-hand side grows slower than rho, so the fixed point is unique, and above it the
    passing probability stays below p everywhere. The result is the upper end of the last interval,
    1e-6 long: as exact, and practically as good.
    """
    low, high = 1.0, float(k)
    if k == 1 or _acceptance(p, q, 1.0, k) <= sum64(np.minimum(p, q)):
        return low
    while high - low > 1e-6:
        rho = (low + high) / 2
        if _acceptance(p, q, rho, k) <= sum64(np.minimum(rho * q, p)):
            high = rho
        else:
            low = rho
    return high


def _acceptance(p: Probs, q: Probs, rho: float, k: int) -> float:
    """Probability that any of k draws passes."""
    return sum64(passed(p, q, rho, k))
