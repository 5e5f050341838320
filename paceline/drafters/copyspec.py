"""CopySpec: copy what followed the first occurrence of the last few tokens.

Dumitru et al. 2025 (arXiv 2502.08923): a hash map from every gram of ``min_match`` tokens (gamma)
to where it first occurred in prompt and output; if the last gamma tokens are in it, the tokens
after that place are the draft; otherwise a draft model drafts, or the round is AR.

In an edited copy, the match ends where the edit begins and resumes after it. So the method
``copy_relay`` also looks up the end of the draft model's drafts, and copies on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.drafters.base import (
    FALLBACK_DEPTH,
    MIN_MATCH,
    RELAY_TOKENS,
    DrafterPart,
    LookupDrafter,
)
from paceline.types import Budget, Draft

if TYPE_CHECKING:
    from paceline.view import SessionView


class FirstOccurrences:
    """Position after the first occurrence of every gram of ``gamma`` tokens.

    Each token is indexed once, so a round costs as much as its new tokens, whatever the context.
    """

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # grams that end before this position are known

    def find(self, token_ids: list[int], drafted: Sequence[int] = ()) -> int | None:
        """Position after the first earlier occurrence of the last gamma tokens.

        Args:
            token_ids: those of the last call, and maybe more.
            drafted: tokens that may follow them: searched for, not indexed.
        """
        gamma, end = self._gamma, len(token_ids)
        # The gram at the very end is left out, or it would find itself.
        for after in range(max(self._indexed + 1, gamma), end):
            self._after.setdefault(tuple(token_ids[after - gamma : after]), after)
        self._indexed = max(self._indexed, end - 1)
        tail = (*token_ids[-gamma:], *drafted)[-gamma:]
        return self._after.get(tail) if len(tail) == gamma else None


class CopySpec(LookupDrafter[FirstOccurrences]):
    """A chain copied from the session's own tokens."""

    finds_chains = True

    def start(self, session: SessionView) -> FirstOccurrences:
        gamma = session.config[MIN_MATCH]
        assert gamma is not None  # resolved
        state = FirstOccurrences(gamma)
        state.find(session.token_ids)  # index the prompt now, so that all rounds cost the same
        return state

    def find(self, session: SessionView, state: FirstOccurrences, budget: Budget) -> Draft | None:
        place = state.find(session.token_ids)
        if place is None:
            return None
        return Draft.chain(session.token_ids[place : place + min(budget.depth, budget.nodes)])

    def find_behind(
        self, session: SessionView, state: FirstOccurrences, drafted: list[int], room: int
    ) -> list[int]:
        place = state.find(session.token_ids, drafted)
        return [] if place is None else (session.token_ids[place : place + room] + drafted)[:room]


COPYSPEC = DrafterPart(make=lambda context: CopySpec(), knobs=(MIN_MATCH,), replay="lookup")
COPYSPEC_OR_DRAFT_MODEL = DrafterPart(
    make=lambda context: CopySpec(context.drafter("draft_model")),
    knobs=(MIN_MATCH, FALLBACK_DEPTH.but(5), RELAY_TOKENS),
    halves=("copyspec", "draft_model"),
)
