"""The report of a sweep: what is drawn, what is left out, and that a real browser shows it."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from matplotlib.image import imread

from paceline.errors import InvalidArgument
from paceline.tuning import pictures
from paceline.tuning.report import render, write_report
from paceline.tuning.results import ExampleDraft, Results, TrialRecord, best_trial
from tests.tuning.folders import (
    AR,
    full_records,
    point,
    record,
    write_sweep,
)

Pixels = npt.NDArray[np.float64]
TWO = ("goodput", "latency_p99")
EVERY_PICTURE = [
    "lengths", "heat-draft_model_tree-node_budget", "heat-layer_skip-exit_layer",
    "heat-sequoia-node_budget", "intervals", "front-goodput-latency_p99", "acceptance", "parallel",
    "predictions",
]  # fmt: skip


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A sweep with everything: two objectives, predictions, stopped, failed and refused trials."""
    folder = tmp_path_factory.mktemp("full")
    return write_sweep(str(folder), full_records(), predictions=True, objectives=TWO)


def sweep_of(results: Results) -> pictures.SweepPicture:
    return pictures.SweepPicture(results.manifest(), results.trials(), results.predictions())


def names(results: Results) -> list[str]:
    return [picture.name for picture in pictures.draw(sweep_of(results))]


def section(page: str, name: str) -> bool:
    return f'id="{name}"' in page


# --- what is there and what is left out -----------------------------------------------------------


def test_everything_is_drawn_and_the_file_is_written(full: Results) -> None:
    path = write_report(full)
    assert path == full.path("report.html")
    page = full.read("report.html")
    assert re.findall(r'class="plot" id="([^"]+)"', page) == EVERY_PICTURE == names(full)
    for name in ("summary", "serve", "trees", "front", "trials", "refused", "failed", "stopped"):
        assert section(page, name), name
    assert f"paceline up --config {full.path('best.yaml')}" in page
    assert "95 % confidence interval" in page
    assert "Spearman&#39;s rho is 0.9" in page


def test_the_report_of_a_folder_in_memory() -> None:
    results = write_sweep("memory://sweeps/one", full_records())
    assert write_report(results) == "memory://sweeps/one/report.html"
    assert "<title>demo: sweep report</title>" in results.read("report.html")


def test_one_objective_has_no_front(tmp_path: Path) -> None:
    results = write_sweep(str(tmp_path), full_records(), predictions=True)
    assert not any(name.startswith("front") for name in names(results))
    assert not section(render(results), "front")


def test_three_objectives_have_three_fronts(tmp_path: Path) -> None:
    objectives = ("latency_p50", "goodput", "latency_p99")
    results = write_sweep(str(tmp_path), full_records(), objectives=objectives)
    drawn = [name for name in names(results) if name.startswith("front")]
    assert drawn == [
        "front-latency_p50-goodput", "front-latency_p50-latency_p99", "front-goodput-latency_p99"
    ]  # fmt: skip


def test_without_predictions_only_measurements_are_drawn(tmp_path: Path) -> None:
    records = [r.model_copy(update={"predicted": None}) for r in full_records()]
    results = write_sweep(str(tmp_path), records)
    missing = set(EVERY_PICTURE) - set(names(results))
    # Of sequoia one node budget was measured, which is no map.
    assert missing == {"predictions", "front-goodput-latency_p99", "heat-sequoia-node_budget"}
    drawn = {picture.name: picture for picture in pictures.draw(sweep_of(results))}
    assert not [t for t in drawn["lengths"].figure.data if t.line.dash == "dash"]
    assert "≈" not in drawn["heat-layer_skip-exit_layer"].caption
    page = render(results)
    assert "Spearman" not in page and "<button>predicted" not in page
    assert "dashed" not in drawn["lengths"].caption


def test_a_sweep_that_has_just_begun_has_no_pictures(tmp_path: Path) -> None:
    results = write_sweep(str(tmp_path), [], best_yaml=False, state="running", finished=None)
    page = render(results)
    assert "No trial has been measured yet." in page
    assert 'class="plot"' not in page and len(page) < 50_000  # nor plotly, for nothing
    for name in ("serve", "trees", "front", "trials", "refused", "failed", "stopped"):
        assert not section(page, name), name
    assert section(page, "environment") and section(page, "space")


def test_predictions_alone_are_drawn_before_the_first_trial(tmp_path: Path) -> None:
    results = write_sweep(str(tmp_path), [], predictions=True, best_yaml=False)
    assert names(results) == [name for name in EVERY_PICTURE if name[:4] in ("leng", "heat")]


def test_only_ar_and_failures(tmp_path: Path) -> None:
    failed = record(1, point("eagle"), status="failed", reason="no head")
    results = write_sweep(str(tmp_path), [record(0, AR), failed])
    page = render(results)
    assert names(results) == []
    assert "No configuration is surely faster" in page
    assert section(page, "failed") and "no head" in page


def test_an_interval_that_holds_1_is_not_called_faster(tmp_path: Path) -> None:
    where = point("layer_skip", num_speculative_tokens=2, exit_layer=4)
    one = record(1, where)
    assert one.metrics is not None
    ratio = one.metrics.goodput_ratio.model_copy(update={"low": 0.97})
    close = one.metrics.model_copy(update={"goodput_ratio": ratio})
    unsure = write_sweep(
        str(tmp_path / "a"), [record(0, AR), one.model_copy(update={"metrics": close})]
    )
    assert "No configuration is surely faster" in render(unsure)
    sure = write_sweep(str(tmp_path / "b"), [record(0, AR), one])
    assert "the whole interval is above 1" in render(sure)


@pytest.mark.parametrize(
    ("identical", "words"),
    [(True, "every token, in all prompts"), (False, "some tokens differ"), (None, "distribution")],
)
def test_identity_is_said_as_it_was_measured(
    identical: bool | None, words: str, tmp_path: Path
) -> None:
    one = record(1, point("draft_model", num_speculative_tokens=4))
    assert one.metrics is not None
    changed = one.metrics.model_copy(update={"identical_to_ar": identical})
    results = write_sweep(str(tmp_path), [one.model_copy(update={"metrics": changed})])
    (tile,) = re.findall(r"identical to AR</span>(.*?)</div>", render(results), re.DOTALL)
    assert words in tile


def test_a_folder_without_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as error:
        write_report(Results(str(tmp_path)))
    assert error.value.field == "result"
    assert not (tmp_path / "report.html").exists()


# --- numbers --------------------------------------------------------------------------------------


def test_the_table_shows_the_records(full: Results) -> None:
    page = render(full)
    rows = dict(re.findall(r'<tr[^>]* data-key="(\w+)">(.*?)</tr>', page, re.DOTALL))
    measured = [r for r in full.trials() if r.metrics is not None]
    assert rows.keys() == {r.key for r in measured}
    for one in measured:
        assert one.metrics is not None
        cells = [
            re.sub(r"<[^>]+>", "", cell)
            for cell in re.findall(r"<td[^>]*>(.*?)</td>", rows[one.key], re.DOTALL)
        ]
        good, late = one.objective("goodput"), one.objective("latency_p99")
        assert cells[0] == str(one.number)
        assert cells[1] == one.point.label.replace("num_speculative_tokens=", "γ=")
        assert cells[2] == f"{good.value:.2f} [{good.low:.2f}, {good.high:.2f}]"
        assert cells[3] == f"{late.value:.2f} [{late.low:.2f}, {late.high:.2f}]"
        assert cells[4] == f"{one.predicted:.2f}"
        values = one.confirmed or one.metrics
        assert cells[5] == f"{values.tokens_per_second:.1f}"
        assert cells[7] == f"{values.mean_accepted_length:.2f}"
        assert cells[9] == f"{values.latency_p50_ms:.1f}"
        assert ("confirmed" in cells) == (one.confirmed is not None)
    best = best_trial(measured, "goodput")
    assert best is not None and best.confirmed is not None
    assert f'class="best" data-key="{best.key}"' in page


def test_the_forest_holds_every_interval(full: Results) -> None:
    (picture,) = pictures.intervals(sweep_of(full))
    drawn = sorted(
        (x, x - minus, x + plus)
        for trace in picture.figure.data
        for x, minus, plus in zip(
            trace.x, trace.error_x.arrayminus, trace.error_x.array, strict=True
        )
    )
    shown = [r for r in full.trials() if r.metrics is not None]
    wanted = [r.objective("goodput") for r in shown]
    expected = sorted((v.value, v.low, v.high) for v in wanted)
    assert len(drawn) == len(expected)
    for ours, theirs in zip(drawn, expected, strict=True):
        assert ours == pytest.approx(theirs)
    labels = {trace.name: len(trace.x) for trace in picture.figure.data}
    assert labels == {
        "measured once more, side by side": 3,
        "finished": len(shown) - 3 - 6 - 1 - 1,
        "stopped early": 6,
        "refused by a constraint": 1,
        "AR over AR: the noise": 1,
    }


def test_a_heat_map_shows_what_was_measured_and_else_what_is_predicted(full: Results) -> None:
    cells = pictures.heat_cells(
        sweep_of(full), "layer_skip", "num_speculative_tokens", "exit_layer"
    )
    assert len(cells) == 6 * 4
    measured = {
        (r.point.speculation.num_speculative_tokens, r.point.speculation.exit_layer): r
        for r in full.trials()
        if r.point.speculation.method == "layer_skip" and r.metrics is not None
    }
    predicted = {
        (p.point.speculation.num_speculative_tokens, p.point.speculation.exit_layer): p
        for p in full.predictions()
        if p.point.speculation.method == "layer_skip"
    }
    assert 0 < len(measured) < len(cells)
    for place, cell in cells.items():
        assert cell.measured == (place in measured)
        if cell.measured:
            assert cell.ratio == measured[place].objective("goodput").value
        else:
            assert cell.ratio == predicted[place].goodput_ratio
    drawn = next(p for p in pictures.heat_maps(sweep_of(full)) if "layer_skip" in p.name)
    assert len(drawn.figure.layout.shapes) == len(measured)  # the frames


def test_a_line_shows_the_best_of_each_length(full: Results) -> None:
    (picture,) = pictures.lengths(sweep_of(full))
    solid = next(t for t in picture.figure.data if t.name == "layer_skip" and t.line.dash is None)
    for length, value in zip(solid.x, solid.y, strict=True):
        assert value == max(
            r.objective("goodput").value
            for r in full.trials()
            if r.counts
            and r.point.speculation.method == "layer_skip"
            and r.point.speculation.num_speculative_tokens == length
        )


def test_acceptance_is_accepted_over_drafted() -> None:
    assert pictures.acceptance_rates((8, 3), (10, 6, 4, 0)) == [0.8, 0.5, 0.0, None]


def test_predicted_against_measured_leaves_ar_out(full: Results) -> None:
    (picture,) = pictures.predicted_against_measured(sweep_of(full))
    drawn = {(x, y) for trace in picture.figure.data for x, y in zip(trace.x, trace.y, strict=True)}
    assert drawn == {
        (r.predicted, r.objective("goodput").value)
        for r in full.trials()
        if r.metrics is not None and not r.point.is_ar
    }


def test_parallel_coordinates_have_a_place_for_missing_knobs(full: Results) -> None:
    (picture,) = pictures.parallel_coordinates(sweep_of(full))
    measured = [r for r in full.trials() if r.metrics is not None and not r.point.is_ar]
    assert len(picture.figure.data) == len(measured)
    ticks = [note.text for note in picture.figure.layout.annotations]
    assert {"–", "layer_skip", "draft_model_tree", "32", "10"} <= set(ticks)
    for trace in picture.figure.data:
        assert len(trace.x) == len(trace.y) and all(0 <= y <= 1 for y in trace.y)


# --- draft trees ----------------------------------------------------------------------------------


def test_a_tree_keeps_its_boxes_apart() -> None:
    parents = (-1, -1, 0, 0, 1, 2, 4, 4)
    tree = pictures.layout_tree(parents, ["tok" * (i % 3) for i in range(8)], (1, 4))
    boxes = [tree.root, *tree.nodes]
    for i, a in enumerate(boxes):
        assert a.x >= 0 and a.x + a.width <= tree.width and 11 <= a.y <= tree.height - 11
        for b in boxes[:i]:
            aside = a.x >= b.x + b.width or b.x >= a.x + a.width
            assert aside or abs(a.y - b.y) >= 22, (a, b)
    for node, parent in enumerate(parents):
        above = boxes[parent + 1]
        assert tree.nodes[node].x > above.x + above.width
        assert tree.nodes[node].parent == (above.x + above.width, above.y)
    assert [n.accepted for n in tree.nodes] == [i in (1, 4) for i in range(8)]


def test_trees_are_those_of_the_best_trials_of_different_shapes(full: Results) -> None:
    trees = pictures.trees(sweep_of(full))
    assert [tree.shape for tree in trees] == ["chain", "kary", "sequoia", "suffix"]
    best = best_trial(full.trials(), "goodput")
    assert best is not None and best.metrics is not None
    assert trees[0].label == best.point.label
    assert best.metrics.example is not None
    assert trees[0].num_nodes == len(best.metrics.example.parent_indices)


def test_the_deepest_and_the_widest_draft_can_be_laid_out() -> None:
    chain = pictures.layout_tree(tuple(range(-1, 255)), ["x"] * 256, ())
    assert len({node.y for node in chain.nodes}) == 1
    star = pictures.layout_tree((-1,) * 256, ["x"] * 256, ())
    assert len({node.y for node in star.nodes}) == 256


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "·the"),
        ("\n\t", "⏎⇥"),
        ("", "∅"),
        ("\x1b[31m\x07", "\\x07"),
        ("é" * 30, "é" * 19 + "…"),
    ],
)
def test_every_token_has_something_to_show(text: str, shown: str) -> None:
    assert pictures.token_text(text) == shown


# --- a browser ------------------------------------------------------------------------------------


class Opened:
    """A report in a browser, and everything that the browser complained about or asked for."""

    def __init__(
        self, browser: Any, file: str, *, width: int = 1280, scheme: str = "light"
    ) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(f"{m.type}: {m.text}"))
        self.page.on("pageerror", lambda e: self.complaints.append(str(e)))
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.goto(Path(file).as_uri())

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def plot_area(self, name: str) -> Pixels:
        """What lies between the axes of a picture: only data and grid lines."""
        area = self.page.locator(f"#{name} .nsewdrag")
        area.scroll_into_view_if_needed()
        box = area.bounding_box()
        visible = min(box["width"], self.page.viewport_size["width"] - box["x"])
        return pixels(self.page.screenshot(clip={**box, "width": visible}))


def pixels(png: bytes) -> Pixels:
    """The colours of a picture.  # [height, width, 3] float, 0 to 1"""
    return np.asarray(imread(io.BytesIO(png)))[..., :3]


def is_blank(image: Pixels) -> bool:
    """Whether nothing but paper and a grid is there: few colours, nearly all of it one."""
    _, counts = np.unique(image.reshape(-1, 3), axis=0, return_counts=True)
    return len(counts) < 12 or counts.max() / counts.sum() > 0.998


@pytest.fixture(scope="module")
def report_file(full: Results) -> str:
    return write_report(full)


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        pytest.param(1280, "light", marks=pytest.mark.slow),
        pytest.param(390, "dark", marks=pytest.mark.slow),
        pytest.param(1280, "dark", marks=pytest.mark.nightly),
        pytest.param(390, "light", marks=pytest.mark.nightly),
    ],
)
def test_a_browser_shows_every_picture(
    width: int, scheme: str, chromium: Any, report_file: str
) -> None:
    with Opened(chromium, report_file, width=width, scheme=scheme) as opened:
        page = opened.page
        for name in EVERY_PICTURE:
            assert not is_blank(opened.plot_area(name)), name
        trees = page.locator("#trees svg")
        assert trees.count() == 4
        for i in range(4):
            trees.nth(i).scroll_into_view_if_needed()
            assert not is_blank(pixels(trees.nth(i).screenshot())), f"tree {i}"
        body = page.evaluate("getComputedStyle(document.body).backgroundColor")
        text = page.evaluate("getComputedStyle(document.querySelector('#intervals .xtitle')).fill")
        dark = [sum(map(int, re.findall(r"\d+", colour)[:3])) < 384 for colour in (body, text)]
        assert dark == ([True, False] if scheme == "dark" else [False, True])
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.complaints == []
        assert opened.requests == [Path(report_file).as_uri()]


@pytest.mark.slow
def test_an_empty_plot_counts_as_blank(chromium: Any, report_file: str) -> None:
    with Opened(chromium, report_file) as opened:
        opened.page.evaluate(
            "Plotly.react('lengths', [], {...document.getElementById('lengths').layout, shapes: [],"
            " annotations: [], xaxis: {range: [0, 9]}, yaxis: {range: [0, 3]}})"
        )
        assert is_blank(opened.plot_area("lengths"))


@pytest.mark.slow
def test_pictures_follow_the_colour_scheme(chromium: Any, report_file: str) -> None:
    from playwright.sync_api import expect

    with Opened(chromium, report_file) as opened:
        title = opened.page.locator("#lengths .xtitle")
        before = title.evaluate("element => getComputedStyle(element).fill")
        opened.page.emulate_media(color_scheme="dark")
        # Not wait_for_function: it evaluates text in the page, which the page's policy forbids.
        expect(title).not_to_have_css("fill", before)


def test_a_click_on_a_heading_sorts_the_trials(chromium: Any, report_file: str) -> None:
    with Opened(chromium, report_file) as opened:
        page = opened.page
        headings = page.locator("#trials th").all_inner_texts()
        heading = next(i for i, text in enumerate(headings) if text.startswith("p50 ms"))

        def column(i: int) -> list[str]:
            return page.locator(f"#trials tbody td:nth-child({i + 1})").all_inner_texts()

        page.locator("#trials th button").nth(heading).click()
        values = [float(value) for value in column(heading)]
        assert values == sorted(values, reverse=True) and len(set(values)) > 5
        page.locator("#trials th button").nth(heading).click()
        assert [float(value) for value in column(heading)] == sorted(values)
        page.locator("#trials th button").nth(1).click()
        labels = column(1)
        page.locator("#trials th button").nth(1).click()
        assert column(1) == labels[::-1]
        assert opened.complaints == []


HOSTILE = '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2"></script>'


def hostile_records() -> list[TrialRecord]:
    where = point("draft_model", num_speculative_tokens=3)
    one = record(1, where, refused=HOSTILE, node=HOSTILE, predicted=1.5)
    assert one.metrics is not None
    draft = ExampleDraft(
        parent_indices=(-1, 0, 1), texts=("<script>", "{{ 7*7 }}", "&lt;"), accepted=(0,)
    )
    one = one.model_copy(update={"metrics": one.metrics.model_copy(update={"example": draft})})
    failed = record(2, point("eagle"), status="failed", reason=f"{HOSTILE}\n\x1b[31mred\x1b[0m")
    return [record(0, AR), one, failed, record(3, point("sequoia", num_speculative_tokens=4))]


@pytest.mark.slow
def test_nothing_that_a_token_or_a_reason_says_is_run(chromium: Any, tmp_path: Path) -> None:
    results = write_sweep(
        str(tmp_path), hostile_records(), name=HOSTILE, space={"space": {"x": HOSTILE}},
        environment={"cpu": HOSTILE}, seconds={HOSTILE: 1.0},
    )  # fmt: skip
    with Opened(chromium, write_report(results)) as opened:
        page = opened.page
        assert page.evaluate("window.hacked") is None
        assert page.locator("img").count() == 0
        texts = page.locator("#trees svg").nth(1).locator("text").all_text_contents()
        assert texts == ["…", "<script>", "{{·7*7·}}", "&lt;"]
        assert page.locator("#failed td.reason").inner_text() == f"{HOSTILE}\nred"
        assert page.locator("#refused td.reason").inner_text() == HOSTILE
        assert page.locator("h1").inner_text() == HOSTILE
        curve = page.evaluate(
            "document.getElementById('intervals').data.findIndex(t => t.name.startsWith('refused'))"
        )
        page.evaluate(f"Plotly.Fx.hover('intervals', [{{curveNumber: {curve}, pointNumber: 0}}])")
        label = page.locator("#intervals .hoverlayer text").first.text_content()
        assert f"refused: {HOSTILE}" in label
        assert page.evaluate("window.hacked") is None
        assert opened.complaints == []
        assert len(opened.requests) == 1
