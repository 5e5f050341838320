"""Sweeps with ``engine: vllm``: one vLLM measures all points of a topology and a dtype."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from paceline.bench.backends import BatchRun, sequence_run
from paceline.config import SpeculationConfig
from paceline.deployments.config import DeploymentConfig
from paceline.sampling import SamplingParams
from paceline.tokenizer import Tokenizer


class VllmBackend:
    """vLLM with Paceline's drafters as a :class:`paceline.bench.backends.Backend`.

    Each request names its method, so one engine measures AR and all points.

    Args:
        drafters: addresses of drafter replicas; None loads the draft model in vLLM's worker.

    Raises:
        FailedPrecondition, InvalidArgument: as
            :class:`paceline.deployments.engines.vllm.VllmEngine`.
    """

    batch_invariant = False

    def __init__(self, config: DeploymentConfig, drafters: Sequence[str] | None = None) -> None:
        from paceline.deployments.engines.local import LocalVllm

        self.topology = config.topology
        self._vllm = LocalVllm(config, drafters)
        engine = self._vllm.engine
        assert engine.tokenizer is not None
        self.tokenizer: Tokenizer = engine.tokenizer
        self.context_length = engine.target.context_length
        self.fingerprint = str(engine.target.fingerprint)
        reasons = {name: engine.refusal(method) for name, method in engine.catalogue.items()}
        self.methods = [name for name, reason in reasons.items() if reason is None]
        self.unavailable: Mapping[str, str] = {n: r for n, r in reasons.items() if r is not None}

    def check(self, speculation: SpeculationConfig) -> None:
        """Raise InvalidArgument if this engine cannot run the configuration."""
        self._vllm.engine.plan(speculation)

    def generate(
        self,
        speculation: SpeculationConfig,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
    ) -> BatchRun:
        started = time.perf_counter()
        sessions = self._vllm.generate(prompts, params, [speculation])
        seconds = time.perf_counter() - started
        return BatchRun(sequences=tuple(map(sequence_run, sessions)), seconds=seconds)

    def forget(self) -> bool:
        self._vllm.forget()
        return True

    def close(self) -> None:
        """End vLLM's processes."""
        self._vllm.stop()
