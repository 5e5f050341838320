"""What vLLM is started with: its engine arguments, and the settings of Paceline's proposer."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.deployments.engines.proposer import Settings, WorkerExtension
from paceline.errors import InvalidArgument
from paceline.methods import VLLM_METHODS
from paceline.plan import Plan, resolve

if TYPE_CHECKING:
    from paceline.deployments.config import DeploymentConfig

PROPOSER = "paceline.deployments.engines.proposer.Proposer"
EXTENSION = f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"


def engine_args(config: DeploymentConfig, drafters: Sequence[str] | None) -> Any:
    """vLLM's AsyncEngineArgs for a deployment.

    Args:
        drafters: addresses of drafter replicas; None loads the draft model, if there is one, in
            vLLM's worker.

    Raises:
        InvalidArgument: a key of ``vllm.options`` that vLLM does not have, or a method of vLLM's
            own without the folder that it needs.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    model, vllm, limits = config.model, config.vllm, config.target.limits
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for key in vllm.options:
        if key not in known:
            raise InvalidArgument(
                f"vllm.options.{key}", vllm.options[key], "a field of vLLM's AsyncEngineArgs"
            )
    if config.target.num_gpus == 0:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        if model.threads is not None:
            os.environ.setdefault("OMP_NUM_THREADS", str(model.threads))
    args: dict[str, Any] = {
        "model": config.target_folder,
        "served_model_name": model.name,
        "dtype": model.dtype,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "max_num_seqs": limits.max_sessions,
        "enable_prefix_caching": limits.prefix_cache,
        "enforce_eager": vllm.enforce_eager,
        "speculative_config": _speculative_config(config),
        "worker_extension_cls": EXTENSION,
        "per_request_spec_decode_metrics": "detailed",
        "structured_outputs_config": {"backend": "guidance"},
    }
    if vllm.max_model_len is not None:
        args["max_model_len"] = vllm.max_model_len
    if vllm.gpu_memory_utilization is not None:
        args["gpu_memory_utilization"] = vllm.gpu_memory_utilization
    if model.kv_tokens is not None:
        block_size = int(vllm.options.get("block_size", 32))
        args |= {"block_size": block_size, "num_gpu_blocks_override": model.kv_tokens // block_size}
    if not _drafts_by_itself(config):
        settings = _proposer_settings(config, drafters).model_dump(mode="json")
        args["additional_config"] = {"paceline": settings}
    return AsyncEngineArgs(**{**args, **vllm.options})


def _drafts_by_itself(config: DeploymentConfig) -> bool:
    """Whether vLLM drafts by a method of its own, without Paceline's drafters."""
    return config.speculation.method in VLLM_METHODS


def _speculative_config(config: DeploymentConfig) -> dict[str, Any]:
    if _drafts_by_itself(config):
        plan = resolve(config.speculation, VLLM_METHODS)
        return vllm_speculation(plan, config.drafter_folder, config.model.heads)
    return {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": config.vllm.max_speculative_tokens,
    }


def _proposer_settings(config: DeploymentConfig, drafters: Sequence[str] | None) -> Settings:
    tls = config.data_plane_tls
    return Settings(
        speculation=config.speculation,
        drafter=config.drafter_folder if drafters is None else None,
        drafters=None if drafters is None else tuple(drafters),
        deadline_s=config.vllm.draft_deadline_s,
        dtype=config.model.dtype,
        threads=config.model.threads,
        tls=None if tls is None else tls.model_dump(),
    )


def vllm_speculation(plan: Plan, drafter_folder: str | None, heads: str | None) -> dict[str, Any]:
    """vLLM's own ``speculative_config`` for a method of ``VLLM_METHODS``.

    Raises:
        InvalidArgument: the method needs a folder that the deployment does not name.
    """
    config = plan.config
    name = config.method.removeprefix("vllm_")
    result: dict[str, Any] = {
        "method": name, "num_speculative_tokens": config.num_speculative_tokens
    }  # fmt: skip
    if name == "ngram":
        result |= {"prompt_lookup_max": config.ngram_max, "prompt_lookup_min": config.ngram_min}
    elif name == "suffix":
        result |= {
            "suffix_decoding_max_spec_factor": config.draft_per_match,
            "suffix_decoding_min_token_prob": config.min_token_prob,
        }
    elif name == "draft_model":
        if drafter_folder is None:
            raise InvalidArgument("model.drafter", None, f"a folder with method {config.method}")
        result["model"] = drafter_folder
    elif name != "mtp":
        if heads is None:
            raise InvalidArgument("model.heads", None, f"a folder with method {config.method}")
        result["model"] = heads
    return result
