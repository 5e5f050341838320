"""Adapters as PEFT writes them, and the logits that PEFT computes with them.

The folders in ``tests/models/peft`` were made with peft 0.21.2 and transformers 5.19, in an
environment of its own::

    PYTHONPATH=. python tests/models/make_peft.py tests/models/peft

``expected.safetensors`` holds a text and its logits over the small random model of :func:`base`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.modelzoo import make_model

CASES: dict[str, dict[str, Any]] = {
    "all_linear": {"target_modules": "all-linear", "r": 4, "lora_alpha": 6, "use_rslora": True},
    "patterns": {
        "target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 8,
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 3},
        "alpha_pattern": {"down_proj": 12},
    },
    "some_layers": {
        "target_modules": ["k_proj", "up_proj"], "r": 3, "lora_alpha": 3,
        "layers_to_transform": [1],
    },
    "regex": {
        "target_modules": r".*\.(o|gate|v)_proj", "r": 2, "lora_alpha": 16,
        "exclude_modules": ["model.layers.0.self_attn.o_proj"],
    },
}  # fmt: skip


def base(folder: Path) -> Path:
    """The model that the adapters change."""
    return make_model(
        "llama_gqa", folder, hidden_size=32, intermediate_size=48, num_hidden_layers=2
    )


def main() -> None:
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM

    out = Path(sys.argv[1])
    ids = torch.arange(7, 247, 20)
    with tempfile.TemporaryDirectory() as scratch:
        source = base(Path(scratch))
        for seed, (name, values) in enumerate(CASES.items()):
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
            adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **values)).eval()
            generator = torch.Generator().manual_seed(seed)
            for parameter, tensor in adapted.named_parameters():
                if "lora_" in parameter:
                    tensor.data = 0.3 * torch.randn(tensor.shape, generator=generator)
            adapted.save_pretrained(out / name)
            (out / name / "README.md").unlink()
            config = out / name / "adapter_config.json"
            config.write_text(config.read_text().replace(json.dumps(str(source)), '"base"'))
            with torch.inference_mode():
                logits = adapted(input_ids=ids[None]).logits[0]
            save_file({"ids": ids, "logits": logits}, str(out / name / "expected.safetensors"))


if __name__ == "__main__":
    main()
