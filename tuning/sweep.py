"""Find the fastest exact configuration on a Ray cluster.

::

    ray job submit --working-dir . -- python tuning/sweep.py --space tuning/spaces/demo.yaml

Stages: check every node, record traces and simulate the space, measure trials with Ray Tune,
measure the best ones once more side by side, write ``best.yaml`` and the report.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script, its own folder would come first on the path
    _root = Path(__file__).resolve().parents[1]  # of a checkout, or the installed package
    sys.path[0] = str(_root.parent if (_root / "__init__.py").exists() else _root)

import datetime
import gc
import logging
import math
import os
import secrets
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import typer
import yaml
from rich.console import Console

from paceline.errors import InvalidArgument, PacelineError
from paceline.tuning.results import (
    Manifest,
    Metrics,
    Point,
    PredictedResult,
    Results,
    TrialRecord,
    best_trial,
    pareto_front,
)
from paceline.tuning.space import Space, SweepError, read_space

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
        resume: go on with what is there.

    Raises:
        InvalidArgument: there is a sweep already and ``resume`` was not asked for, or it is of
            another space; results shall go to a tracker that is not installed.
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
        if results.exists():
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
            self._seconds, self._started = dict(earlier.seconds), earlier.started
            self._environment = dict(earlier.environment)
            self._num_runs = earlier.num_runs + 1
        _check_trackers(space)
        self._probe_storage()

    def _probe_storage(self) -> None:
        try:
            self.results.write(".probe", "." * _PROBE_BYTES)
            self.results.remove(".probe")
        except OSError as error:
            raise SweepError(f"cannot write to {self.results.url}: {error}") from None

    # --- the stages -------------------------------------------------------------------------------

    def run(self) -> Manifest:
        """All stages. Whatever happens, the manifest says how far they came."""
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
                self._write_outcome()
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

    def _connect(self) -> None:
        """Join the cluster of the job, or start a Ray of our own on this machine."""
        from paceline.cluster.local import prepare_environment

        address = os.environ.get("RAY_ADDRESS")
        prepare_environment(None if address else secrets.token_hex(32))
        import ray

        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if not address:
            options |= {"address": "local", "include_dashboard": False}
        if not ray.is_initialized():
            ray.init(**options)
        gpus = self.space.document.resources.gpus
        nodes = [
            node["Resources"]
            for node in ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU", 0) > 0
        ]
        able = [node for node in nodes if node.get("GPU", 0) >= gpus]
        if not able:
            raise SweepError(f"no node of the cluster has {gpus:g} GPUs for a trial (resources)")
        wanted = self.space.document.resources.cpus or min(node["CPU"] for node in able)
        able = [node for node in able if node["CPU"] >= wanted]
        if not able:
            most = max(node["CPU"] for node in nodes)
            raise SweepError(
                f"resources.cpus: no node has {wanted:g} CPUs for a trial, the largest has {most:g}"
            )
        self._num_cpus = wanted
        self._places = sum(
            min(
                int(node["CPU"] // wanted),
                int(node.get("GPU", 0) // gpus) if gpus else 10**6,
            )
            for node in able
        )
        free = ray.available_resources().get("CPU", 0.0)
        where = "the cluster" if address else "a Ray of its own"
        self._say(
            f"{self.space.document.name}: {len(self.space.points)} points, "
            f"{len(self.space.prompts)} prompts, on {where} with {len(nodes)} node(s); "
            f"{self._places} trial(s) at a time with {wanted:g} CPUs each"
        )
        if free < wanted:
            self._say(f"waiting: {free:g} CPUs are free, something else runs on the cluster")

    def _work(self) -> Any:
        from paceline.tuning.trial import Work

        return Work(
            document=self.space.as_dict(),
            prompts=tuple((prompt.prompt_id, prompt.text) for prompt in self.space.prompts),
            num_cpus=self._num_cpus,
        )

    def _check(self) -> None:
        """Try models, prompts and points on the nodes, before the first trial."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from paceline.tuning.trial import check

        task = ray.remote(num_cpus=0, max_retries=0)(check)
        points = [point.model_dump_json(exclude_defaults=True) for point in self.space.points]
        nodes = [n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) > 0]
        answers = [
            task.options(
                num_gpus=self.space.document.resources.gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            ).remote(self._work(), points if number == 0 else [])
            for number, node in enumerate(nodes)
        ]
        for node, answer in zip(nodes, answers, strict=True):
            found = _get(answer, f"node {node['NodeManagerAddress']} cannot be checked")
            if "error" in found:
                raise SweepError(f"on node {node['NodeManagerAddress']}: {found['error']}")
            if found["refused"]:
                self._refused = found["refused"]
            self._environment = self._environment or found["environment"]
        left = [p for p in self.space.points if p.key not in self._refused and not p.is_ar]
        for reason in dict.fromkeys(self._refused.values()):
            count = sum(1 for each in self._refused.values() if each == reason)
            self._say(f"{count} point(s) left out: {reason}")
        if not left:
            reason = next(iter(self._refused.values()))
            raise SweepError(f"the target can run no point of the space: {reason}")
        self._environment["ray"] = ray.__version__
        self._environment["nodes"] = len(nodes)

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
        task = ray.remote(
            num_cpus=self._num_cpus, num_gpus=self.space.document.resources.gpus, max_retries=0
        )(simulate)
        points = [
            point.model_dump_json(exclude_defaults=True)
            for point in self.space.points
            if point.key not in self._refused
        ]
        told = Queue(actor_options={"num_cpus": 0})
        answer = task.remote(self._work(), points, told)
        last_said = time.monotonic()
        while not ray.wait([answer], timeout=0.5)[0]:
            lines = told.get_nowait_batch(told.qsize())
            if lines and time.monotonic() - last_said > _TELL_EVERY_S:
                last_said = time.monotonic()
                self._say(f"        {lines[-1]}")
        told.shutdown()
        texts = _get(answer, "the simulation failed")
        return [PredictedResult.model_validate_json(text) for text in texts]

    def _search(self) -> None:
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
            self._first_points(limit),
            self.results,
            left=left,
            time_left=time_left,
            places=self._places,
            records=records,
            refused=self._refused,
            predicted=self._predicted,
            run_number=self._num_runs,
            say=self._say,
        )

    def _first_points(self, limit: int) -> list[Point]:
        """AR, then what simulates best; without a search that suggests, the other points too."""
        search = self.space.document.search
        able = [p for p in self.space.points if p.key not in self._refused and not p.is_ar]
        ranked = sorted(able, key=lambda p: -self._predicted.get(p.key, -math.inf))
        if search.algorithm == "optuna":
            simulated = [p for p in ranked if p.key in self._predicted]
            # Of rows that cannot be simulated, one point each: what they reach is unknown.
            chosen = _spread(simulated, search.simulated_first)
            known = {p.speculation.method for p in simulated}
            for point in able:
                if point.speculation.method not in known:
                    known.add(point.speculation.method)
                    chosen.append(point)
        elif search.algorithm == "random":
            import random

            chosen = random.Random(search.seed).sample(able, len(able))
        else:
            chosen = able
        return [self.space.ar, *chosen][:limit]

    def _confirm(self) -> None:
        """Measure the best trials again, side by side: the highest of many is high by chance."""
        import ray

        from paceline.tuning.trial import confirm

        records = self.results.trials()
        objective = self.space.objectives[0]
        counting = [r for r in records if r.counts and not r.point.is_ar]
        counting.sort(key=lambda r: -r.objective(objective).value)
        done = [record for record in counting if record.confirmed is not None]
        left = max(0, self.space.document.search.confirm - len(done))
        chosen = [record for record in counting if record.confirmed is None][:left]
        if not chosen:
            return
        self._say(f"measuring the best {len(chosen)} once more, side by side ...")
        task = ray.remote(
            num_cpus=self._num_cpus, num_gpus=self.space.document.resources.gpus, max_retries=1
        )(confirm)
        texts = _get(
            task.remote(
                self._work(), [r.point.model_dump_json(exclude_defaults=True) for r in chosen]
            ),
            "the best points could not be measured again",
        )
        for record, text in zip(chosen, texts, strict=True):
            metrics = Metrics.model_validate_json(text)
            self.results.save_trial(
                record.model_copy(
                    update={
                        "confirmed": metrics,
                        "refused": self.space.document.constraints.broken_by(metrics),
                    }
                )
            )

    # --- the outcome ------------------------------------------------------------------------------

    def _write_outcome(self) -> None:
        records = self.results.trials()
        objectives = self.space.objectives
        best = best_trial(records, objectives[0])
        if best is not None:
            self.results.write("best.yaml", deployment_yaml(self.space, best, objectives[0]))
        if len(objectives) > 1:
            for record in pareto_front(records, objectives):
                self.results.write(
                    f"pareto/{record.key}.yaml", deployment_yaml(self.space, record, objectives[0])
                )
        from paceline.tuning.report import write_report

        write_report(self.results)


def _spread(ranked: Sequence[Point], count: int) -> list[Point]:
    """The best points, of no method more than a quarter while there are others.

    Neighbours of the best point simulate nearly as well as it does; a prediction that is wrong for
    a whole method would fill the list with it.
    """
    chosen: list[Point] = []
    share = max(2, count // 4)
    taken: dict[str, int] = {}
    for point in ranked:
        if taken.get(point.speculation.method, 0) < share:
            taken[point.speculation.method] = taken.get(point.speculation.method, 0) + 1
            chosen.append(point)
    rest = [point for point in ranked if point not in chosen]
    return [*chosen, *rest][:count]


def _get(answer: Any, what: str) -> Any:
    import ray

    try:
        return ray.get(answer)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise SweepError(f"{what}: {str(cause).strip().splitlines()[-1]}") from error


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _first_difference(a: Any, b: Any, place: str = "") -> str:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            if a.get(key) != b.get(key):
                return _first_difference(a.get(key), b.get(key), f"{place}.{key}".lstrip("."))
    return f"{place} = {b!r} (it was {a!r})"


def deployment_yaml(space: Space, record: TrialRecord, objective: str) -> str:
    """A file for `paceline up --config`, `serve run` and the Helm chart."""
    from paceline.deployments.config import IMPORT_PATH

    model = space.document.model.model_dump(mode="json", exclude_defaults=True)
    speculation = record.point.speculation.model_dump(mode="json", exclude_defaults=True)
    args: dict[str, Any] = {
        "model": {**model, "dtype": record.point.dtype},
        "topology": record.point.topology,
        "speculation": {"method": record.point.speculation.method, **speculation},
    }
    if space.document.engine == "vllm":
        vllm = space.document.vllm.model_dump(mode="json", exclude_defaults=True)
        args |= {"engine": "vllm"} | ({"vllm": vllm} if vllm else {})
    document = {
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": "paceline",
                "import_path": IMPORT_PATH,
                "route_prefix": None,
                "args": args,
            }
        ],
    }
    ratio = record.objective(objective)
    metrics = record.confirmed or record.metrics
    assert metrics is not None
    workload = space.document.workload
    return (
        f"# Written by the sweep {space.document.name!r}, for `paceline up --config`.\n"
        f"# {objective}: {ratio.value:.2f} times AR "
        f"({ratio.low:.2f} to {ratio.high:.2f}, {space.document.measurement.confidence:.0%}), "
        f"{metrics.tokens_per_second:.0f} tokens/s, mean accepted length "
        f"{metrics.mean_accepted_length:.2f},\n"
        f"# with {workload.concurrency} request(s) at a time at temperature "
        f"{workload.temperature:g}.\n"
        + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    )


# --- trials ---------------------------------------------------------------------------------------


def run_trials(
    space: Space,
    work: Any,
    first: Sequence[Point],
    results: Results,
    *,
    left: int,
    time_left: float | None,
    places: int,
    records: Sequence[TrialRecord],
    refused: Mapping[str, str],
    predicted: Mapping[str, float],
    run_number: int,
    say: Callable[[str], None],
) -> None:
    """Measure trials with Ray Tune; each one's record is written when it ends.

    Raises:
        SweepError: a record cannot be written.
        KeyboardInterrupt: Ctrl-C; records that were written stay.
    """
    # Tune would end the trials by itself and return as if all was well.
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # the other one prints a frame whatever `verbose` says
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # failed trials are told below
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler, FIFOScheduler
    from ray.tune.search import ConcurrencyLimiter

    from paceline.tuning.search import CannotWin, PointSearch
    from paceline.tuning.trial import Trial
    from paceline.tuning.watch import SweepRecorder

    search = space.document.search
    searcher = PointSearch(
        space,
        first,
        records=records,
        refused=refused,
        predicted=predicted,
        suggest=search.algorithm == "optuna",
    )
    stopper = CannotWin(space.objectives) if search.early_stopping else None
    scheduler: Any = FIFOScheduler()
    if search.early_stopping and len(space.objectives) == 1 and places > 1:
        # With one trial after the other it would judge by less than CannotWin knows.
        scheduler = ASHAScheduler(
            time_attr="num_prompts",
            metric=searcher.metric,
            mode="max",
            max_t=10**9,
            grace_period=1,
            reduction_factor=3,
        )
    recorder = SweepRecorder(
        space, results, stopper, predicted=predicted, done=len(records), total=left, say=say,
        best=best_trial(records, space.objectives[0]),
    )  # fmt: skip
    gpus = space.document.resources.gpus
    bundle = {"CPU": work.num_cpus, **({"GPU": gpus} if gpus else {})}
    tuner = tune.Tuner(
        tune.with_resources(
            tune.with_parameters(Trial, work=work), tune.PlacementGroupFactory([bundle])
        ),
        tune_config=tune.TuneConfig(
            search_alg=ConcurrencyLimiter(searcher, max_concurrent=places),
            scheduler=scheduler,
            num_samples=left,
            time_budget_s=time_left,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name=f"run-{run_number}",
            storage_path=_storage_path(results.path("tune")),
            stop=stopper,
            callbacks=[recorder, *_trackers(space)],
            failure_config=tune.FailureConfig(max_failures=0),
            verbose=0,
        ),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tuner.fit()
        except Exception as error:
            # Tune wraps what its callbacks raise.
            raise recorder.error or SweepError(f"the trials broke off: {error}") from error
    if space.document.tracking.wandb_project is not None:
        # Its callback ends itself through Ray as it is freed, and is part of a cycle.
        del tuner
        gc.collect()


def _storage_path(url: str) -> str:
    return url if "://" in url else str(Path(url).expanduser().resolve())


def _check_trackers(space: Space) -> None:
    """That the packages are there: neither is one of Paceline's own requirements."""
    for key, value in space.document.tracking.model_dump().items():
        package = key.split("_")[0]
        if value is not None and find_spec(package) is None:
            raise InvalidArgument(
                f"tracking.{key}", value, f"null, or an environment with `pip install {package}`"
            )


def _trackers(space: Space) -> list[Any]:
    tracking = space.document.tracking
    callbacks: list[Any] = []
    if tracking.mlflow_uri is not None:
        from ray.air.integrations.mlflow import MLflowLoggerCallback

        callbacks.append(
            MLflowLoggerCallback(
                tracking_uri=tracking.mlflow_uri, experiment_name=space.document.name
            )
        )
    if tracking.wandb_project is not None:
        from ray.air.integrations.wandb import WandbLoggerCallback

        callbacks.append(WandbLoggerCallback(project=tracking.wandb_project))
    return callbacks


# --- the command ----------------------------------------------------------------------------------


def result_url(space: Space, result: str | None, resume: bool) -> str:
    """Where a sweep is written: what was asked for, else a folder of its own in the user's home.

    Raises:
        InvalidArgument: nothing to go on with.
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


def run_command(
    space: str, result: str | None, *, resume: bool, changes: Sequence[str], check_only: bool
) -> None:
    """What `paceline sweep run` and this script do; see :func:`paceline.tuning.cli.run`."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    checked = read_space(space, changes)
    num_prompts = len(checked.prompts)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    if check_only:
        methods = dict.fromkeys(point.speculation.method for point in checked.points)
        say(
            f"{checked.source}: {len(checked.points)} points of {', '.join(methods)}; "
            f"{num_prompts} prompts"
        )
        return
    results = Results(result_url(checked, result, resume))
    say(f"results: {results.url}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        Sweep(checked, results, console, resume=resume).run()
    except KeyboardInterrupt:
        say("interrupted: the same command with --resume goes on from here")
        raise typer.Exit(130) from None
    from paceline.tuning.tables import show

    show(results, console)


def main() -> None:
    """`python tuning/sweep.py`."""
    from paceline.cluster.cli_output import print_error
    from paceline.tuning.cli import run

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(run)
    try:
        app()
    except PacelineError as error:
        print_error(str(error))
        sys.exit(2)


if __name__ == "__main__":
    main()
