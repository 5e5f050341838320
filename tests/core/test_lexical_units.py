"""Lexical Unit Decoding: what the heads are sure of is written, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from paceline.acceptance.base import PathLogits
from paceline.acceptance.unverified import Unverified
from paceline.config import SpeculationConfig, parse_speculation
from paceline.drafters.head import HeadDrafter
from paceline.engine import RoundEvent
from paceline.errors import InvalidArgument
from paceline.lengths.lexical_unit import UnitStop
from paceline.loading import load_engine
from paceline.plan import resolve
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.types import Draft, DraftStep
from tests.core.engines import Small, small_engine

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=3)
PROMPTS = [[5, 6, 7, 5, 6], [90, 3, 90, 3, 90]]


def units(threshold: float) -> SpeculationConfig:
    knobs = {"method": "lexical_units", "unit_threshold": threshold, "allow_lossy": True}
    return parse_speculation(knobs)


@pytest.fixture(scope="module")
def small(tiny_folder: Path) -> Small:
    return small_engine(tiny_folder)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_threshold_1_is_ar(small: Small, params: SamplingParams) -> None:
    found = small.engine.generate(PROMPTS, params, units(1.0))
    ar = small.engine.generate(PROMPTS, params, SpeculationConfig(method="ar"))
    assert [s.output_ids for s in found] == [s.output_ids for s in ar]
    assert all(s.stats.num_drafted == 0 for s in found)
    small.assert_nothing_is_left()


def test_a_unit_is_what_the_heads_are_sure_of() -> None:
    """Chains as `medusa` drafts them, up to the first token that is not probable enough."""
    engine, threshold = load_engine(), 0.2
    assert engine.tokenizer is not None
    drafted: list[tuple[list[int], list[int]]] = []

    def note(event: RoundEvent) -> None:
        if event.outcome is not None:
            outcome = event.outcome
            drafted.append((outcome.draft.token_ids.tolist(), list(outcome.token_ids)))

    head: Any = cast("HeadDrafter", engine.local_drafter("medusa"))._head
    sure: list[list[tuple[int, float]]] = []  # of each draft, tokens and their probabilities
    root, expand = head.root, head.expand

    def watch(logits: torch.Tensor) -> torch.Tensor:
        probability, token = logits[0].softmax(-1).max(-1)
        sure[-1].append((int(token), float(probability)))
        return logits

    def watch_root(*arguments: Any) -> torch.Tensor:
        sure.append([])
        return watch(root(*arguments))

    head.root = watch_root
    head.expand = lambda *arguments: watch(expand(*arguments))
    prompt = engine.tokenizer.encode("class Stack:\n    def __init__(self):\n")
    engine.submit(Request(prompt, GREEDY, units(threshold)), on_event=note)
    while engine.has_work:
        engine.step()
    assert len({len(tokens) for tokens, _ in drafted}) > 2
    for (tokens, committed), chain in zip(drafted, sure, strict=False):  # the last may be empty
        assert committed[:-1] == tokens or len(committed) == len(tokens), "a unit is written whole"
        assert tokens == [token for token, _ in chain[: len(tokens)]]
        assert all(probability > threshold for _, probability in chain[: len(tokens)])
        assert all(probability <= threshold for _, probability in chain[len(tokens) :])


def test_threshold_0_takes_whole_drafts(small: Small) -> None:
    for session in small.engine.generate(PROMPTS, GREEDY, units(0.0)):
        assert session.stats.num_rounds == 24 // 6
        assert session.stats.num_accepted == session.stats.num_drafted
    assert small.engine.generate(PROMPTS, GREEDY, units(0.0))[0].output_ids != (
        small.engine.generate(PROMPTS, GREEDY, SpeculationConfig(method="ar"))[0].output_ids
    )


def test_a_forbidden_token_ends_a_unit() -> None:
    logits = torch.eye(4)[[2, 0, 3, 1]]  # [num_nodes + 1, vocab_size]
    draft = Draft.chain(np.array([1, 3, 2]))
    found = Unverified().accept(draft, PathLogits(logits, GREEDY, [0]))
    assert (found.path, found.next_token) == ((0, 1, 2), 1)
    masked = replace(GREEDY, allowed_token_ids=(0, 1, 2))
    found = Unverified().accept(draft, PathLogits(logits, masked, [0]))
    assert (found.path, found.next_token) == ((0,), 0)


def test_a_probability_of_1_is_not_above_1() -> None:
    sure = DraftStep(1, 0, np.array([900.0, 0.0]))
    assert UnitStop(1.0).stop_after(sure)
    assert not UnitStop(0.99).stop_after(sure)


def test_it_is_lossy() -> None:
    with pytest.raises(InvalidArgument, match="allow_lossy"):
        resolve(SpeculationConfig(method="lexical_units"))


def test_the_shipped_heads_write_more_as_the_threshold_falls() -> None:
    engine = load_engine()
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode("class Stack:\n    def __init__(self):\n")
    rounds = [
        engine.generate([prompt], GREEDY, units(threshold))[0].stats.num_rounds
        for threshold in (1.0, 0.5, 0.3, 0.0)
    ]
    assert rounds[0] == 24
    assert all(low <= high for high, low in pairwise(rounds))
    assert rounds[1] < 24
