"""The fast path: Llama, Mistral, Qwen2 and Qwen3 checkpoints in Hugging Face format.

One packed forward serves any mix of prompts, chains and trees of any number of sequences. Rows of
all of them lie behind one another; only attention knows where a row's context is. With
``batch_invariant`` the logits of a token have the same bits whatever else the batch holds. On a
CPU with float32 or bfloat16 the C kernels give that for free (and so give it always); elsewhere
the switch chooses a slower order of operations. On a CUDA device Triton kernels and CUDA graphs
take part where they prove right when the model is loaded; plain torch runs everywhere.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from decimal import Context, Decimal, localcontext
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from paceline import gguf_folder
from paceline.errors import InvalidArgument, ModelNotFound
from paceline.exact_math import cos_sin
from paceline.gguf_folder import GgufTensor
from paceline.memory import check_fits
from paceline.models import kernels
from paceline.models import packed as packed_weights
from paceline.models.base import ForwardResult, KVSequence, PseudoTokens, Segment
from paceline.models.cuda_graphs import Capture, ForwardGraphs
from paceline.models.cuda_ops import CudaOps, DeviceRows, fused_ops
from paceline.models.int4 import Int4Tensor, int4_format, int4_tensors
from paceline.models.kernels import KernelsUnavailable
from paceline.models.kv_cache import KVPool, PooledSequence
from paceline.models.layouts import (
    StoredTensor,
    check_quantization,
    in_pieces,
    listed,
    not_weights,
    read_config,
    stored_tensors,
)
from paceline.models.ops import (
    Layer,
    NativeOps,
    Ops,
    Packing,
    Rows,
    Stack,
    TorchOps,
    Weight,
    append_chains,
    append_rows,
)
from paceline.models.packed import PackedWeights
from paceline.models.prefix_cache import PrefixCache
from paceline.models.quants import QUANT_TYPES, Quantised, concatenate, quantise, read_blocks
from paceline.numerics import (
    PORTABLE,
    Fingerprint,
    InParts,
    check_numerics,
    digest_tensors,
    refuse_portable,
    torch_class,
)
from paceline.types import FloatArray, IntArray, Need

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

Tensor = torch.Tensor
Stored = StoredTensor | GgufTensor | Int4Tensor


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
            InvalidArgument: a model type or a feature that this file does not implement.
        """
        raw = read_config(folder)
        try:
            return LlamaConfig._from_dict(raw)
        except KeyError as error:
            raise ModelNotFound(f"{folder}/config.json lacks {error}") from error

    @staticmethod
    def _from_dict(raw: dict[str, Any]) -> LlamaConfig:
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


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a model, as transformers names them."""
    hidden, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    linears = {  # name: outputs, inputs, has a bias
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.out_bias),
        "mlp.gate_proj": (ffn, hidden, config.mlp_bias),
        "mlp.up_proj": (ffn, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, ffn, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.head_norms:
        norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(config.num_layers):
        for name, (outputs, inputs, has_bias) in linears.items():
            shapes[f"model.layers.{i}.{name}.weight"] = outputs, inputs
            if has_bias:
                shapes[f"model.layers.{i}.{name}.bias"] = (outputs,)
        shapes |= {f"model.layers.{i}.{name}.weight": (size,) for name, size in norms.items()}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = config.vocab_size, hidden
    return shapes


def load_weights(folder: Path, config: LlamaConfig) -> dict[str, Tensor]:
    """The weights of a model: those of :func:`tensor_shapes`, all of them and no others.

    Those of a GGUF file, and those of 4 bits, are the numbers that codes and scales stand for. Two
    kinds of tensors may be
    stored beside them if they say what config.json says: frequencies of the rotary embedding, and
    the output layer of a model that shares its embedding.

    Raises:
        ModelNotFound: a tensor is missing or of another shape, or a file is damaged.
        InvalidArgument: a tensor that such a model does not have, or that holds no float weights.
    """
    return {name: read_floats(tensor) for name, tensor in stored_weights(folder, config).items()}


def stored_weights(folder: Path, config: LlamaConfig) -> dict[str, Stored]:
    """As :func:`load_weights`, without reading them yet."""
    tensors: dict[str, Stored]
    if gguf_folder.is_folder(folder):
        tensors = dict(gguf_folder.tensors(folder))
    else:
        form = int4_format(read_config(folder))
        stored = stored_tensors(folder, ("int32",) if form else ())
        _drop_copied_head(folder, config, stored)
        _drop_frequencies(folder, config, stored)
        tensors = dict(stored)
        if form is not None:
            tensors = dict(int4_tensors(form, stored))
            _drop_zero_biases(config, tensors)
            _check_no_codes(tensors)
    _check_weights(folder, config, tensors)
    return tensors


def _check_weights(folder: Path, config: LlamaConfig, tensors: Mapping[str, Stored]) -> None:
    """Check that the weights are those of the model."""
    shapes = tensor_shapes(config)
    missing, unknown = shapes.keys() - tensors.keys(), tensors.keys() - shapes.keys()
    held = f"tensors that a {config.model_type} model with this config.json does not have: "
    held += listed(unknown)
    if missing:
        also = f"; they hold {held}" if unknown else ""
        raise ModelNotFound(f"the weights in {str(folder)!r} lack {listed(missing)}{also}")
    if unknown:
        raise InvalidArgument(
            "weights", f"{folder!s}, with {held}",
            "the weights that config.json describes and no others: correct config.json, or remove "
            "the tensors that do not belong to the model",
        )  # fmt: skip
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ModelNotFound(
                f"{name} in {str(folder)!r} has shape {tuple(tensors[name].shape)}, but "
                f"config.json says {shape}"
            )


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights."""
    if gguf_folder.is_folder(folder):
        return [folder / gguf_folder.WEIGHTS]
    return sorted(folder.glob("*.safetensors"))


def read_weight(tensor: Stored, rows: slice = slice(None)) -> Tensor | Quantised:
    """A tensor, or some of its rows, as it is stored.  # [outputs, inputs] or [size]

    Raises:
        InvalidArgument: a type that Paceline does not know.
    """
    if not isinstance(tensor, GgufTensor):
        return tensor.read(rows)
    raw = tensor.read(rows)
    if tensor.type == "BF16":
        return torch.from_numpy(raw).view(torch.bfloat16)
    if tensor.type in ("F32", "F16"):
        return torch.from_numpy(raw)
    return read_blocks(raw, tensor.type)


def read_floats(tensor: Stored) -> Tensor:
    """As :func:`read_weight`, but blocks of integers are multiplied out."""
    found = read_weight(tensor)
    return torch.from_numpy(found.floats()) if isinstance(found, Quantised) else found


def _in_blocks(tensor: Stored) -> bool:
    """Whether Paceline reads it as blocks of integers."""
    if isinstance(tensor, GgufTensor):
        return tensor.type in QUANT_TYPES
    return isinstance(tensor, Int4Tensor)


def _drop_copied_head(folder: Path, config: LlamaConfig, tensors: dict[str, StoredTensor]) -> None:
    """Drop a stored output layer if config.json says that it is the embedding."""
    head, embedding = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if not config.tie_word_embeddings or head is None or embedding is None:
        return
    same = head.dtype == embedding.dtype and head.shape == embedding.shape
    same = same and len(head.shape) == 2
    if not same or not all(
        torch.equal(head.read(rows).view(torch.uint8), embedding.read(rows).view(torch.uint8))
        for rows in in_pieces(*head.shape)
    ):
        raise InvalidArgument(
            "tie_word_embeddings", f"true, but in {folder!s} lm_head.weight differs from "
            "model.embed_tokens.weight",
            "false if lm_head.weight is the output layer; otherwise remove that tensor",
        )  # fmt: skip
    del tensors["lm_head.weight"]


def _drop_zero_biases(config: LlamaConfig, tensors: dict[str, Stored]) -> None:
    """Drop biases of zero: AutoGPTQ gave one to every layer."""
    expected = tensor_shapes(config)
    for name in list(tensors):
        layer, _, part = name.rpartition(".")
        if part == "bias" and name not in expected and f"{layer}.weight" in expected:
            found = tensors[name]
            if isinstance(found, StoredTensor) and not bool(found.read().any()):
                del tensors[name]


def _check_no_codes(tensors: Mapping[str, Stored]) -> None:
    """Check that all codes belong to layers of 4 bits."""
    for name, tensor in tensors.items():
        if isinstance(tensor, StoredTensor) and not tensor.dtype.is_floating_point:
            raise not_weights(f"{name} in {str(tensor.file)!r}", str(tensor.dtype).split(".")[-1])


def _drop_frequencies(folder: Path, config: LlamaConfig, tensors: dict[str, StoredTensor]) -> None:
    """Drop the rotary frequencies that old checkpoints store, if config.json says the same."""
    layers = (f"model.layers.{i}.self_attn." for i in range(config.num_layers))
    for prefix in ("model.", *layers):
        found = tensors.pop(f"{prefix}rotary_emb.inv_freq", None)
        if found is None:
            continue
        stored = found.read()
        # Some scaled types left these as they were and scaled positions instead.
        base = replace(config, rope={**config.rope, "rope_type": "default"})
        for like in (base, config):
            expected = torch.from_numpy(_frequencies(like)[0]).to(stored.dtype)
            # A few units in the last place: another machine's power function.
            step = torch.finfo(stored.dtype)
            float32_step = torch.finfo(torch.float32).eps
            rtol, atol = 4 * max(step.eps, float32_step), 2 * step.smallest_normal * step.eps
            if stored.shape == expected.shape and torch.allclose(
                stored, expected, rtol=rtol, atol=atol
            ):
                break
        else:
            raise InvalidArgument(
                "weights", f"{prefix}rotary_emb.inv_freq in {folder!s}",
                "the frequencies that rope_parameters in config.json give, or none",
            )  # fmt: skip


def rope_table(config: LlamaConfig) -> Tensor:
    """Cosines and sines of every position.  # [context_length, head_dim] float32

    The table has the same bits on every processor, but for rope types whose frequencies come from
    transformers (all that :func:`rope_frequencies` does not know): torch's power function may
    differ in the last bit between machines.

    Raises:
        InvalidArgument: config.json lacks a number that the rope type needs.
    """
    frequencies, scaling = _frequencies(config)
    half = len(frequencies)
    table = np.empty((config.context_length, 2 * half), np.float32)
    rows = max(1, 2**15 // half)  # at a time: their float64 numbers stay in a core's cache
    for start in range(0, len(table), rows):
        stop = min(start + rows, len(table))
        # In float32, as the models were trained.
        angles = np.arange(start, stop, dtype=np.float32)[:, None] * frequencies
        table[start:stop, :half], table[start:stop, half:] = cos_sin(angles.astype(np.float64))
    if scaling != 1.0:
        table *= np.float32(scaling)
    return torch.from_numpy(table)


def _frequencies(config: LlamaConfig) -> tuple[npt.NDArray[np.float32], float]:
    """Radians per position of each pair [head_dim / 2], and the scale of cosines and sines."""
    frequencies = rope_frequencies(config)
    if frequencies is not None:
        return frequencies, 1.0
    # Long-context variants follow transformers, which defines these checkpoints.
    from transformers import LlamaConfig as Reference
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    reference = Reference(
        hidden_size=config.hidden_size, num_attention_heads=config.num_heads,
        head_dim=config.head_dim, max_position_embeddings=config.context_length,
        rope_parameters=dict(config.rope),
    )  # fmt: skip
    inverse, scaling = ROPE_INIT_FUNCTIONS[config.rope["rope_type"]](reference, "cpu")
    return inverse.float().numpy(), scaling


def rope_frequencies(config: LlamaConfig) -> npt.NDArray[np.float32] | None:
    """Radians a position of each pair, for the rope types default, linear and llama3.

    Step by step what transformers' modeling_rope_utils.py computes in float32, with a power that
    is correctly rounded instead of torch's.  # [head_dim / 2]; None: another rope type
    """
    kind, number = config.rope["rope_type"], np.float32
    if kind not in ("default", "linear", "llama3"):
        return None
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / number(config.head_dim)
    theta = Decimal(float(number(_rope_number(config, "rope_theta"))))
    with localcontext(Context(prec=40)):  # integers only: the same digits everywhere
        powers = [float(theta ** Decimal(float(exponent))) for exponent in exponents]
    frequencies: npt.NDArray[np.float32] = number(1.0) / np.array(powers, np.float32)
    if kind == "default":
        factors = config.rope.get("frequency_factors")  # of a GGUF file
        if factors is not None:
            frequencies /= np.asarray(factors, np.float32)
        return frequencies
    factor = number(_rope_number(config, "factor"))
    if kind == "linear":
        return frequencies / factor
    # Llama 3.1: short waves stay, long ones are stretched, and between them it is mixed.
    low, high = _rope_number(config, "low_freq_factor"), _rope_number(config, "high_freq_factor")
    old = config.rope.get("original_max_position_embeddings", config.context_length)
    wavelengths = (number(1.0) / frequencies) * number(2.0 * math.pi)
    stretched = np.where(wavelengths > number(old / low), frequencies / factor, frequencies)
    share = ((number(1.0) / wavelengths) * number(old) - number(low)) / number(high - low)
    mixed = (number(1.0) - share) * stretched / factor + share * stretched
    between = (wavelengths >= number(old / high)) & (wavelengths <= number(old / low))
    return np.where(between, mixed, stretched)


def _rope_number(config: LlamaConfig, name: str) -> float:
    value = config.rope.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise InvalidArgument(f"rope_parameters.{name}", value, "a number above 0")
    return float(value)


class LlamaRunner:
    """A Llama-type model with its KV pool (see :class:`paceline.models.base.ModelRunner`).

    Layers are numbered from 0; an early exit after ``n`` layers predicts with the model's own
    final norm and head.

    Args:
        folder: a Hugging Face model folder.
        dtype: of weights, activations and KV entries.
        kv_tokens: capacity of the KV pool over all sequences.
        batch_invariant: see the module; ``None`` means on for float32 on a CPU.
        int8: see :class:`NativeOps`; nothing without the kernels.
        blocks: round weights to blocks of integers, as a GGUF file's type has them ("Q8_0",
            "Q4_0"); None: as they are.
        numerics: see :mod:`paceline.numerics`.

    Raises:
        ModelNotFound: the folder, or something in it, is missing or damaged.
        InvalidArgument: portable numerics where the kernels cannot give them, or a checkpoint that
            holds something that this file does not implement (:mod:`paceline.models.layouts`).
    """

    provides = frozenset(Need)

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv_tokens: int | None = None,
        batch_invariant: bool | None = None,
        int8: bool = False,
        blocks: str | None = None,
        numerics: str = "fastest",
    ) -> None:
        check_numerics(numerics)
        folder, device = Path(folder), torch.device(device)
        self.config = config = LlamaConfig.from_folder(folder)
        self.dtype, self.device = dtype, device
        self.vocab_size, self.context_length = config.vocab_size, config.context_length
        if batch_invariant is None:
            batch_invariant = device.type == "cpu" and dtype is torch.float32
        self.num_parameters = 0  # a tied embedding counts once
        self._ops = self._choose_ops(batch_invariant, int8, numerics)
        if self._numerics_class != PORTABLE:
            refuse_portable(numerics, f"this model would run in class {self._numerics_class} here")
        self.batch_invariant = batch_invariant or isinstance(self._ops, NativeOps)
        layout = self._ops.layout if isinstance(self._ops, NativeOps) else None
        self._blocks = blocks
        self._rounded_to = blocks.lower() if blocks else "int8" if int8 and layout else ""
        if blocks and layout is None:
            raise InvalidArgument("dtype", blocks.lower(), "float32 or bfloat16 without kernels")
        read_as = layout, blocks, int4_format(read_config(folder))
        key = packed_weights.identity(weight_files(folder), *read_as) if layout else ""
        with PackedWeights.of(key, config.num_weights if layout else 0) as store:
            tensors = stored_weights(folder, config)
            if device.type == "cpu":
                check_fits(self._least_bytes(tensors), folder)
            self._load(tensors, store)
        tokens = kv_tokens or min(16 * config.context_length, 65536)
        try:
            self._pool = KVPool(
                config.num_layers, tokens, config.num_kv_heads, config.head_dim, dtype, device
            )
        except RuntimeError as error:
            if "alloc" not in str(error):
                raise
            size = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
            allowed = f"fewer: {tokens * size:,} bytes of KV entries cannot be allocated"
            raise InvalidArgument("kv_tokens", tokens, allowed) from error
        self._graphs: ForwardGraphs | None = None
        if device.type == "cuda":
            self._ops = fused_ops(self._stack, batch_invariant)
            if os.environ.get("PACELINE_CUDA_GRAPHS", "on") != "off":
                self._use_graphs()

    # --- loading -------------------------------------------------------------------------------

    def _least_bytes(self, tensors: Mapping[str, Stored]) -> int:
        """Bytes of the weights in memory, without biases and norms."""
        native, table = isinstance(self._ops, NativeOps), "model.embed_tokens.weight"
        total = math.prod(tensors[table].shape) * self.dtype.itemsize
        for name, tensor in tensors.items():
            is_head = self.config.tie_word_embeddings and native  # the table is packed, too
            if len(tensor.shape) != 2 or (name == table and not is_head):
                continue
            if native and not isinstance(tensor, StoredTensor) and _in_blocks(tensor):
                total += tensor.size
                continue
            size: float = self.dtype.itemsize
            if native and self._rounded_to:
                size = QUANT_TYPES["Q4_1"].size / 32 if self._blocks == "Q4_0" else 1
            elif native and size > 2:
                some = read_weight(tensor, slice(1))
                if isinstance(some, Tensor) and bool(some.bfloat16().eq(some).all()):
                    size = 2  # an estimate from one row
            total += int(math.prod(tensor.shape) * size)
        return total

    def _load(self, tensors: dict[str, Stored], store: PackedWeights) -> None:
        """Read, convert and pack one tensor after the other, and each some rows at a time."""
        config = self.config

        def find(name: str) -> Stored:
            tensor = tensors.pop(name)
            self.num_parameters += math.prod(tensor.shape)
            return tensor

        def as_floats(found: Tensor | Quantised) -> Tensor:
            if isinstance(found, Quantised):
                found = torch.from_numpy(found.floats())
            return found.to(self.device, self.dtype)

        def floats(*parts: Stored) -> Tensor:
            count, *size = sum(part.shape[0] for part in parts), *parts[0].shape[1:]
            whole = torch.empty((count, *size), dtype=self.dtype, device=self.device)
            first = 0
            for part in parts:
                for rows in in_pieces(part.shape[0], math.prod(size)):
                    whole[first + rows.start : first + rows.stop] = as_floats(
                        read_weight(part, rows)
                    )
                first += part.shape[0]
            return whole

        def take(name: str) -> Tensor:
            return floats(find(name))

        def pack(parts: Sequence[Stored]) -> Weight:
            if not isinstance(self._ops, NativeOps):
                is_embedding = parts == [embedding]
                return self._ops.pack(self._embedding if is_embedding else floats(*parts))
            in_blocks = all(_in_blocks(part) for part in parts)
            firsts = [0, *accumulate(part.shape[0] for part in parts)]

            def piece(rows: slice) -> Tensor | Quantised:
                """Some outputs of the concatenated parts."""
                found = []
                for part, first in zip(parts, firsts, strict=False):
                    start, stop = max(0, rows.start - first), min(part.shape[0], rows.stop - first)
                    if start < stop:
                        found.append(read_weight(part, slice(start, stop)))
                if in_blocks:
                    return concatenate([part for part in found if isinstance(part, Quantised)])
                whole = torch.cat([as_floats(part) for part in found])
                return quantise(whole.float().numpy(), self._blocks) if self._blocks else whole

            return self._ops.pack_rows(piece, firsts[-1], parts[0].shape[1])

        def packed(name: str, parts: Sequence[Stored]) -> Weight:
            weight = store.weight(name, lambda: pack(parts))
            if isinstance(self._ops, NativeOps):
                self._ops.packings.add(weight.packing)
            return weight

        def fused(*names: str) -> Weight:
            return packed(names[0], [find(f"{name}.weight") for name in names])

        def bias(*names: str) -> Tensor | None:
            if f"{names[0]}.bias" not in tensors:
                return None
            return torch.cat([take(f"{name}.bias") for name in names])

        embedding = find("model.embed_tokens.weight")
        self._embedding = store.tensor("embedding", lambda: floats(embedding))
        layers = []
        for i in range(config.num_layers):
            at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            qkv, gate_up = [f"{at}.{x}_proj" for x in "qkv"], [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
            layers.append(
                Layer(
                    input_norm=take(f"model.layers.{i}.input_layernorm.weight"),
                    qkv=fused(*qkv),
                    qkv_bias=bias(*qkv),
                    q_norm=take(f"{at}.q_norm.weight") if config.head_norms else None,
                    k_norm=take(f"{at}.k_norm.weight") if config.head_norms else None,
                    out=fused(f"{at}.o_proj"),
                    out_bias=bias(f"{at}.o_proj"),
                    post_norm=take(f"model.layers.{i}.post_attention_layernorm.weight"),
                    gate_up=fused(*gate_up),
                    gate_up_bias=bias(*gate_up),
                    down=fused(f"{mlp}.down_proj"),
                    down_bias=bias(f"{mlp}.down_proj"),
                    window=config.windows[i],
                )
            )
        self._stack = Stack(
            layers=tuple(layers),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            cos_sin=rope_table(config).to(self.device).contiguous(),
        )
        self._final_norm = take("model.norm.weight")
        self._is_tied = config.tie_word_embeddings
        self._head = packed("head", [embedding if self._is_tied else find("lm_head.weight")])
        assert not tensors  # each one has its place

    def _choose_ops(self, batch_invariant: bool, int8: bool, numerics: str) -> Ops:
        config = self.config
        widths = config.head_dim, config.hidden_size, config.intermediate_size
        if NativeOps.supports(self.dtype, self.device, *widths):
            try:
                return NativeOps(self.dtype, int8=int8, numerics=numerics)
            except KernelsUnavailable as error:
                import warnings

                warnings.warn(f"running without the C kernels, slower: {error}", stacklevel=3)
        return TorchOps(by_row=batch_invariant)

    # --- numerics ------------------------------------------------------------------------------

    @property
    def _numerics_class(self) -> str:
        if isinstance(self._ops, NativeOps):
            return self._ops.numerics_class
        assert isinstance(self._ops, TorchOps)
        more = ["triton"] if isinstance(self._ops, CudaOps) else []
        return torch_class(self.device, *more, *(["rows"] if self._ops.by_row else []))

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """See :class:`paceline.models.base.ModelRunner`."""
        config = self.config
        numbers = {
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "rms_norm_eps": config.rms_norm_eps,
            "windows": config.windows,
        }
        return Fingerprint(
            numerics_class=self._numerics_class,
            dtype=self._rounded_to or str(self.dtype).removeprefix("torch."),
            kernel_version=kernels.NUMERICS_VERSION,
            weights=digest_tensors(self._tensors(), numbers),
        )

    def _tensors(self) -> Iterator[tuple[str, Tensor | InParts]]:
        """All tensors that a forward reads, in one layout independent of the ops."""
        yield "embedding", self._embedding
        yield "cos_sin", self._stack.cos_sin
        yield "final_norm", self._final_norm
        for i, layer in enumerate(self._stack.layers):
            for f in fields(Layer):
                value = getattr(layer, f.name)
                if isinstance(value, Weight):
                    yield self._named(f"{i}.{f.name}", value)
                elif isinstance(value, Tensor):
                    yield f"{i}.{f.name}", value
        if not self._is_tied or self._head.packing >= Packing.NIBBLES:
            yield self._named("head", self._head)

    def _named(self, name: str, weight: Weight) -> tuple[str, Tensor | InParts]:
        """A weight with its name; blocks of integers have one layout on every machine."""
        if weight.packing >= Packing.NIBBLES:
            return f"{name} in {weight.packing.name}", weight.data
        if not isinstance(self._ops, NativeOps):
            return name, self._ops.unpack(weight)
        shape = weight.num_outputs, weight.num_inputs
        return name, InParts(shape, self.dtype, self._ops.unpack_rows(weight))

    def _use_graphs(self, capture: Capture | None = None) -> None:
        """Replay small forwards; plain torch waits for the host, so no graph can record it."""
        if isinstance(self._ops, CudaOps):
            self._graphs = ForwardGraphs(
                self._forward_on_device, self.vocab_size, self.dtype, self.device, capture
            )

    # --- sequences -----------------------------------------------------------------------------

    @property
    def kv_capacity(self) -> int:
        return self._pool.capacity

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def new_sequence(self) -> KVSequence:
        return PooledSequence(self.context_length)

    def free(self, sequence: KVSequence) -> None:
        assert isinstance(sequence, PooledSequence)
        self._pool.free(sequence)

    def commit(self, sequence: KVSequence, pending: Sequence[int]) -> None:
        assert isinstance(sequence, PooledSequence)
        assert sequence.states.keys().isdisjoint(pending), "an early exit was not resumed"
        self._pool.commit(sequence, pending)

    def truncate(self, sequence: KVSequence, length: int) -> None:
        assert isinstance(sequence, PooledSequence)
        self._pool.truncate(sequence, length)

    @property
    def prefixes(self) -> PrefixCache | None:
        """Entries of earlier sequences; None if they could differ in the last bits."""
        return self._pool.prefixes if self.batch_invariant else None

    def adopt(self, sequence: KVSequence, token_ids: Sequence[int], scope: str) -> None:
        """Start an empty sequence with the cached entries for ``token_ids``."""
        assert isinstance(sequence, PooledSequence)
        self._pool.adopt(sequence, token_ids, scope)

    def publish(self, sequence: KVSequence, token_ids: Sequence[int], scope: str) -> None:
        """Let later sequences start with this sequence's committed entries, even after it ends."""
        assert isinstance(sequence, PooledSequence)
        self._pool.publish(sequence, token_ids, scope)

    def keys_and_values(self, sequence: KVSequence) -> tuple[Tensor, Tensor]:
        """Committed KV entries in position order.  # 2 x [layers, length, kv_heads, head_dim]"""
        assert isinstance(sequence, PooledSequence)
        index = torch.from_numpy(sequence.slots[: sequence.length].astype(np.int64))
        index = index.to(self.device)
        return self._pool.keys[:, index], self._pool.values[:, index]

    # --- forward -------------------------------------------------------------------------------

    def forward(
        self, segments: Sequence[Segment], wants: frozenset[Need] = frozenset()
    ) -> ForwardResult:
        batch = self._pack(segments)
        if not wants and (replayed := self._replay(batch)) is not None:
            return ForwardResult(
                replayed, batch.row_offsets, {}, batch.extra_offsets, batch.selected
            )
        x = F.embedding(torch.from_numpy(batch.tokens).to(self.device), self._embedding)
        stack, pool, count = self._stack, self._pool, len(self._stack.layers)
        states = None
        if Need.LAYER_STATES in wants or batch.exits:
            states = x.new_zeros(count, *x.shape)
        if batch.layers is None:
            self._ops.run_layers(stack, 0, count, x, pool.keys, pool.values, batch.rows, states)
        else:
            self._run_some(batch, x, states)
        for segment, entries, rows in batch.exits:
            assert states is not None and segment.layers is not None
            out = states[: len(segment.layers), rows]
            segment.sequence.states |= {  # type: ignore[attr-defined]
                entry: out[:, i] for i, entry in enumerate(entries)
            }
        selected, extras = batch.selected, {}
        if Need.HIDDEN_STATES in wants:
            hidden = self._ops.rmsnorm(x, self._final_norm, stack.eps)
            extras[Need.HIDDEN_STATES] = hidden
            hidden = hidden if selected is None else hidden[selected]
        else:
            x = x if selected is None else x[selected]
            hidden = self._ops.rmsnorm(x, self._final_norm, stack.eps)
        if Need.LAYER_STATES in wants:
            assert states is not None
            extras[Need.LAYER_STATES] = states.transpose(0, 1)
        logits = self._ops.linear(hidden, self._head).float()
        return ForwardResult(logits, batch.row_offsets, extras, batch.extra_offsets, selected)

    def _replay(self, batch: _Batch) -> Tensor | None:
        """The selected rows' logits from a graph, if one fits the batch."""
        wants_logits = batch.row_offsets[-1] > 0
        if self._graphs is None or batch.layers is not None or not wants_logits:
            return None
        logits = self._graphs.run(batch.tokens, batch.rows)
        return logits if logits is None or batch.selected is None else logits[batch.selected]

    def _forward_on_device(self, rows: DeviceRows) -> Tensor:
        """Logits of all rows, from tokens on the device.  # [num_rows, vocab_size]"""
        assert isinstance(self._ops, CudaOps)
        stack, pool = self._stack, self._pool
        x = F.embedding(rows.data[: rows.num_rows], self._embedding)
        self._ops.run_on_device(stack, 0, len(stack.layers), x, pool.keys, pool.values, rows)
        return self._ops.linear(self._ops.rmsnorm(x, self._final_norm, stack.eps), self._head)

    def _run_some(self, batch: _Batch, x: Tensor, states: Tensor | None) -> None:
        """As ``run_layers`` over all layers, but each row runs through its own layers only."""
        assert batch.layers is not None
        for row, earlier in batch.resumed.items():
            x[row] = earlier[-1]
            if states is not None:
                states[: len(earlier), row] = earlier
        pool, active = self._pool, batch.layers
        changes = 1 + np.flatnonzero((active[:, 1:] != active[:, :-1]).any(0))
        begins = {pseudo.first_layer for _, pseudo, _ in batch.pseudo}
        points = sorted({0, active.shape[1], *changes.tolist(), *begins})
        for first, last in pairwise(points):
            for others, pseudo, rows in batch.pseudo:
                if pseudo.first_layer == first:
                    x[rows] = pseudo.inputs(x[others]).to(x.dtype)
            taking_part = np.flatnonzero(active[:, first])
            if not len(taking_part):
                continue
            index = torch.from_numpy(taking_part).to(self.device)
            part = x[index]
            out = None if states is None else part.new_empty(last - first, *part.shape)
            self._ops.run_layers(
                self._stack, first, last, part, pool.keys, pool.values,
                batch.rows.take(taking_part), out,
            )  # fmt: skip
            x[index] = part
            if states is not None and out is not None:
                states[first:last, index] = out

    @property
    def embedding(self) -> Tensor:
        """Of every token.  # [vocab_size, hidden_size]"""
        return self._embedding

    @property
    def lm_head(self) -> Tensor:
        """Weight of the output layer: the embedding where they are tied, else a copy.

        # [vocab_size, hidden_size]
        """
        return self._embedding if self._is_tied else self._ops.unpack(self._head)

    @property
    def packed_lm_head(self) -> Weight:
        """The weight of the output layer in the layout of this runner's ops."""
        return self._head

    def logits_of_hidden(self, hidden: Tensor) -> Tensor:
        """The output layer on hidden states after the final norm.

        # [num_rows, hidden_size] -> [num_rows, vocab_size] float32
        """
        return self._ops.linear(hidden.contiguous(), self._head).float()

    def logits_of(self, states: Tensor) -> Tensor:
        """Logits of a residual stream, through the shared norm and head.

        Args:
            states: after any layer.  # [num_rows, hidden_size]

        Returns:
            # [num_rows, vocab_size] float32
        """
        normed = self._ops.rmsnorm(states.contiguous(), self._final_norm, self._stack.eps)
        return self._ops.linear(normed, self._head).float()

    @property
    def native_ops(self) -> NativeOps | None:
        """The C kernels, if they compute this model."""
        return self._ops if isinstance(self._ops, NativeOps) else None

    @property
    def drafts_chains(self) -> bool:
        """Whether :meth:`greedy_chain` works: it needs the C kernels."""
        return isinstance(self._ops, NativeOps)

    def greedy_chain(
        self,
        sequences: Sequence[KVSequence],
        tokens: Sequence[Sequence[int]],
        num_steps: int,
        num_layers: int | None = None,
        stop_below: FloatArray | None = None,
    ) -> IntArray:
        """Give sequences some tokens and continue each by argmax, all steps in one call.

        The same tokens and pending entries as a forward of ``tokens`` and ``num_steps - 1`` of one
        token for each sequence, without the time that each of them takes in Python.

        Args:
            sequences: whose pending entries, if any, are a chain.
            tokens: what follows the last pending entry of each sequence, at least one token.
            num_layers: an early exit: the new entries can be resumed. ``tokens`` is one token each.
            stop_below: a sequence ends after a token whose probability is less than this.
                # [num_steps, num_sequences]

        Returns:
            The new tokens; the last of them gets no KV entry. What comes after the end of a
            sequence is -1, and pending entries that never may be committed.
            # [num_steps, num_sequences]
        """
        assert isinstance(self._ops, NativeOps)
        pooled = [sequence for sequence in sequences if isinstance(sequence, PooledSequence)]
        rows = append_chains(self._pool, pooled, [len(given) for given in tokens], num_steps)
        states = None
        if num_layers is not None:
            states = self._embedding.new_empty(
                num_steps, num_layers, len(pooled), self.config.hidden_size
            )
        result = self._ops.greedy_chain(
            self._stack, num_layers or len(self._stack.layers), self._embedding,
            self._final_norm, self._head, self._pool.keys, self._pool.values, rows, tokens,
            num_steps, states=states, stop_below=stop_below,
        )  # fmt: skip
        if states is not None:
            for i, sequence in enumerate(pooled):
                first, length = sequence.num_pending - num_steps, int((result[:, i] >= 0).sum())
                sequence.states |= {first + step: states[step, :, i] for step in range(length)}
        return result

    def _pack(self, segments: Sequence[Segment]) -> _Batch:
        """Append all tokens as pending entries and lay the rows of the batch out."""
        count = sum(segment.num_rows for segment in segments)
        tokens = np.zeros(count, np.int64)
        selected: list[int] = []
        row_offsets, extra_offsets = [0], [0]
        parts: list[tuple[PooledSequence, Sequence[int], Sequence[int]]] = []
        for segment in segments:
            sequence = segment.sequence
            assert isinstance(sequence, PooledSequence)
            size, pending = len(segment.token_ids), sequence.num_pending
            if segment.parent_indices is None:
                parents = list(range(pending - 1, pending + size - 1))
            else:
                parents = segment.parent_indices.tolist()
            if segment.pseudo is not None:
                parents += segment.pseudo.parent_indices.tolist()
            row = extra_offsets[-1]
            first, end = row + len(segment.resume), row + segment.num_rows
            tokens[first : first + size] = segment.token_ids
            parts.append((sequence, segment.resume, parents))
            if segment.logits == "all":
                selected += range(row, end)
            elif segment.logits == "last":
                selected.append(end - 1)
            row_offsets.append(len(selected))
            extra_offsets.append(end)
        rows = append_rows(self._pool, parts, self.context_length)
        index = None
        if len(selected) < count:
            index = torch.tensor(selected, dtype=torch.long, device=self.device)
        batch = _Batch(tokens, rows, index, tuple(row_offsets), tuple(extra_offsets))
        if any(s.layers is not None or s.resume or s.pseudo is not None for s in segments):
            self._choose_layers(batch, segments)
        return batch

    def _choose_layers(self, batch: _Batch, segments: Sequence[Segment]) -> None:
        """The layers that compute each row, and where its state is kept."""
        num_layers = len(self._stack.layers)
        active = np.ones((batch.extra_offsets[-1], num_layers), np.bool_)
        for i, segment in enumerate(segments):
            sequence = segment.sequence
            assert isinstance(sequence, PooledSequence)
            first, end = batch.extra_offsets[i : i + 2]
            layers = range(num_layers) if segment.layers is None else segment.layers
            active[first:end] = False
            active[first:end, list(layers)] = True
            for row, entry in enumerate(segment.resume, first):
                batch.resumed[row] = earlier = sequence.states[entry]
                active[row, : len(earlier)] = False
            if segment.pseudo is not None:
                real = end - len(segment.pseudo.parent_indices)
                active[real:end, : segment.pseudo.first_layer] = False
                batch.pseudo.append((slice(first, real), segment.pseudo, slice(real, end)))
            if segment.resumable:
                num_new = end - first - len(segment.resume)
                entries = range(sequence.num_pending - num_new, sequence.num_pending)
                batch.exits.append((segment, (*segment.resume, *entries), slice(first, end)))
            else:
                for entry in segment.resume:
                    del sequence.states[entry]
        batch.layers = active


@dataclass(slots=True, eq=False)
class _Batch:
    """A packed forward.

    Attributes:
        selected: rows whose logits are wanted; None for all.
        layers: where each row is computed, None for everywhere.  # bool[num_rows, num_layers]
        resumed: what rows that go on had after each layer until they left.
        pseudo: rows whose states pseudo tokens are made from, the tokens, their rows.
        exits: segments that leave early, with the entries and the rows.
    """

    tokens: IntArray
    rows: Rows
    selected: Tensor | None
    row_offsets: tuple[int, ...]
    extra_offsets: tuple[int, ...]
    layers: npt.NDArray[np.bool_] | None = None
    resumed: dict[int, Tensor] = field(default_factory=dict)
    pseudo: list[tuple[slice, PseudoTokens, slice]] = field(default_factory=list)
    exits: list[tuple[Segment, tuple[int, ...], slice]] = field(default_factory=list)
