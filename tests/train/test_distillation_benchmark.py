"""DistillSpec against plain fine-tuning on a tiny pair, by ``benchmarks/distillation.py``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.distillation import PLAIN, START, compare, draw, interval, show
from paceline.train.data import TrainingText
from paceline.train.draft_models import DraftTask
from paceline.train.trainer import TrainOptions, train


@pytest.mark.nightly
def test_distillspec_is_accepted_more_than_plain_fine_tuning_at_equal_steps(
    target: Path, text: TrainingText, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The drafter knows the text already: all that is left to learn is the target."""
    drafter = tmp_path / "drafter"
    pretrained = DraftTask(target, text, layers=1, divergence="ce")
    train(pretrained, TrainOptions(out=drafter, steps=150, learning_rate=5e-3, eval_every=150))
    options = {"steps": 40, "eval_every": 40, "learning_rate": 3e-3, "warmup": 5}
    runs = (("ce", "corpus"), ("forward_kl", "on_policy"), ("jsd", "target"))
    result = compare(target, text, drafter, 1, options, tmp_path / "work", runs)
    rows = {row["run"]: row for row in result["rows"]}
    assert list(rows) == [START, PLAIN, "forward_kl, on_policy", "jsd, target"]
    for name in list(rows)[2:]:
        accepted = rows[name]["acceptance_written"]
        assert accepted["low"] > rows[PLAIN]["acceptance_written"]["high"], name
        assert accepted["low"] > rows[START]["acceptance_written"]["high"], name
        assert rows[name]["acceptance_written_over_plain"]["low"] > 0.05, name
        assert rows[name]["agreement_written"]["mean"] > rows[PLAIN]["agreement_written"]["mean"]
    draw(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    show(result)
    assert f"+{rows['jsd, target']['acceptance_written_over_plain']['mean']:.3f}" in (
        capsys.readouterr().out
    )
    # What is finished is measured again, not trained again: the numbers are the same.
    assert compare(target, text, drafter, 1, options, tmp_path / "work", runs) == result


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    found = [interval(values) for values in random.normal(0.3, 0.1, (100, 40))]
    covered = np.mean([row["low"] <= 0.3 <= row["high"] for row in found])
    assert 0.85 <= covered < 1.0  # 0.95, less what 40 texts cost the bootstrap
