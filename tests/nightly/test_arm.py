"""The variants for Arm, cross-compiled and run by an emulator: the same bits as here.

Needs Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user. What noise.c computes
there is compared every day, in tests/core/test_exact_math.py.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.demo import TARGET_DIR
from paceline.models import kernels
from paceline.models.kernels import build
from paceline.models.native_ops import NativeOps
from paceline.models.packing import Packing
from tests.core.runners import load_runner
from tests.core.test_variants import RECORDED, digest, outputs
from tests.nightly.recording import Recording

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
LIBRARIES = Path("/usr/aarch64-linux-gnu")
VARIANTS = [variant.name for variant in build.variants("aarch64")]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (COMPILER and EMULATOR and LIBRARIES.is_dir()),
        reason="needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the libraries and arm_forward are."""
    folder = tmp_path_factory.mktemp("arm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", str(COMPILER))
        made, failed = build.build(folder, "aarch64")
    assert not failed
    assert list(made) == VARIANTS
    source = Path(__file__).with_name("arm_forward.c")
    subprocess.run(
        [str(COMPILER), "-O1", "-Wall", "-Werror", source, "-o", folder / "arm_forward", "-ldl"],
        check=True,
        timeout=100,
    )
    return folder


def run(folder: Path, variant: str, *files: Path, processor: str = "max") -> str:
    command = [str(EMULATOR), "-cpu", processor, "-L", str(LIBRARIES), str(folder / "arm_forward")]
    library = folder / build.library_name(variant)
    done = subprocess.run(
        [*command, library, *files], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def asked(folder: Path, variant: str, processor: str) -> tuple[int, int, int]:
    """Its score, has_dots() and self_test()."""
    score, dots, digest = run(folder, variant, processor=processor).split()
    return int(score), int(dots), int(digest, 16)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_runs_where_the_processor_has_what_it_needs(folder: Path, variant: str) -> None:
    rank = {each.name: each.rank for each in build.variants("aarch64")}[variant]
    score, dots, found = asked(folder, variant, "max")
    assert (score, found) == (rank, kernels.SELF_TEST)
    assert dots == (2 if variant == "neon_bf16" else 0)
    score, _, found = asked(folder, variant, "cortex-a53")  # of the first with 64 bits
    assert (score, found) == ((rank, kernels.SELF_TEST) if variant == "neon" else (0, 0))


def same_bits(folder: Path, variant: str, recording: Recording, tmp_path: Path) -> None:
    record, out = tmp_path / "record", tmp_path / "out"
    recording.save(record)
    run(folder, variant, record, out)
    assert not recording.differing(out)


def as_dots(packing: Packing) -> Packing:
    return Packing.DOTS if packing == Packing.HALVES else packing


def record_forwards(dtype: str, packing: Callable[[Packing], Packing] = Packing) -> Recording:
    """Prompts, a chain beside a tree, single tokens, with the hash that every machine must have."""
    runner = load_runner(TARGET_DIR, dtype=DTYPES[dtype], numerics="portable", kv_tokens=400)
    assert isinstance(runner._ops, NativeOps)
    recording = Recording(runner._ops, packing)
    runner._ops = recording  # type: ignore[assignment]
    assert digest(outputs(runner)) == RECORDED["target", dtype]
    assert len(recording.results) == 2 + 3  # keys and values, and the logits of three forwards
    return recording


@pytest.mark.parametrize(
    ("variant", "dtype", "packing"),
    [
        *((variant, dtype, Packing) for variant in VARIANTS for dtype in DTYPES),
        ("neon_bf16", "bfloat16", as_dots),
    ],
)
def test_logits_of_the_demo_target_have_the_same_bits(
    folder: Path,
    variant: str,
    dtype: str,
    packing: Callable[[Packing], Packing],
    tmp_path: Path,
) -> None:
    same_bits(folder, variant, record_forwards(dtype, packing), tmp_path)


@pytest.mark.parametrize("int8", [False, True], ids=["float32 weights", "int8 weights"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_products_have_the_same_bits(
    folder: Path, variant: str, dtype: str, int8: bool, tmp_path: Path
) -> None:
    """Of the packings that the demo target does not have, for numbers of rows in all tiles."""
    generator = torch.Generator().manual_seed(3)
    ops = NativeOps(DTYPES[dtype], int8=int8, numerics="portable")
    recording = Recording(
        ops, lambda packing: Packing.BYTES if packing == Packing.TILE_BYTES else packing
    )
    weight = ops.pack(torch.randn(150, 84, generator=generator))
    assert weight.packing in (Packing.FLOATS, Packing.BYTES, Packing.TILE_BYTES)
    for rows in (1, 2, 3, 7, 16, 33):
        recording.linear(torch.randn(rows, 84, generator=generator).to(DTYPES[dtype]), weight)
    same_bits(folder, variant, recording, tmp_path)
