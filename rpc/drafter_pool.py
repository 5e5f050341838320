"""All drafter replicas of a target, with the face of one drafter.

Sessions are spread over the replicas (:mod:`paceline.rpc.drafter_places` decides where). A session
that moves is opened at its new drafter with its committed tokens, as after a drafter's death.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from functools import partial
from typing import Any

from paceline.errors import DrafterUnavailable, InvalidArgument
from paceline.rpc.draft_connection import AskList, RemoteDrafterCounters, fail, succeed
from paceline.rpc.drafter_places import DrafterLoad, DrafterPlaces
from paceline.rpc.remote_drafter import RemoteDrafter
from paceline.rpc.states import StatesForwarder
from paceline.rpc.tls import ClientTls
from paceline.types import EMPTY_DRAFT, Budget, Draft, Need
from paceline.view import SessionView

RETRY_S = 0.5
"""Seconds until a session whose drafts failed everywhere asks again."""
_NUM_ENDED = 1024
"""Ended sessions whose drafter is still known, for their last reply."""


class DrafterPool(StatesForwarder):
    """Drafts from any number of DraftService replicas, for all sessions of an engine.

    A draft that fails is asked for at another replica. If there is none, its session goes on
    without drafts until there is one again.

    Args:
        addresses: HOST:PORT of each replica; :meth:`use` changes them.
        vocab_size: of the target.
        deadline_s: seconds until a draft counts as failed.
        tls: certificates for the replicas; None connects in plain text.
    """

    needs: frozenset[Need] = frozenset()
    shadows = True
    recovers = True

    def __init__(
        self,
        addresses: Collection[str] = (),
        *,
        vocab_size: int,
        deadline_s: float = 2.0,
        tls: ClientTls | None = None,
    ) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._deadline_s = deadline_s
        self._tls = tls
        self._lock = threading.RLock()  # a future may fail while it is held
        self._remotes: dict[str, RemoteDrafter] = {}
        self._places = DrafterPlaces()
        self._paused: dict[str, float] = {}  # session -> when it may ask again
        self._ended: dict[str, tuple[str, int]] = {}
        self._past = RemoteDrafterCounters()  # of replicas that are gone, and of no replica
        self._probe_at = 0.0
        self.use(addresses)

    # --- replicas -------------------------------------------------------------------------------

    def use(self, addresses: Collection[str]) -> None:
        """Draft with these replicas from now on."""
        with self._lock:
            gone = [self._remotes.pop(a) for a in self._remotes.keys() - set(addresses)]
            for address in addresses:
                if address not in self._remotes:
                    self._remotes[address] = RemoteDrafter(
                        address, vocab_size=self._vocab_size, deadline_s=self._deadline_s,
                        tls=self._tls, feed=self._feed,
                    )  # fmt: skip
            for remote in gone:
                _add(self._past, remote.counters)
        for remote in gone:  # an engine's step must not wait until its threads have ended
            threading.Thread(target=remote.stop, name="remote-drafter-stop", daemon=True).start()

    @property
    def connected(self) -> list[str]:
        """Addresses of the replicas that answer."""
        with self._lock:
            return [address for address, remote in self._remotes.items() if remote.connected]

    def wait_ready(self, timeout: float) -> bool:
        """Wait until a replica answers; False: none did within ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while not self.connected:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def stop(self) -> None:
        """Close all streams, which frees the sessions at the replicas."""
        with self._lock:
            remotes, self._remotes = list(self._remotes.values()), {}
        for remote in remotes:
            remote.stop()

    def __enter__(self) -> DrafterPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    # --- what others want to know ---------------------------------------------------------------

    @property
    def counters(self) -> RemoteDrafterCounters:
        """The totals of all replicas so far."""
        total = RemoteDrafterCounters()
        with self._lock:
            for each in (self._past, *(remote.counters for remote in self._remotes.values())):
                _add(total, each)
        return total

    def location(self, session_id: str) -> tuple[str, int]:
        """Address and process of a session's drafter, also when it has just ended; ("", 0): none.

        A session without a drafter of its own yet has that of any replica that answers.
        """
        with self._lock:
            if session_id in self._ended:
                return self._ended[session_id]
            return self._at(self._places.of.get(session_id, ""))

    def _at(self, address: str) -> tuple[str, int]:
        remote = self._remotes.get(address)
        return (address, 0 if remote is None else remote.pid)

    def describe(self) -> list[dict[str, Any]]:
        """For each replica: address, process, own sessions, and the mean wait of a frame."""
        with self._lock:
            own = Counter(self._places.of.values())
            return [
                {
                    "address": address,
                    "pid": remote.pid if remote.connected else None,
                    "sessions": own[address],
                    "wait_ms": round(1000 * remote.load.wait_s, 2),
                }
                for address, remote in self._remotes.items()
            ]

    # --- Drafter --------------------------------------------------------------------------------

    def close(self, session: SessionView) -> None:
        """Tell the session's drafter to free its state."""
        super().close(session)
        name = session.session_id
        with self._lock:
            self._paused.pop(name, None)
            address = self._places.of.pop(name, "")
            if address:
                self._ended[name] = self._at(address)
                if len(self._ended) > _NUM_ENDED:
                    del self._ended[next(iter(self._ended))]
            if address in self._remotes:
                self._remotes[address].leave(session)

    def propose(
        self, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> Sequence[Future[Draft]]:
        """One future for each session; those of one replica in one frame."""
        futures: list[Future[Draft]] = [Future() for _ in sessions]
        now = time.monotonic()
        with self._lock:
            loads = self._loads()
            self._balance(sessions, loads, now)
            groups: dict[str, AskList] = {}
            for ask in zip(sessions, budgets, futures, strict=True):
                session, budget, future = ask
                if min(budget.asked.depth, budget.asked.nodes) <= 0:
                    future.set_result(EMPTY_DRAFT)  # AR: the drafter hears of the tokens later
                elif address := self._place(session, loads, now):
                    groups.setdefault(address, []).append(ask)
                else:
                    self._without(session, future)
            for address, asks in groups.items():
                self._ask(address, asks, now)
        return futures

    def _loads(self) -> dict[str, DrafterLoad]:
        return {a: remote.load for a, remote in self._remotes.items() if remote.usable}

    def _balance(
        self, sessions: Sequence[SessionView], loads: Mapping[str, DrafterLoad], now: float
    ) -> None:
        asking = {session.session_id: session for session in sessions}
        for name, source in self._places.rebalance(asking, loads, now):
            self._remotes[source].leave(asking[name])
        if now >= self._probe_at:  # drafters without own sessions tell nothing by themselves
            self._probe_at = now + RETRY_S
            for address in loads.keys() - set(self._places.of.values()):
                self._remotes[address].probe()

    def _place(self, session: SessionView, loads: Mapping[str, DrafterLoad], now: float) -> str:
        """The address of the session's replica; "" while there is none for it."""
        name = session.session_id
        if self._paused.get(name, 0.0) > now:
            return ""
        before = self._places.of.get(name, "")
        if not loads:
            return ""
        if before and before not in loads and before in self._remotes:  # it answers too late
            self._remotes[before].leave(session)
        self._ended.pop(name, None)
        return self._places.place(name, loads, now)

    def _without(self, session: SessionView, future: Future[Draft]) -> None:
        """A session without a drafter: the first of its rounds fails, so that statistics say so."""
        self._past.num_refused += 1
        if self._places.of.get(session.session_id) == "":
            future.set_result(EMPTY_DRAFT)
        else:
            self._places.of[session.session_id] = ""
            future.set_exception(DrafterUnavailable("no drafter answers"))

    def _ask(self, address: str, asks: AskList, since: float) -> None:
        remote = self._remotes[address]
        found = remote.propose([s for s, _, _ in asks], [b for _, b, _ in asks])
        for ask, future in zip(asks, found, strict=True):
            future.add_done_callback(partial(self._arrived, ask, address, since))

    def _arrived(
        self,
        ask: tuple[SessionView, Budget, Future[Draft]],
        address: str,
        since: float,
        found: Future[Draft],
    ) -> None:
        """Pass a draft on; ask another replica for one that has failed, unless it is too late."""
        error = found.exception()
        if error is None:
            succeed(ask[2], found.result())
            return
        session, _, future = ask
        name, now = session.session_id, time.monotonic()
        with self._lock:
            if future.done() or self._places.of.get(name) != address:
                return  # closed, or moved and asked for anew
            if isinstance(error.__cause__, InvalidArgument):  # all replicas refuse it
                fail([ask], error.__cause__)
                return
            if address in self._remotes:
                self._remotes[address].leave(session)
            self._places.of[name] = ""
            loads = self._loads()
            loads.pop(address, None)
            if loads and now - since < self._deadline_s:
                self._ask(self._places.place(name, loads, now), [ask], since)
                return
            self._paused[name] = now + RETRY_S
        fail([ask], DrafterUnavailable(str(error)))


def _add(total: RemoteDrafterCounters, more: RemoteDrafterCounters) -> None:
    for each in fields(RemoteDrafterCounters):
        setattr(total, each.name, getattr(total, each.name) + getattr(more, each.name))
