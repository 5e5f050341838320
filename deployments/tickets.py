"""Tickets: what a gateway signs, and a target checks, when a device's rounds go past the gateway.

A ticket names a session, its owner, the target's address, how many tokens it lets the session
commit, and when it expires. It is signed (HMAC-SHA256) with a key of that session alone, made of
the key that signs session ids (``session_ids.py``); the gateway tells it to the session's target
with each grant, over the data plane. So a target can make tickets for none but its own sessions.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import NamedTuple

from paceline.errors import SessionNotFound
from paceline.rpc.errors import Unauthenticated
from paceline.rpc.gen.paceline.v1 import ticket_pb2
from paceline.rpc.quotas import QuotaExceeded

TICKETS: str = ticket_pb2.DESCRIPTOR.services_by_name["TicketService"].full_name

_LONGEST = 2048  # characters of a ticket
_RENEW = "ask the gateway for another ticket (TicketService.Issue)"


@dataclass(frozen=True, slots=True)
class DirectTicket:
    """What a ticket says.

    Attributes:
        owner: digest of the tenant's name, as targets know it; "" without tenants.
        address: where the target takes the ticket.
        limit: tokens that the session's direct rounds may have committed, since it was opened.
        expires_at: by the target's own clock.
    """

    session_id: str
    owner: str
    address: str
    limit: int
    expires_at: float


def sign_ticket(ticket: DirectTicket, key: bytes) -> str:
    """The text of a ticket, signed with its session's key."""
    payload = _text(json.dumps(astuple(ticket)).encode())
    return f"{payload}.{_mac(payload, key)}"


def _mac(payload: str, key: bytes) -> str:
    return _text(hmac.digest(key, payload.encode(), hashlib.sha256))


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _read(text: str) -> DirectTicket | None:
    """What a text says that looks like a ticket, signed or not."""
    payload = text.partition(".")[0]
    try:
        data = base64.b64decode(payload + "=" * (-len(payload) % 4), altchars=b"-_", validate=True)
        session_id, owner, address, limit, expires_at = json.loads(data)
    except (ValueError, TypeError, RecursionError, binascii.Error):
        return None
    return DirectTicket(session_id, owner, address, limit, expires_at)


@dataclass(slots=True)
class DirectSession:
    """What gateways have granted to a session of this target.

    Attributes:
        owner: as in its tickets.
        key: that signs its tickets.
        granted: tokens, all grants together.
        used: tokens that its direct rounds have committed.
    """

    owner: str
    lease_id: str
    key: bytes = field(repr=False)
    granted: int = 0
    used: int = 0


class Grant(NamedTuple):
    """The answer to a grant: as the message ``GrantResult``."""

    limit: int
    granted: int
    used: int
    expires_at: float


class TicketBook:
    """A target's sessions with tickets. Lives on its event loop.

    Args:
        clock: seconds.

    Attributes:
        address: where the target takes tickets.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = ""
        self._clock = clock
        self._sessions: dict[str, DirectSession] = {}
        self._by_lease: dict[str, str] = {}

    def grant(
        self, session_id: str, owner: str, lease_id: str, key: bytes, tokens: int, seconds: float
    ) -> Grant:
        """Let a session commit ``tokens`` more by direct rounds; older grants lapse.

        Args:
            lease_id: what a gateway holds for the session.

        Raises:
            SessionNotFound: the session has no lease, with which its grants would end.
        """
        if not lease_id:
            raise SessionNotFound(session_id)
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = DirectSession(owner, lease_id, key)
            self._by_lease[lease_id] = session_id
        before, session.granted = session.granted, session.used + tokens
        return Grant(session.granted, before, session.used, self._clock() + seconds)

    def check(self, text: str) -> DirectTicket:
        """The ticket with this text, if it is good now.

        Raises:
            Unauthenticated: it is not, whatever the reason.
            QuotaExceeded: its tokens are used up.
        """
        ticket = _read(text) if len(text) <= _LONGEST else None
        session = self.session(ticket) if ticket is not None else None
        if ticket is None or session is None:
            raise Unauthenticated(f"this target knows no such ticket: {_RENEW}")
        payload, _, mac = text.partition(".")
        is_signed = hmac.compare_digest(_mac(payload, session.key).encode(), mac.encode())
        if not is_signed or (ticket.owner, ticket.address) != (session.owner, self.address):
            raise Unauthenticated(f"this target knows no such ticket: {_RENEW}")
        self.check_left(ticket)
        return ticket

    def session(self, ticket: DirectTicket) -> DirectSession | None:
        """The session of a ticket; None: it is not there, or has ended."""
        return self._sessions.get(ticket.session_id) if isinstance(ticket.session_id, str) else None

    def check_left(self, ticket: DirectTicket) -> None:
        """Raise unless a ticket that was good still is: as :meth:`check`."""
        session = self.session(ticket)
        if session is None:
            raise Unauthenticated(f"the session of this ticket has ended: {_RENEW}")
        if not self._clock() < ticket.expires_at:
            raise Unauthenticated(f"the ticket has expired: {_RENEW}")
        if session.used >= ticket.limit:
            raise QuotaExceeded(f"the ticket's tokens are used up: {_RENEW}", "ticket_tokens")

    def ended(self, lease_id: str) -> int:
        """The session with this lease has ended: granted tokens that it has not used.

        Below 0: its last rounds have committed more than was granted.
        """
        session = self._sessions.pop(self._by_lease.pop(lease_id, ""), None)
        return 0 if session is None else session.granted - session.used
