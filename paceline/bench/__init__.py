"""Benchmarks: every method against AR, in one process, on the same prompts.

Names are imported when they are first used: what reads and shows results loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "Backend": "paceline.bench.backends",
    "BatchRun": "paceline.bench.backends",
    "BenchOptions": "paceline.bench.run",
    "LocalBackend": "paceline.bench.backends",
    "SequenceRun": "paceline.bench.backends",
    "parse_methods": "paceline.bench.run",
    "render_csv": "paceline.bench.page",
    "render_page": "paceline.bench.page",
    "render_table": "paceline.bench.table",
    "run_bench": "paceline.bench.run",
}

__all__ = [
    "Backend",
    "BatchRun",
    "BenchOptions",
    "LocalBackend",
    "SequenceRun",
    "parse_methods",
    "render_csv",
    "render_page",
    "render_table",
    "run_bench",
]

if TYPE_CHECKING:
    from paceline.bench.backends import Backend, BatchRun, LocalBackend, SequenceRun
    from paceline.bench.page import render_csv, render_page
    from paceline.bench.run import BenchOptions, parse_methods, run_bench
    from paceline.bench.table import render_table


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'paceline.bench' has no attribute {name!r}")
