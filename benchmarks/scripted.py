"""Drafters whose accuracy and speed a benchmark (or a test) chooses: they know what AR generates.

Each is given ``continuations``, a mapping from a prompt (tuple of token ids) to the tokens that AR
generates after it, and proposes along them. A node budget above the depth adds wrong siblings in
between, so that accepted nodes are scattered over the tree.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from paceline.drafters.base import Drafter
from paceline.methods import Method
from paceline.types import EMPTY_DRAFT, Budget, Draft, Need, Outcome

if TYPE_CHECKING:
    from paceline.session import Session

Continuations = Mapping[tuple[int, ...], Sequence[int]]


class Mix(Drafter):
    """Right with probability ``rho`` at each token, decided by (seed, prompt, position) alone.

    Attributes:
        opened: ids of the sessions between ``open`` and ``close``.
        observed: number of outcomes seen.
    """

    needs: frozenset[Need] = frozenset()

    def __init__(
        self, continuations: Continuations, vocab_size: int, *, rho: float, seed: int = 0
    ) -> None:
        self._continuations = continuations
        self._vocab_size = vocab_size
        self._rho = rho
        self._seed = seed
        self.opened: set[str] = set()
        self.observed = 0

    def open(self, session: Session) -> None:
        assert session.session_id not in self.opened, "opened twice"
        self.opened.add(session.session_id)

    def close(self, session: Session) -> None:
        self.opened.discard(session.session_id)

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        assert all(session.session_id in self.opened for session in sessions), "not open"
        return [self._propose(s, b) for s, b in zip(sessions, budgets, strict=True)]

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        assert len(sessions) == len(outcomes)
        self.observed += len(outcomes)

    def _propose(self, session: Session, budget: Budget) -> Draft:
        depth = min(budget.depth, budget.nodes)
        if depth <= 0:
            return EMPTY_DRAFT
        prompt = self._prompt(session)
        done = session.length - len(prompt)
        truth = list(self._continuations[prompt][done : done + depth])
        prompt_key = int.from_bytes(hashlib.sha256(repr(prompt).encode()).digest()[:8], "big")
        spare = 0 if session.plan.rule.chain_only else budget.nodes - len(truth)
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

    def _prompt(self, session: Session) -> tuple[int, ...]:
        """The continuation whose prompt the session has."""
        return tuple(session.token_ids[: session.prompt_length])

    def _wrong(self, token: int, index: int) -> int:
        return (token + 1 + index) % self._vocab_size


class SlowMix(Mix):
    """As :class:`Mix`, in the time that a model would take, and also for a session whose prompt is
    one of ``continuations`` and tokens after it: a session that moved here between rounds.

    Args:
        token_seconds: for each drafted token; the processor is free meanwhile, as if the model ran
            on another one.
    """

    rewinds = True  # it looks at nothing but the tokens

    def __init__(
        self,
        continuations: Continuations,
        vocab_size: int,
        *,
        rho: float,
        token_seconds: float,
        seed: int = 0,
    ) -> None:
        super().__init__(continuations, vocab_size, rho=rho, seed=seed)
        self._token_seconds = token_seconds

    def _prompt(self, session: Session) -> tuple[int, ...]:
        return next(p for p in self._continuations if p == tuple(session.token_ids[: len(p)]))

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = super().propose(sessions, budgets)
        depth = max((min(budget.depth, budget.nodes) for budget in budgets), default=0)
        time.sleep(self._token_seconds * depth)
        return drafts


def scripted_method(name: str, summary: str) -> Method:
    """The method of such a drafter, for ``catalogue={**METHODS, name: method}`` of an engine."""
    return Method(
        name=name,
        paper="for tests and benchmarks",
        summary=summary,
        drafter=name,
        shape=None,
        acceptance="coupled",
        length="fixed",
        defaults={"num_speculative_tokens": 4, "node_budget": None},
    )
