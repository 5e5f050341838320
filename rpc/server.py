"""One gRPC server for a replica: the services over an engine or a drafter, health, reflection."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.bounds import request_bytes
from paceline.errors import InvalidArgument, PacelineError
from paceline.memory import give_back
from paceline.rpc.access import AccessInterceptor, Gate
from paceline.rpc.errors import ErrorInterceptor
from paceline.rpc.gen.paceline.v1 import (
    draft_pb2,
    draft_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    verify_pb2,
    verify_pb2_grpc,
)
from paceline.rpc.generate_service import GenerateServicer, ModelInfo
from paceline.rpc.messages import MAX_MESSAGE_BYTES
from paceline.rpc.tls import check_plain_text
from paceline.rpc.tracing import Tracing
from paceline.rpc.verify_service import NoVerifyServicer, VerifyServicer

if TYPE_CHECKING:
    from paceline.engine import Serving
    from paceline.rpc.draft_service import DraftServicer

logger = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 5.0
GIVE_BACK_S = 30.0
"""Seconds between two returns of freed memory, which messages of all sizes scatter."""
BOUNDED = ("/paceline.v1.GenerateService/Generate", "/paceline.v1.VerifyService/Open")
"""Methods whose messages are no longer than a model's context allows."""

SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Otherwise two servers could listen on one port, and would share its connections unnoticed.
    ("grpc.so_reuseport", 0),
    # A client machine that dies sends no reset; unanswered pings end its sessions.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # A peer that connects and says nothing holds a socket; a handshake takes milliseconds.
    ("grpc.server_handshake_timeout_ms", 10_000),
)


def _connection_age(age_s: float | None, grace_s: float) -> tuple[tuple[str, Any], ...]:
    if age_s is None:
        return ()
    return (
        ("grpc.max_connection_age_ms", int(age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", int(grace_s * 1000)),
    )


class PortInUse(PacelineError, OSError):
    """The server cannot listen at its address."""


@dataclass(slots=True)
class RpcServer:
    """A server that is running.

    Attributes:
        address: HOST:PORT to connect to.
        gate: who may call it.
        generate, verify, draft: its services; None: it does not have this one.
    """

    address: str
    port: int
    server: grpc.aio.Server
    health: health.aio.HealthServicer
    gate: Gate
    generate: GenerateServicer | None = None
    verify: VerifyServicer | None = None
    draft: DraftServicer | None = None
    _sweeper: asyncio.Task[None] | None = field(default=None, repr=False)

    async def stop(self, grace: float = 2.0) -> None:
        """Refuse new calls, give running ones ``grace`` seconds, then cancel them."""
        await self.health.enter_graceful_shutdown()
        await self.server.stop(grace)
        for service in (self.verify, self.draft):
            if service is not None:
                service.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        self.gate.close()

    async def __aenter__(self) -> RpcServer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()


async def start_server(
    *,
    engine: Serving | None = None,
    model: ModelInfo | None = None,
    drafter: DraftServicer | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    credentials: grpc.ServerCredentials | None = None,
    insecure: bool = False,
    gate: Gate | None = None,
    idle_timeout_s: float = 120.0,
    register: Callable[[grpc.aio.Server], list[str]] | None = None,
    tracing: Tracing | None = None,
    numerics_mismatch: str = "refuse",
    max_connection_age_s: float | None = None,
    max_connection_age_grace_s: float = 600.0,
    lease_ended: Callable[[str], object] = lambda lease_id: None,
) -> RpcServer:
    """Serve an engine (GenerateService, VerifyService) and/or a drafter (DraftService).

    Args:
        engine: a started engine, which the caller stops. One that is not an EngineThread takes no
            clients' drafts: its VerifyService refuses every call.
        model: what GetModel says beyond what the engine knows.
        drafter: the service around a local drafter.
        host: the default listens on loopback only.
        port: 0 takes a free one; :attr:`RpcServer.port` tells which.
        credentials: for TLS (:meth:`paceline.rpc.tls.ServerTls.credentials`); None is plain text.
        insecure: allow plain text where other machines can connect.
        gate: tenants, limits and audit log; None admits every caller.
        idle_timeout_s: seconds without a call after which sessions and streams are closed.
        register: adds further services and returns their full names.
        tracing: for the services over an engine; the caller stops it.
        numerics_mismatch: "refuse" or "allow" a session whose tokens come from other numerics than
            the engine's, for requests that say neither.
        max_connection_age_s: seconds (within 10 %) after which a connection takes no new calls,
            so that its client connects again; None: never.
        max_connection_age_grace_s: seconds that calls on such a connection may still run.
        lease_ended: called with the lease of a verify session that has ended.

    Raises:
        InvalidArgument: nothing to serve, a port outside the range, or plain text on an address
            other than loopback's.
        PortInUse: another process listens there, or the host is not an address of this machine.
    """
    if engine is None and drafter is None and register is None:
        raise InvalidArgument("engine", None, "an engine, a drafter or `register`")
    if not 0 <= port <= 65535:
        raise InvalidArgument("port", port, "a port in [0, 65535] (0 takes a free one)")
    if credentials is None and not insecure:
        check_plain_text(host, "credentials", "TLS credentials, or insecure=True")
    gate = gate or Gate()
    bounds = {}
    if engine is not None:
        bound = request_bytes(engine.engine.target.context_length)
        bounds = dict.fromkeys(BOUNDED, bound)
    server = grpc.aio.server(
        interceptors=(ErrorInterceptor(), AccessInterceptor(gate, idle_timeout_s, bounds)),
        options=(
            *SERVER_OPTIONS,
            ("grpc.max_concurrent_streams", gate.limits.max_calls_per_connection),
            ("grpc.max_receive_message_length", gate.limits.max_message_bytes),
            *_connection_age(max_connection_age_s, max_connection_age_grace_s),
        ),
    )
    names = [health.SERVICE_NAME, reflection.SERVICE_NAME]
    result = RpcServer("", 0, server, health.aio.HealthServicer(), gate)
    if engine is not None:
        from paceline.engine import EngineThread  # loads torch, which a gateway does not need

        # The first reading takes a while: not on the event loop.
        await asyncio.to_thread(lambda: engine.engine.target.fingerprint)
        result.generate = GenerateServicer(
            engine,
            model or ModelInfo(),
            gate=gate,
            tracing=tracing,
            numerics_mismatch=numerics_mismatch,
        )
        generate_pb2_grpc.add_GenerateServiceServicer_to_server(result.generate, server)
        names.append(_full_name(generate_pb2, "GenerateService"))
        if not isinstance(engine, EngineThread):
            verify_pb2_grpc.add_VerifyServiceServicer_to_server(NoVerifyServicer(), server)
        else:
            result.verify = VerifyServicer(
                engine,
                idle_timeout_s=idle_timeout_s,
                gate=gate,
                tracing=tracing,
                numerics_mismatch=numerics_mismatch,
                lease_ended=lease_ended,
            )
            verify_pb2_grpc.add_VerifyServiceServicer_to_server(result.verify, server)
            names.append(_full_name(verify_pb2, "VerifyService"))
    if drafter is not None:
        result.draft = drafter
        draft_pb2_grpc.add_DraftServiceServicer_to_server(drafter, server)
        names.append(_full_name(draft_pb2, "DraftService"))
    if register is not None:
        names.extend(register(server))
    health_pb2_grpc.add_HealthServicer_to_server(result.health, server)
    reflection.enable_server_reflection(names, server)
    result.port = _listen(server, host, port, credentials)
    result.address = join_address(host, result.port)
    await server.start()
    for name in ("", *names):
        await result.health.set(name, health_pb2.HealthCheckResponse.SERVING)
    sweeps = [service.sweep for service in (result.verify, result.draft) if service is not None]
    result._sweeper = asyncio.create_task(_sweep(sweeps, min(SWEEP_INTERVAL_S, idle_timeout_s / 4)))
    return result


def _full_name(module: Any, service: str) -> str:
    name: str = module.DESCRIPTOR.services_by_name[service].full_name
    return name


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host.strip("[]") else f"{host}:{port}"


def _listen(
    server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None
) -> int:
    address = join_address(host, port)
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise PortInUse(
            f"cannot listen on {address}: port {port} is in use, or {host!r} is not an address of "
            "this machine; choose another port (0 takes a free one)"
        )
    return bound


async def _sweep(sweeps: list[Callable[[], None]], interval_s: float) -> None:
    given_back_at = time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        if time.monotonic() - given_back_at > GIVE_BACK_S:
            await asyncio.to_thread(give_back)
            given_back_at = time.monotonic()
        for sweep in sweeps:
            try:
                sweep()
            except Exception:
                logger.exception("closing idle sessions failed; trying again later")
