"""Continuations of one prompt in one tree: the scores of one at a time, to the last bit."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.admission import PrefillPace
from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.engine.scores import ScoredTree
from paceline.loading import load_engine
from paceline.request import Request
from paceline.sampling import SamplingParams

PROMPT = "Question: What is the capital of France?\nAnswer:"
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt_logprobs": 1, "logprobs": 1},
    "sampled": {"temperature": 1.0, "seed": 7, "logprobs": 0, "top_p": 0.9},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "prompt_logprobs": 3},
}


@pytest.fixture(scope="module")
def demo() -> Engine:
    return load_engine()


@pytest.fixture(scope="module")
def prompt(demo: Engine) -> list[int]:
    assert demo.tokenizer is not None
    return demo.tokenizer.encode(PROMPT)


def random_continuations(seed: int, vocab_size: int) -> list[list[int]]:
    """With shared beginnings, equal ones, one that begins another, and none at all."""
    rng = random.Random(seed)
    found: list[list[int]] = [[]]
    for _ in range(12):
        begin = rng.choice(found)
        begin = begin[: rng.randint(0, len(begin))]
        found.append(begin + [rng.randrange(vocab_size) for _ in range(rng.randint(0, 9))])
    found += [list(found[3]), found[5] + [1], found[7][:-1]]
    rng.shuffle(found)
    return found


def read(engine: Engine, request: Request) -> ScoredTree:
    session = engine.submit(request)
    assert isinstance(session, ScoredTree)
    while engine.has_work:
        engine.step()
    if session.error is not None:
        raise session.error
    assert session.finish_reason == "length"
    return session


def check(engine: Engine, session: ScoredTree, alone: Engine) -> None:
    """Compare a tree with each continuation as the end of a prompt of its own."""
    params, prompt = session.params, session.token_ids
    wants = SamplingParams(
        **{"prompt_logprobs": 0}
        | {
            name: getattr(params, name)
            for name in (
                "temperature", "seed", "top_p", "repetition_penalty", "presence_penalty",
                "logprobs", "max_tokens",
            )
        }
        | ({} if params.prompt_logprobs is None else {"prompt_logprobs": params.prompt_logprobs})
    )  # fmt: skip
    for told in session.scores():
        after = told.after
        events: list[Any] = []
        single = alone.submit(
            Request(after.token_ids[: after.prompt_length], wants, SpeculationConfig(method="ar")),
            events.append,
        )
        while alone.has_work:
            alone.step()
        expected = single.prompt_logprobs[len(prompt) :]
        assert list(told.logprobs) == expected
        if params.prompt_logprobs is not None:
            assert session.prompt_logprobs == single.prompt_logprobs[: len(prompt)]
        assert after.output_ids == single.output_ids
        assert (after.text, after.finish_reason) == (single.text, single.finish_reason)
        assert after.stop_cause == single.stop_cause
        last = [entry for event in events for entry in event.logprobs]
        assert last == ([] if told.logprob is None else [told.logprob])
    assert engine.local_target.num_free == engine.local_target.kv_capacity


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("chunk", [256, 7])
def test_a_tree_has_the_scores_of_one_at_a_time(
    demo: Engine, prompt: list[int], sampling: str, chunk: int
) -> None:
    engine, alone = demo.sibling(), demo.sibling()
    engine.scheduler._pace = PrefillPace(chunk, None)
    params = SamplingParams(max_tokens=1, **SAMPLINGS[sampling])
    for seed in range(3):
        continuations = random_continuations(seed, demo.target.vocab_size)
        session = read(engine, Request(prompt, params, continuations=continuations))
        check(engine, session, alone)
        # Every node once, and the prompt once.
        wholes = {tuple(each[:i]) for each in continuations for i in range(1, len(each) + 1)}
        assert session.num_positions == len(prompt) + len(wholes)
        assert session.stats.num_prefill_forwards == -(-session.num_positions // chunk)
        assert session.stats.num_target_forwards == 0
