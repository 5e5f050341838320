"""Drafts for the next round, made in a thread while the target verifies this one.

PEARL, Liu et al. 2024 (arXiv 2408.11850), in one process: kernels and torch let go of the
interpreter while they compute, so a drafter with a model of its own can work beside the target.
Drafters in other processes do the same there (:mod:`paceline.rpc.mirrors`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass

from paceline.drafters.base import Drafter, at_once
from paceline.engine.drafting import Drafting
from paceline.session import Session
from paceline.shapes.kary import chain
from paceline.tree import clip, is_chain
from paceline.types import EMPTY_DRAFT, Budget, Draft, Outcome

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Guess:
    """A session as it is if the target accepts all of this round's draft.

    Attributes:
        seen: what the drafter sees: a copy, as the round goes on with the session itself.
        start: committed tokens when the round began.
        draft: what follows, the target's own next token first; None: the drafter failed.
    """

    seen: Session
    start: int
    draft: Draft | None = None

    def draft_after(self, session: Session) -> Draft:
        """The next draft; empty if the target has not committed the guess and the token behind."""
        tokens = [] if self.draft is None else self.draft.token_ids.tolist()
        expected = [*self.seen.token_ids[self.start :], *tokens[:1]]
        right = session.token_ids[self.start :] == expected
        return Draft.chain(tokens[1:]) if right else EMPTY_DRAFT


class DraftingAhead(Drafting):
    """As :class:`Drafting`; drafts beside the target where a budget says so.

    Such a round verifies the draft that was made during the round before, or none (pre-verify). The
    thread works only within :meth:`ahead`, while nothing else touches a drafter or a session.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        vocab_size: int,
        arrival: threading.Condition | None = None,
    ) -> None:
        super().__init__(drafters, vocab_size, arrival)
        self._pool: ThreadPoolExecutor | None = None
        self._beside: set[str] = set()  # sessions of this round that may draft so
        self._went: set[str] = set()  # and those whose drafter has seen a guess
        self._guesses: dict[str, _Guess] = {}  # of each session's last round

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        self._beside, self._went = set(), set()
        if not self._guesses and not any(budget.beside for budget in budgets):
            return super().propose(sessions, budgets)
        drafts = [EMPTY_DRAFT] * len(sessions)
        asking: list[int] = []
        for i, (session, budget) in enumerate(zip(sessions, budgets, strict=True)):
            guess = self._guesses.pop(session.session_id, None)
            failed = guess is not None and guess.draft is None
            if not budget.beside or failed or not self._can_go_ahead(session):
                asking.append(i)
                continue
            self._beside.add(session.session_id)
            if guess is not None:
                drafts[i] = clip(guess.draft_after(session), budget.depth, budget.nodes)
        made = super().propose([sessions[i] for i in asking], [budgets[i] for i in asking])
        for i, draft in zip(asking, made, strict=True):
            drafts[i] = draft
        return drafts

    def _can_go_ahead(self, session: Session) -> bool:
        drafter = self._of(session)
        makes_chains = session.shape is None or session.shape == chain()
        has_own_model = drafter.rewinds and not drafter.needs
        return has_own_model and makes_chains and not session.draws.needs_q

    @contextmanager
    def ahead(self, sessions: Sequence[Session], drafts: Sequence[Draft]) -> Iterator[None]:
        """Context in which the target verifies; ends when the thread has drafted, too."""
        going: dict[str, _Guess] = {}
        for session, draft in zip(sessions, drafts, strict=True) if self._beside else ():
            room = session.remaining - draft.num_nodes - 2
            if session.session_id in self._beside and is_chain(draft.parent_indices) and room > 0:
                seen = copy(session)
                seen.token_ids = [*session.token_ids, *draft.token_ids.tolist()]
                going[session.session_id] = _Guess(seen, session.length)
        if not going:
            yield
            return
        self._guesses |= going
        self._went = set(going)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "paceline-ahead")
        work = self._pool.submit(self._draft_on, list(going.values()))
        try:
            yield
        finally:
            work.result()

    def _draft_on(self, guesses: Sequence[_Guess]) -> None:
        """Draft behind the guesses; a failure is left to the next round, which asks again."""
        sessions = [guess.seen for guess in guesses]
        for name, places in self._by_drafter(sessions).items():
            members = [guesses[i] for i in places]
            depths = [min(g.seen.depth_ahead, g.seen.remaining - 2) + 1 for g in members]
            budgets = [Budget(depth, depth) for depth in depths]
            try:
                made = at_once(self.drafters[name].propose([g.seen for g in members], budgets))
                for guess, draft in zip(members, made, strict=True):
                    sound = draft.is_sound(self._vocab_size) and is_chain(draft.parent_indices)
                    guess.draft = draft if sound else EMPTY_DRAFT
            except Exception:
                logger.exception("%s cannot draft ahead", type(self.drafters[name]).__name__)

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        """As :meth:`Drafting.observe`; drafters that have seen a guess look at the tokens only."""
        if not self._went:
            super().observe(sessions, outcomes)
            return
        told = [i for i, s in enumerate(sessions) if s.session_id not in self._went]
        super().observe([sessions[i] for i in told], [outcomes[i] for i in told])

    def close(self, session: Session) -> None:
        self._guesses.pop(session.session_id, None)
        super().close(session)
