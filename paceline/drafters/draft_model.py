"""An independent draft model with its own KV cache, expanded by any shape.

Leviathan, Kalman, Matias 2022 (arXiv 2211.17192); trees of drafts as in SpecInfer, Miao et al.
2023 (arXiv 2305.09781).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.drafters.base import Drafter, greedy_chain_depth, padded, stop_below
from paceline.models.base import KVSequence, ModelRunner, Segment
from paceline.models.llama import LlamaRunner
from paceline.types import EMPTY_DRAFT, Budget, Draft, Need, Outcome

if TYPE_CHECKING:
    from paceline.shapes.base import Shape
    from paceline.view import SessionView, TokensView

PREFILL_CHUNK = 512
_HIDDEN = frozenset({Need.HIDDEN_STATES})


class _State:
    """The draft model's state for a session."""

    __slots__ = (
        "entry_of_node", "first_like", "num_catch_up", "paths", "pending_ids", "sequence",
        "token_ids",
    )  # fmt: skip

    def __init__(self, sequence: KVSequence) -> None:
        self.sequence = sequence
        self.token_ids: list[int] = []  # of the committed KV entries
        self.pending_ids: list[int] = []  # of the pending ones
        self.num_catch_up = 0  # pending entries that hold committed tokens
        self.entry_of_node: dict[int, int] = {}  # expanded node -> pending entry
        # Accepted tokens are found by their path: a draft may number or merge nodes differently.
        self.paths: dict[tuple[int, int], int] = {}  # (first node like the parent, token) -> node
        self.first_like: dict[int, int] = {-1: -1}  # node -> the first one with the same path


class DraftModel(Drafter):
    """Expands nodes with a small model that shares the target's tokenizer.

    Args:
        vocab_size: of the target, where it differs: models of one family often pad the same
            vocabulary to different sizes.

    Attributes:
        last_hidden: hidden states of the last answer, a row for each of its rows, if a length
            controller of its sessions reads them. # [rows, hidden_size]
    """

    rewinds = True
    shadows = True

    def __init__(self, runner: ModelRunner, vocab_size: int | None = None) -> None:
        self.runner = runner
        self.vocab_size = vocab_size or runner.vocab_size
        self._padding = self.vocab_size - runner.vocab_size
        self._states: dict[str, _State] = {}
        self.last_hidden: torch.Tensor | None = None

    def fit_vocabulary(self, vocab_size: int) -> None:
        """Set the width of the logits to the target's, if unknown when the model was built."""
        self.vocab_size = vocab_size
        self._padding = vocab_size - self.runner.vocab_size

    def open(self, session: SessionView) -> None:
        self._states[session.session_id] = _State(self.runner.new_sequence())

    def close(self, session: SessionView) -> None:
        state = self._states.pop(session.session_id, None)
        if state is not None:
            self.runner.free(state.sequence)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(sessions)
        # Sessions of one step may use different shapes; each shape grows all of its trees at once.
        by_shape: dict[Shape, list[int]] = {}
        for i, (session, budget) in enumerate(zip(sessions, budgets, strict=True)):
            # Its context may be shorter than the target's.
            fits = session.length + budget.depth <= self.runner.context_length
            if fits and min(budget.depth, budget.nodes) > 0:
                assert session.shape is not None  # every method with this drafter has one
                by_shape.setdefault(session.shape, []).append(i)
        for shape, members in by_shape.items():
            chosen, limits = [sessions[i] for i in members], [budgets[i] for i in members]
            grown = self._greedy_chains(chosen, limits) or shape.build(self, chosen, limits)
            for i, draft in zip(members, grown, strict=True):
                drafts[i] = draft
        return drafts

    def _greedy_chains(
        self, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[Draft] | None:
        """Argmax chains from one call of the model; None if it cannot make them."""
        runner, depth = self.runner, greedy_chain_depth(sessions, budgets, stops=True)
        if not (
            isinstance(runner, LlamaRunner) and runner.drafts_chains and not self._padding and depth
        ):
            return None
        if any(session.length + depth > runner.context_length for session in sessions):
            return None
        behind = self._catch_up(sessions)
        states = [self._states[session.session_id] for session in sessions]
        tokens = runner.greedy_chain(
            [state.sequence for state in states], behind, depth,
            stop_below=stop_below(sessions, depth),
        )  # fmt: skip
        drafts = []
        for state, chain, budget in zip(states, tokens.T, budgets, strict=True):
            chain = chain[chain >= 0]
            expanded = chain[:-1].tolist()
            state.pending_ids += expanded
            state.entry_of_node = {node: state.num_catch_up + node for node in range(len(expanded))}
            state.paths = {(node - 1, token): node for node, token in enumerate(expanded)}
            drafts.append(Draft.chain(chain[: min(budget.depth, budget.nodes)]))
        return drafts

    def root(self, sessions: Sequence[TokensView]) -> torch.Tensor:
        """Catch up with the committed tokens; logits after the last.  # [num_sessions, vocab]"""
        segments = [
            Segment(
                self._states[session.session_id].sequence, np.asarray(tokens, np.int64),
                logits="last",
            )
            for session, tokens in zip(sessions, self._catch_up(sessions), strict=True)
        ]  # fmt: skip
        return self._logits(sessions, segments)

    def _catch_up(self, sessions: Sequence[TokensView]) -> list[list[int]]:
        """Forget what was not committed and read long prompts, chunk by chunk.

        Returns:
            The committed tokens that each sequence still lacks, the last one among them.
        """
        lacking = []
        for session in sessions:
            state = self._states[session.session_id]
            self._drop_pending(state)
            self._rewind(state, session.token_ids)
            behind = session.token_ids[state.sequence.length :]
            while len(behind) > PREFILL_CHUNK:
                chunk = np.asarray(behind[:PREFILL_CHUNK], np.int64)
                self.runner.forward([Segment(state.sequence, chunk, logits="none")])
                self.runner.commit(state.sequence, range(PREFILL_CHUNK))
                state.token_ids += behind[:PREFILL_CHUNK]
                behind = behind[PREFILL_CHUNK:]
            state.num_catch_up, state.pending_ids = len(behind), list(behind)
            lacking.append(behind)
        return lacking

    def expand(
        self, sessions: Sequence[TokensView], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> torch.Tensor:
        segments = []
        for session, frontier in zip(sessions, frontiers, strict=True):
            state = self._states[session.session_id]
            parents = []
            for node, token, parent in frontier:
                step = (state.first_like[parent], token)
                state.first_like[node] = state.paths.setdefault(step, node)
                root_entry = state.num_catch_up - 1
                parents.append(state.entry_of_node[parent] if parent >= 0 else root_entry)
                state.entry_of_node[node] = state.num_catch_up + len(state.entry_of_node)
            state.pending_ids += [token for _, token, _ in frontier]
            tokens = np.asarray([token for _, token, _ in frontier], np.int64)
            segments.append(Segment(state.sequence, tokens, np.asarray(parents, np.int32)))
        return self._logits(sessions, segments)

    def _logits(self, sessions: Sequence[TokensView], segments: Sequence[Segment]) -> torch.Tensor:
        rules = (session.stop_rule for session in sessions)
        wanted = any(rule is not None and rule.wants_hidden for rule in rules)
        result = self.runner.forward(segments, _HIDDEN if wanted else frozenset())
        self.last_hidden = result.beside_logits(Need.HIDDEN_STATES)
        logits = result.logits
        # A negative padding cuts.
        return padded(logits, self._padding)

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        """Keep the KV entries of accepted, expanded nodes; later calls compute the missing ones."""
        for session, outcome in zip(sessions, outcomes, strict=True):
            state = self._states.get(session.session_id)
            if state is None or not state.num_catch_up:
                continue
            kept = list(range(state.num_catch_up))
            node = -1
            for token in outcome.token_ids[: outcome.num_accepted]:
                expanded = state.paths.get((node, token))
                if expanded is None:
                    break
                node = expanded
                kept.append(state.entry_of_node[node])
            self._commit(state, kept)

    def _drop_pending(self, state: _State) -> None:
        """Drop drafted entries without an outcome (a frame was lost, a draft is requested again).

        Drops the last committed token's entry too: the next draft needs its logits again.
        """
        if state.sequence.num_pending:
            self._commit(state, list(range(state.num_catch_up - 1)))

    def _rewind(self, state: _State, token_ids: list[int]) -> None:
        """Forget entries from the first one on whose token is not (or no longer) the session's."""
        held = state.token_ids
        # Never keep the last token: the next draft needs its logits.
        usable = min(len(held), len(token_ids) - 1)
        if held[:usable] != token_ids[:usable]:
            usable = next(i for i in range(usable) if held[i] != token_ids[i])
        if usable < len(held):
            self.runner.truncate(state.sequence, usable)
            del held[usable:]

    def _commit(self, state: _State, kept: list[int]) -> None:
        self.runner.commit(state.sequence, kept)
        state.token_ids += [state.pending_ids[entry] for entry in kept]
        state.pending_ids = []
        state.num_catch_up = 0
        state.entry_of_node.clear()
        state.paths.clear()
        state.first_like = {-1: -1}


class DraftModels(DraftModel):
    """A draft model, and others for sessions that decode with one of the target's adapters.

    Args:
        base: drafts for all other sessions, and for drafters that read its ``runner``.
        own: draft models by the adapter's name.
    """

    def __init__(self, base: DraftModel, own: Mapping[str, DraftModel]) -> None:
        super().__init__(base.runner, base.vocab_size)
        self._own = dict(own)

    def fit_vocabulary(self, vocab_size: int) -> None:
        super().fit_vocabulary(vocab_size)
        for each in self._own.values():
            each.fit_vocabulary(vocab_size)

    def open(self, session: SessionView) -> None:
        own = self._own.get(session.adapter)
        super().open(session) if own is None else own.open(session)

    def close(self, session: SessionView) -> None:
        own = self._own.get(session.adapter)
        super().close(session) if own is None else own.close(session)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(sessions)
        for own, members in self._groups(sessions):
            propose = super().propose if own is None else own.propose
            made = propose([sessions[i] for i in members], [budgets[i] for i in members])
            for i, draft in zip(members, made, strict=True):
                drafts[i] = draft
        return drafts

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        for own, members in self._groups(sessions):
            observe = super().observe if own is None else own.observe
            observe([sessions[i] for i in members], [outcomes[i] for i in members])

    def _groups(
        self, sessions: Sequence[SessionView]
    ) -> Iterator[tuple[DraftModel | None, list[int]]]:
        """Each draft model, None being the base's, and its sessions."""
        members: dict[str, list[int]] = {}
        for i, session in enumerate(sessions):
            members.setdefault(session.adapter if session.adapter in self._own else "", []).append(
                i
            )
        for adapter, chosen in members.items():
            yield self._own.get(adapter), chosen
