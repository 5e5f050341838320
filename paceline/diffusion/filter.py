"""The filter of the schedule `learn2pd` and its training: `python -m paceline.diffusion.filter`.

Learn2PD, arXiv 2509.25188. A small network reads how probable the predicted token of each position
of a block is, and says which of them are final: the same that will stand there when the block is
done. It is trained on texts that the static schedule writes, one token a step; each step gives an
example, labelled by the finished block.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from paceline.demo import DIFFUSION_DIR
from paceline.diffusion.loop import DiffusionModel
from paceline.diffusion.schedules import Schedule, View
from paceline.diffusion.tasks import TASKS, example
from paceline.errors import InvalidArgument, ModelNotFound
from paceline.train import corpus

Tensor = torch.Tensor
FILE = "filter.safetensors"
HIDDEN = 64


class Filter:
    """Two layers over a block's confidences.

    Args:
        weights: ``first`` [hidden, 2 block_size], ``second`` [block_size, hidden] and their biases.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.block_size = len(weights["second"])

    @staticmethod
    def untrained(block_size: int, seed: int = 0) -> Filter:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randn(HIDDEN, 2 * block_size, generator=generator)
        return Filter(
            {
                "first": first / (2 * block_size) ** 0.5,
                "first_bias": torch.zeros(HIDDEN),
                "second": torch.randn(block_size, HIDDEN, generator=generator) / HIDDEN**0.5,
                "second_bias": torch.zeros(block_size),
            }
        )

    def logits(self, confidence: Tensor, masked: Tensor) -> Tensor:
        """Of each row being final.

        Args:
            confidence: probabilities of the predicted tokens.  # [..., rows]
            masked: bool; committed rows, and those that a short block lacks, count as sure.

        Returns:
            # [..., rows]
        """
        rows = confidence.shape[-1]
        if rows > self.block_size:
            allowed = f"a filter for blocks of {rows} or more"
            raise InvalidArgument("filter", f"one for blocks of {self.block_size}", allowed)
        padding = (0, self.block_size - rows)
        sure = F.pad(torch.where(masked, confidence, 1.0), padding, value=1.0)
        open_rows = F.pad(masked.float(), padding)
        hidden = F.linear(
            torch.cat([sure, open_rows], -1), self.weights["first"], self.weights["first_bias"]
        )
        logits = F.linear(hidden.relu(), self.weights["second"], self.weights["second_bias"])
        return logits[..., :rows]

    def probabilities(self, confidence: Tensor, masked: Tensor) -> Tensor:
        """How likely each row is final.  # [..., rows]"""
        return self.logits(confidence, masked).sigmoid()


@lru_cache(maxsize=4)
def load_filter(file: str = "") -> Filter:
    """A filter from its file; default: that of the model that ships.

    Raises:
        ModelNotFound: there is no such file.
    """
    path = Path(file) if file else DIFFUSION_DIR / FILE
    if not path.is_file():
        raise ModelNotFound(f"{path} does not exist: python -m paceline.diffusion.filter makes one")
    return Filter(load_file(path))


# --- training ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Watched(Schedule):
    """The static schedule, which remembers what it saw and chose."""

    seen: list[tuple[View, Tensor]] = field(default_factory=list)

    def choose(self, view: View) -> Tensor:
        chosen = Schedule.choose(self, view)
        self.seen.append((view, chosen))
        return chosen


@dataclass(frozen=True, slots=True)
class Examples:
    """Steps of finished blocks.

    Attributes:
        confidence: # [steps, block_size]
        masked: rows that the step could have committed, with a known end.  # bool
        final: whether the predicted token is the one that stands there in the end.  # bool
    """

    confidence: Tensor
    masked: Tensor
    final: Tensor


def watch(model: DiffusionModel, prompts: Sequence[Sequence[int]], max_tokens: int) -> Examples:
    """Write behind each prompt with the static schedule, and label each of its steps."""
    size = model.runner.blocks.block_size
    columns: tuple[list[Tensor], ...] = ([], [], [])
    for prompt in prompts:
        watched = _Watched()
        for _ in model.denoiser(watched).decode(prompt, max_tokens):
            seen = list(watched.seen)
            watched.seen.clear()
            for row in _labelled(seen, size):
                for column, value in zip(columns, row, strict=True):
                    column.append(value)
    return Examples(*(torch.stack(column) for column in columns))


def _labelled(seen: list[tuple[View, Tensor]], size: int) -> Iterator[tuple[Tensor, ...]]:
    if not seen:
        return
    final = torch.full((size,), -1)
    for view, chosen in seen:
        rows = (chosen & view.masked).nonzero()[:, 0]
        final[rows] = view.tokens[rows]
    for view, _ in seen:
        padding = (0, size - len(view.masked))
        known = F.pad(view.masked, padding) & (final >= 0)
        tokens = F.pad(view.tokens, padding, value=-2)
        yield F.pad(view.confidence, padding, value=1.0), known, (tokens == final) & known


def fit(examples: Examples, steps: int, lr: float = 3e-3, batch: int = 256) -> Filter:
    """A filter trained with binary cross-entropy of the rows that were masked."""
    made = Filter.untrained(examples.confidence.shape[1])
    for tensor in made.weights.values():
        tensor.requires_grad_(True)
    optimizer = torch.optim.Adam(made.weights.values(), lr=lr)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(examples.masked), (batch,), generator=generator)
        masked = examples.masked[rows]
        logits = made.logits(examples.confidence[rows], masked)[masked]
        loss = F.binary_cross_entropy_with_logits(logits, examples.final[rows][masked].float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Filter({name: tensor.detach() for name, tensor in made.weights.items()})


def precision(made: Filter, examples: Examples, threshold: float) -> tuple[float, float]:
    """Of the rows that the filter takes, the share that is final; and the share of rows taken."""
    taken = made.probabilities(examples.confidence, examples.masked) > threshold
    taken &= examples.masked
    right = int((taken & examples.final).sum()) / max(1, int(taken.sum()))
    return right, int(taken.sum()) / max(1, int(examples.masked.sum()))


def _prompts(
    model: DiffusionModel, count: int, extra: list[Path], held_out: bool
) -> list[list[int]]:
    """Half of them tasks, half beginnings of texts."""
    rng = random.Random(f"filter {held_out}")
    documents = list(itertools.islice(corpus.split(extra)[held_out], 4 * count))
    prompts = []
    for number in range(count):
        if number % 2:
            tokens = model.tokenizer.encode(rng.choice(documents).text[:4000], False)
            start = rng.randrange(max(1, len(tokens) - 40))
            prompts.append(tokens[start : start + rng.randint(8, 40)])
        else:
            prompts.append(model.tokenizer.encode(example(rng.choice(TASKS), rng).prompt, False))
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DIFFUSION_DIR)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--extra-corpus", type=Path, action="append", default=[])
    parser.add_argument("--texts", type=int, default=120)
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = DiffusionModel(args.model)
    examples, others = (
        watch(model, _prompts(model, count, args.extra_corpus, held_out), 32)
        for count, held_out in ((args.texts, False), (args.texts // 4, True))
    )
    made = fit(examples, args.steps)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(made.weights, args.out)
    base = int(others.final.sum()) / int(others.masked.sum())
    print(f"{len(examples.final)} steps; held out: {base:.3f} of the rows are final")  # noqa: T201
    for threshold in (0.5, 0.8, 0.9, 0.96):
        right, share = precision(made, others, threshold)
        print(f"threshold {threshold}: {right:.3f} right of {share:.3f} taken")  # noqa: T201


if __name__ == "__main__":
    main()
