"""Rounds in which a session of method ``auto`` does not look for drafts, since that costs more.

Lookups and the choice among their drafts take time in every round, also where none is verified. One
session alone hardly notices. In a batch all sessions wait for the looks of each, a verified row
costs more of a round, and looking can take more than its drafts save.
"""

from __future__ import annotations

FIRST_ROUNDS = 0.125  # of AR: what the looks of a new session may take in any case
MOST_ROUNDS = 64  # longest rest
MEMORY = 0.9  # decay of what looking has saved, for each look
NEGLIGIBLE = 0.005  # share of the time that looking may always take


class Rest:
    """Decides it for one session."""

    __slots__ = ("_first", "_heeds", "_left", "_rounds", "_saved")

    def __init__(self) -> None:
        self._rounds = self._left = 0
        self._saved = 0.0  # seconds, beyond what looking took
        self._first = FIRST_ROUNDS  # what is left of it
        self._heeds = True  # whether a right draft ends a rest

    def goes_on(self) -> bool:
        """Whether this round is one of rest."""
        if not self._left:
            return False
        self._left -= 1
        return True

    def end(self) -> None:
        """Look again in the next round: a draft that was not verified turned out right.

        Where verification costs so much that even then nothing is chosen, once is enough.
        """
        if self._left and self._heeds:
            self._left, self._heeds = 0, False

    def looked(self, saved: float, cost: float, round_seconds: float) -> None:
        """Learn from a look, and decide how long to rest.

        Args:
            saved: seconds that the choice is expected to save against AR.
            cost: seconds that looking takes if every session of the batch looks.
            round_seconds: of a round of AR.
        """
        self._heeds = self._heeds or saved > 0.0
        self._first -= cost / round_seconds
        self._saved = MEMORY * self._saved + saved - cost
        pays = self._saved >= 0.0 or cost <= NEGLIGIBLE * round_seconds
        if pays or self._first > 0.0:
            self._rounds = 0
        else:
            longest = int(cost / (NEGLIGIBLE * round_seconds))  # one look in so many is negligible
            self._rounds = min(longest, MOST_ROUNDS, 2 * self._rounds or 1)
        self._left = self._rounds
