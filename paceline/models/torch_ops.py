"""The arithmetic of a Llama-type model in plain torch, on any device: the kernels' reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from paceline.models.differences import Differences
from paceline.models.ops import Experts, Layer, LowRank, Stack
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

    def forget(self, stack: Stack) -> None:
        """Nothing is kept of a stack."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if not self.by_row:
            return F.linear(x, weight.data, bias)
        padded = F.pad(x, (0, 0, 0, -len(x) % self._TILE))
        tiles = [F.linear(tile, weight.data, bias) for tile in padded.split(self._TILE)]
        return torch.cat(tiles)[: len(x)]

    def logits(self, stack: Stack, hidden: Tensor, head: Weight) -> Tensor:
        product, differs = self.linear(hidden, head), stack.differs
        if not differs.finishes_logits:
            return product.float()
        return self._row_by_row(lambda some: finished(some, differs), product)

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
        contexts, differs = [rows.context(row) for row in range(len(x))], stack.differs

        def add(delta: Tensor, norm: Tensor | None) -> None:
            delta = delta if norm is None else self.rmsnorm(delta, norm, stack.eps)
            x.add_(delta if differs.residual_scale == 1.0 else delta * differs.residual_scale)

        def normed(norm: Tensor | None) -> Tensor:
            return x if norm is None else self.rmsnorm(x, norm, stack.eps)

        for i in range(first, last):
            layer = stack.layers[i]
            before = normed(layer.input_norm)
            qkv = self.linear(before, layer.qkv, layer.qkv_bias)
            self._adapt(stack, i, "qkv", rows, before, qkv)
            heads = qkv.view(len(x), -1, stack.head_dim)  # [R, H + 2G, D]
            self._rope_store(stack, layer, heads, keys[i], values[i], rows)
            seen = [_seen(context, layer.window, differs.chunked) for context in contexts]
            attended = self._attention(
                stack, layer, heads[:, : stack.num_heads], keys[i], values[i], seen
            )
            delta = self.linear(attended, layer.out, layer.out_bias)
            self._adapt(stack, i, "out", rows, attended, delta)
            add(delta, layer.attention_norm)
            inner = normed(layer.post_norm)
            if layer.experts is not None:
                add(self._mix(stack, layer.experts, inner), layer.mlp_norm)
            else:
                assert layer.gate_up is not None
                assert layer.down is not None
                gate_up = self.linear(inner, layer.gate_up, layer.gate_up_bias)
                self._adapt(stack, i, "gate_up", rows, inner, gate_up)
                active = self._activated(stack, gate_up)
                delta = self.linear(active, layer.down, layer.down_bias)
                self._adapt(stack, i, "down", rows, active, delta)
                add(delta, layer.mlp_norm)
            if states is not None:
                states[i - first] = x

    def _adapt(
        self, stack: Stack, layer: int, product: str, rows: Rows, x: Tensor, out: Tensor
    ) -> None:
        """Add what each row's adapter makes of ``x``.  # [R, inputs], [R, outputs]"""
        if rows.adapters is None:
            return
        for number, adapter in enumerate(stack.adapters):
            low: LowRank | None = getattr(adapter.layers[layer], product)
            taking_part = np.flatnonzero(rows.adapters == number)
            if low is not None and len(taking_part):
                index = torch.from_numpy(taking_part).to(x.device)
                ranks = [part.b.num_inputs for part in low.parts]
                inner = self.linear(x[index], low.a).split(ranks, 1)
                for own, (b, first) in zip(inner, low.parts, strict=True):
                    out[index, first : first + b.num_outputs] += self.linear(own.contiguous(), b)

    @staticmethod
    def _activated(stack: Stack, gate_up: Tensor) -> Tensor:
        """# [R, 2 * ffn] -> [R, ffn]"""
        gate, up = gate_up.chunk(2, dim=-1)
        differs = stack.differs
        if differs.activation == "gelu_tanh":
            return F.gelu(gate, approximate="tanh") * up
        if differs.activation == "clamped":
            gate = gate.clamp(max=differs.gate_limit)
            up = up.clamp(-differs.gate_limit, differs.gate_limit)
            return (up + 1) * (gate * torch.sigmoid(gate * differs.gate_slope))
        return F.silu(gate) * up

    def _mix(self, stack: Stack, experts: Experts, x: Tensor) -> Tensor:
        """The chosen experts' results, weighted, in the order of experts.  # [R, hidden]"""
        routing, out, on_input = experts.routing, torch.zeros_like(x), stack.differs.scaled_inputs
        scores = self.linear(x, experts.router, experts.router_bias).float()
        if not on_input:
            scores = self._row_by_row(lambda some: some.softmax(-1), scores)
        # A stable order: of equal scores the first.
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top]
        chosen = scores.gather(-1, order)
        if on_input:
            chosen = self._row_by_row(torch.sigmoid, chosen)
        if routing.normed:
            total = chosen[:, :1].clone()
            for i in range(1, routing.top):  # in this order, whatever the number of rows
                total += chosen[:, i : i + 1]
            chosen = chosen / total
        chosen = chosen.to(x.dtype)
        if experts.shared_gate_up is not None:
            assert experts.shared_down is not None
            active = self._activated(stack, self.linear(x, experts.shared_gate_up))
            out = self.linear(active, experts.shared_down)
        for e, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
            takes, place = torch.where(order == e)
            if len(takes):
                biases = experts.gate_up_bias, experts.down_bias
                first, last = (each[e] if each else None for each in biases)
                shares, taken = chosen[takes, place, None], x[takes]
                inputs = taken * shares if on_input else taken
                active = self._activated(stack, self.linear(inputs, gate_up, first))
                result = self.linear(active, down, last)
                out[takes] += result if on_input else result * shares
        return out

    def _row_by_row(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A function of rows; a vector's last numbers may take another way through a library's."""
        if not self.by_row:
            return function(x)
        return torch.cat([function(row.clone()) for row in x.split(1)])

    def _rope_store(
        self, stack: Stack, layer: Layer, heads: Tensor, keys: Tensor, values: Tensor, rows: Rows
    ) -> None:
        """Rotate queries and keys in place, store keys and values in the rows' slots."""
        num_q, num_k = stack.num_heads, stack.num_kv_heads
        positions = torch.from_numpy(rows.positions).to(heads.device, torch.long)
        slots = torch.from_numpy(rows.slots).to(heads.device, torch.long)
        for norm, first, count in ((layer.q_norm, 0, num_q), (layer.k_norm, num_q, num_k)):
            if norm is not None:
                part = heads[:, first : first + count]
                wide = part.flatten(1) if stack.differs.wide_norms else part
                heads[:, first : first + count] = self.rmsnorm(wide, norm, stack.eps).view_as(part)
        table = stack.table(layer)
        if table is not None:
            cosine, sine = table[positions][:, None].chunk(2, dim=-1)  # [R, 1, rotary_dim / 2]
            turning = heads[:, : num_q + num_k, : table.shape[1]]
            a, b = turning.float().chunk(2, dim=-1)
            rotated = torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)
            turning.copy_(rotated)
            if stack.differs.turned_norms:
                both = heads[:, : num_q + num_k]
                both.copy_(self.rmsnorm(both, both.new_ones(()), stack.eps))
        elif stack.temperatures is not None:
            queries = heads[:, :num_q]
            queries.copy_(queries.float() * stack.temperatures[positions][:, None, None])
        keys[slots] = heads[:, num_q : num_q + num_k]
        values[slots] = heads[:, num_q + num_k :]

    def _attention(
        self, stack: Stack, layer: Layer, query: Tensor, keys: Tensor, values: Tensor,
        contexts: Sequence[IndexArray],
    ) -> Tensor:  # fmt: skip
        """Each row's query over its own context.  # [R, H, D] -> [R, H * D]"""
        if self.by_row:
            each = zip(query.split(1), contexts, strict=True)
            one = [self._attend(stack, layer, q, keys, values, c[None], None) for q, c in each]
            return torch.cat(one)
        padded = np.zeros((len(contexts), max(map(len, contexts))), np.int32)
        mask = np.zeros(padded.shape, np.bool_)
        for r, context in enumerate(contexts):
            padded[r, : len(context)] = context
            mask[r, : len(context)] = True
        allowed = torch.from_numpy(mask).to(query.device)[:, None, None]  # [R, 1, 1, longest]
        return self._attend(stack, layer, query, keys, values, padded, allowed)

    @staticmethod
    def _attend(
        stack: Stack, layer: Layer, query: Tensor, keys: Tensor, values: Tensor,
        contexts: IndexArray, mask: Tensor | None,
    ) -> Tensor:  # fmt: skip
        index = torch.from_numpy(contexts).to(query.device, torch.long)
        k, v = keys[index].transpose(1, 2), values[index].transpose(1, 2)  # [R, G, L, D]
        cap, sinks = stack.differs.attention_cap, layer.sinks
        if not cap and sinks is None:
            out = F.scaled_dot_product_attention(
                query[:, :, None], k, v, attn_mask=mask, enable_gqa=True,
                scale=stack.differs.attention_scale,
            )  # fmt: skip
            return out.reshape(len(query), -1)
        grouped = query.unflatten(1, (k.shape[1], -1))  # [R, G, H / G, D]
        scores = (grouped @ k.mT).float() * stack.attention_scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            further = sinks.float().view(1, k.shape[1], -1, 1).expand(len(query), -1, -1, 1)
            scores = torch.cat([scores, further], -1).softmax(-1)[..., :-1]
        else:
            scores = scores.softmax(-1)
        mixed: Tensor = scores.to(v.dtype) @ v
        return mixed.reshape(len(query), -1)


def _seen(context: IndexArray, window: int | None, chunked: bool) -> IndexArray:
    """The slots of a context, its own row's the last, that a layer with a window attends to."""
    if window is None:
        return context
    return context[(len(context) - 1) // window * window :] if chunked else context[-window:]


def finished(logits: Tensor, differs: Differences) -> Tensor:
    """What the output layer's products become.  # [..., vocab_size] -> the same, float32"""
    logits = logits.float() / differs.logit_divisor
    cap = differs.logit_cap
    return cap * torch.tanh(logits / cap) if cap else logits
