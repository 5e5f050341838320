"""Pre-verify and post-verify: drafter and target work at the same time.

PEARL, Liu et al. 2024 (arXiv 2408.11850). After a rejection, the target runs a round without a
draft while the drafter makes the next one. This checks the draft's *first* token before the rest of
the draft exists (pre-verify). While everything is accepted, the target verifies one draft as the
drafter makes the next (post-verify), so more than gamma tokens in a row may be accepted.

With the target in this process, a thread drafts (:mod:`paceline.engine.ahead`). Whether that is
faster than one after the other depends on the processors that are free, so rounds of both kinds
tell: the kind with more tokens per second is used, and the other one tried again now and then.
"""

from __future__ import annotations

from collections import deque
from statistics import mean, median
from typing import TYPE_CHECKING

from paceline.lengths.base import LengthPart
from paceline.models.threads import usable_cores
from paceline.types import Budget, Load, Need, Outcome, StopRule

if TYPE_CHECKING:
    from paceline.view import SessionView


TRIAL_ROUNDS = 8  # of one kind in a row, while both are tried
LEAST_ROUNDS = 24  # of either kind, until one is chosen
# Until the other kind is tried again. A wrong choice of rounds that overlap must not last; trying
# these takes 3 % of the rounds.
ROUNDS_BETWEEN = {False: 256, True: 64}
KNOWN_ROUNDS = 64  # the last ones of a kind count
LEAST_GAIN = 1.05  # of overlapping: estimates are no more accurate


class Overlap:
    """Whether drafter and target in this process work at the same time: what is faster here.

    The sessions of an engine share it. With one processor they work one after the other.
    """

    def __init__(self) -> None:
        self.now = False
        self._left = TRIAL_ROUNDS if usable_cores().usable > 1 else None  # None: it stays so
        self._tries = True
        self._tokens, self._seconds = (
            {kind: deque[float](maxlen=KNOWN_ROUNDS) for kind in (False, True)} for _ in range(2)
        )

    def observe(self, beside: bool, tokens: int, seconds: float) -> None:
        """Learn from a round that committed ``tokens`` tokens."""
        self._tokens[beside].append(tokens)
        self._seconds[beside].append(seconds)
        if self._left is None or beside is not self.now:
            return
        self._left -= 1
        if self._left > 0:
            return
        if min(map(len, self._seconds.values())) < LEAST_ROUNDS:
            self.now, self._left = not self.now, TRIAL_ROUNDS
            return
        best = self._speed(True) > LEAST_GAIN * self._speed(False)
        if self._tries or best is not self.now:
            self.now, self._left, self._tries = best, ROUNDS_BETWEEN[best], False
        else:
            self.now, self._left, self._tries = not self.now, TRIAL_ROUNDS, True

    def _speed(self, beside: bool) -> float:
        """Tokens per second; the median of the seconds, as other work disturbs some rounds."""
        return mean(self._tokens[beside]) / median(self._seconds[beside])


class Pearl:
    """Asks for no draft when the round would wait for it; drafts ahead have ``gamma`` tokens.

    With the target on another machine, it verifies a draft made ahead on a right guess without
    asking this controller. So the loop asks only at the start and after a rejection, and both mean
    pre-verify. A target in this process works beside the drafter where that is faster; otherwise
    every draft has ``gamma`` tokens.

    Attributes:
        ahead: gamma, the depth of drafts that are made while the target verifies.
    """

    needs: frozenset[Need] = frozenset()
    stop_rule: StopRule | None = None

    def __init__(self, gamma: int, nodes: int, overlap: Overlap) -> None:
        self.ahead = gamma
        self._nodes = nodes
        self._overlap = overlap
        self._is_away = True  # the target, until a round shows otherwise
        self._asked: Budget | None = None

    def budget(self, session: SessionView, load: Load) -> Budget:
        """No draft (pre-verify) of a target elsewhere; gamma tokens, beside this one or before."""
        if self._is_away:
            return Budget(0, 0)
        self._asked = Budget(self.ahead, self._nodes, beside=self._overlap.now)
        return self._asked

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        self._is_away = outcome.verification.verdict is not None
        if self._asked is not None:
            seconds = draft_seconds + verify_seconds
            self._overlap.observe(self._asked.beside, len(outcome.token_ids), seconds)


PEARL = LengthPart(
    make=lambda knobs, context: Pearl(
        knobs.num_speculative_tokens or 0,
        knobs.node_budget or 0,
        context.shared(("pearl", knobs), Overlap),
    )
)
