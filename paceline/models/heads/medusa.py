"""Medusa: independent heads that each guess one of the next tokens.

Cai et al. 2024 (arXiv 2401.10774). Head i takes the last hidden state through a residual block
``x + SiLU(W x)`` (W starts at zero) and an output layer and predicts the token i places after the
one that the target itself predicts from that state. The guesses of a head are the same for all
nodes of a depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.heads.base import Frontier, Head, HeadBatch, Target, shifted_agreement


@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """Attributes:
    num_heads: tokens guessed beyond the target's own.
    own_output: each head has an output layer of its own, as in the paper, that starts as the
        target's; otherwise all share the target's, which keeps the head small.
    decay: weight of head i in the loss is ``decay ** i``.
    """

    num_heads: int = 5
    own_output: bool = False
    decay: float = 0.8


class _State:
    """Guesses of all heads for the current round."""

    def __init__(self) -> None:
        self.logits: Tensor = torch.empty(0)  # [num_heads, vocab_size]
        self.depth = {-1: 0}  # of each node; -1 is the last committed token


class ResidualBlock(nn.Module):
    """``x + SiLU(W x + b)``, the identity at first."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(Head):
    """See the module."""

    kind = "medusa"
    Options = MedusaOptions

    def __init__(self, target: Target, options: MedusaOptions) -> None:
        super().__init__(target, options)
        size, count = target.config.hidden_size, options.num_heads
        self.blocks = nn.ModuleList(ResidualBlock(size) for _ in range(count))
        self.outputs = nn.ModuleList()
        if options.own_output:
            for _ in range(count):
                output = nn.Linear(size, target.config.vocab_size, bias=False)
                output.weight.data = target.lm_head.detach().clone()
                self.outputs.append(output)

    def guesses(self, hidden: Tensor) -> list[Tensor]:
        """Logits of each head.  # [..., hidden_size] -> num_heads x [..., vocab_size]"""
        states = [block(hidden) for block in self.blocks]
        if not self.options.own_output:
            return list(self.target.logits(torch.stack(states)))
        return [output(x) for output, x in zip(self.outputs, states, strict=True)]

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Cross-entropy of each head against the text, weighted ``decay ** i`` (Medusa-1)."""
        total = batch.hidden.new_zeros(())
        agreement = []
        for i, logits in enumerate(self.guesses(batch.hidden), 1):
            labels = batch.token_ids[:, i + 1 :]
            guesses = logits[:, : labels.shape[1]]
            entropy = F.cross_entropy(guesses.flatten(0, 1).float(), labels.flatten())
            total = total + self.options.decay**i * entropy
            agreement.append(shifted_agreement(logits, batch.logits, i))
        return total, {"agreement": torch.stack(agreement)}

    def new_state(self) -> _State:
        return _State()

    def root(
        self,
        states: Sequence[_State],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        last = torch.stack([rows[-1] for rows in features])
        logits = torch.stack(self.guesses(last), 1)  # [num_sessions, num_heads, vocab_size]
        for state, rows in zip(states, logits, strict=True):
            state.logits, state.depth = rows, {-1: 0}
        return logits[:, 0]

    def expand(self, states: Sequence[_State], frontiers: Sequence[Frontier]) -> Tensor:
        rows = []
        for state, frontier in zip(states, frontiers, strict=True):
            for node, _, parent in frontier:
                depth = state.depth[node] = state.depth[parent] + 1
                known = depth < len(state.logits)
                # Beyond the last head nothing is known: all tokens are equally likely.
                rows.append(state.logits[depth] if known else torch.zeros_like(state.logits[0]))
        return torch.stack(rows)
