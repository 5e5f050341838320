"""Architectures that declare differences from Llama: exact as Llama is, and nothing unknown loads.

Their logits against transformers are in test_llama_against_transformers.py.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from paceline.diffusion.model import MaskedModel
from paceline.errors import InvalidArgument, ModelNotFound, ResourceExhausted
from paceline.loading import load_engine, load_runner
from paceline.models import kernels
from paceline.models.architectures import MODEL_TYPES
from paceline.models.base import Segment
from paceline.models.heads.base import HeadTarget
from paceline.models.layouts import read_config
from paceline.models.llama import LlamaRunner
from paceline.models.llama_config import LlamaConfig
from paceline.models.packing import Packing
from paceline.models.torch_ops import TorchOps
from paceline.tree import leaves, path_to
from paceline.types import Need
from tests.core import runners
from tests.core.suite import CASES, OTHER_CASES, Suite, count_for
from tests.core.test_batch_invariance import Case, cases, free, token_by_token, verify
from tests.core.test_llama_against_transformers import assert_close, ours, theirs
from tests.core.test_variants import outputs
from tests.heads import untrained
from tests.models.test_int4 import GPTQ
from tests.models.test_int4 import make as make_int4
from tests.modelzoo import DIFFERENT_KINDS, FAST_PATH_KINDS, VOCAB_SIZE, make_model

IDS = np.random.default_rng(3).integers(0, VOCAB_SIZE, 90)
STACKED = ("gpt_oss", "llama4")
"""Kinds whose experts are one tensor."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def test_they_take_the_fast_path(zoo: Path) -> None:
    for kind in DIFFERENT_KINDS:
        assert isinstance(load_runner(make_model(kind, zoo), kv_tokens=64), LlamaRunner)


def test_each_has_a_checkpoint_here_and_a_line_in_the_documents(zoo: Path) -> None:
    folders = [make_model(kind, zoo) for kind in FAST_PATH_KINDS]
    assert {read_config(folder)["model_type"] for folder in folders} == {*MODEL_TYPES}
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    section = text.partition("## Architectures\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \| ", section, re.MULTILINE)[1:] == [*MODEL_TYPES]


def test_plain_types_declare_nothing(zoo: Path) -> None:
    for kind in FAST_PATH_KINDS:
        config = LlamaConfig.from_folder(make_model(kind, zoo))
        declared = config.differs.declared(), config.ropes, config.local_rope, config.routings
        assert config.is_plain == (not any(declared)), kind


def test_what_computes_layers_of_its_own_takes_plain_types(zoo: Path) -> None:
    with pytest.raises(InvalidArgument, match="granite"):
        MaskedModel.load(make_model("granite", zoo))


# --- a row depends on nothing but that row --------------------------------------------------------


@pytest.mark.slow
@pytest.mark.one_of(5)
@pytest.mark.parametrize("ops", ["native", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", DIFFERENT_KINDS)
def test_trees_beside_others_have_the_logits_of_one_token_at_a_time(
    kind: str, dtype: str, ops: str, zoo: Path
) -> None:
    load = runners.load_runner if ops == "native" else runners.load_runner_without_kernels
    runner = load(make_model(kind, zoo), dtype=DTYPES[dtype], batch_invariant=True, kv_tokens=3000)

    @settings(max_examples=2 if isinstance(runner._ops, TorchOps) else 6)
    @given(cases())
    def check(case: Case) -> None:
        sequence, mates, logits = verify(runner, case)
        for leaf in (leaves(case.parents) or [-1])[:3]:
            path = list(path_to(case.parents, leaf))
            chain = np.concatenate([case.prompt, case.drafted[path]])
            alone = token_by_token(runner, chain)[len(case.prompt) - 1 :]
            assert torch.equal(logits[[0, *(node + 1 for node in path)]], alone)
        free(runner, [sequence, *mates])

    check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", DIFFERENT_KINDS)
def test_variants_of_class_portable_have_the_same_bits(
    kind: str, dtype: str, zoo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: list[torch.Tensor] = []
    for variant in kernels.runnable():
        monkeypatch.setenv("PACELINE_KERNELS", variant)
        runner = runners.load_runner(
            make_model(kind, zoo), dtype=DTYPES[dtype], numerics="portable", kv_tokens=400
        )
        found = outputs(runner)
        expected = expected or found
        assert all(map(torch.equal, found, expected)), variant


# --- the exactness suite -------------------------------------------------------------------


@pytest.fixture(scope="module")
def suite_of(zoo: Path) -> Callable[[str], Suite]:
    """The suite over a checkpoint of an architecture; a smaller one drafts."""

    @cache
    def suite(kind: str) -> Suite:
        folder = make_model(kind, zoo)
        drafter = make_model(kind, zoo, num_hidden_layers=2)
        engine = load_engine(folder, drafter, kv_tokens=6000)
        return Suite(engine, 8, 12, batch=8, folder=folder)

    return suite


@pytest.mark.one_of(29, slow=9)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("method", "variant"), CASES)
@pytest.mark.parametrize("kind", DIFFERENT_KINDS)
def test_tokens_of_every_method_are_those_of_ar(
    kind: str, method: str, variant: str, batch: int, suite_of: Callable[[str], Suite]
) -> None:
    suite_of(kind).check(method, variant, batch, count_for(batch))


@pytest.mark.nightly
@pytest.mark.parametrize(("method", "variant"), OTHER_CASES)
@pytest.mark.parametrize("kind", DIFFERENT_KINDS)
def test_methods_with_other_tokens_run_to_the_end(
    kind: str, method: str, variant: str, suite_of: Callable[[str], Suite]
) -> None:
    suite_of(kind).check_progress(method, variant, 8)


# --- what works for Llama -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DIFFERENT_KINDS)
def test_an_early_exit_goes_on_to_the_same_logits(kind: str, zoo: Path) -> None:
    """States of every layer, an exit's logits from them, and the rest of the layers later."""
    runner = LlamaRunner(make_model(kind, zoo), kv_tokens=400)
    whole = runner.new_sequence()
    wants = frozenset({Need.LAYER_STATES, Need.HIDDEN_STATES})
    result = runner.forward([Segment(whole, IDS)], wants)
    states = result.extras[Need.LAYER_STATES]
    hidden = result.extras[Need.HIDDEN_STATES]
    assert torch.equal(runner.logits_of(states[:, -1].contiguous()), result.logits)
    assert torch.equal(runner.logits_of_hidden(hidden), result.logits)
    early = runner.new_sequence()
    first = range(runner.config.num_layers - 1)
    exits = runner.forward([Segment(early, IDS, layers=first, resumable=True)])
    assert torch.equal(exits.logits, runner.logits_of(states[:, len(first) - 1].contiguous()))
    later = runner.forward([Segment(early, IDS[:0], resume=tuple(range(len(IDS))))])
    assert torch.equal(later.logits, result.logits)
    free(runner, [whole, early])


@pytest.mark.parametrize("kind", DIFFERENT_KINDS)
def test_a_chain_in_one_call_has_the_tokens_of_single_forwards(kind: str, zoo: Path) -> None:
    runner = runners.load_runner(make_model(kind, zoo), kv_tokens=400)
    chained, single = runner.new_sequence(), runner.new_sequence()
    chain = runner.greedy_chain([chained], [IDS.tolist()], 10)[:, 0]
    ids, found = IDS, []
    for _ in range(10):
        token = int(runner.forward([Segment(single, ids, logits="last")]).logits.argmax())
        runner.commit(single, range(len(ids)))
        found.append(token)
        ids = np.array([token])
    assert chain.tolist() == found
    free(runner, [chained, single])


@pytest.mark.parametrize("kind", DIFFERENT_KINDS)
def test_a_prefix_of_an_earlier_session_is_read(kind: str, zoo: Path) -> None:
    runner = runners.load_runner(make_model(kind, zoo), kv_tokens=400)
    first, second = runner.new_sequence(), runner.new_sequence()
    expected = runner.forward([Segment(first, IDS)]).logits
    runner.commit(first, range(len(IDS)))
    runner.publish(first, IDS.tolist(), "")
    runner.free(first)
    runner.adopt(second, IDS.tolist(), "")
    assert 64 <= second.length < len(IDS)
    rest = runner.forward([Segment(second, IDS[second.length :])]).logits
    assert torch.equal(rest, expected[second.length :])
    runner.free(second)


@pytest.mark.parametrize("kind", DIFFERENT_KINDS)
def test_heads_train_on_what_they_draft_from(kind: str, zoo: Path) -> None:
    folder = make_model(kind, zoo)
    runner = LlamaRunner(folder, kv_tokens=64)
    loaded, stored = HeadTarget.of_runner(folder, runner), HeadTarget.from_folder(folder)
    assert torch.equal(loaded.embedding, stored.embedding)
    assert torch.equal(loaded.lm_head, stored.lm_head)
    hidden = torch.randn(7, runner.config.hidden_size, generator=torch.Generator().manual_seed(1))
    assert_close(stored.logits(hidden), loaded.logits(hidden), 1e-5)
    with pytest.raises(InvalidArgument, match=runner.config.model_type):
        untrained("ppd", stored).bind(folder)
    with pytest.raises(InvalidArgument, match=runner.config.model_type):
        untrained("eagle3", stored, shallow_layers=1)


@pytest.mark.parametrize("dtype", ["q8_0", "int8"])
@pytest.mark.parametrize("kind", DIFFERENT_KINDS)
def test_rounded_weights_give_nearly_the_same(kind: str, dtype: str, zoo: Path) -> None:
    folder = make_model(kind, zoo)
    exact = ours(LlamaRunner(folder), IDS)
    rounded = load_runner(folder, dtype=dtype, kv_tokens=400)
    assert isinstance(rounded, LlamaRunner)
    error = (ours(rounded, IDS) - exact).pow(2).mean().sqrt()
    assert 0 < error < 0.3 * exact.std()
    together = ours(rounded, IDS)[-9:]
    assert torch.equal(together, token_by_token(rounded, IDS)[-9:])


@pytest.mark.parametrize("kind", [kind for kind in DIFFERENT_KINDS if kind not in STACKED])
def test_weights_of_four_bits(kind: str, zoo: Path, tmp_path: Path) -> None:
    source, folder, floats = make_model(kind, zoo), tmp_path / "model", tmp_path / "floats"
    meant = make_int4(source, folder, GPTQ)
    shutil.copytree(source, floats)
    save_file(meant, floats / "model.safetensors", {"format": "pt"})
    logits, expected = ours(LlamaRunner(folder), IDS), ours(LlamaRunner(floats), IDS)
    error = (logits - expected).pow(2).mean().sqrt()
    assert 0 < error < 0.15 * expected.std()  # activations are rounded to 8 bits


@pytest.mark.parametrize("kind", STACKED)
def test_four_bits_are_refused_where_experts_are_one_tensor(
    kind: str, zoo: Path, tmp_path: Path
) -> None:
    form = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    folder = edited(make_model(kind, zoo), tmp_path / "model", quantization_config=form)
    with pytest.raises(InvalidArgument, match=r"quantization_config.*gptq"):
        LlamaRunner(folder)


# --- what single architectures declare ------------------------------------------------------------


def edited(folder: Path, to: Path, **config: Any) -> Path:
    """A copy with other values in its config.json; None removes a key."""
    shutil.copytree(folder, to)
    raw = json.loads((folder / "config.json").read_text()) | config
    raw = {key: value for key, value in raw.items() if value is not None}
    (to / "config.json").write_text(json.dumps(raw))
    return to


OVERRIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "more heads than their keys": ("olmo2", {"num_key_value_heads": 4, "head_dim": 16}),
    "no multipliers": (
        "granite",
        {"attention_multiplier": 0.25, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
         "logits_scaling": 1.0},
    ),
    "layers by a list": ("smollm3", {"no_rope_layers": [1, 0, 0, 1]}),
    "windows without positions": ("smollm3", {"use_sliding_window": True, "sliding_window": 11}),
    "an odd part of a head": (
        "phi3", {"partial_rotary_factor": 0.75,
                 "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    ),
    "whole heads": (
        "phi3", {"partial_rotary_factor": 1.0, "rope_parameters": {"rope_type": "default"}},
    ),
    "scores without a cap": ("gemma2", {"attn_logit_softcapping": None}),
    "logits without a cap": ("gemma2", {"final_logit_softcapping": None}),
    "tied": ("gemma2", {"tie_word_embeddings": True}),
    "capped logits": ("gemma3", {"final_logit_softcapping": 7.0}),
    "every second layer local": (
        "gemma3", {"layer_types": ["sliding_attention", "full_attention"] * 3
                   + ["sliding_attention"]},
    ),
    "shares as they are": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 8}),
    "experts in every second layer": (
        "qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "num_experts_per_tok": 1},
    ),
    "other clamps": ("gpt_oss", {"swiglu_limit": 0.4, "swiglu_alpha": 1.0}),
    "windows in other layers": (
        "gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "no biases of attention": ("gpt_oss", {"attention_bias": False}),
    "no norms, no temperatures": (
        "llama4", {"use_qk_norm": False, "attn_temperature_tuning": False},
    ),
    "other temperatures": ("llama4", {"floor_scale": 3, "attn_scale": 1.5}),
    "experts in every third layer": (
        "llama4", {"moe_layers": None, "interleave_moe_layer_step": 3, "num_experts_per_tok": 1},
    ),
    "no experts": ("llama4", {"moe_layers": []}),
    "experts in all layers, and all of them": (
        "llama4", {"moe_layers": None, "num_experts_per_tok": 6},
    ),
    "chunks beside others": (
        "llama4", {"no_rope_layers": [0, 1, 1, 0], "attention_chunk_size": 7,
                   "layer_types": ["chunked_attention", "full_attention"] * 2},
    ),
    "positions in all layers": ("llama4", {"no_rope_layers": [1, 1, 1, 1]}),
    "biases, whole chunks": (
        "llama4", {"attention_bias": True, "attention_chunk_size": 512,
                   "rope_parameters": {"rope_type": "default", "rope_theta": 2000.0}},
    ),
    "windows beside experts": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", OVERRIDES)
def test_other_values_of_what_is_declared(case: str, zoo: Path) -> None:
    kind, overrides = OVERRIDES[case]
    folder = make_model(kind, zoo, **overrides)
    expected = theirs(folder, IDS)
    tolerance = 1e-4 * max(1.0, float(expected.std()))
    assert_close(ours(LlamaRunner(folder), IDS), expected, tolerance)
    assert_close(ours(runners.load_runner_without_kernels(folder), IDS), expected, tolerance)


def test_keys_of_older_checkpoints(zoo: Path, tmp_path: Path) -> None:
    gemma = make_model("gemma3", zoo)
    older = edited(
        gemma, tmp_path / "gemma3", rope_parameters=None, layer_types=None, rope_theta=1e6,
        rope_local_base_freq=1e4, rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=6,
    )  # fmt: skip
    assert torch.equal(ours(LlamaRunner(older), IDS), ours(LlamaRunner(gemma), IDS))
    phi = make_model("phi3", zoo)
    rope = json.loads((phi / "config.json").read_text())["rope_parameters"]
    scaling = {"type": "su"} | {name: rope[name] for name in ("short_factor", "long_factor")}
    older = edited(
        phi, tmp_path / "phi3", rope_parameters=None, rope_theta=1e4, rope_scaling=scaling
    )
    assert torch.equal(ours(LlamaRunner(older), IDS), ours(LlamaRunner(phi), IDS))
    scout = make_model("llama4", zoo)
    rope = dict(read_config(scout)["rope_parameters"])
    older = edited(
        scout, tmp_path / "llama4", rope_parameters=None, rope_theta=rope.pop("rope_theta"),
        rope_scaling=rope, layer_types=None, no_rope_layers=[],
    )  # fmt: skip
    assert torch.equal(ours(LlamaRunner(older), IDS), ours(LlamaRunner(scout), IDS))
    moe = make_model("qwen3_moe", zoo)
    older = edited(moe, tmp_path / "moe", num_local_experts=None, num_experts=8)
    assert torch.equal(ours(LlamaRunner(older), IDS), ours(LlamaRunner(moe), IDS))


def mxfp4(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], ...]:
    """A gpt-oss checkpoint whose experts are random codes, and one with what they stand for."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw, codes, floats = torch.Generator().manual_seed(2), dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, inputs, outputs = tensor.shape
            shape = count, outputs, inputs // 32
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=draw)
            scales = torch.randint(122, 127, shape, dtype=torch.uint8, generator=draw)
            del codes[name]
            codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            meant = convert_moe_packed_tensors(blocks.clone(), scales.clone())
            floats[name] = meant.float().contiguous()
    return codes, floats


def test_experts_in_mxfp4_are_taken_as_they_are(zoo: Path, tmp_path: Path) -> None:
    folder = make_model("gpt_oss", zoo)
    codes, floats = mxfp4(load_file(folder / "model.safetensors"))
    form = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    small = edited(folder, tmp_path / "codes", quantization_config=form)
    save_file(codes, small / "model.safetensors", {"format": "pt"})
    wide = edited(folder, tmp_path / "floats")
    save_file(floats, wide / "model.safetensors", {"format": "pt"})
    runner = LlamaRunner(small)
    logits = ours(runner, IDS)
    assert torch.equal(logits, ours(LlamaRunner(wide), IDS))
    assert runner.fingerprint == LlamaRunner(wide).fingerprint
    assert_close(logits, theirs(wide, IDS), 2e-4)
    assert {w.packing for w in runner.products if w.num_outputs == 64} >= {Packing.HALVES}
    name = "model.layers.1.mlp.experts.down_proj_scales"
    for wrong in (codes[name][:, :-1].contiguous(), codes[name].float()):
        save_file(codes | {name: wrong}, small / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelNotFound, match=name):
            LlamaRunner(small)
    save_file(
        {key: value for key, value in codes.items() if key != name},
        small / "model.safetensors", {"format": "pt"},
    )  # fmt: skip
    with pytest.raises(ModelNotFound, match=name):
        LlamaRunner(small)
    save_file(codes, wide / "model.safetensors", {"format": "pt"})  # and no word about it
    with pytest.raises(InvalidArgument, match="uint8"):
        LlamaRunner(wide)


def test_longrope_ends_where_its_frequencies_would_change(zoo: Path) -> None:
    """Longer texts have other ones from their first token on, which no cache could follow."""
    runner = LlamaRunner(make_model("phi3", zoo), kv_tokens=300)
    assert runner.context_length == 256
    sequence = runner.new_sequence()
    with pytest.raises(ResourceExhausted, match="context of 256"):
        runner.forward([Segment(sequence, np.zeros(257, np.int64))])
    runner.free(sequence)


def test_keys_that_llama4_lacks_have_the_values_of_transformers() -> None:
    from transformers import Llama4TextConfig

    whole = Llama4TextConfig(num_hidden_layers=9).to_dict()
    keys = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads")  # fmt: skip
    short = {key: whole[key] for key in keys}
    assert LlamaConfig.from_dict(short) == LlamaConfig.from_dict(whole)


def test_the_text_model_of_one_that_sees_pictures(zoo: Path, tmp_path: Path) -> None:
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    text, folder = make_model("llama4", zoo), tmp_path / "model"
    vision = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "intermediate_size": 64, "projector_input_dim": 32,
        "projector_output_dim": 32, "vision_output_dim": 32,
    }  # fmt: skip
    config = Llama4Config(text_config=read_config(text), vision_config=vision)
    model = Llama4ForConditionalGeneration(config)
    model.language_model.load_state_dict(load_file(text / "model.safetensors"))
    model.save_pretrained(folder)
    shutil.copy(text / "tokenizer.json", folder)
    assert any("vision" in name for name in load_file(folder / "model.safetensors"))
    runner, alone = (load_runner(each, kv_tokens=400) for each in (folder, text))
    assert isinstance(runner, LlamaRunner)
    assert isinstance(alone, LlamaRunner)
    assert torch.equal(ours(runner, IDS), ours(alone, IDS))
    assert runner.fingerprint == alone.fingerprint
    assert torch.equal(HeadTarget.from_folder(folder).lm_head, alone.lm_head)
    with pytest.raises(InvalidArgument, match="text_config"):
        load_runner(edited(folder, tmp_path / "none", text_config=None))
    form = {"quant_method": "compressed-tensors"}
    with pytest.raises(InvalidArgument, match="quantization_config"):
        load_runner(edited(folder, tmp_path / "codes", quantization_config=form))


def test_a_branch_of_a_tree_begins_a_chunk(zoo: Path) -> None:
    """Two branches pass the end of a chunk at other depths of the tree."""
    runner = LlamaRunner(make_model("llama4", zoo), kv_tokens=400)
    chunk = read_config(make_model("llama4", zoo))["attention_chunk_size"]
    for start in range(3 * chunk - 4, 3 * chunk + 1):
        sequence = runner.new_sequence()
        runner.forward([Segment(sequence, IDS[:start], logits="none")])
        runner.commit(sequence, range(start))
        parents = np.array([-1, 0, 1, 2, 3, 0, 5, 6, -1])
        tokens = IDS[start : start + len(parents)]
        found = runner.forward([Segment(sequence, tokens, parents)]).logits
        for leaf in leaves(parents):
            path = list(path_to(parents, leaf))
            whole = np.concatenate([IDS[:start], tokens[path]])
            assert torch.equal(ours(runner, whole)[start:], found[path])
        runner.free(sequence)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another activation": ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
    "Gemma's activation": ("olmo2", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
    "a multiplier": ("smollm3", {"residual_multiplier": 0.5}, "residual_multiplier"),
    "a multiplier of 0": ("granite", {"residual_multiplier": 0}, "residual_multiplier"),
    "a word for a multiplier": ("granite", {"logits_scaling": "8"}, "logits_scaling"),
    "too short a list": ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    "layers without positions": ("granite", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers"),
    "part of a head": ("olmo2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "more than a head": ("phi3", {"rope_parameters": {
        "rope_type": "default", "partial_rotary_factor": 1.5}}, "partial_rotary_factor"),
    "yarn for Phi-3": ("phi3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
    "factors of another head": ("phi3", {"rope_parameters": {
        "rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factor"),
    "capped scores of a Gemma 3": ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit"),
    "one rope for Gemma 3": (
        "gemma3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters",
    ),
    "both directions": (
        "gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention",
    ),
    "two numbers of experts": ("qwen3_moe", {"num_experts": 4}, "num_local_experts"),
    "more than all experts": ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    "codes of another kind": (
        "gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config",
    ),
    "codes of another model": (
        "olmo2", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config",
    ),
    "part of a head of Llama 4": ("llama4", {"partial_rotary_factor": 0.5}, "partial_rotary"),
    "another kind of layer": ("llama4", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    "chunks without a size": ("llama4", {"attention_chunk_size": 0}, "attention_chunk_size"),
    "a word for a layer": ("llama4", {"moe_layers": ["2"]}, "moe_layers"),
    "a number for layers": ("llama4", {"moe_layers": 2}, "moe_layers"),
    "no step": ("llama4", {"moe_layers": None, "interleave_moe_layer_step": 0}, "interleave_moe"),
    "a word for a norm": ("llama4", {"use_qk_norm": "yes"}, "use_qk_norm"),
    "a scale of 0": ("llama4", {"floor_scale": 0}, "floor_scale"),
    "temperatures by word": ("llama4", {"attn_temperature_tuning": 4}, "attn_temperature_tuning"),
    "a negative temperature": ("llama4", {"attn_scale": -0.1}, "attn_scale"),
    "half a layer without positions": (
        "llama4", {"no_rope_layers": [1, 0.5, 1, 0]}, "no_rope_layers",
    ),
    "more than all of Llama 4's": ("llama4", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
    "Llama 4 with another activation": ("llama4", {"hidden_act": "gelu"}, "hidden_act"),
    "other experts of Llama 4": ("llama4", {"intermediate_size": 48}, "feed_forward.experts"),
    "an expert too few": ("llama4", {"num_local_experts": 5}, "feed_forward.experts"),
    "norms for Granite": ("granite", {"use_qk_norm": True}, "use_qk_norm"),
    "chunks for Granite": ("granite", {"attention_chunk_size": 16}, "attention_chunk_size"),
    "a dense layer's weights": ("qwen3_moe", {"mlp_only_layers": []}, "model.layers.1.mlp."),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_are_not_computed_are_refused_by_name(
    case: str, zoo: Path, tmp_path: Path
) -> None:
    kind, config, named = REFUSED[case]
    with pytest.raises((InvalidArgument, ModelNotFound), match=named):
        LlamaRunner(edited(make_model(kind, zoo), tmp_path / "model", **config))


@pytest.mark.parametrize("kind", DIFFERENT_KINDS)
def test_every_tensor_is_taken_and_no_other(kind: str, zoo: Path, tmp_path: Path) -> None:
    folder = make_model(kind, zoo)
    stored = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(5)
    for name in rng.choice(sorted(stored), 4, replace=False).tolist():
        to = edited(folder, tmp_path / name)
        rest = {other: tensor for other, tensor in stored.items() if other != name}
        save_file(rest, to / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelNotFound, match=name):
            LlamaRunner(to)
        added = f"{name}_extra"
        save_file(stored | {added: torch.ones(2)}, to / "model.safetensors", {"format": "pt"})
        with pytest.raises(InvalidArgument, match=added):
            LlamaRunner(to)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("granite", {"residual_multiplier": 0.5}),
        ("granite", {"logits_scaling": 2.0}),
        ("granite", {"embedding_multiplier": 3.0}),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
        ("gemma2", {"attn_logit_softcapping": 5.0}),
        ("gemma2", {"query_pre_attn_scalar": 16}),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_theta": 2e4}}}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("gpt_oss", {"swiglu_limit": 2.0}),
        ("llama4", {"attention_chunk_size": 17}),
        ("llama4", {"floor_scale": 9}),
        ("llama4", {"use_qk_norm": False}),
        ("llama4", {"num_experts_per_tok": 1}),
    ],
)
def test_the_fingerprint_knows_what_is_declared(
    kind: str, config: dict[str, Any], zoo: Path, tmp_path: Path
) -> None:
    folder = make_model(kind, zoo)
    other = LlamaRunner(edited(folder, tmp_path / "other", **config), kv_tokens=64)
    assert other.fingerprint.weights != LlamaRunner(folder, kv_tokens=64).fingerprint.weights
