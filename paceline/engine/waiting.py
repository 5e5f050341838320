"""How long a request would wait for its first token, from what the engine has measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_MEMORY = 0.9  # decay of the time between places, for each one
_TOKENS = 4096.0  # prompt tokens after which older ones count a third
_LEAST_GAPS = 16  # or as many as there are places: fewer say little


class WaitEstimate:
    """Seconds until a new request has a place, and until its prompt is read.

    Sessions that end give places; the estimate is the mean time between two of them, measured while
    others wait. Prompts are read at the rate of the steps that leave some of them unread. Nothing
    measured is no wait: a request is not refused on a guess.

    Args:
        num_places: that the engine has. Where requests are alike, all of them may become free at
            once, and none for a while: the mean is over as many.
        clock: seconds.
    """

    def __init__(self, num_places: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        self._place_memory = max(_MEMORY, 1.0 - 1.0 / num_places)
        self._clock = clock
        self._num_gaps, self._least_gaps = 0, min(num_places, _LEAST_GAPS)
        self._place_s = 0.0  # between two places that become free
        self._left_at: float | None = None
        self._read, self._read_s = 0.0, 0.0  # prompt tokens, and the seconds of their steps

    def place_left(self, num_waiting: int) -> None:
        """A session has left its place, for which ``num_waiting`` sessions wait."""
        now = self._clock()
        if self._left_at is not None and num_waiting:
            self._num_gaps += 1  # the first ones count alike
            memory = min(self._place_memory, 1.0 - 1.0 / self._num_gaps)
            self._place_s = memory * self._place_s + (1.0 - memory) * (now - self._left_at)
        self._left_at = now if num_waiting else None

    def prompts_read(self, num_tokens: int, seconds: float) -> None:
        """A step of ``seconds`` has read ``num_tokens`` prompt tokens."""
        # By tokens: many steps that read little each, between tokens of other sessions, say less of
        # what a crowd's prompts take than a few that read much.
        memory = math.exp(-num_tokens / _TOKENS)
        self._read = memory * self._read + num_tokens
        self._read_s = memory * self._read_s + seconds

    def seconds(self, num_ahead: int, num_tokens: int) -> float:
        """Until the first token of a request.

        Args:
            num_ahead: places that must become free for it.
            num_tokens: prompt tokens that are read before its first token, its own included.
        """
        place_s = self._place_s if self._num_gaps >= self._least_gaps else 0.0
        token_s = self._read_s / self._read if self._read else 0.0
        return max(num_ahead * place_s, num_tokens * token_s)
