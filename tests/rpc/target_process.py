"""A target replica for tests that kill it: prints its address and serves until then."""

from __future__ import annotations

import argparse
import asyncio

from paceline.engine import Engine, EngineThread
from paceline.loading import limit_threads, load_runner
from paceline.target import ModelTarget
from rpc.server import start_server


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    limit_threads(1)
    engine = EngineThread(Engine(ModelTarget(load_runner(options.model, kv_tokens=4096)))).start()
    server = await start_server(engine=engine)
    print(server.address, flush=True)
    await server.server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
