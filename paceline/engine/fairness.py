"""What each tenant gets of an engine: time of its steps, and places in KV memory.

Time is shared by deficit round robin (Shreedhar and Varghese 1995) with measured seconds. Before a
step all tenants get credit by their weights, until the one with most has a quantum. The step serves
those that are not in debt, each with all of its sessions, so that batches stay large, and what it
took is taken off their credit, by rows. So tenants with about as much work as each other share
every step, and one with more sits out until the others have had as much time.

Drafts of a device or of another replica come a moment after the step before. The next step waits
for them where it is the turn of their tenant: else that tenant would have one round for each step
of the others, however long theirs are. The wait is charged to it.

With one tenant there is nothing to share, and nothing is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.session import Session

WAIT_S = 0.005
"""Most seconds that a step waits for drafts of a tenant whose turn it is."""
MAX_VAIN = 6  # a tenant whose drafts never come in time is waited for at each 64th step


@dataclass(slots=True)
class _Share:
    """A tenant: its unfinished sessions, its places in KV memory, its credit in seconds."""

    weight: float = 1.0
    num_sessions: int = 0
    num_places: int = 0
    credit: float = 0.0
    num_vain: int = 0  # waits in a row in which no draft of it came
    num_skipped: int = 0  # waits that it goes without, after those

    @property
    def by_weight(self) -> float:
        return self.credit / self.weight

    @property
    def places_wanted(self) -> float:
        """Places by weight, with one more."""
        return (self.num_places + 1) / self.weight

    @property
    def places_left(self) -> float:
        """Places by weight, with one less."""
        return (self.num_places - 1) / self.weight


class FairShares:
    """The shares of the tenants with sessions, and of those that have just left."""

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}
        # Seconds, the mean of steps: with less, tenants that differ by a part of a step would take
        # turns instead of sharing.
        self._quantum = 0.01

    @property
    def contested(self) -> bool:
        """Whether several tenants share the engine."""
        return len(self._shares) > 1

    def add(self, session: Session) -> None:
        """Count a new session; its weight is from now on its tenant's."""
        share = self._shares.get(session.tenant)
        if share is None:
            share = self._shares[session.tenant] = _Share(credit=self._quantum * session.weight)
        share.weight = session.weight
        share.num_sessions += 1

    def remove(self, session: Session) -> None:
        """Forget a session that has ended."""
        share = self._shares[session.tenant]
        share.num_sessions -= 1
        # What it has used stays, or a tenant would gain by ending its sessions and opening others.
        if not any(share.num_sessions for share in self._shares.values()):
            self._shares.clear()

    # --- places ---------------------------------------------------------------------------------

    def took_place(self, session: Session) -> None:
        """A session has got a place in KV memory."""
        self._shares[session.tenant].num_places += 1

    def left_place(self, session: Session) -> None:
        """A session has given its place up."""
        self._shares[session.tenant].num_places -= 1

    def first(self, waiting: Sequence[Session]) -> Session:
        """Whose turn it is: of the tenant with the fewest places by weight the session with the
        lowest priority number, and of those the first one."""

        def turn(session: Session) -> tuple[float, int]:
            share = self._shares[session.tenant]
            return share.places_wanted if self.contested else 0.0, session.priority

        return min(waiting, key=turn)

    def gives_way(self, waiting: Session, running: Sequence[Session]) -> Session | None:
        """The session that must give its place to a waiting one; None: none must.

        It is the youngest one of those with the highest priority number of the tenant with the
        most places by weight, if that tenant still has no fewer afterwards than the other one.
        """
        most = max(
            (self._shares[session.tenant] for session in running),
            key=lambda share: share.places_left,
            default=None,
        )
        if most is None or most.places_left < self._shares[waiting.tenant].places_wanted:
            return None
        candidates = (s for s in running if self._shares[s.tenant] is most)
        return max(candidates, key=lambda session: (session.priority, session.stats.started_at))

    def may_wait(self, tenant: str, num_waiting: Counter[str], most: int) -> bool:
        """Whether one more of a tenant's sessions may queue where ``most`` may; the last places are
        shared."""
        if num_waiting.total() < most:
            return True
        num_tenants = len(num_waiting | Counter({tenant: 1}))
        return num_waiting[tenant] < most // num_tenants and num_tenants > 1

    # --- time -----------------------------------------------------------------------------------

    def served(self, sessions: Sequence[Session]) -> set[str]:
        """The tenants that the next step serves, of those of the sessions that could run now."""
        present = {session.tenant for session in sessions}
        if not (present and self.contested):
            return present
        most = max(self._shares[tenant].by_weight for tenant in present)
        for tenant, share in list(self._shares.items()):
            share.credit += (self._quantum - most) * share.weight
            if tenant not in present:  # time that it does not use is not kept for it
                most_kept = self._quantum * share.weight
                share.credit = min(share.credit, most_kept)
                if not share.num_sessions and share.credit == most_kept:
                    del self._shares[tenant]
        return {tenant for tenant in present if self._shares[tenant].credit >= 0}

    def awaited(self, ready: Sequence[Session], drafting: Sequence[Session]) -> set[str]:
        """The tenants whose drafts a step should wait for a moment, while others could run.

        Args:
            ready: the sessions that could run now.
            drafting: those whose drafts are under way.
        """
        present = {session.tenant for session in ready}
        most = max(self._shares[tenant].by_weight for tenant in present) + self._quantum
        found = set()
        for tenant in {session.tenant for session in drafting} - present:
            share = self._shares[tenant]
            if share.by_weight > most:
                if not share.num_skipped:
                    found.add(tenant)
                share.num_skipped = max(0, share.num_skipped - 1)
        return found

    def waited(self, seconds: float, tenants: set[str], arrived: set[str]) -> None:
        """Charge a wait for the drafts of tenants, of which some have come."""
        for tenant in tenants & self._shares.keys():
            share = self._shares[tenant]
            share.credit -= seconds / len(tenants)
            share.num_vain = 0 if tenant in arrived else min(MAX_VAIN, share.num_vain + 1)
            share.num_skipped = 2**share.num_vain - 1

    def charge(self, seconds: float, rows: Iterable[tuple[Session, int]]) -> None:
        """Charge a step to the tenants of its sessions, by the rows computed for each."""
        counts: Counter[str] = Counter()
        for session, count in rows:
            counts[session.tenant] += count
        total = counts.total()
        self._quantum += 0.1 * (seconds - self._quantum)
        for tenant, count in counts.items():
            if tenant in self._shares:  # an ended session may have been the last one
                self._shares[tenant].credit -= seconds * count / total
