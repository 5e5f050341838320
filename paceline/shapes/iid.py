"""Several sequences drawn independently of one another.

The drafts of SpecTr, Sun et al. 2023 (arXiv 2310.15141): K independent draws of L tokens each, so
siblings may repeat a token. At temperature 0 the sequences start with the K most likely tokens,
because K equal sequences would be useless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.shapes.base import BRANCHING, Expander, Level, ShapePart, TreeBuilder, grow
from paceline.types import Budget, Draft, Draws

if TYPE_CHECKING:
    from paceline.view import SessionView


@dataclass(frozen=True, slots=True)
class IndependentSequences:
    """``count`` branches at the root, and no branching below it."""

    count: int

    @property
    def draws(self) -> frozenset[Draws]:
        return frozenset({Draws.WITH_REPLACEMENT})

    def build(
        self, expander: Expander, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[Draft]:
        def step(tree: TreeBuilder, frontier: list[int], level: Level, row: int) -> list[int]:
            if frontier == [-1]:
                return tree.add_children(-1, level, row, self.count)
            added: list[int] = []
            for i, node in enumerate(frontier):
                added += tree.add_children(node, level, row + i, 1)
            return added

        trees = [TreeBuilder(s, b) for s, b in zip(sessions, budgets, strict=True)]
        grow(expander, trees, step, lambda depth: 1 if depth else self.count)
        return [tree.draft() for tree in trees]


IID = ShapePart(
    make=lambda knobs: IndependentSequences(knobs[BRANCHING]),
    nodes=lambda knobs, depth: knobs[BRANCHING] * depth,
    knobs=(BRANCHING.but(3),),
)
