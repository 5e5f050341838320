"""Nothing loads that is not understood: what a folder may hold, and what is refused by name."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from paceline.errors import InvalidArgument, ModelNotFound, PacelineError
from paceline.loading import load_runner
from paceline.models.heads.base import HeadTarget
from paceline.models.layouts import check_quantization, load_tensors
from paceline.models.llama import LlamaRunner
from paceline.models.llama_config import LlamaConfig
from paceline.models.llama_tensors import load_weights
from paceline.models.seq2seq import Seq2SeqRunner
from paceline.train.checkpoints import load_model
from tests.core.test_llama_against_transformers import IDS, assert_close, ours, theirs
from tests.models.quantized import LAYOUTS, quantize
from tests.modelzoo import GENERAL_PATH_KINDS, VOCAB_SIZE, make_model

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip


def edited(
    folder: Path,
    to: Path,
    config: Callable[[dict[str, Any]], object] | None = None,
    weights: Callable[[dict[str, torch.Tensor]], object] | None = None,
) -> Path:
    """A copy of a model folder with another config.json, other weights, or both."""
    shutil.copytree(folder, to)
    values = json.loads((to / "config.json").read_text())
    tensors = load_file(to / "model.safetensors")
    if config is not None:
        config(values)
        (to / "config.json").write_text(json.dumps(values))
    if weights is not None:
        weights(tensors)
        save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


# --- quantised checkpoints -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantised_weights_are_refused_by_name(layout: str, zoo: Path, tmp_path: Path) -> None:
    folder = quantize(make_model("llama_gqa", zoo), layout, tmp_path / "model")
    method = LAYOUTS[layout][1]["quant_method"]
    loads: list[Callable[[], object]] = [
        lambda: load_runner(folder, device="cpu", general=True),
        lambda: load_model(folder),
    ]
    if method in ("gptq", "awq"):  # the fast path reads them: test_int4.py
        load_runner(folder, device="cpu")
    else:
        loads += [lambda: load_runner(folder, device="cpu"), lambda: HeadTarget.from_folder(folder)]
    for load in loads:
        with pytest.raises(InvalidArgument, match=f"quant_method {method}") as error:
            load()
        assert error.value.field == "quantization_config"
        assert "unquantised version" in str(error.value)

    # Without the field, the tensors give them away.
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    (folder / "config.json").write_text(json.dumps(values))
    for general in (False, True):
        with pytest.raises(PacelineError, match=r"model\.layers\.\d\.\w+\.\w+_proj"):
            load_runner(folder, device="cpu", general=general)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ("gptq", "bits 4")),
        ({"quantization_config": {"load_in_8bit": True}}, ("no quant_method", "load_in_8bit")),
        ({"text_config": {"quantization_config": {"quant_method": "x"}}}, ("text_config.", "x")),
        ({"quantization": {"bits": 4, "group_size": 64}}, ("quantization", "bits 4")),
        ({"compression_config": {"format": "pack-quantized"}}, ("pack-quantized",)),
        ({"quantization_config": "int8"}, ("int8",)),
    ],
)
def test_the_method_is_named(config: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgument) as error:
        check_quantization(config)
    assert all(part in str(error.value) for part in parts)
    check_quantization({"quantization_config": None, "text_config": None})


def test_encoder_decoder_models_too(tmp_path: Path) -> None:
    values = {"model_type": "t5", "quantization_config": {"quant_method": "quanto"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(InvalidArgument, match="quanto"):
        Seq2SeqRunner(tmp_path, device="cpu")


# --- tensors -------------------------------------------------------------------------------------

NORM = "model.layers.1.input_layernorm.weight"
ROTARY = "model.layers.{}.self_attn.rotary_emb.inv_freq"


def _codes(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM] = tensors[NORM].to(torch.int8)


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize(
    ("kind", "weights", "error", "parts"),
    [
        ("llama", _codes, InvalidArgument, (NORM, "int8", "float32")),
        (
            "llama", lambda t: t.update({f"model.extra.{i}": torch.ones(2) for i in range(5)}),
            InvalidArgument, ("model.extra.0", "model.extra.2", "and 2 more"),
        ),
        ("llama", lambda t: t.update({NORM: torch.ones(1, 64)}), ModelNotFound, (NORM, "(1, 64)")),
        ("llama", lambda t: t.pop("lm_head.weight"), ModelNotFound, ("lm_head.weight",)),
        (
            "mistral",
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            InvalidArgument, ("model.layers.0.self_attn.q_proj.bias", "mistral"),
        ),
        (
            "qwen2", lambda t: t.pop("model.layers.2.self_attn.k_proj.bias"),
            ModelNotFound, ("model.layers.2.self_attn.k_proj.bias",),
        ),
        (
            "qwen3", lambda t: t.pop("model.layers.2.self_attn.q_norm.weight"),
            ModelNotFound, ("model.layers.2.self_attn.q_norm.weight",),
        ),
    ],
)  # fmt: skip
def test_tensors_are_refused_by_name(
    kind: str, weights: Callable[[dict[str, torch.Tensor]], object], error: type[PacelineError],
    parts: tuple[str, ...], general: bool, zoo: Path, tmp_path: Path,
) -> None:  # fmt: skip
    folder = edited(make_model(kind, zoo), tmp_path / "model", weights=weights)
    with pytest.raises(error) as info:
        load_runner(folder, device="cpu", general=general)
    assert all(part in str(info.value) for part in parts), str(info.value)


@pytest.mark.one_of(2, slow=3)
@pytest.mark.parametrize("kind", GENERAL_PATH_KINDS)
def test_every_other_family_is_looked_through(kind: str, zoo: Path, tmp_path: Path) -> None:
    folder = make_model(kind, zoo)
    load_runner(folder, device="cpu")
    more = edited(folder, tmp_path / "more", weights=lambda t: t.update({"odd": torch.ones(3)}))
    with pytest.raises(InvalidArgument, match="odd"):
        load_runner(more, device="cpu")
    name = sorted(load_file(folder / "model.safetensors"))[-1]
    codes = edited(folder, tmp_path / "codes", weights=lambda t: t.update({name: t[name].byte()}))
    with pytest.raises(InvalidArgument, match=re.escape(name)) as error:
        load_runner(codes, device="cpu")
    assert "uint8" in str(error.value)


def test_what_a_class_ignores_stays_allowed(zoo: Path, tmp_path: Path) -> None:
    """GPT-2 checkpoints hold their causal masks, of bytes in some versions."""
    mask = {"transformer.h.0.attn.bias": torch.ones(1, 1, 512, 512, dtype=torch.uint8)}
    folder = edited(make_model("gpt2", zoo), tmp_path / "model", weights=lambda t: t.update(mask))
    load_runner(folder, device="cpu")


def test_pickled_weights_are_looked_through(zoo: Path, tmp_path: Path) -> None:
    folder = edited(make_model("gpt2", zoo), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    load_runner(folder, device="cpu")
    name = "transformer.ln_f.weight"
    torch.save(tensors | {name: tensors[name].to(torch.int8)}, folder / "pytorch_model.bin")
    with pytest.raises(InvalidArgument, match=r"transformer\.ln_f\.weight.*int8"):
        load_runner(folder, device="cpu")


def test_a_stored_copy_of_a_tied_head(zoo: Path, tmp_path: Path) -> None:
    tied = make_model("llama_tied", zoo)
    name = "model.embed_tokens.weight"
    same = edited(tied, tmp_path / "same", weights=lambda t: t.update(
        {"lm_head.weight": t[name].clone()}
    ))  # fmt: skip
    assert_close(ours(LlamaRunner(same), IDS), theirs(same, IDS), 1e-4)
    other = edited(tied, tmp_path / "other", weights=lambda t: t.update(
        {"lm_head.weight": t[name].nextafter(torch.tensor(9.0))}
    ))  # fmt: skip
    with pytest.raises(InvalidArgument, match=rf"lm_head\.weight differs from {name}") as error:
        LlamaRunner(other)
    assert error.value.field == "tie_word_embeddings"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "llama_linear_rope", "llama_yarn_rope"])
def test_stored_frequencies(kind: str, dtype: torch.dtype, zoo: Path, tmp_path: Path) -> None:
    """Old checkpoints store them; they must be those of config.json."""
    right = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    stored = {ROTARY.format(i): right.to(dtype, copy=True) for i in range(3)}
    folder = edited(make_model(kind, zoo), tmp_path / "old", weights=lambda t: t.update(stored))
    assert_close(ours(LlamaRunner(folder), IDS), theirs(folder, IDS), 1e-4)
    for layer, wrong in (
        (1, right * 1.1),
        (1, right[:4]),
        (3, right),  # of a layer that is not there
    ):
        name, more = ROTARY.format(layer), {ROTARY.format(layer): wrong.to(dtype, copy=True)}
        changed = edited(folder, tmp_path / "new", weights=lambda t, more=more: t.update(more))
        with pytest.raises(InvalidArgument, match=re.escape(name)):
            LlamaRunner(changed)
        shutil.rmtree(changed)


def test_shards_are_what_the_index_says(zoo: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make_model("llama_sharded", zoo), tmp_path / "model"))
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    places = json.loads(text)["weight_map"]
    name, shard = next(iter(places.items()))
    other = next(place for place in places.values() if place != shard)

    def refused(weight_map: dict[str, Any], *parts: str) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        for general in (False, True):
            with pytest.raises(ModelNotFound) as error:
                load_runner(folder, device="cpu", general=general)
            assert all(part in str(error.value) for part in parts)

    refused({**places, "model.ghost": shard}, "model.ghost", shard, "lacks")
    refused({n: p for n, p in places.items() if n != name}, name, shard, "does not put")
    refused({**places, name: other}, name)
    refused({**places, name: 3}, "index")
    index.write_text(text)
    tensors = load_file(folder / other) | {name: load_file(folder / shard)[name]}
    save_file(tensors, folder / other, {"format": "pt"})  # in two shards
    refused(places, name, other)
    with pytest.raises(ModelNotFound, match=other):
        load_tensors(folder)


# --- config.json ---------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "partial rotation": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "partial rotation inside": (
        "llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    "rope for each kind of layer": (
        "llama", {"rope_parameters": {"full_attention": YARN}}, "rope_parameters",
    ),
    "two types of rope": (
        "llama", {"rope_parameters": {"rope_type": "default", "type": "linear"}}, "type",
    ),
    "two ropes": ("llama", {"rope_scaling": YARN}, "rope_scaling"),
    "rope that changes with the length": (
        "llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type",
    ),
    "kind of a layer": ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
    "layers without a kind": ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
    "windows without a size": ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    "window of a Llama": ("llama", {"sliding_window": 8}, "sliding_window"),
    "layers of a Mistral": (
        "mistral_sliding", {"layer_types": ["full_attention"] * 3}, "layer_types",
    ),
    "odd groups of heads": ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
    "odd heads": ("llama", {"head_dim": 15}, "head_dim"),
    "heads that do not fit": ("llama", {"head_dim": None, "hidden_size": 63}, "hidden_size"),
    "a word for layers": ("qwen3", {"layer_types": "full_attention"}, "layer_types"),
    "a word for a number": ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    "no layers": ("llama", {"num_hidden_layers": 0}, "num_hidden_layers"),
    "a word for a flag": ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    "both directions": ("llama", {"is_causal": False}, "is_causal"),
    "capped logits": ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "scaled logits": ("llama", {"logits_scaling": 8.0}, "logits_scaling"),
    "biases that are not there": ("llama", {"attention_bias": True}, "self_attn.k_proj.bias"),
    "biases of the MLP that are not there": ("llama", {"mlp_bias": True}, "mlp.down_proj.bias"),
    "biases that are denied": ("llama_bias", {"attention_bias": False}, "self_attn.k_proj.bias"),
    "fewer layers": ("llama", {"num_hidden_layers": 2}, "model.layers.2."),
    "a tied head": ("llama", {"tie_word_embeddings": True}, "lm_head.weight"),
    "an own head": ("llama_tied", {"tie_word_embeddings": False}, "lm_head.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_are_refused_by_field(case: str, zoo: Path, tmp_path: Path) -> None:
    kind, changes, named = CONFIGS[case]
    folder = edited(make_model(kind, zoo), tmp_path / "model", config=lambda c: c.update(changes))
    with pytest.raises(PacelineError, match=re.escape(named)):
        LlamaRunner(folder)


@pytest.mark.parametrize(
    ("kind", "overrides", "absent"),
    [
        ("mistral", {"num_attention_heads": 8, "num_key_value_heads": 8}, "num_key_value_heads"),
        ("qwen3", {"head_dim": 128}, "head_dim"),
        ("mistral", {"sliding_window": 4096}, "sliding_window"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "use_cache"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
            "layer_types",
        ),
        (
            "llama_yarn_rope", {"max_position_embeddings": 2048},
            "max_position_embeddings",
        ),
    ],
)  # fmt: skip
def test_absent_keys_mean_what_transformers_takes(
    kind: str, overrides: dict[str, Any], absent: str, zoo: Path, tmp_path: Path
) -> None:
    folder = make_model(kind, zoo, **overrides)
    folder = edited(folder, tmp_path / "model", config=lambda c: c.pop(absent))
    assert_close(ours(LlamaRunner(folder), IDS), theirs(folder, IDS), 1e-4)
    assert set(load_weights(folder, LlamaConfig.from_folder(folder)))


# --- any edit ------------------------------------------------------------------------------------

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
]  # fmt: skip
ADDED = [
    "lm_head.weight", "lm_head.bias", "model.norm.bias", "model.embed_positions.weight",
    "model.layers.2.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias",
    "model.layers.1.self_attn.o_proj.bias", "model.layers.0.mlp.gate_proj.bias",
    "model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.q_proj.weight_scale",
    "model.layers.1.mlp.down_proj.SCB", "model.rotary_emb.inv_freq", ROTARY.format(0),
    "score.weight",
]  # fmt: skip
FLAGS = ["tie_word_embeddings", "attention_bias", "mlp_bias"]
EDITS = ("add", "drop", "rename", "retype", "reshape", "copy the head", "flip")


def _edit(
    draw: Callable[[Any], Any], config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> set[str]:
    """One random edit of a checkpoint, and the words of which a refusal must say one."""
    edit = draw(st.sampled_from(EDITS))
    name = draw(st.sampled_from(sorted(tensors)))
    if edit == "add":
        new = draw(st.sampled_from(ADDED))
        shape = draw(st.sampled_from([(16,), (64,), (VOCAB_SIZE, 64), (64, 64)]))
        right = new.endswith("inv_freq") and draw(st.booleans())
        tensors[new] = 10000.0 ** -(torch.arange(0, 32, 2) / 32) if right else torch.ones(shape)
        return {new}
    if edit == "flip":
        flag = draw(st.sampled_from(FLAGS))
        config[flag] = not config.get(flag, False)
        return {flag, "lm_head.weight"} if flag == FLAGS[0] else {flag, "_proj.bias"}
    if edit == "copy the head":
        tensors["lm_head.weight"] = tensors.get("model.embed_tokens.weight", torch.ones(2)).clone()
    elif edit == "drop":
        del tensors[name]
    elif edit == "rename":
        new = name.replace(*draw(st.sampled_from([("model.", ""), ("_proj", "_lin"), ("0", "7")])))
        tensors[new] = tensors.pop(name)
        return {name, new}
    elif edit == "retype":
        tensors[name] = tensors[name].to(draw(st.sampled_from(DTYPES)))
    else:
        tensors[name] = tensors[name].reshape(draw(st.sampled_from([(-1,), (1, -1), (2, -1)])))
    return {name, "lm_head.weight"} if edit == "copy the head" else {name}


@pytest.fixture(scope="module")
def plain(zoo: Path) -> dict[tuple[str, bool], tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """config.json and tensors of small models."""
    models = {}
    for kind in ("llama", "qwen2", "qwen3", "mistral"):
        for tied in (False, True):
            folder = make_model(kind, zoo, **SMALL, tie_word_embeddings=tied)
            config = json.loads((folder / "config.json").read_text())
            models[kind, tied] = config, load_file(folder / "model.safetensors")
    return models


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Casting complex values")
@settings(
    derandomize=True, deadline=None, max_examples=200, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.data())
def test_an_edited_checkpoint_is_right_or_refused(
    plain: dict[Any, Any], data: st.DataObject
) -> None:
    kind, tied = data.draw(st.sampled_from(sorted(plain)))
    config, tensors = (dict(part) for part in plain[kind, tied])
    named: set[str] = set()
    for _ in range(data.draw(st.integers(1, 2))):
        named |= _edit(data.draw, config, tensors)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        refusal = ""
        try:
            runner = LlamaRunner(folder, kv_tokens=64)
        except PacelineError as error:
            refusal = str(error)
        if refusal:
            assert any(word in refusal for word in named), (refusal, named)
        else:
            assert_close(ours(runner, IDS[:32]), theirs(folder, IDS[:32]), 1e-4)
