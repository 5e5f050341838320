"""A balancer that sends each call to the next server, whatever connection it came on."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Self

import grpc

from paceline.rpc.client import CHANNEL_OPTIONS

_OWN = ("grpc-", "user-agent", ":")  # metadata of a hop


class RoundRobin(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Passes every method on, as bytes. ``async with`` starts it, on the running loop.

    Attributes:
        address: where it listens.
        seen: the servers that got calls of each method, one after the other.
    """

    def __init__(self, servers: Sequence[str]) -> None:
        self.servers = list(servers)
        self.seen: defaultdict[str, list[str]] = defaultdict(list)
        self.address = ""
        self._next = 0
        self._channels: dict[str, grpc.aio.Channel] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler: Any = partial(self._pass_on, handler_call_details.method)
        return grpc.stream_stream_rpc_method_handler(handler)

    async def _pass_on(
        self, path: str, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        server = self.servers[self._next % len(self.servers)]
        self._next += 1
        self.seen[path.rpartition("/")[2]].append(server)
        if server not in self._channels:
            options = (*CHANNEL_OPTIONS, ("grpc.initial_reconnect_backoff_ms", 100))
            self._channels[server] = grpc.aio.insecure_channel(server, options=options)
        method: Any = self._channels[server].stream_stream(path)
        headers = context.invocation_metadata() or ()
        metadata = tuple((k, v) for k, v in headers if not k.startswith(_OWN))
        call = method(requests, timeout=context.time_remaining(), metadata=metadata)
        try:
            async for reply in call:
                yield reply
        except grpc.aio.AioRpcError as error:
            trailing = tuple(error.trailing_metadata() or ())
            await context.abort(error.code(), error.details() or "", trailing)
        finally:
            call.cancel()

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.stop(0.2)
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
