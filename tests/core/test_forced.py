"""What a constraint forces is drafted: right where it must be, and AR's tokens in any case."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from paceline.config import SpeculationConfig
from paceline.constraint_text import JsonLayout
from paceline.constraints import BURST_S, Constraint, ConstraintCompiler
from paceline.deployments.config import hosted_methods
from paceline.drafters.base import DRAFTERS
from paceline.engine import Engine
from paceline.loading import load_engine
from paceline.methods import METHODS
from paceline.request import Request
from paceline.rpc.mirrors import served_with
from paceline.sampling import SamplingParams
from paceline.session import Session

KEYS = ("name", "created_at", "kind", "sizes", "is_open", "next_element", "max_size", "values")
PROMPTS = ('class Stack:\n    """A list that', "def to_json(self):\n    return ", "# config.json\n")
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
pytestmark = pytest.mark.usefixtures("patient_masks")


@pytest.fixture(scope="module")
def demo() -> Engine:
    return load_engine()


@pytest.fixture(scope="module")
def compiler(demo: Engine) -> ConstraintCompiler:
    return ConstraintCompiler(demo.tokenizer, demo.target.vocab_size, demo.eos_token_ids)


def schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """A random JSON schema whose texts are short."""
    kinds = ["string", "integer", "boolean", "enum", "const"]
    if depth:
        kinds += ["object", "object", "array"]
    match draw.choice(kinds):
        case "string":
            return {"type": "string", "maxLength": draw.randint(1, 6)}
        case "integer":
            return {"type": "integer", "minimum": 0, "maximum": draw.randint(1, 999)}
        case "boolean":
            return {"type": "boolean"}
        case "enum":
            return {"enum": draw.sample(["open", "closed", "opening", 3, 37, None], 3)}
        case "const":
            return {"const": draw.choice(["queue", 12, [1, "a"], {"b": True}])}
        case "array":
            items = schema(draw, depth - 1)
            return {"type": "array", "items": items, "minItems": 1, "maxItems": 2}
    return record(draw, depth)


def record(draw: random.Random, depth: int) -> dict[str, Any]:
    keys = draw.sample(KEYS, draw.randint(1, 3))
    return {
        "type": "object",
        "properties": {key: schema(draw, depth - 1) for key in keys},
        "required": keys if draw.random() < 0.7 else keys[:1],
        "additionalProperties": False,
    }


def constraint_of(compiler: ConstraintCompiler, given: dict[str, Any]) -> Constraint:
    found = compiler.compile(SamplingParams(json_schema=json.dumps(given)))
    assert found is not None
    return found


def forced_text(demo: Engine, constraint: Constraint, before: str, count: int = 64) -> str:
    assert demo.tokenizer is not None
    drafted = demo.tokenizer.encode(before) if before else []
    tokens = constraint.forced([], drafted, count)
    assert constraint.num_allowed([*drafted, *tokens]) == len(drafted) + len(tokens)
    return demo.tokenizer.decode(tokens)


def run(engine: Engine, prompt: str, params: SamplingParams, method: str) -> Session:
    assert engine.tokenizer is not None
    config = SpeculationConfig(method=method)
    session = engine.submit(Request(engine.tokenizer.encode(prompt), params, config))
    while not session.finished:
        engine.step()
    assert session.error is None
    assert not session.stats.drafter_lost
    return session


# --- what is forced -------------------------------------------------------------------------------

POINT = {
    "type": "object",
    "properties": {"x_value": {"type": "integer"}, "unit": {"enum": ["mm", "inch"]}},
    "required": ["x_value", "unit"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("before", "forced"),
    [
        ("", '{"x_value":'),  # and then a number
        ('{"x_value":', ""),
        ('{"x_value":7', ""),  # or further digits
        ('{"x_value":7,', '"unit":"'),  # and then a choice
        ('{"x_value":7,"unit":"i', 'nch"}'),
        ('{"x_value":7,"unit":"inch"}', ""),  # the end
    ],
)
def test_without_blanks(
    demo: Engine, compiler: ConstraintCompiler, before: str, forced: str
) -> None:
    assert forced_text(demo, constraint_of(compiler, POINT | COMPACT), before) == forced


@pytest.mark.parametrize(
    ("before", "forced"),
    [
        ("", "{"),  # what comes after the bracket is not known yet
        ('{"', 'x_value":'),  # a blank alone would be no token that can be right
        ('{"x_value": 7,', ' "unit": "'),
        ('{"x_value":7,', ' "unit":"'),  # the blank after a colon is learnt, that after a comma not
        ('{\n  "x_value": 7,', '\n  "unit": "'),
        ('{\n\t"x_value" : 7,\n', '\t"unit" : "'),
        ('{\n\n"x_value": 7 ,', '\n\n"unit": "'),
        ('{"x_value":7 , "unit":"mm"', "}"),
        ('{\n    "x_value": 7, "unit": "mm"', "}"),
        ('{\n    "x_value": 7,\n    "unit": "mm"', "\n}"),
    ],
)
def test_with_the_blanks_of_the_text_so_far(
    demo: Engine, compiler: ConstraintCompiler, before: str, forced: str
) -> None:
    assert forced_text(demo, constraint_of(compiler, POINT), before).rstrip(" ") == forced


def test_no_more_tokens_than_wanted(demo: Engine, compiler: ConstraintCompiler) -> None:
    constraint = constraint_of(compiler, {"const": "a" * 300})
    for count in (1, 3, 9):
        assert len(constraint.forced([], [], count)) == count


def test_committed_tokens_teach_the_layout(demo: Engine, compiler: ConstraintCompiler) -> None:
    assert demo.tokenizer is not None
    constraint = constraint_of(compiler, POINT)
    output = demo.tokenizer.encode('{\n "x_value": 7,')
    for place, token in enumerate(output):
        constraint.forced(output[:place], [], 4)  # asked in every round, as an engine does
        constraint.commit(token)
    text = demo.tokenizer.decode(constraint.forced(output, [], 16))
    assert text == '\n "unit": "'
    constraint.rewind(len(output) - 1)  # the text begins anew, in another way
    for token in demo.tokenizer.encode('"x_value":7,'):
        constraint.commit(token)
    again = demo.tokenizer.encode('{"x_value":7,')
    assert demo.tokenizer.decode(constraint.forced(again, [], 16)) == ' "unit":"'


@pytest.mark.parametrize("seed", range(20))
def test_the_layout_of_any_json_is_learnt(seed: int) -> None:
    """After one object and one array, every blank of a text in the same style is known."""
    draw = random.Random(seed)

    def value(depth: int) -> Any:
        if depth == 0 or draw.random() < 0.3:
            return draw.choice(["a, b", 'q"\\{', "", 12, -1.5, True, None])
        entries = [value(depth - 1) for _ in range(draw.randint(1, 3))]
        return entries if draw.random() < 0.5 else {f"k{i}: [": e for i, e in enumerate(entries)}

    indent = draw.choice([None, 1, 2, 4, "\t"])
    separators = draw.choice([(",", ":"), (", ", ": "), (",", ": "), (" , ", " : ")])
    if indent is not None:
        separators = (separators[0].rstrip(), separators[1])
    first = json.dumps([{"a": [1, 2]}, {"b": 1, "c": 2}], indent=indent, separators=separators)
    text = json.dumps([value(3), value(3)], indent=indent, separators=separators)
    layout = JsonLayout()
    layout.feed(first.encode())
    begun = 0
    for place, byte in enumerate(text.encode()):
        if place >= begun:
            blanks = layout.blanks_before(byte)
            assert blanks is not None
            rest = text.encode()[place:]
            expected = rest[: len(rest) - len(rest.lstrip(b" \n\t"))]
            if layout.inside_string:
                assert blanks == b""
            elif not expected:
                assert blanks == b"", text[:place]
            else:
                begun = place + len(expected)
                assert layout.blanks_before(rest.lstrip(b" \n\t")[0]) == expected, text[:place]
        layout.feed(bytes([byte]))


# --- drafted and accepted -------------------------------------------------------------------------


def test_a_text_without_a_choice_takes_few_rounds(demo: Engine) -> None:
    text = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n"
    params = SamplingParams(max_tokens=64, regex="".join(f"[{c}]" for c in text))
    ar, forced = (run(demo, "# A stack\n", params, method) for method in ("ar", "forced"))
    assert ar.text == forced.text == text
    assert forced.output_ids == ar.output_ids
    assert forced.stats.num_rounds < ar.stats.num_rounds / 3


def test_nothing_is_drafted_without_a_constraint(demo: Engine) -> None:
    session = run(demo, PROMPTS[0], SamplingParams(max_tokens=24), "forced")
    assert session.stats.num_drafted == 0


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(5, marks=pytest.mark.slow),
        pytest.param(200, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)]),
    ],
    ids=["some", "200"],
)
def test_generated_schemas(demo: Engine, count: int) -> None:
    """Every answer is valid and AR's, with any drafter; forced tokens are right.

    But for the layout: the demo model writes blanks at random where it may.
    """
    methods = ("forced", "forced_draft_model", "auto", "prompt_lookup", "draft_model")
    draw = random.Random(7)
    drafted = accepted = 0
    for number in range(count):
        wanted = record(draw, 2) | (COMPACT if number % 2 else {})
        sampling = {"temperature": 1.0, "seed": number} if number % 3 == 0 else {}
        params = SamplingParams(max_tokens=250, json_schema=json.dumps(wanted), **sampling)
        prompt = PROMPTS[number % len(PROMPTS)]
        engine = demo.sibling()
        ar = run(engine, prompt, params, "ar")
        if ar.finish_reason == "stop":
            jsonschema.validate(json.loads(ar.text), wanted)
        for method in methods:
            session = run(engine, prompt, params, method)
            assert session.output_ids == ar.output_ids, (number, method)
            if method == "forced" and number % 2:
                drafted += session.stats.num_drafted
                accepted += session.stats.num_accepted
    assert drafted > 5 * count
    assert accepted > 0.9 * drafted


def test_auto_takes_it_for_constrained_requests_alone(demo: Engine) -> None:
    params = SamplingParams(max_tokens=60, json_schema=json.dumps(POINT | COMPACT))
    assert "forced" in (run(demo, PROMPTS[0], params, "auto").config[DRAFTERS] or ())
    params = SamplingParams(max_tokens=4)
    assert "forced" not in (run(demo, PROMPTS[0], params, "auto").config[DRAFTERS] or ())


def test_a_drafter_in_another_process_has_no_constraint_to_read() -> None:
    for name in ("forced", "forced_draft_model"):
        assert not any(served_with(METHODS[name], host) for host in ("draft_model", "forced"))
        assert name not in hosted_methods()
    assert served_with(METHODS["copyspec_draft_model"], "draft_model")


def test_looking_stops_before_it_could_end_the_session(compiler: ConstraintCompiler) -> None:
    constraint = constraint_of(compiler, POINT | COMPACT)
    assert constraint.forced([], [], 8)
    constraint._spent = 0.6 * BURST_S
    assert constraint.forced([], [], 8) == []
    assert constraint.error is None


def test_a_token_that_the_constraint_refuses(demo: Engine, compiler: ConstraintCompiler) -> None:
    assert demo.tokenizer is not None
    constraint = constraint_of(compiler, POINT)
    assert constraint.forced([], demo.tokenizer.encode("nonsense"), 8) == []
    assert constraint.error is None
