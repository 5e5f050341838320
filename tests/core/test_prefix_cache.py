"""Prefixes that outlive their sessions: the same bits, the longest unused go, nothing leaks."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import SpeculationConfig
from paceline.engine import Engine, EngineLimits
from paceline.methods import METHODS
from paceline.models.kv_cache import KVPool, PooledSequence
from paceline.models.llama import LlamaRunner
from paceline.models.prefix_cache import BLOCK
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from tests.core.engines import LOCAL_METHODS, Small, has_tokens_of_ar, small_engine
from tests.modelzoo import make_model

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = replace(PARAMS, temperature=1.0, seed=3)
AR = SpeculationConfig(method="ar")


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def hits(small: Small) -> int:
    prefixes = small.engine.local_target.prefixes
    assert prefixes is not None
    return prefixes.num_hit


def run(engine: Engine, prompt: list[int], params: SamplingParams, method: str = "ar") -> Session:
    (session,) = engine.generate([prompt], params, SpeculationConfig(method=method))
    return session


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_entries_and_tokens_are_the_same_bits(zoo: Path, dtype: torch.dtype) -> None:
    """A prompt that begins with another session's prompt and answer, against a fresh engine."""
    folder = make_model("llama", zoo)
    first, tail = tokens(50), tokens(9, seed=1)
    found: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []
    for warm in (False, True):
        runner = LlamaRunner(folder, dtype=dtype, kv_tokens=1000)
        assert runner.batch_invariant
        target = ModelTarget(runner)
        engine = Engine(target)
        answer = run(engine, first, SAMPLED).output_ids if warm else found_answer(folder, dtype)
        session = engine.submit(Request([*first, *answer, *tail], SAMPLED, AR))
        while session.length < session.max_length - 1:
            engine.step()
        assert runner.prefixes is not None
        hit = runner.prefixes.num_hit
        assert hit == ((len(first) + len(answer) - 1) // BLOCK * BLOCK if warm else 0)
        keys, values = runner.keys_and_values(target._sequences[session.session_id])
        found.append((session.output_ids, keys, values))
    cold, warm_run = found
    assert warm_run[0] == cold[0]
    assert torch.equal(warm_run[1], cold[1])
    assert torch.equal(warm_run[2], cold[2])


def found_answer(folder: Path, dtype: torch.dtype) -> list[int]:
    return run(
        Engine(ModelTarget(LlamaRunner(folder, dtype=dtype))), tokens(50), SAMPLED
    ).output_ids


@pytest.mark.one_of(3, slow=5)
@pytest.mark.parametrize("method", LOCAL_METHODS)
def test_every_method_goes_on_from_a_cached_prefix(method: str, tiny_folder: Path) -> None:
    small = small_engine(tiny_folder)
    config = SpeculationConfig(method=method)
    params = PARAMS if has_tokens_of_ar(method, PARAMS) else None
    if params is None:
        pytest.skip("its tokens are AR's in law only")
    prompt = tokens(40)
    expected = run(small.engine, prompt, params).output_ids
    before = hits(small)
    (again,) = small.engine.generate([prompt], params, config)
    assert again.output_ids == expected
    method_reads_prompts = bool(
        {n.value for n in again.plan.needs} & {"hidden_states", "layer_states"}
    )
    # LongSpec's head begins with known tokens without states of the target.
    reads = method_reads_prompts and method != "longspec"
    assert (hits(small) > before) is not reads
    # What it left behind serves the next one as well.
    longer = [*prompt, *again.output_ids]
    fresh = small_engine(tiny_folder, limits=EngineLimits(prefix_cache=False))
    assert (
        run(small.engine, longer, params).output_ids == run(fresh.engine, longer, params).output_ids
    )
    small.assert_nothing_is_left()


def test_sessions_that_run_together_share_their_prompt(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder)
    prompt = tokens(64)
    first = small.engine.submit(Request(prompt, PARAMS, AR))
    while first.stats.first_token_at is None:
        small.engine.step()
    used = small.target.kv_capacity - small.target.num_free
    second = small.engine.submit(Request([*prompt, 1], PARAMS, AR))
    small.engine.step()
    small.engine.step()
    assert hits(small) == 48  # 63 entries are committed of the first one
    assert small.target.kv_capacity - small.target.num_free < used + 30
    while small.engine.has_work:
        small.engine.step()
    assert first.output_ids == second.token_ids[64 : 64 + 20] or second.output_ids
    small.assert_nothing_is_left()


def test_equal_prompts_that_are_read_at_once_end_up_on_the_same_entries(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder)
    sessions = [small.engine.submit(Request(tokens(64), PARAMS, AR)) for _ in range(4)]
    while any(s.stats.first_token_at is None for s in sessions):
        small.engine.step()
    used = small.target.kv_capacity - small.target.num_free
    assert used < 48 + 4 * 24
    while small.engine.has_work:
        small.engine.step()
    assert len({tuple(s.output_ids) for s in sessions}) == 1
    small.assert_nothing_is_left()


def test_the_longest_unused_goes_first(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder, kv_tokens=4 * 48)
    short = replace(PARAMS, max_tokens=1)
    a, b, c = tokens(33, 1), tokens(33, 2), tokens(33, 3)
    for prompt in (a, b, c, a):
        run(small.engine, prompt, short)
    assert hits(small) == 32
    run(small.engine, tokens(120, 4), short)  # needs memory: b is the one
    before = hits(small)
    run(small.engine, a, short)
    assert hits(small) == before + 32
    run(small.engine, b, short)
    assert hits(small) == before + 32
    prefixes = small.engine.local_target.prefixes
    assert prefixes is not None
    assert prefixes.num_evicted > 0
    small.assert_nothing_is_left()


def test_scopes_do_not_see_one_another(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder)
    for scope, hit in (("a", 0), ("b", 0), ("", 0), ("a", 32), ("b", 64)):
        small.engine.submit(Request(tokens(40), PARAMS, AR, tenant=scope))
        while small.engine.has_work:
            small.engine.step()
        assert hits(small) == hit, scope
    small.assert_nothing_is_left()


def test_a_failed_step_leaves_nothing_in_the_cache(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = small_engine(tiny_folder)
    session = small.engine.submit(Request(tokens(40), PARAMS, AR))
    broken = RuntimeError("broken")

    def fail(*arguments: object, **options: object) -> None:
        raise broken

    monkeypatch.setattr(small.engine.local_target, "verify", fail)
    small.engine.step()
    assert session.error is broken
    monkeypatch.undo()
    run(small.engine, tokens(40), PARAMS)
    assert hits(small) == 0
    small.assert_nothing_is_left()


def test_switched_off(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder, limits=EngineLimits(prefix_cache=False))
    assert small.engine.local_target.prefixes is None
    for _ in range(2):
        run(small.engine, tokens(40), PARAMS)
    assert small.target._pool.prefixes.num_queried == 0
    small.assert_nothing_is_left()


def test_lossy_depth_policies_neither_give_nor_take(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder)
    run(small.engine, tokens(40), PARAMS)
    before = hits(small)
    lossy = [m.name for m in METHODS.values() if m.depth_policy and m.drafter == "none"]
    assert lossy
    for method in (*lossy, *lossy):
        config = SpeculationConfig(method=method, allow_lossy=True)
        small.engine.generate([tokens(40)], PARAMS, config)
        assert hits(small) == before
    run(small.engine, tokens(40), PARAMS)
    assert hits(small) == before + 32


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_slots_are_never_lost_nor_owned_twice(data: st.DataObject) -> None:
    """Random appends, cuts, publications and ends against a dict of what each slot holds."""
    pool = KVPool(1, 12 * BLOCK, 1, 1, torch.float32, torch.device("cpu"))
    running: list[tuple[PooledSequence, list[int]]] = []
    content: dict[int, tuple[int, ...]] = {}  # by slot: the tokens up to it

    def append(sequence: PooledSequence, ids: list[int], new: list[int]) -> None:
        if len(new) > pool.num_free or len(ids) + len(new) > 8 * BLOCK:
            return
        slots = pool.append(sequence, range(-1, len(new) - 1))
        ids += new
        for i, slot in enumerate(slots):
            content[slot] = tuple(ids[: sequence.length + i + 1])
        pool.commit(sequence, range(len(new)))

    for _ in range(data.draw(st.integers(5, 40))):
        action = data.draw(
            st.sampled_from(["open", "open", "append", "append", "cut", "publish", "end"])
        )
        if action == "open" and len(running) < 6:
            prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=1)) * (3 * BLOCK)
            sequence = PooledSequence(8 * BLOCK + 8)
            pool.adopt(sequence, prompt, "")
            ids = prompt[: sequence.length]
            append(sequence, ids, prompt[sequence.length :])
            running.append((sequence, ids))
        elif running and action != "open":
            place = data.draw(st.integers(0, len(running) - 1))
            sequence, ids = running[place]
            if action == "append":
                append(sequence, ids, data.draw(st.lists(st.integers(0, 1), max_size=BLOCK)))
            elif action == "cut":
                length = data.draw(st.integers(0, sequence.length))
                pool.truncate(sequence, length)
                del ids[length:]
            else:
                pool.publish(sequence, ids, "")
                if action == "end":
                    pool.free(sequence)
                    running.pop(place)
        owned: list[int] = []
        for sequence, ids in running:
            assert sequence.length == len(ids)
            slots = sequence.slots[: sequence.length].tolist()
            for i, slot in enumerate(slots):
                assert content[slot] == tuple(ids[: i + 1])
            owned += slots[sequence.num_shared :]
        shared = {
            slot
            for sequence, _ in running
            for block in sequence.blocks
            for slot in block.slots.tolist()
        }
        assert len(owned) == len(set(owned))
        assert not shared & set(owned)
        assert pool.num_free + len(owned) + len(shared) == pool.capacity
    for sequence, _ in running:
        pool.free(sequence)
    assert pool.num_free == pool.capacity
    assert len(pool._free) + len(pool.prefixes.evict(pool.capacity)) == pool.capacity
    assert sorted(pool._free) == sorted(set(pool._free))
