"""Length controllers on the trainer: they learn, are written whole, and can be read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paceline.errors import InvalidArgument
from paceline.loading import load_engine
from paceline.train.length_heads import KINDS, train_length_head
from paceline.train.trainer import read_checkpoint
from tests.modelzoo import make_model


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
