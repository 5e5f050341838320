"""The demo pair's text: the running CPython's own standard library, plus files of your choice.

The library's source is on every machine that runs Python, so the corpus needs no download. A tenth
of the modules and a tenth of the extra records are held out from training. A hash of the module's
relative path or of the record's text chooses them, so they are the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CODE = "code"
"""The `source` of standard library documents; extra documents carry their file's stem."""

# Tests repeat themselves and are as long as the library; `_bundled` holds wheels; `encodings` is
# character tables (1.5 MB of numbers); `pydoc_data` is one generated 700 kB string literal.
_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    | {"_bundled", "encodings", "pydoc_data"}
)


@dataclass(frozen=True, slots=True)
class Document:
    """A text for training or for measurements."""

    source: str
    """`CODE`, or the stem of the extra file the record came from."""
    name: str
    """Module path relative to the standard library, or `<stem>#<record number>`."""
    text: str


def is_held_out(key: str) -> bool:
    """Whether a key is in the held-out tenth, which is the same on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 10 == 0


@cache
def _stdlib() -> tuple[Document, ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED.intersection(relative.parts[:-1]):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few files declare another encoding on purpose
        if text.strip():
            documents.append(Document(CODE, relative.as_posix(), text))
    return tuple(documents)


def held_out_modules() -> list[tuple[str, str]]:
    """The standard library modules that no demo model was trained on.

    Returns `(path relative to the standard library, source text)` sorted by path, for example
    `("json/decoder.py", "...")`. `paceline bench` cuts its prompts from these. The set follows from
    the paths alone; the text is that of the running CPython.
    """
    return [(d.name, d.text) for d in _stdlib() if is_held_out(d.name)]


def question_of(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """A record's question and its answer; None for a record that is no such pair."""
    for question, answer in (("question", "answer"), ("prompt", "completion")):
        if question in record and answer in record:
            return str(record[question]), str(record[answer])
    return None


def text_of(record: Mapping[str, Any]) -> str:
    """The text of a JSONL record.

    Raises:
        ValueError: it has no known form.
    """
    if "question" in record and "answer" in record:
        return f"Question: {record['question']}\nAnswer: {record['answer']}\n"
    if "prompt" in record and "completion" in record:
        return f"{record['prompt']}{record['completion']}"
    if "text" in record:
        return str(record["text"])
    raise ValueError(
        "a record needs 'text', 'prompt' and 'completion', or 'question' and 'answer'; it has "
        f"{sorted(record)}"
    )


def read_extra(path: Path) -> list[Document]:
    """Read one `--extra-corpus` file.

    Each line of a `.jsonl` is a record with `text`, `prompt` and `completion`, or `question` and
    `answer`. Any other file is a plain text, which is cut at blank lines into records of at least
    2,000 characters.

    Raises:
        ValueError: a jsonl record has none of these forms; the message names file and line.
    """
    raw = path.read_text(encoding="utf-8")
    texts: list[str] = []
    if path.suffix == ".jsonl":
        for number, line in enumerate(raw.split("\n"), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}:{number}: a record is an object, not {line[:40]}")
            try:
                texts.append(text_of(record))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    else:
        piece = ""
        for paragraph in raw.split("\n\n"):
            piece += paragraph + "\n\n"
            if len(piece) >= 2000:
                texts.append(piece)
                piece = ""
        if piece.strip():
            texts.append(piece)
    return [Document(path.stem, f"{path.stem}#{i}", text) for i, text in enumerate(texts)]


def split(extra: Iterable[Path] = ()) -> tuple[list[Document], list[Document]]:
    """The whole corpus as `(training, held_out)` documents, in a fixed order."""
    training: list[Document] = []
    held_out: list[Document] = []
    for document in _stdlib():
        (held_out if is_held_out(document.name) else training).append(document)
    for path in extra:
        for document in read_extra(path):
            (held_out if is_held_out(document.text) else training).append(document)
    return training, held_out
