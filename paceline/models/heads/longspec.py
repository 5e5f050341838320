"""LongSpec: a drafter block whose own KV entries do not grow with the context.

Yang et al. 2025 (arXiv 2502.17421). The block has self-attention over the last ``window`` tokens
and cross-attention into the KV entries that the target's last layer has of the whole verified text,
which the head reads where they are. Its input is the tokens' embedding alone.

*Anchor-offset positions* (section 3.2): short rows train late positions. The first few tokens keep
theirs, the others are shifted by one random number.

*Hybrid tree attention* (section 3.3): the nodes of a draft see all entries of the prefix, so that
part needs no mask; attention among the nodes needs the tree's mask and is small. Each part gives
its output and the log-sum-exp of its scores, by which the two are merged exactly.

Drafted tokens have no entries of the target's, so training lets a place read the target's entries
up to the last verified place alone (the staircase of :mod:`paceline.models.heads.moa`).

Where this departs from the paper: the target computes a training row at the row's own positions,
and only the positions of the keys that the head reads are shifted, which differs for the first few
tokens; and training is one stage, not three of growing length.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
)
from paceline.models.heads.layer import TargetLayers, rotate
from paceline.models.heads.moa import staircase_mask, step_starts
from paceline.models.rope import rope_table
from paceline.types import Need


@dataclass(frozen=True, slots=True)
class LongSpecOptions:
    """Attributes:
    window: committed tokens that self-attention sees.
    horizon: places that training drafts from one verified token.
    anchors: first tokens that keep their positions in training.
    max_offset: most places by which training shifts the others; the context limits it, too.
    """

    window: int = 512
    horizon: int = 8
    anchors: int = 4
    max_offset: int = 30_000


class LongSpecState:
    """A session's entries.

    Attributes:
        keys, values: of the last committed tokens, at most ``window``.
            # [num_kept, kv_heads, head_dim]
        memory: keys and values of the target's last layer for the verified tokens, all but the last
            committed one. Whoever drafts sets it before ``root`` and lets it go behind a draft.
            # 2 x [num_verified, kv_heads, head_dim]
        last: position of the last committed token.
        path: rows of the tree's entries that a node sees, itself included; -1 is the root.
    """

    def __init__(self, empty: Tensor) -> None:
        self._empty = empty
        self.keys = self.values = empty
        self.last = 0
        self.forget_memory()
        self.start()

    def start(self) -> None:
        """Begin a new draft."""
        self.tree_keys = self.tree_values = self._empty
        self.path: dict[int, list[int]] = {-1: []}

    def forget_memory(self) -> None:
        """Keep nothing of the target's between drafts."""
        self.memory = self._empty, self._empty


class LongSpec(Head):
    """See the module."""

    kind = "longspec"
    training_needs = frozenset({Need.LAYER_STATES})
    Options = LongSpecOptions

    def __init__(self, target: HeadTarget, options: LongSpecOptions) -> None:
        for name, least in (("window", 1), ("horizon", 1), ("anchors", 0), ("max_offset", 0)):
            if getattr(options, name) < least:
                raise InvalidArgument(name, getattr(options, name), f"at least {least}")
        super().__init__(target, options)
        config = self.config = target.config
        size, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        self.input_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.qkv = nn.Linear(size, q_size + 2 * kv_size, bias=False)
        self.out = nn.Linear(q_size, size, bias=False)
        self.cross_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.cross_query = nn.Linear(size, q_size, bias=False)
        self.cross_out = nn.Linear(q_size, size, bias=False)
        self.post_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.gate_up = nn.Linear(size, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, size, bias=False)
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self._cos_sin = rope_table(config)  # [context_length, head_dim]
        self._of_target: TargetLayers | None = None

    # --- training ------------------------------------------------------------------------------

    def bind(self, folder: Path) -> None:
        self._of_target = TargetLayers(self.target, -1, "layers")

    def target_entries(self, layer_states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The entries of the target's last layer, as its KV cache has them.

        # [batch, length, num_layers, hidden_size], [length] -> 2 x [batch, length, kv_heads, dim]
        """
        assert self._of_target is not None, "bind comes first"
        layer, config = self._of_target.layers[0], self.config
        heads = layer.qkv(layer.input_norm(layer_states[..., -2, :])).unflatten(
            -1, (-1, config.head_dim)
        )
        keys, values = heads[..., config.num_heads :, :].chunk(2, -2)
        return rotate(keys, self._rotation(positions)), values

    def forward(
        self, layer_states: Tensor, token_ids: Tensor, phase: int = 0, offset: int = 0
    ) -> Tensor:
        """Features of the places 1, 2, ..., each drafted from the place where its step begins.

        Args:
            layer_states: of places 0, 1, ...  # [batch, length, num_layers, hidden_size]
            token_ids: the token after each place.  # [batch, length]
            phase: where steps begin, below ``horizon``.
            offset: by which positions behind the anchors are shifted.

        Returns:
            # [batch, length, hidden_size]
        """
        options, length = self.options, token_ids.shape[1]
        places = anchored_positions(length + 1, options.anchors, offset).to(token_ids.device)
        memory = self.target_entries(layer_states, places[:-1])
        x = self.target.embed(token_ids)
        q, keys, values = self._self_heads(x, places[1:])
        causal = torch.arange(length)[None] <= torch.arange(length)[:, None]
        starts = step_starts(length, options.horizon, phase)
        seen = causal & (torch.arange(length)[None] > starts[:, None] - options.window)
        x = x + self.out(_attention(q, keys, values, seen.to(x.device)))
        verified = staircase_mask(length, options.horizon, phase).to(x.device)
        q = self._cross_heads(x, places[1:])
        return self._fed_forward(x + self.cross_out(_attention(q, *memory, verified)))

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Cross-entropy to the target's distribution; the agreement is by places of a step."""
        assert batch.layer_states is not None  # declared in ``training_needs``
        horizon, length = self.options.horizon, batch.token_ids.shape[1]
        phase = draw(horizon, batch.generator)
        most = min(self.options.max_offset, self.config.context_length - length - 1)
        offset = draw(most + 1, batch.generator) if self.training and most > 0 else 0
        drafted = self(batch.layer_states[:, :-1], batch.token_ids[:, 1:], phase, offset)
        logits, wanted = self.target.logits(drafted), batch.logits[:, 1:]
        counts = batch.counts_from(1)
        right = (logits.argmax(-1) == wanted.argmax(-1)).float()
        ahead = torch.arange(length - 1) - step_starts(length - 1, horizon, phase)
        agreement = [
            mean_over(right[:, ahead == i], None if counts is None else counts[:, ahead == i])
            for i in range(horizon)
        ]
        total = soft_cross_entropy(logits, wanted, counts)
        return total, {"agreement": torch.stack(agreement).nan_to_num()}

    # --- the block -----------------------------------------------------------------------------

    def _rotation(self, positions: Tensor) -> Tensor:
        """Rows of the rope table; what lies behind the context is never accepted."""
        table = self._cos_sin.to(positions.device)
        return table[positions.clamp(max=len(table) - 1)]

    def _self_heads(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of self-attention.  # [..., rows, heads, head_dim]"""
        config = self.config
        heads = self.qkv(self.input_norm(x)).unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], -2)
        turn = self._rotation(positions)
        return rotate(q, turn), rotate(k, turn), v

    def _cross_heads(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries of cross-attention.  # [..., rows, heads, head_dim]"""
        q = self.cross_query(self.cross_norm(x)).unflatten(-1, (-1, self.config.head_dim))
        return rotate(q, self._rotation(positions))

    def _fed_forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
        result: Tensor = self.norm(x + self.down(F.silu(gate) * up))
        return result

    # --- drafting ------------------------------------------------------------------------------

    def prepare(self) -> None:
        self._cos_sin = self._cos_sin.to(self.target.embedding.device)

    def new_state(self) -> LongSpecState:
        config, like = self.config, self.target.embedding
        return LongSpecState(like.new_empty(0, config.num_kv_heads, config.head_dim))

    # An entry follows from a token and its position alone, so nothing needs to be kept for later
    # sessions, and no feature of the target to begin with known tokens.

    def num_known(self, token_ids: Sequence[int], scope: Hashable) -> int:
        return max(0, len(token_ids) - 1)

    def adopt(self, state: LongSpecState, token_ids: Sequence[int], scope: Hashable) -> int:
        known = self.num_known(token_ids, scope)
        if known:
            state.last = known
            self._read(state, token_ids[1:])
        return known

    def _read(self, state: LongSpecState, token_ids: Sequence[int]) -> None:
        """Keep entries of the last committed tokens."""
        ids = self._tensor(token_ids[-self.options.window :])
        positions = torch.arange(state.last + 1 - len(ids), state.last + 1, device=ids.device)
        _, keys, values = self._self_heads(self.target.embed(ids), positions)
        state.keys = torch.cat([state.keys, keys])[-self.options.window :]
        state.values = torch.cat([state.values, values])[-self.options.window :]

    def root(
        self,
        states: Sequence[LongSpecState],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        """See the base; the features only say how many tokens are new."""
        for state, ids in zip(states, token_ids, strict=True):
            state.start()
            # A session that begins anew has read fewer tokens than it has.
            state.last = len(state.memory[0]) or state.last + len(ids)
            self._read(state, ids)
        last = [[(ids[-1], state.last)] for state, ids in zip(states, token_ids, strict=True)]
        return self._logits(states, last, [None] * len(states))

    def expand(self, states: Sequence[LongSpecState], frontiers: Sequence[Frontier]) -> Tensor:
        rows, masks = [], []
        for state, frontier in zip(states, frontiers, strict=True):
            first = len(state.tree_keys)
            mask = torch.zeros(len(frontier), first + len(frontier), dtype=torch.bool)
            own = []
            for row, (node, token, parent) in enumerate(frontier):
                state.path[node] = [*state.path[parent], first + row]
                mask[row, state.path[node]] = True
                own.append((token, state.last + len(state.path[node])))
            rows.append(own)
            masks.append(mask.to(self.target.embedding.device))
        return self._logits(states, rows, masks)

    def _logits(
        self,
        states: Sequence[LongSpecState],
        rows: Sequence[Sequence[tuple[int, int]]],
        masks: Sequence[Tensor | None],
    ) -> Tensor:
        """Logits after tokens at positions.  # [num_rows, vocab_size]

        Args:
            masks: of each session's rows over its tree, theirs at the end; None: the token is
                committed, and its entry is among those of the window.
        """
        flat = [pair for own in rows for pair in own]
        positions = self._tensor([position for _, position in flat])
        x = self.target.embed(self._tensor([token for token, _ in flat]))
        sizes = [len(own) for own in rows]
        parts = (heads.split(sizes) for heads in self._self_heads(x, positions))
        read = []
        for state, mask, q, keys, values in zip(states, masks, *parts, strict=True):
            if mask is None:
                read.append(hybrid_attention(q, (state.keys, state.values)))
                continue
            state.tree_keys = torch.cat([state.tree_keys, keys])
            state.tree_values = torch.cat([state.tree_values, values])
            tree = state.tree_keys, state.tree_values
            read.append(hybrid_attention(q, (state.keys, state.values), tree, mask))
        x = x + self.out(torch.cat(read).flatten(-2).to(x.dtype))
        queries = self._cross_heads(x, positions).split(sizes)
        crossed = [hybrid_attention(q, s.memory) for s, q in zip(states, queries, strict=True)]
        x = x + self.cross_out(torch.cat(crossed).flatten(-2).to(x.dtype))
        return self.target.logits(self._fed_forward(x))

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.target.embedding.device)


def anchored_positions(length: int, anchors: int, offset: int) -> Tensor:
    """Positions of a row whose tokens behind the first few are shifted.  # int64 [length]"""
    places = torch.arange(length)
    return torch.where(places < anchors, places, places + offset)


def _attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of whole rows, for training.  # [batch, length, heads * head_dim]"""
    attended = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask,
        enable_gqa=True,
    )  # fmt: skip
    return attended.transpose(1, 2).flatten(2)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention in float32, and the log-sum-exp of its scores (minus infinity without keys).

    Args:
        q: # [rows, heads, head_dim]
        keys, values: # [length, kv_heads, head_dim]
        mask: what each row sees, at least one key; None: all.  # bool [rows, length]

    Returns:
        # float32 [rows, heads, head_dim], [rows, heads]
    """
    groups = q.shape[-2] // keys.shape[-2]
    keys, values = (each.float().repeat_interleave(groups, -2) for each in (keys, values))
    scores = torch.einsum("rhd,lhd->rhl", q.float(), keys) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], float("-inf"))
    total = scores.logsumexp(-1)
    weights = (scores - total[..., None]).exp()
    return torch.einsum("rhl,lhd->rhd", weights, values), total


def hybrid_attention(
    q: Tensor,
    prefix: tuple[Tensor, Tensor],
    tree: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention over a prefix that all rows see and a tree of which each sees its own path.

    Args:
        q: # [rows, heads, head_dim]
        prefix, tree: keys and values.  # 2 x [length, kv_heads, head_dim]
        mask: of the tree.  # bool [rows, tree length]

    Returns:
        # float32 [rows, heads, head_dim]
    """
    if tree is None:
        return attend(q, *prefix)[0]
    parts = attend(q, *prefix), attend(q, *tree, mask)
    outputs, totals = (torch.stack(each) for each in zip(*parts, strict=True))
    return (totals.softmax(0)[..., None] * outputs).sum(0)
