"""Continuous batching: sessions come and go at every step, tokens come out.

A step admits sessions as far as KV memory allows, shares prefill among waiting prompts, and runs
one round of the decode loop for every ready session. Sessions whose drafts come from another
process join the step in which their draft has arrived; the others do not wait for them.
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
from paceline.engine.ahead import DraftingAhead
from paceline.engine.drafting import DrafterSet
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
_HOLD_BACK_S = 0.004  # how long a round's events may be held


class Engine:
    """Sessions in, steps, tokens out. Not thread-safe: see :class:`EngineThread`.

    Args:
        target: the model whose tokens count.
        drafters: by their names in the catalogue: drafters that the engine cannot make itself, or
            replacements for those that it can (``paceline.methods.DRAFTERS``).
        tokenizer: for text and stop strings; without it, sessions have only token ids.
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
        self.tokenizer, self.eos_token_ids = tokenizer, tuple(eos_token_ids)
        self.limits = limits or EngineLimits()
        if isinstance(target, ModelTarget):
            target.shares_prefixes = self.limits.prefix_cache
            target.batch_strategy = self.limits.batch_strategy
        self.catalogue: Mapping[str, Method] = {**catalogue, CLIENT_METHOD.name: CLIENT_METHOD}
        self.drafters = DrafterSet(
            # Sessions that lose their drafter continue with "none".
            {"none": NoDrafter(), "client": ClientDrafter(), **(drafters or {})},
            target.vocab_size, find_target=lambda: self.local_target, heads=heads,
        )  # fmt: skip
        self.wakeup = threading.Condition()  # notified when a draft has arrived
        self.interrupted: Callable[[], bool] = lambda: False  # True ends a wait for drafts early
        self.drafting = DraftingAhead(self.drafters, target.vocab_size, self.wakeup)
        self._book = CounterBook()
        self.scheduler = Scheduler(self.limits, target, self.drafting, self._book)
        self.intake = Intake(
            target, self.drafters, self.catalogue,
            tokenizer=tokenizer, eos_token_ids=self.eos_token_ids,
            check_queue=self.scheduler.check_queue,
            length_context=replace(
                length_context or LengthContext(),
                shadow_share=self.drafting.shadow_share,
                head_of=lambda method: self.catalogue[method].head,
                num_sessions=lambda: min(len(self.sessions), self.limits.max_sessions - 1),
            ),
        )  # fmt: skip
        self.events = EventDelivery(lambda session, error: self.fail([session], error))

    @property
    def local_target(self) -> ModelTarget:
        """The target, if its model is in this process; else raises InvalidArgument."""
        if not isinstance(self.target, ModelTarget):
            raise InvalidArgument("target", "on another machine", "a target in this process")
        return self.target

    @property
    def constraints(self) -> ConstraintCompiler:
        """Compiles schemas, regular expressions and grammars into constraints."""
        return self.intake.constraints

    @property
    def length_context(self) -> LengthContext:
        """What the engine tells the length controllers of all sessions."""
        return self.intake.length_context

    @property
    def sessions(self) -> dict[str, Session]:
        """The unfinished sessions by id."""
        return self.scheduler.sessions

    def local_drafter(self, name: str) -> Drafter:
        """A drafter of this engine in this process, made now if it does not exist yet."""
        return self.drafters.make_here(name)

    def sibling(self) -> Engine:
        """A new engine over the same models; drafters that it makes have learnt nothing yet."""
        engine = Engine(
            self.target, self.drafters.given,
            tokenizer=self.tokenizer, eos_token_ids=self.eos_token_ids,
            limits=self.limits, catalogue=self.catalogue,
            length_context=self.length_context, heads=self.drafters.heads,
        )  # fmt: skip
        engine.intake.constraints, engine.drafters.corpus = self.constraints, self.drafters.corpus
        return engine

    # --- sessions in ---------------------------------------------------------------------------

    def submit(self, request: Request, on_event: EventHandler | None = None) -> Session:
        """Queue a request.

        Args:
            on_event: called for every event of the session, on the thread that steps.

        Raises:
            InvalidArgument: the prompt is empty or too long, a token is outside the vocabulary,
                this engine cannot run the method, the method has no use for a prediction, or the
                ``committed`` tokens end the generation.
            ResourceExhausted: the queue is full, or the request can never fit in KV memory.
        """
        session = self.intake.session(request)
        self.scheduler.add(session)
        self.events.register(session, on_event)
        return session

    def refusal(self, method: Method) -> str | None:
        """Why this engine cannot run a method of the catalogue; None if it can."""
        return self.intake.refusal(method)

    def cancel(self, session_id: str) -> bool:
        """End a session and free its KV memory and drafter state now; False if none has the id."""
        session = self.sessions.get(session_id)
        if session is None:
            return False
        self._end(session, "cancelled")
        return True

    def truncate(self, session_id: str, length: int) -> None:
        """Forget a session's tokens after the first ``length``; generation continues from there.

        Raises:
            SessionNotFound: no such session.
            InvalidArgument: ``length`` would cut the prompt or lies beyond the committed tokens.
            FailedPrecondition: a draft is under way.
        """
        session = self.sessions.get(session_id)
        if session is None:
            raise SessionNotFound(session_id)
        if not session.prompt_length <= length <= session.length:
            allowed = f"a length in [{session.prompt_length}, {session.length}]"
            raise InvalidArgument("length", length, allowed)
        if session.state is SessionState.WAITING:
            session.truncate(length)  # it may have committed tokens before it had to wait again
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
        """Number of rounds of all sessions so far, and the seconds that they spent verifying."""
        return self._book.rounds(self.sessions.values())

    def take_counters(self) -> EngineCounters:
        """What the engine has done so far; requests and steps only since the last call."""
        return self._book.take(list(self.sessions.values()), self.target)

    def step(self, wait_s: float = 0.05) -> list[RoundEvent]:
        """One step for all ready sessions.

        If all their drafts are under way, waits up to ``wait_s`` seconds for the first one.
        """
        scheduler = self.scheduler
        scheduler.make_room()
        scheduler.admit()
        scheduler.await_turn(self.wakeup, self.events.deliver)
        prefill = scheduler.share_prefill()
        scheduler.ask_for_drafts()
        idle = not prefill and not scheduler.has_ready
        # A client drafts only after it has received the event of its last round.
        client_waits = any(self.drafting.waits_for_client(e.session) for e in self.events.held)
        if idle and (client_waits or not self._wait(min(wait_s, _HOLD_BACK_S))):
            self.events.deliver()
            self._wait(wait_s)
        if not (ready := scheduler.choose(prefill)) and not prefill:
            return []
        self.events.deliver()  # listeners run during the forward that follows
        started = time.perf_counter()
        try:
            outcomes = decode_round(ready, self.drafting, self.target, self.load, prefill=prefill)
        except Exception as error:
            # One forward serves all these sessions, so the KV state of none can be trusted now.
            level = logging.INFO if isinstance(error, PacelineError) else logging.ERROR
            failed = [*ready, *(session for session, _ in prefill)]
            logger.log(level, "a step failed; its %d sessions end", len(failed), exc_info=error)
            self.fail(failed, error)
            return []
        rounds = list(zip(ready, outcomes, strict=True))
        scheduler.observe(time.perf_counter() - started, rounds, prefill)
        events = [self._conclude(session, outcome) for session, outcome in rounds]
        for session in filter(scheduler.ends_read, (session for session, _ in prefill)):
            self._end(session, "length")
        scheduler.ask_for_drafts()
        if not self.drafting.num_under_way or any(event.finished for event in events):
            self.events.deliver()
        return events

    def _wait(self, seconds: float) -> bool:
        """Wait until a session is ready or a call comes; False if neither comes in time."""
        scheduler = self.scheduler
        seconds = min(seconds, self.drafting.patience_left, scheduler.patience_left)
        with self.wakeup:
            return self.wakeup.wait_for(lambda: scheduler.has_ready or self.interrupted(), seconds)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> list[Session]:
        """Generate for all prompts together; returns the finished sessions in the same order."""
        if not isinstance(params, Sequence):
            params = [params or SamplingParams()] * len(prompts)
        sessions: list[Session] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                sessions.append(self.submit(Request(prompt, each, speculation)))
            while not all(session.finished for session in sessions):
                self.step()
        finally:  # leave no session behind if a prompt is refused or Ctrl-C comes
            for session in sessions:
                self.cancel(session.session_id)
        for session in sessions:
            if session.error is not None:
                raise session.error
        return sessions

    def _conclude(self, session: Session, outcome: Outcome) -> RoundEvent:
        """Move the session to its next state; returns the event of the round."""
        event = self.events.of_round(session, outcome)
        if session.finished:
            self.scheduler.remove(session)
        else:
            self.scheduler.next_round(session)
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
