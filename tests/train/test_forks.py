"""Answers that are trees, as rows to train on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from paceline.demo import FORKS_DIR
from paceline.loading import load_engine
from paceline.tokenizer import load_tokenizer
from paceline.train import forks
from paceline.train.forks import (
    CHILD,
    FACTS,
    FORK,
    Part,
    TreeText,
    answer_about,
    in_one_piece,
    is_held_out,
    prompt_about,
    some_names,
)

ANSWER = (Part("a", (Part("b", (Part("c"),)), Part("d"))), Part("e", (Part("f"),)), Part("g"))


@pytest.fixture(scope="module")
def text() -> TreeText:
    return TreeText()


def test_an_answer_reads_with_each_branch_behind_its_fork() -> None:
    assert in_one_piece(ANSWER) == "abcdefg"
    assert in_one_piece(answer_about(["pike"])) == (
        "- the pike is a fish. It eats smaller fish that swim past the reeds, and it lives in slow "
        "rivers and cold lakes."
    )


def test_a_branch_has_its_ancestors_above_and_no_sibling(text: TreeText) -> None:
    rows = {}
    for ids, first in text.branches(text.encode("P"), ANSWER):
        shown = text.tokenizer.decode(ids).replace(FORK, "<").replace(CHILD, ">")
        above = text.tokenizer.decode(ids[:first]).replace(FORK, "<").replace(CHILD, ">")
        rows[shown.removesuffix("<|endoftext|>")] = above
    assert rows == {"Pa<e<g": "P", "Pa<>b<d": "Pa<>", "Pa<>b<>c": "Pa<>b<>", "Pa<e<>f": "Pa<e<>"}


def test_only_a_branchs_own_tokens_have_loss(text: TreeText) -> None:
    tokens, labels = text.batch(random.Random(0), 12)
    assert labels.shape == (12, tokens.shape[1] - 1)
    for seed, ids, wanted in zip(_rows(text), tokens.tolist(), labels.tolist(), strict=True):
        row, first = seed
        own = [label for label in wanted if label != -100]
        assert own == row[first:] == ids[first : len(row)]
        assert wanted[: first - 1] == [-100] * (first - 1)
        assert own[-1] == text.end
        assert text.child not in own, "it is given, not predicted"


def _rows(text: TreeText) -> list[tuple[list[int], int]]:
    rng = random.Random(0)
    return [text.row(rng) for _ in range(12)]


def test_held_out_lists_are_not_trained_on(text: TreeText) -> None:
    rng = random.Random(3)
    for held_out in (True, False):
        names = some_names(rng, held_out)
        assert is_held_out(names) == held_out
        assert 3 <= len(set(names)) <= 5
    for ids, _ in (text.row(rng) for _ in range(50)):
        line = text.tokenizer.decode(ids).splitlines()[0]
        assert not is_held_out(line.removesuffix(":").removesuffix(" in one piece").split(", "))


def test_the_shipped_tokenizer_is_that_of_the_recipe(text: TreeText) -> None:
    assert load_tokenizer(FORKS_DIR).vocabulary() == text.tokenizer.get_vocab()
    assert len(FACTS) == 24
    assert text.tokenizer.decode(text.encode(prompt_about(["owl"]))) == "owl:\n"


def test_the_recipe_writes_a_model_that_loads_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    forks.train(tmp_path, 2, batch=2)
    assert (tmp_path / "checkpoint.pt").exists()
    forks.train(tmp_path, 3, batch=2)
    engine = load_engine(tmp_path / "model")
    assert engine.tokenizer is not None
    assert engine.tokenizer.encode(FORK + CHILD, False) == [768, 769]
