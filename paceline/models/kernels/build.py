"""Compiles the C kernels: one library for each variant that the compiler can make.

Needs only Python: setup.py runs it before the package's dependencies are installed.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = ("decode.c", "products.c", "quants.c", "matmul.c", "noise.c", "variant.c")
HEADERS = (
    "model.h", "simd.h", "products.h", "products_impl.h", "bytes.h", "tiles.h", "roofline.h",
    "decode_impl.h",
)  # fmt: skip
# -ffp-contract=off: a multiplication is fused with an addition only where the source says so, which
# makes results independent of the instruction set. (-ffast-math would not; it would also make the
# thread that loads the library flush denormals.)
FLAGS = ("-std=gnu11", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fPIC",
         "-fvisibility=hidden", "-fopenmp")  # fmt: skip
PORTABLE = "portable"


class BuildFailed(RuntimeError):
    """The compiler is missing or made no variant; the message says why."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One instruction set's build.

    Attributes:
        vectors: flags for sources that need only vectors; variants with equal flags share these
            objects.
        integers: flags for quants.c beyond those.
        products: flags for matmul.c beyond both.
        features: what variant.c must find on the processor.
        rank: the loader chooses the highest-ranked variant that runs.
    """

    name: str
    rank: int
    vectors: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()
    products: tuple[str, ...] = ()
    features: str = "0"


_AVX2, _AVX512, _NEON = ("-march=x86-64-v3",), ("-march=x86-64-v4",), ("-march=armv8-a",)
_VNNI, _BF16 = ("-mavx512vnni",), ("-mavx512bf16",)
_AMX = "-mamx-tile", "-mamx-bf16", "-mamx-int8"
_DOT, _DOT_BF16 = ("-march=armv8.2-a+dotprod",), ("-march=armv8.2-a+dotprod+bf16",)
VARIANTS: dict[str, tuple[Variant, ...]] = {
    "x86_64": (
        Variant("portable", 1),
        Variant("avx2", 20, _AVX2, features="FMA"),
        Variant("avx2_vnni", 21, _AVX2, ("-mavxvnni",), features="FMA | AVX_VNNI"),
        Variant("avx512", 30, _AVX512, features="AVX512"),
        Variant("avx512_vnni", 31, _AVX512, _VNNI, features="AVX512 | AVX512_VNNI"),
        Variant("avx512_bf16", 32, _AVX512, _VNNI, _BF16, "AVX512 | AVX512_VNNI | AVX512_BF16"),
        Variant("amx", 40, _AVX512, _VNNI, (*_BF16, *_AMX),
                "AVX512 | AVX512_VNNI | AVX512_BF16 | AMX"),
    ),
    "aarch64": (
        Variant("neon", 20, _NEON),
        Variant("neon_dot", 21, _NEON, _DOT, features="DOTPROD"),
        Variant("neon_bf16", 22, _NEON, _DOT, _DOT_BF16, "DOTPROD | ARM_BF16"),
    ),
}  # fmt: skip
VARIANTS["arm64"] = VARIANTS["aarch64"]  # as macOS calls it
OTHERS = (Variant("portable", 1),)


def variants(machine: str | None = None) -> tuple[Variant, ...]:
    """All variants of an architecture, best last."""
    return VARIANTS.get(machine or platform.machine(), OTHERS)


def sources() -> list[Path]:
    """Every file that a build reads."""
    return [FOLDER / n for n in (*SOURCES, *HEADERS)]


def compiler(machine: str | None = None) -> list[str] | None:
    """The command of the C compiler: CC, or cc, gcc or clang; for another architecture its GCC."""
    if named := os.environ.get("CC"):
        return shlex.split(named)
    names = ["cc", "gcc", "clang"]
    if machine not in (None, platform.machine()):
        names = [f"{machine}-linux-gnu-gcc"]
    return next(([found] for name in names if (found := shutil.which(name))), None)


def library_name(variant: str) -> str:
    return f"libpaceline-{variant}.so"


def build(
    out: Path, machine: str | None = None, only: Sequence[str] = ()
) -> tuple[dict[str, Path], dict[str, str]]:
    """Compile all variants at once.

    Args:
        out: folder for the libraries.
        machine: architecture to compile for; default: this machine's.
        only: names of variants; default: all.

    Returns:
        The libraries by variant, and why the others could not be made.

    Raises:
        BuildFailed: there is no compiler, or no variant could be made.
    """
    command = compiler(machine)
    if command is None:
        needed = "gcc or clang"
        if machine not in (None, platform.machine()):
            needed = f"{machine}-linux-gnu-gcc"
        raise BuildFailed(f"no C compiler found: install {needed}, or set CC")
    chosen = [v for v in variants(machine) if not only or v.name in only]
    out.mkdir(parents=True, exist_ok=True)
    libraries: dict[str, Path] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(dir=out) as scratch, _pool() as pool:
        jobs: dict[tuple[str, tuple[str, ...]], tuple[Future[str], Path]] = {}
        for variant in reversed(chosen):  # the last ones take longest
            for source, flags in _objects(variant):
                if (source, flags) not in jobs:
                    made = Path(scratch) / f"{len(jobs)}.o"
                    arguments = [*command, *FLAGS, *flags, "-c", str(FOLDER / source)]
                    jobs[source, flags] = pool.submit(_run, [*arguments, "-o", str(made)]), made
        for variant in chosen:
            made_of = [jobs[key] for key in _objects(variant)]
            errors = [error for job, _ in made_of if (error := job.result())]
            library = Path(scratch) / library_name(variant.name)
            linking = [*command, "-shared", "-fopenmp", *(str(o) for _, o in made_of)]
            error = errors[0] if errors else _run([*linking, "-o", str(library), "-lm"])
            if error:
                failed[variant.name] = error
            else:
                libraries[variant.name] = out / library.name
                os.replace(library, out / library.name)
    if not libraries:
        raise BuildFailed(next(iter(failed.values())))
    return libraries, failed


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """A thread for each core; an interrupt cancels compilations that have not started."""
    pool = ThreadPoolExecutor(max(2, os.cpu_count() or 1))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _objects(variant: Variant) -> list[tuple[str, tuple[str, ...]]]:
    """The sources of a variant's library with the flags of each."""
    vectors = variant.vectors
    integers = *vectors, *variant.integers
    # The source has nothing for these two passes to find, and with many copies of a loop they are
    # slow.
    quick = "-fno-gcse", "-fno-tree-pre"
    about = f"-DFEATURES={variant.features}", f"-DRANK={variant.rank}"
    return [
        ("decode.c", (*vectors, "-fpeel-loops")), ("products.c", vectors),
        ("quants.c", (*integers, *quick)), ("matmul.c", (*integers, *variant.products)),
        ("variant.c", about), ("noise.c", (*vectors, "-O3")),  # its loops are left to the compiler
    ]  # fmt: skip


def _run(command: list[str]) -> str:
    """Run a command; returns its error, or an empty string."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}"
    return f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}" if done.returncode else ""
