"""APAR: branches that a model opens itself, written in parallel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config import SpeculationConfig
from paceline.demo import FORKS_DIR
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, EngineLimits
from paceline.errors import InvalidArgument
from paceline.loading import load_engine
from paceline.models.base import Segment
from paceline.models.llama import LlamaRunner
from paceline.models.prefix_cache import BLOCK
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.together.forks import Address, ForkedAnswer, ForkTokens
from paceline.tokenizer import load_tokenizer
from paceline.train.forks import (
    CHILD,
    FACTS,
    FORK,
    answer_about,
    in_one_piece,
    measure,
    prompt_about,
)
from tests.modelzoo import END_OF_TEXT_ID, make_model

AR = SpeculationConfig(method="ar")
FIRST = ord("!")  # the character of token 0
TOKENS = ForkTokens(fork=ord("F") - FIRST, child=ord("G") - FIRST)
PROMPT = [letter - FIRST for letter in b"List_of_things:"]
# Few tokens, so that a random model often forks and often ends.
LETTERS = (*(letter - FIRST for letter in b"abcdefgh"), TOKENS.fork, END_OF_TEXT_ID)
RANDOM = SamplingParams(max_tokens=60, temperature=1.0, allowed_token_ids=LETTERS)
SEEDS = (12, 39, 40)


@pytest.fixture
def runner(zoo: Path) -> LlamaRunner:
    return LlamaRunner(make_model("llama", zoo))


@pytest.fixture
def engine(runner: LlamaRunner, zoo: Path) -> Engine:
    return Engine(
        ModelTarget(runner), {"draft_model": DraftModel(runner)},
        tokenizer=load_tokenizer(make_model("llama", zoo)), eos_token_ids=[END_OF_TEXT_ID],
        limits=EngineLimits(max_sessions=512),
    )  # fmt: skip


def written(
    engine: Engine,
    params: SamplingParams = RANDOM,
    speculation: SpeculationConfig = AR,
    **more: int,
) -> ForkedAnswer:
    answer = ForkedAnswer(engine, TOKENS, params, speculation, **more)
    for _ in answer.write(PROMPT):
        pass
    return answer


def outputs(answer: ForkedAnswer) -> dict[Address, list[int]]:
    return {address: each.session.output_ids for address, each in answer.branches.items()}


def path_above(answer: ForkedAnswer, address: Address) -> list[int]:
    """The tokens from the prompt to where a branch begins, put together from its ancestors."""
    path = list(PROMPT)
    for depth, number in enumerate(address):
        ancestor = answer.branches[address[:depth]]
        path += [*ancestor.session.output_ids[: ancestor.forks[number] + 1], TOKENS.child]
    return path


@pytest.mark.parametrize("seed", SEEDS)
def test_branches_in_parallel_are_those_one_after_another(engine: Engine, seed: int) -> None:
    params = replace(RANDOM, seed=seed)
    together = written(engine, params)
    alone = written(engine, params, parallel=False)
    assert len(together.branches) > 3
    assert max(map(len, together.branches)) > 1, "branches have branches"
    assert outputs(together) == outputs(alone)
    assert together.text == alone.text
    assert engine.local_target.num_free == engine.local_target.kv_capacity


@pytest.mark.parametrize("seed", SEEDS)
def test_a_branch_sees_its_ancestors_alone(engine: Engine, seed: int) -> None:
    """It is what an ordinary generation writes behind the path to it."""
    answer = written(engine, replace(RANDOM, seed=seed))
    for address, branch in answer.branches.items():
        path = path_above(answer, address)
        left = RANDOM.max_tokens - (len(path) - len(PROMPT))
        params = replace(RANDOM, seed=branch.session.params.seed, max_tokens=left)
        ordinary = engine.sibling().generate([path], params, AR)[0]
        assert ordinary.output_ids == branch.session.output_ids
    seeds = {branch.session.params.seed for branch in answer.branches.values()}
    assert len(seeds) == len(answer.branches), "siblings draw with noise of their own"
    assert answer.branches[()].session.params.seed == seed


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_are_the_longest_path(engine: Engine, seed: int) -> None:
    """In tokens, a branch's *child* included: it is given in the step that reads the fork."""
    answer = written(engine, replace(RANDOM, seed=seed))
    assert len(answer.branches) > 3
    assert answer.num_steps == answer.longest_path < answer.num_tokens
    ends = [
        len(path_above(answer, address)) - len(PROMPT) + len(output)
        for address, output in outputs(answer).items()
    ]
    assert answer.longest_path == max(ends) <= RANDOM.max_tokens
    assert answer.num_tokens == sum(map(len, outputs(answer).values())) + len(answer.branches) - 1


def test_one_after_another_takes_a_step_for_each_token(engine: Engine) -> None:
    answer = written(engine, replace(RANDOM, seed=39), parallel=False)
    # A fork whose whole blocks an ended branch has left in the cache is not read again.
    cached = sum((len(path_above(answer, address)) - 1) % BLOCK == 0 for address in answer.branches)
    assert answer.num_tokens - cached <= answer.num_steps <= answer.num_tokens


@pytest.mark.parametrize("seed", SEEDS)
def test_a_branch_reads_only_what_no_whole_block_has(
    engine: Engine, runner: LlamaRunner, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    forward = runner.forward

    def count(segments: list[Segment], *arguments: object, **more: object) -> object:
        rows.append(sum(segment.num_rows for segment in segments))
        return forward(segments, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "forward", count)
    answer = written(engine, replace(RANDOM, seed=seed))
    expected = len(PROMPT) - 1 + sum(map(len, outputs(answer).values()))
    for address in answer.branches:
        if address:
            above = len(path_above(answer, address))
            # The branch that forked has computed all but the fork, and *child* is the first row.
            expected += above - 1 - (above - 2) // BLOCK * BLOCK
    assert sum(rows) == expected


def test_a_finished_branch_frees_its_entries(engine: Engine) -> None:
    answer = ForkedAnswer(engine, TOKENS, replace(RANDOM, seed=33), AR)
    target = engine.local_target
    assert isinstance(target.runner, LlamaRunner)
    freed = 0
    ends: list[Address] = []
    for piece in answer.write(PROMPT):
        if piece.finished:
            ends.append(piece.address)
        open_ones = {
            slot
            for branch in answer.branches.values()
            if not branch.session.finished
            for sequence in [target._sequences.get(branch.session.session_id)]
            if sequence is not None
            for slot in sequence.slots[: sequence.length].tolist()  # type: ignore[attr-defined]
        }
        used = target.kv_capacity - target.num_free
        assert used == len(open_ones)
        freed += bool(ends) and used < answer.num_tokens
    assert set(ends) == set(answer.branches)
    assert freed, "some branch ended before the others"
    assert target.num_free == target.kv_capacity


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_the_steps_and_no_token(engine: Engine, temperature: float) -> None:
    params = replace(RANDOM, seed=40, temperature=temperature)
    drafts = SpeculationConfig(method="draft_model", length="fixed", num_speculative_tokens=4)
    drafted = written(engine, params, drafts)
    plain = written(engine.sibling(), params)  # with what the first one has left in the cache
    assert outputs(drafted) == outputs(plain)
    assert drafted.text == plain.text
    assert drafted.num_steps < plain.num_steps


def test_the_text_is_in_the_trees_order(engine: Engine) -> None:
    answer = ForkedAnswer(engine, TOKENS, replace(RANDOM, seed=39), AR)
    texts: dict[Address, str] = {}
    for piece in answer.write(PROMPT):
        texts[piece.address] = texts.get(piece.address, "") + piece.text
    control = (TOKENS.fork, END_OF_TEXT_ID)

    def in_order(address: Address) -> str:
        branch, number, found = answer.branches[address], 0, ""
        for token in branch.session.output_ids:
            found += "" if token in control else chr(token + FIRST)
            if token == TOKENS.fork and (*address, number) in answer.branches:
                found += in_order((*address, number))
                number += 1
        return found

    assert answer.text == in_order(())
    for address, branch in answer.branches.items():
        own = [chr(t + FIRST) for t in branch.session.output_ids if t not in control]
        assert texts[address] == "".join(own), "pieces are marked by their branch"


def test_limits_hold_and_do_not_depend_on_the_order(engine: Engine) -> None:
    params = replace(RANDOM, seed=40)
    whole = written(engine, params)
    assert max(len(branch.forks) for branch in whole.branches.values()) > 2
    for limits in ({"max_forks": 2}, {"max_depth": 1}, {"max_depth": 0}):
        few = written(engine.sibling(), params, **limits)
        one_by_one = written(engine.sibling(), params, **limits, parallel=False)
        assert outputs(few) == outputs(one_by_one)
        assert set(few.branches) < set(whole.branches)
        assert all(output == outputs(whole)[a] for a, output in outputs(few).items())
        assert all(len(a) <= limits.get("max_depth", 3) for a in few.branches)
        assert all(len(b.forks) <= limits.get("max_forks", 16) for b in few.branches.values())
    short = written(engine.sibling(), replace(params, max_tokens=12))
    assert short.longest_path <= 12


def test_a_reader_that_stops_leaves_nothing_behind(engine: Engine) -> None:
    answer = ForkedAnswer(engine, TOKENS, replace(RANDOM, seed=39), AR)
    for place, _ in enumerate(pieces := answer.write(PROMPT)):
        if place == 20:
            break
    pieces.close()
    assert not engine.sessions
    assert engine.local_target.num_free == engine.local_target.kv_capacity


def test_bad_input_is_named(engine: Engine, runner: LlamaRunner) -> None:
    assert engine.tokenizer is not None
    assert ForkTokens.named(engine.tokenizer, "F", "G") == TOKENS
    with pytest.raises(InvalidArgument, match="fork: got 'two'"):
        ForkTokens.named(engine.tokenizer, "two", "G")
    with pytest.raises(InvalidArgument, match="child: got 'F'"):
        ForkTokens.named(engine.tokenizer, "F", "F")
    with pytest.raises(InvalidArgument, match="engine: got 'without a tokenizer'"):
        ForkedAnswer(Engine(ModelTarget(runner)), TOKENS)
    with pytest.raises(InvalidArgument, match="max_forks: got -1"):
        ForkedAnswer(engine, TOKENS, max_forks=-1)
    with pytest.raises(InvalidArgument, match="prompt"):
        next(ForkedAnswer(engine, TOKENS).write([]))


# --- the model that ships -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["suffix_decoding", "token_recycling", "lookahead"])
def test_the_shipped_model_writes_lists_in_branches(method: str) -> None:
    names = list(FACTS)[2:7]
    answers = []
    for how in (AR, SpeculationConfig(method=method, length="fixed")):
        engine = load_engine(FORKS_DIR)
        assert engine.tokenizer is not None
        tokens = ForkTokens.named(engine.tokenizer, FORK, CHILD)
        answer = ForkedAnswer(engine, tokens, SamplingParams(max_tokens=200), how)
        for _ in answer.write(engine.tokenizer.encode(prompt_about(names))):
            pass
        answers.append(answer)
    plain, drafted = answers
    assert plain.text == in_one_piece(answer_about(names))
    assert outputs(drafted) == outputs(plain)
    assert len(plain.branches) == 1 + 5 + 10
    assert plain.num_steps == plain.longest_path < plain.num_tokens / 3
    assert drafted.num_steps < plain.num_steps


def test_what_the_shipped_model_gets_right() -> None:
    """On lists that it was not trained on, beside the same text in one piece."""
    forked = measure(FORKS_DIR, forked=True, count=10)
    whole = measure(FORKS_DIR, forked=False, count=10)
    assert forked.right >= 0.8
    assert forked.num_steps < 0.5 * whole.num_steps
