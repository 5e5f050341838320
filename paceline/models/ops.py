"""The arithmetic of a Llama-type model, in two versions that compute the same.

:class:`TorchOps` is plain torch: it runs on any device and is the reference for the other one.
:class:`NativeOps` calls the C kernels (CPU, float32 and bfloat16): all layers in one call, each row
computed without regard to the others. Shapes: R rows, H heads, G key/value heads, D head
dimension, N slots of the KV pool.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from paceline.errors import InvalidArgument
from paceline.models import kernels
from paceline.models.kv_cache import KVPool, PooledSequence
from paceline.models.quants import Quantised
from paceline.models.threads import Threads
from paceline.types import FloatArray, IndexArray, IntArray

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The position, slot and context of each row of a packed batch.

    The context of row r is ``tables[r][:prefix_length[r]]`` (slots of the sequence, in position
    order) followed by ``path_length[r]`` entries of ``paths`` from ``path_offset[r]`` on: the
    ancestors of a tree node, itself included.
    """

    positions: IndexArray  # [R]
    slots: IndexArray  # [R]
    prefix_length: IndexArray  # [R]
    path_length: IndexArray  # [R]
    tables: list[IndexArray]  # [R]
    table_addresses: npt.NDArray[np.int64]  # [R] where the kernels find ``tables``
    paths: IndexArray  # flat
    path_offset: IndexArray  # [R]

    def context(self, row: int) -> IndexArray:
        """Slots that a row attends to, in position order."""
        first = self.path_offset[row]
        path = self.paths[first : first + self.path_length[row]]
        return np.concatenate([self.tables[row][: self.prefix_length[row]], path])

    def take(self, rows: npt.NDArray[np.int64]) -> Rows:
        """Some of the rows, in the given order."""
        return Rows(
            self.positions[rows], self.slots[rows],
            self.prefix_length[rows], self.path_length[rows],
            [self.tables[row] for row in rows], self.table_addresses[rows],
            self.paths, self.path_offset[rows],
        )  # fmt: skip

    @property
    def longest(self) -> int:
        """Slots in the longest context."""
        return int((self.prefix_length + self.path_length).max())


def append_rows(
    pool: KVPool,
    parts: Sequence[tuple[PooledSequence, Sequence[int], Sequence[int]]],
    context_length: int,
) -> Rows:
    """Append pending entries to sequences and lay out the rows that compute them.

    Args:
        parts: sequences with the entries that are computed further, and the parents of new ones;
            rows are in this order, the former before the latter.

    Raises:
        ResourceExhausted: the pool, or a sequence, has no room.
        InvalidArgument: a token would lie beyond the context.
    """
    count = sum(len(further) + len(parents) for _, further, parents in parts)
    positions = np.empty(count, np.int32)
    slots, prefixes = np.empty(count, np.int32), np.empty(count, np.int32)
    path_lengths, path_offsets = np.zeros(count, np.int32), np.zeros(count, np.int32)
    addresses, tables = np.empty(count, np.int64), []
    path_slots: list[int] = []
    row = 0
    for sequence, further, parents in parts:
        size, first = len(parents), sequence.num_pending
        end = row + len(further) + size
        slots[row + len(further) : end] = pool.append(sequence, parents)
        addresses[row:end] = sequence.address
        tables += [sequence.slots] * (end - row)
        if sequence.chain and not further:
            start = sequence.length + first
            positions[row:end] = np.arange(start, start + size)
            prefixes[row:end] = positions[row:end] + 1
        else:
            prefixes[row:end] = sequence.length
            for i, entry in enumerate([*further, *range(first, first + size)], row):
                path = sequence.path_slots(entry)
                slots[i] = path[-1]
                positions[i] = sequence.length + len(path) - 1
                path_offsets[i] = len(path_slots)
                path_lengths[i] = len(path)
                path_slots += path
        row = end
    if int(positions.max()) >= context_length:
        raise InvalidArgument(
            "position", int(positions.max()), f"below the context of {context_length}"
        )
    paths = np.asarray(path_slots, np.int32)
    return Rows(positions, slots, prefixes, path_lengths, tables, addresses, paths, path_offsets)


def append_chains(
    pool: KVPool, sequences: Sequence[PooledSequence], sizes: Sequence[int], num_steps: int
) -> Rows:
    """Append pending entries to each sequence, whose pending ones are a chain: first ``size``, and
    then one in each further step.

    Rows are those of all steps, one step after the other.

    Raises:
        ResourceExhausted: the pool, or a sequence, has no room.
    """
    count, more = len(sequences), num_steps - 1
    slots, positions = np.empty((2, sum(sizes) + more * count), np.int32)
    owners = [*np.repeat(np.arange(count), sizes).tolist(), *(list(range(count)) * more)]
    first = 0
    for i, (sequence, size) in enumerate(zip(sequences, sizes, strict=True)):
        pending, end = sequence.num_pending, first + size
        assert sequence.chain
        taken = pool.append(sequence, range(pending - 1, pending - 1 + size + more))
        start = sequence.length + pending
        slots[first:end], slots[sum(sizes) + i :: count] = taken[:size], taken[size:]
        positions[first:end] = np.arange(start, start + size)
        positions[sum(sizes) + i :: count] = np.arange(start + size, start + size + more)
        first = end
    zeros = np.zeros(len(slots), np.int32)
    return Rows(
        positions, slots, positions + np.int32(1), zeros,
        [sequences[i].slots for i in owners],
        np.array([sequences[i].address for i in owners], np.int64), np.empty(0, np.int32), zeros,
    )  # fmt: skip


class Packing(IntEnum):
    """``enum packing`` of kernels/model.h."""

    FLOATS = 0  # float32
    HALVES = 1  # bfloat16, also for float32 inputs
    DOTS = 2  # the same, for products of pairs of bfloat16
    TILES = 3  # bfloat16 for matrix tiles
    BYTES = 4  # int8, each output with a scale
    TILE_BYTES = 5  # the same, and many rows take matrix tiles
    NIBBLES = 6  # blocks of integers, see kernels/quants.h: 4 bits
    OCTETS = 7  # 8 bits
    WIDE_NIBBLES = 8  # 4 bits, scales in float32
    WIDE_OCTETS = 9  # 8 bits, blocks of 16, scales in float32


def _that_holds(one: Packing, other: Packing) -> Packing:
    """The layout that keeps the numbers of both."""
    if one is other:
        return one
    if {one, other} == {Packing.NIBBLES, Packing.WIDE_NIBBLES}:
        return Packing.WIDE_NIBBLES
    return Packing.WIDE_OCTETS if one >= Packing.NIBBLES else Packing.FLOATS


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A weight matrix in the layout that its ops need."""

    data: Tensor
    num_outputs: int
    num_inputs: int
    packing: Packing = Packing.FLOATS


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layer:
    """The weights of one decoder layer."""

    input_norm: Tensor
    qkv: Weight  # [(H + 2G) * D, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    out: Weight  # [hidden, H * D]
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Weight  # [2 * ffn, hidden]
    gate_up_bias: Tensor | None
    down: Weight  # [hidden, ffn]
    down_bias: Tensor | None
    window: int | None  # positions that attention sees, None for all


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Stack:
    """All layers and the numbers that they share."""

    layers: tuple[Layer, ...]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    cos_sin: Tensor  # [positions, D] float32: D/2 cosines, D/2 sines


class Fuse(NamedTuple):
    """A layer's input is ``weight @ [embedding of the token; feature] + bias``.

    The feature of a step is the last state of the step before; ``features`` is the first one's.
    """

    weight: Weight  # [hidden, 2 * hidden]
    bias: Tensor | None
    features: Tensor  # [num_sequences, hidden]


class Ops(Protocol):
    """The arithmetic under :class:`paceline.models.llama.LlamaRunner`. Tensors are contiguous."""

    def pack(self, weight: Tensor) -> Weight:
        """Bring a weight into the layout that :meth:`linear` needs.  # [outputs, inputs]"""
        ...

    def unpack(self, weight: Weight) -> Tensor:
        """The weight that :meth:`pack` packed.  # [outputs, inputs]"""
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``.  # [R, inputs] -> [R, outputs]"""
        ...

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``weight * x / rms(x)``.  # [R, hidden]"""
        ...

    def run_layers(
        self,
        stack: Stack,
        first: int,
        last: int,
        x: Tensor,  # [R, hidden]
        keys: Tensor,  # [layers, N, G, D]
        values: Tensor,  # [layers, N, G, D]
        rows: Rows,
        states: Tensor | None = None,  # [last - first, R, hidden]
    ) -> None:
        """Layers ``first`` to ``last - 1`` on ``x`` in place; stores keys and values.

        ``states`` is filled with what ``x`` was after each of these layers.
        """
        ...


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


class _Rows(ctypes.Structure):
    """``struct rows`` of kernels/model.h."""

    _fields_ = [
        ("count", ctypes.c_int32),
        ("longest", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "prefix_length")),
        *((name, ctypes.c_void_p) for name in ("path_length", "prefix", "path")),
    ]


class _Model(ctypes.Structure):
    """``struct model``."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("hidden", "ffn", "heads", "kv_heads", "dim")),
        ("num_slots", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("cos_sin", ctypes.c_void_p),
    ]


class _Weight(ctypes.Structure):
    """``struct weight``."""

    _fields_ = [("packed", ctypes.c_void_p), ("packing", ctypes.c_int64)]

    @classmethod
    def of(cls, weight: Weight) -> _Weight:
        return cls(weight.data.data_ptr(), weight.packing)


class _Layer(ctypes.Structure):
    """``struct layer``: weights and tensors of a :class:`Layer`, as addresses."""

    _fields_ = [
        ("input_norm", ctypes.c_void_p),
        ("qkv", _Weight),
        ("qkv_bias", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("out", _Weight),
        ("out_bias", ctypes.c_void_p),
        ("post_norm", ctypes.c_void_p),
        ("gate_up", _Weight),
        ("gate_up_bias", ctypes.c_void_p),
        ("down", _Weight),
        ("down_bias", ctypes.c_void_p),
        ("window", ctypes.c_int64),
    ]


_STRUCTS = (_Rows, _Model, _Weight, _Layer)
"""In the order of ``struct_size`` in kernels/decode.c."""


def check_structs(library: ctypes.CDLL) -> None:
    """Compare the structures above with those that the kernels were compiled with.

    Raises:
        RuntimeError: a structure has another size in C.
    """
    for i, struct in enumerate(_STRUCTS):
        here, there = ctypes.sizeof(struct), library.struct_size(i)
        if here != there:
            name = struct.__name__.removeprefix("_").lower()
            raise RuntimeError(f"struct {name} has {here} bytes in ops.py, and {there} in C")


class NativeOps:
    """The C kernels, for CPU tensors in float32 or bfloat16.

    Args:
        int8: round weights to eight bits, output by output, and inputs of products, row by row.
            Only for models that draft: results change.
        numerics: "portable" computes the same bits on every processor; "fastest" also uses
            instructions that sum in an order of their own.
    """

    _DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}  # noqa: RUF012
    _MAX_HEAD_DIM = 256
    _WIDTH = 16  # outputs in a panel of packed weights
    _TILE_INPUTS = 32  # for matrix tiles, inputs are padded to a multiple of this

    @classmethod
    def supports(cls, dtype: torch.dtype, device: torch.device, *widths: int) -> bool:
        """Whether a model with these inner widths, the first being the head dimension, fits."""
        return (
            device.type == "cpu"
            and dtype in cls._DTYPES
            and widths[0] <= cls._MAX_HEAD_DIM
            # bfloat16 weights are taken in pairs.
            and all(width % 2 == 0 for width in widths)
        )

    def __init__(
        self, dtype: torch.dtype, *, int8: bool = False, numerics: str = "fastest"
    ) -> None:
        library, suffix = kernels.load(), self._DTYPES[dtype]
        check_structs(library)
        kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}

        def function(name: str, signature: str) -> Any:
            result = getattr(library, f"{name}_{suffix}")
            result.argtypes, result.restype = [kinds[letter] for letter in signature], ctypes.c_int
            return result

        self._run_layers = function("run_layers", "ppiippppp")
        self._rmsnorm = function("rmsnorm", "pppiif")
        self._linear = function("linear", "ppippiiii")
        self._greedy_chain = function("greedy_chain", "ppipppippppipiippppppp")
        self._dtype, self._int8 = dtype, int8
        self._tiles = kernels.has_tiles()
        self._tile_numerics = self._tiles and numerics == "fastest"
        dots = kernels.has_dots() and (numerics == "fastest" or kernels.dots_are_portable())
        self._dots = dots and dtype is torch.bfloat16
        self.packings: set[Packing] = set()  # of the weights that this multiplies with
        self._tables: dict[int, tuple[Stack, Any, Any, int]] = {}
        self.threads: Threads | None = None  # measured; until then, by _num_threads

    @property
    def layout(self) -> tuple[object, ...]:
        """The properties that determine the layout of packed weights."""
        return str(self._dtype), self._int8, self._tiles, self._tile_numerics, self._dots

    @property
    def numerics_class(self) -> str:
        """See :mod:`paceline.numerics`; known once all weights are packed."""
        if Packing.TILES in self.packings:
            return "amx"
        dots = Packing.DOTS in self.packings and not kernels.dots_are_portable()
        return "bf16dot" if dots else "portable"

    def pack(self, weight: Tensor) -> Weight:
        return self.pack_rows(lambda rows: weight[rows], *weight.shape)

    def pack_quantised(self, weight: Quantised) -> Weight:
        """As :meth:`pack`, in the smallest layout that keeps every number as it is."""
        return self.pack_rows(weight.rows, *weight.shape)

    def pack_rows(
        self, read: Callable[[slice], Tensor | Quantised], outputs: int, inputs: int
    ) -> Weight:
        """As :meth:`pack`, of a matrix that is read some outputs at a time.

        So only a small part of it is in memory in another layout at a time.

        Args:
            read: some outputs; it may be asked for them again.
        """
        step = self._rows_at_a_time(inputs)
        packing, start, data = None, 0, torch.empty(0)
        while start < outputs:
            rows = slice(start, min(start + step, outputs))
            piece = read(rows)
            smallest = self._smallest(piece)
            needed = smallest if packing is None else _that_holds(packing, smallest)
            if packing not in (None, needed):  # the outputs before need another layout, too
                packing, start = needed, 0
                continue
            packing = needed
            part = (
                self._pack_blocks(piece, packing) if isinstance(piece, Quantised)
                else self._pack_floats(piece, packing)
            )  # fmt: skip
            if start == 0:
                data = part.new_empty(-(-outputs // self._WIDTH), *part.shape[1:])
            data[start // self._WIDTH :][: len(part)] = part
            start = rows.stop
        assert packing is not None
        if packing not in (Packing.BYTES, Packing.TILE_BYTES):
            self.packings.add(packing)
        return Weight(data, outputs, inputs, packing)

    def _rows_at_a_time(self, inputs: int) -> int:
        """Outputs of some 4 MB in float32, in whole panels."""
        return max(1, 2**20 // (inputs * self._WIDTH)) * self._WIDTH

    def _smallest(self, weight: Tensor | Quantised) -> Packing:
        """The smallest layout that keeps every number as it is."""
        if isinstance(weight, Quantised):
            numbers = [weight.scale] if weight.least is None else [weight.scale, weight.least]
            narrow = all(np.array_equal(x.astype(np.float16), x) for x in numbers)
            if weight.bits == 4 and weight.block == 32 and weight.least is not None:
                return Packing.NIBBLES if narrow else Packing.WIDE_NIBBLES
            is_octets = weight.block == 32 and weight.least is None and narrow
            return Packing.OCTETS if is_octets else Packing.WIDE_OCTETS
        if self._int8:
            return Packing.TILE_BYTES if self._tiles else Packing.BYTES
        if weight.shape[1] % 2 or not bool(weight.bfloat16().eq(weight).all()):
            return Packing.FLOATS
        if self._tile_numerics:
            return Packing.TILES
        return Packing.DOTS if self._dots else Packing.HALVES

    def _pack_floats(self, weight: Tensor, packing: Packing) -> Tensor:
        if packing in (Packing.BYTES, Packing.TILE_BYTES):
            return self._pack_bytes(weight)
        if packing is Packing.FLOATS:
            return self._panels(weight.float(), 1, 1)
        multiple = self._TILE_INPUTS if packing is Packing.TILES else 2
        return self._panels(weight.bfloat16(), 2, multiple)

    def _pack_blocks(self, weight: Quantised, packing: Packing) -> Tensor:
        if packing is Packing.WIDE_OCTETS:
            weight = weight.widened()
        numbers = [weight.scale] if weight.least is None else [weight.scale, weight.least]
        outputs = len(weight.q)
        more = -outputs % self._WIDTH
        kind = np.float32 if packing >= Packing.WIDE_NIBBLES else np.float16
        header = np.stack([np.pad(x, ((0, more), (0, 0))).astype(kind) for x in numbers], 1)
        # [panels, WIDTH, numbers, blocks] -> [panels, blocks, numbers, WIDTH]
        header = header.reshape(-1, self._WIDTH, *header.shape[1:]).transpose(0, 3, 2, 1)
        head = np.ascontiguousarray(header).reshape(len(header), -1).view(np.uint8)
        head = np.pad(head, ((0, 0), (0, -head.shape[1] % 64)))
        q = np.pad(weight.q, ((0, more), (0, 0))).view(np.uint8)
        together = 2 if weight.bits == 4 else 1
        lines = q.reshape(len(head), self._WIDTH, -1, together, 4).transpose(0, 2, 3, 1, 4)
        parts = lines[:, :, 0] | lines[:, :, 1] << 4 if together == 2 else lines
        return torch.from_numpy(np.concatenate([head, parts.reshape(len(head), -1)], 1))

    def _unpack_quantised(self, weight: Weight) -> Tensor:
        data, inputs = weight.data.numpy(), weight.num_inputs
        wide, bits = weight.packing >= Packing.WIDE_NIBBLES, 8
        if weight.packing in (Packing.NIBBLES, Packing.WIDE_NIBBLES):
            bits = 4
        blocks = inputs // (16 if weight.packing is Packing.WIDE_OCTETS else 32)
        count = 1 if weight.packing is Packing.OCTETS else 2
        size = blocks * count * self._WIDTH * (4 if wide else 2)
        numbers = np.ascontiguousarray(data[:, :size]).view(np.float32 if wide else np.float16)
        numbers = numbers.reshape(len(data), blocks, count, self._WIDTH).transpose(2, 0, 3, 1)
        numbers = numbers.reshape(count, -1, blocks).astype(np.float32)
        lines = data[:, size + -size % 64 :].reshape(len(data), -1, 1, self._WIDTH, 4)
        if bits == 4:
            lines = np.concatenate([lines & 15, lines >> 4], 2)
        q = np.ascontiguousarray(lines.transpose(0, 3, 1, 2, 4)).reshape(-1, inputs)
        least = numbers[1] if count == 2 else None
        whole = Quantised(q.view(np.int8), numbers[0], least, bits).floats()
        return torch.from_numpy(whole[: weight.num_outputs]).to(self._dtype).contiguous()

    def _panels(self, weight: Tensor, together: int, multiple: int) -> Tensor:
        """The weight, padded, with some neighbouring inputs of an output together.

        # [outputs, inputs] -> [panels, inputs / together, WIDTH, together]
        """
        padded = F.pad(weight, (0, -weight.shape[1] % multiple, 0, -len(weight) % self._WIDTH))
        panels = padded.view(-1, self._WIDTH, padded.shape[1] // together, together)
        return panels.transpose(1, 2).contiguous()

    def _pack_bytes(self, weight: Tensor) -> Tensor:
        """``struct byte_panel`` of kernels/matmul.c, one for each row of the result."""
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        whole = (weight.float() / scale.clamp(min=torch.finfo(torch.float32).tiny)).round()
        panels = self._panels(whole.to(torch.int8), 4, 4).flatten(1)
        shift = F.pad(128 * whole.sum(1), (0, -len(weight) % self._WIDTH)).to(torch.int32)
        scales = F.pad(scale[:, 0], (0, -len(weight) % self._WIDTH))
        header = [part.view(-1, self._WIDTH).view(torch.int8) for part in (scales, shift)]
        return torch.cat([*header, panels], 1)

    def unpack(self, weight: Weight) -> Tensor:
        if weight.packing >= Packing.NIBBLES:
            return self._unpack_quantised(weight)
        data, scale = weight.data, None
        if weight.packing >= Packing.BYTES:
            header = 2 * 4 * self._WIDTH
            scale = data[:, : header // 2].contiguous().view(torch.float32).flatten()
            data = data[:, header:].reshape(len(data), -1, self._WIDTH, 4)
        rows = data.transpose(1, 2).flatten(2).flatten(0, 1)  # [outputs, inputs], padded
        if scale is not None:
            rows = rows * scale[:, None]
        return rows[: weight.num_outputs, : weight.num_inputs].to(self._dtype).contiguous()

    def unpack_rows(self, weight: Weight) -> Iterator[Tensor]:
        """As :meth:`unpack`, some outputs at a time."""
        step = self._rows_at_a_time(weight.num_inputs)
        for start in range(0, weight.num_outputs, step):
            panels = weight.data[start // self._WIDTH : (start + step) // self._WIDTH]
            count = min(step, weight.num_outputs - start)
            yield self.unpack(Weight(panels, count, weight.num_inputs, weight.packing))

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        rows, inputs = x.shape
        size = weight.num_outputs * inputs
        out = x.new_empty(rows, weight.num_outputs)
        failed = self._linear(
            x.data_ptr(),
            weight.data.data_ptr(),
            weight.packing,
            _address(bias),
            out.data_ptr(),
            rows,
            inputs,
            weight.num_outputs,
            self._num_threads(rows, weight.packing, size, size * rows),
        )
        if failed:
            raise MemoryError("no memory for a product")
        return out

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._rmsnorm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, eps)
        return out

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
        model, layers = self._table(stack, keys.shape[1], len(x), rows.longest)
        paths = _path_addresses(rows)
        packed = _packed(len(x), rows, paths)
        failed = self._run_layers(
            ctypes.addressof(model),
            ctypes.addressof(layers),
            first,
            last,
            x.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            ctypes.addressof(packed),
            _address(states),
        )
        if failed:
            raise MemoryError("no memory for the activations of a forward")

    def greedy_chain(
        self,
        stack: Stack,
        num_layers: int,
        embedding: Tensor,
        final_norm: Tensor | None,
        head: Weight,
        keys: Tensor,
        values: Tensor,
        rows: Rows,
        given: Sequence[Sequence[int]],
        num_steps: int,
        *,
        states: Tensor | None = None,
        fuse: Fuse | None = None,
        stop_below: FloatArray | None = None,
    ) -> IntArray:
        """Give sequences some tokens and continue each by argmax.

        Args:
            num_layers: number of the stack's layers that take part.
            final_norm: None where logits come from the last state as it is.
            rows: of the given tokens and then of all further steps, one step after the other.
            given: the tokens that each sequence has not seen, at least one; exactly one with
                ``states``
                or ``fuse``.
            states: filled with what comes out of each layer.
                # [num_steps, num_layers, num_sequences, hidden]
            fuse: for drafters that read features; see there.
            stop_below: a sequence ends after a token whose probability is less than this.
                # [num_steps, num_sequences]

        Returns:
            The new tokens; -1 behind the end of a sequence.  # [num_steps, num_sequences]
        """
        count, sizes = len(given), [len(tokens) for tokens in given]
        model, layers = self._table(stack, keys.shape[1], sum(sizes), rows.longest)
        assert sum(sizes) == count or (states is None and fuse is None)
        flat = np.fromiter(chain.from_iterable(given), np.int64, sum(sizes))
        ends = np.cumsum(sizes, dtype=np.int32) - np.int32(1)
        paths = _path_addresses(rows)
        packed = _packed(len(flat), rows, paths)
        tokens = np.empty((num_steps, count), np.int64)
        lengths = np.full(count, num_steps, np.int32)
        head_weight = _Weight.of(head)
        fusing: tuple[int | None, ...] = (None, None, None)
        if fuse is not None:
            fuse_weight = _Weight.of(fuse.weight)
            fusing = (
                ctypes.addressof(fuse_weight), _address(fuse.bias), fuse.features.data_ptr(),
            )  # fmt: skip
        failed = self._greedy_chain(
            ctypes.addressof(model),
            ctypes.addressof(layers),
            num_layers,
            embedding.data_ptr(),
            _address(final_norm),
            ctypes.addressof(head_weight),
            head.num_outputs,
            keys.data_ptr(),
            values.data_ptr(),
            ctypes.addressof(packed),
            flat.ctypes.data,
            len(flat),
            ends.ctypes.data,
            count,
            num_steps,
            tokens.ctypes.data,
            _address(states),
            *fusing,
            None if stop_below is None else stop_below.ctypes.data,
            lengths.ctypes.data,
        )
        if failed:
            raise MemoryError("no memory for the activations of a draft")
        if stop_below is not None:
            tokens[np.arange(num_steps)[:, None] >= lengths] = -1
        return tokens

    def _table(self, stack: Stack, num_slots: int, num_rows: int, longest: int) -> tuple[Any, Any]:
        """The C structures of a stack, built once; the stack is kept alive beside them."""
        if id(stack) not in self._tables:
            model = _Model(
                stack.hidden_size,
                stack.intermediate_size,
                stack.num_heads,
                stack.num_kv_heads,
                stack.head_dim,
                num_slots,
                1,
                stack.eps,
                stack.head_dim**-0.5,
                stack.cos_sin.data_ptr(),
            )
            layers = (_Layer * len(stack.layers))()
            for place, layer in zip(layers, stack.layers, strict=True):
                for name, *_ in _Layer._fields_:
                    value = getattr(layer, name)
                    if isinstance(value, Weight):
                        value = _Weight.of(value)
                    elif isinstance(value, Tensor):
                        value = value.data_ptr()
                    setattr(place, name, 0 if value is None else value)
            products = [(y.qkv, y.out, y.gate_up, y.down) for y in stack.layers]
            size = sum(w.num_outputs * w.num_inputs for each in products for w in each)
            self._tables[id(stack)] = (stack, model, layers, size)
        _, model, layers, size = self._tables[id(stack)]
        heads = len(stack.layers) * stack.num_heads * stack.head_dim
        packing, work = stack.layers[0].qkv.packing, num_rows * (size + 2.0 * heads * longest)
        model.threads = self._num_threads(num_rows, packing, size, work)
        return model, layers

    def _num_threads(self, rows: int, packing: Packing, num_weights: int, work: float) -> int:
        if self.threads is None:
            return _num_threads(packing, num_weights, work)
        return min(self.threads.of(rows), kernels.num_threads())


LONE_WEIGHTS = 2e7
LONE_WORK, LONE_TILE_WORK = 2e8, 8e8
"""A forward with fewer weights and fewer multiplications than these runs on one thread."""


def _num_threads(packing: Packing, num_weights: int, work: float) -> int:
    """Threads for a forward, or a product, of ``work`` multiplications, without a measurement.

    More than one if they save more time than waking them takes: they sleep while a round drafts,
    and are awake from a forward's first product to its last.
    """
    tiles = packing in (Packing.TILES, Packing.TILE_BYTES)
    alone = num_weights < LONE_WEIGHTS and work < (LONE_TILE_WORK if tiles else LONE_WORK)
    return 1 if alone else kernels.num_threads()


def _path_addresses(rows: Rows) -> npt.NDArray[np.int64]:
    return rows.path_offset.astype(np.int64) * 4 + int(rows.paths.ctypes.data)


def _packed(count: int, rows: Rows, paths: npt.NDArray[np.int64]) -> _Rows:
    """``struct rows`` over the arrays of ``rows`` and ``paths``, which must outlive it."""
    return _Rows(
        count,
        rows.longest,
        rows.positions.ctypes.data,
        rows.slots.ctypes.data,
        rows.prefix_length.ctypes.data,
        rows.path_length.ctypes.data,
        rows.table_addresses.ctypes.data,
        paths.ctypes.data,
    )


def _address(value: Tensor | None) -> int | None:
    return None if value is None else value.data_ptr()
