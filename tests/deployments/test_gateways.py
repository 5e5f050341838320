"""Two gateways behind a balancer that sends each call to the other one: one service to clients."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.config import SpeculationConfig
from paceline.deployments import ledger
from paceline.deployments.config import DeploymentConfig
from paceline.deployments.direct import DirectListener
from paceline.deployments.gateway import Relay
from paceline.deployments.ledger import Ledger, News, Reply, SharedQuotas
from paceline.deployments.session_ids import SessionIds
from paceline.engine import Engine, EngineThread
from paceline.errors import ResourceExhausted, SessionNotFound
from paceline.loading import load_runner
from paceline.models.base import ModelRunner
from paceline.rpc.access import Gate
from paceline.rpc.audit import Audit
from paceline.rpc.client import AsyncClient, Client
from paceline.rpc.errors import EpochFenced, PoisonRequest, from_rpc_error
from paceline.rpc.gen.paceline.v1 import generate_pb2, verify_pb2
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.quotas import SLICE, QuotaAsk
from paceline.rpc.server import RpcServer, start_server
from paceline.rpc.tenants import Tenants
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.tokenizer import load_tokenizer
from paceline.types import Draft
from tests.deployments.http_serving import DirectLeases
from tests.modelzoo import make_model
from tests.rpc.round_robin import RoundRobin
from tests.rpc.test_device import ar as device_ar

PROMPT = list(b"import os\nimport ")
KEYS = [b"k" * 32]
LOOKUP = SpeculationConfig(method="prompt_lookup")
ALICE, BOB = "alice-token-of-many-characters", "bob-token-of-many-characters"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("gateways"))


@pytest.fixture(scope="module")
def runners(folder: Path) -> list[ModelRunner]:
    return [load_runner(folder, kv_tokens=4096) for _ in range(2)]


@pytest.fixture
def engines(runners: list[ModelRunner], folder: Path) -> Iterator[list[EngineThread]]:
    """Two targets with the same model."""
    tokenizer = load_tokenizer(folder)
    threads = [EngineThread(Engine(ModelTarget(r), tokenizer=tokenizer)).start() for r in runners]
    yield threads
    for thread, runner in zip(threads, runners, strict=True):
        thread.stop()
        assert runner.num_free == runner.kv_capacity, "KV memory leaked"


def ar(runner: ModelRunner, params: SamplingParams) -> list[int]:
    """What plain AR decoding adds to the prompt; computed once."""
    return device_ar(runner, params, PROMPT)


class LocalLink:
    """A ledger in this process, which may be away or start anew."""

    def __init__(self) -> None:
        self.is_away = False
        self.num_calls = 0
        self.new()

    def new(self) -> None:
        self.ledger = Ledger()
        self._key = secrets.token_bytes(32)

    async def sync(self, gateway: str, asks: dict[str, QuotaAsk], news: News) -> Reply:
        await self._call()
        return self.ledger.sync(gateway, asks, news)

    async def leave(self, gateway: str) -> None:
        await self._call()
        self.ledger.leave(gateway)

    async def key(self) -> tuple[str, bytes]:
        await self._call()
        return self.ledger.instance, self._key

    async def _call(self) -> None:
        self.num_calls += 1
        await asyncio.sleep(0.002)
        if self.is_away:
            raise ConnectionError("away")


class Gateways:
    """Gateways over the same targets, each with what it would have in a process of its own.

    Args:
        config: with ``direct``, if targets have a listener for devices.

    Attributes:
        proxy: the balancer in front of them.
    """

    def __init__(
        self,
        engines: Sequence[EngineThread],
        *,
        link: LocalLink | None = None,
        tenants: Path | None = None,
        audit: Path | None = None,
        idle_timeout_s: float = 60.0,
        config: DeploymentConfig | None = None,
    ) -> None:
        self._config = config or DeploymentConfig()
        self.listeners: list[DirectListener] = []
        self._engines = engines
        self._link = link
        self._tenants, self._audit = tenants, audit
        self._idle_timeout_s = idle_timeout_s
        self.relays: list[Relay] = []
        self.gates: list[Gate] = []
        self.servers: list[RpcServer] = []
        self.quotas: list[SharedQuotas | None] = []
        self.targets: list[RpcServer] = []

    async def __aenter__(self) -> Gateways:
        self.leases = DirectLeases()
        for engine in self._engines:
            listener = DirectListener(self._config, audit=Audit())
            target = await start_server(
                engine=engine,
                model=ModelInfo(name="tiny"),
                idle_timeout_s=self._idle_timeout_s,
                lease_ended=lambda lease, direct=listener: self.leases.ended(
                    lease, direct.unused(lease)
                ),
                register=listener.register,
            )
            self.targets.append(target)
            if self._config.direct.enabled:
                assert target.verify is not None
                await listener.start(target.verify)
            self.listeners.append(listener)
        self.leases.addresses = [target.address for target in self.targets]
        for i in range(2):
            await self.start(i)
        self.proxy = RoundRobin([server.address for server in self.servers])
        await self.proxy.__aenter__()
        return self

    async def start(self, i: int, keys: Sequence[bytes] = KEYS) -> None:
        """Start gateway ``i``, where it was if it was there before."""
        quotas = None
        ids = SessionIds(keys)
        if self._link is not None:
            quotas = SharedQuotas(self._link, num_gateways=2)
            ids = SessionIds(await quotas.session_keys(), quotas.session_keys)
        gate = Gate(
            tenants=None if self._tenants is None else Tenants(self._tenants),
            shares=quotas,
            audit=None if self._audit is None else Audit(self._audit.with_suffix(f".{i}")),
        )
        if quotas is not None:
            quotas.start()
        direct = self._config.direct if self._config.direct.enabled else None
        relay = Relay(
            self.leases, idle_timeout_s=60, resume_s=5, gate=gate, session_ids=ids, direct=direct
        )
        port = self.servers[i].port if i < len(self.servers) else 0
        server = await start_server(register=relay.register, gate=gate, port=port)
        for parts, part in (
            (self.relays, relay), (self.gates, gate), (self.servers, server),
            (self.quotas, quotas),
        ):  # fmt: skip
            parts: Any  # type: ignore[no-redef]
            parts[i : i + 1] = [part]

    async def stop(self, i: int) -> None:
        """Stop a gateway, without a wait for its calls."""
        await self.servers[i].stop(0)
        await self.relays[i].close()
        quotas = self.quotas[i]
        if quotas is not None:
            await quotas.stop()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.proxy.__aexit__()
        for i in range(2):
            await self.stop(i)
        for listener, target in zip(self.listeners, self.targets, strict=True):
            await listener.stop(0)
            await target.stop(0)

    @property
    def is_idle(self) -> bool:
        """Whether nothing of any session is left, on targets and gateways."""
        return not (
            any(engine.engine.sessions for engine in self._engines)
            or any(relay.num_calls or relay.num_sessions for relay in self.relays)
            or any(gate.num_sessions for gate in self.gates)
        )

    async def idle(self) -> bool:
        return await eventually(lambda: self.is_idle)


async def eventually(condition: Callable[[], bool], limit_s: float = 5.0) -> bool:
    """Wait until ``condition()`` holds; False when it did not in time."""
    end = asyncio.get_running_loop().time() + limit_s
    while not condition():
        if asyncio.get_running_loop().time() > end:
            return False
        await asyncio.sleep(0.01)
    return True


@asynccontextmanager
async def clients(gateways: Gateways, *tokens: str | None) -> AsyncIterator[list[AsyncClient]]:
    """Clients of the balancer."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                AsyncClient(gateways.proxy.address, timeout=20, token=token)
            )
            for token in tokens
        ]


def write_tenants(path: Path, **quotas: dict[str, float]) -> Path:
    tenants = {
        name: {"token": token, "quotas": quotas.get(name, {})}
        for name, token in (("alice", ALICE), ("bob", BOB))
    }
    path.write_text(yaml.safe_dump({"tenants": tenants}))
    return path


# --- every call ----------------------------------------------------------------------------------


async def test_every_rpc_of_every_service(
    engines: list[EngineThread], runners: list[ModelRunner]
) -> None:
    """Each twice, so that each gateway gets one; sessions do not notice."""
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
    truth = ar(runners[0], params)
    async with Gateways(engines) as gateways, clients(gateways, None) as [client]:
        for _ in range(2):
            assert (await client.get_model()).name == "tiny"
            assert list((await client.complete(PROMPT, params, LOOKUP)).token_ids) == truth
            stub: Any = client._generate
            tokens = await stub.Tokenize(generate_pb2.TokenizeRequest(text="import"))
            text = await stub.Detokenize(generate_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
            assert text.text == "import"
            await client.get_model()  # an odd number of calls: the others are next
        for _ in range(2):  # a stream each
            session = await client.open_session(PROMPT, params)
            while session.finish_reason is None:
                await session.verify(Draft.chain(truth[len(session.token_ids) - len(PROMPT) :][:3]))
            assert session.token_ids[len(PROMPT) :] == truth
            await session.close()
        await asyncio.to_thread(unary_session, gateways.proxy.address, params, truth)
        async with grpc.aio.insecure_channel(gateways.proxy.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            for _ in range(2):
                answer = await health.Check(health_pb2.HealthCheckRequest())
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                call = reflection.ServerReflectionInfo(
                    iter([reflection_pb2.ServerReflectionRequest(list_services="")])
                )
                assert (await call.read()).list_services_response.service
                call.cancel()
        assert await gateways.idle()
        for module in (generate_pb2, verify_pb2):
            (service,) = module.DESCRIPTOR.services_by_name.values()
            for method in service.methods:
                assert set(gateways.proxy.seen[method.name]) == set(gateways.proxy.servers), (
                    method.name
                )


def unary_session(address: str, params: SamplingParams, truth: list[int]) -> None:
    """Sessions whose calls take turns between the gateways; each opens one or two."""
    with Client(address, timeout=20) as client:
        for turn in range(3):
            if turn == 1:
                client.get_model()  # the turn passes, however many calls a session has
            session = client.open_session(PROMPT, params)
            for i in range(4):
                done = len(session.token_ids) - len(PROMPT)
                session.verify(Draft.chain(truth[done : done + i]))
            for _ in range(2):
                session.truncate(len(PROMPT) + 2)
            while session.finish_reason is None:
                session.verify()
            assert session.token_ids[len(PROMPT) :] == truth
            statistics = session.close()
            assert statistics is not None
            assert session.close() is None


async def test_a_session_is_resumed_at_the_other_gateway(
    engines: list[EngineThread], runners: list[ModelRunner]
) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    truth = ar(runners[0], params)
    async with Gateways(engines) as gateways, clients(gateways, None) as [client]:
        first = await client.open_session(PROMPT, params)
        await first.verify()
        sessions = [first]
        for _ in range(3):
            session = await client.resume_session(sessions[-1].transcript)
            await session.verify()
            with pytest.raises((EpochFenced, SessionNotFound)):
                await sessions[-1].verify()
            sessions.append(session)
        assert sessions[-1].transcript.epoch == 4
        assert sum(relay.num_sessions for relay in gateways.relays) == 1
        while sessions[-1].finish_reason is None:
            await sessions[-1].verify()
        assert sessions[-1].token_ids[len(PROMPT) :] == truth
        await sessions[-1].close()
        assert await gateways.idle()
        assert not gateways.leases.open


async def test_a_session_outlives_the_gateway_that_opened_it(
    engines: list[EngineThread], runners: list[ModelRunner]
) -> None:
    """And its restart, which has the keys but knows nothing of sessions."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    truth = ar(runners[0], params)
    async with Gateways(engines) as gateways:
        address = gateways.proxy.address
        with Client(address, timeout=20) as client:
            session = await asyncio.to_thread(client.open_session, PROMPT, params)
            opener = next(i for i, relay in enumerate(gateways.relays) if relay.num_sessions)
            await gateways.stop(opener)
            await gateways.start(opener)
            for _ in range(2):
                await asyncio.to_thread(session.verify)
            for _ in range(2):
                await asyncio.to_thread(session.truncate, len(PROMPT) + 1)
            while session.finish_reason is None:
                await asyncio.to_thread(session.verify)
            assert session.token_ids[len(PROMPT) :] == truth
            assert await asyncio.to_thread(session.close) is not None
        assert await gateways.idle()


async def test_idle_sessions_are_counted_no_more(engines: list[EngineThread]) -> None:
    async with Gateways(engines, idle_timeout_s=0.2) as gateways:
        with Client(gateways.proxy.address, timeout=20) as client:
            session = await asyncio.to_thread(client.open_session, PROMPT)
            assert sum(gate.num_sessions for gate in gateways.gates) == 1
            for target in gateways.targets:
                assert target.verify is not None
            assert await eventually(lambda: _swept(gateways))
            with pytest.raises(SessionNotFound):
                await asyncio.to_thread(session.verify)


def _swept(gateways: Gateways) -> bool:
    for target in gateways.targets:
        cast(Any, target.verify).sweep()  # as its server does every few seconds
    return gateways.is_idle


# --- ids -----------------------------------------------------------------------------------------


async def test_what_is_not_the_callers_is_not_there(
    engines: list[EngineThread], tmp_path: Path
) -> None:
    """Forged ids, those of another deployment and of another tenant: the same answer to all."""
    tenants = write_tenants(tmp_path / "tenants.yaml")
    audit = tmp_path / "audit"
    async with (
        Gateways(engines, tenants=tenants, audit=audit) as gateways,
        clients(gateways, ALICE, BOB) as [alice, bob],
    ):
        session = await alice.open_session(PROMPT)
        real = session.transcript.session_id
        elsewhere = SessionIds([b"z" * 32]).make(gateways.targets[0].address, "bob")
        forged = real[:-1] + ("A" if real[-1] != "A" else "B")
        wrong = (real, forged, elsewhere, "no-such-session", "x" * 200, "é" * 80)
        answers = []
        for session_id in wrong:
            for call in _calls(bob, session_id):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                error = caught.value
                message = (error.details() or "").replace(session_id, "ID")
                answers.append((error.code(), message, type(from_rpc_error(error))))
        assert len(set(answers)) == 1
        assert answers[0][0] is grpc.StatusCode.NOT_FOUND
        closed = await cast(Any, bob._verify).Close(
            verify_pb2.CloseRequest(session_id=real), metadata=bob._metadata
        )
        assert not closed.HasField("statistics")  # closes nothing, and says nothing
        await session.verify()
        await session.close()
        assert await gateways.idle()
    lines = "".join(audit.with_suffix(f".{i}").read_text() for i in range(2))
    assert real[:60] in lines  # that someone else used it
    assert elsewhere[:60] not in lines


def _calls(client: AsyncClient, session_id: str) -> list[Any]:
    stub, metadata = cast(Any, client._verify), client._metadata
    return [
        stub.Open(verify_pb2.OpenRequest(resume_session_id=session_id), metadata=metadata),
        stub.Verify(verify_pb2.VerifyRequest(session_id=session_id, round=1), metadata=metadata),
        stub.Truncate(
            verify_pb2.TruncateRequest(session_id=session_id, length=20), metadata=metadata
        ),
        _first_reply(stub, session_id, metadata),
    ]


async def _first_reply(stub: Any, session_id: str, metadata: Any) -> None:
    opening = verify_pb2.OpenRequest(resume_session_id=session_id)
    call = stub.Session(metadata=metadata)
    await call.write(verify_pb2.VerifyFrame(open=opening))
    async for _ in call:
        return


async def synced(*gateways: SharedQuotas) -> None:
    """Return when each gateway has told the ledger its news, and heard those of the others."""
    for gateway in (*gateways, *gateways):
        await gateway.fetch()


async def test_a_request_that_kills_at_two_gateways_is_refused_at_all() -> None:
    link = LocalLink()
    first, second, third = gateways = [SharedQuotas(link, num_gateways=3) for _ in range(3)]
    for gateway in gateways:
        gateway.start()
    try:
        first.poison.died("a", "target 1")
        first.poison.died("b", "target 1")
        await synced(*gateways)
        assert all(gateway.poison.is_suspect("a") for gateway in gateways)
        third.poison.lives("b")  # it was the other one
        with pytest.raises(PoisonRequest, match="2 target processes"):
            second.poison.died("a", "target 2")
        await synced(*gateways)
        for gateway in gateways:
            with pytest.raises(PoisonRequest, match="2 target processes"):
                gateway.poison.check("a")
            assert not gateway.poison.is_suspect("b")
            gateway.poison.check("c")
    finally:
        for gateway in gateways:
            await gateway.stop()


async def test_a_ledger_that_starts_anew_learns_of_poison() -> None:
    link = LocalLink()
    first, second = gateways = [SharedQuotas(link, num_gateways=2) for _ in range(2)]
    for gateway in gateways:
        gateway.start()
    try:
        first.poison.died("a", "target 1")
        await synced(*gateways)
        link.is_away = True
        with pytest.raises(PoisonRequest):
            second.poison.died("a", "target 2")
        await synced(*gateways)  # not told
        first.poison.check("a")
        link.new()
        link.is_away = False
        await synced(*gateways)
        for gateway in gateways:
            with pytest.raises(PoisonRequest):
                gateway.poison.check("a")
        late = SharedQuotas(link, num_gateways=3)
        late.start()
        await synced(late)
        with pytest.raises(PoisonRequest):
            late.poison.check("a")
        await late.stop()
    finally:
        for gateway in gateways:
            await gateway.stop()


async def test_a_new_key_is_accepted_before_it_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    link = LocalLink()
    quotas = SharedQuotas(link)
    (first,) = await quotas.session_keys()
    link.is_away = True
    assert await quotas.session_keys() == (first,)
    link.is_away = False
    link.new()
    signs, second = await quotas.session_keys()
    assert signs == first != second
    monkeypatch.setattr(ledger, "SIGN_AFTER_S", 0.0)
    assert await quotas.session_keys() == (second, first)


async def test_a_ledger_that_starts_anew_keeps_sessions(
    engines: list[EngineThread],
    runners: list[ModelRunner],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its new key is asked for as soon as an id comes that the known ones have not signed."""
    monkeypatch.setattr(ledger, "SIGN_AFTER_S", 0.0)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    truth = ar(runners[0], params)
    link = LocalLink()
    tenants = write_tenants(tmp_path / "tenants.yaml")
    async with Gateways(engines, link=link, tenants=tenants) as gateways:
        with Client(gateways.proxy.address, timeout=20, token=ALICE) as client:
            old = await asyncio.to_thread(client.open_session, PROMPT, params)
            await asyncio.to_thread(old.verify)
            link.new()
            await gateways.relays[0]._verify._session_ids.refresh()
            gateways.relays[0]._verify._session_ids._refreshed_at = -1.0
            for _ in range(2):
                new = await asyncio.to_thread(client.open_session, PROMPT, params)
                for session in (new, old):
                    await asyncio.to_thread(session.verify)
                    await asyncio.to_thread(session.verify)
                while new.finish_reason is None:
                    await asyncio.to_thread(new.verify)
                assert new.token_ids[len(PROMPT) :] == truth
                await asyncio.to_thread(new.close)
                await asyncio.to_thread(client.get_model)  # the other gateway opens the next one
            await asyncio.to_thread(old.close)
        assert await gateways.idle()


# --- quotas --------------------------------------------------------------------------------------


async def test_sessions_of_a_tenant_count_at_both_gateways(
    engines: list[EngineThread], tmp_path: Path
) -> None:
    """A place that is free at one gateway is there for the other at once."""
    tenants = write_tenants(tmp_path / "tenants.yaml", alice={"max_sessions": 2})
    async with (
        Gateways(engines, link=LocalLink(), tenants=tenants) as gateways,
        clients(gateways, ALICE, BOB) as [alice, bob],
    ):
        for _ in range(2):
            sessions = [await alice.open_session(PROMPT) for _ in range(2)]
            for _ in range(2):
                with pytest.raises(ResourceExhausted, match="max_sessions"):
                    await alice.open_session(PROMPT)
            other = await bob.open_session(PROMPT)
            await sessions[0].close()
            sessions[0] = await alice.open_session(PROMPT)
            for session in (*sessions, other):
                await session.close()
        assert await gateways.idle()


@pytest.mark.parametrize("is_away", [False, True])
async def test_rounds_of_a_tenant_count_at_both_gateways(
    engines: list[EngineThread], tmp_path: Path, is_away: bool
) -> None:
    """Without the ledger each gateway lets its half through."""
    rate, rounds = 40.0, 45
    tenants = write_tenants(tmp_path / "tenants.yaml", alice={"rounds_per_second": rate})
    link = LocalLink()
    async with (
        Gateways(engines, link=link, tenants=tenants) as gateways,
        clients(gateways, ALICE) as [alice],
    ):
        link.is_away = is_away
        if is_away:
            assert await eventually(lambda: all(q.is_away for q in gateways.quotas if q))
        loop = asyncio.get_running_loop()
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        sessions = [await alice.open_session(PROMPT, params) for _ in range(2)]
        started, refused = loop.time(), [0, 0]

        async def decode(i: int) -> None:
            done = 0
            while done < rounds:
                try:
                    await sessions[i].verify()
                    done += 1
                except ResourceExhausted as error:
                    refused[i] += 1
                    await asyncio.sleep(error.retry_after_s)

        await asyncio.gather(decode(0), decode(1))
        burst = rate * (1 + 1 / SLICE) + 2  # what gateways may hold in addition
        assert loop.time() - started >= (2 * rounds - burst) / rate
        assert all(refused)
        link.is_away = False
        for session in sessions:
            await session.close()
        assert await gateways.idle()


async def test_a_round_costs_no_call_of_the_ledger(
    engines: list[EngineThread], tmp_path: Path
) -> None:
    tenants = write_tenants(
        tmp_path / "tenants.yaml",
        alice={"rounds_per_second": 10_000, "tokens_per_minute": 1_000_000, "max_sessions": 9},
    )
    link = LocalLink()
    async with (
        Gateways(engines, link=link, tenants=tenants) as gateways,
        clients(gateways, ALICE) as [alice],
    ):
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        session = await alice.open_session(PROMPT, params)
        await session.verify()
        link.num_calls = 0
        before = asyncio.get_running_loop().time()
        while session.finish_reason is None:
            await session.verify()
        seconds = asyncio.get_running_loop().time() - before
        assert link.num_calls <= 2 * (seconds + 1)  # heartbeats of two gateways
        await session.close()


@pytest.mark.parametrize("passes", range(6))
async def test_quotas_that_are_stopped_while_they_wake_up(passes: int) -> None:
    """A cancellation that comes together with what a task waited for is not lost."""
    quotas = SharedQuotas(LocalLink(), num_gateways=1)
    quotas.start()
    await quotas.fetch()
    async with asyncio.timeout(5):
        waiting = asyncio.ensure_future(quotas.fetch())
        for _ in range(passes):  # of the loop, until the task is about to go on
            await asyncio.sleep(0)
        await quotas.stop()
        await waiting
