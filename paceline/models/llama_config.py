"""config.json of the fast path's checkpoints: Llama and the architectures that are much like it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import InvalidArgument, ModelNotFound
from paceline.models.architectures import (
    ARCHITECTURES,
    MODEL_TYPES,
    PLAIN_MODEL_TYPES,
    Architecture,
    text_config,
)
from paceline.models.config_values import count_of, flag_of, number_of
from paceline.models.differences import LLAMA, Differences, Rope, Routing
from paceline.models.int4 import int4_format
from paceline.models.layouts import check_quantization, listed, read_config
from paceline.models.mxfp4 import has_mxfp4_experts


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
    windows: tuple[int | None, ...]  # of each layer, sliding or chunked; None = full attention
    qkv_bias: bool = False  # of the projections of queries, keys and values
    out_bias: bool = False  # of the projection behind attention
    mlp_bias: bool = False
    head_norms: bool = False  # queries and keys are normed in each head
    differs: Differences = LLAMA
    local_rope: dict[str, Any] | None = None
    ropes: tuple[Rope | None, ...] = ()  # table of each layer, None = no positions; (): global
    routings: tuple[Routing | None, ...] = ()  # experts of each layer, None = dense; (): none

    @property
    def is_plain(self) -> bool:
        """Whether layers are Llama's: biases, norms of heads and windows are all they choose."""
        return self.model_type in PLAIN_MODEL_TYPES

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that positions rotate, the first ones."""
        return int(self.head_dim * (self.rope.get("partial_rotary_factor") or 1))

    def rope_of(self, layer: int) -> Rope | None:
        """The table that a layer takes; None where it has no positions."""
        return self.ropes[layer] if self.ropes else "global"

    def routing_of(self, layer: int) -> Routing | None:
        """How tokens choose experts in a layer; None for a dense one."""
        return self.routings[layer] if self.routings else None

    @property
    def head_layers(self) -> float:
        """Weights of the output layer over those that a token multiplies with in a layer."""
        return self.vocab_size * self.hidden_size * self.num_layers / self._layer_weights(True)

    @property
    def num_weights(self) -> int:
        """Of all matrices, a tied embedding counted once."""
        tables = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return self._layer_weights(False) + tables

    def _layer_weights(self, of_token: bool) -> int:
        """Of all layers; of the experts all, or those that a token takes."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        total = 2 * (q_size + kv_size) * self.num_layers
        for routing in self.routings or (None,) * self.num_layers:
            if routing is None:
                total += 3 * self.intermediate_size
            else:
                experts = routing.top if of_token else routing.count
                experts += self.differs.shared_expert
                total += routing.count + 3 * routing.size * experts
        return total * self.hidden_size

    @staticmethod
    def from_folder(folder: Path, types: Sequence[str] = MODEL_TYPES) -> LlamaConfig:
        """Read config.json.

        Args:
            types: model types to take.

        Raises:
            ModelNotFound: the file is missing or lacks a key.
            InvalidArgument: a model type or a feature that the fast path does not implement.
        """
        raw = read_config(folder)
        try:
            return LlamaConfig.from_dict(raw, types)
        except KeyError as error:
            raise ModelNotFound(f"{folder}/config.json lacks {error}") from error

    @staticmethod
    def from_dict(raw: dict[str, Any], types: Sequence[str] = MODEL_TYPES) -> LlamaConfig:
        """Read a parsed config.json.

        Args:
            types: as of :meth:`from_folder`.

        Raises:
            KeyError: it lacks a key.
            InvalidArgument: as :meth:`from_folder`.
        """
        raw = text_config(raw)
        model_type = raw["model_type"]
        if model_type not in types:
            raise InvalidArgument("model_type", model_type, f"one of {', '.join(types)}")
        kind = ARCHITECTURES[model_type]
        if int4_format(raw) is None and not has_mxfp4_experts(raw):
            check_quantization(raw)
        for key, neutral in _NEUTRAL.items():
            if key in raw and key not in kind.reads and raw[key] not in neutral:
                allowed = f"{json.dumps(neutral[0])}, the only value that the fast path computes"
                raise InvalidArgument(key, raw[key], allowed)
        # transformers' defaults for missing keys differ between the model types.
        raw = kind.defaults | raw
        heads, hidden = count_of(raw, "num_attention_heads"), count_of(raw, "hidden_size")
        kv_heads = count_of(raw, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise InvalidArgument("num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
        if raw.get("head_dim") is None and hidden % heads:
            raise InvalidArgument("hidden_size", hidden, f"a multiple of {heads} heads")
        head_dim = count_of(raw, "head_dim", hidden // heads)
        if head_dim % 2:
            raise InvalidArgument("head_dim", head_dim, "an even number: positions rotate pairs")
        layers = count_of(raw, "num_hidden_layers")
        context = count_of(raw, "max_position_embeddings")
        by_choice = kind.qkv_bias is None and flag_of(raw, "attention_bias")
        windows = _windows(raw, kind, layers, context)
        local, differs = kind.local_rope(raw), kind.differences(raw)
        routings = tuple(kind.routing(raw, i) for i in range(layers))
        ropes = tuple(kind.rope(raw, i, window is not None) for i, window in enumerate(windows))
        stacked = any(routing and routing.stacked for routing in routings)
        if (stacked or differs.paired_rope) and (form := int4_format(raw)):
            allowed = f"no 4 bits of GPTQ or AWQ for models of type {model_type}"
            raise InvalidArgument("quantization_config.quant_method", form.method, allowed)
        rope = _rope(kind.global_rope(raw), kind, context)
        if rope["rope_type"] == "longrope":
            # Longer texts would need other frequencies from their first token on.
            context = min(context, rope["original_max_position_embeddings"])
        config = LlamaConfig(
            model_type=model_type,
            vocab_size=count_of(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=count_of(raw, kind.dense_size),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            context_length=context,
            rms_norm_eps=_epsilon(raw),
            tie_word_embeddings=flag_of(raw, "tie_word_embeddings"),
            rope=rope,
            windows=windows,
            qkv_bias=by_choice or bool(kind.qkv_bias),
            out_bias=by_choice and kind.out_bias is None,
            mlp_bias=kind.mlp_bias and flag_of(raw, "mlp_bias"),
            head_norms=kind.head_norms,
            differs=differs,
            local_rope=None if local is None else _rope(local, kind, context),
            ropes=ropes if {*ropes} != {"global"} else (),
            routings=routings if any(routings) else (),
        )
        if config.rotary_dim % 2 or not 0 < config.rotary_dim <= head_dim:
            factor = rope.get("partial_rotary_factor")
            raise InvalidArgument(
                "partial_rotary_factor", factor, f"at most 1, and an even part of {head_dim}"
            )
        return config


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


def _epsilon(raw: dict[str, Any]) -> float:
    value = raw.get("rms_norm_eps", 1e-6)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0:
        raise InvalidArgument("rms_norm_eps", value, "a number of 0 or more")
    return float(value)


def _rope(raw: dict[str, Any], model: Architecture, context: int) -> dict[str, Any]:
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
    kind = "longrope" if names[0] == "su" else names[0]  # its first name
    if kind not in model.ropes:
        raise InvalidArgument("rope_type", names[0], f"one of {', '.join(model.ropes)}")
    key = "partial_rotary_factor"
    if key in model.reads:
        inside = rope if rope.get(key) is not None else raw
        rope = rope | {key: number_of(inside, key, 1.0)}
    elif rope.get(key) not in (None, 1):
        raise InvalidArgument(f"rope_parameters.{key}", rope[key], "1")
    rope = {"rope_theta": raw.get("rope_theta", 10000.0), **rope, "rope_type": kind}
    original = raw.get("original_max_position_embeddings")
    if original is not None and kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = original  # before that in rope_parameters
    if kind == "longrope":
        original = count_of(rope, "original_max_position_embeddings")
        if rope.get("factor") is None:
            rope["factor"] = context / original
    return rope


def _windows(
    raw: dict[str, Any], model: Architecture, layers: int, context: int
) -> tuple[int | None, ...]:
    """The window of each layer; None for one that attends to everything."""
    model_type, key = raw["model_type"], model.window_key
    window, full, sliding = raw.get(key), "full_attention", model.window_type
    if model.window_flag and not flag_of(raw, "use_sliding_window"):
        window = None
    if window is not None:
        window = count_of(raw, key)
    if model.slides is None:
        if window is not None and window < context and raw.get("use_sliding_window", True):
            raise InvalidArgument(
                "sliding_window", window, f"null: models of type {model_type} have no window"
            )
        window = None
    slides = [
        window is not None and bool(model.slides and model.slides(raw, i)) for i in range(layers)
    ]
    usual = [sliding if each else full for each in slides]
    kinds = raw.get("layer_types") or usual
    if not isinstance(kinds, list):
        raise InvalidArgument("layer_types", kinds, f"a list of {full} and {sliding}")
    unknown = [kind for kind in kinds if kind not in (full, sliding)]
    if unknown:
        raise InvalidArgument("layer_types", unknown[0], f"{full} or {sliding}")
    if len(kinds) != layers:
        raise InvalidArgument("layer_types", f"{len(kinds)} entries", f"{layers}, one each layer")
    if kinds != usual and (window is None or not model.layer_types):
        raise InvalidArgument(
            "layer_types", listed(set(kinds)),
            f"{usual[0]} in all layers, which is what {key} says for {model_type}",
        )  # fmt: skip
    return tuple(window if kind == sliding else None for kind in kinds)
