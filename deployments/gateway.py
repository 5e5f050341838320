"""The gateway: a fixed port for gRPC and one for HTTP in front of the target replicas.

For each call it holds a lease on a target that Serve picks, and passes messages on as the bytes
that came in. It reads the frames of verify sessions where routing needs it: a session id names the
replica that has the session, whichever gateway opened it (``session_ids.py``). A generation whose
target goes away continues on another one. A verify session does not: its client has the tokens, and
opens it again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import grpc
from ray import serve
from ray.serve.handle import DeploymentHandle

from paceline.deployments.affinity import PrefixTable, message_keys
from paceline.deployments.config import (
    TENANTS_VARIABLE,
    DeploymentConfig,
    DirectConfig,
    GatewayConfig,
)
from paceline.deployments.lease import IdleLeases, Lease, open_lease
from paceline.deployments.ledger import START_S, RayLink, SharedQuotas
from paceline.deployments.metrics import report_gauges
from paceline.deployments.openai.api import make_app
from paceline.deployments.openai.server import HttpServer, start_http
from paceline.deployments.poison import Poison, digest_of
from paceline.deployments.scrape import application_metrics
from paceline.deployments.session_ids import KeyFile, SessionIds
from paceline.deployments.target_calls import (
    Metadata,
    TargetCalls,
    TargetGone,
    gone,
    metadata_of,
    parsed,
)
from paceline.deployments.verify_relay import VerifyRelay
from paceline.errors import (
    NumericsMismatch,
    ResourceExhausted,
)
from paceline.memory import keep_loaded
from paceline.rpc.access import CallAdmission, Gate
from paceline.rpc.audit import Audit
from paceline.rpc.continuation import Continuation
from paceline.rpc.errors import ServerUnavailable
from paceline.rpc.gen.paceline.v1 import generate_pb2
from paceline.rpc.messages import continuations_of
from paceline.rpc.server import PortInUse, start_server
from paceline.rpc.streams import Unread, read_ahead
from paceline.rpc.tenants import Tenants
from paceline.rpc.tls import ClientTls
from paceline.rpc.tracing import Tracing, traceparent_of
from paceline.scoring import token_tree

logger = logging.getLogger(__name__)

GENERATE: str = generate_pb2.DESCRIPTOR.services_by_name["GenerateService"].full_name

MAX_TRIES = 3
"""Targets that a generation may lose in a row without a token."""
MAX_UNREACHED = 8
"""Targets that may be gone before they have the request, each of which costs a short wait."""
MAX_UNREAD = 256 * 1024
"""Bytes that a generation may be ahead of its reader."""
_RETRY_S = 0.2
_CHARACTERS_PER_TOKEN = 4
_START_ATTEMPT_S = 60.0
_KEYS_INTERVAL_S = 2.0

Context = grpc.aio.ServicerContext[bytes, bytes]
_Reply = tuple[bytes, generate_pb2.GenerateReply]


class Relay:
    """GenerateService and VerifyService in front of the target replicas.

    Args:
        open_lease: a lease on a target that can take a session, or ServerUnavailable.
        idle_timeout_s: seconds without a frame after which the gateway closes a stream.
        resume_s: seconds in which a generation that has lost its target looks for another one.
        gate: admits callers, and counts what they use.
        session_ids: with the keys of all gateways; None: sessions are this gateway's.
        tls: for the connections to targets; None is plain text.
        tracing: None traces nothing.
        prefixes: which target has read which beginnings of prompts; None: all are alike.
        poison: what is known of requests whose targets died; None: what this gateway sees alone.
        direct: as of VerifyRelay.
    """

    def __init__(
        self,
        open_lease: Callable[..., Awaitable[Lease]],
        *,
        idle_timeout_s: float,
        resume_s: float,
        gate: Gate,
        session_ids: SessionIds | None = None,
        tls: ClientTls | None = None,
        tracing: Tracing | None = None,
        prefixes: PrefixTable | None = None,
        poison: Poison | None = None,
        direct: DirectConfig | None = None,
    ) -> None:
        self._calls = TargetCalls(open_lease, tls)
        self._prefixes = prefixes
        self._idle = IdleLeases()
        self._resume_s = resume_s
        self._tracing = tracing
        self._gate = gate
        self._poison = poison or Poison()
        self._verify = VerifyRelay(
            self._calls,
            idle_timeout_s=idle_timeout_s,
            gate=gate,
            session_ids=session_ids or SessionIds.random(),
            tracing=tracing,
            prefixes=prefixes,
            direct=direct,
        )

    @property
    def num_calls(self) -> int:
        """Calls to targets that are under way."""
        return self._calls.num_calls

    @property
    def num_sessions(self) -> int:
        """Verify sessions that were opened here and that a client may still use."""
        return self._verify.num_sessions

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Add the services, without codecs: messages stay bytes."""
        handlers: dict[str, dict[str, Any]] = {
            GENERATE: {
                "Generate": grpc.unary_stream_rpc_method_handler(self._generate),
                "GetModel": grpc.unary_unary_rpc_method_handler(self._get_model),
                "Tokenize": grpc.unary_unary_rpc_method_handler(self._tokenize),
                "Detokenize": grpc.unary_unary_rpc_method_handler(self._detokenize),
            },
            **self._verify.handlers,
        }
        for service, methods in handlers.items():
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, methods),)
            )
        return list(handlers)

    # --- GenerateService ------------------------------------------------------------------------

    async def generate(
        self, request: bytes, timeout_s: float | None = None, traceparent: str = ""
    ) -> AsyncGenerator[_Reply]:
        """One generation for a caller of any protocol: each reply as bytes and as a message.

        When its target goes away, it goes on with the same tokens on another one. A reader that
        leaves too much unread parks it: it gives its target up, and goes on with the same tokens
        when all is read. To close the generator ends the session and gives the lease back.

        Args:
            request: a GenerateRequest.
            timeout_s: for the whole generation; None: no limit.
            traceparent: W3C trace context of the caller.

        Raises:
            PacelineError: the gate or the target refuses, or there is no target.
        """
        await self._gate.before_open()
        with self._gate.call("gateway.generate", self._tracing, traceparent) as admission:
            message = parsed(generate_pb2.GenerateRequest, request)
            whole = Continuation(request, timeout_s, fingerprint=message.fingerprint)
            digest = digest_of(message)
            self._poison.check(digest)
            admission.reserve(_prompt_tokens(message))
            metadata = metadata_of(admission, admission.span)
            suspect = self._poison.is_suspect(digest)
            keys = () if self._prefixes is None else message_keys(message, metadata)
            num_unreached = 0
            while True:
                try:
                    attempt = self._generate_once(request, whole, metadata, keys)
                    if suspect:
                        attempt = self._in_turn(attempt, digest)
                    attempt = self._charged(attempt, digest, admission)
                    ahead = read_ahead(
                        attempt, _size, MAX_UNREAD,
                        may_stop=lambda: not (whole.is_silent or whole.finished),
                    )  # fmt: skip
                    async with aclosing(ahead) as replies:
                        async for reply in replies:
                            yield reply
                    break
                except (TargetGone, Unread, ResourceExhausted, NumericsMismatch) as error:
                    suspect = suspect and whole.is_silent
                    keys = ()  # the replica that knows the prompt has died or refused it
                    gone = error if isinstance(error, TargetGone) else None
                    if gone is not None and gone.taken and whole.is_silent:
                        suspect = True
                        self._poison.died(digest, gone.replica_id)
                    # A replica that has just died, or stops, may be offered for a moment.
                    unreached = gone is not None and not gone.taken and whole.is_silent
                    num_unreached = num_unreached + 1 if unreached else 0
                    exhausted = gone is not None and whole.num_tries >= MAX_TRIES
                    if unreached:
                        exhausted = num_unreached >= MAX_UNREACHED
                    if exhausted or not whole.may_go_on(error, self._resume_s):
                        raise
                    logger.info("after %d tokens: %s", whole.num_tokens, error)
                    if unreached or gone is None:
                        await asyncio.sleep(_RETRY_S)
                    request = whole.next_request(was_asked=not unreached)

    async def _charged(
        self, attempt: AsyncGenerator[_Reply], digest: str, admission: CallAdmission
    ) -> AsyncGenerator[_Reply]:
        """An attempt, whose work its tenant pays when it is done, read or not."""
        admission.on_replica(True)
        try:
            async with aclosing(attempt) as replies:
                async for reply, message in replies:
                    if message.token_ids or message.continuations:
                        self._poison.lives(digest)
                    admission.opened()
                    if message.prompt_length:
                        admission.settle(message.num_positions or message.prompt_length)
                    after = (len(each.reply.token_ids) for each in message.continuations)
                    admission.charge(len(message.token_ids) + sum(after))
                    yield reply, message
        finally:
            admission.on_replica(False)

    async def _in_turn(
        self, attempt: AsyncGenerator[_Reply], digest: str
    ) -> AsyncGenerator[_Reply]:
        """An attempt that begins when no other suspect waits for its first token."""
        async with aclosing(attempt) as replies:
            async with self._poison.turn:
                self._poison.check(digest)  # the one before may have been the same
                try:
                    first = await anext(replies, None)
                except TargetGone as error:
                    if error.taken:  # before the next one has its turn
                        self._poison.died(digest, error.replica_id)
                    raise
            if first is None:
                return
            yield first
            async for reply in replies:
                yield reply

    async def _generate_once(
        self, request: bytes, whole: Continuation, metadata: Metadata, keys: Sequence[bytes]
    ) -> AsyncGenerator[_Reply]:
        """The replies of one target, which also go into ``whole``.

        The last one comes when the call has ended and its lease is given back.

        Args:
            keys: of the prompt's beginnings, for the table of prefixes.
        """
        prefer = "" if self._prefixes is None else self._prefixes.find(keys)
        kept = self._idle.take(whole.fingerprint, prefer)
        lease = kept or await self._calls.lease_for(whole.fingerprint, prefer)
        if self._prefixes is not None:
            self._prefixes.note(keys, lease.endpoint.replica_id)
        last: _Reply | None = None
        try:
            call = self._calls.generate(
                lease, f"/{GENERATE}/Generate", request, whole.timeout_s, metadata
            )
            async with aclosing(call) as replies:
                async for reply in replies:
                    message = generate_pb2.GenerateReply.FromString(reply)
                    if message.finish_reason == "cancelled":  # the target does this when it stops
                        raise gone(lease)
                    changed = whole.add(message)
                    answer = (message.SerializeToString() if changed else reply), message
                    if message.finish_reason:
                        last = answer
                    else:
                        yield answer
        except BaseException as error:
            lease.release()
            if last is None or not isinstance(error, TargetGone):
                raise
        else:
            self._idle.keep(lease)
        if last is not None:
            yield last

    async def get_model(self, request: bytes = b"", timeout_s: float | None = None) -> bytes:
        """What the targets serve, as a Model.

        Raises: as :meth:`generate`.
        """
        return await self._unary("GetModel", request, timeout_s)

    async def tokenize(self, request: bytes, timeout_s: float | None = None) -> bytes:
        """The Tokens of a TokenizeRequest.

        Raises: as :meth:`generate`.
        """
        await self._count_open()
        return await self._unary("Tokenize", request, timeout_s)

    async def detokenize(self, request: bytes, timeout_s: float | None = None) -> bytes:
        """The Text of a DetokenizeRequest.

        Raises: as :meth:`generate`.
        """
        await self._count_open()
        return await self._unary("Detokenize", request, timeout_s)

    async def _count_open(self) -> None:
        await self._gate.before_open(session=False)
        self._gate.count_open()

    async def _unary(self, method: str, request: bytes, timeout_s: float | None) -> bytes:
        lease = await self._calls.open_lease()
        try:
            return await self._calls.unary(lease, f"/{GENERATE}/{method}", request, timeout_s)
        finally:
            lease.release()

    async def _generate(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        traceparent = traceparent_of(context.invocation_metadata())
        call = self.generate(request, context.time_remaining(), traceparent)
        async with aclosing(call) as replies:
            async for reply, _ in replies:
                yield reply

    async def _get_model(self, request: bytes, context: Context) -> bytes:
        await self._count_open()
        return await self.get_model(request, context.time_remaining())

    async def _tokenize(self, request: bytes, context: Context) -> bytes:
        return await self.tokenize(request, context.time_remaining())

    async def _detokenize(self, request: bytes, context: Context) -> bytes:
        return await self.detokenize(request, context.time_remaining())

    async def close(self) -> None:
        """Give all leases back and close the connections."""
        self._verify.close()
        self._idle.close()
        await self._calls.close()


def _size(reply: _Reply) -> int:
    return len(reply[0])


def _prompt_tokens(request: generate_pb2.GenerateRequest) -> int:
    """Tokens of prompt and continuations; of a text, which only the target encodes, a guess."""
    prompt = len(request.token_ids.token_ids) or len(request.text) // _CHARACTERS_PER_TOKEN + 1
    return prompt + token_tree(continuations_of(request))[0].num_nodes


def _gate(config: GatewayConfig, quotas: SharedQuotas) -> Gate:
    # The variable may be set on the replica's own node only.
    path = config.tenants or os.environ.get(TENANTS_VARIABLE)
    if path:
        quotas.start()
    return Gate(
        tenants=Tenants(path) if path else None,
        limits=config.limits.call_limits(),
        audit=Audit(config.audit_log),
        shares=quotas if path else None,
    )


async def _session_ids(config: GatewayConfig, quotas: SharedQuotas) -> SessionIds:
    if config.session_keys is not None:
        return KeyFile(config.session_keys).session_ids()
    return SessionIds(await quotas.session_keys(START_S), quotas.session_keys)


async def _metrics() -> str:
    return await application_metrics(serve.get_replica_context().app_name)


async def _wait_for_target(targets: DeploymentHandle[Any]) -> None:
    """Return when a target takes sessions, however long its model takes to load."""
    while True:
        with suppress(ServerUnavailable):
            (await open_lease(targets, "target", _START_ATTEMPT_S)).release()
            return


@serve.deployment
class GatewayDeployment:
    """Where clients connect: gRPC and OpenAI's HTTP API on the ports of the config."""

    async def __init__(self, config: DeploymentConfig, targets: DeploymentHandle[Any]) -> None:
        gateway, data_tls = config.gateway, config.data_plane_tls
        self._drain_s = gateway.drain_s
        self._quotas = SharedQuotas(
            RayLink(serve.get_replica_context().app_name), num_gateways=gateway.num_replicas
        )
        self._session_ids = await _session_ids(gateway, self._quotas)
        self._gate = gate = _gate(gateway, self._quotas)
        tracing = config.tracing.start("paceline-gateway")
        self._relay = Relay(
            partial(open_lease, targets, "target", gateway.open_timeout_s),
            idle_timeout_s=config.target.idle_timeout_s,
            resume_s=gateway.open_timeout_s,
            gate=gate,
            session_ids=self._session_ids,
            tls=None if data_tls is None else data_tls.client(),
            tracing=tracing,
            prefixes=PrefixTable() if config.target.prefix_affinity else None,
            poison=self._quotas.poison,
            direct=config.direct if config.direct.enabled else None,
        )
        self._tracing = tracing
        # Load balancers send clients here as soon as the port is open: that has to mean a target.
        await _wait_for_target(targets)
        try:
            self._server = await start_server(
                register=self._relay.register,
                host=gateway.host,
                port=gateway.grpc_port,
                credentials=None if gateway.tls is None else gateway.tls.server().credentials(),
                insecure=gateway.insecure,
                gate=gate,
                max_connection_age_s=gateway.max_connection_age_s,
                max_connection_age_grace_s=gateway.max_connection_age_grace_s,
            )
        except PortInUse as error:
            raise PortInUse(f"gateway.host, gateway.grpc_port: {error}") from None
        keep_loaded()
        self._reporting = report_gauges(config.model.name, self._gauges, gate)
        self._http: HttpServer | None = None
        if gateway.http_port is not None:
            try:
                self._http = await start_http(
                    make_app(self._relay, gate, gateway.http, _metrics),
                    host=gateway.host,
                    port=gateway.http_port,
                    tls=None if gateway.tls is None else gateway.tls.server(),
                    insecure=gateway.insecure,
                )
            except PortInUse as error:
                raise PortInUse(f"gateway.host, gateway.http_port: {error}") from None
        self._refreshing = asyncio.create_task(self._refresh_keys())

    def status(self) -> dict[str, Any]:
        """Counters for `paceline status`."""
        return {
            "replica_id": serve.get_replica_context().replica_id.unique_id,
            "pid": os.getpid(),
            "address": self._server.address,
            "http": None if self._http is None else self._http.url,
            "calls": self._relay.num_calls,
            "sessions": self._gate.num_sessions,
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy follows: open sessions and generations."""
        return {"sessions": self._gate.num_sessions}

    def _gauges(self) -> dict[str, float]:
        return {
            "gateway_calls": self._relay.num_calls, "gateway_sessions": self._gate.num_sessions,
        }  # fmt: skip

    async def _refresh_keys(self) -> None:
        while True:
            await asyncio.sleep(_KEYS_INTERVAL_S)
            await self._session_ids.refresh()

    async def __del__(self) -> None:
        # Serve awaits this once after draining. The last attribute is missing when the constructor
        # has failed.
        if hasattr(self, "_refreshing"):
            self._refreshing.cancel()
            http = [] if self._http is None else [self._http.stop(self._drain_s)]
            await asyncio.gather(self._server.stop(self._drain_s), *http)
            await self._reporting.stop()
            await self._relay.close()
            await self._quotas.stop()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.stop)
