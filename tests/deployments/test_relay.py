"""The gateway's relay over targets in this process: generations that lose theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from paceline.config import SpeculationConfig
from paceline.deployments import gateway
from paceline.deployments.gateway import MAX_UNREACHED, Relay
from paceline.deployments.lease import Lease
from paceline.deployments.target_calls import TargetGone
from paceline.deployments.verify_relay import VERIFY
from paceline.engine import Engine, EngineLimits, EngineThread
from paceline.errors import InvalidArgument, ResourceExhausted
from paceline.loading import load_runner
from paceline.request import Request
from paceline.rpc.access import Gate
from paceline.rpc.gen.paceline.v1 import generate_pb2, verify_pb2
from paceline.rpc.messages import sampling_to_message, speculation_to_message
from paceline.rpc.server import RpcServer, start_server
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.tokenizer import load_tokenizer
from tests.deployments.conftest import free_port
from tests.deployments.http_serving import DirectLease, DirectLeases
from tests.modelzoo import make_model
from tests.rpc.serving import eventually, serving
from tests.rpc.test_fuzz import TARGET_CALLS, complaints, fuzz, plain

PROMPT = list(b"def fibonacci(n):\n    ")
LONG = SamplingParams(max_tokens=300, temperature=1.0, seed=3, ignore_eos=True)
AR = SpeculationConfig(method="ar")


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[EngineThread]]:
    """Two targets with the same model, which take one session each and let one wait."""
    folder = make_model("llama", tmp_path)
    limits = EngineLimits(max_sessions=1, max_waiting=1)
    threads = [
        EngineThread(Engine(ModelTarget(load_runner(folder, kv_tokens=2048)), limits=limits))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    yield threads
    for thread in threads:
        assert eventually(lambda: not thread.engine.sessions)  # noqa: B023
        thread.stop()


@pytest.fixture
def servers(engines: list[EngineThread]) -> Iterator[list[RpcServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(grace=0.0, engine=engine)) for engine in engines]


def request(params: SamplingParams = LONG) -> bytes:
    message = generate_pb2.GenerateRequest(
        sampling=sampling_to_message(params), speculation=speculation_to_message(AR)
    )
    message.token_ids.token_ids.extend(PROMPT)
    return message.SerializeToString()


class Leases:
    """Hands out targets, one after the other; the last one again and again."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses
        self.count = 0

    async def __call__(self) -> Lease:
        address = self._addresses[min(self.count, len(self._addresses) - 1)]
        self.count += 1
        return cast(Lease, DirectLease(address))


def relayed(
    leases: Leases,
    *,
    data: bytes = b"",
    resume_s: float = 10.0,
    meanwhile: Callable[[int], Awaitable[Any]] | None = None,
) -> list[generate_pb2.GenerateReply]:
    """The replies of one generation.

    Args:
        meanwhile: awaited after each reply, with their number.
    """

    async def run() -> list[generate_pb2.GenerateReply]:
        relay = Relay(leases, idle_timeout_s=60, resume_s=resume_s, gate=Gate())
        replies: list[generate_pb2.GenerateReply] = []
        try:
            async with aclosing(relay.generate(data or request())) as stream:
                async for raw, reply in stream:
                    assert generate_pb2.GenerateReply.FromString(raw) == reply
                    replies.append(reply)
                    if meanwhile is not None:
                        await meanwhile(len(replies))
        finally:
            assert relay.num_calls == 0
            await relay.close()
        return replies

    return asyncio.run(run())


def test_it_goes_on_with_another_target(servers: list[RpcServer]) -> None:
    first, second = servers
    expected = relayed(Leases(second.address))
    loop = first._sweeper.get_loop()  # type: ignore[union-attr]

    async def stop(count: int) -> None:
        if count == 20:  # as a replica does that Serve stops
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(first.stop(0.0), loop))

    leases = Leases(first.address, second.address)
    replies = relayed(leases, meanwhile=stop)
    assert leases.count == 2
    tokens = [token for reply in replies for token in reply.token_ids]
    assert tokens == [token for reply in expected for token in reply.token_ids]
    assert [reply.round for reply in replies] == list(range(1, len(replies) + 1))
    last, whole = replies[-1].statistics, expected[-1].statistics
    assert (last.num_tokens, last.num_rounds) == (whole.num_tokens, whole.num_rounds)
    assert last.num_target_forwards == whole.num_target_forwards
    assert 0 < last.first_token_seconds < last.total_seconds
    assert replies[-1].prompt_length == len(PROMPT)


def test_targets_that_cannot_be_reached_are_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway, "_RETRY_S", 0.01)
    leases = Leases(f"127.0.0.1:{free_port()}")
    with pytest.raises(TargetGone, match="gone"):
        relayed(leases)
    assert leases.count == MAX_UNREACHED


def test_a_refusal_is_passed_on(servers: list[RpcServer]) -> None:
    leases = Leases(servers[0].address)
    wrong = generate_pb2.GenerateRequest.FromString(request())
    wrong.sampling.max_tokens = -1
    with pytest.raises(InvalidArgument, match="max_tokens"):
        relayed(leases, data=wrong.SerializeToString())
    assert leases.count == 1


def test_a_full_target_is_waited_for_after_a_loss(
    servers: list[RpcServer], engines: list[EngineThread]
) -> None:
    """A new session is refused instead, and its client may choose."""
    held = [
        engines[0].submit(Request(PROMPT, LONG, SpeculationConfig(method="client")))
        for _ in range(2)
    ]
    ids = [future.result(10).session_id for future in held]
    with pytest.raises(ResourceExhausted):
        relayed(Leases(servers[0].address))

    async def later() -> None:
        await asyncio.sleep(0.7)
        for session_id in ids:
            engines[0].cancel(session_id)

    async def run() -> None:
        leases = Leases(f"127.0.0.1:{free_port()}", servers[0].address)
        relay = Relay(leases, idle_timeout_s=60, resume_s=10, gate=Gate())
        task = asyncio.create_task(later())
        count = 0
        async with aclosing(relay.generate(request())) as stream:
            async for _, reply in stream:
                count += len(reply.token_ids)
        await task
        await relay.close()
        assert count == LONG.max_tokens
        assert leases.count > 2

    asyncio.run(run())


async def test_a_connection_that_another_call_closed_is_a_loss_and_no_cancellation() -> None:
    """gRPC answers nothing to a call whose handler ends as cancelled: its client would wait."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1024):
            pass
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listener:
        address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        relay = Relay(Leases(address), idle_timeout_s=60, resume_s=1.0, gate=Gate())
        lost = asyncio.create_task(relay.get_model(b"", 20.0))
        await asyncio.sleep(0.2)
        await relay._calls._channels.pop(address).close()  # as after another call's UNAVAILABLE
        with pytest.raises(TargetGone, match="gone"):
            await lost
        left = asyncio.create_task(relay.get_model(b"", 20.0))
        await asyncio.sleep(0.2)
        left.cancel()  # as gRPC does when the client leaves
        with pytest.raises(asyncio.CancelledError):
            await left
        assert relay.num_calls == 0
        await relay.close()


async def test_a_frame_that_cannot_be_read_is_the_clients_error(servers: list[RpcServer]) -> None:
    """The gateway ends the call to the target, which is not lost."""
    gate = Gate()
    relay = Relay(Leases(servers[0].address), idle_timeout_s=60, resume_s=1.0, gate=gate)
    opened = verify_pb2.OpenRequest(token_ids=PROMPT, sampling=sampling_to_message(LONG))
    async with (
        await start_server(register=relay.register, gate=gate) as gateway,
        grpc.aio.insecure_channel(gateway.address) as channel,
    ):
        call = cast(Any, channel).stream_stream(f"/{VERIFY}/Session")()
        await call.write(verify_pb2.VerifyFrame(open=opened).SerializeToString())
        assert verify_pb2.VerifyReply.FromString(await call.read()).HasField("open")
        await call.write(b"\xff\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "VerifyFrame" in await call.details()
    await relay.close()


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(21, 25))
async def test_many_hostile_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """Through the gateway: test_security.py sends some to one on Ray Serve."""
    monkeypatch.setattr("paceline.rpc.access.REFUSALS_PER_SECOND", 1e6)
    folder = make_model("llama", tmp_path)
    runner = load_runner(folder, kv_tokens=4096)
    engine = Engine(ModelTarget(runner), tokenizer=load_tokenizer(folder))
    thread, gate = EngineThread(engine).start(), Gate()
    leases = DirectLeases()
    async with await start_server(
        engine=thread, idle_timeout_s=1.0, lease_ended=leases.ended
    ) as target:
        leases.addresses = [target.address]
        relay = Relay(leases, idle_timeout_s=1.0, resume_s=1.0, gate=gate)
        async with await start_server(register=relay.register, gate=gate) as gateway:
            codes = await fuzz(plain(gateway.address), TARGET_CALLS, 5000, seed)

            def idle() -> bool:
                return not (relay.num_calls or relay.num_sessions or thread.engine.sessions)

            for _ in range(300):
                if idle():
                    break
                await asyncio.sleep(0.1)
            assert idle()
            assert gate.num_sessions == 0
        await relay.close()
    thread.stop()
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= set(codes)
    assert not complaints(caplog)
    assert runner.num_free == runner.kv_capacity
