"""Requests whose targets died: each is tried on one more, and then refused for a while.

A target's death loses the work of all its sessions, and says nothing about which of them caused it.
Suspects are those whose request the target had taken and whose first token had not come since. They
are tried again one at a time, so that a second death names one of them. Gateways tell each other
through the ledger (:mod:`paceline.deployments.ledger`), so a request that kills at two of them is
refused at all of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from paceline.rpc.errors import PoisonRequest
from paceline.rpc.gen.paceline.v1 import generate_pb2

MAX_DEATHS = 2
REFUSED_S = 600.0
"""Seconds for which deaths are remembered, and a request is refused."""
_MAX_KNOWN = 4096


def digest_of(request: generate_pb2.GenerateRequest) -> str:
    """32 hex digits of what a request asks for; its seed and what came so far do not count."""
    same = generate_pb2.GenerateRequest()
    same.CopyFrom(request)
    for name in ("committed_token_ids", "fingerprint", "numerics_mismatch"):
        same.ClearField(name)
    same.sampling.ClearField("seed")
    return hashlib.sha256(same.SerializeToString(deterministic=True)).hexdigest()[:32]


Deaths = dict[str, tuple[tuple[str, ...], float]]
"""By digest: the replicas that died with it, and seconds for which that is remembered."""


class DeathBook:
    """Which replicas died with which request. The oldest of too many are forgotten.

    Args:
        clock: seconds; None: monotonic ones.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        # The dead replicas of each digest, and when they are forgotten.
        self._dead: OrderedDict[str, tuple[frozenset[str], float]] = OrderedDict()

    def of(self, digest: str) -> tuple[frozenset[str], float]:
        """The replicas that died with a request, and for how many seconds that is remembered."""
        dead, until = self._dead.get(digest, (frozenset[str](), 0.0))
        left = until - self._clock()
        if left <= 0:
            self._dead.pop(digest, None)
            return frozenset(), 0.0
        return dead, left

    def add(self, digest: str, replicas: Iterable[str], seconds: float = REFUSED_S) -> None:
        """Add replicas; all that died with the request are remembered for ``seconds`` from now."""
        dead, left = self.of(digest)
        self._dead.pop(digest, None)
        self._dead[digest] = (dead | {*replicas}, self._clock() + max(left, seconds))
        if len(self._dead) > _MAX_KNOWN:
            self._dead.popitem(last=False)

    def forget(self, digest: str) -> None:
        """The request killed none of them."""
        self._dead.pop(digest, None)

    def all(self) -> Deaths:
        """What is remembered."""
        found = {digest: self.of(digest) for digest in list(self._dead)}
        return {name: (tuple(sorted(dead)), left) for name, (dead, left) in found.items() if dead}


class Poison:
    """What one gateway knows of requests whose targets died. Lives on its event loop.

    Args:
        on_news: called when there is something that other gateways should know (:meth:`take_news`).

    Attributes:
        turn: held while a suspect is tried again, until its first token.
    """

    def __init__(self, on_news: Callable[[], None] = lambda: None) -> None:
        self.turn = asyncio.Lock()
        self.on_news = on_news
        self._book = DeathBook()
        self._news: dict[str, tuple[str, ...]] = {}

    def is_suspect(self, digest: str) -> bool:
        """Whether a target died with this request, and no other has answered it since."""
        return bool(self._book.of(digest)[0])

    def check(self, digest: str) -> None:
        """Refuse a request that has killed too many.

        Raises:
            PoisonRequest: names the digest, and the seconds for which it is refused.
        """
        dead, left = self._book.of(digest)
        if len(dead) >= MAX_DEATHS:
            raise PoisonRequest(
                f"{len(dead)} target processes died as they served this request (digest "
                f"{digest}): it is refused for {left:.0f} s. Change it, or ask the operator for "
                "the targets' logs",
                digest,
            )

    def died(self, digest: str, replica: str) -> None:
        """A target died with the request before the first token.

        Args:
            replica: which one; the choices of one request may have been on the same.

        Raises:
            PoisonRequest: as :meth:`check`.
        """
        self._book.add(digest, [replica])
        self._tell(digest, (*self._news.get(digest, ()), replica))
        self.check(digest)

    def lives(self, digest: str) -> None:
        """The request got a token: it did not kill the target that died before."""
        if 0 < len(self._book.of(digest)[0]) < MAX_DEATHS:
            self._book.forget(digest)
            self._tell(digest, ())

    # --- with other gateways -------------------------------------------------------------------

    def _tell(self, digest: str, replicas: tuple[str, ...]) -> None:
        self._news[digest] = replicas
        self.on_news()

    def take_news(self) -> dict[str, tuple[str, ...]]:
        """Replicas that died, by digest, since the last call; none: the request killed none."""
        news, self._news = self._news, {}
        return news

    def give_back(self, news: Mapping[str, tuple[str, ...]]) -> None:
        """Others were not told what :meth:`take_news` returned."""
        self._news = {**news, **self._news}

    def tell_all(self) -> None:
        """Have others told everything: who knew it has forgotten it."""
        self.give_back({digest: replicas for digest, (replicas, _) in self._book.all().items()})
        if self._news:
            self.on_news()

    def learn(self, deaths: Deaths) -> None:
        """Replace what is known by what all gateways know, but for news that they do not have."""
        self._book = DeathBook()
        for digest, (replicas, seconds) in deaths.items():
            if self._news.get(digest) != ():
                self._book.add(digest, replicas, seconds)
        for digest, replicas in self._news.items():
            if replicas:
                self._book.add(digest, replicas)
