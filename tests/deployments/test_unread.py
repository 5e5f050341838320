"""Generations through the gateway whose answers are not read: they hold no target."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import grpc
import pytest

from paceline.deployments.gateway import Relay
from paceline.deployments.lease import Lease
from paceline.engine import Engine, EngineLimits, EngineThread
from paceline.loading import load_runner
from paceline.rpc.access import Gate
from paceline.rpc.errors import ServerUnavailable
from paceline.rpc.gen.paceline.v1 import (
    generate_pb2_grpc,
    verify_pb2,
    verify_pb2_grpc,
)
from paceline.rpc.messages import sampling_to_message
from paceline.rpc.server import start_server
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from tests.deployments.http_serving import DirectLease
from tests.modelzoo import make_model
from tests.rpc.serving import eventually
from tests.rpc.test_unread import LONG, NEVER_READS, PROMPT, message

ONE = SamplingParams(max_tokens=1)
PLACES = 8


class Places:
    """Leases as Serve gives them: as many at a time as the target takes sessions."""

    def __init__(self, address: str) -> None:
        self.num_held = self.num_given = 0
        self._address = address

    async def __call__(self) -> Lease:
        for _ in range(50):
            if self.num_held < PLACES:
                break
            await asyncio.sleep(0.1)
        else:
            raise ServerUnavailable("no target replica within 5 s")
        self.num_held += 1
        self.num_given += 1
        return cast(Lease, _Held(self))


class _Held(DirectLease):
    def __init__(self, places: Places) -> None:
        super().__init__(places._address)
        self._places: Places | None = places

    def release(self) -> None:
        if self._places is not None:
            self._places.num_held -= 1
            self._places = None


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineThread]:
    runner = load_runner(make_model("llama", tmp_path), kv_tokens=4096)
    limits = EngineLimits(max_sessions=PLACES)
    thread = EngineThread(Engine(ModelTarget(runner), limits=limits)).start()
    yield thread
    assert eventually(lambda: not thread.engine.sessions)
    thread.stop()
    assert runner.num_free == runner.kv_capacity


@asynccontextmanager
async def relayed(
    engine: EngineThread, idle_timeout_s: float = 60.0
) -> AsyncIterator[tuple[str, Places]]:
    """A gateway in front of one target; yields its address."""
    async with await start_server(engine=engine) as target:
        places = Places(target.address)
        relay = Relay(places, idle_timeout_s=idle_timeout_s, resume_s=5.0, gate=Gate())
        async with await start_server(register=relay.register) as gateway:
            yield gateway.address, places
        await relay.close()
        assert places.num_held == 0


async def tokens_of(address: str, params: SamplingParams) -> list[int]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = generate_pb2_grpc.GenerateServiceStub(channel).Generate(message(params))
        return [token async for reply in call for token in reply.token_ids]


async def test_one_token_answers_that_are_not_read_hold_no_target(engine: EngineThread) -> None:
    async with (
        relayed(engine) as (address, places),
        grpc.aio.insecure_channel(address, options=NEVER_READS) as channel,
    ):
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        calls = [stub.Generate(message(ONE)) for _ in range(160)]
        async with asyncio.timeout(30):
            expected = await tokens_of(address, ONE)
        num_done = 0
        for _ in range(200):
            counters = engine.call(lambda each: each.take_counters())
            num_done = (await asyncio.wrap_future(counters)).finished["length"]
            if num_done == 161 and not places.num_held:
                break
            await asyncio.sleep(0.1)
        assert (num_done, places.num_held) == (161, 0)
        for call in calls:
            assert [token async for reply in call for token in reply.token_ids] == expected


@pytest.mark.slow
async def test_long_answers_that_are_not_read_are_parked_and_go_on_exactly(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.deployments.gateway.MAX_UNREAD", 1000)
    async with (
        relayed(engine) as (address, places),
        grpc.aio.insecure_channel(address, options=NEVER_READS) as channel,
    ):
        expected = await tokens_of(address, LONG)
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        calls = [stub.Generate(message(LONG)) for _ in range(PLACES)]
        await asyncio.sleep(0.5)
        async with asyncio.timeout(30):
            assert await tokens_of(address, LONG) == expected
        for _ in range(200):
            if not places.num_held:
                break
            await asyncio.sleep(0.1)
        assert places.num_held == 0, "a generation that is not read has a target"
        given = places.num_given
        for call in calls[:3]:
            replies = [reply async for reply in call]
            assert [token for reply in replies for token in reply.token_ids] == expected
            assert [reply.round for reply in replies] == list(range(1, len(replies) + 1))
            assert replies[-1].statistics.num_tokens == len(expected)
        assert places.num_given > given, "nothing was parked"
        for call in calls[3:]:
            call.cancel()


async def test_an_answer_to_a_round_that_is_not_read_ends_its_stream(engine: EngineThread) -> None:
    async with (
        relayed(engine, idle_timeout_s=1.0) as (address, places),
        grpc.aio.insecure_channel(address, options=NEVER_READS) as channel,
    ):
        call = verify_pb2_grpc.VerifyServiceStub(channel).Session()
        opening = verify_pb2.OpenRequest(token_ids=PROMPT, sampling=sampling_to_message(LONG))
        await call.write(verify_pb2.VerifyFrame(open=opening))
        for _ in range(100):
            if places.num_held:
                break
            await asyncio.sleep(0.02)
        assert places.num_held == 1
        for _ in range(100):
            if not places.num_held:
                break
            await asyncio.sleep(0.1)
        assert places.num_held == 0
