"""Which session drafts where: a target's choice among its drafters, by the waits that it measures.

No process and no network: the simulator runs the same code with a clock of its own.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

SMOOTHING = 0.15
"""Weight of a new wait in the mean."""
SLOW = 0.02
"""The same for what a session adds to the wait, which shows only when numbers change."""
DOUBT = 0.05
"""Variance of the number of sessions from which on its effect is believed."""
PAYS = 0.85
"""A session moves only if its wait is expected to shrink to this share, or further."""
REBALANCE_S = 0.5
"""Seconds between two looks; in the meantime the waits show what the last moves did."""
FORGET_S = 30.0
"""Seconds after which a wait is old: a drafter that was slow gets a session again, to see."""


@dataclass(slots=True)
class DrafterLoad:
    """What a target knows of the load of a drafter.

    Attributes:
        sessions: of all targets at this drafter, as it said last, with own moves since then.
        wait_s: mean time from asking for drafts to having them, weighted to the last ones.
        shared_by: mean number of sessions during these waits.
        measured_at: when the last wait ended, in seconds of the caller's clock.
    """

    sessions: int = 0
    wait_s: float = 0.0
    shared_by: float = 1.0
    measured_at: float = -math.inf
    # Slow means of sessions and wait, and their variance and covariance: what do sessions add?
    slow: tuple[float, float] = (0.0, 0.0)
    variance: float = 0.0
    covariance: float = 0.0

    def observe(self, seconds: float, now: float) -> None:
        """Record how long a frame waited for its drafts."""
        known, sessions = self.is_known(now), max(1, self.sessions)
        weight = SMOOTHING if known else 1.0
        self.wait_s += weight * (seconds - self.wait_s)
        self.shared_by += weight * (sessions - self.shared_by)
        self.measured_at = now
        if not known:
            self.slow, self.variance, self.covariance = (sessions, seconds), 0.0, 0.0
        more, longer = sessions - self.slow[0], seconds - self.slow[1]
        self.slow = self.slow[0] + SLOW * more, self.slow[1] + SLOW * longer
        self.variance += SLOW * ((1 - SLOW) * more * more - self.variance)
        self.covariance += SLOW * ((1 - SLOW) * more * longer - self.covariance)

    def is_known(self, now: float) -> bool:
        """Whether a wait was measured lately."""
        return now - self.measured_at < FORGET_S

    def expected(self, sessions: int, growth: float) -> float:
        """The wait with so many sessions, in seconds.

        Args:
            growth: share of the wait that each session adds, at most ``1 / shared_by``.
        """
        growth = min(growth, 1 / self.shared_by)
        return self.wait_s * (1 + growth * (max(1, sessions) - self.shared_by))


class Move(NamedTuple):
    """A session that drafts elsewhere from now on."""

    session_id: str
    source: str


class DrafterPlaces:
    """The drafter of each session of one target.

    A new session goes where the shortest wait is expected once it is there. A move is judged by
    that wait, too, so that sessions do not swing back and forth. Several targets see the same new
    drafter at the same time. So a target moves only the share of its sessions that evens out the
    waits if all targets do the same; what is less than a session adds up until it is one. A drafter
    that was not measured lately gets one session first.

    Args:
        phase: in [0, 1), what has added up in the beginning; targets should differ. None: random.

    Attributes:
        of: address by session; "" for a session that no drafter drafts for.
    """

    def __init__(self, phase: float | None = None) -> None:
        self.of: dict[str, str] = {}
        self._phase = random.random() if phase is None else phase
        self._owed = self._phase
        self._next_look = -math.inf

    def place(self, session_id: str, loads: Mapping[str, DrafterLoad], now: float) -> str:
        """The drafter of a session: the one it has, if that is among ``loads``, else the best one.

        Args:
            loads: of the drafters that answer, by address.
            now: seconds, of any clock that is used throughout.
        """
        address = self.of.get(session_id, "")
        if address in loads:
            return address
        forecast = Forecast(loads, now)
        chosen = min(loads, key=lambda a: forecast.wait(a, 1), default="")
        self.of[session_id] = chosen
        if chosen:
            loads[chosen].sessions += 1
        return chosen

    def rebalance(
        self, movable: Collection[str], loads: Mapping[str, DrafterLoad], now: float
    ) -> list[Move]:
        """Move sessions from the drafter with the longest wait to the best one, if it pays.

        Looks every ``REBALANCE_S`` seconds, however often it is called. It moves the sessions that
        were placed last, since a drafter reads the shortest contexts soonest.

        Args:
            movable: ids of the sessions that have no draft under way.
        """
        if now < self._next_look:
            return []
        self._next_look = now + REBALANCE_S
        own = Counter(self.of.values())
        forecast = Forecast(loads, now)
        sources = [a for a in loads if own[a] and loads[a].is_known(now)]
        source = max(sources, key=lambda a: forecast.wait(a, 0), default="")
        moves: list[Move] = []
        for session_id in reversed(list(self.of)):
            if not source or self.of[session_id] != source or session_id not in movable:
                continue
            target = min(loads, key=lambda a: forecast.wait(a, int(a != source)))
            share = forecast.wait(target, 1) / forecast.wait(source, 0)
            if target == source or share > PAYS:
                break
            if own[target] and not loads[target].is_known(now):
                break  # the first session there will show how long it waits
            if not moves:
                self._owed += own[source] * (1 - share) / 2
            if self._owed < 1:
                return moves
            self._owed -= 1
            self.of[session_id] = target
            own[target] += 1
            loads[source].sessions -= 1
            loads[target].sessions += 1
            moves.append(Move(session_id, source))
        self._owed = self._phase
        return moves


class Forecast:
    """What waits are expected with other numbers of sessions.

    What a session adds is a slope within drafters, of all drafters together, so that drafters may
    differ in speed. As long as numbers have not changed, it is taken to be a drafter's wait divided
    by its sessions, which is the most that it can be.
    """

    def __init__(self, loads: Mapping[str, DrafterLoad], now: float) -> None:
        self._loads = loads
        self._known = {a: load for a, load in loads.items() if load.is_known(now)}
        known = [load for load in self._known.values() if load.wait_s > 0]
        self._slope = sum(load.covariance / load.wait_s for load in known)
        self._certain = sum(load.variance for load in known)

    def wait(self, address: str, more: int) -> float:
        """The wait at a drafter if it had ``more`` sessions, in seconds.

        One that was not measured lately counts as the fastest; where none was, sessions count.
        """
        sessions = self._loads[address].sessions + more
        like = [self._known[address]] if address in self._known else self._known.values()
        waits = [load.expected(sessions, self._growth(load)) for load in like]
        return min(waits, default=float(max(1, sessions)))

    def _growth(self, load: DrafterLoad) -> float:
        slope = self._slope + DOUBT / load.shared_by
        return max(0.0, slope / (self._certain + DOUBT))
