"""Several drafters, of which one drafts in each round: the drafter of method ``auto``.

Which one, and how deep, is up to the length controller (:mod:`paceline.lengths.auto`), which the
budget carries as its portfolio.

If one of them drafts in another process, so does this one as far as the engine can see: a lookup's
draft is there at once, and only a session whose draft comes from the other process waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from paceline.drafters.base import DRAFTERS, Drafter, DrafterPart, at_once
from paceline.errors import InvalidArgument
from paceline.tree import clip
from paceline.types import EMPTY_DRAFT, Asked, Budget, Draft, Outcome, Portfolio, Verification

if TYPE_CHECKING:
    from paceline.view import SessionView

logger = logging.getLogger(__name__)

RETRY_S = 0.5
"""Seconds until a drafter in another process is asked again that could not draft."""


class _Arrived(NamedTuple):
    """A draft from another process that the portfolio has not heard of."""

    name: str
    draft: Draft
    seconds: float
    asked: Asked
    portfolio: Portfolio


class _State(dict[str, Draft]):
    """A session's parts, with what each has drafted in this round.

    Attributes:
        drafted: whether any may have drafted.
        readers: those that learn from every round.
        views: the session as drafters in other processes see it.
        under_way: those that owe a draft.
        arrived: their drafts, newest last. Another thread appends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drafted = False
        self.readers: set[str] = set()
        self.views: dict[str, SessionView] = {}
        self.under_way: set[str] = set()
        self.arrived: list[_Arrived] = []


class _SessionOf:
    """A session as a drafter in another process sees it: it knows nothing of method ``auto``."""

    prediction: tuple[int, ...] = ()

    def __init__(self, session: SessionView, name: str) -> None:
        self._session = session
        self.config = type(session.config)(
            method=name, length="fixed", acceptance=session.config.acceptance, shape="chain"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class AutoDrafter(Drafter):
    """Passes each round on to the drafter that the session's portfolio picks.

    A part that fails is left out of its sessions from then on; one in another process is asked
    again after a while.

    Args:
        here: another drafter of the engine by name, in this process.
        remote: those in other processes.
    """

    def __init__(self, here: Callable[[str], Drafter], remote: Mapping[str, Drafter]) -> None:
        self._here = here
        self._remote = remote
        self.elsewhere = bool(remote)
        self._states: dict[str, _State] = {}
        self._paused: dict[str, float] = {}  # remote drafter -> when it may be asked again

    def _part(self, name: str) -> Drafter:
        return self._remote.get(name) or self._here(name)

    def open(self, session: SessionView) -> None:
        state = self._states[session.session_id] = _State()
        for name in session.config[DRAFTERS] or ():
            state[name] = EMPTY_DRAFT
            if self._part(name).needs:
                state.readers.add(name)
            if name in self._remote:
                state.views[name] = cast("SessionView", _SessionOf(session, name))
            self._guarded(name, [session], "open", state.views.get(name, session))

    def close(self, session: SessionView) -> None:
        with ExitStack() as parts:  # wait for all parts, even if one fails
            for name in self._states.pop(session.session_id, ()):
                parts.callback(self._part(name).close, session)

    def adopt(self, session: SessionView) -> int:
        readers = [n for n in self._states[session.session_id] if self._part(n).needs]
        return min((self._part(name).adopt(session) for name in readers), default=0)

    def read_prompt(self, session: SessionView, read: Verification) -> None:
        for name in list(self._states[session.session_id]):
            if self._part(name).needs:
                self._guarded(name, [session], "read_prompt", session, read)

    def propose(
        self, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[Draft | Future[Draft]]:
        drafts: list[Draft | Future[Draft]] = [EMPTY_DRAFT] * len(sessions)
        choosing = [i for i, budget in enumerate(budgets) if budget.portfolio is not None]
        for session in sessions:
            state = self._states[session.session_id]
            if state.drafted:
                state.update(dict.fromkeys(state, EMPTY_DRAFT))
                state.drafted = False
        for i in choosing:
            self._states[sessions[i].session_id].drafted = True
            for name in _portfolio(budgets[i]).leaving(sessions[i]):
                self._leave(sessions[i], name)
        self._look_up(choosing, sessions, budgets)
        asked: dict[str, dict[int, Budget]] = {}
        picked: dict[int, str] = {}
        for i in choosing:
            state = self._states[sessions[i].session_id]
            pick = _portfolio(budgets[i]).pick(self._able(state))
            if pick.probe is not None:
                asked.setdefault(pick.probe[0], {})[i] = Budget(pick.probe[1], pick.probe[1])
            if pick.drafter is None:
                continue
            picked[i] = pick.drafter
            if self._part(pick.drafter).quick:
                drafts[i] = clip(state[pick.drafter], pick.depth, pick.depth)
            else:
                asked.setdefault(pick.drafter, {})[i] = Budget(pick.depth, pick.depth)
        for name, limits in asked.items():
            if name in self._remote:
                made = self._ask(name, limits, sessions, budgets)
            else:
                made = self._draft(name, limits, sessions, budgets)
            for i, draft in made.items():
                if picked.get(i) == name:
                    drafts[i] = draft
        return drafts

    def _leave(self, session: SessionView, name: str) -> None:
        state = self._states[session.session_id]
        if state.pop(name, None) is not None:
            state.readers.discard(name)
            self._guarded(name, [], "close", session)

    def _able(self, state: _State) -> list[str]:
        """The session's models that can be asked for a draft now."""
        now = time.perf_counter()
        return [
            name
            for name in state
            if name not in state.under_way
            and self._paused.get(name, 0.0) <= now
            and not self._part(name).quick
        ]

    def _look_up(
        self, choosing: Sequence[int], sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> None:
        """Ask the quick drafters, as far as each session's portfolio wants their drafts."""
        for i in choosing:
            session, portfolio = sessions[i], _portfolio(budgets[i])
            state = self._states[session.session_id]
            for name in list(state):
                if not self._part(name).quick:
                    continue
                depth = portfolio.asks(name)
                if depth <= 0:
                    continue
                started, limit = time.perf_counter(), Budget(depth, depth)
                found = self._guarded(name, [session], "propose", [session], [limit])
                for draft in at_once(found or ()):
                    state[name] = draft
                    portfolio.found(name, draft, time.perf_counter() - started)

    def _draft(
        self,
        name: str,
        limits: dict[int, Budget],
        sessions: Sequence[SessionView],
        budgets: Sequence[Budget],
    ) -> dict[int, Draft | Future[Draft]]:
        """Ask one drafter for drafts of several sessions, together."""
        drafts: dict[int, Draft | Future[Draft]] = {}
        members = [sessions[i] for i in limits]
        started = time.perf_counter()
        proposed = self._guarded(name, members, "propose", members, list(limits.values()))
        seconds = time.perf_counter() - started
        for i, draft in zip(limits, at_once(proposed or ()), strict=False):
            asked = Asked(sessions[i].length, limits[i].depth, len(limits))
            room = _portfolio(budgets[i]).drafted(name, draft, seconds, asked)
            seconds = 0.0  # it is the same for all of them
            if room > 0:
                draft = self._extended(sessions[i], draft, room, _portfolio(budgets[i]))
            self._states[sessions[i].session_id][name] = drafts[i] = draft
        return drafts

    def _ask(
        self,
        name: str,
        limits: dict[int, Budget],
        sessions: Sequence[SessionView],
        budgets: Sequence[Budget],
    ) -> dict[int, Draft | Future[Draft]]:
        """Ask a drafter in another process; its failures are empty drafts."""
        states = [self._states[sessions[i].session_id] for i in limits]
        views = [state.views[name] for state in states]
        started = time.perf_counter()
        proposed = self._guarded(
            name, [sessions[i] for i in limits], "propose", views, list(limits.values())
        )
        drafts: dict[int, Draft | Future[Draft]] = {}
        for (i, limit), state, found in zip(limits.items(), states, proposed or (), strict=False):
            draft: Future[Draft] = Future()
            asked = Asked(sessions[i].length, limit.depth)
            state.under_way.add(name)
            arrived = partial(_Arrived, name, asked=asked, portfolio=_portfolio(budgets[i]))
            found.add_done_callback(partial(self._take, name, state, draft, started, arrived))
            drafts[i] = draft
        return drafts

    def _take(
        self,
        name: str,
        state: _State,
        draft: Future[Draft],
        started: float,
        arrived: Callable[..., _Arrived],
        found: Future[Draft],
    ) -> None:
        """Pass on a draft of another process. The portfolio hears of it in the engine's thread."""
        made = EMPTY_DRAFT
        if not found.cancelled():
            error = found.exception()
            made = found.result() if error is None else EMPTY_DRAFT
            if error is not None:
                logger.info("%s could not draft: %s", name, error)
        if made.num_nodes:
            seconds = time.perf_counter() - started
            state.arrived.append(arrived(draft=made, seconds=seconds))
        else:
            self._paused[name] = time.perf_counter() + RETRY_S
        state.under_way.discard(name)
        with suppress(InvalidStateError):  # the engine no longer wants it
            draft.set_result(made)

    def _tell(self, state: _State) -> None:
        """Tell the portfolio of the drafts that have arrived from other processes."""
        while state.arrived:
            each = state.arrived.pop(0)
            each.portfolio.drafted(each.name, each.draft, each.seconds, each.asked)

    def _extended(
        self, session: SessionView, draft: Draft, room: int, portfolio: Portfolio
    ) -> Draft:
        """A draft with what has followed its end before, as CopySpec's relay does."""
        drafted = draft.token_ids.tolist()
        for name in list(self._states[session.session_id]):
            behind = self._part(name).follow(session, drafted, room)
            if behind:
                return Draft.chain(drafted + behind[: portfolio.extended(draft, behind)])
        return draft

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        seen: dict[str, list[tuple[SessionView, Outcome]]] = {}
        for session, outcome in zip(sessions, outcomes, strict=True):
            state = self._states.get(session.session_id)
            if state is None or not (state.drafted or state.readers or state.arrived):
                continue
            self._tell(state)
            for name, draft in state.items():
                if name in state.readers or (draft.num_nodes and not self._part(name).quick):
                    seen.setdefault(name, []).append((session, outcome))
        for name, pairs in seen.items():
            members, own = [s for s, _ in pairs], [o for _, o in pairs]
            self._guarded(name, members, "observe", members, own)

    def _guarded(
        self, name: str, sessions: Sequence[SessionView], what: str, *arguments: Any
    ) -> Any:
        """Call a part's method; if it fails, take the part from the sessions and return None."""
        part = self._part(name)
        try:
            return getattr(part, what)(*arguments)
        except Exception:
            logger.exception("drafter %s failed; %d sessions go on without it", name, len(sessions))
            for session in sessions:
                self._states[session.session_id].pop(name, None)
                with suppress(Exception):
                    part.close(session)
            return None


def _portfolio(budget: Budget) -> Portfolio:
    assert budget.portfolio is not None
    return budget.portfolio


def _fit(values: dict[str, Any]) -> None:
    """Check that the committed text can judge drafts.

    Raises:
        InvalidArgument: another rule than the coupled ones, or another shape than a chain.
    """
    if values["acceptance"] not in ("coupled", "greedy"):
        raise InvalidArgument(
            "acceptance", values["acceptance"],
            "'coupled': method 'auto' judges drafters by a text that does not depend on the draft",
        )  # fmt: skip
    if values["length"] != "auto":
        raise InvalidArgument(
            "length", values["length"],
            "'auto' with method 'auto'; a method of one drafter ('draft_model') has the others",
        )  # fmt: skip
    if values["shape"] != "chain":
        raise InvalidArgument("shape", values["shape"], "'chain' with method 'auto'")


AUTO = DrafterPart(
    make=lambda context: AutoDrafter(context.drafter, context.remote),
    knobs=(DRAFTERS,),
    fit=_fit,
    remembers=True,
    passes_on=True,
)
