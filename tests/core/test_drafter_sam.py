"""SAM Decoding: automata that know the longest repeated suffix, and which drafter drafts when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SpeculationConfig
from paceline.drafters.base import Drafter
from paceline.drafters.sam import Cursor, SamDecoding, SuffixAutomaton
from paceline.drafters.token_recycling import TokenRecycling
from paceline.engine import RoundEvent
from paceline.plan import resolve
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.types import Budget, Draft, Need
from tests.core.engines import Reference, small_engine
from tests.modelzoo import VOCAB_SIZE

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=60)


class Steps(list[int]):
    """Suffix links that count how often they are followed."""

    followed = 0

    def __getitem__(self, index: Any) -> Any:
        self.followed += 1
        return super().__getitem__(index)


def automaton_of(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    return automaton


def longest_suffix(context: list[int], text: list[int]) -> tuple[int, int]:
    """Length of the longest suffix of ``context`` in ``text``, and where it first ends there."""
    for length in range(len(context), 0, -1):
        for end in range(length, len(text) + 1):
            if text[end - length : end] == context[-length:]:
                return length, end
    return 0, 0


@given(TEXT)
def test_the_longest_suffix_that_occurred_earlier(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, 1):
        automaton.append(token)
        state = automaton.repeated
        # An earlier occurrence may overlap the suffix, but does not end with it.
        expected = longest_suffix(text[:end], text[: end - 1])
        assert (automaton.length[state], automaton.after[state]) == expected


@given(TEXT, TEXT)
def test_a_cursor_finds_the_longest_suffix_in_another_text(
    text: list[int], context: list[int]
) -> None:
    automaton, known = SuffixAutomaton(), 0
    cursor = Cursor(automaton)
    for end, token in enumerate(context, 1):
        # The text grows now and then, which splits states below the cursor.
        if end % 3 == 0:
            for new in text[known : known + 7]:
                automaton.append(new)
            known += 7
        length = cursor.length
        cursor.advance(token)
        # What it follows it follows to the end; text that came later is not searched again.
        suffixes = (context[end - 1 - n : end] for n in range(length, -1, -1))
        occurs = (s for s in suffixes if longest_suffix(s, text[:known])[0] == len(s))
        expected = next(occurs, [])
        assert cursor.length == len(expected)
        if expected:
            assert automaton.after[cursor.state] == longest_suffix(expected, text[:known])[1]


@given(TEXT, TEXT)
def test_a_cursor_in_a_finished_text_agrees_with_brute_force(
    text: list[int], context: list[int]
) -> None:
    automaton = automaton_of(text)
    automaton.link = links = Steps(automaton.link)
    cursor = Cursor(automaton)
    for end, token in enumerate(context, 1):
        cursor.advance(token)
        place = (cursor.length, automaton.after[cursor.state])
        assert place == longest_suffix(context[:end], text)
    # Each fallback loses a token of the match, and each token adds one; ``settle`` looks once.
    assert links.followed <= 2 * len(context)


@pytest.mark.parametrize("alphabet", [1, 2, 5, 10, 1000])
def test_states_and_link_steps_are_linear(alphabet: int) -> None:
    """At most 2n states, and 2n link steps to match n tokens; building takes at most 4n."""
    rng = np.random.default_rng(alphabet)
    text = rng.integers(0, alphabet, 3000).tolist()
    # The last two are the worst for states and for transitions.
    one, half = alphabet - 1, [0] * 1500
    for tokens in (text, text[:50] * 60, [0, *[one] * 2999], [*half, one, *half[1:]]):
        automaton = SuffixAutomaton()
        automaton.link = links = Steps(automaton.link)
        for token in tokens:
            automaton.append(token)
        assert len(automaton.link) <= 2 * len(tokens)
        # A token lowers the last state by as many links as it goes up, less two; half as many
        # again redirect transitions to clones, each of which looks once.
        assert links.followed <= 4 * len(tokens)
        for context in (tokens, rng.integers(0, alphabet, 3000).tolist()):
            links.followed, cursor = 0, Cursor(automaton)
            for token in context:
                cursor.advance(token)
            assert links.followed <= 2 * len(context)
            assert context is not tokens or cursor.length == len(tokens)


# --- the drafter ----------------------------------------------------------------------------------


def session_of(token_ids: list[int], name: str = "s", **knobs: Any) -> Session:
    config = SpeculationConfig(**{"method": "sam_decoding", "length": "fixed", **knobs})
    return Session(name, token_ids, SamplingParams(max_tokens=1000), resolve(config))


def drafted(drafter: SamDecoding, session: Session, budget: int = 64) -> list[int]:
    drafter.open(session)
    try:
        draft = drafter.propose([session], [Budget(budget, budget)])[0]
        return [int(token) for token in draft.token_ids]
    finally:
        drafter.close(session)


def remember(drafter: SamDecoding, output: list[int], name: str = "earlier") -> None:
    session = session_of([0], name)
    drafter.open(session)
    session.commit(output)
    drafter.close(session)


@pytest.mark.parametrize("least", [1, 5, 9])
def test_it_copies_if_and_only_if_the_match_is_long_enough(least: int) -> None:
    for match in range(1, 15):
        ids = [*range(100, 100 + match), *range(50), *range(100, 100 + match)]
        after = [*range(50), *range(100, 100 + match)]
        tokens = drafted(SamDecoding(), session_of(ids, min_match=least))
        assert tokens == (after[: min(60, 4 * match)] if match >= least else [])


def test_a_longer_match_drafts_more_up_to_the_budget() -> None:
    ids = [*range(100, 110), *range(50), *range(100, 110)]
    for alpha, expected in ((0.5, 5), (1.0, 10), (3.0, 30)):
        assert len(drafted(SamDecoding(), session_of(ids, draft_per_match=alpha))) == expected
    assert len(drafted(SamDecoding(), session_of(ids), budget=7)) == 7


def test_it_climbs_to_an_occurrence_that_more_tokens_follow() -> None:
    early, late = [1, 2, 3, 4, 5], [8, 9, 1, 2, 3, 4, 5]
    ids = [*early, *range(20, 60), *late, 70, *late]
    assert drafted(SamDecoding(), session_of(ids, draft_per_match=2.0)) == list(range(20, 34))
    # Not below the shortest match that it copies after.
    short = session_of(ids, min_match=6, draft_per_match=2.0)
    assert drafted(SamDecoding(), short) == [70, *late]


def test_the_corpus_must_match_by_more_than_the_session() -> None:
    passage = list(range(10, 30))
    for match, expected in ((9, []), (10, [21, 22, 23, 24])):
        drafter = SamDecoding()
        remember(drafter, passage)
        ids = [1, *passage[11 - match : 11]]
        session = session_of(ids, draft_per_match=4.0, corpus_bias=5)
        assert drafted(drafter, session, budget=4) == expected
    drafter = SamDecoding()
    remember(drafter, [*passage[:11], 99])
    ids = [*passage[5:11], 50, 51, *passage[:11]]  # matches 6 here, 11 there
    assert drafted(drafter, session_of(ids, corpus_bias=5), budget=2) == [50, 51]
    assert drafted(drafter, session_of(ids, corpus_bias=4), budget=2) == [99]


def test_a_copy_does_not_cross_from_one_output_to_the_next() -> None:
    drafter = SamDecoding()
    remember(drafter, list(range(10, 25)))
    remember(drafter, list(range(40, 60)))
    ids = list(range(10, 23))
    assert drafted(drafter, session_of(ids, corpus_bias=0)) == [23, 24]
    assert drafted(drafter, session_of([*ids, 23, 24], corpus_bias=0)) == []


def test_the_corpus_is_bounded_and_forgets_the_oldest() -> None:
    drafter = SamDecoding(max_corpus=100)
    for i in range(20):
        remember(drafter, list(range(1000 * i, 1000 * i + 30)))
        assert len(drafter._corpora) <= 2
        assert all(len(corpus.tokens) <= 100 for corpus in drafter._corpora)
    remember(drafter, list(range(50_000, 50_500)), "too long")
    assert all(len(corpus.tokens) <= 100 for corpus in drafter._corpora)
    for first, known in ((0, False), (19_000, True), (50_000, True)):
        ids = list(range(first, first + 20))
        assert bool(drafted(drafter, session_of(ids, corpus_bias=0))) == known


def test_a_session_follows_the_corpus_that_others_fill() -> None:
    drafter = SamDecoding(max_corpus=60)
    session = session_of([1, 2, 3], corpus_bias=0)
    drafter.open(session)
    budgets = [Budget(3, 3)]
    for i in range(8):
        output = list(range(100 * i + 100, 100 * i + 120))
        remember(drafter, output, f"other {i}")
        assert drafter.propose([session], budgets)[0].num_nodes == 0
        session.token_ids += output[:6]
        assert drafter.propose([session], budgets)[0].token_ids.tolist() == output[6:9]
        session.token_ids.append(5000 + i)
    drafter.close(session)


def test_the_second_run_of_a_prompt_copies_from_the_first(
    tiny_folder: Path, reference: Reference
) -> None:
    prompt = [65, 80, 72, 90, 101]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    small = small_engine(tiny_folder)
    config = SpeculationConfig(length="fixed", method="sam_decoding")
    first, second = (small.engine.generate([prompt], params, config)[0] for _ in range(2))
    assert first.output_ids == second.output_ids == reference(prompt, params)
    assert second.stats.num_target_forwards < first.stats.num_target_forwards / 2
    small.assert_nothing_is_left()


# --- the fallback ---------------------------------------------------------------------------------


class Watched(Drafter):
    """A fallback that notes for which sessions it drafts and learns."""

    def __init__(self, needs: frozenset[Need]) -> None:
        self.needs = needs
        self.opened: set[str] = set()
        self.drafted: list[list[str]] = []
        self.observed: list[list[str]] = []

    def open(self, session: Session) -> None:
        self.opened.add(session.session_id)

    def close(self, session: Session) -> None:
        self.opened.discard(session.session_id)

    def propose(self, sessions: Any, budgets: Any) -> list[Draft]:
        self.drafted.append([session.session_id for session in sessions])
        return [Draft.chain([7] * budget.depth) for budget in budgets]

    def observe(self, sessions: Any, outcomes: Any) -> None:
        self.observed.append([session.session_id for session in sessions])


@pytest.mark.parametrize("learns", [False, True])
def test_the_router(learns: bool) -> None:
    fallback = Watched(frozenset({Need.TREE_LOGITS} if learns else ()))
    drafter = SamDecoding(fallback)
    assert drafter.needs == fallback.needs
    sessions = [
        session_of([*range(20), *range(match)], str(match), method="sam_token_recycling")
        for match in (3, 4, 5, 6)
    ]
    for session in sessions:
        drafter.open(session)
    assert fallback.opened == {"3", "4", "5", "6"}
    drafts = drafter.propose(sessions, [Budget(40, 80)] * 4)
    assert [draft.token_ids[0] for draft in drafts] == [7, 7, 5, 6]
    assert [draft.num_nodes for draft in drafts[:2]] == [6, 6]
    assert fallback.drafted == [["3", "4"]]
    outcomes: Any = [None] * 4
    drafter.observe(sessions, outcomes)
    # One that learns from the target's logits learns from every tree.
    assert fallback.observed == [["3", "4", "5", "6"] if learns else ["3", "4"]]
    drafter.propose(sessions[2:], [Budget(40, 80)] * 2)
    assert len(fallback.drafted) == 1  # no session fell back, so no drafter is asked
    for session in sessions:
        drafter.close(session)
    assert not fallback.opened


def test_a_corpus_is_never_forgotten() -> None:
    """It is looked into as earlier outputs are; they do not push it out."""
    drafter = SamDecoding(corpus=[[*range(100, 140)], [*range(200, 240)]], max_corpus=64)
    known = session_of([1, 2, *range(100, 110)])
    assert drafted(drafter, known, 8) == [*range(110, 118)]
    assert drafted(drafter, session_of([1, 2, *range(200, 209)])) == []  # 9 tokens count as 4
    assert drafted(drafter, session_of([*range(128, 140)])) == []  # no text follows on another
    for number in range(6):
        remember(drafter, [*range(20 * number, 20 * number + 20)], f"other-{number}")
    assert drafted(drafter, known, 8) == [*range(110, 118)]


class WatchedRecycling(TokenRecycling):
    """Notes for which sessions it drafts, and how many tokens they have then."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        self.asked: set[tuple[str, int]] = set()

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        self.asked |= {(session.session_id, session.length) for session in sessions}
        return super().propose(sessions, budgets)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_exact_in_both_branches(
    temperature: float, tiny_folder: Path, reference: Reference
) -> None:
    """AR's tokens, and in every round the matrix drafts iff less than 5 tokens match."""
    params = SamplingParams(temperature=temperature, seed=8, max_tokens=40, ignore_eos=True)
    prompts = [[65, 66, 67] * 6, [80, 72, 90, 101]]
    matrix = WatchedRecycling()
    small = small_engine(tiny_folder, drafters={"token_recycling": matrix})
    config = SpeculationConfig(method="sam_token_recycling", length="fixed")
    rounds: list[tuple[Session, list[int]]] = []

    def note(event: RoundEvent) -> None:
        length = event.session.length - len(event.token_ids)
        rounds.append((event.session, event.session.token_ids[:length]))

    sessions = [
        small.engine.submit(Request(prompt, params, config, session_id=name), on_event=note)
        for name, prompt in zip(("copies", "cannot"), prompts, strict=True)
    ]
    while small.engine.has_work:
        small.engine.step()
    for prompt, session in zip(prompts, sessions, strict=True):
        assert session.output_ids == reference(prompt, params)
        assert not session.stats.drafter_lost
        assert session.stats.num_draft_nodes > 0
    expected = set()
    for session, before in rounds:
        own, done = automaton_of(before), len(before) - session.prompt_length
        if own.length[own.repeated] < 5 and done < params.max_tokens - 1:  # room for a draft
            expected.add((session.session_id, len(before)))
    assert matrix.asked == expected
    assert ("copies", len(prompts[0])) not in expected
    assert ("cannot", len(prompts[1])) in expected
    matrix.asked.clear()
    small.assert_nothing_is_left()
