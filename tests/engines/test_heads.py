"""Heads that Paceline trains and exports draft inside vLLM, as they do in Paceline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.errors import InvalidArgument
from paceline.loading import load_engine
from paceline.models.heads.export import export_head
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.tokenizer import load_tokenizer
from paceline.train.data import TrainingText
from paceline.train.heads import DraftHeadTask
from paceline.train.trainer import Batch
from tests.core.prompts import code_prompts
from tests.engines.conftest import HAS_VLLM, WITHOUT, running

pytestmark = [pytest.mark.skipif(not HAS_VLLM, reason=WITHOUT), pytest.mark.timeout(900)]

DEPTH = 3
EAGER: dict[str, Any] = {"enforce_eager": True, "max_model_len": 512}
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"published": True},
    "dflash": {"num_layers": 1, "block_size": DEPTH + 1},
    "dspark": {"num_layers": 1, "block_size": DEPTH, "markov_rank": 8},
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [prompt[:12] for prompt in code_prompts(load_tokenizer(TARGET_DIR), 8)]


@pytest.fixture(scope="module")
def ar(prompts: list[list[int]]) -> list[Session]:
    return load_engine("demo").generate(prompts, PARAMS, SpeculationConfig(method="ar"))


def exported(kind: str, texts: list[list[int]], folder: Path) -> Path:
    """A head that knows a few texts by heart, as `paceline export` writes it."""
    rows = torch.tensor(texts)
    text = TrainingText(rows, rows, "own")
    task = DraftHeadTask(TARGET_DIR, text, kind=kind, options=OPTIONS[kind])
    optimizer = torch.optim.AdamW(task.model.parameters(), 3e-3)
    generator, steps = torch.Generator().manual_seed(0), 60
    for step in range(steps):
        rng = np.random.default_rng(step)
        loss = task.loss(Batch(np.arange(len(texts)), step, step / steps, rng, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    export_head(task.head.requires_grad_(False).eval(), folder)
    return folder


def accepted(sessions: list[Session]) -> float:
    """Accepted tokens of all that were drafted."""
    drafted = sum(session.stats.num_drafted for session in sessions)
    return sum(session.stats.num_accepted for session in sessions) / drafted


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_an_exported_head_drafts_in_vllm(
    kind: str, prompts: list[list[int]], ar: list[Session], tmp_path: Path
) -> None:
    """No token changes, and about as many drafts are right as in Paceline's own engine."""
    folder = exported(kind, [session.token_ids for session in ar], tmp_path / "head")
    own = load_engine("demo", heads=folder).generate(
        prompts,
        PARAMS,
        SpeculationConfig(method=kind, length="fixed", shape="chain", num_speculative_tokens=DEPTH),
    )
    speculation = {"method": f"vllm_{kind}", "num_speculative_tokens": DEPTH}
    vllm = running({"vllm": EAGER, "model": {"heads": str(folder)}, "speculation": speculation})
    try:
        wanted = SpeculationConfig(**speculation)  # type: ignore[arg-type]
        sessions = vllm.generate(prompts, PARAMS, [wanted], concurrency=8)
    finally:
        vllm.stop()
    for each in (own, sessions):
        assert [session.output_ids for session in each] == [s.output_ids for s in ar]
    assert accepted(own) > 0.3
    assert accepted(sessions) == pytest.approx(accepted(own), rel=0.15)


def test_what_vllm_cannot_run_on_a_cpu_says_so(tmp_path: Path, ar: list[Session]) -> None:
    """vLLM's runner for CPUs has no DSpark."""
    folder = exported("dspark", [session.token_ids for session in ar], tmp_path / "head")
    speculation = {"method": "vllm_dspark", "num_speculative_tokens": DEPTH}
    with pytest.raises(InvalidArgument, match="dspark"):
        running({"vllm": EAGER, "model": {"heads": str(folder)}, "speculation": speculation})
