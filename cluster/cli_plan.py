"""`paceline train plan`: which drafter to train for a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.table import Table
from transformers.utils import logging as transformers_logging

from paceline.cluster.cli_output import err, out
from paceline.demo import GRID_FILE
from paceline.errors import InvalidArgument
from paceline.loading import load_engine
from paceline.model_names import resolve_model
from paceline.profile import fingerprint, measure, profile_key
from paceline.train.checkpoints import load_model, save_model
from paceline.train.drafter_grid import new_drafter, num_trained
from paceline.train.drafter_law import (
    DrafterCosts,
    DrafterLaw,
    DrafterPlan,
    DrafterPoints,
    DrafterSize,
    HeldOutSize,
    Measure,
    fit_law,
    fit_training_cost,
    hold_out_sizes,
    plan_drafter,
)

BATCHES, NODES, DEPTHS, REPETITIONS = (1, 2, 4, 8, 16), (1, 2, 3, 5, 9), (1, 4, 8), 5


@dataclass(frozen=True, slots=True, eq=False)
class PlanReport:
    """A plan and what it rests on."""

    points: DrafterPoints
    measure: Measure
    law: DrafterLaw
    held_out: list[HeldOutSize]
    plan: DrafterPlan
    core_seconds: float


def measure_sizes(target: Path, sizes: Sequence[DrafterSize]) -> list[DrafterCosts]:
    """What drafters of these sizes cost here; their weights are random, which costs the same."""
    transformers_logging.disable_progress_bar()
    model = load_model(target)
    found: list[DrafterCosts] = []
    for place, size in enumerate(sizes):
        drafter = new_drafter(model, size)
        with TemporaryDirectory() as folder:
            save_model(drafter, target, Path(folder))
            engine = load_engine(target, folder)
            key = profile_key(target, folder, "auto", "cpu")
            profile = measure(
                engine, key,
                batches=BATCHES, nodes=NODES if place == 0 else NODES[:1], depths=DEPTHS,
                repetitions=REPETITIONS,
            )  # fmt: skip
        if place:  # the target costs the same beside every drafter
            first = found[0].profile
            profile = replace(profile, nodes=first.nodes, verify_seconds=first.verify_seconds)
        found.append(DrafterCosts(size, num_trained(drafter), profile))
    return found


def run(
    file: Path | None,
    target: str | None,
    sizes: Sequence[str],
    *,
    core_seconds: float,
    batch: int,
    from_tokens: int,
    measure: Measure,
    plot_file: Path | None,
) -> PlanReport:
    """Fit the laws, measure costs and plan.

    Args:
        sizes: to choose among; without any, those of the points.
        from_tokens: points that were trained on fewer tokens do not count.

    Raises:
        InvalidArgument: an option is wrong, or the points are of another target.
    """
    points = DrafterPoints.load(file or GRID_FILE)
    folder = resolve_model(target or "demo")
    if points.target != fingerprint(folder):
        raise InvalidArgument("points", str(file or GRID_FILE), f"points of the target {folder}")
    points = replace(points, points=tuple(p for p in points.points if p.tokens >= from_tokens))
    law = fit_law(points.points, measure)
    chosen = [DrafterSize.parse(each) for each in sizes] or sorted({p.size for p in points.points})
    with err.status("measuring target and drafters ..."):
        candidates = measure_sizes(folder, chosen)
    plan = plan_drafter(
        law, fit_training_cost(points.points), candidates, core_seconds=core_seconds, batch=batch
    )
    held_out = hold_out_sizes(points.points, measure)
    report = PlanReport(points, measure, law, held_out, plan, core_seconds)
    if plot_file is not None:
        draw(report, plot_file)
    return report


def as_json(report: PlanReport) -> dict[str, Any]:
    """The report as JSON values."""
    law, plan = report.law, report.plan
    a, b, c = law.coefficients.tolist()
    return {
        "measure": report.measure,
        "law": {
            "intercept": a, "log_params": b, "log_tokens": c, "spread": law.spread, "r2": law.r2,
            "points": len(report.points.points),
        },
        "held_out": [{**asdict(each), "size": str(each.size)} for each in report.held_out],
        "core_seconds": report.core_seconds,
        "batch": plan.batch,
        "ar_speed": plan.ar_speed,
        "drafters": [{**asdict(each), "size": str(each.size)} for each in plan.drafters],
        "train": str(plan.chosen.size) if plan.chosen else None,
    }  # fmt: skip


def show(report: PlanReport) -> None:
    """Print the law, how well it predicts sizes that it has not seen, and the plan."""
    law, plan = report.law, report.plan
    a, b, c = law.coefficients.tolist()
    out.print(
        f"{report.measure} = {a:.3f} {b:+.4f} log(params) {c:+.4f} log(tokens); "
        f"{len(report.points.points)} drafters, residuals {law.spread:.4f}, R² {law.r2:.2f}",
        highlight=False,
    )
    for each in report.held_out:
        errors = ", ".join(f"{error:+.3f}" for error in each.errors)
        kind = "beyond the others" if each.beyond else "between the others"
        out.print(
            f"without {each.size} ({each.params} parameters, {kind}): off by {errors}",
            highlight=False,
        )
    table = Table(box=None, header_style="bold", pad_edge=False)
    titles = (
        "drafter", "parameters", "tokens", report.measure, "tokens/s", "at least", "at most",
        "length", "best in",
    )  # fmt: skip
    for title in titles:
        table.add_column(title, justify="right")
    for each in plan.drafters:
        table.add_row(
            str(each.size), f"{each.params:,}", f"{each.tokens:,}{'*' * each.extrapolated}",
            f"{each.acceptance:.3f} ± {2 * each.error:.3f}", f"{each.speed:.0f}",
            f"{each.low:.0f}", f"{each.high:.0f}", str(each.depth), f"{each.best_in:.0%}",
        )  # fmt: skip
    out.print(table)
    out.print(
        f"without drafts {plan.ar_speed:.0f} tokens/s; batch {plan.batch}; "
        f"{report.core_seconds:g} s of {report.points.processor}; *: beyond what was measured",
        highlight=False,
    )
    best = plan.chosen
    out.print(
        f"train: {best.size} on {best.tokens} tokens" if best else "train: none, AR is as fast",
        highlight=False,
    )
    batches = plan.drafters[0].by_batch
    out.print(
        f"{plan.drafters[0].size} in batches: {batches.intercept:.0f} {batches.slope:+.0f} "
        f"log(batch) tokens/s for each session, R² {batches.r2:.2f}",
        highlight=False,
    )


def draw(report: PlanReport, file: Path) -> None:
    """Measured points with the law's lines, and speed against batch size for the planned sizes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    points = report.points.points
    tokens = sorted({p.tokens for p in points})
    for number, params in enumerate(sorted({p.params for p in points})):
        own = [p for p in points if p.params == params]
        colour = f"C{number}"
        values = [getattr(p, report.measure) for p in own]
        left.plot([p.tokens for p in own], values, "o", color=colour)
        ends = [tokens[0], tokens[-1]]
        left.plot(
            ends, [report.law.predict(params, t) for t in ends], color=colour,
            label=f"{own[0].size}: {params:,}",
        )  # fmt: skip
    left.set(
        xscale="log", xlabel="training tokens", ylabel=report.measure, title="law and points",
        xticks=tokens, xticklabels=[f"{count:,}" for count in tokens],
    )  # fmt: skip
    left.minorticks_off()
    left.legend(fontsize="small", title="layers × width: parameters", title_fontsize="small")
    for number, each in enumerate(report.plan.drafters[:2]):
        law, label = each.by_batch, f"{each.size}, {each.tokens:,} tokens"
        right.plot(each.speeds.keys(), each.speeds.values(), "o", color=f"C{number}", label=label)
        fitted = [law.intercept + law.slope * np.log(batch) for batch in each.speeds]
        right.plot(each.speeds.keys(), fitted, color=f"C{number}", linewidth=0.8)
    right.set(
        xscale="log", xlabel="sessions that decode together", ylabel="tokens/s of a session",
        title="planned drafters and the fit", xticks=BATCHES, xticklabels=BATCHES,
    )  # fmt: skip
    right.minorticks_off()
    right.legend(fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(file, dpi=120)
    except (ValueError, OSError) as error:
        raise InvalidArgument("plot", str(file), f"a picture file ({error})") from error
