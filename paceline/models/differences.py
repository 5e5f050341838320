"""What the architectures of the fast path compute otherwise than Llama does."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

Activation = Literal["silu", "gelu_tanh", "clamped"]
Rope = Literal["global", "local"]
"""A table of cosines and sines: of a model's own base, or of its layers with a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Differences of a whole model; the defaults are Llama's.

    Attributes:
        activation: of the gate; ``gelu_tanh`` is GELU's approximation by tanh, ``clamped`` is
            gpt-oss's: with gate at most ``limit`` and up within it,
            ``gate * sigmoid(slope * gate) * (up + 1)``.
        gate_slope, gate_limit: of a clamped one.
        attention_scale: of scores; None is 1 / sqrt(head_dim).
        sinks: each head has one more score, of no position, in the sum of its softmax.
        chunked: windows do not slide: with windows of n, a token sees those before it from the
            last position on that n divides.
        temperature, temperature_floor: queries of layers without positions are multiplied by
            ``1 + temperature * log(1 + (position + 1) // floor)``; 0 for as they are.
        attention_cap: scores become ``cap * tanh(score / cap)``; 0 for as they are.
        input_norms: whether attention and the MLP read a norm of the residual stream.
        output_norms: whether what they add to it is normed.
        wide_norms: norms of queries and keys are over all heads together.
        turned_norms: where positions turn queries and keys, they are divided by their root mean
            square afterwards.
        residual_scale: of what attention and the MLP add.
        embedding_scale: of what the first layer reads; the output layer has none.
        norm_offset: added to the weight of every norm.
        logit_divisor, logit_cap: of the output layer, first the one and then the other.
        shared_expert: beside experts, a layer has one more, which every token takes as it is.
        scaled_inputs: the share of an expert is the sigmoid of its score, and multiplies what it
            reads instead of what it gives.
        fused: queries, keys and values are one tensor of a checkpoint, gate and up another.
        paired_rope: in a checkpoint, neighbouring numbers of a head are turned together, not those
            half a head apart.
        gate_first: of the tensor of all experts; else gate and up alternate.
        mlp: a checkpoint's name for what follows attention.
    """

    activation: Activation = "silu"
    gate_slope: float = 0.0
    gate_limit: float = 0.0
    attention_scale: float | None = None
    sinks: bool = False
    chunked: bool = False
    temperature: float = 0.0
    temperature_floor: int = 0
    attention_cap: float = 0.0
    input_norms: bool = True
    output_norms: bool = False
    wide_norms: bool = False
    turned_norms: bool = False
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    logit_divisor: float = 1.0
    logit_cap: float = 0.0
    shared_expert: bool = False
    scaled_inputs: bool = False
    fused: bool = False
    paired_rope: bool = False
    gate_first: bool = False
    mlp: str = "mlp"

    def declared(self) -> dict[str, Any]:
        """Those that are not Llama's."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(LLAMA, name)}

    @property
    def finishes_logits(self) -> bool:
        """Whether logits are more than a product."""
        return self.logit_divisor != 1.0 or self.logit_cap != 0.0


LLAMA = Differences()


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a token chooses among the experts of a layer.

    Attributes:
        count: of experts.
        top: of experts that a token takes.
        size: inner width of an expert.
        normed: shares of the chosen ones are divided by their sum.
        biases: the router and the experts have biases.
        stacked: a checkpoint has one tensor for all of a layer's experts.
        router: name of the router's tensor in a layer of a checkpoint.
    """

    count: int
    top: int
    size: int
    normed: bool
    biases: bool = False
    stacked: bool = False
    router: str = "mlp.gate"
