"""Jacobi, Gauss-Seidel and hybrid decoding: the target's own parallel guesses, refined.

Santilli et al. 2023 (arXiv 2305.10427): greedy decoding solves a triangular system of equations,
one for each position, and a fixed-point iteration ``y <- argmax p(. | y)`` solves many of them at
once. The guesses are the draft; what the target says after each of them, right or wrong, is the
next guess. A verified prefix is committed at once, so every iteration fixes at least one token and
``m`` positions take at most ``m`` iterations.

Above temperature 0 the guesses are tokens of coupled sampling at their own positions, so the
iteration has the seeded sample as its fixed point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from paceline.drafters.base import Drafter, DrafterPart, target_tokens
from paceline.knobs import MAX_DEPTH, Knob
from paceline.types import EMPTY_DRAFT, Budget, Draft, Need, Outcome

if TYPE_CHECKING:
    from paceline.view import SessionView

Blocks = Literal["whole", "blocks", "hybrid"]


PARALLEL_TOKENS = Knob[int | None](
    "parallel_tokens", int, None,
    "Generated tokens that hybrid Jacobi decoding refines in blocks before it continues as AR; "
    "default: the length of the prompt.",
    ge=1,
)  # fmt: skip


class Jacobi(Drafter):
    """A chain of guesses; state is the list of those after the last committed token.

    A draft of ``n`` guesses is an iteration over ``n + 1`` positions, the first of which depends
    on committed tokens only.

    Args:
        blocks: ``whole`` (PJ): a window as long as the budget, which slides with the committed
            tokens. ``blocks`` (PGJ): blocks of ``num_speculative_tokens + 1`` positions, each of
            them finished before the next one begins. ``hybrid`` (HGJ): blocks for an estimated
            length of output, ``parallel_tokens`` or else the prompt's length, then AR; nothing is
            drafted after a guessed end.
    """

    needs = frozenset({Need.TREE_LOGITS})

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._states: dict[str, list[int]] = {}

    def open(self, session: SessionView) -> None:
        self._states[session.session_id] = []

    def close(self, session: SessionView) -> None:
        self._states.pop(session.session_id, None)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._propose(s, b) for s, b in zip(sessions, budgets, strict=True)]

    def _propose(self, session: SessionView, budget: Budget) -> Draft:
        count = min(budget.depth, budget.nodes, self._room(session))
        if count <= 0:
            return EMPTY_DRAFT
        guesses = self._states[session.session_id][:count]
        # Where nothing was guessed yet the last token stands in, as the padding does in the paper.
        guesses += [session.token_ids[-1]] * (count - len(guesses))
        if self._blocks == "hybrid":
            ends = (i + 1 for i, token in enumerate(guesses) if session.stops_at(token))
            guesses = guesses[: next(ends, count)]
        return Draft.chain(guesses)

    def _room(self, session: SessionView) -> int:
        """Guesses that the current block has room for; a window has what the budget allows."""
        if self._blocks == "whole":
            return MAX_DEPTH
        config = session.config
        size = (config.num_speculative_tokens or 0) + 1
        done = session.length - session.prompt_length
        if self._blocks == "hybrid" and done >= (config[PARALLEL_TOKENS] or session.prompt_length):
            return 0
        return size - done % size - 1

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        for session, outcome in zip(sessions, outcomes, strict=True):
            # The last committed token stands where node len(token_ids) - 1 had been guessed.
            later = range(len(outcome.token_ids) - 1, outcome.draft.num_nodes)
            guesses = target_tokens(session, outcome, later) if later else []
            self._states[session.session_id] = guesses


JACOBI = DrafterPart(make=lambda context: Jacobi("whole"))
GAUSS_SEIDEL = DrafterPart(make=lambda context: Jacobi("blocks"))
HYBRID_JACOBI = DrafterPart(make=lambda context: Jacobi("hybrid"), knobs=(PARALLEL_TOKENS,))
