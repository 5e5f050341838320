"""vLLM with Paceline's drafters beside vLLM with its own: same prompts, taking turns, one process.

    .venv-vllm/bin/python -m benchmarks.vllm_engine                  # table; some five minutes
    .venv-vllm/bin/python -m benchmarks.vllm_engine --json FILE --plot FILE

Each of vLLM's own methods needs an engine of its own; one more engine runs all of Paceline's
drafters, and another one asks a drafter in another process, whose answers are delayed. An engine
that is not measured is stopped (SIGSTOP), so that its waiting threads cost the others no time.
Every
prompt is decoded once by each, in random order. Paceline's drafters forget what they have learnt
before each prompt, as they share an engine; vLLM's keep it. Tokens are compared with AR's.

The environment is that of `make test-vllm`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline.bench.prompts import builtin_prompts, limit_per_category
from paceline.config import SpeculationConfig
from paceline.deployments.config import parse_config
from paceline.deployments.engines.vllm import VllmEngine
from paceline.request import Request
from paceline.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
COPYING = ("copy_heavy_edits", "repeated_structure")
"""Where the best of Paceline's drafters is compared with the best of vLLM's."""
PLAIN: dict[str, Any] = {
    "options": {"speculative_config": None, "per_request_spec_decode_metrics": "none"}
}


@dataclass(frozen=True)
class System:
    """A line of the table.

    Attributes:
        name: as it is shown.
        engine: which engine runs it; "" shares that of Paceline's drafters.
        speculation: of its requests; None is the engine's own.
    """

    name: str
    kind: str
    engine: str
    speculation: dict[str, Any]


SYSTEMS = (
    System("AR", "vLLM", "ar", {"method": "ar"}),
    System("ngram", "vLLM", "ngram",
           {"method": "vllm_ngram", "num_speculative_tokens": 10, "ngram_min": 1, "ngram_max": 3}),
    System("suffix", "vLLM", "suffix", {"method": "vllm_suffix", "num_speculative_tokens": 16}),
    System("draft_model", "vLLM", "draft_model",
           {"method": "vllm_draft_model", "num_speculative_tokens": 8}),
    System("prompt_lookup", "Paceline", "rows", {"method": "prompt_lookup"}),
    System("suffix_decoding", "Paceline", "rows", {"method": "suffix_decoding"}),
    System("sam_decoding", "Paceline", "rows", {"method": "sam_decoding"}),
    System("token_recycling", "Paceline", "rows", {"method": "token_recycling"}),
    System("draft_model", "Paceline", "rows", {"method": "draft_model"}),
    System("suffix_decoding_hybrid", "Paceline", "rows", {"method": "suffix_decoding_hybrid"}),
    System("combined", "Paceline", "rows",
           {"method": "combined", "num_speculative_tokens": 10,
            "drafters": ["suffix", "draft_model"]}),
    System("draft_model, goodput", "Paceline", "rows",
           {"method": "draft_model", "length": "goodput"}),
    System("draft_model, remote", "Paceline", "remote", {"method": "draft_model"}),
)  # fmt: skip


class Engines:
    """The engines and what stops and wakes their processes."""

    def __init__(self, delay_s: float) -> None:
        self._engines: dict[str, VllmEngine] = {}
        self._pids: dict[str, list[int]] = {}
        self._delay_s = delay_s
        self._drafter: subprocess.Popen[str] | None = None

    def _start_drafter(self) -> str:
        command = [sys.executable, "-m", "tests.rpc.drafter_process", "--demo",
                   "--vocab-size", "4096", "--sleep", str(self._delay_s)]  # fmt: skip
        self._drafter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._drafter.stdout is not None
        return self._drafter.stdout.readline().strip()

    async def start(self, name: str, system: System) -> None:
        before = _descendants(os.getpid())
        vllm: dict[str, Any] = {"enforce_eager": True, "max_model_len": 1024}
        given: dict[str, Any] = {"speculation": system.speculation, "topology": "colocated"}
        addresses: list[str] | None = None
        if name == "ar":
            vllm |= PLAIN
            given["speculation"] = {"method": "ar"}
        if name == "remote":
            addresses = [self._start_drafter()]
            given["topology"] = "actors"
        config = parse_config(
            {"engine": "vllm", "model": {"kv_tokens": 4096}, "vllm": vllm, **given}
        )
        engine = VllmEngine(config, addresses)
        await engine.start()
        for _ in range(300 if addresses else 0):
            if await engine.use_drafters(addresses or ()):
                break
            await asyncio.sleep(0.1)
        self._engines[name] = engine
        # The drafter keeps running: it is another machine.
        own = {self._drafter.pid} if self._drafter else set()
        self._pids[name] = sorted(_descendants(os.getpid()) - before - own)
        self._signal(name, signal.SIGSTOP)

    def _signal(self, name: str, number: signal.Signals) -> None:
        for pid in self._pids[name]:
            os.kill(pid, number)

    async def run(
        self, system: System, prompt: Sequence[int], max_tokens: int
    ) -> tuple[list[int], float, float]:
        """Tokens, decode seconds and accepted tokens a forward of one prompt."""
        engine = self._engines[system.engine]
        self._signal(system.engine, signal.SIGCONT)
        done = asyncio.Event()
        try:
            if system.kind == "Paceline":  # its methods share drafters, and must not share answers
                await engine.forget()
            session = engine.submit(
                Request(
                    prompt,
                    SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                    SpeculationConfig(**system.speculation),
                    session_id=f"{system.name}-{time.perf_counter()}",
                ),
                on_event=lambda event: event.finished and done.set(),
            ).result()
            await done.wait()
        finally:
            self._signal(system.engine, signal.SIGSTOP)
        if session.error is not None:
            raise session.error
        stats = session.stats
        assert stats.finished_at is not None
        return session.output_ids, stats.finished_at - stats.started_at, stats.mean_accepted_length

    def stop(self) -> None:
        for name, engine in self._engines.items():
            self._signal(name, signal.SIGCONT)
            engine.stop()
        if self._drafter is not None:
            self._drafter.kill()


def _descendants(pid: int) -> set[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
        except OSError:
            continue
        children[int(stat.rsplit(")", 1)[1].split()[1])].append(int(folder.name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        for child in children[todo.pop()]:
            found.add(child)
            todo.append(child)
    return found


async def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Seconds of every prompt with every system."""
    systems = [s for s in SYSTEMS if not options.systems or s.name in options.systems]
    if systems[0].name != "AR":
        systems.insert(0, SYSTEMS[0])
    engines = Engines(options.delay_ms / 1000)
    runs: list[dict[str, Any]] = []
    try:
        for name in dict.fromkeys(s.engine for s in systems):
            started = time.perf_counter()
            await engines.start(name, next(s for s in systems if s.engine == name))
            console.print(f"engine {name} is up after {time.perf_counter() - started:.0f} s")
        from paceline.demo import TARGET_DIR
        from paceline.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(TARGET_DIR)
        prompts = limit_per_category(builtin_prompts(), options.limit)
        for system in systems:  # warm up: an engine's first request finds all caches cold
            for text in ("def warm(up):\n    return", "Question: How many?\nAnswer:"):
                await engines.run(system, tokenizer.encode(text), 24)
        order = random.Random(0)
        for prompt in track(prompts, "prompts", console=console):
            ids = tokenizer.encode(prompt.text)
            expected: list[int] | None = None
            shuffled = systems[1:]
            order.shuffle(shuffled)
            for system in (systems[0], *shuffled):
                tokens, seconds, tau = await engines.run(system, ids, options.max_tokens)
                expected = expected or tokens
                runs.append({
                    "system": f"{system.kind} {system.name}", "category": prompt.category,
                    "prompt": prompt.prompt_id, "seconds": seconds, "tokens": len(tokens),
                    "mean_accepted_length": tau, "identical_to_ar": tokens == expected,
                })  # fmt: skip
    finally:
        engines.stop()
    return {"delay_ms": options.delay_ms, "max_tokens": options.max_tokens, "runs": runs}


def summarize(result: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios to AR (of the same prompt), by system and category, and the numbers of the targets."""
    runs = result["runs"]
    seconds = {(r["system"], r["prompt"]): r["seconds"] for r in runs}
    names = list(dict.fromkeys(r["system"] for r in runs))
    categories = list(dict.fromkeys(r["category"] for r in runs))
    table: dict[str, dict[str, Any]] = {}
    for name in names:
        own = [r for r in runs if r["system"] == name]
        ratios = {
            c: [seconds["vLLM AR", r["prompt"]] / r["seconds"] for r in own if r["category"] == c]
            for c in categories
        }
        table[name] = {
            "tokens_per_second": sum(r["tokens"] for r in own) / sum(r["seconds"] for r in own),
            "mean_accepted_length": statistics.mean(r["mean_accepted_length"] for r in own),
            "identical": all(r["identical_to_ar"] for r in own),
            "by_category": {c: statistics.geometric_mean(v) for c, v in ratios.items()},
            "overall": statistics.geometric_mean([x for v in ratios.values() for x in v]),
            "worst_category": min(statistics.geometric_mean(v) for v in ratios.values()),
        }
    copying = [c for c in COPYING if c in categories]

    def score(name: str) -> float:
        return statistics.geometric_mean([table[name]["by_category"][c] for c in copying])

    builtin = [n for n in names if n.startswith("vLLM ") and n != "vLLM AR"]
    ours = [n for n in names if n.startswith("Paceline ")]
    verdict: dict[str, Any] = {}
    if builtin and ours and copying:
        best, best_builtin = max(ours, key=score), max(builtin, key=score)
        verdict["best_on_copying"] = {
            "paceline": best, "vllm": best_builtin, "ratio": score(best) / score(best_builtin)
        }  # fmt: skip
    if "Paceline draft_model, remote" in table:
        verdict["remote_worst"] = table["Paceline draft_model, remote"]["worst_category"]
    fastest_first = sorted(table, key=lambda name: -table[name]["overall"])
    systems = {name: table[name] for name in fastest_first}
    return {"systems": systems, "categories": categories, "verdict": verdict}


def show(summary: Mapping[str, Any], result: Mapping[str, Any], console: Console) -> None:
    table = Table(title="times vLLM's AR, by category (geometric mean over prompts)", box=None)
    for column in ("system", "tok/s", "τ", *summary["categories"], "all", "tokens = AR"):
        table.add_column(
            column.replace("_", " "),
            justify="left" if column == "system" else "right",
            no_wrap=column == "system",
        )
    for name, row in summary["systems"].items():
        table.add_row(
            name, f"{row['tokens_per_second']:.0f}", f"{row['mean_accepted_length']:.2f}",
            *(f"{row['by_category'][c]:.2f}" for c in summary["categories"]),
            f"{row['overall']:.2f}", "yes" if row["identical"] else "[red]no[/red]",
        )  # fmt: skip
    console.print(table)
    verdict = summary["verdict"]
    if "best_on_copying" in verdict:
        best = verdict["best_on_copying"]
        console.print(
            f"copy-heavy and repeated structure: {best['paceline']} has {best['ratio']:.2f} times "
            f"the speed of {best['vllm']} (aim: 1.1)"
        )
    if "remote_worst" in verdict:
        console.print(
            f"remote drafter with {result['delay_ms']:g} ms of delay, slowest category: "
            f"{verdict['remote_worst']:.2f} times AR (aim: 0.97)"
        )


def plot(summary: Mapping[str, Any], path: Path) -> None:
    """Bars for each system: all prompts, and the copying ones."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [n for n in summary["systems"] if n != "vLLM AR"]
    categories = [c for c in COPYING if c in summary["categories"]]
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(names) + 1.5), layout="constrained")
    series = [("all prompts", [summary["systems"][n]["overall"] for n in names])]
    series += [
        (c.replace("_", " "), [summary["systems"][n]["by_category"][c] for n in names])
        for c in categories
    ]
    height = 0.8 / len(series)
    for i, (label, values) in enumerate(series):
        places = [y + (i - (len(series) - 1) / 2) * height for y in range(len(names))]
        axes.barh(places, values, height, label=label)
    axes.axvline(1.0, color="0.4", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("times vLLM's AR (batch 1, CPU, demo pair)")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=5, help="prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--delay-ms", type=float, default=5.0, help="of the remote drafter")
    parser.add_argument("--systems", nargs="+", help="only these, beside AR")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    console = Console()
    result = asyncio.run(measure(options, console))
    summary = summarize(result)
    show(summary, result, console)
    if options.json:
        options.json.write_text(json.dumps({**result, "summary": summary}, indent=1))
    if options.plot:
        plot(summary, options.plot)


if __name__ == "__main__":
    main()
