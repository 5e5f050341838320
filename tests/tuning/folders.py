"""Result folders for tests of what is drawn from them: real points, invented numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from paceline.config import SpeculationConfig
from paceline.plan import resolve
from paceline.tuning.results import (
    ExampleDraft,
    Interval,
    Manifest,
    Metrics,
    Point,
    PredictedResult,
    Results,
    TrialRecord,
)

AR = Point(speculation=SpeculationConfig(method="ar"))
ENVIRONMENT = {
    "date": "2026-11-20T10:00:00+00:00",
    "paceline": "0.1.0",
    "git_commit": "0123456789ab",
    "python": "3.11.9",
    "torch": "2.13.0+cpu",
    "cpu": "AMD EPYC",
    "cores": 2,
    "threads": 1,
    "gpu": None,
}
SPACE = {
    "name": "demo",
    "workload": {"max_tokens": 96, "temperature": 0.0},
    "measurement": {"confidence": 0.95},
    "space": {"method": ["layer_skip", "draft_model"], "num_speculative_tokens": [2, 4, 6, 8]},
}
# How often the first drafted token is right, the price of a drafted token in target forwards.
_QUALITY = {
    "layer_skip": (0.72, 0.3),
    "draft_model": (0.85, 0.09),
    "draft_model_tree": (0.86, 0.13),
    "sequoia": (0.88, 0.12),
    "eagle": (0.8, 0.08),
    "prompt_lookup": (0.6, 0.0),
    "suffix_decoding_tree": (0.62, 0.01),
    "speculative_sampling": (0.8, 0.09),
}
_TOKENS = (
    "def",
    " read",
    "_",
    "config",
    "(",
    "path",
    ")",
    ":",
    "\n",
    "    ",
    "return",
    " json",
    ".",
)


def point(method: str, **knobs: Any) -> Point:
    """A point of the catalogue; topology and dtype are among the knobs."""
    outer = {name: knobs.pop(name) for name in ("topology", "dtype") if name in knobs}
    return Point(speculation=SpeculationConfig(method=method, **knobs), **outer)


def all_points() -> list[Point]:
    """What a space of seven methods has, AR left out."""
    lengths = (2, 3, 4, 6, 8, 12)
    points = [
        point("layer_skip", num_speculative_tokens=k, exit_layer=e)
        for k in lengths
        for e in (4, 6, 8, 10)
    ]
    points += [point("draft_model", num_speculative_tokens=k) for k in lengths]
    points += [point("draft_model", num_speculative_tokens=6, topology="actors")]
    points += [
        point("draft_model_tree", num_speculative_tokens=k, node_budget=n)
        for k in (2, 3, 4, 6)
        for n in (8, 16, 32)
    ]
    points += [
        point("sequoia", num_speculative_tokens=k, node_budget=n) for k in (4, 6) for n in (12, 24)
    ]
    points += [point("eagle", num_speculative_tokens=k) for k in lengths]
    points += [point("prompt_lookup", num_speculative_tokens=k) for k in (4, 8, 12)]
    points += [point("suffix_decoding_tree", node_budget=16)]
    points += [point("speculative_sampling", num_speculative_tokens=4)]
    return points


def invented_ratio(where: Point) -> tuple[float, float]:
    """Goodput over AR's and mean accepted length, smooth in the knobs."""
    config = resolve(where.speculation).config
    quality, price = _QUALITY[config.method]
    depth, nodes = config.num_speculative_tokens or 0, config.node_budget or 0
    if config.exit_layer is not None:
        quality, price = 0.5 + 0.035 * config.exit_layer, config.exit_layer / 22
    accepted = sum(quality**i for i in range(1, depth + 1)) * (1 + 0.004 * max(0, nodes - depth))
    cost = 1 + price * depth + 0.012 * nodes
    cost += 0.25 if where.topology == "actors" else 0
    return (1 + accepted) / cost, 1 + accepted


def example(where: Point, rng: random.Random) -> ExampleDraft:
    """A draft of the shape that the point asks for, roughly."""
    plan = resolve(where.speculation)
    depth, budget = plan.config.num_speculative_tokens or 1, plan.config.node_budget or 1
    width = 1 if plan.config.shape in (None, "chain") and not plan.config.use_tree else 2
    parents: list[int] = []
    frontier = [-1]
    for level in range(min(depth, 12)):
        children = []
        for rank, parent in enumerate(frontier):
            for _ in range(width if rank < 3 else 1):
                if len(parents) < budget:
                    children.append(len(parents))
                    parents.append(parent)
        frontier = children[: max(1, 5 - level)]
    path = [parents.index(-1)]
    while path[-1] in parents and len(path) < 4:
        path.append(parents.index(path[-1]))
    return ExampleDraft(
        parent_indices=tuple(parents),
        texts=tuple(rng.choice(_TOKENS) for _ in parents),
        accepted=tuple(path),
    )


def metrics(where: Point, rng: random.Random, *, bias: float = 0.0, **changes: Any) -> Metrics:
    """Invented numbers with the spread of real ones."""
    if where.is_ar:
        one = Interval(value=1.004, low=0.982, high=1.021)  # AR over AR is noise
        values: dict[str, Any] = {
            "goodput_ratio": one, "latency_p50_ratio": one, "latency_p99_ratio": one,
            "tokens_per_second": 612.5, "mean_accepted_length": 1.0, "acceptance_rate": 0.0,
            "latency_p50_ms": 156.7, "latency_p99_ms": 171.2, "identical_to_ar": True,
        }  # fmt: skip
    else:
        true, tau = invented_ratio(where)
        value = true * rng.uniform(0.94, 1.06) + bias

        def interval(value: float) -> Interval:
            half = value * rng.uniform(0.015, 0.05)
            return Interval(value=value, low=value - half, high=value + half * 1.2)

        depth = min(resolve(where.speculation).config.num_speculative_tokens or 8, 16)
        rate = (tau - 1) / depth
        keep = rng.uniform(0.85, 1.05)
        drafted = [400 - 3 * i for i in range(depth)]
        values = {
            "goodput_ratio": interval(value),
            "latency_p50_ratio": interval(value * rng.uniform(0.97, 1.03)),
            "latency_p99_ratio": interval(1 + (value - 1) * rng.uniform(0.3, 1.0)),
            "tokens_per_second": 612.5 * value,
            "mean_accepted_length": tau,
            "acceptance_rate": min(0.98, rate),
            "latency_p50_ms": 156.7 / value,
            "latency_p99_ms": 201.2 / value,
            "accepted_by_depth": tuple(
                round(n * (0.9 * keep) ** (i + 1)) for i, n in enumerate(drafted)
            ),
            "drafted_by_depth": tuple(drafted),
            "identical_to_ar": None if where.speculation.method == "speculative_sampling" else True,
            "example": example(where, rng),
        }
    shared = {"ar_tokens_per_second": 612.5, "memory_mb": 512.0, "num_pairs": 24, "num_prompts": 8}
    return Metrics(**{**values, **shared, **changes})


def record(number: int, where: Point, **changes: Any) -> TrialRecord:
    """A finished trial, seeded by its number."""
    values: dict[str, Any] = {"status": "finished", "seconds": 11.5, "node": "node-1"}
    values.update(changes)
    if values["status"] != "failed" and "metrics" not in values:
        values["metrics"] = metrics(where, random.Random(number))
    return TrialRecord(key=where.key, number=number, point=where, **values)


def manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "name": "demo", "state": "finished", "started": "2026-11-20T10:00:00+00:00",
        "finished": "2026-11-20T10:14:07+00:00", "space": SPACE, "objectives": ("goodput",),
        "environment": ENVIRONMENT, "num_points": len(all_points()) + 1,
        "seconds": {"traces": 38.2, "simulation": 4.1, "trials": 611.0},
    }  # fmt: skip
    return Manifest(**{**values, **changes})


def write_sweep(
    url: str,
    records: Sequence[TrialRecord],
    *,
    predictions: bool | Sequence[PredictedResult] = False,
    best_yaml: bool = True,
    **changes: Any,
) -> Results:
    """A result folder with these trials.

    Args:
        predictions: True for invented ones of all points.
        changes: of the manifest.
    """
    results = Results(url)
    results.save_manifest(manifest(**changes))
    for one in records:
        results.save_trial(one)
    if predictions is True:
        predictions = invented_predictions()
    if predictions:
        results.save_predictions(predictions)
    if best_yaml:
        results.write("best.yaml", "speculation:\n  method: draft_model\n")
    return results


def invented_predictions() -> list[PredictedResult]:
    found = []
    for where in all_points():
        value, tau = invented_ratio(where)
        factor = 1 + 0.05 * math.sin(int(where.key, 16))
        found.append(
            PredictedResult(
                key=where.key, point=where, goodput_ratio=value * factor, mean_accepted_length=tau
            )
        )
    return found


def full_records() -> list[TrialRecord]:
    """AR and thirty other trials: some stopped, two failed, one refused, three confirmed."""
    predicted = {p.key: p.goodput_ratio for p in invented_predictions()}
    points = all_points()
    random.Random(5).shuffle(points)
    records = [record(0, AR, predicted=1.0)]
    for number, where in enumerate(points[:30], 1):
        changes: dict[str, Any] = {"predicted": predicted[where.key]}
        if number in (7, 19):
            changes |= {"status": "failed", "reason": f"RuntimeError: worker {number} died"}
        elif number % 5 == 0:
            changes |= {"status": "stopped", "reason": "its interval lies below the best one's"}
        elif number == 12:
            changes |= {"refused": "latency_p99_ms: 203.1, allowed 150"}
        records.append(record(number, where, **changes))
    counting = [r for r in records if r.counts and r.status == "finished" and not r.point.is_ar]
    chosen = sorted(counting, key=lambda r: -r.objective("goodput").value)[:3]
    for one in chosen:  # measured once more; the numbers come out a little lower
        again = metrics(one.point, random.Random(100 + one.number), bias=-0.1)
        records[one.number] = one.model_copy(update={"confirmed": again})
    return records
