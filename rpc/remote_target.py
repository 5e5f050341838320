"""A target on a server behind the face that the loop knows: the `device` topology.

The loop drafts, calls :meth:`RemoteTarget.verify`, and gets a verdict; where the model is makes no
difference to it. What the distance adds is in this file:

*Rounds ahead.* While an answer travels, the drafter goes on as if the target would accept the whole
draft and add what the drafter expects, and each further draft leaves at once. The server takes the
frames of a stream one after the other and compares each one's prefix digest with its own tokens, so
a round whose guess was wrong costs it a comparison, and one whose guess was right is already there
when the answer to the round before leaves. A drafter takes part if it can take a guess back
(``Drafter.rewinds``), or find more than a draft at a time (``Drafter.copies``); others draft when
the answer has come.

*Losing a server.* Committed tokens are all that a target knows of a session, and this side has
them. A stream that breaks is resumed, or opened anew with these tokens, there or at the next
address, and the rounds in flight are sent again. Coupled sampling makes the continuation the same
where numerics are the same: a session that is opened anew names the fingerprint of its tokens, and
a server with another one refuses. When no server has it the session fails, or goes on and says so.

*Other ways to the same tokens.* :class:`Mode` names them; a session may change between rounds.
"""

from __future__ import annotations

import enum
import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import grpc
import numpy as np
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.config import SpeculationConfig
from paceline.errors import (
    FailedPrecondition,
    InvalidArgument,
    NumericsMismatch,
    PacelineError,
    ResourceExhausted,
    SessionNotFound,
)
from paceline.lengths.base import LENGTH_MAX
from paceline.models.base import PseudoTokens
from paceline.numerics import check_mismatch
from paceline.rpc.client import open_channel
from paceline.rpc.errors import (
    Cancelled,
    DeadlineExceeded,
    EpochFenced,
    InternalError,
    PrefixDiverged,
    RoundOutOfOrder,
    ServerUnavailable,
    from_rpc_error,
    from_status,
)
from paceline.rpc.gen.paceline.v1 import (
    common_pb2,
    generate_pb2,
    generate_pb2_grpc,
    verify_pb2,
    verify_pb2_grpc,
)
from paceline.rpc.messages import (
    PrefixDigest,
    fill_draft,
    sampling_to_message,
    speculation_to_message,
)
from paceline.tree import is_chain
from paceline.types import (
    EMPTY_DRAFT,
    Acceptance,
    Budget,
    Draft,
    Need,
    Verdict,
    Verification,
)
from paceline.view import SessionView

logger = logging.getLogger(__name__)

Connect = Callable[[str], grpc.Channel]
# A chain after the tokens of a session, which end in guesses.
DraftAhead = Callable[[SessionView, Budget], Draft]

# After these another attempt, there or elsewhere, can help; everything else is the caller's to see.
_TRANSIENT = (
    ServerUnavailable, DeadlineExceeded, Cancelled, InternalError, ResourceExhausted,
    SessionNotFound, PrefixDiverged, RoundOutOfOrder, EpochFenced, NumericsMismatch,
)  # fmt: skip

# Rounds that may be under way while the connection is up, and the chance below which a guess about
# their tokens is not worth drafting on.
MAX_IN_FLIGHT = 8
MIN_CHANCE = 0.03
_ACCEPTANCE_MEMORY = 0.97  # of drafted tokens: about the last 30 count
_TRAVEL_MEMORY = 0.8


class Mode(enum.Enum):
    """How a session gets its tokens from a server. Each gives the same ones."""

    DEVICE = "device"  # drafts are made here and verified there
    SERVER = "server"  # the server drafts as well, and streams
    AR = "ar"  # the server streams without drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """When a server counts as lost, and how to try again. All in seconds.

    A server that owes an answer for ``silence`` is asked whether it is alive, on the same
    connection; it counts as lost when it does not say so within ``probe`` (more on slow links). One
    that is alive may take up to ``stall``. Attempts go around the list of servers, the first time
    without a pause, then with pauses from ``first_backoff`` doubling up to ``max_backoff``, each
    shortened by a random part of up to a half so that clients do not come back all at once. After
    ``give_up`` without an answer of any server the round fails.
    """

    silence: float = 0.5
    probe: float = 0.6
    stall: float = 30.0
    first_backoff: float = 0.05
    max_backoff: float = 1.0
    give_up: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """What the loop has to know about a target that is elsewhere."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...] = ()
    name: str = ""
    default_method: str = ""
    tokenizer: str = ""  # its fingerprint (paceline.tokenizer); empty: not known
    fingerprint: str = ""  # of its numerics (paceline.numerics); empty: not known
    drafts: bool = True  # its default method is one that it can run

    @staticmethod
    def of(model: generate_pb2.Model) -> TargetInfo:
        return TargetInfo(
            vocab_size=model.vocab_size,
            context_length=model.context_length,
            eos_token_ids=tuple(model.eos_token_ids),
            name=model.name,
            default_method=model.default_method,
            tokenizer=model.tokenizer,
            fingerprint=model.fingerprint,
            drafts=model.default_method in model.methods,
        )


@dataclass(slots=True)
class RemoteCounters:
    """Raw counters of all sessions; ratios are derived where they are shown."""

    rounds_sent: int = 0  # Verify frames, repeated and useless ones included
    bytes_up: int = 0  # of Verify frames, serialized
    bytes_down: int = 0  # of their answers
    sent_ahead: int = 0  # rounds that left before the answer to the one before
    ahead_right: int = 0  # those of them whose guess came true
    num_opened: int = 0
    num_resumed: int = 0
    num_failures: int = 0  # streams that broke, fell silent or were refused
    outage_seconds: list[float] = field(default_factory=list)  # noticing a failure to next answer
    travel_seconds: list[float] = field(default_factory=list)  # round trips without server time

    @property
    def median_travel_seconds(self) -> float | None:
        return median(self.travel_seconds) if self.travel_seconds else None


class _Round:
    """A round in flight: what it follows, what it proposes."""

    __slots__ = ("alone", "base", "bonus", "digest", "draft", "number", "sent_at")

    def __init__(self, base: int, digest: PrefixDigest, draft: Draft, bonus: int | None) -> None:
        self.base = base  # number of tokens that the draft follows
        self.digest = digest  # of those tokens
        self.draft = draft
        self.bonus = bonus  # guessed target's token after the draft before; None: nothing guessed
        self.number = 0
        self.sent_at = 0.0
        self.alone = False  # nothing else was under way when it left: its time is the link's own

    @property
    def guess(self) -> list[int]:
        """The tokens that this round adds to the sequence if all guesses are right."""
        return [*([] if self.bonus is None else [self.bonus]), *self.draft.token_ids.tolist()]


class _Alive:
    """Answer to the question whether a silent server is there."""

    def __init__(self, alive: bool) -> None:
        self.alive = alive


_Event = tuple["_Stream", Any]


class _Stream:
    """One gRPC stream on a connection of its own; what comes back goes to an inbox.

    Args:
        request: of a Generate call; None opens a verify session, which takes frames.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        address: str,
        inbox: queue.SimpleQueue[_Event],
        request: generate_pb2.GenerateRequest | None,
    ) -> None:
        self.address = address
        self._channel = channel
        self._inbox = inbox
        self._outbox: queue.SimpleQueue[verify_pb2.VerifyFrame | None] = queue.SimpleQueue()
        self._probing = False
        if request is None:
            stub = verify_pb2_grpc.VerifyServiceStub(channel)
            self._call: Any = stub.Session(iter(self._outbox.get, None))
        else:
            self._call = generate_pb2_grpc.GenerateServiceStub(channel).Generate(request)
        threading.Thread(target=self._read, name="remote-target", daemon=True).start()

    def send(self, frame: verify_pb2.VerifyFrame) -> None:
        self._outbox.put(frame)

    def probe(self, timeout: float) -> None:
        """Ask whether the server is alive; the inbox gets the answer."""
        if self._probing:
            return
        self._probing = True
        check = health_pb2_grpc.HealthStub(self._channel).Check.future(
            health_pb2.HealthCheckRequest(), timeout=timeout
        )
        check.add_done_callback(self._probed)

    def _probed(self, check: Any) -> None:
        lost = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        self._probing = False
        self._inbox.put((self, _Alive(check.code() not in lost)))

    def _read(self) -> None:
        error: Exception
        try:
            for reply in self._call:
                self._inbox.put((self, reply))
            error = ServerUnavailable(f"{self.address}: the stream ended")
        except grpc.RpcError as rpc_error:
            error = from_rpc_error(rpc_error)
        except Exception as unforeseen:
            logger.exception("unforeseen error on the stream to %s", self.address)
            error = InternalError(f"{self.address}: {unforeseen}")
        self._inbox.put((self, error))

    def free(self, request: verify_pb2.CloseRequest) -> None:
        """Close another session without waiting for the answer."""
        verify_pb2_grpc.VerifyServiceStub(self._channel).Close.future(request, timeout=5.0)

    def close(self) -> None:
        """End the stream, which frees the session on the server."""
        self._outbox.put(None)  # ends gRPC's thread that waits for frames
        self._call.cancel()
        self._channel.close()


class _Link:
    """What a session has to do with its server."""

    def __init__(self, session: SessionView, owner: RemoteTarget) -> None:
        self.session = session
        self.mode = owner.first_mode
        self.rounds: deque[_Round] = deque()
        self.went_ahead = False  # the drafter has seen guesses since its last proper draft
        self._owner = owner
        self._digest = PrefixDigest(session.token_ids)
        self._inbox: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._stream: _Stream | None = None
        self._server = owner.preferred
        # What the frames that were sent will be answered with, in order. None: of no interest.
        self._owed: deque[_Round | str | None] = deque()
        self._next_round = 1
        self.epoch = 0
        self._wire_id = ""  # the server's name for the session; empty: nothing to resume
        self._resuming = False
        # Numerics of the server that has the session; empty: it did not say.
        self.fingerprint = ""
        self.numerics_changed = False
        self._allows_other = False  # numerics, for the next attempt
        self._tried: dict[int, PacelineError] = {}  # servers, since the last answer
        # Sessions by server that were not closed in proper form, and may still hold memory there.
        self._left: dict[str, list[verify_pb2.CloseRequest]] = {}
        self._ready = False  # rounds may be sent
        self._heard_at = self._asked_at = self._retry_at = 0.0
        self._failures = 0
        self._failing_since: float | None = None
        self._last_error: PacelineError | None = None
        self._num_known = 0  # rounds in flight whose guess is known to be right
        self._ahead_done = False
        self._accepted, self._drafted = 2.0, 3.0  # recent tokens; a guess to begin with
        self._connect()  # the server reads the prompt while the drafter does

    # --- what the loop asks for -----------------------------------------------------------------

    def submit(self, draft: Draft) -> None:
        """Send a draft, unless the round has been sent ahead of its time."""
        if self.mode is not Mode.DEVICE or self.rounds:
            return
        self.rounds.append(_Round(self.session.length, self._digest.copy(), draft, None))
        self._ahead_done = self.went_ahead = False
        self._send(self.rounds[0])

    def wait(self) -> Verdict:
        """The verdict on the first round in flight; drafts ahead until it is there.

        Raises:
            ServerUnavailable: no server has answered for ``Patience.give_up`` seconds.
            PacelineError: what another attempt would not change.
        """
        while True:
            if self._num_known:
                return self._went_as_guessed()
            now = time.monotonic()
            if self._stream is None and now >= self._retry_at:
                self._give_up_after(now)
                self._connect()
            drafting = self._wants_ahead()
            try:
                if drafting:
                    event = self._inbox.get_nowait()
                else:
                    event = self._inbox.get(timeout=self._next_deadline(now))
            except queue.Empty:
                self._check_silence()
                if drafting:
                    self._draft_ahead()
                continue
            verdict = self._handle(*event)
            if verdict is not None:
                return verdict

    def change(self, mode: Mode) -> None:
        """Get the tokens from now on in another way."""
        if mode is not self.mode:
            self.close()
            self.mode = mode
            self._connect()

    def close(self) -> None:
        """Forget the rounds in flight and free the session on the server."""
        self.rounds.clear()
        self._drop_stream()
        self._wire_id = ""

    @property
    def is_down(self) -> bool:
        """Whether a failure has not been followed by an answer yet."""
        return self._failing_since is not None

    @property
    def guess(self) -> list[int]:
        """The tokens of all rounds in flight, which no target has seen or will all accept."""
        tokens = [token for each in self.rounds for token in each.guess]
        # The first round's guess about the target's own token came true: it is committed.
        return tokens[1:] if self.rounds and self.rounds[0].bonus is not None else tokens

    # --- the connection -------------------------------------------------------------------------

    def _connect(self) -> None:
        """Start a stream; what comes of it arrives in the inbox."""
        owner, session = self._owner, self.session
        address = self._address
        request = None if self.mode is Mode.DEVICE else self._generate_request()
        self._stream = _Stream(owner.connect(address), address, self._inbox, request)
        self._heard_at = self._asked_at = time.monotonic()
        self._owed.clear()
        self._resuming = bool(self._wire_id)
        self._num_known = 0
        self._ready = False
        if request is not None:
            owner.counters.num_opened += 1
            return
        for left in self._left.pop(address, ()):
            self._stream.free(left)
        if self._resuming:
            open_request = verify_pb2.OpenRequest(resume_session_id=self._wire_id)
        else:
            open_request = verify_pb2.OpenRequest(token_ids=session.token_ids)
            open_request.sampling.CopyFrom(self._sampling())
            open_request.speculation.CopyFrom(self._draft_limits())
            self._fence(open_request)
            owner.counters.num_opened += 1
        self._owed.append("open")
        self._stream.send(verify_pb2.VerifyFrame(open=open_request))
        if not self._resuming:
            self._ready = True  # no need to wait for the answer
            self._next_round = 1
            for each in self.rounds:
                each.number = 0
            self._send_all()

    @property
    def _address(self) -> str:
        return self._owner.servers[self._server]

    def _leave(self) -> None:
        """Do not resume the session any more; free it when its server is met again."""
        if self._wire_id:
            left = verify_pb2.CloseRequest(session_id=self._wire_id, epoch=self.epoch)
            self._left.setdefault(self._address, []).append(left)
        self._wire_id = ""

    def _sampling(self) -> common_pb2.SamplingParams:
        """Stop strings stay here, where the whole text is: one may begin before a new session."""
        session = self.session
        return sampling_to_message(
            replace(session.params, stop=(), max_tokens=max(1, session.remaining))
        )

    def _fence(self, request: verify_pb2.OpenRequest | generate_pb2.GenerateRequest) -> None:
        """Say which numerics the tokens so far have, if a server has made some."""
        if self.fingerprint and self.session.length > self.session.prompt_length:
            request.fingerprint = self.fingerprint
            request.numerics_mismatch = "allow" if self._allows_other else "refuse"

    def _met(self, reply: verify_pb2.OpenResult | generate_pb2.GenerateReply) -> None:
        """Note the numerics of a server that has taken the session."""
        self.fingerprint = reply.fingerprint or self.fingerprint
        self.numerics_changed |= reply.numerics_changed

    def _draft_limits(self) -> common_pb2.Speculation:
        config = self.session.config
        depth = max(config.num_speculative_tokens or 0, config[LENGTH_MAX] or 0)
        return speculation_to_message(
            SpeculationConfig(
                method="client",
                num_speculative_tokens=depth,
                node_budget=max(depth, config.node_budget or 0),
            )
        )

    def _generate_request(self) -> generate_pb2.GenerateRequest:
        session = self.session  # stop strings stay here, as those of a verify session
        params = sampling_to_message(replace(session.params, stop=()))
        request = generate_pb2.GenerateRequest(
            sampling=params, committed_token_ids=session.output_ids
        )
        request.token_ids.token_ids.extend(session.token_ids[: session.prompt_length])
        if self.mode is Mode.AR:
            request.speculation.method = "ar"
        self._fence(request)
        return request

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None
        self._ready = False
        self._owed.clear()

    def _fail(self, error: PacelineError, *, silent: bool = False) -> None:
        """Choose where and when to try again.

        Raises:
            PacelineError: ``error``, if another attempt would not change it.
        """
        owner, patience, now = self._owner, self._owner.patience, time.monotonic()
        self._drop_stream()
        if not isinstance(error, _TRANSIENT):
            raise error
        self._last_error = error
        self._failures += 1
        owner.counters.num_failures += 1
        if self._failing_since is None:
            self._failing_since = now
            logger.info("the server at %s is lost: %s", self._address, error)
            if owner.alone_ok and self.rounds:
                owner.on_alone(self.session, self.guess)
        broken = isinstance(error, (ServerUnavailable, DeadlineExceeded, Cancelled, InternalError))
        if isinstance(error, SessionNotFound) and self._resuming:
            self._wire_id = ""  # it is gone; the server itself is there
            self._retry_at = now
            return
        elsewhere = silent and len(owner.servers) > 1
        if self._wire_id and broken and not elsewhere and not self._resuming:
            self._retry_at = now  # it may only have been the connection
            return
        self._leave()
        self._tried[self._server] = error
        self._server = self._next_server()
        extra = self._failures - 1 - len(owner.servers)
        pause = 0.0
        if extra >= 0:
            pause = min(patience.max_backoff, patience.first_backoff * 2 ** min(extra, 20))
            pause *= random.uniform(0.5, 1.0)
            if isinstance(error, ResourceExhausted):
                pause = max(pause, error.retry_after_s)
        self._retry_at = now + pause

    def _next_server(self) -> int:
        """The next of the list, or one with other numerics where they are allowed and none with the
        right ones answers.

        Raises:
            NumericsMismatch: all of them have other numerics.
        """
        owner, after = self._owner, (self._server + 1) % len(self._owner.servers)
        self._allows_other = False
        others = [i for i, e in self._tried.items() if isinstance(e, NumericsMismatch)]
        if not others or len(self._tried) < len(owner.servers):
            return after
        if owner.numerics_mismatch == "allow":
            self._allows_other = True
            return others[0]
        if len(others) == len(owner.servers):
            raise self._tried[others[0]]
        return after

    def _give_up_after(self, now: float) -> None:
        since = self._failing_since
        if since is not None and now - since > self._owner.patience.give_up:
            for error in self._tried.values():
                if isinstance(error, NumericsMismatch):
                    raise error
            raise ServerUnavailable(
                f"no answer from {', '.join(self._owner.servers)} for {now - since:.0f} s; the "
                f"last error: {self._last_error}"
            )

    def _next_deadline(self, now: float) -> float:
        """Seconds until something is to be done without an event."""
        if self._stream is None:
            return max(0.0, self._retry_at - now)
        return max(0.01, self._asked_at + self._owner.patience.silence - now)

    def _check_silence(self) -> None:
        stream, patience, now = self._stream, self._owner.patience, time.monotonic()
        if stream is None:
            return
        if now - self._heard_at > patience.stall:
            self._fail(DeadlineExceeded(f"{stream.address}: no answer for {patience.stall} s"))
        elif now - self._asked_at > patience.silence:
            self._asked_at = now
            travel = self._owner.travel_seconds
            stream.probe(max(patience.probe, 4 * travel) if travel else 1.5 * patience.probe)

    # --- frames ---------------------------------------------------------------------------------

    def _send_all(self) -> None:
        for each in list(self.rounds)[self._num_known :]:
            self._send(each)

    def _send(self, each: _Round) -> None:
        stream, counters = self._stream, self._owner.counters
        if stream is None or not self._ready:
            return  # it leaves when there is a stream
        if not each.number:
            each.number = self._next_round
            self._next_round += 1
        request = verify_pb2.VerifyRequest(
            round=each.number, base_length=each.base, prefix_digest=each.digest.value()
        )
        fill_draft(each.draft, request)
        frame = verify_pb2.VerifyFrame(verify=request)
        counters.rounds_sent += 1
        counters.sent_ahead += each.bonus is not None
        counters.bytes_up += frame.ByteSize()
        each.alone = not any(self._owed)  # refusals of wrong guesses take no time
        if each.alone:
            self._heard_at = self._asked_at = time.monotonic()  # nothing was owed until now
        each.sent_at = time.perf_counter()
        self._owed.append(each)
        stream.send(frame)

    def _handle(self, stream: _Stream, payload: Any) -> Verdict | None:
        if stream is not self._stream:
            return None  # of a connection that was given up
        if isinstance(payload, PacelineError):
            self._fail(payload)
        elif isinstance(payload, _Alive):
            if not payload.alive:
                self._fail(DeadlineExceeded(f"{stream.address} fell silent"), silent=True)
        else:
            self._heard_at = self._asked_at = time.monotonic()
            try:
                if isinstance(payload, generate_pb2.GenerateReply):
                    return self._generated(payload)
                return self._replied(payload)
            except PacelineError as error:
                self._fail(error)
        return None

    def _replied(self, reply: verify_pb2.VerifyReply) -> Verdict | None:
        owed = self._owed.popleft() if self._owed else None
        if owed == "open":
            self._opened(reply.open)
            return None
        self._owner.counters.bytes_down += reply.ByteSize()
        if owed is None:
            return None  # an answer to a round whose guess was wrong
        if reply.HasField("error"):
            self._leave()
            raise from_status(reply.error)
        assert isinstance(owed, _Round)
        return self._verified(owed, reply.verify)

    def _opened(self, result: verify_pb2.OpenResult) -> None:
        self._wire_id, self.epoch = result.session_id, result.epoch
        self._met(result)
        if not self._resuming:
            return
        self._resuming = False
        first, last = self.rounds[0], self.rounds[-1]
        if not first.number:  # it was made while there was no stream
            self._next_round = result.next_round
        elif not first.number <= result.next_round <= max(last.number, first.number) + 1:
            self._leave()
            raise RoundOutOfOrder(
                f"the server goes on at round {result.next_round}, this client at {first.number}",
                result.next_round,
            )
        else:
            # Asking for the server's last round again returns the answer that was lost. Since it
            # took that round, all before it went as guessed.
            self._num_known = max(0, result.next_round - 1 - first.number)
        self._owner.counters.num_resumed += 1
        self._ready = True
        self._send_all()

    def _verified(self, first: _Round, result: verify_pb2.VerifyResult) -> Verdict:
        draft = first.draft
        path = tuple(result.accepted_indices)
        if any(node >= draft.num_nodes for node in path):
            raise PrefixDiverged(f"accepted_indices {path} of {draft.num_nodes} nodes", 0)
        tokens = draft.token_ids[np.asarray(path, np.int64)].tolist()
        next_token = result.next_token if result.HasField("next_token") else None
        if next_token is not None:
            tokens.append(next_token)
        digest = self._digest.copy()
        digest.extend(tokens)
        length = first.base + len(tokens)
        if (result.committed_length, result.digest) != (length, digest.value()):
            raise PrefixDiverged(
                f"after round {result.round} the server has {result.committed_length} tokens "
                f"(digest {result.digest.hex()}), this client {length} ({digest.value().hex()})",
                result.committed_length,
                result.digest,
            )
        if next_token is None:
            self._check_end(tokens, result.finish_reason)
        self._digest = digest
        self._learn(first, len(path), result.timings.total_seconds)
        self._advance(tokens, bool(result.finish_reason))
        return Verdict(
            draft=draft,
            acceptance=Acceptance(path, next_token or 0),
            sent_ahead=first.bonus is not None,
            verify_seconds=result.timings.total_seconds,
            travel_seconds=self._owner.travel_seconds,
            fingerprint=self.fingerprint,
            numerics_changed=self.numerics_changed,
        )

    def _went_as_guessed(self) -> Verdict:
        """The verdict on a round whose answer is lost, and that the server has gone on from."""
        self._num_known -= 1
        first, bonus = self.rounds[0], self.rounds[1].bonus
        assert bonus is not None
        tokens = [*first.draft.token_ids.tolist(), bonus]
        self._digest.extend(tokens)
        self._advance(tokens, False)
        return Verdict(
            draft=first.draft,
            acceptance=Acceptance(tuple(range(first.draft.num_nodes)), bonus),
            sent_ahead=first.bonus is not None,
            travel_seconds=self._owner.travel_seconds,
            fingerprint=self.fingerprint,
            numerics_changed=self.numerics_changed,
        )

    def _check_end(self, tokens: list[int], reason: str) -> None:
        """That the session ends at its last accepted token here as well, and needs no next one."""
        session = self.session
        ends = tokens and (
            session.stops_at(tokens[-1]) or session.length + len(tokens) >= session.max_length
        )
        if not ends:
            raise FailedPrecondition(
                f"the server ended the generation ({reason or 'no reason'}) where this client goes "
                "on: their end-of-sequence tokens differ"
            )

    def _advance(self, tokens: list[int], finished: bool) -> None:
        """Keep the rounds in flight if their guess came true."""
        counters = self._owner.counters
        first = self.rounds.popleft()
        self._back()
        self._ahead_done = False
        if not self.rounds:
            return
        expected = [*first.draft.token_ids.tolist(), self.rounds[0].bonus]
        if tokens == expected and not finished:
            counters.ahead_right += 1
            return
        self.rounds.clear()
        # They will be refused, each in its place, and leave the round number free.
        self._owed = deque(None if isinstance(each, _Round) else each for each in self._owed)
        self._next_round = first.number + 1

    def _back(self) -> None:
        """An answer: the server works."""
        if self._failing_since is not None:
            now = time.monotonic()
            self._owner.counters.outage_seconds.append(now - self._failing_since)
        self._failures, self._failing_since = 0, None
        self._tried.clear()
        self._allows_other = False
        self._owner.preferred = self._server

    def _learn(self, first: _Round, accepted: int, server_seconds: float) -> None:
        owner = self._owner
        tried = min(accepted + 1, first.draft.num_nodes)
        memory = _ACCEPTANCE_MEMORY**tried
        self._accepted = memory * self._accepted + accepted
        self._drafted = memory * self._drafted + tried
        if first.alone and first.sent_at:
            travel = max(0.0, time.perf_counter() - first.sent_at - server_seconds)
            owner.counters.travel_seconds.append(travel)
            old = owner.travel_seconds
            owner.travel_seconds = (
                _TRAVEL_MEMORY * old + (1 - _TRAVEL_MEMORY) * travel if old else travel
            )

    def _generated(self, reply: generate_pb2.GenerateReply) -> Verdict:
        """A round of a server that drafts by itself: its draft is what was accepted of it."""
        tokens, accepted = list(reply.token_ids), reply.num_accepted
        if not tokens or len(tokens) - accepted not in (0, 1):
            raise Cancelled(f"the generation ended on the server ({reply.finish_reason})")
        if len(tokens) == accepted:
            self._check_end(tokens, reply.finish_reason)
        self._digest.extend(tokens)
        self._met(reply)
        self._back()
        return Verdict(
            draft=Draft.chain(tokens[:accepted]),
            acceptance=Acceptance(
                tuple(range(accepted)), tokens[accepted] if len(tokens) > accepted else 0
            ),
            travel_seconds=self._owner.travel_seconds,
            fingerprint=self.fingerprint,
            numerics_changed=self.numerics_changed,
        )

    # --- drafting ahead -------------------------------------------------------------------------

    def _wants_ahead(self) -> bool:
        owner = self._owner
        if owner.draft_ahead is None or self._ahead_done or not self.rounds:
            return False
        if self.session.drafter == "none":
            return False  # the loop has closed it
        if not is_chain(self.rounds[-1].draft.parent_indices):
            return False
        guess = self.guess
        if self.session.remaining - len(guess) < 2:
            return False  # the guessed token and the target's next one
        if self.is_down:
            return owner.alone_ok
        likely = (self._accepted / self._drafted) ** (len(guess) + 1) >= MIN_CHANCE
        return likely and len(self.rounds) < owner.max_in_flight

    def _draft_ahead(self) -> None:
        """Draft the round after the last one in flight on the guess that all of it is accepted."""
        session, draft_ahead = self.session, self._owner.draft_ahead
        assert draft_ahead is not None
        guess = self.guess
        last = session.token_ids[-1] if not guess else guess[-1]
        if guess and session.stops_at(last):
            self._ahead_done = True
            return
        config = session.config
        room = session.remaining - len(guess) - 2
        depth = min(session.depth_ahead, config.node_budget or 0, room)
        committed = session.length
        self.went_ahead = True
        session.token_ids += guess
        try:
            draft = draft_ahead(session, Budget(depth + 1, depth + 1))
        except Exception:  # the next proper propose meets it again, and the loop knows what to do
            logger.exception("a drafter cannot draft ahead")
            draft = EMPTY_DRAFT
        finally:
            del session.token_ids[committed:]
        sound = draft.is_sound(self._owner.vocab_size) and is_chain(draft.parent_indices)
        tokens = draft.token_ids[: depth + 1].tolist() if sound else []
        if not tokens:
            self._ahead_done = True
            return
        ends = [i for i, token in enumerate(tokens) if session.stops_at(token)]
        if ends:
            tokens = tokens[: ends[0] + 1]
            if len(tokens) == 1:  # after a guessed end there is no round
                self._ahead_done = True
                return
        before = self.rounds[-1]
        digest = before.digest.copy()
        digest.extend([*before.draft.token_ids.tolist(), tokens[0]])
        base = before.base + before.draft.num_nodes + 1
        self.rounds.append(_Round(base, digest, Draft.chain(tokens[1:]), tokens[0]))
        self._send(self.rounds[-1])
        if self.is_down:
            self._owner.on_alone(session, self.guess)


class RemoteTarget:
    """A target on a server, for an engine on another machine. Not thread-safe, as its engine.

    Args:
        servers: addresses HOST:PORT; the first is used as long as it works.
        info: of the model that they serve.
        connect: makes a channel to an address; the place for TLS and credentials.
        patience: see there.
        alone_ok: while no server answers, the drafter decodes on alone.
        on_alone: called with a session and its tokens after the committed ones that no target has
            verified, each time that there are more of them.
        numerics_mismatch: where the servers that answer have other numerics than a session's
            tokens: "refuse" ends it with NumericsMismatch, "allow" goes on.
        first_mode: of new sessions.
        max_in_flight: rounds under way at a time; 1 waits for every answer.

    Attributes:
        draft_ahead: None where the drafter cannot.
        counters: of everything that crossed the network.
        travel_seconds: recent round trip without the server's own time; 0.0 until known.
    """

    num_layers = 0
    head_layers = 0.0
    kv_capacity = 2**31  # the server has its own limit, and says so
    provides: frozenset[Need] = frozenset()

    def __init__(
        self,
        servers: Sequence[str],
        info: TargetInfo,
        *,
        connect: Connect = open_channel,
        patience: Patience | None = None,
        alone_ok: bool = False,
        on_alone: Callable[[SessionView, list[int]], None] = lambda session, tokens: None,
        numerics_mismatch: str = "refuse",
        first_mode: Mode = Mode.DEVICE,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        if not servers:
            raise InvalidArgument("servers", servers, "at least one HOST:PORT")
        if max_in_flight < 1:
            raise InvalidArgument("max_in_flight", max_in_flight, "an integer >= 1")
        self.servers = tuple(servers)
        self.info = info
        self.connect = connect
        self.patience = patience or Patience()
        self.alone_ok = alone_ok
        self.on_alone = on_alone
        self.numerics_mismatch = check_mismatch(numerics_mismatch)
        self.first_mode = first_mode
        self.max_in_flight = max_in_flight
        self.draft_ahead: DraftAhead | None = None
        self.counters = RemoteCounters()
        self.travel_seconds = 0.0
        self.preferred = 0  # index of the server that answered last
        self._links: dict[str, _Link] = {}

    @property
    def goes_ahead(self) -> bool:
        """Whether drafts are made and sent while answers travel."""
        return self.draft_ahead is not None and self.max_in_flight > 1

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size

    @property
    def context_length(self) -> int:
        return self.info.context_length

    def open(self, session: SessionView) -> None:
        """Open the session on a server, without waiting for it."""
        self._links[session.session_id] = _Link(session, self)

    def close(self, session: SessionView) -> None:
        """Free the session on its server; one that is not open is ignored."""
        link = self._links.pop(session.session_id, None)
        if link is not None:
            link.close()

    def prefill_left(self, session: SessionView) -> int:
        """0: the server computes prompts by itself."""
        return 0

    def verify(
        self,
        sessions: Sequence[SessionView],
        drafts: Sequence[Draft],
        wants: frozenset[Need] = frozenset(),
        prefill: Sequence[tuple[SessionView, int]] = (),
        pseudo: Sequence[PseudoTokens | None] = (),
    ) -> list[Verification]:
        """Send all drafts, then wait for all verdicts; drafts ahead meanwhile.

        Raises:
            InvalidArgument: ``wants`` is not empty.
            ServerUnavailable: no server answers.
        """
        if wants:
            names = ", ".join(sorted(need.value for need in wants))
            raise InvalidArgument("wants", names, "nothing: the target is on another machine")
        links = [self._links[session.session_id] for session in sessions]
        for link, draft in zip(links, drafts, strict=True):
            link.submit(draft)
        nothing = torch.empty(0, self.vocab_size)
        return [Verification(nothing, verdict=link.wait()) for link in links]

    def commit(self, session: SessionView, path: Sequence[int]) -> None:
        """Nothing to do: the server has committed what its verdict says."""

    def truncate(self, session: SessionView, length: int) -> None:
        """Not possible: open a new session with the tokens that stay."""
        raise FailedPrecondition("a session of a remote target cannot be cut")

    def exit_logits(self, states: torch.Tensor) -> torch.Tensor:
        raise FailedPrecondition("a remote target has no states here")

    # --- beside the loop ------------------------------------------------------------------------

    def sent_ahead(self, session: SessionView) -> Draft | None:
        """The session's next draft, where it has left already."""
        link = self._links[session.session_id]
        return link.rounds[0].draft if link.rounds else None

    def went_ahead(self, session: SessionView) -> bool:
        """Whether the drafter has drafted on guesses since its last proper draft."""
        return self._links[session.session_id].went_ahead

    def mode(self, session: SessionView) -> Mode:
        """How the session gets its tokens."""
        return self._links[session.session_id].mode

    def change_mode(self, session: SessionView, mode: Mode) -> None:
        """Get the session's tokens in another way from its next round on."""
        self._links[session.session_id].change(mode)

    def unverified(self, session: SessionView) -> list[int]:
        """Drafted tokens after the committed ones that no target has answered for yet."""
        link = self._links.get(session.session_id)
        return link.guess if link is not None else []


def get_model(
    servers: Sequence[str], connect: Connect = open_channel, *, timeout: float
) -> generate_pb2.Model:
    """What the first server that answers serves.

    Args:
        timeout: seconds for all attempts together.

    Raises:
        PacelineError: what the last server answered, when none did in time.
    """
    end = time.monotonic() + timeout
    pause, error = 0.05, PacelineError("no server")
    while True:
        for address in servers:
            # A machine that is gone does not answer at all; another one may.
            share = max(0.1, min(end - time.monotonic(), max(2.0, timeout / len(servers))))
            channel = connect(address)
            try:
                stub: Any = generate_pb2_grpc.GenerateServiceStub(channel)
                return stub.GetModel(generate_pb2.GetModelRequest(), timeout=share)  # type: ignore[no-any-return]
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
                if not isinstance(error, _TRANSIENT):
                    raise error from None
                error = ServerUnavailable(f"{address}: {error}")
            finally:
                channel.close()
        pause = min(1.0, 2 * pause)
        if time.monotonic() + pause > end:
            raise error
        time.sleep(pause * random.uniform(0.5, 1.0))
