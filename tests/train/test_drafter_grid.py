"""The grid of drafters: what they share with the target, how they are measured, resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.errors import InvalidArgument
from paceline.loading import load_engine
from paceline.train import drafter_grid
from paceline.train.checkpoints import load_model
from paceline.train.data import TrainingText
from paceline.train.drafter_grid import SHARED, DraftMeter, new_drafter, num_trained, train_grid
from paceline.train.drafter_law import DrafterPoint, DrafterSize
from tests.train.conftest import LENGTH

SIZES = [DrafterSize(1, 16), DrafterSize(2, 48)]
TOKENS = [4 * LENGTH * 2, 4 * LENGTH * 5]


def test_a_drafter_is_the_targets_but_for_its_layers(random_target: Path) -> None:
    target = load_model(random_target)
    drafter = new_drafter(target, DrafterSize(2, 48))
    assert torch.equal(drafter.model.embed_tokens.weight, target.model.embed_tokens.weight)
    assert torch.equal(drafter.model.norm.weight, target.model.norm.weight)
    assert len(drafter.model.layers) == 2
    assert drafter.model.layers[0].mlp.up_proj.weight.shape == (48, 32)
    own = drafter.model.layers[0].mlp.up_proj.weight
    assert not torch.equal(own[:16], target.model.layers[0].mlp.up_proj.weight[:16])
    assert num_trained(drafter) == sum(p.numel() for p in drafter.model.layers.parameters())


def test_drafters_are_measured_on_what_the_target_writes(
    random_target: Path, text: TrainingText
) -> None:
    """Greedy rows for the agreement, sampled ones for the acceptance; the prompt does not count."""
    target = load_model(random_target)
    meter = DraftMeter(target, text.held_out[:4])
    prompt = meter.prompt
    drafter = new_drafter(target, DrafterSize(1, 16))
    with torch.no_grad():
        for row in range(0, 4, 2):
            logits = target(meter.text[row : row + 1]).logits[0, prompt - 1 : -1]
            assert torch.equal(logits.argmax(-1), meter.text[row, prompt:])
        assert torch.equal(meter.text[:, :prompt], text.held_out[:4, :prompt])
        p = drafter(meter.text[:, :-1]).logits[:, prompt - 1 :].softmax(-1)
        q = target(meter.text[:, :-1]).logits[:, prompt - 1 :].softmax(-1)
    found = meter.measure(drafter)
    accepted = torch.minimum(p, q).sum(-1)[1::2].mean()
    agreed = (p.argmax(-1) == q.argmax(-1))[::2].double().mean()
    assert found["acceptance"] == pytest.approx(float(accepted), rel=1e-4)
    assert found["agreement"] == pytest.approx(float(agreed))
    assert meter.measure(target) == {"acceptance": pytest.approx(1.0), "agreement": 1.0}


@pytest.mark.slow
def test_an_interrupted_grid_goes_on(
    random_target: Path, text: TrainingText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, trained = random_target, list[DrafterPoint]()

    def stop_at_three(point: DrafterPoint) -> None:
        trained.append(point)
        if len(trained) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_grid(target, text, SIZES, TOKENS, tmp_path, on_point=stop_at_three)
    found = train_grid(target, text, SIZES, TOKENS, tmp_path, on_point=trained.append)
    assert [(p.size, p.tokens) for p in found.points] == [(s, t) for t in TOKENS for s in SIZES]
    assert list(found.points) == trained and len(trained) == 4
    # What is shared with the target has not moved, all else has.
    weights, own = load_model(target).state_dict(), load_model(tmp_path / f"2x48-{TOKENS[1]}")
    start = load_model(tmp_path / "2x48-start").state_dict()
    for name, value in own.state_dict().items():
        assert torch.equal(value, (weights if name.startswith(SHARED) else start)[name]) == (
            name.startswith(SHARED)
        ), name
    assert load_engine(target, tmp_path / f"1x16-{TOKENS[0]}")
    # A finished grid trains nothing; another training does not mix with it.
    monkeypatch.setattr(drafter_grid, "train", None)
    assert train_grid(target, text, SIZES, TOKENS, tmp_path) == found
    with pytest.raises(InvalidArgument, match="points of another grid"):
        train_grid(target, text, SIZES, TOKENS, tmp_path, seed=1)
    with pytest.raises(InvalidArgument, match="at least 128 tokens"):
        train_grid(target, text, SIZES, [100], tmp_path / "new")
