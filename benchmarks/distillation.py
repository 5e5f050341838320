"""Plain fine-tuning against DistillSpec at equal steps, judged on held-out text.

Every run starts from the same drafter, by default the target's first layers, and sees the same rows
in the same order. Plain fine-tuning learns the text itself by cross entropy. DistillSpec learns the
target's distribution, by one of four divergences, on what the target or the drafter writes after
the first quarter of each row; align is the policy gradient of TVD++ on what the target writes. The
target writes each row once for all runs, so they differ only in the loss and the source.

Acceptance (the mean of 1 - TV) and greedy agreement are averaged over each held-out text; 95 %
intervals come from resampling the texts (bootstrap); those of the difference to plain fine-tuning
use the same samples for both. Interrupted runs resume where they stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers.utils import logging as transformers_logging

from paceline.cluster.cli_output import set_threads
from paceline.demo import TARGET_DIR
from paceline.train import losses
from paceline.train.checkpoints import all_logits
from paceline.train.data import TrainingText, load_text
from paceline.train.draft_models import DraftTask
from paceline.train.trainer import TrainOptions, train

PLAIN = "ce, corpus"
START = "start"
RUNS: tuple[tuple[str, str], ...] = (
    ("ce", "corpus"),
    *((d, s) for s in ("target", "on_policy") for d in ("forward_kl", "reverse_kl", "jsd", "tvd")),
    ("tvdpp", "target"),
)
MEASURES = ("acceptance_written", "agreement_written", "acceptance", "agreement")
DRAWS = 2000


class MeasuredTask(DraftTask):
    """Keeps the measurements of each held-out text; lets the target write after a row once.

    Attributes:
        written: what the target wrote, for all tasks that share this cache.
        measured: each of ``MEASURES`` for each held-out text.
    """

    written: dict[tuple[bytes, int], Tensor]
    measured: dict[str, NDArray[np.float64]]

    def _write(self, writer: Any, rows: Tensor, seed: int) -> Tensor:
        if writer is self.model:
            return super()._write(writer, rows, seed)
        key = rows.numpy().tobytes(), seed
        if key not in self.written:
            self.written[key] = super()._write(writer, rows, seed)
        return self.written[key]

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        texts = self._text.held_out
        own = self._write(self._target, texts, seed=0)
        self.measured = {}
        for suffix, rows, first in (("", texts, 0), ("_written", own, self._prompt - 1)):
            accepted, agreed = [], []
            for few in rows.split(4):
                draft, target = (
                    all_logits(model, few[:, :-1])[:, first:, : self._vocab_size]
                    for model in (self.model, self._target)
                )
                accepted.append(losses.acceptance(draft, target).double().mean(1))
                agreed.append((draft.argmax(-1) == target.argmax(-1)).double().mean(1))
            self.measured[f"acceptance{suffix}"] = torch.cat(accepted).numpy()
            self.measured[f"agreement{suffix}"] = torch.cat(agreed).numpy()
        return {name: float(values.mean()) for name, values in self.measured.items()}


def interval(values: NDArray[np.float64]) -> dict[str, float]:
    """Mean over texts and its 95 % bootstrap interval; equal draws for arrays of equal size."""
    drawn = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    low, high = np.quantile(values[drawn].mean(1), (0.025, 0.975))
    return {"mean": float(values.mean()), "low": float(low), "high": float(high)}


def compare(
    target: Path, text: TrainingText, drafter: Path | None, layers: int, options: Mapping[str, Any],
    work: Path, runs: tuple[tuple[str, str], ...] = RUNS,
) -> dict[str, Any]:  # fmt: skip
    """Train every run, and measure it and the drafter that all start from.

    Args:
        options: of ``TrainOptions``, but for the folder.
        work: a folder for each run is in it.
    """
    written: dict[tuple[bytes, int], Tensor] = {}
    measured: dict[str, dict[str, NDArray[np.float64]]] = {}
    with Progress(console=Console(stderr=True)) as bar:
        shown = bar.add_task("start", total=len(runs) * options["steps"])
        for number, (divergence, source) in enumerate(runs):
            task = MeasuredTask(
                target, text, drafter=drafter, layers=layers, divergence=divergence,
                data_source=source,
            )  # fmt: skip
            task.written = written
            if not measured:
                task.evaluate()
                measured[START] = task.measured
            name = f"{divergence}, {source}"
            bar.update(shown, description=name)

            def on_evaluation(step: int, _: dict[str, float], done: int = number) -> None:
                bar.update(shown, completed=done * options["steps"] + step)

            train(task, TrainOptions(out=work / f"{divergence}-{source}", **options), on_evaluation)
            task.evaluate()  # also if no step was left to train
            measured[name] = task.measured
    plain = measured[PLAIN]
    rows = []
    for name, values in measured.items():
        row: dict[str, Any] = {"run": name}
        for measure in MEASURES:
            row[measure] = interval(values[measure])
            if name not in (START, PLAIN):
                row[f"{measure}_over_plain"] = interval(values[measure] - plain[measure])
        rows.append(row)
    return {"rows": rows, "texts": len(text.held_out), "length": text.length, **options}


def show(result: dict[str, Any]) -> None:
    """A table of the four measurements and of DistillSpec's gain."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("run", no_wrap=True)
    titles = {
        "acceptance_written": "1 - TV, written",
        "agreement_written": "greedy, written",
        "acceptance": "1 - TV, text",
        "agreement": "greedy, text",
        "acceptance_written_over_plain": "1 - TV, written: over plain",
    }
    for title in titles.values():
        table.add_column(title, justify="right")
    for row in result["rows"]:
        cells = []
        for key in titles:
            value = row.get(key)
            sign = "+" if key.endswith("_over_plain") else ""
            cells.append(
                f"{value['mean']:{sign}.3f} [{value['low']:{sign}.3f}, {value['high']:{sign}.3f}]"
                if value
                else ""
            )
        table.add_row(row["run"], *cells)
    Console(width=140).print(table)


def draw(result: dict[str, Any], file: Path) -> None:
    """Means with their intervals, a row for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = result["rows"]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.6), layout="constrained", sharey=True)
    for axis, measure, title in (
        (axes[0], "acceptance", "acceptance (1 - TV)"),
        (axes[1], "agreement", "greedy agreement"),
    ):
        for offset, suffix, colour, label in (
            (-0.14, "_written", "tab:blue", "what the target writes"),
            (0.14, "", "tab:orange", "held-out text"),
        ):
            values = [row[measure + suffix] for row in rows]
            means = np.array([value["mean"] for value in values])
            low, high = (np.array([value[end] for value in values]) for end in ("low", "high"))
            axis.errorbar(
                means, np.arange(len(rows)) + offset, xerr=[means - low, high - means],
                fmt="o", markersize=4, capsize=2, color=colour, label=label,
            )  # fmt: skip
            plain = next(row for row in rows if row["run"] == PLAIN)
            axis.axvline(plain[measure + suffix]["mean"], color=colour, alpha=0.5, linestyle=":")
        axis.set_yticks(range(len(rows)), [row["run"] for row in rows])
        axis.set(title=title, ylim=(len(rows) - 0.5, -0.5))
        axis.grid(axis="x", alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(
        f"Held-out texts after {result['steps']} steps; dotted: plain fine-tuning",
        fontsize="medium",
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=TARGET_DIR, help="default: the demo's")
    parser.add_argument("--drafter", type=Path, help="default: the target's first layers")
    parser.add_argument("--layers", type=int, default=2, help="of the target, without --drafter")
    parser.add_argument("--data", type=Path, action="append", default=[], help="text; repeatable")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--texts", type=int, default=128, help="held-out rows")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--work", type=Path, default=Path("trained/distillation"), help="folder of the drafters"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/figures/distillation.png"))
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()  # only our own
    set_threads(options.threads, options.target)
    text = load_text(options.target, options.data, options.length, options.texts)
    settings = {
        "steps": options.steps,
        "batch_size": options.batch_size,
        "learning_rate": options.lr,
        "seed": options.seed,
        "eval_every": options.steps,
    }
    result = compare(options.target, text, options.drafter, options.layers, settings, options.work)
    draw(result, options.out)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
