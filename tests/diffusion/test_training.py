"""The parts of a masked model's training that dParallel and Set Block Decoding bring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from paceline.diffusion.loop import Denoiser
from paceline.diffusion.model import Blocks, MaskedModel
from paceline.diffusion.runner import BlockRunner, Context
from paceline.diffusion.schedules import make_schedule
from paceline.diffusion.train import (
    certainty_loss,
    complementary_masks,
    masked_loss,
    packed_states,
)
from tests.masked import masked_model

MASK, VOCAB = 6, 7
PAIR = 4
BLOCKS = Blocks(MASK, 2 * PAIR, 2 * PAIR)
CAUSAL = Blocks(MASK, 4, 2, causal_past=True)


# --- certainty-forcing (dParallel) ---------------------------------------------------------------


def copies(count: int, noise: float, seed: int) -> torch.Tensor:
    """Four tokens and their copy, each copied token another one with probability ``noise``."""
    generator = torch.Generator().manual_seed(seed)
    items = torch.randint(0, MASK, (count, PAIR), generator=generator)
    other = torch.randint(0, MASK, (count, PAIR), generator=generator)
    wrong = torch.rand(count, PAIR, generator=generator) < noise
    return torch.cat([items, torch.where(wrong, other, items)], 1)


def train(model: MaskedModel, steps: int, certainty: float, first: int = 0) -> MaskedModel:
    weights = {name: t.detach().clone().requires_grad_(True) for name, t in model.weights.items()}
    model = MaskedModel(model.config, weights, model.blocks)
    optimizer = torch.optim.Adam(weights.values(), lr=4e-3)
    maskable = torch.arange(2 * PAIR) >= PAIR
    for step in range(first, first + steps):
        tokens = copies(32, 0.25, step)
        generator = torch.Generator().manual_seed(step)
        masks = complementary_masks(maskable.expand(32, -1), 2 * PAIR, generator)
        optimizer.zero_grad()
        masked_loss(model, tokens, masks, certainty=certainty).backward()
        optimizer.step()
    for tensor in weights.values():
        tensor.requires_grad_(False)
    return model


def judged(model: MaskedModel) -> tuple[float, float, float]:
    """Of clean copies: right tokens, entropy of the right ones, forwards of a copy."""
    runner, rows = BlockRunner(model), copies(12, 0.0, 10_000)
    right, entropy, forwards = 0, [], 0
    for row in rows:
        state = torch.cat([row[:PAIR], torch.full((PAIR,), MASK)])
        logits = runner.predict(Context(), [state])[0][PAIR:, :MASK]
        hits = logits.argmax(-1) == row[PAIR:]
        entropy += torch.special.entr(logits.softmax(-1)).sum(-1)[hits].tolist()
        denoiser = Denoiser(runner, make_schedule("dparallel", entropy=0.8))
        (text,) = denoiser.decode(row[:PAIR].tolist(), PAIR)
        right += sum(a == b for a, b in zip(text, row[PAIR:].tolist(), strict=True))
        forwards += denoiser.counts.forwards
    return right / rows[:, PAIR:].numel(), sum(entropy) / len(entropy), forwards / len(rows)


@pytest.mark.slow
def test_certainty_forcing_lowers_the_entropy_of_right_tokens_and_the_steps() -> None:
    """A quarter of the copied tokens is random: what is learned from them alone stays unsure."""
    start = train(masked_model(VOCAB, BLOCKS, seed=1), 100, 0.0)
    plain, forced = (train(start, 50, weight, first=100) for weight in (0.0, 1.0))
    right, entropy, steps = judged(plain)
    sure_right, sure_entropy, sure_steps = judged(forced)
    assert right > 0.9
    assert sure_right >= right - 0.02
    assert sure_entropy < 0.85 * entropy
    assert sure_steps < 0.75 * steps


def test_certainty_counts_right_tokens_only_at_half_the_temperature() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    targets = torch.tensor([0, 2, 1])
    p = (logits[0] / 0.5).softmax(-1)
    expected = -(p * p.log()).sum()
    torch.testing.assert_close(certainty_loss(logits, targets), expected)
    assert certainty_loss(logits[1:2], targets[1:2]) == 0


def test_without_options_the_loss_is_the_cross_entropy() -> None:
    model = masked_model(VOCAB, BLOCKS)
    tokens = copies(4, 0.0, 0)
    masks = complementary_masks(torch.ones_like(tokens) > 0, 8, torch.Generator().manual_seed(0))
    _, noisy = packed_states(model, tokens, masks)
    logits = model.logits(noisy)[masks[:, :, 1:]]
    targets = tokens[:, 1:].expand(2, -1, -1)[masks[:, :, 1:]]
    torch.testing.assert_close(masked_loss(model, tokens, masks), F.cross_entropy(logits, targets))
    more = masked_loss(model, tokens, masks, certainty=2.0)
    expected = F.cross_entropy(logits, targets) + 2 * certainty_loss(logits, targets)
    torch.testing.assert_close(more, expected)


# --- next-token and masked prediction together (Set Block Decoding) ------------------------------


@pytest.fixture(scope="module")
def causal() -> MaskedModel:
    return masked_model(VOCAB, CAUSAL)


def causal_states(model: MaskedModel, tokens: torch.Tensor) -> torch.Tensor:
    """As a model that predicts the next token computes them."""
    length = tokens.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    return model.forward(tokens, torch.arange(length), mask)[0]


def test_next_token_logits_do_not_see_the_masked_blocks(causal: MaskedModel) -> None:
    tokens = torch.randint(0, MASK, (2, 16), generator=torch.Generator().manual_seed(0))
    everything = torch.ones_like(tokens, dtype=torch.bool)
    masks = complementary_masks(everything, 4, torch.Generator().manual_seed(1))
    other = complementary_masks(everything, 4, torch.Generator().manual_seed(2))
    clean, noisy = packed_states(causal, tokens, masks)
    again, others = packed_states(causal, tokens, other)
    assert torch.equal(clean, again)  # bit for bit, whatever is masked beside it
    assert not torch.equal(noisy, others)
    torch.testing.assert_close(clean, causal_states(causal, tokens)[:, :-1], atol=1e-4, rtol=1e-4)


def test_a_masked_block_sees_itself_in_both_directions(causal: MaskedModel) -> None:
    tokens = torch.randint(0, MASK, (1, 16), generator=torch.Generator().manual_seed(0))
    masks = torch.zeros(2, 1, 16, dtype=torch.bool)
    masks[:, :, 8] = True
    changed = tokens.clone()
    changed[0, 11] = (changed[0, 11] + 1) % MASK  # behind the masked token, in its block
    first, second = (packed_states(causal, ids, masks)[1] for ids in (tokens, changed))
    assert not torch.allclose(first[0, 0, 8], second[0, 0, 8])
    assert torch.equal(first[0, 0, :7], second[0, 0, :7])


def test_a_committed_block_leaves_the_entries_of_a_causal_model(causal: MaskedModel) -> None:
    """However a block was written, its keys and values are those of the text alone."""
    runner, prompt = BlockRunner(causal), [1, 2, 3, 4, 5]
    denoiser = Denoiser(runner, make_schedule("set_block", bound=1.0))
    text = [*prompt, *(t for block in denoiser.decode(prompt, 11) for t in block)]
    context = Context()
    for start in range(0, 16, 4):
        runner.append(context, text[start : start + 4])
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    states, entries = causal.forward(torch.tensor([text]), torch.arange(16), mask)
    assert context.entries is not None
    for cached, whole in zip(context.entries, entries, strict=True):
        for one, other in zip(cached, whole, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert context.carry is not None  # what comes next, as the next-token loss trains it
    torch.testing.assert_close(context.carry, causal.logits(states[0, -1]), atol=1e-3, rtol=1e-3)


def test_with_bound_0_a_forward_writes_one_token(causal: MaskedModel) -> None:
    denoiser = Denoiser(BlockRunner(causal), make_schedule("set_block", bound=0.0))
    assert len([t for block in denoiser.decode([1], 11) for t in block]) == 11
    assert set(denoiser.trace) == {1}


def test_the_next_token_loss_is_that_of_the_clean_text(causal: MaskedModel) -> None:
    tokens = torch.randint(0, MASK, (3, 12), generator=torch.Generator().manual_seed(3))
    maskable = torch.arange(12) >= 5
    generator = torch.Generator().manual_seed(0)
    masks = complementary_masks(maskable.expand(3, -1), 4, generator)
    plain = masked_loss(causal, tokens, masks)
    joint = masked_loss(causal, tokens, masks, next_token=0.5)
    logits = causal.logits(causal_states(causal, tokens))[:, 4:-1]
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 5:].flatten())
    torch.testing.assert_close(joint - plain, 0.5 * expected, atol=1e-4, rtol=1e-4)


def test_the_folder_says_that_the_past_is_causal(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"mask_token_id": 6, "block_size": 4, "sub_block_size": 2, "causal_past": true}'
    )
    assert Blocks.from_folder(tmp_path) == CAUSAL
    assert replace(CAUSAL, causal_past=False).past_mask(4).all()
