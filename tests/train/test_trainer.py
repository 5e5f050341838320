"""The training loop: determinism, checkpoints, early stop, and what goes wrong."""

from __future__ import annotations

import errno
import os
import random
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from safetensors.torch import load_file

from paceline.cluster.train_job import TrainJob, train_here
from paceline.errors import InvalidArgument
from paceline.train import trainer
from paceline.train.trainer import (
    CheckpointError,
    TrainingDiverged,
    TrainOptions,
    read_checkpoint,
    train,
    write_checkpoint,
)
from tests.train.conftest import LENGTH, RunToy, Toy

ROOT = Path(__file__).parents[2]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "toy.pt", weights_only=True)
    return state


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_equal_seeds_give_equal_weights(run_toy: RunToy, tmp_path: Path) -> None:
    torch.manual_seed(1)
    _, one = run_toy("one")
    torch.manual_seed(2)  # what the process did before does not matter
    _, two = run_toy("two")
    _, other = run_toy("other", seed=1)
    assert one.history.losses == two.history.losses
    assert_same(weights(tmp_path / "one"), weights(tmp_path / "two"))
    assert other.history.losses != one.history.losses
    assert one.metrics["acceptance"] > one.history.evaluations[0][1]["acceptance"]


def test_the_callers_random_state_is_left_alone(run_toy: RunToy) -> None:
    task = Toy()
    before = torch.get_rng_state()
    run_toy(task=task)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_epoch_sees_each_row_once(run_toy: RunToy) -> None:
    task, _ = run_toy(steps=12)  # 4 rows of 24 a step
    rows = [int(row) for batch in task.seen for row in batch.rows]
    assert sorted(rows[:24]) == sorted(rows[24:]) == list(range(24))
    assert rows[:24] != rows[24:]


def test_the_learning_rate_warms_up_and_follows_a_cosine() -> None:
    factors = [trainer.learning_rate_factor(step, 4, 24) for step in range(24)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[14] == pytest.approx(0.5)
    assert all(a >= b for a, b in pairwise(factors[3:]))
    assert factors[-1] < 0.01


@pytest.mark.parametrize("cut", [1, 7, 10, 19])
def test_a_resumed_training_equals_one_without_a_break(
    run_toy: RunToy, tmp_path: Path, cut: int
) -> None:
    _, straight = run_toy("straight", patience=50)

    class Cut(Toy):
        def loss(self, batch):  # type: ignore[no-untyped-def]
            if batch.step == cut:
                raise KeyboardInterrupt
            return super().loss(batch)

    with pytest.raises(KeyboardInterrupt):
        run_toy("cut", task=Cut(), patience=50, checkpoint_steps=3)
    task, resumed = run_toy("cut", patience=50, checkpoint_steps=3)
    assert task.seen[0].step == cut // 3 * 3
    assert resumed.history == straight.history
    assert resumed.kept_step == straight.kept_step
    assert_same(weights(tmp_path / "cut"), weights(tmp_path / "straight"))
    again, _ = run_toy("cut", patience=50)
    assert not again.seen, "a finished training is not repeated"


@pytest.mark.nightly
@pytest.mark.parametrize("data", ["text", "conversations"])
def test_a_kill_at_any_moment_changes_nothing(
    data: str, chat_target: Path, text_file: Path, talks_file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    target, data_file = chat_target, talks_file if data == "conversations" else text_file

    def train_in(out: Path) -> None:
        knobs = {"target": target, "data": [data_file], "length": LENGTH, "held_out_rows": 4}
        knobs |= {"layers": 1, "data_source": "mixed"}
        options = TrainOptions(out=out, steps=12, eval_every=4, patience=9)
        train_here(TrainJob(kind="distill", knobs=knobs, options=options))

    command = [
        sys.executable, "-m", "paceline.cluster.cli", "train", "distill", "--target", str(target),
        "--data", str(data_file), "--out", str(tmp_path / "cut"), "--length", str(LENGTH),
        "--held-out-rows", "4", "--layers", "1", "--data-source", "mixed", "--steps", "12",
        "--eval-every", "4", "--patience", "9", "--checkpoint-steps", "1", "--threads", "1",
    ]  # fmt: skip
    cut = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoint = tmp_path / "cut" / "training" / "checkpoint.pt"

    def steps_done() -> int:
        return len(read_checkpoint(checkpoint)["history"]["losses"]) if checkpoint.exists() else 0

    moment, deadline = random.randint(1, 7), time.monotonic() + 60
    while steps_done() < moment and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.03))
    cut.kill()
    cut.wait()
    assert moment <= steps_done() < 12
    assert not (tmp_path / "cut" / "model.safetensors").exists()

    train_in(tmp_path / "cut")
    train_in(tmp_path / "straight")
    histories = [
        read_checkpoint(tmp_path / name / "training" / "checkpoint.pt")["history"]
        for name in ("straight", "cut")
    ]
    assert histories[0] == histories[1]
    assert_same(*(load_file(tmp_path / n / "model.safetensors") for n in ("straight", "cut")))


def test_early_stop_keeps_the_best_weights(run_toy: RunToy, tmp_path: Path) -> None:
    scores = iter([0.1, 0.3, 0.6, 0.5, 0.6, 0.2, 0.9])

    class Scripted(Toy):
        def evaluate(self) -> dict[str, float]:
            saved.append({k: v.clone() for k, v in self.model.state_dict().items()})
            return {"acceptance": next(scores)}

    saved: list[dict[str, torch.Tensor]] = []
    _, result = run_toy(task=Scripted(), steps=60, patience=3)
    assert result.stopped_early
    assert result.history.step == 25, "three evaluations no better than the one at step 10"
    assert result.kept_step == 10 and result.metrics == {"acceptance": 0.6}
    assert_same(weights(tmp_path / "out"), saved[2])
    task, again = run_toy(steps=60, patience=3)
    assert not task.seen and again.kept_step == 10
    assert_same(weights(tmp_path / "out"), saved[2])


def test_without_patience_the_last_weights_are_kept(run_toy: RunToy) -> None:
    class Falling(Toy):
        def evaluate(self) -> dict[str, float]:
            return {"acceptance": 1.0 - 0.01 * len(self.seen)}

    _, result = run_toy(task=Falling())
    assert (result.history.step, result.kept_step, result.stopped_early) == (20, 20, False)


def test_a_loss_that_is_not_a_number_stops_with_step_and_batch(
    run_toy: RunToy, tmp_path: Path
) -> None:
    task = Toy(bad_step=7)
    with pytest.raises(TrainingDiverged, match="step 7: the loss is nan") as caught:
        run_toy(task=task, checkpoint_steps=3)
    assert f"rows {task.seen[-1].rows.tolist()}" in str(caught.value)
    state = read_checkpoint(tmp_path / "out" / "training" / "checkpoint.pt")
    assert all(bool(value.isfinite().all()) for value in state["model"].values())
    assert not (tmp_path / "out" / "toy.pt").exists()


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_a_damaged_checkpoint_is_named(run_toy: RunToy, tmp_path: Path, damage: str) -> None:
    run_toy(steps=5)
    file = tmp_path / "out" / "training" / "checkpoint.pt"
    contents = bytearray(file.read_bytes())
    if damage == "cut":
        contents = contents[: len(contents) // 2]
    elif damage == "flip":
        contents[len(contents) // 2] ^= 1
    else:
        contents = bytearray(b"" if damage == "empty" else b"hello, world" * 100)
    file.write_bytes(contents)
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        run_toy(steps=5)
    assert file.read_bytes() == contents, "what might still be saved is not overwritten"


def test_another_training_in_the_same_folder_is_refused(run_toy: RunToy) -> None:
    run_toy(steps=5)
    with pytest.raises(InvalidArgument, match=r"learning_rate=0\.05, now it is 0\.5"):
        run_toy(steps=5, learning_rate=0.5)
    run_toy(steps=5, checkpoint_steps=1)  # how often is no part of what is learnt


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    write_checkpoint(file, {"step": 1, "weights": torch.ones(9)})
    (tmp_path / "checkpoint.pt.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError) as caught:
        write_checkpoint(file, {"step": 2, "weights": torch.zeros(9)})
    assert caught.value.errno == errno.ENOSPC
    assert read_checkpoint(file)["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"], "no half file stays"


def test_training_goes_on_when_the_disk_is_full(
    run_toy: RunToy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, straight = run_toy("straight")
    replace, calls = os.replace, []

    def full(source: object, to: object) -> None:
        calls.append(to)
        if len(calls) > 4 and str(to).endswith("checkpoint.pt"):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, to)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        _, result = run_toy("full", checkpoint_steps=4)
    assert result.history.losses == straight.history.losses
    folder = tmp_path / "full" / "training"
    assert len(read_checkpoint(folder / "checkpoint.pt")["history"]["losses"]) == 8
    assert not list(folder.glob("*.tmp"))
    (tmp_path / "full" / "toy.pt").unlink()
    task, resumed = run_toy("full", checkpoint_steps=4)
    assert task.seen[0].step == 8 and resumed.history == straight.history
    assert_same(weights(tmp_path / "full"), weights(tmp_path / "straight"))


@pytest.mark.slow
@pytest.mark.usefixtures("picture")
def test_plot_and_tensorboard_events_lie_beside_the_result(run_toy: RunToy, tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    run_toy()
    folder = tmp_path / "out" / "training"
    picture = imread(folder / "plot.png")  # [height, width, 4]
    assert picture.shape[1] > 500
    assert len(np.unique(picture.reshape(-1, 4), axis=0)) > 10, "curves are drawn"
    (events,) = folder.glob("events*")
    data, seen, at = events.read_bytes(), set(), 0
    while at < len(data):  # TFRecord: length, its checksum, the record, its checksum
        size = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + size])
        seen |= {(value.tag, event.step) for value in event.summary.value}
        at += size + 16
    assert {("train/loss", step) for step in range(20)} <= seen
    assert {("held-out/acceptance", step) for step in (0, 5, 10, 15, 20)} <= seen


def test_without_tensorboard_training_goes_on_and_says_so(
    run_toy: RunToy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    _, result = run_toy()
    assert result.history.step == 20
    captured = capsys.readouterr()
    assert "pip install 'paceline[train]'" in captured.out + captured.err


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0), ("batch_size", 0), ("eval_every", 0), ("patience", 0), ("clip", 0.0),
        ("learning_rate", float("nan")), ("warmup", -1), ("seed", -1), ("checkpoint_steps", 0),
    ],
)  # fmt: skip
def test_bad_options_are_named(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        TrainOptions(out=tmp_path, **{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_task_without_rows_is_refused(tmp_path: Path) -> None:
    task = Toy()
    task.num_rows = 0
    with pytest.raises(InvalidArgument):
        train(task, TrainOptions(out=tmp_path))
