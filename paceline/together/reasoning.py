"""SpecReason: a small model writes steps of a reasoning, the large one grades each (lossy).

Pan et al. 2025 (arXiv 2504.07891): a step is the text up to a blank line. The small model writes
it, and the large one gives it a grade from 0 to 9 with a single token. A step with a good enough
grade stays; otherwise the large model writes it anew. The models exchange text, so they may have
different vocabularies and live anywhere. Within a step, each may decode with drafts of its own,
which do not change what it writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.config import SpeculationConfig
from paceline.engine.engine import Engine
from paceline.errors import InvalidArgument
from paceline.sampling import SamplingParams

GRADE_PROMPT = (
    "\n\nHow good is the last step of this reasoning, from 0 to 9? The quality score is: "
)
GRADES = "[0-9]"
"""What a grade matches, as a regular expression."""


@dataclass(frozen=True, slots=True)
class StepText:
    """What a model has written.

    Attributes:
        num_tokens: that it took, including one that ended the whole text.
        ended: the model has ended the text, and not only the step.
    """

    text: str
    num_tokens: int
    ended: bool


class StepWriter(Protocol):
    """A model that continues texts, here or on a server."""

    def write(self, text: str, params: SamplingParams) -> StepText:
        """Continue ``text`` up to and with one of the ``stop`` strings of ``params``."""
        ...


class EngineWriter:
    """The model of an engine in this process.

    It keeps the tokens that it has written itself, so steps one after another have the tokens of
    one generation.

    Args:
        speculation: how it decodes; None: with the method `auto`.
    """

    def __init__(self, engine: Engine, speculation: SpeculationConfig | None = None) -> None:
        if engine.tokenizer is None:
            raise InvalidArgument("engine", "without a tokenizer", "an engine with a tokenizer")
        self._engine = engine
        self._speculation = speculation or SpeculationConfig(method="auto")
        self._tokenizer = engine.tokenizer
        self._text, self._ids = "", list[int]()  # what is known of the last text

    def write(self, text: str, params: SamplingParams) -> StepText:
        ids = self._encode(text)
        session = self._engine.generate([ids], params, self._speculation)[0]
        written = session.output_ids
        ended = session.finish_reason == "stop" and session.stop_cause is None
        kept = written[:-1] if ended and written[-1] in session.stop_ids else written
        # All that the tokens say: the last one may go on behind a stop string.
        piece = self._tokenizer.decode(kept)
        if params.max_tokens > 1:  # a grade is no part of the text
            self._text, self._ids = text + piece, [*ids, *kept]
        return StepText(piece, len(written), ended)

    def _encode(self, text: str) -> list[int]:
        if self._text and text.startswith(self._text):
            rest = text[len(self._text) :]
            return [*self._ids, *(self._tokenizer.encode(rest, False) if rest else ())]
        return self._tokenizer.encode(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonOptions:
    """Attributes:
    threshold: grade from which a step of the small model stays; 0 accepts all, 10 none.
    first_steps: steps at the beginning that the large model writes, ungraded.
    token_budget: most tokens of the answer.
    max_step_tokens: where a step ends at the latest.
    separator: what ends a step.
    grade_prompt: what the large model reads behind the text to give a grade.
    """

    threshold: float = 7.0
    first_steps: int = 0
    token_budget: int = 8192
    max_step_tokens: int = 512
    separator: str = "\n\n"
    grade_prompt: str = GRADE_PROMPT

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 10.0:
            raise InvalidArgument("threshold", self.threshold, "a grade in [0, 10]")
        if self.first_steps < 0:
            raise InvalidArgument("first_steps", self.first_steps, "0 or more")
        for name in ("token_budget", "max_step_tokens"):
            if getattr(self, name) < 1:
                raise InvalidArgument(name, getattr(self, name), "at least 1 token")
        for name in ("separator", "grade_prompt"):
            if not getattr(self, name):
                raise InvalidArgument(name, "", "a text")


@dataclass(frozen=True, slots=True)
class ReasonStep:
    """A step of the answer.

    Attributes:
        by_large: whether the large model has written it.
        grade: of the small model's step, whether it stays or not; None: it wrote none.
        num_tokens: of the step that stays.
        num_rejected: tokens of the small model's that do not.
    """

    text: str
    by_large: bool
    grade: int | None
    num_tokens: int
    num_rejected: int = 0


@dataclass(frozen=True, slots=True)
class ReasonedAnswer:
    """An answer, and who wrote it."""

    steps: tuple[ReasonStep, ...]

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.steps)

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return sum(step.num_tokens for step in self.steps)

    @property
    def large_share(self) -> float:
        """Share of the answer's tokens that the large model has written."""
        by_large = sum(step.num_tokens for step in self.steps if step.by_large)
        return by_large / self.num_tokens if self.num_tokens else 0.0

    @property
    def num_graded(self) -> int:
        """Grades that the large model gave, of one token each."""
        return sum(step.grade is not None for step in self.steps)

    @property
    def num_accepted(self) -> int:
        """Steps of the small model's that stayed."""
        return sum(not step.by_large for step in self.steps)


def reason(
    small: StepWriter,
    large: StepWriter,
    prompt: str,
    options: ReasonOptions | None = None,
    params: SamplingParams | None = None,
) -> Iterator[ReasonStep]:
    """Answer step by step, until a model ends the text or the budget is spent.

    Args:
        params: how both models choose tokens; ``max_tokens`` and ``stop`` are set for each step.

    Raises:
        InvalidArgument: the large model's answer to the grade prompt is no grade; a request that a
            model refuses.
    """
    options, params = options or ReasonOptions(), params or SamplingParams()
    text, left, number = prompt, options.token_budget, 0
    while left > 0:
        limits = _step_params(params, options, left)
        grade, rejected, piece = None, 0, None
        if number >= options.first_steps:
            piece = small.write(text, limits)
            grade = _grade(large, text + piece.text, options)
            if grade < options.threshold:
                rejected, piece = piece.num_tokens, None
        by_large = piece is None
        if piece is None:
            piece = large.write(text, limits)
        yield ReasonStep(piece.text, by_large, grade, piece.num_tokens, rejected)
        if piece.ended:
            return
        text += piece.text
        left -= piece.num_tokens
        number += 1


def _step_params(params: SamplingParams, options: ReasonOptions, left: int) -> SamplingParams:
    return replace(
        params, max_tokens=min(left, options.max_step_tokens), stop=(options.separator,),
        include_stop_str_in_output=True,
    )  # fmt: skip


def _grade(large: StepWriter, text: str, options: ReasonOptions) -> int:
    """The large model's grade of the text's last step: one token, greedily."""
    params = SamplingParams(max_tokens=1, regex=GRADES)
    answer = large.write(text.rstrip("\n") + options.grade_prompt, params).text.strip()
    if len(answer) != 1 or answer not in "0123456789":
        raise InvalidArgument("large", answer, "a model that answers with a digit as one token")
    return int(answer)
