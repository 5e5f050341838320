"""Checkpoints as quantising libraries write them, made from a small Llama.

Names, dtypes and configurations are those that the libraries write; ``LAYOUTS`` has a row each.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
GROUP = 32  # inputs that share a scale in the four-bit layouts


def _fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def _fp8_blocks(name: str, weight: torch.Tensor) -> Tensors:
    """DeepSeek's and Qwen's: a scale for each block of 128 x 128."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    scale = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            block = weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            scale[i, j] = block.abs().max() / 448
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    codes = _fp8(weight, wide[: weight.shape[0], : weight.shape[1]])
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scale}


def _fp8_tensor(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.abs().max().reshape(1) / 448
    codes = {f"{name}.weight": _fp8(weight, scale), f"{name}.weight_scale": scale.bfloat16()}
    return codes | {f"{name}.input_scale": torch.ones(1, dtype=torch.bfloat16)}


def _fp8_channel(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {f"{name}.weight": _fp8(weight, scale), f"{name}.weight_scale": scale.bfloat16()}


def _int8_channel(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scale.bfloat16()}


def _bnb_int8(name: str, weight: torch.Tensor) -> Tensors:
    largest = weight.abs().amax(1)
    return {
        f"{name}.weight": (weight / largest[:, None] * 127).round().to(torch.int8),
        f"{name}.SCB": largest,
        f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def _bnb_4bit(name: str, weight: torch.Tensor) -> Tensors:
    """Nested: the blocks' scales are eight-bit codes themselves."""
    blocks = weight.reshape(-1, 64)
    scaled = blocks / blocks.abs().amax(1, keepdim=True)
    table = torch.linspace(-1, 1, 16)
    codes = (scaled.flatten()[:, None] - table).abs().argmin(1)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [*weight.shape]}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.3}
    return {
        f"{name}.weight": (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None],
        f"{name}.weight.absmax": torch.full((len(blocks),), 128, dtype=torch.uint8),
        f"{name}.weight.quant_map": table,
        f"{name}.weight.nested_absmax": torch.ones(1),
        f"{name}.weight.nested_quant_map": torch.linspace(-1, 1, 256),
        f"{name}.weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Eight four-bit codes of the last dimension in each int32."""
    shifts = 4 * torch.arange(8)
    packed = (codes.reshape(*codes.shape[:-1], -1, 8).long() << shifts).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def _four_bit(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [inputs, outputs] around 8, and scales [inputs / GROUP, outputs]."""
    grouped = weight.T.reshape(-1, GROUP, weight.shape[0])
    scales = grouped.abs().amax(1) / 7
    return ((grouped / scales[:, None]).round() + 8).reshape(weight.T.shape), scales


def _gptq(name: str, weight: torch.Tensor) -> Tensors:
    codes, scales = _four_bit(weight)
    return {
        f"{name}.qweight": _nibbles(codes.T).T.contiguous(),
        f"{name}.qzeros": _nibbles(torch.full_like(scales, 7)),
        f"{name}.scales": scales.half(),
        f"{name}.g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }


def _awq(name: str, weight: torch.Tensor) -> Tensors:
    codes, scales = _four_bit(weight)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    mixed = codes.reshape(len(codes), -1, 8)[..., order].reshape(codes.shape)
    return {
        f"{name}.qweight": _nibbles(mixed),
        f"{name}.qzeros": _nibbles(torch.full_like(scales, 8)),
        f"{name}.scales": scales.half(),
    }


def _mxfp4(name: str, weight: torch.Tensor) -> Tensors:
    """Two codes a byte, and an exponent for 32 inputs."""
    blocks = weight.reshape(weight.shape[0], -1, 32)
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = blocks / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - table).abs().argmin(-1) + 8 * (scaled < 0)
    return {
        f"{name}_blocks": (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8),
        f"{name}_scales": (exponents + 127).to(torch.uint8),
    }


def _compressed(form: str, kind: str, strategy: str, activations: str) -> dict[str, Any]:
    numbers = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": strategy, "dynamic": False},
        "input_activations": numbers | {"strategy": activations, "dynamic": activations == "token"},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


_BITSANDBYTES = {
    "quant_method": "bitsandbytes", "llm_int8_threshold": 6.0, "llm_int8_skip_modules": None,
    "llm_int8_has_fp16_weight": False, "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
}  # fmt: skip

# name -> (tensors of one linear layer, quantization_config)
LAYOUTS: dict[str, tuple[Callable[[str, torch.Tensor], Tensors], dict[str, Any]]] = {
    "fp8_blocks": (
        _fp8_blocks,
        {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    ),
    "compressed_fp8_tensor": (
        _fp8_tensor, _compressed("float-quantized", "float", "tensor", "tensor"),
    ),
    "compressed_fp8_channel": (
        _fp8_channel, _compressed("float-quantized", "float", "channel", "token"),
    ),
    "compressed_int8": (_int8_channel, _compressed("int-quantized", "int", "channel", "token")),
    "bitsandbytes_int8": (
        _bnb_int8, _BITSANDBYTES | {"load_in_8bit": True, "load_in_4bit": False},
    ),
    "bitsandbytes_4bit": (
        _bnb_4bit, _BITSANDBYTES | {"load_in_8bit": False, "load_in_4bit": True},
    ),
    "gptq": (
        _gptq,
        {
            "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False,
            "sym": True, "checkpoint_format": "gptq",
        },
    ),
    "awq": (
        _awq,
        {
            "quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm",
            "zero_point": True,
        },
    ),
    "mxfp4": (
        _mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    ),
}  # fmt: skip


def quantize(folder: Path, layout: str, to: Path) -> Path:
    """A copy of a model folder with the linear layers of its decoder in another layout."""
    encode, config = LAYOUTS[layout]
    shutil.copytree(folder, to)
    tensors: Tensors = {}
    for name, tensor in load_file(to / "model.safetensors").items():
        is_linear = name.endswith("_proj.weight")
        tensors |= encode(name.removesuffix(".weight"), tensor) if is_linear else {name: tensor}
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    edited = json.loads((to / "config.json").read_text()) | {"quantization_config": config}
    (to / "config.json").write_text(json.dumps(edited))
    return to
