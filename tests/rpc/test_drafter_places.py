"""Where sessions draft: joins, leaves, slow drafters and hysteresis, on a clock of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from paceline.rpc.drafter_places import (
    FORGET_S,
    PAYS,
    REBALANCE_S,
    DrafterLoad,
    DrafterPlaces,
    Forecast,
)

FRAME_S = 0.1  # between two frames of a target


class World:
    """Targets and drafters; a frame at a drafter waits ``cost(number of its sessions)`` seconds."""

    def __init__(self, costs: Mapping[str, Callable[[int], float]], phases: list[float]) -> None:
        self.costs = dict(costs)
        self.targets = [DrafterPlaces(phase) for phase in phases]
        self.loads = [{a: DrafterLoad() for a in costs} for _ in phases]
        self.now = 0.0
        self.num_moves = 0

    @property
    def sessions(self) -> Counter[str]:
        return Counter(a for places in self.targets for a in places.of.values())

    def open(self, count: int) -> None:
        for places, loads in zip(self.targets, self.loads, strict=True):
            self.tell()
            for i in range(count):
                places.place(f"s{i}", loads, self.now)

    def join(self, address: str, cost: Callable[[int], float]) -> None:
        self.costs[address] = cost
        for loads in self.loads:
            loads[address] = DrafterLoad()

    def leave(self, address: str) -> None:
        del self.costs[address]
        for loads in self.loads:
            del loads[address]

    def tell(self) -> None:
        """Replies to frames and probes: how many sessions each drafter has."""
        for loads in self.loads:
            for address, load in loads.items():
                load.sessions = self.sessions[address]

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += FRAME_S
            for places, loads in zip(self.targets, self.loads, strict=True):
                for session_id in list(places.of):
                    places.place(session_id, loads, self.now)
                self.num_moves += len(places.rebalance(set(places.of), loads, self.now))
            self.tell()
            for places, loads in zip(self.targets, self.loads, strict=True):
                for address in set(places.of.values()):
                    wait = self.costs[address](self.sessions[address])
                    loads[address].observe(wait, self.now)


def fast(count: int) -> float:
    return 0.008 + 0.002 * count


def slow(count: int) -> float:
    return 10 * fast(count)


def test_new_sessions_spread() -> None:
    world = World({"a": fast, "b": fast, "c": fast}, [0.5])
    world.open(6)
    assert set(world.sessions.values()) == {2}
    assert world.num_moves == 0


def test_a_session_stays_where_it_is() -> None:
    world = World({"a": fast, "b": fast}, [0.5])
    world.open(1)
    (address,) = world.targets[0].of.values()
    world.run(60)
    assert list(world.targets[0].of.values()) == [address]


def test_a_drafter_that_joins_gets_its_share() -> None:
    world = World({"a": fast}, [0.5])
    world.open(8)
    world.run(2)
    world.join("b", fast)
    world.run(8)
    assert world.sessions["b"] in (3, 4, 5)


def test_ten_targets_share_a_drafter_that_joins() -> None:
    """All see it empty at the same moment, and none of them knows what the others do."""
    world = World({"a": fast}, [i / 10 for i in range(10)])
    world.open(4)
    world.run(2)
    world.join("b", fast)
    most = 0
    for _ in range(100):
        world.run(0.1)
        most = max(most, world.sessions["b"])
    assert 15 <= world.sessions["b"] <= 25
    assert most <= 26  # they did not all run over to it
    moved = world.num_moves
    world.run(60)
    assert world.num_moves - moved <= 4  # and there is peace


def test_a_drafter_that_leaves_loses_its_sessions_at_once() -> None:
    world = World({"a": fast, "b": fast, "c": fast}, [0.0, 0.5])
    world.open(6)
    world.run(1)
    world.leave("b")
    world.run(FRAME_S)
    assert set(world.sessions) == {"a", "c"}
    assert sum(world.sessions.values()) == 12
    assert abs(world.sessions["a"] - world.sessions["c"]) <= 2


@pytest.mark.parametrize("phase", [0.0, 0.5, 0.99])
def test_a_slow_drafter_loses_its_sessions(phase: float) -> None:
    """Within a bounded time: a share of 1 - (its wait / the other's) / 2 of them at every look."""
    world = World({"a": fast, "b": fast}, [phase])
    world.open(16)
    world.run(1)
    assert world.sessions["a"] == world.sessions["b"] == 8
    world.costs["a"] = slow
    for session in range(8):
        world.run(5 * REBALANCE_S)
        assert world.sessions["a"] <= max(1, 6 - session), session
    # One session waits 0.1 s at the slow one, and 0.04 s with fifteen others at the fast one.
    assert world.sessions["a"] == 0


def test_a_drafter_that_was_slow_gets_sessions_again() -> None:
    world = World({"a": fast, "b": fast}, [0.5])
    world.open(8)
    world.run(1)
    world.costs["a"] = slow
    world.run(15)
    assert world.sessions["a"] == 0
    world.costs["a"] = fast
    world.run(FORGET_S + 10)
    assert world.sessions["a"] >= 3


def test_a_slow_drafter_that_stays_slow_is_tried_rarely() -> None:
    world = World({"a": slow, "b": fast}, [0.5])
    world.open(8)
    world.run(20)
    assert world.sessions["a"] == 0
    moved = world.num_moves
    world.run(3 * FORGET_S)
    assert world.sessions["a"] <= 1
    assert world.num_moves - moved <= 16


def test_noise_moves_nothing() -> None:
    """Waits that differ by less than a move has to gain."""
    noise = iter(range(10**9))

    def noisy(count: int) -> float:
        return fast(count) * (1 + 0.14 * (1 if next(noise) % 3 else -1))

    world = World({"a": noisy, "b": noisy}, [0.99])
    world.open(8)
    world.run(60)
    assert world.num_moves == 0


def test_a_move_has_to_pay() -> None:
    loads = {"a": DrafterLoad(), "b": DrafterLoad()}
    places = DrafterPlaces(0.999)
    for i in range(4):
        places.place(f"s{i}", loads, 0.0)
    assert Counter(places.of.values()) == {"a": 2, "b": 2}
    now = 0.0
    for ratio, moves in ((PAYS + 0.02, 0), (PAYS - 0.02, 1)):
        # At b with one more session of its then three, expected: 3/2 of its wait.
        for load, wait in ((loads["a"], 1.0), (loads["b"], ratio * 2 / 3)):
            load.measured_at = -1e9
            load.observe(wait, now)
        assert len(places.rebalance({"s0", "s1", "s2", "s3"}, loads, now)) == moves
        now += REBALANCE_S


def test_sessions_with_a_draft_under_way_stay() -> None:
    loads = {"a": DrafterLoad(), "b": DrafterLoad()}
    places = DrafterPlaces(0.999)
    for i in range(8):
        places.place(f"s{i}", {"a": loads["a"]}, 0.0)
    loads["a"].observe(1.0, 0.0)
    moves = places.rebalance({"s3"}, loads, 0.0)
    assert [move.session_id for move in moves] == ["s3"]
    assert places.of["s3"] == "b"


def test_a_session_without_any_drafter_waits_for_one() -> None:
    places = DrafterPlaces(0.0)
    assert places.place("s", {}, 0.0) == ""
    assert places.of == {"s": ""}
    assert places.rebalance({"s"}, {}, 0.0) == []
    assert places.place("s", {"a": DrafterLoad()}, 1.0) == "a"


def flat(count: int) -> float:
    return 0.01


def shared(count: int) -> float:
    return 0.004 * count


@pytest.mark.parametrize("cost", [flat, shared, fast])
@pytest.mark.parametrize("count", [1, 3, 5, 9])
@pytest.mark.parametrize("drafters", [2, 4])
def test_sessions_settle(cost: Callable[[int], float], count: int, drafters: int) -> None:
    """Whatever a session adds to the wait, and also if sessions do not divide evenly."""
    world = World({f"d{i}": cost for i in range(drafters)}, [0.2, 0.7])
    world.open(count)
    world.run(20)
    moved = world.num_moves
    world.run(60)
    assert world.num_moves - moved <= 2


@pytest.mark.parametrize("cost", [flat, shared, fast])
def test_what_a_session_adds_is_learnt_when_numbers_change(cost: Callable[[int], float]) -> None:
    """And holds for drafters whose own number has not changed, also for slower ones."""
    loads = {"a": DrafterLoad(), "b": DrafterLoad()}
    for sessions in (8, 6):
        for _ in range(40):
            loads["a"].sessions, loads["b"].sessions = sessions, 4
            loads["a"].observe(cost(sessions), 1.0)
            loads["b"].observe(3 * cost(4), 1.0)
    forecast = Forecast(loads, 1.0)
    for more in (0, 1, 2):
        assert forecast.wait("a", more) == pytest.approx(cost(6 + more), rel=0.1)
        assert forecast.wait("b", more) == pytest.approx(3 * cost(4 + more), rel=0.2)
