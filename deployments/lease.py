"""The control plane: a lease is one open Serve call from the user of a replica to that replica.

A streaming handle call is routed by Serve to a replica, which answers with its own data address
and keeps the call open until the caller lets go. So Serve's routing, autoscaling, health and
draining count sessions as the ongoing requests that they are, while tokens go to the address
directly. Letting go, or vanishing, ends the call at the replica at once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ray
import ray.exceptions
import ray.util
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from paceline.deployments.config import DeploymentConfig
from paceline.rpc.errors import ServerUnavailable

_RETRY_S = 0.1
_ATTEMPT_S = 5.0
"""A request that went to a replica at the moment of its death may never be answered."""
HOLDER_CHECK_S = 2.0
IDLE_S, LONGEST_S = 0.1, 1.0
"""How long a lease waits for its next session, and may go from one to the next: a replica that
Serve adds gets its share after that."""
SERVE_NAMESPACE = "serve"
"""Where Serve registers its replicas."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a replica's data plane listens, and who it is.

    Attributes:
        fingerprint: of a target's numerics, as text; empty: not known, or a drafter.
    """

    address: str
    pid: int
    replica_id: str
    fingerprint: str = ""


def data_host(config: DeploymentConfig) -> str:
    """The interface that this replica's data plane listens on."""
    return "127.0.0.1" if config.data_plane == "loopback" else ray.util.get_node_ip_address()


@dataclass(frozen=True, slots=True)
class Holder:
    """The replica that has a lease, by the name of its Ray actor."""

    name: str

    @staticmethod
    @lru_cache(1)
    def this() -> Holder:
        """The replica that this code runs in."""
        holder = Holder(ray.get_runtime_context().get_actor_name() or "")
        if holder.is_dead():
            # Leases of a holder that cannot be found would be ended under it.
            raise RuntimeError(f"Ray does not know this replica by its name {holder.name!r}")
        return holder

    def is_dead(self) -> bool:
        """True when Ray is sure of it; blocks for a round trip."""
        try:
            ray.get_actor(self.name, namespace=SERVE_NAMESPACE)
        except ValueError:
            return True
        except ray.exceptions.RayError:
            return False  # Ray's own trouble says nothing about the holder
        return False


class LeaseBook:
    """A replica's side: hands out its endpoint, and counts the leases on it.

    Ray ends a lease when its holder releases it, but not when the holder is killed, so holders are
    looked for every few seconds.
    """

    def __init__(self, address: str, fingerprint: str = "") -> None:
        replica_id = serve.get_replica_context().replica_id.unique_id
        self.endpoint = Endpoint(address, os.getpid(), replica_id, fingerprint)
        self._ends: dict[Holder, set[asyncio.Event]] = {}
        self._watcher = asyncio.create_task(self._watch_holders())

    @property
    def num_leases(self) -> int:
        return sum(len(ends) for ends in self._ends.values())

    async def hold(self, holder: Holder) -> AsyncIterator[Endpoint]:
        """What the replica's ``open_session`` streams: one endpoint, then nothing for a while."""
        end = asyncio.Event()
        ends = self._ends.setdefault(holder, set())
        ends.add(end)
        try:
            yield self.endpoint
            await end.wait()
        finally:
            ends.discard(end)
            if not ends and self._ends.get(holder) is ends:
                del self._ends[holder]

    def close(self) -> None:
        """End all leases; their holders see it."""
        self._watcher.cancel()
        for holder in list(self._ends):
            self._end(holder)

    def _end(self, holder: Holder) -> None:
        for end in self._ends.get(holder, ()):
            end.set()

    async def _watch_holders(self) -> None:
        while True:
            await asyncio.sleep(HOLDER_CHECK_S)
            for holder in list(self._ends):
                if await asyncio.to_thread(holder.is_dead):
                    self._end(holder)


class Lease:
    """The caller's side. Opened by :func:`open_lease`; release it exactly when done."""

    def __init__(self, endpoint: Endpoint, response: DeploymentResponseGenerator[Endpoint]) -> None:
        self.endpoint = endpoint
        self.opened_at = time.monotonic()
        self.lost = False
        self._response = response
        self._on_lost: set[Callable[[], object]] = set()
        self._watcher = asyncio.create_task(self._watch())

    def on_lost(self, callback: Callable[[], object]) -> None:
        """Call back when the replica ends the lease or dies. At once if it has."""
        if self.lost:
            callback()
        else:
            self._on_lost.add(callback)

    def forget(self, callback: Callable[[], object]) -> None:
        """Undo :meth:`on_lost`."""
        self._on_lost.discard(callback)

    def release(self) -> None:
        """Let the replica go. More than once is harmless."""
        self._on_lost.clear()
        self._watcher.cancel()
        self._response.cancel()

    async def _watch(self) -> None:
        # An error means that the replica or its node is gone, which is what this task waits for.
        with suppress(ray.exceptions.RayError, RayServeException):
            await anext(self._response, None)
        self.lost = True
        for callback in list(self._on_lost):
            callback()


class IdleLeases:
    """Leases of sessions that have just ended, for the next ones: opening one takes Serve
    milliseconds."""

    def __init__(self) -> None:
        self._leases: dict[Lease, asyncio.TimerHandle] = {}  # with what ends their wait

    def take(self, fingerprint: str = "") -> Lease | None:
        """The last one that was kept of a replica with these numerics; "" are any."""
        for lease in reversed(self._leases):
            if not lease.lost and fingerprint in ("", lease.endpoint.fingerprint):
                self._leases.pop(lease).cancel()
                return lease
        return None

    def keep(self, lease: Lease) -> None:
        """Hold a lease for a moment, unless it is too old."""
        if lease.lost or time.monotonic() - lease.opened_at > LONGEST_S:
            lease.release()
            return
        loop = asyncio.get_running_loop()
        self._leases[lease] = loop.call_later(IDLE_S, self._expire, lease)

    def _expire(self, lease: Lease) -> None:
        del self._leases[lease]
        lease.release()

    def close(self) -> None:
        """Release all of them."""
        while self._leases:
            lease, timer = self._leases.popitem()
            timer.cancel()
            lease.release()


async def open_lease(handle: DeploymentHandle[Any], what: str, timeout_s: float) -> Lease:
    """Let Serve pick a replica of ``handle`` and hold a lease on it.

    Args:
        what: names the replica in errors, for example "target".
        timeout_s: seconds to wait for a replica with room.

    Raises:
        ServerUnavailable: no replica took the lease in time.
    """
    deadline = time.monotonic() + timeout_s
    reason = "all are starting or busy"
    stream, holder = handle.options(stream=True), Holder.this()
    while (left := deadline - time.monotonic()) > 0:
        response = stream.open_session.remote(holder)
        try:
            endpoint = await asyncio.wait_for(anext(response), min(left, _ATTEMPT_S))
        except (ray.exceptions.RayError, RayServeException, StopAsyncIteration) as error:
            # Serve has not noticed yet that the replica it picked is gone, or going.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            response.cancel()
        except BaseException:
            response.cancel()
            raise
        else:
            return Lease(endpoint, response)
    raise ServerUnavailable(f"no {what} replica within {timeout_s:g} s: {reason}")
