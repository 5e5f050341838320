"""Heads that Paceline exports, and what ``speculators`` computes with them.

The folders in ``exported/`` are such exports; they and ``expected`` in them come from

    TORCHDYNAMO_DISABLE=1 PYTHONPATH=. VENV/bin/python tests/published/exports.py

in an environment that has ``speculators`` 0.9 beside Paceline. ``tests/core/test_export.py`` reads
them without it, and where it is installed, compares afresh.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.models.heads.base import Head, HeadTarget
from paceline.models.heads.export import export_head
from tests.heads import untrained
from tests.modelzoo import make_model

EXPORTED = Path(__file__).parent / "exported"
LENGTH = 12
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 5,
    "num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 1, "max_position_embeddings": 64,
}  # fmt: skip
# The target, and the head's kind and options.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dflash": ("llama_gqa", "dflash", {"num_layers": 2, "block_size": 4, "features": (1, 3, 5)}),
    "dflash2": (
        "llama_gqa", "dflash2",
        {
            "num_layers": 1, "block_size": 4, "conv_group": 6, "selector_rank": 5,
            "candidates": 20, "features": (2, 4),
        },
    ),
    "dspark": (
        "llama_gqa", "dspark",
        {"num_layers": 1, "block_size": 3, "markov_rank": 6, "features": (2, 4)},
    ),
    "dspark_rnn": (
        "llama_gqa", "dspark",
        {
            "num_layers": 1, "block_size": 4, "markov_rank": 4, "markov_kind": "rnn",
            "from_anchor": False, "confidence_reads_token": False, "features": (2, 4),
        },
    ),
    "xpress": (
        "llama_gqa", "xpress",
        {"num_layers": 2, "block_size": 5, "refiner_rank": 6, "features": (1, 3, 5)},
    ),
    "xpress_anchor": (
        "llama_gqa", "xpress",
        {
            "num_layers": 1, "block_size": 4, "refiner_rank": 5, "refiner_ratio": 3,
            "jacobi_passes": 2, "from_anchor": True, "vocabulary": 40, "features": (2, 4),
        },
    ),
    "eagle3": (
        "llama_gqa", "eagle3",
        {"published": True, "num_layers": 2, "vocabulary": 40, "features": (1, 3, 5)},
    ),
    "peagle": ("llama_gqa", "peagle", {"num_layers": 2, "depths": 3, "features": (1, 3, 5)}),
    "mtp": ("qwen3", "mtp", {"steps": 3}),
}  # fmt: skip


def make_head(name: str, folder: Path) -> Head:
    """A head with random weights for a random target in ``folder``."""
    zoo, kind, options = CASES[name]
    sizes = SIZES | ({"head_dim": 12} if zoo == "qwen3" else {})
    target = HeadTarget.from_folder(make_model(zoo, folder, seed=1, dtype="bfloat16", **sizes))
    head = untrained(kind, target, seed=2, noise=0.2, **options)
    if options.get("vocabulary"):
        tokens = torch.randperm(target.config.vocab_size)[: options["vocabulary"]]
        head.vocabulary.copy_(tokens.sort().values)  # type: ignore[operator]
    return head.requires_grad_(False).eval()


def text_for(head: Head) -> tuple[Tensor, Tensor]:
    """Random features of places, and the token after each of them."""
    generator = torch.Generator().manual_seed(4)
    config = head.target.config
    of_layers = torch.randn(LENGTH, config.num_layers, config.hidden_size, generator=generator)
    features = of_layers[:, -1] if head.kind == "mtp" else head.select(of_layers)
    token_ids = torch.randint(0, config.vocab_size, (LENGTH,), generator=generator)
    return features.bfloat16().float().contiguous(), token_ids


@torch.no_grad()
def by_speculators(folder: Path, features: Tensor, token_ids: Tensor) -> Tensor:
    """Logits of every step from every place, fed the text.  # [steps, length, num_logits]"""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    from tests.models.make_blocks import block_at
    from tests.published.make_fixtures import logits_of, mtp_logits_of

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config).float().eval()
    kind = config.speculators_model_type
    if kind == "xpress":  # transformers 5 leaves the mask of its mixer without values
        mask = model.refiner_head.causal_tril
        mask.copy_(torch.ones_like(mask).tril())
    if kind in ("eagle3", "peagle"):
        return logits_of(model, features, token_ids)
    if kind == "mtp":
        return mtp_logits_of(model, features, token_ids)
    block, length = config.block_size, len(token_ids)
    ids = torch.cat([token_ids[:1], token_ids, token_ids.new_zeros(block)])
    padded = torch.cat([features, features.new_zeros(len(ids) - length, features.shape[1])])
    places = [block_at(model, ids, padded, place + 1)[0] for place in range(length)]
    return torch.stack(places, 1)


def main() -> None:
    for name in CASES:
        folder, expected = EXPORTED / name, EXPORTED / name / "expected"
        expected.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as zoo:
            head = make_head(name, Path(zoo))
            export_head(head, folder)
            features, token_ids = text_for(head)
            logits = by_speculators(folder, features, token_ids)
            target = {"embedding": head.target.embedding, "lm_head": head.target.lm_head}
            save_file(
                {
                    "features": features.bfloat16(), "token_ids": token_ids,
                    "logits": logits.contiguous(), **{k: v.clone() for k, v in target.items()},
                },
                expected / "logits.safetensors",
            )  # fmt: skip
        config = json.loads((folder / "config.json").read_text())
        config["speculators_config"]["verifier"]["name_or_path"] = None  # it was temporary
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        print(name, list(logits.shape))


if __name__ == "__main__":
    main()
