"""Recurrent and hybrid models of ``transformers``, whose state cannot be cut.

Every sequence keeps the state after its committed tokens, and every forward starts from a copy of
it. Tokens that a draft shares are in the state only once they are committed:

``chunks``
    Every root-to-leaf path is a row of one forward. Where a draft is accepted to its end, the state
    behind its last token stays; otherwise the accepted tokens run again, before the next forward.
``chains``
    The same, with a forward for each path: models that take one row at a time (RWKV).
``steps``
    Models that take one token at a time once they have a state: all nodes of one depth are rows of
    one forward, and every node keeps the state behind it. No token runs twice.

Attention layers of hybrid models have their KV entries outside of the state
(:mod:`paceline.models.transformers_packed`), so states are small.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin

from paceline.models.transformers_packed import AttentionBatch, PackedRows
from paceline.models.transformers_sequence import NewTokens, TransformersSequence
from paceline.models.transformers_trees import ModelCalls, Strategy
from paceline.tree import depths, is_chain, leaves, path_to

# Where the outputs of a model hold its state, and the argument that takes it back.
_STATE_NAMES = ("past_key_values", "cache_params", "state")


class StatesOnly:
    """Part of a cache: keys and values go on to the attention, which stores them."""

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Any, Any]:
        return key_states, value_states


class StateCache(StatesOnly, DynamicCache):
    """The states of a model."""


def _empty_cache(model: Any) -> Any:
    """A cache of states of the kind that a model takes: its own, if its module defines one."""
    module = sys.modules[type(model).__module__]
    for own in vars(module).values():
        if isinstance(own, type) and own.__module__ == module.__name__ and issubclass(own, Cache):
            return type(f"States{own.__name__}", (StatesOnly, own), {})()
    return StateCache(config=model.config)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A chain of tokens of one sequence that runs from a state.

    Attributes:
        before: the state before it; None at the start of the sequence. It is never changed.
        keep: how many logits are wanted, from its end.
    """

    token_ids: list[int]
    rows: PackedRows
    before: Any
    keep: int

    def token(self, index: int, before: Any) -> _Piece:
        """One of its tokens."""
        rows = PackedRows(
            self.rows.kv,
            self.rows.places[index : index + 1],
            self.rows.key_positions,
            self.rows.sees[index : index + 1],
        )
        return _Piece([self.token_ids[index]], rows, before, 1)


class StateTrees:
    """Strategies ``chunks``, ``chains`` and ``steps``."""

    def __init__(self, calls: ModelCalls, strategy: Strategy) -> None:
        self._calls = calls
        self._whole, self._together = strategy != "steps", strategy != "chains"

    def run(self, news: Sequence[NewTokens]) -> list[torch.Tensor]:
        """The wanted rows of each.  # [num_wanted, row_size] each"""
        found: list[dict[int, torch.Tensor]] = [{} for _ in news]
        self._catch_up([new.sequence for new in news if new.count])
        long = [_is_prompt(new) for new in news]
        self._run_prompts([each for each in zip(news, found, long, strict=True) if each[2]])
        drafts = [
            (new, rows)
            for new, rows, is_long in zip(news, found, long, strict=True)
            if new.count and not is_long
        ]
        if self._whole:
            self._run_paths(drafts)
        else:
            self._run_levels(drafts)
        none = torch.empty((0, self._calls.row_size), device=self._calls.device)
        return [
            torch.stack([rows[node] for node in new.wanted_nodes]) if new.wanted_nodes else none
            for new, rows in zip(news, found, strict=True)
        ]

    def keep(self, sequence: TransformersSequence, path: Sequence[int]) -> None:
        """Commit ``path``: its entries, and the last state that is known on it."""
        for index in reversed(range(len(path))):
            if path[index] in sequence.node_states:
                sequence.state = sequence.node_states[path[index]]
                sequence.state_length = sequence.length + index + 1
                break
        sequence.kv.keep(sequence.length, path)

    # --- what runs -----------------------------------------------------------------------------

    def _catch_up(self, sequences: Sequence[TransformersSequence]) -> None:
        """Bring states to the committed tokens."""
        behind = [each for each in sequences if each.state_length < each.length]
        pieces = [
            _Piece(each.token_ids[each.state_length :], each.rows(each.state_length), each.state, 0)
            for each in behind
        ]
        for sequence, (_, state) in zip(behind, self._advance(pieces), strict=True):
            sequence.state, sequence.state_length = state, sequence.length

    def _run_prompts(
        self, prompts: Sequence[tuple[NewTokens, dict[int, torch.Tensor], bool]]
    ) -> None:
        pieces = []
        for new, _, _ in prompts:
            path = path_to(new.sequence.tree, new.nodes[-1])
            nodes = _from_a_state(new.sequence, path, len(path) - new.count)
            pieces.append(self._piece(new.sequence, nodes, new))
        for (new, rows, _), (logits, state) in zip(prompts, self._advance(pieces), strict=True):
            new.sequence.node_states[new.nodes[-1]] = state
            wanted = new.wanted_nodes
            rows.update(zip(wanted, logits[len(logits) - len(wanted) :], strict=True))

    def _run_paths(self, drafts: Sequence[tuple[NewTokens, dict[int, torch.Tensor]]]) -> None:
        """All paths of drafts, in one forward (and one for those of new sequences)."""
        work: list[tuple[TransformersSequence, dict[int, torch.Tensor], list[int]]] = []
        for new, rows in drafts:
            tree, seen = new.sequence.tree, set(range(new.first))
            for leaf in leaves(tree):
                path = path_to(tree, leaf)
                start = next((i for i, node in enumerate(path) if node not in seen), None)
                if start is not None:
                    seen.update(path)
                    work.append((new.sequence, rows, _from_a_state(new.sequence, path, start)))
        for is_new in (True, False):
            group = [
                (each, self._piece(each[0], each[2]))
                for each in work
                if (self._before(each[0], each[2][0]) is None) == is_new
            ]
            results = self._forward([piece for _, piece in group])
            for ((sequence, rows, nodes), _), (logits, state) in zip(group, results, strict=True):
                rows.update(zip(nodes, logits, strict=True))
                if state is not None:
                    sequence.node_states[nodes[-1]] = state

    def _run_levels(self, drafts: Sequence[tuple[NewTokens, dict[int, torch.Tensor]]]) -> None:
        """All nodes of one depth in a forward, and then those of the next."""
        levels: dict[int, list[tuple[TransformersSequence, dict[int, torch.Tensor], int]]] = {}
        for new, rows in drafts:
            for node, depth in zip(new.nodes, depths(new.sequence.tree)[new.first :], strict=True):
                levels.setdefault(int(depth), []).append((new.sequence, rows, node))
        for _, level in sorted(levels.items()):
            self._find_states([(each[0], int(each[0].tree[each[2]])) for each in level])
            pieces = [self._piece(sequence, [node]) for sequence, _, node in level]
            for (sequence, rows, node), (logits, state) in zip(
                level, self._advance(pieces), strict=True
            ):
                rows[node], sequence.node_states[node] = logits[-1], state

    def _find_states(self, nodes: Sequence[tuple[TransformersSequence, int]]) -> None:
        """The states after pending nodes that are inside of a prompt that ran as one."""
        for sequence, node in nodes:
            if node >= 0 and node not in sequence.node_states:
                path = list(path_to(sequence.tree, node))
                piece = self._piece(sequence, path)
                sequence.node_states[node] = self._advance([piece])[0][1]

    # --- forwards ------------------------------------------------------------------------------

    def _before(self, sequence: TransformersSequence, node: int) -> Any:
        """The state before a node; None at the start of the sequence."""
        parent = int(sequence.tree[node])
        return sequence.state if parent < 0 else sequence.node_states[parent]

    def _piece(
        self, sequence: TransformersSequence, nodes: list[int], new: NewTokens | None = None
    ) -> _Piece:
        """A path of pending nodes as a piece; ``new`` says how many logits are wanted, not all."""
        return _Piece(
            sequence.path_tokens(nodes),
            sequence.rows(sequence.length, nodes),
            self._before(sequence, nodes[0]),
            len(nodes) if new is None else len(new.wanted_nodes),
        )

    def _advance(self, pieces: Sequence[_Piece]) -> list[tuple[torch.Tensor, Any]]:
        """Each piece's last logits, as many as it wants (or one), and the state behind it.

        # [max(keep, 1), row_size] each
        """
        results: dict[int, tuple[torch.Tensor, Any]] = {}
        groups: dict[tuple[bool, int | None], list[int]] = {}
        for number, piece in enumerate(pieces):
            whole = self._whole or piece.before is None
            length = len(piece.token_ids) if whole else None
            groups.setdefault((piece.before is None, length), []).append(number)
        for (_, length), numbers in groups.items():
            group = [pieces[number] for number in numbers]
            run = self._forward if length is not None else self._forward_by_token
            results.update(zip(numbers, run(group), strict=True))
        return [results[number] for number in range(len(pieces))]

    def _forward_by_token(self, pieces: Sequence[_Piece]) -> list[tuple[torch.Tensor, Any]]:
        logits: list[list[torch.Tensor]] = [[] for _ in pieces]
        states = [piece.before for piece in pieces]
        for index in range(max(len(piece.token_ids) for piece in pieces)):
            going = [n for n, piece in enumerate(pieces) if index < len(piece.token_ids)]
            tokens = [pieces[number].token(index, states[number]) for number in going]
            for number, (row, state) in zip(going, self._forward(tokens), strict=True):
                states[number] = state
                if index >= len(pieces[number].token_ids) - max(pieces[number].keep, 1):
                    logits[number].append(row)
        return [(torch.cat(rows), state) for rows, state in zip(logits, states, strict=True)]

    def _forward(self, pieces: Sequence[_Piece]) -> list[tuple[torch.Tensor, Any]]:
        """Pieces that all have a state before them or all have none, in one forward if possible.

        # [max(keep, 1), row_size] each
        """
        if self._together:
            return self._forward_rows(pieces) if pieces else []
        return [result for piece in pieces for result in self._forward_rows([piece])]

    def _forward_rows(self, pieces: Sequence[_Piece]) -> list[tuple[torch.Tensor, Any]]:
        """One forward.

        Shorter ones are filled up at the end, so they have no state behind them.

        # [max(keep, 1), row_size] each
        """
        calls, counts = self._calls, [len(piece.token_ids) for piece in pieces]
        width = max(counts)
        ids = np.zeros((len(pieces), width), np.int64)
        positions = np.zeros_like(ids)
        for row, piece in enumerate(pieces):
            ids[row, : counts[row]] = piece.token_ids
            positions[row] = piece.rows.positions[0] + np.minimum(np.arange(width), counts[row] - 1)
        options: dict[str, Any] = {"use_cache": True}
        if calls.takes_positions:
            options["position_ids"] = torch.from_numpy(positions).to(calls.device)
        if calls.takes_cache:
            rows = [piece.rows for piece in pieces]
            options["packed"] = AttentionBatch(rows, calls.device, side_by_side=True)
        name, before = self._joined([piece.before for piece in pieces])
        if before is not None:
            options[name] = before
        # At most all; a piece that wants fewer has the last ones of its tokens.
        keep = max(
            width - count + max(piece.keep, 1) for count, piece in zip(counts, pieces, strict=True)
        )
        logits, outputs = calls(torch.from_numpy(ids), keep, **options)
        name = next(name for name in _STATE_NAMES if getattr(outputs, name, None) is not None)
        after = getattr(outputs, name)
        results = []
        for row, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
            end = keep - (width - count)
            state = (name, _part(after, row)) if count == width else None
            results.append((logits[row, end - max(piece.keep, 1) : end], state))
        return results

    def _joined(self, befores: Sequence[Any]) -> tuple[str, Any]:
        """The argument for a state, and one state of all; None to begin without."""
        if befores[0] is not None:
            return befores[0][0], _join([state for _, state in befores])
        if self._calls.takes_cache:
            return "past_key_values", _empty_cache(self._calls.model)
        return "", None


def _from_a_state(sequence: TransformersSequence, path: Sequence[int], start: int) -> list[int]:
    """``path`` from ``start`` on, or from an earlier node if the state before it is not known."""
    while start > 0 and path[start - 1] not in sequence.node_states:
        start -= 1
    return list(path[start:])


def _is_prompt(new: NewTokens) -> bool:
    """A chain of which not all logits are wanted: only the state behind it matters."""
    first, tree = new.first, new.sequence.tree
    return new.count > 0 and new.wanted != "all" and is_chain(tree[first:] - first)


# --- states --------------------------------------------------------------------------------------


def _join(states: Sequence[Any]) -> Any:
    """One state with the rows of all, which stay as they are."""
    if isinstance(states[0], Cache):
        return _with_tensors(states, torch.cat)
    return [torch.cat(tensors) for tensors in zip(*states, strict=True)]


def _part(state: Any, row: int) -> Any:
    """One row of a state, as a state of its own."""
    if isinstance(state, Cache):
        return _with_tensors([state], lambda tensors: tensors[0][row : row + 1].clone())
    return [tensor[row : row + 1].clone() for tensor in state]


def _with_tensors(caches: Sequence[Any], make: Any) -> Any:
    """A cache like the first one whose tensors are made of those of all."""
    made = copy.copy(caches[0])
    if hasattr(made, "linear_cache"):  # MiniMax: a tensor or [] by layer
        by_layer = zip(*(cache.linear_cache for cache in caches), strict=True)
        made.linear_cache = [make(list(each)) if len(each[0]) else [] for each in by_layer]
    made.layers = []
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        layer = copy.copy(layers[0])
        if getattr(layer, "keys", None) is not None:
            raise TypeError(f"{type(made).__name__} holds keys, which is not a state")
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for name, value in vars(layer).items():
                if isinstance(value, dict):
                    setattr(layer, name, dict(value))
            for name in ("conv_states", "recurrent_states"):
                states = [getattr(each, name) for each in layers]
                made_of = {
                    key: None if value is None else make([state[key] for state in states])
                    for key, value in states[0].items()
                }
                setattr(layer, name, made_of)
        made.layers.append(layer)
    return made
