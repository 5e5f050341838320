"""Compiles constraints in a process of its own, so that a hostile one ends nothing but that.

llguidance compiles recursively: a few kilobytes of grammar can need more stack than a process has,
and others need seconds or gigabytes. So a helper process compiles first, with limits of time,
memory and stack, and takes a few steps with the result, because some constraints are cheap to
compile and expensive to use. What gets through, the engine's own process compiles again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import time
import weakref
from typing import Any

from paceline.errors import PacelineError

logger = logging.getLogger(__name__)

CPU_S = 1.0
"""Processor seconds to compile a constraint and to try it out."""
MEMORY_BYTES = 256 * 1024 * 1024
"""Address space beyond what the helper has when it begins with a constraint."""
STACK_BYTES = 1024 * 1024
"""Threads of the engine's process have at least twice that."""
WALL_S = 20.0
"""Seconds after which a helper counts as stuck, however little time it got to run."""
_START_S = 60.0  # a vocabulary of 200,000 tokens takes a second or two
_WALKS, _STEPS = 2, 12  # of the try-out

STEP_S, BURST_S = 0.001, 0.1
"""Processor seconds that masks may take: STEP_S for each token, and BURST_S before that."""
MASK_S = 0.03
"""Processor seconds that one mask may take."""
PATIENCE_S = 0.002
"""Processor seconds of one mask for which other sessions wait."""
LIMITS: dict[str, Any] = {
    # llguidance's own, of one step. Its defaults allow steps of six seconds.
    "step_max_items": 2000, "max_items_in_row": 500, "step_lexer_fuel": 100_000,
    # And 2 kB of memory for each state.
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}  # fmt: skip

# Without this limit, a small model may write blanks for ever where JSON allows them. A schema with
# options of its own (`x-guidance`) keeps them.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}


class Refused(PacelineError, ValueError):
    """The constraint is not valid, or takes more than the limits."""


class Killed(Refused):
    """It has killed the helper."""


class ConstraintProcess:
    """The helper process: starts with the first constraint, and again after one that killed it.

    Blocks its caller; one constraint at a time. Not thread-safe.

    Args:
        tokenizer_json: text of ``tokenizer.json``.
        options: further arguments of ``llguidance.LLTokenizer``.
    """

    def __init__(self, tokenizer_json: str, options: dict[str, Any]) -> None:
        self._setup = json.dumps({"tokenizer": tokenizer_json, "options": options})
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int | None:
        """Of the helper; None before it has started."""
        return None if self._process is None else self._process.pid

    def compile(self, kind: str, text: str) -> str:
        """The constraint as a grammar of llguidance, after compiling it and trying it out.

        Raises:
            Refused: it is not valid, or takes more than the limits.
            Killed: and the helper has died of it.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        answer = self._ask(json.dumps({"kind": kind, "text": text}), WALL_S)
        if answer is None:
            raise Killed(self._end())
        if "error" in answer:
            raise Refused(answer["error"])
        return str(answer["grammar"])

    def _start(self) -> None:
        code = (
            "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            "from paceline.constraint_process import main; main()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a lost stack prints there, once for each attack
            text=True,
        )
        self._process = process
        weakref.finalize(self, _kill, process)
        if self._ask(self._setup, _START_S) is None:
            _kill(process)
            raise RuntimeError("the process that compiles constraints does not start")

    def _ask(self, line: str, seconds: float) -> dict[str, Any] | None:
        """The helper's answer; None if it died, or did not answer in time."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except OSError:
            return None
        # Not select(): a server with many connections has descriptors that it does not take.
        waiting = select.poll()
        waiting.register(process.stdout, select.POLLIN)
        if not waiting.poll(1e3 * seconds):
            return None
        answer = process.stdout.readline()
        return json.loads(answer) if answer.endswith("\n") else None

    def _end(self) -> str:
        """Bury the helper; returns why it did not answer."""
        process = self._process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        code = process.poll()
        _kill(process)
        logger.warning("a constraint ended the process that compiles them (%s)", code)
        if code is None:
            return f"one that compiles within {WALL_S:g} s"
        if code == -signal.SIGPROF:
            return f"one that takes at most {CPU_S:g} s of a processor to compile and try out"
        return (
            f"one that compiles with {STACK_BYTES >> 20} MB of stack and {MEMORY_BYTES >> 20} MB "
            "of memory: use fewer or less deeply nested rules"
        )


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(10)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


# --- in the helper --------------------------------------------------------------------------------


def main() -> None:
    """Answer the lines of standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing else writes where the answers go
    os.nice(5)  # forwards come first
    import llguidance

    setup = json.loads(sys.stdin.readline())
    tokenizer = llguidance.LLTokenizer(setup["tokenizer"], **setup["options"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, hard))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        _limit_memory()
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            answer = {"grammar": _compiled(request["kind"], request["text"], tokenizer)}
        except Refused as error:
            answer = {"error": str(error)}
        except (ValueError, MemoryError, RecursionError) as error:
            answer = {"error": f"a valid one ({error})"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), file=answers, flush=True)


def _limit_memory() -> None:
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux: there the limit does nothing either
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, hard))


def _compiled(kind: Any, text: str, tokenizer: Any) -> str:
    """A grammar of llguidance that is valid and cheap enough.

    Raises:
        ValueError: it is not valid.
        Refused: its masks take too long.
    """
    import llguidance

    if kind == "json_schema" and '"x-guidance"' not in text:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text, _JSON_OPTIONS)
    else:
        grammar = llguidance.grammar_from(kind, text)
    limits = llguidance.LLParserLimits(**LIMITS)
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
        grammar, tokenizer, limits=limits
    )
    if failed:
        raise ValueError(messages[0].strip())
    matcher = new_matcher(grammar, tokenizer)
    if matcher.is_error():
        raise ValueError(matcher.get_error().strip())
    for walk in range(_WALKS):
        _try_out(matcher.deep_copy(), walk)
    return grammar


def new_matcher(grammar: str, tokenizer: Any) -> Any:
    """A matcher of llguidance, with the limits of a step."""
    import llguidance

    limits = llguidance.LLParserLimits(**LIMITS)
    return llguidance.LLMatcher(tokenizer, grammar, limits=limits, log_level=0)


def _try_out(matcher: Any, walk: int) -> None:
    """Take a few steps, with the first allowed token behind one that changes from step to step."""
    started = time.thread_time()
    for step in range(_STEPS):
        bits = matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(f"its masks: {matcher.get_error().strip()}")
        begin = (step + 1) * (walk + 1) * 7919 % len(bits)
        places = (*range(begin, len(bits)), *range(begin))
        place = next((p for p in places if bits[p]), None)
        if place is None:
            return
        bit = (bits[place] & -bits[place]).bit_length() - 1
        matcher.try_consume_tokens([8 * place + bit])
        if matcher.is_error():
            raise ValueError(f"its masks: {matcher.get_error().strip()}")
        spent = time.thread_time() - started
        if spent > BURST_S + (step + 1) * STEP_S:
            raise Refused(
                f"one whose masks take at most {1e3 * STEP_S:g} ms a token (the first {step + 1} "
                f"took {1e3 * spent:.0f} ms): fewer alternatives for the same text"
            )
        if matcher.is_stopped():
            return
