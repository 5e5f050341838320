"""Every kind of drafter that people have can be trained for SmolLM2, in minutes of a processor.

The two that ship (`eagle3`, `dspark`) were trained for hours. These recipes show that the training
of the others works on a real chat model: the loss falls, what the head drafts is accepted, and the
tokens are AR's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.bench.prompts import builtin_prompts
from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.loading import load_engine
from paceline.sampling import SamplingParams

MOST_S = 1200.0
BLOCK = ("num_layers=2", "block_size=8", "anchors=64", "vocabulary=8192")
RECIPES: Mapping[str, tuple[int, float, tuple[str, ...]]] = {
    "medusa": (40, 0.003, ("num_heads=3",)),
    "hydra": (80, 0.0005, ("num_heads=3",)),
    "mtp": (40, 0.003, ()),
    "peagle": (60, 0.003, ("num_layers=1", "depths=4")),
    "dflash": (300, 0.003, BLOCK),
    "dflash2": (150, 0.003, BLOCK[:3]),
    "xpress": (200, 0.003, BLOCK),
}
"""Steps of two rows of 128 tokens, the learning rate, and options that keep a head small."""


def check_drafts(engine: Engine, kind: str) -> tuple[int, int]:
    """How many tokens of chains of three are accepted and drafted; the output is AR's."""
    assert engine.tokenizer is not None
    prompts = [engine.tokenizer.encode(prompt.text) for prompt in builtin_prompts()[:8]]
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    plain = engine.generate(prompts, params, SpeculationConfig(method="ar"))
    config = SpeculationConfig(method=kind, length="fixed", num_speculative_tokens=3)
    drafted = engine.generate(prompts, params, config)
    assert [session.output_ids for session in drafted] == [each.output_ids for each in plain]
    counts = [(each.stats.num_accepted, each.stats.num_drafted) for each in drafted]
    return sum(accepted for accepted, _ in counts), sum(number for _, number in counts)


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(MOST_S + 300)
@pytest.mark.parametrize("kind", list(RECIPES))
def test_a_head_learns_from_smollm2(kind: str, tmp_path: Path) -> None:
    steps, rate, options = RECIPES[kind]
    started = time.monotonic()
    done = subprocess.run(
        [
            sys.executable, "-m", "paceline.cluster.cli", "train", kind, "--target", "smollm2",
            "--out", str(tmp_path / kind), "--steps", str(steps), "-b", "2", "--length", "128",
            "--held-out-rows", "8", "--eval-every", str(steps // 2), "--warmup", "5", "--json",
            "--lr", str(rate),
            *(word for option in options for word in ("--set", option)),
        ],
        capture_output=True, text=True, timeout=MOST_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seconds = time.monotonic() - started
    result = json.loads(done.stdout)
    before, after = result["before"], result["after"]
    engine = load_engine("smollm2", heads=tmp_path, dtype="auto")
    num_accepted, num_drafted = check_drafts(engine, kind)
    print(
        f"{kind}: {seconds:.0f} s; loss {before['loss']:.2f} to {after['loss']:.2f}; accepted "
        f"length {after['accepted_length']:.2f} on held-out text; "
        f"{num_accepted} of {num_drafted} drafted tokens accepted"
    )
    assert after["loss"] < 0.8 * before["loss"]
    assert after["accepted_length"] > before["accepted_length"] + 0.05
    assert num_accepted > 0
