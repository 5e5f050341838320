"""Drafts of guesses that the target made beside the last verification.

Parallel prompt decoding (arXiv 2405.18628) and hidden transfer (arXiv 2404.12022): pseudo tokens
behind the nodes of a draft guess what comes after them, so that drafting and verifying are one
forward. A round starts with the guesses behind the last accepted node, as many as it had pseudo
tokens, and has the tree that is best for that number (:mod:`paceline.shapes.dynamic_sparse`).
``node_budget`` counts nodes and pseudo tokens together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.drafters.base import Drafter
from paceline.models.base import PseudoTokens
from paceline.models.heads.base import Head, State
from paceline.models.heads.pseudo import PseudoHead
from paceline.shapes.dynamic_sparse import Path, SparseTree, best_trees
from paceline.shapes.template import Template
from paceline.types import EMPTY_DRAFT, Budget, Draft, Need, Outcome

if TYPE_CHECKING:
    from paceline.view import SessionView


class _Round:
    """A session's draft in this round, and the guesses at the start of the round."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.guesses: torch.Tensor | None = None  # [num_guesses, vocab_size]
        self.tree = SparseTree((), {})
        self.counts: list[int] = []  # pseudo tokens of the last committed token and each node


class PseudoTokenDrafter(Drafter):
    """Drafts trees of the last guesses, and has new guesses computed along with them."""

    needs = frozenset({Need.SHARED_MODEL})

    def __init__(self, head: Head) -> None:
        assert isinstance(head, PseudoHead)
        self._head = head
        self._accuracy = tuple(tuple(row) for row in head.accuracy.tolist())
        self._rounds: dict[str, _Round] = {}

    def open(self, session: SessionView) -> None:
        self._rounds[session.session_id] = _Round(self._head.new_state())

    def close(self, session: SessionView) -> None:
        self._rounds.pop(session.session_id, None)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(sessions)
        by_tree: dict[tuple[Path, ...], list[int]] = {}
        for i, (session, budget) in enumerate(zip(sessions, budgets, strict=True)):
            turn = self._rounds[session.session_id]
            turn.tree = self._tree(turn, budget)
            if turn.tree.paths:
                by_tree.setdefault(turn.tree.paths, []).append(i)
        for paths, members in by_tree.items():
            chosen, limits = [sessions[i] for i in members], [budgets[i] for i in members]
            for i, draft in zip(members, Template(paths).build(self, chosen, limits), strict=True):
                # Guesses are point masses: no q, whatever they were drawn from.
                drafts[i] = Draft(draft.token_ids, draft.parent_indices)
        return drafts

    def _tree(self, turn: _Round, budget: Budget) -> SparseTree:
        depth = min(budget.depth, len(self._accuracy))
        if depth <= 0 or budget.nodes <= 0:
            return SparseTree((), {})
        known = 0 if turn.guesses is None else len(turn.guesses)
        return best_trees(self._accuracy[:depth], budget.nodes)[min(known, depth)]

    def root(self, sessions: Sequence[SessionView]) -> torch.Tensor:
        states, features = [], []
        for session in sessions:
            turn = self._rounds[session.session_id]
            assert turn.guesses is not None
            states.append(turn.state)
            features.append(turn.guesses)
        return self._head.root(states, features, [session.token_ids[-1:] for session in sessions])

    def expand(
        self, sessions: Sequence[SessionView], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> torch.Tensor:
        states = [self._rounds[session.session_id].state for session in sessions]
        return self._head.expand(states, frontiers)

    def pseudo_tokens(self, session: SessionView, draft: Draft) -> PseudoTokens | None:
        """The pseudo tokens of the tree: chains behind the nodes of the draft."""
        turn = self._rounds[session.session_id]
        num_rows = draft.num_nodes + 1
        paths = node_paths(draft)
        turn.counts = []
        owners: list[int] = []
        index: list[int] = []
        parents: list[int] = []
        for row, path in enumerate(paths):
            # A guess beyond the session's end is useless, and may have no KV slot.
            room = session.max_length - session.length - len(path)
            count = max(0, min(turn.tree.pseudo.get(path, 0), room))
            turn.counts.append(count)
            for i in range(count):
                parents.append(row if i == 0 else num_rows + len(parents) - 1)
                owners.append(row)
                index.append(i)
        if not parents:
            return None
        head = self._head
        rows, distances = torch.tensor(owners), torch.tensor(index)

        @torch.no_grad()
        def inputs(stream: torch.Tensor) -> torch.Tensor:
            return head.inputs(stream, rows.to(stream.device), distances.to(stream.device))

        return PseudoTokens(np.asarray(parents, np.int32), head.first_layer, inputs)

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        """Keep the guesses behind the last accepted node."""
        for session, outcome in zip(sessions, outcomes, strict=True):
            turn = self._rounds.get(session.session_id)
            if turn is None:
                continue
            turn.guesses = None
            logits = outcome.verification.pseudo_logits
            if logits is not None:
                path = outcome.path[: len(outcome.token_ids) - 1]
                row = path[-1] + 1 if path else 0
                first = sum(turn.counts[:row])
                # A copy: the other rows of the forward are not kept alive.
                turn.guesses = logits[first : first + turn.counts[row]].clone()


def node_paths(draft: Draft) -> list[Path]:
    """Ranks from the root down to the last committed token, ``()``, and to each node.

    A node's rank is its place among its siblings.
    """
    paths: list[Path] = [()]
    num_children = [0] * (draft.num_nodes + 1)
    for parent in (draft.parent_indices + 1).tolist():
        paths.append((*paths[parent], num_children[parent]))
        num_children[parent] += 1
    return paths
