"""How the matrices of a head lie in a file: in bfloat16, or in eight bits with a scale a row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SCALE = ".int8_scale"
"""The scales of matrix ``name`` are called ``name.int8_scale``."""
SMALLEST = 1024  # elements of a matrix that is worth its scales


def pack(name: str, value: Tensor, *, int8: bool) -> dict[str, Tensor]:
    """A parameter as a file has it: itself, or its rows rounded to -127 .. 127 and their scales.

    Vectors and small matrices stay in bfloat16.
    """
    if not int8 or value.dim() != 2 or value.numel() < SMALLEST:
        return {name: value.to("cpu", torch.bfloat16).contiguous()}
    rows = value.detach().float().cpu()
    scale = rows.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return {name: (rows / scale[:, None]).round().to(torch.int8), name + SCALE: scale}


def unpack(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters in a file; those in eight bits as float32.

    Raises:
        RuntimeError: a matrix in eight bits has no scale for each of its rows.
    """
    result = {}
    for name, value in stored.items():
        if name.endswith(SCALE):
            continue
        if value.dtype == torch.int8:
            scale = stored.get(name + SCALE)
            if scale is None or scale.shape != value.shape[:1]:
                raise RuntimeError(f"{name} has no scale for each of its rows")
            value = value.float() * scale[:, None]
        result[name] = value
    return result
