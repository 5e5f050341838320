"""What a start costs: which modules a process imports, and when the kernels are compiled."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster import local, serving
from paceline.demo import TARGET_DIR

# Each of them takes from a tenth of a second to seconds to import.
UNUSED = {"transformers", "matplotlib", "scipy", "sklearn", "sympy", "tensorboard", "datasets"}
NO_RAY = {"ray", "pandas", "fastapi", *UNUSED}
NO_TORCH = {"torch", *NO_RAY}

LIGHT = {
    "import paceline": {"numpy", "pydantic", "grpc", *NO_TORCH},
    "import paceline.cluster.cli": {"numpy", "pydantic", "grpc", *NO_TORCH},
    # The catalogue with every method checked against it; clients; the demo before it starts Ray.
    "import paceline.plan": {"grpc", *NO_TORCH},
    "import paceline.rpc.client": NO_TORCH,
    "import paceline.cluster.demo as d; d.read_config_file(d.CONFIGS['smollm2'])": NO_TORCH,
    # A gateway, and the process that deploys: torch is for replicas with a model.
    "import paceline.deployments.gateway": {"torch", *UNUSED},
    "from paceline.deployments.app import build; build({})": {"torch", *UNUSED},
    # A replica with a model, which has loaded it.
    "from paceline.loading import load_engine; load_engine()": NO_RAY,
}


def _run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("code", LIGHT)
def test_a_start_imports_only_what_it_uses(code: str) -> None:
    done = _run(f"import sys; {code}; print('LOADED', *sys.modules)")
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.rpartition("LOADED")[2].split()
    assert loaded
    assert not {name.split(".")[0] for name in loaded} & LIGHT[code]


def test_methods_that_compute_with_torch_are_made_all_the_same() -> None:
    """Their drafters are imported late; a name that is wrong would only be noticed in use."""
    from paceline.drafters.base import DrafterContext
    from paceline.errors import InvalidArgument
    from paceline.loading import load_engine
    from paceline.methods import DRAFTERS

    engine = load_engine(TARGET_DIR)

    def head(kind: str) -> Any:
        raise InvalidArgument("method", kind, "a method without a head")

    def drafter(name: str) -> Any:
        raise InvalidArgument("drafter", name, "a drafter that is made of no other")

    context = DrafterContext(engine.target.vocab_size, drafter, lambda: engine.local_target, head)
    made = set()
    for name, make in DRAFTERS.items():
        with suppress(InvalidArgument):  # from one of the two above, or no draft model is there
            make(context)
            made.add(name)
    assert {"token_recycling", "stand", "early_exit"} <= made


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that compiles nothing, and a file that has a line for each time it was called."""
    calls = tmp_path / "calls"
    script = tmp_path / "cc"
    script.write_text(f"#!/bin/sh\necho called >> {shlex.quote(str(calls))}\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PACELINE_KERNELS", raising=False)
    return calls


def test_kernels_are_compiled_while_ray_starts(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's start takes seconds: by its end the compiler has to be at work on a new machine."""
    lines = []

    def start_ray(file: Any) -> str:
        deadline = time.monotonic() + 60
        while not compiler.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        raise serving.ClusterError("no Ray today")

    monkeypatch.setattr(serving, "start_ray", start_ray)
    monkeypatch.setattr(serving, "take_down", lambda app: None)
    file = local._load(local.DEMO_CONFIG, {"grpc_port": 0, "http_port": 0})
    with pytest.raises(serving.ClusterError, match="no Ray today"):  # noqa: SIM117
        with serving.deployed(file, report=lines.append):
            pass
    assert compiler.exists(), "Ray would have started without the compiler being called"
    assert lines == ["starting Ray"]


def test_kernels_are_built_ahead_without_torch(compiler: Path) -> None:
    code = (
        "import sys; from paceline.models.kernels import __main__\n"
        "try: __main__.main([])\n"
        "finally: print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = _run(code)
    assert done.stdout.split() == ["False", "False"]
    assert done.returncode == 1  # this compiler cannot, and it says so
    assert str(compiler.parent) in done.stderr
    assert compiler.exists()


@pytest.mark.slow
def test_kernels_that_are_there_are_not_built_again() -> None:
    def libraries() -> dict[str, int]:
        done = _run(
            "from paceline.models import kernels; from paceline.models.kernels import __main__; "
            "__main__.main([]); print(kernels.status()[1])"
        )
        assert done.returncode == 0, done.stderr
        folder = Path(done.stdout.split()[-1]).parent
        return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.so")}

    first = libraries()
    assert first
    assert libraries() == first


def test_the_demo_counts_from_the_start_of_its_process() -> None:
    begin = time.monotonic()
    done = _run(
        "import time; time.sleep(0.5); "
        "from paceline.cluster.demo import process_age_s as age; print(age())"
    )
    elapsed = time.monotonic() - begin
    assert done.returncode == 0, done.stderr
    assert 0.5 <= float(done.stdout) <= elapsed + 0.02  # a tick of the kernel's clock is 0.01 s


def test_stages_have_their_seconds_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with local.showing_progress() as report:
        report("starting Ray")
        time.sleep(0.3)
        report("loading target")
        report("")
    first, second = capsys.readouterr().err.splitlines()
    assert first.split(maxsplit=2) == ["0.0", "s", "starting Ray"]
    seconds, unit, line = second.split(maxsplit=2)
    assert (unit, line) == ("s", "loading target")
    assert float(seconds) >= 0.3
