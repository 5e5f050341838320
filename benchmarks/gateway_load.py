"""How much one gateway carries: its processor time for each round, call and generated token.

    python -m benchmarks.gateway_load

A gateway, a target that computes nothing, and clients have a process each. The processor time of
the gateway's process hardly depends on what else runs, and its reciprocal is what one core carries.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import grpc

from paceline.deployments.gateway import GENERATE, Relay
from paceline.deployments.lease import Endpoint, Lease, Unleased
from paceline.deployments.verify_relay import VERIFY
from paceline.rpc.access import Gate
from paceline.rpc.gen.paceline.v1 import generate_pb2, verify_pb2
from paceline.rpc.server import start_server
from paceline.rpc.tenants import Tenants

TOKEN = "a-token-of-many-characters"
NUM_NODES = 8
NUM_REPLIES = 400


def verify_result(request: verify_pb2.VerifyRequest) -> verify_pb2.VerifyResult:
    """What a target answers that accepts half of the draft."""
    return verify_pb2.VerifyResult(
        round=request.round, accepted_indices=range(NUM_NODES // 2), next_token=7,
        committed_length=100, digest=b"d" * 16,
    )  # fmt: skip


async def serve_target() -> tuple[str, Any]:
    """A target that answers at once. Returns its address, and what keeps it alive."""

    def opened(context: Any) -> verify_pb2.OpenResult:
        metadata = dict(context.invocation_metadata())
        return verify_pb2.OpenResult(
            session_id=metadata["paceline-session-id"], epoch=1, committed_length=16
        )

    async def session(frames: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for frame in frames:
            if frame.HasField("open"):
                yield verify_pb2.VerifyReply(open=opened(context))
            else:
                yield verify_pb2.VerifyReply(verify=verify_result(frame.verify))

    async def open_session(request: Any, context: Any) -> Any:
        return opened(context)

    async def verify(request: Any, context: Any) -> Any:
        return verify_result(request)

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        for i in range(NUM_REPLIES):
            yield generate_pb2.GenerateReply(token_ids=[i, i + 1], round=i + 1, prompt_length=16)

    def handler(make: Any, behavior: Any, request: Any) -> Any:
        return make(behavior, request.FromString, lambda reply: reply.SerializeToString())

    server = grpc.aio.server()
    methods = {
        "Session": handler(grpc.stream_stream_rpc_method_handler, session, verify_pb2.VerifyFrame),
        "Open": handler(grpc.unary_unary_rpc_method_handler, open_session, verify_pb2.OpenRequest),
        "Verify": handler(grpc.unary_unary_rpc_method_handler, verify, verify_pb2.VerifyRequest),
    }
    streams = {
        "Generate": handler(
            grpc.unary_stream_rpc_method_handler, generate, generate_pb2.GenerateRequest
        )
    }
    for service, handlers in ((VERIFY, methods), (GENERATE, streams)):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    return address, server


async def serve_gateway(target: str, tenants: str) -> tuple[str, Any]:
    """A gateway in front of it, with tenants and quotas. Returns as :func:`serve_target`."""

    async def lease() -> Lease:
        return cast(Lease, Unleased(Endpoint(target, 0, target)))

    gate = Gate(tenants=Tenants(tenants))
    relay = Relay(lease, idle_timeout_s=60, resume_s=5, gate=gate)
    server = await start_server(register=relay.register, gate=gate)
    return server.address, server


class Load:
    """Clients of a gateway, which send as fast as they get answers."""

    def __init__(self, address: str, num_sessions: int) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._num_sessions = num_sessions
        self._metadata = (("authorization", f"Bearer {TOKEN}"),)

    def _method(self, kind: str, service: str, name: str, reply: Any) -> Any:
        make: Any = getattr(self._channel, kind)
        return make(
            f"/{service}/{name}", lambda message: message.SerializeToString(), reply.FromString
        )

    async def streams(self, count: int) -> int:
        """Rounds of sessions on a stream each; returns how many."""

        async def run() -> None:
            method = self._method("stream_stream", VERIFY, "Session", verify_pb2.VerifyReply)
            call = method(metadata=self._metadata)
            opening = verify_pb2.OpenRequest(token_ids=range(16))
            await call.write(verify_pb2.VerifyFrame(open=opening))
            await call.read()
            for i in range(count):
                await call.write(verify_pb2.VerifyFrame(verify=_round(i)))
                await call.read()
            call.cancel()

        await asyncio.gather(*(run() for _ in range(self._num_sessions)))
        return count * self._num_sessions

    async def calls(self, count: int) -> int:
        """Rounds of unary calls; returns how many."""
        opening = self._method("unary_unary", VERIFY, "Open", verify_pb2.OpenResult)
        verify = self._method("unary_unary", VERIFY, "Verify", verify_pb2.VerifyResult)

        async def run() -> None:
            request = verify_pb2.OpenRequest(token_ids=range(16))
            session = await opening(request, metadata=self._metadata)
            for i in range(count):
                each = _round(i)
                each.session_id = session.session_id
                await verify(each, metadata=self._metadata)

        await asyncio.gather(*(run() for _ in range(self._num_sessions)))
        return count * self._num_sessions

    async def generations(self, count: int) -> int:
        """Replies of generations, two tokens each; returns how many."""
        method = self._method("unary_stream", GENERATE, "Generate", generate_pb2.GenerateReply)

        async def run() -> int:
            request = generate_pb2.GenerateRequest()
            request.token_ids.token_ids.extend(range(16))
            return sum([1 async for _ in method(request, metadata=self._metadata)])

        total = 0
        for _ in range(max(1, count // NUM_REPLIES)):
            total += sum(await asyncio.gather(*(run() for _ in range(self._num_sessions))))
        return total


def _round(i: int) -> verify_pb2.VerifyRequest:
    return verify_pb2.VerifyRequest(
        round=i + 1, base_length=100, prefix_digest=b"p" * 16, token_ids=range(NUM_NODES),
        parent_indices=range(-1, NUM_NODES - 1),
    )  # fmt: skip


def processor_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def processor_name() -> str:
    """The model of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def measure(gateway: str, pid: int, num_sessions: int, count: int, repeats: int) -> None:
    load = Load(gateway, num_sessions)
    kinds: dict[str, Callable[[int], Awaitable[int]]] = {
        "rounds on streams": load.streams,
        "rounds as unary calls": load.calls,
        "replies of generations": load.generations,
    }
    costs: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(repeats + 1):  # the first warms up
        for name, run in kinds.items():
            before = processor_seconds(pid)
            number = await run(count)
            if turn:
                costs[name].append((processor_seconds(pid) - before) / number)
    memory = resident_bytes(pid) / 2**20
    print(f"{processor_name()}; {num_sessions} sessions; {memory:.0f} MiB")
    for name, each in costs.items():
        middle = median(each)
        spread = f"{1e3 * min(each):.2f} to {1e3 * max(each):.2f}"
        print(f"{name:24} {1e3 * middle:.2f} ms ({spread}): {1 / middle:5.0f} a second on a core")


def start(stack: ExitStack, module: str, *arguments: str) -> tuple[str, int]:
    """A process that prints its address; returns that and the process's id."""
    command = [sys.executable, "-m", module, *arguments]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    stack.callback(process.kill)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    assert address, f"{module} {' '.join(arguments)} did not start"
    return address, process.pid


def write_tenants(folder: str) -> Path:
    """A tenants file, with quotas that count and refuse nothing."""
    path = Path(folder, "tenants.yaml")
    quotas = "{rounds_per_second: 1000000, tokens_per_minute: 1000000000}"
    path.write_text(f"tenants: {{load: {{token: {TOKEN}, quotas: {quotas}}}}}\n")
    return path


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", choices=("target", "gateway"), help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--tenants", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serving = (
            serve_target()
            if options.serve == "target"
            else serve_gateway(options.target, options.tenants)
        )
        address, _server = await serving
        print(address, flush=True)
        await asyncio.Event().wait()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        tenants = write_tenants(folder)
        this = partial(start, stack, "benchmarks.gateway_load")
        target, _ = this("--serve", "target")
        gateway, pid = this("--serve", "gateway", "--target", target, "--tenants", str(tenants))
        await measure(gateway, pid, options.sessions, options.rounds, options.repeats)


if __name__ == "__main__":
    asyncio.run(main())
