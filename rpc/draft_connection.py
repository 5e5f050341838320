"""A stream to one drafter process: frames of sessions there, drafts back."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc

from paceline.errors import DrafterUnavailable, PacelineError, SessionNotFound
from paceline.rpc.drafter_places import DrafterLoad
from paceline.rpc.errors import PrefixDiverged, from_status
from paceline.rpc.gen.paceline.v1 import draft_pb2, draft_pb2_grpc
from paceline.rpc.messages import (
    MAX_MESSAGE_BYTES,
    draft_from_message,
    sampling_to_message,
    speculation_to_message,
)
from paceline.rpc.states import StatesFeed, count_states
from paceline.rpc.tls import ClientTls
from paceline.tree import below, clip, height
from paceline.types import EMPTY_DRAFT, Budget, Draft

if TYPE_CHECKING:
    from paceline.sampling import SamplingParams
    from paceline.view import SessionView

# A dead machine sends no reset. A round's deadline notices first; the pings end the stream.
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    # A subchannel of its own: a shared one would pass the backoff of a dead connection on.
    ("grpc.use_local_subchannel_pool", 1),
)

AskList = list[tuple["SessionView", Budget, "Future[Draft]"]]


@dataclass(slots=True)
class RemoteDrafterCounters:
    """Raw counters. Added latency a frame is ``(wait_seconds - draft_seconds) / num_frames``."""

    num_frames: int = 0  # answered frames with drafts that were waited for
    num_ahead: int = 0  # drafts that were here before the engine asked
    wait_seconds: float = 0.0  # from building the frame to the last of its futures
    draft_seconds: float = 0.0  # the drafter's own compute in that time
    num_reopened: int = 0  # sessions whose context was sent again
    num_late: int = 0  # frames that missed the deadline
    num_refused: int = 0  # frames that were not sent, as no drafter answers
    num_connections: int = 0
    states_bytes: int = 0  # of the target's states, for heads


@dataclass(frozen=True, slots=True)
class Ahead:
    """What the drafter has drafted for the verdicts that it expects."""

    length: int  # committed tokens before the draft under verification
    draft: Draft  # that draft, the target's own token, and the next draft

    def after(self, session: SessionView) -> Draft:
        """The next draft, or an empty one if the verdict is none that was expected."""
        return below(self.draft, session.token_ids[self.length :])


class Frame:
    """A frame that was sent.

    Attributes:
        asks: what it asks for.
        lengths: of the sessions when it was sent.
        waited: a future of it was not complete when the frame left.
        sent_at: ``time.perf_counter``.
        retried: it asks once more, with whole contexts.
        expired: it is past its deadline.
        opens: it opens a session, whose tokens the drafter has to read first.
    """

    __slots__ = ("asks", "expired", "lengths", "opens", "retried", "sent_at", "waited")

    def __init__(self, asks: AskList, retried: bool, opens: bool = False) -> None:
        self.asks = asks
        self.lengths = [session.length for session, _, _ in asks]
        self.waited = True
        self.sent_at = time.perf_counter()
        self.retried = retried
        self.expired = False
        self.opens = opens


class DraftConnection:
    """One stream to one drafter process, and what that process has been told.

    Args:
        tls: None is plain text.
        vocab_size: of the target; a draft with other tokens counts as a failure.
        load: learns what replies tell of the drafter's load.
        feed: the target's states, for a drafter that reads some.
        lock: guards what both the engine's thread and the reader of replies touch. Its owner holds
            it when it calls :meth:`ask`, :meth:`close_session` or :meth:`greet`.

    Attributes:
        pid: of the drafter; 0 until its first reply: not usable yet.
        pending: frames without an answer, by round.
        told: by session id, the number of tokens that the drafter has.
        fed: by session id, the number of first tokens up to which it has their states.
        ahead: drafts that the drafter expects to be asked for next, by session id.
    """

    def __init__(
        self,
        address: str,
        tls: ClientTls | None,
        *,
        vocab_size: int,
        counters: RemoteDrafterCounters,
        load: DrafterLoad,
        feed: StatesFeed,
        lock: threading.Lock,
    ) -> None:
        self.address = address
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        else:
            options = (*_CHANNEL_OPTIONS, *tls.options)
            self._channel = grpc.secure_channel(address, tls.credentials(), options=options)
        self.pending: dict[int, Frame] = {}
        self.told: dict[str, int] = {}
        self.fed: dict[str, int] = {}
        self.ahead: dict[str, Ahead] = {}
        self.pid = 0
        self._vocab_size = vocab_size
        self._counters = counters
        self._load = load
        self._feed = feed
        self._lock = lock
        self._outbox: queue.SimpleQueue[draft_pb2.ProposeFrame | None] = queue.SimpleQueue()
        self._answered: tuple[int, Frame] | None = None  # the last frame
        self._num_frames = 0
        stub = draft_pb2_grpc.DraftServiceStub(self._channel)
        self.call: Any = stub.Propose(iter(self._outbox.get, None))

    @property
    def overdue(self) -> bool:
        """Whether the drafter owes an answer that is past its deadline."""
        return any(frame.expired for frame in self.pending.values())

    def close(self) -> None:
        """End the stream, which frees its sessions at the drafter."""
        self._outbox.put(None)  # ends gRPC's thread that waits for frames
        self.call.cancel()
        self._channel.close()

    def unavailable(self, error: Exception) -> DrafterUnavailable:
        """An error of the drafter, with its address."""
        failure = DrafterUnavailable(f"drafter at {self.address}: {error}")
        failure.__cause__ = error
        return failure

    # --- frames there ---------------------------------------------------------------------------

    def greet(self) -> None:
        """Send an empty frame: does a drafter answer?"""
        self._send(draft_pb2.ProposeFrame(), [])

    def close_session(self, session_id: str) -> None:
        """Tell the drafter to free a session's state; one that it does not know is ignored."""
        if self.told.pop(session_id, None) is None:
            return
        self.ahead.pop(session_id, None)
        self.fed.pop(session_id, None)
        frame = draft_pb2.ProposeFrame()
        frame.items.add(session_id=session_id, close=True)
        self._send(frame, [])

    def ask(self, asks: AskList, retried: bool) -> None:
        """Ask for drafts, all in one frame; futures of drafts that are here already complete."""
        verified = any(budget.shadow is None for _, budget, _ in asks)
        frame = draft_pb2.ProposeFrame(wants_ahead=verified)
        for session, budget, _ in asks:
            self._add_item(frame, session, budget)
        opens = any(item.HasField("open") for item in frame.items)
        self._use_what_is_here(self._send(frame, asks, retried, opens))

    def _add_item(
        self,
        frame: draft_pb2.ProposeFrame,
        session: SessionView,
        budget: Budget,
    ) -> None:
        told, asked = self.told.get(session.session_id), budget.asked
        item = frame.items.add(
            session_id=session.session_id, max_depth=asked.depth, max_nodes=asked.nodes
        )
        if budget.shadow is not None:
            item.shadow = True
        if told is None:
            item.open.sampling.CopyFrom(sampling_to_message(_drafted_with(session.params)))
            item.open.speculation.CopyFrom(speculation_to_message(session.config))
            item.open.traceparent = session.traceparent
            item.open.prediction.extend(session.prediction)
            told = 0
        item.base_length = min(told, session.length)  # it may have been truncated
        item.new_token_ids.extend(session.token_ids[item.base_length :])
        length = item.base_length + len(item.new_token_ids)
        self.told[session.session_id] = length
        self._add_states(item, session, length)

    def _add_states(self, item: draft_pb2.ProposeItem, session: SessionView, length: int) -> None:
        """Add the states that the drafter has not got; of many, earlier frames take the most."""
        if self._feed.codec is None:
            return
        name = session.session_id
        pieces = self._feed.pieces(session, self.fed.get(name, 0), length - 1)
        if not pieces:
            return
        last = pieces[-1]
        self.fed[name] = last.first_position + last.num_positions
        self._counters.states_bytes += count_states(session, pieces)
        for piece in pieces[:-1]:
            frame = draft_pb2.ProposeFrame(items=[item])
            frame.items[0].max_depth = 0
            frame.items[0].states.CopyFrom(piece)
            self._send(frame, [])
            item.ClearField("open")
            item.ClearField("new_token_ids")
            item.base_length = length
        item.states.CopyFrom(last)

    def _send(
        self,
        frame: draft_pb2.ProposeFrame,
        asks: AskList,
        retried: bool = False,
        opens: bool = False,
    ) -> Frame:
        """Under the lock, so that frames leave in the order in which ``told`` advances."""
        self._num_frames += 1
        frame.round = self._num_frames
        sent = self.pending[frame.round] = Frame(asks, retried, opens)
        self._outbox.put(frame)
        return sent

    def _use_what_is_here(self, frame: Frame) -> None:
        """Complete the futures of drafts that came ahead of their time.

        The drafter has expected the same, and answers the frame with these drafts.
        """
        for session, budget, future in frame.asks:
            ahead = self.ahead.pop(session.session_id, None)
            if ahead is not None:
                draft, nodes = ahead.after(session), min(budget.depth, budget.nodes)
                if draft.num_nodes >= nodes > 0:
                    succeed(future, clip(draft, budget.depth, budget.nodes))
                    self._counters.num_ahead += 1
        frame.waited = any(not future.done() for _, _, future in frame.asks)

    # --- replies --------------------------------------------------------------------------------

    def on_reply(self, reply: draft_pb2.ProposeReply) -> AskList:
        """Complete the futures that a reply answers, and note which states the drafter reads.

        Returns:
            what must be asked for again, with whole contexts: the drafter has lost its place.
        """
        if reply.ahead:
            self._expect(reply)
            return []
        if reply.HasField("states"):
            self._feed.use(reply.states)
        with self._lock:
            frame = self.pending.pop(reply.round, None)
        self._load.sessions = reply.num_sessions
        if frame is None or not frame.asks:
            return []
        self._answered = reply.round, frame
        try:
            again = self._settle(frame, reply)
        except Exception as error:  # no session waits for ever, whatever came back
            fail(frame.asks, self.unavailable(error))
            raise
        if frame.waited:
            waited = time.perf_counter() - frame.sent_at
            self._counters.num_frames += 1
            self._counters.wait_seconds += waited
            self._counters.draft_seconds += reply.draft_seconds
            if not frame.opens:
                self._load.observe(waited, time.monotonic())
        self._counters.num_reopened += len(again)
        return again

    def _expect(self, reply: draft_pb2.ProposeReply) -> None:
        """Keep what the drafter expects to follow the drafts that it has just answered with."""
        if self._answered is None or self._answered[0] != reply.round:
            return
        frame = self._answered[1]
        for ask, length, result in zip(frame.asks, frame.lengths, reply.results, strict=True):
            session_id = ask[0].session_id
            draft = draft_from_message(result.draft, self._vocab_size)
            if draft.num_nodes:
                ahead = Ahead(length, draft)
                with self._lock:
                    if session_id in self.told:  # it is not closed yet
                        self.ahead[session_id] = ahead

    def _settle(self, frame: Frame, reply: draft_pb2.ProposeReply) -> AskList:
        """Complete the frame's futures, except for those that must be asked for again."""
        drafts: list[tuple[Future[Draft], Draft]] = []
        failures: list[tuple[AskList, Exception]] = []
        again: AskList = []
        for ask, result in zip(frame.asks, reply.results, strict=True):
            session, budget, future = ask
            draft = EMPTY_DRAFT
            if result.HasField("draft"):
                try:
                    draft = self._checked(result.draft, budget.asked)
                    drafts.append((future, draft))
                except PacelineError as error:
                    failures.append(([ask], self.unavailable(error)))
            else:
                refused = from_status(result.error)
                with self._lock:
                    self.told.pop(session.session_id, None)
                    self.fed.pop(session.session_id, None)
                if isinstance(refused, (SessionNotFound, PrefixDiverged)) and not frame.retried:
                    again.append(ask)
                else:
                    failures.append(([ask], self.unavailable(refused)))
        # Back to back, so that the engine, which wakes at the first, finds them all.
        for future, draft in drafts:
            succeed(future, draft)
        for asks, failure in failures:
            fail(asks, failure)
        return [ask for ask in again if not ask[2].done()]

    def _checked(self, message: Any, budget: Budget) -> Draft:
        draft = draft_from_message(message, self._vocab_size, max_nodes=budget.nodes)
        deep = draft.num_nodes > budget.depth  # a shallower one cannot have a deeper node
        if deep and height(draft.parent_indices) > budget.depth:
            raise DrafterUnavailable(f"a draft deeper than its budget of {budget.depth}")
        return draft


def succeed(future: Future[Draft], draft: Draft) -> None:
    """Complete a future, unless it is complete or cancelled."""
    with suppress(InvalidStateError):  # cancelled or late
        future.set_result(draft)


def _drafted_with(params: SamplingParams) -> SamplingParams:
    """What a drafter has to know; the rest is for the target alone."""
    return replace(
        params, logprobs=None, prompt_logprobs=None, json_schema=None, regex=None, grammar=None
    )


def fail(asks: AskList, error: Exception) -> None:
    """Let the futures that are not complete yet end with an error."""
    for _, _, future in asks:
        with suppress(InvalidStateError):
            future.set_exception(error)
