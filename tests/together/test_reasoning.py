"""SpecReason: the large model grades the small one's steps, and writes what it finds bad."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.models.llama import LlamaRunner
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.together.reasoning import (
    GRADE_PROMPT,
    EngineWriter,
    ReasonedAnswer,
    ReasonOptions,
    ReasonStep,
    StepText,
    reason,
)
from paceline.tokenizer import load_tokenizer
from tests.modelzoo import END_OF_TEXT_ID, make_model

THRESHOLDS = (0.0, 1.0, 3.0, 5.0, 7.0, 9.0, 10.0)
OPTIONS = ReasonOptions(token_budget=60, max_step_tokens=12, separator="c")
AR = SpeculationConfig(method="ar")


@dataclass
class Scripted:
    """Writes numbered steps, and gives the grades of a list in turn."""

    name: str
    grades: list[int] = field(default_factory=list)
    steps: int = 6
    asked: list[tuple[str, SamplingParams]] = field(default_factory=list)

    def write(self, text: str, params: SamplingParams) -> StepText:
        self.asked.append((text, params))
        if params.max_tokens == 1:
            return StepText(str(self.grades.pop(0)), 1, False)
        number = text.count(";")
        step = f"{self.name}{number}" + ("" if number == self.steps - 1 else ";\n\n")
        return StepText(step, 3, number == self.steps - 1)


def answer(small: Scripted, large: Scripted, options: ReasonOptions) -> ReasonedAnswer:
    return ReasonedAnswer(tuple(reason(small, large, "Q: ", options)))


@dataclass
class Engines:
    small: Engine
    large: Engine


@pytest.fixture(scope="module")
def engines(zoo: Path) -> Engines:
    def engine(folder: Path, drafter: Path | None = None) -> Engine:
        drafters = {"draft_model": DraftModel(LlamaRunner(drafter))} if drafter else {}
        return Engine(
            ModelTarget(LlamaRunner(folder)), drafters,
            tokenizer=load_tokenizer(folder), eos_token_ids=[END_OF_TEXT_ID],
        )  # fmt: skip

    small = make_model("llama", zoo, seed=1, num_hidden_layers=1)
    return Engines(engine(small), engine(make_model("llama", zoo), small))


def alone(engine: Engine, params: SamplingParams) -> str:
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode("Question: ")
    session = engine.generate([prompt], replace(params, max_tokens=60), AR)[0]
    return engine.tokenizer.decode(session.output_ids)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_ends_of_the_threshold_are_one_model_alone(
    engines: Engines, temperature: float
) -> None:
    """Token for token what it writes in one go."""
    assert engines.large.tokenizer is not None
    letters = tuple(engines.large.tokenizer.encode("abcdefgh ,\n"))
    params = SamplingParams(temperature=temperature, seed=2, allowed_token_ids=letters)
    for threshold, engine in ((10.0, engines.large), (0.0, engines.small)):
        small, large = EngineWriter(engines.small, AR), EngineWriter(engines.large, AR)
        options = replace(OPTIONS, threshold=threshold)
        found = ReasonedAnswer(tuple(reason(small, large, "Question: ", options, params)))
        assert found.text == alone(engine, params)
        assert len(found.steps) > 5, "some step ends at a separator"
        assert found.large_share == (1.0 if threshold else 0.0)
        assert found.num_accepted == (0 if threshold else len(found.steps))
        assert found.num_tokens == 60


def test_drafts_within_a_step_change_nothing(engines: Engines) -> None:
    drafts = SpeculationConfig(method="draft_model", length="fixed")
    options = replace(OPTIONS, first_steps=2, threshold=10.0)
    texts = []
    for method in (AR, drafts):
        writers = EngineWriter(engines.small, AR), EngineWriter(engines.large, method)
        found = tuple(reason(*writers, "Question: ", options, SamplingParams(seed=3)))
        texts.append(found)
    assert texts[0] == texts[1]


def test_accepted_steps_fall_as_the_threshold_rises() -> None:
    """With the same grades, step by step."""
    grades = [7, 2, 9, 5, 0, 7]
    accepted = []
    for threshold in THRESHOLDS:
        small, large = Scripted("s"), Scripted("L", list(grades))
        found = answer(small, large, ReasonOptions(threshold=threshold))
        kept = [not step.by_large for step in found.steps]
        assert kept == [grade >= threshold for grade in grades]
        assert [step.grade for step in found.steps] == grades
        accepted.append(kept)
    for more, less in pairwise(accepted):
        assert all(a >= b for a, b in zip(more, less, strict=True))
    assert sum(accepted[0]) == 6 > sum(accepted[3]) > sum(accepted[-1]) == 0


def test_each_step_costs_one_token_of_grading() -> None:
    small, large = Scripted("s"), Scripted("L", [2, 9, 5, 0, 7])
    found = answer(small, large, ReasonOptions(threshold=6.0, first_steps=1))
    assert found.text == "L0;\n\nL1;\n\ns2;\n\nL3;\n\nL4;\n\ns5"
    graded = [(text, params) for text, params in large.asked if params.max_tokens == 1]
    assert len(graded) == found.num_graded == 5, "the first step has no grade"
    assert all(params.regex == "[0-9]" for _, params in graded)
    assert graded[1][0] == "Q: L0;\n\nL1;\n\ns2;" + GRADE_PROMPT, "behind the small model's step"
    assert [text for text, params in large.asked if params.max_tokens > 1][1] == "Q: L0;\n\n"
    assert (found.num_accepted, found.num_tokens) == (2, 18)
    assert found.large_share == pytest.approx(4 / 6)
    assert [step.num_rejected for step in found.steps] == [0, 3, 0, 3, 3, 0]
    assert found.steps[0] == ReasonStep("L0;\n\n", True, None, 3)


def test_budget_and_step_length_are_kept() -> None:
    small, large = Scripted("s", steps=99), Scripted("L", [9] * 99)
    found = answer(small, large, ReasonOptions(token_budget=8, max_step_tokens=5))
    assert [params.max_tokens for _, params in small.asked] == [5, 5, 2]
    assert len(found.steps) == 3
    assert {params.stop for _, params in small.asked} == {("\n\n",)}
    assert all(params.include_stop_str_in_output for _, params in small.asked)


def test_a_writer_keeps_its_tokens(engines: Engines, zoo: Path) -> None:
    """A text that it has written is not tokenized again; another one's behind it is."""
    writer = EngineWriter(engines.large, AR)
    piece = writer.write("Question: ", SamplingParams(max_tokens=5, ignore_eos=True))
    known = list(writer._ids)
    writer.write("Question: " + piece.text + "?", SamplingParams(max_tokens=1))
    assert writer._ids == known, "a grade is no part of the text"
    tokenizer = load_tokenizer(make_model("llama", zoo))
    encoded = writer._encode("Question: " + piece.text + "and")
    assert encoded == [*known, *tokenizer.encode("and", False)]
    assert known[-5:] != tokenizer.encode(piece.text, False)[-5:], "its text alone says less"
    assert writer._encode("Other") == tokenizer.encode("Other")


def test_bad_input_is_named(engines: Engines) -> None:
    with pytest.raises(InvalidArgument, match="threshold: got 11"):
        ReasonOptions(threshold=11)
    with pytest.raises(InvalidArgument, match="first_steps: got -1"):
        ReasonOptions(first_steps=-1)
    with pytest.raises(InvalidArgument, match="max_step_tokens: got 0"):
        ReasonOptions(max_step_tokens=0)
    with pytest.raises(InvalidArgument, match="separator"):
        ReasonOptions(separator="")
    with pytest.raises(InvalidArgument, match="tokenizer"):
        EngineWriter(Engine(engines.large.target))

    class Mute(Scripted):
        def write(self, text: str, params: SamplingParams) -> StepText:
            return StepText("", 1, False)

    with pytest.raises(InvalidArgument, match="a digit as one token"):
        answer(Scripted("s"), Mute("L"), ReasonOptions())
