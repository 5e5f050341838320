"""Encoder-decoder models of ``transformers`` (T5, mT5, Marian, ...), from a local folder.

A session's prompt is the encoder's input followed by the decoder's start token; every token after
it is the decoder's. A prompt without a start token is the encoder's input as a whole, and the
decoder starts after it. (Where the start token also ends an input, as in BART, the prompt must
have both.) Drafters, rules and controllers see one ordinary sequence.

The encoder runs once for each sequence; the decoder runs over all its tokens again for each path
of a draft, which is the ``recompute`` strategy of the general path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.errors import InvalidArgument
from paceline.models.base import KVSequence, Segment
from paceline.models.transformers import TransformersRunner
from paceline.models.transformers_sequence import TransformersSequence
from paceline.models.transformers_trees import ModelCalls, SingleTrees


class Seq2SeqSequence(TransformersSequence):
    """Token ids of one session, and the states of its encoder.

    Attributes:
        start: index of the token at whose place the decoder has its start token; None until
            logits are wanted for the first time.
        source: the encoder's input, once ``start`` is known.
        states: the encoder's last hidden states.  # [1, len(source), hidden_size]
    """

    def __init__(self) -> None:
        super().__init__()
        self.start: int | None = None
        self.source: list[int] = []
        self.states: Any = None  # a tensor, which transformers annotates more narrowly

    def forget_source(self) -> None:
        """Reset to a sequence whose encoder has not run."""
        self.start, self.source, self.states = None, [], None


class Seq2SeqRunner(TransformersRunner):
    """:class:`paceline.models.base.ModelRunner` over ``AutoModelForSeq2SeqLM``.

    Encoder input and decoder tokens of a sequence share its context length. Tokens of the encoder's
    input have no logits; where they are asked for they are zeros.

    Args:
        options: as :class:`TransformersRunner`, without ``strategy``.

    Raises:
        ModelNotFound, InvalidArgument: as :class:`TransformersRunner`; also a model whose
            configuration names no decoder_start_token_id.
    """

    _auto_class = "AutoModelForSeq2SeqLM"

    def __init__(self, path: str | Path, **options: Any) -> None:
        super().__init__(path, strategy="recompute", **options)
        named = (self.model.generation_config, self.model.config)
        ids = [getattr(config, "decoder_start_token_id", None) for config in named]
        start = next((token for token in ids if token is not None), None)
        if start is None:
            raise InvalidArgument("decoder_start_token_id", None, "a token id in config.json")
        self.start_token_id = int(start)
        self._trees = DecoderTrees(self._calls, self.start_token_id)

    def new_sequence(self) -> Seq2SeqSequence:
        return Seq2SeqSequence()

    def free(self, sequence: KVSequence) -> None:
        """Release all entries; freeing twice is harmless."""
        super().free(sequence)
        _own(sequence).forget_source()

    def truncate(self, sequence: KVSequence, length: int) -> None:
        """Drop committed entries from ``length`` on, and all pending ones."""
        super().truncate(sequence, length)
        own = _own(sequence)
        if own.start is not None and length < own.start:
            own.forget_source()

    def _append(self, sequence: TransformersSequence, segment: Segment, parents: list[int]) -> None:
        own = _own(sequence)
        if segment.logits != "none" and own.start is None and len(segment.token_ids):
            # A draft (which wants all logits) has one committed token, its first; what comes after
            # it says nothing about where the input ends.
            first = segment.token_ids[: 1 if segment.logits == "all" else None].tolist()
            self._find_start(own, own.token_ids + own.pending_ids + first)
        super()._append(sequence, segment, parents)

    def _find_start(self, sequence: Seq2SeqSequence, known: list[int]) -> None:
        """Split the tokens known so far into encoder input and decoder tokens."""
        sequence.start, sequence.source = find_start(known, self.start_token_id)


class DecoderTrees(SingleTrees):
    """Runs the decoder, after the encoder has run once for each sequence.

    Args:
        start_token_id: the decoder's first token.
    """

    def __init__(self, calls: ModelCalls, start_token_id: int) -> None:
        super().__init__(calls, "recompute")
        self.start_token_id = start_token_id

    def _run_whole(
        self, sequence: TransformersSequence, token_ids: list[int], keep: int
    ) -> torch.Tensor:
        """Logits of the last ``keep`` tokens from one run of the decoder.  # [keep, vocab_size]"""
        from transformers.modeling_outputs import BaseModelOutput

        own = _own(sequence)
        assert own.start is not None  # logits are wanted
        if own.states is None:
            own.states = self._calls.model.get_encoder()(input_ids=self._tensor(own.source))[0]
        decoder_ids = [self.start_token_id, *token_ids[own.start + 1 :]]
        logits: torch.Tensor = self._calls.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=own.states),
            decoder_input_ids=self._tensor(decoder_ids),
            use_cache=False,
        ).logits[0, -keep:]
        missing = keep - len(logits)
        return torch.nn.functional.pad(logits, (0, 0, missing, 0)) if missing else logits

    def _tensor(self, token_ids: list[int]) -> torch.Tensor:
        return torch.tensor([token_ids], dtype=torch.int64, device=self._calls.device)


def find_start(known: list[int], start_token_id: int) -> tuple[int, list[int]]:
    """At which of the known tokens the decoder starts, and the encoder's input."""
    if start_token_id not in known:
        return len(known) - 1, known
    place = known.index(start_token_id)
    while known[place + 1 : place + 2] == [start_token_id]:  # after a padded or ended input
        place += 1
    # The prompt is only the start token: encoders cannot run on an empty input.
    return place, known[:place] or [start_token_id]


def _own(sequence: KVSequence) -> Seq2SeqSequence:
    if not isinstance(sequence, Seq2SeqSequence):
        raise InvalidArgument(
            "sequence", type(sequence).__name__, "a sequence of this runner's new_sequence()"
        )
    return sequence
