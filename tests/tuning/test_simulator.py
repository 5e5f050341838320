"""The simulator's rounds are those of the real engine; its seconds are what the costs say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.loading import load_engine
from paceline.methods import METHODS
from paceline.plan import resolve
from paceline.profile import CostProfile
from paceline.sampling import SamplingParams
from paceline.shapes.sequoia import FIRST_RATES, RANK_ACCEPTANCE
from paceline.tuning.costs import MeasuredCosts, SimulatedRound
from paceline.tuning.families import parts_of, why_not
from paceline.tuning.recordings import RankRecording, Truth
from paceline.tuning.results import Point
from paceline.tuning.simulator import Rounds, Simulator
from paceline.tuning.traces import Traces, record
from tests.core.engines import small_engine
from tests.core.prompts import code_prompts
from tests.modelzoo import make_model

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=5)


def fixed(method: str, **knobs: Any) -> SpeculationConfig:
    """A configuration with a constant length."""
    return SpeculationConfig(method=method, length="fixed", **knobs)


def tree(shape: str, depth: int, nodes: int, method: str = "draft_model", **knobs: Any) -> Any:
    return fixed(method, shape=shape, num_speculative_tokens=depth, node_budget=nodes, **knobs)


# Of each competing shape two sizes, so that one is cut out of the other's recording.
EXACT = [
    *(fixed("draft_model", num_speculative_tokens=depth) for depth in range(1, 9)),
    tree("kary", 4, 14, branching=2),
    tree("template", 4, 63, template="medusa_63"),
    tree("template", 5, 20, template="token_recycling_80"),
    tree("sequoia", 6, 24, rank_acceptance=FIRST_RATES),
    tree("confidence", 5, 8, branching=3),
    tree("confidence", 3, 20, branching=3),
    tree("dyspec", 6, 10, branching=4),
    tree("dyspec", 6, 24, branching=4),
    tree("rsd_s", 4, 12, branching=3),
    tree("rsd_s", 3, 5, branching=3),
    *(
        fixed("layer_skip", exit_layer=layer, num_speculative_tokens=depth)
        for layer in (5, 12)
        for depth in (1, 4)
    ),
    tree("kary", 3, 10, "layer_skip", exit_layer=5, branching=2),
    *(fixed("eagle", num_speculative_tokens=depth) for depth in (1, 3, 7)),
    tree("sequoia", 4, 12, "eagle", rank_acceptance=FIRST_RATES),
    *(fixed("prompt_lookup", num_speculative_tokens=depth) for depth in (2, 10)),
    *(fixed("suffix_decoding", num_speculative_tokens=depth) for depth in (3, 24)),
    fixed("suffix_decoding_hybrid"),
    tree("confidence", 8, 12, "copyspec_draft_model", branching=3),
    fixed("staged"),
    fixed("s2d"),
    fixed("combined"),
]
# Temperature changes how candidates are chosen, not how they are looked at.
EXACT_SAMPLED = [
    *(fixed("draft_model", num_speculative_tokens=depth) for depth in (1, 5)),
    tree("kary", 4, 14, branching=2),
    tree("rsd_c", 3, 20, branching_vector=(3, 2, 1)),
    tree("confidence", 5, 8, branching=3),
    tree("dyspec", 6, 10, branching=4),
    fixed("layer_skip", exit_layer=5, num_speculative_tokens=3),
    fixed("eagle", num_speculative_tokens=4),
    fixed("prompt_lookup"),
]


def name_of(config: SpeculationConfig) -> str:
    return Point(speculation=config).label


@pytest.fixture(scope="module")
def demo() -> Engine:
    return load_engine()


@pytest.fixture(scope="module")
def prompts(demo: Engine) -> list[list[int]]:
    assert demo.tokenizer is not None
    return code_prompts(demo.tokenizer, 3, seed=2)


@pytest.fixture(scope="module")
def traces(demo: Engine, prompts: list[list[int]]) -> Traces:
    return record(demo, EXACT, prompts, GREEDY, key={})


@pytest.fixture(scope="module")
def sampled(demo: Engine, prompts: list[list[int]]) -> Traces:
    return record(demo, EXACT_SAMPLED, prompts, SAMPLED, key={})


def assert_same(
    rounds: Rounds | None,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    config: SpeculationConfig,
) -> None:
    """That an engine has these rounds, prompt by prompt."""
    assert rounds is not None
    sibling = engine.sibling()
    for number, prompt in enumerate(prompts):
        stats = sibling.generate([prompt], params, config)[0].stats
        mine = rounds.prompts == number
        assert int(mine.sum()) == stats.num_rounds
        assert int(rounds.accepted[mine].sum()) == stats.num_accepted
        assert int(rounds.nodes[mine].sum()) == stats.num_draft_nodes
        depths = np.arange(len(stats.accepted_by_depth))[:, None]
        by_depth = (rounds.accepted[mine] > depths).sum(axis=1)
        assert by_depth.tolist() == stats.accepted_by_depth
        assert not stats.drafter_lost


@pytest.mark.one_of(3, slow=3)
@pytest.mark.parametrize("config", EXACT, ids=name_of)
def test_rounds_are_those_of_the_engine(
    demo: Engine, prompts: list[list[int]], traces: Traces, config: SpeculationConfig
) -> None:
    assert_same(Simulator(traces).rounds(config), demo, prompts, GREEDY, config)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("config", EXACT_SAMPLED, ids=name_of)
def test_rounds_are_those_of_the_engine_with_coupled_sampling(
    demo: Engine, prompts: list[list[int]], sampled: Traces, config: SpeculationConfig
) -> None:
    assert_same(Simulator(sampled).rounds(config), demo, prompts, SAMPLED, config)


def test_a_recording_serves_configurations_that_were_not_named(
    demo: Engine, prompts: list[list[int]], traces: Traces
) -> None:
    """Any static shape and depth of a drafter, also with rules that are exact at temperature 0."""
    simulator = Simulator(traces)
    for config in (
        fixed("draft_model", num_speculative_tokens=20),
        tree("rsd_c", 4, 30, branching_vector=(3, 2, 2, 1)),
        fixed("speculative_sampling", num_speculative_tokens=5),
        fixed("spectr", num_speculative_tokens=3),
        tree("kary", 2, 6, "layer_skip", exit_layer=12, branching=2),
    ):
        assert_same(simulator.rounds(config), demo, prompts, GREEDY, config)


# --- every row, stop conditions, narrow contexts --------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A random model with room for 96 tokens, and an untrained head of each kind."""
    folder = make_model(
        "llama_gqa", tmp_path_factory.mktemp("zoo"), num_hidden_layers=2, max_position_embeddings=96
    )
    return small_engine(folder).engine


@pytest.mark.one_of(3, slow=3)
@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.lossless])
def test_every_method_is_simulated_exactly_or_says_why_not(small: Engine, method: str) -> None:
    # Method `auto` has no other length.
    config = SpeculationConfig(method="auto") if method == "auto" else fixed(method)
    if resolve(config).measures_ranks:  # else its tree follows what the engine counts
        config = config.model_copy(update={RANK_ACCEPTANCE.name: FIRST_RATES})
    prompts = [list(range(40, 40 + length)) * 2 for length in (6, 17)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    simulator = Simulator(record(small, [config], prompts, params, key={}))
    reason = why_not(resolve(config), params)
    learns = {
        "token_recycling", "sam_token_recycling", "stand", "aded", "lookahead", "jacobi",
        "gauss_seidel", "hybrid_jacobi", "ppd", "hidden_transfer", "longspec", "omnidraft",
    }  # fmt: skip
    expected = {
        **dict.fromkeys(learns, "what it drafts depends on what was drafted before"),
        "auto": "controller 'auto' chooses lengths from what it sees",
        **dict.fromkeys(
            ("copy_relay", "forced_draft_model"),
            "what it copies behind a draft depends on where that ends",
        ),
    }
    assert reason == expected.get(method)
    if reason is None:
        assert_same(simulator.rounds(config), small, prompts, params, config)
    else:
        assert simulator.rounds(config) is None


@pytest.mark.parametrize(
    "config",
    [
        fixed("draft_model", num_speculative_tokens=8),
        tree("kary", 4, 12, branching=2),
        fixed("prompt_lookup"),
        tree("confidence", 4, 8, branching=2),
    ],
    ids=name_of,
)
def test_outputs_may_end_by_themselves_or_where_the_context_ends(
    small: Engine, config: SpeculationConfig
) -> None:
    prompts = [list(range(30, 60)), list(range(30, 110))]  # 66 and 16 tokens of room
    whole = SamplingParams(max_tokens=200, ignore_eos=True)
    outputs = [s.output_ids for s in small.sibling().generate(prompts, whole)]
    assert [len(output) for output in outputs] == [66, 16]
    stopping = replace(whole, stop_token_ids=(outputs[0][40],))
    for params in (whole, stopping):
        traces = record(small, [config], prompts, params, key={})
        assert_same(Simulator(traces).rounds(config), small, prompts, params, config)
    assert int(traces.truth.offsets[1]) < 66, "the first output ends with the stop token"


# --- seconds --------------------------------------------------------------------------------------

PROFILE = CostProfile(
    key={}, batches=(1, 2), nodes=(1, 5), verify_seconds=((1.0, 5.0), (1.5, 9.5))
)  # seconds by tokens: n for one session, 2 n - 0.5 for two


def scripted(ranks: Sequence[int], concurrency: int = 1) -> tuple[Traces, Point, MeasuredCosts]:
    """Two prompts of 10 tokens whose first candidate has these ranks; costs in whole seconds."""
    point = Point(speculation=fixed("draft_model", num_speculative_tokens=2))
    plan = resolve(point.speculation)
    (part,) = parts_of(plan)
    half = len(ranks) // 2
    truth = Truth(
        np.zeros(len(ranks), np.int64),
        np.array([0, half, len(ranks)]),
        np.array([10, 10]),
        np.array([half, len(ranks) - half]),
    )
    recording = RankRecording(np.array(ranks, np.uint8)[:, None], 1, True)
    traces = Traces({}, concurrency, GREEDY, truth, {part.family.key: recording}, {})
    costs = MeasuredCosts(
        key={},
        concurrency=concurrency,
        profile=PROFILE,
        ar=SimulatedRound(rest=1.0, prefill=0.1),
        groups={
            part.cost_group: SimulatedRound(
                draft=(0.5, 0.25, 0.0, 0.0, 0.0), verify=(0.5, 0.0), rest=2.0, prefill=0.2
            )
        },
    )
    return traces, point, costs


def test_seconds_are_those_of_the_rounds() -> None:
    # The first prompt: 0 and 1 accepted, then the target's; 3 accepted nothing; 4 is the last.
    traces, point, costs = scripted([0, 0, 9, 9, 0, 0, 0, 0, 0])
    simulator = Simulator(traces, costs)
    rounds = simulator.rounds(point.speculation)
    assert rounds is not None
    # With 4 tokens of room: 2 drafted of which 2 right, then 1 place left, which is the target's.
    assert rounds.accepted.tolist() == [2, 0, 2, 1]
    assert rounds.nodes.tolist() == [2, 0, 2, 1]
    assert rounds.mean_accepted_length == 9 / 4
    prediction = simulator.predict(point)
    assert prediction is not None
    ar = 20 * 0.1 + 9 * (1.0 + 1.0)
    drafting = 0.5 + 2 * 0.25
    own = 20 * 0.2 + 4 * (drafting + 2.0) + 0.5 * (3 + 1 + 3 + 2)
    assert prediction.goodput_ratio == pytest.approx(ar / own)
    assert prediction.mean_accepted_length == 9 / 4
    assert prediction.key == point.key


def test_sessions_that_are_decoded_together_share_a_forward() -> None:
    traces, point, costs = scripted([0, 0, 9, 9, 9, 9, 9, 9], concurrency=2)
    prediction = Simulator(traces, costs).predict(point)
    assert prediction is not None
    # The first prompt takes 2 rounds (2 and 0 nodes), the second 4 (2, 2, 1 and 0 nodes).
    ar = 20 * 0.1 + 4 * (1.5 + 1.0)
    both = [0.5 * (2 * 3 - 0.5) + 3.0, 0.5 * (2 * 2 - 0.5) + 3.0]
    alone = [0.5 * 2 + 3.0 / 1.5, 0.5 * 1 + 3.0 / 1.5]
    assert prediction.goodput_ratio == pytest.approx(ar / (20 * 0.2 + sum(both) + sum(alone)))


def test_goodput_is_taken_for_its_best_length() -> None:
    traces, point, costs = scripted([0] * 10 + [9] * 6 + [0] * 4)
    simulator = Simulator(traces, costs)

    def ratio(**knobs: Any) -> float:
        speculation = SpeculationConfig(method="draft_model", **knobs)
        prediction = simulator.predict(Point(speculation=speculation))
        assert prediction is not None
        return prediction.goodput_ratio

    constant = [ratio(length="fixed", num_speculative_tokens=depth) for depth in range(1, 9)]
    assert len(set(constant)) > 3
    assert ratio(length="goodput", num_speculative_tokens=8) == max(1.0, *constant)
    assert ratio(length="goodput", length_min=2, length_max=3) == max(constant[1:3])
    slow = costs.model_copy(
        update={"groups": {k: v.model_copy(update={"rest": 50.0}) for k, v in costs.groups.items()}}
    )
    speculation = SpeculationConfig(method="draft_model", length="goodput")
    nothing = Simulator(traces, slow).predict(Point(speculation=speculation))
    assert nothing is not None
    assert (nothing.goodput_ratio, nothing.mean_accepted_length) == (1.0, 1.0)
    assert Simulator(traces, slow).predict(point).goodput_ratio < 0.2  # type: ignore[union-attr]


def test_ar_is_the_unit() -> None:
    traces, _, costs = scripted([0] * 6)
    for config in (
        SpeculationConfig(method="ar"),
        SpeculationConfig(method="draft_model", num_speculative_tokens=0),
    ):
        prediction = Simulator(traces, costs).predict(Point(speculation=config))
        assert prediction is not None
        assert (prediction.goodput_ratio, prediction.mean_accepted_length) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"topology": "actors"}, "elsewhere"),
        ({"dtype": "bfloat16"}, "float32 target"),
        ({"speculation": fixed("token_recycling")}, "depends on what was drafted"),
        ({"speculation": fixed("layer_skip")}, "was not recorded"),
        ({"speculation": tree("kary", 2, 6, branching=2)}, "was not measured"),
        (
            {"speculation": SpeculationConfig(method="draft_model", length="heuristic")},
            "'heuristic' chooses lengths",
        ),
        (
            {"speculation": fixed("typical_acceptance", allow_lossy=True)},
            "not the target's",
        ),
        ({"speculation": fixed("d3_lossy", allow_lossy=True)}, "not the target's"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_predicted_has_a_reason(change: dict[str, Any], reason: str) -> None:
    traces, point, costs = scripted([0] * 6)
    simulator = Simulator(traces, costs)
    assert simulator.why_not(point) is None
    other = point.model_copy(update=change)
    assert reason in (simulator.why_not(other) or "")
    assert simulator.predict(other) is None
    assert [p.key for p in simulator.predict_all([point, other, point])] == [point.key] * 2


def test_rules_that_toss_coins_are_not_predicted_above_temperature_0() -> None:
    traces, _, costs = scripted([0] * 6)
    point = Point(speculation=fixed("speculative_sampling"))
    assert Simulator(traces, costs).why_not(point) is None
    warm = replace(traces, params=SAMPLED)
    assert "by chance" in (Simulator(warm, costs).why_not(point) or "")


def test_costs_for_another_concurrency_are_refused() -> None:
    traces, _, costs = scripted([0] * 6)
    with pytest.raises(InvalidArgument, match="1 sessions at a time") as error:
        Simulator(traces, costs.model_copy(update={"concurrency": 4}))
    assert error.value.field == "costs"


def test_predictions_repeat_themselves() -> None:
    traces, point, costs = scripted([0, 0, 9, 0, 0, 9, 0, 0])
    points = [
        Point(speculation=fixed("draft_model", num_speculative_tokens=depth))
        for depth in (3, 1, 2, 3)
    ]
    first = Simulator(traces, costs).predict_all(points)
    simulator = Simulator(traces, costs)
    assert simulator.predict_all(points[::-1])[::-1] == first
    assert simulator.predict_all([point])[0] == first[2]
