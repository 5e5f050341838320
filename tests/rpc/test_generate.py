"""GenerateService through both clients, against the engine itself."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace

import pytest

from paceline.config import SpeculationConfig
from paceline.engine import Engine, EngineThread
from paceline.errors import InvalidArgument, ResourceExhausted
from paceline.models.base import ModelRunner
from paceline.rpc.client import AsyncClient, Client
from paceline.rpc.errors import Cancelled, DeadlineExceeded, ServerUnavailable
from paceline.rpc.server import RpcServer
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.types import Draft
from tests.rpc.serving import eventually, serving

PROMPT = list(b"def fibonacci(n):\n    ")
LONG = SamplingParams(max_tokens=480)
AR = SpeculationConfig(method="ar")  # one token a round: LONG takes some hundred rounds


def ar(runner: ModelRunner, prompt: list[int], params: SamplingParams) -> list[int]:
    """What plain AR decoding gives."""
    engine = Engine(ModelTarget(runner))
    (session,) = engine.generate([prompt], params, AR)
    return session.output_ids


@pytest.mark.parametrize("method", ["ar", "prompt_lookup", "draft_model", "draft_model_tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_ar(
    server: RpcServer, runner: ModelRunner, method: str, temperature: float
) -> None:
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=11)
    with Client(server.address) as client:
        done = client.complete(PROMPT, params, SpeculationConfig(method=method))
    assert list(done.token_ids) == ar(runner, PROMPT, params)
    assert done.finish_reason == "length"


def test_rounds_and_statistics_add_up(server: RpcServer) -> None:
    params = SamplingParams(max_tokens=30)
    with Client(server.address) as client:
        method = SpeculationConfig(method="draft_model", length="fixed")
        done = client.complete("class A:", params, method)
    stats = done.statistics
    assert [r.round for r in done.rounds] == list(range(1, stats.num_rounds + 1))
    assert sum(r.num_accepted for r in done.rounds) == stats.num_accepted > 0
    assert sum(len(r.token_ids) for r in done.rounds) == stats.num_tokens == 30
    assert all(len(r.token_ids) - r.num_accepted in (0, 1) for r in done.rounds)
    assert stats.num_target_forwards == stats.num_rounds < 30
    assert stats.mean_accepted_length == 30 / stats.num_rounds
    assert 0 < stats.acceptance_rate <= 1
    assert stats.tokens_per_second > 0
    assert not stats.drafter_lost
    assert sum(stats.accepted_by_depth) == stats.num_accepted
    assert done.last.target_pid == done.last.drafter_pid == os.getpid()  # colocated
    assert done.last.drafter_address == ""
    assert done.last.prompt_length == len("class A:")
    assert all(r.finish_reason is None and r.statistics is None for r in done.rounds[:-1])


def test_text_is_that_of_the_tokens(server: RpcServer, engine: EngineThread) -> None:
    tokenizer = engine.engine.tokenizer
    assert tokenizer is not None
    with Client(server.address) as client:
        done = client.complete("x = ", SamplingParams(max_tokens=20))
    assert done.text == tokenizer.decode(list(done.token_ids))


async def test_async_client_and_concurrent_sessions(server: RpcServer, runner: ModelRunner) -> None:
    prompts = [list(f"prompt {i}: ".encode()) for i in range(6)]
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=3)
    async with AsyncClient(server.address) as client:
        done = await asyncio.gather(*(client.complete(p, params) for p in prompts))
        model = await client.get_model()
    for prompt, completion in zip(prompts, done, strict=True):
        assert list(completion.token_ids) == ar(runner, prompt, params)
    assert model.name == "tiny"


def test_drafts_come_along_where_asked_for(server: RpcServer) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=2)
    method = SpeculationConfig(method="draft_model_tree", length="fixed")
    with Client(server.address) as client:
        plain = client.complete("class A:", params, method)
        rounds = list(client.generate("class A:", params, method, return_draft=True))
    assert all(r.draft is None for r in plain.rounds)
    assert [replace(r, draft=None, statistics=None) for r in rounds] == [
        replace(r, statistics=None) for r in plain.rounds
    ]
    for r in rounds:
        assert r.draft is not None
        draft = Draft.checked(r.draft.token_ids, r.draft.parent_indices, 258)
        path = list(r.draft.accepted_indices)
        assert draft.token_ids[path].tolist() == list(r.token_ids[: r.num_accepted])
        assert draft.parent_indices[path].tolist() == [-1, *path][: len(path)]
        assert len(r.draft.texts) == draft.num_nodes
    assert sum(len(r.draft.token_ids) for r in rounds if r.draft) == (
        plain.statistics.num_draft_nodes
    )
    texts = (text for r in rounds if r.draft for text in r.draft.committed_texts)
    assert "".join(texts) == plain.text


def test_get_model(server: RpcServer, runner: ModelRunner) -> None:
    with Client(server.address) as client:
        model = client.get_model()
    assert (model.vocab_size, model.context_length) == (258, 512)
    assert model.dtype == "float32"
    assert model.batch_invariant
    assert model.has_tokenizer
    assert set(model.methods) >= {"ar", "draft_model", "prompt_lookup"}
    assert "client" not in model.methods
    assert model.default_method == "draft_model"
    assert model.limits.max_sessions == 8
    assert model.limits.kv_capacity == runner.kv_capacity


# --- ending early ------------------------------------------------------------------------------


def test_leaving_the_loop_frees_the_session(server: RpcServer, engine: EngineThread) -> None:
    with Client(server.address) as client:
        generation = client.generate(PROMPT, LONG, AR)
        for _ in generation:
            assert len(engine.engine.sessions) == 1
            break
        assert eventually(lambda: not engine.engine.sessions, 0.5)
        client.get_model()  # the client still works


def test_cancel_frees_the_session(server: RpcServer, engine: EngineThread) -> None:
    with Client(server.address) as client:
        generation = client.generate(PROMPT, LONG, AR)
        rounds = iter(generation)
        next(rounds)
        generation.cancel()
        with pytest.raises(Cancelled):
            list(rounds)
        assert eventually(lambda: not engine.engine.sessions, 0.5)


async def test_async_break_and_task_cancel_free_the_session(
    server: RpcServer, engine: EngineThread
) -> None:
    async with AsyncClient(server.address) as client:
        async for _ in client.generate(PROMPT, LONG, AR):
            break
        await asyncio.sleep(0)
        assert await asyncio.to_thread(eventually, lambda: not engine.engine.sessions, 0.5)

        task = asyncio.create_task(client.complete(PROMPT, LONG, AR))
        assert await asyncio.to_thread(eventually, lambda: len(engine.engine.sessions) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(eventually, lambda: not engine.engine.sessions, 0.5)


def test_vanishing_client_frees_its_sessions(server: RpcServer, engine: EngineThread) -> None:
    client = Client(server.address)
    rounds = [iter(client.generate(PROMPT, LONG, AR)) for _ in range(3)]
    for each in rounds:
        next(each)
    assert len(engine.engine.sessions) == 3
    client.close()  # the connection breaks; no call was cancelled one by one
    assert eventually(lambda: not engine.engine.sessions, 1.0)
    with pytest.raises(Cancelled):
        list(rounds[0])
    rounds.clear()


def test_a_deadline_ends_the_session_too(server: RpcServer, engine: EngineThread) -> None:
    with Client(server.address) as client:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.complete(PROMPT, LONG, AR, timeout=0.05)
        assert time.monotonic() - started < 2
        assert eventually(lambda: not engine.engine.sessions, 0.5)


def test_a_stopping_server_ends_its_sessions(engine: EngineThread) -> None:
    with serving(engine=engine, grace=0.0) as running:
        client = Client(running.address)
        generation = iter(client.generate(PROMPT, LONG, AR))
        next(generation)
    with pytest.raises((Cancelled, ServerUnavailable)):
        list(generation)
    assert eventually(lambda: not engine.engine.sessions, 1.0)
    with pytest.raises(ServerUnavailable):
        client.complete(PROMPT)
    client.close()


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "field"),
    [("", "prompt.text"), ([], "prompt"), ([1, -1], "prompt_token_ids[1]"),
     ([258], "prompt_token_ids[0]"), ([1] * 512, "prompt"), ([2**40], "prompt.token_ids")],
)  # fmt: skip
def test_bad_prompts(server: RpcServer, prompt: str | list[int], field: str) -> None:
    with Client(server.address) as client:
        for return_draft in (False, True):
            with pytest.raises(InvalidArgument) as caught:
                list(client.generate(prompt, return_draft=return_draft))
            assert caught.value.field == field
            assert caught.value.allowed


def test_bad_parameters_are_named_by_the_server(server: RpcServer) -> None:
    from paceline.rpc.errors import from_rpc_error
    from paceline.rpc.gen.paceline.v1 import generate_pb2, generate_pb2_grpc

    cases = {
        "sampling.temperature": {"sampling": {"temperature": float("nan")}},
        "sampling.max_tokens": {"sampling": {"max_tokens": 0}},
        "sampling.top_p": {"sampling": {"top_p": 1.5}},
        "sampling.logit_bias": {"sampling": {"logit_bias": {-3: 1.0}}},
        "stop_token_ids": {"sampling": {"stop_token_ids": [999]}},
        "speculation.num_speculative_tokens": {"speculation": {"num_speculative_tokens": -1}},
        "method": {"speculation": {"method": "telepathy"}},
        "ngram_max": {"speculation": {"method": "draft_model", "ngram_max": 3}},
        "prompt": {},
    }
    import grpc

    with grpc.insecure_channel(server.address) as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        for field, values in cases.items():
            request = generate_pb2.GenerateRequest(**values)  # type: ignore[arg-type]
            if values:
                request.token_ids.token_ids.extend(PROMPT)
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(request))
            error = from_rpc_error(caught.value)
            assert isinstance(error, InvalidArgument), field
            assert error.field == field
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_drafts_of_a_client_have_a_service_of_their_own(server: RpcServer) -> None:
    match = r"speculation\.method: got 'client'.*VerifyService"
    with Client(server.address, timeout=5) as client, pytest.raises(InvalidArgument, match=match):
        client.complete(PROMPT, None, SpeculationConfig(method="client"))


def test_unknown_method_lists_the_known_ones(server: RpcServer) -> None:
    with Client(server.address) as client, pytest.raises(InvalidArgument) as caught:
        client.complete(PROMPT, None, SpeculationConfig(method="telepathy"))
    assert "prompt_lookup" in caught.value.allowed


def test_a_full_queue_is_resource_exhausted(server: RpcServer, engine: EngineThread) -> None:
    limits = engine.engine.limits
    with Client(server.address) as client:
        running = [iter(client.generate(PROMPT, LONG, AR)) for _ in range(limits.max_sessions)]
        for each in running:
            next(each)
        waiting = [client.generate(PROMPT, LONG, AR) for _ in range(limits.max_waiting)]
        total = limits.max_sessions + limits.max_waiting
        assert eventually(lambda: len(engine.engine.sessions) == total)
        with pytest.raises(ResourceExhausted) as caught:
            client.complete(PROMPT, LONG, AR)
        assert caught.value.retry_after_s == 1.0
        for generation in waiting:
            generation.cancel()
        running.clear()


def test_messages_over_the_limit(server: RpcServer) -> None:
    import grpc

    from paceline.rpc.errors import from_rpc_error
    from paceline.rpc.gen.paceline.v1 import generate_pb2, generate_pb2_grpc

    with Client(server.address) as client, pytest.raises(InvalidArgument, match="4194304 bytes"):
        client.complete("x" * (5 * 1024 * 1024))
    # A client without our limit is refused by the server.
    with grpc.insecure_channel(server.address) as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(generate_pb2.GenerateRequest(text="x" * (5 * 1024 * 1024))))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(from_rpc_error(caught.value), InvalidArgument)
