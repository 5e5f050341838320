"""A target replica for tests that kill or attack it: prints its address and serves until then."""

from __future__ import annotations

import argparse
import asyncio

from paceline.engine import Engine, EngineLimits, EngineThread
from paceline.loading import limit_threads, load_runner
from paceline.rpc.access import Gate, Limits
from paceline.rpc.server import start_server
from paceline.rpc.tenants import Tenants
from paceline.rpc.tls import ServerTls
from paceline.target import ModelTarget


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--cert", help="for TLS, with --key")
    parser.add_argument("--key")
    parser.add_argument("--tenants")
    parser.add_argument("--max-message-bytes", type=int, default=2**22)
    parser.add_argument("--max-sessions", type=int, default=8)
    parser.add_argument("--idle-timeout-s", type=float, default=120.0)
    options = parser.parse_args()
    limit_threads(1)
    target = ModelTarget(load_runner(options.model, kv_tokens=4096))
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
