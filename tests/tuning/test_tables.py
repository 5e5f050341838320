"""The tables of a sweep: the same numbers as the records, and honest words about changes."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.errors import InvalidArgument
from paceline.tuning import tables
from paceline.tuning.results import Interval, Results, TrialRecord, best_trial, pareto_front
from tests.tuning.folders import (
    AR,
    ENVIRONMENT,
    SPACE,
    full_records,
    metrics,
    point,
    record,
    write_sweep,
)

TWO = ("goodput", "latency_p99")


def printed(print_to: Callable[[Console], None], width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_to(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown(results: Results, width: int = 120) -> str:
    return printed(lambda console: tables.show(results, console), width)


def compared(a: Results, b: Results) -> str:
    return printed(lambda console: tables.compare(a, b, console))


def with_goodput(number: int, length: int, value: float, half: float) -> TrialRecord:
    """A trial with a known interval."""
    one = record(number, point("draft_model", num_speculative_tokens=length))
    assert one.metrics is not None
    interval = Interval(value=value, low=value - half, high=value + half)
    changed = one.metrics.model_copy(update={"goodput_ratio": interval})
    return one.model_copy(update={"metrics": changed})


@pytest.fixture
def full(tmp_path: Path) -> Results:
    return write_sweep(str(tmp_path / "full"), full_records(), predictions=True, objectives=TWO)


# --- one sweep ------------------------------------------------------------------------------------


def test_summary_holds_the_records(full: Results) -> None:
    found = json.loads(json.dumps(tables.summary(full), allow_nan=False))
    records = {r.key: r for r in full.trials()}
    assert {row["key"] for row in found["trials"]} == records.keys()
    for row in found["trials"]:
        one = records[row["key"]]
        assert row["label"] == one.point.label
        assert row["point"]["speculation"] == one.point.speculation.overrides()
        rebuilt = {key: value for key, value in row.items() if key != "label"}
        assert TrialRecord.model_validate_json(json.dumps(rebuilt)).point.key == one.key
        if one.metrics is None:
            assert row["metrics"] is None
        else:
            assert row["metrics"]["goodput_ratio"] == one.metrics.goodput_ratio.model_dump()
            assert "example" not in row["metrics"]
    best = best_trial(records.values(), "goodput")
    assert best is not None
    assert found["best"] == best.key == found["trials"][0]["key"]
    assert found["pareto"] == [r.key for r in pareto_front(records.values(), TWO)]
    assert found["counts"] == {"finished": 23, "stopped": 6, "failed": 2, "refused": 1}
    assert found["files"] == {"best.yaml": full.path("best.yaml")}
    assert found["objectives"] == list(TWO)


def test_show_prints_the_best_trials_with_their_numbers(full: Results) -> None:
    text = shown(full)
    lines = text.splitlines()
    best = best_trial(full.trials(), "goodput")
    assert best is not None
    value, late = best.objective("goodput"), best.objective("latency_p99")
    (line,) = [line for line in lines if "★" in line and "γ=" in line]
    assert tables.short_label(best.point) in line
    assert f"{value.value:.2f}  {value.low:.2f}–{value.high:.2f}  {late.value:.2f}" in line
    assert f"{tables.latest(best).tokens_per_second:.1f}" in line
    (ar,) = [line for line in lines if " ar " in line]
    assert "1.00  0.98–1.02" in ar and "612.5" in ar
    assert "trials: 23 finished, 6 stopped, 2 failed; 1 refused" in text
    rho, count = tables.rank_correlation(full.trials())
    assert f"Spearman's rho {rho:.2f} over {count} trials" in text
    assert f"paceline up --config {full.path('best.yaml')}" in text
    assert "report.html" not in text  # there is none yet
    assert "failed (RuntimeError: worker 7 died): layer_skip" in text
    assert "refused (latency_p99_ms: 203.1, allowed 150): sequoia" in text


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_number_is_cut_at_any_width(width: int, full: Results) -> None:
    text = shown(full, width)
    assert "…" not in text
    lines = [line for line in text.splitlines() if full.url not in line]  # paths stay whole
    assert len(lines) > 12 and all(len(line) <= width for line in lines)
    best = best_trial(full.trials(), "goodput")
    assert best is not None
    assert f"{best.objective('goodput').low:.2f}–{best.objective('goodput').high:.2f}" in text


def test_show_before_the_first_trial(tmp_path: Path) -> None:
    results = write_sweep(str(tmp_path), [], best_yaml=False, state="running", finished=None)
    text = shown(results)
    assert "trials: none" in text and "no trial has been measured" in text
    assert "Spearman" not in text and "--config" not in text
    assert tables.summary(results)["best"] is None


def test_show_is_not_fooled_by_a_reason(tmp_path: Path) -> None:
    bad = "[red]no[/] \x1b]0;title\x07\x1b[31mred\n" + "long " * 200
    failed = record(1, point("eagle"), status="failed", reason=bad)
    text = shown(write_sweep(str(tmp_path), [record(0, AR), failed]))
    assert "[red]no[/]" in text
    assert "\x1b" not in text and "\x07" not in text
    assert len(text) < 2000


def test_rank_correlation() -> None:
    def trial(number: int, predicted: float, measured: float) -> TrialRecord:
        one = with_goodput(number, number, measured, 0.01)
        return one.model_copy(update={"predicted": predicted})

    rising = [trial(1, 1.0, 1.1), trial(2, 1.5, 1.2), trial(3, 1.6, 2.5)]
    ar = record(0, AR, predicted=1.0)
    assert tables.rank_correlation([ar, *rising]) == (pytest.approx(1.0), 3)
    swapped = [trial(1, 1.0, 1.2), trial(2, 1.5, 1.1), trial(3, 1.6, 2.5)]
    assert tables.rank_correlation(swapped) == (pytest.approx(0.5), 3)
    assert tables.rank_correlation([ar, *rising[:2]]) == (None, 2)
    assert tables.rank_correlation([trial(i, 1.0, i) for i in (1, 2, 3)]) == (None, 3)


def test_confirmed_trials_come_first_and_refused_ones_last() -> None:
    records = [with_goodput(i, i, value, 0.05) for i, value in enumerate((2.0, 1.9, 1.8, 2.5), 1)]
    again = metrics(records[2].point, random.Random(1))
    records[2] = records[2].model_copy(update={"confirmed": again})
    records[3] = records[3].model_copy(update={"refused": "memory_mb: 9, allowed 8"})
    ordered = tables.best_first([record(0, AR), *records], "goodput")
    assert [one.number for one in ordered] == [3, 1, 2, 0, 4]
    assert tables.latest(ordered[0]) == again
    assert tables.latest(ordered[1]) == records[0].metrics


# --- two sweeps -----------------------------------------------------------------------------------


def test_a_sweep_is_equal_to_itself(full: Results) -> None:
    found = tables.comparison(full, full)
    assert found["settings"] == {}
    assert found["only_a"] == found["only_b"] == []
    measured = [r for r in full.trials() if r.metrics is not None and not r.point.is_ar]
    assert len(found["points"]) == len(measured)
    for one in found["points"]:
        assert one["difference"] == 0 and one["overlap"] and not one["changed"]
        assert one["a"] == one["b"]
    text = compared(full, full)
    assert "are the same" in text
    assert f"0 of {len(measured)} points changed" in text


def test_changed_is_said_only_where_intervals_do_not_overlap(tmp_path: Path) -> None:
    before = [with_goodput(i, 2 * i, value, 0.1) for i, value in ((1, 1.5), (2, 2.0), (3, 1.2))]
    after = [with_goodput(i, 2 * i, value, 0.1) for i, value in ((1, 1.65), (2, 2.25), (3, 0.9))]
    a = write_sweep(str(tmp_path / "a"), [record(0, AR), *before])
    b = write_sweep(str(tmp_path / "b"), [record(0, AR), *after])
    found = tables.comparison(a, b)
    by_label = {one["label"].rpartition("=")[2]: one for one in found["points"]}
    assert {k: one["changed"] for k, one in by_label.items()} == {"2": False, "4": True, "6": True}
    assert by_label["4"]["difference"] == pytest.approx(0.25)
    assert by_label["6"]["difference"] == pytest.approx(-0.3)
    assert by_label["2"]["a"] == {"value": 1.5, "low": 1.4, "high": 1.6}
    assert [one["changed"] for one in found["points"]] == [True, True, False]
    assert found["a"]["best"]["label"] == found["b"]["best"]["label"]
    lines = compared(a, b).splitlines()
    marked = {
        length: next(line for line in lines if f"γ={length}" in line).endswith("changed")
        for length in (2, 4, 6)
    }
    assert marked == {2: False, 4: True, 6: True}
    assert any("+0.25" in line for line in lines) and any("-0.30" in line for line in lines)


def test_intervals_that_touch_overlap(tmp_path: Path) -> None:
    a = write_sweep(str(tmp_path / "a"), [with_goodput(1, 2, 1.5, 0.25)])
    b = write_sweep(str(tmp_path / "b"), [with_goodput(1, 2, 2.0, 0.25)])
    (one,) = tables.comparison(a, b)["points"]
    assert one["overlap"] and not one["changed"]


def test_settings_environment_and_points_that_differ(tmp_path: Path) -> None:
    other: dict[str, Any] = {**SPACE, "workload": {**SPACE["workload"], "max_tokens": 128}}
    environment = {**ENVIRONMENT, "cores": 4, "date": "2026-12-01T00:00:00+00:00"}
    a = write_sweep(str(tmp_path / "a"), [record(0, AR), record(1, point("eagle"))])
    failed = record(2, point("eagle"), status="failed", reason="no head")
    b = write_sweep(
        str(tmp_path / "b"),
        [record(0, AR), failed, record(1, point("prompt_lookup", num_speculative_tokens=4))],
        space=other,
        environment=environment,
        objectives=TWO,
    )
    found = tables.comparison(a, b)
    assert found["settings"] == {
        "workload.max_tokens": {"a": 96, "b": 128},
        "objective": {"a": ["goodput"], "b": list(TWO)},
        "environment.cores": {"a": 2, "b": 4},
    }
    assert found["points"] == []
    assert found["only_a"] == ["eagle"]
    assert found["only_b"] == ["prompt_lookup num_speculative_tokens=4"]
    text = compared(a, b)
    assert "no point was measured in both" in text
    assert "only in a: eagle" in text and "only in b: prompt_lookup γ=4" in text
    assert "workload.max_tokens" in text and "environment.cores" in text


def test_points_are_the_same_whatever_their_spelling(tmp_path: Path) -> None:
    """8 is the default length of draft_model."""
    a = write_sweep(str(tmp_path / "a"), [record(1, point("draft_model"))])
    b = write_sweep(
        str(tmp_path / "b"), [record(1, point("draft_model", num_speculative_tokens=8))]
    )
    found = tables.comparison(a, b)
    assert len(found["points"]) == 1 and found["only_a"] == found["only_b"] == []


def test_comparing_with_nothing(full: Results, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as error:
        tables.comparison(full, Results(str(tmp_path / "none")))
    assert error.value.value == str(tmp_path / "none")
