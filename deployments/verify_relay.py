"""VerifyService at the gateway: passes each session on to the replica that has it.

The session's id says which one that is (``session_ids.py``), so that any gateway may take the next
call. The gateway that opened the session holds its lease, and counts it, until the target says that
it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.deployments.affinity import PrefixTable, message_keys
from paceline.deployments.config import DirectConfig
from paceline.deployments.lease import Lease
from paceline.deployments.session_ids import SessionIds
from paceline.deployments.target_calls import (
    Metadata,
    TargetCalls,
    TargetGone,
    metadata_of,
    parsed,
    scope_of,
)
from paceline.deployments.tickets import TICKETS, DirectTicket, sign_ticket
from paceline.errors import FailedPrecondition, PacelineError, SessionNotFound
from paceline.rpc.access import LEASE_ID, SESSION_ID, CallAdmission, Gate
from paceline.rpc.errors import DeadlineExceeded, to_status
from paceline.rpc.gen.paceline.v1 import ticket_pb2, verify_pb2
from paceline.rpc.quotas import QuotaExceeded
from paceline.rpc.streams import within
from paceline.rpc.tracing import Tracing, traced, traceparent_of

CLOSE_S = 5.0
"""Seconds that the close of a session may take whose client reads nothing."""

VERIFY: str = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name

Context = grpc.aio.ServicerContext[bytes, bytes]


class _UnreadAnswer(DeadlineExceeded):
    """The client of a stream has not read an answer for as long as a session may be idle."""


@dataclass(slots=True)
class _Route:
    """Where a call's session is, and what the call counts on.

    Attributes:
        session_id: of a session that is to be opened, its id to be.
        is_open: the session is there, as far as this gateway knows.
    """

    lease: Lease
    admission: CallAdmission
    session_id: str
    is_open: bool

    @property
    def metadata(self) -> Metadata:
        """What a target has to know of a session that it opens."""
        lease_id = self.lease.endpoint.lease_id
        return ((SESSION_ID, self.session_id), (LEASE_ID, lease_id))


class VerifyRelay:
    """Relays verify sessions, each a stream or unary calls.

    Args:
        idle_timeout_s: seconds without a frame after which the gateway closes a stream.
        gate: admits callers, and counts what they use.
        session_ids: with the keys of all gateways.
        tracing: None traces nothing.
        prefixes: as of the relay.
        direct: what tickets are good for; None: this gateway gives none.
    """

    def __init__(
        self,
        calls: TargetCalls,
        *,
        idle_timeout_s: float,
        gate: Gate,
        session_ids: SessionIds,
        tracing: Tracing | None,
        prefixes: PrefixTable | None = None,
        direct: DirectConfig | None = None,
    ) -> None:
        self._calls = calls
        self._direct = direct
        self._prefixes = prefixes
        self._idle_timeout_s = idle_timeout_s
        self._gate = gate
        self._tracing = tracing
        self._session_ids = session_ids
        self._held: dict[str, _Route] = {}  # sessions that were opened here

    @property
    def handlers(self) -> dict[str, dict[str, Any]]:
        """The methods of each service, without codecs: messages stay bytes."""
        unary: Any = grpc.unary_unary_rpc_method_handler
        tickets = {} if self._direct is None else {TICKETS: {"Issue": unary(self._issue)}}
        return {
            VERIFY: {
                "Session": grpc.stream_stream_rpc_method_handler(self._session),
                "Open": unary(self._open),
                "Verify": unary(self._verify),
                "Truncate": unary(self._truncate),
                "Close": unary(self._close),
            },
            **tickets,
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
                    metadata=(*metadata_of(route.admission, span), *route.metadata),
                )
                stream = _Stream(call, route.admission, self._gate, context, self._idle_timeout_s)
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
                    if self._direct is not None:
                        message.open.direct = True
                        reply = message.SerializeToString()
                elif message.HasField("close"):
                    self._closed(route.session_id)
                await stream.pass_on(reply, message)
        except _UnreadAnswer:  # nothing reads, as with a session that is idle
            await self._give_up(route)
            raise
        except (asyncio.CancelledError, TargetGone):
            if stream.error is not None:  # the target is there, but the sender has ended the call
                raise stream.error from None
            raise
        finally:
            sender.cancel()

    async def _give_up(self, route: _Route) -> None:
        """Close a session whose client reads nothing."""
        request = verify_pb2.CloseRequest(session_id=route.session_id).SerializeToString()
        with suppress(PacelineError):
            await self._calls.unary(route.lease, f"/{VERIFY}/Close", request, CLOSE_S)
        self._closed(route.session_id)

    # --- unary calls ----------------------------------------------------------------------------

    async def _open(self, request: bytes, context: Context) -> bytes:
        async with self._route_for(parsed(verify_pb2.OpenRequest, request)) as route:
            timeout_s = context.time_remaining()
            metadata = (*metadata_of(route.admission), *route.metadata)
            reply = await self._calls.unary(
                route.lease, f"/{VERIFY}/Open", request, timeout_s, metadata
            )
            self._opened(route, verify_pb2.OpenResult.FromString(reply))
            return reply

    async def _verify(self, request: bytes, context: Context) -> bytes:
        message = parsed(verify_pb2.VerifyRequest, request)
        route = await self._of_caller(message.session_id)
        await self._gate.before_round()
        route.admission.round(len(message.token_ids))
        reply = await self._on_session(route, "Verify", request, context)
        route.admission.charge(_num_tokens(verify_pb2.VerifyResult.FromString(reply)))
        return reply

    async def _truncate(self, request: bytes, context: Context) -> bytes:
        route = await self._of_caller(parsed(verify_pb2.TruncateRequest, request).session_id)
        await self._gate.before_round()
        route.admission.round()
        return await self._on_session(route, "Truncate", request, context)

    async def _close(self, request: bytes, context: Context) -> bytes:
        try:
            route = await self._of_caller(parsed(verify_pb2.CloseRequest, request).session_id)
        except SessionNotFound:  # gone already: not an error
            return verify_pb2.CloseResult().SerializeToString()
        reply = await self._on_session(route, "Close", request, context)
        self._closed(route.session_id)
        return reply

    async def _on_session(
        self, route: _Route, method: str, request: bytes, context: Context
    ) -> bytes:
        path, timeout_s = f"/{VERIFY}/{method}", context.time_remaining()
        return await self._calls.unary(route.lease, path, request, timeout_s)

    # --- tickets --------------------------------------------------------------------------------

    async def _issue(self, request: bytes, context: Context) -> bytes:
        """A ticket for a session of the caller, who pays for all of its tokens now."""
        assert self._direct is not None  # or there is no such method
        message = parsed(ticket_pb2.TicketRequest, request)
        route = await self._of_caller(message.session_id)
        key = self._session_ids.ticket_key(message.session_id)
        await self._gate.before_round()
        admission, seconds = route.admission, self._direct.ticket_s
        admission.round()
        tokens = admission.affordable(
            min(message.tokens or self._direct.ticket_tokens, self._direct.ticket_tokens)
        )
        # Before the grant, and for good if its answer is lost: a caller with a short deadline would
        # get the next ticket for nothing.
        admission.charge(tokens)
        grant = ticket_pb2.GrantRequest(
            session_id=message.session_id, key=key, tokens=tokens, seconds=seconds
        ).SerializeToString()
        try:
            reply = await self._calls.unary(
                route.lease, f"/{TICKETS}/Grant", grant, context.time_remaining()
            )
        except (DeadlineExceeded, TargetGone):
            raise
        except PacelineError:  # the target's refusal
            admission.give_back(tokens)
            raise
        granted = ticket_pb2.GrantResult.FromString(reply)
        admission.give_back(granted.granted - granted.used)  # what is left of the last ticket
        ticket = DirectTicket(
            message.session_id,
            scope_of(admission),
            granted.address,
            granted.limit,
            granted.expires_at,
        )
        return ticket_pb2.Ticket(
            ticket=sign_ticket(ticket, key),
            address=granted.address,
            tokens=tokens,
            seconds=seconds,
        ).SerializeToString()

    # --- routes ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def _route_for(self, opening: verify_pb2.OpenRequest) -> AsyncIterator[_Route]:
        """The route of the session that a call resumes or opens, while the call uses it."""
        if opening.resume_session_id:
            await self._gate.before_open(session=False)
            self._gate.count_open()  # so that guessing session ids is slow
            yield await self._of_caller(opening.resume_session_id)
            return
        await self._gate.before_open()
        admission = self._gate.admit()
        try:
            lease = await self._lease_for(opening, admission)
        except BaseException as error:
            admission.refused(error)
            raise
        session_id = self._session_ids.make(lease.endpoint.address, admission.owner)
        route = _Route(lease, admission, session_id, is_open=False)
        try:
            yield route
        except BaseException as error:
            if not route.is_open:
                admission.refused(error)
            raise
        finally:
            if not route.is_open:
                admission.release()
                lease.release()

    async def _lease_for(self, opening: verify_pb2.OpenRequest, admission: CallAdmission) -> Lease:
        """A lease for a new session, if possible where its prompt's beginning is known."""
        if self._prefixes is None:
            return await self._calls.lease_for(opening.fingerprint)
        keys = message_keys(opening, metadata_of(admission))
        lease = await self._calls.lease_for(opening.fingerprint, self._prefixes.find(keys))
        self._prefixes.note(keys, lease.endpoint.replica_id)
        return lease

    def _opened(self, route: _Route, result: verify_pb2.OpenResult) -> None:
        """The target has opened the route's session, or has resumed it."""
        if not route.is_open:
            route.is_open = True
            self._held[route.session_id] = route
            route.lease.on_end(lambda: self._ended(route.session_id))
            route.admission.opened(route.session_id)
            route.admission.charge(result.committed_length)

    async def _of_caller(self, session_id: str) -> _Route:
        """The route of a session of the caller; another caller's counts as missing.

        Raises:
            SessionNotFound: no gateway made this id, or another caller has the session.
        """
        place = await self._session_ids.find(session_id, self._gate.caller_name)
        if place is None or not place.is_owners:
            error = SessionNotFound(session_id)
            if place is not None:
                self._gate.record_refusal(error, session_id)
            raise error
        held = self._held.get(session_id)
        lease = self._calls.unleased(place.address) if held is None else held.lease
        return _Route(lease, self._gate.visit(), session_id, is_open=True)

    def _closed(self, session_id: str) -> None:
        """The target has closed a session. With tickets, its lease tells what they have left."""
        if self._direct is None:
            self._ended(session_id)

    def _ended(self, session_id: str) -> None:
        """A session is over, or its target is lost."""
        route = self._held.pop(session_id, None)
        if route is not None:
            route.admission.give_back(route.lease.unused)
            route.admission.release()
            route.lease.release()

    @property
    def num_sessions(self) -> int:
        """Sessions that were opened here and that a client may still use."""
        return len(self._held)

    def close(self) -> None:
        """Give all leases back."""
        for session_id in list(self._held):
            self._ended(session_id)


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
        self,
        call: Any,
        admission: CallAdmission,
        gate: Gate,
        context: Context,
        idle_timeout_s: float,
    ) -> None:
        self._idle_timeout_s = idle_timeout_s
        self.error: BaseException | None = None  # ended the sender early
        self.call = call
        self._admission = admission
        self._gate = gate
        self._context = context
        self._answered = asyncio.Event()

    async def send(self, first: bytes, frames: AsyncIterator[bytes]) -> None:
        """Pass frames to the target until the client has sent its last one."""
        await self._write(first)
        async for data in frames:
            frame = parsed(verify_pb2.VerifyFrame, data)
            try:
                if not frame.HasField("close"):  # Close frees what others wait for
                    await self._gate.before_round()
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
            raise _UnreadAnswer(f"an answer was not read within {limit}") from None
        if not message.HasField("close"):
            self._answered.set()

    def sender_ended(self, sender: asyncio.Task[None]) -> None:
        """Called when :meth:`send` has ended; a failure ends the call to the target."""
        if not sender.cancelled() and sender.exception() is not None:
            self.error = sender.exception()
            self.call.cancel()
