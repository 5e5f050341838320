"""ADED: the trigram table, its adaption to a session, and the search."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SpeculationConfig
from paceline.drafters.aded import (
    GAIN,
    HIGHEST_WEIGHT,
    NUM_SUCCESSORS,
    Aded,
    SearchNode,
    SessionTable,
    TrigramTable,
    search,
)
from paceline.plan import resolve
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.tree import children, depths, is_chain
from paceline.types import Budget
from tests.core.engines import Reference, small_engine

CONFIG = SpeculationConfig(method="aded", length="fixed")
PLAN = resolve(CONFIG)
WHOLE = Budget(5, 64)


def session_of(tokens: list[int], config: SpeculationConfig = CONFIG, seed: int = 0) -> Session:
    params = SamplingParams(seed=seed, ignore_eos=True)
    return Session("s", tokens, params, resolve(config))


def visits_of(root: SearchNode) -> dict[int, int]:
    return {child.bigram[1]: child.visits for child in root.children or ()}


# --- the table -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), max_size=60))
def test_probabilities_are_shares_of_the_successors(tokens: list[int]) -> None:
    table, counts = TrigramTable(), defaultdict[tuple[int, int], Counter[int]](Counter)
    table.learn(tokens)
    for first, second, third in zip(tokens, tokens[1:], tokens[2:], strict=False):
        counts[first, second][third] += 1
    assert len(table) == len(counts)
    for bigram, after in counts.items():
        shares = {token: count / after.total() for token, count in after.items()}
        assert table.probabilities(bigram) == pytest.approx(shares)
    assert table.probabilities((7, 7)) == {}


def test_the_table_is_bounded_and_keeps_what_was_seen_last() -> None:
    table = TrigramTable(capacity=4)
    table.learn(list(range(20)))
    assert len(table) == 4
    assert table.probabilities((17, 18)) == {19: 1.0}
    assert table.probabilities((0, 1)) == {}


def test_many_successors_are_pruned_to_the_frequent_ones() -> None:
    table = TrigramTable()
    for token in range(10):
        table.learn([1, 2, token] * 5)
    for token in range(10, 500):
        table.learn([1, 2, token])
        assert len(table.probabilities((1, 2))) <= 2 * NUM_SUCCESSORS
        assert token in table.probabilities((1, 2))  # a new one has its chance
    assert set(range(10)) <= set(table.probabilities((1, 2)))


# --- the search ----------------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [1, 12, 150])
@pytest.mark.parametrize("vocab", [2, 6, 40])
def test_trees_have_at_most_64_nodes_and_depth_5(vocab: int, iterations: int) -> None:
    rng = random.Random(vocab)
    config = SpeculationConfig(method="aded", length="fixed", search_iterations=iterations)
    drafter = Aded(TrigramTable())
    for length in (2, 3, 50, 3000):
        weights = [1 / (token + 1) for token in range(vocab)]
        session = session_of(rng.choices(range(vocab), weights, k=length), config)
        drafter.open(session)
        for budget in (WHOLE, Budget(3, 64), Budget(5, 7), Budget(1, 1), Budget(0, 0)):
            draft = drafter.propose([session], [budget])[0]
            assert draft.is_sound(vocab)
            assert draft.num_nodes <= budget.nodes
            if draft.num_nodes:
                assert depths(draft.parent_indices).max() <= budget.depth
            for siblings in children(draft.parent_indices):
                assert len({draft.token_ids[node] for node in siblings}) == len(siblings)
            if vocab == 40 and iterations == 150 and length == 3000 and budget.depth == 5:
                assert draft.num_nodes == budget.nodes or draft.num_nodes > 50
        drafter.close(session)


def test_each_step_of_the_draft_is_in_the_table() -> None:
    rng = random.Random(1)
    tokens = rng.choices(range(6), k=300)
    trigrams = set(zip(tokens, tokens[1:], tokens[2:], strict=False))
    drafter, session = Aded(TrigramTable()), session_of(tokens)
    drafter.open(session)
    draft = drafter.propose([session], [WHOLE])[0]
    assert draft.num_nodes > 20
    paths = [tuple(tokens[-2:])]
    for token, parent in zip(draft.token_ids.tolist(), draft.parent_indices, strict=True):
        paths.append((*paths[parent + 1], token))
        assert paths[-1][-3:] in trigrams


def test_an_empty_table_drafts_nothing(tiny_folder: Path) -> None:
    """Short prompts hold no trigram, so that the first rounds are AR."""
    drafter = Aded(TrigramTable())
    for tokens in ([3], [3, 4]):
        session = session_of(tokens)
        drafter.open(session)
        assert drafter.propose([session], [WHOLE])[0].num_nodes == 0
        drafter.close(session)
    small = small_engine(tiny_folder)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    session = small.engine.generate([[70]], params, CONFIG)[0]
    assert session.stats.num_draft_nodes == 0
    assert session.stats.num_target_forwards == 3
    small.assert_nothing_is_left()


def test_likely_tokens_are_visited_more_and_all_visits_add_up() -> None:
    table = {(0, 1): ((5, 6, 7), (0.6, 0.3, 0.1)), (1, 5): ((8,), (1.0,))}
    successors = defaultdict[tuple[int, int], tuple[tuple[int, ...], tuple[float, ...]]](
        lambda: ((), ()), table
    )
    root = search((0, 1), successors, 200, 4, random.Random(0))
    visits = visits_of(root)
    assert root.visits == sum(visits.values()) == 200
    assert visits[5] > visits[6] > visits[7] > 0
    # At equal weights the token that leads further is worth more.
    table = {(0, 1): ((5, 6), (0.5, 0.5)), (1, 6): ((8,), (1.0,)), (6, 8): ((9,), (1.0,))}
    successors = defaultdict(lambda: ((), ()), table)
    visits = visits_of(search((0, 1), successors, 200, 4, random.Random(0)))
    assert visits[6] > visits[5]


def test_a_repeated_phrase_gains_weight_and_visits() -> None:
    """The latest tokens gain 0.04 in each round, to 3.0 at most; nothing else does."""
    tokens = [1, 2, 3, 9, 1, 2, 4, 8, *([0] * 20), 1, 2, 4, 7, 1, 2]
    drafter, session = Aded(TrigramTable()), session_of(tokens)
    drafter.open(session)
    state = drafter._states["s"]
    weights, visits = [], []
    for _ in range(100):
        found = SessionTable(drafter.table, state.gains)
        ids, values = found[1, 2]
        weights.append(dict(zip(ids, values, strict=True)))
        visits.append(visits_of(search((1, 2), found, 60, 4, random.Random(0))))
        drafter.propose([session], [WHOLE])
    shares = drafter.table.probabilities((1, 2))
    assert shares == {3: pytest.approx(1 / 3), 4: pytest.approx(2 / 3)}
    for calls in (1, 5, 20):
        assert weights[calls][4] == pytest.approx(shares[4] + calls * GAIN)
    assert weights[-1][4] == HIGHEST_WEIGHT
    assert all(row[3] == pytest.approx(shares[3]) for row in weights)
    assert visits[0][4] < visits[5][4] < visits[-1][4]


def test_a_phrase_that_repeats_in_the_text_rises_for_all_sessions() -> None:
    table = TrigramTable()
    table.learn([1, 2, 3])
    before = table.probabilities((1, 2))
    drafter = Aded(table)
    for i in range(3):
        session = Session(f"s{i}", [1, 2, 4], SamplingParams(), PLAN)
        drafter.open(session)
        drafter.close(session)
    assert before == {3: 1.0}
    assert table.probabilities((1, 2)) == {3: 0.25, 4: 0.75}


def test_drafts_are_the_same_for_the_same_request() -> None:
    tokens = random.Random(2).choices(range(20), k=2000)
    drafts = []
    for seed in (1, 1):
        drafter, session = Aded(TrigramTable()), session_of(tokens, seed=seed)
        drafter.open(session)
        draft = [drafter.propose([session], [WHOLE])[0] for _ in range(3)][-1]
        drafts.append((draft.token_ids.tolist(), draft.parent_indices.tolist()))
    assert drafts[0] == drafts[1]


def test_a_rule_for_chains_gets_the_most_visited_path() -> None:
    config = SpeculationConfig(method="aded", length="fixed", acceptance="rejection")
    drafter, session = Aded(TrigramTable()), session_of([1, 2, 3, 4, 5, 6, 1, 2], config)
    drafter.open(session)
    draft = drafter.propose([session], [WHOLE])[0]
    assert is_chain(draft.parent_indices)
    assert draft.token_ids.tolist() == [3, 4, 5, 6, 1]


def test_each_trigram_of_a_session_is_counted_once(tiny_folder: Path, reference: Reference) -> None:
    """Prompt and output, across the borders of rounds; then a repeated request drafts well."""
    drafter = Aded(TrigramTable())
    engine = small_engine(tiny_folder, drafters={"aded": drafter}).engine
    prompt, params = [70, 71, 72, 73], SamplingParams(max_tokens=30, ignore_eos=True)
    first = engine.generate([prompt], params, CONFIG)[0]
    tokens = first.token_ids
    counts = Counter(zip(tokens, tokens[1:], tokens[2:], strict=False))
    pairs = Counter(itertools.pairwise(tokens[:-1]))
    for (a, b, c), count in counts.items():
        assert drafter.table.probabilities((a, b))[c] == pytest.approx(count / pairs[a, b])
    second = engine.generate([prompt], params, CONFIG)[0]
    assert first.output_ids == second.output_ids == reference(prompt, params)
    assert second.stats.num_target_forwards < first.stats.num_target_forwards
    assert np.isfinite(second.stats.acceptance_rate)
