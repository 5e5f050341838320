"""Where a target rejected a draft model's tokens, kept so that the draft model can learn from it.

Online Speculative Decoding (Liu et al. 2023, arXiv 2310.07177): a rejected token shows where the
draft model is wrong, and verification has computed the target's distribution at that place already.
A draft model with tokens of its own (OmniDraft, Ramakrishnan et al. 2025, arXiv 2507.02659) learns
from whole drafts, told in its own tokens. :mod:`paceline.train.online` trains on what is kept here.
None of this changes a token.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.drafters.omnidraft import Translator
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

    @property
    def text(self) -> IntArray:
        """The tokens that the draft model reads to learn from this.  # [at least 1]"""
        return self.token_ids


@dataclass(frozen=True, slots=True, eq=False)
class JudgedDraft(RejectedPosition):
    """A draft in a draft model's own tokens, as far as the target has judged it.

    All token ids are the draft model's. ``token_ids`` is the context behind the accepted part, and
    ``top_ids`` are tokens that stand for one target token alone, with the target's probabilities.

    Attributes:
        num_accepted: tokens at the end of the context that spell the accepted part.
        spelling: tokens that spell the target's token in place of the rejected one; empty: nothing
            was rejected.  # [n]
    """

    num_accepted: int
    spelling: IntArray

    @property
    def text(self) -> IntArray:
        return np.concatenate([self.token_ids, self.spelling[:-1]])

    def judged(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the judged tokens were drafted from, and whether each was accepted.

        A token that several draft tokens spell counts by the first of them.

        Args:
            place: of the context's last token in a row.

        Returns:
            Places, and 1 or 0 for each.  # int64 [n], float32 [n]
        """
        places = torch.arange(place - self.num_accepted, place + (len(self.spelling) > 0))
        return places, (places < place).float()


def packed_rows(
    rejections: Sequence[RejectedPosition],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The contexts as rows, of which rejections of one session share one.

    Returns:
        Token ids, filled up at the right  # int64 [num_rows, longest]
        The row of each rejection, and its place there: that of its last token.  # int64 [n]
    """
    texts: list[IntArray] = []
    shared: dict[tuple[str, int], list[int]] = {}  # rows by session and start
    rows = [0] * len(rejections)
    for i in sorted(range(len(rejections)), key=lambda i: -len(rejections[i].text)):
        each, text = rejections[i], rejections[i].text
        candidates = shared.setdefault((each.session_id, each.start), [])
        # Draft models with tokens of their own may cut a longer text otherwise.
        found = next((r for r in candidates if np.array_equal(texts[r][: len(text)], text)), None)
        if found is None:
            found = len(texts)
            candidates.append(found)
            texts.append(text)
        rows[i] = found
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.from_numpy(text)
    places = torch.tensor([len(each.token_ids) - 1 for each in rejections])
    return ids, torch.tensor(rows), places


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
        translator: of a draft model with tokens of its own (method ``omnidraft``): each draft of it
            is then recorded as a :class:`JudgedDraft`. None: ``draft_model`` drafts.

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
        translator: Translator | None = None,
    ) -> None:
        self._limit, self._records, self._vocab_size = limit, records, vocab_size
        self._translator = translator
        self._drafter = "draft_model" if translator is None else "omnidraft"
        self._top_k, self._half = top_k, max(1, window // 2)
        self._waiting: deque[RejectedPosition] = deque()
        self.num_dropped = self.num_judged = self.num_accepted = 0

    def __call__(self, event: RoundEvent) -> None:
        outcome, session = event.outcome, event.session
        if outcome is None or not outcome.draft.num_nodes or drafted_by(session) != self._drafter:
            return
        self.num_accepted += outcome.num_accepted
        row = rejected_row(outcome)
        self.num_judged += outcome.num_accepted + (row is not None)
        # A target on another machine sends no logits.
        if not self._records(session) or not len(outcome.verification.logits):
            return
        if row is None and self._translator is None:
            return
        if len(self._waiting) >= self._limit:
            self.num_dropped += 1
            return
        logits = None if row is None else outcome.verification.logits[row].float()
        length = session.length
        if len(outcome.token_ids) > outcome.num_accepted:
            length -= 1  # the last token is the target's own, in place of the rejected
        start = max(0, length // self._half - 1) * self._half
        if self._translator is None:
            assert logits is not None  # see above
            context = np.asarray(session.token_ids[start:length], np.int64)
            top = self._top(logits[: self._vocab_size], logits)
            self._waiting.append(
                RejectedPosition(session.session_id, start, context, *top, time.time())
            )
            return
        judged = self._judged(self._translator, session, outcome, start, length, logits)
        if judged is not None:
            self._waiting.append(judged)

    def _top(self, known: torch.Tensor, logits: torch.Tensor) -> tuple[IntArray, FloatArray]:
        """The highest of some logits: their places among these, and their probabilities."""
        values, places = known.topk(min(self._top_k, len(known)))
        return places.cpu().numpy(), (values - logits.logsumexp(0)).exp().cpu().numpy()

    def _judged(
        self,
        translator: Translator,
        session: Session,
        outcome: Outcome,
        start: int,
        length: int,
        logits: torch.Tensor | None,
    ) -> JudgedDraft | None:
        """What became of a draft in the draft model's tokens; None: they cannot spell the text.

        Args:
            start, length: the context begins and ends there, in the target's tokens.
            logits: of the target at the rejected position; None: nothing was rejected.
        """
        drafted_from = length - outcome.num_accepted
        before = translator.read(session.token_ids[start:drafted_from])
        context = translator.read(session.token_ids[start:length])
        # A draft goes on from `before`; the accepted text may be cut into other tokens with it.
        if not before or context[: len(before)] != before:
            return None
        spelling: list[int] = []
        tokens, probs = np.empty(0, np.int64), np.empty(0, np.float32)
        if logits is not None:
            spelling = translator.spell(session.token_ids[length:])
            if not spelling:
                return None
        if logits is not None and len(spelling) == 1:
            mapped = np.flatnonzero(translator.alone >= 0)
            alone = torch.from_numpy(translator.alone[mapped]).to(logits.device)
            places, probs = self._top(logits[alone], logits)
            tokens = mapped[places]
        return JudgedDraft(
            session.session_id, start, np.asarray(context, np.int64), tokens, probs, time.time(),
            len(context) - len(before), np.asarray(spelling, np.int64),
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
