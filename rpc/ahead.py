"""Rounds that are drafted while the answers to earlier ones travel."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.rpc.fans import LONGEST, SpareTime
from paceline.rpc.transcript import ClientTranscript, ProposedRound
from paceline.tree import below, clip, is_chain
from paceline.types import EMPTY_DRAFT, Budget, Draft
from paceline.view import SessionView

logger = logging.getLogger(__name__)

# Makes a chain after a session's tokens, which end in guesses.
DraftAhead = Callable[[SessionView, Budget], Draft]

# What follows a session's draft by its likeliest verdicts: paceline.rpc.fans.draft_fans.
DraftFan = Callable[[SessionView, Draft], Draft]

# Rounds under way at most while the connection is up, and the least chance of a guess that is worth
# a draft.
MAX_IN_FLIGHT = 8
MIN_CHANCE = 0.03
_MEMORY = 0.97  # of drafted tokens: about the last 30 count


@dataclass(slots=True, kw_only=True)
class AheadOptions:
    """How the sessions of a remote target draft ahead.

    Attributes:
        draft: None: the drafter cannot draft ahead.
        fan: None: it cannot draft for several verdicts.
        max_in_flight: rounds under way at a time; 1 waits for every answer.
        alone_ok: while no server answers, the drafter decodes on alone.
        only_alone: while a server answers, nothing is drafted ahead.
        on_alone: called with a session and its tokens that no target has verified, whenever there
            are more of them.
    """

    vocab_size: int
    max_in_flight: int
    alone_ok: bool
    on_alone: Callable[[SessionView, list[int]], None]
    draft: DraftAhead | None = None
    fan: DraftFan | None = None
    only_alone: bool = False


class RoundsAhead:
    """Decides whether one session drafts ahead, and does so.

    Attributes:
        went_ahead: the drafter has seen guesses since its last proper draft.
    """

    def __init__(
        self, session: SessionView, transcript: ClientTranscript, options: AheadOptions
    ) -> None:
        self.went_ahead = False
        self._session = session
        self._transcript = transcript
        self._options = options
        self._done = False  # nothing can follow the last round in flight
        self._accepted, self._drafted = 2.0, 3.0  # recent tokens; a guess to begin with
        self._spare = SpareTime()
        # The draft of a round in flight with what follows its verdicts, the round, and the number
        # of committed tokens before it.
        self._fan = EMPTY_DRAFT
        self._fan_of: ProposedRound | None = None
        self._fan_at = 0
        self._from_fan = False

    def proper_draft(self) -> None:
        """A round leaves that no other one precedes."""
        self._done = False
        self.went_ahead, self._from_fan = self._from_fan, False

    def answered(self, draft: Draft, num_accepted: int) -> None:
        """Learn from an answer how often guesses are right."""
        self._spare.frame()
        tried = min(num_accepted + 1, draft.num_nodes)
        memory = _MEMORY**tried
        self._accepted = memory * self._accepted + num_accepted
        self._drafted = memory * self._drafted + tried

    def advanced(self) -> None:
        """The first round in flight is over, and another one may follow the last."""
        self._done = False

    def next_step(self, is_down: bool, draft: Callable[[], None]) -> Callable[[], None] | None:
        """What to do before the next answer: a round ahead, a fan, or nothing.

        Args:
            is_down: no server answers.
            draft: makes a round ahead and sends it.
        """
        if self.wanted(is_down):
            return draft
        return self.draft_fan if self.wants_fan(is_down) else None

    def wanted(self, is_down: bool) -> bool:
        """Whether to draft one more round now.

        Args:
            is_down: no server answers.
        """
        options, rounds = self._options, self._transcript.rounds
        if options.draft is None or self._done or not rounds:
            return False
        if self._session.drafter == "none":
            return False  # the loop has closed it
        guess = self._transcript.guess
        if self._session.remaining - len(guess) < 2:
            return False  # the guessed token and the target's next one
        if is_down:
            return options.alone_ok
        if options.only_alone or not is_chain(rounds[-1].draft.parent_indices):
            return False
        likely = (self._accepted / self._drafted) ** (len(guess) + 1) >= MIN_CHANCE
        return likely and len(rounds) < options.max_in_flight

    def draft(self) -> tuple[int, Draft] | None:
        """Draft on the guess that all rounds in flight are accepted.

        Returns:
            the drafter's idea of the target's next token, and a draft that follows it; None where
            there is nothing to propose.
        """
        started = time.perf_counter()
        session, guess = self._session, self._transcript.guess
        if guess and session.stops_at(guess[-1]):
            tokens = []
        else:
            tokens = self._tokens_after(guess)
            self._spare.drafted(started, fans=False)
        ends = next((i for i, token in enumerate(tokens) if session.stops_at(token)), None)
        if ends is not None:
            tokens = tokens[: ends + 1]
        if not tokens or ends == 0:  # after a guessed end there is no round
            self._done = True
            return None
        return tokens[0], Draft.chain(tokens[1:])

    def wants_fan(self, is_down: bool) -> bool:
        """Whether to draft for other verdicts on the first round in flight now."""
        rounds = self._transcript.rounds
        if self._options.fan is None or is_down or not rounds or self._session.drafter == "none":
            return False
        first = rounds[0]
        is_new = first is not self._fan_of and 0 < first.draft.num_nodes <= LONGEST
        return is_new and is_chain(first.draft.parent_indices) and self._spare.has_time

    def draft_fan(self) -> None:
        """Draft for the likeliest verdicts on the first round in flight."""
        assert self._options.fan is not None
        started = time.perf_counter()
        self._fan_of, self._fan_at = self._transcript.rounds[0], self._session.length
        self.went_ahead = True
        try:
            self._fan = self._options.fan(self._session, self._fan_of.draft)
        except Exception:  # as in draft()
            logger.exception("a drafter cannot draft for other verdicts")
            self._fan = EMPTY_DRAFT
            self._spare.failed()
        self._spare.drafted(started, fans=True)

    def take(self, budget: Budget) -> Draft | None:
        """The next draft, if it is there; its verdict is the session's last tokens."""
        fan, self._fan = self._fan, EMPTY_DRAFT
        if not fan.num_nodes:
            return None
        draft = below(fan, self._session.token_ids[self._fan_at :])
        if draft.num_nodes < max(1, min(budget.depth, budget.nodes)):
            return None
        self._from_fan = True
        return clip(draft, budget.depth, budget.nodes)

    def _tokens_after(self, guess: list[int]) -> list[int]:
        """What the drafter expects after the committed tokens and a guess."""
        session, options = self._session, self._options
        assert options.draft is not None
        room = session.remaining - len(guess) - 2
        depth = min(session.depth_ahead, session.config.node_budget or 0, room) + 1
        committed = session.length
        self.went_ahead = True
        session.token_ids += guess
        try:
            draft = options.draft(session, Budget(depth, depth))
        except Exception:  # the next proper propose fails as well, and the loop knows what to do
            logger.exception("a drafter cannot draft ahead")
            draft = EMPTY_DRAFT
        finally:
            del session.token_ids[committed:]
        if not draft.is_sound(options.vocab_size) or not is_chain(draft.parent_indices):
            return []
        tokens: list[int] = draft.token_ids[:depth].tolist()
        return tokens
