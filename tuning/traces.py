"""Traces: the target's output, and what each drafter proposes at every position of it.

Recording runs the real engine with the real drafters (:mod:`paceline.tuning.recorders`): first the
target generates its output, then rounds follow that output. From these recordings
:mod:`paceline.tuning.simulator` computes the accepted lengths of thousands of configurations
without a model.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.model_names import resolve_model
from paceline.plan import Plan, resolve
from paceline.profile import fingerprint
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.tuning.families import (
    COMPOSITE,
    REMEMBERING,
    Family,
    FamilyPart,
    is_ar,
    parts_of,
    why_not,
)
from paceline.tuning.recorders import RECORDERS
from paceline.tuning.recordings import (
    DraftRecording,
    OrderRecording,
    RankRecording,
    Recording,
    Truth,
)
from paceline.tuning.results import Results

VERSION = 1
FILE = "traces.npz"
LIMIT_S = 120.0  # no recording begins after this time
_TOGETHER = 16  # prompts in one recording, unless the drafter remembers earlier ones
_BUDGETS = 4  # in one recording of a drafter that has models in it
_KINDS: tuple[type[Recording], ...] = (RankRecording, OrderRecording, DraftRecording)

Progress = Callable[[int, int, str], None]
"""Called with the number of recordings done, of all recordings, and a name of the next one."""


@dataclass(frozen=True, slots=True, eq=False)
class Traces:
    """Recordings of a set of prompts.

    Attributes:
        key: models and workload that they hold for, see :func:`traces_key`.
        concurrency: prompts that are decoded together.
        params: how the target's tokens were chosen.
        truth: the target's output.
        recordings: by :attr:`Family.key`.
        refused: why the engine cannot run a family.
    """

    key: dict[str, str]
    concurrency: int
    params: SamplingParams
    truth: Truth
    recordings: dict[str, Recording]
    refused: dict[str, str]

    def covers(self, part: FamilyPart) -> bool:
        """Whether a part itself is recorded completely."""
        found = self.recordings.get(part.family.key)
        return part.family.key in self.refused or (found is not None and found.covers(part.budget))

    def missing(self, configs: Iterable[SpeculationConfig]) -> list[SpeculationConfig]:
        """The configurations that could be simulated but are not recorded."""
        return [
            config
            for config in configs
            if not all(self.covers(part) for part in _wanted(resolve(config), self.params))
        ]

    # --- files ------------------------------------------------------------------------------------

    def save(self, results: Results, name: str = FILE) -> None:
        """Write the traces into a result folder, as one file."""
        arrays = {f"truth.{field.name}": getattr(self.truth, field.name) for field in fields(Truth)}
        index = []
        for number, (key, recording) in enumerate(self.recordings.items()):
            values: dict[str, Any] = {"key": key, "kind": recording.kind}
            for field in fields(recording):
                value = getattr(recording, field.name)
                if isinstance(value, np.ndarray):
                    arrays[f"{number}.{field.name}"] = value
                else:
                    values[field.name] = value
            index.append(values)
        head = {
            "version": VERSION,
            "key": self.key,
            "concurrency": self.concurrency,
            "params": asdict(self.params),
            "recordings": index,
            "refused": self.refused,
        }
        arrays["index"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
        file = io.BytesIO()
        np.savez_compressed(file, allow_pickle=False, **arrays)
        results.write_bytes(name, file.getvalue())

    @staticmethod
    def load(results: Results, key: Mapping[str, str], name: str = FILE) -> Traces:
        """Read the traces of a result folder.

        Raises:
            InvalidArgument: the folder has no traces, or they are damaged, of another version, or
                of other models, prompts or parameters than ``key``.
        """
        where = results.path(name)
        try:
            with np.load(io.BytesIO(results.read_bytes(name)), allow_pickle=False) as file:
                arrays = {entry: file[entry] for entry in file.files}
            head = json.loads(arrays.pop("index").tobytes())
            if head["version"] != VERSION:
                raise InvalidArgument(
                    "traces", where, f"traces of version {VERSION}, not {head['version']}"
                )
            traces = _traces(head, arrays)
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError) as error:
            if isinstance(error, InvalidArgument):
                raise
            raise InvalidArgument("traces", where, f"a file of traces ({error})") from error
        for part, wanted in key.items():
            if traces.key.get(part) != wanted:
                allowed = f"traces whose {part} is {wanted}, not {traces.key.get(part)}"
                raise InvalidArgument("traces", where, allowed)
        return traces


def _traces(head: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Traces:
    truth = Truth(**{field.name: arrays[f"truth.{field.name}"] for field in fields(Truth)})
    recordings = {}
    for number, values in enumerate(head["recordings"]):
        kind = next(kind for kind in _KINDS if kind.kind == values["kind"])
        given = {
            field.name: arrays.get(f"{number}.{field.name}", values.get(field.name))
            for field in fields(kind)
        }
        recordings[values["key"]] = kind(**given)
    raw = head["params"]
    for name in ("stop", "stop_token_ids"):
        raw[name] = tuple(raw[name])
    raw["logit_bias"] = {int(token): bias for token, bias in raw["logit_bias"].items()}
    return Traces(
        dict(head["key"]), head["concurrency"], SamplingParams(**raw), truth, recordings,
        dict(head["refused"]),
    )  # fmt: skip


def traces_key(
    target: str | Path,
    drafter: str | Path | None,
    heads: str | Path | None,
    dtype: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    concurrency: int = 1,
) -> dict[str, str]:
    """What traces hold for: the models and the workload, not the machine.

    Args:
        heads: folder that holds a folder for each of the target's trained heads.
    """
    kinds = sorted(path for path in Path(heads).iterdir() if path.is_dir()) if heads else []
    workload = json.dumps([[list(map(int, prompt)) for prompt in prompts], asdict(params)])
    return {
        "target": fingerprint(resolve_model(target)),
        "drafter": fingerprint(resolve_model(drafter)) if drafter is not None else "",
        "heads": " ".join(f"{path.name}:{fingerprint(path)}" for path in kinds),
        "dtype": dtype,
        "workload": hashlib.sha256(workload.encode()).hexdigest()[:16],
        "concurrency": str(concurrency),
    }


# --- recording ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Task:
    """A family to record, and the budgets of its drafts.

    Attributes:
        num_points: how many configurations it serves.
    """

    family: Family
    plan: Plan
    budgets: set[tuple[int, int]]
    num_points: int = 0

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """Sort key: cheap recordings first, and of those the ones that serve many points."""
        composite = self.plan.method.drafter in COMPOSITE
        return composite, self.family.kind == "order", -self.num_points

    def split(self) -> list[_Task]:
        """Split into parts if each budget costs as much as the first."""
        if self.plan.method.drafter not in COMPOSITE:
            return [self]
        budgets = sorted(self.budgets)
        return [
            replace(self, budgets=set(budgets[start : start + _BUDGETS]))
            for start in range(0, len(budgets), _BUDGETS)
        ]


def record(
    engine: Engine,
    configs: Iterable[SpeculationConfig],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    key: Mapping[str, str],
    concurrency: int = 1,
    known: Traces | None = None,
    limit_s: float = LIMIT_S,
    progress: Progress = lambda done, total, what: None,
) -> Traces:
    """Record what the simulation of these configurations needs.

    Skips configurations that cannot be simulated, and those that the engine refuses
    (:attr:`Traces.refused`). It runs siblings of the engine, so that the engine learns nothing.

    A recording takes about as long as decoding all prompts a few times. Drafters that consist of
    others with models need one for every few budgets, so they come last.

    Args:
        engine: its drafters are in this process.
        params: of all prompts.
        key: see :func:`traces_key`.
        concurrency: prompts that will be decoded together. Drafters that remember earlier outputs
            know those of the groups of this size that came before.
        known: traces with the same key; their recordings are used if they suffice.
        limit_s: no recording begins after so many seconds; :meth:`Traces.missing` returns what is
            left out.

    Raises:
        InvalidArgument: ``known`` has another key, or the engine cannot decode a prompt.
    """
    if not prompts:
        raise InvalidArgument("prompts", [], "at least one prompt")
    if known is not None and known.key != dict(key):
        raise InvalidArgument("known", known.key, f"traces with the key {dict(key)}")
    started = time.monotonic()
    tasks = _tasks(configs, params, known)
    total = len(tasks) + (known is None)
    progress(0, total, "the target's output")
    truth = known.truth if known else _generate(engine, prompts, params)
    recordings = dict(known.recordings) if known else {}
    refused = dict(known.refused) if known else {}
    for done, task in enumerate(tasks, total - len(tasks)):
        if time.monotonic() - started > limit_s:
            break
        progress(done, total, task.family.label)
        name = task.family.key
        try:
            new = _record(engine, task, prompts, params, truth, concurrency)
        except _RefusedError as error:
            refused[name] = str(error.__cause__)
            continue
        before = recordings.get(name)
        if isinstance(new, DraftRecording) and isinstance(before, DraftRecording):
            new = before.joined(new)
        recordings[name] = new
    progress(total, total, "done")
    return Traces(dict(key), concurrency, params, truth, recordings, refused)


class _RefusedError(Exception):
    """The engine refuses a configuration."""


def _submit(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, config: SpeculationConfig
) -> Session:
    try:
        return engine.submit(Request(prompt, params, config))
    except InvalidArgument as error:
        raise _RefusedError from error


def _tasks(
    configs: Iterable[SpeculationConfig], params: SamplingParams, known: Traces | None
) -> list[_Task]:
    tasks: dict[str, _Task] = {}
    for config in configs:
        for part in _wanted(resolve(config), params):
            if known is not None and known.covers(part):
                continue
            task = tasks.setdefault(part.family.key, _Task(part.family, part.plan, set()))
            task.budgets.add((part.budget.depth, part.budget.nodes))
            task.num_points += 1
    for key, task in tasks.items():
        before = known.recordings.get(key) if known else None
        if isinstance(before, OrderRecording):  # the new one covers what it covers, too
            task.budgets.add((before.before.shape[1], before.nodes))
    parts = [part for task in tasks.values() for part in task.split()]
    return sorted(parts, key=lambda task: task.rank)


def _wanted(plan: Plan, params: SamplingParams) -> list[FamilyPart]:
    """The parts of a configuration that have to be recorded."""
    if is_ar(plan) or why_not(plan, params) is not None:
        return []
    return [each for part in parts_of(plan) for each in part.everything()]


def _generate(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Truth:
    sibling, ar = engine.sibling(), SpeculationConfig(method="ar")
    sessions: list[Session] = []
    for start in range(0, len(prompts), _TOGETHER):
        sessions += sibling.generate(prompts[start : start + _TOGETHER], params, ar)
    outputs = [session.output_ids for session in sessions]
    return Truth(
        np.concatenate([np.asarray(output, np.int64) for output in outputs]),
        np.cumsum([0, *map(len, outputs)]).astype(np.int64),
        np.asarray([session.prompt_length for session in sessions], np.int64),
        np.asarray([session.max_length - session.prompt_length for session in sessions], np.int64),
    )


def _record(
    engine: Engine,
    task: _Task,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    truth: Truth,
    concurrency: int,
) -> Recording:
    recorder = RECORDERS[task.family.kind](task.plan, task.budgets, truth)
    name = task.plan.method.drafter
    sibling = engine.sibling()
    together = concurrency if name in REMEMBERING else _TOGETHER
    together = min(together, engine.limits.max_waiting)
    try:
        for start in range(0, len(prompts), together):
            sessions: list[Session] = []
            try:
                for number in range(start, min(start + together, len(prompts))):
                    sessions.append(_submit(sibling, prompts[number], params, recorder.config))
                    recorder.follow(sessions[-1], number)
                if (
                    sibling.drafters[name] is not recorder
                ):  # the engine makes it for the first session
                    recorder.wrap(sibling.drafters[name])
                    sibling.drafters[name] = recorder
                while not all(session.finished for session in sessions):
                    sibling.step()
            finally:
                for session in sessions:
                    sibling.cancel(session.session_id)
            recorder.check(sessions)
    finally:
        recorder.release()
    return recorder.recording()
