"""BlockFFN: a forward reads the experts that its tokens use, and training makes them few."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.experts import of_chunks, of_verifications
from paceline.config import SpeculationConfig
from paceline.demo import BLOCK_FFN_DIR
from paceline.engine import Engine
from paceline.loading import load_engine, load_runner
from paceline.models.block_ffn import BlockFfn, BlockFfnConfig, routed, share_used
from paceline.models.transformers import TransformersRunner
from paceline.sampling import SamplingParams
from paceline.train import block_ffn
from paceline.train.block_ffn import (
    CHUNK,
    STEEPNESS,
    Weights,
    chunk_loss,
    locality_loss,
    new_model,
    training_loss,
)
from paceline.train.corpus import held_out_modules

NUM_EXPERTS, SIZE = 10, 24
METHODS = ("prompt_lookup", "suffix_decoding_tree", "token_recycling", "lookahead")


@pytest.fixture
def layer() -> BlockFfn:
    torch.manual_seed(0)
    config = BlockFfnConfig(
        hidden_size=SIZE, num_attention_heads=1, num_experts=NUM_EXPERTS, expert_size=5
    )
    made = BlockFfn(config).requires_grad_(False)
    made.up.mul_(20.0)
    made.down.mul_(20.0)
    made.router_norm.weight.add_(0.5 * torch.randn(NUM_EXPERTS))
    return made


# --- the layer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 7, 40])
def test_the_used_experts_alone_give_what_all_would(rows: int, layer: BlockFfn) -> None:
    x = torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(rows))
    with torch.enable_grad():
        of_all = layer(x)
    with torch.no_grad():
        of_used = layer(x)
    torch.testing.assert_close(of_used, of_all, atol=1e-5, rtol=1e-5)
    assert of_all.abs().max() > 0.1


@pytest.mark.parametrize("rows", [1, 3])
def test_nothing_else_is_read(rows: int, layer: BlockFfn) -> None:
    """Experts that no row uses are made of NaN, which no product survives."""
    x = torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(5))
    used = (layer.router(x) > 0).any(0)
    assert 0 < int(used.sum()) < NUM_EXPERTS
    with torch.no_grad():
        expected = layer(x)
        layer.up[~used] = layer.down[~used] = math.nan
        assert torch.equal(layer(x), expected)
        layer.up[int(used.nonzero()[0])] = math.nan
        assert layer(x).isnan().any()


def test_gates_are_the_papers(layer: BlockFfn) -> None:
    """ReLU, then RMSNorm over all experts, each times its SiLU MLP."""
    x = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    scores = np.maximum((layer.router.weight @ x).double().numpy(), 0.0)
    gates = scores / np.sqrt((scores**2).mean() + 1e-6) * layer.router_norm.weight.numpy()
    expected = np.zeros(SIZE)
    for gate, up, down in zip(gates, layer.up.double(), layer.down.double(), strict=True):
        hidden = up.numpy() @ x.double().numpy()
        expected += gate * (hidden / (1 + np.exp(-hidden))) @ down.numpy()
    with torch.no_grad():
        np.testing.assert_allclose(layer(x[None])[0].numpy(), expected, atol=1e-4)


def test_shares_of_chunks() -> None:
    scores = torch.full((1, 5, 4), -1.0)
    scores[0, [0, 1, 2, 3, 4], [0, 0, 1, 2, 3]] = 1.0
    assert share_used(scores, 1) == pytest.approx(1 / 4)
    assert share_used(scores, 2) == pytest.approx((1 / 4 + 2 / 4) / 2)  # the last token is left out
    assert share_used(scores, 4) == pytest.approx(3 / 4)


# --- the losses ----------------------------------------------------------------------------------


def test_the_losses_are_the_papers() -> None:
    torch.manual_seed(2)
    scores = 0.05 * torch.randn(2, 2 * CHUNK, NUM_EXPERTS)
    values = scores.double().numpy()
    total, count = 0.0, 0
    for row in values:
        for before, after in pairwise(row):
            p, y = (1 / (1 + np.exp(-STEEPNESS * each)) for each in (before, after))
            total += float(-(y * np.log(p) + (1 - y) * np.log1p(-p)).sum())
            count += NUM_EXPERTS
    assert float(locality_loss(scores)) == pytest.approx(total / count, rel=1e-3)
    chances = []
    for row in values:
        for chunk in row.reshape(2, CHUNK, NUM_EXPERTS):
            active = np.maximum(chunk, 0)
            unused = 1 - active / (active.sum(-1, keepdims=True) + 1e-5)
            chances.append(1 - unused.prod(0))
    assert float(chunk_loss(scores)) == pytest.approx(float(np.mean(chances)), rel=1e-4)


def test_what_the_losses_want() -> None:
    """The first one likes neighbours that agree; the second one chunks that share experts."""
    same = torch.full((1, CHUNK, NUM_EXPERTS), -1.0)
    same[..., :2] = 1.0
    apart = torch.full((1, CHUNK, NUM_EXPERTS), -1.0)
    for token in range(CHUNK):
        apart[0, token, [token % NUM_EXPERTS, (token + 1) % NUM_EXPERTS]] = 1.0
    assert float(locality_loss(same)) < 0.01 < float(locality_loss(apart))
    assert float(chunk_loss(same)) < 0.5 * float(chunk_loss(apart))


@dataclass(frozen=True, slots=True)
class Used:
    """Shares of experts that tokens and chunks use; ``alone``: chunks whose tokens chose alone."""

    tokens: float
    chunks: float
    alone: float


@cache
def used_after_training(locality: float, chunk: float) -> Used:
    """A few steps on texts whose topics, of eight tokens each, last for 32 tokens."""
    torch.manual_seed(0)
    model = new_model(64).train()
    generator = torch.Generator().manual_seed(1)
    topics = torch.randint(8, (16, 3), generator=generator).repeat_interleave(32, 1)[:, :65]
    text = 8 * topics + torch.randint(8, topics.shape, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for _ in range(40):
        loss, _ = training_loss(model, text, Weights(locality, chunk))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), routed(model.eval()) as scores:
        model(text[:, :-1])
    every = torch.stack(scores)
    often = (every > 0).float().mean((1, 2))
    alone = float((1 - (1 - often) ** CHUNK).mean())
    return Used(share_used(every, 1), share_used(every, CHUNK), alone)


@pytest.mark.slow
def test_chunk_sparsification_makes_the_union_of_a_chunk_small() -> None:
    plain, trained = used_after_training(0.0, 0.0), used_after_training(0.0, 2.0)
    assert trained.tokens < 0.8 * plain.tokens
    assert trained.chunks < 0.8 * plain.chunks
    assert trained.chunks < 0.8 * trained.alone


@pytest.mark.slow
def test_activation_locality_lets_neighbours_use_the_same_experts() -> None:
    """Tokens use as many as without it, and a chunk hardly more than a token."""
    plain, trained = used_after_training(0.0, 0.0), used_after_training(0.04, 0.0)
    assert trained.tokens > 0.9 * plain.tokens
    assert trained.chunks < 1.25 * trained.tokens
    assert plain.chunks > 1.5 * plain.tokens


# --- the shipped model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(BLOCK_FFN_DIR)


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    assert engine.tokenizer is not None
    return [engine.tokenizer.encode(text[:2000])[:64] for _, text in held_out_modules()[:6]]


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_no_token(
    method: str, temperature: float, engine: Engine, prompts: list[list[int]]
) -> None:
    runner = engine.local_target.runner
    assert isinstance(runner, TransformersRunner)
    assert runner.strategy == "packed"
    params = SamplingParams(max_tokens=32, ignore_eos=True, temperature=temperature, seed=4)
    plain = engine.generate(prompts, params, SpeculationConfig(method="ar"))
    drafted = engine.generate(prompts, params, SpeculationConfig(method=method, length="fixed"))
    assert [s.output_ids for s in drafted] == [s.output_ids for s in plain]
    assert sum(s.stats.num_accepted for s in drafted) > 0


def test_a_chunk_uses_far_fewer_experts_than_its_tokens_would(
    engine: Engine, prompts: list[list[int]]
) -> None:
    """On held-out text: three of four experts rest at a token, and half of them at eight tokens."""
    used = {int(row["chunk"]): row["used"] for row in of_chunks(engine, prompts)}
    assert list(used.values()) == sorted(used.values())
    assert used[1] < 0.25
    assert used[8] < 0.52
    # Eight tokens of the same sparsity, each with any experts:
    assert used[8] < 0.6 * (1 - (1 - used[1]) ** 8)


def test_a_verification_reads_the_union_of_its_tokens(
    engine: Engine, prompts: list[list[int]]
) -> None:
    config = SpeculationConfig(method="prompt_lookup", length="fixed", num_speculative_tokens=7)
    found = of_verifications(engine, prompts, 32, config)
    plain = of_verifications(engine, prompts, 32, SpeculationConfig(method="ar"))
    assert plain["tokens"] == 1.0
    assert plain["used"] == pytest.approx(plain["of_a_token"])
    assert found["tokens"] > 3.0
    assert found["of_a_token"] < found["used"] < 0.7 * found["tokens"] * found["of_a_token"]


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    from paceline.errors import InvalidArgument, ModelNotFound

    new_model(64).save_pretrained(tmp_path)
    assert isinstance(load_runner(tmp_path, device="cpu"), TransformersRunner)
    with pytest.raises(InvalidArgument, match="model_type"):
        load_runner(tmp_path, device="cpu", general=False)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"expert_size": 12', '"expert_size": 13'))
    with pytest.raises(ModelNotFound, match=r"mlp\.down"):
        load_runner(tmp_path, device="cpu")


def test_the_recipe_writes_a_model_that_loads_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_ffn, "TOKENIZER_TEXTS", 4)
    block_ffn.train(tmp_path, 2, batch=2)
    tokens: Any = load_engine(tmp_path / "model").tokenizer
    assert tokens.decode(tokens.encode("def f(x):")) == "def f(x):"
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    block_ffn.train(tmp_path, 2, batch=2)
    assert "resumed at step 2" in capsys.readouterr().out
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights
