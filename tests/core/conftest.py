"""What the core tests share: one thread, the demo pair, a small random model, prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from paceline.engine import Engine
from paceline.loading import load_engine
from paceline.models.llama import LlamaRunner
from paceline.session import Session
from tests.core.engines import Reference
from tests.modelzoo import make_model

# Deterministic: the same examples in every run, and no deadline on a busy machine.
settings.register_profile("core", derandomize=True, deadline=None, max_examples=30, database=None)
settings.load_profile("core")


MISTAKES = (AssertionError, AttributeError, NameError, TypeError)


@pytest.fixture(autouse=True)
def _no_swallowed_mistake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A failed check or a typo in what the engine calls fails the test.

    The engine ends only the session in which such an error happens, and a test that does not look
    at ``session.error`` would pass without having checked anything.
    """
    found: list[Exception] = []
    fail = Engine.fail

    def watched(self: Engine, sessions: Iterable[Session], error: Exception) -> None:
        if isinstance(error, MISTAKES):
            found.append(error)
        fail(self, sessions, error)

    monkeypatch.setattr(Engine, "fail", watched)
    yield
    if found:
        raise found[0]


@pytest.fixture(scope="session")
def demo() -> Engine:
    """An engine over the demo pair. Read its parts; do not submit to it."""
    return load_engine()


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where random checkpoints are written, once for each kind."""
    return tmp_path_factory.mktemp("zoo")


@pytest.fixture(scope="session")
def tiny_folder(zoo: Path) -> Path:
    """A small random Llama with grouped queries; every byte of a text is one token."""
    return make_model("llama_gqa", zoo, num_hidden_layers=2)


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> LlamaRunner:
    """The runner of ``tiny_folder``; each test frees what it takes."""
    return LlamaRunner(tiny_folder)


@pytest.fixture(scope="session")
def reference(tiny_folder: Path) -> Reference:
    """AR's tokens on the small random model."""
    return Reference(tiny_folder)
