"""Whose a session is, and its weight: from the tenants file through the gateway to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from paceline.deployments.gateway import Relay
from paceline.deployments.lease import Lease
from paceline.engine import Engine, EngineThread
from paceline.loading import load_runner
from paceline.rpc.access import CACHE_SCOPE, ONLINE_TRAINING, WEIGHT, Gate
from paceline.rpc.gen.paceline.v1 import generate_pb2_grpc, verify_pb2, verify_pb2_grpc
from paceline.rpc.messages import sampling_to_message
from paceline.rpc.server import start_server
from paceline.rpc.tenants import Tenants
from paceline.target import ModelTarget
from tests.deployments.http_serving import DirectLease
from tests.modelzoo import make_model
from tests.rpc.serving import eventually
from tests.rpc.test_unread import LONG, PROMPT, message

TOKENS = {name: f"token-of-{name}-0123456789" for name in ("heavy", "light")}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineThread]:
    runner = load_runner(make_model("llama", tmp_path), kv_tokens=4096)
    thread = EngineThread(Engine(ModelTarget(runner))).start()
    yield thread
    assert eventually(lambda: not thread.engine.sessions)
    thread.stop()


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    path = tmp_path / "tenants.yaml"
    path.write_text(
        f"tenants:\n  heavy: {{token: {TOKENS['heavy']}, weight: 3, online_training: true}}\n"
        f"  light: {{token: {TOKENS['light']}}}\n"
    )
    return Tenants(path)


async def shares(address: str, engine: EngineThread) -> set[tuple[str, float, bool]]:
    """Tenants and weights of the engine's sessions, and whether they teach the drafter: a
    generation and a verify session of each."""
    opening = verify_pb2.OpenRequest(token_ids=PROMPT, sampling=sampling_to_message(LONG))
    calls: list[Any] = []
    async with grpc.aio.insecure_channel(address) as channel:
        for token in TOKENS.values():
            forged = ((CACHE_SCOPE, "another's"), (WEIGHT, "100"), (ONLINE_TRAINING, "1"))
            metadata = (("authorization", f"Bearer {token}"), *forged)
            call = generate_pb2_grpc.GenerateServiceStub(channel).Generate(
                message(LONG), metadata=metadata
            )
            assert await call.read()
            session = verify_pb2_grpc.VerifyServiceStub(channel).Session(metadata=metadata)
            await session.write(verify_pb2.VerifyFrame(open=opening))
            assert (await session.read()).HasField("open")
            calls += [call, session]
        found = await asyncio.wrap_future(
            engine.call(
                lambda each: {
                    (s.tenant, s.weight, s.teaches_drafter) for s in each.sessions.values()
                }
            )
        )
        for call in calls:
            call.cancel()
    return set(found)


async def test_a_server_knows_its_tenants(engine: EngineThread, tenants: Tenants) -> None:
    async with await start_server(engine=engine, gate=Gate(tenants=tenants)) as server:
        assert await shares(server.address, engine) == {
            ("heavy", 3.0, True), ("light", 1.0, False),
        }  # fmt: skip


async def test_a_gateway_tells_its_targets(engine: EngineThread, tenants: Tenants) -> None:
    gate = Gate(tenants=tenants)
    async with await start_server(engine=engine) as target:

        async def lease() -> Lease:
            return cast(Lease, DirectLease(target.address))

        relay = Relay(lease, idle_timeout_s=60, resume_s=5.0, gate=gate)
        async with await start_server(register=relay.register, gate=gate) as gateway:
            found = await shares(gateway.address, engine)
        await relay.close()
    assert sorted((weight, teaches) for _, weight, teaches in found) == [(1.0, False), (3.0, True)]
    assert len({tenant for tenant, *_ in found}) == 2
    assert not {tenant for tenant, *_ in found} & {"", "another's", *TOKENS}


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "x", ""])
async def test_a_weight_that_is_none_is_refused(engine: EngineThread, weight: str) -> None:
    async with (
        await start_server(engine=engine) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        call = generate_pb2_grpc.GenerateServiceStub(channel).Generate(
            message(LONG), metadata=((WEIGHT, weight),)
        )
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "weight" in (await call.details() or "")
