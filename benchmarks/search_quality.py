"""A search against the whole space: how good is what it finds, and how long did it take?

Measures every point of a space (a grid without early stopping), then searches the same space as a
sweep does. Printed are: how the search's best configuration ranks in the grid's measurements, the
share of the grid's measuring time that the search took, traces and confirmation included, and how
well the simulator's order agrees with the measured one (Spearman's rho).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from scipy.stats import spearmanr

from tuning.results import Results, best_trial
from tuning.space import read_space
from tuning.sweep import Sweep

SPACE = Path(__file__).with_name("search_space.yaml")


def run(space: Path, folder: Path, changes: list[str], console: Console) -> Results:
    checked = read_space(space, changes)
    results = Results(str(folder))
    Sweep(checked, results, console, resume=results.exists()).run()
    return results


def compare(grid: Results, search: Results) -> dict[str, Any]:
    """What the search found and missed, by the grid's measurements."""
    measured = {
        record.key: record.objective("goodput").value for record in grid.trials() if record.counts
    }
    found = best_trial(search.trials(), "goodput")
    assert found is not None
    best_key = max(measured, key=lambda key: measured[key])
    predicted = {each.key: each.goodput_ratio for each in search.predictions()}
    both = sorted(predicted.keys() & measured.keys())
    rho = spearmanr([predicted[key] for key in both], [measured[key] for key in both]).statistic
    seconds = search.manifest().seconds
    spent = sum(seconds.get(stage, 0.0) for stage in ("simulation", "trials", "confirm"))
    exhaustive = grid.manifest().seconds["trials"]
    labels = {record.key: record.point.label for record in grid.trials()}
    return {
        "points": len(measured),
        "best_of_grid": {"label": labels[best_key], "ratio": measured[best_key]},
        "found": {"label": found.point.label, "ratio_in_grid": measured[found.key]},
        "found_over_best": measured[found.key] / measured[best_key],
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
    parser.add_argument("--folder", type=Path, help="keep both sweeps here; goes on where it was")
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
    result = compare(grid, search)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    out = Console()
    best, found = result["best_of_grid"], result["found"]
    for line in (
        f"{result['points']} points measured in {result['grid_seconds']:.0f} s; best: "
        f"{best['label']}, {best['ratio']:.2f} times AR",
        f"search: {result['trials']} trials, {result['search_seconds']:.0f} s "
        f"({result['share_of_time']:.0%} of the grid's time, traces included)",
        f"found: {found['label']}, {found['ratio_in_grid']:.2f} times AR in the grid's "
        f"measurement, {result['found_over_best']:.1%} of the best",
        f"simulator: Spearman's rho {result['spearman']:.2f} over {result['simulated']} points",
    ):
        out.print(line, highlight=False)


if __name__ == "__main__":
    main()
