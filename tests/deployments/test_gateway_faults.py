"""Two gateways behind a per-call balancer, on a network that breaks: no token lost or changed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.netem import Link, Netem
from paceline.config import SpeculationConfig
from paceline.errors import PacelineError, ResourceExhausted, SessionNotFound
from paceline.loading import load_runner
from paceline.models.base import ModelRunner
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
from paceline.sampling import SamplingParams
from paceline.types import Draft
from tests.deployments.conftest import free_port
from tests.modelzoo import make_model
from tests.rpc.round_robin import RoundRobin
from tests.rpc.serving import ReplicaProcess, TargetProcess
from tests.rpc.test_device import PROMPT, ar
from tests.rpc.test_device_faults import device

PARAMS = (
    SamplingParams(max_tokens=120, ignore_eos=True),
    SamplingParams(max_tokens=120, ignore_eos=True, temperature=1.0, seed=2),
)
PATIENCE = Patience(silence=0.15, probe=0.3, give_up=60.0)
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


class Service:
    """Two targets, two gateways, the balancer, and a breakable network on every way between them.

    Attributes:
        address: for clients.
        num_faults: by kind.
    """

    def __init__(self, folder: Path, keys: Path, seed: int) -> None:
        keys.write_text("k" * 40)
        self.num_faults: dict[str, int] = {}
        self._keys, self._stack = keys, ExitStack()
        self._draw = random.Random(seed)
        self._folder = folder
        self._gateways: list[ReplicaProcess] = []

    async def __aenter__(self) -> Service:
        enter = self._stack.enter_context
        targets = [enter(TargetProcess(self._folder)) for _ in range(2)]
        to_targets = [enter(Netem(each.address)) for each in targets]
        self._target_addresses = [each.address for each in to_targets]
        self._ports = [free_port() for _ in range(2)]
        self._gateways = [self._start(i) for i in range(2)]
        to_gateways = [enter(Netem(each.address)) for each in self._gateways]
        self._proxy = RoundRobin([each.address for each in to_gateways])
        await self._proxy.__aenter__()
        to_proxy = enter(Netem(self._proxy.address, Link(rtt=0.01)))
        self.address = to_proxy.address
        self._links = [*to_targets, *to_gateways, to_gateways[0], to_gateways[1], to_proxy]
        return self

    def _start(self, i: int) -> ReplicaProcess:
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
            self._gateways[i].kill()
            await asyncio.sleep(draw.uniform(0.0, 0.3))
            self._gateways[i] = await asyncio.to_thread(self._start, i)

    async def __aexit__(self, *exc_info: object) -> None:
        await self._proxy.__aexit__()
        for gateway in self._gateways:
            gateway.kill()
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
    folder: Path, runner: ModelRunner, keys: Path, *, count: int, seed: int
) -> None:
    truths = [ar(runner, params) for params in PARAMS]
    faults_are_over = False
    rounds: list[tuple[str, int, int]] = []
    async with Service(folder, keys, seed) as service:

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


@pytest.mark.timeout(200)
async def test_twenty_faults_change_no_token(
    folder: Path, runner: ModelRunner, tmp_path: Path
) -> None:
    await run_with_faults(folder, runner, tmp_path / "keys", count=20, seed=1)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [2, 3, 4])
async def test_two_hundred_faults_change_no_token(
    folder: Path, runner: ModelRunner, tmp_path: Path, seed: int
) -> None:
    await run_with_faults(folder, runner, tmp_path / "keys", count=200, seed=seed)
