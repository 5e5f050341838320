"""OpenTelemetry traces of sessions, across gateway, target and drafter. Off unless configured.

A call carries W3C's ``traceparent`` in its gRPC metadata. The stream between a target and a drafter
serves many sessions, so there the message that opens a session has it. When a session ends, its
statistics become the spans of its stages: rounds do nothing for them. Where tracing is off there is
no :class:`Tracing`, and nothing imports OpenTelemetry.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.errors import InvalidArgument
from paceline.session import Session, SessionStatistics

if TYPE_CHECKING:
    from paceline.engine import RoundEvent

Exporter = Literal["otlp", "console", "file", "none"]
EXPORTERS: tuple[Exporter, ...] = ("otlp", "console", "file", "none")


class Span:
    """A span that lasts until :meth:`end`.

    Attributes:
        traceparent: for the other processes of the trace.
        session: its stages (queue, prefill, rounds) become children of the span at the end.
    """

    __slots__ = ("_span", "_tracing", "session", "traceparent")

    def __init__(self, tracing: Tracing, span: Any) -> None:
        self._tracing = tracing
        self._span = span
        self.session: Session | None = None
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def set(self, **attributes: Any) -> None:
        """Set attributes ``paceline.NAME``."""
        self._span.set_attributes({f"paceline.{name}": v for name, v in attributes.items()})

    def round(self, event: RoundEvent) -> None:
        """Note a round, if the configuration wants rounds."""
        if self._tracing.rounds and event.round:
            drafted = 0 if event.outcome is None else event.outcome.draft.num_nodes
            attributes = {
                "paceline.round": event.round,
                "paceline.num_nodes": drafted,
                "paceline.num_accepted": event.num_accepted,
            }
            self._span.add_event("round", attributes)

    def end(self, error: BaseException | None = None) -> None:
        """End the span.

        Args:
            error: what ended the call; None: nothing went wrong.
        """
        if self.session is not None:
            self._add_stages(self.session)
        if error is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
        self._span.end()

    def _add_stages(self, session: Session) -> None:
        stats = session.stats
        end = stats.finished_at or time.perf_counter()
        stages = {"queue": stats.started_at, "prefill": stats.admitted_at}
        ends = {"queue": stats.admitted_at or end, "prefill": stats.prefilled_at or end}
        for name, start in stages.items():
            if start is not None:
                self._child(name, start, ends[name])
        if stats.prefilled_at is not None:
            self._child("rounds", stats.prefilled_at, end, _counters(stats))
        self.set(
            method=session.method_name,
            finish_reason=session.finish_reason or "",
            prompt_tokens=session.prompt_length,
            output_tokens=stats.num_tokens,
            drafter_lost=stats.drafter_lost,
        )

    def _child(
        self, name: str, start: float, end: float, attributes: dict[str, Any] | None = None
    ) -> None:
        from opentelemetry import trace

        context = trace.set_span_in_context(self._span)
        child = self._tracing.tracer.start_span(
            name, context, attributes=attributes, start_time=self._tracing.at(start)
        )
        child.end(self._tracing.at(end))


def _counters(stats: SessionStatistics) -> dict[str, Any]:
    names = (
        "num_rounds", "num_drafted", "num_draft_nodes", "num_accepted", "draft_seconds",
        "verify_seconds",
    )  # fmt: skip
    return {f"paceline.{name}": getattr(stats, name) for name in names}


class Tracing:
    """Makes the spans of one process.

    Args:
        service: ``service.name``, unless OTEL_SERVICE_NAME is set.
        exporter: an exporter of OpenTelemetry's SDK.
        sample: share to keep of the traces that begin here; None leaves it to
            OTEL_TRACES_SAMPLER, which keeps all by default. A caller that sends a traceparent
            decides for that trace.
        rounds: whether spans note every round.
    """

    def __init__(
        self, service: str, exporter: Any, *, sample: float | None = None, rounds: bool = False
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        name = os.environ.get("OTEL_SERVICE_NAME", service)
        sampler = None if sample is None else ParentBasedTraceIdRatio(sample)
        resource = Resource.create({"service.name": name, "process.pid": os.getpid()})
        self._provider = TracerProvider(sampler, resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("paceline")
        self.rounds = rounds
        self._offset_ns = time.time_ns() - time.perf_counter_ns()

    def at(self, moment: float) -> int:
        """A moment of ``time.perf_counter`` in nanoseconds since 1970."""
        return int(moment * 1e9) + self._offset_ns

    def begin(self, name: str, traceparent: str = "", **attributes: Any) -> Span | None:
        """A span that goes on from ``traceparent``, or begins a trace; None where not sampled."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        span = self.tracer.start_span(name, context, SpanKind.SERVER)
        if not span.is_recording():
            return None
        result = Span(self, span)
        result.set(**attributes)
        return result

    def stop(self) -> None:
        """Send the spans that have not left yet."""
        self._provider.shutdown()


def start_tracing(
    service: str,
    *,
    exporter: Exporter | None = None,
    endpoint: str | None = None,
    folder: str | None = None,
    sample: float | None = None,
    rounds: bool = False,
) -> Tracing | None:
    """Tracing as configured, here or by OTEL_* variables; None where it is off.

    Args:
        exporter: None takes OTEL_TRACES_EXPORTER; without that tracing is off.
        endpoint: of the OTLP collector over HTTP; None: OTEL_EXPORTER_OTLP_ENDPOINT.
        folder: where the exporter ``file`` writes a file for each process.

    Raises:
        InvalidArgument: the exporter is unknown or not installed, or has no folder for its files.
    """
    chosen = exporter or os.environ.get("OTEL_TRACES_EXPORTER") or "none"
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or chosen == "none":
        return None
    return Tracing(service, _exporter(chosen, service, endpoint, folder), sample=sample,
                   rounds=rounds)  # fmt: skip


def _exporter(name: str, service: str, endpoint: str | None, folder: str | None) -> Any:
    mend = "one whose package is installed: pip install 'paceline[tracing]'"
    try:
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        if name == "otlp":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            return OTLPSpanExporter(endpoint)
    except ImportError:
        raise InvalidArgument("tracing.exporter", name, mend) from None
    if name == "console":
        return ConsoleSpanExporter()
    if name != "file":
        raise InvalidArgument("tracing.exporter", name, f"one of {', '.join(EXPORTERS)}")
    if not folder:
        raise InvalidArgument("tracing.folder", folder, "a folder with the exporter 'file'")
    Path(folder).mkdir(parents=True, exist_ok=True)
    out = (Path(folder) / f"{service}-{os.getpid()}.jsonl").open("a", encoding="utf-8")
    return ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\n")


@contextmanager
def traced(tracing: Tracing | None, name: str, traceparent: str = "") -> Iterator[Span | None]:
    """A span that lasts as long as the block; None where nothing is traced."""
    span = None if tracing is None else tracing.begin(name, traceparent)
    failure: BaseException | None = None
    try:
        yield span
    except BaseException as error:
        failure = error
        raise
    finally:
        if span is not None:
            span.end(failure)


def traceparent_of(metadata: Iterable[Any] | None) -> str:
    """The traceparent of a call's metadata; "" where it has none."""
    for key, value in metadata or ():
        if key == "traceparent" and isinstance(value, str):
            return value
    return ""
