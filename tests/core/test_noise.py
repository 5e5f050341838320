"""The noise of coupled sampling: a pure function of (seed, position, token id, salt)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import sampling
from paceline.exact_math import log_of
from paceline.sampling import MAX_SEED, Salt, gumbel, gumbel_at, perturbed_argmax, uniform
from tests.core.statistics import ALPHA, chi_square_p

SALTS = (Salt.TARGET, Salt.DRAFT, Salt.ACCEPT, Salt.RESIDUAL)

# Known answers: (seed, position, token id, salt) -> the uniform, exactly. Anyone who implements the
# noise again (on a device, in another language) must get these.
KNOWN = [
    ((0, 0, 0, 0), "0x1.693568ef770d0p-1"),
    ((0, 0, 1, 0), "0x1.1c13ade1c7e5ep-3"),
    ((0, 1, 0, 0), "0x1.85b69d01a7f0dp-2"),
    ((1, 0, 0, 0), "0x1.4fdb1043b9422p-1"),
    ((0, 0, 0, 1), "0x1.2349cd1869390p-1"),
    ((12345, 678, 31999, 0), "0x1.e6c5f355173ecp-1"),
    ((2**63 - 1, 131071, 151935, 3), "0x1.ded401c226eaep-3"),
]

seeds = st.integers(0, MAX_SEED)
positions = st.integers(0, 2**20)


def reference_uniform(seed: int, position: int, token_id: int, salt: int) -> float:
    """The definition once more, from the paper's constants: SplitMix64 over 64-bit integers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    key = mix((seed + golden) & mask)
    key = mix(((key ^ position) + (salt + 1) * golden) & mask)
    return ((mix((key + token_id * golden) & mask) >> 11) + 0.5) / 2**53


def reference_gumbel(seed: int, position: int, size: int) -> list[float]:
    """Noise of the target's stream by its definition, one number at a time."""
    uniforms = (uniform(seed, position, token, Salt.TARGET) for token in range(size))
    return [-log_of(-log_of(value)) for value in uniforms]


@pytest.mark.parametrize(("arguments", "expected"), KNOWN)
def test_known_answers(arguments: tuple[int, int, int, int], expected: str) -> None:
    value = float.fromhex(expected)
    assert uniform(*arguments) == value
    seed, position, token, salt = arguments
    noise = gumbel(seed, position, token + 1, salt)[token]
    assert noise == pytest.approx(-math.log(-math.log(value)), rel=1e-14)


@given(seeds, positions, st.integers(0, 300_000), st.sampled_from(SALTS))
def test_the_definition(seed: int, position: int, token: int, salt: int) -> None:
    value = uniform(seed, position, token, salt)
    assert value == reference_uniform(seed, position, token, salt)
    assert 0.0 < value < 1.0


@given(seeds, positions, st.integers(1, 400), st.integers(0, 400), st.sampled_from(SALTS))
def test_noise_for_a_subset_is_the_subset_of_the_noise(
    seed: int, position: int, size: int, more: int, salt: int
) -> None:
    small, large = gumbel(seed, position, size, salt), gumbel(seed, position, size + more, salt)
    np.testing.assert_array_equal(large[:size], small)
    some = np.arange(0, size, 3)
    np.testing.assert_array_equal(gumbel_at(seed, position, some, salt), small[some])
    exact = [-math.log(-math.log(uniform(seed, position, v, salt))) for v in range(size)]
    np.testing.assert_allclose(small, exact, rtol=1e-12, atol=1e-12)


def test_uniform_over_tokens_positions_and_seeds() -> None:
    samples = {
        "tokens": [uniform(7, 7, i, 0) for i in range(20_000)],
        "positions": [uniform(7, i, 7, 0) for i in range(20_000)],
        "seeds": [uniform(i, 7, 7, 0) for i in range(20_000)],
        "large seeds": [uniform(MAX_SEED - i, 7, 7, 0) for i in range(20_000)],
    }
    for name, values in samples.items():
        counts = np.bincount((np.array(values) * 100).astype(int), minlength=100)
        assert chi_square_p(counts, np.full(100, 0.01)) > ALPHA, name


@pytest.mark.parametrize(
    "other",
    [
        lambda i: uniform(3, i + 1, 5, 0),  # the next position
        lambda i: uniform(3, i, 6, 0),  # the next token
        lambda i: uniform(4, i, 5, 0),  # the next seed
        lambda i: uniform(3, i, 5, 1),  # each other salt
        lambda i: uniform(3, i, 5, 2),
        lambda i: uniform(3, i, 5, 3),
        lambda i: uniform(3 ^ (i & 1), i, 5, 0),
    ],
)
def test_independent_of_its_neighbours(other) -> None:
    count = 20_000
    ours = np.array([uniform(3, i, 5, 0) for i in range(1, count + 1)])
    theirs = np.array([other(i) for i in range(1, count + 1)])
    table = np.zeros((8, 8), int)
    different = ours != theirs
    np.add.at(table, ((ours * 8).astype(int), (theirs * 8).astype(int)), different)
    assert different.mean() > 0.4
    assert chi_square_p(table.ravel(), np.full(64, 1 / 64)) > ALPHA


def test_streams_do_not_collide() -> None:
    keys = {
        sampling._stream(seed, position, salt)
        for seed in range(20)
        for position in range(200)
        for salt in SALTS
    }
    assert len(keys) == 20 * 200 * len(SALTS)


@given(seeds, positions, st.integers(1, 50), st.data())
def test_argmax_of_scores_plus_noise(
    seed: int, position: int, size: int, data: st.DataObject
) -> None:
    score = st.one_of(st.floats(-30, 30), st.just(-math.inf))
    scores = np.array(data.draw(st.lists(score, min_size=size, max_size=size)))
    scores[data.draw(st.integers(0, size - 1))] = 0.0  # at least one is allowed
    token = perturbed_argmax(scores.copy(), seed, position)
    total = [s + g for s, g in zip(scores, reference_gumbel(seed, position, size), strict=True)]
    assert token == total.index(max(total))
    assert scores[token] > -math.inf


@given(seeds, positions, st.integers(2, 12), st.data())
def test_exact_ties_go_to_the_lowest_token(
    seed: int, position: int, size: int, data: st.DataObject
) -> None:
    tied = data.draw(st.sets(st.integers(0, size - 1), min_size=2))
    scores = np.full(size, -50.0)
    noise = reference_gumbel(seed, position, size)
    for token in tied:  # scores that cancel the noise to exactly 0
        scores[token] = -noise[token]
    assert perturbed_argmax(scores, seed, position) == min(tied)


@given(seeds, positions, st.integers(2, 12), st.data())
def test_near_ties_are_decided_by_the_last_bit(
    seed: int, position: int, size: int, data: st.DataObject
) -> None:
    winner, other = data.draw(st.permutations(range(size)))[:2]
    scores, noise = np.full(size, -50.0), reference_gumbel(seed, position, size)
    for token in (winner, other):
        scores[token] = -noise[token]
    scores[winner] = math.nextafter(scores[winner], math.inf)
    assert perturbed_argmax(scores, seed, position) == winner
