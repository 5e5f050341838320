"""Benchmarks: every method against AR, in one process, on the same prompts."""

from paceline.bench.backends import Backend, BatchRun, LocalBackend, SequenceRun
from paceline.bench.page import render_csv, render_page
from paceline.bench.run import BenchOptions, parse_methods, run_bench
from paceline.bench.table import render_table

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
