"""`paceline board`, from measuring in processes of their own to a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench.board_rows import read_row
from tests.cli.conftest import Cli


@pytest.mark.slow
def test_a_board_is_measured_continued_shown_and_checked(
    cli: Cli, target_folder: Path, tmp_path: Path
) -> None:
    prompts, rows = tmp_path / "questions.jsonl", tmp_path / "rows"
    line = {"question_id": 1, "category": "coding", "turns": ["x = 1, 1, 1, "]}
    prompts.write_text(json.dumps(line))
    run = (
        "board", "run", "--model", target_folder, "--suite", "spec-bench", "--prompts", prompts,
        "--methods", "prompt_lookup,medusa", "--max-tokens", 8, "--repetitions", 1, "--out", rows,
    )  # fmt: skip
    result = cli(*run)
    assert result.exit_code == 0, result.output
    assert "2 rows measured, 1 could not run, 0 were there" in result.stdout
    assert "prompt_lookup: " in result.stderr
    assert "medusa: not measured, no trained head" in result.stderr
    files = sorted(rows.rglob("*.json"))
    assert [file.name for file in files] == ["ar.json", "medusa.json", "prompt_lookup.json"]
    assert {file.parent.name for file in files} == {"spec-bench"}
    row = read_row(files[2])
    assert row.exactness is not None and row.exactness.differing == ()
    assert row.memory is not None and row.memory.peak > 100e6  # of a process with torch

    before = files[2].read_text()
    again = cli(*run)
    assert "0 rows measured, 1 could not run, 2 were there" in again.stdout
    assert files[2].read_text() == before

    page, table = tmp_path / "board.html", tmp_path / "board.csv"
    result = cli("board", "page", rows, "--out", page, "--csv", table)
    assert result.exit_code == 0, result.output
    assert "prompt_lookup" in page.read_text() and "prompt_lookup" in table.read_text()

    assert cli("board", "check", *files).exit_code == 0
    value = json.loads(before)
    value["method"] = "no_such_method"
    files[2].write_text(json.dumps(value))
    (tmp_path / "other.json").write_text("{}")
    result = cli("board", "check", *files, tmp_path / "other.json")
    assert result.exit_code == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    assert "prompt_lookup.json: digest: got " in errors[0]
    assert "other.json: version: got None" in errors[1]


def test_what_a_board_refuses(cli: Cli, tmp_path: Path) -> None:
    for arguments, shown in (
        (("run", "--out", tmp_path, "--suite", "gsm8k"), "a file in prompts"),
        (("run", "--out", tmp_path, "--methods", "no_such_method"), "no_such_method"),
        (("run", "--out", tmp_path, "--prompts", tmp_path / "none.jsonl"), "none.jsonl"),
        (("page", tmp_path), "folders with files of rows"),
        (("page", tmp_path, "--out", tmp_path / "a" / "b.html"), "a file in a folder that exists"),
    ):
        result = cli("board", *arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert shown in result.stderr
    assert list(tmp_path.iterdir()) == []
