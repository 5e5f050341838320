"""What a trial measures: a configuration against AR, in pairs, until the result is sure enough.

A pair is a group of prompts that are decoded together, once with the configuration and once with AR
right before or after it, in one process. The prompts are the workload and stay the same: confidence
intervals tell how much a repeated measurement would differ, not one with other prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.bench.backends import Backend, BatchRun, encode_turns
from paceline.bench.prompts import Prompt
from paceline.config import SpeculationConfig
from paceline.errors import InvalidArgument
from paceline.memory import peak_memory, reset_peak_memory
from paceline.plan import resolve
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.tokenizer import ChatTemplate
from paceline.tuning.results import ExampleDraft, Interval, Metrics, Point
from paceline.tuning.space import Space, Workload
from paceline.types import Outcome

if TYPE_CHECKING:
    from paceline.engine import Engine
    from paceline.session import Session

AR = SpeculationConfig(method="ar")
_RESAMPLES = 400
_WARMUP_TOKENS = 8
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pair:
    """One group of prompts, decoded twice.

    Attributes:
        seconds, ar_seconds: of the group.
        latencies, ar_latencies: of each request.  # [concurrency]
    """

    seconds: float
    ar_seconds: float
    latencies: tuple[float, ...]
    ar_latencies: tuple[float, ...]


def encode_groups(
    workload: Workload,
    prompts: Sequence[Prompt],
    backend: Backend,
    template: ChatTemplate | None,
) -> list[list[list[int]]]:
    """Token ids of the prompts that are decoded together; of a conversation, each turn's.

    A last group that is too small is filled up from the start, so that all of them are decoded at
    the same concurrency.

    Args:
        backend: encodes, and answers all turns but the last.

    Raises:
        InvalidArgument: a prompt that is empty or too long for the target.
    """
    params = workload.sampling_params(is_chat=template is not None)
    room = backend.context_length - workload.max_tokens
    encoded = []
    for prompt in prompts:
        for turn, ids in encode_turns(prompt, backend, template, params, room):
            name = turn.prompt_id
            if not ids:
                raise InvalidArgument("workload.prompts", name, "a text of at least one token")
            if len(ids) > room:
                raise InvalidArgument(
                    "workload.prompts", f"{name} ({len(ids)} tokens)",
                    f"at most {max(0, room)} tokens: with {workload.max_tokens} new ones they "
                    f"have to fit into the context of {backend.context_length}",
                )  # fmt: skip
            encoded.append(ids)
    size = workload.concurrency
    return [
        [encoded[(start + i) % len(encoded)] for i in range(size)]
        for start in range(0, len(encoded), size)
    ]


class PairedMeasurement:
    """A configuration against AR on the prompts of a space.

    Args:
        backend: runs the configuration.
        baseline: runs AR; it differs from ``backend`` if the configuration has another dtype.
        groups: token ids of the prompts that are decoded together.
        is_chat: whether the prompts are conversations; answers may end early then.
    """

    def __init__(
        self,
        point: Point,
        space: Space,
        backend: Backend,
        baseline: Backend,
        groups: Sequence[Sequence[Sequence[int]]],
        is_chat: bool = False,
    ) -> None:
        self._settings = space.document.measurement
        self._objectives = space.objectives
        self._params = space.document.workload.sampling_params(is_chat=is_chat)
        self._speculation = point.speculation
        self._plan = resolve(point.speculation)
        self._groups = groups
        self._backend, self._baseline = backend, baseline
        self._pairs: list[list[Pair]] = [[] for _ in groups]
        self._runs: list[BatchRun] = []
        self._mismatches = 0
        self._truth: dict[int, tuple[tuple[int, ...], ...]] = {}
        reset_peak_memory()
        warmup = replace(self._params, max_tokens=min(_WARMUP_TOKENS, self._params.max_tokens))
        for each, speculation in ((backend, self._speculation), (baseline, AR)):
            each.generate(speculation, groups[0], warmup)
        backend.forget()

    # --- measuring --------------------------------------------------------------------------------

    @property
    def num_pairs(self) -> int:
        return sum(map(len, self._pairs))

    @property
    def num_groups(self) -> int:
        """How many groups of prompts were measured."""
        return sum(1 for pairs in self._pairs if pairs)

    @property
    def covers_all(self) -> bool:
        return self.num_groups == len(self._groups)

    def step(self) -> None:
        """Measure the groups of the next rung twice; after the last rung, all groups once more."""
        start = self.num_groups
        if self.covers_all:
            self.repeat(self._backend)
            return
        rung = self._settings.prompts_per_rung or -(-len(self._groups) // 4)
        added = range(start, min(start + rung, len(self._groups)))
        for _ in range(2):
            self._backend.forget()
            for group in added:
                self._measure(group)

    def repeat(self, backend: Backend) -> None:
        """Measure all prompts once more.

        Args:
            backend: the same one, or a new one if it cannot forget: the same prompts come again,
                and no drafter may know their answers.
        """
        if self._baseline is self._backend:
            self._baseline = backend
        self._backend = backend
        backend.forget()
        for group in range(len(self._groups)):
            self._measure(group)

    def _measure(self, group: int) -> None:
        prompts = self._groups[group]
        if (group + len(self._pairs[group])) % 2:
            ar = self._baseline.generate(AR, prompts, self._params)
            run = self._backend.generate(self._speculation, prompts, self._params)
        else:
            run = self._backend.generate(self._speculation, prompts, self._params)
            ar = self._baseline.generate(AR, prompts, self._params)
        self._pairs[group].append(Pair(run.seconds, ar.seconds, _latencies(run), _latencies(ar)))
        self._runs.append(run)
        self._mismatches += sum(
            ours.token_ids != theirs
            for ours, theirs in zip(run.sequences, self._expected(group, ar), strict=True)
        )

    def _expected(self, group: int, ar: BatchRun) -> tuple[tuple[int, ...], ...]:
        """AR's tokens from the engine of the configuration: another dtype gives other tokens."""
        if self._baseline is self._backend:
            return tuple(sequence.token_ids for sequence in ar.sequences)
        if group not in self._truth:
            own = self._backend.generate(AR, self._groups[group], self._params)
            self._truth[group] = tuple(sequence.token_ids for sequence in own.sequences)
        return self._truth[group]

    @property
    def is_sure(self) -> bool:
        """Whether all prompts were measured, and another pair would not change the result."""
        if not self.covers_all:
            return False
        if min(map(len, self._pairs)) >= self._settings.repetitions:
            return True
        interval = self._intervals()[self._objectives[0]]
        return interval.high - interval.low < self._settings.min_effect * interval.value

    # --- what it says -----------------------------------------------------------------------------

    def _intervals(self) -> dict[str, Interval]:
        return estimate([pairs for pairs in self._pairs if pairs], self._settings.confidence)

    def metrics(self, example: ExampleDraft | None = None) -> Metrics:
        """The metrics of all pairs so far."""
        intervals = self._intervals()
        sequences = [sequence for run in self._runs for sequence in run.sequences]
        num_tokens = sum(len(sequence.token_ids) for sequence in sequences)
        num_forwards = sum(sequence.num_target_forwards for sequence in sequences)
        drafted = sum(sequence.num_drafted or 0 for sequence in sequences)
        accepted = sum(sequence.num_accepted or 0 for sequence in sequences)
        pairs = [pair for group in self._pairs for pair in group]
        latencies = [1e3 * seconds for pair in pairs for seconds in pair.latencies]
        return Metrics(
            goodput_ratio=intervals["goodput"],
            latency_p50_ratio=intervals["latency_p50"],
            latency_p99_ratio=intervals["latency_p99"],
            tokens_per_second=num_tokens / sum(pair.seconds for pair in pairs),
            ar_tokens_per_second=num_tokens / sum(pair.ar_seconds for pair in pairs),
            latency_p50_ms=float(np.percentile(latencies, 50)),
            latency_p99_ms=float(np.percentile(latencies, 99)),
            mean_accepted_length=num_tokens / num_forwards,
            acceptance_rate=accepted / drafted if drafted else 0.0,
            accepted_by_depth=_summed(s.accepted_by_depth for s in sequences),
            drafted_by_depth=_summed(s.drafted_by_depth for s in sequences),
            memory_mb=peak_memory() / 2**20,
            identical_to_ar=self._mismatches == 0 if self._promises_tokens else None,
            num_pairs=self.num_pairs,
            num_prompts=sum(
                len(group) for group, pairs in zip(self._groups, self._pairs, strict=True) if pairs
            ),
            example=example,
        )

    @property
    def _promises_tokens(self) -> bool:
        if not (self._plan.rule.lossless and self._plan.method.lossless):
            return False
        return self._params.temperature == 0 or self._plan.rule.name == "coupled"


class _Watch:
    """Stands in for a drafter to see its outcomes; the drafter does everything else."""

    def __init__(self, drafter: object) -> None:
        self._drafter = drafter
        self.largest: Outcome | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            best = self.largest
            size = (len(outcome.draft.token_ids), len(outcome.path))
            if best is None or size > (len(best.draft.token_ids), len(best.path)):
                self.largest = outcome
        self._drafter.observe(sessions, outcomes)  # type: ignore[attr-defined]


def example_draft(
    engine: Engine, point: Point, prompt: Sequence[int], params: SamplingParams
) -> ExampleDraft | None:
    """Decode a prompt and return the largest draft that was verified; None without drafts."""
    engine, name = engine.sibling(), resolve(point.speculation).method.drafter
    if name == "none":
        return None
    session = engine.submit(Request(prompt, params, point.speculation))
    watch = _Watch(engine.drafters[name])
    engine.drafters[name] = watch  # type: ignore[assignment]
    while not session.finished:
        engine.step()
    largest = watch.largest
    if largest is None or not len(largest.draft.token_ids):
        return None
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    return ExampleDraft(
        parent_indices=tuple(int(parent) for parent in largest.draft.parent_indices),
        texts=tuple(tokenizer.decode([int(token)]) for token in largest.draft.token_ids),
        accepted=tuple(int(node) for node in largest.path),
    )


def _latencies(run: BatchRun) -> tuple[float, ...]:
    return tuple(s.seconds if s.seconds is not None else run.seconds for s in run.sequences)


def _summed(counts: Any) -> tuple[int, ...]:
    total: list[int] = []
    for row in counts:
        total += [0] * (len(row) - len(total))
        for depth, count in enumerate(row):
            total[depth] += count
    return tuple(total)


def estimate(groups: Sequence[Sequence[Pair]], confidence: float) -> dict[str, Interval]:
    """Ratios over AR with their confidence intervals, by objective.

    It is a residual bootstrap (Efron, Tibshirani 1993, chapter 9). The residuals are the distances
    of the logarithms of a group's times from their mean, over all groups, those of configuration
    and AR of a pair drawn together. With a single pair of each group nothing is known of the noise,
    and the interval is unbounded.

    Args:
        groups: the pairs of each group of prompts; all groups have the same number of requests.
    """
    residuals, centres, repetitions = [], [], []
    for pairs in groups:
        times = np.log([[pair.seconds, pair.ar_seconds] for pair in pairs])  # [n, 2]
        centre = np.median(times, axis=0)
        centres.append(centre)
        repetitions.append(len(pairs))
        if len(pairs) > 1:
            spread = np.sqrt(len(pairs) / (len(pairs) - 1))
            residuals += list((times - times.mean(axis=0)) * spread)
    times = np.exp(np.array(centres))  # [G, 2]
    latencies = np.array(
        [
            [
                np.median([pair.latencies for pair in pairs], axis=0),
                np.median([pair.ar_latencies for pair in pairs], axis=0),
            ]
            for pairs in groups
        ]
    )  # [G, 2, concurrency]
    found = _statistics(times[None], latencies[None])
    if not residuals:
        wide = {name: Interval(value=float(v[0]), low=0.0, high=1e9) for name, v in found.items()}
        return wide
    rng = np.random.default_rng(0)
    noise = np.array(residuals)  # [R, 2]
    factors = np.empty((_RESAMPLES, len(groups), 2))
    for group, count in enumerate(repetitions):
        drawn = noise[rng.integers(len(noise), size=(_RESAMPLES, count))]  # [B, n, 2]
        factors[:, group] = np.exp(drawn.mean(axis=1))
    resampled = _statistics(times * factors, latencies * factors[..., None])
    tail = 50 * (1 - confidence)
    intervals = {}
    for name, values in resampled.items():
        low, high = np.percentile(values, [tail, 100 - tail])
        value = float(found[name][0])
        intervals[name] = Interval(
            value=value, low=min(value, float(low)), high=max(value, float(high))
        )
    return intervals


def _statistics(times: Floats, latencies: Floats) -> Mapping[str, Floats]:
    """Ratios of the objectives.  # [B, G, 2], [B, G, 2, concurrency] -> [B] each"""
    total = times.sum(axis=1)
    result = {"goodput": total[:, 1] / total[:, 0]}
    for name, percent in (("latency_p50", 50), ("latency_p99", 99)):
        by_side = np.percentile(latencies, percent, axis=(1, 3))  # [B, 2]
        result[name] = by_side[:, 1] / by_side[:, 0]
    return result
