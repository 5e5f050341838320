"""Which sessions a step verifies together, and how their rows are laid out.

``ragged`` is what Paceline does: all who are ready, their rows one behind the other, each with its
own place in its own KV entries, and nothing padded. That is EMS-SD's unpadded input and KV (Ni et
al. 2024, arXiv 2405.07542). The others are there to be compared with it:

``same_length``: EXSPEC ("Batch speculative decoding done right", 2025, arXiv 2510.22876): of a
    window of sessions those of equal length go together, which a padded layout stacks without
    realigning anything; where no length has a whole batch, the oldest go, and the shorter of them
    would be realigned.
``pad``, ``split``: BASS (Qian et al. 2024, arXiv 2404.15778): one forward with every draft padded
    to the longest, or one forward for each sequence.

Tokens are the same with each. What a padded layout would do to the KV cache is counted, not done:
the cache has no layout to keep (paceline/models/kv_cache.py).
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
"""Steps that the oldest session waits for a group of its length."""


@dataclass(slots=True)
class BatchCounters:
    """Of the steps that verified something.

    Attributes:
        num_steps: of them.
        num_grouped: steps whose sessions were all of one length.
        num_realigned: sessions that a padded KV layout would have realigned.
        num_kv_padding: entries by which the sessions of a step were shorter than the longest.
    """

    num_steps: int = 0
    num_grouped: int = 0
    num_realigned: int = 0
    num_kv_padding: int = 0


class Batching:
    """Chooses the sessions of each step.

    Args:
        size: sessions in one step at most; None takes all who are ready.
        window: the sessions among which ``same_length`` looks for a group.
    """

    def __init__(
        self, strategy: BatchStrategy = "ragged", size: int | None = None, window: int = 48
    ) -> None:
        self.counters = BatchCounters()
        self._strategy = strategy
        self._size = size
        self._window = window
        self._passed_over: tuple[str, int] = "", 0  # the oldest one, and for how many steps

    def choose(self, ready: Sequence[S]) -> list[S]:
        """Those of ``ready``, the oldest first, that are verified now."""
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
        """A whole batch of one length, the one with the oldest session; none where it must wait."""
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
