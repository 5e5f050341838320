"""Draft heads for targets on the general path: the states that they read, and what they draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.models.base import Segment
from paceline.models.heads import HEADS, HeadLibrary
from paceline.models.heads.base import HeadTarget
from paceline.models.transformers import TransformersRunner
from paceline.models.transformers_taps import OutputLayer
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.train.data import TrainingText
from paceline.train.heads import DraftHeadTask
from paceline.train.trainer import Batch
from paceline.types import Need
from tests.heads import untrained
from tests.models.conftest import Load
from tests.modelzoo import KINDS, VOCAB_SIZE, make_model

STATES = frozenset({Need.HIDDEN_STATES, Need.LAYER_STATES})
TREE = [-1, -1, 0, 1, 0, 2]
PATHS = [(0, 2, 5), (1, 3), (0, 4)]
# One for each way in which trees are run.
STRATEGIES = {
    "packed": "gpt2", "tree": "gptj", "paths": "bloom", "chunks": "falcon_h1", "chains": "rwkv",
    "steps": "mamba", "recompute": "recurrent_gemma",
}  # fmt: skip


# Of these transformers does not count the embedding among the states, and so has the last layer's.
WITHOUT_EMBEDDING = ("mamba", "mamba2", "rwkv")


def states_of(model: Any, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers says of a text, from its first token on.

    # [length, hidden_size], [num_known_layers, length, hidden_size]: of the first ones
    """
    with torch.inference_mode():
        outputs = model(
            input_ids=torch.tensor([token_ids]), output_hidden_states=True, use_cache=False
        )
    every = torch.stack([each[0] for each in outputs.hidden_states])
    return every[-1], every[:-1] if model.config.model_type in WITHOUT_EMBEDDING else every[1:-1]


def assert_states(found: dict[Need, torch.Tensor], model: Any, text: list[int], rows: Any) -> None:
    """Compare rows with those of the last tokens of a text."""
    hidden, layers = states_of(model, text)
    count = len(rows)
    torch.testing.assert_close(
        found[Need.HIDDEN_STATES][rows], hidden[-count:], rtol=2e-3, atol=2e-4
    )
    own = found[Need.LAYER_STATES][rows].transpose(0, 1)
    torch.testing.assert_close(own[: len(layers)], layers[:, -count:], rtol=2e-3, atol=2e-4)
    assert len(own) == model.config.num_hidden_layers >= len(layers) >= len(own) - 1


@pytest.mark.one_of(7, slow=2)
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_transformers(kind: str, zoo: Path, load: Load) -> None:
    """Prompts of two sequences, trees behind them, and trees after a commit."""
    folder, runner = make_model(kind, zoo), load(kind)
    assert runner.provides >= STATES
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    texts = np.random.default_rng(5).integers(0, VOCAB_SIZE, (2, 24)).tolist()
    prompts = [texts[0][:9], texts[1][:6]]
    sequences = [runner.new_sequence() for _ in texts]
    segments = [
        Segment(sequence, np.array(prompt), logits="none")
        for sequence, prompt in zip(sequences, prompts, strict=True)
    ]
    result = runner.forward(segments, STATES)
    assert result.logits.shape == (0, VOCAB_SIZE)
    for number, prompt in enumerate(prompts):
        assert_states(result.extras_of(number), model, prompt, range(len(prompt)))
        runner.commit(sequences[number], range(len(prompt)))
    for kept in ((0, 2), ()):
        drafts = [text[9:15] for text in texts]
        segments = [
            Segment(sequence, np.array(draft), np.array(TREE, np.int32))
            for sequence, draft in zip(sequences, drafts, strict=True)
        ]
        result = runner.forward(segments, STATES)
        for number, draft in enumerate(drafts):
            before = prompts[number]
            for path in PATHS:
                text = before + [draft[node] for node in path]
                assert_states(result.extras_of(number), model, text, list(path))
            runner.commit(sequences[number], kept)
            prompts[number] = before + [draft[node] for node in kept]
    for sequence in sequences:
        runner.free(sequence)


@pytest.mark.parametrize("kind", STRATEGIES.values(), ids=STRATEGIES)
def test_logits_do_not_depend_on_whether_states_are_wanted(kind: str, load: Load) -> None:
    """A prompt whose last logits are wanted, beside a tree and a prompt without any."""
    runner = load(kind)
    if kind != "bloom":
        assert runner.strategy == {v: k for k, v in STRATEGIES.items()}[kind]
    ids = np.random.default_rng(6).integers(0, VOCAB_SIZE, (3, 20))
    results = []
    for wants in (frozenset[Need](), STATES, frozenset({Need.LAYER_STATES})):
        first, second, third = (runner.new_sequence() for _ in range(3))
        runner.forward([Segment(first, ids[0, :7], logits="none")])
        runner.commit(first, range(7))
        tree = np.array(TREE, np.int32)
        segments = [
            Segment(first, ids[0, 7:13], tree),
            Segment(second, ids[1, :5], logits="last"),
            Segment(third, ids[2, :4], logits="none"),
        ]
        result = runner.forward(segments, wants)
        assert set(result.extras) == wants
        assert [len(result.logits[result.rows(i)]) for i in range(3)] == [6, 1, 0]
        for need in wants:
            assert [len(result.extras_of(i)[need]) for i in range(3)] == [6, 5, 4]
        results.append(result.logits)
        for sequence in (first, second, third):
            runner.free(sequence)
    for logits in results[1:]:
        torch.testing.assert_close(logits, results[0], rtol=1e-4, atol=1e-4)


def test_a_prompt_that_a_head_reads_takes_no_logits(load: Load) -> None:
    runner = load("gpt2")
    rows: list[int] = []
    layer = runner.model.get_output_embeddings()
    hook = layer.register_forward_hook(
        lambda _module, inputs, _output: rows.append(inputs[0].shape[1])
    )
    sequence = runner.new_sequence()
    runner.forward([Segment(sequence, np.arange(30), logits="none")], STATES)
    hook.remove()
    runner.free(sequence)
    assert rows == [1]


@pytest.mark.one_of(4, slow=3)
@pytest.mark.parametrize("method", ["medusa", "hydra_pp", "eagle2", "eagle3", "dspark", "dflash"])
@pytest.mark.parametrize("kind", ["gpt2", "gptj", "mamba2", "qwen3_next", "jamba"])
def test_heads_change_no_token(
    kind: str, method: str, zoo: Path, load: Load, tmp_path: Path
) -> None:
    folder, runner = make_model(kind, zoo), load(kind)
    head = untrained(method.rstrip("2"), HeadTarget.of_runner(folder, runner), noise=0.2)
    head.save(tmp_path / head.kind)
    engine = Engine(ModelTarget(runner), heads=HeadLibrary(tmp_path, folder, runner))
    prompts = [list(range(3, 3 + length)) for length in (5, 12, 7)]
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=14, temperature=temperature, seed=4, ignore_eos=True)
        expected = engine.generate(prompts, params, SpeculationConfig(method="ar"))
        config = SpeculationConfig(method=method, length="fixed", num_speculative_tokens=3)
        sessions = engine.generate(prompts, params, config)
        assert [each.error for each in sessions] == [None] * 3
        assert [each.output_ids for each in sessions] == [each.output_ids for each in expected]
        assert sum(each.stats.num_drafted for each in sessions) > 20
    assert runner.num_free == runner.kv_capacity


@pytest.mark.slow
@pytest.mark.one_of(2)
@pytest.mark.parametrize("kind", ["gpt2", "mamba2"])
def test_a_head_learns_what_its_target_says(
    kind: str, zoo: Path, load: Load, tmp_path: Path
) -> None:
    """Trained on eight texts that the target has written, it drafts most of them right."""
    folder, runner = make_model(kind, zoo), load(kind)
    prompts = [[token, token + 1, token + 2] for token in range(3, 11)]
    params = SamplingParams(max_tokens=29, ignore_eos=True)
    ar = Engine(ModelTarget(runner)).generate(prompts, params, SpeculationConfig(method="ar"))
    rows = torch.tensor([each.token_ids for each in ar])
    task = DraftHeadTask(folder, TrainingText(rows, rows, "own"), kind="medusa")
    optimizer = torch.optim.AdamW(task.model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(0)
    for step in range(150):
        batch = Batch(np.arange(8), step, step / 150, np.random.default_rng(step), generator)
        loss = task.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    agreement = task.evaluate()["agreement_1"]
    assert agreement > 0.5
    task.save(tmp_path / "medusa")
    engine = Engine(ModelTarget(runner), heads=HeadLibrary(tmp_path, folder, runner))
    config = SpeculationConfig(method="medusa", length="fixed", num_speculative_tokens=1)
    sessions = engine.generate(prompts, params, config)
    assert [each.output_ids for each in sessions] == [each.output_ids for each in ar]
    accepted = sum(each.stats.num_accepted for each in sessions)
    drafted = sum(each.stats.num_drafted for each in sessions)
    assert accepted / drafted > agreement - 0.2


# --- what is refused -----------------------------------------------------------------------------


def test_a_model_whose_output_layer_is_not_understood_has_no_heads(
    zoo: Path, load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As one that scales its logits under a name that is not known."""
    folder = make_model("gpt2", zoo)
    target = HeadTarget.of_runner(folder, load("gpt2"))
    untrained("medusa", target).save(tmp_path / "medusa")
    whole = OutputLayer.logits
    monkeypatch.setattr(OutputLayer, "logits", lambda self, hidden: 1.5 * whole(self, hidden))
    runner = TransformersRunner(folder, device="cpu")
    assert runner.provides == {Need.TREE_LOGITS}
    with pytest.raises(InvalidArgument, match="wants"):
        runner.forward([Segment(runner.new_sequence(), np.array([1, 2]))], STATES)
    engine = Engine(ModelTarget(runner), heads=HeadLibrary(tmp_path, folder, runner))
    with pytest.raises(InvalidArgument, match="hidden_states"):
        engine.generate([[1, 2]], SamplingParams(max_tokens=2), SpeculationConfig(method="medusa"))


def test_a_head_of_another_model_is_refused(zoo: Path, load: Load, tmp_path: Path) -> None:
    target = HeadTarget.of_runner(make_model("gpt_neox", zoo), load("gpt_neox"))
    untrained("medusa", target).save(tmp_path / "medusa")
    folder = make_model("mamba2", zoo)
    library = HeadLibrary(tmp_path, folder, load("mamba2"))
    with pytest.raises(InvalidArgument, match="target"):
        library.load("medusa")
    assert "medusa" in HEADS
