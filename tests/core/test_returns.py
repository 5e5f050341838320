"""Refused requests come back at times of their own, and then go before newcomers."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.config import SpeculationConfig
from paceline.engine import Engine, EngineLimits
from paceline.engine.returns import EXPECTED_S, LONGEST_S, Returns
from paceline.engine.waiting import WaitEstimate
from paceline.errors import ResourceExhausted
from paceline.lengths.experience import experience_of
from tests.core.engines import small_engine
from tests.core.test_waiting import Clock, submit

GROUP = "", 0


def one(number: int) -> Callable[[], int]:
    return lambda: number


def test_each_goes_before_newcomers_and_those_told_later() -> None:
    clock = Clock()
    returns = Returns(10, clock)
    assert returns.promise(GROUP, one(1), 4.2) == 5.0  # as Retry-After has it
    assert returns.promise(GROUP, one(2), 7.0) == 7.0
    assert [returns.num_before(GROUP, one(i)) for i in (1, 2, 3)] == [0, 1, 2]
    assert returns.num_before(("another", 0), one(3)) == 0
    returns.came(GROUP, one(1))
    assert [returns.num_before(GROUP, one(i)) for i in (1, 2, 3)] == [1, 0, 1]
    assert returns.promise(GROUP, one(2), 9.0) == 9.0  # once more: it is still one
    assert returns.num_before(GROUP, one(3)) == 1


def test_what_does_not_come_back_is_forgotten() -> None:
    clock = Clock()
    returns = Returns(10, clock)
    for i in range(50):
        returns.promise((str(i), 0), one(i), 1.0)
    clock.now = 1.1 + EXPECTED_S
    assert returns.num_before(("7", 0), one(0)) == 0
    returns.promise(("late", 0), one(0), 1.0)
    assert list(returns._due) == [("late", 0)]


def test_times_and_numbers_are_bounded() -> None:
    returns = Returns(3, Clock())
    assert returns.promise(GROUP, one(0), 0.0) == 1.0
    assert returns.promise(GROUP, one(0), 1e9) == LONGEST_S
    for i in range(10):
        returns.promise(GROUP, one(i), 1.0)
    assert returns.num_before(GROUP, one(99)) == 3


# --- in an engine ---------------------------------------------------------------------------------


def crowded(folder: Path) -> tuple[Engine, Clock]:
    """One place, of which a new one becomes free every second; four may wait."""
    engine = small_engine(folder, limits=EngineLimits(max_sessions=1, max_waiting=4)).engine
    clock = Clock()
    engine.scheduler._wait = wait = WaitEstimate(clock=clock)
    engine.scheduler._returns = Returns(100, clock)
    for _ in range(20):
        clock.now += 1.0
        wait.place_left(1)
    return engine, clock


def refused(engine: Engine, seed: int, **given: object) -> float:
    with pytest.raises(ResourceExhausted, match="waiting already") as caught:
        submit(engine, seed, **given)
    return caught.value.retry_after_s


def test_each_is_told_another_time_and_goes_before_newcomers(tiny_folder: Path) -> None:
    engine, clock = crowded(tiny_folder)
    running = submit(engine, 0)
    engine.step()
    waiting = [submit(engine, i) for i in range(1, 5)]
    assert [refused(engine, i) for i in range(5, 8)] == [1.0, 2.0, 3.0]
    engine.cancel(running.session_id)
    engine.step()
    assert len(engine.scheduler._waiting) == 3
    assert refused(engine, 9) == 4.0  # there is room, but others were told to come
    clock.now += 1.0
    submit(engine, 5)  # the first of them
    assert refused(engine, 9) == 3.0  # it is known
    assert refused(engine, 10) == 4.0
    for session in waiting:  # nearly empty: nobody is kept waiting for those who may not come
        engine.cancel(session.session_id)
    submit(engine, 11)


def test_no_group_waits_for_another(tiny_folder: Path) -> None:
    engine, _ = crowded(tiny_folder)
    submit(engine, 0)
    engine.step()
    sessions = [submit(engine, i) for i in range(1, 5)]
    for i in range(5, 10):
        refused(engine, i)
    engine.cancel(sessions[0].session_id)
    submit(engine, 10, priority=-1)
    assert refused(engine, 11, priority=-1) == 1.0


def test_refused_requests_take_no_turn_to_try_a_drafter(tiny_folder: Path) -> None:
    """In a crowd a few sessions try each drafter, and it is refused requests that come often."""
    limits = EngineLimits(max_sessions=6, max_waiting=1)
    engine = small_engine(tiny_folder, limits=limits).engine
    roster = experience_of(engine.length_context).roster
    auto = SpeculationConfig(method="auto")
    for i in range(7):
        submit(engine, i, speculation=auto)
    tried, refused_before = dict(roster._tried), dict(roster._refused)
    assert tried
    for i in range(7, 50):
        refused(engine, i, speculation=auto)
    assert roster._tried == tried
    assert roster._refused == refused_before


@pytest.mark.parametrize("seed", range(3))
def test_in_a_loop_of_many_clients_none_waits_much_longer_than_the_others(
    tiny_folder: Path, seed: int
) -> None:
    """Twenty clients, of which one at a time is served for a second and four may wait.

    A client that is served comes again at once. With the same time for all that are refused, whose
    turn it was would be chance.
    """
    engine, clock = crowded(tiny_folder)
    draw = random.Random(seed)
    coming = [(clock.now + draw.random(), client) for client in range(20)]
    heapq.heapify(coming)
    began: dict[int, float] = {}
    waits: dict[int, list[float]] = {client: [] for client in range(20)}
    queue: list[tuple[int, str]] = []
    serves, until = None, clock.now
    end = clock.now + 400.0
    while clock.now < end:
        clock.now = min(coming[0][0] if coming else end, until if queue or serves else end)
        if serves is not None and clock.now >= until:
            engine.cancel(serves[1])
            engine.scheduler.admit()
            heapq.heappush(coming, (clock.now + 0.05 * draw.random(), serves[0]))
            serves = None
        if coming and coming[0][0] <= clock.now:
            at, client = heapq.heappop(coming)
            began.setdefault(client, at)
            try:
                queue.append((client, submit(engine, client).session_id))
                engine.scheduler.admit()
            except ResourceExhausted as error:
                heapq.heappush(coming, (clock.now + error.retry_after_s, client))
        if serves is None and queue:
            serves, until = queue.pop(0), clock.now + 1.0
            waits[serves[0]].append(clock.now - began.pop(serves[0]))
    counts = [len(each) for each in waits.values()]
    assert sum(counts) >= 395  # the server was never idle
    assert min(counts) >= 17
    assert max(max(each) for each in waits.values()) < 1.5 * 20
