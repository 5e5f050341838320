"""Measure trials with Ray Tune."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidArgument
from paceline.tuning.results import Point, Results, TrialRecord, best_trial
from paceline.tuning.space import Space, SweepError

if TYPE_CHECKING:
    from paceline.tuning.trial import Work


def run_trials(
    space: Space,
    work: Work,
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
    """Measure trials with Ray Tune; writes the record of each trial when it ends.

    Args:
        work: what every worker gets.
        first: points to measure first, in this order.
        left: trials to measure at most.
        time_left: seconds to measure for at most; None: no limit.
        places: trials that run at a time.
        records: of earlier runs of this sweep.
        refused: reasons, by the keys of points that the target cannot run.
        predicted: simulated goodput ratios, by the keys of points.
        run_number: of this run of the sweep, from 1.
        say: shows a line of progress.

    Raises:
        SweepError: a record cannot be written.
        KeyboardInterrupt: Ctrl-C; records that were written stay.
    """
    # With its handler, Tune takes Ctrl-C for the end of a search that went well.
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # the new output ignores `verbose`
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # SweepRecorder shows failed trials
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
        # Trials that run one by one have nothing to be compared with but what CannotWin knows.
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
            # Tune wraps the errors of its callbacks.
            raise recorder.error or SweepError(f"the trials broke off: {error}") from error
    if space.document.tracking.wandb_project is not None:
        # The callback of W&B ends its run when it is freed, which needs Ray; a reference cycle
        # holds it.
        del tuner
        gc.collect()


def _storage_path(url: str) -> str:
    return url if "://" in url else str(Path(url).expanduser().resolve())


def check_trackers(space: Space) -> None:
    """Check that the packages of the trackers are installed; Paceline does not require them.

    Raises:
        InvalidArgument: one is missing.
    """
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
