"""Train in this process, or with several workers as a Ray Train job."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import InvalidArgument, PacelineError
from paceline.train.trainer import TrainOptions

Report = Callable[[int, dict[str, float]], None]
"""Called with a step and its measurements on held-out text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """A kind of :mod:`paceline.train.kinds`, its knobs, and the options of the trainer."""

    kind: str
    knobs: Mapping[str, Any]
    options: TrainOptions


def show_evaluation(step: int, metrics: dict[str, float]) -> None:
    """Print measurements as a line on standard error, above the progress bar."""
    from tqdm import tqdm

    shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    tqdm.write(f"step {step}: {shown}", file=sys.stderr)


def train_here(job: TrainJob, report: Report = show_evaluation) -> dict[str, Any]:
    """Train in this process, alone or as one of those that ``torch.distributed`` connects."""
    from transformers.utils import logging as transformers_logging

    from paceline.loading import pick_device
    from paceline.train.kinds import build
    from paceline.train.trainer import train

    transformers_logging.disable_progress_bar()  # show only our own
    transformers_logging.set_verbosity_error()
    options = replace(job.options, device=pick_device(job.options.device))
    task = build(job.kind, device=options.device, seed=options.seed, **job.knobs)
    return train(task, options, report).as_dict()


def _worker(config: dict[str, Any]) -> dict[str, Any]:
    """Train in a worker. Returns Paceline's own errors, which a retry would only repeat."""
    from paceline.train.trainer import is_first_worker

    def report(step: int, metrics: dict[str, float]) -> None:
        if is_first_worker():
            config["progress"].put((step, metrics))

    try:
        return train_here(config["job"], report)
    except PacelineError as error:
        return {"error": str(error)}


def train_on_ray(
    job: TrainJob, workers: int, address: str | None, cpus: float = 1.0
) -> dict[str, Any]:
    """Train with ``workers`` processes, each on its share of every batch.

    Ray replaces a worker that dies, and training goes on from the last checkpoint.

    Args:
        address: of a Ray to join; None joins the Ray of the job that runs this process (``ray job
            submit``), or starts one on this machine until the training ends.
        cpus: that Ray reserves for each worker.

    Raises:
        InvalidArgument: the batch does not divide among the workers.
        ClusterError: no Ray answers, the cluster has too few CPUs, or the training failed; the
            message says why.
    """
    from paceline.cluster.local_ray import ClusterError, join_ray, prepare_environment

    if job.options.batch_size % workers:
        raise InvalidArgument("batch_size", job.options.batch_size, f"a multiple of {workers}")
    local = address is None and "RAY_ADDRESS" not in os.environ
    prepare_environment(secrets.token_hex(32) if local else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own
        import ray
        from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
        from ray.train.v2.api.exceptions import TrainingFailedError
        from ray.util.queue import Queue
    started = not ray.is_initialized()
    if local and started:
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, workers),
            include_dashboard=False,
            object_store_memory=80 * 1024 * 1024,  # near Ray's minimum; nothing here stores objects
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    else:
        join_ray(address or "auto")
    _check_room(workers * cpus)
    folder = job.options.out.resolve()
    # The workers' output passes through here; Ray's own log is not for users.
    progress = Queue()
    printer = threading.Thread(target=_show_progress, args=(progress,), daemon=True)
    printer.start()
    try:
        trainer = TorchTrainer(
            _worker,
            train_loop_config={
                "job": replace(job, options=replace(job.options, out=folder)),
                "progress": progress,
            },
            scaling_config=ScalingConfig(
                num_workers=workers,
                use_gpu=job.options.device.startswith("cuda"),
                resources_per_worker={"CPU": cpus},
            ),
            torch_config=TorchConfig(backend="gloo"),
            run_config=RunConfig(
                name="ray",
                storage_path=str(folder / "training"),
                failure_config=FailureConfig(max_failures=2),
                logging_config=LoggingConfig(log_level="ERROR"),
            ),
        )
        result = trainer.fit().return_value
    except TrainingFailedError as error:
        raise ClusterError(f"the training failed: {_last_line(error)}") from error
    finally:
        progress.put(None)
        printer.join(timeout=10)
        progress.shutdown()
        if started:
            ray.shutdown()
    if "error" in result:
        raise ClusterError(result["error"])
    assert isinstance(result, dict)
    return result


def _check_room(cpus: float) -> None:
    """Raise ClusterError if the workers can never start; print a line if they have to wait."""
    import ray
    from tqdm import tqdm

    from paceline.cluster.local_ray import ClusterError

    total = float(ray.cluster_resources().get("CPU", 0.0))
    if cpus > total:
        raise ClusterError(
            f"the workers want {cpus:g} CPUs and the cluster has {total:g}: take fewer workers"
        )
    free = float(ray.available_resources().get("CPU", 0.0))
    if cpus > free:
        tqdm.write(f"waiting for {cpus:g} CPUs, {free:g} are free in the cluster", file=sys.stderr)


def _show_progress(queue: Any) -> None:
    while (item := queue.get()) is not None:
        show_evaluation(*item)


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error.__cause__ or error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def absolute(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs with absolute paths, which mean the same in another process."""

    def of(value: Any) -> Any:
        if isinstance(value, Path):
            return value.resolve()
        return [of(item) for item in value] if isinstance(value, list | tuple) else value

    return {name: of(value) for name, value in knobs.items()}
