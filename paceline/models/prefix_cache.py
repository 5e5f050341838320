"""KV entries that outlive their session, for sessions that begin with the same tokens.

A trie of blocks of ``BLOCK`` tokens: a path from a root spells a prefix, and each block owns the KV
slots of its tokens. Sequences that use a block only read it, so nothing is copied; a block that no
sequence uses is evicted when memory is needed, the longest unused one first. As a key or a
value depends on the tokens up to it alone, and in batch-invariant mode on nothing else down to the
last bit, a session that begins with cached entries continues exactly as one that computes them.
A scope keeps apart what must not meet: entries of several adapters, and those of several tenants.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.types import IndexArray

BLOCK = 16


@dataclass(slots=True, eq=False)
class PrefixBlock:
    """``BLOCK`` tokens after those of ``parent``.

    Attributes:
        tokens: as bytes; a root has none.
        slots: where their keys and values are.  # [BLOCK], a root has none
        users: sequences that read them.
    """

    tokens: bytes
    parent: PrefixBlock | None
    slots: IndexArray
    users: int = 0
    children: dict[bytes, PrefixBlock] = field(default_factory=dict)


class PrefixCache:
    """All cached blocks, and those that no sequence uses.

    Attributes:
        num_queried, num_hit: tokens that sessions looked up, and those found.
        num_evicted: evicted tokens.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, PrefixBlock] = {}
        # Blocks without users, the longest unused first. A sequence releases its last block first,
        # and every user of a block uses its parent: children come before their parents.
        self._idle: OrderedDict[PrefixBlock, None] = OrderedDict()
        self.num_queried = self.num_hit = self.num_evicted = 0

    @property
    def num_idle(self) -> int:
        """Number of slots that eviction can free."""
        return BLOCK * len(self._idle)

    def find(self, token_ids: Sequence[int], scope: Hashable) -> list[PrefixBlock]:
        """The cached blocks at the start of ``token_ids``; marks them as used by the caller."""
        found = self._walk(token_ids, scope)
        for block in found:
            self._use(block)
        self.num_queried += len(token_ids)
        self.num_hit += BLOCK * len(found)
        return found

    def count(self, token_ids: Sequence[int], scope: Hashable) -> int:
        """How many of the first tokens are cached, which may change before they are used."""
        return BLOCK * len(self._walk(token_ids, scope))

    def _walk(self, token_ids: Sequence[int], scope: Hashable) -> list[PrefixBlock]:
        found: list[PrefixBlock] = []
        block = self._roots.get(scope)
        keys = _keys(token_ids) if block is not None else []
        while block is not None and len(found) < len(keys):
            block = block.children.get(keys[len(found)])
            if block is not None:
                found.append(block)
        return found

    def extend(
        self,
        known: Sequence[PrefixBlock],
        token_ids: Sequence[int],
        slots: IndexArray,
        scope: Hashable,
    ) -> list[tuple[PrefixBlock, bool]]:
        """The blocks of ``token_ids`` after the ``known`` ones; marks them as used by the caller.

        Args:
            slots: of all tokens; those of new blocks belong to the cache now.  # [num_tokens]

        Returns:
            blocks, and whether each is new.
        """
        at = known[-1] if known else self._roots.get(scope)
        result: list[tuple[PrefixBlock, bool]] = []
        keys = _keys(token_ids)
        for i in range(len(known), len(keys)):
            if at is None:
                at = self._roots[scope] = PrefixBlock(b"", None, slots[:0])
            block = at.children.get(keys[i])
            is_new = block is None
            if block is None:
                own = slots[i * BLOCK : (i + 1) * BLOCK].copy()
                block = at.children[keys[i]] = PrefixBlock(keys[i], at, own)
                block.users = 1
            else:
                self._use(block)
            result.append((block, is_new))
            at = block
        return result

    def release(self, blocks: Sequence[PrefixBlock]) -> None:
        """Release blocks that a sequence no longer uses, parents first."""
        for block in reversed(blocks):
            block.users -= 1
            if not block.users:
                self._idle[block] = None

    def evict(self, num_slots: int) -> list[int]:
        """Free at least ``num_slots`` slots, if unused blocks hold that many."""
        slots: list[int] = []
        while self._idle and len(slots) < num_slots:
            block, _ = self._idle.popitem(last=False)
            assert not block.children and block.parent is not None
            del block.parent.children[block.tokens]
            slots += block.slots.tolist()
        self.num_evicted += len(slots)
        if slots:
            self._roots = {scope: root for scope, root in self._roots.items() if root.children}
        return slots

    def _use(self, block: PrefixBlock) -> None:
        if not block.users:
            del self._idle[block]
        block.users += 1


def _keys(token_ids: Sequence[int]) -> list[bytes]:
    """The whole blocks of a sequence."""
    tokens = np.asarray(token_ids, np.int32)
    whole = tokens[: len(tokens) // BLOCK * BLOCK].tobytes()
    size = BLOCK * tokens.itemsize
    return [whole[i : i + size] for i in range(0, len(whole), size)]
