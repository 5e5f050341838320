"""VerifyService over an engine: the client drafts, this side verifies.

Every wire session is an engine session with the method ``client``, which waits for a draft to be
offered. What the client may see of it (tokens, digest, rounds) is mirrored here on the event loop,
so a frame is checked without a word to the engine's thread.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

import grpc
import numpy as np

from paceline.config import SpeculationConfig
from paceline.drafters.client import ClientDrafter
from paceline.errors import FailedPrecondition, InvalidArgument, SessionNotFound
from paceline.numerics import Fingerprint, check_mismatch
from paceline.request import Request
from paceline.rpc.access import CHEAP, CallAdmission, Gate, QuotaExceeded
from paceline.rpc.bridge import hand_over, on_engine
from paceline.rpc.errors import (
    Cancelled,
    EpochFenced,
    InternalError,
    PrefixDiverged,
    RoundOutOfOrder,
    to_status,
)
from paceline.rpc.gen.paceline.v1 import verify_pb2, verify_pb2_grpc
from paceline.rpc.messages import (
    PrefixDigest,
    draft_from_message,
    numerics_differ,
    sampling_from_message,
    speculation_from_message,
    statistics_to_message,
)
from paceline.rpc.streams import within
from paceline.rpc.tracing import Span, Tracing, traceparent_of
from paceline.sampling import CONSTRAINTS, SamplingParams
from paceline.session import Session
from paceline.tree import depths, height
from paceline.types import Draft

if TYPE_CHECKING:
    from paceline.engine import EngineThread, RoundEvent

Context = grpc.aio.ServicerContext[Any, Any]

# A session that is opened again elsewhere has its output as the prompt, and these have to know
# where the output begins; log-probabilities do not travel with a verdict.
_GENERATE_ONLY = {
    name: getattr(SamplingParams(), name)
    for name in ("frequency_penalty", "presence_penalty", "logprobs", *CONSTRAINTS)
}


def trim(draft: Draft, max_depth: int) -> tuple[Draft, list[int]]:
    """The nodes of ``draft`` down to ``max_depth``, and the index that each had before."""
    if draft.num_nodes <= max_depth or height(draft.parent_indices) <= max_depth:
        return draft, list(range(draft.num_nodes))
    kept = np.flatnonzero(depths(draft.parent_indices) <= max_depth)
    place = {int(old): new for new, old in enumerate(kept)} | {-1: -1}
    parents = [place[int(parent)] for parent in draft.parent_indices[kept]]
    probs = draft.probs
    if probs is not None:
        probs = probs.stack([probs.row(int(node)) for node in kept])
    trimmed = Draft(draft.token_ids[kept], np.asarray(parents, np.int32), probs)
    return trimmed, kept.tolist()


class _Wire:
    """One session as its client knows it. Lives on the event loop."""

    def __init__(self, session: Session, admission: CallAdmission, span: Span | None) -> None:
        self.session = session
        self.admission = admission
        self.span = span
        self.session_id = session.session_id
        self.epoch = 1
        self.token_ids = list(session.token_ids)
        self.prompt_length = session.prompt_length
        self.digest = PrefixDigest(self.token_ids)
        self.round = 0  # the last one that was accepted for verification
        self.answer: asyncio.Future[verify_pb2.VerifyResult] | None = None  # to that round
        self.nodes: list[int] = []  # of that round: index in the client's draft
        self.arrived_at = 0.0
        self.verify_seconds = 0.0
        self.finish_reason = ""
        self.numerics_changed = False
        self.touched_at = time.monotonic()

    def on_event(self, event: RoundEvent) -> None:
        """A round of the engine, or the session's end."""
        self.touched_at = time.monotonic()  # the client's turn begins: idle is who has it
        if self.span is not None:
            self.span.round(event)
        self.token_ids.extend(event.token_ids)
        self.digest.extend(event.token_ids)
        if event.finished:
            self.finish_reason = event.session.finish_reason or "error"
        answer = self.answer
        if answer is None or answer.done():
            return
        if event.outcome is None:
            error = event.session.error or Cancelled(f"the session was {self.finish_reason}")
            answer.set_exception(error)
            answer.exception()  # its caller may have stopped waiting
            return
        path = event.outcome.path[: event.num_accepted]
        verify_seconds = event.session.stats.verify_seconds
        result = verify_pb2.VerifyResult(
            round=self.round,
            accepted_indices=[self.nodes[node] for node in path],
            committed_length=len(self.token_ids),
            digest=self.digest.value(),
            finish_reason=self.finish_reason,
            timings=verify_pb2.Timings(
                verify_seconds=verify_seconds - self.verify_seconds,
                total_seconds=time.perf_counter() - self.arrived_at,
            ),
        )
        if len(event.token_ids) > event.num_accepted:
            result.next_token = event.token_ids[-1]
        self.verify_seconds = verify_seconds
        answer.set_result(result)


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """Sessions whose drafts come from clients.

    Args:
        idle_timeout_s: seconds without a call after which sessions are closed, and streams too.
        gate: admits sessions and counts what they use; None admits all that the engine takes.
        tracing: None traces nothing.
        numerics_mismatch: for requests that do not say what happens to a session with another
            fingerprint than this replica's: "refuse" or "allow".
    """

    def __init__(
        self,
        thread: EngineThread,
        *,
        idle_timeout_s: float = 120.0,
        gate: Gate | None = None,
        tracing: Tracing | None = None,
        numerics_mismatch: str = "refuse",
    ) -> None:
        self._fingerprint: Fingerprint = thread.engine.local_target.fingerprint
        self._numerics_mismatch = check_mismatch(numerics_mismatch)
        self._thread = thread
        self._tracing = tracing
        self._gate = gate or Gate()
        self._idle_timeout_s = idle_timeout_s
        self._wires: dict[str, _Wire] = {}
        self._drafter = cast(ClientDrafter, thread.engine.drafters["client"])

    @property
    def num_sessions(self) -> int:
        """Sessions that a client may still use."""
        return len(self._wires)

    # --- the stream -----------------------------------------------------------------------------

    async def Session(
        self, request_iterator: AsyncIterator[verify_pb2.VerifyFrame], context: Context
    ) -> AsyncIterator[verify_pb2.VerifyReply]:
        wire: _Wire | None = None
        epoch = 0
        limit = self._idle_timeout_s
        try:
            async for frame in within(request_iterator, limit, later_s=limit):
                kind = frame.WhichOneof("frame")
                if kind == "open":
                    if wire is not None:
                        raise FailedPrecondition("the stream has a session: one stream for each")
                    wire = await self._open(frame.open, context)
                    epoch = wire.epoch
                    yield verify_pb2.VerifyReply(open=self._opened(wire))
                    continue
                if wire is None:
                    raise FailedPrecondition(f"the first frame must be open, got {kind}")
                if kind == "close":
                    self._check_epoch(wire, epoch)
                    yield verify_pb2.VerifyReply(close=await self._close(wire))
                    return
                try:
                    yield await self._frame(wire, epoch, frame)
                except EpochFenced:
                    raise
                except (InvalidArgument, FailedPrecondition, QuotaExceeded) as error:
                    if isinstance(error, CHEAP):
                        await self._gate.slow_down()
                    yield verify_pb2.VerifyReply(error=to_status(error))
        finally:
            # The stream owns its session, unless another one has taken it over.
            if wire is not None and wire.epoch == epoch:
                self._forget(wire)

    async def _frame(
        self, wire: _Wire, epoch: int, frame: verify_pb2.VerifyFrame
    ) -> verify_pb2.VerifyReply:
        self._check_epoch(wire, epoch)
        request = frame.verify if frame.HasField("verify") else frame.truncate
        if request.session_id not in ("", wire.session_id):
            raise InvalidArgument("session_id", request.session_id, "this stream's session")
        if request.epoch not in (0, epoch):
            raise EpochFenced(f"epoch {request.epoch} is not this stream's ({epoch})")
        if frame.HasField("verify"):
            return verify_pb2.VerifyReply(verify=await self._verify(wire, frame.verify))
        if frame.HasField("truncate"):
            return verify_pb2.VerifyReply(truncate=await self._truncate(wire, frame.truncate))
        raise InvalidArgument("frame", "nothing", "open, verify, truncate or close")

    # --- unary calls ----------------------------------------------------------------------------

    async def Open(
        self, request: verify_pb2.OpenRequest, context: Context
    ) -> verify_pb2.OpenResult:
        return self._opened(await self._open(request, context))

    async def Verify(
        self, request: verify_pb2.VerifyRequest, context: Context
    ) -> verify_pb2.VerifyResult:
        return await self._verify(self._find(request), request)

    async def Truncate(
        self, request: verify_pb2.TruncateRequest, context: Context
    ) -> verify_pb2.TruncateResult:
        return await self._truncate(self._find(request), request)

    async def Close(
        self, request: verify_pb2.CloseRequest, context: Context
    ) -> verify_pb2.CloseResult:
        try:
            wire = self._find(request)
        except SessionNotFound:
            return verify_pb2.CloseResult()
        return await self._close(wire)

    def sweep(self) -> None:
        """Close sessions without a call for ``idle_timeout_s``."""
        limit = time.monotonic() - self._idle_timeout_s
        for wire in list(self._wires.values()):
            if wire.touched_at < limit and (wire.answer is None or wire.answer.done()):
                self._forget(wire)

    def close(self) -> None:
        """Close all sessions, when the server stops."""
        for wire in list(self._wires.values()):
            self._forget(wire)

    # --- steps ----------------------------------------------------------------------------------

    def _find(self, request: Any) -> _Wire:
        wire = self._of_caller(request.session_id)
        self._check_epoch(wire, request.epoch)
        return wire

    def _of_caller(self, session_id: str) -> _Wire:
        """A session of the caller. One of another caller is answered as a missing one."""
        wire = self._wires.get(session_id)
        if wire is not None and wire.admission.is_callers:
            return wire
        error = SessionNotFound(session_id)
        if wire is not None:
            self._gate.record_refusal(error, session_id)
        raise error

    def _check_epoch(self, wire: _Wire, epoch: int) -> None:
        if epoch != wire.epoch:
            raise EpochFenced(f"epoch {epoch} of this session is over, {wire.epoch} has begun")
        if wire.session_id not in self._wires:
            raise SessionNotFound(wire.session_id)  # idle for too long
        wire.touched_at = time.monotonic()

    async def _open(self, request: verify_pb2.OpenRequest, context: Context) -> _Wire:
        if request.resume_session_id:
            self._gate.count_open()  # who guesses session ids is slowed down
            wire = self._of_caller(request.resume_session_id)
            wire.epoch += 1
            wire.touched_at = time.monotonic()
            return wire
        admission = self._gate.admit()
        span = None
        if self._tracing is not None:
            traceparent = traceparent_of(context.invocation_metadata())
            span = self._tracing.begin("verify_session", traceparent)
        try:
            scope = admission.cache_scope(context.invocation_metadata())
            wire = await self._submit(request, admission, span, scope)
        except BaseException as error:
            admission.refused(error)
            if span is not None:
                span.end(error)
            raise
        admission.opened(wire.session_id)
        admission.charge(wire.prompt_length)
        return wire

    async def _submit(
        self,
        request: verify_pb2.OpenRequest,
        admission: CallAdmission,
        span: Span | None,
        scope: str,
    ) -> _Wire:
        changed = numerics_differ(request, self._fingerprint, self._numerics_mismatch)
        speculation = SpeculationConfig(method="client")
        if request.HasField("speculation"):
            given = speculation_from_message(request.speculation)
            if request.speculation.HasField("method") and given.method != "client":
                raise InvalidArgument(
                    "speculation.method", given.method, "'client' or nothing: the drafts are yours"
                )
            speculation = given.model_copy(update={"method": "client"})
        params = sampling_from_message(request.sampling)
        for name, off in _GENERATE_ONLY.items():
            if getattr(params, name) != off:
                raise InvalidArgument(
                    f"sampling.{name}", getattr(params, name), f"{off}: only Generate has this"
                )
        session_id = secrets.token_urlsafe(16)
        prompt_ids = list(request.token_ids)
        loop = asyncio.get_running_loop()
        opened = False
        early: list[RoundEvent] = []

        def on_event(event: RoundEvent) -> None:
            wire = self._wires.get(session_id)
            early.append(event) if wire is None else wire.on_event(event)

        self._drafter.expect(session_id)  # its first draft may come before its turn does
        submitted = self._thread.submit(
            Request(prompt_ids, params, speculation, session_id=session_id, cache_scope=scope),
            on_event=hand_over(loop, on_event),
        )
        try:
            session = await asyncio.wrap_future(submitted)
            opened = True
        finally:
            if not opened:
                self._cancel(session_id)
        wire = self._wires[session_id] = _Wire(session, admission, span)
        wire.numerics_changed = changed
        if span is not None:
            span.session = session
        for event in early:  # it failed before it was known here
            wire.on_event(event)
        return wire

    def _opened(self, wire: _Wire) -> verify_pb2.OpenResult:
        config = wire.session.plan.config
        return verify_pb2.OpenResult(
            session_id=wire.session_id,
            epoch=wire.epoch,
            committed_length=len(wire.token_ids),
            digest=wire.digest.value(),
            next_round=wire.round + 1,
            max_nodes=min(config.node_budget or 0, self._gate.limits.max_nodes),
            max_depth=config.num_speculative_tokens or 0,
            idle_timeout_seconds=self._idle_timeout_s,
            fingerprint=str(self._fingerprint),
            numerics_changed=wire.numerics_changed,
        )

    async def _verify(
        self, wire: _Wire, request: verify_pb2.VerifyRequest
    ) -> verify_pb2.VerifyResult:
        wire.admission.round(len(request.token_ids))
        if request.round == wire.round and wire.answer is not None:
            return await asyncio.shield(wire.answer)  # asked again
        if request.round != wire.round + 1:
            raise RoundOutOfOrder(
                f"round {request.round}: expected {wire.round + 1}, or {wire.round} once more",
                wire.round + 1,
            )
        if wire.answer is not None and not wire.answer.done():
            raise RoundOutOfOrder(
                f"round {request.round}: round {wire.round} has no answer yet", wire.round
            )
        self._check_running(wire)
        self._check_prefix(wire, request)
        config = wire.session.plan.config
        draft = draft_from_message(
            request, self._thread.engine.target.vocab_size, max_nodes=config.node_budget or 0
        )
        depth = config.num_speculative_tokens or 0
        if draft.num_nodes > depth and height(draft.parent_indices) > depth:
            raise InvalidArgument("parent_indices", "a deeper tree", f"a depth of at most {depth}")
        # Nodes beyond the session's last token could never be committed, nor be held by the model.
        last = wire.session.max_length - len(wire.token_ids) - 1
        draft, nodes = trim(draft, last)
        self._drafter.offer(wire.session_id, draft)
        wire.nodes = nodes
        wire.round = request.round
        wire.answer = asyncio.get_running_loop().create_future()
        wire.arrived_at = time.perf_counter()
        before = len(wire.token_ids)
        result = await asyncio.shield(wire.answer)
        wire.admission.charge(result.committed_length - before)
        return result

    def _check_running(self, wire: _Wire) -> None:
        if wire.session.error is not None:
            raise wire.session.error
        if wire.finish_reason:
            raise FailedPrecondition(f"the session has ended ({wire.finish_reason})")

    def _check_prefix(self, wire: _Wire, request: verify_pb2.VerifyRequest) -> None:
        length, digest = len(wire.token_ids), wire.digest.value()
        if request.base_length != length:
            raise PrefixDiverged(
                f"base_length {request.base_length}: the server has {length} committed tokens",
                length,
                digest,
            )
        if request.prefix_digest and request.prefix_digest != digest:
            raise PrefixDiverged(
                f"prefix_digest {request.prefix_digest.hex()}: the server's {length} committed "
                f"tokens have {digest.hex()}",
                length,
                digest,
            )

    async def _truncate(
        self, wire: _Wire, request: verify_pb2.TruncateRequest
    ) -> verify_pb2.TruncateResult:
        wire.admission.round()
        if wire.answer is not None and not wire.answer.done():
            raise FailedPrecondition(f"round {wire.round} has no answer yet")
        self._check_running(wire)
        low, high = wire.prompt_length, len(wire.token_ids)
        if not low <= request.length <= high:
            raise InvalidArgument("length", request.length, f"a length in [{low}, {high}]")
        await on_engine(
            self._thread, lambda engine: engine.truncate(wire.session_id, request.length)
        )
        del wire.token_ids[request.length :]
        wire.digest = PrefixDigest(wire.token_ids)
        return verify_pb2.TruncateResult(
            committed_length=len(wire.token_ids), digest=wire.digest.value()
        )

    async def _close(self, wire: _Wire) -> verify_pb2.CloseResult:
        known = self._wires.pop(wire.session_id, None)
        wire.admission.release()
        await asyncio.wrap_future(self._cancel(wire.session_id))
        if wire.span is not None and known is not None:
            wire.span.end()
        return verify_pb2.CloseResult(statistics=statistics_to_message(wire.session.stats))

    def _forget(self, wire: _Wire) -> None:
        """Free a session without waiting for it."""
        if self._wires.pop(wire.session_id, None) is not None:
            wire.admission.release()
            self._cancel(wire.session_id)
            if wire.span is not None:
                wire.span.end()
            if wire.answer is not None and not wire.answer.done():
                wire.answer.set_exception(InternalError("the session was closed"))
                wire.answer.exception()

    def _cancel(self, session_id: str) -> Future[bool]:
        cancelled = self._thread.cancel(session_id)
        # After the cancellation: the engine may have opened the session just now.
        cancelled.add_done_callback(lambda _: self._drafter.forget(session_id))
        return cancelled


class NoVerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """VerifyService where the engine takes no drafts from elsewhere: every call says so."""

    async def Session(
        self, request_iterator: AsyncIterator[verify_pb2.VerifyFrame], context: Context
    ) -> AsyncIterator[verify_pb2.VerifyReply]:
        raise _takes_no_drafts()
        yield

    async def Open(
        self, request: verify_pb2.OpenRequest, context: Context
    ) -> verify_pb2.OpenResult:
        raise _takes_no_drafts()

    async def Verify(
        self, request: verify_pb2.VerifyRequest, context: Context
    ) -> verify_pb2.VerifyResult:
        raise _takes_no_drafts()

    async def Truncate(
        self, request: verify_pb2.TruncateRequest, context: Context
    ) -> verify_pb2.TruncateResult:
        raise _takes_no_drafts()

    async def Close(
        self, request: verify_pb2.CloseRequest, context: Context
    ) -> verify_pb2.CloseResult:
        raise _takes_no_drafts()


def _takes_no_drafts() -> FailedPrecondition:
    return FailedPrecondition(
        "this target runs on an engine that verifies the drafts of its own drafters only (vLLM): "
        "generate through GenerateService (`paceline generate --server`)"
    )
