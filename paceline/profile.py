"""Measured costs of a pair of models on this machine: what drafting and verifying take.

A profile is a small JSON file. Its key holds all that its numbers depend on (:func:`profile_key`),
so a profile never serves another machine. Length controllers read it. An engine measures a short
one for the first request that drafts (:class:`LoadCosts`); `paceline profile` measures a thorough
one, for several batch sizes, and replaces the short one by it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.cache import cache_folder
from paceline.errors import InvalidArgument, PacelineError
from paceline.model_names import resolve_model
from paceline.models.llama import LlamaRunner
from paceline.models.threads import (
    SIZES,
    Steps,
    Threads,
    measure_threads,
    taken_by_others,
    timed_after_pause,
    usable_cores,
)
from paceline.sampling import argmax_rows
from paceline.types import Budget

if TYPE_CHECKING:
    from paceline.drafters.base import Drafter
    from paceline.engine import Engine
    from paceline.models.base import ModelRunner, Segment
    from paceline.session import Session

logger = logging.getLogger(__name__)

VERSION = 1
NODES = 1, 2, 3, 5, 9, 17  # tokens of one session in a forward: the last one and the drafted ones
DEPTHS = 1, 2, 4, 8
BATCHES = 1, 2, 4, 8, 16
CONTEXT = 128  # committed tokens of each session while it is measured
# What an engine measures by itself, for one session: as much as LOAD_SECONDS allow, but always the
# first ALWAYS_NODES sizes, since one or two would not show how the cost grows with the rows. Where
# vectors are short, kernels take four rows together, and the fifth one costs more than others.
LOAD_NODES, ALWAYS_NODES = (1, 2, 4, 5, 8, 16, 32), 5
LOAD_DEPTHS = 1, 4
LOAD_SECONDS, LOAD_REPETITIONS = 0.25, 25
# Costs are measured again, by the next engines, where others took more than this share of the
# processors meanwhile: numbers of threads and costs would stay wrong for good. On a machine that is
# always busy, the quietest of so many measurements stays.
BUSY, MOST_TRIES = 0.1, 5
REMOTE_REPETITIONS, REMOTE_TIMEOUT_S, REMOTE_RETRY_S = 8, 2.0, 30.0
DIGEST_BYTES = 1 << 16  # of each file of weights, for a digest that reads little

Table = tuple[tuple[float, ...], ...]
Progress = Callable[[int, int], None]  # cells done, cells in all


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """Costs in seconds. Tables have a row for each batch size, a column for each size or depth.

    Attributes:
        key: what it is valid for, see :func:`profile_key`.
        verify_seconds: a target forward with ``nodes`` tokens of each session.
            # [batches, nodes]
        draft_seconds: drafts of these depths for all sessions, without the way to the drafter.
            # [batches, depths]
        read_seconds: what the draft model takes to read a token that it has not seen; 0 where it
            was not measured.
        round_trip_seconds: the way to the drafter and back; 0 in the same process.
        methods: those whose drafter was measured, or drafts with the measured one.
        threads, draft_threads: of the target and the draft model, see
            :class:`paceline.models.threads.Threads`; empty where there was nothing to choose.
        others: share of the processors' time that others took while an engine measured by itself.
        tries: how often engines have measured it, of which this is the quietest time; 0 if it was
            asked for, and is not measured again.
    """

    key: dict[str, str]
    batches: tuple[int, ...]
    nodes: tuple[int, ...]
    verify_seconds: Table
    depths: tuple[int, ...] = ()
    draft_seconds: Table = ()
    read_seconds: float = 0.0
    round_trip_seconds: float = 0.0
    methods: tuple[str, ...] = ()
    threads: Steps = ()
    draft_threads: Steps = ()
    others: float = 0.0
    tries: int = 0
    version: int = VERSION

    @property
    def provisional(self) -> bool:
        """Whether the next engine measures again, because the machine was busy."""
        return self.others > BUSY and 0 < self.tries < MOST_TRIES

    def verify(self, nodes: float, batch: int) -> float:
        """Seconds of a target forward, interpolated.

        If only one batch size was measured, a row costs the same in every session.
        """
        if len(self.batches) == 1:
            return _line(self.nodes, self.verify_seconds[0], nodes * batch / self.batches[0])
        return _at(self.verify_seconds, self.batches, self.nodes, batch, nodes)

    def draft(self, depth: int, batch: int) -> float:
        """Seconds until drafts of this depth are there; 0 for depth 0."""
        if depth == 0:
            return 0.0
        drafting = _at(self.draft_seconds, self.batches, self.depths, batch, depth)
        return drafting + self.round_trip_seconds

    def save(self, file: Path) -> None:
        """Write the JSON document, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.tmp")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        part.replace(file)

    @staticmethod
    def load(file: Path) -> CostProfile:
        """Read a profile.

        Raises:
            InvalidArgument: the file is missing, damaged or of another version.
        """
        try:
            raw: dict[str, Any] = json.loads(file.read_text())
            if raw["version"] != VERSION:
                raise InvalidArgument("profile", f"version {raw['version']}", f"{VERSION}: {file}")
            for name in ("batches", "nodes", "depths", "methods"):
                raw[name] = tuple(raw[name])
            for name in ("verify_seconds", "draft_seconds"):
                raw[name] = tuple(tuple(float(x) for x in row) for row in raw[name])
            for name in ("threads", "draft_threads"):
                raw[name] = tuple((int(rows), int(count)) for rows, count in raw.get(name, ()))
            profile = CostProfile(**raw)
            _check(profile)
            return profile
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, InvalidArgument):
                raise
            raise InvalidArgument("profile", str(file), f"a cost profile ({error})") from error


def _check(profile: CostProfile) -> None:
    tables = [(profile.verify_seconds, profile.nodes)]
    if profile.methods:
        tables.append((profile.draft_seconds, profile.depths))
    for table, columns in tables:
        values = np.array(table, np.float64)
        if values.shape != (len(profile.batches), len(columns)) or not (values > 0).all():
            raise ValueError("tables of positive seconds, one row for each batch size")


def _at(
    table: Table, batches: Sequence[int], columns: Sequence[int], batch: float, column: float
) -> float:
    """Bilinear between the measured points; straight on beyond the last ones."""
    by_batch = [_line(columns, row, column) for row in table]
    return _line(batches, by_batch, batch)


def _line(xs: Sequence[int], ys: Sequence[float], x: float) -> float:
    if x <= xs[-1] or len(xs) == 1:
        return float(np.interp(x, xs, ys))
    slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
    return ys[-1] + slope * (x - xs[-1])


# --- where profiles are kept ----------------------------------------------------------------------


def fingerprint(folder: Path) -> str:
    """A short digest of a model: its configuration and the sizes of its weights."""
    digest = hashlib.sha256()
    if folder.is_file():  # GGUF: all in one
        digest.update(f"{folder.name} {folder.stat().st_size}".encode())
    for file in sorted(folder.glob("*.json")):
        if file.name == "config.json":
            digest.update(file.read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    return digest.hexdigest()[:12]


def weights_digest(folder: Path) -> str:
    """As :func:`fingerprint`, with the ends of the weights: it changes with further training."""
    digest = hashlib.sha256(fingerprint(folder).encode())
    for file in [folder] if folder.is_file() else sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - DIGEST_BYTES))
            digest.update(opened.read())
    return digest.hexdigest()[:12]


def profile_key(
    target: str | Path,
    drafter: str | Path | None,
    dtype: str,
    device: str,
    numerics: str = "fastest",
) -> dict[str, str]:
    """What a profile is valid for: models, what computes them, and on how many threads."""
    import torch

    from paceline.models import kernels

    on_cpu = device == "cpu"
    usable, library = kernels.status() if on_cpu else (False, "")
    return {
        "target": fingerprint(resolve_model(target)),
        "drafter": fingerprint(resolve_model(drafter)) if drafter is not None else "",
        "dtype": dtype,
        "numerics": numerics,
        "device": device,
        "processor": processor() if on_cpu else torch.cuda.get_device_name(device),
        "kernels": f"{kernels.variant()} {_digest(Path(library))}" if usable else "off",
        "threads": str(min(kernels.num_threads(), kernels.available_cores())) if on_cpu else "",
    }


@lru_cache(maxsize=8)
def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def processor() -> str:
    """Name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()} {names[0] if names else platform.processor()}".strip()


def default_path(key: dict[str, str]) -> Path:
    """The file of the profile with this key, in the user's cache folder."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder("profiles") / f"{name}.json"


def find_profile(key: dict[str, str]) -> CostProfile | None:
    """The kept profile with exactly this key, if there is a readable one."""
    file = default_path(key)
    if not file.is_file():
        return None
    try:
        profile = CostProfile.load(file)
    except InvalidArgument:
        return None
    return profile if profile.key == key else None


# --- measuring ------------------------------------------------------------------------------------


def measure(
    engine: Engine,
    key: dict[str, str],
    *,
    batches: Sequence[int] = BATCHES,
    nodes: Sequence[int] = NODES,
    depths: Sequence[int] = DEPTHS,
    repetitions: int = 5,
    round_trip_seconds: float = 0.0,
    progress: Progress = lambda done, total: None,
) -> CostProfile:
    """Measure an idle engine's target, and its draft model where it has one in this process.

    Raises:
        InvalidArgument: a list is not increasing from 1 on, or its sizes do not fit in KV memory.
    """
    for name, values in (("batches", batches), ("nodes", nodes), ("depths", depths)):
        if list(values) != sorted(set(values)) or not values or values[0] < 1:
            raise InvalidArgument(name, list(values), "increasing numbers from 1 on")
    if repetitions < 1:
        raise InvalidArgument("repetitions", repetitions, "at least 1")
    runner = engine.local_target.runner
    context = min(CONTEXT, runner.context_length - max(*nodes, *depths) - 1)
    needed = max(batches) * (context + max(nodes))
    if context < 1 or needed > runner.num_free:
        raise InvalidArgument("batches", list(batches), f"{runner.num_free} KV entries at most")
    drafter = engine.drafters.get("draft_model")
    drafter = None if drafter is None or drafter.elsewhere else drafter
    threads, draft_threads = choose_threads(runner), choose_threads(_runner_of(drafter))
    total = len(batches) * (len(nodes) + (len(depths) if drafter else 0))
    done = 0
    verify, draft = [], []
    for batch in batches:
        verify.append(_measure_target(runner, batch, nodes, context, _medians(repetitions)))
        done += len(nodes)
        progress(done, total)
        if drafter is not None:
            sessions = [new_session(engine.target.vocab_size, i, context) for i in range(batch)]
            draft.append(_measure_drafter(drafter, sessions, depths, _medians(repetitions)))
            done += len(depths)
            progress(done, total)
    return CostProfile(
        key=key,
        batches=tuple(batches),
        nodes=tuple(nodes),
        verify_seconds=tuple(verify),
        depths=tuple(depths) if drafter else (),
        draft_seconds=tuple(draft),
        round_trip_seconds=round_trip_seconds,
        methods=methods_with_draft_model() if drafter else (),
        threads=threads,
        draft_threads=draft_threads,
    )


def _tokens(count: int, vocab_size: int) -> list[int]:
    return [(7 * i + 3) % vocab_size for i in range(count)]


# Seconds of a call for each size, all or the first few of them.
_Clock = Callable[[Callable[[int], None], Sequence[int]], tuple[float, ...]]


def _measure_target(
    runner: ModelRunner, batch: int, nodes: Sequence[int], context: int, clock: _Clock
) -> tuple[float, ...]:
    from paceline.models.base import Segment

    sequences = [runner.new_sequence() for _ in range(batch)]
    try:
        prompt = np.asarray(_tokens(context, runner.vocab_size), np.int64)
        for sequence in sequences:
            runner.forward([Segment(sequence, prompt, logits="none")])
            runner.commit(sequence, range(context))

        def forward(count: int) -> None:
            ids = np.asarray(_tokens(count, runner.vocab_size), np.int64)
            result = runner.forward([Segment(sequence, ids) for sequence in sequences])
            argmax_rows(result.logits)  # as the loop does; waits for a GPU
            for sequence in sequences:
                runner.commit(sequence, ())

        return clock(forward, nodes)
    finally:
        for sequence in sequences:
            runner.free(sequence)


def _measure_drafter(
    drafter: Drafter, sessions: Sequence[Session], depths: Sequence[int], clock: _Clock
) -> tuple[float, ...]:
    try:
        for session in sessions:
            drafter.open(session)

        def propose(depth: int) -> None:
            drafter.propose(sessions, [Budget(depth, depth)] * len(sessions))

        return clock(propose, depths)
    finally:
        for session in sessions:
            drafter.close(session)


def new_session(vocab_size: int, number: int, context: int) -> Session:
    """A session of the method `draft_model` with ``context`` tokens, which no engine runs."""
    from paceline.config import SpeculationConfig
    from paceline.plan import resolve
    from paceline.sampling import SamplingParams
    from paceline.session import Session

    plan = resolve(SpeculationConfig(method="draft_model"))
    return Session(f"profile-{number}", _tokens(context, vocab_size), SamplingParams(), plan)


def _medians(repetitions: int) -> _Clock:
    """Medians over the repetitions; sizes take turns, so that a slow moment meets them all."""

    def seconds(call: Callable[[int], None], sizes: Sequence[int]) -> tuple[float, ...]:
        found: list[list[float]] = [[] for _ in sizes]
        for repetition in range(repetitions + 1):  # the first one warms up
            for size, times in zip(sizes, found, strict=True):
                spent = _timed(call, size)
                if repetition:
                    times.append(spent)
        return tuple(median(times) for times in found)

    return seconds


def _timed(call: Callable[[int], None], size: int) -> float:
    started = time.perf_counter()
    call(size)
    return time.perf_counter() - started


# --- what an engine measures by itself ------------------------------------------------------------


class LoadCosts:
    """Costs of an engine's models: from the disk, or measured when they are first asked for.

    An engine that never drafts never asks. `PACELINE_MEASURE=off` measures nothing (a kept profile
    still counts): controllers then learn costs from the rounds alone.

    Attributes:
        source: where the costs come from, in words.
        remote: a drafter in another process, which is measured together with the way there. Not
            kept on the disk: the next one may live elsewhere.
    """

    def __init__(
        self, key: Callable[[], dict[str, str]], runner: ModelRunner, drafter: Drafter | None
    ) -> None:
        self.remote: Drafter | None = None
        self._try_remote_at = 0.0
        self._key = key
        self._runner = runner
        self._drafter = drafter
        self._profile: CostProfile | None = None
        self.source = "not measured yet: nothing has drafted"

    @property
    def key(self) -> dict[str, str]:
        """What the costs are valid for (:func:`profile_key`)."""
        return self._key()

    def __call__(self) -> CostProfile | None:
        """The costs; None where they cannot be measured now."""
        self.prepare()
        if self.remote is not None and self._profile is not None and not self._profile.methods:
            self._profile = self._with_remote(self._profile, self.remote)
        return self._profile

    def _with_remote(self, profile: CostProfile, remote: Drafter) -> CostProfile:
        """The profile with the costs of drafts from elsewhere; as it is where none come."""
        if not _measures() or time.monotonic() < self._try_remote_at:
            return profile
        vocab_size = self._runner.vocab_size
        try:
            draft, read = _measure_remote(remote, new_session(vocab_size, 0, CONTEXT))
        except (PacelineError, TimeoutError) as error:
            self._try_remote_at = time.monotonic() + REMOTE_RETRY_S
            logger.info("drafts are not measured, but learnt from rounds: %s", error)
            return profile
        return replace(
            profile,
            depths=LOAD_DEPTHS,
            draft_seconds=(draft,),
            read_seconds=read,
            methods=methods_with_draft_model(),
        )

    def prepare(self) -> None:
        """Measure now what the first request that drafts would wait for; nothing of :attr:`remote`,
        which may not be there yet."""
        if self._profile is None:
            self._profile = self._find()

    def look(self) -> None:
        """Use costs that are on the disk already; measure nothing."""
        profile = find_profile(self._key())
        if profile is not None:
            self._use(profile)
            if profile.provisional:
                self._profile = None  # measured again once something drafts

    def _use(self, profile: CostProfile) -> None:
        self._profile = profile
        self.source = f"read from {default_path(profile.key)}"
        set_threads(self._runner, profile.threads)
        set_threads(_runner_of(self._drafter), profile.draft_threads)

    def report(self) -> dict[str, Any]:
        """What was measured and what follows from it, in words."""
        profile, cores = self._profile, usable_cores()
        report: dict[str, Any] = {"costs": self.source, "processors": str(cores)}
        if profile is None:
            report["threads"] = f"at most {cores.usable}, by the size of the model: not measured"
            return report
        first = profile.verify_seconds[0]
        report["verify_ms_by_rows"] = {
            rows: round(1e3 * s, 3) for rows, s in zip(profile.nodes, first, strict=True)
        }
        if profile.draft_seconds:
            report["draft_ms_by_depth"] = {
                depth: round(1e3 * s, 3)
                for depth, s in zip(profile.depths, profile.draft_seconds[0], strict=True)
            }
        if profile.threads:
            report["threads"] = f"{Threads(profile.threads)}: the fastest by more than 5 %"
        else:
            report["threads"] = "1: there is no other to choose" if cores.usable == 1 else (
                f"at most {cores.usable}, by the size of the model: not measured"
            )  # fmt: skip
        eight = profile.verify(8, 1) / profile.verify(1, 1)
        report["rows"] = f"eight rows cost {eight:.1f} times as much as one"
        return report

    def _find(self) -> CostProfile | None:
        key = self._key()
        file = default_path(key)
        kept = find_profile(key)
        if kept is not None and not (kept.provisional and _measures()):
            self._use(kept)
            return kept
        if not _measures():
            self.source = "not measured: PACELINE_MEASURE=off"
            return None
        started, taken = time.perf_counter(), taken_by_others()
        profile = _measure_load(self._runner, self._drafter, key)
        if profile is None:
            self.source = "not measured: no KV memory was free"
            if kept is not None:
                self._use(kept)
            return kept
        seconds = time.perf_counter() - started
        others = max(0.0, taken_by_others() - taken) / seconds / usable_cores().logical
        self.source = f"measured in {seconds:.2f} s"
        if others > BUSY:
            self.source += f" while others took {others:.0%} of the processors"
        tries = 1 if kept is None else kept.tries + 1
        if kept is not None and kept.others <= others:
            profile = replace(kept, tries=tries)
            self._use(profile)
            self.source += (
                f", when others took {kept.others:.0%} of the processors, not {others:.0%}"
            )
        else:
            profile = replace(profile, others=others, tries=tries)
        try:
            profile.save(file)
        except OSError as error:
            self.source += f", and not kept: {error}"
        else:
            self.source += f", kept in {file}" if profile.others == others else ""
            self.source += "; the next engine measures again" if profile.provisional else ""
        return profile


def _measures() -> bool:
    return os.environ.get("PACELINE_MEASURE", "on") != "off"


def report_costs(engine: Engine) -> dict[str, Any]:
    """What forwards cost an engine here, on how many threads they run and why, in words.

    Measures what is not known yet. ``costs`` says where they come from; other entries are there if
    their values are known.
    """
    measure = engine.length_context.measure
    if not isinstance(measure, LoadCosts):
        return {"costs": "learnt from rounds: the models were not loaded from folders"}
    measure()
    return measure.report()


def _measure_load(
    runner: ModelRunner, drafter: Drafter | None, key: dict[str, str]
) -> CostProfile | None:
    from paceline.models.base import Segment

    threads, draft_threads = choose_threads(runner), choose_threads(_runner_of(drafter))
    longest = LOAD_NODES[-1]
    room = min(runner.context_length, runner.num_free) - longest - 1
    if room < 1:
        return None
    probe = runner.new_sequence()
    try:  # a shorter context where forwards take long: attention is a small part of those
        ids = np.asarray(_tokens(1, runner.vocab_size), np.int64)
        one = min(_timed(lambda _: _forward_once(runner, Segment(probe, ids)), 0) for _ in range(2))
    finally:
        runner.free(probe)
    context = max(1, min(CONTEXT, room, max(8, int(0.25 * LOAD_SECONDS / one))))
    verify = _measure_target(runner, 1, LOAD_NODES, context, within(LOAD_SECONDS))
    draft: Table = ()
    read = 0.0
    if drafter is not None:
        sessions = [new_session(runner.vocab_size, 0, context)]
        clock = within(0.5 * LOAD_SECONDS)
        draft = (_measure_drafter(drafter, sessions, LOAD_DEPTHS, clock),)
        anew = _measure_drafter(drafter, sessions, (1,), lambda call, _: (_timed(call, 1),))
        read = max(0.0, anew[0] - draft[0][0]) / context
    return CostProfile(
        key=key,
        batches=(1,),
        nodes=LOAD_NODES[: len(verify)],
        verify_seconds=(verify,),
        depths=LOAD_DEPTHS[: len(draft[0])] if draft else (),
        draft_seconds=draft,
        read_seconds=read,
        methods=methods_with_draft_model() if draft else (),
        threads=threads,
        draft_threads=draft_threads,
    )


def _measure_remote(remote: Drafter, session: Session) -> tuple[tuple[float, ...], float]:
    """Seconds of drafts by depth, and of each token that the drafter has not read.

    Raises:
        PacelineError, TimeoutError: no draft comes.
    """
    from paceline.drafters.base import at_once

    def propose(depth: int) -> None:
        proposed = remote.propose([session], [Budget(depth, depth)])
        (draft,) = at_once(proposed, REMOTE_TIMEOUT_S)
        # A wrong draft each: what was drafted ahead of a right one would be there at once.
        token = int(draft.token_ids[0]) if draft.num_nodes else 0
        session.token_ids.append(token - 1 if token else 1)

    remote.open(session)
    try:
        first = _timed(propose, 1)  # opens the session as well
        found: list[list[float]] = [[] for _ in LOAD_DEPTHS]
        for _ in range(REMOTE_REPETITIONS):
            for depth, seconds in zip(LOAD_DEPTHS, found, strict=True):
                seconds.append(_timed(propose, depth))
                time.sleep(seconds[-1])  # until a drafter that drafts ahead is done
    finally:
        remote.close(session)
    drafts = _increasing([median(seconds) for seconds in found])
    return drafts, max(0.0, first - drafts[0]) / session.prompt_length


def _runner_of(drafter: Drafter | None) -> ModelRunner | None:
    return getattr(drafter, "runner", None)


def set_threads(runner: ModelRunner | None, steps: Steps) -> None:
    """Set the numbers of threads of a model's forwards, if the C kernels compute them."""
    if isinstance(runner, LlamaRunner) and runner.native_ops and steps:
        runner.native_ops.threads = Threads(steps)


def choose_threads(runner: ModelRunner | None) -> Steps:
    """Measure on how many threads a model's forwards are fastest, and set these numbers.

    Returns ``()`` where there is nothing to choose.
    """
    from paceline.models import kernels
    from paceline.models.base import Segment

    limit = kernels.num_threads()
    candidates = [count for count in usable_cores().candidates if count <= limit]
    if not isinstance(runner, LlamaRunner) or runner.native_ops is None or len(candidates) < 2:
        return ()
    ops = runner.native_ops
    room = min(runner.num_free, runner.context_length)
    sizes = [rows for rows in SIZES if rows < room]
    if not sizes:
        return ()
    sequence = runner.new_sequence()

    def seconds(rows: int, count: int) -> float:
        ops.threads = Threads(((1, count),))
        ids = np.asarray(_tokens(rows, runner.vocab_size), np.int64)
        return timed_after_pause(lambda: _forward_once(runner, Segment(sequence, ids)))

    try:
        seconds(sizes[0], candidates[-1])  # warms up
        ops.threads = measure_threads(seconds, candidates, sizes)
    finally:
        runner.free(sequence)
    return ops.threads.steps


def _forward_once(runner: ModelRunner, segment: Segment) -> None:
    argmax_rows(runner.forward([segment]).logits)
    runner.commit(segment.sequence, ())


def methods_with_draft_model() -> tuple[str, ...]:
    """Methods whose drafter is the draft model, or drafts with it."""
    from paceline.methods import METHODS

    return tuple(m.name for m in METHODS.values() if "draft_model" in (m.drafter, *m.uses))


def within(limit_s: float) -> _Clock:
    """The shortest time of each size, measured as often as the limit allows.

    The shortest, because other processes disturb some. Leaves out large sizes that take too long:
    half of the time is for measuring again.
    """

    def seconds(call: Callable[[int], None], sizes: Sequence[int]) -> tuple[float, ...]:
        started, found = time.perf_counter(), [_timed(call, sizes[0])]  # which warms up
        for i, size in enumerate(sizes[1:], 1):
            expected = found[-1] * size / sizes[i - 1]
            if i >= ALWAYS_NODES and time.perf_counter() - started + expected > 0.5 * limit_s:
                break
            found.append(_timed(call, size))
        for _ in range(LOAD_REPETITIONS):
            for i in range(len(found)):
                if time.perf_counter() - started + found[i] > limit_s and i:
                    return _increasing(found)
                found[i] = min(found[i], _timed(call, sizes[i]))
        return _increasing(found)

    return seconds


def _increasing(seconds: Sequence[float]) -> tuple[float, ...]:
    """More rows never take less time: if they seem to, something disturbed the smaller size."""
    return tuple(np.minimum.accumulate(seconds[::-1])[::-1].tolist())


def plot(profile: CostProfile, file: Path) -> None:
    """Draw both tables; the suffix of ``file`` chooses the format.

    Raises:
        InvalidArgument: matplotlib cannot write this kind of file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, title, columns, table, label in (
        (axes[0], "target forward", profile.nodes, profile.verify_seconds, "tokens of a session"),
        (axes[1], "draft", profile.depths, profile.draft_seconds, "depth"),
    ):
        for batch, row in zip(profile.batches, table, strict=False):
            axis.plot(columns, [1e3 * x for x in row], marker="o", label=f"batch {batch}")
        axis.set(title=title, xlabel=label, ylabel="ms", ylim=(0, None))
        if table:
            axis.legend(fontsize="small")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=120)
    except (ValueError, OSError) as error:
        raise InvalidArgument("plot", str(file), f"a picture file ({error})") from error
    finally:
        pyplot.close(figure)
