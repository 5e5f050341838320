"""The masked model, the denoise loop and its schedules, against what their papers say of them."""

import math
import random

import pytest
import torch

from paceline.demo import TARGET_DIR
from paceline.diffusion.loop import Denoiser
from paceline.diffusion.model import Blocks, MaskedModel, block_causal
from paceline.diffusion.runner import BlockRunner, Context
from paceline.diffusion.schedules import SCHEDULES, SchED, View, make_schedule
from paceline.diffusion.tasks import ITEMS, TASKS, example, shuffle_accuracy
from paceline.diffusion.train import complementary_masks, masked_loss, start_from_target
from paceline.errors import InvalidArgument, ModelNotFound

BLOCKS = Blocks(mask_token_id=1, block_size=16, sub_block_size=8)
PROMPT = list(range(100, 121))
TOKENS = 40


@pytest.fixture(scope="module")
def model() -> MaskedModel:
    """Two layers of the demo's target: not trained for this, so its predictions change often."""
    return start_from_target(2, BLOCKS)[0]


@pytest.fixture(scope="module")
def runner(model: MaskedModel) -> BlockRunner:
    return BlockRunner(model)


def write(runner, name: str, *, temperature: float = 0.0, seed: int = 0, **knobs):
    denoiser = Denoiser(runner, make_schedule(name, **knobs), frozenset([0]), temperature, seed)
    return [t for block in denoiser.decode(PROMPT, TOKENS) for t in block], denoiser


# --- Fast-dLLM v2 (13.7) -------------------------------------------------------------------------


def test_no_position_sees_a_later_block(model: MaskedModel) -> None:
    tokens = torch.randint(2, 4000, (1, 48), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 32:] += 1
    mask, positions = block_causal(48, 16), torch.arange(48)
    first, second = (model.forward(row, positions, mask)[0][0] for row in (tokens, changed))
    assert torch.equal(first[:32], second[:32])
    assert not torch.allclose(first[32:], second[32:])
    changed = tokens.clone()
    changed[0, 31] += 1  # the end of a block is seen by its beginning
    assert not torch.allclose(first[16], model.forward(changed, positions, mask)[0][0, 16])


def test_cached_blocks_give_the_logits_of_the_whole(model: MaskedModel, runner) -> None:
    tokens = list(range(200, 248))
    states, _ = model.forward(torch.tensor([tokens]), torch.arange(48), block_causal(48, 16))
    whole = model.logits(states[0])
    context = Context()
    runner.append(context, tokens[:16])
    runner.append(context, tokens[16:32])
    (cached,) = runner.predict(context, [torch.tensor(tokens[32:])])
    torch.testing.assert_close(cached, whole[31:47], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("start", [0, 8])
def test_a_fresh_sub_block_cache_changes_nothing(runner, start: int) -> None:
    context, state = Context(), torch.arange(300, 316)
    runner.append(context, PROMPT[:16])
    (whole,) = runner.predict(context, [state])
    part = runner.predict_sub_block(context, state, start, start + 8)
    torch.testing.assert_close(part, whole[start : start + 8], atol=1e-3, rtol=1e-4)


def test_complementary_masks_cover_each_token_once() -> None:
    maskable = torch.rand(8, 64) < 0.7
    masks = complementary_masks(maskable, 16, torch.Generator().manual_seed(0))
    assert torch.equal(masks.sum(0), maskable.long())
    assert masks.any(-1).all()


def test_the_loss_is_that_of_decoding(model: MaskedModel, runner) -> None:
    """The packed forward of training predicts what the cached forwards of decoding do."""
    tokens = torch.arange(400, 432)[None]
    masks = torch.zeros(2, 1, 32, dtype=torch.bool)
    masks[0, 0, 16:24], masks[1, 0, 24:] = True, True
    context = Context()
    runner.append(context, tokens[0, :16].tolist())
    losses = []
    for mask in masks[:, 0, 16:]:
        state = tokens[0, 16:].masked_fill(mask, 1)
        (logits,) = runner.predict(context, [state])
        losses.append(torch.nn.functional.cross_entropy(logits[mask], tokens[0, 16:][mask]))
    assert masked_loss(model, tokens, masks).item() == pytest.approx(
        torch.stack(losses).mean().item(), rel=1e-4
    )


# --- static and FreeDave (13.1) ------------------------------------------------------------------


@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_freedave_writes_the_static_text_in_fewer_forwards(runner, per_step, temperature) -> None:
    saved = 0
    for seed in range(1):
        options = {"tokens_per_step": per_step, "temperature": temperature, "seed": seed}
        static, slow = write(runner, "static", **options)
        for drafts in (1, 4, 8):
            text, fast = write(runner, "freedave", draft_steps=drafts, **options)
            assert text == static
            assert fast.counts.forwards <= slow.counts.forwards
            if drafts == 1:
                assert fast.trace == slow.trace
            saved += slow.counts.forwards - fast.counts.forwards
    assert saved > 0


def test_the_static_schedule_commits_the_same_number_each_step(runner) -> None:
    text, denoiser = write(runner, "static", tokens_per_step=2)
    assert len(text) == TOKENS
    assert set(denoiser.trace) <= {1, 2}
    assert denoiser.counts.tokens_per_forward == TOKENS / denoiser.counts.forwards


# --- schedules that leave the static text --------------------------------------------------------

LIMITS = {
    "confidence": {"threshold": 1.0},
    "prophet": {"early": math.inf, "middle": math.inf, "late": math.inf},
    "sched": {"tau_high": math.inf},
    "dparallel": {"entropy": 0.0},
    "learn2pd": {"threshold": 1.0, "truncate": False},
}
EAGER = {
    "confidence": {"threshold": 0.0},
    "prophet": {"early": -math.inf, "middle": -math.inf, "late": -math.inf},
    "sched": {"tau_high": 0.0},
    "dparallel": {"entropy": math.inf},
    "set_block": {"bound": math.inf},
    "learn2pd": {"threshold": 0.0},
    "apd": {"weight": 1.0, "window": 16},
}


@pytest.mark.parametrize("name", LIMITS)
def test_at_its_limit_a_schedule_is_static(runner, name: str) -> None:
    text, denoiser = write(runner, name, **LIMITS[name])
    static, slow = write(runner, "static")
    assert text == static
    assert denoiser.trace == slow.trace


@pytest.mark.parametrize("name", EAGER)
def test_at_its_other_limit_a_schedule_takes_all_at_once(runner, name: str) -> None:
    """All of a block for those that exit (13.3, 13.4), all of a sub-block for the others."""
    _, denoiser = write(runner, name, **EAGER[name])
    rows = 16 if name in ("prophet", "sched", "learn2pd", "apd") else 8
    assert denoiser.trace[-3:] == ([11, 16, 13] if rows == 16 else [8, 8, 5])


def test_set_block_with_bound_0_takes_one_token(runner) -> None:
    _, denoiser = write(runner, "set_block", bound=0.0)
    assert set(denoiser.trace) == {1}


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "static"])
def test_no_schedule_needs_more_forwards_than_static(runner, name: str) -> None:
    assert write(runner, name)[1].counts.forwards <= write(runner, "static")[1].counts.forwards


def test_the_entropy_bound_is_kept() -> None:
    torch.manual_seed(0)
    logits = 4 * torch.randn(8, 50)
    yes = torch.ones(8, dtype=torch.bool)
    view = View(logits, logits.argmax(-1), logits.softmax(-1).amax(-1), yes, yes)
    for bound in (0.1, 1.0, 4.0):
        chosen = make_schedule("set_block", bound=bound).choose(view)
        taken = view.entropy()[chosen].sort().values
        assert taken[:-1].sum() <= bound + 1e-5
        left = view.entropy()[~chosen]
        assert not len(left) or taken.sum() > bound


@pytest.mark.parametrize("shape", ["linear", "cosine", "exp"])
def test_tau_of_sched_falls(shape: str) -> None:
    for rate in (2.0, 4.0, 8.0, 16.0):
        schedule = SchED(tau_high=7.5, tau_low=2.5, shape=shape, rate=rate)
        taus = [schedule.tau(step / 20) for step in range(21)]
        assert taus[0] == 7.5
        assert taus == sorted(taus, reverse=True)
        assert taus[-1] >= 2.5


def test_a_smaller_tau_never_exits_later(runner) -> None:
    forwards = [write(runner, "sched", tau_high=tau)[1].counts.forwards for tau in (8, 4, 2, 1, 0)]
    assert forwards == sorted(forwards, reverse=True)
    assert forwards[-1] < forwards[0]


# --- ParallelBench (13.11) -----------------------------------------------------------------------


class IdealShuffler:
    """Knows the task's marginals exactly: each item that no committed token has, equally."""

    blocks, vocab_size, context_length = Blocks(0, 8, 8), 5, 64

    def __init__(self, copies: bool) -> None:
        self.copies = copies

    def append(self, context, tokens) -> None:
        context.length += len(tokens)

    def predict(self, context, states):
        return [self._one(state) for state in states]

    def _one(self, state):
        logits = torch.full((len(state), 5), -50.0)
        left = [item for item in range(1, 5) if item not in state[1:].tolist()]
        logits[:, left] = 0.0
        if self.copies:
            logits = torch.full((len(state), 5), -50.0)
            logits[range(1, len(state)), range(1, len(state))] = 0.0
        return logits


@pytest.mark.parametrize("per_step", [1, 2, 4])
def test_shuffle_falls_with_tokens_a_forward_as_computed_and_copy_does_not(per_step: int) -> None:
    def accuracy(copies: bool, runs: int) -> float:
        right = 0
        for seed in range(runs):
            schedule = make_schedule("static", tokens_per_step=per_step)
            denoiser = Denoiser(IdealShuffler(copies), schedule, temperature=1.0, seed=seed)
            (items,) = denoiser.decode([4], 4)
            right += items == [1, 2, 3, 4] if copies else sorted(items) == [1, 2, 3, 4]
        return right / runs

    expected, runs = shuffle_accuracy(4, per_step), 400
    error = math.sqrt(expected * (1 - expected) / runs)
    assert accuracy(copies=True, runs=20) == 1
    assert accuracy(copies=False, runs=runs) == pytest.approx(expected, abs=4 * error + 1e-9)


def test_closed_form_of_shuffle() -> None:
    assert shuffle_accuracy(4, 1) == 1
    assert shuffle_accuracy(4, 4) == math.factorial(4) / 4**4
    assert shuffle_accuracy(4, 2) == (3 / 4) * (1 / 2)


@pytest.mark.parametrize("task", TASKS)
def test_examples_know_right_answers(task: str) -> None:
    rng = random.Random(0)
    for _ in range(20):
        one = example(task, rng)
        assert one.is_right(one.answer)
        assert not one.is_right(one.answer + " a")
        assert set(one.answer.split()) <= set(ITEMS)


# --- bad input -----------------------------------------------------------------------------------


def test_bad_values_are_named(runner) -> None:
    with pytest.raises(InvalidArgument, match="schedule"):
        make_schedule("fast")
    with pytest.raises(InvalidArgument, match="threshold"):
        make_schedule("confidence", threshold=2)
    with pytest.raises(InvalidArgument, match="draft_steps"):
        make_schedule("freedave", draft_steps="many")
    with pytest.raises(InvalidArgument, match="knob"):
        make_schedule("static", threshold=0.5)
    with pytest.raises(InvalidArgument, match="sub_block_size"):
        Blocks(1, 32, 7)
    with pytest.raises(InvalidArgument, match="sub_block_cache"):
        Denoiser(runner, make_schedule("freedave"), sub_block_cache=True)
    with pytest.raises(InvalidArgument, match="max_tokens"):
        list(Denoiser(runner, make_schedule("static")).decode([5], 5000))
    with pytest.raises(ModelNotFound, match="mask_token_id"):
        MaskedModel.load(TARGET_DIR)
