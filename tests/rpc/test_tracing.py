"""Traces of one server and its drafter; no traces when they are off."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from paceline.engine import EngineThread
from paceline.errors import InvalidArgument
from paceline.rpc.client import Client
from paceline.rpc.gen.paceline.v1 import generate_pb2, generate_pb2_grpc
from paceline.rpc.tracing import Tracing, start_tracing
from paceline.sampling import SamplingParams
from paceline.types import Draft
from tests.rpc.serving import serving

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Iterator[Tracing]:
    tracing = Tracing("test", exporter, sample=1.0)
    yield tracing
    tracing.stop()


def finished(tracing: Tracing, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    tracing.stop()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_generation_begins_a_trace_of_its_own(
    engine: EngineThread, tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    with serving(engine=engine, tracing=tracing) as server, Client(server.address) as client:
        completion = client.complete([1, 2, 3], PARAMS)
    spans = finished(tracing, exporter)
    assert spans.keys() == {"generate", "queue", "prefill", "rounds"}
    whole = spans["generate"]
    assert whole.parent is None
    attributes = dict(whole.attributes or {})
    assert attributes["paceline.output_tokens"] == len(completion.token_ids)
    assert attributes["paceline.finish_reason"] == "length"
    assert not whole.events  # rounds are not wanted


def test_a_refused_call_ends_its_span_with_the_error(
    engine: EngineThread, tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    with (
        serving(engine=engine, tracing=tracing) as server,
        Client(server.address) as client,
        pytest.raises(InvalidArgument),
    ):
        client.complete([], PARAMS)
    (span,) = finished(tracing, exporter).values()
    assert span.name == "generate"
    assert not span.status.is_ok
    assert "prompt" in (span.status.description or "")


def test_a_verify_session_has_a_span_until_it_is_closed(
    engine: EngineThread, tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    with (
        serving(engine=engine, tracing=tracing) as server,
        Client(server.address) as client,
        client.open_session([1, 2, 3], PARAMS) as session,
    ):
        session.verify(Draft.chain([4, 5]))
    spans = finished(tracing, exporter)
    assert spans.keys() == {"verify_session", "queue", "prefill", "rounds"}
    assert dict(spans["rounds"].attributes or {})["paceline.num_rounds"] == 1


@pytest.mark.parametrize("sent", ["", "nonsense", "00-0-0-01", "00-" + "g" * 32 + "-1-01"])
def test_a_broken_traceparent_begins_a_new_trace(
    engine: EngineThread, tracing: Tracing, exporter: InMemorySpanExporter, sent: str
) -> None:
    request = generate_pb2.GenerateRequest(token_ids={"token_ids": [1, 2]})
    request.sampling.max_tokens = 2
    with (
        serving(engine=engine, tracing=tracing) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        list(stub.Generate(request, metadata=[("traceparent", sent)], timeout=20))
    assert finished(tracing, exporter)["generate"].parent is None


def test_off_is_the_default_and_imports_nothing() -> None:
    code = (
        "import sys, paceline.rpc.server, paceline.rpc.tracing\n"
        "assert paceline.rpc.tracing.start_tracing('x') is None\n"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_standard_variables_switch_it_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    tracing = start_tracing("x")
    assert tracing is not None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert start_tracing("x") is None
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    assert start_tracing("x", exporter="none") is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(InvalidArgument, match="exporter"):
        start_tracing("x")
    with pytest.raises(InvalidArgument, match="folder"):
        start_tracing("x", exporter="file")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracing = start_tracing("x", exporter="file", folder=str(tmp_path))
    assert tracing is not None
    assert tracing.begin("generate") is None
    tracing.stop()
