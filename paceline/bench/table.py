"""A benchmark's result as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.bench.templating import number


def render_table(result: Mapping[str, Any], console: Console) -> None:
    """Print a result of :func:`paceline.bench.run_bench`: a section for each category."""
    environment, rows = result["environment"], result["results"]
    console.print(
        f"[bold]{escape(str(environment['target']))}[/] · {environment['dtype']} · "
        f"{environment['device']} · {escape(str(environment['cpu']))}, {environment['cores']} "
        f"cores, {environment['threads']} threads · torch {environment['torch']}"
    )
    console.print(
        f"batch {environment['batch']} · {environment['max_tokens']} tokens a prompt · "
        f"temperature {environment['temperature']} · {environment['repetitions']} repetitions"
    )
    if environment["fingerprint"]:
        console.print(f"numerics {environment['fingerprint']}", soft_wrap=True)
    several = {
        "topology": len({row["topology"] for row in rows}) > 1,
        "batch_invariant": environment["batch_invariant"] == "both",
    }
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("method")
    if several["topology"]:
        table.add_column("topology")
    if several["batch_invariant"]:
        table.add_column("invariant")
    wide = console.width >= 110
    spread = ["p25–p75"] if wide else []
    added = ["added ms"] if several["topology"] else []
    for name in ("tok/s", *spread, "× AR", *spread, "bound", "τ", "α", "= AR", "round ms", *added):
        table.add_column(name, justify="right", no_wrap=True)
    category = None
    for row in fastest_first(rows):
        if row["category"] != category:
            category = row["category"]
            if table.rows:
                table.add_row("")
            table.add_row(f"[bold cyan]{escape(category)}[/] ({row['num_prompts']} prompts)")
        cells = [escape(row["method"])]
        if several["topology"]:
            cells.append(row["topology"])
        if several["batch_invariant"]:
            cells.append({True: "on", False: "off", None: "–"}[row["batch_invariant"]])
        table.add_row(
            *cells,
            f"{row['tokens_per_second']:.1f}",
            *([f"{row['p25']:.1f}–{row['p75']:.1f}"] if wide else []),
            f"[bold]{row['speedup_vs_ar']:.2f}[/]",
            *([f"{row['speedup_p25']:.2f}–{row['speedup_p75']:.2f}"] if wide else []),
            number(row["speedup_bound"], ".2f"),
            number(row["mean_accepted_length"], ".2f"),
            number(row["acceptance_rate"], ".2f"),
            _identity(row),
            number(row["round_ms_p50"], ".2f"),
            *([number(row["added_round_ms_p50"], "+.2f")] if added else []),
        )
    console.print(table)
    console.print(
        "[dim]tok/s: medians from end to end, prefill included; × AR: median of paired ratios; "
        "bound: × AR if drafts took no time, τ × cost of a round of AR / cost of that round with "
        "the forwards that verify these drafts; τ: mean accepted length; α: acceptance rate; = AR: "
        "the same token ids as AR; round: from tokens to tokens (p50); added: over the same round "
        "in one process[/]"
    )
    if "batch_invariant_cost" in result:
        console.print("[bold]one forward, batch-invariant mode on / off[/]")
        for cost in result["batch_invariant_cost"]:
            console.print(
                f"  {cost['num_tokens']:>2} tokens: {cost['on_ms']:.2f} / {cost['off_ms']:.2f} ms "
                f"(× {cost['cost']:.2f}); "
                f"on in plain torch {cost['torch_on_ms']:.2f} ms (× {cost['cost_in_torch']:.2f})"
            )
    reasons: dict[str, list[str]] = {}
    for row in result["unavailable"]:
        reasons.setdefault(row["reason"], []).append(row["method"])
    for reason, names in reasons.items():
        console.print(f"[dim]not run ({escape(reason)}): {escape(', '.join(names))}[/]")
    remarks = dict.fromkeys(f"{row['method']}: {row['note']}" for row in rows if row["note"])
    for note in [*result["notes"], *remarks]:
        console.print(f"[dim]{escape(note)}[/]")


def fastest_first(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Categories in their order, and in each the largest speedup first."""
    categories = list(dict.fromkeys(row["category"] for row in rows))
    return sorted(rows, key=lambda r: (categories.index(r["category"]), -r["speedup_vs_ar"]))


def _identity(row: Mapping[str, Any]) -> str:
    if row["identical_to_ar"] is None:
        return "–"
    if row["identical_to_ar"]:
        return "[green]yes[/]"
    return f"[red]{100 * row['mismatch_rate']:.0f} % differ[/]"
