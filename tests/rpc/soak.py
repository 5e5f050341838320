"""Clients that come, cancel, vanish and send nonsense, for as long as one likes.

The server is a process of its own (:func:`serve`), which prints its memory and its sessions every
second; :func:`soak` runs the clients and checks every answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, EngineLimits, EngineThread
from paceline.errors import PacelineError, ResourceExhausted
from paceline.loading import limit_threads, load_runner
from paceline.rpc.bridge import on_engine
from paceline.rpc.client import Client
from paceline.rpc.server import start_server
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.types import Draft

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("ar", "draft_model", "draft_model_tree", "prompt_lookup")
KV_TOKENS = 500  # so little that sessions give way, and prefixes are evicted
PRESSURE = ("preemptions", "evicted")  # counters that show it


@dataclass
class Soak:
    """What happened.

    Attributes:
        kinds: what clients did, and how often.
        wrong: answers that were not AR's.
        unexpected: errors that no client provoked.
        samples: what the server printed.
        last: its state after every client had left.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)


class _Clients:
    def __init__(
        self, address: str, expected: dict[tuple[int, int], list[int]],
        prompts: list[list[int]], params: list[SamplingParams], result: Soak,
    ) -> None:  # fmt: skip
        self._address = address
        self._expected, self._prompts, self._params = expected, prompts, params
        self._result = result
        self._lock = threading.Lock()

    def run(self, seed: int, ended: threading.Event) -> None:
        draw = random.Random(seed)
        kinds: dict[str, Callable[[random.Random, Client], None]] = {
            "generate": self._generate,
            "cancel": self._cancel,
            "vanish": self._vanish,
            "nonsense": self._nonsense,
            "verify": self._verify,
        }
        client = Client(self._address, timeout=60)
        while not ended.is_set():
            kind = draw.choices(list(kinds), [5, 2, 2, 2, 3])[0]
            try:
                kinds[kind](draw, client)
                with self._lock:
                    self._result.kinds[kind] += 1
            except ResourceExhausted:  # as many clients as there are places, and some more
                with self._lock:
                    self._result.kinds["refused"] += 1
                time.sleep(0.05)
            except Exception as error:
                with self._lock:
                    self._result.unexpected.append(f"{kind}: {type(error).__name__}: {error}")
        client.close()

    def _pick(self, draw: random.Random) -> tuple[list[int], SamplingParams, list[int]]:
        i, j = draw.randrange(len(self._prompts)), draw.randrange(len(self._params))
        return self._prompts[i], self._params[j], self._expected[i, j]

    def _check(self, what: str, tokens: list[int], expected: list[int]) -> None:
        if tokens != expected[: len(tokens)]:
            with self._lock:
                self._result.wrong.append(f"{what}: {tokens} instead of {expected}")

    def _generate(self, draw: random.Random, client: Client) -> None:
        prompt, params, expected = self._pick(draw)
        config = SpeculationConfig(method=draw.choice(METHODS))
        tokens = list(client.complete(prompt, params, config).token_ids)
        self._check(config.method, tokens, expected)
        assert len(tokens) == len(expected)

    def _cancel(self, draw: random.Random, client: Client) -> None:
        prompt, params, expected = self._pick(draw)
        config = SpeculationConfig(method=draw.choice(METHODS))
        tokens: list[int] = []
        with client.generate(prompt, params, config) as rounds:
            for _, each in zip(range(draw.randint(0, 4)), rounds, strict=False):
                tokens += each.token_ids
        self._check("cancelled", tokens, expected)

    def _vanish(self, draw: random.Random, client: Client) -> None:
        """The connection is gone in the middle of a stream, without a word."""
        prompt, params, _ = self._pick(draw)
        other = Client(self._address, timeout=60)
        stream = iter(other.generate(prompt, params))
        for _ in range(draw.randint(0, 2)):
            next(stream, None)
        other.close()
        with suppress(PacelineError):
            next(stream, None)

    def _nonsense(self, draw: random.Random, client: Client) -> None:
        calls = ("GenerateService/Generate", "VerifyService/Verify", "VerifyService/Open")
        with grpc.insecure_channel(self._address) as channel:
            path = f"/paceline.v1.{draw.choice(calls)}"
            data = draw.randbytes(draw.randint(0, 60))
            call = channel.unary_stream(path)(data, timeout=20)
            with suppress(grpc.RpcError):
                for _ in call:
                    break
            call.cancel()
        with suppress(PacelineError):
            client.complete([draw.randint(-5, 10**6)], SamplingParams(max_tokens=1))

    def _verify(self, draw: random.Random, client: Client) -> None:
        """A drafter on a device that is right now and then, and may leave at any moment."""
        prompt, params, expected = self._pick(draw)
        tokens: list[int] = []
        config = SpeculationConfig(method="client", node_budget=8)  # room for more is reserved
        with client.open_session(prompt, params, config) as session:
            for _ in range(draw.randint(0, 6)):
                if len(tokens) >= len(expected):
                    break
                guess = expected[len(tokens) : len(tokens) + 3] if draw.random() < 0.6 else [1, 2]
                tokens += session.verify(Draft.chain(guess)).token_ids
        self._check("verify", tokens, expected)


def soak(folder: Path, seconds: float, *, num_clients: int = 9, seed: int = 0) -> Soak:
    """Run ``num_clients`` against a server over the model in ``folder``.

    They go on for ``seconds``, and on a slow machine until the server has been short of memory too.
    """
    draw = random.Random(seed)
    prompts = [draw.choices(range(256), k=draw.randint(1, 60)) for _ in range(10)]
    prompts += [[*prompts[0], *draw.choices(range(256), k=20)] for _ in range(4)]
    params = [
        SamplingParams(max_tokens=60, ignore_eos=True),
        SamplingParams(max_tokens=200, ignore_eos=True, temperature=1.0, seed=3),
    ]
    alone = Engine(ModelTarget(load_runner(folder, kv_tokens=4000)))
    ar = SpeculationConfig(method="ar")
    expected = {
        (i, j): alone.generate([prompt], p, ar)[0].output_ids
        for i, prompt in enumerate(prompts)
        for j, p in enumerate(params)
    }
    result = Soak()
    command = [sys.executable, "-m", "tests.rpc.soak", "--model", str(folder)]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().strip()

    def read() -> None:
        assert server.stdout is not None
        for line in server.stdout:
            result.samples.append(json.loads(line))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        clients = _Clients(address, expected, prompts, params, result)
        ended = threading.Event()
        threads = [
            threading.Thread(target=clients.run, args=(seed + i, ended)) for i in range(num_clients)
        ]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if result.samples and all(result.samples[-1][each] for each in PRESSURE):
                break
            time.sleep(0.5)
        ended.set()
        for thread in threads:
            thread.join(90)
            assert not thread.is_alive(), "a client is stuck"
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:  # what clients left behind ends by itself
            time.sleep(1)
            result.last = result.samples[-1]
            if not result.last["sessions"]:
                break
    finally:
        server.kill()
        server.wait(10)
        reader.join(10)
        server.stdout.close()
    return result


def resident_bytes() -> int:
    """Memory of this process."""
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


async def serve(folder: str) -> None:
    """The server: prints its address, then a line of JSON every second."""
    limit_threads(1)
    runner = load_runner(folder, kv_tokens=KV_TOKENS)
    drafter = load_runner(folder, kv_tokens=KV_TOKENS, batch_invariant=False)
    limits = EngineLimits(max_sessions=5, max_waiting=3, prefill_chunk=48)
    target = ModelTarget(runner)
    thread = EngineThread(Engine(target, {"draft_model": DraftModel(drafter)}, limits=limits))
    thread.start()
    server = await start_server(engine=thread, idle_timeout_s=10.0)
    print(server.address, flush=True)
    while True:
        await asyncio.sleep(1)
        counters = await on_engine(thread, lambda engine: engine.take_counters())
        sample = {
            "rss": resident_bytes(), "sessions": sum(counters.states.values()),
            "kv_used": counters.kv_used, "kv_free": target.num_free, "capacity": KV_TOKENS,
            "drafter_free": drafter.num_free, "preemptions": counters.num_preemptions,
            "prefix_hits": counters.prefix_hit, "evicted": counters.prefix_evicted,
            "tokens": sum(m.num_tokens for m in counters.methods.values()),
        }  # fmt: skip
        print(json.dumps(sample), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    asyncio.run(serve(parser.parse_args().model))
