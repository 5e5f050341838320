"""Processes for tests, forked from one that has imported what they need.

To import it takes seconds, to fork milliseconds. The process that forks has no thread and computes
nothing: a fork would have neither its threads nor a way to open the locks that they hold.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = (
    "tests.rpc.drafter_process", "tests.rpc.target_process", "tests.rpc.device_process",
    "tests.deployments.gateway_process", "benchmarks.netem", "paceline.models.llama",
)  # fmt: skip
CLONE_NEWNET = 0x40000000


class Forked:
    """A process that runs ``main()`` of a module, which may be a coroutine function.

    Args:
        arguments: its command line.
        namespace: the network namespace in which it runs; default: this process's.

    Attributes:
        stdout: what it prints.
    """

    def __init__(self, module: str, arguments: Sequence[str], namespace: str | None = None) -> None:
        order = {
            "module": module, "arguments": arguments, "namespace": namespace,
            "environment": dict(os.environ),
        }  # fmt: skip
        mine, its = os.pipe()
        self.stdout = os.fdopen(mine)
        control = _forking()
        socket.send_fds(control, [json.dumps(order).encode()], [its, 2])
        os.close(its)
        answer = control.recv(64)
        assert answer, "the process that forks has ended"
        self.pid = int(answer)
        self._handle = os.pidfd_open(self.pid)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def has_ended(self, timeout: float = 0.0) -> bool:
        """Wait at most ``timeout`` seconds for its end."""
        poll = select.poll()  # select() takes no numbers of files above 1023
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(1e3 * timeout))

    def kill(self) -> None:
        """End it the hard way; safe to call twice."""
        if not self.stdout.closed:
            self.signal(signal.SIGKILL)
            assert self.has_ended(10)
            os.close(self._handle)
            self.stdout.close()


@cache
def _forking() -> socket.socket:
    """A connection to the process that forks, which ends with this one."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.rpc.forking", str(its.fileno())]
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=[its.fileno()])
    its.close()

    def end() -> None:
        mine.close()
        process.wait()

    atexit.register(end)
    return mine


def main() -> None:
    control, running = socket.socket(fileno=int(sys.argv[1])), set[int]()
    for name in IMPORTED:
        import_module(name)

    def reap(*_: object) -> None:
        with suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                running.discard(pid)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        signal.signal(signal.SIGCHLD, reap)
        data, files, _, _ = socket.recv_fds(control, 2**20, 2)
        if not data:
            break
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # until the child is known
        pid = os.fork()
        if not pid:
            control.close()
            _run(json.loads(data), *files)
        running.add(pid)
        control.send(str(pid).encode())
        for file in files:
            os.close(file)
    for pid in list(running):
        os.kill(pid, signal.SIGKILL)


def _run(order: dict[str, Any], stdout: int, stderr: int) -> NoReturn:
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        os.environ.clear()
        os.environ.update(order["environment"])
        if order["namespace"] is not None:
            _enter(order["namespace"])
        sys.argv = [order["module"], *order["arguments"]]
        made = import_module(order["module"]).main()
        if inspect.iscoroutine(made):
            asyncio.run(made)
        status = 0
    except BaseException:  # its last words
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _enter(namespace: str) -> None:
    """Join a network namespace; Python has its own call for it from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


if __name__ == "__main__":
    main()
