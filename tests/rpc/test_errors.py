"""The error table: every row over a real wire, in all four kinds of call, and back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

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
)
from paceline.rpc.errors import (
    DOMAIN,
    ERRORS,
    Cancelled,
    DeadlineExceeded,
    EpochFenced,
    InternalError,
    PermissionDenied,
    PoisonRequest,
    PrefixDiverged,
    RoundOutOfOrder,
    ServerUnavailable,
    Unauthenticated,
    from_rpc_error,
)
from paceline.rpc.server import RpcServer
from tests.rpc.serving import serving

CODE = grpc.StatusCode

EXAMPLES: list[tuple[PacelineError, grpc.StatusCode, str]] = [
    (InvalidArgument("top_p", 2.5, "a number in (0, 1]"), CODE.INVALID_ARGUMENT,
     "INVALID_ARGUMENT"),
    (SessionNotFound("s-1"), CODE.NOT_FOUND, "SESSION_NOT_FOUND"),
    (ModelNotFound("no folder '/x'"), CODE.NOT_FOUND, "MODEL_NOT_FOUND"),
    (PrefixDiverged("diverged", 17, b"\x00\xffabc"), CODE.FAILED_PRECONDITION, "PREFIX_DIVERGED"),
    (RoundOutOfOrder("round 7", 3), CODE.FAILED_PRECONDITION, "ROUND_OUT_OF_ORDER"),
    (EpochFenced("epoch 1 is over"), CODE.FAILED_PRECONDITION, "EPOCH_FENCED"),
    (PoisonRequest("two died", "ab12"), CODE.FAILED_PRECONDITION, "POISON_REQUEST"),
    (NumericsMismatch("other numerics", "portable-float32-k1-aa", "amx-float32-k1-aa"),
     CODE.FAILED_PRECONDITION, "NUMERICS_MISMATCH"),
    (TokenizerMismatch("entry 5 differs"), CODE.FAILED_PRECONDITION, "TOKENIZER_MISMATCH"),
    (FailedPrecondition("not now"), CODE.FAILED_PRECONDITION, "FAILED_PRECONDITION"),
    (ResourceExhausted("no KV memory", 2.5), CODE.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED"),
    (Unauthenticated("no token"), CODE.UNAUTHENTICATED, "UNAUTHENTICATED"),
    (PermissionDenied("suspended"), CODE.PERMISSION_DENIED, "PERMISSION_DENIED"),
    (DrafterUnavailable("it died"), CODE.UNAVAILABLE, "DRAFTER_UNAVAILABLE"),
    (ServerUnavailable("draining"), CODE.UNAVAILABLE, "SERVER_UNAVAILABLE"),
    (DeadlineExceeded("too slow"), CODE.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    (Cancelled("by the operator"), CODE.CANCELLED, "CANCELLED"),
    (InternalError("internal error 1234"), CODE.INTERNAL, "INTERNAL"),
]  # fmt: skip

_raised: list[BaseException] = []
_CALLS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


async def _unary_unary(request: bytes, context: Any) -> bytes:
    raise _raised[0]


async def _unary_stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield b"first"
    raise _raised[0]


async def _stream_unary(requests: AsyncIterator[bytes], context: Any) -> bytes:
    async for _ in requests:
        raise _raised[0]
    return b""


async def _stream_stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request
        raise _raised[0]


def _register(server: grpc.aio.Server) -> list[str]:
    handlers = {
        name: getattr(grpc, f"{name}_rpc_method_handler")(globals()[f"_{name}"]) for name in _CALLS
    }
    generic = grpc.method_handlers_generic_handler("test.Raiser", handlers)
    server.add_generic_rpc_handlers((generic,))
    return ["test.Raiser"]


@pytest.fixture(scope="module")
def raiser() -> Iterator[RpcServer]:
    with serving(register=_register) as running:
        yield running


def _call(address: str, kind: str, error: BaseException) -> grpc.RpcError:
    """Let a handler of that kind raise ``error``; what a blocking client gets."""
    _raised[:] = [error]
    with grpc.insecure_channel(address) as channel:
        method = getattr(channel, kind)(f"/test.Raiser/{kind}")
        argument = iter([b"request"]) if kind.startswith("stream") else b"request"
        consume = list if kind.endswith("stream") else bytes
        with pytest.raises(grpc.RpcError) as caught:
            consume(method(argument, timeout=5))
    return caught.value


@pytest.mark.parametrize("kind", _CALLS)
@pytest.mark.parametrize(("error", "code", "reason"), EXAMPLES, ids=[e[2] for e in EXAMPLES])
def test_every_row_both_ways(
    raiser: RpcServer, kind: str, error: PacelineError, code: grpc.StatusCode, reason: str
) -> None:
    received = _call(raiser.address, kind, error)
    assert received.code() is code
    assert received.details() == str(error)

    status = rpc_status.from_call(received)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason, DOMAIN)

    back = from_rpc_error(received)
    assert type(back) is type(error)
    assert str(back) == str(error)
    for name, value in vars(error).items():
        if name != "value":  # travels as its repr
            assert getattr(back, name) == value


def test_the_examples_are_the_whole_table() -> None:
    assert {type(error) for error, _, _ in EXAMPLES} == {row.exception for row in ERRORS}
    assert len({row.reason for row in ERRORS}) == len(ERRORS)


def test_every_library_error_has_a_row() -> None:
    import paceline.errors

    classes = {
        value
        for value in vars(paceline.errors).values()
        if isinstance(value, type) and issubclass(value, PacelineError)
    }
    assert classes - {PacelineError} <= {row.exception for row in ERRORS}


def test_bad_request_and_retry_info(raiser: RpcServer) -> None:
    received = _call(raiser.address, "unary_unary", EXAMPLES[0][0])
    bad = error_details_pb2.BadRequest()
    assert rpc_status.from_call(received).details[1].Unpack(bad)
    (violation,) = bad.field_violations
    assert violation.field == "top_p"
    assert "2.5" in violation.description
    assert "(0, 1]" in violation.description

    received = _call(raiser.address, "unary_unary", ResourceExhausted("full", 2.5))
    retry = error_details_pb2.RetryInfo()
    assert rpc_status.from_call(received).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 2500


@pytest.mark.parametrize("kind", _CALLS)
def test_an_unforeseen_error_leaks_nothing(
    raiser: RpcServer, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "paceline.rpc"):
        received = _call(raiser.address, kind, KeyError("secret path /root"))
    assert received.code() is CODE.INTERNAL
    assert "secret" not in str(received.trailing_metadata()) + (received.details() or "")
    error_id = (received.details() or "").split()[2].rstrip(":")
    assert len(error_id) == 8
    (record,) = caplog.records
    assert error_id in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(from_rpc_error(received), InternalError)


def test_a_huge_value_still_fits_the_trailers(raiser: RpcServer) -> None:
    error = InvalidArgument("prompt" * 500, "x" * 100_000, "y" * 100_000)
    back = from_rpc_error(_call(raiser.address, "unary_unary", error))
    assert isinstance(back, InvalidArgument)
    assert len(str(back)) < 3000


async def test_an_asyncio_client_gets_the_same(raiser: RpcServer) -> None:
    _raised[:] = [PrefixDiverged("diverged", 17, b"abc")]
    async with grpc.aio.insecure_channel(raiser.address) as channel:
        method: Any = channel.unary_unary("/test.Raiser/unary_unary")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(b"request")
    back = from_rpc_error(caught.value)
    assert isinstance(back, PrefixDiverged)
    assert (back.committed_length, back.digest) == (17, b"abc")


async def test_cancelling_is_not_an_error(
    raiser: RpcServer, caplog: pytest.LogCaptureFixture
) -> None:
    _raised[:] = [asyncio.CancelledError()]
    async with grpc.aio.insecure_channel(raiser.address) as channel:
        call: Any = channel.stream_stream("/test.Raiser/stream_stream")()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
    assert not caplog.records


def test_codes_without_details_are_understood() -> None:
    """gRPC makes statuses of its own, and proxies strip trailers."""
    from google.rpc import status_pb2

    from paceline.rpc.errors import from_status

    expected = {
        CODE.UNAVAILABLE: ServerUnavailable,
        CODE.DEADLINE_EXCEEDED: DeadlineExceeded,
        CODE.CANCELLED: Cancelled,
        CODE.RESOURCE_EXHAUSTED: ResourceExhausted,
        CODE.INVALID_ARGUMENT: InvalidArgument,
        CODE.FAILED_PRECONDITION: FailedPrecondition,
        CODE.UNIMPLEMENTED: InternalError,
        CODE.UNKNOWN: InternalError,
    }
    for code, kind in expected.items():
        error = from_status(status_pb2.Status(code=code.value[0], message="why"))
        assert type(error) is kind
        assert "why" in str(error)
