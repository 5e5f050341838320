"""Who may hold KV memory, and who gives it back when it runs out.

A session is admitted when memory holds what it has so far and some rounds more, not the worst case
that it may come to. When the sessions that run outgrow the memory together, the youngest gives way:
its entries are freed, it waits at the head of the queue, and later goes on from its committed
tokens. The oldest never gives way, and everybody fits alone, so all of them come to their end.
"""

from __future__ import annotations

from paceline.session import Session
from paceline.types import Need

HEADROOM = 64
"""Tokens for which a session has room when it is admitted, unless it wants fewer."""


def round_entries(session: Session) -> int:
    """KV entries that a round may take beyond those of the committed tokens."""
    config = session.plan.config
    nodes = config.node_budget or 0
    if Need.SHARED_MODEL in session.plan.needs:
        # Drafting takes entries of the target, verification may take others; and some shapes
        # expand more nodes than they keep.
        depth = max(config.num_speculative_tokens or 0, config.length_max or 0)
        nodes += 1 + max(nodes, depth * (config.branching or 1))
    return nodes + 1


def most_entries(session: Session) -> int:
    """KV entries that a session can need at the worst: all its tokens and one draft."""
    return session.max_length + round_entries(session)


class Admission:
    """The sessions that hold KV memory. What several of them share counts for each.

    Args:
        capacity: KV entries in all.
        max_sessions: that may hold some at a time.
    """

    def __init__(self, capacity: int, max_sessions: int) -> None:
        self._capacity = capacity
        self._max_sessions = max_sessions
        self._admitted: dict[str, Session] = {}
        self._entries: dict[str, int] = {}  # of a round
        self._promised = 0  # entries if everybody comes to the worst

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    @property
    def num_entries(self) -> int:
        """Entries that the next step may take."""
        lengths = sum(session.length for session in self._admitted.values())
        return lengths + sum(self._entries.values())

    def fits(self, session: Session) -> bool:
        """Whether one more can be admitted, and go on for some rounds beside the others."""
        if len(self._admitted) >= self._max_sessions:
            return False
        if self._promised + most_entries(session) <= self._capacity:
            return True
        everybody = [*self._admitted.values(), session]
        growth = sum(min(HEADROOM, each.remaining) for each in everybody)
        wanted = session.length + round_entries(session) + growth
        return self.num_entries + wanted <= self._capacity or not self._admitted

    def add(self, session: Session) -> None:
        """Admit it."""
        self._admitted[session.session_id] = session
        self._entries[session.session_id] = round_entries(session)
        self._promised += most_entries(session)

    def remove(self, session: Session) -> bool:
        """It holds nothing any more; False if it did not before."""
        if self._admitted.pop(session.session_id, None) is None:
            return False
        self._promised -= session.max_length + self._entries.pop(session.session_id)
        return True

    def overdrawn(self) -> list[Session]:
        """Who has to give way before the next step: the youngest first."""
        if self._promised <= self._capacity:
            return []
        too_many = self.num_entries - self._capacity
        leaving: list[Session] = []
        for session in sorted(
            self._admitted.values(), key=lambda each: each.stats.started_at, reverse=True
        ):
            if too_many <= 0:
                break
            leaving.append(session)
            too_many -= session.length + self._entries[session.session_id]
        return leaving
