"""How cost grows: rounds a second and memory against context, batch and node budget.

    python benchmarks/scaling.py                 # under five minutes; results/scaling.json, a plot
    python benchmarks/scaling.py --write-docs    # the section in docs/performance.md as well
    python benchmarks/scaling.py --quick

A round is measured by its forward (the last token and the drafted ones of each session) and the
release of their KV entries. (What the engine adds is 0.06 to 0.15 ms, docs/performance.md; drafting
is
another model's cost.) The fastest of many calls counts. The demo target's context is stretched to
8,192 positions; the quality of its output there does not matter. Attention is the forward's time
minus that of the same rows with next to no context. Memory is that of the process (RSS) and the KV
entries that sessions hold. The report names each super-linear spot, where one more unit costs more
than 1.3 times what any unit cost before.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.load import longer
from paceline.bench.environment import describe_environment
from paceline.demo import TARGET_DIR
from paceline.loading import limit_threads, load_runner
from paceline.models.base import KVSequence, Segment
from paceline.models.llama import LlamaRunner

CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32)
BUDGETS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
SUPER_LINEAR = 1.3
BEGIN, END = "<!-- benchmarks/scaling.py writes from here -->", "<!-- to here -->"


def rss_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


class Bench:
    """A runner with sequences of a given length."""

    def __init__(self, runner: LlamaRunner, repeats: int) -> None:
        self.runner, self.repeats = runner, repeats
        config = runner.config
        self.entry_bytes = (
            2 * config.num_layers * config.num_kv_heads * config.head_dim * runner.dtype.itemsize
        )

    def extend(self, sequence: KVSequence, length: int) -> float:
        """Commit tokens up to ``length``; returns the seconds that took."""
        started = time.perf_counter()
        while sequence.length < length:
            count = min(256, length - sequence.length)
            ids = np.arange(count, dtype=np.int64) * 7 % self.runner.vocab_size
            self.runner.forward([Segment(sequence, ids, logits="none")])
            self.runner.commit(sequence, range(count))
        return time.perf_counter() - started

    def forward(self, sequences: Sequence[KVSequence], nodes: int, width: int = 1) -> float:
        """Milliseconds (fastest call) of a round: a token and ``nodes`` drafted ones for each.

        ``width`` 1 is a chain, 2 a binary tree.
        """
        ids = np.arange(1 + nodes, dtype=np.int64) % self.runner.vocab_size
        parents = None
        if width > 1:
            parents = np.array([-1, *((i - 1) // width for i in range(1, nodes + 1))], np.int32)
        times = []
        for turn in range(self.repeats + 1):
            segments = [Segment(each, ids, parents) for each in sequences]
            started = time.perf_counter()
            self.runner.forward(segments)
            for each in sequences:
                self.runner.commit(each, ())
            if turn:
                times.append(time.perf_counter() - started)
        return 1e3 * min(times)

    def sequences(self, count: int, length: int) -> list[KVSequence]:
        made = [self.runner.new_sequence() for _ in range(count)]
        for each in made:
            self.extend(each, length)
        return made

    def memory(self, sequences: Sequence[KVSequence]) -> dict[str, float]:
        entries = sum(each.length for each in sequences)
        return {"rss_mb": rss_mb(), "kv_mb": entries * self.entry_bytes / 1e6}


def by_context(bench: Bench, contexts: Sequence[int]) -> list[dict[str, Any]]:
    """One session, AR and a chain of eight."""
    (sequence,) = bench.sequences(1, 1)
    base = {nodes: bench.forward([sequence], nodes) for nodes in (0, 8)}
    rows = []
    for context in contexts:
        seconds = bench.extend(sequence, context - 16)  # room for the draft
        row: dict[str, Any] = {"context": context, "prefill_s": seconds}
        for nodes in (0, 8):
            row[f"ms_{nodes}"] = ms = bench.forward([sequence], nodes)
            row[f"attention_ms_{nodes}"] = ms - base[nodes]
        rows.append(row | bench.memory([sequence]))
    bench.runner.free(sequence)
    return rows


def by_batch(bench: Bench, batches: Sequence[int]) -> list[dict[str, Any]]:
    """Sessions with 256 tokens each, AR and a chain of four."""
    sequences: list[KVSequence] = []
    rows = []
    for batch in batches:
        sequences += bench.sequences(batch - len(sequences), 256)
        short = bench.sequences(batch, 1)
        row: dict[str, Any] = {"batch": batch}
        for nodes in (0, 4):
            row[f"ms_{nodes}"] = ms = bench.forward(sequences, nodes)
            row[f"attention_ms_{nodes}"] = ms - bench.forward(short, nodes)
        for each in short:
            bench.runner.free(each)
        rows.append(row | bench.memory(sequences))
    for each in sequences:
        bench.runner.free(each)
    return rows


def by_budget(bench: Bench, budgets: Sequence[int]) -> list[dict[str, Any]]:
    """One session with 256 tokens, a chain and a binary tree, by number of nodes."""
    (sequence,), (short,) = bench.sequences(1, 256), bench.sequences(1, 1)
    rows = []
    for nodes in budgets:
        row: dict[str, Any] = {"nodes": nodes}
        for name, width in (("chain", 1), ("tree", 2)):
            row[f"ms_{name}"] = ms = bench.forward([sequence], nodes, width)
            row[f"attention_ms_{name}"] = ms - bench.forward([short], nodes, width)
        rows.append(row | bench.memory([sequence]))
    bench.runner.free(sequence)
    bench.runner.free(short)
    return rows


def super_linear(rows: Sequence[dict[str, Any]], x: str, y: str) -> list[dict[str, float]]:
    """Where one more unit of ``x`` costs more than 1.3 times what any cost before.

    The comparison is with any unit before, because a drop where threads start to share work makes
    the preceding unit look cheap.
    """
    found, highest = [], float("inf")
    for a, b in pairwise(rows):
        slope = (b[y] - a[y]) / (b[x] - a[x])
        if slope > SUPER_LINEAR * highest:
            found.append({"at": b[x], "before": highest, "then": slope})
        highest = slope if highest == float("inf") else max(highest, slope)
    return found


CURVES: dict[str, tuple[str, Callable[[Bench, Sequence[int]], list[dict[str, Any]]]]] = {
    "context": ("context", by_context),
    "batch": ("batch", by_batch),
    "budget": ("nodes", by_budget),
}


def show(name: str, x: str, rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"by {name}", box=None)
    keys = [key for key in rows[0] if key != x]
    for key in (x, *keys):
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(str(row[x]), *(f"{row[key]:.2f}" for key in keys))
    console.print(table)


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6.5), layout="constrained")
    for column, (name, (x, _)) in enumerate(CURVES.items()):
        rows = result["curves"][name]
        values = [row[x] for row in rows]
        top, bottom = axes[0][column], axes[1][column]
        for key in [key for key in rows[0] if key.startswith("ms_")]:
            top.plot(values, [1e3 / row[key] for row in rows], marker="o", label=_label(key))
        top.set(ylabel="rounds a second", yscale="log", title=f"by {name}")
        bottom.plot(values, [row["kv_mb"] for row in rows], marker="o", label="KV entries")
        bottom.plot(values, [row["rss_mb"] for row in rows], marker="o", label="process (RSS)")
        bottom.set(xlabel={"nodes": "nodes in a draft"}.get(x, x), ylabel="MB", ylim=(0, None))
        top.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        top.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        top.minorticks_off()
        for axis in (top, bottom):
            axis.set_xscale("symlog" if x == "nodes" else "log", base=2)
            axis.set_xlim(values[0] - 0.2 if x == "nodes" else None, None)
            axis.set_xticks(values, [str(v) for v in values], fontsize=7)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write_docs(result: dict[str, Any], docs: Path) -> None:
    """Put the tables between the markers of docs/performance.md, and the plot beside it."""
    env = result["environment"]
    lines = [f"{env['cpu']}, {env['threads']} threads, {result['dtype']}, {env['date'][:10]}:", ""]
    for name, (x, _) in CURVES.items():
        rows = result["curves"][name]
        times = [key for key in rows[0] if key.startswith("ms_")]
        head = [
            x,
            *(f"{_label(key)}: ms (attention)" for key in times),
            "rounds/s",
            "KV MB",
            "RSS MB",
        ]
        lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for row in rows:
            cells = [f"{row[key]:.2f} ({max(0.0, row['attention_' + key]):.2f})" for key in times]
            rates = " / ".join(f"{1e3 / row[key]:.0f}" for key in times)
            memory = [f"{row['kv_mb']:.0f}", f"{row['rss_mb']:.0f}"]
            lines.append(f"| {' | '.join([str(row[x]), *cells, rates, *memory])} |")
        lines.append("")
    lines.append("Super-linear spots (one more unit costs over 1.3 times what any did before):")
    lines.append("")
    for note in result["notes"]:
        lines.append(
            f"- by {note['curve']}, {_label(note['of'])}, up to {note['at']:g}: "
            f"{1e3 * note['before']:.1f} → {1e3 * note['then']:.1f} µs each"
        )
    if not result["notes"]:
        lines.append("- none")
    page = docs / "performance.md"
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{page} has no place for the tables"
    page.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after)
    plot(result, docs / "figures" / "scaling.png")


def _label(key: str) -> str:
    kind = key.removeprefix("ms_")
    return {"0": "AR"}.get(kind, f"chain of {kind}" if kind.isdigit() else kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=TARGET_DIR, help="a Llama folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--out", type=Path, default=Path("results/scaling.json"))
    parser.add_argument("--plot", type=Path, help="default: beside --out")
    parser.add_argument("--write-docs", action="store_true", help="docs/performance.md, its plot")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    limit_threads(options.threads)
    console = Console()
    grids: dict[str, tuple[int, ...]] = {"context": CONTEXTS, "batch": BATCHES, "budget": BUDGETS}
    if options.quick:
        grids, options.repeats = {k: v[:3] for k, v in grids.items()}, 2
    result: dict[str, Any] = {
        "environment": describe_environment(), "dtype": options.dtype, "curves": {}, "notes": []
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        longest = longer(options.target, folder, max(CONTEXTS) + 256)
        for name, (x, measure) in CURVES.items():
            runner = load_runner(longest, dtype=options.dtype, kv_tokens=32768)
            assert isinstance(runner, LlamaRunner)
            rows = measure(Bench(runner, options.repeats), grids[name])
            result["curves"][name] = rows
            show(name, x, rows, console)
            for key in [key for key in rows[0] if key.startswith("ms_")]:
                for spot in super_linear(rows, x, key):
                    note = {"curve": name, "of": key, **spot}
                    result["notes"].append(note)
                    console.print(
                        f"super-linear: {key} at {x} {spot['at']}: one more costs "
                        f"{1e3 * spot['then']:.2f} µs, before {1e3 * spot['before']:.2f} µs"
                    )
            del runner
            gc.collect()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    plot(result, options.plot or options.out.with_suffix(".png"))
    console.print(f"written: {options.out}")
    if options.write_docs:
        write_docs(result, Path(__file__).resolve().parents[1] / "docs")


if __name__ == "__main__":
    main()
