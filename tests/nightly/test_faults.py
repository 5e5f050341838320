"""Random faults under live sessions: no token is lost or changed, no client is stuck.

PACELINE_FAULTS sets the number of the long form, by default 10,000; the short one is one of the
slow tests. ``benchmarks/faults.py`` prints and draws the gaps, whose lengths depend on the machine.
"""

from __future__ import annotations

import os

import pytest

from benchmarks.faults import FAULTS, run

MANY = int(os.environ.get("PACELINE_FAULTS", "10000"))


@pytest.mark.parametrize(
    "num_faults",
    [
        pytest.param(len(FAULTS), marks=[pytest.mark.slow, pytest.mark.timeout(300)], id="short"),
        pytest.param(MANY, marks=[pytest.mark.nightly, pytest.mark.timeout(12 * 3600)], id="long"),
    ],
)
def test_no_fault_costs_a_token(num_faults: int) -> None:
    *faults, last = run(num_faults, 3, num_faults, list(FAULTS))
    assert len(faults) == num_faults
    assert {fault["fault"] for fault in faults} == set(FAULTS)
    assert last["sessions"] > 0 and last["tokens"] > 0
    assert not last["wrong"]
    # Kills that follow one another before a first token look like a request that kills.
    assert last["refused"] <= num_faults // 2000
    assert not last["stuck"]
