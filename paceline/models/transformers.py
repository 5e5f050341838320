"""The general path: any causal language model of ``transformers``, from a local folder.

Every sequence has its own cache with its committed tokens, followed by pending ones. How a draft
with several branches is run depends on what the model can do, which is tried at load on random
tokens rather than looked up by the model's name:

``tree``
    One forward for the whole tree: explicit positions and a 4-D mask that lets a node see its
    ancestors only. Commit gathers the accepted entries.
``paths``
    Every root-to-leaf path runs as a chain after the committed tokens: sliding windows, ALiBi and
    other models that cannot take a mask from outside.
``recompute``
    No cache at all: every path runs from the first token. Right for any model that can forward,
    for example state-space models, whose state cannot be rolled back.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from paceline.errors import InvalidArgument, ResourceExhausted
from paceline.models import kernels
from paceline.models.base import ForwardResult, KVSequence, Segment
from paceline.models.transformers_loading import load_causal_lm
from paceline.numerics import Fingerprint, digest_tensors, torch_class
from paceline.tree import ancestor_mask, depths, is_chain, leaves, path_to
from paceline.types import IndexArray, IntArray, Need

Strategy = Literal["tree", "paths", "recompute"]

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# Logits of one token computed in two ways may differ by rounding; a wrong mask or position changes
# them altogether. Root mean square of the difference over that of the (centred) logits.
_SELF_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.03}

_MAX_DEFAULT_KV_TOKENS = 65_536


class TransformersSequence:
    """Token ids and cache of one session. The cache holds ``token_ids`` and then some pending."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []  # committed
        self.pending_ids: list[int] = []
        self.pending_parents: list[int] = []
        self.cache: Any = None  # transformers.DynamicCache, or None before the first forward
        # Pending nodes whose entries follow the committed ones in the cache, in this order.
        self.cached_pending: list[int] = []
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


class TransformersRunner:
    """:class:`paceline.models.base.ModelRunner` over ``AutoModelForCausalLM``.

    Sequences run one after the other, so a token's logits do not depend on its batch mates, but
    they do depend, by rounding, on how many tokens of its own sequence are computed beside it:
    ``batch_invariant`` is False.

    Args:
        path: a Hugging Face folder with config.json and weights; nothing is ever downloaded and
            no code from the folder is run.
        dtype: "float32", "bfloat16" or "float16", or the torch.dtype of that name.
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
        batch_invariant: None or False; True is refused.
        kv_tokens: tokens that all sequences together may hold; default 16 full contexts, at most
            65,536 unless one context is longer.
        strategy: how to run trees; None finds the fastest one that gives right logits.

    Raises:
        ModelNotFound: the folder, its config or its weights are missing, damaged or incomplete.
        InvalidArgument: one of the options, or what the folder holds (:func:`load_causal_lm`).
    """

    batch_invariant = False
    provides = frozenset({Need.TREE_LOGITS})
    _auto_class = "AutoModelForCausalLM"

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device = "auto",
        batch_invariant: bool | None = None,
        kv_tokens: int | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        if dtype not in _DTYPES and dtype not in _DTYPES.values():
            raise InvalidArgument("dtype", dtype, f"one of {', '.join(_DTYPES)}")
        if batch_invariant:
            raise InvalidArgument(
                "batch_invariant",
                True,
                "False for models on the general path; the fast path (Llama, Mistral, Qwen2 and "
                "Qwen3 checkpoints) has the batch-invariant mode",
            )
        if strategy not in (None, "tree", "paths", "recompute"):
            raise InvalidArgument("strategy", strategy, "one of tree, paths, recompute")
        self.device = _resolve_device(str(device))
        self.dtype = _DTYPES[dtype] if isinstance(dtype, str) else dtype
        model = load_causal_lm(Path(path), self.dtype, self._auto_class)
        self.model = model.to(self.device).eval()
        config = self.model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.context_length = _context_length(config)
        self.kv_capacity = _kv_capacity(kv_tokens, self.context_length)
        parameters = inspect.signature(self.model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._used = 0
        self.strategy: Strategy = strategy or "recompute"
        if strategy is None:
            self.strategy = self._find_strategy(has_window=_has_window(config, self.context_length))

    # --- ModelRunner ---------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """See :class:`paceline.models.base.ModelRunner`."""
        import transformers

        config = self.model.config.to_dict()
        for where in ("_name_or_path", "transformers_version"):
            config.pop(where, None)
        numbers = {"config": json.dumps(config, sort_keys=True, default=str)}
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return Fingerprint(
            numerics_class=torch_class(
                self.device, f"transformers-{transformers.__version__}", self.strategy
            ),
            dtype=str(self.dtype).removeprefix("torch."),
            kernel_version=kernels.NUMERICS_VERSION,
            weights=digest_tensors(sorted(tensors.items()), numbers),
        )

    @property
    def num_free(self) -> int:
        """Number of tokens that still fit."""
        return self.kv_capacity - self._used

    def new_sequence(self) -> TransformersSequence:
        return TransformersSequence()

    def free(self, sequence: KVSequence) -> None:
        """Release all entries; freeing twice is harmless."""
        own = _own(sequence)
        if not own.closed:
            self._used -= own.length + own.num_pending
            own.closed = True
            own.cache = None
            own.token_ids.clear()
            own.drop_pending()

    def forward(
        self, segments: Sequence[Segment], wants: frozenset[Need] = frozenset()
    ) -> ForwardResult:
        """Append every token as a pending entry of its sequence and return the logits asked for.

        Raises:
            InvalidArgument: ``wants`` names something that the general path does not compute, a
                sequence appears twice, a token is outside the vocabulary, or a sequence would
                outgrow the context.
            ResourceExhausted: more tokens than ``num_free``.
        """
        unknown = wants - self.provides
        if unknown:
            raise InvalidArgument(
                "wants",
                sorted(need.value for need in unknown),
                "at most tree_logits on the general path; the fast path also has hidden states",
            )
        total = sum(len(segment.token_ids) for segment in segments)
        if total > self.num_free:
            raise ResourceExhausted(
                f"a forward of {total} tokens needs {total} free KV entries, {self.num_free} of "
                f"{self.kv_capacity} are free"
            )
        if len({id(segment.sequence) for segment in segments}) < len(segments):
            raise InvalidArgument("segments", "a sequence twice", "one segment for each sequence")
        checked = [self._checked(segment) for segment in segments]
        rows: list[torch.Tensor] = []
        offsets, ends = [0], [0]
        with torch.inference_mode():
            for segment, (sequence, parents) in zip(segments, checked, strict=True):
                logits = self._forward_segment(sequence, segment, parents)
                if logits is not None:
                    rows.append(logits.float())
                offsets.append(offsets[-1] + (0 if logits is None else len(logits)))
                ends.append(ends[-1] + len(parents))
            packed = (
                torch.cat(rows)
                if rows
                else torch.empty((0, self.vocab_size), dtype=torch.float32, device=self.device)
            )
        return ForwardResult(packed, tuple(offsets), {}, tuple(ends))

    def commit(self, sequence: KVSequence, pending: Sequence[int]) -> None:
        """Make a path of pending entries part of the prefix and free the other pending ones."""
        own = _own(sequence)
        path = [int(node) for node in pending]
        parents = [-1, *path][: len(path)]
        if any(not 0 <= node < own.num_pending for node in path) or parents != [
            own.pending_parents[node] for node in path
        ]:
            raise InvalidArgument(
                "pending",
                path,
                f"a path from the root down through the {own.num_pending} pending entries",
            )
        tokens = own.path_tokens(path)
        with torch.inference_mode():
            if self.strategy == "tree":
                _gather(own.cache, own.length, path)
            elif self.strategy == "paths":
                # Run the part of this path that the cache lacks again.
                self._run_path(own, path)
        self._used -= own.num_pending - len(path)
        own.token_ids += tokens
        own.drop_pending()

    def truncate(self, sequence: KVSequence, length: int) -> None:
        """Drop committed entries from ``length`` on, and all pending ones."""
        own = _own(sequence)
        if not 0 <= length <= own.length:
            raise InvalidArgument("length", length, f"an integer in [0, {own.length}]")
        self._used -= own.length - length + own.num_pending
        del own.token_ids[length:]
        own.drop_pending()
        _crop(own.cache, length)

    # --- one segment ---------------------------------------------------------------------------

    def _checked(self, segment: Segment) -> tuple[TransformersSequence, list[int]]:
        """The sequence, and the parent of every new token among its pending entries."""
        sequence = _own(segment.sequence)
        if sequence.closed:
            raise InvalidArgument("sequence", "freed", "a sequence that is in use")
        count, first = len(segment.token_ids), sequence.num_pending
        ids = segment.token_ids
        if count and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
            bad = int(next(t for t in ids if not 0 <= t < self.vocab_size))
            raise InvalidArgument("token_ids", bad, f"token ids in [0, {self.vocab_size})")
        if segment.parent_indices is None:
            parents = list(range(first - 1, first + count - 1))
        else:
            parents = [int(parent) for parent in segment.parent_indices]
            for index, parent in enumerate(parents):
                if not -1 <= parent < first + index:
                    raise InvalidArgument(
                        f"parent_indices[{index}]", parent, f"-1 or below {first + index}"
                    )
            if len(parents) != count:
                raise InvalidArgument("parent_indices", len(parents), f"{count} entries")
        deepest = int(
            depths(np.asarray(sequence.pending_parents + parents, np.int32)).max(initial=0)
        )
        if sequence.length + deepest > self.context_length:
            raise InvalidArgument(
                "token_ids",
                sequence.length + deepest,
                f"at most {self.context_length} tokens in a sequence (the model's context)",
            )
        return sequence, parents

    def _forward_segment(
        self, sequence: TransformersSequence, segment: Segment, parents: list[int]
    ) -> torch.Tensor | None:
        """Logits of the selected rows; None if no row is selected.  # [num_rows, vocab_size]"""
        count, first = len(parents), sequence.num_pending
        if count == 0:
            return None
        sequence.pending_ids += [int(token) for token in segment.token_ids]
        sequence.pending_parents += parents
        self._used += count
        try:
            tree = np.asarray(sequence.pending_parents, np.int32)
            if self.strategy == "recompute":
                if segment.logits == "none":
                    return None
                logits = self._run_from_scratch(sequence, tree, first, segment.logits)
            elif is_chain(tree) and sequence.cached_pending == list(range(first)):
                keep = count if segment.logits == "all" else 1
                logits = self._run_cached(sequence, list(range(first, first + count)), keep)
            elif self.strategy == "tree":
                logits = self._run_tree(sequence, tree, first)
            else:
                logits = self._run_paths(sequence, tree, first)
        except BaseException:
            # A failed forward must leave no trace: cut off what it may have cached.
            del sequence.pending_ids[first:], sequence.pending_parents[first:]
            self._used -= count
            known = sequence.cached_pending
            known[:] = list(itertools.takewhile(lambda node: node < first, known))
            _crop(sequence.cache, sequence.length + len(known))
            raise
        if segment.logits == "none":
            return None
        return logits[-1:] if segment.logits == "last" else logits

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
        mask = torch.zeros(visible.shape, dtype=self.dtype)
        mask.masked_fill_(~visible, torch.finfo(self.dtype).min)
        positions = torch.from_numpy(depths(tree)[first:].astype(np.int64) - 1) + sequence.length
        logits = self._call(
            sequence.pending_ids[first:],
            sequence.cache,
            count,
            attention_mask=mask[None, None].to(self.device),  # [1, 1, num_queries, num_keys]
            position_ids=positions[None].to(self.device),
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
        _crop(sequence.cache, sequence.length + shared)
        sequence.cached_pending = path[:shared]
        rest = path[shared:]
        if not rest:
            return torch.empty((0, self.vocab_size), device=self.device)
        return self._run_cached(sequence, rest, len(rest))

    def _run_from_scratch(
        self,
        sequence: TransformersSequence,
        tree: IndexArray,
        first: int,
        wanted: Literal["all", "last", "none"],
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
        ids = torch.tensor([token_ids], dtype=torch.int64, device=self.device)
        logits: torch.Tensor = self.model(input_ids=ids, **options).logits
        return logits[0, -keep:]

    def _new_cache(self) -> Any:
        # Without the model's config, so that a layer with a sliding window keeps every entry too:
        # one that has dropped some cannot go back. The model's own masks apply the window.
        from transformers import DynamicCache

        return DynamicCache()

    # --- self-check ----------------------------------------------------------------------------

    def _find_strategy(self, *, has_window: bool) -> Strategy:
        """The first strategy whose logits agree with runs of each path from scratch.

        Raises:
            InvalidArgument: the logits overflow in this dtype.
        """
        # A short check would not detect a window, so rule out trees with a mask from outside.
        candidates: list[Strategy] = [] if has_window or not self._takes_positions else ["tree"]
        generator = np.random.default_rng(0)
        length = min(12, self.context_length - 4)
        tokens = generator.integers(0, self.vocab_size, length + 11).astype(np.int64)
        reference = self._check_logits("recompute", tokens, length)
        if not bool(torch.isfinite(reference).all()):
            raise InvalidArgument(
                "dtype",
                str(self.dtype).removeprefix("torch."),
                "a dtype in which this model's logits are finite (try float32 or bfloat16)",
            )
        spread = (reference - reference.mean(-1, keepdim=True)).square().mean().sqrt()
        tolerance = _SELF_CHECK_TOLERANCE[self.dtype]
        for strategy in (*candidates, "paths"):
            try:
                logits = self._check_logits(strategy, tokens, length)
            # Each model fails in its own way at a strategy that it lacks. Such a failure is no
            # error here, because the last strategy needs only a plain forward.
            except Exception:
                continue
            error = (logits - reference).square().mean(-1).max().sqrt()
            if bool(error <= tolerance * spread):
                return strategy
        return "recompute"

    def _check_logits(self, strategy: Strategy, tokens: IntArray, length: int) -> torch.Tensor:
        """Logits of two trees with a commit between them, under ``strategy``.  # [11, vocab]"""
        self.strategy = strategy
        sequence = self.new_sequence()
        try:
            prompt, first, second = tokens[:length], tokens[length:-4], tokens[-4:]
            self.forward([Segment(sequence, prompt, logits="none")])
            self.commit(sequence, range(length))
            tree = np.array([-1, -1, 0, 1, 0, 2, 2], np.int32)
            rows = [self.forward([Segment(sequence, first, tree)]).logits]
            self.commit(sequence, (0, 4))
            rows.append(
                self.forward([Segment(sequence, second[:2], np.array([-1, -1], np.int32))]).logits
            )
            # Nodes added to a tree that is pending already, as an expanding drafter does.
            rows.append(
                self.forward([Segment(sequence, second[2:], np.array([0, 1], np.int32))]).logits
            )
            return torch.cat(rows)
        finally:
            self.free(sequence)


# --- cache entries -------------------------------------------------------------------------------


def _cache_layers(cache: Any) -> Iterator[Any]:
    """Layers with entries to cut; raises TypeError for a kind that cannot be cut."""
    from transformers.cache_utils import DynamicLayer

    for layer in cache.layers:
        if type(layer) is not DynamicLayer:
            raise TypeError(f"{type(layer).__name__} cannot be cut")
        if layer.get_seq_length() > 0:
            yield layer


def _crop(cache: Any, length: int) -> None:
    if cache is None:
        return
    for layer in _cache_layers(cache):
        layer.keys = layer.keys[:, :, :length]
        layer.values = layer.values[:, :, :length]


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


def _own(sequence: KVSequence) -> TransformersSequence:
    if not isinstance(sequence, TransformersSequence):
        raise InvalidArgument(
            "sequence", type(sequence).__name__, "a sequence of this runner's new_sequence()"
        )
    return sequence


# --- loading -------------------------------------------------------------------------------------


def _resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise InvalidArgument("device", device, "auto, cpu, cuda or cuda:N") from None
    if resolved.type == "cuda":
        count = torch.cuda.device_count()
        if int(device.partition(":")[2] or 0) >= count:
            raise InvalidArgument("device", device, f"a CUDA device below {count} (or cpu)")
    elif resolved.type != "cpu":
        raise InvalidArgument("device", device, "auto, cpu, cuda or cuda:N")
    return resolved


def _context_length(config: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 2048  # models without positions (ALiBi, recurrent) name no limit


def _has_window(config: Any, context_length: int) -> bool:
    """True when some layer attends to less than the whole context."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return any(kind != "full_attention" for kind in layer_types)
    window = getattr(config, "sliding_window", None)
    return isinstance(window, int) and 0 < window < context_length


def _kv_capacity(kv_tokens: Any, context_length: int) -> int:
    if kv_tokens is None:
        return max(context_length, min(16 * context_length, _MAX_DEFAULT_KV_TOKENS))
    if not isinstance(kv_tokens, int) or isinstance(kv_tokens, bool) or kv_tokens < 1:
        raise InvalidArgument("kv_tokens", kv_tokens, "an integer >= 1")
    return kv_tokens
