"""What the general path keeps of a session, and what a forward of it computes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from paceline.models.transformers_packed import PackedRows, SequenceKV
from paceline.tree import ancestor_mask, depths
from paceline.types import IndexArray

if TYPE_CHECKING:
    import torch

Wanted = Literal["all", "last", "none"]


class TransformersSequence:
    """Token ids and cache of one session. The cache holds ``token_ids`` and then some pending.

    Attributes:
        token_ids: committed.
        kv: entries of committed and then of pending tokens, where they are Paceline's.
        cache: transformers' DynamicCache, where a strategy has one; None before its first forward.
        cached_pending: pending nodes whose entries follow the committed ones in ``cache``, in this
            order.
        state: of a recurrent model, after the first ``state_length`` committed tokens; None at 0.
        node_states: the same after pending nodes.
        exit_states: what pending nodes that left early had after each of their layers.
            # [num_layers_run, hidden_size] each
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.pending_ids: list[int] = []
        self.pending_parents: list[int] = []
        self.kv = SequenceKV()
        self.cache: Any = None
        self.cached_pending: list[int] = []
        self.state: Any = None
        self.state_length = 0
        self.node_states: dict[int, Any] = {}
        self.exit_states: dict[int, torch.Tensor] = {}
        self.closed = False

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return len(self.token_ids)

    @property
    def num_pending(self) -> int:
        return len(self.pending_ids)

    @property
    def tree(self) -> IndexArray:
        """Parents of the pending tokens.  # [num_pending]"""
        return np.asarray(self.pending_parents, np.int32)

    def path_tokens(self, nodes: Sequence[int]) -> list[int]:
        return [self.pending_ids[node] for node in nodes]

    def drop_pending(self) -> None:
        self.pending_ids.clear()
        self.pending_parents.clear()
        self.cached_pending.clear()
        self.node_states.clear()
        self.exit_states.clear()

    def drop_from(self, first: int) -> None:
        """Drop the pending tokens from ``first`` on, and what of them is cached."""
        del self.pending_ids[first:], self.pending_parents[first:]
        for node in [node for node in self.node_states if node >= first]:
            del self.node_states[node]
        known = self.cached_pending
        known[:] = list(itertools.takewhile(lambda node: node < first, known))
        self.crop(self.length + len(known))

    def forget(self) -> None:
        """Release everything but the tokens."""
        self.kv, self.cache = SequenceKV(), None
        self.forget_state()

    def forget_state(self) -> None:
        self.state, self.state_length = None, 0

    def crop(self, length: int) -> None:
        """Cut ``cache`` to its first ``length`` entries."""
        if self.cache is None:
            return
        for layer in cache_layers(self.cache):
            layer.keys = layer.keys[:, :, :length]
            layer.values = layer.values[:, :, :length]

    def rows(self, first: int, nodes: Sequence[int] = ()) -> PackedRows:
        """Committed tokens from ``first`` on and then pending ones, as rows of a forward.

        Pending tokens see their ancestors among the pending ones.
        """
        tree = self.tree
        pending = depths(tree).astype(np.int64) - 1 + self.length
        count = self.length - first
        sees = np.ones((count + len(nodes), self.length + len(tree)), np.bool_)
        sees[:count, self.length :] = False
        sees[count:, self.length :] = ancestor_mask(tree)[list(nodes)]
        return PackedRows(
            self.kv,
            np.concatenate(
                [np.arange(first, self.length), self.length + np.asarray(nodes, np.int64)]
            ),
            np.concatenate([np.arange(self.length), pending]),
            sees,
        )


@dataclass(frozen=True, slots=True, eq=False)
class NewTokens:
    """The pending tokens of a sequence from ``first`` on, and what to return of them.

    Attributes:
        wanted: which of them have logits.
        has_states: all of them have a row in what is returned, with their states.
    """

    sequence: TransformersSequence
    first: int
    wanted: Wanted
    has_states: bool = False

    @property
    def count(self) -> int:
        return self.sequence.num_pending - self.first

    @property
    def nodes(self) -> range:
        return range(self.first, self.sequence.num_pending)

    @property
    def wanted_nodes(self) -> range:
        """Those that have a row."""
        return self.nodes if self.has_states else self.logits_nodes

    @property
    def logits_nodes(self) -> range:
        """Those whose logits are wanted."""
        return {"all": self.nodes, "last": self.nodes[-1:], "none": self.nodes[:0]}[self.wanted]


def cache_layers(cache: Any) -> Iterator[Any]:
    """Layers with entries to cut; raises TypeError for a kind that cannot be cut."""
    from transformers.cache_utils import DynamicLayer

    for layer in cache.layers:
        if type(layer) is not DynamicLayer:
            raise TypeError(f"{type(layer).__name__} cannot be cut")
        if layer.get_seq_length() > 0:
            yield layer
