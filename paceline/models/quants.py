"""Weights in blocks of small integers: GGUF's types, read exactly.

A weight is ``scale * q + least`` with a scale and a least of its block of neighbouring inputs. The
layouts of blocks are those that ggml's ggml-common.h defines; :mod:`gguf.quants` is the tests'
reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidArgument

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """A weight matrix.

    Attributes:
        q: [outputs, inputs]; 0 to 15 if ``bits`` is 4, else -128 to 127.
        scale: [outputs, blocks].
        least: [outputs, blocks], what a q of 0 stands for; None: 0 everywhere.
    """

    q: Integers
    scale: Floats
    least: Floats | None
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.q.shape
        return outputs, inputs

    @property
    def block(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // len(self.scale[0])

    def rows(self, index: npt.NDArray[np.int64] | slice) -> Quantised:
        """Some of the outputs."""
        least = None if self.least is None else self.least[index]
        return Quantised(self.q[index], self.scale[index], least, self.bits)

    def floats(self) -> Floats:
        """The weights that the blocks encode.  # [outputs, inputs]"""
        out = self.q.reshape(*self.scale.shape, self.block) * self.scale[:, :, None]
        if self.least is not None:
            out += self.least[:, :, None]
        return out.reshape(self.q.shape)

    def widened(self) -> Quantised:
        """The same in the layout that holds every type: 8 bits, blocks of 16, with a least."""
        times = self.block // 16
        least = np.zeros_like(self.scale) if self.least is None else self.least
        return Quantised(self.q, np.repeat(self.scale, times, 1), np.repeat(least, times, 1), 8)


def concatenate(parts: Sequence[Quantised]) -> Quantised:
    """Concatenate the outputs of several matrices with the same inputs."""
    kinds = {(part.bits, part.block, part.least is None) for part in parts}
    if len(kinds) > 1:
        parts = [part.widened() for part in parts]
    least = None
    if all(part.least is not None for part in parts):
        least = np.concatenate([part.least for part in parts if part.least is not None])
    return Quantised(
        np.concatenate([part.q for part in parts]),
        np.concatenate([part.scale for part in parts]), least, parts[0].bits,
    )  # fmt: skip


def _half(raw: Bytes) -> Floats:
    """float16 numbers.  # [..., 2 * n] bytes -> [..., n]"""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _halves_of_bytes(raw: Bytes) -> Bytes:
    """First the low four bits of all bytes, then the high ones.  # [..., n] -> [..., 2 * n]"""
    return np.concatenate([raw & 15, raw >> 4], -1)


def _bits(raw: Bytes) -> Bytes:
    """# [..., n] bytes -> [..., 8 * n] zeros and ones, lowest first"""
    return np.unpackbits(raw, axis=-1, bitorder="little")


def _q4_0(raw: Bytes) -> Quantised:
    scale = _half(raw[..., :2])[..., 0]
    return _quantised(_halves_of_bytes(raw[..., 2:]), scale, -8 * scale, 4)


def _q4_1(raw: Bytes) -> Quantised:
    scale, least = np.moveaxis(_half(raw[..., :4]), -1, 0)
    return _quantised(_halves_of_bytes(raw[..., 4:]), scale, least, 4)


def _q5_0(raw: Bytes) -> Quantised:
    q = _halves_of_bytes(raw[..., 6:]) | _bits(raw[..., 2:6]) << 4
    return _quantised(q.astype(np.int8) - np.int8(16), _half(raw[..., :2])[..., 0], None, 8)


def _q5_1(raw: Bytes) -> Quantised:
    scale, least = np.moveaxis(_half(raw[..., :4]), -1, 0)
    return _quantised(_halves_of_bytes(raw[..., 8:]) | _bits(raw[..., 4:8]) << 4, scale, least, 8)


def _q8_0(raw: Bytes) -> Quantised:
    return _quantised(raw[..., 2:], _half(raw[..., :2])[..., 0], None, 8)


def _six_bits(raw: Bytes) -> tuple[Bytes, Bytes]:
    """Scales and leasts of the 8 blocks of Q4_K and Q5_K.  # [..., 12] -> 2 x [..., 8]"""
    first, second, third = raw[..., :4], raw[..., 4:8], raw[..., 8:]
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], -1)
    least = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], -1)
    return scale, least


def _k_scales(raw: Bytes) -> tuple[Floats, Floats]:
    both = _half(raw[..., :4])
    scale, least = _six_bits(raw[..., 4:16])
    return both[..., :1] * scale, -both[..., 1:] * least


def _q4_k(raw: Bytes) -> Quantised:
    scale, least = _k_scales(raw)
    chunks = raw[..., 16:].reshape(*raw.shape[:-1], 4, 32)
    return _quantised(_halves_of_bytes(chunks), scale, least, 4)


def _q5_k(raw: Bytes) -> Quantised:
    scale, least = _k_scales(raw)
    chunks = raw[..., 48:].reshape(*raw.shape[:-1], 4, 32)
    fifth = _bits(raw[..., 16:48, None]).swapaxes(-1, -2)  # [..., 8, 32]
    q = _halves_of_bytes(chunks).reshape(fifth.shape) | fifth << 4
    return _quantised(q, scale, least, 8)


def _q6_k(raw: Bytes) -> Quantised:
    low = _halves_of_bytes(raw[..., :128].reshape(*raw.shape[:-1], 2, 64))  # [..., 2, 128]
    pairs = raw[..., 128:192].reshape(*raw.shape[:-1], 2, 1, 32)
    high = pairs >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3  # [..., 2, 4, 32]
    q = (low.reshape(high.shape) | high << 4).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(raw[..., 192:208]).view(np.int8)
    return _quantised(q, _half(raw[..., 208:]) * scales, None, 8)


def _quantised(
    q: npt.NDArray[np.uint8] | Integers, scale: Floats, least: Floats | None, bits: int
) -> Quantised:
    """# [outputs, super-blocks, ...] each"""
    outputs = len(q)
    flat = None if least is None else least.reshape(outputs, -1)
    whole = np.ascontiguousarray(q).view(np.int8).reshape(outputs, -1)
    return Quantised(whole, np.ascontiguousarray(scale).reshape(outputs, -1), flat, bits)


@dataclass(frozen=True, slots=True)
class QuantType:
    """One of GGUF's types.

    Attributes:
        inputs: of a block as the file holds them.
        size: bytes of such a block.
    """

    inputs: int
    size: int
    read: Callable[[Bytes], Quantised]


QUANT_TYPES = {
    "Q4_0": QuantType(32, 18, _q4_0),
    "Q4_1": QuantType(32, 20, _q4_1),
    "Q5_0": QuantType(32, 22, _q5_0),
    "Q5_1": QuantType(32, 24, _q5_1),
    "Q8_0": QuantType(32, 34, _q8_0),
    "Q4_K": QuantType(256, 144, _q4_k),
    "Q5_K": QuantType(256, 176, _q5_k),
    "Q6_K": QuantType(256, 210, _q6_k),
}


def quantise(weight: Floats, name: str) -> Quantised:
    """Round a matrix, as llama.cpp does.

    Args:
        weight: [outputs, inputs].
        name: Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0.

    Raises:
        InvalidArgument: the number of inputs is not a multiple of the block.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    kind = QUANT_TYPES[name]
    if weight.shape[1] % kind.inputs:
        allowed = f"float32, bfloat16 or int8: {weight.shape[1]} inputs are not a multiple of 32"
        raise InvalidArgument("dtype", name.lower(), allowed)
    return read_blocks(quantize(weight, GGMLQuantizationType[name]), name)


def nibbles(weight: Floats) -> Quantised:
    """Round a matrix to blocks of 4 bits between their least and their greatest number, as Q4_1.

    # [outputs, inputs], inputs a multiple of 32
    """
    blocks = weight.reshape(len(weight), -1, 32)
    least = blocks.min(-1).astype(np.float16).astype(np.float32)
    scale = ((blocks.max(-1) - least) / 15).astype(np.float16).astype(np.float32)
    q = (blocks - least[..., None]) / np.maximum(scale, np.finfo(np.float16).tiny)[..., None]
    whole = q.round().clip(0, 15).astype(np.int8)
    return Quantised(whole.reshape(weight.shape), scale, least, 4)


def read_blocks(raw: Bytes, name: str) -> Quantised:
    """A matrix as a GGUF file holds it.

    Args:
        raw: [outputs, bytes].
        name: of the type, as in ``QUANT_TYPES``.

    Raises:
        InvalidArgument: another type.
    """
    kind = QUANT_TYPES.get(name)
    if kind is None:
        raise InvalidArgument("type", name, f"one of {', '.join(QUANT_TYPES)}")
    return kind.read(raw.reshape(len(raw), -1, kind.size))
