"""The HTTP API over one target in this process, with the gateway's own relay between them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from paceline.deployments.config import HttpConfig
from paceline.deployments.gateway import Relay
from paceline.deployments.lease import Endpoint, Lease
from paceline.deployments.openai.api import make_app
from paceline.deployments.openai.server import start_http
from paceline.engine import EngineThread
from paceline.rpc.access import Gate
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.server import start_server
from paceline.rpc.tracing import Tracing


class DirectLease:
    """A lease on a replica that Ray Serve does not know."""

    lost = ended = False
    unused = 0

    def __init__(self, address: str, fingerprint: str = "", lease_id: str = "") -> None:
        self.endpoint = Endpoint(address, 0, address, fingerprint, lease_id)
        self.opened_at = time.monotonic()
        self.end: Callable[[], object] = lambda: None
        self.released: Callable[[], object] = lambda: None

    def on_lost(self, callback: Any) -> None: ...

    def on_end(self, callback: Callable[[], object]) -> None:
        self.end = callback

    def forget(self, callback: Any) -> None: ...

    def release(self) -> None:
        self.released()


class DirectLeases:
    """Leases on targets, in turn, which end with their sessions.

    It belongs to the event loop of the gateways, and :meth:`ended` to any thread.
    """

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.open: dict[str, DirectLease] = {}
        self._count = 0
        self._loop = asyncio.get_running_loop()

    async def __call__(self) -> Lease:
        self._count += 1
        address = self.addresses[self._count % len(self.addresses)]
        lease = DirectLease(address, lease_id=str(self._count))
        self.open[lease.endpoint.lease_id] = lease
        lease.released = lambda: self.open.pop(lease.endpoint.lease_id, None)
        return cast(Lease, lease)

    def ended(self, lease_id: str, unused: int = 0) -> None:
        """The target's side: ``lease_ended`` of its server.

        Args:
            unused: as of the endpoint.
        """

        def end() -> None:
            lease = self.open.pop(lease_id, None)
            if lease is not None:
                lease.unused = unused
                lease.end()

        # Serve takes some milliseconds, too: the answer to Close may be there before.
        self._loop.call_soon_threadsafe(self._loop.call_later, 0.005, end)


@contextmanager
def http_serving(
    engine: EngineThread,
    model: ModelInfo,
    *,
    gate: Gate | None = None,
    tracing: Tracing | None = None,
    http: HttpConfig | None = None,
    **options: Any,
) -> Iterator[str]:
    """Serve an engine over HTTP on a thread; yields the address.

    Args:
        tracing: of the gateway.
        http: of the gateway's configuration.
        options: of :func:`paceline.deployments.openai.server.start_http`.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="test-http")
    thread.start()
    gate = gate or Gate()

    async def start() -> tuple[Any, Any, Any]:
        target = await start_server(engine=engine, model=model)

        async def lease() -> Lease:
            return cast(Lease, DirectLease(target.address))

        relay = Relay(lease, idle_timeout_s=60, resume_s=5, gate=gate, tracing=tracing)
        return target, relay, await start_http(make_app(relay, gate, http), **options)

    async def stop(target: Any, relay: Any, server: Any) -> None:
        await server.stop()
        await relay.close()
        await target.stop(0.2)

    try:
        parts = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
        try:
            yield parts[-1].url
        finally:
            asyncio.run_coroutine_threadsafe(stop(*parts), loop).result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
        gate.close()
