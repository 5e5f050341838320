"""Trees with a set number of children at each level; sampled children have no repeats.

RSD-C of Jeon et al. 2024, Recursive Speculative Decoding (arXiv 2402.14160): a constant branching
vector, with the children of a node drawn by Gumbel top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from paceline.knobs import MAX_DEPTH, Knob
from paceline.shapes.base import Expander, Level, ShapePart, TreeBuilder, grow
from paceline.types import Budget, Draft, Draws

if TYPE_CHECKING:
    from paceline.view import SessionView


@dataclass(frozen=True, slots=True)
class BranchingVector:
    """A node at depth ``d`` (the root: 0) has ``vector[d]`` children; no node is deeper."""

    vector: tuple[int, ...]

    @property
    def draws(self) -> frozenset[Draws]:
        return frozenset({Draws.TOP, Draws.COUPLED, Draws.WITHOUT_REPLACEMENT})

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole tree."""
        total, level = 0, 1
        for branching in self.vector:
            level *= branching
            total += level
        return total

    def build(
        self, expander: Expander, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[Draft]:
        def step(tree: TreeBuilder, frontier: list[int], level: Level, row: int) -> list[int]:
            depth = tree.depth_of[frontier[0]] if frontier[0] >= 0 else 0
            added: list[int] = []
            for i, node in enumerate(frontier):
                added += tree.add_children(node, level, row + i, self.vector[depth])
            return added if depth + 1 < len(self.vector) else []

        trees = [TreeBuilder(s, b) for s, b in zip(sessions, budgets, strict=True)]
        grow(expander, trees, step, lambda depth: self.vector[depth])
        return [tree.draft() for tree in trees]


VECTOR = Knob[tuple[int, ...]](
    "branching_vector", tuple[Annotated[int, Field(ge=1, le=16)], ...], (2, 2, 1),
    "Children of each node, level by level from the root, in the shape `rsd_c`.",
    max_length=MAX_DEPTH, search=((2, 1, 1), (2, 2, 1), (3, 2, 1), (2, 2, 1, 1)),
)  # fmt: skip

RSD_C = ShapePart(
    make=lambda knobs: BranchingVector(knobs[VECTOR]),
    nodes=lambda knobs, depth: BranchingVector(knobs[VECTOR][:depth]).num_nodes,
    knobs=(VECTOR,),
    depth=lambda knobs: len(knobs[VECTOR]),
)
