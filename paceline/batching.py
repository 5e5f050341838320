"""Which sessions a step verifies together, and how their rows are laid out.

``ragged`` is Paceline's own way: a step verifies all ready sessions, puts their rows one behind the
other, gives each row its position in its session's KV entries, and pads nothing. That is EMS-SD's
unpadded input and KV (Ni et al. 2024, arXiv 2405.07542). The others exist for comparison:

``same_length``: EXSPEC ("Batch speculative decoding done right", 2025, arXiv 2510.22876). Among a
    window of sessions, those of equal length go together; a padded layout stacks them without
    realigning. If no length fills a batch, the oldest sessions go, and the shorter ones of them
    count as realigned.
``pad``, ``split``: BASS (Qian et al. 2024, arXiv 2404.15778). One forward with every draft padded
    to the longest, or one forward for each sequence.

All of them give the same tokens. The KV work of a padded layout is counted, not done: the cache
has no such layout (paceline/models/kv_cache.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from paceline.view import SessionView

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
    """

    num_steps: int = 0
    num_grouped: int = 0
    num_realigned: int = 0
    num_kv_padding: int = 0


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
