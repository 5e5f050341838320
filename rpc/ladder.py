"""The fastest way to get tokens right now: with drafts from here, from the server, or none.

A device can lose against a server that just streams: where its drafts are seldom right it pays a
round trip for each token. So a client measures. The rate of a mode is committed tokens per second
over a window of rounds. The rate of AR can be told without a trial: the server says how long its
part of a round took, and a stream without drafts has one token in each such time.

The ladder takes the mode with the best rate. Now and then it tries another one, since texts and
networks change. How often depends on what trials have cost: all trials of a mode together take no
more than a small share of the time of generations.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

WINDOW_ROUNDS = 12  # rounds, and seconds, in which a mode is measured
WINDOW_SECONDS = 0.4
HOPELESS_ROUNDS = 4  # enough for a mode
HOPELESS = 0.6  # with less than this share of another mode's rate
DOWN = 0.95  # the ladder leaves a mode with less than this share of another one's rate
# The ladder tries AR only if it expects more than this share of the current rate. AR may give twice
# what is expected: the server's caches get cold between the rounds of a device that drafts long.
PROMISING = 0.4
TRIAL_SHARE = 0.03  # of all time, for the trials of a mode
FIRST_TRY_S, LONGEST_PAUSE_S = 2.0, 160.0  # until the first trial, and between trials at most
PAUSE_S = 5.0  # between trials of a mode, doubling
ELSEWHERE_S = 600.0  # without a generation: the network may be another one


class Mode(enum.Enum):
    """How a session gets its tokens from a server. Each gives the same ones."""

    DEVICE = "device"  # this machine drafts, the server verifies
    SERVER = "server"  # the server drafts with its default method, and streams
    AR = "ar"  # the server streams without drafts


class Ladder:
    """Chooses a mode after each round. It belongs to a client, and keeps what it has learned.

    Args:
        modes: the allowed modes, beginning with the first.
        clock: seconds; simulations have one of their own.
        on_change: called with the old and the new mode.
    """

    def __init__(
        self,
        modes: Sequence[Mode],
        *,
        clock: Callable[[], float],
        on_change: Callable[[Mode, Mode], None] = lambda old, new: None,
    ) -> None:
        self._modes = tuple(modes)
        self._clock = clock
        self._on_change = on_change
        self.mode = self._modes[0]
        self.rates: dict[Mode, float] = {}  # tokens per second when last tried
        self._ar_seconds: list[float] = []  # of the server, for each round of this window
        self._trying = False
        now = clock()
        self._try_at = dict.fromkeys(self._modes, now + FIRST_TRY_S)
        self._pauses = dict.fromkeys(self._modes, PAUSE_S / 2)
        self._seen = now  # when the last round came
        self.begin()

    def begin(self) -> None:
        """A generation begins, or a mode: the next round pays for the prompt and the connection.

        Pauses between trials stand still without a generation: otherwise a client that generates
        for a second in each minute would be busy with trials.
        """
        now = self._clock()
        idle, self._seen = now - self._seen, now
        if idle < ELSEWHERE_S:
            self._try_at = {mode: at + idle for mode, at in self._try_at.items()}
        self._began = self._started = now
        self._tokens = self._rounds = 0
        self._settled = False

    def observe(self, tokens: int, server_seconds: float) -> Mode:
        """Take a round into account, and return the mode for the next one.

        Args:
            tokens: committed by the round.
            server_seconds: the server's own time for it; 0: not known.
        """
        self._seen = self._clock()
        if not self._settled:
            self._started = self._seen
            self._settled = True
            return self.mode
        self._tokens += tokens
        self._rounds += 1
        if server_seconds:
            self._ar_seconds.append(server_seconds)
        elapsed = self._clock() - self._started
        if elapsed < WINDOW_SECONDS or self._rounds < HOPELESS_ROUNDS:
            return self.mode
        rate = self._tokens / elapsed
        hopeless = rate < HOPELESS * self._expected(self._best_other())
        if self._rounds < WINDOW_ROUNDS and not hopeless:
            return self.mode
        known = self.rates.get(self.mode)
        self.rates[self.mode] = rate if known is None or self._trying else (known + rate) / 2
        self._go(self._choose())
        self._ar_seconds = self._ar_seconds[-WINDOW_ROUNDS:]
        return self.mode

    def _best_other(self) -> Mode:
        others = [mode for mode in self._modes if mode is not self.mode]
        return max(others, key=self._expected, default=self.mode)  # of equals the first

    def _expected(self, mode: Mode) -> float:
        """Tokens per second of a mode: measured, or for AR from the server's own times."""
        if mode in self.rates:
            return self.rates[mode]
        if mode is Mode.DEVICE or not self._ar_seconds:
            return 0.0
        # The fastest rounds have the fewest drafted tokens, and no other work beside them.
        return 1.0 / sorted(self._ar_seconds)[len(self._ar_seconds) // 4]

    def _choose(self) -> Mode:
        here, best, now = self.rates[self.mode], self._best_other(), self._clock()
        better = self._expected(best)
        if here < (1.0 if self._trying else DOWN) * better:
            # Going there and back costs a round trip and a prompt each.
            there = self._started - self._began
            lost = 2 * there + (now - self._started) * (1.0 - here / better)
            pause = max(2 * self._pauses[self.mode], lost / TRIAL_SHARE)
            self._pauses[self.mode] = pause = min(LONGEST_PAUSE_S, pause)
            self._try_at[self.mode] = now + pause
            self._trying = False
            return best
        if self._trying:  # it is the best now
            self._pauses = dict.fromkeys(self._modes, PAUSE_S / 2)
            self._trying = False
        due = [mode for mode in self._modes if mode is not self.mode and self._is_due(mode, here)]
        if not due:
            return self.mode
        self._trying = True
        return min(due, key=lambda mode: self._try_at[mode])

    def _is_due(self, mode: Mode, here: float) -> bool:
        if self._clock() < self._try_at[mode]:
            return False
        unknown = mode is Mode.AR and mode not in self.rates and bool(self._ar_seconds)
        return not unknown or self._expected(mode) > PROMISING * here

    def _go(self, chosen: Mode) -> None:
        if chosen is self.mode:
            self._tokens = self._rounds = 0
            self._started = self._clock()
            return
        old, self.mode = self.mode, chosen
        self.begin()
        self._on_change(old, chosen)
