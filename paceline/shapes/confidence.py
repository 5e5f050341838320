"""Trees of the nodes that the drafter is most confident in.

The dynamic draft trees of EAGLE-2, Li et al. 2024 (arXiv 2406.16858): expand the most promising
nodes of each level, then keep the best of all nodes. A node's value is the product of the
drafter's confidences along its path, an estimate of the probability that it is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.exact_math import log_of
from paceline.shapes.base import Expander, Level, TreeBuilder, grow
from paceline.types import Budget, Draft, Draws

if TYPE_CHECKING:
    from paceline.view import SessionView


@dataclass(frozen=True, slots=True)
class ConfidenceTree:
    """Expands the ``branching`` best nodes of a level to as many children each.

    Of all these nodes the draft keeps as many as its node budget allows, best first.
    """

    branching: int

    @property
    def draws(self) -> frozenset[Draws]:
        # Nodes are kept for the tokens that they hold, which rules that correct for q exclude.
        return frozenset({Draws.TOP, Draws.COUPLED})

    def build(
        self, expander: Expander, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[Draft]:
        trees = self.grow(expander, sessions, budgets)
        return [
            tree.draft(self._best(tree, range(len(tree.token_ids)), budget.nodes))
            for tree, budget in zip(trees, budgets, strict=True)
        ]

    def grow(
        self, expander: Expander, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[TreeBuilder]:
        """The trees with all nodes that were grown, more than a draft keeps.

        ``tree.values`` has the logarithm of each node's value: a draft takes the nodes with the
        highest, of equal ones the earlier.
        """
        limit = self.branching + self.branching**2 * max((b.depth for b in budgets), default=0)
        trees = [
            TreeBuilder(session, replace(budget, nodes=limit if budget.nodes > 0 else 0))
            for session, budget in zip(sessions, budgets, strict=True)
        ]
        grow(expander, trees, self._step, lambda depth: self.branching)
        return trees

    def _step(self, tree: TreeBuilder, frontier: list[int], level: Level, row: int) -> list[int]:
        added = []
        for i, node in enumerate(frontier):
            choices = tree.choose(node, level, row + i, self.branching, weighted=True)
            value = tree.values[node][0] if node >= 0 else 0.0
            for rank, confidence in enumerate(choices.confidences):
                added.append(tree.add(node, choices, rank))
                tree.values.append((value + log_of(max(confidence, 1e-30)),))
        return self._best(tree, added, self.branching)

    def _best(self, tree: TreeBuilder, nodes: Sequence[int], count: int) -> list[int]:
        """A parent is worth no less than its child and comes first, so it is kept with it."""
        return sorted(nodes, key=lambda node: -tree.values[node][0])[: max(0, count)]
