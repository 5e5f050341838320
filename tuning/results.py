"""The results of a sweep: a folder of small JSON files, on any storage that fsspec reaches.

::

    sweep.json        the manifest: space, models, workload, environment, state
    trials/KEY.json   a record of each trial, written when it ends
    predictions.json  the simulator's predictions for the points of the space
    best.yaml         the fastest exact configuration, a file for `paceline up --config`
    experience.json   what method `auto` has learnt from the prompts, which best.yaml brings along
    pareto/KEY.yaml   with several objectives: the configurations that no other one beats in all
    report.html       the pictures
    tune/             Ray Tune's own files

A sweep that was killed goes on from the records of its trials.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Literal, TypeVar

import fsspec
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from paceline.config import SpeculationConfig
from paceline.errors import InvalidArgument
from paceline.plan import resolve

VERSION = 1
EXPERIENCE = "experience.json"

T = TypeVar("T")


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Point(_Value):
    """One configuration: what a trial measures.

    Attributes:
        speculation: the knobs that the space sets; the method's defaults fill in the rest.
        topology: "colocated" or "actors".
        dtype: of the target.
    """

    speculation: SpeculationConfig
    topology: str = "colocated"
    dtype: str = "float32"

    @cached_property
    def key(self) -> str:
        """Short name, the same for points that differ only in how they are written."""
        resolved = resolve(self.speculation).config.model_dump(mode="json")
        text = json.dumps([resolved, self.topology, self.dtype], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def is_ar(self) -> bool:
        plan = resolve(self.speculation)
        drafts = plan.method.drafter != "none" and plan.config.num_speculative_tokens != 0
        return not drafts and plan.method.lossless

    @property
    def knobs(self) -> dict[str, Any]:
        """The knobs that the space sets, without the method, as JSON values."""
        dumped = self.speculation.model_dump(mode="json", exclude_defaults=True)
        return {name: value for name, value in dumped.items() if name != "method"}

    @property
    def label(self) -> str:
        """One line for tables: the method and its knobs."""
        words = [self.speculation.method]
        words += [
            f"{name}={json.dumps(value).strip(chr(34))}" for name, value in self.knobs.items()
        ]
        words += [] if self.topology == "colocated" else [self.topology]
        words += [] if self.dtype == "float32" else [self.dtype]
        return " ".join(words)


class Interval(_Value):
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float


class ExampleDraft(_Value):
    """The largest draft that was verified while measuring, for a picture.

    Attributes:
        parent_indices: as in a Draft.
        texts: the text of each node's token.
        accepted: the nodes of the accepted path.
    """

    parent_indices: tuple[int, ...]
    texts: tuple[str, ...]
    accepted: tuple[int, ...]


class Metrics(_Value):
    """The measurements of a configuration, in pairs with AR on the same prompts.

    In all ratios, more than 1 means that the configuration is faster.

    Attributes:
        goodput_ratio: tokens per second over AR's.
        latency_p50_ratio, latency_p99_ratio: AR's latency of a request over the configuration's.
        accepted_by_depth, drafted_by_depth: raw counters, see SessionStatistics.
        memory_mb: peak resident memory of the measuring process.
    """

    goodput_ratio: Interval
    latency_p50_ratio: Interval
    latency_p99_ratio: Interval
    tokens_per_second: float
    ar_tokens_per_second: float
    latency_p50_ms: float
    latency_p99_ms: float
    mean_accepted_length: float
    acceptance_rate: float
    accepted_by_depth: tuple[int, ...] = ()
    drafted_by_depth: tuple[int, ...] = ()
    memory_mb: float
    identical_to_ar: bool | None = Field(
        description="None if the rule promises AR's distribution, not its tokens."
    )
    num_pairs: int
    num_prompts: int
    example: ExampleDraft | None = None


OBJECTIVES: Mapping[str, str] = {
    "goodput": "goodput_ratio",
    "latency_p50": "latency_p50_ratio",
    "latency_p99": "latency_p99_ratio",
}
"""What a sweep may maximise, and the field of Metrics with its ratio."""

Status = Literal["finished", "stopped", "failed"]


class TrialRecord(_Value):
    """A trial that ended.

    Attributes:
        key: of its point.
        number: of the trial in the order of their starts; AR is 0.
        status: "finished", "stopped" before all pairs were measured, because it could not win, or
            "failed", which is no result.
        reason: why it was stopped or failed.
        metrics: None if it failed.
        confirmed: measurements taken once more at the end, side by side with the other best trials.
            Unlike ``metrics`` they are not high because the highest were chosen.
        refused: the constraint that it breaks, with the value; such a trial is never the best.
        predicted: the simulator's goodput ratio; None if it was not simulated.
        seconds: that the trial took, loading included.
        node: host that ran it.
    """

    key: str
    number: int
    point: Point
    status: Status
    reason: str | None = None
    metrics: Metrics | None = None
    confirmed: Metrics | None = None
    refused: str | None = None
    predicted: float | None = None
    seconds: float = 0.0
    node: str = ""

    @property
    def counts(self) -> bool:
        """Whether the trial may be the best: it was measured and keeps the constraints."""
        return self.metrics is not None and self.refused is None

    def objective(self, name: str) -> Interval:
        """The ratio of the objective ``name``, with its interval."""
        metrics = self.confirmed or self.metrics
        assert metrics is not None
        found: Interval = getattr(metrics, OBJECTIVES[name])
        return found


class PredictedResult(_Value):
    """The simulator's prediction for a point."""

    key: str
    point: Point
    goodput_ratio: float
    mean_accepted_length: float


class Manifest(_Value):
    """What a sweep searches, where, and how far it came.

    Attributes:
        space: the YAML document, with its defaults filled in.
        objectives: names of OBJECTIVES; the first one decides.
        environment: machine, versions, commit; see paceline.bench.environment.
        num_runs: how often the sweep was started or resumed.
        seconds: of each stage ("check", "simulation", "trials", "confirm"), over all runs.
    """

    version: int = VERSION
    name: str
    state: Literal["running", "finished", "interrupted", "failed"] = "running"
    started: str
    finished: str | None = None
    space: dict[str, Any]
    objectives: tuple[str, ...]
    environment: dict[str, Any]
    num_points: int | None = None
    num_runs: int = 1
    seconds: dict[str, float] = {}


class Results:
    """A result folder.

    Args:
        url: a local path, or any URL that fsspec opens (``s3://bucket/sweeps/x``).
    """

    def __init__(self, url: str) -> None:
        self.url = str(url).rstrip("/")
        self._fs, self._root = fsspec.core.url_to_fs(self.url)

    # --- files ------------------------------------------------------------------------------------

    def path(self, name: str) -> str:
        """The path or URL of a file of the folder, as users write it."""
        return f"{self.url}/{name}"

    def exists(self, name: str = "sweep.json") -> bool:
        return bool(self._fs.exists(f"{self._root}/{name}"))

    def read(self, name: str) -> str:
        return self.read_bytes(name).decode("utf-8")

    def write(self, name: str, text: str) -> None:
        """Write a file at once: a reader never sees half of it."""
        self.write_bytes(name, text.encode("utf-8"))

    def read_bytes(self, name: str) -> bytes:
        with self._fs.open(f"{self._root}/{name}", "rb") as file:
            content: bytes = file.read()
        return content

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write bytes, as :meth:`write` writes text."""
        target = f"{self._root}/{name}"
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        part = f"{target}.part"
        with self._fs.open(part, "wb") as file:
            file.write(content)
        self._fs.mv(part, target)

    def remove(self, name: str) -> None:
        self._fs.rm(f"{self._root}/{name}")

    # --- contents ---------------------------------------------------------------------------------

    def save_manifest(self, manifest: Manifest) -> None:
        self.write("sweep.json", manifest.model_dump_json(indent=1) + "\n")

    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            InvalidArgument: no sweep is there, or it is of another version.
        """
        if not self.exists():
            raise InvalidArgument("result", self.url, "a folder that a sweep wrote")
        return _parse(TypeAdapter(Manifest), self.read("sweep.json"), self.path("sweep.json"))

    def save_trial(self, record: TrialRecord) -> None:
        self.write(f"trials/{record.key}.json", record.model_dump_json(indent=1) + "\n")

    def trials(self) -> list[TrialRecord]:
        """The trials that ended, in the order of their starts."""
        if not self.exists("trials"):
            return []
        names = sorted(n for n in self._fs.ls(f"{self._root}/trials", detail=False))
        records = [
            _parse(
                TypeAdapter(TrialRecord), self.read(f"trials/{name}"), self.path(f"trials/{name}")
            )
            for name in (str(n).rpartition("/")[2] for n in names)
            if name.endswith(".json")
        ]
        return sorted(records, key=lambda record: record.number)

    def save_predictions(self, predictions: Iterable[PredictedResult]) -> None:
        values = [p.model_dump(mode="json", exclude_defaults=True) for p in predictions]
        self.write("predictions.json", json.dumps(values) + "\n")

    def predictions(self) -> list[PredictedResult]:
        if not self.exists("predictions.json"):
            return []
        found: list[PredictedResult] = _parse(
            TypeAdapter(list[PredictedResult]), self.read("predictions.json"),
            self.path("predictions.json"),
        )  # fmt: skip
        return found


def _parse(kind: TypeAdapter[T], text: str, where: str) -> T:
    try:
        return kind.validate_json(text)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise InvalidArgument("result", where, f"a file that a sweep wrote ({reason})") from None


def best_trial(records: Iterable[TrialRecord], objective: str) -> TrialRecord | None:
    """The fastest trial: AR, unless another one is surely faster.

    Of the trials that count, confirmed ones go first. A trial whose confidence interval includes
    AR's ratio, 1, is not surely faster.
    """
    counting = [record for record in records if record.counts]
    confirmed = [record for record in counting if record.confirmed is not None]
    better = [
        record
        for record in confirmed or counting
        if not record.point.is_ar and record.objective(objective).low > 1
    ]
    baseline = next((record for record in counting if record.point.is_ar), None)
    return max(better, key=lambda r: r.objective(objective).value, default=baseline)


def pareto_front(records: Iterable[TrialRecord], objectives: Iterable[str]) -> list[TrialRecord]:
    """The trials that no other one beats or equals in all objectives, best in the first one first.

    Of trials that are equal in all objectives, the one that started first stays.
    """
    names = list(objectives)
    counting = [record for record in records if record.counts]
    values = [tuple(record.objective(name).value for name in names) for record in counting]

    def beaten(i: int) -> bool:
        return any(
            all(theirs >= mine for theirs, mine in zip(values[j], values[i], strict=True))
            and (values[j] != values[i] or j < i)
            for j in range(len(counting))
            if j != i
        )

    front = [i for i in range(len(counting)) if not beaten(i)]
    return [counting[i] for i in sorted(front, key=lambda i: values[i], reverse=True)]
