"""The weights of a Llama-type model in memory: read, converted and packed for its ops."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from paceline.errors import InvalidArgument
from paceline.memory import check_fits
from paceline.models.differences import Routing
from paceline.models.int4 import int4_format
from paceline.models.layouts import in_pieces, read_config, small_files_open
from paceline.models.llama_config import LlamaConfig
from paceline.models.llama_tensors import (
    FloatTensor,
    Stored,
    in_blocks,
    linear_names,
    norm_names,
    read_weight,
    stored_weights,
    weight_files,
)
from paceline.models.native_ops import NativeOps
from paceline.models.ops import Experts, Layer, Ops, Stack
from paceline.models.packed import PackedWeights, identity
from paceline.models.packing import Packing, Weight
from paceline.models.quants import QUANT_TYPES, Quantised, concatenate, quantise
from paceline.models.rope import rope_table, temperature_table
from paceline.numerics import InParts, digest_tensors

Tensor = torch.Tensor

_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LlamaWeights:
    """All tensors that a forward reads.

    Attributes:
        embedding: what the first layer reads.
        is_tied: the output layer is this embedding, without a scale.
        num_parameters: numbers in the checkpoint; a tied embedding counts once.
    """

    embedding: Tensor  # [vocab_size, hidden_size]
    stack: Stack
    final_norm: Tensor  # [hidden_size]
    head: Weight  # [vocab_size, hidden_size]
    is_tied: bool
    num_parameters: int

    def digest(self, config: LlamaConfig, ops: Ops, dtype: torch.dtype) -> str:
        """Of all tensors, in one layout independent of the ops, and of what else decides bits."""
        numbers: dict[str, Any] = {
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "rms_norm_eps": config.rms_norm_eps,
            "windows": config.windows,
        }
        if declared := config.differs.declared():
            numbers["differences"] = declared
        if config.ropes:
            numbers["ropes"] = config.ropes
        if config.routings:
            numbers["routings"] = [r and asdict(r) for r in config.routings]
        return digest_tensors(self._tensors(ops, dtype), numbers)

    def _tensors(self, ops: Ops, dtype: torch.dtype) -> Iterator[tuple[str, Tensor | InParts]]:
        yield "embedding", self.embedding
        yield "cos_sin", self.stack.cos_sin
        if self.stack.local_cos_sin is not None:
            yield "local_cos_sin", self.stack.local_cos_sin
        yield "final_norm", self.final_norm
        for i, layer in enumerate(self.stack.layers):
            for f in fields(Layer):
                value = getattr(layer, f.name)
                if isinstance(value, Weight):
                    yield _named(f"{i}.{f.name}", value, ops, dtype)
                elif isinstance(value, Tensor):
                    yield f"{i}.{f.name}", value
            if layer.experts is not None:
                for at, weight in enumerate(layer.products()[2:]):
                    yield _named(f"{i}.experts.{at}", weight, ops, dtype)
                for at, bias in enumerate(layer.experts.biases()):
                    yield f"{i}.experts.bias.{at}", bias
        if not self.is_tied or self.head.packing >= Packing.NIBBLES:
            yield _named("head", self.head, ops, dtype)


def _named(name: str, weight: Weight, ops: Ops, dtype: torch.dtype) -> tuple[str, Tensor | InParts]:
    """A weight with its name; blocks of integers have one layout on every machine."""
    if weight.packing >= Packing.NIBBLES:
        return f"{name} in {weight.packing.name}", weight.data
    if not isinstance(ops, NativeOps):
        return name, ops.unpack(weight)
    shape = weight.num_outputs, weight.num_inputs
    return name, InParts(shape, dtype, ops.packer.unpack_rows(weight))


def load_llama_weights(
    folder: Path,
    config: LlamaConfig,
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: torch.device,
    blocks: str | None = None,
    on_disk: bool = True,
) -> LlamaWeights:
    """The weights of a model folder, packed for ``ops``.

    Args:
        dtype: of what is not packed.
        blocks: round weights to blocks of integers, as a GGUF file's type has them ("Q8_0",
            "Q4_0"); None: as they are.
        on_disk: keep the packed weights on disk for the next load.

    Raises:
        ModelNotFound: something in the folder is missing or damaged.
        InvalidArgument: ``blocks`` without the C kernels, weights that do not fit into memory, or
            a tensor that such a model does not have.
    """
    packer = ops.packer if isinstance(ops, NativeOps) else None
    if blocks and packer is None:
        raise InvalidArgument("dtype", blocks.lower(), "float32 or bfloat16 without kernels")
    key, num_weights = "", 0  # nothing packed on disk
    if packer is not None and on_disk:
        form, num_weights = int4_format(read_config(folder)), config.num_weights
        key = identity(weight_files(folder), packer.layout, blocks, form)
    with PackedWeights.of(key, num_weights) as store:
        tensors = stored_weights(folder, config)
        loader = _Loader(config, ops, dtype, device, blocks, tensors, store)
        with small_files_open():
            if device.type == "cpu":
                check_fits(loader.least_bytes(), folder)
            return loader.load()


class _Loader:
    """Reads, converts and packs one tensor after the other, and each some rows at a time."""

    def __init__(
        self,
        config: LlamaConfig,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        blocks: str | None,
        tensors: dict[str, Stored],
        store: PackedWeights,
    ) -> None:
        self._config, self._ops, self._dtype, self._device = config, ops, dtype, device
        self._packer = ops.packer if isinstance(ops, NativeOps) else None
        self._blocks, self._tensors, self._store = blocks, tensors, store
        self._num_parameters = 0

    def least_bytes(self) -> int:
        """Bytes of the weights in memory, without biases and norms."""
        packer, dtype = self._packer, self._dtype
        total = math.prod(self._tensors[_EMBEDDING].shape) * dtype.itemsize
        for name, tensor in self._tensors.items():
            # Only kernels pack the table of a tied embedding, too.
            is_head = self._config.tie_word_embeddings and packer is not None
            if len(tensor.shape) != 2 or (name == _EMBEDDING and not is_head):
                continue
            if packer is not None and not isinstance(tensor, FloatTensor) and in_blocks(tensor):
                total += tensor.size
                continue
            size: float = dtype.itemsize
            if packer is not None and (self._blocks or packer.int8):
                size = QUANT_TYPES["Q4_1"].size / 32 if self._blocks == "Q4_0" else 1
            elif packer is not None and size > 2:
                some = read_weight(tensor, slice(1))
                if isinstance(some, Tensor) and bool(some.bfloat16().eq(some).all()):
                    size = 2  # an estimate from one row
            total += int(math.prod(tensor.shape) * size)
        return total

    def load(self) -> LlamaWeights:
        config, scale = self._config, self._config.differs.embedding_scale
        table = self._find(_EMBEDDING)
        embedding = self._store.tensor("embedding", lambda: self._floats(table))
        layers = tuple(self._layer(i) for i in range(config.num_layers))
        stack = Stack(
            layers=layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            cos_sin=self._rope_table(config.rope),
            local_cos_sin=None
            if config.local_rope is None
            else self._rope_table(config.local_rope),
            differs=config.differs,
            temperatures=self._temperatures(),
        )
        final_norm = self._norm("model.norm.weight")
        is_tied = config.tie_word_embeddings
        if is_tied and self._packer is None:
            head = self._ops.pack(embedding)
        else:
            head = self._packed("head", [table if is_tied else self._find("lm_head.weight")])
        assert not self._tensors  # each one has its place
        if scale != 1.0:  # the product that a forward would compute, rounded as it would be
            embedding = embedding * torch.tensor(scale, dtype=self._dtype)
        return LlamaWeights(
            embedding=embedding, stack=stack, final_norm=final_norm, head=head,
            is_tied=is_tied and scale == 1.0, num_parameters=self._num_parameters,
        )  # fmt: skip

    def _rope_table(self, rope: dict[str, Any]) -> Tensor:
        return rope_table(replace(self._config, rope=rope)).to(self._device).contiguous()

    def _temperatures(self) -> Tensor | None:
        if self._config.differs.temperature == 0.0:
            return None
        return temperature_table(self._config).to(self._device)

    def _layer(self, i: int) -> Layer:
        config, at = self._config, f"model.layers.{i}.self_attn"
        normed, routing = config.head_norms, config.routing_of(i)
        linears = linear_names(config, i)
        norms = {
            field: self._norm(f"model.layers.{i}.{name}.weight")
            for field, name in norm_names(config).items()
        }
        return Layer(
            **{"input_norm": None, "post_norm": None, **norms},
            qkv=self._fused(*linears["qkv"]),
            qkv_bias=self._bias(*linears["qkv"]),
            q_norm=self._norm(f"{at}.q_norm.weight") if normed else None,
            k_norm=self._norm(f"{at}.k_norm.weight") if normed else None,
            out=self._fused(*linears["out"]),
            out_bias=self._bias(*linears["out"]),
            gate_up=None if routing else self._fused(*linears["gate_up"]),
            gate_up_bias=None if routing else self._bias(*linears["gate_up"]),
            down=None if routing else self._fused(*linears["down"]),
            down_bias=None if routing else self._bias(*linears["down"]),
            window=config.windows[i],
            rope=config.rope_of(i),
            sinks=self._take(f"{at}.sinks") if config.differs.sinks else None,
            experts=None if routing is None else self._experts(f"model.layers.{i}", routing),
        )

    def _gate_up(self, mlp: str) -> list[str]:
        fused = self._config.differs.fused
        return [f"{mlp}.gate_up_proj"] if fused else [f"{mlp}.gate_proj", f"{mlp}.up_proj"]

    def _experts(self, layer: str, routing: Routing) -> Experts:
        differs, router = self._config.differs, f"{layer}.{routing.router}"
        mlp = f"{layer}.{differs.mlp}"
        parts = [f"{mlp}.experts.{e}" for e in range(routing.count)]
        gate_up, down = [self._gate_up(part) for part in parts], [f"{p}.down_proj" for p in parts]
        more: dict[str, Any] = {}
        if routing.biases:
            more = {
                "router_bias": self._bias(router),
                "gate_up_bias": tuple(self._bias(*names) for names in gate_up),
                "down_bias": tuple(self._bias(name) for name in down),
            }
        if differs.shared_expert:
            shared = f"{mlp}.shared_expert"
            more |= {
                "shared_gate_up": self._fused(*self._gate_up(shared)),
                "shared_down": self._fused(f"{shared}.down_proj"),
            }
        return Experts(
            routing=routing,
            router=self._fused(router),
            gate_up=tuple(self._fused(*names) for names in gate_up),
            down=tuple(self._fused(name) for name in down),
            **more,
        )

    def _norm(self, name: str) -> Tensor:
        """A norm's weight, with what a model adds to it."""
        offset = self._config.differs.norm_offset
        weight = self._take(name)
        return weight if offset == 0.0 else (weight.float() + offset).to(weight.dtype)

    def _find(self, name: str) -> Stored:
        tensor = self._tensors.pop(name)
        self._num_parameters += math.prod(tensor.shape)
        return tensor

    def _as_floats(self, found: Tensor | Quantised) -> Tensor:
        if isinstance(found, Quantised):
            found = torch.from_numpy(found.floats())
        return found.to(self._device, self._dtype)

    def _floats(self, *parts: Stored) -> Tensor:
        """The concatenated parts, not packed."""
        count, *size = sum(part.shape[0] for part in parts), *parts[0].shape[1:]
        whole = torch.empty((count, *size), dtype=self._dtype, device=self._device)
        first = 0
        for part in parts:
            for rows in in_pieces(part.shape[0], math.prod(size)):
                found = self._as_floats(read_weight(part, rows))
                whole[first + rows.start : first + rows.stop] = found
            first += part.shape[0]
        return whole

    def _take(self, name: str) -> Tensor:
        return self._floats(self._find(name))

    def _bias(self, *names: str) -> Tensor | None:
        if f"{names[0]}.bias" not in self._tensors:
            return None
        return torch.cat([self._take(f"{name}.bias") for name in names])

    def _fused(self, *names: str) -> Weight:
        """Some layers that take the same inputs, as one."""
        return self._packed(names[0], [self._find(f"{name}.weight") for name in names])

    def _packed(self, name: str, parts: Sequence[Stored]) -> Weight:
        weight = self._store.weight(name, lambda: self._pack(parts))
        if self._packer is not None:
            self._packer.packings.add(weight.packing)
        return weight

    def _pack(self, parts: Sequence[Stored]) -> Weight:
        if self._packer is None:
            return self._ops.pack(self._floats(*parts))
        all_in_blocks = all(in_blocks(part) for part in parts)
        firsts = [0, *accumulate(part.shape[0] for part in parts)]

        def piece(rows: slice) -> Tensor | Quantised:
            """Some outputs of the concatenated parts."""
            found = []
            for part, first in zip(parts, firsts, strict=False):
                start, stop = max(0, rows.start - first), min(part.shape[0], rows.stop - first)
                if start < stop:
                    found.append(read_weight(part, slice(start, stop)))
            if all_in_blocks:
                return concatenate([part for part in found if isinstance(part, Quantised)])
            whole = torch.cat([self._as_floats(part) for part in found])
            return quantise(whole.float().numpy(), self._blocks) if self._blocks else whole

        return self._packer.pack_rows(piece, firsts[-1], parts[0].shape[1])
