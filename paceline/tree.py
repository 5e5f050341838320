"""Pure functions on ``parent_indices``: depths, paths, children, ancestor masks, merging.

Every function takes a topologically sorted ``int[N]`` array in which -1 marks a child of the
last committed token (see :class:`paceline.types.Draft`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.types import EMPTY_DRAFT, Draft, DraftProbs, IndexArray


def is_chain(parent_indices: IndexArray) -> bool:
    """True when node ``i`` follows node ``i - 1`` for every ``i``."""
    # Drafts are small: lists are compared before NumPy has begun.
    parents: list[int] = parent_indices.tolist()
    return parents == list(range(-1, len(parents) - 1))


def depths(parent_indices: IndexArray) -> IndexArray:
    """Depth of each node, 1 for a child of the last committed token.  # int32[N]"""
    if is_chain(parent_indices):
        return np.arange(1, len(parent_indices) + 1, dtype=np.int32)
    result = np.empty(len(parent_indices), np.int32)
    for node, parent in enumerate(parent_indices):
        result[node] = 1 if parent < 0 else result[parent] + 1
    return result


def height(parent_indices: IndexArray) -> int:
    """Depth of the deepest node, 0 without nodes."""
    if is_chain(parent_indices):
        return len(parent_indices)
    return int(depths(parent_indices).max())


def children(parent_indices: IndexArray) -> list[list[int]]:
    """Children of each node in node order; the last list holds the children of the root."""
    result: list[list[int]] = [[] for _ in range(len(parent_indices) + 1)]
    for node, parent in enumerate(parent_indices.tolist()):
        result[parent].append(node)  # parent -1 lands in the last list
    return result


def path_to(parent_indices: IndexArray, node: int) -> tuple[int, ...]:
    """Nodes from the root's child down to ``node``, both included; empty for node -1."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(parent_indices[node])
    return tuple(reversed(path))


def leaves(parent_indices: IndexArray) -> list[int]:
    """Nodes that no other node follows."""
    inner = set(parent_indices.tolist())
    return [node for node in range(len(parent_indices)) if node not in inner]


def ancestor_mask(parent_indices: IndexArray) -> npt.NDArray[np.bool_]:
    """``mask[i, j]`` is True when node ``j`` is node ``i`` or one of its ancestors.  # [N, N]"""
    count = len(parent_indices)
    mask = np.eye(count, dtype=np.bool_)
    for node, parent in enumerate(parent_indices):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def accepted_path(draft: Draft, new_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The nodes of ``draft`` that became committed tokens, from the root down.

    The last of ``new_token_ids`` is the target's own and belongs to no node.
    """
    path: list[int] = []
    parent = -1
    tokens, parents = draft.token_ids.tolist(), draft.parent_indices.tolist()
    for wanted in new_token_ids[:-1]:
        followers = range(parent + 1, len(tokens))  # parents come before their children
        node = next((n for n in followers if (parents[n], tokens[n]) == (parent, wanted)), -1)
        if node < 0:
            break
        path.append(node)
        parent = node
    return tuple(path)


def below(draft: Draft, token_ids: Sequence[int]) -> Draft:
    """The tree behind a path of a draft; an empty one if the draft has no such path."""
    path = accepted_path(draft, [*token_ids, -1])
    if len(path) < len(token_ids) or not path:
        return EMPTY_DRAFT
    kept = np.zeros(draft.num_nodes, np.bool_)
    parents = draft.parent_indices
    for node in range(path[-1] + 1, draft.num_nodes):  # parents come before their children
        kept[node] = parents[node] == path[-1] or (parents[node] >= 0 and kept[parents[node]])
    keep = np.flatnonzero(kept)
    return subset(draft, keep) if len(keep) else EMPTY_DRAFT


def clip(draft: Draft, max_depth: int, max_nodes: int) -> Draft:
    """The nodes of a draft within both limits; the draft itself if all of them are."""
    if draft.num_nodes <= min(max_depth, max_nodes):
        return draft
    keep = np.flatnonzero(depths(draft.parent_indices) <= max_depth)[: max(0, max_nodes)]
    if len(keep) == draft.num_nodes:
        return draft
    # Parents come before children and are less deep, so a kept node's parent is kept too.
    return subset(draft, keep)


def subset(draft: Draft, keep: npt.NDArray[np.int64]) -> Draft:
    """The tree of some of a draft's nodes: ascending, each together with its parent."""
    place = np.full(draft.num_nodes + 1, -1, np.int32)
    place[keep] = np.arange(len(keep))
    probs = draft.probs
    if probs is not None:
        probs = DraftProbs.stack([probs.row(int(node)) for node in keep])
    return Draft(draft.token_ids[keep], place[draft.parent_indices[keep]], probs)


def merge(drafts: Sequence[Draft], max_nodes: int | None = None) -> Draft:
    """The union of several trees: nodes with the same token path become one.

    Nodes keep the order of the drafts they come from, first draft first, and ``max_nodes`` cuts
    the tail. Drafts that carry ``probs`` cannot be merged this way (a merged node was not drawn
    from one q), so the result has none.
    """
    index: dict[tuple[int, int], int] = {}
    token_ids: list[int] = []
    parents: list[int] = []
    for draft in drafts:
        place: dict[int, int] = {-1: -1}
        for node, (token, parent) in enumerate(
            zip(draft.token_ids.tolist(), draft.parent_indices.tolist(), strict=True)
        ):
            if parent not in place:
                continue  # its parent was cut
            key = (place[parent], token)
            if key not in index:
                if max_nodes is not None and len(token_ids) >= max_nodes:
                    continue
                index[key] = len(token_ids)
                token_ids.append(token)
                parents.append(key[0])
            place[node] = index[key]
    return Draft(np.asarray(token_ids, np.int64), np.asarray(parents, np.int32))


def align(part: Draft, whole: Draft) -> IndexArray:
    """For each node of ``part`` the node of ``whole`` with the same token path, or -1.  # int32[N]

    Of several nodes of ``whole`` with one path, the first counts.
    """
    index: dict[tuple[int, int], int] = {}
    for node, step in enumerate(
        zip(whole.parent_indices.tolist(), whole.token_ids.tolist(), strict=True)
    ):
        index.setdefault(step, node)
    place = np.full(part.num_nodes, -1, np.int32)
    for node, (parent, token) in enumerate(
        zip(part.parent_indices.tolist(), part.token_ids.tolist(), strict=True)
    ):
        if parent < 0 or place[parent] >= 0:
            place[node] = index.get((int(place[parent]) if parent >= 0 else -1, token), -1)
    return place
