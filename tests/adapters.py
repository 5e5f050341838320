"""Random adapters (LoRA) in PEFT's format, and the models that they stand for."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def linears(base: Path) -> dict[str, torch.Tensor]:
    """The weights of the layers' linear layers by module name."""
    weights = load_file(str(base / "model.safetensors"))
    return {
        name.removesuffix(".weight"): weight
        for name, weight in weights.items()
        if ".layers." in name and weight.ndim == 2
    }


def make_adapter(
    folder: Path, base: Path, *, targets: tuple[str, ...] = ALL, rank: int = 4, seed: int = 0,
    strength: float = 1.0, **config: Any,
) -> Path:  # fmt: skip
    """Write an adapter as PEFT does: B and A are drawn wide enough to change what is likely.

    Args:
        config: fields of adapter_config.json; ``rank_pattern`` counts for full module names.
    """
    values = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets),
        "bias": "none", "init_lora_weights": True, "base_model_name_or_path": base.name,
        "lora_dropout": 0.05, "task_type": "CAUSAL_LM", "inference_mode": True, **config,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, weight in linears(base).items():
        if module.rpartition(".")[2] not in targets:
            continue
        outputs, inputs = weight.shape
        own = values.get("rank_pattern", {}).get(module, rank)
        wide = strength * math.sqrt(float(weight.float().var()) / own)
        a = torch.randn(own, inputs, generator=generator)
        b = torch.randn(outputs, own, generator=generator) * wide
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    return folder


def merge(base: Path, adapter: Path, folder: Path, **scales: float) -> Path:
    """Write the model with ``W + scale * B @ A`` for each linear layer, in float32.

    Args:
        scales: by module name; others have ``lora_alpha / r``.
    """
    config = json.loads((adapter / "adapter_config.json").read_text())
    pairs = load_file(str(adapter / "adapter_model.safetensors"))
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("heads"))
    weights = {k: v.float() for k, v in load_file(str(base / "model.safetensors")).items()}
    for module in linears(base):
        at = f"base_model.model.{module}"
        if f"{at}.lora_A.weight" in pairs:
            scale = scales.get(module, config["lora_alpha"] / config["r"])
            a, b = pairs[f"{at}.lora_A.weight"], pairs[f"{at}.lora_B.weight"]
            weights[f"{module}.weight"] += scale * (b.float() @ a.float())
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
