"""Encoder-decoder models: the engine's tokens are those of transformers' own generate."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument, ModelNotFound
from paceline.loading import load_runner
from paceline.models.base import Segment
from paceline.models.seq2seq import Seq2SeqRunner
from paceline.models.transformers import TransformersRunner
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.tokenizer import eos_token_ids
from paceline.tree import path_to

VOCAB_SIZE, START, EOS = 96, 0, 1
SOURCE = [5, 9, 33, 21, 7, 8, 9, 60, 61, EOS]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
METHODS = ("ar", "aggressive", "jacobi", "gauss_seidel", "hybrid_jacobi", "lookahead")


def write_t5(folder: Path, *, reads_input: bool = True, **options: Any) -> Path:
    """A random T5; one that does not read its input has the same output for every input."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        dropout_rate=0.0, tie_word_embeddings=False, **{"decoder_start_token_id": START, **options},
    )  # fmt: skip
    model: Any = T5ForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                scale = 4.0 if "lm_head" in name else 1.2
                parameter.copy_(noise * scale / parameter.shape[-1] ** 0.5)
            if "EncDecAttention.o" in name:
                parameter.mul_(4.0 if reads_input else 0.0)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_t5(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def runner(folder: Path) -> Seq2SeqRunner:
    runner = load_runner(folder, device="cpu")
    assert isinstance(runner, Seq2SeqRunner)
    return runner


def generate(
    runner: Seq2SeqRunner,
    prompts: list[list[int]],
    params: SamplingParams,
    method: str = "ar",
    **knobs: Any,
) -> list[Session]:
    engine = Engine(ModelTarget(runner), eos_token_ids=[EOS])
    config = SpeculationConfig(method=method, length="fixed", **knobs)
    sessions = engine.generate(prompts, params, config)
    assert not any(session.stats.drafter_lost for session in sessions)
    assert runner.num_free == runner.kv_capacity
    return sessions


def transformers_output(runner: Seq2SeqRunner, source: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([source])
    with torch.inference_mode():
        output = runner.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, **options
        )
    tokens: list[int] = output[0].tolist()
    assert tokens[0] == START
    return tokens[1:]


def decoder_logits(runner: Seq2SeqRunner, source: list[int], tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = runner.model(
            input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([tokens])
        ).logits[0]
    return logits


def test_greedy_ar_is_transformers_generate(runner: Seq2SeqRunner) -> None:
    sources = [SOURCE, SOURCE[3:], [40, 41, EOS], [EOS]]
    sessions = generate(runner, [[*source, START] for source in sources], PARAMS)
    for source, session in zip(sources, sessions, strict=True):
        expected = transformers_output(runner, source, eos_token_id=None)
        assert session.output_ids == expected
    outputs = [session.output_ids for session in sessions]
    assert len(set(outputs[0])) > 4  # not one token over and over
    assert outputs[0] != outputs[1]  # the input counts


def test_the_end_of_sequence_ends_it(folder: Path, runner: Seq2SeqRunner) -> None:
    assert eos_token_ids(folder) == (EOS,)
    stop = generate(runner, [[*SOURCE, START]], PARAMS)[0].output_ids[7]
    params = replace(PARAMS, ignore_eos=False, stop_token_ids=(stop,))
    session = generate(runner, [[*SOURCE, START]], params, "jacobi")[0]
    assert session.output_ids == transformers_output(runner, SOURCE, eos_token_id=[EOS, stop])
    assert session.finish_reason == "stop"


@pytest.mark.one_of(3, slow=3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS[1:])
def test_every_row_gives_the_tokens_of_ar(
    method: str, temperature: float, runner: Seq2SeqRunner
) -> None:
    params = replace(PARAMS, temperature=temperature, seed=5, top_k=8)
    prompts = [[*SOURCE, START], [*SOURCE[:4], START], [*SOURCE[::-1], START]]
    expected = generate(runner, prompts, params)
    for ours, ar in zip(generate(runner, prompts, params, method), expected, strict=True):
        assert ours.output_ids == ar.output_ids
        assert ours.stats.num_target_forwards <= 24


def test_an_output_equal_to_the_input_takes_one_forward(tmp_path: Path) -> None:
    runner = Seq2SeqRunner(write_t5(tmp_path, reads_input=False), device="cpu")
    output = generate(runner, [[*SOURCE, START]], PARAMS)[0].output_ids
    assert output == generate(runner, [[EOS, START]], PARAMS)[0].output_ids
    params = replace(PARAMS, stop_token_ids=(output[-1],))
    expected = output[: output.index(output[-1]) + 1]
    session = generate(runner, [[*expected, START]], params, "aggressive")[0]
    assert session.output_ids == expected
    assert len(expected) > 5
    assert session.stats.num_target_forwards == 1
    # One token changed in the middle: the difference, at most a few AR rounds, and the rest.
    source = [*expected]
    source[3] = next(t for t in range(2, VOCAB_SIZE) if t not in expected)
    session = generate(runner, [[*source, START]], params, "aggressive")[0]
    assert session.output_ids == expected
    assert session.stats.num_target_forwards < len(expected)


def test_a_prompt_without_start_token_is_all_input(runner: Seq2SeqRunner) -> None:
    with_start, without = (
        generate(runner, [prompt], PARAMS)[0] for prompt in ([*SOURCE, START], SOURCE)
    )
    assert without.output_ids == with_start.output_ids
    # A padded input keeps its padding; only the last of the zeros is the decoder's.
    padded = generate(runner, [[*SOURCE, START, START]], PARAMS)[0]
    expected = transformers_output(runner, [*SOURCE, 0], eos_token_id=None)
    assert padded.output_ids == expected


def test_a_session_goes_on_from_its_committed_tokens(runner: Seq2SeqRunner) -> None:
    """As on another replica: prompt and output so far are the new prompt."""
    whole = generate(runner, [[*SOURCE, START]], PARAMS)[0].output_ids
    prompt = [*SOURCE, START, *whole[:9]]
    rest = generate(runner, [prompt], replace(PARAMS, max_tokens=15), "lookahead")[0]
    assert rest.output_ids == whole[9:]


def test_nothing_but_a_start_token_is_a_prompt(runner: Seq2SeqRunner) -> None:
    expected = generate(runner, [[START]], PARAMS)[0].output_ids
    assert len(expected) == 24
    assert generate(runner, [[START]], PARAMS, "jacobi")[0].output_ids == expected


def test_each_node_of_a_tree_has_the_logits_of_its_path(runner: Seq2SeqRunner) -> None:
    sequence = runner.new_sequence()
    runner.forward([Segment(sequence, np.array(SOURCE), logits="none")])
    runner.commit(sequence, range(len(SOURCE)))
    tokens = np.array([START, 4, 8, 15, 16, 23])
    parents = np.array([-1, 0, 0, 1, 1, 3], np.int32)
    result = runner.forward([Segment(sequence, tokens, parents)])
    for node in range(6):
        path = tokens[list(path_to(parents, node))].tolist()
        expected = decoder_logits(runner, SOURCE, path)[-1]
        torch.testing.assert_close(result.logits[node], expected, atol=1e-4, rtol=1e-4)
    runner.commit(sequence, (0, 1, 3))
    logits = runner.forward([Segment(sequence, np.array([42]))]).logits
    expected = decoder_logits(runner, SOURCE, [START, 4, 15, 42])[-1:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    runner.free(sequence)
    assert runner.num_free == runner.kv_capacity


def test_a_whole_prompt_in_one_forward(runner: Seq2SeqRunner) -> None:
    """As a draft model has it: the prompt comes with the first call that asks for logits."""
    sequence = runner.new_sequence()
    ids = np.array([*SOURCE, START, 4, 8])
    logits = runner.forward([Segment(sequence, ids, logits="last")]).logits
    expected = decoder_logits(runner, SOURCE, [START, 4, 8])[-1:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    runner.free(sequence)


def test_the_encoder_runs_once(runner: Seq2SeqRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = runner.model.get_encoder()
    calls: list[int] = []
    forward: Callable[..., Any] = encoder.forward

    def counting(*args: Any, **options: Any) -> Any:
        calls.append(options["input_ids"].shape[1])
        return forward(*args, **options)

    monkeypatch.setattr(encoder, "forward", counting)
    generate(runner, [[*SOURCE, START], [*SOURCE[2:], START]], PARAMS, "gauss_seidel")
    assert calls == [len(SOURCE), len(SOURCE) - 2]


def test_truncation_keeps_the_input_or_forgets_it(runner: Seq2SeqRunner) -> None:
    sequence = runner.new_sequence()
    runner.forward([Segment(sequence, np.array(SOURCE), logits="none")])
    runner.commit(sequence, range(len(SOURCE)))
    runner.forward([Segment(sequence, np.array([START, 4, 8]))])
    runner.commit(sequence, range(3))
    states = sequence.states
    runner.truncate(sequence, len(SOURCE))
    assert sequence.states is states is not None
    first = runner.forward([Segment(sequence, np.array([START, 4]))]).logits
    runner.truncate(sequence, 3)
    assert sequence.states is None
    runner.forward([Segment(sequence, np.array(SOURCE[3:]), logits="none")])
    runner.commit(sequence, range(len(SOURCE) - 3))
    again = runner.forward([Segment(sequence, np.array([START, 4]))]).logits
    torch.testing.assert_close(first, again)
    runner.free(sequence)
    runner.free(sequence)
    assert runner.num_free == runner.kv_capacity


def test_what_cannot_be_loaded(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="AutoModelForCausalLM"):
        TransformersRunner(folder, device="cpu")
    with pytest.raises(InvalidArgument, match="batch_invariant"):
        load_runner(folder, device="cpu", batch_invariant=True)
    with pytest.raises(InvalidArgument, match="model_type"):
        load_runner(folder, device="cpu", general=False)
    bad = write_t5(tmp_path / "bad", decoder_start_token_id=None)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((bad / name).read_text())
        values.pop("decoder_start_token_id", None)
        (bad / name).write_text(json.dumps(values))
    with pytest.raises(InvalidArgument, match="decoder_start_token_id"):
        load_runner(bad, device="cpu")
    (bad / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="no weights"):
        load_runner(bad, device="cpu")
