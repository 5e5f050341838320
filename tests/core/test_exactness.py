"""The product's promise: a draft never changes the output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.loading import limit_threads
from paceline.methods import METHODS
from paceline.models import native_ops
from paceline.models.base import ModelRunner, Segment
from paceline.plan import resolve
from paceline.sampling import SamplingParams, coupled_sample, process_logits
from paceline.target import ModelTarget
from tests.core.suite import (
    BASE,
    CASES,
    CORE_CASES,
    LOSSY,
    OTHER_CASES,
    OTHER_LOSSLESS_CASES,
    SAMPLED,
    VARIANTS,
    Suite,
    count_for,
)


@pytest.fixture(scope="module")
def suite(demo: Engine) -> Suite:
    """Each of the sampling parameters twice."""
    return Suite(demo, 8, 48, batch=8)


@pytest.fixture(scope="module")
def short_suite(demo: Engine) -> Suite:
    """Each of the sampling parameters twice."""
    return Suite(demo, 8, 12, batch=8)


@pytest.mark.one_of(3, slow=3)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("method", "variant"), [case for case in CORE_CASES if case[0] != "mix_8"])
def test_tokens_are_those_of_ar(method: str, variant: str, batch: int, suite: Suite) -> None:
    """`make test-nightly` has 256 prompts of 128 tokens, and the fake that is right more often."""
    suite.check(method, variant, batch, count_for(batch, core=True))


@pytest.mark.one_of(5, slow=3)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("method", "variant"), OTHER_LOSSLESS_CASES)
def test_tokens_of_every_method_are_those_of_ar(
    method: str, variant: str, batch: int, short_suite: Suite
) -> None:
    """`make test-nightly` has ten times the tokens and more."""
    short_suite.check(method, variant, batch, count_for(batch))


@pytest.mark.one_of(3)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("method", "variant"), OTHER_CASES)
def test_methods_with_other_tokens_run_to_the_end(
    method: str, variant: str, batch: int, short_suite: Suite
) -> None:
    """Lossy methods, and sampling rules that promise AR's law: tests of the rules show the law."""
    short_suite.check_progress(method, variant, batch, count_for(batch))


def test_no_method_is_forgotten() -> None:
    """Each method runs greedy and sampled, compared with AR wherever it promises AR's tokens."""
    cases = {*CASES, *OTHER_CASES}
    for name, method in METHODS.items():
        assert (name, "greedy") in cases
        # The rule `greedy` is refused above temperature 0.
        assert (name, "sampled") in cases or method.acceptance == "greedy"
        assert ((name, "greedy") in CASES) == method.lossless
        assert ((name, "sampled") in CASES) == (method.lossless and method.acceptance == "coupled")
    assert {name for name, _ in CASES}.isdisjoint(LOSSY)


def test_no_lossless_rule_is_without_a_law_test() -> None:
    """Above temperature 0 a rule has AR's tokens, is refused, or tests enumerate its law."""
    here = Path(__file__).parent
    tests = [here / "test_output_law.py", *here.glob("test_acceptance*.py")]
    text = "".join(path.read_text() for path in tests)
    for name, method in METHODS.items():
        if method.lossless and method.acceptance not in ("coupled", "greedy"):
            rule = resolve(SpeculationConfig(method=name)).rule
            assert type(rule).__name__ in text, f"{rule.name}: add a law test"


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
    params = [replace(SAMPLED, seed=seed, max_tokens=30) for seed in (5, 5, 6)]
    sessions = engine.generate([suite.prompts[0]] * 3, params, SpeculationConfig())
    first, second, third = (session.output_ids for session in sessions)
    assert first == second != third


def test_exact_after_the_number_of_threads_changed(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library may split products differently over threads; the tokens must not notice."""
    monkeypatch.setattr(native_ops, "LONE_WEIGHTS", 0)  # small forwards are shared, too
    engine = Engine(ModelTarget(suite.demo.target.runner), suite.demo.drafters)
    prompts, params, tokens = suite.prompts[:2], replace(BASE, max_tokens=8), []
    for count in (2, 1):
        limit_threads(count)
        for method in ("ar", "draft_model_tree"):
            sessions = engine.generate(prompts, params, SpeculationConfig(method=method))
            tokens.append([session.output_ids for session in sessions])
    assert tokens == [tokens[0]] * 4
