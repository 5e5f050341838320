"""Leases that go from one session to the next."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from paceline.deployments import lease as lease_module
from paceline.deployments.lease import IDLE_S, IdleLeases, Lease
from tests.deployments.http_serving import DirectLease


class Counted(DirectLease):
    num_released = 0

    def release(self) -> None:
        self.num_released += 1


def leased(address: str = "here:1", fingerprint: str = "") -> Any:
    return cast(Lease, Counted(address, fingerprint))


def test_the_next_session_gets_the_lease_of_the_last_one() -> None:
    async def run() -> None:
        idle, lease = IdleLeases(), leased()
        assert idle.take() is None
        idle.keep(lease)
        assert idle.take() is lease
        assert idle.take() is None  # it has one session at a time
        await asyncio.sleep(2 * IDLE_S)
        assert lease.num_released == 0  # the call that took it still has it
        idle.keep(lease)
        await asyncio.sleep(2 * IDLE_S)
        assert lease.num_released == 1
        assert idle.take() is None

    asyncio.run(run())


def test_a_session_gets_a_replica_with_its_numerics_only() -> None:
    async def run() -> None:
        idle, one, other = IdleLeases(), leased("a:1", "one"), leased("b:1", "other")
        idle.keep(one)
        idle.keep(other)
        assert idle.take("another") is None
        assert idle.take("one") is one
        assert idle.take("one") is None
        assert idle.take("") is other
        idle.keep(one)
        idle.keep(other)
        idle.close()
        assert (one.num_released, other.num_released) == (1, 1)

    asyncio.run(run())


def test_leases_that_are_lost_or_old_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        idle, lost, old = IdleLeases(), leased(), leased()
        idle.keep(lost)
        lost.lost = True  # its replica died meanwhile
        assert idle.take() is None
        idle.keep(lost)
        monkeypatch.setattr(lease_module, "LONGEST_S", 0.0)
        idle.keep(old)
        assert (lost.num_released, old.num_released) == (1, 1)
        assert idle.take() is None

    asyncio.run(run())
