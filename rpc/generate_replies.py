"""The replies of GenerateService: rounds, scores of prompts and continuations, the last one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from paceline.drafters.predicted_outputs import Follower
from paceline.lengths.auto import Auto
from paceline.rpc.errors import InternalError
from paceline.rpc.gen.paceline.v1 import generate_pb2
from paceline.rpc.messages import statistics_to_message
from paceline.sampling import TokenLogprobs
from paceline.session import Session

# A gateway imports this and does without torch, which an engine loads.
if TYPE_CHECKING:
    from paceline.engine import Serving
    from paceline.engine.events import RoundEvent
    from paceline.engine.scores import ScoredTree

_LOGPROBS_A_REPLY = 512


@runtime_checkable
class _Located(Protocol):
    """A drafter in another process."""

    def location(self, session_id: str) -> tuple[str, int]:
        """Address and process of a session's drafter."""
        ...


class ReplyWriter:
    """Makes replies of what an engine has done."""

    def __init__(self, thread: Serving) -> None:
        self._thread = thread

    def of_round(self, event: RoundEvent, drafter_name: str) -> generate_pb2.GenerateReply:
        """The reply of a round.

        Args:
            drafter_name: in the catalogue, of the session's method; "none" is none.

        Raises:
            PacelineError: what ended a failed session.
        """
        session = event.session
        reply = generate_pb2.GenerateReply(
            round=event.round,
            token_ids=event.token_ids,
            num_accepted=event.num_accepted,
            text=event.text,
            logprobs=[self._logprobs(entry) for entry in event.logprobs],
        )
        if event.finished:
            self._finish(reply, session, drafter_name)
        return reply

    def with_scores(self, session: Session, resumed: bool) -> Iterator[generate_pb2.GenerateReply]:
        """Replies with the scores of the prompt and of continuations, none larger than may be."""
        entries = () if resumed else session.prompt_logprobs  # the first server has sent them
        for part in self._in_parts(entries):
            yield generate_pb2.GenerateReply(prompt_logprobs=part)
        if session.branches is None or session.finish_reason != "length":
            return
        from paceline.engine.events import RoundEvent

        reply, size = generate_pb2.GenerateReply(), 0
        for index, told in enumerate(cast("ScoredTree", session).scores()):
            logprobs = () if told.logprob is None else (told.logprob,)
            ids, text = tuple(told.after.output_ids), told.after.text
            event = RoundEvent(told.after, 1, ids, 0, text, None, True, logprobs)
            last = self.of_round(event, "none")
            *parts, rest = [*self._in_parts(told.logprobs)] or [[]]
            last.prompt_logprobs.extend(rest)
            for part in parts:
                more = generate_pb2.GenerateReply(prompt_logprobs=part)
                one = generate_pb2.ContinuationReply(index=index, reply=more)
                yield generate_pb2.GenerateReply(continuations=[one])
            reply.continuations.add(index=index, reply=last)
            size += 1 + len(rest)
            if size >= _LOGPROBS_A_REPLY:
                yield reply
                reply, size = generate_pb2.GenerateReply(), 0
        if size:
            yield reply

    def _in_parts(
        self, entries: Sequence[TokenLogprobs]
    ) -> Iterator[list[generate_pb2.TokenLogprobs]]:
        for start in range(0, len(entries), _LOGPROBS_A_REPLY):
            yield [self._logprobs(entry) for entry in entries[start : start + _LOGPROBS_A_REPLY]]

    def _logprobs(self, entry: TokenLogprobs) -> generate_pb2.TokenLogprobs:
        tokenizer = self._thread.engine.tokenizer
        text = tokenizer.token_bytes if tokenizer is not None else lambda token_id: b""
        return generate_pb2.TokenLogprobs(
            token_id=entry.token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            text=text(entry.token_id),
            top=[
                generate_pb2.TopLogprob(token_id=token_id, logprob=logprob, text=text(token_id))
                for token_id, logprob in entry.top
            ],
        )

    def _finish(
        self, reply: generate_pb2.GenerateReply, session: Session, drafter_name: str
    ) -> None:
        """The fields of a last reply.

        Raises:
            PacelineError: what ended a failed session.
        """
        if session.finish_reason == "error":
            raise session.error or InternalError("the session failed")
        reply.finish_reason = session.finish_reason or ""
        reply.statistics.CopyFrom(statistics_to_message(session.stats))
        count_prompt(reply, session)
        if isinstance(session.stop_cause, str):
            reply.stop_string = session.stop_cause
        elif session.stop_cause is not None:
            reply.stop_token_id = session.stop_cause
        if session.prediction:
            follower = Follower(session.prediction)
            follower.extend(session.output_ids)
            reply.prediction_length = len(session.prediction)
            reply.num_predicted = min(follower.num_matched, len(session.prediction))
        reply.target_pid = os.getpid()
        if drafter_name != "none":
            drafter = self._thread.engine.drafters[drafter_name]
            if isinstance(drafter, _Located):
                reply.drafter_address, reply.drafter_pid = drafter.location(session.session_id)
            else:
                reply.drafter_pid = os.getpid()


def count_prompt(reply: generate_pb2.GenerateReply, session: Session) -> None:
    """Add how many tokens the target has read."""
    reply.prompt_length = session.prompt_length
    if session.branches is not None:
        reply.num_positions = session.num_to_read


def explain(reply: generate_pb2.GenerateReply, session: Session) -> None:
    """Add what method ``auto`` chose; nothing for other methods."""
    controller = session.length_controller
    if isinstance(controller, Auto):
        why = controller.explain()
        for name, drafter in why.pop("drafters").items():
            reply.explanation.drafters[name].MergeFrom(generate_pb2.DrafterExplanation(**drafter))
        reply.explanation.MergeFrom(generate_pb2.Explanation(**why))
