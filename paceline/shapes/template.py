"""Trees of a fixed form, given as the ranks of their nodes.

The sparse trees of Medusa, Cai et al. 2024 (arXiv 2401.10774) and the static tree of Token
Recycling, Luo et al. 2024 (arXiv 2408.08696). This module makes the built-in templates: it chooses
nodes best first from assumed acceptance rates, with the sizes that the papers give.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from paceline.errors import InvalidArgument
from paceline.knobs import MAX_DEPTH, MAX_NODES, Knob
from paceline.shapes.base import ALL_DRAWS, Expander, Level, ShapePart, TreeBuilder, grow
from paceline.types import Budget, Draft, Draws

if TYPE_CHECKING:
    from paceline.view import SessionView

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """The path ``(i1, .., id)`` leads to the ``i1``-th candidate, then to its ``i2``-th, ...

    Attributes:
        paths: every node once, with ranks from 0 on, parents before their children, the most
            useful nodes first: a smaller budget takes the first ones that are not too deep.

    Raises:
        InvalidArgument: the paths do not form a tree.
    """

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        known: set[Path] = {()}
        for path in self.paths:
            if not path or path in known or path[:-1] not in known or min(path) < 0:
                raise InvalidArgument(
                    "template",
                    list(path),
                    "paths of ranks >= 0, each once and after the path of its parent",
                )
            known.add(path)
        if not self.paths or self.depth > MAX_DEPTH:
            raise InvalidArgument("template", self.depth, f"1 to {MAX_DEPTH} levels")

    @property
    def draws(self) -> frozenset[Draws]:
        return ALL_DRAWS - {Draws.WITH_REPLACEMENT}

    @property
    def depth(self) -> int:
        return max(map(len, self.paths), default=0)

    def build(
        self, expander: Expander, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[Draft]:
        def step(tree: TreeBuilder, frontier: list[int], level: Level, row: int) -> list[int]:
            wanted = _children(self.paths, tree.budget.depth, tree.budget.nodes)
            inner = []
            for i, node in enumerate(frontier):
                path = _path(tree, node)
                ranks = wanted[path]
                choices = tree.choose(node, level, row + i, max(ranks) + 1)
                for rank in ranks:
                    if rank < len(choices.tokens):
                        added = tree.add(node, choices, rank)
                        if (*path, rank) in wanted:
                            inner.append(added)
            return inner

        trees = [TreeBuilder(s, b) for s, b in zip(sessions, budgets, strict=True)]
        width = max(map(max, self.paths)) + 1
        grow(expander, trees, step, lambda depth: width)
        return [tree.draft() for tree in trees]


def _path(tree: TreeBuilder, node: int) -> Path:
    ranks: list[int] = []
    while node >= 0:
        ranks.append(tree.rank_of[node])
        node = tree.parents[node]
    return tuple(reversed(ranks))


@lru_cache(maxsize=256)
def _children(paths: tuple[Path, ...], depth: int, nodes: int) -> Mapping[Path, list[int]]:
    """Ranks of the children of each inner node within a budget, by the node's path."""
    result: dict[Path, list[int]] = {}
    for path in [path for path in paths if len(path) <= depth][:nodes]:
        result.setdefault(path[:-1], []).append(path[-1])
    for ranks in result.values():
        ranks.sort()
    return result


def best_first(acceptance: Sequence[Sequence[float]], nodes: int) -> tuple[Path, ...]:
    """The tree of ``nodes`` nodes with the highest expected accepted length.

    Args:
        acceptance: for each depth, the probability that each rank is the right one:
            non-increasing in the rank, and at most 1.
    """
    paths: list[Path] = []
    heap: list[tuple[float, Path]] = [(-acceptance[0][0], (0,))]
    while heap and len(paths) < nodes:
        value, path = heapq.heappop(heap)
        paths.append(path)
        ranks, rank = acceptance[len(path) - 1], path[-1]
        if rank + 1 < len(ranks):
            heapq.heappush(heap, (value / ranks[rank] * ranks[rank + 1], (*path[:-1], rank + 1)))
        if len(path) < len(acceptance):
            heapq.heappush(heap, (value * acceptance[len(path)][0], (*path, 0)))
    return tuple(paths)


def by_widths(widths: Sequence[int], ranks: int) -> tuple[Path, ...]:
    """A tree with the given number of nodes at each level, those with the lowest sums of ranks."""
    levels: list[list[Path]] = [[()]]
    for width in widths:
        children = [(*path, rank) for path in levels[-1] for rank in range(ranks)]
        levels.append(sorted(children, key=lambda path: (sum(path), path))[:width])
    found = [path for level in levels[1:] for path in level]
    # A level counts as much as a rank, so parents come before their children.
    return tuple(sorted(found, key=lambda path: (sum(path) + len(path), path)))


# Four heads: their first guesses are right 60, 50, 42 and 36 % of the time, each further guess half
# as often as the one before.
_HEADS = [[first * 0.5**rank for rank in range(10)] for first in (0.60, 0.50, 0.42, 0.36)]

TEMPLATES: Mapping[str, tuple[Path, ...]] = {
    "medusa_63": best_first(_HEADS, 63),
    "token_recycling_80": by_widths((8, 21, 25, 15, 8, 3), 8),
}


TEMPLATE_KNOB = Knob[str | tuple[Path, ...]](
    "template",
    str
    | Annotated[
        tuple[
            Annotated[
                tuple[Annotated[int, Field(ge=0, le=63)], ...],
                Field(strict=False, min_length=1, max_length=MAX_DEPTH),
            ],
            ...,
        ],
        Field(strict=False, min_length=1, max_length=MAX_NODES),
    ],
    "token_recycling_80",
    "Tree of the shape `template`: `medusa_63`, `token_recycling_80`, or the paths of its nodes as "
    "lists of ranks, a parent before its children.",
    search=("medusa_63", "token_recycling_80"),
)  # fmt: skip


def template_paths(named: str | tuple[Path, ...]) -> tuple[Path, ...]:
    """The paths of a built-in template, given its name, or the given paths themselves."""
    if not isinstance(named, str):
        return named
    if named not in TEMPLATES:
        allowed = f"{', '.join(sorted(TEMPLATES))}, or a list of paths of ranks"
        raise InvalidArgument("template", named, allowed)
    return TEMPLATES[named]


TEMPLATE = ShapePart(
    make=lambda knobs: Template(template_paths(knobs[TEMPLATE_KNOB])),
    nodes=lambda knobs, depth: sum(
        len(path) <= depth for path in template_paths(knobs[TEMPLATE_KNOB])
    ),
    knobs=(TEMPLATE_KNOB,),
    depth=lambda knobs: max(map(len, template_paths(knobs[TEMPLATE_KNOB]))),
)
