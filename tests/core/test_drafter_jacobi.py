"""Jacobi, Gauss-Seidel and hybrid decoding against the iteration as the paper writes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.drafters.base import target_tokens
from paceline.engine import RoundEvent
from paceline.plan import resolve
from paceline.sampling import SamplingParams, coupled_sample, process_logits
from paceline.session import Session
from paceline.tree import path_to
from paceline.types import Draft, Outcome, Verification
from tests.core.engines import Reference, small_engine
from tests.core.scripted import NextToken, chaotic, run, scripted_engine, spoken

METHODS = ("jacobi", "gauss_seidel", "hybrid_jacobi")
PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)
PROMPT = [3, 1, 4]


def by_position(token_ids: list[int]) -> int:
    """A token that does not depend on those before it: one iteration guesses everything."""
    return len(token_ids) * 7 % 50


def after_two(token_ids: list[int]) -> int:
    """Depends on the last two tokens."""
    return (token_ids[-1] * 5 + token_ids[-2] * 3 + 1) % 50


def drafts(events: list[RoundEvent]) -> list[list[int]]:
    assert all(event.outcome is not None for event in events)
    return [event.outcome.draft.token_ids.tolist() for event in events if event.outcome]


def textbook(function: NextToken, prompt: list[int], count: int) -> list[tuple[int, list[int]]]:
    """All iterations over one block: (tokens known to be right before it, all guesses).

    ``guesses[i]`` is read by the iteration for position ``i + 1``; the last one is never read.
    """
    truth, guesses = spoken(function, prompt, count), [prompt[-1]] * count
    known, history = 0, []
    while known < count:
        history.append((known, guesses))
        guesses = [function(prompt + guesses[:i]) for i in range(count)]
        # Right up to the first wrong guess, and one more: that one was made from right ones.
        known = next((i for i in range(count) if guesses[i] != truth[i]), count)
        right_before = next((i for i in range(count) if history[-1][1][i] != truth[i]), count)
        known = min(known, right_before + 1)
    return history


@pytest.mark.parametrize("function", [by_position, after_two, chaotic(50)])
def test_a_block_is_the_iteration_of_the_paper(function: NextToken) -> None:
    size = 8
    engine = scripted_engine(function, 50)
    config = SpeculationConfig(
        method="gauss_seidel", length="fixed", num_speculative_tokens=size - 1
    )
    session, events = run(engine, PROMPT, replace(PARAMS, max_tokens=size), config)
    assert session.output_ids == spoken(function, PROMPT, size)
    iterations = textbook(function, PROMPT, size)
    assert len(events) == len(iterations) <= size
    done = 0
    for event, draft, (known, guesses) in zip(events, drafts(events), iterations, strict=True):
        assert done == known
        # Positions before ``known`` are committed; the last position's guess has no reader.
        assert draft == guesses[known : size - 1]
        done += len(event.token_ids)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("function", [by_position, after_two, chaotic(50)])
def test_every_iteration_fixes_a_token(method: str, function: NextToken) -> None:
    engine = scripted_engine(function, 50)
    session, events = run(engine, PROMPT, PARAMS, SpeculationConfig(method=method, length="fixed"))
    assert session.output_ids == spoken(function, PROMPT, 30)
    assert all(event.token_ids for event in events)
    assert len(events) == session.stats.num_target_forwards <= 30


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_independent_positions_take_two_iterations(temperature: float) -> None:
    """Above temperature 0 too: the guesses use the noise of their own positions."""
    margin = 10.0 if temperature == 0 else 1.0
    engine = scripted_engine(by_position, 50, margin=margin)
    config = SpeculationConfig(method="jacobi", length="fixed", num_speculative_tokens=29)
    params = replace(PARAMS, temperature=temperature, seed=11)
    expected, _ = run(engine, PROMPT, params, SpeculationConfig(method="ar"))
    session, _ = run(engine, PROMPT, params, config)
    assert session.output_ids == expected.output_ids
    assert len(set(session.output_ids)) > 10
    # One more where the initial guess, the last token, happens to be right.
    assert session.stats.num_target_forwards <= 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("penalty", [1.0, 3.0])
def test_target_tokens_are_those_after_each_path(temperature: float, penalty: float) -> None:
    """Processed with the tokens before a node, sampled with the noise of the place after it."""
    rng, vocab_size = np.random.default_rng(4), 8
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty, seed=3)
    plan = resolve(SpeculationConfig(method="jacobi", length="fixed"))
    session = Session("s", [1, 2, 3], params, plan)
    parents = np.array([-1, -1, 0, 0, 2, 4, 5], np.int32)
    differing = 0
    for _ in range(20):
        logits = rng.normal(size=(8, vocab_size)).astype(np.float32)
        draft = Draft(rng.integers(0, vocab_size, 7), parents)
        session.token_ids = [1, 2, 3, 5, 6]  # two of them committed in this round
        outcome = Outcome(draft, (0,), 6, (5, 6), 1, Verification(torch.from_numpy(logits)))
        found = target_tokens(session, outcome, range(-1, 7))
        for node in range(-1, 7):
            path = draft.token_ids[list(path_to(parents, node))].tolist()
            row = process_logits(logits[node + 1], params, [1, 2, 3, *path])
            assert found[node + 1] == coupled_sample(row, params, 3 + len(path))
            differing += found[node + 1] != int(logits[node + 1].argmax())
    assert (differing > 0) == (temperature > 0 or penalty > 1)


@pytest.mark.parametrize("method", METHODS)
def test_a_block_of_one_is_ar(method: str) -> None:
    engine = scripted_engine(by_position, 50)
    config = SpeculationConfig(method=method, length="fixed", num_speculative_tokens=0)
    session, events = run(engine, PROMPT, PARAMS, config)
    assert session.stats.num_target_forwards == 30
    assert drafts(events) == [[]] * 30


@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_blocks_are_finished_one_by_one(size: int) -> None:
    engine = scripted_engine(after_two, 50)
    config = SpeculationConfig(
        method="gauss_seidel", length="fixed", num_speculative_tokens=size - 1
    )
    _, events = run(engine, PROMPT, PARAMS, config)
    done = 0
    for event, draft in zip(events, drafts(events), strict=True):
        left = size - done % size  # positions of the block that are not fixed yet
        assert len(draft) == min(left - 1, 30 - done - 1)
        assert len(event.token_ids) <= left
        done += len(event.token_ids)


def test_a_window_slides_over_what_is_longer() -> None:
    engine = scripted_engine(by_position, 50)
    config = SpeculationConfig(method="jacobi", length="fixed", num_speculative_tokens=6)
    session, events = run(engine, PROMPT, PARAMS, config)
    assert session.output_ids == spoken(by_position, PROMPT, 30)
    assert all(len(d) == 6 for d in drafts(events)[:-3])
    assert session.stats.num_target_forwards < 12


def test_hybrid_goes_on_as_ar_after_its_estimate() -> None:
    engine = scripted_engine(by_position, 50)
    for config, length in (
        (SpeculationConfig(method="hybrid_jacobi", length="fixed", parallel_tokens=10), 10),
        (SpeculationConfig(method="hybrid_jacobi", length="fixed"), 17),  # as long as the prompt
    ):
        prompt = list(range(17))
        session, events = run(engine, prompt, PARAMS, config)
        assert session.output_ids == spoken(by_position, prompt, 30)
        done, drafted = 0, []
        for event, draft in zip(events, drafts(events), strict=True):
            drafted.append((done, len(draft)))
            done += len(event.token_ids)
        assert all(count == 0 for place, count in drafted if place >= length)
        assert any(count > 0 for place, count in drafted if place < length)


def test_hybrid_drafts_nothing_after_a_guessed_end() -> None:
    def function(token_ids: list[int]) -> int:
        return 9 if len(token_ids) >= 8 else by_position(token_ids)

    engine = scripted_engine(function, 50, eos=[9])
    params = replace(PARAMS, ignore_eos=False)
    config = SpeculationConfig(
        method="hybrid_jacobi", length="fixed", num_speculative_tokens=20, parallel_tokens=30
    )
    session, events = run(engine, PROMPT, params, config)
    assert session.output_ids == spoken(function, PROMPT, 6)
    assert session.finish_reason == "stop"
    first, *later = drafts(events)
    assert len(first) == 20
    assert later
    assert all(draft.index(9) == len(draft) - 1 for draft in later)


@pytest.mark.parametrize("method", METHODS)
def test_many_sessions_that_end_at_different_times(
    method: str, tiny_folder: Path, reference: Reference
) -> None:
    small = small_engine(tiny_folder)
    prompts = [[(7 * i + j) % 250 for j in range(3 + i)] for i in range(6)]
    params = [
        replace(PARAMS, max_tokens=5 + 4 * i, temperature=float(i % 2), seed=i) for i in range(6)
    ]
    sessions = small.engine.generate(
        prompts, params, SpeculationConfig(method=method, length="fixed")
    )
    for prompt, each, session in zip(prompts, params, sessions, strict=True):
        assert session.output_ids == reference(prompt, each)
        assert not session.stats.drafter_lost
    small.assert_nothing_is_left()
