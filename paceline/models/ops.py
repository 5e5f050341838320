"""The parts of a decoder layer that are not matrix products, in two versions.

:class:`TorchOps` is plain torch: it runs on any device and says what the other one must compute.
:class:`NativeOps` calls the C kernels (CPU, float32 and bfloat16); in each of its functions a row
is computed without regard to the others. Shapes: R rows, H heads, G key/value heads, D head
dimension, N slots of the KV pool.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from paceline.models import kernels
from paceline.types import IndexArray

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Where each row of a packed batch stands: its position, its slot, its context.

    The context of row r is ``prefix[r]`` (a table of slots, read from ``prefix_start[r]`` to
    ``prefix_length[r]``) followed by ``path[r]``: the ancestors of a tree node, itself included.
    Tables are kept as arrays and, for the kernels, as addresses.
    """

    positions: IndexArray  # [R]
    slots: IndexArray  # [R]
    prefix_start: IndexArray  # [R]
    prefix_length: IndexArray  # [R]
    path_length: IndexArray  # [R]
    prefix_address: np.ndarray[tuple[int], np.dtype[np.int64]]  # [R]
    path_address: np.ndarray[tuple[int], np.dtype[np.int64]]  # [R]
    tables: list[IndexArray]  # [R] slot table behind prefix_address
    paths: IndexArray  # flat storage behind path_address
    path_offset: IndexArray  # [R]
    longest: int  # context, in slots
    # Looking an array's address up costs a microsecond: once a forward, not once a layer.
    addresses: tuple[int, ...]  # of the first seven arrays, in order

    def context(self, row: int) -> IndexArray:
        """Slots that a row attends to, in position order."""
        prefix = self.tables[row][self.prefix_start[row] : self.prefix_length[row]]
        first = self.path_offset[row]
        return np.concatenate([prefix, self.paths[first : first + self.path_length[row]]])


class Ops(Protocol):
    """What a decoder layer needs besides F.linear. Arguments are contiguous."""

    def add_rmsnorm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """``x += delta`` in place (if given), then the RMS norm of ``x``.  # [R, hidden]"""
        ...

    def rope_store(
        self,
        qkv: Tensor,  # [R, (H + 2G) * D]
        cos_sin: Tensor,  # [positions, D] float32: D/2 cosines, D/2 sines
        rows: Rows,
        keys: Tensor,  # [N, G, D]
        values: Tensor,  # [N, G, D]
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> None:
        """Rotate queries and keys in place, store keys and values in the rows' slots."""
        ...

    def attention(
        self, qkv: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float
    ) -> Tensor:
        """Each row's query over its own context.  # [R, H * D]"""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up``.  # [R, 2 * ffn] -> [R, ffn]"""
        ...


class TorchOps:
    """Plain torch.

    Args:
        by_row: compute attention row by row, each over exactly its own context, so that a row
            never depends on its neighbours; otherwise rows are padded to the longest context.
    """

    def __init__(self, by_row: bool) -> None:
        self.by_row = by_row

    def add_rmsnorm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if delta is not None:
            x += delta
        return _rmsnorm(x, weight, eps)

    def rope_store(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        rows: Rows,
        keys: Tensor,
        values: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> None:
        groups, dim = keys.shape[1:]
        heads = qkv.view(len(qkv), -1, dim)  # [R, H + 2G, D]
        num_heads = heads.shape[1] - 2 * groups
        positions = torch.from_numpy(rows.positions).to(qkv.device, torch.long)
        slots = torch.from_numpy(rows.slots).to(qkv.device, torch.long)
        if q_norm is not None:
            heads[:, :num_heads] = _rmsnorm(heads[:, :num_heads], q_norm, eps)
        if k_norm is not None:
            k = heads[:, num_heads : num_heads + groups]
            heads[:, num_heads : num_heads + groups] = _rmsnorm(k, k_norm, eps)
        cosine, sine = cos_sin[positions][:, None].chunk(2, dim=-1)  # [R, 1, D/2]
        a, b = heads[:, : num_heads + groups].float().chunk(2, dim=-1)
        rotated = torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)
        heads[:, : num_heads + groups] = rotated.to(qkv.dtype)
        keys[slots] = heads[:, num_heads : num_heads + groups]
        values[slots] = heads[:, num_heads + groups :]

    def attention(
        self, qkv: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float
    ) -> Tensor:
        groups, dim = keys.shape[1:]
        query = qkv.view(len(qkv), -1, dim)[:, : -2 * groups]  # [R, H, D]
        contexts = [rows.context(row) for row in range(len(qkv))]
        if self.by_row:
            parts = [
                self._attend(query[r : r + 1], keys, values, context[None], None, scale)
                for r, context in enumerate(contexts)
            ]
            return torch.cat(parts)
        longest = rows.longest
        padded = np.zeros((len(qkv), longest), np.int32)
        mask = np.zeros((len(qkv), longest), np.bool_)
        for r, context in enumerate(contexts):
            padded[r, : len(context)] = context
            mask[r, : len(context)] = True
        allowed = torch.from_numpy(mask).to(qkv.device)[:, None, None]  # [R, 1, 1, longest]
        return self._attend(query, keys, values, padded, allowed, scale)

    @staticmethod
    def _attend(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        contexts: IndexArray,
        mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        index = torch.from_numpy(contexts).to(query.device, torch.long)
        k, v = keys[index].transpose(1, 2), values[index].transpose(1, 2)  # [R, G, L, D]
        out = F.scaled_dot_product_attention(
            query[:, :, None], k, v, attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out.reshape(len(query), -1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def _rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


class NativeOps:
    """The C kernels, for CPU tensors in float32 or bfloat16."""

    MAX_HEAD_DIM = 256
    DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}  # noqa: RUF012

    def __init__(self, dtype: torch.dtype) -> None:
        library, suffix = kernels.load(), self.DTYPES[dtype]
        self._add_rmsnorm = self._function(library, f"add_rmsnorm_{suffix}", "ppppiif")
        self._rope_store = self._function(library, f"rope_store_{suffix}", "ppppppiiiippf")
        self._attention = self._function(library, f"attention_{suffix}", "ppppiiiipppppif")
        self._silu_mul = self._function(library, f"silu_mul_{suffix}", "ppii")

    @staticmethod
    def _function(library: ctypes.CDLL, name: str, signature: str) -> ctypes._NamedFuncPointer:
        kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}
        function = getattr(library, name)
        function.argtypes = [kinds[letter] for letter in signature]
        function.restype = ctypes.c_int if "attention" in name else None
        return function  # type: ignore[no-any-return]

    def add_rmsnorm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        rows, dim = x.shape
        address = None if delta is None else delta.data_ptr()
        self._add_rmsnorm(x.data_ptr(), address, weight.data_ptr(), out.data_ptr(), rows, dim, eps)
        return out

    def rope_store(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        rows: Rows,
        keys: Tensor,
        values: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> None:
        groups, dim = keys.shape[1:]
        count, width = qkv.shape
        self._rope_store(
            qkv.data_ptr(),
            cos_sin.data_ptr(),
            rows.addresses[0],
            rows.addresses[1],
            keys.data_ptr(),
            values.data_ptr(),
            count,
            width // dim - 2 * groups,
            groups,
            dim,
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            eps,
        )

    def attention(
        self, qkv: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float
    ) -> Tensor:
        groups, dim = keys.shape[1:]
        count, width = qkv.shape
        heads = width // dim - 2 * groups
        out = qkv.new_empty(count, heads * dim)
        _, _, start, length, path_length, prefix, path = rows.addresses
        failed = self._attention(
            qkv.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            count,
            heads,
            groups,
            dim,
            prefix,
            start,
            length,
            path,
            path_length,
            rows.longest,
            scale,
        )
        if failed:
            raise MemoryError("no memory for the attention scores")
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
        return out
