"""Length controllers: what each paper says that it does, without models."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from paceline.config import SpeculationConfig
from paceline.errors import InvalidArgument
from paceline.lengths.base import DraftStep, LengthBounds, LengthContext, StopRule
from paceline.lengths.bass import BatchLength
from paceline.lengths.disco import ClassifierStop, features
from paceline.lengths.goodput import Acceptance, Line, best_length, expected_tokens
from paceline.lengths.specdecpp import RejectionStop
from paceline.methods import LENGTH_KNOBS, LENGTHS
from paceline.plan import resolve
from paceline.types import Load, Need, Verification
from tests.core.lengths_sim import Simulator, new_session, outcome, play


def stops_at(rule: StopRule, chances: list[float]) -> int:
    """Length of a draft whose tokens the drafter gives these probabilities."""
    for depth, chance in enumerate(chances, 1):
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


@pytest.mark.parametrize("length", sorted(LENGTHS))
def test_every_controller_stays_within_its_bounds(length: str) -> None:
    session = new_session(length=length, num_speculative_tokens=5)
    config = session.plan.config
    longest = config.length_max if "length_max" in LENGTH_KNOBS[length] else 5
    assert longest is not None
    random = np.random.default_rng(0)
    asked = play(session.length_controller, session, random.integers(0, 40, 200).tolist())
    assert min(asked) >= (config.length_min or 0)
    assert max(asked) <= longest
    assert config.node_budget is not None
    assert config.node_budget >= longest


@pytest.mark.parametrize("length", sorted(LENGTHS))
def test_zero_tokens_mean_ar(length: str) -> None:
    session = new_session(length=length, num_speculative_tokens=0)
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


def test_expected_tokens_follow_the_rates_of_each_depth() -> None:
    assert expected_tokens([0.5], 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert expected_tokens([0.9, 0.1], 3) == pytest.approx(1 + 0.9 + 0.09 + 0.009)
    assert expected_tokens([0.9], 0) == 1.0


def test_acceptance_is_counted_at_the_depths_that_were_reached() -> None:
    acceptance = Acceptance(4, lambda: 0.5)
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


def test_bass_grows_iff_somebody_accepted_everything() -> None:
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


def test_a_constant_length_head_is_a_fixed_length(tmp_path: Path) -> None:
    sizes = (168, 64, 32, 1)
    weights = {"embedding": torch.zeros(4096, 8)}
    for i, (inner, outer) in enumerate(itertools.pairwise(sizes)):
        weights[f"layers.{i}.weight"] = torch.zeros(outer, inner)
        weights[f"layers.{i}.bias"] = torch.full((outer,), 6.0)
    sizes_of_pair = dict.fromkeys(("target_hidden_size", "drafter_hidden_size"), "160")
    metadata = {"kind": "ldlp", "vocab_size": "4096", **sizes_of_pair}
    save_file(weights, str(tmp_path / "ldlp.safetensors"), metadata)
    context = LengthContext(heads=tmp_path, vocab_size=4096)
    session = new_session(context, length="ldlp", num_speculative_tokens=6)
    for accepted in (0, 3, 6, 1):
        depth = session.length_controller.budget(session, Load(1, 0)).depth
        assert depth == 6
        states = {Need.HIDDEN_STATES: torch.randn(depth + 1, 160)}
        seen = replace(outcome(depth, accepted), verification=Verification(torch.empty(0), states))
        session.length_controller.observe(seen, 0.0, 0.0)
