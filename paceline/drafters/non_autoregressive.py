"""A non-autoregressive model drafts a block of tokens in one forward.

Generalised Aggressive Decoding, Ge et al. 2022 (arXiv 2205.10350): an encoder reads the input once,
and a decoder without order reads what is written and the masks of a block behind it. Each
position's token is chosen by itself, so a block may mix two ways to go on; the target keeps its
beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.drafters.base import Drafter, DrafterPart, position_values, until_stop
from paceline.types import EMPTY_DRAFT, Budget, Draft

if TYPE_CHECKING:
    from paceline.models.non_autoregressive import FillingModel
    from paceline.view import SessionView


@dataclass(slots=True)
class _Source:
    """What the encoder made of a session's prompt.

    Attributes:
        states: its hidden states; None if the prompt is too long.
        written: tokens of the output that the prompt has already.
    """

    states: Any
    written: list[int]


class NonAutoregressive(Drafter):
    """Drafts with a model that fills masks and has the target's tokenizer.

    Of an encoder-decoder target it reads the same input. Of any other, the prompt is the input, and
    what the target writes is the output.

    Args:
        model: of the drafter's folder.
        vocab_size: the target's.
    """

    rewinds = True

    def __init__(self, model: FillingModel, vocab_size: int) -> None:
        self.model, self.vocab_size = model, vocab_size
        self._states: dict[str, _Source] = {}

    @property
    def context_length(self) -> int:
        return self.model.context_length

    def open(self, session: SessionView) -> None:
        source, written = self.model.split(session.token_ids[: session.prompt_length])
        fits = len(source) <= self.context_length
        states = self.model.encode(source) if fits else None
        self._states[session.session_id] = _Source(states, written)

    def close(self, session: SessionView) -> None:
        self._states.pop(session.session_id, None)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        return [
            self._draft(session, min(budget.depth, budget.nodes))
            for session, budget in zip(sessions, budgets, strict=True)
        ]

    def _draft(self, session: SessionView, depth: int) -> Draft:
        source = self._states[session.session_id]
        written = source.written + session.token_ids[session.prompt_length :]
        # The decoder's start token takes a place, too.
        if depth <= 0 or source.states is None or len(written) + depth >= self.context_length:
            return EMPTY_DRAFT
        logits = self.model.fill(source.states, written, depth)[:, : self.vocab_size].numpy()
        values = position_values(session, logits)
        return Draft.chain(until_stop(session, [int(row.argmax()) for row in values]))


NON_AUTOREGRESSIVE = DrafterPart(replay="composite")
