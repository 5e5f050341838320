"""Entropy Adaptive Decoding and the oracle router of FS-GEN."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.models.llama import LlamaRunner
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.together.entropy import EntropyAdaptive, Router, entropy_of
from paceline.together.oracle import Collaboration, collaborate, how_well_entropy_tells
from paceline.together.reader import Reader
from tests.modelzoo import make_model

PROMPT = [5, 6, 7, 9]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.7, top_p=0.9, seed=4)
PENALISED = SamplingParams(
    max_tokens=24, ignore_eos=True, presence_penalty=2.0, logit_bias=dict.fromkeys(PROMPT, 9.0)
)
THRESHOLDS = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, math.inf)


@pytest.fixture(scope="module")
def large(zoo: Path) -> LlamaRunner:
    return LlamaRunner(make_model("llama", zoo))


@pytest.fixture(scope="module")
def small(zoo: Path) -> LlamaRunner:
    return LlamaRunner(make_model("llama", zoo, seed=1, num_hidden_layers=1))


def alone(runner: LlamaRunner, params: SamplingParams) -> list[int]:
    engine = Engine(ModelTarget(runner))
    return engine.generate([PROMPT], params, SpeculationConfig(method="ar"))[0].output_ids


@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"]
)
def test_the_ends_of_the_threshold_are_one_model_alone(
    small: LlamaRunner, large: LlamaRunner, params: SamplingParams
) -> None:
    for threshold, runner in ((0.0, large), (math.inf, small)):
        both = EntropyAdaptive(small, large, Router(threshold), params)
        written = list(both.decode(PROMPT))
        assert [token.token_id for token in written] == alone(runner, params)
        assert {token.by_large for token in written} == {runner is large}
        idle = both.small if runner is large else both.large
        assert idle.num_forwards == 0
        both.close()
    assert small.num_free == small.kv_capacity


def test_a_model_that_takes_over_has_read_the_others_tokens(
    small: LlamaRunner, large: LlamaRunner
) -> None:
    """At each place its cache holds the whole text, and its entropy is that of a fresh read."""
    middle = 3.0
    both = EntropyAdaptive(small, large, Router(middle, window=1), GREEDY)
    text, switches, before = list(PROMPT), 0, None
    for token in both.decode(PROMPT):
        reader, runner = (both.large, large) if token.by_large else (both.small, small)
        assert reader.num_cached == len(text)
        fresh = Reader(runner)
        assert token.entropy == entropy_of(fresh.logits(text).numpy())
        fresh.close()
        switches += before is not None and before != token.by_large
        before = token.by_large
        text.append(token.token_id)
    assert switches > 3
    assert both.small.num_forwards + both.large.num_forwards == 24, "one forward a token"
    assert both.small.num_read <= len(text), "no token is read twice"
    both.close()


def test_the_large_share_falls_as_the_threshold_rises() -> None:
    """On a recorded text, place by place, for every window."""
    trace = np.random.default_rng(0).gamma(2.0, 1.0, 200).tolist()
    for window in (1, 3, 8):
        routes = [Router(threshold, window).shares(trace) for threshold in THRESHOLDS]
        for more, less in pairwise(routes):
            assert all(a >= b for a, b in zip(more, less, strict=True))
        shares = [sum(route) for route in routes]
        assert shares[0] == 200 > shares[2] > shares[4] > shares[-1] == 0


def test_the_mean_is_that_of_the_last_window() -> None:
    router = Router(1.0, window=2)
    assert [router.takes_large(e) for e in ([], [1.5], [1.5, 0.4], [9.0, 0.4, 1.6])] == [
        False, True, False, True,
    ]  # fmt: skip
    assert not router.takes_large([9.0, 0.4, 1.5])


def test_entropy_by_hand() -> None:
    with np.errstate(divide="ignore"):
        logits = np.log(np.array([0.5, 0.25, 0.25, 0.0], np.float32))
    assert entropy_of(logits) == pytest.approx(1.5 * math.log(2))
    assert entropy_of(np.zeros(8, np.float32)) == pytest.approx(math.log(8))


def test_the_text_ends_at_a_stop_token(small: LlamaRunner, large: LlamaRunner) -> None:
    third = alone(large, GREEDY)[2]
    both = EntropyAdaptive(small, large, Router(0.0), GREEDY, frozenset({third}))
    written = [token.token_id for token in both.decode(PROMPT)]
    assert written == alone(large, GREEDY)[: written.index(third) + 1]
    both.close()


def test_bad_input_is_named(small: LlamaRunner, large: LlamaRunner, zoo: Path) -> None:
    with pytest.raises(InvalidArgument, match="threshold: got -1"):
        Router(-1.0)
    with pytest.raises(InvalidArgument, match="threshold: got nan"):
        Router(math.nan)
    with pytest.raises(InvalidArgument, match="window: got 0"):
        Router(window=0)
    with pytest.raises(InvalidArgument, match="prompt: got '0 tokens'"):
        EntropyAdaptive(small, large).decode([])
    with pytest.raises(InvalidArgument, match=r"prompt\[1\]: got 999"):
        collaborate(small, large, [5, 999], 4)
    with pytest.raises(InvalidArgument, match="prompt: got '500 tokens'"):
        collaborate(small, large, [5] * 500, 24)
    with pytest.raises(InvalidArgument, match="max_tokens: got 0"):
        collaborate(small, large, [5], 0)
    wider = LlamaRunner(make_model("llama", zoo, vocab_size=300, num_hidden_layers=1))
    with pytest.raises(InvalidArgument, match="one vocabulary"):
        collaborate(wider, large, [5], 4)


# --- FS-GEN ---------------------------------------------------------------------------------------


def test_the_oracles_text_is_the_large_models(small: LlamaRunner, large: LlamaRunner) -> None:
    found = collaborate(small, large, PROMPT, 24)
    assert list(found.token_ids) == alone(large, GREEDY)
    assert found.large_share > 0.5
    same = collaborate(large, large, PROMPT, 24)
    assert same.token_ids == found.token_ids
    assert same.large_share == 0.0
    stopped = collaborate(small, large, PROMPT, 24, frozenset({found.token_ids[3]}))
    assert stopped.token_ids == found.token_ids[: found.token_ids.index(found.token_ids[3]) + 1]
    assert small.num_free == small.kv_capacity


def test_the_large_share_is_that_of_the_places_where_the_models_differ(
    small: LlamaRunner, large: LlamaRunner
) -> None:
    found = collaborate(large, large, PROMPT, 16, small_layers=2)
    reader, text = Reader(large, 2), [*PROMPT, *found.token_ids]
    for place, needed in enumerate(found.by_large):
        end = len(PROMPT) + place
        logits = reader.logits(text[:end])
        assert needed == (int(logits.argmax()) != text[end])
        assert found.entropies[place] == entropy_of(logits.numpy())
    reader.close()
    assert found.by_large != collaborate(large, large, PROMPT, 16, small_layers=1).by_large


def test_how_well_entropy_tells_by_hand() -> None:
    flags, entropies = (True, True, False, False), (3.0, 1.0, 1.0, 0.5)
    found = Collaboration((1, 2, 3, 4), flags, entropies)
    assert how_well_entropy_tells([found]) == pytest.approx((1 + 1 + 0.5 + 1) / 4)
    assert math.isnan(how_well_entropy_tells([Collaboration((1,), (True,), (1.0,))]))
