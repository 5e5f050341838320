"""VerifyService: a client that drafts for itself, over the stream and over unary calls."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.config import SpeculationConfig
from paceline.drafters.client import ClientDrafter
from paceline.engine import Engine, EngineThread
from paceline.errors import FailedPrecondition, InvalidArgument, SessionNotFound
from paceline.models.base import ModelRunner
from paceline.rpc.client import AsyncClient, AsyncVerifySession, Client, VerifySession
from paceline.rpc.errors import EpochFenced, PrefixDiverged, RoundOutOfOrder, from_rpc_error
from paceline.rpc.gen.paceline.v1 import verify_pb2, verify_pb2_grpc
from paceline.rpc.server import RpcServer
from paceline.rpc.verify_service import trim
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.types import EMPTY_DRAFT, Draft
from tests.rpc.forking import ROOT
from tests.rpc.serving import eventually, serving

PROMPT = list(b"import os\nimport ")


def ar(runner: ModelRunner, params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    """Prompt and what plain AR decoding adds to it."""
    engine = Engine(ModelTarget(runner))
    (session,) = engine.generate([prompt], params, SpeculationConfig(method="ar"))
    return session.token_ids


@pytest.fixture
def client(server: RpcServer) -> Iterator[Client]:
    with Client(server.address, timeout=10) as each:
        yield each


@pytest.fixture
async def async_client(server: RpcServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address, timeout=10) as each:
        yield each


def right_tree(truth: list[int], depth: int) -> Draft:
    """The right tokens along the second branch of a tree of two."""
    tokens = truth[:depth]
    wrong = [(token + 1) % 258 for token in tokens]
    parents = [-1, -1]
    for level in range(1, len(tokens)):
        parents += [2 * level - 2, 2 * level - 1]
    ids = [each for pair in zip(wrong, tokens, strict=True) for each in pair]
    return Draft(np.asarray(ids, np.int64), np.asarray(parents[: len(ids)], np.int32))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unary_tokens_are_those_of_ar(
    client: Client, runner: ModelRunner, temperature: float
) -> None:
    """Right, wrong, partly right and empty drafts, chains and trees: always AR's tokens."""
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5)
    truth = ar(runner, params)
    with client.open_session(PROMPT, params) as session:
        for draft in drafts_along(session, truth):
            verified = session.verify(draft)
            assert session.token_ids == truth[: len(session.token_ids)]
            assert len(verified.token_ids) >= len(verified.accepted_indices)
            assert verified.total_seconds >= verified.verify_seconds > 0
        assert session.finish_reason == "length"
        assert session.token_ids == truth


async def test_stream_tokens_are_those_of_ar(
    async_client: AsyncClient, runner: ModelRunner, engine: EngineThread
) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=6)
    truth = ar(runner, params)
    async with await async_client.open_session(PROMPT, params) as session:
        for draft in drafts_along(session, truth):
            await session.verify(draft)
        assert session.token_ids == truth
        stats = await session.close()
    assert stats.num_tokens == 40
    assert stats.num_target_forwards < 40
    assert not engine.engine.sessions


def drafts_along(session: VerifySession | AsyncVerifySession, truth: list[int]) -> Iterator[Draft]:
    """Drafts of all kinds for a session, until it has ended."""
    step = 0
    while session.finish_reason is None:
        rest = truth[len(session.token_ids) :]
        wrong = [(token + 1) % 258 for token in rest]
        kinds = (
            Draft.chain(rest[:4]), right_tree(rest, 3), Draft.chain(wrong[:3]), EMPTY_DRAFT,
            Draft.chain([*rest[:1], *wrong[1:3]]),
        )  # fmt: skip
        yield kinds[step % len(kinds)]
        step += 1


def test_accepted_indices_are_those_of_the_clients_draft(
    client: Client, runner: ModelRunner
) -> None:
    """Also where the server cuts nodes that lie beyond the session's last token."""
    params = SamplingParams(max_tokens=4)
    truth = ar(runner, params, PROMPT)
    further = ar(runner, SamplingParams(max_tokens=8))[len(PROMPT) :]
    assert further[:4] == truth[len(PROMPT) :]
    with client.open_session(PROMPT, params) as session:
        verified = session.verify(right_tree(further, 8))
    assert verified.accepted_indices == (1, 3, 5)
    assert verified.next_token == truth[-1]
    assert verified.finish_reason == "length"


def test_a_stop_inside_the_draft_has_no_next_token(client: Client, runner: ModelRunner) -> None:
    truth = ar(runner, SamplingParams(max_tokens=8))[len(PROMPT) :]
    stop = next(t for t in truth[1:] if t not in truth[: truth.index(t)])
    place = truth.index(stop)
    params = SamplingParams(max_tokens=50, stop_token_ids=(stop,))
    with client.open_session(PROMPT, params) as session:
        verified = session.verify(Draft.chain(truth))
    assert verified.token_ids == tuple(truth[: place + 1])
    assert verified.accepted_indices == tuple(range(place + 1))
    assert verified.next_token is None
    assert verified.finish_reason == "stop"


@pytest.mark.parametrize("max_depth", range(5))
def test_trim(max_depth: int) -> None:
    draft = right_tree([10, 20, 30, 40], 4)
    trimmed, nodes = trim(draft, max_depth)
    assert nodes == list(range(2 * max_depth))
    assert trimmed.token_ids.tolist() == draft.token_ids[nodes].tolist()
    Draft.checked(trimmed.token_ids, trimmed.parent_indices, 258)


def test_truncate_goes_back(client: Client, runner: ModelRunner) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=9)
    truth = ar(runner, params)
    with client.open_session(PROMPT, params) as session:
        for _ in range(6):
            session.verify()
        session.truncate(len(PROMPT) + 2)
        assert session.token_ids == truth[: len(PROMPT) + 2]
        while session.finish_reason is None:
            session.verify(Draft.chain(truth[len(session.token_ids) :][:3]))
        assert session.token_ids == truth
        with pytest.raises(FailedPrecondition, match="has ended"):
            session.truncate(len(PROMPT))


# --- rounds -------------------------------------------------------------------------------------


@pytest.fixture
def stub(server: RpcServer) -> Iterator[Any]:
    with grpc.insecure_channel(server.address) as channel:
        yield verify_pb2_grpc.VerifyServiceStub(channel)


def test_rounds_are_idempotent(stub: Any, runner: ModelRunner, engine: EngineThread) -> None:
    truth = ar(runner, SamplingParams(max_tokens=8))[len(PROMPT) :]
    opened = stub.Open(verify_pb2.OpenRequest(token_ids=PROMPT))
    name = {"session_id": opened.session_id, "epoch": opened.epoch}
    assert (opened.epoch, opened.next_round) == (1, 1)

    request = verify_pb2.VerifyRequest(
        **name, round=1, base_length=len(PROMPT), token_ids=truth[:3]
    )
    first = stub.Verify(request)
    assert first.committed_length == len(PROMPT) + 4
    assert stub.Verify(request) == first  # nothing happens twice
    assert engine.engine.sessions[opened.session_id].length == len(PROMPT) + 4

    second = verify_pb2.VerifyRequest(
        **name, round=2, base_length=len(PROMPT) + 4, prefix_digest=first.digest
    )
    stub.Verify(second)
    for wrong in (1, 4, 0):  # older, a gap, none
        with pytest.raises(grpc.RpcError) as caught:
            stub.Verify(verify_pb2.VerifyRequest(**name, round=wrong, base_length=1))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        error = from_rpc_error(caught.value)
        assert isinstance(error, RoundOutOfOrder)
        assert error.expected_round == 3
    assert stub.Close(verify_pb2.CloseRequest(**name)).statistics.num_rounds == 2


def test_the_last_round_is_repeated_after_the_end_too(stub: Any) -> None:
    opened = stub.Open(
        verify_pb2.OpenRequest(token_ids=PROMPT, sampling={"max_tokens": 1})  # type: ignore[arg-type]
    )
    name = {"session_id": opened.session_id, "epoch": opened.epoch}
    request = verify_pb2.VerifyRequest(**name, round=1, base_length=len(PROMPT))
    first = stub.Verify(request)
    assert first.finish_reason == "length"
    assert stub.Verify(request) == first
    with pytest.raises(grpc.RpcError) as caught:
        stub.Verify(verify_pb2.VerifyRequest(**name, round=2, base_length=first.committed_length))
    assert "has ended (length)" in str(from_rpc_error(caught.value))


def test_a_round_in_flight_is_joined(stub: Any) -> None:
    """The same round on two connections at once: one verification, the same answer."""
    opened = stub.Open(verify_pb2.OpenRequest(token_ids=PROMPT))
    request = verify_pb2.VerifyRequest(
        session_id=opened.session_id, epoch=1, round=1, base_length=len(PROMPT)
    )
    both = [stub.Verify.future(request) for _ in range(2)]
    answers = [future.result(5) for future in both]
    assert answers[0] == answers[1]
    closed = stub.Close(verify_pb2.CloseRequest(session_id=opened.session_id, epoch=1))
    assert closed.statistics.num_rounds == 1


async def test_a_diverged_prefix_is_noticed_and_changes_nothing(
    async_client: AsyncClient, runner: ModelRunner
) -> None:
    params = SamplingParams(max_tokens=6)
    async with await async_client.open_session(PROMPT, params) as session:
        await session.verify()
        good = list(session.token_ids)
        digest = session.transcript._digest.value()

        session.transcript._digest.extend([1])  # the client believes something else
        with pytest.raises(PrefixDiverged) as caught:
            await session.verify()
        assert caught.value.committed_length == len(good)
        assert caught.value.digest == digest

        session.transcript.truncated(
            verify_pb2.TruncateResult(committed_length=len(good), digest=digest)
        )
        session.transcript.token_ids.append(7)
        with pytest.raises(PrefixDiverged, match=f"has {len(good)} committed"):
            await session.verify()
        session.transcript.token_ids.pop()

        while session.finish_reason is None:  # the stream and the session are still good
            await session.verify()
        assert session.token_ids == ar(runner, params)


async def test_a_bad_draft_leaves_the_session_as_it_was(async_client: AsyncClient) -> None:
    async with await async_client.open_session(
        PROMPT, None, SpeculationConfig(method="client", num_speculative_tokens=3, node_budget=5)
    ) as session:
        assert (session.transcript.max_depth, session.transcript.max_nodes) == (3, 5)
        cases = {
            "token_ids[1]": Draft.chain([1, 258]),
            "parent_indices[0]": Draft(np.asarray([1]), np.asarray([0], np.int32)),
            "parent_indices": Draft.chain([1, 2, 3, 4]),
            "token_ids": Draft(np.asarray([1] * 6), np.asarray([-1] * 6, np.int32)),
        }
        for field, draft in cases.items():
            with pytest.raises(InvalidArgument) as caught:
                await session.verify(draft)
            assert caught.value.field == field
        assert (await session.verify(Draft.chain([1, 2, 3]))).round == 1


# --- epochs -------------------------------------------------------------------------------------


async def test_a_resumed_session_fences_the_old_stream_off(
    async_client: AsyncClient, server: RpcServer, runner: ModelRunner, engine: EngineThread
) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=2)
    old = await async_client.open_session(PROMPT, params)
    await old.verify()
    async with AsyncClient(server.address) as elsewhere:
        new = await elsewhere.resume_session(old.transcript)
        assert new.transcript.epoch == 2
        await new.verify()

        with pytest.raises(EpochFenced):
            await old.verify()
        with pytest.raises(EpochFenced):
            await old.verify()  # the stream is over
        old.cancel()
        await asyncio.sleep(0.05)
        assert len(engine.engine.sessions) == 1  # the old stream's end did not end the session

        while new.finish_reason is None:
            await new.verify()
        assert new.token_ids == ar(runner, params)
        new.cancel()
    verify = server.verify
    assert verify is not None
    assert await asyncio.to_thread(eventually, lambda: not verify.sessions)


async def test_a_lost_answer_is_fetched_again(
    async_client: AsyncClient, server: RpcServer, runner: ModelRunner, engine: EngineThread
) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=4)
    truth = ar(runner, params)
    old = await async_client.open_session(PROMPT, params)
    await old.verify()
    draft = Draft.chain(truth[len(old.token_ids) :][:2])
    # The frame leaves; the answer is never read, as on a connection that hangs half open.
    request = old.transcript.request(old.transcript.propose(draft))
    await old._call.write(verify_pb2.VerifyFrame(verify=request))
    assert await asyncio.to_thread(
        eventually, lambda: next(iter(engine.engine.sessions.values())).stats.num_rounds == 2
    )
    async with AsyncClient(server.address) as elsewhere:
        new = await elsewhere.resume_session(old.transcript)
        assert new.token_ids == truth[: len(PROMPT) + 4]
        while new.finish_reason is None:
            await new.verify()
        assert new.token_ids == truth
        assert (await new.close()).num_rounds == 2 + 6
    old.cancel()


def test_unary_calls_of_an_old_epoch_are_fenced(stub: Any) -> None:
    opened = stub.Open(verify_pb2.OpenRequest(token_ids=PROMPT))
    again = stub.Open(verify_pb2.OpenRequest(resume_session_id=opened.session_id))
    assert (again.session_id, again.epoch) == (opened.session_id, 2)
    calls = {
        stub.Verify: verify_pb2.VerifyRequest(round=1, base_length=len(PROMPT)),
        stub.Truncate: verify_pb2.TruncateRequest(length=len(PROMPT)),
        stub.Close: verify_pb2.CloseRequest(),
    }
    for call, request in calls.items():
        request.session_id, request.epoch = opened.session_id, 1  # type: ignore[attr-defined]
        with pytest.raises(grpc.RpcError) as caught:
            call(request)
        assert isinstance(from_rpc_error(caught.value), EpochFenced)
        request.epoch = 2  # type: ignore[attr-defined]
    for call, request in calls.items():
        call(request)


# --- ends ---------------------------------------------------------------------------------------


async def test_the_first_draft_of_a_waiting_session_is_kept(
    server: RpcServer, runner: ModelRunner, engine: EngineThread
) -> None:
    """Its place comes later; until then its client waits for the answer, and gets it."""
    truth = ar(runner, SamplingParams(max_tokens=1))[len(PROMPT) :]
    async with AsyncClient(server.address) as client:
        running = [await client.open_session(PROMPT) for _ in range(8)]  # as many as there may be
        for session in running:
            await session.verify()
        late = await client.open_session(PROMPT)
        answer = asyncio.create_task(late.verify())
        await asyncio.sleep(0.05)
        assert not answer.done()
        await running[0].close()
        assert list((await answer).token_ids) == truth[:1]

        gone = await client.open_session(PROMPT)  # ends before its turn comes
        waiting = asyncio.create_task(gone.verify())
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert await asyncio.to_thread(eventually, lambda: not engine.engine.sessions, 0.5)
    drafter = engine.engine.drafters["client"]
    assert isinstance(drafter, ClientDrafter)
    assert await asyncio.to_thread(eventually, lambda: drafter.is_idle, 0.5)


async def test_the_streams_end_frees_the_session(server: RpcServer, engine: EngineThread) -> None:
    async with AsyncClient(server.address) as client:
        session = await client.open_session(PROMPT)
        await session.verify()
        assert len(engine.engine.sessions) == 1
        session.cancel()
        assert await asyncio.to_thread(eventually, lambda: not engine.engine.sessions, 0.5)

        await client.open_session(PROMPT)
        await (await client.open_session(PROMPT)).verify()
        assert len(engine.engine.sessions) == 2
    # The connection is gone, without a word on either stream.
    assert await asyncio.to_thread(eventually, lambda: not engine.engine.sessions, 0.5)
    assert server.verify is not None
    assert not server.verify.sessions


_VANISHING = """
import asyncio, sys
from paceline.rpc.client import AsyncClient

async def main():
    client = AsyncClient(sys.argv[1])
    session = await client.open_session([1, 2, 3])
    await session.verify()
    print("verified", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_client_process_that_is_killed(server: RpcServer, engine: EngineThread) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _VANISHING, server.address], stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"verified\n"
        assert len(engine.engine.sessions) == 1
        process.kill()
        assert eventually(lambda: not engine.engine.sessions, 1.0)


def test_idle_sessions_are_closed(engine: EngineThread) -> None:
    with serving(engine=engine, idle_timeout_s=0.2) as running, Client(running.address) as client:
        session = client.open_session(PROMPT)
        for _ in range(4):  # a busy session stays open
            session.verify()
            time.sleep(0.1)
        assert len(engine.engine.sessions) == 1
        assert eventually(lambda: not engine.engine.sessions, 1.0)
        with pytest.raises(SessionNotFound) as caught:
            session.verify()
        assert caught.value.session_id == session.transcript.session_id
        assert session.close() is None


def test_a_server_that_stops_frees_the_sessions_of_unary_clients(engine: EngineThread) -> None:
    with serving(engine=engine) as running, Client(running.address) as client:
        client.open_session(PROMPT)
        assert len(engine.engine.sessions) == 1
    assert eventually(lambda: not engine.engine.sessions, 0.5)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({}, "prompt"),
        ({"token_ids": [1, 300]}, "prompt_token_ids[1]"),
        ({"token_ids": [1] * 512}, "prompt"),
        ({"token_ids": [1], "sampling": {"max_tokens": -2}}, "sampling.max_tokens"),
        ({"token_ids": [1], "speculation": {"method": "ar"}}, "speculation.method"),
        ({"token_ids": [1], "speculation": {"branching": 2}}, "branching"),
    ],
)
def test_bad_opens(stub: Any, values: dict[str, Any], field: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Open(verify_pb2.OpenRequest(**values))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidArgument)
    assert error.field == field


def test_unknown_sessions_are_not_found(stub: Any) -> None:
    for call, request in (
        (stub.Open, verify_pb2.OpenRequest(resume_session_id="unknown")),
        (stub.Verify, verify_pb2.VerifyRequest(session_id="unknown", round=1)),
        (stub.Truncate, verify_pb2.TruncateRequest(session_id="unknown")),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(request)
        assert isinstance(from_rpc_error(caught.value), SessionNotFound)
    assert not stub.Close(verify_pb2.CloseRequest(session_id="unknown")).HasField("statistics")


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([verify_pb2.VerifyFrame(verify=verify_pb2.VerifyRequest(round=1))], "must be open"),
        ([verify_pb2.VerifyFrame()], "must be open"),
        ([verify_pb2.VerifyFrame(open=verify_pb2.OpenRequest(token_ids=PROMPT))] * 2, "one stream"),
    ],
)
def test_frames_out_of_place_end_the_stream(
    stub: Any, frames: list[verify_pb2.VerifyFrame], text: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Session(iter(frames)))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert text in str(from_rpc_error(caught.value))


def test_session_ids_cannot_be_guessed(stub: Any) -> None:
    ids = {stub.Open(verify_pb2.OpenRequest(token_ids=[i])).session_id for i in range(4)}
    assert len(ids) == 4
    assert all(len(each) >= 22 for each in ids)  # 128 bits
    for each in ids:
        stub.Close(verify_pb2.CloseRequest(session_id=each, epoch=1))
