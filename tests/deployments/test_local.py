"""`up`, `status`, `down` and the demo, each with a Ray of its own, as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cluster import local, serving
from paceline.cluster.local_ray import LocalFiles
from paceline.deployments.config import CONFIGS_DIR
from paceline.errors import InvalidArgument
from paceline.numerics import Fingerprint
from paceline.rpc.client import Client
from paceline.sampling import SamplingParams
from tests.deployments.conftest import config_file, eventually, free_port

CLIENT_TOKEN = "token-of-a-client-on-this-machine"
pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port: int = holder.getsockname()[1]
        yield port


def _python(code: str) -> Any:
    """Run code in a process that has no Ray yet; its last line of output is JSON."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, f"code {result.returncode}: {result.stderr}{_driver_log()}"
    return json.loads(result.stdout.splitlines()[-1])


def _driver_log() -> str:
    """The end of the newest log of a process that has joined Ray, which may end it silently."""
    folder = LocalFiles(local.state_folder()).read().get("temp_dir", "none")
    logs = Path(folder).glob("session_latest/logs/python-core-driver-*.log")
    newest = max(logs, key=lambda log: log.stat().st_mtime, default=None)
    return "" if newest is None else f"\n{newest.name}:\n{newest.read_text()[-3000:]}"


def _config(tmp_path: Path, port: int) -> Path:
    data = yaml.safe_load((CONFIGS_DIR / "colocated.yaml").read_text())
    data["applications"][0]["args"]["gateway"] |= {"grpc_port": port, "http_port": 0}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def _with_policy(path: Path) -> Path:
    """The same file with the autoscaling policy: a session makes it want two targets."""
    data = yaml.safe_load(path.read_text())
    (application,) = data["applications"]
    application["args"].setdefault("target", {})["autoscaling"] = {
        "max_replicas": 2, "upscale_delay_s": 0, "look_back_s": 10.5
    }  # fmt: skip
    application["autoscaling_policy"] = {
        "policy_function": "paceline.cluster.autoscaling:Policy",
        "policy_kwargs": {"sessions_per_target": 0.5},
    }
    path.write_text(yaml.safe_dump(data))
    return path


def _call(call: str) -> dict[str, Any]:
    """What `up`, `status` or `down` returns in a process of its own: this one has another Ray."""
    code = f"import json; from paceline.cluster import local; print(json.dumps(local.{call}))"
    result: dict[str, Any] = _python(code)
    return result


def _status() -> dict[str, Any]:
    return _call("status()")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.nightly
def test_up_status_down(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an autoscaling policy, which goes to Serve in another way; the demo has none."""
    port = free_port()
    monkeypatch.setenv("PACELINE_TOKEN", CLIENT_TOKEN)
    path = _with_policy(_config(tmp_path, port))
    try:
        up = _call(f"up({str(path)!r})")
        assert up["ready"]
        assert up["gateway"] == f"127.0.0.1:{port}"
        assert "token" not in up
        for path_of_state in local.state_folder().glob("*.*"):
            assert path_of_state.stat().st_mode & 0o077 == 0, path_of_state
        # The owner has its own environment; Ray's processes and the replicas have no token.
        assert len(_descendants(up["pid"])) > 3
        for pid in _descendants(up["pid"]):
            assert CLIENT_TOKEN.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        with urllib.request.urlopen(f"{up['http']}/health", timeout=10) as answer:
            assert answer.status == 200
        with Client(up["gateway"], timeout=60) as client:
            completion = client.complete("def f(x):\n", SamplingParams(max_tokens=8))
        assert len(completion.token_ids) > 0

        status = _status()
        assert status["running"]
        assert status["sessions"] == 0
        pids = [r["pid"] for d in status["deployments"].values() for r in d["replicas"]]
        assert completion.last.target_pid in pids
        assert len(pids) == 2
        (target,) = status["deployments"]["target"]["replicas"]
        assert Fingerprint.parse(target["fingerprint"]).dtype == "float32"
        assert target["fingerprint"] == completion.fingerprint
        with Client(up["gateway"], timeout=60) as client, client.open_session([1, 2, 3]):

            def started() -> bool:
                return sum("ServeReplica" in _name(p) for p in _descendants(up["pid"])) == 3

            def grown() -> bool:
                return len(_status()["deployments"]["target"]["replicas"]) == 2

            assert eventually(started, 90.0), _status()  # a look at it costs no process
            assert eventually(grown, 90.0), _status()

        with pytest.raises(serving.ClusterError, match="up already"):
            local.up(path)
    finally:
        down = _call("down()")
    assert down["stopped"]
    assert eventually(lambda: not any(map(_alive, [*pids, up["pid"]])))
    assert local.status() == {
        "running": False, "gateway": None, "http": None, "sessions": 0, "deployments": {},
    }  # fmt: skip
    assert local.down()["stopped"] is False  # nothing runs: not an error


def test_up_refuses_a_busy_port(own_cache: Path, tmp_path: Path, busy_port: int) -> None:
    path = _config(tmp_path, busy_port)
    with pytest.raises(serving.ClusterPortInUse) as caught:
        local.up(path)
    for part in ("gateway.grpc_port", str(busy_port), str(path), "0 picks a free one"):
        assert part in str(caught.value)
    with pytest.raises(serving.ClusterPortInUse, match=f"gateway.http_port: 127.0.0.1:{busy_port}"):
        local.up(path, port=0, http_port=busy_port)


def test_up_names_what_is_wrong_in_the_file(own_cache: Path, tmp_path: Path) -> None:
    path = _config(tmp_path, -1)
    with pytest.raises(InvalidArgument) as caught:
        local.up(path)
    assert caught.value.field == "gateway.grpc_port"


@pytest.mark.slow
def test_gateway_says_so_when_its_port_is_taken(ray_cluster: None, busy_port: int) -> None:
    """On another node than where `up` looked, the replica itself finds out."""
    from ray import serve

    file = config_file("colocated", "test-busy-port", busy_port)
    try:
        with pytest.raises(serving.ClusterError, match=f"port {busy_port} is in use"):
            serving.deploy(file, lambda line: None)
    finally:
        serve.delete("test-busy-port")


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_says_so(ray_cluster: None, tmp_path: Path) -> None:
    from ray import serve

    (tmp_path / "model").mkdir()
    file = config_file("colocated", "test-no-model", 0).with_args(
        {"model": {"target": str(tmp_path / "model")}, "speculation": {"method": "ar"}}
    )
    try:
        with pytest.raises(serving.ClusterError, match=str(tmp_path / "model")):
            serving.deploy(file, lambda line: None)
    finally:
        serve.delete("test-no-model")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2", pytest.param("demo", marks=pytest.mark.nightly)])
def test_demo(model: str) -> None:
    options = ["--model", model, "--max-tokens", "48"]
    if model == "demo":
        options += ["--length", "fixed"]  # drafts, however busy the machine is
    command = [sys.executable, "-m", "paceline.cluster.cli", "demo", *options]
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "120"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert result.returncode == 0, result.stderr
    assert "legend" in result.stdout
    if model == "smollm2":
        assert "capital of France is Paris" in result.stdout.replace("«", "").replace("»", "")
    assert "«" in result.stdout.split("legend")[1].split("\n", 1)[1]  # something was accepted
    rows = {
        line.split("│")[1].strip(): line.split("│")[-2].strip()
        for line in result.stdout.splitlines()
        if line.count("│") > 2
    }
    assert rows["tokens identical to AR"] == "yes"
    assert float(rows["mean accepted length"]) > 1
    assert 0 < float(rows["acceptance rate"]) <= 1
    assert float(rows["tokens/s with drafts"]) > 0
    assert float(rows["tokens/s AR"]) > 0
    processes = [int(rows[name]) for name in rows if name.endswith("actor, process")]
    assert len(set(processes)) == (1 if model == "smollm2" else 2)
    assert eventually(lambda: not any(map(_alive, processes)))


@pytest.mark.nightly
def test_demo_cleans_up_after_ctrl_c() -> None:
    command = [sys.executable, "-m", "paceline.cluster.cli", "demo", "--model", "demo"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # we may ignore it
    )  # fmt: skip
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if "loading" in line:
            break
    else:
        pytest.fail(f"the demo ended with code {process.wait()} before it loaded: {said}")
    children = _descendants(process.pid)
    assert len(children) > 3  # Ray's own processes and the replicas
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert eventually(lambda: not any(map(_alive, children)), 20.0)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _descendants(pid: int) -> list[int]:
    listing = subprocess.run(
        ["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    parents = [tuple(map(int, line.split())) for line in listing.splitlines()]
    found = [pid]
    for parent in found:
        found += [child for child, of in parents if of == parent]
    return found[1:]
