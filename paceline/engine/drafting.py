"""Asks drafters for drafts, collects them for the rounds, and drops drafters that fail.

Only this module knows in which process a drafter runs. It asks a drafter in another process as soon
as the session has no draft under way, and the session joins the round in which its draft has
arrived. It asks a drafter in this process when the round begins. If a drafter fails in any way, its
session continues as AR.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from paceline.constraints import Constraint
from paceline.drafters.base import Drafter, DrafterContext
from paceline.errors import DrafterUnavailable, FailedPrecondition, InvalidArgument
from paceline.methods import DRAFTER_PARTS, DRAFTERS, Method
from paceline.models.base import PseudoTokens
from paceline.models.heads import HeadLibrary
from paceline.models.heads.base import Head
from paceline.plan import Plan
from paceline.session import Session, SessionState
from paceline.target import ModelTarget
from paceline.tree import clip, is_chain, subset
from paceline.types import EMPTY_DRAFT, Budget, Draft, Load, Outcome, Verification
from paceline.view import SessionView

logger = logging.getLogger(__name__)


def _no_target() -> ModelTarget:
    raise InvalidArgument("method", "one that drafts with the target", "a drafter of its own")


class DrafterSet(dict[str, Drafter]):
    """Drafters by their names in the catalogue: given ones, and those made for requests so far.

    Args:
        given: drafters that this class cannot make, or replacements for those that it can.
        vocab_size: the target's.
        find_target: returns the target in this process; raises InvalidArgument if it is not here.
        heads: trained heads of the target, or None.

    Attributes:
        corpus: texts, as token ids, for drafters that copy from a corpus; it has to be here before
            they are made.
    """

    corpus: Sequence[Sequence[int]] = ()

    def __init__(
        self,
        given: Mapping[str, Drafter],
        vocab_size: int,
        *,
        find_target: Callable[[], ModelTarget] = _no_target,
        heads: HeadLibrary | None = None,
    ) -> None:
        super().__init__(given)
        self._vocab_size = vocab_size
        self._find_target = find_target
        self.heads = heads
        self._made: set[str] = set()

    @property
    def given(self) -> dict[str, Drafter]:
        """The drafters that were not made here."""
        return {name: drafter for name, drafter in self.items() if name not in self._made}

    @property
    def remote(self) -> dict[str, Drafter]:
        """The drafters in another process that is not a client."""
        return {name: d for name, d in self.given.items() if d.elsewhere and not d.from_client}

    def make(self, name: str) -> Drafter:
        """The drafter with this name, made now if it does not exist yet.

        Raises:
            InvalidArgument: it cannot be made here.
        """
        if name not in self:
            if name not in DRAFTERS:
                raise InvalidArgument(
                    "method", name, f"a method whose drafters are loaded here ({name} is not)"
                )
            self._made.add(name)
            context = DrafterContext(
                self._vocab_size, self.make_here, self._find_target, self._load_head, self.remote,
                self.corpus,
            )  # fmt: skip
            self[name] = DRAFTERS[name](context)
        return self[name]

    def make_here(self, name: str) -> Drafter:
        """As :meth:`make`; raises InvalidArgument if the drafter runs in another process."""
        drafter = self.make(name)
        if drafter.elsewhere:
            raise InvalidArgument("method", name, "a drafter that drafts in this process")
        return drafter

    def _load_head(self, kind: str) -> Head:
        if self.heads is None:
            raise InvalidArgument("method", kind, "a method without a head: no folder of heads")
        return self.heads.load(kind)

    def missing(self, method: Method, parts: Iterable[str]) -> list[str]:
        """Names of a method's drafters that are not loaded here and cannot be made here.

        Args:
            parts: drafters that the method's own drafter consists of; ignored if that one is
                loaded.
        """
        needed = {method.drafter, *(() if method.drafter in self else parts)}
        return sorted(needed - self.keys() - DRAFTERS.keys())

    def refusal(self, method: Method) -> str | None:
        """Why a method cannot draft here; None if it can."""
        if method.drafter in self:  # it has its parts and its head
            return None
        missing = self.missing(method, method.uses)
        if missing:
            return f"drafter not loaded here: {', '.join(missing)}"
        elsewhere = [name for name in method.uses if name in self and self[name].elsewhere]
        if elsewhere:
            return f"drafter in another process: {', '.join(elsewhere)}"
        if method.head and not (self.heads and self.heads.has(method.head)):
            where = f" in {self.heads.folder}" if self.heads else ""
            return f"no trained head{where}: `paceline train {method.head}` makes one"
        return None

    def ensure(self, plan: Plan, able: Callable[[], Iterable[str]]) -> None:
        """Make the drafters of a plan that do not exist yet, and let all of them check its knobs.

        Args:
            able: gives the names of the methods that can run here, for the error.

        Raises:
            InvalidArgument: a drafter cannot be made, needs more than tokens but runs in another
                process, or has a model that cannot serve the knobs.
        """
        name = plan.method.name
        missing = self.missing(plan.method, plan.drafters)
        if missing:
            raise InvalidArgument(
                "method", name, f"a method whose drafters are loaded here "
                f"({', '.join(missing)} is not): {', '.join(able())}",
            )  # fmt: skip
        own_drafter = self.make(plan.method.drafter)
        if own_drafter.elsewhere:
            if plan.needs - own_drafter.forwards:
                needs = ", ".join(sorted(need.value for need in plan.needs))
                raise InvalidArgument(
                    "method", name, f"a method whose drafter needs only tokens: this one's runs in "
                    f"another process, but needs the target's {needs}",
                )  # fmt: skip
            if plan.method.drafter in self.given:
                return  # that process has the drafter's parts
        own = DRAFTER_PARTS.get(plan.method.drafter)
        anywhere = self.remote if own is not None and own.passes_on else {}
        for part in plan.parts:
            if part.drafter not in anywhere or part.needs:
                self.make_here(part.drafter)
        for drafter in plan.drafters:
            if drafter in self:
                self[drafter].check_knobs(plan.config)


class Collected(NamedTuple):
    """A draft for a round, and the seconds that its session waited for it."""

    draft: Draft
    seconds: float


@dataclass(slots=True)
class _Asked:
    """A draft that was asked for and that no round has taken yet.

    Attributes:
        since: when its session began to wait; None if the draft had arrived by then.
        patience_s: as of the budget.
        seconds: how long its session waited; None until :meth:`Drafting.arrive` sees the draft.
    """

    future: Future[Draft]
    since: float | None
    patience_s: float | None = None
    seconds: float | None = None

    @property
    def patience_left(self) -> float:
        """Seconds until the session begins its round without the draft."""
        if self.patience_s is None or self.since is None:
            return math.inf
        return self.since + self.patience_s - time.perf_counter()

    @property
    def ready(self) -> bool:
        """Whether the round need not wait for it any more."""
        return self.future.done() or self.patience_left <= 0


class Drafting:
    """Drafts for the sessions of an engine.

    Args:
        arrival: notified when a draft has arrived.

    Attributes:
        shares_prefixes: sessions may begin with what drafters have left of earlier ones.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        vocab_size: int,
        arrival: threading.Condition | None = None,
    ) -> None:
        self.shares_prefixes = True
        self.drafters = drafters
        self._vocab_size = vocab_size
        self._arrival = arrival or threading.Condition()
        self._asked: dict[str, _Asked] = {}

    def _of(self, session: SessionView) -> Drafter:
        return self.drafters[session.drafter]

    # --- sessions ------------------------------------------------------------------------------

    def open(self, session: Session) -> None:
        """Open a session before its first round, or before the first one after a suspension."""
        session.num_known = 0
        try:
            _leave_out(session)
            drafter = self._of(session)
            drafter.open(session)
            if self.shares_prefixes:
                session.num_known = drafter.adopt(session)
        except Exception:
            logger.exception("a drafter cannot open a session; the session continues as AR")
            session.lose_drafter()

    def close(self, session: Session) -> None:
        """Forget a session that has ended, and cancel its draft."""
        asked = self._asked.pop(session.session_id, None)
        self._close(self._of(session), session)
        if asked is not None:
            asked.future.cancel()

    def suspend(self, session: Session) -> None:
        """Tell the drafter that a session gives up its KV memory for a while."""
        asked = self._asked.pop(session.session_id, None)
        try:
            self._of(session).suspend(session, None if asked is None else asked.future)
        except Exception:
            logger.exception("a drafter failed to suspend a session")

    @contextmanager
    def reopened(self, session: Session) -> Iterator[None]:
        """Context in which a session loses some of its tokens: its drafter reads it anew.

        Raises:
            FailedPrecondition: a draft is under way.
        """
        if self._of(session).from_client:
            yield
            return
        if session.session_id in self._asked:
            raise FailedPrecondition("a draft for this session is under way")
        self._close(self._of(session), session)
        yield
        self.open(session)

    def lose(self, sessions: Sequence[Session], what: str) -> None:
        """Take a failed drafter from sessions, which continue as AR. Call it while handling the
        exception."""
        for session in sessions:
            drafter = self._of(session)
            logger.exception(
                "%s %s; session %s continues as AR",
                type(drafter).__name__,
                what,
                session.session_id,
            )
            session.lose_drafter()
            self._close(drafter, session)

    def _close(self, drafter: Drafter, session: Session) -> None:
        try:
            drafter.close(session)
        except Exception:
            logger.exception("%s cannot close a session", type(drafter).__name__)

    # --- what length controllers and the engine ask --------------------------------------------

    def shadow_share(self, session: SessionView) -> float | None:
        """As :attr:`LengthContext.shadow_share`.

        None for rules with draws from q: without verification, such a draft cannot be judged.
        """
        drafter = self._of(session)
        if session.draws.needs_q or not drafter.shadows:
            return None
        return 0.0 if drafter.elsewhere else 1.0

    def waits_for_client(self, session: Session) -> bool:
        """Whether the next draft comes from a client, which must first hear of the last round."""
        return self._of(session).from_client

    @property
    def num_under_way(self) -> int:
        """Number of drafts that were asked for and have not been seen to arrive."""
        return sum(asked.seconds is None for asked in self._asked.values())

    @property
    def patience_left(self) -> float:
        """Seconds until a session begins its round without the draft that it waits for."""
        waiting = (a.patience_left for a in self._asked.values() if a.seconds is None)
        # Not 0: the engine would spin while a prompt is read whose draft is late.
        return max(0.001, min(waiting, default=math.inf))

    # --- rounds --------------------------------------------------------------------------------

    def ask(self, sessions: Iterable[Session], load: Load) -> None:
        """Ask drafters in other processes for drafts of the sessions that have none under way.

        The first draft depends only on the prompt, so drafter and target read the prompt together.
        """
        groups: dict[str, list[Session]] = {}
        for session in sessions:
            if session.session_id in self._asked or not self.comes_later(session):
                continue
            # What follows the prompt's states can be asked for only when they are there.
            unread = session.state is SessionState.PREFILLING
            if not (unread and session.needs & self._of(session).forwards):
                groups.setdefault(session.drafter, []).append(session)
        for name, members in groups.items():
            budgets = [round_budget(session, load) for session in members]
            started = time.perf_counter()
            futures = self._futures(self.drafters[name], members, budgets)
            for session, budget, future in zip(members, budgets, futures, strict=True):
                if budget.shadow is not None:
                    future.add_done_callback(budget.shadow.arrived)
                    future = _done(EMPTY_DRAFT)
                since = None if future.done() else started
                self._asked[session.session_id] = _Asked(future, since, budget.patience_s)
                future.add_done_callback(self._notify)

    def _futures(
        self, drafter: Drafter, sessions: Sequence[Session], budgets: Sequence[Budget]
    ) -> list[Future[Draft]]:
        try:
            drafts = drafter.propose(sessions, budgets)
            if len(drafts) != len(sessions):
                raise ValueError(f"{len(drafts)} drafts for {len(sessions)} sessions")
            return [draft if isinstance(draft, Future) else _done(draft) for draft in drafts]
        except Exception as error:
            return [_failed(error) for _ in sessions]

    def _notify(self, _: Future[Draft]) -> None:
        with self._arrival:
            self._arrival.notify_all()

    def want(self, session: Session) -> None:
        """Count waiting from now on: the target has read the session's prompt."""
        asked = self._asked.get(session.session_id)
        if asked is not None:
            asked.since = None if asked.future.done() else time.perf_counter()

    def comes_later(self, session: Session) -> bool:
        """Whether the session's draft comes from another process and arrives later."""
        return self._of(session).elsewhere

    def has_draft(self, session: Session) -> bool:
        """Whether a round can begin without waiting for the session's draft."""
        asked = self._asked.get(session.session_id)
        return not self.comes_later(session) if asked is None else asked.ready

    def arrive(self, sessions: Iterable[Session]) -> list[Session]:
        """The sessions whose drafts have arrived; those whose drafter failed continue as AR."""
        there = [session for session in sessions if self.has_draft(session)]
        for session in there:
            asked = self._asked.get(session.session_id)
            if asked is None or asked.seconds is not None:
                continue
            asked.seconds = 0.0 if asked.since is None else time.perf_counter() - asked.since
            if not asked.future.done():  # its drafter may go on with it: the session does not wait
                asked.future = _done(EMPTY_DRAFT)
            try:
                asked.future.result()
            except Exception as error:
                drafter = self._of(session)
                if drafter.recovers and isinstance(error, DrafterUnavailable):
                    logger.info("session %s goes on without a draft: %s", session.session_id, error)
                    asked.future = _done(EMPTY_DRAFT)
                    session.miss_draft()
                    continue
                logger.warning("session %s lost its drafter: %s", session.session_id, error)
                del self._asked[session.session_id]
                self._close(drafter, session)
                session.lose_drafter()
        return there

    def collect(self, sessions: Sequence[Session], load: Load) -> list[Collected]:
        """The drafts of a round: those that have arrived, and those made now in this process.

        Each draft is cut to its session's bounds, and is empty if it cannot be verified: one
        forward serves all sessions, so a faulty drafter must not break it.
        """
        started = time.perf_counter()
        found: dict[str, Collected] = {}
        asking: list[Session] = []
        for session in sessions:
            asked = self._asked.pop(session.session_id, None)
            if asked is None:
                asking.append(session)
            else:
                found[session.session_id] = Collected(asked.future.result(), asked.seconds or 0.0)
        budgets = [round_budget(session, load) for session in asking]
        drafts = self.propose(asking, [budget.asked for budget in budgets])
        seconds = time.perf_counter() - started
        for session, budget, draft in zip(asking, budgets, drafts, strict=True):
            if budget.shadow is not None:
                budget.shadow.draft, draft = draft, EMPTY_DRAFT
            found[session.session_id] = Collected(draft, seconds)
        return [
            Collected(self._usable(draft, session), waited)
            for session in sessions
            for draft, waited in (found[session.session_id],)
        ]

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        """Drafts from drafters in this process; each drafter gets one call for all its sessions.

        A failed drafter gives empty drafts.
        """
        drafts: list[Draft] = [EMPTY_DRAFT] * len(sessions)
        for name, places in self._by_drafter(sessions).items():
            members = [sessions[i] for i in places]
            try:
                proposed = self.drafters[name].propose(members, [budgets[i] for i in places])
                if len(proposed) != len(members):
                    raise ValueError(f"{len(proposed)} drafts for {len(members)} sessions")
            except Exception:
                self.lose(members, "cannot draft")
                continue
            for i, draft in zip(places, proposed, strict=True):
                drafts[i] = draft  # type: ignore[assignment]  # never a future in this process
        return drafts

    def pseudo_tokens(
        self, sessions: Sequence[Session], drafts: Sequence[Draft]
    ) -> list[PseudoTokens | None]:
        """The pseudo tokens that drafters want the target to compute along with the drafts."""
        found: list[PseudoTokens | None] = []
        for session, draft in zip(sessions, drafts, strict=True):
            try:
                found.append(self._of(session).pseudo_tokens(session, draft))
            except Exception:
                self.lose([session], "cannot give pseudo tokens")
                found.append(None)
        return found

    def read_prompt(self, session: Session, read: Verification) -> None:
        """Pass on what the target computed for the next prompt tokens of a session."""
        try:
            self._of(session).read_prompt(session, read)
        except Exception:
            self.lose([session], "cannot read a prompt")

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        """Tell drafters the outcomes of their drafts."""
        for name, places in self._by_drafter(sessions).items():
            members = [sessions[i] for i in places]
            try:
                self.drafters[name].observe(members, [outcomes[i] for i in places])
            except Exception:
                self.lose(members, "cannot observe")

    def _by_drafter(self, sessions: Sequence[Session]) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for i, session in enumerate(sessions):
            groups.setdefault(session.drafter, []).append(i)
        return groups

    def _usable(self, draft: Draft, session: Session) -> Draft:
        if not isinstance(draft, Draft) or not draft.is_sound(self._vocab_size):
            logger.warning("session %s: dropped an impossible draft", session.session_id)
            return EMPTY_DRAFT
        if not draft.num_nodes:
            return draft
        if session.chain_only and not is_chain(draft.parent_indices):
            logger.warning(
                "session %s: dropped a tree, as its rule verifies only chains", session.session_id
            )
            return EMPTY_DRAFT
        # The round also commits the target's own token.
        draft = clip(draft, session.remaining - 1, session.config.node_budget or 0)
        # A rule that corrects for q must see every drawn token, even one that it has to reject.
        if session.constraint is not None and not session.draws.needs_q:
            draft = _permitted(draft, session.constraint)
        return draft


def _leave_out(session: Session) -> None:
    """Before it is opened: leave out the drafters of method ``auto`` that it no longer wants."""
    leaving = getattr(session.length_controller, "leaving", None)
    if leaving is not None and (names := leaving(session)):
        session.plan = session.plan.without(names)


def round_budget(session: Session, load: Load) -> Budget:
    """The length controller's budget, cut to what the session may still generate."""
    budget = session.length_controller.budget(session, load)
    longest = session.remaining - 1  # the round also commits the target's own token
    if budget.depth <= longest and (budget.depth or not budget.nodes):
        return budget
    return replace(
        budget, depth=min(budget.depth, longest), nodes=budget.nodes if budget.depth else 0
    )


def _permitted(draft: Draft, constraint: Constraint) -> Draft:
    """The part of a draft that the constraint permits; verifying the rest would be wasted."""
    tokens, parents = draft.token_ids.tolist(), draft.parent_indices.tolist()
    if is_chain(draft.parent_indices):
        keep = list(range(constraint.num_allowed(tokens)))
    else:
        keep = []
        paths: dict[int, list[int]] = {-1: []}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent in paths and constraint.permits(path := [*paths[parent], token]):
                paths[node] = path
                keep.append(node)
    return draft if len(keep) == len(tokens) else subset(draft, np.asarray(keep, np.int64))


def _done(draft: Draft) -> Future[Draft]:
    future: Future[Draft] = Future()
    future.set_result(draft)
    return future


def _failed(error: BaseException) -> Future[Draft]:
    future: Future[Draft] = Future()
    future.set_exception(error)
    return future
