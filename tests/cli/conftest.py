"""Running the command line in this process, and two small models that share a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.cluster.cli import app
from paceline.engine import EngineThread
from paceline.loading import load_engine
from paceline.rpc.server import RpcServer
from tests.command_line import CliRunner, Result
from tests.modelzoo import make_model
from tests.rpc.serving import serving

Cli = Callable[..., Result]


@pytest.fixture
def cli() -> Cli:
    """``cli("methods", "--json")`` runs `paceline methods --json`."""
    runner = CliRunner()
    return lambda *arguments, stdin=None: runner.invoke(app, [str(a) for a in arguments], stdin)


@pytest.fixture(scope="session")
def target_folder(zoo: Path) -> Path:
    """A random Llama; every byte of a text is one token, and the context has 512."""
    return make_model("llama_gqa", zoo, num_hidden_layers=2)


@pytest.fixture(scope="session")
def drafter_folder(zoo: Path) -> Path:
    """Another random Llama with the same tokenizer, which is seldom right."""
    return make_model("llama", zoo, seed=1, num_hidden_layers=1)


@pytest.fixture(scope="module")
def server(target_folder: Path, drafter_folder: Path) -> Iterator[RpcServer]:
    """A gRPC server over the two models; a test that leaves a session behind fails here."""
    thread = EngineThread(load_engine(target_folder, drafter_folder)).start()
    try:
        with serving(engine=thread) as running:
            yield running
            assert not thread.engine.sessions, "sessions leaked"
    finally:
        thread.stop()
