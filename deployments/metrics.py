"""What replicas tell Prometheus, through Ray's metrics: one table, and who fills it.

Ray adds the prefix ``ray_``, and to a counter the suffix ``_total``. A replica looks at its
engine's counters every ``INTERVAL_S`` seconds and tells Ray what has changed, so decoding itself
does nothing for metrics (paceline/counters.py). Names follow vLLM's; raw counters are exported, and
ratios computed where they are shown (deployments/dashboard.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from paceline.counters import EngineCounters
from paceline.rpc.access import Gate
from paceline.rpc.bridge import on_engine
from paceline.session import SessionState

if TYPE_CHECKING:
    from paceline.engine import Serving

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
LATENCIES = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Bounds of histogram buckets in seconds."""
SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Bounds of histogram buckets in tokens."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table.

    Attributes:
        name: without ``ray_paceline_`` and ``_total``.
        tags: beside Serve's own ``deployment``, ``replica`` and ``application``.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    description: str
    tags: tuple[str, ...] = ()
    bounds: tuple[float, ...] = LATENCIES

    @property
    def series(self) -> tuple[str, ...]:
        """The names that Prometheus sees."""
        full = f"ray_paceline_{self.name}"
        if self.kind == "histogram":
            return f"{full}_bucket", f"{full}_sum", f"{full}_count"
        return (f"{full}_total",) if self.kind == "counter" else (full,)


_METHOD = ("method",)
METRICS = (
    # Speculation, by the method that sessions asked for.
    Metric("rounds", "counter", "Verifications of one session.", _METHOD),
    Metric("spec_decode_num_drafts", "counter", "Rounds that drafted something.", _METHOD),
    Metric("spec_decode_num_draft_tokens", "counter", "Drafted tokens on one path.", _METHOD),
    Metric("spec_decode_num_draft_nodes", "counter", "Drafted tokens on all paths.", _METHOD),
    Metric("spec_decode_num_accepted_tokens", "counter", "Accepted drafted tokens.", _METHOD),
    Metric(
        "spec_decode_num_draft_tokens_per_pos", "counter",
        "Drafts that reached a position, 0 the first.", ("method", "position"),
    ),
    Metric(
        "spec_decode_num_accepted_tokens_per_pos", "counter",
        "Accepted tokens at a position, 0 the first.", ("method", "position"),
    ),
    Metric(
        "spec_decode_draft_length", "counter",
        "Rounds by the speculation length of their draft; 0 is AR.", ("method", "length"),
    ),
    Metric("draft_seconds", "counter", "Time until a round's draft was there.", _METHOD),
    Metric("verify_seconds", "counter", "Time of the forward that verified it.", _METHOD),
    Metric("drafters_lost", "counter", "Sessions that lost their drafter.", _METHOD),
    # Requests.
    Metric("generation_tokens", "counter", "Generated tokens.", _METHOD),
    Metric("prompt_tokens", "counter", "Prompt tokens of admitted sessions."),
    Metric("request_success", "counter", "Ended sessions.", ("finished_reason",)),
    Metric("refusals", "counter", "Refused calls and rounds.", ("reason",)),
    Metric("request_queue_time_seconds", "histogram", "Until a session was admitted.", _METHOD),
    Metric("time_to_first_token_seconds", "histogram", "From submission.", _METHOD),
    Metric(
        "request_time_per_output_token_seconds", "histogram",
        "Mean of a request's tokens after the first.", _METHOD,
    ),
    Metric("e2e_request_latency_seconds", "histogram", "From submission to the end.", _METHOD),
    Metric("request_prompt_tokens", "histogram", "Length of prompts.", _METHOD, SIZES),
    Metric("request_generation_tokens", "histogram", "Length of answers.", _METHOD, SIZES),
    # The engine.
    Metric("step_seconds", "histogram", "Steps: drafts made here, one forward, acceptance."),
    Metric("num_preemptions", "counter", "Sessions that gave their KV memory back for a while."),
    Metric("sessions", "gauge", "Sessions in each state.", ("state",)),
    Metric("kv_cache_usage_perc", "gauge", "Share of KV entries in use, 0 to 1."),
    Metric("kv_cache_tokens", "gauge", "KV entries of the replica."),
    Metric("prefix_cache_usage_perc", "gauge", "Share of KV entries that hold a prefix only."),
    Metric("prefix_cache_queries", "counter", "Tokens looked for in the prefix cache."),
    Metric("prefix_cache_hits", "counter", "Tokens found there."),
    Metric("prefix_cache_evictions", "counter", "Tokens given up for want of memory."),
    # The gateway and the drafter.
    Metric("gateway_calls", "gauge", "Calls to targets that are under way."),
    Metric("gateway_sessions", "gauge", "Sessions and generations of clients."),
    Metric("drafter_sessions", "gauge", "Sessions that have drafter state."),
)  # fmt: skip
SERIES = frozenset(name for metric in METRICS for name in metric.series)
"""Every name that Prometheus can see."""


class Exporter:
    """Tells Ray what has changed. One for each replica.

    Counters are given as totals: the exporter knows what it told before.
    """

    def __init__(self) -> None:
        from ray.serve import metrics  # they know the replica

        kinds: dict[str, Any] = {"counter": metrics.Counter, "gauge": metrics.Gauge}
        self._metrics: dict[str, Any] = {}
        for row in METRICS:
            name = f"paceline_{row.name}"
            if row.kind == "histogram":
                metric = metrics.Histogram(name, row.description, list(row.bounds), row.tags)
            else:
                metric = kinds[row.kind](name, row.description, row.tags)
            self._metrics[row.name] = metric
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}

    def total(self, name: str, value: float, **tags: str) -> None:
        """Bring a counter up to ``value``."""
        key = name, tuple(tags.values())
        more = value - self._told.get(key, 0)
        if more > 0:
            self._metrics[name].inc(more, tags)
            self._told[key] = value

    def set(self, name: str, value: float, **tags: str) -> None:
        """Set a gauge. Ray forgets one that is not set again."""
        self._metrics[name].set(value, tags)

    def observe(self, name: str, value: float | None, **tags: str) -> None:
        """Add a value to a histogram; None is none."""
        if value is not None:
            self._metrics[name].observe(value, tags)

    def engine(self, counters: EngineCounters) -> None:
        """Everything of an engine."""
        for method, counts in counters.methods.items():
            total = _of_method(self, method)
            total("rounds", counts.num_rounds)
            total("spec_decode_num_drafts", counts.num_drafts)
            total("spec_decode_num_draft_tokens", counts.num_draft_tokens)
            total("spec_decode_num_draft_nodes", counts.num_draft_nodes)
            total("spec_decode_num_accepted_tokens", counts.num_accepted_tokens)
            total("draft_seconds", counts.draft_seconds)
            total("verify_seconds", counts.verify_seconds)
            total("drafters_lost", counts.num_drafters_lost)
            total("generation_tokens", counts.num_tokens)
            for i, count in enumerate(counts.drafts_per_position):
                total("spec_decode_num_draft_tokens_per_pos", count, position=str(i))
            for i, count in enumerate(counts.accepted_per_position):
                total("spec_decode_num_accepted_tokens_per_pos", count, position=str(i))
            for length, count in counts.lengths().items():
                total("spec_decode_draft_length", count, length=str(length))
        self.total("prompt_tokens", counters.num_prompt_tokens)
        self.total("num_preemptions", counters.num_preemptions)
        for reason, count in counters.finished.items():
            self.total("request_success", count, finished_reason=reason)
        for ended in counters.requests:
            tags = {"method": ended.method}
            self.observe("request_queue_time_seconds", ended.queue_seconds, **tags)
            self.observe("time_to_first_token_seconds", ended.first_token_seconds, **tags)
            self.observe("request_time_per_output_token_seconds", ended.seconds_per_token, **tags)
            self.observe("e2e_request_latency_seconds", ended.seconds, **tags)
            self.observe("request_prompt_tokens", ended.prompt_tokens, **tags)
            self.observe("request_generation_tokens", ended.output_tokens, **tags)
        for seconds in counters.steps:
            self.observe("step_seconds", seconds)
        for state in SessionState:
            if state is not SessionState.FINISHED:
                self.set("sessions", counters.states[state.value], state=state.value)
        self.set("kv_cache_tokens", counters.kv_capacity)
        self.set("kv_cache_usage_perc", counters.kv_used / max(1, counters.kv_capacity))
        self.set("prefix_cache_usage_perc", counters.kv_cached / max(1, counters.kv_capacity))
        self.total("prefix_cache_queries", counters.prefix_queried)
        self.total("prefix_cache_hits", counters.prefix_hit)
        self.total("prefix_cache_evictions", counters.prefix_evicted)

    def refusals(self, gate: Gate) -> None:
        """What a gate has refused."""
        for reason, count in gate.num_refusals.items():
            self.total("refusals", count, reason=reason)


def _of_method(exporter: Exporter, method: str) -> Callable[..., None]:
    def total(name: str, value: float, **tags: str) -> None:
        exporter.total(name, value, method=method, **tags)

    return total


class Reporting:
    """Runs ``export`` every INTERVAL_S seconds on the replica's event loop, and a last time."""

    def __init__(self, export: Callable[[Exporter], Awaitable[None]]) -> None:
        self._export = export
        self._exporter = Exporter()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self._export(self._exporter)
            except Exception:  # metrics never take a replica down
                logger.exception("metrics cannot be exported; trying again")

    async def stop(self) -> None:
        """Tell Ray the rest."""
        self._task.cancel()
        with suppress(Exception):
            await self._export(self._exporter)


def report_engine(thread: Serving, gate: Gate) -> Reporting:
    """Report what an engine does and what its server refuses."""

    async def export(exporter: Exporter) -> None:
        exporter.engine(await on_engine(thread, lambda engine: engine.take_counters()))
        exporter.refusals(gate)

    return Reporting(export)


def report_gauges(gauges: Callable[[], Mapping[str, float]], gate: Gate | None = None) -> Reporting:
    """Report gauges by their names, and what a server refuses."""

    async def export(exporter: Exporter) -> None:
        for name, value in gauges().items():
            exporter.set(name, value)
        if gate is not None:
            exporter.refusals(gate)

    return Reporting(export)
