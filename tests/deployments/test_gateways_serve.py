"""Two gateways of one application on Ray: sessions and quotas are shared, and one may die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import ray
import yaml
from ray import serve

from paceline.cluster import serving
from paceline.errors import ResourceExhausted
from paceline.rpc.client import AsyncClient, Client
from paceline.sampling import SamplingParams
from tests.deployments.conftest import PROMPTS, SMALL, config_file, eventually
from tests.rpc.round_robin import RoundRobin

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(300)]

NAME = "test-gateways"
ALICE = "alice-token-of-many-characters"
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=3)
S = TypeVar("S")
AR = Callable[[Sequence[str], SamplingParams], list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def app(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    quotas = {"max_sessions": 2, "tokens_per_minute": 100_000}
    tenants.write_text(yaml.safe_dump({"tenants": {"alice": {"token": ALICE, "quotas": quotas}}}))
    two = {"num_replicas": 2, "http_port": None, "tenants": str(tenants), "drain_s": 1}
    file = config_file("colocated", NAME, 0).with_args({"gateway": {**SMALL, **two}})
    try:
        serving.deploy(file, lambda line: None)
        yield NAME
    finally:
        serve.delete(NAME)


def _replicas(deployment: str) -> list[dict[str, Any]]:
    replicas: list[dict[str, Any]] = serving.describe(NAME)["deployments"][deployment]["replicas"]
    return replicas


def _is_idle() -> bool:
    (target,) = _replicas("target")
    gateways = _replicas("gateway")
    return not (
        target["sessions"] or target["leases"] or any(g["calls"] + g["sessions"] for g in gateways)
    )


def _decode(address: str, prompt_ids: list[int]) -> list[int]:
    """A session of unary calls, each at another gateway."""
    with Client(address, timeout=60, token=ALICE) as client:
        session = client.open_session(prompt_ids, PARAMS)
        while session.finish_reason is None:
            session.verify()
        assert session.close() is not None
        return session.token_ids[len(prompt_ids) :]


async def _when_free(opened: Callable[[], Awaitable[S]]) -> S:
    """A session, tried again as the error of a quota says.

    On a busy machine a gateway hears after a while that a session of its has ended at another one,
    and until then its place counts.
    """
    for _ in range(100):
        try:
            return await opened()
        except ResourceExhausted as error:
            await asyncio.sleep(error.retry_after_s or 0.1)
    raise AssertionError("a place that is free is refused for long")


async def test_any_gateway_serves_any_session(app: str, ar: AR, engine: Any) -> None:
    (expected,) = ar(PROMPTS[:1], PARAMS)
    prompt_ids = engine.tokenizer.encode(PROMPTS[0])
    addresses = [g["address"] for g in await asyncio.to_thread(_replicas, "gateway")]
    assert len(set(addresses)) == 2
    async with RoundRobin(addresses) as proxy:
        assert await asyncio.to_thread(_decode, proxy.address, prompt_ids) == list(expected)
        assert set(proxy.seen["Verify"]) == set(addresses)
        async with AsyncClient(proxy.address, timeout=60, token=ALICE) as client:
            session = await client.open_session(prompt_ids, PARAMS)
            await session.verify()
            for _ in range(2):
                session = await client.resume_session(session.transcript)
                await session.verify()
            await session.close()
            # Places go from gateway to gateway.
            for _ in range(3):
                held = [
                    await _when_free(lambda: client.open_session(prompt_ids, PARAMS))
                    for _ in range(2)
                ]
                with pytest.raises(ResourceExhausted, match="max_sessions"):
                    await client.open_session(prompt_ids, PARAMS)
                for each in held:
                    await each.close()
    assert await asyncio.to_thread(eventually, _is_idle), serving.describe(NAME)


async def test_a_gateway_that_is_killed_takes_no_session_with_it(
    app: str, ar: AR, engine: Any
) -> None:
    """Not even of those that it opened: the other one goes on, and so does its successor."""
    (expected,) = ar(PROMPTS[1:2], PARAMS)
    prompt_ids = engine.tokenizer.encode(PROMPTS[1])
    before = {g["address"]: g for g in await asyncio.to_thread(_replicas, "gateway")}
    opener, other = before
    clients = {a: Client(a, timeout=60, token=ALICE) for a in before}
    session = await asyncio.to_thread(clients[opener].open_session, prompt_ids, PARAMS)
    await asyncio.to_thread(session.verify)
    os.kill(before[opener]["pid"], signal.SIGKILL)
    session._client = clients[other]
    for _ in range(3):
        await asyncio.to_thread(session.verify)

    def successor() -> list[str]:
        return [g["address"] for g in _replicas("gateway") if g["pid"] not in old and g["address"]]

    old = {g["pid"] for g in before.values()}
    assert await asyncio.to_thread(eventually, successor, 90.0), serving.describe(NAME)
    (new,) = await asyncio.to_thread(successor)
    with Client(new, timeout=60, token=ALICE) as client:
        session._client = client
        while session.finish_reason is None:
            await asyncio.to_thread(session.verify)
        assert session.token_ids[len(prompt_ids) :] == list(expected)
        assert await asyncio.to_thread(session.close) is not None
    for each in clients.values():
        each.close()
    assert await asyncio.to_thread(eventually, _is_idle), serving.describe(NAME)


async def test_the_ledger_is_one_and_comes_back(app: str, engine: Any) -> None:
    """A session that began before is still served at both gateways."""
    prompt_ids = engine.tokenizer.encode(PROMPTS[0])
    addresses = [g["address"] for g in await asyncio.to_thread(_replicas, "gateway")]
    name = f"paceline-ledger-v2-{NAME}"
    ledger = ray.get_actor(name, namespace="serve")
    instance, key = ray.get(ledger.key.remote())
    assert len(key) == 32
    async with RoundRobin(addresses) as proxy:
        client = Client(proxy.address, timeout=60, token=ALICE)
        session = await asyncio.to_thread(client.open_session, prompt_ids, PARAMS)
        ray.kill(ledger, no_restart=False)

        def is_back() -> bool:
            try:
                again = ray.get_actor(name, namespace="serve")
                return bool(ray.get(again.key.remote(), timeout=5)[0] != instance)
            except (ValueError, ray.exceptions.RayError):
                return False

        for _ in range(4):
            await asyncio.to_thread(session.verify)
        assert await asyncio.to_thread(eventually, is_back, 60.0)
        for _ in range(4):
            await asyncio.to_thread(session.verify)
        for _ in range(2):
            other = await _when_free(
                lambda: asyncio.to_thread(client.open_session, prompt_ids, PARAMS)
            )
            for _ in range(3):
                await asyncio.to_thread(other.verify)
            await asyncio.to_thread(other.close)
        await asyncio.to_thread(session.close)
        client.close()
    assert await asyncio.to_thread(eventually, _is_idle), serving.describe(NAME)


@pytest.mark.nightly
def test_gateways_follow_their_sessions(ray_cluster: None) -> None:
    name = "test-more-gateways"
    scaling = {"max_replicas": 2, "target_sessions": 1.5, "upscale_delay_s": 0}
    gateway = {**SMALL, "http_port": None, "autoscaling": scaling}
    file = config_file("colocated", name, 0).with_args({"gateway": gateway})
    try:
        serving.deploy(file, lambda line: None)

        def addresses() -> set[str]:
            deployments = serving.describe(name)["deployments"]
            return {g["address"] for g in deployments["gateway"]["replicas"] if g["address"]}

        (first,) = addresses()
        with Client(first, timeout=60) as client:
            sessions = [client.open_session([1, 2, 3], PARAMS) for _ in range(3)]
            assert eventually(lambda: len(addresses()) == 2, 120.0), serving.describe(name)
            (second,) = addresses() - {first}
            with Client(second, timeout=60) as other:
                for session in sessions:
                    session._client = other
                    session.verify()
                    assert session.close() is not None
    finally:
        serve.delete(name)
