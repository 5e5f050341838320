"""Experts in one tensor for all of a layer, as those of gpt-oss and Llama 4, in floats or in MXFP4.

MXFP4 (OCP Microscaling Formats, version 1.0) has codes of 4 bits, two in a byte, the lower half
first, and for each 32 inputs a power of two. Every weight is a bfloat16 number, so that nothing is
rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import InvalidArgument, ModelNotFound
from paceline.models.differences import Differences, Routing
from paceline.models.layouts import StoredTensor, described

Tensor = torch.Tensor
BLOCK = 32
_VALUES = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)
_BIAS = 127  # of scales, which are exponents


def has_mxfp4_experts(raw: Mapping[str, Any]) -> bool:
    """Whether config.json says that the experts have MXFP4 codes.

    Raises:
        InvalidArgument: so has more than the experts.
    """
    form = raw.get("quantization_config")
    if raw.get("model_type") != "gpt_oss" or not isinstance(form, dict):
        return False
    if form.get("quant_method") != "mxfp4":
        return False
    if form.get("dequantize"):
        raise InvalidArgument("quantization_config", described(form), "mxfp4 without dequantize")
    return True


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One expert's matrix or bias, read on demand.

    Attributes:
        shape: outputs, inputs; or outputs.
        stored: of all experts: floats [count, inputs, outputs], codes [count, outputs, blocks, 16],
            or biases [count, outputs].
        scales: of codes.  # uint8 [count, outputs, blocks]
        expert: its number.
        first, step: the stored output of the first one here, and how far the next is.
    """

    shape: tuple[int, ...]
    stored: StoredTensor
    scales: StoredTensor | None
    expert: int
    first: int = 0
    step: int = 1

    def read(self, rows: slice = slice(None)) -> Tensor:
        """Some of its outputs, exactly."""
        start, stop, _ = rows.indices(self.shape[0])
        of = slice(self.expert, self.expert + 1)
        outputs = slice(self.first + start * self.step, self.first + (stop - 1) * self.step + 1)
        if self.scales is not None:
            codes, scales = (x.read((of, outputs))[0] for x in (self.stored, self.scales))
            return _floats(codes[:: self.step], scales[:: self.step])
        if len(self.shape) == 1:
            return self.stored.read((of, outputs))[0, :: self.step]
        return self.stored.read((of, slice(None), outputs))[0].T[:: self.step]


def _floats(codes: Tensor, scales: Tensor) -> Tensor:
    """# uint8 [outputs, blocks, 16], uint8 [outputs, blocks] -> bfloat16 [outputs, inputs]"""
    values = _VALUES[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(2)
    return torch.ldexp(values, scales.int()[..., None] - _BIAS).flatten(1).bfloat16()


def split_experts(
    routings: Sequence[Routing | None],
    hidden: int,
    differs: Differences,
    stored: Mapping[str, StoredTensor],
) -> dict[str, StoredTensor | ExpertTensor]:
    """A checkpoint's tensors, with those of single experts in place of all experts'.

    Args:
        routings: of each layer.
        hidden: width of the residual stream.

    Raises:
        ModelNotFound: a tensor is missing, or of another shape or dtype.
    """
    tensors: dict[str, StoredTensor | ExpertTensor] = dict(stored)
    for layer, routing in enumerate(routings):
        if routing is None:
            continue
        at = f"model.layers.{layer}.{differs.mlp}.experts"
        for name, outputs, inputs in (
            ("gate_up_proj", 2 * routing.size, hidden), ("down_proj", hidden, routing.size),
        ):  # fmt: skip
            whole, scales = _matrix(tensors, f"{at}.{name}", routing.count, outputs, inputs)
            bias = None
            if routing.biases:
                bias = _taken(tensors, f"{at}.{name}_bias", (routing.count, outputs))
            parts = ["gate_proj", "up_proj"] if name == "gate_up_proj" else [name]
            size = outputs // len(parts)
            apart, step = (size, 1) if differs.gate_first else (1, len(parts))
            for e in range(routing.count):
                for i, part in enumerate(parts):
                    own, first = f"{at}.{e}.{part}", i * apart
                    shape = size, inputs
                    tensors[f"{own}.weight"] = ExpertTensor(shape, whole, scales, e, first, step)
                    if bias is not None:
                        tensors[f"{own}.bias"] = ExpertTensor((size,), bias, None, e, first, step)
    return tensors


def _matrix(
    tensors: dict[str, Any], name: str, count: int, outputs: int, inputs: int
) -> tuple[StoredTensor, StoredTensor | None]:
    """The floats, or codes and scales, of all experts."""
    if f"{name}_blocks" not in tensors:
        return _taken(tensors, name, (count, inputs, outputs)), None
    blocks = inputs // BLOCK
    codes = _taken(tensors, f"{name}_blocks", (count, outputs, blocks, BLOCK // 2), torch.uint8)
    return codes, _taken(tensors, f"{name}_scales", (count, outputs, blocks), torch.uint8)


def _taken(
    tensors: dict[str, Any], name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> StoredTensor:
    """Remove a tensor; ``dtype`` None is any float."""
    found = tensors.pop(name, None)
    if found is None:
        raise ModelNotFound(f"the weights lack {name}")
    right = found.dtype.is_floating_point if dtype is None else found.dtype is dtype
    if found.shape != shape or not right:
        raise ModelNotFound(
            f"{name} in {str(found.file)!r} has shape {tuple(found.shape)} and dtype "
            f"{found.dtype}, expected {shape} and {dtype or 'floats'}"
        )
    return found  # type: ignore[no-any-return]
