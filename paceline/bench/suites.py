"""Readers of the prompt files of well-known benchmarks.

A suite names the format of a file that the user has; no file ships with Paceline. Each reader
turns records into prompts, and refuses a broken record with its place in the file.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.prompts import Prompt
from paceline.errors import InvalidArgument

SPEED_BENCH_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""How a turn begins that the published SPEED-Bench leaves out, for its source's licence."""

_Records = Iterator[tuple[str, Any]]
"""The place of each record in the file, and its JSON value."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The format of a benchmark's prompts.

    Attributes:
        file: what the file is, for people.
        record: what one of its records is, for errors.
        read: yields the records of a file.
        turns: the user's turns of a record; none: the record asks for nothing and is left out.
            Raises ValueError, which says what is wrong.
        id_key: the field with a record's id; None: its number in the file.
        category: of all prompts; None: the record's field ``category`` names it.
    """

    file: str
    record: str
    read: Callable[[Path], _Records]
    turns: Callable[[Mapping[str, Any]], list[str]]
    id_key: str | None
    category: str | None = None

    def prompt(self, record: Any, number: int) -> Prompt | None:
        """The prompt of a file's n-th record, None if it asks for nothing.

        Raises:
            ValueError: the record is broken; says how.
        """
        if not isinstance(record, dict):
            raise ValueError("it is another JSON value")
        prompt_id, category = str(number), self.category
        if self.id_key is not None:
            found = _field(record, self.id_key)
            if not isinstance(found, str | int | float):
                raise ValueError(f'"{self.id_key}" is a text or a number')
            prompt_id = str(found)
        if category is None:
            category = _field(record, "category")
            if not isinstance(category, str) or not category or category == "all":
                raise ValueError('"category" is a name other than "all"')
        turns = self.turns(record)
        "".join(turns).encode()  # half a surrogate pair, which JSON can escape, is no text
        return Prompt(prompt_id, category, tuple(turns)) if turns else None


def read_prompts(path: str | Path, suite: str = "spec-bench") -> list[Prompt]:
    """Read a file of prompts in the format of one of ``SUITES``.

    Raises:
        InvalidArgument: the file cannot be read; a record is broken (the error names its line, or
            its number, and the field); no record asks for anything; pyarrow is missing.
    """
    form = SUITES[suite]
    prompts = []
    for number, (place, record) in enumerate(form.read(Path(path)), 1):
        try:
            prompt = form.prompt(record, number)
        except ValueError as error:
            raise InvalidArgument("prompts", place, f"{form.record}; {error}") from error
        if prompt is not None:
            prompts.append(prompt)
    if not prompts:
        raise InvalidArgument("prompts", str(path), f"at least one question ({form.file})")
    return prompts


# --- files ----------------------------------------------------------------------------------------


def _json_lines(path: Path) -> _Records:
    """The values of a JSONL file, which may be compressed (.gz), a line at a time."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _json(line, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        place = f"{path}:{number + 1}" if number else str(path)
        raise InvalidArgument("prompts", place, f"a readable JSONL file ({error})") from error


def _json_array_or_lines(path: Path) -> _Records:
    """The values of a JSON array, or of a JSONL file."""
    try:
        with path.open("rb") as file:
            is_array = file.read(64).lstrip().startswith(b"[")
        if not is_array:
            yield from _json_lines(path)
            return
        values = _json(path.read_bytes(), str(path))
    except OSError as error:
        raise InvalidArgument("prompts", str(path), f"a readable file ({error})") from error
    for number, value in enumerate(values, 1):
        yield f"{path}: record {number}", value


def _json(text: bytes, place: str) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidArgument("prompts", place, f"a readable text in UTF-8 ({error})") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("prompts", place, f"JSON ({error})") from error


def _parquet(path: Path) -> _Records:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise InvalidArgument(
            "prompts", str(path), "pyarrow, which reads parquet: pip install 'paceline[bench]'"
        ) from None
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for record in batch.to_pylist():
                number += 1
                yield f"{path}: record {number}", record
    except (OSError, ArrowException) as error:
        raise InvalidArgument("prompts", str(path), f"a readable parquet file ({error})") from error


# --- records --------------------------------------------------------------------------------------


def _field(record: Mapping[str, Any], key: str) -> Any:
    if key not in record:
        raise ValueError(f'"{key}" is missing')
    return record[key]


def _text(record: Mapping[str, Any], key: str) -> str:
    value = _field(record, key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f'"{key}" has no text')
    return value


def _question(record: Mapping[str, Any]) -> list[str]:
    return [_text(record, "question")]


def _conversation(record: Mapping[str, Any]) -> list[str]:
    turns: Any = _field(record, "turns")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
        raise ValueError('"turns" has no text')
    if not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError('in "turns", a turn is not a text')
    return turns


def _speed_bench(record: Mapping[str, Any]) -> list[str]:
    turns = _conversation(record)
    if any(turn.startswith(SPEED_BENCH_PLACEHOLDER) for turn in turns):
        raise ValueError(
            '"turns" is a placeholder: complete the file with the data preparation of NVIDIA\'s '
            "specdec_bench first"
        )
    return turns


def _function(record: Mapping[str, Any]) -> list[str]:
    # The code comes last and unfenced, so that a model without a chat template continues it.
    return [f"Complete the following Python function.\n\n{_text(record, 'prompt')}"]


def _shared_chat(record: Mapping[str, Any]) -> list[str]:
    """What the user says. Real files have conversations without any, and empty messages."""
    messages = _field(record, "conversations")
    if not isinstance(messages, list):
        raise ValueError('"conversations" is a list')
    turns = []
    for number, message in enumerate(messages, 1):
        for key in ("from", "value"):
            if not isinstance(message, dict) or not isinstance(message.get(key), str):
                raise ValueError(f'"{key}" of message {number} in "conversations" is a text')
        if message["from"] in ("human", "user") and message["value"].strip():
            turns.append(message["value"])
    return turns


_CONVERSATION = '"question_id", "category" and "turns" (a list of texts)'
_SPEC_BENCH = Suite(
    file='JSONL with "question_id", "category" and "turns"',
    record=f"an object with {_CONVERSATION}",
    read=_json_lines,
    turns=_conversation,
    id_key="question_id",
)

SUITES: Mapping[str, Suite] = {
    "spec-bench": _SPEC_BENCH,
    "mt-bench": _SPEC_BENCH,  # Spec-Bench took its format from there
    "gsm8k": Suite(
        file='JSONL with "question"',
        record='an object with "question" (a text)',
        read=_json_lines,
        turns=_question,
        id_key=None,
        category="gsm8k",
    ),
    "humaneval": Suite(
        file='JSONL, also .gz, with "task_id" and "prompt"',
        record='an object with "task_id" and "prompt" (the beginning of a function)',
        read=_json_lines,
        turns=_function,
        id_key="task_id",
        category="humaneval",
    ),
    "speed-bench": Suite(
        file='parquet with "question_id", "category" and "turns"',
        record=f"a record with {_CONVERSATION}",
        read=_parquet,
        turns=_speed_bench,
        id_key="question_id",
    ),
    "sharegpt": Suite(
        file='a JSON array, or JSONL, with "id" and "conversations"',
        record='an object with "id" and "conversations" (objects with "from" and "value")',
        read=_json_array_or_lines,
        turns=_shared_chat,
        id_key="id",
        category="sharegpt",
    ),
}
"""By the name that `paceline bench --suite` takes."""
