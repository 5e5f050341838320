"""Clients that go away, and replicas that die: nothing hangs, nothing leaks, Serve mends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from paceline.config import SpeculationConfig
from paceline.deployments.lease import HOLDER_CHECK_S
from paceline.errors import PacelineError
from paceline.rpc.client import Client, Completion, Round
from paceline.rpc.errors import DeadlineExceeded, ServerUnavailable
from paceline.sampling import SamplingParams
from tests.deployments.conftest import PROMPTS, App, eventually

# The first test of a run waits for Ray, Serve and five replicas.
pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]

AR = Callable[[Sequence[str], SamplingParams], list[tuple[int, ...]]]
LONG = SamplingParams(max_tokens=900, ignore_eos=True)
DRAFTS = SpeculationConfig(method="draft_model", length="fixed")  # drafts on a busy machine, too
BACK_WITHIN_S = 60.0
"""A replica imports torch and loads its model; Serve looks for dead ones every few seconds."""


def _sessions(app: App) -> int:
    count: int = app.describe()["sessions"]
    return count


def _kill(app: App, deployment: str) -> int:
    pid: int = app.replica(deployment)["pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


def _again(client: Client, prompt: str, params: SamplingParams) -> Completion:
    """Complete, as soon as the application takes requests again."""
    end = time.monotonic() + BACK_WITHIN_S
    while True:
        try:
            return client.complete(prompt, params, DRAFTS, timeout=BACK_WITHIN_S)
        except PacelineError:
            assert time.monotonic() < end, "the application does not come back"
            time.sleep(0.5)


def test_cancel_frees_the_session(app: App, client: Client) -> None:
    generation = client.generate(PROMPTS[0], LONG, DRAFTS)
    rounds = iter(generation)
    assert next(rounds).token_ids
    assert _sessions(app) == 1
    generation.cancel()
    assert eventually(lambda: app.idle, 2.0), app.describe()
    with pytest.raises(PacelineError):
        list(rounds)


def test_deadline_frees_the_session(app: App, client: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        client.complete(PROMPTS[0], LONG, DRAFTS, timeout=0.3)
    assert eventually(lambda: app.idle, 2.0), app.describe()


_VANISHING = """
import sys
from paceline.sampling import SamplingParams
from paceline.rpc.client import Client
client = Client(sys.argv[1])
prompt_ids = [int(token) for token in sys.argv[2].split(",")]
for item in client.generate(prompt_ids, SamplingParams(max_tokens=900, ignore_eos=True)):
    print("started", flush=True)
    sys.stdin.read()
"""


def test_killed_client_frees_its_generation(app: App) -> None:
    """A process that is killed says no goodbye."""
    process = subprocess.Popen(
        [sys.executable, "-c", _VANISHING, app.address, "1,2,3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == "started\n"
        process.kill()
        process.wait(10)
    assert eventually(lambda: app.idle, 3.0), app.describe()


def test_idle_session_is_kept(app: App, client: Client) -> None:
    """Looking for dead holders of leases must not hurt those that live."""
    with client.open_session([1, 2, 3], SamplingParams(max_tokens=8)) as session:
        time.sleep(2 * HOLDER_CHECK_S)
        assert app.replica("target")["leases"] == 1
        assert session.verify().next_token is not None


def test_dead_drafter_costs_drafts_but_no_tokens(actors: App, ar: AR) -> None:
    (expected,) = ar(PROMPTS[:1], LONG)
    with Client(actors.address, timeout=60) as client:
        rounds: list[Round] = []
        killed = 0
        for item in client.generate(PROMPTS[0], LONG, DRAFTS):
            rounds.append(item)
            if len(rounds) == 5:
                killed = _kill(actors, "drafter")
        completion = Completion.of(rounds)
        assert completion.token_ids == expected
        assert completion.finish_reason == "length"
        assert completion.statistics.drafter_lost
        assert completion.statistics.num_accepted > 0  # it was there in the beginning
        short = SamplingParams(max_tokens=48, ignore_eos=True)
        (expected,) = ar(PROMPTS[1:2], short)

        def drafts_are_back() -> bool:
            again = client.complete(PROMPTS[1], short, DRAFTS)
            assert again.token_ids == expected  # with or without
            stats = again.statistics
            return stats.num_accepted > 0 and again.last.drafter_pid != killed

        assert eventually(drafts_are_back, BACK_WITHIN_S), actors.describe()


@pytest.mark.slow
def test_a_generation_outlives_its_target(actors: App, ar: AR) -> None:
    """It waits for the only target's successor, while verify sessions are told at once."""
    (expected,) = ar(PROMPTS[:1], LONG)
    with Client(actors.address, timeout=60) as client:
        session = client.open_session([1, 2, 3], SamplingParams(max_tokens=100))
        session.verify()
        rounds: list[Round] = []
        for item in client.generate(PROMPTS[0], LONG, DRAFTS):
            rounds.append(item)
            if len(rounds) == 3:
                killed = _kill(actors, "target")
                died = time.monotonic()
                with pytest.raises(ServerUnavailable) as caught:
                    session.verify()
                assert time.monotonic() - died < 3.0
                assert str(killed) in str(caught.value)
        completion = Completion.of(rounds)
        assert completion.token_ids == expected
        assert completion.last.target_pid != killed
        assert [item.round for item in rounds] == list(range(1, len(rounds) + 1))
        assert completion.statistics.num_tokens == len(expected)
        assert completion.statistics.num_rounds == len(rounds)
        with Client(actors.address, timeout=60) as other:  # of those that were lost nothing is left
            assert other.complete(PROMPTS[1], SamplingParams(max_tokens=4)).finish_reason


@pytest.mark.nightly
def test_a_stuck_drafter_is_replaced(actors: App, ar: AR) -> None:
    """Its process runs but answers no call: sessions go on as AR until Serve replaces it."""
    short = SamplingParams(max_tokens=48, ignore_eos=True)
    (expected,) = ar(PROMPTS[1:2], short)
    stuck: int = actors.replica("drafter")["pid"]
    os.kill(stuck, signal.SIGSTOP)
    try:
        with Client(actors.address, timeout=60) as client:

            def drafts_are_back() -> bool:
                again = client.complete(PROMPTS[1], short, DRAFTS)
                assert again.token_ids == expected
                return again.statistics.num_accepted > 0 and again.last.drafter_pid != stuck

            assert not drafts_are_back()
            assert eventually(drafts_are_back, 120.0), actors.describe()
    finally:
        with suppress(ProcessLookupError):
            os.kill(stuck, signal.SIGCONT)


def test_dead_gateway_frees_sessions_and_comes_back(actors: App, ar: AR) -> None:
    with Client(actors.address, timeout=60) as client:
        rounds = iter(client.generate(PROMPTS[0], LONG, DRAFTS))
        next(rounds)
        _kill(actors, "gateway")
        with pytest.raises(ServerUnavailable):
            list(rounds)

        def freed() -> bool:
            target = _status(actors, "target")
            return bool(target["sessions"] == 0 and target["leases"] == 0)

        assert eventually(freed, 5.0), actors.describe()
        short = SamplingParams(max_tokens=48, ignore_eos=True)
        again = _again(client, PROMPTS[1], short)  # on the same port
        assert [again.token_ids] == ar(PROMPTS[1:2], short)


def _status(app: App, deployment: str) -> dict[str, Any]:
    """As ``App.replica``, also while another deployment is down."""
    from ray import serve

    (status,) = serve.get_deployment_handle(deployment, app.name).broadcast("status").results()
    result: dict[str, Any] = status
    return result
