"""Predicted outputs: the client says what it expects, and that is the draft.

For rewriting tasks, where most of the output is known: a file with one function changed. Copying
from a reference at the place that the last tokens match is Yang et al. 2023 (arXiv 2304.04487);
that the client sends it with the request is OpenAI's API. Where the output leaves the prediction,
the copy resumes after the place where the output's last tokens occur in it; without such a place, a
fallback drafts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from paceline.drafters.base import FALLBACK_DEPTH, MIN_MATCH, DrafterPart, LookupDrafter
from paceline.types import Budget, Draft

if TYPE_CHECKING:
    from paceline.view import SessionView

LEAST_MATCH = 2  # tokens; the default
_LONGEST_MATCH = 16  # tokens that distinguish places
_MOST_PLACES = 32  # nearest places that are compared


class Follower:
    """Follows an output through a prediction.

    Args:
        prediction: token ids.
        min_match: tokens that must match before it resumes at a place.

    Attributes:
        place: position of the expected next token in the prediction; None after a difference.
        num_matched: tokens of the output that came as predicted.
    """

    def __init__(self, prediction: Sequence[int], min_match: int = LEAST_MATCH) -> None:
        self._prediction = tuple(prediction)
        self._min_match = min_match
        self._after: dict[tuple[int, ...], list[int]] = {}  # places after each gram, ascending
        for end in range(min_match, len(self._prediction) + 1):
            self._after.setdefault(self._prediction[end - min_match : end], []).append(end)
        self._recent: list[int] = []
        self._left_at = 0
        self.place: int | None = 0
        self.num_matched = 0

    def extend(self, token_ids: Iterable[int]) -> None:
        """The next tokens of the output."""
        for token in token_ids:
            self._recent = [*self._recent[1 - _LONGEST_MATCH :], token]
            if self.place is not None:
                if self._prediction[self.place : self.place + 1] == (token,):
                    self.place += 1
                    self.num_matched += 1
                    continue
                self._left_at, self.place = self.place, None
            self.place = self._find()

    def expected(self, count: int) -> Sequence[int]:
        """The expected next tokens, ``count`` at most; empty if unknown."""
        return () if self.place is None else self._prediction[self.place : self.place + count]

    def _find(self) -> int | None:
        """The place after the longest match of the last tokens; of equal matches, the next one."""
        places = self._after.get(tuple(self._recent[-self._min_match :]), [])
        middle = bisect_left(places, self._left_at)
        near = places[max(0, middle - _MOST_PLACES // 2) : middle + _MOST_PLACES // 2]
        left = self._left_at
        return max(near, key=lambda p: (self._match(p), p >= left, -abs(p - left)), default=None)

    def _match(self, place: int) -> int:
        """Number of tokens before ``place`` that equal the output's last ones."""
        count = 0
        for ours, theirs in zip(
            reversed(self._recent), reversed(self._prediction[:place]), strict=False
        ):
            if ours != theirs:
                break
            count += 1
        return count


class _State:
    """A session's follower, and the number of session tokens that it has seen."""

    __slots__ = ("follower", "seen")

    def __init__(self, follower: Follower, seen: int) -> None:
        self.follower = follower
        self.seen = seen


class PredictedOutputs(LookupDrafter[_State]):
    """A chain copied from the prediction that came with the request."""

    finds_chains = True

    def start(self, session: SessionView) -> _State:
        follower = Follower(session.prediction, session.config[MIN_MATCH])
        return _State(follower, session.prompt_length)

    def find(self, session: SessionView, state: _State, budget: Budget) -> Draft | None:
        state.follower.extend(session.token_ids[state.seen :])
        state.seen = session.length
        tokens = state.follower.expected(min(budget.depth, budget.nodes))
        return Draft.chain(tokens) if tokens else None


def method_with_prediction(default: str, methods: Iterable[str]) -> str:
    """The method of a request that has a prediction and names no method.

    Args:
        default: the method of a request without a prediction.
        methods: those that the engine can run.
    """
    if default == "auto":
        return default  # a prediction is one of the texts that it chooses among
    combined = f"predicted_outputs_{default}"
    return combined if combined in set(methods) else "predicted_outputs"


PREDICTED_OUTPUTS = DrafterPart(
    make=lambda context: PredictedOutputs(), knobs=(MIN_MATCH.but(LEAST_MATCH),), replay="lookup"
)
PREDICTED_OUTPUTS_OR_DRAFT_MODEL = DrafterPart(
    make=lambda context: PredictedOutputs(context.drafter("draft_model")),
    knobs=(MIN_MATCH.but(LEAST_MATCH), FALLBACK_DEPTH.but(5)),
    halves=("predicted_outputs", "draft_model"),
)
