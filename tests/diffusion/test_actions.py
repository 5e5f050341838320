"""Discrete Diffusion VLA (arXiv 2508.20072): order by difficulty, masking again, toy chunks."""

import argparse
import itertools
import json
import math
import random

import pytest
import torch
from typer.testing import CliRunner

from paceline.cluster.cli import app
from paceline.demo import ACTIONS_DIR
from paceline.diffusion import DiffusionModel, make_schedule
from paceline.diffusion.actions import (
    CELLS,
    CHUNK_TOKENS,
    PROMPT_WORDS,
    WORDS,
    Wipe,
    batch,
    train,
)
from paceline.diffusion.loop import Denoiser
from paceline.diffusion.model import Blocks
from paceline.diffusion.runner import BlockRunner
from paceline.diffusion.schedules import ORDERS, View
from paceline.diffusion.train import start_from_target
from paceline.errors import InvalidArgument


class Source:
    """Knows exactly what each position may be, given all others; masks stand for nothing."""

    context_length = 64

    def __init__(self, items: int) -> None:
        self.items, self.vocab_size = items, items + 1
        self.blocks = Blocks(0, items, items)

    def append(self, context, tokens) -> None:
        context.length += len(tokens)

    def predict(self, context, states):
        return [torch.stack([self.one(s, row) for row in range(len(s))]) for s in states]

    def one(self, state, row):
        raise NotImplementedError


class Modes(Source):
    """Two ways to do the same, equally probable: all positions are 1, or all are 2.

    A position leaves the way that the others go with probability ``away``, so a text that has
    mixed them still has a probability; 0.5: fair coins. The first position is the prompt and tells
    nothing.
    """

    def __init__(self, items: int, away: float = 1e-3) -> None:
        super().__init__(items)
        self.away = away

    def one(self, state, row):
        others = [int(token) for at, token in enumerate(state) if at not in (0, row)]
        odds = (others.count(1) - others.count(2)) * math.log((1 - self.away) / self.away)
        first = 1 / (1 + math.exp(-odds))
        one = first * (1 - self.away) + (1 - first) * self.away
        logits = torch.full((self.vocab_size,), -50.0)
        logits[1], logits[2] = math.log(one), math.log(1 - one)
        return logits


class Chains(Source):
    """Row r is to have item r + 1. Known are the row ``place``, and what a written neighbour tells.

    So the source sees a step far, as a small model does; what is further away is a guess.
    """

    def __init__(self, place: int) -> None:
        super().__init__(8)
        self.place = place

    def one(self, state, row):
        logits = torch.zeros(self.vocab_size)
        if row == self.place:
            logits[row + 1] = 20.0
        for near in {row - 1, row + 1} & set(range(1, len(state))):
            if state[near]:
                logits[(int(state[near]) - 1 + row - near) % self.items + 1] += 20.0
        return logits


def write(source, seed=0, **knobs):
    """A block whose first position is item 1, drawn, and the denoiser that wrote it."""
    schedule = make_schedule("remask", **knobs)
    denoiser = Denoiser(source, schedule, temperature=1.0, seed=seed)
    (text,) = denoiser.decode([1], source.items - 1)
    return [1, *text], denoiser


def cosine(steps: int, rows: int) -> list[int]:
    left = [math.floor(rows * math.cos(math.pi / 2 * t / steps)) for t in range(1, steps)]
    return [*left, 0]


@pytest.mark.parametrize(("steps", "trace"), [(1, [7]), (4, [1, 2, 2, 2]), (7, [1] * 7)])
def test_the_share_of_masks_falls_with_the_cosine(steps: int, trace: list[int]) -> None:
    _, denoiser = write(Modes(8), steps=steps)
    assert denoiser.trace == trace
    if steps == 4:
        assert [7 - sum(trace[: t + 1]) for t in range(4)] == cosine(4, 7)


def test_more_steps_than_positions_commit_one_each() -> None:
    _, denoiser = write(Modes(8), steps=100)
    assert denoiser.trace == [1] * 7


@pytest.mark.timeout(60)  # a schedule that takes back what it commits would go on for ever
@pytest.mark.parametrize("steps", [1, 2, 5, 30])
def test_taking_everything_back_ends_with_the_last_step(steps: int) -> None:
    _, denoiser = write(Modes(8), steps=steps, drop=0.0)
    assert denoiser.counts.forwards <= steps
    assert sum(denoiser.trace) == 7


def test_thresholds_off_take_nothing_back_and_change_nothing() -> None:
    for seed in range(10):
        plain, slow = write(Modes(16), seed, steps=5)
        never, other = write(Modes(16), seed, steps=5, least=0.0, drop=1.0)
        assert never == plain
        assert other.trace == slow.trace


def test_without_masking_again_one_token_a_step_is_the_static_schedule() -> None:
    runner = BlockRunner(start_from_target(2, Blocks(1, 16, 16))[0])
    prompt = list(range(100, 109))
    static, plain = (
        [*Denoiser(runner, schedule, temperature=1.0).decode(prompt, 30)]
        for schedule in (make_schedule("static"), make_schedule("remask", steps=1000))
    )
    assert plain == static


@pytest.mark.parametrize("knobs", [{"least": 0.2}, {"drop": 0.4}])
def test_wrong_commits_are_repaired_in_no_more_forwards(knobs: dict[str, float]) -> None:
    """Positions of one step mix the two ways; from then on the fewer ones are improbable."""
    right, repaired, broken = 0, 0, 0
    for seed in range(40):
        plain, slow = write(Modes(16), seed, steps=3)
        again, fast = write(Modes(16), seed, steps=3, **knobs)
        assert fast.counts.forwards == slow.counts.forwards == 3
        good, better = (len(set(text[1:])) == 1 for text in (plain, again))
        right += good
        repaired += better and not good
        broken += good and not better
    assert 3 <= right <= 18  # the first three agree with probability 1/4, the others follow them
    assert repaired >= 0.9 * (40 - right)
    assert not broken


def test_the_least_probability_rises_with_what_is_committed() -> None:
    """At the beginning a token of probability 0.3 may stay, later on it may not."""
    schedule = make_schedule("remask", least=0.5, steps=8)
    taken = []
    for committed in (1, 3, 5, 7):
        masked = torch.arange(10) >= 2 + committed
        confidence = torch.full((10,), 0.3)
        view = View(
            torch.zeros(10, 4), torch.zeros(10, dtype=torch.long), confidence, masked, masked,
            known=2, step=committed, sureness=torch.ones(10),
        )  # fmt: skip
        taken.append(int(schedule.remask(view).sum()))
        assert not schedule.remask(view)[:2].any()  # the prompt stays
        assert taken[-1] <= schedule.masks_left(view)
        assert int(schedule.choose(view).sum()) == 8 - committed - schedule.masks_left(view)
    assert taken[0] == taken[1] == 0
    assert taken[2] > 0


def test_a_fall_since_the_commit_counts_and_the_level_does_not() -> None:
    schedule = make_schedule("remask", drop=0.4, steps=8)
    masked = torch.arange(6) >= 4
    confidence = torch.tensor([0.1, 0.1, 0.55, 0.35, 0.0, 0.0])
    view = View(
        torch.zeros(6, 4), torch.zeros(6, dtype=torch.long), confidence, masked, masked,
        known=1, sureness=torch.tensor([1.0, 0.3, 0.9, 0.9, 0.0, 0.0]),
    )  # fmt: skip
    assert schedule.remask(view).tolist() == [False, False, False, True, False, False]


def test_what_was_no_surer_when_it_was_committed_has_not_fallen() -> None:
    """Fair coins have probability 0.5 at their commit and ever after."""
    for seed in range(5):
        plain, _ = write(Modes(8, away=0.5), seed, steps=4)
        again, denoiser = write(Modes(8, away=0.5), seed, steps=4, drop=0.1)
        assert again == plain
        assert denoiser.trace == [1, 2, 2, 2]


def test_the_easy_first_order_suits_every_chunk_and_no_fixed_one_does() -> None:
    """At equal steps. The known row is the first, one in the middle or the last."""

    def share(order: str, place: int) -> float:
        right = 0
        for seed in range(12):
            text, denoiser = write(Chains(place), seed, steps=8, order=order)
            assert denoiser.trace == [1] * 7
            right += text == list(range(1, 9))
        return right / 12

    for place in (1, 4, 7):
        assert share("confidence", place) == share("margin", place) == 1
        assert share("random", place) < 0.5
    assert share("left_to_right", 1) == 1
    assert share("left_to_right", 4) < 0.5
    assert share("left_to_right", 7) < 0.5


def test_bad_values_are_named() -> None:
    for knobs in ({"steps": 0}, {"order": "best"}, {"least": 2.0}, {"drop": -0.1}):
        with pytest.raises(InvalidArgument, match=next(iter(knobs))):
            make_schedule("remask", **knobs)
    with pytest.raises(InvalidArgument, match="sub_block_cache"):
        Denoiser(Modes(8), make_schedule("remask", least=0.1), sub_block_cache=True)


# --- the toy -------------------------------------------------------------------------------------


def test_a_chunk_moves_as_its_prompt_says() -> None:
    wipe = Wipe(3, (2, 7), (2, -1))
    assert wipe.prompt == "wipe: in t3 at 2 7 by +2 -1 ->"
    assert wipe.chunk() == [(4, 4), (2, 5), (0, 6), (2, 7), (4, 6), (6, 5), (6, 4), (4, 3)]
    rng = random.Random(0)
    for _ in range(50):
        held_out = rng.random() < 0.5
        one = Wipe.drawn(rng, held_out=held_out)
        assert one.is_held_out == held_out
        cells = one.chunk()
        assert cells[one.step] == one.cells
        for axis, speed in enumerate(one.speeds):
            path = [cell[axis] for cell in cells]
            assert all(0 <= cell < CELLS for cell in path)
            for old, new in itertools.pairwise(path):
                # A step of full length, or one that an edge reflects.
                bounced = min(old + new, 2 * (CELLS - 1) - old - new)
                assert abs(speed) in (abs(new - old), bounced)
        assert one.right_tokens(" ".join(f"{x} {y}" for x, y in cells)) == CHUNK_TOKENS


def test_a_batch_has_prompts_and_chunks() -> None:
    rows = batch(7, 3)
    assert rows.shape == (3, PROMPT_WORDS + CHUNK_TOKENS)
    assert torch.equal(rows, batch(7, 3))
    words = [WORDS[token] for token in rows[0].tolist()]
    assert words[0] == "wipe:"
    assert words[PROMPT_WORDS - 1] == "->"
    assert all(word.isdigit() for word in words[PROMPT_WORDS:])


def test_no_chunk_that_is_held_out_is_trained_on() -> None:
    held_out = {Wipe.drawn(random.Random(seed), held_out=True).prompt for seed in range(300)}
    prompts = {
        " ".join(WORDS[token] for token in row[:PROMPT_WORDS].tolist())
        for step in range(20)
        for row in batch(step, 32)
    }
    assert len(held_out) > 200
    assert not prompts & held_out


@pytest.fixture(scope="module")
def model() -> DiffusionModel:
    return DiffusionModel(ACTIONS_DIR)


def right_tokens(model: DiffusionModel, **knobs) -> list[int]:
    """Of each of 60 chunks that the model that ships has not been trained on."""
    rng, right = random.Random("unseen chunks"), []
    for _ in range(60):
        wipe = Wipe.drawn(rng, held_out=True)
        schedule = make_schedule("remask", **knobs)
        written = model.generate(wipe.prompt, schedule=schedule, max_tokens=CHUNK_TOKENS)
        assert written.counts.forwards == knobs["steps"]
        right.append(wipe.right_tokens(written.text))
    return right


def test_easy_first_beats_fixed_orders_in_as_many_forwards(model: DiffusionModel) -> None:
    """By chunks without an error."""
    right = {
        order: right_tokens(model, steps=4, order=order).count(CHUNK_TOKENS) for order in ORDERS
    }
    others = max(right["left_to_right"], right["random"])
    assert min(right["confidence"], right["margin"]) >= 1.5 * others
    assert right["confidence"] > 2 * right_tokens(model, steps=1).count(CHUNK_TOKENS)


def test_masking_again_repairs_tokens_of_the_model(model: DiffusionModel) -> None:
    """In the order that guesses most, where most is to be repaired."""
    plain = right_tokens(model, steps=8, order="random")
    again = right_tokens(model, steps=8, order="random", least=0.5)
    better = sum(new > old for new, old in zip(again, plain, strict=True))
    worse = sum(new < old for new, old in zip(again, plain, strict=True))
    assert sum(again) > sum(plain)
    assert better >= 1.5 * worse


def test_the_command_writes_a_chunk() -> None:
    wipe = Wipe(3, (2, 7), (2, -1))
    arguments = ["diffuse", wipe.prompt, "--model", str(ACTIONS_DIR), "-n", "16", "--json"]
    arguments += ["--schedule", "remask", "--set", "steps=8", "--set", "least=0.5"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert not shown["lossless"]
    assert (shown["tokens"], shown["forwards"]) == (16, 8)
    assert all(word.isdigit() for word in shown["text"].split())


def test_the_recipe_goes_on_where_it_stopped(tmp_path) -> None:
    for steps in (2, 3):
        args = argparse.Namespace(out=tmp_path, layers=1, width=32, steps=steps, batch=2, lr=0.01)
        train(args)
        assert torch.load(tmp_path / "training.pt", weights_only=True)["step"] == steps
    loaded = DiffusionModel(tmp_path)
    assert loaded.tokenizer.encode("wipe: in t3", False) == [1, 2, WORDS.index("t3")]
