"""DSpark: DFlash whose tokens depend on the one before, and that knows how sure it is.

Cheng et al. 2026 (arXiv 2607.05147). To the logits that the block's pass makes for a place, the
*Markov head* adds a bias of low rank that depends on the token before it, ``W2 f(W1[token])``: in
training that of the text, in a draft the one that was drafted. The *confidence head* reads the same
token and the place's state, and estimates how likely the target accepts what is drawn there; the
length controller ``confidence`` ends a draft by it.
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
from paceline.models.heads.blocks import BlockSight
from paceline.models.heads.dflash import (
    BlockState,
    DFlash,
    DFlashOptions,
    block_agreement,
    cross_entropy,
    weighted_mean,
)
from paceline.models.llama_config import LlamaConfig
from paceline.models.packing import Weight
from paceline.types import FloatArray, IntArray

MARKOV_KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True)
class DSparkOptions(DFlashOptions):
    """DFlash's options with the paper's values for DSpark, and:

    Attributes:
    markov_rank: of the bias; 0: no Markov head.
    markov_kind: how the bias depends on the token before: ``vanilla``, on it alone; ``gated``, also
        on the place's state; ``rnn``, also on the tokens before that.
    confidence_head: whether there is one.
    confidence_reads_token: it reads the token before the place, not only the place's state.
    distance_weight: in the loss, of the sum of |p - q|, beside ``text_weight``.
    confidence_weight: in the loss, of the confidence head's cross-entropy.
    """

    block_size: int = 7
    from_anchor: bool = True
    decay: float = 4.0
    text_weight: float = 0.1
    markov_rank: int = 256
    markov_kind: str = "vanilla"
    confidence_head: bool = True
    confidence_reads_token: bool = True
    distance_weight: float = 0.9
    confidence_weight: float = 1.0


class MarkovHead(nn.Module):
    """The bias of a place's logits by the token before it.

    Args:
        vocab_size: of the target.
        num_logits: tokens that the head can draft.
    """

    def __init__(self, vocab_size: int, num_logits: int, hidden_size: int, rank: int, kind: str):
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        nn.init.normal_(self.markov_w1.weight, std=0.01)
        self.markov_w2 = nn.Linear(rank, num_logits, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(hidden_size + 2 * rank, 3 * rank)

    def step(self, before: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """What ``W2`` reads at a place, and the memory for the next one.

        Args:
            before: ``W1`` of the token before the place.  # [..., rank]
            hidden: of the place.  # [..., hidden_size]
            memory: of the places before; only ``rnn`` has one.  # [..., rank]
        """
        if self.kind == "vanilla":
            return before, memory
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, before], -1)))
            return gate * before, memory
        joint = self.joint_proj(torch.cat([memory, before, hidden], -1))
        gate, candidate, out = joint.chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * memory + (1 - gate) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    """The logit of a place's acceptance."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(num_inputs, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """# [..., num_inputs] -> [...]"""
        logits: Tensor = self.proj(inputs)
        return logits.squeeze(-1)


class DSpark(DFlash):
    """See the module."""

    kind = "dspark"
    Options: ClassVar[type[Any]] = DSparkOptions
    _packed_w2: Weight | None = None

    def __init__(
        self,
        target: HeadTarget,
        options: Any,
        layers: LlamaConfig | None = None,
        sights: Sequence[BlockSight] | None = None,
        num_logits: int | None = None,
    ) -> None:
        super().__init__(target, options, layers, sights, num_logits)
        size, vocab_size, rank = target.config.hidden_size, target.config.vocab_size, 0
        if options.markov_kind not in MARKOV_KINDS:
            allowed = f"one of {', '.join(MARKOV_KINDS)}"
            raise InvalidArgument("markov_kind", options.markov_kind, allowed)
        self.markov_head = None
        if options.markov_rank:
            rank = options.markov_rank
            self.markov_head = MarkovHead(
                vocab_size, len(self.vocabulary), size, rank, options.markov_kind
            )
        reads_token = options.confidence_head and options.confidence_reads_token
        if reads_token and not rank:
            allowed = "above 0 where the confidence head reads the token before"
            raise InvalidArgument("markov_rank", rank, allowed)
        self.confidence_head = None
        if options.confidence_head:
            self.confidence_head = ConfidenceHead(size + (rank if reads_token else 0))

    # --- training ------------------------------------------------------------------------------

    def heads(self, hidden: Tensor, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits of the places of whole blocks that draft, and those of their acceptance.

        Args:
            hidden: # [..., block_size, hidden_size]
            before: the token before each place that drafts.  # int64 [..., max_depth]

        Returns:
            # [..., max_depth, num_logits], [..., max_depth]
        """
        drafting = hidden[..., self.first_place :, :]
        logits, embedded = self.some_logits(drafting), None
        if self.markov_head is not None:
            embedded = self.markov_head.markov_w1(before)
            memory, read = self.first_memory(embedded[..., 0, :], hidden[..., 0, :]), []
            for place in range(before.shape[-1]):
                out, memory = self.markov_head.step(
                    embedded[..., place, :], drafting[..., place, :], memory
                )
                read.append(out)
            logits = logits + self.markov_head.markov_w2(torch.stack(read, -2))
        return logits, self.acceptance_logits(drafting, embedded)

    def first_memory(self, anchor: Tensor, hidden: Tensor) -> Tensor:
        """The memory before the first place that drafts.

        Where the anchor's own place drafts nothing, it is read nonetheless.

        Args:
            anchor: ``W1`` of it.  # [..., rank]
            hidden: of its place.  # [..., hidden_size]
        """
        memory = torch.zeros_like(anchor)
        if self.first_place and self.markov_head is not None:
            _, memory = self.markov_head.step(anchor, hidden, memory)
        return memory

    def acceptance_logits(self, hidden: Tensor, embedded: Tensor | None) -> Tensor | None:
        """None without a confidence head.  # [..., hidden_size], [..., rank] -> [...]"""
        if self.confidence_head is None:
            return None
        if self.options.confidence_reads_token and embedded is not None:
            hidden = torch.cat([hidden, embedded], -1)
        logits: Tensor = self.confidence_head(hidden)
        return logits

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Text, distance to the target's distribution, and the confidence head's error.

        What the confidence head learns is the probability that rejection sampling accepts,
        ``sum of min(p, q)``.
        """
        options = self.options
        anchors, hidden, weights = self.blocks(batch)
        before, token_ids, wanted = self.drafted(batch, anchors)
        logits, sure = self.heads(hidden, before)
        logits = logits.float()
        p, q = wanted.float().softmax(-1), logits.softmax(-1)
        distance = (p - q).abs().sum(-1)
        each = options.distance_weight * distance
        if options.text_weight:
            each = each + options.text_weight * cross_entropy(logits, token_ids)
        if options.teacher_weight:
            each = each - options.teacher_weight * (p * logits.log_softmax(-1)).sum(-1)
        accepted = 1 - distance.detach() / 2
        metrics = {
            "agreement": block_agreement(logits, wanted, weights),
            "overlap": weighted_mean(accepted, (weights > 0).float()),
        }
        if sure is not None:
            sure = sure.float()
            error = F.binary_cross_entropy_with_logits(sure, accepted, reduction="none")
            each = each + options.confidence_weight * error
            off = (sure.detach().sigmoid() - accepted).abs()
            metrics["confidence_error"] = weighted_mean(off, (weights > 0).float())
        return weighted_mean(each, weights), metrics

    # --- drafting ------------------------------------------------------------------------------

    def prepare(self) -> None:
        super().prepare()
        if self.markov_head is not None:
            weight = self.markov_head.markov_w2.weight.detach().contiguous()
            self._packed_w2 = self.stack.ops.pack(weight)

    def first_logits(self, states: Sequence[BlockState], anchors: Tensor) -> Tensor:
        hidden = torch.stack([state.hidden[self.first_place] for state in states])
        memory = None
        if self.markov_head is not None:
            places = torch.stack([state.hidden[0] for state in states])
            memory = self.first_memory(self.markov_head.markov_w1(anchors), places)
        logits, memory = self._step(self.some_logits(hidden), hidden, anchors, memory)
        if memory is not None:
            for state, row in zip(states, memory, strict=True):
                state.memory[-1] = row
        return self.among_all(logits)

    def expand(self, states: Sequence[BlockState], frontiers: Sequence[Frontier]) -> Tensor:
        rows = torch.stack(self.new_rows(states, frontiers))
        nodes = [
            (state, node, token, parent)
            for state, frontier in zip(states, frontiers, strict=True)
            for node, token, parent in frontier
        ]
        hidden = torch.stack(
            [state.hidden[self.first_place + state.depth[node]] for state, node, _, _ in nodes]
        )
        memory = None
        if self.markov_head is not None:
            memory = torch.stack([state.memory[parent] for state, _, _, parent in nodes])
        tokens = torch.tensor([token for _, _, token, _ in nodes], device=hidden.device)
        logits, memory = self._step(rows, hidden, tokens, memory)
        if memory is not None:
            for (state, node, _, _), row in zip(nodes, memory, strict=True):
                state.memory[node] = row
        return self.among_all(logits)

    def _step(
        self, logits: Tensor, hidden: Tensor, before: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The heads at one place of each of several drafts; keeps the estimates of acceptance.

        Args:
            logits: of the block's pass.  # [num_rows, num_logits]
            hidden: # [num_rows, hidden_size]
            before: # int64 [num_rows]
            memory: # [num_rows, rank]

        Returns:
            The logits, and the memory for the places behind.
        """
        embedded = None
        if self.markov_head is not None and memory is not None:
            embedded = self.markov_head.markov_w1(before)
            read, memory = self.markov_head.step(embedded, hidden, memory)
            assert self._packed_w2 is not None
            logits = logits + self.stack.ops.linear(read.contiguous(), self._packed_w2)
        sure = self.acceptance_logits(hidden, embedded)
        self.last_acceptance = None if sure is None else sure.float().sigmoid().cpu().numpy()
        return logits, memory

    def greedy_chains(
        self,
        states: Sequence[BlockState],
        first: Sequence[int],
        depth: int,
        stop_below: FloatArray | None = None,
    ) -> IntArray:
        return Head.greedy_chains(self, states, first, depth, stop_below)
