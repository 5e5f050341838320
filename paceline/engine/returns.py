"""Requests that were refused and told when to come back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable

LONGEST_S = 30.0
"""Seconds that a refused request is told at most, in case the estimate was wrong. OpenAI's clients
ignore more than 60."""
EXPECTED_S = 2.0
"""Seconds after its time that a refused request is expected."""


class Returns:
    """The refused requests that are to come back, in the order in which they go before newcomers.

    Without it, a place in the queue goes to whichever request happens to come first after it
    becomes free, and some are refused again and again. A request that comes back is known by its
    tokens; only a hash of them is kept.

    Args:
        most: requests of a group that are expected at a time.
        clock: seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._due: dict[Hashable, dict[int, float]] = {}  # by group and request

    def num_before(self, group: Hashable, request: Callable[[], int]) -> int:
        """How many requests are to come back that go before this one.

        Args:
            group: requests of other groups do not count.
            request: a hash; equal for the same request.
        """
        if not self._due:
            return 0
        due = self._expected(group)
        mine = due.get(request(), math.inf) if due else math.inf
        return sum(each < mine for each in due.values())

    def came(self, group: Hashable, request: Callable[[], int]) -> None:
        """A request was admitted, perhaps one that was expected."""
        if group in self._due:
            self._due[group].pop(request(), None)

    def promise(self, group: Hashable, request: Callable[[], int], seconds: float) -> float:
        """Expect a refused request after about ``seconds``.

        Returns:
            The seconds to tell it: whole ones, as HTTP has them.
        """
        told = float(math.ceil(min(max(seconds, 1.0), LONGEST_S)))
        if group not in self._due:  # forget the groups of which none came back
            for other in list(self._due):
                self._expected(other)
        due, mine = self._due.setdefault(group, {}), request()
        if mine in due or len(due) < self._most:
            due[mine] = self._clock() + told
        return told

    def _expected(self, group: Hashable) -> dict[int, float]:
        over = self._clock() - EXPECTED_S
        due = {k: at for k, at in self._due.get(group, {}).items() if at >= over}
        if due:
            self._due[group] = due
        else:
            self._due.pop(group, None)
        return due
