"""Lookahead decoding: the pool, the window as a tree, and what they are bounded by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.config import MAX_NODES, SpeculationConfig
from paceline.drafters.lookahead import Lookahead, NGramPool
from paceline.engine import RoundEvent
from paceline.errors import InvalidArgument
from paceline.plan import resolve
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.tree import depths, path_to
from paceline.types import Budget, Draft
from tests.core.engines import Reference, small_engine
from tests.core.scripted import chaotic, run, scripted_engine, spoken

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def periodic(token_ids: list[int]) -> int:
    return (token_ids[-1] * 3 + 1) % 50


def drafts(events: list[RoundEvent]) -> list[Draft]:
    return [event.outcome.draft for event in events if event.outcome is not None]


def paths(draft: Draft) -> set[tuple[int, ...]]:
    """The token paths of all nodes."""
    tokens, parents = draft.token_ids, draft.parent_indices
    return {tuple(tokens[list(path_to(parents, n))].tolist()) for n in range(draft.num_nodes)}


# --- the pool --------------------------------------------------------------------------------


def test_a_pool_keeps_the_latest_of_each_first_token() -> None:
    pool = NGramPool(3)
    for last in (1, 2, 3):
        pool.add([7, 0, last])
    assert pool.get(7) == [(0, 3), (0, 2), (0, 1)]
    pool.add([7, 0, 1])  # used again: the newest now
    pool.add([7, 0, 4])  # the oldest, 2, has to go
    pool.add([8, 5, 5])
    assert pool.get(7) == [(0, 4), (0, 1), (0, 3)]
    assert pool.get(8) == [(5, 5)]
    assert pool.get(9) == []


def test_a_pool_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.drafters.lookahead._MAX_KEYS", 5)
    pool = NGramPool(2)
    for token in range(20):
        for last in range(4):
            pool.add([token, last])
        assert len(pool.get(token)) == 2
    assert [bool(pool.get(token)) for token in range(20)] == [False] * 15 + [True] * 5
    none = NGramPool(0)
    none.add([1, 2])
    assert none.get(1) == []


# --- the window ------------------------------------------------------------------------------


def test_the_window_is_refined_as_in_the_paper() -> None:
    """Against a window kept by hand, with a target in which every earlier token counts."""
    window, size, function = 4, 4, chaotic(12)
    engine = scripted_engine(function, 12)
    config = SpeculationConfig(
        method="lookahead", length="fixed",
        window_size=window, ngram_size=size, pool_guesses=3, pool_from_prompt=False,
    )  # fmt: skip
    session, events = run(engine, PROMPT, PARAMS, config)
    assert session.output_ids == spoken(function, PROMPT, 40)
    first = drafts(events)[0]
    assert first.num_nodes == window  # the chain of the first level
    levels, committed, found = [first.token_ids.tolist()], list(PROMPT), []
    assert set(levels[0]) <= set(PROMPT)
    tried = 0
    for event, draft in list(zip(events, drafts(events), strict=True))[:-8]:
        columns = [levels[0][: j + 1] + [row[j] for row in levels[1:]] for j in range(window)]
        tails = [tuple(ngram[1:]) for ngram in found if ngram[0] == committed[-1]]
        guesses = list(dict.fromkeys(reversed(tails)))[:3]  # the latest ones
        tried += len(guesses)
        expected = {tuple(path[: i + 1]) for path in [*columns, *guesses] for i in range(len(path))}
        assert paths(draft) == expected
        new = [function(committed + path) for path in columns]
        levels.append(new)
        if len(levels) == size:
            found += [[row[j] for row in levels] for j in range(window)]
            del levels[0]
        committed += event.token_ids


@pytest.mark.parametrize(
    ("window", "size", "guesses"), [(7, 5, 7), (1, 2, 0), (3, 2, 5), (5, 6, 2)]
)
def test_a_step_has_a_bounded_number_of_tokens(window: int, size: int, guesses: int) -> None:
    config = SpeculationConfig(
        method="lookahead",
        length="fixed",
        window_size=window,
        ngram_size=size,
        pool_guesses=guesses,
    )
    resolved = resolve(config).config
    bound = (window + guesses) * (size - 1)
    assert (resolved.node_budget, resolved.num_speculative_tokens) == (bound, window + size - 2)
    for function in (periodic, chaotic(50)):
        session, events = run(scripted_engine(function, 50), PROMPT, PARAMS, config)
        assert session.output_ids == spoken(function, PROMPT, 40)
        for draft in drafts(events):
            assert draft.num_nodes <= bound
            assert depths(draft.parent_indices).max(initial=0) <= window + size - 2
            assert len(paths(draft)) == draft.num_nodes  # no node twice


def test_too_large_a_window_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=f"<= {MAX_NODES}, got 312"):
        resolve(SpeculationConfig(method="lookahead", length="fixed", window_size=32, ngram_size=9))


def test_a_rule_for_chains_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="lookahead, whose drafts are trees"):
        resolve(SpeculationConfig(method="lookahead", length="fixed", acceptance="rejection"))


def test_repeating_text_takes_fewer_forwards() -> None:
    engine = scripted_engine(periodic, 50)
    for from_prompt in (False, True):
        config = SpeculationConfig(method="lookahead", length="fixed", pool_from_prompt=from_prompt)
        session, _ = run(engine, PROMPT, replace(PARAMS, max_tokens=100), config)
        assert session.output_ids == spoken(periodic, PROMPT, 100)
        assert session.stats.num_target_forwards < 50


def test_the_pool_may_start_with_the_prompts_ngrams() -> None:
    """A prompt that holds what comes next helps from the first round on."""
    prompt = [7, *spoken(periodic, [7], 24), 7]
    engine = scripted_engine(periodic, 50)
    accepted = []
    for from_prompt in (False, True):
        config = SpeculationConfig(method="lookahead", length="fixed", pool_from_prompt=from_prompt)
        _, events = run(engine, prompt, PARAMS, config)
        accepted.append(events[0].num_accepted)
    assert accepted[0] == 0
    assert accepted[1] == 4  # the tail of an n-gram of five tokens


def test_without_guesses_and_repetition_it_is_ar() -> None:
    """Without the pool, chaos leaves nothing to accept: as many forwards as AR."""
    engine = scripted_engine(chaotic(5000), 5000)
    config = SpeculationConfig(method="lookahead", length="fixed", pool_guesses=0)
    session, _ = run(engine, PROMPT, PARAMS, config)
    assert session.stats.num_target_forwards == 40
    assert session.stats.num_accepted == 0


@pytest.mark.parametrize("budget", [Budget(0, 0), Budget(2, 56), Budget(10, 3), Budget(64, 256)])
def test_drafts_keep_to_any_budget(budget: Budget) -> None:
    drafter = Lookahead()
    plan = resolve(SpeculationConfig(method="lookahead", length="fixed"))
    session = Session("s", PROMPT * 4, PARAMS, plan)
    drafter.open(session)
    draft = drafter.propose([session], [budget])[0]
    assert draft.num_nodes <= budget.nodes
    assert depths(draft.parent_indices).max(initial=0) <= budget.depth
    drafter.close(session)
    drafter.close(session)
    assert not drafter._states


def test_a_shallow_draft_still_refines_some_columns() -> None:
    engine = scripted_engine(periodic, 50)
    config = SpeculationConfig(method="lookahead", length="fixed", num_speculative_tokens=5)
    session, _ = run(engine, PROMPT, replace(PARAMS, max_tokens=100), config)
    assert session.output_ids == spoken(periodic, PROMPT, 100)
    assert session.stats.num_target_forwards < 60


def test_many_sessions_that_end_at_different_times(tiny_folder: Path, reference: Reference) -> None:
    small = small_engine(tiny_folder)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 250, 3 + i).tolist() for i in range(6)]
    params = [
        replace(PARAMS, max_tokens=5 + 4 * i, temperature=float(i % 2), seed=i) for i in range(6)
    ]
    sessions = small.engine.generate(
        prompts, params, SpeculationConfig(method="lookahead", length="fixed")
    )
    for prompt, each, session in zip(prompts, params, sessions, strict=True):
        assert session.output_ids == reference(prompt, each)
        assert not session.stats.drafter_lost
    small.assert_nothing_is_left()
