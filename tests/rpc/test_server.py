"""Starting and stopping servers; health and reflection."""

from __future__ import annotations

import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.errors import InvalidArgument
from paceline.rpc.client import Client
from paceline.rpc.server import PortInUse, RpcServer, start_server
from tests.rpc.serving import serving


def test_a_port_in_use_is_named(server: RpcServer) -> None:
    text = rf"port {server.port} is in use.*0 takes a free one"
    again = serving(register=lambda _: [], port=server.port)
    with pytest.raises(PortInUse, match=text), again:
        pass
    with Client(server.address) as client:
        assert client.get_model().name == "tiny"  # the first one is not disturbed


def test_a_port_that_something_else_uses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)), serving(register=lambda _: [], port=port):
            pass


def test_a_host_of_another_machine() -> None:
    elsewhere = serving(register=lambda _: [], host="192.0.2.1", insecure=True)
    with pytest.raises(PortInUse, match=r"192\.0\.2\.1"), elsewhere:
        pass


@pytest.mark.parametrize("port", [-1, 65536])
async def test_bad_ports(port: int) -> None:
    with pytest.raises(InvalidArgument, match=str(port)):
        await start_server(register=lambda _: [], port=port)


async def test_a_server_needs_something_to_serve() -> None:
    with pytest.raises(InvalidArgument, match="engine"):
        await start_server()


def test_loopback_and_a_free_port_by_default(server: RpcServer) -> None:
    assert server.address == f"127.0.0.1:{server.port}"
    assert server.port > 0


def test_ipv6(engine: object) -> None:
    with serving(engine=engine, host="::1") as running, Client(running.address) as client:
        assert running.address.startswith("[::1]:")
        assert client.get_model().vocab_size == 258


def test_the_port_is_free_after_stop() -> None:
    with serving(register=lambda _: []) as running:
        port = running.port
    with serving(register=lambda _: [], port=port) as running:
        assert running.port == port


def test_health(server: RpcServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "paceline.v1.GenerateService", "paceline.v1.VerifyService"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="paceline.v1.DraftService"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection(server: RpcServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(
                file_containing_symbol="paceline.v1.VerifyService"
            ),
        ]
        services, file = list(stub.ServerReflectionInfo(iter(requests)))
    names = {service.name for service in services.list_services_response.service}
    assert names >= {
        "paceline.v1.GenerateService", "paceline.v1.VerifyService", "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }  # fmt: skip
    (descriptor, *_) = file.file_descriptor_response.file_descriptor_proto
    assert b"paceline/v1/verify.proto" in descriptor
