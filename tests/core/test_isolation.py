"""A session's tokens depend neither on its batch mates nor on when they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import SpeculationConfig
from paceline.engine import Engine, EngineLimits
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from tests.core.engines import (
    LOCAL_METHODS,
    Reference,
    Small,
    has_tokens_of_ar,
    small_engine,
)
from tests.core.prompts import code_prompts

rng = np.random.default_rng(11)
PROMPTS = [rng.integers(0, 256, size).tolist() for size in (1, 2, 9, 30, 70)]
BASE = SamplingParams(ignore_eos=True)
PARAMS = (
    BASE,
    replace(BASE, temperature=1.0, seed=1),
    replace(BASE, temperature=0.7, seed=2, top_k=8, repetition_penalty=1.2),
    replace(BASE, logit_bias={5: 2.0}, repetition_penalty=1.1),
)


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: int
    params: int
    tokens: int
    method: str
    leaves_after: int | None  # steps until it is cancelled


arrivals = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 12),
        prompt=st.integers(0, len(PROMPTS) - 1),
        params=st.integers(0, len(PARAMS) - 1),
        tokens=st.integers(1, 16),
        method=st.sampled_from(LOCAL_METHODS),
        leaves_after=st.none() | st.integers(0, 10),
    ),
    min_size=1,
    max_size=8,
)
limits = st.builds(
    EngineLimits, max_sessions=st.integers(1, 6), prefill_chunk=st.sampled_from([1, 7, 64, 256])
)


@pytest.fixture(scope="module")
def small(tiny_folder: Path) -> Iterator[Small]:
    small = small_engine(tiny_folder, kv_tokens=600)
    yield small
    small.assert_nothing_is_left()


@pytest.mark.slow
@settings(max_examples=25)
@given(arrivals, limits)
def test_any_schedule_of_arrivals_and_cancellations(
    small: Small, reference: Reference, plan: list[Arrival], limits: EngineLimits
) -> None:
    engine = small.engine
    engine.limits = limits
    sessions: dict[int, Session] = {}
    cancelled: set[int] = set()
    step = 0
    while step <= 12 or engine.has_work:
        for i, arrival in enumerate(plan):
            if arrival.step == step:
                params = replace(PARAMS[arrival.params], max_tokens=arrival.tokens)
                length = "auto" if arrival.method == "auto" else "fixed"  # it takes no other
                config = SpeculationConfig(length=length, method=arrival.method)
                sessions[i] = engine.submit(Request(PROMPTS[arrival.prompt], params, config))
            gone = arrival.leaves_after is not None and step == arrival.step + arrival.leaves_after
            if gone and engine.cancel(sessions[i].session_id):
                cancelled.add(i)
        engine.step()
        step += 1
        assert step < 2000, "no progress"
    for i, session in sessions.items():
        arrival = plan[i]
        if not has_tokens_of_ar(arrival.method, session.params):
            expected = session.output_ids  # its tokens are not AR's: compared below
        else:
            expected = reference(PROMPTS[arrival.prompt], session.params)
        assert session.output_ids == expected[: len(session.output_ids)]
        if i in cancelled:
            assert session.finish_reason == "cancelled"
        else:
            assert session.finish_reason == "length"
            assert len(session.output_ids) == arrival.tokens
    small.assert_nothing_is_left()


def test_sampled_drafts_do_not_depend_on_batch_mates_either(small: Small) -> None:
    """Rejection sampling: other tokens than AR's, but a pure function of prompt and seed."""
    params = replace(BASE, temperature=1.0, max_tokens=12)
    config = SpeculationConfig(length="fixed", method="speculative_sampling")
    small.engine.limits = EngineLimits()
    each = [replace(params, seed=seed) for seed in range(5)]
    alone = [
        small.engine.generate([prompt], p, config)[0].output_ids
        for prompt, p in zip(PROMPTS, each, strict=True)
    ]
    together = [s.output_ids for s in small.engine.generate(PROMPTS, each, config)]
    assert together == alone


def test_the_demo_pair_with_staggered_arrivals(demo: Engine) -> None:
    """The same on a trained model: every session arrives while others run, half are cancelled."""
    assert demo.tokenizer is not None
    prompts = code_prompts(demo.tokenizer, 12, seed=5)
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=i % 2, seed=i) for i in range(12)
    ]
    alone = Engine(ModelTarget(demo.target.runner), demo.drafters)
    ar = SpeculationConfig(method="ar")
    expected = [
        alone.generate([p], q, ar)[0].output_ids for p, q in zip(prompts, params, strict=True)
    ]
    engine = Engine(
        ModelTarget(demo.target.runner),
        demo.drafters,
        limits=EngineLimits(max_sessions=5, prefill_chunk=16),
    )
    methods = ("draft_model", "draft_model_tree", "prompt_lookup", "ar")
    sessions = []
    for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        config = SpeculationConfig(length="fixed", method=methods[i % 4])
        sessions.append(engine.submit(Request(prompt, each, config)))
        engine.step()
        if i % 2:
            engine.cancel(sessions[i // 2].session_id)
    while engine.has_work:
        engine.step()
    reasons = [session.finish_reason for session in sessions]
    assert "cancelled" in reasons
    assert "length" in reasons
    for session, tokens in zip(sessions, expected, strict=True):
        assert session.output_ids == tokens[: len(session.output_ids)]
