"""Acceptance and speedup of self-drafting over exit layer x speculation length, as heat maps.

Every cell is the method `layer_skip` with an exit layer and a speculation length, measured by
`paceline bench` against AR on the same prompts: medians of paired ratios. The method `del` chooses
both by itself. The highest of many noisy cells is high partly by chance, so the three fastest and
`del` run again side by side, on more prompts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from paceline.bench import BenchOptions, run_bench
from paceline.cluster.cli_output import set_threads

FIELDS = (
    "acceptance_rate", "mean_accepted_length", "speedup_vs_ar", "workload_speedup_vs_ar",
)  # fmt: skip
CONFIRMED = 3  # cells


def measure(
    exits: list[int], lengths: list[int], limit: int, repetitions: int, target: Path | None
) -> dict[str, Any]:
    """Acceptance rate, mean accepted length and speedup of each cell, and those of `del`."""
    names = {
        (exit_layer, length): f"layer_skip:exit_layer={exit_layer}:num_speculative_tokens={length}"
        for exit_layer in exits
        for length in lengths
    }
    rows, environment = bench([*names.values(), "del"], limit, repetitions, target)
    cells = [{"exit_layer": e, "length": g, **rows[name]} for (e, g), name in names.items()]
    fastest = sorted(names.values(), key=lambda name: -rows[name]["speedup_vs_ar"])[:CONFIRMED]
    again, _ = bench([*fastest, "del"], 2 * limit, repetitions, target)
    return {
        "exits": exits,
        "lengths": lengths,
        "cells": cells,
        "del": rows["del"],
        "side_by_side": again,
        "environment": environment,
    }


def bench(
    methods: list[str], limit: int, repetitions: int, target: Path | None
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """FIELDS of each method over all prompts, and the environment."""
    options = BenchOptions(
        target=target,
        methods=",".join(methods),
        limit=limit,
        repetitions=repetitions,
        peers=False,
    )
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring")
        result = run_bench(
            options,
            progress=lambda done, total, what: bar.update(
                task, completed=done, total=total, description=what
            ),
        )
    rows = {
        row["method"]: {field: row[field] for field in FIELDS}
        for row in result["results"]
        if row["category"] == "all"
    }
    return rows, result["environment"]


def draw(result: dict[str, Any], file: Path) -> None:
    """Two heat maps side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    exits, lengths = result["exits"], result["lengths"]
    # The speedup's colours meet at 1: red cells are slower than AR.
    speedups = [cell["speedup_vs_ar"] for cell in result["cells"]]
    reach = max(0.5, *(abs(value - 1) for value in speedups))
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    for axis, field, title, colours, limits in (
        (axes[0], "acceptance_rate", "acceptance rate", "viridis", (0.0, 1.0)),
        (axes[1], "speedup_vs_ar", "speedup over AR", "RdYlGn", (1 - reach, 1 + reach)),
    ):
        values = np.zeros((len(lengths), len(exits)))
        for cell in result["cells"]:
            place = lengths.index(cell["length"]), exits.index(cell["exit_layer"])
            values[place] = cell[field]
        image = axis.imshow(
            values, aspect="auto", origin="lower", cmap=colours, vmin=limits[0], vmax=limits[1]
        )
        for (y, x), value in np.ndenumerate(values):
            red, green, blue, _ = image.cmap(image.norm(value))
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            ink = "white" if dark else "black"
            axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize="small", color=ink)
        axis.set_xticks(range(len(exits)), [str(e) for e in exits])
        axis.set_yticks(range(len(lengths)), [str(g) for g in lengths])
        axis.set(title=title, xlabel="exit layer", ylabel="speculation length")
        figure.colorbar(image, ax=axis)
    y, x = np.unravel_index(values.argmax(), values.shape)  # of the speedups, the last drawn
    frame = Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="black", linewidth=2)
    frame.set_clip_on(False)
    axes[1].add_patch(frame)
    figure.suptitle(
        "Self-drafting from an early exit (frame: fastest). The method del chooses both: "
        f"acceptance {result['del']['acceptance_rate']:.2f}, "
        f"speedup {result['del']['speedup_vs_ar']:.2f}",
        fontsize="medium",
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--target", type=Path, help="a Llama-type model folder; default: the demo's"
    )
    parser.add_argument("--exits", type=int, nargs="+", default=[2, 4, 6, 8, 10, 12])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--limit", type=int, default=2, help="prompts of each category")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("docs/figures/exit_layers.png"))
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    set_threads(None, options.target)
    result = measure(
        options.exits, options.lengths, options.limit, options.repetitions, options.target
    )
    draw(result, options.out)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    best = max(result["cells"], key=lambda cell: cell["speedup_vs_ar"])
    print(f"best: exit {best['exit_layer']}, length {best['length']}: ", end="")
    print(f"{best['speedup_vs_ar']:.2f} x AR at acceptance {best['acceptance_rate']:.2f}")
    print(f"del:  {result['del']['speedup_vs_ar']:.2f} x AR")
    for field, what in (
        ("speedup_vs_ar", "median of the prompts"),
        ("workload_speedup_vs_ar", "all prompts together"),
    ):
        again = {name: row[field] for name, row in result["side_by_side"].items()}
        fixed = max(value for name, value in again.items() if name.startswith("layer_skip"))
        print(f"side by side, {what}: best of {CONFIRMED} {fixed:.2f} x AR, del ", end="")
        print(f"{again['del']:.2f} ({again['del'] / fixed:.0%})")
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
