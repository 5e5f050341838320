"""A packed forward of :class:`paceline.models.llama.LlamaRunner`, and its rows that skip layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from paceline.models.base import PseudoTokens, Segment
from paceline.models.kv_cache import KVPool, PooledSequence
from paceline.models.ops import Ops, Stack
from paceline.models.rows import Rows, append_rows
from paceline.types import IntArray

Tensor = torch.Tensor


@dataclass(slots=True, eq=False)
class PackedBatch:
    """A packed forward.

    Attributes:
        selected: rows whose logits are wanted; None for all.
        layers: where each row is computed, None for everywhere.  # bool[num_rows, num_layers]
        resumed: what rows that go on had after each layer until they left.
        pseudo: rows whose states pseudo tokens are made from, the tokens, their rows.
        exits: segments that leave early, with the entries and the rows.
    """

    tokens: IntArray
    rows: Rows
    selected: Tensor | None
    row_offsets: tuple[int, ...]
    extra_offsets: tuple[int, ...]
    layers: npt.NDArray[np.bool_] | None = None
    resumed: dict[int, Tensor] = field(default_factory=dict)
    pseudo: list[tuple[slice, PseudoTokens, slice]] = field(default_factory=list)
    exits: list[tuple[Segment, tuple[int, ...], slice]] = field(default_factory=list)

    def keep_states(self, states: Tensor) -> None:
        """Leave the states of early exits with their sequences, for a forward that resumes them.

        Args:
            states: after each layer.  # [num_layers, num_rows, hidden_size]
        """
        for segment, entries, rows in self.exits:
            assert segment.layers is not None
            out = states[: len(segment.layers), rows]
            segment.sequence.states |= {  # type: ignore[attr-defined]
                entry: out[:, i] for i, entry in enumerate(entries)
            }


def pack_segments(
    segments: Sequence[Segment],
    pool: KVPool,
    *,
    context_length: int,
    num_layers: int,
    device: torch.device,
) -> PackedBatch:
    """Append all tokens as pending entries and lay the rows of the batch out.

    Raises:
        ResourceExhausted: the pool, or a sequence, has no room.
        InvalidArgument: a token would lie beyond the context.
    """
    count = sum(segment.num_rows for segment in segments)
    tokens = np.zeros(count, np.int64)
    selected: list[int] = []
    row_offsets, extra_offsets = [0], [0]
    parts: list[tuple[PooledSequence, Sequence[int], Sequence[int]]] = []
    for segment in segments:
        sequence = segment.sequence
        assert isinstance(sequence, PooledSequence)
        size, pending = len(segment.token_ids), sequence.num_pending
        if segment.parent_indices is None:
            parents = list(range(pending - 1, pending + size - 1))
        else:
            parents = segment.parent_indices.tolist()
        if segment.pseudo is not None:
            parents += segment.pseudo.parent_indices.tolist()
        row = extra_offsets[-1]
        first, end = row + len(segment.resume), row + segment.num_rows
        tokens[first : first + size] = segment.token_ids
        parts.append((sequence, segment.resume, parents))
        if segment.logits == "all":
            selected += range(row, end)
        elif segment.logits == "last":
            selected.append(end - 1)
        row_offsets.append(len(selected))
        extra_offsets.append(end)
    rows = append_rows(pool, parts, context_length)
    index = None
    if len(selected) < count:
        index = torch.tensor(selected, dtype=torch.long, device=device)
    batch = PackedBatch(tokens, rows, index, tuple(row_offsets), tuple(extra_offsets))
    if any(segment.chooses_layers for segment in segments):
        _choose_layers(batch, segments, num_layers)
    return batch


def _choose_layers(batch: PackedBatch, segments: Sequence[Segment], num_layers: int) -> None:
    """The layers that compute each row, and where its state is kept."""
    active = np.ones((batch.extra_offsets[-1], num_layers), np.bool_)
    for i, segment in enumerate(segments):
        sequence = segment.sequence
        assert isinstance(sequence, PooledSequence)
        first, end = batch.extra_offsets[i : i + 2]
        layers = range(num_layers) if segment.layers is None else segment.layers
        active[first:end] = False
        active[first:end, list(layers)] = True
        for row, entry in enumerate(segment.resume, first):
            batch.resumed[row] = earlier = sequence.states[entry]
            active[row, : len(earlier)] = False
        if segment.pseudo is not None:
            real = end - len(segment.pseudo.parent_indices)
            active[real:end, : segment.pseudo.first_layer] = False
            batch.pseudo.append((slice(first, real), segment.pseudo, slice(real, end)))
        if segment.resumable:
            num_new = end - first - len(segment.resume)
            entries = range(sequence.num_pending - num_new, sequence.num_pending)
            batch.exits.append((segment, (*segment.resume, *entries), slice(first, end)))
        else:
            for entry in segment.resume:
                del sequence.states[entry]
    batch.layers = active


def run_chosen_layers(
    batch: PackedBatch, ops: Ops, stack: Stack, pool: KVPool, x: Tensor, states: Tensor | None
) -> None:
    """As ``ops.run_layers`` over all layers, but each row runs through its own layers only.

    Args:
        x: of all rows, changed in place.  # [num_rows, hidden_size]
        states: filled with what a row has after each layer that it runs through.
            # [num_layers, num_rows, hidden_size]
    """
    assert batch.layers is not None
    for row, earlier in batch.resumed.items():
        x[row] = earlier[-1]
        if states is not None:
            states[: len(earlier), row] = earlier
    active = batch.layers
    changes = 1 + np.flatnonzero((active[:, 1:] != active[:, :-1]).any(0))
    begins = {pseudo.first_layer for _, pseudo, _ in batch.pseudo}
    points = sorted({0, active.shape[1], *changes.tolist(), *begins})
    for first, last in pairwise(points):
        for others, pseudo, rows in batch.pseudo:
            if pseudo.first_layer == first:
                x[rows] = pseudo.inputs(x[others]).to(x.dtype)
        taking_part = np.flatnonzero(active[:, first])
        if not len(taking_part):
            continue
        index = torch.from_numpy(taking_part).to(x.device)
        part = x[index]
        out = None if states is None else part.new_empty(last - first, *part.shape)
        ops.run_layers(
            stack, first, last, part, pool.keys, pool.values, batch.rows.take(taking_part), out
        )
        x[index] = part
        if states is not None and out is not None:
            states[first:last, index] = out
