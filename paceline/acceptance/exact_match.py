"""Exact match: accept a drafted token iff it is the token that AR would have produced.

At temperature 0 that is the argmax (``greedy``); above 0 it is the token drawn by coupled
sampling (``coupled``), which makes seeded samples identical to AR's for any draft. With a drafter
that uses the same noise, the acceptance probability of a token is at least
``(1 - TV(p, q)) / (1 + TV(p, q))`` (Daliri, Musco, Suresh 2024, arXiv 2408.07978, theorem 2).
"""

from __future__ import annotations

from paceline.acceptance.base import PathLogits
from paceline.errors import InvalidArgument
from paceline.sampling import coupled_sample
from paceline.tree import children
from paceline.types import Acceptance, Draft, Draws


class Coupled:
    """Walk down the tree as long as a child holds the token that the target samples."""

    name = "coupled"
    lossless = True
    chain_only = False
    draws = Draws.COUPLED

    def accept(self, draft: Draft, target: PathLogits) -> Acceptance:
        followers = children(draft.parent_indices)
        path: list[int] = []
        tokens: list[int] = []
        node = -1
        while True:
            token = self._target_token(target, tokens, node)
            node = next((c for c in followers[node] if draft.token_ids[c] == token), -1)
            if node < 0:
                return Acceptance(tuple(path), token)
            path.append(node)
            tokens.append(token)

    def _target_token(self, target: PathLogits, tokens: list[int], node: int) -> int:
        if target.params.temperature == 0:
            return target.argmax(tokens, node)
        position = target.position + len(tokens)
        return coupled_sample(target.row(tokens, node), target.params, position)


class Greedy(Coupled):
    """Exact match with the argmax (Leviathan et al. 2022, arXiv 2211.17192, at temperature 0)."""

    name = "greedy"

    def _target_token(self, target: PathLogits, tokens: list[int], node: int) -> int:
        if target.params.temperature > 0:
            raise InvalidArgument(
                "temperature",
                target.params.temperature,
                "0 with the acceptance rule 'greedy'; 'coupled' is exact at any temperature",
            )
        return target.argmax(tokens, node)
