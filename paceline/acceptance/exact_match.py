"""Exact match: accept a drafted token iff AR would have produced it.

At temperature 0, AR produces the argmax (``greedy``); above 0, the token that coupled sampling
draws (``coupled``), so seeded samples are identical to AR's for any draft. If the drafter uses the
same noise, the acceptance probability of a token is at least
``(1 - TV(p, q)) / (1 + TV(p, q))`` (Daliri, Musco, Suresh 2024, arXiv 2408.07978, theorem 2).
"""

from __future__ import annotations

from paceline.acceptance.base import PathLogits, exact_match
from paceline.errors import InvalidArgument
from paceline.types import Acceptance, Draft, Draws, Need


class Coupled:
    """Walk down the tree as long as a child holds the token that the target samples."""

    name = "coupled"
    lossless = True
    chain_only = False
    draws = Draws.COUPLED
    knobs = ()
    needs = frozenset[Need]()

    def accept(self, draft: Draft, target: PathLogits) -> Acceptance:
        return exact_match(draft, target, target.token)


class Greedy(Coupled):
    """Exact match with the argmax (Leviathan et al. 2022, arXiv 2211.17192, at temperature 0)."""

    name = "greedy"

    def accept(self, draft: Draft, target: PathLogits) -> Acceptance:
        if target.params.temperature > 0:
            raise InvalidArgument(
                "temperature",
                target.params.temperature,
                "0 with the acceptance rule 'greedy'; 'coupled' is exact at any temperature",
            )
        return exact_match(draft, target, target.argmax)
