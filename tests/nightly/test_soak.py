"""A server under all sorts of clients for an hour: nothing grows, nothing hangs, nothing is wrong.

PACELINE_SOAK_S sets its length: continuous integration runs two minutes of it (`make soak`).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.modelzoo import make_model
from tests.rpc.soak import Soak, soak

HOUR = float(os.environ.get("PACELINE_SOAK_S", "3600"))


def check(result: Soak) -> None:
    assert not result.wrong
    assert not result.unexpected
    assert {"generate", "cancel", "vanish", "nonsense", "verify"} <= result.kinds.keys()
    assert result.last["sessions"] == 0, "a session is stuck"
    assert result.last["kv_free"] == result.last["drafter_free"] == result.last["capacity"]
    assert result.last["preemptions"] > 0
    assert result.last["prefix_hits"] > 0
    assert result.last["evicted"] > 0
    # Flat: the second half against the end of the warm-up, which is the first quarter.
    samples = [sample["rss"] for sample in result.samples]
    warm = max(samples[: len(samples) // 4])
    assert max(samples[len(samples) // 2 :]) <= 1.05 * warm, samples


@pytest.mark.nightly
@pytest.mark.timeout(HOUR + 300)
def test_soak(zoo: Path) -> None:
    result = soak(make_model("llama", zoo), HOUR)
    print(dict(result.kinds), result.samples[-1] if result.samples else "")
    check(result)
