"""An attacker, in a process of its own: prints how often it called and what it was answered.

    python -m tests.rpc.attacker <<< "KIND ADDRESS --ca FILE --token TOKEN"

The first line of its input says what to do, so that it can be started ahead. It begins with the
next line and ends with one more. Its priority is the lowest: a real attacker does not share the
server's processors. ``flood`` speaks HTTP/2 by hand and repeats prepared frames, because a gRPC
client in Python makes two thousand calls a second at most and needs a core for it; with
``--heedless`` it ignores how many calls the server allows at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import socket
import ssl
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from paceline.rpc.client import bearer
from paceline.rpc.gen.paceline.v1 import verify_pb2, verify_pb2_grpc
from paceline.rpc.messages import MAX_MESSAGE_BYTES
from paceline.rpc.tls import ClientTls

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
MAX_CONCURRENT_STREAMS = 3  # a setting
REFUSED_STREAM = 7  # a reason
CODES = {code.value[0]: code.name for code in grpc.StatusCode}
PROMPT = list(range(16))
_STATUS = re.compile(rb"grpc-status[\x01\x02](\d{1,2})")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header that enters no table, so that it is the same bytes in every request."""

    def text(s: str) -> bytes:
        data = s.encode()
        # A length with a prefix of 7 bits (RFC 7541, 5.1); no text here is longer than 254.
        size = bytes([len(data)]) if len(data) < 127 else bytes([127, len(data) - 127])
        return size + data

    return b"\x00" + text(name) + text(value)


class Wire:
    """One connection, and calls of one method on it.

    Args:
        source: the address to call from.
        stalls: the messages of its calls never come.
    """

    def __init__(
        self, address: str, ca: str, token: str | None, method: str, *, source: str = "",
        stalls: bool = False,
    ) -> None:  # fmt: skip
        host, _, port = address.rpartition(":")
        plain = socket.create_connection((host, int(port)), 5, (source, 0))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        context = ssl.create_default_context(cafile=ca)
        context.set_alpn_protocols(["h2"])
        self._socket = context.wrap_socket(plain, server_hostname=host)
        headers = {
            ":method": "POST", ":scheme": "https", ":path": f"/paceline.v1.VerifyService/{method}",
            ":authority": address, "te": "trailers", "content-type": "application/grpc",
        }  # fmt: skip
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        self._headers = b"".join(literal(name, value) for name, value in headers.items())
        message = verify_pb2.OpenRequest(token_ids=PROMPT).SerializeToString()
        self._message = b"" if stalls else b"\x00" + struct.pack(">I", len(message)) + message
        self._stream = -1
        self._window = 65_535  # bytes that the server takes, over all streams
        self._limit = 100  # open calls, until the server says another number
        self._open: set[int] = set()
        self._received = b""
        self.sent = 0
        self.answers: Counter[str] = Counter()
        # No table: answers too are spelled out.
        settings = struct.pack(">HIHI", 1, 0, 4, 2**20)
        self._socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(SETTINGS, 0, 0, settings)
            + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**30))
        )
        self.read(1.0)

    @property
    def num_open(self) -> int:
        """Calls without an answer."""
        return len(self._open)

    def call(self, count: int, *, heedless: bool = False) -> None:
        """Begin this number of calls, or as many as the server allows at a time."""
        frames = []
        for _ in range(count if heedless else min(count, self._limit - len(self._open))):
            if self._window < len(self._message):
                break
            self._window -= len(self._message)
            self._stream += 2
            self._open.add(self._stream)
            frames.append(frame(HEADERS, END_HEADERS, self._stream, self._headers))
            if self._message:
                frames.append(frame(DATA, END_STREAM, self._stream, self._message))
            self.sent += 1
        if frames:
            self._socket.settimeout(10)
            self._socket.sendall(b"".join(frames))

    def read(self, seconds: float) -> None:
        """Take what has arrived, after waiting at most that many seconds."""
        self._socket.settimeout(max(seconds, 0.001))
        try:
            data = self._socket.recv(2**18)
        except TimeoutError:
            return
        if not data:
            raise ConnectionError("the server hung up")
        self._received += data
        start = 0
        while len(self._received) - start >= 9:
            size = int.from_bytes(self._received[start : start + 3], "big")
            kind, flags, stream = struct.unpack_from(">BBI", self._received, start + 3)
            if len(self._received) - start - 9 < size:
                break
            self._take(kind, flags, stream, self._received[start + 9 : start + 9 + size])
            start += 9 + size
        self._received = self._received[start:]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for key, value in struct.iter_unpack(">HI", payload):
                if key == MAX_CONCURRENT_STREAMS:
                    self._limit = value
            self._socket.sendall(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._socket.sendall(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == GOAWAY:
            raise ConnectionError(f"the server ends the connection: {payload[8:]!r}")
        elif kind == HEADERS and flags & END_STREAM:
            found = _STATUS.search(payload)
            self._answered(stream, CODES[int(found[1])] if found else "no status")
        elif kind == RST_STREAM:
            reason = int.from_bytes(payload, "big")
            refused = reason == REFUSED_STREAM
            self._answered(stream, "REFUSED_STREAM" if refused else f"reset {reason}")

    def _answered(self, stream: int, answer: str) -> None:
        if stream in self._open:
            self._open.discard(stream)
            self.answers[answer] += 1


class Attack:
    """What is common to all kinds: when it ends, and what it was answered."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.sent = 0
        self.answers: Counter[str] = Counter()
        self._over = threading.Event()

    @property
    def goes_on(self) -> bool:
        return not self._over.is_set()

    def begin(self) -> None:
        """Wait for the signal to begin; the next line ends the attack."""
        print("ready", flush=True)
        sys.stdin.readline()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        sys.stdin.readline()
        self._over.set()

    def flood(self) -> None:
        """Opens, ``--rate`` of them a second."""
        options = self.options
        wire = Wire(options.address, options.ca, options.token, "Open", source=options.source)
        self.begin()
        busy, last = 0.0, time.monotonic()
        while self.goes_on:
            now = time.monotonic()
            busy += min(now - last, 0.05)  # it may have been stopped for a while
            last = now
            due = int(busy * options.rate) - wire.sent
            wire.call(min(due, 500), heedless=options.heedless)
            wire.read(0.001)
        self._collect([wire], 0.5)  # the queue of refusals is longer

    def loris(self) -> None:
        """Calls whose messages never come: streams, and calls with one message."""
        options = self.options
        wires = [
            Wire(options.address, options.ca, options.token, method, stalls=True)
            for method in ("Session", "Open", "Verify")
        ]
        self.begin()
        while self.goes_on:
            for wire in wires:
                wire.call(80 - wire.num_open)
                wire.read(0.01)
        self._collect(wires, 15.0)
        self.answers["never"] += sum(wire.num_open for wire in wires)

    def _collect(self, wires: list[Wire], seconds: float) -> None:
        end = time.monotonic() + seconds
        for wire in wires:
            while wire.num_open and time.monotonic() < end:
                wire.read(0.1)
            self.sent += wire.sent
            self.answers += wire.answers

    async def calls(self, prepare: Callable[[Any], Awaitable[list[Any]]]) -> None:
        """Eight callers, each of which makes the prepared calls over and over."""
        options = self.options
        credentials = ClientTls(ca=options.ca).credentials()
        limits = (("grpc.max_send_message_length", 2 * MAX_MESSAGE_BYTES),)
        async with grpc.aio.secure_channel(options.address, credentials, limits) as channel:
            stub = verify_pb2_grpc.VerifyServiceStub(channel)
            made = await prepare(stub)
            self.begin()

            async def caller() -> None:
                while self.goes_on:
                    for method, request in made:
                        self.sent += 1
                        try:
                            await method(request, metadata=bearer(options.token))
                            self.answers["OK"] += 1
                        except grpc.RpcError as error:
                            self.answers[error.code().name] += 1

            callers = [asyncio.create_task(caller()) for _ in range(8)]
            await asyncio.to_thread(self._over.wait)
            ended, waiting = await asyncio.wait(callers, timeout=0.5)  # refusals queue for longer
            for task in waiting:
                task.cancel()
            for task in ended:
                task.result()

    async def other(self, stub: Any) -> list[Any]:
        """Use a session of another tenant."""
        named = {"session_id": self.options.session, "epoch": 1}
        resume = verify_pb2.OpenRequest(resume_session_id=self.options.session)
        return [
            (stub.Verify, verify_pb2.VerifyRequest(**named, round=1)),
            (stub.Truncate, verify_pb2.TruncateRequest(**named, length=1)),
            (stub.Open, resume),
        ]

    async def replay(self, stub: Any) -> list[Any]:
        """Repeat what was said before another stream took the session over."""
        said = bearer(self.options.token)
        opened = await stub.Open(verify_pb2.OpenRequest(token_ids=PROMPT), metadata=said)
        first = verify_pb2.VerifyRequest(
            session_id=opened.session_id, epoch=opened.epoch, round=1, base_length=len(PROMPT)
        )
        await stub.Verify(first, metadata=said)
        resume = verify_pb2.OpenRequest(resume_session_id=opened.session_id)
        await stub.Open(resume, metadata=said)
        return [(stub.Verify, first)]

    async def oversized(self, stub: Any) -> list[Any]:
        """Messages that are longer than the server takes."""
        size = self.options.max_message_bytes
        return [(stub.Open, verify_pb2.OpenRequest(token_ids=[1] * size))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("flood", "loris", "other", "replay", "oversized"))
    parser.add_argument("address")
    parser.add_argument("--ca", required=True)
    parser.add_argument("--token")
    parser.add_argument("--source", default="", help="address that the flood comes from")
    parser.add_argument("--rate", type=float, default=10_000, help="of the flood, opens a second")
    parser.add_argument("--heedless", action="store_true")
    parser.add_argument("--session", default="", help="id of another tenant's session")
    parser.add_argument("--max-message-bytes", type=int, default=MAX_MESSAGE_BYTES)
    os.nice(19)
    options = parser.parse_args(shlex.split(sys.stdin.readline()))
    attack = Attack(options)
    if options.kind in ("flood", "loris"):
        getattr(attack, options.kind)()
    else:
        asyncio.run(attack.calls(getattr(attack, options.kind)))
    print(json.dumps({"sent": attack.sent, "answers": dict(+attack.answers)}), flush=True)


if __name__ == "__main__":
    main()
