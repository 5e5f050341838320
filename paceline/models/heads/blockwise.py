"""Blockwise parallel decoding: a layer that predicts a block of next tokens at once.

Stern, Shazeer, Uszkoreit 2018 (arXiv 1811.03115). For a block of k tokens, k - 1 predictors stand
beside the target's own. They share a feed-forward layer on the last hidden state, each adds its
part of the result to that state, and the target's output layer predicts. The forward that verifies
a block also gives the state that the next one is predicted from, so that text takes as many
forwards as blocks, and one for the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.heads.base import HeadBatch, HeadTarget, shifted_agreement, text_cross_entropy
from paceline.models.heads.parallel import ParallelHead


@dataclass(frozen=True, slots=True)
class BlockwiseOptions:
    """Attributes:
    num_heads: predictors beside the target's own: k - 1.
    width: of the shared feed-forward layer, for each predictor, over the hidden size.
    one_head: each step trains one predictor, drawn at random, as in the paper; otherwise all.
    """

    num_heads: int = 4
    width: float = 1.0
    one_head: bool = False


class Blockwise(ParallelHead):
    """See the module."""

    kind = "blockwise"
    Options = BlockwiseOptions

    def __init__(self, target: HeadTarget, options: BlockwiseOptions) -> None:
        super().__init__(target, options)
        size, count = target.config.hidden_size, options.num_heads
        inner = max(1, round(options.width * size)) * count
        self.inner = nn.Linear(size, inner)
        self.outer = nn.Linear(inner, count * size)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    @property
    def max_depth(self) -> int:
        count: int = self.options.num_heads
        return count

    def guesses(self, hidden: Tensor) -> list[Tensor]:
        return list(self.target.logits(torch.stack(self._states(hidden))))

    def _states(self, hidden: Tensor) -> list[Tensor]:
        """Inputs of the output layer, by predictor.  # num_heads x [..., hidden_size]"""
        parts = self.outer(F.relu(self.inner(hidden))).chunk(self.max_depth, -1)
        return [hidden + part for part in parts]

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Cross-entropy against the text, of one predictor or the mean of all (section 6).

        Of predictors that are not trained in this step the agreement is not a number.
        """
        chosen = list(range(self.max_depth))
        if self.training and self.options.one_head:
            drawn = torch.randint(
                self.max_depth, (), generator=batch.generator, device=batch.hidden.device
            )
            chosen = [int(drawn)]
        states = self._states(batch.hidden)
        agreement = batch.hidden.new_full((self.max_depth,), torch.nan)
        total = batch.hidden.new_zeros(())
        for i in chosen:
            logits, labels = self.target.logits(states[i]), batch.token_ids[:, i + 2 :]
            guesses, counts = logits[:, : labels.shape[1]], batch.counts_from(i + 1, -1)
            total = total + text_cross_entropy(guesses, labels, counts) / len(chosen)
            agreement[i] = shifted_agreement(logits, batch.logits, i + 1, batch.counts)
        return total, {"agreement": agreement}
