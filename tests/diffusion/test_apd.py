"""APD: a masked model proposes a window, and a model that reads in order says how far it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from paceline.demo import DRAFTER_DIR
from paceline.diffusion.judge import JudgeModel
from paceline.diffusion.loop import Denoiser
from paceline.diffusion.model import Blocks
from paceline.diffusion.runner import BlockRunner
from paceline.diffusion.schedules import APD, View, make_schedule
from paceline.errors import InvalidArgument
from paceline.loading import load_runner
from paceline.models.base import ModelRunner, Segment
from tests.masked import masked_model

VOCAB = 40
BLOCKS = Blocks(mask_token_id=39, block_size=16, sub_block_size=8)
PROMPT = list(range(5, 26))
TOKENS = 40


@dataclass(frozen=True)
class Judged(APD):
    """Its judge has random logits, a pure function of all tokens before the position."""

    calls: ClassVar[list[tuple[list[int], list[int]]]] = []

    def judge_logits(self, text: Sequence[int], proposed: Sequence[int]) -> torch.Tensor:
        self.calls.append((list(text), list(proposed)))
        rows = []
        for end in range(len(proposed)):
            seed = hash((*text, *proposed[:end])) % 2**31
            rows.append(3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)))
        return torch.stack(rows)


@pytest.fixture(scope="module")
def runner() -> BlockRunner:
    return BlockRunner(masked_model(VOCAB, BLOCKS))


def write(runner: BlockRunner, schedule: APD, temperature: float) -> tuple[list[int], Denoiser]:
    denoiser = Denoiser(runner, schedule, temperature=temperature, seed=4)
    return [t for block in denoiser.decode(PROMPT, TOKENS) for t in block], denoiser


def view_of(seed: int, temperature: float) -> View:
    """Twelve rows whose last ten are masked."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(12, VOCAB, generator=generator)
    noise = None
    if temperature:
        noise = -(-torch.rand(12, VOCAB, generator=generator).log()).log()
    tokens = (logits if noise is None else logits / temperature + noise).argmax(-1)
    masked = torch.arange(12) >= 2
    return View(
        logits, tokens, logits.softmax(-1).amax(-1), masked, masked, [1, 2], temperature, noise
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weight_1_accepts_the_whole_window(runner: BlockRunner, temperature: float) -> None:
    _, denoiser = write(runner, Judged(weight=1.0, window=5), temperature)
    assert denoiser.trace == [5, 5, 1, 5, 5, 5, 1, 5, 5, 3]  # blocks end after 11, 16 and 13 rows


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_fewer_are_accepted_as_the_judge_gains_weight(temperature: float) -> None:
    falls = 0
    for seed in range(20):
        view = view_of(seed, temperature)
        weights = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
        counts = [int(Judged(weight=w, window=8).choose(view).sum()) for w in weights]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] == 8
        assert min(counts) >= 1
        falls += counts[-1] < counts[0]
    assert falls >= 15


@pytest.mark.parametrize("window", [1, 3, 16])
def test_a_step_commits_a_prefix_of_at_least_one_and_at_most_the_window(
    runner: BlockRunner, window: int
) -> None:
    Judged.calls.clear()
    text, denoiser = write(runner, Judged(weight=0.5, window=window), 0.0)
    assert len(text) == TOKENS
    assert all(1 <= count <= window for count in denoiser.trace)
    written = 0
    for count, (before, proposed) in zip(denoiser.trace, Judged.calls, strict=True):
        assert before == [*PROMPT, *text[:written]]
        assert proposed[:count] == text[written : written + count]
        written += count


def test_the_judge_is_not_asked_about_the_first_tokens() -> None:
    counts = []
    for count in (1, 3, 8):
        schedule = Judged(weight=0.0, window=8, tokens_per_step=count)
        counts.append([int(schedule.choose(view_of(seed, 0.0)).sum()) for seed in range(10)])
        assert min(counts[-1]) == count
    assert counts == sorted(counts)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_a_judge_that_is_of_one_mind_accepts_all_because_the_noise_is_shared(weight: float) -> None:
    for seed in range(5):
        view = view_of(seed, 0.9)

        class Same(APD):
            def judge_logits(self, text: Sequence[int], proposed: Sequence[int]) -> torch.Tensor:
                return view.logits[2 : 2 + len(proposed)] + 7.0  # noqa: B023

        assert int(Same(weight=weight, window=8).choose(view).sum()) == 8


def test_the_mixture_decides_token_by_token() -> None:
    """By hand: each proposal against the argmax of the weighted logits and the same noise."""
    for seed in range(10):
        view, weight = view_of(seed, 0.8), 0.6
        schedule = Judged(weight=weight, window=6)
        judged = schedule.judge_logits([1, 2], view.tokens[2:8].tolist())
        assert view.noise is not None
        count = 1
        for place in range(1, 6):
            mixed = weight * view.logits[2 + place] + (1 - weight) * judged[place]
            if int((mixed / 0.8 + view.noise[2 + place]).argmax()) != int(view.tokens[2 + place]):
                break
            count += 1
        assert int(schedule.choose(view).sum()) == count


# --- the judge -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reader() -> ModelRunner:
    return load_runner(DRAFTER_DIR)


def test_a_judge_has_the_logits_of_the_model_whatever_it_read_before(reader: ModelRunner) -> None:
    judge = JudgeModel(reader)
    texts = ([5, 6, 7], [5, 6, 7, 8, 9], [5, 6, 7, 8], [9], [9, 10, 11, 12, 13, 14])
    for text in texts:
        proposed = [20, 21, 22, 23]
        sequence = reader.new_sequence()
        tokens = np.array([*text, *proposed[:-1]], np.int64)
        whole = reader.forward([Segment(sequence, tokens, logits="all")]).logits[len(text) - 1 :]
        reader.free(sequence)
        torch.testing.assert_close(judge.logits(text, proposed), whole, atol=1e-3, rtol=1e-3)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        judge.logits([5] * reader.context_length, [6, 7])


def test_bad_values_are_named() -> None:
    with pytest.raises(InvalidArgument, match=r"judge.*vocabulary of 40"):
        make_schedule("apd", judge="drafter").choose(view_of(0, 0.0))
    with pytest.raises(InvalidArgument, match="weight"):
        make_schedule("apd", weight=1.5)
    with pytest.raises(InvalidArgument, match="window"):
        make_schedule("apd", window=0)
