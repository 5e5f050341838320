"""The result folder: what counts, which trial is the best, and files that are damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import SpeculationConfig
from paceline.errors import InvalidArgument
from paceline.tuning.results import (
    Interval,
    Metrics,
    Point,
    Results,
    TrialRecord,
    best_trial,
    pareto_front,
)


def interval(value: float, reach: float = 0.05) -> Interval:
    return Interval(value=value, low=value - reach, high=value + reach)


def record(number: int, goodput: float, p99: float = 1.0, **fields: object) -> TrialRecord:
    speculation = SpeculationConfig(method="draft_model", num_speculative_tokens=number)
    if number == 0:
        speculation = SpeculationConfig(method="ar")
    point = Point(speculation=speculation)
    metrics = Metrics(
        goodput_ratio=interval(goodput), latency_p50_ratio=interval(1.0),
        latency_p99_ratio=interval(p99), tokens_per_second=1.0, ar_tokens_per_second=1.0,
        latency_p50_ms=1.0, latency_p99_ms=1.0, mean_accepted_length=1.0, acceptance_rate=0.0,
        memory_mb=1.0, identical_to_ar=True, num_pairs=2, num_prompts=1,
    )  # fmt: skip
    plain = TrialRecord(
        key=point.key, number=number, point=point, status="finished", metrics=metrics
    )
    return plain.model_copy(update=fields)


AR = record(0, 1.0)


def test_the_best_is_the_fastest_that_is_surely_faster_than_ar() -> None:
    assert best_trial([AR, record(1, 1.5), record(2, 1.9)], "goodput") == record(2, 1.9)


def test_ar_is_the_best_where_nothing_is_surely_faster() -> None:
    assert best_trial([AR, record(1, 0.8), record(2, 1.04)], "goodput") == AR
    assert best_trial([AR], "goodput") == AR
    assert best_trial([], "goodput") is None


def test_failed_and_refused_trials_are_never_the_best() -> None:
    failed = record(3, 9.0, metrics=None, status="failed")
    refused = record(4, 9.0, refused="memory_mb: 9, at most 8")
    assert best_trial([AR, failed, refused, record(1, 1.5)], "goodput") == record(1, 1.5)


def test_what_was_confirmed_goes_before_what_was_not() -> None:
    lucky = record(1, 2.5)
    confirmed = record(2, 2.0, confirmed=record(2, 1.9).metrics)
    assert best_trial([AR, lucky, confirmed], "goodput") == confirmed
    assert confirmed.objective("goodput").value == 1.9
    # Confirmed as no better than AR: then AR it is.
    slow = record(2, 2.0, confirmed=record(2, 0.9).metrics)
    assert best_trial([AR, slow], "goodput") == AR


def test_the_front_has_what_none_beats_in_all() -> None:
    a, b, c, d = record(1, 2.0, 1.0), record(2, 1.5, 1.5), record(3, 1.4, 1.4), record(4, 2.0, 1.0)
    assert pareto_front([a, b, c, d], ["goodput", "latency_p99"]) == [a, b]


def test_a_folder_keeps_what_is_put_there(tmp_path: Path) -> None:
    results = Results(str(tmp_path / "there"))
    results.save_trial(record(2, 1.5))
    results.save_trial(AR)
    assert results.trials() == [AR, record(2, 1.5)]
    assert Results("memory://sweep").trials() == []


@pytest.mark.parametrize("name", ["sweep.json", "trials/x.json", "predictions.json"])
def test_damaged_files_are_named(tmp_path: Path, name: str) -> None:
    results = Results(str(tmp_path))
    results.write(name, '[{"key": 1')
    read = {"sweep.json": results.manifest, "predictions.json": results.predictions}
    with pytest.raises(InvalidArgument, match=name):
        read.get(name, results.trials)()


def test_a_folder_without_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="a folder that a sweep wrote"):
        Results(str(tmp_path)).manifest()


def test_labels_name_the_knobs_that_were_set() -> None:
    point = Point(
        speculation=SpeculationConfig(
            method="draft_model", shape="rsd_c", branching_vector=(2, 1), num_speculative_tokens=2
        ),
        topology="actors",
    )
    assert point.label == (
        "draft_model num_speculative_tokens=2 shape=rsd_c branching_vector=[2, 1] actors"
    )
