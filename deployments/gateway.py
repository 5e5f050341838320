"""The gateway: one fixed gRPC port for clients, relaying frames to the target replicas.

For each call it holds a lease on a target that Serve picked, and passes messages on as the bytes
they came in. Verify sessions are read where routing needs it: a session id leads to the replica
that has the session.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.config import DeploymentConfig
from deployments.lease import Lease, open_lease
from paceline.errors import InvalidArgument, SessionNotFound
from rpc.errors import ServerUnavailable, from_rpc_error
from rpc.gen.paceline.v1 import generate_pb2, verify_pb2
from rpc.messages import MAX_MESSAGE_BYTES
from rpc.server import PortInUse, start_server

logger = logging.getLogger(__name__)

GENERATE: str = generate_pb2.DESCRIPTOR.services_by_name["GenerateService"].full_name
VERIFY: str = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name

SWEEP_INTERVAL_S = 2.0
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),  # a session is not repeated behind the client's back
)

M = TypeVar("M", bound=Message)
Context = grpc.aio.ServicerContext[bytes, bytes]


class _Route:
    """A verify session: which lease it lives on, and who uses it.

    ``users`` counts the streams on it, and one for a session that unary calls opened.
    """

    __slots__ = ("idle_timeout_s", "lease", "touched_at", "unary", "users")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.users = 0
        self.unary = False
        self.idle_timeout_s = 0.0
        self.touched_at = time.monotonic()


class Relay:
    """GenerateService and VerifyService in front of the target replicas.

    Args:
        targets: handle of the target deployment.
        open_timeout_s: how long a call waits for a replica that can take it.
    """

    def __init__(self, targets: DeploymentHandle[Any], open_timeout_s: float) -> None:
        self._targets = targets
        self._open_timeout_s = open_timeout_s
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._routes: dict[str, _Route] = {}
        self.num_calls = 0  # under way

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Add both services, without codecs: messages stay bytes."""
        unary = grpc.unary_unary_rpc_method_handler
        handlers: dict[str, dict[str, Any]] = {
            GENERATE: {
                "Generate": grpc.unary_stream_rpc_method_handler(self._generate),
                "GetModel": unary(self._get_model),
            },
            VERIFY: {
                "Session": grpc.stream_stream_rpc_method_handler(self._session),
                "Open": unary(self._open),
                "Verify": unary(self._verify),
                "Truncate": unary(self._truncate),
                "Close": unary(self._close),
            },
        }
        for service, methods in handlers.items():
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, methods),)
            )
        return list(handlers)

    # --- GenerateService ------------------------------------------------------------------------

    async def _generate(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        lease = await self._lease()
        try:
            method: Any = self._channel(lease).unary_stream(f"/{GENERATE}/Generate")
            call = method(request, timeout=context.time_remaining())
            async for reply in self._replies(call, lease):
                yield reply
        finally:
            lease.release()

    async def _get_model(self, request: bytes, context: Context) -> bytes:
        lease = await self._lease()
        try:
            return await self._unary(lease, f"/{GENERATE}/GetModel", request, context)
        finally:
            lease.release()

    # --- VerifyService: a stream for each session -----------------------------------------------

    async def _session(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[bytes]:
        first = await anext(requests, None)
        if first is None:
            return
        resumed = _parse(verify_pb2.VerifyFrame, first).open.resume_session_id
        session_id, route = await self._route_for(resumed)
        try:
            method: Any = self._channel(route.lease).stream_stream(f"/{VERIFY}/Session")
            call = method(timeout=context.time_remaining())
            sender = asyncio.create_task(_send_all(call, first, requests))
            try:
                async for reply in self._replies(call, route.lease):
                    if not session_id:
                        session_id = verify_pb2.VerifyReply.FromString(reply).open.session_id
                        if session_id:
                            self._routes[session_id] = route
                    yield reply
            finally:
                sender.cancel()
        finally:
            self._leave(session_id, route)

    # --- VerifyService: unary calls -------------------------------------------------------------

    async def _open(self, request: bytes, context: Context) -> bytes:
        resumed = _parse(verify_pb2.OpenRequest, request).resume_session_id
        session_id, route = await self._route_for(resumed)
        try:
            reply = await self._unary(route.lease, f"/{VERIFY}/Open", request, context)
            opened = verify_pb2.OpenResult.FromString(reply)
            session_id = opened.session_id
            self._routes[session_id] = route
            route.idle_timeout_s = opened.idle_timeout_seconds
            if not route.unary:
                route.unary = True  # stays until Close, or until nobody touches it
                route.users += 1
            return reply
        finally:
            self._leave(session_id, route)

    async def _verify(self, request: bytes, context: Context) -> bytes:
        session_id = _parse(verify_pb2.VerifyRequest, request).session_id
        return await self._on_session(session_id, "Verify", request, context)

    async def _truncate(self, request: bytes, context: Context) -> bytes:
        session_id = _parse(verify_pb2.TruncateRequest, request).session_id
        return await self._on_session(session_id, "Truncate", request, context)

    async def _close(self, request: bytes, context: Context) -> bytes:
        session_id = _parse(verify_pb2.CloseRequest, request).session_id
        if session_id not in self._routes:
            return verify_pb2.CloseResult().SerializeToString()  # gone already: not an error
        reply = await self._on_session(session_id, "Close", request, context)
        self._end_unary(session_id)
        return reply

    async def _on_session(
        self, session_id: str, method: str, request: bytes, context: Context
    ) -> bytes:
        route = self._routes.get(session_id)
        if route is None:
            raise SessionNotFound(session_id)
        route.touched_at = time.monotonic()
        try:
            return await self._unary(route.lease, f"/{VERIFY}/{method}", request, context)
        except (ServerUnavailable, SessionNotFound):
            self._end_unary(session_id)
            raise

    # --- routes ---------------------------------------------------------------------------------

    async def _route_for(self, resumed: str) -> tuple[str, _Route]:
        """The route of a session that is resumed, or a new one; ``users`` counts the caller."""
        if resumed:
            route = self._routes.get(resumed)
            if route is None:
                raise SessionNotFound(resumed)
        else:
            route = _Route(await self._lease())
        route.users += 1
        return resumed, route

    def _leave(self, session_id: str, route: _Route) -> None:
        route.users -= 1
        if route.users == 0:
            if self._routes.get(session_id) is route:
                del self._routes[session_id]
            route.lease.release()

    def _end_unary(self, session_id: str) -> None:
        route = self._routes.get(session_id)
        if route is not None and route.unary:
            route.unary = False
            self._leave(session_id, route)

    def sweep(self) -> None:
        """Let go of unary sessions that their target has closed because nobody touched them."""
        now = time.monotonic()
        for session_id, route in list(self._routes.items()):
            if route.unary and (
                route.lease.lost or now - route.touched_at > route.idle_timeout_s + SWEEP_INTERVAL_S
            ):
                self._end_unary(session_id)

    # --- the data plane -------------------------------------------------------------------------

    async def _lease(self) -> Lease:
        return await open_lease(self._targets, "target", self._open_timeout_s)

    def _channel(self, lease: Lease) -> grpc.aio.Channel:
        """One connection for each replica, shared by all calls."""
        address = lease.endpoint.address
        channel = self._channels.get(address)
        if channel is None:
            channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
            self._channels[address] = channel
        return channel

    async def _replies(self, call: Any, lease: Lease) -> AsyncIterator[bytes]:
        """What the target answers; the call ends with this generator.

        Raises:
            PacelineError: the target's status, or ServerUnavailable when the target died.
        """
        self.num_calls += 1
        lease.on_lost(call.cancel)
        try:
            async for reply in call:
                yield reply
        except grpc.RpcError as error:
            raise await self._failure(error, lease) from None
        except asyncio.CancelledError:
            if lease.lost:  # it was on_lost that cancelled the call, not the client
                raise _gone(lease) from None
            raise
        finally:
            self.num_calls -= 1
            lease.forget(call.cancel)
            call.cancel()

    async def _unary(self, lease: Lease, path: str, request: bytes, context: Context) -> bytes:
        method: Any = self._channel(lease).unary_unary(path)
        call = method(request, timeout=context.time_remaining())
        self.num_calls += 1
        lease.on_lost(call.cancel)
        try:
            reply: bytes = await call
        except grpc.RpcError as error:
            raise await self._failure(error, lease) from None
        except asyncio.CancelledError:
            if lease.lost:
                raise _gone(lease) from None
            raise
        finally:
            self.num_calls -= 1
            lease.forget(call.cancel)
            call.cancel()
        return reply

    async def _failure(self, error: grpc.RpcError, lease: Lease) -> Exception:
        failure = from_rpc_error(error)
        if isinstance(failure, ServerUnavailable):
            channel = self._channels.pop(lease.endpoint.address, None)
            if channel is not None:
                await channel.close()
            return _gone(lease)
        return failure

    async def close(self) -> None:
        """Let all sessions go and close the connections."""
        for route in self._routes.values():
            route.lease.release()
        self._routes.clear()
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()


def _parse(message: type[M], data: bytes) -> M:
    try:
        return message.FromString(data)
    except DecodeError:
        name = message.DESCRIPTOR.full_name
        raise InvalidArgument("message", f"{len(data)} bytes", f"a {name}") from None


def _gone(lease: Lease) -> ServerUnavailable:
    endpoint = lease.endpoint
    return ServerUnavailable(
        f"target replica {endpoint.replica_id} at {endpoint.address} (process {endpoint.pid}) is "
        "gone, and the session with it; send the request again"
    )


async def _send_all(call: Any, first: bytes, requests: AsyncIterator[bytes]) -> None:
    # A call that has ended refuses writes; whoever reads its replies learns why it ended.
    with suppress(grpc.RpcError, asyncio.InvalidStateError):
        await call.write(first)
        async for request in requests:
            await call.write(request)
        await call.done_writing()


@serve.deployment
class GatewayDeployment:
    """Where clients connect: GenerateService and VerifyService on the port of the config."""

    async def __init__(self, config: DeploymentConfig, targets: DeploymentHandle[Any]) -> None:
        gateway = config.gateway
        self._relay = Relay(targets, gateway.open_timeout_s)
        try:
            self._server = await start_server(
                register=self._relay.register, host=gateway.host, port=gateway.grpc_port
            )
        except PortInUse as error:
            raise PortInUse(f"gateway.host, gateway.grpc_port: {error}") from None
        self._sweeper = asyncio.create_task(self._sweep())

    def status(self) -> dict[str, Any]:
        """Counters for `paceline status`."""
        return {
            "replica_id": serve.get_replica_context().replica_id.unique_id,
            "pid": os.getpid(),
            "address": self._server.address,
            "calls": self._relay.num_calls,
        }

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self._relay.sweep()

    async def __del__(self) -> None:
        # Serve awaits this once after draining; it is not reached when the constructor failed.
        if hasattr(self, "_sweeper"):
            self._sweeper.cancel()
            await self._server.stop(grace=0.5)
            await self._relay.close()
