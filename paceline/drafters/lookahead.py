"""Lookahead decoding: n-grams from the target's own Jacobi iterations.

Fu et al. 2024 (arXiv 2402.02057). A window of ``window_size`` columns (W) holds the last
``ngram_size - 1`` (N - 1) iterations of a Jacobi trajectory. Each forward refines the window (the
*lookahead branch*), which gives an n-gram of N tokens for each column, and tries n-grams found
earlier that start with the last committed token (the *verification branch*).

Both branches are one token tree. The oldest level c1 ... cW is a chain from the root, the newer
levels of column j hang below c_j, and the tails of the pool's n-grams hang at the root; nodes with
the same path are one. A step has at most (W + G)(N - 1) nodes. Nodes of the window are verified
like all others, so they may be accepted too.

New levels are the target's argmax at any temperature (the paper's section on sampling): the
n-grams are used at other positions, where the noise of coupled sampling differs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.drafters.base import Drafter, DrafterPart
from paceline.errors import InvalidArgument
from paceline.knobs import MAX_NODES, Knob
from paceline.sampling import argmax_rows
from paceline.tree import merge
from paceline.types import EMPTY_DRAFT, Budget, Draft, Need, Outcome

if TYPE_CHECKING:
    from paceline.view import SessionView

_MAX_KEYS = 8192  # first tokens that a pool remembers


WINDOW_SIZE = Knob[int](
    "window_size", int, 7, "Columns of the window of lookahead decoding (W).",
    ge=1, le=32, search=(5, 7, 10),
)  # fmt: skip
NGRAM_SIZE = Knob[int](
    "ngram_size", int, 5, "Tokens in each n-gram of lookahead decoding (N).",
    ge=2, le=16, search=(3, 5, 7),
)  # fmt: skip
POOL_GUESSES = Knob[int](
    "pool_guesses", int, 7,
    "N-grams that lookahead decoding keeps and tries for each first token (G).",
    ge=0, le=64, search=(5, 7, 10),
)  # fmt: skip
POOL_FROM_PROMPT = Knob[bool](
    "pool_from_prompt", bool, True,
    "Put the prompt's n-grams into the pool of lookahead decoding.",
    search=(False, True),
)  # fmt: skip


def fit_lookahead(values: dict[str, Any]) -> None:
    """Set the depth and nodes that the window and the pool need.

    Raises:
        InvalidArgument: they need more nodes than a draft may have.
    """
    window, size, guesses = (values[k.name] for k in (WINDOW_SIZE, NGRAM_SIZE, POOL_GUESSES))
    nodes = (window + guesses) * (size - 1)
    if nodes > MAX_NODES:
        raise InvalidArgument(
            WINDOW_SIZE.name,
            window,
            f"(window_size + pool_guesses) * (ngram_size - 1) <= {MAX_NODES}, got {nodes}",
        )
    values.setdefault("num_speculative_tokens", window + size - 2)
    values.setdefault("node_budget", nodes)


class NGramPool:
    """Tails of n-grams by first token, at most ``size`` each; evicts the least recent one."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tails: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def add(self, ngram: Sequence[int]) -> None:
        """Remember an n-gram, or move it to the front."""
        if not self._size:
            return
        tails = self._tails.setdefault(ngram[0], OrderedDict())
        self._tails.move_to_end(ngram[0])
        tail = tuple(ngram[1:])
        tails[tail] = None
        tails.move_to_end(tail)
        if len(tails) > self._size:
            tails.popitem(last=False)
        if len(self._tails) > _MAX_KEYS:
            self._tails.popitem(last=False)

    def get(self, first: int) -> list[tuple[int, ...]]:
        """What followed ``first``, most recent one first."""
        return list(reversed(self._tails.get(first, ())))


@dataclass(slots=True)
class _State:
    """Window and pool of a session; ``levels[i][j]`` is column j + 1 of iteration i, oldest first.

    The window starts with one level and grows by one with each of the first N - 2 rounds.
    """

    pool: NGramPool
    levels: list[list[int]] = field(default_factory=list)

    def columns(self) -> Iterator[list[int]]:
        """For each column the tokens of its path in the tree."""
        for j in range(len(self.levels[0])):
            yield self.levels[0][: j + 1] + [level[j] for level in self.levels[1:]]


class Lookahead(Drafter):
    """A tree of pool n-grams and window columns; state is both of them for each session."""

    needs = frozenset({Need.TREE_LOGITS})

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def open(self, session: SessionView) -> None:
        """The window and the pool are made for the first draft."""

    def _start(self, session: SessionView) -> _State:
        window, size, guesses = _sizes(session)
        state = self._states[session.session_id] = _State(NGramPool(guesses))
        ids = session.token_ids
        if session.config[POOL_FROM_PROMPT]:
            for end in range(size, len(ids) + 1):
                state.pool.add(ids[end - size : end])
        # Any tokens will do to start with; those of the prompt are likely ones.
        random = np.random.default_rng(session.params.seed)
        state.levels.append([ids[i] for i in random.integers(0, len(ids), window)])
        return state

    def close(self, session: SessionView) -> None:
        self._states.pop(session.session_id, None)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._propose(s, b) for s, b in zip(sessions, budgets, strict=True)]

    def _propose(self, session: SessionView, budget: Budget) -> Draft:
        if min(budget.depth, budget.nodes) <= 0:
            return EMPTY_DRAFT
        state = self._states.get(session.session_id) or self._start(session)
        # The tokens most likely to be accepted come first: the node budget cuts the tail.
        paths = [*state.pool.get(session.token_ids[-1]), *state.columns()]
        return merge([Draft.chain(path[: budget.depth]) for path in paths], budget.nodes)

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        for session, outcome in zip(sessions, outcomes, strict=True):
            if outcome.draft.num_nodes:  # no column was verified otherwise
                self._refine(self._states[session.session_id], outcome, _sizes(session)[1])

    def _refine(self, state: _State, outcome: Outcome, size: int) -> None:
        """Add a level to the window from the forward's logits, and its n-grams to the pool."""
        draft = outcome.draft
        edges = zip(draft.parent_indices.tolist(), draft.token_ids.tolist(), strict=True)
        place = {edge: node for node, edge in enumerate(edges)}
        argmaxes = argmax_rows(outcome.verification.logits)
        new = list(state.levels[-1])  # a column that the draft had no room for stays as it is
        for j, path in enumerate(state.columns()):
            node: int | None = -1
            for token in path:
                node = place.get((node, token)) if node is not None else None
            if node is None:
                continue
            new[j] = argmaxes[node + 1]
            if len(state.levels) == size - 1:
                state.pool.add([level[j] for level in state.levels] + [new[j]])
        state.levels.append(new)
        if len(state.levels) == size:
            del state.levels[0]


def _sizes(session: SessionView) -> tuple[int, int, int]:
    """W, N and G."""
    config = session.config
    return config[WINDOW_SIZE], config[NGRAM_SIZE], config[POOL_GUESSES]


LOOKAHEAD = DrafterPart(
    make=lambda context: Lookahead(),
    knobs=(WINDOW_SIZE, NGRAM_SIZE, POOL_GUESSES, POOL_FROM_PROMPT),
    fit=fit_lookahead,
)
