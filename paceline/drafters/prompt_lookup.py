"""Prompt lookup: copy what followed the last occurrence of the current suffix.

Saxena 2023 (https://github.com/apoorvumang/prompt-lookup-decoding): search prompt and output for
the last ``ngram_max`` tokens, then for shorter suffixes down to ``ngram_min``, and propose the
tokens that followed the most recent earlier occurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.drafters.base import NGRAM_MAX, NGRAM_MIN, Drafter, DrafterPart, fit_ngrams
from paceline.types import EMPTY_DRAFT, Budget, Draft

if TYPE_CHECKING:
    from paceline.view import SessionView


class _SuffixIndex:
    """End position of the latest occurrence of every n-gram; each token is indexed once."""

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self._lengths = range(ngram_max, ngram_min - 1, -1)
        self._latest: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def extend(self, token_ids: list[int]) -> None:
        # The n-grams that end at the last token are left out, or a suffix would find itself.
        for end in range(self._indexed, len(token_ids) - 1):
            for length in self._lengths:
                if end + 1 >= length:
                    self._latest[tuple(token_ids[end + 1 - length : end + 1])] = end + 1
        self._indexed = max(self._indexed, len(token_ids) - 1)

    def find(self, token_ids: list[int]) -> int | None:
        """Position after the latest earlier occurrence of the longest known suffix."""
        for length in self._lengths:
            if len(token_ids) >= length:
                place = self._latest.get(tuple(token_ids[-length:]))
                if place is not None:
                    return place
        return None


class PromptLookup(Drafter):
    """A chain copied from the session's own tokens; state is one index for each session."""

    copies = True
    quick = True

    def __init__(self) -> None:
        self._indexes: dict[str, _SuffixIndex] = {}

    def open(self, session: SessionView) -> None:
        config = session.config
        self._indexes[session.session_id] = _SuffixIndex(config[NGRAM_MIN], config[NGRAM_MAX])

    def close(self, session: SessionView) -> None:
        self._indexes.pop(session.session_id, None)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._propose(s, b) for s, b in zip(sessions, budgets, strict=True)]

    def _propose(self, session: SessionView, budget: Budget) -> Draft:
        count = min(budget.depth, budget.nodes)
        if count <= 0:
            return EMPTY_DRAFT
        index = self._indexes[session.session_id]
        index.extend(session.token_ids)
        place = index.find(session.token_ids)
        if place is None:
            return EMPTY_DRAFT
        return Draft.chain(session.token_ids[place : place + count])


PROMPT_LOOKUP = DrafterPart(
    make=lambda context: PromptLookup(),
    knobs=(NGRAM_MAX, NGRAM_MIN),
    fit=fit_ngrams,
    replay="lookup",
)
