"""Block verification: decide on a whole chain at once instead of token by token.

Sun et al. 2024 (arXiv 2403.10444, algorithm 2). With ``p_0 = 1`` and
``p_i = min(1, p_{i-1} * p(x_i) / q(x_i))``, prefix i is accepted with probability

    h_i = R_i / (R_i + 1 - p_i),  R_i = sum over v of max(p_i * p(v) - q(v), 0) after x_1 .. x_i,

and the whole chain with probability ``p_i``. The longest accepted prefix is kept, and the next
token is drawn from ``norm(max(p_i * p - q, 0))``. A likely token makes up for an unlikely one
before it, so the expected accepted length is never below that of token-by-token rejection.
"""

from __future__ import annotations

import numpy as np

from paceline.acceptance.base import PathLogits, exact_match, q_row
from paceline.exact_math import sum64
from paceline.sampling import Probs
from paceline.types import Acceptance, Draft, Draws, Need


class BlockVerification:
    """Accept the longest prefix of a chain that passes the joint test."""

    name = "block"
    lossless = True
    chain_only = True
    draws = Draws.WITH_REPLACEMENT
    knobs = ()
    needs = frozenset[Need]()

    def accept(self, draft: Draft, target: PathLogits) -> Acceptance:
        if target.params.temperature == 0:
            return exact_match(draft, target, target.argmax)
        tokens: list[int] = draft.token_ids.tolist()
        length, joint = 0, 1.0  # accepted prefix, p_i
        left = p = target.probs([], -1)
        for depth in range(len(tokens) + 1):
            last = depth == len(tokens)
            if depth:
                p = target.probs(tokens[:depth], depth - 1)
            weights = joint * p if last else _excess(joint, p, draft, depth)
            mass = sum64(weights)
            # The next token is drawn from what is left after the longest accepted prefix. Depth 0
            # is always accepted. All tosses read the noise of depth 0, which belongs to this round
            # (see PathLogits.toss).
            chance = joint if last else _ratio(mass, 1.0 - joint)
            if depth == 0 or target.toss(chance, 0, depth):
                length, left = depth, weights / mass if mass > 0.0 else p
            if not last:
                support, q = q_row(draft, depth)
                q_token = sum64(q[support == tokens[depth]])
                if q_token > 0.0:
                    joint = min(1.0, joint * float(p[tokens[depth]]) / q_token)
                else:
                    joint = 0.0  # not drawn from this q at all: trying it would change the law
            if joint == 0.0:
                break
        return Acceptance(tuple(range(length)), target.draw(left, length))


def _excess(joint: float, p: Probs, draft: Draft, node: int) -> Probs:
    """``max(joint * p - q, 0)`` with the q of ``node``.  # [vocab_size]"""
    support, q = q_row(draft, node)
    result: Probs = joint * p
    result[support] = np.maximum(result[support] - q, 0.0)
    return result


def _ratio(mass: float, rest: float) -> float:
    # Both are 0 if p equals q and everything so far is accepted: then accept further.
    return mass / (mass + rest) if mass + rest > 0.0 else 1.0
