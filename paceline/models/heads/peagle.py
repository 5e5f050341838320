"""P-EAGLE: EAGLE-3's layers draft all tokens in one pass.

Hui et al. 2026 (arXiv 2602.01469). Behind the pairs of a feature and the token after it stand pairs
of a learned vector, ``mask_hidden``, and a mask token, one for each further token. Attention
is causal, so a pair of masks sees the committed pairs and the masks before it. No token of a draft
depends on another one: the guesses for a depth are the same for all nodes of that depth.

In training, masks stand behind many places at once, deeper ones behind fewer places (*conditional
drop-token*, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.errors import InvalidArgument
from paceline.models.heads.base import (
    Frontier,
    HeadBatch,
    HeadTarget,
    State,
    mean_over,
    soft_cross_entropy,
)
from paceline.models.heads.parallel import best_guesses, guesses_after
from paceline.models.heads.published_eagle import (
    Layout,
    PublishedEagle3,
    PublishedState,
    layout_like_target,
)
from paceline.models.rope import rope_table
from paceline.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class PEagleOptions:
    """Attributes:
    num_layers: decoder layers; the paper has four.
    features: numbers of layers of the target after which a feature reads the residual stream;
        empty: 2, half of them, and all but three.
    depths: tokens of a draft.
    mask_token: the token that stands for one to draft; None: the last of the vocabulary.
    keep: the share of a depth's places that the next depth has in training.
    keep_least: the share of all places that each depth has at least.
    """

    num_layers: int = 4
    features: tuple[int, ...] = ()
    depths: int = 8
    mask_token: int | None = None
    keep: float = 0.7
    keep_least: float = 0.2

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(self.features))  # JSON has lists


class PEagleState(PublishedState):
    """Entries of the committed pairs, and the guesses of the current round.

    Attributes:
        logits: # [depths, vocab_size]
        depth: of each node; -1 is the last committed token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.empty(0)
        self.depth = {-1: 0}


class PEagle(PublishedEagle3):
    """See the module.

    Args:
        layout: of a published drafter; None: layers of the target's size, without biases.
    """

    kind = "peagle"
    Options: ClassVar[type[Any]] = PEagleOptions

    def __init__(
        self, target: HeadTarget, options: PEagleOptions, layout: Layout | None = None
    ) -> None:
        if not 1 <= options.depths <= 64:
            raise InvalidArgument("depths", options.depths, "from 1 to 64")
        mask, size = options.mask_token, target.config.vocab_size
        self.mask_token = size - 1 if mask is None else mask
        if not 0 <= self.mask_token < size:
            raise InvalidArgument("mask_token", mask, f"a token id in [0, {size})")
        if layout is None:
            layout = layout_like_target(target, options.num_layers, options.features)
        super().__init__(target, layout)
        self.options = options
        width = len(layout.features) * layout.config.hidden_size
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, width))
        longest = layout.config.context_length + options.depths
        self._cos_sin = rope_table(layout.config, longest)

    @property
    def max_depth(self) -> int:
        return int(self.options.depths)

    # --- training ------------------------------------------------------------------------------

    def forward(
        self, features: Tensor, token_ids: Tensor, anchors: Tensor, depths: Tensor
    ) -> Tensor:
        """The states of all pairs of texts, and behind them those of masks.

        Args:
            features: as :meth:`select` returns them.  # [batch, length, ...]
            token_ids: the token after each place.  # int64 [batch, length]
            anchors: the place of the pair behind which each mask stands.  # int64 [num_masks]
            depths: how far behind it, from 1.  # int64 [num_masks]

        Returns:
            # [batch, length + num_masks, hidden_size]
        """
        (batch, length), count = token_ids.shape, len(anchors)
        masks = torch.full((batch, count), self.mask_token, device=token_ids.device)
        embedded = self.embed(torch.cat([token_ids, masks], 1))
        blank = self.read(self.mask_hidden.to(features.dtype)).expand(batch, count, -1)
        x = torch.cat([self.read(features), blank], 1)
        places = torch.arange(length, device=x.device)
        anchor = torch.cat([places, anchors])
        depth = torch.cat([torch.zeros_like(places), depths])
        sees = (depth == 0) & (anchor <= anchor[:, None])
        sees |= (anchor == anchor[:, None]) & (depth <= depth[:, None])
        cos_sin = self._cos_sin.to(x.device)[anchor + depth]
        for layer in self.layers:
            x, _ = layer(x, embedded, cos_sin, sees, None)
        return x

    def masks(self, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random places for masks; a mask's predecessors are there as well.

        Returns:
            Their anchors and depths, the lowest depth first.  # int64 [num_masks] twice
        """
        options, device = self.options, generator.device
        chosen = torch.randperm(length, generator=generator, device=device)
        anchors, depths = [chosen[:0]], [chosen[:0]]
        for depth in range(1, options.depths):
            share = max(options.keep**depth, options.keep_least)
            chosen = chosen[chosen + depth < length][: int((length - depth) * share)]
            anchors.append(chosen)
            depths.append(torch.full_like(chosen, depth))
        return torch.cat(anchors), torch.cat(depths)

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Cross-entropy to the target's distribution, averaged over pairs and masks."""
        assert batch.layer_states is not None
        features, token_ids = self.select(batch.layer_states[:, :-1]), batch.token_ids[:, 1:]
        length = token_ids.shape[1]
        anchors, depths = self.masks(length, batch.generator)
        logits = self.logits(self(features, token_ids, anchors, depths))
        places = torch.arange(length, device=logits.device)
        ahead = torch.cat([places, anchors + depths]) + 1  # whose next token is drafted
        wanted = batch.logits[:, ahead]
        counts = None if batch.counts is None else batch.counts[:, ahead]
        right = (logits.argmax(-1) == wanted.argmax(-1)).float()
        depth = torch.cat([torch.zeros_like(places), depths])
        agreement = [
            mean_over(right[:, at], None if counts is None else counts[:, at])
            for at in (depth == d for d in range(int(depth.max()) + 1))
        ]
        return soft_cross_entropy(logits, wanted, counts), {"agreement": torch.stack(agreement)}

    # --- drafting ------------------------------------------------------------------------------

    def new_state(self) -> PEagleState:
        return PEagleState()

    def root(
        self,
        states: Sequence[State],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        """Read the new pairs, and draft all tokens behind them."""
        masks, drafted = self.options.depths - 1, []
        for state, rows, tokens in zip(states, features, token_ids, strict=True):
            first, count = state.committed, len(rows)
            state.entries = [(k[:first], v[:first]) for k, v in state.entries]
            end = first + count + masks
            causal = torch.ones(count + masks, end, dtype=torch.bool, device=rows.device)
            blank = self.mask_hidden[0].to(rows.dtype).expand(masks, -1)
            x = self._run(
                state, [*tokens, *[self.mask_token] * masks], self.read(torch.cat([rows, blank])),
                range(first, end), causal.tril(first),
            )  # fmt: skip
            state.committed, state.depth = first + count, {-1: 0}
            drafted.append(x[count - 1 :])
        logits = self.logits(torch.stack(drafted))  # [num_sessions, depths, vocab_size]
        for state, rows in zip(states, logits, strict=True):
            state.logits = rows
        return logits[:, 0]

    def expand(self, states: Sequence[State], frontiers: Sequence[Frontier]) -> Tensor:
        return guesses_after(states, frontiers)

    def greedy_chains(
        self,
        states: Sequence[State],
        first: Sequence[int],
        depth: int,
        stop_below: FloatArray | None = None,
    ) -> IntArray:
        return best_guesses(states, depth, stop_below)
