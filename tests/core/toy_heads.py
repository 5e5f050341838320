"""Heads trained for seconds on a few texts that the demo target wrote itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.engine import Engine
from paceline.loading import load_engine
from paceline.models.base import Segment
from paceline.models.heads import HeadLibrary
from paceline.models.heads.base import Head, HeadBatch, HeadTarget
from paceline.models.llama import LlamaRunner
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.types import Need
from tests.core.engines import Reference
from tests.modelzoo import make_model

AnyHead = TypeVar("AnyHead", bound=Head)

# Not from the standard library, whose text differs between Pythons: what a head learns in seconds
# from so little text depends on it.
BEGINNINGS = (
    'def read_lines(path):\n    """Return the lines of a file without their ends."""\n',
    "import os\nimport sys\nimport argparse\n\ndef main():\n    parser = argparse.",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "for name, value in sorted(options.items()):\n    if value is None:\n        continue\n",
    "    try:\n        with open(filename) as file:\n            data = file.read()\n    except",
    "class NotFound(Exception):\n    pass\n\nclass NotAllowed(Exception):\n    pass\n\nclass",
    "    def test_empty(self):\n        self.assertEqual(len([]), 0)\n\n    def test_one(self):\n",
    "# The width of a column in characters.\nWIDTH = 72\n# The height of a page in lines.\nHEIGHT",
)
PROMPT, LENGTH, ROWS = 16, 64, len(BEGINNINGS)
PARAMS = SamplingParams(ignore_eos=True, max_tokens=LENGTH - PROMPT)
_WANTS = frozenset({Need.HIDDEN_STATES, Need.LAYER_STATES})


@cache
def _demo_engine() -> Engine:
    return load_engine()


@cache
def demo_runner() -> LlamaRunner:
    runner = _demo_engine().target.runner
    assert isinstance(runner, LlamaRunner)
    return runner


@cache
def texts() -> torch.Tensor:
    """Beginnings and what the demo target writes after them.  # int64 [ROWS, LENGTH]"""
    engine = _demo_engine()
    assert engine.tokenizer is not None
    prompts = [engine.tokenizer.encode(text)[:PROMPT] for text in BEGINNINGS]
    sessions = engine.generate(prompts, PARAMS, SpeculationConfig(method="ar"))
    return torch.tensor([session.token_ids for session in sessions])


def read(runner: LlamaRunner, token_ids: torch.Tensor, seed: int = 0) -> HeadBatch:
    """What a target computes for texts of one length."""
    segments = [Segment(runner.new_sequence(), row.numpy().astype(np.int64)) for row in token_ids]
    result = runner.forward(segments, _WANTS)
    for segment in segments:
        runner.free(segment.sequence)

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float().unflatten(0, tuple(token_ids.shape)).clone()

    return HeadBatch(
        token_ids, rows(result.extras[Need.HIDDEN_STATES]), rows(result.logits),
        rows(result.extras[Need.LAYER_STATES]), torch.Generator().manual_seed(seed),
    )  # fmt: skip


@cache
def demo_target() -> HeadTarget:
    return HeadTarget.from_folder(TARGET_DIR)


def train(
    head: Head, batch: HeadBatch, steps: int, *, rate: float = 3e-3, rows: int = 4, seed: int = 0
) -> list[float]:
    """Adam on parts of ``batch``; the losses of all steps."""
    optimizer = torch.optim.Adam(head.parameters(), rate)
    generator, losses = torch.Generator().manual_seed(seed), []
    head.train()
    for step in range(steps):
        chosen = torch.randperm(len(batch.token_ids), generator=generator)[:rows]
        states = batch.layer_states
        part = replace(
            batch, token_ids=batch.token_ids[chosen], hidden=batch.hidden[chosen],
            logits=batch.logits[chosen], layer_states=None if states is None else states[chosen],
        )  # fmt: skip
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps)
        loss, _ = head.loss(part)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    head.eval()
    return losses


@torch.no_grad()
def evaluate(head: Head, batch: HeadBatch) -> tuple[float, torch.Tensor]:
    """Loss and agreement; the same chance in every call."""
    head.eval()
    loss, metrics = head.loss(replace(batch, generator=torch.Generator().manual_seed(1)))
    return float(loss), metrics["agreement"]


def decode(head: Head, folder: Path, method: str, **knobs: object) -> list[Session]:
    """The texts once more, drafted by ``head``, which is saved and loaded on the way."""
    head.save(folder / head.kind)
    runner = demo_runner()
    engine = Engine(ModelTarget(runner), heads=HeadLibrary(folder, TARGET_DIR, runner))
    config = SpeculationConfig(method=method, length="fixed", **knobs)  # type: ignore[arg-type]
    prompts = texts()[:, :PROMPT].tolist()
    sessions = engine.generate(prompts, PARAMS, config)
    assert [session.token_ids for session in sessions] == texts().tolist()
    assert runner.num_free == runner.kv_capacity
    return sessions


def accepted_length(sessions: Sequence[Session]) -> float:
    """Committed tokens per target forward."""
    tokens = sum(session.stats.num_tokens for session in sessions)
    return tokens / sum(session.stats.num_target_forwards for session in sessions)


def random_head(head_class: type[AnyHead], target: HeadTarget, options: Any) -> AnyHead:
    """Random weights, all different from those at the start of training."""
    torch.manual_seed(0)
    head = head_class(target, options)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return head.requires_grad_(False)


@torch.no_grad()
def drafted_logits(
    head: Head, features: torch.Tensor, token_ids: list[int], paths: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Logits after the last token of each path, all paths in one tree grown level by level.

    Args:
        paths: of one length; equal beginnings are one branch.
    """
    state = head.new_state()
    head.root([state], [features], [token_ids])
    nodes: dict[tuple[int, ...], int] = {(): -1}
    for depth in range(1, len(paths[0]) + 1):
        level = list(dict.fromkeys(tuple(path[:depth]) for path in paths))
        for path in level:
            nodes[path] = len(nodes) - 1
        frontier = [(nodes[path], path[-1], nodes[path[:-1]]) for path in level]
        logits = head.expand([state], [frontier])
    head.free(state)
    rows = dict(zip(level, logits, strict=True))
    return torch.stack([rows[tuple(path)] for path in paths])


def check_end_of_context(
    head_class: type[Head], options: Any, zoo: Path, heads: Path, **knobs: Any
) -> None:
    """Sessions that fill the context have AR's tokens and keep their drafter."""
    folder = make_model("llama_gqa", zoo, num_hidden_layers=2, max_position_embeddings=32)
    random_head(head_class, HeadTarget.from_folder(folder), options).save(heads / head_class.kind)
    runner = LlamaRunner(folder, kv_tokens=600)
    engine = Engine(ModelTarget(runner), heads=HeadLibrary(heads, folder, runner))
    reference = Reference(folder)
    prompts = [list(b"ab"), list(b"0123456789abcdefghijklmn"), list(b"x")]
    for shape in ("chain", "kary"):
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=temperature)
            config = SpeculationConfig(
                method=head_class.kind, length="fixed", shape=shape, node_budget=24, **knobs
            )
            for prompt, session in zip(
                prompts, engine.generate(prompts, params, config), strict=True
            ):
                assert session.length == 32
                assert session.output_ids == reference(prompt, params)
                assert not session.stats.drafter_lost
                assert session.stats.num_drafted > 0 or len(prompt) > 22
    assert runner.num_free == runner.kv_capacity
