"""RASD: retrieval, pruning by the draft model, fusion, and what they do to acceptance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SpeculationConfig
from paceline.drafters import rasd
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.rasd import MAX_MATCH, MAX_PLACES, Rasd, Store, prune, retrieve
from paceline.engine import RoundEvent
from paceline.models.llama import LlamaRunner
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.tree import is_chain
from paceline.types import Draft
from tests.core.engines import Reference, Small, small_engine
from tests.core.test_tree import VOCAB, token_path, token_paths, trees
from tests.modelzoo import make_model

GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=21)
PROMPTS = [[65, 66, 67], [70] * 12, [80, 81, 82] * 12]

texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=5)


# --- the store ---------------------------------------------------------------------------------


def slow_find(texts: list[list[int]], tail: list[int], depth: int) -> list[tuple[int, list[int]]]:
    """Every place after the last two tokens of ``tail``, the latest first."""
    found = []
    for text in reversed(texts):
        for place in range(len(text) - 1, 1, -1):
            match = 0
            while match < min(MAX_MATCH, place, len(tail)) and (
                text[place - 1 - match] == tail[-1 - match]
            ):
                match += 1
            if match >= 2:
                found.append((match, text[place : place + depth]))
    return found[:MAX_PLACES]


@given(texts, st.lists(st.integers(0, 2), max_size=6), st.integers(1, 5))
def test_finding_is_the_search_through_all_texts(
    texts: list[list[int]], tail: list[int], depth: int
) -> None:
    store = Store(1000)
    for text in texts:
        store.add(text[: len(text) // 2])
        store.extend(text[len(text) // 2 :])
    assert list(store.find(tail, depth)) == slow_find(texts, tail, depth)


@given(texts, st.integers(1, 25), st.lists(st.integers(0, 2), min_size=2, max_size=4))
def test_the_oldest_texts_make_room(texts: list[list[int]], limit: int, tail: list[int]) -> None:
    store = Store(limit)
    for text in texts:
        store.add(text)
    kept = list(texts)
    while len(kept) > 1 and sum(map(len, kept)) > limit:
        kept.pop(0)
    assert store.num_tokens == sum(map(len, kept))
    assert list(store.find(tail, 3)) == slow_find(kept, tail, 3)
    pairs = sum(max(0, len(text) - 2) for text in kept)
    assert sum(map(len, store._places.values())) == pairs, "places of texts that are gone"
    assert all(store._places.values())


def test_retrieval_prefers_long_matches_and_many_of_them() -> None:
    store = Store(1000)
    for text in ([1, 2, 3, 7, 7], [9, 2, 3, 8, 8], [9, 2, 3, 8, 6], [5, 1, 2, 3, 4, 4]):
        store.add(text)
    tail = [5, 1, 2, 3]
    tree = retrieve((store,), tail, 2, 10)
    # Matches: 4 for (4, 4), 3 for (7, 7), and 2 twice for what begins with 8.
    assert token_paths(tree) == {(4,), (4, 4), (7,), (7, 7), (8,), (8, 6), (8, 8)}
    assert token_paths(retrieve((store,), tail, 2, 3)) == {(4,), (4, 4), (8,)}
    assert retrieve((store,), tail, 2, 0).num_nodes == 0
    assert retrieve((store,), [5], 2, 9).num_nodes == 0, "one token is no place to copy from"


# --- pruning and fusion ------------------------------------------------------------------------


@given(trees(most=10), st.integers(0, 99), st.floats(0, 1), st.floats(0, 1))
def test_pruning(tree: Draft, seed: int, low: float, high: float) -> None:
    """What stays is likely, or the draft model was not asked, or ...; its prefix stays too."""
    low, high = sorted((low, high))
    random = np.random.default_rng(seed)
    prefixes = {(), *(token_path(tree, node) for node in range(tree.num_nodes))}
    known = {
        prefix: torch.from_numpy(random.normal(size=VOCAB))
        for prefix in sorted(prefixes)
        if random.random() < 0.6
    }

    def stays(path: tuple[int, ...], threshold: float) -> bool:
        return all(
            path[:i] not in known or float(known[path[:i]].softmax(-1)[path[i]]) >= threshold
            for i in range(len(path))
        )

    cut = prune(tree, known, high)
    assert token_paths(cut) == {path for path in token_paths(tree) if stays(path, high)}
    assert token_paths(cut) <= token_paths(prune(tree, known, low))
    assert prune(tree, known, 0.0).num_nodes == tree.num_nodes
    assert prune(tree, {}, 1.0).num_nodes == tree.num_nodes


def matched(draft: Draft, tokens: tuple[int, ...]) -> int:
    count, paths = 0, token_paths(draft)
    while count < len(tokens) and tokens[: count + 1] in paths:
        count += 1
    return count


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("shape", ["confidence", "chain"])
def test_the_fused_tree_is_the_union_and_accepts_the_best_of_both(
    shape: str,
    params: SamplingParams,
    tiny_folder: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = small_engine(tiny_folder)
    pruned: list[Draft] = []
    monkeypatch.setattr(
        rasd, "prune", lambda *arguments: pruned.append(prune(*arguments)) or pruned[-1]
    )
    bases: list[Draft] = []
    observe = Rasd.observe

    def spy(self: Rasd, sessions: Any, outcomes: Any) -> None:
        bases.append(self._states[sessions[0].session_id][1])
        observe(self, sessions, outcomes)

    monkeypatch.setattr(Rasd, "observe", spy)
    helped = []

    def check(event: RoundEvent) -> None:
        assert event.outcome is not None
        paths = token_paths(bases[-1]) | token_paths(pruned[-1])
        assert token_paths(event.outcome.draft) == paths
        assert event.outcome.draft.num_nodes == len(paths)
        each = [matched(draft, event.token_ids) for draft in (bases[-1], pruned[-1])]
        assert event.num_accepted == max(each)
        helped.append(each[1] > 0)

    config = SpeculationConfig(
        method="rasd",
        length="fixed",
        shape=shape,
        num_speculative_tokens=4,
        node_budget=200,
        prune_threshold=0.0,
    )
    for prompt in (PROMPTS[2], PROMPTS[2]):  # the second run finds the first one's output
        session = small.engine.submit(Request(prompt, params, config), on_event=check)
        while small.engine.has_work:
            small.engine.step()
        assert session.output_ids == reference(prompt, params)
        assert not session.stats.drafter_lost
    assert any(helped)
    small.assert_nothing_is_left()


def with_poor_drafter(folder: Path, zoo: Path) -> Small:
    """The draft model has other random weights, so it is nearly always wrong."""
    small = small_engine(folder)
    small.drafter = LlamaRunner(make_model("llama_gqa", zoo, seed=9, num_hidden_layers=2))
    small.engine.drafters["draft_model"] = DraftModel(small.drafter)
    return small


def test_earlier_outputs_help_later_requests(
    tiny_folder: Path, zoo: Path, reference: Reference
) -> None:
    small = with_poor_drafter(tiny_folder, zoo)
    config = SpeculationConfig(method="rasd", length="fixed", prune_threshold=0.0)
    first, second = (small.engine.generate([PROMPTS[0]], GREEDY, config)[0] for _ in range(2))
    assert first.output_ids == second.output_ids == reference(PROMPTS[0], GREEDY)
    assert second.stats.num_target_forwards < 0.5 * first.stats.num_target_forwards
    # A draft model that finds retrieved tokens unlikely takes them away again.
    strict = SpeculationConfig(method="rasd", length="fixed", prune_threshold=1.0)
    third = small.engine.generate([PROMPTS[0]], GREEDY, strict)[0]
    assert third.output_ids == first.output_ids
    assert third.stats.num_accepted < second.stats.num_accepted
    small.assert_nothing_is_left()


def test_prompts_of_others_are_not_kept(tiny_folder: Path, zoo: Path) -> None:
    small = with_poor_drafter(tiny_folder, zoo)
    config = SpeculationConfig(method="rasd", length="fixed")
    session = small.engine.generate([PROMPTS[2]], GREEDY, config)[0]
    drafter = small.engine.drafters["rasd"]
    assert isinstance(drafter, Rasd)
    assert list(drafter._earlier._texts.values()) == [session.output_ids]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_a_batch_with_other_methods(
    params: SamplingParams, tiny_folder: Path, reference: Reference
) -> None:
    small = small_engine(tiny_folder)
    methods = ["rasd", "rasd", "draft_model", "rasd"]
    prompts = [*PROMPTS, PROMPTS[2]]
    sessions = [
        small.engine.submit(
            Request(prompt, params, SpeculationConfig(method=method, length="fixed"))
        )
        for prompt, method in zip(prompts, methods, strict=True)
    ]
    for _ in range(3):
        small.engine.step()
    small.engine.cancel(sessions[1].session_id)
    small.engine.truncate(sessions[0].session_id, sessions[0].prompt_length + 1)
    while small.engine.has_work:
        small.engine.step()
    for i in (0, 2, 3):
        assert sessions[i].output_ids == reference(prompts[i], params)
        assert not sessions[i].stats.drafter_lost
    small.assert_nothing_is_left()


def test_a_rule_for_chains(tiny_folder: Path, reference: Reference) -> None:
    small = small_engine(tiny_folder)
    drafts: list[Draft] = []
    config = SpeculationConfig(method="rasd", length="fixed", shape="chain", acceptance="rejection")
    session = small.engine.submit(
        Request(PROMPTS[2], GREEDY, config),
        on_event=lambda event: drafts.append(event.outcome.draft) if event.outcome else None,
    )
    while small.engine.has_work:
        small.engine.step()
    assert session.output_ids == reference(PROMPTS[2], GREEDY)
    assert all(is_chain(draft.parent_indices) for draft in drafts)
    assert any(draft.num_nodes for draft in drafts)
    small.assert_nothing_is_left()
