"""The rows of a packed forward: where each one stands, stores its entries and looks for context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidArgument
from paceline.models.kv_cache import KVPool, PooledSequence
from paceline.types import IndexArray


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The position, slot and context of each of R rows.

    The context of row r is ``tables[r][:prefix_length[r]]`` (slots of the sequence, in position
    order) followed by ``path_length[r]`` entries of ``paths`` from ``path_offset[r]`` on: the
    ancestors of a tree node, itself included.
    """

    positions: IndexArray  # [R]
    slots: IndexArray  # [R]
    prefix_length: IndexArray  # [R]
    path_length: IndexArray  # [R]
    tables: list[IndexArray]  # [R]
    table_addresses: npt.NDArray[np.int64]  # [R] where the kernels find ``tables``
    paths: IndexArray  # flat
    path_offset: IndexArray  # [R]
    adapters: IndexArray | None = None  # [R], which of the stack's, -1 for none; None: none at all

    def context(self, row: int) -> IndexArray:
        """Slots that a row attends to, in position order."""
        first = self.path_offset[row]
        path = self.paths[first : first + self.path_length[row]]
        return np.concatenate([self.tables[row][: self.prefix_length[row]], path])

    def take(self, rows: npt.NDArray[np.int64]) -> Rows:
        """Some of the rows, in the given order."""
        return Rows(
            self.positions[rows], self.slots[rows],
            self.prefix_length[rows], self.path_length[rows],
            [self.tables[row] for row in rows], self.table_addresses[rows],
            self.paths, self.path_offset[rows],
            None if self.adapters is None else self.adapters[rows],
        )  # fmt: skip

    @property
    def longest(self) -> int:
        """Slots in the longest context."""
        return int((self.prefix_length + self.path_length).max())


def append_rows(
    pool: KVPool,
    parts: Sequence[tuple[PooledSequence, Sequence[int], Sequence[int]]],
    context_length: int,
) -> Rows:
    """Append pending entries to sequences and lay out the rows that compute them.

    Args:
        parts: sequences with the entries that are computed further, and the parents of new ones;
            rows are in this order, the former before the latter.

    Raises:
        ResourceExhausted: the pool, or a sequence, has no room.
        InvalidArgument: a token would lie beyond the context.
    """
    count = sum(len(further) + len(parents) for _, further, parents in parts)
    positions = np.empty(count, np.int32)
    slots, prefixes = np.empty(count, np.int32), np.empty(count, np.int32)
    path_lengths, path_offsets = np.zeros(count, np.int32), np.zeros(count, np.int32)
    addresses, tables = np.empty(count, np.int64), []
    path_slots: list[int] = []
    row = 0
    for sequence, further, parents in parts:
        size, first = len(parents), sequence.num_pending
        end = row + len(further) + size
        slots[row + len(further) : end] = pool.append(sequence, parents)
        addresses[row:end] = sequence.address
        tables += [sequence.slots] * (end - row)
        if sequence.chain and not further:
            start = sequence.length + first
            positions[row:end] = np.arange(start, start + size)
            prefixes[row:end] = positions[row:end] + 1
        else:
            prefixes[row:end] = sequence.length
            for i, entry in enumerate([*further, *range(first, first + size)], row):
                path = sequence.path_slots(entry)
                slots[i] = path[-1]
                positions[i] = sequence.length + len(path) - 1
                path_offsets[i] = len(path_slots)
                path_lengths[i] = len(path)
                path_slots += path
        row = end
    if int(positions.max()) >= context_length:
        raise InvalidArgument(
            "position", int(positions.max()), f"below the context of {context_length}"
        )
    sizes = [len(further) + len(parents) for _, further, parents in parts]
    return Rows(
        positions, slots, prefixes, path_lengths, tables, addresses,
        np.asarray(path_slots, np.int32), path_offsets,
        _adapters([sequence for sequence, _, _ in parts], np.repeat(range(len(parts)), sizes)),
    )  # fmt: skip


def append_chains(
    pool: KVPool, sequences: Sequence[PooledSequence], sizes: Sequence[int], num_steps: int
) -> Rows:
    """Append pending entries to each sequence, whose pending ones are a chain: first ``size``, and
    then one in each further step.

    Rows are those of all steps, one step after the other.

    Raises:
        ResourceExhausted: the pool, or a sequence, has no room.
    """
    count, more = len(sequences), num_steps - 1
    slots, positions = np.empty((2, sum(sizes) + more * count), np.int32)
    owners = [*np.repeat(np.arange(count), sizes).tolist(), *(list(range(count)) * more)]
    first = 0
    for i, (sequence, size) in enumerate(zip(sequences, sizes, strict=True)):
        pending, end = sequence.num_pending, first + size
        assert sequence.chain
        taken = pool.append(sequence, range(pending - 1, pending - 1 + size + more))
        start = sequence.length + pending
        slots[first:end], slots[sum(sizes) + i :: count] = taken[:size], taken[size:]
        positions[first:end] = np.arange(start, start + size)
        positions[sum(sizes) + i :: count] = np.arange(start + size, start + size + more)
        first = end
    zeros = np.zeros(len(slots), np.int32)
    return Rows(
        positions, slots, positions + np.int32(1), zeros,
        [sequences[i].slots for i in owners],
        np.array([sequences[i].address for i in owners], np.int64), np.empty(0, np.int32), zeros,
        _adapters(sequences, owners),
    )  # fmt: skip


def _adapters(
    sequences: Sequence[PooledSequence], owners: npt.NDArray[np.int64] | list[int]
) -> IndexArray | None:
    """The adapter of each row's sequence; None: no row has one.

    Args:
        owners: which of the sequences a row is of.  # [R]
    """
    adapters = [sequence.adapter for sequence in sequences]
    return None if max(adapters, default=-1) < 0 else np.array(adapters, np.int32)[owners]
