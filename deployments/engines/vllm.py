"""vLLM as a target's engine, with Paceline's drafters or its own.

:class:`VllmEngine` has the face that :class:`paceline.engine.EngineThread` shows to services, so
gateway, GenerateService, the OpenAI endpoint, metrics and access control are the same. vLLM
verifies, accepts and batches in processes of its own; Paceline's drafters sit in its worker
(deployments/engines/proposer.py).

What stock vLLM does not have: trees, other acceptance rules than its own, drafters that need the
target's states, and verification of drafts that come from a device (VerifyService). Above
temperature 0 its samples follow the target's distribution, but a seed does not give the same tokens
with and without drafts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.config import SpeculationConfig
from paceline.constraints import ConstraintCompiler
from paceline.counters import CounterBook, EngineCounters
from paceline.deployments.engines.proposer import Settings, WorkerExtension
from paceline.deployments.engines.rows import chain_plan
from paceline.engine import EngineLimits, EventHandler, RoundEvent
from paceline.errors import (
    FailedPrecondition,
    InvalidArgument,
    PacelineError,
    ResourceExhausted,
)
from paceline.methods import DRAFTERS, METHODS, VLLM_METHODS, Method
from paceline.models.kernels import NUMERICS_VERSION
from paceline.models.layouts import read_config
from paceline.numerics import Fingerprint, class_name, digest_files, torch_class
from paceline.plan import Plan, resolve
from paceline.request import Request
from paceline.rpc.errors import InternalError
from paceline.rpc.mirrors import served_with
from paceline.sampling import TokenLogprobs
from paceline.session import Session, SessionState
from paceline.tokenizer import Tokenizer, eos_token_ids, load_tokenizer
from paceline.types import Load

if TYPE_CHECKING:
    from paceline.deployments.config import DeploymentConfig

T = TypeVar("T")

PROPOSER = "paceline.deployments.engines.proposer.Proposer"
EXTENSION = f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"


@dataclasses.dataclass(frozen=True, slots=True)
class VllmTarget:
    """What the services ask of a target that they do not compute with."""

    vocab_size: int
    context_length: int
    stats: _Stats
    fingerprint: Fingerprint

    @property
    def kv_capacity(self) -> int:
        """Tokens that fit."""
        return self.stats.capacity

    @property
    def num_free(self) -> int:
        """Tokens for which there is room."""
        return round((1 - self.stats.kv_usage) * self.stats.capacity)


@dataclasses.dataclass(slots=True)
class _Worker:
    """Where drafts are made."""

    pid: int = 0
    address: str = ""


def _digest(folder: Path) -> str:
    """Of the files that vLLM reads: it has the tensors in processes of its own."""
    return digest_files([folder / "config.json", *sorted(folder.glob("*.safetensors"))])


def _numerics_class(settings: Any) -> str:
    """vLLM with its version, and what it computes on."""
    import torch
    import vllm

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensor_parallel = f"tp{settings.parallel_config.tensor_parallel_size}"
    return class_name("vllm", vllm.__version__, torch_class(device), tensor_parallel)


class VllmEngine:
    """AsyncLLM with the face of an engine and its thread. Lives on one event loop.

    Args:
        config: the deployment's.
        drafters: addresses of drafter replicas to begin with; None has the draft model, if there is
            one, in vLLM's worker.

    Raises:
        InvalidArgument: an option that vLLM does not know or refuses.
    """

    batch_invariant = False

    def __init__(self, config: DeploymentConfig, drafters: Sequence[str] | None = None) -> None:
        folder = Path(config.target_folder)
        self._config = config
        self._remote = drafters is not None
        self._has_drafter = self._remote or config.drafter_folder is not None
        self._own_row = VLLM_METHODS.get(config.speculation.method)
        self._max_depth = config.vllm.max_speculative_tokens
        self.tokenizer: Tokenizer | None = load_tokenizer(folder)
        self.eos_token_ids = eos_token_ids(folder)
        self.limits: EngineLimits = config.target.limits.engine_limits()
        self.catalogue: Mapping[str, Method] = {**METHODS, **VLLM_METHODS}
        self.sessions: dict[str, Session] = {}
        self._worker = _Worker()
        self.drafters: Mapping[str, object] = dict.fromkeys(self._all_drafters(), self._worker)
        self._book = CounterBook()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stats = _Stats()
        self._args = _engine_args(config, self._speculative_config(), self._settings(drafters))
        self._llm: Any = None
        vocab_size = read_config(folder)["vocab_size"]
        self.constraints = ConstraintCompiler(self.tokenizer, vocab_size, self.eos_token_ids)
        unknown = Fingerprint(numerics_class="vllm", dtype="", kernel_version=0, weights="")
        self.target = VllmTarget(vocab_size, 0, self._stats, unknown)  # until it has started

    async def start(self) -> VllmEngine:
        """Load the model; takes half a minute and more."""
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
            asyncio.to_thread(load), asyncio.to_thread(_digest, Path(self._config.target_folder))
        )
        pids = await self._llm.collective_rpc("paceline_bind")
        self._worker.pid = pids[0]
        settings = self._llm.vllm_config
        blocks = settings.cache_config.num_gpu_blocks or 0
        self._stats.capacity = blocks * settings.cache_config.block_size
        context_length = settings.model_config.max_model_len
        fingerprint = Fingerprint(
            numerics_class=_numerics_class(settings),
            dtype=self._config.model.dtype,
            kernel_version=NUMERICS_VERSION,
            weights=weights,
        )
        vocab_size = self.target.vocab_size
        self.target = VllmTarget(vocab_size, context_length, self._stats, fingerprint)
        return self

    # --- what vLLM is started with ----------------------------------------------------------------

    def _speculative_config(self) -> dict[str, Any]:
        config, row = self._config, self._own_row
        if row is None:
            return {
                "method": "custom_class",
                "model": PROPOSER,
                "num_speculative_tokens": self._max_depth,
            }
        return vllm_speculation(
            resolve(config.speculation, VLLM_METHODS), config.drafter_folder, config.model.heads
        )

    def _settings(self, drafters: Sequence[str] | None) -> Settings | None:
        if self._own_row is not None:
            return None
        config, tls = self._config, self._config.data_plane_tls
        return Settings(
            speculation=config.speculation,
            drafter=None if self._remote else config.drafter_folder,
            drafters=None if drafters is None else tuple(drafters),
            deadline_s=config.vllm.draft_deadline_s,
            dtype=config.model.dtype,
            threads=config.model.threads,
            tls=None if tls is None else tls.model_dump(),
        )

    def _all_drafters(self) -> set[str]:
        return {name for row in self.catalogue.values() for name in (row.drafter, *row.uses)} - {
            "none"
        }

    # --- the engine thread's face -----------------------------------------------------------------

    @property
    def engine(self) -> VllmEngine:
        """Itself: there is no other thread."""
        return self

    def call(self, function: Callable[[VllmEngine], T]) -> Future[T]:
        """Run ``function(engine)`` at once."""
        future: Future[T] = Future()
        try:
            future.set_result(function(self))
        except Exception as error:
            future.set_exception(error)
        return future

    def refusal(self, method: Method) -> str | None:
        """Why this engine cannot run a row of the catalogue; None where it can."""
        if self._own_row is not None:
            if method.name == self._own_row.name:
                return None
            return f"vLLM drafts for all requests by {self._own_row.name}"
        if method.engine == "vllm":
            return "the deployment's own `speculation` chooses it for all requests"
        try:
            self.plan(SpeculationConfig(method=method.name, allow_lossy=not method.lossless))
        except InvalidArgument as error:
            return str(error)
        return None

    def plan(self, config: SpeculationConfig) -> Plan:
        """The parts of a configuration.

        Raises:
            InvalidArgument: this engine cannot run it.
        """
        row = self._own_row
        if row is not None:
            if config != self._config.speculation:
                raise InvalidArgument(
                    "speculation", config.method, f"the deployment's own, {row.name}: vLLM drafts "
                    "by it for all requests",
                )  # fmt: skip
            return resolve(config, VLLM_METHODS)
        if config.method in VLLM_METHODS:
            raise InvalidArgument(
                "method", config.method, "a row of Paceline's: this deployment started vLLM with "
                f"Paceline's drafters (speculation.method: {config.method} starts it with its own)",
            )  # fmt: skip
        plan = chain_plan(config, self._max_depth)
        given = {"none", *(["draft_model"] if self._has_drafter else [])}
        missing = [n for n in plan.drafters if n not in given and n not in DRAFTERS]
        if self._remote and served_with(plan.method, "draft_model"):
            missing = []
        if missing:
            raise InvalidArgument(
                "method", config.method, "a method whose drafters are loaded here "
                f"({', '.join(missing)} is not)",
            )  # fmt: skip
        return plan

    def submit(self, request: Request, on_event: EventHandler | None = None) -> Future[Session]:
        """As :meth:`paceline.engine.Engine.submit`."""
        return self.call(lambda engine: engine._submit(request, on_event))

    def _submit(self, request: Request, on_event: EventHandler | None) -> Session:
        prompt_ids, committed = list(request.prompt_ids), tuple(request.committed)
        params, prediction = request.params, tuple(request.prediction)
        speculation, session_id = (
            request.speculation or self._config.speculation,
            request.session_id or "",
        )
        plan = self.plan(speculation)
        target, limits = self.target, self.limits
        if not prompt_ids:
            raise InvalidArgument("prompt", "[]", "at least one token")
        if len(prompt_ids) >= target.context_length:
            raise InvalidArgument(
                "prompt", f"{len(prompt_ids)} tokens",
                f"fewer tokens than the context has, {target.context_length}",
            )  # fmt: skip
        if committed and (params.penalizes_output or params.constraint is not None):
            raise FailedPrecondition(
                "vLLM cannot go on with an output that penalties or a constraint count from its "
                "beginning"
            )
        for i, token in enumerate((*prompt_ids, *committed)):
            if not 0 <= token < target.vocab_size:
                raise InvalidArgument(
                    f"token_ids[{i}]", token, f"token ids in [0, {target.vocab_size})"
                )
        params.check_vocabulary(target.vocab_size)
        if prediction and not plan.reads_prediction:
            raise InvalidArgument(
                "prediction", f"{len(prediction)} tokens",
                f"none with method {plan.method.name!r}, or method 'predicted_outputs'",
            )  # fmt: skip
        if len(self.sessions) >= limits.max_sessions + limits.max_waiting:
            raise ResourceExhausted(f"{len(self.sessions)} sessions are running or waiting already")
        session = Session(
            session_id, prompt_ids, params, plan,
            eos_token_ids=self.eos_token_ids, max_length=target.context_length,
            tokenizer=self.tokenizer, prediction=prediction,
        )  # fmt: skip
        session.cache_scope = request.cache_scope
        if committed:
            session.resume(committed)
        self.sessions[session_id] = session
        self._book.num_prompt_tokens += session.prompt_length
        params_of_vllm = _vllm_params(session, speculation, self.eos_token_ids)
        task = asyncio.get_running_loop().create_task(self._run(session, params_of_vllm, on_event))
        self._tasks[session_id] = task
        return session

    def cancel(self, session_id: str) -> Future[bool]:
        """Ends a session; False where there is none."""
        return self.call(lambda engine: engine._cancel(session_id))

    def _cancel(self, session_id: str) -> bool:
        task = self._tasks.get(session_id)
        return task is not None and task.cancel()

    async def _run(self, session: Session, params: Any, on_event: EventHandler | None) -> None:
        """One request of vLLM's, from submission to the last event."""
        tell = on_event or (lambda event: None)
        sent = session.streamable_length  # of committed tokens
        try:
            async for output in self._llm.generate(_prompt(session), params, session.session_id):
                given = output.outputs[0]
                before = session.length
                tokens = session.commit(given.token_ids)
                _count_step(session, len(tokens))
                if output.finished:
                    _count_drafts(session, getattr(given, "spec_decode_metrics", None))
                    session.finish("length")  # unless a token has ended it
                # Text that could still turn out to be the start of a stop string is held back.
                done = session.finished
                safe = len(session.text) if done else session.streamable_length
                text, sent = session.text[sent:safe], max(sent, safe)
                if tokens or done:
                    tell(
                        RoundEvent(
                            session, session.stats.num_rounds, tokens, max(0, len(tokens) - 1),
                            text, None, done, _logprobs(session, given, before),
                        )
                    )  # fmt: skip
                if done:
                    break  # a stop string: leaving the loop aborts the request
        except asyncio.CancelledError:
            session.finish("cancelled")
            tell(RoundEvent(session, 0, (), 0, session.text[sent:], None, True))
        except Exception as error:
            known = isinstance(error, PacelineError)
            session.error = error if known else InternalError(f"vLLM: {error}")
            session.finish("error")
            tell(RoundEvent(session, 0, (), 0, "", None, True))
        finally:
            self.sessions.pop(session.session_id, None)
            self._tasks.pop(session.session_id, None)
            self._book.ended(session)

    # --- what it does -----------------------------------------------------------------------------

    @property
    def load(self) -> Load:
        """Sessions that run and that wait."""
        waiting = min(self._stats.num_waiting, len(self.sessions))
        return Load(
            len(self.sessions) - waiting, waiting, sum(s.length for s in self.sessions.values())
        )

    def count_rounds(self) -> tuple[int, float]:
        """Rounds of sessions so far, and the seconds of their verifications."""
        return self._book.rounds(self.sessions.values())

    def take_counters(self) -> EngineCounters:
        """What was done so far; requests since the last call."""
        counters = self._book.take(list(self.sessions.values()))
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
        """Raises where vLLM's processes have died."""
        if self._llm is not None:
            await self._llm.check_health()

    def stop(self, timeout: float = 10.0) -> None:
        """Cancel every session and end vLLM's processes."""
        for task in list(self._tasks.values()):
            task.get_loop().call_soon_threadsafe(task.cancel)
        llm, self._llm = self._llm, None
        if llm is not None:
            handler = llm.output_handler  # it would call the end of its processes an error
            if handler is not None:
                handler.get_loop().call_soon_threadsafe(handler.cancel)
            llm.shutdown(timeout=timeout)


class _Stats:
    """vLLM tells it after each step (``StatLoggerBase``)."""

    def __init__(self) -> None:
        self.capacity = 0
        self.kv_usage = 0.0
        self.num_waiting = self.num_preemptions = 0
        self.prefix_queried = self.prefix_hit = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
        if scheduler_stats is not None:
            self.kv_usage = scheduler_stats.kv_cache_usage
            self.num_waiting = scheduler_stats.num_waiting_reqs
            self.prefix_queried += scheduler_stats.prefix_cache_stats.queries
            self.prefix_hit += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            self.num_preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def log(self) -> None:
        """Nothing to say."""

    def record_sleep_state(self, *args: Any) -> None:
        """It never sleeps."""


def vllm_speculation(plan: Plan, drafter_folder: str | None, heads: str | None) -> dict[str, Any]:
    """vLLM's own ``speculative_config`` for a row of ``VLLM_METHODS``.

    Raises:
        InvalidArgument: the row wants a folder that the deployment does not name.
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


def _engine_args(
    config: DeploymentConfig, speculation: Mapping[str, Any], settings: Settings | None
) -> Any:
    """vLLM's AsyncEngineArgs.

    Raises:
        InvalidArgument: a key of ``vllm.options`` that vLLM does not have.
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
        "speculative_config": dict(speculation),
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
    if settings is not None:
        args["additional_config"] = {"paceline": settings.model_dump(mode="json")}
    return AsyncEngineArgs(**{**args, **vllm.options})


def _prompt(session: Session) -> Any:
    prompt: dict[str, Any] = {"prompt_token_ids": list(session.token_ids)}
    if session.cache_scope:
        prompt["cache_salt"] = session.cache_scope
    return prompt


def _vllm_params(session: Session, speculation: SpeculationConfig, eos: Sequence[int]) -> Any:
    """The request as vLLM takes it; stop strings stay with the session."""
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    params = session.params
    stops = [*params.stop_token_ids, *(() if params.ignore_eos else eos)]
    wishes: dict[str, Any] = {}
    if session.plan.method.engine == "paceline":
        given = speculation.model_dump(mode="json", exclude_unset=True)
        wishes = {"speculation": given, "prediction": list(session.prediction)}
    structured = None
    if params.constraint is not None:
        kind, text = params.constraint
        structured = StructuredOutputsParams(**{"json" if kind == "json_schema" else kind: text})
    return VllmParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=params.logit_bias or None,
        stop_token_ids=stops,
        ignore_eos=structured is None,
        seed=params.seed if params.temperature > 0 else None,
        max_tokens=session.remaining,
        logprobs=params.logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=structured,
        extra_args={"paceline": wishes},
    )


def _count_step(session: Session, num_tokens: int) -> None:
    """A delta is a round, as long as vLLM's outputs are read at once."""
    stats = session.stats
    now = time.perf_counter()
    if stats.first_token_at is None:
        stats.first_token_at = now
        session.state = SessionState.READY
    stats.num_rounds += 1
    stats.num_target_forwards += 1
    stats.num_accepted += max(0, num_tokens - 1)


def _count_drafts(session: Session, metrics: Any) -> None:
    """What vLLM counted itself, step by step."""
    if metrics is None:
        return
    stats = session.stats
    drafted, accepted = metrics.per_step_drafted, metrics.per_step_accepted
    stats.num_drafted = stats.num_draft_nodes = sum(drafted)
    stats.num_accepted = min(sum(accepted), stats.num_tokens)
    stats.num_rounds = stats.num_target_forwards = max(1, stats.num_tokens - stats.num_accepted)
    depth = max(drafted, default=0)
    stats.drafted_by_depth = [sum(d > level for d in drafted) for level in range(depth)]
    stats.accepted_by_depth = [sum(a > level for a in accepted) for level in range(depth)]


def _logprobs(session: Session, output: Any, before: int) -> tuple[TokenLogprobs, ...]:
    count = session.params.logprobs
    if count is None or output.logprobs is None:
        return ()
    entries = []
    for token, found in zip(session.token_ids[before:], output.logprobs, strict=False):
        best = sorted(found.items(), key=lambda item: item[1].rank)[:count]
        top = tuple((token_id, entry.logprob) for token_id, entry in best)
        entries.append(TokenLogprobs(token, found[token].logprob, top))
    return tuple(entries)
