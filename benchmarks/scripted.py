"""Drafters whose accuracy and speed a benchmark (or a test) chooses: they know what AR generates.

:class:`paceline.bench.synthetic.Mix` with a model's speed, and the method of such a drafter.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.bench.synthetic import Continuations, Mix
from paceline.methods import Method
from paceline.types import Budget, Draft
from paceline.view import SessionView

__all__ = ["Continuations", "Mix", "SlowMix", "scripted_method"]


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

    def _prompt(self, session: SessionView) -> tuple[int, ...]:
        return next(p for p in self._continuations if p == tuple(session.token_ids[: len(p)]))

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
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
