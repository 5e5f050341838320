"""Bad input gives an InvalidArgument that names the field, the value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import MAX_DEPTH, MAX_NODES, SpeculationConfig, parse_speculation
from paceline.engine import Engine, EngineLimits
from paceline.errors import InvalidArgument
from paceline.methods import METHODS
from paceline.plan import resolve
from paceline.request import Request
from paceline.sampling import MAX_SEED, SamplingParams
from paceline.types import Draft, DraftProbs
from tests.core.engines import Small, small_engine
from tests.modelzoo import CONTEXT_LENGTH, VOCAB_SIZE


def assert_clear(error: InvalidArgument, field: str, value: object) -> None:
    """The three parts of a clear message."""
    assert error.field == field
    assert repr(value) in str(error) or str(value) in str(error)
    assert error.allowed
    assert error.allowed in str(error)


# --- prompts -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tiny_folder: Path) -> Iterator[Small]:
    small = small_engine(tiny_folder)
    yield small
    small.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("prompt", "field", "value"),
    [
        ([], "prompt", ""),
        ([1] * CONTEXT_LENGTH, "prompt", f"{CONTEXT_LENGTH} tokens"),
        ([1, -1], "prompt_token_ids[1]", -1),
        ([VOCAB_SIZE], "prompt_token_ids[0]", VOCAB_SIZE),
        ([1, 2, 10**30], "prompt_token_ids[2]", 10**30),
        ([1.5], "prompt_token_ids[0]", 1.5),
        ([math.nan], "prompt_token_ids[0]", math.nan),
        (["a"], "prompt_token_ids[0]", "a"),
        ([1, None], "prompt_token_ids[1]", None),
        ("text", "prompt_token_ids[0]", "t"),
    ],
)
def test_prompts(small: Small, prompt: Any, field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as info:
        small.engine.submit(Request(prompt))
    assert_clear(info.value, field, value)


def test_prompts_from_arrays_become_plain_integers(small: Small) -> None:
    session = small.engine.submit(Request(np.array([5, 6], np.int32)))
    assert [type(token) for token in session.token_ids] == [int, int]
    small.engine.cancel(session.session_id)


def test_a_refused_prompt_leaves_nothing_behind(small: Small) -> None:
    """Also not the prompts before it."""
    with pytest.raises(InvalidArgument, match="prompt_token_ids"):
        small.engine.generate([[1, 2], [3, -4]])
    small.assert_nothing_is_left()


def test_a_session_id_in_use(small: Small) -> None:
    session = small.engine.submit(Request([1], session_id="mine"))
    with pytest.raises(InvalidArgument) as info:
        small.engine.submit(Request([1], session_id="mine"))
    assert_clear(info.value, "session_id", "mine")
    small.engine.cancel(session.session_id)


# --- sampling parameters -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (-0.1, math.nan, math.inf, -math.inf, 101, "1", None, True)],
        ("temperature", 5e-324),
        *[("top_k", v) for v in (-1, 1.5, "3", None, True, 2**31)],
        *[("top_p", v) for v in (0.0, -0.5, 1.01, math.nan, "a", None)],
        *[("min_p", v) for v in (-0.1, 1.1, math.nan, None)],
        *[("repetition_penalty", v) for v in (0.0, -1.0, math.inf, math.nan, 1e6, None)],
        *[("seed", v) for v in (-1, MAX_SEED + 1, 1.0, "x", None, True)],
        *[("max_tokens", v) for v in (0, -1, 1.5, "9", None, True, math.inf)],
        *[("stop", v) for v in (5, None, ("",), ("a", ""), (5,), {"a": 1})],
        *[("stop_token_ids", v) for v in (5, None, (-1,), ("a",), (1.0,), (True,))],
        *[("logit_bias", v) for v in (5, None, [1], {"a": 1.0}, {-1: 1.0}, {1.5: 1.0})],
        *[("logit_bias", {3: v}) for v in (math.nan, math.inf, "x", None, 1e9)],
        *[("ignore_eos", v) for v in (1, "yes", None)],
    ],
)
def test_sampling_parameters(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as info:
        SamplingParams(**{field: value})
    assert info.value.field.startswith(field)
    assert info.value.allowed in str(info.value)
    assert repr(info.value.value) in str(info.value)


def test_unknown_sampling_parameters_are_not_ignored() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_token_ids_beyond_the_vocabulary(field: str, small: Small) -> None:
    value: Any = {VOCAB_SIZE: 1.0} if field == "logit_bias" else (VOCAB_SIZE,)
    with pytest.raises(InvalidArgument) as info:
        small.engine.submit(Request([1], SamplingParams(**{field: value})))
    assert_clear(info.value, field, VOCAB_SIZE)


def test_stop_strings_without_a_tokenizer(small: Small) -> None:
    engine = Engine(small.engine.target)
    with pytest.raises(InvalidArgument, match="tokenizer") as info:
        engine.submit(Request([1], SamplingParams(stop=("x",)), SpeculationConfig(method="ar")))
    assert info.value.field == "stop"


@pytest.mark.parametrize("field", ["max_sessions", "max_waiting", "prefill_chunk"])
@pytest.mark.parametrize("value", [0, -1, 1.5, None, True])
def test_engine_limits(field: str, value: Any) -> None:
    """A chunk of 0 would never get a prompt done."""
    with pytest.raises(InvalidArgument) as info:
        EngineLimits(**{field: value})
    assert_clear(info.value, field, value)


# --- speculation ---------------------------------------------------------------------------------


def test_an_unknown_method_lists_the_known_ones(small: Small) -> None:
    with pytest.raises(InvalidArgument) as info:
        small.engine.submit(Request([1], speculation=SpeculationConfig(method="eagle9")))
    assert_clear(info.value, "method", "eagle9")
    for name in METHODS:
        assert name in str(info.value)


def test_a_method_without_its_drafter_lists_those_that_work(small: Small) -> None:
    engine = Engine(small.engine.target)
    with pytest.raises(InvalidArgument) as info:
        engine.submit(Request([1], speculation=SpeculationConfig(method="draft_model")))
    assert_clear(info.value, "method", "draft_model")
    assert "prompt_lookup" in str(info.value)


@pytest.mark.parametrize(
    ("given_values", "field"),
    [
        ({"metod": "ar"}, "metod"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": MAX_DEPTH + 1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens"),
        ({"num_speculative_tokens": "4"}, "num_speculative_tokens"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"node_budget": MAX_NODES + 1}, "node_budget"),
        ({"node_budget": None, "branching": 0}, "branching"),
        ({"method": 5}, "method"),
        ({"method": None}, "method"),
        ({"allow_lossy": "yes"}, "allow_lossy"),
        ({"draft_support": 0}, "draft_support"),
        ({"ngram_max": 17}, "ngram_max"),
    ],
)
def test_untrusted_speculation(given_values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as info:
        parse_speculation(given_values)
    assert info.value.field == f"speculation.{field}"
    assert info.value.allowed
    assert repr(info.value.value) in str(info.value)


def test_an_unknown_key_lists_the_known_ones() -> None:
    with pytest.raises(InvalidArgument) as info:
        parse_speculation({"gamma": 5})
    for name in SpeculationConfig.model_fields:
        assert name in str(info.value)


@pytest.mark.parametrize("value", ["ar", 5, ["method"], [("method", "ar", 1)]])
def test_speculation_that_is_no_mapping(value: Any) -> None:
    with pytest.raises(InvalidArgument) as info:
        parse_speculation(value)
    assert info.value.field == "speculation"


@given(st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=3)))
def test_any_untrusted_mapping_gives_a_config_or_a_clear_error(value: dict[str, Any]) -> None:
    problem: InvalidArgument | None = None
    try:
        config = parse_speculation(value)
    except InvalidArgument as error:
        problem = error
    if problem is not None:
        assert problem.field.startswith("speculation")
        return
    assert value.keys() <= SpeculationConfig.model_fields.keys()
    assert parse_speculation(config.overrides()) == config


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"method": "prompt_lookup", "shape": "chain"}, "shape"),
        ({"method": "prompt_lookup", "branching": 2}, "branching"),
        ({"method": "draft_model", "ngram_max": 3}, "ngram_max"),
        ({"method": "draft_model", "draft_support": 8}, "draft_support"),
        ({"method": "draft_model", "shape": "star"}, "shape"),
        ({"method": "draft_model", "acceptance": "hope"}, "acceptance"),
        ({"method": "draft_model", "length": "long"}, "length"),
        ({"method": "prompt_lookup", "ngram_min": 4, "ngram_max": 2}, "ngram_min"),
        ({"method": "speculative_sampling", "shape": "kary"}, "acceptance"),
        ({"method": "draft_model_tree", "acceptance": "rejection"}, "acceptance"),
    ],
)
def test_combinations_that_cannot_work(config: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as info:
        resolve(SpeculationConfig(**config))
    assert_clear(info.value, field, info.value.value)


def test_greedy_acceptance_above_temperature_0(small: Small) -> None:
    config = SpeculationConfig(method="draft_model", acceptance="greedy")
    with pytest.raises(InvalidArgument) as info:
        small.engine.submit(Request([1], SamplingParams(temperature=1.0), config))
    assert_clear(info.value, "acceptance", "greedy")
    assert "coupled" in str(info.value)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_resolves_to_itself(method: str) -> None:
    """A resolved config has every knob filled in, and is a valid config itself."""
    lossy = not METHODS[method].lossless
    plan = resolve(SpeculationConfig(method=method, allow_lossy=lossy))
    assert plan.method is METHODS[method]
    assert resolve(plan.config).config == plan.config
    assert parse_speculation(plan.config.overrides()) == plan.config
    assert plan.rule.lossless or plan.config.allow_lossy
    assert plan.config.num_speculative_tokens is not None
    assert plan.config.node_budget is not None
    assert METHODS[method].as_dict()["name"] == method


# --- drafts from outside -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "parents", "field"),
    [
        ([1, 2], [-1], "parent_indices"),
        ([1], [-1, 0], "parent_indices"),
        ([1, 10], [-1, 0], "token_ids[1]"),
        ([-1], [-1], "token_ids[0]"),
        ([1, 2], [-1, 1], "parent_indices[1]"),
        ([1, 2], [1, -1], "parent_indices[0]"),
        ([1], [-2], "parent_indices[0]"),
        ([1, 2], [-1, 2**40], "parent_indices[1]"),
        ([1.5], [-1], "token_ids"),
        ([1], [-1.0], "parent_indices"),
        (["1"], [-1], "token_ids"),
        ([None], [-1], "token_ids"),
        ([2**70], [-1], "token_ids"),
        ([[1, 2]], [-1, 0], "token_ids"),
        ([True], [-1], "token_ids"),
        ([math.nan], [-1], "token_ids"),
    ],
)
def test_trees(ids: Any, parents: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as info:
        Draft.checked(ids, parents, 10)
    assert info.value.field == field
    assert info.value.allowed in str(info.value)


def probs(offsets: Any, ids: Any, values: Any) -> DraftProbs:
    return DraftProbs(
        np.array(offsets, np.int32), np.array(ids, np.int64), np.array(values, np.float32)
    )


@pytest.mark.parametrize(
    "bad",
    [
        probs([0, 1], [1], [1.0]),  # one row for two nodes
        probs([0, 1, 2, 3], [1, 2, 3], [1.0, 1.0, 1.0]),
        probs([1, 2, 3], [1, 1, 2], [1.0, 1.0, 1.0]),  # does not begin at 0
        probs([0, 1, 1], [1], [1.0]),  # an empty row
        probs([0, 2, 1], [1, 2], [1.0, 1.0]),  # goes back
        probs([0, 1, 9], [1, 2], [1.0, 1.0]),  # ends beyond the values
        probs([0, 1, 2], [1, 2, 3], [1.0, 1.0]),  # more ids than probabilities
        probs([0, 1, 2], [1, 10], [1.0, 1.0]),  # beyond the vocabulary
        probs([0, 1, 2], [1, -1], [1.0, 1.0]),
        probs([0, 1, 2], [1, 2], [1.0, math.nan]),
        probs([0, 1, 2], [1, 2], [1.0, math.inf]),
        probs([0, 1, 3], [1, 2, 3], [1.0, 1.5, -0.5]),
        probs([0, 1, 2], [1, 2], [1.0, 0.5]),  # sums to a half
        probs([0, 1, 3], [1, 2, 2], [1.0, 0.5, 0.5]),  # an id twice
        probs([0, 1, 2], [1, 3], [1.0, 1.0]),  # the drafted token is not in it
        probs([0, 1, 3], [1, 2, 3], [1.0, 0.0, 1.0]),  # or impossible
    ],
)
def test_probs(bad: DraftProbs) -> None:
    with pytest.raises(InvalidArgument) as info:
        Draft.checked([1, 2], [-1, 0], 10, bad)
    assert info.value.field.startswith("probs")


def test_good_trees_pass() -> None:
    good = probs([0, 1, 3], [1, 2, 3], [1.0, 0.5, 0.5])
    draft = Draft.checked([1, 2], [-1, 0], 10, good)
    assert (draft.num_nodes, draft.probs) == (2, good)
    assert draft.token_ids.dtype == np.int64
    assert draft.parent_indices.dtype == np.int32
    empty = Draft.checked([], [], 10)
    assert empty.num_nodes == 0
    assert empty.is_sound(10)


@given(st.lists(st.integers(-2, 11), max_size=5), st.lists(st.integers(-3, 6), max_size=5))
def test_a_checked_draft_is_sound(ids: list[int], parents: list[int]) -> None:
    try:
        draft = Draft.checked(ids, parents, 10)
    except InvalidArgument:
        sound = len(ids) == len(parents) and Draft(
            np.array(ids, np.int64), np.array(parents, np.int32)
        ).is_sound(10)
        assert not sound
    else:
        assert draft.is_sound(10)
