"""The desk for all drafters: which there are, who is asked, what arrives, and who is lost.

A draft is asked for, arrives, and is handed to the loop. Where its drafter lives is known here
alone: one elsewhere is asked as soon as its session has no draft under way, and its session joins
the round in which the draft has arrived; one in this process is asked when the round begins.
Whatever a drafter does wrong, its session goes on as AR.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.constraints import Constraint
from paceline.drafters.base import Drafter, DrafterContext
from paceline.errors import FailedPrecondition, InvalidArgument
from paceline.methods import DRAFTERS, Method
from paceline.models.base import PseudoTokens
from paceline.models.heads import HeadLibrary
from paceline.models.heads.base import Head
from paceline.plan import Plan
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.tree import clip, is_chain, subset
from paceline.types import EMPTY_DRAFT, Budget, Draft, Load, Outcome, Verification
from paceline.view import SessionView

logger = logging.getLogger(__name__)


def _no_target() -> ModelTarget:
    raise InvalidArgument("method", "one that drafts with the target", "a drafter of its own")


class DrafterSet(dict[str, Drafter]):
    """Drafters by name as in the catalogue: given ones, and those that methods have needed so far.

    Args:
        given: those that cannot be made from tokens alone, or replacements for the ones that can.
        vocab_size: of the target.
        find_target: the target in this process; raises InvalidArgument where there is none.
        heads: trained heads of the target, or None.
    """

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
        """Those that were not made here."""
        return {name: drafter for name, drafter in self.items() if name not in self._made}

    def make(self, name: str) -> Drafter:
        """A drafter by name, made where it is not there yet.

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
                self._vocab_size, self.make_here, self._find_target, self._load_head
            )
            self[name] = DRAFTERS[name](context)
        return self[name]

    def make_here(self, name: str) -> Drafter:
        """As :meth:`make`; InvalidArgument where it drafts in another process."""
        drafter = self.make(name)
        if drafter.elsewhere:
            raise InvalidArgument("method", name, "a drafter that drafts in this process")
        return drafter

    def _load_head(self, kind: str) -> Head:
        if self.heads is None:
            raise InvalidArgument("method", kind, "a method without a head: no folder of heads")
        return self.heads.load(kind)

    def missing(self, method: Method, parts: Iterable[str]) -> list[str]:
        """Which drafters of a method are neither here nor can be made.

        Args:
            parts: further ones that its own is made of, unless that one is there.
        """
        needed = {method.drafter, *(() if method.drafter in self else parts)}
        return sorted(needed - self.keys() - DRAFTERS.keys())

    def refusal(self, method: Method) -> str | None:
        """Why a method cannot draft here; None where it can."""
        missing = self.missing(method, method.uses)
        if missing:
            return f"drafter not loaded here: {', '.join(missing)}"
        # A drafter that is there has its parts.
        parts = () if method.drafter in self else method.uses
        elsewhere = [name for name in parts if name in self and self[name].elsewhere]
        if elsewhere:
            return f"drafter in another process: {', '.join(elsewhere)}"
        if method.head and not (self.heads and self.heads.has(method.head)):
            where = f" in {self.heads.folder}" if self.heads else ""
            return f"no trained head{where}: `paceline train {method.head}` makes one"
        return None

    def ensure(self, plan: Plan, able: Callable[[], Iterable[str]]) -> None:
        """Make the drafters of a plan that are not there yet, and let them check its knobs.

        Args:
            able: names of the methods that can run here, for the error.

        Raises:
            InvalidArgument: one cannot be made, needs more than tokens and is elsewhere, or its
                model cannot serve the knobs.
        """
        name = plan.method.name
        missing = self.missing(plan.method, plan.drafters)
        if missing:
            raise InvalidArgument(
                "method", name, f"a method whose drafters are loaded here "
                f"({', '.join(missing)} is not): {', '.join(able())}",
            )  # fmt: skip
        if self.make(plan.method.drafter).elsewhere:
            if plan.needs:
                needs = ", ".join(sorted(need.value for need in plan.needs))
                raise InvalidArgument(
                    "method", name, f"a method whose drafter needs tokens alone: this one's is in "
                    f"another process, and needs the target's {needs}",
                )  # fmt: skip
            return  # that process has its parts
        for part in plan.parts:
            self.make_here(part.drafter)
        for drafter in plan.drafters:
            if drafter in self:
                self[drafter].check_knobs(plan.config)


class Collected(NamedTuple):
    """A draft for a round, and the seconds that the round waited for it."""

    draft: Draft
    seconds: float


@dataclass(slots=True)
class _Asked:
    """A draft under way, or one that no round has taken yet.

    Attributes:
        since: when its session began to wait for it; None where it was there as soon as wanted.
        seconds: that its session has waited; None until the draft was found to be there.
    """

    future: Future[Draft]
    since: float | None
    seconds: float | None = None


class Drafting:
    """Drafts for the sessions of an engine.

    Args:
        arrival: notified when a draft has arrived.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        vocab_size: int,
        arrival: threading.Condition | None = None,
    ) -> None:
        self.drafters = drafters
        self._vocab_size = vocab_size
        self._arrival = arrival or threading.Condition()
        self._asked: dict[str, _Asked] = {}

    def _of(self, session: SessionView) -> Drafter:
        return self.drafters[session.drafter]

    # --- sessions ------------------------------------------------------------------------------

    def open(self, session: Session) -> None:
        """Before the first round of a session, or the first one after it was suspended."""
        try:
            self._of(session).open(session)
        except Exception:
            logger.exception("a drafter cannot open a session; it goes on as AR")
            session.lose_drafter()

    def close(self, session: Session) -> None:
        """The session has ended."""
        asked = self._asked.pop(session.session_id, None)
        self._close(self._of(session), session)
        if asked is not None:
            asked.future.cancel()

    def suspend(self, session: Session) -> None:
        """The session gives up its place for a while."""
        asked = self._asked.pop(session.session_id, None)
        try:
            self._of(session).suspend(session, None if asked is None else asked.future)
        except Exception:
            logger.exception("a drafter failed to suspend a session")

    @contextmanager
    def reopened(self, session: Session) -> Iterator[None]:
        """While a session loses some of its tokens.

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
        """Inside an exception handler: the drafter of these sessions failed; they go on as AR."""
        for session in sessions:
            drafter = self._of(session)
            logger.exception(
                "%s %s; session %s goes on as AR", type(drafter).__name__, what, session.session_id
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

        Tokens that are drawn from q do not tell the worth of a draft that was not verified.
        """
        drafter = self._of(session)
        if session.draws.needs_q or not drafter.shadows:
            return None
        return 0.0 if drafter.elsewhere else 1.0

    def waits_for_client(self, session: Session) -> bool:
        """Whether the next draft comes only after its client has heard of the last round."""
        return self._of(session).from_client

    @property
    def num_under_way(self) -> int:
        """Drafts that were asked for and have not been found to be there."""
        return sum(asked.seconds is None for asked in self._asked.values())

    # --- rounds --------------------------------------------------------------------------------

    def ask(self, sessions: Iterable[Session], load: Load) -> None:
        """Ask drafters elsewhere for the sessions that have no draft under way.

        The first draft depends on the prompt alone, so a drafter reads it while the target does.
        """
        groups: dict[str, list[Session]] = {}
        for session in sessions:
            if session.session_id not in self._asked and self.comes_later(session):
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
                self._asked[session.session_id] = _Asked(future, since)
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
        """The prompt is read: from now on the session waits for its draft."""
        asked = self._asked.get(session.session_id)
        if asked is not None:
            asked.since = None if asked.future.done() else time.perf_counter()

    def comes_later(self, session: Session) -> bool:
        """Whether the session's draft has to arrive before a round can take it."""
        return self._of(session).elsewhere

    def has_draft(self, session: Session) -> bool:
        """Whether a round need not wait for the session's draft."""
        asked = self._asked.get(session.session_id)
        return not self.comes_later(session) if asked is None else asked.future.done()

    def arrive(self, sessions: Iterable[Session]) -> list[Session]:
        """Those of the sessions whose drafts are there; where a drafter failed, as AR."""
        there = [session for session in sessions if self.has_draft(session)]
        for session in there:
            asked = self._asked.get(session.session_id)
            if asked is None or asked.seconds is not None:
                continue
            asked.seconds = 0.0 if asked.since is None else time.perf_counter() - asked.since
            try:
                asked.future.result()
            except Exception as error:
                logger.warning("session %s lost its drafter: %s", session.session_id, error)
                del self._asked[session.session_id]
                drafter = self._of(session)
                self._close(drafter, session)
                session.lose_drafter()
        return there

    def collect(self, sessions: Sequence[Session], load: Load) -> list[Collected]:
        """The drafts of a round: those that have arrived, and those that are made now.

        Each is within its session's bounds, and empty if it cannot be verified: the forward serves
        all sessions, so a drafter that breaks its promises must not break it.
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
        """Drafts of drafters in this process, each of which is asked once for all of its sessions.

        An empty draft where a drafter fails.
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
                drafts[i] = draft  # type: ignore[assignment]  # of this process
        return drafts

    def pseudo_tokens(
        self, sessions: Sequence[Session], drafts: Sequence[Draft]
    ) -> list[PseudoTokens | None]:
        """What drafters want to have computed along with the drafts."""
        found: list[PseudoTokens | None] = []
        for session, draft in zip(sessions, drafts, strict=True):
            try:
                found.append(self._of(session).pseudo_tokens(session, draft))
            except Exception:
                self.lose([session], "has no pseudo tokens")
                found.append(None)
        return found

    def read_prompt(self, session: Session, read: Verification) -> None:
        """What the target computed for the next prompt tokens of a session."""
        try:
            self._of(session).read_prompt(session, read)
        except Exception:
            self.lose([session], "cannot read a prompt")

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        """What became of the drafts of a round."""
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
            logger.warning("session %s: an impossible draft is dropped", session.session_id)
            return EMPTY_DRAFT
        if not draft.num_nodes:
            return draft
        if session.chain_only and not is_chain(draft.parent_indices):
            logger.warning(
                "session %s: a tree for a chain-only rule is dropped", session.session_id
            )
            return EMPTY_DRAFT
        # One place is for the target's own token.
        draft = clip(draft, session.remaining - 1, session.config.node_budget or 0)
        # A rule that corrects for q has to see what was drawn, even if it can only reject it.
        if session.constraint is not None and not session.draws.needs_q:
            draft = _permitted(draft, session.constraint)
        return draft


def round_budget(session: Session, load: Load) -> Budget:
    """What the length controller wants, within what the session may still generate."""
    budget = session.length_controller.budget(session, load)
    # One place is for the target's own token.
    return Budget(
        min(budget.depth, session.remaining - 1),
        budget.nodes if budget.depth else 0,
        budget.exit_layer,
        budget.shadow,
    )


def _permitted(draft: Draft, constraint: Constraint) -> Draft:
    """The part of a draft that the constraint permits; verifying the rest would be for nothing."""
    tokens, parents = draft.token_ids.tolist(), draft.parent_indices.tolist()
    if is_chain(draft.parent_indices):
        keep = list(range(constraint.num_allowed(tokens)))
    else:
        keep = []
        paths: dict[int, list[int]] = {-1: []}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent in paths and constraint.num_allowed(path := [*paths[parent], token]) == len(
                path
            ):
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
