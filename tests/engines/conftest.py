"""vLLM, where it is installed: `make test-vllm` has it, the main suite usually has not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import pytest

from paceline.config import SpeculationConfig
from paceline.sampling import SamplingParams
from paceline.session import Session

T = TypeVar("T")

HAS_VLLM = find_spec("vllm") is not None
WITHOUT = "vLLM is not installed: `make test-vllm` runs these tests"

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


class Running:
    """A VllmEngine on an event loop of its own thread."""

    def __init__(self, config: dict[str, Any], drafters: Sequence[str] | None = None) -> None:
        from deployments.config import parse_config
        from deployments.engines.vllm import VllmEngine

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        topology = "colocated" if drafters is None else "actors"
        deployment = parse_config({"engine": "vllm", "topology": topology, **config})
        self.engine = VllmEngine(deployment, drafters)
        self.run(self.engine.start(), 300)
        if drafters:
            self.run(self._connected(drafters), 30)

    async def _connected(self, drafters: Sequence[str]) -> None:
        for _ in range(300):
            if set(await self.engine.use_drafters(drafters)) == set(drafters):
                return
            await asyncio.sleep(0.1)
        raise TimeoutError(f"{drafters} do not answer")

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float = 120.0) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        method: str | Sequence[SpeculationConfig],
        *,
        concurrency: int = 8,
        on_done: Callable[[int], None] = lambda count: None,
        prediction: Callable[[int], Sequence[int]] = lambda i: (),
    ) -> list[Session]:
        """One session for each prompt, ``concurrency`` of them at a time."""
        one = [SpeculationConfig(method=method)] if isinstance(method, str) else list(method)

        async def all_of_them() -> list[Session]:
            places = asyncio.Semaphore(concurrency)
            count = 0

            async def generate(i: int) -> Session:
                nonlocal count
                async with places:
                    done: Future[None] = Future()
                    session = self.engine.submit(
                        prompts[i], params, one[i % len(one)], session_id=f"{id(done)}-{i}",
                        on_event=lambda event: done.set_result(None) if event.finished else None,
                        prediction=prediction(i),
                    ).result()  # fmt: skip
                    await asyncio.wrap_future(done)
                    count += 1
                    await asyncio.to_thread(on_done, count)
                    assert session.error is None, session.error
                    return session

            return list(await asyncio.gather(*map(generate, range(len(prompts)))))

        return self.run(all_of_them(), 600)

    def stop(self) -> None:
        self.engine.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


class DrafterProcess:
    """A drafter replica of the demo pair."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rpc.drafter_process", "--demo", "--vocab-size", "4096",
             *options],
            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def drafter_processes() -> Iterator[Callable[..., DrafterProcess]]:
    started: list[DrafterProcess] = []

    def start(*options: str) -> DrafterProcess:
        started.append(DrafterProcess(*options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
