"""Writes the checkpoints in ``fixtures/`` and what ``speculators`` computes with them.

It needs ``speculators`` 0.9, in an environment of its own:

    python -m venv VENV && VENV/bin/pip install speculators==0.9.0
    TORCHDYNAMO_DISABLE=1 VENV/bin/python tests/published/make_fixtures.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

FIXTURES = Path(__file__).parent / "fixtures"
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96, "num_hidden_layers": 1,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
VARIANTS = {
    "plain": ("llama", {"num_key_value_heads": 4}, {"draft_vocab_size": 96}),
    "reduced": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
        {"draft_vocab_size": 40, "norm_before_residual": True, "norm_before_fc": True},
    ),
    "norms": ("qwen3", {}, {"draft_vocab_size": 64, "fc_norm": True, "norm_output": True}),
}
STEPS, LENGTH = 3, 12


def config_of(name: str):
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import AutoConfig

    model_type, layers, options = VARIANTS[name]
    inner = AutoConfig.for_model(model_type, **{**SIZES, **layers})
    inner._attn_implementation = "eager"
    return Eagle3SpeculatorConfig(
        transformer_layer_config=inner,
        eagle_aux_hidden_state_layer_ids=[1, 2, 4],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **options,
    )


@torch.no_grad()
def logits_of(model, features: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Of every step from every place, fed the text.  # [steps, length, draft_vocab_size]"""
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _m, _i, out: seen.append(out[0]))
    model(
        hidden_states=features[None], input_ids=token_ids[None],
        document_ids=torch.zeros(1, len(token_ids), dtype=torch.long), ttt_steps=STEPS,
    )  # fmt: skip
    hook.remove()
    return torch.stack(seen)


@torch.no_grad()
def write(name: str) -> None:
    from speculators.models.eagle3.core import Eagle3DraftModel

    torch.manual_seed(len(name))
    model = Eagle3DraftModel(config_of(name)).eval()
    for parameter in model.parameters():
        parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.dim() == 1))
    count, size = model.draft_vocab_size, SIZES["vocab_size"]
    if count < size:
        tokens = torch.randperm(size)[:count].sort().values
        t2d = torch.zeros(size, dtype=torch.bool)
        t2d[tokens] = True
        model.load_vocab_mappings(t2d, tokens - torch.arange(count))
    features = torch.randn(LENGTH, 3 * SIZES["hidden_size"])
    token_ids = torch.randint(0, size, (LENGTH,))
    folder = FIXTURES / name
    model.save_pretrained(folder)
    (folder / "config.py").unlink(missing_ok=True)  # a copy of the package's own code
    expected = {
        "features": features,
        "token_ids": token_ids,
        "logits": logits_of(model, features, token_ids).contiguous(),
    }
    (folder / "expected").mkdir(exist_ok=True)
    save_file(expected, folder / "expected" / "logits.safetensors")


if __name__ == "__main__":
    for variant in sys.argv[1:] or VARIANTS:
        write(variant)
