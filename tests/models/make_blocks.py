"""Random checkpoints of block drafters, and what their own library computes with them.

The folders in ``tests/models/blocks`` were made with speculators 0.9.0 (Apache-2.0), in an
environment of its own::

    python tests/models/make_blocks.py tests/models/blocks
    python tests/models/make_blocks.py /tmp/others --seed 7    # others, of random sizes

Each holds a checkpoint as ``save_pretrained`` writes it, and ``expected.safetensors``: the target's
embedding and output layer, a text with the features of its tokens, and for some of its places the
logits of the block that is drafted there, fed the tokens in ``fed``.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TEXT, PLACES = 16, (6, 7, 10, 15)
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
# kind, of the layers, of the drafter
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash": ("dflash", {}, {"block_size": 5}),
    "dflash_windows": (
        "dflash",
        {
            "attention_bias": True, "sliding_window": 4, "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        {"block_size": 6, "draft_vocab_size": 40, "sample_from_anchor": True},
    ),
    "dflash_both_ways": (
        "dflash",
        {
            "sliding_window": 5, "use_sliding_window": True, "num_hidden_layers": 1,
            "layer_types": ["sliding_attention"],
        },
        {"block_size": 4, "sliding_window_non_causal": True},
    ),
    "dflash2": (
        "dflash2", {},
        {"block_size": 5, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 9},
    ),
    "dflash2_windows": (
        "dflash2",
        {
            "num_key_value_heads": 1, "sliding_window": 4, "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"], "attention_bias": True,
        },
        {
            "block_size": 4, "conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 8,
            "selector_top_k": 12, "sliding_window_non_causal": False, "sample_from_anchor": True,
        },
    ),
    "dspark": ("dspark", {}, {"block_size": 4, "markov_rank": 8}),
    "dspark_gated": (
        "dspark",
        {"num_hidden_layers": 1, "num_key_value_heads": 4},
        {
            "block_size": 4, "markov_rank": 6, "markov_head_type": "gated",
            "confidence_head_with_markov": False, "draft_vocab_size": 50,
        },
    ),
    "dspark_rnn": (
        "dspark",
        {"num_hidden_layers": 1, "num_key_value_heads": 1},
        {
            "block_size": 5, "markov_rank": 6, "markov_head_type": "rnn",
            "sample_from_anchor": False, "draft_vocab_size": 40,
        },
    ),
    "xpress": ("xpress", {}, {"block_size": 5, "xpress_rank": 6}),
    "xpress_anchor": (
        "xpress",
        {
            "num_hidden_layers": 1, "num_key_value_heads": 1, "attention_bias": True,
            "sliding_window": 4, "use_sliding_window": True, "layer_types": ["sliding_attention"],
        },
        {
            "block_size": 4, "xpress_rank": 7, "xpress_mlp_ratio": 3, "num_jacobi_passes": 1,
            "sample_from_anchor": True, "draft_vocab_size": 40,
        },
    ),
}  # fmt: skip


def random_cases(seed: int, count: int = 12) -> dict[str, Any]:
    """Cases of other sizes."""
    draw, cases = random.Random(seed), {}
    for i in range(count):
        kv = draw.choice([1, 2, 3])
        layers: dict[str, Any] = {
            "hidden_size": draw.choice([24, 48, 64]), "intermediate_size": draw.choice([30, 96]),
            "num_hidden_layers": draw.choice([1, 2, 3]), "num_key_value_heads": kv,
            "num_attention_heads": kv * draw.choice([1, 2, 4]),
            "head_dim": draw.choice([8, 16, 22]),
            "vocab_size": draw.choice([70, 131]), "attention_bias": draw.random() < 0.3,
        }  # fmt: skip
        own: dict[str, Any] = {"block_size": draw.choice([3, 5, 8])}
        if draw.random() < 0.4:
            kinds = ["full_attention", "sliding_attention"]
            layers["layer_types"] = [draw.choice(kinds) for _ in range(layers["num_hidden_layers"])]
            layers |= {"sliding_window": draw.choice([1, 3, 9]), "use_sliding_window": True}
            own["sliding_window_non_causal"] = draw.random() < 0.5
        if draw.random() < 0.5:
            own["draft_vocab_size"] = draw.choice([20, 64])
        if draw.random() < 0.5:
            own["sample_from_anchor"] = draw.random() < 0.5
        kind = draw.choice(["dflash", "dflash2", "dspark", "xpress"])
        if kind == "dflash2":
            own.pop("draft_vocab_size", None)
            own |= {
                "conv_kernel_size": draw.choice([1, 2, 3]), "conv_group_size": draw.choice([4, 8]),
                "selector_rank": draw.choice([3, 16]), "selector_top_k": draw.choice([1, 20]),
            }  # fmt: skip
        if kind == "dspark":
            own["markov_rank"] = draw.choice([0, 5, 16])
            own["markov_head_type"] = draw.choice(["vanilla", "gated", "rnn"])
            own["confidence_head_with_markov"] = own["markov_rank"] > 0 and draw.random() < 0.5
            own["enable_confidence_head"] = draw.random() < 0.8
        if kind == "xpress":
            own["xpress_rank"] = draw.choice([1, 5, 16])
            own["xpress_mlp_ratio"] = draw.choice([1, 2, 4])
        cases[f"random_{seed}_{i}"] = (kind, layers, own)
    return cases


@torch.no_grad()
def make(folder: Path, kind: str, layers: dict[str, Any], own: dict[str, Any], seed: int) -> None:
    """Write one folder."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from speculators.models.xpress import XPressDraftModel, XPressSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    classes: dict[str, tuple[Any, Any]] = {
        "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
        "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel),
        "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
        "xpress": (XPressSpeculatorConfig, XPressDraftModel),
    }
    config_class, model_class = classes[kind]
    torch.manual_seed(seed)
    sizes = SIZES | layers
    shape = Qwen3Config(**sizes)
    shape._attn_implementation = "eager"
    vocab = sizes["vocab_size"]
    values = {"draft_vocab_size": vocab, "mask_token_id": vocab - 3} | own
    config = config_class(
        transformer_layer_config=shape,
        aux_hidden_state_layer_ids=[1, 3, 4],
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=2)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **values,
    )
    model = model_class(config).eval()
    embedding = torch.randn(vocab, sizes["hidden_size"]).bfloat16().float()
    lm_head = (torch.randn(vocab, sizes["hidden_size"]) / 3).bfloat16().float()
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter) * (0.2 if "norm" in name else 0.25)
        parameter.copy_(((1.0 if "norm" in name else 0.0) + noise).bfloat16())
    model.embed_tokens.weight.copy_(embedding)
    if model.use_draft_vocab:
        tokens = torch.randperm(vocab)[: values["draft_vocab_size"]].sort().values
        model.d2t.copy_(tokens - torch.arange(len(tokens)))
        model.t2d[tokens] = True
    else:
        model.lm_head.weight.copy_(lm_head)
    model.verifier_lm_head.weight.copy_(model.lm_head.weight)

    block = config.block_size
    token_ids = torch.randint(0, vocab, (TEXT + block,))
    features = torch.randn(TEXT + block, 3 * sizes["hidden_size"]).bfloat16().float()
    expected = {
        "embedding": embedding, "lm_head": lm_head, "token_ids": token_ids, "features": features,
    }  # fmt: skip
    for place in PLACES:
        logits, sure = block_at(model, token_ids, features, place)
        expected[f"logits.{place}"] = logits
        if sure is not None:
            expected[f"acceptance.{place}"] = sure.sigmoid()
    model.bfloat16().save_pretrained(folder)
    halves = {k: v.bfloat16() if v.is_floating_point() else v for k, v in expected.items()}
    kept = {k: v for k, v in expected.items() if "." in k}
    save_file({**halves, **kept}, folder / "expected.safetensors")
    for code in folder.glob("*.py"):  # a copy of the library's own
        code.unlink()
    config_file = folder / "config.json"
    text = {k: v for k, v in json.loads(config_file.read_text()).items() if k != "auto_map"}
    config_file.write_text(json.dumps(text, indent=1) + "\n")
    print(folder, len(load_file(folder / "model.safetensors")), "tensors")


def block_at(
    model: Any, token_ids: torch.Tensor, features: torch.Tensor, place: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits and acceptance of the block at a place, fed the text's tokens behind it."""
    only = torch.zeros(1, len(token_ids))
    only[0, place] = 1
    hidden, logits, *_ = model._backbone_forward(
        features[None], token_ids[None], only, features[None, :, : model.hidden_size],
        torch.zeros(1, len(token_ids), dtype=torch.long), max_anchors=1,
    )  # fmt: skip
    size, at_anchor = model.block_size, model.config.sample_from_anchor
    tokens = token_ids[None, place : place + size]
    before = tokens if at_anchor else torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
    sure, embedded = None, None
    if getattr(model, "markov_head", None) is not None:
        embedded = model.markov_head.prev_embeddings(before)
        logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
    if getattr(model, "confidence_head", None) is not None:
        given = hidden
        if model.config.confidence_head_with_markov:
            given = torch.cat([hidden, embedded], -1)
        sure = model.confidence_head(given)[0]
    if getattr(model, "refiner_head", None) is not None:
        earlier = token_ids[None, place - 1 : place]
        given = before if at_anchor else torch.cat([earlier, before[:, 1:]], 1)
        logits = logits + model.refiner_head.block_bias(given, hidden)
    if getattr(model, "candidate_selector", None) is not None:
        chosen, scores = model.candidate_selector.select(logits, hidden, before)
        logits = torch.full_like(logits, float("-inf")).scatter(-1, chosen, scores)
    first = 0 if at_anchor else 1
    return logits[0, first:].contiguous(), None if sure is None else sure[first:].contiguous()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help="cases; default: all")
    parser.add_argument("--seed", type=int, help="random cases of this seed")
    arguments = parser.parse_args()
    cases = CASES if arguments.seed is None else random_cases(arguments.seed)
    for number, (name, case) in enumerate(cases.items()):
        if arguments.names and name not in arguments.names:
            continue
        make(arguments.out / name, *case, seed=number)
