"""Input-guided aggressive decoding: the output is expected to repeat the input.

Ge et al. 2022 (arXiv 2205.10350), for rewriting tasks such as grammatical error correction: draft
the input itself. After the first difference decode as AR until the last tokens of the output are
an n-gram that occurs once in the input, and copy on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.drafters.base import NGRAM_MAX, NGRAM_MIN, Drafter, DrafterPart, fit_ngrams
from paceline.types import EMPTY_DRAFT, Budget, Draft, Outcome

if TYPE_CHECKING:
    from paceline.view import SessionView


@dataclass(slots=True)
class _State:
    """Where a session copies from.

    Attributes:
        input_ids: the session's prompt; of an encoder-decoder model, the encoder's input.
        ends: position after each n-gram of the input, -1 where it occurs more than once.
        place: the next input token to copy; None after a difference.
    """

    input_ids: list[int]
    ends: dict[tuple[int, ...], int]
    place: int | None = 0


class AggressiveDecoding(Drafter):
    """A chain copied from the prompt; state is an n-gram index of it for each session."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def open(self, session: SessionView) -> None:
        ids = session.token_ids[: session.prompt_length]
        ends: dict[tuple[int, ...], int] = {}
        for length in _lengths(session):
            for end in range(length, len(ids) + 1):
                ngram = tuple(ids[end - length : end])
                ends[ngram] = -1 if ngram in ends else end
        state = self._states[session.session_id] = _State(ids, ends)
        _follow(state, session.output_ids)  # none, unless the session was opened again

    def close(self, session: SessionView) -> None:
        self._states.pop(session.session_id, None)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._propose(s, b) for s, b in zip(sessions, budgets, strict=True)]

    def _propose(self, session: SessionView, budget: Budget) -> Draft:
        state, count = self._states[session.session_id], min(budget.depth, budget.nodes)
        if state.place is None:
            state.place = _find(state, session)
        if state.place is None or count <= 0:
            return EMPTY_DRAFT
        return Draft.chain(state.input_ids[state.place : state.place + count])

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        for session, outcome in zip(sessions, outcomes, strict=True):
            _follow(self._states[session.session_id], outcome.token_ids)


def _lengths(session: SessionView) -> range:
    """Lengths of the n-grams that are looked for, longest first."""
    config = session.config
    return range(config[NGRAM_MAX], config[NGRAM_MIN] - 1, -1)


def _follow(state: _State, token_ids: Sequence[int]) -> None:
    """Move on in the input as long as the output is the same."""
    for token in token_ids:
        place = state.place
        if place is None:
            return
        same = place < len(state.input_ids) and state.input_ids[place] == token
        state.place = place + 1 if same else None


def _find(state: _State, session: SessionView) -> int | None:
    """Where to copy on: after the longest n-gram of the input that ends the output."""
    length = session.length - session.prompt_length
    for size in _lengths(session):
        if size <= length:
            end = state.ends.get(tuple(session.token_ids[-size:]))
            if end is not None:
                # Shorter n-grams occur wherever a longer one does, so they are ambiguous as well.
                return end if end >= 0 else None
    return None


AGGRESSIVE = DrafterPart(
    make=lambda context: AggressiveDecoding(),
    knobs=(NGRAM_MAX.but(4), NGRAM_MIN),
    fit=fit_ngrams,
    replay="lookup",
)
