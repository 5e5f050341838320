"""A model beside a text that grows by several models' tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.errors import InvalidArgument
from paceline.models.base import ModelRunner, Segment


class Reader:
    """Gives a model's logits after a text, and computes only what its KV cache lacks.

    Args:
        layers: how many of the model's first layers to compute; None: all.

    Attributes:
        num_forwards: forwards so far.
        num_read: tokens computed so far.
    """

    def __init__(self, runner: ModelRunner, layers: int | None = None) -> None:
        self.runner = runner
        self._layers = None if layers is None else tuple(range(layers))
        self.num_forwards = self.num_read = 0
        self._sequence = runner.new_sequence()
        self._known: list[int] = []

    @property
    def num_cached(self) -> int:
        """Tokens of the text that have KV entries."""
        return len(self._known)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits after all of ``token_ids``.  # [vocab_size] float32

        Tokens that another model has added since the last call are read in this forward; those that
        are no longer part of the text are forgotten.
        """
        keep = min(_shared(self._known, token_ids), len(token_ids) - 1)
        if keep < len(self._known):
            self.runner.truncate(self._sequence, keep)
            del self._known[keep:]
        new = np.asarray(token_ids[keep:], np.int64)
        segment = Segment(self._sequence, new, logits="last", layers=self._layers)
        result = self.runner.forward([segment])
        self.runner.commit(self._sequence, range(len(new)))
        self._known += new.tolist()
        self.num_forwards += 1
        self.num_read += len(new)
        return result.logits[-1].float().cpu()

    def close(self) -> None:
        """Free the KV entries."""
        self.runner.free(self._sequence)


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return place
    return min(len(first), len(second))


def check_prompt(prompt_ids: Sequence[int], max_tokens: int, *runners: ModelRunner) -> None:
    """Check that a prompt and its continuation fit into all models.

    Raises:
        InvalidArgument: the prompt is empty, has unknown tokens, or is too long; or the models have
            vocabularies of different sizes.
    """
    sizes = sorted({runner.vocab_size for runner in runners})
    if len(sizes) > 1:
        raise InvalidArgument(
            "small", f"{sizes[0]} and {sizes[1]} tokens", "models of one vocabulary"
        )
    longest = min(min(runner.context_length, runner.kv_capacity) for runner in runners)
    if max_tokens < 1:
        raise InvalidArgument("max_tokens", max_tokens, "at least 1")
    if not 1 <= len(prompt_ids) <= longest - max_tokens:
        raise InvalidArgument(
            "prompt",
            f"{len(prompt_ids)} tokens",
            f"1 to {longest - max_tokens} with this max_tokens",
        )
    for i, token in enumerate(prompt_ids):
        if not 0 <= token < sizes[0]:
            raise InvalidArgument(f"prompt[{i}]", token, f"token ids in [0, {sizes[0]})")
