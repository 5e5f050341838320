"""The control plane: a lease is one open Serve call from whoever uses a replica to that replica.

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
from dataclasses import dataclass

import ray.exceptions
import ray.util
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.config import DeploymentConfig
from rpc.errors import ServerUnavailable

_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a replica's data plane listens, and who it is."""

    address: str
    pid: int
    replica_id: str


def data_host(config: DeploymentConfig) -> str:
    """The interface that this replica's data plane listens on."""
    return "127.0.0.1" if config.data_plane == "loopback" else ray.util.get_node_ip_address()


class LeaseBook:
    """A replica's side: hands out its endpoint and counts the leases on it."""

    def __init__(self, address: str) -> None:
        replica_id = serve.get_replica_context().replica_id.unique_id
        self.endpoint = Endpoint(address, os.getpid(), replica_id)
        self.num_leases = 0
        self._closed = asyncio.Event()

    async def hold(self) -> AsyncIterator[Endpoint]:
        """What the replica's ``open_session`` streams: one endpoint, then nothing for a while."""
        self.num_leases += 1
        try:
            yield self.endpoint
            await self._closed.wait()
        finally:
            self.num_leases -= 1

    def close(self) -> None:
        """End all leases; their holders see it."""
        self._closed.set()


class Lease:
    """The caller's side. Opened by :func:`open_lease`; release it exactly when done."""

    def __init__(self, endpoint: Endpoint, response: DeploymentResponseGenerator) -> None:
        self.endpoint = endpoint
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
        try:
            await anext(self._response, None)
        except (ray.exceptions.RayError, RayServeException):
            pass  # the replica or its node is gone, which is what this task waits for
        self.lost = True
        for callback in list(self._on_lost):
            callback()


async def open_lease(handle: DeploymentHandle, what: str, timeout_s: float) -> Lease:
    """Let Serve pick a replica of ``handle`` and hold a lease on it.

    Args:
        what: names the replica in errors, for example "target".
        timeout_s: seconds to wait for a replica with room.

    Raises:
        ServerUnavailable: no replica took the lease in time.
    """
    deadline = time.monotonic() + timeout_s
    reason = "all are starting or busy"
    stream = handle.options(stream=True)
    while (left := deadline - time.monotonic()) > 0:
        response = stream.open_session.remote()
        try:
            endpoint = await asyncio.wait_for(anext(response), left)
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
