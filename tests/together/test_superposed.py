"""Superposed Decoding: several drafts for the forwards of one."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.models.base import Segment
from paceline.models.llama import LlamaRunner
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.together.superposed import ORDERS, InterpolatedNgrams, superpose
from tests.modelzoo import make_model

PROMPT = [5, 6, 7, 9]


@pytest.fixture(scope="module")
def runner(zoo: Path) -> LlamaRunner:
    return LlamaRunner(make_model("llama", zoo))


def test_one_draft_without_ngrams_is_greedy(runner: LlamaRunner) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    ar = Engine(ModelTarget(runner)).generate([PROMPT], params, SpeculationConfig(method="ar"))[0]
    found = superpose(runner, PROMPT, 20, drafts=1)
    (draft,) = found.drafts
    assert list(draft.token_ids) == ar.output_ids
    assert set(found.weights) == {(1.0,)}
    cut = superpose(runner, PROMPT, 20, drafts=1, stop_ids=frozenset({draft.token_ids[4]}))
    end = draft.token_ids.index(draft.token_ids[4]) + 1
    assert cut.drafts[0].token_ids == draft.token_ids[:end]
    assert runner.num_free == runner.kv_capacity


@pytest.mark.parametrize("drafts", [1, 2, 3, 5])
def test_forwards_do_not_depend_on_the_number_of_drafts(
    runner: LlamaRunner, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    forward = runner.forward

    def count(segments: list[Segment]) -> object:
        rows.append(sum(segment.num_rows for segment in segments))
        return forward(segments)

    monkeypatch.setattr(runner, "forward", count)
    found = superpose(runner, PROMPT, 8, drafts=drafts, alpha=0.3)
    assert rows == [len(PROMPT), *[1] * 7]
    assert found.num_forwards == 8
    assert len({draft.token_ids for draft in found.drafts}) == drafts
    assert all(len(draft.token_ids) == 8 for draft in found.drafts)
    scores = [draft.score for draft in found.drafts]
    assert scores == sorted(scores, reverse=True)


def test_mixing_weights_are_the_drafts_probabilities(runner: LlamaRunner) -> None:
    found = superpose(runner, PROMPT, 8, drafts=3)
    assert len(found.weights) == 7
    for weights in found.weights:
        assert sum(weights) == pytest.approx(1.0)
        assert min(weights) > 0.0
    first = superpose(runner, PROMPT, 1, drafts=3).drafts
    probabilities = np.exp([draft.score for draft in first])
    assert found.weights[0] == pytest.approx(probabilities / probabilities.sum())


def test_the_model_reads_the_mixture_of_the_last_tokens(runner: LlamaRunner) -> None:
    """The second step by hand, with a model whose embedding of one token is the mixture."""
    one, two = (superpose(runner, PROMPT, length, drafts=2) for length in (1, 2))
    first = [draft.token_ids[0] for draft in one.drafts]
    weights = torch.tensor(two.weights[0])
    original = runner.embedding[200].clone()
    with torch.no_grad():
        runner.embedding[200] = (weights[:, None] * runner.embedding[first]).sum(0)
    sequence = runner.new_sequence()
    try:
        logits = runner.forward([Segment(sequence, np.array([*PROMPT, 200]))]).logits[-1]
    finally:
        runner.free(sequence)
        with torch.no_grad():
            runner.embedding[200] = original
    likelihood = logits.double().log_softmax(-1)
    best = likelihood.topk(2).indices.tolist()
    pairs = {
        (start.token_ids[0], token): start.score + float(likelihood[token])
        for start, token in product(one.drafts, best)
    }
    expected = sorted(pairs, key=lambda pair: -pairs[pair])[:2]
    assert [draft.token_ids for draft in two.drafts] == expected
    assert two.drafts[0].score == pytest.approx(pairs[expected[0]], abs=1e-5)


def test_ngrams_decide_where_alpha_is_1(runner: LlamaRunner) -> None:
    """Of the tokens that the model finds most likely, those that the n-grams know come first."""
    plain = superpose(runner, PROMPT, 1, drafts=4).drafts
    last = plain[3].token_ids[0]
    ngrams = InterpolatedNgrams.of([[*PROMPT, last]] * 5, runner.vocab_size)
    found = superpose(runner, PROMPT, 1, drafts=4, alpha=1.0, ngrams=ngrams).drafts
    assert found[0].token_ids == (last,)
    assert found[0].score == pytest.approx(math.log(ngrams.probability(PROMPT, last)))
    half = superpose(runner, PROMPT, 1, drafts=4, alpha=0.25, ngrams=ngrams).drafts
    scores = {draft.token_ids[0]: draft.score for draft in half}
    expected = 0.75 * plain[3].score + 0.25 * found[0].score
    assert scores[last] == pytest.approx(expected)


def test_ngram_probabilities_are_a_distribution() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 6, 40).tolist() for _ in range(3)]
    model = InterpolatedNgrams.of(texts, 8)
    for context in ([], [3], texts[0][:5], texts[1][7:20], [7, 7, 7]):
        chances = [model.probability(context, token) for token in range(8)]
        assert sum(chances) == pytest.approx(1.0)
        assert min(chances) > 0.0


def test_longer_contexts_weigh_more() -> None:
    model = InterpolatedNgrams.of([[1, 2, 3], [0, 2, 4], [0, 2, 4]], 5)
    single = (1 + 1) / (9 + 5)
    assert model.probability([1, 2], 3) == pytest.approx((single + 2 * (1 / 3) + 4 * 1.0) / 7)
    assert model.probability([2], 3) == pytest.approx((single + 2 * (1 / 3)) / 3)
    assert ORDERS[0] == 2


def test_bad_input_is_named(runner: LlamaRunner) -> None:
    with pytest.raises(InvalidArgument, match="drafts: got 0"):
        superpose(runner, PROMPT, 4, drafts=0)
    with pytest.raises(InvalidArgument, match=r"alpha: got 1\.5"):
        superpose(runner, PROMPT, 4, alpha=1.5)
    with pytest.raises(InvalidArgument, match="prompt: got '0 tokens'"):
        superpose(runner, [], 4)
