"""The kernels' products against the roofline of this machine, for every variant that it runs.

    python -m benchmarks.kernels [--variants avx2,avx512] [--models demo,135M,0.3B]
        [--dtypes float32,int8] [--rows 1,8] [--threads 1] [--json FILE] [--markdown]

A row of the table is a forward's products (those of all layers and the output layer), with weights
that no cache holds. `float32/2` stands for float32 inputs and weights that bfloat16 can hold, as in
most checkpoints. The share is the roofline's time over the measured time. The roofline is the time
that the slower of arithmetic and memory takes at the speeds measured in the same run: a loop of
multiply-adds in registers and a read of an array of 256 MB.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from paceline.bench.environment import describe_environment
from paceline.bench.kernels import DTYPES, MODELS, ROWS, ProductTiming, measure
from paceline.loading import limit_threads
from paceline.models import kernels

# At least this share of the roofline: for one row, and for 8 and 16.
WANTED = {1: 0.7, 8: 0.6, 16: 0.6}


def _chosen(text: str, allowed: Sequence[str], option: str) -> list[str]:
    names = text.split(",") if text else list(allowed)
    for name in names:
        if name not in allowed:
            sys.exit(f"{option}: {name!r} is none of {', '.join(allowed)}")
    return names


def show(cell: ProductTiming) -> str:
    """One line of the table."""
    return (
        f"{cell.variant:12} {cell.model:5} {cell.dtype:10} {cell.rows:4} "
        f"{1e3 * cell.seconds:9.3f} {cell.flops / 1e9:8.1f} {cell.bytes / 1e9:7.1f} "
        f"{cell.share:6.2f}{'  low' if cell.share < WANTED.get(cell.rows, 0) else ''}"
    )


def markdown(cells: Sequence[ProductTiming]) -> str:
    """Variants side by side: milliseconds and share of the roofline."""
    variants = list(dict.fromkeys(cell.variant for cell in cells))
    found = {(c.model, c.dtype, c.rows, c.variant): c for c in cells}
    lines = [
        "| model | weights | rows | " + " | ".join(variants) + " |",
        "|---|---|--:|" + "--:|" * len(variants),
    ]
    for model, dtype, rows in dict.fromkeys(key[:3] for key in found):
        values = [found[model, dtype, rows, variant] for variant in variants]
        shown = " | ".join(f"{1e3 * c.seconds:.2f} ms, {c.share:.2f}" for c in values)
        lines.append(f"| {model} | {dtype} | {rows} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", default="", help="default: all that this processor runs")
    parser.add_argument("--models", default="", help="of " + ",".join(m.name for m in MODELS))
    parser.add_argument("--dtypes", default="", help="of " + ",".join(DTYPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each cell")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--markdown", action="store_true", help="a table of all variants")
    options = parser.parse_args()
    names = _chosen(options.models, [m.name for m in MODELS], "--models")
    variants = _chosen(options.variants, list(kernels.runnable()), "--variants")
    dtypes = _chosen(options.dtypes, DTYPES, "--dtypes")
    rows = [int(count) for count in options.rows.split(",")]
    limit_threads(options.threads)
    environment = describe_environment()
    print(
        f"{environment['cpu']}, {environment['cores']} cores; {options.threads} threads; "
        f"commit {environment['git_commit']}"
    )
    print(
        f"{'variant':12} {'model':5} {'weights':10} {'rows':>4} {'ms':>9} {'GFLOP/s':>8} "
        f"{'GB/s':>7} {'share':>6}"
    )
    cells = measure(
        variants,
        [m for m in MODELS if m.name in names],
        dtypes,
        rows,
        options.threads,
        options.seconds,
        lambda cell: print(show(cell), flush=True),
    )
    if options.markdown:
        print("\n" + markdown(cells))
    if options.json:
        document = {
            "environment": environment,
            "cells": [asdict(c) | {"share": c.share} for c in cells],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    low = [cell for cell in cells if cell.share < WANTED.get(cell.rows, 0)]
    print(f"{len(cells)} cells, {len(low)} below {WANTED[1]} (one row) or {WANTED[8]} (8 and 16)")


if __name__ == "__main__":
    main()
