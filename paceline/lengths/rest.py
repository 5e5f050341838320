"""Rounds in which a session of method ``auto`` does not look for drafts, since that costs more.

Lookups and the choice among their drafts take time in every round, also where none is verified. One
session alone hardly notices. In a batch all sessions wait for the looks of each, a verified row
costs more of a round, and looking can take more than its drafts save. There a session looks where
its text repeats itself, which takes a microsecond to see.
"""

from __future__ import annotations

FIRST_ROUNDS = 0.125  # of AR: what the looks of a new session may take in any case
MOST_ROUNDS = 64  # longest rest
MEMORY = 0.9  # decay of what looking has saved, for each look
NEGLIGIBLE = 0.005  # share of the time that looking may always take
GRAM = 4  # tokens that have come before: the text repeats itself
FEWEST_SLOTS, MOST_SLOTS = 1 << 12, 1 << 15
SLOTS_PER_TOKEN = 8  # of the first text: one gram in eight, at most, seems known and is not
MOST_SKIPPED = 16  # repeats between two looks, where looks for repeats are in vain


class Rest:
    """Decides it for one session.

    Attributes:
        in_vain: whether nothing is to be found in the session's own text now.
    """

    __slots__ = (
        "_first", "_for_repeat", "_heeds", "_left", "_repeats", "_rounds", "_saved", "_skip",
        "_skips", "_waits", "in_vain",
    )  # fmt: skip

    def __init__(self) -> None:
        self.in_vain = False
        self._rounds = self._left = 0
        self._saved = 0.0  # seconds, beyond what looking took
        self._first = FIRST_ROUNDS  # what is left of it
        self._heeds = True  # whether a right draft ends a rest
        self._repeats = Repeats()
        self._waits = self._for_repeat = (
            False  # whether repeats end rests, and this look is for one
        )
        self._skip = self._skips = 0

    def goes_on(self, token_ids: list[int], *, in_crowd: bool) -> bool:
        """Whether this round is one of rest.

        In a crowd rests are long at once, and repeats end them: the more often looks for repeats
        were in vain, the more repeats pass without one.

        Args:
            token_ids: the session's text.
        """
        self._waits = in_crowd
        self.in_vain = self._waits and not self._repeats.again(token_ids)
        if not self._left:
            return False
        if self._waits and not self.in_vain:
            if not self._skip:
                self._left, self._for_repeat = 0, True
                return False
            self._skip -= 1
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
        if self._for_repeat:
            self._skips = 0 if saved > 0.0 else min(2 * self._skips or 1, MOST_SKIPPED)
            self._skip, self._for_repeat = self._skips, False
        self._first -= cost / round_seconds
        self._saved = MEMORY * self._saved + saved - cost
        pays = self._saved >= 0.0 or cost <= NEGLIGIBLE * round_seconds
        if pays or (self._first > 0.0 and not self._waits):
            self._rounds = 0
        else:
            longest = int(cost / (NEGLIGIBLE * round_seconds))  # one look in so many is negligible
            next_ = MOST_ROUNDS if self._waits else 2 * self._rounds or 1
            self._rounds = min(longest, MOST_ROUNDS, next_)
        self._left = self._rounds


class Repeats:
    """Whether the last tokens of a session have come before in it.

    A byte for each hash of GRAM tokens, not the tokens: memory stays small, and in a text much
    longer than the first one more grams seem known that are not.
    """

    __slots__ = ("_num_read", "_seen")

    def __init__(self) -> None:
        self._seen = bytearray()
        self._num_read = 0

    def again(self, token_ids: list[int]) -> bool:
        """Read what is new; whether the last GRAM tokens occurred before the last token did.

        Args:
            token_ids: those of the last call, and maybe more.
        """
        seen = self._seen
        if not seen:
            slots = FEWEST_SLOTS
            while slots < min(MOST_SLOTS, SLOTS_PER_TOKEN * len(token_ids)):
                slots *= 2
            seen = self._seen = bytearray(slots)
        mask, known = len(seen) - 1, 0
        for end in range(max(self._num_read + 1, GRAM), len(token_ids) + 1):
            slot = hash(tuple(token_ids[end - GRAM : end])) & mask
            known = seen[slot]
            seen[slot] = 1
        self._num_read = len(token_ids)
        return known == 1
