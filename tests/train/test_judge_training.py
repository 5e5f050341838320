"""The judge's labels are what the target loses by a replacement, and its head learns them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.errors import InvalidArgument
from paceline.loading import load_engine
from paceline.models.base import Segment
from paceline.models.llama import LlamaRunner
from paceline.train import judge
from paceline.train.judge import (
    LOOK,
    collect_replacements,
    train_judge,
    try_replacements,
)
from paceline.types import Need
from tests.modelzoo import make_model


def test_a_label_is_what_the_text_loses(zoo: Path) -> None:
    """The one forward with all replacements gives what reading each changed text gives."""
    runner = LlamaRunner(make_model("llama_gqa", zoo, num_hidden_layers=2))
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 250, 40)
    places, tokens = np.array([7, 12, 31]), np.array([3, int(ids[12]), 200])
    losses, hidden = try_replacements(runner, ids, places, tokens)

    def read(text: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        sequence = runner.new_sequence()
        result = runner.forward([Segment(sequence, text)], frozenset({Need.HIDDEN_STATES}))
        runner.free(sequence)
        return result.logits.log_softmax(-1), result.extras[Need.HIDDEN_STATES]

    own, _ = read(ids)
    for place, token, loss, state in zip(places, tokens, losses, hidden, strict=True):
        changed = ids.copy()
        changed[place] = token
        likelihood, states = read(changed)
        rows = range(place, place + LOOK)
        expected = np.mean([float(own[i, ids[i + 1]] - likelihood[i, ids[i + 1]]) for i in rows])
        assert loss == pytest.approx(expected, abs=1e-5)
        assert torch.allclose(state, states[place], atol=1e-5)
    assert losses[1] == pytest.approx(0.0, abs=1e-6), "its own token loses nothing"
    assert abs(losses[0]) > 1e-3
    assert runner.num_free == runner.kv_capacity


def test_the_judge_learns_and_is_written(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_model("llama_gqa", zoo, num_hidden_layers=1)
    engine = load_engine(target, make_model("llama", zoo, seed=1, num_hidden_layers=1))
    prompts = [[10 + i, 20 + i, 30 + i] for i in range(20)]
    rows = collect_replacements(engine, prompts, 24)
    assert len(rows.loss) == len(rows.target_hidden) == len(rows.token_ids) > 200
    # A random model's states say nothing of what it will lose: give them labels that they know.
    known = replace(
        rows, loss=judge.MARGIN + 9 * rows.target_hidden[:, 0].numpy().astype(np.float32)
    )
    monkeypatch.setattr(judge, "collect_replacements", lambda *arguments: known)
    result = train_judge(engine, tmp_path, prompts, num_tokens=24, epochs=60)
    assert result["num_replacements"] == len(rows.loss)
    assert result["accepted_of_right"] > 0.6 > 0.3 > result["accepted_of_wrong"]
    saved = load_file(tmp_path / "judge.safetensors")
    scores = (rows.target_hidden @ saved["weight"].float() + saved["bias"].float()).numpy()
    right = known.accepted == 1
    unseen = right & (rows.is_validation == 1)
    assert (scores > 0)[unseen].mean() == pytest.approx(result["accepted_of_right"], abs=0.02)
    assert 0.2 < right.mean() < 0.8
    assert np.corrcoef(scores, known.loss)[0, 1] < -0.6, "as written, for states as they are"
    with pytest.raises(InvalidArgument, match="at least 10"):
        train_judge(engine, tmp_path, prompts[:5])
