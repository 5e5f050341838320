"""`paceline up`, `down` and `status`: a deployment on this machine or on a running cluster.

Without an address, ``up`` starts a Ray that listens on loopback only, in a background process that
lives as long as the deployment. ``down`` asks that process to end, which stops all that it started
and nothing else.
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
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from paceline.cache import cache_folder
from paceline.cluster.cli_options import TOKEN_VARIABLE
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
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 45.0
STATUS_TIMEOUT_S = 10.0
_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum is 75 MiB; nothing here stores objects
_POLL_S = 0.2
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
        token: for a Ray that Paceline starts. It listens on loopback where it can, but Serve's
            replicas open a port on all interfaces, which refuses callers without the token.
    """
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",  # send no usage reports
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # busy machines take longer than 5 s
        "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2",  # the same, for 0.1 s
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    if token is not None and "ray" not in sys.modules:
        settings["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # loopback, not the machine's address
        if "RAY_AUTH_MODE" not in os.environ:
            settings |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def start_ray(file: ConfigFile) -> str:
    """Start a Ray that ends with this process; returns its address."""
    prepare_environment(secrets.token_hex(32))
    import ray

    # CPUs and custom resources are only labels here: with fewer of them than the file asks
    # for, some replicas would wait for ever.
    wanted: defaultdict[str, float] = defaultdict(float)
    for role in file.config.roles:
        for name, amount in {"CPU": role.num_cpus, **role.resources}.items():
            wanted[name] += role.max_replicas * amount
    # Its processes would inherit the token of a client, and dump it with their environment.
    token = os.environ.pop(TOKEN_VARIABLE, None)
    try:
        context = ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, math.ceil(wanted.pop("CPU"))),
            resources=dict(wanted),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    finally:
        if token is not None:
            os.environ[TOKEN_VARIABLE] = token
    return str(context.address_info["gcs_address"])


def join_ray(address: str, token: str | None = None) -> str:
    """Connect to a running Ray (HOST:PORT or auto); ``token`` if Paceline started it.

    Raises:
        ClusterError: no Ray answers there.
    """
    prepare_environment(token)
    import ray

    if ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
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
    timeout_s: float = START_TIMEOUT_S,
    compiling: Callable[[], bool] | None = None,
) -> None:
    """Deploy the application of ``file`` on the Ray that this process has joined.

    Returns when every replica is ready.

    Args:
        compiling: tells whether the kernels that replicas need are still being compiled.

    Raises:
        ClusterError: a replica does not start, or not in time; the message says why.
    """
    from ray import serve

    report("starting Ray Serve")
    start_serve(file)
    _run(file)
    deadline = time.monotonic() + timeout_s
    seen = ""
    while True:
        application = serve.status().applications[file.name]
        if application.status == "RUNNING":
            return
        waiting = {n: d for n, d in application.deployments.items() if d.status != "HEALTHY"}
        problem = ""
        if application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            messages = [deployment.message for deployment in waiting.values()]
            problem = _reason("\n".join([application.message, *messages]))
        elif time.monotonic() > deadline:
            states = [f"{n}: {d.status.value} {d.message}".strip() for n, d in waiting.items()]
            problem = f"not ready after {timeout_s:g} s: {'; '.join(states)}"
        if problem:
            serve.delete(file.name)
            raise ClusterError(f"{file.path}: {problem}")
        line = "loading " + ", ".join(waiting)
        if compiling is not None and compiling():
            deadline = time.monotonic() + timeout_s  # the compiler has its own time limit
            line += "; compiling the kernels for this processor, once"
        if waiting and line != seen:
            report(line)
            seen = line
        time.sleep(_POLL_S)


def _run(file: ConfigFile) -> None:
    """Give the application to Serve's controller.

    Serve takes an application's autoscaling policy only from config files, and such a file
    describes all applications that Serve runs.
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
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

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
    schema = ServeDeploySchema.model_validate(
        {"proxy_location": file.proxy_location, "applications": [application]}
    )
    _get_global_client().deploy_apps(schema)


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
def deployed(
    file: ConfigFile, *, address: str | None = None, report: Report = lambda line: None
) -> Iterator[dict[str, Any]]:
    """Start a deployment, yield what :func:`describe` returns, and stop it at the end.

    Args:
        address: of a Ray to join; None starts one.

    Raises:
        ClusterError: as :func:`deploy`; PortInUse.
    """
    if address is None:
        check_ports(file)  # on other machines only the gateway can tell
    report("joining Ray" if address else "starting Ray")
    with contextlib.ExitStack() as stack:
        compiling = None if address else stack.enter_context(building_kernels(file))
        try:
            ray_address = join_ray(address) if address else start_ray(file)
            deploy(file, report, compiling=compiling)
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
    """Folder of the state file of the running deployment."""
    return cache_folder("local")


@dataclass(frozen=True)
class _State:
    """The state file, which :func:`up` writes for the other commands.

    The process that owns a Ray holds a lock while it lives. So the commands can tell a running
    deployment from a file that a crash left behind, or a process id that was given again.
    """

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "state.json"

    @property
    def log(self) -> Path:
        return self.folder / "up.log"

    def read(self) -> dict[str, Any]:
        try:
            value = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def write(self, **values: Any) -> None:
        scratch = self.file.with_suffix(f".{os.getpid()}")
        with self._open(scratch) as file:  # it holds Ray's token
            file.write(json.dumps(values))
        scratch.replace(self.file)

    def open_log(self) -> IO[str]:
        return self._open(self.log)

    def _open(self, path: Path) -> IO[str]:
        """An empty file that only its owner can read."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # one that is there keeps its mode
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        return os.fdopen(handle, "w")

    def clear(self) -> None:
        self.file.unlink(missing_ok=True)

    def lock(self) -> IO[str] | None:
        """Become the owner; None if another process is. The lock ends with the process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = (self.folder / "lock").open("w")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.close()
            return None
        return handle

    @property
    def owned(self) -> bool:
        """Whether the process that owns the deployment lives."""
        handle = self.lock()
        if handle is None:
            return True
        handle.close()
        return False


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
    address = address or os.environ.get("RAY_ADDRESS") or None
    if config_path is None:
        config_path = CONFIGS[model_to_show()] if address is None else DEMO_CONFIG
    file = _load(config_path, ports)
    state = _State(state_folder())
    known = state.read()
    if known.get("gateway") and (known.get("address") or state.owned):
        raise ClusterError(
            f"{known['config']} is up already, with its gateway at {known['gateway']}: "
            "`paceline down` stops it"
        )
    if address is None:
        check_ports(file)
        file.config.with_local_models()  # here the user sees a download's progress
    with showing_progress() as report:
        if address is None and detach:
            result = _spawn(file, ports, state, report)
        elif address is None:
            return _own(file, state, report, observability)
        else:
            report("joining Ray")
            ray_address = join_ray(address)
            deploy(file, report)
            result = {
                "config": str(file.path), "app": file.name, "address": address,
                "ray_address": ray_address, **describe(file.name),
                "metrics": _metrics(),
            }  # fmt: skip
            state.write(**result)
    console = Console(stderr=True)
    _announce(console, result, observability)
    if not detach:
        try:
            _wait_for_signal(console)
        finally:
            down()
    return result


def _announce(console: Console, result: dict[str, Any], observability: bool) -> None:
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
    if observability:
        result["observability"] = files = write_observability(result)
        for address in result["metrics"]:
            console.print(f"  metrics  http://{address}/metrics", highlight=False)
        for name in ("prometheus", "dashboard"):
            console.print(f"  {name:<10} {files[name]}", highlight=False, soft_wrap=True)


def _wait_for_signal(console: Console) -> None:
    console.print("Ctrl-C stops it")
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        # A signal that a thread of Ray takes does not wake this one, so wake up and look.
        while not stop.wait(0.5):
            pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _own(
    file: ConfigFile, state: _State, report: Report, observability: bool = False
) -> dict[str, Any]:
    """Run Ray and the deployment in this process until a signal comes."""
    lock = state.lock()
    if lock is None:
        raise ClusterError("another `paceline up` is starting: wait for it, or `paceline down`")
    result: dict[str, Any] = {
        "config": str(file.path), "app": file.name, "address": None, "pid": os.getpid(),
    }  # fmt: skip

    def progress(line: str) -> None:
        state.write(**result, stage=line)
        report(line)

    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with deployed(file, report=progress) as described:
            result.update(described)
            state.write(**result, token=os.environ.get("RAY_AUTH_TOKEN"))
            report("")
            console = Console(stderr=True)
            _announce(console, result, observability)
            _wait_for_signal(console)
            report("stopping")
    except KeyboardInterrupt:
        raise ClusterError("stopped before it was ready") from None
    except PacelineError as error:
        state.write(error=str(error))
        raise
    else:
        state.clear()
        return {**result, "running": False}
    finally:
        signal.signal(signal.SIGTERM, before)
        lock.close()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _spawn(
    file: ConfigFile, ports: dict[str, int], state: _State, report: Report
) -> dict[str, Any]:
    """Run :func:`_own` in a process that outlives this one; returns when it is ready."""
    if state.owned:
        raise ClusterError("another `paceline up` is starting: wait for it, or `paceline down`")
    state.clear()
    module = [sys.executable, "-m", "paceline.cluster.local"]
    command = [*module, str(file.path.resolve()), json.dumps(ports)]
    with state.open_log() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    seen = ""
    try:
        while True:
            ended = process.poll() is not None
            known = state.read()
            if known.get("gateway"):
                known.pop("token", None)
                return known
            if ended:
                reason = known.get("error") or f"it ended with code {process.returncode}"
                raise ClusterError(f"{reason} (log: {state.log})")
            stage = known.get("stage", "")
            if stage != seen:
                report(stage)
                seen = stage
            time.sleep(_POLL_S)
    except BaseException:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        raise


def down() -> dict[str, Any]:
    """Stop what :func:`up` started; it is no error if nothing runs.

    Returns:
        ``{"stopped": bool, "gateway": address or None}``.

    Raises:
        ClusterError: it does not stop, or the cluster that it joined does not answer.
    """
    state = _State(state_folder())
    known = state.read()
    result = {"stopped": False, "gateway": known.get("gateway")}
    if known.get("address"):
        with showing_progress() as report:
            report("removing the application")
            state.clear()  # even if the cluster is gone, and the application with it
            join_ray(known["ray_address"])
            _take_down(known["app"])
        result["stopped"] = True
    elif known.get("pid") and state.owned:
        with showing_progress() as report:
            report("stopping replicas and Ray")
            os.kill(known["pid"], signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while state.owned:
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"process {known['pid']} does not stop; its log is {state.log}"
                    )
                time.sleep(_POLL_S)
        result["stopped"] = True
    state.clear()
    return result


def status() -> dict[str, Any]:
    """What runs: deployments, replicas with process ids and addresses, sessions.

    Returns:
        ``{"running": False, ...}`` if nothing runs.

    Raises:
        ClusterError: a deployment should run, but Ray does not answer.
    """
    state = _State(state_folder())
    known = state.read()
    if not known.get("gateway") or not (known.get("address") or state.owned):
        nothing: dict[str, Any] = {
            "running": False,
            "gateway": None,
            "http": None,
            "sessions": 0,
            "deployments": {},
        }
        if known.get("stage") and state.owned:
            nothing["stage"] = known["stage"]
        return nothing
    import_needed = "ray" not in sys.modules
    with showing_progress() as report:
        if import_needed:
            report("connecting to Ray")
        join_ray(known["ray_address"], known.get("token"))
        fresh = describe(known["app"])
    keep = ("config", "app", "pid", "address", "ray_address")
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


def main() -> None:
    """The background process of ``up``; its arguments are FILE and PORTS."""
    try:
        _own(_load(sys.argv[1], json.loads(sys.argv[2])), _State(state_folder()), lambda line: None)
    except PacelineError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
