"""Input that cannot be served: exit code 2, one line that says what is wrong, no traceback."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from benchmarks.to_gguf import to_gguf
from paceline.demo import DRAFTER_DIR
from paceline.methods import METHODS
from paceline.rpc.server import RpcServer
from tests.cli.conftest import Cli
from tests.models.quantized import quantize
from tests.modelzoo import make_model


def assert_refused(result: Result, *fragments: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for fragment in fragments:
        assert fragment in lines[0]


BAD_VALUES: list[tuple[list[Any], list[str]]] = [
    (["--max-tokens", 0], ["max_tokens", "0", ">= 1"]),
    (["--max-tokens", -3], ["max_tokens", "-3", ">= 1"]),
    (["--temperature", "nan"], ["temperature", "nan", "0 or a number in [0.0001, 100]"]),
    (["--temperature", "inf"], ["temperature", "inf", "0 or a number in [0.0001, 100]"]),
    (["--temperature", -1], ["temperature", "-1.0", "0 or a number in [0.0001, 100]"]),
    (["--top-p", 0], ["top_p", "0.0", "(0, 1]"]),
    (["--top-p", 1.5], ["top_p", "1.5", "(0, 1]"]),
    (["--top-k", -1], ["top_k", "-1", ">= 0"]),
    (["--min-p", 2], ["min_p", "2.0", "[0, 1]"]),
    (["--repetition-penalty", 0], ["repetition_penalty", "0.0", "(0, 1000]"]),
    (["--seed", -1], ["seed", "-1", "[0,"]),
    (["--stop", ""], ["stop", "''", "non-empty"]),
    (["--logit-bias", "x=1"], ["logit_bias", "'x=1'", "ID=NUMBER"]),
    (["--logit-bias", "65"], ["logit_bias", "'65'", "ID=NUMBER"]),
    (["--logit-bias", "65=nan"], ["logit_bias[65]", "nan", "finite"]),
    (["--logit-bias", "258=1"], ["logit_bias", "258", "[0, 258)"]),
    (["--stop-token-id", 258], ["stop_token_ids", "258", "[0, 258)"]),
    (["--method", "magic"], ["method", "'magic'", *METHODS]),
    (["-k", 1000], ["num_speculative_tokens", "1000", "64"]),
    (["-k", -1], ["num_speculative_tokens", "-1", "0"]),
    (["--speculation", "depth=3"], ["speculation.depth", "num_speculative_tokens"]),
    (["--speculation", "{bad"], ["speculation", "'{bad'", "JSON"]),
    (["--speculation", "ngram_max"], ["speculation", "'ngram_max'", "key=value"]),
    (["--speculation", "ngram_max=many"], ["speculation.ngram_max", "'many'", "integer"]),
    (["-k", 2, "--speculation", "num_speculative_tokens=3"], ["num_speculative_tokens", "2", "3"]),
    (["--method", "ar", "--speculation", "ngram_max=3"], ["ngram_max", "'ar'"]),
    (["--method", "draft_model"], ["method", "'draft_model'", "prompt_lookup"]),
    (["--dtype", "float8"], ["dtype", "'float8'", "float32, bfloat16, float16"]),
    (["--device", "tpu"], ["device", "'tpu'", "cpu"]),
    (["--threads", 0], ["threads", "0", "[1,"]),
    (["--server", "nowhere"], ["server", "'nowhere'", "HOST:PORT"]),
    (["--server", "localhost:99999"], ["server", "HOST:PORT"]),
    (["--server", "localhost:1", "--dtype", "float32"], ["dtype", "--server"]),
    (["--numerics", "exact"], ["numerics", "'exact'", "fastest, portable"]),
    (["--numerics", "portable", "--dtype", "float16"], ["numerics", "'portable'", "C kernels"]),
    (["--numerics-mismatch", "allow"], ["numerics_mismatch", "--server"]),
    (["--server", "localhost:1", "--numerics", "portable"], ["numerics", "--server"]),
    (["--server", "localhost:1", "--numerics-mismatch", "ask"], ["numerics_mismatch", "'ask'"]),
    (["--server", "localhost:1", "--timeout", 0], ["timeout", "0.0"]),
    (["--server", "localhost:1", "--timeout", "nan"], ["timeout", "nan"]),
    (["--ca", "ca.crt"], ["ca", "'ca.crt'", "--server"]),
    (["--token-file", "token"], ["token_file", "'token'", "--server"]),
    (["--server", "localhost:1", "--token-file", "none"], ["token_file", "'none'", "a file"]),
    (["--server", "localhost:1", "--ca", "none.crt"], ["ca", "'none.crt'", "a PEM file"]),
    (["--server", "localhost:1", "--ca", "system", "--cert", "none.crt"], ["key", "None"]),
]


@pytest.mark.one_of(1, slow=2)
@pytest.mark.parametrize(
    ("arguments", "fragments"), BAD_VALUES, ids=[" ".join(map(str, a)) for a, _ in BAD_VALUES]
)
def test_bad_value(
    cli: Cli, target_folder: Path, arguments: list[Any], fragments: list[str]
) -> None:
    models = ("--target", target_folder) if "--server" not in arguments else ()
    assert_refused(cli("generate", "hello", *models, *arguments, "--json"), *fragments)


@pytest.mark.parametrize("stdin", [None, ""])
def test_empty_prompt(cli: Cli, stdin: str | None) -> None:
    prompt = "" if stdin is None else "-"
    assert_refused(cli("generate", prompt, "--json", stdin=stdin), "prompt", "empty")


@pytest.mark.parametrize("length", [512, 5000])
def test_prompt_that_fills_the_context(cli: Cli, target_folder: Path, length: int) -> None:
    result = cli("generate", "x" * length, "--target", target_folder, "--json")
    assert_refused(result, "prompt", f"{length} tokens", "512")


def test_longest_prompt_that_fits(cli: Cli, target_folder: Path) -> None:
    result = cli("generate", "x" * 511, "--target", target_folder, "--json", "--ignore-eos")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["num_tokens"] == 1
    assert json.loads(result.stdout)["finish_reason"] == "length"


# --- model folders --------------------------------------------------------------------------------


def without(*names: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return remove


def write(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


@pytest.mark.parametrize(
    ("damage", "fragment"),
    [
        (without("config.json"), "config.json"),
        (without("model.safetensors"), "safetensors"),
        (without("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
        (write("config.json", "{"), "config.json"),
        (write("config.json", "{}"), "config.json"),
        (write("model.safetensors", "short"), "safetensors"),
    ],
    ids=["no config", "no weights", "no tokenizer", "broken config", "empty config", "bad weights"],
)
def test_damaged_model_folder(
    cli: Cli, target_folder: Path, tmp_path: Path, damage: Callable[[Path], None], fragment: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(target_folder, folder)
    damage(folder)
    assert_refused(cli("generate", "hello", "--target", folder), fragment, str(folder))


@pytest.mark.parametrize("option", ["--target", "--drafter"])
def test_model_folder_that_does_not_exist(cli: Cli, tmp_path: Path, option: str) -> None:
    missing = tmp_path / "missing"
    assert_refused(cli("generate", "hello", option, missing), str(missing), "exist")


def test_model_folder_that_is_a_file(cli: Cli, target_folder: Path) -> None:
    file = target_folder / "config.json"
    assert_refused(cli("generate", "hello", "--target", file), str(file))


def test_drafter_with_another_tokenizer(
    cli: Cli, target_folder: Path, drafter_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(drafter_folder, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    result = cli("generate", "hello", "--target", target_folder, "--drafter", folder)
    assert_refused(result, "tokenizer", "2 of", "'a'", "'b'")


def test_tokenizer_with_more_entries_than_the_vocabulary(
    cli: Cli, target_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "large"
    shutil.copytree(target_folder, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"more {i}": 1000 + i for i in range(9)}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    result = cli("generate", "hello", "--target", folder)
    assert_refused(result, "tokenizer", str(folder), "267 entries", "at most 258", "vocab_size")


@pytest.mark.parametrize("option", ["--target", "--drafter"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_model_that_does_not_fit_into_memory(
    option: str, kind: str, cli: Cli, zoo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.memory.memory", lambda: (8_000, 4_000))
    folder = make_model(kind, zoo)
    result = cli("generate", "hello", option, folder)
    assert_refused(result, "model", "bytes", "4,000 bytes", "8,000 bytes", "available")


# --- GGUF files -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    to_gguf(DRAFTER_DIR, file, "Q4_1")
    return file


@pytest.mark.parametrize(
    ("keep", "fragment"),
    [
        (lambda data: 0, "0 bytes"),
        (lambda data: 10, "counts"),
        (lambda data: data.index(b"tokenizer.ggml.tokens") + 5, "the file has"),
        (lambda data: data.index(b"tokenizer.ggml.merges") + 500, "tokenizer.ggml.merges"),
        (lambda data: data.index(b"blk.1.ffn_down.weight") + 24, "blk.1.ffn_down.weight"),
        (lambda data: len(data) // 2, ".weight ends at byte"),
        (lambda data: len(data) - 1000, ".weight ends at byte"),
    ],
    ids=["empty", "version", "keys", "a list", "table of tensors", "data", "last tensor"],
)
def test_truncated_gguf_file(
    keep: Callable[[bytes], int], fragment: str, cli: Cli, gguf_file: Path, own_cache: Path
) -> None:
    data = gguf_file.read_bytes()
    file = own_cache / "short.gguf"
    file.write_bytes(data[: keep(data)])
    assert_refused(cli("generate", "hello", "--target", file), str(file), fragment)


@pytest.mark.parametrize(
    ("old", "new", "fragments"),
    [
        (b"GGUF\x03", b"GGML\x03", ["not GGUF", "GGML"]),
        (b"GGUF\x03", b"GGUF\x09", ["GGUF version", "9", "2 or 3"]),
        (b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03", ["byte order", "little-endian"]),
        (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", ["mamba"]),
        (b"gpt2", b"bert", ["tokenizer.ggml.model", "'bert'", "gpt2"]),
        (b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight", ["ffn_xx", "does not know"]),
    ],
    ids=["magic", "version", "byte order", "architecture", "tokenizer", "tensor"],
)
def test_gguf_file_with_something_unknown(
    old: bytes, new: bytes, fragments: list[str], cli: Cli, gguf_file: Path, own_cache: Path
) -> None:
    file = own_cache / "other.gguf"
    file.write_bytes(gguf_file.read_bytes().replace(old, new, 1))
    assert_refused(cli("generate", "hello", "--target", file), *fragments)


def test_gguf_file_with_a_type_that_is_unknown(cli: Cli, gguf_file: Path, own_cache: Path) -> None:
    data = bytearray(gguf_file.read_bytes())
    name = b"blk.1.attn_q.weight"
    data[data.index(name) + len(name) + 4 + 2 * 8] = 39  # behind the shape: MXFP4
    file = own_cache / "other.gguf"
    file.write_bytes(data)
    result = cli("generate", "hello", "--target", file)
    assert_refused(result, "type of blk.1.attn_q.weight", "MXFP4", "Q4_0, Q4_1")


def test_general_path_cannot_be_batch_invariant(cli: Cli, zoo: Path) -> None:
    folder = make_model("gpt2", zoo)
    result = cli("generate", "hello", "--target", folder, "--batch-invariant")
    assert_refused(result, "batch_invariant")


# --- servers --------------------------------------------------------------------------------------


def test_no_server_there(cli: Cli) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    assert_refused(cli("generate", "hello", "--server", address), address.rpartition(":")[2])


def test_server_that_never_answers(cli: Cli) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert_refused(cli("generate", "hello", "--server", address, "--timeout", 1))


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--method", "magic"], ["method", "magic", "prompt_lookup"]),
        (["--stop-token-id", 258], ["stop_token_ids", "258", "[0, 258)"]),
        (["--method", "ar", "--speculation", "ngram_max=3"], ["ngram_max"]),
    ],
)
def test_server_refuses_in_the_same_words(
    cli: Cli, server: RpcServer, arguments: list[Any], fragments: list[str]
) -> None:
    assert_refused(
        cli("generate", "hello", "--server", server.address, *arguments, "--json"), *fragments
    )


def test_too_long_prompt_for_the_server(cli: Cli, server: RpcServer) -> None:
    result = cli("generate", "x" * 600, "--server", server.address)
    assert_refused(result, "prompt", "600 tokens", "512")


# --- bench ----------------------------------------------------------------------------------------


@pytest.mark.one_of(1, slow=2)
@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--methods", "magic"], ["methods", "'magic'", "draft_model"]),
        (["--methods", "draft_model:depth=3"], ["depth", "num_speculative_tokens"]),
        (["--batch", 0], ["batch", "0", ">= 1"]),
        (["--repetitions", 0], ["repetitions", "0", ">= 1"]),
        (["--limit", 0], ["limit", "0", ">= 1"]),
        (["--max-tokens", 100000], ["max_tokens", "100000", "context"]),
        (["--prompts", "missing.jsonl"], ["missing.jsonl"]),
        (["--suite", "gsm8k"], ["suite", "'gsm8k'", "a file in prompts"]),
        (["--suite", "alpaca", "--prompts", "x"], ["suite", "'alpaca'", "sharegpt"]),
        (["--synthetic-acceptance", 2], ["synthetic_acceptance", "2.0", "[0, 1]"]),
        (["--html", "nowhere/x.html"], ["html", "nowhere", "a folder that exists"]),
        (["--csv", "/"], ["csv", "'/'", "a folder that exists"]),
        (["--batch-invariant", "maybe"], ["batch_invariant", "'maybe'", "both"]),
        (["--topology", "ring"], ["topology", "'ring'", "both"]),
        (["--server", "nowhere"], ["server", "HOST:PORT"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_bench_refuses(cli: Cli, arguments: list[Any], fragments: list[str]) -> None:
    assert_refused(cli("bench", "--no-peers", *arguments), *fragments)


def test_generate_refuses_quantised_weights(cli: Cli, zoo: Path, tmp_path: Path) -> None:
    folder = quantize(make_model("llama_gqa", zoo), "compressed_int8", tmp_path / "model")
    named = ["quantization_config", "compressed-tensors", "int-quantized", "float32"]
    assert_refused(cli("generate", "--target", folder, "x"), *named)


def test_unknown_option_and_command(cli: Cli) -> None:
    for arguments in (["generate", "x", "--depth", "3"], ["generat"], ["generate"]):
        result = cli(*arguments)
        assert result.exit_code == 2
        assert "Traceback" not in result.stderr
