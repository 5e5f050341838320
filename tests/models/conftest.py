"""Models of the general path for the folder, loaded once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from paceline.models.transformers import TransformersRunner

Load = Callable[[str], "TransformersRunner"]


@pytest.fixture(scope="session")
def load(zoo: Path) -> Load:
    """A random checkpoint by its kind.

    Each load tries how the model computes trees, which costs more than most tests. Whoever asks
    frees its sequences, leaves no hook behind and does not change the strategy.
    """
    from paceline.models.transformers import TransformersRunner
    from tests.modelzoo import make_model

    runners: dict[str, TransformersRunner] = {}

    def get(kind: str) -> TransformersRunner:
        if kind not in runners:
            runners[kind] = TransformersRunner(make_model(kind, zoo), device="cpu")
        assert runners[kind].num_free == runners[kind].kv_capacity
        return runners[kind]

    return get
