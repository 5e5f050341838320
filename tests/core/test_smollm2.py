"""A real chat model, quantised: sensible answers, and the same tokens with drafts or without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, EngineLimits
from paceline.errors import ModelNotFound
from paceline.loading import load_engine
from paceline.methods import METHODS
from paceline.model_names import resolve_model
from paceline.models.base import Segment
from paceline.models.ops import Packing
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "Repeat this list and sort it: pear, apple, fig, cherry, banana, plum, kiwi, lemon.",
    "Why is the sky blue? Answer in two sentences.",
)
# Of every kind that needs no training: a draft model, a tree, lookups, early exits, Jacobi.
ROWS = ("draft_model", "draft_model_tree", "prompt_lookup", "suffix_decoding_tree", "layer_skip",
        "lookahead")  # fmt: skip
SAMPLED = ("prompt_lookup", "draft_model_tree")
GREEDY = SamplingParams(max_tokens=48)


def _found() -> bool:
    try:
        resolve_model("smollm2")
    except ModelNotFound:
        return False
    return True


pytestmark = pytest.mark.skipif(not _found(), reason="not here: paceline models get smollm2")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine("smollm2", kv_tokens=16384)


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    return [prompt(engine, question) for question in QUESTIONS]


def prompt(engine: Engine, question: str) -> list[int]:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert engine.tokenizer is not None
    return engine.tokenizer.encode(text, add_special_tokens=False)


def test_weights_stay_as_they_are(engine: Engine) -> None:
    runner = engine.local_target.runner
    assert runner.fingerprint.numerics_class == "portable"
    assert runner.packed_lm_head.packing is Packing.OCTETS  # type: ignore[attr-defined]
    assert 134e6 < runner.num_parameters < 136e6  # type: ignore[attr-defined]


def test_answers_make_sense(engine: Engine, prompts: list[list[int]]) -> None:
    params, config = replace(GREEDY, max_tokens=40), SpeculationConfig(method="prompt_lookup")
    sessions = engine.generate(prompts[:2], params, config)
    capital, function = (session.text for session in sessions)
    assert capital == "The capital of France is Paris."
    assert "def reverse_string" in function


@pytest.mark.parametrize(
    ("method", "temperature"),
    [*((method, 0.0) for method in ROWS), *((method, 0.8) for method in SAMPLED)],
)
def test_tokens_are_those_of_ar(
    method: str, temperature: float, engine: Engine, prompts: list[list[int]]
) -> None:
    assert METHODS[method].lossless
    params = [replace(GREEDY, temperature=temperature, seed=seed) for seed in range(len(prompts))]
    target = engine.local_target.runner
    drafters = {"draft_model": DraftModel(target)}  # right, but for its own rounding
    expected = [
        engine.generate([one], [param], SpeculationConfig(method="ar"))[0].output_ids
        for one, param in zip(prompts, params, strict=True)
    ]
    drafting = Engine(
        ModelTarget(target), drafters, tokenizer=engine.tokenizer,
        eos_token_ids=engine.eos_token_ids, limits=EngineLimits(max_sessions=4),
    )  # fmt: skip
    config = SpeculationConfig(method=method, length="fixed")
    sessions = drafting.generate(prompts, params, config)
    assert [session.output_ids for session in sessions] == expected


def test_a_token_has_the_same_logits_however_many_are_verified_with_it(
    engine: Engine, prompts: list[list[int]]
) -> None:
    runner, tokens = engine.local_target.runner, np.array(prompts[3])

    def logits(size: int) -> torch.Tensor:
        sequence = runner.new_sequence()
        found = []
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            found.append(runner.forward([Segment(sequence, part, logits="all")]).logits)
            runner.commit(sequence, range(len(part)))
        runner.free(sequence)
        return torch.cat(found)

    one = logits(1)
    for size in (2, 3, 5, 8, 16):
        assert torch.equal(logits(size), one), size
