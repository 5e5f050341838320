"""Where a target rejected a draft model's tokens, kept so that the draft model can learn from it.

Online Speculative Decoding (Liu et al. 2023, arXiv 2310.07177): a rejected token shows where the
draft model is wrong, and verification has computed the target's distribution at that place already.
:mod:`paceline.train.online` trains on what is kept here. None of this changes a token.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from paceline.engine.events import RoundEvent
from paceline.errors import InvalidArgument
from paceline.lengths.auto import Auto
from paceline.session import Session
from paceline.types import FloatArray, IntArray, Outcome

TOP_K = 32
"""Tokens of the target's distribution that are kept; all others together count as one event."""
WINDOW = 512
"""Most tokens of context that are kept before a rejected position."""


@dataclass(frozen=True, slots=True, eq=False)
class RejectedPosition:
    """A position at which the target rejected the drafted token.

    Attributes:
        session_id: of the session; those of a session with equal ``start`` share their context.
        start: position of the first kept token of the context.
        token_ids: the context, without the token that was rejected.  # [1 to WINDOW]
        top_ids: the target's most likely tokens there, the most likely first.  # [k]
        top_probs: their probabilities, without temperature.  # [k]
        at: seconds since the epoch.
    """

    session_id: str
    start: int
    token_ids: IntArray
    top_ids: IntArray
    top_probs: FloatArray
    at: float


def rejected_row(outcome: Outcome) -> int | None:
    """The row of the verification's logits at the rejected position; None: nothing was rejected.

    A position is rejected if the draft had tokens for it and the walk of the acceptance rule ended
    before them. The tokens behind it were never judged.
    """
    path = outcome.path
    if len(outcome.token_ids) <= len(path):  # an accepted token ended the generation
        return None
    node = path[-1] if path else -1
    return node + 1 if bool((outcome.draft.parent_indices == node).any()) else None


def drafted_by(session: Session) -> str:
    """Name of the drafter of a session's last round; "" if method ``auto`` drafted nothing."""
    controller = session.length_controller
    return (controller.drafter or "") if isinstance(controller, Auto) else session.drafter


class RejectionRecorder:
    """Watches an engine (:attr:`paceline.engine.events.EventDelivery.watchers`) for rejections.

    It runs on the engine's thread; :meth:`take` may run on another one.

    Args:
        limit: most rejections that wait for :meth:`take`; further ones are dropped and counted.
        records: whether a session may be recorded. The default: those whose request allows it.
        top_k, window: see :data:`TOP_K` and :data:`WINDOW`.
        vocab_size: of the draft model, if it may be smaller than the target's; tokens that it does
            not have are among the others.

    Attributes:
        num_dropped: rejections that found no room.
        num_judged, num_accepted: tokens of the draft model that were accepted or rejected, of all
            sessions; those behind a rejected one were not judged.
    """

    def __init__(
        self,
        limit: int,
        *,
        records: Callable[[Session], bool] = lambda session: session.teaches_drafter,
        top_k: int = TOP_K,
        window: int = WINDOW,
        vocab_size: int | None = None,
    ) -> None:
        self._limit, self._records, self._vocab_size = limit, records, vocab_size
        self._top_k, self._half = top_k, max(1, window // 2)
        self._waiting: deque[RejectedPosition] = deque()
        self.num_dropped = self.num_judged = self.num_accepted = 0

    def __call__(self, event: RoundEvent) -> None:
        outcome, session = event.outcome, event.session
        if outcome is None or not outcome.draft.num_nodes or drafted_by(session) != "draft_model":
            return
        self.num_accepted += outcome.num_accepted
        row = rejected_row(outcome)
        self.num_judged += outcome.num_accepted + (row is not None)
        # A target on another machine sends no logits.
        if row is None or not self._records(session) or not len(outcome.verification.logits):
            return
        if len(self._waiting) >= self._limit:
            self.num_dropped += 1
            return
        logits = outcome.verification.logits[row].float()
        known = logits[: self._vocab_size]
        values, ids = known.topk(min(self._top_k, len(known)))
        probs = (values - logits.logsumexp(0)).exp()
        length = session.length - 1  # the last token is the target's own, in place of the rejected
        start = max(0, length // self._half - 1) * self._half
        context = np.asarray(session.token_ids[start:length], np.int64)
        self._waiting.append(
            RejectedPosition(
                session.session_id, start, context, ids.cpu().numpy(), probs.cpu().numpy(),
                time.time(),
            )
        )  # fmt: skip

    def take(self) -> list[RejectedPosition]:
        """What has been recorded since the last call, oldest first."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]


class RejectionBuffer:
    """The bounded buffer between serving and training.

    An update takes ``update_interval`` rejections that none before it had, and up to ``batch``
    further ones that are still kept.

    Args:
        update_interval: new rejections of an update.
        batch: rejections of an update; None: ``update_interval``, so that each is used once and
            forgotten, as in the paper.
        positions: most rejections that are kept; the oldest go first.
        seconds: how long one is kept at most.

    Attributes:
        num_dropped: rejections that no update has had, because they were too many or too old.

    Raises:
        InvalidArgument: a number does not fit the others.
    """

    def __init__(
        self,
        update_interval: int,
        batch: int | None = None,
        *,
        positions: int = 4096,
        seconds: float = 3600.0,
        seed: int = 0,
    ) -> None:
        batch = update_interval if batch is None else batch
        if update_interval < 1:
            raise InvalidArgument("update_interval", update_interval, "at least 1")
        if batch < update_interval:
            raise InvalidArgument("batch", batch, f"at least update_interval, {update_interval}")
        if positions < batch:
            raise InvalidArgument("positions", positions, f"at least batch, {batch}")
        self.update_interval, self._batch = update_interval, batch
        self._positions, self._seconds = positions, seconds
        self._new: deque[RejectedPosition] = deque()
        self._used: deque[RejectedPosition] = deque()
        self._random = random.Random(seed)
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._new) + len(self._used)

    @property
    def due(self) -> bool:
        """Whether there are enough new rejections for an update."""
        return len(self._new) >= self.update_interval

    def add(self, rejections: Iterable[RejectedPosition]) -> None:
        """Take rejections, and forget those that may be kept no longer."""
        self._new.extend(rejections)
        self.expire()

    def expire(self, now: float | None = None) -> None:
        """Forget what is too old (``now``: seconds since the epoch) or too much."""
        oldest = (time.time() if now is None else now) - self._seconds
        while self._used and (len(self) > self._positions or self._used[0].at < oldest):
            self._used.popleft()
        while self._new and (len(self) > self._positions or self._new[0].at < oldest):
            self._new.popleft()
            self.num_dropped += 1

    def take(self) -> list[RejectedPosition]:
        """The rejections of an update that is :attr:`due`."""
        new = [self._new.popleft() for _ in range(self.update_interval)]
        more = self._batch - self.update_interval
        again = self._random.sample(list(self._used), min(more, len(self._used)))
        if more:
            self._used.extend(new)
        return new + again
