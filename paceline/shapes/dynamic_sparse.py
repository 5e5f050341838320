"""The best trees for a drafter whose guesses are computed while the previous tree is verified.

Chen et al. 2024, parallel prompt decoding (arXiv 2405.18628), the dynamic sparse tree. Each pseudo
token behind a node guesses one token further ahead, for the next round: if the last accepted node
has ``m`` of them, the next tree can be ``m`` levels deep. So a tree divides its size between nodes
to accept now and pseudo tokens for later. The number of guesses that a round starts with is its
state, and the states form a Markov chain.

The paper grows candidates greedily and removes the pseudo tokens whose loss costs least. This
module finds the best trees of all states exactly, in turns until nothing changes: solving the chain
gives the value of a further guess, and dynamic programming gives the best tree for these values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Path = tuple[int, ...]
Accuracy = tuple[tuple[float, ...], ...]
_Values = npt.NDArray[np.float64]
_MAX_TURNS = 100


@dataclass(frozen=True, slots=True)
class SparseTree:
    """Nodes as paths of ranks, and how many pseudo tokens follow each of them.

    Attributes:
        paths: parents before their children, siblings from rank 0 on, the likeliest first.
        pseudo: number of pseudo tokens after each node and after the last committed token, whose
            path is ``()``; unlisted ones have 0.
    """

    paths: tuple[Path, ...]
    pseudo: Mapping[Path, int]

    @property
    def size(self) -> int:
        """Number of nodes and pseudo tokens together."""
        return len(self.paths) + sum(self.pseudo.values())


def reach(path: Path, accuracy: Accuracy) -> float:
    """Probability that a node is accepted.

    Args:
        accuracy: for each distance, how often the guess of each rank is right.
    """
    return float(np.prod([accuracy[depth][rank] for depth, rank in enumerate(path)]))


def expected_accepted(tree: SparseTree, accuracy: Accuracy) -> float:
    """Expected number of accepted nodes."""
    return sum(reach(path, accuracy) for path in tree.paths)


def next_states(tree: SparseTree, accuracy: Accuracy) -> _Values:
    """Distribution of the number of guesses that the next round starts with.

    # float64 [num_guesses + 1]
    """
    result = np.zeros(len(accuracy) + 1)
    ends = {path: reach(path, accuracy) for path in ((), *tree.paths)}
    for path in tree.paths:
        ends[path[:-1]] -= reach(path, accuracy)
    for path, chance in ends.items():
        result[tree.pseudo.get(path, 0)] += chance
    return result


def stationary(transition: _Values) -> _Values:
    """The share of rounds in each state, by a linear solve.

    Args:
        transition: rows sum to 1.  # float64 [num_states, num_states]
    """
    count = len(transition)
    balance = np.vstack([transition.T - np.eye(count), np.ones(count)])
    shares: _Values = np.linalg.lstsq(balance, np.eye(count + 1)[count], rcond=None)[0]
    shares = np.maximum(shares, 0.0)
    shares /= shares.sum()
    return shares


def expected_tokens(trees: Sequence[SparseTree], accuracy: Accuracy) -> float:
    """Mean committed tokens per round in the long run, the target's own included.

    Args:
        trees: one tree for each state.
    """
    shares = stationary(np.stack([next_states(tree, accuracy) for tree in trees]))
    accepted = [expected_accepted(tree, accuracy) for tree in trees]
    return 1.0 + float(shares @ np.array(accepted))


@lru_cache(maxsize=64)
def best_trees(accuracy: Accuracy, size: int) -> tuple[SparseTree, ...]:
    """The trees with the most expected tokens a round, one for each number of guesses.

    Args:
        accuracy: for each distance, how often the guess of each rank is right; the ranks of a
            distance sum to at most 1.
        size: most nodes and pseudo tokens of a tree, together.

    Returns:
        ``len(accuracy) + 1`` trees; the tree of state ``s`` is at most ``s`` levels deep.
    """
    states = range(len(accuracy) + 1)
    # To begin with, a guess is worth its probability of acceptance.
    firsts = [row[0] for row in accuracy]
    values = np.array([sum(np.prod(firsts[: d + 1]) for d in range(s)) for s in states])
    best: tuple[SparseTree, ...] = ()
    most = -1.0
    for _ in range(_MAX_TURNS):
        trees = tuple(_best_tree(accuracy, size, state, values) for state in states)
        tokens = expected_tokens(trees, accuracy)
        if tokens <= most + 1e-12:
            break
        best, most = trees, tokens
        values = _state_values(trees, accuracy)
    return best


def _state_values(trees: Sequence[SparseTree], accuracy: Accuracy) -> _Values:
    """How many more tokens a start in each state gives, compared with a start in state 0."""
    count = len(trees)
    transition = np.stack([next_states(tree, accuracy) for tree in trees])
    rewards = np.array([expected_accepted(tree, accuracy) for tree in trees])
    # values - transition @ values + gain = rewards, and values[0] = 0.
    system = np.zeros((count + 1, count + 1))
    system[:count, :count] = np.eye(count) - transition
    system[:count, count] = 1.0
    system[count, 0] = 1.0
    solution: _Values = np.linalg.lstsq(system, np.append(rewards, 0.0), rcond=None)[0]
    return solution[:count]


def _best_tree(accuracy: Accuracy, size: int, state: int, values: _Values) -> SparseTree:
    """The tree with the highest sum of expected accepted nodes and value of the next state.

    ``below[d][b]`` is that sum below an accepted node at depth d with ``b`` rows to spend;
    ``gains[d][m][r][b]`` is what its children from rank r on add if it has m pseudo tokens.
    """
    most_pseudo = len(accuracy)
    below = np.zeros((state + 1, size + 1))
    chosen = np.zeros((state + 1, size + 1), np.int64)  # pseudo tokens
    spent: dict[tuple[int, int], npt.NDArray[np.int64]] = {}  # (depth, m) -> [rank, b]
    for depth in reversed(range(state + 1)):
        totals = np.full((most_pseudo + 1, size + 1), -np.inf)
        for m in range(min(most_pseudo, size) + 1):
            gains = np.zeros(size + 1)
            if depth < state:
                ranks = accuracy[depth][:size]
                spent[depth, m] = np.zeros((len(ranks), size + 1), np.int64)
                for rank in reversed(range(len(ranks))):
                    # If the child is accepted, the round does not end at this node.
                    worth = ranks[rank] * (1.0 + below[depth + 1] - values[m])
                    later, gains = gains, np.zeros(size + 1)
                    for b in range(1, size + 1):
                        sums = worth[:b] + later[b - 1 :: -1]
                        y = int(sums.argmax())
                        if sums[y] > 0.0:
                            gains[b], spent[depth, m][rank, b] = sums[y], y + 1
            totals[m, m:] = values[m] + gains[: size + 1 - m]
        chosen[depth] = totals.argmax(0)
        below[depth] = totals.max(0)
    found: list[tuple[float, Path]] = []
    pseudo: dict[Path, int] = {}
    pending: list[tuple[Path, int]] = [((), size)]
    while pending:
        path, b = pending.pop()
        depth, m = len(path), int(chosen[len(path), b])
        if m:
            pseudo[path] = m
        b -= m
        for rank in range(len(accuracy[depth][:size]) if depth < state else 0):
            y = int(spent[depth, m][rank, b])
            if not y:
                break
            child = (*path, rank)
            found.append((-reach(child, accuracy), child))
            pending.append((child, y - 1))
            b -= y
    # A child is never likelier than its parent, and of equals the shorter path comes first.
    found.sort(key=lambda node: (node[0], len(node[1]), node[1]))
    return SparseTree(tuple(path for _, path in found), pseudo)
