"""DFlash: a block of tokens from one pass of a small diffusion model over the target's features.

Chen et al. 2026 (arXiv 2602.06036). A feature is made from the residual stream after several of the
target's layers, ``hidden_norm(fc([h_1; ...; h_n]))``; every layer of the head reads all features as
keys and values (:mod:`paceline.models.heads.blocks`). A block is the last committed token (the
*anchor*) and mask tokens behind it; its tokens see one another in both directions, and the target's
output layer makes a distribution from each mask token. The distributions of a block are
independent: a draft is one token from each, or a tree of them (DDTree, Ringel and Romano 2026,
arXiv 2604.12989: shape ``best_first``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import InvalidArgument
from paceline.models.heads.base import (
    Frontier,
    Head,
    HeadBatch,
    HeadTarget,
    check_vocabulary,
    confidence,
    cut_chains,
    reading,
)
from paceline.models.heads.blocks import BlockLayer, BlockSight, BlockStack
from paceline.models.heads.layer import layer_ops
from paceline.models.kv_cache import PooledSequence
from paceline.models.llama_config import LlamaConfig
from paceline.models.ops import Ops
from paceline.models.packing import Weight
from paceline.models.rope import rope_table
from paceline.types import FloatArray, IntArray, Need

MEASURED_BLOCKS = 32  # of each text in measurements


@dataclass(frozen=True, slots=True)
class DFlashOptions:
    """Attributes:
    num_layers: layers of the head, each of the target's size.
    block_size: tokens of a block, the anchor included.
    features: numbers of layers of the target after which a feature reads the residual stream;
        empty: five, evenly from 2 to all but two.
    mask_token: the token that stands for one to draft; None: the last of the vocabulary.
    from_anchor: the anchor's own place drafts the first token, so a block drafts ``block_size``
        tokens instead of one less.
    anchors: blocks of each text in a training step, at random places.
    decay: the loss of the block's token i weighs ``exp(-i / decay)``, i from 0.
    text_weight, teacher_weight: of the cross-entropy against the text, as in the paper, and
        against the target's distribution.
    vocabulary: tokens that the head can draft, with the target's rows for them; 0 for all. The
        list of them is saved with the head; before training it is the first ones.
    int8: draft with weights rounded to eight bits, where the C kernels run.
    int4: draft with weights rounded to blocks of four bits instead, where 32 divides their inputs.
    """

    num_layers: int = 5
    block_size: int = 16
    features: tuple[int, ...] = ()
    mask_token: int | None = None
    from_anchor: bool = False
    anchors: int = 512
    decay: float = 7.0
    text_weight: float = 1.0
    teacher_weight: float = 0.0
    vocabulary: int = 0
    int8: bool = True
    int4: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(self.features))  # JSON has lists


class BlockState:
    """The features' entries of a session, and the block of the current round.

    Attributes:
        hidden: of the block's places, the anchor's first.  # [block_size, hidden_size]
        logits: of the places that draft, as soon as they are needed.  # [max_depth, num_logits]
        depth: of each node; -1 is the last committed token.
        memory: what a head that reads drafted tokens keeps of each node.
    """

    def __init__(self, sequence: PooledSequence) -> None:
        self.sequence = sequence
        self.begin(torch.empty(0))

    def begin(self, hidden: Tensor) -> None:
        """Start the draft of a round."""
        self.hidden = hidden
        self.logits: Tensor | None = None
        self.depth = {-1: 0}
        self.memory: dict[int, Tensor] = {}


class DFlash(Head):
    """See the module.

    Args:
        layers: of the head's layers; None: as the target's, with norms of heads.
        sights: what tokens see in each layer; None: everything.
        num_logits: tokens that the head can draft, with an output layer of its own; None: all.

    Attributes:
        vocabulary: the token of each logit, ascending.  # int64 [num_logits]
    """

    kind = "dflash"
    needs = frozenset({Need.LAYER_STATES})
    Options: ClassVar[type[Any]] = DFlashOptions
    vocabulary: Tensor
    _fc: tuple[Ops, Weight]
    _packed_output: Weight | None = None
    stack_class: ClassVar[type[BlockStack]] = BlockStack

    def __init__(
        self,
        target: HeadTarget,
        options: Any,
        layers: LlamaConfig | None = None,
        sights: Sequence[BlockSight] | None = None,
        num_logits: int | None = None,
    ) -> None:
        super().__init__(target, options)
        own = target.config
        least = 1 if options.from_anchor else 2
        if options.block_size < least:
            raise InvalidArgument("block_size", options.block_size, f"{least} or more")
        mask = own.vocab_size - 1 if options.mask_token is None else options.mask_token
        if not 0 <= mask < own.vocab_size:
            raise InvalidArgument("mask_token", mask, f"a token id in [0, {own.vocab_size})")
        numbers = options.features or _spread(own.num_layers)
        if any(not 1 <= number <= own.num_layers for number in numbers):
            allowed = f"numbers of layers from 1 to {own.num_layers}"
            raise InvalidArgument("features", numbers, allowed)
        self.mask_token, self._features = mask, [number - 1 for number in numbers]
        if layers is None:
            count = options.num_layers
            layers = replace(
                own, num_layers=count, windows=(None,) * count, head_norms=True, qkv_bias=False,
                out_bias=False, mlp_bias=False,
            )  # fmt: skip
        self.config = layers
        self.sights = tuple(sights or [BlockSight()] * layers.num_layers)
        size, eps = own.hidden_size, layers.rms_norm_eps
        self.fc = nn.Linear(len(numbers) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.layers = nn.ModuleList(self.new_layer() for _ in range(layers.num_layers))
        self.norm = nn.RMSNorm(size, eps=eps)
        self.lm_head = None if num_logits is None else nn.Linear(size, num_logits, bias=False)
        check_vocabulary(options.vocabulary, own.vocab_size)
        some = torch.arange(num_logits or options.vocabulary or own.vocab_size)
        self.register_buffer("vocabulary", some, persistent=options.vocabulary > 0)
        self._cos_sin = rope_table(layers, own.context_length + options.block_size)

    def new_layer(self) -> BlockLayer:
        return BlockLayer(self.config)

    @property
    def feature_layers(self) -> list[int]:
        """Numbers of the target's layers that a feature reads, from 1."""
        return [number + 1 for number in self._features]

    @property
    def first_place(self) -> int:
        """The place of a block that drafts the first token."""
        return 0 if self.options.from_anchor else 1

    @property
    def max_depth(self) -> int:
        return int(self.options.block_size) - self.first_place

    def some_logits(self, hidden: Tensor) -> Tensor:
        """Logits of the tokens in :attr:`vocabulary`.  # [..., hidden_size] -> [..., num_logits]"""
        if self._packed_output is None:
            rows = self.output_rows
            return self.target.logits(hidden) if rows is None else F.linear(hidden, rows)
        flat = self.stack.ops.linear(hidden.reshape(-1, hidden.shape[-1]), self._packed_output)
        return flat.view(*hidden.shape[:-1], -1)

    @property
    def output_rows(self) -> Tensor | None:
        """The output layer for the tokens in :attr:`vocabulary`; None: the target's, for all.

        # [num_logits, hidden_size]
        """
        if self.lm_head is not None:
            weight: Tensor = self.lm_head.weight
            return weight
        return self.target.lm_head[self.vocabulary] if self.options.vocabulary else None

    def among_all(self, some: Tensor) -> Tensor:
        """Logits of all tokens.  # [..., num_logits] -> [..., vocab_size]"""
        drafts_all = self.lm_head is None and not self.options.vocabulary
        return self.target.among_all(some, None if drafts_all else self.vocabulary)

    # --- training ------------------------------------------------------------------------------

    def forward(self, features: Tensor, token_ids: Tensor, anchors: Tensor) -> Tensor:
        """The states of blocks at some places of whole texts.

        Args:
            features: as :meth:`select` returns them.  # [batch, length, ...]
            token_ids: # [batch, length]
            anchors: the places of the blocks' first tokens.  # int64 [num_blocks]

        Returns:
            # [batch, num_blocks, block_size, hidden_size]
        """
        size, (batch, length) = self.options.block_size, token_ids.shape
        context = self.hidden_norm(self.fc(features))
        ids = token_ids.new_full((batch, len(anchors), size), self.mask_token)
        ids[:, :, 0] = token_ids[:, anchors]
        x = self.target.embed(ids.flatten(1))
        steps = torch.arange(size, device=x.device)
        places = torch.cat(
            [torch.arange(length, device=x.device), (anchors[:, None] + steps).flatten()]
        )
        cos_sin = self._cos_sin.to(x.device)[places]
        masks = {sight: sight.mask(anchors, size, length) for sight in set(self.sights)}
        for layer, sight in zip(self.layers, self.sights, strict=True):
            x = layer(x, context, cos_sin, masks[sight])
        hidden: Tensor = self.norm(x).view(batch, len(anchors), size, -1)
        return hidden

    def blocks(self, batch: HeadBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Random blocks of the texts of a batch.

        Returns:
            Their anchors [num_blocks], their states, as :meth:`forward` returns them, and the
            weight of each place that drafts in the loss [batch, num_blocks, max_depth].
        """
        assert batch.layer_states is not None
        length, options = batch.token_ids.shape[1], self.options
        device = batch.token_ids.device
        most = options.anchors if self.training else min(options.anchors, MEASURED_BLOCKS)
        # A block has features before its anchor, and a token behind it.
        order = torch.randperm(length - 2, generator=batch.generator, device=device)[:most]
        anchors = order.sort().values + 1
        hidden = self(self.select(batch.layer_states), batch.token_ids, anchors)
        steps = torch.arange(self.max_depth, device=device)
        places = anchors[:, None] + steps  # of the token before each drafted one
        weights = torch.exp(-steps / options.decay) * (places < length - 1)
        weights = weights.expand(len(batch.token_ids), -1, -1)
        if batch.counts is not None:
            weights = weights * batch.counts[:, places.clamp(max=length - 1)]
        return anchors, hidden, weights.float()

    def drafted(self, batch: HeadBatch, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What follows the places of blocks: the text's token before each drafted one, the number
        of the token itself among those that the head can draft (-100: it cannot), and the target's
        logits for these.

        # int64 [batch, num_blocks, max_depth] twice, [batch, num_blocks, max_depth, num_logits]
        """
        steps = torch.arange(self.max_depth, device=anchors.device)
        last = batch.token_ids.shape[1] - 2
        before = (anchors[:, None] + steps).clamp(max=last)  # the loss leaves out places beyond
        ids, logits = batch.token_ids, batch.logits[:, before].detach()
        drafted = ids[:, before + 1]
        if self.options.vocabulary:
            numbers = torch.full((logits.shape[-1],), -100, device=ids.device)
            numbers[self.vocabulary] = torch.arange(len(self.vocabulary), device=ids.device)
            drafted, logits = numbers[drafted], logits[..., self.vocabulary]
        return ids[:, before], drafted, logits

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Cross-entropy of the drafted tokens, weighted by their places."""
        options = self.options
        anchors, hidden, weights = self.blocks(batch)
        _, token_ids, wanted = self.drafted(batch, anchors)
        logits = self.some_logits(hidden[:, :, self.first_place :]).float()
        each = hidden.new_zeros(weights.shape)
        if options.text_weight:
            each = each + options.text_weight * cross_entropy(logits, token_ids)
        if options.teacher_weight:
            q = wanted.float().softmax(-1)
            each = each - options.teacher_weight * (q * logits.log_softmax(-1)).sum(-1)
        return weighted_mean(each, weights), {"agreement": block_agreement(logits, wanted, weights)}

    # --- drafting ------------------------------------------------------------------------------

    def prepare(self) -> None:
        context, options = self.target.config.context_length, self.options
        layers = [layer for layer in self.layers if isinstance(layer, BlockLayer)]
        self.stack = self.stack_class(
            layers, self.config, self.sights, context, options.block_size, self.target.kv_tokens,
            int8=options.int8, int4=options.int4,
        )  # fmt: skip
        wide = layer_ops(self.config, self.fc.weight)
        self._fc = wide, wide.pack(reading(self.fc.weight, rounded=options.int8))
        if (rows := self.output_rows) is not None:
            self._packed_output = self.stack.ops.pack(rows.detach().contiguous())
        ids = torch.full((options.block_size,), self.mask_token, device=self.fc.weight.device)
        self._masks = self.target.embed(ids)

    def new_state(self) -> BlockState:
        return BlockState(self.stack.new_sequence())

    def free(self, state: BlockState) -> None:
        self.stack.free(state.sequence)

    def root(
        self,
        states: Sequence[BlockState],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        """Read the new features, and draft a block behind them."""
        self._remember(states, features)
        last = torch.tensor([ids[-1] for ids in token_ids], device=self._masks.device)
        x = self._masks.repeat(len(states), 1, 1)
        x[:, 0] = self.target.embed(last)
        rows = self.stack.run([state.sequence for state in states], x.flatten(0, 1))
        ops, eps = self.stack.ops, self.config.rms_norm_eps
        normed = ops.rmsnorm(rows, self.norm.weight, eps).view(*x.shape)
        for state, hidden in zip(states, normed, strict=True):
            state.begin(hidden)
        return self.first_logits(states, last)

    def _remember(self, states: Sequence[BlockState], features: Sequence[Tensor]) -> None:
        ops, weight = self._fc
        rows = ops.linear(torch.cat([*features]).contiguous(), weight)
        rows = ops.rmsnorm(rows, self.hidden_norm.weight, self.config.rms_norm_eps)
        parts = [(s.sequence, len(new)) for s, new in zip(states, features, strict=True)]
        self.stack.remember(parts, rows)

    def first_logits(self, states: Sequence[BlockState], anchors: Tensor) -> Tensor:
        """Logits of the first drafted token.

        Args:
            anchors: the last committed tokens.  # int64 [num_sessions]
        """
        hidden = torch.stack([state.hidden[self.first_place] for state in states])
        return self.among_all(self.some_logits(hidden))

    def expand(self, states: Sequence[BlockState], frontiers: Sequence[Frontier]) -> Tensor:
        return self.among_all(torch.stack(self.new_rows(states, frontiers)))

    def new_rows(self, states: Sequence[BlockState], frontiers: Sequence[Frontier]) -> list[Tensor]:
        """The block's logits after new nodes, whatever their tokens.  # num_nodes x [num_logits]"""
        without = [state for state in states if state.logits is None]
        if without:
            hidden = torch.stack([state.hidden[self.first_place :] for state in without])
            logits = self.some_logits(hidden)
            for state, rows in zip(without, logits, strict=True):
                state.logits = rows
        result = []
        for state, frontier in zip(states, frontiers, strict=True):
            assert state.logits is not None
            for node, _, parent in frontier:
                state.depth[node] = state.depth[parent] + 1
                result.append(state.logits[state.depth[node]])
        return result

    def greedy_chains(
        self,
        states: Sequence[BlockState],
        first: Sequence[int],
        depth: int,
        stop_below: FloatArray | None = None,
    ) -> IntArray:
        if depth < 2:
            return np.array(first, np.int64)[:, None]
        places = slice(self.first_place + 1, self.first_place + depth)
        logits = self.some_logits(torch.stack([state.hidden[places] for state in states]))
        rest = self.vocabulary[logits.argmax(-1)].cpu().numpy()
        chains = np.concatenate([np.array(first, np.int64)[:, None], rest], 1)
        if stop_below is None:
            return chains
        unsure = [confidence(logits[:, i]) < stop_below[i] for i in range(depth - 1)]
        return cut_chains(chains, unsure)


def _spread(num_layers: int) -> list[int]:
    """Numbers of five layers, evenly from the second to all but two."""
    first, last = min(2, num_layers), max(min(2, num_layers), num_layers - 2)
    return sorted({round(first + i * (last - first) / 4) for i in range(5)})


def cross_entropy(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Against tokens, place by place.  # [*places, vocab_size], int64 [*places] -> [*places]"""
    flat = F.cross_entropy(logits.flatten(0, -2), token_ids.flatten(), reduction="none")
    return flat.view(token_ids.shape)


def weighted_mean(each: Tensor, weights: Tensor) -> Tensor:
    """0 if nothing has a weight.  # [*places] twice -> scalar"""
    return (each * weights).sum() / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)


def block_agreement(logits: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    """How often the first guess at each depth is the target's argmax.  # [max_depth]

    # [batch, num_blocks, max_depth, vocab_size] twice, [batch, num_blocks, max_depth]
    """
    right = (logits.argmax(-1) == wanted.argmax(-1)).float()
    counts = (weights > 0).float()
    return (right * counts).sum((0, 1)) / counts.sum((0, 1)).clamp_min(1.0)
