"""Who waits for a place, for how long, and who is told to come back later."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config import SpeculationConfig
from paceline.engine import Engine, EngineLimits
from paceline.engine.waiting import WaitEstimate
from paceline.errors import InvalidArgument, ResourceExhausted
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session, SessionState
from tests.core.engines import Reference, small_engine

AR = SpeculationConfig(method="ar")
LONG = SamplingParams(max_tokens=40, ignore_eos=True)


def submit(engine: Engine, seed: int, *, length: int = 12, **given: Any) -> Session:
    prompt = random.Random(seed).choices(range(256), k=length)
    given = {"params": LONG, "speculation": AR, **given}
    return engine.submit(Request(prompt, **given))


def ends(engine: Engine, sessions: list[Session]) -> list[Session]:
    """The sessions in the order in which they end."""
    ended: list[Session] = []
    while engine.has_work:
        engine.step()
        ended += [s for s in sessions if s.finished and s not in ended]
    return ended


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


# --- priorities -----------------------------------------------------------------------------------


def test_a_lower_number_gets_the_next_place(tiny_folder: Path, reference: Reference) -> None:
    small = small_engine(tiny_folder, limits=EngineLimits(max_sessions=1))
    running = submit(small.engine, 0)
    small.engine.step()
    given = [0, 3, -2, 0, -2]
    sessions = [submit(small.engine, i, priority=number) for i, number in enumerate(given)]
    order = ends(small.engine, [running, *sessions])
    assert order == [running, *(sessions[i] for i in (2, 4, 0, 3, 1))]
    for session in order:
        assert session.output_ids == reference(session.token_ids[: session.prompt_length], LONG)


def test_a_higher_number_gives_way_even_if_it_is_older(
    tiny_folder: Path, reference: Reference
) -> None:
    small = small_engine(tiny_folder, kv_tokens=300)
    params = replace(LONG, max_tokens=100)
    sessions = [
        submit(small.engine, i, length=20, params=params, priority=1 if i == 0 else 0)
        for i in range(3)
    ]
    gave_way = set()
    while small.engine.has_work:
        small.engine.step()
        gave_way |= {
            i for i, s in enumerate(sessions) if s.state is SessionState.WAITING and s.output_ids
        }
    assert gave_way == {0}
    for session in sessions:
        assert session.output_ids == reference(session.token_ids[:20], params)
    small.assert_nothing_is_left()


def test_priorities_order_a_tenants_own_requests_alone(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder, limits=EngineLimits(max_sessions=2))
    greedy = [submit(small.engine, i, tenant="greedy", priority=-1000) for i in range(8)]
    small.engine.step()
    modest = submit(small.engine, 9, tenant="modest", priority=1000)
    order = ends(small.engine, [*greedy, modest])
    assert order.index(modest) < 4


@pytest.mark.parametrize("number", [-1001, 1001, 2**31])
def test_priorities_have_bounds(number: int) -> None:
    with pytest.raises(InvalidArgument, match="priority"):
        Request([1], priority=number)


# --- prompts --------------------------------------------------------------------------------------


def test_most_prompts_have_their_first_token_soon(tiny_folder: Path) -> None:
    """Equal shares would give all of them their first token at the end."""
    limits = EngineLimits(prefill_chunk=32, prefix_cache=False)
    small = small_engine(tiny_folder, limits=limits)
    params = replace(LONG, max_tokens=1)
    sessions = [submit(small.engine, i, length=64, params=params) for i in range(10)]
    steps: list[int] = []
    for step in range(1, 200):
        small.engine.step()
        done = sum(session.stats.first_token_at is not None for session in sessions)
        steps += [step] * (done - len(steps))
        if done == len(sessions):
            break
    assert steps[-1] <= 10 * 64 / 32 + 2
    assert sum(steps) / len(steps) < 0.7 * steps[-1]


def test_prompts_with_a_lower_number_are_read_first(tiny_folder: Path) -> None:
    limits = EngineLimits(prefill_chunk=32, prefix_cache=False)
    small = small_engine(tiny_folder, limits=limits)
    params = replace(LONG, max_tokens=1)
    later = [submit(small.engine, i, length=32, params=params) for i in range(4)]
    urgent = submit(small.engine, 9, length=200, params=params, priority=-1)
    assert ends(small.engine, [*later, urgent])[0] is urgent


# --- waiting too long -----------------------------------------------------------------------------


def test_the_estimate_of_a_wait() -> None:
    clock = Clock()
    wait = WaitEstimate(clock=clock)
    assert wait.seconds(10, 1000) == 0.0, "nothing is known"
    for _ in range(50):
        clock.now += 2.0
        wait.place_left(3)
    assert wait.seconds(4, 0) == pytest.approx(8.0)
    clock.now += 100.0
    wait.place_left(0)  # nothing waits any more: what comes now says nothing of a queue
    clock.now += 500.0
    wait.place_left(1)
    assert wait.seconds(1, 0) < 15.0
    wait.prompts_read(200, 1.0)
    assert wait.seconds(0, 1000) == pytest.approx(5.0)
    assert wait.seconds(1, 10_000) == pytest.approx(50.0)


def test_steps_that_read_little_do_not_refuse_a_crowd() -> None:
    """They take as long as the tokens of other sessions beside them, however little they read."""
    wait = WaitEstimate(clock=Clock())
    for _ in range(16):
        wait.prompts_read(256, 0.256)
    for _ in range(40):
        wait.prompts_read(16, 0.1)  # six times as long for each token
    assert 10.0 < wait.seconds(0, 10_000) < 25.0
    for _ in range(1000):  # so it goes on: that is what a prompt takes now
        wait.prompts_read(16, 0.1)
    assert wait.seconds(0, 10_000) == pytest.approx(62.5, rel=0.05)


def test_places_that_become_free_together_are_averaged() -> None:
    """Requests that are alike end together: 64 at once, every eight seconds."""
    clock = Clock()
    wait = WaitEstimate(64, clock)
    estimates = []
    for _ in range(6):
        clock.now += 8.0
        for _ in range(64):
            wait.place_left(40)
            estimates.append(wait.seconds(1, 0))
    assert not any(estimates[:64])  # nothing is known but that they leave at once
    assert all(0.04 < each < 0.2 for each in estimates[64:])  # 0.125


def engine_with_measured_places(folder: Path, **limits: Any) -> Engine:
    """Of two places one becomes free every two seconds."""
    given = EngineLimits(**{"max_sessions": 2, "max_wait_s": 9.0, **limits})
    engine = small_engine(folder, limits=given).engine
    clock = Clock()
    engine.scheduler._wait = wait = WaitEstimate(clock=clock)
    for _ in range(20):
        clock.now += 2.0
        wait.place_left(1)
    return engine


def test_a_request_that_would_wait_too_long_is_told_when_to_come_back(tiny_folder: Path) -> None:
    engine = engine_with_measured_places(tiny_folder)
    running = [submit(engine, i) for i in range(2)]
    engine.step()
    waiting = [submit(engine, i) for i in range(4)]  # the last one for 8 seconds
    with pytest.raises(ResourceExhausted, match=r"after about 10 s \(4 sessions wait") as caught:
        submit(engine, 8)
    assert caught.value.retry_after_s == pytest.approx(1.0)
    assert not ends(engine, [submit(engine, 9, priority=-1), *running, *waiting])[0].error


def test_a_tenant_waits_for_its_own_requests(tiny_folder: Path) -> None:
    engine = engine_with_measured_places(tiny_folder)
    for i in range(6):
        submit(engine, i, tenant="many")
        engine.step()
    with pytest.raises(ResourceExhausted):
        submit(engine, 8, tenant="many")
    submit(engine, 9, tenant="one")


def test_an_idle_engine_refuses_nothing(tiny_folder: Path) -> None:
    engine = engine_with_measured_places(tiny_folder, max_wait_s=1e-6)
    session = submit(engine, 0)
    assert ends(engine, [session]) == [session]


def test_only_steps_that_leave_prompts_unread_tell_how_fast_they_are_read(
    tiny_folder: Path,
) -> None:
    """One new token beside 60 sessions is no sign that a token takes a whole step."""
    engine = small_engine(tiny_folder, limits=EngineLimits(prefill_chunk=16)).engine
    submit(engine, 0, length=10)
    engine.step()
    assert engine.scheduler._wait.seconds(0, 1000) == 0.0
    submit(engine, 1, length=100)
    engine.step()
    assert engine.scheduler._wait.seconds(0, 1000) > 0.0


def test_prompts_ahead_count(tiny_folder: Path) -> None:
    engine = small_engine(tiny_folder, limits=EngineLimits(max_wait_s=3.0)).engine
    engine.scheduler._wait.prompts_read(100, 1.0)
    submit(engine, 0, length=250)  # it would read for 2.5 seconds
    engine.step()
    engine.scheduler._wait = WaitEstimate()
    engine.scheduler._wait.prompts_read(100, 1.0)
    submit(engine, 1, length=250)
    engine.scheduler.admit()
    with pytest.raises(ResourceExhausted, match="first token"):
        submit(engine, 2, length=100)
    submit(engine, 3, length=20)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_bad_limits(seconds: float) -> None:
    with pytest.raises(InvalidArgument, match="max_wait_s"):
        EngineLimits(max_wait_s=seconds)
