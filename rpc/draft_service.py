"""DraftService over a local drafter: mirrors of the targets' sessions, one batch a frame.

``Drafter.propose`` runs in the handler itself, on the event loop: a drafter replica has nothing
else to do, and a hop to a worker thread and back costs about as much as the whole round trip.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import grpc
import torch

from paceline.config import MAX_DEPTH, MAX_NODES, SpeculationConfig
from paceline.drafters.base import Drafter, at_once
from paceline.engine.drafting import DrafterSet
from paceline.errors import InvalidArgument, PacelineError, ResourceExhausted, SessionNotFound
from paceline.methods import DRAFTERS, METHODS, Method
from paceline.plan import Plan, resolve
from paceline.rpc.errors import PrefixDiverged, to_status
from paceline.rpc.gen.paceline.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from paceline.rpc.messages import (
    fill_draft,
    sampling_from_message,
    speculation_from_message,
    tokens_from_message,
)
from paceline.rpc.streams import within
from paceline.rpc.tracing import Span, Tracing
from paceline.session import Session
from paceline.tree import accepted_path, clip, is_chain
from paceline.types import EMPTY_DRAFT, Budget, Draft, Outcome, Verification

logger = logging.getLogger(__name__)

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

# The target keeps its logits to itself; a drafter that needs them cannot live here.
NO_VERIFICATION = Verification(torch.empty(0, 0))


class _Mirror:
    """A target's session as this drafter knows it."""

    __slots__ = ("ahead", "asked", "draft", "num_drafts", "ready", "session", "span", "touched_at")

    def __init__(self, session: Session, span: Span | None) -> None:
        self.session = session
        self.span = span
        self.num_drafts = 0
        self.draft = EMPTY_DRAFT  # the one after these tokens, to find the accepted path in
        self.asked: Budget | None = None  # what that draft was made for
        # What would follow that draft if all of it is accepted, the target's next token first.
        self.ahead = EMPTY_DRAFT
        self.ready = EMPTY_DRAFT  # the draft after these tokens, when ``ahead`` was right
        self.touched_at = time.monotonic()


_Mirrors = dict[str, _Mirror]


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Hosts a local drafter, and those that are made of it, for sessions of any number of targets.

    Args:
        drafter: must not need anything from the target but its tokens.
        name: of the drafter in the catalogue; drafters that use it are made when a session wants
            them. None gives the sessions of any method to ``drafter``.
        vocab_size: token ids must be below it.
        context_length: sessions that outgrow it get empty drafts (AR); None: no limit.
        max_sessions: of all streams together.
        idle_timeout_s: seconds without a call after which unary sessions are closed, and so are
            streams that do not begin in that time.
        tracing: None traces nothing.

    Raises:
        InvalidArgument: the drafter needs the target's logits, states or weights.
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
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        if drafter.needs:
            needs = ", ".join(sorted(need.value for need in drafter.needs))
            raise InvalidArgument(
                "drafter",
                type(drafter).__name__,
                f"a drafter that needs only tokens (this one needs {needs}: host it in the "
                "target's process)",
            )
        self._drafter = drafter
        self._drafters = DrafterSet({} if name is None else {name: drafter}, vocab_size)
        self._name = name
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._max_sessions = max_sessions
        self._idle_timeout_s = idle_timeout_s
        self._num_sessions = 0
        self._unary: _Mirrors = {}
        # Sessions with equal knobs share one plan, and with it one shape: drafters batch by shape.
        self._plan = lru_cache(256)(lambda config: self._checked_plan(config, catalogue))

    @property
    def num_sessions(self) -> int:
        """Open sessions of all streams and unary clients."""
        return self._num_sessions

    # --- the stream -----------------------------------------------------------------------------

    async def Propose(
        self, request_iterator: AsyncIterator[draft_pb2.ProposeFrame], context: Context
    ) -> AsyncIterator[draft_pb2.ProposeReply]:
        stream = secrets.token_hex(4)  # two targets may use the same session ids
        mirrors: _Mirrors = {}
        try:
            # A target says hello at once; between its sessions it may then be silent for hours.
            async for frame in within(request_iterator, self._idle_timeout_s, later_s=None):
                started = time.perf_counter()
                reply = draft_pb2.ProposeReply(round=frame.round, drafter_pid=os.getpid())
                for draft in self._answer(frame.items, mirrors, stream):
                    result = reply.results.add()
                    if isinstance(draft, Draft):
                        fill_draft(draft, result.draft)
                        result.draft.SetInParent()
                    else:
                        result.error.CopyFrom(to_status(draft))
                reply.draft_seconds = time.perf_counter() - started
                yield reply
                self._draft_ahead(
                    mirrors[item.session_id]
                    for item in frame.items
                    if item.session_id in mirrors and not item.shadow
                )
                if frame.wants_ahead:
                    yield _ahead_of(frame, mirrors)
        finally:
            for session_id in list(mirrors):
                self._drop(mirrors, session_id)

    def _answer(
        self, items: Sequence[draft_pb2.ProposeItem], mirrors: _Mirrors, stream: str
    ) -> list[Draft | Exception]:
        """A draft or an error for each item; one propose for all that ask."""
        results: list[Draft | Exception] = [EMPTY_DRAFT] * len(items)
        asking: list[tuple[int, _Mirror, Budget]] = []
        observed: list[tuple[Session, Outcome]] = []
        named: set[str] = set()
        for i, item in enumerate(items):
            try:
                if item.session_id in named:
                    name = f"items[{i}].session_id"
                    raise InvalidArgument(name, item.session_id, "each session once in a frame")
                if item.close:
                    self._drop(mirrors, item.session_id)
                    continue
                named.add(item.session_id)
                mirror = self._apply(item, mirrors, stream, observed)
                budget = self._budget(item, mirror)
                if budget.depth <= 0:
                    continue
                mirror.num_drafts += 1
                if mirror.asked == budget:
                    results[i] = mirror.draft  # asked again: the answer was lost
                    continue
                if mirror.ready.num_nodes >= min(budget.depth, budget.nodes):
                    mirror.draft = clip(mirror.ready, budget.depth, budget.nodes)
                    mirror.asked = budget
                    results[i] = mirror.draft
                    continue
                if mirror.asked is not None:  # drafters draft once after a token
                    mirror = self._reopen(mirrors, item.session_id, mirror.session.length)
                asking.append((i, mirror, budget))
            except PacelineError as error:
                results[i] = error
        try:
            for drafter, told in self._by_drafter(observed, lambda item: item[0]):
                drafter.observe([s for s, _ in told], [o for _, o in told])
            for drafter, members in self._by_drafter(asking, lambda item: item[1].session):
                sessions = [mirror.session for _, mirror, _ in members]
                drafts = at_once(drafter.propose(sessions, [b for _, _, b in members]))
                for (i, mirror, budget), draft in zip(members, drafts, strict=True):
                    mirror.draft, mirror.asked = draft, budget
                    results[i] = draft
        except Exception as error:
            # The drafter's state of these sessions is unknown now: forget them. The targets open
            # them again if they still want drafts.
            if not isinstance(error, PacelineError):
                logger.exception("a drafter failed")
            for i, _, _ in asking:
                results[i] = error
            touched = {id(s) for s, _ in observed} | {id(m.session) for _, m, _ in asking}
            for session_id, mirror in list(mirrors.items()):
                if id(mirror.session) in touched:
                    self._drop(mirrors, session_id)
        return results

    def _draft_ahead(self, mirrors: Iterable[_Mirror]) -> None:
        """Draft what follows if the target accepts everything, while it verifies.

        The guess is the drafted tokens and the drafter's own idea of the target's next one. When
        it comes true, the next draft is there at once.
        """
        guesses: list[tuple[_Mirror, Budget]] = []
        for mirror in mirrors:
            draft, asked = mirror.draft, mirror.asked
            if not self._drafter_of(mirror.session).rewinds:
                continue
            if asked is None or not draft.num_nodes or mirror.session.plan.rule.draws.needs_q:
                continue  # a draft with q is not made before its time: it would be large
            depth = draft.num_nodes + 1
            length = mirror.session.length + draft.num_nodes + depth
            fits = self._context_length is None or length <= self._context_length
            if fits and is_chain(draft.parent_indices):
                guesses.append((mirror, Budget(depth, depth)))
        for mirror, _ in guesses:
            mirror.session.token_ids += mirror.draft.token_ids.tolist()
        try:
            for drafter, members in self._by_drafter(guesses, lambda item: item[0].session):
                sessions = [mirror.session for mirror, _ in members]
                drafts = at_once(drafter.propose(sessions, [b for _, b in members]))
                for (mirror, _), draft in zip(members, drafts, strict=True):
                    mirror.ahead = draft
        except Exception:  # the next propose meets it again, and tells the target
            logger.exception("a drafter cannot draft ahead")
        finally:
            for mirror, _ in guesses:
                del mirror.session.token_ids[-mirror.draft.num_nodes :]

    # --- unary calls ------------------------------------------------------------------------------

    async def Open(
        self, request: draft_pb2.OpenDraftRequest, context: Context
    ) -> draft_pb2.OpenDraftResult:
        session_id = secrets.token_urlsafe(16)
        item = draft_pb2.ProposeItem(session_id=session_id, new_token_ids=request.token_ids)
        item.open.sampling.CopyFrom(request.sampling)
        item.open.speculation.CopyFrom(request.speculation)
        mirror = self._apply(item, self._unary, "unary", [])
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
        (draft,) = self._answer([request], self._unary, "unary")
        if isinstance(draft, Exception):
            raise draft
        message = common_pb2.Draft()
        fill_draft(draft, message)
        return message

    async def Observe(
        self, request: draft_pb2.ProposeItem, context: Context
    ) -> draft_pb2.ObserveResult:
        mirror = self._unary_session(request)
        item = draft_pb2.ProposeItem()
        item.CopyFrom(request)
        item.max_depth = 0
        (result,) = self._answer([item], self._unary, "unary")
        if isinstance(result, Exception):
            raise result
        mirror = self._unary_session(request)  # opened anew, or forgotten as its drafter failed
        return draft_pb2.ObserveResult(committed_length=mirror.session.length)

    async def Close(
        self, request: draft_pb2.CloseDraftRequest, context: Context
    ) -> draft_pb2.CloseDraftResult:
        self._drop(self._unary, request.session_id)
        return draft_pb2.CloseDraftResult()

    def _unary_session(self, request: draft_pb2.ProposeItem) -> _Mirror:
        """The session of a unary call, which was opened by Open and is named by the server."""
        if request.HasField("open"):
            raise InvalidArgument("open", "set", "an item without it: call Open for a new session")
        if request.close:
            raise InvalidArgument("close", True, "an item without it: call Close")
        mirror = self._unary.get(request.session_id)
        if mirror is None:
            raise SessionNotFound(request.session_id)
        return mirror

    def sweep(self) -> None:
        """Close unary sessions without a call for ``idle_timeout_s``."""
        limit = time.monotonic() - self._idle_timeout_s
        for session_id, mirror in list(self._unary.items()):
            if mirror.touched_at < limit:
                self._drop(self._unary, session_id)

    def close(self) -> None:
        """Close all unary sessions, when the server stops; streams close theirs as they end."""
        for session_id in list(self._unary):
            self._drop(self._unary, session_id)

    # --- mirrors ----------------------------------------------------------------------------------

    def _apply(
        self,
        item: draft_pb2.ProposeItem,
        mirrors: _Mirrors,
        stream: str,
        observed: list[tuple[Session, Outcome]],
    ) -> _Mirror:
        """Bring the mirror up to the target's committed tokens; notes what became of the draft."""
        session_id = item.session_id
        tokens = tokens_from_message("new_token_ids", item.new_token_ids, self._vocab_size)
        if item.HasField("open"):
            plan = self._plan(speculation_from_message(item.open.speculation))
            params = sampling_from_message(item.open.sampling)
            if not tokens:
                raise InvalidArgument("new_token_ids", "[]", "at least one token to open a session")
            self._drop(mirrors, session_id)
            if self._num_sessions >= self._max_sessions:
                raise ResourceExhausted(
                    f"the drafter holds {self._num_sessions} sessions, its limit"
                )
            prediction = tokens_from_message("prediction", item.open.prediction, self._vocab_size)
            session = Session(f"{stream}/{session_id}", tokens, params, plan, prediction=prediction)
            span = None
            if self._tracing is not None and item.open.traceparent:
                method = plan.method.name
                span = self._tracing.begin("draft", item.open.traceparent, method=method)
            return self._open(mirrors, session_id, session, span)
        mirror = mirrors.get(session_id)
        if mirror is None:
            raise SessionNotFound(session_id)
        mirror.touched_at = time.monotonic()
        session = mirror.session
        if item.base_length > session.length:
            raise PrefixDiverged(
                f"base_length {item.base_length}: the drafter has only {session.length} tokens",
                session.length,
            )
        if item.base_length < session.length:
            if item.base_length < 1:
                raise InvalidArgument("base_length", item.base_length, "at least 1")
            mirror = self._reopen(mirrors, session_id, item.base_length)
            mirror.session.token_ids.extend(tokens)
            return mirror
        if tokens:
            guess, mirror.ahead, mirror.ready = mirror.ahead, EMPTY_DRAFT, EMPTY_DRAFT
            session.token_ids.extend(tokens)
            if guess.num_nodes:
                if tokens == [*mirror.draft.token_ids.tolist(), int(guess.token_ids[0])]:
                    mirror.ready = Draft.chain(guess.token_ids[1:])
                mirror.draft, mirror.asked = EMPTY_DRAFT, None
                return mirror  # a drafter that drafts ahead looks at the tokens only
            path = accepted_path(mirror.draft, tokens)
            observed.append(
                (
                    session,
                    Outcome(
                        draft=mirror.draft,
                        path=path,
                        next_token=tokens[len(path)],
                        token_ids=tuple(tokens[: len(path) + 1]),
                        num_accepted=len(path),
                        verification=NO_VERIFICATION,
                    ),
                )
            )
            mirror.draft, mirror.asked = EMPTY_DRAFT, None
        return mirror

    def _open(
        self, mirrors: _Mirrors, session_id: str, session: Session, span: Span | None
    ) -> _Mirror:
        self._drafter_of(session).open(session)
        mirrors[session_id] = _Mirror(session, span)
        self._num_sessions += 1
        return mirrors[session_id]

    def _reopen(self, mirrors: _Mirrors, session_id: str, length: int) -> _Mirror:
        """Start again with the first ``length`` tokens: drafters cannot roll back."""
        mirror = mirrors[session_id]
        session, span, mirror.span = mirror.session, mirror.span, None
        self._drop(mirrors, session_id)
        kept = session.token_ids[:length]
        again = Session(
            session.session_id, kept, session.params, session.plan, prediction=session.prediction
        )
        opened = self._open(mirrors, session_id, again, span)
        opened.num_drafts = mirror.num_drafts
        return opened

    def _drop(self, mirrors: _Mirrors, session_id: str) -> None:
        mirror = mirrors.pop(session_id, None)
        if mirror is not None:
            self._num_sessions -= 1
            self._drafter_of(mirror.session).close(mirror.session)
            if mirror.span is not None:
                tokens = mirror.session.length
                mirror.span.set(num_drafts=mirror.num_drafts, committed_tokens=tokens)
                mirror.span.end()

    def _budget(self, item: draft_pb2.ProposeItem, mirror: _Mirror) -> Budget:
        depth, nodes = item.max_depth, item.max_nodes
        if depth > MAX_DEPTH:
            raise InvalidArgument("max_depth", depth, f"at most {MAX_DEPTH}")
        if nodes > MAX_NODES:
            raise InvalidArgument("max_nodes", nodes, f"at most {MAX_NODES}")
        if self._context_length is not None:
            depth = min(depth, self._context_length - mirror.session.length)
        return Budget(depth if nodes else 0, nodes)

    def _checked_plan(self, config: SpeculationConfig, catalogue: Mapping[str, Method]) -> Plan:
        plan = resolve(config, catalogue)
        if self._name is None or plan.method.drafter == self._name:
            return plan
        if plan.method.drafter not in DRAFTERS or self._name not in plan.drafters or plan.needs:
            here = sorted(m.name for m in catalogue.values() if served_with(m, self._name))
            raise InvalidArgument(
                "method", config.method, f"one that this drafter serves: {', '.join(here)}"
            )
        for row in (plan.method, *plan.parts):
            self._drafters.make(row.drafter).check_knobs(plan.config)
        return plan

    # --- drafters ---------------------------------------------------------------------------------

    def _drafter_of(self, session: Session) -> Drafter:
        return self._drafter if self._name is None else self._drafters[session.plan.method.drafter]

    def _by_drafter(
        self, items: Sequence[T], session_of: Callable[[T], Session]
    ) -> list[tuple[Drafter, list[T]]]:
        groups: dict[int, tuple[Drafter, list[T]]] = {}
        for item in items:
            drafter = self._drafter_of(session_of(item))
            groups.setdefault(id(drafter), (drafter, []))[1].append(item)
        return list(groups.values())


def _ahead_of(frame: draft_pb2.ProposeFrame, mirrors: _Mirrors) -> draft_pb2.ProposeReply:
    """The second reply to a frame: the drafts ahead of its sessions."""
    reply = draft_pb2.ProposeReply(round=frame.round, drafter_pid=os.getpid(), ahead=True)
    for item in frame.items:
        mirror = mirrors.get(item.session_id)
        fill_draft(EMPTY_DRAFT if mirror is None else mirror.ahead, reply.results.add().draft)
    return reply


def served_with(method: Method, name: str) -> bool:
    """Whether a drafter replica that hosts the drafter ``name`` can draft for a row."""
    return method.drafter == name or (name in method.uses and not method.needs)
