"""`paceline up`, `down` and `status`: a deployment on this machine or on a running cluster.

Without an address, ``up`` runs `ray start --head` on loopback, with dashboard and job server behind
a token, and ``down`` ends that process, which ends what it started and no other Ray. Here is what
Ray does not do: find what is up, show what is missing, and give up when nothing comes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from paceline.cache import cache_folder
from paceline.cluster.cli_output import model_to_show
from paceline.deployments.config import (
    CONFIGS_DIR,
    IMPORT_PATH,
    POLICY_FUNCTION,
    ConfigFile,
    read_config_file,
)
from paceline.errors import PacelineError

DEMO_CONFIG = CONFIGS_DIR / "demo.yaml"
CONFIGS = {"smollm2": CONFIGS_DIR / "smollm2.yaml", "demo": DEMO_CONFIG}
"""Config files by the model that they deploy."""
STALL_S = 180.0
"""A start is given up when nothing has changed, and nothing computed, for so long."""
NODE_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 45.0
STATUS_TIMEOUT_S = 10.0
_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum is 75 MiB; nothing here stores objects
_POLL_S = 0.2
_REPEAT_S = 30.0  # a line about what a start waits for is shown again
_WORKING = 0.05  # of a CPU; a replica that waits for nothing uses a tenth of that
# Errors whose text is enough; a message about another error begins with its class.
_SPEAKING = {"InvalidArgument", "ModelNotFound", "TokenizerMismatch", "PortInUse"}

Report = Callable[[str], None]
"""Shows the user a line when a new stage begins."""


class ClusterError(PacelineError, RuntimeError):
    """A deployment cannot be started, found or stopped."""


class ClusterPortInUse(ClusterError):
    """Another process listens on the gateway's port."""


# --- Ray ------------------------------------------------------------------------------------------


def prepare_environment(token: str | None = None) -> None:
    """Set the variables that Ray reads when it is imported; keep those that the user has set.

    Args:
        token: for a Ray that this process starts. It listens on loopback where it can, but Serve's
            replicas open a port on all interfaces, which refuses callers without the token.
    """
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",  # send no usage reports
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # busy machines take longer than 5 s
        "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2",  # the same, for 0.1 s
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    if token is not None and "ray" not in sys.modules:
        settings |= _LOOPBACK
        if "RAY_AUTH_MODE" not in os.environ:
            settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    for name, value in settings.items():
        os.environ.setdefault(name, value)


_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # instead of the machine's address


def _wanted(file: ConfigFile) -> tuple[int, dict[str, float]]:
    """The CPUs and custom resources of all replicas of a file.

    They are only labels here: with fewer of them some replicas would wait for ever.
    """
    wanted: defaultdict[str, float] = defaultdict(float)
    for role in file.config.roles:
        for name, amount in {"CPU": role.num_cpus, **role.resources}.items():
            wanted[name] += role.max_replicas * amount
    return math.ceil(wanted.pop("CPU")), dict(wanted)


def start_ray(file: ConfigFile) -> str:
    """Start a Ray that ends with this process; returns its address.

    For the demo and measurements: it takes no jobs, and starts sooner than :func:`_start_node`.
    """
    prepare_environment(secrets.token_hex(32))
    import ray

    num_cpus, resources = _wanted(file)
    context = ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, num_cpus),
        resources=resources,
        include_dashboard=file.autoscaling_policy is not None,  # such a file goes through it
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    return str(context.address_info["gcs_address"])


def join_ray(address: str) -> str:
    """Connect to a running Ray (HOST:PORT or auto).

    Raises:
        ClusterError: no Ray answers there.
    """
    prepare_environment()
    import ray

    if ray.is_initialized():
        joined = str(ray.get_runtime_context().gcs_address)
        if address not in ("auto", joined):
            raise ClusterError(f"this process has joined the Ray at {joined}, not at {address}")
        return joined
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ClusterError(f"cannot join the Ray cluster at {address!r}: {reason}") from error
    return str(ray.get_runtime_context().gcs_address)


# --- the kernels ----------------------------------------------------------------------------------


@contextlib.contextmanager
def building_kernels(file: ConfigFile) -> Iterator[Callable[[], bool]]:
    """Compile the C kernels in another process while Ray and the replicas start.

    Only the first start on a machine compiles them, which may take as long as the rest of the
    start. A replica that needs them earlier waits for that process.

    Yields:
        A function that tells whether they are still being compiled.
    """
    if file.config.engine != "paceline":
        yield lambda: False
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.models.kernels"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield lambda: process.poll() is None
    finally:
        process.terminate()
        process.wait()


# --- an application on it -------------------------------------------------------------------------


def check_ports(file: ConfigFile) -> None:
    """Raise PortInUse if a port of the gateway is taken on this machine."""
    gateway = file.config.gateway
    for key, port in (("grpc_port", gateway.grpc_port), ("http_port", gateway.http_port)):
        if not port:
            continue  # a free one, or none
        family = socket.AF_INET6 if ":" in gateway.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((gateway.host, port))
                probe.listen(1)
            except OSError as error:
                raise ClusterPortInUse(
                    f"gateway.{key}: {gateway.host}:{port} cannot be used ({error.strerror}); stop "
                    f"what listens there, or choose another port in {file.path} (gateway: {key}: "
                    "N, 0 picks a free one)"
                ) from None


def _quiet_serve() -> None:
    """Silence Serve's log: our own stages and errors say the same better."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)


def start_serve(file: ConfigFile) -> None:
    """Start Serve's controller unless it runs already."""
    from ray import serve

    _quiet_serve()
    serve.start(
        proxy_location=file.proxy_location,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )


def deploy(
    file: ConfigFile,
    report: Report,
    stall_s: float = STALL_S,
    compiling: Callable[[], bool] = lambda: False,
    node: int | None = None,
) -> None:
    """Deploy the application of ``file`` on the Ray that this process has joined.

    Returns when every replica is ready.

    Args:
        stall_s: how long nothing may happen before the start is given up.
        compiling: tells whether the kernels that replicas need are still being compiled.
        node: process of this machine whose descendants the replicas are; None: of other machines.

    Raises:
        ClusterError: a replica does not start, or nothing happens; the message says why.
    """
    from ray import serve

    report("starting Ray Serve")
    start_serve(file)
    _run(file)
    progress = _Progress(stall_s, node)
    shown, shown_at = "", 0.0
    while True:
        application = serve.status().applications[file.name]
        if application.status == "RUNNING":
            return
        waiting = {n: d for n, d in application.deployments.items() if d.status != "HEALTHY"}
        states = [f"{n}: {d.status.value} {d.message}".strip() for n, d in waiting.items()]
        busy = compiling()  # the compiler has its own time limit
        problem = ""
        if application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            messages = [deployment.message for deployment in waiting.values()]
            problem = _reason("\n".join([application.message, *messages]))
        elif not progress.goes_on([application.message, *states], busy):
            problem = f"nothing has happened for {stall_s:g} s: {'; '.join(states)}"
        if problem:
            serve.delete(file.name)
            raise ClusterError(f"{file.path}: {problem}")
        line = "loading " + ", ".join(waiting)
        if busy:
            line += "; compiling the kernels for this processor, once"
        for deployment in waiting.values():
            line += "".join(f"; {text}" for text in deployment.message.splitlines()[:1])
        if waiting and (line != shown or time.monotonic() - shown_at > _REPEAT_S):
            report(line)
            shown, shown_at = line, time.monotonic()
        time.sleep(_POLL_S)


class _Progress:
    """Whether a start gets anywhere: its state changes, or its processes compute.

    Args:
        stall_s: how long neither may be so.
        node: process whose descendants are Ray's; None: only the state counts.
    """

    def __init__(self, stall_s: float, node: int | None) -> None:
        self._stall_s, self._node = stall_s, node
        self._state: object = None
        self._since, self._cpu_s = time.monotonic(), self._used_s()

    def goes_on(self, state: object, busy: bool = False) -> bool:
        """``state``: what the start waits for now; ``busy``: it is known to get on."""
        elapsed = time.monotonic() - self._since
        if state == self._state and not busy:
            if elapsed < self._stall_s:
                return True
            if self._used_s() - self._cpu_s < _WORKING * elapsed:
                return False
        self._state = state
        self._since, self._cpu_s = time.monotonic(), self._used_s()
        return True

    def _used_s(self) -> float:
        return 0.0 if self._node is None else _worker_cpu_s(self._node)


def _worker_cpu_s(node: int) -> float:
    """CPU time of the workers among the descendants of a process, without Serve's own actors."""
    parents, used = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            pid = int(folder.name)
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[pid] = int(fields[1])
            name = (folder / "cmdline").read_text()
            if name.startswith("ray::ServeReplica") or "default_worker.py" in name:
                used[pid] = int(fields[11]) + int(fields[12])

    def descends(pid: int) -> bool:
        while pid and pid != node:
            pid = parents.get(pid, 0)
        return pid == node

    return sum(ticks for pid, ticks in used.items() if descends(pid)) / os.sysconf("SC_CLK_TCK")


def _run(file: ConfigFile) -> None:
    """Give the application to Serve's controller.

    Serve takes an application's autoscaling policy only from `serve deploy`, whose file describes
    all applications that Serve runs.
    """
    from ray import serve

    policy = file.autoscaling_policy
    if policy is None:
        from paceline.deployments.app import build

        target = serve.RunTarget(build(file.args), name=file.name, route_prefix=file.route_prefix)
        serve.run_many(
            [target], wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )  # fmt: skip
        return
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    others = serve.status().applications.keys() - {file.name}
    if others:
        raise ClusterError(
            f"{file.path}: autoscaling_policy takes a Ray Serve of its own, and this one runs "
            f"{', '.join(sorted(others))}: `serve deploy` a file with all of them, or leave it out"
        )
    application = {
        "name": file.name, "import_path": IMPORT_PATH, "route_prefix": file.route_prefix,
        # The paths are absolute, because a process of Ray builds the application.
        "args": file.config.model_dump(mode="json", exclude_unset=True),
        "autoscaling_policy": {
            "policy_function": POLICY_FUNCTION, "policy_kwargs": policy.model_dump(),
        },
    }  # fmt: skip
    dashboard = _dashboard()
    if dashboard is None:
        raise ClusterError(f"{file.path}: autoscaling_policy takes a Ray with a dashboard")
    ServeSubmissionClient(dashboard).deploy_applications(
        {"proxy_location": file.proxy_location, "applications": [application]}
    )


def _dashboard() -> str | None:
    """URL of the dashboard of the Ray that this process has joined, which takes jobs as well."""
    import ray

    url = ray.init(ignore_reinit_error=True, logging_level=logging.ERROR).dashboard_url
    return f"http://{url}" if url else None


def _deployment_states(app: str) -> dict[str, tuple[str, str]]:
    """State and message of each deployment."""
    from ray import serve

    application = serve.status().applications.get(app)
    if application is None:
        return {}
    return {
        name: (str(deployment.status.value), deployment.message)
        for name, deployment in application.deployments.items()
    }


def _reason(message: str) -> str:
    """The last line of a replica's traceback: its error."""
    errors = re.findall(r"^(?:[\w.]+\.)?([A-Z]\w*): (.+)$", message, re.MULTILINE)
    if not errors:
        return " ".join(message.split()) or "no reason given"
    kind, text = errors[-1]
    return text if kind in _SPEAKING else f"{kind}: {text}"


def describe(app: str) -> dict[str, Any]:
    """The deployments with their replicas, the gateway's address and the number of sessions.

    This process must have joined the Ray that runs ``app``.
    """
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    _quiet_serve()
    deployments: dict[str, Any] = {}
    for name, (state, message) in _deployment_states(app).items():
        replicas: list[dict[str, Any]] = []
        # The deployment may have no replica, or one that died and is still listed.
        with contextlib.suppress(RayError, RayServeException, TimeoutError):
            handle = serve.get_deployment_handle(name, app)
            replicas = handle.broadcast("status").results(timeout_s=STATUS_TIMEOUT_S)
        deployments[name] = {"state": state, "message": message, "replicas": replicas}

    def field(name: str, key: str) -> list[Any]:
        return [replica[key] for replica in deployments.get(name, {}).get("replicas", [])]

    return {
        "running": bool(deployments),
        "ready": bool(deployments) and all(d["state"] == "HEALTHY" for d in deployments.values()),
        "gateway": next(iter(field("gateway", "address")), None),
        "http": next(iter(field("gateway", "http")), None),
        "sessions": sum(field("target", "sessions")),
        "deployments": deployments,
    }


def _metrics() -> list[str]:
    from paceline.deployments.scrape import metrics_addresses

    return metrics_addresses()


def write_observability(result: dict[str, Any]) -> dict[str, str]:
    """Write a scrape config and the dashboard for what :func:`up` returned; returns their paths."""
    from paceline.deployments.dashboard import write_observability as write

    return write(state_folder() / "observability", result.get("metrics") or [])


@contextlib.contextmanager
def deployed(file: ConfigFile, *, report: Report = lambda line: None) -> Iterator[dict[str, Any]]:
    """Start a Ray and a deployment, yield what :func:`describe` returns, and stop both at the end.

    Raises:
        ClusterError: as :func:`deploy`; PortInUse.
    """
    check_ports(file)
    report("starting Ray")
    with building_kernels(file) as compiling:
        try:
            ray_address = start_ray(file)
            deploy(file, report, compiling=compiling, node=os.getpid())
            described = describe(file.name)
            yield {**described, "ray_address": ray_address, "metrics": _metrics()}
        finally:
            _take_down(file.name)


def _take_down(app: str) -> None:
    """Drain and delete the application, and leave Ray, or stop it if this process started it."""
    import ray
    from ray import serve

    if not ray.is_initialized():
        return
    _quiet_serve()
    with contextlib.suppress(Exception):  # there is none if Serve never started
        serve.delete(app)
    ray.shutdown()


# --- what is up on this machine -------------------------------------------------------------------


def state_folder() -> Path:
    """Folder of the files of the running deployment."""
    return cache_folder("local")


@dataclass(frozen=True)
class _State:
    """The files that :func:`up` writes for the other commands.

    A starting `up` and the `ray start` that it leaves behind hold a lock each while they live. So
    the commands can tell them from what a crash left, and from a process id that was given again.
    """

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "state.json"

    @property
    def log(self) -> Path:
        return self.folder / "ray.log"

    @property
    def token(self) -> Path:
        """What callers of our Ray show to it. It stays, so that a shell can keep its variables."""
        return self.folder / "auth_token"

    @property
    def variables(self) -> Path:
        """What a shell reads to reach our Ray with `ray` and `serve`."""
        return self.folder / "ray.env"

    def read(self) -> dict[str, Any]:
        try:
            value = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def write(self, **values: Any) -> None:
        scratch = self.file.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(values))
        scratch.replace(self.file)

    def clear(self) -> None:
        for path in (self.file, self.variables):
            path.unlink(missing_ok=True)

    def lock(self, name: str) -> IO[str] | None:
        """Hold the lock ``up`` or ``ray``; None if another process does.

        It is free when the file is closed here and in all processes that were given it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = (self.folder / f"{name}.lock").open("a")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.close()
            return None
        return handle

    def held(self, name: str) -> bool:
        """Whether a living process holds the lock."""
        handle = self.lock(name)
        if handle is None:
            return True
        handle.close()
        return False

    def wait_for(self, name: str, timeout_s: float) -> None:
        """Wait until the lock is free, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while self.held(name) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def is_up(self, known: Mapping[str, Any]) -> bool:
        """Whether what :meth:`read` returned is a deployment that can be asked."""
        return bool(known.get("gateway")) and bool(known.get("address") or self.held("ray"))


def _use_token(state: _State) -> None:
    """Let this process and those it starts authenticate to our own Ray.

    The token is in a file that its owner alone can read, never in an argument or a variable.
    """
    os.environ.update(_LOOPBACK)
    if os.environ.setdefault("RAY_AUTH_MODE", "token") != "token":
        return  # the user has switched it off
    os.environ.pop("RAY_AUTH_TOKEN", None)  # of another Ray; it would be preferred
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(state.token)
    state.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(state.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32))


def _write_variables(state: _State, ray_address: str, dashboard: str) -> None:
    """Write what a shell reads to reach our Ray with `ray` and `serve`."""
    values = {"RAY_ADDRESS": ray_address, "RAY_DASHBOARD_ADDRESS": dashboard, **_LOOPBACK}
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        if name in os.environ:
            values[name] = os.environ[name]
    lines = [f"export {name}={shlex.quote(value)}" for name, value in values.items()]
    # Ray would prefer it to the path, and it is that of another Ray.
    state.variables.write_text("\n".join(["unset RAY_AUTH_TOKEN", *lines, ""]))


# --- our own Ray ----------------------------------------------------------------------------------


def _start_node(file: ConfigFile, state: _State) -> dict[str, Any]:
    """Run `ray start --head` until `down`; returns its process id, address and temporary folder.

    The system and Ray choose the ports, so that it runs beside other Rays.

    Raises:
        ClusterError: it does not start; the message has the last line of its log.
    """
    prepare_environment()
    num_cpus, resources = _wanted(file)
    folder = tempfile.mkdtemp(prefix="paceline-", dir=os.environ.get("RAY_TMPDIR"))
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        "--node-ip-address=127.0.0.1", "--port=0", "--dashboard-host=127.0.0.1",
        "--include-dashboard=true", "--dashboard-agent-listen-port=0",
        f"--ray-client-server-port={_free_port()}", f"--temp-dir={folder}",
        # Replicas reserve the labels that they want, and jobs find the machine's CPUs.
        f"--num-cpus={(os.cpu_count() or 1) + num_cpus}", f"--resources={json.dumps(resources)}",
    ]  # fmt: skip
    environment = {
        **os.environ,
        # Busy machines may take minutes for what Ray gives up after one.
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": f"{NODE_TIMEOUT_S:.0f}",
        "RAY_worker_register_timeout_seconds": f"{NODE_TIMEOUT_S:.0f}",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # the application is gone by then
    }  # fmt: skip
    lock = state.lock("ray")
    if lock is None:
        raise ClusterError(f"another process holds {state.folder}/ray.lock: end it")
    with lock, state.log.open("w") as log:
        process = subprocess.Popen(
            command, env=environment, start_new_session=True, pass_fds=[lock.fileno()],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    node = {"pid": process.pid, "temp_dir": folder}
    state.write(**node)
    record = Path(folder, "ray_current_cluster")  # written when all of it runs
    deadline = time.monotonic() + NODE_TIMEOUT_S
    while True:
        ended = process.poll() is not None
        with contextlib.suppress(OSError):
            if address := record.read_text().strip():
                return {**node, "ray_address": address}
        if ended or time.monotonic() > deadline:
            reason = f"it ended with code {process.returncode}" if ended else "it takes too long"
            lines = [line.strip() for line in state.log.read_text().splitlines() if line.strip()]
            raise ClusterError(f"Ray does not start: {[reason, *lines][-1]} (log: {state.log})")
        time.sleep(_POLL_S)


def _free_port() -> int:
    """For what Ray cannot choose a port itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _stop_node(state: _State) -> None:
    """End the `ray start` that the state file names, and all that it started.

    Raises:
        ClusterError: it does not end.
    """
    known = state.read()
    if "temp_dir" not in known:
        return
    for end, number in ((os.kill, signal.SIGTERM), (os.killpg, signal.SIGKILL)):
        if state.held("ray"):
            end(known["pid"], number)
            state.wait_for("ray", STOP_TIMEOUT_S)
    if state.held("ray"):
        raise ClusterError(f"process {known['pid']} does not end; its log is {state.log}")
    shutil.rmtree(known["temp_dir"], ignore_errors=True)


@contextlib.contextmanager
def _joined(address: str) -> Iterator[str]:
    """Join a Ray for as long as the block runs; yields its address."""
    import ray

    before = ray.is_initialized()
    address = join_ray(address)
    try:
        yield address
    finally:
        if not before:
            ray.shutdown()


@contextlib.contextmanager
def _joined_again(state: _State, known: Mapping[str, Any]) -> Iterator[None]:
    """Join the Ray of the state file for as long as the block runs."""
    if not known["address"]:
        _use_token(state)
    prepare_environment()
    with _joined(known["ray_address"]):
        yield


def _load(config_path: str | Path, ports: dict[str, int]) -> ConfigFile:
    file = read_config_file(config_path)
    return file.with_args({"gateway": ports}) if ports else file


def up(
    config_path: str | Path | None = None,
    *,
    address: str | None = None,
    port: int | None = None,
    http_port: int | None = None,
    detach: bool = True,
    observability: bool = False,
) -> dict[str, Any]:
    """Deploy a config file and wait until it is ready.

    Args:
        config_path: None: SmolLM2 as two actors, or the demo pair if SmolLM2 cannot be downloaded
            or the deployment joins a cluster, whose nodes may not have it.
        address: of a Ray cluster to join; None: ``RAY_ADDRESS``, else a local Ray.
        port, http_port: instead of the file's ``gateway.grpc_port`` and ``gateway.http_port``.
        detach: True returns when all is ready, and the deployment runs until :func:`down`; False
            stops it at Ctrl-C or SIGTERM and then returns.
        observability: also write a Prometheus scrape config and the Grafana dashboard.

    Returns:
        As :func:`status`.

    Raises:
        InvalidArgument, ModelNotFound: the file is wrong.
        PortInUse, ClusterError: the deployment does not start; the message says why.
    """
    given = {"grpc_port": port, "http_port": http_port}
    ports = {key: value for key, value in given.items() if value is not None}
    state = _State(state_folder())
    if os.environ.get("RAY_AUTH_TOKEN_PATH") != str(state.token):  # else a shell has `variables`
        address = address or os.environ.get("RAY_ADDRESS") or None
    if config_path is None:
        config_path = CONFIGS[model_to_show()] if address is None else DEMO_CONFIG
    file = _load(config_path, ports)
    lock = state.lock("up")
    if lock is None:
        raise ClusterError("another `paceline up` is starting: wait for it, or `paceline down`")
    with lock, _interruptible():
        lock.truncate(0)
        print(os.getpid(), file=lock, flush=True)  # for `down`
        known = state.read()
        if state.is_up(known):
            raise ClusterError(
                f"{known['config']} is up already, with its gateway at {known['gateway']}: "
                "`paceline down` stops it"
            )
        with showing_progress() as report:
            if state.held("ray"):
                report("stopping what an interrupted start has left")
            if known:
                _stop_node(state)
                state.clear()
            if address is None:
                check_ports(file)
                file.config.with_local_models()  # here the user sees a download's progress
            try:
                result = _bring_up(file, address, state, report)
            except BaseException:
                with contextlib.suppress(ClusterError):  # the first error says more
                    _stop_node(state)
                state.clear()
                raise
        console = Console(stderr=True)
        _announce(console, state, result, observability)
    if not detach:
        try:
            _wait_for_signal(console, lambda: state.is_up(state.read()))
        finally:
            down()
        return {**result, "running": False}
    return result


def _bring_up(
    file: ConfigFile, address: str | None, state: _State, report: Report
) -> dict[str, Any]:
    """Start or join Ray, deploy, and write the state file."""
    known: dict[str, Any] = {"config": str(file.path), "app": file.name, "address": address}
    with contextlib.ExitStack() as stack:
        compiling = _never
        if address is None:
            report("starting Ray")
            compiling = stack.enter_context(building_kernels(file))
            _use_token(state)
            known |= _start_node(file, state)
        else:
            report("joining Ray")
            prepare_environment()
            known["ray_address"] = address
        known["ray_address"] = stack.enter_context(_joined(known["ray_address"]))
        deploy(file, report, compiling=compiling, node=known.get("pid"))
        known |= {"dashboard": _dashboard(), **describe(file.name), "metrics": _metrics()}
    state.write(**known)
    if address is None:
        _write_variables(state, known["ray_address"], known["dashboard"])
    return known


def _never() -> bool:
    return False


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that it can stop what it has started."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _announce(console: Console, state: _State, result: dict[str, Any], observability: bool) -> None:
    http = f" and [bold]{result['http']}/v1[/] (HTTP)" if result.get("http") else ""
    console.print(
        f"[bold green]ready[/] at [bold]{result['gateway']}[/] (gRPC){http}", highlight=False
    )
    if http:
        console.print(f"  {'page':<8} {result['http']}/", highlight=False)
    for name, deployment in result["deployments"].items():
        for replica in deployment["replicas"]:
            console.print(
                f"  {name:<8} process {replica['pid']:<8} {replica['address']}", highlight=False
            )
    if state.variables.exists():
        console.print(f"  dashboard {result['dashboard']}/", highlight=False)
        console.print(
            f"  for `ray job submit`, `serve status`:  . {shlex.quote(str(state.variables))}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if observability:
        result["observability"] = files = write_observability(result)
        for address in result["metrics"]:
            console.print(f"  metrics  http://{address}/metrics", highlight=False)
        for name in ("prometheus", "dashboard"):
            console.print(f"  {name:<10} {files[name]}", highlight=False, soft_wrap=True)


def _wait_for_signal(console: Console, is_up: Callable[[], bool]) -> None:
    """Wait for Ctrl-C or SIGTERM, or until another process has stopped the deployment."""
    console.print("Ctrl-C stops it")
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        # A signal that a thread of Ray takes does not wake this one, so wake up and look.
        while not stop.wait(0.5) and is_up():
            pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def down() -> dict[str, Any]:
    """Stop what :func:`up` started; it is no error if nothing runs.

    Returns:
        ``{"stopped": bool, "gateway": address or None}``.

    Raises:
        ClusterError: it does not stop, or the cluster that it joined does not answer.
    """
    state = _State(state_folder())
    starting = state.held("up")
    with showing_progress() as report:
        if starting:
            report("interrupting `paceline up`")
            with contextlib.suppress(ProcessLookupError):
                os.kill(int((state.folder / "up.lock").read_text()), signal.SIGTERM)
            state.wait_for("up", 2 * STOP_TIMEOUT_S)
        known = state.read()
        stopped = starting or state.is_up(known) or state.held("ray")
        if state.is_up(known):
            report("removing the application")
            try:
                with _joined_again(state, known):
                    _take_down(known["app"])
            except ClusterError:
                if known["address"]:
                    raise
                # our own Ray does not answer; it is ended all the same
            finally:  # even if the cluster is gone, and the application with it
                if known["address"]:
                    state.clear()
        report("stopping Ray")
        _stop_node(state)
    state.clear()
    return {"stopped": stopped, "gateway": known.get("gateway")}


def status() -> dict[str, Any]:
    """What runs: deployments, replicas with process ids and addresses, sessions.

    Returns:
        ``{"running": False, ...}`` if nothing runs.

    Raises:
        ClusterError: a deployment should run, but Ray does not answer.
    """
    state = _State(state_folder())
    known = state.read()
    if not state.is_up(known):
        nothing: dict[str, Any] = {
            "running": False,
            "gateway": None,
            "http": None,
            "sessions": 0,
            "deployments": {},
        }
        return nothing
    with showing_progress() as report:
        report("connecting to Ray")
        with _joined_again(state, known):
            fresh = describe(known["app"])
    keep = ("config", "app", "pid", "address", "ray_address", "dashboard")
    return {**{key: known[key] for key in keep if key in known}, **fresh}


@contextlib.contextmanager
def showing_progress(show: bool = True) -> Iterator[Report]:
    """Show the current stage and the time with a spinner, on standard error.

    If that is no terminal, each stage is a line with the seconds since the start.
    """
    console = Console(stderr=True, quiet=not show)
    if not console.is_terminal:
        started = time.monotonic()

        def print_line(line: str) -> None:
            if line:
                console.print(f"{time.monotonic() - started:5.1f} s  {line}", highlight=False)

        yield print_line
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def report(line: str) -> None:
            if line:
                progress.update(task, description=line)
            else:
                progress.stop()

        yield report
