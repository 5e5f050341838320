"""SuffixDecoding: suffix trees with counts propose what most often followed the current suffix.

Oliaro et al. 2024 (arXiv 2411.04975). One tree over the session's own tokens, one over the
outputs of earlier sessions. For every suffix length m that occurs in a tree, a draft of at most
``draft_per_match * m + draft_offset`` tokens follows the most frequent continuation (or, with
``use_tree``, the most probable nodes best-first); its score is the sum of its tokens' estimated
probabilities, and the best score over all m and both trees wins.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.drafters.base import (
    DRAFT_PER_MATCH,
    FALLBACK_DEPTH,
    Drafter,
    DrafterPart,
    LookupDrafter,
)
from paceline.knobs import Knob
from paceline.types import Budget, Draft

if TYPE_CHECKING:
    from paceline.view import SessionView

MAX_DEPTH = 64  # tokens of a match together with its continuation
MAX_REQUESTS = 100_000  # outputs that the shared tree holds, as in the paper
MAX_NODES = 200_000  # of the shared tree, about 0.3 KB each


class SuffixNode:
    """An edge of the tree together with the node that it leads to.

    Attributes:
        text, start, end: the edge's tokens are ``text[start:end]``; the edge of a leaf grows with
            its text until ``end``. The text is that of the newest occurrence.
        count: occurrences that entered the edge.
        children: by first token; ``total`` is the sum of their counts, ``best`` the one with the
            highest count, the newest of those.
        stamp: when an occurrence last entered.
    """

    __slots__ = (
        "best", "children", "count", "end", "parent", "stamp", "start", "text", "total",
    )  # fmt: skip

    def __init__(self, text: list[int], start: int, end: int, parent: SuffixNode | None) -> None:
        self.text = text
        self.start = start
        self.end = end
        self.parent = parent
        self.children: dict[int, SuffixNode] = {}
        self.best: SuffixNode | None = None
        self.count = self.total = self.stamp = 0


class Place:
    """A point in the tree: ``offset`` tokens into the edge of ``node``."""

    __slots__ = ("node", "offset")

    def __init__(self, node: SuffixNode, offset: int) -> None:
        self.node = node
        self.offset = offset


class Candidate(NamedTuple):
    """A draft, and the sum of its tokens' estimated probabilities."""

    score: float
    token_ids: list[int]
    parents: list[int] | None  # None: a chain


class SuffixTree:
    """All substrings of some texts, up to ``depth`` tokens long, with their numbers of occurrences.

    Path-compressed: at most two nodes for each token. One text grows at its end; what it has
    twice is in :attr:`matches`, and a suffix that is there only once is a leaf, which grows by
    itself, so a new token costs as many steps as the longest repeated suffix has tokens.

    The estimated probability of token t after s is the number of occurrences of s + t over the
    number of occurrences of s that go on.

    Attributes:
        text: the tokens of the growing text.
        matches: the suffixes of ``text`` that occur elsewhere in the tree, the longest first; the
            last one has one token.
        num_nodes: in use.
    """

    def __init__(self, depth: int = MAX_DEPTH) -> None:
        self.depth = depth
        self.root = SuffixNode([], 0, 0, None)
        self.num_nodes = 0
        self.text: list[int] = []
        self.matches: list[Place] = []
        self._leaves: deque[SuffixNode] = deque(maxlen=depth)  # those that may still grow
        self._clock = 0

    def append(self, token: int) -> None:
        """Extend the growing text."""
        text, position, root = self.text, len(self.text), self.root
        text.append(token)
        places = self.matches
        places.append(Place(root, 0))
        suffix_start = position + 1 - len(places)
        going = []
        for place in places:
            node, offset = place.node, place.offset
            if node.start + offset < node.end:
                if node.text[node.start + offset] != token:
                    self._add_leaf(self._split(node, offset, position), token, suffix_start)
                    node = root
            elif (child := node.children.get(token)) is not None:
                self._enter(node, child)
                place.node = node = child
                offset = 0
            else:
                self._add_leaf(node, token, suffix_start)
                node = root
            if node is not root:  # it goes on being a repeated suffix
                place.offset = offset = offset + 1
                going.append(place)
                if node.start + offset == node.end:
                    node.text, node.start, node.end = text, position + 1 - offset, position + 1
            suffix_start += 1
        if going and len(going) == self.depth:
            del going[0]  # as long as the tree is deep
        self.matches = going

    def finish(self) -> list[int]:
        """End the growing text, so that another can begin; the tree keeps it.  # [length]"""
        text = self.text
        for place in self.matches:  # where a text ends, an edge ends
            if place.offset < place.node.end - place.node.start:
                self._split(place.node, place.offset, len(text))
        for leaf in self._leaves:
            leaf.end = min(leaf.end, len(text))
        self._leaves.clear()
        self.text, self.matches = [], []
        return text

    def remove(self, text: list[int]) -> None:
        """Remove the oldest finished text, as if the tree had never held it."""
        for first in range(len(text)):
            path = [self.root]
            at, end = first, min(first + self.depth, len(text))
            while at < end:
                node, parent = path[-1].children[text[at]], path[-1]
                at += node.end - node.start
                node.count -= 1
                parent.total -= 1
                if not node.count:
                    del parent.children[text[at - (node.end - node.start)]]
                    self._forget(node)
                if parent.best is node and parent is not self.root:
                    rest = parent.children.values()
                    parent.best = max(rest, key=lambda n: (n.count, n.stamp), default=None)
                if not node.count:
                    break
                path.append(node)
            for node in reversed(path[1:]):
                self._merge(node)

    def locate(self, context: list[int], length: int) -> Place | None:
        """Where the last ``length`` tokens of a context are; None if they do not occur."""
        node, at, end = self.root, len(context) - length, len(context)
        while True:
            child = node.children.get(context[at])
            if child is None:
                return None
            step = min(child.end - child.start, end - at)
            if child.text[child.start : child.start + step] != context[at : at + step]:
                return None
            node, at = child, at + step
            if at == end:
                return Place(node, step)

    def longest_match(self, context: list[int]) -> int:
        """Length of the longest suffix of a context that occurs; for trees of finished texts."""
        low, high = 0, min(self.depth, len(context))
        while low < high:  # what occurs, occurs without its first token too
            middle = (low + high + 1) // 2
            if self.locate(context, middle) is None:
                high = middle - 1
            else:
                low = middle
        return low

    def chain(self, place: Place, limit: int, min_prob: float) -> Candidate:
        """The most frequent continuation, while its probability is at least ``min_prob``."""
        tokens: list[int] = []
        score, prob, node, at = 0.0, 1.0, place.node, place.node.start + place.offset
        while True:
            # The tokens of an edge have one continuation each.
            piece = node.text[at : min(node.end, at + limit - len(tokens))]
            tokens += piece
            score += prob * len(piece)
            best = node.best
            if len(tokens) >= limit or best is None:
                return Candidate(score, tokens, None)
            prob *= best.count / node.total
            if prob < min_prob:
                return Candidate(score, tokens, None)
            node, at = best, best.start

    def best_first(self, place: Place, limit: int, max_depth: int, min_prob: float) -> Candidate:
        """The ``limit`` most probable nodes after a place, of those with ``min_prob``."""
        tokens: list[int] = []
        parents: list[int] = []
        score, order = 0.0, 0
        heap: list[tuple[float, int, SuffixNode, int, int, int]] = []
        # Going on from a node: its place, its index in the draft, its probability and depth.
        node, at, index, prob, depth = place.node, place.node.start + place.offset, -1, 1.0, 0
        while len(tokens) < limit:
            if depth < max_depth:
                if at < min(node.end, len(node.text)):
                    order += 1
                    heapq.heappush(heap, (-prob, order, node, at, index, depth + 1))
                else:
                    least = min_prob / prob * node.total
                    for child in node.children.values():
                        if child.count >= least:
                            order += 1
                            chance = prob * child.count / node.total
                            entry = (-chance, order, child, child.start, index, depth + 1)
                            heapq.heappush(heap, entry)
            if not heap:
                break
            negative, _, node, at, parent, depth = heapq.heappop(heap)
            prob = -negative
            index = len(tokens)
            tokens.append(node.text[at])
            parents.append(parent)
            score += prob
            at += 1
        return Candidate(score, tokens, parents)

    def _enter(self, node: SuffixNode, child: SuffixNode) -> None:
        self._clock += 1
        child.stamp = self._clock
        child.count += 1
        node.total += 1
        if node.best is None or child.count >= node.best.count:
            node.best = child

    def _add_leaf(self, node: SuffixNode, token: int, suffix_start: int) -> None:
        leaf = SuffixNode(self.text, len(self.text) - 1, suffix_start + self.depth, node)
        node.children[token] = leaf
        self.num_nodes += 1
        self._leaves.append(leaf)
        self._enter(node, leaf)

    def _split(self, node: SuffixNode, offset: int, position: int) -> SuffixNode:
        """Cut an edge where the growing text leaves it before ``position``; returns its top."""
        top = SuffixNode(self.text, position - offset, position, node.parent)
        parent, below = node.parent, node.text[node.start + offset]
        assert parent is not None
        parent.children[node.text[node.start]] = top
        if parent.best is node:
            parent.best = top
        top.count, top.stamp = node.count, node.stamp
        top.children[below] = top.best = node
        node.parent = top
        node.start += offset
        for place in self.matches:
            if place.node is node:
                if place.offset <= offset:
                    node.count -= 1  # it entered the edge but ended before this point
                    place.node = top
                else:
                    place.offset -= offset
        top.total = node.count
        self.num_nodes += 1
        return top

    def _merge(self, node: SuffixNode) -> None:
        """Undo a split where all occurrences go on the same way."""
        child, parent = node.best, node.parent
        if len(node.children) == 1 and child and child.count == node.count and parent:
            # The newest occurrence gave both edges their text.
            child.start -= node.end - node.start
            child.parent, child.stamp = parent, node.stamp
            parent.children[child.text[child.start]] = child
            if parent.best is node:
                parent.best = child
            self.num_nodes -= 1

    def _forget(self, node: SuffixNode) -> None:
        self.num_nodes -= 1
        for child in node.children.values():
            self._forget(child)


DRAFT_OFFSET = Knob[int](
    "draft_offset", int, 0, "Drafted tokens on top of `draft_per_match`.",
    ge=0, le=64, search=(0, 1, 2),
)  # fmt: skip
MIN_TOKEN_PROB = Knob[float](
    "min_token_prob", float, 0.1,
    "Suffix decoding drafts only tokens with at least this estimated probability.",
    ge=0.0, le=1.0, search=(0.05, 0.1, 0.3),
)  # fmt: skip
MIN_SCORE = Knob[float](
    "min_score", float, 0.0,
    "Least number of accepted tokens that a draft of suffix decoding must promise; otherwise the "
    "fallback drafts.",
    ge=0.0, le=256.0, search=(1.5, 3.0, 5.0),
)  # fmt: skip
USE_TREE = Knob[bool](
    "use_tree", bool, False,
    "Suffix decoding drafts a tree, best first, instead of a chain.",
    search=(False, True), costs=True,
)  # fmt: skip


class SuffixDecoding(LookupDrafter[SuffixTree]):
    """The better draft of the session's own tree and of the tree of earlier outputs.

    Args:
        fallback: drafts where the best score is below ``min_score``.
        max_requests, max_nodes: of the shared tree; the oldest outputs go first. They belong to
            the engine, so that one request cannot change what others find there.
    """

    def __init__(
        self,
        fallback: Drafter | None = None,
        *,
        max_requests: int = MAX_REQUESTS,
        max_nodes: int = MAX_NODES,
    ) -> None:
        super().__init__(fallback)
        self.shared = SuffixTree()
        self._outputs: deque[list[int]] = deque()
        self._max_requests = max_requests
        self._max_nodes = max_nodes

    def start(self, session: SessionView) -> SuffixTree:
        return SuffixTree()  # reads the prompt with the first draft, if one is wanted at all

    def find(self, session: SessionView, state: SuffixTree, budget: Budget) -> Draft | None:
        config = session.config
        _catch_up(state, session)
        context, shared = session.token_ids[-MAX_DEPTH:], self.shared
        best = _best_of(
            state, len(state.matches), lambda n: state.matches[-n], session, budget, None
        )
        longest = shared.longest_match(context)
        best = _best_of(shared, longest, lambda n: shared.locate(context, n), session, budget, best)
        if best is None or not best.token_ids or best.score < config[MIN_SCORE]:
            return None
        if best.parents is None:
            return Draft.chain(best.token_ids)
        return Draft(np.asarray(best.token_ids, np.int64), np.asarray(best.parents, np.int32))

    def finish(self, session: SessionView, state: SuffixTree) -> None:
        """Add the output to the shared tree, and remove the oldest outputs."""
        output = session.output_ids[-(self._max_nodes // 2) :]  # which has two nodes a token
        if not output:
            return
        for token in output:
            self.shared.append(token)
        self._outputs.append(self.shared.finish())
        while len(self._outputs) > self._max_requests or self.shared.num_nodes > self._max_nodes:
            self.shared.remove(self._outputs.popleft())


def _catch_up(tree: SuffixTree, session: SessionView) -> None:
    for token in session.token_ids[len(tree.text) :]:
        tree.append(token)


def _best_of(
    tree: SuffixTree,
    longest: int,
    place_of: Callable[[int], Place | None],
    session: SessionView,
    budget: Budget,
    best: Candidate | None,
) -> Candidate | None:
    """The best draft after any of the suffixes of 1 to ``longest`` tokens, or ``best`` still."""
    config = session.config
    factor, offset = config[DRAFT_PER_MATCH] or 0.0, config[DRAFT_OFFSET]
    min_prob = config[MIN_TOKEN_PROB]
    tree_shaped = config[USE_TREE] and not session.chain_only
    # The probabilities of a depth sum to 1 at most, so what bounds the depth bounds the score.
    cap = min(budget.depth, budget.nodes)
    bounds = [
        (min(cap, tree.depth - length, int(factor * length + offset)), length)
        for length in range(1, longest + 1)
    ]
    chosen = tree.depth  # length of the match that gave ``best``: a longer one wins a tie
    for highest, length in sorted(bounds, reverse=True):
        if highest <= 0 or (best is not None and highest <= best.score):
            break  # nor can those with lower bounds win
        place = place_of(length)
        if place is None:
            continue
        if tree_shaped:
            limit = min(int(factor * length + offset), budget.nodes)
            candidate = tree.best_first(place, limit, budget.depth, min_prob)
        else:
            candidate = tree.chain(place, highest, min_prob)
        if best is None or (candidate.score, length) > (best.score, chosen):
            best, chosen = candidate, length
    return best


_KNOBS = (USE_TREE, DRAFT_PER_MATCH.but(1.0), DRAFT_OFFSET, MIN_TOKEN_PROB)
SUFFIX = DrafterPart(
    make=lambda context: SuffixDecoding(), knobs=_KNOBS, replay="lookup", remembers=True
)
SUFFIX_OR_DRAFT_MODEL = DrafterPart(
    make=lambda context: SuffixDecoding(context.drafter("draft_model")),
    knobs=(*_KNOBS, MIN_SCORE.but(3.0), FALLBACK_DEPTH.but(6)),
    remembers=True,
    halves=("suffix_decoding", "draft_model"),
)

SUFFIX_OR_EAGLE3 = DrafterPart(
    make=lambda context: SuffixDecoding(context.drafter("eagle3")),
    knobs=(*_KNOBS, MIN_SCORE.but(2.0), FALLBACK_DEPTH.but(3)),
    remembers=True,
    halves=("suffix_decoding", "eagle3"),
)
