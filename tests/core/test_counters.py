"""Counters of an engine are the sums of its sessions' own statistics, at any moment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config import SpeculationConfig
from paceline.counters import MAX_KEPT, MethodCounters
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import SessionStatistics
from tests.core.engines import small_engine

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


def test_totals_are_the_sums_of_statistics_and_never_fall(tiny_folder: Path) -> None:
    engine = small_engine(tiny_folder).engine
    methods = ["ar", "draft_model", "draft_model_tree", "draft_model"]
    sessions = [
        engine.submit(Request([1 + i] * (3 + i), PARAMS, SpeculationConfig(method=m)))
        for i, m in enumerate(methods)
    ]
    last, requests, steps = -1, [], 0
    while engine.has_work:
        engine.step()
        counters = engine.take_counters()
        for method in set(methods):
            expected = MethodCounters()
            for session in sessions:
                if session.method_name == method:
                    expected.add(session.stats)
            assert counters.methods[method] == expected
        total = sum(c.num_tokens for c in counters.methods.values())
        assert total >= last
        last, steps = total, steps + len(counters.steps)
        requests += counters.requests
        assert sum(counters.states.values()) == len(engine.sessions)
    assert last == len(methods) * PARAMS.max_tokens
    assert sorted(r.method for r in requests) == sorted(methods)
    assert counters.finished == {"length": len(methods)}
    assert counters.num_prompt_tokens == sum(s.prompt_length for s in sessions)
    assert counters.kv_used == 0
    assert steps > 0
    for ended in requests:
        assert ended.queue_seconds is not None and ended.first_token_seconds is not None
        assert 0 <= ended.queue_seconds <= ended.first_token_seconds <= ended.seconds


def test_a_session_that_lost_its_drafter_counts_for_the_method_that_it_asked_for(
    tiny_folder: Path,
) -> None:
    engine = small_engine(tiny_folder).engine
    session = engine.submit(Request([1, 2, 3], PARAMS, SpeculationConfig(method="draft_model")))
    engine.step()
    session.lose_drafter()
    while engine.has_work:
        engine.step()
    counters = engine.take_counters()
    assert list(counters.methods) == ["draft_model"]
    assert counters.methods["draft_model"].num_drafters_lost == 1


def test_a_session_that_never_ran_has_no_times(tiny_folder: Path) -> None:
    engine = small_engine(tiny_folder).engine
    session = engine.submit(Request([1], PARAMS))
    engine.cancel(session.session_id)
    (ended,) = engine.take_counters().requests
    assert ended.queue_seconds is None and ended.first_token_seconds is None
    assert ended.finish_reason == "cancelled"


def test_lengths_come_from_depths() -> None:
    counters = MethodCounters()
    counters.add(SessionStatistics(num_rounds=7, drafted_by_depth=[5, 3, 3]))
    counters.add(SessionStatistics(num_rounds=2, drafted_by_depth=[]))
    assert counters.lengths() == {0: 4, 1: 2, 3: 3}


@pytest.mark.parametrize("count", [MAX_KEPT + 5])
def test_counters_that_are_never_taken_do_not_grow(tiny_folder: Path, count: int) -> None:
    engine = small_engine(tiny_folder).engine
    for _ in range(count):
        session = engine.submit(Request([1], replace(PARAMS, max_tokens=1)))
        engine.cancel(session.session_id)
    counters = engine.take_counters()
    assert len(counters.requests) == MAX_KEPT
    assert counters.finished["cancelled"] == count
