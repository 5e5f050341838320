"""Token trees: masks, paths, merging, and what merging does to acceptance."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.acceptance.base import PathLogits
from paceline.acceptance.exact_match import Coupled
from paceline.sampling import SamplingParams
from paceline.tree import (
    accepted_path,
    align,
    ancestor_mask,
    children,
    clip,
    depths,
    is_chain,
    leaves,
    merge,
    path_to,
)
from paceline.types import Draft, DraftProbs, IndexArray

VOCAB = 4
Paths = set[tuple[int, ...]]


@st.composite
def trees(draw: st.DrawFn, most: int = 14, vocab: int = VOCAB) -> Draft:
    count = draw(st.integers(0, most))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    ids = draw(st.lists(st.integers(0, vocab - 1), min_size=count, max_size=count))
    return Draft(np.array(ids, np.int64), np.array(parents, np.int32))


def token_path(draft: Draft, node: int) -> tuple[int, ...]:
    return tuple(int(draft.token_ids[i]) for i in path_to(draft.parent_indices, node))


def token_paths(draft: Draft) -> Paths:
    return {token_path(draft, node) for node in range(draft.num_nodes)}


@given(trees())
def test_masks_paths_depths_children_and_leaves_agree(draft: Draft) -> None:
    parents = draft.parent_indices
    mask, levels = ancestor_mask(parents), depths(parents)
    followers = children(parents)
    assert mask.shape == (draft.num_nodes, draft.num_nodes)
    for node in range(draft.num_nodes):
        path = path_to(parents, node)
        assert set(np.flatnonzero(mask[node])) == set(path)
        assert levels[node] == len(path) == mask[node].sum()
        assert path[-1] == node
        assert parents[path[0]] == -1
        assert all(parents[b] == a for a, b in itertools.pairwise(path))
        assert node in followers[parents[node]]
    assert sum(len(each) for each in followers) == draft.num_nodes
    assert leaves(parents) == [n for n in range(draft.num_nodes) if not followers[n]]
    assert path_to(parents, -1) == ()


@given(trees())
def test_a_chain_is_a_tree_whose_only_leaf_is_its_last_node(draft: Draft) -> None:
    parents: IndexArray = draft.parent_indices
    last_path = path_to(parents, draft.num_nodes - 1)
    assert is_chain(parents) == (len(last_path) == draft.num_nodes)
    assert is_chain(Draft.chain(draft.token_ids).parent_indices)


@given(st.lists(trees(), max_size=4))
def test_merging_is_the_union_of_paths(drafts: list[Draft]) -> None:
    merged = merge(drafts)
    assert merged.is_sound(VOCAB)
    assert token_paths(merged) == set[tuple[int, ...]]().union(*map(token_paths, drafts))
    assert len(token_paths(merged)) == merged.num_nodes, "a path twice"
    again = merge([merged, *drafts])
    np.testing.assert_array_equal(again.token_ids, merged.token_ids)
    np.testing.assert_array_equal(again.parent_indices, merged.parent_indices)


@given(st.lists(trees(), max_size=4), st.integers(0, 12))
def test_merging_within_a_budget(drafts: list[Draft], budget: int) -> None:
    whole, cut = merge(drafts), merge(drafts, budget)
    assert cut.num_nodes <= budget
    assert cut.is_sound(VOCAB)
    assert token_paths(cut) <= token_paths(whole)
    assert cut.num_nodes == min(budget, whole.num_nodes), "room was left unused"


@given(trees(), st.integers(0, 6), st.integers(0, 12), st.booleans())
def test_clipping(draft: Draft, max_depth: int, max_nodes: int, with_probs: bool) -> None:
    if with_probs:  # each node from a distribution that tells which node it was
        rows = [
            (np.array([token]), np.array([1.0 + node], np.float32))
            for node, token in enumerate(draft.token_ids)
        ]
        draft = Draft(draft.token_ids, draft.parent_indices, DraftProbs.stack(rows))
    cut = clip(draft, max_depth, max_nodes)
    assert cut.is_sound(VOCAB)
    assert cut.num_nodes <= max_nodes
    assert all(depths(cut.parent_indices) <= max_depth)
    shallow = [n for n in range(draft.num_nodes) if depths(draft.parent_indices)[n] <= max_depth]
    kept = shallow[:max_nodes]
    assert [token_path(cut, n) for n in range(cut.num_nodes)] == [
        token_path(draft, n) for n in kept
    ]
    if with_probs:
        assert cut.probs is not None
        assert [cut.probs.row(n)[1][0] for n in range(cut.num_nodes)] == [1.0 + n for n in kept]


class Walk:
    """A target whose token after each path is a fixed pseudo-random one."""

    def __init__(self, salt: int) -> None:
        self.salt = salt

    def token(self, path: tuple[int, ...]) -> int:
        return hash((self.salt, path)) % VOCAB  # tuples of ints hash the same everywhere

    def accept(self, draft: Draft) -> tuple[tuple[int, ...], int]:
        """Tokens that the rule accepts, and the next one."""
        nodes = [-1, *range(draft.num_nodes)]
        logits = torch.zeros(len(nodes), VOCAB)
        for row, node in enumerate(nodes):
            logits[row, self.token(token_path(draft, node))] = 5.0
        verdict = Coupled().accept(draft, PathLogits(logits, SamplingParams(), [0]))
        tokens = tuple(int(draft.token_ids[node]) for node in verdict.path)
        for first, second in zip((-1, *verdict.path), verdict.path, strict=False):
            assert draft.parent_indices[second] == first, "not a path"
        return tokens, verdict.next_token

    def best(self, draft: Draft) -> tuple[int, ...]:
        """The longest path that follows the target all the way, by its definition."""
        paths, tokens = token_paths(draft), ()
        while (*tokens, self.token(tokens)) in paths:
            tokens = (*tokens, self.token(tokens))
        return tokens


@given(trees(), trees(), st.integers(0, 99))
def test_more_nodes_never_shorten_what_is_accepted(a: Draft, b: Draft, salt: int) -> None:
    """Accepted with A ∪ B is the better of A and B."""
    target = Walk(salt)
    both = merge([a, b])
    best = max(target.best(a), target.best(b), key=len)
    tokens, next_token = target.accept(both)
    assert tokens == best
    assert next_token == target.token(tokens)
    for each in (merge([a]), merge([b])):  # without double paths
        assert target.accept(each)[0] == target.best(each)


@given(trees(), st.integers(0, 99))
def test_every_round_makes_progress(draft: Draft, salt: int) -> None:
    """Between one token and one more than the tree is deep, and always the target's own."""
    target = Walk(salt)
    tokens, next_token = target.accept(draft)
    deepest = max(depths(draft.parent_indices), default=0)
    assert 1 <= len(tokens) + 1 <= deepest + 1
    for i, token in enumerate((*tokens, next_token)):
        assert token == target.token(tokens[:i])


def walk(draft: Draft, tokens: list[int]) -> list[int]:
    """The nodes that tokens lead to, as far as they do; of equal children the first."""
    followers = children(draft.parent_indices)
    path: list[int] = []
    for token in tokens:
        after = followers[path[-1] if path else -1]
        node = next((n for n in after if draft.token_ids[n] == token), None)
        if node is None:
            break
        path.append(node)
    return path


@given(trees(vocab=2), st.lists(st.integers(0, 1), min_size=1, max_size=8))
def test_committed_tokens_lead_down_the_draft(draft: Draft, tokens: list[int]) -> None:
    """The last one is the target's own, whatever the draft has there."""
    assert accepted_path(draft, tokens) == tuple(walk(draft, tokens[:-1]))


@given(trees(vocab=2), trees(vocab=2))
def test_nodes_are_found_again_by_their_tokens(part: Draft, whole: Draft) -> None:
    found = align(part, whole)
    for node in range(part.num_nodes):
        tokens = list(token_path(part, node))
        path = walk(whole, tokens)
        assert found[node] == (path[-1] if len(path) == len(tokens) else -1)


def test_a_node_is_not_found_without_its_parent() -> None:
    assert align(Draft.chain([0, 1]), Draft.chain([1])).tolist() == [-1, -1]
