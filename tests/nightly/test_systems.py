"""Every method and schedule runs by one command on what ships, in less than a minute."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import cache
from typing import Any

import pytest

from paceline.diffusion.schedules import SCHEDULES
from paceline.methods import METHODS

pytestmark = [pytest.mark.nightly, pytest.mark.alone]
MOST_S = 60.0
PROMPT = "def read(path):\n    with open(path) as file:\n"
NOT_ALONE = {"client", "vllm"}
"""Drafters on a client's device, and vLLM's own: `paceline draft` and docs/vllm.md."""


def run(*arguments: str) -> dict[str, Any]:
    """The JSON document that a command prints."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cluster.cli", *arguments, "--json"],
        capture_output=True, text=True, timeout=2 * MOST_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < MOST_S
    return dict(json.loads(done.stdout))


@cache
def tokens_of_ar() -> list[int]:
    return list(run("generate", PROMPT, "--method", "ar", "--max-tokens", "24")["token_ids"])


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.drafter not in NOT_ALONE])
def test_a_method(name: str) -> None:
    options = [] if METHODS[name].lossless else ["--set", "allow_lossy=true"]
    found = run("generate", PROMPT, "--method", name, "--max-tokens", "24", *options)
    assert len(found["token_ids"]) == 24
    if METHODS[name].lossless:
        assert found["token_ids"] == tokens_of_ar()


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_schedule(name: str) -> None:
    assert run("diffuse", PROMPT, "--schedule", name, "--max-tokens", "32")["text"]
