"""Counts what a tenant uses, against its quotas: of one server, or of several that share them.

Servers that share have a ledger (``deployments/ledger.py``), which has the tenant's quotas. Each
server holds a *share* of every quota, asks for more before it has used it up, and gives back what
it does not use. So a round costs no call to the ledger.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.errors import ResourceExhausted
from paceline.rpc.tenants import Quotas

OF_OPENS = ("opens_per_second", "tokens_per_minute")
OF_ROUNDS = ("rounds_per_second", "tokens_per_minute")
"""The rates that an open, and a round, need."""

SLICE = 8
"""All servers together hold at most the SLICE-th part of a burst unused."""
IDLE_RETURN_S = 1.0
"""Seconds after which a server gives back what it holds of a rate and has not used."""
PLACE_S = 0.1
"""Seconds for which a server keeps a place of ``max_sessions`` for a session that waited for it."""
_SHORTEST_RETRY_S = 0.05


class QuotaExceeded(ResourceExhausted):
    """A quota of a tenant or a limit of the server; the session itself is unharmed.

    Attributes:
        quota: its name.
    """

    def __init__(self, message: str, quota: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.quota = quota


class Bucket:
    """A rate a second, and ``burst`` at once. An overdraft is a debt to wait for."""

    __slots__ = ("_at", "_burst", "_clock", "_rate", "level")

    def __init__(
        self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self.level = burst
        self._at = clock()

    def wait(self, amount: float) -> float:
        """Seconds until ``amount`` is there; 0 when it is."""
        now = self._clock()
        self.level = min(self._burst, self.level + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, (amount - self.level) / self._rate)

    def take(self, amount: float) -> None:
        """Take it, even where it is not there yet."""
        self.level -= amount

    def give(self, amount: float) -> None:
        """Give some back."""
        self.level = min(self._burst, self.level + amount)


def rates_of(quotas: Quotas) -> dict[str, tuple[float, float]]:
    """Rate a second and burst of each quota that is a rate."""
    rates = {}
    for name in ("opens_per_second", "rounds_per_second"):
        rate = getattr(quotas, name)
        if rate is not None:
            rates[name] = (rate, max(1.0, rate))
    if quotas.tokens_per_minute is not None:
        rates["tokens_per_minute"] = (quotas.tokens_per_minute / 60, quotas.tokens_per_minute)
    return rates


class Account:
    """What a tenant has used, or all callers together.

    Attributes:
        num_sessions: that are open.
        num_opens, num_tokens: so far.
    """

    def __init__(self, who: str, quotas: Quotas) -> None:
        self.who = who
        self.num_sessions = 0
        self.num_opens = 0
        self.num_tokens = 0
        self.set(quotas)

    def set(self, quotas: Quotas) -> None:
        """Change the quotas."""
        self.quotas = quotas
        self.rates = {name: Bucket(*rate) for name, rate in rates_of(quotas).items()}

    @property
    def max_sessions(self) -> int | None:
        """How many sessions may be open here."""
        return self.quotas.max_sessions

    def check_open(self, session: bool) -> None:
        """Raise QuotaExceeded if nothing may be opened.

        Args:
            session: it is a session, which stays open.
        """
        limit = self.max_sessions
        if session and limit is not None and self.num_sessions >= limit:
            raise QuotaExceeded(
                f"{self.who} has {self.quotas.max_sessions} sessions open (max_sessions)",
                "max_sessions",
            )
        self._check(OF_OPENS)

    def count_open(self, session: bool) -> None:
        self.num_sessions += session
        self.num_opens += 1
        self._take("opens_per_second", 1.0)

    def check_round(self) -> None:
        """Raise QuotaExceeded if the tenant has to wait before its next round."""
        self._check(OF_ROUNDS)

    def count_round(self) -> None:
        self._take("rounds_per_second", 1.0)

    def count_tokens(self, tokens: int) -> None:
        self.num_tokens += tokens
        self._take("tokens_per_minute", tokens)

    def release_session(self) -> None:
        """A session has ended."""
        self.num_sessions -= 1

    def _take(self, quota: str, amount: float) -> None:
        bucket = self.rates.get(quota)
        if bucket is not None:
            bucket.take(amount)

    def _check(self, quotas: tuple[str, ...]) -> None:
        for quota in quotas:
            bucket = self.rates.get(quota)
            wait = 0.0 if bucket is None else bucket.wait(1.0)
            if wait > 0:
                limit = getattr(self.quotas, quota)
                raise QuotaExceeded(f"{self.who} is over {quota} ({limit:g})", quota, wait)


# --- shared by several servers ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RateAsk:
    """What a server tells the ledger of one rate.

    Attributes:
        debt: used beyond its share: to be paid in any case.
        returned: of its share, which it does not use.
        wanted: whole units more.
    """

    debt: float = 0.0
    returned: float = 0.0
    wanted: int = 0


@dataclass(frozen=True, slots=True)
class QuotaAsk:
    """What a server tells the ledger of one tenant.

    Attributes:
        sessions: places that it keeps of ``max_sessions``, used or not.
        more_sessions: places that it wants beyond.
    """

    quotas: Quotas
    rates: dict[str, RateAsk] = field(default_factory=dict)
    sessions: int = 0
    more_sessions: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether the server uses nothing and wants nothing."""
        rates = any(each != RateAsk() for each in self.rates.values())
        return not (rates or self.sessions or self.more_sessions)


@dataclass(frozen=True, slots=True)
class QuotaAnswer:
    """What the ledger answers.

    Attributes:
        rates: units that the server may use, and seconds until there will be another one.
        sessions: places that the server has now.
    """

    rates: dict[str, tuple[int, float]]
    sessions: int


class Share(Bucket):
    """What a server holds of a rate. While the ledger is away it fills by itself, at its part."""

    __slots__ = ("_full", "_retry_at", "_used_at", "_waiting")

    def __init__(
        self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(0.0, burst, clock)
        self.level = 0.0
        self._full = (rate, burst)
        self._retry_at = 0.0
        self._used_at = clock() - IDLE_RETURN_S
        self._waiting = False

    def wait(self, amount: float) -> float:
        if self._rate:
            return super().wait(amount)
        if self.level >= amount:
            return 0.0
        return max(_SHORTEST_RETRY_S, self._retry_at - self._clock())

    def take(self, amount: float) -> None:
        super().take(amount)
        self._used_at = self._clock()

    def may_ask(self) -> bool:
        """Whether the ledger may have some for a caller that has to wait."""
        self._used_at = self._clock()  # what it has is for this caller: it does not go back now
        self._waiting = self.wait(1.0) > 0 and not self._rate and self._clock() >= self._retry_at
        return self._waiting

    def is_low(self, num_servers: int) -> bool:
        """Whether it is time to ask, before a caller has to wait."""
        return (
            self.level < self._slice(num_servers) / 2
            and self._clock() - self._used_at < IDLE_RETURN_S
            and self._clock() >= self._retry_at
        )

    def _slice(self, num_servers: int) -> int:
        return int(self._full[1] / (SLICE * max(1, num_servers)))

    def ask(self, num_servers: int) -> RateAsk:
        """What to tell the ledger; takes out what goes back."""
        debt, returned = max(0.0, -self.level), 0.0
        self.level += debt
        wanted = 0
        if self._waiting or self.is_low(num_servers):
            wanted = max(int(self._waiting), math.ceil(self._slice(num_servers) - self.level))
        elif self.level > 0 and self._clock() - self._used_at >= IDLE_RETURN_S:
            returned, self.level = self.level, 0.0
        self._waiting = False
        return RateAsk(debt, returned, wanted)

    def unasked(self, ask: RateAsk) -> None:
        """The ledger has not got ``ask``, so far as this server knows: the debt stays."""
        self.level -= ask.debt

    def answered(self, granted: int, retry_s: float) -> None:
        """The ledger's answer."""
        if self._rate:  # it was away
            self._rate, self._burst = 0.0, self._full[1]
        self.level += granted
        self._retry_at = 0.0
        if retry_s and not granted:
            self._retry_at = self._clock() + max(_SHORTEST_RETRY_S, retry_s)

    def lost(self, num_servers: int) -> None:
        """The ledger is away: fill at this server's part of the rate."""
        if not self._rate:
            rate, burst = self._full
            self._rate = rate / max(1, num_servers)
            self._burst = max(1.0, burst / max(1, num_servers))
            self._at = self._clock()
            if self.level >= 0.0:  # no debt: the next caller need not wait for it to fill
                self.level = max(self.level, 1.0)


class SharedAccount(Account):
    """A tenant's account at one of several servers.

    Args:
        on_need: called when there is something to tell the ledger at once.

    Attributes:
        num_servers: that share the quotas.
        is_alone: the ledger is away.
    """

    def __init__(
        self,
        who: str,
        quotas: Quotas,
        on_need: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_need = on_need
        self._clock = clock
        self._places = 0  # of max_sessions, that the ledger has given
        self._places_at = -PLACE_S
        self._places_wanted = 0
        self.is_alone = False
        self._asked: dict[str, RateAsk] = {}
        self.num_servers = 1
        super().__init__(who, quotas)

    def set(self, quotas: Quotas) -> None:
        self.quotas = quotas
        old: dict[str, Share] = getattr(self, "shares", {})
        self.shares = {
            name: Share(*rate, clock=self._clock) for name, rate in rates_of(quotas).items()
        }
        for name, share in self.shares.items():  # what was used stays used
            if name in old:
                share.level = old[name].level
        self.rates = dict(self.shares)

    @property
    def max_sessions(self) -> int | None:
        most = self.quotas.max_sessions
        if most is None:
            return None
        return math.ceil(most / self.num_servers) if self.is_alone else self._places

    def may_ask(self, quotas: tuple[str, ...], session: bool = False) -> bool:
        """Whether a call has to wait, and the ledger may change that. The next :meth:`ask` does."""
        needs_place = session and self.needs_place
        self._places_wanted += needs_place
        asking = [self.shares[name].may_ask() for name in quotas if name in self.shares]
        return needs_place or any(asking)

    @property
    def needs_place(self) -> bool:
        """Whether the next session needs a place that the ledger has not given."""
        limit = self.max_sessions
        return limit is not None and self.num_sessions >= limit and not self.is_alone

    def release_session(self) -> None:
        super().release_session()
        if self.quotas.max_sessions is not None:  # another server may wait for the place
            self._places_at = -PLACE_S
            self._on_need()

    def _take(self, quota: str, amount: float) -> None:
        super()._take(quota, amount)
        share = self.shares.get(quota)
        if share is not None and share.is_low(self.num_servers):
            self._on_need()

    def ask(self) -> QuotaAsk:
        """What to tell the ledger now. :meth:`answered` or :meth:`lost` follows."""
        self._asked = {name: share.ask(self.num_servers) for name, share in self.shares.items()}
        wanted, self._places_wanted = self._places_wanted, 0
        if self.quotas.max_sessions is None:
            return QuotaAsk(self.quotas, self._asked)
        # Whoever waited for a place gets a moment to take it.
        is_new = self._clock() - self._places_at < PLACE_S
        self._places = max(self.num_sessions, self._places if is_new else 0)
        return QuotaAsk(self.quotas, self._asked, self._places, wanted)

    def answered(self, answer: QuotaAnswer, num_servers: int) -> None:
        """The ledger's answer to :meth:`ask`."""
        self.num_servers = num_servers
        self.is_alone = False
        if answer.sessions > self._places:
            self._places_at = self._clock()
        self._places = answer.sessions
        for name, (granted, retry_s) in answer.rates.items():
            if name in self.shares:
                self.shares[name].answered(granted, retry_s)

    def lost(self) -> None:
        """The ledger has not answered: this server's part of each quota counts."""
        self.is_alone = True
        for name, share in self.shares.items():
            if name in self._asked:
                share.unasked(self._asked[name])
            share.lost(self.num_servers)
        self._asked = {}
