"""Trees grown slot by slot, the one that verification most likely reaches first.

Xiong et al. 2024, DySpec (arXiv 2410.11744): a slot is a place for a further child of a node. Its
value is the estimated probability that verification reaches it, with the drafter's probability of a
token as its acceptance rate. Filling a slot of value ``v`` with a token of probability ``R`` (of
what its earlier siblings left) opens a slot below it of value ``v R`` and one beside it of value
``v (1 - R)``. A slot is chosen before its token is known, so rules that correct for q stay exact.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.shapes.base import BRANCHING, Choices, Expander, Level, ShapePart, TreeBuilder, expand
from paceline.types import Budget, Draft, Draws

if TYPE_CHECKING:
    from paceline.view import SessionView

_Slot = tuple[float, int, int, int]  # -value, age (ties: oldest first), parent node, rank


@dataclass(slots=True)
class _Growth:
    """A tree, its open slots, and the candidates of its expanded nodes."""

    tree: TreeBuilder
    heap: list[_Slot] = field(default_factory=list)
    choices: dict[int, Choices] = field(default_factory=dict)
    reach: dict[int, float] = field(default_factory=lambda: {-1: 1.0})  # value of a node itself
    age: int = 0

    def push(self, value: float, node: int, rank: int) -> None:
        if value > 0.0:
            heapq.heappush(self.heap, (-value, self.age, node, rank))
            self.age += 1

    def fill(self) -> None:
        """Fill slots, the best first, until one belongs to a node that is not expanded yet."""
        tree = self.tree
        while self.heap and not tree.is_full and self.heap[0][2] in self.choices:
            negative, _, parent, rank = heapq.heappop(self.heap)
            choices = self.choices[parent]
            if rank >= len(choices.tokens):
                continue
            node = tree.add(parent, choices, rank)
            tree.values.append((-negative,))
            taken = self.reach[parent] * choices.confidences[rank]
            self.reach[node] = taken
            if tree.depth_of[node] < tree.budget.depth:
                self.push(taken, node, 0)
            self.push(-negative - taken, parent, rank + 1)

    @property
    def wave(self) -> list[int]:
        """Nodes to expand together: those whose slots may still be filled within the budget.

        Expanding them one by one would take one forward for each node.
        """
        left = self.tree.budget.nodes - len(self.tree.token_ids)
        slots = heapq.nsmallest(left, self.heap)
        return [node for _, _, node, _ in slots if node not in self.choices]


@dataclass(frozen=True, slots=True)
class DySpec:
    """The shape ``dyspec``; ``branching`` bounds the children of a node."""

    branching: int

    @property
    def draws(self) -> frozenset[Draws]:
        return frozenset({Draws.TOP, Draws.COUPLED, Draws.WITHOUT_REPLACEMENT})

    def build(
        self, expander: Expander, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[Draft]:
        return [growth.tree.draft() for growth in self.grow(expander, sessions, budgets)]

    def grow(
        self, expander: Expander, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[_Growth]:
        """The trees; ``tree.values`` has the values of their slots in the order of filling."""
        growths = [_Growth(TreeBuilder(s, b)) for s, b in zip(sessions, budgets, strict=True)]
        waves = [(g, [-1]) for g in growths if g.tree.budget.depth > 0 and g.tree.budget.nodes > 0]
        for growth, _ in waves:
            growth.push(1.0, -1, 0)
        level = None
        while waves:
            if level is None:
                level = Level(expander.root([g.tree.session for g, _ in waves]), self.branching)
            else:
                level = expand(expander, [(g.tree, nodes) for g, nodes in waves], self.branching)
            row = 0
            for growth, nodes in waves:
                for node in nodes:
                    growth.choices[node] = growth.tree.choose(
                        node, level, row, self.branching, weighted=True
                    )
                    row += 1
                growth.fill()
            waves = [(g, g.wave) for g, _ in waves if not g.tree.is_full]
            waves = [(g, nodes) for g, nodes in waves if nodes]
        return growths


DYSPEC = ShapePart(
    make=lambda knobs: DySpec(knobs[BRANCHING]),
    nodes=lambda knobs, depth: 3 * depth,
    knobs=(BRANCHING.but(4),),
    nodes_compete=True,
    depth_changes_nodes=True,
)
