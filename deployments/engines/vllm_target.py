"""The target that vLLM runs, as far as services and metrics ask about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.models.kernels import NUMERICS_VERSION
from paceline.numerics import Fingerprint, class_name, digest_files, torch_class


class VllmStats:
    """vLLM's counters; vLLM itself calls ``record`` after each step (``StatLoggerBase``).

    Attributes:
        capacity: tokens for which the KV cache has room.
        kv_usage: used share of the KV cache, 0 to 1.
        num_waiting: requests that wait.
        num_preemptions: preempted requests since the start.
        prefix_queried, prefix_hit: prompt tokens looked up and found in the prefix cache.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.kv_usage = 0.0
        self.num_waiting = self.num_preemptions = 0
        self.prefix_queried = self.prefix_hit = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
        """Take over what vLLM counted in one step."""
        if scheduler_stats is not None:
            self.kv_usage = scheduler_stats.kv_cache_usage
            self.num_waiting = scheduler_stats.num_waiting_reqs
            self.prefix_queried += scheduler_stats.prefix_cache_stats.queries
            self.prefix_hit += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            self.num_preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """vLLM calls it; it has nothing to do."""

    def log(self) -> None:
        """vLLM calls it; it has nothing to do."""

    def record_sleep_state(self, *args: Any) -> None:
        """vLLM calls it; it has nothing to do."""


@dataclass(frozen=True, slots=True)
class VllmTarget:
    """What services read of a target whose logits stay in vLLM.

    Attributes:
        context_length: in tokens; 0 until vLLM has started.
    """

    vocab_size: int
    context_length: int
    stats: VllmStats
    fingerprint: Fingerprint
    adapters: tuple[str, ...] = ()

    def fingerprint_of(self, adapter: str) -> Fingerprint:
        """vLLM's adapters are none of Paceline's: ``adapter`` is ""."""
        return self.fingerprint

    @property
    def kv_capacity(self) -> int:
        """Tokens for which the KV cache has room."""
        return self.stats.capacity

    @property
    def num_free(self) -> int:
        """Tokens for which the KV cache still has room."""
        return round((1 - self.stats.kv_usage) * self.stats.capacity)


def unstarted_target(vocab_size: int, stats: VllmStats) -> VllmTarget:
    """The target before vLLM has loaded it."""
    unknown = Fingerprint(numerics_class="vllm", dtype="", kernel_version=0, weights="")
    return VllmTarget(vocab_size, 0, stats, unknown)


def started_target(
    vllm_config: Any, vocab_size: int, stats: VllmStats, *, dtype: str, weights: str
) -> VllmTarget:
    """The target that vLLM has loaded; sets ``stats.capacity``.

    Args:
        vllm_config: the VllmConfig of the running engine.
        weights: digest of the weights, from :func:`digest_folder`.
    """
    cache = vllm_config.cache_config
    stats.capacity = (cache.num_gpu_blocks or 0) * cache.block_size
    fingerprint = Fingerprint(
        numerics_class=_numerics_class(vllm_config),
        dtype=dtype,
        kernel_version=NUMERICS_VERSION,
        weights=weights,
    )
    return VllmTarget(vocab_size, vllm_config.model_config.max_model_len, stats, fingerprint)


def digest_folder(folder: Path) -> str:
    """Digest of the files that vLLM loads; its tensors are in processes of its own."""
    return digest_files([folder / "config.json", *sorted(folder.glob("*.safetensors"))])


def _numerics_class(vllm_config: Any) -> str:
    """The numerics class: vLLM's version, the device and the size of tensor parallelism."""
    import torch
    import vllm

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensor_parallel = f"tp{vllm_config.parallel_config.tensor_parallel_size}"
    return class_name("vllm", vllm.__version__, torch_class(device), tensor_parallel)
