"""An engine on its own thread, called from many."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config import SpeculationConfig
from paceline.engine import EngineThread, RoundEvent
from paceline.errors import FailedPrecondition, InvalidArgument, SessionNotFound
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.types import EMPTY_DRAFT
from tests.core.engines import LOCAL_METHODS, Reference, Small, small_engine

PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
WAIT = 30.0


@pytest.fixture
def small(tiny_folder: Path) -> Small:
    return small_engine(tiny_folder)


@pytest.fixture
def thread(small: Small) -> Iterator[EngineThread]:
    thread = EngineThread(small.engine).start()
    yield thread
    thread.stop()
    assert not thread._thread.is_alive()
    small.assert_nothing_is_left()


class Listener:
    """Collects the events of one session and says when it has ended."""

    def __init__(self) -> None:
        self.events: list[RoundEvent] = []
        self.done = threading.Event()

    def __call__(self, event: RoundEvent) -> None:
        self.events.append(event)
        if event.finished:
            self.done.set()


def test_submit_from_many_threads(thread: EngineThread, reference: Reference) -> None:
    def user(number: int) -> None:
        rng = random.Random(number)
        for _ in range(4):
            prompt = [rng.randrange(256) for _ in range(rng.randint(1, 30))]
            listener = Listener()
            config = SpeculationConfig(method=rng.choice(LOCAL_METHODS))
            session = thread.submit(Request(prompt, PARAMS, config), on_event=listener).result(WAIT)
            if rng.random() < 0.3:
                thread.cancel(session.session_id).result(WAIT)
            assert listener.done.wait(WAIT)
            tokens = [token for event in listener.events for token in event.token_ids]
            assert tokens == session.output_ids
            with lock:
                done.append((prompt, tokens, session.finish_reason))

    lock, done = threading.Lock(), []
    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(user, number) for number in range(8)]:
            future.result(WAIT)
    assert len(done) == 32
    for prompt, tokens, reason in done:
        assert tokens == reference(prompt, PARAMS)[: len(tokens)]
        assert reason == ("length" if len(tokens) == 10 else "cancelled")


def test_errors_reach_the_caller_alone(thread: EngineThread) -> None:
    with pytest.raises(InvalidArgument, match="prompt"):
        thread.submit(Request([])).result(WAIT)
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda engine: 1 // 0).result(WAIT)
    assert thread.cancel("unknown").result(WAIT) is False
    assert thread.call(lambda engine: engine.has_work).result(WAIT) is False


def test_an_event_handler_that_fails_ends_only_its_session(
    thread: EngineThread, reference: Reference
) -> None:
    calls = []

    def broken(event: RoundEvent) -> None:
        calls.append(event)
        raise RuntimeError("a bug of the caller")

    bad = thread.submit(Request([1, 2, 3], PARAMS), on_event=broken).result(WAIT)
    listener = Listener()
    good = thread.submit(Request([4, 5, 6], PARAMS), on_event=listener).result(WAIT)
    assert listener.done.wait(WAIT)
    assert good.output_ids == reference([4, 5, 6], PARAMS)
    while not bad.finished:
        time.sleep(0.001)
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, RuntimeError)
    assert len(calls) == 1


def test_a_client_offers_from_another_thread(thread: EngineThread, reference: Reference) -> None:
    client = thread.engine.drafters["client"]
    listener = Listener()
    config = SpeculationConfig(method="client")
    session = thread.submit(Request([9, 8, 7], PARAMS, config), on_event=listener).result(WAIT)
    deadline = time.monotonic() + WAIT
    while not listener.done.is_set():
        assert time.monotonic() < deadline
        rounds = len(listener.events)
        try:
            client.offer(session.session_id, EMPTY_DRAFT)
        except (SessionNotFound, FailedPrecondition):
            time.sleep(0.0005)  # not admitted yet, or just finished
            continue
        while len(listener.events) == rounds and time.monotonic() < deadline:
            time.sleep(0.0002)
    assert session.output_ids == reference([9, 8, 7], PARAMS)


def test_calls_are_served_while_all_drafts_are_under_way(thread: EngineThread) -> None:
    """A session that waits for its client for ever does not make the engine deaf."""
    session = thread.submit(Request([1], PARAMS, SpeculationConfig(method="client"))).result(WAIT)
    for _ in range(20):
        started = time.perf_counter()
        assert thread.call(lambda engine: len(engine.sessions)).result(WAIT) == 1
        assert time.perf_counter() - started < 0.9  # far less than the wait for a draft, 1 s
    assert thread.cancel(session.session_id).result(WAIT)


def test_stop_ends_every_session_and_later_calls(small: Small) -> None:
    thread = EngineThread(small.engine).start()
    listeners = [Listener() for _ in range(6)]
    params = replace(PARAMS, max_tokens=400)
    slow = SpeculationConfig(method="ar")  # the last one must not be late for the end of the first
    for listener in listeners:
        thread.submit(Request([3, 4], params, slow), on_event=listener).result(WAIT)
    thread.stop()
    assert all(listener.done.is_set() for listener in listeners)
    assert {listener.events[-1].session.finish_reason for listener in listeners} == {"cancelled"}
    small.assert_nothing_is_left()
    for future in (thread.call(lambda engine: 1), thread.submit(Request([1])), thread.cancel("x")):
        with pytest.raises(FailedPrecondition, match="stopped"):
            future.result(WAIT)
    thread.stop()  # once more does nothing


def test_no_call_is_lost_when_the_thread_stops(small: Small) -> None:
    """Everything that was accepted before the end gets an answer, and no session survives it."""
    thread = EngineThread(small.engine).start()
    futures = []
    flood = threading.Event()

    def caller() -> None:
        for _ in range(2000):
            futures.append(thread.submit(Request([1, 2], PARAMS)))
            if flood.wait(0.0001):
                return

    callers = [threading.Thread(target=caller) for _ in range(3)]
    for each in callers:
        each.start()
    time.sleep(0.02)
    thread.stop()
    flood.set()
    for each in callers:
        each.join()
    ends = set()
    for future in futures:
        try:
            session = future.result(WAIT)
            assert session.finished
            ends.add(session.finish_reason)
        except FailedPrecondition:
            ends.add("refused")
        except RuntimeError as error:  # the queue is bounded
            assert "waiting already" in str(error)  # noqa: PT017
    assert ends <= {"length", "cancelled", "refused"}
    small.assert_nothing_is_left()


def test_stop_before_start(small: Small) -> None:
    thread = EngineThread(small.engine)
    early = thread.call(lambda engine: 1)
    thread.stop()
    for future in (early, thread.call(lambda engine: 1)):
        with pytest.raises(FailedPrecondition, match="stopped"):
            future.result(WAIT)
