"""Predicted outputs: exact, quick where they come true, and back on track after a difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SpeculationConfig
from paceline.drafters.predicted_outputs import Follower, method_with_prediction
from paceline.errors import InvalidArgument
from paceline.request import Request
from paceline.sampling import SamplingParams
from tests.core.engines import Reference, small_engine
from tests.core.scripted import run, scripted_engine


def followed(prediction: list[int], output: list[int]) -> list[tuple[int, ...]]:
    """What is expected before each token of the output."""
    follower, expected = Follower(prediction), []
    for token in output:
        expected.append(tuple(follower.expected(3)))
        follower.extend([token])
    return expected


def test_a_prediction_that_comes_true_is_expected_all_along() -> None:
    tokens = list(range(20, 40))
    assert followed(tokens, tokens) == [tuple(tokens[i : i + 3]) for i in range(20)]


@pytest.mark.parametrize(
    "output",
    [[1, 2, 99, 4, 5, 6, 7, 8], [1, 2, 99, 98, 97, 3, 4, 5, 6], [1, 2, 5, 6, 7, 8], [9, 1, 2, 3]],
    ids=["replaced", "inserted", "left out", "before it"],
)
def test_two_tokens_after_a_difference_are_enough(output: list[int]) -> None:
    expected = followed([1, 2, 3, 4, 5, 6, 7, 8, 9], output)
    assert expected[-1][:1] == (output[-1],)


def test_of_several_places_the_longest_match_then_the_next_counts() -> None:
    follower = Follower([1, 5, 6, 10, 2, 5, 6, 20, 3, 4, 5, 6, 30])
    follower.extend([1, 5, 6, 10, 99, 4, 5, 6])
    assert follower.expected(1) == (30,)
    follower = Follower([1, 5, 6, 10, 2, 5, 6, 20, 3, 4, 5, 6, 30])
    follower.extend([1, 5, 6, 10, 99, 5, 6])
    assert follower.expected(1) == (20,)


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_whatever_comes_the_place_is_after_the_last_tokens(
    prediction: list[int], output: list[int]
) -> None:
    follower = Follower(prediction)
    for i in range(len(output)):
        follower.extend(output[i : i + 1])
        if follower.place is not None:
            shared = min(2, follower.place, i + 1)
            before = prediction[follower.place - shared : follower.place]
            assert before == output[i + 1 - shared : i + 1]
    assert follower.num_matched <= len(output)


def test_a_true_prediction_commits_a_whole_draft_in_each_forward() -> None:
    engine = scripted_engine(lambda token_ids: len(token_ids) % 200, 200)
    params = SamplingParams(max_tokens=170, ignore_eos=True)
    config = SpeculationConfig(length="fixed", method="predicted_outputs")
    session, events = run(engine, [0], params, config, prediction=list(range(1, 171)))
    assert session.output_ids == list(range(1, 171))
    assert [len(event.token_ids) for event in events] == [17] * 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["predicted_outputs", "predicted_outputs_draft_model"])
def test_exact_and_nothing_is_left(
    method: str, temperature: float, tiny_folder: Path, reference: Reference
) -> None:
    params = SamplingParams(temperature=temperature, seed=8, max_tokens=60, ignore_eos=True)
    prompt = [80, 72, 90, 101]
    expected = reference(prompt, params)
    small = small_engine(tiny_folder)
    config = SpeculationConfig(length="fixed", method=method)
    changed = [*expected[:20], 7, 7, *expected[25:]]
    accepted = []
    for prediction in (expected, changed, list(reversed(expected)), [3], []):
        session = small.engine.submit(Request(prompt, params, config, prediction=prediction))
        while small.engine.has_work:
            small.engine.step()
        assert session.output_ids == expected
        accepted.append(session.stats.num_accepted)
    if method == "predicted_outputs":
        assert accepted[0] == 60 - 4  # the target's own token in each of four rounds
        assert accepted[0] > accepted[1] > accepted[2]
        assert accepted[-1] == 0
    small.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("method", "prediction", "field"),
    [
        ("prompt_lookup", [1], "prediction"),
        ("ar", [1], "prediction"),
        ("predicted_outputs", [10**6], "prediction[0]"),
        ("predicted_outputs", [1, -1], "prediction[1]"),
        ("predicted_outputs", [1] * 10**5, "prediction"),
    ],
)
def test_bad_predictions(method: str, prediction: list[int], field: str, tiny_folder: Path) -> None:
    engine: Any = small_engine(tiny_folder).engine
    with pytest.raises(InvalidArgument) as caught:
        engine.submit(
            Request([5], speculation=SpeculationConfig(method=method), prediction=prediction)
        )
    assert caught.value.field == field


def test_the_method_of_a_request_with_a_prediction() -> None:
    both = ["predicted_outputs", "predicted_outputs_draft_model"]
    assert method_with_prediction("draft_model", both) == "predicted_outputs_draft_model"
    assert method_with_prediction("draft_model", both[:1]) == "predicted_outputs"
    assert method_with_prediction("suffix_decoding", both) == "predicted_outputs"
