"""Staged speculation: the draft model is itself sped up by drafting, with an n-gram stage.

Spector and Ré 2023 (arXiv 2308.04623). While a chain is drafted, the draft model is the target of
an inner draft-then-verify loop: each of its forwards also computes the tokens that an n-gram table
of the session's own text guesses ahead. Where the draft model then wants just the guessed token,
what follows it is known already and no forward is needed. The chain is the one that the draft
model makes alone, with at most as many forwards.

The table (Katz's back-off, without the smoothing: only the best token is asked for) holds the token
that last followed each n-gram, longest n-gram first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from paceline.drafters.base import (
    NGRAM_MAX,
    NGRAM_MIN,
    Drafter,
    DrafterContext,
    DrafterPart,
    fit_ngrams,
    grow,
    padded,
)
from paceline.errors import InvalidArgument
from paceline.knobs import Knob
from paceline.models.base import KVSequence, ModelRunner, Segment
from paceline.types import Budget, Draft, Need, Outcome

if TYPE_CHECKING:
    import torch

    from paceline.view import SessionView

PREFILL_CHUNK = 512
# Guesses need logits of a whole segment, so none are made along with a prompt.
MAX_BEHIND = 8

Path = tuple[int, ...]  # the tokens from the root's child down to a node


STAGE_TOKENS = Knob[int](
    "stage_tokens", int, 4, "Tokens that n-grams draft for the draft model in `staged`; 0: none.",
    ge=0, le=16, search=(0, 2, 4, 8), costs=True,
)  # fmt: skip


class _Ngrams:
    """The token that last followed each n-gram of a growing text."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._next: dict[Path, int] = {}
        self._seen = 0

    def extend(self, token_ids: list[int]) -> None:
        for end in range(self._seen, len(token_ids)):
            for length in self._lengths:
                if length <= end:
                    self._next[tuple(token_ids[end - length : end])] = token_ids[end]
        self._seen = len(token_ids)

    def guess(self, tail: list[int], count: int) -> list[int]:
        """Up to ``count`` tokens after ``tail``, one by one with back-off."""
        text = tail[-self._lengths.start :]
        first = len(text)
        while len(text) - first < count:
            known = (self._next.get(tuple(text[-n:])) for n in self._lengths if n <= len(text))
            token = next((token for token in known if token is not None), None)
            if token is None:
                break
            text.append(token)
        return text[first:]


class _State:
    """A session in the draft model: its KV, and what was computed after its last token."""

    def __init__(self, sequence: KVSequence, ngrams: _Ngrams) -> None:
        self.sequence = sequence
        self.ngrams = ngrams
        self.budget = Budget(0, 0)
        self.num_catch_up = 0  # pending entries that hold committed tokens
        self.entries: dict[Path, int] = {}  # () is the last committed token
        # The model's output after each of them: logits, and hidden states if a controller reads
        # them.
        self.rows: dict[Path, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.path_of: dict[int, Path] = {}  # node -> path

    def forget(self) -> None:
        self.num_catch_up = 0
        self.entries, self.rows, self.path_of = {}, {}, {-1: ()}


class Staged(Drafter):
    """The draft model with an n-gram stage in front of it; expanded by any shape.

    It has KV of its own in the draft model's runner. Only chains are guessed ahead; trees are
    expanded as the draft model does it alone. What is guessed in a round stays within the node
    budget, so a budget of the depth alone leaves little room for it.
    """

    def __init__(self, context: DrafterContext) -> None:
        runner = getattr(context.drafter("draft_model"), "runner", None)
        if runner is None:
            raise InvalidArgument("method", "staged", "a draft model that runs in this process")
        self.runner = cast("ModelRunner", runner)
        self._padding = context.vocab_size - self.runner.vocab_size
        self._states: dict[str, _State] = {}
        self._wants: frozenset[Need] = frozenset()  # of this round's length controllers
        self.last_hidden: torch.Tensor | None = None  # of the last answer, a row for each row

    def open(self, session: SessionView) -> None:
        config = session.config
        ngrams = _Ngrams(config[NGRAM_MIN], config[NGRAM_MAX])
        self._states[session.session_id] = _State(self.runner.new_sequence(), ngrams)

    def close(self, session: SessionView) -> None:
        state = self._states.pop(session.session_id, None)
        if state is not None:
            self.runner.free(state.sequence)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        fitting = []
        for session, budget in zip(sessions, budgets, strict=True):
            fits = session.length + budget.depth <= self.runner.context_length
            fitting.append(budget if fits else Budget(0, 0))
            self._states[session.session_id].budget = fitting[-1]
        rules = [session.stop_rule for session in sessions]
        wanted = any(rule is not None and rule.wants_hidden for rule in rules)
        self._wants = frozenset({Need.HIDDEN_STATES}) if wanted else frozenset()
        return grow(self, sessions, fitting)

    def root(self, sessions: Sequence[SessionView]) -> torch.Tensor:
        """Catch up with the committed tokens; logits after the last.  # [num_sessions, vocab]"""
        segments, computed = [], []
        for session in sessions:
            state = self._states[session.session_id]
            # no outcome came: the last token's logits are needed again
            if state.sequence.num_pending:
                self._commit(state, list(range(state.num_catch_up - 1)))
            state.forget()
            state.ngrams.extend(session.token_ids)
            behind = session.token_ids[state.sequence.length :]
            while len(behind) > PREFILL_CHUNK:
                chunk = np.asarray(behind[:PREFILL_CHUNK], np.int64)
                self.runner.forward([Segment(state.sequence, chunk, logits="none")])
                self.runner.commit(state.sequence, range(PREFILL_CHUNK))
                behind = behind[PREFILL_CHUNK:]
            state.num_catch_up = len(behind)
            state.entries[()] = len(behind) - 1
            ahead = self._ahead(session, ()) if len(behind) <= MAX_BEHIND else []
            wanted: list[Path | None] = [None] * (len(behind) - 1) if ahead else []
            computed.append([*wanted, (), *self._append(state, (), ahead)])
            tokens = np.asarray([*behind, *ahead], np.int64)
            segments.append(Segment(state.sequence, tokens, logits="all" if ahead else "last"))
        self._forward(sessions, segments, computed)
        return self._answer([self._states[s.session_id].rows[()] for s in sessions])

    def expand(
        self, sessions: Sequence[SessionView], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> torch.Tensor:
        """Logits after new nodes; runs a forward only for nodes that the n-gram stage missed."""
        members, segments, computed, answer = [], [], [], []
        for session, frontier in zip(sessions, frontiers, strict=True):
            state, fresh = self._states[session.session_id], []
            for node, token, parent in frontier:
                path = state.path_of[node] = (*state.path_of[parent], token)
                answer.append((state, path))
                if path not in state.entries:
                    fresh += self._append(state, path[:-1], [token])
            if fresh:
                if len(frontier) == 1:
                    fresh += self._append(state, fresh[0], self._ahead(session, fresh[0]))
                tokens = np.asarray([path[-1] for path in fresh], np.int64)
                parents = np.asarray([state.entries[path[:-1]] for path in fresh], np.int32)
                segments.append(Segment(state.sequence, tokens, parents))
                members.append(session)
                computed.append(fresh)
        if segments:
            self._forward(members, segments, computed)
        return self._answer([state.rows[path] for state, path in answer])

    def _answer(self, rows: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> torch.Tensor:
        hidden = [state for _, state in rows if state is not None]
        import torch

        self.last_hidden = torch.stack(hidden) if len(hidden) == len(rows) else None
        return torch.stack([logits for logits, _ in rows])

    def _ahead(self, session: SessionView, path: Path) -> list[int]:
        """The n-gram stage's guesses after a node: as deep as the chain will be expanded."""
        config, state = session.config, self._states[session.session_id]
        if config.shape != "chain":
            return []
        deepest = min(state.budget.depth, state.budget.nodes) - 1  # the last is not expanded
        later = deepest - len(path)
        # Should all guesses fail, the nodes that are still to come need room as well.
        room = state.budget.nodes - (len(state.entries) - 1) - later
        count = min(config[STAGE_TOKENS], later, room)
        longest = config[NGRAM_MAX]
        return state.ngrams.guess([*session.token_ids[-longest:], *path], count)

    @staticmethod
    def _append(state: _State, parent: Path, token_ids: Sequence[int]) -> list[Path]:
        """Give a chain of tokens below ``parent`` the next pending entries."""
        paths = [(*parent, *token_ids[: i + 1]) for i in range(len(token_ids))]
        for path in paths:
            state.entries[path] = state.num_catch_up + len(state.entries) - 1
        return paths

    def _forward(
        self,
        sessions: Sequence[SessionView],
        segments: Sequence[Segment],
        computed: Sequence[Sequence[Path | None]],
    ) -> None:
        """Run a forward and keep the logits of each path (None: not needed)."""
        result = self.runner.forward(segments, self._wants)
        logits, hidden = result.logits, result.beside_logits(Need.HIDDEN_STATES)
        logits = padded(logits, self._padding)
        row = 0
        for session, paths in zip(sessions, computed, strict=True):
            for path in paths:
                if path is not None:
                    self._states[session.session_id].rows[path] = (
                        logits[row],
                        None if hidden is None else hidden[row],
                    )
                row += 1

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        """Keep the KV entries computed for accepted tokens; later calls compute the missing
        ones."""
        for session, outcome in zip(sessions, outcomes, strict=True):
            state = self._states.get(session.session_id)
            if state is None or not state.num_catch_up:
                continue
            kept = list(range(state.num_catch_up))
            path: Path = ()
            for token in outcome.token_ids[: outcome.num_accepted]:
                path = (*path, token)
                if path not in state.entries:
                    break
                kept.append(state.entries[path])
            self._commit(state, kept)

    def _commit(self, state: _State, kept: list[int]) -> None:
        self.runner.commit(state.sequence, kept)
        state.forget()


STAGED = DrafterPart(
    make=Staged,
    knobs=(STAGE_TOKENS, NGRAM_MAX.but(4), NGRAM_MIN.but(2)),
    fit=fit_ngrams,
    replay="prefix",
)
