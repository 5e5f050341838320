"""Dovetail: EAGLE's layer on another device than the target's, fed by a gate, and deeper.

Zhang et al. 2024 (arXiv 2412.18934). *Dynamic gating fusion* (DGF) takes the place of EAGLE's
linear map: with the feature h and the embedding e of the token after it,

    z = sigmoid([h W1 ; SiLU(e W2)] Wz)        out = z * h W1 + (1 - z) * SiLU(e W2)

so that each component of a layer's input lies between one of the feature's and one of the token's.
The target stays on the CPU, where a further node costs more than on a GPU, so drafts are smaller
than EAGLE's, and the head can afford more layers. What it reads of the target in a round is the
tokens and one feature for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.heads.base import HeadTarget
from paceline.models.heads.eagle import Eagle, EagleOptions


@dataclass(frozen=True, slots=True)
class DovetailOptions(EagleOptions):
    """As :class:`paceline.models.heads.eagle.EagleOptions`; the paper has up to six layers."""

    num_layers: int = 2


class Dovetail(Eagle):
    """See the module."""

    kind = "dovetail"
    Options = DovetailOptions
    kernel_has_it = False

    def __init__(self, target: HeadTarget, options: DovetailOptions) -> None:
        super().__init__(target, options)
        size = target.config.hidden_size
        del self.fc
        self.of_feature = nn.Linear(size, size, bias=False)  # W1
        self.of_token = nn.Linear(size, size, bias=False)  # W2
        self.gate = nn.Linear(2 * size, size, bias=False)  # Wz

    def inputs(self, embedded: Tensor, features: Tensor) -> Tensor:
        feature, token, z = self.fusion(embedded, features)
        return z * feature + (1 - z) * token

    def fusion(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is mixed, and the share of the first.  # 2 x [..., hidden_size] -> 3 x the same"""
        feature, token = self.of_feature(features), F.silu(self.of_token(embedded))
        return feature, token, torch.sigmoid(self.gate(torch.cat([feature, token], -1)))

    def prepare(self) -> None:
        self.stack = self.new_stack()
