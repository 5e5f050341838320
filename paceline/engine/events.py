"""What an engine tells of its sessions, and to whom.

While drafts are under way, the events of a round wait for a moment: listeners share the interpreter
with the threads that send and receive drafts, and have it for themselves during the next forward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.sampling import TokenLogprobs, token_logprobs
from paceline.session import Session
from paceline.types import Outcome

logger = logging.getLogger(__name__)


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


class EventDelivery:
    """Makes the events of sessions and hands them to their listeners.

    Args:
        on_failure: called with a session whose listener failed.
    """

    def __init__(self, on_failure: Callable[[Session, Exception], None]) -> None:
        self._on_failure = on_failure
        self._handlers: dict[str, EventHandler] = {}
        self._num_sent: dict[str, int] = {}  # characters of a session's text
        self._held: list[RoundEvent] = []

    def register(self, session: Session, handler: EventHandler | None) -> None:
        """Events of a session go to ``handler``; committed tokens are known already."""
        self._num_sent[session.session_id] = session.streamable_length
        if handler is not None:
            self._handlers[session.session_id] = handler

    def forget_text(self, session: Session) -> None:
        """The session has lost tokens."""
        sent = self._num_sent.get(session.session_id, 0)  # less than the text while some is held
        self._num_sent[session.session_id] = min(sent, len(session.text))

    def of_round(self, session: Session, outcome: Outcome) -> RoundEvent:
        """The event of a round; it is held until :meth:`deliver`."""
        finished = session.finished
        sent = self._num_sent.get(session.session_id, 0)
        # Text that could still turn out to be the start of a stop string is held back.
        safe = len(session.text) if finished else session.streamable_length
        self._num_sent[session.session_id] = max(sent, safe)
        event = RoundEvent(
            session, session.stats.num_rounds, outcome.token_ids, outcome.num_accepted,
            session.text[sent:safe], outcome, finished, _logprobs(session, outcome),
        )  # fmt: skip
        self._held.append(event)
        if finished:
            del self._num_sent[session.session_id]
        return event

    def end(self, session: Session) -> None:
        """Tell of an end outside a round, which came after all events that are held."""
        sent = self._num_sent.pop(session.session_id, 0)
        self._notify(RoundEvent(session, 0, (), 0, session.text[sent:], None, True))
        self._handlers.pop(session.session_id, None)

    @property
    def held(self) -> list[RoundEvent]:
        """Events that are not delivered yet."""
        return list(self._held)

    def deliver(self) -> None:
        """Hand the events of the last round to their listeners."""
        events, self._held = self._held, []
        for event in events:
            self._notify(event)
            if event.finished:
                self._handlers.pop(event.session.session_id, None)

    def _notify(self, event: RoundEvent) -> None:
        handler = self._handlers.get(event.session.session_id)
        if handler is not None:
            try:
                handler(event)
            except Exception as error:  # of one caller; the step serves the others as well
                logger.exception("an event handler failed; its session ends")
                self._handlers.pop(event.session.session_id, None)
                self._on_failure(event.session, error)


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
