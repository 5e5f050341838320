"""What a shape is, and the expanding drafter that it drives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from paceline.sampling import (
    Probs,
    Salt,
    gumbel,
    perturbed_argmax,
    process_logits,
    scaled_scores,
)
from paceline.types import Budget, Draft, DraftProbs, FloatArray, IntArray

if TYPE_CHECKING:
    from paceline.session import Session


class Expander(Protocol):
    """An expanding drafter's answer to "what comes after these nodes?", for many sessions."""

    def root(self, sessions: Sequence[Session]) -> torch.Tensor:
        """Logits after the last committed token of each session.  # [num_sessions, vocab]"""
        ...

    def expand(
        self, sessions: Sequence[Session], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> torch.Tensor:
        """Logits after new nodes, all sessions in one forward.  # [total nodes, vocab]

        Args:
            frontiers: for each session the ``(node, token_id, parent)`` triples to expand, in
                order; ``parent`` -1 is the last committed token, others were expanded before.
        """
        ...


class Shape(Protocol):
    """Grows one tree for each session; expands all sessions of a level in one forward.

    A frozen value: sessions with equal shapes grow their trees together.
    """

    def build(
        self, expander: Expander, sessions: Sequence[Session], budgets: Sequence[Budget]
    ) -> list[Draft]: ...


class Level:
    """The drafter's logits for all nodes of a level, of all sessions.

    Args:
        logits: # [num_nodes, vocab]
        count: children that a node will want.
    """

    def __init__(self, logits: torch.Tensor, count: int) -> None:
        self.logits = logits
        self._count = count

    @cached_property
    def best(self) -> list[list[int]]:
        """The ``count`` most likely tokens of each row, in one call for all of them."""
        if self._count == 1:
            return [[token] for token in self.logits.argmax(-1).tolist()]
        return torch.topk(self.logits, min(self._count, self.logits.shape[1])).indices.tolist()


@dataclass(slots=True)
class TreeBuilder:
    """A draft under construction."""

    session: Session
    budget: Budget
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depth_of: list[int] = field(default_factory=list)
    q_rows: list[tuple[IntArray, FloatArray]] = field(default_factory=list)

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from the root down to ``node``; empty for -1."""
        tokens = []
        while node >= 0:
            tokens.append(self.token_ids[node])
            node = self.parents[node]
        return tokens[::-1]

    def add_children(self, node: int, level: Level, row: int, count: int) -> list[int]:
        """Choose up to ``count`` children of ``node`` from a row of the drafter's logits.

        Children are the best ``count`` tokens under the noise that the target will use
        (Gumbel top-k; plain top-k at temperature 0), or, for a rule that needs q, one token
        sampled with independent noise from the ``draft_support`` most likely ones.

        Returns the new nodes; fewer when the node budget is spent.
        """
        count = min(count, self.budget.nodes - len(self.token_ids))
        if count <= 0:
            return []
        session = self.session
        depth = self.depth_of[node] + 1 if node >= 0 else 1
        position = session.length + depth - 1
        params = session.params
        if params.is_plain_argmax and not session.plan.rule.draws.needs_q:
            tokens = level.best[row][:count]
        else:
            history = session.token_ids
            if params.depends_on_history:
                history = history + self.path_tokens(node)
            logits = process_logits(level.logits[row].float().cpu().numpy(), params, history)
            if params.temperature == 0:
                tokens = np.argsort(-logits, kind="stable")[:count].tolist()
                if session.plan.rule.draws.needs_q:
                    self.q_rows += [(np.array([t]), np.ones(1, np.float32)) for t in tokens]
            elif session.plan.rule.draws.needs_q:
                tokens = [self._sample(scaled_scores(logits, params), position)]
            else:
                scores = scaled_scores(logits, params)
                if count == 1:
                    tokens = [perturbed_argmax(scores, params.seed, position)]
                else:
                    total = scores + gumbel(params.seed, position, len(scores))
                    tokens = np.argsort(-total, kind="stable")[:count].tolist()
        first = len(self.token_ids)
        for token in tokens:
            self.token_ids.append(token)
            self.parents.append(node)
            self.depth_of.append(depth)
        return list(range(first, len(self.token_ids)))

    def _sample(self, scores: Probs, position: int) -> int:
        """Draw from the truncated and renormalised q, and remember q for the rule."""
        support = self.session.plan.config.draft_support or len(scores)
        if support < len(scores):
            ids = np.sort(np.argpartition(-scores, support)[:support])
        else:
            ids = np.arange(len(scores))
        ids = ids[np.isfinite(scores[ids])].astype(np.int64)
        weights = np.exp(scores[ids] - scores[ids].max())
        q = (weights / weights.sum()).astype(np.float32)
        q /= q.sum()
        self.q_rows.append((ids, q))
        full = np.full(len(scores), -np.inf)
        with np.errstate(divide="ignore"):
            full[ids] = np.log(q.astype(np.float64))
        return perturbed_argmax(full, self.session.params.seed, position, Salt.DRAFT)

    def draft(self) -> Draft:
        """The finished draft."""
        return Draft(
            np.asarray(self.token_ids, np.int64),
            np.asarray(self.parents, np.int32),
            DraftProbs.stack(self.q_rows) if self.session.plan.rule.draws.needs_q else None,
        )
