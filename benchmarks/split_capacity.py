"""Capacity of one target replica: drafts from client devices against drafts of its own.

A replica that also drafts spends `gamma * t_d + t_v` on a round; one whose clients draft spends
`t_v`. So devices multiply its goodput by at most `1 + gamma * t_d / t_v`, with the times that the
replica itself measures while it drafts. Both are driven with growing numbers of clients, in turn;
capacity is the highest goodput over these numbers.

What is real: the target and its forwards, the drafter and its forwards on the server, gRPC, and the
accepted tokens. What is simulated: the device's processor. Its drafts are recordings of the same
drafter on the same tokens, and a client sleeps for the time that a draft takes on an idle machine,
so that a machine with two cores can hold a server and all of its devices.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.replica import Replica
from paceline.bench.environment import describe_environment
from paceline.bench.prompts import builtin_prompts, limit_per_category
from paceline.cluster.cli_output import set_threads
from paceline.config import SpeculationConfig
from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.drafters.base import at_once
from paceline.engine import Engine
from paceline.loading import load_engine
from paceline.rpc.client import AsyncClient
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.tokenizer import load_tokenizer
from paceline.types import Budget, Draft

Drafts = dict[int, Draft]  # by the number of tokens that a draft follows


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt, its whole output, and what the drafter proposes on the way."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    drafts: Drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """One drafter. Seconds; goodput in committed tokens a second, by the number of clients.

    Attributes:
        draft_alone: of one drafted token on an idle device.
        draft, verify: of a round on the server that drafts, with the clients that give it most.
        server_cpu, device_cpu: processor time of the replica's busiest thread, its engine, for a
            committed token: what remains to compare on a machine that others use as well.
        bound: 1 + draft / verify.
    """

    drafter: str
    gamma: int
    mean_accepted_length: float
    draft_alone: float
    draft: float
    verify: float
    server: dict[int, float]
    device: dict[int, float]
    server_cpu: float
    device_cpu: float

    @property
    def bound(self) -> float:
        return 1 + self.draft / self.verify

    @property
    def gain(self) -> float:
        return max(self.device.values()) / max(self.server.values())

    @property
    def cpu_gain(self) -> float:
        return self.server_cpu / self.device_cpu


def cut_target(layers: int, folder: Path) -> Path:
    """A drafter of the demo target's first layers, which early-exit losses have trained for it."""
    from paceline.train.checkpoints import first_layers, load_model

    path = folder / f"first-{layers}"
    first_layers(load_model(TARGET_DIR), layers).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TARGET_DIR / name, path / name)
    return path


class Recorder:
    """Notes what a drafter proposes, and how long it takes."""

    def __init__(self, engine: Engine) -> None:
        drafter = engine.drafters["draft_model"]
        self._propose = drafter.propose
        self.drafts: Drafts = {}
        self.seconds: list[float] = []
        drafter.propose = self.propose  # type: ignore[method-assign]

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        begun = time.perf_counter()
        drafts = at_once(self._propose(sessions, budgets))
        elapsed = time.perf_counter() - begun
        for session, draft in zip(sessions, drafts, strict=True):
            self.drafts[session.length] = draft
            if draft.num_nodes:
                self.seconds.append(elapsed / draft.num_nodes)
        return drafts


def record(
    drafter: Path, prompts: Sequence[Sequence[int]], config: SpeculationConfig, max_tokens: int
) -> tuple[list[Work], float, float]:
    """Outputs and drafts; seconds of a drafted token; mean accepted length."""
    engine = load_engine(TARGET_DIR, drafter)
    recorder = Recorder(engine)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    work, tokens, rounds = [], 0, 0
    for prompt in prompts:
        recorder.drafts = {}
        (session,) = engine.generate([prompt], params, config)
        work.append(Work(tuple(prompt), tuple(session.output_ids), recorder.drafts))
        tokens += session.stats.num_tokens
        rounds += session.stats.num_rounds
    return work, median(recorder.seconds), tokens / rounds


def thread_seconds(pid: int) -> dict[str, float]:
    """Processor time of each thread of a process."""
    tasks = Path(f"/proc/{pid}/task")
    return {t.name: int((t / "schedstat").read_text().split()[0]) / 1e9 for t in tasks.iterdir()}


class Load:
    """Clients of one replica, which start anew whenever a generation ends."""

    def __init__(self, replica: Replica, work: Sequence[Work], config: SpeculationConfig) -> None:
        self._replica = replica
        self._work = work
        self._config = config
        self.tokens = 0
        self.draft = self.verify = 0.0  # seconds of the server, for all rounds that ended
        self.rounds = 0
        self.cpu = 0.0  # seconds of the replica's busiest thread, for a committed token

    async def run(self, clients: int, seconds: float, token_seconds: float | None) -> float:
        """Committed tokens a second.

        Args:
            token_seconds: of a drafted token on a device; None: the server drafts.
        """
        async with AsyncClient(self._replica.address, timeout=120) as client:
            tasks = [
                asyncio.create_task(
                    self._generate(client, i)
                    if token_seconds is None
                    else self._verify(client, i, token_seconds)
                )
                for i in range(clients)
            ]
            await asyncio.sleep(seconds / 3)  # until all of them run
            self.tokens, self.rounds, self.draft, self.verify = 0, 0, 0.0, 0.0
            begun, before = time.perf_counter(), thread_seconds(self._replica.pid)
            await asyncio.sleep(seconds)
            rate = self.tokens / (time.perf_counter() - begun)
            after = thread_seconds(self._replica.pid)
            busiest = max(spent - before.get(name, 0.0) for name, spent in after.items())
            self.cpu = busiest / max(1, self.tokens)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return rate

    def _next(self, client: int, turn: int) -> Work:
        return self._work[(5 * client + turn) % len(self._work)]

    async def _generate(self, client: AsyncClient, index: int) -> None:
        turn = 0
        while True:
            work, turn = self._next(index, turn), turn + 1
            params = SamplingParams(max_tokens=len(work.token_ids), ignore_eos=True)
            got: list[int] = []
            async for item in client.generate(list(work.prompt), params, self._config):
                self.tokens += len(item.token_ids)
                got += item.token_ids
                if item.statistics is not None:
                    self.rounds += item.statistics.num_rounds
                    self.draft += item.statistics.draft_seconds
                    self.verify += item.statistics.verify_seconds
            assert tuple(got) == work.token_ids

    async def _verify(self, client: AsyncClient, index: int, token_seconds: float) -> None:
        turn = 0
        while True:
            work, turn = self._next(index, turn), turn + 1
            params = SamplingParams(max_tokens=len(work.token_ids), ignore_eos=True)
            session = await client.open_session(list(work.prompt), params)
            while session.finish_reason is None:
                draft = work.drafts[len(session.token_ids)]
                await asyncio.sleep(token_seconds * draft.num_nodes)
                verified = await session.verify(draft)
                self.tokens += len(verified.token_ids)
            assert tuple(session.token_ids) == work.prompt + work.token_ids
            await session.close()


async def measure(
    name: str, drafter: Path, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> Capacity:
    """One drafter, both ways in turn."""
    config = SpeculationConfig(
        method="draft_model", num_speculative_tokens=options.gamma, length="fixed"
    )
    work, token_seconds, accepted = record(drafter, prompts, config, options.max_tokens)
    rates: dict[bool, dict[int, list[float]]] = {True: {}, False: {}}
    times: dict[int, list[tuple[float, float]]] = {}
    cpu: dict[tuple[bool, int], list[float]] = {}
    with Replica(TARGET_DIR, "--drafter", str(drafter)) as replica:
        for repeat in range(options.repeats + 1):
            for clients in options.clients:
                for on_device in (True, False):
                    load = Load(replica, work, config)
                    seconds = options.seconds if repeat else 1.0  # the first one warms up
                    rate = await load.run(clients, seconds, token_seconds if on_device else None)
                    if not repeat:
                        continue
                    rates[on_device].setdefault(clients, []).append(rate)
                    cpu.setdefault((on_device, clients), []).append(load.cpu)
                    if load.rounds:
                        one = load.draft / load.rounds, load.verify / load.rounds
                        times.setdefault(clients, []).append(one)
    device, server = (
        {clients: median(found) for clients, found in rates[way].items()} for way in (True, False)
    )
    best = max(server, key=lambda clients: server[clients])
    return Capacity(
        drafter=name,
        gamma=options.gamma,
        mean_accepted_length=accepted,
        draft_alone=token_seconds,
        draft=median(draft for draft, _ in times[best]),
        verify=median(verify for _, verify in times[best]),
        server=server,
        device=device,
        server_cpu=min(median(found) for (way, _), found in cpu.items() if not way),
        device_cpu=min(median(found) for (way, _), found in cpu.items() if way),
    )


def show(found: Sequence[Capacity]) -> None:
    """Print the table."""
    table = Table(box=None, pad_edge=False)
    for column in (
        "drafter", "gamma", "τ", "γ·t_d ms", "t_v ms", "server tok/s", "devices tok/s", "gain",
        "bound", "share", "CPU gain", "share",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for each in found:
        table.add_row(
            each.drafter, str(each.gamma), f"{each.mean_accepted_length:.2f}",
            f"{1e3 * each.draft:.1f}", f"{1e3 * each.verify:.1f}",
            *(
                f"{max(rates.values()):.0f} ({max(rates, key=lambda n: rates[n])} clients)"
                for rates in (each.server, each.device)
            ),
            f"{each.gain:.2f}", f"{each.bound:.2f}", f"{100 * each.gain / each.bound:.0f} %",
            f"{each.cpu_gain:.2f}", f"{100 * each.cpu_gain / each.bound:.0f} %",
        )  # fmt: skip
    Console(width=160).print(table)


def plot(found: Sequence[Capacity], path: Path) -> None:
    """Goodput over clients, for each drafter; the bound as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(found), figsize=(4 * len(found), 3.4), sharey=True, squeeze=False
    )
    for axis, each in zip(axes[0], found, strict=True):
        best = max(each.server.values())
        axis.axhline(each.bound * best, color="0.5", linestyle="--", label="bound")
        axis.plot(list(each.device), list(each.device.values()), "o-", label="devices draft")
        axis.plot(list(each.server), list(each.server.values()), "s-", label="server drafts")
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(each.server), [str(n) for n in each.server])
        axis.set_title(f"{each.drafter}, ×{each.gain:.2f} of ×{each.bound:.2f}", fontsize=10)
        axis.set_xlabel("clients")
    axes[0][0].set_ylabel("committed tokens/s of one replica")
    axes[0][0].set_ylim(bottom=0)
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gamma", type=int, default=4, help="drafted tokens of a round")
    parser.add_argument(
        "--layers", type=int, nargs="*", default=[0, 4, 8],
        help="drafters by their number of first layers of the target; 0 is the demo's drafter",
    )  # fmt: skip
    parser.add_argument("--clients", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--seconds", type=float, default=3.0, help="of a measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--plot", type=Path, help="PNG file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    set_threads(1, None)
    tokenizer = load_tokenizer(TARGET_DIR)
    prompts = [tokenizer.encode(p.text) for p in limit_per_category(builtin_prompts(), 3)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for layers in options.layers:
            drafter = cut_target(layers, Path(folder)) if layers else DRAFTER_DIR
            name = f"first {layers} layers" if layers else "demo drafter"
            found.append(asyncio.run(measure(name, drafter, prompts, options)))
    if options.plot:
        plot(found, options.plot)
    if options.json:
        cells = [asdict(each) | {"gain": each.gain, "bound": each.bound} for each in found]
        print(json.dumps({"environment": describe_environment(), "capacity": cells}, indent=2))
    else:
        show(found)


if __name__ == "__main__":
    main()
