"""Every kind learns what it is for, and writes folders that everything loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.config import SpeculationConfig
from paceline.errors import InvalidArgument, ModelNotFound, TokenizerMismatch
from paceline.loading import load_engine
from paceline.sampling import SamplingParams
from paceline.train.data import TrainingText
from paceline.train.draft_models import DraftTask
from paceline.train.early_exit import ExitsTask, enabled_exits, exit_weights
from paceline.train.kinds import KINDS, build
from paceline.train.losses import DIVERGENCES, acceptance, divergence_loss
from paceline.train.trainer import Batch, Task, TrainOptions, TrainResult, train
from tests.modelzoo import make_model
from tests.train.conftest import LENGTH


def fit(task: Task, out: Path, **options: Any) -> TrainResult:
    values = {"steps": 60, "eval_every": 30, "learning_rate": 3e-3, "warmup": 5} | options
    return train(task, TrainOptions(out=out, **values))


def gain(result: TrainResult, metric: str = "acceptance") -> float:
    return result.metrics[metric] - result.history.evaluations[0][1][metric]


def batch(rows: list[int], step: int = 0, progress: float = 0.0) -> Batch:
    return Batch(
        np.array(rows), step, progress, np.random.default_rng(step),
        torch.Generator().manual_seed(step),
    )  # fmt: skip


# --- draft models ---------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize(
    "divergence",
    [
        d if d == "forward_kl" else pytest.param(d, marks=pytest.mark.nightly)
        for d in DIVERGENCES if d != "tvdpp"
    ],
)  # fmt: skip
def test_distilling_raises_the_acceptance(
    target: Path, text: TrainingText, tmp_path: Path, divergence: str
) -> None:
    task = DraftTask(target, text, layers=1, divergence=divergence)
    result = fit(task, tmp_path)
    assert gain(result) > 0.1, result.history.evaluations
    assert gain(result, "agreement") > 0.1


@pytest.mark.nightly
@pytest.mark.parametrize(
    "source", ["target", "on_policy", pytest.param("mixed", marks=pytest.mark.nightly)]
)
def test_each_source_of_text_raises_the_acceptance(
    target: Path, text: TrainingText, tmp_path: Path, source: str
) -> None:
    task = DraftTask(target, text, layers=1, data_source=source)
    result = fit(task, tmp_path, steps=40, eval_every=40)
    print(f"{source}: {result.metrics}")
    assert gain(result) > 0.1


@pytest.mark.nightly
def test_aligning_raises_the_acceptance(target: Path, text_file: Path, tmp_path: Path) -> None:
    task = build(
        "align", target=target, data=[text_file], length=LENGTH, held_out_rows=16, layers=1
    )
    assert task.settings["divergence"] == "tvdpp" and task.settings["data_source"] == "target"
    result = fit(task, tmp_path, steps=40, eval_every=40)
    assert gain(result) > 0.05, result.history.evaluations


@pytest.mark.nightly
def test_sorted_training_raises_the_acceptance_of_every_sub_model(
    target: Path, text_file: Path, tmp_path: Path
) -> None:
    task = build("sorted", target=target, data=[text_file], length=LENGTH, layers=3, exits=(1, 2))
    result = fit(task, tmp_path)
    for metric in ("acceptance", "acceptance_exit_1", "acceptance_exit_2", "acceptance_exit_3"):
        assert gain(result, metric) > 0.05, metric


@pytest.mark.slow
def test_the_sorted_loss_is_the_sum_over_sub_models(target: Path, text: TrainingText) -> None:
    """Each sub-model is its first layers with the norm and head: a folder of its own."""
    task = DraftTask(target, text, layers=3, divergence="ce", exits=(1, 2))
    total = sum(
        float(DraftTask(target, text, layers=n, divergence="ce").loss(batch([0, 5])).detach())
        for n in (1, 2, 3)
    )
    assert float(task.loss(batch([0, 5])).detach()) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_only_what_the_assistant_writes_has_a_loss(
    target: Path, talks: TrainingText, divergence: str
) -> None:
    task = DraftTask(target, talks, layers=1, divergence=divergence)
    chosen = batch([2, 7])
    rows, counts = talks.training[chosen.rows], talks.mask(chosen.rows)[:, 1:]
    assert 0 < int(counts.sum()) < counts.numel()
    with torch.no_grad():
        p = task.model(rows[:, :-1]).logits[counts]
        q = AutoModelForCausalLM.from_pretrained(target)(rows[:, :-1]).logits[counts]
    generator = torch.Generator().manual_seed(0)
    expected = divergence_loss(divergence, p, q, rows[:, 1:][counts], generator=generator)
    assert float(task.loss(chosen).detach()) == pytest.approx(float(expected), rel=1e-4)


def test_conversations_train_and_are_measured_where_the_assistant_writes(
    target: Path, talks: TrainingText, tmp_path: Path
) -> None:
    """`exits` sums cross entropies over layers; its measurements count the same places."""
    task = ExitsTask(target, talks, layer_dropout=0.0, exit_scale=0.0)
    chosen = batch([2, 7])
    counts = talks.mask(chosen.rows)[:, 1:]
    rows = talks.training[chosen.rows]
    assert talks.held_out_mask is not None
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(target)
        logits = model(rows[:, :-1]).logits[counts]
        held_out = talks.held_out[:, :-1]
        other = model(held_out).logits[talks.held_out_mask[:, 1:]]
        expected = F.cross_entropy(logits, rows[:, 1:][counts])
        labels = talks.held_out[:, 1:][talks.held_out_mask[:, 1:]]
        measured = task.evaluate()["target_loss"]
    assert float(task.loss(chosen).detach()) == pytest.approx(float(expected), rel=1e-4)
    assert measured == pytest.approx(float(F.cross_entropy(other, labels)), rel=1e-4)
    result = fit(DraftTask(target, talks, layers=1, divergence="ce"), tmp_path, steps=10)
    assert result.history.losses[-1] < result.history.losses[0]


@pytest.mark.parametrize("source", ["target", "mixed"])
def test_written_text_of_a_conversation_counts_whole(
    target: Path, talks: TrainingText, source: str
) -> None:
    task = DraftTask(target, talks, layers=1, data_source=source)
    numbers = list(range(20))
    rows, mask = talks.training[numbers], talks.mask(numbers)
    written, counts = task._rewrite(rows, batch(numbers), mask)
    prompt, own = (LENGTH + 1) // 4, (written != rows).any(1)
    assert bool(own.all()) == (source == "target")
    assert torch.equal(counts[~own], mask[~own][:, 1:])
    assert bool(counts[own][:, prompt - 1 :].all()) and not counts[own][:, : prompt - 1].any()


def test_the_measured_acceptance_is_sum_of_minima_of_both_models(
    target: Path, text: TrainingText
) -> None:
    task = DraftTask(target, text, layers=2)
    with torch.no_grad():
        metrics = task.evaluate()
        ids = text.held_out[:, :-1]
        p = task.model(ids).logits.double().softmax(-1)
        q = AutoModelForCausalLM.from_pretrained(target)(ids).logits.double().softmax(-1)
    expected = float(torch.minimum(p, q).sum(-1).mean())
    assert metrics["acceptance"] == pytest.approx(expected, abs=1e-6)
    same = float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert metrics["agreement"] == pytest.approx(same, abs=1e-9)


def test_the_acceptance_on_written_text_leaves_the_prompts_out(
    target: Path, text: TrainingText
) -> None:
    task = DraftTask(target, text, layers=2)
    with torch.no_grad():
        metrics = task.evaluate()
        assert task.evaluate() == metrics
        rows, prompt = task._written, (LENGTH + 1) // 4
        assert rows is not None and torch.equal(rows[:, :prompt], text.held_out[:, :prompt])
        ids = rows[:, :-1]
        p = task.model(ids).logits[:, prompt - 1 :].double().softmax(-1)
        q = task._target(ids).logits[:, prompt - 1 :].double().softmax(-1)
    expected = float(torch.minimum(p, q).sum(-1).mean())
    assert metrics["acceptance_written"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("source", ["target", "on_policy"])
def test_written_text_follows_the_corpus_prompt_and_counts_alone(
    target: Path, text: TrainingText, source: str
) -> None:
    task = DraftTask(target, text, layers=1, data_source=source, divergence="tvd")
    rows = text.training[[3, 4]]
    written, counts = task._rewrite(rows, batch([3, 4]))
    prompt = (LENGTH + 1) // 4
    assert torch.equal(written[:, :prompt], rows[:, :prompt])
    assert not torch.equal(written, rows)
    assert counts[:, : prompt - 1].sum() == 0 and bool(counts[:, prompt - 1 :].all())
    again, _ = task._rewrite(rows, batch([3, 4]))
    assert torch.equal(again, written), "the same step writes the same text"
    other, _ = task._rewrite(rows, batch([3, 4], step=1))
    assert not torch.equal(other, written)
    # The loss is that of the written positions, of which the prompt's last token is the first.
    teacher = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        p = task.model(written[:, :-1]).logits[:, prompt - 1 :].flatten(0, 1)
        q = teacher(written[:, :-1]).logits[:, prompt - 1 :].flatten(0, 1)
    loss = float(task.loss(batch([3, 4])).detach())
    assert loss == pytest.approx(1 - float(acceptance(p, q).mean()), abs=1e-5)


def test_what_a_writer_writes_has_its_own_distribution(target: Path, text: TrainingText) -> None:
    """The first written token of many rows with one prompt, against the model's probabilities."""
    task = DraftTask(target, text, layers=1, data_source="target")
    row = text.training[3]
    prompt = (LENGTH + 1) // 4
    written, _ = task._rewrite(row.expand(2000, -1), batch([3]))
    counts = torch.bincount(written[:, prompt], minlength=258).double() / 2000
    with torch.no_grad():
        q = AutoModelForCausalLM.from_pretrained(target)(row[None, :prompt]).logits[0, -1]
    distance = float((counts - q.double().softmax(-1)).abs().sum() / 2)
    assert distance < 0.1


@pytest.mark.parametrize("mix", [0.0, 0.4, 1.0])
def test_mixed_rows_come_in_the_wanted_share(target: Path, text: TrainingText, mix: float) -> None:
    task = DraftTask(target, text, layers=1, data_source="mixed", mix=mix)
    rows = text.training[:100]
    written, counts = task._rewrite(rows, batch(list(range(100))))
    own = ~counts[:, 0]
    assert float(own.float().mean()) == pytest.approx(mix, abs=0.15 if 0 < mix < 1 else 0)
    assert torch.equal(written[~own], rows[~own])


@pytest.mark.nightly
def test_on_policy_and_fixed_text_at_equal_steps(
    target: Path, text: TrainingText, tmp_path: Path
) -> None:
    """The trend that DistillSpec reports, printed. What holds at any size: both learn."""
    gains = {}
    for source in ("corpus", "on_policy"):
        task = DraftTask(target, text, layers=1, data_source=source, divergence="tvd")
        result = fit(task, tmp_path / source, steps=80, eval_every=80)
        gains[source] = {m: gain(result, m) for m in ("acceptance", "acceptance_written")}
    print(f"gained in 80 steps: {gains}")
    assert min(value for each in gains.values() for value in each.values()) > 0.05


def test_the_target_does_not_change(target: Path, text: TrainingText, tmp_path: Path) -> None:
    task = DraftTask(target, text, layers=1)
    before = {name: value.clone() for name, value in task._target.state_dict().items()}
    fit(task, tmp_path, steps=3, eval_every=3)
    assert all(torch.equal(value, before[n]) for n, value in task._target.state_dict().items())


def test_a_distilled_drafter_drafts(target: Path, text: TrainingText, tmp_path: Path) -> None:
    fit(DraftTask(target, text, layers=1), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer.encode("def f(x):")) == "def f(x):"
    engine = load_engine(target, tmp_path)
    prompt = engine.tokenizer.encode("def get_path(path):\n")  # type: ignore[union-attr]
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    runs = [
        engine.generate([prompt], params, config)[0]
        for config in (
            SpeculationConfig(method="ar"),
            SpeculationConfig(method="draft_model", length="fixed"),
        )
    ]
    assert list(runs[0].output_ids) == list(runs[1].output_ids)
    assert runs[1].stats.mean_accepted_length > 1.3


def test_a_drafter_starts_from_a_folder_or_from_a_config_alone(
    target: Path, random_target: Path, text: TrainingText, tmp_path: Path
) -> None:
    from_folder = DraftTask(target, text, drafter=random_target)
    reference = AutoModelForCausalLM.from_pretrained(random_target).state_dict()
    assert all(torch.equal(v, reference[n]) for n, v in from_folder.model.state_dict().items())
    config = json.loads((random_target / "config.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = [DraftTask(target, text, drafter=tmp_path, seed=s).model for s in (0, 0, 1)]
    assert len(made[0].model.layers) == 1
    same, other = ([torch.equal(a, b) for a, b in zip(made[0].parameters(), m.parameters(),
                   strict=True)] for m in made[1:])  # fmt: skip
    assert all(same) and not all(other)


def test_a_drafter_with_a_padded_vocabulary(target: Path, text: TrainingText, zoo: Path) -> None:
    padded = make_model("llama", zoo, num_hidden_layers=1, hidden_size=32, vocab_size=272)
    task = DraftTask(target, text, drafter=padded, data_source="on_policy")
    task.loss(batch([0, 1])).backward()
    assert 0 < task.evaluate()["acceptance"] < 1


def test_a_target_of_another_architecture(text: TrainingText, zoo: Path) -> None:
    gpt = make_model("gpt2", zoo, n_layer=1)
    small = make_model("gpt2", zoo, n_layer=1, seed=3)
    task = DraftTask(gpt, text, drafter=small, data_source="mixed")
    task.loss(batch([0, 1])).backward()
    assert 0 < task.evaluate()["acceptance"] < 1
    with pytest.raises(InvalidArgument, match="llama"):
        DraftTask(gpt, text)


# --- early exits ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "curriculum",
    ["rotational", *(pytest.param(c, marks=pytest.mark.nightly) for c in ("gradual", "all"))],
)
def test_exits_learn_and_the_last_layer_forgets_nothing(
    target: Path, text: TrainingText, tmp_path: Path, curriculum: str
) -> None:
    task = ExitsTask(target, text, curriculum=curriculum, exit_scale=1.0, period=2)
    result = fit(task, tmp_path, steps=80, eval_every=40)
    assert gain(result) > 0.1, result.history.evaluations
    assert gain(result, "target_loss") < 0.1


def test_the_result_of_exits_is_a_complete_folder(
    target: Path, text: TrainingText, tmp_path: Path
) -> None:
    task = ExitsTask(target, text)
    fit(task, tmp_path, steps=5, eval_every=5)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, task.model.state_dict()[name]), name
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (target / name).read_bytes()
    engine = load_engine(tmp_path)
    prompt = engine.tokenizer.encode("def get_path(path):\n")  # type: ignore[union-attr]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    runs = [
        engine.generate([prompt], params, SpeculationConfig(method=method))[0]
        for method in ("ar", "layer_skip")
    ]
    assert list(runs[0].output_ids) == list(runs[1].output_ids)


def test_layers_are_left_out_the_more_often_the_deeper(target: Path, text: TrainingText) -> None:
    task = ExitsTask(target, text, layer_dropout=0.8, exit_scale=0.0)
    reached = np.zeros(4)
    for step in range(200):
        task.model.zero_grad(set_to_none=True)
        task.loss(batch([0], step=step)).backward()
        reached += [layer.mlp.up_proj.weight.grad is not None for layer in task.model.model.layers]
    # Equation 2: 0.8 * (2 ** (l / 3) - 1) for l = 0 to 3.
    expected = 1 - 0.8 * (2 ** (np.arange(4) / 3) - 1)
    np.testing.assert_allclose(reached / 200, expected, atol=0.12)
    assert reached[0] == 200


def test_curricula() -> None:
    seen = [enabled_exits("rotational", step, 0.0, 8, 3) for step in range(3)]
    assert sorted(e for exits in seen for e in exits) == [1, 2, 3, 4, 5, 6, 7]
    assert max(len(exits) for exits in seen) == 3
    gradual = [enabled_exits("gradual", 0, progress, 8, 3) for progress in (0.0, 0.25, 0.5, 0.9)]
    assert gradual[0] == [7] and gradual[2] == gradual[3] == [1, 2, 3, 4, 5, 6, 7]
    assert gradual[1] == [3, 4, 5, 6, 7]
    weights = exit_weights([1, 4, 7], 8, 0.2)
    assert sum(weights.values()) == pytest.approx(1)
    assert weights[8] > weights[7] > weights[4] > weights[1] == 0


def test_exits_without_dropout_and_scale_are_plain_fine_tuning(
    target: Path, text: TrainingText
) -> None:
    task = ExitsTask(target, text, layer_dropout=0.0, exit_scale=0.0)
    rows = text.training[[1, 2]]
    model = AutoModelForCausalLM.from_pretrained(target)
    logits = model(rows[:, :-1]).logits.flatten(0, 1)
    expected = divergence_loss("ce", logits, logits, rows[:, 1:].flatten())
    actual = float(task.loss(batch([1, 2])).detach())
    assert actual == pytest.approx(float(expected.detach()), rel=1e-5)


@pytest.mark.parametrize("kind", ["mistral_sliding", "qwen2", "qwen3", "llama_llama3_rope"])
def test_exits_compute_what_the_model_computes(zoo: Path, text: TrainingText, kind: str) -> None:
    folder = make_model(kind, zoo)
    if kind == "mistral_sliding":  # its window of 16 would end within a row
        with pytest.raises(InvalidArgument, match="length"):
            ExitsTask(folder, text)
        return
    task = ExitsTask(folder, text, exits=(3,))
    ids = text.held_out[:2, :-1]
    with torch.no_grad():
        (exit_logits,), last = task._all_exits(ids)
        expected = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(exit_logits, last)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "knobs"),
    [
        ("divergence", {"divergence": "kl"}),
        ("data_source", {"data_source": "web"}),
        ("mix", {"mix": 1.5}),
        ("beta", {"beta": 0.0}),
        ("exits", {"exits": (3,)}),
        ("layers", {"layers": 5}),
        ("layers", {"layers": 0}),
    ],
)
def test_bad_knobs_of_drafters(
    target: Path, text: TrainingText, field: str, knobs: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        DraftTask(target, text, **knobs)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "knobs"),
    [
        ("layer_dropout", {"layer_dropout": 1.0}),
        ("exit_scale", {"exit_scale": -1.0}),
        ("curriculum", {"curriculum": "hard"}),
        ("period", {"period": 0}),
        ("exits", {"exits": (5,)}),
    ],
)
def test_bad_knobs_of_exits(
    target: Path, text: TrainingText, field: str, knobs: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ExitsTask(target, text, **knobs)
    assert caught.value.field == field


def test_bad_folders(target: Path, text: TrainingText, tmp_path: Path, zoo: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        DraftTask(tmp_path / "nothing", text)
    damaged = make_model("llama", zoo, seed=9)
    other = tmp_path / "damaged"
    other.mkdir()
    for path in damaged.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ModelNotFound, match="damaged"):
        ExitsTask(other, text)
    config = json.loads((damaged / "config.json").read_text()) | {"num_hidden_layers": 4}
    (other / "config.json").write_text(json.dumps(config))
    (other / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes())
    with pytest.raises(ModelNotFound, match=r"lack model\.layers\.3"):
        ExitsTask(other, text)
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"] = {
        f"{token}'" if token == "a" else token: i
        for token, i in vocabulary["model"]["vocab"].items()
    }
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(TokenizerMismatch):
        DraftTask(target, text, drafter=other)
    with pytest.raises(InvalidArgument, match="length"):
        ExitsTask(make_model("llama", zoo, max_position_embeddings=16), text)


def test_an_unknown_kind_lists_the_known() -> None:
    with pytest.raises(InvalidArgument, match=", ".join(KINDS)):
        build("magic")
