"""Where drafting on a device pays: round trip and acceptance against tokens per second.

One device and one target replica, with the demo target's real forwards. The link's delay is made by
a proxy (`benchmarks/netem.py`). The drafter is simulated, on both sides alike: it is right with
probability rho at each token and takes `--draft-ms` for one (`benchmarks.scripted.SlowMix`). A
device that chooses its mode learns for `--learn` seconds first. Then it takes turns with devices
that are each pinned to one mode; only that part counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.replica import WITH_MIX, Replica
from benchmarks.scripted import SlowMix
from paceline.bench.environment import describe_environment
from paceline.bench.prompts import builtin_prompts, limit_per_category
from paceline.cluster.cli_output import set_threads
from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.loading import load_engine
from paceline.rpc.device import LADDER, DeviceClient
from paceline.rpc.ladder import Mode
from paceline.sampling import SamplingParams
from paceline.tokenizer import load_tokenizer

Continuations = dict[tuple[int, ...], list[int]]
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Cell:
    """Committed tokens a second, by mode, and what the device did when it chose."""

    rtt_ms: float
    rho: float
    rates: dict[str, float]
    first: float  # of the choosing device while it learned
    in_mode: dict[str, int]  # tokens of the choosing device by mode

    @property
    def best(self) -> str:
        return max((mode for mode in self.rates if mode != AUTO), key=lambda mode: self.rates[mode])

    @property
    def share(self) -> float:
        """The choosing device's rate over the best mode's."""
        return self.rates[AUTO] / self.rates[self.best]


class Proxy:
    """The link, in a process of its own."""

    def __init__(self, upstream: str, rtt_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.netem", upstream, "--rtt", str(rtt_s)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=10)


class Device:
    """A client with the simulated drafter."""

    def __init__(
        self, address: str, modes: Sequence[Mode], truth: Continuations, rho: float, draft_s: float
    ) -> None:
        self._truth = truth
        self.client = DeviceClient(
            [address], {"mix": SlowMix(truth, 4096, rho=rho, token_seconds=draft_s)},
            speculation=SpeculationConfig(method="mix", length="round_trip", length_max=16),
            modes=modes,
            catalogue=WITH_MIX,
        )  # fmt: skip
        self.in_mode = {mode.value: 0 for mode in Mode}

    def rate(self, seconds: float) -> float:
        """Tokens a second of one generation after another, until the time is over."""
        tokens, begun = 0, time.perf_counter()
        while True:
            for prompt, truth in self._truth.items():
                params = SamplingParams(max_tokens=len(truth), ignore_eos=True)
                for done in self.client.generate(prompt, params):
                    tokens += len(done.token_ids)
                    self.in_mode[done.mode.value] += len(done.token_ids)
                    elapsed = time.perf_counter() - begun
                    if elapsed > seconds:
                        return tokens / elapsed
                assert self.client.result.token_ids == truth

    def close(self) -> None:
        self.client.close()


def continuations(count: int, max_tokens: int) -> Continuations:
    """What AR generates after the built-in prompts."""
    tokenizer = load_tokenizer(TARGET_DIR)
    prompts = limit_per_category(builtin_prompts(), 1)[:count]
    engine = load_engine(TARGET_DIR)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    ids = [tokenizer.encode(prompt.text) for prompt in prompts]
    sessions = engine.generate(ids, params, SpeculationConfig(method="ar"))
    return {tuple(s.token_ids[: s.prompt_length]): s.output_ids for s in sessions}


def measure(
    address: str, rtt_ms: float, rho: float, truth: Continuations, options: argparse.Namespace
) -> Cell:
    """One cell: all pinned modes, and the choice."""
    proxy = Proxy(address, rtt_ms / 1e3)
    rates: dict[str, list[float]] = {}
    try:
        pinned = {m.value: Device(proxy.address, (m,), truth, rho, options.draft_s) for m in LADDER}
        chooser = Device(proxy.address, LADDER, truth, rho, options.draft_s)
        first = chooser.rate(options.learn)
        chooser.in_mode = dict.fromkeys(chooser.in_mode, 0)
        for _ in range(options.repeats):  # in turns: the machine's speed drifts
            for name, device in [*pinned.items(), (AUTO, chooser)]:
                rates.setdefault(name, []).append(device.rate(options.seconds))
        for device in (*pinned.values(), chooser):
            device.close()
    finally:
        proxy.close()
    middle = {name: median(found) for name, found in rates.items()}
    return Cell(rtt_ms, rho, middle, first, chooser.in_mode)


def show(cells: Sequence[Cell]) -> None:
    """Print the table."""
    table = Table(box=None, pad_edge=False)
    modes = [mode.value for mode in LADDER]
    for column in ("RTT ms", "rho", *(f"{mode} tok/s" for mode in modes), "auto tok/s",
                   "best", "auto / best", "first s", "tokens by mode"):  # fmt: skip
        table.add_column(column, justify="left" if column == "best" else "right")
    for cell in cells:
        table.add_row(
            f"{cell.rtt_ms:.0f}", f"{cell.rho:.2f}",
            *(f"{cell.rates[mode]:.0f}" for mode in modes), f"{cell.rates[AUTO]:.0f}",
            cell.best, f"{cell.share:.2f}", f"{cell.first:.0f}",
            " ".join(f"{mode} {n}" for mode, n in cell.in_mode.items() if n),
        )  # fmt: skip
    Console(width=140).print(table)
    print(f"least auto / best: {min(cell.share for cell in cells):.2f}")


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Rates of drafting on the device over the best mode without it, and of auto over the best."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rtts = sorted({cell.rtt_ms for cell in cells})
    rhos = sorted({cell.rho for cell in cells})
    gain, share = np.full((len(rtts), len(rhos)), np.nan), np.full((len(rtts), len(rhos)), np.nan)
    for cell in cells:
        at = rtts.index(cell.rtt_ms), rhos.index(cell.rho)
        others = max(cell.rates[mode.value] for mode in (Mode.SERVER, Mode.AR))
        gain[at], share[at] = cell.rates[Mode.DEVICE.value] / others, cell.share
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    for axis, values, title, limits in (
        (axes[0], gain, "drafts of the device / best without it", (0.0, 2.0)),
        (axes[1], share, "automatic choice / best mode", (0.8, 1.2)),
    ):
        shown = axis.imshow(values, origin="lower", cmap="RdYlGn", vmin=limits[0], vmax=limits[1])
        for (row, column), value in np.ndenumerate(values):
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
        axis.set_xticks(range(len(rhos)), [f"{rho:g}" for rho in rhos])
        axis.set_yticks(range(len(rtts)), [f"{rtt:g}" for rtt in rtts])
        axis.set_xlabel("chance that a drafted token is right")
        axis.set_ylabel("round trip, ms")
        axis.set_title(title, fontsize=10)
        figure.colorbar(shown, ax=axis)
    axes[0].contour(gain, levels=[1.0], colors="black", linewidths=2)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rtt", type=float, nargs="*", default=[0, 10, 30, 100, 200], help="ms")
    parser.add_argument("--rho", type=float, nargs="*", default=[0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 1])
    parser.add_argument("--draft-ms", type=float, default=1.0, help="of a drafted token")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a measurement")
    parser.add_argument(
        "--learn", type=float, default=6.0, help="seconds that the choosing device may learn"
    )
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--add", type=Path, help="cells of an earlier run (JSON), to go on from")
    parser.add_argument("--plot", type=Path, help="PNG file")
    parser.add_argument("--json", type=Path, help="write the cells to this file")
    options = parser.parse_args()
    options.draft_s = options.draft_ms / 1e3
    set_threads(1, None)
    truth = continuations(4, options.max_tokens)
    cells = []
    if options.add and options.add.is_file():
        cells = [Cell(**cell) for cell in json.loads(options.add.read_text())["cells"]]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"continuations": [[list(p), t] for p, t in truth.items()]}, file)
        file.flush()
        for rho in options.rho:
            arguments = ("--mix", file.name, "--rho", str(rho))
            with Replica(
                TARGET_DIR, *arguments, "--token-seconds", str(options.draft_s)
            ) as replica:
                for rtt in options.rtt:
                    cells.append(measure(replica.address, rtt, rho, truth, options))
                    show(cells[-1:])
    cells.sort(key=lambda cell: (cell.rtt_ms, cell.rho))
    if options.plot:
        plot(cells, options.plot)
    if options.json:
        document = {"environment": describe_environment(), "cells": [asdict(c) for c in cells]}
        options.json.write_text(json.dumps(document, indent=2))
    show(cells)


if __name__ == "__main__":
    main()
