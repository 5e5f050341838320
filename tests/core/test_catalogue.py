"""Choosing method and knobs at run time, in the library; tests/cli and tests/rpc do the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config import SpeculationConfig, parse_speculation
from paceline.errors import InvalidArgument
from paceline.methods import (
    ACCEPTANCE_RULES,
    COMMON_KNOBS,
    DIFFUSION_METHODS,
    LENGTHS,
    METHODS,
    SHAPES,
    SIZE_KNOBS,
)
from paceline.plan import resolve
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.shapes.base import BRANCHING, DRAFT_SUPPORT
from tests.combinations import BAD_VALUES, IMPOSSIBLE, POSSIBLE, Combination
from tests.core.engines import Reference, small_engine

PROMPT = list(b"def f(x): return x")


@pytest.mark.parametrize("combination", IMPOSSIBLE, ids=str)
def test_impossible_combinations_are_refused(combination: Combination, tiny_folder: Path) -> None:
    small = small_engine(tiny_folder)
    config = parse_speculation(combination.speculation)
    with pytest.raises(InvalidArgument) as caught:
        small.engine.submit(Request(PROMPT, combination.params, config))
    assert caught.value.field == combination.field
    for word in combination.words:
        assert word in str(caught.value)
    small.assert_nothing_is_left()


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
def test_values_that_do_not_fit_are_refused(key: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_speculation({key: value})
    assert caught.value.field == f"speculation.{key}"


@pytest.mark.parametrize("speculation", POSSIBLE, ids=str)
def test_method_and_knobs_are_chosen_for_each_request(
    speculation: Mapping[str, Any], tiny_folder: Path, reference: Reference
) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=3)
    small = small_engine(tiny_folder)
    config = parse_speculation(speculation)
    (session,) = small.engine.generate([PROMPT], params, config)
    assert session.output_ids == reference(PROMPT, params)
    assert session.plan.method.name == speculation["method"]
    for key, value in speculation.items():
        assert getattr(session.plan.config, key) == value


@pytest.mark.parametrize("name", METHODS)
def test_every_method_resolves_to_itself(name: str) -> None:
    """A filled-in config means the same as the method it came from, also as JSON."""
    given = SpeculationConfig(method=name, allow_lossy=not METHODS[name].lossless)
    plan = resolve(given)
    assert resolve(plan.config).config == plan.config
    again = parse_speculation(json.loads(json.dumps(plan.config.overrides())))
    assert again == plan.config
    assert hash(again) == hash(plan.config)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_what_it_is(name: str) -> None:
    method = METHODS[name]
    assert method.name == name
    assert method.summary.endswith(".")
    # The baseline, and what is Paceline's own, come from no paper.
    own = name == "ar" or method.paper.startswith("Paceline: ")
    assert own or "arXiv" in method.paper or "github.com" in method.paper
    assert COMMON_KNOBS.isdisjoint(method.knob_defaults)
    assert set(method.knob_defaults) <= set(SpeculationConfig.model_fields)


@pytest.mark.parametrize("name", SpeculationConfig.model_fields)
def test_every_knob_is_described_and_belongs_to_a_method(name: str) -> None:
    field = SpeculationConfig.model_fields[name]
    assert field.description and field.description.endswith(".")
    methods = [*METHODS.values(), *DIFFUSION_METHODS.values()]
    used = {ACCEPTANCE_RULES[method.acceptance] for method in METHODS.values()}
    rules = {knob.name for rule in used for knob in rule.knobs}
    defaults = [method.knob_defaults for method in methods]
    parts = [{knob.name for knob in p.knobs} for p in (*SHAPES.values(), *LENGTHS.values())]
    belongs = any(name in knobs for knobs in (*defaults, *parts, rules, {BRANCHING.name}))
    drawn = name == DRAFT_SUPPORT.name
    assert belongs or drawn or name in COMMON_KNOBS | SIZE_KNOBS or name == "shape", (
        f"no method has the knob {name}"
    )


def test_an_engine_says_which_methods_it_cannot_run(tiny_folder: Path) -> None:
    engine = small_engine(tiny_folder).engine
    assert all(engine.refusal(method) is None for method in METHODS.values())
    del engine.drafters["draft_model"]
    for name, method in METHODS.items():
        uses = "draft_model" in (method.drafter, *method.uses)
        reason = engine.refusal(method)
        assert (reason is not None) == uses
        if reason is not None:
            assert "draft_model" in reason
            config = SpeculationConfig(method=name, allow_lossy=not method.lossless)
            with pytest.raises(InvalidArgument, match="draft_model"):
                engine.submit(Request(PROMPT, speculation=config))


def test_a_list_is_a_list_however_it_comes() -> None:
    """Lists from JSON, YAML and the command line, tuples from a message: one config."""
    lists = {
        name: value
        for method in METHODS.values()
        for name, value in method.knob_defaults.items()
        if isinstance(value, tuple)
    }
    assert lists, "no method has a list any more: this test is of no use"
    for name, value in lists.items():
        from_list = parse_speculation({name: list(value)})
        assert from_list == parse_speculation({name: value})
        assert hash(from_list) == hash(replace_config(from_list))
        for bad in ([], "one", [None], [[1]]):
            with pytest.raises(InvalidArgument, match=name):
                parse_speculation({name: bad})


def replace_config(config: SpeculationConfig) -> SpeculationConfig:
    return SpeculationConfig(**config.overrides())


def test_limits_of_sampling_are_kept_apart_from_knobs(tiny_folder: Path) -> None:
    """The rule `greedy` is fine at temperature 0: the same config, other parameters."""
    small = small_engine(tiny_folder)
    config = SpeculationConfig(method="draft_model", acceptance="greedy")
    params = SamplingParams(max_tokens=4)
    assert small.engine.generate([PROMPT], params, config)[0].finish_reason == "length"
    with pytest.raises(InvalidArgument, match="temperature"):
        small.engine.submit(Request(PROMPT, replace(params, temperature=1.0), config))
