"""The board: rows and their files, what is left out, intervals, and the page."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.bench import BenchOptions
from paceline.bench.board import (
    board_methods,
    board_settings,
    measure_row,
    speedup_interval,
)
from paceline.bench.board_page import render_board, render_board_csv
from paceline.bench.board_rows import (
    BoardMachine,
    BoardMemory,
    BoardResult,
    BoardRow,
    Exactness,
    digest_of,
    read_row,
    read_rows,
    write_row,
)
from paceline.bench.footprint import footprint
from paceline.cluster import board_job
from paceline.errors import InvalidArgument
from paceline.methods import METHODS
from tests.modelzoo import make_model

ROOT = Path(__file__).parents[1]
MACHINE = BoardMachine(
    name="one", cpu="<CPU>", cores=2, threads=1, kernels="avx2", platform="Linux"
)


def result(category: str, speedup: float, **changes: Any) -> BoardResult:
    values: dict[str, Any] = {
        "category": category, "num_prompts": 2, "num_samples": 4, "speedup": speedup,
        "interval": (0.9 * speedup, 1.25 * speedup), "speedup_bound": 1.5 * speedup,
        "tokens_per_second": 100 * speedup, "mean_accepted_length": 1 + speedup,
        "drafted_by_depth": (10, 8), "accepted_by_depth": (8, 2), "draft_share": 0.25,
        "verify_rows": 3.0, "verify_ms": 2.0, "roofline_share": 0.5,
    }  # fmt: skip
    return BoardResult(**(values | changes))


def make_row(method: str = "prompt_lookup", speedup: float = 1.5, **changes: Any) -> BoardRow:
    settings = {"max_tokens": 8, "prompts": None}
    values: dict[str, Any] = {
        "version": 1, "method": method, "target": "demo", "suite": "built-in",
        "machine": MACHINE, "command": f"paceline board run --methods '{method}'",
        "commit": "0123abcd", "date": "2026-11-24T12:00:00+00:00", "paceline": "0.1", "python": "3",
        "torch": "2", "fingerprint": None, "settings": settings,
        "digest": digest_of(method, settings),
        "results": (result("all", speedup), result("<b>", speedup + 0.1)),
        "memory": BoardMemory(peak=500_000_000, drafter=1_500_000),
        "exactness": Exactness(num_prompts=2, num_identical=2, differing=()),
        "reason": None, "note": None,
    }  # fmt: skip
    return BoardRow(**(values | changes))


def missing_row(method: str) -> BoardRow:
    return make_row(method, results=(), memory=None, exactness=None, reason="no trained head")


# --- files ----------------------------------------------------------------------------------------


def test_a_file_has_the_whole_row(tmp_path: Path) -> None:
    for row in (make_row(), make_row("draft_model:length=fixed"), missing_row("medusa")):
        file = write_row(row, tmp_path)
        assert file.relative_to(tmp_path) == row.path
        assert read_row(file) == row
    assert sorted(path.name for path in tmp_path.rglob("*.json")) == [
        "draft_model-length=fixed.json", "medusa.json", "prompt_lookup.json",
    ]  # fmt: skip
    assert row.path.parent == Path("one/demo/built-in")
    assert [path for path in tmp_path.rglob("*") if path.suffix == ".part"] == []


@pytest.mark.parametrize(
    ("change", "field", "allowed"),
    [
        ({"version": 2}, "version", "1"),
        ({"method": ""}, "method", "a text"),
        ({"commit": ...}, "commit", "a value: the field is missing"),
        ({"speed": 3}, "speed", "one of version, method, "),
        ({"date": "yesterday"}, "date", "ISO 8601"),
        ({"date": "2026-11-24T12:00:00"}, "date", "time zone"),
        ({"settings": {"max_tokens": 9}}, "digest", "which method and settings have"),
        ({"machine": 3}, "machine", "an object"),
        ({"machine.cores": 0}, "machine.cores", "a number >= 1"),
        ({"machine.cores": 1.5}, "machine.cores", "an integer"),
        ({"results": []}, "results", 'one of them "all"'),
        ({"results.0.speedup": float("nan")}, "results[0].speedup", "a finite number"),
        ({"results.0.speedup": True}, "results[0].speedup", "a number"),
        ({"results.1.draft_share": 1.5}, "results[1].draft_share", "a number in [0, 1]"),
        ({"results.1.interval": [1]}, "results[1].interval", "a list of 2"),
        ({"results.1.interval": [2, 1]}, "results[1].interval", "the lower end first"),
        ({"results.1.interval": [1, "2"]}, "results[1].interval[1]", "a number"),
        ({"results.0.accepted_by_depth": [11, 2]}, "results[0].accepted_by_depth", "none larger"),
        ({"results.0.accepted_by_depth": [1]}, "results[0].accepted_by_depth", "as many"),
        ({"results.1.category": "all"}, "results", 'one of them "all"'),
        ({"memory": None}, "memory", "an object, where results are"),
        ({"exactness.num_prompts": 3}, "exactness.num_prompts", "2: num_identical and"),
        ({"reason": "it is slow"}, "results", "none with a reason"),
    ],
)
def test_a_wrong_field_is_named(
    change: dict[str, Any], field: str, allowed: str, tmp_path: Path
) -> None:
    value: Any = json.loads(json.dumps(asdict(make_row())))
    ((path, new),) = change.items()
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = value
    for part in parents:
        place = place[part]
    if new is ...:
        del place[last]
    else:
        place[last] = new
    file = tmp_path / "row.json"
    file.write_text(json.dumps(value))
    with pytest.raises(InvalidArgument) as error:
        read_row(file)
    assert error.value.field == f"{file}: {field}"
    assert allowed in error.value.allowed


@pytest.mark.parametrize("content", [None, "{", "[]", "3", "{}"])
def test_a_file_that_is_no_row_is_named(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "row.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidArgument, match=r"row\.json"):
        read_row(file)


def test_a_folder_without_rows(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="folders with files of rows"):
        read_rows([tmp_path])


def test_rows_of_several_machines_merge_and_the_newer_one_counts(tmp_path: Path) -> None:
    other = replace(MACHINE, name="two")
    # The same moment is 13:00 in another zone: as a text it would be the newer one.
    old = make_row(speedup=1.1, date="2026-11-24T12:30:00+01:00")
    write_row(old, tmp_path / "a")
    write_row(make_row(speedup=1.2), tmp_path / "b")
    write_row(make_row(speedup=1.3, machine=other), tmp_path / "b")
    write_row(make_row("ar", speedup=1.0), tmp_path / "b")
    found = read_rows([tmp_path / "b", tmp_path / "a"])
    assert [(row.machine.name, row.method, row.results[0].speedup) for row in found] == [
        ("one", "ar", 1.0), ("one", "prompt_lookup", 1.2), ("two", "prompt_lookup", 1.3),
    ]  # fmt: skip


def test_the_rows_in_the_documents_are_right() -> None:
    rows = read_rows([ROOT / "docs" / "board"])
    for row in rows:
        assert row.method.partition(":")[0] in METHODS
        assert (ROOT / "docs" / "board" / row.path).is_file(), row.path
        assert row.exactness is None or row.exactness.differing == ()
        assert "/home/" not in (text := str(asdict(row))) and "/tmp/" not in text
    assert {row.method for row in rows if row.reason is None} > {"ar", "draft_model"}
    assert "<title>" in render_board(rows)


# --- numbers --------------------------------------------------------------------------------------


def test_an_interval_over_prompts() -> None:
    assert speedup_interval([[1.5, 1.6]]) is None
    assert speedup_interval([[1.5], [1.5], [1.5]]) == (1.5, 1.5)
    # Of two prompts, a quarter of the samples has one of them twice, and a quarter the other.
    assert speedup_interval([[1.0], [2.0]]) == (1.0, 2.0)
    # Repetitions come with their prompt: the median of 1, 3 twice over is 2, and 2 between them.
    assert speedup_interval([[1.0, 3.0], [1.0, 3.0]]) == (2.0, 2.0)
    # All of 40 draws miss half of the prompts as good as never: the median stays between.
    low, high = speedup_interval([[1.0]] * 20 + [[2.0]] * 21) or (0, 0)
    assert (low, high) == (1.0, 2.0)
    values = np.random.default_rng(1).normal(1.5, 0.1, (100, 1))
    low, high = speedup_interval(values.tolist()) or (0, 0)
    # The standard error of a median of n normal numbers is 1.2533 sigma / sqrt(n).
    assert low == pytest.approx(np.median(values) - 1.96 * 0.012533, abs=0.012)
    assert high == pytest.approx(np.median(values) + 1.96 * 0.012533, abs=0.012)
    assert speedup_interval(values.tolist()) == (low, high)


def test_acceptance_by_depth_is_of_the_drafts_that_reach_it() -> None:
    assert result("all", 1.0).acceptance_by_depth == [0.8, 0.25]
    shallow = result("all", 1.0, drafted_by_depth=(0,), accepted_by_depth=(0,))
    assert shallow.acceptance_by_depth == []


def test_a_footprint_counts_shared_things_once_or_not_at_all() -> None:
    class Holder:
        def __init__(self, **values: Any) -> None:
            self.__dict__ |= values

    weights, table = torch.zeros(1000), np.zeros(500)
    holder = Holder(weights=weights, view=weights[10:20], table=table, part=table[:9], f=len)
    total = footprint([holder])
    assert 8000 < total < 8000 + 2000
    assert total - footprint([holder], [weights]) == 4000
    assert footprint([holder], [holder]) == 0


# --- measuring ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(zoo: Path) -> Path:
    return make_model("llama", zoo)


@pytest.fixture
def options(target: Path, tmp_path: Path) -> BenchOptions:
    file = tmp_path / "questions.jsonl"
    lines = [
        {"question_id": i, "category": "ab"[i % 2], "turns": [f"x = {i}, {i}, {i}, "]}
        for i in range(3)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return BenchOptions(target=target, prompts=file, max_tokens=12, repetitions=2, peers=False)


def test_a_row_is_measured(options: BenchOptions, tmp_path: Path) -> None:
    row = measure_row(options, "prompt_lookup:length=fixed", "paceline board run")
    assert read_row(write_row(row, tmp_path)) == row
    assert row.reason is None
    assert (row.suite, row.target) == ("spec-bench", Path(str(options.target)).name)
    assert row.exactness == Exactness(num_prompts=3, num_identical=3, differing=())
    assert row.memory is not None and row.memory.peak > 50e6
    assert [(r.category, r.num_prompts, r.num_samples) for r in row.results] == [
        ("all", 3, 6), ("a", 2, 4), ("b", 1, 2),
    ]  # fmt: skip
    overall, first, second = row.results
    assert overall.interval is not None and first.interval is not None
    assert overall.interval[0] <= overall.speedup <= overall.interval[1]
    assert second.interval is None
    for each in row.results:
        assert each.speedup_bound is not None and each.verify_rows is not None
        assert each.verify_rows > 1
        assert each.roofline_share is not None and each.roofline_share > 0
    assert sum(overall.drafted_by_depth) == sum(
        sum(each.drafted_by_depth) for each in (first, second)
    )


def test_a_method_that_cannot_run_gives_a_row_that_says_why(options: BenchOptions) -> None:
    for method, reason in (
        ("medusa", "no trained head"),
        ("draft_model", "drafter not loaded here"),
        ("prompt_lookup:no_such_knob=1", "no_such_knob"),
    ):
        row = measure_row(options, method, "paceline board run")
        assert row.results == ()
        assert row.reason is not None and reason in row.reason
        assert str(ROOT) not in row.reason


def test_settings_change_with_the_content_of_the_prompts(options: BenchOptions) -> None:
    before = board_settings(options)
    assert before["prompts"].startswith("questions.jsonl ")
    assert str(options.target) not in str(before)
    Path(str(options.prompts)).write_text('{"question_id": 1, "category": "a", "turns": ["y"]}\n')
    assert board_settings(options) != before
    with pytest.raises(InvalidArgument, match=r"gone\.jsonl"):
        board_settings(replace(options, prompts="gone.jsonl"))


def test_the_rows_of_a_board() -> None:
    every = board_methods("all")
    assert every[0] == "ar" and "client" not in every and len(every) > 40
    assert all(METHODS[name].lossless for name in every)
    assert board_methods("draft_model:length=fixed") == ["ar", "draft_model:length=fixed"]


def test_what_is_measured_is_left_out(
    options: BenchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows"
    measured: list[str] = []
    stop_at = {"lade"}

    def apart(
        job: board_job.BoardJob, method: str, like: BoardRow, progress: Callable[..., None]
    ) -> BoardRow:
        if method in stop_at:
            raise KeyboardInterrupt
        measured.append(method)
        if method == "medusa":
            return board_job.for_method(like, method, "no trained head")
        memory = BoardMemory(peak=1, drafter=0)
        row = board_job.for_method(like, method)
        return replace(row, results=(result("all", 2.0),), memory=memory)

    monkeypatch.setattr(board_job, "_measure_apart", apart)
    methods = ("ar", "medusa", "lade", "prompt_lookup")
    job = board_job.BoardJob(options=options, methods=methods, command="paceline", out=out)
    steps: list[tuple[int, int]] = []

    def measure(job: board_job.BoardJob) -> tuple[int, list[str]]:
        """How many rows were there, and which ones were measured."""
        measured.clear()
        there = board_job.run_here(job, lambda row: None, lambda i, n, _: steps.append((i, n)))
        return there, list(measured)

    with pytest.raises(KeyboardInterrupt):
        measure(job)
    assert len(list(out.rglob("*.json"))) == steps[-1][0] == 2
    stop_at.clear()
    # What could not run is tried again.
    assert measure(job) == (1, ["medusa", "lade", "prompt_lookup"])
    assert measure(job) == (3, ["medusa"])
    assert measure(replace(job, again=True)) == (0, list(methods))
    longer = replace(job, options=replace(options, max_tokens=13))
    assert measure(longer) == (0, list(methods))
    (broken,) = out.rglob("ar.json")
    broken.write_text("{")
    assert measure(longer) == (2, ["ar", "medusa"])


# --- the page -------------------------------------------------------------------------------------


def board() -> list[BoardRow]:
    """Two machines, three methods, one of which is not exact and one of which did not run."""
    other = replace(MACHINE, name="two", cpu="Other")
    exact = Exactness(num_prompts=2, num_identical=1, differing=("question-<7>",))
    return [
        make_row("ar", 1.0, results=(
            result("all", 1.0, drafted_by_depth=(), accepted_by_depth=(), interval=None),
        )),
        make_row("prompt_lookup", 1.5),
        make_row("draft_model", 10.5, exactness=exact),
        make_row("prompt_lookup", 2.5, machine=other, command="paceline board run --other"),
        missing_row("medusa"),
    ]  # fmt: skip


def test_the_page_escapes_and_loads_nothing() -> None:
    page = render_board(board())
    assert "&lt;CPU&gt;" in page and "<CPU>" not in page and "question-<7>" not in page
    assert "no trained head" in page and "0123abcd" in page
    assert not re.findall(r"(?:src|href)=\"(?!data:)|https?://|@import|url\(", page)
    assert "<title>" in render_board([missing_row("medusa")])  # nothing was measured


def test_csv_has_every_number() -> None:
    lines = list(csv.DictReader(io.StringIO(render_board_csv(board()))))
    assert len(lines) == 1 + 2 + 2 + 2 + 1
    first = lines[1]
    assert (first["method"], first["category"], first["speedup"]) == ("prompt_lookup", "all", "1.5")
    assert (first["accepted_by_depth"], first["speedup_low"]) == ("8 2", str(0.9 * 1.5))
    assert (first["machine_name"], first["commit"], first["drafter_memory"]) == (
        "one", "0123abcd", "1500000",
    )  # fmt: skip
    assert lines[-1]["reason"] == "no trained head"


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), pytest.param(380, "dark", marks=pytest.mark.slow)]
)
def test_the_board_in_a_browser(width: int, scheme: str, chromium: Any, tmp_path: Path) -> None:
    file = tmp_path / "board.html"
    file.write_text(render_board(board()), "utf-8")
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda m: complaints.append(f"{m.type}: {m.text}"))
    page.on("pageerror", lambda e: complaints.append(str(e)))
    page.on("request", lambda r: requests.append(r.url))
    page.goto(file.as_uri())

    def column(name: str) -> list[str]:
        """The visible cells under a heading."""
        cells: list[str] = page.evaluate(
            "name => { const table = document.querySelector('#table table');"
            "const names = [...table.tHead.rows[0].cells].map(cell => cell.innerText.trim());"
            "const column = names.indexOf(name);"
            "return [...table.tBodies[0].rows].filter(r => r.offsetParent !== null)"
            ".map(r => r.cells[column].innerText.trim()); }",
            name,
        )
        return cells

    def visible(selector: str) -> int:
        count: int = page.evaluate(
            "s => [...document.querySelectorAll(s)].filter(e => e.getClientRects().length).length",
            selector,
        )
        return count

    # Over all prompts, the fastest first; each with a bar and a dot, and with a curve if it drafts.
    assert column("× AR") == ["10.50", "2.50", "1.50", "1.00"]
    assert column("machine") == ["one", "two", "one", "one"]
    assert (visible("#speedup .entry"), visible("circle.dot"), visible(".curve")) == (4, 4, 3)

    # Sort: by value, so that 10.50 is not among the smallest, and numbers before dashes.
    page.get_by_role("button", name="× AR").click()
    page.get_by_role("button", name="× AR").click()
    assert column("× AR") == ["1.00", "1.50", "2.50", "10.50"]
    page.get_by_role("button", name="95 %").click()
    assert column("95 %") == ["9.45–13.12", "2.25–3.12", "1.35–1.88", "–"]
    assert page.locator("th[aria-sort=descending]").text_content() == "95 %"

    # Filter.
    page.fill("[name=method]", " Lookup")
    assert column("method") == ["prompt_lookup"] * 2
    page.select_option("[name=machine]", "two")
    assert column("× AR") == ["2.50"]
    assert (visible("#speedup .entry"), visible("circle.dot"), visible(".curve")) == (1, 1, 1)
    page.select_option("[name=category]", "")
    assert column("category") == ["<b>", "all"] or column("category") == ["all", "<b>"]
    page.select_option("[name=category]", "<b>")
    assert column("× AR") == ["2.60"]
    assert page.locator("#count").text_content() == "1 of 7 lines"

    # Hover: where the number comes from, beside it and inside the window.
    tip = page.locator("#tip")
    assert not tip.is_visible()
    page.locator("#speedup .entry:not(.out)").hover()
    assert "paceline board run --other" in tip.inner_text()
    assert "prompt_lookup, <b> prompts" in tip.inner_text()
    for shown in ("0123abcd", "2026-11-24T12:00:00", "two: Other"):
        assert shown in tip.inner_text()
    box = tip.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width
    assert box["y"] >= 0 and box["y"] + box["height"] <= 900
    assert page.locator("tr.on").count() == page.locator("circle.on").count() == 1
    page.locator("h1").hover()
    assert not tip.is_visible()
    # A click keeps it, Escape closes it, and the keyboard reaches it.
    page.fill("[name=method]", "draft_model")
    page.select_option("[name=machine]", "")
    page.select_option("[name=category]", "all")
    page.locator("#table tbody tr:not(.out)").click(position={"x": 20, "y": 10})
    page.locator("h1").hover()
    assert "question-<7>" in tip.inner_text()
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    page.focus("[name=method]")
    page.focus("#table tbody tr:not(.out)")
    assert tip.is_visible()

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert complaints == []
    assert requests == [file.as_uri()]
    context.close()
