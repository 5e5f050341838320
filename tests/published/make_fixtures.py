"""Writes the checkpoints in ``fixtures/`` and what ``speculators`` computes with them.

It needs ``speculators`` 0.9, in an environment of its own:

    python -m venv VENV && VENV/bin/pip install speculators==0.9.0
    TORCHDYNAMO_DISABLE=1 VENV/bin/python tests/published/make_fixtures.py [NAME ...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save_file

FIXTURES = Path(__file__).parent / "fixtures"
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96, "num_hidden_layers": 1,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
VARIANTS = {
    "plain": ("eagle3", "llama", {"num_key_value_heads": 4}, {"draft_vocab_size": 96}),
    "reduced": (
        "eagle3",
        "llama",
        {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
        {"draft_vocab_size": 40, "norm_before_residual": True, "norm_before_fc": True},
    ),
    "norms": (
        "eagle3", "qwen3", {}, {"draft_vocab_size": 64, "fc_norm": True, "norm_output": True},
    ),
    "parallel": (
        "peagle", "llama", {"num_hidden_layers": 2}, {"draft_vocab_size": 96, "mask_token_id": 90},
    ),
    "parallel_reduced": (
        "peagle",
        "qwen3",
        {"num_key_value_heads": 1},
        {
            "draft_vocab_size": 40, "norm_before_residual": True, "fc_norm": True,
            "mask_token_id": 3,
        },
    ),
    "mtp": ("mtp", "qwen3", {"num_hidden_layers": 4, "attention_bias": True}, {}),
}  # fmt: skip
STEPS, LENGTH = 3, 12


def config_of(name: str):
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.mtp import MTPSpeculatorConfig
    from speculators.models.peagle import PEagleSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import AutoConfig

    kind, model_type, layers, options = VARIANTS[name]
    config_class = {
        "eagle3": Eagle3SpeculatorConfig, "peagle": PEagleSpeculatorConfig,
        "mtp": MTPSpeculatorConfig,
    }[kind]  # fmt: skip
    if kind != "mtp":
        options = options | {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    inner = AutoConfig.for_model(model_type, **{**SIZES, **layers})
    inner._attn_implementation = "eager"
    return config_class(
        transformer_layer_config=inner,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **options,
    )


@torch.no_grad()
def logits_of(model, features: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Of every step from every place, fed the text.  # [steps, length, draft_vocab_size]"""
    from speculators.losses import resolve_loss_config

    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _m, _i, out: seen.append(out[0]))
    length = len(token_ids)
    texts = {
        "hidden_states": features[None], "input_ids": token_ids[None],
        "document_ids": torch.zeros(1, length, dtype=torch.long),
    }  # fmt: skip
    if model.config.speculators_model_type == "eagle3":
        model(**texts, ttt_steps=STEPS)
        steps = torch.stack(seen)
    else:  # every place begins a draft, where training draws some of them
        grid = [(place, depth) for depth in range(STEPS) for place in range(length - depth)]
        anchors, depths = torch.tensor(grid).T
        with patch(
            "speculators.models.peagle.core.generate_cod_sample_indices",
            lambda **_: (anchors, depths),
        ):
            last = torch.zeros(1, length, model.hidden_size)
            loss = resolve_loss_config("kl_div", "eager")
            model(
                **texts, verifier_last_hidden_states=last, num_depths=STEPS, loss_config=loss
            )  # fmt: skip
        steps = torch.zeros(STEPS, length, seen[0].shape[-1])
        steps[depths, anchors] = seen[0]
    hook.remove()
    return steps


@torch.no_grad()
def mtp_logits_of(model, features: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """As :func:`logits_of`, of its layer behind the committed pairs and its own outputs."""
    steps = torch.zeros(STEPS, len(token_ids), model.config.vocab_size)
    for place in range(len(token_ids)):
        x = features[: place + 1]
        for step in range(STEPS):
            if place + step == len(token_ids):
                break
            count = len(x)
            mask = torch.full((1, 1, count, count), float("-inf")).triu(1)
            places = torch.arange(count)[None]
            out = model.mtp_layers[0](
                hidden_states=x[None], token_embeddings=model.embed_tokens(token_ids[None, :count]),
                attention_mask=mask, position_ids=places,
                position_embeddings=model.rotary_emb(x[None], places),
            )[0]  # fmt: skip
            steps[step, place] = model.lm_head(out[-1])
            x = torch.cat([x, out[-1:]])
    return steps


@torch.no_grad()
def write(name: str) -> None:
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.mtp import MTPDraftModel
    from speculators.models.peagle import PEagleDraftModel

    torch.manual_seed(len(name))
    kind = VARIANTS[name][0]
    model_class = {
        "eagle3": Eagle3DraftModel, "peagle": PEagleDraftModel, "mtp": MTPDraftModel,
    }[kind]  # fmt: skip
    model = model_class(config_of(name)).eval()
    for parameter in model.parameters():
        parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.dim() == 1))
        if kind != "eagle3":
            parameter.copy_(parameter.bfloat16())
    count, size = model.draft_vocab_size, SIZES["vocab_size"]
    if count < size:
        tokens = torch.randperm(size)[:count].sort().values
        t2d = torch.zeros(size, dtype=torch.bool)
        t2d[tokens] = True
        model.load_vocab_mappings(t2d, tokens - torch.arange(count))
    features = torch.randn(LENGTH, (1 if kind == "mtp" else 3) * SIZES["hidden_size"])
    token_ids = torch.randint(0, size, (LENGTH,))
    folder = FIXTURES / name
    expected = {"features": features, "token_ids": token_ids}
    if kind == "mtp":
        expected["logits"] = mtp_logits_of(model, features, token_ids)
        text = torch.cat([token_ids[:1], token_ids])[None]  # from the first place itself on
        trained, *_ = model(text, torch.cat([features, features[-1:]])[None])
        expected["trained"] = torch.cat(trained).contiguous()
        expected["embedding"] = model.embed_tokens.weight.clone()
        expected["lm_head"] = model.lm_head.weight.clone()
    else:
        expected["logits"] = logits_of(model, features, token_ids).contiguous()
    (model if kind == "eagle3" else model.bfloat16()).save_pretrained(folder)
    (folder / "config.py").unlink(missing_ok=True)  # a copy of the package's own code
    (folder / "expected").mkdir(exist_ok=True)
    save_file(expected, folder / "expected" / "logits.safetensors")


if __name__ == "__main__":
    for variant in sys.argv[1:] or VARIANTS:
        write(variant)
