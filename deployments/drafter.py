"""A drafter replica: DraftService over a draft model or another drafter, on a port of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve
from ray.serve.handle import DeploymentHandle

from paceline.deployments.config import DeploymentConfig
from paceline.deployments.learner import WeightsFollower
from paceline.deployments.lease import Endpoint, Holder, LeaseBook, data_host
from paceline.deployments.metrics import report_gauges
from paceline.masked_folder import MASKED_DRAFTERS
from paceline.memory import keep_loaded
from paceline.rpc.server import start_server

if TYPE_CHECKING:
    from paceline.drafters.base import Drafter
    from paceline.models.llama_weights import LlamaWeights

HEALTH_TIMEOUT_S = 10.0
"""Seconds for a health check; Serve replaces a replica that fails three in a row."""


def _load(config: DeploymentConfig) -> tuple[Drafter, int, int | None]:
    """The drafter, the size of its vocabulary, and its context length in tokens (None: any)."""
    from paceline.loading import (
        limit_threads,
        load_drafter,
        load_head_drafter,
        load_masked_drafter,
        make_drafter,
    )

    folder, model = config.drafter_folder, config.model
    limit_threads(config.num_threads(config.drafter.num_cpus))
    if config.hosts_head:
        head = load_head_drafter(
            config.hosted_drafter,
            config.target_folder,
            model.heads,
            dtype=model.dtype,
            device=model.drafter_device or model.device,
            kv_tokens=model.kv_tokens,
        )
        return head, head.target.vocab_size, head.target.context_length
    if folder is None:
        drafter, vocab_size = make_drafter(config.hosted_drafter, config.target_folder)
        return drafter, vocab_size, None
    if config.hosted_drafter in MASKED_DRAFTERS:
        masked = load_masked_drafter(folder, config.target_folder)
        return masked, masked.vocab_size, masked.context_length
    draft_model = load_drafter(
        folder,
        config.target_folder,
        dtype=model.dtype,
        device=model.drafter_device or model.device,
        kv_tokens=model.kv_tokens,
    )
    return draft_model, draft_model.vocab_size, draft_model.runner.context_length


@serve.deployment
class DrafterDeployment:
    """Drafts for the sessions of any number of target replicas.

    When it dies, its sessions draft with another one, or without any until there is one.

    Args:
        learner: gives the draft model new weights as it serves; None: they stay as they are.
    """

    async def __init__(
        self, config: DeploymentConfig, learner: DeploymentHandle[Any] | None = None
    ) -> None:
        self._follower: WeightsFollower | None = None
        self._tracing = config.tracing.start("paceline-drafter")
        # A drafter needs the target's tokenizer, a head also its embedding and output layer.
        weights = config.hosts_head
        config = await asyncio.to_thread(config.with_local_models, target_weights=weights)
        drafter, vocab_size, context_length = await asyncio.to_thread(_load, config)
        from paceline.rpc.draft_service import DraftServicer  # its imports are loaded already

        self._servicer = DraftServicer(
            drafter,
            name=config.hosted_drafter,
            vocab_size=vocab_size,
            context_length=context_length,
            max_sessions=config.drafter.max_sessions,
            states=config.drafter.states,
            fans=config.drafter.fans,
            tracing=self._tracing,
        )
        tls = config.data_plane_tls
        self._server = await start_server(
            drafter=self._servicer,
            host=data_host(config),
            credentials=None if tls is None else tls.server().credentials(),
            insecure=config.data_plane_insecure,
        )
        keep_loaded()
        self._reporting = report_gauges(
            config.model.name,
            lambda: {"drafter_sessions": self._servicer.num_sessions},
            self._server.gate,
        )
        address = self._server.address
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address)
        else:
            client = tls.client()
            self._channel = grpc.aio.secure_channel(
                address, client.credentials(), options=client.options
            )
        self._leases = LeaseBook(address)
        if learner is not None:
            self._follow(learner, drafter)

    def _follow(self, learner: DeploymentHandle[Any], drafter: Drafter) -> None:
        """Load the learner's weights between two drafts, which this event loop makes."""
        from paceline.drafters.draft_model import DraftModel

        assert isinstance(drafter, DraftModel)  # the configuration is checked

        async def use(apply: Callable[[LlamaWeights], None], weights: LlamaWeights) -> None:
            apply(weights)

        replica = self._leases.endpoint.replica_id
        self._follower = WeightsFollower(learner, replica, drafter.runner, use)
        self._following = asyncio.create_task(self._follower.run())

    async def open_session(self, holder: Holder) -> AsyncIterator[Endpoint]:
        """The lease of one target, for all of its sessions: yields this replica's endpoint."""
        async for endpoint in self._leases.hold(holder):
            yield endpoint

    def address(self) -> Endpoint:
        """The endpoint of this replica's data plane."""
        return self._leases.endpoint

    def status(self) -> dict[str, Any]:
        """Counters for `paceline status`."""
        endpoint = self._leases.endpoint
        return {
            "replica_id": endpoint.replica_id,
            "pid": endpoint.pid,
            "address": endpoint.address,
            "sessions": self._servicer.num_sessions,
            "leases": self._leases.num_leases,
            "weights_version": 0 if self._follower is None else self._follower.version,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Measurements for an autoscaling policy of Serve."""
        return {"sessions": self._servicer.num_sessions}

    async def check_health(self) -> None:
        """Raise if targets get no answer from this replica; Serve then replaces it.

        One event loop drafts, serves the port and runs this check, so a draft that never ends fails
        it as a dead port does.
        """
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)

    async def __del__(self) -> None:
        # Serve awaits this once, after draining, and not if the constructor failed.
        if self._follower is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        if hasattr(self, "_leases"):
            self._leases.close()
            await self._channel.close()
            await self._server.stop(grace=0.5)
            await self._reporting.stop()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.stop)
