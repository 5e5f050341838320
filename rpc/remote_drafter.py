"""The target's side of DraftService: a drafter in another process behind the face of every drafter.

One long-lived stream, one frame for all sessions of a propose, and only the tokens that the drafter
has not seen. A round must not wait for anything else, so frames go out straight from the engine's
thread, and a thread that blocks on the stream completes the futures.

gRPC's blocking stub and its asyncio API were both measured with an echo drafter (asyncio server in
another process, one session, 1,300 rounds on a 2-core machine that was also training a model): from
``propose`` to the future's result the blocking stub took 0.19 ms (p50) and 0.24 ms (p90), an
asyncio loop in its own thread 0.22 ms and 0.29 ms. The blocking stub it is.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc

from paceline.drafters.base import Drafter
from paceline.errors import DrafterUnavailable, PacelineError, SessionNotFound
from paceline.rpc.errors import PrefixDiverged, from_rpc_error, from_status
from paceline.rpc.gen.paceline.v1 import draft_pb2, draft_pb2_grpc
from paceline.rpc.messages import (
    MAX_MESSAGE_BYTES,
    draft_from_message,
    sampling_to_message,
    speculation_to_message,
)
from paceline.rpc.tls import ClientTls
from paceline.tree import clip, height
from paceline.types import EMPTY_DRAFT, Budget, Draft, Need

if TYPE_CHECKING:
    from paceline.sampling import SamplingParams
    from paceline.view import SessionView

logger = logging.getLogger(__name__)

# A dead machine sends no reset. A round's deadline notices first; this ends the stream behind it.
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    # A subchannel of its own, or a new connection would inherit the backoff of a dead one.
    ("grpc.use_local_subchannel_pool", 1),
)
_FIRST_BACKOFF_S = 0.05
_STUCK_AFTER = 5  # deadlines, until a silent stream is given up

AskList = list[tuple["SessionView", Budget, "Future[Draft]"]]


@dataclass(slots=True)
class RemoteDrafterCounters:
    """Raw counters. Added latency a frame is ``(wait_seconds - draft_seconds) / num_frames``."""

    num_frames: int = 0  # answered frames with drafts that were waited for
    num_ahead: int = 0  # drafts that were here before they were asked for
    wait_seconds: float = 0.0  # from building the frame to the last of its futures
    draft_seconds: float = 0.0  # the drafter's own compute in that time
    num_reopened: int = 0  # sessions whose context was sent again
    num_late: int = 0  # frames that missed the deadline
    num_refused: int = 0  # frames that were not sent, as no drafter answers
    num_connections: int = 0


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What a drafter expects of a session: the next draft is worth something only if it is so."""

    length: int  # committed tokens before what it expects
    expected_ids: list[int]  # the draft that is verified now, and the target's own token
    draft: Draft

    def after(self, session: SessionView) -> Draft:
        """The draft that follows the session's tokens; an empty one if they are not as expected."""
        come_true = session.token_ids[self.length :] == self.expected_ids
        return self.draft if come_true else EMPTY_DRAFT


class _Frame:
    __slots__ = ("asks", "drafts", "expired", "lengths", "retried", "sent_at", "waited")

    def __init__(self, asks: AskList, retried: bool) -> None:
        self.asks = asks
        self.lengths = [session.length for session, _, _ in asks]
        self.drafts: list[Draft] = []  # what was answered
        self.waited = True  # for a draft of it
        self.sent_at = time.perf_counter()
        self.retried = retried
        self.expired = False


class _Connection:
    """One stream to one drafter process, and what that process has been told."""

    def __init__(self, address: str, tls: ClientTls | None) -> None:
        self.address = address
        if tls is None:
            self.channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        else:
            options = (*_CHANNEL_OPTIONS, *tls.options)
            self.channel = grpc.secure_channel(address, tls.credentials(), options=options)
        self.outbox: queue.SimpleQueue[draft_pb2.ProposeFrame | None] = queue.SimpleQueue()
        self.pending: dict[int, _Frame] = {}
        self.answered: tuple[int, _Frame] | None = None  # the last one
        self.ahead: dict[str, _Ahead] = {}  # by session id
        self.told: dict[str, int] = {}  # session id -> number of tokens that the drafter has
        self.num_frames = 0
        self.pid = 0  # 0 until the first reply: not usable yet
        self.opened_at = time.perf_counter()
        stub = draft_pb2_grpc.DraftServiceStub(self.channel)
        self.call: Any = stub.Propose(iter(self.outbox.get, None))

    @property
    def overdue(self) -> bool:
        return any(frame.expired for frame in self.pending.values())

    def close(self) -> None:
        self.outbox.put(None)  # ends gRPC's thread that waits for frames
        self.call.cancel()
        self.channel.close()


class RemoteDrafter(Drafter):
    """Drafts from a DraftService replica, for all sessions of an engine.

    Never blocks and never hangs: while there is no live drafter, and for as long as it owes an
    answer that is past its deadline, drafts fail at once with DrafterUnavailable and the engine
    goes on as AR. It connects in the background from the start, and again whenever the stream
    breaks.

    Args:
        resolve: gives the address of a drafter as HOST:PORT; asked before each connection, so the
            address may change. A plain string means that address for ever.
        vocab_size: of the target; a draft with other tokens counts as a failure.
        deadline_s: seconds until a draft counts as failed.
        max_backoff_s: longest pause between two attempts to connect.
        tls: its files are read at each connection; None is plain text, for loopback and trusted
            networks.
    """

    needs: frozenset[Need] = frozenset()
    elsewhere = True
    shadows = True  # the tokens of later frames tell the drafter what became of its draft

    def __init__(
        self,
        resolve: Callable[[], str] | str,
        *,
        vocab_size: int,
        deadline_s: float = 2.0,
        max_backoff_s: float = 2.0,
        tls: ClientTls | None = None,
    ) -> None:
        self._resolve: Callable[[], str] = resolve if callable(resolve) else lambda: resolve
        self._vocab_size = vocab_size
        self._deadline_s = deadline_s
        self._max_backoff_s = max_backoff_s
        self._tls = tls
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._last_error = "not connected yet"
        self._ready = threading.Event()
        self._stopped = threading.Event()
        self.counters = RemoteDrafterCounters()
        self.address = ""
        self.pid = 0
        self._threads = [
            threading.Thread(target=self._run, name="remote-drafter", daemon=True),
            threading.Thread(target=self._watch, name="remote-drafter-deadlines", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # --- lifecycle --------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """True while a drafter answers."""
        return self._ready.is_set()

    def wait_ready(self, timeout: float) -> bool:
        """Wait until a drafter answers; False when none did in ``timeout`` seconds."""
        return self._ready.wait(timeout)

    def stop(self) -> None:
        """Close the stream (which frees all sessions at the drafter) and end the threads."""
        self._stopped.set()
        with self._lock:
            connection = self._connection
        if connection is not None:
            connection.close()
        for thread in self._threads:
            thread.join(5.0)

    def __enter__(self) -> RemoteDrafter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    # --- Drafter ----------------------------------------------------------------------------------

    def close(self, session: SessionView) -> None:
        """Tell the drafter to free the session's state."""
        with self._lock:
            connection = self._connection
            if connection is None or connection.told.pop(session.session_id, None) is None:
                return
            connection.ahead.pop(session.session_id, None)
            frame = draft_pb2.ProposeFrame()
            frame.items.add(session_id=session.session_id, close=True)
            self._send(connection, frame, [])

    def propose(
        self, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[Future[Draft]]:
        """One future for each session; all of them in one frame."""
        futures: list[Future[Draft]] = [Future() for _ in sessions]
        asks: AskList = []
        for session, budget, future in zip(sessions, budgets, futures, strict=True):
            if min(budget.asked.depth, budget.asked.nodes) <= 0:
                future.set_result(EMPTY_DRAFT)  # AR: the drafter hears of the tokens later
            else:
                asks.append((session, budget, future))
        if asks:
            self._ask(asks, retried=False)
        return futures

    # --- frames -----------------------------------------------------------------------------------

    def _ask(self, asks: AskList, retried: bool) -> None:
        with self._lock:
            connection = self._connection
            if connection is None or not connection.pid:
                reason: str | None = f"no drafter: {self._last_error}"
            elif connection.overdue:
                reason = f"drafter at {connection.address} owes a draft since {self._deadline_s} s"
            else:
                reason = None
                verified = any(budget.shadow is None for _, budget, _ in asks)
                frame = draft_pb2.ProposeFrame(wants_ahead=verified)
                for session, budget, _ in asks:
                    self._add_item(connection, frame, session, budget)
                sent = self._send(connection, frame, asks, retried)
                self._use_what_is_here(connection, sent)
        if reason is not None:
            self.counters.num_refused += 1
            _fail(asks, DrafterUnavailable(reason))

    def _add_item(
        self,
        connection: _Connection,
        frame: draft_pb2.ProposeFrame,
        session: SessionView,
        budget: Budget,
    ) -> None:
        told, asked = connection.told.get(session.session_id), budget.asked
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
        item.base_length = min(told, session.length)  # shorter than before: it was truncated
        item.new_token_ids.extend(session.token_ids[item.base_length :])
        connection.told[session.session_id] = session.length

    def _send(
        self,
        connection: _Connection,
        frame: draft_pb2.ProposeFrame,
        asks: AskList,
        retried: bool = False,
    ) -> _Frame:
        """Under the lock, so that frames leave in the order in which ``told`` advances."""
        connection.num_frames += 1
        frame.round = connection.num_frames
        sent = connection.pending[frame.round] = _Frame(asks, retried)
        connection.outbox.put(frame)
        return sent

    def _use_what_is_here(self, connection: _Connection, frame: _Frame) -> None:
        """Complete the futures of drafts that came ahead of their time.

        The drafter, which expected the same, answers the frame with these drafts.
        """
        for session, budget, future in frame.asks:
            ahead = connection.ahead.pop(session.session_id, None)
            if ahead is not None:
                draft, nodes = ahead.after(session), min(budget.depth, budget.nodes)
                if draft.num_nodes >= nodes > 0:
                    _succeed(future, clip(draft, budget.depth, budget.nodes))
                    self.counters.num_ahead += 1
        frame.waited = any(not future.done() for _, _, future in frame.asks)

    def _on_reply(self, connection: _Connection, reply: draft_pb2.ProposeReply) -> None:
        if not connection.pid:
            with self._lock:
                self.pid = connection.pid = reply.drafter_pid
                self.address = connection.address
                self.counters.num_connections += 1
            self._ready.set()
        if reply.ahead:
            self._expect(connection, reply)
            return
        with self._lock:
            frame = connection.pending.pop(reply.round, None)
        if frame is None or not frame.asks:
            return
        connection.answered = reply.round, frame
        try:
            again = self._settle(connection, frame, reply)
        except Exception as error:  # whatever came back, no session waits for ever
            _fail(frame.asks, self._unavailable(connection, error))
            raise
        if frame.waited:
            self.counters.num_frames += 1
            self.counters.wait_seconds += time.perf_counter() - frame.sent_at
            self.counters.draft_seconds += reply.draft_seconds
        if again:
            self.counters.num_reopened += len(again)
            self._ask(again, retried=True)

    def _expect(self, connection: _Connection, reply: draft_pb2.ProposeReply) -> None:
        """Keep what the drafter expects to follow the drafts that it has just answered with."""
        if connection.answered is None or connection.answered[0] != reply.round:
            return
        frame = connection.answered[1]
        for ask, length, draft, result in zip(
            frame.asks, frame.lengths, frame.drafts, reply.results, strict=True
        ):
            session_id = ask[0].session_id
            follows = draft_from_message(result.draft, self._vocab_size).token_ids.tolist()
            if len(follows) > 1:
                expected = [*draft.token_ids.tolist(), follows[0]]
                ahead = _Ahead(length, expected, Draft.chain(follows[1:]))
                with self._lock:
                    if session_id in connection.told:  # it is not closed yet
                        connection.ahead[session_id] = ahead

    def _settle(
        self, connection: _Connection, frame: _Frame, reply: draft_pb2.ProposeReply
    ) -> AskList:
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
                    failures.append(([ask], self._unavailable(connection, error)))
            else:
                refused = from_status(result.error)
                with self._lock:
                    connection.told.pop(session.session_id, None)
                if isinstance(refused, (SessionNotFound, PrefixDiverged)) and not frame.retried:
                    again.append(ask)
                else:
                    failures.append(([ask], self._unavailable(connection, refused)))
            frame.drafts.append(draft)
        # Back to back, so that the engine, which wakes at the first, finds them all.
        for future, draft in drafts:
            _succeed(future, draft)
        for asks, failure in failures:
            _fail(asks, failure)
        return [ask for ask in again if not ask[2].done()]

    def _checked(self, message: Any, budget: Budget) -> Draft:
        draft = draft_from_message(message, self._vocab_size, max_nodes=budget.nodes)
        deep = draft.num_nodes > budget.depth  # a shallower one cannot have a deeper node
        if deep and height(draft.parent_indices) > budget.depth:
            raise DrafterUnavailable(f"a draft deeper than its budget of {budget.depth}")
        return draft

    def _unavailable(self, connection: _Connection, error: Exception) -> DrafterUnavailable:
        return DrafterUnavailable(f"drafter at {connection.address}: {error}")

    # --- the connection ---------------------------------------------------------------------------

    def _run(self) -> None:
        backoff = _FIRST_BACKOFF_S
        while not self._stopped.is_set():
            if self._connect_and_read():
                backoff = _FIRST_BACKOFF_S  # it did work
            if self._stopped.wait(backoff):
                break
            backoff = min(2 * backoff, self._max_backoff_s)

    def _connect_and_read(self) -> bool:
        """Serve one stream until it ends; True when the drafter ever answered."""
        try:
            address = self._resolve()
            connection = _Connection(address, self._tls)
        except Exception as error:  # the resolver is the caller's: whatever it raises, try again
            self._last_error = f"its address or certificate is not known: {error}"
            logger.warning("%s", self._last_error)
            return False
        with self._lock:
            self._connection = connection
            self._send(connection, draft_pb2.ProposeFrame(), [])  # hello: does a drafter answer?
        if self._stopped.is_set():  # stop() may have looked just before
            connection.close()
        reason: Exception
        try:
            for reply in connection.call:
                self._on_reply(connection, reply)
            reason = ConnectionError("the stream ended")
        except grpc.RpcError as error:
            reason = from_rpc_error(error)
        except Exception as error:
            logger.exception("unforeseen error with the drafter at %s", address)
            reason = error
        self._ready.clear()
        with self._lock:
            self._connection = None
            self._last_error = f"drafter at {address}: {reason}"
            frames = list(connection.pending.values())
            connection.pending.clear()
        if connection.pid and not self._stopped.is_set():
            logger.warning("lost the %s; its sessions go on as AR", self._last_error)
        for frame in frames:
            _fail(frame.asks, self._unavailable(connection, reason))
        connection.close()
        return connection.pid != 0

    def _watch(self) -> None:
        """Fail what is late. Runs a few times per deadline: a late draft is late either way."""
        while not self._stopped.wait(max(0.005, self._deadline_s / 20)):
            with self._lock:
                connection = self._connection
                frames = list(connection.pending.values()) if connection is not None else []
            if connection is None or not frames:
                continue
            now = time.perf_counter()
            for frame in frames:
                if now - frame.sent_at > self._deadline_s and not frame.expired:
                    frame.expired = True
                    self.counters.num_late += 1
                    error = TimeoutError(f"no draft within {self._deadline_s} s")
                    _fail(frame.asks, self._unavailable(connection, error))
            patience = self._deadline_s * (_STUCK_AFTER if connection.pid else 1)
            if now - frames[0].sent_at > patience:
                connection.call.cancel()  # the reader cleans up and connects again


def _succeed(future: Future[Draft], draft: Draft) -> None:
    with suppress(InvalidStateError):  # cancelled or late
        future.set_result(draft)


def _drafted_with(params: SamplingParams) -> SamplingParams:
    """What a drafter has to know; what the target does alone stays with it."""
    return replace(params, logprobs=None, json_schema=None, regex=None, grammar=None)


def _fail(asks: AskList, error: Exception) -> None:
    for _, _, future in asks:
        with suppress(InvalidStateError):
            future.set_exception(error)
