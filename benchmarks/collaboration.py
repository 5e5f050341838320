"""How often the demo target is needed beside smaller models, with a router that knows (FS-GEN).

    python -m benchmarks.collaboration [--count 12] [--max-tokens 48] [--plot FILE] [--out FILE]

The smaller models are the target's own first layers, which it was trained to predict from, and the
demo's draft model. Sizes leave out the embedding, which all of them have. `auc` says how well the
small model's entropy tells where the large one is needed (0.5: not at all, 1: always).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.loading import limit_threads, load_runner
from paceline.models.base import ModelRunner
from paceline.models.llama import LlamaRunner
from paceline.together.oracle import collaborate, how_well_entropy_tells
from paceline.tokenizer import load_tokenizer
from paceline.train.corpus import held_out_modules

LAYERS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 18)
PROMPT = 64  # tokens


def measure(
    name: str,
    size: float,
    small: ModelRunner,
    large: ModelRunner,
    prompts: list[list[int]],
    max_tokens: int,
    layers: int | None = None,
) -> dict[str, Any]:
    """Share of the large model over all prompts.

    Args:
        size: of the small model, as a share of the large one.
    """
    found = [
        collaborate(small, large, prompt, max_tokens, small_layers=layers) for prompt in prompts
    ]
    tokens = sum(len(each.token_ids) for each in found)
    return {
        "small": name,
        "size": round(size, 4),
        "large_share": round(sum(sum(each.by_large) for each in found) / tokens, 4),
        "auc": round(how_well_entropy_tells(found), 4),
        "tokens": tokens,
    }


def layers_of(runner: ModelRunner) -> int:
    """Parameters beside the embedding."""
    assert isinstance(runner, LlamaRunner)
    return runner.num_parameters - runner.embedding.numel()


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    first = [row for row in rows if row["small"] != "draft model"]
    for chosen, label, marker in (
        (first, "first layers of the target", "o-"),
        ([row for row in rows if row not in first], "draft model", "s"),
    ):
        sizes = [row["size"] for row in chosen]
        axes.plot(sizes, [row["large_share"] for row in chosen], marker, label=label)
    axes.set(
        xscale="log", xlabel="size of the small model (large = 1)",
        ylabel="tokens that need the large model, share", ylim=(0, 1),
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=12, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    limit_threads(1)
    tokenizer = load_tokenizer(TARGET_DIR)
    texts = [tokenizer.encode(text[:800])[:PROMPT] for _, text in held_out_modules()]
    prompts = texts[:: max(1, len(texts) // given.count)][: given.count]
    large, draft_model = load_runner(TARGET_DIR), load_runner(DRAFTER_DIR)
    assert isinstance(large, LlamaRunner)
    depth = large.config.num_layers
    rows = [
        measure(f"{count} layers", count / depth, large, large, prompts, given.max_tokens, count)
        for count in LAYERS
    ]
    size = layers_of(draft_model) / layers_of(large)
    rows.append(measure("draft model", size, draft_model, large, prompts, given.max_tokens))
    table = Table("small model", "size", "large share", "auc", box=None, header_style="bold")
    for row in rows:
        table.add_row(row["small"], *(f"{row[k]:.3f}" for k in ("size", "large_share", "auc")))
    Console().print(table)
    if given.plot:
        plot(rows, given.plot)
    if given.out:
        given.out.write_text(json.dumps(rows, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
