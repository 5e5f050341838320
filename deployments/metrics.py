"""The metrics that replicas export to Prometheus through Ray.

Ray adds the prefix ``ray_``, and to a counter the suffix ``_total``. Every ``INTERVAL_S`` seconds a
replica reads its engine's counters and tells Ray what has changed, so decoding itself does nothing
for metrics (paceline/counters.py). Names follow vLLM's. Counters are exported raw; the dashboard
computes ratios (deployments/dashboard.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from paceline.counters import EngineCounters
from paceline.methods import DIFFUSION_METHODS
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
MAX_TENANTS = 64
"""Tenants with a label of their own at a gateway; all further ones share :data:`OTHER`."""
OTHER = "_other"


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table of metrics.

    Attributes:
        name: without the prefix ``ray_paceline_`` and the suffix ``_total``.
        tags: beyond Serve's own ``deployment``, ``replica`` and ``application``, and
            ``model_name``, which all have.
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
    Metric("rounds", "counter", "Rounds of sessions.", _METHOD),
    Metric("spec_decode_num_drafts", "counter", "Rounds with a draft.", _METHOD),
    Metric("spec_decode_num_draft_tokens", "counter", "Drafted tokens: depths of drafts.", _METHOD),
    Metric("spec_decode_num_draft_nodes", "counter", "Drafted tokens: nodes of drafts.", _METHOD),
    Metric("spec_decode_num_accepted_tokens", "counter", "Accepted drafted tokens.", _METHOD),
    Metric(
        "spec_decode_num_draft_tokens_per_pos", "counter",
        "Drafts that have a token at this position, from 0.", ("method", "position"),
    ),
    Metric(
        "spec_decode_num_accepted_tokens_per_pos", "counter",
        "Accepted tokens at this position of a draft, from 0.", ("method", "position"),
    ),
    Metric(
        "spec_decode_draft_length", "counter",
        "Rounds by the speculation length of their draft; 0 is no draft.", ("method", "length"),
    ),
    Metric("draft_seconds", "counter", "Seconds that rounds took to get their drafts.", _METHOD),
    Metric("verify_seconds", "counter", "Seconds of the forwards that verified them.", _METHOD),
    Metric("drafters_lost", "counter", "Sessions that lost their drafter.", _METHOD),
    # The denoise loop (`engine: diffusion`), by schedule.
    Metric("denoising_forwards", "counter", "Forwards of the masked model.", _METHOD),
    Metric("denoising_blocks", "counter", "Blocks of text that it finished.", _METHOD),
    Metric("states_bytes", "counter", "Bytes of states sent to drafters elsewhere.", _METHOD),
    # Requests.
    Metric("generation_tokens", "counter", "Generated tokens.", _METHOD),
    Metric("prompt_tokens", "counter", "Prompt tokens of admitted sessions."),
    Metric("request_success", "counter", "Sessions that ended.", ("finished_reason",)),
    Metric("refusals", "counter", "Refused calls and rounds.", ("reason",)),
    Metric("request_queue_time_seconds", "histogram", "Submission to admission.", _METHOD),
    Metric("time_to_first_token_seconds", "histogram", "Submission to first token.", _METHOD),
    Metric(
        "request_time_per_output_token_seconds", "histogram",
        "Mean of a request's tokens after the first.", _METHOD,
    ),
    Metric(
        "inter_token_latency_seconds", "histogram",
        "Between two outputs of a request; an output is what a round commits.", _METHOD,
    ),
    Metric("e2e_request_latency_seconds", "histogram", "Submission to the end.", _METHOD),
    Metric("request_prompt_tokens", "histogram", "Length of prompts.", _METHOD, SIZES),
    Metric("request_generation_tokens", "histogram", "Length of answers.", _METHOD, SIZES),
    # The engine.
    Metric("step_seconds", "histogram", "Seconds of a step: drafts, one forward, acceptance."),
    Metric("num_preemptions", "counter", "Times that a session gave its KV memory back."),
    Metric("sessions", "gauge", "Sessions by state.", ("state",)),
    Metric("num_requests_running", "gauge", "Sessions that the engine has admitted."),
    Metric("num_requests_waiting", "gauge", "Sessions that wait for admission."),
    Metric("kv_cache_usage_perc", "gauge", "Share of KV entries in use, 0 to 1."),
    Metric("kv_cache_tokens", "gauge", "KV entries of the replica."),
    Metric("prefix_cache_usage_perc", "gauge", "Share of KV entries that only hold a prefix."),
    Metric("prefix_cache_queries", "counter", "Tokens looked up in the prefix cache."),
    Metric("prefix_cache_hits", "counter", "Tokens found in the prefix cache."),
    Metric("prefix_cache_evictions", "counter", "Cached tokens dropped to make room."),
    # The gateway and the drafter.
    Metric("gateway_calls", "gauge", "Open calls to targets."),
    Metric("gateway_sessions", "gauge", "Open sessions and generations of clients."),
    Metric("tenant_sessions", "gauge", "Open sessions of a tenant.", ("tenant",)),
    Metric("tenant_opens", "counter", "Sessions and calls that a tenant opened.", ("tenant",)),
    Metric("tenant_tokens", "counter", "Tokens that a tenant used, prompts included.", ("tenant",)),
    Metric("drafter_sessions", "gauge", "Sessions for which the drafter keeps state."),
    # The learner.
    Metric("online_updates", "counter", "Steps of training of the draft model as it serves."),
    Metric("online_positions_buffered", "gauge", "Rejected positions that the learner keeps."),
    Metric("online_positions_dropped", "counter", "Rejected positions that no step has had."),
    Metric("online_weights_version", "gauge", "Updates that all replicas' weights have at least."),
    Metric(
        "online_acceptance", "gauge",
        "Accepted of the judged tokens of the draft model, 0 to 1, by version of its weights: "
        "`current` or `previous`.", ("weights",),
    ),
)  # fmt: skip
SERIES = frozenset(name for metric in METRICS for name in metric.series)
"""All names that Prometheus sees."""


class Exporter:
    """Tells Ray what has changed; each replica has one.

    Callers give counters as totals: the exporter knows what it told before.
    """

    def __init__(self, model: str) -> None:
        from ray.serve import metrics  # its metrics know their replica

        kinds: dict[str, Any] = {"counter": metrics.Counter, "gauge": metrics.Gauge}
        self._metrics: dict[str, Any] = {}
        for row in METRICS:
            name = f"paceline_{row.name}"
            tags = (*row.tags, "model_name")
            if row.kind == "histogram":
                metric = metrics.Histogram(name, row.description, list(row.bounds), tags)
            else:
                metric = kinds[row.kind](name, row.description, tags)
            metric.set_default_tags({"model_name": model})
            self._metrics[row.name] = metric
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}
        self._tenants: set[str] = set()

    def total(self, name: str, value: float, **tags: str) -> None:
        """Raise a counter to ``value``."""
        key = name, tuple(tags.values())
        more = value - self._told.get(key, 0)
        if more > 0:
            self._metrics[name].inc(more, tags)
            self._told[key] = value

    def set(self, name: str, value: float, **tags: str) -> None:
        """Set a gauge. Ray forgets a gauge that is not set again and again."""
        self._metrics[name].set(value, tags)

    def observe(self, name: str, value: float | None, **tags: str) -> None:
        """Add a value to a histogram; None adds nothing."""
        if value is not None:
            self._metrics[name].observe(value, tags)

    def engine(self, counters: EngineCounters) -> None:
        """Export all metrics of an engine."""
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
            total("states_bytes", counts.states_bytes)
            total("generation_tokens", counts.num_tokens)
            if method in DIFFUSION_METHODS:
                total("denoising_forwards", counts.num_forwards)
                total("denoising_blocks", counts.num_rounds)
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
        for method, seconds in counters.gaps:
            self.observe("inter_token_latency_seconds", seconds, method=method)
        waiting = counters.states[SessionState.WAITING.value]
        self.set("num_requests_waiting", waiting)
        self.set("num_requests_running", counters.states.total() - waiting)
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
        """Export how many calls and rounds a gate has refused."""
        for reason, count in gate.num_refusals.items():
            self.total("refusals", count, reason=reason)
        sums: dict[str, Counter[str]] = {}
        for tenant, used in gate.usage().items():
            label = self._tenant(tenant)
            sums.setdefault(label, Counter()).update(
                dict(zip(("sessions", "opens", "tokens"), used, strict=True))
            )
        for label, used_by in sums.items():
            self.set("tenant_sessions", used_by["sessions"], tenant=label)
            self.total("tenant_opens", used_by["opens"], tenant=label)
            self.total("tenant_tokens", used_by["tokens"], tenant=label)

    def _tenant(self, name: str) -> str:
        """The label of a tenant. The first ones keep theirs, so that no series jumps."""
        if name not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            return OTHER
        self._tenants.add(name)
        return name


def _of_method(exporter: Exporter, method: str) -> Callable[..., None]:
    def total(name: str, value: float, **tags: str) -> None:
        exporter.total(name, value, method=method, **tags)

    return total


class Reporting:
    """Calls ``export`` every INTERVAL_S seconds on the replica's event loop, and at the end."""

    def __init__(self, model: str, export: Callable[[Exporter], Awaitable[None]]) -> None:
        self._export = export
        self._exporter = Exporter(model)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self._export(self._exporter)
            except Exception:  # an error in metrics must not stop a replica
                logger.exception("cannot export metrics; trying again")

    async def stop(self) -> None:
        """Stop, after a last export."""
        self._task.cancel()
        with suppress(Exception):
            await self._export(self._exporter)


def report_engine(model: str, thread: Serving, gate: Gate) -> Reporting:
    """Export the metrics of an engine, and what its server refuses."""

    async def export(exporter: Exporter) -> None:
        exporter.engine(await on_engine(thread, lambda engine: engine.take_counters()))
        exporter.refusals(gate)

    return Reporting(model, export)


def report_gauges(
    model: str, gauges: Callable[[], Mapping[str, float]], gate: Gate | None = None
) -> Reporting:
    """Export gauges, given by name, and what a server refuses."""

    async def export(exporter: Exporter) -> None:
        for name, value in gauges().items():
            exporter.set(name, value)
        if gate is not None:
            exporter.refusals(gate)

    return Reporting(model, export)
