"""The exactness suite on the lowest and on the highest variant of the kernels that runs here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.models import kernels

ROOT = Path(__file__).parents[2]
RUNNABLE = list(kernels.runnable())

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3 * 3600)]


@pytest.mark.parametrize("variant", [RUNNABLE[-1], RUNNABLE[0]])
def test_tokens_are_those_of_ar(variant: str) -> None:
    """Every lossless method, shape, batch size and temperature of the daily suite."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", "auto"]
    command += ["--timeout", "1800"]  # emulated fused multiply-adds take their time
    result = subprocess.run(
        [*command, "-m", "not nightly", "tests/core/test_exactness.py"],
        cwd=ROOT,
        env=os.environ | {"PACELINE_KERNELS": variant},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:]
