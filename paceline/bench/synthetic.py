"""Drafts of a chosen accuracy, for capacity planning: their drafter knows what AR generates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from paceline.drafters.base import Drafter
from paceline.types import EMPTY_DRAFT, Budget, Draft, Outcome
from paceline.view import SessionView

Continuations = Mapping[tuple[int, ...], Sequence[int]]


class Mix(Drafter):
    """Right with probability ``rho`` at each token, decided by (seed, prompt, position) alone.

    A node budget above the depth adds wrong siblings in between, so that accepted nodes are
    scattered over the tree.

    Args:
        continuations: the tokens that AR generates after each prompt.

    Attributes:
        opened: ids of the sessions between ``open`` and ``close``.
        observed: number of outcomes seen.
    """

    def __init__(
        self, continuations: Continuations, vocab_size: int, *, rho: float, seed: int = 0
    ) -> None:
        self._continuations = continuations
        self._vocab_size = vocab_size
        self._rho = rho
        self._seed = seed
        self.opened: set[str] = set()
        self.observed = 0

    def open(self, session: SessionView) -> None:
        assert session.session_id not in self.opened, "opened twice"
        self.opened.add(session.session_id)

    def close(self, session: SessionView) -> None:
        self.opened.discard(session.session_id)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        assert all(session.session_id in self.opened for session in sessions), "not open"
        return [self._propose(s, b) for s, b in zip(sessions, budgets, strict=True)]

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        assert len(sessions) == len(outcomes)
        self.observed += len(outcomes)

    def _propose(self, session: SessionView, budget: Budget) -> Draft:
        depth = min(budget.depth, budget.nodes)
        if depth <= 0:
            return EMPTY_DRAFT
        prompt = self._prompt(session)
        done = session.length - len(prompt)
        truth = list(self._continuations[prompt][done : done + depth])
        prompt_key = _key(prompt)
        spare = 0 if session.chain_only else budget.nodes - len(truth)
        token_ids: list[int] = []
        parents: list[int] = []
        trunk = -1  # parent of the main branch's next token
        for step, token in enumerate(truth):
            random = np.random.default_rng([self._seed, prompt_key, done + step])
            right = bool(random.random() < self._rho)
            others = [self._wrong(token, i) for i in range(min(spare, 1 + int(random.integers(2))))]
            spare -= len(others)
            before = int(random.integers(len(others) + 1))
            main = token if right else self._wrong(token, len(others))
            siblings = [*others[:before], main, *others[before:]]
            first = len(token_ids)
            token_ids += siblings
            parents += [trunk] * len(siblings)
            trunk = first + before
        return Draft(np.asarray(token_ids, np.int64), np.asarray(parents, np.int32))

    def _prompt(self, session: SessionView) -> tuple[int, ...]:
        """The continuation whose prompt the session has."""
        return tuple(session.token_ids[: session.prompt_length])

    def _wrong(self, token: int, index: int) -> int:
        return (token + 1 + index) % self._vocab_size


@lru_cache(maxsize=1024)  # every round of a session needs it
def _key(prompt: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.sha256(repr(prompt).encode()).digest()[:8], "big")
