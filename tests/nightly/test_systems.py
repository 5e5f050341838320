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
ON_SMOLLM2 = ("suffix_decoding_eagle3", "eagle3")
"""The head that ships is SmolLM2's."""
TRAINED_FIRST = {"non_autoregressive"}
"""`python -m paceline.train.translation` makes the drafter in five minutes."""


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
def generated(method: str, target: str) -> list[int]:
    model = ["--target", target, *(["--dtype", "auto"] if target == "smollm2" else [])]
    lossy = [] if METHODS[method].lossless else ["--set", "allow_lossy=true"]
    found = run("generate", PROMPT, "--method", method, "--max-tokens", "24", *model, *lossy)
    return list(found["token_ids"])


@pytest.mark.parametrize(
    "name", [n for n, m in METHODS.items() if m.drafter not in NOT_ALONE | TRAINED_FIRST]
)
def test_a_method(name: str) -> None:
    target = "smollm2" if name in ON_SMOLLM2 else "demo"
    tokens = generated(name, target)
    assert tokens
    if METHODS[name].lossless:
        assert tokens == generated("ar", target)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_schedule(name: str) -> None:
    assert run("diffuse", PROMPT, "--schedule", name, "--max-tokens", "32")["text"]
