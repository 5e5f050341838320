"""A change of traffic on the demo pair, in small, by ``benchmarks/online.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import online


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_traffic_changes_and_the_drafter_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "--texts 48 --steps 60 --first-seconds 6 --seconds 60 --window 6 --measured 8 "
        f"--work {tmp_path} --out {tmp_path / 'plot.png'} --json {tmp_path / 'numbers.json'}"
    )
    monkeypatch.setattr(sys, "argv", ["online", *arguments.split()])
    online.main()
    assert "90 % of offline: after" in capsys.readouterr().out
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert (tmp_path / "numbers.json").stat().st_size > 1000
