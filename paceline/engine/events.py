"""The events of an engine's sessions, and their delivery to listeners.

While drafts are under way, the events of a round are held for a moment: listeners would compete for
the interpreter with the threads that send and receive drafts. They run during the next forward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paceline.sampling import TokenLogprobs, token_logprobs
from paceline.session import Session
from paceline.types import Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class RoundEvent:
    """What one round, or an end outside a round, did to a session.

    Attributes:
        round: number of the session's round; 0 if the session ended outside a round.
        num_accepted: how many of ``token_ids``, the first ones, came from the draft.
        text: the text that these tokens completed.
        outcome: None if the session ended outside a round.
        logprobs: one entry for each token, if the request wants them.
        at: when it happened, by ``time.perf_counter``; delivery may come a little later.
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

    def without_logits(self) -> RoundEvent:
        """The same event for a listener that keeps it for a while."""
        outcome = self.outcome
        if outcome is None:
            return self
        light = replace(
            outcome.verification,
            logits=outcome.verification.logits.new_empty(0),
            extras={},
            pseudo_logits=None,
        )
        return replace(self, outcome=replace(outcome, verification=light))


EventHandler = Callable[[RoundEvent], None]


class EventDelivery:
    """Makes the events of sessions and delivers them to their listeners.

    Args:
        on_failure: called with a session whose listener failed, and with the error.

    Attributes:
        watchers: called with each event of a round, of any session, before its listener. One that
            fails is left out from then on.
    """

    def __init__(self, on_failure: Callable[[Session, Exception], None]) -> None:
        self._on_failure = on_failure
        self._handlers: dict[str, EventHandler] = {}
        self._num_sent: dict[str, int] = {}  # characters of each session's text
        self._held: list[RoundEvent] = []
        self.watchers: list[EventHandler] = []

    def register(self, session: Session, handler: EventHandler | None) -> None:
        """Send a session's events to ``handler``; it knows the tokens committed so far."""
        self._num_sent[session.session_id] = session.streamable_length
        if handler is not None:
            self._handlers[session.session_id] = handler

    def forget_text(self, session: Session) -> None:
        """Adjust to a session that has lost tokens."""
        sent = self._num_sent.get(session.session_id, 0)  # below the text's length: some is held
        self._num_sent[session.session_id] = min(sent, len(session.text))

    def of_round(self, session: Session, outcome: Outcome) -> RoundEvent:
        """Make the event of a round and hold it until :meth:`deliver`."""
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
        """Send the event of an end outside a round. Deliver held events first."""
        sent = self._num_sent.pop(session.session_id, 0)
        self._notify(RoundEvent(session, 0, (), 0, session.text[sent:], None, True))
        self._handlers.pop(session.session_id, None)

    @property
    def held(self) -> list[RoundEvent]:
        """Events that are not delivered yet."""
        return list(self._held)

    def deliver(self) -> None:
        """Deliver the held events to their listeners."""
        events, self._held = self._held, []
        for event in events:
            for watcher in list(self.watchers):
                self._watch(watcher, event)
            self._notify(event)
            if event.finished:
                self._handlers.pop(event.session.session_id, None)

    def _watch(self, watcher: EventHandler, event: RoundEvent) -> None:
        try:
            watcher(event)
        except Exception:  # serving does not depend on it
            logger.exception("a watcher of the engine failed and is left out")
            self.watchers.remove(watcher)

    def _notify(self, event: RoundEvent) -> None:
        handler = self._handlers.get(event.session.session_id)
        if handler is not None:
            try:
                handler(event)
            except Exception as error:  # one caller's fault must not fail the others' step
                logger.exception("an event handler failed; its session ends")
                self._handlers.pop(event.session.session_id, None)
                self._on_failure(event.session, error)


def _logprobs(session: Session, outcome: Outcome) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of a round's tokens; () unless the request wants them."""
    count = session.params.logprobs
    if count is None:
        return ()
    rows = [0, *(node + 1 for node in outcome.path)]  # of the logits that the tokens came from
    logits = outcome.verification.logits
    return tuple(
        token_logprobs(logits[row].float().cpu().numpy(), token, count)
        for row, token in zip(rows, outcome.token_ids, strict=False)
    )
