"""Random faults under live sessions: no token is lost or changed, and how long the gaps are.

Two targets, a drafter and two gateways are processes; links that can break connect them. Clients
generate all the time, and every answer is compared with what the model generates alone. Each fault
kills or stops a process, breaks a link, or makes a clock jump. What dies is started again.

    python -m benchmarks.faults --faults 60
    python -m benchmarks.faults --faults 10000 --out faults.jsonl --figure docs/figures/faults.png
    python -m benchmarks.faults --read night1.jsonl night2.jsonl --figure docs/figures/faults.png

It fails when a token was lost or changed. The relay stands here without Ray Serve, which takes
seconds more to start a replica again; ``tests/deployments/test_recovery.py`` has it with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from benchmarks.netem import Netem
from paceline.config import SpeculationConfig
from paceline.rpc.client import Client
from paceline.rpc.errors import PoisonRequest
from paceline.sampling import SamplingParams

PROMPTS = ("def read(path):\n", "class Stack:\n    ", "import os\n", "for i in range(")
PARAMS = SamplingParams(max_tokens=160, ignore_eos=True, temperature=0.8, seed=7)
METHOD = SpeculationConfig(method="draft_model", length="fixed")
START_S = 120.0
SETTLE_S = (0.1, 0.7)
"""Seconds from one fault to the next."""


# --- the processes ------------------------------------------------------------------------------


def _jump_on_signal() -> None:
    """Each SIGUSR1 moves this process's wall clock by an hour, there or back."""
    real, ahead = time.time, False

    def jump(*_: object) -> None:
        nonlocal ahead
        ahead = not ahead
        time.time = (lambda: real() + 3600.0) if ahead else real

    signal.signal(signal.SIGUSR1, jump)


async def _serve_target(port: int, drafter: str) -> None:
    from paceline.demo import TARGET_DIR
    from paceline.engine import EngineThread
    from paceline.loading import limit_threads, load_engine
    from paceline.rpc.drafter_pool import DrafterPool
    from paceline.rpc.server import start_server

    limit_threads(1)
    engine = load_engine(TARGET_DIR, None)
    pool = DrafterPool([drafter], vocab_size=engine.target.vocab_size, deadline_s=0.5)
    engine.drafters["draft_model"] = pool
    server = await start_server(engine=EngineThread(engine).start(), port=port, idle_timeout_s=30.0)
    await server.server.wait_for_termination()


async def _serve_drafter(port: int) -> None:
    from paceline.demo import DRAFTER_DIR, TARGET_DIR
    from paceline.loading import limit_threads, load_drafter
    from paceline.rpc.draft_service import DraftServicer
    from paceline.rpc.server import start_server
    from paceline.tokenizer import load_tokenizer

    limit_threads(1)
    vocab_size = load_tokenizer(TARGET_DIR).vocab_size
    servicer = DraftServicer(
        load_drafter(DRAFTER_DIR, TARGET_DIR), name="draft_model", vocab_size=vocab_size
    )
    server = await start_server(drafter=servicer, port=port)
    await server.server.wait_for_termination()


async def _serve_gateway(port: int, targets: Sequence[str]) -> None:
    from paceline.deployments.gateway import Relay
    from paceline.deployments.lease import Endpoint, Lease
    from paceline.rpc.access import Gate
    from paceline.rpc.server import start_server

    class FixedLease:
        """A lease on a target that is always there; its connection tells when it is not."""

        lost = ended = False

        def __init__(self, address: str) -> None:
            self.endpoint = Endpoint(address, 0, address)
            self.opened_at = time.monotonic()

        def on_lost(self, callback: object) -> None: ...

        def on_end(self, callback: object) -> None: ...

        def forget(self, callback: object) -> None: ...

        def release(self) -> None: ...

    count = 0

    async def lease() -> Lease:
        nonlocal count
        count += 1
        return cast(Lease, FixedLease(targets[count % len(targets)]))

    relay = Relay(lease, idle_timeout_s=30.0, resume_s=60.0, gate=Gate())
    server = await start_server(register=relay.register, port=port)
    await server.server.wait_for_termination()


_SERVE: dict[str, Callable[..., Any]] = {
    "target": _serve_target, "drafter": _serve_drafter, "gateway": _serve_gateway,
}  # fmt: skip


def _run_role(role: str, port: int, *upstream: Any) -> None:
    _jump_on_signal()
    asyncio.run(_SERVE[role](port, *upstream))


# Forked from a process that has imported everything: a fault then costs a load of the weights
# instead of seconds of imports, so that a night has ten thousand of them.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["paceline.engine", "paceline.loading", "paceline.rpc.server", "paceline.rpc.drafter_pool",
     "paceline.rpc.draft_service", "paceline.deployments.gateway"]
)  # fmt: skip


class Process:
    """One of the servers, at a port that it keeps."""

    def __init__(self, role: str, *arguments: Any) -> None:
        self.role = role
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._arguments = arguments
        self.start()

    def start(self) -> None:
        self._process = _FORKS.Process(
            target=_run_role, args=(self.role, self.port, *self._arguments), daemon=True
        )
        self._process.start()

    @property
    def is_up(self) -> bool:
        """Whether it lives and takes connections."""
        if not self._process.is_alive():
            return False
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def wait_up(self) -> None:
        end = time.monotonic() + START_S
        while not self.is_up:
            if time.monotonic() > end or not self._process.is_alive():
                raise RuntimeError(f"{self.role} at {self.address} does not start")
            time.sleep(0.1)

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)


# --- the clients --------------------------------------------------------------------------------


@dataclass
class Watch:
    """What the clients saw.

    Attributes:
        gaps: from when to when a session waited for its next tokens.
        wrong: answers with other tokens, and generations that ended with an error.
        refused: generations that two targets died of before the next token came: the gateway has to
            take them for requests that kill (docs/security.md), though here it was chance.
    """

    num_tokens: int = 0
    num_sessions: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)
    waiting: dict[int, float] = field(default_factory=dict)  # by client, since when
    wrong: list[str] = field(default_factory=list)
    refused: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def longest(self, since: float) -> float:
        """The longest gap that has ended since then, or has not ended yet."""
        with self.lock:
            open_gaps = [(begin, time.monotonic()) for begin in self.waiting.values()]
            return max(
                (end - begin for begin, end in (*self.gaps, *open_gaps) if end >= since),
                default=0.0,
            )

    def forget(self, before: float) -> None:
        with self.lock:
            self.gaps = [gap for gap in self.gaps if gap[1] >= before]


def _generate_often(
    number: int, address: str, expected: dict[str, list[int]], watch: Watch, ended: threading.Event
) -> None:
    draw = random.Random(number)
    with Client(address, resume_s=120.0) as client:
        while not ended.is_set():
            prompt = draw.choice(PROMPTS)
            found: list[int] = []
            since = time.monotonic()
            try:
                for item in client.generate(prompt, PARAMS, METHOD):
                    found += item.token_ids
                    now = time.monotonic()
                    with watch.lock:
                        watch.gaps.append((since, now))
                        watch.waiting[number] = since = now
            except PoisonRequest:
                watch.refused += 1
            except Exception as error:
                watch.wrong.append(f"after {len(found)} tokens: {type(error).__name__}: {error}")
            else:
                if found != expected[prompt]:
                    watch.wrong.append(f"{found} instead of {expected[prompt]}")
            with watch.lock:
                watch.waiting.pop(number, None)
                watch.num_tokens += len(found)
                watch.num_sessions += 1


def _expected() -> dict[str, list[int]]:
    from paceline.loading import limit_threads, load_engine

    limit_threads(1)
    engine = load_engine()
    assert engine.tokenizer is not None
    ids = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    sessions = engine.generate(ids, PARAMS, SpeculationConfig(method="ar"))
    return {p: s.output_ids for p, s in zip(PROMPTS, sessions, strict=True)}


# --- the faults ---------------------------------------------------------------------------------


class World:
    """The processes and the links between them."""

    def __init__(self, stack: ExitStack, seed: int) -> None:
        self.draw = random.Random(seed)
        self.drafter = Process("drafter")
        self.to_drafter = stack.enter_context(Netem(self.drafter.address))
        self.targets = [Process("target", self.to_drafter.address) for _ in range(2)]
        self.to_targets = [stack.enter_context(Netem(each.address)) for each in self.targets]
        upstream = [each.address for each in self.to_targets]
        self.gateways = [Process("gateway", upstream) for _ in range(2)]
        # As a load balancer does, it sends new connections to a gateway that is there.
        self.front = stack.enter_context(Netem(self.gateways[0].address))
        self.processes = [self.drafter, *self.targets, *self.gateways]
        for process in self.processes:
            stack.callback(process.kill)
        for process in self.processes:
            process.wait_up()
        self.links = [self.front, *self.to_targets, self.to_drafter]

    def kill(self, kind: str) -> None:
        """Kill a process of a kind, and start another one; one of two stays up."""
        some = [process for process in self.processes if process.role == kind]
        process = self.draw.choice(some)
        for other in some:
            other.wait_up()
        process.kill()
        if kind == "gateway":
            (other,) = (each for each in some if each is not process)
            self.front.redirect(other.address)
        process.start()

    def stop_a_while(self) -> None:
        process = self.draw.choice(self.processes)
        process.signal(signal.SIGSTOP)
        time.sleep(self.draw.uniform(0.1, 1.0))
        process.signal(signal.SIGCONT)

    def on_a_link(self, change: Callable[[Netem], object], undo: Callable[[Netem], object]) -> None:
        link = self.draw.choice(self.links)
        change(link)
        time.sleep(self.draw.uniform(0.1, 1.0))
        undo(link)

    def jump(self) -> None:
        process = self.draw.choice([each for each in self.processes if each.is_up])
        process.signal(signal.SIGUSR1)


FAULTS: dict[str, Callable[[World], object]] = {
    "target killed": lambda world: world.kill("target"),
    "drafter killed": lambda world: world.kill("drafter"),
    "gateway killed": lambda world: world.kill("gateway"),
    "process stopped": World.stop_a_while,
    "connections reset": lambda world: world.draw.choice(world.links).reset(),
    "half-open": lambda world: world.draw.choice(world.links).cut(),
    "silent link": lambda w: w.on_a_link(
        lambda link: link.partition(), lambda link: link.partition(False)
    ),
    "slow link": lambda w: w.on_a_link(
        lambda link: link.set(rtt=0.3), lambda link: link.set(rtt=0)
    ),
    "refused": lambda w: w.on_a_link(lambda link: link.refuse(), lambda link: link.refuse(False)),
    "clock jump": World.jump,
}


def run(
    num_faults: int, num_clients: int, seed: int, faults: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """One record for each fault; the last one sums up."""
    expected, watch, ended = _expected(), Watch(), threading.Event()
    with ExitStack() as stack:
        world = World(stack, seed)
        threads = [
            threading.Thread(
                target=_generate_often, args=(i, world.front.address, expected, watch, ended)
            )
            for i in range(num_clients)
        ]
        for thread in threads:
            thread.start()
        try:
            time.sleep(3.0)
            for number in range(num_faults):
                kind = faults[number] if number < len(faults) else world.draw.choice(faults)
                before = time.monotonic()
                FAULTS[kind](world)
                time.sleep(world.draw.uniform(*SETTLE_S))
                yield {
                    "fault": kind, "gap_s": round(watch.longest(before), 3),
                    "seconds": round(time.monotonic() - before, 3), "wrong": len(watch.wrong),
                }  # fmt: skip
                watch.forget(before)
        finally:
            ended.set()
            for thread in threads:
                thread.join(180)
        yield {
            "sessions": watch.num_sessions, "tokens": watch.num_tokens, "wrong": watch.wrong,
            "refused": watch.refused, "stuck": sum(thread.is_alive() for thread in threads),
        }  # fmt: skip


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not below ``share`` of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def draw_figure(gaps: dict[str, list[float]], out: Path) -> None:
    """The distribution of the gaps, a curve for each kind of fault."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4))
    for kind, values in gaps.items():
        ordered = sorted(values)
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        axis.step(ordered, shares, where="post", label=f"{kind} ({len(ordered)})")
    axis.set(xscale="log", xlabel="longest gap of a live session (s)", ylabel="share of the faults")
    axis.axvline(2.0, color="grey", linewidth=0.8, linestyle="--")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(out, dpi=80)


def read(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """The faults of earlier runs, and one record that sums all of them up."""
    total: dict[str, Any] = {"sessions": 0, "tokens": 0, "wrong": [], "refused": 0, "stuck": 0}
    for file in files:
        for line in file.read_text().splitlines():
            record = json.loads(line)
            if "fault" in record:
                yield record
            else:
                total = {key: total[key] + record[key] for key in total}
    yield total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a line of JSON for each fault")
    parser.add_argument("--read", type=Path, nargs="+", help="such files, in place of a run")
    parser.add_argument("--figure", type=Path, help="PNG of the distribution of the gaps")
    options = parser.parse_args()
    gaps: dict[str, list[float]] = {}
    last: dict[str, Any] = {}
    with ExitStack() as stack:
        out = None if options.out is None else stack.enter_context(options.out.open("w"))
        records = (
            run(options.faults, options.clients, options.seed, options.kinds)
            if options.read is None
            else read(options.read)
        )
        for last in records:
            if "fault" in last:
                gaps.setdefault(last["fault"], []).append(last["gap_s"])
            if out is not None:
                print(json.dumps(last), file=out, flush=True)
    print(f"{'fault':18} {'count':>6} {'p50 s':>7} {'p99 s':>7} {'longest':>8}")
    everything = [gap for values in gaps.values() for gap in values]
    for kind, values in {**gaps, "all": everything}.items():
        cells = quantile(values, 0.5), quantile(values, 0.99), max(values)
        print(f"{kind:18} {len(values):6} " + " ".join(f"{cell:7.2f}" for cell in cells))
    print(
        f"{last['sessions']} sessions, {last['tokens']} tokens, wrong: {len(last['wrong'])}, "
        f"refused after two deaths: {last['refused']}"
    )
    if options.figure is not None:
        draw_figure(gaps, options.figure)
    if last["wrong"] or last["stuck"]:
        sys.exit("\n".join([f"{last['stuck']} clients are stuck", *last["wrong"][:10]]))


if __name__ == "__main__":
    main()
