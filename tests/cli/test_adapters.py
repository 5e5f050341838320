"""`--adapter` of the commands: a folder here, a name on a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import SpeculationConfig
from paceline.engine import EngineThread
from paceline.loading import load_engine
from paceline.request import Request
from paceline.rpc.server import RpcServer
from paceline.sampling import SamplingParams
from tests.adapters import make_adapter
from tests.cli.conftest import Cli
from tests.rpc.serving import serving

PROMPT = "abc abc abc"


@pytest.fixture(scope="module")
def adapter(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), target_folder, strength=0.5)


@pytest.fixture(scope="module")
def truth(target_folder: Path, adapter: Path) -> dict[str, list[int]]:
    """What AR generates without an adapter ("") and with it."""
    engine = load_engine(target_folder, adapters={"own": adapter})
    assert engine.tokenizer is not None
    prompt, ar = engine.tokenizer.encode(PROMPT), SpeculationConfig(method="ar")
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    sessions = [engine.submit(Request(prompt, params, ar, adapter=name)) for name in ("", "own")]
    while engine.has_work:
        engine.step()
    assert sessions[0].output_ids != sessions[1].output_ids
    return {session.adapter: session.output_ids for session in sessions}


@pytest.fixture(scope="module")
def server(target_folder: Path, adapter: Path) -> Iterator[RpcServer]:
    thread = EngineThread(load_engine(target_folder, adapters={"own": adapter})).start()
    with serving(engine=thread) as running:
        yield running
    thread.stop()


def generated(cli: Cli, *options: Any) -> dict[str, Any]:
    result = cli(
        "generate", PROMPT, "-n", 16, "--ignore-eos", "--json", "-m", "prompt_lookup", *options
    )
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_generate(
    cli: Cli, target_folder: Path, adapter: Path, server: RpcServer, truth: dict[str, list[int]]
) -> None:
    here, there = ("--target", target_folder), ("--server", server.address)
    prints = set()
    for options, name in (
        (here, ""), ((*here, "--adapter", adapter), "own"), (there, ""),
        ((*there, "--adapter", "own"), "own"),
    ):  # fmt: skip
        document = generated(cli, *options)
        assert document["token_ids"] == truth[name], options
        prints.add((name, document["fingerprint"]))
    assert len(prints) == 2  # as many here as there


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--adapter", "/nowhere"), "adapter 'adapter': folder '/nowhere' does not exist"),
        (
            ("--adapter", "{adapter}", "--transcript", "t.json"),
            "transcript: got 't.json', expected",
        ),
        (("--adapter", "x", "--server", "{server}"), "adapter: got 'x', expected one of own, or"),
    ],
    ids=["no_folder", "transcript", "unknown"],
)
def test_generate_refuses(
    options: tuple[str, ...], message: str, cli: Cli, target_folder: Path, adapter: Path,
    server: RpcServer,
) -> None:  # fmt: skip
    filled = [each.format(adapter=adapter, server=server.address) for each in options]
    here = () if "--server" in filled else ("--target", target_folder)
    result = cli("generate", PROMPT, *here, *filled)
    assert result.exit_code != 0
    assert message in " ".join(result.stderr.split())


def test_chat(cli: Cli, target_folder: Path, adapter: Path) -> None:
    options = ("--target", target_folder, "--max-tokens", 8)
    answers = [
        cli("chat", *options, *more, stdin="abc\n").stdout for more in ((), ("--adapter", adapter))
    ]
    assert all(answers)
    assert answers[0] != answers[1]


def test_bench(cli: Cli, target_folder: Path, adapter: Path) -> None:
    options = ("--target", target_folder, "--methods", "prompt_lookup", "--limit", 1, "-r", 1)
    found = []
    for more in ((), ("--adapter", adapter)):
        result = cli("bench", *options, "-n", 8, "--no-peers", "--json", *more)
        assert result.exit_code == 0, result.stderr
        document = json.loads(result.stdout)
        assert all(row["identical_to_ar"] for row in document["results"])
        found.append(document["environment"])
    assert [each["adapter"] for each in found] == [None, str(adapter)]
    assert found[0]["fingerprint"] != found[1]["fingerprint"]
    for wrong in (("--topology", "actors"), ("--peers",), ("--batch-invariant", "both")):
        result = cli("bench", *options, "--adapter", adapter, *wrong)
        assert result.exit_code != 0
        assert "with an adapter" in " ".join(result.stderr.split()), wrong
