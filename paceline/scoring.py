"""Scores of many token sequences at once: which share a beginning, and the tree of their rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.types import Draft

SHARE = 4
"""Sequences go together if they share one in so many of the shorter one's tokens."""


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are the same from the first on."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def token_tree(continuations: Sequence[Sequence[int]]) -> tuple[Draft, list[int]]:
    """The tree of sequences that follow one prompt: what they share is there once.

    Returns:
        The tree, depth first; and for each sequence its last node, -1 if it is empty.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    ends = [-1] * len(continuations)
    path: list[int] = []  # nodes of the sequence before, which shares most with this one
    before: Sequence[int] = ()
    for i in sorted(range(len(continuations)), key=lambda i: list(continuations[i])):
        each = continuations[i]
        del path[common_length(before, each) :]
        for token in each[len(path) :]:
            parents.append(path[-1] if path else -1)
            path.append(len(token_ids))
            token_ids.append(token)
        ends[i] = path[-1] if path else -1
        before = each
    return Draft(np.asarray(token_ids, np.int64), np.asarray(parents, np.int32)), ends


@dataclass(frozen=True, slots=True)
class SharedBeginning:
    """Sequences that begin alike.

    Attributes:
        members: which ones.
        length: number of tokens that all of them begin with; all of its tokens if there is one.
    """

    members: tuple[int, ...]
    length: int


def shared_beginnings(
    sequences: Sequence[Sequence[int]], *, most_members: int, most_tokens: int, most_positions: int
) -> list[SharedBeginning]:
    """Put sequences together that are cheaper to read as one tree.

    Args:
        sequences: none of them empty.
        most_members: of a group.
        most_tokens: of its members together, after what all share.
        most_positions: of its tree and what comes before; what is alone may have more.

    Returns:
        Groups in which each sequence is once.
    """
    groups: list[SharedBeginning] = []
    members: list[int] = []
    length = tokens = positions = 0
    for i in sorted(range(len(sequences)), key=lambda i: list(sequences[i])):
        each = sequences[i]
        before = sequences[members[-1]] if members else ()
        shared = common_length(before, each)
        least = min(length, shared)
        # A shorter beginning makes each member's rest longer.
        rest = tokens + len(members) * (length - least) + len(each) - least
        nodes = positions + len(each) - shared
        if (
            0 < min(len(before), len(each)) <= SHARE * shared
            and len(members) < most_members
            and rest <= most_tokens
            and nodes <= most_positions
        ):
            members.append(i)
            length, tokens, positions = least, rest, nodes
            continue
        if members:
            groups.append(SharedBeginning(tuple(members), length))
        members, length, tokens, positions = [i], len(each), 0, len(each)
    return [*groups, SharedBeginning(tuple(members), length)] if members else []
