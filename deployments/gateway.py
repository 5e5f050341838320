"""The gateway: a fixed port for gRPC and one for HTTP, relaying to the target replicas.

For each call it holds a lease on a target that Serve picked, and passes messages on as the bytes
they came in. Verify sessions are read where routing needs it: a session id leads to the replica
that has the session. A generation whose target goes away continues on another one; a verify session
is opened again by its client, who has its tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from ray import serve
from ray.serve.handle import DeploymentHandle

from paceline.deployments.config import TENANTS_VARIABLE, DeploymentConfig, GatewayConfig
from paceline.deployments.lease import IdleLeases, Lease, open_lease
from paceline.deployments.metrics import report_gauges
from paceline.deployments.openai.api import make_app
from paceline.deployments.openai.server import HttpServer, start_http
from paceline.errors import (
    FailedPrecondition,
    InvalidArgument,
    NumericsMismatch,
    ResourceExhausted,
    SessionNotFound,
)
from paceline.rpc.access import CACHE_SCOPE, CallAdmission, Gate, QuotaExceeded
from paceline.rpc.audit import Audit
from paceline.rpc.continuation import Continuation
from paceline.rpc.errors import Cancelled, ServerUnavailable, from_rpc_error, to_status
from paceline.rpc.gen.paceline.v1 import generate_pb2, verify_pb2
from paceline.rpc.messages import MAX_MESSAGE_BYTES
from paceline.rpc.server import PortInUse, start_server
from paceline.rpc.streams import within
from paceline.rpc.tenants import Tenants
from paceline.rpc.tls import ClientTls
from paceline.rpc.tracing import Span, Tracing, traceparent_of

logger = logging.getLogger(__name__)

GENERATE: str = generate_pb2.DESCRIPTOR.services_by_name["GenerateService"].full_name
VERIFY: str = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name

SWEEP_INTERVAL_S = 2.0
MAX_LOOKS = 16
"""Targets that are looked at for one whose numerics are those of a session that goes on."""
MAX_TRIES = 3
"""Targets that a generation may lose in a row without a token: it may be what kills them."""
_RETRY_S = 0.2
_START_ATTEMPT_S = 60.0
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),  # a session is not repeated behind the client's back
)

M = TypeVar("M", bound=Message)
Context = grpc.aio.ServicerContext[bytes, bytes]
Metadata = tuple[tuple[str, str], ...]


class TargetGone(ServerUnavailable):
    """The target of a call is no more."""


class _Route:
    """A verify session: which lease it lives on, whose it is, and who uses it.

    ``users`` counts the streams on it, and one for a session that unary calls opened.
    """

    __slots__ = ("admission", "idle_timeout_s", "lease", "touched_at", "unary", "users")

    def __init__(self, lease: Lease, admission: CallAdmission) -> None:
        self.lease = lease
        self.admission = admission
        self.users = 0
        self.unary = False
        self.idle_timeout_s = 0.0
        self.touched_at = time.monotonic()


class Relay:
    """GenerateService and VerifyService in front of the target replicas.

    Args:
        open_lease: a lease on a target that can take a session, or ServerUnavailable.
        idle_timeout_s: streams that send nothing for so long are closed.
        resume_s: a generation that lost its target looks so long for another one.
        gate: admits callers, and counts what they use.
        tls: for the connections to targets; None is plain text.
        tracing: None traces nothing.
    """

    def __init__(
        self,
        open_lease: Callable[[], Awaitable[Lease]],
        *,
        idle_timeout_s: float,
        resume_s: float,
        gate: Gate,
        tls: ClientTls | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._open_lease = open_lease
        self._idle = IdleLeases()
        self._resume_s = resume_s
        self._tracing = tracing
        self._idle_timeout_s = idle_timeout_s
        self._gate = gate
        self._tls = tls
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

    async def generate(
        self, request: bytes, timeout_s: float | None = None, traceparent: str = ""
    ) -> AsyncGenerator[tuple[bytes, generate_pb2.GenerateReply]]:
        """One generation for the caller, of whatever protocol: each reply as bytes and read.

        When its target goes away, it goes on with the same tokens on another one. Closing the
        generator ends the session and lets the target go.

        Args:
            request: a GenerateRequest.
            timeout_s: for the whole generation; None: no limit.
            traceparent: W3C trace context of the caller.

        Raises:
            PacelineError: refused by the gate or the target, or no target is there.
        """
        admission = self._gate.admit()
        span = self._begin("gateway.generate", traceparent)
        failure: BaseException | None = None
        try:
            pinned = _parse(generate_pb2.GenerateRequest, request).fingerprint
            whole = Continuation(request, timeout_s, fingerprint=pinned)
            while True:
                try:
                    attempt = self._generate_once(request, whole, _metadata(admission, span))
                    async with aclosing(attempt) as replies:
                        async for reply, message in replies:
                            admission.opened()
                            admission.charge(len(message.token_ids) + message.prompt_length)
                            yield reply, message
                    break
                except (TargetGone, ResourceExhausted, NumericsMismatch) as error:
                    exhausted = isinstance(error, TargetGone) and whole.num_tries >= MAX_TRIES
                    if exhausted or not whole.may_go_on(error, self._resume_s):
                        raise
                    logger.info("after %d tokens: %s", whole.num_tokens, error)
                    if not isinstance(error, TargetGone):
                        await asyncio.sleep(_RETRY_S)
                    request = whole.next_request()
        except BaseException as error:
            admission.refused(error)
            failure = error
            raise
        finally:
            admission.release()
            if span is not None:
                span.end(failure)

    async def _generate_once(
        self, request: bytes, whole: Continuation, metadata: Metadata
    ) -> AsyncGenerator[tuple[bytes, generate_pb2.GenerateReply]]:
        """Replies of one target, added to the whole."""
        kept = self._idle.take(whole.fingerprint)
        lease = kept or await self._lease_for(whole.fingerprint)
        try:
            method: Any = self._channel(lease).unary_stream(f"/{GENERATE}/Generate")
            call = method(request, timeout=whole.timeout_s, metadata=metadata)
            async with aclosing(self._replies(call, lease)) as replies:
                async for reply in replies:
                    message = generate_pb2.GenerateReply.FromString(reply)
                    if message.finish_reason == "cancelled":  # by the target, which is stopping
                        raise _gone(lease)
                    changed = whole.add(message)
                    yield (message.SerializeToString() if changed else reply), message
        except BaseException:
            lease.release()
            raise
        self._idle.keep(lease)

    async def _lease_for(self, fingerprint: str) -> Lease:
        """A lease on a target with these numerics, or on another one if none is found.

        That one refuses the session, or takes it where a mismatch is allowed. Targets that are not
        the one are kept until there is one, so that Serve looks at the others.
        """
        others: list[Lease] = []
        try:
            while True:
                lease = await self._open_lease()
                found = not fingerprint or lease.endpoint.fingerprint in ("", fingerprint)
                if found or len(others) == MAX_LOOKS - 1:
                    return lease
                others.append(lease)
        except ServerUnavailable:  # the rest is starting or busy
            if not others:
                raise
            return others.pop()
        finally:
            for other in others:
                other.release()

    def _begin(self, name: str, traceparent: str) -> Span | None:
        return None if self._tracing is None else self._tracing.begin(name, traceparent)

    async def get_model(self, request: bytes = b"", timeout_s: float | None = None) -> bytes:
        """What the targets serve, as a Model.

        Raises: as :meth:`generate`.
        """
        lease = await self._open_lease()
        try:
            return await self._unary(lease, f"/{GENERATE}/GetModel", request, timeout_s)
        finally:
            lease.release()

    async def _generate(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        traceparent = traceparent_of(context.invocation_metadata())
        call = self.generate(request, context.time_remaining(), traceparent)
        async with aclosing(call) as replies:
            async for reply, _ in replies:
                yield reply

    async def _get_model(self, request: bytes, context: Context) -> bytes:
        self._gate.count_open()
        return await self.get_model(request, context.time_remaining())

    # --- VerifyService: a stream for each session -----------------------------------------------

    async def _session(self, requests: AsyncIterator[bytes], context: Context) -> None:
        frames = within(requests, self._idle_timeout_s, later_s=self._idle_timeout_s)
        first = await anext(frames, None)
        if first is None:
            return
        frame = _parse(verify_pb2.VerifyFrame, first)
        if frame.WhichOneof("frame") != "open":
            kind = frame.WhichOneof("frame") or "nothing"
            raise FailedPrecondition(f"the first frame must be open, got {kind}")
        session_id, route = await self._route_for(frame.open)
        span = self._begin("gateway.session", traceparent_of(context.invocation_metadata()))
        failure: BaseException | None = None
        try:
            method: Any = self._channel(route.lease).stream_stream(f"/{VERIFY}/Session")
            call = method(
                timeout=context.time_remaining(), metadata=_metadata(route.admission, span)
            )
            stream = _Stream(call, route.admission, context)
            sender = asyncio.create_task(stream.send(first, frames))
            sender.add_done_callback(stream.sender_ended)
            try:
                async for reply in self._replies(call, route.lease):
                    message = verify_pb2.VerifyReply.FromString(reply)
                    if not session_id and message.HasField("open"):
                        session_id = message.open.session_id
                        self._routes[session_id] = route
                        route.admission.opened(session_id)
                        route.admission.charge(message.open.committed_length)
                    await stream.pass_on(reply, message)
            except (asyncio.CancelledError, TargetGone):
                if stream.error is not None:  # the target is there: the sender ended the call
                    raise stream.error from None
                raise
            finally:
                sender.cancel()
        except BaseException as error:
            route.admission.refused(error) if not session_id else None
            failure = error
            raise
        finally:
            self._leave(session_id, route)
            if span is not None:
                span.end(failure)

    # --- VerifyService: unary calls -------------------------------------------------------------

    async def _open(self, request: bytes, context: Context) -> bytes:
        session_id, route = await self._route_for(_parse(verify_pb2.OpenRequest, request))
        try:
            timeout_s, metadata = context.time_remaining(), _metadata(route.admission)
            reply = await self._unary(route.lease, f"/{VERIFY}/Open", request, timeout_s, metadata)
            opened = verify_pb2.OpenResult.FromString(reply)
            if not session_id:
                session_id = opened.session_id
                route.admission.opened(session_id)
                route.admission.charge(opened.committed_length)
            self._routes[session_id] = route
            route.idle_timeout_s = opened.idle_timeout_seconds
            if not route.unary:
                route.unary = True  # stays until Close, or until it is idle for too long
                route.users += 1
            return reply
        except BaseException as error:
            route.admission.refused(error) if not session_id else None
            raise
        finally:
            self._leave(session_id, route)

    async def _verify(self, request: bytes, context: Context) -> bytes:
        message = _parse(verify_pb2.VerifyRequest, request)
        route = self._of_caller(message.session_id)
        route.admission.round(len(message.token_ids))
        reply = await self._on_session(message.session_id, "Verify", request, context)
        route.admission.charge(_num_tokens(verify_pb2.VerifyResult.FromString(reply)))
        return reply

    async def _truncate(self, request: bytes, context: Context) -> bytes:
        session_id = _parse(verify_pb2.TruncateRequest, request).session_id
        self._of_caller(session_id).admission.round()
        return await self._on_session(session_id, "Truncate", request, context)

    async def _close(self, request: bytes, context: Context) -> bytes:
        session_id = _parse(verify_pb2.CloseRequest, request).session_id
        try:
            self._of_caller(session_id)
        except SessionNotFound:  # gone already: not an error
            return verify_pb2.CloseResult().SerializeToString()
        reply = await self._on_session(session_id, "Close", request, context)
        self._end_unary(session_id)
        return reply

    async def _on_session(
        self, session_id: str, method: str, request: bytes, context: Context
    ) -> bytes:
        route = self._of_caller(session_id)
        route.touched_at = time.monotonic()
        try:
            path, timeout_s = f"/{VERIFY}/{method}", context.time_remaining()
            return await self._unary(route.lease, path, request, timeout_s)
        except (ServerUnavailable, SessionNotFound):
            self._end_unary(session_id)
            raise

    # --- routes ---------------------------------------------------------------------------------

    async def _route_for(self, opening: verify_pb2.OpenRequest) -> tuple[str, _Route]:
        """The route of a session that is resumed, or a new one; ``users`` counts the caller."""
        resumed: str = opening.resume_session_id
        if resumed:
            self._gate.count_open()  # who guesses session ids is slowed down
            route = self._of_caller(resumed)
        else:
            admission = self._gate.admit()
            try:
                route = _Route(await self._lease_for(opening.fingerprint), admission)
            except BaseException as error:
                admission.refused(error)
                raise
        route.users += 1
        return resumed, route

    def _of_caller(self, session_id: str) -> _Route:
        """The route of a caller's session; one of another caller counts as missing."""
        route = self._routes.get(session_id)
        if route is not None and route.admission.is_callers:
            return route
        error = SessionNotFound(session_id)
        if route is not None:
            self._gate.record_refusal(error, session_id)
        raise error

    def _leave(self, session_id: str, route: _Route) -> None:
        route.users -= 1
        if route.users == 0:
            if self._routes.get(session_id) is route:
                del self._routes[session_id]
            route.admission.release()
            route.lease.release()

    def _end_unary(self, session_id: str) -> None:
        route = self._routes.get(session_id)
        if route is not None and route.unary:
            route.unary = False
            self._leave(session_id, route)

    def sweep(self) -> None:
        """Let go of unary sessions that their target has closed because they were idle."""
        now = time.monotonic()
        for session_id, route in list(self._routes.items()):
            if route.unary and (
                route.lease.lost or now - route.touched_at > route.idle_timeout_s + SWEEP_INTERVAL_S
            ):
                self._end_unary(session_id)

    # --- the data plane -------------------------------------------------------------------------

    def _channel(self, lease: Lease) -> grpc.aio.Channel:
        """One connection for each replica, shared by all calls."""
        address = lease.endpoint.address
        channel = self._channels.get(address)
        if channel is None:
            if self._tls is None:
                channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
            else:
                options = (*_CHANNEL_OPTIONS, *self._tls.options)
                credentials = self._tls.credentials()
                channel = grpc.aio.secure_channel(address, credentials, options=options)
            self._channels[address] = channel
        return channel

    async def _replies(self, call: Any, lease: Lease) -> AsyncGenerator[bytes]:
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
            if not _client_left():
                raise _gone(lease) from None
            raise
        finally:
            self.num_calls -= 1
            lease.forget(call.cancel)
            call.cancel()

    async def _unary(
        self,
        lease: Lease,
        path: str,
        request: bytes,
        timeout_s: float | None,
        metadata: Metadata = (),
    ) -> bytes:
        method: Any = self._channel(lease).unary_unary(path)
        call = method(request, timeout=timeout_s, metadata=metadata)
        self.num_calls += 1
        lease.on_lost(call.cancel)
        try:
            reply: bytes = await call
        except grpc.RpcError as error:
            raise await self._failure(error, lease) from None
        except asyncio.CancelledError:
            if not _client_left():
                raise _gone(lease) from None
            raise
        finally:
            self.num_calls -= 1
            lease.forget(call.cancel)
            call.cancel()
        return reply

    async def _failure(self, error: grpc.RpcError, lease: Lease) -> Exception:
        failure = from_rpc_error(error)
        if isinstance(failure, Cancelled):  # not by this side: the replica is stopping
            return _gone(lease)
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
        self._idle.close()
        self._routes.clear()
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()


def _client_left() -> bool:
    """Whether it was the handler that was cancelled, and not its call to the target.

    The call alone is when the target is lost: by the lease, or by another call that noticed first
    and closed their connection; or by a session's own sender, which leaves its error in the
    _Stream. gRPC would answer nothing to a handler that ends as cancelled.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _metadata(admission: CallAdmission, span: Span | None = None) -> Metadata:
    """What a target has to know about a call beyond the message."""
    metadata: Metadata = ()
    if admission.owner is not None:  # a tenant's name may have letters that metadata may not have
        scope = hashlib.sha256(admission.owner.encode()).hexdigest()
        metadata = ((CACHE_SCOPE, scope),)
    return metadata if span is None else (*metadata, ("traceparent", span.traceparent))


def _parse(message: type[M], data: bytes) -> M:
    try:
        return message.FromString(data)
    except DecodeError:
        name = message.DESCRIPTOR.full_name
        raise InvalidArgument("message", f"{len(data)} bytes", f"a {name}") from None


def _gone(lease: Lease) -> TargetGone:
    endpoint = lease.endpoint
    return TargetGone(
        f"target replica {endpoint.replica_id} at {endpoint.address} (process {endpoint.pid}) is "
        "gone, and the session with it; send the request again"
    )


def _num_tokens(result: verify_pb2.VerifyResult) -> int:
    return len(result.accepted_indices) + result.HasField("next_token")


class _Stream:
    """Both directions of one session stream.

    The target takes one frame after the other and answers each once, so the next one is asked for
    when the answer to the last one was passed on: a refusal of this side has its place, a caller
    that waits for an answer is not idle, and nothing is written to a call that has ended, whose
    status gRPC would then replace by INTERNAL.
    """

    def __init__(self, call: Any, admission: CallAdmission, context: Context) -> None:
        self.error: BaseException | None = None  # why the sender ended before the client did
        self._call = call
        self._admission = admission
        self._context = context
        self._answered = asyncio.Event()

    async def send(self, first: bytes, frames: AsyncIterator[bytes]) -> None:
        """Pass frames to the target until the client has sent its last one."""
        await self._write(first)
        async for data in frames:
            frame = _parse(verify_pb2.VerifyFrame, data)
            try:
                if not frame.HasField("close"):  # which frees what others wait for
                    self._admission.round(len(frame.verify.token_ids))
            except QuotaExceeded as error:
                await self._admission.slow_down()
                reply = verify_pb2.VerifyReply(error=to_status(error))
                await self._context.write(reply.SerializeToString())
            else:
                await self._write(data)
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.done_writing()

    async def _write(self, data: bytes) -> None:
        """One frame to the target; returns when the client has the answer."""
        self._answered.clear()
        # A call that has ended refuses writes; the reader of its replies learns why it ended.
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.write(data)
        await self._answered.wait()

    async def pass_on(self, reply: bytes, message: verify_pb2.VerifyReply) -> None:
        """Give the client the target's next answer."""
        if message.HasField("verify"):
            self._admission.charge(_num_tokens(message.verify))
        await self._context.write(reply)
        if not message.HasField("close"):
            self._answered.set()

    def sender_ended(self, sender: asyncio.Task[None]) -> None:
        """Called when :meth:`send` has ended; a failure ends the call to the target."""
        if not sender.cancelled() and sender.exception() is not None:
            self.error = sender.exception()
            self._call.cancel()


def _gate(config: GatewayConfig) -> Gate:
    # Where the file was named on the replica's own node only, it counts as well.
    path = config.tenants or os.environ.get(TENANTS_VARIABLE)
    return Gate(
        tenants=Tenants(path) if path else None,
        limits=config.limits.call_limits(),
        audit=Audit(config.audit_log),
    )


async def _wait_for_target(targets: DeploymentHandle[Any]) -> None:
    """Return when a target takes sessions, however long its model takes to load."""
    while True:
        with suppress(ServerUnavailable):
            (await open_lease(targets, "target", _START_ATTEMPT_S)).release()
            return


@serve.deployment
class GatewayDeployment:
    """Where clients connect: gRPC and OpenAI's HTTP API on the ports of the config."""

    async def __init__(self, config: DeploymentConfig, targets: DeploymentHandle[Any]) -> None:
        gateway, data_tls = config.gateway, config.data_plane_tls
        self._drain_s = gateway.drain_s
        self._gate = gate = _gate(gateway)
        tracing = config.tracing.start("paceline-gateway")
        self._relay = Relay(
            partial(open_lease, targets, "target", gateway.open_timeout_s),
            idle_timeout_s=config.target.idle_timeout_s,
            resume_s=gateway.open_timeout_s,
            gate=gate,
            tls=None if data_tls is None else data_tls.client(),
            tracing=tracing,
        )
        self._tracing = tracing
        # An open port means that there is a target: load balancers send no client here before that.
        await _wait_for_target(targets)
        try:
            self._server = await start_server(
                register=self._relay.register,
                host=gateway.host,
                port=gateway.grpc_port,
                credentials=None if gateway.tls is None else gateway.tls.server().credentials(),
                insecure=gateway.insecure,
                gate=gate,
            )
        except PortInUse as error:
            raise PortInUse(f"gateway.host, gateway.grpc_port: {error}") from None
        self._reporting = report_gauges(self._gauges, gate)
        self._http: HttpServer | None = None
        if gateway.http_port is not None:
            try:
                self._http = await start_http(
                    make_app(self._relay, gate),
                    host=gateway.host,
                    port=gateway.http_port,
                    tls=None if gateway.tls is None else gateway.tls.server(),
                    insecure=gateway.insecure,
                )
            except PortInUse as error:
                raise PortInUse(f"gateway.host, gateway.http_port: {error}") from None
        self._sweeper = asyncio.create_task(self._sweep())

    def status(self) -> dict[str, Any]:
        """Counters for `paceline status`."""
        return {
            "replica_id": serve.get_replica_context().replica_id.unique_id,
            "pid": os.getpid(),
            "address": self._server.address,
            "http": None if self._http is None else self._http.url,
            "calls": self._relay.num_calls,
            "sessions": self._gate.num_sessions,
        }

    def _gauges(self) -> dict[str, float]:
        return {
            "gateway_calls": self._relay.num_calls, "gateway_sessions": self._gate.num_sessions,
        }  # fmt: skip

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self._relay.sweep()

    async def __del__(self) -> None:
        # Serve awaits this once after draining; it is not reached when the constructor failed.
        if hasattr(self, "_sweeper"):
            self._sweeper.cancel()
            http = [] if self._http is None else [self._http.stop(self._drain_s)]
            await asyncio.gather(self._server.stop(self._drain_s), *http)
            await self._reporting.stop()
            await self._relay.close()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.stop)
