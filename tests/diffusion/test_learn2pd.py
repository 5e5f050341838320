"""Learn2PD: a trained filter says which predictions are final."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from paceline.diffusion import DiffusionModel, make_schedule
from paceline.diffusion.filter import Examples, Filter, fit, load_filter, precision, watch
from paceline.diffusion.loop import Denoiser
from paceline.diffusion.model import Blocks
from paceline.diffusion.runner import BlockRunner, Context
from paceline.diffusion.schedules import Learn2PD, View
from paceline.errors import InvalidArgument, ModelNotFound
from tests.masked import masked_model

BLOCKS = Blocks(mask_token_id=39, block_size=16, sub_block_size=8)
PROMPT = list(range(5, 26))
END = 0


@pytest.fixture(scope="module")
def runner() -> BlockRunner:
    return BlockRunner(masked_model(40, BLOCKS))


def write(runner: BlockRunner, schedule: Learn2PD, tokens: int = 40) -> tuple[list[int], Denoiser]:
    denoiser = Denoiser(runner, schedule)
    return [t for block in denoiser.decode(PROMPT, tokens) for t in block], denoiser


class Oracle(Learn2PD):
    """A filter that knows the whole text and where the block begins in it."""

    reference: Sequence[int] = ()
    commits: list[tuple[int, int]]

    def final(self, view: View) -> torch.Tensor:
        start = len(view.text) - int(view.masked.nonzero()[0])
        rows = torch.tensor(self.reference[start : start + len(view.tokens)])
        return (view.tokens == rows).float()

    def choose(self, view: View) -> torch.Tensor:
        chosen = super(Learn2PD, self).choose(view) | super().choose(view)
        extra = super().choose(view) & ~super(Learn2PD, self).choose(view)
        start = len(view.text) - int(view.masked.nonzero()[0])
        self.commits.extend((start + int(row), int(view.tokens[row])) for row in extra.nonzero())
        return chosen


def test_an_oracle_never_commits_a_wrong_token(runner: BlockRunner) -> None:
    static = Denoiser(runner, make_schedule("static"))
    reference = [*PROMPT, *(t for block in static.decode(PROMPT, 40) for t in block)]
    commits: list[tuple[int, int]] = []
    oracle = type("Known", (Oracle,), {"reference": reference, "commits": commits})()
    _, denoiser = write(runner, oracle)
    assert len(commits) > 5
    assert all(token == reference[place] for place, token in commits)
    assert denoiser.counts.forwards < static.counts.forwards


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.96, 1.0])
def test_every_step_commits_a_token(runner: BlockRunner, threshold: float) -> None:
    text, denoiser = write(runner, Learn2PD(threshold=threshold))
    assert len(text) == 40
    assert min(denoiser.trace) >= 1
    assert sum(denoiser.trace) == 40


def test_a_higher_threshold_takes_no_more_rows() -> None:
    torch.manual_seed(0)
    logits = 4 * torch.randn(16, 40)
    yes = torch.ones(16, dtype=torch.bool)
    view = View(logits, logits.argmax(-1), logits.softmax(-1).amax(-1), yes, yes)
    counts = [int(Learn2PD(threshold=t).choose(view).sum()) for t in (0, 0.1, 0.3, 0.6, 0.96, 1)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 16
    assert counts[-1] == 1


class Ending:
    """Predicts items, an end at row 5 with certainty, and what follows it badly; keeps its rows."""

    blocks, vocab_size, context_length = Blocks(9, 16, 16), 10, 64

    def __init__(self) -> None:
        self.rows: list[tuple[int, bool]] = []

    def append(self, context: Context, tokens: Sequence[int]) -> None:
        context.length += len(tokens)

    def predict(self, context: Context, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        answers = []
        for state in states:
            self.rows.append((len(state), bool((state == END).any())))
            logits = torch.zeros(len(state), 10)
            logits[torch.arange(len(state)), 1 + torch.arange(len(state)) % 7] = 1.0
            logits[5:6, END] = 20.0
            answers.append(logits)
        return answers

    def predict_sub_block(
        self, context: Context, state: torch.Tensor, start: int, stop: int
    ) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("truncate", [True, False])
def test_no_row_behind_the_end_of_the_text_is_computed(truncate: bool) -> None:
    runner = Ending()
    schedule = Learn2PD(threshold=1.0, truncate=truncate)
    denoiser = Denoiser(runner, schedule, frozenset([END]))
    (text,) = denoiser.decode([1], 16)
    assert text == [2, 3, 4, 5]
    ended = [rows for rows, has_end in runner.rows if has_end]
    assert len(ended) >= 4  # the tokens before the end, one a step
    assert set(ended) == ({6} if truncate else {16})
    assert denoiser.counts.positions == sum(rows for rows, _ in runner.rows)


def test_an_end_in_the_prompt_is_not_the_end_of_the_text(runner: BlockRunner) -> None:
    prompt = [5, END, 6]
    for schedule in (Learn2PD(), make_schedule("static")):
        denoiser = Denoiser(runner, schedule, frozenset([END]))
        blocks = list(denoiser.decode(prompt, 8))
        assert not any(BLOCKS.mask_token_id in block for block in blocks)
        assert blocks[0]


# --- training ------------------------------------------------------------------------------------


@dataclass
class Written:
    """What `watch` needs of a model."""

    runner: BlockRunner

    def denoiser(self, schedule: Learn2PD) -> Denoiser:
        return Denoiser(self.runner, schedule)


def test_labels_compare_each_steps_predictions_with_the_finished_block(runner: BlockRunner) -> None:
    examples = watch(Written(runner), [PROMPT[:5]], 11)  # type: ignore[arg-type]
    assert examples.masked.shape == (11, 16)
    assert examples.masked.sum(1).tolist() == list(range(11, 0, -1))
    assert not (examples.final & ~examples.masked).any()
    (last,) = examples.masked[-1].nonzero()
    assert examples.final[-1, last].all()  # the last step's token is the one that stands there
    right = examples.final.sum(1) / examples.masked.sum(1)
    assert right[0] < 1  # an untrained model changes its mind
    state = torch.full((16,), BLOCKS.mask_token_id)
    state[:5] = torch.tensor(PROMPT[:5])
    (text,) = Denoiser(runner, make_schedule("static")).decode(PROMPT[:5], 11)
    first = runner.predict(Context(), [state])[0].clone()
    first[:, BLOCKS.mask_token_id] = -torch.inf
    assert examples.final[0, 5:].tolist() == (first.argmax(-1)[5:] == torch.tensor(text)).tolist()


def test_training_learns_where_confidence_is_enough() -> None:
    """Toy: rows are final above 0.7 in the first half of a block, above 0.3 in the second."""
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(2000, 8, generator=generator)
    masked = torch.rand(2000, 8, generator=generator) < 0.7
    bound = torch.tensor([0.7] * 4 + [0.3] * 4)
    examples = Examples(confidence, masked, (confidence > bound) & masked)
    made = fit(examples, 300, lr=0.02)
    right, taken = precision(made, examples, 0.5)
    assert right > 0.93
    assert taken > 0.45
    before, _ = precision(Filter.untrained(8), examples, 0.5)
    assert before < 0.7


def test_the_filter_that_ships_knows_more_than_chance() -> None:
    model = DiffusionModel()
    prompts = [model.tokenizer.encode(text, False) for text in ("copy: c f a b ->", "import os\n")]
    examples = watch(model, prompts, 24)
    base = int(examples.final.sum()) / int(examples.masked.sum())
    right, taken = precision(load_filter(), examples, 0.8)
    assert taken > 0.02
    assert right > base + 0.2


def test_bad_values_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="threshold"):
        make_schedule("learn2pd", threshold=1.5)
    with pytest.raises(InvalidArgument, match="truncate"):
        make_schedule("learn2pd", truncate="perhaps")
    with pytest.raises(ModelNotFound, match="makes one"):
        load_filter(str(tmp_path / "none"))
    with pytest.raises(InvalidArgument, match="filter"):
        Filter.untrained(8).logits(torch.zeros(9), torch.ones(9, dtype=torch.bool))
