"""A masked-diffusion model as a target's engine: sessions take turns in the denoise loop.

Each session has a :class:`paceline.diffusion.loop.Denoiser`, the loop of the library, and one
thread computes: a forward of one session, then of the next. So no session waits for the text of
another one, and its own text does not depend on the others. Forwards of several sessions are not
joined: each state is computed by itself in any case, because FreeDave's exactness rests on it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.constraints import ConstraintCompiler
from paceline.counters import EngineCounters
from paceline.deployments.diffusion_plan import denoise_plan, schedule_of, with_schedule
from paceline.deployments.engines.tasks import Committed, TaskEngine
from paceline.diffusion.loop import Counts, Denoiser, DiffusionModel
from paceline.drafters.denoising import SUB_BLOCK_CACHE
from paceline.errors import InvalidArgument
from paceline.methods import DIFFUSION_METHODS, Method
from paceline.models.kernels import NUMERICS_VERSION
from paceline.numerics import Fingerprint, digest_files, torch_class
from paceline.request import Request, check_adapter
from paceline.sampling import SamplingParams
from paceline.session import Session, SessionState
from paceline.tokenizer import Tokenizer
from paceline.types import Load

if TYPE_CHECKING:
    from paceline.deployments.config import DeploymentConfig

_READ_PARAMS = frozenset({
    "temperature", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos",
    "skip_special_tokens", "include_stop_str_in_output",
})  # fmt: skip
_UNREAD_PARAMS = frozenset(SamplingParams.__slots__) - _READ_PARAMS
"""Sampling parameters that the denoise loop does not read: they must have their defaults."""


@dataclass(frozen=True, slots=True)
class MaskedTarget:
    """What services read of the masked model.

    Attributes:
        kv_capacity: tokens whose entries the sessions that run may keep.
        sessions: those of the engine.
    """

    vocab_size: int
    context_length: int
    fingerprint: Fingerprint
    kv_capacity: int
    sessions: Mapping[str, Session]
    adapters: tuple[str, ...] = ()

    def fingerprint_of(self, adapter: str) -> Fingerprint:
        """There are no adapters: ``adapter`` is ""."""
        return self.fingerprint

    @property
    def num_free(self) -> int:
        """Tokens whose entries may still be kept."""
        running = (s for s in self.sessions.values() if s.state is not SessionState.WAITING)
        return self.kv_capacity - sum(session.length for session in running)


class DiffusionEngine(TaskEngine):
    """A masked-diffusion model with the interface of an engine and its thread.

    Raises:
        ModelNotFound: the target's folder holds no masked-diffusion model.
        InvalidArgument: the deployment's own schedule is wrong.
    """

    name = "the denoise loop"
    batch_invariant = True

    def __init__(self, config: DeploymentConfig) -> None:
        super().__init__(config.target.limits.engine_limits())
        folder = Path(config.target_folder)
        self._speculation = config.speculation
        self._model = DiffusionModel(folder)
        schedule_of(denoise_plan(config.speculation).config)  # an error stops the deployment
        runner = self._model.runner
        self.catalogue: Mapping[str, Method] = DIFFUSION_METHODS
        self.tokenizer: Tokenizer | None = self._model.tokenizer
        self.eos_token_ids = tuple(sorted(self._model.end_ids))
        self.drafters: Mapping[str, object] = {"denoising": runner}
        self.constraints = ConstraintCompiler(self.tokenizer, runner.vocab_size, self.eos_token_ids)
        self.target = MaskedTarget(
            runner.vocab_size, runner.context_length, _fingerprint(folder),
            kv_capacity=self.limits.max_sessions * runner.context_length, sessions=self.sessions,
        )  # fmt: skip
        self._places = asyncio.Semaphore(self.limits.max_sessions)
        # It computes one forward after the other, in the order in which sessions ask.
        self._computer = ThreadPoolExecutor(1, "paceline-denoise")

    def refusal(self, method: Method) -> str | None:
        """Why this engine cannot run a method; None if it can."""
        if method.engine != "diffusion":
            return "a masked-diffusion model writes: methods are schedules of its denoise loop"
        return None

    def _session(self, request: Request) -> Session:
        given, own = request.speculation or self._speculation, self._speculation
        plan = denoise_plan(with_schedule(given, own.method))
        self._check(request)
        session = Session(
            request.session_id or secrets.token_hex(8), list(request.prompt_ids), request.params,
            plan,
            eos_token_ids=self.eos_token_ids, max_length=self.target.context_length,
            tokenizer=self.tokenizer,
        )  # fmt: skip
        self._steps(session, tuple(request.committed))  # its errors are those of the request
        return session

    def _steps(
        self, session: Session, written: Sequence[int]
    ) -> tuple[Iterator[list[int] | None], Counts]:
        """The denoise loop of a session, and what it counts.

        Raises:
            InvalidArgument: a wrong knob; as :meth:`Denoiser.steps`.
        """
        params, known = session.params, session.prompt_length
        denoiser = Denoiser(
            self._model.runner, schedule_of(session.config, self._speculation), session.stop_ids,
            params.temperature, params.seed, session.config[SUB_BLOCK_CACHE],
        )  # fmt: skip
        prompt, most = session.token_ids[:known], session.max_length - known
        return denoiser.steps(prompt, most, written), denoiser.counts

    def _check(self, request: Request) -> None:
        """Check what may be wrong with a request.

        Raises:
            InvalidArgument: a token that the model does not have; something that the denoise loop
                does not do.
        """
        target = self.target
        for i, token in enumerate((*request.prompt_ids, *request.committed)):
            if not 0 <= token < target.vocab_size:
                allowed = f"token ids in [0, {target.vocab_size})"
                raise InvalidArgument(f"token_ids[{i}]", token, allowed)
        request.params.check_vocabulary(target.vocab_size)
        if request.adapter:
            check_adapter(request.adapter, target.adapters)
        plain, params = SamplingParams(), request.params
        unread = [
            *((n, getattr(params, n), getattr(plain, n)) for n in sorted(_UNREAD_PARAMS)),
            ("priority", request.priority, 0),
            ("prediction", list(request.prediction), []),
            ("continuations", list(request.continuations), []),
        ]
        for name, value, usual in unread:
            if value != usual:
                allowed = "none" if usual in (None, (), {}, []) else repr(usual)
                raise InvalidArgument(name, value, f"{allowed} with engine diffusion")

    async def _outputs(self, session: Session, request: Request) -> AsyncGenerator[Committed]:
        async with self._places:
            stats = session.stats
            stats.admitted_at, session.state = time.perf_counter(), SessionState.PREFILLING
            steps, counts = self._steps(session, session.output_ids)
            block_size = self._model.runner.blocks.block_size
            stats.num_prefill_forwards = int(session.prompt_length >= block_size)
            while not session.finished:
                tokens, seconds = await self._compute(steps)
                self._book.steps.append(seconds)
                if stats.prefilled_at is None:
                    stats.prefilled_at, session.state = time.perf_counter(), SessionState.READY
                    continue
                stats.num_target_forwards = counts.forwards
                stats.verify_seconds += seconds
                if tokens is None:
                    continue
                stats.num_rounds += 1
                if stats.first_token_at is None:
                    stats.first_token_at = time.perf_counter()
                session.note_output()
                yield Committed(session.commit(tokens))

    async def _compute(self, steps: Iterator[list[int] | None]) -> tuple[list[int] | None, float]:
        """A turn of a session: what its loop yields, and the seconds that it took."""

        def turn() -> tuple[list[int] | None, float]:
            began = time.perf_counter()
            return next(steps), time.perf_counter() - began

        return await asyncio.get_running_loop().run_in_executor(self._computer, turn)

    # --- load, counters, the end ------------------------------------------------------------------

    @property
    def load(self) -> Load:
        """How many sessions run and wait, and their tokens."""
        states = [session.state for session in self.sessions.values()]
        return self._load(states.count(SessionState.WAITING))

    def take_counters(self) -> EngineCounters:
        """Counters since the start, and the requests that ended since the last call."""
        counters = super().take_counters()
        counters.kv_capacity = self.target.kv_capacity
        counters.kv_used = self.target.kv_capacity - self.target.num_free
        return counters

    @property
    def denoising(self) -> dict[str, float]:
        """What the loop has done since its start, as `paceline status` shows it."""
        totals = self._book.methods(self.sessions.values()).values()
        forwards = sum(each.num_forwards for each in totals)
        tokens = sum(each.num_tokens for each in totals)
        return {
            "blocks": sum(each.num_rounds for each in totals),
            "forwards": forwards,
            "tokens": tokens,
            "tokens_per_forward": tokens / max(1, forwards),
        }

    def stop(self, timeout: float = 10.0) -> None:
        """Cancel every session, and end the thread that computes."""
        self.cancel_all()
        self._computer.shutdown(wait=False, cancel_futures=True)


def _fingerprint(folder: Path) -> Fingerprint:
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    return Fingerprint(
        numerics_class=torch_class(torch.device("cpu")), dtype="float32",
        kernel_version=NUMERICS_VERSION, weights=digest_files(files),
    )  # fmt: skip
