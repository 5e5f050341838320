"""Finds, builds and loads the C kernels: one library for each instruction set, called a variant.

A wheel brings the libraries; in a source checkout those that this processor may run are compiled at
first use, all at once, into the user's cache folder. Every library says by itself, in code that any
processor runs, how good it is here; the best is loaded and tested against a recorded digest before
it is used. Without a library plain torch takes over (``paceline.models.torch_ops``): the same
results up to rounding, only slower.

``PACELINE_KERNELS`` chooses another variant (``avx2``, ``portable``, ...), or none: ``off``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import tempfile
import warnings
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

from paceline.cache import cache_folder, locked
from paceline.errors import InvalidArgument
from paceline.models.kernels import build
from paceline.models.threads import usable_cores

NUMERICS_VERSION = 1
"""Version number: raise it whenever the bits of numerics class ``portable`` change."""

SELF_TEST = 0x0F3670ED7FE1FDAE
"""What ``self_test`` of variant.c returns on every processor."""


class KernelsUnavailable(RuntimeError):
    """The kernels could not be built or loaded; the message says why."""


def _cache_dir() -> Path:
    return cache_folder("kernels")


def libraries() -> dict[str, Path]:
    """The libraries of all variants that may run here, best last.

    Raises:
        KernelsUnavailable: no library exists, and none can be built.
    """
    return _libraries(_cache_dir())


@lru_cache(maxsize=8)
def _libraries(cache: Path) -> dict[str, Path]:
    return _in(build.FOLDER / "lib") or _built(cache)


def _in(folder: Path) -> dict[str, Path]:
    files = {v.name: folder / build.library_name(v.name) for v in build.variants()}
    return {name: file for name, file in files.items() if file.is_file()}


def _built(cache: Path) -> dict[str, Path]:
    """The libraries in the cache; compiles missing ones first."""
    command = build.compiler()
    if command is None:
        raise KernelsUnavailable("no C compiler found: install gcc or clang, or set CC")
    # The compiler's name, links resolved, includes its version.
    compiler = os.path.realpath(shutil.which(command[0]) or command[0]), *command[1:]
    chosen = [variant for variant in build.variants() if _may_run(variant.name)]
    digest = hashlib.sha256(repr((build.FLAGS, chosen, compiler)).encode())
    digest.update(platform.machine().encode())
    for source in build.sources():
        digest.update(source.read_bytes())
    folder = cache / digest.hexdigest()[:16]
    if found := _in(folder):
        return found
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f"{folder.name}.lock"):
            if not _in(folder):  # else another process has built them in the meantime
                with tempfile.TemporaryDirectory(dir=cache) as scratch:
                    build.build(Path(scratch) / "lib", only=[variant.name for variant in chosen])
                    os.replace(Path(scratch) / "lib", folder)
    except (OSError, build.BuildFailed) as error:
        raise KernelsUnavailable(f"cannot build the kernels in {cache}: {error}") from error
    return _in(folder)


# Flags in /proc/cpuinfo that a variant needs; its library makes the final check.
_CPU_FLAGS = {
    "amx": {"amx_tile", "amx_bf16", "amx_int8"},
    "avx512_bf16": {"avx512_bf16", "avx512_vnni"},
    "avx512_vnni": {"avx512_vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"},
    "avx2_vnni": {"avx_vnni", "avx2", "fma"},
    "avx2": {"avx2", "fma"},
}


@cache
def _cpu_flags() -> frozenset[str]:
    """The processor's flags, as Linux names them; empty on other systems."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split())
    return frozenset()


def _may_run(variant: str) -> bool:
    """Whether the processor has a variant's flags; True if unknown."""
    return not _cpu_flags() or _CPU_FLAGS.get(variant, set()) <= _cpu_flags()


def runnable() -> dict[str, int]:
    """Score of every variant that this processor runs, best first.

    Raises:
        KernelsUnavailable: see :func:`libraries`.
    """
    scores = {name: _open(file).score() for name, file in libraries().items()}
    return {name: score for name, score in sorted(scores.items(), key=lambda s: -s[1]) if score}


@cache
def _open(file: Path) -> ctypes.CDLL:
    import torch  # noqa: F401  (brings its OpenMP runtime, which the kernels then share)

    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        # Some builds of torch bring OpenMP under a name of their own.
        mend = " (Debian: apt install libgomp1)" if "libgomp" in str(error) else ""
        raise KernelsUnavailable(f"cannot load {file}: {error}{mend}") from error
    library.self_test.restype = ctypes.c_uint64
    return library


def load() -> ctypes.CDLL:
    """The best library for this processor, or the one that PACELINE_KERNELS names.

    Raises:
        KernelsUnavailable: no C compiler, a failed build, a failed self-test, or
            PACELINE_KERNELS=off.
        InvalidArgument: PACELINE_KERNELS names a variant that does not exist or does not run here.
    """
    return _load(os.environ.get("PACELINE_KERNELS") or "on", _cache_dir())[1]


def variant() -> str:
    """The name of the variant that :func:`load` returns."""
    return _load(os.environ.get("PACELINE_KERNELS") or "on", _cache_dir())[0]


@cache
def _load(wanted: str, cache: Path) -> tuple[str, ctypes.CDLL]:
    if wanted == "off":
        raise KernelsUnavailable("switched off by PACELINE_KERNELS=off")
    names = list(runnable())
    if wanted != "on" and wanted not in names:
        allowed = f"off, or one that runs on this processor: {', '.join(names)}"
        raise InvalidArgument("PACELINE_KERNELS", wanted, allowed)
    wrong: list[str] = []
    for name in names if wanted == "on" else [wanted]:
        library = _open(libraries()[name])
        if (found := library.self_test()) == SELF_TEST:
            if wrong:
                warnings.warn(f"{_fails(wrong)}; running with {name}", stacklevel=2)
            return name, library
        wrong.append(f"{name} ({found:#x})")
    raise KernelsUnavailable(_fails(wrong))


def _fails(wrong: list[str]) -> str:
    return f"kernels compute wrong results: {', '.join(wrong)}; please report it"


def what_is_missing() -> str:
    """Advice that makes the kernels faster on this processor; empty if none applies."""
    runs, made, chosen = list(runnable()), libraries(), variant()
    if chosen != runs[0]:
        return f"unset PACELINE_KERNELS: {runs[0]} runs here and is faster than {chosen}"
    for better in reversed(build.variants()):
        if better.name == chosen:
            break
        if not _cpu_flags() or not _may_run(better.name):
            continue
        if better.name not in made:
            return (
                f"the processor has what {better.name} needs, but the compiler could not make it: "
                "install a newer one (gcc 12 makes all), and delete the cache of kernels"
            )
        return (
            f"the processor has what {better.name} needs, but the system does not let programs use "
            "it: Linux 5.16 or newer does, where no hypervisor hides it"
        )
    return ""


def has_dots() -> bool:
    """Whether the kernels multiply pairs of bfloat16 numbers at once."""
    return status()[0] and bool(load().has_dots())


def dots_are_portable() -> bool:
    """Whether products of bfloat16 pairs have the bits of class ``portable``, as on Arm."""
    return status()[0] and load().has_dots() == 2


def has_tiles() -> bool:
    """Whether products take the processor's matrix tiles (AMX), see tiles.h."""
    return status()[0] and variant() == "amx"


_num_threads = 0


def num_threads() -> int:
    """Threads that a kernel uses for enough work, such as a prompt.

    Forwards may take fewer (paceline/models/threads.py): waking threads costs more than a small
    forward gains. ``OMP_NUM_THREADS`` is a limit here, too: two processes with more threads than
    cores wait for each other many times as long as they compute.
    """
    return _num_threads or min(available_cores(), _openmp_limit())


def _openmp_limit() -> int:
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(1, int(first)) if first.isdecimal() else available_cores()


def available_cores() -> int:
    """Threads that this process can run at the same time: by affinity and by quota."""
    return usable_cores().usable


def set_num_threads(count: int) -> None:
    """Limit :func:`num_threads`; 0 means all cores."""
    global _num_threads
    _num_threads = count


def status() -> tuple[bool, str]:
    """Whether the kernels are usable here, and their path or the reason why not."""
    try:
        return True, load()._name
    except KernelsUnavailable as error:
        return False, str(error)
