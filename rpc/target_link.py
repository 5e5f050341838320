"""A session of a remote target and its server: frames, replies, verdicts."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import grpc

from paceline.config import SpeculationConfig
from paceline.errors import FailedPrecondition, PacelineError
from paceline.lengths.base import LENGTH_MAX
from paceline.rpc.ahead import AheadOptions, RoundsAhead
from paceline.rpc.direct import DirectPath
from paceline.rpc.errors import (
    Cancelled,
    DeadlineExceeded,
    PrefixDiverged,
    RoundOutOfOrder,
    from_status,
)
from paceline.rpc.gen.paceline.v1 import generate_pb2, verify_pb2
from paceline.rpc.ladder import Mode
from paceline.rpc.messages import sampling_to_message, speculation_to_message
from paceline.rpc.reconnect import Reconnect, RemoteCounters, Retry, Silence, TargetServers
from paceline.rpc.states import StatesInbox
from paceline.rpc.target_stream import Alive, Event, LeftSessions, Reply, TargetStream
from paceline.rpc.transcript import ClientTranscript, ProposedRound, Verified
from paceline.types import Acceptance, Draft, Verdict
from paceline.view import SessionView


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """A round that has left.

    Attributes:
        at: when (``time.perf_counter``).
        alone: nothing else was under way: its time is the connection's own.
    """

    round: ProposedRound
    at: float
    alone: bool


class _Open:
    """Stands for the answer to Open."""


class TargetLink:
    """What a session has to do with its server.

    Args:
        servers: shared with the other sessions of the target.
        ahead: likewise.
        mode: how the session gets its tokens to begin with.
        direct: the session's way past the gateway.
        states: takes the states that its drafter reads; None: it reads none.
    """

    def __init__(
        self,
        session: SessionView,
        servers: TargetServers,
        ahead: AheadOptions,
        mode: Mode,
        direct: DirectPath,
        states: StatesInbox | None = None,
    ) -> None:
        self.session, self.states = session, states
        self.mode = mode
        self.transcript = ClientTranscript(session.token_ids)
        self.ahead = RoundsAhead(session, self.transcript, ahead)
        self._servers = servers
        self._options = ahead
        self._reconnect = Reconnect(servers)
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stream: TargetStream | None = None
        self._direct = direct
        # The answers that the server owes, in order. None: the refusal of a wrong guess.
        self._owed: deque[_Sent | _Open | None] = deque()
        self._resuming = False
        self._left = LeftSessions()
        self._ready = False  # rounds may be sent
        self._silence = Silence(servers)
        self._connect()  # the server reads the prompt while the drafter does

    # --- for the loop -----------------------------------------------------------------

    def submit(self, draft: Draft) -> None:
        """Send a draft, unless the round has been sent ahead of its time."""
        if self._ready and self.mode is Mode.DEVICE:
            channel = self._direct.poll(self.session.remaining)
            if channel is not None:
                self._connect(channel)
        if self.mode is Mode.DEVICE and not self.transcript.rounds:
            self.ahead.proper_draft()
            self._send(self.transcript.propose(draft))

    def wait(self) -> Verdict:
        """The verdict on the first round in flight; drafts ahead until it is there.

        Raises:
            ServerUnavailable: no server has answered for ``Patience.give_up`` seconds.
            PacelineError: what another attempt would not change.
        """
        while True:
            if self.transcript.num_known:  # the server has gone on from rounds with lost answers
                return self._committed(self.transcript.rounds[0], self.transcript.went_as_guessed())
            now = time.monotonic()
            if self._stream is None and now >= self._reconnect.retry_at:
                self._reconnect.check_patience()
                self._connect()
            draft = self.ahead.next_step(self._reconnect.is_down, self._draft_ahead)
            try:
                if draft is not None:
                    event = self._inbox.get_nowait()
                else:
                    event = self._inbox.get(timeout=self._next_deadline(now))
            except queue.Empty:
                self._check_silence()
                if draft is not None:
                    draft()
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
        self.transcript.rounds.clear()
        self.transcript.session_id = ""
        self._direct.close()
        self._drop_stream()

    # --- the connection -------------------------------------------------------------------------

    def _connect(self, channel: grpc.Channel | None = None) -> None:
        """Start a stream; what comes of it arrives in the inbox.

        Args:
            channel: to the session's target; None connects to its server.
        """
        address, transcript = self._reconnect.address, self.transcript
        request = None
        if self.mode is not Mode.DEVICE:
            request = generate_request(self.session, self.mode)
            fence(request, self.session, self.transcript, self._reconnect.allows_other)
        channel = channel or self._servers.connect(address)
        self._stream = TargetStream(channel, address, self._inbox, request, self._stream)
        self._silence.heard()
        self._owed.clear()
        self._resuming = bool(transcript.session_id)
        self._ready = False
        transcript.num_known = 0
        self._servers.counters.num_opened += not self._resuming
        if request is not None:
            return
        self._left.free(self._stream)
        opening = open_request(self.session, transcript, self._reconnect.allows_other, self.states)
        self._owed.append(_Open())
        self._stream.send(verify_pb2.VerifyFrame(open=opening))
        if not self._resuming:
            self._send_all()  # no need to wait for the answer

    def _leave(self, address: str) -> None:
        """Give the session up; free it at the next connection to its server."""
        self._left.add(address, self.transcript.session_id, self.transcript.epoch)
        self.transcript.session_id = ""

    def _drop_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream, self._ready = None, False
        self._owed.clear()

    def _fail(self, error: PacelineError, *, silent: bool = False) -> None:
        """Drop the stream, and choose where and when to try again.

        Raises:
            PacelineError: ``error``, if another attempt would not change it.
        """
        if self._direct.is_active:  # the gateway can resume the session
            self._direct.failed(error)
            self._connect()
            return
        self._drop_stream()
        transcript, reconnect, options = self.transcript, self._reconnect, self._options
        address, was_down = reconnect.address, reconnect.is_down
        retry = reconnect.failed(
            error, is_open=bool(transcript.session_id), resuming=self._resuming, silent=silent
        )
        if not was_down and options.alone_ok and transcript.rounds:
            options.on_alone(self.session, transcript.guess)
        if retry is Retry.REOPEN:
            transcript.session_id = ""
        elif retry is Retry.MOVE:
            self._leave(address)

    def _next_deadline(self, now: float) -> float:
        """Seconds until something is to be done without an event."""
        if self._stream is None:
            return max(0.0, self._reconnect.retry_at - now)
        return self._silence.seconds_left(now)

    def _check_silence(self) -> None:
        if self._stream is None:
            return
        try:
            timeout = self._silence.probe_timeout(self._stream.address)
        except DeadlineExceeded as stalled:
            self._fail(stalled)
            return
        if timeout is not None:
            self._stream.probe(timeout)

    # --- frames ---------------------------------------------------------------------------------

    def _send_all(self) -> None:
        self._ready = True
        for each in list(self.transcript.rounds)[self.transcript.num_known :]:
            self._send(each)

    def _send(self, each: ProposedRound) -> None:
        stream, counters = self._stream, self._servers.counters
        if stream is None or not self._ready:
            return  # it leaves when there is a stream
        request = asking_for_states(self.transcript.request(each), self.states)
        frame = verify_pb2.VerifyFrame(verify=request, ticket=self._direct.ticket())
        counters.rounds_sent += 1
        counters.sent_ahead += each.bonus is not None
        counters.bytes_up += frame.ByteSize()
        alone = not any(self._owed)  # refusals of wrong guesses take no time
        if alone:
            self._silence.heard()  # nothing was owed until now
        self._owed.append(_Sent(each, time.perf_counter(), alone))
        stream.send(frame)

    def _draft_ahead(self) -> None:
        drafted = self.ahead.draft()
        if drafted is not None:
            bonus, draft = drafted
            self._send(self.transcript.propose(draft, bonus))
            if self._reconnect.is_down:
                self._options.on_alone(self.session, self.transcript.guess)

    def _handle(
        self, stream: TargetStream, payload: Reply | Alive | PacelineError
    ) -> Verdict | None:
        if stream is not self._stream:
            return None  # of a connection that was given up
        if isinstance(payload, PacelineError):
            self._fail(payload)
        elif isinstance(payload, Alive):
            if not payload.alive:
                self._fail(DeadlineExceeded(f"{stream.address} fell silent"), silent=True)
        else:
            self._silence.heard()
            try:
                if isinstance(payload, generate_pb2.GenerateReply):
                    return self._generated(payload)
                return self._replied(payload)
            except PacelineError as error:
                self._fail(error)
        return None

    def _replied(self, reply: verify_pb2.VerifyReply) -> Verdict | None:
        owed = self._owed.popleft() if self._owed else None
        if isinstance(owed, _Open):
            self._opened(reply.open)
            return None
        self._servers.counters.bytes_down += reply.ByteSize()
        if owed is None:
            return None  # an answer to a round whose guess was wrong
        if reply.HasField("error") and not self._direct.is_active:
            self._leave(self._reconnect.address)
        if reply.HasField("error"):
            raise from_status(reply.error)
        return self._verified(owed, reply.verify)

    def _opened(self, result: verify_pb2.OpenResult) -> None:
        try:
            self.transcript.opened(result)
        except (RoundOutOfOrder, PrefixDiverged):
            self._leave(self._reconnect.address)
            raise
        if self._stream is not None:
            self._stream.has_session()
        self._direct.opened(self._reconnect.address, result.session_id, result.direct)
        if self._resuming:
            self._resuming = False
            self._servers.counters.num_resumed += 1
            self._send_all()

    # --- verdicts -------------------------------------------------------------------------------

    def _verified(self, sent: _Sent, result: verify_pb2.VerifyResult) -> Verdict:
        verified = self.transcript.verified(result)
        take_states(result, self.states, self.transcript.length, self._servers.counters)
        if verified.next_token is None:
            check_end(self.session, verified.token_ids, result.finish_reason)
        self._direct.answered(len(verified.token_ids))
        self.ahead.answered(sent.round.draft, len(verified.accepted_indices))
        if sent.alone:
            self._servers.travelled(time.perf_counter() - sent.at - verified.total_seconds)
        return self._committed(sent.round, verified)

    def _committed(self, first: ProposedRound, verified: Verified) -> Verdict:
        if self.transcript.rounds:
            self._servers.counters.ahead_right += 1
        else:  # a wrong guess: the rounds behind it will be refused, each in its place
            self._owed = deque(None if isinstance(each, _Sent) else each for each in self._owed)
        self.ahead.advanced()
        acceptance = Acceptance(verified.accepted_indices, verified.next_token or 0)
        return replace(
            self._verdict(first.draft, acceptance),
            sent_ahead=first.bonus is not None,
            verify_seconds=verified.total_seconds,
        )

    def _generated(self, reply: generate_pb2.GenerateReply) -> Verdict:
        """A round of a server that drafts by itself: its draft is what was accepted of it."""
        tokens, accepted = list(reply.token_ids), reply.num_accepted
        if not tokens or len(tokens) - accepted not in (0, 1):
            raise Cancelled(f"the generation ended on the server ({reply.finish_reason})")
        if len(tokens) == accepted:
            check_end(self.session, tokens, reply.finish_reason)
        self.transcript.commit(tokens)
        self.transcript.met(reply)
        next_token = tokens[accepted] if len(tokens) > accepted else 0
        acceptance = Acceptance(tuple(range(accepted)), next_token)
        return self._verdict(Draft.chain(tokens[:accepted]), acceptance)

    def _verdict(self, draft: Draft, acceptance: Acceptance) -> Verdict:
        self._reconnect.answered()
        return Verdict(
            draft=draft,
            acceptance=acceptance,
            travel_seconds=self._servers.travel_seconds,
            fingerprint=self.transcript.fingerprint,
            numerics_changed=self.transcript.numerics_changed,
        )


def check_end(session: SessionView, token_ids: Sequence[int], reason: str) -> None:
    """Raise FailedPrecondition unless a session that its server ended ends here as well.

    Args:
        token_ids: the last round's accepted tokens; none is needed after them.
        reason: the server's.
    """
    ends = token_ids and (
        session.stops_at(token_ids[-1]) or session.length + len(token_ids) >= session.max_length
    )
    if not ends:
        raise FailedPrecondition(
            f"the server ended the generation ({reason or 'no reason'}) where this client goes on: "
            "their end-of-sequence tokens differ"
        )


def fence(
    request: verify_pb2.OpenRequest | generate_pb2.GenerateRequest,
    session: SessionView,
    transcript: ClientTranscript,
    allows_other: bool,
) -> None:
    """Say which numerics the tokens so far have, if a server has made some."""
    if transcript.fingerprint and session.length > session.prompt_length:
        request.fingerprint = transcript.fingerprint
        request.numerics_mismatch = "allow" if allows_other else "refuse"


# Stop strings stay here, where the whole text is: one may begin before a new session.


def open_request(
    session: SessionView,
    transcript: ClientTranscript,
    allows_other: bool,
    states: StatesInbox | None = None,
) -> verify_pb2.OpenRequest:
    """Resumes the session, or opens one that goes on after its committed tokens."""
    if transcript.session_id:
        return verify_pb2.OpenRequest(resume_session_id=transcript.session_id)
    transcript.reopen()
    left = max(0, session.params.min_tokens - len(session.output_ids))
    params = replace(
        session.params, stop=(), max_tokens=max(1, session.remaining),
        min_tokens=min(left, max(1, session.remaining)),
    )  # fmt: skip
    config = session.config
    depth = max(config.num_speculative_tokens or 0, config[LENGTH_MAX] or 0)
    limits = SpeculationConfig(
        method="client",
        num_speculative_tokens=depth,
        node_budget=max(depth, config.node_budget or 0),
    )
    request = verify_pb2.OpenRequest(
        token_ids=session.token_ids,
        sampling=sampling_to_message(params),
        speculation=speculation_to_message(limits),
        adapter=session.adapter,
    )
    if states is not None:
        request.states.CopyFrom(states.layout)
    fence(request, session, transcript, allows_other)
    return request


def asking_for_states(
    request: verify_pb2.VerifyRequest, states: StatesInbox | None
) -> verify_pb2.VerifyRequest:
    """A request that asks for the states that its session's drafter lacks, if it reads some."""
    if states is not None:
        request.states_from = states.end
    return request


def take_states(
    result: verify_pb2.VerifyResult,
    states: StatesInbox | None,
    length: int,
    counters: RemoteCounters,
) -> None:
    """Take an answer's states for a session of ``length`` tokens, and count their bytes.

    Raises:
        InvalidArgument: they are not what was asked for.
    """
    if states is not None and result.HasField("states"):
        states.take(result.states, length)
        counters.states_bytes += result.states.ByteSize()


def generate_request(session: SessionView, mode: Mode) -> generate_pb2.GenerateRequest:
    """Generates after the session's committed tokens, with the server's own drafts or with none."""
    request = generate_pb2.GenerateRequest(
        sampling=sampling_to_message(replace(session.params, stop=())),
        committed_token_ids=session.output_ids,
        adapter=session.adapter,
    )
    request.token_ids.token_ids.extend(session.token_ids[: session.prompt_length])
    if mode is Mode.AR:
        request.speculation.method = "ar"
    return request
