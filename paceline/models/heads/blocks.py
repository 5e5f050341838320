"""Decoder layers that draft a block of tokens in one pass, over features of the target.

The layers of DFlash (Chen et al. 2026, arXiv 2602.06036): each projects the target's
features to keys and values with the weights that it uses for its own tokens, and the tokens of a
block attend to all features before the block and to one another, in both directions. Parameters
have the names that published checkpoints give them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.heads.layer import attention, layer_ops, rotate
from paceline.models.kv_cache import KVPool, PooledSequence
from paceline.models.llama_config import LlamaConfig
from paceline.models.ops import Layer, Ops, Stack
from paceline.models.rope import rope_table
from paceline.models.rows import Rows
from paceline.types import IndexArray


@dataclass(frozen=True, slots=True)
class BlockSight:
    """What the tokens of a block see in one layer.

    Attributes:
        window: how many features before the block; None: all.
        causal: a token sees only the block's tokens up to itself.
    """

    window: int | None = None
    causal: bool = False

    def mask(self, anchors: Tensor, block_size: int, length: int) -> Tensor:
        """The mask of several blocks over one text.

        Args:
            anchors: the place of each block's first token.  # int64 [num_blocks]

        Returns:
            True where a token sees a feature, or a token of a block.
            # bool [num_blocks * block_size, length + num_blocks * block_size]
        """
        first = anchors.repeat_interleave(block_size)[:, None]
        place = torch.arange(length, device=anchors.device)
        features = place < first
        if self.window is not None:
            features &= place >= first - self.window
        index = torch.arange(len(first), device=anchors.device)
        own = index[:, None] // block_size == index // block_size
        if self.causal:
            own &= index <= index[:, None]
        return torch.cat([features, own], 1)


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, dim, bias = config.hidden_size, config.head_dim, config.qkv_bias
        self.q_proj = nn.Linear(size, config.num_heads * dim, bias=bias)
        self.k_proj = nn.Linear(size, config.num_kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(size, config.num_kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * dim, size, bias=config.out_bias)
        self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)


class _Mlp(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, ffn = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, ffn, bias=False)
        self.up_proj = nn.Linear(size, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, size, bias=False)


class BlockLayer(nn.Module):
    """One layer, trainable.

    Args:
        config: of the layers; queries and keys always have norms.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = _Mlp(config)

    def forward(self, x: Tensor, context: Tensor, cos_sin: Tensor, mask: Tensor) -> Tensor:
        """For training: blocks over whole texts.

        Args:
            x: tokens of the blocks.  # [batch, num_tokens, hidden_size]
            context: the features, as all layers read them.  # [batch, length, hidden_size]
            cos_sin: of the features' places, then of the tokens'.
                # [length + num_tokens, head_dim]
            mask: # bool [num_tokens, length + num_tokens]
        """
        x = x + self.attend(self.input_layernorm(x), context, cos_sin, mask)
        return x + self.feed(self.post_attention_layernorm(x))

    def attend(self, normed: Tensor, context: Tensor, cos_sin: Tensor, mask: Tensor) -> Tensor:
        """Attention of tokens to features and tokens; as :meth:`forward`."""
        q = rotate(self.queries(normed), cos_sin[context.shape[1] :])
        k, v = self.entries(torch.cat([context, normed], 1))
        k = rotate(k, cos_sin)
        out: Tensor = self.self_attn.o_proj(attention(q, k, v, mask).flatten(2))
        return out

    def queries(self, normed: Tensor) -> Tensor:
        """Without positions.  # [..., hidden_size] -> [..., num_heads, head_dim]"""
        own = self.self_attn
        queries: Tensor = own.q_norm(own.q_proj(normed).unflatten(-1, (-1, self.head_dim)))
        return queries

    def entries(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Keys without positions, and values.

        # [..., hidden_size] -> 2 x [..., num_kv_heads, head_dim]
        """
        own, dim = self.self_attn, self.head_dim
        keys = own.k_norm(own.k_proj(seen).unflatten(-1, (-1, dim)))
        return keys, own.v_proj(seen).unflatten(-1, (-1, dim))

    def feed(self, normed: Tensor) -> Tensor:
        """The MLP.  # [..., hidden_size] -> the same"""
        gate, up = self.mlp.gate_proj(normed), self.mlp.up_proj(normed)
        fed: Tensor = self.mlp.down_proj(F.silu(gate) * up)
        return fed


class BlockStack:
    """Trained layers with a cache of the features' keys and values.

    A sequence has an entry for each feature. Those of a block's tokens are freed with the pass that
    drafts it, so what a rejection leaves behind is what was there before the draft.

    Args:
        layers: packed here; later changes of them have no effect.
        sights: what tokens see in each layer.
        length: longest text.
        block_size: most tokens of a block.
        kv_tokens: maximum number of tokens of the target's sessions.
        int8, int4: round weights to eight bits, or to blocks of four, where the C kernels run.
    """

    def __init__(
        self,
        layers: Sequence[BlockLayer],
        config: LlamaConfig,
        sights: Sequence[BlockSight],
        length: int,
        block_size: int,
        kv_tokens: int | None = None,
        *,
        int8: bool = False,
        int4: bool = False,
    ) -> None:
        weight = layers[0].self_attn.o_proj.weight
        self.config, self.block_size = config, block_size
        self.ops = layer_ops(config, weight, int8=int8, int4=int4)
        self._length, self._sights = length + block_size, tuple(sights)
        self.stack = Stack(
            layers=tuple(_packed(layer, self.ops) for layer in layers),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            cos_sin=rope_table(config, self._length).to(weight.device).contiguous(),
        )
        # Keys and values of all layers from one product, because all read the same features.
        parts = [part for y in layers for part in (y.self_attn.k_proj, y.self_attn.v_proj)]
        self._kv = self.ops.pack(torch.cat([part.weight.detach() for part in parts]))
        biases = [part.bias.detach() for part in parts if part.bias is not None]
        self._kv_bias = torch.cat(biases) if biases else None
        self._k_norm = torch.stack([layer.self_attn.k_norm.weight.detach() for layer in layers])
        tokens = 2 * (kv_tokens or min(16 * length, 65536)) + 64 * block_size
        self.pool = KVPool(
            len(layers), tokens, config.num_kv_heads, config.head_dim, weight.dtype, weight.device
        )

    def new_sequence(self) -> PooledSequence:
        return PooledSequence(self._length)

    def free(self, sequence: PooledSequence) -> None:
        """Free everything."""
        self.pool.free(sequence)

    def remember(self, parts: Sequence[tuple[PooledSequence, int]], context: Tensor) -> None:
        """Store keys and values of new features.

        Args:
            parts: sequences with the number of their new features.
            context: these features, as all layers read them.  # [num_features, hidden_size]
        """
        slots: list[int] = []
        positions: list[int] = []
        for sequence, count in parts:
            positions += range(sequence.length, sequence.length + count)
            slots += self.pool.append(sequence, range(-1, count - 1))
            self.pool.commit(sequence, range(count))
        config, where = self.config, torch.tensor(positions, device=context.device)
        kv = self.ops.linear(context.contiguous(), self._kv, self._kv_bias)
        kv = kv.view(len(slots), -1, 2, config.num_kv_heads, config.head_dim)
        keys, values = kv.unbind(2)  # [num_features, num_layers, kv_heads, head_dim]
        wide = keys.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)
        keys = self._k_norm[:, None] * wide.to(keys.dtype)
        cos_sin = self.stack.cos_sin[where]
        keys = rotate(keys.float().flatten(1, 2)[None], cos_sin)[0].view(keys.shape)
        into = torch.tensor(slots, device=context.device)
        self.pool.keys[:, into] = keys.to(values.dtype).transpose(0, 1)
        self.pool.values[:, into] = values.transpose(0, 1)

    def run(self, sequences: Sequence[PooledSequence], inputs: Tensor) -> Tensor:
        """One pass over a block of tokens behind each sequence's features.

        # [num_sequences * block_size, hidden_size] -> the same
        """
        x = inputs.contiguous().clone()
        slots = [
            self.pool.append(sequence, range(-1, self.block_size - 1)) for sequence in sequences
        ]
        rows = {sight: self._rows(sight, sequences, slots) for sight in set(self._sights)}
        first = 0
        for sight, group in groupby(self._sights):
            last = first + len(list(group))
            self.ops.run_layers(
                self.stack, first, last, x, self.pool.keys, self.pool.values, rows[sight]
            )
            first = last
        for sequence in sequences:
            self.pool.commit(sequence, ())
        return x

    def _rows(
        self,
        sight: BlockSight,
        sequences: Sequence[PooledSequence],
        slots: Sequence[Sequence[int]],
    ) -> Rows:
        """Where the tokens of the blocks stand, and what they see."""
        size, count = self.block_size, len(sequences) * self.block_size
        steps = np.arange(size, dtype=np.int32)
        positions = np.concatenate([sequence.length + steps for sequence in sequences])
        prefixes, lengths, offsets = np.zeros((3, count), np.int32)
        paths: list[IndexArray] = [np.empty(0, np.int32)]
        if sight == BlockSight():
            # The block's slots stand behind the features' in the table.
            prefixes[:] = np.repeat([sequence.length + size for sequence in sequences], size)
        else:
            for i, (sequence, own) in enumerate(zip(sequences, slots, strict=True)):
                rows = slice(i * size, (i + 1) * size)
                least = 0 if sight.window is None else max(0, sequence.length - sight.window)
                before = sequence.slots[least : sequence.length]
                offsets[rows] = sum(map(len, paths))
                lengths[rows] = len(before) + (steps + 1 if sight.causal else size)
                paths.append(np.concatenate([before, np.array(own, np.int32)]))
        tables = [sequence.slots for sequence in sequences for _ in steps]
        return Rows(
            positions, np.array(slots, np.int32).ravel(), prefixes, lengths, tables,
            np.repeat([sequence.address for sequence in sequences], size).astype(np.int64),
            np.concatenate(paths), offsets,
        )  # fmt: skip


def _packed(layer: BlockLayer, ops: Ops) -> Layer:
    own, mlp = layer.self_attn, layer.mlp

    def joined(*parts: nn.Linear) -> Tensor:
        return torch.cat([part.weight.detach() for part in parts])

    biases = [p.bias.detach() for p in (own.q_proj, own.k_proj, own.v_proj) if p.bias is not None]
    out_bias = own.o_proj.bias
    return Layer(
        input_norm=layer.input_layernorm.weight.detach().contiguous(),
        qkv=ops.pack(joined(own.q_proj, own.k_proj, own.v_proj)),
        qkv_bias=torch.cat(biases) if biases else None,
        q_norm=own.q_norm.weight.detach().contiguous(),
        k_norm=own.k_norm.weight.detach().contiguous(),
        out=ops.pack(own.o_proj.weight.detach().contiguous()),
        out_bias=None if out_bias is None else out_bias.detach().contiguous(),
        post_norm=layer.post_attention_layernorm.weight.detach().contiguous(),
        gate_up=ops.pack(joined(mlp.gate_proj, mlp.up_proj)),
        gate_up_bias=None,
        down=ops.pack(mlp.down_proj.weight.detach().contiguous()),
        down_bias=None,
        window=None,
    )
