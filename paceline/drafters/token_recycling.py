"""Token Recycling: a matrix with the target's latest best successors of every token.

Luo et al. 2024 (arXiv 2408.08696): each verified node, accepted or not, writes the ``width`` most
likely tokens of its logits into the row of its token; the next tree is read from those rows. The
matrix belongs to the engine, so what one request taught it serves the next.

Where the target shows its tokens and no logits, a row holds the latest successors that its token
had in prompts and outputs, the last one first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from paceline.drafters.base import Drafter, grow
from paceline.shapes.base import SparseRows
from paceline.types import Budget, Draft, Need, Outcome

if TYPE_CHECKING:
    from paceline.view import SessionView

UNKNOWN = -1
MAX_UNREAD = 32  # rows of logits that wait to be written


class TokenRecycling(Drafter):
    """Expands a node into the tokens that the target last found most likely after its token.

    The matrix holds ids in order of rank and no scores. Where a shape or the noise of a sampled
    request needs scores, each rank has the mean distance to the best logit that was observed for
    it, for all tokens alike. A read of the matrix writes all waiting logits at once: rounds without
    a draft cost next to nothing.

    Args:
        vocab_size: of the target.
        width: successors for each token.
    """

    needs = frozenset({Need.TREE_LOGITS})

    def __init__(self, vocab_size: int, width: int = 8) -> None:
        self._matrix = np.full((vocab_size, width), UNKNOWN, np.int32)
        self._unread: list[torch.Tensor] = []
        self._unread_tokens: list[int] = []  # one for each row of these
        self._rank_logits: npt.NDArray[np.float64] = np.zeros(width)
        self._num_observed = 0
        # tokens read so far of sessions that come without logits
        self._num_read: dict[str, int] = {}

    def open(self, session: SessionView) -> None:
        """The matrix belongs to all sessions."""

    def close(self, session: SessionView) -> None:
        self._num_read.pop(session.session_id, None)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        return grow(self, sessions, budgets)

    def root(self, sessions: Sequence[SessionView]) -> SparseRows:
        return self._rows([session.token_ids[-1] for session in sessions])

    def expand(
        self, sessions: Sequence[SessionView], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> SparseRows:
        return self._rows([token for frontier in frontiers for _, token, _ in frontier])

    @property
    def matrix(self) -> npt.NDArray[np.int32]:
        """Successors by rank, -1 where unknown.  # int32[vocab_size, width]"""
        self._write()
        return self._matrix

    def _rows(self, token_ids: list[int]) -> SparseRows:
        ids = self.matrix[token_ids].astype(np.int64)
        # Ranks with equal means must stay in order.
        scores = self._rank_logits - 1e-4 * np.arange(len(self._rank_logits))
        return SparseRows(ids, np.broadcast_to(scores.astype(np.float32), ids.shape))

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        for session, outcome in zip(sessions, outcomes, strict=True):
            if not outcome.verification.logits.numel():
                self._read_tokens(session)
                continue
            self._unread_tokens.append(session.token_ids[-len(outcome.token_ids) - 1])
            self._unread_tokens += outcome.draft.token_ids.tolist()
            self._unread.append(outcome.verification.logits)
        if len(self._unread_tokens) >= MAX_UNREAD:
            self._write()

    def _read_tokens(self, session: SessionView) -> None:
        """Each token goes to the front of the row of the one before it."""
        start = self._num_read.get(session.session_id, 1)
        for token, follower in pairwise(session.token_ids[start - 1 :]):
            row = self._matrix[token]
            if row[0] != follower:
                place = np.flatnonzero(row == follower)
                last = int(place[0]) if len(place) else len(row) - 1
                row[1 : last + 1] = row[:last].copy()
                row[0] = follower
        self._num_read[session.session_id] = session.length

    def _write(self) -> None:
        """Write the row of every node; of several nodes with one token the last one counts."""
        if not self._unread:
            return
        tokens, logits = self._unread_tokens, torch.cat(self._unread)
        self._unread, self._unread_tokens = [], []
        width = min(self._matrix.shape[1], logits.shape[1])
        top = torch.topk(logits, width)
        ids: npt.NDArray[np.int64] = top.indices.cpu().numpy()
        values: npt.NDArray[np.float32] = top.values.float().cpu().numpy()
        # Logits of -inf are no successors (padding of the vocabulary).
        self._matrix[tokens, :width] = np.where(np.isfinite(values), ids, UNKNOWN)
        distances = np.maximum(values - values[:, :1], -30.0).mean(0)
        self._num_observed += len(tokens)
        share = len(tokens) / self._num_observed
        self._rank_logits[:width] += share * (distances - self._rank_logits[:width])
