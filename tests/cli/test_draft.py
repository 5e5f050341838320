"""`paceline draft`: the drafter here, the target on a server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.netem import Netem
from paceline.cluster.certs import make_certificates
from paceline.demo import DRAFTER_DIR
from paceline.engine import EngineThread
from paceline.loading import load_engine
from paceline.rpc.access import Gate
from paceline.rpc.server import RpcServer
from paceline.rpc.tenants import Tenants
from paceline.rpc.tls import ServerTls
from tests.cli.conftest import Cli
from tests.rpc.serving import serving

PROMPT = "import os\n"


def draft(cli: Cli, *arguments: Any) -> dict[str, Any]:
    result = cli("draft", PROMPT, *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.mark.one_of(3)
@pytest.mark.parametrize("method", ["draft_model", "pearl", "draft_model_tree", "prompt_lookup"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_tokens_are_those_of_the_target(
    method: str, temperature: int, cli: Cli, server: RpcServer, target_folder: Path,
    drafter_folder: Path,
) -> None:  # fmt: skip
    options = ("-n", 32, "--temperature", temperature, "--seed", 5, "--ignore-eos")
    result = cli(
        "generate", PROMPT, "--target", target_folder, "--method", "ar", *options, "--json"
    )
    expected = json.loads(result.stdout)
    document = draft(
        cli, "--server", server.address, "--drafter", drafter_folder, "--method", method, *options
    )
    assert document["token_ids"] == expected["token_ids"]
    assert document["text"] == expected["text"]
    assert document["verified"] is True
    assert document["method"] == method
    assert document["num_tokens"] == 32
    assert document["finish_reason"] == "length"
    assert document["round_trip_p50_ms"] > 0
    assert 0 < document["bytes_up_per_round"] < 1024


@pytest.mark.parametrize("method", ["draft_model", "draft_model_tree"])
def test_a_gguf_file_drafts(
    method: str, cli: Cli, server: RpcServer, target_folder: Path, drafter_folder: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """It goes ahead as a folder's model does, and the tokens are the same."""
    pytest.importorskip("llama_cpp", reason="no llama-cpp-python: pip install 'paceline[gguf]'")
    from benchmarks.to_gguf import to_gguf

    to_gguf(drafter_folder, tmp_path / "drafter.gguf")
    options = ("-n", 32, "--ignore-eos")
    command = ("generate", PROMPT, "--target", target_folder, "--method", "ar", *options, "--json")
    expected = json.loads(cli(*command).stdout)
    document = draft(
        cli, "--server", server.address, "--drafter", tmp_path / "drafter.gguf",
        "--method", method, "--only-device", *options,
    )  # fmt: skip
    assert document["token_ids"] == expected["token_ids"]
    assert document["text"] == expected["text"]
    assert document["num_drafted"] > 0 and document["verified"] is True
    assert document["rounds_sent_ahead"] > 0 or method == "draft_model_tree"


def test_a_stop_string_ends_the_text(
    cli: Cli, server: RpcServer, target_folder: Path, drafter_folder: Path
) -> None:
    options = ("-n", 40, "--ignore-eos")
    whole = draft(cli, "--server", server.address, "--drafter", drafter_folder, *options)["text"]
    stop = whole[7:9]
    document = draft(
        cli, "--server", server.address, "--drafter", drafter_folder, *options, "--stop", stop
    )
    assert document["text"] == whole[: whole.index(stop)]
    assert document["finish_reason"] == "stop"


def test_text_streams_and_a_line_of_statistics_ends_it(
    cli: Cli, server: RpcServer, drafter_folder: Path
) -> None:
    options = ("--server", server.address, "--drafter", drafter_folder, "-n", 16, "--ignore-eos")
    result = cli("draft", PROMPT, *options)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.rstrip("\n") == draft(cli, *options)["text"].rstrip("\n")
    assert "16 tokens in" in result.stderr
    for part in ("rounds", "mean accepted length", "round trip", "B up", "finished: length"):
        assert part in result.stderr


def test_the_next_server_of_the_list_is_used(
    cli: Cli, server: RpcServer, drafter_folder: Path
) -> None:
    document = draft(
        cli, "--server", f"127.0.0.1:1,{server.address}", "--drafter", drafter_folder, "-n", 8
    )
    assert document["num_tokens"] == 8


def test_offline_text_is_marked(cli: Cli, server: RpcServer, drafter_folder: Path) -> None:
    with Netem(server.address) as netem:
        netem.refuse()
        document = draft(
            cli, "--server", netem.address, "--drafter", drafter_folder, "-n", 20, "--ignore-eos",
            "--offline-ok", "--give-up", "1.0",
        )  # fmt: skip
    assert document["verified"] is False
    assert document["token_ids"] == []
    assert document["finish_reason"] is None
    # One token of the end is the target's own: no drafter can stand in for it.
    assert 16 <= len(document["unverified_token_ids"]) <= 20


def test_tls_client_certificates_and_tokens(
    cli: Cli, server: RpcServer, target_folder: Path, drafter_folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The tokens of a server in plain text, and what is missing is said."""
    token = "alice-token-of-many-characters"
    make_certificates(tmp_path)
    (tmp_path / "tenants.yaml").write_text(yaml.safe_dump({"tenants": {"alice": {"token": token}}}))
    (tmp_path / "token").write_text(f"{token}\n")
    ca, cert, key = (tmp_path / name for name in ("ca.crt", "client.crt", "client.key"))
    tls = ServerTls(
        cert=str(tmp_path / "server.crt"), key=str(tmp_path / "server.key"), client_ca=str(ca),
        require_client_cert=True,
    )  # fmt: skip
    what = ("--drafter", drafter_folder, "-n", 24, "--ignore-eos")
    expected = draft(cli, "--server", server.address, *what)
    thread = EngineThread(load_engine(target_folder)).start()
    gate = Gate(tenants=Tenants(tmp_path / "tenants.yaml"))
    try:
        with serving(engine=thread, gate=gate, credentials=tls.credentials()) as secure:
            files = ("--ca", ca, "--cert", cert, "--key", key)
            with_token = ("--token-file", tmp_path / "token")
            where = ("--server", secure.address)
            document = draft(cli, *where, *files, *with_token, *what)
            assert document["token_ids"] == expected["token_ids"]
            assert document["verified"] is True
            for options, word in (
                (files, "authorization: Bearer"),
                (("--ca", ca, *with_token), secure.address),  # no certificate: no connection
                (with_token, secure.address),
            ):
                refused = cli("draft", PROMPT, *where, *options, *what, "--give-up", 1)
                assert refused.exit_code == 2, refused.output
                assert word in refused.stderr
                assert token not in refused.output
            monkeypatch.setenv("PACELINE_TOKEN", token)
            assert draft(cli, *where, *files, *what)["token_ids"] == expected["token_ids"]
    finally:
        thread.stop()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--server", "nonsense"), ("server", "HOST:PORT")),
        (("--server", "127.0.0.1:1", "--give-up", "0.3"), ("127.0.0.1:1",)),
        (("--server", "127.0.0.1:1", "--give-up", "0"), ("give_up", "above 0")),
        (("--server", "127.0.0.1:1", "-m", "layer_skip"), ("method", "layer_skip", "shared_model")),
        (("--server", "127.0.0.1:1", "-m", "longspec"), ("method", "longspec", "hidden_states")),
        (("--server", "127.0.0.1:1", "-m", "moa", "--drafter", "demo-drafter"), ("drafter", "moa")),
        (("--server", "127.0.0.1:1", "--target", "demo"), ("target", "method of a head")),
        (("--server", "127.0.0.1:1", "-m", "moa", "--heads", "/nowhere"), ("/nowhere",)),
        (("--server", "127.0.0.1:1", "-m", "nothing"), ("method", "nothing", "one of")),
        (("--server", "127.0.0.1:1", "-m", "speculative_sampling"), ("acceptance", "coupled")),
        (("--server", "127.0.0.1:1", "--drafter", "/nowhere"), ("/nowhere",)),
        (("--server", "127.0.0.1:1", "-t", "-1"), ("temperature",)),
        (("--server", "127.0.0.1:1", "--direct", "always"), ("direct", "auto or never")),
    ],
)
def test_bad_input(arguments: tuple[str, ...], words: tuple[str, ...], cli: Cli) -> None:
    started = time.monotonic()
    result = cli("draft", PROMPT, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error:"), result.stderr
    for word in words:
        assert word in result.stderr
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("method", ["moa", "dspark"])
def test_a_head_of_the_target(method: str, cli: Cli) -> None:
    """The server sends the states that it reads; of the target itself little is loaded here."""
    options = ("-n", 24, "--temperature", 0.8, "--seed", 5, "--ignore-eos")
    expected = json.loads(cli("generate", PROMPT, "--method", "ar", *options, "--json").stdout)
    thread = EngineThread(load_engine()).start()
    try:
        with serving(engine=thread) as running:
            document = draft(
                cli, "--server", running.address, "--method", method, "--only-device", *options,
                "--set", "length=fixed",
            )  # fmt: skip
    finally:
        thread.stop()
    assert document["token_ids"] == expected["token_ids"]
    assert document["num_accepted"] > 0
    assert document["states_bytes_per_token"] > 100
    assert document["bytes_down_per_round"] > document["states_bytes_per_token"]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_drafter_with_another_tokenizer(
    temperature: int, cli: Cli, server: RpcServer, target_folder: Path, drafter_folder: Path
) -> None:
    """The demo's drafter has thousands of tokens, the target one for each byte."""
    options = ("--server", server.address, "-n", 24, "--ignore-eos", "-t", temperature)
    result = cli("draft", PROMPT, *options)
    assert result.exit_code == 2
    assert "tokenizer" in result.stderr
    assert "--target-tokenizer" in result.stderr
    expected = draft(cli, *options, "--drafter", drafter_folder)
    document = draft(cli, *options, "--target-tokenizer", target_folder)
    assert document["method"] == "omnidraft"
    assert document["token_ids"] == expected["token_ids"]
    assert document["text"] == expected["text"]
    result = cli("draft", PROMPT, *options, "--target-tokenizer", DRAFTER_DIR)
    assert result.exit_code == 2
    assert "target_tokenizer" in result.stderr
