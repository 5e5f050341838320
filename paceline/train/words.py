"""Train the output layer of whole words for `paceline together words` (MuMo, arXiv 2401.10660).

Words are sequences of several tokens that are frequent in the training text. Where the tokenizer
cuts words finely, as in a language that it was not made for, these are words. In text that it was
made for, as the demo's, they are phrases such as ``" is not None:"``.

The target reads the text once and stays as it is: its states and the logarithm of its own layer's
normaliser are all that the training needs of it. At each place the layer learns which word begins
there, or that none does, by cross entropy over tokens and words together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import InvalidArgument
from paceline.models.base import Segment
from paceline.models.llama import LlamaRunner
from paceline.numerics import digest_files
from paceline.together.words import KIND, WordHead
from paceline.train.data import TrainingText
from paceline.train.trainer import Batch, TrainOptions, train
from paceline.types import IntArray, Need

LONGEST = 8
"""Tokens of a word, at most."""
CHECKPOINT_SECONDS = 20.0
_HIDDEN = frozenset({Need.HIDDEN_STATES})


def frequent_words(
    rows: Sequence[Sequence[int]], count: int, most: int = 8
) -> list[tuple[int, ...]]:
    """Sequences of tokens, those first that save most steps.

    All sequences of up to ``LONGEST`` tokens compete, each with its count. The ``most * count``
    best ones then cut the text, from left to right and the longest first, and what they really save
    decides; many of them are parts of others.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for row in rows:
        for length in range(2, LONGEST + 1):
            counts.update(zip(*(row[i:] for i in range(length)), strict=False))
    words = _best(counts, most * count)
    for kept in (2 * count, count):
        used: Counter[tuple[int, ...]] = Counter()
        for row in rows:
            labels, place = label_words(row, words).tolist(), 0
            while place < len(labels):
                word = words[labels[place]] if labels[place] >= 0 else (0,)
                used[word] += len(word) > 1
                place += len(word)
        words = _best(used, kept)
    return words


def _best(counts: Counter[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """The words that save most, of those that are there at least twice."""
    saved = [(times * (len(word) - 1), word) for word, times in counts.items() if times > 1]
    return [word for _, word in sorted(saved, key=lambda each: (-each[0], each[1]))[:count]]


def label_words(row: Sequence[int], words: Sequence[Sequence[int]]) -> IntArray:
    """The longest word that begins behind each token of a row but the last, or -1.

    # int64 [len(row) - 1]
    """
    known = {tuple(word): number for number, word in enumerate(words)}
    labels = np.full(len(row) - 1, -1, np.int64)
    for place in range(len(labels)):
        for length in range(min(LONGEST, len(row) - 1 - place), 1, -1):
            number = known.get(tuple(row[place + 1 : place + 1 + length]))
            if number is not None:
                labels[place] = number
                break
    return labels


@dataclass(frozen=True, slots=True, eq=False)
class WordPlaces:
    """What the target computes at places of a text, and what follows there.

    Attributes:
        states: after the final norm.  # float32 [n, hidden_size]
        normalisers: log of the sum of the own layer's exponentials.  # float32 [n]
        best: the own layer's highest logit.  # float32 [n]
        labels: numbers of words, or -1.  # int64 [n]
    """

    states: Tensor
    normalisers: Tensor
    best: Tensor
    labels: Tensor


@torch.no_grad()
def read_places(
    runner: LlamaRunner, rows: Sequence[Sequence[int]], words: Sequence[Sequence[int]]
) -> WordPlaces:
    """Let the target read rows of tokens."""
    states, normalisers, best, labels = [], [], [], []
    for row in rows:
        sequence = runner.new_sequence()
        try:
            segment = Segment(sequence, np.asarray(row[:-1], np.int64))
            result = runner.forward([segment], _HIDDEN)
        finally:
            runner.free(sequence)
        states.append(result.extras[Need.HIDDEN_STATES].float().cpu())
        logits = result.logits.float().cpu()
        normalisers.append(logits.logsumexp(-1))
        best.append(logits.max(-1).values)
        labels.append(torch.from_numpy(label_words(row, words)))
    return WordPlaces(*(torch.cat(each) for each in (states, normalisers, best, labels)))


def new_head(words: Sequence[Sequence[int]], runner: LlamaRunner, target: str) -> WordHead:
    """A head in which a word begins as likely as its first token is, with the block at zero."""
    head = WordHead(words, runner.config.hidden_size, target)
    firsts = torch.tensor([word[0] for word in words], dtype=torch.int64)
    with torch.no_grad():
        head.block.weight.zero_()
        head.block.bias.zero_()
        head.out.weight.copy_(runner.lm_head[firsts].float())
        head.out.bias.zero_()
    return head


class WordTask:
    """Trains a :class:`WordHead`; see :class:`paceline.train.trainer.Task`.

    ``found`` is the share of held-out words that have the highest logit of all words and at least
    that of the best token; ``invented`` is how often a word has it where none begins.
    """

    name = KIND
    criterion = "negative_loss"

    def __init__(
        self,
        head: WordHead,
        training: WordPlaces,
        held_out: WordPlaces,
        settings: Mapping[str, Any],
    ) -> None:
        self.model: nn.Module = head
        self._head, self._training, self._held_out = head, training, held_out
        self.num_rows = len(training.labels)
        self.settings = settings

    def loss(self, batch: Batch) -> Tensor:
        return self._loss(self._training, torch.from_numpy(batch.rows))

    def _loss(self, places: WordPlaces, rows: Tensor) -> Tensor:
        """Cross entropy over tokens and words, but for what does not depend on the head."""
        logits, labels = self.model(places.states[rows]), places.labels[rows]
        total = torch.logaddexp(places.normalisers[rows], logits.logsumexp(-1))
        own = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        # Where no word begins, the own layer's logit of the token stays as it is.
        return (total - torch.where(labels >= 0, own, places.normalisers[rows])).mean()

    def evaluate(self) -> dict[str, float]:
        places = self._held_out
        is_word = places.labels >= 0
        top, word = self.model(places.states).max(-1)
        wins = top >= places.best
        right = wins & (word == places.labels)
        rows = torch.arange(len(places.labels))
        return {
            "negative_loss": -float(self._loss(places, rows)),
            "found": float(right[is_word].double().mean()),
            "invented": float(wins[~is_word].double().mean()),
        }

    def save(self, folder: Path) -> None:
        self._head.save(folder / f"{KIND}.safetensors")

    def describe_rows(self, rows: IntArray) -> str:
        return f"places {rows.tolist()} of the text"


def train_words(
    runner: LlamaRunner,
    folder: Path,
    text: TrainingText,
    out: Path,
    *,
    count: int = 1024,
    num_rows: int = 800,
    steps: int = 1500,
    seed: int = 0,
) -> dict[str, Any]:
    """Train the head of a target and write ``out/words.safetensors``.

    The same call goes on from the checkpoint after an interruption. The target is read, not
    changed.

    Args:
        folder: the target's.
        count: words, at most.
        num_rows: rows of the text that the target reads.

    Raises:
        InvalidArgument: the text has no word of several tokens.
    """
    found = _some_rows(text, 2 * num_rows)  # more to find words in than the target reads
    words = frequent_words(found, count)
    rows = found[::2]
    if not words:
        raise InvalidArgument("data", f"{len(rows)} rows", "text with words of several tokens")
    target = digest_files(sorted(folder.glob("*.safetensors")))
    head = new_head(words, runner, target)
    settings = {
        "target": target, "data": text.digest, "num_rows": len(rows), "words": len(words),
    }  # fmt: skip
    task = WordTask(
        head,
        read_places(runner, rows, words),
        read_places(runner, text.held_out.tolist(), words),
        settings,
    )
    options = TrainOptions(
        out=out, log=out / "training" / KIND, steps=steps, batch_size=256, learning_rate=2e-3,
        weight_decay=0.0, seed=seed, eval_every=max(1, steps // 5),
        checkpoint_seconds=CHECKPOINT_SECONDS,
    )  # fmt: skip
    trained = train(task, options)
    file = out / f"{KIND}.safetensors"
    return {
        "file": str(file),
        "bytes": file.stat().st_size,
        "words": len(words),
        "tokens_read": len(rows) * text.length,
        **{name: round(value, 4) for name, value in trained.metrics.items()},
    }


def _some_rows(text: TrainingText, count: int) -> list[list[int]]:
    """Rows of the training text, evenly over all of them."""
    numbers = np.linspace(0, len(text.training) - 1, min(count, len(text.training)))
    rows: list[list[int]] = text.training[numbers.round().astype(np.int64).tolist()].tolist()
    return rows
