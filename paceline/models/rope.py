"""Tables of positions: cosines and sines of the rotary embedding, temperatures of attention."""

from __future__ import annotations

import math
from decimal import Context, Decimal, localcontext

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import InvalidArgument
from paceline.exact_math import cos_sin, log64
from paceline.models.llama_config import LlamaConfig


def rope_table(config: LlamaConfig, length: int | None = None) -> torch.Tensor:
    """Cosines and sines of the first ``length`` positions.  # [length, rotary_dim] float32

    The table has the same bits on every processor, but for rope types whose frequencies come from
    transformers (all that :func:`rope_frequencies` does not know): torch's power function may
    differ in the last bit between machines.

    Args:
        length: None: the model's context.

    Raises:
        InvalidArgument: config.json lacks a number that the rope type needs.
    """
    frequencies, scaling = scaled_frequencies(config)
    half = len(frequencies)
    table = np.empty((length or config.context_length, 2 * half), np.float32)
    rows = max(1, 2**15 // half)  # at a time: their float64 numbers stay in a core's cache
    for start in range(0, len(table), rows):
        stop = min(start + rows, len(table))
        # In float32, as the models were trained.
        angles = np.arange(start, stop, dtype=np.float32)[:, None] * frequencies
        table[start:stop, :half], table[start:stop, half:] = cos_sin(angles.astype(np.float64))
    if scaling != 1.0:
        table *= np.float32(scaling)
    return torch.from_numpy(table)


def temperature_table(config: LlamaConfig) -> torch.Tensor:
    """What queries are multiplied by where there is no rotation.  # [context_length] float32

    With the same bits on every processor. Nakanishi 2025 (arXiv 2501.19399), as Llama 4 has it.
    """
    differs = config.differs
    steps = (np.arange(config.context_length) + 1) // differs.temperature_floor
    levels = 1.0 + differs.temperature * log64(np.arange(1, steps[-1] + 2, dtype=np.float64))
    return torch.from_numpy(levels.astype(np.float32)[steps])


def scaled_frequencies(config: LlamaConfig) -> tuple[npt.NDArray[np.float32], float]:
    """Radians per position of each pair [rotary_dim / 2], and the scale of cosines and sines."""
    frequencies = rope_frequencies(config)
    if frequencies is not None:
        return frequencies, _longrope_scale(config)
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
    """Radians a position of each pair, for the rope types default, linear, llama3 and longrope.

    Step by step what transformers' modeling_rope_utils.py computes in float32, with a power that
    is correctly rounded instead of torch's.  # [rotary_dim / 2]; None: another rope type
    """
    kind, number = config.rope["rope_type"], np.float32
    if kind not in ("default", "linear", "llama3", "longrope"):
        return None
    dim = config.rotary_dim
    exponents = np.arange(0, dim, 2, dtype=np.float32) / number(dim)
    theta = Decimal(float(number(_rope_number(config, "rope_theta"))))
    with localcontext(Context(prec=40)):  # integers only: the same digits everywhere
        powers = [float(theta ** Decimal(float(exponent))) for exponent in exponents]
    if kind == "longrope":
        stretches = _stretches(config, len(powers))
        return number(1.0) / (stretches * np.array(powers, np.float32))
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
    if low == high:  # as in Llama 4 Scout: there is nothing between them
        return stretched
    share = ((number(1.0) / wavelengths) * number(old) - number(low)) / number(high - low)
    mixed = (number(1.0) - share) * stretched / factor + share * stretched
    between = (wavelengths >= number(old / high)) & (wavelengths <= number(old / low))
    return np.where(between, mixed, stretched)


def _stretches(config: LlamaConfig, count: int) -> npt.NDArray[np.float32]:
    """LongRoPE's factor of each pair, for texts within the original context."""
    name = "short_factor"
    found = config.rope.get(name)
    right = isinstance(found, list) and len(found) == count
    if not right or not all(isinstance(x, (int, float)) and x > 0 for x in found or ()):
        raise InvalidArgument(
            f"rope_parameters.{name}", found, f"a list of {count} numbers above 0"
        )
    return np.array(found, np.float32)


def _longrope_scale(config: LlamaConfig) -> float:
    """LongRoPE's scale of cosines and sines (arXiv 2402.13753); 1 for other types."""
    if config.rope["rope_type"] != "longrope":
        return 1.0
    if config.rope.get("attention_factor") is not None:
        return _rope_number(config, "attention_factor")
    factor = _rope_number(config, "factor")
    original = _rope_number(config, "original_max_position_embeddings")
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _rope_number(config: LlamaConfig, name: str) -> float:
    value = config.rope.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise InvalidArgument(f"rope_parameters.{name}", value, "a number above 0")
    return float(value)
