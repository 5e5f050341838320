"""Chimera: trigrams stand in for the states that the target has not computed yet.

Zeng et al. 2024 (arXiv 2402.15758). An encoder turns the embeddings of three tokens in a row into a
cheap state for the last of them. One decoder layer lets a place attend to the target's hidden
states, where there are some, and to trigram states from there on, and so predicts the hidden state
that the target would have. Logits come from that and from the last true hidden state together.

A text's first token has no trigram state, because nothing is drafted from it alone, and counts as
padding in those of the next two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from paceline.models.rope import rope_table

PADDING = -1  # in a trigram, where there is no token


@dataclass(frozen=True, slots=True)
class ChimeraOptions:
    """Attributes:
    depth: tokens ahead that training covers.
    one_depth: each step trains one of them, drawn at random; otherwise all.
    hidden_weight, token_weight: of the predicted hidden state's squared error and of the
        cross-entropy against the target's distribution.
    """

    depth: int = 4
    one_depth: bool = False
    hidden_weight: float = 1.0
    token_weight: float = 1.0


class ChimeraState:
    """KV entries of the target's states, and the nodes of the current round.

    Attributes:
        read: pending entries that hold states of the target.
        tail: the last two committed tokens.
        feature: the last hidden state of the target.  # [hidden_size]
        entry: pending entry of each node; -1 is the last committed token.
        tokens: the last two tokens up to each node.
    """

    def __init__(self, sequence: PooledSequence) -> None:
        self.sequence = sequence
        self.read = 0
        self.tail = [PADDING, PADDING]
        self.feature: Tensor = torch.empty(0)
        self.entry: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}


class TrigramEncoder(nn.Module):
    """Two layers over three embeddings side by side."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.join = nn.Linear(3 * size, 2 * size)
        self.out = nn.Linear(2 * size, size)

    def forward(self, embedded: Tensor) -> Tensor:
        """# [..., 3, hidden_size] -> [..., hidden_size]"""
        result: Tensor = self.out(F.silu(self.join(embedded.flatten(-2))))
        return result


class Chimera(Head):
    """See the module."""

    kind = "chimera"
    Options = ChimeraOptions

    def __init__(self, target: HeadTarget, options: ChimeraOptions) -> None:
        super().__init__(target, options)
        size = target.config.hidden_size
        self.trigram = TrigramEncoder(size)
        self.layer = DecoderLayer(target.config)
        self.join = nn.Linear(2 * size, size)
        nn.init.zeros_(self.join.weight)
        nn.init.zeros_(self.join.bias)
        self._cos_sin = rope_table(target.config)  # [context_length, head_dim]

    def trigram_states(self, trigrams: Tensor) -> Tensor:
        """States for the last token of each trigram.

        # int64 [..., 3], -1 pads -> [..., hidden_size]
        """
        embedded = self.target.embed(trigrams.clamp(min=0))
        result: Tensor = self.trigram(embedded * (trigrams >= 0)[..., None])
        return result

    def joined(self, feature: Tensor, predicted: Tensor) -> Tensor:
        """The input of the output layer.  # 2 x [..., hidden_size] -> [..., hidden_size]"""
        result: Tensor = predicted + F.silu(self.join(torch.cat([feature, predicted], -1)))
        return result

    # --- training ------------------------------------------------------------------------------

    def forward(self, hidden: Tensor, token_ids: Tensor, ahead: int) -> Tensor:
        """Predicted hidden states, ``ahead`` tokens after the target's last state.

        Args:
            hidden: # [batch, length, hidden_size]
            token_ids: # [batch, length]

        Returns:
            For all places; those before ``ahead`` are meaningless.  # [batch, length, hidden_size]
        """
        length = hidden.shape[1]
        x = torch.cat([hidden, self.trigram_states(trigrams_of(token_ids))], 1)
        cos_sin = self._cos_sin[:length].repeat(2, 1).to(x.device)
        predicted = self.layer(x, cos_sin, trigram_mask(length, ahead).to(x.device))
        result: Tensor = predicted[:, length:]
        return result

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Squared error of the hidden states and cross-entropy to the target's distribution.

        Of depths that are not trained in this step the agreement is not a number.
        """
        options, hidden = self.options, batch.hidden
        chosen = list(range(1, options.depth + 1))
        if self.training and options.one_depth:
            drawn = torch.randint(
                options.depth, (), generator=batch.generator, device=hidden.device
            )
            chosen = [1 + int(drawn)]
        total, error = hidden.new_zeros(()), hidden.new_zeros(())
        agreement = hidden.new_full((options.depth,), torch.nan)
        for ahead in chosen:
            predicted = self(hidden, batch.token_ids, ahead)[:, ahead:]
            logits = self.target.logits(self.joined(hidden[:, :-ahead], predicted))
            counts = batch.counts_from(ahead)
            errors = F.mse_loss(predicted.float(), hidden[:, ahead:].float(), reduction="none")
            squared = mean_over(errors, counts)
            token = soft_cross_entropy(logits, batch.logits[:, ahead:], counts)
            total = total + options.hidden_weight * squared + options.token_weight * token
            error = error + squared.detach()
            right = logits.argmax(-1) == batch.logits[:, ahead:].argmax(-1)
            agreement[ahead - 1] = mean_over(right.float(), counts)
        count = len(chosen)
        return total / count, {"agreement": agreement, "hidden_error": error / count}

    # --- drafting ------------------------------------------------------------------------------

    def prepare(self) -> None:
        self.stack = LayerStack([self.layer], self.target.kv_tokens)

    def new_state(self) -> ChimeraState:
        return ChimeraState(self.stack.new_sequence())

    def free(self, state: ChimeraState) -> None:
        self.stack.free(state.sequence)

    def root(
        self,
        states: Sequence[ChimeraState],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        """Read the target's new states, and the trigram state of the last committed token."""
        parts, trigrams = [], []
        for state, rows, ids in zip(states, features, token_ids, strict=True):
            # The last round's trigram states go; the target has computed what they stood for.
            self.stack.commit(state.sequence, range(state.read))
            state.read = len(rows)
            trigram = [*state.tail, *ids][-3:]
            trigrams.append(trigram)
            state.tail = trigram[1:]
            state.feature = rows[-1]
            state.entry, state.tokens = {-1: state.read}, {-1: state.tail}
            parts.append((state.sequence, range(-1, len(rows))))
        device = self.target.embedding.device
        guessed = self.trigram_states(torch.tensor(trigrams, device=device))
        pairs = zip(features, guessed, strict=True)
        inputs = torch.cat([part for rows, last in pairs for part in (rows, last[None])])
        out = self.stack.run(inputs, self.stack.append(parts))
        ends = torch.tensor([len(parents) for _, parents in parts]).cumsum(0) - 1
        return self._logits([state.feature for state in states], out[ends])

    def expand(self, states: Sequence[ChimeraState], frontiers: Sequence[Frontier]) -> Tensor:
        parts, trigrams, features = [], [], []
        for state, frontier in zip(states, frontiers, strict=True):
            first = state.sequence.num_pending
            parts.append((state.sequence, [state.entry[parent] for _, _, parent in frontier]))
            for entry, (node, token, parent) in enumerate(frontier, first):
                trigrams.append([*state.tokens[parent], token])
                state.entry[node], state.tokens[node] = entry, trigrams[-1][1:]
                features.append(state.feature)
        device = self.target.embedding.device
        inputs = self.trigram_states(torch.tensor(trigrams, device=device))
        return self._logits(features, self.stack.run(inputs, self.stack.append(parts)))

    def _logits(self, features: Sequence[Tensor], predicted: Tensor) -> Tensor:
        return self.target.logits(self.joined(torch.stack([*features]), predicted))


def trigrams_of(token_ids: Tensor) -> Tensor:
    """The trigram that ends at each place.  # [batch, length] -> [batch, length, 3]"""
    known = token_ids.clone()
    known[:, 0] = PADDING  # see the module
    return F.pad(known, (2, 0), value=PADDING).unfold(1, 3, 1)


def trigram_mask(length: int, ahead: int) -> Tensor:
    """The attention mask of the target's states, followed by the trigram states.

    A trigram state sees the target's states up to ``ahead`` places before it, and trigram states
    from there on.  # bool [2 * length, 2 * length]
    """
    place = torch.arange(length)
    distance = place[:, None] - place  # [length, length]
    return torch.cat(
        [
            torch.cat([distance >= 0, torch.zeros_like(distance, dtype=torch.bool)], 1),
            torch.cat([distance >= ahead, (distance >= 0) & (distance < ahead)], 1),
        ]
    )
