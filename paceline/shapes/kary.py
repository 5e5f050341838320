"""Trees in which every node has the same number of children; a chain has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.shapes.base import ALL_DRAWS, BRANCHING, Expander, Level, ShapePart, TreeBuilder, grow
from paceline.types import Budget, Draft, Draws

if TYPE_CHECKING:
    from paceline.view import SessionView


@dataclass(frozen=True, slots=True)
class Kary:
    """Gives each node ``branching`` children, level by level, until depth or node budget is spent.

    A chain asks the session's stop rule, if it has one, after each token.
    """

    branching: int

    @property
    def draws(self) -> frozenset[Draws]:
        return ALL_DRAWS

    def build(
        self, expander: Expander, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[Draft]:
        def step(tree: TreeBuilder, frontier: list[int], level: Level, row: int) -> list[int]:
            if self.branching == 1:
                return tree.add_link(frontier[0], level, row, expander)
            added: list[int] = []
            for i, node in enumerate(frontier):
                added += tree.add_children(node, level, row + i, self.branching)
            return added

        trees = [TreeBuilder(s, b) for s, b in zip(sessions, budgets, strict=True)]
        grow(expander, trees, step, lambda depth: self.branching)
        return [tree.draft() for tree in trees]


def chain() -> Kary:
    """One branch: the most likely continuation."""
    return Kary(branching=1)


CHAIN = ShapePart(make=lambda knobs: chain(), nodes=lambda knobs, depth: depth)
KARY = ShapePart(
    make=lambda knobs: Kary(knobs[BRANCHING]),
    nodes=lambda knobs, depth: min(64, sum(knobs[BRANCHING] ** d for d in range(1, depth + 1))),
    knobs=(BRANCHING.but(2),),
)
