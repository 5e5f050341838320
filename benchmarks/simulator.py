"""The simulator of `tuning/` against measurement: goodput over AR, predicted and measured.

Records traces and costs, predicts every point, then measures each of them in pairs with AR on the
same prompts. Spearman's rho says how well the two agree on the order of the points, which is what
a sweep needs. `--simulate N` also says how long predicting N points takes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from paceline.bench import LocalBackend, parse_methods
from paceline.bench.environment import describe_environment
from paceline.bench.prompts import builtin_prompts, limit_per_category
from paceline.cluster.cli_output import set_threads
from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.loading import load_engine
from paceline.sampling import SamplingParams
from paceline.tuning.costs import MeasuredCosts, measure_costs
from paceline.tuning.results import Point, PredictedResult
from paceline.tuning.simulator import Simulator
from paceline.tuning.traces import Traces, record

METHODS = (
    *(f"draft_model:num_speculative_tokens={n}" for n in (1, 2, 4, 6, 10, 16)),
    "draft_model:shape=kary:branching=2:num_speculative_tokens=3",
    "draft_model:shape=kary:branching=3:num_speculative_tokens=4:node_budget=40",
    "sequoia:length=fixed:num_speculative_tokens=6:node_budget=8",
    "sequoia:length=fixed:num_speculative_tokens=8:node_budget=48",
    "draft_model:shape=template:template=medusa_63:node_budget=24",
    "draft_model:shape=confidence:num_speculative_tokens=4:node_budget=8",
    "draft_model:shape=confidence:num_speculative_tokens=8:node_budget=32",
    "dyspec:length=fixed:num_speculative_tokens=6:node_budget=10",
    "dyspec:length=fixed:num_speculative_tokens=6:node_budget=32",
    *(
        f"layer_skip:exit_layer={layer}:num_speculative_tokens={n}"
        for layer, n in ((4, 2), (4, 5), (7, 3), (12, 2), (16, 4))
    ),
    "unified_layer_skipping:length=fixed:num_speculative_tokens=2",
    *(f"eagle:length=fixed:num_speculative_tokens={n}" for n in (2, 5, 8)),
    "eagle2:length=fixed:num_speculative_tokens=5:node_budget=16",
    "prompt_lookup:num_speculative_tokens=3",
    "prompt_lookup:num_speculative_tokens=10",
    "suffix_decoding:num_speculative_tokens=8",
    "suffix_decoding_tree",
    "suffix_decoding_hybrid:num_speculative_tokens=12",
    "copyspec_draft_model",
    "combined:num_speculative_tokens=4:node_budget=12",
    "staged",
    "draft_model_tree",  # the controller `goodput` chooses its length
)


def predict(
    engine: Engine,
    points: dict[str, Point],
    prompts: list[list[int]],
    params: SamplingParams,
    concurrency: int,
    console: Console,
) -> tuple[Traces, MeasuredCosts, dict[str, PredictedResult | None], dict[str, float]]:
    """Traces, costs, a prediction for each label, and the seconds of each stage."""
    configs = [point.speculation for point in points.values()]
    seconds: dict[str, float] = {}
    with Progress(console=console) as bar:
        task = bar.add_task("recording")
        started = time.perf_counter()
        traces = record(
            engine, configs, prompts, params, key={}, concurrency=concurrency,
            progress=lambda done, total, what: bar.update(
                task, completed=done, total=total, description=f"recording {what}"
            ),
        )  # fmt: skip
        seconds["recording"] = time.perf_counter() - started
        started = time.perf_counter()
        costs = measure_costs(
            engine, configs, prompts, params, key={}, concurrency=concurrency,
            progress=lambda done, total, what: bar.update(
                task, completed=done, total=total, description=f"timing {what}"
            ),
        )  # fmt: skip
        seconds["costs"] = time.perf_counter() - started
    simulator = Simulator(traces, costs)
    started = time.perf_counter()
    predictions = {label: simulator.predict(point) for label, point in points.items()}
    seconds["prediction"] = time.perf_counter() - started
    return traces, costs, predictions, seconds


def measure(
    engine: Engine,
    points: dict[str, Point],
    prompts: list[list[int]],
    params: SamplingParams,
    concurrency: int,
    repetitions: int,
    console: Console,
) -> dict[str, tuple[float, float]]:
    """Goodput over AR's, and mean accepted length, for each label: medians of paired runs."""
    backend, ar = LocalBackend(engine), SpeculationConfig(method="ar")
    groups = [prompts[i : i + concurrency] for i in range(0, len(prompts), concurrency)]
    labels = list(points)
    seconds = np.zeros((len(labels), 2, len(groups), repetitions))
    lengths = {}
    with Progress(console=console) as bar:
        task = bar.add_task("measuring", total=len(labels) * len(groups) * repetitions)
        for speculation in (ar, *(point.speculation for point in points.values())):
            backend.generate(speculation, groups[0][:1], SamplingParams(max_tokens=8))
        for repetition in range(repetitions):
            backend.forget()
            for g, group in enumerate(groups):
                for turn in range(len(labels)):
                    i = (turn + g + repetition) % len(labels)
                    bar.update(task, advance=1, description=f"measuring {labels[i]}")
                    run = backend.generate(points[labels[i]].speculation, group, params)
                    base = backend.generate(ar, group, params)
                    seconds[i, :, g, repetition] = run.seconds, base.seconds
                    for sequence in run.sequences:
                        tokens, forwards = lengths.get(labels[i], (0, 0))
                        tokens += len(sequence.token_ids)
                        lengths[labels[i]] = tokens, forwards + sequence.num_target_forwards
    totals = np.median(seconds, axis=-1).sum(axis=-1)  # [labels, 2]
    return {
        label: (float(totals[i, 1] / totals[i, 0]), lengths[label][0] / lengths[label][1])
        for i, label in enumerate(labels)
    }


def many_points(count: int) -> list[Point]:
    """``count`` different points of families that METHODS has."""
    points = []
    for number in range(count):
        depth, rest = 1 + number % 16, number // 16
        branching, nodes = 2 + rest % 4, 8 + rest // 4
        knobs: dict[str, Any] = {"shape": "kary", "branching": branching, "node_budget": nodes}
        points.append(
            Point(
                speculation=SpeculationConfig(
                    method="draft_model", num_speculative_tokens=depth, **knobs
                )
            )
        )
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, help="model folder; default: the demo's")
    parser.add_argument("--drafter", type=Path, help="its draft model")
    parser.add_argument("--methods", help="as for `paceline bench`; default: about thirty")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--simulate", type=int, default=5000, help="time so many predictions")
    parser.add_argument("--threads", type=int, help="CPU threads; default: 1 for a small target")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    set_threads(options.threads, options.target)
    console = Console(stderr=True)
    engine = load_engine(options.target, options.drafter)
    assert engine.tokenizer is not None
    prompts = [
        engine.tokenizer.encode(prompt.text)
        for prompt in limit_per_category(builtin_prompts(), options.limit)
    ]
    params = SamplingParams(
        temperature=options.temperature, max_tokens=options.max_tokens, ignore_eos=True
    )
    backend = LocalBackend(engine)
    chosen = parse_methods(
        options.methods or METHODS, backend.methods, unavailable=backend.unavailable
    )
    points = {
        label: Point(speculation=config) for label, (config, _) in chosen.items() if label != "ar"
    }
    traces, costs, predictions, seconds = predict(
        engine, points, prompts, params, options.concurrency, console
    )
    simulator = Simulator(traces, costs)
    started = time.perf_counter()
    count = len(simulator.predict_all(many_points(options.simulate)))
    seconds["many"] = time.perf_counter() - started
    measured = measure(
        engine, points, prompts, params, options.concurrency, options.repetitions, console
    )
    report(points, predictions, measured, seconds, count, options.json)


def report(
    points: dict[str, Point],
    predictions: dict[str, PredictedResult | None],
    measured: dict[str, tuple[float, float]],
    seconds: dict[str, float],
    count: int,
    file: Path | None,
) -> None:
    """Print and write what came out."""
    from scipy.stats import spearmanr  # type: ignore[import-untyped]

    table = Table("method", "predicted", "measured", "off by", "τ predicted", "τ measured")
    pairs: list[tuple[float, float]] = []
    rows = []
    for label in sorted(points, key=lambda label: -measured[label][0]):
        ratio, length = measured[label]
        found = predictions[label]
        row: dict[str, Any] = {"method": label, "measured": ratio, "tau_measured": length}
        cells = [label, "-", f"{ratio:.2f}", "-", "-", f"{length:.2f}"]
        if found is not None:
            pairs.append((found.goodput_ratio, ratio))
            row |= {"predicted": found.goodput_ratio, "tau_predicted": found.mean_accepted_length}
            off = found.goodput_ratio / ratio - 1
            cells[1], cells[3] = f"{found.goodput_ratio:.2f}", f"{100 * off:+.0f} %"
            cells[4] = f"{found.mean_accepted_length:.2f}"
        table.add_row(*cells)
        rows.append(row)
    rho = float(spearmanr(*zip(*pairs, strict=True)).statistic)
    error = median(abs(predicted / real - 1) for predicted, real in pairs)
    Console(width=140).print(table)
    print(f"Spearman's rho {rho:.3f} over {len(pairs)} points; median error {100 * error:.0f} %")
    print(
        f"recording {seconds['recording']:.1f} s, costs {seconds['costs']:.1f} s, "
        f"{count} predictions {seconds['many']:.1f} s"
    )
    if file:
        result = {
            "spearman": rho,
            "median_error": error,
            "points": rows,
            "seconds": seconds,
            "environment": describe_environment(),
        }
        file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
