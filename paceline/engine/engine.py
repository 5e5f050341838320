"""Continuous batching: sessions come and go at every step, tokens come out.

A step admits whom KV memory allows, gives waiting prompts shares of prefill, collects the drafts
that are there, and runs one round of the decode loop for every session that is ready. Sessions
whose drafts come from elsewhere (another actor, a client device) join the step in which their
draft has arrived; the others do not wait for them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from paceline.config import SpeculationConfig
from paceline.constraints import ConstraintCompiler
from paceline.counters import CounterBook, EngineCounters
from paceline.drafters.base import Drafter
from paceline.drafters.client import ClientDrafter
from paceline.drafters.none import NoDrafter
from paceline.engine.drafting import DrafterSet, Drafting
from paceline.engine.events import EventDelivery, EventHandler, RoundEvent
from paceline.engine.intake import Intake
from paceline.engine.loop import decode_round
from paceline.engine.scheduler import EngineLimits, Scheduler
from paceline.errors import InvalidArgument, PacelineError, SessionNotFound
from paceline.lengths.base import LengthContext
from paceline.methods import METHODS, Method
from paceline.models.heads import HeadLibrary
from paceline.plan import CLIENT_METHOD
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session, SessionState
from paceline.target import ModelTarget, Target
from paceline.tokenizer import Tokenizer
from paceline.types import Load, Outcome

logger = logging.getLogger(__name__)

_HOLD_BACK_S = 0.004  # longest time that listeners wait for a round's tokens


class Engine:
    """Sessions in, steps, tokens out. Not thread-safe: see :class:`EngineThread`.

    Args:
        target: the model whose tokens count.
        drafters: by drafter name as in the catalogue: those that the engine cannot make by itself
            (``paceline.methods.DRAFTERS``), or replacements for them.
        tokenizer: for text and stop strings; without it sessions have token ids only.
        catalogue: the methods that requests may name.
        length_context: measured costs and trained heads for the length controllers.
        heads: trained draft heads of this target.
    """

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] = (),
        limits: EngineLimits | None = None,
        catalogue: Mapping[str, Method] = METHODS,
        length_context: LengthContext | None = None,
        heads: HeadLibrary | None = None,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.limits = limits or EngineLimits()
        if isinstance(target, ModelTarget):
            target.shares_prefixes = self.limits.prefix_cache
            target.batch_strategy = self.limits.batch_strategy
        self.catalogue: Mapping[str, Method] = {**catalogue, CLIENT_METHOD.name: CLIENT_METHOD}
        self.drafters = DrafterSet(
            # Sessions that lose their drafter go on with "none".
            {"none": NoDrafter(), "client": ClientDrafter(), **(drafters or {})},
            target.vocab_size, find_target=lambda: self.local_target, heads=heads,
        )  # fmt: skip
        self.wakeup = threading.Condition()  # notified when a draft has arrived
        self.interrupted: Callable[[], bool] = lambda: False  # ends a wait for drafts early
        self.drafting = Drafting(self.drafters, target.vocab_size, self.wakeup)
        self.intake = Intake(
            target, self.drafters, self.catalogue,
            tokenizer=tokenizer,
            eos_token_ids=self.eos_token_ids,
            length_context=replace(
                length_context or LengthContext(), shadow_share=self.drafting.shadow_share
            ),
        )  # fmt: skip
        self._book = CounterBook()
        self.scheduler = Scheduler(self.limits, target, self.drafting, self._book)
        self.events = EventDelivery(lambda session, error: self.fail([session], error))

    @property
    def local_target(self) -> ModelTarget:
        """The target, where its model is in this process."""
        if not isinstance(self.target, ModelTarget):
            raise InvalidArgument("target", "on another machine", "a target in this process")
        return self.target

    @property
    def constraints(self) -> ConstraintCompiler:
        """Grammars, schemas and regular expressions as masks."""
        return self.intake.constraints

    @property
    def length_context(self) -> LengthContext:
        """What the length controllers of all sessions are told."""
        return self.intake.length_context

    @property
    def sessions(self) -> dict[str, Session]:
        """Those that are not finished, by id."""
        return self.scheduler.sessions

    def local_drafter(self, name: str) -> Drafter:
        """A drafter of this engine in this process; made where it is not there yet."""
        return self.drafters.make_here(name)

    def sibling(self) -> Engine:
        """An engine over the same models whose drafters have learnt nothing yet."""
        return Engine(
            self.target, self.drafters.given,
            tokenizer=self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            limits=self.limits,
            catalogue=self.catalogue,
            length_context=self.length_context,
            heads=self.drafters.heads,
        )  # fmt: skip

    # --- sessions in ---------------------------------------------------------------------------

    def submit(self, request: Request, on_event: EventHandler | None = None) -> Session:
        """Queue a request.

        Args:
            on_event: called for every event of the session, on the thread that steps.

        Raises:
            InvalidArgument: an empty or too long prompt, a token outside the vocabulary, a method
                that this engine cannot run, a prediction for a method without use for it,
                ``committed`` tokens that end the generation.
            ResourceExhausted: the queue is full, or the request can never fit in KV memory.
        """
        session = self.intake.session(request)
        self.scheduler.add(session)
        self.events.register(session, on_event)
        return session

    def refusal(self, method: Method) -> str | None:
        """Why this engine cannot run a method of the catalogue; None where it can."""
        return self.intake.refusal(method)

    def cancel(self, session_id: str) -> bool:
        """End a session now; its KV memory and drafter state are freed before this returns."""
        session = self.sessions.get(session_id)
        if session is None:
            return False
        self._end(session, "cancelled")
        return True

    def truncate(self, session_id: str, length: int) -> None:
        """Forget a session's tokens after the first ``length``; generation goes on from there.

        Raises:
            SessionNotFound: no such session.
            InvalidArgument: ``length`` would cut the prompt or lies beyond the committed tokens.
            FailedPrecondition: a draft is under way.
        """
        session = self.sessions.get(session_id)
        if session is None:
            raise SessionNotFound(session_id)
        if not session.prompt_length <= length <= session.length:
            raise InvalidArgument(
                "length", length, f"a length in [{session.prompt_length}, {session.length}]"
            )
        if session.state is SessionState.WAITING:
            session.truncate(length)  # it may have run before
        else:
            with self.drafting.reopened(session):
                self.target.truncate(session, length)
                session.truncate(length)
        self.events.forget_text(session)

    # --- steps ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True while a session is not finished."""
        return bool(self.sessions)

    @property
    def load(self) -> Load:
        """How much there is to do, as length controllers see it."""
        return self.scheduler.load

    def count_rounds(self) -> tuple[int, float]:
        """Rounds of sessions so far, and the seconds of their verifications."""
        return self._book.rounds(self.sessions.values())

    def take_counters(self) -> EngineCounters:
        """What was done so far; requests and steps since the last call."""
        return self._book.take(list(self.sessions.values()), self.target)

    def step(self, wait_s: float = 0.05) -> list[RoundEvent]:
        """One step for all sessions that are ready.

        When none is, because all drafts are still under way, waits up to ``wait_s`` seconds for
        the first of them.
        """
        scheduler = self.scheduler
        scheduler.make_room()
        scheduler.admit()
        prefill = scheduler.share_prefill()
        scheduler.ask_for_drafts()
        idle = not prefill and not scheduler.has_ready
        # A client drafts when it has heard of its last round: nothing comes from it before.
        owed = any(self.drafting.waits_for_client(event.session) for event in self.events.held)
        if idle and (owed or not self._wait(min(wait_s, _HOLD_BACK_S))):
            self.events.deliver()
            self._wait(wait_s)
        ready = scheduler.choose()
        if not ready and not prefill:
            return []
        self.events.deliver()  # listeners run beside the forward that comes now
        started = time.perf_counter()
        try:
            outcomes = decode_round(ready, self.drafting, self.target, self.load, prefill=prefill)
        except Exception as error:
            # The forward serves all of them, so the KV state of none can be trusted any more.
            level = logging.INFO if isinstance(error, PacelineError) else logging.ERROR
            logger.log(
                level, "a step failed; its %d sessions end", len(ready) + len(prefill),
                exc_info=error,
            )  # fmt: skip
            self.fail([*ready, *(session for session, _ in prefill)], error)
            return []
        scheduler.observe(time.perf_counter() - started, len(ready), prefill)
        events = [self._conclude(session, o) for session, o in zip(ready, outcomes, strict=True)]
        scheduler.ask_for_drafts()
        if not self.drafting.num_under_way or any(event.finished for event in events):
            self.events.deliver()
        return events

    def _wait(self, seconds: float) -> bool:
        """Until a session is ready or a call comes; False when neither came in time."""
        scheduler = self.scheduler
        with self.wakeup:
            return self.wakeup.wait_for(lambda: scheduler.has_ready or self.interrupted(), seconds)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> list[Session]:
        """Generate for all prompts together and return the finished sessions, in order."""
        if not isinstance(params, Sequence):
            params = [params or SamplingParams()] * len(prompts)
        sessions: list[Session] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                sessions.append(self.submit(Request(prompt, each, speculation)))
            while not all(session.finished for session in sessions):
                self.step()
        finally:  # where a prompt was refused, or Ctrl-C came: nothing stays behind
            for session in sessions:
                self.cancel(session.session_id)
        for session in sessions:
            if session.error is not None:
                raise session.error
        return sessions

    def _conclude(self, session: Session, outcome: Outcome) -> RoundEvent:
        """The session's next state, and the event that tells of the round."""
        event = self.events.of_round(session, outcome)
        if session.finished:
            self.scheduler.remove(session)
        else:
            self.scheduler.go_on(session)
        return event

    def _end(self, session: Session, reason: str) -> None:
        """Finish a session outside a round."""
        self.events.deliver()
        session.finish(reason)
        self.scheduler.remove(session)
        self.events.end(session)

    def fail(self, sessions: Iterable[Session], error: Exception) -> None:
        """End sessions with an error."""
        for session in sessions:
            if session.session_id in self.sessions:
                session.error = error
                self._end(session, "error")
