"""A VllmEngine for callers without an event loop: benchmarks, sweeps and tests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from paceline.config import SpeculationConfig
from paceline.deployments.config import DeploymentConfig
from paceline.deployments.engines.vllm import VllmEngine
from paceline.engine import RoundEvent
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session

T = TypeVar("T")

START_TIMEOUT_S = 600.0


class LocalVllm:
    """A VllmEngine on the event loop of a thread of its own.

    Args:
        drafters: addresses of drafter replicas; the constructor waits until all of them answer.

    Raises:
        InvalidArgument, FailedPrecondition: as :class:`VllmEngine`.
        TimeoutError: a drafter replica does not answer.
    """

    def __init__(self, config: DeploymentConfig, drafters: Sequence[str] | None = None) -> None:
        self.engine = VllmEngine(config, drafters)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._num_sessions = 0
        try:
            self.run(self.engine.start(), START_TIMEOUT_S)
            if drafters:
                self.use_drafters(drafters)
        except BaseException:
            self.stop()
            raise

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the engine's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def use_drafters(self, addresses: Sequence[str], timeout: float = 60.0) -> None:
        """Draft with these replicas from now on; waits until all of them answer.

        Raises:
            TimeoutError: not all of them answer within ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        while set(self.run(self.engine.use_drafters(addresses))) != set(addresses):
            if time.monotonic() > end:
                raise TimeoutError(f"no answer from all of {', '.join(addresses)} in {timeout} s")
            time.sleep(0.1)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        speculation: Sequence[SpeculationConfig],
        *,
        concurrency: int | None = None,
        predictions: Sequence[Sequence[int]] = (),
        on_done: Callable[[int], None] = lambda count: None,
    ) -> list[Session]:
        """Generate for all prompts; returns their finished sessions in the same order.

        Args:
            speculation: methods and knobs; prompts take them in turn.
            concurrency: how many sessions run at a time; None: all.
            predictions: token ids of the expected outputs, for methods that draft them.
            on_done: called on another thread with the number of sessions that have ended.

        Raises:
            PacelineError: the error of the first session that failed.
        """

        async def all_of_them() -> list[Session]:
            places = asyncio.Semaphore(concurrency or max(1, len(prompts)))
            count = 0

            async def one(i: int) -> Session:
                nonlocal count
                async with places:
                    ended = asyncio.Event()

                    def listen(event: RoundEvent) -> None:
                        if event.finished:
                            ended.set()

                    self._num_sessions += 1
                    session = self.engine.submit(
                        Request(
                            prompts[i],
                            params,
                            speculation[i % len(speculation)],
                            session_id=f"local-{self._num_sessions}",
                            prediction=predictions[i] if predictions else (),
                        ),
                        on_event=listen,
                    ).result()
                    await ended.wait()
                    count += 1
                    await asyncio.to_thread(on_done, count)
                    if session.error is not None:
                        raise session.error
                    return session

            return list(await asyncio.gather(*map(one, range(len(prompts)))))

        return self.run(all_of_them())

    def forget(self) -> None:
        """Drop what drafters have learnt."""
        self.run(self.engine.forget())

    def stop(self) -> None:
        """End vLLM's processes and the event loop's thread."""
        self.engine.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
