"""Drafters whose accuracy a test chooses: they know what AR would generate.

Rows for them are in ``TEST_METHODS``; an engine gets them with ``catalogue=WITH_FAKES``.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.scripted import Continuations, Mix, scripted_method
from paceline.methods import METHODS, Method

__all__ = ["TEST_METHODS", "WITH_FAKES", "AlwaysRight", "Mix", "NeverRight"]


class AlwaysRight(Mix):
    """Proposes what AR generates: every token is accepted."""

    def __init__(self, continuations: Continuations, vocab_size: int) -> None:
        super().__init__(continuations, vocab_size, rho=1.0)


class NeverRight(Mix):
    """Proposes tokens that AR does not generate: every token is rejected."""

    def __init__(self, continuations: Continuations, vocab_size: int) -> None:
        super().__init__(continuations, vocab_size, rho=0.0)


TEST_METHODS: Mapping[str, Method] = {
    name: scripted_method(name, summary)
    for name, summary in (
        ("always_right", "Knows the target's tokens."),
        ("never_right", "Knows the target's tokens and avoids them."),
        ("mix", "Knows the target's tokens and errs at random."),
    )
}

WITH_FAKES: Mapping[str, Method] = {**METHODS, **TEST_METHODS}
