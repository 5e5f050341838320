"""Drafters that are added shorten the wait for drafts, by as much as the simulation says.

Engine, pool, gRPC and drafter processes are real; targets and drafters sleep for the time that
their forwards would take.
"""

from __future__ import annotations

import pytest

from benchmarks.drafter_pool import Costs, compare, simulate

pytestmark = [pytest.mark.alone, pytest.mark.timeout(400)]

COSTS = Costs(draft_s=0.04, session_s=0.01, verify_s=0.1)


def check(found: dict[int, tuple[float, float]]) -> None:
    for count, (measured, simulated) in found.items():
        assert measured == pytest.approx(simulated, rel=0.15), count
    waits = [measured for measured, _ in found.values()]
    assert waits == sorted(waits, reverse=True)


@pytest.mark.slow
def test_four_targets_on_one_and_on_three_drafters() -> None:
    found = compare(4, 4, (1, 3), COSTS, warm_up_s=3.0, seconds=8.0)
    check(found)
    assert found[3][0] < 0.6 * found[1][0]


@pytest.mark.nightly
def test_ten_targets_on_one_to_eight_drafters() -> None:
    check(compare(10, 4, (1, 2, 3, 4, 6, 8), COSTS, seconds=20.0))


@pytest.mark.nightly
def test_two_targets_with_real_models_on_one_to_four_drafters() -> None:
    check(compare(2, 4, (1, 2, 3, 4), COSTS, real=True, seconds=20.0))


def test_what_the_simulation_says() -> None:
    """Bounds that hold for any way to share."""
    one = simulate(1, 1, 1, COSTS)
    assert one == pytest.approx(COSTS.draft_s + COSTS.session_s, rel=0.1)
    many = [simulate(10, 4, drafters, COSTS) for drafters in (1, 2, 4, 8)]
    assert many == sorted(many, reverse=True)
    # Each forward is shared by all sessions at most, and a frame waits for two of them at most.
    assert many[0] <= 2 * (COSTS.draft_s + 40 * COSTS.session_s)
    assert many[-1] > one
