"""Measure a row of the board: one method against AR, in a process that does nothing else.

A row has the numbers of :func:`paceline.bench.run_bench` by category, with what a board needs
beside them: an interval for the speedup, memory, the processor's roofline, and which prompts had
AR's tokens. :mod:`paceline.bench.board_rows` is its file.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import paceline
from paceline.bench.backends import LocalBackend
from paceline.bench.board_rows import (
    ALL,
    BoardMachine,
    BoardMemory,
    BoardResult,
    BoardRow,
    Exactness,
    digest_of,
    read_row,
    slug,
)
from paceline.bench.environment import describe_environment
from paceline.bench.footprint import footprint
from paceline.bench.kernels import Speeds
from paceline.bench.run import BenchOptions, Progress, load_backend, parse_methods, run_bench
from paceline.errors import InvalidArgument, PacelineError
from paceline.loading import pick_device
from paceline.memory import peak_memory, reset_peak_memory
from paceline.methods import METHODS
from paceline.models import kernels
from paceline.models.llama import LlamaRunner

RESAMPLES = 2000
_SPEEDS_SECONDS = 0.2


def board_methods(methods: str, *, allow_lossy: bool = False) -> list[str]:
    """The rows of a board, AR first; "all": whatever needs no client.

    Raises:
        InvalidArgument: see :func:`paceline.bench.parse_methods`.
    """
    known = [name for name, method in METHODS.items() if method.drafter != "client"]
    return list(parse_methods(methods, known, allow_lossy=allow_lossy))


def board_settings(options: BenchOptions) -> dict[str, Any]:
    """What the numbers of a row depend on, as JSON values; of the prompts' file its digest."""
    prompts = None
    if options.prompts is not None:
        try:
            content = Path(options.prompts).read_bytes()
        except OSError as error:
            raise InvalidArgument("prompts", str(options.prompts), f"a file ({error})") from error
        prompts = f"{Path(options.prompts).name} {hashlib.sha256(content).hexdigest()[:16]}"
    names = (
        "suite", "chat", "max_tokens", "temperature", "seed", "repetitions", "limit", "dtype",
        "numerics", "batch_invariant", "allow_lossy",
    )  # fmt: skip
    return {
        **{name: getattr(options, name) for name in names},
        "drafter": None if options.drafter is None else _model_name(options.drafter),
        "heads": None if options.heads is None else Path(options.heads).name,
        "prompts": prompts,
        "device": pick_device(options.device),
    }


def describe_machine(device: str) -> BoardMachine:
    """The machine that this process runs on."""
    facts = describe_environment()
    usable = kernels.status()[0]
    variant = kernels.variant() if usable else "off"
    what = facts["gpu"] if device.startswith("cuda") else f"{facts['cpu']} {facts['cores']} cores"
    return BoardMachine(
        name=slug(f"{what} {variant}".lower()),
        cpu=facts["cpu"],
        cores=facts["cores"],
        threads=facts["threads"],
        kernels=variant,
        platform=facts["platform"],
        gpu=facts["gpu"],
    )


def for_method(row: BoardRow, method: str, reason: str | None = None) -> BoardRow:
    """A row without numbers for another method, from the same machine."""
    digest = digest_of(method, row.settings)
    return replace(row, method=method, digest=digest, reason=reason)


def is_measured(row: BoardRow, folder: Path) -> bool:
    """Whether a folder has this row's numbers already, with the same settings."""
    with suppress(InvalidArgument):
        found = read_row(folder / row.path)
        return found.reason is None and found.digest == row.digest
    return False


def empty_row(
    options: BenchOptions, method: str, command: str, reason: str | None = None
) -> BoardRow:
    """A row of this machine without numbers; ``reason`` says why."""
    facts, settings = describe_environment(), board_settings(options)
    return BoardRow(
        version=1,
        method=method,
        target="demo" if options.target is None else _model_name(options.target),
        suite=options.suite or ("built-in" if options.prompts is None else "spec-bench"),
        machine=describe_machine(pick_device(options.device)),
        command=command,
        commit=facts["git_commit"],
        date=facts["date"],
        paceline=paceline.__version__,
        python=facts["python"],
        torch=facts["torch"],
        fingerprint=None,
        settings=settings,
        digest=digest_of(method, settings),
        results=(),
        memory=None,
        exactness=None,
        reason=reason,
        note=None,
    )


def measure_row(
    options: BenchOptions, method: str, command: str, progress: Progress | None = None
) -> BoardRow:
    """Measure one method. A method that cannot run gives a row that says why.

    The peak of memory is the process's, so call it in one that has done nothing else.

    Args:
        options: of the board; ``methods`` is ignored.
        method: of :func:`board_methods`.
        command: that the row names.
    """
    options = replace(
        options, methods=[method], batch=1, peers=False, topology="colocated", samples=True
    )
    reset_peak_memory()
    try:
        backend = load_backend(options)
        reason = backend.unavailable.get(method.partition(":")[0])
        if reason is not None:
            return empty_row(options, method, command, _without_place(reason))
        loading = peak_memory()
        before = _speeds(backend)  # which reads an array of 256 MB
        reset_peak_memory()
        result = run_bench(options, progress, local=backend)
    except PacelineError as error:
        return empty_row(options, method, command, _without_place(str(error)))
    peak = max(loading, peak_memory())
    memory = BoardMemory(peak=peak, drafter=_drafter_bytes(backend, method, options))
    speeds = [found for found in (before, _speeds(backend)) if found is not None]
    mine = [row for row in result["results"] if row["method"] == method]
    samples = [sample for sample in result["samples"] if sample["method"] == method]
    facts = result["environment"]
    return replace(
        empty_row(options, method, command),
        fingerprint=facts["fingerprint"] or None,
        # Every row has all prompts, and the same ones; "all" comes first.
        results=tuple(
            _result(row, [s for s in samples if row["category"] in (s["category"], ALL)], backend,
                    speeds)
            for row in sorted(mine, key=lambda row: row["category"] != ALL)
        ),
        memory=memory,
        exactness=_exactness(samples),
        note=next((row["note"] for row in mine if row["note"]), None),
    )  # fmt: skip


def _model_name(model: str | Path) -> str:
    """A model's name; of a folder or file, what it is called, wherever it lies."""
    path = Path(model)
    return path.name if path.exists() else str(model)


def _without_place(text: str) -> str:
    """A message without the folder that this machine has Paceline in."""
    return text.replace(f"{Path(paceline.__file__).parents[1]}/", "")


# --- numbers --------------------------------------------------------------------------------------


def _result(
    row: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
    backend: LocalBackend,
    speeds: Sequence[Speeds],
) -> BoardResult:
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        ratios[sample["prompt_ids"][0]].append(sample["speedup_vs_ar"])
    least = _roofline_seconds(backend, row["verify_rows"], speeds)
    return BoardResult(
        category=row["category"],
        num_prompts=row["num_prompts"],
        num_samples=row["num_samples"],
        speedup=row["speedup_vs_ar"],
        interval=speedup_interval(list(ratios.values())),
        speedup_bound=row["speedup_bound"],
        tokens_per_second=row["tokens_per_second"],
        mean_accepted_length=row["mean_accepted_length"],
        drafted_by_depth=tuple(row["drafted_by_depth"]),
        accepted_by_depth=tuple(row["accepted_by_depth"]),
        draft_share=row["draft_share"],
        verify_rows=row["verify_rows"],
        verify_ms=row["verify_ms"],
        roofline_share=None if least is None else 1e3 * least / row["verify_ms"],
    )


def speedup_interval(
    ratios: Sequence[Sequence[float]], resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """A 95 % interval of the median ratio, for other prompts of the same kind.

    Percentiles of a bootstrap that draws prompts with replacement; a prompt brings all of its
    repetitions (Efron 1979). The draws are the same each time.

    Args:
        ratios: of each prompt, its repetitions.  # [num_prompts, repetitions]

    Returns:
        None with fewer than two prompts.
    """
    if len(ratios) < 2:
        return None
    values = np.asarray(ratios, np.float64)
    chosen = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    medians = np.median(values[chosen].reshape(resamples, -1), axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(low), float(high)


def _exactness(samples: Sequence[Mapping[str, Any]]) -> Exactness | None:
    same: dict[str, bool] = {}
    for sample in samples:
        if sample["identical_to_ar"] is None:
            return None
        (prompt,), (identical,) = sample["prompt_ids"], sample["identical_to_ar"]
        same[prompt] = same.get(prompt, True) and identical
    differing = tuple(prompt for prompt, identical in same.items() if not identical)
    return Exactness(
        num_prompts=len(same), num_identical=len(same) - len(differing), differing=differing
    )


def _drafter_bytes(backend: LocalBackend, method: str, options: BenchOptions) -> int:
    (*_, (config, _)) = parse_methods(
        [method], backend.methods, allow_lossy=options.allow_lossy
    ).values()
    engine = backend.engine
    shared = (engine.target, engine.tokenizer, engine.limits, METHODS)
    return footprint(backend.drafters(config), shared)


# --- the processor's limits -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Work:
    """What a forward multiplies with: numbers, bytes, and on how many threads."""

    weights: int
    num_bytes: int
    packing: Any
    threads: int

    @staticmethod
    def of(backend: LocalBackend, rows: float) -> _Work | None:
        """None where the C kernels do not compute."""
        runner = backend.runner
        if not isinstance(runner, LlamaRunner) or runner.native_ops is None:
            return None
        weights, threads = runner.products, runner.native_ops.threads
        return _Work(
            sum(weight.num_outputs * weight.num_inputs for weight in weights),
            sum(weight.data.nbytes for weight in weights),
            weights[0].packing,
            kernels.num_threads() if threads is None else threads.of(round(rows)),
        )


def _speeds(backend: LocalBackend) -> Speeds | None:
    work = _Work.of(backend, 1)
    if work is None:
        return None
    return Speeds.of(kernels.load(), work.packing, work.threads, _SPEEDS_SECONDS)


def _roofline_seconds(
    backend: LocalBackend, rows: float | None, speeds: Sequence[Speeds]
) -> float | None:
    """The least time for the products of a forward over so many tokens.

    Of several measurements of the processor the fastest counts: other processes only slow one down.
    """
    if rows is None or not speeds:
        return None
    work = _Work.of(backend, rows)
    assert work is not None
    arithmetic = work.weights * rows / max(each.peak for each in speeds)
    reading = work.num_bytes / max(each.memory for each in speeds)
    return max(arithmetic, reading)
