"""An application on the Ray that this process has joined: deploy it, describe it, take it down.

Serve does the work. Here is what it does not: check the ports before, show what a start waits for,
give up when nothing happens, and say why in a line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.cluster.local_ray import ClusterError, start_ray
from paceline.deployments.config import IMPORT_PATH, POLICY_FUNCTION, ConfigFile

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
        status = _status(file.name)
        application = status.app_status
        if application.status == "RUNNING":
            return
        waiting = {d.name: d for d in status.deployment_statuses if d.status != "HEALTHY"}
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
    dashboard = dashboard_url()
    if dashboard is None:
        raise ClusterError(f"{file.path}: autoscaling_policy takes a Ray with a dashboard")
    ServeSubmissionClient(dashboard).deploy_applications(
        {"proxy_location": file.proxy_location, "applications": [application]}
    )


def dashboard_url() -> str | None:
    """URL of the dashboard of the Ray that this process has joined, which takes jobs as well."""
    import ray

    url = ray.init(ignore_reinit_error=True, logging_level=logging.ERROR).dashboard_url
    return f"http://{url}" if url else None


def _status(app: str) -> Any:
    """Serve's ``StatusOverview`` of an application, with its deployments; None without a Serve.

    Not from `serve.status()`: that has all settings of all deployments with it, for each of which
    controller and caller pickle the router's source.
    """
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    return client and client.get_serve_status(app)


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
    status = _status(app)
    for deployment in status.deployment_statuses if status else ():
        name = deployment.name
        replicas: list[dict[str, Any]] = []
        # The deployment may have no replica, or one that died and is still listed.
        with contextlib.suppress(RayError, RayServeException, TimeoutError):
            handle = serve.get_deployment_handle(name, app)
            replicas = handle.broadcast("status").results(timeout_s=STATUS_TIMEOUT_S)
        deployments[name] = {
            "state": str(deployment.status.value), "message": deployment.message,
            "replicas": replicas,
        }  # fmt: skip

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
            yield {**described, "ray_address": ray_address}
        finally:
            take_down(file.name)


def take_down(app: str) -> None:
    """Drain and delete the application, and leave Ray, or stop it if this process started it."""
    import ray
    from ray import serve

    if not ray.is_initialized():
        return
    _quiet_serve()
    with contextlib.suppress(Exception):  # there is none if Serve never started
        serve.delete(app)
    ray.shutdown()
