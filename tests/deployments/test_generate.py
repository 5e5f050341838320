"""Through the gateway, in both topologies: the tokens are those of AR in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument, PacelineError, SessionNotFound
from paceline.rpc.client import AsyncClient, Client
from paceline.rpc.gen.paceline.v1 import verify_pb2, verify_pb2_grpc
from paceline.sampling import SamplingParams
from paceline.types import Draft
from tests.deployments.conftest import PROMPTS, App

# The first test of a run waits for Ray, Serve and five replicas.
pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]

AR = Callable[[Sequence[str], SamplingParams], list[tuple[int, ...]]]
PARAMS = {
    "greedy": SamplingParams(max_tokens=48, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=48, ignore_eos=True, temperature=1.0, seed=7, top_p=0.95),
}


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("method", ["ar", "draft_model", "draft_model_tree", "prompt_lookup"])
def test_tokens_equal_local_ar(client: Client, ar: AR, method: str, params: SamplingParams) -> None:
    expected = ar(PROMPTS, params)
    # By goodput, drafts may stop when the machine is so busy that they do not pay.
    length = "fixed" if method != "ar" else None
    speculation = SpeculationConfig(method=method, length=length)
    completions = [client.complete(prompt, params, speculation) for prompt in PROMPTS]
    assert [completion.token_ids for completion in completions] == expected
    if method != "ar":
        assert sum(c.statistics.num_drafted for c in completions) > 0
    assert not any(c.statistics.drafter_lost for c in completions)


def test_eight_concurrent_requests(client: Client, ar: AR) -> None:
    prompts = [f"{PROMPTS[i % 3]}# {i}\n" for i in range(8)]
    params = PARAMS["sampled"]
    methods = ["draft_model", "ar", "draft_model_tree", "prompt_lookup"] * 2
    with ThreadPoolExecutor(8) as pool:
        completions = list(
            pool.map(
                lambda prompt, method: client.complete(
                    prompt, params, SpeculationConfig(method=method)
                ),
                prompts,
                methods,
            )
        )
    assert [completion.token_ids for completion in completions] == ar(prompts, params)


def test_text_and_processes(app: App, client: Client, engine: Engine) -> None:
    # What other lengths draft follows how busy the machine is.
    method = SpeculationConfig(method="draft_model", length="fixed")
    completion = client.complete(PROMPTS[0], SamplingParams(max_tokens=32), method)
    assert engine.tokenizer is not None
    assert completion.text == engine.tokenizer.decode(completion.token_ids)
    assert completion.statistics.num_drafted > 0
    assert sum(r.num_accepted for r in completion.rounds) == completion.statistics.num_accepted
    target = app.replica("target")
    assert completion.last.target_pid == target["pid"]
    if app.topology == "actors":
        drafter = app.replica("drafter")
        assert drafter["pid"] != target["pid"]
        assert completion.last.drafter_pid == drafter["pid"]
        assert completion.last.drafter_address == drafter["address"]
    else:
        assert completion.last.drafter_pid == target["pid"]


def test_model(app: App, client: Client) -> None:
    model = client.get_model()
    assert model.has_tokenizer
    assert model.batch_invariant
    assert model.default_method == {"actors": "draft_model", "colocated": "auto"}[app.topology]
    assert {"ar", "draft_model", "draft_model_tree", "prompt_lookup"} <= set(model.methods)


def test_health_and_reflection(app: App) -> None:
    with grpc.insecure_channel(app.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "paceline.v1.GenerateService", "paceline.v1.VerifyService"):
            request = health_pb2.HealthCheckRequest(service=service)
            assert (
                health.Check(request, timeout=10).status == health_pb2.HealthCheckResponse.SERVING
            )
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = reflection.ServerReflectionInfo(iter([question]), timeout=10)
        names = {service.name for service in answer.list_services_response.service}
        assert {"paceline.v1.GenerateService", "paceline.v1.VerifyService"} <= names


@pytest.mark.parametrize(
    ("prompt", "speculation", "field"),
    [
        ("", None, "prompt.text"),
        ([], None, "prompt"),
        ([1, 10**6], None, "prompt_token_ids[1]"),
        ([1] * 5000, None, "prompt_token_ids"),
        ("x", SpeculationConfig(method="magic"), "method"),
        ("x", SpeculationConfig(method="ar", branching=2), "branching"),
    ],
)
def test_bad_input_comes_back_named(
    client: Client, prompt: str | list[int], speculation: SpeculationConfig | None, field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.complete(prompt, SamplingParams(max_tokens=4), speculation)
    assert caught.value.field == field


def test_garbage_is_refused(app: App) -> None:
    with grpc.insecure_channel(app.address) as channel:
        for method in ("GenerateService/GetModel", "VerifyService/Open"):
            call = channel.unary_unary(f"/paceline.v1.{method}")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"\xff\xff\xff", timeout=10)
            codes = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
            assert caught.value.code() in codes


# --- VerifyService, for drafters outside the cluster ----------------------------------------------


def _client_drafts(tokens: Sequence[int], done: int) -> Draft:
    """A chain of four: three right tokens, the last one wrong where possible."""
    right = list(tokens[done : done + 4])
    return Draft.chain([*right[:3], *((token + 1) % 4096 for token in right[3:])])


def test_verify_stream(app: App, engine: Engine, ar: AR) -> None:
    params = PARAMS["sampled"]
    (expected,) = ar(PROMPTS[:1], params)
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(PROMPTS[0])

    async def talk() -> tuple[list[int], int]:
        async with AsyncClient(app.address, timeout=60) as client:
            session = await client.open_session(prompt, params)
            async with session:
                rounds = 0
                while session.finish_reason is None:
                    done = len(session.token_ids) - len(prompt)
                    await session.verify(_client_drafts(expected, done))
                    rounds += 1
                return session.token_ids[len(prompt) :], rounds

    tokens, rounds = asyncio.run(talk())
    assert tuple(tokens) == expected
    assert rounds == len(expected) / 4  # three accepted and one recovered in each


def test_verify_unary(client: Client, engine: Engine, ar: AR) -> None:
    params = PARAMS["greedy"]
    (expected,) = ar(PROMPTS[1:2], params)
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(PROMPTS[1])
    with client.open_session(prompt, params) as session:
        for _ in range(3):
            session.verify(_client_drafts(expected, len(session.token_ids) - len(prompt)))
        session.truncate(len(prompt) + 5)
        while session.finish_reason is None:
            session.verify(_client_drafts(expected, len(session.token_ids) - len(prompt)))
        assert tuple(session.token_ids[len(prompt) :]) == expected


def test_unknown_session(app: App) -> None:
    with grpc.insecure_channel(app.address) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Verify(verify_pb2.VerifyRequest(session_id="unknown", round=1), timeout=10)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as caught:
            stub.Open(verify_pb2.OpenRequest(resume_session_id="unknown"), timeout=10)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        stub.Close(verify_pb2.CloseRequest(session_id="unknown"), timeout=10)


def test_resume_takes_the_session_over(app: App, engine: Engine, ar: AR) -> None:
    """A stream that lost its connection half way is resumed on the replica that has the session."""
    params = PARAMS["greedy"]
    (expected,) = ar(PROMPTS[:1], params)
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(PROMPTS[0])

    async def talk() -> list[int]:
        async with AsyncClient(app.address, timeout=60) as client:
            first = await client.open_session(prompt, params)
            await first.verify(_client_drafts(expected, 0))
            second = await client.resume_session(first.transcript)
            with pytest.raises((SessionNotFound, PacelineError)):
                await first.verify(_client_drafts(expected, 4))
            async with second:
                while second.finish_reason is None:
                    done = len(second.token_ids) - len(prompt)
                    await second.verify(_client_drafts(expected, done))
                return second.token_ids[len(prompt) :]

    assert tuple(asyncio.run(talk())) == expected
