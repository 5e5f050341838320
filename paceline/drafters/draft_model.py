"""An independent draft model with its own KV cache, expanded by any shape.

Leviathan, Kalman, Matias 2022 (arXiv 2211.17192); trees of drafts as in SpecInfer, Miao et al.
2023 (arXiv 2305.09781).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from paceline.models.base import KVSequence, ModelRunner, Segment
from paceline.types import EMPTY_DRAFT, Budget, Draft, Need, Outcome

if TYPE_CHECKING:
    from paceline.session import Session
    from paceline.shapes.base import Shape

PREFILL_CHUNK = 512


class _State:
    """What the draft model remembers of a session."""

    __slots__ = ("entry_of_node", "num_catch_up", "sequence")

    def __init__(self, sequence: KVSequence) -> None:
        self.sequence = sequence
        self.num_catch_up = 0  # pending entries that hold committed tokens
        self.entry_of_node: dict[int, int] = {}  # draft node -> pending entry


class DraftModel:
    """Expands nodes with a small model that shares the target's tokenizer.

    Args:
        vocab_size: of the target, where it differs: models of one family often pad the same
            vocabulary to different sizes.
    """

    needs: frozenset[Need] = frozenset()

    def __init__(self, runner: ModelRunner, vocab_size: int | None = None) -> None:
        self.runner = runner
        self.vocab_size = vocab_size or runner.vocab_size
        self._padding = self.vocab_size - runner.vocab_size
        self._states: dict[str, _State] = {}

    def open(self, session: Session) -> None:
        self._states[session.session_id] = _State(self.runner.new_sequence())

    def close(self, session: Session) -> None:
        state = self._states.pop(session.session_id, None)
        if state is not None:
            self.runner.free(state.sequence)

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(sessions)
        # Sessions of one step may use different shapes; each shape grows all of its trees at once.
        by_shape: dict[Shape, list[int]] = {}
        for i, (session, budget) in enumerate(zip(sessions, budgets, strict=True)):
            # Its context may be shorter than the target's.
            if session.length + budget.depth <= self.runner.context_length:
                assert session.plan.shape is not None  # every row with this drafter has one
                by_shape.setdefault(session.plan.shape, []).append(i)
        for shape, members in by_shape.items():
            grown = shape.build(self, [sessions[i] for i in members], [budgets[i] for i in members])
            for i, draft in zip(members, grown, strict=True):
                drafts[i] = draft
        return drafts

    def root(self, sessions: Sequence[Session]) -> torch.Tensor:
        """Catch up with the committed tokens; logits after the last.  # [num_sessions, vocab]"""
        segments = []
        for session in sessions:
            state = self._states[session.session_id]
            self._drop_pending(state)
            behind = session.token_ids[state.sequence.length :]
            while len(behind) > PREFILL_CHUNK:
                chunk = np.asarray(behind[:PREFILL_CHUNK], np.int64)
                self.runner.forward([Segment(state.sequence, chunk, logits="none")])
                self.runner.commit(state.sequence, range(PREFILL_CHUNK))
                behind = behind[PREFILL_CHUNK:]
            state.num_catch_up = len(behind)
            segments.append(Segment(state.sequence, np.asarray(behind, np.int64), logits="last"))
        return self._logits(segments)

    def expand(
        self, sessions: Sequence[Session], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> torch.Tensor:
        segments = []
        for session, frontier in zip(sessions, frontiers, strict=True):
            state = self._states[session.session_id]
            parents = []
            for node, _, parent in frontier:
                root_entry = state.num_catch_up - 1
                parents.append(state.entry_of_node[parent] if parent >= 0 else root_entry)
                state.entry_of_node[node] = state.num_catch_up + len(state.entry_of_node)
            tokens = np.asarray([token for _, token, _ in frontier], np.int64)
            segments.append(Segment(state.sequence, tokens, np.asarray(parents, np.int32)))
        return self._logits(segments)

    def _logits(self, segments: Sequence[Segment]) -> torch.Tensor:
        logits = self.runner.forward(segments).logits
        # A negative padding cuts.
        return F.pad(logits, (0, self._padding), value=-torch.inf) if self._padding else logits

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        """Keep the KV entries of accepted nodes that were expanded; the rest is caught up later."""
        for session, outcome in zip(sessions, outcomes, strict=True):
            state = self._states.get(session.session_id)
            if state is None or not state.num_catch_up:
                continue
            kept = list(range(state.num_catch_up))
            for node in outcome.path[: outcome.num_accepted]:
                entry = state.entry_of_node.get(node)
                if entry is None:
                    break
                kept.append(entry)
            self._commit(state, kept)

    def _drop_pending(self, state: _State) -> None:
        """Without an outcome (a frame was lost, a draft is asked for again) drafted entries go.

        So does the last committed token's: its logits are wanted once more.
        """
        if state.sequence.num_pending:
            self._commit(state, list(range(state.num_catch_up - 1)))

    def _commit(self, state: _State, kept: list[int]) -> None:
        self.runner.commit(state.sequence, kept)
        state.num_catch_up = 0
        state.entry_of_node.clear()
