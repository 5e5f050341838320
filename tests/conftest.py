"""What all tests share. Markers are declared in pyproject.toml."""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Read when the packages are imported, here and in the processes that tests start. What the caller
# has set stays.
for _name, _value in {
    "HF_HUB_OFFLINE": "1",  # tests fetch nothing
    # Hundreds of tiny models are loaded once: they learn costs from rounds. Tests of the measuring
    # switch it on.
    "PACELINE_MEASURE": "off",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # its 5 s are too short on two busy cores
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_metrics_report_interval_ms": "3000",  # instead of 10 s, so that tests can read them
    "RAY_prestart_worker_first_driver": "0",  # workers start when a test needs them
    "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive a fork
}.items():
    os.environ.setdefault(_name, _value)


BY_NIGHT = ("test_chat_exactness.py",)
"""Files all of whose tests are marked ``nightly``."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Models this small are slower on several threads, and much slower on busy cores.

    Before each test, because commands that run in the tests' process set a number of their own.
    """
    from paceline.loading import limit_threads

    limit_threads(1)


@pytest.fixture
def patient_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constraints wait for every mask: on a busy machine one may take longer than a round waits."""
    monkeypatch.setattr("paceline.constraints.PATIENCE_S", 10.0)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, but for compiled kernels, which are the user's."""
    from paceline.cache import cache_folder

    kernels = cache_folder("kernels")
    kernels.mkdir(parents=True, exist_ok=True)
    root = tmp_path / "cache"
    (root / "paceline").mkdir(parents=True)
    (root / "paceline" / "kernels").symlink_to(kernels)
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(root))
    return root


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A real browser, headless, that makes no requests of its own."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium on the path (Debian: apt install chromium)")
    from playwright.sync_api import sync_playwright

    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--no-first-run", "--disable-sync", "--disable-component-update",
    ]  # fmt: skip
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where random checkpoints are written, once for each kind (tests/modelzoo.py)."""
    return tmp_path_factory.mktemp("zoo")


def pytest_configure() -> None:
    """SIGUSR1 prints where every thread is (tests/run.py sends it to a part that hangs)."""
    # A copy, since tests' own standard error is caught.
    faulthandler.register(signal.SIGUSR1, file=os.fdopen(os.dup(2), "w"), all_threads=True)
    gc.disable()  # until everything is imported and collected: a fifth of that time was garbage's


@pytest.hookimpl(tryfirst=True)  # before `-m "not nightly"` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as nightly what ``one_of`` leaves to the night, and as slow what to `make test-slow`."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("one_of")
        if mark is not None and item.get_closest_marker("nightly") is None:
            test = item.nodeid.partition("[")[0]
            group, place = divmod(seen[test], mark.args[0])
            if place:
                item.add_marker("nightly")
            elif group % mark.kwargs.get("slow", 1):
                item.add_marker("slow")
            seen[test] += 1


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Thousands of cases that run by night alone take seconds to collect."""
    expression = config.getoption("markexpr", "") or ""
    return True if "not nightly" in expression and collection_path.name in BY_NIGHT else None


def pytest_collection_finish() -> None:
    """Where tests/run.py says when to start, wait for it."""
    gc.freeze()  # modules and thousands of tests are not looked at again
    gc.set_threshold(20_000)
    gc.enable()
    # Three times a test pytest gives its handlers to each logger that does not propagate. torch has
    # dozens of them, for messages that are switched off.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    start = os.environ.get("PACELINE_TEST_START")
    if start is not None:
        os.read(int(start), 1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests ran, in a line that is easy to find."""
    counts = {
        outcome: len(
            [
                r
                for r in terminalreporter.getreports(outcome)
                if getattr(r, "when", "") != "teardown"
            ]
        )
        for outcome in ("passed", "failed", "error", "xfailed", "xpassed", "skipped")
    }
    path = os.environ.get("PACELINE_TEST_COUNTS")  # of tests/run.py
    if path and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a") as file:
            file.write(json.dumps(counts) + "\n")
    ran = sum(count for outcome, count in counts.items() if outcome != "skipped")
    details = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    terminalreporter.write_line(f"tests run: {ran}" + (f" ({details})" if details else ""))
