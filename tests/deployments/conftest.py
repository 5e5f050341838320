"""One Ray with Serve for the whole folder, and on it one application for each topology."""

from __future__ import annotations

import secrets
import shutil
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster import local_ray, serving
from paceline.config import SpeculationConfig
from paceline.deployments.config import CONFIGS_DIR, ConfigFile, read_config_file
from paceline.engine import Engine
from paceline.rpc.client import Client
from paceline.sampling import SamplingParams

# Before anything imports Ray: its settings are read then.
local_ray.prepare_environment(secrets.token_hex(32))
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own, twenty of them
    import ray
    from ray import serve

PROMPTS = (
    "def fibonacci(n):\n",
    'class Stack:\n    """A list that',
    "Question: Tom has 3 bags with 4 apples each. How many apples has he?\nAnswer:",
)
SMALL: dict[str, Any] = {"num_cpus": 0.1}  # many replicas on few cores
TRACES = Path(tempfile.mkdtemp(prefix="paceline-traces-"))


def free_port() -> int:
    """A port that stays free until it is used.

    The system hands out ports from 32768 on by itself, and Ray those below 20000.
    """
    while True:
        port = secrets.choice(range(20_000, 32_000))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port


def config_file(topology: str, name: str, port: int) -> ConfigFile:
    """A file that ships with the package, under another name and port."""
    shipped = {"actors": "demo.yaml", "colocated": "colocated.yaml"}[topology]
    file = read_config_file(CONFIGS_DIR / shipped)
    small: dict[str, Any] = {
        "target": SMALL,
        "drafter": SMALL,
        "gateway": {**SMALL, "grpc_port": port, "http_port": 0},
    }
    if topology == "actors":  # no trace begins here, but one that a caller samples goes on
        small["tracing"] = {"exporter": "file", "folder": str(TRACES), "sample": 0, "rounds": True}
    return file.with_args(small).model_copy(update={"name": name})


@dataclass(frozen=True)
class App:
    """A deployed application."""

    name: str
    topology: str
    address: str
    http: str

    def describe(self) -> dict[str, Any]:
        return serving.describe(self.name)

    def replica(self, deployment: str) -> dict[str, Any]:
        """The status of its only replica."""
        (replica,) = self.describe()["deployments"][deployment]["replicas"]
        status: dict[str, Any] = replica
        return status

    @property
    def idle(self) -> bool:
        """Nothing of any session is left, on the target, the drafter and the gateway."""
        deployments = self.describe()["deployments"]
        target = deployments["target"]["replicas"][0]
        drafters = deployments.get("drafter", {}).get("replicas", [])
        return (
            target["sessions"] == 0
            and target["leases"] == 0
            and target["kv_free"] == target["kv_capacity"]
            and all(drafter["sessions"] == 0 for drafter in drafters)
            and deployments["gateway"]["replicas"][0]["calls"] == 0
        )


def _addresses(name: str) -> tuple[str, str]:
    described = serving.describe(name)
    return described["gateway"], described["http"]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    file = config_file("actors", "unused", 0)
    local_ray.start_ray(file)
    serving.start_serve(file)
    yield
    ray.shutdown()
    shutil.rmtree(TRACES, ignore_errors=True)


@pytest.fixture(scope="session")
def apps(ray_cluster: None) -> Iterator[dict[str, App]]:
    """Both topologies, brought up together."""
    files = {t: config_file(t, f"test-{t}", free_port()) for t in ("actors", "colocated")}
    failures: list[Exception] = []

    def deploy(file: ConfigFile) -> None:
        try:
            serving.deploy(file, lambda line: None)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=deploy, args=(file,)) for file in files.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    yield {
        topology: App(file.name, topology, *_addresses(file.name))
        for topology, file in files.items()
    }
    for file in files.values():
        serve.delete(file.name)


@pytest.fixture(params=["actors", "colocated"])
def app(request: pytest.FixtureRequest, apps: dict[str, App]) -> Iterator[App]:
    """Each topology in turn; a test must leave nothing behind."""
    yield apps[request.param]
    assert eventually(lambda: apps[request.param].idle), apps[request.param].describe()


@pytest.fixture
def actors(apps: dict[str, App]) -> Iterator[App]:
    yield apps["actors"]
    assert eventually(lambda: apps["actors"].idle), apps["actors"].describe()


@pytest.fixture
def client(app: App) -> Iterator[Client]:
    with Client(app.address, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The demo pair in this process: what everything is compared with."""
    from paceline.loading import load_engine

    return load_engine()


@pytest.fixture(scope="session")
def demo() -> Engine:
    """The demo pair for servers in this process: each takes a sibling, which has learnt nothing."""
    from paceline.loading import load_engine

    return load_engine()


@pytest.fixture(scope="session")
def ar(engine: Engine) -> Callable[[Sequence[str], SamplingParams], list[tuple[int, ...]]]:
    """Plain AR decoding in this process; token ids for each prompt."""

    def generate(prompts: Sequence[str], params: SamplingParams) -> list[tuple[int, ...]]:
        assert engine.tokenizer is not None
        ids = [engine.tokenizer.encode(prompt) for prompt in prompts]
        sessions = engine.generate(ids, params, SpeculationConfig(method="ar"))
        return [tuple(session.output_ids) for session in sessions]

    return generate


def eventually(condition: Callable[[], bool], timeout: float = 10.0) -> bool:
    """Wait until ``condition()`` holds; False when it did not in time."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
