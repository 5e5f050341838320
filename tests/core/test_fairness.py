"""Tenants share an engine's time by their weights, and its places; no token changes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from paceline.config import SpeculationConfig
from paceline.drafters.client import ClientDrafter
from paceline.engine import Engine, EngineLimits, RoundEvent
from paceline.engine.fairness import FairShares
from paceline.errors import InvalidArgument, ResourceExhausted
from paceline.loading import load_engine
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session, SessionState
from paceline.types import Draft
from tests.core.engines import Reference, Small, small_engine

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
AR = SpeculationConfig(method="ar")
ONE_FOR_ALL_S = 0.002
A_ROW_S = 0.001
WATCHED_S = 7.0
"""By the fake clock. Reading 40 prompts takes 0.8 of it, and is to be made good."""


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng([seed, count]).integers(0, 256, count)]


class Watch:
    """What each tenant has got of an engine's steps, by its own bookkeeping.

    With ``clock`` a step takes a fixed time and some more for each row, by that clock alone.
    """

    def __init__(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, fake_clock: bool
    ) -> None:
        self.seconds: Counter[str] = Counter()
        self.num_steps = self.num_rows = 0
        self.now = 0.0
        target = engine.local_target
        verify = target.verify

        def watched(
            sessions: Sequence[Session],
            drafts: Sequence[Draft],
            wants: object,
            prefill: Sequence[tuple[Session, int]],
            pseudo: object,
        ) -> object:
            rows: Counter[str] = Counter()
            for session, draft in zip(sessions, drafts, strict=True):
                rows[session.tenant] += 1 + draft.num_nodes
            for session, count in prefill:
                rows[session.tenant] += count
            started = time.perf_counter()
            found = verify(sessions, drafts, wants, prefill, pseudo)  # type: ignore[arg-type]
            seconds = time.perf_counter() - started
            if fake_clock:
                seconds = ONE_FOR_ALL_S + A_ROW_S * rows.total()
                self.now += seconds
            for tenant, count in rows.items():
                self.seconds[tenant] += seconds * count / rows.total()
            self.num_steps += 1
            return found

        monkeypatch.setattr(target, "verify", watched)
        if fake_clock:
            fake = SimpleNamespace(perf_counter=lambda: self.now)
            monkeypatch.setattr("paceline.engine.engine.time", fake)

    def share(self, tenant: str) -> float:
        return self.seconds[tenant] / self.seconds.total()


def submit(
    engine: Engine,
    tenant: str,
    count: int,
    *,
    weight: float = 1.0,
    params: SamplingParams = LONG,
    speculation: SpeculationConfig = AR,
    prompt_tokens: int = 20,
) -> list[Session]:
    return [
        engine.submit(
            Request(tokens(prompt_tokens, seed), params, speculation, tenant=tenant, weight=weight)
        )
        for seed in range(count)
    ]


def keep(engine: Engine, tenant: str, count: int, **options: Any) -> None:
    """As :func:`submit`, until the tenant has ``count`` sessions."""
    there = sum(session.tenant == tenant for session in engine.sessions.values())
    submit(engine, tenant, count - there, **options)


def end(engine: Engine) -> None:
    for session_id in list(engine.sessions):
        engine.cancel(session_id)


@pytest.fixture
def small(tiny_folder: Path) -> Small:
    return small_engine(tiny_folder, kv_tokens=30_000)


# --- time ------------------------------------------------------------------------------------


@pytest.mark.one_of(1, slow=4)
@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 4)])
@pytest.mark.parametrize("method", ["ar", "draft_model"])
def test_one_session_gets_the_share_of_its_tenants_weight_beside_forty(
    method: str, weights: tuple[int, int], small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, speculation = small.engine, SpeculationConfig(method=method)
    watch = Watch(engine, monkeypatch, fake_clock=True)
    one, many = weights
    while watch.now < WATCHED_S:
        keep(engine, "many", 40, weight=many, speculation=speculation)
        keep(engine, "one", 1, weight=one, speculation=speculation)
        engine.step()
    end(engine)
    assert watch.share("one") == pytest.approx(one / (one + many), rel=0.1)
    small.assert_nothing_is_left()


def test_long_prompts_of_one_tenant_leave_another_its_share(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small.engine
    watch = Watch(engine, monkeypatch, fake_clock=True)
    alone = submit(engine, "one", 1, params=replace(LONG, max_tokens=300))[0]
    for _ in range(3):
        engine.step()
    short = replace(LONG, max_tokens=1)
    while not alone.finished:  # 40 prompts at any time, and one token of each
        keep(engine, "many", 40, params=short, prompt_tokens=100)
        engine.step()
    end(engine)
    assert watch.share("one") == pytest.approx(0.5, rel=0.1)


def test_three_tenants_share_by_weight(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small.engine
    watch = Watch(engine, monkeypatch, fake_clock=True)
    weights, counts = {"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 30, "b": 9, "c": 2}
    while watch.now < WATCHED_S:
        for tenant, weight in weights.items():
            keep(engine, tenant, counts[tenant], weight=weight)
        engine.step()
    end(engine)
    for tenant, weight in weights.items():
        assert watch.share(tenant) == pytest.approx(weight / 6, rel=0.1), tenant


@pytest.mark.parametrize("row_s", [0.00001, 0.001, 0.1])
def test_tenants_with_as_much_work_share_every_step(
    row_s: float, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.core.test_fairness.A_ROW_S", row_s)
    engine = small.engine
    watch = Watch(engine, monkeypatch, fake_clock=True)
    params = replace(LONG, max_tokens=120)
    sessions = [submit(engine, f"tenant {i}", 1, params=params)[0] for i in range(20)]
    while not all(session.finished for session in sessions):
        engine.step()
    # Some steps read the prompts, and 120 commit a token of each session.
    assert watch.num_steps <= 122


@pytest.mark.slow
@pytest.mark.alone
def test_shares_of_the_demo_pair_in_measured_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(limits=EngineLimits(max_sessions=64))
    speculation = SpeculationConfig(method="draft_model")
    watch = Watch(engine, monkeypatch, fake_clock=False)
    # Long enough that a step which the machine disturbs is made good: who had it waits afterwards.
    while watch.num_steps < 1200:
        keep(engine, "many", 40, speculation=speculation)
        keep(engine, "one", 1, speculation=speculation)
        engine.step()
    end(engine)
    assert watch.share("one") == pytest.approx(0.5, rel=0.1)


def test_a_debt_outlives_the_sessions_that_made_it(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small.engine
    watch = Watch(engine, monkeypatch, fake_clock=True)
    alone = submit(engine, "one", 1, params=replace(LONG, max_tokens=300))[0]
    for _ in range(3):
        engine.step()
    short = replace(LONG, max_tokens=1)
    while not alone.finished:
        for session in submit(engine, "many", 30, params=short, prompt_tokens=8):
            while not session.finished:
                engine.step()  # all of the tenant's sessions end before it opens the next ones
    assert watch.share("one") > 0.45


def test_sessions_that_come_and_go_gain_and_lose_nothing(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small.engine
    watch = Watch(engine, monkeypatch, fake_clock=True)
    while watch.now < WATCHED_S:
        keep(engine, "many", 40)
        keep(engine, "one", 1, params=replace(LONG, max_tokens=3), prompt_tokens=4)
        engine.step()
    end(engine)
    assert watch.share("one") == pytest.approx(0.5, rel=0.1)
    assert len(engine.scheduler._shares._shares) == 0


def test_time_that_one_tenant_had_alone_is_not_held_against_it(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small.engine
    watch = Watch(engine, monkeypatch, fake_clock=True)
    submit(engine, "first", 4)
    for _ in range(200):
        engine.step()
    watch.seconds.clear()
    submit(engine, "second", 4)
    for _ in range(100):
        engine.step()
    end(engine)
    assert watch.share("first") == pytest.approx(0.5, rel=0.1)


def test_one_tenant_costs_nothing(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("shares are computed for one tenant")

    for name in ("served", "charge", "gives_way", "may_wait"):
        monkeypatch.setattr(FairShares, name, refuse)
    sessions = submit(small.engine, "", 70, params=replace(LONG, max_tokens=5))
    while small.engine.has_work:
        small.engine.step()
    assert all(session.finish_reason == "length" for session in sessions)


def rounds_beside_long_steps(
    small: Small, monkeypatch: pytest.MonkeyPatch, think_s: float
) -> float:
    """Rounds of a session with a client's drafts for each step of another tenant's forty."""
    engine = small.engine
    client = cast(ClientDrafter, engine.drafters["client"])
    verify = engine.local_target.verify
    num_long, num_rounds = 0, 0

    def slow(sessions: Any, drafts: Any, wants: Any, prefill: Any, pseudo: Any) -> Any:
        nonlocal num_long
        num_long += any(session.tenant == "many" for session in sessions)
        time.sleep(0.001 * len(sessions))
        return verify(sessions, drafts, wants, prefill, pseudo)

    def draft(event: RoundEvent) -> None:
        nonlocal num_rounds
        num_rounds += 1
        if event.finished:
            return
        offer = partial(client.offer, event.session.session_id, Draft.chain([1, 2]))
        threading.Timer(think_s, offer).start()

    submit(engine, "many", 40)
    config = SpeculationConfig(method="client", node_budget=8)
    one = engine.submit(Request(tokens(5), LONG, config, tenant="one"), draft)
    client.expect(one.session_id)
    client.offer(one.session_id, Draft.chain([1, 2]))
    while not one.stats.num_rounds:
        engine.step()
    monkeypatch.setattr(engine.local_target, "verify", slow)
    num_long = num_rounds = 0
    while num_long < 8 and not one.finished:
        engine.step()
    end(engine)
    time.sleep(2 * think_s + 0.05)  # the last draft
    return num_rounds / num_long


def test_drafts_from_elsewhere_are_awaited_when_it_is_their_turn(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # a draft after the end
    assert rounds_beside_long_steps(small, monkeypatch, 0.001) > 4


def test_drafts_that_never_come_in_time_are_seldom_awaited() -> None:
    shares, slow, busy = FairShares(), session_of("slow"), session_of("busy")
    shares.add(slow)
    shares.add(busy)
    num_waits = 0
    for _ in range(1000):
        tenants = shares.awaited([busy], [slow])
        if tenants:
            num_waits += 1
            shares.waited(0.005, tenants, set())
        shares.served([busy])
        shares.charge(0.1, [(busy, 1)])
    assert 1 < num_waits < 1000 / 40


def session_of(tenant: str) -> Any:
    return SimpleNamespace(tenant=tenant, weight=1.0)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["ar", "draft_model_tree", "prompt_lookup", "auto"])
def test_sharing_changes_no_token(
    method: str, temperature: float, tiny_folder: Path, reference: Reference
) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=temperature, seed=3)
    small = small_engine(tiny_folder, limits=EngineLimits(max_sessions=4))
    speculation = SpeculationConfig(method=method)
    sessions = [
        small.engine.submit(
            Request(tokens(10 + i, i), params, speculation, tenant=tenant, weight=weight)
        )
        for i, (tenant, weight) in enumerate([("a", 1.0)] * 8 + [("b", 3.0)] * 2 + [("c", 0.5)] * 3)
    ]
    while small.engine.has_work:
        small.engine.step()
    for i, session in enumerate(sessions):
        assert session.output_ids == reference(tokens(10 + i, i), params)
    small.assert_nothing_is_left()


# --- places ----------------------------------------------------------------------------------


def test_a_tenant_with_all_places_gives_one_to_another(
    tiny_folder: Path, reference: Reference
) -> None:
    small = small_engine(tiny_folder, limits=EngineLimits(max_sessions=4))
    engine, params = small.engine, replace(LONG, max_tokens=60)
    many = submit(engine, "many", 10, params=params)
    for _ in range(5):
        engine.step()
    one = submit(engine, "one", 1, params=params)[0]
    engine.step()
    assert one.state is not SessionState.WAITING
    assert sum(session.state is not SessionState.WAITING for session in many) == 3
    while engine.has_work:
        engine.step()
    for session in (*many, one):
        prompt = session.token_ids[: session.prompt_length]
        assert session.output_ids == reference(prompt, params)
    assert engine.take_counters().num_preemptions == 1
    small.assert_nothing_is_left()


def test_places_follow_weights(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder, limits=EngineLimits(max_sessions=8))
    light, heavy = (submit(small.engine, t, 20, weight=w) for t, w in (("l", 1), ("h", 3)))
    for _ in range(30):
        small.engine.step()
    running = [
        sum(session.state is not SessionState.WAITING for session in sessions)
        for sessions in (light, heavy)
    ]
    before = small.engine.take_counters().num_preemptions
    for _ in range(30):
        small.engine.step()
    assert running == [2, 6]
    assert small.engine.take_counters().num_preemptions == before, "places go to and fro"


def test_a_tenant_that_fills_the_queue_does_not_close_it_to_others(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder, limits=EngineLimits(max_sessions=1, max_waiting=6))
    engine = small.engine
    submit(engine, "many", 7)
    with pytest.raises(ResourceExhausted):
        submit(engine, "many", 1)
    submit(engine, "one", 3)
    with pytest.raises(ResourceExhausted):
        submit(engine, "one", 1)
    end(engine)
    small.assert_nothing_is_left()


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_is_a_number_above_0(weight: float) -> None:
    with pytest.raises(InvalidArgument, match="weight"):
        Request([1], weight=weight)
