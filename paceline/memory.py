"""How much memory this process may still take, whether a model fits into it, and what it took."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from paceline.errors import InvalidArgument

_UNLIMITED = 1 << 60  # what version 1 of control groups writes for "no limit" is about 2**63


def check_fits(needed: int, model: str | Path) -> None:
    """Refuse a model that is larger than the memory that is free, before it is read.

    PACELINE_MEMORY_CHECK=off tries it nevertheless.

    Args:
        needed: bytes of its weights in memory.

    Raises:
        InvalidArgument: names the bytes needed and available.
    """
    if os.environ.get("PACELINE_MEMORY_CHECK") == "off":
        return
    total, available = memory()
    if needed > available:
        raise InvalidArgument(
            "model", str(model),
            f"one that fits into memory: its weights need {_gb(needed)}, {_gb(available)} of "
            f"{_gb(total)} are available; a dtype with fewer bits (q8_0, q4_0) needs less",
        )  # fmt: skip


def give_back() -> None:
    """Return freed memory to the kernel; glibc would keep it, after a load tens of megabytes."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def keep_loaded() -> None:
    """Have the garbage collector skip all that exists by now, because it stays anyway.

    To look through a loaded model's process takes 0.1 s, in which no other thread runs.
    """
    gc.collect()
    gc.freeze()


def reset_peak_memory() -> None:
    """Reset the peak, if the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Bytes: the peak of this process's resident memory, plus that of its GPU memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    peak = 1024 * _numbers(Path("/proc/self/status")).get("VmHWM:", peak // 1024)
    import torch

    if torch.cuda.is_available():
        peak += torch.cuda.max_memory_allocated()
    return peak


def _gb(count: int) -> str:
    return f"{count:,} bytes ({count / 1e9:.1f} GB)"


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """Total and available bytes, within the limits of the control groups that this process is in.

    Pages of files count as available: the kernel drops them when it needs them.

    Args:
        root: where /proc and /sys are.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    numbers = _numbers(root / "proc/meminfo")
    total = 1024 * numbers.get("MemTotal:", total // 1024)
    available = 1024 * numbers.get("MemAvailable:", total // 1024)  # not Linux: all of it
    for folder, limit, used in _groups(root):
        bound = _number(folder / limit)
        taken = _number(folder / used)
        if bound is None or taken is None or bound >= _UNLIMITED:
            continue
        files = _numbers(folder / "memory.stat")
        prefix = "" if "file" in files else "total_"
        taken -= sum(files.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
        total, available = min(total, bound), min(available, max(0, bound - taken))
    return total, available


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Folders of the control groups that limit memory, with the files of limit and use."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder, names = mount, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            folder, names = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # A container may see its own group as the root: what is not there limits nothing.
        inside = PurePosixPath(path)
        for part in (inside, *inside.parents):
            yield folder / str(part).lstrip("/"), *names


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _numbers(file: Path) -> dict[str, int]:
    """The second word of each line by the first."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
