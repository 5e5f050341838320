"""Every RPC gets hostile messages, through raw channels; the server must not mind."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import code_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.engine import EngineThread
from paceline.models.base import ModelRunner
from paceline.rpc.client import CHANNEL_OPTIONS, AsyncClient
from paceline.rpc.draft_service import DraftServicer
from paceline.rpc.gen.paceline.v1 import draft_pb2, generate_pb2, verify_pb2
from paceline.rpc.server import RpcServer, start_server
from paceline.sampling import SamplingParams
from tests.rpc.fuzz import Fuzzer
from tests.rpc.serving import eventually

PROMPT = list(b"import os\nimport ")
NUM_LANES = 8  # calls under way at the same time
CALL_TIMEOUT_S = 20.0
MAX_REPLIES = 6  # after these, a client that has its answer cancels

# How a server of gRPC may refuse; INTERNAL and UNKNOWN are failures of the server, and a call that
# comes to its deadline hangs.
REFUSALS = {
    "OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED",
    "UNIMPLEMENTED", "CANCELLED",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals come at once: test_attacker.py has the queue."""
    monkeypatch.setattr("paceline.rpc.access.REFUSALS_PER_SECOND", 1e6)


def good_generate() -> Message:
    request = generate_pb2.GenerateRequest(text="import ")
    request.sampling.max_tokens = 4
    return request


def good_open() -> verify_pb2.OpenRequest:
    request = verify_pb2.OpenRequest(token_ids=PROMPT)
    request.sampling.max_tokens = 60
    return request


def good_verify(round_number: int = 1) -> verify_pb2.VerifyRequest:
    return verify_pb2.VerifyRequest(
        round=round_number, base_length=len(PROMPT) + round_number - 1, token_ids=[112, 97, 110]
    )


def good_item(number: int) -> draft_pb2.ProposeItem:
    item = draft_pb2.ProposeItem(session_id=f"s{number % 3}", max_depth=3, max_nodes=3)
    if number < 3:
        item.open.speculation.method = "draft_model"
        item.new_token_ids.extend(PROMPT)
    else:
        item.base_length = len(PROMPT)
        item.new_token_ids.append(number)
    return item


def good_frames() -> list[Message]:
    frames: list[Message] = [verify_pb2.VerifyFrame(open=good_open())]
    frames += [verify_pb2.VerifyFrame(verify=good_verify(n)) for n in (1, 2)]
    frames.append(verify_pb2.VerifyFrame(truncate=verify_pb2.TruncateRequest(length=len(PROMPT))))
    frames.append(verify_pb2.VerifyFrame(close=verify_pb2.CloseRequest()))
    return frames


def good_proposals() -> list[Message]:
    return [
        draft_pb2.ProposeFrame(round=n, items=[good_item(2 * n), good_item(2 * n + 1)])
        for n in range(4)
    ]


TARGET_CALLS: dict[str, Callable[[], Message | list[Message]]] = {
    "/paceline.v1.GenerateService/Generate": good_generate,
    "/paceline.v1.GenerateService/GetModel": generate_pb2.GetModelRequest,
    "/paceline.v1.GenerateService/Tokenize": lambda: generate_pb2.TokenizeRequest(text="import "),
    "/paceline.v1.GenerateService/Detokenize": lambda: generate_pb2.DetokenizeRequest(
        token_ids=[105, 109]
    ),
    "/paceline.v1.VerifyService/Session": good_frames,
    "/paceline.v1.VerifyService/Open": good_open,
    "/paceline.v1.VerifyService/Verify": good_verify,
    "/paceline.v1.VerifyService/Truncate": verify_pb2.TruncateRequest,
    "/paceline.v1.VerifyService/Close": verify_pb2.CloseRequest,
    "/grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest,
    "/grpc.health.v1.Health/Watch": health_pb2.HealthCheckRequest,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": lambda: [
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="paceline.v1.Draft")
    ],
}
DRAFTER_CALLS: dict[str, Callable[[], Message | list[Message]]] = {
    "/paceline.v1.DraftService/Propose": good_proposals,
    "/paceline.v1.DraftService/Open": lambda: draft_pb2.OpenDraftRequest(token_ids=PROMPT),
    "/paceline.v1.DraftService/ProposeOne": lambda: good_item(3),
    "/paceline.v1.DraftService/Observe": lambda: good_item(3),
    "/paceline.v1.DraftService/Close": draft_pb2.CloseDraftRequest,
}
_STREAMED = {"Generate", "Watch"}


def test_every_rpc_is_tried() -> None:
    files = draft_pb2, generate_pb2, verify_pb2
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert methods <= {*TARGET_CALLS, *DRAFTER_CALLS}


class Lane:
    """Sends one hostile call after the other and looks at what comes back."""

    def __init__(
        self, channel: grpc.aio.Channel, fuzzer: Fuzzer, metadata: Sequence[tuple[str, str]]
    ) -> None:
        self._channel = channel
        self._metadata = metadata
        self._fuzzer = fuzzer
        self.num_messages = 0
        self.codes: Counter[str] = Counter()
        self._details: str | None = None

    async def call(self, path: str, good: Message | list[Message]) -> None:
        frames = good if isinstance(good, list) else [good]
        sent = [self._fuzzer.spoil(frame) for frame in frames]
        if isinstance(good, list) and isinstance(good[0], verify_pb2.VerifyFrame):
            # Most streams get past their first frame.
            if self._fuzzer.random.random() < 0.8:
                sent[0] = verify_pb2.VerifyFrame(open=good_open()).SerializeToString()
            rest = sent[1:]
            self._fuzzer.random.shuffle(rest)
            sent[1:] = rest
        self.num_messages += len(sent)
        started = time.monotonic()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                code = await self._exchange(path, sent, isinstance(good, list))
        except TimeoutError:
            code, self._details = "a hang", None
        self.codes[code] += 1
        assert code in REFUSALS, (
            f"{path}: {code} ({self._details}) after {time.monotonic() - started:.1f} s for "
            f"{[data[:400].hex() for data in sent]}"
        )

    async def _exchange(self, path: str, sent: list[bytes], streams: bool) -> str:
        method = path.rpartition("/")[2]
        channel: Any = self._channel
        try:
            if streams:
                return await self._stream(
                    path, channel.stream_stream(path)(metadata=self._metadata), sent
                )
            if method in _STREAMED:
                call = channel.unary_stream(path)(sent[0], metadata=self._metadata)
            else:
                reply = await channel.unary_unary(path)(sent[0], metadata=self._metadata)
                self._learn(path, reply)
                return "OK"
            count = 0
            async for reply in call:
                self._check_reply(path, reply)
                count += 1
                if count >= MAX_REPLIES or method == "Watch":
                    call.cancel()
                    return "CANCELLED"
            return str((await call.code()).name)
        except grpc.aio.AioRpcError as error:
            self._details = error.details()
            return str(error.code().name)

    async def _stream(self, path: str, call: Any, sent: list[bytes]) -> str:
        """One frame, one answer: a client of gRPC that writes to an ended call says INTERNAL."""
        for data in sent:
            await call.write(data)
            reply = await call.read()
            if reply is grpc.aio.EOF:
                break
            self._check_reply(path, reply)
            if path.endswith("/Propose") and draft_pb2.ProposeFrame.FromString(data).wants_ahead:
                self._check_reply(path, await call.read())
            if path.endswith("/Session") and verify_pb2.VerifyReply.FromString(reply).HasField(
                "close"
            ):
                assert await call.read() is grpc.aio.EOF
                break
        else:
            if self._fuzzer.random.random() < 0.2:
                call.cancel()
                return "CANCELLED"
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
        self._details = await call.details()
        return str((await call.code()).name)

    def _learn(self, path: str, reply: bytes) -> None:
        """Remember sessions, for other calls to name."""
        known = self._fuzzer.session_ids
        if path.endswith("VerifyService/Open"):
            opened = verify_pb2.OpenResult.FromString(reply)
            known.append((opened.session_id, opened.epoch))
        elif path.endswith("DraftService/Open"):
            known.append((draft_pb2.OpenDraftResult.FromString(reply).session_id, 0))
        del known[:-6]

    def _check_reply(self, path: str, reply: bytes) -> None:
        """Errors inside a stream are no failures of the server either."""
        statuses = []
        if path.endswith("/Session"):
            frame = verify_pb2.VerifyReply.FromString(reply)
            statuses = [frame.error] if frame.HasField("error") else []
        elif path.endswith("/Propose"):
            results = draft_pb2.ProposeReply.FromString(reply).results
            statuses = [result.error for result in results if result.HasField("error")]
        for status in statuses:
            name = code_pb2.Code.Name(status.code)
            self.codes[f"in stream: {name}"] += 1
            assert name in REFUSALS, f"{path}: {status}"


async def fuzz(
    connect: Callable[[], grpc.aio.Channel],
    calls: dict[str, Callable[[], Any]],
    num_messages: int,
    seed: int,
    metadata: Sequence[tuple[str, str]] = (),
) -> Counter[str]:
    """Send that many messages; the codes that came back."""
    paths = sorted(calls)

    async def lane(number: int) -> Lane:
        fuzzer = Fuzzer(1000 * seed + number)
        async with connect() as channel:
            one = Lane(channel, fuzzer, metadata)
            while one.num_messages < num_messages / NUM_LANES:
                path = fuzzer.random.choice(paths)
                await one.call(path, calls[path]())
            return one

    async with asyncio.TaskGroup() as group:
        lanes = [group.create_task(lane(number)) for number in range(NUM_LANES)]
    return sum((task.result().codes for task in lanes), Counter())


def plain(address: str) -> Callable[[], grpc.aio.Channel]:
    return lambda: grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a log should not have: errors, and tracebacks on any level."""
    return [
        f"{record.name}: {record.getMessage()}: {record.exc_info}"
        for record in caplog.records
        if record.levelno >= logging.ERROR or record.exc_info
    ]


async def target_survives(
    engine: EngineThread, num_messages: int, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        await start_server(engine=engine, idle_timeout_s=1.0) as running,
        AsyncClient(running.address, timeout=60) as honest,
    ):
        params = SamplingParams(max_tokens=12, ignore_eos=True)

        async def tokens() -> tuple[int, ...]:
            method = SpeculationConfig(method="draft_model", num_speculative_tokens=3)
            return (await honest.complete(PROMPT, params, method)).token_ids

        before = await tokens()
        codes = await fuzz(plain(running.address), TARGET_CALLS, num_messages, seed)
        assert await tokens() == before
        assert await asyncio.to_thread(eventually, lambda: not engine.engine.sessions)
        report(running, codes)
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= set(codes)
    assert not complaints(caplog)


async def drafter_survives(
    runner: ModelRunner, num_messages: int, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    servicer = DraftServicer(
        DraftModel(runner), name="draft_model", vocab_size=258, context_length=256,
        max_sessions=12, idle_timeout_s=1.0,
    )  # fmt: skip
    async with await start_server(drafter=servicer, idle_timeout_s=1.0) as running:
        codes = await fuzz(plain(running.address), DRAFTER_CALLS, num_messages, seed)
        assert await asyncio.to_thread(eventually, lambda: servicer.num_sessions == 0)
        report(running, codes)
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= set(codes)
    assert runner.num_free == runner.kv_capacity
    assert not complaints(caplog)


def report(running: RpcServer, codes: Counter[str]) -> None:
    print(running.address, dict(codes.most_common()))


async def test_a_target_survives_hostile_messages(
    engine: EngineThread, caplog: pytest.LogCaptureFixture
) -> None:
    await target_survives(engine, 1400, 1, caplog)


async def test_a_drafter_survives_hostile_messages(
    draft_runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    await drafter_survives(draft_runner, 600, 2, caplog)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(11, 16))
async def test_many_hostile_messages(
    engine: EngineThread,
    draft_runner: ModelRunner,
    caplog: pytest.LogCaptureFixture,
    seed: int,
) -> None:
    await target_survives(engine, 7000, seed, caplog)
    await drafter_survives(draft_runner, 3000, seed, caplog)
