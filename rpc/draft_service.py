"""DraftService over a local drafter: one batch for all frames of all targets that wait.

``Drafter.propose`` runs on the event loop: a drafter replica has nothing else to do, and a hop to a
worker thread and back costs about as much as the whole round trip. Frames that arrive while it
computes share the next forward.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import grpc

from paceline.drafters.base import Drafter
from paceline.errors import InvalidArgument
from paceline.methods import METHODS, Method
from paceline.rpc.draft_batches import Begun, DraftBatches, FrameReader
from paceline.rpc.errors import to_status
from paceline.rpc.gen.paceline.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from paceline.rpc.messages import fill_draft
from paceline.rpc.mirrors import DraftHost, Mirror, Mirrors
from paceline.rpc.streams import within
from paceline.rpc.tracing import Tracing
from paceline.types import Draft

Context = grpc.aio.ServicerContext[Any, Any]


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Hosts a local drafter, and drafters that use it, for the sessions of any number of targets.

    Args:
        drafter: must not need anything from the target but its tokens, or states that can be sent
            (:attr:`Drafter.states`).
        name: of the drafter in the catalogue. The service makes drafters that use it when a session
            wants them. None gives the sessions of any method to ``drafter``.
        vocab_size: token ids must be below it.
        context_length: sessions that outgrow it get empty drafts (AR); None: no limit.
        max_sessions: of all streams together.
        idle_timeout_s: seconds without a call after which the service closes unary sessions, and
            seconds until the first frame of a stream.
        states: how targets encode their states for this drafter, if it reads some: one of
            :data:`paceline.rpc.states.ENCODINGS`.
        fans: draft for several verdicts while a target verifies, where there is time for it.
        tracing: None traces nothing.

    Raises:
        InvalidArgument: the drafter needs the target's logits or weights.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        name: str | None,
        vocab_size: int,
        context_length: int | None = None,
        catalogue: Mapping[str, Method] = METHODS,
        max_sessions: int = 256,
        idle_timeout_s: float = 120.0,
        states: str = "int8",
        fans: bool = True,
        tracing: Tracing | None = None,
    ) -> None:
        self._host = DraftHost(
            drafter,
            name=name,
            vocab_size=vocab_size,
            context_length=context_length,
            catalogue=catalogue,
            max_sessions=max_sessions,
            states=states,
            fans=fans,
            tracing=tracing,
        )
        self._batches = DraftBatches(self._host)
        self._idle_timeout_s = idle_timeout_s
        self._unary = Mirrors(self._host, "unary")

    @property
    def num_sessions(self) -> int:
        """Open sessions of all streams and unary clients."""
        return self._host.num_sessions

    # --- the stream -----------------------------------------------------------------------------

    async def Propose(
        self, request_iterator: AsyncIterator[draft_pb2.ProposeFrame], context: Context
    ) -> AsyncIterator[draft_pb2.ProposeReply]:
        mirrors = Mirrors(self._host, secrets.token_hex(4))
        try:
            # A target sends a first frame at once; between its sessions it may be silent for hours.
            frames = within(request_iterator, self._idle_timeout_s, later_s=None)
            async with aclosing(FrameReader(mirrors, self._batches).read(frames)) as begun:
                async for each in begun:
                    yield self._reply(each, mirrors)
                    # A guess may be wrong: frames that wait come first.
                    if not self._batches.busy:
                        items = each.frame.items
                        mirrors.draft_ahead(item.session_id for item in items if not item.shadow)
                    if each.frame.wants_ahead:
                        yield mirrors.ahead_of(each.frame)
        finally:
            mirrors.close()

    def _reply(self, begun: Begun, mirrors: Mirrors) -> draft_pb2.ProposeReply:
        reply = draft_pb2.ProposeReply(
            round=begun.frame.round, drafter_pid=os.getpid(),
            draft_seconds=begun.drafted.result(), num_sessions=self.num_sessions,
        )  # fmt: skip
        if begun.frame.round <= 1 and self._host.codec is not None:
            reply.states.CopyFrom(self._host.codec.to_message())
        for draft in mirrors.answer(begun.step):
            result = reply.results.add()
            if isinstance(draft, Draft):
                fill_draft(draft, result.draft)
                result.draft.SetInParent()
            else:
                result.error.CopyFrom(to_status(draft))
        return reply

    # --- unary calls ------------------------------------------------------------------------------

    async def Open(
        self, request: draft_pb2.OpenDraftRequest, context: Context
    ) -> draft_pb2.OpenDraftResult:
        session_id = secrets.token_urlsafe(16)
        item = draft_pb2.ProposeItem(session_id=session_id, new_token_ids=request.token_ids)
        item.open.sampling.CopyFrom(request.sampling)
        item.open.speculation.CopyFrom(request.speculation)
        mirror = self._unary.apply(item, [])
        return draft_pb2.OpenDraftResult(
            session_id=session_id,
            committed_length=mirror.session.length,
            idle_timeout_seconds=self._idle_timeout_s,
            drafter_pid=os.getpid(),
        )

    async def ProposeOne(
        self, request: draft_pb2.ProposeItem, context: Context
    ) -> common_pb2.Draft:
        self._unary_session(request)
        draft = self._answer(request)
        if isinstance(draft, Exception):
            raise draft
        message = common_pb2.Draft()
        fill_draft(draft, message)
        return message

    async def Observe(
        self, request: draft_pb2.ProposeItem, context: Context
    ) -> draft_pb2.ObserveResult:
        self._unary_session(request)
        item = draft_pb2.ProposeItem()
        item.CopyFrom(request)
        item.max_depth = 0
        result = self._answer(item)
        if isinstance(result, Exception):
            raise result
        mirror = self._unary_session(request)  # it may be another one, or be gone after a failure
        return draft_pb2.ObserveResult(committed_length=mirror.session.length)

    async def Close(
        self, request: draft_pb2.CloseDraftRequest, context: Context
    ) -> draft_pb2.CloseDraftResult:
        self._unary.drop(request.session_id)
        return draft_pb2.CloseDraftResult()

    def _answer(self, item: draft_pb2.ProposeItem) -> Draft | Exception:
        step = self._unary.begin([item])
        self._host.draft([step])
        (result,) = self._unary.answer(step)
        return result

    def _unary_session(self, request: draft_pb2.ProposeItem) -> Mirror:
        """The session of a unary call: Open has opened it, and this server has named it."""
        if request.HasField("open"):
            raise InvalidArgument("open", "set", "an item without it: call Open for a new session")
        if request.close:
            raise InvalidArgument("close", True, "an item without it: call Close")
        return self._unary[request.session_id]

    def sweep(self) -> None:
        """Close unary sessions without a call for ``idle_timeout_s``."""
        self._unary.close_idle(time.monotonic() - self._idle_timeout_s)

    def close(self) -> None:
        """Close all unary sessions, when the server stops; streams close theirs as they end."""
        self._unary.close()
