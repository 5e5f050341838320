"""What a drafter replica holds: drafters, and mirrors of the targets' sessions.

A :class:`Mirror` follows one session by the tokens that the target commits. It needs no digest and
no rounds: a target whose drafter has lost its place opens the session again, at little cost.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import torch

from paceline.config import MAX_DEPTH, MAX_NODES, SpeculationConfig
from paceline.drafters.base import Drafter, at_once
from paceline.engine.drafting import DrafterSet
from paceline.errors import InvalidArgument, PacelineError, ResourceExhausted, SessionNotFound
from paceline.lengths.base import LengthContext
from paceline.methods import DRAFTERS, Method
from paceline.plan import Plan, resolve
from paceline.rpc.errors import PrefixDiverged
from paceline.rpc.fans import SpareTime, can_fan, draft_fans
from paceline.rpc.gen.paceline.v1 import draft_pb2
from paceline.rpc.messages import (
    fill_draft,
    sampling_from_message,
    speculation_from_message,
    tokens_from_message,
)
from paceline.rpc.states import StatesCodec, StatesReader
from paceline.rpc.tracing import Span, Tracing
from paceline.session import Session
from paceline.tree import accepted_path, below, clip, is_chain
from paceline.types import EMPTY_DRAFT, Budget, Draft, Outcome, Verification

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The target keeps its logits to itself; a drafter that needs them cannot live here.
NO_VERIFICATION = Verification(torch.empty(0, 0))


class Mirror:
    """A target's session as this drafter knows it."""

    __slots__ = (
        "ahead", "asked", "draft", "num_drafts", "ready", "session", "span", "states", "touched_at",
    )  # fmt: skip

    def __init__(self, session: Session, span: Span | None, states: StatesReader | None) -> None:
        self.session = session
        self.states = states  # None: its drafter reads none
        self.span = span
        self.num_drafts = 0
        self.draft = EMPTY_DRAFT  # after these tokens, to find the accepted path in
        self.asked: Budget | None = None  # what that draft was made for
        # That draft and what follows it, by what the target makes of it: its next token first.
        self.ahead = EMPTY_DRAFT
        self.ready = EMPTY_DRAFT  # the draft after these tokens, if ``ahead`` has it
        self.touched_at = time.monotonic()

    def advance(self, token_ids: list[int]) -> Outcome | None:
        """Append tokens that the target has committed.

        Returns:
            what became of the draft; None for a drafter that has drafted ahead, which looks at the
            tokens only.
        """
        draft, guess = self.draft, self.ahead
        self.draft, self.asked, self.ahead, self.ready = EMPTY_DRAFT, None, EMPTY_DRAFT, EMPTY_DRAFT
        self.session.token_ids.extend(token_ids)
        path = accepted_path(draft, token_ids)
        outcome = Outcome(
            draft=draft,
            path=path,
            next_token=token_ids[len(path)],
            token_ids=tuple(token_ids[: len(path) + 1]),
            num_accepted=len(path),
            verification=NO_VERIFICATION,
        )
        if self.session.stop_rule is not None:
            self.session.stop_rule.observe(outcome)
        if guess.num_nodes:
            self.ready = below(guess, token_ids)
            return None
        return outcome


@dataclass(slots=True, eq=False)
class Step:
    """A frame whose tokens the mirrors have, and what its sessions still need from their drafters.

    Attributes:
        results: for each item of the frame; those in ``asking`` are still missing.
        asking: place of the item, its mirror, and the budget of the draft that it wants.
        observed: sessions with the outcomes of their last drafts.
    """

    mirrors: Mirrors
    results: list[Draft | Exception]
    asking: list[tuple[int, Mirror, Budget]] = field(default_factory=list)
    observed: list[tuple[Session, Outcome]] = field(default_factory=list)

    def fail(self, error: Exception) -> None:
        """Forget the sessions, whose state at the drafter is unknown now.

        The target opens them again if it still wants drafts.
        """
        for i, _, _ in self.asking:
            self.results[i] = error
        self.mirrors.forget([s for s, _ in self.observed] + [m.session for _, m, _ in self.asking])


class DraftHost:
    """The drafters of a replica, and what all streams share.

    Args: as :class:`paceline.rpc.draft_service.DraftServicer`.

    Raises:
        InvalidArgument: the drafter needs more of the target than tokens and states.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        name: str | None,
        vocab_size: int,
        context_length: int | None,
        catalogue: Mapping[str, Method],
        max_sessions: int,
        states: str,
        fans: bool,
        tracing: Tracing | None,
    ) -> None:
        if drafter.needs and drafter.states is None:
            needs = ", ".join(sorted(need.value for need in drafter.needs))
            raise InvalidArgument(
                "drafter",
                type(drafter).__name__,
                f"a drafter that needs only tokens, or states that can be sent (this one needs "
                f"{needs}: host it in the target's process)",
            )
        self.codec = None if drafter.states is None else StatesCodec(drafter.states, states)
        self.drafter = drafter
        self.drafters = DrafterSet({} if name is None else {name: drafter}, vocab_size)
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.num_sessions = 0
        self.length_context = LengthContext()  # stop rules of all sessions learn together
        self.fans = fans
        self._name = name
        self._max_sessions = max_sessions
        self._tracing = tracing
        # Sessions with equal knobs share one plan, and with it one shape: drafters batch by shape.
        self.plan = lru_cache(256)(lambda config: self._checked_plan(config, catalogue))

    def drafter_of(self, session: Session) -> Drafter:
        """The drafter of a session's method."""
        return self.drafter if self._name is None else self.drafters[session.plan.method.drafter]

    def by_drafter(
        self, items: Sequence[T], session_of: Callable[[T], Session]
    ) -> list[tuple[Drafter, list[T]]]:
        """Items grouped by the drafter of their session."""
        groups: dict[int, tuple[Drafter, list[T]]] = {}
        for item in items:
            drafter = self.drafter_of(session_of(item))
            groups.setdefault(id(drafter), (drafter, []))[1].append(item)
        return list(groups.values())

    def draft(self, steps: Sequence[Step]) -> bool:
        """One propose of each drafter for all sessions of these frames that ask.

        The frames may come from several targets. Returns False if a drafter failed.
        """
        observed = [told for step in steps for told in step.observed]
        asking = [(step, *ask) for step in steps for ask in step.asking]
        try:
            for drafter, told in self.by_drafter(observed, lambda item: item[0]):
                drafter.observe([s for s, _ in told], [o for _, o in told])
            for drafter, members in self.by_drafter(asking, lambda item: item[2].session):
                sessions = [mirror.session for _, _, mirror, _ in members]
                drafts = at_once(drafter.propose(sessions, [b for *_, b in members]))
                for (step, i, mirror, budget), draft in zip(members, drafts, strict=True):
                    mirror.draft, mirror.asked = draft, budget
                    step.results[i] = draft
        except Exception as error:
            if not isinstance(error, PacelineError):
                logger.exception("a drafter failed")
            for step in steps:
                step.fail(error)
            return False
        return True

    def read_states(self, mirror: Mirror, item: draft_pb2.ProposeItem) -> None:
        """Give a mirror's drafter the target's states of an item, if it has some.

        Raises:
            InvalidArgument, PrefixDiverged: as :meth:`StatesReader.read`; or there are states, and
                the drafter reads none.
        """
        if not item.HasField("states"):
            return
        if mirror.states is None:
            raise InvalidArgument("states", "set", "nothing: this drafter reads tokens alone")
        states = mirror.states.read(item.states, mirror.session.length)
        self.drafter_of(mirror.session).read_states(mirror.session, torch.from_numpy(states))

    def tokens(self, field: str, token_ids: Sequence[int]) -> list[int]:
        """Token ids from a message.

        Raises:
            InvalidArgument: one is outside the vocabulary; names the field.
        """
        return tokens_from_message(field, token_ids, self.vocab_size)

    def check_room(self) -> None:
        """Raise ResourceExhausted when one more session would be too many."""
        if self.num_sessions >= self._max_sessions:
            raise ResourceExhausted(f"the drafter holds {self.num_sessions} sessions, its limit")

    def begin_span(self, opening: draft_pb2.OpenDraft, method: str) -> Span | None:
        """The span of a session whose target traces it."""
        if self._tracing is None or not opening.traceparent:
            return None
        return self._tracing.begin("draft", opening.traceparent, method=method)

    def _checked_plan(self, config: SpeculationConfig, catalogue: Mapping[str, Method]) -> Plan:
        plan = resolve(config, catalogue)
        if self._name is None or plan.method.drafter == self._name:
            return plan
        if plan.method.drafter not in DRAFTERS or self._name not in plan.drafters or plan.needs:
            here = sorted(m.name for m in catalogue.values() if served_with(m, self._name))
            raise InvalidArgument(
                "method", config.method, f"one that this drafter serves: {', '.join(here)}"
            )
        for method in (plan.method, *plan.parts):
            self.drafters.make(method.drafter).check_knobs(plan.config)
        return plan


class Mirrors:
    """The mirrors of one stream, by session id.

    Args:
        stream: a name for it: two targets may use the same session ids.
    """

    def __init__(self, host: DraftHost, stream: str) -> None:
        self._host = host
        self._stream = stream
        self._mirrors: dict[str, Mirror] = {}
        self._spare = SpareTime()

    def __getitem__(self, session_id: str) -> Mirror:
        mirror = self._mirrors.get(session_id)
        if mirror is None:
            raise SessionNotFound(session_id)
        return mirror

    def begin(self, items: Sequence[draft_pb2.ProposeItem]) -> Step:
        """Bring the mirrors up to a frame's tokens; :meth:`DraftHost.draft` does the rest."""
        self._spare.frame()
        step = Step(self, [EMPTY_DRAFT] * len(items))
        named: set[str] = set()
        for i, item in enumerate(items):
            try:
                if item.session_id in named:
                    name = f"items[{i}].session_id"
                    raise InvalidArgument(name, item.session_id, "each session once in a frame")
                if item.close:
                    self.drop(item.session_id)
                    continue
                named.add(item.session_id)
                mirror = self.apply(item, step.observed)
                self._host.read_states(mirror, item)
                budget = self._budget(item, mirror)
                if budget.depth <= 0:
                    continue
                mirror.num_drafts += 1
                if mirror.asked == budget:
                    step.results[i] = mirror.draft  # asked again: the answer is lost
                    continue
                if mirror.ready.num_nodes >= min(budget.depth, budget.nodes):
                    mirror.draft = clip(mirror.ready, budget.depth, budget.nodes)
                    mirror.asked = budget
                    step.results[i] = mirror.draft
                    continue
                if mirror.asked is not None:  # drafters draft once after a token
                    mirror = self._reopen(item.session_id, mirror.session.length)
                if mirror.states is not None:
                    mirror.states.check_complete(mirror.session.length)
                step.asking.append((i, mirror, budget))
            except PacelineError as error:
                step.results[i] = error
        return step

    def answer(self, step: Step) -> list[Draft | Exception]:
        """A draft or an error for each item of a frame, when its drafts are made."""
        return step.results

    def forget(self, sessions: Iterable[Session]) -> None:
        """Close these sessions."""
        gone = {id(session) for session in sessions}
        for session_id, mirror in list(self._mirrors.items()):
            if id(mirror.session) in gone:
                self.drop(session_id)

    def draft_ahead(self, session_ids: Iterable[str]) -> None:
        """While the target verifies, draft what follows if it accepts everything.

        The guess is the drafted tokens and the drafter's own idea of the target's next one. If it
        comes true, the next draft is there at once. Where frames leave the time for it, a drafter
        that grows trees drafts for other verdicts, too (:class:`Fan`).
        """
        started = time.perf_counter()
        guesses = self._guesses(session_ids)
        may_fan, fans = self._host.fans and self._spare.has_time, False
        for drafter, mirrors in self._host.by_drafter(guesses, lambda mirror: mirror.session):
            try:
                sessions, drafts = [m.session for m in mirrors], [m.draft for m in mirrors]
                if may_fan and can_fan(drafter, drafts):
                    fans = True
                    trees = draft_fans(drafter, sessions, drafts)
                    for mirror, tree in zip(mirrors, trees, strict=True):
                        mirror.ahead = tree
                else:
                    self._draft_chains(drafter, mirrors)
            except Exception:  # the next propose fails as well, and tells the target
                logger.exception("a drafter cannot draft ahead")
                self._spare.failed()
        if guesses:
            self._spare.drafted(started, fans)

    def _guesses(self, session_ids: Iterable[str]) -> list[Mirror]:
        """The sessions that can be drafted for ahead of their verdicts."""
        guesses = []
        for mirror in [self._mirrors[each] for each in session_ids if each in self._mirrors]:
            draft, asked = mirror.draft, mirror.asked
            if not self._host.drafter_of(mirror.session).rewinds:
                continue
            if asked is None or not draft.num_nodes or mirror.session.plan.rule.draws.needs_q:
                continue  # a draft with q is large: not made on a guess
            depth = draft.num_nodes + 1
            length = mirror.session.length + draft.num_nodes + depth
            fits = self._host.context_length is None or length <= self._host.context_length
            if fits and is_chain(draft.parent_indices):
                guesses.append(mirror)
        return guesses

    def _draft_chains(self, drafter: Drafter, mirrors: Sequence[Mirror]) -> None:
        """What follows if all is accepted: the target's next token, and a draft of that length."""
        depths = [mirror.draft.num_nodes + 1 for mirror in mirrors]
        for mirror in mirrors:
            mirror.session.token_ids += mirror.draft.token_ids.tolist()
        try:
            drafts = at_once(
                drafter.propose([m.session for m in mirrors], [Budget(d, d) for d in depths])
            )
        finally:
            for mirror in mirrors:
                del mirror.session.token_ids[-mirror.draft.num_nodes :]
        for mirror, follows in zip(mirrors, drafts, strict=True):
            if follows.num_nodes and is_chain(follows.parent_indices):
                drafted = mirror.draft.token_ids.tolist()
                mirror.ahead = Draft.chain([*drafted, *follows.token_ids.tolist()])

    def ahead_of(self, frame: draft_pb2.ProposeFrame) -> draft_pb2.ProposeReply:
        """The second reply to a frame: the drafts ahead of its sessions."""
        reply = draft_pb2.ProposeReply(
            round=frame.round, drafter_pid=os.getpid(), ahead=True,
            num_sessions=self._host.num_sessions,
        )  # fmt: skip
        for item in frame.items:
            mirror = self._mirrors.get(item.session_id)
            draft = EMPTY_DRAFT if mirror is None else mirror.ahead
            fill_draft(draft, reply.results.add().draft)
        return reply

    def apply(
        self,
        item: draft_pb2.ProposeItem,
        observed: list[tuple[Session, Outcome]],
    ) -> Mirror:
        """Bring the mirror up to the target's committed tokens, and note what became of its draft.

        Raises:
            SessionNotFound: there is no such mirror.
            PrefixDiverged: the mirror lacks tokens that the target takes it to have.
        """
        session_id = item.session_id
        tokens = self._host.tokens("new_token_ids", item.new_token_ids)
        if item.HasField("open"):
            return self._opened(item, tokens)
        mirror = self[session_id]
        mirror.touched_at = time.monotonic()
        session = mirror.session
        if item.base_length > session.length:
            raise PrefixDiverged(
                f"base_length {item.base_length}: the drafter has only {session.length} tokens",
                session.length,
            )
        if item.base_length < session.length:
            if item.base_length < 1:
                raise InvalidArgument("base_length", item.base_length, "at least 1")
            mirror = self._reopen(session_id, item.base_length)
            mirror.session.token_ids.extend(tokens)
            return mirror
        if tokens:
            outcome = mirror.advance(tokens)
            if outcome is not None and mirror.states is None:
                observed.append((session, outcome))
        return mirror

    def _opened(self, item: draft_pb2.ProposeItem, tokens: list[int]) -> Mirror:
        host, opening = self._host, item.open
        plan = host.plan(speculation_from_message(opening.speculation))
        params = sampling_from_message(opening.sampling)
        params.check_vocabulary(host.vocab_size)
        if not tokens:
            raise InvalidArgument("new_token_ids", "[]", "at least one token to open a session")
        self.drop(item.session_id)
        host.check_room()
        prediction = host.tokens("prediction", opening.prediction)
        name = f"{self._stream}/{item.session_id}"
        session = Session(
            name, tokens, params, plan, prediction=prediction, length_context=host.length_context
        )
        return self._open(item.session_id, session, host.begin_span(opening, plan.method.name))

    def _open(self, session_id: str, session: Session, span: Span | None) -> Mirror:
        codec = self._host.codec
        self._host.drafter_of(session).open(session)
        states = None if codec is None else StatesReader(codec)
        self._mirrors[session_id] = Mirror(session, span, states)
        self._host.num_sessions += 1
        return self._mirrors[session_id]

    def _reopen(self, session_id: str, length: int) -> Mirror:
        """Open the session anew with its first ``length`` tokens: drafters cannot roll back.

        Raises:
            SessionNotFound: its drafter reads the target's states, which only the target has.
        """
        mirror = self._mirrors[session_id]
        if mirror.states is not None:
            self.drop(session_id)
            raise SessionNotFound(session_id)
        session, span, mirror.span = mirror.session, mirror.span, None
        self.drop(session_id)
        kept = session.token_ids[:length]
        again = Session(
            session.session_id, kept, session.params, session.plan,
            prediction=session.prediction, length_context=self._host.length_context,
        )  # fmt: skip
        opened = self._open(session_id, again, span)
        opened.num_drafts = mirror.num_drafts
        return opened

    def drop(self, session_id: str) -> None:
        """Close a session; one that is not open is ignored."""
        mirror = self._mirrors.pop(session_id, None)
        if mirror is not None:
            self._host.num_sessions -= 1
            self._host.drafter_of(mirror.session).close(mirror.session)
            if mirror.span is not None:
                tokens = mirror.session.length
                mirror.span.set(num_drafts=mirror.num_drafts, committed_tokens=tokens)
                mirror.span.end()

    def close(self) -> None:
        """Close all sessions."""
        for session_id in list(self._mirrors):
            self.drop(session_id)

    def close_idle(self, limit: float) -> None:
        """Close sessions without a call since ``limit`` (``time.monotonic``)."""
        for session_id, mirror in list(self._mirrors.items()):
            if mirror.touched_at < limit:
                self.drop(session_id)

    def _budget(self, item: draft_pb2.ProposeItem, mirror: Mirror) -> Budget:
        depth, nodes = item.max_depth, item.max_nodes
        if depth > MAX_DEPTH:
            raise InvalidArgument("max_depth", depth, f"at most {MAX_DEPTH}")
        if nodes > MAX_NODES:
            raise InvalidArgument("max_nodes", nodes, f"at most {MAX_NODES}")
        if self._host.context_length is not None:
            depth = min(depth, self._host.context_length - mirror.session.length)
        return Budget(depth if nodes else 0, nodes)


def served_with(method: Method, name: str) -> bool:
    """Whether a drafter replica that hosts the drafter ``name`` can draft for a method.

    It knows a session's tokens and, for a head, the target's states, but not the request's
    constraint.
    """
    if method.reads_constraint:
        return False
    return method.drafter == name or (name in method.uses and not method.needs)
