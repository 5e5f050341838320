"""SuffixDecoding: trees that count exactly, drafts within their bounds, learning from outputs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.drafters.base import Drafter
from paceline.drafters.head import HeadDrafter
from paceline.drafters.suffix import MAX_DEPTH, Place, SuffixDecoding, SuffixNode, SuffixTree
from paceline.loading import load_engine
from paceline.plan import resolve
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.tree import depths, path_to
from paceline.types import Budget, Draft
from tests.core.engines import Reference, small_engine
from tests.heads import untrained_heads

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=5)
DEPTH = 6


def tree_of(texts: list[list[int]], depth: int = DEPTH) -> SuffixTree:
    """A tree of finished texts."""
    tree = SuffixTree(depth)
    for text in texts:
        for token in text:
            tree.append(token)
        assert tree.finish() == text
    return tree


def occurrences(texts: list[list[int]], depth: int = DEPTH) -> Counter[tuple[int, ...]]:
    """How often every substring occurs."""
    return Counter(
        tuple(text[start:end])
        for text in texts
        for start in range(len(text))
        for end in range(start + 1, min(start + depth, len(text)) + 1)
    )


def counts(tree: SuffixTree) -> Counter[tuple[int, ...]]:
    """What the tree says about every substring, from its edges."""
    found: Counter[tuple[int, ...]] = Counter()

    def visit(node: SuffixNode, prefix: tuple[int, ...]) -> None:
        assert node.total == sum(child.count for child in node.children.values())
        for first, child in node.children.items():
            assert child.parent is node
            edge = child.text[child.start : min(child.end, len(child.text))]
            assert edge[0] == first
            for size in range(1, len(edge) + 1):
                found[prefix + tuple(edge[:size])] = child.count
            visit(child, prefix + tuple(edge))
        if node.children and node is not tree.root:
            top = max(node.children.values(), key=lambda n: (n.count, n.stamp))
            assert node.best is top

    visit(tree.root, ())
    return found


def structure(node: SuffixNode) -> Any:
    """A tree as nested values: edges, counts, and the preferred child."""
    return {
        first: (child.text[child.start : child.end], child.count, structure(child))
        for first, child in node.children.items()
    }, [first for first, child in node.children.items() if child is node.best and node.parent]


def size(node: SuffixNode) -> int:
    return sum(1 + size(child) for child in node.children.values())


@given(TEXTS)
def test_finished_texts_are_counted_exactly(texts: list[list[int]]) -> None:
    tree = tree_of(texts)
    assert counts(tree) == occurrences(texts)
    assert tree.num_nodes == size(tree.root) <= 2 * sum(map(len, texts))


@given(TEXTS)
def test_a_growing_text_is_counted_exactly_where_it_goes_on(texts: list[list[int]]) -> None:
    """At the ends of the growing text an edge may be counted ahead; ratios never are."""
    tree = tree_of(texts[:-1])
    for end, token in enumerate(texts[-1], 1):
        tree.append(token)
        now = [*texts[:-1], texts[-1][:end]]
        truth = occurrences(now)
        assert counts(tree).keys() == truth.keys()
        lengths = [
            n for n in range(1, min(DEPTH, end + 1)) if truth[tuple(now[-1][end - n : end])] > 1
        ]
        assert len(tree.matches) == len(lengths)
        for place, length in zip(reversed(tree.matches), lengths, strict=True):
            suffix = now[-1][end - length : end]
            found = tree.locate(suffix, length)
            assert found is not None
            assert (found.node, found.offset) == (place.node, place.offset)
            check_chain(tree, place, suffix, truth)


def check_chain(
    tree: SuffixTree, place: Place, matched: list[int], truth: Counter[tuple[int, ...]]
) -> None:
    """The chain follows a most frequent continuation, and its score is its probabilities' sum."""
    candidate = tree.chain(place, 4, 0.0)
    prefix, prob, score = tuple(matched), 1.0, 0.0
    for token in candidate.token_ids:
        after = {t: truth[(*prefix, t)] for t in range(3)}
        assert after[token] == max(after.values())
        prob *= after[token] / sum(after.values())
        score += prob
        prefix += (token,)
    assert candidate.score == pytest.approx(score)
    if len(candidate.token_ids) < 4:
        assert not any(truth[(*prefix, t)] for t in range(3))


@given(TEXTS, st.floats(0.01, 0.9), st.integers(1, 12))
def test_best_first_takes_the_most_probable_nodes(
    texts: list[list[int]], min_prob: float, limit: int
) -> None:
    tree, truth = tree_of(texts), occurrences(texts)
    matched = texts[0][:2]
    place = tree.locate(matched, len(matched))
    assert place is not None
    every: list[float] = []

    def enumerate_from(prefix: tuple[int, ...], prob: float) -> None:
        after = {t: truth[(*prefix, t)] for t in range(3)}
        for token, count in after.items():
            if count and prob * count / sum(after.values()) >= min_prob:
                every.append(prob * count / sum(after.values()))
                enumerate_from((*prefix, token), every[-1])

    enumerate_from(tuple(matched), 1.0)
    candidate = tree.best_first(place, limit, 64, min_prob)
    assert candidate.parents is not None
    assert candidate.score == pytest.approx(sum(sorted(every, reverse=True)[:limit]))
    draft = Draft.checked(candidate.token_ids, candidate.parents, 3)
    paths = {
        tuple(draft.token_ids[list(path_to(draft.parent_indices, node))].tolist())
        for node in range(draft.num_nodes)
    }
    assert len(paths) == draft.num_nodes == min(limit, len(every))
    assert all(truth[(*matched, *path)] for path in paths)
    shallow = tree.best_first(place, limit, 1, min_prob)
    assert set(shallow.parents or ()) <= {-1}


@given(TEXTS)
def test_an_evicted_text_leaves_the_tree_as_if_it_had_never_been_there(
    texts: list[list[int]],
) -> None:
    tree = tree_of(texts)
    for gone, text in enumerate(texts, 1):
        tree.remove(text)
        rest = texts[gone:]
        assert structure(tree.root) == structure(tree_of(rest).root)
        assert counts(tree) == occurrences(rest)
        assert tree.num_nodes == size(tree.root)
        kept = {id(t) for t in rest}
        assert texts_in(tree.root) <= len(kept)
    assert tree.num_nodes == 0
    assert not tree.root.children


def texts_in(node: SuffixNode) -> int:
    """Number of different token lists that the edges below refer to."""
    found, stack = set(), list(node.children.values())
    while stack:
        current = stack.pop()
        found.add(id(current.text))
        stack += current.children.values()
    return len(found)


@given(TEXTS, st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_longest_match_in_finished_texts(texts: list[list[int]], context: list[int]) -> None:
    truth = occurrences(texts)
    lengths = [n for n in range(1, len(context) + 1) if truth[tuple(context[-n:])]]
    assert tree_of(texts).longest_match(context) == max(lengths, default=0)


# --- the drafter ----------------------------------------------------------------------------------


def session_of(
    token_ids: list[int], method: str = "suffix_decoding", name: str = "s", **knobs: Any
) -> Session:
    config = SpeculationConfig(method=method, **knobs)
    return Session(name, token_ids, SamplingParams(max_tokens=1000), resolve(config))


def drafted(drafter: SuffixDecoding, session: Session, budget: int = 64) -> Draft:
    drafter.open(session)
    try:
        return drafter.propose([session], [Budget(budget, budget)])[0]
    finally:
        drafter.close(session)


def test_no_match_no_draft() -> None:
    assert drafted(SuffixDecoding(), session_of([1, 2, 3, 4, 5])).num_nodes == 0


@pytest.mark.parametrize("method", ["suffix_decoding", "suffix_decoding_tree"])
@pytest.mark.parametrize("alpha", [0.5, 1.0, 3.0])
def test_a_draft_is_no_longer_than_its_match_allows(method: str, alpha: float) -> None:
    for match in range(1, 20):
        ids = [*range(100, 100 + match), *range(50), *range(100, 100 + match)]
        draft = drafted(SuffixDecoding(), session_of(ids, method, draft_per_match=alpha))
        # Match and draft together are no longer than the tree is deep.
        length = max(min(int(alpha * m), MAX_DEPTH - m) for m in range(1, match + 1))
        assert draft.token_ids.tolist() == list(range(length))
        assert length <= alpha * match
        wide = session_of(ids, method, draft_per_match=0.0, draft_offset=2)
        assert drafted(SuffixDecoding(), wide).token_ids.tolist() == [0, 1]


@pytest.mark.parametrize("method", ["suffix_decoding", "suffix_decoding_tree"])
@pytest.mark.parametrize("least", [0.1, 0.4])
def test_no_improbable_token_is_drafted(method: str, least: float) -> None:
    rng = np.random.default_rng(0)
    nonempty = 0
    for _ in range(20):
        ids = rng.choice(4, 80, p=[0.7, 0.1, 0.1, 0.1]).tolist()
        knobs: dict[str, Any] = {"min_token_prob": least, "draft_per_match": 4.0}
        draft = drafted(SuffixDecoding(), session_of(ids, method, **knobs), 16)
        truth = occurrences([ids], 64)
        nonempty += draft.num_nodes > 0
        # The match is one of the suffixes; for one of them all nodes must be probable enough.
        assert draft.num_nodes == 0 or any(
            all(
                probability(truth, ids[-m:], draft, node) >= least - 1e-9
                for node in range(draft.num_nodes)
            )
            for m in range(1, 64)
        )
    assert nonempty > 10


def probability(
    truth: Counter[tuple[int, ...]], matched: list[int], draft: Draft, node: int
) -> float:
    prefix, prob = tuple(matched), 1.0
    for token in draft.token_ids[list(path_to(draft.parent_indices, node))].tolist():
        total = sum(truth[(*prefix, t)] for t in range(4))
        prob *= truth[(*prefix, token)] / total if total else 0.0
        prefix += (token,)
    return prob


def test_the_score_grows_with_repetition() -> None:
    """The drafter is surer of a continuation that it saw more often."""
    scores = []
    for times in range(1, 6):
        tree = SuffixTree()
        for token in [1, 2, 9, 9, *[1, 2, 3, 4] * times, 1, 2]:
            tree.append(token)
        scores.append(max(tree.chain(place, 2, 0.0).score for place in tree.matches))
    assert scores == sorted(scores)
    assert scores[0] < scores[-1]


def test_the_best_of_all_matches_and_both_trees_wins() -> None:
    """Pruning changes nothing: as a search over every match length finds."""
    rng = np.random.default_rng(1)
    for trial in range(60):
        drafter = SuffixDecoding()
        outputs = [rng.integers(0, 3, 30).tolist() for _ in range(3)]
        for i, output in enumerate(outputs):
            earlier = session_of([0], name=str(i))
            drafter.open(earlier)
            earlier.commit(output)
            drafter.close(earlier)
        ids = rng.integers(0, 3, 40).tolist()
        alpha = [1.0, 2.5][trial % 2]
        session = session_of(ids, draft_per_match=alpha, min_token_prob=0.1)
        draft = drafted(drafter, session, 12)
        own = SuffixTree()
        for token in ids:
            own.append(token)
        found = [
            tree.chain(place, min(12, int(alpha * m)), 0.1)
            for tree in (own, tree_of(outputs, 64))
            for m in range(40, 0, -1)
            if (place := tree.locate(ids, m)) is not None
        ]
        best = max(found, key=lambda candidate: candidate.score)
        assert draft.token_ids.tolist() == best.token_ids


def test_the_shared_tree_is_bounded() -> None:
    drafter = SuffixDecoding(max_requests=3, max_nodes=60)
    rng = np.random.default_rng(0)
    outputs = []
    for i in range(12):
        session = session_of([1, 2], name=str(i))
        drafter.open(session)
        outputs.append(rng.integers(0, 5, 8 if i < 10 else 100).tolist())
        session.commit(outputs[-1])
        drafter.close(session)
        assert drafter.shared.num_nodes <= 60
        if i == 9:  # the oldest have left
            assert structure(drafter.shared.root) == structure(tree_of(outputs[-3:], 64).root)
    assert structure(drafter.shared.root) == structure(tree_of([outputs[-1][-30:]], 64).root)


@pytest.mark.parametrize("method", ["suffix_decoding", "suffix_decoding_tree"])
def test_the_second_run_of_a_prompt_drafts_from_the_first(
    method: str, tiny_folder: Path, reference: Reference
) -> None:
    prompt = [65, 80, 72, 90, 101]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    engine = small_engine(tiny_folder).engine
    first, second = (
        engine.generate([prompt], params, SpeculationConfig(length="fixed", method=method))[0]
        for _ in range(2)
    )
    assert first.output_ids == second.output_ids == reference(prompt, params)
    assert first.stats.mean_accepted_length < 1.5
    assert second.stats.mean_accepted_length > 5
    # Another engine knows nothing of it.
    other = small_engine(tiny_folder).engine
    third = other.generate([prompt], params, SpeculationConfig(length="fixed", method=method))[0]
    assert third.stats.num_target_forwards == first.stats.num_target_forwards


def test_trees_are_wide_only_where_a_rule_can_verify_them() -> None:
    ids = [1, 2, 3, 8, 1, 2, 4, 9, 5, 1, 2]
    draft = drafted(SuffixDecoding(), session_of(ids, "suffix_decoding_tree"))
    assert sorted(draft.token_ids.tolist()) == [3, 4]
    assert depths(draft.parent_indices).tolist() == [1, 1]
    chain = session_of(ids, "suffix_decoding_tree", acceptance="rejection")
    draft = drafted(SuffixDecoding(), chain)
    assert draft.token_ids.tolist() == [4, 9]
    assert depths(draft.parent_indices).tolist() == [1, 2]


def test_states_are_freed(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for method in ("suffix_decoding", "suffix_decoding_tree", "suffix_decoding_hybrid"):
        config = SpeculationConfig(length="fixed", method=method)
        small.engine.generate([[70] * 9, [65, 66]], params, config)
    small.assert_nothing_is_left()


class Watched(Drafter):
    """A fallback that notes what it is asked."""

    needs = frozenset[Any]()

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []

    def open(self, session: Session) -> None:
        self.calls.append(("open", [session.session_id]))

    def close(self, session: Session) -> None:
        self.calls.append(("close", [session.session_id]))

    def propose(self, sessions: Any, budgets: Any) -> list[Draft]:
        self.calls.append(("propose", [s.session_id for s in sessions]))
        return [Draft.chain([7] * budget.depth) for budget in budgets]

    def observe(self, sessions: Any, outcomes: Any) -> None:
        self.calls.append(("observe", [s.session_id for s in sessions]))


def test_the_fallback_drafts_where_the_score_is_low() -> None:
    fallback = Watched()
    drafter = SuffixDecoding(fallback)
    method = "suffix_decoding_hybrid"
    sure = session_of([*range(10), *range(10)], method, "sure", min_score=4.0)
    unsure = session_of([*range(10), *range(4)], method, "unsure", min_score=5.0)
    stopped = session_of([1, 2, 3], method, "stopped")
    sessions = [sure, unsure, stopped]
    for session in sessions:
        drafter.open(session)
    drafts = drafter.propose(sessions, [Budget(20, 20), Budget(20, 20), Budget(0, 0)])
    drafter.observe(sessions, [None, None, None])  # type: ignore[list-item]
    for session in sessions:
        drafter.close(session)
    assert drafts[0].token_ids.tolist() == list(range(10))
    assert drafts[1].token_ids.tolist() == [7] * 6
    assert drafts[2].num_nodes == 0
    names = [["sure"], ["unsure"], ["stopped"]]
    assert fallback.calls == [
        *(("open", name) for name in names),
        ("propose", ["unsure"]),
        ("observe", ["unsure"]),
        *(("close", name) for name in names),
    ]


def test_a_head_behind_it_reads_every_committed_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of rounds in which the tree drafted."""
    read, wanted = [0], [0]
    drafted = {"head": 0, "tree": 0}
    begin, find = HeadDrafter._begin, SuffixDecoding.find

    def noted_begin(drafter: HeadDrafter, sessions: Any, how: Any) -> Any:
        (reading,) = drafter._readings.values()
        read.append(read[-1] + sum(len(rows) for rows in reading.features))
        wanted.append(sessions[0].length - 1)  # the last committed token has no features yet
        drafted["head"] += 1
        return begin(drafter, sessions, how)

    def noted_find(drafter: SuffixDecoding, *args: Any) -> Draft | None:
        draft = find(drafter, *args)
        drafted["tree"] += draft is not None
        return draft

    monkeypatch.setattr(HeadDrafter, "_begin", noted_begin)
    monkeypatch.setattr(SuffixDecoding, "find", noted_find)
    engine = load_engine("demo", heads=untrained_heads(TARGET_DIR))
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode("def add(a, b):\n    return a + b\n\n\n" * 3)
    config = SpeculationConfig(method="suffix_decoding_eagle3", length="fixed", min_score=3.0)
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    (session,) = engine.generate([prompt], params, config)
    assert session.error is None
    assert min(drafted.values()) > 3, drafted
    assert read == wanted
