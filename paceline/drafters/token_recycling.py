"""Token Recycling: a matrix with the target's latest best successors of every token.

Luo et al. 2024 (arXiv 2408.08696): each verified node, accepted or not, writes the ``width`` most
likely tokens of its logits into the row of its token; the next tree is read from those rows. The
matrix belongs to the engine, so what one request taught it serves the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from paceline.drafters.base import grow
from paceline.shapes.base import SparseRows
from paceline.types import Budget, Draft, Need, Outcome

if TYPE_CHECKING:
    from paceline.session import Session

UNKNOWN = -1


class TokenRecycling:
    """Expands a node into the tokens that the target last found most likely after its token.

    The matrix holds ids in order of rank and no scores. Where a shape or the noise of a sampled
    request needs scores, each rank has the mean distance to the best logit that was observed for
    it, for all tokens alike.

    Args:
        vocab_size: of the target.
        width: successors for each token.

    Attributes:
        matrix: successors by rank, -1 where unknown.  # int32[vocab_size, width]
    """

    needs = frozenset({Need.TREE_LOGITS})

    def __init__(self, vocab_size: int, width: int = 8) -> None:
        self.matrix = np.full((vocab_size, width), UNKNOWN, np.int32)
        self._rank_logits: npt.NDArray[np.float64] = np.zeros(width)
        self._num_observed = 0

    def open(self, session: Session) -> None:
        """Nothing is kept for a session."""

    def close(self, session: Session) -> None:
        """Nothing is kept for a session."""

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        return grow(self, sessions, budgets)

    def root(self, sessions: Sequence[Session]) -> SparseRows:
        return self._rows([session.token_ids[-1] for session in sessions])

    def expand(
        self, sessions: Sequence[Session], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> SparseRows:
        return self._rows([token for frontier in frontiers for _, token, _ in frontier])

    def _rows(self, token_ids: list[int]) -> SparseRows:
        ids = self.matrix[token_ids].astype(np.int64)
        # Ranks with equal means must stay in order.
        scores = self._rank_logits - 1e-4 * np.arange(len(self._rank_logits))
        return SparseRows(ids, np.broadcast_to(scores.astype(np.float32), ids.shape))

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        """Write the row of every node; of several nodes with one token the last one counts."""
        tokens: list[int] = []
        for session, outcome in zip(sessions, outcomes, strict=True):
            tokens.append(session.token_ids[-len(outcome.token_ids) - 1])
            tokens += outcome.draft.token_ids.tolist()
        logits = torch.cat([outcome.verification.logits for outcome in outcomes])
        width = min(self.matrix.shape[1], logits.shape[1])
        top = torch.topk(logits, width)
        ids: npt.NDArray[np.int64] = top.indices.cpu().numpy()
        values: npt.NDArray[np.float32] = top.values.float().cpu().numpy()
        # Logits of -inf are no successors (padding of the vocabulary).
        self.matrix[tokens, :width] = np.where(np.isfinite(values), ids, UNKNOWN)
        distances = np.maximum(values - values[:, :1], -30.0).mean(0)
        self._num_observed += len(tokens)
        share = len(tokens) / self._num_observed
        self._rank_logits[:width] += share * (distances - self._rank_logits[:width])
