"""Backends of benchmarks: from a method and prompts to tokens, times and counters.

:class:`LocalBackend` runs an engine in this process. The code that can reach a deployment measures
it through a :class:`Backend` of its own.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.bench.prompts import Prompt
from paceline.chat import conversation, encode_chat
from paceline.config import SpeculationConfig
from paceline.drafters.base import Drafter
from paceline.engine import Engine
from paceline.models.base import ModelRunner
from paceline.plan import resolve
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session, SessionState
from paceline.tokenizer import ChatTemplate, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRun:
    """One prompt's generation.

    Attributes:
        token_ids: the generated tokens.
        num_target_forwards: verifications; the forwards of the prefill are not counted.
        num_drafted, num_accepted: drafted tokens along one path of each draft, and how many of them
            were accepted; None if not counted.
        decode_tokens_per_second: after the first token; None if unknown.
        seconds: from handing over the prompt to the last token.
        accepted_by_depth, drafted_by_depth: see SessionStatistics; empty if not counted.
    """

    token_ids: tuple[int, ...]
    num_target_forwards: int
    num_drafted: int | None = None
    num_accepted: int | None = None
    decode_tokens_per_second: float | None = None
    seconds: float | None = None
    accepted_by_depth: tuple[int, ...] = ()
    drafted_by_depth: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRun:
    """Prompts that were generated together.

    Attributes:
        sequences: in the order of the prompts.
        seconds: from handing over the first prompt to the last token of the last sequence,
            prefill included.
        round_overheads: seconds of each round that went neither to the target's computation nor to
            the drafter's: bookkeeping and detokenisation. Empty if unknown.
        round_seconds: duration of each round, from one arrival of tokens to the next.
        forwards: the target forward of each round: its number of tokens, of all sequences together,
            and its seconds. Empty if unknown.
        draft_seconds: spent waiting for drafts, all rounds together; None if unknown.
    """

    sequences: tuple[SequenceRun, ...]
    seconds: float
    round_overheads: tuple[float, ...] = ()
    round_seconds: tuple[float, ...] = ()
    forwards: tuple[tuple[int, float], ...] = ()
    draft_seconds: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all sequences over the time from end to end."""
        return sum(len(sequence.token_ids) for sequence in self.sequences) / self.seconds


class Backend(Protocol):
    """Generates with methods of the catalogue.

    Attributes:
        topology: "colocated", "actors", ...
        batch_invariant: mode of the target.
        fingerprint: of its numerics (:mod:`paceline.numerics`); empty if unknown.
        methods: names of the methods that it can run.
        unavailable: the catalogue's other methods, each with the reason.
        tokenizer, context_length: of the target.
    """

    @property
    def topology(self) -> str: ...

    @property
    def batch_invariant(self) -> bool: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def methods(self) -> Sequence[str]: ...

    @property
    def unavailable(self) -> Mapping[str, str]: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def context_length(self) -> int: ...

    def generate(
        self,
        speculation: SpeculationConfig,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
    ) -> BatchRun:
        """Generate for all prompts together; they are submitted at once."""
        ...

    def forget(self) -> bool:
        """Drop what drafters learnt from earlier prompts; False if that is impossible."""
        ...


class LocalBackend:
    """An engine in this process: drafter and target are colocated.

    Args:
        engine: has a tokenizer, and its target is a model in this process, with one adapter, which
            generates, or with none.
    """

    topology = "colocated"

    def __init__(self, engine: Engine) -> None:
        assert engine.tokenizer is not None
        self.engine = engine
        self._engines: dict[SpeculationConfig, Engine] = {}
        self.runner: ModelRunner = engine.local_target.runner
        self.batch_invariant = self.runner.batch_invariant
        self.adapter = "".join(engine.target.adapters)  # at most one
        self.fingerprint = str(engine.local_target.fingerprint_of(self.adapter))
        self.tokenizer = engine.tokenizer
        self.context_length = engine.target.context_length
        # The method `client` needs drafts of a client, and there is none.
        reasons = {
            name: engine.refusal(method)
            for name, method in engine.catalogue.items()
            if method.drafter != "client"
        }
        self.methods = [name for name, reason in reasons.items() if reason is None]
        self.unavailable = {name: reason for name, reason in reasons.items() if reason is not None}

    def generate(
        self,
        speculation: SpeculationConfig,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
    ) -> BatchRun:
        overheads, rounds, forwards = [], [], []
        draft_seconds = 0.0
        # Methods may share a drafter: it must not know what it learnt for another one.
        if speculation not in self._engines:
            self._engines[speculation] = self.engine.sibling()
        engine = self._engines[speculation]
        engine.intake.prepare(speculation)  # serving loads heads once, and not for each measurement
        started = time.perf_counter()
        sessions = [
            engine.submit(Request(prompt, params, speculation, adapter=self.adapter))
            for prompt in prompts
        ]
        while not all(session.finished for session in sessions):
            decoding = [s for s in sessions if not s.finished]
            # A step that includes prefill is not a plain round.
            plain = all(s.stats.num_rounds > 0 for s in decoding)
            drafted, verified = _computed(decoding[0])
            rows = _verified_rows(decoding)
            step_started = time.perf_counter()
            engine.step()
            elapsed = time.perf_counter() - step_started
            drafted, verified = (
                after - before
                for after, before in zip(_computed(decoding[0]), (drafted, verified), strict=True)
            )
            draft_seconds += drafted
            if plain:
                rounds.append(elapsed)
                overheads.append(elapsed - drafted - verified)
                forwards.append((_verified_rows(decoding) - rows, verified))
        seconds = time.perf_counter() - started
        for session in sessions:
            if session.error is not None:
                raise session.error
        return BatchRun(
            sequences=tuple(sequence_run(session) for session in sessions),
            seconds=seconds,
            round_overheads=tuple(overheads),
            round_seconds=tuple(rounds),
            forwards=tuple(forwards),
            draft_seconds=draft_seconds,
        )

    def drafters(self, speculation: SpeculationConfig) -> list[Drafter]:
        """The drafters with which it has generated for these requests, with what they learnt."""
        engine, plan = self._engines[speculation], resolve(speculation)
        method = plan.method
        return [engine.drafters[n] for n in (method.drafter, *method.uses) if n in engine.drafters]

    def forget(self) -> bool:
        self._engines.clear()
        return True


@contextmanager
def with_kernels(variant: str) -> Iterator[None]:
    """Run models loaded inside this context with these kernels, a value of PACELINE_KERNELS."""
    before = os.environ.get("PACELINE_KERNELS")
    os.environ["PACELINE_KERNELS"] = variant
    try:
        yield
    finally:
        if before is None:
            del os.environ["PACELINE_KERNELS"]
        else:
            os.environ["PACELINE_KERNELS"] = before


@contextmanager
def without_kernels() -> Iterator[None]:
    """Run models loaded inside this context in plain torch."""
    with with_kernels("off"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the kernels are missing
        yield


def _computed(session: Session) -> tuple[float, float]:
    """Seconds of drafting and of verifying; the sessions of a step share them."""
    return session.stats.draft_seconds, session.stats.verify_seconds


def _verified_rows(sessions: Sequence[Session]) -> int:
    """Tokens in the target forwards so far: each draft's, and the committed one before it."""
    return sum(s.stats.num_rounds + s.stats.num_draft_nodes for s in sessions)


def sequence_run(session: Session) -> SequenceRun:
    """The result of a finished session."""
    assert session.state is SessionState.FINISHED
    stats = session.stats
    assert stats.finished_at is not None
    return SequenceRun(
        token_ids=tuple(session.output_ids),
        num_target_forwards=stats.num_target_forwards,
        num_drafted=stats.num_drafted,
        num_accepted=stats.num_accepted,
        decode_tokens_per_second=stats.decode_tokens_per_second,
        seconds=stats.finished_at - stats.started_at,
        accepted_by_depth=tuple(stats.accepted_by_depth),
        drafted_by_depth=tuple(stats.drafted_by_depth),
    )


def encode_turns(
    prompt: Prompt,
    backend: Backend,
    template: ChatTemplate | None,
    params: SamplingParams,
    room: int,
) -> Iterator[tuple[Prompt, list[int]]]:
    """Each turn of a conversation with the token ids up to the model's answer.

    AR answers the turns before, once. A prompt without a template has one turn, its text.

    Args:
        params: of these answers.
        room: tokens of the context that AR gets at most.
    """
    if template is None:
        yield prompt, backend.tokenizer.encode(prompt.text)
        return
    answers: list[str] = []
    for number in range(1, len(prompt.turns) + 1):
        ids = encode_chat(backend.tokenizer, template, conversation(prompt.turns[:number], answers))
        name = prompt.prompt_id if len(prompt.turns) == 1 else f"{prompt.prompt_id}/turn{number}"
        yield replace(prompt, prompt_id=name), ids
        if number < len(prompt.turns):
            run = backend.generate(SpeculationConfig(method="ar"), [ids[-room:]], params)
            answers.append(backend.tokenizer.decode(run.sequences[0].token_ids))
