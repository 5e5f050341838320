"""config.json of Llama, Mistral, Qwen2 and Qwen3 checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import InvalidArgument, ModelNotFound
from paceline.models.int4 import int4_format
from paceline.models.layouts import check_quantization, listed, read_config

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The sizes and constants of a Llama-type model, from its config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: dict[str, Any]
    windows: tuple[int | None, ...]  # sliding window of each layer, None = full attention
    qkv_bias: bool = False  # of the projections of queries, keys and values
    out_bias: bool = False  # of the projection behind attention
    mlp_bias: bool = False
    head_norms: bool = False  # queries and keys are normed in each head

    @property
    def head_layers(self) -> float:
        """Weights of the output layer over those of one decoder layer."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = 2 * (q_size + kv_size) + 3 * self.intermediate_size  # each times hidden_size
        return self.vocab_size / layer

    @property
    def num_weights(self) -> int:
        """Of all matrices, a tied embedding counted once."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = (2 * (q_size + kv_size) + 3 * self.intermediate_size) * self.hidden_size
        tables = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * layer + tables

    @staticmethod
    def from_folder(folder: Path) -> LlamaConfig:
        """Read config.json.

        Raises:
            ModelNotFound: the file is missing or lacks a key.
            InvalidArgument: a model type or a feature that the fast path does not implement.
        """
        raw = read_config(folder)
        try:
            return LlamaConfig.from_dict(raw)
        except KeyError as error:
            raise ModelNotFound(f"{folder}/config.json lacks {error}") from error

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> LlamaConfig:
        """Read a parsed config.json.

        Raises:
            KeyError: it lacks a key.
            InvalidArgument: as :meth:`from_folder`.
        """
        model_type = raw["model_type"]
        if model_type not in MODEL_TYPES:
            raise InvalidArgument("model_type", model_type, f"one of {', '.join(MODEL_TYPES)}")
        if int4_format(raw) is None:
            check_quantization(raw)
        for key, neutral in _NEUTRAL.items():
            if key in raw and raw[key] not in neutral:
                allowed = f"{json.dumps(neutral[0])}, the only value that the fast path computes"
                raise InvalidArgument(key, raw[key], allowed)
        # transformers' defaults for missing keys differ between the model types.
        raw = _DEFAULTS[model_type] | raw
        heads, hidden = _count(raw, "num_attention_heads"), _count(raw, "hidden_size")
        kv_heads = _count(raw, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise InvalidArgument("num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
        if raw.get("head_dim") is None and hidden % heads:
            raise InvalidArgument("hidden_size", hidden, f"a multiple of {heads} heads")
        head_dim = _count(raw, "head_dim", hidden // heads)
        if head_dim % 2:
            raise InvalidArgument("head_dim", head_dim, "an even number: positions rotate pairs")
        layers, context = _count(raw, "num_hidden_layers"), _count(raw, "max_position_embeddings")
        # Llama and Qwen3 have biases by choice, Qwen2 always, Mistral never.
        by_choice = model_type in ("llama", "qwen3") and _flag(raw, "attention_bias")
        return LlamaConfig(
            model_type=model_type,
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_count(raw, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            context_length=context,
            rms_norm_eps=_epsilon(raw),
            tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
            rope=_rope(raw),
            windows=_windows(raw, layers, context),
            qkv_bias=by_choice or model_type == "qwen2",
            out_bias=by_choice,
            mlp_bias=model_type == "llama" and _flag(raw, "mlp_bias"),
            head_norms=model_type == "qwen3",
        )


# Keys that change what other models compute, and the values under which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1, None),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "use_bidirectional_attention": (False, None),
    "attention_chunk_size": (None,),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "logit_scale": (1, None),
    "logits_scaling": (1, None),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "clip_qkv": (None, 0),
    "use_qk_norm": (False, None),
    "no_rope_layers": (None, []),
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096,
    },
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {
        "max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096,
        "head_dim": 128,
    },
}  # fmt: skip
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


def _count(raw: dict[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    value = raw[key] if default is None or raw.get(key) is not None else default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgument(key, value, f"an integer of {least} or more")
    return value


def _epsilon(raw: dict[str, Any]) -> float:
    value = raw.get("rms_norm_eps", 1e-6)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0:
        raise InvalidArgument("rms_norm_eps", value, "a number of 0 or more")
    return float(value)


def _flag(raw: dict[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidArgument(key, value, "true or false")
    return bool(value)


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding's parameters: rope_parameters, or the older rope_theta and
    rope_scaling."""
    scaling, parameters = raw.get("rope_scaling"), raw.get("rope_parameters")
    if scaling and parameters and scaling != parameters:
        raise InvalidArgument("rope_scaling", scaling, "absent if rope_parameters is present")
    rope = scaling or parameters or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise InvalidArgument("rope_parameters", rope, "one object for all layers")
    names = [rope[key] for key in ("rope_type", "type") if rope.get(key)] or ["default"]
    if names[0] != names[-1]:
        raise InvalidArgument("rope_parameters.type", names[-1], f"{names[0]}, as in rope_type")
    kind = names[0]
    if kind not in _ROPE_TYPES:
        raise InvalidArgument("rope_type", kind, f"one of {', '.join(_ROPE_TYPES)}")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise InvalidArgument(
            "rope_parameters.partial_rotary_factor", rope["partial_rotary_factor"], "1"
        )
    rope = {"rope_theta": raw.get("rope_theta", 10000.0), **rope, "rope_type": kind}
    original = raw.get("original_max_position_embeddings")
    if original is not None and kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = original  # before that in rope_parameters
    return rope


def _windows(raw: dict[str, Any], layers: int, context: int) -> tuple[int | None, ...]:
    """The sliding window of each layer; None for one that attends to everything."""
    model_type, window = raw["model_type"], raw.get("sliding_window")
    full, sliding = "full_attention", "sliding_attention"
    if model_type.startswith("qwen") and not _flag(raw, "use_sliding_window"):
        window = None
    if window is not None:
        window = _count(raw, "sliding_window")
    if model_type == "llama":
        if window is not None and window < context and raw.get("use_sliding_window", True):
            raise InvalidArgument(
                "sliding_window", window, f"null: models of type {model_type} have no window"
            )
        window = None
    first = 0
    if model_type.startswith("qwen"):
        first = _count(raw, "max_window_layers", 28, least=0)
    usual = [full if window is None or i < first else sliding for i in range(layers)]
    kinds = raw.get("layer_types") or usual
    if not isinstance(kinds, list):
        raise InvalidArgument("layer_types", kinds, f"a list of {full} and {sliding}")
    unknown = [kind for kind in kinds if kind not in (full, sliding)]
    if unknown:
        raise InvalidArgument("layer_types", unknown[0], f"{full} or {sliding}")
    if len(kinds) != layers:
        raise InvalidArgument("layer_types", f"{len(kinds)} entries", f"{layers}, one each layer")
    if kinds != usual and (window is None or model_type == "mistral"):
        raise InvalidArgument(
            "layer_types", listed(set(kinds)),
            f"{usual[0]} in all layers, which is what sliding_window says for {model_type}",
        )  # fmt: skip
    return tuple(window if kind == sliding else None for kind in kinds)
