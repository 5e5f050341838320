"""Mixture of Attentions: a drafter that needs nothing of the target beyond the verified tokens.

Zimmer et al. 2024 (arXiv 2410.03804). *Layer self-attention* turns what all layers of the target
computed for a verified token into one vector: attention over the layers, their mean, a linear map.
*Self-attention* over token embeddings carries what was drafted. *Cross-attention* reads the
vectors of verified tokens and never anything after the last of them, so that drafted tokens are
fed to the head as in training, however many there are (T-step boundedness); training follows it
with a staircase mask of steps of ``horizon`` places.

Where this departs from the paper: the layers' input is the residual stream after each layer and
not their keys and values; the target's own layers are not run on the draft (the paper's target
layer inference with N = 0), so that a drafter on another machine needs the vectors, the embedding
and the output layer only; the staircase has one step length from the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import InvalidArgument
from paceline.models.heads.base import (
    Frontier,
    Head,
    HeadBatch,
    Target,
    draw,
    soft_cross_entropy,
)
from paceline.models.heads.layer import DecoderLayer, LayerStack, rotate
from paceline.models.kv_cache import PooledSequence
from paceline.models.llama import LlamaConfig, rope_table
from paceline.types import Need


@dataclass(frozen=True, slots=True)
class MixtureOptions:
    """Attributes:
    horizon: places that training drafts from one verified token.
    feature_weight: of the smooth L1 loss to the target's features, beside the divergence.
    """

    horizon: int = 8
    feature_weight: float = 1.0


class LayerSelfAttention(nn.Module):
    """One vector from what all layers computed for a token."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads if size % config.num_heads == 0 else 1
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.layer = nn.Parameter(0.02 * torch.randn(config.num_layers, size))
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """# [..., num_layers, hidden_size] -> [..., hidden_size]"""
        x = self.norm(states) + self.layer
        flat = self.qkv(x).flatten(0, -3)  # [tokens, num_layers, 3 * hidden_size]
        q, k, v = flat.unflatten(-1, (3 * self.num_heads, -1)).transpose(1, 2).chunk(3, 1)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        result: Tensor = self.out((x + attended.view_as(x)).mean(-2))
        return result


class CrossAttention(nn.Module):
    """A decoder layer whose attention reads a memory in place of the layer's own input."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        size, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
        self.input_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.query = nn.Linear(size, config.num_heads * dim, bias=False)
        self.memory_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.key_value = nn.Linear(size, 2 * config.num_kv_heads * dim, bias=False)
        self.out = nn.Linear(config.num_heads * dim, size, bias=False)
        self.post_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.gate_up = nn.Linear(size, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, size, bias=False)

    def read(self, memory: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a memory.

        # [batch, length, hidden_size], [length, head_dim]
        # -> 2 x [batch, length, kv_heads, head_dim]
        """
        heads = self.key_value(self.memory_norm(memory)).unflatten(-1, (-1, self.config.head_dim))
        keys, values = heads.chunk(2, -2)
        return rotate(keys, cos_sin), values

    def forward(
        self, x: Tensor, cos_sin: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """# [batch, rows, hidden_size], [rows, head_dim], as ``read``, bool [rows, length]"""
        q = self.query(self.input_norm(x)).unflatten(-1, (-1, self.config.head_dim))
        attended = F.scaled_dot_product_attention(
            rotate(q, cos_sin).transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2),
            attn_mask=mask, enable_gqa=True,
        )  # fmt: skip
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
        result: Tensor = x + self.down(F.silu(gate) * up)
        return result


class _State:
    """Keys and values of verified tokens, KV entries of the tokens after them, this round's nodes.

    Attributes:
        payload_bytes: of the vectors of the last round's tokens: what a drafter on another machine
            would have to be sent.
    """

    def __init__(self, sequence: PooledSequence, empty: Tensor) -> None:
        self.sequence = sequence
        self.keys = self.values = empty  # [num_verified, kv_heads, head_dim]
        self.entry = {-1: -1}
        self.depth = {-1: 0}
        self.payload_bytes = 0


class MixtureOfAttentions(Head):
    """See the module."""

    kind = "moa"
    needs = frozenset({Need.LAYER_STATES})
    Options = MixtureOptions

    def __init__(self, target: Target, options: MixtureOptions) -> None:
        if options.horizon < 1:
            raise InvalidArgument("horizon", options.horizon, "at least 1")
        super().__init__(target, options)
        config = target.config
        self.summary = LayerSelfAttention(config)
        self.layers = nn.ModuleList([DecoderLayer(config)])
        self.cross = CrossAttention(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._cos_sin = rope_table(config)  # [context_length, head_dim]

    # --- training ------------------------------------------------------------------------------

    def forward(self, layer_states: Tensor, token_ids: Tensor, phase: int = 0) -> Tensor:
        """Features of the places 1, 2, ..., each drafted from the place where its step begins.

        Args:
            layer_states: of places 0, 1, ...  # [batch, length, num_layers, hidden_size]
            token_ids: the token after each place.  # [batch, length]
            phase: where steps begin, below ``horizon``.

        Returns:
            # [batch, length, hidden_size]
        """
        length = token_ids.shape[1]
        cos_sin = self._cos_sin[:length].to(token_ids.device)
        keys, values = self.cross.read(self.summary(layer_states), cos_sin)
        x = self.layers[0](self.target.embed(token_ids), cos_sin)
        mask = staircase_mask(length, self.options.horizon, phase).to(x.device)
        result: Tensor = self.norm(self.cross(x, cos_sin, keys, values, mask))
        return result

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Forward divergence from the target, and smooth L1 to its features."""
        assert batch.layer_states is not None  # declared in ``needs``
        horizon = self.options.horizon
        phase = draw(horizon, batch.generator)
        drafted = self(batch.layer_states[:, :-1], batch.token_ids[:, 1:], phase)
        logits, wanted = self.target.logits(drafted), batch.logits[:, 1:]
        feature = F.smooth_l1_loss(drafted.float(), batch.hidden[:, 1:].float())
        total = soft_cross_entropy(logits, wanted) + self.options.feature_weight * feature
        right = (logits.argmax(-1) == wanted.argmax(-1)).float()
        places = torch.arange(right.shape[1], device=right.device)
        ahead = places - step_starts(right.shape[1], horizon, phase).to(right.device)
        agreement = [right[:, ahead == i].mean() for i in range(horizon)]
        return total, {"agreement": torch.stack(agreement).nan_to_num()}

    # --- drafting ------------------------------------------------------------------------------

    def prepare(self) -> None:
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        self.stack = LayerStack(layers, self.target.kv_tokens)
        self._cos_sin = self._cos_sin.to(self.target.embedding.device)

    def new_state(self) -> _State:
        config, like = self.target.config, self.target.embedding
        empty = like.new_empty(0, config.num_kv_heads, config.head_dim)
        return _State(self.stack.new_sequence(), empty)

    def free(self, state: _State) -> None:
        self.stack.free(state.sequence)

    def root(
        self,
        states: Sequence[_State],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        parts = []
        for state, rows, ids in zip(states, features, token_ids, strict=True):
            self.stack.commit(state.sequence, ())
            summaries = self.summary(rows)
            state.payload_bytes = summaries.numel() * summaries.element_size()
            start = len(state.keys)
            cos_sin = self._cos_sin[start : start + len(rows)]
            keys, values = self.cross.read(summaries[None], cos_sin)
            state.keys = torch.cat([state.keys, keys[0]])
            state.values = torch.cat([state.values, values[0]])
            parts.append((state.sequence, range(-1, len(ids) - 1)))
        x = self._embedded([t for ids in token_ids for t in ids])
        x = self.stack.run(x, self.stack.append(parts))
        ends = torch.tensor([len(ids) for ids in token_ids]).cumsum(0) - 1
        last = x[ends.to(x.device)]
        for state, ids in zip(states, token_ids, strict=True):
            self.stack.commit(state.sequence, range(len(ids)))
            state.entry, state.depth = {-1: -1}, {-1: 0}
        return self._logits(states, last, [[0]] * len(states))

    def expand(self, states: Sequence[_State], frontiers: Sequence[Frontier]) -> Tensor:
        parts, tokens, ahead = [], [], []
        for state, frontier in zip(states, frontiers, strict=True):
            first = state.sequence.num_pending
            parts.append((state.sequence, [state.entry[parent] for _, _, parent in frontier]))
            for entry, (node, token, parent) in enumerate(frontier, first):
                state.entry[node] = entry
                state.depth[node] = state.depth[parent] + 1
                tokens.append(token)
            ahead.append([state.depth[node] for node, _, _ in frontier])
        x = self.stack.run(self._embedded(tokens), self.stack.append(parts))
        return self._logits(states, x, ahead)

    def _embedded(self, token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor(token_ids, device=self.target.embedding.device)
        return self.target.embed(ids)

    def _logits(
        self, states: Sequence[_State], x: Tensor, ahead: Sequence[Sequence[int]]
    ) -> Tensor:
        """Cross-attention of each session's rows, the norm, the target's output layer.

        Args:
            ahead: places from the last verified token's to each row's.
        """
        read, end = [], 0
        for state, places in zip(states, ahead, strict=True):
            rows = x[end : end + len(places)]
            end += len(places)
            at = torch.tensor(places, device=x.device) + len(state.keys) - 1
            cos_sin = self._cos_sin[at]
            read.append(self.cross(rows[None], cos_sin, state.keys[None], state.values[None])[0])
        return self.target.logits(self.norm(torch.cat(read)))


def step_starts(length: int, horizon: int, phase: int) -> Tensor:
    """For each place the last one that counts as verified.  # int64 [length]"""
    places = torch.arange(length)
    return (((places + phase) // horizon) * horizon - phase).clamp(min=0)


def staircase_mask(length: int, horizon: int, phase: int) -> Tensor:
    """Which verified places each place sees.  # bool [length, length]"""
    return torch.arange(length)[None] <= step_starts(length, horizon, phase)[:, None]
