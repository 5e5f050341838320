"""Training the output layer of whole words: which words, which labels, and nothing else moves."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from paceline.errors import InvalidArgument
from paceline.models.llama import LlamaRunner
from paceline.numerics import digest_files
from paceline.together.words import WordHead
from paceline.train import words as recipe
from paceline.train.data import TrainingText
from paceline.train.words import (
    WordTask,
    frequent_words,
    label_words,
    new_head,
    read_places,
    train_words,
)
from tests.train.test_kinds import batch


def test_words_are_those_that_save_most_steps() -> None:
    rows = [[7, 1, 2, 3, 4, 8, 1, 2, 3, 4, 9], [5, 6, 9, 5, 6, 8, 5, 6, 1, 2]]
    # (1, 2, 3, 4) saves three steps twice, (5, 6) one three times; all parts of the former nothing.
    assert frequent_words(rows, 9) == [(1, 2, 3, 4), (5, 6)]
    assert frequent_words(rows, 1) == [(1, 2, 3, 4)]
    assert frequent_words([[1, 2, 3, 4]], 9) == []  # nothing is there twice


def test_a_label_is_the_longest_word_that_begins_there() -> None:
    words = [(1, 2), (1, 2, 3), (2, 3)]
    assert label_words([9, 1, 2, 3, 1, 2], words).tolist() == [1, 2, -1, 0, -1]


def test_places_are_what_the_target_computes(random_target: Path, text: TrainingText) -> None:
    runner = LlamaRunner(random_target)
    rows = text.held_out[:2].tolist()
    places = read_places(runner, rows, [tuple(rows[0][1:4])])
    logits = runner.logits_of_hidden(places.states)
    assert torch.allclose(places.normalisers, logits.logsumexp(-1), atol=1e-4)
    assert torch.allclose(places.best, logits.max(-1).values, atol=1e-4)
    assert places.labels[0] == 0 and len(places.labels) == 2 * text.length


def test_the_loss_is_over_tokens_and_words_together(
    random_target: Path, text: TrainingText
) -> None:
    runner = LlamaRunner(random_target)
    rows = text.held_out[:2].tolist()
    words = [tuple(rows[0][1:4]), tuple(rows[0][6:8])]
    places = read_places(runner, rows, words)
    head = new_head(words, runner, "")
    # A word begins as likely as its first token is.
    logits = runner.logits_of_hidden(places.states)
    firsts = logits[:, [word[0] for word in words]]
    assert torch.allclose(head(places.states), firsts, atol=1e-4)
    task = WordTask(head, places, places, {})
    both = torch.cat([logits, firsts], 1).log_softmax(-1)
    expected = 0.0
    for row, label in ((0, 0), (5, 1)):
        assert places.labels[row] == label
        expected -= float(both[row, logits.shape[1] + label]) / 2
    assert float(task.loss(batch([0, 5])).detach()) == pytest.approx(expected, rel=1e-4)
    other = int((places.labels < 0).nonzero()[0])
    left = math.log(1 - float(both[other, logits.shape[1] :].exp().sum()))
    assert float(task.loss(batch([other])).detach()) == pytest.approx(-left, rel=1e-3, abs=1e-5)


def logits_of(runner: LlamaRunner, text: TrainingText) -> torch.Tensor:
    """Of a held-out row: all weights of the target take part."""
    states = read_places(runner, text.held_out[:1].tolist(), []).states
    return runner.logits_of_hidden(states)


@pytest.mark.slow
def test_training_moves_the_head_alone_and_goes_on_after_a_stop(
    random_target: Path, text: TrainingText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, weights = LlamaRunner(random_target), sorted(random_target.glob("*.safetensors"))
    before, logits = digest_files(weights), logits_of(runner, text)
    options = {"count": 12, "num_rows": 40, "steps": 150}
    whole = train_words(runner, random_target, text, tmp_path / "whole", **options)
    assert whole["words"] == 12
    history = json.loads((tmp_path / "whole" / "training" / "words" / "history.json").read_text())
    (_, first), *_, (_, last) = history["evaluations"]
    assert last["negative_loss"] > 0.8 * first["negative_loss"]  # a loss is below zero
    assert last["found"] > first["found"] or last["invented"] < first["invented"]
    assert digest_files(weights) == before and torch.equal(logits_of(runner, text), logits)
    assert WordHead.load(tmp_path / "whole" / "words.safetensors").target == before
    steps: list[int] = []
    loss = WordTask.loss

    def stop(task: WordTask, given: object) -> torch.Tensor:
        steps.append(1)
        if len(steps) == 117:
            raise KeyboardInterrupt
        return loss(task, given)  # type: ignore[arg-type]

    monkeypatch.setattr(WordTask, "loss", stop)
    monkeypatch.setattr(recipe, "CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        train_words(runner, random_target, text, tmp_path / "cut", **options)
    train_words(runner, random_target, text, tmp_path / "cut", **options)
    assert len(steps) == 117 + 150 - 116
    head, cut = (WordHead.load(tmp_path / name / "words.safetensors") for name in ("whole", "cut"))
    assert cut.words == head.words
    for name, value in cut.state_dict().items():
        assert torch.equal(value, head.state_dict()[name])
    with pytest.raises(InvalidArgument, match="words of several tokens"):
        train_words(runner, random_target, text, tmp_path / "none", count=0)
