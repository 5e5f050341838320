"""Answers that are not read: streams are read ahead, up to a bound; sessions are parked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc
import pytest

from paceline.config import SpeculationConfig
from paceline.engine import Engine, EngineLimits, EngineThread
from paceline.models.base import ModelRunner
from paceline.request import Request
from paceline.rpc.access import Gate, Limits
from paceline.rpc.gen.paceline.v1 import generate_pb2, generate_pb2_grpc
from paceline.rpc.messages import sampling_to_message, speculation_to_message
from paceline.rpc.server import start_server
from paceline.rpc.streams import Unread, read_ahead
from paceline.rpc.tenants import Tenants
from paceline.sampling import SamplingParams
from paceline.session import SessionState
from paceline.target import ModelTarget

PROMPT = list(b"def fibonacci(n):\n    ")
LONG = SamplingParams(max_tokens=300, temperature=1.0, seed=3, ignore_eos=True)
AR = SpeculationConfig(method="ar")
# Every byte of an answer waits until the client asks for it.
NEVER_READS = (("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0))


class Numbers:
    """A stream of 0, 1, ...; it knows how many were taken, and whether it was closed."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.num_taken = 0
        self.closed = False
        self._count, self._error = count, error

    async def items(self) -> AsyncGenerator[int]:
        try:
            for number in range(self._count):
                self.num_taken += 1
                yield number
                await asyncio.sleep(0)
            if self._error is not None:
                raise self._error
        finally:
            self.closed = True


async def slow(
    stream: AsyncGenerator[int], pause_s: float, found: list[int] | None = None
) -> list[int]:
    """What a reader gets that takes its time with the first one."""
    found = [] if found is None else found
    async for number in stream:
        found.append(number)
        if number == 0:
            await asyncio.sleep(pause_s)
    return found


async def test_a_fast_reader_gets_each_item_when_it_comes() -> None:
    numbers, found = Numbers(100), []
    async for number in read_ahead(numbers.items(), lambda _: 1, 10):
        found.append(number)
        assert numbers.num_taken == len(found)
    assert found == list(range(100)) and numbers.closed


async def test_the_rest_is_read_for_a_slow_reader() -> None:
    numbers = Numbers(100)
    stream = read_ahead(numbers.items(), lambda _: 1, 1000, patience_s=0.01)
    reader = asyncio.create_task(slow(stream, 0.5))
    for _ in range(40):
        if numbers.closed:
            break
        await asyncio.sleep(0.01)
    assert numbers.closed and not reader.done()
    assert await reader == list(range(100))


async def test_a_full_buffer_ends_the_stream_after_what_is_in_it() -> None:
    numbers, found = Numbers(100), []
    with pytest.raises(Unread):
        await slow(read_ahead(numbers.items(), lambda _: 1, 10, patience_s=0.01), 0.1, found)
    assert found == list(range(12)) and numbers.closed


async def test_a_stream_that_may_not_stop_is_read_on() -> None:
    numbers = Numbers(100)
    stream = read_ahead(
        numbers.items(), lambda _: 1, 10, patience_s=0.01, may_stop=lambda: numbers.num_taken > 90
    )
    with pytest.raises(Unread):
        await slow(stream, 0.2)
    assert numbers.num_taken == 91


@pytest.mark.parametrize("patience_s", [0.01, 10.0])
async def test_an_error_comes_after_the_items_before_it(patience_s: float) -> None:
    numbers, found = Numbers(5, ValueError("x")), []
    with pytest.raises(ValueError, match="x"):
        await slow(read_ahead(numbers.items(), lambda _: 1, 10, patience_s=patience_s), 0.05, found)
    assert found == list(range(5))


@pytest.mark.parametrize("pause_s", [0.0, 0.05])
async def test_a_reader_that_leaves_closes_the_stream(pause_s: float) -> None:
    async def endless() -> AsyncGenerator[int]:
        try:
            while True:
                yield 1
                await asyncio.sleep(0.01)
        finally:
            closed.set()

    closed = asyncio.Event()
    stream = read_ahead(endless(), lambda _: 1, 1000, patience_s=0.01)
    assert await anext(stream) == 1
    await asyncio.sleep(pause_s)
    await stream.aclose()
    assert closed.is_set()


# --- a server ---------------------------------------------------------------------------------


def message(params: SamplingParams) -> generate_pb2.GenerateRequest:
    result = generate_pb2.GenerateRequest(
        sampling=sampling_to_message(params), speculation=speculation_to_message(AR)
    )
    result.token_ids.token_ids.extend(PROMPT)
    return result


async def test_a_slow_readers_session_is_parked_and_goes_on_with_the_same_tokens(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.rpc.generate_service.MAX_EVENTS", 20)
    (expected,) = Engine(ModelTarget(runner)).generate([PROMPT], LONG, AR)
    thread = EngineThread(Engine(ModelTarget(runner), limits=EngineLimits(max_sessions=1))).start()
    async with (
        await start_server(engine=thread) as server,
        grpc.aio.insecure_channel(server.address, options=NEVER_READS) as channel,
    ):
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        call = stub.Generate(message(LONG))
        for _ in range(500):
            if thread.engine.sessions:
                break
            await asyncio.sleep(0.01)
        other = thread.submit(Request(PROMPT, LONG, AR))
        # The only place is given on, and the other session has it to its end.
        session = await asyncio.wrap_future(other)
        for _ in range(300):
            if session.finished:
                break
            await asyncio.sleep(0.05)
        assert session.output_ids == expected.output_ids
        (parked,) = thread.engine.sessions.values()
        assert parked.state is SessionState.WAITING
        assert 20 <= parked.stats.num_tokens < LONG.max_tokens
        found = [token async for reply in call for token in reply.token_ids]
        assert found == expected.output_ids
        # A session that is parked when its client leaves is freed like any other one.
        left = stub.Generate(message(LONG))
        for _ in range(100):
            if any(s.state is SessionState.WAITING for s in thread.engine.sessions.values()):
                break
            await asyncio.sleep(0.05)
        left.cancel()
        for _ in range(100):
            if not thread.engine.sessions:
                break
            await asyncio.sleep(0.05)
        assert not thread.engine.sessions
    thread.stop()
    assert runner.num_free == runner.kv_capacity


async def test_unread_answers_count_against_their_tenant_and_not_the_server(
    runner: ModelRunner, tmp_path: Path
) -> None:
    path = tmp_path / "tenants.yaml"
    tokens = {name: f"token-of-{name}-0123456789" for name in ("many", "one")}
    path.write_text(
        "tenants:\n"
        f"  many: {{token: {tokens['many']}, quotas: {{max_sessions: 12}}}}\n"
        f"  one: {{token: {tokens['one']}}}\n"
    )
    thread = EngineThread(Engine(ModelTarget(runner))).start()
    gate = Gate(tenants=Tenants(path), limits=Limits(max_sessions=4))
    short = message(SamplingParams(max_tokens=1))
    async with (
        await start_server(engine=thread, gate=gate) as server,
        grpc.aio.insecure_channel(server.address, options=NEVER_READS) as channel,
    ):
        stub = generate_pb2_grpc.GenerateServiceStub(channel)

        def generate(tenant: str) -> grpc.aio.UnaryStreamCall:
            return stub.Generate(short, metadata=(("authorization", f"Bearer {tokens[tenant]}"),))

        calls = []
        for _ in range(12):
            calls.append(generate("many"))
            for _ in range(100):
                if gate.usage().get("many", (0,))[0] == len(calls) and not gate.num_sessions:
                    break
                await asyncio.sleep(0.02)
        assert gate.usage()["many"][0] == 12
        with pytest.raises(grpc.aio.AioRpcError, match="max_sessions"):
            await generate("many").read()
        (reply,) = [reply async for reply in generate("one")]
        assert len(reply.token_ids) == 1
        for call in calls:
            assert [reply.token_ids async for reply in call] == [reply.token_ids]
        for _ in range(100):
            if not gate.usage()["many"][0]:
                break
            await asyncio.sleep(0.02)
        assert gate.usage()["many"][0] == gate.num_sessions == 0
    thread.stop()
