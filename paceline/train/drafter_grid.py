"""A grid of small drafters of one target, from which scaling laws are fitted.

Scylla (Yan et al. 2025, arXiv 2505.07858): the acceptance of a drafter grows with the logarithm of
its size and of the tokens that it was trained on. A drafter here is like the paper's in what it
shares with the target: embedding, final norm and output layer, which stay as they are. Its layers
begin at random. It is a draft model of its own otherwise, not a head that reads the target's
states.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from paceline.errors import InvalidArgument
from paceline.train.checkpoints import all_logits, check_layers, load_model, save_model
from paceline.train.data import TrainingText
from paceline.train.distill import sample_text
from paceline.train.draft_models import DraftTask
from paceline.train.drafter_law import DrafterPoint, DrafterPoints, DrafterSize
from paceline.train.losses import acceptance
from paceline.train.trainer import Batch, TrainOptions, train

SHARED = ("model.embed_tokens.", "model.norm.", "lm_head.")
"""Parameters that a drafter takes from the target and does not train."""
_INIT_SEED = 0
SIZES = "1x416", "2x416", "3x416", "4x416", "6x416"
TOKENS = 32_768, 98_304, 294_912
"""The grid that is trained without a choice: for the demo target."""


def new_drafter(target: Any, size: DrafterSize) -> Any:
    """A drafter with the target's embedding, norm and output layer, and random layers.

    Args:
        target: a model of transformers.

    Raises:
        InvalidArgument: the target is not of Llama's kind.
    """
    from transformers import AutoModelForCausalLM

    check_layers(target, "target")
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = size.layers
    config.intermediate_size = size.intermediate
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: size.layers]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_INIT_SEED)
        drafter = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
    weights = {k: v for k, v in target.state_dict().items() if k.startswith(SHARED)}
    drafter.load_state_dict(weights, strict=False)
    return drafter


def num_trained(drafter: Any) -> int:
    """Parameters of a drafter's own layers: the size in the law."""
    return sum(p.numel() for name, p in drafter.named_parameters() if not name.startswith(SHARED))


@dataclass(frozen=True, eq=False)
class DraftMeter:
    """What drafters of one target are measured on: text that the target writes.

    After the first quarter of each held-out row the target writes the rest, of every other row
    greedily and of the others at temperature 1. All drafters meet the same text.
    """

    target: Any
    held_out: Tensor  # int64 [num_rows, length + 1]

    @property
    def prompt(self) -> int:
        """Tokens of a row that the target does not write."""
        return max(1, self.held_out.shape[1] // 4)

    @cached_property
    def text(self) -> Tensor:
        """# int64 [num_rows, length + 1]"""
        prompts = self.held_out[:, : self.prompt]
        temperatures = (torch.arange(len(prompts)) % 2).float()
        return sample_text(self.target, prompts, self.held_out.shape[1], temperatures, seed=0)

    @cached_property
    def logits(self) -> Tensor:
        """The target's logits for each token that it wrote.  # float32 [num_rows, written, V]"""
        with torch.no_grad():
            return torch.cat([self._written(self.target, rows) for rows in self.text.split(4)])

    def _written(self, model: Any, rows: Tensor) -> Tensor:
        return all_logits(model, rows[:, :-1])[:, self.prompt - 1 :]

    @torch.no_grad()
    def measure(self, drafter: Any) -> dict[str, float]:
        """Shares of drafted tokens that are kept, each after the target's own text.

        ``acceptance``: sum of min(p, q), by rejection sampling at temperature 1; ``agreement``:
        both have the same argmax, at temperature 0.
        """
        accepted, agreed = [], []
        pieces = zip(self.text.split(4), self.logits.split(4), strict=True)
        for rows, target in pieces:
            drafted = self._written(drafter, rows)
            accepted.append(acceptance(drafted[1::2], target[1::2]).flatten())
            agreed.append((drafted[::2].argmax(-1) == target[::2].argmax(-1)).flatten())
        return {
            "acceptance": float(torch.cat(accepted).double().mean()),
            "agreement": float(torch.cat(agreed).double().mean()),
        }


class GridTask(DraftTask):
    """Pretrains a drafter's layers on text, by cross entropy; the meter measures it.

    Attributes:
        steps_here: steps of this process, without those before an interruption.
    """

    def __init__(self, target: Path, text: TrainingText, drafter: Path, meter: DraftMeter) -> None:
        super().__init__(target, text, name="scaling", drafter=drafter, divergence="ce")
        self._meter, self.steps_here = meter, 0
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not name.startswith(SHARED))

    def loss(self, batch: Batch) -> Tensor:
        self.steps_here += 1
        return super().loss(batch)

    def evaluate(self) -> dict[str, float]:
        return self._meter.measure(self.model)


def train_grid(
    target: Path,
    text: TrainingText,
    sizes: Sequence[DrafterSize],
    tokens: Sequence[int],
    out: Path,
    *,
    batch_size: int = 4,
    learning_rate: float = 3e-3,
    seed: int = 0,
    bfloat16: bool = False,
    on_point: Callable[[DrafterPoint], None] = lambda point: None,
) -> DrafterPoints:
    """Train each size on each number of tokens, and write ``points.json`` after each drafter.

    Points that the file has are not trained again, and an interrupted drafter goes on from its
    checkpoint. The drafters themselves are in folders of ``out``.

    Args:
        tokens: what a drafter is trained on; whole steps of ``batch_size`` rows.

    Raises:
        InvalidArgument: a list is empty, or ``out`` has points of another target, text or training.
    """
    step_tokens = batch_size * text.length
    if not sizes or not tokens or min(tokens) < step_tokens:
        raise InvalidArgument("tokens", list(tokens), f"sizes, and at least {step_tokens} tokens")
    from paceline.profile import fingerprint, processor

    transformers_logging.disable_progress_bar()
    file = out / "points.json"
    model = load_model(target).requires_grad_(False)
    meter = DraftMeter(model, text.held_out)
    settings = {
        "length": text.length, "batch_size": batch_size, "learning_rate": learning_rate,
        "seed": seed, "bfloat16": bfloat16,
    }  # fmt: skip
    found = DrafterPoints(fingerprint(target), text.digest, processor(), settings)
    if file.exists():
        kept = DrafterPoints.load(file)
        if replace(kept, points=(), processor=found.processor) != found:
            raise InvalidArgument("out", str(out), "a new folder: it has points of another grid")
        found = kept
    for size, steps in _cells(sizes, tokens, step_tokens):
        if any((p.size, p.tokens) == (size, steps * step_tokens) for p in found.points):
            continue
        folder = out / f"{size}-{steps * step_tokens}"
        drafter = new_drafter(model, size)
        start = out / f"{size}-start"
        save_model(drafter, target, start)
        task = GridTask(target, text, start, meter)
        _ = meter.logits  # its own time does not count
        options = TrainOptions(
            out=folder, steps=steps, batch_size=batch_size, learning_rate=learning_rate,
            warmup=max(1, steps // 20), seed=seed, eval_every=steps, bfloat16=bfloat16,
        )  # fmt: skip
        started = time.process_time()
        result = train(task, options)
        spent = time.process_time() - started
        point = DrafterPoint(
            size.layers, size.intermediate, num_trained(drafter), steps * step_tokens,
            result.metrics["acceptance"], result.metrics["agreement"],
            # All steps cost what those did that were not done before an interruption.
            spent * steps / task.steps_here if task.steps_here else 0.0,
        )  # fmt: skip
        found = found.plus(point)
        found.save(file)
        on_point(point)
    return found


def _cells(
    sizes: Sequence[DrafterSize], tokens: Sequence[int], step_tokens: int
) -> Iterator[tuple[DrafterSize, int]]:
    """Sizes and numbers of steps, short trainings first."""
    for count in sorted(set(tokens)):
        for size in sizes:
            yield size, count // step_tokens
