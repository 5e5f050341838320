"""`max_connection_age_s`: an old connection takes no new calls, and its client connects again."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.rpc.server import start_server


async def _connections_lost(age_s: float | None) -> int:
    """How often a client's connection left READY while a server with that age was up."""
    server = await start_server(
        register=lambda _: [], max_connection_age_s=age_s, max_connection_age_grace_s=1.0
    )
    lost = 0
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        # Polled: a watch that a timeout ends stays in gRPC, and outlives this loop.
        deadline = asyncio.get_running_loop().time() + 2.5
        while not lost and asyncio.get_running_loop().time() < deadline:
            lost += channel.get_state() != grpc.ChannelConnectivity.READY
            await asyncio.sleep(0.01)
        await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
    await server.stop(0)
    return lost


@pytest.mark.parametrize(("age_s", "lost"), [(1.0, 1), (None, 0)])
def test_an_old_connection_is_replaced(age_s: float | None, lost: int) -> None:
    assert asyncio.run(_connections_lost(age_s)) == lost
