"""A draft model in a GGUF file, computed by llama.cpp.

A *sequence* of llama.cpp is a set of KV entries, and an entry may belong to several sequences. A
session has one for its committed tokens, which its first branch continues, and each further branch
of its pending tree has one that shares the entries of its ancestors: nothing is copied.

Its logits depend on the rest of the batch (``batch_invariant`` is False), so such a model can be a
drafter but never a target.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from paceline.errors import InvalidArgument, ModelNotFound, ResourceExhausted
from paceline.gguf import library, load_model
from paceline.models.base import ForwardResult, KVSequence, Segment
from paceline.numerics import Fingerprint
from paceline.types import Need

_MAX_BATCH = 2048  # tokens in one call of llama.cpp
_DEFAULT_KV_TOKENS = 8192


class GgufSequence:
    """KV state of one session: the ids of its sequences in llama.cpp."""

    __slots__ = ("base", "branch_of", "branches", "depth_of", "length", "tails")

    def __init__(self, base: int) -> None:
        self.base = base  # the sequence of the committed tokens
        self.length = 0
        self.branches: list[int] = []  # further sequences, for pending branches
        # Of pending entries: their sequence, and the number of pending tokens up to them.
        self.branch_of: list[int] = []
        self.depth_of: list[int] = []
        self.tails = {base: -1}  # sequence -> its last pending entry; -1: none

    @property
    def num_pending(self) -> int:
        return len(self.branch_of)


def _own(sequence: KVSequence) -> GgufSequence:
    assert isinstance(sequence, GgufSequence)
    return sequence


class GgufRunner:
    """A model in a GGUF file as a :class:`paceline.models.base.ModelRunner`.

    Args:
        kv_tokens: KV entries of all sequences together; default: the model's context, at most
            8,192.
        gpu: compute on the GPU, where llama.cpp was built for it.

    Raises:
        ModelNotFound: there is no such file, it is damaged, or llama-cpp-python is missing.
        InvalidArgument: a kind of model whose state cannot be taken back.
    """

    provides: frozenset[Need] = frozenset()
    batch_invariant = False

    def __init__(
        self, path: str | Path, *, kv_tokens: int | None = None, gpu: bool = False
    ) -> None:
        self._lib = lib = library()
        self._model = load_model(path, n_gpu_layers=-1 if gpu else 0)
        weakref.finalize(self, lib.llama_model_free, self._model)
        if (
            lib.llama_model_is_recurrent(self._model)
            or lib.llama_model_is_hybrid(self._model)
            or lib.llama_model_has_encoder(self._model)
        ):
            raise InvalidArgument(
                "drafter", str(path), "a decoder with attention in all layers: the state of others "
                "cannot be taken back when a draft is rejected",
            )  # fmt: skip
        context = int(lib.llama_model_n_ctx_train(self._model))
        tokens = kv_tokens or min(context, _DEFAULT_KV_TOKENS)
        self._threads = torch.get_num_threads()
        params = lib.llama_context_default_params()
        params.n_ctx = tokens
        params.n_batch = min(_MAX_BATCH, tokens)
        params.n_seq_max = lib.llama_max_parallel_sequences()
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = self._threads
        params.offload_kqv = gpu
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise ModelNotFound(f"llama.cpp has no memory for {tokens} KV entries of {str(path)!r}")
        # Finalizers run in reverse order: the context goes before its model.
        weakref.finalize(self, lib.llama_free, self._context)
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(params.n_batch, 0, 1)
        weakref.finalize(self, lib.llama_batch_free, self._batch)
        self._max_batch = int(params.n_batch)
        self._free_ids = list(range(params.n_seq_max))[::-1]
        self.vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)))
        self.kv_capacity = int(lib.llama_n_ctx(self._context))
        self.context_length = min(context, self.kv_capacity)
        self._used = 0

    @property
    def num_free(self) -> int:
        return self.kv_capacity - self._used

    @property
    def fingerprint(self) -> Fingerprint:
        """Always refuses: llama.cpp's results depend on the rest of its batch."""
        raise InvalidArgument("target", "a GGUF file", "a Hugging Face folder")

    def new_sequence(self) -> GgufSequence:
        """
        Raises:
            ResourceExhausted: llama.cpp has no further sequence.
        """
        return GgufSequence(self._take_id())

    def _take_id(self) -> int:
        if not self._free_ids:
            raise ResourceExhausted(
                "llama.cpp has no free sequence for another branch of a tree, or session"
            )
        return self._free_ids.pop()

    def _release(self, sequence_id: int) -> None:
        self._lib.llama_memory_seq_rm(self._memory, sequence_id, -1, -1)
        self._free_ids.append(sequence_id)

    def free(self, sequence: KVSequence) -> None:
        own = _own(sequence)
        self._used -= own.length + own.num_pending
        for sequence_id in (own.base, *own.branches):
            self._release(sequence_id)
        own.branches, own.branch_of, own.depth_of, own.length = [], [], [], 0

    # --- forward --------------------------------------------------------------------------------

    def forward(
        self, segments: Sequence[Segment], wants: frozenset[Need] = frozenset()
    ) -> ForwardResult:
        """Append every token as a pending entry of its sequence and return the logits asked for.

        Raises:
            InvalidArgument: ``wants`` is not empty.
            ResourceExhausted: there are not enough free KV entries or sequences.
        """
        if wants:
            names = sorted(need.value for need in wants)
            raise InvalidArgument("wants", names, "nothing: llama.cpp gives logits only")
        total = sum(len(segment.token_ids) for segment in segments)
        if total > self.num_free:
            raise ResourceExhausted(
                f"a forward of {total} tokens needs {total} free KV entries, {self.num_free} of "
                f"{self.kv_capacity} are free"
            )
        self._follow_threads()
        rows: list[torch.Tensor] = []
        offsets, ends = [0], [0]
        waiting = 0  # tokens in the batch that the next call computes
        for segment in segments:
            own = _own(segment.sequence)
            first = own.num_pending
            parents = (
                range(first - 1, first - 1 + len(segment.token_ids))
                if segment.parent_indices is None
                else segment.parent_indices.tolist()
            )
            in_batch = own.num_pending  # entries from here on are not computed yet
            last = len(segment.token_ids) - 1
            wanted = 0
            for i, (token, parent) in enumerate(
                zip(segment.token_ids.tolist(), parents, strict=True)
            ):
                branches_off = self._tail(own, parent) != parent
                if waiting == self._max_batch or (branches_off and parent >= in_batch):
                    rows += self._compute(waiting)
                    waiting, in_batch = 0, own.num_pending
                wants_row = segment.logits == "all" or (segment.logits == "last" and i == last)
                wanted += wants_row
                self._append(own, waiting, token, parent, wants_row, branches_off)
                waiting += 1
            offsets.append(offsets[-1] + wanted)
            ends.append(ends[-1] + len(segment.token_ids))
        rows += self._compute(waiting)
        packed = torch.cat(rows) if rows else torch.empty((0, self.vocab_size))
        return ForwardResult(packed, tuple(offsets), {}, tuple(ends))

    @staticmethod
    def _tail(own: GgufSequence, parent: int) -> int:
        """The last pending entry of the sequence that holds ``parent``."""
        return own.tails[own.branch_of[parent] if parent >= 0 else own.base]

    def _append(
        self, own: GgufSequence, place: int, token: int, parent: int, logits: bool, off: bool
    ) -> None:
        """Put a token into the batch, in the sequence of its parent or in a branch of it."""
        sequence_id = own.branch_of[parent] if parent >= 0 else own.base
        depth = own.depth_of[parent] if parent >= 0 else 0
        position = own.length + depth
        if off:
            branch = self._take_id()
            self._lib.llama_memory_seq_cp(self._memory, sequence_id, branch, 0, position)
            own.branches.append(branch)
            sequence_id = branch
        own.tails[sequence_id] = own.num_pending
        own.branch_of.append(sequence_id)
        own.depth_of.append(depth + 1)
        self._used += 1
        batch = self._batch
        batch.token[place] = token
        batch.pos[place] = position
        batch.n_seq_id[place] = 1
        batch.seq_id[place][0] = sequence_id
        batch.logits[place] = logits

    def _compute(self, count: int) -> list[torch.Tensor]:
        """Compute the batch; the rows that are wanted.  # [num_wanted, vocab_size] or nothing"""
        if not count:
            return []
        lib, batch = self._lib, self._batch
        batch.n_tokens = count
        code = lib.llama_decode(self._context, batch)
        if code == 1:
            raise ResourceExhausted(f"llama.cpp has no room for {count} KV entries")
        if code:
            raise RuntimeError(f"llama_decode failed with {code}")
        wanted = sum(bool(batch.logits[i]) for i in range(count))
        if not wanted:
            return []
        # Rows lie one after the other, in the order of their tokens.
        table = np.ctypeslib.as_array(
            lib.llama_get_logits(self._context), (wanted, self.vocab_size)
        )
        return [torch.from_numpy(table.copy())]

    def _follow_threads(self) -> None:
        """Use as many threads as torch, where the user sets their number."""
        threads = torch.get_num_threads()
        if threads != self._threads:
            self._lib.llama_set_n_threads(self._context, threads, threads)
            self._threads = threads

    # --- commit ---------------------------------------------------------------------------------

    def commit(self, sequence: KVSequence, pending: Sequence[int]) -> None:
        own, lib, memory = _own(sequence), self._lib, self._memory
        path = [int(entry) for entry in pending]
        if [own.depth_of[entry] for entry in path] != list(range(1, len(path) + 1)):
            raise InvalidArgument("pending", path, "a path from the root down")
        end = own.length + len(path)
        if path and (branch := own.branch_of[path[-1]]) != own.base:
            lib.llama_memory_seq_rm(memory, own.base, own.length, -1)
            lib.llama_memory_seq_cp(memory, branch, own.base, own.length, end)
        self._keep(own, end)

    def truncate(self, sequence: KVSequence, length: int) -> None:
        own = _own(sequence)
        if not 0 <= length <= own.length:
            raise InvalidArgument("length", length, f"an integer in [0, {own.length}]")
        self._keep(own, length)

    def _keep(self, own: GgufSequence, length: int) -> None:
        """Drop all entries but the first ``length`` of the session's own sequence."""
        self._lib.llama_memory_seq_rm(self._memory, own.base, length, -1)
        for branch in own.branches:
            self._release(branch)
        self._used -= own.length + own.num_pending - length
        own.branches, own.branch_of, own.depth_of = [], [], []
        own.tails = {own.base: -1}
        own.length = length
