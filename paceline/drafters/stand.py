"""STAND: a table of averaged next-token distributions for n-grams, drawn from stochastically.

Song et al. 2025 (arXiv 2506.04708): for every n-gram that was followed by a verified position the
table keeps the most likely tokens and their probabilities, averaged over repeats. Drafting looks
up the longest known suffix and backs off to shorter ones; the shape draws the children (with the
target's noise, or without replacement where the acceptance rule asks for it).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.drafters.base import NGRAM_MAX, Drafter, DrafterPart, grow
from paceline.shapes.base import SparseRows
from paceline.types import Budget, Draft, FloatArray, IntArray, Need, Outcome

if TYPE_CHECKING:
    import torch

    from paceline.view import SessionView

NGram = tuple[int, ...]

MAX_UNREAD = 32  # nodes that wait to be learnt


class NGramTable:
    """Mean probabilities of the ``width`` most likely tokens after each n-gram.

    The n-gram that was observed least recently makes room for a new one.

    Args:
        vocab_size: token ids are below it.
        capacity: n-grams at most (about 300 bytes each).
        width: tokens kept for each n-gram.
    """

    def __init__(self, vocab_size: int, capacity: int = 1 << 16, width: int = 10) -> None:
        self.capacity = capacity
        self.width = width
        self._vocab_size = vocab_size
        self._slots: OrderedDict[NGram, int] = OrderedDict()  # least recently observed first
        self._ids = np.full((capacity, width), -1, np.int32)
        self._probs = np.zeros((capacity, width), np.float32)
        self._counts: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, context: NGram) -> int:
        """Slot of the longest known suffix of ``context``; -1 if there is none."""
        for start in range(len(context)):
            slot = self._slots.get(context[start:])
            if slot is not None:
                return slot
        return -1

    def rows(self, slots: Sequence[int]) -> tuple[IntArray, FloatArray]:
        """Ids (-1: none) and mean probabilities; no ids for slot -1.  # [len(slots), width]"""
        ids = self._ids[slots].astype(np.int64)
        ids[np.asarray(slots, np.int64) < 0] = -1
        return ids, self._probs[slots]

    def learn(self, ngrams: Sequence[NGram], ids: IntArray, probs: FloatArray) -> None:
        """Average one observed row into each n-gram; an n-gram may occur several times.

        Args:
            ids, probs: distinct token ids and their probabilities.  # [len(ngrams), k]
        """
        for first in range(0, len(ngrams), self.capacity):  # so that none evicts its batch mate
            part = slice(first, first + self.capacity)
            slots = np.array([self._slot_for(ngram) for ngram in ngrams[part]], np.int64)
            self._average(slots, ids[part], probs[part])

    def _slot_for(self, ngram: NGram) -> int:
        slot = self._slots.get(ngram)
        if slot is not None:
            self._slots.move_to_end(ngram)
            return slot
        slot = len(self._slots)
        if slot == self.capacity:
            _, slot = self._slots.popitem(last=False)
            self._ids[slot], self._probs[slot], self._counts[slot] = -1, 0.0, 0
        self._slots[ngram] = slot
        return slot

    def _average(self, slots: IntArray, ids: IntArray, probs: FloatArray) -> None:
        """Sum old and new mass of each (slot, token), divide by the count, keep the best."""
        changed = np.unique(slots)
        old_mass = self._probs[changed] * self._counts[changed, None].astype(np.float32)
        old_keys = changed[:, None] * self._vocab_size + self._ids[changed]
        new_keys = slots[:, None] * self._vocab_size + ids
        mass = np.concatenate([old_mass.ravel(), probs.ravel()])
        present = mass > 0
        keys, place = np.unique(
            np.concatenate([old_keys.ravel(), new_keys.ravel()])[present], return_inverse=True
        )
        sums = np.bincount(place.ravel(), weights=mass[present], minlength=len(keys))
        slot_of, token_of = np.divmod(keys, self._vocab_size)
        order = np.lexsort((-sums, slot_of))
        slot_of, token_of, sums = slot_of[order], token_of[order], sums[order]
        rank = np.arange(len(keys)) - np.searchsorted(slot_of, slot_of)
        kept = rank < self.width
        slot_of, token_of, sums, rank = slot_of[kept], token_of[kept], sums[kept], rank[kept]
        np.add.at(self._counts, slots, 1)
        self._ids[changed], self._probs[changed] = -1, 0.0
        self._ids[slot_of, rank] = token_of
        self._probs[slot_of, rank] = sums / self._counts[slot_of]


class Stand(Drafter):
    """Expands a node with the averaged distribution of the longest known n-gram that ends in it.

    The table belongs to the engine and learns from every verified node, accepted or not. The
    probabilities are those at temperature 1; a request's temperature is applied when drafting.
    A read of the table learns all waiting nodes at once: rounds without a draft cost
    next to nothing.
    """

    needs = frozenset({Need.TREE_LOGITS})

    def __init__(self, table: NGramTable) -> None:
        self._table = table
        # The contexts of nodes that wait to be learnt, and the logits of all of them.
        self._unread: list[NGram] = []
        self._unread_logits: list[torch.Tensor] = []
        # The n-gram that ends in each node of the tree in progress; the root is node -1.
        self._states: dict[str, dict[int, NGram]] = {}

    @property
    def table(self) -> NGramTable:
        """The table, after learning all waiting nodes."""
        self._learn()
        return self._table

    def open(self, session: SessionView) -> None:
        self._states[session.session_id] = {}

    def close(self, session: SessionView) -> None:
        self._states.pop(session.session_id, None)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        return grow(self, sessions, budgets)

    def root(self, sessions: Sequence[SessionView]) -> SparseRows:
        contexts = []
        for session in sessions:
            context = tuple(session.token_ids[-_order(session) :])
            self._states[session.session_id] = {-1: context}
            contexts.append(context)
        return self._rows(contexts)

    def expand(
        self, sessions: Sequence[SessionView], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> SparseRows:
        contexts = []
        for session, frontier in zip(sessions, frontiers, strict=True):
            known, order = self._states[session.session_id], _order(session)
            for node, token, parent in frontier:
                known[node] = (*known[parent], token)[-order:]
                contexts.append(known[node])
        return self._rows(contexts)

    def _rows(self, contexts: list[NGram]) -> SparseRows:
        table = self.table
        ids, probs = table.rows([table.find(context) for context in contexts])
        with np.errstate(divide="ignore"):
            return SparseRows(ids, np.log(probs))

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        """Average the distribution after every node into all n-grams that end in it."""
        for session, outcome in zip(sessions, outcomes, strict=True):
            order, before = _order(session), session.length - len(outcome.token_ids)
            contexts = [tuple(session.token_ids[max(0, before - order) : before])]
            for token, parent in zip(
                outcome.draft.token_ids.tolist(), outcome.draft.parent_indices.tolist(), strict=True
            ):
                contexts.append((*contexts[parent + 1], token)[-order:])
            self._unread += contexts
            self._unread_logits.append(outcome.verification.logits)
        if len(self._unread) >= MAX_UNREAD:
            self._learn()

    def _learn(self) -> None:
        if not self._unread:
            return
        ngrams: list[NGram] = []
        rows: list[int] = []  # of the logits, for each n-gram
        for row, context in enumerate(self._unread):
            ngrams += [context[start:] for start in range(len(context))]
            rows += [row] * len(context)
        import torch

        logits = torch.cat(self._unread_logits).float()
        self._unread, self._unread_logits = [], []
        top = torch.topk(logits, min(self._table.width, logits.shape[1]))
        probs = torch.exp(top.values - torch.logsumexp(logits, -1, keepdim=True))
        ids: IntArray = top.indices.cpu().numpy()
        self._table.learn(ngrams, ids[rows], probs.cpu().numpy()[rows])


def _order(session: SessionView) -> int:
    """Length of the longest n-gram that the session learns and looks up."""
    return session.config[NGRAM_MAX]


STAND = DrafterPart(make=lambda context: Stand(NGramTable(context.vocab_size)), knobs=(NGRAM_MAX,))
