"""Leases of a target on all drafter replicas, so that it may spread its sessions over them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from ray.serve.handle import DeploymentHandle

from paceline.deployments.lease import Lease, open_lease

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks for new drafter replicas."""
SILENT_S = 2.0
"""Seconds that a replica gets to connect."""
LEASE_TIMEOUT_S = 30.0


class DrafterLeases:
    """Holds a lease on each drafter replica, and says to the engine which there are.

    Serve picks the replica of a lease, by preference one with few leases. So a new replica is found
    after a few looks; one that ends its lease is dropped at once, and one that does not answer
    after two seconds.

    Args:
        size: most replicas to lease.
        use: tells the engine the addresses to draft with; returns those that answer.
    """

    def __init__(
        self,
        drafters: DeploymentHandle[Any],
        size: int,
        use: Callable[[list[str]], Awaitable[Collection[str]]],
    ) -> None:
        self._drafters = drafters
        self._size = size
        self._use = use
        self._leases: dict[str, Lease] = {}
        self._silent: dict[str, float] = {}  # addresses that do not answer, and since when
        self._lost = asyncio.Event()

    async def run(self) -> None:
        """Look until cancelled; then release the leases."""
        try:
            while True:
                try:
                    found = await self._look()
                except Exception as error:
                    logger.warning("cannot find drafter replicas, trying again: %s", error)
                    found = False
                if not found:  # else there may be more
                    await self._pause()
        finally:
            for lease in self._leases.values():
                lease.release()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._lost.wait()
        except TimeoutError:
            return
        self._lost.clear()

    async def _look(self) -> bool:
        """Drop replicas that are gone, and lease another one; returns whether it is a new one."""
        for address in [a for a, lease in self._leases.items() if lease.lost]:
            self._leases.pop(address).release()
        answering = set(await self._use(list(self._leases)))
        now = time.monotonic()
        silent = self._leases.keys() - answering
        self._silent = {address: self._silent.get(address, now) for address in silent}
        for address, since in self._silent.items():
            if now - since > SILENT_S:
                self._leases.pop(address).release()
        if len(self._leases) >= self._size:
            return False
        lease = await open_lease(self._drafters, "drafter", LEASE_TIMEOUT_S)
        if lease.endpoint.address in self._leases:
            lease.release()
            return False
        self._leases[lease.endpoint.address] = lease
        lease.on_lost(self._lost.set)
        await self._use(list(self._leases))
        return True
