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

from paceline.models.differences import LLAMA, Differences, Rope, Routing
from paceline.models.packing import Weight
from paceline.models.rows import Rows

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layer:
    """The weights of one decoder layer."""

    input_norm: Tensor | None  # of what attention reads
    qkv: Weight  # [(H + 2G) * D, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D], or [H * D]
    k_norm: Tensor | None  # [D], or [G * D]
    out: Weight  # [hidden, H * D]
    out_bias: Tensor | None
    post_norm: Tensor | None  # of what the MLP reads
    gate_up: Weight | None  # [2 * ffn, hidden]
    gate_up_bias: Tensor | None
    down: Weight | None  # [hidden, ffn]
    down_bias: Tensor | None
    window: int | None  # positions that attention sees, or of a chunk; None for all
    attention_norm: Tensor | None = None  # of what attention adds
    mlp_norm: Tensor | None = None  # of what the MLP adds
    rope: Rope | None = "global"  # table of positions, None for no positions
    sinks: Tensor | None = None  # [H], further scores of each softmax
    experts: Experts | None = None  # in place of ``gate_up`` and ``down``

    def products(self) -> list[Weight]:
        """All weights of products."""
        if self.experts is not None:
            pairs = zip(self.experts.gate_up, self.experts.down, strict=True)
            mlp = [self.experts.router, *(weight for pair in pairs for weight in pair)]
            shared = self.experts.shared_gate_up, self.experts.shared_down
            mlp += [weight for weight in shared if weight is not None]
        else:
            assert self.gate_up is not None
            assert self.down is not None
            mlp = [self.gate_up, self.down]
        return [self.qkv, self.out, *mlp]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Experts:
    """The experts of a layer, and what chooses among them."""

    routing: Routing
    router: Weight  # [count, hidden]
    gate_up: tuple[Weight, ...]  # count x [2 * size, hidden]
    down: tuple[Weight, ...]  # count x [hidden, size]
    router_bias: Tensor | None = None
    gate_up_bias: tuple[Tensor, ...] | None = None
    down_bias: tuple[Tensor, ...] | None = None
    shared_gate_up: Weight | None = None  # [2 * size, hidden], of an expert that all tokens take
    shared_down: Weight | None = None  # [hidden, size]

    def biases(self) -> list[Tensor]:
        """All of them, if there are any."""
        if self.router_bias is None:
            return []
        assert self.gate_up_bias is not None
        assert self.down_bias is not None
        return [self.router_bias, *self.gate_up_bias, *self.down_bias]


class LowPart(NamedTuple):
    """What an adapter adds to some of a product's outputs, from ``first`` on: ``b @ inner``."""

    b: Weight  # [outputs, rank], times the adapter's scale
    first: int


class LowRank(NamedTuple):
    """What an adapter adds to a product with x.

    Linear layers that are one product each have a part. Their inner numbers are ``a @ x``, part
    after part.
    """

    a: Weight  # [ranks, inputs]
    parts: tuple[LowPart, ...]


class AdaptedLayer(NamedTuple):
    """What an adapter adds to the products of a layer; None: nothing."""

    qkv: LowRank | None = None
    out: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter (LoRA) of a stack.

    Attributes:
        digest: of all that it adds, in the model's dtype; hexadecimal.
    """

    name: str
    layers: tuple[AdaptedLayer, ...]
    digest: str


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
    cos_sin: Tensor  # [positions, rotary_dim] float32: cosines, then as many sines
    local_cos_sin: Tensor | None = None  # of layers that say so
    differs: Differences = LLAMA
    temperatures: Tensor | None = None  # [positions] float32, of queries without a rotation
    adapters: tuple[Adapter, ...] = ()  # rows say which of them computes them, if any

    def table(self, layer: Layer) -> Tensor | None:
        """Cosines and sines of a layer's positions."""
        return {"global": self.cos_sin, "local": self.local_cos_sin, None: None}[layer.rope]

    @property
    def attention_scale(self) -> float:
        """Of the scores of queries and keys."""
        scale = self.differs.attention_scale
        return self.head_dim**-0.5 if scale is None else scale

    @property
    def is_plain(self) -> bool:
        """Whether nothing differs from Llama but biases, norms of heads and windows."""
        some = all(y.rope == "global" and y.experts is None for y in self.layers)
        some = some and not self.adapters
        return some and self.differs == LLAMA and self.cos_sin.shape[1] == self.head_dim


class Fuse(NamedTuple):
    """The input of layer ``layer`` is ``weight @ [state; feature] + bias``.

    The state is what the layers before it make of the token; at the first layer, its embedding. The
    feature of a step is the last state of the step before; ``features`` has those of the first
    step. After the chain its first rows are that step's last states, one for each sequence.
    """

    weight: Weight  # [hidden, 2 * hidden]
    bias: Tensor | None
    features: Tensor  # [num_given, hidden]
    layer: int = 0


class Shortlist(NamedTuple):
    """Tells which logits of a state are worth computing (:mod:`paceline.models.heads.shortlist`).

    Attributes:
        encode, rows: of the approximate logits ``rows @ (encode @ state)``.
        exact: the output layer.  # bfloat16 [num_logits, hidden]
        margin: computed are the logits whose approximation is less than this below the highest.
    """

    encode: Weight  # [rank, hidden]
    rows: Weight  # [num_logits, rank]
    exact: Tensor
    margin: float


class Output(NamedTuple):
    """Makes logits from states.

    Attributes:
        norm: before the product; None for none.
        vocabulary: the token of each logit, for a part of the vocabulary.  # int64 [num_logits]
        shortlist: chains by argmax compute these logits alone; None: all.
    """

    norm: Tensor | None
    weight: Weight  # [num_logits, hidden]
    vocabulary: Tensor | None
    shortlist: Shortlist | None = None


class Ops(Protocol):
    """The arithmetic under :class:`paceline.models.llama.LlamaRunner`. Tensors are contiguous."""

    def pack(self, weight: Tensor) -> Weight:
        """Bring a weight into the layout that :meth:`linear` needs.  # [outputs, inputs]"""
        ...

    def unpack(self, weight: Weight) -> Tensor:
        """The weight that :meth:`pack` packed.  # [outputs, inputs]"""
        ...

    def forget(self, stack: Stack) -> None:
        """Free what was made for a stack that is no longer used."""
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``.  # [R, inputs] -> [R, outputs]"""
        ...

    def logits(self, stack: Stack, hidden: Tensor, head: Weight) -> Tensor:
        """The output layer.  # [R, hidden] -> [R, vocab_size] float32"""
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
