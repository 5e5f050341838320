"""Draft models that llama.cpp computes: drafts like the native ones, exact whatever they say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline import gguf_folder
from paceline.config import SpeculationConfig
from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine
from paceline.errors import (
    InvalidArgument,
    ModelNotFound,
    ResourceExhausted,
    TokenizerMismatch,
)
from paceline.loading import load_engine, load_runner
from paceline.models.base import ModelRunner, Segment
from paceline.sampling import SamplingParams
from paceline.tokenizer import eos_token_ids, fingerprint, load_tokenizer
from tests.core.prompts import code_prompts
from tests.modelzoo import make_model

pytest.importorskip("llama_cpp", reason="no llama-cpp-python here: pip install 'paceline[gguf]'")
pytest.importorskip("gguf")

from benchmarks.to_gguf import to_gguf
from paceline.models.gguf import GgufRunner, GgufSequence

TEXTS = (
    "def read(path):\n    with open(path) as file:\n        return file.read()\n",
    "It's 12345 o'clock,\r\n\r\n  \tand   Größe 漢字 \U0001f600!  ",
    "",
    "a<|endoftext|>b",
)


@pytest.fixture(autouse=True, scope="module")
def _all_are_foreign() -> Iterator[None]:
    """As if Paceline computed no architecture itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_folder, "ARCHITECTURES", {})
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's drafter."""
    path = tmp_path_factory.mktemp("gguf") / "drafter.gguf"
    to_gguf(DRAFTER_DIR, path)
    return path


@pytest.fixture(scope="module")
def runner(file: Path) -> GgufRunner:
    return GgufRunner(file, kv_tokens=1024)


def rows(
    runner: ModelRunner, sequence: object, tokens: list[int], parents: list[int] | None = None
) -> torch.Tensor:
    given = None if parents is None else np.asarray(parents, np.int32)
    segment = Segment(sequence, np.asarray(tokens, np.int64), given)  # type: ignore[arg-type]
    return runner.forward([segment]).logits


# --- tokenizer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_the_same_tokens(file: Path, text: str) -> None:
    ours, theirs = load_tokenizer(file), load_tokenizer(DRAFTER_DIR)
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))


def test_vocabularies_are_the_same(file: Path) -> None:
    ours, theirs = load_tokenizer(file), load_tokenizer(DRAFTER_DIR)
    assert fingerprint(ours) == fingerprint(theirs)
    assert ours.vocab_size == theirs.vocab_size
    assert eos_token_ids(file) == eos_token_ids(DRAFTER_DIR)
    for token in range(2, 400):  # not the special ones
        assert ours.token_bytes(token) == theirs.token_bytes(token)


# --- the model ------------------------------------------------------------------------------------


def test_logits_are_those_of_the_native_model(runner: GgufRunner) -> None:
    native = load_runner(DRAFTER_DIR)
    ids = load_tokenizer(DRAFTER_DIR).encode(TEXTS[0])
    results = []
    for each in (runner, native):
        sequence = each.new_sequence()
        results.append(rows(each, sequence, ids))
        each.free(sequence)
    # llama.cpp keeps the KV cache in float16.
    assert (results[0] - results[1]).abs().max() < 0.05
    assert (results[0].argmax(-1) == results[1].argmax(-1)).float().mean() > 0.97


def test_nodes_are_as_on_their_paths_alone(runner: GgufRunner) -> None:
    prefix = list(range(30, 50))
    tokens, parents = [60, 61, 62, 63, 64, 65, 66], [-1, 0, 0, -1, 1, 3, 2]
    sequence = runner.new_sequence()
    rows(runner, sequence, prefix)
    runner.commit(sequence, range(len(prefix)))
    tree = rows(runner, sequence, tokens, parents)
    for node in range(len(tokens)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = runner.new_sequence()
        expected = rows(runner, alone, prefix + [tokens[i] for i in path])[-1]
        runner.free(alone)
        assert (tree[node] - expected).abs().max() < 1e-2
    # A branch becomes the prefix, whichever it is; what was beside it is gone.
    runner.commit(sequence, [0, 2, 6])
    assert sequence.length == len(prefix) + 3 and sequence.num_pending == 0
    after = rows(runner, sequence, [70], [-1])[-1]
    fresh = runner.new_sequence()
    expected = rows(runner, fresh, [*prefix, 60, 62, 66, 70])[-1]
    assert (after - expected).abs().max() < 1e-2
    # And so it is after a step back.
    runner.truncate(sequence, len(prefix) - 5)
    runner.truncate(fresh, 0)
    again = rows(runner, sequence, [80, 81])
    expected = rows(runner, fresh, [*prefix[:-5], 80, 81])[-2:]
    assert (again - expected).abs().max() < 1e-2
    for each in (sequence, fresh):
        runner.free(each)
    assert runner.num_free == runner.kv_capacity


def test_segments_of_several_sequences_share_a_forward(runner: GgufRunner) -> None:
    prompts = [[40, 41, 42], [50], [60, 61, 62, 63]]
    sequences = [runner.new_sequence() for _ in prompts]
    result = runner.forward(
        [
            Segment(sequence, np.asarray(prompt), logits=kind)
            for sequence, prompt, kind in zip(
                sequences, prompts, ("last", "none", "all"), strict=True
            )
        ]
    )
    assert result.row_offsets == (0, 1, 1, 5)
    for i, row in ((0, 0), (2, 4)):
        alone = runner.new_sequence()
        assert (result.logits[row] - rows(runner, alone, prompts[i])[-1]).abs().max() < 1e-2
        runner.free(alone)
    for sequence in sequences:
        runner.free(sequence)
    assert runner.num_free == runner.kv_capacity


def test_what_does_not_fit_is_refused(runner: GgufRunner) -> None:
    sequence = runner.new_sequence()
    with pytest.raises(ResourceExhausted, match="1024"):
        rows(runner, sequence, [5] * 1025)
    assert isinstance(sequence, GgufSequence) and sequence.num_pending == 0
    runner.free(sequence)
    assert runner.num_free == runner.kv_capacity


# --- drafts ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(file: Path) -> Engine:
    return load_engine(TARGET_DIR, file)


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    assert engine.tokenizer is not None
    return code_prompts(engine.tokenizer, 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["draft_model", "draft_model_tree", "sequoia", "dyspec"])
def test_tokens_are_those_of_ar(
    method: str, temperature: float, engine: Engine, prompts: list[list[int]]
) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    plain = engine.generate(prompts, params, SpeculationConfig(method="ar"))
    drafted = engine.generate(prompts, params, SpeculationConfig(method=method, length="fixed"))
    assert [s.output_ids for s in drafted] == [s.output_ids for s in plain]
    assert not any(s.stats.drafter_lost for s in drafted)
    assert sum(s.stats.num_accepted for s in drafted) > 40
    model = engine.local_drafter("draft_model")
    assert isinstance(model, DraftModel) and isinstance(model.runner, GgufRunner)
    assert model.runner.num_free == model.runner.kv_capacity


def test_it_drafts_as_well_as_the_native_model(engine: Engine, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    config = SpeculationConfig(method="draft_model", length="fixed", num_speculative_tokens=4)
    native = Engine(
        engine.target, {"draft_model": DraftModel(load_runner(DRAFTER_DIR))}, tokenizer=None
    )
    accepted = [
        sum(s.stats.num_accepted for s in each.generate(prompts, params, config))
        for each in (engine, native)
    ]
    assert abs(accepted[0] - accepted[1]) <= 0.05 * accepted[1]


# --- refusals -------------------------------------------------------------------------------------


def test_another_vocabulary_is_named(file: Path, tmp_path: Path) -> None:
    other = make_model("llama", tmp_path)
    with pytest.raises(TokenizerMismatch, match=r"entries differ: .*target .*drafter"):
        load_engine(other, file)


def test_files_that_are_none(tmp_path: Path, file: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        load_engine(TARGET_DIR, tmp_path / "none.gguf")
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ModelNotFound, match=r"cannot load .*damaged.gguf': .*[a-z]{4}"):
        load_engine(TARGET_DIR, damaged)
    with pytest.raises(InvalidArgument, match=r"general\.architecture"):
        load_engine(file, file)
