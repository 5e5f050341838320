"""Real servers on loopback for the tests of this folder, each on an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from paceline.rpc.server import RpcServer, start_server
from tests.rpc.forking import Forked


@contextmanager
def serving(grace: float = 0.2, **arguments: Any) -> Iterator[RpcServer]:
    """``start_server(**arguments)`` on a thread, so that blocking clients can be tested too."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="test-server")
    thread.start()
    try:
        server = asyncio.run_coroutine_threadsafe(start_server(**arguments), loop).result(60)
        try:
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(grace), loop).result(60)
    finally:
        asyncio.run_coroutine_threadsafe(calls_ended(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def calls_ended() -> None:
    """Wait for the calls that the server has cancelled.

    What gRPC still has to say of a call whose loop is closed is an error in another test's loop.
    """
    calls = asyncio.all_tasks() - {asyncio.current_task()}
    if calls:
        await asyncio.wait(calls, timeout=2.0)


class ReplicaProcess:
    """A replica in another process, which prints its address (``drafter_process.py``, ...).

    Args:
        namespace: the network namespace in which it runs; default: this process's.
    """

    def __init__(self, module: str, *arguments: str, namespace: str | None = None) -> None:
        self._process = Forked(module, arguments, namespace)
        self.address = self._process.stdout.readline().strip()
        assert self.address, f"{module} did not start"
        self.pid = self._process.pid

    def signal(self, number: int) -> None:
        self._process.signal(number)

    @property
    def has_ended(self) -> bool:
        return self._process.has_ended()

    def kill(self) -> None:
        """End it the hard way; safe to call twice."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()


class DrafterProcess(ReplicaProcess):
    """A drafter replica."""

    def __init__(self, *arguments: str) -> None:
        super().__init__("tests.rpc.drafter_process", *arguments)


class TargetProcess(ReplicaProcess):
    """A target replica over the model in a folder, with adapters by name."""

    def __init__(self, model: Path, adapters: Mapping[str, Path] | None = None) -> None:
        given = [f"{name}={folder}" for name, folder in (adapters or {}).items()]
        super().__init__("tests.rpc.target_process", "--model", str(model), "--adapters", *given)


def eventually(condition: Callable[[], bool], timeout: float = 5.0) -> bool:
    """Wait until ``condition()`` holds; False when it did not in time."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
