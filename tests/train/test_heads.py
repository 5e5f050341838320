"""Draft heads learn on what the frozen target computes, and then draft for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.loading import load_engine
from paceline.models.heads import HEADS, HeadLibrary
from paceline.models.heads.base import HeadBatch
from paceline.models.llama import LlamaRunner
from paceline.sampling import SamplingParams
from paceline.train.data import TrainingText
from paceline.train.heads import DraftHeadTask, read_options
from paceline.train.kinds import KINDS
from paceline.train.trainer import TrainOptions, TrainResult, train
from tests.train.conftest import LENGTH

QUICK: dict[str, Any] = {"batch_size": 4, "warmup": 2, "learning_rate": 5e-3}


def run(task: DraftHeadTask, out: Path, steps: int, **options: Any) -> TrainResult:
    chosen = {"eval_every": steps, **QUICK, **options}
    return train(task, TrainOptions(out=out, steps=steps, **chosen))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(str(folder / "model.safetensors"))
    return tensors


@pytest.mark.one_of(3, slow=3)
@pytest.mark.parametrize("kind", HEADS)
def test_each_kind_of_head_can_be_trained(
    kind: str, target: Path, text: TrainingText, tmp_path: Path
) -> None:
    assert kind in KINDS
    task = DraftHeadTask(target, text, kind=kind)
    untrained = {name: value.clone() for name, value in task.model.state_dict().items()}
    # The result lies where an engine over the target looks for it.
    result = run(task, tmp_path / kind, 3)
    metrics = result.metrics
    agreement = [metrics[f"agreement_{i}"] for i in range(1, 65) if f"agreement_{i}" in metrics]
    accepted = np.cumprod(agreement)
    assert metrics["accepted_length"] == pytest.approx(1 + accepted.sum())
    assert metrics["acceptance"] == pytest.approx(accepted.mean())
    runner = LlamaRunner(target, kv_tokens=64)
    head = HeadLibrary(tmp_path, target, runner).load(kind)
    assert any(not torch.equal(v, untrained[name]) for name, v in head.state_dict().items())
    assert all(torch.isfinite(value).all() for value in head.state_dict().values())


# Medusa guesses without seeing the token before, of which this text has much use.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "gain", "tokens"),
    [("medusa", 0.02, 1.05), ("hydra", 0.1, 1.3), ("eagle", 0.1, 1.3), ("chimera", 0.1, 1.3)],
)
def test_a_trained_head_drafts_what_the_target_accepts(
    kind: str, gain: float, tokens: float, target: Path, text: TrainingText, tmp_path: Path
) -> None:
    result = run(DraftHeadTask(target, text, kind=kind), tmp_path / kind, 60, eval_every=20)
    acceptance = [metrics["acceptance"] for _, metrics in result.history.evaluations]
    assert acceptance[-1] > acceptance[0] + gain
    runner = load_engine(target).target
    engine = Engine(runner, heads=HeadLibrary(tmp_path, target, runner.runner))
    prompts = text.held_out[:4, :16].tolist()
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    found = {}
    for name in ("ar", kind):
        config = SpeculationConfig(method=name, length="fixed")
        found[name] = engine.generate(prompts, params, config)
    assert [s.output_ids for s in found["ar"]] == [s.output_ids for s in found[kind]]
    stats = [session.stats for session in found[kind]]
    length = sum(s.num_tokens for s in stats) / sum(s.num_target_forwards for s in stats)
    assert length > tokens


def test_the_target_writes_the_text(target: Path, text: TrainingText) -> None:
    """Greedily in every other row, drawn in the rest, after the row's own first quarter."""
    task = DraftHeadTask(target, text, kind="medusa", data_source="target", seed=7)
    chosen = np.array([3, 8, 5, 3])
    rows = task._rows(chosen)
    prompt = (LENGTH + 1) // 4
    assert rows.shape == (4, LENGTH + 1)
    assert torch.equal(rows[:, :prompt], text.training[chosen][:, :prompt])
    assert torch.equal(rows[0], rows[3])
    engine, ar = load_engine(target), SpeculationConfig(method="ar")
    count = LENGTH + 1 - prompt
    for number, row in zip(chosen.tolist(), rows, strict=True):
        greedy = SamplingParams(max_tokens=count, ignore_eos=True)
        (session,) = engine.generate([row[:prompt].tolist()], greedy, ar)
        assert (session.token_ids == row.tolist()) == (number % 2 == 0)
    # The same rows, whatever was written before and beside them; others for another seed.
    again = DraftHeadTask(target, text, kind="medusa", data_source="target", seed=7)
    assert torch.equal(again._rows(chosen[1:3]), rows[1:3])
    other = DraftHeadTask(target, text, kind="medusa", data_source="target", seed=8)
    assert not torch.equal(other._rows(chosen[:1]), rows[:1])
    # What is measured is what is trained: text of the target, on which it agrees with itself.
    assert not torch.equal(task._held_out, text.held_out)
    assert torch.equal(task._held_out, again._held_out)


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("kind", HEADS)
def test_only_what_the_assistant_writes_has_a_loss(
    kind: str, target: Path, talks: TrainingText
) -> None:
    """The target may say what it likes elsewhere, and a mask of everything changes nothing."""
    # By default these learn from the text alone; blockwise always does.
    options = {"teacher_weight": 1.0} if kind in ("medusa", "hydra", "dflash", "mtp") else {}
    task = DraftHeadTask(target, talks, kind=kind, options=options)
    task.head.eval()
    rows = np.array([1, 4, 9])
    mask = talks.mask(rows)
    assert 0 < int(mask.sum()) < mask.numel()

    def loss(batch: HeadBatch) -> float:
        batch = replace(batch, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            return float(task.head.loss(batch)[0])

    generator = torch.Generator()
    batch = task._read(talks.training[rows], mask, generator)
    assert batch.counts is not None
    assert torch.equal(batch.counts[:, :-1], mask[:, 1:]) and not batch.counts[:, -1].any()
    noise = torch.randn(batch.logits.shape, generator=torch.Generator().manual_seed(2))
    elsewhere = torch.where(batch.counts[..., None], batch.logits, batch.logits + 5 * noise)
    assert loss(replace(batch, logits=elsewhere)) == loss(batch)
    if kind != "blockwise":
        assert loss(replace(batch, logits=batch.logits + 5 * noise)) != loss(batch)
    everything = replace(batch, counts=torch.ones_like(batch.counts))
    assert loss(everything) == pytest.approx(loss(replace(batch, counts=None)), rel=1e-6)
    assert loss(everything) != loss(batch)
    assert loss(replace(batch, counts=torch.zeros_like(batch.counts))) == 0


def test_whatever_the_target_writes_has_a_loss(target: Path, talks: TrainingText) -> None:
    task = DraftHeadTask(target, talks, kind="medusa", data_source="target")
    rows, prompt = np.array([1, 4]), (LENGTH + 1) // 4
    mask = task._mask_of(rows)
    assert mask is not None and bool(mask[:, prompt:].all())
    assert torch.equal(mask[:, :prompt], talks.mask(rows)[:, :prompt])


@dataclass
class Stop(Exception):
    step: int


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("source", ["corpus", "target"])
@pytest.mark.parametrize("data", ["text", "talks"])
def test_an_interrupted_training_goes_on_bit_for_bit(
    source: str, data: str, target: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    text: TrainingText = request.getfixturevalue(data)

    def task() -> DraftHeadTask:
        return DraftHeadTask(target, text, kind="eagle", data_source=source, options={"unroll": 2})

    def stop(step: int, metrics: dict[str, float]) -> None:
        if step == 4:
            raise Stop(step)

    whole = run(task(), tmp_path / "whole", 8, eval_every=2)
    options = TrainOptions(out=tmp_path / "cut", steps=8, eval_every=2, checkpoint_steps=1, **QUICK)
    with pytest.raises(Stop):
        train(task(), options, stop)
    resumed = train(task(), options)
    assert resumed.history.losses == whole.history.losses
    expected, found = weights(whole.folder), weights(resumed.folder)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "antlers"}, "kind: got 'antlers', expected one of medusa"),
        ({"data_source": "web"}, "data_source: got 'web', expected one of corpus, target"),
        ({"options": {"nose": 1}}, "set: got 'nose', expected an option of eagle: num_layers"),
        ({"options": {"unroll": "two"}}, "set unroll: got 'two', expected a whole number"),
        ({"options": {"unroll": 1.5}}, "set unroll: got 1.5, expected a whole number"),
        ({"options": {"noise": "true"}}, "set noise: got True, expected a number"),
    ],
)
def test_bad_arguments(
    arguments: dict[str, Any], message: str, target: Path, text: TrainingText
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        DraftHeadTask(target, text, **{"kind": "eagle", **arguments})
    assert message in str(caught.value)


def test_rows_must_fit_the_context(target: Path) -> None:
    rows = torch.zeros(2, 513, dtype=torch.long)
    with pytest.raises(InvalidArgument, match="length: got 512, expected below"):
        DraftHeadTask(target, TrainingText(rows, rows, ("a", "b")), kind="medusa")


@pytest.mark.parametrize("kind", HEADS)
def test_options_can_be_given_as_text(kind: str) -> None:
    defaults = HEADS[kind].Options()
    import json
    from dataclasses import asdict

    written = {name: json.dumps(value) for name, value in asdict(defaults).items()}
    assert read_options(HEADS[kind], written) == defaults
