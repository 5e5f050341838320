"""Clients of a target: generate text, or verify drafts of one's own. Blocking and asyncio.

Errors are the exceptions that the server raised (``rpc/errors.py``). To leave a loop over a
generation or its ``with`` block, ``cancel()``, and the loss of the connection all free the session
and its KV memory on the server at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from types import TracebackType
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import grpc

from paceline.config import SpeculationConfig
from paceline.errors import FailedPrecondition, InvalidArgument, PacelineError
from paceline.numerics import check_mismatch
from paceline.rpc.continuation import Continuation
from paceline.rpc.errors import Cancelled, DeadlineExceeded, from_parts, from_rpc_error, from_status
from paceline.rpc.gen.paceline.v1 import (
    common_pb2,
    generate_pb2,
    generate_pb2_grpc,
    verify_pb2,
    verify_pb2_grpc,
)
from paceline.rpc.messages import (
    MAX_MESSAGE_BYTES,
    build,
    explanation_of,
    sampling_to_message,
    speculation_to_message,
    statistics_from_message,
)
from paceline.rpc.tls import ClientTls, is_loopback
from paceline.rpc.transcript import ClientTranscript, Verified
from paceline.sampling import SamplingParams, TokenLogprobs
from paceline.session import SessionStatistics
from paceline.types import EMPTY_DRAFT, Draft

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A server machine that dies sends no reset: without pings a call without deadline would hang.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Clients do not share a connection: when one goes away, the server sees it.
    ("grpc.use_local_subchannel_pool", 1),
    # A replaced server is back in seconds.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
RETRY_S = 0.3
"""Pause before a generation that has lost its server asks again."""

Prompt = str | Sequence[int]

Metadata = tuple[tuple[str, str], ...]
SYSTEM_CA = "system"
"""As ``ca``: the authorities that come with gRPC, for servers on the open internet."""


def bearer(token: str) -> Metadata:
    """The metadata that carries a token.

    Raises:
        InvalidArgument: it has characters that metadata cannot carry; the message does not show it.
    """
    if not token or not all("!" <= character <= "~" for character in token):
        raise InvalidArgument("token", Hidden(), "printable ASCII characters without blanks")
    return (("authorization", f"Bearer {token}"),)


class Hidden:
    """Stands for a secret in an error."""

    def __repr__(self) -> str:
        return "<not shown>"


class _Access:
    """How a client connects: with or without TLS, with which token."""

    def __init__(
        self,
        address: str,
        *,
        credentials: grpc.ChannelCredentials | None,
        ca: str | PathLike[str] | None,
        cert: str | PathLike[str] | None,
        key: str | PathLike[str] | None,
        token: str | None,
        server_name: str | None = None,
    ) -> None:
        files = {"ca": ca, "cert": cert, "key": key}
        given = {name: str(value) for name, value in files.items() if value is not None}
        if given and credentials is not None:
            name, value = next(iter(given.items()))
            raise InvalidArgument(name, value, "nothing beside `credentials`")
        self.address = address
        self.credentials = credentials
        if given:
            if given.get("ca") == SYSTEM_CA:
                del given["ca"]
            self.credentials = ClientTls(**given).credentials()
        self.options = CHANNEL_OPTIONS
        if server_name is not None:
            self.options += ClientTls(server_name=server_name).options
        self.metadata: Metadata = () if token is None else bearer(token)
        host = address.rpartition(":")[0]
        if token is not None and self.credentials is None and not is_loopback(host):
            raise InvalidArgument(
                "token", Hidden(), f"TLS with it (`ca`): {address} is not a loopback address, and "
                "any machine on the way could read it",
            )  # fmt: skip

    def open(self, module: Any) -> Any:
        """A channel of ``grpc`` or ``grpc.aio``."""
        if self.credentials is None:
            return module.insecure_channel(self.address, options=self.options)
        return module.secure_channel(self.address, self.credentials, options=self.options)


class _CallDetails(NamedTuple):
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class _AddMetadata(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Sends the token with every call of a channel."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = (*(details.metadata or ()), *self._metadata)
        return continuation(
            _CallDetails(
                details.method,
                details.timeout,
                metadata,
                details.credentials,
                details.wait_for_ready,
                details.compression,
            ),
            request,
        )

    # The four differ in what the continuation takes and returns, which passes through unchanged.
    intercept_unary_unary: Any = _call
    intercept_unary_stream: Any = _call
    intercept_stream_unary: Any = _call
    intercept_stream_stream: Any = _call


def open_channel(
    address: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    ca: str | PathLike[str] | None = None,
    cert: str | PathLike[str] | None = None,
    key: str | PathLike[str] | None = None,
    token: str | None = None,
) -> grpc.Channel:
    """A blocking channel for other stubs; every call on it carries the token.

    Args, Raises: as :class:`Client`.
    """
    return _blocking(
        _Access(address, credentials=credentials, ca=ca, cert=cert, key=key, token=token)
    )


def open_direct(
    address: str,
    ticket: str,
    gateway: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    ca: str | PathLike[str] | None = None,
    cert: str | PathLike[str] | None = None,
    key: str | PathLike[str] | None = None,
) -> grpc.Channel:
    """A blocking channel to a target past its gateway; its certificate must be the gateway's.

    Args:
        address: of the target, and ``ticket``: as the gateway gave them.
        gateway: HOST:PORT.

    Further args, Raises: as :class:`Client`; a ticket is a token.
    """
    access = _Access(
        address, credentials=credentials, ca=ca, cert=cert, key=key, token=ticket,
        server_name=gateway.rpartition(":")[0].strip("[]"),
    )  # fmt: skip
    return _blocking(access)


def _blocking(access: _Access) -> grpc.Channel:
    channel: grpc.Channel = access.open(grpc)
    if access.metadata:
        channel = grpc.intercept_channel(channel, _AddMetadata(access.metadata))
    return channel


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round committed. The first ``num_accepted`` of ``token_ids`` come from the draft.

    Only the last round has the fields from ``finish_reason`` to ``num_predicted``, and
    ``prompt_token_ids`` if the request asks for it. The first round of each server has its
    ``fingerprint``, and ``numerics_changed`` if the rounds before have another one. Where the
    request asks for ``prompt_logprobs``, they come in rounds 0 without tokens, before the first.
    """

    round: int
    token_ids: tuple[int, ...]
    num_accepted: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    statistics: SessionStatistics | None = None
    target_pid: int = 0
    drafter_pid: int = 0
    drafter_address: str = ""
    prompt_length: int = 0
    prediction_length: int = 0
    num_predicted: int = 0
    fingerprint: str = ""
    numerics_changed: bool = False
    prompt_token_ids: tuple[int, ...] = ()
    draft: generate_pb2.RoundDraft | None = None  # if the request asks for it
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    explanation: Mapping[str, Any] | None = None  # of method `auto`, if the request asks for it
    # Of requests with continuations: which one, and what is told of it; and the tokens computed.
    continuations: tuple[tuple[int, Round], ...] = ()
    num_positions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole generation."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    statistics: SessionStatistics
    rounds: tuple[Round, ...] = field(repr=False)

    @property
    def last(self) -> Round:
        """The last round, which has the process ids."""
        return self.rounds[-1]

    @property
    def fingerprint(self) -> str:
        """Of the numerics of the first token; empty: not known."""
        return next((r.fingerprint for r in self.rounds if r.fingerprint), "")

    @property
    def numerics_changed(self) -> bool:
        """Whether a server with other numerics went on."""
        return any(r.numerics_changed for r in self.rounds)

    @staticmethod
    def of(rounds: Sequence[Round]) -> Completion:
        last = rounds[-1]
        assert last.finish_reason is not None
        assert last.statistics is not None
        return Completion(
            token_ids=tuple(token for r in rounds for token in r.token_ids),
            text="".join(r.text for r in rounds),
            finish_reason=last.finish_reason,
            statistics=last.statistics,
            rounds=tuple(rounds),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuationScores:
    """What the target says of a continuation.

    Attributes:
        logprobs: of its tokens, each after the prompt and the tokens before it.
        after: the token that the target generates behind it.
    """

    logprobs: tuple[TokenLogprobs, ...]
    after: Round = field(repr=False)

    @property
    def logprob(self) -> float:
        """Log-probability of the whole continuation; 0 if it is empty."""
        return sum(entry.logprob or 0.0 for entry in self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether each of its tokens is a most likely one."""
        return all(entry.rank == 1 for entry in self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What the target says of continuations of one prompt.

    Attributes:
        continuations: in the order of the request.
        prompt_logprobs: of the prompt, if the request wants them.
        num_positions: tokens that the target computed; those that continuations share count once.
        statistics: with the forwards that read them (``num_prefill_forwards``).
        fingerprint: of the server's numerics.
    """

    continuations: tuple[ContinuationScores, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    num_positions: int
    statistics: SessionStatistics
    fingerprint: str

    @staticmethod
    def of(rounds: Sequence[Round]) -> Scores:
        """From all rounds of a request with continuations."""
        # A server that was lost may have told a part.
        first = max(i for i, each in enumerate(rounds) if each.fingerprint)
        rounds = rounds[first:]
        parts: dict[int, list[Round]] = {}
        for index, part in (pair for each in rounds for pair in each.continuations):
            parts.setdefault(index, []).append(part)
        statistics = rounds[-1].statistics
        assert statistics is not None
        return Scores(
            continuations=tuple(
                ContinuationScores(
                    logprobs=tuple(entry for part in told for entry in part.prompt_logprobs),
                    after=told[-1],
                )
                for _, told in sorted(parts.items())
            ),
            prompt_logprobs=tuple(entry for each in rounds for entry in each.prompt_logprobs),
            num_positions=rounds[-1].num_positions,
            statistics=statistics,
            fingerprint=rounds[0].fingerprint,
        )


def _generate_request(
    prompt: Prompt,
    params: SamplingParams | None,
    speculation: SpeculationConfig | None = None,
    prediction: Prompt = (),
    numerics_mismatch: str | None = None,
    adapter: str = "",
    continuations: Sequence[Sequence[int]] = (),
) -> generate_pb2.GenerateRequest:
    request = generate_pb2.GenerateRequest(sampling=sampling_to_message(params), adapter=adapter)
    if numerics_mismatch is not None:
        request.numerics_mismatch = check_mismatch(numerics_mismatch)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(build(common_pb2.TokenIds, "prompt.", token_ids=list(prompt)))
    if speculation is not None:
        request.speculation.CopyFrom(speculation_to_message(speculation))
    if isinstance(prediction, str):
        request.prediction_text = prediction
    elif len(prediction):
        ids = build(common_pb2.TokenIds, "prediction.", token_ids=list(prediction))
        request.prediction_token_ids.CopyFrom(ids)
    for i, each in enumerate(continuations):
        where = f"continuations[{i}]."
        request.continuations.append(build(common_pb2.TokenIds, where, token_ids=list(each)))
    if request.ByteSize() > MAX_MESSAGE_BYTES:
        raise InvalidArgument(
            "prompt", f"{request.ByteSize()} bytes", f"at most {MAX_MESSAGE_BYTES} bytes"
        )
    return request


def _open_request(
    prompt_ids: Sequence[int],
    params: SamplingParams | None,
    speculation: SpeculationConfig | None,
    fingerprint: str,
    numerics_mismatch: str | None,
    adapter: str,
) -> verify_pb2.OpenRequest:
    request = build(verify_pb2.OpenRequest, "", token_ids=list(prompt_ids), adapter=adapter)
    request.fingerprint = fingerprint
    if numerics_mismatch is not None:
        request.numerics_mismatch = check_mismatch(numerics_mismatch)
    request.sampling.CopyFrom(sampling_to_message(params))
    if speculation is not None:
        request.speculation.CopyFrom(speculation_to_message(speculation))
    return request


def _token_logprobs(entry: generate_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        entry.token_id,
        entry.logprob if entry.HasField("logprob") else None,
        tuple((other.token_id, other.logprob) for other in entry.top),
        entry.rank,
    )


def _round(reply: generate_pb2.GenerateReply) -> Round:
    last = bool(reply.finish_reason)
    return Round(
        round=reply.round,
        token_ids=tuple(reply.token_ids),
        num_accepted=reply.num_accepted,
        text=reply.text,
        logprobs=tuple(map(_token_logprobs, reply.logprobs)),
        prompt_logprobs=tuple(map(_token_logprobs, reply.prompt_logprobs)),
        finish_reason=reply.finish_reason or None,
        statistics=statistics_from_message(reply.statistics) if last else None,
        target_pid=reply.target_pid,
        drafter_pid=reply.drafter_pid,
        drafter_address=reply.drafter_address,
        prompt_length=reply.prompt_length,
        prediction_length=reply.prediction_length,
        num_predicted=reply.num_predicted,
        fingerprint=reply.fingerprint,
        numerics_changed=reply.numerics_changed,
        prompt_token_ids=tuple(reply.prompt_token_ids),
        draft=reply.draft if reply.HasField("draft") else None,
        explanation=explanation_of(reply),
        continuations=tuple((each.index, _round(each.reply)) for each in reply.continuations),
        num_positions=reply.num_positions,
    )


# --- what does not wait for the server -----------------------------------------------------------


class _Generation:
    """What both kinds of generations have in common: among others, how to go on after a loss.

    Args:
        start: begins a call with a request and a time-out.
        timeout: seconds for all of it.
        resume_s: seconds in which to look for a server after the loss of one.
    """

    def __init__(
        self,
        start: Callable[[generate_pb2.GenerateRequest, float | None], Any],
        request: generate_pb2.GenerateRequest,
        timeout: float | None,
        resume_s: float,
    ) -> None:
        self._start = start
        self._whole = Continuation(request.SerializeToString(), timeout)
        self._resume_s = resume_s
        self._cancelled = threading.Event()
        self._call = start(request, timeout)

    def _has_ended(self, error: grpc.RpcError) -> bool:
        """Whether the call was lost after its last reply; if not, the generation can go on.

        Raises:
            PacelineError: what ended the call, and the generation with it.
        """
        if self._whole.finished:
            return True
        failure = from_rpc_error(error)
        if self._cancelled.is_set() or not self._whole.may_go_on(failure, self._resume_s):
            raise failure
        return False

    def _start_again(self) -> None:
        request = generate_pb2.GenerateRequest.FromString(self._whole.next_request())
        self._call = self._start(request, self._whole.timeout_s)

    def cancel(self) -> None:
        """Free the session on the server; any thread may call this of a blocking generation."""
        self._cancelled.set()
        self._call.cancel()


G = TypeVar("G", bound=_Generation)
M = TypeVar("M", verify_pb2.VerifyRequest, verify_pb2.TruncateRequest, verify_pb2.CloseRequest)


class _Client(Generic[G]):
    """What both clients do without waiting for the server.

    Args, Raises: as :class:`Client`.
    """

    _grpc: ClassVar[Any]  # what makes channels: `grpc` or `grpc.aio`
    _generation: Callable[..., G]

    def __init__(
        self,
        address: str,
        *,
        timeout: float | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        ca: str | PathLike[str] | None = None,
        cert: str | PathLike[str] | None = None,
        key: str | PathLike[str] | None = None,
        token: str | None = None,
        resume_s: float = 0.0,
    ) -> None:
        access = _Access(address, credentials=credentials, ca=ca, cert=cert, key=key, token=token)
        self._metadata = access.metadata
        self._resume_s = resume_s
        self._timeout = timeout
        self._channel: Any = access.open(self._grpc)
        self._generate: Any = generate_pb2_grpc.GenerateServiceStub(self._channel)
        self._verify: Any = verify_pb2_grpc.VerifyServiceStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: SpeculationConfig | None = None,
        *,
        prediction: Prompt = (),
        timeout: float | None = None,
        return_draft: bool = False,
        return_prompt_token_ids: bool = False,
        return_explanation: bool = False,
        priority: int = 0,
        numerics_mismatch: str | None = None,
        adapter: str = "",
    ) -> G:
        """Start generating; the rounds come as they are committed.

        Args:
            prediction: the expected output; a draft, which never changes the output.
            return_draft: rounds have their drafts (``Round.draft``).
            return_prompt_token_ids: the last round has the prompt's tokens.
            return_explanation: the last round says what method ``auto`` chose and why.
            priority: in [-1000, 1000]; among your requests, those with a lower number come first.
            numerics_mismatch: when the server is lost and comes back with other numerics,
                "refuse" (NumericsMismatch) or "allow" to go on (``Round.numerics_changed``); None:
                as the server's configuration says.
            adapter: name of one of the target's (``get_model().adapters``); "" is none.

        Raises:
            PacelineError: the server's refusal, at the first round.
        """
        request = _generate_request(
            prompt, params, speculation, prediction, numerics_mismatch, adapter
        )
        request.return_draft = return_draft
        request.return_prompt_token_ids = return_prompt_token_ids
        request.return_explanation = return_explanation
        request.priority = priority
        start, timeout = self._start_generation, timeout or self._timeout
        return self._generation(start, request, timeout, self._resume_s)

    def _scoring(
        self,
        prompt: Prompt,
        continuations: Sequence[Sequence[int]],
        params: SamplingParams | None,
        timeout: float | None,
    ) -> G:
        if not len(continuations):
            raise InvalidArgument("continuations", "none", "at least one")
        params = replace(params or SamplingParams(), max_tokens=1)
        request = _generate_request(prompt, params, continuations=continuations)
        start, timeout = self._start_generation, timeout or self._timeout
        return self._generation(start, request, timeout, self._resume_s)

    def _start_generation(
        self, request: generate_pb2.GenerateRequest, timeout: float | None
    ) -> Any:
        return self._generate.Generate(request, timeout=timeout, metadata=self._metadata)


class _Session:
    """A session that verifies this client's drafts."""

    def __init__(self, transcript: ClientTranscript) -> None:
        self.transcript = transcript

    @property
    def token_ids(self) -> list[int]:
        """The committed tokens, prompt included."""
        return self.transcript.token_ids

    @property
    def finish_reason(self) -> str | None:
        """None while the session goes on."""
        return self.transcript.finish_reason

    def _verify_request(self, draft: Draft) -> verify_pb2.VerifyRequest:
        return self.transcript.request(self.transcript.propose(draft))


# --- blocking ----------------------------------------------------------------------------------


class Generation(_Generation):
    """A running generation: iterate over its rounds once. Leaving the loop early cancels it."""

    def __iter__(self) -> Iterator[Round]:
        try:
            while True:
                try:
                    for reply in self._call:
                        self._whole.add(reply)
                        yield _round(reply)
                    return
                except grpc.RpcError as error:
                    if self._has_ended(error):
                        return
                if self._cancelled.wait(RETRY_S):
                    raise Cancelled("the generation was cancelled")
                self._start_again()
        finally:
            self._call.cancel()  # nothing happens to a call that has ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()


class Client(_Client[Generation]):
    """A blocking client of one server; thread-safe.

    Args:
        address: HOST:PORT.
        timeout: seconds for each call as a whole; None means no deadline.
        credentials: for TLS, as gRPC makes them; None is plain text, unless one of the files below
            is given.
        ca: PEM file of the authority that signs the server's certificate; turns TLS on. "system"
            trusts the public authorities.
        cert, key: PEM files of the client's own certificate, for servers that want one (mTLS).
        token: of the tenant, for servers with tenants. Over plain text only to loopback.
        resume_s: seconds in which a generation looks for a server that is lost. It goes on with the
            same tokens with coupled sampling and at temperature 0, else with tokens of the same
            distribution. 0 raises the error at once.

    Raises:
        InvalidArgument: a file or the token is not usable.
    """

    _grpc: ClassVar[Any] = grpc
    _generation = Generation

    def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: SpeculationConfig | None = None,
        *,
        prediction: Prompt = (),
        timeout: float | None = None,
        numerics_mismatch: str | None = None,
        adapter: str = "",
    ) -> Completion:
        """Generate and wait for the end."""
        generation = self.generate(
            prompt, params, speculation, prediction=prediction, timeout=timeout,
            numerics_mismatch=numerics_mismatch, adapter=adapter,
        )  # fmt: skip
        return Completion.of(list(generation))

    def score(
        self,
        prompt: Prompt,
        continuations: Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
    ) -> Scores:
        """Score sequences that may follow a prompt, in one reading of their tree.

        Tokens that several of them begin with are computed once. On the fast path the scores are
        those of one sequence at a time, to the last bit.

        Args:
            continuations: token ids, because a text after a prompt has other tokens than alone; at
                most 256, with 16,384 tokens together.
            params: ``prompt_logprobs`` most likely tokens beside each; and how to choose the one
                token after each continuation.
        """
        return Scores.of(list(self._scoring(prompt, continuations, params, timeout)))

    def get_model(self) -> generate_pb2.Model:
        """What the server serves."""
        return self._unary(self._generate.GetModel, generate_pb2.GetModelRequest())  # type: ignore[no-any-return]

    def open_session(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        speculation: SpeculationConfig | None = None,
        *,
        fingerprint: str = "",
        numerics_mismatch: str | None = None,
        adapter: str = "",
    ) -> VerifySession:
        """Open a verify session over unary calls.

        Args:
            fingerprint: of the server that has committed some of these tokens
                (``ClientTranscript.fingerprint``): one with other numerics refuses.
            numerics_mismatch: "refuse", or "allow" it to go on
                (``ClientTranscript.numerics_changed``); None: as its configuration says.
            adapter: name of one of the target's; "" is none.

        Raises:
            NumericsMismatch: the server has another fingerprint.
        """
        request = _open_request(
            prompt_ids, params, speculation, fingerprint, numerics_mismatch, adapter
        )
        transcript = ClientTranscript(prompt_ids)
        transcript.opened(self._unary(self._verify.Open, request))
        return VerifySession(self, transcript)

    def _unary(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def close(self) -> None:
        """Close the connection, which cancels running calls."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class VerifySession(_Session):
    """A session that verifies this client's drafts, over unary calls. Not thread-safe.

    After a failure of the network a call can be made again: rounds are idempotent.
    """

    def __init__(self, client: Client, transcript: ClientTranscript) -> None:
        super().__init__(transcript)
        self._client = client

    def verify(self, draft: Draft = EMPTY_DRAFT) -> Verified:
        """Verify a draft that follows ``token_ids``; an empty one gives AR's next token."""
        request = self._addressed(self._verify_request(draft))
        return self.transcript.verified(self._client._unary(self._client._verify.Verify, request))

    def truncate(self, length: int) -> None:
        """Forget the committed tokens after the first ``length``."""
        request = self._addressed(build(verify_pb2.TruncateRequest, "", length=length))
        self.transcript.truncated(self._client._unary(self._client._verify.Truncate, request))

    def close(self) -> SessionStatistics | None:
        """Free the session, and return its statistics; None: it was gone already."""
        request = self._addressed(verify_pb2.CloseRequest())
        result: verify_pb2.CloseResult = self._client._unary(self._client._verify.Close, request)
        if not result.HasField("statistics"):
            return None
        return statistics_from_message(result.statistics)

    def _addressed(self, request: M) -> M:
        """Add the session's name and epoch to a unary message; frames go without them."""
        request.session_id, request.epoch = self.transcript.session_id, self.transcript.epoch
        return request

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except PacelineError:
            if error is None:  # do not hide the first error
                raise


# --- asyncio -----------------------------------------------------------------------------------


class AsyncGeneration(_Generation):
    """A running generation: iterate over its rounds once. Leaving the loop early cancels it."""

    async def __aiter__(self) -> AsyncIterator[Round]:
        try:
            while True:
                try:
                    async for reply in self._call:
                        self._whole.add(reply)
                        yield _round(reply)
                    return
                except grpc.RpcError as error:
                    if self._has_ended(error):
                        return
                await asyncio.sleep(RETRY_S)
                self._start_again()
        finally:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()


class AsyncClient(_Client[AsyncGeneration]):
    """An asyncio client of one server, for the event loop that makes it.

    Args: as :class:`Client`.
    """

    _grpc: ClassVar[Any] = grpc.aio
    _generation = AsyncGeneration

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: SpeculationConfig | None = None,
        *,
        prediction: Prompt = (),
        timeout: float | None = None,  # noqa: ASYNC109  the deadline travels with the call
        numerics_mismatch: str | None = None,
        adapter: str = "",
    ) -> Completion:
        """Generate and wait for the end."""
        generation = self.generate(
            prompt, params, speculation, prediction=prediction, timeout=timeout,
            numerics_mismatch=numerics_mismatch, adapter=adapter,
        )  # fmt: skip
        return Completion.of([r async for r in generation])

    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  the deadline travels with the call
    ) -> Scores:
        """As :meth:`Client.score`."""
        generation = self._scoring(prompt, continuations, params, timeout)
        return Scores.of([r async for r in generation])

    async def get_model(self) -> generate_pb2.Model:
        """What the server serves."""
        try:
            return await self._generate.GetModel(  # type: ignore[no-any-return]
                generate_pb2.GetModelRequest(), timeout=self._timeout, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def open_session(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        speculation: SpeculationConfig | None = None,
        *,
        fingerprint: str = "",
        numerics_mismatch: str | None = None,
        adapter: str = "",
    ) -> AsyncVerifySession:
        """Open a verify session on a stream of its own; see :meth:`Client.open_session`."""
        transcript = ClientTranscript(prompt_ids)
        session = AsyncVerifySession(self._session_call(), transcript, self._timeout)
        return await session._open(
            _open_request(prompt_ids, params, speculation, fingerprint, numerics_mismatch, adapter)
        )

    async def resume_session(self, transcript: ClientTranscript) -> AsyncVerifySession:
        """Take over a session of this server on a new stream, and fence the old stream off.

        If the last answer was lost, this fetches it and applies it to ``transcript``.

        Raises:
            SessionNotFound: it is gone; open a new one with ``transcript.token_ids`` and
                ``transcript.fingerprint``.
        """
        session = AsyncVerifySession(self._session_call(), transcript, self._timeout)
        return await session._open(verify_pb2.OpenRequest(resume_session_id=transcript.session_id))

    def _session_call(self) -> Any:
        return self._verify.Session(metadata=self._metadata)

    async def close(self) -> None:
        """Close the connection, which cancels running calls."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


class AsyncVerifySession(_Session):
    """A session that verifies this client's drafts on one stream, and ends with it.

    One call at a time: a round follows from the answer to the one before.
    """

    def __init__(self, call: Any, transcript: ClientTranscript, timeout: float | None) -> None:
        super().__init__(transcript)
        self._call = call
        self._timeout = timeout

    async def _open(self, request: verify_pb2.OpenRequest) -> Self:
        try:
            reply = await self._exchange(verify_pb2.VerifyFrame(open=request))
            if self.transcript.opened(reply.open):
                await self.verify(self.transcript.rounds[0].draft)
        except BaseException:
            self.cancel()
            raise
        return self

    async def verify(self, draft: Draft = EMPTY_DRAFT) -> Verified:
        """Verify a draft that follows ``token_ids``; an empty one gives AR's next token."""
        frame = verify_pb2.VerifyFrame(verify=self._verify_request(draft))
        reply = await self._exchange(frame)
        return self.transcript.verified(reply.verify)

    async def truncate(self, length: int) -> None:
        """Forget the committed tokens after the first ``length``."""
        request = build(verify_pb2.TruncateRequest, "", length=length)
        frame = verify_pb2.VerifyFrame(truncate=request)
        reply = await self._exchange(frame)
        self.transcript.truncated(reply.truncate)

    async def close(self) -> SessionStatistics:
        """Free the session, and return its statistics."""
        frame = verify_pb2.VerifyFrame(close=verify_pb2.CloseRequest())
        reply = await self._exchange(frame)
        self.cancel()
        return statistics_from_message(reply.close.statistics)

    def cancel(self) -> None:
        """End the stream, which frees the session on the server."""
        self._call.cancel()

    async def _exchange(self, frame: verify_pb2.VerifyFrame) -> verify_pb2.VerifyReply:
        """Send one frame, and return the answer.

        Raises:
            PacelineError: as the server raised it.
            DeadlineExceeded: no answer within ``timeout`` seconds; the stream is over.
        """
        try:
            async with asyncio.timeout(self._timeout):
                await self._call.write(frame)
                reply = await self._call.read()
        except TimeoutError:
            self.cancel()
            raise DeadlineExceeded(f"no answer within {self._timeout} s") from None
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise await self._ended(error) from None
        if reply is grpc.aio.EOF:
            raise await self._ended(None)
        if reply.HasField("error"):
            raise from_status(reply.error)
        result: verify_pb2.VerifyReply = reply
        return result

    async def _ended(self, error: BaseException | None) -> PacelineError:
        """Why the stream is over."""
        if isinstance(error, grpc.RpcError):
            return from_rpc_error(error)
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return FailedPrecondition("the session is closed")
        return from_parts(code, await self._call.details(), await self._call.trailing_metadata())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()
