"""A sweep on the terminal: what it found, and what changed from one sweep to another.

For each table there is a function that returns the same as JSON values (`--json`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from textwrap import shorten
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.tuning.results import (
    Interval,
    Manifest,
    Metrics,
    Point,
    Results,
    TrialRecord,
    best_trial,
    pareto_front,
)

NUM_BEST = 10
LENGTH = "num_speculative_tokens"
_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# Settings that differ between any two sweeps and tell nothing.
_ALWAYS_DIFFERENT = frozenset({"environment.date"})


def printable(text: str) -> str:
    """``text`` without escape sequences and control characters, for a terminal or a page."""
    plain = _ESCAPE_SEQUENCE.sub("", text)
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in plain
    )


def rank_correlation(records: Iterable[TrialRecord]) -> tuple[float | None, int]:
    """Spearman's rho between predicted and measured goodput, and the number of trials behind it.

    Returns:
        rho is None with fewer than three trials, or if all predictions or all measurements are
        equal. AR does not count: its ratio is known beforehand.
    """
    pairs = predicted_and_measured(records)
    predicted, measured = ([pair[i] for pair in pairs] for i in (0, 1))
    if len(pairs) < 3 or len(set(predicted)) == 1 or len(set(measured)) == 1:
        return None, len(pairs)
    from scipy.stats import spearmanr

    return float(spearmanr(predicted, measured).statistic), len(pairs)


def predicted_and_measured(
    records: Iterable[TrialRecord],
) -> list[tuple[float, float, TrialRecord]]:
    """Predicted and measured goodput ratios of the trials that have both, without AR."""
    return [
        (record.predicted, record.objective("goodput").value, record)
        for record in records
        if record.predicted is not None and record.metrics is not None and not record.point.is_ar
    ]


def best_first(records: Iterable[TrialRecord], objective: str) -> list[TrialRecord]:
    """The measured trials, the highest ratio first.

    Confirmed trials go before others, as for the best trial; those that do not count come last.
    """
    measured = [record for record in records if record.metrics is not None]
    return sorted(
        measured,
        key=lambda r: (not r.counts, r.confirmed is None, -r.objective(objective).value),
    )


def latest(record: TrialRecord) -> Metrics:
    """The metrics that tables show of a measured trial: the confirmation if there is one."""
    found = record.confirmed or record.metrics
    assert found is not None
    return found


def short_label(point: Point) -> str:
    """Method and knobs, with the speculation length as γ."""
    return _shortened(point.label)


def _shortened(label: str) -> str:
    return printable(label.replace(f"{LENGTH}=", "γ="))


def moment(text: str) -> str:
    """An ISO date in the form ``2026-11-20 10:14 UTC``; other text unchanged."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return printable(text)


def ratio(interval: Interval) -> str:
    """``1.52 [1.49, 1.56]``"""
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


# --- one sweep ------------------------------------------------------------------------------------


def summary(results: Results) -> dict[str, Any]:
    """What a sweep found, as JSON values.

    Returns:
        ``best`` and ``pareto`` hold keys of ``trials``, which has every trial that ended, the best
        first and those without a measurement last.

    Raises:
        InvalidArgument: there is no sweep.
    """
    manifest, records = results.manifest(), results.trials()
    objective = manifest.objectives[0]
    best = best_trial(records, objective)
    rho, num_compared = rank_correlation(records)
    unmeasured = [record for record in records if record.metrics is None]
    return {
        "result": results.url,
        "name": manifest.name,
        "state": manifest.state,
        "started": manifest.started,
        "finished": manifest.finished,
        "objectives": list(manifest.objectives),
        "num_points": manifest.num_points,
        "counts": _counts(records),
        "seconds": manifest.seconds,
        "best": None if best is None else best.key,
        "pareto": [r.key for r in pareto_front(records, manifest.objectives)],
        "predicted_vs_measured": {"spearman_rho": rho, "num_trials": num_compared},
        "trials": [_row(record) for record in [*best_first(records, objective), *unmeasured]],
        "files": {
            name: results.path(name)
            for name in ("best.yaml", "report.html")
            if results.exists(name)
        },
        "environment": manifest.environment,
        "space": manifest.space,
    }


def show(results: Results, console: Console) -> None:
    """Print what :func:`summary` returns: the best few trials, AR, counts, and the files.

    Raises:
        InvalidArgument: there is no sweep.
    """
    manifest, records = results.manifest(), results.trials()
    objective = manifest.objectives[0]
    _print_head(manifest, records, console)
    ordered = best_first(records, objective)
    if ordered:
        shown = ordered[:NUM_BEST]
        shown += [record for record in ordered[NUM_BEST:] if record.point.is_ar]
        front = pareto_front(records, manifest.objectives)
        console.print(
            _trial_table(
                manifest.objectives,
                shown,
                front,
                best_trial(records, objective),
                wide=console.width >= 100,
            )
        )
        if len(ordered) > len(shown):
            console.print(Text(f"and {len(ordered) - len(shown)} more", "dim"))
        meanings = [f"× AR: {objective} over AR's, with its confidence interval", "★: the best"]
        meanings += [f"γ: {LENGTH}", "τ: mean accepted length"]
        wide = console.width >= 100
        if wide:
            meanings += ["α: acceptance rate"]
        if wide and any(record.predicted is not None for record in shown):
            meanings += ["pred: the simulator's goodput ratio"]
        meanings += ["= AR: the same token ids as AR"]
        if any(record.confirmed is not None for record in shown):
            meanings += ["✓: measured once more, side by side"]
        if len(manifest.objectives) > 1:
            meanings += ["◆: no trial beats it in all objectives"]
        console.print(Text("; ".join(meanings), "dim"))
    else:
        console.print("no trial has been measured")
    rho, num_compared = rank_correlation(records)
    if rho is not None:
        console.print(
            f"predicted against measured: Spearman's rho {rho:.2f} over {num_compared} trials",
            highlight=False,
        )
    _print_reasons(records, console)
    for name in ("best.yaml", "report.html"):
        if results.exists(name):
            console.print(
                Text(f"{name:<12} {printable(results.path(name))}"), soft_wrap=True, highlight=False
            )
    if results.exists("best.yaml"):
        command = f"paceline up --config {printable(results.path('best.yaml'))}"
        console.print(Text(f"{'serve it':<12} {command}"), soft_wrap=True, highlight=False)


def counted(records: Iterable[TrialRecord]) -> str:
    """``trials: 20 finished, 3 stopped; 1 refused``: refused trials are among the measured."""
    counts = _counts(records)
    refused = counts.pop("refused")
    ended = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return "trials: " + (ended or "none") + (f"; {refused} refused" if refused else "")


def _counts(records: Iterable[TrialRecord]) -> dict[str, int]:
    records = list(records)
    statuses = Counter(record.status for record in records)
    return {
        "finished": statuses["finished"],
        "stopped": statuses["stopped"],
        "failed": statuses["failed"],
        "refused": sum(record.refused is not None for record in records),
    }


def _row(record: TrialRecord) -> dict[str, Any]:
    """A record with its label for tables, without the example draft, which the report shows."""
    hidden = {"metrics": {"example"}, "confirmed": {"example"}}
    values = record.model_dump(mode="json", exclude=hidden)
    values["point"]["speculation"] = record.point.speculation.overrides()
    return {**values, "label": record.point.label}


def _print_head(manifest: Manifest, records: Iterable[TrialRecord], console: Console) -> None:
    state = {"finished": "green", "running": "cyan"}.get(manifest.state, "yellow")
    ended = "" if manifest.finished is None else f" to {moment(manifest.finished)}"
    console.print(
        Text.assemble(
            (printable(manifest.name), "bold"), "  ", (manifest.state, state),
            (f"  {moment(manifest.started)}{ended}", "dim"),
        )
    )  # fmt: skip
    counts = [counted(records)]
    if manifest.num_points is not None:
        counts.append(f"{manifest.num_points} points in the space")
    seconds = [f"{stage} {seconds:.0f} s" for stage, seconds in manifest.seconds.items()]
    console.print(Text(" · ".join([*counts, *seconds])))


def _trial_table(
    objectives: Iterable[str],
    records: Iterable[TrialRecord],
    front: Iterable[TrialRecord],
    best: TrialRecord | None,
    *,
    wide: bool,
) -> Table:
    """A line for each trial; α and predictions only if there is room, and if there are any."""
    first, *others = objectives
    records = list(records)
    predictions = wide and any(record.predicted is not None for record in records)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, style="green")
    table.add_column("configuration", overflow="fold")
    # The interval has its own column, so that the estimates align.
    table.add_column("× AR", justify="right", no_wrap=True)
    table.add_column("interval", no_wrap=True, style="dim")
    numbers = [name.replace("latency_", "") for name in others] + ["tok/s", "τ"]
    numbers += [*(["α"] if wide else []), *(["pred"] if predictions else []), "= AR"]
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, style="yellow")
    on_front = {record.key for record in front} if others else set()
    for record in records:
        metrics, value = latest(record), record.objective(first)
        is_best = best is not None and record.key == best.key
        marks = "★" * is_best + "✓" * (record.confirmed is not None)
        marks += "◆" * (record.key in on_front)
        rate = "–" if record.point.is_ar else f"{metrics.acceptance_rate:.2f}"
        predicted = "–" if record.predicted is None else f"{record.predicted:.2f}"
        status = "refused" if record.refused is not None else record.status
        table.add_row(
            str(record.number),
            marks,
            Text(short_label(record.point)),
            Text(f"{value.value:.2f}", "bold" if is_best else ""),
            f"{value.low:.2f}–{value.high:.2f}",
            *(f"{record.objective(name).value:.2f}" for name in others),
            f"{metrics.tokens_per_second:.1f}",
            f"{metrics.mean_accepted_length:.2f}",
            *([rate] if wide else []),
            *([predicted] if predictions else []),
            _identity(metrics.identical_to_ar),
            "" if status == "finished" else status,
        )
    return table


def _identity(identical: bool | None) -> Text:
    if identical is None:
        return Text("–")
    return Text("yes", "green") if identical else Text("no", "red")


def _print_reasons(records: Iterable[TrialRecord], console: Console) -> None:
    """Print why trials failed or were refused, each reason once."""
    reasons: dict[str, list[str]] = {}
    for record in records:
        if record.status == "failed":
            text = f"failed ({shorten(printable(record.reason or 'no reason'), 300)})"
        elif record.refused is not None:
            text = f"refused ({printable(record.refused)})"
        else:
            continue
        reasons.setdefault(text, []).append(short_label(record.point))
    for text, labels in reasons.items():
        console.print(Text(f"{text}: {'; '.join(labels)}", "yellow"))


# --- two sweeps -----------------------------------------------------------------------------------


def comparison(a: Results, b: Results) -> dict[str, Any]:
    """What changed from sweep ``a`` to sweep ``b``, as JSON values.

    The ratios are those of the first objective of ``a``. AR over AR is left out, because it only
    shows how noisy a machine is; AR's speed is in ``a`` and ``b``.

    Returns:
        ``settings``: what differs in the sweep files, the objectives and the environment, by dotted
        name; ``points``: the points measured in both, with both intervals, ``difference`` (b - a)
        and ``changed``, which is true only if the intervals do not overlap; ``only_a`` and
        ``only_b``: labels of the points measured in one sweep only.

    Raises:
        InvalidArgument: one of them is no sweep.
    """
    manifests, trials = (a.manifest(), b.manifest()), (a.trials(), b.trials())
    objective = manifests[0].objectives[0]
    measured = [
        {r.key: r for r in records if r.metrics is not None and not r.point.is_ar}
        for records in trials
    ]
    return {
        "a": _side(a, manifests[0], trials[0], objective),
        "b": _side(b, manifests[1], trials[1], objective),
        "objective": objective,
        "settings": _differences(*(_settings(manifest) for manifest in manifests)),
        "points": sorted(
            (
                _compared(record, measured[1][key], objective)
                for key, record in measured[0].items()
                if key in measured[1]
            ),
            key=lambda point: (not point["changed"], -abs(point["difference"]), point["label"]),
        ),
        "only_a": [r.point.label for key, r in measured[0].items() if key not in measured[1]],
        "only_b": [r.point.label for key, r in measured[1].items() if key not in measured[0]],
    }


def compare(a: Results, b: Results, console: Console) -> None:
    """Print what :func:`comparison` returns.

    Raises:
        InvalidArgument: one of them is no sweep.
    """
    found = comparison(a, b)
    for side in "ab":
        one = found[side]
        best = one["best"]
        speed = one["ar_tokens_per_second"]
        words = [] if speed is None else [f"AR {speed:.1f} tok/s"]
        words += ["nothing measured" if best is None else f"best: {printable(best['label'])}"]
        if best is not None:
            words += [f"{ratio(Interval(**best['ratio']))} × AR"]
        console.print(
            Text.assemble((f"{side}  ", "bold"), (printable(one["result"]), "bold")), soft_wrap=True
        )
        console.print(Text("   " + " · ".join(words)), highlight=False)
    if found["settings"]:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("what differs", "a", "b"):
            table.add_column(column, overflow="fold")
        for name, values in found["settings"].items():
            cells = (name, _short(values["a"]), _short(values["b"]))
            table.add_row(*(Text(printable(cell)) for cell in cells))
        console.print(table)
    else:
        console.print("settings, space and environment are the same")
    if found["points"]:
        console.print(_comparison_table(found["points"]))
        changed = sum(point["changed"] for point in found["points"])
        said = f"{changed} of {len(found['points'])} points changed in {found['objective']}; "
        said += f"changed: the confidence intervals do not overlap; γ: {LENGTH}"
        console.print(Text(said, "dim"))
    else:
        console.print("no point was measured in both")
    for side in "ab":
        if labels := found[f"only_{side}"]:
            console.print(Text(f"only in {side}: {_shortened('; '.join(labels))}", "dim"))


def _comparison_table(points: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("measured in both", overflow="fold")
    for side in "ab":
        table.add_column(f"{side} × AR", justify="right", no_wrap=True)
        table.add_column("interval", no_wrap=True, style="dim")
    table.add_column("b - a", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for point in points:
        better = point["difference"] > 0
        cells = []
        for side in "ab":
            value = Interval(**point[side])
            cells += [f"{value.value:.2f}", f"{value.low:.2f}–{value.high:.2f}"]
        table.add_row(
            Text(_shortened(point["label"])),
            *cells,
            f"{point['difference']:+.2f}",
            Text("changed", "green" if better else "red") if point["changed"] else "",
        )
    return table


def _side(
    results: Results, manifest: Manifest, records: list[TrialRecord], objective: str
) -> dict[str, Any]:
    best = best_trial(records, objective)
    ar = [latest(r).tokens_per_second for r in records if r.point.is_ar and r.metrics is not None]
    return {
        "result": results.url,
        "name": manifest.name,
        "state": manifest.state,
        "counts": _counts(records),
        "ar_tokens_per_second": ar[0] if ar else None,
        "best": None
        if best is None
        else {
            "key": best.key,
            "label": best.point.label,
            "ratio": best.objective(objective).model_dump(),
        },
    }


def _compared(a: TrialRecord, b: TrialRecord, objective: str) -> dict[str, Any]:
    ours, theirs = a.objective(objective), b.objective(objective)
    overlap = ours.low <= theirs.high and theirs.low <= ours.high
    return {
        "key": a.key,
        "label": a.point.label,
        "a": ours.model_dump(),
        "b": theirs.model_dump(),
        "difference": theirs.value - ours.value,
        "overlap": overlap,
        "changed": not overlap,
    }


def _settings(manifest: Manifest) -> dict[str, Any]:
    return flatten(
        {
            **manifest.space,
            "objective": list(manifest.objectives),
            "environment": manifest.environment,
        }
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted names; lists stay as they are."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {"a": a.get(name), "b": b.get(name)}
        for name in dict.fromkeys((*a, *b))
        if name not in _ALWAYS_DIFFERENT and a.get(name) != b.get(name)
    }


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "–" if value is None else str(value)
