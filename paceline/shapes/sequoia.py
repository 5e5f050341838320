"""The best fixed tree for given acceptance rates, by dynamic programming.

Chen et al. 2024, Sequoia (arXiv 2402.12374): ``p[r]`` is the probability that the child of rank
``r`` is accepted, and verification reaches a node with the product of the rates along its path.
Dynamic programming finds the tree of a given size with the highest sum of these products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated

import numpy as np
from pydantic import Field

from paceline.knobs import Knob

Path = tuple[int, ...]

FIRST_RATES = (0.6, 0.15, 0.07, 0.04, 0.02, 0.01)
"""What to expect of a drafter of which nothing was measured: those of the demo's draft model."""

RANK_ACCEPTANCE = Knob[tuple[float, ...] | None](
    "rank_acceptance", tuple[Annotated[float, Field(ge=0, le=1)], ...], None,
    "Probability that the drafter's first, second, ... candidate is accepted. The shape `sequoia` "
    "builds its tree from it. By default sessions count it for their drafter and target, and "
    f"later ones use it; until then it is {', '.join(map(str, FIRST_RATES))}.",
    max_length=16,
)  # fmt: skip


@lru_cache(maxsize=64)
def sequoia_paths(acceptance: tuple[float, ...], nodes: int, depth: int) -> tuple[Path, ...]:
    """The best tree of at most ``nodes`` nodes (the root not counted) and ``depth`` levels.

    ``value[b][l][m]`` is the highest expected number of accepted nodes if ``m`` nodes, in at most
    ``l`` levels below a node, are spent on its children from rank ``b`` on (Sequoia's
    ``T[m][l][b]``, counted from the other end, so that unused budget needs no special case).

    Args:
        acceptance: probability that each rank is accepted; further ranks are not used.

    Returns:
        Paths of ranks, the most probable first, each after its parent's.
    """
    ranks = len(acceptance)
    value = np.zeros((ranks + 1, depth + 1, nodes + 1))
    # Nodes given to the child of this rank and below it, the child included.
    spent = np.zeros((ranks, depth + 1, nodes + 1), np.int64)
    for level in range(1, depth + 1):
        for rank in reversed(range(ranks)):
            for m in range(1, nodes + 1):
                # Of m nodes, y go to this child (1 of them is itself), m - y to later siblings.
                gain = acceptance[rank] * (1.0 + value[0, level - 1, :m])
                totals = gain + value[rank + 1, level, m - 1 :: -1]
                best = int(totals.argmax())
                value[rank, level, m] = totals[best]
                spent[rank, level, m] = best + 1
    found: list[tuple[float, Path]] = []
    pending: list[tuple[float, Path, int, int]] = [(1.0, (), depth, nodes)]
    while pending:
        reach, path, level, m = pending.pop()
        for rank in range(ranks):
            if level == 0 or m == 0:
                break
            y = int(spent[rank, level, m])
            chance = reach * acceptance[rank]
            found.append((chance, (*path, rank)))
            pending.append((chance, (*path, rank), level - 1, y - 1))
            m -= y
    found.sort(key=lambda node: (-node[0], len(node[1]), node[1]))
    return tuple(path for _, path in found)


def expected_accepted(paths: Iterable[Path], acceptance: Sequence[float]) -> float:
    """Expected number of accepted nodes of a tree."""
    return float(sum(np.prod([acceptance[rank] for rank in path]) for path in paths))
