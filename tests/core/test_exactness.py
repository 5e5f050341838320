"""The product's promise: a draft never changes the output.

Every row of the catalogue that promises the tokens of AR is run here; a new row takes part by
being in ``METHODS``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.drafters.base import AsyncDrafter, Drafter
from paceline.engine import Engine, EngineLimits
from paceline.methods import ACCEPTANCE_RULES, METHODS, Method
from paceline.models.base import ModelRunner, Segment
from paceline.sampling import SamplingParams, coupled_sample, process_logits
from paceline.session import Session
from paceline.target import ModelTarget
from tests.core.prompts import code_prompts
from tests.fakes import WITH_FAKES, AlwaysRight, Mix, NeverRight

NUM_PROMPTS, NUM_TOKENS = 16, 64
NUM_ALONE = 8  # prompts that are also run one at a time, which is slow
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0)
VARIANTS: dict[str, tuple[SamplingParams, ...]] = {
    "greedy": (
        GREEDY,
        GREEDY,
        replace(GREEDY, repetition_penalty=1.3),
        replace(GREEDY, logit_bias={10: 4.0, 200: -4.0, 300: 6.0}),
    ),
    "sampled": (
        SAMPLED,
        replace(SAMPLED, temperature=0.6, top_k=20),
        replace(SAMPLED, top_p=0.9, repetition_penalty=1.2),
        replace(SAMPLED, temperature=1.4, min_p=0.05, logit_bias={10: 3.0, 300: -2.0}),
    ),
}
FAKES = ("always_right", "never_right", "mix_3", "mix_8")


def same_tokens_as_ar(method: Method, variant: str) -> bool:
    """True when this row promises AR's tokens; other lossless rows promise its law."""
    exact_match = method.acceptance in ("coupled", "greedy")
    return method.lossless and (exact_match or variant == "greedy") and not (
        method.acceptance == "greedy" and variant == "sampled"
    )


class Suite:
    """The demo pair, its prompts, and AR's answers."""

    def __init__(self, demo: Engine) -> None:
        self.demo = demo
        self.prompts = code_prompts(demo.tokenizer, NUM_PROMPTS)  # type: ignore[arg-type]

    def params(self, variant: str) -> list[SamplingParams]:
        choices = VARIANTS[variant]
        return [replace(choices[i % len(choices)], seed=1000 + i) for i in range(NUM_PROMPTS)]

    @cache  # noqa: B019  one instance for the whole run
    def expected(self, variant: str) -> list[list[int]]:
        sessions = self.generate("ar", variant, batch=8)
        assert all(len(session.output_ids) == NUM_TOKENS for session in sessions)
        return [session.output_ids for session in sessions]

    def generate(self, method: str, variant: str, batch: int) -> list[Session]:
        catalogue = dict(WITH_FAKES) | {
            name: replace(WITH_FAKES["mix"], name=name, drafter=name) for name in ("mix_3", "mix_8")
        }
        engine = Engine(
            ModelTarget(self.demo.target.runner),
            {**self.demo.drafters, **(self.fakes(variant) if method in FAKES else {})},
            tokenizer=self.demo.tokenizer,
            limits=EngineLimits(max_sessions=batch),
            catalogue=catalogue,
        )
        tree = {"node_budget": 12} if method in FAKES else {}
        config = SpeculationConfig(method=method, **tree)
        count = NUM_PROMPTS if batch > 1 else NUM_ALONE
        return engine.generate(self.prompts[:count], self.params(variant)[:count], config)

    def fakes(self, variant: str) -> dict[str, Drafter | AsyncDrafter]:
        size = self.demo.target.vocab_size
        truth = {
            tuple(prompt): tokens
            for prompt, tokens in zip(self.prompts, self.expected(variant), strict=True)
        }
        return {
            "always_right": AlwaysRight(truth, size),
            "never_right": NeverRight(truth, size),
            "mix_3": Mix(truth, size, rho=0.3),
            "mix_8": Mix(truth, size, rho=0.8),
        }


@pytest.fixture(scope="module")
def suite(demo: Engine) -> Suite:
    return Suite(demo)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    ("method", "variant"),
    [
        (name, variant)
        for variant in VARIANTS
        for name, method in METHODS.items()
        if same_tokens_as_ar(method, variant)
    ]
    + [(name, variant) for variant in VARIANTS for name in FAKES],
)
def test_tokens_are_those_of_ar(method: str, variant: str, batch: int, suite: Suite) -> None:
    sessions = suite.generate(method, variant, batch)
    for i, session in enumerate(sessions):
        expected = suite.expected(variant)[i]
        assert session.output_ids == expected, f"prompt {i} with {session.params}"
        assert not session.stats.drafter_lost
        # Progress: at least one token for each forward, at most one more than the draft is deep.
        assert session.stats.num_target_forwards <= session.stats.num_tokens == NUM_TOKENS
        accepted = session.stats.num_accepted
        assert session.stats.num_tokens <= accepted + session.stats.num_target_forwards
    rate = sum(s.stats.num_accepted for s in sessions) / max(
        1, sum(s.stats.num_drafted for s in sessions)
    )
    if method == "always_right":
        assert rate == 1.0
    if method == "never_right":
        assert rate == 0.0
    if method == "mix_8":
        assert rate > 0.4


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_lossless_row_is_covered(variant: str) -> None:
    """Rows that this file skips at temperature 0 do not exist; above 0, law tests cover them."""
    skipped = {
        method.name
        for method in METHODS.values()
        if method.lossless and not same_tokens_as_ar(method, variant)
    }
    if variant == "greedy":
        assert not skipped
    else:
        assert all(METHODS[name].acceptance not in ("coupled",) for name in skipped)
    assert set(ACCEPTANCE_RULES) >= {"coupled", "greedy", "rejection"}


def token_by_token(runner: ModelRunner, prompt: list[int], params: SamplingParams) -> list[int]:
    """AR as a textbook has it: no engine, no drafts, one token in each forward."""
    sequence, ids = runner.new_sequence(), list(prompt)
    for token in ids[:-1]:
        runner.forward([Segment(sequence, np.array([token]), logits="none")])
        runner.commit(sequence, [0])
    for _ in range(params.max_tokens):
        logits = runner.forward([Segment(sequence, np.array([ids[-1]]))]).logits[0]
        runner.commit(sequence, [0])
        row = process_logits(logits.numpy(), params, ids)
        ids.append(coupled_sample(row, params, len(ids)))
    runner.free(sequence)
    return ids[len(prompt) :]


@pytest.mark.parametrize("variant", VARIANTS)
def test_ar_itself_is_the_textbook_loop(variant: str, suite: Suite) -> None:
    for i in range(4):
        params = suite.params(variant)[i]
        expected = token_by_token(suite.demo.target.runner, suite.prompts[i], params)
        assert suite.expected(variant)[i] == expected


def test_equal_seeds_give_equal_tokens_and_others_do_not(suite: Suite) -> None:
    engine = Engine(ModelTarget(suite.demo.target.runner), suite.demo.drafters)
    prompt = suite.prompts[0]
    params = [replace(SAMPLED, seed=seed) for seed in (5, 5, 6)]
    first, second, third = engine.generate([prompt] * 3, params, SpeculationConfig())
    assert first.output_ids == second.output_ids != third.output_ids


def test_exact_after_the_number_of_threads_changed(suite: Suite) -> None:
    """What is invariant in a matrix product depends on how many threads share it."""
    engine = Engine(ModelTarget(suite.demo.target.runner), suite.demo.drafters)
    params = replace(GREEDY, max_tokens=8)
    threads = torch.get_num_threads()
    try:
        for count in (2, 1):
            torch.set_num_threads(count)
            prompts = suite.prompts[:2]
            ar = [engine.generate([p], params, SpeculationConfig(method="ar"))[0] for p in prompts]
            tree = engine.generate(prompts, params, SpeculationConfig(method="draft_model_tree"))
            assert [s.output_ids for s in tree] == [s.output_ids for s in ar]
    finally:
        torch.set_num_threads(threads)
