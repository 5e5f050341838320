"""EAGLE, EAGLE-2 and EAGLE-3 as they are published: whatever layer the checkpoint has, in torch.

Li et al. 2024 (arXiv 2401.15077) and 2025 (arXiv 2503.01840). :mod:`paceline.models.heads.eagle`
drafts with Paceline's own heads, whose layers are the target's kind and size. A published drafter
has its own widths, biases, norms and output layer; :class:`Layout` says which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import InvalidArgument
from paceline.models.heads.base import Frontier, Head, HeadBatch, HeadTarget
from paceline.models.heads.layer import rotate
from paceline.models.llama_config import LlamaConfig
from paceline.models.rope import rope_table
from paceline.types import Need


@dataclass(frozen=True, slots=True)
class Layout:
    """What differs between published checkpoints.

    Attributes:
        config: widths, biases and rope of the drafter's layers.
        features: EAGLE-3: numbers of layers of the target after which a feature is read;
            empty: EAGLE, which reads the last hidden state.
        fc_bias: of the layer that fuses features.
        norm_before_residual: EAGLE-3: the skip connection starts behind the norm.
        norm_before_fc, fc_norm: EAGLE-3: a norm over all features, or one for each.
        norm_output: EAGLE-3: the next step reads the output behind the norm.
        own_embedding, own_output: the checkpoint has them; otherwise they are the target's.
        vocabulary: tokens that it can draft; 0 for all.
        first_norm: without ``features``: the first layer has a norm before attention, as others.
    """

    config: LlamaConfig
    features: tuple[int, ...] = ()
    fc_bias: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    own_output: bool = False
    vocabulary: int = 0
    first_norm: bool = False


def layout_like_target(target: HeadTarget, num_layers: int, features: Sequence[int]) -> Layout:
    """Layers of the target's size, without biases.

    Args:
        features: EAGLE-3's; empty: 2, half of the target's layers, and all but three.

    Raises:
        InvalidArgument: the target has no such layer.
    """
    own, count = target.config, target.config.num_layers
    numbers = tuple(features or sorted({min(2, count), max(1, count // 2), max(1, count - 3)}))
    if any(not 1 <= number <= count for number in numbers):
        raise InvalidArgument("features", numbers, f"numbers of layers from 1 to {count}")
    config = replace(
        own, num_layers=num_layers, windows=(None,) * num_layers, head_norms=False,
        qkv_bias=False, out_bias=False, mlp_bias=False,
    )  # fmt: skip
    return Layout(config, numbers, fc_bias=False)


Entries = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer.  # num_layers x 2 x [places, num_kv_heads, head_dim]"""


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig, input_size: int) -> None:
        super().__init__()
        self.config = config
        dim, bias = config.head_dim, config.qkv_bias
        self.q_proj = nn.Linear(input_size, config.num_heads * dim, bias)
        self.k_proj = nn.Linear(input_size, config.num_kv_heads * dim, bias)
        self.v_proj = nn.Linear(input_size, config.num_kv_heads * dim, bias)
        self.o_proj = nn.Linear(config.num_heads * dim, config.hidden_size, config.out_bias)
        if config.head_norms:
            self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos_sin: Tensor, mask: Tensor, earlier: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """# [..., places, input_size], [places, head_dim], bool [places, all places]"""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.config.head_dim))
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.config.head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos_sin), rotate(k, cos_sin)
        if earlier is not None:
            k, v = torch.cat([earlier[0], k], -3), torch.cat([earlier[1], v], -3)
        q, keys, values = (heads.transpose(-3, -2) for heads in (q, k, v))
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return self.o_proj(attended.transpose(-3, -2).flatten(-2)), (k, v)


class _Mlp(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, ffn, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(size, ffn, bias)
        self.up_proj = nn.Linear(size, ffn, bias)
        self.down_proj = nn.Linear(ffn, size, bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class _Layer(nn.Module):
    """A decoder layer; EAGLE's first has no first norm, EAGLE-3's reads the tokens beside it."""

    def __init__(self, layout: Layout, number: int) -> None:
        super().__init__()
        config, first = layout.config, number == 0
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pairs = first and bool(layout.features)
        self.norm_before_residual = layout.norm_before_residual
        self.normed = self.pairs or not first or layout.first_norm
        if self.normed:
            self.input_layernorm = nn.RMSNorm(size, eps=eps)
        if self.pairs:
            self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.self_attn = _Attention(config, 2 * size if self.pairs else size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = _Mlp(config)

    def forward(
        self,
        x: Tensor,
        embedded: Tensor,
        cos_sin: Tensor,
        mask: Tensor,
        earlier: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        inner = x
        if self.pairs:
            normed = self.hidden_norm(x)
            x = normed if self.norm_before_residual else x
            inner = torch.cat([self.input_layernorm(embedded), normed], -1)
        elif self.normed:
            inner = self.input_layernorm(x)
        attended, entries = self.self_attn(inner, cos_sin, mask, earlier)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), entries


class PublishedState:
    """Entries of the committed pairs, then of the current round's nodes.

    Attributes:
        committed: number of committed pairs.
        features: what was drafted after each node; -1 is the last committed token.
        paths: places of a node and of those above it, the root's first.
    """

    def __init__(self) -> None:
        self.committed = 0
        self.entries: Entries = []
        self.features: dict[int, Tensor] = {}
        self.paths: dict[int, list[int]] = {-1: []}

    @property
    def num_places(self) -> int:
        """Places that have entries."""
        return len(self.entries[0][0])

    def cut(self, count: int) -> None:
        """Drop the entries of all places but the first ones."""
        self.entries = [(k[:count], v[:count]) for k, v in self.entries]


class PublishedEagle(Head):
    """EAGLE and EAGLE-2: their drafters are the same, only the tree differs."""

    kind = "eagle"
    Options: ClassVar[type[Any]] = Layout
    layout: Layout
    vocabulary: Tensor | None
    """The tokens that it can draft; None: all.  # int64 [num_logits]"""
    _rows: Tensor | None = None  # of the target's output layer

    def __init__(self, target: HeadTarget, layout: Layout) -> None:
        super().__init__(target, layout)
        self.layout = layout
        config, size = layout.config, layout.config.hidden_size
        eps, inputs = config.rms_norm_eps, len(layout.features)
        self.fc = nn.Linear((inputs or 2) * size, size, layout.fc_bias)
        self.layers = nn.ModuleList(_Layer(layout, i) for i in range(config.num_layers))
        if layout.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if inputs:
            self.norm = nn.RMSNorm(size, eps=eps)
        if layout.norm_before_fc:
            self.input_norm = nn.RMSNorm(inputs * size, eps=eps)
        if layout.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(size, eps=eps) for _ in range(inputs))
        if layout.own_output:
            self.lm_head = nn.Linear(size, layout.vocabulary or config.vocab_size, bias=False)
        self.register_buffer("vocabulary", None, persistent=False)
        self._cos_sin = rope_table(config)

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        allowed = f"a head of Paceline's own: `paceline train {self.kind}` makes one"
        raise InvalidArgument("head", "a published drafter", allowed)

    def prepare(self) -> None:
        self._cos_sin = self._cos_sin.to(self.target.embedding.device)
        if self.vocabulary is not None and not self.layout.own_output:
            self._rows = self.target.lm_head[self.vocabulary]

    def new_state(self) -> PublishedState:
        return PublishedState()

    def embed(self, token_ids: Tensor) -> Tensor:
        """# [...] -> [..., hidden_size]"""
        if not self.layout.own_embedding:
            return self.target.embed(token_ids)
        embedded: Tensor = self.embed_tokens(token_ids)
        return embedded

    def read(self, features: Tensor) -> Tensor:
        """What the layers read of the target's features.  # [n, ...] -> [n, hidden_size]"""
        return features

    def inputs(self, embedded: Tensor, x: Tensor) -> Tensor:
        """The input of the first layer beside the embedding.  # 2 x [..., hidden_size] -> the same

        Args:
            embedded: of the tokens that follow.
            x: what :meth:`read` or the step before gave.
        """
        if self.layout.features:
            return x
        fused: Tensor = self.fc(torch.cat([embedded, x], -1))
        return fused

    def some_logits(self, drafted: Tensor) -> Tensor:
        """Logits of the tokens in :attr:`vocabulary`.  # [..., hidden_size] -> [..., num_logits]"""
        if self.layout.own_output:
            some: Tensor = self.lm_head(drafted)
            return some
        if self.vocabulary is None:
            return self.target.logits(drafted)
        rows = self.target.lm_head[self.vocabulary] if self._rows is None else self._rows
        return F.linear(drafted, rows)

    def logits(self, drafted: Tensor) -> Tensor:
        """# [..., hidden_size] -> [..., vocab_size]"""
        return self.target.among_all(self.some_logits(drafted).float(), self.vocabulary)

    def _run(
        self, state: PublishedState, tokens: Sequence[int], x: Tensor,
        positions: Sequence[int], mask: Tensor,
    ) -> Tensor:  # fmt: skip
        """The features after new pairs; their entries are appended.  # [n, hidden_size]"""
        embedded = self.embed(torch.tensor(tokens, device=x.device))
        x = self.inputs(embedded, x)
        cos_sin, entries = self._cos_sin[list(positions)], []
        before: Sequence[tuple[Tensor, Tensor] | None] = state.entries or [None] * len(self.layers)
        for layer, earlier in zip(self.layers, before, strict=True):
            x, pair = layer(x, embedded, cos_sin, mask, earlier)
            entries.append(pair)
        state.entries = entries
        return x

    def root(
        self,
        states: Sequence[PublishedState],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        last = []
        for state, rows, tokens in zip(states, features, token_ids, strict=True):
            first, count = state.committed, len(rows)
            state.cut(first)
            mask = torch.ones(count, first + count, dtype=torch.bool, device=rows.device)
            places = range(first, first + count)
            x = self._run(state, tokens, self.read(rows), places, mask.tril(first))[-1]
            state.committed, state.paths = first + count, {-1: []}
            state.features = {-1: self.passed_on(x)}
            last.append(x)
        return self.logits(torch.stack(last))

    def passed_on(self, drafted: Tensor) -> Tensor:
        """What the next step reads of a step's output.  # [..., hidden_size]"""
        return drafted

    def expand(self, states: Sequence[PublishedState], frontiers: Sequence[Frontier]) -> Tensor:
        drafted = [
            self._grown(state, frontier)
            for state, frontier in zip(states, frontiers, strict=True)
            if frontier
        ]
        return self.logits(torch.cat(drafted))

    def _grown(self, state: PublishedState, frontier: Frontier) -> Tensor:
        before = state.num_places
        rows = torch.stack([state.features[parent] for _, _, parent in frontier])
        mask = torch.zeros(
            len(frontier), before + len(frontier), dtype=torch.bool, device=rows.device
        )
        mask[:, : state.committed] = True
        positions = []
        for i, (node, _, parent) in enumerate(frontier):
            state.paths[node] = [*state.paths[parent], before + i]
            mask[i, state.paths[node]] = True
            positions.append(state.committed + len(state.paths[node]) - 1)
        x = self._run(state, [token for _, token, _ in frontier], rows, positions, mask)
        passed_on = self.passed_on(x)
        for (node, _, _), row in zip(frontier, passed_on, strict=True):
            state.features[node] = row
        return x


class PublishedEagle3(PublishedEagle):
    """EAGLE-3: features of several layers, and an output norm."""

    kind = "eagle3"
    needs = frozenset({Need.LAYER_STATES})

    @property
    def feature_layers(self) -> Sequence[int]:
        return self.layout.features

    def read(self, features: Tensor) -> Tensor:
        if self.layout.norm_before_fc:
            features = self.input_norm(features)
        if self.layout.fc_norm:
            features = torch.cat(list(self._normed(features)), -1)
        read: Tensor = self.fc(features)
        return read

    def _normed(self, features: Tensor) -> Iterator[Tensor]:
        parts = features.chunk(len(self.fc_norm), -1)
        return (norm(part) for norm, part in zip(self.fc_norm, parts, strict=True))

    def passed_on(self, drafted: Tensor) -> Tensor:
        return self.norm(drafted) if self.layout.norm_output else drafted

    def some_logits(self, drafted: Tensor) -> Tensor:
        return super().some_logits(self.norm(drafted))
