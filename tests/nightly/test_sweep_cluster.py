"""Sweeps on clusters: submitted as a job with token authentication, and with a node that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from rich.console import Console

from paceline.deployments.config import read_config_file
from paceline.tuning.results import Results, best_trial
from paceline.tuning.space import read_space
from paceline.tuning.stages import Sweep
from paceline.tuning.verify import verify
from tests.deployments.conftest import free_port
from tests.ray_nodes import RAY, ROOT, clean_environment, make_token, ray_node, raylets

pytestmark = [pytest.mark.nightly, pytest.mark.serve, pytest.mark.timeout(600)]

SMALL = [
    "workload={limit: 1, categories: [code_completion, copy_heavy_edits], max_tokens: 32}",
    "search.confirm=1",
    "search.time_s=null",
]


def options(*changes: str) -> list[str]:
    return [part for change in (*SMALL, *changes) for part in ("--set", change)]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return clean_environment(tmp_path)


@pytest.fixture
def head(environment: dict[str, str]) -> Iterator[tuple[str, str]]:
    """`ray start --head` with token authentication: addresses of the cluster and of its jobs."""
    port, dashboard = free_port(), free_port()
    make_token(environment)
    command = [
        "--head", "--num-cpus=1", f"--port={port}", f"--dashboard-port={dashboard}",
        "--node-ip-address=127.0.0.1",
    ]  # fmt: skip
    with ray_node(command, environment):
        yield f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}"


def test_a_sweep_is_submitted_as_a_job(
    head: tuple[str, str], environment: dict[str, str], tmp_path: Path
) -> None:
    """The whole command of the README, over few points."""
    command = [
        RAY, "job", "submit", "--address", head[1], "--working-dir", ".", "--",
        "python", "tuning/sweep.py", "--space", "tuning/spaces/demo.yaml",
        "--result", str(tmp_path / "sweep"),
        *options("search.trials=4", "search.simulated_first=2"),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "[  4/4]" in output  # live, through the job's log
    assert "succeeded" in output
    results = Results(str(tmp_path / "sweep"))
    assert results.manifest().state == "finished"
    assert len(results.predictions()) > 100
    assert read_config_file(tmp_path / "sweep" / "best.yaml").config.speculation.method


def test_the_best_of_everything_is_not_below_ar(tmp_path: Path) -> None:
    """All families on a mixed workload, then the found configuration once more, served."""
    space = read_space(
        "everything",
        ["search.trials=8", "search.simulated_first=6", "search.time_s=120", "search.confirm=2"],
    )
    results = Results(str(tmp_path / "sweep"))
    assert Sweep(space, results, Console()).run().state == "finished"
    best = best_trial(results.trials(), "goodput")
    assert best is not None
    assert best.counts
    if not best.point.is_ar:
        assert best.confirmed is not None
        assert best.confirmed.goodput_ratio.low > 1
        ray.shutdown()  # a deployment needs a Ray of its own
        assert verify(results, print)["served"]["low"] > 1


def test_a_node_that_dies_costs_its_trial_alone(
    head: tuple[str, str], environment: dict[str, str], tmp_path: Path
) -> None:
    results = Results(str(tmp_path / "sweep"))
    command = [
        sys.executable, "tuning/sweep.py", "--space", "demo", "--result", str(tmp_path / "sweep"),
        *options(
            "search.trials=6", "search.simulate=false", "resources.cpus=1",
            "workload.max_tokens=256", "workload.limit=2", "search.early_stopping=false",
        ),  # long trials
    ]  # fmt: skip
    with ray_node([f"--address={head[0]}", "--num-cpus=1"], environment) as worker:
        sweep = subprocess.Popen(
            command, env={**environment, "RAY_ADDRESS": head[0]}, cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            wait_for(lambda: len(results.trials()) >= 2, sweep)  # two at a time, one on each node
            time.sleep(3)  # into the next ones
            (raylet,) = raylets(worker.pid)
            os.kill(raylet, signal.SIGKILL)
            output, _ = sweep.communicate(timeout=400)
        finally:
            sweep.kill()
            sweep.wait()
    assert sweep.returncode == 0, output
    assert "2 node(s); 2 trial(s) at a time" in output
    records = results.trials()
    assert len(records) == 6
    failed = [record for record in records if record.status == "failed"]
    assert len(failed) == 1, output
    assert not failed[0].counts
    assert results.manifest().state == "finished"


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
