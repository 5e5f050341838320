"""No request of one client slows another one down, nor ends the target that serves both."""

from __future__ import annotations

import pytest

from benchmarks.attacks import ATTACKS, served, slowdown

MOST = 1.5
"""Times as long as calm: the honest client's p99 between two replies."""
TRIES = 3  # another program of the machine may be what slows
SOME = ["chain", "ambiguous", "31 bytes", "stop ids"]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("attacks", "seconds"),
    [
        pytest.param(SOME, 0.5, marks=[pytest.mark.nightly, pytest.mark.timeout(240)], id="some"),
        pytest.param(
            list(ATTACKS), 2.0, marks=[pytest.mark.nightly, pytest.mark.timeout(1200)], id="all"
        ),
    ],
)
def test_attacks_slow_nobody_else(attacks: list[str], seconds: float) -> None:
    slow: dict[str, list[float]] = {}
    with served() as measure:  # which ends the test if the target dies or a token differs
        for name in attacks:
            found: list[float] = []
            while len(found) < TRIES and (not found or found[-1] > MOST):
                found.append(slowdown(measure(name, seconds, 2 + len(found))))
            print(f"{name:16}", *(f"{each:.2f}" for each in found))
            if found[-1] > MOST:
                slow[name] = found
    assert not slow
