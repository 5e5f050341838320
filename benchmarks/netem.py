"""A bad network in user space: a TCP proxy on loopback between a client and a server.

`python -m benchmarks.netem HOST:PORT --rtt SECONDS` is one in a process of its own, which prints
its address.

Bytes of each direction leave after half of the round trip, plus jitter that never reorders them,
and no faster than the bandwidth allows. It can reset connections, and a partition silently holds
everything back, as a dead machine or a lost route does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

_CHUNK = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Seconds, and bytes a second in each direction (None: no limit)."""

    rtt: float = 0.0
    jitter: float = 0.0
    bandwidth: float | None = None


class Netem:
    """Listens on :attr:`address` and forwards to ``upstream``; every method is thread-safe.

    Attributes:
        bytes_up, bytes_down: TCP payload forwarded.
        num_connections: accepted connections, open or closed.
    """

    def __init__(self, upstream: str, link: Link | None = None, *, seed: int = 0) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = host, int(port)
        self._link = link or Link()
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._kept: set[asyncio.StreamWriter] = set()  # connections whose other end is cut off
        self._flowing = asyncio.Event()
        self._refusing = False
        self.bytes_up = self.bytes_down = self.num_connections = 0
        self.address = ""
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="netem")

    # --- what a test does to the network --------------------------------------------------------

    def set(self, **changes: float | None) -> None:
        """Change the link; bytes in flight keep their arrival time."""
        self._link = replace(self._link, **changes)  # type: ignore[arg-type]

    def redirect(self, upstream: str) -> None:
        """Forward new connections to another server, as if it replaced the one at this address."""
        host, _, port = upstream.rpartition(":")
        self._upstream = host, int(port)

    def reset(self) -> None:
        """Break all connections with a TCP reset; new ones are accepted."""
        self._call(self._reset)

    def cut(self) -> None:
        """Reset the clients' ends only: servers still consider the connections open."""

        def run() -> None:
            for writer, onward in self._pairs:
                self._kept.add(onward)
                _abort(writer)

        self._call(run)

    def partition(self, lost: bool = True) -> None:
        """Let nothing through in either direction, without closing anything; or heal it."""
        self._call(self._flowing.clear if lost else self._flowing.set)

    def refuse(self, refusing: bool = True) -> None:
        """Reset all connections and each new one, as the port of a dead process does."""
        self._refusing = refusing
        if refusing:
            self.reset()

    def _call(self, function: object) -> None:
        done = threading.Event()

        def run() -> None:
            function()  # type: ignore[operator]
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(5)

    def _reset(self) -> None:
        for writer in [*self._kept, *(end for pair in self._pairs for end in pair)]:
            _abort(writer)
        self._kept.clear()

    # --- the proxy ------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._started.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        pending = asyncio.all_tasks(self._loop)
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.close()

    async def _start(self) -> None:
        self._flowing.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if self._refusing:
            _abort(writer)
            return
        try:
            there, onward = await asyncio.open_connection(*self._upstream)
        except OSError:
            _abort(writer)
            return
        for each in (writer, onward):
            each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = writer, onward
        self._pairs.add(pair)
        try:
            await asyncio.gather(self._pump(reader, onward, up=True), self._pump(there, writer))
        except (OSError, asyncio.CancelledError):
            pass  # a reset; or the end of the test, which asyncio.streams would log
        finally:
            self._pairs.discard(pair)
            for each in pair:
                if each not in self._kept:
                    _abort(each)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool = False
    ) -> None:
        """One direction: a reader stamps chunks with their arrival time, a sender waits for it."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sender = asyncio.ensure_future(self._deliver(chunks, writer))
        arrival = 0.0
        try:
            while data := await reader.read(_CHUNK):
                link, now = self._link, time.monotonic()
                delay = link.rtt / 2 + self._random.uniform(0, link.jitter)
                wire = len(data) / link.bandwidth if link.bandwidth else 0.0
                arrival = max(arrival, now + delay) + wire
                if up:
                    self.bytes_up += len(data)
                else:
                    self.bytes_down += len(data)
                chunks.put_nowait((arrival, data))
            chunks.put_nowait((arrival, b""))
            await sender
        finally:
            sender.cancel()

    async def _deliver(
        self, chunks: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        while True:
            arrival, data = await chunks.get()
            pause = arrival - time.monotonic()
            if pause > 0:
                await asyncio.sleep(pause)
            await self._flowing.wait()
            if not data:
                if writer not in self._kept:
                    with contextlib.suppress(OSError):
                        writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(5)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        def stop() -> None:
            self._server.close()
            self._reset()
            self._loop.stop()

        self._loop.call_soon_threadsafe(stop)
        self._thread.join(10)


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset instead of an orderly shutdown."""
    with contextlib.suppress(OSError):
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("upstream")
    parser.add_argument("--rtt", type=float, default=0.0)
    options = parser.parse_args()
    with Netem(options.upstream, Link(rtt=options.rtt)) as netem:
        print(netem.address, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
