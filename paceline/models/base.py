"""What a model runner is: the one interface under both the target and a draft model.

A *sequence* owns KV entries for committed tokens and for *pending* ones, which form a tree after
the committed prefix. ``forward`` only ever adds pending entries; ``commit`` is the only step that
changes the committed part, and everything pending that it does not name is freed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from paceline.types import IndexArray, IntArray, Need


class KVSequence(Protocol):
    """KV state of one session in one runner."""

    @property
    def length(self) -> int:
        """Number of committed tokens with KV entries."""
        ...

    @property
    def num_pending(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """New tokens of one sequence in a forward.

    ``parent_indices[i]`` counts in the sequence's pending entries *including* those that this
    segment adds (which are appended in order); -1 is the last committed token. ``None`` means a
    chain that starts after the last pending entry, or after the committed tokens if none is
    pending.
    """

    sequence: KVSequence
    token_ids: IntArray  # [num_tokens]
    parent_indices: IndexArray | None = None
    logits: Literal["all", "last", "none"] = "all"


@dataclass(frozen=True, slots=True, eq=False)
class ForwardResult:
    """Rows of all segments that asked for logits, in segment order."""

    logits: torch.Tensor  # [num_rows, vocab_size] float32
    row_offsets: tuple[int, ...]  # [num_segments + 1]
    extras: Mapping[Need, torch.Tensor]

    def rows(self, segment: int) -> slice:
        return slice(self.row_offsets[segment], self.row_offsets[segment + 1])


class ModelRunner(Protocol):
    """A causal language model with a KV cache.

    Attributes:
        vocab_size, context_length: of the model.
        kv_capacity: tokens that all sequences together may hold.
        batch_invariant: a token's logits do not depend on what is computed beside it.
    """

    vocab_size: int
    context_length: int
    batch_invariant: bool

    @property
    def kv_capacity(self) -> int:
        """KV entries in all."""
        ...

    def new_sequence(self) -> KVSequence: ...

    def free(self, sequence: KVSequence) -> None:
        """Release all entries; the sequence must not be used again."""
        ...

    def forward(
        self, segments: Sequence[Segment], wants: frozenset[Need] = frozenset()
    ) -> ForwardResult:
        """One packed forward; appends every token as a pending entry of its sequence."""
        ...

    def commit(self, sequence: KVSequence, pending: Sequence[int]) -> None:
        """Make these pending entries (a path from the root down) part of the committed prefix."""
        ...

    def truncate(self, sequence: KVSequence, length: int) -> None:
        """Drop committed entries from ``length`` on, and all pending ones."""
        ...

    @property
    def num_free(self) -> int:
        """KV entries that are not in use."""
        ...
