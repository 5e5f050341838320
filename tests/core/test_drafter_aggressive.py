"""Input-guided aggressive decoding: copying, differences, and where copying goes on."""

from __future__ import annotations

import pytest

from paceline.config import SpeculationConfig
from paceline.engine import RoundEvent
from paceline.errors import InvalidArgument
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from tests.core.scripted import run, scripted_engine

EOS = 99


def rewrite(
    source: list[int], output: list[int], **knobs: int
) -> tuple[Session, list[list[int]], list[RoundEvent]]:
    """Run a target that answers ``source`` with ``output``: session, drafts and rounds."""

    def function(token_ids: list[int]) -> int:
        done = len(token_ids) - len(source)
        return output[done] if done < len(output) else EOS

    engine = scripted_engine(function, 100, eos=[EOS])
    config = SpeculationConfig(method="aggressive", length="fixed", **knobs)
    session, events = run(engine, source, SamplingParams(max_tokens=200), config)
    assert session.output_ids == output
    drafts = [e.outcome.draft.token_ids.tolist() for e in events if e.outcome]
    return session, drafts, events


def test_an_output_equal_to_the_input_takes_one_forward() -> None:
    source = [*range(10, 40), EOS]
    session, drafts, _ = rewrite(source, source)
    assert drafts == [source]
    assert session.stats.num_target_forwards == 1
    assert session.finish_reason == "stop"


def test_long_inputs_are_copied_in_pieces() -> None:
    source = [*range(90), EOS]
    session, drafts, _ = rewrite(source, source, num_speculative_tokens=20)
    # Each forward commits its 20 drafted tokens and one of the target's own.
    assert session.stats.num_target_forwards == 5
    assert drafts[1] == list(range(21, 41))


def test_after_a_substitution_copying_goes_on_at_the_next_unique_token() -> None:
    source = [*range(10, 40), EOS]
    output = [*range(10, 20), 77, *range(21, 40), EOS]
    session, drafts, events = rewrite(source, output)
    # The difference ends the first round; nothing in the input looks like 77, so one round is AR;
    # then 21 is found and the rest is copied.
    assert [len(event.token_ids) for event in events] == [11, 1, 19]
    assert drafts == [source, [], [*range(22, 40), EOS]]
    assert session.stats.num_target_forwards == 3


def test_a_deletion_and_an_insertion() -> None:
    source = [*range(10, 40), EOS]
    deleted = [*range(10, 20), *range(25, 40), EOS]
    # The target's token at the difference, 25, is in the input: no AR round is needed.
    _, drafts, _ = rewrite(source, deleted)
    assert drafts == [source, [*range(26, 40), EOS]]
    inserted = [*range(10, 20), 70, 71, *range(20, 40), EOS]
    _, drafts, _ = rewrite(source, inserted)
    assert drafts == [source, [], [], [*range(21, 40), EOS]]


def test_an_ambiguous_ngram_is_no_place_to_go_on() -> None:
    """5 and 5 6 occur twice, 5 6 7 once."""
    source = [1, 2, 3, 5, 6, 8, 4, 5, 6, 7, 9, 10, 11, EOS]
    output = [1, 60, 5, 6, 7, 9, 10, 11, EOS]
    _, drafts, _ = rewrite(source, output)
    # 60 is not in the input, then 5 and 5 6 have two places each.
    assert drafts == [source, [], [], [], [9, 10, 11, EOS]]


def test_a_longer_ngram_decides_where_a_shorter_one_cannot() -> None:
    """4 and 7 occur twice, 4 7 once."""
    source, output = [4, 1, 7, 3, 4, 7, 8, 9, EOS], [50, 4, 7, 8, 9, EOS]
    assert rewrite(source, output)[1] == [source, [], [], [8, 9, EOS]]
    # With single tokens only, 8 is the first that has one place.
    assert rewrite(source, output, ngram_max=1)[1] == [source, [], [], [], [9, EOS]]


def test_ngrams_below_the_shortest_do_not_count() -> None:
    source, output = [1, 7, 3, 6, 7, 8, 9, EOS], [50, 6, 7, 8, 9, EOS]
    assert rewrite(source, output)[1] == [source, [], [7, 8, 9, EOS]]
    assert rewrite(source, output, ngram_min=2)[1] == [source, [], [], [8, 9, EOS]]


def test_the_prompt_ends_what_can_be_copied() -> None:
    source, output = [10, 11, 12], [10, 11, 12, 13, 14, 11, 12, 13, EOS]
    session, drafts, _ = rewrite(source, output)
    assert drafts[0] == source
    # 11 is unique and followed by 12; after 12 comes nothing.
    assert [12] in drafts
    assert session.stats.num_target_forwards < len(output)


def test_reopened_after_truncation_it_finds_its_place() -> None:
    source = [*range(10, 40)]

    def function(token_ids: list[int]) -> int:
        return source[(len(token_ids) - len(source)) % len(source)]

    engine = scripted_engine(function, 100)
    events: list[RoundEvent] = []
    params = SamplingParams(max_tokens=30)
    config = SpeculationConfig(method="aggressive", length="fixed", num_speculative_tokens=8)
    session = engine.submit(Request(source, params, config), on_event=events.append)
    while not events:
        engine.step()
    engine.truncate(session.session_id, session.prompt_length + 5)
    events.clear()
    while engine.has_work:
        engine.step()
    assert events[0].outcome is not None
    assert events[0].outcome.draft.token_ids.tolist() == source[5:13]
    assert session.output_ids == source
    assert not session.stats.drafter_lost


def test_ngram_bounds_are_checked() -> None:
    engine = scripted_engine(lambda ids: 0, 100)
    config = SpeculationConfig(method="aggressive", length="fixed", ngram_min=5, ngram_max=3)
    with pytest.raises(InvalidArgument, match="ngram_min"):
        engine.submit(Request([1], SamplingParams(), config))
