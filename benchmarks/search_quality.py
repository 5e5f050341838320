"""A search against the whole space: how good is what it finds, and how long did it take?

Searches a space as a sweep does, then measures every point of it (a grid without early stopping).
The highest of a hundred noisy measurements is high partly by chance, so the grid's best points and
the search's result are measured again, side by side, with many repetitions. It prints how near the
search's result is to the best of them, the share of the grid's measuring time that the search took
(traces and confirmation included), and how well the simulator's order agrees with the grid's
(Spearman's rho).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from scipy.stats import spearmanr

from paceline.tuning.results import Interval, Metrics, Point, Results, best_trial
from paceline.tuning.space import Space, read_space
from paceline.tuning.stages import Sweep
from paceline.tuning.trial import Work, confirm

CANDIDATES = 4
SPACE = Path(__file__).with_name("search_space.yaml")


def run(space: Path, folder: Path, changes: list[str], console: Console) -> Results:
    checked = read_space(space, changes)
    results = Results(str(folder))
    Sweep(checked, results, console, resume=results.exists()).run()
    return results


def side_by_side(space: Space, points: list[Point]) -> list[Interval]:
    """Goodput over AR's of some points, measured in turn in one process."""
    cpus = float(ray.cluster_resources()["CPU"])
    work = Work(document=space.as_dict(), prompts=space.prompts, num_cpus=cpus)
    texts = [point.model_dump_json(exclude_defaults=True) for point in points]
    answers: list[str] = ray.get(ray.remote(num_cpus=cpus)(confirm).remote(work, texts))
    return [Metrics.model_validate_json(text).goodput_ratio for text in answers]


def compare(space: Space, grid: Results, search: Results) -> dict[str, Any]:
    """What the search found and missed."""
    measured = {
        record.key: record.objective("goodput").value for record in grid.trials() if record.counts
    }
    found = best_trial(search.trials(), "goodput")
    assert found is not None
    points = {record.key: record.point for record in grid.trials()}
    ranked = sorted(measured, key=lambda key: -measured[key])
    chosen = list(dict.fromkeys([*ranked[:CANDIDATES], found.key]))
    intervals = dict(zip(chosen, side_by_side(space, [points[k] for k in chosen]), strict=True))
    best_key = max(intervals, key=lambda key: intervals[key].value)
    predicted = {each.key: each.goodput_ratio for each in search.predictions()}
    both = sorted(predicted.keys() & measured.keys())
    rho = spearmanr([predicted[key] for key in both], [measured[key] for key in both]).statistic
    seconds = search.manifest().seconds
    spent = sum(seconds.get(stage, 0.0) for stage in ("simulation", "trials", "confirm"))
    exhaustive = grid.manifest().seconds["trials"]
    return {
        "points": len(measured),
        "side_by_side": [
            {
                "label": points[key].label,
                "in_grid": measured[key],
                "again": intervals[key].model_dump(),
            }
            for key in chosen
        ],
        "best": points[best_key].label,
        "found": found.point.label,
        "found_over_best": intervals[found.key].value / intervals[best_key].value,
        "grid_seconds": exhaustive,
        "search_seconds": spent,
        "share_of_time": spent / exhaustive,
        "trials": len(search.trials()),
        "spearman": float(rho),
        "simulated": len(both),
        "environment": search.manifest().environment,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--space", type=Path, default=SPACE)
    parser.add_argument("--folder", type=Path, help="folder that keeps both sweeps, to resume from")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the space"
    )
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    console = Console(stderr=True)
    folder = options.folder or Path(tempfile.mkdtemp())
    changes = list(options.set)
    search = run(options.space, folder / "search", changes, console)
    grid_changes = [
        *changes, "search.algorithm=grid", "search.trials=null", "search.early_stopping=false",
        "search.simulate=false", "search.confirm=1",
    ]  # fmt: skip
    grid = run(options.space, folder / "grid", grid_changes, console)
    thorough = ["measurement.repetitions=12", "measurement.min_effect=0.015"]
    result = compare(read_space(options.space, [*changes, *thorough]), grid, search)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    out = Console(soft_wrap=True)
    out.print(f"{result['points']} points measured in {result['grid_seconds']:.0f} s")
    for row in result["side_by_side"]:
        again = row["again"]
        out.print(
            f"  {row['label']}: {row['in_grid']:.2f} in the grid, {again['value']:.2f} "
            f"({again['low']:.2f} to {again['high']:.2f}) side by side",
            highlight=False,
        )
    out.print(
        f"search: {result['trials']} trials, {result['search_seconds']:.0f} s "
        f"({result['share_of_time']:.0%} of the grid's time, traces included); found "
        f"{result['found']}, {result['found_over_best']:.1%} of the best",
        highlight=False,
    )
    out.print(
        f"simulator: Spearman's rho {result['spearman']:.2f} over {result['simulated']} points",
        highlight=False,
    )


if __name__ == "__main__":
    main()
