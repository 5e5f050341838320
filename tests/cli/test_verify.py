"""`paceline generate --transcript` and `paceline verify`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.backends import without_kernels
from paceline.rpc.server import RpcServer
from paceline.tokenizer import load_tokenizer
from tests.cli.conftest import Cli

PROMPT = "def fibonacci(n):\n"
CASES: dict[str, tuple[Any, ...]] = {
    "greedy": (),
    "sampled": ("-t", 0.8, "--seed", 7),
    "penalties": (
        "-t", 0.9, "--seed", 8, "--repetition-penalty", 1.3, "--logit-bias", "97=4.5",
        "--top-p", 0.9, "--top-k", 40, "--min-p", 0.01,
    ),
    "stopped": ("-t", 1, "--seed", 9, "--stop", "a", "--stop", "e", "--stop-token-id", 120),
}  # fmt: skip


@pytest.fixture
def written(cli: Cli, target_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """``written("-t", 1)`` is the file of a generation with these options."""

    def write(*options: Any) -> Path:
        file = tmp_path / "transcript.json"
        result = cli(
            "generate", PROMPT, "-n", 300, "--target", target_folder, "--transcript", file,
            *options,
        )  # fmt: skip
        assert result.exit_code == 0, result.stderr
        return file

    return write


def edited(file: Path, **changes: Any) -> Path:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return file


def verify(cli: Cli, file: Path, *options: Any) -> tuple[int, dict[str, Any]]:
    result = cli("verify", file, "--json", *options)
    assert result.exit_code in (0, 1), result.stderr
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("where", ["here", "server"])
def test_what_was_generated_is_verified(
    cli: Cli, target_folder: Path, server: RpcServer, tmp_path: Path, where: str,
    options: tuple[Any, ...],
) -> None:  # fmt: skip
    file = tmp_path / "transcript.json"
    place = ("--server", server.address) if where == "server" else ("--target", target_folder)
    done = cli("generate", PROMPT, "-n", 300, *options, *place, "--transcript", file, "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    transcript = json.loads(file.read_text())
    assert transcript["token_ids"] == document["token_ids"]
    assert transcript["fingerprint"] == document["fingerprint"]
    assert transcript["prompt_token_ids"] == load_tokenizer(target_folder).encode(PROMPT)
    named = () if where == "here" else ("--target", target_folder)
    code, found = verify(cli, file, *named)
    count = len(document["token_ids"])
    assert (code, found["verified"], found["difference"]) == (0, True, None)
    assert found["num_verified"] == found["num_tokens"] == count
    assert found["num_target_forwards"] <= 2  # of 256 tokens each
    assert found["fingerprint"] == document["fingerprint"]
    shown = cli("verify", file, *named)
    assert shown.exit_code == 0
    assert shown.stdout.startswith(f"all {count} tokens verified")


def test_the_demo_pair_with_portable_numerics(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "transcript.json"
    done = cli("generate", PROMPT, "-n", 40, "--numerics", "portable", "--transcript", file)
    assert done.exit_code == 0, done.stderr
    assert json.loads(file.read_text())["fingerprint"].startswith("portable-float32-")
    code, found = verify(cli, file)
    assert code == 0
    assert found["fingerprint"].startswith("portable-float32-")


@pytest.mark.parametrize("position", [0, 1, 255, 256, 257, 299])
def test_one_changed_token_is_found(cli: Cli, written: Callable[..., Path], position: int) -> None:
    file = written("-t", 0.8, "--seed", 7, "--ignore-eos")
    tokens = json.loads(file.read_text())["token_ids"]
    right, tokens[position] = tokens[position], (tokens[position] + 1) % 256
    code, found = verify(cli, edited(file, token_ids=tokens))
    assert (code, found["verified"], found["num_verified"]) == (1, False, position)
    difference = found["difference"]
    assert difference["position"] == position
    assert difference["transcript_token_id"] == tokens[position]
    assert difference["target_token_id"] == right
    shown = cli("verify", file)
    assert shown.exit_code == 1
    assert f"token {position} (from 0) of 300 differs" in shown.stdout


def test_a_changed_seed_or_prompt_is_found(cli: Cli, written: Callable[..., Path]) -> None:
    file = written("-t", 0.8, "--seed", 7)
    whole = json.loads(file.read_text())
    code, found = verify(cli, edited(file, sampling=whole["sampling"] | {"seed": 8}))
    assert (code, found["verified"]) == (1, False)
    prompt = whole["prompt_token_ids"]
    code, found = verify(
        cli, edited(file, sampling=whole["sampling"], prompt_token_ids=[*prompt[:-1], 65])
    )
    assert (code, found["verified"]) == (1, False)


def test_where_it_ends_is_verified(cli: Cli, written: Callable[..., Path]) -> None:
    file = written("-t", 1, "--seed", 3, "--ignore-eos")
    whole = json.loads(file.read_text())
    tokens = whole["token_ids"]
    code, found = verify(cli, edited(file, token_ids=tokens[:100]))
    assert (code, found["num_verified"]) == (1, 100)
    difference = found["difference"]
    assert (difference["transcript_token_id"], difference["target_token_id"]) == (None, tokens[100])
    assert "the transcript has its end" in cli("verify", file).stdout
    # A generation that was cancelled is right as far as it goes.
    code, found = verify(cli, edited(file, finish_reason="cancelled"))
    assert (code, found["num_verified"]) == (0, 100)
    code, found = verify(cli, edited(file, token_ids=[*tokens, 65], finish_reason="length"))
    assert (code, found["num_verified"]) == (1, 300)
    assert found["difference"]["target_token_id"] is None
    assert "the target writes no more" in cli("verify", file).stdout


def test_another_model_or_dtype_is_an_error(
    cli: Cli, written: Callable[..., Path], drafter_folder: Path
) -> None:
    file = written("-t", 0.8, "--seed", 7)
    result = cli("verify", file, "--target", drafter_folder)
    assert result.exit_code == 2
    assert "they differ in the weights (" in result.stderr
    assert "numerics mismatch" in result.stderr
    allowed = cli("verify", file, "--target", drafter_folder, "--numerics-mismatch", "allow")
    assert allowed.exit_code == 1
    assert "differs" in allowed.stdout
    assert "numerics here" in allowed.stderr


def test_other_numerics_are_an_error(
    cli: Cli, target_folder: Path, written: Callable[..., Path]
) -> None:
    with without_kernels():
        file = written("-n", 40)
    assert json.loads(file.read_text())["fingerprint"].startswith("torch-")
    result = cli("verify", file)
    assert result.exit_code == 2
    assert "they differ in the numerics class (torch-" in result.stderr
    assert cli("verify", file, "--numerics-mismatch", "allow").exit_code == 0  # close enough
    with without_kernels():
        assert cli("verify", file).exit_code == 0
    portable = written("-n", 40, "--numerics", "portable")
    with without_kernels():
        result = cli("verify", portable)
        assert result.exit_code == 2
        assert "numerics: got 'portable'" in result.stderr
        assert cli("verify", portable, "--numerics-mismatch", "allow").exit_code == 0
    changed = edited(portable, numerics_changed=True)
    result = cli("verify", changed)
    assert result.exit_code == 2
    assert "numerics changed on the way" in result.stderr
    assert cli("verify", changed, "--numerics-mismatch", "allow").exit_code == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "something else"}, "a JSON object of format"),
        ({"token_ids": [1, "2"]}, "transcript.token_ids"),
        ({"token_ids": [1, 99_999]}, "transcript.token_ids"),
        ({"prompt_token_ids": []}, "prompt"),
        ({"fingerprint": "portable"}, "transcript.fingerprint"),
        ({"sampling": {"temperature": -1}}, "transcript.sampling.temperature"),
        ({"sampling": {"warmth": 1}}, "transcript.sampling"),
        ({"sampling": {"logit_bias": {"x": 1}}}, "transcript.sampling"),
        ({"sampling": 3}, "transcript.sampling"),
    ],
)
def test_a_damaged_file_is_one_clear_error(
    cli: Cli, written: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    result = cli("verify", edited(written("-n", 8), **changes))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert re.match(r"error: (transcript|prompt)[\w.\[\]]*: got ", result.stderr)
    assert "Traceback" not in result.stderr


def test_what_is_no_transcript(cli: Cli, written: Callable[..., Path], tmp_path: Path) -> None:
    file = written("-n", 8)
    text = file.read_text()
    file.write_text(text[: len(text) // 2])
    for path in (file, tmp_path / "nothing.json", tmp_path):
        result = cli("verify", path)
        assert result.exit_code == 2
        assert "transcript: got" in result.stderr
    values = json.loads(text)
    for other in ([], {**values, "format": "another"}):
        file.write_text(json.dumps(other))
        assert f"transcript: got '{file}', expected a JSON object" in cli("verify", file).stderr
    del values["token_ids"], values["sampling"]
    file.write_text(json.dumps(values))
    assert "the keys token_ids, sampling as well" in cli("verify", file).stderr
    assert cli("verify", file, "--numerics-mismatch", "perhaps").exit_code == 2


def test_transcripts_that_could_not_be_verified_are_not_begun(
    cli: Cli, target_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "transcript.json"
    options = ("--target", target_folder, "--drafter", target_folder, "-n", 8)
    sampled = ("--method", "speculative_sampling", "-t", 1, "--transcript", file)
    result = cli("generate", PROMPT, *options, *sampled)
    assert result.exit_code == 2
    assert "a method whose tokens are those of AR" in result.stderr
    assert "transcript: got 'speculative_sampling'" in result.stderr
    result = cli("generate", PROMPT, *options, "--transcript", tmp_path / "no" / "folder.json")
    assert result.exit_code == 2
    assert "a folder that exists" in result.stderr
    assert not file.exists()
    result = cli("generate", PROMPT, *options, "--numerics-mismatch", "allow")
    assert "together with --server" in result.stderr
