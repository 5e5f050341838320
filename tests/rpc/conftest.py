"""One small random model for the folder, and a fresh engine and server for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, EngineLimits, EngineThread
from paceline.loading import load_runner
from paceline.models.base import ModelRunner
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.server import RpcServer
from paceline.target import ModelTarget
from paceline.tokenizer import Tokenizer, load_tokenizer
from tests.modelzoo import make_model
from tests.rpc.serving import eventually, serving


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def runner(model_folder: Path) -> ModelRunner:
    """The target's weights and KV memory; every test must leave the memory free."""
    return load_runner(model_folder, kv_tokens=8192)


@pytest.fixture(scope="session")
def draft_runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = make_model("llama", tmp_path_factory.mktemp("models"), seed=0)
    return load_runner(folder, kv_tokens=8192, batch_invariant=False)


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return load_tokenizer(model_folder)


@pytest.fixture
def engine(
    runner: ModelRunner, draft_runner: ModelRunner, tokenizer: Tokenizer
) -> Iterator[EngineThread]:
    drafters = {"draft_model": DraftModel(draft_runner)}
    limits = EngineLimits(max_sessions=8, max_waiting=12)
    thread = EngineThread(
        Engine(ModelTarget(runner), drafters, tokenizer=tokenizer, limits=limits)
    ).start()
    yield thread
    assert eventually(lambda: not thread.engine.sessions), "sessions leaked"
    thread.stop()
    for each in (runner, draft_runner):
        assert each.num_free == each.kv_capacity, "KV memory leaked"


@pytest.fixture
def server(engine: EngineThread) -> Iterator[RpcServer]:
    with serving(engine=engine, model=ModelInfo(name="tiny", batch_invariant=True)) as running:
        yield running
