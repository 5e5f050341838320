"""Text for training: files or the demo corpus, cut into rows of one length.

Texts are held in memory; conversations (:mod:`paceline.train.chat_data`) stay on disk.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.chat import template_of
from paceline.errors import InvalidArgument
from paceline.tokenizer import eos_token_ids, load_tokenizer
from paceline.train import corpus
from paceline.train.chat_data import Places, TextRows, has_conversations, open_stream, tokenize
from paceline.types import IntArray

SUFFIXES = (".txt", ".jsonl")


@dataclass(frozen=True, slots=True, eq=False)
class TrainingText:
    """Tokenized rows. The last token of a row is only a label, and begins the next row.

    Attributes:
        training: # int64 [num_rows, length + 1]
        held_out: from documents that are in no training row.  # int64 [num_rows, length + 1]
        sources: the document in which each training row begins.
        training_mask, held_out_mask: the tokens that have a loss, of conversations those that the
            assistant writes; None: all.  # bool [num_rows, length + 1]
    """

    training: Tensor | TextRows
    held_out: Tensor
    sources: Sequence[str]
    training_mask: TextRows | None = None
    held_out_mask: Tensor | None = None

    @property
    def length(self) -> int:
        return int(self.held_out.shape[1]) - 1

    @property
    def digest(self) -> str:
        """A hash of the rows, and of the masks where there are some."""
        digest = hashlib.sha256()
        for part in (self.training, self.held_out, self.training_mask, self.held_out_mask):
            if isinstance(part, TextRows):
                for chunk in part.chunks():
                    digest.update(chunk)
            elif part is not None:
                digest.update(part.numpy().tobytes())
        return digest.hexdigest()[:16]

    def mask(self, rows: IntArray | Sequence[int]) -> Tensor:
        """Which tokens of training rows have a loss.  # bool [len(rows), length + 1]"""
        if self.training_mask is None:
            return torch.ones(len(rows), self.length + 1, dtype=torch.bool)
        return self.training_mask[rows]

    def describe(self, rows: IntArray) -> str:
        """The numbers of rows and the documents that they begin in, for a message."""
        return "rows " + ", ".join(f"{row} ({self.sources[row]})" for row in rows.tolist())


def load_text(
    tokenizer_folder: Path,
    files: Sequence[Path],
    length: int,
    held_out_rows: int = 32,
    chat: bool | None = None,
) -> TrainingText:
    """Read and tokenize ``files``, or the demo corpus without any.

    A tenth of the documents, chosen by their hash, is held out; if that is less than a row, the
    last tenth of all rows is held out.

    Args:
        files: ``.txt``, or ``.jsonl`` whose records have ``text``, ``prompt`` and ``completion``,
            or ``question`` and ``answer``; or conversations: ``messages`` of ``role`` and
            ``content``, or ShareGPT's ``conversations`` of ``from`` and ``value``.
        length: number of tokens that a row predicts.
        held_out_rows: maximum number of rows to measure on.
        chat: write conversations with the target's chat template, and questions with their answers
            as conversations; only what the assistant writes has a loss. None: if the first record
            of a file is a conversation, which leaves pairs as texts.

    Raises:
        InvalidArgument: a file cannot be read, or the text is shorter than two rows.
    """
    if length < 2:
        raise InvalidArgument("length", length, "at least 2 tokens")
    for path in files:
        if path.suffix not in SUFFIXES:
            raise InvalidArgument("data", str(path), f"a file ending in {' or '.join(SUFFIXES)}")
    if files and (chat or (chat is None and has_conversations(files))):
        return _load_conversations(tokenizer_folder, files, length, held_out_rows, chat)
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
    _check_size(files, length, len(rows), len(test))
    spread = _spread(len(test), held_out_rows)
    return TrainingText(torch.from_numpy(rows), torch.from_numpy(test[spread]), tuple(sources))


def _load_conversations(
    folder: Path, files: Sequence[Path], length: int, held_out_rows: int, chat: bool | None
) -> TrainingText:
    """Rows of conversations on disk; rows in which the assistant writes nothing are left out."""
    end = eos_token_ids(folder)
    cached = tokenize(
        files, load_tokenizer(folder), template_of(folder, chat), end[:1], end, bool(chat)
    )
    rows, test = (open_stream(cached, part, length) for part in ("training", "held_out"))
    if not len(test.numbers) and len(rows.numbers) > 1:
        rows, test = rows.split(len(rows.numbers) - max(1, len(rows.numbers) // 10))
    _check_size(files, length, len(rows.numbers), len(test.numbers))
    spread = _spread(len(test.numbers), held_out_rows)
    return TrainingText(
        rows.tokens,
        test.tokens[spread],
        Places(cached, rows.numbers, length, files),
        rows.mask,
        test.mask[spread],
    )


def _check_size(files: Sequence[Path], length: int, training: int, held_out: int) -> None:
    if not training or not held_out:
        raise InvalidArgument(
            "data",
            ", ".join(map(str, files)) or "the demo corpus",
            f"text for at least two rows of {length} tokens",
        )


def _spread(available: int, wanted: int) -> IntArray:
    """Row numbers, evenly over all rows."""
    return np.linspace(0, available - 1, min(wanted, available)).round().astype(np.int64)


def _read(files: Sequence[Path]) -> tuple[list[corpus.Document], list[corpus.Document]]:
    training: list[corpus.Document] = []
    held_out: list[corpus.Document] = []
    for path in files:
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
