"""Which way to get tokens is the fastest right now: drafts from here, from the server, or none.

A remote drafter can lose against a server that just streams: a drafter that is seldom right pays a
round trip for each token. So a session measures. The rate of a rung is committed tokens per second
over a window of rounds. What AR would give is known without trying: the server says how long its
part of a round took, and a stream without drafts has one token each such time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rpc.remote_target import Mode

WINDOW_ROUNDS = 12  # rounds, and seconds, that a rung is judged by
WINDOW_SECONDS = 0.4
DOWN = 0.8  # a rung is left when it has less than this share of what another one gives
UP = 1.1  # and taken again when it had more than this
FIRST_RETRY_S, LONGEST_RETRY_S = 5.0, 160.0  # until the device is tried again, doubling


class Ladder:
    """Chooses a rung after each round. Not shared between sessions.

    Args:
        rungs: those that may be used, from the one to begin with down.
        clock: seconds; another one for simulations.
        on_change: called with the old and the new rung.
    """

    def __init__(
        self,
        rungs: Sequence[Mode],
        *,
        clock: Callable[[], float],
        on_change: Callable[[Mode, Mode], None] = lambda old, new: None,
    ) -> None:
        self._rungs = tuple(rungs)
        self._clock = clock
        self._on_change = on_change
        self.mode = self._rungs[0]
        self.rates: dict[Mode, float] = {}  # tokens per second when last tried
        self._ar_seconds: list[float] = []  # of the server, for each round of this window
        self._retry = FIRST_RETRY_S
        self._left_first_at = 0.0
        self._begin()

    def _begin(self) -> None:
        self._tokens = self._rounds = 0
        self._started = self._clock()
        self._settled = False

    def observe(self, tokens: int, server_seconds: float) -> Mode:
        """Take a round into account; the rung for the next one.

        Args:
            tokens: committed by the round.
            server_seconds: the server's own time for it; 0 where it is not known.
        """
        if not self._settled:
            # The first round pays for the prompt and the connection.
            self._begin()
            self._settled = True
            return self.mode
        self._tokens += tokens
        self._rounds += 1
        if server_seconds:
            self._ar_seconds.append(server_seconds)
        elapsed = self._clock() - self._started
        if self._rounds < WINDOW_ROUNDS or elapsed < WINDOW_SECONDS:
            return self.mode
        self.rates[self.mode] = self._tokens / elapsed
        chosen = self._choose()
        self._ar_seconds = self._ar_seconds[-WINDOW_ROUNDS:]
        if chosen is self.mode:
            self._tokens = self._rounds = 0
            self._started = self._clock()
        else:
            old, self.mode = self.mode, chosen
            if old is self._rungs[0]:
                self._left_first_at = self._clock()
            self._begin()
            self._on_change(old, chosen)
        return self.mode

    def _expected(self, mode: Mode) -> float:
        """Tokens per second of a rung: measured, or what AR gives by the server's own account."""
        if mode in self.rates:
            return self.rates[mode]
        # The fastest rounds had the fewest drafted tokens, and nobody beside them.
        known = sorted(self._ar_seconds)
        return 1.0 / known[len(known) // 4] if known else 0.0

    def _choose(self) -> Mode:
        here, first = self.rates[self.mode], self._rungs[0]
        others = [mode for mode in self._rungs if mode not in (self.mode, first)]
        if self.mode is not first:
            if here * UP < self.rates.get(first, 0.0):
                return first  # it was better where it was left
            if self._clock() - self._left_first_at >= self._retry:
                self._retry = min(LONGEST_RETRY_S, 2 * self._retry)
                return first
        best = max(others, key=self._expected, default=self.mode)  # of equals the higher rung
        if here < DOWN * self._expected(best):
            return best
        if self.mode is first:
            self._retry = FIRST_RETRY_S
        return self.mode
