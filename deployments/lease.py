"""The control plane: a lease is one open Serve call from the user of a replica to that replica.

Serve routes a streaming handle call to a replica, which answers with the address of its data plane
and keeps the call open until the caller releases it. So Serve counts sessions as ongoing requests
in routing, autoscaling, health and draining, while tokens go straight to that address. When the
caller releases the call or dies, the call ends at the replica at once.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import ray
import ray.exceptions
import ray.util
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from paceline.deployments.config import DeploymentConfig
from paceline.deployments.ledger import SERVE_NAMESPACE
from paceline.rpc.errors import ServerUnavailable

_RETRY_S = 0.1
_ATTEMPT_S = 5.0
"""Seconds for one attempt: a replica that dies as it gets a request may never answer it."""
HOLDER_CHECK_S = 2.0
IDLE_S, LONGEST_S = 0.1, 1.0
"""Seconds that a lease waits for its next session, and seconds that it may pass from session to
session. After that Serve chooses again, so that a new replica gets its share."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A replica and the address of its data plane.

    Attributes:
        fingerprint: of a target's numerics; "" for a drafter, or if unknown.
        with_adapters: of its numerics with each of its adapters.
        lease_id: the replica's name for the lease that it answers.
        unused: of a session that has ended, tokens of its tickets (``tickets.py``) that it has not
            used; below 0: it has used more.
    """

    address: str
    pid: int
    replica_id: str
    fingerprint: str = ""
    lease_id: str = ""
    with_adapters: tuple[str, ...] = ()
    unused: int = 0

    def has(self, fingerprint: str) -> bool:
        """Whether the target has these numerics, with an adapter or without; "" fits all."""
        return fingerprint in ("", self.fingerprint, *self.with_adapters)


def data_host(config: DeploymentConfig) -> str:
    """The host that this replica's data plane listens on."""
    return "127.0.0.1" if config.data_plane == "loopback" else ray.util.get_node_ip_address()


@dataclass(frozen=True, slots=True)
class Holder:
    """The replica that holds a lease, by the name of its Ray actor."""

    name: str

    @staticmethod
    @lru_cache(1)
    def this() -> Holder:
        """The replica in which this code runs."""
        holder = Holder(ray.get_runtime_context().get_actor_name() or "")
        if holder.is_dead():
            # LeaseBook would end the leases of a holder that it cannot find.
            raise RuntimeError(f"Ray does not know this replica by its name {holder.name!r}")
        return holder

    def is_dead(self) -> bool:
        """Whether Ray is sure that the holder is dead; blocks for a round trip."""
        try:
            ray.get_actor(self.name, namespace=SERVE_NAMESPACE)
        except ValueError:
            return True
        except ray.exceptions.RayError:
            return False  # a failure of Ray says nothing about the holder
        return False


class _End(asyncio.Event):
    """Set when a lease ends. ``session``: because its session has ended, and not the replica;
    ``unused`` as of the endpoint."""

    session = False
    unused = 0


class LeaseBook:
    """The replica's side: yields its endpoint to holders, and counts their leases.

    Ray ends a lease when its holder releases it, but not when the holder is killed. So the book
    looks every few seconds whether the holders live.
    """

    def __init__(
        self, address: str, fingerprint: str = "", with_adapters: tuple[str, ...] = ()
    ) -> None:
        replica_id = serve.get_replica_context().replica_id.unique_id
        self.endpoint = Endpoint(
            address, os.getpid(), replica_id, fingerprint, with_adapters=with_adapters
        )
        self._ends: dict[Holder, set[_End]] = {}
        self._by_id: dict[str, _End] = {}
        self._watcher = asyncio.create_task(self._watch_holders())

    @property
    def num_leases(self) -> int:
        return sum(len(ends) for ends in self._ends.values())

    async def hold(self, holder: Holder) -> AsyncIterator[Endpoint]:
        """The stream of ``open_session``: yields the endpoint, then waits until the lease ends.

        It yields the endpoint once more if the lease has ended with its session.
        """
        end, lease_id = _End(), secrets.token_hex(8)
        ends = self._ends.setdefault(holder, set())
        ends.add(end)
        self._by_id[lease_id] = end
        try:
            yield replace(self.endpoint, lease_id=lease_id)
            await end.wait()
            if end.session:
                yield replace(self.endpoint, unused=end.unused)
        finally:
            del self._by_id[lease_id]
            ends.discard(end)
            if not ends and self._ends.get(holder) is ends:
                del self._ends[holder]

    def session_ended(self, lease_id: str, unused: int = 0) -> None:
        """End the lease of a session, which ended by whichever gateway.

        Args:
            unused: as of the endpoint.
        """
        end = self._by_id.get(lease_id)
        if end is not None:
            end.session, end.unused = True, unused
            end.set()

    def close(self) -> None:
        """End all leases; their holders notice it."""
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
    """The caller's side of a lease. :func:`open_lease` opens it; release it when done.

    Attributes:
        lost: the replica has ended the lease because it stops, or is dead.
        ended: the replica lives, or stops in order.
        unused: as of the endpoint, when the session has ended.
    """

    def __init__(self, endpoint: Endpoint, response: DeploymentResponseGenerator[Endpoint]) -> None:
        self.endpoint = endpoint
        self.opened_at = time.monotonic()
        self.lost = False
        self.ended = False
        self.unused = 0
        self._response = response
        self._on_lost: set[Callable[[], object]] = set()
        self._on_end: Callable[[], object] | None = None
        self._is_over = False
        self._watcher = asyncio.create_task(self._watch())

    def on_lost(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` when the replica ends the lease or dies; at once if it already has."""
        if self.lost:
            callback()
        else:
            self._on_lost.add(callback)

    def forget(self, callback: Callable[[], object]) -> None:
        """Undo :meth:`on_lost`."""
        self._on_lost.discard(callback)

    def on_end(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` when the session of the lease has ended, or the lease is lost."""
        if self._is_over:
            callback()
        else:
            self._on_end = callback

    def release(self) -> None:
        """End the lease. Calling it again does nothing."""
        self._on_lost.clear()
        self._on_end = None
        self._watcher.cancel()
        self._response.cancel()

    async def _watch(self) -> None:
        # An error means that the replica or its node is gone: this is what the task waits for.
        session_ended = None
        with suppress(ray.exceptions.RayError, RayServeException):
            session_ended = await anext(self._response, None)
            self.ended = True
        self._is_over = True
        if session_ended is not None:
            self.unused = session_ended.unused
        else:
            self.lost = True
            for callback in list(self._on_lost):
                callback()
        if self._on_end is not None:
            self._on_end()


class Unleased(Lease):
    """Stands for the lease on a replica that another gateway holds, or held."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.opened_at = time.monotonic()
        self.lost = False
        self.ended = False
        self.unused = 0

    def on_lost(self, callback: Callable[[], object]) -> None:
        """Never called: the connection tells."""

    def on_end(self, callback: Callable[[], object]) -> None:
        """Never called."""

    def forget(self, callback: Callable[[], object]) -> None:
        """Does nothing."""

    def release(self) -> None:
        """Does nothing."""


class IdleLeases:
    """Leases of sessions that have just ended, kept for the next ones.

    To open a new one takes Serve milliseconds.
    """

    def __init__(self) -> None:
        self._leases: dict[Lease, asyncio.TimerHandle] = {}  # and the timer that releases each

    def take(self, fingerprint: str = "", prefer: str = "") -> Lease | None:
        """The lease kept last of a replica with these numerics and this id ("": any of either);
        None if there is none."""
        for lease in reversed(self._leases):
            endpoint = lease.endpoint
            if not lease.lost and endpoint.has(fingerprint) and prefer in ("", endpoint.replica_id):
                self._leases.pop(lease).cancel()
                return lease
        return None

    def keep(self, lease: Lease) -> None:
        """Keep a lease for IDLE_S seconds; release it if it is older than LONGEST_S."""
        if lease.lost or time.monotonic() - lease.opened_at > LONGEST_S:
            lease.release()
            return
        loop = asyncio.get_running_loop()
        self._leases[lease] = loop.call_later(IDLE_S, self._expire, lease)

    def _expire(self, lease: Lease) -> None:
        del self._leases[lease]
        lease.release()

    def close(self) -> None:
        """Release all leases."""
        while self._leases:
            lease, timer = self._leases.popitem()
            timer.cancel()
            lease.release()


async def open_lease(
    handle: DeploymentHandle[Any], what: str, timeout_s: float, prefer: str = ""
) -> Lease:
    """Open a lease on a replica that Serve picks.

    Args:
        what: names the replica in errors, for example "target".
        timeout_s: seconds to wait for a replica with room.
        prefer: id of the replica that Serve should pick if it is not too busy (targets only).

    Raises:
        ServerUnavailable: no replica took the lease in time.
    """
    deadline = time.monotonic() + timeout_s
    reason = "all are starting or busy"
    stream, holder = handle.options(stream=True), Holder.this()
    wishes = {"prefer": prefer} if prefer else {}
    while (left := deadline - time.monotonic()) > 0:
        response = stream.open_session.remote(holder, **wishes)
        try:
            async with asyncio.timeout(min(left, _ATTEMPT_S)):
                endpoint = await anext(response)
        except (ray.exceptions.RayError, RayServeException, StopAsyncIteration) as error:
            # Serve picked a replica that is stopping or dead, and has not noticed it yet: it may be
            # the preferred one.
            wishes = {}
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            wishes = {}
            response.cancel()
        except BaseException:
            response.cancel()
            raise
        else:
            return Lease(endpoint, response)
    raise ServerUnavailable(f"no {what} replica within {timeout_s:g} s: {reason}")
