"""Two gateways behind a per-call balancer, on a network that breaks: no token lost or changed."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.netem import Link, Netem
from paceline.config import SpeculationConfig
from paceline.deployments.gateway import Relay
from paceline.deployments.session_ids import KeyFile
from paceline.engine import Engine, EngineThread
from paceline.errors import PacelineError, ResourceExhausted, SessionNotFound
from paceline.loading import load_runner
from paceline.models.base import ModelRunner
from paceline.rpc.access import Gate
from paceline.rpc.client import Client, VerifySession
from paceline.rpc.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    PrefixDiverged,
    RoundOutOfOrder,
    ServerUnavailable,
)
from paceline.rpc.reconnect import Patience
from paceline.rpc.server import start_server
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.types import Draft
from tests.deployments.conftest import free_port
from tests.deployments.http_serving import DirectLeases
from tests.modelzoo import make_model
from tests.rpc.round_robin import RoundRobin
from tests.rpc.serving import ReplicaProcess, TargetProcess, calls_ended, serving
from tests.rpc.test_device import PROMPT, ar
from tests.rpc.test_device_faults import device

PARAMS = (
    SamplingParams(max_tokens=120, ignore_eos=True),
    SamplingParams(max_tokens=120, ignore_eos=True, temperature=1.0, seed=2),
)
PATIENCE = Patience(silence=0.5, probe=2.0, give_up=60.0)  # the machine may be busy
GIVE_UP_S = 60.0
_LOST = (
    ServerUnavailable, DeadlineExceeded, Cancelled, InternalError, ResourceExhausted,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return load_runner(folder, kv_tokens=4096)


class LocalGateway:
    """A gateway on a thread of this process, in place of a process of its own."""

    def __init__(self, keys: Path, port: int, targets: list[str]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway")
        self._thread.start()
        self._is_dead = False
        self._run(self._start(keys, port, targets))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _start(self, keys: Path, port: int, targets: list[str]) -> None:
        leases, gate = DirectLeases(), Gate()
        leases.addresses = targets
        ids = KeyFile(keys).session_ids()
        self._relay = Relay(leases, idle_timeout_s=60, resume_s=5, gate=gate, session_ids=ids)
        self._server = await start_server(register=self._relay.register, gate=gate, port=port)
        self.address = self._server.address

    async def _stop(self) -> None:
        await self._server.stop(0)
        await self._relay.close()

    def kill(self) -> None:
        """End it with all its calls; safe to call twice."""
        if self._is_dead:
            return
        self._is_dead = True
        self._run(self._stop())
        self._run(calls_ended())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class Service:
    """Two targets, two gateways, the balancer, and a breakable network on every way between them.

    Args:
        engines: of the targets, in this process, as the gateways then are; None: each has a
            process of its own, and a gateway that is killed has no time to say goodbye.

    Attributes:
        address: for clients.
        num_faults: by kind.
    """

    def __init__(
        self, folder: Path, keys: Path, seed: int, engines: list[EngineThread] | None
    ) -> None:
        keys.write_text("k" * 40)
        self.num_faults: dict[str, int] = {}
        self._keys, self._stack = keys, ExitStack()
        self._draw = random.Random(seed)
        self._folder, self._engines = folder, engines
        self._gateways: list[ReplicaProcess | LocalGateway] = []

    async def __aenter__(self) -> Service:
        enter = self._stack.enter_context
        if self._engines is None:
            targets = [enter(TargetProcess(self._folder)).address for _ in range(2)]
        else:
            targets = [enter(serving(engine=engine)).address for engine in self._engines]
        to_targets = [enter(Netem(each)) for each in targets]
        self._target_addresses = [each.address for each in to_targets]
        self._ports = [free_port() for _ in range(2)]
        self._gateways = [self._start(i) for i in range(2)]
        to_gateways = [enter(Netem(each.address)) for each in self._gateways]
        self._proxy = RoundRobin([each.address for each in to_gateways])
        await self._proxy.__aenter__()
        to_proxy = enter(Netem(self._proxy.address, Link(rtt=0.01)))
        self.address = to_proxy.address
        self._links = [*to_targets, *to_gateways, *to_gateways, to_proxy]
        return self

    def _start(self, i: int) -> ReplicaProcess | LocalGateway:
        if self._engines is not None:
            return LocalGateway(self._keys, self._ports[i], self._target_addresses)
        return ReplicaProcess(
            "tests.deployments.gateway_process",
            "--keys", str(self._keys), "--port", str(self._ports[i]),
            "--targets", *self._target_addresses,
        )  # fmt: skip

    async def fault(self) -> None:
        """One fault, and its end."""
        draw = self._draw
        kinds = ("reset", "reset", "cut", "partition", "refuse", "kill")
        kind = draw.choices(kinds, [4, 4, 3, 2, 2, 1])[0]
        self.num_faults[kind] = self.num_faults.get(kind, 0) + 1
        link = draw.choice(self._links)
        if kind == "reset":
            link.reset()
        elif kind == "cut":  # one side does not notice
            link.cut()
        elif kind == "partition":
            link.partition()
            await asyncio.sleep(draw.choice((0.05, 0.3, 0.6)))
            link.partition(False)
        elif kind == "refuse":
            link.refuse()
            await asyncio.sleep(draw.uniform(0.05, 0.3))
            link.refuse(False)
        else:
            i = draw.randrange(2)
            await asyncio.to_thread(self._gateways[i].kill)
            await asyncio.sleep(draw.uniform(0.0, 0.3))
            self._gateways[i] = await asyncio.to_thread(self._start, i)

    async def __aexit__(self, *exc_info: object) -> None:
        await self._proxy.__aexit__()
        for gateway in self._gateways:
            await asyncio.to_thread(gateway.kill)
        await asyncio.to_thread(self._stack.close)


# --- clients, each over and over again until the faults are over ---------------------------------


def decode_on_device(address: str, truth: list[int], params: SamplingParams) -> Iterator[int]:
    """Streams of verify sessions, which are resumed."""
    with device([address], truth, patience=PATIENCE) as client:
        while True:
            tokens = [t for done in client.generate(PROMPT, params) for t in done.token_ids]
            assert tokens == truth
            yield client.target.counters.num_failures


def decode_at_server(address: str, truth: list[int], params: SamplingParams) -> Iterator[int]:
    """Generations that go on."""
    method = SpeculationConfig(method="prompt_lookup")
    with Client(address, timeout=GIVE_UP_S, resume_s=GIVE_UP_S) as client:
        failures = 0
        end = time.monotonic() + GIVE_UP_S
        while True:
            try:
                tokens = client.complete(PROMPT, params, method).token_ids
            except _LOST:  # before it began
                failures += 1
                assert time.monotonic() < end, "no generation begins any more"
                time.sleep(0.05)
                continue
            assert list(tokens) == truth
            end = time.monotonic() + GIVE_UP_S
            yield failures


def decode_by_calls(address: str, truth: list[int], params: SamplingParams) -> Iterator[int]:
    """Verify sessions of unary calls, each of which may go to another gateway."""
    failures = 0
    with Client(address, timeout=2.0) as client:
        while True:
            tokens: list[int] = []
            session: VerifySession | None = None
            end = time.monotonic() + GIVE_UP_S
            while len(tokens) < len(truth):
                assert time.monotonic() < end, "no token comes any more"
                left = len(truth) - len(tokens)
                try:
                    if session is None:
                        rest = replace(params, max_tokens=left)
                        session = client.open_session([*PROMPT, *tokens], rest)
                    draft = Draft.chain([*truth[len(tokens) : len(tokens) + 2], 1][:left])
                    tokens += session.verify(draft).token_ids
                    assert tokens == truth[: len(tokens)]
                except (SessionNotFound, PrefixDiverged, RoundOutOfOrder):
                    session = None
                    failures += 1
                except _LOST:
                    failures += 1
                    time.sleep(0.05)
            if session is not None:
                try:
                    session.close()
                except PacelineError:
                    failures += 1
            yield failures


async def run_with_faults(
    folder: Path,
    runner: ModelRunner,
    keys: Path,
    *,
    count: int,
    seed: int,
    engines: list[EngineThread] | None = None,
) -> None:
    truths = [ar(runner, params) for params in PARAMS]
    # With the default one clients would leave no thread to those that break things.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(16))
    faults_are_over = False
    rounds: list[tuple[str, int, int]] = []
    async with Service(folder, keys, seed, engines) as service:

        def run(decode: Callable[..., Iterator[int]], i: int) -> None:
            nonlocal faults_are_over
            try:
                for turn, failures in enumerate(decode(service.address, truths[i], PARAMS[i])):
                    if faults_are_over:
                        rounds.append((decode.__name__, turn + 1, failures))
                        return
            finally:
                faults_are_over = True  # also for the others, if this one has failed

        async def break_things() -> None:
            nonlocal faults_are_over
            draw = random.Random(seed)
            try:
                for _ in range(count):
                    if faults_are_over:
                        return
                    await asyncio.sleep(draw.uniform(0.02, 0.15))
                    await service.fault()
            finally:
                faults_are_over = True

        decodes = (decode_on_device, decode_at_server, decode_by_calls)
        done = await asyncio.gather(
            break_things(),
            *(asyncio.to_thread(run, decodes[j], i) for i in range(2) for j in range(3)),
            return_exceptions=True,
        )
        failed = [error for error in done if error is not None]
        assert not failed
        print(service.num_faults, rounds)
        assert sum(service.num_faults.values()) == count
        assert len(rounds) == 6
        assert sum(failures for _, _, failures in rounds) > count / 4


@pytest.fixture
def engines(folder: Path) -> Iterator[list[EngineThread]]:
    """Two targets with the same model."""
    runners = [load_runner(folder, kv_tokens=4096) for _ in range(2)]
    threads = [EngineThread(Engine(ModelTarget(each))).start() for each in runners]
    yield threads
    for thread, each in zip(threads, runners, strict=True):
        thread.stop()
        assert each.num_free == each.kv_capacity, "KV memory leaked"


@pytest.mark.slow
async def test_twenty_faults_change_no_token(
    folder: Path, runner: ModelRunner, engines: list[EngineThread], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    await run_with_faults(folder, runner, keys, count=20, seed=1, engines=engines)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [2, 3, 4])
async def test_two_hundred_faults_change_no_token(
    folder: Path, runner: ModelRunner, tmp_path: Path, seed: int
) -> None:
    await run_with_faults(folder, runner, tmp_path / "keys", count=200, seed=seed)
