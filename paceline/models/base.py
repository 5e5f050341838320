"""The model runner: one interface for both the target and a draft model.

A *sequence* owns KV entries for committed tokens and for *pending* ones, which form a tree after
the committed prefix. ``forward`` only ever adds pending entries; ``commit`` is the only step that
changes the committed part, and everything pending that it does not name is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from paceline.numerics import Fingerprint
from paceline.types import IndexArray, IntArray, Need

if TYPE_CHECKING:
    import torch


class KVSequence(Protocol):
    """KV state of one session in one runner."""

    @property
    def length(self) -> int:
        """Number of committed tokens with KV entries."""
        ...

    @property
    def num_pending(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class PseudoTokens:
    """Rows of a forward that stand for unknown future tokens.

    They become pending entries like drafted tokens, behind them, and are never committed. Real
    tokens never see them.

    Attributes:
        parent_indices: as :attr:`Segment.parent_indices`; the parent may be another pseudo token.
            # [num_pseudo]
        first_layer: the layer that they enter first.
        inputs: their input to that layer, from the residual stream there of the segment's other
            rows.  # [num_rows, hidden_size] -> [num_pseudo, hidden_size]
    """

    parent_indices: IndexArray
    first_layer: int
    inputs: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """New tokens of one sequence in a forward.

    ``parent_indices[i]`` counts in the sequence's pending entries *including* those that this
    segment adds (which are appended in order); -1 is the last committed token. ``None`` means a
    chain that starts after the last pending entry, or after the committed tokens if none is
    pending.

    Its rows are those of ``resume``, ``token_ids`` and ``pseudo``, in this order. The last four
    fields are for runners that provide ``SHARED_MODEL``.

    Attributes:
        layers: the layers that compute it, in order; None for all. The KV cache lacks the entries
            of omitted layers, and no check reports that.
        resumable: ``layers`` are the first ones, and a later forward resumes the entries there; it
            must do so before they are committed.
        resume: pending entries, parents first, that exited early and that this forward resumes.
        pseudo: rows without a token.
    """

    sequence: KVSequence
    token_ids: IntArray  # [num_tokens]
    parent_indices: IndexArray | None = None
    logits: Literal["all", "last", "none"] = "all"
    layers: Sequence[int] | None = None
    resumable: bool = False
    resume: Sequence[int] = ()
    pseudo: PseudoTokens | None = None

    @property
    def num_rows(self) -> int:
        return (
            len(self.resume)
            + len(self.token_ids)
            + (0 if self.pseudo is None else len(self.pseudo.parent_indices))
        )

    @property
    def chooses_layers(self) -> bool:
        """Whether some row does not run through all layers in this forward."""
        return self.layers is not None or bool(self.resume) or self.pseudo is not None


@dataclass(frozen=True, slots=True, eq=False)
class ForwardResult:
    """Logits of all segments that asked for them, in segment order, and what ``wants`` named.

    Attributes:
        extras: for every row of every segment, whatever logits it asked for:
            ``HIDDEN_STATES`` after the final norm  # [num_all_rows, hidden_size]
            ``LAYER_STATES`` the residual stream after each layer
            # [num_all_rows, num_layers, hidden_size]
    """

    logits: torch.Tensor  # [num_rows, vocab_size] float32
    row_offsets: tuple[int, ...]  # [num_segments + 1]
    extras: Mapping[Need, torch.Tensor]
    extra_offsets: tuple[int, ...]  # [num_segments + 1]
    logits_rows: torch.Tensor | None = None  # rows that have logits; None: all of them

    def rows(self, segment: int) -> slice:
        """The rows of a segment's logits."""
        return slice(self.row_offsets[segment], self.row_offsets[segment + 1])

    def extras_of(self, segment: int) -> dict[Need, torch.Tensor]:
        """The extras of a segment's rows."""
        first, last = self.extra_offsets[segment : segment + 2]
        return {need: tensor[first:last] for need, tensor in self.extras.items()}

    def beside_logits(self, need: Need) -> torch.Tensor | None:
        """An extra for the rows that have logits, if ``wants`` named it."""
        extra = self.extras.get(need)
        return extra if extra is None or self.logits_rows is None else extra[self.logits_rows]


class ModelRunner(Protocol):
    """A causal language model with a KV cache.

    Attributes:
        vocab_size, context_length: of the model.
        kv_capacity: maximum number of tokens of all sequences together.
        batch_invariant: a token's logits do not depend on the rest of the batch.
        provides: extras that forwards can give to drafters; ``SHARED_MODEL`` stands for segments
            that
            choose their layers, resume and have pseudo tokens.
    """

    vocab_size: int
    context_length: int
    batch_invariant: bool
    provides: frozenset[Need]

    @property
    def kv_capacity(self) -> int:
        """Total number of KV entries."""
        ...

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of its numerics: runners with equal ones give equal tokens.

        Computed at the first use, which reads all weights.
        """
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
        """Number of free KV entries."""
        ...


class LayeredRunner(ModelRunner, Protocol):
    """A runner that provides ``SHARED_MODEL``.

    Attributes:
        num_layers: of the model.
        head_layers: weights of the output layer over those that a token multiplies with in a layer.
    """

    num_layers: int
    head_layers: float

    def logits_of(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of a residual stream after any layer, through the shared norm and head.

        # [num_rows, hidden_size] -> [num_rows, vocab_size] float32
        """
        ...
