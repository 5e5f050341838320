"""Trees of the nodes in which the drafter is most confident.

A node's value is the product of the drafter's confidences along its path; it estimates the
probability that the node is accepted.

``confidence``, the dynamic draft trees of EAGLE-2, Li et al. 2024 (arXiv 2406.16858): expand the
most promising nodes of each level, then keep the best of all nodes. ``best_first``, the trees of
DDTree, Ringel and Romano 2026 (arXiv 2604.12989): expand all nodes that may belong to the best, for
drafters that expand a node at next to no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.exact_math import log_of
from paceline.shapes.base import BRANCHING, Expander, Level, ShapePart, TreeBuilder, grow
from paceline.types import Budget, Draft, Draws

if TYPE_CHECKING:
    from paceline.view import SessionView


@dataclass(slots=True)
class _Candidates(TreeBuilder):
    """All nodes that were grown, of which the draft keeps ``kept``."""

    kept: int = 0


@dataclass(frozen=True, slots=True)
class ConfidenceTree:
    """Gives each of the ``branching`` best nodes of a level ``branching`` children.

    The draft keeps as many of all these nodes as its node budget allows, the best first.
    """

    branching: int

    @property
    def draws(self) -> frozenset[Draws]:
        # The tokens of nodes decide which nodes stay; rules that correct for q exclude that.
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
        """The trees with all grown nodes, which are more than a draft keeps.

        ``tree.values`` has the logarithm of each node's value. A draft takes the nodes with the
        highest values, the earlier ones of equals.
        """
        trees: list[TreeBuilder] = []
        for session, budget in zip(sessions, budgets, strict=True):
            limit = self.branching * (1 + self._most_expanded(budget.nodes) * budget.depth)
            room = replace(budget, nodes=limit if budget.nodes > 0 else 0)
            trees.append(_Candidates(session, room, kept=budget.nodes))
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
        return self._to_expand(tree, added)

    def _most_expanded(self, nodes: int) -> int:
        """Most nodes of a level that are expanded, for a draft of ``nodes``."""
        return self.branching

    def _to_expand(self, tree: TreeBuilder, level: list[int]) -> list[int]:
        """The nodes of a new level that get children."""
        return self._best(tree, level, self.branching)

    def _best(self, tree: TreeBuilder, nodes: Sequence[int], count: int) -> list[int]:
        """The ``count`` best nodes. A parent's value is never below its child's, and it comes
        earlier, so the parents of kept nodes are kept."""
        return sorted(nodes, key=lambda node: -tree.values[node][0])[: max(0, count)]


@dataclass(frozen=True, slots=True)
class BestFirst(ConfidenceTree):
    """The most probable nodes, each with up to ``branching`` children.

    A node that is not among the best so far will not be, nor its children: as many better ones are
    known already. So each level needs one expansion, of those of its nodes that are among the best.
    """

    def _most_expanded(self, nodes: int) -> int:
        return nodes

    def _to_expand(self, tree: TreeBuilder, level: list[int]) -> list[int]:
        assert isinstance(tree, _Candidates)
        best = self._best(tree, range(len(tree.token_ids)), tree.kept)
        return sorted(set(best).intersection(level))


CONFIDENCE = ShapePart(
    make=lambda knobs: ConfidenceTree(knobs[BRANCHING]),
    nodes=lambda knobs, depth: 3 * depth,
    knobs=(BRANCHING.but(4),),
    nodes_compete=True,
)

BEST_FIRST = ShapePart(
    make=lambda knobs: BestFirst(knobs[BRANCHING]),
    nodes=lambda knobs, depth: 3 * depth,
    knobs=(BRANCHING.but(8),),
    nodes_compete=True,
)
