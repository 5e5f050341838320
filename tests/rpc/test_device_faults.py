"""The `device` topology on a network that breaks: no token is lost, repeated or changed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from benchmarks.netem import Link, Netem
from paceline.config import SpeculationConfig
from paceline.engine import Engine, EngineLimits, EngineThread
from paceline.errors import InvalidArgument, PacelineError
from paceline.loading import load_runner
from paceline.models.base import ModelRunner
from paceline.rpc.client import Client
from paceline.rpc.device import DeviceClient
from paceline.rpc.errors import ServerUnavailable
from paceline.rpc.gen.paceline.v1 import verify_pb2
from paceline.rpc.ladder import Mode
from paceline.rpc.reconnect import Patience
from paceline.rpc.server import RpcServer
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from tests.fakes import WITH_FAKES
from tests.rpc.serving import TargetProcess, eventually, serving
from tests.rpc.test_device import PROMPT, RewindingMix, ar

QUICK = Patience(silence=0.15, probe=0.3, give_up=20.0)


@pytest.fixture(scope="session")
def second_runner(model_folder: Path) -> ModelRunner:
    """The same model as ``runner``, for a second server."""
    return load_runner(model_folder, kv_tokens=8192)


@pytest.fixture
def second_server(second_runner: ModelRunner) -> Iterator[RpcServer]:
    limits = EngineLimits(max_sessions=8, max_waiting=12)
    thread = EngineThread(Engine(ModelTarget(second_runner), limits=limits)).start()
    try:
        with serving(engine=thread) as running:
            yield running
        assert eventually(lambda: not thread.engine.sessions), "sessions leaked"
    finally:
        thread.stop()
    assert second_runner.num_free == second_runner.kv_capacity, "KV memory leaked"


def device(
    servers: Sequence[str],
    truth: Sequence[int],
    *,
    rho: float = 0.85,
    patience: Patience = QUICK,
    mode: Mode = Mode.DEVICE,
) -> DeviceClient:
    """A client whose drafter is right with probability ``rho`` at each token."""
    mix = RewindingMix({tuple(PROMPT): truth}, 258, rho=rho)
    return DeviceClient(
        servers, {"mix": mix},
        speculation=SpeculationConfig(method="mix"),
        modes=(mode,),
        patience=patience,
        catalogue=WITH_FAKES,
    )  # fmt: skip


# --- one fault at a time --------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_connection_is_taken_up_again(
    temperature: float, server: RpcServer, runner: ModelRunner
) -> None:
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3)
    truth = ar(runner, params)
    with Netem(server.address, Link(rtt=0.02)) as netem:
        with device([netem.address], truth) as client:
            for done in client.generate(PROMPT, params):
                if done.finish_reason is None:
                    netem.reset()
        assert client.result.token_ids == truth
        assert client.result.counters.num_failures >= 3


@pytest.mark.parametrize("mode", [Mode.SERVER, Mode.AR])
def test_a_broken_stream_goes_on_where_it_was(
    mode: Mode, server: RpcServer, runner: ModelRunner
) -> None:
    """Penalties count what was generated before the break as output, not as prompt."""
    params = SamplingParams(max_tokens=300, temperature=1.0, seed=4, frequency_penalty=1.5)
    truth = ar(runner, params)
    with (
        Netem(server.address, Link(rtt=0.02)) as netem,
        device([netem.address], truth, mode=mode) as client,
    ):
        for i, done in enumerate(client.generate(PROMPT, params)):
            if done.finish_reason is None and i in (0, 10, 50):
                netem.reset()  # most of it is still to be generated
        assert client.result.token_ids == truth
        assert client.result.counters.num_failures > 0


def test_a_session_that_the_server_still_has_is_resumed(
    server: RpcServer, runner: ModelRunner
) -> None:
    """The server has not noticed that the connection is gone: it keeps the session, and the answer
    that was lost."""
    params = SamplingParams(max_tokens=60)
    truth = ar(runner, params)
    with Netem(server.address, Link(rtt=0.02)) as netem, device([netem.address], truth) as client:
        for done in client.generate(PROMPT, params):
            if done.finish_reason is None:
                netem.cut()
        assert client.result.token_ids == truth
        counters = client.result.counters
        assert counters.num_resumed >= 3
        assert counters.num_opened == 1


def test_a_silent_network_is_waited_for(server: RpcServer, runner: ModelRunner) -> None:
    params = SamplingParams(max_tokens=60)
    truth = ar(runner, params)
    with Netem(server.address) as netem, device([netem.address], truth) as client:
        rounds = client.generate(PROMPT, params)
        next(rounds)
        netem.partition()  # what is sent from here on is lost, without an error
        healer = threading.Timer(1.5, netem.partition, [False])
        healer.start()
        for _ in rounds:
            pass
        healer.join()
        assert client.result.token_ids == truth
        assert client.result.counters.num_failures >= 1
        assert 0.5 < max(client.result.counters.outage_seconds) < 5.0


@pytest.mark.parametrize("how", ["refuse", "partition"])
def test_another_server_goes_on_within_two_seconds(
    how: str, server: RpcServer, second_server: RpcServer, runner: ModelRunner
) -> None:
    """Also when the first one dies without a word."""
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=4)
    truth = ar(runner, params)
    with (
        Netem(server.address, Link(rtt=0.02)) as first,
        Netem(second_server.address, Link(rtt=0.02)) as second,
        device([first.address, second.address], truth, patience=Patience()) as client,
    ):
        rounds = client.generate(PROMPT, params)
        for _ in range(3):
            next(rounds)
        died_at = time.monotonic()
        getattr(first, how)()
        next(rounds)  # may have been on its way
        next(rounds)
        next(rounds)
        assert time.monotonic() - died_at < 2.0
        for _ in rounds:
            pass
        assert client.result.token_ids == truth
        assert second.num_connections >= 1
        first.partition(False)


def test_a_killed_process_costs_less_than_two_seconds(
    model_folder: Path, server: RpcServer, runner: ModelRunner
) -> None:
    params = SamplingParams(max_tokens=80, temperature=1.0, seed=9)
    truth = ar(runner, params)
    with (
        TargetProcess(model_folder) as process,
        device([process.address, server.address], truth, patience=Patience()) as client,
    ):
        rounds = client.generate(PROMPT, params)
        for _ in range(3):
            next(rounds)
        killed_at = time.monotonic()
        process.kill()
        before = client.result.statistics.num_tokens
        for _ in rounds:
            if client.result.counters.num_failures:
                break
        assert time.monotonic() - killed_at < 2.0
        assert client.result.statistics.num_tokens > before
        for _ in rounds:
            pass
        assert client.result.token_ids == truth


def test_the_wait_for_a_server_ends(server: RpcServer, runner: ModelRunner) -> None:
    params = SamplingParams(max_tokens=60)
    truth = ar(runner, params)
    patience = Patience(silence=0.1, probe=0.1, give_up=0.8)
    with (
        Netem(server.address) as netem,
        device([netem.address], truth, patience=patience) as client,
    ):
        rounds = client.generate(PROMPT, params)
        next(rounds)
        netem.refuse()
        started = time.monotonic()
        with pytest.raises(ServerUnavailable, match=netem.address):
            for _ in rounds:
                pass
        assert time.monotonic() - started < 3.0
        assert client.result.token_ids == truth[: len(client.result.token_ids)]


def test_what_another_attempt_cannot_mend_is_raised_at_once(
    server: RpcServer, runner: ModelRunner
) -> None:
    params = SamplingParams(max_tokens=60)
    with device([server.address], ar(runner, params)) as client:
        session_limits = client.target.info
        client.target.info = type(session_limits)(
            vocab_size=10_000, context_length=session_limits.context_length
        )
        started = time.monotonic()
        with pytest.raises(InvalidArgument):
            client.complete([9_999], params)
        assert time.monotonic() - started < 2.0


# --- many faults ----------------------------------------------------------------------------------


@contextmanager
def faults(
    netems: Sequence[Netem], clients: Sequence[DeviceClient], count: int, seed: int
) -> Iterator[threading.Thread]:
    """Breaks things at random until ``count`` faults have happened."""
    rng = random.Random(seed)
    stop = threading.Event()

    def run() -> None:
        for _ in range(count):
            if stop.wait(rng.uniform(0.02, 0.12)):
                return
            netem = rng.choice(netems)
            kind = rng.choice(("reset", "reset", "partition", "refuse", "duplicate", "slow"))
            if kind == "reset":
                netem.reset()
            elif kind == "partition":
                netem.partition()
                stop.wait(rng.choice((0.05, 0.3, 0.6)))
                netem.partition(False)
            elif kind == "refuse":
                netem.refuse()
                stop.wait(rng.uniform(0.05, 0.3))
                netem.refuse(False)
            elif kind == "slow":
                netem.set(rtt=rng.choice((0.0, 0.02, 0.2)), jitter=0.02, bandwidth=20_000)
            else:
                repeat_round(netem.address, clients)

    thread = threading.Thread(target=run, name="faults")
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join(10)
        for netem in netems:
            netem.refuse(False)
            netem.partition(False)


def repeat_round(address: str, clients: Sequence[DeviceClient]) -> None:
    """Send a round that is in flight once more, from elsewhere, as a retry of a network would."""
    for link in [link for client in clients for link in list(client.target._links.values())]:
        rounds = list(link.transcript.rounds)
        if not rounds or not rounds[0].number:
            continue
        first = rounds[0]
        request = verify_pb2.VerifyRequest(
            session_id=link.transcript.session_id,
            epoch=link.transcript.epoch,
            round=first.number,
            base_length=first.base,
            prefix_digest=first.digest.value(),
            token_ids=first.draft.token_ids.tolist(),
            parent_indices=first.draft.parent_indices.tolist(),
        )
        # It may be over already, or no process may be there.
        with suppress(PacelineError), Client(address, timeout=0.5) as other:
            other._unary(other._verify.Verify, request)


def run_with_faults(
    servers: Sequence[RpcServer], runner: ModelRunner, *, count: int, seed: int
) -> None:
    greedy = SamplingParams(max_tokens=120, seed=1)
    sampled = SamplingParams(max_tokens=120, temperature=1.0, seed=2)
    truths = {params.temperature: ar(runner, params) for params in (greedy, sampled)}
    netems = [Netem(each.address, Link(rtt=0.02)) for each in servers]
    for netem in netems:
        netem.__enter__()
    try:
        clients = {
            params.temperature: device([n.address for n in netems], truths[params.temperature])
            for params in (greedy, sampled)
        }
        turn = 0
        with faults(netems, list(clients.values()), count, seed) as thread:
            while thread.is_alive() or turn < 2:
                params = (greedy, sampled)[turn % 2]
                current = clients[params.temperature]
                tokens = [
                    token for done in current.generate(PROMPT, params) for token in done.token_ids
                ]
                assert tokens == truths[params.temperature]
                assert current.result.token_ids == tokens
                turn += 1
        assert sum(c.target.counters.num_failures for c in clients.values()) > count / 4
    finally:
        for netem in netems:
            netem.__exit__(None, None, None)


@pytest.mark.parametrize("seed", [1])
def test_thirty_faults_change_no_token(
    seed: int, server: RpcServer, second_server: RpcServer, runner: ModelRunner
) -> None:
    run_with_faults([server, second_server], runner, count=30, seed=seed)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_two_hundred_faults_change_no_token(
    seed: int, server: RpcServer, second_server: RpcServer, runner: ModelRunner
) -> None:
    run_with_faults([server, second_server], runner, count=200, seed=seed)
