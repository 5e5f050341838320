"""Falcon: EAGLE's features, a block of tokens in each pass of the head.

Gao et al. 2024 (arXiv 2412.12639). The head reads pairs of a feature and the token after it, as
EAGLE does, but what it puts out for a pair is the feature ``block`` places after the pair's: the
last ``block`` pairs give as many new features, and a draft takes ``ceil(depth / block)`` passes. An
LSTM carries the order of the pairs. In the decoder layer a pair sees all pairs of its block, later
ones among them, and none of a later block (the relaxed causal mask). With a block of 1 and no LSTM
this is EAGLE.

Blocks end where the context ends, so they lie elsewhere in every round. Keys and values of a single
layer depend on their own input alone and serve all of these; the paper has one layer, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import InvalidArgument
from paceline.models.heads.base import (
    Frontier,
    Head,
    HeadBatch,
    HeadTarget,
    draw,
    mean_over,
    soft_cross_entropy,
    text_cross_entropy,
)
from paceline.models.heads.layer import DecoderLayer, LayerStack
from paceline.models.kv_cache import PooledSequence
from paceline.models.rope import rope_table
from paceline.models.rows import Rows

Memory = tuple[Tensor, Tensor]
"""State of the LSTM.  # 2 x [lstm_layers, batch, hidden_size]"""


@dataclass(frozen=True, slots=True)
class FalconOptions:
    """Attributes:
    block: tokens drafted in a pass (the paper's k).
    lstm_layers: 0 for none.
    feature_weight, token_weight: of the feature's smooth L1 loss and the tokens' loss.
    soft_weight: share of the distillation in the tokens' loss; the rest is cross-entropy on what
        the target says.
    glancing_steps: training steps in which the share of true pairs among those that the head reads
        falls from 1 to ``glancing_floor``; the other pairs are its own.
    """

    block: int = 2
    lstm_layers: int = 2
    feature_weight: float = 1.0
    token_weight: float = 0.1
    soft_weight: float = 0.9
    glancing_steps: int = 1000
    glancing_floor: float = 0.8


@dataclass(frozen=True, slots=True, eq=False)
class FalconBlock:
    """The draft of one pass.

    Attributes:
        features: # [block, hidden_size]
        entry: pending KV entry of the last pair that it read; -1 is the committed prefix.
        memory: of the LSTM after that pair; None without LSTM.  # 2 x [lstm_layers, hidden_size]
    """

    features: Tensor
    entry: int
    memory: Memory | None


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """Attributes:
    source: the block that its own token was drafted from.
    block: the one with the feature that follows it, at place ``depth % block``.
    """

    depth: int
    token: int
    parent: int
    source: FalconBlock
    block: FalconBlock


class _State:
    """KV entries of committed pairs, the inputs of the last ones, the nodes of this round."""

    def __init__(self, sequence: PooledSequence, tail: Tensor) -> None:
        self.sequence = sequence
        self.tail = tail  # layer inputs of the last block - 1 pairs  # [block - 1, hidden_size]
        self.memory: Memory | None = None
        self.root: FalconBlock | None = None
        self.nodes: dict[int, _Node] = {}


class Falcon(Head):
    """See the module."""

    kind = "falcon"
    Options = FalconOptions
    steps_seen: Tensor

    def __init__(self, target: HeadTarget, options: FalconOptions) -> None:
        if not 1 <= options.block <= 16:
            raise InvalidArgument("block", options.block, "1 to 16")
        super().__init__(target, options)
        config, size = target.config, target.config.hidden_size
        # Before the first pair stand block - 1 empty ones.
        config = replace(config, context_length=config.context_length + options.block)
        self.fc = nn.Linear(2 * size, size)
        self.lstm: nn.LSTM | None = None
        if options.lstm_layers:
            self.lstm = nn.LSTM(2 * size, size, options.lstm_layers, batch_first=True)
        self.layers = nn.ModuleList([DecoderLayer(config)])
        self.register_buffer("steps_seen", torch.zeros((), dtype=torch.int64))
        self._cos_sin = rope_table(config)  # [context_length, head_dim]

    def inputs(
        self, embedded: Tensor, features: Tensor, before: Memory | None = None
    ) -> tuple[Tensor, Memory | None]:
        """What enters the layer for pairs that follow one another, and the LSTM's state after them.

        # 2 x [batch, length, hidden_size] -> [batch, length, hidden_size]
        """
        pairs = torch.cat([embedded, features], -1)
        x: Tensor = self.fc(pairs)
        if self.lstm is None:
            return x, None
        carried, after = self.lstm(pairs, before)
        return x + carried, after

    # --- training ------------------------------------------------------------------------------

    def forward(self, features: Tensor, token_ids: Tensor, phase: int = 0) -> Tensor:
        """Features of the places 1, 2, ..., each drafted as the place that it has in its block.

        Args:
            features: of places 0, 1, ...  # [batch, length, hidden_size]
            token_ids: the token after each place.  # [batch, length]
            phase: where blocks begin, below ``block``.

        Returns:
            # [batch, length, hidden_size]
        """
        length = features.shape[1]
        x, _ = self.inputs(self.target.embed(token_ids), features)
        x = F.pad(x, (0, 0, self.options.block - 1, 0))[:, :length]
        mask = relaxed_mask(length, self.options.block, phase).to(x.device)
        result: Tensor = self.layers[0](x, self._cos_sin[:length].to(x.device), mask)
        return result

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Coupled sequential glancing distillation (section 3.2).

        A first pass drafts from true pairs; where a coin says so, its features and the tokens that
        they give take the true pairs' places, in both sequences at once, in the pass that is
        trained.
        """
        options = self.options
        features, token_ids = batch.hidden[:, :-1], batch.token_ids[:, 1:]
        phase = draw(options.block, batch.generator)
        if self.training:
            share = 1 - float(self.steps_seen) / max(1, options.glancing_steps)
            self.steps_seen += 1
            features, token_ids = self._glance(batch, max(options.glancing_floor, share), phase)
        drafted = self(features, token_ids, phase)
        logits, wanted = self.target.logits(drafted), batch.logits[:, 1:]
        best, counts = wanted.argmax(-1), batch.counts_from(1)
        errors = F.smooth_l1_loss(drafted.float(), batch.hidden[:, 1:].float(), reduction="none")
        feature = mean_over(errors, counts)
        hard = text_cross_entropy(logits, best, counts)
        soft = soft_cross_entropy(logits, wanted, counts)
        token = options.soft_weight * soft + (1 - options.soft_weight) * hard
        total = options.feature_weight * feature + options.token_weight * token
        right = (logits.argmax(-1) == best).float()
        place = (torch.arange(right.shape[1], device=right.device) + phase) % options.block
        agreement = [
            mean_over(right[:, place == i], None if counts is None else counts[:, place == i])
            for i in range(options.block)
        ]
        return total, {"agreement": torch.stack(agreement).nan_to_num()}

    @torch.no_grad()
    def _glance(self, batch: HeadBatch, share: float, phase: int) -> tuple[Tensor, Tensor]:
        """Pairs of which about ``share`` are true and the others the head's own."""
        features, token_ids = batch.hidden[:, :-1], batch.token_ids[:, 1:]
        if share >= 1:
            return features, token_ids
        drafted = self(features, token_ids, phase)[:, :-1]  # of places 1, 2, ...
        coins = torch.rand(
            drafted.shape[:2], generator=batch.generator, device=batch.generator.device
        )
        own = (coins >= share).to(features.device)
        said = self.target.logits(drafted).argmax(-1)
        mixed = torch.where(own[..., None], drafted.to(features.dtype), features[:, 1:])
        tokens = torch.where(own, said, token_ids[:, 1:])
        return (
            torch.cat([features[:, :1], mixed], 1),
            torch.cat([token_ids[:, :1], tokens], 1),
        )

    # --- drafting ------------------------------------------------------------------------------

    def prepare(self) -> None:
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        self.stack = LayerStack(layers, self.target.kv_tokens)

    def new_state(self) -> _State:
        weight = self.fc.weight
        tail = weight.new_zeros(self.options.block - 1, self.target.config.hidden_size)
        return _State(self.stack.new_sequence(), tail)

    def free(self, state: _State) -> None:
        self.stack.free(state.sequence)

    def root(
        self,
        states: Sequence[_State],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        """Read the new pairs; the last block of pairs drafts the next block of features."""
        pool, size = self.stack.pool, self.options.block
        inputs, parts = [], []
        for state, rows, ids in zip(states, features, token_ids, strict=True):
            # The pairs before a block's last one are computed again in every block they are in.
            pool.truncate(state.sequence, max(0, state.sequence.length - (size - 1)))
            embedded = self.target.embed(torch.tensor(ids, device=rows.device))
            x, state.memory = self.inputs(embedded[None], rows[None], state.memory)
            inputs.append(torch.cat([state.tail, x[0]]))
            state.tail = inputs[-1][len(ids) :]
            parts.append((state.sequence, range(-1, len(inputs[-1]) - 1)))
        out = self._run(inputs, self.stack.append(parts))
        for state, x, rows in zip(states, inputs, out, strict=True):
            self.stack.commit(state.sequence, range(len(x)))
            memory = state.memory and (state.memory[0][:, 0], state.memory[1][:, 0])
            state.root, state.nodes = FalconBlock(rows, -1, memory), {}
        return self.target.logits(torch.stack([rows[0] for rows in out]))

    def expand(self, states: Sequence[_State], frontiers: Sequence[Frontier]) -> Tensor:
        """The next feature of a node's block; a new block where a node is the last of one."""
        size = self.options.block
        nodes, ending = [], []
        for state, frontier in zip(states, frontiers, strict=True):
            for node, token, parent in frontier:
                above = state.nodes.get(parent)
                block = above.block if above else state.root
                assert block is not None
                depth = above.depth + 1 if above else 1
                entry = _Node(depth, token, parent, block, block)
                state.nodes[node] = entry
                if depth % size == 0:
                    ending.append((state, node))
                nodes.append((state, node))
        for (state, node), block in zip(ending, self._draft(ending), strict=True):
            state.nodes[node] = replace(state.nodes[node], block=block)
        features = []
        for state, node in nodes:
            entry = state.nodes[node]
            features.append(entry.block.features[entry.depth % size])
        return self.target.logits(torch.stack(features))

    def _draft(self, ending: Sequence[tuple[_State, int]]) -> list[FalconBlock]:
        """One pass: the blocks after nodes that are the last of theirs."""
        if not ending:
            return []
        size = self.options.block
        tokens, sources = [], []
        for state, node in ending:
            sources.append(state.nodes[node].source)
            path: list[int] = []
            while len(path) < size:
                path.append(state.nodes[node].token)
                node = state.nodes[node].parent
            tokens.append(path[::-1])
        features = torch.stack([source.features for source in sources])
        before = None
        if self.lstm is not None:
            known = [source.memory for source in sources if source.memory is not None]
            before = torch.stack([m[0] for m in known], 1), torch.stack([m[1] for m in known], 1)
        embedded = self.target.embed(torch.tensor(tokens, device=features.device))
        x, after = self.inputs(embedded, features, before)
        # Blocks of one session are one part, in order.
        by_state: dict[int, list[int]] = {}
        for i, (state, _) in enumerate(ending):
            by_state.setdefault(id(state), []).append(i)
        order, parts, entries = [], [], {}
        for members in by_state.values():
            sequence = ending[members[0]][0].sequence
            parents: list[int] = []
            for i in members:
                first = sequence.num_pending + len(parents)
                parents += [sources[i].entry, *range(first, first + size - 1)]
                entries[i] = first + size - 1
            order += members
            parts.append((sequence, parents))
        out = self._run([x[i] for i in order], self.stack.append(parts))
        rows = dict(zip(order, out, strict=True))
        return [
            FalconBlock(rows[i], entries[i], after and (after[0][:, i], after[1][:, i]))
            for i in range(len(ending))
        ]

    def _run(self, inputs: Sequence[Tensor], rows: Rows) -> list[Tensor]:
        """The output of each part's last block, whose pairs attend to one another.

        # num_parts x [block, hidden_size]
        """
        size, end, last = self.options.block, 0, []
        for x in inputs:
            end += len(x)
            block = slice(end - size, end)
            last.append(block)
            for context in (rows.prefix_length, rows.path_length, rows.path_offset):
                context[block] = context[end - 1]
        out = self.stack.run(torch.cat([*inputs]), rows)
        return [out[block] for block in last]


def relaxed_mask(length: int, block: int, phase: int = 0) -> Tensor:
    """True where a place attends to another: places of its own block and of all earlier ones.

    # bool [length, length]
    """
    number = (torch.arange(length) + phase) // block
    return number[None] <= number[:, None]
