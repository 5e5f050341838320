"""What the kernels were called with, as a file that arm_forward.c computes once more."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.models.native_ops import NativeOps
from paceline.models.native_structs import CLayer, CModel, CRows, path_addresses
from paceline.models.ops import Layer, Stack
from paceline.models.packing import Packing, Weight
from paceline.models.rows import Rows

Tensor = torch.Tensor
RUN_LAYERS, RMSNORM, LINEAR = range(3)
_LINE = 64


class Recording:
    """Ops that compute with the kernels of this machine and write down what they are given.

    A result of one call that the next is given is not recorded but computed again: a forward's
    embeddings go in, and all that follows from them must come out.

    Args:
        packing: another one for weights that are packed alike.
    """

    def __init__(self, ops: NativeOps, packing: Callable[[Packing], Packing] = Packing) -> None:
        self._ops, self._packing = ops, packing
        self._narrow = int(ops.packer.dtype is torch.bfloat16)
        self._memory = bytearray(_LINE)  # 0 is no pointer
        self._pointers: list[int] = []
        self._calls: list[tuple[int, ...]] = []
        # By the address here; arrays are kept alive, lest another one gets the address.
        self._placed: dict[int, tuple[int, Any]] = {}
        self.results: list[tuple[int, Tensor]] = []
        """Where each result is, and what it was here."""

    # --- memory --------------------------------------------------------------------------------

    def _place(self, data: bytes) -> int:
        at = len(self._memory)
        self._memory += data + bytes(-len(data) % _LINE)
        return at

    def _once(self, value: Tensor | None) -> int:
        """Where a tensor is: as it was when it was seen first."""
        if value is None:
            return 0
        assert value.is_contiguous()
        if value.data_ptr() not in self._placed:
            raw = value.detach().flatten().view(torch.uint8).numpy().tobytes()
            self._placed[value.data_ptr()] = self._place(raw), value
        return self._placed[value.data_ptr()][0]

    def _point(self, at: int, target: int) -> None:
        self._memory[at : at + 8] = struct.pack("<q", target)
        if target:
            self._pointers.append(at)

    def _pointers_to(self, targets: list[int]) -> int:
        at = self._place(bytes(8 * len(targets)))
        for i, target in enumerate(targets):
            self._point(at + 8 * i, target)
        return at

    def _struct(self, value: ctypes.Structure, targets: dict[str, int]) -> int:
        at = self._place(bytes(value))
        for name, target in targets.items():
            self._point(at + getattr(type(value), name).offset, target)
        return at

    def _rows(self, rows: Rows, count: int) -> int:
        paths = path_addresses(rows)
        arrays = ("positions", "slots", "prefix_length", "path_length")
        # Neighbours that have one table share it: attention looks whether they do.
        tables = {id(table): table for table in rows.tables}
        tables_at = {key: self._place(table.tobytes()) for key, table in tables.items()}
        paths_at = self._place(rows.paths.tobytes())
        return self._struct(
            CRows.of(count, rows, paths),
            {
                **{name: self._place(getattr(rows, name).tobytes()) for name in arrays},
                "prefix": self._pointers_to([tables_at[id(table)] for table in rows.tables]),
                "path": self._pointers_to(
                    [paths_at + 4 * int(first) for first in rows.path_offset]
                ),
            },
        )

    def _stack(self, stack: Stack, num_slots: int) -> tuple[int, int]:
        model, layers = self._ops._table(stack, num_slots, 1, 1)
        assert isinstance(model, CModel)
        tables = {"cos_sin": stack.cos_sin, "local_cos_sin": stack.local_cos_sin}
        places = {name: self._once(each) for name, each in tables.items() if each is not None}
        model_at = self._struct(model, places)
        layers_at = self._place(bytes(layers))
        for i, layer in enumerate(stack.layers):
            for field in fields(Layer):
                value = getattr(layer, field.name)
                at = layers_at + i * ctypes.sizeof(CLayer) + getattr(CLayer, field.name).offset
                if isinstance(value, Weight):
                    self._point(at, self._once(value.data))
                    self._memory[at + 8 : at + 16] = struct.pack("<q", self._packing(value.packing))
                elif isinstance(value, Tensor):
                    self._point(at, self._once(value))
        return model_at, layers_at

    # --- calls ---------------------------------------------------------------------------------

    def _call(self, function: int, *arguments: int) -> None:
        self._calls.append((function, self._narrow, *arguments, *[0] * (9 - len(arguments))))

    def _result(self, out: Tensor) -> None:
        self.results.append((self._placed[out.data_ptr()][0], out))

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
        assert states is None
        model, layers = self._stack(stack, keys.shape[1])
        places = self._once(x), self._once(keys), self._once(values), self._rows(rows, len(x))
        self._call(RUN_LAYERS, model, layers, first, last, *places)
        self._ops.run_layers(stack, first, last, x, keys, values, rows)
        if not any(out is keys for _, out in self.results):
            self._result(keys)
            self._result(values)

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.zeros_like(x)
        x_at, weight_at, out_at = self._once(x), self._once(weight), self._once(out)
        (bits,) = struct.unpack("<i", struct.pack("<f", eps))
        self._call(RMSNORM, x_at, weight_at, out_at, *x.shape, bits)
        out.copy_(self._ops.rmsnorm(x, weight, eps))
        return out

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        out = x.new_zeros(len(x), weight.num_outputs)
        x_at, data_at, bias_at, out_at = map(self._once, (x, weight.data, bias, out))
        packing = self._packing(weight.packing)
        self._call(LINEAR, x_at, data_at, packing, bias_at, out_at, *x.shape, weight.num_outputs)
        out.copy_(self._ops.linear(x, weight, bias))
        self._result(out)
        return out

    def logits(self, stack: Stack, hidden: Tensor, head: Weight) -> Tensor:
        assert not stack.differs.finishes_logits, "it is not recorded"
        return self.linear(hidden, head).float()

    # --- files ---------------------------------------------------------------------------------

    def save(self, file: Path) -> None:
        counts = len(self._pointers), len(self._calls), len(self._memory)
        numbers = [*counts, *self._pointers, *(n for call in self._calls for n in call)]
        file.write_bytes(np.array(numbers, np.int64).tobytes() + bytes(self._memory))

    def differing(self, file: Path) -> list[str]:
        """Results with other bits in the memory that arm_forward.c has written."""
        data, wrong = np.fromfile(file, np.uint8), []
        for i, (at, result) in enumerate(self.results):
            here = result.flatten().view(torch.uint8).numpy()
            there = data[at : at + here.size]
            if differ := int((here != there).sum()):
                wrong.append(f"result {i}: {differ} of {here.size} bytes")
        return wrong
