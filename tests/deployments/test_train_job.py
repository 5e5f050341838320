"""`paceline train --workers N`: the same training in several processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.cluster.local_ray import ClusterError
from paceline.cluster.train_job import TrainJob, train_here, train_on_ray
from paceline.errors import InvalidArgument
from paceline.train.trainer import TrainOptions, read_checkpoint
from tests.modelzoo import make_model

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]


@pytest.fixture
def job(zoo: Path, tmp_path: Path) -> TrainJob:
    target = make_model("llama", zoo, num_hidden_layers=2, hidden_size=32, intermediate_size=64)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"def f{i}(x):\n    return x + {i}\n" * 8 for i in range(80)))
    return TrainJob(
        kind="distill",
        knobs={"target": target, "data": [text], "length": 32, "held_out_rows": 4, "layers": 1},
        options=TrainOptions(out=tmp_path / "out", steps=12, eval_every=6, learning_rate=3e-3),
    )


@pytest.mark.nightly
def test_two_workers_follow_the_path_of_one(
    ray_cluster: None, job: TrainJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = replace(job, options=replace(job.options, out=tmp_path / "alone"))
    expected = train_here(alone)
    # Other tests' deployments hold parts of the machine's two CPUs.
    result = train_on_ray(job, 2, None, cpus=0.1)
    assert result["steps"] == 12
    assert result["after"]["acceptance"] == pytest.approx(expected["after"]["acceptance"], abs=1e-4)
    losses = [
        read_checkpoint(folder / "training" / "checkpoint.pt")["history"]["losses"]
        for folder in (tmp_path / "alone", tmp_path / "out")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    one, two = (load_file(tmp_path / n / "model.safetensors") for n in ("alone", "out"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=2e-3)
    assert "step 12: acceptance" in capsys.readouterr().err


@pytest.mark.slow
def test_more_workers_than_the_cluster_has_room_for_are_refused(
    ray_cluster: None, job: TrainJob
) -> None:
    with pytest.raises(ClusterError, match="the workers want 8000 CPUs and the cluster has"):
        train_on_ray(job, 8, None, cpus=1000)


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_refused_before_anything_starts(job: TrainJob) -> None:
    refused = replace(job, options=replace(job.options, batch_size=7))
    with pytest.raises(InvalidArgument, match="batch_size: got 7, expected a multiple of 2"):
        train_on_ray(refused, 2, None)
