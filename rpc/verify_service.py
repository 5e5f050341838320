"""VerifyService over an engine: the client drafts, this side verifies.

Every verify session is an engine session with the method ``client``, which waits for the client's
drafts. What the client knows of it is in its transcript (``rpc/transcript.py``).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

import grpc
import numpy as np

from paceline.config import SpeculationConfig
from paceline.drafters.client import ClientDrafter
from paceline.errors import FailedPrecondition, InvalidArgument, SessionNotFound
from paceline.numerics import check_mismatch
from paceline.request import Request
from paceline.rpc.access import CHEAP, LEASE_ID, SESSION_ID, CallAdmission, Gate
from paceline.rpc.bridge import hand_over, on_engine
from paceline.rpc.errors import (
    Cancelled,
    EpochFenced,
    InternalError,
    to_status,
)
from paceline.rpc.gen.paceline.v1 import verify_pb2, verify_pb2_grpc
from paceline.rpc.messages import (
    check_size,
    draft_from_message,
    fingerprint_of,
    numerics_differ,
    sampling_from_message,
    speculation_from_message,
    statistics_to_message,
)
from paceline.rpc.quotas import QuotaExceeded
from paceline.rpc.states import StatesFeed, checked_codec, count_states
from paceline.rpc.streams import within
from paceline.rpc.tracing import Tracing, traceparent_of
from paceline.rpc.transcript import ServerTranscript
from paceline.sampling import CONSTRAINTS, SamplingParams
from paceline.session import Session
from paceline.tree import depths, height
from paceline.types import STATES, Draft

if TYPE_CHECKING:
    from paceline.engine import EngineThread, RoundEvent
    from paceline.target import ModelTarget

Context = grpc.aio.ServicerContext[Any, Any]

# A session that a client opens again has its output in the prompt, and these have to know where the
# output begins; a verdict has no log-probabilities.
_GENERATE_ONLY = {
    name: getattr(SamplingParams(), name)
    for name in (
        "frequency_penalty",
        "presence_penalty",
        "logprobs",
        "prompt_logprobs",
        *CONSTRAINTS,
    )
}


_LONGEST_ID = 400


def _value(metadata: Any, key: str) -> str:
    return next((str(value) for name, value in metadata or () if name == key), "")


def trim(draft: Draft, max_depth: int) -> tuple[Draft, list[int]]:
    """Cut a draft to ``max_depth``; returns the rest, and the index that each of its nodes had."""
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


def _speculation(request: verify_pb2.OpenRequest) -> SpeculationConfig:
    if not request.HasField("speculation"):
        return SpeculationConfig(method="client")
    given = speculation_from_message(request.speculation)
    if request.speculation.HasField("method") and given.method != "client":
        raise InvalidArgument(
            "speculation.method", given.method, "'client' or nothing: the drafts are yours"
        )
    return given.model_copy(update={"method": "client"})


def _sampling(request: verify_pb2.OpenRequest) -> SamplingParams:
    params = sampling_from_message(request.sampling)
    for name, off in _GENERATE_ONLY.items():
        if getattr(params, name) != off:
            raise InvalidArgument(
                f"sampling.{name}", getattr(params, name), f"{off}: only Generate has this"
            )
    return params


def _feed_of(target: ModelTarget, request: verify_pb2.OpenRequest) -> StatesFeed | None:
    """What keeps the states that a client wants; None: it wants none.

    Raises:
        InvalidArgument: this target does not have them.
    """
    if not request.HasField("states"):
        return None
    config = getattr(target.runner, "config", None)
    if STATES - target.provides or config is None:
        raise InvalidArgument("states", "set", "nothing: this target gives no states")
    return StatesFeed(checked_codec(request.states, target.num_layers, config.hidden_size))


class _Served:
    """A client's session: its transcript, and the engine session behind it.

    It lives on the event loop, which checks frames against the transcript without a word to the
    engine's thread.
    """

    def __init__(
        self,
        session: Session,
        transcript: ServerTranscript,
        admission: CallAdmission,
        lease_id: str,
        feed: StatesFeed | None,
    ) -> None:
        self.feed = feed  # the target's states, for a client that reads some
        self.states_from: int | None = None  # the last round's request
        self.session = session
        self.transcript = transcript
        self.admission = admission
        self.lease_id = lease_id  # what a gateway holds for it; empty without one
        self.answer: asyncio.Future[verify_pb2.VerifyResult] | None = None  # to the last round
        self.arrived_at = 0.0
        self.verify_seconds = 0.0
        self.touched_at = time.monotonic()

    @property
    def session_id(self) -> str:
        return self.transcript.session_id

    def on_event(self, event: RoundEvent) -> None:
        """A round of the engine, or the session's end."""
        transcript = self.transcript
        self.touched_at = time.monotonic()  # the client's turn begins, and with it its idle time
        if self.admission.span is not None:
            self.admission.span.round(event)
        transcript.commit(event.token_ids)
        if event.finished:
            transcript.finish_reason = event.session.finish_reason or "error"
        if self.answer is None or not transcript.is_pending:
            return
        if event.outcome is None:
            reason = f"the session was {transcript.finish_reason}"
            self.fail(event.session.error or Cancelled(reason))
            return
        verify_seconds = event.session.stats.verify_seconds
        timings = verify_pb2.Timings(
            verify_seconds=verify_seconds - self.verify_seconds,
            total_seconds=time.perf_counter() - self.arrived_at,
        )
        self.verify_seconds = verify_seconds
        has_next = len(event.token_ids) > event.num_accepted
        result = transcript.answered(
            event.outcome.path[: event.num_accepted],
            event.token_ids[-1] if has_next else None,
            timings,
        )
        self._add_states(result)
        self.answer.set_result(result)

    def asked(self, request: verify_pb2.VerifyRequest) -> None:
        """Note which states the answer to a new round should have."""
        self.states_from = request.states_from if request.HasField("states_from") else None

    def _add_states(self, result: verify_pb2.VerifyResult) -> None:
        if self.feed is None or self.states_from is None or result.finish_reason:
            return
        states = self.feed.latest(self.session, self.states_from, result.committed_length - 1)
        if states is not None:
            count_states(self.session, [states])
            result.states.CopyFrom(states)

    def fail(self, error: Exception) -> None:
        """Let the pending round, if there is one, end with an error."""
        if self.answer is not None and self.transcript.is_pending:
            self.transcript.failed()
            self.answer.set_exception(error)
            self.answer.exception()  # its caller may have stopped waiting


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """Sessions whose drafts come from clients.

    Args:
        idle_timeout_s: seconds without a call after which the server closes sessions and streams.
        gate: admits sessions and counts what they use; None: only the engine's own limits count.
        tracing: None traces nothing.
        numerics_mismatch: "refuse" or "allow" a session with another fingerprint than this
            replica's, for requests that say neither.
        lease_ended: called with the lease (metadata :data:`LEASE_ID`) of a session that has ended.

    Attributes:
        sessions: that a client may still use, by id.
    """

    def __init__(
        self,
        thread: EngineThread,
        *,
        idle_timeout_s: float = 120.0,
        gate: Gate | None = None,
        tracing: Tracing | None = None,
        numerics_mismatch: str = "refuse",
        lease_ended: Callable[[str], object] = lambda lease_id: None,
    ) -> None:
        self._lease_ended = lease_ended
        self._numerics_mismatch = check_mismatch(numerics_mismatch)
        self._thread = thread
        self._tracing = tracing
        self._gate = gate or Gate()
        self._idle_timeout_s = idle_timeout_s
        self.sessions: dict[str, _Served] = {}
        self._drafter = cast(ClientDrafter, thread.engine.drafters["client"])

    # --- the stream -----------------------------------------------------------------------------

    async def Session(
        self, request_iterator: AsyncIterator[verify_pb2.VerifyFrame], context: Context
    ) -> AsyncIterator[verify_pb2.VerifyReply]:
        served: _Served | None = None
        epoch = 0
        limit = self._idle_timeout_s
        try:
            async for frame in within(request_iterator, limit, later_s=limit):
                kind = frame.WhichOneof("frame")
                if kind == "open":
                    if served is not None:
                        raise FailedPrecondition("the stream has a session: one stream for each")
                    served = await self._open(frame.open, context)
                    epoch = served.transcript.epoch
                    yield verify_pb2.VerifyReply(open=self._opened(served))
                    continue
                if served is None:
                    raise FailedPrecondition(f"the first frame must be open, got {kind}")
                if kind == "close":
                    self._check_epoch(served, epoch)
                    yield verify_pb2.VerifyReply(close=await self._close(served))
                    return
                try:
                    yield await self._frame(served, epoch, frame)
                except EpochFenced:
                    raise
                except (InvalidArgument, FailedPrecondition, QuotaExceeded) as error:
                    if isinstance(error, CHEAP):
                        await self._gate.slow_down()
                    yield verify_pb2.VerifyReply(error=to_status(error))
        finally:
            # The stream owns its session, unless another call has taken it over.
            if served is not None and served.transcript.epoch == epoch:
                self._forget(served)

    async def _frame(
        self, served: _Served, epoch: int, frame: verify_pb2.VerifyFrame
    ) -> verify_pb2.VerifyReply:
        self._check_epoch(served, epoch)
        request = frame.verify if frame.HasField("verify") else frame.truncate
        if request.session_id not in ("", served.session_id):
            raise InvalidArgument("session_id", request.session_id, "this stream's session")
        if request.epoch not in (0, epoch):
            raise EpochFenced(f"epoch {request.epoch} is not this stream's ({epoch})")
        if frame.HasField("verify"):
            return verify_pb2.VerifyReply(verify=await self._verify(served, frame.verify))
        if frame.HasField("truncate"):
            return verify_pb2.VerifyReply(truncate=await self._truncate(served, frame.truncate))
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
            served = self._find(request)
        except SessionNotFound:
            return verify_pb2.CloseResult()
        return await self._close(served)

    def sweep(self) -> None:
        """Close sessions without a call for ``idle_timeout_s``."""
        limit = time.monotonic() - self._idle_timeout_s
        for served in list(self.sessions.values()):
            if served.touched_at < limit and not served.transcript.is_pending:
                self._forget(served)

    def close(self) -> None:
        """Close all sessions, when the server stops."""
        for served in list(self.sessions.values()):
            self._forget(served)

    # --- steps ----------------------------------------------------------------------------------

    def _find(self, request: Any) -> _Served:
        served = self._of_caller(request.session_id)
        self._check_epoch(served, request.epoch)
        return served

    def _of_caller(self, session_id: str) -> _Served:
        """A session of the caller; another caller's counts as missing.

        Raises:
            SessionNotFound: there is no such session.
        """
        served = self.sessions.get(session_id)
        if served is not None and served.admission.is_callers:
            return served
        error = SessionNotFound(session_id)
        if served is not None:
            self._gate.record_refusal(error, session_id)
        raise error

    def _check_epoch(self, served: _Served, epoch: int) -> None:
        served.transcript.check_epoch(epoch)
        if served.session_id not in self.sessions:
            raise SessionNotFound(served.session_id)  # idle for too long
        served.touched_at = time.monotonic()

    async def _open(self, request: verify_pb2.OpenRequest, context: Context) -> _Served:
        if request.resume_session_id:
            self._gate.count_open()  # so that guessing session ids is slow
            served = self._of_caller(request.resume_session_id)
            served.transcript.resume()
            served.touched_at = time.monotonic()
            return served
        metadata = context.invocation_metadata()
        traceparent = traceparent_of(metadata)
        with self._gate.call("verify_session", self._tracing, traceparent) as admission:
            served = await self._submit(request, admission, metadata)
            admission.keep()
        admission.opened(served.session_id)
        admission.charge(served.transcript.prompt_length)
        return served

    def _new_id(self, admission: CallAdmission, metadata: Any) -> str:
        """The id that a gateway has given to the session, or one of this server."""
        given = _value(metadata, SESSION_ID)
        if not given or admission.owner is not None:  # tenants of this server are no gateways
            return secrets.token_urlsafe(16)
        if len(given) > _LONGEST_ID or given in self.sessions:
            raise InvalidArgument(SESSION_ID, f"{len(given)} characters", "an id that is new")
        return given

    async def _submit(
        self, request: verify_pb2.OpenRequest, admission: CallAdmission, metadata: Any
    ) -> _Served:
        tenant, weight, teaches = admission.share(metadata)
        target = self._thread.engine.local_target
        own = fingerprint_of(target, request.adapter)
        changed = numerics_differ(request, own, self._numerics_mismatch)
        speculation, params = _speculation(request), _sampling(request)
        check_size("token_ids", request.token_ids, target.context_length)
        feed, session_id = _feed_of(target, request), self._new_id(admission, metadata)
        loop, opened = asyncio.get_running_loop(), False
        early: list[RoundEvent] = []

        def on_event(event: RoundEvent) -> None:
            served = self.sessions.get(session_id)
            early.append(event) if served is None else served.on_event(event)

        self._drafter.expect(session_id, feed)  # the client's first draft may be early
        submitted = self._thread.submit(
            Request(
                list(request.token_ids), params, speculation, session_id=session_id,
                tenant=tenant, weight=weight, adapter=request.adapter, teaches_drafter=teaches,
                needs=frozenset() if feed is None else feed.needs,
            ),
            on_event=hand_over(loop, on_event),
        )  # fmt: skip
        try:
            session = await asyncio.wrap_future(submitted)
            opened = True
        finally:
            if not opened:
                self._cancel(session_id)
        transcript = ServerTranscript(session_id, session.token_ids)
        transcript.numerics_changed = changed
        served = self.sessions[session_id] = _Served(
            session, transcript, admission, _value(metadata, LEASE_ID), feed
        )
        if admission.span is not None:
            admission.span.session = session
        for event in early:  # the session failed before it got here
            served.on_event(event)
        return served

    def _opened(self, served: _Served) -> verify_pb2.OpenResult:
        config = served.session.plan.config
        result = served.transcript.opened()
        result.max_nodes = min(config.node_budget or 0, self._gate.limits.max_nodes)
        result.max_depth = config.num_speculative_tokens or 0
        result.idle_timeout_seconds = self._idle_timeout_s
        adapter = served.session.adapter
        result.fingerprint = str(self._thread.engine.local_target.fingerprint_of(adapter))
        return result

    async def _verify(
        self, served: _Served, request: verify_pb2.VerifyRequest
    ) -> verify_pb2.VerifyResult:
        transcript = served.transcript
        served.admission.round(len(request.token_ids))
        if transcript.is_repeated(request.round):
            if transcript.answer is not None:
                return transcript.answer
            assert served.answer is not None
            return await asyncio.shield(served.answer)
        self._check_running(served)
        transcript.check_prefix(request)
        config = served.session.plan.config
        draft = draft_from_message(
            request, self._thread.engine.target.vocab_size, max_nodes=config.node_budget or 0
        )
        depth = config.num_speculative_tokens or 0
        if draft.num_nodes > depth and height(draft.parent_indices) > depth:
            raise InvalidArgument("parent_indices", "a deeper tree", f"a depth of at most {depth}")
        # The session cannot commit nodes beyond its last token, nor can the model hold them.
        last = served.session.max_length - transcript.length - 1
        draft, nodes = trim(draft, last)
        self._drafter.offer(served.session_id, draft)
        transcript.take(request.round, nodes)
        served.asked(request)
        served.answer = asyncio.get_running_loop().create_future()
        served.arrived_at = time.perf_counter()
        before = transcript.length
        result = await asyncio.shield(served.answer)
        served.admission.charge(result.committed_length - before)
        return result

    def _check_running(self, served: _Served) -> None:
        if served.session.error is not None:
            raise served.session.error
        if served.transcript.finish_reason:
            raise FailedPrecondition(f"the session has ended ({served.transcript.finish_reason})")

    async def _truncate(
        self, served: _Served, request: verify_pb2.TruncateRequest
    ) -> verify_pb2.TruncateResult:
        served.admission.round()
        served.transcript.check_answered()
        self._check_running(served)
        served.transcript.check_truncate(request.length)
        await on_engine(
            self._thread, lambda engine: engine.truncate(served.session_id, request.length)
        )
        return served.transcript.truncated(request.length)

    async def _close(self, served: _Served) -> verify_pb2.CloseResult:
        if self.sessions.pop(served.session_id, None) is not None:
            self._lease_ended(served.lease_id)
        served.admission.release()
        await asyncio.wrap_future(self._cancel(served.session_id))
        served.admission.end()
        return verify_pb2.CloseResult(statistics=statistics_to_message(served.session.stats))

    def _forget(self, served: _Served) -> None:
        """Free a session without waiting for it."""
        if self.sessions.pop(served.session_id, None) is not None:
            self._cancel(served.session_id)
            self._lease_ended(served.lease_id)
            served.admission.end()
            served.fail(InternalError("the session was closed"))

    def _cancel(self, session_id: str) -> Future[bool]:
        cancelled = self._thread.cancel(session_id)
        # After the cancellation: the engine may have opened the session just now.
        cancelled.add_done_callback(lambda _: self._drafter.forget(session_id))
        return cancelled


class NoVerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """VerifyService over an engine that takes no clients' drafts: every call says so."""

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
        "this target runs on an engine that verifies no drafts of clients (vLLM, or a "
        "masked-diffusion model): generate through GenerateService (`paceline generate --server`)"
    )
