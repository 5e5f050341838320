"""The weights of a Llama-type model, and what computes with them (:class:`Ops`).

:class:`paceline.models.torch_ops.TorchOps` is plain torch: it runs on any device and is the
reference for the others. :class:`paceline.models.native_ops.NativeOps` calls the C kernels (CPU,
float32 and bfloat16), :class:`paceline.models.cuda_ops.CudaOps` the Triton kernels. Shapes: R rows,
H heads, G key/value heads, D head dimension, N slots of the KV pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from paceline.models.packing import Weight
from paceline.models.rows import Rows

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layer:
    """The weights of one decoder layer."""

    input_norm: Tensor
    qkv: Weight  # [(H + 2G) * D, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    out: Weight  # [hidden, H * D]
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Weight  # [2 * ffn, hidden]
    gate_up_bias: Tensor | None
    down: Weight  # [hidden, ffn]
    down_bias: Tensor | None
    window: int | None  # positions that attention sees, None for all


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Stack:
    """All layers and the numbers that they share."""

    layers: tuple[Layer, ...]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    cos_sin: Tensor  # [positions, D] float32: D/2 cosines, D/2 sines


class Fuse(NamedTuple):
    """The input of layer ``layer`` is ``weight @ [state; feature] + bias``.

    The state is what the layers before it make of the token; at the first layer, its embedding. The
    feature of a step is the last state of the step before; ``features`` is the first one's.
    """

    weight: Weight  # [hidden, 2 * hidden]
    bias: Tensor | None
    features: Tensor  # [num_sequences, hidden]
    layer: int = 0


class Output(NamedTuple):
    """Makes logits from states.

    Attributes:
        norm: before the product; None for none.
        vocabulary: the token of each logit, for a part of the vocabulary.  # int64 [num_logits]
    """

    norm: Tensor | None
    weight: Weight  # [num_logits, hidden]
    vocabulary: Tensor | None


class Ops(Protocol):
    """The arithmetic under :class:`paceline.models.llama.LlamaRunner`. Tensors are contiguous."""

    def pack(self, weight: Tensor) -> Weight:
        """Bring a weight into the layout that :meth:`linear` needs.  # [outputs, inputs]"""
        ...

    def unpack(self, weight: Weight) -> Tensor:
        """The weight that :meth:`pack` packed.  # [outputs, inputs]"""
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``.  # [R, inputs] -> [R, outputs]"""
        ...

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``weight * x / rms(x)``.  # [R, hidden]"""
        ...

    def run_layers(
        self,
        stack: Stack,
        first: int,
        last: int,
        x: Tensor,  # [R, hidden]
        keys: Tensor,  # [layers, N, G, D]
        values: Tensor,  # [layers, N, G, D]
        rows: Rows,
        states: Tensor | None = None,  # [last - first, R, hidden]
    ) -> None:
        """Layers ``first`` to ``last - 1`` on ``x`` in place; stores keys and values.

        ``states`` is filled with what ``x`` was after each of these layers.
        """
        ...
