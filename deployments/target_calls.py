"""The gateway's calls to target replicas: leases, connections, and what their failures mean."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from paceline.deployments.lease import Endpoint, Lease, Unleased
from paceline.errors import InvalidArgument
from paceline.rpc.access import CACHE_SCOPE, ONLINE_TRAINING, WEIGHT, CallAdmission
from paceline.rpc.errors import Cancelled, ServerUnavailable, from_rpc_error
from paceline.rpc.messages import MAX_MESSAGE_BYTES
from paceline.rpc.tls import ClientTls
from paceline.rpc.tracing import Span

MAX_LOOKS = 16
"""Targets to look at for one with the numerics of a session that goes on."""
_MAX_ENDPOINTS = 1024
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),  # gRPC would repeat a session behind the client's back
    # A session that another gateway opened has no lease here that would tell of a dead machine.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)

_State = grpc.ChannelConnectivity

M = TypeVar("M", bound=Message)
Metadata = tuple[tuple[str, str], ...]


class TargetGone(ServerUnavailable):
    """The target of a call has gone.

    Attributes:
        taken: it was there when the call began, and did not stop in order: it died with the call.
        stopped: it said that it stops.
        replica_id: of the target.
    """

    taken = False
    stopped = False
    replica_id = ""


class TargetCalls:
    """Calls to targets, each on a lease. Messages stay bytes.

    Args:
        open_lease: a lease on a target that can take a session, or ServerUnavailable. Its argument,
            if it gets one, is the id of a replica that it should prefer.
        tls: for the connections to targets; None is plain text.

    Attributes:
        num_calls: under way.
    """

    def __init__(
        self, open_lease: Callable[..., Awaitable[Lease]], tls: ClientTls | None = None
    ) -> None:
        self.open_lease = open_lease
        self.num_calls = 0
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._endpoints: dict[str, Endpoint] = {}  # of replicas that it had leases on, by address

    def unleased(self, address: str) -> Unleased:
        """What stands for the lease on a replica that another gateway has."""
        return Unleased(self._endpoints.get(address) or Endpoint(address, 0, ""))

    async def lease_for(self, fingerprint: str, prefer: str = "") -> Lease:
        """A lease on a target with these numerics, or on another one if none is found.

        The other one refuses the session, or takes it if the request allows a mismatch. This keeps
        the leases on wrong targets until it is done, so that Serve looks at the others.
        """
        others: list[Lease] = []
        try:
            while True:
                wishes = (prefer,) if prefer and not others else ()
                lease = await self.open_lease(*wishes)
                found = not lease.endpoint.fingerprint or lease.endpoint.has(fingerprint)
                if found or len(others) == MAX_LOOKS - 1:
                    if len(self._endpoints) == _MAX_ENDPOINTS:
                        self._endpoints.clear()
                    self._endpoints[lease.endpoint.address] = lease.endpoint
                    return lease
                others.append(lease)
        except ServerUnavailable:  # the others are starting or busy
            if not others:
                raise
            return others.pop()
        finally:
            for other in others:
                other.release()

    def _channel(self, lease: Lease) -> grpc.aio.Channel:
        """One connection for each replica, shared by all calls."""
        address = lease.endpoint.address
        channel = self._channels.get(address)
        if channel is None:
            if self._tls is None:
                channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
            else:
                options = (*_CHANNEL_OPTIONS, *self._tls.options)
                credentials = self._tls.credentials()
                channel = grpc.aio.secure_channel(address, credentials, options=options)
            self._channels[address] = channel
        return channel

    async def unary(
        self,
        lease: Lease,
        path: str,
        request: bytes,
        timeout_s: float | None,
        metadata: Metadata = (),
    ) -> bytes:
        """The answer to a call that has one.

        Raises: as :meth:`replies`.
        """
        method: Any = self._channel(lease).unary_unary(path)
        call = method(request, timeout=timeout_s, metadata=metadata)
        async with self._under_way(call, lease):
            reply: bytes = await call
        return reply

    def stream(self, lease: Lease, path: str, **options: Any) -> Any:
        """A call with a stream of frames there and one of replies back; see :meth:`replies`."""
        method: Any = self._channel(lease).stream_stream(path)
        return method(**options)

    async def generate(
        self, lease: Lease, path: str, request: bytes, timeout_s: float | None, metadata: Metadata
    ) -> AsyncGenerator[bytes]:
        """The replies to a call with one request; see :meth:`replies`."""
        connected = await _is_connected(self._channel(lease))
        method: Any = self._channel(lease).unary_stream(path)
        call = method(request, timeout=timeout_s, metadata=metadata)
        try:
            async with aclosing(self.replies(call, lease)) as replies:
                async for reply in replies:
                    yield reply
        except TargetGone as error:
            error.taken = connected and not error.stopped and not lease.ended
            raise

    async def replies(self, call: Any, lease: Lease) -> AsyncGenerator[bytes]:
        """What the target answers; the call ends with this generator.

        Raises:
            PacelineError: the target's status.
            TargetGone: the target died.
        """
        async with self._under_way(call, lease):
            async for reply in call:
                yield reply

    @asynccontextmanager
    async def _under_way(self, call: Any, lease: Lease) -> AsyncIterator[None]:
        """Around a call: counts it, and raises gRPC's errors as the exceptions that they mean."""
        self.num_calls += 1
        lease.on_lost(call.cancel)
        try:
            yield
        except grpc.RpcError as error:
            raise await self._failure(error, lease) from None
        except asyncio.CancelledError:
            if not _client_left():
                raise gone(lease) from None
            raise
        finally:
            self.num_calls -= 1
            lease.forget(call.cancel)
            call.cancel()

    async def _failure(self, error: grpc.RpcError, lease: Lease) -> Exception:
        failure = from_rpc_error(error)
        if isinstance(failure, Cancelled):  # the replica has done it: it is stopping
            stopped = gone(lease)
            stopped.stopped = True
            return stopped
        if isinstance(failure, ServerUnavailable):
            channel = self._channels.pop(lease.endpoint.address, None)
            if channel is not None:
                await channel.close()
            return gone(lease)
        return failure

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()


async def _is_connected(channel: grpc.aio.Channel) -> bool:
    """Whether a connection stands, after waiting for one that is being made."""
    with suppress(grpc.aio.UsageError):  # another call has lost the target, and closed it
        while (state := channel.get_state(try_to_connect=True)) is not _State.READY:
            if state in (_State.TRANSIENT_FAILURE, _State.SHUTDOWN):
                return False
            await channel.wait_for_state_change(state)
        return True
    return False


def _client_left() -> bool:
    """Whether gRPC has cancelled the handler, and not only its call to the target.

    When the target is lost, the lease cancels the call alone, or another call does that noticed
    first and closed their connection. A session's own sender does so, too, and leaves its error in
    the stream. gRPC answers nothing for a handler that ends as cancelled, so only a client that has
    left may end it so.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def metadata_of(admission: CallAdmission, span: Span | None = None) -> Metadata:
    """What a target has to know about a call beyond the message.

    Args:
        span: that the target's spans belong to.
    """
    metadata: Metadata = ()
    if admission.owner is not None:  # metadata cannot carry every tenant's name
        metadata = ((CACHE_SCOPE, scope_of(admission)), (WEIGHT, f"{admission.weight:g}"))
        if admission.teaches:
            metadata = (*metadata, (ONLINE_TRAINING, "1"))
    return metadata if span is None else (*metadata, ("traceparent", span.traceparent))


def scope_of(admission: CallAdmission) -> str:
    """How targets know the owner of a call: a digest of the tenant's name; "" without tenants."""
    owner = admission.owner
    return "" if owner is None else hashlib.sha256(owner.encode()).hexdigest()


def parsed(message: type[M], data: bytes) -> M:
    """Read a message.

    Raises:
        InvalidArgument: the bytes are not such a message.
    """
    try:
        return message.FromString(data)
    except DecodeError:
        name = message.DESCRIPTOR.full_name
        raise InvalidArgument("message", f"{len(data)} bytes", f"a {name}") from None


def gone(lease: Lease) -> TargetGone:
    """The error of a call whose target has gone."""
    endpoint = lease.endpoint
    who = f"the target at {endpoint.address}"
    if endpoint.pid:
        who = f"target replica {endpoint.replica_id} at {endpoint.address} (process {endpoint.pid})"
    error = TargetGone(f"{who} is gone, and the session with it; send the request again")
    error.replica_id = endpoint.replica_id
    return error
