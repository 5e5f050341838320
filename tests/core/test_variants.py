"""Every variant of the kernels computes the same bits, in class ``portable`` everywhere."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.engine import Engine
from paceline.loading import load_engine
from paceline.models import kernels
from paceline.models.base import Segment
from paceline.models.llama import LlamaRunner
from paceline.models.native_ops import NativeOps
from paceline.sampling import SamplingParams
from tests.core.runners import load_runner
from tests.modelzoo import make_model

# Raised together with kernels.NUMERICS_VERSION, and with nothing else.
RECORDED = {
    ("target", "float32"): "67070a34820dd4d6229e8617cb37e8fa",
    ("target", "bfloat16"): "15b58dfa89b310f7d7798a7f1940c30e",
    ("drafter", "int8"): "909f5d229aa6b4479cf6f67a7dad4c1e",
}
KINDS = ("llama_gqa", "llama_bias", "llama_head_dim", "qwen3", "demo", "mistral_sliding")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def outputs(runner: LlamaRunner) -> list[torch.Tensor]:
    """Logits of a prompt, a chain beside a tree, a batch of single tokens, and the KV entries."""
    rng = np.random.default_rng(5)
    most = min(runner.vocab_size, 256)
    prompts = [rng.integers(0, most, size) for size in (61, 18, 2)]
    sequences = [runner.new_sequence() for _ in prompts]
    found = [
        runner.forward(
            [Segment(s, p, logits="all") for s, p in zip(sequences, prompts, strict=True)]
        ).logits
    ]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        runner.commit(sequence, range(len(prompt)))
    parents = np.array([-1, 0, 0, 1, 1, 2, -1, 6, 7], np.int32)
    drafts = rng.integers(0, most, 9)
    found.append(
        runner.forward(
            [
                Segment(sequences[0], drafts, parents),
                Segment(sequences[1], drafts[:5]),
                Segment(sequences[2], drafts[:1]),
            ]
        ).logits
    )
    runner.commit(sequences[0], [0, 2, 5])
    for sequence in sequences[1:]:
        runner.commit(sequence, [0])
    found.append(runner.forward([Segment(s, drafts[3:4]) for s in sequences]).logits)
    for sequence in sequences:
        runner.commit(sequence, ())
    found += [part for s in sequences for part in runner.keys_and_values(s)]
    for sequence in sequences:
        runner.free(sequence)
    return found


def folder_of(kind: str, zoo: Path) -> Path:
    return TARGET_DIR if kind == "demo" else make_model(kind, zoo)


@pytest.mark.one_of(5)
@pytest.mark.parametrize("numerics", ["portable", "fastest"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_variants_of_a_class_have_the_same_bits(
    kind: str, dtype: str, numerics: str, zoo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_class: dict[str, tuple[str, list[torch.Tensor]]] = {}
    for variant in kernels.runnable():
        monkeypatch.setenv("PACELINE_KERNELS", variant)
        runner = load_runner(
            folder_of(kind, zoo), dtype=DTYPES[dtype], numerics=numerics, kv_tokens=400
        )
        assert isinstance(runner._ops, NativeOps)
        name = runner._ops.numerics_class
        assert numerics == "fastest" or name == "portable"
        if name not in by_class:
            by_class[name] = variant, outputs(runner)
        first, expected = by_class[name]
        for found, wanted in zip(outputs(runner), expected, strict=True):
            assert torch.equal(found, wanted), f"{variant} differs from {first} in class {name}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_that_every_machine_has(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in kernels.runnable():
        monkeypatch.setenv("PACELINE_KERNELS", variant)
        runner = load_runner(TARGET_DIR, dtype=DTYPES[dtype], numerics="portable", kv_tokens=400)
        assert digest(outputs(runner)) == RECORDED["target", dtype], variant


def test_int8_drafts_are_those_that_every_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of integers: also a draft is the same everywhere, though nothing depends on it."""
    for variant in kernels.runnable():
        monkeypatch.setenv("PACELINE_KERNELS", variant)
        runner = load_runner(DRAFTER_DIR, int8=True, kv_tokens=400)
        sequence = runner.new_sequence()
        chain = runner.greedy_chain([sequence], [list(range(40, 60))], 12)
        found = outputs(runner)
        assert digest([torch.from_numpy(chain), *found]) == RECORDED["drafter", "int8"], variant


def digest(parts: list[torch.Tensor]) -> str:
    data = hashlib.sha256()
    for part in parts:
        data.update(part.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return data.hexdigest()[:32]


@cache
def portable_engine(variant: str) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_KERNELS", variant)
        return load_engine(numerics="portable")


@pytest.mark.one_of(2, slow=2)
@pytest.mark.parametrize("method", ["draft_model", "sequoia", "prompt_lookup"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_ars_on_the_lowest_and_on_the_highest_variant(
    method: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=16, ignore_eos=True)
    names = list(kernels.runnable())
    tokens = []
    for variant in (names[0], names[-1]):
        monkeypatch.setenv("PACELINE_KERNELS", variant)
        engine = portable_engine(variant)
        prompt = engine.tokenizer.encode("import os\n\ndef find_files(root):\n")
        for config in ("ar", method):
            length = {} if config == "ar" else {"length": "fixed"}
            (session,) = engine.generate(
                [prompt], params, SpeculationConfig(method=config, **length)
            )
            tokens.append(session.output_ids)
    assert all(each == tokens[0] for each in tokens)
