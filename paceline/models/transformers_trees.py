"""Trees of tokens in models of ``transformers``, which compute chains.

How a draft with several branches is run depends on what the model can do, which is tried at load on
random tokens rather than looked up by the model's name:

``packed``
    One forward for the trees of all sequences: models that leave attention to the implementation
    that is asked for (:mod:`paceline.models.transformers_packed`).
``tree``
    One forward for each sequence's tree: explicit positions and a 4-D mask that lets a node see its
    ancestors only. Commit gathers the accepted entries.
``paths``
    Every root-to-leaf path runs as a chain after the committed tokens: ALiBi and other models that
    cannot take a mask from outside.
``chunks``, ``chains``, ``steps``
    Recurrent and hybrid models, whose state cannot be cut
    (:mod:`paceline.models.transformers_states`).
``recompute``
    No cache at all: every path runs from the first token. Right for any model that can forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch

from paceline.models.transformers_loading import quiet
from paceline.models.transformers_packed import AttentionBatch, PackedRows
from paceline.models.transformers_sequence import NewTokens, TransformersSequence, cache_layers
from paceline.models.transformers_taps import StateTaps
from paceline.tree import ancestor_mask, depths, is_chain, leaves, path_to
from paceline.types import IndexArray, Need

Strategy = Literal["packed", "tree", "paths", "chunks", "chains", "steps", "recompute"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


class ModelCalls:
    """Forwards of a model, with the arguments that it takes.

    Args:
        model: of ``transformers``, on ``device``.
        dtype: of its weights.

    Attributes:
        takes_positions: the model can be told where tokens are.
        takes_cache: it has KV entries.
        attention: the implementation of transformers that it attends with.
        taps: where its states are; None: it keeps them to itself.
        wants: states that rows have behind their logits.
        has_logits: whether rows with states have logits, too.
        row_size: numbers in a row.
    """

    def __init__(
        self, model: Any, dtype: torch.dtype, device: torch.device, vocab_size: int
    ) -> None:
        self.model, self.dtype, self.device, self.vocab_size = model, dtype, device, vocab_size
        parameters = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in parameters
        self.takes_cache = "past_key_values" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self.attention = self._attends_by = str(model.config._attn_implementation)
        self.taps: StateTaps | None = None
        with suppress(LookupError, AttributeError):
            if not model.config.is_encoder_decoder:
                self.taps = StateTaps(model)
        self.wants: frozenset[Need] = frozenset()
        self.has_logits = True

    def attend(self, implementation: str) -> None:
        """Choose how the model attends, where it leaves that open."""
        if implementation != self._attends_by:
            with quiet():
                self.model.set_attn_implementation(implementation)
            self._attends_by = implementation

    @property
    def row_size(self) -> int:
        logits = self.vocab_size if self.has_logits else 0
        return logits + (self.taps.width(self.wants) if self.taps and self.wants else 0)

    def __call__(
        self, ids: torch.Tensor, keep: int | torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, Any]:
        """Logits, and the outputs as the model returns them.

        Args:
            ids: # [num_rows, num_tokens] int64
            keep: how many of each row's last tokens have logits, or the indices of those that do.

        # [num_rows, num_kept, row_size]
        """
        if self._takes_logits_to_keep:
            options["logits_to_keep"] = keep if self.has_logits else 1
        taken = (
            nullcontext(list[torch.Tensor]()) if self.taps is None else self.taps.taken(self.wants)
        )
        with taken as states:
            outputs = self.model(input_ids=ids.to(self.device), **options)
        columns = [_kept(each, keep) for each in states]
        if self.has_logits:
            logits: torch.Tensor = outputs.logits
            columns.insert(0, logits if self._takes_logits_to_keep else _kept(logits, keep))
        return (columns[0] if len(columns) == 1 else torch.cat(columns, -1)), outputs


def _kept(rows: torch.Tensor, keep: int | torch.Tensor) -> torch.Tensor:
    """# [num_rows, num_tokens, any] -> [num_rows, num_kept, any]"""
    return rows[:, -keep:] if isinstance(keep, int) else rows[:, keep]


class Trees(Protocol):
    """Runs the trees of sequences by one of the strategies."""

    def run(self, news: Sequence[NewTokens]) -> list[torch.Tensor]:
        """The wanted rows of each. If this fails, some tokens may be cached already.

        # [num_wanted, row_size] each, as :class:`ModelCalls` has them
        """
        ...

    def keep(self, sequence: TransformersSequence, path: Sequence[int]) -> None:
        """Keep what is known of the committed tokens and the pending ones of ``path``."""
        ...


class PackedTrees:
    """Strategy ``packed``."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls
        self._rope = RopeRegimes(calls.model.config.get_text_config())

    def run(self, news: Sequence[NewTokens]) -> list[torch.Tensor]:
        """The wanted rows of each, from one forward.  # [num_wanted, row_size] each"""
        results = [torch.empty((0, self._calls.row_size), device=self._calls.device)] * len(news)
        groups: dict[Hashable, list[int]] = {}
        for number, new in enumerate(news):
            if new.count:
                groups.setdefault(self._rope.of(new.sequence, new.nodes), []).append(number)
        for numbers in groups.values():
            logits = self._run_together([news[number] for number in numbers])
            for number, one in zip(numbers, logits, strict=True):
                results[number] = one
        return results

    def _run_together(self, news: Sequence[NewTokens]) -> tuple[torch.Tensor, ...]:
        rows = [new.sequence.rows(new.sequence.length, new.nodes) for new in news]
        ids: list[int] = []
        keep: list[int] = []
        for new in news:
            keep += [len(ids) + node - new.first for node in new.wanted_nodes]
            ids += new.sequence.path_tokens(new.nodes)
        device = self._calls.device
        logits, _ = self._calls(
            torch.tensor([ids], dtype=torch.int64),
            torch.tensor(keep, dtype=torch.int64, device=device),
            **packed_inputs(rows, device),
        )
        return torch.split(logits[0], [len(new.wanted_nodes) for new in news])

    def keep(self, sequence: TransformersSequence, path: Sequence[int]) -> None:
        sequence.kv.keep(sequence.length, path)


def packed_inputs(rows: Sequence[PackedRows], device: torch.device) -> dict[str, Any]:
    """Arguments of a model's forward over tokens that lie behind one another in one row."""
    positions = np.concatenate([one.positions for one in rows])
    return {
        "position_ids": torch.from_numpy(positions)[None].to(device),
        # Without one, transformers would take jumps in the positions for borders of its own.
        "attention_mask": torch.ones((1, len(positions)), dtype=torch.int64, device=device),
        "use_cache": False,
        "packed": AttentionBatch(rows, device),
    }


class RopeRegimes:
    """Rotary frequencies that depend on the longest sequence of a forward.

    Those of LongRoPE change at the model's original context, dynamic ones with every token behind
    it. Sequences with other frequencies need a forward of their own.
    """

    def __init__(self, config: Any) -> None:
        parameters = getattr(config, "rope_parameters", None) or {}
        by_layer = [each for each in parameters.values() if isinstance(each, dict)]
        self._limits: list[tuple[int, bool]] = []
        for rope in by_layer or [parameters]:
            kind = rope.get("rope_type", "default")
            limit = rope.get("original_max_position_embeddings")
            if kind == "longrope" or kind.startswith("dynamic"):
                self._limits.append((limit or config.max_position_embeddings, kind != "longrope"))

    def of(self, sequence: TransformersSequence, nodes: Sequence[int]) -> Hashable:
        """Equal for sequences whose pending nodes may share a forward."""
        if not self._limits:
            return None
        length = sequence.length + int(depths(sequence.tree)[list(nodes)].max())
        return tuple(
            (length > limit, length if grows and length > limit else None)
            for limit, grows in self._limits
        )


class SingleTrees:
    """Strategies ``tree``, ``paths`` and ``recompute``: one sequence after the other."""

    def __init__(self, calls: ModelCalls, strategy: Strategy) -> None:
        self._calls, self._strategy = calls, strategy

    def run(self, news: Sequence[NewTokens]) -> list[torch.Tensor]:
        """The wanted rows of each.  # [num_wanted, row_size] each"""
        return [self._run(new) for new in news]

    def _run(self, new: NewTokens) -> torch.Tensor:
        sequence, first, tree = new.sequence, new.first, new.sequence.tree
        none = torch.empty((0, self._calls.row_size), device=self._calls.device)
        if not new.count:
            return none
        if self._strategy == "recompute":
            return self._run_from_scratch(new, tree) if new.wanted_nodes else none
        if is_chain(tree) and sequence.cached_pending == list(range(first)):
            keep = max(1, len(new.wanted_nodes))
            logits = self._run_cached(sequence, list(new.nodes), keep)
        elif self._strategy == "tree":
            logits = self._run_tree(sequence, tree, first)
        else:
            logits = self._run_paths(sequence, tree, first)
        return logits[len(logits) - len(new.wanted_nodes) :]

    def keep(self, sequence: TransformersSequence, path: Sequence[int]) -> None:
        """Make the cache hold the committed tokens and the pending ones of ``path``, no others."""
        if self._strategy == "tree":
            _gather(sequence.cache, sequence.length, list(path))
        elif self._strategy == "paths":
            self._run_path(sequence, list(path))  # what of it the cache lacks

    def _run_cached(
        self, sequence: TransformersSequence, nodes: list[int], keep: int
    ) -> torch.Tensor:
        """Run ``nodes`` as a chain after what is in the cache.  # [keep, vocab_size]"""
        if sequence.cache is None:
            sequence.cache = _new_cache()
        logits = self._call(sequence.path_tokens(nodes), sequence.cache, keep)
        sequence.cached_pending += nodes
        return logits

    def _run_tree(
        self, sequence: TransformersSequence, tree: IndexArray, first: int
    ) -> torch.Tensor:
        """Run the nodes from ``first`` on under a mask.  # [num_nodes - first, vocab_size]"""
        if sequence.cache is None:
            sequence.cache = _new_cache()
        count, dtype, device = len(tree) - first, self._calls.dtype, self._calls.device
        visible = torch.ones((count, sequence.length + len(tree)), dtype=torch.bool)
        visible[:, sequence.length :] = torch.from_numpy(ancestor_mask(tree)[first:])
        mask = torch.zeros(visible.shape, dtype=dtype)
        mask.masked_fill_(~visible, torch.finfo(dtype).min)
        positions = torch.from_numpy(depths(tree)[first:].astype(np.int64) - 1) + sequence.length
        logits = self._call(
            sequence.pending_ids[first:],
            sequence.cache,
            count,
            attention_mask=mask[None, None].to(device),  # [1, 1, num_queries, num_keys]
            position_ids=positions[None].to(device),
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
            return torch.empty((0, self._calls.row_size), device=self._calls.device)
        return self._run_cached(sequence, rest, len(rest))

    def _run_from_scratch(self, new: NewTokens, tree: IndexArray) -> torch.Tensor:
        """The wanted logits without a cache.  # [num_wanted, vocab_size]"""
        rows: dict[int, torch.Tensor] = {}
        for leaf in [len(tree) - 1] if len(new.wanted_nodes) == 1 else leaves(tree):
            path = path_to(tree, leaf)
            fresh = [node for node in path if node >= new.first and node not in rows]
            if not fresh:
                continue
            token_ids = new.sequence.token_ids + new.sequence.path_tokens(path)
            logits = self._run_whole(new.sequence, token_ids, len(fresh))
            rows.update(zip(fresh, logits, strict=True))
        return torch.stack([rows[node] for node in new.wanted_nodes])

    def _run_whole(
        self, sequence: TransformersSequence, token_ids: list[int], keep: int
    ) -> torch.Tensor:
        """Logits of the last ``keep`` of all tokens, without a cache.  # [keep, vocab_size]"""
        return self._call(token_ids, None, keep)

    def _call(
        self, token_ids: list[int], cache: Any, keep: int, **inputs: torch.Tensor
    ) -> torch.Tensor:
        """The model's forward: logits of the last ``keep`` tokens.  # [keep, vocab_size]"""
        options: dict[str, Any] = {**inputs, "use_cache": cache is not None}
        if cache is not None:
            options["past_key_values"] = cache
        return self._calls(torch.tensor([token_ids], dtype=torch.int64), keep, **options)[0][0]


def _new_cache() -> Any:
    # Without the model's config, so that a layer with a sliding window keeps every entry too:
    # one that has dropped some cannot go back. The model's own masks apply the window.
    from transformers import DynamicCache

    return DynamicCache()


def _gather(cache: Any, length: int, path: list[int]) -> None:
    """Keep ``length`` entries and, after them, the pending ones of ``path``."""
    if cache is None:
        return
    count = len(path)
    for layer in cache_layers(cache):
        for name in ("keys", "values"):
            entries = getattr(layer, name)  # [1, num_kv_heads, num_entries, head_dim]
            if path != list(range(count)):
                index = torch.tensor([length + node for node in path], device=entries.device)
                entries[:, :, length : length + count] = entries[:, :, index]
            setattr(layer, name, entries[:, :, : length + count])
