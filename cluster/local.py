"""`paceline up`, `down` and `status`: a deployment on this machine or on a running cluster.

Without an address, ``up`` starts a Ray that goes on when the command ends (`local_ray.py`), and
``down`` ends it. Serve does the rest; here is what it does not: check ports and models before, show
what a start waits for, give up when nothing comes, and say why.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from paceline.cache import cache_folder
from paceline.cluster.cli_output import model_to_show
from paceline.cluster.local_ray import (
    STOP_TIMEOUT_S,
    ClusterError,
    LocalFiles,
    joined,
    joined_again,
    start_node,
    start_ray,
    stop_node,
    use_token,
    write_variables,
)
from paceline.deployments.config import (
    CONFIGS_DIR,
    IMPORT_PATH,
    POLICY_FUNCTION,
    ConfigFile,
    read_config_file,
)

DEMO_CONFIG = CONFIGS_DIR / "demo.yaml"
CONFIGS = {"smollm2": CONFIGS_DIR / "smollm2.yaml", "demo": DEMO_CONFIG}
"""Config files by the model that they deploy."""
STALL_S = 180.0
"""A start is given up when nothing has changed, and nothing computed, for so long."""
STATUS_TIMEOUT_S = 10.0
_POLL_S = 0.2
_REPEAT_S = 30.0  # a line about what a start waits for is shown again
_WORKING = 0.05  # of a CPU; a replica that waits for nothing uses a tenth of that
# Errors whose text is enough; a message about another error begins with its class.
_SPEAKING = {"InvalidArgument", "ModelNotFound", "TokenizerMismatch", "PortInUse"}

Report = Callable[[str], None]
"""Shows the user a line when a new stage begins."""


class ClusterPortInUse(ClusterError):
    """Another process listens on the gateway's port."""


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
    state = LocalFiles(state_folder())
    if os.environ.get("RAY_AUTH_TOKEN_PATH") != str(state.token):  # else a shell has `variables`
        address = address or os.environ.get("RAY_ADDRESS") or None
    if config_path is None:
        config_path = CONFIGS[model_to_show()] if address is None else DEMO_CONFIG
    file = _load(config_path, ports)
    lock = state.lock("up")
    if lock is None:
        raise ClusterError("another `paceline up` is starting: wait for it, or `paceline down`")
    console = Console(stderr=True)
    with _interruptible():
        with lock:
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
                stop_node(state)
                state.clear()
                try:
                    result = _bring_up(file, address, state, report)
                except BaseException:
                    with contextlib.suppress(ClusterError):  # the first error says more
                        stop_node(state)
                    state.clear()
                    raise
            _announce(console, state, result, observability)
        if detach:
            return result
        try:
            _wait_for_signal(console, lambda: state.is_up(state.read()))
        finally:
            down()
        return {**result, "running": False}


def _bring_up(
    file: ConfigFile, address: str | None, state: LocalFiles, report: Report
) -> dict[str, Any]:
    """Start or join Ray, deploy, and write the state file."""
    known: dict[str, Any] = {"config": str(file.path), "app": file.name, "address": address}
    with contextlib.ExitStack() as stack:
        compiling = _never
        if address is None:
            check_ports(file)
            file.config.with_local_models()  # here the user sees a download's progress
            report("starting Ray")
            compiling = stack.enter_context(building_kernels(file))
            use_token(state)
            known |= start_node(file, state, report)
        else:
            report("joining Ray")
            known["ray_address"] = address
        known["ray_address"] = stack.enter_context(joined(known["ray_address"]))
        try:
            deploy(file, report, compiling=compiling, node=known.get("pid"))
            known |= {"dashboard": _dashboard(), **describe(file.name), "metrics": _metrics()}
        except BaseException:
            if address is not None:  # our own Ray ends with all that is on it
                _take_down(file.name)
            raise
    state.write(**known)
    if address is None:
        write_variables(state, known["ray_address"], known["dashboard"])
    return known


def _never() -> bool:
    return False


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that it can stop what it has started."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets that thread alone handle signals
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _announce(
    console: Console, state: LocalFiles, result: dict[str, Any], observability: bool
) -> None:
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
        path = shlex.quote(str(state.variables))
        console.print(f"  for `ray` and `serve` in your shell:  . {path}", soft_wrap=True)
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
    state = LocalFiles(state_folder())
    starting = state.held("up")
    with showing_progress() as report:
        if starting:
            report("interrupting `paceline up`")
            with contextlib.suppress(ProcessLookupError, ValueError):  # it has just ended
                os.kill(int((state.folder / "up.lock").read_text()), signal.SIGTERM)
            state.wait_for("up", 2 * STOP_TIMEOUT_S)
        known = state.read()
        stopped = starting or state.is_up(known) or state.held("ray")
        if state.is_up(known):
            report("removing the application")
            try:
                with joined_again(state, known):
                    _take_down(known["app"])
            except ClusterError:
                if known["address"]:
                    raise
                # our own Ray does not answer; it is ended all the same
            finally:  # even if the cluster is gone, and the application with it
                if known["address"]:
                    state.clear()
        if state.held("ray"):
            report("stopping Ray")
        stop_node(state)
    state.clear()
    return {"stopped": stopped, "gateway": known.get("gateway")}


def status() -> dict[str, Any]:
    """What runs: deployments, replicas with process ids and addresses, sessions.

    Returns:
        ``{"running": False, ...}`` if nothing runs.

    Raises:
        ClusterError: a deployment should run, but Ray does not answer.
    """
    state = LocalFiles(state_folder())
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
        with joined_again(state, known):
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
