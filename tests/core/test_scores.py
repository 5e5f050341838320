"""Continuations of one prompt in one tree: the scores of one at a time, to the last bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from paceline.admission import PrefillPace
from paceline.config import SpeculationConfig
from paceline.engine import Engine, EngineLimits
from paceline.engine.scores import ScoredTree
from paceline.errors import InvalidArgument, ResourceExhausted
from paceline.loading import load_engine
from paceline.models.transformers import TransformersRunner
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.scoring import common_length, shared_beginnings, token_tree
from paceline.session import SessionState
from paceline.target import ModelTarget
from paceline.tree import path_to
from tests.modelzoo import make_model

PROMPT = "Question: What is the capital of France?\nAnswer:"
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt_logprobs": 1, "logprobs": 1},
    "sampled": {"temperature": 1.0, "seed": 7, "logprobs": 0, "top_p": 0.9},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "prompt_logprobs": 3},
}


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


@pytest.mark.one_of(1, slow=2)  # leaves each sampling and each chunk
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


def test_beside_other_sessions(demo: Engine, prompt: list[int]) -> None:
    """Steps that decode and that read other prompts; a place that is lost halfway."""
    engine, alone = demo.sibling(), demo.sibling()
    engine.scheduler._pace = PrefillPace(9, None)
    writing = SamplingParams(max_tokens=24)
    (expected,) = alone.generate([prompt], writing, SpeculationConfig(method="ar"))
    writer = engine.submit(Request(prompt, writing, SpeculationConfig(method="ar")))
    params = SamplingParams(max_tokens=1, **SAMPLINGS["greedy"])
    sessions = [
        engine.submit(
            Request(
                prompt[: 5 + seed], params,
                continuations=random_continuations(seed, demo.target.vocab_size),
            )
        )
        for seed in range(4)
    ]  # fmt: skip
    parked = sessions[1]
    while parked.state is SessionState.WAITING or engine.target.prefill_left(parked) > 9:
        engine.step()
    engine.scheduler.park(parked.session_id)
    engine.step()
    engine.scheduler.unpark(parked.session_id)
    while engine.has_work:
        engine.step()
    assert writer.output_ids == expected.output_ids
    for session in sessions:
        assert isinstance(session, ScoredTree)
        assert session.finish_reason == "length"
        check(engine, session, alone)
    assert parked.stats.num_prefill_forwards > sessions[0].stats.num_prefill_forwards


def test_the_prompts_entries_stay_for_the_next_one(demo: Engine, prompt: list[int]) -> None:
    engine = demo.sibling()
    long = prompt * 4
    params = SamplingParams(max_tokens=1)
    request = Request(long, params, continuations=[[5, 6], [5, 7, 8], []], tenant="a")
    target = engine.local_target
    assert target.prefixes is not None
    scores = []
    hits = []
    for _ in range(2):
        before = target.prefixes.num_hit
        session = read(engine, request)
        scores.append([told.logprobs for told in session.scores()])
        hits.append(target.prefixes.num_hit - before)
    assert hits[0] == 0
    assert hits[1] >= len(long) // 2
    assert scores[0] == scores[1]


def test_what_is_wrong_is_named(demo: Engine, prompt: list[int]) -> None:
    engine = demo.sibling()
    size, context = demo.target.vocab_size, demo.target.context_length
    one = SamplingParams(max_tokens=1)
    for request, field, allowed in (
        ({"continuations": [[1], [1, size]]}, "continuations[1][1]", f"[0, {size})"),
        ({"continuations": [[-1]]}, "continuations[0][0]", f"[0, {size})"),
        ({"continuations": [[1], [1] * (context - len(prompt))]}, "continuations[1]", "fewer"),
        ({"continuations": [[1]] * 257}, "continuations", "at most 256 sequences"),
        ({"continuations": [[1] * 100] * 164}, "continuations", "at most 16384 token ids"),
        ({"params": SamplingParams(max_tokens=2)}, "max_tokens", "1 with"),
        ({"params": SamplingParams(max_tokens=1, regex="a")}, "regex", "none with"),
        ({"params": SamplingParams(max_tokens=1, logit_bias={size: 1})}, "logit_bias", "ids"),
        ({"prediction": [4]}, "prediction", "nothing with"),
        ({"committed": [4]}, "committed_token_ids", "nothing with"),
        ({"speculation": SpeculationConfig(method="ar")}, "speculation", "nothing with"),
        ({"prompt_ids": []}, "prompt", "at least one token"),
        ({"prompt_ids": [size]}, "prompt_token_ids[0]", f"[0, {size})"),
    ):
        given: dict[str, Any] = {
            "prompt_ids": prompt, "params": one, "continuations": [[1]], **request
        }  # fmt: skip
        with pytest.raises(InvalidArgument) as caught:
            engine.submit(Request(**given))
        assert caught.value.field == field
        assert allowed in str(caught.value)


def test_a_tree_that_never_fits_is_refused(demo: Engine, prompt: list[int]) -> None:
    small = load_engine(kv_tokens=64, limits=EngineLimits(max_sessions=4))
    one, alone = SamplingParams(max_tokens=1), demo.sibling()
    room = 64 - len(prompt) - 2  # one token for what is generated, and one beside
    fitting = [[1] * (room - 3), [2, 3, 4]]
    check(small, read(small, Request(prompt, one, continuations=fitting)), alone)
    with pytest.raises(ResourceExhausted, match=r"65 KV entries.*fewer continuations"):
        small.submit(Request(prompt, one, continuations=[*fitting, [5]]))


def test_groups(demo: Engine) -> None:
    rng = random.Random(3)
    for _ in range(50):
        base = [rng.randrange(4) for _ in range(12)]
        sequences = [
            base[: rng.randint(1, 12)] + [rng.randrange(4) for _ in range(rng.randint(0, 6))]
            for _ in range(rng.randint(1, 20))
        ]
        most = {"most_members": rng.randint(1, 9), "most_tokens": rng.randint(0, 60),
                "most_positions": rng.randint(10, 60)}  # fmt: skip
        groups = shared_beginnings(sequences, **most)
        assert sorted(i for group in groups for i in group.members) == [*range(len(sequences))]
        for group in groups:
            members = [sequences[i] for i in group.members]
            rests = [each[group.length :] for each in members]
            assert all(each[: group.length] == members[0][: group.length] for each in members)
            tree, ends = token_tree(rests)
            for rest, end in zip(rests, ends, strict=True):
                assert [int(tree.token_ids[n]) for n in path_to(tree.parent_indices, end)] == rest
            steps = list(zip(tree.parent_indices.tolist(), tree.token_ids.tolist(), strict=True))
            assert len(set(steps)) == len(steps)  # nothing is there twice
            if len(members) > 1:
                assert len(members) <= most["most_members"]
                assert sum(map(len, rests)) <= most["most_tokens"]
                assert group.length + tree.num_nodes <= most["most_positions"]
                # No token more would be common to all of them.
                assert min(common_length(members[0], each) for each in members) == group.length


def test_what_hardly_shares_is_read_apart() -> None:
    most = {"most_members": 99, "most_tokens": 999, "most_positions": 999}
    few, half = [[1, *range(i, i + 19)] for i in (100, 200)], [[*range(10), i] for i in (30, 40)]
    groups = shared_beginnings([*few, *half], **most)
    assert sorted(group.members for group in groups) == [(0,), (1,), (2, 3)]
    assert shared_beginnings([], **most) == []


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("gpt2", "packed"),
        ("gpt2", "tree"),
        ("bloom", "paths"),
        ("mamba", "steps"),
        ("mamba2", "chunks"),
        ("gpt2", "recompute"),
    ],
)
def test_the_general_path(zoo: Path, kind: str, strategy: Any) -> None:
    """There a token's logits depend on what is computed beside it, by rounding."""
    runner = TransformersRunner(make_model(kind, zoo), device="cpu", strategy=strategy)
    engine = Engine(ModelTarget(runner), limits=EngineLimits(prefill_chunk=7))
    prompt = [5, 6, 7, 8, 9, 10]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    continuations = random_continuations(4, runner.vocab_size)
    session = read(engine, Request(prompt, params, continuations=continuations))
    for each, told in zip(continuations, session.scores(), strict=True):
        (single,) = engine.generate([[*prompt, *each]], params, SpeculationConfig(method="ar"))
        expected = [entry.logprob for entry in single.prompt_logprobs[1:]]
        entries = [*session.prompt_logprobs[1:], *told.logprobs]
        assert [entry.token_id for entry in entries] == [*prompt[1:], *each]
        assert [entry.logprob for entry in entries] == pytest.approx(expected, abs=1e-5)
        assert told.after.output_ids == single.output_ids
    assert runner.num_free == runner.kv_capacity
