"""Length controllers on the trainer: they learn, are written whole, and can be read back."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paceline.config import SpeculationConfig
from paceline.errors import InvalidArgument
from paceline.loading import load_engine
from paceline.train.corpus import held_out_modules
from paceline.train.length_heads import (
    KINDS,
    MIX,
    collect,
    collect_rounds,
    expected_runs,
    labels,
    specdecpp_task,
    text_params,
    tokens_per_cost,
    train_length_head,
    weighted_cross_entropy,
)
from paceline.train.trainer import read_checkpoint
from tests.heads import untrained_heads
from tests.modelzoo import make_model


@pytest.mark.slow
def test_heads_learn_and_are_written(zoo: Path, tmp_path: Path) -> None:
    target = make_model("llama_gqa", zoo, num_hidden_layers=1)
    engine = load_engine(target, target)  # in bfloat16 the drafter is sometimes wrong
    prompts = [[10 + i, 20 + i, 30 + i] for i in range(20)]
    result = train_length_head(engine, "all", tmp_path, prompts, num_tokens=40, epochs=3)
    assert result["num_positions"] == 800
    for kind in KINDS:
        with safe_open(tmp_path / f"{kind}.safetensors", "pt") as file:
            assert file.metadata()["kind"] == kind
        state = read_checkpoint(tmp_path / "training" / kind / "checkpoint.pt")
        losses = [-metrics["negative_loss"] for _, metrics in state["history"]["evaluations"]]
        assert result[kind]["validation_loss"] == pytest.approx(min(losses), abs=1e-4)
        assert min(losses) < losses[0]
    train_length_head(engine, "ldlp", tmp_path / "again", prompts, num_tokens=40, epochs=3)
    again = load_file(tmp_path / "again" / "ldlp.safetensors")
    for name, value in load_file(tmp_path / "ldlp.safetensors").items():
        assert torch.equal(again[name], value), name
    with pytest.raises(InvalidArgument, match="specdecpp"):
        train_length_head(engine, "magic", tmp_path, prompts)
    with pytest.raises(InvalidArgument, match="at least 10"):
        train_length_head(engine, "disco", tmp_path, prompts[:5])


# --- labels ---------------------------------------------------------------------------------------


def test_labels_are_chances_of_acceptance() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.6, 0.2, 0.2]])
    q = torch.tensor([[0.2, 0.7, 0.1], [0.1, 0.1, 0.8], [0.2, 0.2, 0.6]])
    random = torch.Generator().manual_seed(0)
    drawn, accepted, overlap = labels(p.log(), q.log(), 1.0, random)
    for row, token in enumerate(drawn.tolist()):
        expected = min(1.0, float(p[row, token] / q[row, token]))
        assert float(accepted[row]) == pytest.approx(expected)
    assert overlap.tolist() == pytest.approx([0.2 + 0.3 + 0.1, 1.0, 0.2 + 0.2 + 0.2])
    many = labels(p[:1].log().expand(4000, 3), q[:1].log().expand(4000, 3), 1.0, random)
    assert float(many[1].mean()) == pytest.approx(0.6, abs=0.03), "the mean over draws"
    drawn, accepted, overlap = labels(p.log(), q.log(), 0.0, random)
    assert drawn.tolist() == [1, 2, 2]
    assert accepted.tolist() == overlap.tolist() == [0.0, 1.0, 0.0]


def test_expected_runs_by_hand() -> None:
    hits = np.array([1.0, 1, 0, 1, 1, 1])
    assert expected_runs(hits, 2).tolist() == [2, 1, 0, 2, 2, -1]
    assert expected_runs(hits, 4).tolist() == [2, 1, 0, -1, -1, -1]
    assert expected_runs(np.array([0.5, 0.5, 0.5]), 2).tolist() == pytest.approx([0.75, 0.75, -1])


def test_the_weighted_loss_by_hand() -> None:
    chance = torch.tensor([0.8, 0.4])
    soft = torch.tensor([0.9, 0.25])
    kept, lost = soft.numpy(), 6.0 * (1 - soft.numpy())
    each = -(kept * np.log(chance.numpy()) + lost * np.log(1 - chance.numpy()))
    loss = weighted_cross_entropy(torch.logit(chance), soft)
    assert float(loss) == pytest.approx(each.sum() / (kept + lost).sum())


def test_specdecpp_learns_on_the_drafters_tokens_in_mixed_texts(zoo: Path) -> None:
    target = make_model("llama_gqa", zoo, num_hidden_layers=1)
    engine = load_engine(target, make_model("llama", zoo, seed=1, num_hidden_layers=1))
    prompts = [[10 + i, 20 + i, 30 + i] for i in range(20)]
    rows = collect(engine, prompts, 40)
    assert 1 - rows.drafted.mean() == pytest.approx(MIX, abs=0.04)
    softly = (rows.accepted > 0) & (rows.accepted < 1)
    greedy = np.repeat([text_params(i, 40, 0).temperature == 0 for i in range(20)], 40)
    assert not softly[greedy].any()
    assert softly[~greedy].mean() > 0.3
    assert set(rows.is_greedy[rows.is_validation == 1].tolist()) == {0, 1}
    sizes = {"kind": "specdecpp"}
    task = specdecpp_task(rows, sizes)
    used = torch.cat([task._training, task._validation]).tolist()
    assert sorted(used) == np.flatnonzero(rows.drafted).tolist()
    again = collect(engine, prompts, 40)
    assert np.array_equal(again.accepted, rows.accepted), "equal seeds, equal labels"


# --- a predictor for each head --------------------------------------------------------------------


@pytest.mark.slow
def test_ldlp_learns_from_the_rounds_of_a_head(zoo: Path, tmp_path: Path) -> None:
    target = make_model("llama_gqa", zoo, num_hidden_layers=2)
    heads = tmp_path / "heads"
    for kind in ("eagle", "hydra"):
        shutil.copytree(untrained_heads(target) / kind, heads / kind)
    engine = load_engine(target, heads=heads)
    prompts = [[10 + i, 20 + i, 30 + i] for i in range(20)]
    rounds = collect_rounds(engine, "eagle", prompts, 24)
    assert 0 <= rounds.accepted.min() <= rounds.accepted.mean() < 20
    assert len(rounds.accepted) == len(rounds.target_hidden) == len(rounds.token_ids)
    train_length_head(engine, "ldlp", heads, prompts, head="eagle", num_tokens=24, epochs=2)
    assert (heads / "eagle" / "ldlp.safetensors").is_file()
    fresh = load_engine(target, heads=heads)
    params = text_params(0, 24, 0)
    ar = fresh.generate(prompts[:2], params, SpeculationConfig(method="ar"))
    config = SpeculationConfig(method="eagle2", length="ldlp")
    found = fresh.generate(prompts[:2], params, config)
    assert [s.output_ids for s in found] == [s.output_ids for s in ar]
    with pytest.raises(InvalidArgument, match=r"hydra/ldlp.*--kind ldlp --head hydra"):
        fresh.generate(prompts[:1], params, SpeculationConfig(method="hydra", length="ldlp"))
    with pytest.raises(InvalidArgument, match="kind: got 'disco'"):
        train_length_head(engine, "disco", heads, prompts, head="eagle")
    with pytest.raises(InvalidArgument, match="head: got 'nose'"):
        train_length_head(engine, "ldlp", heads, prompts, head="nose")


# --- what ships -----------------------------------------------------------------------------------


@pytest.mark.nightly
def test_the_shipped_disco_is_no_worse_than_the_best_fixed_length() -> None:
    """By tokens per cost, where drafting a token costs a tenth of a verification.

    Over all texts that no demo model was trained on: which dozen of them one takes decides by 8 %
    either way, and their texts are those of the running Python.
    """
    engine = load_engine()
    assert engine.tokenizer is not None
    prompts = []
    for _, text in held_out_modules():
        middle = len(text) // 2
        prompts.append(engine.tokenizer.encode(text[middle : middle + 600])[:64])
    fixed = {
        depth: tokens_per_cost(engine, prompts, 64, length="fixed", num_speculative_tokens=depth)
        for depth in (4, 6, 8, 10, 12)
    }
    found = tokens_per_cost(engine, prompts, 64, length="disco")
    longest = tokens_per_cost(engine, prompts, 64, length="disco", stop_threshold=0.0)
    assert found > max(fixed.values()), fixed
    assert found > longest, "it stops, and that pays"
