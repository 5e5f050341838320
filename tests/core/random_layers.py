"""One random decoder layer, of any sizes."""

from __future__ import annotations

import torch

from paceline.models.ops import Layer, Stack
from paceline.models.packing import Weight


def random_stack(
    dtype: torch.dtype,
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    hidden: int = 24,
    ffn: int = 40,
    norms: bool = False,
    window: int | None = None,
    device: str = "cpu",
) -> Stack:
    """A layer whose output is about as large as its input."""
    generator = torch.Generator().manual_seed(heads * dim)

    def matrix(outputs: int, inputs: int) -> Weight:
        values = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        return Weight(values.to(device, dtype), outputs, inputs)

    def vector(size: int, around: float) -> torch.Tensor:
        return (around + 0.2 * torch.randn(size, generator=generator)).to(device, dtype)

    q_size, kv_size = heads * dim, kv_heads * dim
    layer = Layer(
        input_norm=vector(hidden, 1.0),
        qkv=matrix(q_size + 2 * kv_size, hidden),
        qkv_bias=vector(q_size + 2 * kv_size, 0.0),
        q_norm=vector(dim, 1.0) if norms else None,
        k_norm=vector(dim, 1.0) if norms else None,
        out=matrix(hidden, q_size),
        out_bias=None,
        post_norm=vector(hidden, 1.0),
        gate_up=matrix(2 * ffn, hidden),
        gate_up_bias=None,
        down=matrix(hidden, ffn),
        down_bias=None,
        window=window,
    )
    angles = torch.outer(torch.arange(200.0), 100.0 ** -torch.linspace(0, 1, dim // 2))
    return Stack(
        layers=(layer,),
        hidden_size=hidden,
        intermediate_size=ffn,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        eps=1e-5,
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=-1).to(device),
    )
