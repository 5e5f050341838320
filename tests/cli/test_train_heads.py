"""`paceline train KIND` for draft heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.config import SpeculationConfig
from paceline.loading import load_engine
from paceline.models.heads import HEADS
from paceline.sampling import SamplingParams
from tests.cli.conftest import Cli

SHORT = ("--length", "24", "--steps", "2", "--eval-every", "2", "--held-out-rows", "2", "-b", "2")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"It is {i}.\n" * 40 for i in range(60)))
    return file


def test_every_kind_is_offered(cli: Cli) -> None:
    listed = cli("train", "--help").stdout
    for kind in HEADS:
        assert f" {kind} " in listed
    result = cli("train", "eagle", "--help")
    assert result.exit_code == 0
    assert "unroll" in result.stdout and "--data-source" in result.stdout


@pytest.mark.parametrize("source", ["corpus", "target"])
def test_a_head_is_trained_and_found_by_its_method(
    source: str, cli: Cli, target_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    heads = tmp_path / "heads"
    result = cli(
        "train", "eagle", "--target", target_folder, "--data", text_file, "--out", heads / "eagle",
        *SHORT, "--set", "unroll=2", "--set", "noise=0", "--data-source", source, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert 0 <= summary["after"]["acceptance"] <= 1 <= summary["after"]["accepted_length"]
    options = json.loads((heads / "eagle" / "config.json").read_text())["options"]
    assert options["unroll"] == 2
    assert options["noise"] == 0.0
    engine = load_engine(target_folder, heads=heads)
    (session,) = engine.generate(
        [[1, 2, 3]], SamplingParams(max_tokens=8), SpeculationConfig(method="eagle", length="fixed")
    )
    assert session.stats.num_drafted > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set", "nose=1"), "set: got 'nose', expected an option of eagle"),
        (("--set", "unroll"), "set: got 'unroll', expected NAME=VALUE"),
        (("--set", "unroll=x"), "set unroll: got 'x', expected a whole number"),
        (("--data-source", "web"), "data_source: got 'web'"),
        (("--length", "4096"), "length: got 4096, expected below"),
    ],
)
def test_bad_options_are_one_line(
    options: tuple[str, ...], message: str, cli: Cli, target_folder: Path, text_file: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    if options[0] == "--length":
        text_file.write_text(text_file.read_text() * 4)
    common = ("--target", target_folder, "--data", text_file, "--out", tmp_path / "out", *SHORT)
    result = cli("train", "eagle", *common, *options)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert message in line
