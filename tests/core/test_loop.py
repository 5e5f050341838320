"""What a round tells the drafter and the length controller of a session."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.config import SpeculationConfig
from paceline.drafters.base import Drafter
from paceline.lengths.fixed import FixedLength
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.types import Budget, Draft, Outcome, Verification
from paceline.view import SessionView
from tests.core.engines import small_engine


class Recorder(Drafter):
    """Drafts the same tokens again and again, and keeps what it is told."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.told: list[tuple[int, Outcome]] = []  # length of the session then, and the outcome

    def read_prompt(self, session: SessionView, read: Verification) -> None:
        self.read.append(session.session_id)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        time.sleep(0.002)
        return [Draft.chain([7] * budget.depth) for budget in budgets]

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        for session, outcome in zip(sessions, outcomes, strict=True):
            self.told.append((session.length, outcome))


def test_each_round_is_observed_once_with_its_times(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    engine = small_engine(tiny_folder, drafters={"prompt_lookup": recorder}).engine
    observed: list[tuple[Outcome, float, float]] = []
    monkeypatch.setattr(FixedLength, "observe", lambda self, *told: observed.append(told))
    config = SpeculationConfig(method="prompt_lookup", length="fixed", num_speculative_tokens=3)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    sessions = [engine.submit(Request([1, 2, 3 + i], params, config)) for i in range(2)]
    begun = time.perf_counter()
    lengths: list[int] = []
    while engine.has_work:
        lengths += [event.session.length for event in engine.step()]
    elapsed = time.perf_counter() - begun
    assert sorted(recorder.read) == sorted(session.session_id for session in sessions)
    rounds = sum(session.stats.num_rounds for session in sessions)
    assert rounds == len(observed) == len(recorder.told) == len(lengths)
    assert [length for length, _ in recorder.told] == lengths
    assert [outcome for _, outcome in recorder.told] == [outcome for outcome, _, _ in observed]
    assert all(outcome.draft.num_nodes for outcome, _, _ in observed[:2])
    assert all(0.0 < draft_s < elapsed for _, draft_s, _ in observed[:2])
    assert all(0.0 < verify_s < elapsed for _, _, verify_s in observed)
    assert sum(s.stats.draft_seconds for s in sessions) == pytest.approx(
        sum(draft_s for _, draft_s, _ in observed)
    )
    assert sum(s.stats.verify_seconds for s in sessions) == pytest.approx(
        sum(verify_s for _, _, verify_s in observed)
    )
    for session in sessions:
        told = [o for _, o in recorder.told if o.finish_reason]
        assert session.stats.num_tokens == params.max_tokens
        assert {o.finish_reason for o in told} == {"length"}
