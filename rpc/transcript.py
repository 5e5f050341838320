"""The transcript of a verify session, which its client and its server keep alike.

Messages go in and messages come out; nothing here sends, waits or reads a clock. So this file
has the rules of ``verify.proto`` in one place: which round is next, what answers a repeated one,
what a draft has to follow, and what a resume makes of rounds whose answers were lost.

:class:`ServerTranscript` is used by ``rpc/verify_service.py``; :class:`ClientTranscript` by
``rpc/client.py``, one round at a time, and by ``rpc/target_link.py``, with rounds ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.errors import FailedPrecondition, InvalidArgument
from paceline.rpc.errors import EpochFenced, PrefixDiverged, RoundOutOfOrder
from paceline.rpc.gen.paceline.v1 import generate_pb2, verify_pb2
from paceline.rpc.messages import PrefixDigest, fill_draft
from paceline.tree import children
from paceline.types import Draft


class VerifyTranscript:
    """What both ends know of a session.

    Attributes:
        token_ids: the committed tokens, prompt included.
        session_id: the server's name for the session; empty before it is open.
        epoch: 1 for a new session, one more after each resume; 0 before it is open.
        round: the last round: at the server the last one taken, at the client the last one
            answered. 0: none.
        finish_reason: None while the session goes on.
        numerics_changed: tokens that the session was opened with come from other numerics.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)
        self.session_id = ""
        self.epoch = 0
        self.round = 0
        self.finish_reason: str | None = None
        self.numerics_changed = False
        self._digest = PrefixDigest(self.token_ids)

    @property
    def length(self) -> int:
        """Number of committed tokens, prompt included."""
        return len(self.token_ids)

    @property
    def digest(self) -> bytes:
        """Of the committed tokens; 16 bytes."""
        return self._digest.value()

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        self.token_ids.extend(token_ids)
        self._digest.extend(token_ids)

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        del self.token_ids[length:]
        self._digest = PrefixDigest(self.token_ids)


class ServerTranscript(VerifyTranscript):
    """The server's end: takes rounds, and records the answer to the last one.

    Attributes:
        answer: to the last round taken; None: it has none (yet).
        is_pending: the last round taken has been neither answered nor failed.
    """

    def __init__(self, session_id: str, token_ids: Sequence[int]) -> None:
        super().__init__(token_ids)
        self.session_id = session_id
        self.epoch = 1
        self.prompt_length = len(token_ids)
        self.answer: verify_pb2.VerifyResult | None = None
        self.is_pending = False
        self._nodes: Sequence[int] = ()

    def opened(self) -> verify_pb2.OpenResult:
        """The answer to Open, without what the server adds about itself."""
        return verify_pb2.OpenResult(
            session_id=self.session_id,
            epoch=self.epoch,
            committed_length=self.length,
            digest=self.digest,
            next_round=self.round + 1,
            numerics_changed=self.numerics_changed,
        )

    def resume(self) -> None:
        """Begin a new epoch, for a new owner."""
        self.epoch += 1

    def check_epoch(self, epoch: int) -> None:
        """Raise EpochFenced unless ``epoch`` is the session's."""
        if epoch != self.epoch:
            raise EpochFenced(f"epoch {epoch} of this session is over, {self.epoch} has begun")

    def is_repeated(self, number: int) -> bool:
        """Whether a round is the last one once more, to answer with the recorded answer.

        Raises:
            RoundOutOfOrder: it is neither that one nor the next one, or the last one is pending.
        """
        if number == self.round > 0:
            return True
        if number != self.round + 1:
            raise RoundOutOfOrder(
                f"round {number}: expected {self.round + 1}, or {self.round} once more",
                self.round + 1,
            )
        if self.is_pending:
            raise RoundOutOfOrder(
                f"round {number}: round {self.round} has no answer yet", self.round
            )
        return False

    def check_prefix(self, request: verify_pb2.VerifyRequest) -> None:
        """Raise PrefixDiverged unless the draft follows the committed tokens."""
        if request.base_length != self.length:
            raise PrefixDiverged(
                f"base_length {request.base_length}: the server has {self.length} committed tokens",
                self.length,
                self.digest,
            )
        if request.prefix_digest and request.prefix_digest != self.digest:
            raise PrefixDiverged(
                f"prefix_digest {request.prefix_digest.hex()}: the server's {self.length} "
                f"committed tokens have {self.digest.hex()}",
                self.length,
                self.digest,
            )

    def take(self, number: int, nodes: Sequence[int]) -> None:
        """Begin a round.

        Args:
            nodes: index in the client's draft of each node to verify.
        """
        self.round, self._nodes = number, nodes
        self.answer, self.is_pending = None, True

    def answered(
        self, path: Sequence[int], next_token: int | None, timings: verify_pb2.Timings
    ) -> verify_pb2.VerifyResult:
        """Record the answer to the pending round, whose tokens have been committed.

        Args:
            path: accepted nodes, as indices in the verified draft.
            next_token: the target's own token after them; None: the last of them ends the session.
        """
        self.is_pending = False
        self.answer = verify_pb2.VerifyResult(
            round=self.round,
            accepted_indices=[self._nodes[node] for node in path],
            committed_length=self.length,
            digest=self.digest,
            finish_reason=self.finish_reason or "",
            timings=timings,
        )
        if next_token is not None:
            self.answer.next_token = next_token
        return self.answer

    def failed(self) -> None:
        """The pending round gets no answer."""
        self.is_pending = False

    def check_truncate(self, length: int) -> None:
        """Raise InvalidArgument unless ``length`` keeps the prompt and is not beyond the tokens."""
        if not self.prompt_length <= length <= self.length:
            raise InvalidArgument(
                "length", length, f"a length in [{self.prompt_length}, {self.length}]"
            )

    def check_answered(self) -> None:
        """Raise FailedPrecondition while a round is pending."""
        if self.is_pending:
            raise FailedPrecondition(f"round {self.round} has no answer yet")

    def truncated(self, length: int) -> verify_pb2.TruncateResult:
        """Keep the first ``length`` tokens, and answer Truncate."""
        self.cut(length)
        return verify_pb2.TruncateResult(committed_length=self.length, digest=self.digest)


@dataclass(slots=True, eq=False)
class ProposedRound:
    """A round in flight: what it follows, and what it proposes.

    Attributes:
        base: number of tokens that the draft follows.
        digest: of those tokens.
        bonus: guess at the target's own token after the draft before; None: nothing is guessed.
        number: 0 until it is sent.
    """

    base: int
    digest: PrefixDigest
    draft: Draft
    bonus: int | None
    number: int = 0

    @property
    def path(self) -> tuple[int, ...]:
        """The nodes that are guessed to be accepted: of a chain all, of a tree the first ones."""
        following, path = children(self.draft.parent_indices), list[int]()
        while below := following[path[-1] if path else -1]:
            path.append(below[0])
        return tuple(path)

    @property
    def path_ids(self) -> list[int]:
        """The tokens of :attr:`path`."""
        tokens: list[int] = self.draft.token_ids[np.asarray(self.path, np.int64)].tolist()
        return tokens

    @property
    def guess(self) -> list[int]:
        """The tokens that this round adds to the sequence if all guesses are right."""
        return [*([] if self.bonus is None else [self.bonus]), *self.path_ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The verdict on a draft: ``accepted_indices`` are its committed nodes.

    ``token_ids`` are all tokens that the round committed, with ``next_token``, which is None when
    an accepted token ends the generation. The server has measured the seconds.
    """

    round: int
    accepted_indices: tuple[int, ...]
    next_token: int | None
    token_ids: tuple[int, ...]
    finish_reason: str | None
    verify_seconds: float = 0.0
    total_seconds: float = 0.0


class ClientTranscript(VerifyTranscript):
    """The client's end, whose tokens are enough to open the session on another server.

    A client that waits for every answer has one round in flight. One that drafts ahead has more:
    each follows the guess that the target accepts the whole draft before (of a tree, the best
    candidates), and adds the token
    ``bonus``. The client forgets rounds whose guess is wrong, which leaves their numbers free.

    Attributes:
        fingerprint: of the server's numerics, to send when opening the session on another server;
            empty: not known.
        max_nodes, max_depth: of a draft, as the server says.
        rounds: in flight, in order; the last ones may not have left yet.
        num_known: number of rounds, from the first on, that have gone as guessed, although their
            answers are lost.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__(token_ids)
        self.fingerprint = ""
        self.max_nodes = 0
        self.max_depth = 0
        self.rounds: deque[ProposedRound] = deque()
        self.num_known = 0

    @property
    def guess(self) -> list[int]:
        """The drafted and guessed tokens after the committed ones, if all guesses are right."""
        tokens = [token for each in self.rounds for token in each.guess]
        # The first round's guess came true: it is committed.
        return tokens[1:] if self.rounds and self.rounds[0].bonus is not None else tokens

    def reopen(self) -> None:
        """Begin a new session with these tokens; the rounds in flight are to be sent again."""
        self.session_id = ""
        self.round = self.num_known = 0
        for each in self.rounds:
            each.number = 0

    def opened(self, result: verify_pb2.OpenResult) -> int:
        """Apply the answer to Open, of a new or a resumed session.

        The server may have taken rounds whose answers were lost. It repeats the last one's answer
        when that round is sent again. All before it went as guessed (``num_known``), or the server
        would not have taken that one.

        Returns:
            how many such rounds there are.

        Raises:
            RoundOutOfOrder: the server goes on at a round that was never sent.
            PrefixDiverged: its tokens are others.
        """
        self.session_id, self.epoch = result.session_id, result.epoch
        self.max_nodes, self.max_depth = result.max_nodes, result.max_depth
        self.met(result)
        num_lost = result.next_round - 1 - self.round
        if not 0 <= num_lost <= sum(each.number > 0 for each in self.rounds):
            raise RoundOutOfOrder(
                f"the server goes on at round {result.next_round}, this client at {self.round + 1}",
                result.next_round,
            )
        if not num_lost:
            self._check(result, self.length, self.digest)
        self.num_known = max(0, num_lost - 1)
        return num_lost

    def met(self, reply: verify_pb2.OpenResult | generate_pb2.GenerateReply) -> None:
        """Note the numerics of a server that has taken the session."""
        self.fingerprint = reply.fingerprint or self.fingerprint
        self.numerics_changed |= reply.numerics_changed

    def propose(self, draft: Draft, bonus: int | None = None) -> ProposedRound:
        """Add a round after the last one in flight, whose guess ends in ``bonus``.

        Without ``bonus`` the round follows the committed tokens, and replaces all rounds in flight.
        """
        if bonus is None:
            self.rounds.clear()
            base, digest = self.length, self._digest.copy()
        else:
            before = self.rounds[-1]
            drafted, digest = before.path_ids, before.digest.copy()
            base = before.base + len(drafted) + 1
            digest.extend([*drafted, bonus])
        self.rounds.append(ProposedRound(base, digest, draft, bonus))
        return self.rounds[-1]

    def request(self, proposed: ProposedRound) -> verify_pb2.VerifyRequest:
        """The message that proposes a round in flight."""
        if not proposed.number:
            proposed.number = self.round + 1 + self.rounds.index(proposed)
        message = verify_pb2.VerifyRequest(
            round=proposed.number,
            base_length=proposed.base,
            prefix_digest=proposed.digest.value(),
        )
        fill_draft(proposed.draft, message)
        return message

    def verified(self, result: verify_pb2.VerifyResult) -> Verified:
        """Apply the answer to the first round in flight.

        Raises:
            PrefixDiverged: it does not fit the draft, or leaves the server with other tokens;
                nothing is applied.
        """
        draft = self.rounds[0].draft
        path = tuple(result.accepted_indices)
        if any(node >= draft.num_nodes for node in path):
            raise PrefixDiverged(f"accepted_indices {path} of {draft.num_nodes} nodes", 0)
        next_token = result.next_token if result.HasField("next_token") else None
        tokens = draft.token_ids[np.asarray(path, np.int64)].tolist()
        if next_token is not None:
            tokens.append(next_token)
        digest = self._digest.copy()
        digest.extend(tokens)
        self._check(result, self.length + len(tokens), digest.value())
        return self._committed(
            Verified(
                round=result.round,
                accepted_indices=path,
                next_token=next_token,
                token_ids=tuple(tokens),
                finish_reason=result.finish_reason or None,
                verify_seconds=result.timings.verify_seconds,
                total_seconds=result.timings.total_seconds,
            )
        )

    def went_as_guessed(self) -> Verified:
        """Apply the lost answer to the first round in flight, one of the ``num_known``."""
        self.num_known -= 1
        first, bonus = self.rounds[0], self.rounds[1].bonus
        assert bonus is not None
        return self._committed(
            Verified(
                round=first.number,
                accepted_indices=first.path,
                next_token=bonus,
                token_ids=(*first.path_ids, bonus),
                finish_reason=None,
            )
        )

    def truncated(self, result: verify_pb2.TruncateResult) -> None:
        """Apply the answer to Truncate.

        Raises:
            PrefixDiverged: the tokens that are left are not the server's.
        """
        self.rounds.clear()
        self.cut(result.committed_length)
        self._check(result, self.length, self.digest)

    def _committed(self, verified: Verified) -> Verified:
        first = self.rounds.popleft()
        self.commit(verified.token_ids)
        self.round = first.number
        self.finish_reason = verified.finish_reason
        if self.rounds:
            guess = (*first.path_ids, self.rounds[0].bonus)
            if verified.token_ids != guess or verified.finish_reason:
                self.rounds.clear()
        return verified

    def _check(
        self,
        result: verify_pb2.OpenResult | verify_pb2.VerifyResult | verify_pb2.TruncateResult,
        length: int,
        digest: bytes,
    ) -> None:
        if (result.committed_length, result.digest) != (length, digest):
            raise PrefixDiverged(
                f"the server has {result.committed_length} committed tokens (digest "
                f"{result.digest.hex()}), this client {length} ({digest.hex()}): open a new "
                "session",
                result.committed_length,
                result.digest,
            )
