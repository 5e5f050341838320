"""Which server a session of a remote target uses, and where and when it tries again.

Decisions only: nothing here connects or sends.
"""

from __future__ import annotations

import enum
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import grpc

from paceline.errors import (
    NumericsMismatch,
    PacelineError,
    ResourceExhausted,
    SessionNotFound,
)
from paceline.rpc.errors import (
    Cancelled,
    DeadlineExceeded,
    EpochFenced,
    InternalError,
    PrefixDiverged,
    RoundOutOfOrder,
    ServerUnavailable,
)

logger = logging.getLogger(__name__)

Connect = Callable[[str], grpc.Channel]

# After these another attempt, on this or another server, can help. All others go to the caller.
TRANSIENT = (
    ServerUnavailable, DeadlineExceeded, Cancelled, InternalError, ResourceExhausted,
    SessionNotFound, PrefixDiverged, RoundOutOfOrder, EpochFenced, NumericsMismatch,
)  # fmt: skip
_TRAVEL_MEMORY = 0.8
_BROKEN = (ServerUnavailable, DeadlineExceeded, Cancelled, InternalError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """When a server counts as lost, and how to try again. All in seconds.

    The client asks a server that owes an answer for ``silence`` whether it is alive, on the same
    connection. Without an answer within ``probe`` (more on slow links) the server counts as lost;
    one that is alive may take up to ``stall``. Attempts go around the list of servers, the first
    time without a pause, then with pauses from ``first_backoff`` doubling up to ``max_backoff``,
    less a random part of up to a half, so that clients do not come back all at once. After
    ``give_up`` without an answer of any server the round fails.
    """

    silence: float = 0.5
    probe: float = 0.6
    stall: float = 30.0
    first_backoff: float = 0.05
    max_backoff: float = 1.0
    give_up: float = 30.0


@dataclass(slots=True)
class RemoteCounters:
    """Raw counters of all sessions; derive ratios where you show them."""

    rounds_sent: int = 0  # Verify frames, repeated and useless ones included
    bytes_up: int = 0  # of Verify frames, serialized
    bytes_down: int = 0  # of their answers
    states_bytes: int = 0  # of the target's states in these answers
    sent_ahead: int = 0  # rounds that left before the answer to the round before
    ahead_right: int = 0  # rounds sent ahead whose guess came true
    num_opened: int = 0
    num_resumed: int = 0
    num_failures: int = 0  # streams that broke or fell silent, and refusals
    num_tickets: int = 0  # that gateways gave
    direct_rounds: int = 0  # that targets answered past the gateway
    direct_failures: int = 0  # of those streams, after which rounds went through the gateway
    outage_seconds: list[float] = field(default_factory=list)  # from a failure to the next answer
    travel_seconds: list[float] = field(default_factory=list)  # round trips without server time

    @property
    def median_travel_seconds(self) -> float | None:
        return median(self.travel_seconds) if self.travel_seconds else None


@dataclass(slots=True, kw_only=True)
class TargetServers:
    """The servers of a remote target, and what its sessions have learned of them together.

    Attributes:
        addresses: HOST:PORT; sessions use the first while it works.
        connect: makes a channel to an address.
        numerics_mismatch: "refuse" or "allow".
        preferred: index of the server that answered last.
        travel_seconds: recent round trip without the server's own time; 0.0 until known.
        counters: of everything that crossed the network.
    """

    addresses: tuple[str, ...]
    connect: Connect
    patience: Patience
    numerics_mismatch: str
    preferred: int = 0
    travel_seconds: float = 0.0
    counters: RemoteCounters = field(default_factory=RemoteCounters)

    def travelled(self, seconds: float) -> None:
        """Note the time of a round trip with nothing else under way."""
        seconds = max(0.0, seconds)
        self.counters.travel_seconds.append(seconds)
        old = self.travel_seconds
        self.travel_seconds = (
            _TRAVEL_MEMORY * old + (1 - _TRAVEL_MEMORY) * seconds if old else seconds
        )


class Silence:
    """How long a server that owes an answer has said nothing."""

    def __init__(self, servers: TargetServers) -> None:
        self._servers = servers
        self.heard()

    def heard(self) -> None:
        """The server has said something, or owed nothing until now."""
        self._heard_at = self._asked_at = time.monotonic()

    def seconds_left(self, now: float) -> float:
        """Until the client asks whether it is alive."""
        return max(0.01, self._asked_at + self._servers.patience.silence - now)

    def probe_timeout(self, address: str) -> float | None:
        """Seconds for the answer to that question, when it is time to ask it; else None.

        Raises:
            DeadlineExceeded: the server is alive, but has stalled.
        """
        patience, now = self._servers.patience, time.monotonic()
        if now - self._heard_at > patience.stall:
            raise DeadlineExceeded(f"{address}: no answer for {patience.stall} s")
        if now - self._asked_at <= patience.silence:
            return None
        self._asked_at = now
        travel = self._servers.travel_seconds
        return max(patience.probe, 4 * travel) if travel else 1.5 * patience.probe


class Retry(enum.Enum):
    """What a session does after a failure."""

    RESUME = "resume"  # the session, on a new connection: the old connection may have broken
    REOPEN = "reopen"  # on the same server, which has lost the session
    MOVE = "move"  # leave the session behind, and open it on ``Reconnect.address``


class Reconnect:
    """The failures of one session since the last answer, and what follows from them.

    Attributes:
        retry_at: when to try again (``time.monotonic``).
        allows_other: the next server may have other numerics.
    """

    def __init__(self, servers: TargetServers) -> None:
        self.retry_at = 0.0
        self.allows_other = False
        self._servers = servers
        self._server = servers.preferred
        self._failures = 0
        self._failing_since: float | None = None
        self._last_error: PacelineError | None = None
        self._tried: dict[int, PacelineError] = {}  # servers, since the last answer

    @property
    def address(self) -> str:
        """Of the server to use."""
        return self._servers.addresses[self._server]

    @property
    def is_down(self) -> bool:
        """Whether there has been a failure and no answer since."""
        return self._failing_since is not None

    def answered(self) -> None:
        """A server has answered a round: it works."""
        if self._failing_since is not None:
            outage = time.monotonic() - self._failing_since
            self._servers.counters.outage_seconds.append(outage)
        self._failures, self._failing_since = 0, None
        self._tried.clear()
        self.allows_other = False
        self._servers.preferred = self._server

    def failed(self, error: PacelineError, *, is_open: bool, resuming: bool, silent: bool) -> Retry:
        """Choose where and when to try again.

        Args:
            is_open: the server has given the session a name, so it can be resumed.
            resuming: the failed attempt was a resume.
            silent: the server does not answer at all.

        Raises:
            PacelineError: ``error``, if another attempt would not change it.
            NumericsMismatch: every server has other numerics, and may not go on with them.
        """
        if not isinstance(error, TRANSIENT):
            raise error
        now, servers = time.monotonic(), self._servers
        self._last_error = error
        self._failures += 1
        servers.counters.num_failures += 1
        if self._failing_since is None:
            self._failing_since = now
            logger.info("the server at %s is lost: %s", self.address, error)
        if isinstance(error, SessionNotFound) and resuming:
            self.retry_at = now
            return Retry.REOPEN
        elsewhere = silent and len(servers.addresses) > 1
        if is_open and isinstance(error, _BROKEN) and not elsewhere and not resuming:
            self.retry_at = now
            return Retry.RESUME
        self._tried[self._server] = error
        self._server = self._next_server()
        self.retry_at = now + self._pause(error)
        return Retry.MOVE

    def _pause(self, error: PacelineError) -> float:
        patience = self._servers.patience
        extra = self._failures - 1 - len(self._servers.addresses)
        if extra < 0:
            return 0.0
        pause: float = min(patience.max_backoff, patience.first_backoff * 2 ** min(extra, 20))
        pause *= random.uniform(0.5, 1.0)
        return max(pause, error.retry_after_s) if isinstance(error, ResourceExhausted) else pause

    def _next_server(self) -> int:
        """The next of the list; or one with other numerics, if that is allowed and all servers have
        been tried.

        Raises:
            NumericsMismatch: all of them have other numerics.
        """
        count = len(self._servers.addresses)
        after = (self._server + 1) % count
        self.allows_other = False
        others = [i for i, e in self._tried.items() if isinstance(e, NumericsMismatch)]
        if not others or len(self._tried) < count:
            return after
        if self._servers.numerics_mismatch == "allow":
            self.allows_other = True
            return others[0]
        if len(others) == count:
            raise self._tried[others[0]]
        return after

    def check_patience(self) -> None:
        """Give up after ``Patience.give_up`` seconds.

        Raises:
            NumericsMismatch: a server that did answer has other numerics.
            ServerUnavailable: no server answers.
        """
        now, since = time.monotonic(), self._failing_since
        if since is None or now - since <= self._servers.patience.give_up:
            return
        for error in self._tried.values():
            if isinstance(error, NumericsMismatch):
                raise error
        raise ServerUnavailable(
            f"no answer from {', '.join(self._servers.addresses)} for {now - since:.0f} s; the "
            f"last error: {self._last_error}"
        )
