"""A target replica in a process of its own, as the benchmarks of the split need it.

`python -m benchmarks.replica OPTIONS` prints its address and serves on loopback until its input
ends. With `--mix FILE`, requests that name no method get the method `mix`: a drafter that knows
what AR generates (:class:`benchmarks.scripted.SlowMix`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.scripted import SlowMix, scripted_method
from paceline.config import SpeculationConfig
from paceline.drafters.base import Drafter
from paceline.engine import Engine, EngineLimits, EngineThread
from paceline.loading import limit_threads, load_drafter, load_runner
from paceline.methods import METHODS
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.server import start_server
from paceline.target import ModelTarget

WITH_MIX = {**METHODS, "mix": scripted_method("mix", "Knows the target's tokens, errs at random.")}


class Replica:
    """Starts the process, and ends it on leaving the block.

    Attributes:
        address: HOST:PORT.
        pid: of the process.
    """

    def __init__(self, target: Path, *options: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.replica", "--target", str(target), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.address = self._process.stdout.readline().strip()
        if not self.address:
            raise RuntimeError("the replica did not start")

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.communicate(timeout=30)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _engine(options: argparse.Namespace) -> tuple[Engine, SpeculationConfig]:
    """The engine, and the default method of requests that name none."""
    runner = load_runner(options.target, kv_tokens=options.kv_tokens)
    drafters: dict[str, Drafter] = {}
    speculation = SpeculationConfig(method="ar")
    if options.drafter:
        drafters["draft_model"] = load_drafter(
            options.drafter, options.target, kv_tokens=options.kv_tokens
        )
    if options.mix:
        mix = json.loads(Path(options.mix).read_text())
        known = {tuple(prompt): tokens for prompt, tokens in mix["continuations"]}
        drafters["mix"] = SlowMix(
            known, runner.vocab_size, rho=options.rho, token_seconds=options.token_seconds
        )
        speculation = SpeculationConfig(method="mix", length="goodput")
    limits = EngineLimits(max_sessions=options.max_sessions, max_waiting=1024)
    engine = Engine(ModelTarget(runner), drafters, catalogue=WITH_MIX, limits=limits)
    return engine, speculation


async def _serve(engine: Engine, speculation: SpeculationConfig) -> None:
    thread = EngineThread(engine).start()
    server = await start_server(engine=thread, model=ModelInfo(default_speculation=speculation))
    print(server.address, flush=True)
    await server.server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter")
    parser.add_argument("--mix", help="JSON file with `continuations`")
    parser.add_argument("--rho", type=float, default=1.0)
    parser.add_argument("--token-seconds", type=float, default=0.0)
    parser.add_argument("--max-sessions", type=int, default=64)
    parser.add_argument("--kv-tokens", type=int, default=65_536)
    limit_threads(1)
    asyncio.run(_serve(*_engine(parser.parse_args())))


if __name__ == "__main__":
    main()
