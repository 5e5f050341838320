"""The trees of shapes, before any token is known: their ranks and their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

from paceline.shapes.base import Shape
from paceline.shapes.confidence import ConfidenceTree
from paceline.shapes.dyspec import DySpec
from paceline.shapes.iid import IndependentSequences
from paceline.shapes.kary import Kary
from paceline.shapes.rsd_c import BranchingVector
from paceline.shapes.rsd_s import StochasticBeam
from paceline.shapes.template import Template
from paceline.types import Budget

Path = tuple[int, ...]  # ranks from the root down
StaticShape = Kary | Template | BranchingVector | IndependentSequences
"""Shapes whose nodes do not depend on tokens; the last one only at temperature 0."""


@lru_cache(maxsize=4096)
def paths_of(shape: StaticShape, depth: int, nodes: int) -> tuple[Path, ...]:
    """The nodes of a static tree within a budget, parents before children."""
    if isinstance(shape, Template):
        return tuple(path for path in shape.paths if len(path) <= depth)[: max(0, nodes)]
    widths: Sequence[int]
    if isinstance(shape, BranchingVector):
        widths = shape.vector[:depth]
    elif isinstance(shape, IndependentSequences):
        widths = (shape.count, *[1] * (depth - 1))[:depth]
    else:
        widths = (shape.branching,) * depth
    found: list[Path] = []
    level: list[Path] = [()]
    for width in widths:
        children = ((*path, rank) for path in level for rank in range(width))
        level = list(islice(children, max(0, nodes - len(found))))
        found += level
    return tuple(found)


def size_of(shape: Shape | None, budget: Budget) -> tuple[int, int]:
    """Levels of a full draft, and the nodes that the drafter expands, the root among them.

    For trees that grow by their probabilities these are the largest possible numbers.
    """
    depth, nodes = budget.depth, budget.nodes
    if shape is None:  # a lookup expands no nodes
        return min(depth, nodes), 0
    if isinstance(shape, DySpec):
        return min(depth, nodes), nodes
    if isinstance(shape, ConfidenceTree):
        return depth, 1 + shape.branching * (depth - 1)
    if isinstance(shape, StochasticBeam):
        levels = min(depth, -(-nodes // shape.width))
        return levels, 1 + shape.width * (levels - 1)
    assert isinstance(shape, StaticShape)
    paths = paths_of(shape, depth, nodes)
    levels = max(map(len, paths), default=0)
    if isinstance(shape, Template):
        return levels, len({path[:-1] for path in paths})
    return levels, 1 + sum(len(path) < levels for path in paths)
