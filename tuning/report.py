"""The report of a sweep: one HTML file that needs no network."""

from __future__ import annotations

import json
import shlex
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from plotly.offline import get_plotlyjs

from paceline.tuning import pictures
from paceline.tuning.results import Manifest, Results, TrialRecord, best_trial, pareto_front
from paceline.tuning.tables import (
    best_first,
    counted,
    flatten,
    latest,
    moment,
    printable,
    ratio,
    short_label,
)


def write_report(results: Results) -> str:
    """Write ``report.html`` into a result folder, replacing an older one.

    Returns:
        Its path or URL.

    Raises:
        InvalidArgument: the folder has no sweep.
    """
    results.write("report.html", render(results))
    return results.path("report.html")


def render(results: Results) -> str:
    """The page as HTML, without the pictures and tables for which there is no data.

    Raises:
        InvalidArgument: the folder has no sweep.
    """
    manifest, records = results.manifest(), results.trials()
    objective = manifest.objectives[0]
    best, measured = best_trial(records, objective), best_first(records, objective)
    sweep = pictures.SweepPicture(manifest, records, results.predictions())
    drawn = pictures.draw(sweep)
    environment = Environment(  # it escapes everything that is not marked `safe`
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        printable=lambda value: printable(str(value)), ratio=ratio, moment=moment
    )
    template = (
        files("paceline.tuning").joinpath("templates/report.html.j2").read_text(encoding="utf-8")
    )
    return environment.from_string(template).render(
        manifest=manifest,
        counted=counted(records),
        best=best,
        best_metrics=None if best is None else latest(best),
        verdict=_verdict(best, bool(measured)),
        serve=_serve_command(results),
        best_yaml=results.read("best.yaml") if results.exists("best.yaml") else None,
        confidence=_confidence(manifest),
        pictures=drawn,
        figures={picture.name: picture.as_dict() for picture in drawn},
        templates=pictures.TEMPLATES,
        trees=pictures.trees(sweep),
        front=pareto_front(records, manifest.objectives) if len(manifest.objectives) > 1 else [],
        measured=measured,
        predicted=any(record.predicted is not None for record in measured),
        latest=latest,
        stopped=[r for r in records if r.status == "stopped"],
        failed=[r for r in records if r.status == "failed"],
        refused=[r for r in records if r.refused is not None],
        environment={k: _plain(v) for k, v in flatten(manifest.environment).items()},
        space=yaml.safe_dump(manifest.space, sort_keys=False, allow_unicode=True),
        objective_name=pictures.objective_name,
        short_label=short_label,
        plotly_js=get_plotlyjs() if drawn else "",
        sort_js=files("paceline.bench").joinpath("templates/sort.js").read_text(encoding="utf-8"),
    )


def _verdict(best: TrialRecord | None, measured: bool) -> str:
    """A sentence about the best trial, no stronger than its interval allows."""
    if best is None and not measured:
        return "No trial has been measured yet."
    if best is None or best.point.is_ar:
        return "No configuration is surely faster than plain autoregressive decoding (AR)."
    again = "; it was measured once more, side by side" if best.confirmed is not None else ""
    return (
        "Faster than plain autoregressive decoding (AR): the whole interval is above 1"
        + again
        + "."
    )


def _serve_command(results: Results) -> str | None:
    if not results.exists("best.yaml"):
        return None
    return f"paceline up --config {shlex.quote(results.path('best.yaml'))}"


def _confidence(manifest: Manifest) -> str:
    """``95 % confidence interval``, with the number if the sweep file gives one."""
    measurement = manifest.space.get("measurement")
    level = measurement.get("confidence") if isinstance(measurement, dict) else None
    return f"{100 * level:g} % confidence interval" if level else "confidence interval"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else "–" if value is None else json.dumps(value)
