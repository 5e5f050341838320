"""A drafter that learns as it serves, when the traffic changes (Online Speculative Decoding).

The demo target answers prompts of one kind, beginnings of code, and then of another, short word
problems. The drafter is the target's first two layers, distilled on the target's answers of the
first kind. From then on it learns from its rejections alone, in the thread that serves, so that
serving and training share one core. The figure has its acceptance over time beside two that do not
learn as they serve: the same drafter as it was, and one that was distilled offline on the target's
answers of the second kind, with the same recipe. All three are asked the same prompts.

Acceptance is the share of the judged drafted tokens that the target accepts, at temperature 0. Time
is processor time of the one thread, so that other programs on the machine change nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from paceline.cluster.cli_output import set_threads
from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine
from paceline.loading import load_engine
from paceline.models.llama import LlamaRunner
from paceline.rejections import RejectionBuffer, RejectionRecorder
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.tokenizer import Tokenizer
from paceline.train.corpus import CODE, held_out_modules, split
from paceline.train.data import load_text
from paceline.train.draft_models import DraftTask
from paceline.train.online import ONLINE_DIVERGENCES, OnlineTrainer
from paceline.train.trainer import TrainOptions, train

DRAFTS = SpeculationConfig(method="draft_model", length="fixed", num_speculative_tokens=4)
KINDS = ("code", "questions")
PROMPT_TOKENS = 64
_NAMES = ("Tom", "Anna", "Maria", "Sam", "Lena", "Paul", "Ivy", "Omar", "Nina", "Carl")
_THINGS = ("apples", "books", "marbles", "cards", "pencils", "stamps", "cookies", "flowers")
_QUESTIONS = (
    "{a} has {m} {x}. {b} gives {a} {n} more. How many {x} does {a} have now?",
    "{a} buys {m} {x} for ${n} each. How much does {a} pay?",
    "There are {m} boxes with {n} {x} each. {a} takes {k} {x}. How many {x} are left?",
    "{a} has {m} {x} and {b} has {k} times as many. How many {x} do they have together?",
    "{a} sells {m} {x} on Monday and {n} on Tuesday. Each costs ${k}. How much does {a} earn?",
    "{a} shares {m} {x} with {b}. Each gets half. How many {x} does {b} get?",
)


def prompts_of(kind: str, tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    """Prompts without end; seed 0 is for measurements, and its code is held out of training."""
    rng = random.Random(f"{kind} {seed}")
    modules = [text for _, text in held_out_modules()]
    if seed:
        modules = [document.text for document in split()[0] if document.source == CODE]
    modules = [text for text in modules if len(text) > 2000]
    while True:
        if kind == "code":
            text = rng.choice(modules)
            start = text.rfind("\n", 0, rng.randrange(len(text) - 1000)) + 1
            yield tokenizer.encode(text[start : start + 1000])[:PROMPT_TOKENS]
        else:
            a, b = rng.sample(_NAMES, 2)
            m, n, k = rng.randint(11, 60), rng.randint(2, 12), rng.randint(2, 9)
            asked = rng.choice(_QUESTIONS).format(a=a, b=b, x=rng.choice(_THINGS), m=m, n=n, k=k)
            yield tokenizer.encode(f"Question: {asked}\nAnswer:")[:PROMPT_TOKENS]


def runner_of(engine: Engine) -> LlamaRunner:
    drafter = engine.drafters["draft_model"]
    assert isinstance(drafter, DraftModel)
    assert isinstance(drafter.runner, LlamaRunner)
    return drafter.runner


def acceptance(engine: Engine, prompts: Sequence[list[int]], tokens: int) -> float:
    """Of the engine's drafter on these prompts."""
    counts = RejectionRecorder(0, records=lambda session: False)
    engine.events.watchers.append(counts)
    engine.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True), DRAFTS)
    engine.events.watchers.remove(counts)
    return counts.num_accepted / max(1, counts.num_judged)


def distil(
    target: Path, start: Path | None, kind: str, work: Path, options: argparse.Namespace
) -> Path:
    """A drafter distilled offline on what the target answers to prompts of a kind."""
    out, file = work / kind, work / f"{kind}.jsonl"
    if (out / "model.safetensors").exists():
        return out
    engine = load_engine(target)
    assert engine.tokenizer is not None
    asked = list(islice(prompts_of(kind, engine.tokenizer, 2), options.texts))
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    speculation = SpeculationConfig(method="suffix_decoding")
    sessions = engine.generate(asked, params, speculation)
    texts = [engine.tokenizer.decode(session.token_ids) for session in sessions]
    work.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    text = load_text(target, [file], 128, 16)
    task = DraftTask(target, text, drafter=start, layers=2)
    train(
        task,
        TrainOptions(
            out=out, steps=options.steps, batch_size=8, learning_rate=options.offline_lr,
            eval_every=options.steps,
        ),
    )  # fmt: skip
    return out


@dataclass
class TrafficWindow:
    """Some seconds of traffic."""

    seconds: float
    kind: str
    num_judged: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    num_updates: int = 0
    training_seconds: float = 0.0

    @property
    def acceptance(self) -> float:
        return self.num_accepted / max(1, self.num_judged)


@dataclass
class Traffic:
    """Serves prompts of one kind and then of the other, and lets the drafter learn from them."""

    engine: Engine
    trainer: OnlineTrainer
    options: argparse.Namespace
    windows: list[TrafficWindow] = field(default_factory=list)

    def run(self) -> None:
        options, engine, trainer = self.options, self.engine, self.trainer
        assert engine.tokenizer is not None
        recorder = RejectionRecorder(options.positions, records=lambda session: True)
        engine.events.watchers.append(recorder)
        params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
        prompts = {kind: prompts_of(kind, engine.tokenizer, 1) for kind in KINDS}
        ends = options.first_seconds, options.first_seconds + options.seconds
        started, before = time.process_time(), (0, 0)
        while (now := time.process_time() - started) < ends[1]:
            kind = KINDS[now >= ends[0]]
            index = int(now / options.window)
            if len(self.windows) <= index:
                begin = options.window * len(self.windows)
                self.windows.append(TrafficWindow(begin + options.window / 2, kind))
            window = self.windows[-1]
            while len(engine.sessions) < options.sessions:
                engine.submit(Request(next(prompts[kind]), params, DRAFTS))
            window.num_tokens += sum(len(event.token_ids) for event in engine.step())
            judged, accepted = recorder.num_judged, recorder.num_accepted
            window.num_judged += judged - before[0]
            window.num_accepted += accepted - before[1]
            before = judged, accepted
            trainer.buffer.add(recorder.take())
            if trainer.buffer.due:
                begun = time.process_time()
                trainer.update()
                if trainer.num_updates % options.rollout == 0:
                    runner = runner_of(engine)
                    runner.use_weights(runner.read_weights(trainer.weights()))
                window.num_updates += 1
                window.training_seconds += time.process_time() - begun
        for session_id in list(engine.sessions):
            engine.cancel(session_id)
        engine.events.watchers.remove(recorder)


def recovery(windows: Sequence[TrafficWindow], wanted: float) -> float | None:
    """Seconds after the shift from which on the acceptance of three windows is at least wanted."""
    after = [window for window in windows if window.kind == KINDS[1]]
    for i, first in enumerate(after):
        few = after[i : i + 3]
        accepted, judged = (sum(getattr(w, n) for w in few) for n in ("num_accepted", "num_judged"))
        if len(few) == 3 and accepted >= wanted * judged:
            return first.seconds - after[0].seconds
    return None


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Make the drafters, serve the traffic, and measure all drafters on the same prompts."""
    target, work = options.target, options.work
    first = distil(target, None, KINDS[0], work, options)
    second = distil(target, first, KINDS[1], work, options)
    engine = load_engine(target, first)
    assert engine.tokenizer is not None
    asked = {
        kind: list(islice(prompts_of(kind, engine.tokenizer, 0), options.measured))
        for kind in KINDS
    }

    def of(drafter: Engine) -> dict[str, float]:
        return {kind: acceptance(drafter, asked[kind], options.tokens) for kind in KINDS}

    result: dict[str, Any] = {
        "frozen": of(engine), "offline": of(load_engine(target, second)),
    }  # fmt: skip
    buffer = RejectionBuffer(
        options.update_interval, options.batch, positions=options.positions, seconds=3600.0
    )
    trainer = OnlineTrainer(first, buffer, divergence=options.divergence, learning_rate=options.lr)
    traffic = Traffic(engine, trainer, options)
    traffic.run()
    runner = runner_of(engine)
    runner.use_weights(runner.read_weights(trainer.weights()))
    result["online"] = of(engine)
    wanted = 0.9 * result["offline"][KINDS[1]]
    return result | {
        "windows": [asdict(w) | {"acceptance": w.acceptance} for w in traffic.windows],
        "shift_seconds": options.first_seconds,
        "recovered_after_seconds": recovery(traffic.windows, wanted),
        "updates": trainer.num_updates,
        "dropped": buffer.num_dropped,
    }


def draw(result: dict[str, Any], file: Path) -> None:
    """Acceptance over time, with those of the drafters that do not learn as they serve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    windows, shift = result["windows"], result["shift_seconds"] / 60
    figure, axis = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    for kind, colour in zip(KINDS, ("tab:blue", "tab:orange"), strict=True):
        own = [window for window in windows if window["kind"] == kind]
        minutes = [window["seconds"] / 60 for window in own]
        axis.plot(
            minutes, [window["acceptance"] for window in own], color=colour, marker=".",
            label=f"learns as it serves: {kind}",
        )  # fmt: skip
    end = (windows[-1]["seconds"] + windows[0]["seconds"]) / 60
    for name, style, label in (
        ("offline", "-", f"distilled offline on {KINDS[1]}"),
        ("frozen", ":", "as it was before the shift"),
    ):
        level = result[name][KINDS[1]]
        axis.plot([shift, end], [level, level], color="black", linestyle=style, label=label)
    axis.axvline(shift, color="grey", linewidth=0.8)
    axis.annotate(
        f"{KINDS[1]} begin", (shift, 0.02), xytext=(4, 0), textcoords="offset points",
        xycoords=("data", "axes fraction"), fontsize="small", color="grey",
    )  # fmt: skip
    axis.set(xlabel="minutes of one core, training included", ylabel="acceptance", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", frameon=False, fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def show(result: dict[str, Any]) -> None:
    """A table of the three drafters on both kinds."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("drafter", no_wrap=True)
    for kind in KINDS:
        table.add_column(kind, justify="right")
    for name in ("frozen", "offline", "online"):
        table.add_row(name, *(f"{result[name][kind]:.3f}" for kind in KINDS))
    console = Console(width=100)
    console.print(table)
    seconds = result["recovered_after_seconds"]
    when = "not reached" if seconds is None else f"after {seconds:.0f} s of traffic"
    console.print(f"90 % of offline: {when}; {result['updates']} updates")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=TARGET_DIR, help="default: the demo's")
    parser.add_argument("--texts", type=int, default=192, help="answers to distil offline on")
    parser.add_argument("--steps", type=int, default=150, help="of each offline distillation")
    parser.add_argument("--offline-lr", type=float, default=1e-3)
    parser.add_argument("--first-seconds", type=float, default=30.0, help="of the first kind")
    parser.add_argument("--seconds", type=float, default=180.0, help="of the second kind")
    parser.add_argument("--window", type=float, default=6.0, help="seconds of a point")
    parser.add_argument("--sessions", type=int, default=8, help="at the same time")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--measured", type=int, default=32, help="prompts to measure on")
    parser.add_argument("--update-interval", type=int, default=64, help="rejections of an update")
    parser.add_argument("--batch", type=int, help="with older ones; default: none")
    parser.add_argument("--positions", type=int, default=4096, help="rejections to keep")
    parser.add_argument("--rollout", type=int, default=4, help="updates between new weights")
    parser.add_argument("--divergence", choices=ONLINE_DIVERGENCES, default="forward_kl")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("trained/online"))
    parser.add_argument("--out", type=Path, default=Path("docs/figures/online.png"))
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()  # only our own
    set_threads(options.threads, options.target)
    result = measure(options)
    draw(result, options.out)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
