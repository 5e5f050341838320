"""vLLM, where it is installed: `make test-vllm` has it, the main suite usually has not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.deployments.config import parse_config

if TYPE_CHECKING:
    from paceline.deployments.engines.local import LocalVllm

HAS_VLLM = find_spec("vllm") is not None
WITHOUT = "vLLM is not installed: `make test-vllm` runs these tests"

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def running(config: dict[str, Any], drafters: Sequence[str] | None = None) -> LocalVllm:
    """An engine with this configuration; what it lets in lives here."""
    from paceline.deployments.engines.local import LocalVllm

    topology = "colocated" if drafters is None else "actors"
    return LocalVllm(parse_config({"engine": "vllm", "topology": topology, **config}), drafters)


class DrafterProcess:
    """A drafter replica of the demo pair."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rpc.drafter_process", "--demo", "--vocab-size", "4096",
             *options],
            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def drafter_processes() -> Iterator[Callable[..., DrafterProcess]]:
    started: list[DrafterProcess] = []

    def start(*options: str) -> DrafterProcess:
        started.append(DrafterProcess(*options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
