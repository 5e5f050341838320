"""Quotas that gateways share: how far all of them together may be from one gateway's quota."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from paceline.deployments.ledger import GATEWAY_GONE_S, Ledger
from paceline.rpc.quotas import OF_OPENS, OF_ROUNDS, SLICE, QuotaExceeded, SharedAccount
from paceline.rpc.tenants import Quotas

SYNC_S = 1.0


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Gateway:
    """One gateway's account of one tenant, and its calls of the ledger, on simulated time.

    Attributes:
        used: when, and how many.
    """

    name: str
    ledger: Ledger
    quotas: Quotas
    time: Time
    used: list[tuple[float, float]] = field(default_factory=list)
    num_syncs: int = 0
    refused_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.needs_sync = False
        self.account = SharedAccount("tenant 'alice'", self.quotas, self._need, self.time)
        self.last_sync = self.time.now

    def _need(self) -> None:
        self.needs_sync = True

    def sync(self) -> None:
        self.num_syncs += 1
        self.needs_sync, self.last_sync = False, self.time.now
        ask = self.account.ask()
        reply = self.ledger.sync(self.name, {"alice": ask})
        self.account.answered(reply.answers["alice"], reply.num_gateways)

    def tick(self) -> None:
        if self.needs_sync or self.time.now - self.last_sync >= SYNC_S:
            self.sync()

    def round(self, tokens: float = 0) -> bool:
        """A round, if the quotas have room."""
        if self.account.may_ask(OF_ROUNDS):
            self.sync()
        try:
            self.account.check_round()
        except QuotaExceeded as error:
            self.refused_s.append(error.retry_after_s)
            return False
        self.account.count_round()
        if tokens:
            self.account.count_tokens(int(tokens))
        self.used.append((self.time.now, tokens or 1))
        return True

    def open(self) -> bool:
        """A session, if the quotas have room."""
        if self.account.may_ask(OF_OPENS, session=True):
            self.sync()
        try:
            self.account.check_open(session=True)
        except QuotaExceeded:
            return False
        self.account.count_open(session=True)
        self.used.append((self.time.now, 1))
        return True


def gateways(count: int, quotas: Quotas) -> tuple[list[Gateway], Ledger, Time]:
    time = Time()
    ledger = Ledger(time)
    made = [Gateway(f"g{i}", ledger, quotas, time) for i in range(count)]
    for gateway in made:
        gateway.sync()
    return made, ledger, time


def most_in_any_window(made: list[Gateway], rate: float) -> float:
    """The largest excess of what was used in any stretch of time over ``rate`` times its length."""
    used = sorted(use for gateway in made for use in gateway.used)
    excess, low, total = 0.0, 0.0, 0.0
    for at, amount in used:
        low = min(low, total - rate * at)
        total += amount
        excess = max(excess, total - rate * at - low)
    return excess


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("rate", [0.5, 3, 40, 700])
def test_rounds_are_hardly_over_the_rate_or_under_it(count: int, rate: float) -> None:
    """At whichever gateway they come."""
    made, _, time = gateways(count, Quotas(rounds_per_second=rate))
    draw, start, seconds = random.Random(count), time.now, max(5.0, 200 / rate)
    favourite = made[0]
    while time.now < start + seconds:
        time.now += draw.expovariate(8 * rate)
        if draw.random() < 0.02:
            favourite = draw.choice(made)
        for gateway in made:
            gateway.tick()
        (favourite if draw.random() < 0.7 else draw.choice(made)).round()
    burst = max(1.0, rate)
    # What gateways held when the burst began.
    assert most_in_any_window(made, rate) <= burst * (1 + 1 / SLICE) + count
    assert all(0 < wait < 1.001 / min(rate, 20) for each in made for wait in each.refused_s)
    total = sum(len(gateway.used) for gateway in made)
    # One eighth of a burst may be elsewhere, and a whole unit with each gateway.
    assert total >= 0.9 * rate * seconds - burst / SLICE - count


def test_a_round_asks_nothing_while_there_is_enough() -> None:
    made, _, time = gateways(2, Quotas(rounds_per_second=1000, tokens_per_minute=600_000))
    made[0].num_syncs = 0
    for _ in range(2000):  # 2 s at half the rate
        time.now += 0.002
        made[0].tick()
        assert made[0].round(tokens=4)
        assert made[0].account.may_ask(OF_ROUNDS) is False  # the next one need not wait either
    assert made[0].num_syncs < 150  # a slice of 62 rounds each


@pytest.mark.parametrize("count", [1, 3])
def test_tokens_overdraw_as_at_one_gateway(count: int) -> None:
    """What runs is not cut off; what it took too much is paid before anything else."""
    rate, largest = 100.0, 900.0
    made, _, time = gateways(count, Quotas(tokens_per_minute=60 * rate))
    draw, start, seconds = random.Random(7), time.now, 300.0
    while time.now < start + seconds:
        time.now += draw.expovariate(2.0)
        for gateway in made:
            gateway.tick()
        draw.choice(made).round(tokens=draw.randrange(1, int(largest)))
    excess = most_in_any_window(made, rate)
    assert excess <= 60 * rate * (1 + 1 / SLICE) + count * largest
    total = sum(amount for gateway in made for _, amount in gateway.used)
    assert total >= 0.9 * rate * seconds


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("most", [1, 2, 7, 64])
def test_sessions_are_never_more_than_there_may_be(count: int, most: int) -> None:
    made, _, time = gateways(count, Quotas(max_sessions=most))
    draw = random.Random(most)
    refused = 0
    for _ in range(3000):
        time.now += draw.expovariate(200)
        for gateway in made:
            gateway.tick()
        opened = sum(gateway.account.num_sessions for gateway in made)
        assert opened <= most
        gateway = draw.choice(made)
        if draw.random() < 0.6:
            refused += not gateway.open()
        elif gateway.account.num_sessions:
            gateway.account.release_session()
            gateway.tick()  # it says so at once
    assert refused
    # A place that is free is there for any gateway, and none is lost.
    for gateway in made:
        while gateway.account.num_sessions:
            gateway.account.release_session()
        time.now += 2 * SYNC_S
        gateway.sync()
    last = made[-1]
    assert all(last.open() for _ in range(most))
    assert not any(gateway.open() for gateway in made)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_without_the_ledger_each_gateway_lets_its_part_through(count: int) -> None:
    rate, most = 30.0, 7
    made, _, time = gateways(count, Quotas(rounds_per_second=rate, max_sessions=most))
    for gateway in made:
        gateway.sync()  # each knows how many there are
    for gateway in made:
        gateway.account.ask()
        gateway.account.lost()
    start = time.now
    while time.now < start + 20:
        time.now += 0.003
        for gateway in made:
            assert not gateway.account.may_ask(OF_ROUNDS)
            gateway.round()
    assert most_in_any_window(made, rate) <= rate + count + 1
    assert sum(len(gateway.used) for gateway in made) >= 0.95 * rate * 20
    sessions = sum(gateway.open() for gateway in made for _ in range(10))
    assert most <= sessions <= count * math.ceil(most / count)


def test_a_ledger_that_starts_anew_counts_the_sessions_that_are_open() -> None:
    made, _, time = gateways(2, Quotas(max_sessions=4))
    assert all(gateway.open() for gateway in made for _ in range(2))
    ledger = Ledger(time)
    for gateway in made:
        gateway.ledger = ledger
        gateway.sync()
    assert not any(gateway.open() for gateway in made)


def test_a_gateway_that_is_gone_keeps_no_places() -> None:
    made, _, time = gateways(2, Quotas(max_sessions=3))
    assert all(made[0].open() for _ in range(3))
    assert not made[1].open()
    time.now += GATEWAY_GONE_S / 2
    made[1].sync()
    assert not made[1].open()
    time.now += GATEWAY_GONE_S
    made[1].sync()
    assert made[1].account.num_servers == 1
    assert all(made[1].open() for _ in range(3))


def test_a_change_of_quotas_fills_no_bucket() -> None:
    """Gateways notice a new file one after the other."""
    made, _, time = gateways(2, Quotas(rounds_per_second=20))
    while made[0].round():
        pass
    assert len(made[0].used) == 20
    new = Quotas(rounds_per_second=40)
    for _ in range(10):
        made[0].account.set(new)
        for gateway in made:
            gateway.sync()
        assert not made[0].round()
    time.now += 0.5
    count = len(made[0].used)
    made[1].account.set(new)
    while made[1].round():
        pass
    assert len(made[0].used) == count
    assert len(made[1].used) <= 20


def test_a_call_that_waits_for_a_place_keeps_the_tokens_that_are_there() -> None:
    """A quiet gateway gives tokens back with its next ask: not with that of a caller who needs
    them."""
    (gateway,), _, time = gateways(1, Quotas(max_sessions=2, tokens_per_minute=100_000))
    assert gateway.open()
    gateway.account.release_session()
    gateway.sync()
    time.now += 5.0  # without a sync, as if they were late
    assert gateway.account.shares["tokens_per_minute"].level > 0
    assert gateway.open()
