"""MTP layers of Qwen3-Next's, GLM-4.5's and DeepSeek-V3's kinds draft for targets on the general
path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.models.heads import HeadLibrary
from paceline.models.heads.base import HeadTarget
from paceline.models.heads.published import load_published, mtp_layer_in
from paceline.models.transformers import TransformersRunner
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from tests.modelzoo import VOCAB_SIZE, make_model

SIZE = 48
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": SIZE, "intermediate_size": 64,
    "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 256,
    "initializer_range": 0.2, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
# transformers leaves the MTP layer aside at these depths alone: those of the published models.
DEEPSEEK_V3 = {
    **SMALL, "num_hidden_layers": 61, "num_key_value_heads": 4, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
GLM4_MOE = {**SMALL, "num_hidden_layers": 46, "head_dim": 16, "use_qk_norm": True}

QWEN3_5: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": SIZE, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip


def _qwen3_next(folder: Path) -> Path:
    return make_model("qwen3_next", folder, hidden_size=SIZE)


def _saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder / "model")
    return folder / "model"


def _deepseek_v3(folder: Path) -> Path:
    torch.manual_seed(0)
    return _saved(DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK_V3)), folder)


def _glm4_moe(folder: Path) -> Path:
    torch.manual_seed(0)
    return _saved(Glm4MoeForCausalLM(Glm4MoeConfig(**GLM4_MOE)), folder)


def _qwen3_5(folder: Path) -> Path:
    torch.manual_seed(0)
    return _saved(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**QWEN3_5)), folder)


# Their layer is under `mtp.`, and their norms multiply by one more than the weight.
QWEN_KINDS = ("qwen3_next", "qwen3_5_text")
MAKERS = {
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
}


def with_layer(kind: str, folder: Path) -> Path:
    """A checkpoint of this kind whose MTP layer has the weights of a full layer of the model."""
    target = MAKERS[kind](folder)
    tensors = load_file(target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    count = config["num_hidden_layers"]
    qwen = kind in QWEN_KINDS
    source = config["layer_types"].index("full_attention") if qwen else count - 1
    before, after = f"model.layers.{source}.", "mtp.layers.0." if qwen else f"model.layers.{count}."
    inside = {
        name.replace(before, after, 1): value.clone()
        for name, value in tensors.items()
        if name.startswith(before)
    }
    generator = torch.Generator().manual_seed(1)
    norms = torch.rand(3, SIZE, generator=generator) + 0.5
    fc = torch.randn(SIZE, 2 * SIZE, generator=generator) / SIZE**0.5
    if qwen:
        inside |= {
            "mtp.fc.weight": fc, "mtp.pre_fc_norm_embedding.weight": norms[0],
            "mtp.pre_fc_norm_hidden.weight": norms[1], "mtp.norm.weight": norms[2],
        }  # fmt: skip
    else:
        inside |= {
            f"{after}eh_proj.weight": fc, f"{after}enorm.weight": norms[0],
            f"{after}hnorm.weight": norms[1], f"{after}shared_head.norm.weight": norms[2],
            f"{after}shared_head.head.weight": tensors["lm_head.weight"].clone(),
            f"{after}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        }  # fmt: skip
    save_file(tensors | inside, target / "model.safetensors", {"format": "pt"})
    return target


# Tests with as many layers as the published models take their time; two kinds have the same names.
LARGE = {
    "qwen3_next": pytest.mark.slow,
    "deepseek_v3": pytest.mark.nightly,
    "glm4_moe": pytest.mark.nightly,
}
KINDS = [pytest.param(kind, marks=LARGE.get(kind, ())) for kind in MAKERS]


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_layer(request.param, tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def runner(target: Path) -> TransformersRunner:
    return TransformersRunner(target, device="cpu")


@torch.inference_mode()
def by_definition(target: Path, runner: TransformersRunner, hidden: Tensor, ids: list[int]) -> Any:
    """One step from every place of a text, without a cache: what comes behind its layer's norm,
    what comes before it, and the logits.

    Args:
        hidden: what the layer reads beside the tokens.  # [length, hidden_size]
        ids: the token after each place.
    """
    model = runner.model
    qwen = model.config.model_type in QWEN_KINDS
    stored = load_file(target / "model.safetensors")
    count = model.config.num_hidden_layers
    prefix = "mtp." if qwen else f"model.layers.{count}."

    def part(name: str) -> Tensor:
        return stored[prefix + name]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return x * scale * (1 + weight if qwen else weight)

    embedded = stored["model.embed_tokens.weight"][torch.tensor(ids)]
    if not qwen:
        embedded[0] = 0.0  # of the first place
    names = (
        ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        if qwen
        else ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    )
    fc, first, second, last = (part(f"{name}.weight") for name in names)
    x = torch.cat([norm(embedded, first), norm(hidden, second)], -1) @ fc.T
    number = model.config.layer_types.index("full_attention") if qwen else count - 1
    length = len(ids)
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    positions = torch.arange(length)[None]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        rotary = model.model.rotary_emb(x[None], positions)
        x = model.model.layers[number](
            x[None], position_embeddings=rotary, attention_mask=mask, position_ids=positions
        )[0]
    finally:
        model.set_attn_implementation(before)
    normed = norm(x, last)
    return normed, x, normed @ stored["lm_head.weight"].T


def test_drafts_are_those_of_the_definition(target: Path, runner: TransformersRunner) -> None:
    """Two rounds with a tree each; the second one begins behind other tokens than were drafted."""
    found = mtp_layer_in(target)
    assert found is not None
    head = load_published(found, HeadTarget.of_runner(target, runner))
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(9, SIZE, generator=generator)
    ids = torch.randint(0, VOCAB_SIZE, (20,), generator=generator).tolist()
    state, read = head.new_state(), 0
    for length in (5, 9):
        logits = head.root([state], [hidden[read:length]], [ids[read:length]])
        read = length
        normed, x, wanted = by_definition(target, runner, hidden[:length], ids[:length])
        torch.testing.assert_close(logits[0], wanted[-1], rtol=2e-3, atol=2e-3)
        feeds = normed if runner.model.config.model_type in QWEN_KINDS else x
        # Nodes 0 and 1 are siblings; 2 follows 0 and 3 follows 2.
        tree = [[(0, ids[12], -1), (1, ids[13], -1)], [(2, ids[14], 0)], [(3, ids[15], 2)]]
        drafted = torch.cat([head.expand([state], [frontier]) for frontier in tree])
        for path, node in (([12], 0), ([13], 1), ([12, 14], 2), ([12, 14, 15], 3)):
            states, step = torch.cat([hidden[:length], feeds[-1:]]), feeds
            for depth in range(1, len(path) + 1):
                text = ids[:length] + [ids[i] for i in path[:depth]]
                normed, x, logits = by_definition(target, runner, states, text)
                step = normed if runner.model.config.model_type in QWEN_KINDS else x
                states = torch.cat([states, step[-1:]])
            torch.testing.assert_close(drafted[node], logits[-1], rtol=2e-3, atol=2e-3)


def test_tokens_are_those_of_ar(target: Path, runner: TransformersRunner) -> None:
    heads = HeadLibrary(target / "heads", target, runner)
    engine = Engine(ModelTarget(runner), heads=heads)
    prompts = [list(range(3, 12)), [7, 3, 9], [1]]
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=10, temperature=temperature, seed=2, ignore_eos=True)
        ar = engine.generate(prompts, params, SpeculationConfig(method="ar"))
        for shape in ("chain", "confidence"):
            config = SpeculationConfig(
                method="mtp", length="fixed", num_speculative_tokens=3, shape=shape
            )
            sessions = engine.generate(prompts, params, config)
            assert [each.output_ids for each in sessions] == [each.output_ids for each in ar]
            assert not any(each.stats.drafter_lost for each in sessions)
            assert sum(each.stats.num_drafted for each in sessions) >= 30
    assert runner.num_free == runner.kv_capacity


def test_a_broken_layer_is_refused_by_name(tmp_path: Path) -> None:
    target = with_layer("qwen3_next", tmp_path)
    runner = TransformersRunner(target, device="cpu")
    whole = load_file(target / "model.safetensors")
    fc, proj = "mtp.fc.weight", "mtp.layers.0.self_attn.o_proj.weight"
    for change, text in (
        ({proj: None}, "without .*o_proj"),
        ({"mtp.layers.0.self_attn.bogus": torch.zeros(3)}, "unknown .*bogus"),
        ({proj: torch.zeros(3, 3)}, "other shapes of .*o_proj"),
        ({fc: torch.zeros(SIZE, SIZE)}, "fc.weight of shape"),
        ({"mtp.norm.weight": None}, "without norm.weight"),
    ):
        tensors = {name: value for name, value in {**whole, **change}.items() if value is not None}
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        heads = HeadLibrary(target / "heads", target, runner)
        with pytest.raises(InvalidArgument, match=text):
            heads.load("mtp")
