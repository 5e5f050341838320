"""Which point comes next: against a made-up speed, so that hundreds of trials take a second."""

from __future__ import annotations

from typing import Any

import pytest
from ray.tune.search import Searcher

from paceline.plan import resolve
from paceline.tuning.results import Interval, Metrics, Point, TrialRecord
from paceline.tuning.search import CannotWin, PointSearch
from paceline.tuning.space import Space, parse_space


@pytest.fixture
def space() -> Space:
    return parse_space({
        "space": {
            "method": ["draft_model", "prompt_lookup", "layer_skip"],
            "num_speculative_tokens": {"min": 1, "max": 12},
            "exit_layer": {"min": 2, "max": 12, "step": 2},
        },
    })  # fmt: skip


@pytest.fixture
def small_space() -> Space:
    """Few enough points to see them all."""
    return parse_space({
        "space": {
            "method": ["draft_model", "layer_skip"],
            "num_speculative_tokens": {"min": 1, "max": 6},
            "exit_layer": {"min": 2, "max": 12, "step": 5},
        },
    })  # fmt: skip


def speed(point: Point) -> float:
    """Best at layer_skip, exit 6, length 5."""
    config = resolve(point.speculation).config
    if point.is_ar:
        return 1.0
    length = config.num_speculative_tokens or 0
    if config.method == "layer_skip":
        return 2.0 - 0.05 * abs(length - 5) - 0.1 * abs((config.exit_layer or 0) - 6)
    return 1.5 - 0.05 * abs(length - 3)


def drive(search: PointSearch, count: int) -> list[Point]:
    points = []
    for number in range(count):
        config: Any = search.suggest(f"trial{number}")
        if config == Searcher.FINISHED:
            break
        point = Point.model_validate_json(config["point"])
        points.append(point)
        search.on_trial_complete(f"trial{number}", {"goodput_ratio": speed(point)})
    return points


def metrics(ratio: float) -> Metrics:
    interval = Interval(value=ratio, low=ratio, high=ratio)
    return Metrics(
        goodput_ratio=interval, latency_p50_ratio=interval, latency_p99_ratio=interval,
        tokens_per_second=1.0, ar_tokens_per_second=1.0, latency_p50_ms=1.0, latency_p99_ms=1.0,
        mean_accepted_length=1.0, acceptance_rate=0.0, memory_mb=1.0, identical_to_ar=True,
        num_pairs=2, num_prompts=1,
    )  # fmt: skip


def test_no_point_comes_twice_and_all_come_in_the_end(small_space: Space) -> None:
    space = small_space
    points = drive(PointSearch(space, [space.ar]), 10_000)
    keys = [point.key for point in points]
    assert keys[0] == space.ar.key
    assert len(keys) == len(set(keys))
    assert set(keys) == {point.key for point in space.points}


def test_it_finds_the_best_in_fewer_trials_than_there_are_points(space: Space) -> None:
    found = drive(PointSearch(space, [space.ar]), 40)
    assert len(space.points) == 1 + 12 + 12 + 6 * 12
    assert max(speed(point) for point in found) >= 0.97 * max(speed(p) for p in space.points)


def test_predictions_go_first_and_hopeless_points_are_left_out(space: Space) -> None:
    predicted = {point.key: speed(point) for point in space.points if not point.is_ar}
    best = max(space.points, key=speed)
    search = PointSearch(space, [space.ar, best], predicted=predicted)
    points = drive(search, 20)
    assert [point.key for point in points[:2]] == [space.ar.key, best.key]
    assert all(speed(point) >= 0.8 * speed(best) for point in points[2:])


def test_what_is_known_is_not_measured_again(small_space: Space) -> None:
    space = small_space
    first = drive(PointSearch(space, [space.ar]), 10)
    records = [
        TrialRecord(
            key=p.key, number=i, point=p, status="finished", metrics=metrics(speed(p))
        )
        for i, p in enumerate(first)
    ]  # fmt: skip
    search = PointSearch(space, [space.ar, *first[:3]], records=records)
    config: Any = search.suggest("next")
    assert config["number"] == 10
    rest = drive(search, 10_000)
    assert not {point.key for point in rest} & {point.key for point in first}
    assert len(rest) == len(space.points) - 10 - 1


def test_points_that_the_target_refuses_never_come(small_space: Space) -> None:
    space = small_space
    refused = {point.key for point in space.points if point.speculation.exit_layer == 12}
    points = drive(PointSearch(space, [space.ar], refused=refused), 10_000)
    assert len(refused) == 6
    assert {point.key for point in points} == {p.key for p in space.points} - refused


def test_a_failed_trial_says_nothing_of_its_point(space: Space) -> None:
    search = PointSearch(space, [space.ar])
    config: Any = search.suggest("one")
    search.on_trial_complete("one", None, error=True)
    again: Any = search.suggest("two")
    assert again["point"] != config["point"]
    search.on_trial_complete("two", None, error=True)


def test_fixed_points_only_without_suggestions(space: Space) -> None:
    chosen = [space.ar, *space.points[3:6]]
    points = drive(PointSearch(space, chosen, suggest=False), 100)
    assert [point.key for point in points] == [point.key for point in chosen]


def test_several_objectives_are_searched_together() -> None:
    space = parse_space({
        "objective": ["goodput", "latency_p99"],
        "space": {"method": "draft_model", "num_speculative_tokens": {"min": 1, "max": 30}},
    })  # fmt: skip
    search = PointSearch(space, [space.ar])
    assert search.metric == ["goodput_ratio", "latency_p99_ratio"]
    seen = set()
    for number in range(20):
        config: Any = search.suggest(str(number))
        point = Point.model_validate_json(config["point"])
        seen.add(point.key)
        length = resolve(point.speculation).config.num_speculative_tokens or 0
        search.on_trial_complete(
            str(number), {"goodput_ratio": length, "latency_p99_ratio": 30 - length}
        )
    assert len(seen) == 20


def result(low: float, high: float, prompts: int, complete: bool = False) -> dict[str, Any]:
    return {
        "goodput_ratio_low": low, "goodput_ratio_high": high, "num_prompts": prompts,
        "complete": complete,
    }  # fmt: skip


def test_a_trial_that_cannot_win_is_stopped() -> None:
    stopper = CannotWin(["goodput"])
    assert not stopper("a", result(1.8, 2.0, 2))
    assert not stopper("b", result(1.5, 1.9, 2))  # it may still
    assert stopper("c", result(1.1, 1.7, 2))
    assert "at most 1.70x" in stopper.stopped["c"]
    # Other prompts are another comparison, and a trial that is complete has nothing to save.
    assert not stopper("d", result(1.1, 1.7, 4))
    assert not stopper("e", result(1.1, 1.7, 2, complete=True))
