"""One gRPC stream of a session to a server: frames there, and what comes back in an inbox."""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.errors import PacelineError
from paceline.rpc.errors import InternalError, ServerUnavailable, from_rpc_error
from paceline.rpc.gen.paceline.v1 import (
    generate_pb2,
    generate_pb2_grpc,
    verify_pb2,
    verify_pb2_grpc,
)

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Alive:
    """Whether a silent server has answered a health check."""

    alive: bool


Reply = verify_pb2.VerifyReply | generate_pb2.GenerateReply
Event = tuple["TargetStream", Reply | Alive | PacelineError]


class LeftSessions:
    """Sessions by server that were left without Close, and may still hold memory there."""

    def __init__(self) -> None:
        self._closes: dict[str, list[verify_pb2.CloseRequest]] = {}

    def add(self, address: str, session_id: str, epoch: int) -> None:
        """Note one, which has been given up."""
        if session_id:
            left = verify_pb2.CloseRequest(session_id=session_id, epoch=epoch)
            self._closes.setdefault(address, []).append(left)

    def free(self, stream: TargetStream) -> None:
        """Close those of the server of a new stream."""
        for left in self._closes.pop(stream.address, ()):
            stream.free(left)


class TargetStream:
    """A stream on a connection of its own, read by a thread of its own.

    Args:
        channel: is closed with the stream.
        inbox: gets each reply, each answer to :meth:`probe`, and at the end the error.
        request: of a Generate call; None opens a verify session, which takes frames.
        replaces: the session's stream so far, open until this one has the session or is closed: a
            session ends with its stream.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        address: str,
        inbox: queue.SimpleQueue[Event],
        request: generate_pb2.GenerateRequest | None,
        replaces: TargetStream | None = None,
    ) -> None:
        self.address = address
        self._replaces = replaces
        self._channel = channel
        self._inbox = inbox
        self._outbox: queue.SimpleQueue[verify_pb2.VerifyFrame | None] = queue.SimpleQueue()
        self._probing = False
        if request is None:
            stub = verify_pb2_grpc.VerifyServiceStub(channel)
            self._call: Any = stub.Session(iter(self._outbox.get, None))
        else:
            self._call = generate_pb2_grpc.GenerateServiceStub(channel).Generate(request)
        threading.Thread(target=self._read, name="remote-target", daemon=True).start()

    def send(self, frame: verify_pb2.VerifyFrame) -> None:
        """Queue a frame of a verify session."""
        self._outbox.put(frame)

    def probe(self, timeout: float) -> None:
        """Ask whether the server is alive, unless that is being asked; the inbox gets the answer.

        Args:
            timeout: seconds after which it counts as lost.
        """
        if self._probing:
            return
        self._probing = True
        check = health_pb2_grpc.HealthStub(self._channel).Check.future(
            health_pb2.HealthCheckRequest(), timeout=timeout
        )
        check.add_done_callback(self._probed)

    def _probed(self, check: Any) -> None:
        lost = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        self._probing = False
        self._inbox.put((self, Alive(check.code() not in lost)))

    def _read(self) -> None:
        error: PacelineError
        try:
            for reply in self._call:
                self._inbox.put((self, reply))
            error = ServerUnavailable(f"{self.address}: the stream ended")
        except grpc.RpcError as rpc_error:
            error = from_rpc_error(rpc_error)
        except Exception as unforeseen:
            logger.exception("unforeseen error on the stream to %s", self.address)
            error = InternalError(f"{self.address}: {unforeseen}")
        self._inbox.put((self, error))

    def free(self, request: verify_pb2.CloseRequest) -> None:
        """Close another session of this server without waiting for the answer."""
        stub = verify_pb2_grpc.VerifyServiceStub(self._channel)
        stub.Close.future(request, timeout=_CLOSE_TIMEOUT_S)

    def has_session(self) -> None:
        """The server has opened or resumed the session on this stream."""
        replaced, self._replaces = self._replaces, None
        if replaced is not None:
            replaced.close()

    def close(self) -> None:
        """End the stream, which frees its session on the server."""
        self.has_session()
        self._outbox.put(None)  # ends gRPC's thread that waits for frames
        self._call.cancel()
        self._channel.close()
