"""When a session of method auto stops to look for drafts, and when it looks again."""

from __future__ import annotations

import math

from paceline.lengths.rest import FIRST_ROUNDS, MOST_ROUNDS, NEGLIGIBLE, Rest

ROUND = 10e-3
DEAR = 1e-3


def looks(rest: Rest, rounds: int, saved: float = 0.0, cost: float = DEAR) -> int:
    """Rounds of these in which it looks."""
    count = 0
    for _ in range(rounds):
        if not rest.goes_on():
            rest.looked(saved, cost, ROUND)
            count += 1
    return count


def test_looks_that_save_nothing_become_rare() -> None:
    rest = Rest()
    first = int(FIRST_ROUNDS * ROUND / DEAR) + 1
    assert looks(rest, first) == first
    longest = int(DEAR / (NEGLIGIBLE * ROUND))
    assert looks(rest, 2 * longest) < 12
    assert looks(rest, 10 * (longest + 1)) == 10


def test_the_dearer_a_look_the_longer_the_rest() -> None:
    rest = Rest()
    longest = 31
    cost = (longest + 0.5) * NEGLIGIBLE * ROUND
    looks(rest, 100, cost=cost)
    assert looks(rest, 10 * (longest + 1), cost=cost) == 10
    first = int(math.log2(MOST_ROUNDS)) + 1  # while rests grow
    assert looks(Rest(), 6500, cost=3 * ROUND) <= first + 6500 / (MOST_ROUNDS + 1)


def test_looks_that_pay_go_on() -> None:
    assert looks(Rest(), 100, saved=1.1 * DEAR) == 100


def test_a_draft_that_pays_now_and_then_pays_for_the_looks_between() -> None:
    rest, count = Rest(), 0
    for _ in range(40):
        count += looks(rest, 1, saved=5 * DEAR) + looks(rest, 3)
    assert count == 160


def test_cheap_looks_never_end() -> None:
    assert looks(Rest(), 100, cost=NEGLIGIBLE * ROUND) == 100


def test_it_ends_when_a_draft_was_right() -> None:
    rest = Rest()
    looks(rest, 200)
    while not rest.goes_on():
        rest.looked(0.0, DEAR, ROUND)
    rest.end()
    assert not rest.goes_on()
    rest.looked(20 * DEAR, DEAR, ROUND)
    assert looks(rest, 10, saved=2 * DEAR) == 10


def test_a_right_draft_that_still_is_not_worth_it_ends_one_rest() -> None:
    rest = Rest()
    looks(rest, 200)
    count = 0
    for _ in range(2100):
        rest.end()
        count += looks(rest, 1)
    assert count <= 2 + 2100 / DEAR * NEGLIGIBLE * ROUND
    looks(rest, 21, saved=DEAR)  # worth it now
    while not rest.goes_on():
        rest.looked(0.0, DEAR, ROUND)
    rest.end()
    assert not rest.goes_on()
