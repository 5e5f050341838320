"""What `make test`, `make test-slow` and, for both, `make test-all` run.

Tests that start a Ray come one by one and wait for much of their time: for processes to start,
and for Ray to notice things. The others, in several processes, use what that leaves of the machine,
at a lower priority, so that Ray's own limits on time are kept. Those that compare times come last,
with nothing beside them. The output of each part is shown when it has ended, that of the largest
while it runs. A part that has not ended after ``PACELINE_TEST_LIMIT`` seconds (default 1,500; with
`--slow` twice that, with `--all` three times) is stopped, after every thread of it has said where
it is: pytest's own timeout does not see what hangs between tests or after the last one.

    python tests/run.py [--slow | --all] [pytest's arguments, for all of them]
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
PYTEST = (sys.executable, "-m", "pytest")
NO_FILES = ["--collect-only", "tests/run.py"]
NOTHING_COLLECTED = 5  # pytest's status; no error where the arguments name a file of another part
TOO_LONG = 124  # the status of a part that was stopped, as `timeout` has it
BACKGROUND = 10  # niceness of the tests without a Ray
# Ray's own limits are meant for a machine that does nothing else.
PATIENT = {"RAY_raylet_start_wait_time_s": "180", "RAY_worker_niceness": "0"}


def files_with(*marks: str) -> list[str]:
    """The only ones to import for a part; sorted, so that those that share a Ray come together."""

    def has(text: str, mark: str) -> bool:
        # "run: " is what documents say of their commands (tests/docs).
        return any(word in text for word in (f"mark.{mark}", f", {mark}=", f"run: {mark}"))

    files = {p: p.read_text() for p in (ROOT / "tests").rglob("test_*.py")}
    return sorted(
        str(path.relative_to(ROOT))
        for path, text in files.items()
        if all(has(text, mark) for mark in marks)
    )


def chosen(arguments: Sequence[str], *marks: str) -> list[str]:
    """The arguments for a part: with its files, unless they name others."""
    named = any((ROOT / argument.partition("::")[0]).exists() for argument in arguments)
    return [*arguments, *([] if named or not marks else files_with(*marks) or NO_FILES)]


def step_back() -> None:
    """In the child: a lower priority, also where the kernel compares sessions and not processes."""
    os.setsid()
    os.nice(BACKGROUND)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(BACKGROUND))


def wait(
    part: subprocess.Popen[Any], *others: subprocess.Popen[Any], until: float = math.inf
) -> int:
    """Its status; Ctrl-C is passed on to all, since they have sessions of their own.

    `until` is the time (of ``time.monotonic``) at which it is stopped.
    """
    try:
        return part.wait(None if until == math.inf else max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        stop(part)
        return TOO_LONG
    except KeyboardInterrupt:
        for one in (part, *others):
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGINT)
        return part.wait()


def stop(part: subprocess.Popen[Any]) -> None:
    """Let it print all threads' stacks (tests/conftest.py) and which processes run; then kill."""
    print(f"a part of the tests did not end in time and is stopped (process {part.pid})")
    with suppress(ProcessLookupError):
        part.send_signal(signal.SIGUSR1)
        time.sleep(2)
        tree = ["ps", "-eo", "pid,ppid,pgid,stat,etimes,time,args", "--forest"]
        print(subprocess.run(tree, capture_output=True, text=True, check=False).stdout, flush=True)
        os.killpg(part.pid, signal.SIGKILL)
    part.wait()


def show(output: IO[str]) -> None:
    output.seek(0)
    print(output.read(), flush=True)


WHICH = {
    "": ("not slow and not nightly", 1500),
    "--slow": ("slow and not nightly", 3000),
    "--all": ("not nightly", 4500),
}
"""By the option: the expression of marks, and seconds that the tests may take."""


def main(arguments: Sequence[str], option: str = "") -> int:
    """Run all parts; the status of the worst."""
    begun = time.monotonic()
    which, limit_s = WHICH[option]
    until = begun + float(os.environ.get("PACELINE_TEST_LIMIT") or limit_s)
    marks = ("slow",) if option == "--slow" else ()
    # More than there are cores: many tests wait for processes, or for a network that is slow. Each
    # takes 20 s to import and collect.
    workers = os.environ.get("PYTEST_WORKERS") or str(len(os.sched_getaffinity(0)) + 1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        tempfile.NamedTemporaryFile("r") as counts,
        tempfile.TemporaryFile("w+") as held,
        tempfile.TemporaryFile("w+") as held_last,
    ):
        environment = {**os.environ, "PACELINE_TEST_COUNTS": counts.name}
        many = subprocess.Popen(
            [*PYTEST, "-n", workers, "--dist", "loadfile",
             "-m", f"not serve and not alone and {which}", *chosen(arguments, *marks)],
            cwd=ROOT, env=environment, preexec_fn=step_back,
        )  # fmt: skip
        serve = subprocess.Popen(
            [*PYTEST, "-m", f"serve and {which}", *chosen(arguments, "serve", *marks)],
            cwd=ROOT, env={**PATIENT, **environment}, start_new_session=True,
            stdout=held, stderr=subprocess.STDOUT,
        )  # fmt: skip
        codes = [wait(serve, many, until=until)]
        ready, start = os.pipe()
        # It imports and collects while the rest of the others run, and then waits (conftest.py).
        alone = subprocess.Popen(
            [*PYTEST, "-m", f"alone and {which}", *chosen(arguments, "alone", *marks)],
            cwd=ROOT, env={**environment, "PACELINE_TEST_START": str(ready)}, pass_fds=[ready],
            start_new_session=True, stdout=held_last, stderr=subprocess.STDOUT,
        )  # fmt: skip
        codes.append(wait(many, alone, until=until))
        show(held)
        if pytest_ended(codes):
            os.close(start)
            codes.append(wait(alone, until=until))
            show(held_last)
        else:
            alone.kill()
        outcomes: Counter[str] = Counter()
        for line in counts:
            outcomes.update(json.loads(line))
    ran = sum(number for outcome, number in outcomes.items() if outcome != "skipped")
    details = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items() if number)
    print(f"tests run in all: {ran} ({details}) in {time.monotonic() - begun:.0f} s")
    found = [code for code in codes if code != NOTHING_COLLECTED]
    return max(found, default=NOTHING_COLLECTED, key=abs)


def pytest_ended(codes: Sequence[int]) -> bool:
    """Not interrupted, and not ended by a wrong argument."""
    return all(code in (0, 1, NOTHING_COLLECTED) for code in codes)


if __name__ == "__main__":
    given = sys.argv[1:]
    options = [word for word in given if word in WHICH]
    if len(options) > 1:
        sys.exit("--slow and --all: one of them at a time")
    sys.exit(main([word for word in given if word not in WHICH], *options))
