"""Mixture of Attentions: a drafter that needs nothing of the target beyond the verified tokens.

Zimmer et al. 2024 (arXiv 2410.03804). *Layer self-attention* turns what all layers of the target
computed for a verified token into one vector: attention over the layers, their mean, a linear map.
*Self-attention* over token embeddings carries what was drafted. *Cross-attention* reads the
vectors of verified tokens and never anything after the last of them, so that drafted tokens are
fed to the head as in training, however many there are (T-step boundedness); training follows it
with a staircase mask of steps of ``horizon`` places. *Target layer inference* runs the last N
layers of the target on the draft, after the true states of the verified tokens; with N = 0 a
drafter on another machine needs the vectors, the embedding and the output layer only. So it goes
on from the last vectors that it has received while the target cannot be reached.

Where this departs from the paper: the layers' input is the residual stream after each layer and
not their keys and values; the staircase has one step length from the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from paceline.models.heads.layer import DecoderLayer, LayerStack, TargetLayers, rotate
from paceline.models.kv_cache import PooledSequence
from paceline.models.llama_config import LlamaConfig
from paceline.models.rope import rope_table
from paceline.types import Need


@dataclass(frozen=True, slots=True)
class MixtureOptions:
    """Attributes:
    horizon: places that training drafts from one verified token.
    feature_weight: of the smooth L1 loss to the target's features, beside the divergence.
    target_layers: of the target that run on the draft, N in the paper (0, 1 and 3 there).
    """

    horizon: int = 8
    feature_weight: float = 1.0
    target_layers: int = 0


class LayerSelfAttention(nn.Module):
    """Turns the outputs of all layers for a token into one vector."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads if size % config.num_heads == 0 else 1
        self.norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.layer = nn.Parameter(0.02 * torch.randn(config.num_layers, size))
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """# [..., num_layers, hidden_size] -> [..., hidden_size]"""
        x = self.norm(states) + self.layer
        flat = self.qkv(x).flatten(0, -3)  # [tokens, num_layers, 3 * hidden_size]
        q, k, v = flat.unflatten(-1, (3 * self.num_heads, -1)).transpose(1, 2).chunk(3, 1)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        result: Tensor = self.out((x + attended.view_as(x)).mean(-2))
        return result


class CrossAttention(nn.Module):
    """A decoder layer whose attention reads a memory in place of the layer's own input."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        size, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
        self.input_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.query = nn.Linear(size, config.num_heads * dim, bias=False)
        self.memory_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.key_value = nn.Linear(size, 2 * config.num_kv_heads * dim, bias=False)
        self.out = nn.Linear(config.num_heads * dim, size, bias=False)
        self.post_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.gate_up = nn.Linear(size, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, size, bias=False)

    def read(self, memory: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a memory.

        # [batch, length, hidden_size], [length, head_dim]
        # -> 2 x [batch, length, kv_heads, head_dim]
        """
        heads = self.key_value(self.memory_norm(memory)).unflatten(-1, (-1, self.config.head_dim))
        keys, values = heads.chunk(2, -2)
        return rotate(keys, cos_sin), values

    def forward(
        self, x: Tensor, cos_sin: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """# [batch, rows, hidden_size], [rows, head_dim], as ``read``, bool [rows, length]"""
        q = self.query(self.input_norm(x)).unflatten(-1, (-1, self.config.head_dim))
        attended = F.scaled_dot_product_attention(
            rotate(q, cos_sin).transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2),
            attn_mask=mask, enable_gqa=True,
        )  # fmt: skip
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
        result: Tensor = x + self.down(F.silu(gate) * up)
        return result


class _State:
    """Keys and values of verified tokens, KV entries of the tokens after them, this round's nodes.

    Attributes:
        inferred: entries of the target's layers: verified tokens; pending are the draft's, first
            the one after the last committed token.
        payload_bytes: of the vectors of the last round's tokens: what a drafter on another machine
            would have to be sent.
    """

    def __init__(
        self, sequence: PooledSequence, empty: Tensor, inferred: PooledSequence | None
    ) -> None:
        self.sequence = sequence
        self.inferred = inferred
        self.keys = self.values = empty  # [num_verified, kv_heads, head_dim]
        self.entry = {-1: -1}
        self.depth = {-1: 0}
        self.payload_bytes = 0


class MixtureOfAttentions(Head):
    """See the module."""

    kind = "moa"
    needs = frozenset({Need.LAYER_STATES})
    drafts_on = True
    Options = MixtureOptions

    def __init__(self, target: HeadTarget, options: MixtureOptions) -> None:
        if options.horizon < 1:
            raise InvalidArgument("horizon", options.horizon, "at least 1")
        if options.target_layers < 0:
            raise InvalidArgument("target_layers", options.target_layers, "at least 0")
        super().__init__(target, options)
        config = target.config
        self.summary = LayerSelfAttention(config)
        self.layers = nn.ModuleList([DecoderLayer(config)])
        self.cross = CrossAttention(config)
        self._of_target: TargetLayers | None = None
        if options.target_layers:
            self._of_target = TargetLayers(target, -options.target_layers, "target_layers")
        else:
            self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._cos_sin = rope_table(config)  # [context_length, head_dim]

    @property
    def _final_norm(self) -> nn.RMSNorm:
        return self.norm if self._of_target is None else self._of_target.norm

    # --- training ------------------------------------------------------------------------------

    def forward(self, layer_states: Tensor, token_ids: Tensor, phase: int = 0) -> Tensor:
        """Features of the places 1, 2, ..., each drafted from the place where its step begins.

        Args:
            layer_states: of places 0, 1, ...  # [batch, length, num_layers, hidden_size]
            token_ids: the token after each place.  # [batch, length]
            phase: where steps begin, below ``horizon``.

        Returns:
            # [batch, length, hidden_size]
        """
        drafted = self._drafted(layer_states, token_ids, phase)
        return self._inferred(layer_states, drafted, phase)

    def _drafted(self, layer_states: Tensor, token_ids: Tensor, phase: int) -> Tensor:
        """The input of the target's layers."""
        length = token_ids.shape[1]
        cos_sin = self._cos_sin[:length].to(token_ids.device)
        keys, values = self.cross.read(self.summary(layer_states), cos_sin)
        x = self.layers[0](self.target.embed(token_ids), cos_sin)
        mask = staircase_mask(length, self.options.horizon, phase).to(x.device)
        result: Tensor = self.cross(x, cos_sin, keys, values, mask)
        return result

    def _inferred(self, layer_states: Tensor, drafted: Tensor, phase: int) -> Tensor:
        """Apply the target's layers, if any, and a norm.

        The true states of all places and the drafted ones of the places after them are one text:
        a drafted place sees what is verified when its step begins, and the step up to itself.
        """
        if self._of_target is not None:
            length = drafted.shape[1]
            x = torch.cat([self._before_target(layer_states), drafted], 1)
            cos_sin = torch.cat([self._cos_sin[:length], self._cos_sin[1 : length + 1]]).to(
                x.device
            )
            mask = inference_mask(length, self.options.horizon, phase).to(x.device)
            for layer in self._of_target.layers:
                x = layer(x, cos_sin, mask)
            drafted = x[:, length:]
        result: Tensor = self._final_norm(drafted)
        return result

    def _before_target(self, layer_states: Tensor) -> Tensor:
        """The input of the target's layers that run on the draft.  # [..., hidden_size]"""
        return layer_states[..., -1 - self.options.target_layers, :]

    def loss(self, batch: HeadBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Forward divergence from the target, and smooth L1 to its features.

        Those are what enters the target's layers that run on the draft, or else the output layer.
        """
        assert batch.layer_states is not None  # declared in ``needs``
        horizon = self.options.horizon
        phase = draw(horizon, batch.generator)
        states = batch.layer_states[:, :-1]
        drafted = self._drafted(states, batch.token_ids[:, 1:], phase)
        features = self._inferred(states, drafted, phase)
        logits, wanted = self.target.logits(features), batch.logits[:, 1:]
        counts = batch.counts_from(1)
        if self._of_target is None:
            given, true, scale = features.float(), batch.hidden[:, 1:].float(), torch.ones(())
        else:
            true = self._before_target(batch.layer_states)[:, 1:].float()
            given, scale = drafted.float(), true.square().mean().sqrt()  # no norm was there yet
        errors = F.smooth_l1_loss(given / scale, true / scale, reduction="none")
        feature = mean_over(errors, counts)
        total = soft_cross_entropy(logits, wanted, counts) + self.options.feature_weight * feature
        right = (logits.argmax(-1) == wanted.argmax(-1)).float()
        places = torch.arange(right.shape[1], device=right.device)
        ahead = places - step_starts(right.shape[1], horizon, phase).to(right.device)
        agreement = [
            mean_over(right[:, ahead == i], None if counts is None else counts[:, ahead == i])
            for i in range(horizon)
        ]
        return total, {"agreement": torch.stack(agreement).nan_to_num()}

    # --- drafting ------------------------------------------------------------------------------

    def prepare(self) -> None:
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        self.stack = LayerStack(layers, self.target.kv_tokens)
        if self._of_target is not None:
            self.inference = LayerStack(self._of_target.layers, self.target.kv_tokens)
        self._cos_sin = self._cos_sin.to(self.target.embedding.device)

    def new_state(self) -> _State:
        config, like = self.target.config, self.target.embedding
        empty = like.new_empty(0, config.num_kv_heads, config.head_dim)
        inferred = None if self._of_target is None else self.inference.new_sequence()
        return _State(self.stack.new_sequence(), empty, inferred)

    def free(self, state: _State) -> None:
        self.stack.free(state.sequence)
        if state.inferred is not None:
            self.inference.free(state.inferred)

    def root(
        self,
        states: Sequence[_State],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        parts = []
        for state, rows, ids in zip(states, features, token_ids, strict=True):
            self.stack.commit(state.sequence, ())
            summaries = self.summary(rows)
            state.payload_bytes = summaries.numel() * summaries.element_size()
            start = len(state.keys)
            cos_sin = self._cos_sin[start : start + len(rows)]
            keys, values = self.cross.read(summaries[None], cos_sin)
            state.keys = torch.cat([state.keys, keys[0]])
            state.values = torch.cat([state.values, values[0]])
            parts.append((state.sequence, range(-1, len(ids) - 1)))
        self._read_true(states, features)
        x = self._embedded([t for ids in token_ids for t in ids])
        x = self.stack.run(x, self.stack.append(parts))
        ends = torch.tensor([len(ids) for ids in token_ids]).cumsum(0) - 1
        last = x[ends.to(x.device)]
        for state, ids in zip(states, token_ids, strict=True):
            self.stack.commit(state.sequence, range(len(ids)))
            state.entry, state.depth = {-1: -1}, {-1: 0}
        return self._logits(states, last, [[0]] * len(states), [[-1]] * len(states))

    def _read_true(self, states: Sequence[_State], features: Sequence[Tensor]) -> None:
        """Entries of the target's layers for verified tokens, from their true states."""
        if self._of_target is None:
            return
        parts = []
        for state, rows in zip(states, features, strict=True):
            assert state.inferred is not None
            self.inference.commit(state.inferred, ())
            parts.append((state.inferred, range(-1, len(rows) - 1)))
            state.payload_bytes += rows[:, 0].numel() * rows.element_size()
        x = torch.cat([self._before_target(rows) for rows in features])
        self.inference.run(x, self.inference.append(parts))
        for sequence, parents in parts:
            self.inference.commit(sequence, range(len(parents)))

    def expand(self, states: Sequence[_State], frontiers: Sequence[Frontier]) -> Tensor:
        parts, tokens, ahead, after = [], [], [], []
        for state, frontier in zip(states, frontiers, strict=True):
            first = state.sequence.num_pending
            parts.append((state.sequence, [state.entry[parent] for _, _, parent in frontier]))
            for entry, (node, token, parent) in enumerate(frontier, first):
                state.entry[node] = entry
                state.depth[node] = state.depth[parent] + 1
                tokens.append(token)
            ahead.append([state.depth[node] for node, _, _ in frontier])
            # The entry of the last committed token is committed there, and pending here.
            after.append([state.entry[parent] + 1 for _, _, parent in frontier])
        x = self.stack.run(self._embedded(tokens), self.stack.append(parts))
        return self._logits(states, x, ahead, after)

    def _embedded(self, token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor(token_ids, device=self.target.embedding.device)
        return self.target.embed(ids)

    def _logits(
        self,
        states: Sequence[_State],
        x: Tensor,
        ahead: Sequence[Sequence[int]],
        after: Sequence[Sequence[int]],
    ) -> Tensor:
        """Cross-attention of each session's rows, the target's layers, norm and output layer.

        Args:
            ahead: places from the last verified token's to each row's.
            after: pending entry of the target's layers that each row follows.
        """
        read, end = [], 0
        for state, places in zip(states, ahead, strict=True):
            rows = x[end : end + len(places)]
            end += len(places)
            at = torch.tensor(places, device=x.device) + len(state.keys) - 1
            cos_sin = self._cos_sin[at]
            read.append(self.cross(rows[None], cos_sin, state.keys[None], state.values[None])[0])
        drafted = torch.cat(read)
        if self._of_target is not None:
            parts = [(s.inferred, a) for s, a in zip(states, after, strict=True) if s.inferred]
            drafted = self.inference.run(drafted, self.inference.append(parts))
        return self.target.logits(self._final_norm(drafted))


def step_starts(length: int, horizon: int, phase: int) -> Tensor:
    """For each place, the last place that counts as verified.  # int64 [length]"""
    places = torch.arange(length)
    return (((places + phase) // horizon) * horizon - phase).clamp(min=0)


def staircase_mask(length: int, horizon: int, phase: int) -> Tensor:
    """Which verified places each place sees.  # bool [length, length]"""
    return torch.arange(length)[None] <= step_starts(length, horizon, phase)[:, None]


def inference_mask(length: int, horizon: int, phase: int) -> Tensor:
    """The attention mask of the target's layers: true places, then drafted ones.

    # bool [2 * length, 2 * length]
    """
    starts, places = step_starts(length, horizon, phase), torch.arange(length)
    causal = places[None] <= places[:, None]
    same_step = starts[None] == starts[:, None]
    true = torch.cat([causal, torch.zeros_like(causal)], 1)
    drafted = torch.cat([places[None] <= starts[:, None], causal & same_step], 1)
    return torch.cat([true, drafted])
