"""The training loop under every kind of ``paceline train``.

A :class:`Task` defines the training: a module, a loss for a few rows of its data, a measurement on
held-out data, and how to save the result. :func:`train` does the rest. Everything random in a step
follows from the seed and the step's number, and nothing depends on the clock, so a training that
resumes from its checkpoint after a kill gives the same numbers as an uninterrupted one, bit for
bit.

If ``torch.distributed`` is initialised, every process trains on its share of each batch, and the
gradients are averaged: any number of workers trains the same weights, up to rounding.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from paceline.errors import InvalidArgument, PacelineError
from paceline.types import IntArray

CHECKPOINT = "checkpoint.pt"
LOG_FOLDER = "training"


class TrainingDiverged(PacelineError, ArithmeticError):
    """The loss or a gradient has become NaN or infinite."""


class CheckpointError(PacelineError, RuntimeError):
    """A checkpoint cannot be read."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The inputs of a step.

    Attributes:
        rows: which rows of the task's training data.  # [num_rows]
        step: from 0.
        progress: completed share of the training, in [0, 1).
        random: the same on all workers; for choices that affect the whole batch.
        generator: on the training's device, different on every worker; for sampling.
    """

    rows: IntArray
    step: int
    progress: float
    random: np.random.Generator
    generator: torch.Generator


class Task(Protocol):
    """A training task.

    A task has no random state of its own: its weights before the first step follow from its
    arguments, and a loss draws random numbers only from the :class:`Batch`.

    Attributes:
        name: for the progress bar and the plot.
        model: the trained module and nothing else: its ``state_dict`` is the checkpoint, and the
            optimiser updates its parameters with ``requires_grad``. The trainer puts it on
            the device and switches between train and eval mode.
        num_rows: rows of training data.
        criterion: the held-out measurement that ranks the weights, larger is better:
            ``acceptance`` for everything that drafts.
        settings: everything the result depends on beside :class:`TrainOptions`, as plain numbers
            and strings. The trainer refuses a checkpoint with other settings.
    """

    name: str
    model: nn.Module
    num_rows: int
    criterion: str
    settings: Mapping[str, Any]

    def loss(self, batch: Batch) -> Tensor:
        """The loss to minimise: a scalar, the mean over the batch's rows."""
        ...

    def evaluate(self) -> Mapping[str, float]:
        """Measurements on held-out data, the ``criterion`` among them.

        Called in eval mode, without gradients. The same weights give the same numbers.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write the result into an empty folder."""
        ...

    def describe_rows(self, rows: IntArray) -> str:
        """The sources of these rows, for the message about a loss that is not a number."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Length, learning rate, measurements and checkpoints of a training.

    Attributes:
        out: folder of the result.
        log: folder of checkpoint, plot, TensorBoard events and ``history.json``; by default
            ``training`` in ``out``.
        batch_size: rows in a step, over all workers.
        learning_rate: at the end of the warm-up; from there it falls to 0 along a cosine.
        warmup: steps in which the learning rate rises from 0.
        clip: largest norm of the gradient.
        eval_every: steps between measurements on held-out data; one more is made at the end.
        patience: stop after this many measurements without a new best, and keep the weights with
            the best one. None trains to the end and keeps the last weights.
        checkpoint_steps, checkpoint_seconds: the trainer writes a checkpoint when either has
            passed.
        bfloat16: forwards in bfloat16 (autocast); weights and optimiser stay in float32.
    """

    out: Path
    log: Path | None = None
    steps: int = 500
    batch_size: int = 8
    learning_rate: float = 2e-4
    warmup: int = 20
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    eval_every: int = 50
    patience: int | None = None
    checkpoint_steps: int = 200
    checkpoint_seconds: float = 60.0
    device: str = "cpu"
    bfloat16: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_every", "checkpoint_steps"):
            if getattr(self, name) < 1:
                raise InvalidArgument(name, getattr(self, name), "at least 1")
        if self.patience is not None and self.patience < 1:
            raise InvalidArgument("patience", self.patience, "at least 1, or nothing")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidArgument(name, getattr(self, name), "a number above 0")
        for name in ("warmup", "weight_decay", "checkpoint_seconds", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidArgument(name, getattr(self, name), "0 or more")

    def decisive(self) -> dict[str, Any]:
        """The options that the weights depend on."""
        free = {"out", "log", "checkpoint_steps", "checkpoint_seconds", "device"}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in free}


@dataclass(slots=True)
class History:
    """The measurements so far; part of the checkpoint.

    Attributes:
        losses: of every step.
        evaluations: (step, measurements), first at step 0, before anything is learnt.
        criterion: the measurement that counts.
    """

    criterion: str
    losses: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)

    @property
    def best(self) -> int:
        """Index of the first of the best evaluations."""
        scores = [metrics[self.criterion] for _, metrics in self.evaluations]
        return scores.index(max(scores))

    def stalled(self, patience: int | None) -> bool:
        """Whether the last ``patience`` evaluations brought no new best."""
        return patience is not None and len(self.evaluations) - 1 - self.best >= patience


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The outcome of :func:`train`.

    Attributes:
        folder: folder of the result.
        log: folder of checkpoint, plot and TensorBoard events.
        stopped_early: whether ``patience`` ended the training.
        kept_step: the step of the saved weights.
        metrics: held-out measurements of those weights.
    """

    folder: Path
    log: Path
    history: History
    stopped_early: bool
    kept_step: int
    metrics: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        first = self.history.evaluations[0][1]
        return {
            "out": str(self.folder),
            "plot": str(self.log / "plot.png"),
            "steps": self.history.step,
            "stopped_early": self.stopped_early,
            "kept_step": self.kept_step,
            "before": first,
            "after": self.metrics,
        }


def train(
    task: Task,
    options: TrainOptions,
    on_evaluation: Callable[[int, dict[str, float]], None] | None = None,
) -> TrainResult:
    """Train ``task`` to the end, or resume an interrupted run of the same training.

    Args:
        on_evaluation: called with the step and the measurements, on every worker.

    Raises:
        InvalidArgument: ``out`` holds another training, or the data is too small for a batch.
        CheckpointError: the checkpoint in ``out`` is damaged.
        TrainingDiverged: the loss or a gradient is not a number.
    """
    rank, world = _place()
    if options.batch_size % world:
        raise InvalidArgument("batch_size", options.batch_size, f"a multiple of {world} workers")
    if task.num_rows < 1:
        raise InvalidArgument("data", task.num_rows, "at least one row to train on")
    log = options.log or options.out / LOG_FOLDER
    identity = json.loads(
        json.dumps({"task": task.name, **task.settings, **options.decisive()}, default=str)
    )
    model = task.model.to(options.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, options.learning_rate, betas=(0.9, 0.95), weight_decay=options.weight_decay
    )
    history, best = History(task.criterion), None
    state = _resume(log / CHECKPOINT, identity)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        history, best = History(**state["history"]), state["best"]
        del state

    def save() -> None:
        contents = {
            "identity": identity,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "history": asdict(history),
            "best": best,
        }
        try:
            write_checkpoint(log / CHECKPOINT, contents)
            _write_whole(log / "history.json", json.dumps(asdict(history)).encode())
        except (OSError, RuntimeError) as error:  # the last good checkpoint is intact
            bar.write(f"step {history.step}: no checkpoint could be written: {error}")

    def evaluate() -> None:
        nonlocal best
        metrics: dict[str, float] | None = None
        if rank == 0:
            model.eval()
            with torch.no_grad(), _autocast(options):
                metrics = {name: float(value) for name, value in task.evaluate().items()}
        metrics = _from_first(metrics)
        assert metrics is not None
        history.evaluations.append((history.step, metrics))
        if options.patience is not None and history.best == len(history.evaluations) - 1:
            best = {name: value.clone() for name, value in model.state_dict().items()}
        board.add(history.step, {f"held-out/{name}": value for name, value in metrics.items()})
        if on_evaluation is not None:
            on_evaluation(history.step, metrics)

    bar = tqdm(
        desc=task.name,
        total=options.steps,
        initial=history.step,
        unit="step",
        disable=True if rank else None,  # None: only on a terminal
    )
    with torch.random.fork_rng(), bar, _Board.open(log, history.step, rank, bar) as board:
        if not history.evaluations:
            evaluate()
        saved_step, saved_at = history.step, time.monotonic()
        while history.step < options.steps and not history.stalled(options.patience):
            step = history.step
            batch = _batch(task.num_rows, step, options, rank, world)
            model.train()
            torch.manual_seed(_seed(options.seed, step, rank))  # for dropout inside modules
            factor = learning_rate_factor(step, options.warmup, options.steps)
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate * factor
            with _autocast(options):
                loss = task.loss(batch)
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            value = _average(parameters, loss.detach())
            norm = float(nn.utils.clip_grad_norm_(parameters, options.clip))
            if not (math.isfinite(value) and math.isfinite(norm)):
                raise TrainingDiverged(
                    f"step {step}: the loss is {value} and the gradient's norm {norm}, on "
                    f"{task.describe_rows(batch.rows)}; a lower learning rate than "
                    f"{options.learning_rate:g} may help; {log / CHECKPOINT} has the state before"
                )
            optimizer.step()
            history.losses.append(value)
            board.add(step, {"train/loss": value, "train/learning_rate": group["lr"]})
            if history.step % options.eval_every == 0 or history.step == options.steps:
                evaluate()
            shown = history.evaluations[-1][1][task.criterion]
            bar.set_postfix_str(f"loss {value:.3f} {task.criterion} {shown:.3f}", refresh=False)
            bar.update()
            late = time.monotonic() - saved_at >= options.checkpoint_seconds
            if rank == 0 and (late or history.step - saved_step >= options.checkpoint_steps):
                save()
                saved_step, saved_at = history.step, time.monotonic()
        if rank == 0 and history.step > saved_step:
            save()
    stopped_early = history.step < options.steps
    kept = len(history.evaluations) - 1
    if best is not None:
        kept = history.best
        model.load_state_dict(best)
    model.eval()
    kept_step, metrics = history.evaluations[kept]
    if rank == 0:
        _save_result(task, options.out, log / "result.tmp")
        plot(history, log / "plot.png", task.name)
    return TrainResult(options.out, log, history, stopped_early, kept_step, metrics)


# --- what a step is made of -----------------------------------------------------------------------


def learning_rate_factor(step: int, warmup: int, steps: int) -> float:
    """Linear from 0 to 1 in ``warmup`` steps, then a cosine that reaches 0 after ``steps``."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


@lru_cache(maxsize=4)
def _order(num_rows: int, seed: int, epoch: int) -> IntArray:
    return np.random.default_rng([seed, 0, epoch]).permutation(num_rows)


def _batch(num_rows: int, step: int, options: TrainOptions, rank: int, world: int) -> Batch:
    """This worker's share of batch ``step``: each epoch sees every row once, in its own order."""
    share = options.batch_size // world
    first = step * options.batch_size + rank * share
    places = [divmod(i, num_rows) for i in range(first, first + share)]
    rows = np.array([_order(num_rows, options.seed, epoch)[i] for epoch, i in places], np.int64)
    return Batch(
        rows,
        step,
        step / options.steps,
        np.random.default_rng([options.seed, 1, step]),
        torch.Generator(options.device).manual_seed(_seed(options.seed, 2, step, rank)),
    )


def _autocast(options: TrainOptions) -> torch.autocast:
    kind = torch.device(options.device).type
    return torch.autocast(kind, torch.bfloat16, enabled=options.bfloat16)


# --- several workers ------------------------------------------------------------------------------


def _place() -> tuple[int, int]:
    """This worker's number, and the number of workers."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def is_first_worker() -> bool:
    """Whether this worker writes the files; a single process does."""
    return _place()[0] == 0


def _from_first(value: Any) -> Any:
    """The first worker's value, on every worker."""
    if _place()[1] == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _average(parameters: list[nn.Parameter], loss: Tensor) -> float:
    """Average gradients in place, and return the average loss.

    A parameter that no worker's loss reached keeps its missing gradient, as with one worker.
    """
    world = _place()[1]
    if world == 1:
        return float(loss)
    reached = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    dist.all_reduce(reached, op=dist.ReduceOp.MAX)
    taking_part = [p for p, yes in zip(parameters, reached.tolist(), strict=True) if yes]
    for parameter in taking_part:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [p.grad for p in taking_part if p.grad is not None]
    parts = [loss.reshape(1).float(), *(grad.flatten() for grad in grads)]
    joined = torch.cat(parts).cpu()
    dist.all_reduce(joined)
    joined /= world
    start = 1
    for grad in grads:
        grad.copy_(joined[start : start + grad.numel()].view_as(grad))
        start += grad.numel()
    return float(joined[0])


# --- what is kept on disk -------------------------------------------------------------------------


def _write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """Replace ``path`` atomically, even if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # on a full disk this frees the space
        raise


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write tensors and plain values with a checksum; a failure leaves the old file.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    view = buffer.getbuffer()
    _write_whole(path, view, hashlib.sha256(view).digest())


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What :func:`write_checkpoint` wrote.

    Raises:
        CheckpointError: the file is damaged.
    """
    contents = path.read_bytes()
    if hashlib.sha256(contents[:-32]).digest() != contents[-32:]:
        raise CheckpointError(
            f"{path} is damaged or was cut off ({len(contents)} bytes); restore it, or remove it "
            "to start from the beginning"
        )
    state: dict[str, Any] = torch.load(
        io.BytesIO(contents[:-32]), map_location="cpu", weights_only=True
    )
    return state


def _read_state(path: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    state = read_checkpoint(path)
    theirs = state["identity"]
    for name in sorted(identity.keys() | theirs.keys()):
        if identity.get(name) != theirs.get(name):
            raise InvalidArgument(
                "out",
                str(path.parent),
                f"a new folder, or the same training as before: {path} was made with {name}="
                f"{theirs.get(name)!r}, now it is {identity.get(name)!r}",
            )
    return state


def _resume(path: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The first worker's checkpoint, or its error, on every worker."""
    state: dict[str, Any] | None = None
    problem: PacelineError | None = None
    if is_first_worker():
        try:
            state = _read_state(path, identity)
        except PacelineError as error:
            problem = error
    message = _from_first(str(problem) if problem else None)
    if message is not None:
        raise problem or CheckpointError(message)
    resumed: dict[str, Any] | None = _from_first(state)
    return resumed


def _save_result(task: Task, out: Path, draft: Path) -> None:
    """Save the result; each file appears at once and replaces an older one."""
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        task.save(draft)
        for path in sorted(draft.iterdir()):
            path.chmod(0o644)  # safetensors writes 0600; engines read weights as another user
            os.replace(path, out / path.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


class _Board:
    """TensorBoard scalars, written by the caller's own thread, so that a full disk stops nothing.

    (``SummaryWriter`` would wait forever for a writer thread that a full disk has killed.)
    """

    def __init__(self, writer: Any, event: Any, scalar: Any) -> None:
        self._writer, self._event, self._scalar = writer, event, scalar

    @staticmethod
    @contextlib.contextmanager
    def open(folder: Path, step: int, rank: int, bar: tqdm[Any]) -> Iterator[_Board]:
        """A board for the events from ``step`` on; without TensorBoard, one that does nothing."""
        board = _Board(None, None, None)
        if rank == 0:
            try:
                from tensorboardX.event_file_writer import EventsWriter
                from tensorboardX.proto.event_pb2 import Event, SessionLog
                from tensorboardX.summary import scalar

                folder.mkdir(parents=True, exist_ok=True)
                board = _Board(EventsWriter(str(folder / "events")), Event, scalar)
                # TensorBoard drops the events that an earlier run logged from this step on.
                board._write(step, session_log=SessionLog(status=SessionLog.START))
            except ImportError:
                bar.write("no TensorBoard log: it needs `pip install 'paceline[train]'`")
            except OSError as error:
                bar.write(f"no TensorBoard log: {error}")
        try:
            yield board
        finally:
            if board._writer is not None:
                with contextlib.suppress(OSError):
                    board._writer.close()

    def _write(self, step: int, **what: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, **what))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        try:
            for name, value in scalars.items():
                self._write(step, summary=self._scalar(name, value))
            self._writer.flush()
        except OSError:
            self._writer = None


def plot(history: History, file: Path, title: str) -> None:
    """Draw the loss of every step and the acceptance on held-out data."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, history.step + 1), history.losses, linewidth=0.6, alpha=0.5)
    window = max(1, history.step // 50)
    if history.step > window:
        smooth = np.convolve(history.losses, np.ones(window) / window, "valid")
        left.plot(range(window, history.step + 1), smooth)
    left.set(title=f"{title}: loss", xlabel="step")
    steps = [step for step, _ in history.evaluations]
    for name in history.evaluations[0][1]:
        values = [metrics[name] for _, metrics in history.evaluations]
        if name == history.criterion or name.startswith(("acceptance", "agreement")):
            width = 2 if name == history.criterion else 0.8
            right.plot(steps, values, marker="o", markersize=3, linewidth=width, label=name)
    right.set(title="held-out data", xlabel="step")
    right.legend(fontsize="small", loc="upper left")  # finding the best place is slow
    file.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    _write_whole(file, buffer.getbuffer())
