"""A target replica: an engine on its own thread, with VerifyService and GenerateService."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from paceline.config import SpeculationConfig
from paceline.deployments.config import DeploymentConfig
from paceline.deployments.direct import DirectListener
from paceline.deployments.drafter_leases import DrafterLeases
from paceline.deployments.experience import ExperienceFile
from paceline.deployments.learner import RejectionSender, WeightsFollower
from paceline.deployments.lease import Endpoint, Holder, LeaseBook, data_host
from paceline.deployments.metrics import report_engine
from paceline.errors import InvalidArgument
from paceline.memory import keep_loaded
from paceline.rpc.access import Gate
from paceline.rpc.audit import Audit
from paceline.rpc.bridge import on_engine
from paceline.rpc.drafter_pool import DrafterPool
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.server import start_server
from paceline.tokenizer import chat_template

if TYPE_CHECKING:
    from paceline.deployments.engines.diffusion import DiffusionEngine
    from paceline.deployments.engines.vllm import VllmEngine
    from paceline.engine import Engine, EngineThread, Serving
    from paceline.models.llama_weights import LlamaWeights

logger = logging.getLogger(__name__)

DRAFTER_TIMEOUT_S = 30.0
"""Seconds that a new target waits for a drafter."""
HEALTH_TIMEOUT_S = 20.0
SWITCH_S = 0.0005
"""Seconds that a thread waits for the interpreter: a tenth of Python's default."""


def _prepare(engine: Engine, speculation: SpeculationConfig) -> None:
    """Do what the first request would wait for: read drafters' weights, measure costs.

    Raises:
        InvalidArgument: the engine cannot run the method.
    """
    from paceline.profile import LoadCosts

    engine.intake.prepare(speculation)
    measure = engine.length_context.measure
    if speculation.method != "ar" and isinstance(measure, LoadCosts):
        measure.prepare()


def _load(config: DeploymentConfig) -> Engine:
    from paceline.loading import limit_threads, load_engine

    model = config.model
    limit_threads(config.num_threads(config.target.num_cpus))
    return load_engine(
        config.target_folder,
        config.drafter_folder if config.topology == "colocated" else None,
        heads=model.heads,
        dtype=model.dtype,
        device=model.device,
        drafter_device=model.drafter_device,
        batch_invariant=model.batch_invariant,
        kv_tokens=model.kv_tokens,
        limits=config.target.limits.engine_limits(),
        translate=config.speculation.method == "omnidraft",
        numerics=config.target.numerics,
        adapters=config.model.adapters,
        adapter_drafters=config.model.adapter_drafters,
        corpus=[Path(file).read_text("utf-8", errors="replace") for file in model.corpus],
    )


def _load_masked(config: DeploymentConfig) -> DiffusionEngine:
    from paceline.deployments.engines.diffusion import DiffusionEngine
    from paceline.loading import limit_threads

    limit_threads(config.num_threads(config.target.num_cpus))
    return DiffusionEngine(config)


@serve.deployment
class TargetDeployment:
    """Verifies drafts and runs the loop; drafters are in its process or in other replicas.

    Args:
        drafters: the drafter deployment in topology ``actors``, else None.
        learner: trains the draft model on what the target rejects; None: nothing does.
    """

    async def __init__(
        self,
        config: DeploymentConfig,
        drafters: DeploymentHandle[Any] | None = None,
        learner: DeploymentHandle[Any] | None = None,
    ) -> None:
        # A forward releases the interpreter, and all wait until the engine has it again.
        sys.setswitchinterval(SWITCH_S)
        self._drafters = drafters
        self._pool: DrafterPool | None = None
        direct = self._direct = DirectListener(config, audit=Audit())
        self._leasing: asyncio.Task[None] | None = None
        self._experience: asyncio.Task[None] | None = None
        self._learning: list[asyncio.Task[None]] = []
        tls = config.data_plane_tls
        self._tracing = config.tracing.start("paceline-target")
        self._engine: Serving
        config = await asyncio.to_thread(config.with_local_models)
        if config.engine == "vllm":
            batch_invariant = False
            self._engine = await self._start_vllm(config)
        elif config.engine == "diffusion":
            batch_invariant = True
            self._engine = await asyncio.to_thread(_load_masked, config)
        else:
            engine = await self._start_engine(config)
            batch_invariant = engine.engine.target.runner.batch_invariant
            self._engine = engine
        self._server = await start_server(
            engine=self._engine,
            model=ModelInfo(
                name=config.model.name,
                dtype=config.model.dtype,
                batch_invariant=batch_invariant,
                default_speculation=config.speculation,
                chat_template=chat_template(config.target_folder),
            ),
            host=data_host(config),
            credentials=None if tls is None else tls.server().credentials(),
            insecure=config.data_plane_insecure,
            gate=Gate(limits=config.target.limits.call_limits()),
            idle_timeout_s=config.target.idle_timeout_s,
            tracing=self._tracing,
            numerics_mismatch=config.target.numerics_mismatch,
            lease_ended=lambda lease: self._leases.session_ended(lease, direct.unused(lease)),
            register=direct.register if config.direct.enabled else None,
        )
        keep_loaded()
        self._reporting = report_engine(config.model.name, self._engine, self._server.gate)
        target = self._engine.engine.target
        self._fingerprint = str(target.fingerprint)
        self._leases = LeaseBook(
            self._server.address, self._fingerprint,
            tuple(str(target.fingerprint_of(adapter)) for adapter in target.adapters),
        )  # fmt: skip
        if config.direct.enabled and self._server.verify is not None:
            await direct.start(self._server.verify)
        if config.engine == "paceline":
            file = ExperienceFile.of_thread(engine, self._fingerprint, config.experience)
            self._experience = asyncio.create_task(file.run())
            if learner is not None:
                await self._learn(engine, learner, config)
        if self._pool is not None:
            ready = await asyncio.to_thread(self._pool.wait_ready, DRAFTER_TIMEOUT_S)
            if not ready:
                logger.warning("no drafter answers yet: sessions run as AR until one does")

    async def _start_engine(self, config: DeploymentConfig) -> EngineThread:
        """Start Paceline's own engine on its thread."""
        engine = await asyncio.to_thread(_load, config)
        # Loaded already, by the thread that loaded the engine.
        from paceline.engine import EngineThread
        from paceline.profile import LoadCosts
        from paceline.rpc.mirrors import served_with

        if self._drafters is not None:
            tls = config.data_plane_tls
            pool = self._pool = DrafterPool(
                vocab_size=engine.target.vocab_size,
                deadline_s=config.drafter.deadline_s,
                tls=None if tls is None else tls.client(),
            )
            for method in engine.catalogue.values():
                if served_with(method, config.hosted_drafter):
                    engine.drafters[method.drafter] = pool
            measured = config.hosted_drafter == "draft_model"  # rounds measure the others
            if measured and isinstance(engine.length_context.measure, LoadCosts):
                engine.length_context.measure.remote = pool

            async def use(addresses: list[str]) -> Collection[str]:
                await asyncio.to_thread(pool.use, addresses)
                return pool.connected

            self._lease_drafters(config, use)
        try:
            await asyncio.to_thread(_prepare, engine, config.speculation)
        except InvalidArgument as error:
            logger.warning("requests that name no method will be refused: %s", error)
        return EngineThread(engine).start()

    async def _learn(
        self, engine: EngineThread, learner: DeploymentHandle[Any], config: DeploymentConfig
    ) -> None:
        """Send the learner what the target rejects, and take its weights for a drafter here."""
        self._learning.append(asyncio.create_task(RejectionSender(engine, learner, config).run()))
        if config.topology == "actors":
            return
        from paceline.drafters.draft_model import DraftModel

        async def use(apply: Callable[[LlamaWeights], None], weights: LlamaWeights) -> None:
            await asyncio.wrap_future(engine.call(lambda _: apply(weights)))

        drafter = engine.engine.drafters["draft_model"]
        assert isinstance(drafter, DraftModel)  # the configuration is checked
        replica = self._leases.endpoint.replica_id
        follower = WeightsFollower(learner, replica, drafter.runner, use)
        self._learning.append(asyncio.create_task(follower.run()))

    async def _start_vllm(self, config: DeploymentConfig) -> VllmEngine:
        """Start vLLM, in topology ``actors`` with a pool of drafter replicas."""
        from paceline.deployments.engines.vllm import VllmEngine

        engine = VllmEngine(config, None if self._drafters is None else ())
        await engine.start()
        if self._drafters is not None:
            self._lease_drafters(config, engine.use_drafters)
        return engine

    def _lease_drafters(
        self, config: DeploymentConfig, use: Callable[[list[str]], Awaitable[Collection[str]]]
    ) -> None:
        assert self._drafters is not None
        leases = DrafterLeases(self._drafters, config.drafter.max_replicas, use)
        self._leasing = asyncio.create_task(leases.run())

    async def open_session(self, holder: Holder, prefer: str = "") -> AsyncIterator[Endpoint]:
        """The lease of one session: yields this replica's endpoint and stays open until it ends.

        Args:
            prefer: for :class:`paceline.deployments.affinity.AffinityRouter`, which has read it.
        """
        async for endpoint in self._leases.hold(holder):
            yield endpoint

    def address(self) -> Endpoint:
        """The endpoint of this replica's data plane."""
        return self._leases.endpoint

    async def status(self) -> dict[str, Any]:
        """Counters for `paceline status`."""
        endpoint = self._leases.endpoint

        def counters(engine: Any) -> dict[str, Any]:
            load = engine.load
            prefixes = getattr(engine.target, "prefixes", None)
            denoising = getattr(engine, "denoising", None)
            return {
                "sessions": load.num_running + load.num_waiting,
                "waiting": load.num_waiting,
                "kv_free": engine.target.num_free,
                "kv_capacity": engine.target.kv_capacity,
                "prefix_queried": 0 if prefixes is None else prefixes.num_queried,
                "prefix_hit": 0 if prefixes is None else prefixes.num_hit,
                **({} if denoising is None else {"denoising": denoising}),
            }

        status = {
            "replica_id": endpoint.replica_id,
            "pid": endpoint.pid,
            "address": endpoint.address,
            "fingerprint": self._fingerprint,
            "leases": self._leases.num_leases,
            **await on_engine(self._engine, counters),
        }
        if self._pool is not None:
            drafts = self._pool.counters
            status["drafters"] = self._pool.describe()
            status["draft_frames"] = drafts.num_frames
            status["draft_wait_seconds"] = drafts.wait_seconds
            status["draft_compute_seconds"] = drafts.draft_seconds
            status["states_bytes"] = drafts.states_bytes
        return status

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Measurements for an autoscaling policy of Serve; all but ``sessions`` are totals."""

        def measure(engine: Engine) -> dict[str, float]:
            load = engine.load
            rounds, verify_seconds = engine.count_rounds()
            return {
                "sessions": load.num_running + load.num_waiting,
                "rounds": rounds,
                "verify_seconds": verify_seconds,
            }

        stats = await on_engine(self._engine, measure)
        if self._pool is not None:
            counters = self._pool.counters
            stats["draft_frames"] = counters.num_frames
            stats["draft_wait_seconds"] = counters.wait_seconds
            stats["drafts_lost"] = counters.num_late + counters.num_refused
        return stats

    async def check_health(self) -> None:
        """Raise if the engine takes no calls any more; Serve then replaces the replica."""
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            await on_engine(self._engine, lambda engine: None)
        check = getattr(self._engine, "check_health", None)
        if check is not None:
            await check()

    async def __del__(self) -> None:
        # Serve awaits this once, after draining. The constructor may have failed half-way.
        if hasattr(self, "_leases"):
            self._leases.close()
            await self._direct.stop(grace=0.5)
            await self._server.stop(grace=0.5)
            await self._reporting.stop()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.stop)
        for task in (self._leasing, self._experience, *self._learning):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if hasattr(self, "_engine"):
            await asyncio.to_thread(self._engine.stop)
        if self._pool is not None:
            await asyncio.to_thread(self._pool.stop)
