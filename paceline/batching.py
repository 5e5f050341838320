"""Which sessions a step verifies together, and how their rows are laid out.

``ragged`` is Paceline's own way: a step verifies all ready sessions, puts their rows one behind the
other, gives each row its position in its session's KV entries, and pads nothing. That is EMS-SD's
unpadded input and KV (Ni et al. 2024, arXiv 2405.07542). The others exist for comparison:

``same_length``: EXSPEC ("Batch speculative decoding done right", 2025, arXiv 2510.22876). Among a
    window of sessions, those of equal length go together; a padded layout stacks them without
    realigning. If no length fills a batch, the oldest sessions go, and the shorter ones of them
    count as realigned. Nothing here has to be: a sequence is a table of slots in a pool, in
    Paceline's own runners as in the packed one of transformers.
``pad``, ``split``: BASS (Qian et al. 2024, arXiv 2404.15778). One forward with every draft padded
    to the longest, or one forward for each sequence.

All of them give the same tokens. The KV work of a padded layout is counted, not done: the cache
has no such layout (paceline/models/kv_cache.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

import numpy as np

from paceline.models.base import ModelRunner, Segment
from paceline.types import Need
from paceline.view import SessionView

if TYPE_CHECKING:
    import torch

S = TypeVar("S", bound=SessionView)

BatchStrategy = Literal["ragged", "same_length", "pad", "split"]
STRATEGIES: tuple[str, ...] = get_args(BatchStrategy)
PATIENCE = 16
"""Steps that the oldest session waits at most for a group of its length."""


@dataclass(slots=True)
class BatchCounters:
    """Counts over the steps that verified something.

    Attributes:
        num_steps: those steps.
        num_grouped: steps whose sessions all had the same length.
        num_realigned: sessions that a padded KV layout would have realigned.
        num_kv_padding: entries by which sessions were shorter than the longest one of their step.
        num_kv_entries: those that their sessions had.
    """

    num_steps: int = 0
    num_grouped: int = 0
    num_realigned: int = 0
    num_kv_padding: int = 0
    num_kv_entries: int = 0

    @property
    def padding_share(self) -> float:
        """Share of the entries of a padded layout that would be padding."""
        return self.num_kv_padding / max(1, self.num_kv_padding + self.num_kv_entries)


class Batching:
    """Chooses the sessions of each step.

    Args:
        size: most sessions in one step; None takes all that are ready.
        window: how many ready sessions, the oldest first, ``same_length`` searches for a group.
    """

    def __init__(
        self, strategy: BatchStrategy = "ragged", size: int | None = None, window: int = 48
    ) -> None:
        self.counters = BatchCounters()
        self._strategy = strategy
        self._size = size
        self._window = window
        # The oldest ready session, and for how many steps in a row groups left it out.
        self._passed_over: tuple[str, int] = "", 0

    def choose(self, ready: Sequence[S]) -> list[S]:
        """The sessions to verify now, out of ``ready``, which is sorted from the oldest on."""
        if not ready:
            return []
        chosen = [*ready] if self._size is None else [*ready[: self._size]]
        if self._strategy == "same_length":
            chosen = self._group(ready) or chosen
        longest = max(session.length for session in chosen)
        padding = [longest - session.length for session in chosen]
        self.counters.num_steps += 1
        self.counters.num_grouped += not any(padding)
        self.counters.num_realigned += sum(map(bool, padding))
        self.counters.num_kv_padding += sum(padding)
        self.counters.num_kv_entries += sum(session.length for session in chosen)
        return chosen

    def _group(self, ready: Sequence[S]) -> list[S]:
        """A full batch of sessions of equal length; empty if there is none.

        Also empty once groups have passed over the oldest session for ``PATIENCE`` steps.
        """
        size = self._size or len(ready)
        by_length: dict[int, list[S]] = {}
        for session in ready[: self._window]:
            by_length.setdefault(session.length, []).append(session)
        group = next((g[:size] for g in by_length.values() if len(g) >= size), [])
        oldest = ready[0].session_id
        known, steps = self._passed_over
        if not group or ready[0] in group:
            self._passed_over = oldest, 0
            return group
        steps = steps + 1 if known == oldest else 1
        self._passed_over = oldest, steps
        return group if steps <= PATIENCE else []


def run_segments(
    runner: ModelRunner,
    segments: Sequence[Segment],
    strategy: BatchStrategy,
    *,
    num_prefill: int,
    wants: frozenset[Need],
) -> tuple[list[tuple[torch.Tensor, dict[Need, torch.Tensor]]], int]:
    """Run a step's segments in one forward or, with ``split``, in many.

    Args:
        num_prefill: that many of the first segments are prompts, which are not padded.

    Returns:
        Logits and extras of each segment; how many rows ``pad`` has added.
    """
    if strategy == "split":
        alone = [runner.forward([segment], wants) for segment in segments]
        return [(result.logits, result.extras_of(0)) for result in alone], 0
    padded, num_padding = segments, 0
    if strategy == "pad":
        drafts, num_padding = _padded(segments[num_prefill:], runner)
        padded = [*segments[:num_prefill], *drafts]
    result = runner.forward(padded, wants)
    found = []
    for i, (segment, laid_out) in enumerate(zip(segments, padded, strict=True)):
        logits, extras = result.logits[result.rows(i)], result.extras_of(i)
        if laid_out is not segment:
            logits = logits[: segment.num_rows]
            extras = {need: tensor[: segment.num_rows] for need, tensor in extras.items()}
        found.append((logits, extras))
    return found, num_padding


def _padded(segments: Sequence[Segment], runner: ModelRunner) -> tuple[list[Segment], int]:
    """Pad each segment to as many rows as the longest has, as far as memory allows."""
    rows = [segment.num_rows for segment in segments]
    room, num_padding = runner.num_free - sum(rows), 0
    result = []
    for segment, count in zip(segments, rows, strict=True):
        more = max(rows) - count
        if not more or more > room or segment.chooses_layers or segment.sequence.num_pending:
            result.append(segment)
            continue
        room -= more
        num_padding += more
        parents = segment.parent_indices
        if parents is None:
            parents = np.arange(-1, count - 1, dtype=np.int32)
        padding = np.full(more, -1, np.int32)  # siblings of the first row: see only the prefix
        ids = np.concatenate([segment.token_ids, np.zeros(more, np.int64)])
        result.append(Segment(segment.sequence, ids, np.concatenate([parents, padding])))
    return result, num_padding
