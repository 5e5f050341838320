"""EAGLE: one decoder layer that drafts the target's next feature.

Li et al. 2024 (arXiv 2401.15077). A feature is the target's last hidden state, after its final
norm. The head's input at a place is ``fc([embedding of the token that follows; feature])``, its
output the next place's feature, from which the target's own output layer makes logits. While it
drafts, the head goes on from features of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.heads.base import (
    Frontier,
    Head,
    HeadBatch,
    HeadTarget,
    mean_over,
    soft_cross_entropy,
)
from paceline.models.heads.layer import DecoderLayer, LayerStack
from paceline.models.kv_cache import PooledSequence
from paceline.models.ops import Fuse, Output
from paceline.models.packing import Weight
from paceline.models.rope import rope_table
from paceline.types import FloatArray, IntArray

MEASURED_DEPTH = 5  # of the agreement on held-out text


@dataclass(frozen=True, slots=True)
class EagleOptions:
    """Attributes:
    num_layers: decoder layers; the paper has one.
    noise: half the width of the uniform noise on features in training.
    feature_weight, token_weight: of the feature's smooth L1 loss and the cross-entropy.
    unroll: drafting steps that training follows; 1 as in the paper, more let the head see
        features of its own, as in HASS (Zhang et al. 2024, arXiv 2408.15766).
    """

    num_layers: int = 1
    noise: float = 0.1
    feature_weight: float = 1.0
    token_weight: float = 0.1
    unroll: int = 1


class EagleState:
    """KV entries of the committed pairs, and the nodes of the current round.

    Attributes:
        feature: what was drafted for each node; -1 is the last committed token.  # [hidden_size]
        entry: pending KV entry of each node; -1 is the committed prefix.
    """

    def __init__(self, sequence: PooledSequence) -> None:
        self.sequence = sequence
        self.feature: dict[int, Tensor] = {}
        self.entry = {-1: -1}


class Eagle(Head):
    """See the module."""

    kind = "eagle"
    Options: ClassVar[type[Any]] = EagleOptions
    shallow: Sequence[DecoderLayer] = ()
    """Frozen layers that read the tokens before the features join."""
    _fc: tuple[Weight, Tensor] | None = None  # packed
    output: Output | None = None
    """Makes logits in a chain; None is the target's output layer."""
    kernel_has_it: ClassVar[bool] = True
    """Whether a chain that a kernel drafts is the head's."""

    def __init__(self, target: HeadTarget, options: EagleOptions) -> None:
        super().__init__(target, options)
        size = target.config.hidden_size
        self.fc = nn.Linear(2 * size, size)
        self.layers = nn.ModuleList(DecoderLayer(target.config) for _ in range(options.num_layers))
        self._cos_sin = rope_table(target.config)  # [context_length, head_dim]

    def inputs(self, embedded: Tensor, features: Tensor) -> Tensor:
        """The input of the first layer.  # 2 x [..., hidden_size] -> [..., hidden_size]"""
        pairs = torch.cat([embedded, features], -1)
        if self._fc is not None:
            flat = self.stack.ops.linear(pairs.flatten(0, -2), *self._fc)
            return flat.view(*pairs.shape[:-1], -1)
        result: Tensor = self.fc(pairs)
        return result

    def read(self, features: Tensor) -> Tensor:
        """Features of the kind that the head drafts, from the target's.

        # [n, ...] -> [n, hidden_size]
        """
        return features

    def read_tokens(self, token_ids: Tensor) -> Tensor:
        """What :meth:`inputs` gets of the tokens.  # [batch, length] -> [.., hidden_size]"""
        x = self.target.embed(token_ids)
        with torch.no_grad():
            for layer in self.shallow:
                x = layer(x, self._cos_sin[: x.shape[1]].to(x.device))
        return x

    def logits(self, drafted: Tensor) -> Tensor:
        """Logits after drafted features.  # [..., hidden_size] -> [..., vocab_size]"""
        return self.target.logits(drafted)

    # --- training ------------------------------------------------------------------------------

    def forward(self, features: Tensor, token_ids: Tensor, steps: int = 1) -> list[Tensor]:
        """What drafting computes from every place on, fed the tokens of the text.

        Step 0 reads the target's features. In step k a place reads the feature that step k - 1
        drafted for it, attends to the target's up to k places before it, and to those of the
        earlier steps from there on: as a chain that was drafted from k places before.

        Args:
            features: of places 0, 1, ...  # [batch, length, hidden_size]
            token_ids: the token after each place.  # [batch, length]

        Returns:
            For each step the features of places 1, 2, ...; step k has none for the first k.
            # steps x [batch, length, hidden_size]
        """
        length = features.shape[1]
        cos_sin = self._cos_sin[:length].to(features.device)
        embedded = self.read_tokens(token_ids)
        earlier: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]
        outputs = []
        for step in range(steps):
            x = self.inputs(embedded, features)
            mask = unrolled_mask(length, step, x.device) if step else None
            for layer, entries in zip(self.layers, earlier, strict=True):
                x = layer(x, cos_sin, mask, entries)
            outputs.append(x)
            # What was drafted for a place is read where that place is.
            features = F.pad(x[:, :-1], (0, 0, 1, 0))
        return outputs

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Smooth L1 to the target's features and cross-entropy to its distribution (eq. 4 to 6).

        In training mode the agreement is that of the steps that are trained, otherwise that of
        the first five.
        """
        options, features = self.options, batch.hidden[:, :-1]
        if self.training and options.noise:
            noise = torch.rand(features.shape, generator=batch.generator, device=features.device)
            features = features + options.noise * (2 * noise - 1).to(features.dtype)
        steps = options.unroll if self.training else MEASURED_DEPTH
        steps = min(steps, features.shape[1])
        total, agreement = batch.hidden.new_zeros(()), []
        for step, drafted in enumerate(self(features, batch.token_ids[:, 1:], steps)):
            drafted = drafted[:, step:]
            logits = self.logits(drafted)
            counts = batch.counts_from(step + 1)
            if step < options.unroll:
                wanted = batch.hidden[:, step + 1 :].float()
                errors = F.smooth_l1_loss(drafted.float(), wanted, reduction="none")
                feature = mean_over(errors, counts)
                token = soft_cross_entropy(logits, batch.logits[:, step + 1 :], counts)
                total = total + options.feature_weight * feature + options.token_weight * token
            right = logits.argmax(-1) == batch.logits[:, step + 1 :].argmax(-1)
            agreement.append(mean_over(right.float(), counts))
        return total / options.unroll, {"agreement": torch.stack(agreement)}

    # --- drafting ------------------------------------------------------------------------------

    def new_stack(self, *, int8: bool = False, int4: bool = False) -> LayerStack:
        """The layers as they draft."""
        own = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        return LayerStack([*self.shallow, *own], self.target.kv_tokens, int8=int8, int4=int4)

    def prepare(self) -> None:
        self.stack = self.new_stack()
        weight = self.stack.ops.pack(self.fc.weight.detach().contiguous())
        self._fc = weight, self.fc.bias.detach().contiguous()

    def new_state(self) -> EagleState:
        return EagleState(self.stack.new_sequence())

    def free(self, state: EagleState) -> None:
        self.stack.free(state.sequence)

    # A KV entry is that of a feature and the token after it: tokens from the second on name it.

    def adopt(self, state: EagleState, token_ids: Sequence[int], scope: Hashable) -> int:
        if not token_ids:
            return 0
        self.stack.pool.adopt(state.sequence, token_ids[1:], (scope, token_ids[0]))
        return state.sequence.length

    def num_known(self, token_ids: Sequence[int], scope: Hashable) -> int:
        if not token_ids:
            return 0
        return self.stack.pool.num_cached(token_ids[1:], (scope, token_ids[0]))

    def publish(self, state: EagleState, token_ids: Sequence[int], scope: Hashable) -> None:
        self.stack.commit(state.sequence, ())
        known = token_ids[1 : state.sequence.length + 1]
        self.stack.pool.publish(state.sequence, known, (scope, token_ids[0]))

    def root(
        self,
        states: Sequence[EagleState],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        return self.logits(self._begin(states, features, token_ids))

    def _begin(
        self,
        states: Sequence[EagleState],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        """Read the new pairs of a feature and the token after it, all of them committed.

        Returns:
            What the head puts out after the last of each session.  # [num_sessions, hidden_size]
        """
        parts = []
        for state, ids in zip(states, token_ids, strict=True):
            # The draft used the head's own features; replace them with the target's.
            self.stack.commit(state.sequence, ())
            parts.append((state.sequence, range(-1, len(ids) - 1)))
        given = self.read(torch.cat([*features]))
        drafted = self._run(parts, [t for ids in token_ids for t in ids], given)
        last, end = [], 0
        for state, ids in zip(states, token_ids, strict=True):
            self.stack.commit(state.sequence, range(len(ids)))
            end += len(ids)
            last.append(drafted[end - 1])
            state.feature, state.entry = {-1: last[-1]}, {-1: -1}
        return torch.stack(last)

    def expand(self, states: Sequence[EagleState], frontiers: Sequence[Frontier]) -> Tensor:
        parts, tokens, features = [], [], []
        for state, frontier in zip(states, frontiers, strict=True):
            first = state.sequence.num_pending
            parts.append((state.sequence, [state.entry[parent] for _, _, parent in frontier]))
            for entry, (node, token, parent) in enumerate(frontier, first):
                state.entry[node] = entry
                tokens.append(token)
                features.append(state.feature[parent])
        drafted = self._run(parts, tokens, torch.stack(features))
        nodes = (
            (state, node)
            for state, frontier in zip(states, frontiers, strict=True)
            for node, _, _ in frontier
        )
        for (state, node), row in zip(nodes, drafted, strict=True):
            state.feature[node] = row
        return self.logits(drafted)

    def _run(
        self,
        parts: Sequence[tuple[PooledSequence, Sequence[int]]],
        token_ids: Sequence[int],
        features: Tensor,
    ) -> Tensor:
        """The features after new pairs.  # [num_pairs, hidden_size]"""
        rows, first = self.stack.append(parts), len(self.shallow)
        x = self.target.embed(torch.tensor(token_ids, device=features.device))
        if first:
            x = self.stack.run(x, rows, 0, first)
        return self.stack.run(self.inputs(x, features), rows, first)

    def chains(
        self,
        states: Sequence[EagleState],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
        depth: int,
        stop_below: FloatArray | None = None,
    ) -> IntArray:
        if not self.kernel_has_it or not self.stack.has_chains(self.target):
            return super().chains(states, features, token_ids, depth, stop_below)
        for state in states:
            self.stack.commit(state.sequence, ())
        assert self._fc is not None
        given = self.read(torch.cat([*features]))
        tokens = self.stack.greedy_chain(
            [state.sequence for state in states], token_ids, depth, self.target,
            Fuse(*self._fc, given, len(self.shallow)), self.output, stop_below,
        )  # fmt: skip
        # The first rows of what was given are the first step's states now.
        for i, (state, ids) in enumerate(zip(states, token_ids, strict=True)):
            self.stack.commit(state.sequence, range(len(ids)))
            state.feature, state.entry = {-1: given[i]}, {-1: -1}
        return tokens.T


def unrolled_mask(length: int, step: int, device: torch.device | None = None) -> Tensor:
    """What a drafting step from all places sees in the steps up to itself (:meth:`Eagle.forward`).

    # bool [length, (step + 1) * length]
    """
    seen_step = torch.arange(step + 1, device=device).repeat_interleave(length)
    seen_place = torch.arange(length, device=device).repeat(step + 1)
    place = torch.arange(length, device=device)[:, None]
    from_target = (seen_step == 0) & (seen_place <= place - step)
    of_own_chain = (seen_step > 0) & (seen_place == place - step + seen_step)
    return from_target | of_own_chain
