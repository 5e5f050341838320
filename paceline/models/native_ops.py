"""The arithmetic of a Llama-type model in the C kernels: all layers in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from paceline.models import kernels
from paceline.models.native_structs import (
    CLayer,
    CModel,
    CRows,
    CShortlist,
    CWeight,
    address,
    check_structs,
    path_addresses,
)
from paceline.models.ops import Fuse, Shortlist, Stack
from paceline.models.packing import Packer, Packing, Weight
from paceline.models.rows import Rows
from paceline.models.threads import Threads
from paceline.types import FloatArray, IntArray

Tensor = torch.Tensor


class NativeOps:
    """The C kernels, for CPU tensors in float32 or bfloat16; each row is computed by itself.

    Args:
        dtype, int8, int4, numerics: see :class:`paceline.models.packing.Packer`.

    Attributes:
        packer: packs the weights that this multiplies with.
        threads: measured; until then, the number follows from the work.
    """

    _DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}  # noqa: RUF012
    _MAX_HEAD_DIM = 256

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
        self,
        dtype: torch.dtype,
        *,
        int8: bool = False,
        int4: bool = False,
        numerics: str = "fastest",
    ) -> None:
        library, suffix = kernels.load(), self._DTYPES[dtype]
        check_structs(library)
        kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float, "n": ctypes.c_size_t}

        def function(name: str, signature: str) -> Any:
            result = getattr(library, f"{name}_{suffix}")
            result.argtypes, result.restype = [kinds[letter] for letter in signature], ctypes.c_int
            return result

        self._run_layers = function("run_layers", "ppiippppp")
        self._rmsnorm = function("rmsnorm", "pppiif")
        self._finish_logits = function("finish_logits", "ppn")
        self._linear = function("linear", "ppippiiii")
        self._greedy_chain = function("greedy_chain", "ppipppippppppipiipppipppp")
        self.packer = Packer(dtype, int8=int8, int4=int4, numerics=numerics)
        self._tables: dict[int, tuple[Stack, Any, Any, int]] = {}
        self.threads: Threads | None = None

    @property
    def numerics_class(self) -> str:
        """See :mod:`paceline.numerics`; known once all weights are packed."""
        return self.packer.numerics_class

    def pack(self, weight: Tensor) -> Weight:
        return self.packer.pack(weight)

    def unpack(self, weight: Weight) -> Tensor:
        return self.packer.unpack(weight)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        rows, inputs = x.shape
        size = weight.num_outputs * inputs
        out = x.new_empty(rows, weight.num_outputs)
        failed = self._linear(
            x.data_ptr(),
            weight.data.data_ptr(),
            weight.packing,
            address(bias),
            out.data_ptr(),
            rows,
            inputs,
            weight.num_outputs,
            self._num_threads(rows, weight.packing, size, size * rows),
        )
        if failed:
            raise MemoryError("no memory for a product")
        return out

    def logits(self, stack: Stack, hidden: Tensor, head: Weight) -> Tensor:
        product = self.linear(hidden, head)
        if stack.differs.finishes_logits:
            model = CModel.of(stack, 0)
            self._finish_logits(ctypes.addressof(model), product.data_ptr(), product.numel())
        return product.float()

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
        paths = path_addresses(rows)
        packed = CRows.of(len(x), rows, paths)
        failed = self._run_layers(
            ctypes.addressof(model),
            ctypes.addressof(layers),
            first,
            last,
            x.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            ctypes.addressof(packed),
            address(states),
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
        vocabulary: Tensor | None = None,
        shortlist: Shortlist | None = None,
    ) -> IntArray:
        """Give sequences some tokens and continue each by argmax.

        Args:
            num_layers: number of the stack's layers that take part.
            final_norm: None where logits come from the last state as it is.
            rows: of the given tokens and then of all further steps, one step after the other.
            given: the tokens that each sequence has not seen, at least one; exactly one with
                ``states``.
            states: filled with what comes out of each layer.
                # [num_steps, num_layers, num_sequences, hidden]
            fuse: for drafters that read features; see there.
            stop_below: a sequence ends after a token whose probability is less than this.
                # [num_steps, num_sequences]
            vocabulary: the token of each of the head's logits; None if they are all tokens.
                # int64 [num_logits]
            shortlist: of the head's logits; None: all of them are computed.

        Returns:
            The new tokens; -1 behind the end of a sequence.  # [num_steps, num_sequences]
        """
        count, sizes = len(given), [len(tokens) for tokens in given]
        model, layers = self._table(stack, keys.shape[1], sum(sizes), rows.longest)
        assert sum(sizes) == count or states is None
        assert fuse is None or len(fuse.features) == sum(sizes)
        flat = np.fromiter(chain.from_iterable(given), np.int64, sum(sizes))
        ends = np.cumsum(sizes, dtype=np.int32) - np.int32(1)
        paths = path_addresses(rows)
        packed = CRows.of(len(flat), rows, paths)
        tokens = np.empty((num_steps, count), np.int64)
        lengths = np.full(count, num_steps, np.int32)
        head_weight = CWeight.of(head)
        likely = None if shortlist is None else CShortlist.of(shortlist)
        fusing: tuple[int | None, ...] = (None, 0, None, None)
        if fuse is not None:
            fuse_weight = CWeight.of(fuse.weight)
            fusing = (
                ctypes.addressof(fuse_weight), fuse.layer, address(fuse.bias),
                fuse.features.data_ptr(),
            )  # fmt: skip
        failed = self._greedy_chain(
            ctypes.addressof(model),
            ctypes.addressof(layers),
            num_layers,
            embedding.data_ptr(),
            address(final_norm),
            ctypes.addressof(head_weight),
            head.num_outputs,
            address(vocabulary),
            None if likely is None else ctypes.addressof(likely),
            keys.data_ptr(),
            values.data_ptr(),
            ctypes.addressof(packed),
            flat.ctypes.data,
            len(flat),
            ends.ctypes.data,
            count,
            num_steps,
            tokens.ctypes.data,
            address(states),
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
            model = CModel.of(stack, num_slots)
            layers = (CLayer * len(stack.layers))(*map(CLayer.of, stack.layers))
            size = sum(w.num_outputs * w.num_inputs for y in stack.layers for w in y.products())
            self._tables[id(stack)] = (stack, model, layers, size)
        _, model, layers, size = self._tables[id(stack)]
        heads = len(stack.layers) * stack.num_heads * stack.head_dim
        packing, work = stack.layers[0].qkv.packing, num_rows * (size + 2.0 * heads * longest)
        model.threads = self._num_threads(num_rows, packing, size, work)
        return model, layers

    def forget(self, stack: Stack) -> None:
        """Free the structures of a stack that is no longer used."""
        self._tables.pop(id(stack), None)

    def _num_threads(self, rows: int, packing: Packing, num_weights: int, work: float) -> int:
        if self.threads is None:
            return _num_threads(rows, packing, num_weights, work)
        return min(self.threads.of(rows), kernels.num_threads())


LONE_WEIGHTS = 2e7
LONE_WORK, LONE_PROMPT_WORK, LONE_TILE_WORK = 2e8, 3e7, 8e8
"""A forward with fewer weights and fewer multiplications than these runs on one thread."""
PROMPT_ROWS = 32
"""As many rows are a prompt: each of its products is long enough to share."""


def _num_threads(rows: int, packing: Packing, num_weights: int, work: float) -> int:
    """Threads for a forward, or a product, of ``work`` multiplications, without a measurement.

    More than one if they save more time than waking them takes: they sleep while a round drafts,
    and are awake from a forward's first product to its last.
    """
    tiles = packing in (Packing.TILES, Packing.TILE_BYTES)
    least = LONE_PROMPT_WORK if rows >= PROMPT_ROWS else LONE_WORK
    alone = num_weights < LONE_WEIGHTS and work < (LONE_TILE_WORK if tiles else least)
    return 1 if alone else kernels.num_threads()
