"""Hydra: heads that each see the tokens which the heads before them drafted.

Ankner et al. 2024 (arXiv 2402.05109). Head i reads the last hidden state and the embeddings of the
last committed token and of the i - 1 drafted ones, and predicts the token that follows them. It is
a residual layer whose skip connection is a matrix, too, and further residual blocks; all heads
share the target's output layer. Hydra++ has more blocks for each head, reads the hidden states
through a decoder layer of its own ("prefix attention"), and learns the target's distribution
instead of the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.heads.base import (
    Frontier,
    Head,
    HeadBatch,
    HeadTarget,
    shifted_agreement,
    soft_cross_entropy,
    text_cross_entropy,
)
from paceline.models.heads.layer import DecoderLayer, LayerStack, ResidualBlock
from paceline.models.kv_cache import PooledSequence
from paceline.models.rope import rope_table


@dataclass(frozen=True, slots=True)
class HydraOptions:
    """Attributes:
    num_heads: tokens guessed beyond the target's own.
    num_layers: of each head.
    prefix_attention: a decoder layer over the target's hidden states.
    text_weight, teacher_weight: of the cross-entropy against the text and against the target's
        distribution.
    dropout: of the heads' inputs and blocks, in training.
    decay: weight of head i in the loss is ``decay ** i``.
    own_output: each head has an output layer of its own, with a bias, that starts as the target's.
    scaled: embeddings are as large as hidden states.
    """

    num_heads: int = 4
    num_layers: int = 1
    prefix_attention: bool = False
    text_weight: float = 1.0
    teacher_weight: float = 0.0
    dropout: float = 0.0
    decay: float = 1.0
    own_output: bool = False
    scaled: bool = True


@dataclass(frozen=True, slots=True)
class HydraPPOptions(HydraOptions):
    """Hydra++: other defaults, the same options."""

    num_layers: int = 4
    prefix_attention: bool = True
    text_weight: float = 0.0
    teacher_weight: float = 1.0
    dropout: float = 0.2


class HydraState:
    """What the heads read in the current round.

    Attributes:
        sequence: KV entries of the prefix attention.
        base: hidden state and the embedding of the last committed token.  # 2 x [hidden_size]
        tokens: embeddings from the root down to each node; -1 is the last committed token.
    """

    def __init__(self, sequence: PooledSequence | None) -> None:
        self.sequence = sequence
        self.base: list[Tensor] = []
        self.tokens: dict[int, list[Tensor]] = {-1: []}


class _HydraHead(nn.Module):
    """One head: ``V y + SiLU(W y + b)`` with y = [x; e_1; ..; e_i], then blocks. First V y is x."""

    def __init__(self, size: int, num_tokens: int, options: HydraOptions) -> None:
        super().__init__()
        # Both products in one. SiLU is never below -0.28: only V can take from x what is wrong.
        self.join = nn.Linear((1 + num_tokens) * size, 2 * size)
        nn.init.zeros_(self.join.weight)
        nn.init.zeros_(self.join.bias)
        nn.init.eye_(self.join.weight.data[:size, :size])
        self.blocks = nn.ModuleList(ResidualBlock(size) for _ in range(options.num_layers - 1))
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        skip, gated = self.join(self.dropout(torch.cat([*inputs], -1))).chunk(2, -1)
        x: Tensor = skip + F.silu(gated)
        for block in self.blocks:
            x = block(self.dropout(x))
        return x


class Hydra(Head):
    """See the module."""

    kind = "hydra"
    Options = HydraOptions

    def __init__(self, target: HeadTarget, options: HydraOptions) -> None:
        super().__init__(target, options)
        config, count = target.config, options.num_heads
        self.heads = nn.ModuleList(
            _HydraHead(config.hidden_size, i, options) for i in range(1, count + 1)
        )
        self.prefix = DecoderLayer(config) if options.prefix_attention else None
        # Embeddings are much smaller than hidden states; at equal size the heads learn faster.
        scale = float(target.embedding.float().square().mean().rsqrt())
        self._scale = scale if options.scaled else 1.0
        self.outputs = nn.ModuleList()
        for _ in range(count if options.own_output else 0):
            output = nn.Linear(config.hidden_size, config.vocab_size)
            output.weight.data = target.lm_head.detach().clone()
            nn.init.zeros_(output.bias)
            self.outputs.append(output)
        self._cos_sin = rope_table(config)  # [context_length, head_dim]
        self.stack: LayerStack | None = None

    @property
    def max_depth(self) -> int:
        return len(self.heads)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """What heads read of tokens.  # [...] -> [..., hidden_size]"""
        result: Tensor = self._scale * self.target.embed(token_ids)
        return result

    def _logits(self, number: int, x: Tensor) -> Tensor:
        """From what head ``number`` computed.  # [..., hidden_size] -> [..., vocab_size]"""
        if not self.outputs:
            return self.target.logits(x)
        result: Tensor = self.outputs[number](x)
        return result

    # --- training ------------------------------------------------------------------------------

    def forward(self, hidden: Tensor, token_ids: Tensor) -> list[Tensor]:
        """Logits of each head at each place, fed the tokens of the text.

        Args:
            hidden: # [batch, length, hidden_size]
            token_ids: # [batch, length]

        Returns:
            Of head i for the first ``length - i`` places.
            # num_heads x [batch, length - i, vocab_size]
        """
        length = hidden.shape[1]
        if self.prefix is not None:
            hidden = self.prefix(hidden, self._cos_sin[:length].to(hidden.device))
        embedded = self._embed(token_ids)
        result = []
        for i, head in enumerate(self.heads, 1):
            count = length - i
            inputs = [embedded[:, j : j + count] for j in range(1, i + 1)]
            result.append(self._logits(i - 1, head([hidden[:, :count], *inputs])))
        return result

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Cross-entropy of each head, against the text, the target's distribution, or both."""
        options, total, agreement = self.options, batch.hidden.new_zeros(()), []
        for i, logits in enumerate(self(batch.hidden, batch.token_ids), 1):
            loss = batch.hidden.new_zeros(())
            if options.text_weight:
                labels = batch.token_ids[:, i + 1 :]
                entropy = text_cross_entropy(logits[:, :-1], labels, batch.counts_from(i, -1))
                loss = loss + options.text_weight * entropy
            if options.teacher_weight:
                entropy = soft_cross_entropy(logits, batch.logits[:, i:], batch.counts_from(i))
                loss = loss + options.teacher_weight * entropy
            total = total + options.decay**i * loss
            agreement.append(shifted_agreement(logits, batch.logits, i, batch.counts))
        return total / len(self.heads), {"agreement": torch.stack(agreement)}

    # --- drafting ------------------------------------------------------------------------------

    def prepare(self) -> None:
        if self.prefix is not None:
            self.stack = LayerStack([self.prefix], self.target.kv_tokens)

    def new_state(self) -> HydraState:
        return HydraState(None if self.stack is None else self.stack.new_sequence())

    def free(self, state: HydraState) -> None:
        if self.stack is not None and state.sequence is not None:
            self.stack.free(state.sequence)

    def root(
        self,
        states: Sequence[HydraState],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        hidden = self._read(states, features)
        last = torch.tensor([ids[-1] for ids in token_ids], device=hidden.device)
        embedded = self._embed(last)
        for state, *base in zip(states, hidden, embedded, strict=True):
            state.base, state.tokens = base, {-1: []}
        return self._logits(0, self.heads[0]([hidden, embedded]))

    def _read(self, states: Sequence[HydraState], features: Sequence[Tensor]) -> Tensor:
        """The last hidden state of each session, through the prefix attention if there is one.

        # [num_sessions, hidden_size]
        """
        if self.stack is None:
            return torch.stack([rows[-1] for rows in features])
        parts = []
        for state, rows in zip(states, features, strict=True):
            assert state.sequence is not None
            parts.append((state.sequence, range(-1, len(rows) - 1)))
        out = self.stack.run(torch.cat([*features]), self.stack.append(parts))
        for sequence, parents in parts:
            self.stack.commit(sequence, range(len(parents)))
        sizes = [len(rows) for rows in features]
        return torch.stack([part[-1] for part in out.split(sizes)])

    def expand(self, states: Sequence[HydraState], frontiers: Sequence[Frontier]) -> Tensor:
        tokens = [token for frontier in frontiers for _, token, _ in frontier]
        device = self.target.embedding.device
        embedded = iter(self._embed(torch.tensor(tokens, device=device)))
        rows: list[list[Tensor]] = []
        for state, frontier in zip(states, frontiers, strict=True):
            for node, _, parent in frontier:
                state.tokens[node] = [*state.tokens[parent], next(embedded)]
                rows.append([*state.base, *state.tokens[node]])
        # Nodes of one depth are read by the same head.
        result = torch.empty(len(rows), self.target.config.vocab_size, device=device)
        for size in sorted({len(row) for row in rows}):
            members = [i for i, row in enumerate(rows) if len(row) == size]
            columns = zip(*(rows[i] for i in members), strict=True)
            x = self.heads[size - 2]([torch.stack(column) for column in columns])
            result[members] = self._logits(size - 2, x).float()
        return result


class HydraPP(Hydra):
    """See the module."""

    kind = "hydra_pp"
    Options = HydraPPOptions
