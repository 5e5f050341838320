"""The Ray of `paceline up`: `ray` and `serve` reach it with its token, and it leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cluster.local_ray import LocalFiles
from paceline.cluster.serving import _Progress
from tests.deployments.conftest import eventually, free_port
from tests.ray_nodes import RAY, ROOT, clean_environment, make_token, ray_node

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

COLOCATED = "deployments/configs/colocated.yaml"
SERVE = str(Path(RAY).with_name("serve"))


@pytest.fixture
def environment(own_cache: Path, tmp_path: Path) -> dict[str, str]:
    return {**clean_environment(tmp_path), "PACELINE_CACHE_DIR": str(own_cache)}


@pytest.fixture
def files(own_cache: Path) -> LocalFiles:
    return LocalFiles(own_cache / "paceline" / "local")


def paceline(*args: str) -> list[str]:
    return [sys.executable, "-m", "paceline.cluster.cli", *args]


def up(*args: str) -> list[str]:
    return paceline("up", "--config", COLOCATED, "--port", "0", "--http-port", "0", *args)


def run(command: list[str], environment: dict[str, str], timeout_s: float = 240) -> str:
    """Both outputs of a command that must succeed."""
    done = attempt(command, environment, timeout_s)
    assert done.returncode == 0, done.stdout
    return done.stdout


def attempt(
    command: list[str], environment: dict[str, str], timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment, cwd=ROOT, timeout=timeout_s, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def in_shell(files: LocalFiles, environment: dict[str, str]) -> dict[str, str]:
    """The environment of a shell that has read the file that `up` names."""
    shell = f'. "{files.variables}" && env -0'
    text = subprocess.run(
        ["sh", "-c", shell], env=environment, check=True, capture_output=True, text=True
    ).stdout
    return dict(line.split("=", 1) for line in text.split("\0") if line)


def processes(session: int) -> list[str]:
    """The names of the living processes that `ray start` and its descendants started."""
    listing = subprocess.run(
        ["ps", "-eo", "sess=,stat=,args="], capture_output=True, text=True, check=True
    ).stdout
    parts = [line.split(None, 2) for line in listing.splitlines()]
    return [args for sess, state, args in parts if int(sess) == session and "Z" not in state]


@pytest.fixture
def other_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Ray that the user has started on the same machine; what a shell needs to reach it."""
    environment = clean_environment(tmp_path_factory.mktemp("other"))
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    make_token(environment)
    port = free_port()
    command = [
        "--head", "--num-cpus=1", f"--port={port}", "--include-dashboard=false",
        "--node-ip-address=127.0.0.1", "--object-store-memory=80000000",
    ]  # fmt: skip
    with ray_node(command, environment):
        yield {**environment, "RAY_ADDRESS": f"127.0.0.1:{port}"}


@pytest.mark.slow
def test_a_sweep_is_submitted_to_the_ray_of_up(
    other_ray: dict[str, str], environment: dict[str, str], files: LocalFiles, tmp_path: Path
) -> None:
    """The documented commands, one after the other, beside another Ray."""
    try:
        shown = run(up(), environment)
        assert str(files.variables) in shown
        known = files.read()
        shell = in_shell(files, environment)
        assert "status: RUNNING" in run([SERVE, "status"], shell)
        assert "Resources" in run([RAY, "status"], shell)

        # The token: readable by its owner alone, in no argument, log or output; needed.
        token = files.token.read_text()
        assert stat.S_IMODE(files.token.stat().st_mode) == 0o600
        logs = [shown, files.log.read_text(), *processes(known["pid"]), json.dumps(known)]
        logs += [
            path.read_text(errors="replace") for path in Path(known["temp_dir"]).rglob("*.log")
        ]
        assert len(logs) > 10
        assert not any(token in text for text in logs)
        missing = {**shell, "RAY_AUTH_MODE": "disabled"}
        wrong = {**shell, "RAY_AUTH_TOKEN": "0" * 64}
        for stranger in (missing, wrong):
            for command in ([SERVE, "status"], [RAY, "job", "submit", "--", "true"]):
                refused = attempt(command, stranger)
                assert refused.returncode != 0
                assert "AuthenticationError" in refused.stdout or "Unauth" in refused.stdout

        changes = [
            "workload={limit: 1, categories: [code_completion], max_tokens: 16}",
            "search.confirm=1", "search.time_s=null", "search.trials=2", "search.simulate=false",
        ]  # fmt: skip
        options = [part for change in changes for part in ("--set", change)]
        output = run(
            [
                RAY, "job", "submit", "--working-dir", ".", "--", "python", "tuning/sweep.py",
                "--space", "tuning/spaces/demo.yaml", "--result", str(tmp_path / "sweep"), *options,
            ],
            shell, 500,
        )  # fmt: skip
        assert "succeeded" in output
        assert "waiting" not in output  # the deployment leaves the machine's CPUs to jobs
        assert (tmp_path / "sweep" / "best.yaml").exists()
        assert "is up already" in attempt(up(), shell).stdout
    finally:
        stopped = run(paceline("down"), environment)
    assert "stopped the deployment" in stopped
    assert eventually(lambda: not processes(known["pid"]))
    assert not Path(known["temp_dir"]).exists()
    assert not files.variables.exists()
    assert "Resources" in run([RAY, "status"], other_ray)  # the other Ray has not noticed


FLAKY = """
from pathlib import Path
def fail_once(*_):
    try:
        Path(__file__).with_suffix(".called").touch(exist_ok=False)
    except FileExistsError:
        return
    raise RuntimeError("the machine was busy")
"""
"""What `ray start` calls: it fails as one that waits for its node for 30 s does."""


def start(command: list[str], environment: dict[str, str], until: str) -> subprocess.Popen[str]:
    """A command that has written a line with ``until``."""
    process = subprocess.Popen(
        command, env=environment, cwd=ROOT, text=True, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if until in line:
            return process
    raise AssertionError(f"no {until!r} in {said}")


@pytest.mark.nightly
def test_a_start_that_is_interrupted_or_killed_leaves_nothing(
    environment: dict[str, str], files: LocalFiles, tmp_path: Path
) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)
    flaky = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "RAY_START_HOOK": "flaky.fail_once"}
    try:
        # SIGTERM, as `down` sends it: the starter cleans up itself.
        starter = start(
            up(), environment | flaky, "starting Ray again: Ray does not start: Runtime"
        )
        assert starter.stderr is not None
        assert any("starting Ray Serve" in line for line in starter.stderr)
        pids = [files.read()["pid"]]
        assert "another `paceline up` is starting" in attempt(up(), environment).stdout
        assert "that was starting" in run(paceline("down"), environment)
        assert starter.wait(60) != 0
        assert eventually(lambda: not processes(pids[0]))

        # SIGKILL: the next `up` stops what is left; in the foreground, it ends with SIGTERM.
        starter = start(up(), environment, "starting Ray Serve")
        pids.append(files.read()["pid"])
        starter.kill()
        starter.wait()
        assert processes(pids[1])
        assert not json.loads(attempt(paceline("status", "--json"), environment).stdout)["running"]
        starter = start(up("--foreground"), environment, "Ctrl-C stops it")
        pids.append(files.read()["pid"])
        assert not processes(pids[1])
        starter.send_signal(signal.SIGTERM)
        assert starter.wait(120) == 0
        assert not any(map(processes, pids))

        # The Ray itself dies: nothing is up, and `down` ends what has survived it.
        starter = start(up(), environment, "ready at")
        assert starter.wait(60) == 0
        pids.append(files.read()["pid"])
        os.kill(pids[-1], signal.SIGKILL)
        assert eventually(lambda: not files.held("ray"))
        assert "nothing is running" in attempt(paceline("status"), environment).stdout
    finally:
        run(paceline("down"), environment)
    assert eventually(lambda: not any(map(processes, pids)))
    assert not files.file.exists()


def test_a_start_goes_on_while_anything_happens() -> None:
    progress = _Progress(0.2, None)
    for state in range(5):
        time.sleep(0.1)
        assert progress.goes_on(state)
    time.sleep(0.25)
    assert progress.goes_on(4, busy=True)  # the compiler
    time.sleep(0.1)
    assert progress.goes_on(4)
    time.sleep(0.15)
    assert not progress.goes_on(4)


@pytest.mark.parametrize("works", [True, False])
def test_a_start_goes_on_while_a_worker_computes(works: bool) -> None:
    """A worker of Ray is known by its command line, as one that has no task yet."""
    code = "while True: pass" if works else "import time; time.sleep(60)"
    worker = [sys.executable, "-c", code, "default_worker.py"]
    # A process of its own is the node: this one may have workers of other tests.
    script = f"import subprocess; subprocess.run({worker!r})"
    node = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        time.sleep(0.5)
        progress = _Progress(1.0, node.pid)
        assert progress.goes_on("loading")
        time.sleep(1.2)
        assert progress.goes_on("loading") is works
    finally:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()
