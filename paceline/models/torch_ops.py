"""The arithmetic of a Llama-type model in plain torch, on any device: the kernels' reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from paceline.models.ops import Layer, Stack
from paceline.models.packing import Weight
from paceline.models.rows import Rows
from paceline.types import IndexArray

Tensor = torch.Tensor


class TorchOps:
    """Plain torch.

    Args:
        by_row: a row never depends on its neighbours. Attention is computed row by row, each over
            exactly its own context, and products in tiles of always the same number of rows;
            otherwise attention pads rows to the longest context and products take all rows.
    """

    _TILE = 8

    def __init__(self, by_row: bool) -> None:
        self.by_row = by_row

    def pack(self, weight: Tensor) -> Weight:
        return Weight(weight, len(weight), weight.shape[1])

    def unpack(self, weight: Weight) -> Tensor:
        return weight.data

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if not self.by_row:
            return F.linear(x, weight.data, bias)
        padded = F.pad(x, (0, 0, 0, -len(x) % self._TILE))
        tiles = [F.linear(tile, weight.data, bias) for tile in padded.split(self._TILE)]
        return torch.cat(tiles)[: len(x)]

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype)

    def run_layers(
        self,
        stack: Stack,
        first: int,
        last: int,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: Rows,
        states: Tensor | None = None,
    ) -> None:
        contexts = [rows.context(row) for row in range(len(x))]
        for i in range(first, last):
            layer = stack.layers[i]
            normed = self.rmsnorm(x, layer.input_norm, stack.eps)
            qkv = self.linear(normed, layer.qkv, layer.qkv_bias)
            heads = qkv.view(len(x), -1, stack.head_dim)  # [R, H + 2G, D]
            self._rope_store(stack, layer, heads, keys[i], values[i], rows)
            seen = contexts if layer.window is None else [c[-layer.window :] for c in contexts]
            attended = self._attention(heads[:, : stack.num_heads], keys[i], values[i], seen)
            x += self.linear(attended, layer.out, layer.out_bias)
            normed = self.rmsnorm(x, layer.post_norm, stack.eps)
            gate, up = self.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            x += self.linear(F.silu(gate) * up, layer.down, layer.down_bias)
            if states is not None:
                states[i - first] = x

    def _rope_store(
        self, stack: Stack, layer: Layer, heads: Tensor, keys: Tensor, values: Tensor, rows: Rows
    ) -> None:
        """Rotate queries and keys in place, store keys and values in the rows' slots."""
        num_q, num_k = stack.num_heads, stack.num_kv_heads
        positions = torch.from_numpy(rows.positions).to(heads.device, torch.long)
        slots = torch.from_numpy(rows.slots).to(heads.device, torch.long)
        if layer.q_norm is not None:
            heads[:, :num_q] = self.rmsnorm(heads[:, :num_q], layer.q_norm, stack.eps)
        if layer.k_norm is not None:
            k = heads[:, num_q : num_q + num_k]
            heads[:, num_q : num_q + num_k] = self.rmsnorm(k, layer.k_norm, stack.eps)
        cosine, sine = stack.cos_sin[positions][:, None].chunk(2, dim=-1)  # [R, 1, D/2]
        a, b = heads[:, : num_q + num_k].float().chunk(2, dim=-1)
        rotated = torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)
        heads[:, : num_q + num_k] = rotated.to(heads.dtype)
        keys[slots] = heads[:, num_q : num_q + num_k]
        values[slots] = heads[:, num_q + num_k :]

    def _attention(
        self, query: Tensor, keys: Tensor, values: Tensor, contexts: Sequence[IndexArray]
    ) -> Tensor:
        """Each row's query over its own context.  # [R, H, D] -> [R, H * D]"""
        if self.by_row:
            each = zip(query.split(1), contexts, strict=True)
            return torch.cat([self._attend(q, keys, values, c[None], None) for q, c in each])
        padded = np.zeros((len(contexts), max(map(len, contexts))), np.int32)
        mask = np.zeros(padded.shape, np.bool_)
        for r, context in enumerate(contexts):
            padded[r, : len(context)] = context
            mask[r, : len(context)] = True
        allowed = torch.from_numpy(mask).to(query.device)[:, None, None]  # [R, 1, 1, longest]
        return self._attend(query, keys, values, padded, allowed)

    @staticmethod
    def _attend(
        query: Tensor, keys: Tensor, values: Tensor, contexts: IndexArray, mask: Tensor | None
    ) -> Tensor:
        index = torch.from_numpy(contexts).to(query.device, torch.long)
        k, v = keys[index].transpose(1, 2), values[index].transpose(1, 2)  # [R, G, L, D]
        out = F.scaled_dot_product_attention(
            query[:, :, None], k, v, attn_mask=mask, enable_gqa=True
        )
        return out.reshape(len(query), -1)
