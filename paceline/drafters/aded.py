"""ADED: a trigram table searched by Monte Carlo tree search.

Liu et al. 2024 (arXiv 2407.12021): the table maps two tokens to the likely third ones, and
trigrams of the latest context weigh more with every round. The search walks the table from the
last two tokens; its most visited continuations, each with one more token, are the draft.

The table here is learnt from the prompts and outputs that the engine sees, not from a corpus.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paceline.drafters.base import Drafter, DrafterPart
from paceline.knobs import Knob
from paceline.types import EMPTY_DRAFT, Budget, Draft, Outcome

if TYPE_CHECKING:
    from paceline.view import SessionView

Bigram = tuple[int, int]
Successors = tuple[tuple[int, ...], tuple[float, ...]]  # tokens and weights, best first

NUM_SUCCESSORS = 12  # of a bigram that take part
WINDOW = 16  # latest tokens whose trigrams gain weight in every round
GAIN, HIGHEST_WEIGHT = 0.04, 3.0
NUM_PREFIXES = 24  # most visited continuations that make the draft
EXPLORATION, EXPLORATION_BASE = 32.0, 8.0


class TrigramTable:
    """Counts how often a token followed two others; evicts the bigram seen least recently.

    Args:
        capacity: bigrams at most, each with at most twice ``NUM_SUCCESSORS`` counts.
    """

    def __init__(self, capacity: int = 1 << 15) -> None:
        self._capacity = capacity
        self._counts: OrderedDict[Bigram, dict[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def learn(self, token_ids: Sequence[int]) -> None:
        """Count all trigrams of a text."""
        for first, second, third in zip(token_ids, token_ids[1:], token_ids[2:], strict=False):
            counts = self._counts.setdefault((first, second), {})
            self._counts.move_to_end((first, second))
            counts[third] = counts.get(third, 0) + 1
            if len(counts) > 2 * NUM_SUCCESSORS:
                # Keep the newest: otherwise no new token could ever enter.
                old = sorted(counts.items(), key=lambda item: item[1])[: NUM_SUCCESSORS + 1]
                for token, _ in old:
                    if token != third:
                        del counts[token]
        while len(self._counts) > self._capacity:
            self._counts.popitem(last=False)

    def probabilities(self, bigram: Bigram) -> dict[int, float]:
        """Share of each token among those that followed ``bigram``."""
        counts = self._counts.get(bigram)
        if counts is None:
            return {}
        total = sum(counts.values())
        return {token: count / total for token, count in counts.items()}


class SearchNode:
    """A continuation in the search tree."""

    __slots__ = ("bigram", "children", "score", "visits", "weight")

    def __init__(self, bigram: Bigram, weight: float) -> None:
        self.bigram = bigram
        self.weight = weight
        self.visits = 0
        self.score = 0.0
        self.children: list[SearchNode] | None = None  # None until the node is visited again


class _State:
    """The weights that a session adds to the table."""

    def __init__(self, seed: int) -> None:
        self.num_learnt = 0  # committed tokens that the table has seen
        self.gains: dict[tuple[int, int, int], float] = {}
        self.random = random.Random(seed)


SEARCH_ITERATIONS = Knob[int](
    "search_iterations", int, 50, "Iterations of ADED's tree search in each round.",
    ge=1, le=1000, search=(20, 50, 100), costs=True,
)  # fmt: skip


class Aded(Drafter):
    """A token tree from a search over trigrams; deterministic for a request and a table."""

    def __init__(self, table: TrigramTable) -> None:
        self.table = table
        self._states: dict[str, _State] = {}

    def open(self, session: SessionView) -> None:
        self._states[session.session_id] = _State(session.params.seed)
        self._learn(session)

    def close(self, session: SessionView) -> None:
        self._states.pop(session.session_id, None)

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        for session in sessions:
            if session.session_id in self._states:
                self._learn(session)

    def _learn(self, session: SessionView) -> None:
        state = self._states[session.session_id]
        self.table.learn(session.token_ids[max(0, state.num_learnt - 2) :])
        state.num_learnt = session.length

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._propose(s, b) for s, b in zip(sessions, budgets, strict=True)]

    def _propose(self, session: SessionView, budget: Budget) -> Draft:
        if min(budget.depth, budget.nodes) <= 0 or session.length < 2:
            return EMPTY_DRAFT
        state, latest = self._states[session.session_id], session.token_ids[-WINDOW:]
        for trigram in zip(latest, latest[1:], latest[2:], strict=False):
            state.gains[trigram] = min(HIGHEST_WEIGHT, state.gains.get(trigram, 0.0) + GAIN)
        successors = SessionTable(self.table, state.gains)
        iterations = session.config[SEARCH_ITERATIONS]
        root = search(
            (latest[-2], latest[-1]), successors, iterations, budget.depth - 1, state.random
        )
        paths = most_visited(root, 1 if session.chain_only else NUM_PREFIXES)
        return _trie([_extended(path, root, successors) for path in paths], budget)


class SessionTable(dict[Bigram, Successors]):
    """The table plus a session's gains; caches the lookup of each bigram during a search."""

    def __init__(self, table: TrigramTable, gains: dict[tuple[int, int, int], float]) -> None:
        super().__init__()
        self._table = table
        self._gains = gains

    def __missing__(self, bigram: Bigram) -> Successors:
        weights = {
            token: min(HIGHEST_WEIGHT, share + self._gains.get((*bigram, token), 0.0))
            for token, share in self._table.probabilities(bigram).items()
        }
        tokens = sorted(weights, key=lambda token: (-weights[token], token))[:NUM_SUCCESSORS]
        self[bigram] = tuple(tokens), tuple(weights[token] for token in tokens)
        return self[bigram]


def search(
    bigram: Bigram,
    successors: dict[Bigram, Successors],
    iterations: int,
    depth: int,
    rng: random.Random,
) -> SearchNode:
    """Monte Carlo tree search with the PUCT rule over continuations of ``bigram``.

    Each iteration walks down to a node that was not expanded yet, expands it, completes it to
    ``depth`` with tokens drawn from the table, and adds the share of ``depth`` that the table
    could fill to the score of every node on the way.
    """
    root = SearchNode(bigram, 1.0)
    for _ in range(iterations):
        node, path = root, [root]
        while len(path) <= depth:
            if node.children is None:
                tokens, weights = successors[node.bigram]
                second = node.bigram[1]
                node.children = [
                    SearchNode((second, token), weight)
                    for token, weight in zip(tokens, weights, strict=True)
                ]
                if node is not root:
                    break
            if not node.children:
                break
            node = _select(node)
            path.append(node)
        reached, end = len(path) - 1, node.bigram
        while reached < depth:
            tokens, weights = successors[end]
            if not tokens:
                break
            end = (end[1], rng.choices(tokens, weights)[0])
            reached += 1
        value = reached / depth if depth else 0.0
        for node in path:
            node.visits += 1
            node.score += value
    return root


def _select(parent: SearchNode) -> SearchNode:
    assert parent.children
    if len(parent.children) == 1:
        return parent.children[0]
    visits = parent.visits
    scale = (EXPLORATION + math.log((visits + EXPLORATION_BASE + 1) / EXPLORATION_BASE)) * (
        math.sqrt(visits)
    )
    best, highest = parent.children[0], -1.0
    for child in parent.children:
        count = child.visits
        value = scale * child.weight / (1 + count)
        if count:
            value += child.score / count
        if value > highest:
            best, highest = child, value
    return best


def most_visited(root: SearchNode, count: int) -> list[tuple[int, ...]]:
    """Token paths of the ``count`` most visited ends of the search tree, best first.

    An end is a visited node without visited children. The root is one if nothing was visited.
    """
    ends: list[tuple[int, tuple[int, ...]]] = []
    stack: list[tuple[SearchNode, tuple[int, ...]]] = [(root, ())]
    while stack:
        node, path = stack.pop()
        visited = [child for child in node.children or () if child.visits]
        stack += [(child, (*path, child.bigram[1])) for child in visited]
        if not visited:
            ends.append((node.visits, path))
    ends.sort(key=lambda end: -end[0])
    return [path for _, path in ends[:count]]


def _extended(
    path: tuple[int, ...], root: SearchNode, successors: dict[Bigram, Successors]
) -> tuple[int, ...]:
    """The path and the heaviest token after it, if the table has one."""
    before = (*root.bigram, *path)
    tokens, _ = successors[before[-2], before[-1]]
    return (*path, tokens[0]) if tokens else path


def _trie(paths: Sequence[tuple[int, ...]], budget: Budget) -> Draft:
    """The union of the paths, first path first, within the budget."""
    index: dict[tuple[int, int], int] = {}
    for path in paths:
        node = -1
        for token in path[: budget.depth]:
            if (node, token) not in index:
                if len(index) >= budget.nodes:
                    break
                index[node, token] = len(index)
            node = index[node, token]
    if not index:
        return EMPTY_DRAFT
    parents, tokens = zip(*index, strict=True)
    return Draft(np.array(tokens, np.int64), np.array(parents, np.int32))


ADED = DrafterPart(make=lambda context: Aded(TrigramTable()), knobs=(SEARCH_ITERATIONS,))
