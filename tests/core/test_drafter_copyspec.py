"""CopySpec: first occurrences by brute force, and the same trace as the fallback without them."""

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
from paceline.drafters.copyspec import CopySpec, FirstOccurrences
from paceline.engine import Engine, RoundEvent
from paceline.plan import resolve
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.tree import subset
from paceline.types import Budget, Draft, Need, Outcome
from tests.core.engines import Reference, small_engine
from tests.core.scripted import run, scripted_engine

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def first_occurrence(text: list[int], gamma: int) -> int | None:
    """Position after the first occurrence of the last ``gamma`` tokens before the end."""
    for after in range(gamma, len(text)):
        if text[after - gamma : after] == text[-gamma:]:
            return after
    return None


@given(TEXT, st.integers(1, 5), st.integers(1, 7))
def test_the_first_occurrence(text: list[int], gamma: int, step: int) -> None:
    index = FirstOccurrences(gamma)
    for end in range(1, len(text) + 1, step):
        assert index.find(text[:end]) == first_occurrence(text[:end], gamma)


@given(TEXT, TEXT, st.integers(1, 5))
def test_the_first_occurrence_of_the_end_of_a_draft(
    text: list[int], drafted: list[int], gamma: int
) -> None:
    """Only grams of the text count, not those that end in the draft."""
    index = FirstOccurrences(gamma)
    tail = (text + drafted)[-gamma:]
    ends = [after for after in range(gamma, len(text)) if text[after - gamma : after] == tail]
    expected = ends[0] if ends and len(tail) == gamma else None
    for _ in range(2):  # looking leaves nothing behind
        assert index.find(text, drafted) == expected
    assert index.find(text) == first_occurrence(text, gamma)


@given(TEXT, st.integers(1, 5))
def test_a_longer_gram_fires_in_a_subset_of_the_steps(text: list[int], gamma: int) -> None:
    short, long = FirstOccurrences(gamma), FirstOccurrences(gamma + 1)
    for end in range(1, len(text) + 1):
        fires = short.find(text[:end]) is not None
        assert fires or long.find(text[:end]) is None


def session_of(token_ids: list[int], **knobs: Any) -> Session:
    config = SpeculationConfig(method="copyspec", **knobs)
    return Session("s", token_ids, SamplingParams(max_tokens=1000), resolve(config))


def test_ten_tokens_are_copied_after_the_first_occurrence() -> None:
    gram = [1, 2, 3]
    session = session_of([*gram, *range(20, 40), *gram, *range(60, 80), *gram])
    drafter = CopySpec()
    drafter.open(session)
    config = session.plan.config
    budget = Budget(config.num_speculative_tokens or 0, config.node_budget or 0)
    assert drafter.propose([session], [budget])[0].token_ids.tolist() == list(range(20, 30))
    assert drafter.propose([session], [Budget(4, 4)])[0].token_ids.tolist() == [20, 21, 22, 23]
    assert drafter.propose([session], [Budget(0, 0)])[0].num_nodes == 0
    session.token_ids += [2, 99]
    assert drafter.propose([session], [budget])[0].num_nodes == 0
    drafter.close(session)


def test_a_verbatim_copy_commits_eleven_tokens_in_a_forward() -> None:
    """A target that repeats a passage: ten copied tokens are right, and one is its own."""
    engine = scripted_engine(lambda token_ids: len(token_ids) % 200, 200)
    prompt = [*range(200), *range(3)]
    params = SamplingParams(max_tokens=187, ignore_eos=True)
    session, events = run(
        engine, prompt, params, SpeculationConfig(length="fixed", method="copyspec")
    )
    assert session.output_ids == list(range(3, 190))
    assert [(event.num_accepted, len(event.token_ids)) for event in events] == [(10, 11)] * 17


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_a_match_the_trace_is_that_of_the_fallback(
    demo: Engine, temperature: float
) -> None:
    """No gram of 64 tokens repeats here, so every round is the draft model's."""
    prompt = list(range(30, 60))
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=40, ignore_eos=True)

    def trace(method: str, **knobs: Any) -> list[tuple[tuple[int, ...], list[int]]]:
        rounds: list[tuple[tuple[int, ...], list[int]]] = []

        def note(event: RoundEvent) -> None:
            if event.outcome is not None:
                rounds.append((event.token_ids, event.outcome.draft.token_ids.tolist()))

        engine = Engine(ModelTarget(demo.target.runner), demo.drafters)
        config = SpeculationConfig(length="fixed", method=method, **knobs)
        session = engine.submit(Request(prompt, params, config), on_event=note)
        while engine.has_work:
            engine.step()
        assert not session.stats.drafter_lost
        return rounds

    expected = trace("draft_model", num_speculative_tokens=5)
    assert trace("copyspec_draft_model", min_match=64) == expected
    assert trace("copyspec", min_match=64) == trace("ar")


class Fallback(Drafter):
    """Drafts the same tokens always, as many as it may."""

    needs = frozenset[Need]()

    def __init__(self, token_ids: list[int], parents: list[int] | None = None) -> None:
        self.draft = Draft(
            np.array(token_ids),
            np.array(range(-1, len(token_ids) - 1) if parents is None else parents, np.int32),
        )

    def open(self, session: Session) -> None: ...

    def close(self, session: Session) -> None: ...

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        return [
            subset(self.draft, np.arange(min(self.draft.num_nodes, budget.depth)))
            for budget in budgets
        ]

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None: ...


def relayed(fallback: Fallback, limits: tuple[int, int] = (12, 12), **knobs: Any) -> list[int]:
    """The draft after a text that repeats nothing, of which the fallback drafts a part."""
    config = SpeculationConfig(
        method="copy_relay", min_match=2, **({"fallback_depth": 3, "relay_tokens": 4} | knobs)
    )
    session = Session("s", list(range(10, 40)), SamplingParams(max_tokens=1000), resolve(config))
    drafter = CopySpec(fallback)
    drafter.open(session)
    return drafter.propose([session], [Budget(*limits)])[0].token_ids.tolist()


def test_copying_goes_on_behind_the_draft_of_the_fallback() -> None:
    edited = Fallback([99, 15, 16, 17])
    assert relayed(edited) == [99, 15, 16, 17, 18, 19, 20]
    assert relayed(edited, relay_tokens=0) == [99, 15, 16]
    assert relayed(edited, (5, 12)) == relayed(edited, (12, 5)) == [99, 15, 16, 17, 18]
    assert relayed(edited, (3, 12)) == [99, 15, 16]
    assert relayed(edited, fallback_depth=2) == [99, 15]  # no two tokens of the text
    assert relayed(edited, fallback_depth=4) == [99, 15, 16, 17, 18, 19, 20, 21]


def test_the_end_of_the_text_is_followed_by_the_draft_itself() -> None:
    assert relayed(Fallback([37, 38, 5])) == [37, 38, 5]
    assert relayed(Fallback([5, 37, 38])) == [5, 37, 38, 39, 5, 37, 38]


def test_nothing_is_copied_behind_a_draft_that_ended_early_or_is_a_tree() -> None:
    """A drafter that stops is unsure of its last token."""
    assert relayed(Fallback([15, 16])) == [15, 16]
    assert relayed(Fallback([99, 15, 16], [-1, 0, 0])) == [99, 15, 16]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["copyspec", "copyspec_draft_model", "copy_relay"])
def test_exact_and_nothing_is_left(
    method: str, temperature: float, tiny_folder: Path, reference: Reference
) -> None:
    params = SamplingParams(temperature=temperature, seed=8, max_tokens=60, ignore_eos=True)
    prompts = [[65, 66, 67] * 6, [80, 72, 90, 101], [70]]
    small = small_engine(tiny_folder)
    sessions = small.engine.generate(
        prompts, params, SpeculationConfig(length="fixed", method=method)
    )
    for prompt, session in zip(prompts, sessions, strict=True):
        assert session.output_ids == reference(prompt, params)
        assert not session.stats.drafter_lost
    small.assert_nothing_is_left()
