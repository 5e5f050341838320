"""Messages over gRPC that are made to hurt: each is refused before its contents are looked at."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline import bounds
from paceline.engine import EngineThread
from paceline.rpc import access, audit
from paceline.rpc.audit import Audit
from paceline.rpc.client import Client
from paceline.rpc.errors import from_rpc_error
from paceline.rpc.gen.paceline.v1 import (
    generate_pb2,
    generate_pb2_grpc,
    verify_pb2,
    verify_pb2_grpc,
)
from paceline.rpc.messages import MAX_MESSAGE_BYTES
from paceline.rpc.server import RpcServer
from paceline.sampling import SamplingParams
from tests.rpc.forking import ROOT

MANY = 200_000  # as a message they are below the bound of a message
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)


def generate(**fields: Any) -> generate_pb2.GenerateRequest:
    fields.setdefault("token_ids", {"token_ids": [1, 2]})
    return generate_pb2.GenerateRequest(**fields)


def sampled(**fields: Any) -> generate_pb2.GenerateRequest:
    return generate(sampling=fields)


def text(**fields: Any) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(**fields)


HOSTILE: dict[str, tuple[Message, str]] = {
    "prompt ids": (generate(token_ids={"token_ids": [1] * MANY}), "prompt_token_ids"),
    "committed ids": (generate(committed_token_ids=[1] * MANY), "committed_token_ids"),
    "predicted ids": (
        generate(prediction_token_ids={"token_ids": [1] * MANY}), "prediction_token_ids"
    ),
    "prompt text": (text(text="x y" * 80_000), "prompt.text"),
    "predicted text": (generate(prediction_text="x y" * 80_000), "prediction_text"),
    "stop strings": (sampled(stop=["x"] * 80_000), "sampling.stop"),
    "bytes of stop strings": (sampled(stop=["x" * 5000]), "sampling.stop"),
    "stop ids": (sampled(stop_token_ids=[1] * MANY), "sampling.stop_token_ids"),
    "logit biases": (
        sampled(logit_bias={i: float("nan") for i in range(6000)}), "sampling.logit_bias"
    ),
    "template of a shape": (
        generate(speculation={"method": "x" * 100_000}), "speculation.method"
    ),
    "chain of rules": (
        sampled(grammar="start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3000))
                + '\na3000: "x"'),
        "grammar",
    ),
    "continuations": (generate(continuations=[{}] * 100_000), "continuations"),
    "ids of continuations": (
        generate(continuations=[{"token_ids": [1] * MANY}]), "continuations"
    ),
    "repetition": (sampled(regex="((a{1000}){1000}){1000}"), "regex"),
    "verify session": (verify_pb2.OpenRequest(token_ids=[1] * MANY), "token_ids"),
    # Longer than any request to this model: not even read.
    "megabytes of ids": (generate(committed_token_ids=[1] * 4_000_000), "message"),
    "megabytes of text": (text(text="x y" * 1_300_000), "message"),
    "megabytes to open": (verify_pb2.OpenRequest(token_ids=[1] * 4_000_000), "message"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_and_others_go_on(name: str, server: RpcServer, engine: EngineThread) -> None:
    message, field = HOSTILE[name]
    tokens: list[tuple[int, ...]] = []
    with Client(server.address, timeout=60) as client:
        calm = client.complete([3, 4, 5], PARAMS).token_ids

        def honest() -> None:
            tokens.append(client.complete([3, 4, 5], PARAMS).token_ids)

        beside = threading.Thread(target=honest)
        beside.start()
        options = [("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]
        with grpc.insecure_channel(server.address, options) as channel:
            call: Any = generate_pb2_grpc.GenerateServiceStub(channel).Generate
            if isinstance(message, verify_pb2.OpenRequest):
                call = verify_pb2_grpc.VerifyServiceStub(channel).Open
            with pytest.raises(grpc.RpcError) as caught:
                list(call(message, timeout=60))
        beside.join(60)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, caught.value
    assert getattr(from_rpc_error(caught.value), "field", None) == field
    assert tokens == [calm]


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": [1, 2], "parent_indices": [-1] * MANY},
        {"token_ids": [1], "probs": {"offsets": [0] * MANY}},
        {"token_ids": [1], "probs": {"offsets": [0, 1], "token_ids": [1] * MANY, "probs": [0.5]}},
    ],
    ids=["parents", "offsets", "tokens of a draft's law"],
)
def test_a_draft_has_as_much_as_its_nodes_need(server: RpcServer, fields: dict[str, Any]) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        opened = stub.Open(verify_pb2.OpenRequest(token_ids=[1, 2]))
        named = {"session_id": opened.session_id, "epoch": opened.epoch}
        request = verify_pb2.VerifyRequest(
            **named, round=1, base_length=2, prefix_digest=opened.digest, **fields
        )
        with pytest.raises(grpc.RpcError) as caught:
            stub.Verify(request, timeout=30)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, caught.value
        assert f"{MANY}" in str(caught.value.details())
        stub.Close(verify_pb2.CloseRequest(**named))


def test_the_documents_have_the_bounds() -> None:
    """`python -c 'from paceline import bounds; print(bounds.table())'` writes the table."""
    assert bounds.table() in (ROOT / "docs" / "security.md").read_text()


# --- before authentication ------------------------------------------------------------------------


def test_a_flood_of_strangers_is_one_line_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "audit.jsonl"
    log, clock = Audit(file), [1000.0]
    monkeypatch.setattr(audit.time, "monotonic", lambda: clock[0])

    def flood(host: str) -> None:
        for i in range(3000):
            log.refused(
                tenant=None, peer=f"ipv4:{host}:{i}", method=f"/made.up/{i}/" + 7000 * "x",
                outcome="UNAUTHENTICATED", reason="UNAUTHENTICATED",
            )  # fmt: skip

    flood("192.0.2.1")
    flood("192.0.2.2")
    clock[0] += 59
    flood("192.0.2.1")
    assert len(file.read_text().splitlines()) == 2
    clock[0] += 2
    flood("192.0.2.1")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line.get("repeated") for line in lines] == [None, None, 5999]
    assert file.stat().st_size < 1500
    for i in range(10_000):
        flood_of_hosts = f"ipv4:192.0.{i}.1:1"
        log.refused(
            tenant=None, peer=flood_of_hosts, method="/x", outcome="UNAUTHENTICATED",
            reason="UNAUTHENTICATED",
        )  # fmt: skip
    assert len(log._refusals) <= 4096
    log.close()


async def test_a_host_may_watch_a_few_times_without_a_token(
    server: RpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "MAX_PUBLIC_CALLS", 5)
    request = health_pb2.HealthCheckRequest()
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(request) for _ in range(5)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        refused = stub.Watch(request)
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "calls without a token" in await refused.details()
        assert server.gate.num_refusals["public_calls"] == 1
        watches.pop().cancel()
        for _ in range(100):
            if server.gate._public.total() == 4:
                break
            await asyncio.sleep(0.02)
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        for watch in watches:
            watch.cancel()
