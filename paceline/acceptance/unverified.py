"""Accept every drafted token, whatever the target thinks of it (lossy).

The rule of methods whose drafter or length controller decides alone what is written: Lexical Unit
Decoding (arXiv 2405.15208). The target adds its own token behind the draft, and in the same forward
computes the KV entries of the drafted ones.
"""

from __future__ import annotations

import math

from paceline.acceptance.base import PathLogits
from paceline.types import Acceptance, Draft, Draws, Need


class Unverified:
    """Accept a chain up to the first token that a constraint or a mask forbids."""

    name = "unverified"
    lossless = False
    chain_only = True
    draws = Draws.TOP
    needs = frozenset[Need]()
    knobs = ()

    def accept(self, draft: Draft, target: PathLogits) -> Acceptance:
        tokens: list[int] = []
        for node, token in enumerate(draft.token_ids.tolist()):
            if target.row(tokens, node - 1)[token] == -math.inf:
                break
            tokens.append(token)
        return Acceptance(tuple(range(len(tokens))), target.token(tokens, len(tokens) - 1))
