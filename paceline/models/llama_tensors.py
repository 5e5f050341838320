"""The tensors of the fast path's checkpoints: names, shapes, and reading them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline import gguf_folder
from paceline.errors import InvalidArgument, ModelNotFound
from paceline.gguf_folder import GgufTensor
from paceline.models.architectures import TEXT_PARTS
from paceline.models.int4 import Int4Tensor, int4_format, int4_tensors
from paceline.models.layouts import (
    StoredTensor,
    in_pieces,
    listed,
    not_weights,
    read_config,
    stored_tensors,
)
from paceline.models.llama_config import LlamaConfig
from paceline.models.mxfp4 import ExpertTensor, has_mxfp4_experts, split_experts
from paceline.models.quants import QUANT_TYPES, Quantised, read_blocks
from paceline.models.rope import scaled_frequencies

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ReorderedTensor:
    """A stored tensor whose outputs are in another order.

    Attributes:
        order: the place in ``stored`` of each output.  # [outputs]
    """

    stored: StoredTensor
    order: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def read(self, rows: slice = slice(None)) -> Tensor:
        """Some of its outputs."""
        places = self.order[rows]
        first = int(places.min())
        return self.stored.read(slice(first, int(places.max()) + 1))[places - first]


FloatTensor = StoredTensor | ExpertTensor | ReorderedTensor
Stored = FloatTensor | GgufTensor | Int4Tensor
MTP_PREFIX = "mtp."
"""Of the names of an MTP layer in its target's checkpoint."""
TEXT_PREFIX = "language_model."
PICTURE_PREFIXES = ("vision_model.", "multi_modal_projector.")
"""Of names in the checkpoints of models that also see pictures."""


def norm_names(config: LlamaConfig) -> dict[str, str]:
    """The norms of a layer's residual stream: field of a Layer -> name in checkpoints."""
    if not config.differs.output_norms:
        return {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
    names = {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
    if config.differs.input_norms:
        names |= {"input_norm": "input_layernorm", "post_norm": "pre_feedforward_layernorm"}
    return names


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a model, as transformers names them."""
    hidden, dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    attention = {  # name: outputs, inputs, has a bias
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.out_bias),
    }
    if config.differs.fused:
        for letter in "qkv":
            del attention[f"self_attn.{letter}_proj"]
        attention["self_attn.qkv_proj"] = q_size + 2 * kv_size, hidden, config.qkv_bias
    norms = dict.fromkeys(norm_names(config).values(), hidden)
    if config.head_norms:
        wide = config.differs.wide_norms
        norms["self_attn.q_norm"] = q_size if wide else dim
        norms["self_attn.k_norm"] = kv_size if wide else dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(config.num_layers):
        for name, (outputs, inputs, has_bias) in (attention | _mlp_linears(config, i)).items():
            shapes[f"model.layers.{i}.{name}.weight"] = outputs, inputs
            if has_bias:
                shapes[f"model.layers.{i}.{name}.bias"] = (outputs,)
        shapes |= {f"model.layers.{i}.{name}.weight": (size,) for name, size in norms.items()}
        if config.differs.sinks:
            shapes[f"model.layers.{i}.self_attn.sinks"] = (config.num_heads,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = config.vocab_size, hidden
    return shapes


def _mlp_linears(config: LlamaConfig, layer: int) -> dict[str, tuple[int, int, bool]]:
    """Name: outputs, inputs, has a bias."""
    hidden, routing, mlp = config.hidden_size, config.routing_of(layer), config.differs.mlp
    parts = [mlp] if routing is None else [f"{mlp}.experts.{e}" for e in range(routing.count)]
    if routing is not None and config.differs.shared_expert:
        parts.append(f"{mlp}.shared_expert")
    ffn = config.intermediate_size if routing is None else routing.size
    biased = config.mlp_bias if routing is None else routing.biases
    linears = {} if routing is None else {routing.router: (routing.count, hidden, biased)}
    for part in parts:
        if config.differs.fused:
            linears[f"{part}.gate_up_proj"] = 2 * ffn, hidden, biased
        else:
            linears[f"{part}.gate_proj"] = ffn, hidden, biased
            linears[f"{part}.up_proj"] = ffn, hidden, biased
        linears[f"{part}.down_proj"] = hidden, ffn, biased
    return linears


def linear_names(config: LlamaConfig, layer: int) -> dict[str, list[str]]:
    """The linear layers that each product of a layer joins, without experts: field of a Layer ->
    names."""
    at = f"model.layers.{layer}"
    fused, dense = config.differs.fused, config.routing_of(layer) is None
    qkv = ["qkv_proj"] if fused else ["q_proj", "k_proj", "v_proj"]
    gate_up = ["gate_up_proj"] if fused else ["gate_proj", "up_proj"]
    names = {
        "qkv": [f"{at}.self_attn.{name}" for name in qkv], "out": [f"{at}.self_attn.o_proj"],
    }  # fmt: skip
    if dense:
        mlp = f"{at}.{config.differs.mlp}"
        names["gate_up"] = [f"{mlp}.{name}" for name in gate_up]
        names["down"] = [f"{mlp}.down_proj"]
    return names


def load_weights(folder: Path, config: LlamaConfig) -> dict[str, Tensor]:
    """The weights of a model: those of :func:`tensor_shapes`, all of them and no others.

    Those of a GGUF file, and those of 4 bits, are the numbers that codes and scales stand for. An
    MTP layer may be stored beside them, and if they say what config.json says, frequencies of the
    rotary embedding and the output layer of a model that shares its embedding.

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
        raw = read_config(folder)
        form, is_mxfp4 = int4_format(raw), has_mxfp4_experts(raw)
        stored = stored_tensors(folder, ("int32",) if form else ("uint8",) if is_mxfp4 else ())
        # A layer for the token after next is no part of the model: method `mtp` reads it.
        stored = {name: t for name, t in stored.items() if not name.startswith(MTP_PREFIX)}
        if raw.get("model_type") in TEXT_PARTS:
            stored = {
                name.removeprefix(TEXT_PREFIX): tensor for name, tensor in stored.items()
                if not name.startswith(PICTURE_PREFIXES)
            }  # fmt: skip
        _drop_copied_head(folder, config, stored)
        _drop_frequencies(folder, config, stored)
        tensors = dict(stored)
        if form is not None:
            tensors = dict(int4_tensors(form, stored))
            _drop_zero_biases(config, tensors)
            _check_no_codes(tensors)
        if any(each is not None and each.stacked for each in config.routings):
            tensors = dict(
                split_experts(config.routings, config.hidden_size, config.differs, stored)
            )
            _check_no_codes(tensors)
        if config.differs.paired_rope:
            tensors = {name: _apart(config, name, tensor) for name, tensor in tensors.items()}
    _check_weights(folder, config, tensors)
    return tensors


def turned_pairs(config: LlamaConfig, name: str, outputs: int) -> Tensor | None:
    """The order in which the outputs of queries or keys turn half a head apart, as they do here.

    Args:
        name: of a linear layer, or of its weight or bias.

    Returns:
        The place in the checkpoint of each output; None: as they are.  # [outputs]
    """
    if not config.differs.paired_rope or not re.search(r"\.[qk]_proj(\.|$)", name):
        return None
    return torch.arange(outputs).view(-1, config.head_dim // 2, 2).mT.flatten()


def _apart(config: LlamaConfig, name: str, tensor: Stored) -> Stored:
    order = turned_pairs(config, name, tensor.shape[0])
    if order is None:
        return tensor
    assert isinstance(tensor, StoredTensor)
    return ReorderedTensor(tensor, order)


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


def in_blocks(tensor: Stored) -> bool:
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
            expected = torch.from_numpy(scaled_frequencies(like)[0]).to(stored.dtype)
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
