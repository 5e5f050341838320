"""Who may call a server, and how much: tokens, tenants, quotas, limits of the replica.

A :class:`Gate` stands before the services of one server. Its interceptor finds the caller of each
call. A service asks the gate for a :class:`CallAdmission` for each session, and tells the admission
of rounds and tokens.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import grpc
from google.protobuf.message import DecodeError

from paceline.bounds import Bound
from paceline.config import MAX_NODES
from paceline.errors import (
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    SessionNotFound,
)
from paceline.rpc.audit import Audit
from paceline.rpc.errors import (
    EpochFenced,
    PermissionDenied,
    PoisonRequest,
    Unauthenticated,
    entry_of,
    shape_of,
)
from paceline.rpc.messages import MAX_MESSAGE_BYTES
from paceline.rpc.quotas import (
    OF_OPENS,
    OF_ROUNDS,
    Account,
    Bucket,
    QuotaExceeded,
    SharedAccount,
)
from paceline.rpc.streams import within
from paceline.rpc.tenants import Quotas, Tenant, Tenants, digest_of
from paceline.rpc.tracing import Span, Tracing

_PUBLIC_SERVICE = "/grpc.health.v1.Health/"
"""Probes and load balancers have no token, and learn nothing but whether it serves."""

REFUSALS_PER_SECOND = 50.0
"""Refusals (and answers without a token) that one tenant, or one host, gets without a wait."""
REFUSAL_BYTES = 65_536
"""A message that is too long to be read counts for one refusal for each so many bytes."""

LONGEST_PAUSE_S = 5.0
_PLACE_PAUSES_S = (0.02, 0.08, 0.2, 0.4)
"""Another server may just now have a session end whose place the caller of this one needs."""
MAX_PUBLIC_CALLS = 64
"""Calls without a token, as those of the health service, that one host may have open."""
_MAX_HOSTS = 4096  # whose refusals a gate remembers


CACHE_SCOPE = "paceline-cache-scope"
"""Metadata in which a gateway tells a target whose a session is; they share cached prefixes."""
WEIGHT = "paceline-weight"
"""Metadata with the weight of that tenant's share."""
ONLINE_TRAINING = "paceline-online-training"
"""Metadata, "1" if that tenant lets the draft model learn from its sessions."""
SESSION_ID, LEASE_ID = "paceline-session-id", "paceline-lease-id"
"""Metadata in which it tells the id of a verify session, and the lease that ends with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one server takes from all callers together; None: the engine's own limit alone."""

    max_sessions: int | None = None
    opens_per_second: float | None = None
    rounds_per_second: float | None = None
    max_nodes: int = MAX_NODES
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_calls_per_connection: int = 4096


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a call."""

    peer: str = ""
    method: str = ""
    tenant: Tenant | None = None
    digest: bytes = field(default=b"", repr=False)
    generation: int = 0  # version of the tenants file that had the digest

    @property
    def name(self) -> str | None:
        return None if self.tenant is None else self.tenant.name

    @property
    def host(self) -> str:
        """Its address without the port."""
        return self.peer.rpartition(":")[0]


# Set at the start of each call, which has a task and so a context of its own.
_caller: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039  it is frozen


class Shares(Protocol):
    """Quotas that several servers share (``deployments/ledger.py``)."""

    def account(self, who: str, name: str, quotas: Quotas) -> SharedAccount:
        """The account of a tenant at this server."""

    async def fetch(self) -> None:
        """Return when the ledger has answered what accounts ask for now, or is away."""


class Gate:
    """Admits callers to one server. Lives on the server's event loop.

    Args:
        tenants: None admits every caller, without a name.
        limits: for all callers together.
        audit: the log of opens and refusals; None: there is none.
        shares: of tenants' quotas, which other servers have as well; None: they are this server's.
    """

    def __init__(
        self,
        *,
        tenants: Tenants | None = None,
        limits: Limits | None = None,
        audit: Audit | None = None,
        shares: Shares | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._tenants = tenants
        self._audit = audit
        self._shares = shares
        self._replica = Account(
            "this server",
            Quotas(
                max_sessions=self.limits.max_sessions,
                opens_per_second=self.limits.opens_per_second,
                rounds_per_second=self.limits.rounds_per_second,
            ),
        )
        self._accounts: dict[str, Account] = {}
        self.num_refusals: Counter[str] = Counter()  # by reason
        self._refusals: OrderedDict[tuple[str, str], Bucket] = OrderedDict()
        self._public: Counter[str] = Counter()  # open calls without a token, by host

    @property
    def caller_name(self) -> str | None:
        """The tenant that makes the current call; None without tenants."""
        return _caller.get().name

    @property
    def num_sessions(self) -> int:
        """Admissions that have not been released."""
        return self._replica.num_sessions

    def usage(self) -> dict[str, tuple[int, int, int]]:
        """Open sessions, opens and tokens so far of each tenant that has called."""
        return {
            name: (account.num_sessions, account.num_opens, account.num_tokens)
            for name, account in self._accounts.items()
        }

    async def before_open(self, *, session: bool = True) -> None:
        """Get what an open needs of shared quotas, if this server does not have it.

        Args:
            session: the call opens one, rather than being counted as an open.
        """
        await self._prepare(OF_OPENS, session)

    async def before_round(self) -> None:
        """Get what a round needs of shared quotas, if this server does not have it."""
        await self._prepare(OF_ROUNDS, False)

    async def _prepare(self, quotas: tuple[str, ...], session: bool) -> None:
        tenant = _caller.get().tenant
        if self._shares is None or tenant is None:
            return
        account = self._accounts.get(tenant.name)
        if account is None:
            (account, _) = self._accounts_of_caller()
        assert isinstance(account, SharedAccount)
        for pause in (0.0, *_PLACE_PAUSES_S):
            if pause:
                if not (session and account.needs_place):
                    return
                await asyncio.sleep(pause)
            if not account.may_ask(quotas, session):
                return
            await self._shares.fetch()

    def admit(self) -> CallAdmission:
        """Admit one more session of the caller.

        Raises:
            QuotaExceeded: of the tenant or of this server.
            Unauthenticated, PermissionDenied: the operator has withdrawn the token.
        """
        accounts = self._accounts_of_caller()
        self._open(accounts, session=True)
        return CallAdmission(self, _caller.get(), accounts)

    def visit(self) -> CallAdmission:
        """For a call on a session of the caller that is admitted already, here or elsewhere.

        Raises:
            Unauthenticated, PermissionDenied: the operator has withdrawn the token.
        """
        accounts = self._accounts_of_caller()
        return CallAdmission(self, _caller.get(), accounts, is_open=True)

    def call(self, name: str, tracing: Tracing | None, traceparent: str = "") -> CallAdmission:
        """Admit a call that opens a session, and begin its span: ``with gate.call(...) as call:``.

        Args:
            name: of the span.
            tracing: None traces nothing.
            traceparent: the caller's.

        Raises: as :meth:`admit`.
        """
        admission = self.admit()
        if tracing is not None:
            admission.span = tracing.begin(name, traceparent)
        return admission

    def count_open(self) -> None:
        """Count a call that costs about as much as an open, and makes no new session.

        Raises: as :meth:`admit`.
        """
        self._open(self._accounts_of_caller(), session=False)

    def _open(self, accounts: list[Account], session: bool) -> None:
        try:
            for account in accounts:
                account.check_open(session)
        except QuotaExceeded as error:
            self.record_refusal(error)
            raise
        for account in accounts:
            account.count_open(session)

    def authenticate(
        self,
        peer: str,
        method: str,
        headers: Iterable[tuple[str, Any]],
        *,
        public: bool = False,
    ) -> None:
        """Find the caller, for the rest of the call.

        Args:
            peer: the caller's address in gRPC's notation (``ipv4:192.0.2.7:40312``).
            method: full name, with the service.
            headers: names in lower case and values; gRPC calls them metadata.
            public: the method needs no token.

        Raises:
            Unauthenticated: no token, or an unknown one.
            PermissionDenied: the tenant is suspended.
        """
        tenants = self._tenants
        caller = Caller(peer, method)
        _caller.set(caller)
        if tenants is None or public:
            return
        try:
            digest = digest_of(token_of(headers))
            tenant = tenants.find(digest)
        except (Unauthenticated, PermissionDenied) as error:
            self.record_refusal(error)
            raise
        _caller.set(Caller(caller.peer, method, tenant, digest, tenants.generation))

    async def slow_down(self, cost: float = 1.0) -> None:
        """Wait before an answer that costs the server more than the caller.

        Refusals of one tenant (without a token: of one host) beyond :data:`REFUSALS_PER_SECOND`
        queue up. A connection has a limited number of calls at a time, so a flood is as slow as its
        answers, and leaves the server to others.

        Args:
            cost: as many refusals as this counts for.
        """
        caller = _caller.get()
        key = (caller.name or "", "" if caller.name else caller.host)
        bucket = self._refusals.get(key)
        if bucket is None:
            bucket = self._refusals[key] = Bucket(REFUSALS_PER_SECOND, REFUSALS_PER_SECOND)
            if len(self._refusals) > _MAX_HOSTS:
                self._refusals.popitem(last=False)
        else:
            self._refusals.move_to_end(key)
        pause = bucket.wait(cost)
        if pause < LONGEST_PAUSE_S:
            bucket.take(cost)
        if pause:
            await asyncio.sleep(min(pause, LONGEST_PAUSE_S))

    @contextmanager
    def public_call(self) -> Iterator[None]:
        """Around a call that needs no token.

        Raises:
            QuotaExceeded: the host has too many open.
        """
        host = _caller.get().host
        if self._public[host] >= MAX_PUBLIC_CALLS:
            error = QuotaExceeded(
                f"this host has {MAX_PUBLIC_CALLS} calls without a token open", "public_calls"
            )
            self.record_refusal(error)
            raise error
        self._public[host] += 1
        try:
            yield
        finally:
            self._public[host] -= 1
            if not self._public[host]:
                del self._public[host]

    def check_caller(self) -> Caller:
        """The caller, if the token is still good.

        Raises:
            Unauthenticated, PermissionDenied: the operator has withdrawn it since the call began.
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
        caller, entry = _caller.get(), entry_of(error)
        reason = entry.reason if entry is not None else type(error).__name__
        if isinstance(error, QuotaExceeded):
            reason = error.quota
        if isinstance(error, PoisonRequest):
            reason = f"{reason} {error.digest}"
        if entry is not None:  # a caller that left was not refused
            self.num_refusals[reason.partition(" ")[0]] += 1
        if self._audit is None:
            return
        self._audit.refused(
            tenant=caller.name,
            peer=caller.peer,
            method=caller.method,
            session_id=session_id,
            outcome=entry.code.name if entry is not None else "UNKNOWN",
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

    def _accounts_of_caller(self) -> list[Account]:
        tenant = self.check_caller().tenant
        if tenant is None:
            return [self._replica]
        account = self._accounts.get(tenant.name)
        if account is None:
            who = f"tenant {tenant.name!r}"
            if self._shares is None:
                account = Account(who, tenant.quotas)
            else:
                account = self._shares.account(who, tenant.name, tenant.quotas)
            self._accounts[tenant.name] = account
        elif account.quotas != tenant.quotas:
            account.set(tenant.quotas)
        return [account, self._replica]


class Owner(NamedTuple):
    """Whose a session is, as far as the engine has to know.

    Attributes:
        tenant: its name; "" without tenants.
        weight: of its share of the engine.
        teaches: the draft model may learn from the session.
    """

    tenant: str
    weight: float
    teaches: bool


class CallAdmission:
    """The admission of one session, and its owner. Release it when the session is over.

    As a context manager it ends with the call, unless :meth:`keep` hands it to the session. It
    records an error of the call as a refusal if the session has not begun.

    Attributes:
        owner: the tenant's name; None without tenants.
        weight: of the tenant's share of a target.
        teaches: the tenant lets the draft model learn from its sessions.
        span: of the session; None: it is not traced.
    """

    __slots__ = (
        "_accounts", "_gate", "_held", "_kept", "_open", "_released", "_reserved", "owner", "span",
        "teaches", "weight",
    )  # fmt: skip

    def __init__(
        self, gate: Gate, caller: Caller, accounts: list[Account], *, is_open: bool = False
    ) -> None:
        self.owner = caller.name
        self.weight = 1.0 if caller.tenant is None else caller.tenant.weight
        self.teaches = caller.tenant is not None and caller.tenant.online_training
        self._gate = gate
        self._accounts = accounts
        self._held = not is_open  # counts on the replica's account
        self._kept = False
        self._open = is_open
        self._released = is_open  # the admission that opened the session counts it
        self._reserved: int | None = None  # prompt tokens, until their number is known
        self.span: Span | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.refused(error)
        if error is not None or not self._kept:
            self.end(error)

    def keep(self) -> None:
        """The session goes on after the call, and ends with :meth:`end`."""
        self._kept = True

    def end(self, error: BaseException | None = None) -> None:
        """Release the admission and end the span. More than once is harmless.

        Args:
            error: what ended the session.
        """
        self.release()
        span, self.span = self.span, None
        if span is not None:
            span.end(error)

    @property
    def is_callers(self) -> bool:
        """Whether the current call comes from the session's owner."""
        return self.owner == _caller.get().name

    def share(self, metadata: Any) -> Owner:
        """Whose the session is, known here or at the gateway.

        Raises:
            InvalidArgument: the gateway's weight is none.
        """
        if self.owner is not None:
            return Owner(self.owner, self.weight, self.teaches)
        told = dict(metadata or ())
        weight = told.get(WEIGHT, "1")
        try:
            return Owner(
                str(told.get(CACHE_SCOPE, "")), float(weight), told.get(ONLINE_TRAINING) == "1"
            )
        except ValueError:
            raise InvalidArgument(WEIGHT, weight, "a number above 0") from None

    def opened(self, session_id: str = "") -> None:
        """The session has begun: say so in the audit log, once."""
        if not self._open:
            self._open = True
            self._gate.record_open(session_id)

    def refused(self, error: BaseException) -> None:
        """``error`` has kept the session from beginning, or ended it: release the admission."""
        if not self._open and not self._released:
            self._gate.record_refusal(error)
            if isinstance(error, _UNREAD) and not isinstance(error, PoisonRequest):
                self.settle(0)
        self.release()

    def round(self, num_nodes: int = 0) -> None:
        """Count a round before it is computed.

        Raises:
            QuotaExceeded: too many rounds, tokens or nodes; nothing is counted.
            Unauthenticated, PermissionDenied: the operator has withdrawn the token.
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

    async def slow_down(self) -> None:
        """As :meth:`Gate.slow_down`: wait before refusing a round."""
        await self._gate.slow_down()

    def charge(self, num_tokens: int) -> None:
        """Count tokens that the session's owner got or sent.

        Raises:
            Unauthenticated, PermissionDenied: the operator has withdrawn the token.
        """
        self._count(num_tokens)
        self._gate.check_caller()

    def reserve(self, num_tokens: int) -> None:
        """Count a prompt before it is read: whoever leaves before the first reply pays for it.

        Args:
            num_tokens: of the prompt, or a guess until :meth:`settle`.
        """
        self._reserved = num_tokens
        self._count(num_tokens)

    def settle(self, num_tokens: int) -> None:
        """Put the prompt's length in the place of what was reserved; only the first time counts."""
        if self._reserved is not None:
            self._count(num_tokens - self._reserved)
            self._reserved = None

    def give_back(self, num_tokens: int) -> None:
        """Take back a charge of tokens that the owner has not used after all."""
        self._count(-num_tokens)

    def affordable(self, num_tokens: int) -> int:
        """``num_tokens``, but at most what the owner's quota has for a minute."""
        most = self._accounts[0].quotas.tokens_per_minute
        return num_tokens if most is None else max(1, min(num_tokens, int(most)))

    def _count(self, num_tokens: int) -> None:
        for account in self._accounts:
            account.count_tokens(num_tokens)

    def on_replica(self, held: bool) -> None:
        """Whether the session uses what all callers share, or has only answers left to read.

        Then it counts for its tenant alone. That it uses it again is never refused.
        """
        held = held and not self._released
        if len(self._accounts) > 1 and held != self._held:
            self._held = held
            self._accounts[-1].num_sessions += 1 if held else -1

    def release(self) -> None:
        """The session is over. More than once is harmless."""
        if not self._released:
            self._released = True
            self.on_replica(False)
            self._accounts[0].release_session()


# Refusals of a request whose prompt has not been read: it costs nothing.
_UNREAD = (InvalidArgument, ResourceExhausted, FailedPrecondition)


def token_of(headers: Iterable[tuple[str, Any]]) -> str:
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


Context = grpc.aio.ServicerContext[Any, Any]
_Parse = Callable[[bytes], Any]
_Read = Callable[[AsyncIterator[bytes]], Awaitable[Any]]
# Errors that a client can provoke by the thousand at no cost of its own.
CHEAP = (
    QuotaExceeded, Unauthenticated, PermissionDenied, SessionNotFound, InvalidArgument, EpochFenced
)  # fmt: skip


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates every call before the handler sees it, and before anything reads its message.

    To that end it gives every method to gRPC as one that takes a stream of bytes. Of other methods
    gRPC reads the message before it calls the handler: it would wait as long as the client likes,
    and log bytes that are no message as a failure of the server.

    Args:
        idle_timeout_s: for the message of a call that has one.
        bounds: of the message, by method: to read megabytes takes the interpreter tens of
            milliseconds, in which no other session gets a token.
    """

    def __init__(
        self, gate: Gate, idle_timeout_s: float, bounds: Mapping[str, Bound] | None = None
    ) -> None:
        self._gate = gate
        self._idle_timeout_s = idle_timeout_s
        self._bounds = bounds or {}

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return grpc.stream_unary_rpc_method_handler(self._unknown(method))
        behavior = getattr(handler, shape_of(handler))
        read: _Read
        if handler.request_streaming:
            read = partial(_each, handler.request_deserializer)
        else:
            bound = self._bounds.get(method)
            read = partial(
                _only, handler.request_deserializer, self._idle_timeout_s, bound,
                self._gate.slow_down,
            )  # fmt: skip
        wrap: Any = self._generator if inspect.isasyncgenfunction(behavior) else self._call
        make: Any = grpc.stream_unary_rpc_method_handler
        if handler.response_streaming:
            make = grpc.stream_stream_rpc_method_handler
        return make(  # type: ignore[no-any-return]
            wrap(behavior, method, read), None, handler.response_serializer
        )

    def _call(self, behavior: Any, method: str, read: _Read) -> Any:
        async def call(requests: AsyncIterator[bytes], context: Context) -> Any:
            try:
                with await self._let_in(context, method):
                    return await behavior(await read(requests), context)
            except CHEAP:
                await self._gate.slow_down()
                raise

        return call

    def _generator(self, behavior: Any, method: str, read: _Read) -> Any:
        async def generate(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            replies: Any = None
            try:
                with await self._let_in(context, method):
                    replies = behavior(await read(requests), context)
                    async for reply in replies:
                        yield reply
            except CHEAP:
                await self._gate.slow_down()
                raise
            finally:
                if replies is not None:
                    await replies.aclose()

        return generate

    def _unknown(self, method: str) -> Any:
        async def call(requests: AsyncIterator[bytes], context: Context) -> None:
            try:
                await self._let_in(context, method)
            finally:
                await self._gate.slow_down()
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {method}")

        return call

    async def _let_in(self, context: Context, method: str) -> AbstractContextManager[None]:
        """Authenticate the call; returns what to hold while it runs."""
        public = method.startswith(_PUBLIC_SERVICE)
        headers = context.invocation_metadata() or ()
        self._gate.authenticate(context.peer(), method, headers, public=public)
        if not public:
            return nullcontext()
        await self._gate.slow_down()
        return self._gate.public_call()


async def _each(parse: _Parse | None, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    """The messages of a stream; each is read when the handler asks for it."""
    return requests if parse is None else (_parsed(parse, data) async for data in requests)


async def _only(
    parse: _Parse | None,
    limit_s: float,
    bound: Bound | None,
    slow_down: Callable[[float], Awaitable[None]],
    requests: AsyncIterator[bytes],
) -> Any:
    """The message of a call that has one. To receive a long one takes time, so its refusal counts
    for many.

    Raises:
        DeadlineExceeded: it does not come in time.
        InvalidArgument: it is longer than the bound, or no message of its type.
    """
    data = await anext(within(requests, limit_s, later_s=limit_s), None)
    if data is None:
        raise InvalidArgument("message", "nothing", "one message")
    if bound is not None and (size := len(data)) > bound.most:
        data = b""  # the pause must not hold it
        await slow_down(size / REFUSAL_BYTES)
        bound.check(size)
    return data if parse is None else _parsed(parse, data)


def _parsed(parse: _Parse, data: bytes) -> Any:
    try:
        return parse(data)
    except DecodeError:
        raise InvalidArgument("message", f"{len(data)} bytes", "a message of its type") from None
