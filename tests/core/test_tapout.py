"""TapOut: the bandit, its stopping rules, its reward, and that it finds the rule that pays."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.config import SpeculationConfig
from paceline.lengths.base import LengthContext
from paceline.lengths.tapout import Arms, Bandit, TapOutStop, root_entropy
from paceline.methods import LENGTHS
from paceline.plan import resolve
from paceline.types import Draft, DraftStep, Outcome, Verification


def step(depth: int, *probs: float) -> DraftStep:
    return DraftStep(depth, 0, np.log(np.array(probs)))


def outcome(drafted: int, accepted: int) -> Outcome:
    return Outcome(
        draft=Draft.chain([0] * drafted),
        path=tuple(range(accepted)),
        next_token=0,
        token_ids=(0,) * (accepted + 1),
        num_accepted=accepted,
        verification=Verification(None),  # type: ignore[arg-type]
    )


def test_ucb1_pulls_each_arm_once_and_then_the_highest_bound() -> None:
    bandit = Bandit(3, "ucb1")
    for arm, reward in enumerate((0.5, 0.9, 0.1)):
        assert bandit.choose() == arm
        bandit.learn(arm, reward)
    assert bandit.choose() == 1
    for _ in range(4):
        bandit.learn(1, 0.9)
    pulls = ((0.5, 1), (4.5, 5), (0.1, 1))
    bounds = [total / n + math.sqrt(2 * math.log(7) / n) for total, n in pulls]
    assert max(bounds) == bounds[0]  # 2.47, 1.78, 2.07: the second arm is known well enough
    assert bandit.choose() == 0


@pytest.mark.parametrize("algorithm", ["ucb1", "ucb_tuned", "thompson"])
def test_every_algorithm_finds_the_best_arm(algorithm: str) -> None:
    random = np.random.default_rng(1)
    bandit = Bandit(5, algorithm)  # type: ignore[arg-type]
    for _ in range(2000):
        arm = bandit.choose()
        bandit.learn(arm, float(random.random() < (0.2, 0.3, 0.8, 0.4, 0.1)[arm]))
    assert bandit.counts[2] > 1400
    assert min(bandit.counts) >= 1


def test_the_rules_judge_the_distribution() -> None:
    rules = Arms().rules
    sure, unsure, close = (
        np.array(p) for p in ((0.9, 0.05, 0.05), (0.4, 0.3, 0.3), (0.5, 0.45, 0.05))
    )
    assert [rules["max_confidence"](p) for p in (sure, unsure)] == [False, True]
    assert [rules["logit_margin"](p) for p in (sure, unsure, close)] == [False, True, True]
    assert root_entropy(np.array([0.5, 0.5])) == pytest.approx(math.sqrt(math.log(2)))
    assert root_entropy(np.array([1.0, 0.0])) == 0.0
    assert [rules["svip"](np.array([p, 1 - p])) for p in (0.95, 0.5)] == [False, True]


def test_svip_difference_looks_at_the_last_token() -> None:
    arms = Arms()
    rule = arms.rules["svip_difference"]
    flat, peaked = np.array([0.5, 0.5]), np.array([0.99, 0.01])
    assert [rule(flat), rule(peaked), rule(flat)] == [False, False, True]
    arms.start()
    assert not rule(flat)  # a new draft has no last token


def test_the_threshold_of_adaedl_follows_the_acceptance_rate() -> None:
    arms = Arms()
    rule, flat = arms.rules["adaedl"], np.full(64, 1 / 64)
    assert not rule(flat)  # it starts by drafting on
    for _ in range(400):
        arms.learn(0.0)
    assert rule(flat)
    for _ in range(400):
        arms.learn(1.0)
    assert not rule(flat)


def test_the_reward_blends_length_and_rate() -> None:
    bandit = Bandit(5, "ucb1")
    rule = TapOutStop(bandit, shortest=1, longest=10, blend=0.25)
    assert not rule.stop_after(step(1, 0.9, 0.1))
    rule.observe(outcome(drafted=4, accepted=3))
    assert bandit.counts == [1, 0, 0, 0, 0]
    assert bandit.sums[0] == pytest.approx(0.25 * 3 / 10 + 0.75 * 3 / 4)


def test_only_drafts_that_it_ended_are_rewarded_and_each_once() -> None:
    bandit = Bandit(5, "ucb1")
    rule = TapOutStop(bandit, shortest=1, longest=10, blend=0.5)
    rule.observe(outcome(4, 3))  # drafted in another process
    rule.stop_after(step(1, 0.9, 0.1))
    rule.observe(outcome(0, 0))  # AR
    rule.observe(outcome(4, 3))
    rule.observe(outcome(4, 3))
    assert bandit.counts == [1, 0, 0, 0, 0]


def test_a_draft_ahead_has_the_arm_of_the_draft_that_it_follows() -> None:
    bandit = Bandit(5, "ucb1")
    rule = TapOutStop(bandit, shortest=1, longest=10, blend=0.5)
    rule.stop_after(step(1, 0.9, 0.1))
    rule.stop_after(step(1, 0.9, 0.1))  # ahead
    rule.observe(outcome(4, 4))
    rule.observe(outcome(4, 4))  # of the draft that was made ahead
    assert bandit.counts == [2, 0, 0, 0, 0]
    rule.stop_after(step(1, 0.9, 0.1))
    rule.stop_after(step(1, 0.9, 0.1))
    rule.observe(outcome(4, 1))  # what was drafted ahead is of no use
    rule.observe(outcome(4, 4))
    assert bandit.counts == [2, 1, 0, 0, 0]


def test_no_draft_ends_before_the_shortest_length() -> None:
    rule = TapOutStop(Bandit(5, "ucb1"), shortest=3, longest=10, blend=0.5)
    assert [rule.stop_after(step(d, 0.4, 0.3, 0.3)) for d in (1, 2, 3)] == [False, False, True]


def test_it_settles_on_the_rule_that_pays() -> None:
    """Confident tokens are right and others wrong; entropy does not rise within a draft.

    The rule `svip_difference` therefore drafts on to the end, and `max_confidence` stops in time.
    """
    random = np.random.default_rng(0)
    bandit = Bandit(5, "ucb1")
    rule = TapOutStop(bandit, shortest=1, longest=10, blend=0.5)
    for _ in range(600):
        good = int(random.integers(1, 8))
        drafted = 0
        for depth in range(1, 11):
            drafted = depth
            probs = (0.86, 0.07, 0.07) if depth <= good else (0.75, 0.13, 0.12)
            if rule.stop_after(step(depth, *probs)):
                break
        rule.observe(outcome(drafted, min(drafted, good)))
    in_time, to_the_end = (
        list(Arms().rules).index(n) for n in ("max_confidence", "svip_difference")
    )
    means = [total / count for total, count in zip(bandit.sums, bandit.counts, strict=True)]
    assert means[in_time] > means[to_the_end] + 0.05
    assert bandit.counts[in_time] > bandit.counts[to_the_end]


def test_its_knobs_reach_the_bandit() -> None:
    plan = resolve(SpeculationConfig(method="tapout", bandit="thompson", reward_blend=0.75))
    assert plan.config.length_max == 20
    controller = LENGTHS["tapout"].make(plan.config, LengthContext())
    rule = controller.stop_rule
    assert isinstance(rule, TapOutStop)
    assert rule._bandit._algorithm == "thompson"
    assert rule._blend == 0.75


def test_sessions_of_an_engine_learn_together() -> None:
    context, config = LengthContext(), resolve(SpeculationConfig(method="tapout")).config
    rules = [LENGTHS["tapout"].make(config, context).stop_rule for _ in range(2)]
    assert rules[0]._bandit is rules[1]._bandit  # type: ignore[union-attr]
