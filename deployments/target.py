"""A target replica: the engine on its own thread, VerifyService and GenerateService beside it."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from paceline.deployments.config import DeploymentConfig
from paceline.deployments.lease import Endpoint, Holder, Lease, LeaseBook, data_host, open_lease
from paceline.deployments.metrics import report_engine
from paceline.rpc.access import Gate
from paceline.rpc.bridge import on_engine
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.remote_drafter import RemoteDrafter
from paceline.rpc.server import start_server
from paceline.tokenizer import chat_template

if TYPE_CHECKING:
    from paceline.deployments.engines.vllm import VllmEngine
    from paceline.engine import Engine, EngineThread, Serving

logger = logging.getLogger(__name__)

DRAFTER_TIMEOUT_S = 30.0
"""How long a new target waits for its drafter before it serves without, and a lease for one."""
HEALTH_TIMEOUT_S = 20.0
SWITCH_S = 0.0005
"""How long a thread may wait for the interpreter: a tenth of Python's default."""
POOL_INTERVAL_S = 1.0
"""How often vLLM's worker is asked which drafter replicas answer."""


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
    )


@serve.deployment
class TargetDeployment:
    """Verifies drafts and drives the loop; the drafter is in its process or behind a handle.

    Args:
        drafters: the drafter deployment in topology ``actors``, else None.
    """

    async def __init__(
        self, config: DeploymentConfig, drafters: DeploymentHandle[Any] | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        # The engine's thread gives the interpreter away in every forward, and is what all wait for.
        sys.setswitchinterval(SWITCH_S)
        self._drafters = drafters
        self._drafter_lease: Lease | None = None
        self._remote: RemoteDrafter | None = None
        tls = config.data_plane_tls
        self._tracing = config.tracing.start("paceline-target")
        self._pool: asyncio.Task[None] | None = None
        self._engine: Serving
        config = await asyncio.to_thread(config.with_local_models)
        if config.engine == "vllm":
            batch_invariant = False
            self._engine = await self._start_vllm(config)
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
        )
        self._reporting = report_engine(self._engine, self._server.gate)
        self._fingerprint = str(self._engine.engine.target.fingerprint)
        self._leases = LeaseBook(self._server.address, self._fingerprint)
        if self._remote is not None:
            ready = await asyncio.to_thread(self._remote.wait_ready, DRAFTER_TIMEOUT_S)
            if not ready:
                logger.warning("no drafter yet: sessions run as AR until there is one")

    async def _start_engine(self, config: DeploymentConfig) -> EngineThread:
        """Paceline's own engine on its thread."""
        engine = await asyncio.to_thread(_load, config)
        # Imported by now, on the thread that loaded the engine.
        from paceline.engine import EngineThread
        from paceline.profile import LoadCosts
        from paceline.rpc.mirrors import served_with

        if self._drafters is not None:
            tls = config.data_plane_tls
            self._remote = RemoteDrafter(
                self._find_drafter,
                vocab_size=engine.target.vocab_size,
                deadline_s=config.drafter.deadline_s,
                tls=None if tls is None else tls.client(),
            )
            for row in engine.catalogue.values():
                if served_with(row, config.hosted_drafter):
                    engine.drafters[row.drafter] = self._remote
            measured = config.hosted_drafter == "draft_model"  # other drafts are learnt from rounds
            if measured and isinstance(engine.length_context.measure, LoadCosts):
                engine.length_context.measure.remote = self._remote
        return EngineThread(engine).start()

    async def _start_vllm(self, config: DeploymentConfig) -> VllmEngine:
        """vLLM, with a pool of drafter replicas where the topology has some."""
        from paceline.deployments.engines.vllm import VllmEngine

        engine = VllmEngine(config, None if self._drafters is None else ())
        await engine.start()
        if self._drafters is not None:
            pool = DrafterPool(engine, self._drafters, config.drafter.max_replicas)
            self._pool = asyncio.create_task(pool.run())
        return engine

    async def open_session(self, holder: Holder) -> AsyncIterator[Endpoint]:
        """The lease of one session: yields this replica's address and ends with the session."""
        async for endpoint in self._leases.hold(holder):
            yield endpoint

    def address(self) -> Endpoint:
        """Where the data plane listens."""
        return self._leases.endpoint

    async def status(self) -> dict[str, Any]:
        """Counters for `paceline status`."""
        endpoint = self._leases.endpoint

        def counters(engine: Engine) -> dict[str, Any]:
            load = engine.load
            return {
                "sessions": load.num_running + load.num_waiting,
                "waiting": load.num_waiting,
                "kv_free": engine.target.num_free,
                "kv_capacity": engine.target.kv_capacity,
            }

        status = {
            "replica_id": endpoint.replica_id,
            "pid": endpoint.pid,
            "address": endpoint.address,
            "fingerprint": self._fingerprint,
            "leases": self._leases.num_leases,
            **await on_engine(self._engine, counters),
        }
        remote = self._remote
        if remote is not None:
            status["drafter_address"] = remote.address if remote.connected else None
            status["drafter_pid"] = remote.pid if remote.connected else None
            status["draft_frames"] = remote.counters.num_frames
            status["draft_wait_seconds"] = remote.counters.wait_seconds
            status["draft_compute_seconds"] = remote.counters.draft_seconds
        return status

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What an autoscaling policy of Serve may know; all but ``sessions`` only grow."""

        def measure(engine: Engine) -> dict[str, float]:
            load = engine.load
            rounds, verify_seconds = engine.count_rounds()
            return {
                "sessions": load.num_running + load.num_waiting,
                "rounds": rounds,
                "verify_seconds": verify_seconds,
            }

        stats = await on_engine(self._engine, measure)
        if self._remote is not None:
            counters = self._remote.counters
            stats["draft_frames"] = counters.num_frames
            stats["draft_wait_seconds"] = counters.wait_seconds
            stats["drafts_lost"] = counters.num_late + counters.num_refused
        return stats

    async def check_health(self) -> None:
        """Serve restarts a replica whose engine no longer takes calls."""
        await asyncio.wait_for(on_engine(self._engine, lambda engine: None), HEALTH_TIMEOUT_S)
        check = getattr(self._engine, "check_health", None)
        if check is not None:
            await check()

    def _find_drafter(self) -> str:
        """The address of a drafter replica; runs on a thread of the remote drafter."""
        future = asyncio.run_coroutine_threadsafe(self._lease_drafter(), self._loop)
        return future.result(DRAFTER_TIMEOUT_S + 5)

    async def _lease_drafter(self) -> str:
        assert self._drafters is not None
        if self._drafter_lease is not None:
            self._drafter_lease.release()
            self._drafter_lease = None
        self._drafter_lease = await open_lease(self._drafters, "drafter", DRAFTER_TIMEOUT_S)
        return self._drafter_lease.endpoint.address

    async def __del__(self) -> None:
        # Serve awaits this once after draining. Whatever the constructor reached is taken down.
        if hasattr(self, "_leases"):
            self._leases.close()
            await self._server.stop(grace=0.5)
            await self._reporting.stop()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.stop)
        if self._pool is not None:
            self._pool.cancel()
            await asyncio.gather(self._pool, return_exceptions=True)
        if hasattr(self, "_engine"):
            await asyncio.to_thread(self._engine.stop)
        if self._drafter_lease is not None:
            self._drafter_lease.release()
        if self._remote is not None:
            await asyncio.to_thread(self._remote.stop)


class DrafterPool:
    """Keeps vLLM's proposer supplied with the addresses of live drafter replicas.

    Args:
        size: replicas that it holds leases of at most.
    """

    def __init__(self, engine: VllmEngine, drafters: DeploymentHandle[Any], size: int) -> None:
        self._engine = engine
        self._drafters = drafters
        self._size = size
        self._leases: dict[str, Lease] = {}
        self._silent: set[str] = set()  # did not answer when asked last

    async def run(self) -> None:
        """Look again and again, until it is cancelled."""
        try:
            while True:
                try:
                    await self._look()
                except Exception:
                    logger.exception("the drafters of vLLM cannot be found; trying again")
                await asyncio.sleep(POOL_INTERVAL_S)
        finally:
            for lease in self._leases.values():
                lease.release()

    async def _look(self) -> None:
        answering = set(await self._engine.use_drafters(list(self._leases)))
        silent = self._leases.keys() - answering
        for address in silent & self._silent:  # a new one gets time to connect
            self._leases.pop(address).release()
        self._silent = set(silent)
        if len(self._leases) < self._size:
            lease = await open_lease(self._drafters, "drafter", DRAFTER_TIMEOUT_S)
            if lease.endpoint.address in self._leases:
                lease.release()
            else:
                self._leases[lease.endpoint.address] = lease
                await self._engine.use_drafters(list(self._leases))
