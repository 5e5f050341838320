"""Parallel prompt decoding: trained embeddings behind a node make the target guess ahead.

Chen et al. 2024 (arXiv 2405.18628). The only parameters are the embeddings of a few prompt tokens,
one for each distance; they enter the first layer like any token, and training makes the target
predict its later tokens from them (section 3.1; one embedding for each prompt token).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.models.heads.base import HeadTarget
from paceline.models.heads.pseudo import PseudoHead


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """As :class:`paceline.models.heads.pseudo.PseudoOptions`, with the paper's numbers."""

    num_guesses: int = 3
    decay: float = 0.8
    places: int = 32


class PromptDecoding(PseudoHead):
    """See the module."""

    kind = "ppd"
    Options = PromptOptions

    def __init__(self, target: HeadTarget, options: PromptOptions) -> None:
        super().__init__(target, options, first_layer=0)
        # They begin among the embeddings of tokens.
        center, spread = target.embedding.float().mean(0), target.embedding.float().std(0)
        noise = torch.randn(options.num_guesses, len(center)).to(center.device)
        self.prompts = nn.Parameter(center + spread * noise)  # [num_guesses, hidden_size]

    def inputs(self, stream: Tensor, owners: Tensor, index: Tensor) -> Tensor:
        return self.prompts[index].expand(*stream.shape[:-2], -1, -1)
