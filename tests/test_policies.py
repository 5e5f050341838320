"""The comparison of policies on recorded texts: who gets what, on texts made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.policies import (
    AR,
    LONGEST,
    DraftCost,
    Fixed,
    Recorded,
    Spent,
    TapOutPolicy,
    World,
    compare,
    decode,
    interval,
    table,
)
from tests.core.test_auto import Costs

LENGTH = 200


def text(category: str, accuracy: dict[str, float], seed: int) -> Recorded:
    """A text of which each drafter has every token right with some probability."""
    random = np.random.default_rng(seed)
    found = Recorded(category, [1, 2, 3], random.integers(0, 500, LENGTH).tolist())
    for name, rate in accuracy.items():
        right = random.random((LENGTH, LONGEST)) < rate
        found.right[name] = np.cumprod(right, axis=1).sum(axis=1)
        found.size[name] = np.full(LENGTH, LONGEST)
    found.seen = np.full((LENGTH, LONGEST, 3), (0.9, 0.8, 0.1))
    return found


@pytest.fixture(scope="module")
def world() -> World:
    # Long rounds: the time that auto itself takes counts, and a busy machine must not matter here.
    verify: Any = Costs(2e-2, 1e-3)
    drafts = {"suffix": DraftCost(2e-4, 0.0), "draft_model": DraftCost(2e-3, 1e-3)}
    return World(verify, drafts, batch=1)


@pytest.fixture(scope="module")
def texts() -> list[Recorded]:
    copying = [text("copying", {"suffix": 0.9, "draft_model": 0.6}, seed) for seed in range(4)]
    new = [text("new", {"suffix": 0.1, "draft_model": 0.8}, seed) for seed in range(10, 14)]
    return [each for pair in zip(copying, new, strict=True) for each in pair]


def test_a_round_costs_what_it_verifies_and_drafts(world: World, texts: list[Recorded]) -> None:
    spent = decode(texts[0], Fixed(AR), world)
    assert spent == Spent(LENGTH, pytest.approx(LENGTH * 2.1e-2))
    always = text("all", {"suffix": 1.0}, 0)
    spent = decode(always, Fixed(("suffix", 4)), world)  # 40 rounds of five tokens
    assert spent.seconds == pytest.approx(40 * (2e-2 + 5e-3 + 2e-4))


def test_nothing_that_learns_beats_what_knows(world: World, texts: list[Recorded]) -> None:
    found = compare(texts, world)
    speed = {name: sum(s.tokens for s in each) / sum(s.seconds for s in each)
             for name, each in found.items()}  # fmt: skip
    assert speed["best of class"] >= speed["best fixed"] > speed["ar"]
    rivals = {"ucb", "ucb speed", "exp3", "exp3 speed", "metasd 4", "metasd 8", "nightjar",
              "tapout"}  # fmt: skip
    assert rivals < found.keys()
    assert all(speed[name] < speed["best of class"] for name in rivals)
    assert speed["auto"] > 0.85 * speed["best of class"]
    assert speed["auto"] > 0.95 * max(speed[name] for name in rivals)
    lines = list(table(texts, found))
    assert any(line.startswith("| copying | 4 |") for line in lines)
    assert lines[-1].startswith("Requests at 0.98")


def test_tapout_stops_where_its_rules_do(texts: list[Recorded]) -> None:
    policy = TapOutPolicy("draft_model", keeps=False)
    sure, unsure = texts[0], text("unsure", {"draft_model": 0.5}, 1)
    unsure.seen = np.full((LENGTH, LONGEST, 3), (0.3, 0.05, 1.4))
    policy.start(sure)
    assert policy.choose(0) == ("draft_model", LONGEST)
    policy.start(unsure)
    assert policy.choose(0) == ("draft_model", 1)  # max_confidence, the first arm


def test_the_interval_is_around_the_ratio() -> None:
    ours = [Spent(100, 1.0 + 0.01 * i) for i in range(20)]
    theirs = [Spent(100, 1.5) for _ in range(20)]
    ratio, low, high = interval(ours, theirs)
    assert low < ratio < high
    assert ratio == pytest.approx(30 / sum(s.seconds for s in ours))
    assert interval(ours, ours) == (1.0, 1.0, 1.0)
