"""`paceline infill` and the any-subset model that ships."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cluster.cli import app

TEXT = "copy: c f a b -> _______"


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["infill", TEXT, "--json", *arguments])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.mark.parametrize("order", ["left", "random"])
def test_drafts_save_forwards_and_change_nothing(order: str) -> None:
    alone, drafted = run("--order", order, "-k", "1"), run("--order", order)
    assert drafted["text"] == alone["text"]
    assert drafted["text"].startswith(TEXT[:17])
    assert "_" not in drafted["text"][17:]
    assert drafted["tokens"] == alone["forwards"] == 7
    assert drafted["forwards"] <= 7
    assert drafted["tokens_per_forward"] == 7 / drafted["forwards"]


@pytest.mark.parametrize("option", [["--order", "up"], ["--blank", "x"], ["-k", "0"]])
def test_bad_options_are_named(option: list[str]) -> None:
    result = CliRunner().invoke(app, ["infill", TEXT, *option])
    assert result.exit_code != 0
