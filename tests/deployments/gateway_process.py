"""A gateway for tests that kill it: prints its address and serves until then."""

from __future__ import annotations

import argparse
import asyncio

from paceline.deployments.gateway import Relay
from paceline.deployments.session_ids import KeyFile
from paceline.rpc.access import Gate
from paceline.rpc.server import start_server
from tests.deployments.http_serving import DirectLeases


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", nargs="+", required=True)
    parser.add_argument("--keys", required=True)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    leases, gate = DirectLeases(), Gate()
    leases.addresses = options.targets
    ids = KeyFile(options.keys).session_ids()
    relay = Relay(leases, idle_timeout_s=60, resume_s=5, gate=gate, session_ids=ids)
    server = await start_server(register=relay.register, gate=gate, port=options.port)
    print(server.address, flush=True)
    await server.server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
