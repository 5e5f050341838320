"""The KV pool of a model: one slot for each token, handed out one by one.

A sequence is a table of slots, in position order. Because attention reads through that table,
committing a path of a verified tree moves no keys or values: the table takes the slots of the
accepted nodes and the rest go back to the pool. For the same reason sequences with a common prefix
can read the same slots (:mod:`paceline.models.prefix_cache`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch

from paceline.errors import InvalidArgument, ResourceExhausted
from paceline.models.prefix_cache import BLOCK, PrefixBlock, PrefixCache


class PooledSequence:
    """Slots of one sequence: committed ones in ``slots[:length]``, pending ones as a tree.

    The first ``num_shared`` of them are slots of ``blocks``, which the prefix cache owns. Entries
    are those of the model with ``adapter``, a number of :attr:`paceline.models.ops.Stack.adapters`,
    or of the model as it is (-1).
    """

    __slots__ = (
        "adapter", "address", "blocks", "chain", "length", "num_shared", "parents", "pending",
        "slots", "states",
    )  # fmt: skip

    def __init__(self, context_length: int, adapter: int = -1) -> None:
        self.adapter = adapter
        # Pending slots of a chain are written behind the committed ones, hence the room.
        self.slots = np.zeros(context_length, np.int32)
        self.address = int(self.slots.ctypes.data)
        self.length = 0
        self.blocks: list[PrefixBlock] = []
        self.num_shared = 0
        self.pending: list[int] = []  # slot of each pending entry
        self.parents: list[int] = []  # parent of each pending entry, -1 for the committed prefix
        self.chain = True  # pending entries follow one another
        # Of pending entries that exited early: the output of each of their layers.
        self.states: dict[int, torch.Tensor] = {}  # [num_layers, hidden_size]

    @property
    def num_pending(self) -> int:
        return len(self.pending)

    def path_slots(self, entry: int) -> list[int]:
        """Slots of the pending entries from the root down to ``entry``."""
        path = []
        while entry >= 0:
            path.append(self.pending[entry])
            entry = self.parents[entry]
        return path[::-1]


class KVPool:
    """Keys and values of all sequences of one model.

    The pool never hands out slot 0: it holds zeros for masked places of padded contexts.

    Args:
        num_tokens: capacity, without slot 0.

    Raises:
        InvalidArgument: there is no memory for so many.
    """

    def __init__(
        self,
        num_layers: int,
        num_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_tokens + 1, kv_heads, head_dim)
        try:
            self.keys = torch.empty(shape, dtype=dtype, device=device)
            self.values = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            if "alloc" not in str(error):
                raise
            needed = 2 * num_layers * num_tokens * kv_heads * head_dim * dtype.itemsize
            allowed = f"fewer: {needed:,} bytes of KV entries cannot be allocated"
            raise InvalidArgument("kv_tokens", num_tokens, allowed) from error
        self.keys[:, 0].zero_()
        self.values[:, 0].zero_()
        self.capacity = num_tokens
        self.prefixes = PrefixCache()
        self._free = list(range(num_tokens, 0, -1))

    @property
    def num_free(self) -> int:
        """Slots that no sequence uses; some may hold a prefix until they are needed."""
        return len(self._free) + self.prefixes.num_idle

    def append(self, sequence: PooledSequence, parents: Sequence[int]) -> list[int]:
        """Take a slot for each new pending entry; returns the slots.

        Raises:
            ResourceExhausted: the pool, or the sequence's context, has no room. Nothing is taken.
        """
        count, free = len(parents), self._free
        if count > len(free):
            free += self.prefixes.evict(count - len(free))
        if count > len(free):
            raise ResourceExhausted(f"KV memory is full: {count} slots needed, {len(free)} free")
        first = sequence.num_pending
        chain = sequence.chain and all(p == first + i - 1 for i, p in enumerate(parents))
        if chain and sequence.length + first + count > len(sequence.slots):
            raise ResourceExhausted(
                f"sequence would exceed the context of {len(sequence.slots)} tokens"
            )
        taken = free[-1 : -count - 1 : -1]
        del free[len(free) - count :]
        sequence.pending += taken
        sequence.parents += parents
        sequence.chain = chain
        if chain:
            start = sequence.length + first
            sequence.slots[start : start + count] = taken
        return taken

    def commit(self, sequence: PooledSequence, entries: Sequence[int]) -> None:
        """Keep a path of pending entries, free the others."""
        kept = [sequence.pending[entry] for entry in entries]
        end = sequence.length + len(kept)
        sequence.slots[sequence.length : end] = kept
        sequence.length = end
        if len(kept) < len(sequence.pending):
            keep = set(kept)
            self._free += [slot for slot in sequence.pending if slot not in keep]
        sequence.pending.clear()
        sequence.parents.clear()
        sequence.states.clear()
        sequence.chain = True

    def truncate(self, sequence: PooledSequence, length: int) -> None:
        """Free committed entries from ``length`` on, and everything pending."""
        self.commit(sequence, ())
        first = max(length, sequence.num_shared)
        self._free += sequence.slots[first : sequence.length].tolist()
        sequence.length = min(sequence.length, length)
        if length < sequence.num_shared:
            sequence.num_shared = length
            used = -(-length // BLOCK)
            self.prefixes.release(sequence.blocks[used:])
            del sequence.blocks[used:]

    def free(self, sequence: PooledSequence) -> None:
        """Free everything."""
        self.truncate(sequence, 0)

    def adopt(self, sequence: PooledSequence, token_ids: Sequence[int], scope: Hashable) -> None:
        """Start an empty sequence with the entries that the prefix cache has for ``token_ids``."""
        sequence.blocks = self.prefixes.find(token_ids, (sequence.adapter, scope))
        sequence.num_shared = sequence.length = BLOCK * len(sequence.blocks)
        for i, block in enumerate(sequence.blocks):
            sequence.slots[i * BLOCK : (i + 1) * BLOCK] = block.slots

    def num_cached(self, token_ids: Sequence[int], scope: Hashable, adapter: int = -1) -> int:
        """With how many of the first tokens a sequence could start, as :meth:`adopt` would."""
        return self.prefixes.count(token_ids, (adapter, scope))

    def publish(self, sequence: PooledSequence, token_ids: Sequence[int], scope: Hashable) -> None:
        """Give whole blocks of committed entries to the prefix cache; the sequence keeps using
        them.

        Args:
            token_ids: of the committed entries.  # [sequence.length]
        """
        if sequence.num_shared % BLOCK:
            return  # cut within a block
        own = (sequence.adapter, scope)
        slots = sequence.slots[: sequence.length]
        for block, is_new in self.prefixes.extend(sequence.blocks, token_ids, slots, own):
            first = BLOCK * len(sequence.blocks)
            if not is_new:  # another session computed the same block in the meantime
                self._free += slots[first : first + BLOCK].tolist()
                slots[first : first + BLOCK] = block.slots
            sequence.blocks.append(block)
            sequence.num_shared = first + BLOCK
