"""Choosing method and knobs at run time on the command line: as in the library (tests/core)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from paceline.methods import METHODS
from paceline.methods_table import markdown
from paceline.rpc.server import RpcServer
from tests.cli.conftest import Cli
from tests.combinations import BAD_VALUES, IMPOSSIBLE, POSSIBLE, Combination


def options(speculation: Mapping[str, Any]) -> list[str]:
    """``--method X --set knob=value ...``"""
    result = []
    for key, value in speculation.items():
        text = value if isinstance(value, str) else json.dumps(value)
        result += ["--method", text] if key == "method" else ["--set", f"{key}={text}"]
    return result


def assert_refused(result: Result, field: str, words: tuple[str, ...] = ()) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {field}: got ")
    for word in words:
        assert word in line


@pytest.fixture(params=["here", "server"])
def place(request: pytest.FixtureRequest, target_folder: Path, drafter_folder: Path) -> list[str]:
    """The options that say where to generate: in this process, or on a server."""
    if request.param == "server":
        server: RpcServer = request.getfixturevalue("server")
        return ["--server", server.address]
    return ["--target", str(target_folder), "--drafter", str(drafter_folder)]


@pytest.mark.one_of(1, slow=2)
@pytest.mark.parametrize("combination", IMPOSSIBLE, ids=str)
def test_impossible_combinations_are_refused(
    cli: Cli, place: list[str], combination: Combination
) -> None:
    temperature = ("-t", combination.params.temperature)
    chosen = options(combination.speculation)
    result = cli("generate", "hello", *place, "-n", 4, *temperature, *chosen, "--json")
    assert_refused(result, combination.field, combination.words)


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
def test_values_that_do_not_fit_are_refused(
    cli: Cli, place: list[str], key: str, value: Any
) -> None:
    assert_refused(cli("generate", "hello", *place, *options({key: value})), f"speculation.{key}")


@pytest.mark.one_of(1, slow=2)
@pytest.mark.parametrize("speculation", POSSIBLE, ids=str)
def test_method_and_knobs_are_chosen_for_each_request(
    cli: Cli, place: list[str], speculation: Mapping[str, Any]
) -> None:
    common = ("generate", "hello", *place, "-n", 12, "-t", 0.8, "--seed", 3, "--ignore-eos")
    result = cli(*common, *options(speculation), "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["method"] == speculation["method"]
    ar = cli(*common, "--method", "ar", "--json")
    assert document["token_ids"] == json.loads(ar.stdout)["token_ids"]


def test_one_json_object_sets_several_knobs(
    cli: Cli, target_folder: Path, drafter_folder: Path
) -> None:
    models = ("--target", target_folder, "--drafter", drafter_folder)
    knobs = json.dumps({"method": "draft_model", "shape": "kary", "node_budget": 5})
    result = cli("generate", "hello", *models, "-n", 4, "--set", knobs, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["method"] == "draft_model"


def test_methods_markdown_is_the_document(cli: Cli) -> None:
    result = cli("methods", "--markdown")
    assert result.exit_code == 0
    assert result.stdout == markdown()
    for name in METHODS:
        assert f"### {name}\n" in result.stdout
