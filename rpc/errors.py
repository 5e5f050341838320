"""The one error table: Python exception <-> gRPC status with ``google.rpc`` details.

Servers raise Paceline's exceptions and never touch statuses: :class:`ErrorInterceptor` turns them
into a status code, a message and an ``ErrorInfo`` (reason, domain ``paceline``, metadata), with
``BadRequest`` for bad input and ``RetryInfo`` where waiting helps. Clients turn the status back
into the same exception with :func:`from_rpc_error`. An exception that is not in the table is a bug:
the client gets an id, and the log has the traceback under that id.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from paceline.errors import (
    DrafterUnavailable,
    FailedPrecondition,
    InvalidArgument,
    ModelNotFound,
    NumericsMismatch,
    PacelineError,
    ResourceExhausted,
    SessionNotFound,
    TokenizerMismatch,
    shown,
)

DOMAIN = "paceline"
DETAILS_KEY = "grpc-status-details-bin"

# gRPC sends status and details as trailing metadata, of which peers accept 8 KB.
_MAX_MESSAGE = 1500
_MAX_VALUE = 200

_log = logging.getLogger("paceline.rpc")


class PrefixDiverged(FailedPrecondition):
    """Client and server disagree about the committed tokens.

    Attributes:
        committed_length: number of tokens that the server has.
        digest: its digest of them (see :mod:`paceline.rpc.messages`).
    """

    def __init__(self, message: str, committed_length: int, digest: bytes = b"") -> None:
        super().__init__(message)
        self.committed_length = committed_length
        self.digest = digest


class RoundOutOfOrder(FailedPrecondition):
    """A round number that is neither the next one nor the last one."""

    def __init__(self, message: str, expected_round: int) -> None:
        super().__init__(message)
        self.expected_round = expected_round


class EpochFenced(FailedPrecondition):
    """Another call has resumed the session; this stream no longer owns it."""


class PoisonRequest(FailedPrecondition):
    """Target processes died as they served this request; it is refused for a while.

    Attributes:
        digest: 32 hex digits of the request.
    """

    def __init__(self, message: str, digest: str = "") -> None:
        super().__init__(message)
        self.digest = digest


class Unauthenticated(PacelineError, PermissionError):
    """The call has no token, or an unknown one."""


class PermissionDenied(PacelineError, PermissionError):
    """The token is known, but its tenant may not do this."""


class ServerUnavailable(PacelineError, ConnectionError):
    """No connection to the server, or a broken one."""


class DeadlineExceeded(PacelineError, TimeoutError):
    """The answer did not come in time."""


class Cancelled(PacelineError):
    """The client or the server has cancelled the call."""


class InternalError(PacelineError):
    """The server failed unexpectedly; its log has the details."""


class _Verbatim:
    """A value of which only the repr has travelled."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


@dataclass(frozen=True, slots=True)
class Details:
    """What a status carries, unpacked."""

    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float = 1.0


@dataclass(frozen=True, slots=True)
class ErrorEntry:
    """One line of the table.

    Attributes:
        exception: the class; subclasses without an entry of their own share it.
        code: canonical gRPC code.
        reason: ``ErrorInfo.reason``, which tells entries of the same code apart.
        metadata: attributes of the exception to send along, as strings.
        rebuild: makes the exception from what has travelled.
    """

    exception: type[PacelineError]
    code: grpc.StatusCode
    reason: str
    rebuild: Callable[[Details], PacelineError]
    metadata: Callable[[Any], dict[str, str]] = lambda error: {}


def _message_only(exception: type[PacelineError]) -> Callable[[Details], PacelineError]:
    return lambda details: exception(details.message)


def _shortened(value: object, limit: int) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


_CODE = grpc.StatusCode

ERRORS: tuple[ErrorEntry, ...] = (
    ErrorEntry(
        InvalidArgument,
        _CODE.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        lambda d: InvalidArgument(
            d.metadata.get("field", "request"),
            _Verbatim(d.metadata.get("value", "?")),
            d.metadata.get("allowed", d.message),
        ),
        lambda e: {
            "field": _shortened(e.field, _MAX_VALUE),
            "value": _shortened(shown(e.value), _MAX_VALUE),
            "allowed": _shortened(e.allowed, _MAX_MESSAGE),
        },
    ),
    ErrorEntry(
        SessionNotFound,
        _CODE.NOT_FOUND,
        "SESSION_NOT_FOUND",
        lambda d: SessionNotFound(d.metadata.get("session_id", "")),
        lambda e: {"session_id": _shortened(e.session_id, _MAX_VALUE)},
    ),
    ErrorEntry(ModelNotFound, _CODE.NOT_FOUND, "MODEL_NOT_FOUND", _message_only(ModelNotFound)),
    ErrorEntry(
        PrefixDiverged,
        _CODE.FAILED_PRECONDITION,
        "PREFIX_DIVERGED",
        lambda d: PrefixDiverged(
            d.message,
            int(d.metadata.get("committed_length", 0)),
            bytes.fromhex(d.metadata.get("digest", "")),
        ),
        lambda e: {"committed_length": str(e.committed_length), "digest": e.digest.hex()},
    ),
    ErrorEntry(
        RoundOutOfOrder,
        _CODE.FAILED_PRECONDITION,
        "ROUND_OUT_OF_ORDER",
        lambda d: RoundOutOfOrder(d.message, int(d.metadata.get("expected_round", 0))),
        lambda e: {"expected_round": str(e.expected_round)},
    ),
    ErrorEntry(EpochFenced, _CODE.FAILED_PRECONDITION, "EPOCH_FENCED", _message_only(EpochFenced)),
    ErrorEntry(
        PoisonRequest,
        _CODE.FAILED_PRECONDITION,
        "POISON_REQUEST",
        lambda d: PoisonRequest(d.message, d.metadata.get("digest", "")),
        lambda e: {"digest": e.digest},
    ),
    ErrorEntry(
        NumericsMismatch,
        _CODE.FAILED_PRECONDITION,
        "NUMERICS_MISMATCH",
        lambda d: NumericsMismatch(
            d.message, d.metadata.get("expected", ""), d.metadata.get("actual", "")
        ),
        lambda e: {
            "expected": _shortened(e.expected, _MAX_VALUE),
            "actual": _shortened(e.actual, _MAX_VALUE),
        },
    ),
    ErrorEntry(
        TokenizerMismatch,
        _CODE.FAILED_PRECONDITION,
        "TOKENIZER_MISMATCH",
        _message_only(TokenizerMismatch),
    ),
    ErrorEntry(
        FailedPrecondition,
        _CODE.FAILED_PRECONDITION,
        "FAILED_PRECONDITION",
        _message_only(FailedPrecondition),
    ),
    ErrorEntry(
        ResourceExhausted,
        _CODE.RESOURCE_EXHAUSTED,
        "RESOURCE_EXHAUSTED",
        lambda d: ResourceExhausted(d.message, d.retry_after_s),
    ),
    ErrorEntry(
        Unauthenticated, _CODE.UNAUTHENTICATED, "UNAUTHENTICATED", _message_only(Unauthenticated)
    ),
    ErrorEntry(
        PermissionDenied,
        _CODE.PERMISSION_DENIED,
        "PERMISSION_DENIED",
        _message_only(PermissionDenied),
    ),
    ErrorEntry(
        DrafterUnavailable,
        _CODE.UNAVAILABLE,
        "DRAFTER_UNAVAILABLE",
        _message_only(DrafterUnavailable),
    ),
    ErrorEntry(
        ServerUnavailable,
        _CODE.UNAVAILABLE,
        "SERVER_UNAVAILABLE",
        _message_only(ServerUnavailable),
    ),
    ErrorEntry(
        DeadlineExceeded,
        _CODE.DEADLINE_EXCEEDED,
        "DEADLINE_EXCEEDED",
        _message_only(DeadlineExceeded),
    ),
    ErrorEntry(Cancelled, _CODE.CANCELLED, "CANCELLED", _message_only(Cancelled)),
    ErrorEntry(InternalError, _CODE.INTERNAL, "INTERNAL", _message_only(InternalError)),
)

_BY_CLASS = {entry.exception: entry for entry in ERRORS}
_BY_REASON = {entry.reason: entry for entry in ERRORS}
_CODE_OF_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


def entry_of(error: BaseException) -> ErrorEntry | None:
    """The entry of the nearest class of ``error``, or None when it is not in the table."""
    return next((_BY_CLASS[c] for c in type(error).__mro__ if c in _BY_CLASS), None)


def to_status(error: BaseException) -> status_pb2.Status:
    """The status of an exception.

    One that is not in the table goes to the log, with its traceback under a short id; its status
    has nothing but that id.
    """
    entry = entry_of(error)
    if entry is None:
        error_id = secrets.token_hex(4)
        _log.error("unforeseen error %s", error_id, exc_info=error)
        error = InternalError(f"internal error {error_id}: the server's log has the details")
        entry = _BY_CLASS[InternalError]
    message = _shortened(str(error), _MAX_MESSAGE)
    metadata = entry.metadata(error)
    status = status_pb2.Status(code=entry.code.value[0], message=message)
    _attach(
        status,
        error_details_pb2.ErrorInfo(reason=entry.reason, domain=DOMAIN, metadata=metadata),
    )
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=metadata["field"],
            description=f"got {metadata['value']}, expected {metadata['allowed']}",
        )
        _attach(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, ResourceExhausted):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        _attach(status, retry)
    return status


# The mapping of google.api. Proxies log 499 when the client has gone.
HTTP_STATUS: Mapping[grpc.StatusCode, int] = {
    _CODE.INVALID_ARGUMENT: 400,
    _CODE.FAILED_PRECONDITION: 400,
    _CODE.UNAUTHENTICATED: 401,
    _CODE.PERMISSION_DENIED: 403,
    _CODE.NOT_FOUND: 404,
    _CODE.RESOURCE_EXHAUSTED: 429,
    _CODE.CANCELLED: 499,
    _CODE.INTERNAL: 500,
    _CODE.UNAVAILABLE: 503,
    _CODE.DEADLINE_EXCEEDED: 504,
}


def http_status(status: status_pb2.Status) -> int:
    """The HTTP status code of what :func:`to_status` makes."""
    return HTTP_STATUS[_CODE_OF_NUMBER[status.code]]


def info_of(status: status_pb2.Status) -> error_details_pb2.ErrorInfo:
    """The ``ErrorInfo`` of what :func:`to_status` makes: reason and metadata."""
    info = error_details_pb2.ErrorInfo()
    next(detail for detail in status.details if detail.Unpack(info))
    return info


def _attach(status: status_pb2.Status, detail: Any) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def from_status(status: status_pb2.Status) -> PacelineError:
    """The exception behind a status of :func:`to_status`, as far as it has travelled."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    retry_after_s = 1.0
    entry: ErrorEntry | None = None
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN:
            entry = _BY_REASON.get(info.reason)
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    if entry is None:
        return _from_code(_CODE_OF_NUMBER.get(status.code, _CODE.UNKNOWN), status.message)
    return entry.rebuild(Details(status.message, dict(info.metadata), retry_after_s))


def _from_code(code: grpc.StatusCode, message: str) -> PacelineError:
    """The exception for a status of gRPC itself, or of another server: only its code counts."""
    if code is _CODE.UNAVAILABLE:
        return ServerUnavailable(message)
    if code is _CODE.DEADLINE_EXCEEDED:
        return DeadlineExceeded(message)
    if code is _CODE.CANCELLED:
        return Cancelled(message)
    if code is _CODE.UNAUTHENTICATED:
        return Unauthenticated(message)
    if code is _CODE.PERMISSION_DENIED:
        return PermissionDenied(message)
    if code is _CODE.RESOURCE_EXHAUSTED:
        if "larger than max" in message:  # sending it again cannot help
            return InvalidArgument("message", _Verbatim(message), "a smaller message")
        return ResourceExhausted(message)
    if code is _CODE.INVALID_ARGUMENT:
        return InvalidArgument("request", _Verbatim(message), "a valid request")
    if code is _CODE.FAILED_PRECONDITION:
        return FailedPrecondition(message)
    return InternalError(f"{code.name}: {message}")


def from_rpc_error(error: grpc.RpcError) -> PacelineError:
    """The Paceline exception behind an error of a sync or an aio call."""
    return from_parts(error.code(), error.details(), error.trailing_metadata())


def from_parts(code: grpc.StatusCode, message: str | None, trailing: Any) -> PacelineError:
    """The Paceline exception behind the status that a call ended with."""
    for key, value in trailing or ():
        if key == DETAILS_KEY:
            return from_status(status_pb2.Status.FromString(value))
    return _from_code(code, message or "")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> None:
    """End a call with the status of ``error``. Always raises."""
    status = to_status(error)
    await context.abort(
        _CODE_OF_NUMBER[status.code],
        status.message,
        trailing_metadata=((DETAILS_KEY, status.SerializeToString()),),
    )


def _passes(error: BaseException) -> bool:
    """Whether this ends a call without being an error of the handler."""
    return isinstance(error, (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError))


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions of all four kinds of handlers into statuses by the table."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None  # unknown method: gRPC answers
        shape = shape_of(handler)
        behavior = getattr(handler, shape)
        wrap: Any = _wrap_generator if inspect.isasyncgenfunction(behavior) else _wrap_call
        make: Any = getattr(grpc, f"{shape}_rpc_method_handler")
        return make(  # type: ignore[no-any-return]
            wrap(behavior), handler.request_deserializer, handler.response_serializer
        )


def shape_of(handler: Any) -> str:
    """The name of a handler's behaviour: ``unary_stream`` and so on."""
    return ("stream" if handler.request_streaming else "unary") + (
        "_stream" if handler.response_streaming else "_unary"
    )


def _wrap_call(behavior: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """For coroutines, which include streams that write through their context."""

    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(request, context)
        except BaseException as error:
            if _passes(error):
                raise
            await abort(context, error)

    return call


def _wrap_generator(behavior: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    async def generate(
        request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        replies: Any = None
        try:
            replies = behavior(request, context)
            async for reply in replies:
                yield reply
        except BaseException as error:
            if _passes(error):
                raise
            await abort(context, error)
        finally:
            # A cancelled call must reach the handler's own `finally` now, not when the garbage
            # collector finds the generator.
            if replies is not None:
                await replies.aclose()

    return generate
