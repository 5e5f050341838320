"""The C kernels and plain torch compute the same; the kernels do so on any number of threads."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.demo import TARGET_DIR
from paceline.errors import InvalidArgument
from paceline.loading import limit_threads
from paceline.models import kernels, native_ops, native_structs
from paceline.models.base import Segment
from paceline.models.kernels import build
from paceline.models.llama import LlamaRunner
from paceline.models.native_ops import NativeOps
from paceline.models.packing import Packing
from paceline.models.torch_ops import TorchOps
from tests.core.runners import load_runner, load_runner_without_kernels
from tests.modelzoo import make_model

DTYPES = [torch.float32, torch.bfloat16]
# A unit in the last place of a bfloat16 is 1/128 of the value; sums round once per term at worst.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def test_the_kernels_are_built_here() -> None:
    usable, where = kernels.status()
    assert usable, where


def test_structures_have_the_size_that_they_have_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    native_structs.check_structs(kernels.load())
    rows, model, *others = native_structs.STRUCTS
    longer = type("CModel", (ctypes.Structure,), {"_fields_": [*model._fields_, *EXTRA]})
    monkeypatch.setattr(native_structs, "STRUCTS", (rows, longer, *others))
    size = ctypes.sizeof(model)
    with pytest.raises(
        RuntimeError, match=f"struct model has {size + 8} bytes in .*, and {size} in"
    ):
        NativeOps(torch.float32)


EXTRA = [("added", ctypes.c_int64)]
VARIANTS = [variant.name for variant in build.variants() if kernels._may_run(variant.name)]


@pytest.fixture
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Chooses it; skips where the processor does not run it."""
    name: str = request.param
    if name not in kernels.runnable():  # not at import: that would build them to collect the tests
        pytest.skip(f"this processor does not run {name}")
    monkeypatch.setenv("PACELINE_KERNELS", name)
    return name


@pytest.mark.one_of(5, slow=2)
@pytest.mark.parametrize("variant", VARIANTS, indirect=True)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["floats", "halves"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 64, 258])
@pytest.mark.parametrize("inputs", [2, 6, 130, 2066])  # the last takes several chunks
@pytest.mark.parametrize("bias", [False, True])
def test_linear(
    inputs: int,
    outputs: int,
    bias: bool,
    dtype: torch.dtype,
    weights: torch.dtype,
    variant: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(inputs * outputs)
    weight = torch.randn(outputs, inputs, generator=generator, dtype=torch.float32)
    weight = weight.to(weights).to(dtype)
    offset = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    monkeypatch.setattr(native_ops, "LONE_WEIGHTS", 0)  # threads share what they can
    native = NativeOps(dtype)
    packed = native.pack(weight)
    if torch.bfloat16 not in (weights, dtype):
        assert packed.packing is Packing.FLOATS
    elif variant == "amx":
        assert packed.packing is Packing.TILES
    else:
        dots = dtype is torch.bfloat16 and variant in ("avx512_bf16", "neon_bf16")
        assert packed.packing is (Packing.DOTS if dots else Packing.HALVES)
    assert torch.equal(native.unpack(packed), weight)
    whole = torch.randn(101, inputs, generator=generator).to(dtype)
    expected = F.linear(
        whole.double(), weight.double(), None if offset is None else offset.double()
    )
    together = native.linear(whole, packed, offset)
    assert together.shape == (101, outputs)
    torch.testing.assert_close(
        together.double(), expected, atol=TOLERANCE[dtype] * inputs**0.5, rtol=TOLERANCE[dtype]
    )
    for start, size in ((0, 1), (5, 2), (9, 7), (20, 17), (36, 1), (40, 60), (0, 101)):
        for threads in (1, 2):
            limit_threads(threads)
            part = native.linear(whole[start : start + size].contiguous(), packed, offset)
            assert torch.equal(part, together[start : start + size])


def test_tiles_round_float32_no_more_than_the_platforms_product() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(320, 416, generator=generator).bfloat16().float()
    x = torch.randn(40, 416, generator=generator)
    exact = x.double() @ weight.double().T
    native = NativeOps(torch.float32)
    error = (native.linear(x, native.pack(weight)).double() - exact).square().mean().sqrt()
    assert error < 3 * (F.linear(x, weight).double() - exact).square().mean().sqrt()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 1), (30, 17), (160, 480), (418, 258)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("variant", VARIANTS, indirect=True)
def test_int8_weights(
    inputs: int, outputs: int, bias: bool, dtype: torch.dtype, variant: str
) -> None:
    """Exactly the product of what inputs and weights are rounded to; a row at a time, too."""
    generator = torch.Generator().manual_seed(inputs * outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    offset = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    x = torch.randn(101, inputs, generator=generator).to(dtype)
    x[7] = 0.0
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    whole = (weight.float() / scale).round()
    step = x.float().abs().amax(1, keepdim=True) / 127
    rounded = torch.where(step > 0, x.float() * (1 / step), 0.0).round()
    expected = (rounded.double() @ whole.double().T) * step.double() * scale[:, 0].double()
    native = NativeOps(dtype, int8=True)
    packed = native.pack(weight)
    assert packed.packing is (Packing.TILE_BYTES if variant == "amx" else Packing.BYTES)
    assert torch.equal(native.unpack(packed), (whole * scale).to(dtype))
    together = native.linear(x, packed, offset)
    torch.testing.assert_close(
        together.double(), expected + (0 if offset is None else offset.double()),
        atol=1e-4 if dtype is torch.float32 else 1e-2,
        rtol=1e-5 if dtype is torch.float32 else 1e-2,
    )  # fmt: skip
    for start, size in ((0, 1), (5, 6), (20, 17), (100, 1)):
        part = native.linear(x[start : start + size].contiguous(), packed, offset)
        assert torch.equal(part, together[start : start + size])
    without_tiles = replace(packed, packing=Packing.BYTES)
    assert torch.equal(native.linear(x, without_tiles, offset), together)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 63, 64, 160])
def test_rmsnorm(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    x = (10 * torch.randn(9, width, generator=generator)).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    native, plain = NativeOps(dtype), TorchOps(by_row=True)
    both = native.rmsnorm(x, weight, 1e-5), plain.rmsnorm(x, weight, 1e-5)
    torch.testing.assert_close(*both, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(native.rmsnorm(x[4:5].contiguous(), weight, 1e-5), both[0][4:5])


@pytest.mark.parametrize("kind", ["llama_bias", "llama_head_dim", "qwen3", "mistral_sliding"])
def test_layers(kind: str, zoo: Path) -> None:
    """A batch of a prompt, a chain and a tree through both versions, and the KV it leaves."""
    folder, rng = make_model(kind, zoo), np.random.default_rng(4)
    tokens = [rng.integers(0, 256, size) for size in (33, 5, 14)]
    parents = np.array([rng.integers(-1, i) for i in range(14)], np.int32)
    prompts = [rng.integers(0, 256, 20) for _ in range(2)]
    results = []
    for load in (load_runner, load_runner_without_kernels):
        runner = load(folder)
        sequences = [runner.new_sequence() for _ in range(3)]
        for sequence, prompt in zip(sequences[1:], prompts, strict=True):
            runner.forward([Segment(sequence, prompt, logits="none")])
            runner.commit(sequence, range(20))
        shapes = (None, None, parents)
        segments = [Segment(*each) for each in zip(sequences, tokens, shapes, strict=True)]
        logits = runner.forward(segments).logits
        runner.commit(sequences[0], range(33))
        results.append((logits, *runner.keys_and_values(sequences[0])))
    for native, plain in zip(*results, strict=True):
        torch.testing.assert_close(native, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_nothing(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_ops, "LONE_WEIGHTS", 0)
    runner = LlamaRunner(TARGET_DIR, dtype=dtype)
    ids = np.random.default_rng(9).integers(0, 256, 150)
    results = []
    for threads in (1, 2, 3):
        limit_threads(threads)
        sequence = runner.new_sequence()
        results.append(runner.forward([Segment(sequence, ids)]).logits)
        runner.free(sequence)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_forward_wakes_other_threads_only_for_much_work() -> None:
    limit_threads(2)
    runner = LlamaRunner(TARGET_DIR, dtype=torch.float32)
    tables = runner._ops._tables  # type: ignore[attr-defined]
    used = []
    for count in (1, 16, 40, 250, 16):  # AR, a draft, and prompts
        sequence = runner.new_sequence()
        runner.forward([Segment(sequence, np.arange(count), logits="none")])
        runner.free(sequence)
        ((_, model, *_),) = tables.values()
        used.append(model.threads)
    shared = 1 if kernels.has_tiles() else 2  # without tiles as many take four times as long
    assert used == [1, 1, shared, 2, 1]


def test_without_a_compiler_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number, (compiler, reason) in enumerate((("/nonexistent/cc", "cc"), ("false", "false"))):
        monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / str(number)))
        monkeypatch.setenv("CC", compiler)
        usable, why = kernels.status()
        assert not usable
        assert reason in why
    monkeypatch.setenv("PACELINE_KERNELS", "off")
    assert kernels.status() == (False, "switched off by PACELINE_KERNELS=off")


def test_an_unknown_variant_is_refused_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_KERNELS", "avx1024")
    with pytest.raises(InvalidArgument, match="PACELINE_KERNELS") as refused:
        kernels.load()
    assert all(name in str(refused.value) for name in kernels.runnable())


def test_a_library_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = kernels._load.__wrapped__  # without what earlier calls found
    best, *others = kernels.runnable()
    broken = kernels._open(kernels.libraries()[best])
    with monkeypatch.context() as patch:
        patch.setattr(broken, "self_test", lambda: 1)
        with pytest.warns(UserWarning, match=f"{best} .*running with {others[0]}"):
            name, _ = load("on", kernels._cache_dir())
        assert name == others[0]
        with pytest.raises(kernels.KernelsUnavailable, match=best):
            load(best, kernels._cache_dir())


@pytest.mark.nightly
def test_processes_that_start_at_once_build_once(tmp_path: Path) -> None:
    """The compiler counts its calls: as many as one build makes, of a variant for short."""
    calls = tmp_path / "calls"
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\necho >> {calls}\nexec {build.compiler()[0]} "$@"\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "CC": str(compiler), "PACELINE_CACHE_DIR": str(tmp_path)}
    code = (
        "from paceline.models import kernels; kernels._may_run = lambda name: name == 'portable'; "
        "assert list(kernels.libraries()) == ['portable']"
    )
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, env=environment) for _ in range(3)]
    assert [process.wait() for process in started] == [0, 0, 0]
    (portable,) = (variant for variant in build.variants() if variant.name == "portable")
    linked = 1
    assert len(calls.read_text().splitlines()) == len(build._objects(portable)) + linked
