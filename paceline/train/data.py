"""Text for training: files or the demo corpus, cut into rows of one length."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.errors import InvalidArgument
from paceline.tokenizer import eos_token_ids, load_tokenizer
from paceline.train import corpus
from paceline.types import IntArray

SUFFIXES = (".txt", ".jsonl")


@dataclass(frozen=True, slots=True, eq=False)
class TrainingText:
    """Tokenized rows. The last token of a row is only a label, and begins the next row.

    Attributes:
        training: # int64 [num_rows, length + 1]
        held_out: from documents that are in no training row.  # int64 [num_rows, length + 1]
        sources: the document in which each training row begins.
    """

    training: Tensor
    held_out: Tensor
    sources: tuple[str, ...]

    @property
    def length(self) -> int:
        return int(self.training.shape[1]) - 1

    @property
    def digest(self) -> str:
        """A hash of the rows."""
        digest = hashlib.sha256(self.training.numpy().tobytes())
        digest.update(self.held_out.numpy().tobytes())
        return digest.hexdigest()[:16]

    def describe(self, rows: IntArray) -> str:
        """The numbers of rows and the documents that they begin in, for a message."""
        return "rows " + ", ".join(f"{row} ({self.sources[row]})" for row in rows.tolist())


def load_text(
    tokenizer_folder: Path, files: Sequence[Path], length: int, held_out_rows: int = 32
) -> TrainingText:
    """Read and tokenize ``files``, or the demo corpus without any.

    A tenth of the documents, chosen by their hash, is held out; if that is less than a row, the
    last tenth of all rows is held out.

    Args:
        files: ``.txt``, or ``.jsonl`` whose records have ``text``, ``prompt`` and ``completion``,
            or ``question`` and ``answer``.
        length: number of tokens that a row predicts.
        held_out_rows: maximum number of rows to measure on.

    Raises:
        InvalidArgument: a file cannot be read, or the text is shorter than two rows.
    """
    if length < 2:
        raise InvalidArgument("length", length, "at least 2 tokens")
    if files:
        training, held_out = _read(files)
    else:
        training, held_out = corpus.split()
    random.Random(0).shuffle(training)
    tokenizer = load_tokenizer(tokenizer_folder)
    separator = list(eos_token_ids(tokenizer_folder)[:1])

    def rows_of(documents: Sequence[corpus.Document]) -> tuple[IntArray, list[str]]:
        tokens: list[int] = []
        starts: list[int] = []
        for document in documents:
            starts.append(len(tokens))
            tokens += separator + tokenizer.encode(document.text)
        count = max(0, (len(tokens) - 1) // length)
        flat = np.array(tokens, np.int64)
        first = np.arange(count) * length
        owners = np.searchsorted(starts, first, "right") - 1
        rows = flat[first[:, None] + np.arange(length + 1)]
        return rows, [documents[i].name for i in owners]

    rows, sources = rows_of(training)
    test, _ = rows_of(held_out)
    if not len(test) and len(rows) > 1:
        cut = len(rows) - max(1, len(rows) // 10)
        rows, test, sources = rows[:cut], rows[cut:], sources[:cut]
    if not len(rows) or not len(test):
        raise InvalidArgument(
            "data",
            ", ".join(map(str, files)) or "the demo corpus",
            f"text for at least two rows of {length} tokens",
        )
    spread = np.linspace(0, len(test) - 1, min(held_out_rows, len(test))).round().astype(int)
    return TrainingText(torch.from_numpy(rows), torch.from_numpy(test[spread]), tuple(sources))


def _read(files: Sequence[Path]) -> tuple[list[corpus.Document], list[corpus.Document]]:
    training: list[corpus.Document] = []
    held_out: list[corpus.Document] = []
    for path in files:
        if path.suffix not in SUFFIXES:
            raise InvalidArgument("data", str(path), f"a file ending in {' or '.join(SUFFIXES)}")
        try:
            documents = corpus.read_extra(path)
        except OSError as error:
            raise InvalidArgument("data", str(path), f"a file ({error.strerror})") from error
        except ValueError as error:  # not UTF-8, not JSON, or a record without text
            raise InvalidArgument("data", str(path), f"readable text: {error}") from error
        for document in documents:
            kept = held_out if corpus.is_held_out(document.text) else training
            kept.append(document)
    return training, held_out
