"""docs/methods.md is the catalogue."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from paceline import methods_table
from paceline.config import SpeculationConfig
from paceline.methods import COMMON_KNOBS, METHODS

ROOT = Path(__file__).resolve().parents[1]


def section(name: str) -> str:
    """The part of the document about a method."""
    return methods_table.markdown().split(f"\n### {name}\n")[1].split("\n#")[0]


def test_the_document_is_up_to_date() -> None:
    assert methods_table.DOCUMENT == ROOT / "docs" / "methods.md"
    assert methods_table.DOCUMENT.read_text(encoding="utf-8") == methods_table.markdown()


def test_the_index_links_it() -> None:
    assert "(methods.md)" in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_its_paper_and_its_knobs(name: str) -> None:
    text, method = section(name), METHODS[name]
    assert method.summary in text
    for number in re.findall(r"arXiv (\d{4}\.\d{5})", method.paper):
        assert f"[arXiv {number}](https://arxiv.org/abs/{number})" in text
    for knob in method.knob_defaults:
        assert f"| `{knob}` |" in text
        assert str(SpeculationConfig.model_fields[knob].description) in text
    overview = methods_table.markdown().split("## The rows")[0]
    (line,) = re.findall(rf"^\| \[`{name}`\].*$", overview, re.MULTILINE)
    for part in (
        method.drafter,
        method.acceptance,
        method.length,
        *(n.value for n in method.needs),
    ):
        assert f"`{part}`" in line
    assert ("| lossy |" in line) == (not method.lossless)


def test_defaults_are_those_that_run() -> None:
    knobs = methods_table.knobs_of(METHODS["draft_model_tree"])
    assert knobs["num_speculative_tokens"] == 4
    assert knobs["shape"] == "kary"
    assert "| `branching` | `2` |" in section("draft_model_tree")
    assert "At least 0, at most 64." in section("draft_model_tree")
    for name in COMMON_KNOBS:
        assert name not in knobs


def test_check_fails_when_it_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "methods.md"
    monkeypatch.setattr(methods_table, "DOCUMENT", copy)

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["methods_table", *arguments])
        methods_table.main()

    with pytest.raises(SystemExit, match=r"python -m paceline\.methods_table"):
        run("--check")
    assert not copy.exists()
    run()
    assert copy.read_text(encoding="utf-8") == methods_table.markdown()
    run("--check")
    copy.write_text(copy.read_text() + "more\n")
    with pytest.raises(SystemExit, match=r"stale methods\.md"):
        run("--check")
