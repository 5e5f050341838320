"""Hidden transfer: linear maps make hidden states of later tokens in the middle of the model.

Wu et al. 2024 (arXiv 2404.12022). The i-th map takes the residual stream of a token before a chosen
layer to what the stream of the token i places later might be; from there the remaining layers
compute it beside the real tokens. The paper chooses a layer for each map; here all maps have one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.models.heads.base import HeadTarget
from paceline.models.heads.pseudo import PseudoHead


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """As :class:`paceline.models.heads.pseudo.PseudoOptions`, and:

    Attributes:
        layer: the layer that the pseudo hidden states enter, from 0; None: the middle one.
    """

    num_guesses: int = 3
    decay: float = 0.8
    places: int = 32
    layer: int | None = None


class HiddenTransfer(PseudoHead):
    """See the module."""

    kind = "hidden_transfer"
    Options = TransferOptions

    def __init__(self, target: HeadTarget, options: TransferOptions) -> None:
        config, layer = target.config, options.layer
        super().__init__(target, options, config.num_layers // 2 if layer is None else layer)
        # At first a later token is as this one.
        maps = torch.eye(config.hidden_size, device=target.embedding.device)
        self.maps = nn.Parameter(maps.repeat(options.num_guesses, 1, 1))

    def inputs(self, stream: Tensor, owners: Tensor, index: Tensor) -> Tensor:
        result = stream.new_empty(*stream.shape[:-2], len(owners), stream.shape[-1])
        for i, weight in enumerate(self.maps):
            chosen = index == i
            moved = stream[..., owners[chosen], :] @ weight.to(stream.dtype).T
            result = result.index_copy(-2, chosen.nonzero()[:, 0], moved)
        return result
