"""Length controllers: what each paper says that it does, without models and on the demo pair."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, RoundEvent
from paceline.errors import InvalidArgument
from paceline.lengths.base import LENGTH_MAX, LengthBounds, LengthContext, Line
from paceline.lengths.bass import BatchLength
from paceline.lengths.disco import ClassifierStop, features
from paceline.lengths.goodput import AcceptanceEstimate, best_length, expected_tokens
from paceline.lengths.specdecpp import RejectionStop
from paceline.methods import LENGTHS
from paceline.plan import resolve
from paceline.profile import CostProfile
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.types import DraftStep, Load, Need, StopRule, Verification
from tests.core.lengths_sim import Simulator, new_session, outcome, play
from tests.core.prompts import code_prompts


def stops_at(rule: StopRule, chances: list[float]) -> int:
    """Length of a draft whose tokens the drafter gives these probabilities."""
    for depth, chance in enumerate(chances, 1):
        with np.errstate(divide="ignore"):
            scores = np.log(np.array([chance, 1 - chance + 1e-6], np.float32))
        if rule.stop_after(DraftStep(depth, 0, scores, torch.tensor([chance]))):
            return depth
    return len(chances)


def rejection_stop(shortest: int, threshold: float) -> RejectionStop:
    def chance(step: DraftStep) -> float:
        assert step.hidden is not None
        return float(step.hidden[0])

    return RejectionStop(shortest, threshold, chance)


# --- every controller -----------------------------------------------------------------------------


def method_of(length: str) -> str:
    """A method that the controller is for."""
    return {"del": "layer_skip", "auto": "auto"}.get(length, "draft_model")


@pytest.mark.parametrize("length", sorted(LENGTHS))
def test_every_controller_stays_within_its_bounds(length: str) -> None:
    session = new_session(method=method_of(length), length=length, num_speculative_tokens=5)
    config = session.plan.config
    bounded = any(knob.is_same(LENGTH_MAX) for knob in LENGTHS[length].knobs)
    longest = config.length_max if bounded else 5
    assert longest is not None
    random = np.random.default_rng(0)
    asked = play(session.length_controller, session, random.integers(0, 40, 200).tolist())
    assert min(asked) >= (config.length_min or 0)
    assert max(asked) <= longest
    assert config.node_budget is not None
    assert config.node_budget >= longest


@pytest.mark.parametrize("length", sorted(LENGTHS))
def test_zero_tokens_mean_ar(length: str) -> None:
    session = new_session(method=method_of(length), length=length, num_speculative_tokens=0)
    assert set(play(session.length_controller, session, [0] * 20)) == {0}


def test_bounds_are_checked_and_named() -> None:
    with pytest.raises(InvalidArgument) as error:
        resolve(SpeculationConfig(length="bass", length_min=9, length_max=3))
    assert error.value.field == "length_min"
    with pytest.raises(InvalidArgument) as error:
        resolve(SpeculationConfig(length="fixed", length_max=3))
    assert error.value.field == "length_max"
    with pytest.raises(InvalidArgument) as error:
        resolve(SpeculationConfig(length="goodput", stop_threshold=0.3))
    assert error.value.field == "stop_threshold"


def test_trees_keep_their_nodes_at_any_depth() -> None:
    session = new_session(method="draft_model_tree", length="heuristic", length_max=8)
    budget = session.length_controller.budget(session, Load(1, 0))
    assert budget.nodes == session.plan.config.node_budget == 14


def test_what_sessions_share_is_bounded() -> None:
    context = LengthContext()
    first = context.shared("first", list)
    assert context.shared("first", list) is first
    for i in range(100):
        context.shared(i, list)
    assert len(context._shared) == 64
    assert context.shared("first", list) is not first


# --- goodput --------------------------------------------------------------------------------------


def linear(fixed: float, token: float, draft: float) -> object:
    """SmartSpec's cost model: a forward is linear in its tokens, a draft in its depth."""

    def seconds(depth: int, load: Load) -> float:
        return fixed + token * load.num_running * (depth + 1) + draft * depth

    return seconds


GRID = list(
    itertools.product((0.0, 0.2, 0.5, 0.8, 0.99), (1, 4, 32, 256), (0.002, 0.02), (0.01, 0.1, 0.5))
)


@pytest.mark.parametrize(("rate", "batch", "token", "draft"), GRID)
def test_best_length_is_the_brute_force_argmax(
    rate: float, batch: int, token: float, draft: float
) -> None:
    costs, load = linear(1.0, token, draft), Load(batch, 0)
    closed = [
        (1 - rate ** (k + 1)) / (1 - rate) / costs(k, load)  # type: ignore[operator]
        for k in range(13)
    ]
    chosen = best_length([rate], costs, load, 0, 12)  # type: ignore[arg-type]
    assert closed[chosen] == pytest.approx(max(closed))
    if rate == 0.0:
        assert chosen == 0


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12),
    st.lists(st.floats(0.01, 5.0), min_size=13, max_size=13),
    st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
def test_best_length_is_the_argmax_for_any_rates_and_costs(
    rates: list[float], seconds: list[float], bounds: tuple[int, int]
) -> None:
    """Rates of every depth, and costs that need not even grow with it."""
    shortest, longest = sorted(bounds)
    each = [rates[min(depth, len(rates) - 1)] for depth in range(12)]
    goodput = [sum(np.cumprod([1.0, *each[:k]])) / seconds[k] for k in range(13)]
    chosen = best_length(rates, lambda depth, _: seconds[depth], Load(1, 0), shortest, longest)
    assert shortest <= chosen <= longest
    assert goodput[chosen] >= max(goodput[shortest : longest + 1]) * (1 - 1e-8)


@pytest.mark.parametrize("rate", [0.0, 0.4, 0.7, 0.95])
def test_the_controller_picks_the_argmax_of_its_profile_and_0_at_high_load(rate: float) -> None:
    """Forwards that are linear in all tokens of the batch: the cost model of the paper."""
    batches, nodes, depths = (1, 4096), (1, 17), (1, 16)
    profile = CostProfile(
        key={},
        batches=batches,
        nodes=nodes,
        verify_seconds=tuple(tuple(1.0 + 0.02 * b * n for n in nodes) for b in batches),
        depths=depths,
        draft_seconds=tuple(tuple(0.03 * d for d in depths) for _ in batches),
        methods=("draft_model",),
    )
    session = new_session(
        LengthContext(profile=profile), length="goodput", num_speculative_tokens=16
    )
    controller, random = session.length_controller, np.random.default_rng(0)
    for _ in range(150):
        depth = controller.budget(session, Load(1, 0)).depth
        accepted = next((i for i in range(depth) if random.random() >= rate), depth)
        seconds = profile.draft(depth, 1), profile.verify(depth + 1, 1)
        controller.observe(outcome(depth, accepted), *seconds)
    rates = controller._acceptance.of(0).rates()  # type: ignore[attr-defined]
    assert rates[0] == pytest.approx(rate, abs=0.2)
    picked = []
    for batch in (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096):
        goodput = [
            sum(np.cumprod([1.0, *rates[:k]])) / (1.0 + 0.02 * batch * (k + 1) + 0.03 * k)
            for k in range(17)
        ]
        if rate > 0:  # else it may be trying whether drafts have got better
            picked.append(controller.budget(session, Load(batch, 0)).depth)
            assert picked[-1] == int(np.argmax(goodput))
        else:
            assert int(np.argmax(goodput)) == 0
    if rate > 0:
        assert picked == sorted(picked, reverse=True)
        assert picked[0] > 0
        assert picked[-1] == 0


@pytest.mark.parametrize("batch", [1, 32])
def test_what_it_learns_itself_drafts_long_alone_and_nothing_in_a_full_batch(batch: int) -> None:
    """No profile: a forward has room for 16 tokens at one price and takes more for more."""
    simulator = Simulator(lambda depth: 0.02 * depth, lambda nodes: max(1.0, nodes / 16), 0.05)
    context = LengthContext()
    sessions = [
        new_session(context, length="goodput", num_speculative_tokens=8) for _ in range(batch)
    ]
    simulator.run(sessions, [0.8] * batch, 120)
    ar = batch / max(1.0, batch / 16) / 1.05
    late = np.mean(simulator.asked[len(simulator.asked) // 2 :])
    if batch == 1:
        assert late > 5
        assert simulator.goodput > 2 * ar
    else:
        assert late < 0.2
        assert simulator.goodput > 0.95 * ar


def test_best_length_grows_with_acceptance_and_shrinks_with_the_batch() -> None:
    costs = linear(1.0, 0.02, 0.05)
    by_rate = [
        best_length([rate], costs, Load(4, 0), 0, 16)  # type: ignore[arg-type]
        for rate in np.linspace(0, 0.99, 34)
    ]
    assert by_rate == sorted(by_rate)
    assert by_rate[0] == 0 < by_rate[-1]
    by_batch = [
        best_length([0.8], costs, Load(batch, 0), 0, 16)  # type: ignore[arg-type]
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    ]
    assert by_batch == sorted(by_batch, reverse=True)
    assert by_batch[0] >= 5
    assert by_batch[-1] == 0  # the forward is full: every drafted token costs as much as a real one


@given(
    st.lists(st.integers(0, 100), min_size=2, max_size=8),
    st.lists(st.integers(1, 300), min_size=13, max_size=13),
)
def test_best_length_never_shrinks_when_acceptance_grows(
    percents: list[int], costs: list[int]
) -> None:
    """Whatever a draft of each depth costs."""
    chosen = [
        best_length([percent / 100], lambda depth, _: float(costs[depth]), Load(1, 0), 0, 12)
        for percent in sorted(percents)
    ]
    assert chosen == sorted(chosen)


@given(
    st.integers(0, 99),
    st.tuples(st.integers(1, 100), st.integers(0, 100)).map(sorted),
    st.integers(1, 50),
)
def test_best_length_never_grows_with_the_batch(
    percent: int, draft_and_forward: list[int], token: int
) -> None:
    """Where a forward's fixed cost is at least that of drafting a token; 0 in the end."""
    draft, fixed = draft_and_forward
    costs = linear(float(fixed), token / 100, float(draft))
    chosen = [
        best_length([percent / 100], costs, Load(batch, 0), 0, 12)  # type: ignore[arg-type]
        for batch in (1, 2, 3, 5, 8, 13, 32, 100, 1000, 100_000_000)
    ]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[-1] == 0


def test_expected_tokens_follow_the_rates_of_each_depth() -> None:
    assert expected_tokens([0.5], 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert expected_tokens([0.9, 0.1], 3) == pytest.approx(1 + 0.9 + 0.09 + 0.009)
    assert expected_tokens([0.9], 0) == 1.0


def test_acceptance_is_counted_at_the_depths_that_were_reached() -> None:
    acceptance = AcceptanceEstimate(4, lambda: 0.5)
    for _ in range(60):
        acceptance.observe(4, 2)
    rates = acceptance.rates()
    assert min(rates[:2]) > 0.9
    assert rates[2] < 0.15
    assert 0.2 < rates[3] < 0.9  # never reached: near the mean


def test_a_line_finds_slope_and_forgives_a_disturbance() -> None:
    line = Line()
    for depth in (1, 4, 2, 6, 3):
        line.add(depth, 0.5 + 0.25 * depth)
    assert line.at(10) == pytest.approx(3.0, rel=1e-6)
    line.add(3, 100.0)
    assert line.at(3) < 2 * 1.25
    disturbed = Line()
    disturbed.add(1, 50.0)  # the drafter read its prompt
    disturbed.add(1, 1.0)
    assert disturbed.at(1) < 6.0


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("draft", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_bad_drafter_soon_costs_nothing(batch: int, draft: float, noise: float) -> None:
    """Never right, at several prices: 95 % of AR's pace over the first 160 tokens of an engine."""
    ratios = []
    for seed in range(3):
        simulator = Simulator(
            lambda depth: draft * depth, lambda nodes: 0.9 + 0.1 * nodes, noise, seed
        )
        context = LengthContext()
        sessions = [
            new_session(context, length="goodput", num_speculative_tokens=8) for _ in range(batch)
        ]
        simulator.run(sessions, [0.02] * batch, 160)
        ar = batch / simulator.verify(batch) / (1 + noise)
        ratios.append(simulator.goodput / ar)
    assert np.mean(ratios) > 0.95


@pytest.mark.parametrize(("rate", "draft"), [(0.95, 0.02), (0.8, 0.1), (0.6, 0.05), (0.8, 1.0)])
def test_goodput_comes_near_the_best_fixed_length(rate: float, draft: float) -> None:
    simulator = Simulator(lambda depth: draft * depth, lambda nodes: 0.9 + 0.1 * nodes, 0.1)
    session = new_session(length="goodput", num_speculative_tokens=10)
    simulator.run([session], [rate], 400)
    _, best = simulator.best_goodput(rate, 1, 10)
    assert simulator.goodput > 0.88 * best / 1.1
    assert simulator.goodput > 0.95 / 1.1  # AR's


@pytest.mark.parametrize("length", ["goodput", None])
def test_a_way_to_the_drafter_that_was_not_measured_makes_no_draft_short(
    length: str | None,
) -> None:
    """Every draft takes 0.8 longer than measured, whatever its depth. A controller that takes it
    for a slow drafter, each of whose tokens is dear, drafts one token and never learns better."""
    profile = CostProfile(
        key={},
        batches=(1,),
        nodes=(1, 17),
        verify_seconds=((0.6, 1.4),),
        depths=(1, 4),
        draft_seconds=((0.08, 0.32),),
        methods=("draft_model",),
    )
    simulator = Simulator(
        lambda depth: profile.draft(depth, 1) + 0.8, lambda nodes: profile.verify(nodes, 1), 0.1
    )
    session = new_session(LengthContext(profile=profile), length=length, num_speculative_tokens=8)
    simulator.run([session], [0.9], 100)
    depth, best = simulator.best_goodput(0.9, 1, 8)
    assert depth == 8
    assert simulator.goodput > 0.9 * best / 1.1


def test_goodput_drafts_again_when_the_drafter_gets_better() -> None:
    simulator = Simulator(lambda depth: 0.1 * depth, lambda nodes: 0.9 + 0.1 * nodes)
    session = new_session(length="goodput", num_speculative_tokens=8)
    simulator.run([session], [0.0], 120)
    assert np.mean(simulator.asked[60:]) < 0.4
    simulator.asked.clear()
    simulator.run([session], [0.95], 400)
    assert np.mean(simulator.asked[-100:]) > 4


def test_later_sessions_begin_with_what_earlier_ones_learnt() -> None:
    simulator = Simulator(lambda depth: 0.1 * depth, lambda nodes: 0.9 + 0.1 * nodes)
    context = LengthContext()
    first = new_session(context, length="goodput", num_speculative_tokens=8)
    simulator.run([first], [0.0], 100)
    simulator.asked.clear()
    simulator.run([new_session(context, length="goodput", num_speculative_tokens=8)], [0.0], 8)
    assert simulator.asked == [0] * 8


# --- heuristic, BASS, ADL -------------------------------------------------------------------------


def test_heuristic_adds_two_or_takes_one() -> None:
    session = new_session(length="heuristic", num_speculative_tokens=5, length_max=8)
    asked = play(session.length_controller, session, [40, 40, 40, 0, 3, 0, 0, 0, 0, 0, 0, 0])
    assert asked == [5, 7, 8, 8, 7, 6, 5, 4, 3, 2, 1, 1]


def test_bass_grows_iff_a_session_accepted_everything() -> None:
    bounds = LengthBounds(start=6, shortest=1, longest=32, nodes=32)
    random = np.random.default_rng(3)
    batch = BatchLength(bounds)
    length = batch.length_for(Load(4, 0))
    assert length == 7
    for _ in range(500):
        accepted = [min(length, int(x)) for x in random.geometric(0.15, 4)]
        for count in accepted:
            batch.observe(count)
        following = batch.length_for(Load(4, 0))
        if max(accepted) == length:
            assert following == min(32, length + 2)
        else:
            assert max(accepted) <= following < length or following == max(1, max(accepted))
        assert 1 <= following <= 32
        length = following


def test_bass_shrinks_by_a_tenth_and_one_more_when_it_goes_on() -> None:
    batch = BatchLength(LengthBounds(start=6, shortest=1, longest=32, nodes=32))
    batch.depth = 25
    lengths = []
    for _ in range(4):
        batch.length_for(Load(1, 0))
        batch.observe(0)
        lengths.append(batch.length_for(Load(1, 0)))
    assert lengths == [22, 18, 15, 12]


def test_bass_is_one_length_for_the_sessions_of_an_engine() -> None:
    context = LengthContext()
    sessions = [new_session(context, length="bass") for _ in range(3)]
    for lucky in (0, 1, 2):
        load = Load(3, 0)
        depths = {s.length_controller.budget(s, load).depth for s in sessions}
        assert len(depths) == 1
        (depth,) = depths
        for i, session in enumerate(sessions):
            accepted = depth if i == lucky else 0
            session.length_controller.observe(outcome(depth, accepted), 0.0, 0.0)
    assert sessions[0].length_controller.budget(sessions[0], Load(3, 0)).depth == 13


def test_adl_follows_acceptance() -> None:
    session = new_session(length="adl", num_speculative_tokens=8)
    low = play(session.length_controller, session, [1] * 20)
    assert low[-1] <= 3
    high = play(session.length_controller, session, [40] * 20)
    assert high[-1] == 30
    back = play(session.length_controller, session, [4] * 20)
    assert 4 <= back[-1] <= 6


@given(
    st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted),
    st.lists(st.integers(0, 20), max_size=20),
    st.integers(0, 25),
)
def test_adl_stays_within_its_bounds_and_settles_just_above_what_is_accepted(
    bounds: list[int], before: list[int], accepted: int
) -> None:
    """Whatever happened before: with ``accepted`` tokens a round it drafts one or two more."""
    shortest, longest = bounds
    session = new_session(
        length="adl", length_min=shortest, length_max=longest, num_speculative_tokens=longest
    )
    asked = play(session.length_controller, session, [*before, *[accepted] * 40])
    assert all(shortest <= depth <= longest for depth in asked)
    if longest:
        settled = {min(longest, max(shortest, accepted + more)) for more in (1, 2)}
        assert set(asked[-3:]) <= settled


# --- stop rules -----------------------------------------------------------------------------------


def test_specdecpp_bounds() -> None:
    chances = [0.9] * 20
    assert stops_at(rejection_stop(2, 0.0), chances) == 2
    assert stops_at(rejection_stop(2, 1.0), chances) == 20


def test_specdecpp_drafts_longer_with_a_higher_threshold() -> None:
    random = np.random.default_rng(1)
    drafts = random.beta(8, 1, (50, 20)).tolist()
    means = [
        np.mean([stops_at(rejection_stop(1, h), chances) for chances in drafts])
        for h in np.linspace(0, 1, 11)
    ]
    assert means == sorted(means)
    assert means[0] == 1
    assert means[-1] == 20


@pytest.mark.parametrize("cost", [0.05, 0.2])
@pytest.mark.parametrize("chance", [0.7, 0.9])
def test_value_iteration_gives_specdecpps_threshold(cost: float, chance: float) -> None:
    """Tokens of constant chance: the state is the probability that all were accepted so far.

    Going on with a token costs ``cost`` and gains one with probability ``state * chance``; what
    is wrong already cannot be mended. Solved backwards, the best policy stops from some state on,
    and the same states stop SpecDec++ at the matching threshold.
    """
    states = [chance**n for n in range(40)]
    value = [0.0] * 41
    for n in range(39, -1, -1):
        value[n] = max(0.0, states[n] * chance - cost + value[n + 1])
    goes_on = [states[n] * chance - cost + value[n + 1] > 0 for n in range(40)]
    length = goes_on.index(False)
    assert not any(goes_on[length:])  # a threshold policy
    threshold = 1 - (cost / chance)  # stop when the next token's gain is below its cost
    assert stops_at(rejection_stop(0, threshold - 1e-9), [chance] * 40) == length


@pytest.mark.parametrize("cost", [0.09, 0.3, 0.55])
@pytest.mark.parametrize("weights", [(0.0, 0.7, 0.3), (0.3, 0.4, 0.0, 0.3), (0.1, 0.0, 0.9)])
def test_value_iteration_on_random_chances_gives_specdecpps_threshold(
    weights: Sequence[float], cost: float
) -> None:
    """Each token's chance is ``0.8 ** k`` with the probability ``weights[k]``.

    The state is the exponent of the probability that all tokens so far are accepted. A token costs
    ``cost``, and gains one if it and all before it are accepted. What value iteration finds is a
    threshold on the state, and SpecDec++ with that threshold draws the same line through every
    sequence of chances.
    """
    chances, states = [0.8**k for k in range(len(weights))], 50
    reach = 0.8 ** np.arange(states + len(weights))
    value, gain = np.zeros(len(reach)), np.zeros(states)
    for _ in range(2000):
        gain = np.array([weights @ (reach[n:][: len(weights)] + value[n:][: len(weights)])
                         for n in range(states)]) - cost  # fmt: skip
        following = np.concatenate([np.maximum(gain, 0.0), np.zeros(len(weights))])
        if np.array_equal(following, value):
            break
        value = following
    goes_on = gain > 0
    first_stop = int(np.argmin(goes_on))
    assert not goes_on[first_stop:].any()  # a threshold policy
    mean = float(np.dot(weights, chances))
    threshold = 1 - cost / mean  # stop where the next token's expected gain is below its cost
    assert abs(reach[:states] * mean - cost).min() > 1e-6  # no ties
    for exponents in itertools.product(range(len(weights)), repeat=6):
        if all(weights[k] for k in exponents):
            best = next((i for i, n in enumerate(np.cumsum(exponents), 1) if not goes_on[n]), 6)
            rule = rejection_stop(0, threshold)
            assert stops_at(rule, [chances[k] for k in exponents]) == best


@pytest.mark.parametrize("draft_cost", [0.05, 0.15, 0.3])
def test_with_a_perfect_head_nothing_has_more_tokens_per_cost(draft_cost: float) -> None:
    """All drafts of six tokens whose chances are 0.85 or 0.5, the head knowing which.

    With its best threshold SpecDec++ has as many tokens per cost as any fixed length, and no other
    way of stopping has more: with that price on the costs, backward induction gains nothing.
    """
    law, verify_cost, longest = {0.85: 0.6, 0.5: 0.4}, 1.0, 6
    drafts = list(itertools.product(law, repeat=longest))
    weights = [float(np.prod([law[chance] for chance in draft])) for draft in drafts]

    def tokens_per_cost(lengths: Sequence[int]) -> float:
        tokens = cost = 0.0
        for weight, draft, length in zip(weights, drafts, lengths, strict=True):
            tokens += weight * (1.0 + sum(np.cumprod(draft[:length])))
            cost += weight * (verify_cost + draft_cost * length)
        return tokens / cost

    powers = ((a, b) for a in range(longest + 1) for b in range(longest + 1 - a))
    best = max(
        tokens_per_cost([stops_at(rejection_stop(1, threshold), list(d)) for d in drafts])
        for threshold in (1 - 0.85**a * 0.5**b + 1e-6 for a, b in powers)
    )
    fixed = max(tokens_per_cost([length] * len(drafts)) for length in range(1, longest + 1))
    assert best >= fixed

    def one_more(reach: float, left: int) -> float:
        """What going on with a token gains, when all so far are accepted with chance ``reach``."""
        gain = -best * draft_cost
        for chance, weight in law.items():
            after = reach * chance
            gain += weight * (after + (max(0.0, one_more(after, left - 1)) if left > 1 else 0.0))
        return gain

    assert 1.0 - best * verify_cost + one_more(1.0, longest) == pytest.approx(0.0, abs=1e-9)


def test_an_oracle_wastes_nothing() -> None:
    """Told the truth, classifier and head end every draft with its first wrong token at the latest,
    and never before it."""
    random = np.random.default_rng(2)
    weights = {"weight": np.array([100.0, 0, 0], np.float32), "bias": np.array([-60.0], np.float32)}
    for _ in range(50):
        hits = (random.random(12) < 0.8).astype(float)
        chances = [0.999 if hit else 0.501 for hit in hits]
        first_wrong = int(np.argmin(hits)) + 1 if not hits.all() else 12
        assert stops_at(ClassifierStop(1, 0.999, weights), chances) == first_wrong
        head = rejection_stop(1, 0.5)
        assert stops_at(head, [float(hit) for hit in hits]) == first_wrong


def test_threshold_zero_is_the_longest_draft() -> None:
    weights = {"weight": np.array([3.0, -1, 0.2], np.float32), "bias": np.zeros(1, np.float32)}
    assert stops_at(ClassifierStop(1, 0.0, weights), [0.5] * 15) == 15
    session = new_session(length="confidence", stop_threshold=0.0)
    rule = session.length_controller.stop_rule
    assert rule is not None
    assert stops_at(rule, [0.5] * 15) == 15


def test_confidence_stops_after_the_first_doubt() -> None:
    rule = new_session(length="confidence").length_controller.stop_rule
    assert rule is not None
    flat = np.zeros(10, np.float32)
    sure = np.array([9.0, *[0.0] * 9], np.float32)
    assert not rule.stop_after(DraftStep(1, 0, sure))
    assert rule.stop_after(DraftStep(2, 0, flat))


def test_disco_reads_entropy_also_where_tokens_are_impossible() -> None:
    step = DraftStep(3, 0, np.array([0.0, 0.0, -np.inf], np.float32))
    assert features(step) == pytest.approx([0.5, np.log(2), np.log(3)])


# --- trained weights ------------------------------------------------------------------------------


def test_weights_of_another_pair_are_refused(tmp_path: Path) -> None:
    for kind in ("specdecpp", "disco", "ldlp"):
        with pytest.raises(InvalidArgument, match="length-head"):
            new_session(LengthContext(heads=tmp_path), length=kind)
        with pytest.raises(InvalidArgument, match="vocab_size"):
            new_session(LengthContext(vocab_size=99), length=kind)
        with pytest.raises(InvalidArgument, match="target_hidden_size"):
            new_session(LengthContext(vocab_size=4096, target_hidden_size=7), length=kind)
    (tmp_path / "disco.safetensors").write_bytes(b"no weights")
    with pytest.raises(InvalidArgument, match="damaged"):
        new_session(LengthContext(heads=tmp_path), length="disco")


def save_length_head(
    folder: Path, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], hidden_size: int
) -> LengthContext:
    """A length predictor of these weights and biases, over a hidden state and nothing else."""
    first = layers[0][0].shape[1]
    weights = {"embedding": torch.zeros(4096, first - hidden_size)}
    for i, (weight, bias) in enumerate(layers):
        weights |= {f"layers.{i}.weight": weight, f"layers.{i}.bias": bias}
    sizes = dict.fromkeys(("target_hidden_size", "drafter_hidden_size"), str(hidden_size))
    metadata = {"kind": "ldlp", "vocab_size": "4096", **sizes}
    save_file(weights, str(folder / "ldlp.safetensors"), metadata)
    return LengthContext(heads=folder, vocab_size=4096)


def constant_length_head(folder: Path, length: float) -> LengthContext:
    """A predictor for the demo pair that says the same whatever it sees."""
    return save_length_head(
        folder,
        [
            (torch.zeros(outer, inner), torch.full((outer,), length))
            for inner, outer in itertools.pairwise((168, 64, 32, 1))
        ],
        160,
    )


def test_a_constant_length_head_is_a_fixed_length(tmp_path: Path) -> None:
    context = constant_length_head(tmp_path, 6.0)
    session = new_session(context, length="ldlp", num_speculative_tokens=6)
    for accepted in (0, 3, 6, 1):
        depth = session.length_controller.budget(session, Load(1, 0)).depth
        assert depth == 6
        states = {Need.HIDDEN_STATES: torch.randn(depth + 1, 160)}
        seen = replace(outcome(depth, accepted), verification=Verification(torch.empty(0), states))
        session.length_controller.observe(seen, 0.0, 0.0)


def test_an_oracle_of_lengths_wastes_no_draft(tmp_path: Path) -> None:
    """The hidden state after the last accepted token holds how many the drafter will get right.

    Nothing that is drafted is rejected then, and no round accepts less than the longest draft
    would have had; the states of other nodes, which hold nonsense, are not looked at.
    """
    one = torch.ones(1, 1)
    layers = [(torch.tensor([[1.0, 0.0]]), torch.zeros(1)), *[(one, torch.zeros(1))] * 2]
    context = save_length_head(tmp_path, [(w.clone(), b.clone()) for w, b in layers], 1)
    session = new_session(
        context, length="ldlp", length_min=0, length_max=10, num_speculative_tokens=5
    )
    controller, right = session.length_controller, [5]
    right += np.random.default_rng(0).integers(0, 11, 60).tolist()
    for now, following in itertools.pairwise(right):
        depth = controller.budget(session, Load(1, 0)).depth
        accepted = min(now, depth)
        assert depth == accepted == now
        states = torch.full((depth + 1, 1), 77.0)
        states[accepted] = following
        seen = replace(
            outcome(depth, accepted),
            verification=Verification(torch.empty(0), {Need.HIDDEN_STATES: states}),
        )
        controller.observe(seen, 0.0, 0.0)


# --- on the demo pair -----------------------------------------------------------------------------

SAMPLING = {
    "greedy": SamplingParams(max_tokens=30, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.9, seed=4),
}


def engine_of(demo: Engine, context: LengthContext | None = None) -> Engine:
    return Engine(ModelTarget(demo.target.runner), demo.drafters, length_context=context)


def rounds_of(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, **knobs: Any
) -> tuple[list[int], list[list[int]]]:
    """The output, and the draft of every round."""
    events: list[RoundEvent] = []
    config = SpeculationConfig.model_validate(knobs)
    session = engine.submit(Request(prompt, params, config), on_event=events.append)
    while engine.has_work:
        engine.step()
    assert session.error is None
    assert not session.stats.drafter_lost
    drafts = [event.outcome.draft.token_ids.tolist() for event in events if event.outcome]
    return session.output_ids, drafts


@pytest.fixture(scope="module")
def prompts(demo: Engine) -> list[list[int]]:
    assert demo.tokenizer is not None
    return code_prompts(demo.tokenizer, 3, seed=5)


@pytest.mark.one_of(2, slow=3)
@pytest.mark.parametrize("variant", SAMPLING)
@pytest.mark.parametrize("length", sorted(LENGTHS))
def test_the_tokens_are_those_of_ar_with_every_controller(
    length: str, variant: str, demo: Engine, prompts: list[list[int]]
) -> None:
    """Three sessions at once, whose drafts are as long as the controller finds right."""
    params, engine = SAMPLING[variant], engine_of(demo)
    ar = engine.generate(prompts, params, SpeculationConfig(method="ar"))
    config = SpeculationConfig(method=method_of(length), length=length, num_speculative_tokens=4)
    for session, expected in zip(engine.generate(prompts, params, config), ar, strict=True):
        assert session.output_ids == expected.output_ids
        assert not session.stats.drafter_lost
        # These may find that drafts do not pay here.
        assert session.stats.num_drafted > 0 or length in ("goodput", "auto")


@pytest.mark.parametrize("variant", SAMPLING)
@pytest.mark.parametrize(
    ("length", "threshold", "drafted"),
    [
        ("specdecpp", 0.0, 2),
        ("specdecpp", 1.0, 7),
        ("disco", 0.0, 7),
        ("disco", 1.0, 2),
        ("confidence", 0.0, 7),
    ],
)
def test_the_ends_of_the_thresholds_are_the_shortest_and_the_longest_draft(
    length: str,
    threshold: float,
    drafted: int,
    variant: str,
    demo: Engine,
    prompts: list[list[int]],
) -> None:
    """With the trained heads and real drafts; the last rounds have less left to draft."""
    knobs = {"length": length, "stop_threshold": threshold, "length_min": 2, "length_max": 7}
    output, drafts = rounds_of(engine_of(demo), prompts[0], SAMPLING[variant], **knobs)
    assert len(output) == 30
    assert {len(draft) for draft in drafts[:-4]} == {drafted}
    assert max(map(len, drafts)) == drafted


@pytest.mark.parametrize("variant", SAMPLING)
def test_a_constant_predictor_has_the_rounds_of_the_fixed_length(
    variant: str, demo: Engine, prompts: list[list[int]], tmp_path: Path
) -> None:
    context = constant_length_head(tmp_path, 4.0)
    for prompt in prompts:
        predicted = rounds_of(
            engine_of(demo, context), prompt, SAMPLING[variant],
            length="ldlp", num_speculative_tokens=4,
        )  # fmt: skip
        fixed = rounds_of(
            engine_of(demo), prompt, SAMPLING[variant], length="fixed", num_speculative_tokens=4
        )
        assert predicted == fixed


@pytest.mark.parametrize("variant", SAMPLING)
def test_the_draft_model_runs_as_many_forwards_as_were_predicted(
    variant: str, demo: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the trained predictor, round by round; none where it predicts none."""
    drafter = demo.drafters["draft_model"]
    assert isinstance(drafter, DraftModel)
    runner, forwards = drafter.runner, 0
    forward, greedy_chain = runner.forward, runner.greedy_chain  # type: ignore[attr-defined]

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return forward(*arguments, **options)

    def counted_chain(
        sequences: Any, tokens: Any, num_steps: int, *more: Any, **options: Any
    ) -> Any:
        nonlocal forwards
        forwards += num_steps  # as many forwards in one call
        return greedy_chain(sequences, tokens, num_steps, *more, **options)

    monkeypatch.setattr(runner, "forward", counted)
    monkeypatch.setattr(runner, "greedy_chain", counted_chain)
    engine, params = engine_of(demo), replace(SAMPLING[variant], max_tokens=60)
    lengths = set()
    for prompt in prompts:
        config = SpeculationConfig(length="ldlp", length_min=0, length_max=12)
        session = engine.submit(Request(prompt, params, config))
        engine.step(0)
        while engine.has_work:
            predicted = session.length_controller.budget(session, Load(1, 0)).depth
            predicted, forwards = min(predicted, session.remaining - 1), 0
            drafted, rounds = session.stats.num_drafted, session.stats.num_rounds
            engine.step()
            if session.stats.num_rounds > rounds:
                assert forwards == predicted == session.stats.num_drafted - drafted
                lengths.add(predicted)
    assert len(lengths) > 4
