"""The stages of a sweep, from its checked space to its report.

Check every node, record traces and simulate the space, measure trials with Ray Tune, measure the
best ones once more side by side, let method ``auto`` learn, write ``best.yaml`` and the report.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from paceline.errors import InvalidArgument
from paceline.tuning.nodes import TrialCluster, get
from paceline.tuning.outcome import write_outcome
from paceline.tuning.results import EXPERIENCE, Manifest, Metrics, PredictedResult, Results
from paceline.tuning.space import Space, SweepError
from paceline.tuning.tuner import check_trackers, run_trials

if TYPE_CHECKING:
    from paceline.tuning.trial import Work

DEFAULT_STORAGE = "~/paceline/sweeps"
DEFAULT_TRIALS = 24
_TELL_EVERY_S = 10.0
_PROBE_BYTES = 1 << 20  # a sweep writes less than this before its first trial


class Sweep:
    """One sweep, from its checked space to its report.

    Args:
        space: what is searched.
        results: where everything is written.
        console: where progress is shown.
        resume: go on with the sweep that is there.

    Raises:
        InvalidArgument: a sweep is there already, and ``resume`` is false or its space is another;
            or the package of a tracker is not installed.
        SweepError: the storage cannot be written.
    """

    def __init__(
        self, space: Space, results: Results, console: Console, *, resume: bool = False
    ) -> None:
        self.space = space
        self.results = results
        self.console = console
        self._seconds: dict[str, float] = {}
        self._started = _now()
        self._environment: dict[str, Any] = {}
        self._refused: dict[str, str] = {}
        self._predicted: dict[str, float] = {}
        self._num_runs = 1
        earlier = earlier_run(space, results, resume=resume)
        if earlier is not None:
            self._seconds, self._started = dict(earlier.seconds), earlier.started
            self._environment = dict(earlier.environment)
            self._num_runs = earlier.num_runs + 1
        check_trackers(space)
        self._probe_storage()

    def _probe_storage(self) -> None:
        try:
            self.results.write(".probe", "." * _PROBE_BYTES)
            self.results.remove(".probe")
        except OSError as error:
            raise SweepError(f"cannot write to {self.results.url}: {error}") from None

    def run(self) -> Manifest:
        """Run all stages. Whatever happens, the manifest says how far they came.

        Raises:
            SweepError: a stage cannot be done.
            KeyboardInterrupt: Ctrl-C.
        """
        self._save("running")
        state = "failed"
        try:
            self._connect()
            with self._timed("check"):
                self._check()
            # Traces are recorded with Paceline's own engine.
            if self.space.document.search.simulate and self.space.document.engine == "paceline":
                self._simulate()
            with self._timed("trials"):
                self._search()
            with self._timed("confirm"):
                self._confirm()
            state = "finished"
        except KeyboardInterrupt:
            state = "interrupted"
            raise
        finally:
            manifest = self._save(state)
            if self.results.trials():
                write_outcome(self.space, self.results)
        return manifest

    def _save(self, state: str) -> Manifest:
        manifest = Manifest.model_validate(
            {
                "name": self.space.document.name,
                "state": state,
                "started": self._started,
                "finished": None if state == "running" else _now(),
                "space": self.space.as_dict(),
                "objectives": self.space.objectives,
                "environment": self._environment,
                "num_points": len(self.space.points),
                "num_runs": self._num_runs,
                "seconds": self._seconds,
            }
        )
        self.results.save_manifest(manifest)
        return manifest

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            spent = time.monotonic() - started
            self._seconds[stage] = self._seconds.get(stage, 0.0) + spent

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    # --- the stages -------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Join the job's cluster, or start a Ray on this machine."""
        self._cluster = cluster = TrialCluster.join(self.space.document.resources)
        self._say(
            f"{self.space.document.name}: {len(self.space.points)} points, "
            f"{len(self.space.prompts)} prompts, on "
            f"{'a Ray of its own' if cluster.is_own else 'the cluster'} with {cluster.num_nodes} "
            f"node(s); {cluster.places} trial(s) at a time with {cluster.num_cpus:g} CPUs each"
        )
        free = cluster.free_cpus
        if free < cluster.num_cpus:
            self._say(f"waiting: {free:g} CPUs are free, something else runs on the cluster")

    def _work(self) -> Work:
        from paceline.tuning.trial import Work

        return Work(
            document=self.space.as_dict(),
            prompts=self.space.prompts,
            num_cpus=self._cluster.num_cpus,
        )

    def _check(self) -> None:
        """Try models and prompts on every node, and all points on one, before the first trial."""
        import ray

        from paceline.tuning.trial import check

        points = [point.model_dump_json(exclude_defaults=True) for point in self.space.points]
        answers = self._cluster.on_each_node(
            check, lambda number: (self._work(), points if number == 0 else [])
        )
        for address, found in answers.items():
            if "error" in found:
                raise SweepError(f"on node {address}: {found['error']}")
            if found["refused"]:
                self._refused = found["refused"]
            self._environment = self._environment or found["environment"]
        for reason in dict.fromkeys(self._refused.values()):
            count = sum(1 for each in self._refused.values() if each == reason)
            self._say(f"{count} point(s) left out: {reason}")
        if all(p.key in self._refused or p.is_ar for p in self.space.points):
            reason = next(iter(self._refused.values()))
            raise SweepError(f"the target can run no point of the space: {reason}")
        self._environment["ray"] = ray.__version__
        self._environment["nodes"] = len(answers)

    def _simulate(self) -> None:
        """Predict every point from traces; a resumed sweep has its predictions already."""
        predictions = self.results.predictions()
        if not predictions:
            with self._timed("simulation"):
                predictions = self._predictions()
            self.results.save_predictions(predictions)
        self._predicted = {each.key: each.goodput_ratio for each in predictions}
        if predictions:
            best = max(predictions, key=lambda each: each.goodput_ratio)
            self._say(
                f"simulated {len(predictions)} of {len(self.space.points)} points; the best "
                f"should reach {best.goodput_ratio:.2f}x: {best.point.label}"
            )

    def _predictions(self) -> list[PredictedResult]:
        import ray
        from ray.util.queue import Queue

        from paceline.tuning.trial import simulate

        self._say("recording traces ...")
        points = [
            point.model_dump_json(exclude_defaults=True)
            for point in self.space.points
            if point.key not in self._refused
        ]
        told = Queue(actor_options={"num_cpus": 0})
        answer = self._cluster.submit(simulate, self._work(), points, told)
        last_said = time.monotonic()
        while not ray.wait([answer], timeout=0.5)[0]:
            lines = told.get_nowait_batch(told.qsize())
            if lines and time.monotonic() - last_said > _TELL_EVERY_S:
                last_said = time.monotonic()
                self._say(f"        {lines[-1]}")
        told.shutdown()
        texts = get(answer, "the simulation failed")
        return [PredictedResult.model_validate_json(text) for text in texts]

    def _search(self) -> None:
        """Measure trials, as many as the space and earlier runs of the sweep leave."""
        from paceline.tuning.search import first_points

        records = [r for r in self.results.trials() if r.status != "failed"]
        search = self.space.document.search
        limit = search.trials or (
            len(self.space.points) if search.algorithm == "grid" else DEFAULT_TRIALS
        )
        left = limit - len(records)
        time_left = (
            None if search.time_s is None else search.time_s - self._seconds.get("trials", 0)
        )
        if left <= 0 or (time_left is not None and time_left <= 0):
            return
        self._say(f"measuring: {left} trial(s) at most" + (
            f", {time_left:.0f} s at most" if time_left is not None else ""
        ))  # fmt: skip
        run_trials(
            self.space,
            self._work(),
            first_points(self.space, self._refused, self._predicted, limit),
            self.results,
            left=left,
            time_left=time_left,
            places=self._cluster.places,
            records=records,
            refused=self._refused,
            predicted=self._predicted,
            run_number=self._num_runs,
            say=self._say,
        )

    def _confirm(self) -> None:
        """Measure the best trials again, side by side: the highest of many is high by chance.

        And let method ``auto`` learn from the prompts, for the deployment of the result.
        """
        from paceline.tuning.trial import confirm

        records = self.results.trials()
        objective = self.space.objectives[0]
        counting = [r for r in records if r.counts and not r.point.is_ar]
        counting.sort(key=lambda r: -r.objective(objective).value)
        done = [record for record in counting if record.confirmed is not None]
        left = max(0, self.space.document.search.confirm - len(done))
        chosen = [record for record in counting if record.confirmed is None][:left]
        learns = self.space.document.engine == "paceline" and not self.results.exists(EXPERIENCE)
        if not chosen and not learns:
            return
        if chosen:
            self._say(f"measuring the best {len(chosen)} once more, side by side ...")
        points = [record.point.model_dump_json(exclude_defaults=True) for record in chosen]
        answer = self._cluster.submit(confirm, self._work(), points, learns, max_retries=1)
        texts, learnt = get(answer, "the best points could not be measured again")
        if learnt is not None:
            self.results.write(EXPERIENCE, learnt + "\n")
        for record, text in zip(chosen, texts, strict=True):
            metrics = Metrics.model_validate_json(text)
            refused = self.space.document.constraints.broken_by(metrics)
            changes = {"confirmed": metrics, "refused": refused}
            self.results.save_trial(record.model_copy(update=changes))


def earlier_run(space: Space, results: Results, *, resume: bool) -> Manifest | None:
    """The manifest of the sweep that is there already; None: there is none.

    Raises:
        InvalidArgument: there is one, and ``resume`` is false or its space is another.
    """
    if not results.exists():
        return None
    earlier = results.manifest()
    if not resume:
        raise InvalidArgument(
            "result", results.url, "a new folder, or --resume to go on with this one"
        )
    if earlier.space != space.as_dict():
        changed = _first_difference(earlier.space, space.as_dict())
        raise InvalidArgument(
            "space", changed, f"what {results.path('sweep.json')} has: a sweep goes on "
            "with the space that it began with",
        )  # fmt: skip
    return earlier


def result_url(space: Space, result: str | None, resume: bool) -> str:
    """The path or URL of a sweep's results.

    Args:
        result: as the user gave it; None: a new folder in ``DEFAULT_STORAGE``, or with ``resume``
            the newest one there with this space.

    Raises:
        InvalidArgument: there is no sweep to resume.
    """
    if result is not None:
        return result if "://" in result else str(Path(result).expanduser().absolute())
    folder = Path(DEFAULT_STORAGE).expanduser()
    if not resume:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        return str(folder / f"{space.document.name}-{stamp}")
    for path in sorted(folder.glob(f"{space.document.name}-*"), reverse=True):
        earlier = Results(str(path))
        if earlier.exists() and earlier.manifest().space == space.as_dict():
            return str(path)
    raise InvalidArgument(
        "resume", space.document.name, f"a sweep of this space in {folder}, or --result FOLDER"
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _first_difference(a: Any, b: Any, place: str = "") -> str:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            if a.get(key) != b.get(key):
                return _first_difference(a.get(key), b.get(key), f"{place}.{key}".lstrip("."))
    return f"{place} = {b!r} (it was {a!r})"
