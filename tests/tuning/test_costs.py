"""What rounds cost: which configurations run, what is fitted to them, how it is kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.plan import resolve
from paceline.profile import CostProfile
from paceline.sampling import SamplingParams
from paceline.tuning import costs as module
from paceline.tuning.costs import (
    MeasuredCosts,
    SimulatedRound,
    Size,
    _Sample,
    draft_size,
    measure_costs,
)
from paceline.tuning.families import parts_of
from paceline.tuning.results import Point, Results
from paceline.tuning.simulator import Simulator
from paceline.tuning.traces import record
from tests.core.engines import small_engine
from tests.modelzoo import make_model

KEY = {"target": "t", "host": "h"}
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPTS = [[40, 41, 42, 43] * 4, [50, 60, 70, 50, 60], [80, 90]]
COSTS = MeasuredCosts(
    key=KEY,
    concurrency=2,
    profile=CostProfile(key=KEY, batches=(1,), nodes=(1, 2), verify_seconds=((0.1, 0.2),)),
    ar=SimulatedRound(rest=0.1, prefill=0.01),
    groups={"g": SimulatedRound(draft=(1, 2, 3, 4, 5), verify=(1, -0.1), rest=0.2, prefill=0.02)},
)


def fixed(method: str, **knobs: Any) -> SpeculationConfig:
    return SpeculationConfig(method=method, length="fixed", **knobs)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = make_model("llama_gqa", tmp_path_factory.mktemp("zoo"), num_hidden_layers=2)
    return small_engine(folder).engine


@pytest.mark.parametrize("concurrency", [1, 2])
def test_whatever_is_recorded_and_measured_is_predicted(engine: Engine, concurrency: int) -> None:
    configs = [
        fixed("draft_model", num_speculative_tokens=2),
        fixed("draft_model", num_speculative_tokens=5),
        fixed("draft_model", shape="kary", num_speculative_tokens=2),
        fixed("layer_skip", exit_layer=1, num_speculative_tokens=2),
        fixed("layer_skip", exit_layer=2, num_speculative_tokens=1),
        fixed("prompt_lookup", num_speculative_tokens=3),
        fixed("eagle2"),
        fixed("combined"),
        fixed("copyspec_draft_model"),
        SpeculationConfig(method="draft_model", length="goodput"),
        fixed("token_recycling"),  # cannot be simulated
        fixed("layer_skip", exit_layer=9),  # refused
    ]
    common: dict[str, Any] = {"key": KEY, "concurrency": concurrency}
    told: list[tuple[int, int]] = []
    costs = measure_costs(
        engine, configs, PROMPTS, PARAMS, **common, repetitions=1,
        progress=lambda done, total, what: told.append((done, total)),
    )  # fmt: skip
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] > len(configs) - 3
    simulator = Simulator(record(engine, configs, PROMPTS, PARAMS, **common), costs)
    points = [Point(speculation=config) for config in configs]
    predictions = simulator.predict_all(points)
    assert [p.point for p in predictions] == points[:-2]
    assert all(0 < prediction.goodput_ratio < math.inf for prediction in predictions)
    for group in (costs.ar, *costs.groups.values()):
        assert min(group.draft) >= 0
        assert group.rest > 0
    assert costs.ar.verify[0] > 0
    assert costs.profile.batches == tuple(range(1, concurrency + 1))
    assert not engine.sessions


def test_costs_are_those_of_the_code_that_runs() -> None:
    def group(config: SpeculationConfig) -> str:
        return parts_of(resolve(config))[0].cost_group

    chain = group(fixed("draft_model", num_speculative_tokens=3))
    assert group(fixed("draft_model", num_speculative_tokens=9)) == chain
    tree = group(fixed("draft_model", shape="kary"))
    assert tree != chain
    assert group(fixed("sequoia", node_budget=30)) == tree
    assert group(fixed("draft_model", shape="confidence")) not in (chain, tree)
    assert group(fixed("prompt_lookup", ngram_max=2)) == group(fixed("prompt_lookup", ngram_max=5))
    skip = group(fixed("layer_skip", exit_layer=3))
    assert group(fixed("layer_skip", exit_layer=8)) == skip, "a function of the exit layer"
    assert group(fixed("layer_skip")) != skip, "whatever layer that is"
    hybrid = parts_of(resolve(fixed("suffix_decoding_hybrid", shape="kary")))[0]
    assert hybrid.fallback is not None
    assert hybrid.cost_group == group(fixed("suffix_decoding"))
    assert hybrid.fallback.cost_group == tree
    assert group(fixed("d3", depth_decay=0.9)) != group(fixed("d3", depth_decay=0.8))


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (fixed("draft_model", num_speculative_tokens=3), (0, 3, 3)),
        (fixed("draft_model", num_speculative_tokens=3, node_budget=2), (0, 2, 2)),
        # 2 + 4 + 4 of 8 nodes: the root and the first two levels are expanded.
        (fixed("draft_model", shape="kary", num_speculative_tokens=3, node_budget=10), (0, 3, 7)),
        (
            fixed(
                "layer_skip", exit_layer=5, shape="template", template=((0,), (1,), (0, 0), (0, 2))
            ),
            (5, 2, 2),
        ),
        (fixed("draft_model", shape="rsd_c", branching_vector=(3, 1)), (0, 2, 4)),
        (fixed("draft_model", shape="confidence", num_speculative_tokens=4), (0, 4, 13)),
        (fixed("dyspec", num_speculative_tokens=6, node_budget=10), (0, 6, 10)),
        (fixed("prompt_lookup", num_speculative_tokens=7), (0, 7, 0)),
    ],
)
def test_sizes(config: SpeculationConfig, size: tuple[int, int, int]) -> None:
    assert draft_size(parts_of(resolve(config))[0]) == size


def test_few_configurations_of_a_group_run(engine: Engine) -> None:
    """Small, middle and large ones of a few exits, whatever the number of points."""
    configs = [
        fixed("layer_skip", exit_layer=layer, num_speculative_tokens=depth)
        for layer in (1, 2)
        for depth in range(1, 13)
    ]
    picks, largest = module._choose(engine, configs, PARAMS)
    assert [tuple(size) for size in next(iter(picks.values()))] == [
        (layer, depth, depth) for layer in (1, 2) for depth in (1, 7, 12)
    ]
    assert (len(picks), largest) == (1, 12)


def test_a_fit_finds_the_costs_that_it_is_shown() -> None:
    """Also for sizes that it has not seen: other depths, and exits in between."""
    truth = SimulatedRound(draft=(2e-4, 1e-4, 5e-5, 3e-5, 1e-5), verify=(1.1, -0.04), rest=3e-4,
                       prefill=2e-5)  # fmt: skip

    def sample(size: Size) -> _Sample:
        factor = truth.verify_factor(size.exit_layer)
        return _Sample(truth.drafting(size), 1.0, truth.rest, truth.prefill, factor)

    sizes = [
        Size(layer, depth, nodes) for layer in (2, 12) for depth, nodes in ((1, 1), (4, 9), (8, 20))
    ]
    found = module._fit([(size, sample(size)) for size in sizes])
    for size in (Size(7, 3, 5), Size(4, 12, 12)):
        assert found.drafting(size) == pytest.approx(truth.drafting(size), rel=1e-6)
        assert found.verify_factor(size.exit_layer) == pytest.approx(1.1 - 0.04 * size.exit_layer)
    assert (found.rest, found.prefill) == (truth.rest, truth.prefill)
    # One run alone is enough for what is like it.
    alone = module._fit([(sizes[0], sample(sizes[0]))])
    assert alone.drafting(sizes[0]) == pytest.approx(truth.drafting(sizes[0]))


def test_no_run_begins_after_the_time_is_up(engine: Engine) -> None:
    configs = [fixed("draft_model")]
    costs = measure_costs(engine, configs, PROMPTS, PARAMS, key=KEY, limit_s=1e9, repetitions=1)
    assert len(costs.groups) == 1
    with pytest.raises(InvalidArgument) as error:
        measure_costs(engine, configs, PROMPTS, PARAMS, key=KEY, limit_s=0.0)
    assert error.value.field == "limit_s"


@pytest.mark.parametrize(
    ("options", "field"),
    [({"prompts": []}, "prompts"), ({"concurrency": 0}, "concurrency"),
     ({"repetitions": 0}, "repetitions")],
)  # fmt: skip
def test_impossible_options_are_refused(
    engine: Engine, options: dict[str, Any], field: str
) -> None:
    given: dict[str, Any] = {"prompts": PROMPTS, "params": PARAMS, "key": KEY, **options}
    with pytest.raises(InvalidArgument) as error:
        measure_costs(engine, [fixed("draft_model")], **given)
    assert error.value.field == field


# --- files ----------------------------------------------------------------------------------------


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    results = Results(str(tmp_path))
    COSTS.save(results)
    assert MeasuredCosts.load(results, KEY) == COSTS


def test_foreign_or_damaged_costs_are_refused(tmp_path: Path) -> None:
    results = Results(str(tmp_path))
    with pytest.raises(InvalidArgument, match="a file of costs"):
        MeasuredCosts.load(results, KEY)
    COSTS.save(results)
    with pytest.raises(InvalidArgument, match="costs whose host is elsewhere, not h") as error:
        MeasuredCosts.load(results, {**KEY, "host": "elsewhere"})
    assert (error.value.field, error.value.value) == ("costs", f"{tmp_path}/costs.json")
    whole = json.loads(results.read("costs.json"))
    results.write("costs.json", json.dumps(whole | {"version": 99}))
    with pytest.raises(InvalidArgument, match="costs of version 1, not 99"):
        MeasuredCosts.load(results, KEY)
    for text in ("", "[]", json.dumps(whole | {"ar": {}}), json.dumps(whole)[:-9]):
        results.write("costs.json", text)
        with pytest.raises(InvalidArgument, match="a file of costs"):
            MeasuredCosts.load(results, KEY)
