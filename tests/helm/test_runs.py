"""What the chart renders runs: the Serve configuration and the sweep's entry point, on a Ray with
the pools of the RayService."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from helm_python.chart import Chart

from paceline.config import SpeculationConfig
from paceline.deployments.config import read_config_file
from paceline.engine import Engine
from paceline.rpc.client import Client
from paceline.sampling import SamplingParams
from tests.deployments.conftest import PROMPTS, free_port
from tests.helm.conftest import only, render
from tests.ray_nodes import ROOT, clean_environment, make_token, ray_node

pytestmark = [pytest.mark.serve, pytest.mark.timeout(400)]

SERVE = str(Path(sys.executable).with_name("serve"))
TINY = [
    "workload={limit: 1, categories: [code_completion], max_tokens: 24}",
    "search={trials: 2, simulate: false, confirm: 1}",
    "space={method: [prompt_lookup], num_speculative_tokens: [4]}",
]


class Cluster(NamedTuple):
    """A Ray as the operator starts it for these objects."""

    objects: list[dict[str, Any]]
    grpc_port: int
    http_port: int
    dashboard: str
    environment: dict[str, str]


@pytest.fixture(scope="module")
def cluster(chart: Chart, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Head and workers with the resources of the rendered groups; all workers in one node."""
    home = tmp_path_factory.mktemp("home")
    grpc_port, http_port = free_port(), free_port()
    size = {"cpu": "300m", "memory": "1Gi"}
    small = {"resources": {"requests": size, "limits": size}}
    values = {
        "gateway": {"grpc_port": grpc_port, "http_port": http_port},
        # With the policy, which the controller must be able to load.
        "target": {"autoscaling": {"max_replicas": 2}},
        "ray": {"autoscaling": {"enabled": False}},
        "speculation": {"method": "draft_model", "num_speculative_tokens": 3},
        "pods": dict.fromkeys(("target", "drafter", "gateway"), small),
        # Certificates would lie in /etc/paceline; test_chart.py tries those that are generated.
        "tls": {"mode": "disabled"},
        "sweep": {"enabled": True, "set": TINY, "result": str(home / "sweep")},
    }
    objects = render(chart, values)
    spec = only(objects, "RayService")["spec"]["rayClusterConfig"]
    resources = {
        name: float(amount) * group["replicas"]
        for group in spec["workerGroupSpecs"]
        for name, amount in group["resources"].items()
    }
    environment = {**clean_environment(home), "PYTHONPATH": str(ROOT)}
    make_token(environment)
    port, dashboard = free_port(), free_port()
    params = {
        **spec["headGroupSpec"]["rayStartParams"], "dashboard-host": "127.0.0.1",
        "port": port, "dashboard-port": dashboard, "node-ip-address": "127.0.0.1",
    }  # fmt: skip
    head = ["--head", *(f"--{name}={value}" for name, value in params.items())]
    worker = [
        f"--address=127.0.0.1:{port}", "--num-cpus=2", f"--resources={json.dumps(resources)}",
        "--node-ip-address=127.0.0.1",
    ]  # fmt: skip
    with ray_node(head, environment), ray_node(worker, environment):
        yield Cluster(objects, grpc_port, http_port, f"http://127.0.0.1:{dashboard}", environment)


def run(command: list[str], cluster: Cluster, timeout: float = 60) -> str:
    done = subprocess.run(
        command, env=cluster.environment, cwd=ROOT, capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def applications(cluster: Cluster) -> dict[str, Any]:
    """What `serve status` prints, without a process for each look."""
    token = (Path(cluster.environment["HOME"]) / ".ray" / "auth_token").read_text().strip()
    request = urllib.request.Request(
        f"{cluster.dashboard}/api/serve/applications/", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)["applications"]
    return found


@pytest.mark.slow
def test_the_served_configuration_generates(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(only(cluster.objects, "RayService")["spec"]["serveConfigV2"])
    run([SERVE, "deploy", str(file), "--address", cluster.dashboard], cluster)
    deadline = time.monotonic() + 200
    while True:
        application = applications(cluster)["paceline"]
        if application["status"] == "RUNNING":
            break
        assert application["status"] in ("DEPLOYING", "NOT_STARTED"), application
        assert time.monotonic() < deadline, application
        time.sleep(1)
    assert set(application["deployments"]) == {"target", "drafter", "gateway"}

    from paceline.loading import load_engine

    local: Engine = load_engine()
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3)
    assert local.tokenizer is not None
    ids = [local.tokenizer.encode(prompt) for prompt in PROMPTS]
    ar = [
        tuple(session.output_ids)
        for session in local.generate(ids, params, SpeculationConfig(method="ar"))
    ]
    with Client(f"127.0.0.1:{cluster.grpc_port}", timeout=60) as client:
        answers = [client.complete(prompt, params) for prompt in PROMPTS]
    assert [answer.token_ids for answer in answers] == ar
    with openai.OpenAI(base_url=f"http://127.0.0.1:{cluster.http_port}/v1", api_key="x") as client:
        answer = client.completions.create(
            model="paceline", prompt=list(PROMPTS), max_tokens=24, seed=3,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
    assert [tuple(choice.token_ids) for choice in answer.choices] == ar  # type: ignore[attr-defined]
    run([SERVE, "shutdown", "-y", "--address", cluster.dashboard], cluster)


@pytest.mark.nightly
def test_the_sweeps_entry_point_runs_as_a_job(cluster: Cluster) -> None:
    """Inside a script, as the operator submits it; jobs run where Ray was started."""
    entrypoint = only(cluster.objects, "RayJob")["spec"]["entrypoint"]
    script = f"ray job submit --address {cluster.dashboard} -- {entrypoint} ;"
    assert "succeeded" in run(["bash", "-c", script], cluster, 300)
    best = Path(cluster.environment["HOME"]) / "sweep" / "best.yaml"
    assert read_config_file(best).config.speculation.method in ("ar", "prompt_lookup")
