"""Batch strategies: the same tokens with each, and what their papers claim of them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.batching import PATIENCE, STRATEGIES, Batching, BatchStrategy
from paceline.config import SpeculationConfig
from paceline.engine import EngineLimits
from paceline.errors import InvalidArgument
from paceline.models.base import Segment
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.types import Draft
from tests.core.engines import Reference, Small, small_engine

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = replace(PARAMS, temperature=1.0, seed=2)


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def engine_with(folder: Path, strategy: BatchStrategy, size: int | None = None) -> Small:
    return small_engine(folder, limits=EngineLimits(batch_strategy=strategy, batch_size=size))


@pytest.mark.one_of(3)
@pytest.mark.parametrize("params", [PARAMS, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["ar", "draft_model", "draft_model_tree", "eagle", "layer_skip"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_are_those_of_ar_in_any_batch(
    strategy: BatchStrategy, method: str, params: SamplingParams, tiny_folder: Path,
    reference: Reference,
) -> None:  # fmt: skip
    small = engine_with(tiny_folder, strategy, 4)
    prompts = [tokens(4 + i % 3, seed=i) for i in range(9)]
    sessions = small.engine.generate(prompts, params, SpeculationConfig(method=method))
    assert [s.output_ids for s in sessions] == [reference(p, params) for p in prompts]
    assert not any(s.stats.drafter_lost for s in sessions)
    small.assert_nothing_is_left()


def test_pad_and_split_give_the_same_logits(tiny_folder: Path) -> None:
    """BASS: two layouts of one computation."""
    found: list[list[torch.Tensor]] = []
    drafts = [Draft.chain([1, 2, 3, 4]), Draft.chain([5]), Draft.chain([])]
    drafts.append(Draft.checked([7, 8, 9], [-1, 0, 0], 256))
    for strategy in STRATEGIES:
        small = engine_with(tiny_folder, strategy)  # type: ignore[arg-type]
        sessions = [small.engine.submit(Request(tokens(5 + i, i), PARAMS)) for i in range(4)]
        while any(s.stats.first_token_at is None for s in sessions):
            small.engine.step()
        target = small.engine.local_target
        found.append([v.logits for v in target.verify(sessions, drafts)])
        assert target.num_padding == (0 if strategy != "pad" else 0 + 3 + 4 + 1)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)


def test_ragged_batches_process_the_real_tokens_and_no_others(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    """EMS-SD: drafts of different lengths in one batch; rows = last tokens + drafted tokens, and
    the tokens are those of batch 1.
    """
    rows: dict[str, int] = {}
    for strategy in ("ragged", "pad"):
        small = engine_with(tiny_folder, strategy)  # type: ignore[arg-type]
        forward, count = small.target.forward, [0]
        together: list[set[int]] = []  # rows of each sequence, by forward

        def counting(segments: list[Segment], *rest: object) -> object:
            count[0] += sum(segment.num_rows for segment in segments)  # noqa: B023
            together.append({segment.num_rows for segment in segments})  # noqa: B023
            return forward(segments, *rest)  # type: ignore[arg-type]  # noqa: B023

        monkeypatch.setattr(small.target, "forward", counting)
        lengths = (1, 3, 5)
        sessions = [
            small.engine.submit(
                Request(
                    [1 + n],
                    PARAMS,
                    SpeculationConfig(
                        method="draft_model", num_speculative_tokens=n, length="fixed"
                    ),
                )
            )
            for n in lengths
        ]
        while small.engine.has_work:
            small.engine.step()
        real = sum(s.stats.num_rounds + s.stats.num_draft_nodes for s in sessions)
        rows[strategy] = count[0]
        assert count[0] == real + small.engine.local_target.num_padding
        assert (small.engine.local_target.num_padding > 0) is (strategy == "pad")
        assert ({2, 4, 6} in together) is (strategy == "ragged")
        assert [s.output_ids for s in sessions] == [reference([1 + n], PARAMS) for n in lengths]
    assert rows["ragged"] < rows["pad"]


def run_pool(folder: Path, window: int, strategy: BatchStrategy = "same_length") -> Batching:
    """Thirty sessions of six lengths, four at a time."""
    small = engine_with(folder, strategy, 4)
    small.engine.scheduler.batching = Batching(strategy, 4, window)
    prompts = [tokens(3 + i % 6, seed=i) for i in range(30)]
    sessions = small.engine.generate(prompts, PARAMS, SpeculationConfig(method="ar"))
    assert all(session.finished for session in sessions)
    return small.engine.scheduler.batching


def test_exspec_groups_more_in_a_larger_window_and_realigns_less(tiny_folder: Path) -> None:
    rates, realigned = [], []
    for window in (4, 12, 30):
        counters = run_pool(tiny_folder, window).counters
        rates.append(counters.num_grouped / counters.num_steps)
        realigned.append(counters.num_realigned)
    assert rates == sorted(rates)
    assert rates[-1] > rates[0]
    assert realigned == sorted(realigned, reverse=True)
    ragged = run_pool(tiny_folder, 30, "ragged").counters
    assert realigned[-1] < ragged.num_realigned


def fakes(*lengths: int) -> list[Session]:
    from paceline.plan import AR_PLAN

    return [Session(f"s{i}", [1] * n, PARAMS, AR_PLAN) for i, n in enumerate(lengths)]


def test_a_group_of_one_length_realigns_nothing() -> None:
    batching = Batching("same_length", 3)
    ready = fakes(5, 9, 7, 9, 9, 5)
    assert [s.length for s in batching.choose(ready)] == [9, 9, 9]
    assert batching.counters.num_realigned == batching.counters.num_kv_padding == 0
    assert batching.counters.num_grouped == 1


def test_padding_is_the_distance_to_the_longest_and_never_adds_up() -> None:
    batching = Batching("same_length", 3)
    ready = fakes(5, 9, 7)
    for step in range(1, 6):
        assert batching.choose(ready) == ready
        assert batching.counters.num_kv_padding == step * (4 + 0 + 2)
        entries = step * (5 + 9 + 7) + 3 * step * (step - 1) // 2
        assert batching.counters.num_kv_entries == entries
        assert batching.counters.padding_share == 6 * step / (6 * step + entries)
        assert batching.counters.num_realigned == step * 2
        for session in ready:
            session.token_ids.append(1)


def test_the_oldest_is_not_passed_over_for_ever() -> None:
    batching = Batching("same_length", 2)
    ready = fakes(5, 9, 9)
    turns = [ready[0] in batching.choose(ready) for _ in range(3 * (PATIENCE + 1))]
    assert turns.count(True) >= 2
    assert turns[:PATIENCE] == [False] * PATIENCE


def test_wrong_strategies_are_named() -> None:
    with pytest.raises(InvalidArgument, match="batch_strategy"):
        EngineLimits(batch_strategy="best")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="batch_size"):
        EngineLimits(batch_size=0)
