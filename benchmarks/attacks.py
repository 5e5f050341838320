"""Requests that are made to hurt, beside an honest client: its rounds calm and under attack.

A target with the demo pair, an attacker (of the lowest priority: a real one has a machine of its
own) and the honest client are three processes. Client and attacker know nothing of Paceline but the
messages. Calm and attacked windows take turns, so that a busy machine slows both. It fails when the
target dies, or when the honest client gets another token than before.

    python -m benchmarks.attacks
    python -m benchmarks.attacks --attacks chain hidden --seconds 10
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.rpc.gen.paceline.v1 import generate_pb2, generate_pb2_grpc

PROMPT = "def read(path):"
Make = Callable[[int], generate_pb2.GenerateRequest]


def _ask(**fields: Any) -> generate_pb2.GenerateRequest:
    if "token_ids" not in fields:
        fields.setdefault("text", "x")
    return generate_pb2.GenerateRequest(**fields)


def _sampled(**fields: Any) -> generate_pb2.GenerateRequest:
    return _ask(sampling={"max_tokens": 60, **fields})


def _chain(length: int, i: int) -> str:
    rules = "\n".join(f"a{n}: a{n + 1}" for n in range(length))
    return f'start: a0\n{rules}\na{length}: "x{i}"\n'


def _ambiguous(before: str, i: int) -> str:
    texts = (f"{chr(97 + n % 26)}{n}" for n in range(300))
    rule = " | ".join(f'e e "{text}"' for text in texts)
    return f'start: {before} e "{i}"\ne: {rule} | /./\n'


# Each gets the number of the request, so that no two are the same to a cache.
ATTACKS: dict[str, Make] = {
    "chain": lambda i: _sampled(grammar=_chain(3000, i)),
    "short chain": lambda i: _sampled(grammar=_chain(900, i)),
    "ambiguous": lambda i: _sampled(grammar=_ambiguous("", i)),
    "hidden": lambda i: _sampled(grammar=_ambiguous("/[xy]{40}/", i)),
    "31 bytes": lambda i: _sampled(grammar=f'start: s\ns: s s | /[^{chr(97 + i % 26)}]/ | ""\n'),
    "regex": lambda i: _sampled(regex=f"((a{{1000}}){{1000}}){{1000}}{i}"),
    "slow schema": lambda i: _sampled(
        json_schema=json.dumps({"type": "integer", "multipleOf": 1000003 + 2 * i, "maximum": 1e15})
    ),
    "stop strings": lambda i: _sampled(stop=["x"] * 350_000),
    "stop ids": lambda i: _sampled(stop_token_ids=[1] * 4_000_000),
    "committed ids": lambda i: _ask(committed_token_ids=[1] * 4_000_000),
    "prompt text": lambda i: _ask(text="x y" * 1_380_000),
    "logit biases": lambda i: _sampled(logit_bias={n: n - 1e9 for n in range(6000)}),
    # These differ in more than the message: see _Attacker.
    "watches": lambda i: _ask(),
    "made-up methods": lambda i: _ask(),
    "unread": lambda i: _sampled(max_tokens=1),
}
NUM_UNREAD = 160
MANY = 64
"""Calls at a time of a flood."""


def _serve() -> None:
    """The target, set up as a replica, until its standard input ends."""
    from paceline.deployments.target import SWITCH_S
    from paceline.engine import EngineThread
    from paceline.loading import limit_threads, load_engine
    from paceline.memory import keep_loaded
    from paceline.rpc.server import start_server

    async def run() -> None:
        limit_threads(1)
        sys.setswitchinterval(SWITCH_S)
        engine = EngineThread(load_engine()).start()
        server = await start_server(engine=engine)
        keep_loaded()
        print(server.address, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(0.0)
        engine.stop()

    asyncio.run(run())


class _Attacker:
    """One hostile client: each call of :meth:`once` is one more attack."""

    def __init__(self, name: str, address: str) -> None:
        self.answers: Counter[str] = Counter()
        options: list[tuple[str, int]] = [("grpc.max_send_message_length", 2**23)]
        if name == "unread":  # every byte of an answer waits until it is asked for
            options += [("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)]
        self._channel = grpc.insecure_channel(address, options)
        self._generate = generate_pb2_grpc.GenerateServiceStub(self._channel).Generate
        self._watch = health_pb2_grpc.HealthStub(self._channel).Watch
        self._make = ATTACKS[name]
        self._kept: list[Any] = []
        special = {
            "watches": self._watch_on, "made-up methods": self._flood,
            "unread": self._leave_unread,
        }  # fmt: skip
        self._do = special.get(name, self._ask)
        self._number = 0

    def once(self) -> None:
        self._number += 1
        try:
            self._do()
            self.answers["OK"] += 1
        except grpc.RpcError as error:
            self.answers[error.code().name] += 1

    def _ask(self) -> None:
        list(self._generate(self._make(self._number), timeout=60))

    def _watch_on(self) -> None:
        self._kept.append(self._watch(health_pb2.HealthCheckRequest()))
        next(self._kept[-1])

    def _flood(self) -> None:
        calls = [
            self._channel.unary_unary(f"/{'x' * 7000}.{self._number}/{n}").future(b"", timeout=60)
            for n in range(MANY)
        ]
        self.answers.update(call.code().name for call in calls[1:])
        calls[0].result()

    def _leave_unread(self) -> None:
        self._kept.append(self._generate(self._make(self._number)))
        if len(self._kept) > NUM_UNREAD:
            self._kept.pop(0).cancel()
            time.sleep(0.01)


def _attack(name: str, address: str) -> None:
    """Attack while the lines of standard input say so; prints what it was answered."""
    os.nice(19)
    attacker = _Attacker(name, address)
    for line in sys.stdin:
        end = time.monotonic() + float(line)
        while time.monotonic() < end:
            attacker.once()
        print("done", flush=True)
    print(json.dumps(attacker.answers), flush=True)


def _process(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.attacks", *arguments],
        cwd=Path(__file__).resolve().parents[1],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


class Honest:
    """Generates the same text again and again."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._generate = generate_pb2_grpc.GenerateServiceStub(self._channel).Generate
        self._expected: list[int] = []

    def gaps(self, goes_on: Callable[[], bool]) -> Iterator[float]:
        """Milliseconds between two replies; ends after the generation in which that is over."""
        while goes_on():
            request = generate_pb2.GenerateRequest(
                text=PROMPT,
                sampling={"max_tokens": 200, "ignore_eos": True},
                speculation={"method": "draft_model"},
            )
            tokens: list[int] = []
            last = time.perf_counter()
            for reply in self._generate(request, timeout=120):
                now = time.perf_counter()
                yield 1e3 * (now - last)
                last = now
                tokens += reply.token_ids
            self._expected = self._expected or tokens
            if tokens != self._expected:
                raise SystemExit("the honest client got other tokens")


def _measure(name: str, address: str, seconds: float, windows: int) -> dict[str, Any]:
    """Calm and attacked gaps of the honest client, in ms, and the attacker's answers."""
    honest = Honest(address)
    attacker = _process("--attack", name, "--address", address)
    assert attacker.stdin is not None
    assert attacker.stdout is not None
    calm: list[float] = []
    attacked: list[float] = []
    list(honest.gaps(iter([True, True, False]).__next__))
    for _ in range(windows):
        end = time.monotonic() + seconds
        calm += honest.gaps(lambda: time.monotonic() < end)  # noqa: B023
        attacker.stdin.write(f"{seconds}\n")
        attacker.stdin.flush()
        end = time.monotonic() + seconds
        attacked += honest.gaps(lambda: time.monotonic() < end)  # noqa: B023
        attacker.stdout.readline()
    output, _ = attacker.communicate(timeout=60)
    return {"calm": calm, "attacked": attacked, "answers": json.loads(output)}


@contextmanager
def served() -> Iterator[Callable[..., dict[str, Any]]]:
    """A target, and :func:`_measure` against it.

    Raises:
        SystemExit: the target has died.
    """
    target = _process("--serve")
    assert target.stdout is not None
    address = target.stdout.readline().strip()

    def measure(name: str, seconds: float, windows: int) -> dict[str, Any]:
        found = _measure(name, address, seconds, windows)
        if target.poll() is not None:
            raise SystemExit(f"{name}: the target has died")
        return found

    try:
        yield measure
    finally:
        target.kill()
        target.wait()


def slowdown(found: dict[str, Any]) -> float:
    """How many times as long as calm the honest client's p99 gap is under attack."""
    calm, attacked = (quantiles(found[which], n=100)[98] for which in ("calm", "attacked"))
    return attacked / calm


def _row(name: str, found: dict[str, Any]) -> str:
    cells = [name, ", ".join(f"{n} {code}" for code, n in sorted(found["answers"].items()))]
    for which in ("calm", "attacked"):
        cuts = quantiles(found[which], n=100)
        cells.append(f"{cuts[49]:.1f} / {cuts[98]:.1f} / {max(found[which]):.0f}")
    cells.append(f"{slowdown(found):.2f}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window")
    parser.add_argument("--windows", type=int, default=2, help="calm and attacked ones, in turn")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return _serve()
    if options.attack:
        return _attack(options.attack, options.address)
    print("| attack | answers | gap calm: p50 / p99 / most, ms | attacked | p99 ratio |")
    print("|---|---|---|---|---|")
    with served() as measure:
        for name in options.attacks:
            print(_row(name, measure(name, options.seconds, options.windows)), flush=True)


if __name__ == "__main__":
    main()
