"""KV memory that runs out: the youngest session gives way and resumes later; no token is lost."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.admission import MIN_PREFILL, PrefillPace
from paceline.config import SpeculationConfig
from paceline.drafters.client import ClientDrafter
from paceline.engine import Engine, EngineLimits, RoundEvent
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session, SessionState
from paceline.types import Draft
from tests.core.engines import Reference, Small, small_engine
from tests.fakes import AlwaysRight

LONG = SamplingParams(max_tokens=100, ignore_eos=True)
SAMPLED = replace(LONG, temperature=1.0, seed=8)
AR, CLIENT = SpeculationConfig(method="ar"), SpeculationConfig(method="client", node_budget=8)


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def num_preemptions(engine: Engine) -> int:
    return engine.take_counters().num_preemptions


def finish(small: Small, most: int = 3000) -> None:
    for _ in range(most):
        if not small.engine.has_work:
            break
        small.engine.step()
    small.assert_nothing_is_left()


@pytest.mark.one_of(1, slow=9)
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("params", [LONG, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "method",
    ["ar", "draft_model", "draft_model_tree", "prompt_lookup", "layer_skip", "suffix_decoding"],
)
def test_streams_go_on_with_the_tokens_of_ar(
    method: str, params: SamplingParams, prefix_cache: bool, tiny_folder: Path, reference: Reference
) -> None:
    limits = EngineLimits(prefix_cache=prefix_cache)
    small = small_engine(tiny_folder, kv_tokens=330, limits=limits)
    streamed: dict[str, list[int]] = {}
    rounds: dict[str, list[int]] = {}

    def note(event: RoundEvent) -> None:
        streamed.setdefault(event.session.session_id, []).extend(event.token_ids)
        rounds.setdefault(event.session.session_id, []).append(event.round)

    prompts = [tokens(4 + 5 * i, seed=i) for i in range(6)]
    config = SpeculationConfig(method=method)
    sessions = [
        small.engine.submit(Request(prompt, params, config, session_id=str(i)), on_event=note)
        for i, prompt in enumerate(prompts)
    ]
    most = 0
    while small.engine.has_work:
        small.engine.step()
        most = max(most, small.target.kv_capacity - small.target.num_free)
    assert num_preemptions(small.engine) > 0
    assert most > 250  # memory is used, not only promised
    for prompt, session in zip(prompts, sessions, strict=True):
        assert session.finish_reason == "length"
        assert not session.stats.drafter_lost
        assert session.output_ids == reference(prompt, params)
        assert streamed[session.session_id] == session.output_ids
        told = rounds[session.session_id]
        assert told == [*range(1, len(told) + 1)]
    small.assert_nothing_is_left()


def test_the_youngest_gives_way_and_comes_back_first(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder, kv_tokens=300)
    sessions = [small.engine.submit(Request(tokens(20, i), LONG, AR)) for i in range(3)]
    later = small.engine.submit(Request(tokens(150, 9), replace(LONG, max_tokens=5), AR))
    seen: list[Session] = []
    ends: list[Session] = []
    while small.engine.has_work:
        small.engine.step()
        for session in sessions:
            waits = session.state is SessionState.WAITING and session.output_ids
            if waits and session not in seen:
                seen.append(session)
            if session.finished and session not in ends:
                ends.append(session)
        # A session that gave way resumes before later arrivals begin.
        assert not later.output_ids or sessions[2].state is not SessionState.WAITING
    assert seen == [sessions[2]]  # the others together fit
    assert ends[-1] is sessions[2]
    small.assert_nothing_is_left()


def test_a_clients_draft_survives_while_its_session_waits(
    tiny_folder: Path, reference: Reference
) -> None:
    small = small_engine(tiny_folder, kv_tokens=260)
    drafter = small.engine.drafters["client"]
    assert isinstance(drafter, ClientDrafter)
    old = [small.engine.submit(Request(tokens(20, i), LONG, AR)) for i in range(2)]
    prompt, params = tokens(60, 7), replace(LONG, max_tokens=12)
    session = small.engine.submit(Request(prompt, params, CLIENT, session_id="client"))
    small.engine.step()
    assert session.state is not SessionState.WAITING
    expected = reference(prompt, params)
    offered = 0
    waited = False
    while small.engine.has_work:
        small.engine.step(wait_s=0)
        waiting = session.state is SessionState.WAITING
        if waiting and not waited:
            waited = True  # it drafts without knowing that it waits
            drafter.offer("client", Draft.chain(expected[offered : offered + 3]))
            offered = -1
        if all(s.finished for s in old) and offered >= 0 and not session.finished:
            drafter.offer("client", Draft.chain([]))
            offered = session.length - session.prompt_length
        if offered == -1 and session.output_ids:
            offered = len(session.output_ids)
            assert offered == 4  # the draft that waited with it, and one more
    assert waited
    assert session.output_ids == expected
    drafter.forget("client")
    small.assert_nothing_is_left()


def preempted(small: Small) -> Session:
    """Runs until the last of three sessions has given way after some tokens."""
    sessions = [small.engine.submit(Request(tokens(20, i), LONG, AR)) for i in range(3)]
    while not (sessions[2].output_ids and sessions[2].state is SessionState.WAITING):
        small.engine.step()
    return sessions[2]


def test_cancelling_a_session_that_has_given_way(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder, kv_tokens=300)
    session = preempted(small)
    assert small.engine.cancel(session.session_id)
    finish(small)
    assert session.finish_reason == "cancelled"


def test_truncating_a_session_that_has_given_way(tiny_folder: Path, reference: Reference) -> None:
    small = small_engine(tiny_folder, kv_tokens=300)
    session = preempted(small)
    before = len(session.output_ids)
    small.engine.truncate(session.session_id, session.prompt_length + 5)
    assert len(session.output_ids) == 5 < before
    finish(small)
    assert session.output_ids == reference(tokens(20, 2), LONG)


def test_short_prompts_do_not_wait_for_a_long_one_nor_it_for_them(tiny_folder: Path) -> None:
    """Prompts share the prefill of a step equally."""
    small = small_engine(tiny_folder, limits=EngineLimits(prefill_chunk=32, prefix_cache=False))
    params = replace(LONG, max_tokens=2)
    long = small.engine.submit(Request(tokens(400), params, AR))
    small.engine.step()
    steps = 0
    while long.stats.first_token_at is None:
        short = small.engine.submit(Request(tokens(12, steps), params, AR))
        for _ in range(3):
            small.engine.step()
        assert short.finished
        steps += 3
    assert steps <= 400 / 16 + 3  # half of each step is its own, though shorts never stop coming
    finish(small)


def test_each_fits_alone(tiny_folder: Path, reference: Reference) -> None:
    """With room for one session of the largest size at a time, all of them come to their end."""
    small = small_engine(tiny_folder, kv_tokens=130)
    prompts = [tokens(20, i) for i in range(4)]
    sessions = [small.engine.submit(Request(prompt, LONG, AR)) for prompt in prompts]
    finish(small)
    assert [s.output_ids for s in sessions] == [reference(p, LONG) for p in prompts]


@pytest.mark.slow
def test_random_sessions_in_little_memory(tiny_folder: Path, reference: Reference) -> None:
    """Sessions come, leave and give way in any order; those that finish have AR's tokens."""
    small = small_engine(
        tiny_folder, kv_tokens=300, limits=EngineLimits(max_sessions=5, prefill_chunk=24)
    )
    draw = random.Random(5)
    methods = ("ar", "draft_model", "draft_model_tree", "prompt_lookup")
    running: list[tuple[Session, list[int], SamplingParams]] = []
    for i in range(25):
        prompt = tokens(draw.randint(1, 50), draw.randint(0, 5))
        params = replace(SAMPLED, max_tokens=draw.randint(1, 220), seed=draw.randint(0, 3))
        config = SpeculationConfig(method=draw.choice(methods))
        running.append((small.engine.submit(Request(prompt, params, config)), prompt, params))
        for _ in range(draw.randint(0, 12)):
            small.engine.step()
        if i % 7 == 3:
            small.engine.cancel(draw.choice(running)[0].session_id)
    finish(small, 6000)
    assert num_preemptions(small.engine) > 0
    for session, prompt, params in running:
        if session.finish_reason != "cancelled":
            assert session.output_ids == reference(prompt, params)


def test_who_always_guesses_right_is_preempted_like_the_others(
    tiny_folder: Path, reference: Reference
) -> None:
    prompts = [tokens(20, i) for i in range(4)]
    known = {tuple(prompt): reference(prompt, LONG) for prompt in prompts}
    drafter = AlwaysRight(known, 256)
    small = small_engine(tiny_folder, kv_tokens=300, drafters={"always_right": drafter})
    config = SpeculationConfig(method="always_right")
    sessions = [small.engine.submit(Request(prompt, LONG, config)) for prompt in prompts]
    while small.engine.has_work:
        small.engine.step()
    assert num_preemptions(small.engine) > 0
    for prompt, session in zip(prompts, sessions, strict=True):
        assert session.output_ids == known[tuple(prompt)]
        assert session.stats.acceptance_rate == 1.0
    assert not drafter.opened


def test_prefill_beside_decoding_is_bounded_in_time_and_goes_on() -> None:
    """Against a machine where a token of the prompt costs as much as ten of them at its start."""
    pace = PrefillPace(256, 4.0)
    for _ in range(20):
        pace.observe(0.001, 4, 0)
    took, read = [], 0
    while read < 8192:
        room = pace.room(any_decoding=True)
        assert MIN_PREFILL <= room <= 256
        read += room
        took.append(0.001 + room * 2e-5 * (1 + 9 * read / 8192))
        pace.observe(took[-1], 4, room)
    late = took[20:]
    assert max(late) < 2 * 0.004
    assert sum(late) / len(late) > 0.002  # the prompt has most of the time that it may have
    assert pace.room(any_decoding=False) == 256


@pytest.mark.parametrize("num_seen", [1, 64])
def test_a_crowd_after_a_single_session_reads_its_prompts_at_once(num_seen: int) -> None:
    """Its steps take long because it is a crowd. Since some prompt is always being read then, no
    step without prefill shows that."""

    def seconds(num_decoding: int, num_read: int) -> float:
        return 0.005 + 0.001 * (num_decoding + num_read)

    pace = PrefillPace(256, 4.0)
    pace.observe(seconds(num_seen, 0), num_seen, 0)
    for _ in range(200):  # what is left at the end of a busy time
        pace.observe(seconds(1, 0), 1, 0)
    read = []
    for _ in range(100):
        read.append(room := min(150, pace.room(any_decoding=True)))
        pace.observe(seconds(48, room), 48, room)
    assert sum(read[:20]) / 20 > 40
    assert sum(read[50:]) / 50 > 100  # 53 ms without, 4 times as much with about 150 tokens


def test_steps_that_became_slower_do_not_stop_the_prompts() -> None:
    """Where even the least prefill seems to make a step too long, it is not the prefill."""
    pace = PrefillPace(256, 4.0)
    pace.observe(0.001, 4, 0)
    for _ in range(100):
        room = pace.room(any_decoding=True)
        pace.observe(0.01 + 1e-5 * room, 4, room)
    assert pace.room(any_decoding=True) > 100


def test_without_a_limit_a_step_reads_the_most() -> None:
    assert PrefillPace(256, None).room(any_decoding=True) == 256


def test_streams_with_a_paced_prefill_are_those_of_ar(
    tiny_folder: Path, reference: Reference
) -> None:
    small = small_engine(tiny_folder, limits=EngineLimits(prefill_stretch=1.5, prefill_chunk=32))
    prompts = [tokens(n, n) for n in (5, 300, 8, 200, 40)]
    sessions = []
    for prompt in prompts:
        sessions.append(small.engine.submit(Request(prompt, LONG, AR)))
        for _ in range(5):
            small.engine.step()
    finish(small)
    assert [s.output_ids for s in sessions] == [reference(p, LONG) for p in prompts]
