"""Constraints that are made to hurt: they end a helper process or their own session, no more."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline import constraints
from paceline.config import SpeculationConfig
from paceline.constraint_check import check_constraint
from paceline.constraint_process import (
    MEMORY_BYTES,
    PATIENCE_S,
    STACK_BYTES,
    ConstraintProcess,
    Refused,
)
from paceline.constraints import MAX_WAITING_OF_ONE, ConstraintCompiler
from paceline.engine import Engine
from paceline.errors import InvalidArgument, ResourceExhausted
from paceline.loading import load_engine
from paceline.request import Request
from paceline.sampling import SamplingParams

SLOW = '{"type": "integer", "multipleOf": 1000003, "maximum": 1e15}'


def chain(length: int) -> str:
    rules = "\n".join(f"a{i}: a{i + 1}" for i in range(length))
    return f'start: a0\n{rules}\na{length}: "x"\n'


def hidden(alternatives: int) -> str:
    """An ambiguous grammar behind 40 characters that the try-out does not get past."""
    choices = " | ".join(f'e e "{chr(97 + i % 26)}{i}"' for i in range(alternatives))
    return f"start: /[xy]{{40}}/ e\ne: {choices} | /./\n"


@pytest.fixture(scope="module")
def demo() -> Engine:
    return load_engine()


@pytest.fixture(scope="module")
def process(demo: Engine) -> ConstraintProcess:
    compiler = ConstraintCompiler(demo.tokenizer, demo.target.vocab_size, demo.eos_token_ids)
    compiler.compile(SamplingParams(regex="a"))
    assert compiler.process is not None
    return compiler.process


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("grammar", chain(3000), "3002 rules or references'.* at most 1000"),
        ("grammar", "root ::= a\n" * 1001, "1001 rules"),
        ("json_schema", '{"$ref": "#"}' * 1001, "1001 rules or references"),
        ("regex", "é" * 40_000, "80000 bytes'.* at most 65536"),
        ("regex", "(" * 65 + ")" * 65, "65 levels of brackets"),
        ("grammar", "start: " + "[" * 65 + '"a"' + "]" * 65, "65 levels"),
        ("json_schema", '{"items":' * 65 + "{}" + "}" * 65, "65 levels"),
        ("regex", "((a{1000}){1000}){1000}", "1000000 repetitions"),
        ("regex", "(b|(a{101}|c)){100}", "10100 repetitions"),
        ("grammar", 'start: ("a"{1000}){1000}', "1000000 repetitions"),
        ("grammar", 'start: ("a"~1..1000)~1000', "1000000 repetitions"),
        ("grammar", "start: (/a{1000}/)", None),
        ("grammar", "start: /(a{1000}){1000}/", "1000000 repetitions"),
        ("json_schema", '{"pattern": "(a{1000}){1000}"}', "1000000 repetitions"),
        ("json_schema", '{"patternProperties": {"(a{1000}){1000}": {}}}', "1000000"),
        ("regex", r"a{9}b{1000}c{2,1000}\({1,9}[({]{2000}", None),
        ("regex", "(a{200})+{200}", "40000 repetitions"),
        ("regex", "a{200} {200}(b{200}|c{200}){50}", None),
        ("grammar", 'start: "a"{200} b {200} (c{200} | d{200}) {50}', None),
        ("grammar", 'start: ("a"{200} | b) {200}', "40000 repetitions"),
        ("regex", "(a{2}){" + "9" * 5000 + "}", "repetitions"),
        ("json_schema", '{"enum": ["' + "[" * 999 + r"\"{{{" + '"]}', None),
        ("grammar", 'root ::= [({"[] x{2,5}\nx ::= "(((" | [^"\\\\]', None),
        ("regex", "\ud800", "surrogate"),
    ],
)
def test_bounds(kind: str, text: str, reason: str | None) -> None:
    if reason is None:
        check_constraint(kind, text)
        return
    with pytest.raises(InvalidArgument, match=reason) as caught:
        check_constraint(kind, text)
    assert caught.value.field in (kind, f"{kind}.pattern")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("grammar", chain(3000), "1 MB of stack"),
        ("json_schema", SLOW, "1 s of a processor"),
        ("regex", "((a{1000}){1000}){1000}", "256 MB|1 s of a processor"),
    ],
    ids=["stack", "time", "memory"],
)
def test_what_compiling_may_take(
    process: ConstraintProcess, kind: str, text: str, reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        process.compile(kind, text)
    dead = process.pid
    assert process.compile("regex", "[ab]+")  # with another helper
    assert process.pid != dead


@pytest.mark.skipif(sys.platform != "linux", reason="reads the limits from /proc")
def test_the_helper_has_limits(process: ConstraintProcess) -> None:
    process.compile("regex", "a")
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    stack = re.search(r"Max stack size +(\d+)", limits)
    memory = re.search(r"Max address space +(\d+)", limits)
    used = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0]) * 4096
    assert stack is not None
    assert memory is not None
    assert int(stack[1]) == STACK_BYTES
    assert int(memory[1]) <= used + MEMORY_BYTES


def test_masks_are_tried_out(process: ConstraintProcess) -> None:
    pid = process.compile("regex", "a") and process.pid
    with pytest.raises(Refused, match="masks"):
        process.compile("grammar", hidden(400).replace("/[xy]{40}/", ""))
    assert process.pid == pid


def test_a_helper_that_is_killed_comes_back(process: ConstraintProcess) -> None:
    process.compile("regex", "a")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    time.sleep(0.05)
    assert process.compile("regex", "a")


def test_a_refused_constraint_needs_no_second_helper(demo: Engine) -> None:
    compiler = ConstraintCompiler(demo.tokenizer, demo.target.vocab_size, demo.eos_token_ids)
    params = SamplingParams(grammar=chain(990))
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="stack") as caught:
            compiler.compile(params)
        assert caught.value.field == "grammar"
        assert compiler.process is not None
        pid = compiler.process.pid
    with pytest.raises(InvalidArgument, match="stack"):
        compiler.submit(params)
    assert compiler.process.pid == pid
    assert compiler.compile(SamplingParams(regex="a")) is not None


def test_expensive_masks_end_their_own_session(demo: Engine) -> None:
    engine = demo.sibling()
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode("def read(path):")
    plain = SamplingParams(max_tokens=80, ignore_eos=True)
    (expected,) = engine.generate([prompt], plain)
    ar = SpeculationConfig(method="ar")
    hostile = engine.submit(Request(prompt, SamplingParams(max_tokens=80, grammar=hidden(400)), ar))
    honest = engine.submit(Request(prompt, plain))
    strict = engine.submit(Request(prompt, SamplingParams(max_tokens=80, regex="[xy]{60}"), ar))
    while engine.has_work:
        engine.step()
    assert hostile.finish_reason == "error"
    assert isinstance(hostile.error, ResourceExhausted)
    assert "1 ms of a processor for each token" in str(hostile.error)
    assert hostile.error.retry_after_s == 0  # it would only happen again
    assert honest.output_ids == expected.output_ids
    assert set(strict.text) <= set("xy")
    assert len(strict.text) == 60


def test_rounds_of_others_do_not_wait_for_a_mask(
    demo: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that takes long is computed beside the rounds of other sessions."""
    engine = demo.sibling()
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode("def read(path):")
    ar = SpeculationConfig(method="ar")
    params = SamplingParams(max_tokens=20, regex="[xy]{30}", ignore_eos=True)
    (alone,) = engine.generate([prompt], params, ar)
    held = threading.Event()
    slow = engine.submit(Request(prompt, params, ar))
    assert slow.constraint is not None
    monkeypatch.setattr(slow.constraint, "_matcher", Held(slow.constraint._matcher, held))
    honest = engine.submit(Request(prompt, SamplingParams(max_tokens=20, ignore_eos=True)))
    while not honest.finished:
        engine.step()
    assert not slow.output_ids
    assert not slow.constraint.ready()
    held.set()
    while engine.has_work:
        engine.step()
    assert slow.output_ids == alone.output_ids
    assert slow.constraint.num_allowed(alone.output_ids) == 0  # no drafts after that


class Held:
    """A matcher whose masks take as much of a processor as it likes, until the event."""

    def __init__(self, matcher: Any, until: threading.Event) -> None:
        self._matcher, self._until = matcher, until

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def compute_bitmask(self) -> bytes:
        spent = time.thread_time()
        while time.thread_time() - spent < 1.5 * PATIENCE_S:
            pass
        self._until.wait(30)
        return bytes(self._matcher.compute_bitmask())


def test_a_constraint_that_was_too_slow_is_refused_at_once(demo: Engine) -> None:
    """And a new one of its tenant for a while, but neither another tenant's nor a known one."""
    compiler = ConstraintCompiler(demo.tokenizer, demo.target.vocab_size, demo.eos_token_ids)
    bad, known, new = (SamplingParams(regex=text) for text in ("a+", "b+", "c+"))
    assert compiler.submit(known, "mallory").result(30) is not None
    constraint = compiler.submit(bad, "mallory").result(30)
    assert constraint is not None
    constraint._spend(0.7)
    assert isinstance(constraint.error, ResourceExhausted)
    assert constraint.ready()  # so that a round ends the session
    with pytest.raises(InvalidArgument, match=r"1 ms a token"):
        compiler.submit(bad, "alice")
    with pytest.raises(ResourceExhausted, match="no new one is compiled for") as caught:
        compiler.submit(new, "mallory")
    assert 9 < caught.value.retry_after_s <= (0.7 - 0.5) / 0.02
    assert compiler.submit(known, "mallory").result(30) is not None
    assert compiler.submit(new, "alice").result(30) is not None


class FailsAhead(Held):
    """A matcher whose copies reach a limit of llguidance."""

    def compute_bitmask(self) -> bytes:
        return bytes(self._matcher.compute_bitmask())

    def deep_copy(self) -> Any:
        copy = FailsAhead(self._matcher.deep_copy(), self._until)
        copy.is_error = lambda: True
        return copy


def test_a_draft_ends_no_session(demo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a draft alone would reach a limit, the text may never come."""
    compiler = ConstraintCompiler(demo.tokenizer, demo.target.vocab_size, demo.eos_token_ids)
    constraint = compiler.compile(SamplingParams(regex="[ab]+"))
    assert constraint is not None and demo.tokenizer is not None
    a, b = (demo.tokenizer.encode(text)[0] for text in "ab")
    failing = FailsAhead(constraint._matcher, threading.Event())
    monkeypatch.setattr(constraint, "_matcher", failing)
    assert constraint.num_allowed([a, b, a]) == 1
    assert constraint.error is None
    constraint.commit(a)
    assert constraint.error is None
    assert constraint.allowed([b]) is None  # acceptance has come there
    assert isinstance(constraint.error, ResourceExhausted)


def test_equal_constraints_end_together(demo: Engine) -> None:
    """One of them has shown that it is too slow: the others need not show it again."""
    compiler = ConstraintCompiler(demo.tokenizer, demo.target.vocab_size, demo.eos_token_ids)
    one, other = (compiler.compile(SamplingParams(regex="a+")) for _ in range(2))
    another = compiler.compile(SamplingParams(regex="b+"))
    assert one is not None and other is not None and another is not None
    assert other.allowed(()) is not None
    one._spend(0.2)
    assert other.ready()
    assert isinstance(other.error, ResourceExhausted)
    assert another.ready()
    assert another.error is None


def test_who_kills_helpers_has_to_wait(demo: Engine) -> None:
    compiler = ConstraintCompiler(demo.tokenizer, demo.target.vocab_size, demo.eos_token_ids)
    for length in (990, 991):
        with pytest.raises(InvalidArgument, match="stack"):
            compiler.submit(SamplingParams(grammar=chain(length)), "mallory").result(60)
    assert compiler.submit(SamplingParams(regex="a"), "mallory").result(60) is not None
    with pytest.raises(InvalidArgument, match="stack"):
        compiler.submit(SamplingParams(grammar=chain(992)), "mallory").result(60)
    with pytest.raises(ResourceExhausted, match="no new one is compiled for"):
        compiler.submit(SamplingParams(regex="b"), "mallory")
    assert compiler.submit(SamplingParams(regex="b"), "alice").result(60) is not None


def test_a_hiccup_is_not_fatal(demo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget counts the processor time of masks on average, not what the machine does."""
    compiler = ConstraintCompiler(demo.tokenizer, demo.target.vocab_size, demo.eos_token_ids)
    constraint = compiler.compile(SamplingParams(regex="[ab]*"))
    assert constraint is not None
    assert demo.tokenizer is not None
    token = demo.tokenizer.encode("a")[0]
    spent = [0.0]
    monkeypatch.setattr(constraints.time, "thread_time", lambda: spent[0])

    def one_token(seconds: float) -> None:
        matcher = constraint._matcher
        constraint._timed(lambda: spent.__setitem__(0, spent[0] + seconds))
        assert constraint.allowed(()) is not None or constraint.error
        assert matcher is constraint._matcher
        constraint.commit(token)

    one_token(0.09)
    for _ in range(300):
        one_token(0.0009)
    assert constraint.error is None
    for _ in range(300):
        one_token(0.003)
    assert isinstance(constraint.error, ResourceExhausted)
    assert constraint.allowed(()) is None
    assert constraint.num_allowed([token]) == 0


def test_one_tenant_waits_for_itself(demo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = ConstraintCompiler(demo.tokenizer, demo.target.vocab_size, demo.eos_token_ids)
    go_on = threading.Event()
    compile_now = compiler.compile
    monkeypatch.setattr(
        compiler, "compile", lambda *arguments: go_on.wait(30) and compile_now(*arguments)
    )
    queued = [
        compiler.submit(SamplingParams(regex=f"a{i}"), "mallory") for i in range(MAX_WAITING_OF_ONE)
    ]
    with pytest.raises(ResourceExhausted, match="of one tenant") as caught:
        compiler.submit(SamplingParams(regex="b"), "mallory")
    assert caught.value.retry_after_s > 0
    queued.append(compiler.submit(SamplingParams(regex="b"), "alice"))
    go_on.set()
    assert all(future.result(30) is not None for future in queued)
    assert compiler.submit(SamplingParams(regex="c"), "mallory").result(30) is not None
    assert compiler.submit(SamplingParams()).result(0) is None
