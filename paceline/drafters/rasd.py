"""RASD: a retrieved tree, pruned by the draft model's probabilities and fused with its tree.

Quan et al. 2025 (arXiv 2503.03434). Retrieval looks for the last tokens in the session's own text
and in a bounded store of earlier outputs, and makes a tree of what followed there. The draft model
grows its own tree; a retrieved token is dropped, with everything below it, where the draft model
was asked at the same prefix and gave that token less than ``prune_threshold``. Retrieved tokens at
prefixes that the draft model never saw cost no forward, so they stay as their prefix does. Both
trees are then fused along their longest common prefixes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from paceline.drafters.base import Drafter, DrafterContext, DrafterPart, grow, part_outcome
from paceline.errors import InvalidArgument
from paceline.knobs import Knob
from paceline.shapes.base import SparseRows
from paceline.tree import merge, subset
from paceline.types import EMPTY_DRAFT, Budget, Draft, Outcome

if TYPE_CHECKING:
    import torch

    from paceline.shapes.base import Expander, Rows
    from paceline.view import SessionView

STORE_TOKENS = 65_536  # of earlier outputs, all together; the oldest output goes first
MAX_PLACES = 32  # latest places of a pair of tokens that are looked at, in each store
MAX_MATCH = 16  # tokens before a place that are compared

Path = tuple[int, ...]  # the tokens from the root's child down to a node


class Store:
    """Texts, and where each pair of neighbouring tokens occurs in them.

    Args:
        max_tokens: of all texts together; the oldest texts go first.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._texts: dict[int, list[int]] = {}  # in the order of their numbers
        self._places: dict[Path, deque[tuple[int, int]]] = {}  # pair -> (text, place after it)
        self._next_text = 0
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """A new text."""
        self._texts[self._next_text] = []
        self._next_text += 1
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """More tokens of the newest text."""
        number = self._next_text - 1
        text = self._texts[number]
        for token in token_ids:
            if len(text) >= 2:  # something follows the pair, so it is a place to copy from
                places = self._places.setdefault((text[-2], text[-1]), deque())
                places.append((number, len(text)))
            text.append(token)
        self.num_tokens += len(token_ids)
        while self.num_tokens > self._max_tokens and len(self._texts) > 1:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        number = next(iter(self._texts))
        text = self._texts.pop(number)
        self.num_tokens -= len(text)
        for pair in pairwise(text):
            places = self._places.get(pair)
            while places and places[0][0] == number:  # the oldest text's places are the first
                places.popleft()
            if places is not None and not places:
                del self._places[pair]

    def find(self, tail: list[int], depth: int) -> Iterator[tuple[int, list[int]]]:
        """What followed earlier occurrences of the end of ``tail``, the latest first.

        Yields the number of tokens that matched, from 2 up, and at most ``depth`` tokens.
        """
        places = self._places.get(tuple(tail[-2:]), ())
        for number, place in list(places)[: -MAX_PLACES - 1 : -1]:
            text, match = self._texts[number], 2
            longest = min(MAX_MATCH, place, len(tail))
            while match < longest and text[place - 1 - match] == tail[-1 - match]:
                match += 1
            yield match, text[place : place + depth]


def retrieve(stores: Sequence[Store], tail: list[int], depth: int, nodes: int) -> Draft:
    """The best ``nodes`` continuations of ``tail``: a node's weight adds up the tokens matched."""
    index: dict[Path, int] = {}
    token_ids: list[int] = []
    parents: list[int] = []
    weights: list[int] = []
    for store in stores:
        for match, tokens in store.find(tail, depth):
            path: Path = ()
            parent = -1
            for token in tokens:
                path = (*path, token)
                if path not in index:
                    index[path] = len(token_ids)
                    token_ids.append(token)
                    parents.append(parent)
                    weights.append(0)
                parent = index[path]
                weights[parent] += match
    # A parent weighs no less than its child and comes before it, so it is kept with it.
    keep = np.sort(np.argsort(-np.asarray(weights, np.int64), kind="stable")[: max(0, nodes)])
    tree = Draft(np.asarray(token_ids, np.int64), np.asarray(parents, np.int32))
    return subset(tree, keep)


class _Watched:
    """The draft model as a shape sees it; keeps what it said after each prefix."""

    def __init__(self, model: Expander) -> None:
        self._model = model
        self.rows: dict[tuple[str, Path], torch.Tensor] = {}  # logits
        self._path_of: dict[tuple[str, int], Path] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)  # hidden states, for length controllers

    def root(self, sessions: Sequence[SessionView]) -> Rows:
        rows = self._model.root(sessions)
        self._keep(rows, [(session.session_id, ()) for session in sessions])
        return rows

    def expand(
        self, sessions: Sequence[SessionView], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> Rows:
        rows, keys = self._model.expand(sessions, frontiers), []
        for session, frontier in zip(sessions, frontiers, strict=True):
            name = session.session_id
            for node, token, parent in frontier:
                path = (*self._path_of.get((name, parent), ()), token)
                self._path_of[name, node] = path
                keys.append((name, path))
        self._keep(rows, keys)
        return rows

    def _keep(self, rows: Rows, keys: Sequence[tuple[str, Path]]) -> None:
        if not isinstance(rows, SparseRows):
            self.rows.update(zip(keys, rows.float(), strict=True))


PRUNE_THRESHOLD = Knob[float](
    "prune_threshold", float, 0.01,
    "`rasd` drops retrieved tokens to which the draft model gives less than this probability.",
    ge=0.0, le=1.0, search=(0.003, 0.01, 0.03),
)  # fmt: skip


def prune(tree: Draft, known: dict[Path, torch.Tensor], threshold: float) -> Draft:
    """``tree`` without the tokens (and all below them) that the draft model finds unlikely.

    Args:
        known: the draft model's logits after the prefixes that it was asked for.  # [vocab] each
        threshold: least probability of a token that stays.
    """
    totals = {path: float(row.logsumexp(-1)) for path, row in known.items()}
    paths: dict[int, Path] = {-1: ()}
    for node, (token, parent) in enumerate(
        zip(tree.token_ids.tolist(), tree.parent_indices.tolist(), strict=True)
    ):
        before = paths.get(parent)
        if before is None:
            continue
        row = known.get(before)
        if row is None or np.exp(float(row[token]) - totals[before]) >= threshold:
            paths[node] = (*before, token)
    return subset(tree, np.asarray([node for node in paths if node >= 0], np.int64))


class Rasd(Drafter):
    """The draft model with retrieval; state is each session's own text and its last base draft.

    Retrieval may have up to half of the node budget when the draft model grows its tree, and what
    that leaves afterwards. Rules that verify chains only get the draft model's own draft, or the
    best retrieved chain where it has none.
    """

    def __init__(self, context: DrafterContext) -> None:
        model = context.drafter("draft_model")
        runner = getattr(model, "runner", None)
        if runner is None:
            raise InvalidArgument("method", "rasd", "a draft model that runs in this process")
        self._model: Drafter = model
        self._context_length: int = runner.context_length
        self._earlier = Store(STORE_TOKENS)
        self._states: dict[str, tuple[Store, Draft]] = {}

    def open(self, session: SessionView) -> None:
        own = Store(session.max_length + 1)
        own.add(())
        self._model.open(session)
        self._states[session.session_id] = own, EMPTY_DRAFT

    def close(self, session: SessionView) -> None:
        if self._states.pop(session.session_id, None) is not None:
            self._earlier.add(session.output_ids)
            self._model.close(session)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = [EMPTY_DRAFT] * len(sessions)
        able = [i for i, b in enumerate(budgets) if min(b.depth, b.nodes) > 0]
        for session in sessions:
            self._states[session.session_id] = self._states[session.session_id][0], EMPTY_DRAFT
        if able:
            made = self._propose([sessions[i] for i in able], [budgets[i] for i in able])
            for i, draft in zip(able, made, strict=True):
                drafts[i] = draft
        return drafts

    def _propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        retrieved, shares = [], []
        for session, budget in zip(sessions, budgets, strict=True):
            own, _ = self._states[session.session_id]
            own.extend(session.token_ids[own.num_tokens :])
            tail = session.token_ids[-MAX_MATCH:]
            tree = retrieve((own, self._earlier), tail, budget.depth, budget.nodes)
            retrieved.append(tree)
            nodes = budget.nodes - min(tree.num_nodes, budget.nodes // 2)
            if session.chain_only:
                nodes = budget.nodes
            fits = session.length + budget.depth <= self._context_length
            shares.append(Budget(budget.depth, nodes) if fits else Budget(0, 0))
        watched = _Watched(cast("Expander", self._model))
        drafts = []
        for session, budget, tree, base in zip(
            sessions, budgets, retrieved, grow(watched, sessions, shares), strict=True
        ):
            own, _ = self._states[session.session_id]
            self._states[session.session_id] = own, base
            known = {
                p: row for (name, p), row in watched.rows.items() if name == session.session_id
            }
            tree = prune(tree, known, session.config[PRUNE_THRESHOLD])
            drafts.append(_fuse(base, tree, budget, session.chain_only))
        return drafts

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        members = [i for i, s in enumerate(sessions) if s.session_id in self._states]
        parts = [
            part_outcome(outcomes[i], self._states[sessions[i].session_id][1], self._model.needs)
            for i in members
        ]
        self._model.observe([sessions[i] for i in members], parts)


def _fuse(base: Draft, tree: Draft, budget: Budget, chain_only: bool) -> Draft:
    if not tree.num_nodes or (chain_only and base.num_nodes):
        return base
    if chain_only:  # the first path is the one of the latest place
        steps = tree.parent_indices == np.arange(-1, tree.num_nodes - 1)
        return subset(tree, np.arange(int(np.argmin([*steps, False]))))
    return merge([base, tree], budget.nodes)


RASD = DrafterPart(make=Rasd, knobs=(PRUNE_THRESHOLD,), replay="composite", remembers=True)
