"""Who may call a server, and how much: tokens, tenants, quotas, limits of the replica.

A :class:`Gate` stands before the services of one server. Its interceptor finds out who calls;
services ask it for an :class:`Admission` for each session and tell it of rounds and tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import grpc

from paceline.config import MAX_NODES
from paceline.errors import ResourceExhausted
from rpc.audit import Audit
from rpc.errors import PermissionDenied, Unauthenticated, rewrap, row_of
from rpc.messages import MAX_MESSAGE_BYTES
from rpc.tenants import Quotas, Tenant, Tenants, digest_of

_PUBLIC_SERVICE = "/grpc.health.v1.Health/"
"""Probes and load balancers have no token, and learn nothing but whether it serves."""


class QuotaExceeded(ResourceExhausted):
    """A quota of a tenant or a limit of the server; the session itself is unharmed.

    Attributes:
        quota: its name.
    """

    def __init__(self, message: str, quota: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.quota = quota


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one server takes on, whoever calls. None is no limit beyond the engine's own."""

    max_sessions: int | None = None
    opens_per_second: float | None = None
    rounds_per_second: float | None = None
    max_nodes: int = MAX_NODES
    max_message_bytes: int = MAX_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a call came from."""

    peer: str = ""
    method: str = ""
    tenant: Tenant | None = None
    digest: bytes = field(default=b"", repr=False)
    generation: int = 0  # of the tenants file that knew the digest

    @property
    def name(self) -> str | None:
        return None if self.tenant is None else self.tenant.name


# Set at the start of each call, which has a task and so a context of its own.
_caller: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039  it is frozen


class Bucket:
    """So much a second, and ``burst`` at once. May be overdrawn; the debt is then waited for."""

    __slots__ = ("_at", "_burst", "_level", "_rate")

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at = time.monotonic()

    def wait(self, amount: float) -> float:
        """Seconds until ``amount`` is there; 0 when it is."""
        now = time.monotonic()
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, (amount - self._level) / self._rate)

    def take(self, amount: float) -> None:
        """Take it, there or not."""
        self._level -= amount


def _per_second(rate: float | None) -> Bucket | None:
    return None if rate is None else Bucket(rate, max(1.0, rate))


class _Account:
    """What a tenant (or all callers together) has used."""

    def __init__(self, who: str, quotas: Quotas) -> None:
        self.who = who
        self.num_sessions = 0
        self.set(quotas)

    def set(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self._opens = _per_second(quotas.opens_per_second)
        self._rounds = _per_second(quotas.rounds_per_second)
        per_minute = quotas.tokens_per_minute
        self._tokens = None if per_minute is None else Bucket(per_minute / 60, per_minute)

    def check_open(self, session: bool) -> None:
        limit = self.quotas.max_sessions
        if session and limit is not None and self.num_sessions >= limit:
            raise QuotaExceeded(
                f"{self.who} has {limit} sessions open (max_sessions)", "max_sessions"
            )
        self._check(self._opens, 1.0, "opens_per_second")
        self._check(self._tokens, 1.0, "tokens_per_minute")

    def count_open(self, session: bool) -> None:
        self.num_sessions += session
        if self._opens is not None:
            self._opens.take(1.0)

    def check_round(self) -> None:
        self._check(self._rounds, 1.0, "rounds_per_second")
        self._check(self._tokens, 1.0, "tokens_per_minute")

    def count_round(self) -> None:
        if self._rounds is not None:
            self._rounds.take(1.0)

    def count_tokens(self, tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens)

    def _check(self, bucket: Bucket | None, amount: float, quota: str) -> None:
        wait = 0.0 if bucket is None else bucket.wait(amount)
        if wait > 0:
            limit = getattr(self.quotas, quota)
            raise QuotaExceeded(f"{self.who} is over {quota} ({limit:g})", quota, wait)


class Gate:
    """Admits callers to one server. Lives on the server's event loop.

    Args:
        tenants: None lets everybody in, as nobody.
        limits: for all callers together.
        audit: where opens and refusals are written; None writes none.
    """

    def __init__(
        self,
        *,
        tenants: Tenants | None = None,
        limits: Limits | None = None,
        audit: Audit | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._tenants = tenants
        self._audit = audit
        self._replica = _Account(
            "this server",
            Quotas(
                max_sessions=self.limits.max_sessions,
                opens_per_second=self.limits.opens_per_second,
                rounds_per_second=self.limits.rounds_per_second,
            ),
        )
        self._accounts: dict[str, _Account] = {}
        self.num_refusals: Counter[str] = Counter()  # by reason

    @property
    def num_sessions(self) -> int:
        """Admissions that are not released yet."""
        return self._replica.num_sessions

    def admit(self) -> Admission:
        """Admit one more session of the caller.

        Raises:
            QuotaExceeded: of the tenant or of this server.
            Unauthenticated, PermissionDenied: the token was withdrawn meanwhile.
        """
        accounts = self._accounts_of_caller()
        self._open(accounts, session=True)
        return Admission(self, _caller.get(), accounts)

    def count_open(self) -> None:
        """Count a call that costs about as much as an open and leaves no new session.

        Raises: as :meth:`admit`.
        """
        self._open(self._accounts_of_caller(), session=False)

    def _open(self, accounts: list[_Account], session: bool) -> None:
        try:
            for account in accounts:
                account.check_open(session)
        except QuotaExceeded as error:
            self.record_refusal(error)
            raise
        for account in accounts:
            account.count_open(session)

    def authenticate(self, peer: str, method: str, headers: Iterable[tuple[str, Any]]) -> None:
        """Find out who calls, for the rest of the call.

        Args:
            peer: where the call comes from, in gRPC's notation (``ipv4:192.0.2.7:40312``).
            method: what is called, with its service.
            headers: names in lower case and values; gRPC calls them metadata.

        Raises:
            Unauthenticated: no token, or nobody's.
            PermissionDenied: the tenant is suspended.
        """
        tenants = self._tenants
        caller = Caller(peer, method)
        _caller.set(caller)
        if tenants is None or method.startswith(_PUBLIC_SERVICE):
            return
        try:
            digest = digest_of(_token(headers))
            tenant = tenants.find(digest)
        except (Unauthenticated, PermissionDenied) as error:
            self.record_refusal(error)
            raise
        _caller.set(Caller(caller.peer, method, tenant, digest, tenants.generation))

    def check_caller(self) -> Caller:
        """The caller, whose token is still good.

        Raises:
            Unauthenticated, PermissionDenied: it was withdrawn since the call began.
        """
        caller, tenants = _caller.get(), self._tenants
        if tenants is None or caller.tenant is None:
            return caller
        tenants.refresh()
        if tenants.generation != caller.generation:
            try:
                tenant = tenants.find(caller.digest)
            except (Unauthenticated, PermissionDenied) as error:
                self.record_refusal(error)
                raise
            caller = Caller(caller.peer, caller.method, tenant, caller.digest, tenants.generation)
            _caller.set(caller)
        return caller

    def record_refusal(self, error: BaseException, session_id: str = "") -> None:
        """Count a refusal of the current call, and write it to the audit log."""
        caller, row = _caller.get(), row_of(error)
        reason = row.reason if row is not None else type(error).__name__
        if isinstance(error, QuotaExceeded):
            reason = error.quota
        if row is not None:  # a caller who left was not refused
            self.num_refusals[reason] += 1
        if self._audit is None:
            return
        self._audit.refused(
            tenant=caller.name,
            peer=caller.peer,
            method=caller.method,
            session_id=session_id,
            outcome=row.code.name if row is not None else "UNKNOWN",
            reason=reason,
        )

    def record_open(self, session_id: str) -> None:
        """Write an open to the audit log."""
        if self._audit is not None:
            caller = _caller.get()
            self._audit.opened(
                tenant=caller.name, peer=caller.peer, method=caller.method, session_id=session_id
            )

    def close(self) -> None:
        """Close the audit log."""
        if self._audit is not None:
            self._audit.close()

    def _accounts_of_caller(self) -> list[_Account]:
        tenant = self.check_caller().tenant
        if tenant is None:
            return [self._replica]
        account = self._accounts.get(tenant.name)
        if account is None:
            account = _Account(f"tenant {tenant.name!r}", tenant.quotas)
            self._accounts[tenant.name] = account
        elif account.quotas != tenant.quotas:
            account.set(tenant.quotas)
        return [account, self._replica]


class Admission:
    """One session that was admitted, and whose it is. Release it when the session is over."""

    __slots__ = ("_accounts", "_gate", "_open", "_released", "owner")

    def __init__(self, gate: Gate, caller: Caller, accounts: list[_Account]) -> None:
        self.owner = caller.name
        self._gate = gate
        self._accounts = accounts
        self._open = False
        self._released = False

    @property
    def is_callers(self) -> bool:
        """Whether the current call is of the tenant that the session belongs to."""
        return self.owner == _caller.get().name

    def opened(self, session_id: str = "") -> None:
        """The session is there: say so in the audit log, once."""
        if not self._open:
            self._open = True
            self._gate.record_open(session_id)

    def refused(self, error: BaseException) -> None:
        """The session did not come about, or ended by ``error``: release it."""
        if not self._open and not self._released:
            self._gate.record_refusal(error)
        self.release()

    def round(self, num_nodes: int = 0) -> None:
        """Count a round before it is done.

        Raises:
            QuotaExceeded: too many rounds, tokens or nodes; nothing was counted.
            Unauthenticated, PermissionDenied: the token was withdrawn.
        """
        self._gate.check_caller()
        limit = self._gate.limits.max_nodes
        try:
            if num_nodes > limit:
                raise QuotaExceeded(
                    f"a draft of {num_nodes} nodes: this server takes {limit} a round (max_nodes)",
                    "max_nodes",
                )
            for account in self._accounts:
                account.check_round()
        except QuotaExceeded as error:
            self._gate.record_refusal(error)
            raise
        for account in self._accounts:
            account.count_round()

    def charge(self, num_tokens: int) -> None:
        """Count tokens that the session's owner got or sent.

        Raises:
            Unauthenticated, PermissionDenied: the token was withdrawn.
        """
        for account in self._accounts:
            account.count_tokens(num_tokens)
        self._gate.check_caller()

    def release(self) -> None:
        """The session is over. More than once is harmless."""
        if not self._released:
            self._released = True
            for account in self._accounts:
                account.num_sessions -= 1


def _token(headers: Iterable[tuple[str, Any]]) -> str:
    """The bearer token of a call.

    Raises:
        Unauthenticated: there is none.
    """
    for key, value in headers:
        if key == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            if scheme.lower() == "bearer" and token.strip():
                return token.strip()
    raise Unauthenticated("no token: send 'authorization: Bearer TOKEN' with the call")


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates every call before its handler sees it."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def _authenticate(self, context: Any, method: str) -> None:
        self._gate.authenticate(context.peer(), method, context.invocation_metadata() or ())

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method

        def wrap_unary(behavior: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
            async def call(request: Any, context: Any) -> Any:
                self._authenticate(context, method)
                return await behavior(request, context)

            return call

        def wrap_generator(behavior: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
            async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
                self._authenticate(context, method)
                replies = behavior(request, context)
                try:
                    async for reply in replies:
                        yield reply
                finally:
                    await replies.aclose()

            return generate

        return rewrap(handler, wrap_unary, wrap_generator)
