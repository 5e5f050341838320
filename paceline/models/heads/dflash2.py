"""DFlash 2: DFlash whose tokens mix with those before them, and that chooses among candidates.

Its authors (Z Lab, 2026) describe it with their code, https://github.com/z-lab/dflash. Around
attention and around the MLP of each layer a causal convolution of a few taps runs over the tokens
of a block; its kernel is a learned one plus one that the token itself gives, shared by groups of
channels (:class:`BlockConvolution`). Of the tokens that a place likes best the *candidate selector*
adds a score to each that depends on the token before it: ``<P[before] * W h, S[candidate]>``.
Other tokens are not drafted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import InvalidArgument
from paceline.models.heads.base import Frontier, Head, HeadBatch, HeadTarget
from paceline.models.heads.blocks import BlockLayer, BlockSight, BlockStack
from paceline.models.heads.dflash import (
    BlockState,
    DFlash,
    DFlashOptions,
    block_agreement,
    cross_entropy,
    weighted_mean,
)
from paceline.models.heads.layer import rotate
from paceline.models.kv_cache import PooledSequence
from paceline.models.llama_config import LlamaConfig
from paceline.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class DFlash2Options(DFlashOptions):
    """DFlash's options, and:

    Attributes:
    conv_taps: tokens that a convolution reads, the token itself included.
    conv_group: neighbouring channels with one dynamic kernel.
    selector_rank: of the candidate selector.
    candidates: tokens that it chooses among at each place.
    selector_weight: in the loss, of the selector's cross-entropy.
    """

    block_size: int = 8
    decay: float = 4.0
    conv_taps: int = 2
    conv_group: int = 16
    selector_rank: int = 256
    candidates: int = 16
    selector_weight: float = 1.0


class BlockConvolution(nn.Module):
    """Two causal convolutions over a block, before and behind what they enclose."""

    def __init__(self, size: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        identity = torch.zeros(2, taps, size)
        identity[:, 0] = 1
        self.base_kernel = nn.Parameter(identity)
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, x: Tensor) -> Tensor:
        """Of both convolutions.

        # [..., block_size, hidden_size] -> [..., block_size, 2, taps, hidden_size]
        """
        given = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        kernels: Tensor = self.base_kernel + given.repeat_interleave(self.group, -1)
        return kernels

    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        """# [..., block_size, hidden_size], [..., block_size, taps, hidden_size] -> as the first"""
        size = x.shape[-2]
        shifted = [F.pad(x, (0, 0, tap, 0))[..., :size, :] for tap in range(self.taps)]
        return (torch.stack(shifted, -2) * kernel).sum(-2)


class ConvolvedLayer(BlockLayer):
    """A layer of DFlash 2, trainable.

    Args:
        block_size: tokens of a block.
        taps, group: of the convolutions.
    """

    def __init__(self, config: LlamaConfig, block_size: int, taps: int, group: int) -> None:
        super().__init__(config)
        self.block_size = block_size
        self.attention_conv = BlockConvolution(config.hidden_size, taps, group)
        self.mlp_conv = BlockConvolution(config.hidden_size, taps, group)

    def forward(self, x: Tensor, context: Tensor, cos_sin: Tensor, mask: Tensor) -> Tensor:
        shape, by_block = x.shape, (-1, self.block_size, x.shape[-1])
        normed = self.input_layernorm(x).view(len(x), *by_block)
        kernels = self.attention_conv.kernels(normed)
        read = self.attention_conv(normed, kernels[..., 0, :, :]).view(shape)
        attended = self.attend(read, context, cos_sin, mask).view(normed.shape)
        x = x + self.attention_conv(attended, kernels[..., 1, :, :]).view(shape)
        return x + self.convolved_mlp(x.view(normed.shape)).view(shape)

    def convolved_mlp(self, x: Tensor) -> Tensor:
        """# [..., block_size, hidden_size] -> the same"""
        normed = self.post_attention_layernorm(x)
        kernels = self.mlp_conv.kernels(normed)
        fed = self.feed(self.mlp_conv(normed, kernels[..., 0, :, :]))
        result: Tensor = self.mlp_conv(fed, kernels[..., 1, :, :])
        return result


class ConvolvedStack(BlockStack):
    """Such layers over the cache of features, in torch."""

    def __init__(self, layers: Sequence[BlockLayer], *args: Any, **more: Any) -> None:
        super().__init__(layers, *args, **more)
        self.layers = [layer for layer in layers if isinstance(layer, ConvolvedLayer)]

    def run(self, sequences: Sequence[PooledSequence], inputs: Tensor) -> Tensor:
        x = inputs.view(len(sequences), self.block_size, -1)
        for number, layer in enumerate(self.layers):
            normed = layer.input_layernorm(x)
            kernels = layer.attention_conv.kernels(normed)
            read = layer.attention_conv(normed, kernels[..., 0, :, :])
            attended = torch.stack(
                [
                    self._attended(number, layer, sequence, rows)
                    for sequence, rows in zip(sequences, read, strict=True)
                ]
            )
            x = x + layer.attention_conv(attended, kernels[..., 1, :, :])
            x = x + layer.convolved_mlp(x)
        return x.flatten(0, 1)

    def _attended(
        self, number: int, layer: ConvolvedLayer, sequence: PooledSequence, read: Tensor
    ) -> Tensor:
        """Attention of a block to the features before it and to itself.

        # [block_size, hidden_size] -> the same
        """
        sight, length, size = self._sights[number], sequence.length, self.block_size
        least = 0 if sight.window is None else max(0, length - sight.window)
        slots = torch.tensor(list(sequence.slots[least:length]), device=read.device)
        cos_sin = self.stack.cos_sin[length : length + size]
        q, (k, v) = layer.queries(read[None]), layer.entries(read[None])
        k = torch.cat([self.pool.keys[number, slots], rotate(k, cos_sin)[0]])
        v = torch.cat([self.pool.values[number, slots], v[0]])
        mask = torch.ones(size, len(k), dtype=torch.bool, device=read.device)
        if sight.causal:
            mask = mask.tril(len(slots))
        attended = F.scaled_dot_product_attention(
            rotate(q, cos_sin).transpose(1, 2), k.transpose(0, 1)[None], v.transpose(0, 1)[None],
            attn_mask=mask, enable_gqa=True,
        )  # fmt: skip
        out: Tensor = layer.self_attn.o_proj(attended[0].transpose(0, 1).flatten(1))
        return out


class CandidateSelector(nn.Module):
    """Scores of candidates by the token before them."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(0.02 * torch.randn(vocab_size, rank))
        self.successor_codebook = nn.Parameter(0.02 * torch.randn(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, hidden: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """What is added to the candidates' logits.

        # [..., hidden_size], int64 [...], int64 [..., n] -> [..., n]
        """
        context = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        scores: Tensor = (self.successor_codebook[candidates] * context[..., None, :]).sum(-1)
        return scores


class DFlash2(DFlash):
    """See the module."""

    kind = "dflash2"
    Options: ClassVar[type[Any]] = DFlash2Options
    stack_class = ConvolvedStack

    def __init__(
        self,
        target: HeadTarget,
        options: Any,
        layers: LlamaConfig | None = None,
        sights: Sequence[BlockSight] | None = None,
        num_logits: int | None = None,
    ) -> None:
        size, vocab_size = target.config.hidden_size, target.config.vocab_size
        if num_logits is not None:
            raise InvalidArgument("draft_vocab_size", num_logits, f"all tokens, {vocab_size}")
        if options.vocabulary:
            raise InvalidArgument("vocabulary", options.vocabulary, "0: all tokens")
        if not 1 <= options.conv_taps <= options.block_size:
            allowed = f"from 1 to block_size, {options.block_size}"
            raise InvalidArgument("conv_taps", options.conv_taps, allowed)
        if options.conv_group < 1 or size % options.conv_group:
            raise InvalidArgument("conv_group", options.conv_group, f"a divisor of {size}")
        if not 1 <= options.candidates <= vocab_size:
            allowed = f"from 1 to the number of tokens, {vocab_size}"
            raise InvalidArgument("candidates", options.candidates, allowed)
        super().__init__(target, options, layers, sights)
        self.candidate_selector = CandidateSelector(vocab_size, size, options.selector_rank)

    def new_layer(self) -> BlockLayer:
        options = self.options
        return ConvolvedLayer(
            self.config, options.block_size, options.conv_taps, options.conv_group
        )

    # --- training ------------------------------------------------------------------------------

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """DFlash's, and the cross-entropy of the target's argmax among the candidates.

        Where it is none of them, it takes the place of the last one.
        """
        options = self.options
        anchors, hidden, weights = self.blocks(batch)
        before, token_ids, wanted = self.drafted(batch, anchors)
        hidden = hidden[:, :, self.first_place :]
        logits = self.some_logits(hidden).float()
        each = hidden.new_zeros(weights.shape)
        if options.text_weight:
            each = each + options.text_weight * cross_entropy(logits, token_ids)
        if options.teacher_weight:
            q = wanted.float().softmax(-1)
            each = each - options.teacher_weight * (q * logits.log_softmax(-1)).sum(-1)
        best = wanted.argmax(-1, keepdim=True)
        candidates = logits.topk(options.candidates, -1).indices
        absent = (candidates != best).all(-1, keepdim=True)
        last = torch.where(absent, best, candidates[..., -1:])
        candidates = torch.cat([candidates[..., :-1], last], -1)
        scores = logits.gather(-1, candidates)
        scores = scores + self.candidate_selector(hidden, before, candidates).float()
        label = (candidates == best).float().argmax(-1)
        each = each + options.selector_weight * cross_entropy(scores, label)
        chosen = torch.full_like(logits, float("-inf")).scatter(-1, candidates, scores)
        metrics = {
            "agreement": block_agreement(chosen, wanted, weights),
            "recall": weighted_mean(1 - absent[..., 0].float(), (weights > 0).float()),
        }
        return weighted_mean(each, weights), metrics

    # --- drafting ------------------------------------------------------------------------------

    def selected(self, logits: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
        """The candidates' scores; minus infinity elsewhere.  # [n, vocab_size] -> the same

        Args:
            hidden: # [n, hidden_size]
            before: the token before each place.  # int64 [n]
        """
        best = logits.topk(self.options.candidates, -1)
        added = self.candidate_selector(hidden, before, best.indices).to(logits.dtype)
        every = torch.full_like(logits, float("-inf"))
        return every.scatter(-1, best.indices, best.values + added)

    def first_logits(self, states: Sequence[BlockState], anchors: Tensor) -> Tensor:
        hidden = torch.stack([state.hidden[self.first_place] for state in states])
        return self.selected(self.some_logits(hidden), hidden, anchors)

    def expand(self, states: Sequence[BlockState], frontiers: Sequence[Frontier]) -> Tensor:
        rows = torch.stack(self.new_rows(states, frontiers))
        nodes = [
            (state.hidden[self.first_place + state.depth[node]], token)
            for state, frontier in zip(states, frontiers, strict=True)
            for node, token, _ in frontier
        ]
        before = torch.tensor([token for _, token in nodes], device=rows.device)
        return self.selected(rows, torch.stack([hidden for hidden, _ in nodes]), before)

    def greedy_chains(
        self,
        states: Sequence[BlockState],
        first: Sequence[int],
        depth: int,
        stop_below: FloatArray | None = None,
    ) -> IntArray:
        return Head.greedy_chains(self, states, first, depth, stop_below)
