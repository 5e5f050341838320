"""The general path: any causal language model of ``transformers``, from a local folder.

:mod:`paceline.models.transformers_trees` computes the trees of its sequences, all of them in one
forward where the model can do that. What it can do is tried at load on random tokens rather than
looked up by the model's name (:mod:`paceline.models.transformers_check`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.errors import InvalidArgument, ResourceExhausted
from paceline.models import kernels
from paceline.models.base import ForwardResult, KVSequence, Segment
from paceline.models.layouts import read_config
from paceline.models.transformers_check import (
    exits_fail,
    find_strategy,
    has_states,
    make_trees,
    why_no_exits,
)
from paceline.models.transformers_layers import ChosenLayers, chosen_rows
from paceline.models.transformers_loading import load_causal_lm
from paceline.models.transformers_sequence import NewTokens, TransformersSequence
from paceline.models.transformers_taps import OutputLayer
from paceline.models.transformers_trees import STRATEGIES, ModelCalls, Strategy, Trees
from paceline.numerics import Fingerprint, digest_tensors, torch_class
from paceline.tree import depths
from paceline.types import STATES, Need

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


_MAX_DEFAULT_KV_TOKENS = 65_536


class TransformersRunner:
    """:class:`paceline.models.base.ModelRunner` over ``AutoModelForCausalLM``.

    A token's logits depend, by rounding, on how many tokens are computed beside it:
    ``batch_invariant`` is False. Forwards give states for draft heads where the model's layers and
    its output layer are found and prove to be what they seem (:func:`has_states`).

    Args:
        path: a Hugging Face folder with config.json and weights; nothing is ever downloaded and
            no code from the folder is run.
        dtype: "float32", "bfloat16" or "float16", or the torch.dtype of that name.
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
        batch_invariant: None or False; True is refused.
        kv_tokens: tokens that all sequences together may hold; default 16 full contexts, at most
            65,536 unless one context is longer.
        strategy: how to run trees; None finds the fastest one that gives right logits.

    Attributes:
        why_no_exits: why some layers cannot run without the others; empty if they can.

    Raises:
        ModelNotFound: the folder, its config or its weights are missing, damaged or incomplete.
        InvalidArgument: one of the options, or what the folder holds (:func:`load_causal_lm`).
    """

    batch_invariant = False
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
        if strategy is not None and strategy not in STRATEGIES:
            raise InvalidArgument("strategy", strategy, f"one of {', '.join(STRATEGIES)}")
        self.device = _resolve_device(str(device))
        self.dtype = _DTYPES[dtype] if isinstance(dtype, str) else dtype
        model = load_causal_lm(Path(path), self.dtype, self._auto_class)
        self.model = model.to(self.device).eval()
        config = self.model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.context_length = _context_length(config)
        self.kv_capacity = _kv_capacity(kv_tokens, self.context_length)
        self._used = 0
        self.provides = frozenset({Need.TREE_LOGITS})
        self._calls = ModelCalls(self.model, self.dtype, self.device, self.vocab_size)
        if strategy is None:
            has_window = _has_window(config, self.context_length)
            strategy = find_strategy(self, self._calls, self.use, has_window=has_window)
        self.use(strategy)
        self._find_output_layer(read_config(Path(path)))
        self._find_exits()

    def use(self, strategy: Strategy) -> None:
        """Run trees in this way from now on; no sequence may be open."""
        self.strategy: Strategy = strategy
        self._trees = self._make_trees(strategy)

    def _make_trees(self, strategy: Strategy) -> Trees:
        return make_trees(self._calls, strategy)

    def _find_output_layer(self, raw: dict[str, Any]) -> None:
        """Find what draft heads need of the model, and try it."""
        self._output_layer: OutputLayer | None = None
        try:
            layer = OutputLayer(self.model, raw, self.context_length)
        except (LookupError, AttributeError, NotImplementedError):
            return  # it has another form, or transformers does not say where it is
        self.provides |= STATES
        if has_states(self, self._calls, layer):
            self._output_layer = layer
        else:
            self.provides -= STATES

    def _find_exits(self) -> None:
        """Find out whether some of the layers can run without the others."""
        self.why_no_exits = why_no_exits(self.strategy, self.provides)
        if not self.why_no_exits:
            self._chosen = ChosenLayers(self._calls)
            self.num_layers, self.head_layers = self._chosen.num_layers, self._chosen.head_layers
            self.why_no_exits = exits_fail(self, self.num_layers, self.dtype)
        if not self.why_no_exits:
            self.provides |= {Need.SHARED_MODEL}

    def logits_of(self, states: torch.Tensor) -> torch.Tensor:
        """See :class:`paceline.models.base.LayeredRunner`."""
        return self._chosen.logits_of(states)

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
            own.forget()
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
                f"at most {', '.join(sorted(need.value for need in self.provides))}, which this "
                "model gives on the general path",
            )
        states = wants & STATES
        total = sum(segment.num_rows - len(segment.resume) for segment in segments)
        if total > self.num_free:
            raise ResourceExhausted(
                f"a forward of {total} tokens needs {total} free KV entries, {self.num_free} of "
                f"{self.kv_capacity} are free"
            )
        if len({id(segment.sequence) for segment in segments}) < len(segments):
            raise InvalidArgument("segments", "a sequence twice", "one segment for each sequence")
        checked = [self._checked(segment) for segment in segments]
        news = [
            NewTokens(sequence, sequence.num_pending, segment.logits, bool(states))
            for segment, (sequence, _) in zip(segments, checked, strict=True)
        ]
        with torch.inference_mode():
            try:
                for segment, (sequence, parents) in zip(segments, checked, strict=True):
                    self._append(sequence, segment, parents)
                if any(segment.chooses_layers for segment in segments):
                    firsts = [new.first for new in news]
                    rows, extras = self._chosen.run(chosen_rows(segments, firsts), states)
                else:
                    rows, extras = self._run(news, states)
            except BaseException:
                for new in news:
                    self._undo(new)
                raise
            logits = torch.cat(rows) if rows else torch.empty((0, self.vocab_size))
        return ForwardResult(
            logits.to(self.device, torch.float32),
            tuple(itertools.accumulate(map(len, rows), initial=0)),
            extras,
            tuple(itertools.accumulate((s.num_rows for s in segments), initial=0)),
        )

    def _run(
        self, news: Sequence[NewTokens], states: frozenset[Need]
    ) -> tuple[list[torch.Tensor], dict[Need, torch.Tensor]]:
        """The wanted logits of each sequence, and the states of all new tokens."""
        calls = self._calls
        if not states or calls.taps is None:
            return self._trees.run(news), {}
        calls.wants = states
        # A prompt has states alone: logits of all its tokens would be the largest of its tensors.
        calls.has_logits = any(new.wanted != "none" for new in news)
        try:
            rows = self._trees.run(news)
        finally:
            has_logits, calls.wants, calls.has_logits = calls.has_logits, frozenset(), True
        size = self.vocab_size if has_logits else 0
        extras = calls.taps.split(torch.cat(rows)[:, size:].to(self.dtype), states)
        if not has_logits:
            return [row.new_empty((0, self.vocab_size)) for row in rows], extras
        return [
            row[[node - new.first for node in new.logits_nodes], :size]
            for new, row in zip(news, rows, strict=True)
        ], extras

    @property
    def output_layer(self) -> OutputLayer:
        """What draft heads read of the model beside its states.

        Raises:
            InvalidArgument: it is not found.
        """
        if self._output_layer is None:
            raise InvalidArgument(
                "target", self.model.config.model_type,
                "a model whose hidden states draft heads can read; this one's are not found",
            )  # fmt: skip
        return self._output_layer

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
            self._trees.keep(own, path)
        self._used -= own.num_pending - len(path)
        own.token_ids += tokens
        own.drop_pending()

    def truncate(self, sequence: KVSequence, length: int) -> None:
        """Drop committed entries from ``length`` on, and all pending ones."""
        own = _own(sequence)
        if not 0 <= length <= own.length:
            raise InvalidArgument("length", length, f"an integer in [0, {own.length}]")
        self._used -= own.length - length + own.num_pending
        if length < own.state_length:
            own.forget_state()  # the next forward computes it anew
        del own.token_ids[length:]
        own.drop_pending()
        own.crop(length)

    # --- one segment ---------------------------------------------------------------------------

    def _checked(self, segment: Segment) -> tuple[TransformersSequence, list[int]]:
        """The sequence, and the parent of every new token among its pending entries."""
        sequence = _own(segment.sequence)
        if sequence.closed:
            raise InvalidArgument("sequence", "freed", "a sequence that is in use")
        ids, first = segment.token_ids, sequence.num_pending
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
            bad = int(next(t for t in ids if not 0 <= t < self.vocab_size))
            raise InvalidArgument("token_ids", bad, f"token ids in [0, {self.vocab_size})")
        parents = _parents(segment, first)
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

    def _append(self, sequence: TransformersSequence, segment: Segment, parents: list[int]) -> None:
        pseudo = len(parents) - len(segment.token_ids)
        sequence.pending_ids += [int(token) for token in segment.token_ids] + [0] * pseudo
        sequence.pending_parents += parents
        self._used += len(parents)

    def _undo(self, new: NewTokens) -> None:
        """Take back the tokens of a forward that failed, and cut off what of them is cached."""
        self._used -= new.count
        new.sequence.drop_from(new.first)


def _parents(segment: Segment, first: int) -> list[int]:
    """The parent of every new token and then of every pseudo token among the pending entries."""
    count = len(segment.token_ids)
    if segment.parent_indices is None:
        parents = list(range(first - 1, first + count - 1))
    else:
        parents = [int(parent) for parent in segment.parent_indices]
        if len(parents) != count:
            raise InvalidArgument("parent_indices", len(parents), f"{count} entries")
    if segment.pseudo is not None:
        parents += [int(parent) for parent in segment.pseudo.parent_indices]
    for index, parent in enumerate(parents):
        if not -1 <= parent < first + index:
            raise InvalidArgument(
                f"parent_indices[{index}]", parent, f"-1 or below {first + index}"
            )
    return parents


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
