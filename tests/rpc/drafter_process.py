"""A drafter replica for tests: prints its address and serves until it is killed.

It repeats the session's last token, which needs no model, so the process is up in a second; with
``--demo`` it is the demo pair's drafter. Either answers after ``--sleep`` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.drafters.base import Drafter
from paceline.loading import limit_threads, load_drafter
from paceline.rpc.draft_service import DraftServicer
from paceline.rpc.server import start_server
from paceline.session import Session
from paceline.types import Budget, Draft, Need, Outcome


class Copycat(Drafter):
    """Drafts the last token again and again."""

    needs: frozenset[Need] = frozenset()

    def __init__(self, sleep_s: float = 0.0) -> None:
        self._sleep_s = sleep_s

    def open(self, session: Session) -> None: ...

    def close(self, session: Session) -> None: ...

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        return [
            Draft.chain([session.token_ids[-1]] * budget.depth)
            for session, budget in zip(sessions, budgets, strict=True)
        ]

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None: ...


class Slow(Drafter):
    """Another drafter, some time later."""

    def __init__(self, drafter: Drafter, sleep_s: float) -> None:
        self.needs = drafter.needs
        self.open, self.close, self.observe = drafter.open, drafter.close, drafter.observe
        self.rewinds = getattr(drafter, "rewinds", False)
        self._drafter, self._sleep_s = drafter, sleep_s

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        time.sleep(self._sleep_s)
        return self._drafter.propose(sessions, budgets)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=258)
    parser.add_argument("--demo", action="store_true", help="the demo pair's drafter")
    options = parser.parse_args()
    drafter: Drafter = Copycat(options.sleep)
    if options.demo:
        limit_threads(1)
        drafter = Slow(load_drafter(DRAFTER_DIR, TARGET_DIR), options.sleep)
    servicer = DraftServicer(drafter, name="draft_model", vocab_size=options.vocab_size)
    server = await start_server(drafter=servicer, port=options.port)
    print(server.address, flush=True)
    await server.server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
