"""Trees in which every node has the same number of children; a chain is the case of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.shapes.base import Expander, Level, TreeBuilder
from paceline.types import Budget, Draft

if TYPE_CHECKING:
    from paceline.session import Session


@dataclass(frozen=True, slots=True)
class Kary:
    """Level by level, ``branching`` children for each node, until depth or node budget is spent."""

    branching: int

    def build(
        self, expander: Expander, sessions: Sequence[Session], budgets: Sequence[Budget]
    ) -> list[Draft]:
        trees = [TreeBuilder(s, b) for s, b in zip(sessions, budgets, strict=True)]
        growing = [tree for tree in trees if tree.budget.depth > 0 and tree.budget.nodes > 0]
        if not growing:
            return [tree.draft() for tree in trees]
        level = Level(expander.root([tree.session for tree in growing]), self.branching)
        frontiers = [
            tree.add_children(-1, level, row, self.branching) for row, tree in enumerate(growing)
        ]
        for depth in range(2, max(tree.budget.depth for tree in growing) + 1):
            # The last level is proposed but never expanded: nothing is drafted after it.
            going = [
                (tree, frontier)
                for tree, frontier in zip(growing, frontiers, strict=True)
                if frontier
                and depth <= tree.budget.depth
                and len(tree.token_ids) < tree.budget.nodes
            ]
            if not going:
                break
            logits = expander.expand(
                [tree.session for tree, _ in going],
                [
                    [(node, tree.token_ids[node], tree.parents[node]) for node in frontier]
                    for tree, frontier in going
                ],
            )
            level, row = Level(logits, self.branching), 0
            growing, frontiers = [], []
            for tree, frontier in going:
                added: list[int] = []
                for node in frontier:
                    added += tree.add_children(node, level, row, self.branching)
                    row += 1
                growing.append(tree)
                frontiers.append(added)
        return [tree.draft() for tree in trees]


def chain() -> Kary:
    """One branch: the most likely continuation."""
    return Kary(branching=1)
