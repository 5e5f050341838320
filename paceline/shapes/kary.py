"""Trees in which every node has the same number of children; a chain is the case of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.shapes.base import Expander, TreeBuilder
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
        logits = expander.root([tree.session for tree in growing])
        levels = [
            tree.add_children(-1, row, self.branching)
            for tree, row in zip(growing, logits, strict=True)
        ]
        for depth in range(2, max(tree.budget.depth for tree in growing) + 1):
            # The last level is proposed but never expanded: nothing is drafted after it.
            going = [
                (tree, level)
                for tree, level in zip(growing, levels, strict=True)
                if level and depth <= tree.budget.depth and len(tree.token_ids) < tree.budget.nodes
            ]
            if not going:
                break
            logits = expander.expand(
                [tree.session for tree, _ in going],
                [
                    [(node, tree.token_ids[node], tree.parents[node]) for node in level]
                    for tree, level in going
                ],
            )
            growing, levels, row = [], [], 0
            for tree, level in going:
                added: list[int] = []
                for node in level:
                    added += tree.add_children(node, logits[row], self.branching)
                    row += 1
                growing.append(tree)
                levels.append(added)
        return [tree.draft() for tree in trees]


def chain() -> Kary:
    """One branch: the most likely continuation."""
    return Kary(branching=1)
