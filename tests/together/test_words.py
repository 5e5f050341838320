"""MuMo: a second output layer of whole words beside a model that stays as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.config import SpeculationConfig
from paceline.demo import HEADS_DIR, TARGET_DIR, WORDS_FILE
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.loading import load_runner
from paceline.models.base import Segment
from paceline.models.llama import LlamaRunner
from paceline.numerics import digest_files
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.together.words import WordHead, write_words
from paceline.tokenizer import load_tokenizer
from tests.modelzoo import make_model

PROMPT = [5, 6, 7, 9]


@pytest.fixture(scope="module")
def runner(zoo: Path) -> LlamaRunner:
    return LlamaRunner(make_model("llama", zoo))


def head_of(words: list[list[int]], runner: LlamaRunner, logit: float) -> WordHead:
    """A head that gives each word the same logit everywhere."""
    head = WordHead(words, runner.config.hidden_size)
    for value in head.state_dict().values():
        value.zero_()
    head.state_dict()["out.bias"].fill_(logit)
    return head.eval().requires_grad_(False)


def greedy(runner: LlamaRunner, count: int) -> list[int]:
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    session = Engine(ModelTarget(runner)).generate(
        [PROMPT], params, SpeculationConfig(method="ar")
    )[0]
    return session.output_ids


def likelihoods(runner: LlamaRunner, written: list[int], candidate: list[int]) -> Tensor:
    """Log-probabilities at the end of the text and behind each of the candidate's tokens.

    By a forward of the whole text.  # [1 + num_tokens, vocab_size]
    """
    sequence = runner.new_sequence()
    try:
        ids = np.array(PROMPT + written + candidate, np.int64)
        logits = runner.forward([Segment(sequence, ids)]).logits
    finally:
        runner.free(sequence)
    return logits[len(PROMPT) + len(written) - 1 :].log_softmax(-1)


@pytest.mark.parametrize("top_k", [1, 3, 10])
def test_without_words_the_text_is_the_base_models(runner: LlamaRunner, top_k: int) -> None:
    own = greedy(runner, 20)
    for head in (None, head_of([], runner, 0.0)):
        found = write_words(runner, head, PROMPT, 20, top_k=top_k)
        assert list(found.token_ids) == own
        assert len(found.steps) == 20 and found.num_words == 0
    # Words that the larger vocabulary never ranks among its best do not count either.
    silent = head_of([[1, 2], [3, 4, 5]], runner, -1e9)
    assert list(write_words(runner, silent, PROMPT, 20, top_k=top_k).token_ids) == own
    assert runner.num_free == runner.kv_capacity


def test_words_save_steps(runner: LlamaRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that are what the model would write anyway: fewer forwards, the same text."""
    own = greedy(runner, 24)
    words = [own[i : i + 3] for i in range(22)]
    head = head_of(words, runner, 1e9)
    forwards: list[int] = []
    forward = runner.forward

    def count(*given: object) -> object:
        forwards.append(1)
        return forward(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "forward", count)
    # All words are candidates; those that are not the text's are far less likely.
    found = write_words(runner, head, PROMPT, 24, top_k=len(words))
    assert len(found.steps) == len(forwards) - 1 < 24
    assert found.num_words > 0
    assert sum(len(step.token_ids) for step in found.steps) >= len(found.token_ids) == 24


@pytest.mark.parametrize("length_power", [0.0, 0.5, 1.0, 2.0])
def test_the_base_model_picks_the_best_candidate(runner: LlamaRunner, length_power: float) -> None:
    """Six words and the model's two best tokens, each weighed by forwards of the whole text."""
    rng = np.random.default_rng(0)
    words = [rng.integers(runner.vocab_size, size=rng.integers(2, 5)).tolist() for _ in range(6)]
    words[1][:2] = words[0][:2]  # they share the nodes of their beginning
    head = head_of(words, runner, 1e9)
    found = write_words(runner, head, PROMPT, 6, top_k=8, length_power=length_power)
    written: list[int] = []
    for step in found.steps:
        scores = {}
        tokens = likelihoods(runner, written, [])[0].topk(2).indices.tolist()
        for candidate in [*words, *([token] for token in tokens)]:
            rows = likelihoods(runner, written, candidate)
            total = sum(float(rows[i, token]) for i, token in enumerate(candidate))
            scores[tuple(candidate)] = total / len(candidate) ** length_power
        assert step.token_ids == max(scores, key=lambda each: scores[each])
        written += step.token_ids
    if length_power in (0.0, 2.0):  # at 0 no word beats its own beginning
        assert (found.num_words > 0) == (length_power == 2.0)


def test_a_stop_ends_the_text(runner: LlamaRunner) -> None:
    own = greedy(runner, 12)
    stop = own[5]
    found = write_words(runner, None, PROMPT, 12, stop_ids=frozenset({stop}))
    assert list(found.token_ids) == own[: own.index(stop) + 1]


def test_a_head_is_kept_and_only_fits_its_model(
    runner: LlamaRunner, tmp_path: Path, zoo: Path
) -> None:
    head = WordHead([[1, 2], [3, 4, 5]], runner.config.hidden_size, "abc")
    head.save(tmp_path / "words.safetensors")
    again = WordHead.load(tmp_path / "words.safetensors")
    assert again.words == ((1, 2), (3, 4, 5)) and again.target == "abc"
    state = torch.randn(2, runner.config.hidden_size)
    assert torch.allclose(again(state), head(state), atol=0.05)
    with pytest.raises(InvalidArgument, match="a head for states of 8"):
        write_words(runner, WordHead([[1, 2]], 8), PROMPT, 4)
    with pytest.raises(InvalidArgument, match="a head of whole words"):
        WordHead.load(HEADS_DIR / "judge.safetensors")
    with pytest.raises(InvalidArgument, match="top_k"):
        write_words(runner, None, PROMPT, 4, top_k=0)
    with pytest.raises(InvalidArgument, match="length_power"):
        write_words(runner, None, PROMPT, 4, length_power=-1.0)


# --- what ships -----------------------------------------------------------------------------------


def test_the_demos_words_save_steps_and_its_weights_are_as_they_were() -> None:
    head = WordHead.load(WORDS_FILE)
    assert WORDS_FILE.stat().st_size < 1_000_000
    weights = [TARGET_DIR / "model.safetensors"]
    assert head.target == digest_files(weights)  # what the head was trained beside
    runner, tokenizer = load_runner(TARGET_DIR), load_tokenizer(TARGET_DIR)
    prompt = tokenizer.encode("class Stack:\n    def __init__(self):\n        ")
    plain = write_words(runner, None, prompt, 48)
    found = write_words(runner, head, prompt, 48)
    assert found.num_words > 2 and len(found.steps) < 0.95 * 48
    assert write_words(runner, None, prompt, 48) == plain
    assert head.target == digest_files(weights)
