"""VerifyService at the gateway: passes each session on to the replica that has it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from paceline.deployments.lease import Lease
from paceline.deployments.target_calls import TargetCalls, TargetGone, metadata_of, parsed
from paceline.errors import FailedPrecondition, SessionNotFound
from paceline.rpc.access import CallAdmission, Gate, QuotaExceeded
from paceline.rpc.errors import DeadlineExceeded, ServerUnavailable, to_status
from paceline.rpc.gen.paceline.v1 import verify_pb2
from paceline.rpc.streams import within
from paceline.rpc.tracing import Tracing, traced, traceparent_of

VERIFY: str = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name

SWEEP_INTERVAL_S = 2.0

Context = grpc.aio.ServicerContext[bytes, bytes]


class _Route:
    """A verify session: its lease on a target, its owner, and how many calls use it.

    Attributes:
        session_id: the target's name for it; empty before it is open.
        users: streams on it and calls that open it, and one more if ``unary``.
        unary: a unary call opened it: it stays until Close, or until it is idle for too long.
    """

    __slots__ = (
        "admission", "idle_timeout_s", "lease", "session_id", "touched_at", "unary", "users",
    )  # fmt: skip

    def __init__(self, lease: Lease, admission: CallAdmission) -> None:
        self.lease = lease
        self.admission = admission
        self.session_id = ""
        self.users = 0
        self.unary = False
        self.idle_timeout_s = 0.0
        self.touched_at = time.monotonic()


class VerifyRelay:
    """Relays verify sessions, each a stream or unary calls.

    Args:
        idle_timeout_s: seconds without a frame after which the gateway closes a stream.
        gate: admits callers, and counts what they use.
        tracing: None traces nothing.
    """

    def __init__(
        self, calls: TargetCalls, *, idle_timeout_s: float, gate: Gate, tracing: Tracing | None
    ) -> None:
        self._calls = calls
        self._idle_timeout_s = idle_timeout_s
        self._gate = gate
        self._tracing = tracing
        self._routes: dict[str, _Route] = {}

    @property
    def handlers(self) -> dict[str, Any]:
        """The service's methods, without codecs: messages stay bytes."""
        unary = grpc.unary_unary_rpc_method_handler
        return {
            "Session": grpc.stream_stream_rpc_method_handler(self._session),
            "Open": unary(self._open),
            "Verify": unary(self._verify),
            "Truncate": unary(self._truncate),
            "Close": unary(self._close),
        }

    # --- a stream for each session --------------------------------------------------------------

    async def _session(self, requests: AsyncIterator[bytes], context: Context) -> None:
        frames = within(requests, self._idle_timeout_s, later_s=self._idle_timeout_s)
        first = await anext(frames, None)
        if first is None:
            return
        frame = parsed(verify_pb2.VerifyFrame, first)
        if frame.WhichOneof("frame") != "open":
            kind = frame.WhichOneof("frame") or "nothing"
            raise FailedPrecondition(f"the first frame must be open, got {kind}")
        traceparent = traceparent_of(context.invocation_metadata())
        async with self._route_for(frame.open) as route:
            with traced(self._tracing, "gateway.session", traceparent) as span:
                call = self._calls.stream(
                    route.lease,
                    f"/{VERIFY}/Session",
                    timeout=context.time_remaining(),
                    metadata=metadata_of(route.admission, span),
                )
                stream = _Stream(call, route.admission, context, self._idle_timeout_s)
                await self._pass_on(stream, first, frames, route)

    async def _pass_on(
        self, stream: _Stream, first: bytes, frames: AsyncIterator[bytes], route: _Route
    ) -> None:
        """Pass frames and replies on until one side ends the stream."""
        sender = asyncio.create_task(stream.send(first, frames))
        sender.add_done_callback(stream.sender_ended)
        try:
            async for reply in self._calls.replies(stream.call, route.lease):
                message = verify_pb2.VerifyReply.FromString(reply)
                if message.HasField("open"):
                    self._opened(route, message.open)
                await stream.pass_on(reply, message)
        except (asyncio.CancelledError, TargetGone):
            if stream.error is not None:  # the target is there, but the sender has ended the call
                raise stream.error from None
            raise
        finally:
            sender.cancel()

    # --- unary calls ----------------------------------------------------------------------------

    async def _open(self, request: bytes, context: Context) -> bytes:
        async with self._route_for(parsed(verify_pb2.OpenRequest, request)) as route:
            timeout_s, metadata = context.time_remaining(), metadata_of(route.admission)
            reply = await self._calls.unary(
                route.lease, f"/{VERIFY}/Open", request, timeout_s, metadata
            )
            result = verify_pb2.OpenResult.FromString(reply)
            self._opened(route, result)
            route.idle_timeout_s = result.idle_timeout_seconds
            if not route.unary:
                route.unary = True
                route.users += 1
            return reply

    async def _verify(self, request: bytes, context: Context) -> bytes:
        message = parsed(verify_pb2.VerifyRequest, request)
        route = self._of_caller(message.session_id)
        route.admission.round(len(message.token_ids))
        reply = await self._on_session(message.session_id, "Verify", request, context)
        route.admission.charge(_num_tokens(verify_pb2.VerifyResult.FromString(reply)))
        return reply

    async def _truncate(self, request: bytes, context: Context) -> bytes:
        session_id = parsed(verify_pb2.TruncateRequest, request).session_id
        self._of_caller(session_id).admission.round()
        return await self._on_session(session_id, "Truncate", request, context)

    async def _close(self, request: bytes, context: Context) -> bytes:
        session_id = parsed(verify_pb2.CloseRequest, request).session_id
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
            return await self._calls.unary(route.lease, path, request, timeout_s)
        except (ServerUnavailable, SessionNotFound):
            self._end_unary(session_id)
            raise

    # --- routes ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def _route_for(self, opening: verify_pb2.OpenRequest) -> AsyncIterator[_Route]:
        """The route of the session that a call resumes or opens, while the call uses it."""
        if opening.resume_session_id:
            self._gate.count_open()  # so that guessing session ids is slow
            route = self._of_caller(opening.resume_session_id)
        else:
            admission = self._gate.admit()
            try:
                route = _Route(await self._calls.lease_for(opening.fingerprint), admission)
            except BaseException as error:
                admission.refused(error)
                raise
        route.users += 1
        try:
            yield route
        except BaseException as error:
            if not route.session_id:
                route.admission.refused(error)
            raise
        finally:
            self._leave(route)

    def _opened(self, route: _Route, result: verify_pb2.OpenResult) -> None:
        """The target has opened the route's session, or has resumed it."""
        if not route.session_id:
            route.session_id = result.session_id
            self._routes[route.session_id] = route
            route.admission.opened(route.session_id)
            route.admission.charge(result.committed_length)

    def _of_caller(self, session_id: str) -> _Route:
        """The route of the caller's session; another caller's counts as missing."""
        route = self._routes.get(session_id)
        if route is not None and route.admission.is_callers:
            return route
        error = SessionNotFound(session_id)
        if route is not None:
            self._gate.record_refusal(error, session_id)
        raise error

    def _leave(self, route: _Route) -> None:
        route.users -= 1
        if route.users == 0:
            if self._routes.get(route.session_id) is route:
                del self._routes[route.session_id]
            route.admission.release()
            route.lease.release()

    def _end_unary(self, session_id: str) -> None:
        route = self._routes.get(session_id)
        if route is not None and route.unary:
            route.unary = False
            self._leave(route)

    @property
    def num_sessions(self) -> int:
        """Sessions that a client may still use."""
        return len(self._routes)

    def sweep(self) -> None:
        """Forget unary sessions that their target has closed because they were idle."""
        now = time.monotonic()
        for session_id, route in list(self._routes.items()):
            if route.unary and (
                route.lease.lost or now - route.touched_at > route.idle_timeout_s + SWEEP_INTERVAL_S
            ):
                self._end_unary(session_id)

    def close(self) -> None:
        """Forget all sessions."""
        for route in self._routes.values():
            route.lease.release()
        self._routes.clear()


def _num_tokens(result: verify_pb2.VerifyResult) -> int:
    return len(result.accepted_indices) + result.HasField("next_token")


class _Stream:
    """Both directions of one session stream.

    The target takes one frame after the other and answers each once. So this side asks the client
    for the next frame when it has passed the last answer on. Then a refusal of its own has its
    place, a caller that waits for an answer is not idle, and nothing writes to a call that has
    ended, whose status gRPC would replace by INTERNAL.
    """

    def __init__(
        self, call: Any, admission: CallAdmission, context: Context, idle_timeout_s: float
    ) -> None:
        self._idle_timeout_s = idle_timeout_s
        self.error: BaseException | None = None  # ended the sender early
        self.call = call
        self._admission = admission
        self._context = context
        self._answered = asyncio.Event()

    async def send(self, first: bytes, frames: AsyncIterator[bytes]) -> None:
        """Pass frames to the target until the client has sent its last one."""
        await self._write(first)
        async for data in frames:
            frame = parsed(verify_pb2.VerifyFrame, data)
            try:
                if not frame.HasField("close"):  # Close frees what others wait for
                    self._admission.round(len(frame.verify.token_ids))
            except QuotaExceeded as error:
                await self._admission.slow_down()
                reply = verify_pb2.VerifyReply(error=to_status(error))
                await self._context.write(reply.SerializeToString())
            else:
                await self._write(data)
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self.call.done_writing()

    async def _write(self, data: bytes) -> None:
        """One frame to the target; returns when the client has the answer."""
        self._answered.clear()
        # A call that has ended refuses writes; the reader of its replies learns why it ended.
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self.call.write(data)
        await self._answered.wait()

    async def pass_on(self, reply: bytes, message: verify_pb2.VerifyReply) -> None:
        """Give the client the target's next answer."""
        if message.HasField("verify"):
            self._admission.charge(_num_tokens(message.verify))
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                await self._context.write(reply)
        except TimeoutError:
            limit = f"{self._idle_timeout_s:g} s"
            raise DeadlineExceeded(f"an answer was not read within {limit}") from None
        if not message.HasField("close"):
            self._answered.set()

    def sender_ended(self, sender: asyncio.Task[None]) -> None:
        """Called when :meth:`send` has ended; a failure ends the call to the target."""
        if not sender.cancelled() and sender.exception() is not None:
            self.error = sender.exception()
            self.call.cancel()
