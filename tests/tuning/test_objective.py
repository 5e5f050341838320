"""Pairs against AR, and what their spread says."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.bench.backends import LocalBackend
from paceline.engine import Engine
from paceline.loading import load_engine
from paceline.sampling import SamplingParams
from paceline.tuning.objective import Pair, PairedMeasurement, estimate, example_draft
from paceline.tuning.results import Point
from paceline.tuning.space import Space, parse_space


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine()


def groups_of(engine: Engine, space: Space) -> list[list[list[int]]]:
    assert engine.tokenizer is not None
    return [[engine.tokenizer.encode(prompt.text)] for prompt in space.prompts]


def space(**blocks: object) -> Space:
    workload = {"limit": 1, "max_tokens": 24}
    fields = {"method": ["draft_model", "speculative_sampling", "prompt_lookup"]}
    return parse_space({"space": fields, "workload": workload, **blocks})


def measurement(
    point: Point, space: Space, engine: Engine, groups: list[list[list[int]]] | None = None
) -> PairedMeasurement:
    backend = LocalBackend(engine)
    return PairedMeasurement(point, space, backend, backend, groups or groups_of(engine, space))


def test_ratios_are_of_total_times() -> None:
    pairs = [[Pair(1.0, 2.0, (1.0,), (2.0,))] * 2, [Pair(3.0, 3.0, (3.0,), (3.0,))] * 2]
    found = estimate(pairs, 0.95)
    assert found["goodput"].value == pytest.approx(5 / 4)
    assert found["latency_p50"].value == pytest.approx(2.5 / 2)
    # Repetitions that agree leave no doubt.
    assert found["goodput"].low == found["goodput"].high == pytest.approx(5 / 4)


def test_one_pair_of_each_group_says_nothing_of_the_noise() -> None:
    interval = estimate([[Pair(1.0, 2.0, (1.0,), (2.0,))]], 0.95)["goodput"]
    assert interval.value == 2.0
    assert interval.low == 0.0
    assert interval.high > 1e6


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Times with 5 % of noise, that of a pair partly shared: 95 % of intervals hold the ratio."""
    rng = np.random.default_rng(3)
    groups, repetitions, truth, held = 8, 4, 1.7, 0
    trials = 200
    for _ in range(trials):
        pairs = []
        for group in range(groups):
            base = 1.0 + group / 4
            members = []
            for _ in range(repetitions):
                shared = rng.normal(0, 0.04)
                mine, theirs = np.exp(shared + rng.normal(0, 0.03, 2))
                t, ar = base * mine / truth, base * theirs
                members.append(Pair(t, ar, (t,), (ar,)))
            pairs.append(members)
        interval = estimate(pairs, 0.95)["goodput"]
        held += interval.low <= truth <= interval.high
    # A binomial of 200 with 0.95 lies in this range in all but one of 10,000 cases.
    assert held >= 176


def test_noise_that_both_sides_share_does_not_widen_the_interval() -> None:
    rng = np.random.default_rng(0)
    apart, together = [], []
    for _ in range(6):
        a, b = np.exp(rng.normal(0, 0.2, (2, 4)))
        apart.append([Pair(x, y, (x,), (y,)) for x, y in zip(a, b, strict=True)])
        together.append([Pair(x / 2, x, (x / 2,), (x,)) for x in a])
    wide, narrow = (estimate(pairs, 0.95)["goodput"] for pairs in (apart, together))
    assert narrow.value == pytest.approx(2.0)
    assert narrow.high - narrow.low < 0.02 * (wide.high - wide.low)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("method", ["draft_model", "prompt_lookup", "ar"])
def test_a_measurement_covers_all_prompts_and_then_narrows(engine: Engine, method: str) -> None:
    checked = space(measurement={"repetitions": 3, "prompts_per_rung": 3})
    groups = groups_of(engine, checked)
    assert len(groups) == 4
    point = next(p for p in checked.points if p.speculation.method == method)
    if method != "ar":  # another length would not draft while other work uses the machine
        fixed = point.speculation.model_copy(update={"length": "fixed"})
        point = point.model_copy(update={"speculation": fixed})
    measured = measurement(point, checked, engine, groups)
    covered = []
    while not measured.is_sure:
        measured.step()
        covered.append((measured.num_groups, measured.num_pairs))
    # Twice for each prompt of a rung, then each once more until it is sure, or three times.
    assert covered[:2] == [(3, 6), (4, 8)]
    assert covered in ([(3, 6), (4, 8)], [(3, 6), (4, 8), (4, 12)])
    metrics = measured.metrics(
        example_draft(engine, point, groups[0][0], SamplingParams(max_tokens=24))
    )
    assert metrics.num_prompts == 4
    assert metrics.identical_to_ar is True
    assert metrics.goodput_ratio.low <= metrics.goodput_ratio.value <= metrics.goodput_ratio.high
    assert metrics.memory_mb > 50
    if method == "ar":
        assert metrics.mean_accepted_length == 1.0
        assert metrics.example is None
    if method == "draft_model":
        assert metrics.mean_accepted_length > 1.5
        assert metrics.accepted_by_depth[0] <= metrics.drafted_by_depth[0]
        example = metrics.example
        assert example is not None
        assert len(example.texts) == len(example.parent_indices) > 0
        assert set(example.accepted) <= set(range(len(example.texts)))


def test_a_rule_with_ars_distribution_promises_no_tokens(engine: Engine) -> None:
    checked = space(workload={"limit": 1, "max_tokens": 8, "temperature": 1.0})
    point = next(p for p in checked.points if p.speculation.method == "speculative_sampling")
    measured = measurement(point, checked, engine)
    measured.step()
    assert measured.metrics().identical_to_ar is None


@pytest.mark.slow
def test_another_dtype_is_compared_with_its_own_ar(engine: Engine) -> None:
    """Its tokens may differ from those of the sweep's dtype; drafts still change none of them."""
    checked = space(workload={"limit": 1, "max_tokens": 24})
    other = load_engine(dtype="bfloat16")
    point = Point(speculation=checked.points[1].speculation, dtype="bfloat16")
    measured = PairedMeasurement(
        point, checked, LocalBackend(other), LocalBackend(engine), groups_of(engine, checked)
    )
    while not measured.covers_all:
        measured.step()
    assert measured.metrics().identical_to_ar is True


def test_requests_that_are_decoded_together(engine: Engine) -> None:
    checked = space(workload={"limit": 2, "max_tokens": 16, "concurrency": 4})
    singles = [group[0] for group in groups_of(engine, checked)]
    groups = [singles[:4], singles[4:]]
    measured = measurement(checked.points[1], checked, engine, groups)
    while not measured.covers_all:
        measured.step()
    metrics = measured.metrics()
    assert metrics.num_prompts == 8
    assert metrics.identical_to_ar is True


def test_measurements_are_held_against_the_constraints(engine: Engine) -> None:
    checked = space(constraints={"latency_p99_ms": 5.0, "memory_mb": 10_000})
    limits = checked.document.constraints
    measured = measurement(checked.points[1], checked, engine)
    measured.step()
    metrics = measured.metrics()
    assert limits.broken_by(metrics.model_copy(update={"latency_p99_ms": 4.0})) is None
    slow = limits.broken_by(metrics.model_copy(update={"latency_p99_ms": 6.0}))
    assert slow == "latency_p99_ms: 6.0, at most 5"
    large = limits.broken_by(metrics.model_copy(update={"memory_mb": 1e6, "latency_p99_ms": 1.0}))
    assert large == "memory_mb: 1000000, at most 10000"
    other = limits.broken_by(metrics.model_copy(update={"identical_to_ar": False}))
    assert other == "its tokens are not those of AR"
