"""When a session of method auto stops to look for drafts, and when it looks again."""

from __future__ import annotations

import itertools
import math
import random

from paceline.lengths.rest import (
    FIRST_ROUNDS,
    GRAM,
    MOST_ROUNDS,
    MOST_SKIPPED,
    MOST_SLOTS,
    NEGLIGIBLE,
    SLOTS_PER_TOKEN,
    Repeats,
    Rest,
)

ROUND = 10e-3
DEAR = 1e-3


def looks(rest: Rest, rounds: int, saved: float = 0.0, cost: float = DEAR) -> int:
    """Rounds of these in which it looks."""
    count = 0
    for _ in range(rounds):
        if not rest.goes_on([], in_crowd=False):
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
    while not rest.goes_on([], in_crowd=False):
        rest.looked(0.0, DEAR, ROUND)
    rest.end()
    assert not rest.goes_on([], in_crowd=False)
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
    while not rest.goes_on([], in_crowd=False):
        rest.looked(0.0, DEAR, ROUND)
    rest.end()
    assert not rest.goes_on([], in_crowd=False)


# --- in a crowd -----------------------------------------------------------------------------------


def looks_in_a_crowd(rest: Rest, text: list[int], new: list[int], saved: float = 0.0) -> list[int]:
    """The places in ``new`` before which it looks, as they follow ``text`` one by one."""
    places = []
    for place, token in enumerate(new):
        if not rest.goes_on(text, in_crowd=True):
            rest.looked(saved, DEAR, ROUND)
            places.append(place)
        text.append(token)
    return places


def test_a_crowd_rests_until_the_text_repeats() -> None:
    rest, text = Rest(), list(range(100))
    longest = int(DEAR / (NEGLIGIBLE * ROUND))
    assert looks_in_a_crowd(rest, text, list(range(100, 130))) == [0, longest + 1]
    assert rest.in_vain
    copied = text[40:48]
    assert looks_in_a_crowd(rest, text, copied, saved=5 * DEAR) == list(range(GRAM, 8))
    assert not rest.in_vain
    assert looks_in_a_crowd(rest, text, [1000]) == [0]
    assert not rest.goes_on(text, in_crowd=False)  # what it has saved allows more looks
    assert not rest.in_vain  # one session alone looks for short repeats, too


def test_repeats_in_vain_are_heeded_ever_more_rarely() -> None:
    rest, text = Rest(), [7] * 20
    places = looks_in_a_crowd(rest, text, [7] * 400)
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert gaps[:5] == [1, 2, 3, 5, 9]  # each skips twice as many
    assert max(gaps) == MOST_SKIPPED + 1
    places = looks_in_a_crowd(rest, text, [7] * 40, saved=2 * DEAR)
    first = places[0]
    assert places[1:] == list(range(first + 1, 40))  # it pays now


def test_a_repeat_is_never_missed_and_rarely_made_up() -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(40_000) for _ in range(700)]
    repeats, text, known = Repeats(), list(prompt), set()
    for end in range(GRAM, len(prompt)):
        known.add(tuple(prompt[end - GRAM : end]))
    right = wrong = source = 0
    for step in range(600):
        gram = tuple(text[-GRAM:])
        again = repeats.again(text)
        assert again or gram not in known
        right += gram in known
        wrong += again and gram not in known
        known.add(gram)
        if step % 20 == 0:
            source = rng.randrange(600)
        copies = step % 20 < 10
        text.append(prompt[source + step % 20] if copies else rng.randrange(40_000))
    assert right > 150
    assert wrong < 600 / SLOTS_PER_TOKEN


def test_what_it_keeps_of_a_text_is_small() -> None:
    repeats = Repeats()
    repeats.again(list(range(100_000)))
    assert len(repeats._seen) == MOST_SLOTS
    assert not Repeats().again([1, 2, 3])
    assert not Repeats().again([])
