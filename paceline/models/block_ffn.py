"""Llama with BlockFFN's layers: many small experts, of which consecutive tokens use the same few.

Song et al. 2025 (arXiv 2507.08771). A router with ReLU and RMSNorm gives every expert a gate, and
those whose gate is zero take no part: how many do is learnt, not set. Experts have no gate inside.
A forward over several tokens, as a verification is, reads the weights of the experts that any of
them uses, and of no others.

The folder is that of a ``transformers`` model of the type ``block_ffn``, which runs on the general
path. Published checkpoints of the paper have code of their own and other attention; they do not
load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


@strict
class BlockFfnConfig(LlamaConfig):
    """Attributes:
    num_experts: of a layer.
    expert_size: width of an expert.
    """

    model_type = "block_ffn"

    num_experts: int = 32
    expert_size: int = 12


class BlockFfn(nn.Module):
    """The experts of a layer."""

    def __init__(self, config: BlockFfnConfig) -> None:
        super().__init__()
        shape = config.num_experts, config.expert_size, config.hidden_size
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.router_norm = nn.RMSNorm(config.num_experts, eps=config.rms_norm_eps)
        self.up = nn.Parameter(config.initializer_range * torch.randn(shape))
        self.down = nn.Parameter(config.initializer_range * torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        """# [..., hidden_size] -> the same"""
        gates = self.router_norm(F.relu(self.router(x)))
        return self.of_all(x, gates) if torch.is_grad_enabled() else self.of_used(x, gates)

    def of_all(self, x: Tensor, gates: Tensor) -> Tensor:
        """The outputs of all experts, each times its gate; for training.

        # [..., hidden_size], [..., num_experts] -> [..., hidden_size]
        """
        hidden = F.silu(x @ self.up.flatten(0, 1).T).unflatten(-1, self.up.shape[:2])
        result: Tensor = (hidden * gates[..., None]).flatten(-2) @ self.down.flatten(0, 1)
        return result

    def of_used(self, x: Tensor, gates: Tensor) -> Tensor:
        """The same; reads the weights of the experts that a row has a gate for, and no others."""
        result = torch.zeros_like(x)
        for expert in gates.flatten(0, -2).any(0).nonzero()[:, 0].tolist():
            hidden = F.silu(x @ self.up[expert].T) * gates[..., expert, None]
            result += hidden @ self.down[expert]
        return result


class BlockFfnForCausalLM(LlamaForCausalLM):
    """Llama whose MLPs are :class:`BlockFfn`."""

    config_class = BlockFfnConfig

    def __init__(self, config: BlockFfnConfig) -> None:
        super().__init__(config)  # type: ignore[no-untyped-call]
        for layer in self.model.layers:
            layer.mlp = BlockFfn(config)


def register() -> None:
    """Let ``transformers`` load folders of this type; calling it again is harmless."""
    AutoConfig.register(BlockFfnConfig.model_type, BlockFfnConfig, exist_ok=True)
    AutoModelForCausalLM.register(BlockFfnConfig, BlockFfnForCausalLM, exist_ok=True)


@contextmanager
def routed(model: Any) -> Iterator[list[Tensor]]:
    """What the routers of a model compute meanwhile, before ReLU, call by call.

    Experts with a positive score are used.  # [..., num_experts] each
    """
    found: list[Tensor] = []
    hooks = [
        module.router.register_forward_hook(lambda _module, _x, scores: found.append(scores))
        for module in model.modules()
        if isinstance(module, BlockFfn)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def share_used(scores: Tensor, chunk: int) -> float:
    """The share of experts that any token of a chunk uses, on average over whole chunks.

    One minus it is the paper's sparsity: of tokens with a chunk of 1, else of chunks.

    Args:
        scores: of routers.  # [..., length, num_experts]
    """
    whole = scores.shape[-2] // chunk * chunk
    return float((scores[..., :whole, :] > 0).unflatten(-2, (-1, chunk)).any(-2).float().mean())
