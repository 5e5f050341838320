"""Which sessions may hold KV memory, and which give it back when it runs out.

Admission asks for room for a session's tokens so far and a few more rounds, not for its worst case.
When the running sessions together outgrow the memory, the youngest gives way: its entries are
freed, it waits at the head of the queue, and later continues from its committed tokens. The oldest
never gives way, and each session fits into memory alone, so all of them finish. Priorities come
before age: a session with a higher number gives way first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.session import Session
from paceline.types import Need

HEADROOM = 64
"""Tokens that a session must have room for to be admitted, unless it generates fewer."""
MIN_PREFILL = 4
"""Fewest prompt tokens that a step reads, so that every prefill finishes."""


def round_entries(session: Session) -> int:
    """Most KV entries that a round takes beyond those of the committed tokens."""
    config = session.plan.config
    if session.branches is not None:
        return session.branches.num_nodes + 1
    nodes = config.node_budget or 0
    if Need.SHARED_MODEL in session.plan.needs:
        # Drafting takes entries in the target's cache, and verification may take others; some
        # shapes expand more nodes than they keep.
        depth = max(config.num_speculative_tokens or 0, config.length_max or 0)
        nodes += 1 + max(nodes, depth * (config.branching or 1))
    return nodes + 1


def most_entries(session: Session) -> int:
    """KV entries that a session needs in the worst case: all its tokens and one draft."""
    return session.max_length + round_entries(session)


class PrefillPace:
    """How many prompt tokens a step reads beside sessions that decode.

    A token of a long prompt costs as much as many tokens of a short one, so a fixed number of
    tokens does not bound a step's time. A step that takes longer than ``stretch`` times a step
    without prefill halves the number; otherwise the number grows slowly. Where prompts come so fast
    that no step is without prefill, steps with the least of it tell what those without would take.

    Args:
        most: upper bound in tokens, and the number read while no session decodes.
        stretch: None always reads ``most`` tokens.
    """

    def __init__(self, most: int, stretch: float | None) -> None:
        self._most = most
        self._stretch = stretch
        self._room = float(most)
        # Running means of the seconds of steps without prefill, by the number of sessions: its next
        # power of two, since a step of many sessions takes several times as long as one of few.
        self._alone: dict[int, float] = {}

    def room(self, any_decoding: bool) -> int:
        """Most prompt tokens that the next step reads."""
        return int(self._room) if any_decoding and self._stretch else self._most

    def share(
        self,
        prefilling: Sequence[Session],
        num_left: Callable[[Session], int],
        any_decoding: bool,
    ) -> list[tuple[Session, int]]:
        """How many prompt tokens of which sessions the next step reads.

        Half of the room is for the prompt that has waited longest, so that each is read in the end;
        the rest for those with least left, which gives the most prompts their first token soon.
        Priorities come before both.

        Args:
            prefilling: the oldest first.
        """
        if not prefilling:
            return []
        left = {session.session_id: num_left(session) for session in prefilling}
        oldest = min(prefilling, key=lambda session: session.priority)
        shortest = sorted(prefilling, key=lambda s: (s.priority, left[s.session_id]))
        room = self.room(any_decoding)
        kept = min((room + 1) // 2, left[oldest.session_id])
        room -= kept
        chosen = []
        for session in shortest:
            mine = kept if session is oldest else 0
            more = min(left[session.session_id] - mine, room)
            room -= more
            if mine + more:
                chosen.append((session, mine + more))
        return chosen

    def observe(self, seconds: float, num_decoding: int, num_tokens: int) -> None:
        """Learn from a step that verified for ``num_decoding`` sessions and read ``num_tokens``."""
        if self._stretch is None or not num_decoding:
            return
        alone = self._alone_s(num_decoding)
        too_long = bool(alone) and seconds > self._stretch * alone
        size = num_decoding.bit_length()
        if not num_tokens:
            before = self._alone.get(size, seconds)
            self._alone[size] = 0.9 * before + 0.1 * min(seconds, 2 * before)
        elif too_long and num_tokens <= MIN_PREFILL:  # not because of the prompts
            self._alone[size] = min(seconds, 2 * alone)
        elif too_long:
            self._room = max(MIN_PREFILL, min(self._room, num_tokens) / 2)
        elif num_tokens >= int(self._room):
            self._room = min(self._most, 1.1 * self._room + 1)

    def _alone_s(self, num_decoding: int) -> float:
        """Seconds of a step without prefill; 0 while nothing is known.

        Where such a number of sessions is new, at most as much longer than with the nearest number
        that is known as there are more sessions.
        """
        size = num_decoding.bit_length()
        if not self._alone:
            return 0.0
        nearest = min(self._alone, key=lambda known: abs(known - size))
        return self._alone[nearest] * 2.0 ** max(0, size - nearest)


class KvAdmission:
    """The sessions that hold KV memory. An entry that several sessions share counts for each.

    Args:
        capacity: KV entries in all.
        max_sessions: how many sessions may hold entries at a time.
    """

    def __init__(self, capacity: int, max_sessions: int) -> None:
        self._capacity = capacity
        self._max_sessions = max_sessions
        self._admitted: dict[str, Session] = {}
        self._entries: dict[str, int] = {}  # of a round
        self._promised = 0  # entries if every session reaches its worst case

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    @property
    def admitted(self) -> list[Session]:
        return list(self._admitted.values())

    @property
    def num_entries(self) -> int:
        """KV entries in use after the next step, at most."""
        lengths = sum(session.length for session in self._admitted.values())
        return lengths + sum(self._entries.values())

    def fits(self, session: Session) -> bool:
        """Whether the session can be admitted and run some rounds beside the others."""
        if len(self._admitted) >= self._max_sessions:
            return False
        if self._promised + most_entries(session) <= self._capacity:
            return True
        together = [*self._admitted.values(), session]
        growth = sum(min(HEADROOM, each.remaining) for each in together)
        wanted = session.length + round_entries(session) + growth
        return self.num_entries + wanted <= self._capacity or not self._admitted

    def add(self, session: Session) -> None:
        """Admit the session."""
        self._admitted[session.session_id] = session
        self._entries[session.session_id] = round_entries(session)
        self._promised += most_entries(session)

    def remove(self, session: Session) -> bool:
        """Forget a session that holds nothing any more; False if it was not admitted."""
        if self._admitted.pop(session.session_id, None) is None:
            return False
        self._promised -= session.max_length + self._entries.pop(session.session_id)
        return True

    def overdrawn(self) -> list[Session]:
        """The sessions that must give way before the next step.

        Those with the highest priority number first, of them the youngest first.
        """
        if self._promised <= self._capacity:
            return []
        too_many = self.num_entries - self._capacity
        leaving: list[Session] = []
        for session in sorted(
            self._admitted.values(),
            key=lambda each: (each.priority, each.stats.started_at),
            reverse=True,
        ):
            if too_many <= 0:
                break
            leaving.append(session)
            too_many -= session.length + self._entries[session.session_id]
        return leaving
