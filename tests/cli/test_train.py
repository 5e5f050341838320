"""`paceline train`: options become a training; bad ones become one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.loading import load_engine
from tests.cli.conftest import Cli


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "text.jsonl"
    records = [{"prompt": f"What is {i}?", "completion": f" It is {i}.\n" * 9} for i in range(60)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


SHORT = ("--length", "24", "--steps", "3", "--eval-every", "3", "--held-out-rows", "2", "-b", "2")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("exits", ("--exit", "1", "--curriculum", "all")),
        ("distill", ("--layers", "1", "--divergence", "jsd", "--beta", "0.3")),
        ("align", ("--layers", "1")),
        ("sorted", ("--exit", "1", "--layers", "2")),
    ],
)
def test_each_kind_writes_a_model(
    cli: Cli, target_folder: Path, text_file: Path, tmp_path: Path, kind: str,
    options: tuple[str, ...],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    common = ("--target", target_folder, "--data", text_file, "--out", out, *SHORT)
    result = cli("train", kind, *common, *options, "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["steps"] == 3 and summary["out"] == str(out)
    assert 0 < summary["after"]["acceptance"] <= 1
    assert Path(summary["plot"]).is_file()
    load_engine(target_folder, None if kind == "exits" else out)
    load_engine(out)
    if kind != "distill":
        return
    again = cli("train", kind, *common, *options)
    assert again.exit_code == 0 and "kept_step: 3" in again.stdout
    other = cli("train", kind, *common, *options, "--lr", "0.1")
    assert other.exit_code == 2
    assert "made with learning_rate=0.0002, now it is 0.1" in other.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--divergence", "kl"), "divergence: got 'kl', expected one of forward_kl"),
        (("--steps", "0"), "steps: got 0"),
        (("--length", "4096"), "length: got 4096, expected at most 512"),
        (("--address", "127.0.0.1:1"), "address: got '127.0.0.1:1', expected only with --workers"),
        (("--workers", "0"), "workers: got 0"),
        (("--workers", "3"), "batch_size: got 2, expected a multiple of 3"),
        (("--data", "missing.txt"), "missing.txt"),
        (("--drafter", "missing"), "missing"),
        (("--device", "tpu"), "device: got 'tpu'"),
    ],
)
def test_bad_options_are_one_line(
    cli: Cli, target_folder: Path, text_file: Path, tmp_path: Path,
    options: tuple[str, ...], message: str,
) -> None:  # fmt: skip
    common = ("--target", target_folder, "--data", text_file, "--out", tmp_path / "out", *SHORT)
    if options[0] == "--length":
        text_file.write_text(text_file.read_text() * 40)
    result = cli("train", "distill", *common, *options)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert message in line
    assert not (tmp_path / "out" / "config.json").exists()


def test_conversations_go_through_a_template(cli: Cli, target_folder: Path, tmp_path: Path) -> None:
    """The target has none: with `--chat` the default one is taken."""
    data = tmp_path / "talks.jsonl"
    data.write_text('{"prompt": "return", "completion": " value and all"}\n' * 40)
    common = ("--target", target_folder, "--data", data, "--layers", "1", *SHORT)
    for option in ("--chat", "--no-chat"):
        result = cli("train", "distill", *common, "--out", tmp_path / option, option)
        assert result.exit_code == 0, result.output
    data.write_text('{"messages": [{"role": "assistant", "content": "yes"}]}\n' * 40)
    result = cli("train", "distill", *common, "--out", tmp_path / "none")
    assert result.exit_code == 2
    assert "talks.jsonl:1" in result.stderr and "--chat" in result.stderr


@pytest.mark.nightly
def test_a_grid_is_trained_and_planned_with(
    cli: Cli, target_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    """Four sizes, of which the plan is fitted; it measures what a fifth one costs."""
    out = tmp_path / "grid"
    sizes = [part for layers in (1, 2, 3, 4) for part in ("--size", f"{layers}x16")]
    common = ("--target", target_folder, "--data", text_file, "--out", out)
    small = ("--length", "24", "--held-out-rows", "4", "--tokens", "96", "--tokens", "192")
    result = cli("train", "scaling", *common, *small, *sizes, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"file": str(out / "points.json"), "points": 8}
    plan = ("train", "plan", "--points", out / "points.json", "--target", target_folder)
    picture = tmp_path / "plan.png"
    options = ("--budget-s", "5", "--batch", "2", "--size", "2x16", "--size", "5x16")
    result = cli(*plan, *options, "--plot", picture, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {each["size"] for each in found["drafters"]} == {"2x16", "5x16"}
    speeds = [each["speed"] for each in found["drafters"]]
    assert speeds == sorted(speeds, reverse=True) and found["batch"] == 2
    assert (found["train"] is None) == (speeds[0] <= found["ar_speed"] * (1 + 1e-9))
    assert [each["size"] for each in found["held_out"]] == ["1x16", "2x16", "3x16", "4x16"]
    assert picture.stat().st_size > 5000
    shown = cli(*plan, *options, "--greedy")
    assert shown.exit_code == 0 and "agreement = " in shown.stdout and "train: " in shown.stdout
    other = cli("train", "plan", "--target", target_folder)
    assert other.exit_code == 2 and "points of the target" in other.stderr
    bad = cli(*plan, "--size", "2y16")
    assert bad.exit_code == 2 and "LAYERSxINTERMEDIATE" in bad.stderr


def test_words_are_trained_into_the_heads_of_a_target(
    cli: Cli, target_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    result = cli(
        "train", "words", "--target", target_folder, "--data", text_file, "--out", tmp_path,
        "--count", "8", "--rows", "4", "--steps", "3", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["words"] == 8 and Path(found["file"]) == tmp_path / "words.safetensors"
    assert Path(found["file"]).stat().st_size == found["bytes"]
