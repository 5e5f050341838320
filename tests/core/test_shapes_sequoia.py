"""Sequoia's dynamic programme against brute force."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.shapes.sequoia import expected_accepted, sequoia_paths
from paceline.shapes.template import Template


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "acceptance", [(0.6, 0.2), (0.4, 0.3, 0.2), (0.1, 0.1), (0.9,), (0.2, 0.6), (0.5, 0.0)]
)
def test_the_tree_is_the_best_of_all(acceptance: tuple[float, ...], depth: int) -> None:
    ranks = range(len(acceptance))
    every = [p for d in range(1, depth + 1) for p in itertools.product(ranks, repeat=d)]
    for nodes in range(1, 5):
        best = max(
            expected_accepted(tree, acceptance)
            for size in range(1, min(nodes, len(every)) + 1)
            for tree in itertools.combinations(every, size)
            if all(
                (len(path) == 1 or path[:-1] in tree)
                and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in tree)
                for path in tree
            )
        )
        paths = sequoia_paths(acceptance, nodes, depth)
        Template(paths)  # is a tree, parents first
        assert len(paths) <= nodes
        assert max(map(len, paths)) <= depth
        assert expected_accepted(paths, acceptance) == pytest.approx(best)


def recurrence(acceptance: tuple[float, ...], nodes: int, depth: int) -> float:
    """The paper's programme as it is printed: T[m][l][b], the root counted, exactly b branches."""

    @cache
    def best(m: int, level: int, branches: int) -> float:
        if m < 1 or level < 1:
            return -math.inf
        if branches == 0:
            return 1.0 if m == 1 else -math.inf
        rest = range(1, m)  # nodes of the tree without its last branch
        return max(
            (
                best(y, level, branches - 1) + acceptance[branches - 1] * any_branches(m - y, level)
                for y in rest
            ),
            default=-math.inf,
        )

    def any_branches(m: int, level: int) -> float:
        return max(best(m, level - 1, b) for b in range(len(acceptance) + 1))

    sizes = range(1, nodes + 2)  # it may leave nodes unused
    return max(best(m, depth + 1, b) for m in sizes for b in range(len(acceptance) + 1))


@settings(max_examples=25)
@given(
    st.lists(st.floats(0.01, 0.6), min_size=1, max_size=4),
    st.integers(1, 16),
    st.integers(1, 5),
)
def test_the_value_is_that_of_the_papers_recurrence(
    rates: list[float], nodes: int, depth: int
) -> None:
    """For larger trees than brute force could enumerate."""
    acceptance = tuple(rates)
    value = 1.0 + expected_accepted(sequoia_paths(acceptance, nodes, depth), acceptance)
    assert value == pytest.approx(recurrence(acceptance, nodes, depth), rel=1e-9)


def test_more_nodes_and_levels_never_hurt() -> None:
    acceptance = (0.7, 0.15, 0.05)
    values = [
        [expected_accepted(sequoia_paths(acceptance, n, d), acceptance) for n in range(1, 20)]
        for d in range(1, 8)
    ]
    assert (np.diff(values, axis=0) >= -1e-12).all()
    assert (np.diff(values, axis=1) >= -1e-12).all()
