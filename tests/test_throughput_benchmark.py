"""benchmarks/throughput.py: what it measures, what it says of what is missing, what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.systems import probe
from benchmarks.throughput import METHODS, VERIFIED, judge

ROOT = Path(__file__).parents[1]


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_quick_run_measures_who_is_there_and_names_who_is_missing(tmp_path: Path) -> None:
    out, docs = tmp_path / "throughput.json", tmp_path / "docs"
    command = [
        sys.executable, "benchmarks/throughput.py", "--quick", "--precisions", "float32",
        "--concurrency", "1", "2", "--peers-python", sys.executable, "--out", str(out),
        "--cache", str(tmp_path / "cache"), "--write-docs", "--docs", str(docs),
    ]  # fmt: skip
    missing = {name for name, version in probe().items() if version is None}
    measured = [name for name in ("paceline", "transformers") if name not in missing]
    command += ["--systems", *measured, *missing]  # who is there beside them takes too long here
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())

    assert {each["system"] for each in result["missing"]} == missing
    page = (docs / "benchmarks.md").read_text()
    for each in result["missing"]:
        assert each["install"] in page
        assert "is not installed" in done.stdout
    assert result["failed"] == []
    for size in ("demo", "large"):
        for system in measured:
            rows = [r for r in result["rows"] if (r["size"], r["system"]) == (size, system)]
            assert [r["method"] for r in rows if r["concurrency"] == 1] == METHODS[size][system]
            assert {r["concurrency"] for r in rows if r["method"] == "ar"} == {1, 2}
            assert all(r["tokens_per_second"] > 0 for r in rows)
            if system == "paceline":
                assert all(r["identical"] == 1 for r in rows)
    for each in result["verify"]:
        assert all(each["seconds"][str(n)] > 0 for n in VERIFIED)
    assert result["bandwidth_gb_s"] > 0
    assert (docs / "figures" / "throughput.png").stat().st_size > 10_000
    unanswered = [t for t in result["targets"] if t["met"] is None]
    assert all("vLLM" in t["target"] or "llama.cpp" in t["target"] or "8" in t["target"]
               for t in unanswered)  # fmt: skip
    assert "quick run" in page


def test_targets_are_judged_by_ratios_of_the_same_repetition() -> None:
    def row(system: str, method: str, concurrency: int, *rates: float) -> dict[str, object]:
        return {
            "size": "demo", "precision": "float32", "system": system, "method": method,
            "concurrency": concurrency, "rates": {str(i): r for i, r in enumerate(rates)},
            "tokens_per_second": sorted(rates)[len(rates) // 2],
        }  # fmt: skip

    goodput = METHODS["demo"]["paceline"][-1]
    targets = judge(
        {
            "settings": {"sizes": ["demo"], "precisions": ["float32"], "concurrency": [1, 8]},
            # The machine is three times as fast in the last repetition, for everybody.
            "rows": [
                row("paceline", "ar", 1, 100, 100, 300), row("transformers", "ar", 1, 50, 80, 150),
                row("paceline", "draft_model", 1, 310, 290, 900),
                row("paceline", goodput, 1, 100, 100, 300), row("paceline", goodput, 8, 97, 97),
                row("paceline", "ar", 8, 100, 100),
            ],
        }
    )  # fmt: skip
    found = {each["target"]: (each["measured"], each["met"]) for each in targets}
    assert found["AR over transformers' AR, concurrency 1"] == (2, True)
    name = "best lossless method over transformers' best, concurrency 1"
    assert found[name] == (6, True)
    assert found["goodput method over our own AR, the worst concurrency"] == (0.97, False)
    assert found["best method over vLLM's best, concurrency 8"] == (None, None)
