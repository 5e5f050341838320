"""Accuracy against tokens per forward of every diffusion schedule, on ParallelBench's list tasks.

    python -m benchmarks.diffusion [--count 25] [--model DIR] [--plot FILE] [--out FILE]
    python -m benchmarks.diffusion --any-subset [--count 25]
    python -m benchmarks.diffusion --actions [--count 25]
    python -m benchmarks.diffusion --served [--count 8]

Tokens count up to and with the end of the answer. The dashed line of `shuffle` is the closed form
for an ideal model that writes that many of four items in a forward. With `--any-subset` the model
of `paceline infill` writes the answers, and tokens are bytes. With `--actions` the schedule
`remask` writes chunks of actions, each order in the same numbers of forwards; a chunk is right if
it moves as its prompt says at all its steps. With `--served` a target's server (`engine:
diffusion`) writes 64 tokens behind each of eight prompts, for one client and for eight at a time,
`--count` rounds in which the schedules take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.config import SpeculationConfig
from paceline.demo import ACTIONS_DIR, DIFFUSION_DIR
from paceline.deployments.config import parse_config
from paceline.deployments.engines.diffusion import DiffusionEngine
from paceline.diffusion import DiffusionModel, make_schedule
from paceline.diffusion.actions import CHUNK_TOKENS, Wipe
from paceline.diffusion.any_subset import AnySubsetModel, SeededDice, infill
from paceline.diffusion.schedules import ORDERS
from paceline.diffusion.tasks import TASKS, example, shuffle_accuracy
from paceline.rpc.client import AsyncClient
from paceline.rpc.server import start_server
from paceline.sampling import SamplingParams

PROMPTS = (
    "import os\nimport ", "def fib(n):\n    ", "class Stack:\n    ", "for i in range(",
    "# Read a file\n", "def main():\n    ", "Once upon a time", "x = [1, 2, ",
)  # fmt: skip
SERVED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("static", ()), ("freedave", ()), ("freedave", ("draft_steps=2",)),
    ("confidence", ("threshold=0.7",)),
)  # fmt: skip

POINTS: dict[str, list[dict[str, float]]] = {
    "static": [{"tokens_per_step": count} for count in (1, 2, 4)],
    "freedave": [{"draft_steps": 4}],
    "confidence": [{"threshold": value} for value in (0.9, 0.6)],
    "prophet": [{}],
    "sched": [{}],
    "dparallel": [{}],
    "set_block": [{}],
    "learn2pd": [{"threshold": 0.9}],
}


def measure(
    model: DiffusionModel, task: str, name: str, knobs: dict[str, float], count: int
) -> Any:
    """Accuracy and tokens per forward of one schedule on ``count`` held-out examples of a task."""
    rng, right, tokens, forwards = random.Random(f"held out {task}"), 0, 0, 0
    for seed in range(count):
        one = example(task, rng, count=4)
        # A shuffle is drawn: the most probable tokens would show nothing about randomness.
        drawn = {"temperature": 1.0, "seed": seed} if task == "shuffle" else {}
        result = model.generate(
            one.prompt, schedule=make_schedule(name, **knobs), max_tokens=8, **drawn
        )
        right += one.is_right(result.text)
        tokens += min(result.counts.tokens + 1, 8)
        forwards += result.counts.forwards
    return {
        "task": task,
        "schedule": name,
        "knobs": knobs,
        "accuracy": right / count,
        "tokens_per_forward": tokens / forwards,
    }


def measure_any_subset(task: str, draft_tokens: int, count: int) -> Any:
    """Accuracy and bytes per forward of the any-subset model on held-out examples of a task."""
    model, rng, right, written, forwards = AnySubsetModel.load(), random.Random(task), 0, 0, 0
    for seed in range(count):
        one = example(task, rng, count=4)
        gaps = [None] * len(one.answer)
        result = infill(
            model, [*one.prompt.encode(), *gaps], draft_tokens=draft_tokens,
            temperature=1.0 if task == "shuffle" else 0.0, dice=SeededDice(seed),
        )  # fmt: skip
        answer = bytes(result.token_ids[-len(gaps) :]).decode("utf-8", "replace")
        right += one.is_right(answer)
        written += result.tokens
        forwards += result.forwards
    return {
        "task": task,
        "schedule": "assd",
        "knobs": {"draft_tokens": draft_tokens},
        "accuracy": right / count,
        "tokens_per_forward": written / forwards,
    }


def measure_actions(model: DiffusionModel, knobs: dict[str, Any], count: int) -> Any:
    """Share of right chunks of one setting of `remask`, on held-out chunks."""
    rng, right, forwards = random.Random("held out chunks"), 0, 0
    for _ in range(count):
        wipe = Wipe.drawn(rng, held_out=True)
        schedule = make_schedule("remask", **knobs)
        result = model.generate(wipe.prompt, schedule=schedule, max_tokens=CHUNK_TOKENS)
        right += wipe.right_tokens(result.text) == CHUNK_TOKENS
        forwards += result.counts.forwards
    return {
        "task": "actions",
        "schedule": "remask",
        "knobs": knobs,
        "accuracy": right / count,
        "tokens_per_forward": count * CHUNK_TOKENS / forwards,
    }


ACTIONS: list[dict[str, Any]] = [
    {"steps": steps, "order": order, **back}
    for back in ({}, {"least": 0.5}, {"drop": 0.3})
    for steps in (4, 8)
    for order in ORDERS
]


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    for panel, task in zip(axes.flat, TASKS, strict=True):
        for marker, name in zip("osD^v*PX", POINTS, strict=True):
            chosen = [row for row in rows if row["task"] == task and row["schedule"] == name]
            chosen.sort(key=lambda row: row["tokens_per_forward"])
            speeds = [row["tokens_per_forward"] for row in chosen]
            panel.plot(speeds, [row["accuracy"] for row in chosen], marker=marker, label=name)
        if task == "shuffle":
            counts = [1, 2, 4]
            ideal = [shuffle_accuracy(4, count) for count in counts]
            panel.plot(counts, ideal, "k--", label="ideal model")
        panel.set(title=task, ylim=(-0.05, 1.05))
        panel.grid(alpha=0.3)
    figure.supxlabel("tokens per forward")
    figure.supylabel("right answers, share")
    axes[1, 0].legend(fontsize=8)
    figure.savefig(file, dpi=110)


async def measure_served(model: Path, count: int) -> list[dict[str, Any]]:
    """Tokens per second and per forward of each schedule, for one client and for eight."""
    args = {"engine": "diffusion", "topology": "colocated", "model": {"target": str(model)}}
    engine = DiffusionEngine(parse_config(args))
    server = await start_server(engine=engine)
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    async with AsyncClient(server.address, timeout=300) as client:
        for case in [(i, clients) for i in range(len(SERVED)) for clients in (1, 8)] * count:
            name, knobs = SERVED[case[0]]
            config = SpeculationConfig(method=name, allow_lossy=True, schedule_knobs=knobs or None)
            places = asyncio.Semaphore(case[1])

            async def one(
                prompt: str, config: SpeculationConfig = config, places: Any = places
            ) -> tuple[int, int]:
                async with places:
                    done = (await client.complete(prompt, params, config)).statistics
                return done.num_tokens, done.num_target_forwards

            began = time.perf_counter()
            each = await asyncio.gather(*map(one, PROMPTS))
            tokens, forwards = map(sum, zip(*each, strict=True))
            speed = tokens / (time.perf_counter() - began)
            found.setdefault(case, []).append((speed, tokens / forwards))
    await server.stop(0)
    engine.stop()
    return [
        {
            "schedule": SERVED[index][0],
            "knobs": list(SERVED[index][1]),
            "clients": clients,
            "tokens_per_second": statistics.median(speed for speed, _ in told),
            "slowest": min(told)[0],
            "fastest": max(told)[0],
            "tokens_per_forward": told[0][1],
        }
        for (index, clients), told in found.items()
    ]


def show_served(rows: list[dict[str, Any]]) -> None:
    names = ("schedule", "knobs", "clients", "tokens per second", "from", "to", "per forward")
    table = Table(*names)
    for row in rows:
        table.add_row(
            row["schedule"], " ".join(row["knobs"]), str(row["clients"]),
            *(f"{row[name]:.0f}" for name in ("tokens_per_second", "slowest", "fastest")),
            f"{row['tokens_per_forward']:.2f}",
        )  # fmt: skip
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=25)
    parser.add_argument("--model", type=Path, default=DIFFUSION_DIR)
    parser.add_argument("--any-subset", action="store_true")
    parser.add_argument("--actions", action="store_true")
    parser.add_argument("--served", action="store_true")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.served:
        rows = asyncio.run(measure_served(args.model, args.count))
        show_served(rows)
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        return
    if args.any_subset:
        rows = [measure_any_subset(task, k, args.count) for task in TASKS for k in (1, 4, 10)]
    elif args.actions:
        model = DiffusionModel(ACTIONS_DIR)
        rows = [measure_actions(model, knobs, args.count) for knobs in ACTIONS]
    else:
        model = DiffusionModel(args.model)
        rows = [
            measure(model, task, name, knobs, args.count)
            for task in TASKS
            for name, settings in POINTS.items()
            for knobs in settings
        ]
    table = Table("task", "schedule", "knobs", "accuracy", "tokens per forward")
    for row in rows:
        knobs = " ".join(f"{knob}={value}" for knob, value in row["knobs"].items())
        table.add_row(
            row["task"], row["schedule"], knobs,
            f"{row['accuracy']:.2f}", f"{row['tokens_per_forward']:.2f}",
        )  # fmt: skip
    Console().print(table)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if args.plot and not (args.any_subset or args.actions):
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
