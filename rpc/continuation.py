"""A generation that goes on elsewhere when its server is lost.

Committed tokens are all that a server knows of a generation, and the reader of its stream has them.
So the reader asks the next server for what comes after them. Coupled sampling makes that the same
where numerics are the same: the request names the last server's fingerprint.
"""

from __future__ import annotations

import time

from paceline.errors import NumericsMismatch, PacelineError, ResourceExhausted
from paceline.rpc.errors import Cancelled, ServerUnavailable
from paceline.rpc.gen.paceline.v1 import generate_pb2


class Continuation:
    """What a generation has so far, and what to ask the next server for.

    Args:
        request: a serialized GenerateRequest.
        timeout_s: for the whole generation; None: no limit.
        fingerprint: as in the request.

    Attributes:
        num_tries: servers asked since the last token came.
        fingerprint: of the server that committed the last token; empty: not known.
        finished: the last reply has come: nothing is left to ask for.
    """

    def __init__(
        self, request: bytes, timeout_s: float | None = None, *, fingerprint: str = ""
    ) -> None:
        self._request = request
        self._started = time.monotonic()
        self._deadline = None if timeout_s is None else self._started + timeout_s
        self._tokens: list[int] = []
        self.fingerprint = fingerprint
        self.finished = False
        self._rounds = 0
        self._first_token_s = 0.0
        self._lost_at: float | None = None  # after the last token
        self.num_tries = 1  # since the last token
        # What came before this try.
        self._base_tokens = self._base_rounds = 0
        self._base_s = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens that have come."""
        return len(self._tokens)

    @property
    def is_silent(self) -> bool:
        """Whether the server asked last has sent no token."""
        return len(self._tokens) == self._base_tokens

    @property
    def timeout_s(self) -> float | None:
        """What is left of the time."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def add(self, reply: generate_pb2.GenerateReply) -> bool:
        """Note a reply, and make its counts those of the whole generation.

        In a last reply's statistics, the counts of drafts stay those of the last server.

        Returns:
            whether this changed the reply.
        """
        now = time.monotonic() - self._started
        self.fingerprint = reply.fingerprint or self.fingerprint
        self.finished = bool(reply.finish_reason)
        if reply.token_ids:
            self._first_token_s = self._first_token_s or now
            self._tokens += reply.token_ids
            self.num_tries, self._lost_at = 1, None
        if not self._base_tokens:
            self._rounds = max(self._rounds, reply.round)
            return False
        if reply.round:
            reply.round += self._base_rounds
            self._rounds = reply.round
        if reply.HasField("draft"):
            reply.draft.seconds += self._base_s
        if reply.HasField("statistics"):
            statistics = reply.statistics
            statistics.num_tokens += self._base_tokens
            statistics.num_rounds += self._base_rounds
            statistics.num_target_forwards += self._base_rounds  # one a round
            statistics.first_token_seconds = self._first_token_s
            statistics.total_seconds = now
        return True

    def may_go_on(self, error: PacelineError, patience_s: float) -> bool:
        """Whether to ask again, here or elsewhere.

        Args:
            error: what ended the last try. The first server may be full: then the generation fails.
                After the loss of a server a full one, or one with other numerics, only means a wait
                for another one.
            patience_s: seconds after the loss of a server in which to look for another one.
        """
        now = time.monotonic()
        lost = isinstance(error, (ServerUnavailable, Cancelled))
        busy = isinstance(error, ResourceExhausted) and error.retry_after_s > 0
        other = isinstance(error, NumericsMismatch)
        if self._lost_at is None and lost:
            self._lost_at = now
        if (
            self._lost_at is None
            or not (lost or busy or other)
            or now - self._lost_at >= patience_s
        ):
            return False
        return self._deadline is None or now < self._deadline

    def next_request(self, *, was_asked: bool = True) -> bytes:
        """The request for what is still to come, serialized.

        Args:
            was_asked: whether the last server had the request.
        """
        self.num_tries += was_asked
        self._base_tokens, self._base_rounds = len(self._tokens), self._rounds
        self._base_s = time.monotonic() - self._started
        if not self._tokens:
            return self._request
        request = generate_pb2.GenerateRequest.FromString(self._request)
        request.committed_token_ids.extend(self._tokens)
        request.fingerprint = self.fingerprint
        return request.SerializeToString()
