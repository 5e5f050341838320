"""A target's listener for devices, which come past the gateway with a ticket (``tickets.py``).

It serves one method, the stream of a verify session that was opened at a gateway, and hands its
frames on to the target's own VerifyService. Certificate, limits and time-outs are the gateway's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

import grpc
import ray.util

from paceline.deployments.config import DeploymentConfig
from paceline.deployments.target_calls import parsed
from paceline.deployments.tickets import TICKETS, DirectTicket, TicketBook
from paceline.deployments.verify_relay import VERIFY
from paceline.errors import FailedPrecondition, SessionNotFound
from paceline.rpc.access import Gate, Limits, token_of
from paceline.rpc.audit import Audit
from paceline.rpc.errors import DeadlineExceeded, Unauthenticated, to_status
from paceline.rpc.gen.paceline.v1 import ticket_pb2, verify_pb2
from paceline.rpc.quotas import QuotaExceeded
from paceline.rpc.server import PortInUse, RpcServer, join_address, start_server
from paceline.rpc.verify_service import VerifyServicer

_EVERYWHERE = ("0.0.0.0", "::", "[::]")

Context = grpc.aio.ServicerContext[bytes, bytes]


class TicketGate(Gate):
    """Admits calls that carry a ticket of this target as their bearer token."""

    def __init__(self, book: TicketBook, limits: Limits, audit: Audit | None) -> None:
        super().__init__(limits=limits, audit=audit)
        self._book = book

    def authenticate(
        self, peer: str, method: str, headers: Iterable[tuple[str, Any]], *, public: bool = False
    ) -> None:
        """As the gate's own, with the ticket in the place of a tenant's token.

        Raises:
            Unauthenticated, QuotaExceeded: as :meth:`TicketBook.check`.
        """
        super().authenticate(peer, method, headers, public=public)
        if public:
            return
        try:
            self._book.check(token_of(headers))
        except (Unauthenticated, QuotaExceeded) as error:
            self.record_refusal(error)
            raise


class DirectListener:
    """The listener of one target, and where gateways ask for grants. Lives on its event loop.

    :meth:`register` adds the grants to the target's data plane, :meth:`start` opens the listener.
    """

    def __init__(self, config: DeploymentConfig, *, audit: Audit | None = None) -> None:
        self._config = config
        self._book = TicketBook()
        self._gate = TicketGate(self._book, config.gateway.limits.call_limits(), audit)
        self._idle_timeout_s = config.target.idle_timeout_s
        self._verify: VerifyServicer | None = None
        self._server: RpcServer | None = None

    @property
    def address(self) -> str:
        """HOST:PORT that clients are told."""
        return self._book.address

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Add what gateways call, to the server of the data plane."""
        return _add(server, TICKETS, {"Grant": grpc.unary_unary_rpc_method_handler(self._grant)})

    async def start(self, verify: VerifyServicer) -> None:
        """Listen.

        Args:
            verify: has the sessions.

        Raises:
            PortInUse: another process listens there.
        """
        self._verify = verify
        direct, gateway = self._config.direct, self._config.gateway
        try:
            self._server = await start_server(
                register=self._register_session,
                host=direct.host,
                port=direct.port,
                credentials=None if gateway.tls is None else gateway.tls.server().credentials(),
                insecure=gateway.insecure,
                gate=self._gate,
                idle_timeout_s=self._idle_timeout_s,
                max_connection_age_s=gateway.max_connection_age_s,
                max_connection_age_grace_s=gateway.max_connection_age_grace_s,
            )
        except PortInUse as error:
            raise PortInUse(f"direct.host, direct.port: {error}") from None
        self._book.address = self._server.address
        if direct.host in _EVERYWHERE:
            host = ray.util.get_node_ip_address()
            self._book.address = join_address(host, self._server.port)

    def unused(self, lease_id: str) -> int:
        """The session with this lease has ended: as :meth:`TicketBook.ended`."""
        return self._book.ended(lease_id)

    async def stop(self, grace: float = 2.0) -> None:
        """Close the listener; its sessions can go on at a gateway."""
        if self._server is not None:
            await self._server.stop(grace)

    # --- for gateways ---------------------------------------------------------------------------

    async def _grant(self, data: bytes, context: Context) -> bytes:
        request = parsed(ticket_pb2.GrantRequest, data)
        served = None if self._verify is None else self._verify.sessions.get(request.session_id)
        if served is None:
            raise SessionNotFound(request.session_id)
        grant = self._book.grant(
            request.session_id,
            served.session.tenant,
            served.lease_id,
            request.key,
            request.tokens,
            request.seconds,
        )
        return ticket_pb2.GrantResult(
            address=self.address, **grant._asdict()
        ).SerializeToString()  # fmt: skip

    # --- for devices ----------------------------------------------------------------------------

    def _register_session(self, server: grpc.aio.Server) -> list[str]:
        make: Any = grpc.stream_stream_rpc_method_handler
        return _add(server, VERIFY, {"Session": make(self._session)})

    async def _session(self, requests: AsyncIterator[bytes], context: Context) -> None:
        assert self._verify is not None  # it listens
        ticket = self._book.check(token_of(context.invocation_metadata() or ()))
        frames = self._checked(requests, ticket, context)
        answers: Any = self._verify.Session(frames, context)
        async with aclosing(answers):
            async for reply in answers:
                session = self._book.session(ticket)
                if session is not None and reply.HasField("verify"):
                    result = reply.verify
                    num_tokens = len(result.accepted_indices) + result.HasField("next_token")
                    session.used += num_tokens
                await self._write(reply, context)

    async def _checked(
        self, requests: AsyncIterator[bytes], ticket: DirectTicket, context: Context
    ) -> AsyncIterator[verify_pb2.VerifyFrame]:
        """The frames that the session's ticket allows; others are answered here, in their place.

        VerifyService asks for a frame when it has answered the one before.
        """
        is_open = False
        async for data in requests:
            frame = parsed(verify_pb2.VerifyFrame, data)
            try:
                if not is_open:
                    _check_opening(frame, ticket)
                    is_open = True
                elif frame.HasField("verify"):
                    ticket = self._check_round(frame, ticket)
                elif frame.HasField("truncate"):
                    raise FailedPrecondition("a session is cut at the gateway")
            except (Unauthenticated, QuotaExceeded, FailedPrecondition) as error:
                if not is_open:
                    raise
                await self._gate.slow_down()
                await self._write(verify_pb2.VerifyReply(error=to_status(error)), context)
            else:
                yield frame

    def _check_round(self, frame: verify_pb2.VerifyFrame, ticket: DirectTicket) -> DirectTicket:
        """The ticket of a round, which may bring another one along.

        Raises:
            Unauthenticated, QuotaExceeded: the ticket is no longer good, or the gate refuses.
        """
        try:
            if frame.ticket:
                renewed = self._book.check(frame.ticket)
                if renewed.session_id != ticket.session_id:
                    raise Unauthenticated("the ticket is another session's")
                ticket = renewed
            self._book.check_left(ticket)
        except (Unauthenticated, QuotaExceeded) as error:
            self._gate.record_refusal(error, ticket.session_id)
            raise
        self._gate.visit().round(len(frame.verify.token_ids))
        return ticket

    async def _write(self, reply: verify_pb2.VerifyReply, context: Context) -> None:
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                await context.write(reply.SerializeToString())
        except TimeoutError:
            limit = f"{self._idle_timeout_s:g} s"
            raise DeadlineExceeded(f"an answer was not read within {limit}") from None


def _check_opening(frame: verify_pb2.VerifyFrame, ticket: DirectTicket) -> None:
    """Raise unless the first frame resumes the session that the ticket is for."""
    if not frame.open.resume_session_id:
        raise FailedPrecondition("the first frame must resume a session, which a gateway opens")
    if frame.open.resume_session_id != ticket.session_id:
        raise Unauthenticated("the ticket is another session's")


def _add(server: grpc.aio.Server, service: str, methods: dict[str, Any]) -> list[str]:
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    return [service]
