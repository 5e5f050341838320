"""Products on matrix tiles; where there are none, their instructions are in plain C."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.models import kernels
from paceline.models.kernels import build
from paceline.models.native_ops import NativeOps
from paceline.models.packing import Packing
from tests.core.runners import load_runner
from tests.core.test_kernels import DTYPES, TOLERANCE
from tests.core.test_variants import outputs

# Compiling the emulation takes a minute.
pytestmark = pytest.mark.slow

EMULATION = Path(__file__).with_name("tiles_emulated.h")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The variant `amx`, compiled for the processor's own vectors and emulated tiles."""
    if platform.machine() != "x86_64" or "avx512_bf16" not in kernels.runnable():
        pytest.skip("what is around the tiles needs AVX-512 with bfloat16")
    command = build.compiler()
    assert command is not None
    (amx,) = [variant for variant in build.variants() if variant.name == "amx"]
    folder, objects = tmp_path_factory.mktemp("tiles"), []
    for source, flags in build._objects(amx):
        made = str(folder / f"{source}.o")
        mine = [flag for flag in flags if not flag.startswith("-mamx")]
        if source == "matmul.c":
            mine += ["-include", str(EMULATION)]
        arguments = [*command, *build.FLAGS, *mine, "-c", str(build.FOLDER / source), "-o", made]
        subprocess.run(arguments, check=True)
        objects.append(made)
    target = folder / build.library_name("amx")
    subprocess.run(
        [*command, "-shared", "-fopenmp", *objects, "-o", str(target), "-lm"], check=True
    )
    return kernels._open(target)


@pytest.fixture
def tiles(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are loaded now compute with it."""
    monkeypatch.setattr(kernels, "_load", lambda wanted, cache: ("amx", library))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("outputs", [1, 16, 17, 64, 80, 144, 258])
@pytest.mark.parametrize("inputs", [2, 30, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(inputs * outputs)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16().to(dtype)
    offset = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    x = torch.randn(101, inputs, generator=generator).to(dtype)
    native = NativeOps(dtype)
    packed = native.pack(weight)
    assert packed.packing is Packing.TILES
    assert native.numerics_class == "amx"
    assert torch.equal(native.unpack(packed), weight)
    together = native.linear(x, packed, offset)
    expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    torch.testing.assert_close(
        together.double(), expected, atol=TOLERANCE[dtype] * inputs**0.5, rtol=TOLERANCE[dtype]
    )
    for start, size in ((0, 1), (5, 2), (20, 17), (36, 33), (0, 65)):
        part = native.linear(x[start : start + size].contiguous(), packed, offset)
        assert torch.equal(part, together[start : start + size])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 1), (36, 17), (160, 480), (66, 258)])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_weights(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
    """The same integers as without tiles."""
    generator = torch.Generator().manual_seed(inputs * outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    offset = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    native = NativeOps(dtype, int8=True)
    packed = native.pack(weight)
    assert packed.packing is Packing.TILE_BYTES
    without = replace(packed, packing=Packing.BYTES)
    for rows in (1, 6, 7, 16, 17, 40):
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        expected = native.linear(x, without, offset)
        assert torch.equal(native.linear(x, packed, offset), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_models(dtype: torch.dtype, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with vectors: up to rounding, and drafts in int8 exactly."""
    found = []
    for choose in (False, True):
        if choose:
            monkeypatch.setattr(kernels, "_load", lambda wanted, cache: ("amx", library))
        target = load_runner(TARGET_DIR, dtype=dtype, kv_tokens=400)
        drafter = load_runner(DRAFTER_DIR, int8=True, kv_tokens=400)
        found.append((outputs(target), outputs(drafter)))
    (vectors, drafts), (tiles, tile_drafts) = found
    for one, other in zip(vectors, tiles, strict=True):
        error = (one.float() - other.float()).square().mean().sqrt()
        assert error < (2e-5 if dtype is torch.float32 else 5e-2) * one.float().std()
    assert all(torch.equal(*pair) for pair in zip(drafts, tile_drafts, strict=True))
