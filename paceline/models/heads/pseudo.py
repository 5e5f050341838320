"""The base of parallel prompt decoding and hidden transfer: the target itself makes the guesses.

A head of this kind gives the inputs of pseudo tokens, rows that stand for unknown future tokens.
The i-th pseudo token behind a node stands i places after it and sees the node, what the node sees,
and the pseudo tokens before it; its logits guess the token at the place after its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import InvalidArgument
from paceline.models.architectures import PLAIN_MODEL_TYPES
from paceline.models.heads.base import Frontier, Head, HeadBatch, HeadTarget
from paceline.types import Need

RANKS = 10  # guesses of each distance whose accuracy is kept
_MEMORY = 0.95  # of the accuracies, for each training step


class PseudoOptions(Protocol):
    """Attributes:
    num_guesses: pseudo tokens behind a node, at most.
    decay: weight of the i-th guess in the loss is ``decay ** i``.
    places: places in a row of text where pseudo tokens are trained in a step; 0: all.
    """

    num_guesses: int
    decay: float
    places: int


class _State:
    """Guesses for the current round."""

    def __init__(self) -> None:
        self.logits: Tensor = torch.empty(0)  # [num_guesses, vocab_size]
        self.depth = {-1: 0}


class PseudoHead(Head):
    """See the module. ``accuracy`` is a buffer, so that it lies in the head's folder.

    Its features are the logits of the pseudo tokens behind the last accepted node.
    # [num_guesses at most, vocab_size]

    Attributes:
        first_layer: the layer that the pseudo tokens enter first.
        accuracy: how often the guess of each distance and rank is right, a moving average over
            training.  # [num_guesses, RANKS]
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.SHARED_MODEL})
    accuracy: Tensor

    def __init__(self, target: HeadTarget, options: Any, first_layer: int) -> None:
        if options.num_guesses < 1:
            raise InvalidArgument("num_guesses", options.num_guesses, "at least 1")
        if not 0 <= first_layer < target.config.num_layers:
            raise InvalidArgument(
                "layer", first_layer, f"a layer of the target, 0 to {target.config.num_layers - 1}"
            )
        super().__init__(target, options)
        self.first_layer = first_layer
        distances = torch.arange(options.num_guesses)[:, None]
        # Initial values, before any measurement: each further guess is right half as often.
        assumed = 0.5 * 0.8**distances * 0.5 ** torch.arange(RANKS)
        self.register_buffer("accuracy", assumed)
        self._model: tuple[Any, ...] = ()  # in a tuple, so that it is no part of the head

    @property
    def num_guesses(self) -> int:
        return int(self.options.num_guesses)

    @abstractmethod
    def inputs(self, stream: Tensor, owners: Tensor, index: Tensor) -> Tensor:
        """Inputs of pseudo tokens to ``first_layer``.

        Args:
            stream: input of the real rows to that layer.  # [..., num_rows, hidden_size]
            owners: the row behind which each pseudo token stands.  # int64 [num_pseudo]
            index: 0 for the first one behind its owner.  # int64 [num_pseudo]

        Returns:
            # [..., num_pseudo, hidden_size]
        """

    # --- training ------------------------------------------------------------------------------

    def bind(self, folder: Path) -> None:
        """Load the target's layers: gradients have to pass through them.

        Raises:
            InvalidArgument: a target whose layers transformers computes in other ways than the
                fast path does: not all of its attentions cap scores, or have sinks.
        """
        if not self.target.config.is_plain:
            raise InvalidArgument(
                "target", self.target.config.model_type, f"one of {', '.join(PLAIN_MODEL_TYPES)}"
            )
        from transformers import AutoModel

        model = AutoModel.from_pretrained(
            folder, dtype=self.target.embedding.dtype, attn_implementation="sdpa"
        )
        model.requires_grad_(False)
        self._model = (model.eval(),)

    def guesses(self, token_ids: Tensor, places: Tensor) -> Tensor:
        """Logits of the pseudo tokens behind some places of texts.

        Args:
            token_ids: # int64 [batch, length]
            places: ascending.  # int64 [num_places]

        Returns:
            # [batch, num_places, num_guesses, vocab_size]
        """
        assert self._model, "bind the head to its target first"
        (model,) = self._model
        model.to(token_ids.device)
        length, count = token_ids.shape[1], self.num_guesses
        owners = places.repeat_interleave(count)
        index = torch.arange(count, device=places.device).repeat(len(places))
        positions = torch.cat([torch.arange(length, device=places.device), owners + 1 + index])

        def come_in(_: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            real = arguments[0][:, :length]
            pseudo = self.inputs(real, owners, index).to(real.dtype)
            return (torch.cat([real, pseudo], 1), *arguments[1:])

        embedded = model.get_input_embeddings()(token_ids)
        # No row reads the pseudo rows before the layer that they enter.
        blank = embedded.new_zeros(len(embedded), len(owners), embedded.shape[-1])
        # transformers takes a mask for each kind of attention where a model has several.
        masks: Any = {
            "full_attention" if window is None else "sliding_attention": training_mask(
                length, owners, index, window
            )[None, None]
            for window in set(self.target.config.windows)
        }
        if len(masks) == 1:
            (masks,) = masks.values()
        hook = model.layers[self.first_layer].register_forward_pre_hook(come_in)
        try:
            hidden = model(
                inputs_embeds=torch.cat([embedded, blank], 1),
                attention_mask=masks,
                position_ids=positions[None],
                use_cache=False,
            ).last_hidden_state
        finally:
            hook.remove()
        logits = self.target.logits(hidden[:, length:])
        return logits.view(len(token_ids), len(places), count, -1)

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """KL divergence from the target, weighted ``decay ** i`` for the i-th guess."""
        length, count = batch.token_ids.shape[1], self.num_guesses
        room = length - count
        if room < 1:
            raise InvalidArgument("length", length, f"rows of more than {count} tokens")
        wanted = min(self.options.places or room, room)
        order = torch.randperm(room, generator=batch.generator, device=batch.generator.device)
        places = order[:wanted].sort().values.to(batch.token_ids.device)
        logits = self.guesses(batch.token_ids, places).float()
        ahead = places[:, None] + 1 + torch.arange(count, device=places.device)
        wanted_logits = batch.logits[:, ahead].float()  # [batch, num_places, num_guesses, vocab]
        divergence = F.kl_div(
            logits.log_softmax(-1), wanted_logits.log_softmax(-1), log_target=True, reduction="none"
        ).sum(-1)
        weights = self.options.decay ** torch.arange(1, count + 1, device=places.device)
        counts = torch.ones_like(divergence) if batch.counts is None else batch.counts[:, ahead]
        shares = counts / counts.sum((0, 1)).clamp_min(1)  # [batch, num_places, num_guesses]
        total = ((divergence * shares).sum((0, 1)) * weights).sum()
        best = logits.topk(min(RANKS, logits.shape[-1])).indices
        hits = best == wanted_logits.argmax(-1, keepdim=True)
        right = (hits * shares[..., None]).sum((0, 1))
        if self.training:
            self.accuracy[:, : right.shape[1]].lerp_(right.to(self.accuracy), 1 - _MEMORY)
        return total, {"agreement": right[:, 0]}

    # --- drafting ------------------------------------------------------------------------------

    def new_state(self) -> _State:
        return _State()

    def root(
        self,
        states: Sequence[_State],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        for state, logits in zip(states, features, strict=True):
            state.logits, state.depth = logits, {-1: 0}
        return torch.stack([state.logits[0] for state in states])

    def expand(self, states: Sequence[_State], frontiers: Sequence[Frontier]) -> Tensor:
        rows = []
        for state, frontier in zip(states, frontiers, strict=True):
            for node, _, parent in frontier:
                depth = state.depth[node] = state.depth[parent] + 1
                rows.append(state.logits[depth])
        return torch.stack(rows)


def training_mask(length: int, owners: Tensor, index: Tensor, window: int | None = None) -> Tensor:
    """The attention mask of text rows followed by pseudo tokens: 0 if seen, else the lowest number.

    Args:
        window: positions that attention sees, None for all.

    Returns:
        # float32 [length + num_pseudo, length + num_pseudo]
    """
    text = torch.arange(length, device=owners.device)
    size = length + len(owners)
    sees = torch.zeros(size, size, dtype=torch.bool, device=text.device)
    sees[:length, :length] = text[None] <= text[:, None]
    sees[length:, :length] = text[None] <= owners[:, None]
    sees[length:, length:] = (owners[None] == owners[:, None]) & (index[None] <= index[:, None])
    if window is not None:
        positions = torch.cat([text, owners + 1 + index])
        sees &= positions[None] > positions[:, None] - window
    mask = torch.zeros(sees.shape, device=text.device)
    return mask.masked_fill_(~sees, torch.finfo(torch.float32).min)
