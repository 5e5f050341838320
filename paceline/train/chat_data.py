"""Conversations for training: tokens on disk, and which of them the assistant wrote.

Files are read line by line, and their tokens are kept in Paceline's cache folder, so that memory
does not grow with the number of conversations. What is cached depends on the files' contents, the
tokenizer and the chat template, and is made once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.cache import cache_folder, locked
from paceline.chat import render_chat
from paceline.errors import InvalidArgument
from paceline.tokenizer import ChatTemplate, Tokenizer, fingerprint
from paceline.train import corpus
from paceline.types import IntArray

_VERSION = 1
_PARTS = ("training", "held_out")
_MANY = 1 << 19  # tokens that are looked at together
# Names that ShareGPT files have for their speakers.
_SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "assistant": "assistant",
}  # fmt: skip

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Record:
    """A conversation, or a text by itself.

    Attributes:
        place: FILE:LINE, for messages.
    """

    place: str
    messages: Messages | None
    text: str = ""


# --- records --------------------------------------------------------------------------------------


def has_conversations(files: Sequence[Path]) -> bool:
    """Whether the first record of a JSONL file is a conversation; a broken file has none."""
    for path in files:
        if path.suffix == ".jsonl":
            with suppress(InvalidArgument):  # whatever reads the file reports it
                for _, record in _lines(path):
                    if {"messages", "conversations"} & record.keys():
                        return True
                    break
    return False


def read_records(path: Path, chat: bool) -> Iterator[Record]:
    """The records of a file, one at a time.

    Args:
        chat: whether questions with their answers are conversations, too.

    Raises:
        InvalidArgument: the file cannot be read, or the line that the error names is no record.
    """
    if path.suffix != ".jsonl":
        for number, document in enumerate(corpus.read_extra(path), 1):
            yield Record(f"{path}#{number}", None, document.text)
        return
    for place, record in _lines(path):
        if "messages" in record:
            yield Record(place, _messages(place, record["messages"], "role", "content"))
        elif "conversations" in record:
            yield Record(place, _messages(place, record["conversations"], "from", "value"))
        else:
            pair = corpus.question_of(record) if chat else None
            if pair is not None:
                turns = zip(("user", "assistant"), pair, strict=True)
                yield Record(place, [{"role": role, "content": said} for role, said in turns])
                continue
            try:
                yield Record(place, None, corpus.text_of(record))
            except ValueError as error:
                raise _broken(place, f"a conversation or a text: {error}") from None


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """FILE:LINE and the object of each line that is not blank."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                place = f"{path}:{number}"
                try:
                    record = json.loads(line.decode("utf-8"))
                except ValueError as error:  # not UTF-8, or not JSON
                    raise _broken(place, f"JSON ({error})") from None
                if not isinstance(record, dict):
                    raise _broken(place, "an object")
                yield place, record
    except OSError as error:
        raise _broken(str(path), f"a file ({error.strerror})") from None


def _messages(place: str, given: Any, speaker: str, text: str) -> Messages:
    form = f'a conversation: a list of {{"{speaker}": ..., "{text}": ...}} with texts'
    if not isinstance(given, list) or not given:
        raise _broken(place, form)
    messages = []
    for message in given:
        if not isinstance(message, dict):
            raise _broken(place, form)
        role, content = message.get(speaker), message.get(text)
        if not isinstance(role, str) or not isinstance(content, str):
            raise _broken(place, form)
        if speaker == "from":
            if role not in _SPEAKERS:
                raise _broken(place, f"speakers among {', '.join(_SPEAKERS)}, not {role!r}")
            message, role = {}, _SPEAKERS[role]
        # Templates may use further keys of a message, such as a name.
        messages.append({**message, "role": role, "content": content})
    if not any(message["role"] == "assistant" for message in messages):
        raise _broken(place, "a conversation with a message of the assistant")
    return messages


def _broken(place: str, allowed: str) -> InvalidArgument:
    return InvalidArgument("data", place, allowed)


# --- tokens and mask ------------------------------------------------------------------------------


def encode_conversation(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    eos_token_ids: Sequence[int] = (),
    place: str = "messages",
) -> tuple[list[int], list[bool]]:
    """Token ids of a whole conversation, and which of them the assistant has to write.

    These are the tokens of its messages, each to its end-of-turn token: the last one of
    ``eos_token_ids`` that the template writes for the message, or else the first token after the
    content. The template is rendered up to a message, as for an answer, and with it.

    Args:
        place: FILE:LINE, for errors.

    Raises:
        InvalidArgument: the template refuses the messages, or does not write a conversation as a
            continuation of its beginning.
    """
    special = not template.source  # a template writes the special tokens itself

    def render(number: int, add_generation_prompt: bool) -> str:
        try:
            return render_chat(
                template.source, messages[:number], add_generation_prompt=add_generation_prompt,
                bos_token=template.bos_token, eos_token=template.eos_token,
            )  # fmt: skip
        except InvalidArgument as error:
            raise _broken(place, error.allowed) from None

    def count(text: str) -> int:
        """Number of the conversation's tokens that hold nothing beyond its beginning ``text``."""
        found = tokenizer.encode(text, add_special_tokens=special)
        if found == ids[: len(found)]:
            return len(found)
        both = zip(found, ids, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))

    whole = render(len(messages), False)
    ids = tokenizer.encode(whole, add_special_tokens=special)
    mask = [False] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(number, True)
        last = number + 1 == len(messages)
        after = whole if last else render(number + 1, False)
        if not (after.startswith(before) and whole.startswith(after)):
            raise _broken(
                place,
                "a conversation that the chat template writes as a continuation of its beginning: "
                f"what it writes up to message {number + 1} is no prefix of what it writes with it",
            )
        start, end = count(before), len(ids) if last else count(after)
        turn_ends = [i for i in range(start, end) if ids[i] in eos_token_ids]
        if turn_ends:
            end = turn_ends[-1] + 1
        else:
            content = message["content"].strip()  # many templates strip it
            found = after.find(content, len(before))
            if found >= 0:
                end = min(end, count(after[: found + len(content)]) + 1)
        mask[start:end] = [True] * (end - start)
    return ids, mask


# --- rows on disk ---------------------------------------------------------------------------------


class TextRows:
    """Rows of a stream of tokens on disk; indexing with row numbers reads them.

    Args:
        stream: # [num_tokens]
        numbers: of the rows in the stream.  # int64 [num_rows]
        length: the last of the ``length + 1`` tokens of a row begins the next row.
        dtype: of what is read.
    """

    def __init__(
        self, stream: npt.NDArray[Any], numbers: IntArray, length: int, dtype: type
    ) -> None:
        self._stream, self._numbers, self._length = stream, numbers, length
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, chosen: IntArray | Sequence[int]) -> Tensor:
        """# [len(chosen), length + 1]"""
        first = self._numbers[np.asarray(chosen, np.int64)] * self._length
        places = first[:, None] + np.arange(self._length + 1)
        return torch.from_numpy(self._stream[places].astype(self._dtype))

    def chunks(self) -> Iterator[bytes]:
        """The bytes of all rows, a part at a time."""
        many = max(1, _MANY // (self._length + 1))
        for start in range(0, len(self), many):
            yield self[np.arange(start, min(start + many, len(self)))].numpy().tobytes()


class Places(Sequence[str]):
    """FILE:LINE of the record in which each row begins, read when it is asked for."""

    def __init__(self, folder: Path, numbers: IntArray, length: int, files: Sequence[Path]) -> None:
        self._numbers, self._length, self._files = numbers, length, files
        self._starts = _map(folder / "training.starts", np.int64)
        self._lines = _map(folder / "training.lines", np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, row: Any) -> Any:
        owner = np.searchsorted(self._starts, self._numbers[row] * self._length, "right") - 1
        file, line = self._lines[owner].tolist()
        return f"{self._files[file]}:{line}"


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """Rows of one part of the data.

    Attributes:
        all_tokens, all_mask: of the records, one after the other.  # [num_tokens]
        numbers: of its rows.  # int64 [num_rows]
        length: see :class:`TextRows`.
    """

    all_tokens: npt.NDArray[Any]
    all_mask: npt.NDArray[Any]
    numbers: IntArray
    length: int

    @property
    def tokens(self) -> TextRows:
        """The token ids, int64."""
        return TextRows(self.all_tokens, self.numbers, self.length, np.int64)

    @property
    def mask(self) -> TextRows:
        """Which tokens have a loss, bool."""
        return TextRows(self.all_mask, self.numbers, self.length, np.bool_)

    def split(self, row: int) -> tuple[Stream, Stream]:
        """The rows before ``row``, and the others."""
        before, after = self.numbers[:row], self.numbers[row:]
        return replace(self, numbers=before), replace(self, numbers=after)


def open_stream(folder: Path, part: str, length: int) -> Stream:
    """The rows of a cached part in which the assistant writes something."""
    dtype = np.uint16 if (folder / "uint16").exists() else np.uint32
    tokens = _map(folder / f"{part}.tokens", dtype)
    mask = _map(folder / f"{part}.mask", np.bool_)
    kept = []
    many = max(1, _MANY // length)
    total = max(0, (len(tokens) - 1) // length)
    for start in range(0, total, many):
        stop = min(start + many, total)
        labels = mask[start * length + 1 : stop * length + 1].reshape(-1, length)
        kept.append(start + np.flatnonzero(labels.any(1)))
    numbers = np.concatenate(kept) if kept else np.zeros(0, np.int64)
    return Stream(tokens, mask, numbers, length)


def _map(file: Path, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    if not file.stat().st_size:
        return np.zeros(0, dtype)
    return np.memmap(file, dtype, mode="r")


def tokenize(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    separator: Sequence[int],
    eos_token_ids: Sequence[int],
    chat: bool,
) -> Path:
    """The folder in Paceline's cache with the tokens of ``files``, made where it is missing.

    A tenth of the records, chosen by their hash, is held out. ``PART.tokens`` and ``PART.mask``
    hold the records one after the other; texts that are no conversations count as a whole.
    ``PART.starts`` says where each record begins, ``PART.lines`` the number of its file and its
    line.

    Args:
        template: None: the target has none, and conversations are refused.
        separator: token ids before each record without a template of the model.
        eos_token_ids: see :func:`encode_conversation`.
        chat: see :func:`read_records`.

    Raises:
        InvalidArgument: a file cannot be read; a broken line is named.
    """
    key = _key(files, tokenizer, template, separator, eos_token_ids, chat)
    root = cache_folder("conversations")
    folder = root / key
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / "lock"):
        if folder.is_dir():
            return folder
        draft = root / f"{key}.tmp"
        shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
        draft.mkdir()
        try:
            narrow = max(tokenizer.vocabulary().values()) < 1 << 16
            (draft / ("uint16" if narrow else "uint32")).touch()
            _write(
                draft, np.uint16 if narrow else np.uint32, files, tokenizer, template, separator,
                eos_token_ids, chat,
            )  # fmt: skip
            os.replace(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def _key(files: Sequence[Path], tokenizer: Tokenizer, template: Any, *others: Any) -> str:
    # Equal vocabularies may have other merges or normalisation.
    own = tokenizer.to_json() or fingerprint(tokenizer)
    said = repr((_VERSION, own, template, *others))
    digest = hashlib.sha256(said.encode())
    for path in files:
        try:
            with path.open("rb") as file:
                contents = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _broken(str(path), f"a file ({error.strerror})") from None
        digest.update(f"{path.suffix}{contents}".encode())
    return digest.hexdigest()[:32]


def _write(
    folder: Path,
    dtype: type,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    separator: Sequence[int],
    eos_token_ids: Sequence[int],
    chat: bool,
) -> None:
    sizes = dict.fromkeys(_PARTS, 0)
    with ExitStack() as stack:
        out: dict[str, BinaryIO] = {
            f"{part}.{name}": stack.enter_context((folder / f"{part}.{name}").open("wb"))
            for part in _PARTS
            for name in ("tokens", "mask", "starts", "lines")
        }
        for number, path in enumerate(files):
            for record in read_records(path, chat):
                if record.messages is None:
                    key = record.text
                    ids = [*separator, *tokenizer.encode(record.text)]
                    mask = [True] * len(ids)
                else:
                    if template is None:
                        raise _broken(
                            record.place,
                            "texts (a conversation needs a target with a chat template, or --chat, "
                            "which writes a line for each message)",
                        )
                    key = json.dumps(record.messages)
                    ids, mask = encode_conversation(
                        tokenizer, template, record.messages, eos_token_ids, record.place
                    )
                    if not template.source:
                        ids, mask = [*separator, *ids], [False] * len(separator) + mask
                part = _PARTS[corpus.is_held_out(key)]
                line = int(record.place.replace("#", ":").rpartition(":")[2])
                out[f"{part}.starts"].write(np.int64(sizes[part]).tobytes())
                out[f"{part}.lines"].write(np.array([number, line], np.int64).tobytes())
                out[f"{part}.tokens"].write(np.array(ids, dtype).tobytes())
                out[f"{part}.mask"].write(np.array(mask, np.bool_).tobytes())
                sizes[part] += len(ids)
