"""GPTQ's and AWQ's folders of 4 bits: every number exactly, and nothing that is not understood."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument, ModelNotFound, PacelineError
from paceline.loading import load_runner
from paceline.models import packed
from paceline.models.int4 import int4_format
from paceline.models.llama import LlamaRunner
from paceline.models.llama_config import LlamaConfig
from paceline.models.llama_tensors import load_weights, stored_weights
from paceline.models.native_ops import NativeOps
from paceline.models.packing import Packing
from paceline.models.quants import Quantised
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from tests.core.test_llama_against_transformers import ours
from tests.modelzoo import make_model

Tensors = dict[str, torch.Tensor]
IDS = np.arange(3, 40)
GPTQ: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False,
    "checkpoint_format": "gptq", "lm_head": False, "damp_percent": 0.01,
}  # fmt: skip
GPTQ_V2 = GPTQ | {"checkpoint_format": "gptq_v2"}
AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True,
    "modules_to_not_convert": None,
}  # fmt: skip
FORMATS = {
    "gptq": GPTQ, "gptq_v2": GPTQ_V2, "awq": AWQ, "whole": GPTQ | {"group_size": -1},
    "awq-64": AWQ | {"group_size": 64},
}  # fmt: skip


def word(codes: list[int]) -> int:
    """Eight codes in an int32, the first one lowest."""
    value = sum(code << 4 * i for i, code in enumerate(codes))
    return value - 2**32 if value >= 2**31 else value


def words(codes: list[list[int]], order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Each eight neighbours of a row in a word; nibble i holds code ``order[i]``."""
    return torch.tensor([
        [word([row[at + i] for i in order]) for at in range(0, len(row), 8)] for row in codes
    ], dtype=torch.int32)  # fmt: skip


def parts(
    form: dict[str, Any], codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor
) -> Tensors:
    """A layer in a format.

    Args:
        codes: [outputs, inputs].
        zeros, scales: [outputs, groups].
    """
    if form["quant_method"] == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": words(codes.T.tolist(), order), "qzeros": words(zeros.T.tolist(), order),
            "scales": scales.T.contiguous(),
        }  # fmt: skip
    stored = zeros - int(form["checkpoint_format"] == "gptq")
    group = codes.shape[1] // zeros.shape[1]
    return {
        "qweight": words(codes.tolist()).T.contiguous(), "qzeros": words(stored.T.tolist()),
        "scales": scales.T.contiguous(), "g_idx": (torch.arange(codes.shape[1]) // group).int(),
    }  # fmt: skip


def make(source: Path, to: Path, form: dict[str, Any]) -> Tensors:
    """A folder whose projections have 4 bits; returns the weights that they stand for."""
    shutil.copytree(source, to)
    draw = torch.Generator().manual_seed(5)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = meant[name] = tensor.half().float()
            continue
        outputs, inputs = tensor.shape
        group = inputs if form["group_size"] == -1 else form["group_size"]
        grouped = tensor.reshape(outputs, -1, group)
        least, most = grouped.amin(-1), grouped.amax(-1)
        scales = ((most - least) / 15).half()
        zeros = (-least / scales).round().clamp(1, 15).long()
        codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 15).long()
        codes[0, 0] = torch.randint(0, 16, (group,), generator=draw)
        layer = name.removesuffix(".weight")
        found = parts(form, codes.reshape(outputs, inputs), zeros, scales)
        stored |= {f"{layer}.{part}": value for part, value in found.items()}
        exact = scales.double()[..., None] * (codes - zeros[..., None])
        meant[name] = exact.float().reshape(outputs, inputs)
    save_file(stored, to / "model.safetensors", {"format": "pt"})
    configure(to, form)
    return meant


def configure(folder: Path, form: object) -> None:
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": form}
    (folder / "config.json").write_text(json.dumps(values))


def change(folder: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FORMATS[request.param]


@pytest.fixture
def source(zoo: Path) -> Path:
    return make_model("llama_gqa", zoo)


def test_every_weight_is_what_its_code_stands_for(
    form: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    meant = make(source, tmp_path / "model", form)
    found = load_weights(tmp_path / "model", LlamaConfig.from_folder(tmp_path / "model"))
    assert found.keys() == meant.keys()
    for name, tensor in meant.items():
        assert torch.equal(found[name].float(), tensor), name


def test_some_outputs(form: dict[str, Any], source: Path, tmp_path: Path) -> None:
    meant, folder = make(source, tmp_path / "model", form), tmp_path / "model"
    name = "model.layers.1.mlp.gate_proj.weight"
    tensor = stored_weights(folder, LlamaConfig.from_folder(folder))[name]
    for rows in (slice(0, 1), slice(3, 21), slice(8, 16), slice(31, None)):
        found = tensor.read(rows)
        assert isinstance(found, Quantised)
        assert found.bits == 4
        assert torch.equal(torch.from_numpy(found.floats()), meant[name][rows])


def test_the_runner_computes_with_them(form: dict[str, Any], source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    meant = make(source, folder, form)
    floats = tmp_path / "floats"
    shutil.copytree(source, floats)
    save_file(meant, floats / "model.safetensors", {"format": "pt"})
    runner = LlamaRunner(folder)
    assert runner.num_parameters == sum(tensor.numel() for tensor in meant.values())
    logits, expected = ours(runner, IDS), ours(LlamaRunner(floats), IDS)
    # Activations are rounded to 8 bits, as with GGUF files.
    error = (logits - expected).pow(2).mean().sqrt()
    assert 0 < error < 0.1 * expected.std()


def test_they_stay_in_four_bits(source: Path, tmp_path: Path) -> None:
    make(source, tmp_path / "model", AWQ)
    runner = LlamaRunner(tmp_path / "model")
    assert isinstance(runner._ops, NativeOps)
    assert runner._ops.packer.packings <= {
        Packing.NIBBLES, Packing.WIDE_NIBBLES, Packing.FLOATS, Packing.HALVES, Packing.DOTS,
        Packing.TILES,
    }  # fmt: skip
    assert runner._ops.packer.packings & {Packing.NIBBLES, Packing.WIDE_NIBBLES}


def test_without_the_kernels_they_are_multiplied_out(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meant = make(source, tmp_path / "model", GPTQ)
    floats = tmp_path / "floats"
    shutil.copytree(source, floats)
    save_file(meant, floats / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(NativeOps, "supports", lambda *_: False)
    assert torch.equal(ours(LlamaRunner(tmp_path / "model"), IDS), ours(LlamaRunner(floats), IDS))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_nothing(temperature: float, source: Path, tmp_path: Path) -> None:
    make(source, tmp_path / "model", GPTQ)
    engine = Engine(ModelTarget(load_runner(tmp_path / "model", kv_tokens=2000)))
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=1, ignore_eos=True)
    prompts = [IDS.tolist(), IDS[5:9].tolist() * 4]
    expected = [
        each.output_ids for each in engine.generate(prompts, params, SpeculationConfig(method="ar"))
    ]
    config = SpeculationConfig(method="prompt_lookup", length="fixed")
    drafted = [each.output_ids for each in engine.generate(prompts, params, config)]
    assert drafted == expected


def test_the_kept_copy_knows_the_format(
    source: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same files say something else with another config.json."""
    monkeypatch.setattr(packed, "LEAST_WEIGHTS", 0)
    folder = tmp_path / "model"
    make(source, folder, GPTQ)
    first = ours(LlamaRunner(folder), IDS)
    configure(folder, GPTQ_V2)
    assert not torch.equal(ours(LlamaRunner(folder), IDS), first)


def test_biases_that_add_nothing(source: Path, tmp_path: Path) -> None:
    """AutoGPTQ writes one for every layer."""
    folder, name = tmp_path / "model", "model.layers.0.mlp.up_proj.bias"
    make(source, folder, GPTQ)
    expected = ours(LlamaRunner(folder), IDS)
    change(folder, lambda tensors: tensors.update({name: torch.zeros(128).half()}))
    assert torch.equal(ours(LlamaRunner(folder), IDS), expected)
    change(folder, lambda tensors: tensors.update({name: torch.ones(128).half()}))
    with pytest.raises(InvalidArgument, match=name.replace(".", r"\.")):
        LlamaRunner(folder)


LAYER = "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize(
    ("form", "edit", "error", "fragments"),
    [
        (GPTQ, lambda t: t.pop(f"{LAYER}.scales"), ModelNotFound, (f"lack {LAYER}.scales",)),
        (AWQ, lambda t: t.pop(f"{LAYER}.qzeros"), ModelNotFound, (f"lack {LAYER}.qzeros",)),
        (AWQ, lambda t: t.pop(f"{LAYER}.qweight"), PacelineError, (LAYER,)),
        (
            GPTQ, lambda t: t.update({f"{LAYER}.g_idx": t[f"{LAYER}.g_idx"].flip(0)}),
            InvalidArgument, (f"{LAYER}.g_idx", "desc_act"),
        ),
        (
            GPTQ, lambda t: t.update({f"{LAYER}.scales": t[f"{LAYER}.scales"][:1]}),
            ModelNotFound, (f"{LAYER}.scales", "shape"),
        ),
        (
            AWQ, lambda t: t.update({f"{LAYER}.scales": t[f"{LAYER}.scales"].float()}),
            ModelNotFound, (f"{LAYER}.scales", "float16"),
        ),
        (
            AWQ, lambda t: t.update({"model.layers.1.extra": torch.ones(2).int()}),
            InvalidArgument, ("model.layers.1.extra", "int32"),
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(
    form: dict[str, Any], edit: Callable[[Tensors], object], error: type[PacelineError],
    fragments: tuple[str, ...], source: Path, tmp_path: Path,
) -> None:  # fmt: skip
    make(source, tmp_path / "model", form)
    change(tmp_path / "model", edit)
    with pytest.raises(error) as info:
        LlamaRunner(tmp_path / "model")
    assert all(fragment in str(info.value) for fragment in fragments), str(info.value)


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        (GPTQ | {"bits": 8}, "4 bits"),
        (GPTQ | {"group_size": 16}, "a multiple of 32"),
        (GPTQ | {"group_size": None}, "a multiple of 32"),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq or gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "dynamic"),
        (GPTQ | {"pack_dtype": "int16"}, "int32"),
        (AWQ | {"version": "gemv"}, "version gemm"),
        (AWQ | {"zero_point": False}, "zero_point true"),
    ],
)
def test_formats_that_are_refused(values: dict[str, Any], allowed: str) -> None:
    with pytest.raises(InvalidArgument) as info:
        int4_format({"quantization_config": values})
    assert info.value.field == "quantization_config"
    assert allowed in str(info.value)


def test_other_methods_are_another_function_s(source: Path) -> None:
    assert int4_format({}) is None
    assert int4_format({"quantization_config": {"quant_method": "fp8"}}) is None
