"""The drafts of rounds as GenerateReply.draft shows them to people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.rpc.gen.paceline.v1 import generate_pb2
from paceline.tokenizer import IncrementalDecoder, Tokenizer
from paceline.types import Outcome

if TYPE_CHECKING:
    from paceline.engine import RoundEvent


class RoundDrafts:
    """The drafts of one session, round by round.

    Args:
        tokenizer: for texts; None leaves them out.
        token_ids: of the session so far: a token's text depends on the token before it.
        prompt_length: number of the prompt's among them.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, token_ids: Sequence[int], prompt_length: int
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = None if tokenizer is None else IncrementalDecoder(tokenizer)
        if self._decoder is not None:
            for token in token_ids[prompt_length:]:
                self._decoder.push(token)
        self._last_token = token_ids[-1]

    def of(self, event: RoundEvent, outcome: Outcome) -> generate_pb2.RoundDraft:
        """The message of the next round."""
        draft = outcome.draft
        message = generate_pb2.RoundDraft(
            token_ids=draft.token_ids.tolist(),
            parent_indices=draft.parent_indices.tolist(),
            accepted_indices=outcome.path[: outcome.num_accepted],
            seconds=event.at - event.session.stats.started_at,
        )
        if self._tokenizer is not None and self._decoder is not None:
            for token, parent in zip(message.token_ids, message.parent_indices, strict=True):
                before = self._last_token if parent < 0 else message.token_ids[parent]
                message.texts.append(_text_after(self._tokenizer, before, token))
            message.committed_texts.extend(map(self._decoder.push, outcome.token_ids))
            if outcome.finish_reason and outcome.token_ids:
                message.committed_texts[-1] += self._decoder.flush()
        self._last_token = outcome.token_ids[-1] if outcome.token_ids else self._last_token
        return message


def _text_after(tokenizer: Tokenizer, before: int, token: int) -> str:
    """A token's text after another one: some tokenizers drop a space at the start of a text."""
    return tokenizer.decode([before, token])[len(tokenizer.decode([before])) :]
