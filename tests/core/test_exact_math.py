"""What lies between logits and tokens has the same bits on every processor, in C and in NumPy."""

from __future__ import annotations

import ast
import ctypes
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__

from paceline import exact_math
from paceline.exact_math import (
    Native,
    cos_sin,
    exp64,
    exp_of,
    is_exact,
    log1p_of,
    log64,
    log_of,
    sum64,
    weights64,
)
from paceline.models import kernels
from paceline.sampling import SamplingParams, coupled_sample, gumbel, gumbel_at, perturbed_argmax
from tests.core.exact_digests import digests

ROOT = Path(__file__).parents[2]
SOURCE = Path(kernels.__file__).parent / "noise.c"
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")

# As they came out on an AMD EPYC with AVX-512, in C and in NumPy. A machine that computes
# other digests has other tokens for a seed, or other logits.
RECORDED = {
    "noise": "1113f09d3b1659cf3d5eca749fcb795acef0f566cfed3b425c394ac74fbc0052",
    "exp": "4d09c40ae40328ee2712e762013c111cfbb8cfa31c80c38c47349612bc759f68",
    "log": "1df3a56bcc97e24f01fd20bdc291c646331a3e72aeebb75f103ba43478aa4e06",
    "cos and sin": "c4d2a2fe26d0b58ad550f24ea089146dfd27f2b69cbe79e412521b88be2d7d3b",
    "tokens": "d1eb74c1ad410456a5368deaebf5bb304460f5069fc84a3e44da11f3bff4bd90",
    "rope default": "039d5cb3e7153049dbb78c97a7f6be32c834c4f9886ea45c4f735f76296eccd6",
    "rope linear": "3f0180f2a88975ddc2af04c2937bcb728a8a7e45f5400f77fecda178186ce75f",
    "rope llama3": "c0bc2f7910de42b224599a8fc6e30d11ec4ceb6115230e66eb69cb9f1a3aee1f",
}
# What noise_digest.c prints on any processor.
RECORDED_IN_C = """\
log of anything c3aacd920fea4982
exp of anything 2761dafc2a32d95f
gumbel f7cff3f51ee47dcf
gumbel_at 48099ed4dddfd898
exp b9f2dd1272db9679
log 744d5a207231ceb1
weights c91abca1adcec8a6
samples 35b6c9a49d512325
"""

# Instruction sets to compile for, and the flags in /proc/cpuinfo that the processor must have.
SETS = {
    "x86_64": {
        "x86-64": "",
        "x86-64-v3": "avx2 fma bmi2 f16c movbe",
        "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
    },
    "aarch64": {"armv8-a": "", "armv8.2-a+dotprod": "asimddp", "armv8.2-a+sve": "sve"},
}
MACHINE_SETS = SETS.get(platform.machine(), {})


def has_flags(wanted: str) -> bool:
    return set(wanted.split()) <= set(Path("/proc/cpuinfo").read_text().split())


def compiled(folder: Path, *options: str) -> Native:
    assert COMPILER is not None
    target = folder / "noise.so"
    command = [COMPILER, *options, "-w", "-fPIC", "-shared", str(SOURCE), "-o", str(target)]
    subprocess.run(command, check=True, timeout=120)
    return Native(ctypes.CDLL(str(target)))


@pytest.fixture(scope="module")
def exact_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Native]:
    """noise.c as the product compiles it, once for each level and instruction set."""

    @cache
    def get(level: str, instructions: str) -> Native:
        options = level, f"-march={instructions}", "-ffp-contract=off"
        return compiled(tmp_path_factory.mktemp("noise"), *options)

    return get


@pytest.fixture(params=[f"{o} {m}" for m in (*MACHINE_SETS, "native") for o in ("-O2", "-O3")])
def library(request: pytest.FixtureRequest, exact_library: Callable[[str, str], Native]) -> Native:
    """noise.c for one instruction set."""
    level, instructions = request.param.split()
    if COMPILER is None:
        pytest.skip("no C compiler")
    if not has_flags(MACHINE_SETS.get(instructions, "")):
        pytest.skip(f"this processor does not run {instructions}")
    return exact_library(level, instructions)


@pytest.fixture(params=["C", "NumPy"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with the library that is loaded here, and without one."""
    if request.param == "NumPy":
        monkeypatch.setattr(exact_math, "native", lambda: None)
    elif exact_math.native() is None:
        pytest.skip("no kernels here")


@pytest.fixture
def with_each(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Calls a function with a library and with NumPy."""

    def call(library: Native, function: Callable) -> tuple:
        results = []
        for native in (library, None):
            monkeypatch.setattr(exact_math, "native", lambda found=native: found)
            results.append(function())
        return tuple(results)

    return call


def any_doubles(count: int) -> npt.NDArray[np.float64]:
    """Doubles of any bits: NaN, infinite and subnormal ones among them."""
    words = np.random.default_rng(5).integers(0, 2**64, count, dtype=np.uint64)
    words[: count // 8] &= np.uint64(0x800FFFFFFFFFFFFF)  # subnormal
    return words.view(np.float64)


EDGES = np.array([
    0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 5e-324, 2.0**-1022, sys.float_info.max,
    709.782712893384, 709.7827128933841, 710.0, -745.1332191019411, -745.1332191019412, -746.0,
    -708.4, math.nextafter(1.0, 0.0), math.nextafter(1.0, 2.0), math.sqrt(0.5), -1e308,
])  # fmt: skip


def same_bits(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> bool:
    return np.array_equal(a.view(np.uint64), b.view(np.uint64))


# --- C against NumPy ---------------------------------------------------------------------------


@pytest.mark.one_of(3, slow=2)
def test_c_and_numpy_agree_in_every_bit(library: Native, with_each: Callable) -> None:
    rng = np.random.default_rng(3)
    some = rng.permutation(151_936)[:1000]
    anything = np.concatenate([EDGES, -EDGES, any_doubles(250_000)])
    near = np.concatenate([rng.uniform(-760, 720, 125_000), rng.normal(0, 1, 125_001)])
    for name, function in {
        "log of anything": lambda: log64(anything),
        "exp of anything": lambda: exp64(anything),
        "log": lambda: log64(np.abs(near)),
        "exp": lambda: exp64(near),
        "one": lambda: np.array([log_of(0.3), exp_of(0.3), log1p_of(0.3)]),
        "weights": lambda: weights64(near)[0],
        "sums": lambda: np.array(
            [*(sum64(near[:i]) for i in range(300)), sum64(near), weights64(near)[1]]
        ),
        "gumbel": lambda: np.concatenate([gumbel(i, 7 * i, 49_152) for i in range(10)]),
        "small": lambda: np.concatenate([gumbel(9, 9, i) for i in range(300)]),
        "at": lambda: gumbel_at(2**63 - 1, 5, some),
    }.items():
        assert same_bits(*with_each(library, function)), name


@pytest.mark.one_of(3)
def test_c_and_numpy_choose_the_same_tokens(library: Native, with_each: Callable) -> None:
    rng = np.random.default_rng(6)
    rows = [
        (rng.normal(0, spread, size) * 4).astype(np.float32)
        for size in (1, 2, 127, 128, 129, 1000, 4096, 49_152)
        for spread in (0.0, 0.3, 1.0, 3.0)  # 0: the noise alone decides
        for _ in range(3)
    ]
    ways = [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}]
    for number, row in enumerate(rows):
        for way in ways:
            params = SamplingParams(temperature=0.05 + 0.1 * (number % 12), seed=number, **way)
            mine, theirs = with_each(
                library, lambda r=row, p=params, n=number: coupled_sample(r, p, n)
            )
            assert mine == theirs, (number, way)


@pytest.mark.one_of(3, slow=2)
@pytest.mark.parametrize("scores", ["logits", "scores"])
def test_the_best_token_of_unusual_rows(scores: str, library: Native, with_each: Callable) -> None:
    inf, nan = math.inf, math.nan
    rng = np.random.default_rng(7)
    rows = []
    for size in (1, 5, 128, 300):
        for values in (
            [-inf],
            [inf],
            [nan],
            [nan, inf],
            [-inf, 3e38],
            [inf, inf],
            [nan, nan, -inf],
        ):
            row = rng.normal(0, 3, size)
            row[rng.integers(0, size, len(values))] = values
            rows += [row, np.full(size, values[0])]
            only = np.full(size, -inf)
            only[-1] = values[0]
            rows.append(only)

    def sample(row: npt.NDArray[np.float64]) -> int:
        if scores == "logits":
            return coupled_sample(
                row.astype(np.float32), SamplingParams(temperature=0.5, seed=3), 11
            )
        return perturbed_argmax(row, 3, 11)

    for row in rows:
        mine, theirs = with_each(library, lambda row=row: sample(row))
        assert mine == theirs, row


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_a_library_with_fused_products_is_refused(
    tmp_path: Path, exact_library: Callable[[str, str], Native]
) -> None:
    """GCC fuses unless it is told not to, where the instruction set has it."""
    found = {"x86_64": "x86-64-v3", "aarch64": "armv8-a"}.get(platform.machine())
    if found is None or not has_flags(MACHINE_SETS[found]):
        pytest.skip("no fused products here")
    assert is_exact(exact_library("-O3", found))
    assert not is_exact(compiled(tmp_path, "-O3", f"-march={found}", "-ffp-contract=fast"))


def test_the_kernels_of_this_process_are_exact() -> None:
    if not kernels.status()[0]:
        pytest.skip("no kernels here")
    assert exact_math.native() is not None


# --- accuracy ----------------------------------------------------------------------------------


def error(ours: float, exact: Decimal) -> float:
    """In units of the last place of the right result."""
    return abs(float((Decimal(ours) - exact) / Decimal(math.ulp(float(exact)))))


@pytest.mark.usefixtures("implementation")
def test_log_is_right_within_a_unit_in_the_last_place() -> None:
    rng = np.random.default_rng(1)
    exponents = rng.integers(-1074, 1024, 1000)
    x = np.concatenate([
        np.ldexp(rng.uniform(1, 2, 1000), exponents), rng.uniform(0.5, 2, 2000),
        1 + rng.uniform(-1, 1, 1000) * 1e-7, rng.uniform(0, 40, 1000),
    ])  # fmt: skip
    with localcontext(prec=40):
        errors = [
            error(y, Decimal(v).ln())
            for v, y in zip(x.tolist(), log64(x).tolist(), strict=True)
            if v != 1.0
        ]
    assert max(errors) < 1.0
    assert len(errors) > 4900


@pytest.mark.usefixtures("implementation")
def test_exp_is_right_within_a_unit_in_the_last_place() -> None:
    rng = np.random.default_rng(2)
    x = np.concatenate([
        rng.uniform(-745, 709.78, 2000), rng.uniform(-1, 1, 2000), rng.normal(0, 1, 500) * 1e-9
    ])  # fmt: skip
    with localcontext(prec=40):
        errors = [
            error(y, Decimal(v).exp()) for v, y in zip(x.tolist(), exp64(x).tolist(), strict=True)
        ]
    assert max(errors) < 1.0


@pytest.mark.usefixtures("implementation")
def test_edges() -> None:
    inf, nan = math.inf, math.nan
    for x, expected in {
        0.0: -inf, inf: inf, 1.0: 0.0, 5e-324: math.log(5e-324), -1.0: nan, -inf: nan, -5e-324: nan,
    }.items():  # fmt: skip
        np.testing.assert_equal(log_of(x), expected)
    assert log_of(-0.0) == -inf
    assert math.isnan(log_of(nan))
    assert math.isnan(exp_of(nan))
    for x, expected in {
        -inf: 0.0, inf: inf, 0.0: 1.0, 710.0: inf, -746.0: 0.0, 1e308: inf, -1e308: 0.0,
        -745.13: 5e-324, 709.782712893384: math.exp(709.782712893384),
    }.items():  # fmt: skip
        np.testing.assert_equal(exp_of(x), expected)
    assert log64(np.empty(0)).shape == exp64(np.empty(0)).shape == (0,)
    grid = np.linspace(0.1, 3.0, 60).reshape(3, 4, 5)
    assert log64(grid).shape == exp64(grid).shape == grid.shape
    assert same_bits(log64(grid[:, ::2, 1]), log64(grid)[:, ::2, 1].copy())


@pytest.mark.usefixtures("implementation")
def test_log1p() -> None:
    for x in (1e-300, -1e-17, 1e-9, -1e-9, 0.3, -0.3, 1.0, -0.999999, 1e9):
        assert log1p_of(x) == pytest.approx(math.log1p(x), rel=1e-15)
    assert log1p_of(-1.0) == -math.inf
    assert log1p_of(0.0) == 0.0


def test_cos_and_sin_are_right_within_a_unit_in_the_last_place() -> None:
    mpmath = pytest.importorskip("mpmath")
    rng = np.random.default_rng(8)
    quarters = rng.integers(-667_000, 667_000, 1500) * (math.pi / 2)  # hard: nearly 0
    x = np.concatenate([
        rng.uniform(-(2**20), 2**20, 1500), rng.uniform(-2, 2, 1000), quarters, [0.0, 2**20]
    ])  # fmt: skip
    with mpmath.workprec(200):
        for name, values in zip(("cos", "sin"), cos_sin(x), strict=True):
            for angle, ours in zip(x.tolist(), values.tolist(), strict=True):
                exact = getattr(mpmath, name)(mpmath.mpf(angle))
                assert abs(ours - exact) <= math.ulp(float(exact)), (name, angle)


@pytest.mark.usefixtures("implementation")
def test_the_sum_adds_halves() -> None:
    def reference(values: list[float]) -> float:
        while len(values) > 1:
            half = (len(values) + 1) // 2
            second = values[half:] + [None] * (half - len(values[half:]))
            values = [a if b is None else a + b for a, b in zip(values, second, strict=False)]
        return values[0] if values else 0.0

    values = np.random.default_rng(9).normal(0, 1, 1000)
    for size in (0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 1000):
        assert sum64(values[:size]) == reference(values[:size].tolist())
    assert sum64(values) == pytest.approx(math.fsum(values), rel=1e-13)
    floats = np.array([0.1, 0.2, 0.7], np.float32)
    assert sum64(floats) == (float(floats[0]) + float(floats[2])) + float(floats[1])
    assert sum64(values[::3]) == reference(values[::3].tolist())


# --- the same on every machine -----------------------------------------------------------------


WITHOUT_VECTORS = {
    "NPY_DISABLE_CPU_FEATURES": " ".join(__cpu_dispatch__),
    "ATEN_CPU_CAPABILITY": "default",
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    "environment",
    [
        {},
        pytest.param({"PACELINE_KERNELS": "off"}, marks=pytest.mark.nightly),
        {"PACELINE_KERNELS": "off", **WITHOUT_VECTORS},
        pytest.param({**WITHOUT_VECTORS, "ATEN_CPU_CAPABILITY": "avx2"}, marks=pytest.mark.nightly),
    ],
    ids=["C", "NumPy", "NumPy without vectors", "C, NumPy without vectors"],
)
def test_recorded_digests(environment: dict[str, str]) -> None:
    if not environment:  # as this process computes them
        assert digests() == RECORDED
        return
    command = [sys.executable, "-W", "ignore", "-m", "tests.core.exact_digests"]
    done = subprocess.run(
        command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == RECORDED


CROSS_COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")


@pytest.mark.parametrize("machine", ["here", "Arm", "Arm with SVE"])
def test_recorded_digest_of_the_c_functions(machine: str, tmp_path: Path) -> None:
    if (COMPILER if machine == "here" else CROSS_COMPILER and EMULATOR) is None:
        pytest.skip("needs a C compiler, for Arm aarch64-linux-gnu-gcc and qemu-aarch64")
    instructions = "armv8.2-a+sve" if machine == "Arm with SVE" else "armv8-a"
    cross = [str(CROSS_COMPILER), "-static", f"-march={instructions}"]
    compile_with = [str(COMPILER)] if machine == "here" else cross
    run_with = [] if machine == "here" else [str(EMULATOR), "-cpu", "max"]
    source, program = ROOT / "tests/core/noise_digest.c", tmp_path / "noise_digest"
    options = ["-O3", "-ffp-contract=off", "-w"]
    subprocess.run(
        [*compile_with, *options, str(source), "-o", str(program)], check=True, timeout=100
    )
    done = subprocess.run(
        [*run_with, str(program)], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout == RECORDED_IN_C


# What differs between machines or versions of a library: a function that is not in exact_math, a
# sum in no promised order, which of equals comes first.
INEXACT = {
    "log", "log2", "log1p", "exp", "expm1", "pow", "power", "logaddexp", "sum", "nansum", "mean",
    "dot", "matmul", "prod", "fsum", "argpartition", "softmax", "log_softmax",
}  # fmt: skip
DECIDING = [
    ROOT / "paceline/sampling.py",
    *sorted((ROOT / "paceline/acceptance").glob("*.py")),
    *(
        ROOT / f"paceline/shapes/{name}.py"
        for name in ("base", "confidence", "rsd_c", "rsd_s", "iid")
    ),
]


@pytest.mark.parametrize("file", DECIDING, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_nothing_that_differs_between_machines_decides_a_token(file: Path) -> None:
    """Of the rules, and of the shapes whose q the rejecting rules are given."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    used = {node.func.attr for node in calls if isinstance(node.func, ast.Attribute)}
    assert not used & INEXACT
