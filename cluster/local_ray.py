"""Ray on this machine: how a process joins one, and the one that `paceline up` leaves running.

That one is `ray start --head` on loopback, with dashboard and job server behind a token. Here is
what Ray does not do: find it again, and end it with all that it started and nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.cluster.cli_options import TOKEN_VARIABLE
from paceline.deployments.config import ConfigFile
from paceline.errors import PacelineError

NODE_TIMEOUT_S = 600.0
NODE_ATTEMPTS = 4
STOP_TIMEOUT_S = 45.0
_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum is 75 MiB; nothing here stores objects
_POLL_S = 0.2


class ClusterError(PacelineError, RuntimeError):
    """A deployment cannot be started, found or stopped."""


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

    For the demo and measurements: it takes no jobs, and starts sooner than :func:`start_node`.
    """
    prepare_environment(secrets.token_hex(32))
    import ray

    num_cpus, resources = _wanted(file)
    # Its processes would inherit the token of a client, and dump it with their environment.
    token = os.environ.pop(TOKEN_VARIABLE, None)
    try:
        context = ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, num_cpus),
            resources=resources,
            include_dashboard=file.autoscaling_policy is not None,  # such a file goes through it
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    finally:
        if token is not None:
            os.environ[TOKEN_VARIABLE] = token
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


# --- what `paceline up` leaves running ------------------------------------------------------------


@dataclass(frozen=True)
class LocalFiles:
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
        with self.open(scratch) as file:
            file.write(json.dumps(values))
        scratch.replace(self.file)

    def open(self, path: Path) -> IO[str]:
        """An empty file that only its owner can read."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # one that is there keeps its mode
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        return os.fdopen(handle, "w")

    def clear(self) -> None:
        for path in (self.file, self.variables):
            path.unlink(missing_ok=True)

    def lock(self, name: str) -> IO[str] | None:
        """Hold the lock ``up`` or ``ray``; None if another process does.

        It is free when the file is closed here and in all processes that were given it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}.lock"
        handle = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a")
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


def use_token(state: LocalFiles) -> None:
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


def write_variables(state: LocalFiles, ray_address: str, dashboard: str) -> None:
    """Write what a shell reads to reach our Ray with `ray` and `serve`."""
    values = {"RAY_ADDRESS": ray_address, "RAY_DASHBOARD_ADDRESS": dashboard, **_LOOPBACK}
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        if name in os.environ:
            values[name] = os.environ[name]
    lines = [f"export {name}={shlex.quote(value)}" for name, value in values.items()]
    # Ray would prefer it to the path, and it is that of another Ray.
    with state.open(state.variables) as file:
        file.write("\n".join(["unset RAY_AUTH_TOKEN", *lines, ""]))


def start_node(
    file: ConfigFile, state: LocalFiles, report: Callable[[str], None]
) -> dict[str, Any]:
    """Run `ray start --head` until `down`; returns its process id, address and temporary folder.

    The system and Ray choose the ports, so that it runs beside other Rays.

    Raises:
        ClusterError: it does not start; the message has the last line of its log.
    """
    deadline = time.monotonic() + NODE_TIMEOUT_S
    attempts = 0
    while True:
        attempts += 1
        try:
            return _try_node(file, state, deadline)
        except ClusterError as error:
            # A node that has not registered after 30 s gives up, which no setting changes; on a
            # busy machine the next one finds more of the files in memory.
            stop_node(state)
            if attempts == NODE_ATTEMPTS or time.monotonic() > deadline:
                raise
            report(f"starting Ray again: {error}")


def _try_node(file: ConfigFile, state: LocalFiles, deadline: float) -> dict[str, Any]:
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
        # Ray's processes dump their environment: no client's token in it.
        **{name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE},
        # Busy machines may take minutes for what Ray gives up after one.
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": f"{NODE_TIMEOUT_S:.0f}",
        "RAY_worker_register_timeout_seconds": f"{NODE_TIMEOUT_S:.0f}",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # the application is gone by then
    }  # fmt: skip
    lock = state.lock("ray")
    if lock is None:
        raise ClusterError(f"another process holds {state.folder}/ray.lock: end it")
    with lock, state.open(state.log) as log:
        process = subprocess.Popen(
            command, env=environment, start_new_session=True, pass_fds=[lock.fileno()],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    node = {"pid": process.pid, "temp_dir": folder}
    state.write(**node)
    record = Path(folder, "ray_current_cluster")  # written when all of it runs
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


def stop_node(state: LocalFiles) -> None:
    """End the `ray start` that the state file names, and all that it started.

    Raises:
        ClusterError: it does not end.
    """
    known = state.read()
    if "temp_dir" not in known:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        if state.held("ray"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(known["pid"], number)
            state.wait_for("ray", STOP_TIMEOUT_S)
    if state.held("ray"):
        raise ClusterError(f"process {known['pid']} does not end; its log is {state.log}")
    for pid in _orphans(known["pid"]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(known["temp_dir"], ignore_errors=True)


def _orphans(leader: int) -> list[int]:
    """Processes of a session whose leader has ended: agents outlive a `ray start` that is killed.

    If the leader lives, its number was given again, and the session is another one.
    """
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            pid = int(folder.name)
            if not is_dead and os.getsid(pid) == leader:
                members.append(pid)
    return [] if leader in members else members


@contextlib.contextmanager
def joined(address: str) -> Iterator[str]:
    """Join a Ray for as long as the block runs; yields its address."""
    prepare_environment()
    import ray

    before = ray.is_initialized()
    address = join_ray(address)
    try:
        yield address
    finally:
        if not before:
            ray.shutdown()


@contextlib.contextmanager
def joined_again(state: LocalFiles, known: Mapping[str, Any]) -> Iterator[None]:
    """Join the Ray of the state file for as long as the block runs."""
    if not known["address"]:
        use_token(state)
    with joined(known["ray_address"]):
        yield
