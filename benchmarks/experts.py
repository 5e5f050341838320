"""Which experts a verification reads: those that any of its tokens uses (BlockFFN, 2507.08771).

    python -m benchmarks.experts [--target FOLDER] [--count 12] [--max-tokens 48] [--out FILE]

The first table has held-out text in chunks of consecutive tokens: the share of experts that a chunk
uses, and the share that as many tokens would use if each chose by itself. The second one decodes
with prompt lookup and counts what the target's forwards use. The third one times a larger random
layer (1,024 x 64 experts of 64) on rows that use as many experts as the model's do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from paceline.config import SpeculationConfig
from paceline.demo import BLOCK_FFN_DIR
from paceline.engine import Engine
from paceline.loading import limit_threads, load_engine
from paceline.models.base import Segment
from paceline.models.block_ffn import BlockFfn, BlockFfnConfig, routed, share_used
from paceline.models.transformers import TransformersRunner
from paceline.sampling import SamplingParams
from paceline.train.corpus import held_out_modules

CHUNKS = (1, 2, 4, 8, 16, 32)
PROMPT = 64  # tokens


def model_of(engine: Engine) -> Any:
    """The target's ``transformers`` model."""
    runner = engine.local_target.runner
    assert isinstance(runner, TransformersRunner)
    return runner.model


def of_chunks(engine: Engine, rows: list[list[int]]) -> list[dict[str, float]]:
    """The share of experts that chunks of texts of one length use."""
    runner = engine.local_target.runner
    every = []
    for row in rows:
        sequence = runner.new_sequence()
        with routed(model_of(engine)) as scores:
            runner.forward([Segment(sequence, np.array(row))])
        runner.free(sequence)
        every.append(torch.stack([each.flatten(0, -2) for each in scores]))
    found = torch.stack(every)  # [num_rows, num_layers, length, num_experts]
    alone = (found > 0).float().mean((0, 2))  # how often each expert is used
    return [
        {
            "chunk": chunk,
            "used": share_used(found, chunk),
            "independent": float((1 - (1 - alone) ** chunk).mean()),
        }
        for chunk in CHUNKS
    ]


def of_verifications(
    engine: Engine, prompts: list[list[int]], max_tokens: int, speculation: SpeculationConfig
) -> dict[str, float]:
    """What the target's forwards use after the prompts were read, on average over forwards.

    ``tokens``: in a forward. ``of_a_token``: share of experts that one of them uses. ``used``: that
    the forward uses.
    """
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    tokens, alone, used, rounds = [], [], [], 0
    for prompt in prompts:
        with routed(model_of(engine)) as scores:
            (session,) = engine.generate([prompt], params, speculation)
        rounds += session.stats.num_target_forwards
        for each in scores:
            active = (each > 0).flatten(0, -2)
            if len(active) < PROMPT - 1:  # the rest is the prompt
                tokens.append(len(active))
                alone.append(float(active.float().mean()))
                used.append(float(active.any(0).float().mean()))
    return {
        "tokens": statistics.mean(tokens),
        "of_a_token": statistics.mean(alone),
        "used": statistics.mean(used),
        "accepted_length": len(prompts) * max_tokens / rounds,
    }


@torch.inference_mode()
def times(rows: int, share: float, repetitions: int = 15) -> dict[str, float]:
    """Milliseconds of a large random layer, all experts and only those in use; medians."""
    torch.manual_seed(0)
    config = BlockFfnConfig(hidden_size=1024, num_experts=64, expert_size=64)
    layer = BlockFfn(config)
    x = torch.randn(rows, config.hidden_size)
    gates = torch.zeros(rows, config.num_experts)
    gates[:, : round(share * config.num_experts)] = 1.0
    found: dict[str, list[float]] = {"all": [], "used": []}
    for _ in range(repetitions):
        for name in found:
            started = time.perf_counter()
            layer.of_used(x, gates) if name == "used" else layer.of_all(x, gates)
            found[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=str(BLOCK_FFN_DIR))
    parser.add_argument("--count", type=int, default=12, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    limit_threads(1)
    engine = load_engine(given.target)
    assert engine.tokenizer is not None
    texts = [engine.tokenizer.encode(text[:3000]) for _, text in held_out_modules()]
    texts = [text for text in texts if len(text) >= 512][: given.count]
    chunks = of_chunks(engine, [text[:512] for text in texts])
    prompts = [text[:PROMPT] for text in texts]
    verified = {
        name: of_verifications(engine, prompts, given.max_tokens, config)
        for name, config in (
            ("ar", SpeculationConfig(method="ar")),
            ("prompt_lookup", SpeculationConfig(method="prompt_lookup", length="fixed")),
        )
    }
    timed = {row["chunk"]: times(int(row["chunk"]), row["used"]) for row in chunks}

    console = Console()
    table = Table("tokens of a chunk", "experts used", "if by themselves", "ms, all", "ms, used")
    for row in chunks:
        ms = timed[row["chunk"]]
        table.add_row(
            f"{row['chunk']:.0f}", f"{row['used']:.3f}", f"{row['independent']:.3f}",
            f"{ms['all']:.2f}", f"{ms['used']:.2f}",
        )  # fmt: skip
    console.print(table)
    table = Table(
        "method", "tokens of a forward", "a token's experts", "a forward's", "tokens a round"
    )
    for name, row in verified.items():
        keys = ("tokens", "of_a_token", "used", "accepted_length")
        table.add_row(name, *(f"{row[key]:.2f}" for key in keys))
    console.print(table)
    if given.out:
        document = {"chunks": chunks, "verified": verified, "ms": timed}
        given.out.write_text(json.dumps(document, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
