"""Method ``auto`` with a draft model in another process: used, left out, never waited for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from paceline.config import SpeculationConfig
from paceline.drafters.auto import RETRY_S
from paceline.drafters.base import DRAFTERS
from paceline.engine import Engine
from paceline.lengths.auto import PATIENCE_S
from paceline.loading import load_engine
from paceline.request import Request
from paceline.rpc.drafter_pool import DrafterPool
from paceline.sampling import SamplingParams
from paceline.session import Session
from tests.rpc.serving import DrafterProcess

AUTO = SpeculationConfig(method="auto")
PROMPTS = (
    "def load(path):\n    with open(path) as file:\n        return file.read()\n\n\ndef load_all(",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(",
    "Question: What is 12 + 30?\nAnswer:",
)


@cache
def loaded() -> Engine:
    """The demo pair."""
    return load_engine()


@contextmanager
def engine_and_drafter(*arguments: str) -> Iterator[tuple[Engine, DrafterPool, DrafterProcess]]:
    with DrafterProcess("--demo", "--vocab-size", "4096", *arguments) as process:
        target = loaded().target
        with DrafterPool([process.address], vocab_size=target.vocab_size) as pool:
            assert pool.wait_ready(20)
            yield Engine(target, {"draft_model": pool}), pool, process


def submitted(engine: Engine, params: SamplingParams, config: SpeculationConfig) -> list[Session]:
    tokenizer = loaded().tokenizer
    assert tokenizer is not None
    return [engine.submit(Request(tokenizer.encode(p), params, config)) for p in PROMPTS]


def finish(engine: Engine, after: Callable[[], None] = lambda: None) -> float:
    """Run to the end; returns the longest time in which no session got a token."""
    longest, last, called = 0.0, time.perf_counter(), False
    while engine.has_work:
        events = engine.step()
        if events:
            longest = max(longest, time.perf_counter() - last)
            last = time.perf_counter()
        if not called and sum(len(s.output_ids) for s in engine.sessions.values()) > 60:
            called, longest = True, 0.0
            after()
            last = time.perf_counter()
    assert called
    return longest


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_it_chooses_among_both_and_keeps_the_tokens(temperature: float) -> None:
    params = SamplingParams(max_tokens=80, temperature=temperature, seed=4, ignore_eos=True)
    with engine_and_drafter() as (engine, pool, _):
        plain = submitted(engine, params, SpeculationConfig(method="ar"))
        finish(engine)
        found = submitted(engine, params, AUTO)
        assert {"suffix", "draft_model"} <= set(found[0].config[DRAFTERS] or ())
        finish(engine)
        assert [s.output_ids for s in found] == [s.output_ids for s in plain]
        assert pool.counters.num_frames > 0
        chosen = [s.length_controller.explain()["drafters"] for s in found]  # type: ignore[attr-defined]
        used = {name for each in chosen for name, part in each.items() if part["rounds"]}
        assert "draft_model" in used
        assert temperature or used > {"draft_model"}
        assert not any(s.stats.drafter_lost for s in found)


@pytest.mark.one_of(1, slow=2)
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_sessions_go_on_without_a_drafter(sent: signal.Signals) -> None:
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    with engine_and_drafter() as (engine, _, process):
        plain = submitted(engine, params, SpeculationConfig(method="ar"))
        finish(engine)
        found = submitted(engine, params, AUTO)
        gap = finish(engine, lambda: os.kill(process.pid, sent))
        assert [s.output_ids for s in found] == [s.output_ids for s in plain]
        assert not any(s.stats.drafter_lost for s in found)
        assert gap < PATIENCE_S + 0.1  # and a round on a busy machine
        if sent == signal.SIGSTOP:
            os.kill(process.pid, signal.SIGCONT)


def test_a_drafter_that_comes_back_is_used_again() -> None:
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    with engine_and_drafter() as (engine, pool, process):
        os.kill(process.pid, signal.SIGSTOP)
        submitted(engine, params, AUTO)
        while engine.has_work:
            engine.step()
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(RETRY_S)
        before = pool.counters.num_frames
        found = submitted(engine, params, AUTO)
        finish(engine)
        assert pool.counters.num_frames > before
        assert sum(s.stats.num_accepted for s in found) > 0
