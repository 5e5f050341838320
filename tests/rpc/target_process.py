"""A target replica for tests that kill or attack it: prints its address and serves until then."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from typing import Any

from paceline.engine import Engine, EngineLimits, EngineThread
from paceline.loading import limit_threads, load_runner
from paceline.rpc.access import Gate, Limits
from paceline.rpc.server import start_server
from paceline.rpc.tenants import Tenants
from paceline.rpc.tls import ServerTls
from paceline.target import ModelTarget


class Mortal(ModelTarget):
    """A target that dies when it verifies a session with certain tokens in a row."""

    poison: tuple[int, ...] = ()

    def verify(self, sessions: Any, drafts: Any, wants: Any, prefill: Any = (), *more: Any) -> Any:
        for session in (*sessions, *(session for session, _ in prefill)):
            ids, size = session.token_ids, len(self.poison)
            if session.branches is not None:
                ids = [*ids, *session.branches.token_ids.tolist()]
            if any(tuple(ids[i : i + size]) == self.poison for i in range(len(ids))):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().verify(sessions, drafts, wants, prefill, *more)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapters", nargs="*", metavar="NAME=FOLDER", default=[])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--cert", help="for TLS, with --key")
    parser.add_argument("--key")
    parser.add_argument("--tenants")
    parser.add_argument("--max-message-bytes", type=int, default=2**22)
    parser.add_argument("--max-sessions", type=int, default=8)
    parser.add_argument("--idle-timeout-s", type=float, default=120.0)
    parser.add_argument("--die-on", type=int, nargs="*", help="tokens in a row that kill it")
    options = parser.parse_args()
    limit_threads(1)
    Mortal.poison = tuple(options.die_on or ())
    kind = Mortal if options.die_on else ModelTarget
    adapters = dict(each.split("=", 1) for each in options.adapters)
    target = kind(load_runner(options.model, kv_tokens=4096, adapters=adapters))
    limits = EngineLimits(max_sessions=options.max_sessions, max_waiting=16)
    engine = EngineThread(Engine(target, limits=limits)).start()
    gate = Gate(
        tenants=Tenants(options.tenants) if options.tenants else None,
        limits=Limits(max_message_bytes=options.max_message_bytes, max_calls_per_connection=256),
    )
    tls = ServerTls(cert=options.cert, key=options.key) if options.cert else None
    server = await start_server(
        engine=engine,
        host=options.host,
        gate=gate,
        credentials=None if tls is None else tls.credentials(),
        idle_timeout_s=options.idle_timeout_s,
    )
    print(server.address, flush=True)
    await server.server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
