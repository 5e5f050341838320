"""Scaling laws of drafters (Scylla): the fit, what it says of unseen sizes, and the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.demo import GRID_FILE, TARGET_DIR
from paceline.errors import InvalidArgument
from paceline.profile import CostProfile, fingerprint
from paceline.train.drafter_law import (
    DrafterCosts,
    DrafterPoint,
    DrafterPoints,
    DrafterSize,
    _features,
    fit_batch_law,
    fit_law,
    fit_training_cost,
    hold_out_sizes,
    plan_drafter,
)

SIZES = {1: 100_000, 2: 200_000, 3: 400_000, 4: 800_000, 5: 1_600_000}
A, B, C = -0.9, 0.03, 0.07


def planted(noise: float = 0.0, seed: int = 0) -> list[DrafterPoint]:
    """Points on a law, or near one."""
    rng = np.random.default_rng(seed)
    return [
        DrafterPoint(
            layers, 64, params, tokens,
            A + B * math.log(params) + C * math.log(tokens) + noise * float(rng.normal()),
            0.5, tokens * (1e-5 + 1e-10 * params),
        )
        for tokens in (30_000, 100_000, 300_000)
        for layers, params in SIZES.items()
    ]  # fmt: skip


def costs(layers: int, draft: float, batch_cost: float = 0.2) -> DrafterCosts:
    """A target with forwards of 10 ms, and a drafter with ``draft`` seconds for each token."""
    batches, nodes, depths = (1, 2, 4, 8), (1, 5, 9), (1, 8)
    profile = CostProfile(
        key={}, batches=batches, nodes=nodes, depths=depths,
        verify_seconds=tuple(
            tuple(0.01 * (1 + batch_cost * (b * n - 1) / 8) for n in nodes) for b in batches
        ),
        draft_seconds=tuple(tuple(draft * d for d in depths) for _ in batches),
    )  # fmt: skip
    return DrafterCosts(DrafterSize(layers, 64), SIZES[layers], profile)


# --- the law --------------------------------------------------------------------------------------


def test_a_law_that_holds_is_found_and_leaves_nothing() -> None:
    law = fit_law(planted())
    assert law.coefficients == pytest.approx([A, B, C], abs=1e-9)
    assert law.spread < 1e-9 and law.r2 == pytest.approx(1.0)
    assert law.predict(3_200_000, 1_000_000) == pytest.approx(
        A + B * math.log(3_200_000) + C * math.log(1_000_000)
    )
    assert law.covers(150_000, 50_000)
    assert not law.covers(150_000, 500_000) and not law.covers(50_000, 50_000)


def test_an_acceptance_is_a_probability() -> None:
    law = fit_law(planted())
    assert law.predict(10**12, 10**12) == 1.0 and law.predict(1, 1) == 0.0


def test_the_error_is_that_of_new_drafters() -> None:
    """Of new drafters 90 to 99 % fall within two errors, also where the law has to reach out."""
    rng = np.random.default_rng(1)
    for params, tokens in ((300_000, 100_000), (6_400_000, 2_000_000)):
        right = A + B * math.log(params) + C * math.log(tokens)
        near = []
        for seed in range(200):
            law = fit_law(planted(noise=0.02, seed=seed))
            new = right + 0.02 * rng.normal(size=10)
            away = np.abs(new - _features(params, tokens) @ law.coefficients)
            near += (away < 2 * law.error(params, tokens)).tolist()
        assert 0.9 < np.mean(near) < 0.99
    assert law.error(6_400_000, 2_000_000) > 1.2 * law.error(300_000, 100_000)


def test_a_size_that_was_left_out_is_predicted_from_the_others() -> None:
    for each in hold_out_sizes(planted()):
        assert np.abs(each.errors).max() < 1e-9
        assert each.beyond == (each.size.layers in (1, 5))
    four = [p for p in planted() if p.layers < 5]
    assert len(hold_out_sizes(four)) == 4  # what is left, three sizes, is enough to be judged by
    odd = [replace(p, acceptance=p.acceptance + 0.1 * (p.layers == 3)) for p in planted()]
    held = {each.size.layers: each for each in hold_out_sizes(odd)}
    assert held[3].errors == pytest.approx([-0.1] * 3)  # the others know nothing of its bonus


def test_the_demos_drafters_keep_the_law() -> None:
    """What ships: at least four sizes, small residuals, and each size known from the others."""
    found = DrafterPoints.load(GRID_FILE)
    assert found.target == fingerprint(TARGET_DIR)
    assert len({p.size for p in found.points}) >= 4 and len({p.tokens for p in found.points}) >= 3
    law = fit_law(found.points)
    assert law.coefficients[1] > 0 and law.coefficients[2] > 0
    assert law.spread < 0.035 and law.r2 > 0.9
    later = fit_law([p for p in found.points if p.tokens > 90_000])
    assert later.spread < 0.025 and later.r2 > 0.95  # the shortest trainings bend the line
    values = [p.acceptance for p in found.points]
    for each in hold_out_sizes(found.points):
        assert np.abs(each.errors).mean() < 0.15 * (max(values) - min(values)), each


@pytest.mark.parametrize("few", ["sizes", "tokens"])
def test_a_law_needs_enough_points(few: str) -> None:
    points = [p for p in planted() if (p.layers < 4 if few == "sizes" else p.tokens == 30_000)]
    with pytest.raises(InvalidArgument, match="at least 4 sizes and 2 numbers of tokens"):
        fit_law(points)


def test_points_are_kept_whole(tmp_path: Path) -> None:
    points = DrafterPoints("t", "x", "cpu", {"seed": 0}, tuple(planted()))
    points.save(tmp_path / "grid" / "points.json")
    assert DrafterPoints.load(tmp_path / "grid" / "points.json") == points
    (tmp_path / "bad.json").write_text('{"version": 1}')
    with pytest.raises(InvalidArgument, match="points of drafters"):
        DrafterPoints.load(tmp_path / "bad.json")


# --- batches --------------------------------------------------------------------------------------


def test_speed_falls_with_the_logarithm_of_the_batch() -> None:
    law = fit_batch_law((1, 2, 4, 8, 16), [100 - 9 * math.log(b) for b in (1, 2, 4, 8, 16)])
    assert (law.intercept, law.slope) == pytest.approx((100, -9)) and law.r2 == pytest.approx(1)


def test_the_plans_speed_falls_with_the_batch() -> None:
    each = costs(2, 0.001)
    speeds = [each.speed(0.7, batch)[0] for batch in (1, 2, 4, 8)]
    assert speeds == sorted(speeds, reverse=True)
    plan = plan_drafter(fit_law(planted()), fit_training_cost(planted()), [each], core_seconds=60)
    assert plan.drafters[0].by_batch.slope < 0
    # With forwards that cost the same for any number of rows, it does not.
    free = costs(2, 0.001, batch_cost=0.0)
    flat = plan_drafter(fit_law(planted()), fit_training_cost(planted()), [free], core_seconds=60)
    assert flat.drafters[0].by_batch.slope == pytest.approx(0.0, abs=1e-6)


# --- the plan -------------------------------------------------------------------------------------


def test_speed_is_that_of_the_best_length() -> None:
    each = costs(1, 0.001)
    acceptance = 0.7
    by_depth = [
        sum(acceptance**i for i in range(depth + 1))
        / (each.profile.draft(depth, 1) + each.profile.verify(1 + depth, 1))
        for depth in range(17)
    ]
    assert each.speed(acceptance, 1) == (pytest.approx(max(by_depth)), int(np.argmax(by_depth)))


def test_a_budget_buys_fewer_tokens_for_a_larger_drafter() -> None:
    cost = fit_training_cost(planted())
    assert (cost.each, cost.of_param) == pytest.approx((1e-5, 1e-10))
    assert cost.tokens(100_000, 10) == pytest.approx(500_000, abs=1)
    assert cost.tokens(1_600_000, 10) == pytest.approx(10 / 1.7e-4, abs=1)


def plan_of(candidates: Sequence[DrafterCosts], core_seconds: float, noise: float = 0.01):  # type: ignore[no-untyped-def]
    points = planted(noise)
    return plan_drafter(
        fit_law(points), fit_training_cost(points), candidates, core_seconds=core_seconds
    )


def test_the_plan_weighs_acceptance_against_costs() -> None:
    equal = [costs(layers, 0.0005) for layers in (1, 5)]
    # A larger drafter that costs nothing more to serve is better once it sees enough tokens: its
    # budget buys 8.5 times fewer of them, which costs C * log(8.5) and gains B * log(16).
    assert C * math.log(8.5) > B * math.log(16)
    small, large = plan_of(equal, 30).drafters
    assert (small.size.layers, large.size.layers) == (1, 5)
    assert small.tokens > 8 * large.tokens and small.acceptance > large.acceptance
    dear = [costs(1, 0.004), costs(5, 0.0005)]
    assert plan_of(dear, 30).drafters[0].size.layers == 5
    assert sum(each.best_in for each in plan_of(equal, 30).drafters) == pytest.approx(1.0)


def test_more_budget_more_speed_and_a_narrower_choice_of_ar() -> None:
    candidates = [costs(2, 0.001)]
    speeds = [plan_of(candidates, budget).drafters[0].speed for budget in (1, 8, 300)]
    assert speeds == sorted(speeds) and speeds[0] < speeds[-1]
    best = plan_of(candidates, 8).drafters[0]
    assert best.low < best.speed < best.high and not best.extrapolated
    assert plan_of(candidates, 300).drafters[0].extrapolated


def test_where_no_drafter_pays_none_is_trained() -> None:
    plan = plan_of([costs(1, 0.05), costs(2, 0.05)], 30)
    assert plan.chosen is None and plan.drafters[0].depth == 0
    assert plan.ar_speed == pytest.approx(100)
    assert plan_of([costs(1, 0.0005)], 30).chosen is not None


@pytest.mark.parametrize("size", ["2", "0x3", "ax3", "2x", "-1x4"])
def test_sizes_are_written_as_they_are_read(size: str) -> None:
    assert str(DrafterSize.parse("2x416")) == "2x416"
    with pytest.raises(InvalidArgument, match="LAYERSxINTERMEDIATE"):
        DrafterSize.parse(size)
