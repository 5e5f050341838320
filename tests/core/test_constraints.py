"""Constraints, penalties and log-probabilities: AR's tokens with every method, and AR's numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import llguidance
import numpy as np
import pytest

from paceline.config import SpeculationConfig
from paceline.constraints import Constraint, ConstraintCompiler
from paceline.engine import Engine, RoundEvent
from paceline.errors import InvalidArgument, ResourceExhausted
from paceline.loading import load_engine
from paceline.methods import METHODS
from paceline.models.base import Segment
from paceline.request import Request
from paceline.sampling import SamplingParams, coupled_sample, process_logits, token_logprobs
from paceline.session import Session
from paceline.target import ModelTarget

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["stack", "queue"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
CONSTRAINTS = {
    "schema": {"json_schema": json.dumps(SCHEMA)},
    "regex": {"regex": r"(def|class) [a-z_]{3,12}(\([a-z, ]{0,12}\))?:\n"},
    "grammar": {"grammar": 'root ::= item ("," item)*\nitem ::= "push" | "pop" | [0-9]+'},
}
PROMPT = 'class Stack:\n    """A list that'
SAMPLED = {"temperature": 1.0, "seed": 11, "top_p": 0.95}


def always_drafting(method: str) -> SpeculationConfig:
    """The method with drafts of a fixed length, unless lengths are what it is about."""
    return SpeculationConfig(method=method, length="auto" if method == "auto" else "fixed")


@pytest.fixture(scope="module")
def demo() -> Engine:
    return load_engine()


@pytest.fixture(scope="module")
def prompt(demo: Engine) -> list[int]:
    assert demo.tokenizer is not None
    return demo.tokenizer.encode(PROMPT)


def textbook(
    demo: Engine, prompt: list[int], params: SamplingParams
) -> tuple[list[int], list[np.ndarray]]:
    """AR with a matcher of its own: no engine, no drafts. Tokens, and the raw logits of each."""
    runner = demo.local_target.runner
    matcher = None
    if params.constraint is not None:
        assert demo.tokenizer is not None
        tokenizer = llguidance.LLTokenizer(
            demo.tokenizer.to_json(), n_vocab=runner.vocab_size, eos_token=list(demo.eos_token_ids)
        )
        kind, text = params.constraint
        matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from(kind, text))
    sequence, ids, rows = runner.new_sequence(), list(prompt), []
    for token in ids[:-1]:
        runner.forward([Segment(sequence, np.array([token]), logits="none")])
        runner.commit(sequence, [0])
    while len(ids) < len(prompt) + params.max_tokens:
        raw = runner.forward([Segment(sequence, np.array([ids[-1]]))]).logits[0].numpy()
        runner.commit(sequence, [0])
        row = process_logits(raw, params, ids, len(prompt)).copy()
        if matcher is not None:
            bits = np.unpackbits(
                np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"
            )
            row[bits[: len(row)] == 0] = -np.inf
        ids.append(coupled_sample(row, params, len(ids)))
        rows.append(raw)
        if matcher is not None:
            assert matcher.consume_token(ids[-1])
            if matcher.is_stopped():
                break
        if ids[-1] in demo.eos_token_ids and not params.ignore_eos:
            break
    runner.free(sequence)
    return ids[len(prompt) :], rows


def generate(
    demo: Engine, prompt: list[int], params: SamplingParams, methods: Iterable[str]
) -> dict[str, Session]:
    """With every method, all of them in the same steps."""
    engine = demo.sibling()
    sessions = {m: engine.submit(Request(prompt, params, always_drafting(m))) for m in methods}
    while engine.has_work:
        engine.step()
    assert not any(session.stats.drafter_lost for session in sessions.values())
    return sessions


def exact_methods(demo: Engine) -> list[str]:
    return [
        name
        for name, row in METHODS.items()
        if row.lossless and row.acceptance == "coupled" and demo.refusal(row) is None
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_every_exact_method_has_the_textbook_tokens(
    demo: Engine, prompt: list[int], kind: str, sampling: dict[str, float]
) -> None:
    max_tokens = 40 if kind == "schema" else 24  # which it takes to its end
    params = SamplingParams(max_tokens=max_tokens, **CONSTRAINTS[kind], **sampling)
    expected, _ = textbook(demo, prompt, params)
    sessions = generate(demo, prompt, params, exact_methods(demo))
    for method, session in sessions.items():
        assert session.output_ids == expected, method
    assert sum(session.stats.num_accepted for session in sessions.values()) > 0
    session = sessions["draft_model"]
    if kind == "schema":
        value = json.loads(session.text)
        assert set(value) == {"name", "kind", "sizes"}
        assert session.finish_reason == "stop"
    if kind == "regex":
        assert re.fullmatch(CONSTRAINTS[kind]["regex"], session.text)


def test_rejection_sampling_keeps_to_the_grammar(demo: Engine, prompt: list[int]) -> None:
    methods = ("speculative_sampling", "block_verification", "spectr", "rsd_s")
    for seed in range(3):
        params = SamplingParams(max_tokens=60, temperature=1.0, seed=seed, **CONSTRAINTS["regex"])
        for method, session in generate(demo, prompt, params, methods).items():
            assert re.fullmatch(CONSTRAINTS["regex"]["regex"], session.text), method


PENALIZED = {
    "both": {"frequency_penalty": 1.5, "presence_penalty": 1.0},
    "negative": {"frequency_penalty": -2.0},
    "with all": {"presence_penalty": 1.5, "repetition_penalty": 1.1, "logit_bias": {5: -1.0}},
}


@pytest.mark.parametrize("name", PENALIZED)
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.4, "seed": 3}], ids=["greedy", "sampled"]
)
def test_penalties_on_the_output(
    demo: Engine, prompt: list[int], name: str, sampling: dict[str, float]
) -> None:
    params = SamplingParams(max_tokens=32, ignore_eos=True, **PENALIZED[name], **sampling)
    expected, _ = textbook(demo, prompt, params)
    plain, _ = textbook(demo, prompt, SamplingParams(max_tokens=32, ignore_eos=True, **sampling))
    assert expected != plain
    methods = ("ar", "draft_model", "draft_model_tree", "prompt_lookup", "token_recycling")
    for method, session in generate(demo, prompt, params, methods).items():
        assert session.output_ids == expected, method


def test_penalties_by_hand() -> None:
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    row = process_logits(np.zeros(5, np.float32), params, [0, 0, 1, 3, 3], 2)
    assert row.tolist() == [0.0, -0.75, 0.0, -1.25, 0.0]  # the prompt's zeros do not count


@pytest.mark.parametrize("method", ["ar", "draft_model", "draft_model_tree", "eagle"])
def test_log_probabilities_are_the_targets_own(
    demo: Engine, prompt: list[int], method: str
) -> None:
    params = SamplingParams(
        max_tokens=24, ignore_eos=True, logprobs=3, presence_penalty=0.5, **SAMPLED
    )
    events: list[RoundEvent] = []
    session = demo.submit(
        Request(prompt, params, always_drafting(method)),
        on_event=events.append,
    )
    while demo.has_work:
        demo.step()
    told = [entry for event in events for entry in event.logprobs]
    _, rows = textbook(demo, prompt, params)
    assert told == [token_logprobs(r, t, 3) for r, t in zip(rows, session.output_ids, strict=True)]
    for entry, row in zip(told, rows, strict=True):
        shares = np.exp(row.astype(np.float64) - row.max())
        shares /= shares.sum()
        assert entry.logprob == pytest.approx(np.log(shares[entry.token_id]))
        assert [t for t, _ in entry.top] == np.argsort(-shares, kind="stable")[:3].tolist()


def test_nothing_is_computed_unless_asked(demo: Engine, prompt: list[int]) -> None:
    events: list[RoundEvent] = []
    demo.submit(Request(prompt, SamplingParams(max_tokens=4)), on_event=events.append)
    while demo.has_work:
        demo.step()
    assert all(event.logprobs == () for event in events)


def test_cut_and_go_on(demo: Engine, prompt: list[int]) -> None:
    """Truncated tokens are taken back in the grammar as well."""
    params = SamplingParams(max_tokens=40, **CONSTRAINTS["schema"])
    engine = demo.sibling()
    session = engine.submit(Request(prompt, params, SpeculationConfig(method="draft_model")))
    while session.length < len(prompt) + 8:
        engine.step()
    engine.truncate(session.session_id, len(prompt) + 3)
    while engine.has_work:
        engine.step()
    assert session.output_ids == textbook(demo, prompt, params)[0]


def compiler(demo: Engine) -> ConstraintCompiler:
    return ConstraintCompiler(demo.tokenizer, demo.target.vocab_size, demo.eos_token_ids)


@pytest.mark.usefixtures("patient_masks")
def test_paths_and_commits_in_any_order(demo: Engine) -> None:
    tokenizer = demo.tokenizer
    assert tokenizer is not None
    make: Callable[[], Constraint | None] = lambda: compiler(demo).compile(  # noqa: E731
        SamplingParams(regex="(abc|abd|xyz)+")
    )
    a, b, c, d, x = (tokenizer.encode(letter)[0] for letter in "abcdx")
    constraint, other = make(), make()
    assert constraint is not None
    assert other is not None

    def shown(state: Constraint, path: list[int]) -> set[int]:
        mask = state.allowed(path)
        assert mask is not None
        return {token for token in (a, b, c, d, x) if mask[token]}

    assert shown(constraint, []) == {a, x}
    assert shown(constraint, [a, b]) == {c, d}
    assert shown(constraint, [a]) == {b}
    assert constraint.allowed([b]) is None
    assert constraint.error is None
    assert constraint.num_allowed([a, b, d, a, x]) == 4
    for token in (a, b):
        constraint.commit(token)
    assert shown(constraint, []) == {c, d}
    assert shown(other, []) == {a, x}  # sessions with the same grammar do not share a state
    constraint.rewind(1)
    assert shown(constraint, []) == {b}
    constraint.commit(x)
    assert isinstance(constraint.error, ResourceExhausted)


@pytest.mark.parametrize(
    ("given", "field", "allowed"),
    [
        ({"regex": "(a"}, "regex", "unclosed group"),
        ({"json_schema": "{"}, "json_schema", "valid"),
        ({"json_schema": '{"type": "strin"}'}, "json_schema", "Invalid type"),
        ({"grammar": "start: nowhere"}, "grammar", "unknown name"),
    ],
)
def test_bad_grammars(demo: Engine, given: dict[str, str], field: str, allowed: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        demo.submit(Request([5], SamplingParams(**given)))
    assert caught.value.field == field
    assert allowed in str(caught.value)
    assert not demo.sessions


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"regex": "a", "grammar": "b"}, "grammar"),
        ({"regex": ""}, "regex"),
        ({"regex": "a" * 70_000}, "regex"),
        ({"json_schema": {}}, "json_schema"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
    ],
)
def test_bad_parameters(given: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**given)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_without_a_tokenizer(demo: Engine) -> None:
    engine = Engine(ModelTarget(demo.local_target.runner))
    with pytest.raises(InvalidArgument) as caught:
        engine.submit(Request([5], SamplingParams(regex="a"), SpeculationConfig(method="ar")))
    assert "tokenizer" in str(caught.value)


def test_seeds_decide_among_what_is_allowed(demo: Engine, prompt: list[int]) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, regex="[0-9]{6}")
    texts = {
        generate(demo, prompt, replace(params, seed=s), ["draft_model"])["draft_model"].text
        for s in range(6)
    }
    assert len(texts) > 3
    assert all(re.fullmatch("[0-9]{6}", text) for text in texts)
