"""What the gateways of an application share: keys of session ids, tenants' quotas, poison requests.

The ledger is one Ray actor, on the head node. It has the quotas as a single gateway would; gateways
lease parts of them (``rpc/quotas.py``). How far all gateways together may be from the quota:

- *Over it*: never in sessions. In opens and rounds by what gateways hold unused as a burst begins:
  together at most an eighth of a burst, and 1 each. In tokens, also by what each gateway admits
  while it has one token left, as a single one does; that is paid before anything else.
- *Under it*: by the same eighth. A gateway gives back what it does not use within two seconds.
- *Without the ledger* (it does not answer for :data:`TIMEOUT_S`): each gateway lets through its
  equal part of each quota, at least 1.
- *A ledger that starts anew* has full bursts again, and new keys: gateways keep the old ones, too.
  They tell it of the requests whose targets died.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.deployments.poison import DeathBook, Deaths, Poison
from paceline.deployments.session_ids import MAX_KEYS, MIN_KEY_LENGTH
from paceline.rpc.quotas import Bucket, QuotaAnswer, QuotaAsk, RateAsk, SharedAccount, rates_of
from paceline.rpc.tenants import Quotas

logger = logging.getLogger(__name__)

SERVE_NAMESPACE = "serve"
"""Where Serve registers replicas. Its modules take seconds to import; the ledger needs none."""
SYNC_S = 1.0
"""Seconds between two calls of a gateway that has nothing to ask."""
TIMEOUT_S = 1.0
GATEWAY_GONE_S = 5.0
"""Seconds without a call after which a gateway's sessions count no more."""
LINGER_S = 300.0
"""Seconds without a call of any gateway after which the ledger ends."""
SIGN_AFTER_S = 10.0
"""Seconds until a gateway signs with a new key; others look for one every few seconds."""
START_S = 30.0
"""Seconds that a gateway waits for the ledger when it starts."""
_VERSION = 2  # of the calls between gateways and ledger: an upgrade may leave an old one running
_HEAD = "node:__internal_head__"  # Ray's resource that only the head has


@dataclass(frozen=True, slots=True)
class Reply:
    """The ledger's answer to a gateway.

    Attributes:
        instance: names the ledger; another one has other keys.
        num_gateways: that call it.
        deaths: of targets, which all gateways have told of.
    """

    instance: str
    num_gateways: int
    answers: dict[str, QuotaAnswer]
    deaths: Deaths


class _Tenant:
    """The quotas of one tenant, and the places of ``max_sessions`` that each gateway has."""

    def __init__(self) -> None:
        self.rates: dict[str, Bucket] = {}
        self.places: dict[str, int] = {}
        self._quotas: Quotas | None = None

    def set(self, quotas: Quotas, clock: Callable[[], float]) -> None:
        if quotas == self._quotas:
            return
        # Gateways notice a change one after the other: that must not fill the buckets again.
        old, self._quotas = self.rates, quotas
        self.rates = {n: Bucket(*rate, clock=clock) for n, rate in rates_of(quotas).items()}
        for name, bucket in self.rates.items():
            if name in old:
                bucket.level = min(bucket.level, old[name].level)

    def answer(self, gateway: str, ask: QuotaAsk) -> QuotaAnswer:
        rates = {name: self._rate(name, each) for name, each in ask.rates.items()}
        self.places[gateway] = ask.sessions
        most = ask.quotas.max_sessions
        if most is not None:
            free = max(0, most - sum(self.places.values()))
            self.places[gateway] += min(free, ask.more_sessions)
        return QuotaAnswer(rates, self.places[gateway])

    def _rate(self, name: str, ask: RateAsk) -> tuple[int, float]:
        bucket = self.rates[name]
        bucket.wait(1.0)  # fills it
        bucket.give(ask.returned)
        bucket.take(ask.debt)
        granted = max(0, min(ask.wanted, int(bucket.level)))
        bucket.take(granted)
        return granted, 0.0 if granted or not ask.wanted else bucket.wait(1.0)


News = Mapping[str, tuple[str, ...]]
"""As :meth:`paceline.deployments.poison.Poison.take_news`."""


class Ledger:
    """The quotas of all tenants, and requests whose targets died, without Ray. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.instance = secrets.token_hex(8)
        self.called_at = clock()
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._gateways: dict[str, float] = {}  # and when each last called
        self._deaths = DeathBook(clock)

    def sync(self, gateway: str, asks: Mapping[str, QuotaAsk], news: News | None = None) -> Reply:
        """One gateway's asks, by tenant, and what it gets; and its news of targets that died."""
        now = self.called_at = self._clock()
        self._gateways[gateway] = now
        for other, called_at in list(self._gateways.items()):
            if now - called_at > GATEWAY_GONE_S:
                self.leave(other)
        answers = {}
        for name, ask in asks.items():
            tenant = self._tenants.setdefault(name, _Tenant())
            tenant.set(ask.quotas, self._clock)
            answers[name] = tenant.answer(gateway, ask)
        for digest, replicas in (news or {}).items():
            if replicas:
                self._deaths.add(digest, replicas)
            else:
                self._deaths.forget(digest)
        return Reply(self.instance, len(self._gateways), answers, self._deaths.all())

    def leave(self, gateway: str) -> None:
        """The gateway has stopped, or has not called for long."""
        self._gateways.pop(gateway, None)
        for tenant in self._tenants.values():
            tenant.places.pop(gateway, None)


class LedgerActor:
    """The ledger as a Ray actor, which also makes the key that signs session ids."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._key = secrets.token_bytes(MIN_KEY_LENGTH)
        self._watcher = asyncio.get_running_loop().create_task(self._end_unused())

    async def sync(self, gateway: str, asks: dict[str, QuotaAsk], news: News) -> Reply:
        return self._ledger.sync(gateway, asks, news)

    async def leave(self, gateway: str) -> None:
        self._ledger.leave(gateway)

    async def key(self) -> tuple[str, bytes]:
        """The instance and its key."""
        return self._ledger.instance, self._key

    async def _end_unused(self) -> None:
        import ray

        while True:
            await asyncio.sleep(LINGER_S / 10)
            if time.monotonic() - self._ledger.called_at > LINGER_S:
                ray.kill(ray.get_runtime_context().current_actor)


class Link(Protocol):
    """Calls of the ledger."""

    async def sync(self, gateway: str, asks: dict[str, QuotaAsk], news: News) -> Reply: ...

    async def leave(self, gateway: str) -> None: ...

    async def key(self) -> tuple[str, bytes]: ...


class RayLink:
    """The ledger of an application, which the first gateway starts."""

    def __init__(self, application: str) -> None:
        self._name = f"paceline-ledger-v{_VERSION}-{application}"
        self._actor: Any = None

    async def sync(self, gateway: str, asks: dict[str, QuotaAsk], news: News) -> Reply:
        reply: Reply = await self._call("sync", gateway, asks, news)
        return reply

    async def leave(self, gateway: str) -> None:
        await self._call("leave", gateway)

    async def key(self) -> tuple[str, bytes]:
        key: tuple[str, bytes] = await self._call("key")
        return key

    async def _call(self, method: str, *arguments: Any) -> Any:
        import ray.exceptions

        if self._actor is None:
            self._actor = await asyncio.to_thread(self._find)
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except ray.exceptions.ActorDiedError:
            self._actor = None  # the next call starts another one
            raise

    def _find(self) -> Any:
        import ray

        return (
            ray.remote(LedgerActor)
            .options(
                name=self._name,
                namespace=SERVE_NAMESPACE,
                get_if_exists=True,
                lifetime="detached",  # it outlives every gateway
                max_restarts=-1,
                num_cpus=0,
                resources={_HEAD: 0.001},
            )
            .remote()
        )


class SharedQuotas:
    """A gateway's side of the ledger. Lives on its event loop.

    Args:
        num_gateways: how many share the quotas, until the ledger says so.

    Attributes:
        poison: what this gateway, and all others, know of requests whose targets died.
    """

    def __init__(self, link: Link, *, num_gateways: int = 1) -> None:
        self.num_gateways = num_gateways
        self.is_away = False
        self._link = link
        self._name = secrets.token_hex(8)
        self._accounts: dict[str, SharedAccount] = {}
        self._told: set[str] = set()  # tenants of whom the last ask was not empty
        self._wake = asyncio.Event()
        self.poison = Poison(self._wake.set)
        self._waiters: list[asyncio.Future[None]] = []
        # By the ledger that made them, the last one first, and when they came.
        self._keys: dict[str, tuple[bytes, float]] = {}
        self._instance = ""  # the ledger that knows what this gateway has told
        self._task: asyncio.Task[None] | None = None

    def account(self, who: str, name: str, quotas: Quotas) -> SharedAccount:
        """The account of a tenant at this gateway."""
        account = SharedAccount(who, quotas, self._wake.set)
        account.num_servers = self.num_gateways
        if self.is_away:
            account.lost()
        self._accounts[name] = account
        return account

    async def fetch(self) -> None:
        """Return when the ledger has answered what accounts ask for now, or is away."""
        if self._task is None or self._task.done():
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wake.set()
        await waiter

    def start(self) -> None:
        """Call the ledger from now on."""
        self._task = asyncio.create_task(self._run())

    async def session_keys(self, timeout_s: float = TIMEOUT_S) -> tuple[bytes, ...]:
        """The keys for session ids: the one that signs, then others that are accepted.

        A new ledger's key signs only when the other gateways have had time to learn it.
        """
        with suppress(Exception):  # the known ones are good for the sessions that are known
            async with asyncio.timeout(timeout_s):
                await self._learn_key()
        if not self._keys:  # sessions are this gateway's alone until the ledger is there
            self._keys["own"] = (secrets.token_bytes(MIN_KEY_LENGTH), time.monotonic())
        (_, came_at), *others = self._keys.values()
        keys = [key for key, _ in self._keys.values()]
        if others and time.monotonic() - came_at < SIGN_AFTER_S:
            keys[0], keys[1] = keys[1], keys[0]
        return tuple(keys)

    async def _learn_key(self) -> None:
        instance, key = await self._link.key()
        if next(iter(self._keys), None) != instance:
            others = [(name, old) for name, old in self._keys.items() if name != instance]
            self._keys = dict([(instance, (key, time.monotonic())), *others][:MAX_KEYS])

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SYNC_S):
                    await self._wake.wait()
            self._wake.clear()
            waiters, self._waiters = self._waiters, []
            try:
                await self._sync()
            except Exception as error:  # whatever it is, callers must not wait for ever
                self._away(error)
            finally:
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_result(None)

    async def _sync(self) -> None:
        accounts = dict(self._accounts)
        asks = {name: account.ask() for name, account in accounts.items()}
        # Of thousands of tenants most are quiet.
        asks = {name: ask for name, ask in asks.items() if self._has_news(name, ask)}
        news = self.poison.take_news()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reply = await self._link.sync(self._name, asks, news)
        except Exception:
            self.poison.give_back(news)
            raise
        if reply.instance != self._instance:
            self._instance = reply.instance
            self.poison.tell_all()
        self.poison.learn(reply.deaths)
        self._answered(accounts, reply)

    def _has_news(self, name: str, ask: QuotaAsk) -> bool:
        """Whether to tell the ledger; the first empty one says that nothing is used any more."""
        news = not ask.is_empty or name in self._told or self._accounts[name].is_alone
        (self._told.discard if ask.is_empty else self._told.add)(name)
        return news

    def _answered(self, accounts: dict[str, SharedAccount], reply: Reply) -> None:
        if self.is_away:
            logger.warning("the ledger of quotas answers again")
        self.is_away = False
        self.num_gateways = reply.num_gateways
        for name, account in accounts.items():
            account.num_servers = reply.num_gateways
            if name in reply.answers:
                account.answered(reply.answers[name], reply.num_gateways)

    def _away(self, error: Exception) -> None:
        if not self.is_away:
            logger.warning(
                "the ledger of quotas is away (%s): this gateway lets through its part",
                type(error).__name__,
            )
        self.is_away = True
        for account in self._accounts.values():
            account.lost()

    async def stop(self) -> None:
        """Tell the ledger, and call it no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        with suppress(Exception):
            async with asyncio.timeout(TIMEOUT_S):
                await self._link.leave(self._name)
