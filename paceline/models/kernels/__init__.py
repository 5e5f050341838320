"""Builds and loads the C kernels at first use, with the machine's own compiler.

The shared library goes to the user's cache folder, keyed by source, compiler flags and processor,
so that the second start finds it. Without a compiler the plain torch functions in
``paceline.models.ops`` take over: same results up to rounding, only slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from paceline.models.threads import usable_cores

_HEADERS = ("common.h", "decode_impl.h", "matmul_impl.h")
_COMMON = ("-O3", "-march=native", "-fPIC", "-fvisibility=hidden", "-fopenmp")
_SOURCES = {
    # Infinity stays meaningful: a kernel starts a maximum with it.
    "decode.c": (*_COMMON, "-ffast-math", "-fno-finite-math-only"),
    # Sums keep their order: no -ffast-math.
    "matmul.c": (*_COMMON, "-ffp-contract=fast", "-funroll-loops"),
}
# What is added, tried in this order: an option of GCC only; nothing; and no tiles, since some
# assemblers do not know them.
_EXTRAS = (("-mprefer-vector-width=512",), (), ("-mno-amx-tile", "-mno-amx-bf16"))


class KernelsUnavailable(RuntimeError):
    """The kernels could not be built or loaded; the message says why."""


def _cache_dir() -> Path:
    root = os.environ.get("PACELINE_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "paceline" / "kernels"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({ln for ln in lines if ln.startswith(("model name", "flags"))}))


def _build(compiler: str, folder: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = []
        for name, flags in _SOURCES.items():
            built = Path(scratch) / f"{name}.o"
            command = [compiler, *flags, "-c", str(folder / name), "-o", str(built)]
            if all(_run([*command, *extra]).returncode for extra in _EXTRAS):
                _must(command)  # says why
            objects.append(str(built))
        # Linked in a step of its own, without -ffast-math: with it, GCC adds start-up code that
        # makes the thread that loads the library flush denormals, and threads would disagree.
        library = Path(scratch) / target.name
        _must([compiler, "-shared", "-fopenmp", *objects, "-o", str(library), "-lm"])
        os.replace(library, target)  # atomic: several processes may build at once


def _must(command: list[str]) -> None:
    done = _run(command)
    if done.returncode != 0:
        raise KernelsUnavailable(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@lru_cache(maxsize=1)
def has_bfloat16() -> bool:
    """Whether the kernels work here and the processor multiplies bfloat16 natively."""
    return "avx512_bf16" in _processor().split() and status()[0]


def has_tiles() -> bool:
    """Whether products take the processor's matrix tiles (AMX), see matmul.c.

    PACELINE_KERNELS=vectors does without, as a processor without them has to: results are the same
    up to rounding.
    """
    wanted = os.environ.get("PACELINE_KERNELS") != "vectors"
    return wanted and status()[0] and bool(load().allow_tiles())


def has_int8() -> bool:
    """Whether the kernels work here and the processor multiplies int8 natively (VNNI)."""
    return status()[0] and bool(load().takes_bytes())


_num_threads = 0


def num_threads() -> int:
    """Threads that a kernel uses when it has work for them, as a prompt is.

    Forwards may take fewer (paceline/models/threads.py): waking others costs more than a small one
    gains.
    """
    return _num_threads or available_cores()


def available_cores() -> int:
    """Threads that this process can run at the same time: by affinity and by quota."""
    return usable_cores().usable


def set_num_threads(count: int) -> None:
    """Limit :func:`num_threads`; 0 means all cores."""
    global _num_threads
    _num_threads = count


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        KernelsUnavailable: no C compiler, a failed build, or PACELINE_KERNELS=off.
    """
    if os.environ.get("PACELINE_KERNELS", "on") == "off":
        raise KernelsUnavailable("switched off by PACELINE_KERNELS=off")
    import torch  # noqa: F401  (brings its OpenMP runtime, which the kernels then share)

    folder = Path(__file__).parent
    digest = hashlib.sha256(repr((_SOURCES, _processor(), platform.machine())).encode())
    for name in (*_SOURCES, *_HEADERS):
        digest.update((folder / name).read_bytes())
    library = _cache_dir() / f"decode-{digest.hexdigest()[:16]}.so"
    if not library.is_file():
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise KernelsUnavailable("no C compiler found: install gcc or clang, or set CC")
        try:
            _build(compiler, folder, library)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelsUnavailable(f"cannot build {library}: {error}") from error
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelsUnavailable(f"cannot load {library}: {error}") from error


def status() -> tuple[bool, str]:
    """Whether the kernels are usable here, and where they are or why not."""
    try:
        return True, load()._name
    except KernelsUnavailable as error:
        return False, str(error)
