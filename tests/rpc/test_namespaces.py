"""Client and server in network namespaces of their own, as on two machines: AR's tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.certs import make_certificates
from paceline.errors import PacelineError
from paceline.models.base import ModelRunner
from paceline.rpc.client import Client
from paceline.sampling import SamplingParams
from tests.modelzoo import make_model
from tests.rpc.forking import Forked
from tests.rpc.netns import SERVER, CannotMakeNamespaces, Namespaces
from tests.rpc.serving import ReplicaProcess
from tests.rpc.test_device import PROMPT, ar


@pytest.fixture(scope="module")
def namespaces() -> Iterator[Namespaces]:
    made = Namespaces()
    try:
        made.__enter__()
    except CannotMakeNamespaces as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        yield made
    finally:
        made.__exit__(None, None, None)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certificates(folder, [SERVER])
    return folder


@pytest.fixture(scope="module")
def target(namespaces: Namespaces, certs: Path, model_folder: Path) -> Iterator[ReplicaProcess]:
    with ReplicaProcess(
        "tests.rpc.target_process", "--model", str(model_folder), "--host", SERVER,
        "--cert", str(certs / "server.crt"), "--key", str(certs / "server.key"),
        namespace=namespaces.server,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def proxy(namespaces: Namespaces, target: ReplicaProcess) -> Iterator[ReplicaProcess]:
    """The link's delay, on the client's machine: the veth pair itself has none."""
    with ReplicaProcess(
        "benchmarks.netem", target.address, "--rtt", "0.03",
        namespace=namespaces.client,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models"), seed=0)


def test_no_other_client_reaches_the_server(target: ReplicaProcess, certs: Path) -> None:
    with (
        Client(target.address, timeout=2, ca=certs / "ca.crt") as client,
        pytest.raises(PacelineError),
    ):
        client.get_model()


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("temperature", "down"), [(0.0, False), (1.0, True)], ids=["link up", "link down for a while"]
)
def test_tokens_equal_ar(
    temperature: float, down: bool, namespaces: Namespaces, proxy: ReplicaProcess, certs: Path,
    runner: ModelRunner, drafter_folder: Path,
) -> None:  # fmt: skip
    count = 400 if down else 60  # far from done when the link goes down
    params = SamplingParams(max_tokens=count, temperature=temperature, seed=5, ignore_eos=True)
    arguments = [
        "--server", proxy.address,
        "--ca", str(certs / "ca.crt"), "--drafter", str(drafter_folder),
        "--prompt", bytes(PROMPT).decode(), "--max-tokens", str(count),
        "--temperature", str(temperature),
    ]  # fmt: skip
    device = Forked("tests.rpc.device_process", arguments, namespaces.client)
    try:
        for _ in range(3):
            assert device.stdout.readline().strip().isdigit(), "the device did not start"
        if down:
            namespaces.set_link(up=False)
            time.sleep(1.5)
            namespaces.set_link(up=True)
        assert device.has_ended(60)
        output = device.stdout.read()
    finally:
        device.kill()
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert result["token_ids"] == ar(runner, params)
    assert result["travel_seconds"] >= 0.03
    assert (result["num_failures"] > 0) == down
