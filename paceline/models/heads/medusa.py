"""Medusa: independent heads that each guess one of the next tokens.

Cai et al. 2024 (arXiv 2401.10774). Head i takes the last hidden state through a residual block
``x + SiLU(W x)`` (W starts at zero) and an output layer and predicts the token i places after the
one that the target itself predicts from that state. The guesses of a head are the same for all
nodes of a depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.models.heads.base import (
    HeadBatch,
    HeadTarget,
    shifted_agreement,
    soft_cross_entropy,
    text_cross_entropy,
)
from paceline.models.heads.layer import ResidualBlock
from paceline.models.heads.parallel import ParallelHead


@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """Attributes:
    num_heads: tokens guessed beyond the target's own.
    num_layers: residual blocks of each head.
    own_output: each head has an output layer of its own, as in the paper, that starts as the
        target's; otherwise all share the target's, which keeps the head small.
    text_weight, teacher_weight: of the cross-entropy against the text and against the target's
        distribution.
    decay: weight of head i in the loss is ``decay ** i``.
    """

    num_heads: int = 5
    num_layers: int = 1
    own_output: bool = False
    text_weight: float = 1.0
    teacher_weight: float = 0.0
    decay: float = 0.8


def _blocks(size: int, count: int) -> nn.Module:
    if count == 1:
        return ResidualBlock(size)
    return nn.Sequential(*(ResidualBlock(size) for _ in range(count)))


class Medusa(ParallelHead):
    """See the module."""

    kind = "medusa"
    Options = MedusaOptions

    def __init__(self, target: HeadTarget, options: MedusaOptions) -> None:
        super().__init__(target, options)
        size, count = target.config.hidden_size, options.num_heads
        self.blocks = nn.ModuleList(_blocks(size, options.num_layers) for _ in range(count))
        self.outputs = nn.ModuleList()
        if options.own_output:
            for _ in range(count):
                output = nn.Linear(size, target.config.vocab_size, bias=False)
                output.weight.data = target.lm_head.detach().clone()
                self.outputs.append(output)

    @property
    def max_depth(self) -> int:
        return len(self.blocks)

    def guesses(self, hidden: Tensor) -> list[Tensor]:
        states = [block(hidden) for block in self.blocks]
        if not self.options.own_output:
            return list(self.target.logits(torch.stack(states)))
        return [output(x) for output, x in zip(self.outputs, states, strict=True)]

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Cross-entropy of each head, weighted ``decay ** i`` (Medusa-1).

        Against the text, the target's distribution (self-distillation), or both.
        """
        options, total, agreement = self.options, batch.hidden.new_zeros(()), []
        length = batch.hidden.shape[1]
        for i, logits in enumerate(self.guesses(batch.hidden), 1):
            loss = batch.hidden.new_zeros(())
            if options.text_weight:
                labels = batch.token_ids[:, i + 1 :]
                guesses, counts = logits[:, : length - i - 1], batch.counts_from(i, -1)
                loss = loss + options.text_weight * text_cross_entropy(guesses, labels, counts)
            if options.teacher_weight:
                guesses, counts = logits[:, : length - i], batch.counts_from(i)
                entropy = soft_cross_entropy(guesses, batch.logits[:, i:], counts)
                loss = loss + options.teacher_weight * entropy
            total = total + options.decay**i * loss
            agreement.append(shifted_agreement(logits, batch.logits, i, batch.counts))
        return total, {"agreement": torch.stack(agreement)}
