"""GenerateService over an engine: prompt in, a stream of committed tokens out."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import grpc

from paceline.bounds import LONGEST_TOKEN
from paceline.config import MAX_DEPTH, MAX_NODES, SpeculationConfig
from paceline.drafters.predicted_outputs import method_with_prediction
from paceline.errors import InvalidArgument
from paceline.numerics import Fingerprint, check_mismatch
from paceline.request import Request
from paceline.rpc.access import CallAdmission, Gate
from paceline.rpc.bridge import hand_over
from paceline.rpc.gen.paceline.v1 import generate_pb2, generate_pb2_grpc
from paceline.rpc.generate_replies import ReplyWriter, count_prompt, explain
from paceline.rpc.messages import (
    check_size,
    continuations_of,
    fingerprint_of,
    numerics_differ,
    sampling_from_message,
    speculation_from_message,
    tokens_from_message,
)
from paceline.rpc.round_drafts import RoundDrafts
from paceline.rpc.tracing import Tracing, traceparent_of
from paceline.scoring import token_tree
from paceline.tokenizer import ChatTemplate, Tokenizer, fingerprint

if TYPE_CHECKING:
    from paceline.engine import Serving
    from paceline.engine.events import RoundEvent

Context = grpc.aio.ServicerContext[Any, Any]

# Characters. To encode more text takes long enough to hold up the other streams.
_LONG_TEXT = 2_000
MAX_EVENTS = 256
"""Rounds that a generation may be ahead of its reader."""
_FEW_EVENTS = 8  # that may keep their logits in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What GetModel says that the engine does not know.

    Attributes:
        name: the operator's for the model.
        dtype: of its weights.
        batch_invariant: a token's logits do not depend on other tokens of the same forward.
        default_speculation: for requests that name no method.
        chat_template: of the target's tokenizer.
    """

    name: str = "unnamed"
    dtype: str = "float32"
    batch_invariant: bool = False
    default_speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    chat_template: ChatTemplate = field(default_factory=ChatTemplate)


class _Inbox:
    """The events of a session until its reader takes them.

    Of a slow reader's session it holds :data:`MAX_EVENTS`, and parks the session until all are
    taken.
    """

    def __init__(self, thread: Serving, session_id: str, admission: CallAdmission) -> None:
        self._thread = thread
        self._admission = admission
        self._session_id = session_id
        self._events: asyncio.Queue[RoundEvent] = asyncio.Queue()
        self._parked = False

    def put(self, event: RoundEvent) -> None:
        if self._events.qsize() >= _FEW_EVENTS:
            event = event.without_logits()
        self._events.put_nowait(event)
        if event.finished:
            self._admission.on_replica(False)
        elif self._events.qsize() >= MAX_EVENTS and not self._parked:
            self._park(True)

    async def get(self) -> RoundEvent:
        event = await self._events.get()
        if self._parked and self._events.empty():
            self._park(False)
        return event

    def _park(self, parked: bool) -> None:
        self._parked = parked
        self._thread.park(self._session_id, parked)
        self._admission.on_replica(not parked)


class GenerateServicer(generate_pb2_grpc.GenerateServiceServicer):
    """One engine session for each call.

    Args:
        gate: admits calls and counts what they use; None: only the engine's own limits count.
        tracing: None traces nothing.
        numerics_mismatch: as of :class:`paceline.rpc.verify_service.VerifyServicer`.
    """

    def __init__(
        self,
        thread: Serving,
        model: ModelInfo,
        *,
        gate: Gate | None = None,
        tracing: Tracing | None = None,
        numerics_mismatch: str = "refuse",
    ) -> None:
        self._fingerprint: Fingerprint = thread.engine.target.fingerprint
        self._numerics_mismatch = check_mismatch(numerics_mismatch)
        self._thread = thread
        self._replies = ReplyWriter(thread)
        self._tracing = tracing
        self._gate = gate or Gate()
        self._model = model
        self._longest = 0

    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generate_pb2.GenerateReply]:
        metadata = context.invocation_metadata()
        with self._gate.call("generate", self._tracing, traceparent_of(metadata)) as admission:
            async with aclosing(self._generate(request, admission, metadata)) as replies:
                async for reply in replies:
                    yield reply

    async def _generate(
        self, request: generate_pb2.GenerateRequest, admission: CallAdmission, metadata: Any
    ) -> AsyncGenerator[generate_pb2.GenerateReply]:
        span = admission.span
        tenant, weight, teaches = admission.share(metadata)
        self._check_sizes(request)
        own = fingerprint_of(self._thread.engine.target, request.adapter)
        changed = numerics_differ(request, own, self._numerics_mismatch)
        continuations = continuations_of(request)
        prompt_ids = await self._prompt_ids(request)
        prediction = await self._prediction(request)
        params = sampling_from_message(request.sampling)
        speculation = None
        if request.HasField("speculation"):
            speculation = speculation_from_message(request.speculation)
        elif not continuations:
            speculation = self._default_speculation(bool(prediction))
        if speculation is not None and speculation.method == "client":
            raise InvalidArgument(
                "speculation.method", "client", "another one: drafts of yours go to VerifyService"
            )
        # A constraint may take a second to compile; neither the loop nor the engine waits for it.
        compiling = self._thread.engine.constraints.submit(params, tenant)
        constraint = await asyncio.wrap_future(compiling)
        # Chosen here, so that a call that is cancelled before submit returns can be undone, too.
        session_id = secrets.token_urlsafe(16)
        inbox = _Inbox(self._thread, session_id, admission)
        loop = asyncio.get_running_loop()
        first, finished, resumed = True, False, bool(request.committed_token_ids)
        admission.reserve(len(prompt_ids) + token_tree(continuations)[0].num_nodes)
        submitted = self._thread.submit(
            Request(
                prompt_ids,
                params,
                speculation,
                session_id=session_id,
                traceparent="" if span is None else span.traceparent,
                tenant=tenant,
                priority=request.priority,
                weight=weight,
                prediction=prediction,
                committed=request.committed_token_ids,
                constraint=constraint,
                adapter=request.adapter,
                teaches_drafter=teaches,
                continuations=continuations,
            ),
            on_event=hand_over(loop, inbox.put),
        )
        try:
            session = await asyncio.wrap_future(submitted)
            drafts = None
            if request.return_draft:  # the engine has checked these tokens
                before = [*prompt_ids, *request.committed_token_ids]
                drafts = RoundDrafts(self._thread.engine.tokenizer, before, len(prompt_ids))
            if span is not None:
                span.session = session
            admission.opened(session_id)
            drafter_name = session.plan.method.drafter  # also when the drafter is lost later
            while not finished:
                event = await inbox.get()
                finished = event.finished
                if span is not None:
                    span.round(event)
                admission.charge(len(event.token_ids))
                reply = self._replies.of_round(event, drafter_name)
                if finished and request.return_explanation:
                    explain(reply, session)
                if finished and request.return_prompt_token_ids:
                    reply.prompt_token_ids.extend(prompt_ids)
                if drafts is not None and event.outcome is not None:
                    reply.draft.CopyFrom(drafts.of(event, event.outcome))
                if session.branches is not None:
                    admission.charge(session.stats.num_tokens)
                for part in chain(
                    self._replies.with_scores(session, resumed) if first else (), (reply,)
                ):
                    if first:
                        part.fingerprint, part.numerics_changed = str(own), changed
                        count_prompt(part, session)
                        first = False
                    yield part
        finally:
            if not finished:
                self._thread.cancel(session_id)

    @cached_property
    def _tokenizer_fingerprint(self) -> str:
        tokenizer = self._thread.engine.tokenizer
        return "" if tokenizer is None else fingerprint(tokenizer)

    async def GetModel(
        self, request: generate_pb2.GetModelRequest, context: Context
    ) -> generate_pb2.Model:
        self._gate.count_open()
        engine = self._thread.engine
        return generate_pb2.Model(
            name=self._model.name,
            vocab_size=engine.target.vocab_size,
            context_length=engine.target.context_length,
            dtype=self._model.dtype,
            batch_invariant=self._model.batch_invariant,
            has_tokenizer=engine.tokenizer is not None,
            eos_token_ids=engine.eos_token_ids,
            methods=sorted(name for name in self._methods() if name != "client"),
            default_method=self._model.default_speculation.method,
            chat_template=self._model.chat_template.source,
            bos_token=self._model.chat_template.bos_token,
            eos_token=self._model.chat_template.eos_token,
            tokenizer=self._tokenizer_fingerprint,
            fingerprint=str(self._fingerprint),
            adapters=engine.target.adapters,
            limits=generate_pb2.Limits(
                max_sessions=engine.limits.max_sessions,
                max_waiting=engine.limits.max_waiting,
                kv_capacity=engine.target.kv_capacity,
                max_depth=MAX_DEPTH,
                max_nodes=min(MAX_NODES, self._gate.limits.max_nodes),
                max_message_bytes=self._gate.limits.max_message_bytes,
            ),
        )

    async def Tokenize(
        self, request: generate_pb2.TokenizeRequest, context: Context
    ) -> generate_pb2.Tokens:
        self._gate.count_open()
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        token_ids = await self._encoded("text", request.text, special)
        reply = generate_pb2.Tokens(token_ids=token_ids)
        tokenizer = self._thread.engine.tokenizer
        if request.return_texts and tokenizer is not None:
            reply.texts.extend(map(tokenizer.token_bytes, token_ids))
        return reply

    async def Detokenize(
        self, request: generate_pb2.DetokenizeRequest, context: Context
    ) -> generate_pb2.Text:
        self._gate.count_open()
        engine = self._thread.engine
        if engine.tokenizer is None:
            raise InvalidArgument("token_ids", "set", "nothing: this server has no tokenizer")
        check_size("token_ids", request.token_ids, engine.target.context_length)
        token_ids = tokens_from_message("token_ids", request.token_ids, engine.target.vocab_size)
        text = await asyncio.to_thread(
            engine.tokenizer.decode, token_ids, request.skip_special_tokens
        )
        return generate_pb2.Text(text=text)

    def _check_sizes(self, request: generate_pb2.GenerateRequest) -> None:
        context = self._thread.engine.target.context_length
        check_size("prompt_token_ids", request.token_ids.token_ids, context)
        check_size("committed_token_ids", request.committed_token_ids, context)
        check_size("prediction_token_ids", request.prediction_token_ids.token_ids, context)

    async def _prompt_ids(self, request: generate_pb2.GenerateRequest) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            return list(request.token_ids.token_ids)
        if kind is None:
            raise InvalidArgument("prompt", "nothing", "text or token_ids")
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        return await self._encoded("prompt.text", request.text, special)

    async def _prediction(self, request: generate_pb2.GenerateRequest) -> list[int]:
        if request.WhichOneof("prediction") == "prediction_token_ids":
            return list(request.prediction_token_ids.token_ids)
        if not request.prediction_text:
            return []
        return await self._encoded("prediction_text", request.prediction_text, False)

    async def _encoded(self, field: str, text: str, special: bool) -> list[int]:
        tokenizer: Tokenizer | None = self._thread.engine.tokenizer
        if tokenizer is None:
            raise InvalidArgument(field, text[:40], "token_ids: this server has no tokenizer")
        if not text:
            raise InvalidArgument(field, "", "at least one character")
        if len(text) <= _LONG_TEXT:
            return tokenizer.encode(text, special)
        context = self._thread.engine.target.context_length
        # Only what is long makes it worth knowing the vocabulary's longest token.
        if len(text) > context * LONGEST_TOKEN:
            longest = await asyncio.to_thread(self._longest_token)
            if len(text) > context * longest:
                raise InvalidArgument(
                    field, f"{len(text)} characters",
                    f"a text of less than the context's {context} tokens, of which none has more "
                    f"than {longest} bytes",
                )  # fmt: skip
        return await asyncio.to_thread(tokenizer.encode, text, special)

    def _longest_token(self) -> int:
        """Bytes of the longest token, counted once."""
        if not self._longest:
            tokenizer: Tokenizer = self._thread.engine.tokenizer
            lengths = (len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
            self._longest = max(LONGEST_TOKEN, *lengths)
        return self._longest

    def _methods(self) -> list[str]:
        """The methods that the engine can run."""
        engine = self._thread.engine
        return [m.name for m in engine.catalogue.values() if engine.refusal(m) is None]

    def _default_speculation(self, has_prediction: bool) -> SpeculationConfig:
        default = self._model.default_speculation
        if not has_prediction:
            return default
        return SpeculationConfig(method=method_with_prediction(default.method, self._methods()))
