"""vLLM as a target's engine, with Paceline's drafters or its own.

vLLM verifies, accepts and batches in processes of its own; Paceline's drafters run in its worker
(deployments/engines/proposer.py).

vLLM verifies chains only, accepts by its own rule, shows no hidden states to drafters and verifies
no drafts from a device (VerifyService). Above temperature 0 its samples have the target's
distribution, but a seed does not give the same tokens with and without drafts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import SpeculationConfig
from paceline.constraints import ConstraintCompiler
from paceline.counters import EngineCounters
from paceline.deployments.engines.tasks import Committed, TaskEngine
from paceline.deployments.engines.vllm_launch import engine_args
from paceline.deployments.engines.vllm_methods import VllmMethods
from paceline.deployments.engines.vllm_requests import (
    check_request,
    count_drafts,
    count_step,
    logprobs_of,
    vllm_params,
    vllm_prompt,
)
from paceline.deployments.engines.vllm_target import (
    VllmStats,
    digest_folder,
    started_target,
    unstarted_target,
)
from paceline.errors import FailedPrecondition, InvalidArgument
from paceline.methods import Method
from paceline.models.layouts import read_config
from paceline.plan import Plan
from paceline.request import Request
from paceline.session import Session
from paceline.tokenizer import Tokenizer, eos_token_ids, load_tokenizer
from paceline.types import Load

if TYPE_CHECKING:
    from paceline.deployments.config import DeploymentConfig


@dataclass(slots=True)
class _Worker:
    """vLLM's worker, in which the drafters run."""

    pid: int = 0

    def location(self, session_id: str) -> tuple[str, int]:
        """As of a drafter in another process."""
        return "", self.pid


class VllmEngine(TaskEngine):
    """vLLM's AsyncLLM with the interface of an engine and its thread. Runs on one event loop.

    Args:
        drafters: addresses of the first drafter replicas; None loads the draft model, if there is
            one, in vLLM's worker.

    Raises:
        InvalidArgument: an option that vLLM does not have, or a method that cannot draft here.
    """

    name = "vLLM"
    batch_invariant = False

    def __init__(self, config: DeploymentConfig, drafters: Sequence[str] | None = None) -> None:
        super().__init__(config.target.limits.engine_limits())
        folder = Path(config.target_folder)
        self._config = config
        self._methods = VllmMethods(config, replicas=drafters is not None)
        self.catalogue = self._methods.catalogue
        self.tokenizer: Tokenizer | None = load_tokenizer(folder)
        self.eos_token_ids = eos_token_ids(folder)
        self._worker = _Worker()
        self.drafters: Mapping[str, object] = dict.fromkeys(self._methods.drafters, self._worker)
        self._stats = VllmStats()
        self._args = engine_args(config, drafters)
        self._llm: Any = None
        vocab_size = read_config(folder)["vocab_size"]
        self.constraints = ConstraintCompiler(self.tokenizer, vocab_size, self.eos_token_ids)
        self.target = unstarted_target(vocab_size, self._stats)

    async def start(self) -> VllmEngine:
        """Load the model, which takes half a minute or more.

        Raises:
            InvalidArgument: vLLM refuses an option.
            FailedPrecondition: vLLM does not start.
        """
        from vllm.v1.engine.async_llm import AsyncLLM

        def load() -> Any:
            try:
                return AsyncLLM.from_engine_args(
                    self._args, stat_loggers=[lambda config, index: self._stats]
                )
            except (ValueError, NotImplementedError) as error:  # pydantic's errors are ValueErrors
                raise InvalidArgument("vllm", "its options", f"what vLLM takes: {error}") from error
            except RuntimeError as error:
                raise FailedPrecondition(
                    f"vLLM did not start; its log says why ({error})"
                ) from error

        self._llm, weights = await asyncio.gather(
            asyncio.to_thread(load),
            asyncio.to_thread(digest_folder, Path(self._config.target_folder)),
        )
        pids = await self._llm.collective_rpc("paceline_bind")
        self._worker.pid = pids[0]
        self.target = started_target(
            self._llm.vllm_config, self.target.vocab_size, self._stats,
            dtype=self._config.model.dtype, weights=weights,
        )  # fmt: skip
        return self

    def refusal(self, method: Method) -> str | None:
        """Why this engine cannot run a method; None if it can."""
        return self._methods.refusal(method)

    def plan(self, config: SpeculationConfig) -> Plan:
        """The method, parts and knobs of a configuration.

        Raises:
            InvalidArgument: this engine cannot run it.
        """
        return self._methods.plan(config)

    def _session(self, request: Request) -> Session:
        plan = self.plan(request.speculation or self._config.speculation)
        check_request(request, plan, self.target)
        return Session(
            request.session_id or "", list(request.prompt_ids), request.params, plan,
            eos_token_ids=self.eos_token_ids, max_length=self.target.context_length,
            tokenizer=self.tokenizer, prediction=tuple(request.prediction),
        )  # fmt: skip

    async def _outputs(self, session: Session, request: Request) -> AsyncGenerator[Committed]:
        speculation = request.speculation or self._config.speculation
        params = vllm_params(session, speculation, self.eos_token_ids)
        async for output in self._llm.generate(vllm_prompt(session), params, session.session_id):
            given = output.outputs[0]
            before = session.length
            tokens = session.commit(given.token_ids)
            count_step(session, len(tokens))
            if output.finished:
                count_drafts(session, getattr(given, "spec_decode_metrics", None))
                session.finish("length")  # unless a token has ended it
            yield Committed(tokens, max(0, len(tokens) - 1), logprobs_of(session, given, before))

    # --- load, counters, drafters, health ---------------------------------------------------------

    @property
    def load(self) -> Load:
        """How many sessions run and wait, and their tokens."""
        return self._load(min(self._stats.num_waiting, len(self.sessions)))

    def take_counters(self) -> EngineCounters:
        """Counters since the start, and the requests that ended since the last call."""
        counters = super().take_counters()
        stats = self._stats
        counters.kv_capacity = stats.capacity
        counters.kv_used = round(stats.kv_usage * stats.capacity)
        counters.num_preemptions = stats.num_preemptions
        counters.prefix_queried, counters.prefix_hit = stats.prefix_queried, stats.prefix_hit
        return counters

    async def use_drafters(self, addresses: Sequence[str]) -> list[str]:
        """Draft with these replicas from now on; returns those that answer."""
        answers: list[list[str]] = await self._llm.collective_rpc(
            "paceline_drafters", args=(list(addresses),)
        )
        return answers[0]

    async def forget(self) -> None:
        """Drop what Paceline's drafters have learnt from earlier requests."""
        await self._llm.collective_rpc("paceline_forget")

    async def check_health(self) -> None:
        """Raise if vLLM's processes have died."""
        if self._llm is not None:
            await self._llm.check_health()

    def stop(self, timeout: float = 10.0) -> None:
        """Cancel every session and end vLLM's processes."""
        self.cancel_all()
        llm, self._llm = self._llm, None
        if llm is not None:
            handler = llm.output_handler  # it would report the end of its processes as an error
            if handler is not None:
                handler.get_loop().call_soon_threadsafe(handler.cancel)
            llm.shutdown(timeout=timeout)
