"""The client's way past a gateway: asks for tickets, and says when the target can be reached.

A session is opened at the gateway, and goes on there while this asks for a ticket and connects to
the target. Only when that connection stands does the session's stream move; it moves back when the
target refuses a round or the connection breaks, and tries again later. The gateway can resume the
session either way, so nothing is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.errors import PacelineError
from paceline.rpc.errors import from_rpc_error
from paceline.rpc.gen.paceline.v1 import ticket_pb2, ticket_pb2_grpc
from paceline.rpc.reconnect import Connect, RemoteCounters

logger = logging.getLogger(__name__)

# Makes a channel to a target, from its address, the ticket, and the address of the gateway.
ConnectDirect = Callable[[str, str, str], grpc.Channel]

CONNECT_S = 2.0
"""Seconds for a ticket, and for the connection to the target."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pause after a failure; it doubles until a target has answered a round."""


@dataclass(slots=True, kw_only=True)
class DirectOptions:
    """How all sessions of a remote target go past its gateways, and what they have learned.

    Attributes:
        connect: None: they do not.
        retry_at: when to try it again (``time.monotonic``).
        pause: seconds, after the next failure.
    """

    connect: ConnectDirect | None = None
    retry_at: float = 0.0
    pause: float = FIRST_PAUSE_S

    def worked(self) -> None:
        """A target has answered a round."""
        self.retry_at, self.pause = 0.0, FIRST_PAUSE_S

    def failed(self, error: object) -> None:
        """There is no ticket, or no way to the target, for now."""
        logger.info("rounds go through the gateway, or soon will: %s", error)
        self.retry_at = time.monotonic() + self.pause
        self.pause = min(LONGEST_PAUSE_S, 2 * self.pause)


class DirectPath:
    """The tickets of one session, and the connection to its target.

    Args:
        connect: makes a channel to a gateway.

    Attributes:
        is_active: the session's stream goes to the target.
    """

    def __init__(self, options: DirectOptions, connect: Connect, counters: RemoteCounters) -> None:
        self.is_active = False
        self._options = options
        self._connect = connect
        self._counters = counters
        self._gateway = self._session_id = ""
        self._offered = False  # the gateway gives tickets
        self._tokens = 0  # that the session still needs
        self._asked: Any = None  # for a ticket
        self._office: grpc.Channel | None = None  # to the gateway, for tickets
        self._target: grpc.Channel | None = None  # until the stream takes it
        self._ready: Any = None
        self._since = 0.0
        self._ticket: ticket_pb2.Ticket | None = None
        self._got_at = 0.0
        self._used = 0  # tokens of the ticket
        self._unsent = ""  # a ticket that the target has not got

    def opened(self, gateway: str, session_id: str, offered: bool) -> None:
        """The session's stream has been opened or resumed, at the target or at a gateway.

        Args:
            offered: the gateway gives tickets.
        """
        if self.is_active:
            return
        if (gateway, session_id) != (self._gateway, self._session_id):
            self.close()
            self._gateway, self._session_id = gateway, session_id
        self._offered = offered

    def poll(self, tokens: int) -> grpc.Channel | None:
        """Take the next step, without a wait; call it between rounds.

        Args:
            tokens: that the session still needs, at most.

        Returns:
            a connection to the target, to which the stream should move.
        """
        self._tokens = tokens
        now = time.monotonic()
        if self._asked is not None:
            if self._asked.done():
                self._take_ticket()
        elif self._ready is not None:
            if self._ready.done():
                return self._take_connection()
            if now - self._since > CONNECT_S:
                self._give_up(f"no connection to the target within {CONNECT_S:g} s")
        elif self._wants_ticket(now):
            self._ask()
        return None

    def ticket(self) -> str:
        """A new ticket for the target; "" if it has the last one."""
        unsent, self._unsent = self._unsent, ""
        return unsent

    def answered(self, num_tokens: int) -> None:
        """A round has been verified."""
        if self.is_active:
            self._options.worked()
            self._counters.direct_rounds += 1
            self._used += num_tokens

    def failed(self, error: PacelineError) -> None:
        """The stream to the target has ended, or the target has refused a round."""
        self.is_active = False
        self._counters.direct_failures += 1
        self._give_up(error)

    def close(self) -> None:
        """Forget the session."""
        self.is_active = self._offered = False
        self._drop()
        if self._office is not None:
            self._office.close()
            self._office = None
        self._gateway = self._session_id = ""

    def _wants_ticket(self, now: float) -> bool:
        if self._options.connect is None or now < self._options.retry_at:
            return False
        if not self.is_active:
            return self._offered
        assert self._ticket is not None  # the stream began with it
        left = self._ticket.tokens - self._used
        used_up = left < self._tokens and left <= self._ticket.tokens / 2
        return used_up or now - self._got_at >= self._ticket.seconds / 2

    def _ask(self) -> None:
        if self._office is None:
            self._office = self._connect(self._gateway)
        request = ticket_pb2.TicketRequest(session_id=self._session_id, tokens=self._tokens)
        stub: Any = ticket_pb2_grpc.TicketServiceStub(self._office)
        self._asked = stub.Issue.future(request, timeout=CONNECT_S)

    def _take_ticket(self) -> None:
        asked, self._asked = self._asked, None
        try:
            self._ticket = asked.result()
        except grpc.RpcError as error:
            self._options.failed(from_rpc_error(error))  # a ticket that is left is used up
            return
        self._counters.num_tickets += 1
        self._got_at, self._used = time.monotonic(), 0
        if self.is_active:
            self._unsent = self._ticket.ticket
            return
        connect = self._options.connect
        assert connect is not None  # or it would not have asked
        try:
            self._target = connect(self._ticket.address, self._ticket.ticket, self._gateway)
        except PacelineError as error:  # a ticket is not sent in plain text
            self._give_up(error)
            return
        self._ready, self._since = grpc.channel_ready_future(self._target), time.monotonic()

    def _take_connection(self) -> grpc.Channel | None:
        channel, self._target, self._ready = self._target, None, None
        self.is_active = True
        return channel

    def _give_up(self, reason: object) -> None:
        self._options.failed(reason)
        self._drop()

    def _drop(self) -> None:
        """Forget the ticket and a connection that is being made."""
        if self._asked is not None:
            self._asked.cancel()
        if self._ready is not None:
            self._ready.cancel()
        if self._target is not None:
            self._target.close()
        self._asked = self._ready = self._target = self._ticket = None
        self._unsent = ""
