"""The arithmetic of a Llama-type model on a CUDA device, in fused kernels.

:class:`CudaOps` computes what :class:`paceline.models.torch_ops.TorchOps` computes, with the Triton
kernels of :mod:`paceline.models.triton_kernels`. Each forward copies the rows' positions and
contexts to the device once, as one array (:class:`DeviceRows`); after that nothing waits for the
host or depends on its values, so a CUDA graph can record a forward
(:mod:`paceline.models.cuda_graphs`).

Kernels are not trusted on a new device: :func:`fused_ops` compares them with plain torch before a
model uses them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from paceline.models.kv_cache import KVPool, PooledSequence
from paceline.models.ops import Layer, Stack
from paceline.models.rows import Rows, append_rows
from paceline.models.torch_ops import TorchOps
from paceline.types import IndexArray, IntArray

Tensor = torch.Tensor

# The header of DeviceRows.data: one array over all rows after the other.
HEADER = (
    "token", "position", "slot", "prefix_length", "path_length", "path_start", "table_start",
)  # fmt: skip


class KernelsDiffer(RuntimeError):
    """A kernel computes wrong results on this device; the message names it."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """:class:`paceline.models.rows.Rows` as one array, for the kernels.

    Attributes:
        data: the fields of ``HEADER``, each for all rows, then the slots of paths and tables.
            ``path_start`` and ``table_start`` count from the beginning of ``data``.  # int32 flat
        num_rows: in the header; rows without a token have slot -1 and no context.
    """

    data: Tensor
    num_rows: int


def flatten(rows: Rows, num_rows: int, tokens: IntArray | None = None) -> IndexArray:
    """The array of :class:`DeviceRows`, padded to ``num_rows``.

    A table that rows share is in it once, up to the longest prefix that one of them sees.
    """
    count = len(rows.slots)
    _, first, table = np.unique(rows.table_addresses, return_index=True, return_inverse=True)
    lengths = np.zeros(len(first), np.int64)
    np.maximum.at(lengths, table, rows.prefix_length)
    header = np.zeros((len(HEADER), num_rows), np.int32)
    header[HEADER.index("slot"), count:] = -1
    ends = header.size + len(rows.paths) + np.cumsum(lengths)
    values = (
        0 if tokens is None else tokens, rows.positions, rows.slots, rows.prefix_length,
        rows.path_length, header.size + rows.path_offset, (ends - lengths)[table],
    )  # fmt: skip
    for field, value in zip(header, values, strict=True):
        field[:count] = value
    tables = [rows.tables[row][:length] for row, length in zip(first, lengths, strict=True)]
    return np.concatenate([header.ravel(), rows.paths, *tables])


def pinned(array: IndexArray, device: torch.device) -> Tensor:
    """Host memory that a ``non_blocking`` copy to the device can read."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


class CudaOps(TorchOps):
    """Triton kernels, for CUDA tensors in float32, bfloat16 or float16.

    Norms, rotary embedding, attention and the gated activation compute each row by itself, in an
    order that depends on its own context alone. Products are those of :class:`TorchOps`: the
    device's library chooses algorithms by the number of rows, so ``by_row`` gives it the same
    number each time.

    Args:
        by_row: a row never depends on its neighbours. Raises:
        ImportError: Triton is not installed.
    """

    _DTYPES = (torch.float32, torch.bfloat16, torch.float16)
    _MAX_HEAD_DIM = 256
    _MAX_HIDDEN_SIZE = 65536
    _BLOCK = 32  # context entries that attention reads at once
    _COLUMNS = 1024  # that a program of the activation computes

    @classmethod
    def supports(cls, dtype: torch.dtype, head_dim: int, hidden_size: int) -> bool:
        """Whether the kernels can compute a model."""
        return (
            dtype in cls._DTYPES
            and head_dim % 2 == 0
            and head_dim <= cls._MAX_HEAD_DIM
            and hidden_size <= cls._MAX_HIDDEN_SIZE
        )

    def __init__(self, by_row: bool) -> None:
        super().__init__(by_row)
        from paceline.models import triton_kernels

        self._kernels: Any = triton_kernels

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._add_rmsnorm(_aligned(x), None, weight, eps)

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
        flat = pinned(flatten(rows, len(x)), x.device).to(x.device, non_blocking=True)
        on_device = DeviceRows(flat, len(x))
        self.run_on_device(stack, first, last, x, keys, values, on_device, states)

    def run_on_device(
        self,
        stack: Stack,
        first: int,
        last: int,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: DeviceRows,
        states: Tensor | None = None,
    ) -> None:
        """As :meth:`run_layers`, for rows on the device."""
        assert x.data_ptr() % _ALIGNMENT == 0
        delta = None  # what is still to be added to x
        for i in range(first, last):
            layer = stack.layers[i]
            assert layer.input_norm is not None
            assert layer.post_norm is not None
            assert layer.gate_up is not None
            assert layer.down is not None
            normed = self._add_rmsnorm(x, delta, layer.input_norm, stack.eps)
            qkv = self.linear(normed, layer.qkv, layer.qkv_bias)
            self._rope_store_fused(stack, layer, qkv, keys[i], values[i], rows)
            attended = self._tree_attention(stack, layer, qkv, keys[i], values[i], rows)
            delta = self.linear(attended, layer.out, layer.out_bias)
            normed = self._add_rmsnorm(x, delta, layer.post_norm, stack.eps)
            gate_up = self.linear(normed, layer.gate_up, layer.gate_up_bias)
            delta = self.linear(self._silu_times(gate_up), layer.down, layer.down_bias)
            if states is not None or i == last - 1:
                x += delta
                delta = None
            if states is not None:
                states[i - first] = x

    def _add_rmsnorm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add ``delta`` to ``x`` in place; returns its norm.  # [R, hidden]"""
        out, size = torch.empty_like(x), x.shape[-1]
        if len(x):
            with torch.cuda.device_of(x):
                self._kernels.add_rmsnorm[(len(x),)](
                    x, x if delta is None else delta, weight, out, eps,
                    HAS_DELTA=delta is not None, SIZE=size, BLOCK=_power_of_two(size),
                    num_warps=4 if size <= 4096 else 8,
                )  # fmt: skip
        return out

    def _silu_times(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up``.  # [R, 2 * ffn] -> [R, ffn]"""
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty(len(gate_up), size)
        with torch.cuda.device_of(out):
            self._kernels.silu_times[(len(out), -(-size // self._COLUMNS))](
                gate_up, out, SIZE=size, BLOCK=self._COLUMNS
            )
        return out

    def _rope_store_fused(
        self, stack: Stack, layer: Layer, qkv: Tensor, keys: Tensor, values: Tensor,
        rows: DeviceRows,
    ) -> None:  # fmt: skip
        """Norm and rotate queries in place; store keys and values in the rows' slots."""
        assert (layer.q_norm is None) == (layer.k_norm is None)
        has_norms = layer.q_norm is not None
        with torch.cuda.device_of(qkv):
            self._kernels.rope_store[(len(qkv), stack.num_heads + 2 * stack.num_kv_heads)](
                qkv, keys, values, stack.cos_sin,
                layer.q_norm if has_norms else qkv, layer.k_norm if has_norms else qkv,
                rows.data, rows.num_rows, stack.eps,
                HAS_NORMS=has_norms, HEADS=stack.num_heads, KV_HEADS=stack.num_kv_heads,
                DIM=stack.head_dim, BLOCK=_power_of_two(stack.head_dim // 2), num_warps=1,
            )  # fmt: skip

    def _tree_attention(
        self, stack: Stack, layer: Layer, qkv: Tensor, keys: Tensor, values: Tensor,
        rows: DeviceRows,
    ) -> Tensor:  # fmt: skip
        """Each row's query over its own context.  # [R, (H + 2G) * D] -> [R, H * D]"""
        out = qkv.new_empty(len(qkv), stack.num_heads * stack.head_dim)
        with torch.cuda.device_of(out):
            self._kernels.tree_attention[(len(out), stack.num_kv_heads)](
                qkv, keys, values, out, rows.data, rows.num_rows, stack.head_dim**-0.5,
                WINDOW=layer.window or 0, HEADS=stack.num_heads, KV_HEADS=stack.num_kv_heads,
                DIM=stack.head_dim, BLOCK=self._BLOCK,
                GROUP_BLOCK=max(16, _power_of_two(stack.num_heads // stack.num_kv_heads)),
                DIM_BLOCK=max(16, _power_of_two(stack.head_dim)),
                # Triton's interpreter cannot multiply bfloat16.
                WIDEN=qkv.device.type == "cpu", num_warps=4, num_stages=2,
            )  # fmt: skip
        return out


# --- whether to trust them -----------------------------------------------------------------------

# Greatest allowed distance of a row from plain torch's, relative to its length.
_TOLERANCES = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def fused_ops(stack: Stack, by_row: bool) -> TorchOps:
    """:class:`CudaOps` where it computes what plain torch computes, else :class:`TorchOps`.

    Logs why it does not use :class:`CudaOps`, except for models that do not fit.

    Args:
        stack: of the model, on its device. Its first layer is what is tried.
    """
    dtype = stack.layers[0].qkv.data.dtype
    fits = CudaOps.supports(dtype, stack.head_dim, stack.hidden_size)
    if not fits or not stack.is_plain:  # the kernels compute no declared differences
        return TorchOps(by_row)
    reason = "switched off by PACELINE_KERNELS=off"
    if os.environ.get("PACELINE_KERNELS", "on") != "off":
        try:
            ops = CudaOps(by_row)
            check(ops, stack)
            return ops
        except KernelsDiffer as error:
            reason = str(error)
        except Exception as error:  # plain torch works whatever Triton or the device lacks
            reason = f"{type(error).__name__}: {error}"
    warnings.warn(f"running without the Triton kernels, slower: {reason}", stacklevel=2)
    return TorchOps(by_row)


def check(ops: TorchOps, stack: Stack) -> None:
    """Compare ``ops`` with plain torch: a prompt, a chain and a tree through the first layer.

    Raises:
        KernelsDiffer: states, keys or values are not those of plain torch, or a row's result
            depends on its neighbours where it must not.
    """
    layer = stack.layers[0]
    dtype, device = layer.qkv.data.dtype, layer.qkv.data.device
    trial = replace(stack, layers=tuple(replace(layer, window=window) for window in (None, 9)))
    pool = KVPool(2, 255, stack.num_kv_heads, stack.head_dim, dtype, device)
    rows = _trial_rows(pool, len(stack.cos_sin))
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    # Small beside what the layer adds: that is what shall be compared.
    x = 0.01 * noise(len(rows.slots), stack.hidden_size)
    pool.keys.copy_(noise(*pool.keys.shape))
    pool.values.copy_(noise(*pool.values.shape))
    slots = torch.from_numpy(rows.slots).to(device, torch.long)
    for i, case in enumerate(("all of the context", "a sliding window")):
        results = []
        for each in (TorchOps(by_row=True), ops):
            states, keys, values = x.clone(), pool.keys.clone(), pool.values.clone()
            each.run_layers(trial, i, i + 1, states, keys, values, rows)
            results.append((states, keys[i, slots], values[i, slots]))
        for what, plain, fused in zip(("states", "keys", "values"), *results, strict=True):
            worst = _distance(plain, fused)
            if not worst <= _TOLERANCES[dtype]:  # also where it is no number
                raise KernelsDiffer(
                    f"with {case}, {what} differ from plain torch's by {worst:.1e} of their length "
                    f"(allowed are {_TOLERANCES[dtype]:.0e})"
                )
        if not ops.by_row:
            continue
        for some in (np.arange(len(x))[::-1].copy(), np.array([len(x) - 1]), np.array([2, 0])):
            part = x[torch.from_numpy(some).to(device)]
            ops.run_layers(trial, i, i + 1, part, keys, values, rows.take(some))
            if not torch.equal(part, states[torch.from_numpy(some).to(device)]):
                raise KernelsDiffer(f"with {case}, a row's result depends on its neighbours")


def _trial_rows(pool: KVPool, context_length: int) -> Rows:
    """A tree and one token after a prefix, and a short prompt."""
    length = min(70, context_length // 2)
    tree = (-1, 0, 0, 1, 3, -1, 5, 6, 2)
    parts: list[tuple[PooledSequence, tuple[int, ...], Sequence[int]]] = []
    for prefix, parents in ((length, tree), (length // 2, (-1,)), (0, (-1, 0, 1, 2))):
        sequence = PooledSequence(length + len(tree))
        pool.append(sequence, range(-1, prefix - 1))
        pool.commit(sequence, range(prefix))
        parts.append((sequence, (), parents))
    return append_rows(pool, parts, context_length)


def _distance(plain: Tensor, fused: Tensor) -> float:
    """The largest distance between two rows, relative to the first one's length."""
    expected, actual = plain.flatten(1).double(), fused.flatten(1).double()
    return float(((actual - expected).norm(dim=1) / expected.norm(dim=1)).max())


# Kernels are compiled for pointers that are multiples of this and, apart, for others. The two could
# add in another order.
_ALIGNMENT = 16


def _aligned(x: Tensor) -> Tensor:
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def _power_of_two(size: int) -> int:
    """The smallest power of two not below ``size``."""
    return 1 << max(size - 1, 0).bit_length()
