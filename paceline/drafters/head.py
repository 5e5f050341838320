"""Drafts of a trained head, which reads what the target computed for the committed tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from paceline.drafters.base import (
    Drafter,
    greedy_chain_depth,
    grow,
    kept_rows,
    stop_below,
)
from paceline.models.heads.base import Head, State
from paceline.models.llama_config import LlamaConfig
from paceline.shapes.kary import chain
from paceline.types import (
    EMPTY_DRAFT,
    Budget,
    Draft,
    FloatArray,
    Need,
    Outcome,
    StatesLayout,
    Verification,
)

if TYPE_CHECKING:
    from paceline.view import SessionView


T = TypeVar("T")
Memory = tuple[torch.Tensor, torch.Tensor]
FIRST_UNSEEN = 1 << 20  # number of the first such node: no draft has as many


class _Reading:
    """A session's head state, and the features that the head has not read yet.

    Attributes:
        num_read: features that the state has read, or that it began with.
        unseen: tokens behind the committed ones of the last draft, which the state has as a chain
            of nodes: no target has seen them.
        shares: other sessions may begin with what this one has read.
        is_published: they may begin with its prompt.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.features: list[torch.Tensor] = []
        self.num_read = 0
        self.unseen: list[tuple[int, int]] = []  # token, node
        self.next_node = FIRST_UNSEEN
        self.shares = self.is_published = False


class HeadDrafter(Drafter):
    """Runs a head in the loop: collects features, and expands nodes with it."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.needs = head.needs
        (self._feature,) = head.needs - {Need.TREE_LOGITS}
        config, layers = head.target.config, head.feature_layers
        if layers is None:  # of all, where it reads layers
            layers = range(1, config.num_layers + 1) if self._feature is Need.LAYER_STATES else ()
        self.drafts_on = head.drafts_on
        self.states: StatesLayout | None = StatesLayout(
            self._feature, tuple(layers), config.hidden_size
        )
        self._readings: dict[str, _Reading] = {}

    @property
    def target(self) -> LlamaConfig:
        """The sizes of the head's target."""
        return self._head.target.config

    def open(self, session: SessionView) -> None:
        self._readings[session.session_id] = _Reading(self._head.new_state())

    def close(self, session: SessionView) -> None:
        reading = self._readings.pop(session.session_id, None)
        if reading is not None:
            if reading.shares and session.finish_reason != "error":
                self._head.publish(reading.state, session.token_ids, _scope(session))
            self._head.free(reading.state)

    def adopt(self, session: SessionView) -> int:
        reading = self._readings[session.session_id]
        reading.shares = True
        # All but the last token, which has no feature yet, and the one before it: a draft needs a
        # feature to begin with.
        read = session.token_ids[: max(0, session.length - 1)]
        reading.num_read = self._head.adopt(reading.state, read, _scope(session))
        return reading.num_read

    def num_known(self, prompt_ids: Sequence[int], tenant: str, adapter: str) -> int:
        return self._head.num_known(prompt_ids[:-1], (adapter, tenant))

    def read_prompt(self, session: SessionView, read: Verification) -> None:
        features = self._head.select(read.extras[self._feature])
        self._readings[session.session_id].features.append(self._here(features))

    def _here(self, features: torch.Tensor) -> torch.Tensor:
        """Features where the head is, which may be another device than the target's."""
        return features.to(self._head.target.embedding)

    def read_states(self, session: SessionView, states: torch.Tensor) -> None:
        features = self._here(states)
        if self._feature is Need.LAYER_STATES and self._head.feature_layers is None:
            features = features.unflatten(1, (-1, self._head.target.config.hidden_size))
        self._readings[session.session_id].features.append(features)

    @torch.no_grad()
    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(sessions)
        deepest = self._head.max_depth
        if deepest is not None:
            budgets = [replace(budget, depth=min(budget.depth, deepest)) for budget in budgets]
        # Without new features (the first round of a one-token prompt, a draft requested twice) the
        # head has no input.
        able = [
            i
            for i, (session, budget) in enumerate(zip(sessions, budgets, strict=True))
            if self._readings[session.session_id].features and min(budget.depth, budget.nodes) > 0
        ]
        if able:
            members, limits = [sessions[i] for i in able], [budgets[i] for i in able]
            made = self._greedy_chains(members, limits) or grow(self, members, limits)
            for i, draft in zip(able, made, strict=True):
                drafts[i] = draft
        return drafts

    def _greedy_chains(
        self, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[Draft] | None:
        depth = greedy_chain_depth(sessions, budgets, stops=True)
        if not depth:
            return None
        limits = stop_below(sessions, depth)
        chains = self._begin(
            sessions,
            lambda states, features, ids: self._head.chains(states, features, ids, depth, limits),
        )
        sizes = [min(budget.depth, budget.nodes) for budget in budgets]
        return [
            Draft.chain(chain[chain >= 0][:size]) for chain, size in zip(chains, sizes, strict=True)
        ]

    @torch.no_grad()
    def draft_on(self, session: SessionView, budget: Budget) -> Draft:
        reading = self._readings[session.session_id]
        if not reading.num_read or min(budget.depth, budget.nodes) <= 0:
            return EMPTY_DRAFT  # the head has nothing to begin with
        (draft,) = chain().build(_BehindStates(self._head, reading), [session], [budget])
        return draft

    @property
    def last_acceptance(self) -> FloatArray | None:
        return self._head.last_acceptance

    def _states_of(self, sessions: Sequence[SessionView]) -> list[State]:
        return [self._readings[session.session_id].state for session in sessions]

    def root(self, sessions: Sequence[SessionView]) -> torch.Tensor:
        return self._begin(sessions, self._head.root)

    def _begin(self, sessions: Sequence[SessionView], read: Callable[..., T]) -> T:
        """Have the head read what was committed, with its ``root`` or ``chains``."""
        features, following = [], []
        for session in sessions:
            reading = self._readings[session.session_id]
            rows = torch.cat(reading.features) if len(reading.features) > 1 else reading.features[0]
            # The last committed token has no features yet, so the rows end at the one before it.
            end = session.length
            again = reading.num_read - (end - 1 - len(rows))
            if again > 0:  # the target knew fewer tokens than the head
                rows = rows[again:]
            elif again < 0:  # the session was truncated: what it has read is no beginning
                reading.shares = False
            reading.num_read, reading.unseen = end - 1, []
            following.append(session.token_ids[end - len(rows) : end])
            features.append(rows)
            reading.features = []
        states = self._states_of(sessions)
        answer = read(states, features, following)
        for session, state in zip(sessions, states, strict=True):
            reading = self._readings[session.session_id]
            if reading.shares and not reading.is_published:
                reading.is_published = True  # the rest, when the session ends
                self._head.publish(state, session.token_ids, _scope(session))
        return answer

    def expand(
        self, sessions: Sequence[SessionView], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> torch.Tensor:
        return self._head.expand(self._states_of(sessions), frontiers)

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        """Keep the features of the tokens whose KV entries were committed."""
        for session, outcome in zip(sessions, outcomes, strict=True):
            reading = self._readings.get(session.session_id)
            if reading is None:
                continue
            features = self._head.select(outcome.verification.extras[self._feature])
            if len(features) > 1:
                features = features[kept_rows(outcome)]
            reading.features.append(self._here(features))


class _BehindStates:
    """A head as the expander of one chain behind tokens that no target has seen.

    These tokens become nodes of the head's last draft, once each, so that a step costs one node.
    """

    def __init__(self, head: Head, reading: _Reading) -> None:
        self._head, self._reading = head, reading

    def root(self, sessions: Sequence[SessionView]) -> torch.Tensor:
        (session,), reading = sessions, self._reading
        tokens = session.token_ids[reading.num_read + 1 :]
        same = 0
        while same < min(len(tokens) - 1, len(reading.unseen)):
            if reading.unseen[same][0] != tokens[same]:
                break
            same += 1
        del reading.unseen[same:]
        for token in tokens[same:]:
            logits = self._feed(token)
        return logits

    def expand(
        self, sessions: Sequence[SessionView], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> torch.Tensor:
        (((_, token, _),),) = frontiers  # a chain grows by one node
        return self._feed(token)

    def _feed(self, token: int) -> torch.Tensor:
        """Logits after one more token.  # [1, vocab_size]"""
        reading = self._reading
        node, reading.next_node = reading.next_node, reading.next_node + 1
        parent = reading.unseen[-1][1] if reading.unseen else -1
        reading.unseen.append((token, node))
        return self._head.expand([reading.state], [[(node, token, parent)]])


class MemoryHeadDrafter(HeadDrafter):
    """As :class:`HeadDrafter`, of a head that also reads KV entries of the target's last layer.

    The head has them while it drafts and keeps no copy (LongSpec, arXiv 2502.17421).

    Args:
        entries_of: keys and values for a session's tokens but the last.
            # 2 x [length, kv_heads, head_dim]
    """

    def __init__(self, head: Head, entries_of: Callable[[SessionView], Memory]) -> None:
        super().__init__(head)
        self.states, self.drafts_on = None, False  # they are not all that the head reads
        self._entries_of = entries_of

    def _begin(self, sessions: Sequence[SessionView], read: Callable[..., T]) -> T:
        for session, state in zip(sessions, self._states_of(sessions), strict=True):
            state.memory = self._entries_of(session)
        return super()._begin(sessions, read)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        try:
            return super().propose(sessions, budgets)
        finally:
            for state in self._states_of(sessions):
                state.forget_memory()


def _scope(session: SessionView) -> tuple[str, str]:
    """What must be the same for sessions that share what a head has read."""
    return session.adapter, session.tenant
