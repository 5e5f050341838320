"""The pictures of a report: from records to plotly figures, and the layout of draft trees.

Each function returns the pictures for which there is data. Colours work on a light and a dark page
alike; ``TEMPLATES`` holds what differs between the two.
"""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import plotly.graph_objects as go

from paceline.config import SpeculationConfig
from paceline.plan import resolve
from paceline.tuning.results import Manifest, Point, PredictedResult, TrialRecord, pareto_front
from paceline.tuning.tables import (
    LENGTH,
    best_first,
    latest,
    predicted_and_measured,
    printable,
    rank_correlation,
    ratio,
    short_label,
)

GREY = "#8b93a1"
ACCENT = "#3b7ddd"
# Neighbours differ in hue and lightness; all are visible on white and on near-black.
COLOURS = (
    "#3b7ddd", "#e8793a", "#2ba882", "#c94f9b", "#8a6fe8",
    "#b98a1d", "#1fa3c4", "#d64550", "#6d8f2e", "#7b8794",
)  # fmt: skip
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross")
STATUS_STYLE = {
    "confirmed": ("#2ba882", "star"),
    "finished": (ACCENT, "circle"),
    "stopped": ("#d08a1d", "diamond-open"),
    "refused": (GREY, "x"),
    "ar": (GREY, "circle-open"),
}
# Orange below 1 (slower than AR), blue above 1; the middle is near the page's own colour.
DIVERGING = (
    (0.0, "#b3541e"), (0.25, "#e59a63"), (0.5, "#d9dce1"), (0.75, "#6ba3dd"), (1.0, "#1f5fae"),
)  # fmt: skip
SEQUENTIAL = ((0.0, "#c9a27a"), (0.5, "#9d7fc0"), (1.0, "#3b5bdb"))


def _template(text: str, grid: str, card: str) -> dict[str, Any]:
    axis = {
        "gridcolor": grid, "linecolor": grid, "zeroline": False, "automargin": True,
        "title": {"standoff": 10},
    }  # fmt: skip
    return {
        "layout": {
            "font": {"color": text, "family": "system-ui, sans-serif", "size": 13},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {"bgcolor": card, "bordercolor": grid, "font": {"color": text}},
            "annotationdefaults": {"bgcolor": card, "font": {"color": text}},
            "shapedefaults": {"line": {"color": text}},
        }
    }


TEMPLATES = {
    "light": _template("#1d2530", "#e3e6eb", "#ffffff"),
    "dark": _template("#e4e8ee", "#343c49", "#1b212b"),
}


@dataclass(frozen=True, slots=True)
class Picture:
    """One figure of the report.

    Attributes:
        name: unique; the id of its element in the page.
        caption: one sentence that says how to read it.
        narrow: changes of the layout for a phone's screen.
        half: whether half the width of a laptop's screen is enough.
        min_width: least width in pixels; a narrower screen scrolls.
    """

    name: str
    title: str
    caption: str
    figure: go.Figure
    narrow: dict[str, Any] = field(default_factory=dict)
    half: bool = False
    min_width: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Data and both layouts as JSON values."""
        narrow = go.Figure(self.figure)
        narrow.update_layout(self.narrow)
        return {
            "data": json.loads(self.figure.to_json())["data"],
            "wide": json.loads(self.figure.to_json())["layout"],
            "narrow": json.loads(narrow.to_json())["layout"],
        }


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A box of a draft tree, in pixels; ``parent`` is the middle of its parent's right edge."""

    x: float
    y: float
    width: float
    text: str
    accepted: bool
    parent: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Tree:
    """The example draft of a trial, laid out."""

    label: str
    shape: str
    num_nodes: int
    num_accepted: int
    width: float
    height: float
    root: TreeNode
    nodes: tuple[TreeNode, ...]


class SweepPicture:
    """The data of the pictures.

    Attributes:
        measured: trials with metrics, the best first.
        compared: those without AR.
    """

    def __init__(
        self,
        manifest: Manifest,
        records: Sequence[TrialRecord],
        predictions: Sequence[PredictedResult],
    ) -> None:
        self.manifest = manifest
        self.records = list(records)
        self.predictions = [p for p in predictions if not p.point.is_ar]
        self.objective = manifest.objectives[0]
        self.measured = best_first(records, self.objective)
        self.compared = [record for record in self.measured if not record.point.is_ar]
        methods = [record.point.speculation.method for record in self.measured]
        methods += [prediction.point.speculation.method for prediction in self.predictions]
        self.methods = sorted({method for method in methods if method != "ar"})
        self._configs: dict[SpeculationConfig, SpeculationConfig] = {}

    def config(self, point: Point) -> SpeculationConfig:
        """The configuration with the method's defaults filled in."""
        if point.speculation not in self._configs:
            self._configs[point.speculation] = resolve(point.speculation).config
        return self._configs[point.speculation]

    def colour(self, method: str) -> str:
        return COLOURS[self.methods.index(method) % len(COLOURS)]

    def symbol(self, method: str) -> str:
        return SYMBOLS[self.methods.index(method) // len(COLOURS) % len(SYMBOLS)]


def draw(sweep: SweepPicture) -> list[Picture]:
    """All pictures for which there is data."""
    makers: tuple[Callable[[SweepPicture], list[Picture]], ...] = (
        lengths, heat_maps, intervals, fronts, acceptance_by_position, parallel_coordinates,
        predicted_against_measured,
    )  # fmt: skip
    drawn = [picture for make in makers for picture in make(sweep)]
    halves = [i for i, picture in enumerate(drawn) if picture.half]
    if len(halves) % 2:  # the one that would stand alone in its line
        drawn[halves[-1]] = replace(drawn[halves[-1]], half=False)
    return drawn


# --- words ----------------------------------------------------------------------------------------


def markup(text: str) -> str:
    """Untrusted text, escaped for plotly's labels, which may hold some HTML."""
    return html.escape(printable(text).replace("\n", " "), quote=False)


def knob_name(name: str) -> str:
    return "speculation length" if name == LENGTH else name.replace("_", " ")


def objective_name(name: str) -> str:
    return {
        "goodput": "goodput over AR's",
        "latency_p50": "AR's p50 latency over its own",
        "latency_p99": "AR's p99 latency over its own",
    }.get(name, name)


def _hover(record: TrialRecord, objectives: Iterable[str]) -> str:
    lines = [f"<b>{markup(short_label(record.point))}</b>", f"trial {record.number}"]
    lines += [f"{markup(name)}: {ratio(record.objective(name))}" for name in objectives]
    lines.append(f"τ {latest(record).mean_accepted_length:.2f}")
    if record.confirmed is not None and record.metrics is not None:
        first = record.metrics.goodput_ratio
        lines.append(f"confirmed; goodput was {ratio(first)} before")
    if record.predicted is not None:
        lines.append(f"predicted {record.predicted:.2f}")
    if record.refused is not None:
        lines.append(f"refused: {markup(record.refused)}")
    if record.status == "stopped":
        lines.append("stopped early")
    return "<br>".join(lines)


def _error(records: Sequence[TrialRecord], objective: str, **style: Any) -> dict[str, Any]:
    values = [record.objective(objective) for record in records]
    return {
        "type": "data",
        "symmetric": False,
        "array": [v.high - v.value for v in values],
        "arrayminus": [v.value - v.low for v in values],
        **style,
    }


def _line_at_one(figure: go.Figure, axis: str = "y") -> None:
    add = figure.add_hline if axis == "y" else figure.add_vline
    corner = "bottom right" if axis == "y" else "top right"
    add(
        1, line={"color": GREY, "dash": "dot", "width": 2}, layer="below",
        annotation={"text": "AR", "font": {"size": 11}}, annotation_position=corner,
    )  # fmt: skip


def _legend_below(
    num_entries: int, height: int, columns: int = 4, narrow_columns: int = 1
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Layouts for a laptop and a phone, with room for a legend under the plot.

    Args:
        height: of the plot with its axis, in pixels.
        columns, narrow_columns: about how many entries stand side by side.
    """
    layouts = []
    for side_by_side in (columns, narrow_columns):
        space = 14 + 20 * -(-num_entries // side_by_side)
        layouts.append(
            {
                "height": height + space, "showlegend": True,
                "margin": {"l": 8, "r": 12, "t": 16, "b": space + 50},
                "legend": {
                    "orientation": "h", "x": 0, "y": 0,
                    "xref": "container", "yref": "container", "yanchor": "bottom",
                },
            }
        )  # fmt: skip
    return layouts[0], layouts[1]


# --- speculation length ---------------------------------------------------------------------------


def lengths(sweep: SweepPicture) -> list[Picture]:
    """Goodput over speculation length: for each method a line of the best at each length."""
    figure = go.Figure()
    several, shown = False, 0
    for method in sweep.methods:
        measured: dict[int, TrialRecord] = {}
        for record in reversed(sweep.compared):  # the best trial comes last and wins
            if record.point.speculation.method == method:
                measured[sweep.config(record.point).num_speculative_tokens or 0] = record
        predicted: dict[int, PredictedResult] = {}
        for prediction in sorted(sweep.predictions, key=lambda p: p.goodput_ratio):
            if prediction.point.speculation.method == method:
                predicted[sweep.config(prediction.point).num_speculative_tokens or 0] = prediction
        several |= len({*measured, *predicted}) > 1
        shown += 1
        style = {"color": sweep.colour(method), "symbol": sweep.symbol(method)}
        if predicted:
            at = sorted(predicted)
            figure.add_scatter(
                x=at, y=[predicted[x].goodput_ratio for x in at], mode="lines",
                line={"color": style["color"], "dash": "dash", "width": 1.5}, opacity=0.75,
                name=markup(method), legendgroup=method, showlegend=not measured,
                customdata=[markup(short_label(predicted[x].point)) for x in at],
                hovertemplate="<b>%{customdata}</b><br>predicted %{y:.2f}<extra></extra>",
            )  # fmt: skip
        if measured:
            at = sorted(measured)
            records = [measured[x] for x in at]
            figure.add_scatter(
                x=at, y=[r.objective("goodput").value for r in records], mode="lines+markers",
                line={"color": style["color"], "width": 2.5},
                marker={"symbol": style["symbol"], "size": 8},
                error_y=_error(records, "goodput", thickness=1.5, width=3),
                name=markup(method), legendgroup=method,
                customdata=[_hover(r, sweep.manifest.objectives) for r in records],
                hovertemplate="%{customdata}<extra></extra>",
            )  # fmt: skip
    if not several:
        return []
    _line_at_one(figure)
    wide, narrow = _legend_below(shown, 430, columns=5)
    figure.update_layout(wide)
    # Lengths double more often than they grow by one; 0 is a length of lossy methods.
    seen = sorted({x for trace in figure.data for x in trace.x})
    logarithmic = seen[0] > 0 and seen[-1] >= 8 * seen[0]
    ticks = seen[:1]
    for length in seen[1:]:
        if not logarithmic or length >= 1.15 * ticks[-1]:
            ticks.append(length)  # other labels would overlap this one
    figure.update_xaxes(
        title={"text": "speculation length γ"}, tickmode="array", tickvals=ticks,
        type="log" if logarithmic else "linear",
    )  # fmt: skip
    figure.update_yaxes(title={"text": "goodput over AR's"})
    dashed = ", dashed ones are predicted" if sweep.predictions else ""
    caption = (
        "Higher is faster, the dotted line is AR; solid lines with confidence intervals were "
        f"measured{dashed}, and where several configurations share a length the best is shown."
    )
    return [Picture("lengths", "Goodput over speculation length", caption, figure, narrow)]


# --- heat maps ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeatmapCell:
    """A cell of a heat map."""

    ratio: float
    measured: bool
    point: Point


def heat_cells(
    sweep: SweepPicture, method: str, x: str, y: str
) -> dict[tuple[float, float], HeatmapCell]:
    """The best goodput for each pair of values: a measured one if there is any, else predicted.

    A point that does not set ``y`` has no cell: its default may follow from ``x``.
    """
    cells: dict[tuple[float, float], HeatmapCell] = {}

    def put(point: Point, value: float, measured: bool) -> None:
        if point.speculation.method != method:
            return
        place = (getattr(sweep.config(point), x), getattr(point.speculation, y))
        there = cells.get(place)
        if there is not None and (there.measured, there.ratio) >= (measured, value):
            return
        if None not in place:
            cells[place] = HeatmapCell(value, measured, point)

    for prediction in sweep.predictions:
        put(prediction.point, prediction.goodput_ratio, False)
    for record in sweep.compared:
        put(record.point, record.objective("goodput").value, True)
    return cells


def varied_numbers(sweep: SweepPicture, method: str) -> list[str]:
    """Numeric knobs that the space sets to several values for a method, the length first."""
    points = [record.point for record in sweep.compared]
    points += [prediction.point for prediction in sweep.predictions]
    values: dict[str, set[float]] = {}
    for point in points:
        if point.speculation.method == method:
            for name in point.knobs:
                value = getattr(point.speculation, name)
                if isinstance(value, int | float) and not isinstance(value, bool):
                    values.setdefault(name, set()).add(value)
    order = (LENGTH, "exit_layer", "node_budget", "branching")
    names = [name for name, seen in values.items() if len(seen) > 1]
    return sorted(names, key=lambda n: (order.index(n) if n in order else len(order), n))


def heat_maps(sweep: SweepPicture) -> list[Picture]:
    """Goodput over the speculation length and each other numeric knob of a method."""
    grids: list[tuple[str, str, str, dict[tuple[float, float], HeatmapCell]]] = []
    for method in sweep.methods:
        names = varied_numbers(sweep, method)
        grids += [(method, names[0], y, heat_cells(sweep, method, names[0], y)) for y in names[1:]]
    # One scale for all pictures, so that equal colours are equal ratios.
    reach = max(
        (abs(_colour_value(c.ratio)) for *_, cells in grids for c in cells.values()), default=0.0
    )
    return [_heat_map(*grid, reach) for grid in grids]


def _heat_map(
    method: str, x: str, y: str, cells: dict[tuple[float, float], HeatmapCell], reach: float
) -> Picture:
    columns, rows = (sorted({place[i] for place in cells}) for i in (0, 1))
    grid = [[cells.get((column, row)) for column in columns] for row in rows]

    def hover(cell: HeatmapCell) -> str:
        how = "measured" if cell.measured else "predicted"
        return f"<b>{markup(short_label(cell.point))}</b><br>{how} {cell.ratio:.2f}"

    figure = go.Figure(
        go.Heatmap(
            # Categories, so that 2, 4, 8 and 16 have equal distances.
            x=[_number(value) for value in columns],
            y=[_number(value) for value in rows],
            z=[[None if c is None else _colour_value(c.ratio) for c in row] for row in grid],
            zmin=-(reach or 1), zmax=reach or 1, colorscale=DIVERGING, showscale=False,
            text=[["" if c is None else _cell_text(c) for c in row] for row in grid],
            texttemplate="%{text}", textfont={"size": 12 if len(columns) <= 9 else 11},
            customdata=[["" if c is None else hover(c) for c in row] for row in grid],
            hovertemplate="%{customdata}<extra></extra>", hoverongaps=False,
            xgap=4, ygap=4,
        )
    )  # fmt: skip
    for (column, row), cell in cells.items():
        if cell.measured:
            i, j = columns.index(column), rows.index(row)
            figure.add_shape(
                type="rect", x0=i - 0.47, x1=i + 0.47, y0=j - 0.45, y1=j + 0.45, line={"width": 2}
            )
    height = 100 + 38 * max(3, len(rows))
    figure.update_layout(height=height, margin={"l": 8, "r": 0, "t": 8, "b": 8})
    figure.update_xaxes(title={"text": knob_name(x)}, type="category", showgrid=False)
    figure.update_yaxes(title={"text": knob_name(y)}, type="category", showgrid=False)
    both = {c.measured for c in cells.values()} == {True, False}
    caption = "Goodput over AR's: blue is faster than AR, orange slower; " + (
        "framed cells were measured, the others (≈) are predicted."
        if both
        else "all cells were measured."
        if all(c.measured for c in cells.values())
        else "all cells (≈) are predicted."
    )
    title = f"{method}: {knob_name(x)} × {knob_name(y)}"
    return Picture(
        f"heat-{method}-{y}", title, caption, figure,
        half=len(columns) <= 9, min_width=70 + 40 * len(columns),
    )  # fmt: skip


def _colour_value(ratio: float) -> float:
    """Place of a ratio on the colour scale, on which 2 and 1/2 are equally far from 1."""
    return math.log2(max(ratio, 1e-3))


def _cell_text(cell: HeatmapCell) -> str:
    return f"<b>{cell.ratio:.2f}</b>" if cell.measured else f"≈{cell.ratio:.2f}"


def _number(value: float) -> str:
    return format(value, "g")


# --- confidence intervals -------------------------------------------------------------------------


def intervals(sweep: SweepPicture) -> list[Picture]:
    """A line for each measured trial, the best on top."""
    if not sweep.compared:
        return []
    records = sorted(sweep.measured, key=lambda r: -r.objective(sweep.objective).value)
    kinds: dict[str, list[TrialRecord]] = {kind: [] for kind in STATUS_STYLE}
    for record in records:
        status = "confirmed" if record.confirmed is not None else record.status
        status = status if record.counts else "refused"
        kinds["ar" if record.point.is_ar else status].append(record)
    names = {
        "confirmed": "measured once more, side by side",
        "stopped": "stopped early",
        "refused": "refused by a constraint",
        "ar": "AR over AR: the noise",
    }
    place = {record.key: i for i, record in enumerate(records)}
    figure = go.Figure()
    for kind, members in kinds.items():
        colour, symbol = STATUS_STYLE[kind]
        if members:
            figure.add_scatter(
                x=[r.objective(sweep.objective).value for r in members],
                y=[place[r.key] for r in members], mode="markers", name=names.get(kind, kind),
                marker={
                    "color": colour, "symbol": symbol, "size": 9,
                    "line": {"width": 2, "color": colour},
                },
                error_x=_error(members, sweep.objective, thickness=2, width=4, color=colour),
                customdata=[_hover(r, sweep.manifest.objectives) for r in members],
                hovertemplate="%{customdata}<extra></extra>",
            )  # fmt: skip
    _line_at_one(figure, "x")
    labels = [markup(short_label(record.point)) for record in records]
    figure.update_layout(
        height=110 + 24 * len(records), margin={"l": 8, "r": 12, "t": 8, "b": 8},
        showlegend=True, legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
    )  # fmt: skip
    ticks = {"tickmode": "array", "tickvals": list(range(len(records)))}
    figure.update_yaxes(range=[len(records) - 0.4, -0.6], showgrid=False, ticktext=labels, **ticks)
    figure.update_xaxes(title={"text": f"{objective_name(sweep.objective)} (AR is 1)"})
    # A phone has no room beside the plot: labels go into it, above their intervals.
    narrow = {
        "height": 110 + 40 * len(records),
        "yaxis": {"showticklabels": False, "range": [len(records) - 0.4, -0.9]},
        "annotations": [
            *figure.layout.annotations,
            *(
                {
                    "text": label, "xref": "paper", "x": 0, "xanchor": "left", "y": i,
                    "yshift": 14, "showarrow": False, "font": {"size": 11}, "borderpad": 0,
                }
                for i, label in enumerate(labels)
            ),
        ],
    }  # fmt: skip
    caption = (
        "Each line is a trial's confidence interval: right of the dotted line it is faster than "
        "AR, and trials whose intervals overlap cannot be told apart."
    )
    return [Picture("intervals", "Confidence intervals of all trials", caption, figure, narrow)]


# --- several objectives ---------------------------------------------------------------------------


def fronts(sweep: SweepPicture) -> list[Picture]:
    """For each pair of objectives, the trials and the Pareto front."""
    names = sweep.manifest.objectives
    front = pareto_front(sweep.records, names)
    counting = [record for record in sweep.measured if record.counts]
    if len(names) < 2 or len(counting) < 2:
        return []
    keys = {record.key for record in front}
    return [
        _front(sweep, x, y, [r for r in counting if r.key not in keys], front)
        for x, y in itertools.combinations(names, 2)
    ]


def _front(
    sweep: SweepPicture, x: str, y: str, beaten: Sequence[TrialRecord], front: Sequence[TrialRecord]
) -> Picture:
    figure = go.Figure()
    for records, name, colour, size in (
        (beaten, "beaten by another trial", GREY, 8),
        (sorted(front, key=lambda r: r.objective(x).value), "Pareto front", ACCENT, 11),
    ):
        figure.add_scatter(
            x=[r.objective(x).value for r in records],
            y=[r.objective(y).value for r in records], name=name,
            # With a third objective the front is a surface, which no line can show.
            mode="lines+markers" if records is not beaten and len(sweep.manifest.objectives) == 2
            else "markers",
            line={"color": colour, "width": 2, "shape": "vh"},
            marker={"color": colour, "size": size},
            error_x=_error(records, x, thickness=1, width=0, color=colour),
            error_y=_error(records, y, thickness=1, width=0, color=colour),
            customdata=[_hover(r, sweep.manifest.objectives) for r in records],
            hovertemplate="%{customdata}<extra></extra>",
        )  # fmt: skip
    wide, narrow = _legend_below(2, 400, columns=2, narrow_columns=2)
    figure.update_layout(wide)
    figure.update_xaxes(title={"text": objective_name(x)})
    figure.update_yaxes(title={"text": objective_name(y)})
    caption = (
        "Better is up and to the right; no trial beats one on the front in every objective, so the "
        "choice among them is yours."
    )
    title = f"Pareto front: {x.replace('_', ' ')} and {y.replace('_', ' ')}"
    return Picture(f"front-{x}-{y}", title, caption, figure, narrow, half=True)


# --- acceptance -----------------------------------------------------------------------------------


def acceptance_by_position(sweep: SweepPicture, num_trials: int = 6) -> list[Picture]:
    """Accepted share of drafted tokens by depth, for the best trial of each method."""
    figure = go.Figure()
    seen: set[str] = set()
    for record in sweep.compared:
        method, metrics = record.point.speculation.method, latest(record)
        if method in seen or len(seen) == num_trials or not any(metrics.drafted_by_depth):
            continue
        seen.add(method)
        rates = acceptance_rates(metrics.accepted_by_depth, metrics.drafted_by_depth)
        figure.add_scatter(
            x=list(range(1, len(rates) + 1)), y=rates, mode="lines+markers",
            line={"color": sweep.colour(method), "width": 2.5},
            marker={"symbol": sweep.symbol(method), "size": 7},
            name=markup(short_label(record.point)),
            customdata=list(
                zip(metrics.accepted_by_depth, metrics.drafted_by_depth, strict=False)
            ),
            hovertemplate="depth %{x}: %{y:.2f}<br>%{customdata[0]} accepted of "
            "%{customdata[1]} drafts<extra></extra>",
        )  # fmt: skip
    if not seen:
        return []
    wide, narrow = _legend_below(len(seen), 360, columns=1)
    figure.update_layout(wide)
    figure.update_xaxes(title={"text": "position in the draft"}, rangemode="tozero", tick0=1)
    figure.update_yaxes(title={"text": "accepted ÷ drafted"}, range=[0, 1.04])
    caption = (
        "How often a draft that reaches a position is accepted up to it, for the best trial of "
        "each method: where a line comes near 0, a longer draft is wasted."
    )
    return [Picture("acceptance", "Acceptance by position", caption, figure, narrow, half=True)]


def acceptance_rates(accepted: Sequence[int], drafted: Sequence[int]) -> list[float | None]:
    """accepted ÷ drafted by depth; None at a depth that no draft reached."""
    padded = [*accepted, *[0] * (len(drafted) - len(accepted))]
    return [a / d if d else None for a, d in zip(padded, drafted, strict=False)]


# --- parallel coordinates -------------------------------------------------------------------------


def parallel_coordinates(sweep: SweepPicture) -> list[Picture]:
    """A line for each trial through its knobs to its ratio.

    It is a scatter plot: plotly's own parallel coordinates need WebGL, which many browsers on
    servers and virtual machines lack, and cannot show that a method lacks a knob.
    """
    records = sweep.compared
    axes = _knob_axes(sweep)
    if len(records) < 2 or len(axes) < 2:
        return []
    values = [record.objective(sweep.objective).value for record in records]
    low, high = min(values), max(values)
    span = high - low or 1.0
    figure = go.Figure()
    for record, value in reversed(list(zip(records, values, strict=True))):  # the best on top
        places = [_place(shown[record.key], ticks) for _, shown, ticks in axes]
        share = (value - low) / span
        figure.add_scatter(
            x=list(range(len(axes) + 1)), y=[*places, 0.02 + 0.96 * share],
            mode="lines+markers", marker={"size": 5}, showlegend=False,
            line={"color": _between(share), "width": 1.5 + 2 * share},
            opacity=0.35 + 0.6 * share,
            text=[_hover(record, sweep.manifest.objectives)] * (len(axes) + 1),
            hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip
    for i, (_, _, ticks) in enumerate(axes):
        figure.add_shape(
            type="line", x0=i, x1=i, y0=0, y1=1, line={"color": GREY, "width": 1}, layer="below"
        )
        for tick in ticks:
            figure.add_annotation(
                x=i, y=_place(tick, ticks), text=markup(tick), showarrow=False, xanchor="right",
                xshift=-6, font={"size": 11}, borderpad=1, opacity=0.9,
            )  # fmt: skip
    last = len(axes)
    figure.add_shape(
        type="line", x0=last, x1=last, y0=0, y1=1, line={"color": GREY, "width": 2}, layer="below"
    )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0) if high > low else (0.5,):
        figure.add_annotation(
            x=last, y=0.02 + 0.96 * share, text=f"{low + span * share:.2f}", showarrow=False,
            xanchor="left", xshift=6, font={"size": 11},
        )  # fmt: skip
    names = [knob_name(name) for name, _, _ in axes] + [f"{sweep.objective.replace('_', ' ')} × AR"]
    longest = max(len(tick) for tick in axes[0][2])
    figure.update_layout(
        height=max(360, 60 + 24 * max(len(ticks) for *_, ticks in axes)),
        margin={"l": 20 + 7 * longest, "r": 48, "t": 48, "b": 12}, hovermode="closest",
    )  # fmt: skip
    figure.update_xaxes(
        tickmode="array", tickvals=list(range(last + 1)), side="top", showgrid=False,
        ticktext=[name.replace(" ", "<br>", 1) for name in names], range=[-0.02, last + 0.02],
    )  # fmt: skip
    figure.update_yaxes(visible=False, range=[-0.04, 1.04])
    caption = (
        "Follow a line from left to right to read one trial; the thick ones ended highest, and – "
        "stands for a knob that the method does not have."
    )
    return [
        Picture(
            "parallel", "Knobs and result together", caption, figure,
            min_width=7 * longest + 118 * (last + 1),
        )
    ]  # fmt: skip


def _knob_axes(sweep: SweepPicture) -> list[tuple[str, dict[str, str], list[str]]]:
    """For each knob that differs between trials: name, value of each trial, and sorted values."""
    columns: dict[str, dict[str, Any]] = {
        "method": {r.key: r.point.speculation.method for r in sweep.compared}
    }
    for name in dict.fromkeys(name for r in sweep.compared for name in r.point.knobs):
        columns[name] = {r.key: r.point.knobs.get(name) for r in sweep.compared}
    for name in ("topology", "dtype"):
        columns[name] = {r.key: getattr(r.point, name) for r in sweep.compared}
    axes = []
    for name, column in columns.items():
        ordered = sorted({_tick(v): v for v in column.values()}.items(), key=_tick_order)
        if len(ordered) > 1 or name == "method":
            shown = {key: _tick(value) for key, value in column.items()}
            axes.append((name, shown, [tick for tick, _ in ordered]))
    return axes


def _tick(value: Any) -> str:
    if value is None:
        return "–"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 24 else text[:23] + "…"


def _tick_order(item: tuple[str, Any]) -> tuple[int, float, str]:
    tick, value = item
    if value is None:
        return (0, 0.0, tick)
    number = isinstance(value, int | float)
    return (1, float(value) if number else 0.0, tick)


def _place(tick: str, ticks: Sequence[str]) -> float:
    """Height of a value on its axis, 0 to 1, with values evenly spaced."""
    return 0.5 if len(ticks) == 1 else 0.02 + 0.96 * ticks.index(tick) / (len(ticks) - 1)


def _between(share: float) -> str:
    """The colour at ``share`` (0 to 1) of ``SEQUENTIAL``."""
    low, high = (SEQUENTIAL[0], SEQUENTIAL[1]) if share < 0.5 else (SEQUENTIAL[1], SEQUENTIAL[2])
    part = (share - low[0]) / (high[0] - low[0])
    ends = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for _, colour in (low, high)]
    mixed = (round(a + (b - a) * part) for a, b in zip(*ends, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


# --- the simulator --------------------------------------------------------------------------------


def predicted_against_measured(sweep: SweepPicture) -> list[Picture]:
    """Predicted against measured goodput, a dot for each trial."""
    pairs = predicted_and_measured(sweep.records)
    if len(pairs) < 2:
        return []
    figure = go.Figure()
    methods = sorted({record.point.speculation.method for *_, record in pairs})
    for method in methods:
        own = [pair for pair in pairs if pair[2].point.speculation.method == method]
        records = [record for *_, record in own]
        figure.add_scatter(
            x=[predicted for predicted, *_ in own], y=[measured for _, measured, _ in own],
            mode="markers", name=markup(method),
            marker={"color": sweep.colour(method), "symbol": sweep.symbol(method), "size": 9},
            error_y=_error(records, "goodput", thickness=1, width=0),
            customdata=[_hover(record, ("goodput",)) for record in records],
            hovertemplate="%{customdata}<extra></extra>",
        )  # fmt: skip
    ends = [f(v for pair in pairs for v in pair[:2]) for f in (min, max)]
    figure.add_shape(
        type="line", x0=ends[0], y0=ends[0], x1=ends[1], y1=ends[1], layer="below",
        line={"color": GREY, "dash": "dot", "width": 1.5},
    )  # fmt: skip
    rho, count = rank_correlation(sweep.records)
    wide, narrow = _legend_below(len(methods), 400, columns=2)
    figure.update_layout(wide)
    figure.update_xaxes(title={"text": "predicted goodput over AR's"})
    figure.update_yaxes(title={"text": "measured goodput over AR's"})
    order = "" if rho is None else f" Spearman's rho is {rho:.2f} over {count} trials."
    caption = (
        "On the dotted diagonal the simulator was right, above it too pessimistic; what matters "
        "for the search is the order." + order
    )
    return [Picture("predictions", "Predicted and measured", caption, figure, narrow, half=True)]


# --- draft trees ----------------------------------------------------------------------------------

_CHARACTER, _PADDING, _ROW, _GAP, _BOX = 7.3, 14, 28, 34, 22


def trees(sweep: SweepPicture, num_shapes: int = 4) -> list[Tree]:
    """Example drafts: the best trial's, then that of the best trial of each other shape."""
    found: dict[str, Tree] = {}
    for record in sweep.compared:
        plan = resolve(record.point.speculation)
        shape = plan.config.shape if plan.shape is not None else plan.method.drafter
        metrics = [m for m in (record.confirmed, record.metrics) if m is not None]
        drafts = [m.example for m in metrics if m.example is not None]
        example = max(drafts, key=lambda draft: len(draft.parent_indices), default=None)
        if example is None or not example.parent_indices or str(shape) in found:
            continue
        found[str(shape)] = layout_tree(
            example.parent_indices, example.texts, example.accepted,
            label=record.point.label, shape=str(shape),
        )  # fmt: skip
        if len(found) == num_shapes:
            break
    return list(found.values())


def layout_tree(
    parent_indices: Sequence[int],
    texts: Sequence[str],
    accepted: Sequence[int],
    *,
    label: str = "",
    shape: str = "",
) -> Tree:
    """Lay out boxes from left to right: a column for each depth, a row for each leaf."""
    count = len(parent_indices)
    children: list[list[int]] = [[] for _ in range(count + 1)]
    depth = [0] * count
    for node, parent in enumerate(parent_indices):
        children[parent].append(node)  # -1, the root, is the last
        depth[node] = 0 if parent < 0 else depth[parent] + 1
    shown = [token_text(text) for text in texts]
    widths = [_PADDING + _CHARACTER * len(text) for text in shown]
    root_text = "…"
    root_width = _PADDING + _CHARACTER * len(root_text)
    columns = [0.0] * (max(depth, default=0) + 2)
    columns[0] = root_width + _GAP
    for level in range(len(columns) - 1):
        widest = max((widths[n] for n in range(count) if depth[n] == level), default=0.0)
        columns[level + 1] = columns[level] + widest + _GAP
    rows = _rows(children, count)
    root_y = _row_of_parent(rows, children[-1])
    root = TreeNode(0, root_y, root_width, root_text, True, (0, 0))
    path = set(accepted)
    nodes = []
    for node, parent in enumerate(parent_indices):
        x, y = columns[depth[node]], rows[node]
        above = (
            (root_width, root_y)
            if parent < 0
            else (columns[depth[parent]] + widths[parent], rows[parent])
        )
        nodes.append(TreeNode(x, y, widths[node], shown[node], node in path, above))
    height = max(rows, default=0.0) + _ROW / 2
    return Tree(label, shape, count, len(path), columns[-1] - _GAP + 2, height, root, tuple(nodes))


def _rows(children: Sequence[Sequence[int]], count: int) -> list[float]:
    """The row of each node: leaves below one another, inner nodes amid their children."""
    rows = [0.0] * count
    next_row = _ROW / 2
    # Depth first without recursion: a chain may be as deep as drafts go.
    order, stack = [], list(reversed(children[-1]))
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children[node]))
    for node in order:
        if not children[node]:
            rows[node] = next_row
            next_row += _ROW
    for node in reversed(order):
        if children[node]:
            rows[node] = _row_of_parent(rows, children[node])
    return rows


def _row_of_parent(rows: Sequence[float], children: Sequence[int]) -> float:
    return (rows[children[0]] + rows[children[-1]]) / 2 if children else _ROW / 2


def token_text(text: str, longest: int = 20) -> str:
    """The text of a token's box: · for a space, ⏎ for a line break, cut if it is long."""
    shown = printable(text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·"))
    shown = shown if len(shown) <= longest else shown[: longest - 1] + "…"
    return shown or "∅"
