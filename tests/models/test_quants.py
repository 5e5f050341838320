"""GGUF's types: read as the package `gguf` does, and multiplied row by row in every variant."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.errors import InvalidArgument
from paceline.models import kernels
from paceline.models.native_ops import NativeOps
from paceline.models.packing import Packing
from paceline.models.quants import QUANT_TYPES, concatenate, nibbles, quantise, read_blocks
from tests.core.test_variants import digest

OUTPUTS, INPUTS = 40, 512
PACKINGS = {
    "Q4_0": Packing.NIBBLES,
    "Q4_1": Packing.NIBBLES,
    "Q5_0": Packing.OCTETS,
    "Q5_1": Packing.WIDE_OCTETS,
    "Q8_0": Packing.OCTETS,
    "Q4_K": Packing.WIDE_NIBBLES,
    "Q5_K": Packing.WIDE_OCTETS,
    "Q6_K": Packing.WIDE_OCTETS,
}
# Raised together with kernels.NUMERICS_VERSION, and with nothing else.
RECORDED = {
    ("Q4_0", "torch.float32"): "e6c7607fdd0a113a5d34a28496cac03a",
    ("Q4_0", "torch.bfloat16"): "f52cd4552fbe2cc7c9936bc339ebaf3b",
    ("Q4_1", "torch.float32"): "d27dc00962ae58a46283961ea5ec2b9a",
    ("Q4_1", "torch.bfloat16"): "aa2a82ff1d344a5fc68867713d6f6e46",
    ("Q5_0", "torch.float32"): "140e847f83acb0f6f56ae22b54d9b5a6",
    ("Q5_0", "torch.bfloat16"): "bd45d876dec0c9e31fe026eab04f3766",
    ("Q5_1", "torch.float32"): "68f834efe10a8c4b24f9d4a0b32397b7",
    ("Q5_1", "torch.bfloat16"): "38bc7e2145521b2be0b29b64a5fd7007",
    ("Q8_0", "torch.float32"): "01c54dcf55e498adebfa97afba02bebe",
    ("Q8_0", "torch.bfloat16"): "f669113b11d0dd7b794b052843afe661",
    ("Q4_K", "torch.float32"): "d103f3f7b51cb50e2489e9ccb40674cf",
    ("Q4_K", "torch.bfloat16"): "50eada0f60addf9fedcbc3384ce51cb0",
    ("Q5_K", "torch.float32"): "38669a6310e64d0d14ab64119fcb784e",
    ("Q5_K", "torch.bfloat16"): "a6ef5d85c8e23fde2089feab09fc3fd0",
    ("Q6_K", "torch.float32"): "fb4617e977b6c61ec55b69ab087e6f34",
    ("Q6_K", "torch.bfloat16"): "c2b1598b4e5dc3239e8b754ac47c344e",
}


def blocks(name: str) -> npt.NDArray[np.uint8]:
    """Any integers, with scales as models have them.  # [OUTPUTS, bytes]"""
    kind, rng = QUANT_TYPES[name], np.random.default_rng(7)
    raw = rng.integers(0, 256, (OUTPUTS, INPUTS // kind.inputs, kind.size), dtype=np.uint8)
    places = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
    for place in places.get(name, (0,)):
        scale = (rng.standard_normal(raw.shape[:2]) * 0.01).astype(np.float16)
        raw[..., place : place + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(OUTPUTS, -1)


def inputs(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    numbers = np.random.default_rng(3).standard_normal((count, INPUTS)).astype(np.float32)
    numbers[0, :32] = 0.0  # a block that has no scale
    numbers[-1, 32:64] *= 1e-38  # and one whose scale would be too small a number
    return torch.from_numpy(numbers).to(dtype)


@pytest.mark.parametrize("name", QUANT_TYPES)
def test_weights_are_those_of_the_package_gguf(name: str) -> None:
    raw = blocks(name)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    weight = read_blocks(raw, name)
    assert np.array_equal(weight.floats(), expected)
    ops = NativeOps(torch.float32)
    packed = ops.packer.pack_quantised(weight)
    assert packed.packing is PACKINGS[name]
    assert np.array_equal(ops.unpack(packed).numpy(), expected)
    assert np.array_equal(weight.widened().floats(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", QUANT_TYPES)
def test_products(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right within eight bits of the inputs; a row has the same bits alone and among others."""
    weight, x = read_blocks(blocks(name), name), inputs(19, dtype)
    exact = x.float().numpy() @ weight.floats().T
    found = set()
    for variant in kernels.runnable():
        monkeypatch.setenv("PACELINE_KERNELS", variant)
        ops = NativeOps(dtype)
        packed = ops.packer.pack_quantised(weight)
        together = ops.linear(x, packed)
        error = np.abs(together.float().numpy() - exact).max()
        assert error < 0.05 * exact.std()
        for count in (1, 2, 3, 4, 5, 8, 9):
            parts = [ops.linear(part.contiguous(), packed) for part in x.split(count)]
            assert torch.equal(torch.cat(parts), together), (variant, count)
        found.add(digest([together]))
    assert found == {RECORDED[name, str(dtype)]}


def test_products_with_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, bias = NativeOps(torch.float32), torch.arange(OUTPUTS, dtype=torch.float32)
    packed, x = ops.packer.pack_quantised(read_blocks(blocks("Q4_1"), "Q4_1")), inputs(5)
    assert torch.equal(ops.linear(x, packed, bias), ops.linear(x, packed) + bias)


def test_parts_of_different_types_keep_their_weights() -> None:
    parts = [read_blocks(blocks(name), name) for name in ("Q4_K", "Q6_K", "Q8_0")]
    ops = NativeOps(torch.float32)
    packed = ops.packer.pack_quantised(concatenate(parts))
    expected = np.concatenate([part.floats() for part in parts])
    assert np.array_equal(ops.unpack(packed).numpy(), expected)


def test_nibbles_are_those_of_q4_1() -> None:
    """No further from the weights than the reference, which rounds scales last."""
    weight = np.random.default_rng(2).normal(size=(48, 96)).astype(np.float32)
    ours, theirs = nibbles(weight), quantise(weight, "Q4_1")
    assert np.array_equal(ours.least, theirs.least)
    assert np.allclose(ours.scale, theirs.scale, rtol=2e-3)
    assert np.abs(ours.q - theirs.q).max() <= 1
    assert (np.abs(ours.q - theirs.q) > 0).mean() < 0.01
    errors = [np.abs(each.floats() - weight).mean() for each in (ours, theirs)]
    assert errors[0] <= 1.001 * errors[1]


def test_ops_round_to_nibbles_where_blocks_fit() -> None:
    ops = NativeOps(torch.float32, int8=True, int4=True)
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(3))
    packed = ops.pack(weight)
    assert packed.packing is Packing.NIBBLES
    assert np.array_equal(ops.unpack(packed).numpy(), nibbles(weight.numpy()).floats())
    assert ops.pack(weight[:, :90].contiguous()).packing in (Packing.BYTES, Packing.TILE_BYTES)


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="IQ2_XXS"):
        read_blocks(np.zeros((4, 66), np.uint8), "IQ2_XXS")
