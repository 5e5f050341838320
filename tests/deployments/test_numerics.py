"""Sessions that move between replicas: on with the same numerics, refused or told with others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from benchmarks.netem import Netem
from paceline.bench.backends import with_kernels, without_kernels
from paceline.config import SpeculationConfig
from paceline.deployments.gateway import Relay
from paceline.deployments.lease import Lease
from paceline.deployments.target_calls import MAX_LOOKS
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, EngineThread, RoundEvent
from paceline.errors import InvalidArgument, NumericsMismatch
from paceline.loading import load_runner
from paceline.models.base import ModelRunner
from paceline.numerics import Fingerprint
from paceline.rpc.access import Gate
from paceline.rpc.client import AsyncClient, Client
from paceline.rpc.device import DeviceClient
from paceline.rpc.errors import ServerUnavailable
from paceline.rpc.gen.paceline.v1 import generate_pb2
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.ladder import Mode
from paceline.rpc.messages import sampling_to_message, speculation_to_message
from paceline.rpc.reconnect import Patience
from paceline.rpc.server import RpcServer
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.types import EMPTY_DRAFT
from tests.deployments.http_serving import DirectLease
from tests.modelzoo import make_model
from tests.rpc.serving import eventually, serving
from tests.rpc.test_device import PROMPT, ar

PARAMS = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
AR = SpeculationConfig(method="ar")
QUICK = Patience(silence=0.2, probe=0.3, first_backoff=0.02, give_up=3.0)
LOST_AFTER = 5
"""Tokens that the client has when its server is lost."""
MODES = (Mode.DEVICE, Mode.SERVER, Mode.AR)


@dataclass(frozen=True)
class Replicas:
    """Servers over the same weights: two with portable numerics, one with others.

    Attributes:
        truth: what AR generates on a portable one.
        goes_on: while clear, the first server stops a little after ``LOST_AFTER`` tokens: however
            busy the machine is, it has not sent all of them before it is lost. Where a device
            drafts, the server waits for it anyway.
    """

    first: RpcServer
    second: RpcServer
    other: RpcServer
    portable: Fingerprint
    another: Fingerprint
    truth: list[int]
    goes_on: threading.Event

    @contextmanager
    def losing_the_first(self) -> Iterator[None]:
        self.goes_on.clear()
        try:
            yield
        finally:
            self.goes_on.set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bfloat16 numbers, which matrix tiles take."""
    return make_model("llama", tmp_path_factory.mktemp("models"), dtype="bfloat16")


@contextmanager
def engine_over(
    runner: ModelRunner, goes_on: threading.Event | None = None
) -> Iterator[EngineThread]:
    engine = Engine(ModelTarget(runner))
    if goes_on is not None:
        hold_back(engine, goes_on)
    thread = EngineThread(engine).start()
    try:
        yield thread
        assert eventually(lambda: not thread.engine.sessions), "sessions leaked"
    finally:
        thread.stop()
    assert runner.num_free == runner.kv_capacity, "KV memory leaked"


def hold_back(engine: Engine, goes_on: threading.Event) -> None:
    step = engine.step

    def held(wait_s: float = 0.05) -> list[RoundEvent]:
        if any(len(each.output_ids) > LOST_AFTER for each in engine.sessions.values()):
            goes_on.wait(30)
        return step(wait_s)

    engine.step = held  # type: ignore[method-assign]


def runners_of(kind: str, folder: Path) -> tuple[list[ModelRunner], ModelRunner]:
    """Two portable runners, the second with the lowest kernels, and one with other numerics."""
    for dtype in ("float32", "bfloat16"):
        try:
            portable = [load_runner(folder, kv_tokens=2048, dtype=dtype, numerics="portable")]
            with with_kernels("portable"):
                portable.append(
                    load_runner(folder, kv_tokens=2048, dtype=dtype, numerics="portable")
                )
        except InvalidArgument:  # this processor sums bfloat16 numbers in its own way only
            continue
        if kind == "torch":
            with without_kernels():
                return portable, load_runner(folder, kv_tokens=2048, dtype=dtype)
        other = load_runner(folder, kv_tokens=2048, dtype=dtype)
        if other.fingerprint.numerics_class != "portable":
            return portable, other
    pytest.skip("this processor has no faster class of numerics than the portable one")


@pytest.fixture(scope="module", params=["torch", "fastest"])
def replicas(request: pytest.FixtureRequest, folder: Path) -> Iterator[Replicas]:
    portable, other = runners_of(request.param, folder)
    with ExitStack() as stack:
        goes_on = threading.Event()
        goes_on.set()
        engines = [
            stack.enter_context(engine_over(runner, held))
            for runner, held in zip((*portable, other), (goes_on, None, None), strict=True)
        ]
        info = ModelInfo(default_speculation=SpeculationConfig(method="prompt_lookup"))
        servers = [
            stack.enter_context(serving(grace=0.0, engine=each, model=info)) for each in engines
        ]
        yield Replicas(
            *servers, portable[0].fingerprint, other.fingerprint, ar(portable[0], PARAMS), goes_on
        )


def device(
    folder: Path, servers: Sequence[str], mode: Mode, numerics_mismatch: str = "refuse"
) -> DeviceClient:
    drafter = DraftModel(load_runner(folder, kv_tokens=2048, batch_invariant=False))
    return DeviceClient(
        servers, {"draft_model": drafter},
        speculation=SpeculationConfig(method="draft_model", num_speculative_tokens=3),
        modes=(mode,),
        patience=QUICK,
        numerics_mismatch=numerics_mismatch,
    )  # fmt: skip


def generate_and_lose(
    replicas: Replicas, client: DeviceClient, netem: Netem, mode: Mode
) -> list[int]:
    """All tokens of a generation whose server is lost after the first few."""
    lost = False
    with nullcontext() if mode is Mode.DEVICE else replicas.losing_the_first():
        for _ in client.generate(PROMPT, PARAMS):
            if len(client.result.token_ids) >= LOST_AFTER and not lost:
                netem.refuse()
                replicas.goes_on.set()
                lost = True
    assert lost
    return client.result.token_ids


def test_the_replicas_are_what_the_tests_want(replicas: Replicas) -> None:
    portable, other = replicas.portable, replicas.another
    assert portable.numerics_class == "portable"
    assert other.numerics_class != "portable"
    assert (portable.dtype, portable.weights) == (other.dtype, other.weights)


# --- a device -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_device_goes_on_exactly_where_numerics_are_the_same(
    replicas: Replicas, folder: Path, mode: Mode
) -> None:
    """The server with others comes first in the list, and is passed over."""
    with (
        Netem(replicas.first.address) as netem,
        device(
            folder, [netem.address, replicas.other.address, replicas.second.address], mode
        ) as client,
    ):
        assert generate_and_lose(replicas, client, netem, mode) == replicas.truth
        assert client.result.fingerprint == str(replicas.portable)
        assert not client.result.numerics_changed


@pytest.mark.one_of(1, slow=2)
@pytest.mark.parametrize("mode", MODES)
def test_a_device_does_not_go_on_with_other_numerics(
    replicas: Replicas, folder: Path, mode: Mode
) -> None:
    with (
        Netem(replicas.first.address) as netem,
        device(folder, [netem.address, replicas.other.address], mode) as client,
    ):
        with pytest.raises(NumericsMismatch, match=r"numerics class \(portable, here") as caught:
            generate_and_lose(replicas, client, netem, mode)
        assert caught.value.expected == str(replicas.portable)
        assert caught.value.actual == str(replicas.another)
        given = client.result.token_ids
        assert LOST_AFTER <= len(given) < len(replicas.truth)
        assert given == replicas.truth[: len(given)]


@pytest.mark.parametrize("mode", MODES)
def test_a_device_goes_on_with_other_numerics_where_it_may(
    replicas: Replicas, folder: Path, mode: Mode
) -> None:
    with (
        Netem(replicas.first.address) as netem,
        device(folder, [netem.address, replicas.other.address], mode, "allow") as client,
    ):
        tokens = generate_and_lose(replicas, client, netem, mode)
        assert len(tokens) == PARAMS.max_tokens
        assert tokens[:5] == replicas.truth[:5]
        assert client.result.numerics_changed
        assert client.result.fingerprint == str(replicas.another)


def test_a_device_that_may_still_prefers_the_same_numerics(
    replicas: Replicas, folder: Path
) -> None:
    with Netem(replicas.first.address) as netem:
        servers = [netem.address, replicas.other.address, replicas.second.address]
        with device(folder, servers, Mode.DEVICE, "allow") as client:
            assert generate_and_lose(replicas, client, netem, Mode.DEVICE) == replicas.truth
            assert not client.result.numerics_changed


def test_a_device_that_has_no_token_yet_takes_any(replicas: Replicas, folder: Path) -> None:
    with Netem(replicas.first.address) as netem:
        netem.refuse()
        with DeviceClient(
            [netem.address, replicas.other.address], modes=(Mode.DEVICE,), patience=QUICK,
            speculation=SpeculationConfig(method="prompt_lookup"),
        ) as client:  # fmt: skip
            assert len(client.complete(PROMPT, PARAMS).token_ids) == PARAMS.max_tokens
            assert client.result.fingerprint == str(replicas.another)
            assert not client.result.numerics_changed


# --- verify sessions, call by call ----------------------------------------------------------------


def test_unary_sessions_are_fenced(replicas: Replicas) -> None:
    with Client(replicas.first.address, timeout=20) as client:
        session = client.open_session(PROMPT, PARAMS)
        for _ in range(4):
            session.verify()
        tokens, fingerprint = session.token_ids, session.transcript.fingerprint
        assert fingerprint == str(replicas.portable) == client.get_model().fingerprint
        session.close()
    with Client(replicas.second.address, timeout=20) as client:
        with client.open_session(tokens, PARAMS, fingerprint=fingerprint) as session:
            assert not session.transcript.numerics_changed
            for _ in range(4):
                session.verify()
            assert session.token_ids == PROMPT + replicas.truth[:8]
        with pytest.raises(InvalidArgument, match="fingerprint"):
            client.open_session(tokens, PARAMS, fingerprint="portable")
    with Client(replicas.other.address, timeout=20) as client:
        with pytest.raises(NumericsMismatch, match="numerics_mismatch 'allow'"):
            client.open_session(tokens, PARAMS, fingerprint=fingerprint)
        with client.open_session(
            tokens, PARAMS, fingerprint=fingerprint, numerics_mismatch="allow"
        ) as session:
            assert session.transcript.numerics_changed
            assert session.transcript.fingerprint == str(replicas.another)
            session.verify()
        with client.open_session(tokens, PARAMS) as session:  # nothing is said: nothing is fenced
            assert not session.transcript.numerics_changed


def test_streams_are_fenced_and_resumed_at_home(replicas: Replicas) -> None:
    async def run() -> None:
        async with AsyncClient(replicas.first.address, timeout=20) as client:
            session = await client.open_session(PROMPT, PARAMS)
            await session.verify()
            tokens, fingerprint = list(session.token_ids), session.transcript.fingerprint
            async with await client.resume_session(session.transcript) as again:  # the same replica
                await again.verify(EMPTY_DRAFT)
                assert again.transcript.fingerprint == fingerprint
                assert not again.transcript.numerics_changed
                assert again.token_ids == PROMPT + replicas.truth[:2]
        async with AsyncClient(replicas.other.address, timeout=20) as client:
            with pytest.raises(NumericsMismatch):
                await client.open_session(tokens, PARAMS, fingerprint=fingerprint)
            async with await client.open_session(
                tokens, PARAMS, fingerprint=fingerprint, numerics_mismatch="allow"
            ) as session:
                assert session.transcript.numerics_changed

    asyncio.run(run())


def test_a_replica_can_be_configured_to_allow(replicas: Replicas, folder: Path) -> None:
    """For requests that say nothing; one that refuses is refused."""
    runner = load_runner(folder, kv_tokens=2048, numerics="portable")
    with (
        engine_over(runner) as engine,
        serving(engine=engine, numerics_mismatch="allow") as server,
        Client(server.address, timeout=20) as client,
    ):
        given = str(replicas.another)
        with client.open_session(PROMPT, PARAMS, fingerprint=given) as session:
            assert session.transcript.numerics_changed
        with pytest.raises(NumericsMismatch):
            client.open_session(PROMPT, PARAMS, fingerprint=given, numerics_mismatch="refuse")
        with pytest.raises(InvalidArgument, match="numerics_mismatch"):
            client.open_session(PROMPT, PARAMS, numerics_mismatch="perhaps")


# --- generations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics_mismatch", [None, "allow"])
def test_a_client_whose_server_comes_back_with_other_numerics(
    replicas: Replicas, numerics_mismatch: str | None
) -> None:
    """As when a replica is replaced on another machine: the address stays."""
    with (
        Netem(replicas.first.address) as netem,
        Client(netem.address, resume_s=1.5) as client,
        replicas.losing_the_first(),
    ):
        rounds = []

        def run() -> None:
            for item in client.generate(PROMPT, PARAMS, AR, numerics_mismatch=numerics_mismatch):
                rounds.append(item)
                if len(rounds) == LOST_AFTER:
                    netem.redirect(replicas.other.address)
                    netem.reset()
                    replicas.goes_on.set()

        if numerics_mismatch is None:
            with pytest.raises(NumericsMismatch) as caught:
                run()
            assert caught.value.expected == str(replicas.portable)
            assert rounds[0].fingerprint == str(replicas.portable)
        else:
            run()
            assert sum(len(item.token_ids) for item in rounds) == PARAMS.max_tokens
            told = [item for item in rounds if item.fingerprint]
            assert [item.fingerprint for item in told] == [
                str(replicas.portable), str(replicas.another),
            ]  # fmt: skip
            assert [item.numerics_changed for item in told] == [False, True]
            assert rounds[-1].statistics is not None
            assert rounds[-1].statistics.num_tokens == PARAMS.max_tokens


# --- the gateway ----------------------------------------------------------------------------------


class Targets:
    """Leases as Serve hands them out: on the least busy target that is there."""

    def __init__(self, replicas: Replicas, *servers: RpcServer) -> None:
        named = {
            replicas.first.address: replicas.portable,
            replicas.second.address: replicas.portable,
            replicas.other.address: replicas.another,
        }
        self.there = {server.address: str(named[server.address]) for server in servers}
        self.count = dict.fromkeys(self.there, 0)

    async def __call__(self) -> Lease:
        if not self.there:
            raise ServerUnavailable("no target")
        address = min(self.there, key=lambda each: self.count[each])
        self.count[address] += 1
        return cast(Lease, _Counted(address, self.there[address], self.count))


class _Counted(DirectLease):
    def __init__(self, address: str, fingerprint: str, count: dict[str, int]) -> None:
        super().__init__(address, fingerprint)
        self._count = count

    def release(self) -> None:
        self._count[self.endpoint.address] -= 1


def relayed(
    replicas: Replicas, targets: Targets, numerics_mismatch: str = ""
) -> tuple[list[int], list[generate_pb2.GenerateReply]]:
    """The tokens and replies of a generation that begins on the first server, which is lost."""
    message = generate_pb2.GenerateRequest(
        sampling=sampling_to_message(PARAMS), speculation=speculation_to_message(AR),
        numerics_mismatch=numerics_mismatch,
    )  # fmt: skip
    message.token_ids.token_ids.extend(PROMPT)

    async def run() -> tuple[list[int], list[generate_pb2.GenerateReply]]:
        with Netem(replicas.first.address) as netem, replicas.losing_the_first():
            first = targets.there.pop(replicas.first.address)
            there = {netem.address: first, **targets.there}
            targets.there, targets.count = there, dict.fromkeys(there, 0)
            relay = Relay(targets, idle_timeout_s=60, resume_s=1.0, gate=Gate())
            replies = []
            try:
                async with aclosing(relay.generate(message.SerializeToString())) as stream:
                    async for _, reply in stream:
                        replies.append(reply)
                        if len(replies) == LOST_AFTER:
                            del targets.there[netem.address]
                            netem.refuse()
                            replicas.goes_on.set()
            finally:
                await relay.close()
                assert not any(targets.count.values()), "a lease leaked"
        return [token for reply in replies for token in reply.token_ids], replies

    return asyncio.run(run())


def test_the_gateway_looks_for_a_target_with_the_same_numerics(replicas: Replicas) -> None:
    """Whatever Serve offers first; the client does not notice."""
    for _ in range(3):
        targets = Targets(replicas, replicas.first, replicas.other, replicas.second)
        tokens, replies = relayed(replicas, targets)
        assert tokens == replicas.truth
        assert not any(reply.numerics_changed for reply in replies)


def test_the_gateway_refuses_other_numerics(replicas: Replicas) -> None:
    targets = Targets(replicas, replicas.first, replicas.other)
    with pytest.raises(NumericsMismatch) as caught:
        relayed(replicas, targets)
    assert caught.value.expected == str(replicas.portable)
    assert caught.value.actual == str(replicas.another)


def test_the_gateway_goes_on_with_other_numerics_where_it_may(replicas: Replicas) -> None:
    targets = Targets(replicas, replicas.first, replicas.other)
    tokens, replies = relayed(replicas, targets, "allow")
    assert len(tokens) == PARAMS.max_tokens
    told = [(reply.fingerprint, reply.numerics_changed) for reply in replies if reply.fingerprint]
    assert told == [(str(replicas.portable), False), (str(replicas.another), True)]


def test_the_gateway_does_not_look_for_ever(replicas: Replicas) -> None:
    async def run() -> None:
        targets = Targets(replicas, replicas.other)
        relay = Relay(targets, idle_timeout_s=60, resume_s=1.0, gate=Gate())
        looks = 0
        offer = targets.__call__

        async def counted() -> Lease:
            nonlocal looks
            looks += 1
            return await offer()

        relay._calls.open_lease = counted
        lease = await relay._calls.lease_for(str(replicas.portable))
        assert (looks, lease.endpoint.address) == (MAX_LOOKS, replicas.other.address)
        assert sum(targets.count.values()) == 1
        lease.release()
        targets.there.clear()
        with pytest.raises(ServerUnavailable):
            await relay._calls.lease_for(str(replicas.portable))

    asyncio.run(run())
