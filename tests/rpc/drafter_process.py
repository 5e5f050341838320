"""A drafter replica for tests: prints its address and serves until it is killed.

``copycat`` repeats the session's last token, ``sleepy`` does so after ``--sleep`` seconds; neither
needs a model, so the process is up in a second.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

from paceline.session import Session
from paceline.types import Budget, Draft, Need, Outcome
from rpc.draft_service import DraftServicer
from rpc.server import start_server


class Copycat:
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


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=258)
    options = parser.parse_args()
    servicer = DraftServicer(
        Copycat(options.sleep), name="draft_model", vocab_size=options.vocab_size
    )
    server = await start_server(drafter=servicer, port=options.port)
    print(server.address, flush=True)
    await server.server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
