"""`paceline sweep`: how it is found, what it prints, and what it says when something is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result as Run

from paceline.cluster.cli import app
from paceline.tuning import tables
from paceline.tuning.results import Results
from tests.command_line import CliRunner
from tests.tuning.folders import full_records, write_sweep

ROOT = Path(__file__).resolve().parents[2]
Cli = Callable[..., Run]


@pytest.fixture
def cli() -> Cli:
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [str(a) for a in arguments])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sweep(str(tmp_path / "sweep"), full_records(), predictions=True)
    return tmp_path / "sweep"


def loaded_modules(*arguments: str) -> tuple[str, set[str]]:
    """Standard output of `paceline ARGUMENTS` in a new process, and what it had to import."""
    code = (
        "import sys; from paceline.cluster.cli import app; "
        "app(sys.argv[1:], standalone_mode=False); print('LOADED', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    text, _, modules = done.stdout.partition("LOADED")
    return text, set(modules.split())


def test_help_lists_sweep_and_stays_light() -> None:
    text, modules = loaded_modules("--help")
    assert " sweep " in text and "train" in text
    assert "paceline.cluster.cli" in modules
    assert modules.isdisjoint(
        {"plotly", "ray", "torch", "jinja2", "fsspec", "paceline.tuning.results"}
    )


def test_other_commands_do_not_import_tuning() -> None:
    _, modules = loaded_modules("methods", "--json")
    assert "paceline.methods" in modules
    assert not any(name.startswith("paceline.tuning") for name in modules)


def test_help_of_sweep_lists_its_commands() -> None:
    text, modules = loaded_modules("sweep", "--help")
    for name in ("show", "compare", "report"):
        assert f" {name} " in text
    assert modules.isdisjoint({"plotly", "ray", "torch"})


def test_an_unknown_command_is_refused(cli: Cli) -> None:
    result = cli("sweeep")
    assert result.exit_code == 2
    assert "No such command" in result.output


def test_show(cli: Cli, folder: Path) -> None:
    result = cli("sweep", "show", folder)
    assert result.exit_code == 0, result.output
    assert "demo" in result.stdout and "trials: 23 finished" in result.stdout
    result = cli("sweep", "show", folder, "--json")
    assert json.loads(result.stdout) == json.loads(json.dumps(tables.summary(Results(str(folder)))))


def test_compare(cli: Cli, folder: Path, tmp_path: Path) -> None:
    write_sweep(str(tmp_path / "other"), full_records()[:9])
    result = cli("sweep", "compare", folder, tmp_path / "other")
    assert result.exit_code == 0, result.output
    assert "measured in both" in result.stdout and "only in a" in result.stdout
    result = cli("sweep", "compare", folder, tmp_path / "other", "--json")
    document = json.loads(result.stdout)
    assert {"a", "b", "settings", "points", "only_a", "only_b"} <= document.keys()
    assert not any(one["changed"] for one in document["points"] if one["a"] == one["b"])


def test_report_is_written_again(cli: Cli, folder: Path) -> None:
    file = folder / "report.html"
    file.write_text("old")
    result = cli("sweep", "report", folder)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(file)
    assert file.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_folder_behind_a_url(cli: Cli) -> None:
    write_sweep("memory://behind/url", full_records())
    assert cli("sweep", "show", "memory://behind/url").exit_code == 0
    result = cli("sweep", "report", "memory://behind/url")
    assert result.stdout.strip() == "memory://behind/url/report.html"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("space.exit_leyer=3", "space.exit_leyer"),
        ("workload.categories=[poems]", "workload.categories"),
        ("space={}", "space: got {}"),
    ],
)
def test_a_bad_file_is_one_line_and_leaves_nothing(
    cli: Cli, tmp_path: Path, change: str, named: str
) -> None:
    run = cli("sweep", "run", "--space", "demo", "--result", tmp_path / "sweep", "--set", change)
    assert run.exit_code == 2
    (line,) = run.stderr.strip().splitlines()
    assert line.startswith(f"error: {named}")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("command", ["show", "report"])
@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("nowhere", "result: got 'nowhere', expected a folder that a sweep wrote"),
        ("gopher://x/y", "result: got 'gopher://x/y', expected a folder that can be read"),
    ],
)
def test_a_wrong_folder_is_one_line(cli: Cli, command: str, result: str, message: str) -> None:
    run = cli("sweep", command, result)
    assert run.exit_code == 2
    (line,) = run.stderr.strip().splitlines()
    assert message in line


def test_compare_names_the_folder_that_is_none(cli: Cli, folder: Path) -> None:
    run = cli("sweep", "compare", folder, "nowhere")
    assert run.exit_code == 2 and "'nowhere'" in run.stderr


def test_a_record_that_no_sweep_wrote_is_named(cli: Cli, folder: Path) -> None:
    (folder / "trials" / "broken.json").write_text('{"key": 1}')
    for command in ("show", "report"):
        run = cli("sweep", command, folder)
        assert run.exit_code == 2
        assert "broken.json" in run.stderr


@pytest.mark.parametrize(
    ("command", "missing"),
    [("show", "fsspec"), ("show", "scipy"), ("report", "plotly"), ("report", "jinja2")],
)
def test_a_missing_package_is_named_with_its_extra(
    cli: Cli, folder: Path, command: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    run = cli("sweep", command, folder)
    assert run.exit_code == 2
    assert missing in run.stderr and "pip install 'paceline[tune]'" in run.stderr
