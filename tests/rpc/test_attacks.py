"""No request of one client slows another one down, nor ends the target that serves both."""

from __future__ import annotations

import pytest

from benchmarks.attacks import ATTACKS, served, slowdown

MOST = 1.5
"""Times as long as calm: the honest client's p99 between two replies."""
TRIES = 3  # another program of the machine may be what slows


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_attacks_slow_nobody_else() -> None:
    slow: dict[str, list[float]] = {}
    with served() as measure:  # which ends the test if the target dies or a token differs
        for name in ATTACKS:
            found: list[float] = []
            while len(found) < TRIES and (not found or found[-1] > MOST):
                found.append(slowdown(measure(name, 1.0, 2 + len(found))))
            print(f"{name:16}", *(f"{each:.2f}" for each in found))
            if found[-1] > MOST:
                slow[name] = found
    assert not slow
