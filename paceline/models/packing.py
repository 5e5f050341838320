"""The layouts of weight matrices in memory, and the way into them and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
import torch.nn.functional as F

from paceline.models import kernels
from paceline.models.quants import Quantised, nibbles

Tensor = torch.Tensor


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


class Packer:
    """Brings weights into the layouts that the C kernels read.

    Args:
        dtype: of activations.
        int8: round weights to eight bits, output by output, and inputs of products, row by row.
            Only for models that draft: results change.
        int4: round weights to blocks of four bits where 32 divides their inputs. Likewise.
        numerics: "portable" computes the same bits on every processor; "fastest" also uses
            instructions that sum in an order of their own.

    Attributes:
        packings: of the weights that a model computes with.
    """

    _WIDTH = 16  # outputs in a panel of packed weights
    _TILE_INPUTS = 32  # for matrix tiles, inputs are padded to a multiple of this

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        int8: bool = False,
        int4: bool = False,
        numerics: str = "fastest",
    ) -> None:
        self.dtype, self.int8, self.int4 = dtype, int8, int4
        self._tiles = kernels.has_tiles()
        self._tile_numerics = self._tiles and numerics == "fastest"
        dots = kernels.has_dots() and (numerics == "fastest" or kernels.dots_are_portable())
        self._dots = dots and dtype is torch.bfloat16
        self.packings: set[Packing] = set()

    @property
    def layout(self) -> tuple[object, ...]:
        """The properties that determine the layout of packed weights."""
        return str(self.dtype), self.int8, self._tiles, self._tile_numerics, self._dots

    @property
    def numerics_class(self) -> str:
        """Of products with these weights; known once all of them are packed."""
        if Packing.TILES in self.packings:
            return "amx"
        dots = Packing.DOTS in self.packings and not kernels.dots_are_portable()
        return "bf16dot" if dots else "portable"

    def pack(self, weight: Tensor) -> Weight:
        """Bring a weight into the smallest layout that keeps its numbers.  # [outputs, inputs]"""
        if self.int4 and weight.shape[1] % 32 == 0:
            return self.pack_quantised(nibbles(weight.float().numpy()))
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
        if self.int8:
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
        return torch.from_numpy(whole[: weight.num_outputs]).to(self.dtype).contiguous()

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
        """The weight that :meth:`pack` packed.  # [outputs, inputs]"""
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
        return rows[: weight.num_outputs, : weight.num_inputs].to(self.dtype).contiguous()

    def unpack_rows(self, weight: Weight) -> Iterator[Tensor]:
        """As :meth:`unpack`, some outputs at a time."""
        step = self._rows_at_a_time(weight.num_inputs)
        for start in range(0, weight.num_outputs, step):
            panels = weight.data[start // self._WIDTH : (start + step) // self._WIDTH]
            count = min(step, weight.num_outputs - start)
            yield self.unpack(Weight(panels, count, weight.num_inputs, weight.packing))
