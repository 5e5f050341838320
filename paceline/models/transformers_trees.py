"""Trees of tokens in models of ``transformers``, which compute chains.

Every sequence has its own cache with its committed tokens, followed by pending ones. How a draft
with several branches is run depends on what the model can do, which is tried at load on random
tokens rather than looked up by the model's name:

``tree``
    One forward for the whole tree: explicit positions and a 4-D mask that lets a node see its
    ancestors only. Commit gathers the accepted entries.
``paths``
    Every root-to-leaf path runs as a chain after the committed tokens: sliding windows, ALiBi and
    other models that cannot take a mask from outside.
``states``
    Recurrent and hybrid models, whose state cannot be cut: every node keeps a copy of the state
    after it, which is its parent's and one step. No token is computed twice, and a token's logits
    do not depend on the draft around it; but every node of a draft takes a forward of its own.
``recompute``
    No cache at all: every path runs from the first token. Right for any model that can forward.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

from paceline.tree import ancestor_mask, depths, is_chain, leaves, path_to
from paceline.types import IndexArray

Strategy = Literal["tree", "paths", "states", "recompute"]
Wanted = Literal["all", "last", "none"]

# Where the outputs of a model hold its state, and the argument that takes it back.
_STATE_NAMES = ("past_key_values", "cache_params", "state")


class TransformersSequence:
    """Token ids and cache of one session. The cache holds ``token_ids`` and then some pending."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []  # committed
        self.pending_ids: list[int] = []
        self.pending_parents: list[int] = []
        self.cache: Any = None  # transformers.DynamicCache, or None before the first forward
        # Pending nodes whose entries follow the committed ones in the cache, in this order.
        self.cached_pending: list[int] = []
        # Under ``states``: the state after the committed tokens (None: unknown, if there are any)
        # and after each pending node.
        self.state: Any = None
        self.node_states: dict[int, Any] = {}
        self.closed = False

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return len(self.token_ids)

    @property
    def num_pending(self) -> int:
        return len(self.pending_ids)

    def path_tokens(self, nodes: Sequence[int]) -> list[int]:
        return [self.pending_ids[node] for node in nodes]

    def drop_pending(self) -> None:
        self.pending_ids.clear()
        self.pending_parents.clear()
        self.cached_pending.clear()
        self.node_states.clear()

    def crop(self, length: int) -> None:
        """Cut the cache to its first ``length`` entries."""
        if self.cache is None:
            return
        for layer in _cache_layers(self.cache):
            layer.keys = layer.keys[:, :, :length]
            layer.values = layer.values[:, :, :length]


class ModelTrees:
    """Runs a model over the trees of sequences, one at a time.

    Args:
        model: of ``transformers``, on ``device``.
        dtype: of its weights.

    Attributes:
        strategy: how; see the module.
        takes_positions: the model can be told where tokens are.
    """

    def __init__(
        self, model: Any, dtype: torch.dtype, device: torch.device, vocab_size: int
    ) -> None:
        self.strategy: Strategy = "recompute"
        self._model, self._dtype, self._device, self._vocab_size = model, dtype, device, vocab_size
        parameters = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters

    def run(
        self, sequence: TransformersSequence, first: int, wanted: Wanted
    ) -> torch.Tensor | None:
        """Compute the pending tokens from ``first`` on; the logits asked for, or None.

        If this fails, the cache may hold some of these tokens.

        # [num_new or 1, vocab_size]
        """
        tree, count = np.asarray(sequence.pending_parents, np.int32), sequence.num_pending - first
        if self.strategy == "states":
            logits = self._run_states(sequence, tree, first, wanted)
        elif self.strategy == "recompute":
            if wanted == "none":
                return None
            logits = self._run_from_scratch(sequence, tree, first, wanted)
        elif is_chain(tree) and sequence.cached_pending == list(range(first)):
            keep = count if wanted == "all" else 1
            logits = self._run_cached(sequence, list(range(first, first + count)), keep)
        elif self.strategy == "tree":
            logits = self._run_tree(sequence, tree, first)
        else:
            logits = self._run_paths(sequence, tree, first)
        if wanted == "none":
            return None
        return logits[-1:] if wanted == "last" else logits

    def keep(self, sequence: TransformersSequence, path: list[int]) -> None:
        """Make the cache hold the committed tokens and the pending ones of ``path``, no others."""
        if self.strategy == "tree":
            _gather(sequence.cache, sequence.length, path)
        elif self.strategy == "paths":
            self._run_path(sequence, path)  # what of it the cache lacks
        elif self.strategy == "states" and path:
            sequence.state = sequence.node_states.get(path[-1])

    def _run_cached(
        self, sequence: TransformersSequence, nodes: list[int], keep: int
    ) -> torch.Tensor:
        """Run ``nodes`` as a chain after what is in the cache.  # [keep, vocab_size]"""
        if sequence.cache is None:
            sequence.cache = self._new_cache()
        logits = self._call(sequence.path_tokens(nodes), sequence.cache, keep)
        sequence.cached_pending += nodes
        return logits

    def _run_tree(
        self, sequence: TransformersSequence, tree: IndexArray, first: int
    ) -> torch.Tensor:
        """Run the nodes from ``first`` on under a mask.  # [num_nodes - first, vocab_size]"""
        if sequence.cache is None:
            sequence.cache = self._new_cache()
        count = len(tree) - first
        visible = torch.ones((count, sequence.length + len(tree)), dtype=torch.bool)
        visible[:, sequence.length :] = torch.from_numpy(ancestor_mask(tree)[first:])
        mask = torch.zeros(visible.shape, dtype=self._dtype)
        mask.masked_fill_(~visible, torch.finfo(self._dtype).min)
        positions = torch.from_numpy(depths(tree)[first:].astype(np.int64) - 1) + sequence.length
        logits = self._call(
            sequence.pending_ids[first:],
            sequence.cache,
            count,
            attention_mask=mask[None, None].to(self._device),  # [1, 1, num_queries, num_keys]
            position_ids=positions[None].to(self._device),
        )
        sequence.cached_pending += range(first, len(tree))
        return logits

    def _run_paths(
        self, sequence: TransformersSequence, tree: IndexArray, first: int
    ) -> torch.Tensor:
        """Run every path that has new nodes as a chain.  # [num_nodes - first, vocab_size]"""
        rows: dict[int, torch.Tensor] = {}
        for leaf in leaves(tree):
            if leaf < first:
                continue
            path = list(path_to(tree, leaf))
            fresh = [node for node in path if node >= first and node not in rows]
            # The last run must include every node whose logits are missing.
            logits = self._run_path(sequence, path, start=path.index(fresh[0]))
            rows.update(zip(fresh, logits[len(logits) - len(fresh) :], strict=True))
        return torch.stack([rows[node] for node in range(first, len(tree))])

    def _run_path(
        self, sequence: TransformersSequence, path: list[int], start: int | None = None
    ) -> torch.Tensor:
        """Make the cache hold exactly the committed tokens and ``path``.

        Runs the part of ``path`` that is not cached, and at least what lies from index ``start``
        on; returns the logits of the tokens that ran.  # [num_run, vocab_size]
        """
        shared = 0
        for ours, theirs in zip(path, sequence.cached_pending, strict=False):
            if ours != theirs:
                break
            shared += 1
        if start is not None:
            shared = min(shared, start)
        sequence.crop(sequence.length + shared)
        sequence.cached_pending = path[:shared]
        rest = path[shared:]
        if not rest:
            return torch.empty((0, self._vocab_size), device=self._device)
        return self._run_cached(sequence, rest, len(rest))

    def _run_states(
        self, sequence: TransformersSequence, tree: IndexArray, first: int, wanted: Wanted
    ) -> torch.Tensor:
        """Run every new node as a step from its parent's state.  # [num_new or 1, vocab_size]"""
        last = len(tree) - 1
        if wanted != "all" and not sequence.token_ids and first == 0 and is_chain(tree):
            logits, sequence.node_states[last] = self._step(sequence.pending_ids, None)  # a prompt
            return logits
        if sequence.state is None and sequence.token_ids:
            _, sequence.state = self._step(sequence.token_ids, None)
        rows = []
        for node in range(first, len(tree)):
            parent = int(tree[node])
            if (
                parent >= 0 and parent not in sequence.node_states
            ):  # inside a prompt that ran as one
                tokens = sequence.token_ids + sequence.path_tokens(list(path_to(tree, parent)))
                _, sequence.node_states[parent] = self._step(tokens, None)
            before = sequence.state if parent < 0 else sequence.node_states[parent]
            logits, sequence.node_states[node] = self._step([sequence.pending_ids[node]], before)
            rows.append(logits)
        return torch.cat(rows)

    def _step(self, token_ids: list[int], before: Any) -> tuple[torch.Tensor, Any]:
        """Logits of the last token, and the state after it; ``before`` stays as it is.

        # [1, vocab_size]
        """
        options: dict[str, Any] = {"use_cache": True}
        if self._takes_logits_to_keep:
            options["logits_to_keep"] = 1
        if before is not None:
            options[before[0]] = copy.deepcopy(before[1])
        ids = torch.tensor([token_ids], dtype=torch.int64, device=self._device)
        outputs = self._model(input_ids=ids, **options)
        name = next(name for name in _STATE_NAMES if getattr(outputs, name, None) is not None)
        return outputs.logits[0, -1:], (name, getattr(outputs, name))

    def _run_from_scratch(
        self,
        sequence: TransformersSequence,
        tree: IndexArray,
        first: int,
        wanted: Wanted,
    ) -> torch.Tensor:
        """Logits of the nodes from ``first`` on without a cache.  # [num_nodes - first, vocab]"""
        rows: dict[int, torch.Tensor] = {}
        for leaf in [len(tree) - 1] if wanted == "last" else leaves(tree):
            path = path_to(tree, leaf)
            fresh = [node for node in path if node >= first and node not in rows]
            if not fresh:
                continue
            token_ids = sequence.token_ids + sequence.path_tokens(path)
            logits = self._run_whole(sequence, token_ids, len(fresh))
            rows.update(zip(fresh, logits, strict=True))
        if wanted == "last":
            return rows[len(tree) - 1][None]
        return torch.stack([rows[node] for node in range(first, len(tree))])

    def _run_whole(
        self, sequence: TransformersSequence, token_ids: list[int], keep: int
    ) -> torch.Tensor:
        """Logits of the last ``keep`` of all tokens, without a cache.  # [keep, vocab_size]"""
        return self._call(token_ids, None, keep)

    def _call(
        self, token_ids: list[int], cache: Any, keep: int, **inputs: torch.Tensor
    ) -> torch.Tensor:
        """The model's forward: logits of the last ``keep`` tokens.  # [keep, vocab_size]"""
        options: dict[str, Any] = dict(inputs)
        if self._takes_logits_to_keep:
            options["logits_to_keep"] = keep
        if cache is None:
            options["use_cache"] = False
        else:
            options["past_key_values"] = cache
            options["use_cache"] = True
        ids = torch.tensor([token_ids], dtype=torch.int64, device=self._device)
        logits: torch.Tensor = self._model(input_ids=ids, **options).logits
        return logits[0, -keep:]

    def _new_cache(self) -> Any:
        # Without the model's config, so that a layer with a sliding window keeps every entry too:
        # one that has dropped some cannot go back. The model's own masks apply the window.
        from transformers import DynamicCache

        return DynamicCache()


def _cache_layers(cache: Any) -> Iterator[Any]:
    """Layers with entries to cut; raises TypeError for a kind that cannot be cut."""
    from transformers.cache_utils import DynamicLayer

    for layer in cache.layers:
        if type(layer) is not DynamicLayer:
            raise TypeError(f"{type(layer).__name__} cannot be cut")
        if layer.get_seq_length() > 0:
            yield layer


def _gather(cache: Any, length: int, path: list[int]) -> None:
    """Keep ``length`` entries and, after them, the pending ones of ``path``."""
    if cache is None:
        return
    count = len(path)
    for layer in _cache_layers(cache):
        for name in ("keys", "values"):
            entries = getattr(layer, name)  # [1, num_kv_heads, num_entries, head_dim]
            if path != list(range(count)):
                index = torch.tensor([length + node for node in path], device=entries.device)
                entries[:, :, length : length + count] = entries[:, :, index]
            setattr(layer, name, entries[:, :, : length + count])
