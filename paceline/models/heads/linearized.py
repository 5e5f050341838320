"""Linearized: EAGLE's features, drafted by a layer whose memory of the context does not grow.

You et al. 2024 (arXiv 2406.07368) give a language model grouped linear attention, augment it with a
causal depthwise convolution, and let it verify trees. Here the layer is a draft head's, so the
target stays the model that it is. A place reads, of the values before it,

- those of its own group of ``group`` places by squared ReLU attention (the local part),
- the mean of all earlier groups by linear attention: keys and values are summed up into one matrix
  as a group ends (the global part),
- the last ``taps`` ones by a convolution whose taps for later places are masked out (the
  augmentation), which makes up for what linear attention lacks near by.

*Trees*: a convolution over the nodes in the order in which they lie would mix branches. It is
unfolded along each node's path instead: the node, its ancestors, and the last committed places. A
path that crosses the end of a group reads its first nodes by the global part, as the chain would.

Where this departs from the paper: keys of the global part have no rotary embedding (a mean over far
places has no use for exact distances), means replace sums, and Medusa's heads are EAGLE's features.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import InvalidArgument
from paceline.models.heads.base import Frontier, HeadTarget
from paceline.models.heads.eagle import Eagle, EagleOptions
from paceline.models.heads.layer import rotate
from paceline.models.llama_config import LlamaConfig


@dataclass(frozen=True, slots=True)
class LinearizedOptions(EagleOptions):
    """As :class:`paceline.models.heads.eagle.EagleOptions`, and:

    Attributes:
        group: places of a group.
        taps: places that the convolution reads: a place and those before it.
        ffn: width of the gated MLP; 0 is the target's.
    """

    group: int = 32
    taps: int = 5
    ffn: int = 0


class LayerMemory:
    """What a layer keeps of a session; its size depends on neither context nor text.

    Attributes:
        summary: sum of the outer products of keys and values of all groups that have ended.
            # [heads, head_dim, head_dim]
        keys: of the places of the group that has not ended, local and global ones.
            # [fewer than group, heads, 2, head_dim]
        values: # [fewer than group, heads, head_dim]
        tail: values of the last places.  # [at most taps - 1, heads, head_dim]
        new_keys, new_values: of pending places, committed next or drafted.
    """

    def __init__(self, config: LlamaConfig, like: Tensor) -> None:
        heads, dim = config.num_heads, config.head_dim
        self.summary = like.new_zeros(heads, dim, dim)
        self._no_keys, self._no_values = (
            like.new_empty(0, heads, 2, dim),
            like.new_empty(0, heads, dim),
        )
        self.keys = self.new_keys = self._no_keys
        self.values = self.new_values = self.tail = self._no_values

    def forget_new(self) -> None:
        """Drop all pending places."""
        self.new_keys, self.new_values = self._no_keys, self._no_values

    def absorb(self, group: int, taps: int) -> None:
        """Keep all pending places, a chain that does not go beyond the end of the group."""
        self.keys = torch.cat([self.keys, self.new_keys])
        self.values = torch.cat([self.values, self.new_values])
        self.tail = torch.cat([self.tail, self.new_values])[-taps + 1 :] if taps > 1 else self.tail
        self.forget_new()
        if len(self.keys) == group:
            ended = torch.einsum("nhd,nhe->hde", self.keys[:, :, 1], self.values)
            self.summary = self.summary + ended
            self.keys, self.values = self._no_keys, self._no_values

    @property
    def num_kept(self) -> int:
        """Numbers that are kept between drafts."""
        return sum(each.numel() for each in (self.summary, self.keys, self.values, self.tail))


class LinearLayer(nn.Module):
    """A layer with the target's heads, see the module."""

    def __init__(self, config: LlamaConfig, options: LinearizedOptions) -> None:
        super().__init__()
        self.config, self.options = config, options
        size, width = config.hidden_size, config.num_heads * config.head_dim
        ffn = options.ffn or config.intermediate_size
        self.input_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.shared = nn.Linear(size, width, bias=False)  # queries and keys of both parts
        self.scale = nn.Parameter(1 + 0.02 * torch.randn(4, config.num_heads, config.head_dim))
        self.offset = nn.Parameter(torch.zeros(4, config.num_heads, config.head_dim))
        self.values = nn.Linear(size, width, bias=False)
        self.gate = nn.Linear(size, width, bias=False)
        self.read_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        # How much of the value of each place before, from the place itself backwards.
        taps = torch.zeros(options.taps, config.num_heads, config.head_dim)
        taps[0] = 1.0
        self.taps = nn.Parameter(taps)
        self.out = nn.Linear(width, size, bias=False)
        self.post_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.gate_up = nn.Linear(size, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, size, bias=False)

    def forward(
        self,
        x: Tensor,
        cos_sin: Tensor,
        mask: Tensor | None = None,
        earlier: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """As :meth:`paceline.models.heads.layer.DecoderLayer.forward`, for training.

        A place of call k follows the places of its own chain in the calls before.
        """
        length = x.shape[1]
        queries, keys, values = self._project(x, cos_sin)
        entries = [] if earlier is None else earlier
        entries.append((keys, values))
        places = torch.arange(length, device=x.device)
        all_keys, all_values = (torch.cat(parts, 1) for parts in zip(*entries, strict=True))
        if mask is None:
            mask = places[None] <= places[:, None]
        weights = self._weights(queries, all_keys, places, places.repeat(len(entries)), mask)
        read = torch.einsum("...rhc,...chd->...rhd", weights, all_values)
        last = len(entries) - 1
        back = [entries[max(last - t, 0)][1] for t in range(self.options.taps)]
        window = [F.pad(v, (0, 0, 0, 0, t, 0))[:, :length] for t, v in enumerate(back)]
        return self._finish(x, read, torch.stack(window, -3))

    def extend(
        self, x: Tensor, cos_sin: Tensor, places: Tensor, paths: Sequence[list[int]],
        all_places: Tensor, memory: LayerMemory,
    ) -> Tensor:  # fmt: skip
        """The same for new rows of a session, which become pending.

        Args:
            x: # [rows, hidden_size]
            cos_sin: of the rows' places.  # [rows, head_dim]
            places: of the rows.  # [rows]
            paths: pending rows that each row sees, in order, itself the last one.
            all_places: of all that may be seen: the open group's, then all pending ones.
        """
        queries, keys, values = self._project(x, cos_sin)
        memory.new_keys = torch.cat([memory.new_keys, keys])
        memory.new_values = torch.cat([memory.new_values, values])
        kept, tail = len(memory.keys), len(memory.tail)
        mask = torch.zeros(len(paths), len(all_places), dtype=torch.bool, device=x.device)
        mask[:, :kept] = True
        # Behind all values there is a zero, for places before the text.
        near = torch.cat([memory.tail, memory.new_values, torch.zeros_like(values[:1])])
        unfolded = []
        for row, path in enumerate(paths):
            mask[row, [kept + each for each in path]] = True
            back = [*range(tail), *(tail + each for each in path)][: -self.options.taps - 1 : -1]
            unfolded.append(back + [len(near) - 1] * (self.options.taps - len(back)))
        all_keys = torch.cat([memory.keys, memory.new_keys])
        all_values = torch.cat([memory.values, memory.new_values])
        weights = self._weights(queries, all_keys, places, all_places, mask)
        read = torch.einsum("rhc,chd->rhd", weights, all_values)
        far = torch.einsum("rhd,hde->rhe", queries[:, :, 1], memory.summary)
        read = read + far * self._share(places, far)[:, None, None]
        return self._finish(x, read, near[torch.tensor(unfolded, device=x.device)])

    def _project(self, x: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, local and global, and values.

        # [..., hidden_size] -> 2 x [..., heads, 2, head_dim], [..., heads, head_dim]
        """
        normed, dim = self.input_norm(x), self.config.head_dim
        shared = F.silu(self.shared(normed)).unflatten(-1, (-1, dim))
        near_q, near_k, far_q, far_k = (
            shared * scale + offset for scale, offset in zip(self.scale, self.offset, strict=True)
        )
        near_q, near_k = rotate(near_q, cos_sin), rotate(near_k, cos_sin)
        queries, keys = torch.stack([near_q, far_q], -2), torch.stack([near_k, far_k], -2)
        return queries, keys, self.values(normed).unflatten(-1, (-1, dim))

    def _weights(
        self, queries: Tensor, keys: Tensor, rows: Tensor, columns: Tensor, mask: Tensor
    ) -> Tensor:
        """Of each value for each row, by the parts that read it.  # [..., rows, heads, columns]

        Args:
            queries, keys: # [..., rows or columns, heads, 2, head_dim]
            rows, columns: places.
            mask: # bool [rows, columns]
        """
        scores = torch.einsum("...rhpd,...chpd->...prhc", queries, keys)
        near, far = scores.unbind(-4)
        near = F.relu(near / self.config.head_dim**0.5).square() / self.options.group
        far = far * self._share(rows, far)[:, None, None]
        group = self.options.group
        same = (rows[:, None] // group == columns // group)[:, None]
        return torch.where(same, near, far).masked_fill(~mask[:, None], 0.0)

    def _share(self, places: Tensor, like: Tensor) -> Tensor:
        """What a place of an earlier group counts in the mean over all of them, in the type of
        ``like``.  # [rows]"""
        group = self.options.group
        share: Tensor = 1.0 / (group * (places // group).clamp(min=1)) / self.config.head_dim**0.5
        return share.to(like.dtype)

    def _finish(self, x: Tensor, read: Tensor, window: Tensor) -> Tensor:
        """The rest of the layer.

        Args:
            read: # [..., heads, head_dim]
            window: values of a place and those before it.  # [..., taps, heads, head_dim]
        """
        mixed = self.read_norm(read) + (window * self.taps).sum(-3)
        x = x + self.out(F.silu(self.gate(self.input_norm(x))) * mixed.flatten(-2))
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
        result: Tensor = x + self.down(F.silu(gate) * up)
        return result


class LinearizedState:
    """A session's memory, and the nodes of the current draft.

    Attributes:
        length: places that were read.
        places: of the pending rows.
        path: pending rows that each node sees, itself included; -1 is the last committed token.
        feature: what was drafted for each node.  # [hidden_size]
    """

    def __init__(self, memories: list[LayerMemory]) -> None:
        self.memories, self.length = memories, 0
        self.start()

    def start(self) -> None:
        """Begin a new draft; the last one's nodes are forgotten."""
        for memory in self.memories:
            memory.forget_new()
        self.places: list[int] = []
        self.path: dict[int, list[int]] = {-1: []}
        self.feature: dict[int, Tensor] = {}


class Linearized(Eagle):
    """See the module."""

    kind = "linearized"
    Options = LinearizedOptions
    kernel_has_it = False

    def __init__(self, target: HeadTarget, options: LinearizedOptions) -> None:
        for name in ("group", "taps"):
            if getattr(options, name) < 1:
                raise InvalidArgument(name, getattr(options, name), "at least 1")
        super().__init__(target, options)
        made = (LinearLayer(target.config, options) for _ in range(options.num_layers))
        self.layers = nn.ModuleList(made)

    def prepare(self) -> None:
        self._cos_sin = self._cos_sin.to(self.target.embedding.device)

    def new_state(self) -> LinearizedState:  # type: ignore[override]
        config, like = self.target.config, self.fc.weight
        return LinearizedState([LayerMemory(config, like) for _ in self.layers])

    def free(self, state: LinearizedState) -> None:  # type: ignore[override]
        """Its memory is the session's own."""

    # What was read is one matrix that no other session can begin within.

    def adopt(self, state: object, token_ids: Sequence[int], scope: Hashable) -> int:
        return 0

    def num_known(self, token_ids: Sequence[int], scope: Hashable) -> int:
        return 0

    def publish(self, state: object, token_ids: Sequence[int], scope: Hashable) -> None:
        """Nothing is kept."""

    def root(  # type: ignore[override]
        self,
        states: Sequence[LinearizedState],
        features: Sequence[Tensor],
        token_ids: Sequence[Sequence[int]],
    ) -> Tensor:
        options, last = self.options, []
        for state, given, ids in zip(states, features, token_ids, strict=True):
            state.start()
            x = self.inputs(self._embed(ids), self.read(given))
            while len(x):  # group by group, so that reading a prompt is linear in its length
                size = min(len(x), options.group - state.length % options.group)
                rows = range(size)
                drafted = self._extend(
                    state, x[:size], [state.length + row for row in rows],
                    [list(range(row + 1)) for row in rows],
                )  # fmt: skip
                for memory in state.memories:
                    memory.absorb(options.group, options.taps)
                state.places, state.length, x = [], state.length + size, x[size:]
            state.feature[-1] = drafted[-1]
            last.append(drafted[-1])
        return self.logits(torch.stack(last))

    def expand(  # type: ignore[override]
        self, states: Sequence[LinearizedState], frontiers: Sequence[Frontier]
    ) -> Tensor:
        drafted = []
        for state, frontier in zip(states, frontiers, strict=True):
            if not frontier:
                continue
            first = len(state.places)
            for row, (node, _, parent) in enumerate(frontier, first):
                state.path[node] = [*state.path[parent], row]
            paths = [state.path[node] for node, _, _ in frontier]
            given = torch.stack([state.feature[parent] for _, _, parent in frontier])
            x = self.inputs(self._embed([token for _, token, _ in frontier]), given)
            places = [state.length + len(path) - 1 for path in paths]
            drafted.append(self._extend(state, x, places, paths))
            for (node, _, _), row in zip(frontier, drafted[-1], strict=True):
                state.feature[node] = row
        return self.logits(torch.cat(drafted))

    def _extend(
        self, state: LinearizedState, x: Tensor, places: list[int], paths: Sequence[list[int]]
    ) -> Tensor:
        """All layers on new rows of a session.  # [rows, hidden_size] -> the same"""
        state.places += places
        begin = state.length - state.length % self.options.group
        every = torch.tensor([*range(begin, state.length), *state.places], device=x.device)
        own = every[len(every) - len(places) :]
        # What lies behind the target's context is never accepted.
        cos_sin = self._cos_sin[own.clamp(max=len(self._cos_sin) - 1)]
        for layer, memory in zip(self.layers, state.memories, strict=True):
            assert isinstance(layer, LinearLayer)
            x = layer.extend(x, cos_sin, own, paths, every, memory)
        return x

    def _embed(self, token_ids: Sequence[int]) -> Tensor:
        return self.target.embed(torch.tensor(token_ids, device=self.target.embedding.device))
