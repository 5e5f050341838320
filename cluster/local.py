"""`paceline up`, `down` and `status`: a deployment on this machine or on a running cluster.

Without an address, ``up`` starts a Ray that goes on when the command ends (`local_ray.py`), and
``down`` ends it. What runs on it, and on a Ray that was there before, is in `serving.py`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
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
    stop_node,
    use_token,
    write_variables,
)
from paceline.cluster.serving import (
    Report,
    building_kernels,
    check_ports,
    dashboard_url,
    deploy,
    describe,
    take_down,
)
from paceline.deployments.config import CONFIGS_DIR, ConfigFile, read_config_file

DEMO_CONFIG = CONFIGS_DIR / "demo.yaml"
CONFIGS = {"smollm2": CONFIGS_DIR / "smollm2.yaml", "demo": DEMO_CONFIG}
"""Config files by the model that they deploy."""


def state_folder() -> Path:
    """Folder of the files of the running deployment."""
    return cache_folder("local")


def write_observability(result: dict[str, Any]) -> dict[str, str]:
    """Write a scrape config and the dashboard for what :func:`up` returned; returns their paths."""
    from paceline.deployments.dashboard import write_observability as write

    return write(state_folder() / "observability", result.get("metrics") or [])


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
        config_path: None: SmolLM2, or the demo pair as two actors if SmolLM2 cannot be downloaded
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
    from paceline.deployments.scrape import metrics_addresses

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
            known |= {
                "dashboard": dashboard_url(),
                **describe(file.name),
                "metrics": metrics_addresses(),
            }
        except BaseException:
            if address is not None:  # our own Ray ends with all that is on it
                take_down(file.name)
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
                    take_down(known["app"])
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
