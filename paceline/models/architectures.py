"""The model types of the fast path: what their config.json means, and how they differ from Llama.

An architecture is an entry here. It declares what it computes otherwise
(:class:`paceline.models.differences.Differences`), and the one model file computes what is
declared; nothing there asks for a model's name. Values are those of transformers' classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import InvalidArgument
from paceline.models.config_values import count_of, flag_of, number_of
from paceline.models.differences import LLAMA, Differences, Rope, Routing
from paceline.models.layouts import QUANTIZATION_KEYS

Raw = dict[str, Any]
USUAL_ROPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model type.

    Attributes:
        defaults: transformers' values of missing keys.
        qkv_bias, out_bias: biases of attention's projections; None: as ``attention_bias`` says.
        mlp_bias: whether the key ``mlp_bias`` is read.
        head_norms: queries and keys are normed.
        slides: whether a layer has the sliding window, if there is one; None: no layer has.
        window_flag: there is one only with ``use_sliding_window``.
        window_key: the key of its size.
        window_type: what ``layer_types`` calls a layer that has it.
        layer_types: whether that key may choose other layers than ``slides`` does.
        ropes: names of rotary embeddings.
        rope: which table a layer takes.
        local_rope: config.json's values for the local table, as ``rope`` of a flat one.
        global_rope: the same for the global table.
        reads: keys that change what is computed, and that other types refuse.
        differences: from a config.json with defaults filled in.
        routing: of the experts of a layer; None for a dense layer.
        dense_size: the key of a dense layer's inner width.
    """

    defaults: Raw = field(default_factory=dict)
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool = False
    head_norms: bool = False
    slides: Callable[[Raw, int], bool] | None = None
    window_flag: bool = False
    window_key: str = "sliding_window"
    window_type: str = "sliding_attention"
    layer_types: bool = True
    ropes: tuple[str, ...] = USUAL_ROPES
    rope: Callable[[Raw, int, bool], Rope | None] = lambda raw, layer, slides: "global"
    global_rope: Callable[[Raw], Raw] = lambda raw: raw
    local_rope: Callable[[Raw], Raw | None] = lambda raw: None
    reads: frozenset[str] = frozenset()
    differences: Callable[[Raw], Differences] = lambda raw: LLAMA
    routing: Callable[[Raw, int], Routing | None] = lambda raw, layer: None
    dense_size: str = "intermediate_size"


# --- what single types declare --------------------------------------------------------------------


def _granite(raw: Raw) -> Differences:
    return Differences(
        attention_scale=number_of(raw, "attention_multiplier", 1.0),
        embedding_scale=number_of(raw, "embedding_multiplier", 1.0),
        residual_scale=number_of(raw, "residual_multiplier", 1.0),
        logit_divisor=number_of(raw, "logits_scaling", 1.0),
    )


def _has_rope(raw: Raw, layer: int) -> bool:
    """SmolLM3: every fourth layer has no positions, unless a list says which."""
    chosen = raw.get("no_rope_layers")
    if chosen is None:
        return (layer + 1) % count_of(raw, "no_rope_layer_interval", 4) != 0
    layers = raw["num_hidden_layers"]
    right = isinstance(chosen, list) and len(chosen) >= layers
    if not right or any(x not in (0, 1) for x in chosen):
        raise InvalidArgument("no_rope_layers", chosen, f"a list of 0 and 1 for {layers} layers")
    return bool(chosen[layer])


def _gemma(raw: Raw, **more: Any) -> Differences:
    for key in ("hidden_activation", "hidden_act"):
        if raw.get(key) not in (None, "gelu_pytorch_tanh"):
            raise InvalidArgument(key, raw[key], "gelu_pytorch_tanh")
    return Differences(
        activation="gelu_tanh",
        attention_scale=number_of(raw, "query_pre_attn_scalar", 256) ** -0.5,
        output_norms=True,
        norm_offset=1.0,
        embedding_scale=count_of(raw, "hidden_size") ** 0.5,
        logit_cap=_cap(raw, "final_logit_softcapping"),
        **more,
    )


def _cap(raw: Raw, key: str) -> float:
    return 0.0 if raw.get(key) in (None, 0) else number_of(raw, key, 0.0)


def _gemma3_ropes(raw: Raw) -> tuple[Raw, Raw]:
    """The global and the local table's values: one object for each, or the older keys."""
    both = raw.get("rope_parameters") or {}
    kinds = "full_attention", "sliding_attention"
    if not isinstance(both, dict) or not both.keys() <= {*kinds}:
        raise InvalidArgument("rope_parameters", both, f"one object each for {' and '.join(kinds)}")
    return (
        {"rope_theta": raw.get("rope_theta", 1e6), "rope_scaling": raw.get("rope_scaling"),
         "rope_parameters": both.get(kinds[0])},
        {"rope_theta": raw.get("rope_local_base_freq", 1e4), "rope_parameters": both.get(kinds[1])},
    )  # fmt: skip


def _routing(raw: Raw, layer: int) -> Routing | None:
    """Qwen3-MoE: experts in every ``decoder_sparse_step``-th layer but those that are dense."""
    raw = raw if "num_local_experts" in raw else {"num_experts": 128} | raw
    names = [name for name in ("num_experts", "num_local_experts") if name in raw]
    count, step = count_of(raw, names[0], least=0), count_of(raw, "decoder_sparse_step")
    if raw[names[-1]] != count:  # transformers 5 gave it another name
        raise InvalidArgument(names[-1], raw[names[-1]], f"{count}, as {names[0]} says")
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise InvalidArgument("mlp_only_layers", dense, "a list of layers")
    if not count or layer in dense or (layer + 1) % step:
        return None
    top = count_of(raw, "num_experts_per_tok")
    if top > count:
        raise InvalidArgument("num_experts_per_tok", top, f"at most {count}, the experts there are")
    return Routing(
        count=count,
        top=top,
        size=count_of(raw, "moe_intermediate_size"),
        normed=flag_of(raw, "norm_topk_prob"),
    )


# --- the model types ------------------------------------------------------------------------------


def _above(raw: Raw, layer: int) -> bool:
    """Qwen: windows from ``max_window_layers`` on."""
    return layer >= count_of(raw, "max_window_layers", 28, least=0)


def _gpt_oss(raw: Raw) -> Differences:
    return Differences(
        activation="clamped",
        gate_slope=number_of(raw, "swiglu_alpha", 1.702),
        gate_limit=number_of(raw, "swiglu_limit", 7.0),
        sinks=True,
    )


def _gpt_oss_rope(raw: Raw) -> Raw:
    if raw.get("rope_parameters") or raw.get("rope_scaling"):
        return raw
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    more = {"truncate": False, "original_max_position_embeddings": 4096}
    return raw | {"rope_parameters": yarn | more}


def _gpt_oss_routing(raw: Raw, layer: int) -> Routing:
    count, top = count_of(raw, "num_local_experts"), count_of(raw, "num_experts_per_tok")
    if top > count:
        raise InvalidArgument("num_experts_per_tok", top, f"at most {count}, the experts there are")
    size = count_of(raw, "intermediate_size")
    return Routing(
        count=count, top=top, size=size, normed=True, biases=True, stacked=True,
        router="mlp.router",
    )  # fmt: skip


def _llama4(raw: Raw) -> Differences:
    tuned = flag_of(raw, "attn_temperature_tuning")
    return Differences(
        chunked=True,
        temperature=number_of(raw, "attn_scale", 0.1) if tuned else 0.0,
        temperature_floor=count_of(raw, "floor_scale", 8192) if tuned else 0,
        turned_norms=flag_of(raw, "use_qk_norm"),
        shared_expert=True,
        scaled_inputs=True,
        paired_rope=True,
        gate_first=True,
        mlp="feed_forward",
    )


def _llama4_has_rope(raw: Raw, layer: int) -> bool:
    """Llama 4's config.json may say with an empty list that there is none."""
    return _has_rope(raw | {"no_rope_layers": raw.get("no_rope_layers") or None}, layer)


def _llama4_routing(raw: Raw, layer: int) -> Routing | None:
    """Experts in every ``interleave_moe_layer_step``-th layer, unless a list says where."""
    chosen = raw.get("moe_layers")
    if chosen is None:
        has_experts = (layer + 1) % count_of(raw, "interleave_moe_layer_step") == 0
    else:
        if not isinstance(chosen, list) or any(type(i) is not int or i < 0 for i in chosen):
            raise InvalidArgument("moe_layers", chosen, "a list of layers")
        has_experts = layer in chosen
    count, top = count_of(raw, "num_local_experts"), count_of(raw, "num_experts_per_tok")
    if top > count:
        raise InvalidArgument("num_experts_per_tok", top, f"at most {count}, the experts there are")
    if not has_experts:
        return None
    return Routing(
        count=count, top=top, size=count_of(raw, "intermediate_size"), normed=False, stacked=True,
        router="feed_forward.router",
    )  # fmt: skip


_QWEN_SIZES: Raw = {
    "max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096,
}  # fmt: skip
_GEMMA_SIZES: Raw = {
    "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA_KEYS = frozenset({"hidden_act", "final_logit_softcapping"})

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(defaults={"max_position_embeddings": 2048}, mlp_bias=True),
    "mistral": Architecture(
        defaults={
            "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096,
        },
        qkv_bias=False, out_bias=False,
        slides=lambda raw, layer: True, layer_types=False,
    ),
    "qwen2": Architecture(
        defaults=_QWEN_SIZES, qkv_bias=True, out_bias=False, slides=_above, window_flag=True
    ),
    "qwen3": Architecture(
        defaults=_QWEN_SIZES | {"head_dim": 128}, head_norms=True, slides=_above, window_flag=True
    ),
    "olmo2": Architecture(
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        head_norms=True,
        differences=lambda raw: Differences(
            input_norms=False, output_norms=True, wide_norms=True
        ),
    ),
    "granite": Architecture(
        defaults={"max_position_embeddings": 2048}, mlp_bias=True,
        reads=frozenset({"embedding_multiplier", "residual_multiplier", "logits_scaling"}),
        differences=_granite,
    ),
    "smollm3": Architecture(
        defaults={
            "max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        mlp_bias=True,
        slides=lambda raw, layer: not _has_rope(raw, layer), window_flag=True,
        rope=lambda raw, layer, slides: "global" if _has_rope(raw, layer) else None,
        reads=frozenset({"no_rope_layers"}),
    ),
    "phi3": Architecture(
        defaults={
            "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        qkv_bias=False, out_bias=False,
        slides=lambda raw, layer: True, layer_types=False,
        ropes=("default", "longrope"),
        reads=frozenset({"partial_rotary_factor"}),
        differences=lambda raw: Differences(fused=True),
    ),
    "gemma2": Architecture(
        defaults=_GEMMA_SIZES | {
            "max_position_embeddings": 8192, "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        slides=lambda raw, layer: layer % 2 == 0,
        reads=_GEMMA_KEYS | {"attn_logit_softcapping"},
        differences=lambda raw: _gemma(raw, attention_cap=_cap(raw, "attn_logit_softcapping")),
    ),
    "gemma3_text": Architecture(
        defaults=_GEMMA_SIZES | {"max_position_embeddings": 131072},
        head_norms=True,
        slides=lambda raw, layer: (layer + 1) % count_of(raw, "sliding_window_pattern", 6) != 0,
        rope=lambda raw, layer, slides: "local" if slides else "global",
        global_rope=lambda raw: _gemma3_ropes(raw)[0],
        local_rope=lambda raw: _gemma3_ropes(raw)[1],
        reads=_GEMMA_KEYS,
        differences=_gemma,
    ),
    "qwen3_moe": Architecture(
        defaults={
            "max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096,
            "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
        },
        head_norms=True, slides=lambda raw, layer: True, window_flag=True, layer_types=False,
        routing=_routing,
    ),
    "gpt_oss": Architecture(
        defaults={
            "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64,
            "sliding_window": 128, "rms_norm_eps": 1e-5, "attention_bias": True,
            "rope_theta": 150000.0, "num_local_experts": 128, "num_experts_per_tok": 4,
        },
        slides=lambda raw, layer: layer % 2 == 0,
        global_rope=_gpt_oss_rope,
        differences=_gpt_oss, routing=_gpt_oss_routing,
    ),
    "llama4_text": Architecture(
        defaults={
            "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128,
            "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attention_chunk_size": 8192,
            "intermediate_size_mlp": 16384, "num_local_experts": 16, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1, "use_qk_norm": True, "attn_temperature_tuning": True,
        },
        slides=_llama4_has_rope,
        window_key="attention_chunk_size", window_type="chunked_attention",
        rope=lambda raw, layer, slides: "global" if _llama4_has_rope(raw, layer) else None,
        reads=frozenset({"attention_chunk_size", "no_rope_layers", "use_qk_norm"}),
        differences=_llama4, routing=_llama4_routing, dense_size="intermediate_size_mlp",
    ),
}  # fmt: skip
MODEL_TYPES = tuple(ARCHITECTURES)
TEXT_PARTS = {"llama4": "llama4_text"}
"""Model types that also see pictures -> the type of their part for text."""


def text_config(raw: Raw) -> Raw:
    """A parsed config.json, or what that of a model that also sees pictures says of its text.

    Raises:
        InvalidArgument: it should have such a part and does not.
    """
    kind = TEXT_PARTS.get(str(raw.get("model_type")))
    if kind is None:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, dict) or text.get("model_type", kind) != kind:
        raise InvalidArgument("text_config", text, f"an object of model_type {kind}")
    more = {key: raw[key] for key in QUANTIZATION_KEYS if key in raw}
    return more | text | {"model_type": kind}


PLAIN_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Types whose layers are Llama's: biases, norms of heads and windows are all that they choose."""
