"""Continuous batching: sessions come and go at every step, tokens come out.

A step admits whom KV memory allows, gives waiting prompts shares of prefill, collects the drafts
that are there, and runs one round of the decode loop for every session that is ready. Sessions
whose drafts come from elsewhere (another actor, a client device) join the step in which their
draft has arrived; nobody waits for them.
"""

from __future__ import annotations

import logging
import operator
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar

from paceline.admission import Admission, PrefillPace, most_entries
from paceline.batching import STRATEGIES, Batching, BatchStrategy
from paceline.config import SpeculationConfig
from paceline.constraints import ConstraintCompiler
from paceline.counters import CounterBook, EngineCounters
from paceline.drafters.base import (
    AsyncDrafter,
    Drafter,
    DrafterContext,
    checks_knobs,
    is_local,
    is_remote,
)
from paceline.drafters.client import ClientDrafter
from paceline.drafters.none import NoDrafter
from paceline.errors import (
    FailedPrecondition,
    InvalidArgument,
    PacelineError,
    ResourceExhausted,
    SessionNotFound,
)
from paceline.lengths.base import LengthContext
from paceline.loop import Arrived, decode_round, round_budget
from paceline.methods import DRAFTERS, METHODS, Method
from paceline.models.heads import HeadLibrary
from paceline.models.heads.base import Head
from paceline.plan import CLIENT_METHOD, Plan, resolve
from paceline.sampling import SamplingParams, TokenLogprobs, token_logprobs
from paceline.session import Session, SessionState
from paceline.target import ModelTarget, Target
from paceline.tokenizer import Tokenizer
from paceline.types import EMPTY_DRAFT, Draft, Load, Outcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HOLD_BACK_S = 0.004  # longest time that listeners wait for a round's tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """How much an engine takes on.

    Attributes:
        max_sessions: sessions that run at the same time.
        max_waiting: sessions that may queue; beyond that, submit is refused.
        prefill_chunk: prompt tokens computed in one step, all sessions together.
        prefill_stretch: a step that reads prompts beside sessions that decode may take so many
            times as long as one without; None sets no limit but ``prefill_chunk``.
        prefix_cache: keep KV entries of sessions that have ended for those that begin alike.
        batch_strategy: see :mod:`paceline.batching`.
        batch_size: sessions that one step verifies; None is all who are ready.
    """

    max_sessions: int = 64
    max_waiting: int = 1024
    prefill_chunk: int = 256
    prefill_stretch: float | None = None
    prefix_cache: bool = True
    batch_strategy: BatchStrategy = "ragged"
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.prefill_stretch is not None and not self.prefill_stretch > 1:
            raise InvalidArgument("prefill_stretch", self.prefill_stretch, "above 1, or None")
        if self.batch_strategy not in STRATEGIES:
            allowed = f"one of {', '.join(STRATEGIES)}"
            raise InvalidArgument("batch_strategy", self.batch_strategy, allowed)
        if self.batch_size is not None and self.batch_size < 1:
            raise InvalidArgument("batch_size", self.batch_size, "an integer >= 1, or None")
        for name in ("max_sessions", "max_waiting", "prefill_chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidArgument(name, value, "an integer >= 1")


@dataclass(frozen=True, slots=True, eq=False)
class RoundEvent:
    """What one round (or an end without one) did to a session.

    The first ``num_accepted`` of ``token_ids`` came from the draft. ``text`` is what these tokens
    completed. ``outcome`` is None, and ``round`` 0, when the session ended outside a round.
    ``logprobs`` has an entry for each token where the request wants them. ``at`` is when, by
    ``time.perf_counter``; listeners may hear of it a little later.
    """

    session: Session
    round: int
    token_ids: tuple[int, ...]
    num_accepted: int
    text: str
    outcome: Outcome | None
    finished: bool
    logprobs: tuple[TokenLogprobs, ...] = ()
    at: float = field(default_factory=time.perf_counter)


EventHandler = Callable[[RoundEvent], None]


class Engine:
    """Sessions in, steps, tokens out. Not thread-safe: see :class:`EngineThread`.

    Args:
        target: the model whose tokens count.
        drafters: by drafter name as in the catalogue: those that the engine cannot make by itself
            (``paceline.methods.DRAFTERS``), or replacements for them.
        tokenizer: for text and stop strings; without it sessions have token ids only.
        catalogue: the rows that requests may name.
        length_context: measured costs and trained heads for the length controllers.
        heads: trained draft heads of this target.
    """

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter | AsyncDrafter] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] = (),
        limits: EngineLimits | None = None,
        catalogue: Mapping[str, Method] = METHODS,
        length_context: LengthContext | None = None,
        heads: HeadLibrary | None = None,
    ) -> None:
        self.heads = heads
        self.target = target
        self.drafters: dict[str, Drafter | AsyncDrafter] = {
            "none": NoDrafter(),  # where every session ends up that loses its drafter
            "client": ClientDrafter(),
            **(drafters or {}),
        }
        self._made: set[str] = set()  # drafters that this engine made by itself
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.constraints = ConstraintCompiler(tokenizer, target.vocab_size, self.eos_token_ids)
        self.limits = limits or EngineLimits()
        if isinstance(target, ModelTarget):
            target.shares_prefixes = self.limits.prefix_cache
            target.batch_strategy = self.limits.batch_strategy
        self._pace = PrefillPace(self.limits.prefill_chunk, self.limits.prefill_stretch)
        self.batching = Batching(self.limits.batch_strategy, self.limits.batch_size)
        self.length_context = replace(
            length_context or LengthContext(vocab_size=target.vocab_size),
            shadow_share=self._shadow_share,
        )
        if target.num_layers:
            self.length_context = replace(
                self.length_context,
                num_layers=target.num_layers,
                head_layers=target.head_layers,
                exit_logits=target.exit_logits,
            )
        self.catalogue = {**catalogue, CLIENT_METHOD.name: CLIENT_METHOD}
        self.sessions: dict[str, Session] = {}
        self._waiting: deque[Session] = deque()
        self._admission = Admission(target.kv_capacity, self.limits.max_sessions)
        self._untold: list[RoundEvent] = []
        self._futures: dict[str, Future[Draft]] = {}
        self._arrived: dict[str, Arrived] = {}  # drafts of sessions that are ready
        # None where the draft was there as soon as it was wanted.
        self._draft_started: dict[str, float | None] = {}
        self._handlers: dict[str, EventHandler] = {}
        self._text_sent: dict[str, int] = {}
        self._book = CounterBook()
        self._arrival = threading.Condition()
        self.interrupted: Callable[[], object] = lambda: False  # ends a wait for drafts early

    @property
    def local_target(self) -> ModelTarget:
        """The target, where its model is in this process."""
        if not isinstance(self.target, ModelTarget):
            raise InvalidArgument("target", "on another machine", "a target in this process")
        return self.target

    # --- sessions in ---------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        speculation: SpeculationConfig | None = None,
        *,
        session_id: str | None = None,
        on_event: EventHandler | None = None,
        traceparent: str = "",
        cache_scope: str = "",
        prediction: Sequence[int] = (),
        committed: Sequence[int] = (),
    ) -> Session:
        """Queue a prompt.

        Args:
            on_event: called for every event of the session, on the thread that steps.
            traceparent: W3C trace context for drafters elsewhere.
            cache_scope: whose cached prefixes the session may begin with, and adds to: how long a
                prompt takes tells what is cached.
            prediction: token ids that the output is expected to have, for methods that draft them.
            committed: the output's first token ids, from another engine; events tell of what
                comes after them.

        Raises:
            InvalidArgument: an empty or too long prompt, a token outside the vocabulary, a method
                that this engine cannot run, a prediction for a method without use for it,
                ``committed`` tokens that end the generation.
            ResourceExhausted: the queue is full, or the request can never fit in KV memory.
        """
        params = params or SamplingParams()
        plan = resolve(speculation or SpeculationConfig(), self.catalogue)
        self._check_needs(plan)
        self._make_drafters(plan)
        if plan.rule.name == "greedy" and params.temperature > 0:
            raise InvalidArgument("acceptance", "greedy", "'coupled' when temperature is above 0")
        prompt_ids = self._checked_prompt(prompt_ids)
        committed = self.checked_tokens("committed_token_ids", committed)
        self._check_prediction(prediction, plan)
        params.check_vocabulary(self.target.vocab_size)
        if params.stop and self.tokenizer is None:
            raise InvalidArgument("stop", params.stop, "no stop strings: there is no tokenizer")
        if params.logprobs is not None and not isinstance(self.target, ModelTarget):
            raise InvalidArgument("logprobs", params.logprobs, "none: the target is elsewhere")
        if len(self._waiting) >= self.limits.max_waiting:
            self._admit()  # some of them may only be waiting for the next step
        if len(self._waiting) >= self.limits.max_waiting:
            raise ResourceExhausted(f"{len(self._waiting)} sessions are waiting already")
        session_id = session_id or secrets.token_hex(8)
        if session_id in self.sessions:
            raise InvalidArgument("session_id", session_id, "an id that is not in use")
        session = Session(
            session_id, prompt_ids, params, plan,
            eos_token_ids=self.eos_token_ids,
            max_length=self.target.context_length,
            tokenizer=self.tokenizer,
            length_context=self.length_context,
            prediction=prediction,
            constraint=self.constraints.compile(params),
        )  # fmt: skip
        session.traceparent, session.cache_scope = traceparent, cache_scope
        if committed:
            session.resume(committed)
        if most_entries(session) > self.target.kv_capacity:
            raise ResourceExhausted(
                f"the request needs {most_entries(session)} KV entries, this replica has "
                f"{self.target.kv_capacity}: shorten the prompt or lower max_tokens",
                retry_after_s=0,
            )
        self.sessions[session_id] = session
        self._text_sent[session_id] = session.streamable_length  # of committed tokens
        self._waiting.append(session)
        if on_event is not None:
            self._handlers[session_id] = on_event
        return session

    def refusal(self, method: Method) -> str | None:
        """Why this engine cannot run a row of the catalogue; None where it can."""
        given = self.drafters.get(method.drafter)
        parts = () if given is not None else method.uses  # which a drafter that is there has
        missing = sorted({method.drafter, *parts} - self.drafters.keys() - DRAFTERS.keys())
        if missing:
            return f"drafter not loaded here: {', '.join(missing)}"
        remote = [n for n in parts if n in self.drafters and is_remote(self.drafters[n])]
        if remote:
            return f"drafter in another process: {', '.join(remote)}"
        if method.head and not (self.heads and self.heads.has(method.head)):
            where = f" in {self.heads.folder}" if self.heads else ""
            return f"no trained head{where}: `paceline train {method.head}` makes one"
        lacking = sorted(need.value for need in method.needs - self.target.provides)
        return f"the target does not give its {', '.join(lacking)}" if lacking else None

    def _check_needs(self, plan: Plan) -> None:
        """That the target gives what the parts of a plan want of it."""
        lacking = sorted(need.value for need in plan.needs - self.target.provides)
        if lacking:
            raise InvalidArgument(
                "method", plan.method.name,
                f"a method that does not need the target's {', '.join(lacking)}: this target runs "
                "on the general path (the fast path is for Llama, Mistral, Qwen2 and Qwen3 models)",
            )  # fmt: skip

    def _make_drafters(self, plan: Plan) -> None:
        """Make the drafters of a plan that are not there yet."""
        there = self.drafters.get(plan.method.drafter)
        names = plan.drafters[:1] if there is not None else plan.drafters
        missing = [n for n in names if n not in self.drafters and n not in DRAFTERS]
        if missing:
            able = sorted(n for n, m in self.catalogue.items() if self.refusal(m) is None)
            raise InvalidArgument(
                "method", plan.method.name,
                f"a method whose drafters are loaded here ({', '.join(missing)} is not): "
                f"{', '.join(able)}",
            )  # fmt: skip
        if is_remote(self._make_drafter(plan.method.drafter)):
            if plan.needs:
                needs = ", ".join(sorted(need.value for need in plan.needs))
                raise InvalidArgument(
                    "method", plan.method.name,
                    f"a method whose drafter needs tokens alone: this one's is in another process, "
                    f"and needs the target's {needs}",
                )  # fmt: skip
            return  # whoever hosts it has its parts
        for row in plan.parts:
            self.local_drafter(row.drafter)
        for name in plan.drafters:
            drafter = self.drafters.get(name)
            if drafter is not None and checks_knobs(drafter):
                drafter.check_knobs(plan.config)

    def sibling(self) -> Engine:
        """An engine over the same models whose drafters have learnt nothing yet."""
        given = {name: d for name, d in self.drafters.items() if name not in self._made}
        return Engine(
            self.target, given,
            tokenizer=self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            limits=self.limits,
            catalogue=self.catalogue,
            length_context=self.length_context,
            heads=self.heads,
        )  # fmt: skip

    def _make_drafter(self, name: str) -> Drafter | AsyncDrafter:
        if name not in self.drafters:
            if name not in DRAFTERS:
                raise InvalidArgument(
                    "method", name, f"a method whose drafters are loaded here ({name} is not)"
                )
            self._made.add(name)
            context = DrafterContext(
                self.target.vocab_size, self.local_drafter, lambda: self.local_target,
                self._load_head,
            )  # fmt: skip
            self.drafters[name] = DRAFTERS[name](context)
        return self.drafters[name]

    def _load_head(self, kind: str) -> Head:
        if self.heads is None:
            raise InvalidArgument("method", kind, "a method without a head: no folder of heads")
        return self.heads.load(kind)

    def local_drafter(self, name: str) -> Drafter:
        """A drafter of this engine, for another one that is made of it."""
        drafter = self._make_drafter(name)
        if not is_local(drafter):
            raise InvalidArgument("method", name, "a drafter that drafts in this process")
        return drafter

    def _check_prediction(self, prediction: Sequence[int], plan: Plan) -> None:
        if not prediction:
            return
        if not plan.reads_prediction:
            able = sorted(row.name for row in self.catalogue.values() if row.reads_prediction)
            raise InvalidArgument(
                "prediction", f"{len(prediction)} tokens",
                f"none with method {plan.method.name!r}, or one of the methods that use it: "
                + ", ".join(able),
            )  # fmt: skip
        if len(prediction) > self.target.context_length:
            raise InvalidArgument(
                "prediction", f"{len(prediction)} tokens",
                f"at most as many tokens as the context has, {self.target.context_length}",
            )  # fmt: skip
        for i, token in enumerate(prediction):
            if not 0 <= token < self.target.vocab_size:
                raise InvalidArgument(
                    f"prediction[{i}]", token, f"token ids in [0, {self.target.vocab_size})"
                )

    def _checked_prompt(self, prompt_ids: Sequence[int]) -> list[int]:
        if not len(prompt_ids):
            raise InvalidArgument("prompt", "", "at least one token")
        if len(prompt_ids) >= self.target.context_length:
            raise InvalidArgument(
                "prompt", f"{len(prompt_ids)} tokens",
                f"fewer tokens than the context of {self.target.context_length}",
            )  # fmt: skip
        return self.checked_tokens("prompt_token_ids", prompt_ids)

    def checked_tokens(self, field: str, token_ids: Sequence[int]) -> list[int]:
        """Token ids from outside; InvalidArgument names ``field`` where one is unknown."""
        size, checked = self.target.vocab_size, []
        for i, token in enumerate(token_ids):
            try:
                value = operator.index(token)
            except TypeError:
                value = -1
            if not 0 <= value < size:
                raise InvalidArgument(f"{field}[{i}]", token, f"token ids in [0, {size})")
            checked.append(value)
        return checked

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
            self._forget_text(session)
            return
        drafter = self._drafter(session)
        if not isinstance(drafter, ClientDrafter):
            if session_id in self._futures:
                raise FailedPrecondition("a draft for this session is under way")
            self._close_drafter(session)
        self.target.truncate(session, length)
        session.truncate(length)
        if not isinstance(drafter, ClientDrafter):
            self._open_drafter(session)
        self._forget_text(session)

    def _forget_text(self, session: Session) -> None:
        sent = self._text_sent.get(session.session_id, 0)  # less than the text while some is held
        self._text_sent[session.session_id] = min(sent, len(session.text))

    # --- steps ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True while a session is not finished."""
        return bool(self.sessions)

    @property
    def load(self) -> Load:
        running = [s for s in self.sessions.values() if s.state is not SessionState.WAITING]
        return Load(len(running), len(self._waiting), sum(s.length for s in running))

    def count_rounds(self) -> tuple[int, float]:
        """Rounds of sessions so far, and the seconds of their verifications."""
        return self._book.rounds(self.sessions.values())

    def take_counters(self) -> EngineCounters:
        """What was done so far; requests and steps since the last call."""
        counters = self._book.take(list(self.sessions.values()))
        if isinstance(self.target, ModelTarget):
            counters.kv_capacity = self.target.kv_capacity
            counters.kv_used = self.target.kv_capacity - self.target.num_free
            prefixes = self.target.prefixes
            if prefixes is not None:
                counters.kv_cached = prefixes.num_idle
                counters.prefix_queried = prefixes.num_queried
                counters.prefix_hit = prefixes.num_hit
                counters.prefix_evicted = prefixes.num_evicted
        return counters

    def step(self, wait_s: float = 0.05) -> list[RoundEvent]:
        """One step for everybody who is ready.

        When nobody is, because all drafts are still under way, waits up to ``wait_s`` seconds for
        the first of them.
        """
        self._make_room()
        self._admit()
        prefill = self._choose_prefill()
        self._request_drafts()
        idle = not prefill and not self._has_ready()
        # A client drafts when it has heard of its last round: nothing comes from it before.
        if idle and (self._owes_clients() or not self._wait(min(wait_s, _HOLD_BACK_S))):
            self._tell()
            self._wait(wait_s)
        self._collect_drafts()
        ready = self.batching.choose(
            [session for session in self.sessions.values() if session.state is SessionState.READY]
        )
        ids = {session.session_id for session in ready}
        arrived = {i: self._arrived.pop(i) for i in ids & self._arrived.keys()}
        if not ready and not prefill:
            return []
        for session in ready:
            session.state = SessionState.VERIFYING
        self._tell()  # listeners run beside the forward that comes now
        started = time.perf_counter()
        try:
            outcomes = decode_round(
                ready, self._local_drafters(), self.target, self.load,
                arrived=arrived, prefill=prefill,
            )  # fmt: skip
        except Exception as error:
            # The forward serves all of them, so nobody's KV state can be trusted any more.
            level = logging.INFO if isinstance(error, PacelineError) else logging.ERROR
            logger.log(
                level, "a step failed; its %d sessions end", len(ready) + len(prefill),
                exc_info=error,
            )  # fmt: skip
            self._fail([*ready, *(session for session, _ in prefill)], error)
            return []
        seconds = time.perf_counter() - started
        self._book.steps.append(seconds)
        self._pace.observe(seconds, len(ready), sum(count for _, count in prefill))
        self._observe_remote(ready, outcomes)
        for session, _ in prefill:
            self._after_prefill(session)
        events = [self._conclude(session, o) for session, o in zip(ready, outcomes, strict=True)]
        self._untold += events
        self._request_drafts()
        if not self._futures or any(event.finished for event in events):
            self._tell()
        return events

    def _wait(self, seconds: float) -> bool:
        """Until a session is ready or somebody calls; False when neither came in time."""
        with self._arrival:
            return bool(
                self._arrival.wait_for(lambda: self._has_ready() or self.interrupted(), seconds)
            )

    def _owes_clients(self) -> bool:
        """Whether a session with drafts from a client has not been told of its last round."""
        return any(
            isinstance(self._drafter(event.session), ClientDrafter) for event in self._untold
        )

    def _tell(self) -> None:
        """Hand the events of the last round to their listeners.

        While drafts are under way this waits for a moment: listeners share the interpreter with
        whoever sends and receives drafts, and have it for themselves during the next forward.
        """
        events, self._untold = self._untold, []
        for event in events:
            self._notify(event)
            if event.finished:
                self._handlers.pop(event.session.session_id, None)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> list[Session]:
        """Generate for all prompts together and return the finished sessions, in order."""
        each = [params] * len(prompts) if not isinstance(params, Sequence) else list(params)
        sessions: list[Session] = []
        try:
            for prompt, p in zip(prompts, each, strict=True):
                sessions.append(self.submit(prompt, p, speculation))
            while not all(session.finished for session in sessions):
                self.step()
        finally:  # a prompt was refused, or somebody interrupts: nothing stays behind
            for session in sessions:
                self.cancel(session.session_id)
        for session in sessions:
            if session.error is not None:
                raise session.error
        return sessions

    def _make_room(self) -> None:
        """Before a step: whoever the KV memory cannot hold any more waits again."""
        for session in self._admission.overdrawn():
            logger.info("session %s gives way to older ones", session.session_id)
            self._book.num_preemptions += 1
            future = self._futures.pop(session.session_id, None)
            self._draft_started.pop(session.session_id, None)
            drafter = self._drafter(session)
            arrived = self._arrived.pop(session.session_id, None)
            if isinstance(drafter, ClientDrafter):
                drafter.take_back(session.session_id, future, arrived and arrived.draft)
            else:
                self._close_drafter(session)
                if future is not None:
                    future.cancel()
            self._admission.remove(session)
            self.target.close(session)
            session.state = SessionState.WAITING
            self._waiting.appendleft(session)

    def _admit(self) -> None:
        # First come, first served: a long request is not starved by short ones.
        while self._waiting and self._admission.fits(self._waiting[0]):
            session = self._waiting.popleft()
            self._admission.add(session)
            self.target.open(session)
            self._open_drafter(session)
            session.state = SessionState.PREFILLING
            if session.stats.admitted_at is None:
                session.stats.admitted_at = time.perf_counter()
                self._book.num_prompt_tokens += session.prompt_length
            if self.target.prefill_left(session) == 0:
                self._after_prefill(session)

    def _choose_prefill(self) -> list[tuple[Session, int]]:
        """Equal shares for all prompts; who needs less than that leaves the rest to the others."""
        prefilling = [s for s in self.sessions.values() if s.state is SessionState.PREFILLING]
        if not prefilling:
            return []
        wanted = [(self.target.prefill_left(session), session) for session in prefilling]
        wanted.sort(key=lambda item: item[0])
        running = self._admission.num_admitted
        room, chosen = self._pace.room(running > len(prefilling)), []
        for i, (left, session) in enumerate(wanted):
            count = min(left, max(1, room // (len(wanted) - i)))
            if count and room:
                chosen.append((session, count))
                room -= count
        return chosen

    def _after_prefill(self, session: Session) -> None:
        if session.state is SessionState.PREFILLING and self.target.prefill_left(session) == 0:
            remote = is_remote(self._drafter(session))
            session.state = SessionState.DRAFTING if remote else SessionState.READY
            if session.stats.prefilled_at is None:
                session.stats.prefilled_at = time.perf_counter()
            if session.session_id in self._draft_started:  # it is wanted only now
                is_here = self._futures[session.session_id].done()
                self._draft_started[session.session_id] = None if is_here else time.perf_counter()

    def _request_drafts(self) -> None:
        """Ask remote drafters for the sessions that have no draft under way.

        The first draft depends on the prompt alone, so a drafter reads it while the target does.
        """
        groups: dict[str, list[Session]] = {}
        for session in self.sessions.values():
            wanting = session.state in (SessionState.PREFILLING, SessionState.DRAFTING)
            if (
                wanting
                and session.session_id not in self._futures
                and is_remote(self._drafter(session))
            ):
                groups.setdefault(session.plan.method.drafter, []).append(session)
        load = self.load
        for name, members in groups.items():
            drafter = self.drafters[name]
            assert is_remote(drafter)
            budgets = [round_budget(session, load) for session in members]
            started = time.perf_counter()
            try:
                futures = drafter.propose_async(members, budgets)
            except Exception as error:
                futures = [_failed(error) for _ in members]
            for session, budget, future in zip(members, budgets, futures, strict=True):
                if budget.shadow is not None:
                    future.add_done_callback(budget.shadow.arrived)
                    future = _done(EMPTY_DRAFT)
                self._futures[session.session_id] = future
                self._draft_started[session.session_id] = None if future.done() else started
                future.add_done_callback(self._on_arrival)

    def _on_arrival(self, _: Future[Draft]) -> None:
        with self._arrival:
            self._arrival.notify_all()

    def _has_ready(self) -> bool:
        if any(session.state is SessionState.READY for session in self.sessions.values()):
            return True
        return any(self._has_draft(session_id) for session_id in self._futures)

    def _has_draft(self, session_id: str) -> bool:
        drafting = self.sessions[session_id].state is SessionState.DRAFTING
        return drafting and self._futures[session_id].done()

    def _collect_drafts(self) -> None:
        for session_id in [sid for sid in self._futures if self._has_draft(sid)]:
            future, session = self._futures.pop(session_id), self.sessions[session_id]
            started = self._draft_started[session_id]
            seconds = 0.0 if started is None else time.perf_counter() - started
            try:
                self._arrived[session_id] = Arrived(future.result(), seconds)
            except Exception as error:
                logger.warning("session %s lost its drafter: %s", session_id, error)
                self._close_drafter(session)
                session.lose_drafter()
            session.state = SessionState.READY

    def _local_drafters(self) -> dict[str, Drafter]:
        return {name: drafter for name, drafter in self.drafters.items() if is_local(drafter)}

    def _observe_remote(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        for session, outcome in zip(sessions, outcomes, strict=True):
            drafter = self._drafter(session)
            if is_remote(drafter):
                try:
                    drafter.observe([session], [outcome])
                except Exception:
                    logger.exception("a drafter cannot observe; its session goes on as AR")
                    self._close_drafter(session)
                    session.lose_drafter()

    def _open_drafter(self, session: Session) -> None:
        try:
            self._drafter(session).open(session)
        except Exception:
            logger.exception("a drafter cannot open a session; it goes on as AR")
            session.lose_drafter()

    def _close_drafter(self, session: Session) -> None:
        try:
            self._drafter(session).close(session)
        except Exception:
            logger.exception("a drafter failed to close a session")

    def _shadow_share(self, session: Session) -> float | None:
        """As :attr:`LengthContext.shadow_share`.

        Tokens that are drawn from q do not tell the worth of a draft that was not verified.
        """
        drafter = self._drafter(session)
        if session.plan.rule.draws.needs_q or not getattr(drafter, "shadows", False):
            return None
        return 0.0 if is_remote(drafter) else 1.0

    def _drafter(self, session: Session) -> Drafter | AsyncDrafter:
        return self.drafters[session.plan.method.drafter]

    # --- tokens out ----------------------------------------------------------------------------

    def _conclude(self, session: Session, outcome: Outcome) -> RoundEvent:
        """The session's next state, and the event that tells of the round."""
        finished = session.finished
        sent = self._text_sent.get(session.session_id, 0)
        # Text that could still turn out to be the start of a stop string is held back.
        safe = len(session.text) if finished else session.streamable_length
        text = session.text[sent:safe]
        self._text_sent[session.session_id] = max(sent, safe)
        event = RoundEvent(
            session, session.stats.num_rounds, outcome.token_ids, outcome.num_accepted, text,
            outcome, finished, _logprobs(session, outcome),
        )  # fmt: skip
        if finished:
            self._release(session)
        else:
            remote = is_remote(self._drafter(session))
            session.state = SessionState.DRAFTING if remote else SessionState.READY
        return event

    def _end(self, session: Session, reason: str) -> None:
        """Finish a session outside a round."""
        self._tell()
        sent = self._text_sent.get(session.session_id, 0)
        session.finish(reason)
        self._release(session)
        self._notify(RoundEvent(session, 0, (), 0, session.text[sent:], None, True))
        self._handlers.pop(session.session_id, None)

    def _fail(self, sessions: Iterable[Session], error: Exception) -> None:
        for session in sessions:
            if session.session_id in self.sessions:
                session.error = error
                self._end(session, "error")

    def _notify(self, event: RoundEvent) -> None:
        handler = self._handlers.get(event.session.session_id)
        if handler is not None:
            try:
                handler(event)
            except Exception as error:  # of one caller; the step serves the others as well
                logger.exception("an event handler failed; its session ends")
                self._handlers.pop(event.session.session_id, None)
                self._fail([event.session], error)

    def _release(self, session: Session) -> None:
        session_id = session.session_id
        if self.sessions.pop(session_id, None) is not None:
            self._book.ended(session)
        if session in self._waiting:
            self._waiting.remove(session)
        if self._admission.remove(session):
            self.target.close(session)
            self._close_drafter(session)
        self._text_sent.pop(session_id, None)
        self._arrived.pop(session_id, None)
        self._draft_started.pop(session_id, None)
        future = self._futures.pop(session_id, None)
        if future is not None:
            future.cancel()


def _logprobs(session: Session, outcome: Outcome) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of a round's tokens, where the request wants them."""
    count = session.params.logprobs
    if count is None:
        return ()
    rows = [0, *(node + 1 for node in outcome.path)]  # the rows that the tokens came from
    logits = outcome.verification.logits
    return tuple(
        token_logprobs(logits[row].float().cpu().numpy(), token, count)
        for row, token in zip(rows, outcome.token_ids, strict=False)
    )


def _done(draft: Draft) -> Future[Draft]:
    future: Future[Draft] = Future()
    future.set_result(draft)
    return future


def _failed(error: BaseException) -> Future[Draft]:
    future: Future[Draft] = Future()
    future.set_exception(error)
    return future


def _stopped() -> FailedPrecondition:
    return FailedPrecondition("the engine has stopped")


class EngineThread:
    """Steps an engine on a thread of its own; every method may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._calls: deque[tuple[Callable[[Engine], object], Future[object]]] = deque()
        self._wakeup = engine._arrival  # one condition: a call, or a draft that has arrived
        self._stopping = False
        engine.interrupted = lambda: self._calls or self._stopping
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)

    def start(self) -> EngineThread:
        self._thread.start()
        return self

    def stop(self, timeout: float = 10.0) -> None:
        """Cancel every session, finish the current step and end the thread."""
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)
        else:  # it never started
            while self._calls:
                self._calls.popleft()[1].set_exception(_stopped())

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run ``function(engine)`` between two steps."""
        future: Future[T] = Future()
        with self._wakeup:
            if self._stopping:
                future.set_exception(_stopped())
                return future
            self._calls.append((function, future))  # type: ignore[arg-type]
            self._wakeup.notify_all()
        return future

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        speculation: SpeculationConfig | None = None,
        *,
        session_id: str | None = None,
        on_event: EventHandler | None = None,
        traceparent: str = "",
        cache_scope: str = "",
        prediction: Sequence[int] = (),
        committed: Sequence[int] = (),
    ) -> Future[Session]:
        """:meth:`Engine.submit` on the engine's thread."""
        return self.call(
            lambda engine: engine.submit(
                prompt_ids,
                params,
                speculation,
                session_id=session_id,
                on_event=on_event,
                traceparent=traceparent,
                cache_scope=cache_scope,
                prediction=prediction,
                committed=committed,
            )
        )

    def cancel(self, session_id: str) -> Future[bool]:
        """:meth:`Engine.cancel` on the engine's thread."""
        return self.call(lambda engine: engine.cancel(session_id))

    def _run(self) -> None:
        engine = self.engine
        while True:
            self._run_calls()
            if self._stopping:
                self._run_calls()  # none can come any more
                for session_id in list(engine.sessions):
                    engine.cancel(session_id)
                return
            if engine.has_work:
                try:
                    engine.step(wait_s=1.0)
                except Exception as error:  # a bug; nobody may wait for its session for ever
                    logger.exception("a step failed; all sessions end")
                    engine._fail(list(engine.sessions.values()), error)
            else:
                with self._wakeup:
                    self._wakeup.wait_for(lambda: self._calls or self._stopping, 1.0)

    def _run_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(self.engine)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
