"""Text files as rows of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.errors import InvalidArgument
from paceline.tokenizer import eos_token_ids, load_tokenizer
from paceline.train.data import load_text


def test_rows_are_the_text_in_pieces(random_target: Path, text_file: Path) -> None:
    text = load_text(random_target, [text_file], 32, held_out_rows=1000)
    assert text.length == 32
    assert text.training.dtype == text.held_out.dtype == torch.int64
    assert torch.equal(text.training[:-1, -1], text.training[1:, 0]), "a label, then the next input"
    tokenizer = load_tokenizer(random_target)
    (eos,) = eos_token_ids(random_target)
    whole = text_file.read_text()
    for rows in (text.training, text.held_out):
        flat = [*rows[:, :-1].flatten().tolist(), int(rows[-1, -1])]
        documents = np.split(flat, np.flatnonzero(np.array(flat) == eos))
        for document in documents:
            if len(document):
                assert tokenizer.decode(document.tolist()).rstrip() in whole


def test_no_held_out_text_is_trained_on(random_target: Path, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    records = [{"text": f"record number {i}, which says {i * 7919}"} for i in range(300)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    text = load_text(random_target, [file], 16, held_out_rows=1000)
    tokenizer = load_tokenizer(random_target)
    seen = tokenizer.decode(text.training[:, :-1].flatten().tolist())
    test = tokenizer.decode(text.held_out[:, :-1].flatten().tolist())
    found = [{i for i in range(300) if f"record number {i}," in words} for words in (seen, test)]
    assert not found[0] & found[1]
    assert len(found[0]) > 200 and len(found[1]) > 10


def test_forms_of_records(random_target: Path, tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    lines = [
        {"text": "one\u2028line"}, {"prompt": "two", "completion": " and three"},
        {"question": "four?", "answer": "five"},
    ]  # fmt: skip
    file.write_text("".join(json.dumps(x, ensure_ascii=False) + "\n" for x in lines * 5))
    text = load_text(random_target, [file], 4, held_out_rows=1000)
    rows = torch.cat([text.training, text.held_out])[:, :-1].flatten().tolist()
    words = load_tokenizer(random_target).decode(rows)
    for expected in ("one\u2028line", "two and three", "four?\nAnswer: five"):
        assert expected in words


def test_a_row_names_its_document(random_target: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "' + "x" * 40 + '"}\n' + '{"text": "' + "y" * 40 + '"}\n')
    text = load_text(random_target, [file], 8)
    tokenizer = load_tokenizer(random_target)
    for row, source in zip(text.training, text.sources, strict=True):
        first = tokenizer.decode(row.tolist())[0]
        assert source == {"x": "a#0", "y": "a#1"}[first]
    assert text.describe(np.array([1])) == f"rows 1 ({text.sources[1]})"


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("a.csv", b"x", "ending in .txt or .jsonl"),
        ("missing.txt", None, "No such file"),
        ("bad.jsonl", b'{"text": "fine"}\n{"prompt": "?"}\n', r"bad.jsonl:2: .*\['prompt'\]"),
        ("list.jsonl", b"[1]\n", "list.jsonl:1: a record is an object"),
        ("half.jsonl", b'{"text": "a"}\n{"text', "half.jsonl:2: not JSON"),
        ("latin.txt", b"caf\xe9", "utf-8"),
        ("short.txt", b"too short", "text for at least two rows of 64 tokens"),
        ("empty.txt", b"", "text for at least two rows"),
    ],
)
def test_bad_data_is_named(
    random_target: Path, tmp_path: Path, name: str, contents: bytes | None, message: str
) -> None:
    if contents is not None:
        (tmp_path / name).write_bytes(contents)
    with pytest.raises(InvalidArgument, match=message) as caught:
        load_text(random_target, [tmp_path / name], 64)
    assert caught.value.field == "data"
    assert name in str(caught.value)
