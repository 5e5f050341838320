"""What a model is asked in its conversations with itself, and how they are kept."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import InvalidArgument
from paceline.train import conversations
from paceline.train.chat_head import read_talks
from paceline.train.conversations import (
    BEGIN,
    END,
    KINDS,
    MAX_GIVEN,
    PASSAGE,
    QUESTION_TOKENS,
    Conversation,
    Dialogues,
    write_conversations,
)
from paceline.train.smollm2 import CHAINS, Report, make, model_card


class Letters:
    """A tokenizer with a token for each character, and one for each of the chat's own two."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text.replace(BEGIN, "\x01").replace(END, "\x02")]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids)).replace("\x01", BEGIN).replace("\x02", END)


LETTERS: Any = Letters()


def dialogues(
    monkeypatch: pytest.MonkeyPatch, seed: int = 0, texts: Sequence[str] = ()
) -> Dialogues:
    monkeypatch.setattr(conversations, "documentation", lambda: (["A text."], ["def f(): ..."]))
    return Dialogues(LETTERS, ["How many?"], texts, seed=seed, answer_tokens=70)


def test_every_kind_begins_as_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    made = dialogues(monkeypatch)
    talks = [made.begin() for _ in range(400)]
    assert {talk.kind for talk in talks} == set(KINDS)
    for talk in talks:
        text = LETTERS.decode(talk.tokens)
        asks = talk.kind in ("own", "article", "passages")
        assert text.endswith(f"{END}\n{BEGIN}assistant\n") != asks
        assert talk.answering != asks
        assert talk.max_tokens == (QUESTION_TOKENS if asks else 70)
        assert f"{BEGIN}user\n" in text
        if asks:
            assert talk.temperature == 1.0  # questions must differ
    shares = {kind: sum(t.kind == kind for t in talks) / len(talks) for kind in KINDS}
    assert shares == pytest.approx(KINDS, abs=0.08)
    greedy = [talk.temperature == 0 for talk in talks if talk.answering]
    assert np.mean(greedy) == pytest.approx(0.6, abs=0.1)


def test_questions_about_texts_from_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most questions about texts and passages are about those, and passages are short."""
    texts = ["alpha " * 300, "beta " * 40]
    made = dialogues(monkeypatch, texts=texts)
    found = {"text": 0, "passages": 0}
    for _ in range(300):
        talk = made.begin()
        said = LETTERS.decode(talk.tokens)
        if talk.kind in found and ("alpha alpha" in said or "beta beta" in said):
            found[talk.kind] += 1
            most = PASSAGE + 6 if talk.kind == "passages" else MAX_GIVEN
            assert max(len(run) for run in re.findall("(?:alpha ?)*", said)) <= most
        elif talk.kind not in found:
            assert "alpha" not in said
    assert min(found.values()) > 20


def test_quotes_are_sentences_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [" ".join(f"{name} has sentence number {n} here." for n in range(9)) for name in "ABC"]
    made = dialogues(monkeypatch, texts=texts)
    sizes = set()
    for _ in range(100):
        talk = made.quote()
        question, answer = LETTERS.decode(talk.tokens).split(f"{END}\n{BEGIN}assistant\n")
        assert answer.endswith(END)
        size = len(LETTERS.encode(answer))
        assert talk.positions == list(range(len(talk.tokens) - size, len(talk.tokens)))
        whole = re.findall("[ABC] has sentence number . here.", answer)
        assert all(each in question for each in whole)
        sizes.add(len(whole))
    assert max(sizes) > 1
    short = dialogues(monkeypatch, texts=["Too short. To cut."])
    assert "Too short. To cut." in LETTERS.decode(short.quote().tokens)


def test_quotes_need_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.train.smollm2.converse", lambda *_, **__: iter(()))
    with pytest.raises(InvalidArgument, match="quotes: got 5, expected 0 without texts"):
        make(tmp_path, tmp_path / "work", model="demo", tokens=0, quotes=5)


def test_a_turn_goes_on_ends_or_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    made, end = dialogues(monkeypatch), LETTERS.encode(END)
    talk = next(t for t in iter(made.begin, None) if t.kind == "own")
    talk.turns = 2
    before = len(talk.tokens)
    assert made.hear(talk, LETTERS.encode("ly?") + end) == "more"
    assert talk.answering
    assert LETTERS.decode(talk.tokens[before:]) == f"ly?{END}\n{BEGIN}assistant\n"
    first = len(talk.tokens)
    answer = LETTERS.encode("Yes, " * 15) + end
    assert made.hear(talk, answer) == "more"
    assert talk.positions == list(range(first, first + len(answer)))
    assert LETTERS.decode(talk.tokens).endswith(f"{END}\n{BEGIN}user\n")
    assert not talk.answering
    # A long answer is a text that later questions are about.
    assert any("Yes, Yes" in LETTERS.decode(made.begin().tokens) for _ in range(200))
    assert made.hear(talk, LETTERS.encode("But why")) == "dropped"  # it has no end
    other = next(t for t in iter(made.begin, None) if t.answering and t.turns == 0)
    assert made.hear(other, LETTERS.encode("No.") + end) == "done"
    unfinished = next(t for t in iter(made.begin, None) if t.answering)
    assert made.hear(unfinished, LETTERS.encode("N" * 70)) == "done"


def test_conversations_are_kept_until_there_are_enough(tmp_path: Path) -> None:
    """Two runs, the second of which goes on; without likeliest tokens there are none to read."""

    def talks(first: int) -> Iterator[Conversation]:
        for start in itertools.count(first):
            tokens = list(range(start, start + 30))
            yield Conversation("", "own", tokens, list(range(10, 30)))

    write_conversations(talks(0), tmp_path, tokens=100, shard_size=2)
    assert sorted(file.name for file in tmp_path.glob("*.npz")) == [
        "00000.npz", "00001.npz", "00002.npz",
    ]  # fmt: skip
    write_conversations(talks(50), tmp_path, tokens=140, shard_size=2)
    training, held_out = read_talks([tmp_path], 25, None)
    found = training + held_out
    assert sorted(int(talk.tokens[0]) for talk in found) == [0, 1, 2, 3, 4, 50, 51]
    assert {len(talk.tokens) for talk in found} == {25}
    assert {tuple(talk.positions) for talk in found} == {tuple(range(10, 25))}
    assert {talk.top_ids.shape for talk in found} == {(15, 0)}
    assert all(talk.features is None for talk in found)


def test_the_card_says_what_was_measured() -> None:
    row = {"accepted_length": 2.5, "agreement": [0.7, 0.6, 0.5, 0.4, 0.3], "tokens": 1234}
    report = Report(
        kind="eagle3", parameters=5_200_000, size=5_300_000, steps=10, tokens=2_000_000,
        seconds=90.0, device="a processor", measured={"all": row},
    )  # fmt: skip
    card = model_card(report, CHAINS, {"own": 3, "text": 1}, 777, ["sums"])
    assert "5.2 million, 5.3 MB" in card
    assert "10 steps, 2.0 million tokens, 1.5 minutes on a processor, over" in card
    assert "4 conversations with 777 tokens of answers" in card
    assert "16,384 of the target's tokens" in card
    assert "own 75%, text 25%" in card
    assert "Files: sums." in card
    assert "| all | 2.50 | 0.700 | 0.600 | 0.500 | 0.400 | 0.300 | 1,234 |" in card
    assert "went on" not in card
    again = replace(report, before=["- Training: once."])
    card = model_card(again, CHAINS, {"quote": 1}, 1, [])
    assert "- Training: once.\n- Training: 10 steps" in card
    assert "It went on" in card
