"""How long targets wait for drafts when drafters are added: measured, and as simulated.

    python -m benchmarks.drafter_pool                      # fakes: ten targets, 1 to 8 drafters
    python -m benchmarks.drafter_pool --out docs/figures/drafter_pool.png     # and the demo pair

Engine, pool, gRPC and drafter services are the real ones, each drafter in a process of its own.
With fakes, targets and drafters sleep for the time that their forwards would take. With the demo
pair, they sleep as long before each forward, as if the models were larger and each ran on a
processor of its own: so six of them fit on a small machine.

The simulation (:func:`simulate`) runs the code that places sessions, on a clock of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline.config import SpeculationConfig
from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.drafters.base import Drafter
from paceline.engine import Engine, EngineThread
from paceline.loading import limit_threads, load_drafter, load_engine
from paceline.plan import resolve
from paceline.request import Request
from paceline.rpc.draft_service import DraftServicer
from paceline.rpc.drafter_places import DrafterLoad, DrafterPlaces
from paceline.rpc.drafter_pool import RETRY_S, DrafterPool
from paceline.rpc.remote_drafter import RemoteDrafter
from paceline.rpc.server import start_server
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.types import Budget, Draft, Need, Verification
from paceline.view import SessionView

DRAFTS = SpeculationConfig(method="draft_model", length="fixed", num_speculative_tokens=2)
VOCAB_SIZE = 16


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a drafter's forward and of each session in it, of a target's forward, and of the
    way to a drafter and back.

    Each forward takes between half and one and a half times that, at random: targets and drafters
    that all take the same time fall into step, each run in another one.
    """

    draft_s: float = 0.04
    session_s: float = 0.01
    verify_s: float = 0.1
    way_s: float = 0.0

    def draft(self, sessions: int, chance: random.Random) -> float:
        return (self.draft_s + self.session_s * sessions) * chance.uniform(0.5, 1.5)

    def verify(self, chance: random.Random) -> float:
        return self.verify_s * chance.uniform(0.5, 1.5)


# --- simulation ----------------------------------------------------------------------------------


class _Simulation:
    """Events on a clock: frames arrive at drafters, drafts at targets, and targets verify."""

    def __init__(self, targets: int, sessions: int, drafters: int, costs: Costs) -> None:
        self.costs = costs
        self.now = 0.0
        self._chance = random.Random(0)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.waits: list[tuple[float, float]] = []  # when they ended, and how long they were
        self._queues: list[list[tuple[int, list[str], float]]] = [[] for _ in range(drafters)]
        self._busy = [False] * drafters
        self._places = [DrafterPlaces((i + 0.5) / targets) for i in range(targets)]
        self._loads = [{"0": DrafterLoad()} for _ in range(targets)]
        self._probe_at = [0.0] * targets
        self._arrived: list[list[str]] = [[] for _ in range(targets)]
        self._verifying = [False] * targets
        for target in range(targets):  # not all in one moment
            names = [f"s{i}" for i in range(sessions)]
            self._at(costs.verify_s * target / targets, partial(self._ask, target, names))

    def join(self) -> None:
        """All drafters but the first, which is there from the beginning."""
        for loads in self._loads:
            loads |= {str(d): DrafterLoad() for d in range(1, len(self._queues))}

    def run(self, seconds: float) -> None:
        while self._events and self.now < seconds:
            self.now, _, happen = heapq.heappop(self._events)
            happen()

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen))

    def _total(self) -> Counter[str]:
        return Counter(a for places in self._places for a in places.of.values())

    def _ask(self, target: int, names: list[str]) -> None:
        places, loads = self._places[target], self._loads[target]
        places.rebalance(set(names), loads, self.now)
        if self.now >= self._probe_at[target]:
            self._probe_at[target] = self.now + RETRY_S
            for address, count in self._total().items():
                loads[address].sessions = count
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(places.place(name, loads, self.now), []).append(name)
        for address, members in groups.items():
            frame = target, members, self.now
            self._at(self.now + self.costs.way_s / 2, partial(self._take, int(address), frame))

    def _take(self, drafter: int, frame: tuple[int, list[str], float]) -> None:
        self._queues[drafter].append(frame)
        self._draft(drafter)

    def _draft(self, drafter: int) -> None:
        if self._busy[drafter] or not self._queues[drafter]:
            return
        frames, self._queues[drafter] = self._queues[drafter], []
        self._busy[drafter] = True
        seconds = self.costs.draft(sum(len(members) for _, members, _ in frames), self._chance)
        self._at(self.now + seconds, lambda: self._answer(drafter, frames))

    def _answer(self, drafter: int, frames: list[tuple[int, list[str], float]]) -> None:
        self._busy[drafter] = False
        count = self._total()[str(drafter)]
        arrived = self.now + self.costs.way_s / 2
        for target, members, since in frames:
            self._at(arrived, partial(self._receive, drafter, count, target, members, since))
        self._draft(drafter)

    def _receive(
        self, drafter: int, count: int, target: int, members: list[str], since: float
    ) -> None:
        load = self._loads[target][str(drafter)]
        load.sessions = count
        load.observe(self.now - since, self.now)
        self.waits.append((self.now, self.now - since))
        self._arrived[target] += members
        self._verify(target)

    def _verify(self, target: int) -> None:
        if self._verifying[target] or not self._arrived[target]:
            return
        self._verifying[target] = True
        ready, self._arrived[target] = self._arrived[target], []

        def done() -> None:
            self._verifying[target] = False
            self._ask(target, ready)
            self._verify(target)

        self._at(self.now + self.costs.verify(self._chance), done)


def simulate(
    targets: int, sessions: int, drafters: int, costs: Costs, *, seconds: float = 60.0
) -> float:
    """The mean wait of a frame, in seconds, once the sessions have settled.

    Args:
        sessions: of each target.
        seconds: simulated time. Drafters are added to the first one after a tenth of it; the first
            half does not count.
    """
    simulation = _Simulation(targets, sessions, drafters, costs)
    simulation.run(seconds / 10)
    simulation.join()
    simulation.run(seconds)
    return statistics.fmean(wait for at, wait in simulation.waits if at > seconds / 2)


# --- fakes ---------------------------------------------------------------------------------------


class FakeTarget:
    """Verifies by sleeping; every session goes on with the same token."""

    vocab_size = VOCAB_SIZE
    num_layers = 1
    head_layers = 0.0
    provides: frozenset[Need] = frozenset()
    context_length = kv_capacity = num_free = 1 << 20

    def __init__(self, costs: Costs) -> None:
        self._costs, self._chance = costs, random.Random()
        self._logits = torch.zeros(64, VOCAB_SIZE)
        self._logits[:, 1] = 1.0

    def open(self, session: SessionView) -> None: ...

    def close(self, session: SessionView) -> None: ...

    def prefill_left(self, session: SessionView) -> int:
        return 0

    def verify(
        self, sessions: Sequence[SessionView], drafts: Sequence[Draft], *_: Any
    ) -> list[Verification]:
        time.sleep(self._costs.verify(self._chance))
        return [Verification(self._logits[: 1 + draft.num_nodes]) for draft in drafts]

    def commit(self, session: SessionView, path: Sequence[int]) -> None: ...

    def truncate(self, session: SessionView, length: int) -> None: ...

    def exit_logits(self, states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def slow_down(engine: Engine, costs: Costs) -> None:
    """Let a real target sleep before each forward."""
    verify, chance = engine.target.verify, random.Random()

    def slower(*arguments: Any) -> list[Verification]:
        time.sleep(costs.verify(chance))
        return verify(*arguments)

    engine.target.verify = slower  # type: ignore[method-assign]


class FakeDrafter(Drafter):
    """Drafts by sleeping."""

    def __init__(self, costs: Costs) -> None:
        self._costs, self._chance = costs, random.Random()

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        time.sleep(self._costs.draft(len(sessions), self._chance))
        return [Draft.chain([0] * budget.depth) for budget in budgets]


class Sleepy(Drafter):
    """The demo pair's drafter, after a sleep."""

    def __init__(self, costs: Costs) -> None:
        self._drafter = load_drafter(DRAFTER_DIR, TARGET_DIR)
        self._costs, self._chance = costs, random.Random()
        self.vocab_size: int = self._drafter.vocab_size
        self.open, self.close = self._drafter.open, self._drafter.close
        self.observe, self.rewinds = self._drafter.observe, False  # its time is not free

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        time.sleep(self._costs.draft(len(sessions), self._chance))
        return list(self._drafter.propose(sessions, budgets))


async def serve(costs: Costs, real: bool) -> None:
    """A drafter's process: print the address, and serve until it is killed."""
    limit_threads(1)
    drafter = Sleepy(costs) if real else FakeDrafter(costs)
    vocab_size = drafter.vocab_size if isinstance(drafter, Sleepy) else VOCAB_SIZE
    servicer = DraftServicer(drafter, name="draft_model", vocab_size=vocab_size)
    server = await start_server(drafter=servicer)
    print(server.address, flush=True)
    await server.server.wait_for_termination()


@contextmanager
def drafter_processes(count: int, costs: Costs, *, real: bool = False) -> Iterator[list[str]]:
    """Addresses of so many drafters, which end with the context."""
    command = [sys.executable, "-m", "benchmarks.drafter_pool", "--serve", *(["--real"] * real)]
    command += [f"--draft-ms={1e3 * costs.draft_s}", f"--session-ms={1e3 * costs.session_s}"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield [process.stdout.readline().strip() for process in processes if process.stdout]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


# --- measurement ---------------------------------------------------------------------------------


class Measured(NamedTuple):
    """Means: the wait of a frame, the drafter's part of it, and the forward of a round; seconds."""

    wait_s: float
    draft_s: float
    verify_s: float


class Targets:
    """Engines with their pools and sessions that never end."""

    def __init__(self, engines: Sequence[Engine], pools: Sequence[DrafterPool]) -> None:
        self.threads = [EngineThread(engine) for engine in engines]
        self.pools = pools

    def use(self, addresses: Sequence[str], timeout: float = 30.0) -> None:
        """Draft with these drafters from now on, as soon as all answer."""
        for pool in self.pools:
            pool.use(addresses)
        end = time.monotonic() + timeout
        while any(len(pool.connected) < len(addresses) for pool in self.pools):
            if time.monotonic() > end:
                raise TimeoutError(f"not all of {len(addresses)} drafters answer")
            time.sleep(0.01)

    def measure(self, seconds: float) -> Measured:
        """What the next ``seconds`` are like."""
        before = self._totals()
        time.sleep(seconds)
        waited, drafted, frames, verified, rounds = (
            b - a for a, b in zip(before, self._totals(), strict=True)
        )
        return Measured(waited / frames, drafted / frames, verified / rounds)

    def _totals(self) -> tuple[float, ...]:
        counters = [pool.counters for pool in self.pools]
        rounds = [thread.engine.count_rounds() for thread in self.threads]
        return (
            sum(each.wait_seconds for each in counters),
            sum(each.draft_seconds for each in counters),
            sum(each.num_frames for each in counters),
            sum(seconds for _, seconds in rounds),
            sum(number for number, _ in rounds),
        )

    def sessions(self) -> Counter[str]:
        """How many sessions each drafter has."""
        found: Counter[str] = Counter()
        for pool in self.pools:
            found.update({each["address"]: each["sessions"] for each in pool.describe()})
        return found


@contextmanager
def running(
    count: int, sessions: int, costs: Costs, addresses: Sequence[str], *, real: bool = False
) -> Iterator[Targets]:
    """So many targets, each with so many sessions."""
    with ExitStack() as stack:
        engines, pools = [], []
        for _ in range(count):
            engine = load_engine() if real else Engine(FakeTarget(costs))
            if real:
                slow_down(engine, costs)
            pool = stack.enter_context(DrafterPool(vocab_size=engine.target.vocab_size))
            engine.drafters["draft_model"] = pool
            engines.append(engine)
            pools.append(pool)
        targets = Targets(engines, pools)
        targets.use(addresses)
        params = SamplingParams(max_tokens=400 if real else 100_000, ignore_eos=True)
        ended = threading.Event()
        for i, (engine, thread) in enumerate(zip(engines, targets.threads, strict=True)):
            for k in range(sessions):
                prompt = [1 + (i + k) % (VOCAB_SIZE - 2)] * (8 + k)
                _submit(engine, Request(prompt, params, DRAFTS), ended)
            time.sleep(costs.verify_s / count)
            stack.callback(thread.stop)
            thread.start()
        stack.callback(ended.set)
        yield targets


def _submit(engine: Engine, request: Request, ended: threading.Event) -> None:
    """Keep a session running: when it ends, the next one begins."""

    def on_event(event: Any) -> None:
        if event.finished and not ended.is_set():
            _submit(engine, request, ended)

    engine.submit(request, on_event)


def compare(
    targets: int, sessions: int, counts: Sequence[int], costs: Costs, *,
    real: bool = False, warm_up_s: float = 6.0, seconds: float = 10.0,
) -> dict[int, tuple[float, float]]:  # fmt: skip
    """By number of drafters, the measured and the simulated wait of a frame, in seconds.

    The simulation gets the times of single forwards: of a draft for one session alone, and of a
    verification with the first number of drafters.
    """
    found: dict[int, tuple[float, float]] = {}
    with ExitStack() as stack:
        addresses = stack.enter_context(drafter_processes(max(counts), costs, real=real))
        alone = with_way(addresses[0], costs, real=real)
        pools = stack.enter_context(
            running(targets, sessions, costs, addresses[: counts[0]], real=real)
        )
        for count in counts:
            pools.use(addresses[:count])
            time.sleep(warm_up_s)
            measured = pools.measure(seconds)
            if not found:
                costs = replace(alone, verify_s=measured.verify_s)
            found[count] = measured.wait_s, simulate(targets, sessions, count, costs)
            print(
                f"{count} drafters: {1e3 * found[count][0]:6.1f} ms measured, "
                f"{1e3 * found[count][1]:6.1f} ms simulated, "
                f"{100 * (found[count][0] / found[count][1] - 1):+.0f} %; sessions "
                f"{sorted(pools.sessions().values(), reverse=True)}",
                flush=True,
            )
    return found


def with_way(address: str, costs: Costs, *, real: bool, rounds: int = 50) -> Costs:
    """The costs with what a drafter computes beside its sleep, and the way to it, measured."""
    session = Session("alone", [1] * 64, SamplingParams(), resolve(DRAFTS))
    with RemoteDrafter(address, vocab_size=1 << 20) as remote:
        remote.wait_ready(10)
        for _ in range(rounds):
            (future,) = remote.propose([session], [Budget(2, 2)])
            future.result(10)
            session.token_ids.append(1)
        counters = remote.counters
    draft_s, wait_s = counters.draft_seconds / rounds, counters.wait_seconds / rounds
    own_s = max(0.0, draft_s - costs.draft_s - costs.session_s) if real else 0.0
    return replace(costs, draft_s=costs.draft_s + own_s, way_s=wait_s - draft_s)


def plot(results: dict[str, dict[int, tuple[float, float]]], out: Path) -> None:
    """Draw the waits by number of drafters."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(5 * len(results), 3.6), squeeze=False)
    for axis, (title, found) in zip(axes[0], results.items(), strict=True):
        counts = list(found)
        axis.plot(counts, [1e3 * found[n][0] for n in counts], "o-", label="measured")
        axis.plot(counts, [1e3 * found[n][1] for n in counts], "x--", label="simulated")
        axis.set(title=title, xlabel="drafters", ylabel="wait of a frame (ms)", ylim=(0, None))
        axis.set_xticks(counts)
        axis.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=80)
    print(f"{out} written")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", type=int, default=10, help="fake ones")
    parser.add_argument("--sessions", type=int, default=4, help="of each fake target")
    parser.add_argument("--drafters", default="1,2,3,4,6,8", help="numbers of drafters")
    parser.add_argument("--draft-ms", type=float, default=40.0, help="of a drafter's forward")
    parser.add_argument("--session-ms", type=float, default=10.0, help="of each session in it")
    parser.add_argument("--verify-ms", type=float, default=100.0, help="of a target's forward")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="draw the plot, and also one with real models")
    parser.add_argument("--real", action="store_true", help="real models only")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    costs = Costs(*(ms / 1e3 for ms in (options.draft_ms, options.session_ms, options.verify_ms)))
    if options.serve:
        asyncio.run(serve(costs, options.real))
        return
    results = {}
    if not options.real:
        counts = [int(word) for word in options.drafters.split(",")]
        title = f"fakes: {options.targets} targets with {options.sessions} sessions"
        print(title)
        results[title] = compare(
            options.targets, options.sessions, counts, costs, seconds=options.seconds
        )
    if options.real or options.out:
        limit_threads(1)
        title = "demo pair: 2 targets with 4 sessions"
        print(title)
        results[title] = compare(2, 4, (1, 2, 3, 4), costs, real=True, seconds=options.seconds)
    if options.out:
        plot(results, options.out)


if __name__ == "__main__":
    main()
