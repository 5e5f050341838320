"""The fast path: checkpoints in Hugging Face format of Llama and of architectures much like it
(:mod:`paceline.models.architectures`).

One packed forward serves any mix of prompts, chains and trees of any number of sequences. Rows of
all of them lie behind one another; only attention knows where a row's context is. With
``batch_invariant`` the logits of a token have the same bits whatever else the batch holds. On a
CPU with float32 or bfloat16 the C kernels give that for free (and so give it always); elsewhere
the switch chooses a slower order of operations. On a CUDA device Triton kernels and CUDA graphs
take part where they prove right when the model is loaded; plain torch runs everywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from paceline.models import kernels
from paceline.models.adapters import load_adapters
from paceline.models.base import ForwardResult, KVSequence, Segment
from paceline.models.cuda_graphs import Capture, ForwardGraphs
from paceline.models.cuda_ops import CudaOps, DeviceRows
from paceline.models.kernels import KernelsUnavailable
from paceline.models.kv_cache import KVPool, PooledSequence
from paceline.models.llama_batch import PackedBatch, pack_segments, run_chosen_layers
from paceline.models.llama_config import LlamaConfig
from paceline.models.llama_weights import load_llama_weights
from paceline.models.native_ops import NativeOps
from paceline.models.new_weights import TakesWeights
from paceline.models.ops import Ops
from paceline.models.packing import Weight
from paceline.models.prefix_cache import PrefixCache
from paceline.models.rows import append_chains
from paceline.models.torch_ops import TorchOps
from paceline.numerics import (
    PORTABLE,
    Fingerprint,
    check_numerics,
    refuse_portable,
    torch_class,
)
from paceline.types import FloatArray, IntArray, Need

Tensor = torch.Tensor


class LlamaRunner(TakesWeights):
    """A Llama-type model with its KV pool (see :class:`paceline.models.base.ModelRunner`).

    Layers are numbered from 0; an early exit after ``n`` layers predicts with the model's own
    final norm and head.

    Args:
        folder: a Hugging Face model folder.
        dtype: of weights, activations and KV entries.
        kv_tokens: capacity of the KV pool over all sequences.
        batch_invariant: see the module; ``None`` means on for float32 on a CPU.
        int8: see :class:`paceline.models.packing.Packer`; nothing without the kernels.
        blocks: round weights to blocks of integers, as a GGUF file's type has them ("Q8_0",
            "Q4_0"); None: as they are.
        numerics: see :mod:`paceline.numerics`.
        adapters: folders of adapters (:mod:`paceline.models.adapters`) by name; a sequence has one
            of them, or none.

    Raises:
        ModelNotFound: the folder, or something in it, is missing or damaged.
        InvalidArgument: portable numerics where the kernels cannot give them, or a checkpoint that
            holds something that the fast path does not implement (:mod:`paceline.models.layouts`).
    """

    provides = frozenset(Need)

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv_tokens: int | None = None,
        batch_invariant: bool | None = None,
        int8: bool = False,
        blocks: str | None = None,
        numerics: str = "fastest",
        adapters: Mapping[str, Path] | None = None,
    ) -> None:
        check_numerics(numerics)
        folder, device = Path(folder), torch.device(device)
        self.config = config = LlamaConfig.from_folder(folder)
        self.dtype, self.device = dtype, device
        self.vocab_size, self.context_length = config.vocab_size, config.context_length
        self.num_layers, self.head_layers = config.num_layers, config.head_layers
        if batch_invariant is None:
            batch_invariant = device.type == "cpu" and dtype is torch.float32
        self._ops = _choose_ops(
            config, dtype, device, batch_invariant, int8=int8, numerics=numerics
        )
        if self._numerics_class != PORTABLE:
            refuse_portable(numerics, f"this model would run in class {self._numerics_class} here")
        self.batch_invariant = batch_invariant or isinstance(self._ops, NativeOps)
        self._folder, self._blocks = folder, blocks
        self._weights = load_llama_weights(
            folder, config, self._ops, dtype=dtype, device=device, blocks=blocks
        )
        added = load_adapters(adapters or {}, folder, config, self._ops, dtype=dtype, device=device)
        self._weights = replace(self._weights, stack=replace(self._weights.stack, adapters=added))
        is_int8 = int8 and isinstance(self._ops, NativeOps)
        self._rounded_to = blocks.lower() if blocks else "int8" if is_int8 else ""
        tokens = kv_tokens or min(16 * config.context_length, 65536)
        self._pool = KVPool(
            config.num_layers, tokens, config.num_kv_heads, config.head_dim, dtype, device
        )
        self._graphs: ForwardGraphs | None = None
        self._prepare_device()

    # --- numerics ------------------------------------------------------------------------------

    @property
    def _numerics_class(self) -> str:
        return _numerics_class(self._ops, self.device)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """See :class:`paceline.models.base.ModelRunner`."""
        return Fingerprint(
            numerics_class=self._numerics_class,
            dtype=self._rounded_to or str(self.dtype).removeprefix("torch."),
            kernel_version=kernels.NUMERICS_VERSION,
            weights=self._weights.digest(self.config, self._ops, self.dtype),
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters, in the order of their numbers."""
        return tuple(adapter.name for adapter in self._weights.stack.adapters)

    def fingerprint_of(self, adapter: str) -> Fingerprint:
        """Of the model with one of its adapters; "" is none."""
        if not adapter:
            return self.fingerprint
        added = self._weights.stack.adapters[self.adapters.index(adapter)]
        return self.fingerprint.with_adapter(added.digest)

    def _use_graphs(self, capture: Capture | None = None) -> None:
        """Replay small forwards; plain torch waits for the host, so no graph can record it."""
        if isinstance(self._ops, CudaOps):
            self._graphs = ForwardGraphs(
                self._forward_on_device, self.vocab_size, self.dtype, self.device, capture
            )

    # --- sequences -----------------------------------------------------------------------------

    @property
    def num_parameters(self) -> int:
        """Numbers in the checkpoint; a tied embedding counts once."""
        return self._weights.num_parameters

    @property
    def kv_capacity(self) -> int:
        return self._pool.capacity

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def new_sequence(self, adapter: str = "") -> KVSequence:
        """An empty sequence of the model, with one of its adapters if named."""
        return PooledSequence(self.context_length, self.adapters.index(adapter) if adapter else -1)

    def free(self, sequence: KVSequence) -> None:
        assert isinstance(sequence, PooledSequence)
        self._pool.free(sequence)

    def commit(self, sequence: KVSequence, pending: Sequence[int]) -> None:
        assert isinstance(sequence, PooledSequence)
        assert sequence.states.keys().isdisjoint(pending), "an early exit was not resumed"
        self._pool.commit(sequence, pending)

    def truncate(self, sequence: KVSequence, length: int) -> None:
        assert isinstance(sequence, PooledSequence)
        self._pool.truncate(sequence, length)

    @property
    def prefixes(self) -> PrefixCache | None:
        """Entries of earlier sequences; None if they could differ in the last bits."""
        return self._pool.prefixes if self.batch_invariant else None

    def adopt(self, sequence: KVSequence, token_ids: Sequence[int], scope: str) -> None:
        """Start an empty sequence with the cached entries for ``token_ids``."""
        assert isinstance(sequence, PooledSequence)
        self._pool.adopt(sequence, token_ids, scope)

    def publish(self, sequence: KVSequence, token_ids: Sequence[int], scope: str) -> None:
        """Let later sequences start with this sequence's committed entries, even after it ends."""
        assert isinstance(sequence, PooledSequence)
        self._pool.publish(sequence, token_ids, scope)

    def keys_and_values(self, sequence: KVSequence, first: int = 0) -> tuple[Tensor, Tensor]:
        """KV entries of the layers from one on.  # 2 x [layers, length, kv_heads, head_dim]"""
        assert isinstance(sequence, PooledSequence)
        slots = sequence.slots[: sequence.length].astype(np.int64)
        index = torch.from_numpy(slots).to(self.device)
        return self._pool.keys[first:, index], self._pool.values[first:, index]

    # --- forward -------------------------------------------------------------------------------

    def forward(
        self, segments: Sequence[Segment], wants: frozenset[Need] = frozenset()
    ) -> ForwardResult:
        weights, pool = self._weights, self._pool
        stack, count = weights.stack, len(weights.stack.layers)
        batch = pack_segments(
            segments, pool, context_length=self.context_length, num_layers=count,
            device=self.device,
        )  # fmt: skip
        if not wants and (replayed := _replay(self._graphs, batch)) is not None:
            return ForwardResult(
                replayed, batch.row_offsets, {}, batch.extra_offsets, batch.selected
            )
        x = F.embedding(torch.from_numpy(batch.tokens).to(self.device), weights.embedding)
        states = None
        if Need.LAYER_STATES in wants or batch.exits:
            make = x.new_empty if batch.layers is None else x.new_zeros
            states = make(count, *x.shape)
        if batch.layers is None:
            self._ops.run_layers(stack, 0, count, x, pool.keys, pool.values, batch.rows, states)
        else:
            run_chosen_layers(batch, self._ops, stack, pool, x, states)
        if states is not None:
            batch.keep_states(states)
        selected, extras = batch.selected, {}
        if Need.HIDDEN_STATES in wants:
            hidden = self._ops.rmsnorm(x, weights.final_norm, stack.eps)
            extras[Need.HIDDEN_STATES] = hidden
            hidden = hidden if selected is None else hidden[selected]
        else:
            x = x if selected is None else x[selected]
            hidden = self._ops.rmsnorm(x, weights.final_norm, stack.eps)
        if Need.LAYER_STATES in wants:
            assert states is not None
            extras[Need.LAYER_STATES] = states.transpose(0, 1)
        logits = self._ops.logits(stack, hidden, weights.head)
        return ForwardResult(logits, batch.row_offsets, extras, batch.extra_offsets, selected)

    def _forward_on_device(self, rows: DeviceRows) -> Tensor:
        """Logits of all rows, from tokens on the device.  # [num_rows, vocab_size]"""
        assert isinstance(self._ops, CudaOps)
        weights, pool = self._weights, self._pool
        stack = weights.stack
        x = F.embedding(rows.data[: rows.num_rows], weights.embedding)
        self._ops.run_on_device(stack, 0, len(stack.layers), x, pool.keys, pool.values, rows)
        return self._ops.linear(self._ops.rmsnorm(x, weights.final_norm, stack.eps), weights.head)

    @property
    def embedding(self) -> Tensor:
        """Of every token.  # [vocab_size, hidden_size]"""
        return self._weights.embedding

    @property
    def lm_head(self) -> Tensor:
        """Weight of the output layer: the embedding where they are tied, else a copy.

        # [vocab_size, hidden_size]
        """
        weights = self._weights
        return weights.embedding if weights.is_tied else self._ops.unpack(weights.head)

    @property
    def packed_lm_head(self) -> Weight:
        """The weight of the output layer in the layout of this runner's ops."""
        return self._weights.head

    @property
    def products(self) -> list[Weight]:
        """The weights that a forward multiplies with, the output layer last."""
        of_layers = [w for layer in self._weights.stack.layers for w in layer.products()]
        return [*of_layers, self._weights.head]

    def logits_of_hidden(self, hidden: Tensor) -> Tensor:
        """The output layer on hidden states after the final norm.

        # [num_rows, hidden_size] -> [num_rows, vocab_size] float32
        """
        return self._ops.logits(self._weights.stack, hidden.contiguous(), self._weights.head)

    def logits_of(self, states: Tensor) -> Tensor:
        """Logits of a residual stream after any layer, through the shared norm and head.

        # [num_rows, hidden_size] -> [num_rows, vocab_size] float32
        """
        norm, eps = self._weights.final_norm, self._weights.stack.eps
        return self.logits_of_hidden(self._ops.rmsnorm(states.contiguous(), norm, eps))

    @property
    def native_ops(self) -> NativeOps | None:
        """The C kernels, if they compute this model."""
        return self._ops if isinstance(self._ops, NativeOps) else None

    @property
    def drafts_chains(self) -> bool:
        """Whether :meth:`greedy_chain` works: it needs the C kernels."""
        return isinstance(self._ops, NativeOps)

    def greedy_chain(
        self,
        sequences: Sequence[KVSequence],
        tokens: Sequence[Sequence[int]],
        num_steps: int,
        num_layers: int | None = None,
        stop_below: FloatArray | None = None,
    ) -> IntArray:
        """Give sequences some tokens and continue each by argmax, all steps in one call.

        The same tokens and pending entries as a forward of ``tokens`` and ``num_steps - 1`` of one
        token for each sequence, without the time that each of them takes in Python.

        Args:
            sequences: whose pending entries, if any, are a chain.
            tokens: what follows the last pending entry of each sequence, at least one token.
            num_layers: an early exit: the new entries can be resumed. ``tokens`` is one token each.
            stop_below: a sequence ends after a token whose probability is less than this.
                # [num_steps, num_sequences]

        Returns:
            The new tokens; the last of them gets no KV entry. What comes after the end of a
            sequence is -1, and pending entries that never may be committed.
            # [num_steps, num_sequences]
        """
        assert isinstance(self._ops, NativeOps)
        weights = self._weights
        pooled = [sequence for sequence in sequences if isinstance(sequence, PooledSequence)]
        rows = append_chains(self._pool, pooled, [len(given) for given in tokens], num_steps)
        states = None
        if num_layers is not None:
            states = weights.embedding.new_empty(
                num_steps, num_layers, len(pooled), self.config.hidden_size
            )
        result = self._ops.greedy_chain(
            weights.stack, num_layers or len(weights.stack.layers), weights.embedding,
            weights.final_norm, weights.head, self._pool.keys, self._pool.values, rows, tokens,
            num_steps, states=states, stop_below=stop_below,
        )  # fmt: skip
        if states is not None:
            _keep_states(pooled, states, result)
        return result


def _replay(graphs: ForwardGraphs | None, batch: PackedBatch) -> Tensor | None:
    """The selected rows' logits from a graph, if one fits the batch."""
    wants_logits = batch.row_offsets[-1] > 0
    if graphs is None or batch.layers is not None or not wants_logits:
        return None
    logits = graphs.run(batch.tokens, batch.rows)
    return logits if logits is None or batch.selected is None else logits[batch.selected]


def _keep_states(sequences: Sequence[PooledSequence], states: Tensor, tokens: IntArray) -> None:
    """Keep the states behind an early exit, of steps that gave a token.

    # states: [num_steps, num_layers, num_sequences, hidden_size]
    """
    for i, sequence in enumerate(sequences):
        first, length = sequence.num_pending - len(tokens), int((tokens[:, i] >= 0).sum())
        sequence.states |= {first + step: states[step, :, i] for step in range(length)}


def _choose_ops(
    config: LlamaConfig,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool,
    *,
    int8: bool,
    numerics: str,
) -> Ops:
    sizes = {routing.size for routing in config.routings if routing is not None}
    widths = config.head_dim, config.hidden_size, config.intermediate_size, *sizes
    if NativeOps.supports(dtype, device, *widths):
        try:
            return NativeOps(dtype, int8=int8, numerics=numerics)
        except KernelsUnavailable as error:
            warnings.warn(f"running without the C kernels, slower: {error}", stacklevel=3)
    return TorchOps(by_row=batch_invariant)


def _numerics_class(ops: Ops, device: torch.device) -> str:
    if isinstance(ops, NativeOps):
        return ops.numerics_class
    assert isinstance(ops, TorchOps)
    more = ["triton"] if isinstance(ops, CudaOps) else []
    return torch_class(device, *more, *(["rows"] if ops.by_row else []))
