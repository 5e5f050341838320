"""The processors that this process may use, and its fastest number of threads.

Two logical processors of one core share its arithmetic, a container may have a quota of processor
time, and waking threads costs more than a small forward gains: the number of threads is measured
(:func:`measure_threads`) among what :func:`usable_cores` allows, and not assumed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class Cores:
    """The processors that this process may run on.

    Attributes:
        logical: processors of its affinity.
        physical: cores that these belong to.
        quota: processors' worth of time that its control groups allow; None for no limit.
    """

    logical: int
    physical: int
    quota: float | None = None

    @property
    def usable(self) -> int:
        """Threads that can run at the same time; a fraction of a processor does not count."""
        return self.logical if self.quota is None else max(1, min(self.logical, int(self.quota)))

    @property
    def candidates(self) -> tuple[int, ...]:
        """Numbers of threads worth a try: one, a thread for each core, all."""
        return tuple(sorted({1, min(self.physical, self.usable), self.usable}))

    def __str__(self) -> str:
        text = f"{self.logical} logical processors on {self.physical} cores"
        return text if self.quota is None else f"{text}, {self.quota:g} of them by quota"


@lru_cache(maxsize=1)
def usable_cores() -> Cores:
    """Of this process, on this machine."""
    if hasattr(os, "sched_getaffinity"):
        return read_cores(os.sched_getaffinity(0))
    count = os.cpu_count() or 1
    return Cores(count, count)


def read_cores(affinity: set[int], root: Path = Path("/")) -> Cores:
    """Cores of the processors in ``affinity``, from the kernel's files below ``root``."""
    siblings = {_siblings(cpu, root) for cpu in affinity}
    physical = len(siblings) if None not in siblings else _cores_in_cpuinfo(affinity, root)
    return Cores(len(affinity), physical or len(affinity), _quota(root))


def _siblings(cpu: int, root: Path) -> str | None:
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):  # the latter before Linux 5.3
        text = _read(folder / name)
        if text:
            return text.strip()
    return None


def _cores_in_cpuinfo(affinity: set[int], root: Path) -> int:
    cores = set()
    for block in (_read(root / "proc/cpuinfo") or "").split("\n\n"):
        fields = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", block, re.MULTILINE))
        if "core id" in fields and int(fields.get("processor", -1)) in affinity:
            cores.add((fields.get("physical id", "0"), fields["core id"]))
    return len(cores)


def _quota(root: Path) -> float | None:
    """The smallest quota of the process' control groups and of those around them."""
    found = [
        quota
        for folder, version in _groups(root)
        if (quota := _quota_v2(folder) if version == 2 else _quota_v1(folder)) is not None
    ]
    return min(found, default=None)


def _groups(root: Path) -> Iterator[tuple[Path, int]]:
    """Folders of control groups that limit processor time, from the inside out."""
    own: dict[int, PurePosixPath] = {}
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            own[2] = PurePosixPath(path)
        elif "cpu" in controllers.split(","):
            own[1] = PurePosixPath(path)
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = (*after.split(), "", "", "")[:3]
        is_v1 = kind == "cgroup" and "cpu" in options.split(",")
        version = 2 if kind == "cgroup2" else 1 if is_v1 else 0
        if version not in own:
            continue
        mounted, mount = before.split()[3:5]
        folder = root / mount.lstrip("/")
        # A container may see its own group as the root, whatever the group is called outside.
        inside = own[version]
        if inside.is_relative_to(mounted):
            inside = PurePosixPath("/") / inside.relative_to(mounted)
        for part in (inside, *inside.parents):
            yield folder / str(part).lstrip("/"), version


def _quota_v2(folder: Path) -> float | None:
    limit, _, period = (_read(folder / "cpu.max") or "max").strip().partition(" ")
    return None if limit == "max" else _ratio(limit, period or "100000")


def _quota_v1(folder: Path) -> float | None:
    limit = (_read(folder / "cpu.cfs_quota_us") or "-1").strip()
    period = (_read(folder / "cpu.cfs_period_us") or "100000").strip()
    return None if limit.startswith("-") else _ratio(limit, period)


def _ratio(limit: str, period: str) -> float | None:
    try:
        return int(limit) / int(period)
    except (ValueError, ZeroDivisionError):
        return None


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None


def taken_by_others(root: Path = Path("/")) -> float:
    """Processor seconds so far that this process's processors gave to others than itself.

    Others are processes, the kernel, and, on a virtual machine, its neighbours ("steal"). Two calls
    tell what they took in between. 0 where the system does not tell.
    """
    if not hasattr(os, "sched_getaffinity"):
        return 0.0
    own, busy = os.sched_getaffinity(0), 0
    for line in (_read(root / "proc/stat") or "").splitlines():
        name, *counts = line.split()
        if re.fullmatch(r"cpu\d+", name) and int(name[3:]) in own:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, counts[:8])
            busy += user + nice + system + irq + softirq + steal
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time() if busy else 0.0


# --- how many -------------------------------------------------------------------------------------

SIZES = 1, 4, 8, 16, 64  # rows: a token, drafts, a prompt
GAIN = 1.05  # speedup that more threads must reach: other work may need them
REPETITIONS = 5
PAUSE_S = 0.002  # threads fall asleep between two forwards, as they do while a round drafts
LONGEST_S = 0.1  # stop at the first size whose forward takes longer

Steps = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Threads:
    """The number of threads for a forward, by its rows.

    Attributes:
        steps: (rows, number of threads from that many rows on), ascending from 1 row.
    """

    steps: Steps

    def of(self, rows: int) -> int:
        """Number of threads for a forward with a number of rows."""
        chosen = self.steps[0][1]
        for first, count in self.steps:
            if rows < first:
                break
            chosen = count
        return chosen

    def __str__(self) -> str:
        return ", ".join(f"{count} from {rows} rows on" for rows, count in self.steps)


def measure_threads(
    seconds: Callable[[int, int], float], candidates: Sequence[int], sizes: Sequence[int] = SIZES
) -> Threads:
    """The fastest number of threads for forwards of each size.

    Args:
        seconds: measures a forward, given its rows and threads; called repeatedly.
        candidates: ascending.
    """
    steps: list[tuple[int, int]] = []
    for rows in sizes:
        best = {count: seconds(rows, count) for count in candidates}
        if max(best.values()) < LONGEST_S:
            for _ in range(REPETITIONS - 1):
                # in turns, because other processes may take the machine for a moment
                for count in candidates:
                    best[count] = min(best[count], seconds(rows, count))
        chosen = candidates[0]
        for count in candidates[1:]:
            if best[count] * GAIN < best[chosen]:
                chosen = count
        if not steps or steps[-1][1] != chosen:
            steps.append((rows, chosen))
        if min(best.values()) > LONGEST_S:
            break
    return Threads(tuple(steps))


def timed_after_pause(call: Callable[[], None]) -> float:
    """Seconds of a call that starts while the other threads sleep."""
    time.sleep(PAUSE_S)
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
