"""FSPAD: EAGLE's layer, with features sampled by the next token and logits freed from features.

Gui et al. 2024 (arXiv 2408.15562). *Feature sampling*: what the target will say is uncertain, and a
feature holds all of it, but the token that was chosen is known; so the token's embedding gates the
feature in a wider space before the pair enters the layer. *Partial alignment distillation*: only
one part of what the layer puts out is aligned with the target's feature, and read in the next step;
logits come from another one. Both start as EAGLE, which remains where both are switched off. The
paper does not give the layers' shapes; those here are our own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.heads.base import HeadTarget
from paceline.models.heads.eagle import Eagle, EagleOptions


@dataclass(frozen=True, slots=True)
class FspadOptions(EagleOptions):
    """As :class:`paceline.models.heads.eagle.EagleOptions`, and:

    Attributes:
        feature_sampling, partial_alignment: the two parts.
        width: of the space in which features are sampled, in hidden sizes.
    """

    feature_sampling: bool = True
    partial_alignment: bool = True
    width: int = 4


class Fspad(Eagle):
    """See the module."""

    kind = "fspad"
    Options = FspadOptions
    kernel_has_it = False

    def __init__(self, target: HeadTarget, options: FspadOptions) -> None:
        super().__init__(target, options)
        size = target.config.hidden_size
        inner = options.width * size
        if options.feature_sampling:
            self.gate = nn.Linear(size, inner)
            self.up = nn.Linear(size, inner, bias=False)
            self.down = nn.Linear(inner, size, bias=False)
            nn.init.zeros_(self.down.weight)
        if options.partial_alignment:
            self.decouple = nn.Linear(size, size)
            nn.init.zeros_(self.decouple.weight)
            nn.init.zeros_(self.decouple.bias)

    def inputs(self, embedded: Tensor, features: Tensor) -> Tensor:
        if self.options.feature_sampling:
            features = features + self.down(F.silu(self.gate(embedded)) * self.up(features))
        return super().inputs(embedded, features)

    def logits(self, drafted: Tensor) -> Tensor:
        return super().logits(
            drafted + self.decouple(drafted) if self.options.partial_alignment else drafted
        )
