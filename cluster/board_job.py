"""Measure the rows of a board: each in a process of its own, here or on the nodes of a Ray.

Nothing else may run beside a row that is timed, so a node measures one at a time and Ray reserves
all of its CPUs, unless the job says how many. A file is written as soon as its row is there, and a
row that has its file is left out, so that a board goes on where it was stopped.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.bench.board import (
    BenchOptions,
    BoardRow,
    empty_row,
    for_method,
    is_measured,
    measure_row,
)
from paceline.bench.board_rows import write_row
from paceline.bench.run import Progress
from paceline.cluster.cli_output import set_threads

WATCH_S = 5.0
START_WAIT_S = 300.0
"""Seconds for which rows wait for CPUs that others hold."""

Report = Callable[[BoardRow], None]
"""Called with each row that has been measured, or with the reason why it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardJob:
    """What a board measures.

    Attributes:
        options: of each row's benchmark.
        methods: of :func:`paceline.bench.board.board_methods`.
        command: that the rows name.
        out: folder of the rows' files.
        threads: as ``--threads``.
        again: also measure rows whose files are there.
        cpus: that a row reserves on a node of a Ray; None: all of them.
    """

    options: BenchOptions
    methods: tuple[str, ...]
    command: str
    out: Path
    threads: int | None = None
    again: bool = False
    cpus: float | None = None

    def waiting(self, like: BoardRow) -> deque[str]:
        """The methods that a machine still has to measure; ``like`` is a row of it."""
        return deque(
            method
            for method in self.methods
            if self.again or not is_measured(for_method(like, method), self.out)
        )


def measure(job: BoardJob, method: str, progress: Progress | None = None) -> BoardRow:
    """Measure a row in this process; whatever goes wrong is the row's reason."""
    try:
        set_threads(job.threads, job.options.target)
        return measure_row(job.options, method, job.command, progress)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return empty_row(job.options, method, job.command, reason)


# --- on this machine ------------------------------------------------------------------------------


def run_here(job: BoardJob, report: Report, progress: Callable[[int, int, str], None]) -> int:
    """Measure the rows one after the other; returns how many had their files already.

    Args:
        progress: called before every run with the rows done, those to do, and what is running.
    """
    set_threads(job.threads, job.options.target)
    like = empty_row(job.options, job.methods[0], job.command)
    methods = job.waiting(like)
    for number, method in enumerate(methods):

        def tell(done: int, total: int, what: str, at: int = number, row: str = method) -> None:
            progress(at, len(methods), f"{row}: {what} ({done}/{total})")

        tell(0, 0, "loading")
        row = _measure_apart(job, method, like, tell)
        write_row(row, job.out)
        report(row)
    return len(job.methods) - len(methods)


def _measure_apart(job: BoardJob, method: str, like: BoardRow, progress: Progress) -> BoardRow:
    """Measure a row in a process of its own, whose peak of memory is then the row's."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["paceline.cluster.board_job"])  # torch takes seconds
    else:
        context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, job, method), daemon=True)
    process.start()
    theirs.close()
    try:
        while not isinstance(message := ours.recv(), BoardRow):
            progress(*message)
        return message
    except EOFError:
        process.join()
        return for_method(like, method, f"its process ended with code {process.exitcode}")
    finally:
        process.terminate()
        process.join()


def _child(connection: Connection, job: BoardJob, method: str) -> None:
    connection.send(measure(job, method, lambda *step: connection.send(step)))


# --- on a Ray -------------------------------------------------------------------------------------

_File = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of the cluster; ``like`` is an empty row of it."""

    node_id: str
    cpus: float
    gpus: float
    like: BoardRow


def run_on_ray(
    job: BoardJob, address: str, report: Report, progress: Callable[[int, int, str], None]
) -> int:
    """Measure the rows on the nodes of a Ray, one at a time on each.

    Nodes of one kind of machine share its rows; another kind gets all rows of its own. Tasks get
    the prompts' file from here. Models are looked up by their names on each node.

    Returns:
        How many rows had their files already.

    Raises:
        ClusterError: no Ray answers, a node cannot be asked what it is, or what else runs there
            holds CPUs that a row needs for longer than ``START_WAIT_S``.
    """
    from paceline.cluster.local_ray import ClusterError, join_ray, prepare_environment

    prepare_environment()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    join_ray(address)
    path = job.options.prompts
    prompts = None if path is None else (Path(path).name, Path(path).read_bytes())

    def start(function: Callable[..., Any], node_id: str, *args: Any, **needs: float) -> Any:
        # A new process for each row: its peak of memory is the row's.
        task = ray.remote(max_retries=0, max_calls=1, **needs)(function)
        affinity = NodeAffinitySchedulingStrategy(node_id, soft=False)
        return task.options(scheduling_strategy=affinity).remote(*args)

    alive = [n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) > 0]
    asked = [start(_like_on_node, node["NodeID"], job, prompts, num_cpus=0) for node in alive]
    try:
        nodes = [
            _Node(n["NodeID"], n["Resources"]["CPU"], n["Resources"].get("GPU", 0), ray.get(like))
            for n, like in zip(alive, asked, strict=True)
        ]
    except ray.exceptions.RayError as error:
        raise ClusterError(f"a node cannot measure: {_last_line(error)}") from error
    kinds = {node.like.machine.name: node.like for node in nodes}
    waiting = {kind: job.waiting(like) for kind, like in kinds.items()}
    total, done = sum(map(len, waiting.values())), 0
    running: dict[Any, tuple[_Node, str, float]] = {}
    progressed = time.monotonic()

    def start_next(node: _Node) -> None:
        methods = waiting[node.like.machine.name]
        if methods:
            method = methods.popleft()
            cpus = node.cpus if job.cpus is None else min(job.cpus, node.cpus)
            needs = {"num_cpus": cpus, "num_gpus": node.gpus}
            task = start(_measure_on_node, node.node_id, job, method, prompts, **needs)
            running[task] = node, method, cpus

    def held() -> float:
        """CPUs that others hold while rows wait for them; 0 if no row waits."""
        free = ray.available_resources().get(  # type: ignore[no-untyped-call]
            "CPU", 0.0
        )
        total = sum(node.cpus for node in nodes)
        rows = sum(cpus for _, _, cpus in running.values())
        return total - free if total - free < rows - 0.01 else 0.0

    for node in nodes:
        start_next(node)
    while running:
        progress(done, total, ", ".join(method for _, method, _ in running.values()))
        while not (ended := ray.wait(list(running), timeout=WATCH_S)[0]):
            if not (others := held()):
                progressed = time.monotonic()
                continue
            names = ", ".join(method for _, method, _ in running.values())
            what = f"waiting for CPUs for {names}: others hold {others:g}"
            progress(done, total, what)
            if time.monotonic() - progressed > START_WAIT_S:
                for task in running:
                    ray.cancel(task, force=True)
                raise ClusterError(
                    f"{what} for {START_WAIT_S:g} s: end what else runs on this Ray, or reserve "
                    "fewer for a row with --cpus"
                )
        task = ended[0]
        node, method, _ = running.pop(task)
        progressed = time.monotonic()
        try:
            row = ray.get(task)
        except ray.exceptions.RayError as error:
            row = for_method(node.like, method, f"its process failed: {_last_line(error)}")
        write_row(row, job.out)
        done += 1
        report(row)
        start_next(node)
    return len(kinds) * len(job.methods) - total


def _like_on_node(job: BoardJob, prompts: _File | None) -> BoardRow:
    return _with_prompts(
        job, prompts, lambda job: empty_row(job.options, job.methods[0], job.command)
    )


def _measure_on_node(job: BoardJob, method: str, prompts: _File | None) -> BoardRow:
    return _with_prompts(job, prompts, lambda job: measure(job, method))


def _with_prompts(
    job: BoardJob, prompts: _File | None, call: Callable[[BoardJob], BoardRow]
) -> BoardRow:
    """Call with a job whose prompts' file is on this node."""
    if prompts is None:
        return call(job)
    with tempfile.TemporaryDirectory() as folder:
        name, content = prompts
        file = Path(folder, name)
        file.write_bytes(content)
        return call(replace(job, options=replace(job.options, prompts=file)))


def _last_line(error: BaseException) -> str:
    lines = str(getattr(error, "cause", None) or error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
