"""One trace over the gateway's, the target's and the drafter's process."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from paceline.rpc.gen.paceline.v1 import generate_pb2, generate_pb2_grpc
from paceline.rpc.messages import sampling_to_message
from paceline.sampling import SamplingParams
from tests.deployments.conftest import PROMPTS, TRACES, App, eventually

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def generate(app: App, sampled: bool) -> generate_pb2.GenerateReply:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    request = generate_pb2.GenerateRequest(text=PROMPTS[0], sampling=sampling_to_message(params))
    metadata = [("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-0{int(sampled)}")]
    with grpc.insecure_channel(app.address) as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        *_, last = stub.Generate(request, metadata=metadata, timeout=60)
    return last


def spans() -> list[dict[str, Any]]:
    files = TRACES.glob("*.jsonl")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_one_trace_over_three_processes(actors: App) -> None:
    generate(actors, sampled=False)
    last = generate(actors, sampled=True)
    names = {"gateway.generate", "generate", "queue", "prefill", "rounds", "draft"}
    assert eventually(lambda: len(spans()) >= len(names), 20), spans()  # sent every 5 s
    found = {span["name"]: span for span in spans()}
    assert len(spans()) == len(found) == len(names)  # and none of the one that is not sampled
    assert found.keys() == names
    assert {span["context"]["trace_id"] for span in spans()} == {f"0x{TRACE_ID}"}

    pids = {n: s["resource"]["attributes"]["process.pid"] for n, s in found.items()}
    assert pids["gateway.generate"] == actors.replica("gateway")["pid"]
    assert pids["generate"] == pids["rounds"] == last.target_pid
    assert pids["draft"] == last.drafter_pid
    ids = {name: span["context"]["span_id"] for name, span in found.items()}
    parents = {name: span["parent_id"] for name, span in found.items()}
    assert parents["gateway.generate"] == f"0x{PARENT_ID}"
    assert parents["generate"] == ids["gateway.generate"]
    for name in ("queue", "prefill", "rounds", "draft"):
        assert parents[name] == ids["generate"]

    rounds = found["rounds"]["attributes"]
    assert rounds["paceline.num_rounds"] == last.statistics.num_rounds
    assert rounds["paceline.num_accepted"] == last.statistics.num_accepted
    noted = [e["attributes"] for e in found["generate"]["events"] if e["name"] == "round"]
    assert [e["paceline.round"] for e in noted] == [*range(1, last.statistics.num_rounds + 1)]
    order = [found[n]["start_time"] for n in ("queue", "prefill", "rounds")]
    assert order == sorted(order)
    assert found["queue"]["end_time"] == found["prefill"]["start_time"]
    assert found["prefill"]["end_time"] == found["rounds"]["start_time"]
    assert found["draft"]["attributes"]["paceline.num_drafts"] > 0
