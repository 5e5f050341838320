"""Drafts for the likeliest verdicts on a draft, made while it is being verified.

Saguaro (arXiv 2603.03251). :class:`paceline.shapes.fan.Fan` has the tree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from paceline.drafters.base import Drafter, at_once
from paceline.shapes.fan import Fan, fan_budget
from paceline.types import Draft
from paceline.view import SessionView

FIRST_FAN = 4.0
"""Times as long as a chain's: what a fan is expected to take before one was drafted."""
LATE_S = 1e-4
PAUSE_ROUNDS = 64
LONGEST = 12
"""Tokens of a draft behind which there are fans, of up to 181 nodes."""


def can_fan(drafter: Drafter, drafts: Sequence[Draft] = ()) -> bool:
    """Whether a drafter can draft for several verdicts on these drafts.

    It has to grow trees and to take guesses back, and the trees must not be too large.
    """
    short = all(draft.num_nodes <= LONGEST for draft in drafts)
    return drafter.rewinds and hasattr(drafter, "expand") and short


def draft_fans(
    drafter: Drafter, sessions: Sequence[SessionView], drafts: Sequence[Draft]
) -> list[Draft]:
    """What follows the likeliest verdicts on chains that the drafter has made.

    Returns:
        for each session its draft with, behind paths of it, a verdict's token and the next draft.
    """
    chains = [draft.token_ids.tolist() for draft in drafts]
    names = [session.session_id for session in sessions]
    fan = Fan(dict(zip(names, chains, strict=True)))
    fanned: list[Any] = [Fanned(session, fan) for session in sessions]
    return at_once(drafter.propose(fanned, [fan_budget(len(chain)) for chain in chains]))


class Fanned:
    """A session for which a fan is to be drafted."""

    def __init__(self, session: SessionView, shape: Fan) -> None:
        self._session = session
        self.shape = shape
        self.stop_rule = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class SpareTime:
    """Whether a fan is drafted before the next frame comes, by what was measured."""

    def __init__(self) -> None:
        self._chain_s = self._fan_s = 0.0  # lately
        self._slack_s = 0.0  # from the end of a draft ahead to the next frame
        self._ended: tuple[float, bool] | None = None
        self._pause = 0

    @property
    def has_time(self) -> bool:
        """Whether frames come later than a fan takes."""
        if self._pause > 0 or not self._chain_s:
            return False
        more = (self._fan_s or FIRST_FAN * self._chain_s) - self._chain_s
        return self._slack_s > more

    def drafted(self, started: float, fans: bool) -> None:
        """A draft ahead that began then is made."""
        now = time.perf_counter()
        self._pause -= 1
        if fans:
            self._fan_s = _lately(self._fan_s, now - started)
        else:
            self._chain_s = _lately(self._chain_s, now - started)
        self._ended = now, fans

    def failed(self) -> None:
        """A draft ahead could not be made, perhaps for want of memory."""
        self._pause = PAUSE_ROUNDS

    def frame(self) -> None:
        """A frame begins."""
        if self._ended is None:
            return
        (ended, fans), self._ended = self._ended, None
        slack = time.perf_counter() - ended
        if fans and slack < LATE_S:  # it may have waited long
            self._pause = PAUSE_ROUNDS
        # As if a chain had been drafted.
        self._slack_s = _lately(self._slack_s, slack + fans * (self._fan_s - self._chain_s))


def _lately(known: float, seconds: float) -> float:
    """A moving mean of some ten rounds."""
    return known + 0.1 * (seconds - known) if known else seconds
