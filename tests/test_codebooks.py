"""Stack-and-Delay (arXiv 2309.08804): patterns of several codebooks on exact sources."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.codebooks import (
    EMPTY,
    PATTERNS,
    Source,
    collect,
    delay,
    flat,
    law,
    lay_out,
    lost,
    stack_delay,
    write,
)

SIZES = [(1, 1), (1, 5), (2, 3), (3, 6), (4, 4), (4, 8), (4, 13), (8, 3)]


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(("codebooks", "frames"), SIZES)
def test_a_pattern_gives_the_codes_back(name: str, codebooks: int, frames: int) -> None:
    pattern = PATTERNS[name](codebooks, frames)
    codes = np.arange(codebooks * frames).reshape(codebooks, frames)
    rows = lay_out(codes, pattern)
    assert rows.shape == (len(pattern), codebooks)
    assert np.array_equal(collect(rows, pattern, frames), codes)
    assert (rows != EMPTY).sum() == codes.size  # each code once
    assert all(cells for cells in pattern)


@pytest.mark.parametrize(("codebooks", "frames"), SIZES)
def test_the_steps_of_each_pattern(codebooks: int, frames: int) -> None:
    steps = {name: len(make(codebooks, frames)) for name, make in PATTERNS.items()}
    assert steps == {
        "flat": codebooks * frames,
        "delay": frames + codebooks - 1,
        "stack-delay": frames + codebooks - 1,
        "parallel": frames,
    }


@pytest.mark.parametrize("name", ["flat", "delay", "stack-delay"])
def test_a_code_is_written_behind_those_that_it_corrects(name: str) -> None:
    pattern = PATTERNS[name](4, 13)
    when = {cell: step for step, cells in enumerate(pattern) for cell in cells}
    assert all(when[b, f] < when[b + 1, f] for b in range(3) for f in range(13))


def test_a_frame_of_stack_delay_begins_behind_a_complete_one() -> None:
    """But where a run begins: 12 frames in four runs have three such beginnings."""
    when = {cell: step for step, cells in enumerate(stack_delay(4, 12)) for cell in cells}
    begun_early = [frame for frame in range(1, 12) if when[0, frame] <= when[3, frame - 1]]
    assert begun_early == [3, 6, 9]


def test_flat_loses_nothing_and_stack_delay_less_than_delay() -> None:
    """On each of six sources; over all of them, less than half as much."""
    total = dict.fromkeys(PATTERNS, 0.0)
    for seed in range(6):
        source = Source(3, 6, seed)
        assert source.joint.sum() == pytest.approx(1)
        nats = {name: lost(source, make(3, 6)) for name, make in PATTERNS.items()}
        assert nats["flat"] < 1e-12
        assert 0.01 < nats["stack-delay"] < nats["delay"] < nats["parallel"]
        total = {name: total[name] + nats[name] for name in PATTERNS}
    assert total["stack-delay"] < 0.5 * total["delay"]


def test_codes_that_do_not_depend_on_one_another_lose_nothing() -> None:
    source = Source(3, 4, 0, strength=0.0)
    assert all(lost(source, make(3, 4)) < 1e-12 for make in PATTERNS.values())


@pytest.mark.parametrize("name", PATTERNS)
def test_the_decode_loop_has_the_computed_law(name: str) -> None:
    source, pattern, rng = Source(2, 2, 1), PATTERNS[name](2, 2), np.random.default_rng(0)
    expected = law(source, pattern)
    assert expected.sum() == pytest.approx(1)
    runs, counts = 1500, np.zeros_like(expected)
    for _ in range(runs):
        codes = write(source, pattern, rng)
        counts[tuple(codes.T.flatten())] += 1
    likely = expected * runs >= 5
    chi_square = ((counts - runs * expected)[likely] ** 2 / (runs * expected)[likely]).sum()
    freedom = int(likely.sum()) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_the_law_of_flat_is_the_source() -> None:
    source = Source(2, 3, 2)
    np.testing.assert_allclose(law(source, flat(2, 3)), source.joint, rtol=1e-10)


def test_small_patterns_as_they_are_drawn() -> None:
    assert flat(2, 2) == [[(0, 0)], [(1, 0)], [(0, 1)], [(1, 1)]]
    assert delay(2, 3) == [[(0, 0)], [(0, 1), (1, 0)], [(0, 2), (1, 1)], [(1, 2)]]
    # Frames 0 and 1 are one run, 2 and 3 the other.
    assert stack_delay(2, 4) == [
        [(0, 0)], [(0, 2), (1, 0)], [(0, 1), (1, 2)], [(0, 3), (1, 1)], [(1, 3)],
    ]  # fmt: skip
