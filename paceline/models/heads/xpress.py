"""xPress: DFlash's block, whose logits a small causal network corrects by the tokens before.

*xPress: Parallel Refinement for Diffusion Drafters in Speculative Decoding*, 2026 (arXiv
2608.02438), in the layout of ``speculators`` 0.9. The refiner works in few dimensions. For each
place of a block it joins the place's state, the mean state of the block and the token before the
place; a mixer adds what it has for the earlier places, with a weight for each pair of places and
each dimension; an MLP and a readout make of that a bias for the place's logits.

A place depends only on the tokens before it, so a tree is drafted exactly, node by node. Argmax
chains are drafted in *Jacobi passes* over the whole block: each pass reads the tokens that the one
before has chosen, and makes at least one more of them what they are when drafted one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import InvalidArgument
from paceline.models.heads.base import (
    Frontier,
    HeadBatch,
    HeadTarget,
    State,
    confidence,
    cut_chains,
)
from paceline.models.heads.blocks import BlockSight
from paceline.models.heads.dflash import (
    BlockState,
    DFlash,
    DFlashOptions,
    block_agreement,
    cross_entropy,
    weighted_mean,
)
from paceline.models.kv_cache import PooledSequence
from paceline.models.llama_config import LlamaConfig
from paceline.models.packing import Weight
from paceline.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class XPressOptions(DFlashOptions):
    """DFlash's options with the values of xPress, and:

    Attributes:
    refiner_rank: dimensions in which the refiner works.
    refiner_ratio: its MLP has as many times more.
    jacobi_passes: most passes that draft a chain; 0: the backbone's tokens as they are.
    best_weight: in each term of the loss, of the cross-entropy against the target's best token.
    overlap_weight: there, of what rejection sampling rejects, ``1 - sum of min(p, q)``.
    consistency_weight: of the term whose tokens come from Jacobi passes, not from the text.
    consistency_passes: how many of those it follows.
    base_weight: of the term of the backbone's own logits.
    """

    text_weight: float = 0.0
    decay: float = 4.0
    refiner_rank: int = 256
    refiner_ratio: int = 2
    jacobi_passes: int = 6
    best_weight: float = 0.1
    overlap_weight: float = 0.9
    consistency_weight: float = 0.3
    consistency_passes: int = 3
    base_weight: float = 0.6


class Refiner(nn.Module):
    """The bias of a block's logits by its tokens; parameters are named as published ones.

    Args:
        vocab_size: of the target.
        num_logits: tokens that the head can draft.
    """

    def __init__(
        self,
        vocab_size: int,
        num_logits: int,
        hidden_size: int,
        block_size: int,
        rank: int,
        ratio: int,
    ) -> None:
        super().__init__()
        self.token_embed = nn.Embedding(vocab_size, rank)
        self.down_h = nn.Linear(hidden_size, rank, bias=False)
        self.down_g = nn.Linear(hidden_size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mlp_gate = nn.Linear(rank, ratio * rank, bias=False)
        self.mlp_up = nn.Linear(rank, ratio * rank, bias=False)
        self.mlp_down = nn.Linear(ratio * rank, rank, bias=False)
        self.readout = nn.Linear(rank, num_logits, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)
        # Nothing is mixed in at first.
        self.mix_l = nn.Parameter(torch.zeros(rank, block_size, block_size))

    def see(self, hidden: Tensor) -> Tensor:
        """What it reads of a block.  # [..., block_size, hidden_size] -> [..., 2 * rank]"""
        mean = hidden.mean(-2, keepdim=True).expand_as(hidden)
        return torch.cat([self.down_h(hidden), self.down_g(mean)], -1)

    def read(self, seen: Tensor, before: Tensor) -> Tensor:
        """What it has for places.

        Args:
            seen: # [..., 2 * rank]
            before: the token before each place.  # int64 [...]

        Returns:
            # [..., rank]
        """
        joined: Tensor = self.in_proj(torch.cat([seen, self.token_embed(before)], -1))
        return joined

    def mixer(self) -> Tensor:
        """Weights of the places up to each place.  # [block_size, block_size, rank]"""
        return self.mix_l.tril().permute(1, 2, 0)

    def mix(self, inputs: Tensor) -> Tensor:
        """Add the earlier places to each of a block's first ones.  # [..., n, rank] -> the same"""
        count = inputs.shape[-2]
        mixer = self.mixer()[:count, :count]
        return inputs + torch.einsum("kjr,...jr->...kr", mixer, inputs)

    def finish(self, mixed: Tensor) -> Tensor:
        """What the readout reads.  # [..., rank] -> the same"""
        fed: Tensor = self.mlp_down(F.silu(self.mlp_gate(mixed)) * self.mlp_up(mixed))
        return mixed + fed


class RefinedState(BlockState):
    """A session's block, with what the refiner has for the places of each path.

    Attributes:
        seen: what the refiner reads of the block.  # [block_size, 2 * rank]
        memory: of each node, what the refiner has for the places up to the one behind it; zero
            behind that.  # [block_size, rank]
        known: the tokens before the block's first places: the anchor, and where the anchor's own
            place drafts nothing, first the one before it.
    """

    def __init__(self, sequence: PooledSequence) -> None:
        super().__init__(sequence)
        self.seen = torch.empty(0)
        self.known: list[int] = []


class XPress(DFlash):
    """See the module."""

    kind = "xpress"
    Options: ClassVar[type[Any]] = XPressOptions
    _readout: Weight
    _mixer: Tensor

    def __init__(
        self,
        target: HeadTarget,
        options: Any,
        layers: LlamaConfig | None = None,
        sights: Sequence[BlockSight] | None = None,
        num_logits: int | None = None,
    ) -> None:
        super().__init__(target, options, layers, sights, num_logits)
        for name in ("refiner_rank", "refiner_ratio"):
            if (value := getattr(options, name)) < 1:
                raise InvalidArgument(name, value, "1 or more")
        if options.jacobi_passes < 0:
            raise InvalidArgument("jacobi_passes", options.jacobi_passes, "0 or more")
        config = target.config
        self.refiner_head = Refiner(
            config.vocab_size, len(self.vocabulary), config.hidden_size, options.block_size,
            options.refiner_rank, options.refiner_ratio,
        )  # fmt: skip

    # --- training ------------------------------------------------------------------------------

    def biases(self, seen: Tensor, before: Tensor) -> Tensor:
        """Of the logits of the places that draft, in whole blocks.

        Args:
            seen: # [..., block_size, 2 * rank]
            before: the token before each place.  # int64 [..., block_size]

        Returns:
            # [..., max_depth, num_logits]
        """
        refiner = self.refiner_head
        mixed = refiner.mix(refiner.read(seen, before))
        bias: Tensor = refiner.readout(refiner.finish(mixed[..., self.first_place :, :]))
        return bias

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The same error of three kinds of logits: given the text; given what the Jacobi passes
        of a draft choose; and the backbone's own.

        The passes follow one another without a gradient from one to the next.
        """
        options = self.options
        anchors, hidden, weights = self.blocks(batch)
        before, token_ids, wanted = self.drafted(batch, anchors)
        known = before[..., :1]
        if self.first_place:
            known = torch.cat([batch.token_ids[:, anchors - 1, None], known], -1)
        base = self.some_logits(hidden[:, :, self.first_place :]).float()
        seen, p = self.refiner_head.see(hidden), wanted.float().softmax(-1)

        def refined(rest: Tensor) -> Tensor:
            return base + self.biases(seen, torch.cat([known, rest], -1)).float()

        def error(logits: Tensor) -> Tensor:
            return weighted_mean(self._errors(logits, token_ids, p), weights)

        logits = refined(before[..., 1:])
        total = error(logits) + options.base_weight * error(base)
        drafted, rounds = base, []
        for _ in range(options.consistency_passes if options.consistency_weight else 0):
            drafted = refined(self.vocabulary[drafted.argmax(-1)][..., :-1])
            rounds.append(error(drafted))
        if rounds:
            total = total + options.consistency_weight * torch.stack(rounds).mean()
        overlap = torch.minimum(p, logits.detach().softmax(-1)).sum(-1)
        return total, {
            "agreement": block_agreement(logits, wanted, weights),
            "overlap": weighted_mean(overlap, (weights > 0).float()),
        }

    def _errors(self, logits: Tensor, token_ids: Tensor, p: Tensor) -> Tensor:
        """Of each place, as :meth:`drafted` has them.  # [batch, num_blocks, max_depth]"""
        options, log_q = self.options, logits.log_softmax(-1)
        each: Tensor = options.overlap_weight * (1 - torch.minimum(p, log_q.exp()).sum(-1))
        if options.best_weight:
            best = log_q.gather(-1, p.argmax(-1, keepdim=True))[..., 0]
            each = each - options.best_weight * best
        if options.text_weight:
            each = each + options.text_weight * cross_entropy(logits, token_ids)
        if options.teacher_weight:
            each = each - options.teacher_weight * (p * log_q).sum(-1)
        return each

    # --- drafting ------------------------------------------------------------------------------

    def prepare(self) -> None:
        super().prepare()
        weight = self.refiner_head.readout.weight.detach().contiguous()
        self._readout = self.stack.ops.pack(weight)
        self._mixer = self.refiner_head.mixer().detach().contiguous()

    def new_state(self) -> RefinedState:
        return RefinedState(self.stack.new_sequence())

    def root(
        self,
        states: Sequence[State],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        for state, ids in zip(states, token_ids, strict=True):
            # Of two tokens that a session began with, the head has not seen the first.
            earlier = ids[-2] if len(ids) > 1 else [*ids, *state.known][-1]
            state.known = [earlier, ids[-1]][1 - self.first_place :]
        return super().root(states, features, token_ids)

    def first_logits(self, states: Sequence[State], anchors: Tensor) -> Tensor:
        hidden, place = torch.stack([state.hidden for state in states]), self.first_place
        seen = self.refiner_head.see(hidden)
        known = torch.tensor([state.known for state in states], device=anchors.device)
        inputs = hidden.new_zeros(*hidden.shape[:2], self.options.refiner_rank)
        inputs[:, : place + 1] = self.refiner_head.read(seen[:, : place + 1], known)
        for state, own, first in zip(states, seen, inputs, strict=True):
            state.seen, state.memory[-1] = own, first
        bias = self._bias_at(inputs, torch.full_like(anchors, place))
        return self.among_all(self.some_logits(hidden[:, place]) + bias)

    def expand(self, states: Sequence[State], frontiers: Sequence[Frontier]) -> Tensor:
        rows = torch.stack(self.new_rows(states, frontiers))
        nodes = [
            (state, node, token, parent, self.first_place + state.depth[node])
            for state, frontier in zip(states, frontiers, strict=True)
            for node, token, parent in frontier
        ]
        seen = torch.stack([state.seen[place] for state, *_, place in nodes])
        inputs = torch.stack([state.memory[parent] for state, _, _, parent, _ in nodes])
        tokens = torch.tensor([token for _, _, token, _, _ in nodes], device=rows.device)
        places = torch.tensor([place for *_, place in nodes], device=rows.device)
        inputs[torch.arange(len(nodes)), places] = self.refiner_head.read(seen, tokens)
        for (state, node, *_), own in zip(nodes, inputs, strict=True):
            state.memory[node] = own
        return self.among_all(rows + self._bias_at(inputs, places))

    def _bias_at(self, inputs: Tensor, places: Tensor) -> Tensor:
        """Of one place of each of several blocks.

        Args:
            inputs: what the refiner has for the places up to that.  # [n, block_size, rank]
            places: # int64 [n]

        Returns:
            # [n, num_logits]
        """
        own = inputs[torch.arange(len(inputs)), places]
        return self._read_out(own + (self._mixer[places] * inputs).sum(1))

    def _read_out(self, mixed: Tensor) -> Tensor:
        """# [..., rank] -> [..., num_logits]"""
        read = self.refiner_head.finish(mixed)
        flat = self.stack.ops.linear(read.flatten(0, -2).contiguous(), self._readout)
        return flat.view(*mixed.shape[:-1], -1)

    def greedy_chains(
        self,
        states: Sequence[State],
        first: Sequence[int],
        depth: int,
        stop_below: FloatArray | None = None,
    ) -> IntArray:
        """Chains by Jacobi passes, which end as soon as one of them changes no token."""
        chains = np.array(first, np.int64)[:, None]
        if depth < 2:
            return chains
        device, start = self._mixer.device, self.first_place + 1
        places = slice(start, self.first_place + depth)
        base = self.some_logits(torch.stack([state.hidden[places] for state in states]))
        seen = torch.stack([state.seen[: places.stop] for state in states])
        known = torch.tensor([[*s.known, f] for s, f in zip(states, first, strict=True)])
        known, logits = known.to(device), base
        rest = self.vocabulary[base.argmax(-1)]  # [num_sessions, depth - 1]
        for _ in range(self.options.jacobi_passes):
            inputs = self.refiner_head.read(seen, torch.cat([known, rest[:, :-1]], 1))
            logits = base + self._read_out(self.refiner_head.mix(inputs)[:, start:])
            before, rest = rest, self.vocabulary[logits.argmax(-1)]
            if torch.equal(before, rest):
                break
        chains = np.concatenate([chains, rest.cpu().numpy()], 1)
        if stop_below is None:
            return chains
        unsure = [confidence(logits[:, i]) < stop_below[i] for i in range(depth - 1)]
        return cut_chains(chains, unsure)
