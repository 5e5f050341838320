"""What a process may run on, by made-up files of the kernel, and the choice of threads."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.loading import limit_threads
from paceline.models import kernels
from paceline.models.llama import LlamaRunner
from paceline.models.packing import Packing
from paceline.models.threads import (
    Cores,
    Threads,
    measure_threads,
    read_cores,
    taken_by_others,
    usable_cores,
)
from paceline.profile import choose_threads, set_threads


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def topology(*cores: str) -> dict[str, str]:
    """A file for each logical processor: the list of those on its core."""
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list": f"{core}\n"
        for cpu, core in enumerate(cores)
    }


V2 = "0::{path}\n"
V2_MOUNT = "31 23 0:28 {root} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
V1 = "4:memory:/elsewhere\n3:cpu,cpuacct:{path}\n0::/\n"
V1_MOUNT = "36 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"


def test_two_logical_processors_of_a_core_count_once(tmp_path: Path) -> None:
    root = write(tmp_path, topology("0,2", "1,3", "0,2", "1,3"))
    assert read_cores({0, 1, 2, 3}, root) == Cores(4, 2)
    assert read_cores({0, 1}, root) == Cores(2, 2)
    assert read_cores({0, 2}, root) == Cores(2, 1)
    assert read_cores({0, 1, 2, 3}, root).candidates == (1, 2, 4)


def test_without_sysfs_cpuinfo_tells_the_cores(tmp_path: Path) -> None:
    text = "\n\n".join(
        f"processor\t: {cpu}\nmodel name\t: X\nphysical id\t: {cpu // 4}\ncore id\t\t: {cpu % 2}\n"
        for cpu in range(8)
    )
    root = write(tmp_path, {"proc/cpuinfo": text})
    assert read_cores(set(range(8)), root) == Cores(8, 4)
    assert read_cores({1, 5}, root) == Cores(2, 2)
    assert read_cores({0, 1}, tmp_path / "nothing") == Cores(2, 2)


@pytest.mark.parametrize(
    ("limits", "quota"),
    [
        ({"": "max 100000", "a": "max 100000", "a/b": "max 100000"}, None),
        ({"a": "max 100000", "a/b": "250000 100000"}, 2.5),
        ({"a": "150000 100000", "a/b": "400000 100000"}, 1.5),  # the outer one is smaller
        ({"a/b": "50000 100000"}, 0.5),
        ({"a/b": "nonsense"}, None),
        ({"other": "100000 100000"}, None),
    ],
)
def test_a_quota_of_version_2_counts_wherever_it_is_nested(
    limits: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    files = {"proc/self/cgroup": V2.format(path="/a/b"),
             "proc/self/mountinfo": V2_MOUNT.format(root="/")}  # fmt: skip
    files |= {f"sys/fs/cgroup/{folder}/cpu.max": text + "\n" for folder, text in limits.items()}
    assert read_cores({0, 1, 2, 3}, write(tmp_path, files)).quota == quota


@pytest.mark.parametrize(
    ("limits", "quota"),
    [
        ({"": -1, "pod": -1, "pod/box": -1}, None),
        ({"": -1, "pod": 300000, "pod/box": -1}, 3.0),
        ({"pod": 300000, "pod/box": 200000}, 2.0),
    ],
)
def test_a_quota_of_version_1(limits: dict[str, int], quota: float | None, tmp_path: Path) -> None:
    files = {"proc/self/cgroup": V1.format(path="/pod/box"),
             "proc/self/mountinfo": V1_MOUNT.format(root="/")}  # fmt: skip
    for folder, limit in limits.items():
        at = f"sys/fs/cgroup/cpu,cpuacct/{folder}"
        files |= {f"{at}/cpu.cfs_quota_us": f"{limit}\n", f"{at}/cpu.cfs_period_us": "100000\n"}
    assert read_cores({0, 1, 2, 3}, write(tmp_path, files)).quota == quota


def test_a_container_finds_its_own_group_at_the_mount(tmp_path: Path) -> None:
    """Its group has the host's name, and its mount begins there."""
    files = {"proc/self/cgroup": V2.format(path="/docker/abc"),
             "proc/self/mountinfo": V2_MOUNT.format(root="/docker/abc"),
             "sys/fs/cgroup/cpu.max": "200000 100000\n"}  # fmt: skip
    assert read_cores({0, 1, 2, 3}, write(tmp_path, files)).quota == 2.0


@pytest.mark.parametrize(
    ("cores", "usable", "candidates"),
    [
        (Cores(1, 1), 1, (1,)),
        (Cores(8, 4), 8, (1, 4, 8)),
        (Cores(8, 4, 2.9), 2, (1, 2)),
        (Cores(8, 4, 0.5), 1, (1,)),
        (Cores(2, 2, 16.0), 2, (1, 2)),
    ],
)
def test_threads_that_can_run_at_the_same_time(
    cores: Cores, usable: int, candidates: tuple[int, ...]
) -> None:
    assert (cores.usable, cores.candidates) == (usable, candidates)


def test_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = usable_cores()
    assert 1 <= cores.physical <= cores.logical
    assert kernels.available_cores() == cores.usable <= cores.logical


def test_what_others_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr(time, "process_time", lambda: 2.0)
    write(tmp_path, {"proc/stat": "cpu  900 0 0 0 0 0 0 0 0 0\n"
                                  "cpu0 100 20 30 999 999 4 5 6 0 0\n"
                                  "cpu1 300 0 0 999 999 0 0 0 0 0\n"
                                  "cpu2 235 0 0 999 999 0 0 0 0 0\nctxt 7\n"})  # fmt: skip
    assert taken_by_others(tmp_path) == 400 / os.sysconf("SC_CLK_TCK") - 2.0
    assert taken_by_others(tmp_path / "elsewhere") == 0.0


def test_a_process_beside_this_one_is_another() -> None:
    before = taken_by_others()
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", "while True: pass"], timeout=1.0, check=False)
    assert taken_by_others() - before > 0.3  # it shares its processor with other tests


# --- the choice -----------------------------------------------------------------------------------


def test_more_threads_only_where_they_gain() -> None:
    """Waking costs 1; two threads share a core's arithmetic, so that four gain 3 % on two."""
    speed = {1: 1.0, 2: 2.0, 4: 2.06}

    def seconds(rows: int, count: int) -> float:
        return 1e-3 * (rows / speed[count] + (count > 1))

    chosen = measure_threads(seconds, (1, 2, 4), (1, 2, 4, 16, 64))
    assert chosen == Threads(((1, 1), (4, 2)))
    assert [chosen.of(rows) for rows in (1, 3, 4, 1000)] == [1, 1, 2, 2]


def test_a_disturbed_forward_decides_nothing() -> None:
    calls = 0

    def seconds(rows: int, count: int) -> float:
        nonlocal calls
        calls += 1
        return 1e-3 / count * (50 if calls == 2 else 1)

    assert measure_threads(seconds, (1, 2), (1,)).of(1) == 2


def test_long_forwards_are_measured_once_and_are_the_last_size() -> None:
    asked: list[tuple[int, int]] = []

    def seconds(rows: int, count: int) -> float:
        asked.append((rows, count))
        return 0.4 * rows / count

    assert measure_threads(seconds, (1, 2), (1, 4, 16)).of(16) == 2
    assert asked == [(1, 1), (1, 2)]


def test_a_model_keeps_its_choice_within_the_limit(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels.status()[0]:
        pytest.skip("no C kernels here")
    runner = LlamaRunner(tiny_folder)
    ops = runner.native_ops
    assert ops is not None
    assert choose_threads(runner) == ()  # tests run on one thread
    assert ops.threads is None
    limit_threads(2)
    monkeypatch.setattr("paceline.profile.usable_cores", lambda: Cores(2, 2))
    steps = choose_threads(runner)
    assert steps[0][0] == 1 and {count for _, count in steps} <= {1, 2}
    assert ops.threads == Threads(steps)
    assert runner.num_free == runner.kv_capacity
    set_threads(runner, ((1, 2), (8, 4)))
    assert [ops._num_threads(rows, Packing.FLOATS, 1, 1.0) for rows in (1, 8)] == [2, 2]
    limit_threads(1)
    assert ops._num_threads(1, Packing.FLOATS, 1, 1.0) == 1


@pytest.mark.parametrize(
    ("value", "most"), [("1", 1), ("1,8", 1), ("0", 1), ("64", 64), ("many", 64), ("", 64)]
)
def test_openmps_own_limit_counts(value: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_num_threads", 0)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert kernels.num_threads() == min(most, kernels.available_cores())


TWO_THREADS_OF_PYTHON = """
import threading, time
import numpy as np
from paceline.demo import TARGET_DIR
from paceline.loading import load_runner
from paceline.models.base import Segment
from paceline.models.threads import Threads

runner = load_runner(TARGET_DIR, kv_tokens=1024)
runner.native_ops.threads = Threads(((1, 2),))

def measure():
    sequence, best = runner.new_sequence(), 1.0
    for _ in range(80):
        started = time.perf_counter()
        runner.forward([Segment(sequence, np.arange(8))])
        best = min(best, time.perf_counter() - started)
        runner.commit(sequence, ())
    runner.free(sequence)
    found.append(best)

found = []
measure()
other = threading.Thread(target=measure)
other.start()
other.join()
print(found[1] / found[0])
"""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(usable_cores().usable < 2, reason="one processor: there is nothing to wait for")
def test_a_servers_thread_is_as_fast_as_the_one_that_measured() -> None:
    """Each Python thread that runs forwards has OpenMP threads of its own. With more of them than
    processors, OpenMP puts those that wait to sleep, and forwards took four times as long."""
    own = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", TWO_THREADS_OF_PYTHON],
        env={name: value for name, value in os.environ.items() if name not in own},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert float(done.stdout) < 1.6
