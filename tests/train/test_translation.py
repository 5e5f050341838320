"""The made text pair, and how the drafter that fills blocks learns from it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from paceline.demo import TRANSLATION_DIR
from paceline.loading import load_engine
from paceline.tokenizer import load_tokenizer
from paceline.train import translation
from paceline.train.conversations import GERMAN
from paceline.train.translation import (
    BLOCK,
    ENGLISH,
    Glancing,
    Pairs,
    german,
    is_held_out,
    new_translator,
    some_sentence,
    some_text,
    translations,
)


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    return Pairs()


def test_every_part_has_one_or_two_translations() -> None:
    for parts, english in zip(GERMAN, ENGLISH, strict=True):
        assert len(parts) == len(english)
        assert {len(each.split("|")) for each in english} <= {1, 2}
    assert german((0, 0, 1)) == (
        "Die Regierung hat am Montag einen Plan vorgestellt, weil das Wetter so schlecht war."
    )
    assert translations((0, 0, 1)) == [
        "The government presented a plan on Monday, because the weather was so bad.",
        "The government introduced a plan on Monday, because the weather was so bad.",
    ]


def test_held_out_sentences_are_not_trained_on(pairs: Pairs) -> None:
    rng = random.Random(3)
    assert all(is_held_out(some_sentence(rng, held_out=True)) for _ in range(50))
    assert not any(is_held_out(choice) for _ in range(50) for choice in some_text(rng, False))


def test_rows_are_sources_and_right_translations_with_an_end(pairs: Pairs) -> None:
    sources, targets = pairs.batch(random.Random(0), 8)
    rng = random.Random(0)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        text = some_text(rng, held_out=False)
        for choice in text:
            rng.choice(translations(choice))
        ids = pairs.encode(" ".join(map(german, text)))
        assert source == [*ids, *[pairs.start] * (len(source) - len(ids))]
        written = target[: target.index(pairs.end)]
        found = pairs.tokenizer.decode(written)
        assert any(found.startswith(each) for each in translations(text[0]))
        assert set(target[len(written) + 1 :]) <= {pairs.start}


class Watched(Glancing):
    """Keeps what the model was given."""

    def logits(
        self, sources: torch.Tensor, states: object, tokens: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        self.seen.append((tokens.clone(), lengths))
        return super().logits(sources, states, tokens, lengths)

    seen: list[tuple[torch.Tensor, torch.Tensor]]


def test_a_block_is_masked_and_half_of_its_errors_are_shown(pairs: Pairs) -> None:
    torch.manual_seed(0)
    glancing = Watched(pairs, new_translator(pairs, 1).float())
    glancing.seen = []
    sources, targets = pairs.batch(random.Random(1), 32)
    glancing.loss(random.Random(2), sources, targets)
    (first, lengths), (second, _) = glancing.seen
    assert (first[:, 0] == pairs.start).all()
    shown = hidden = 0
    for row, again, length, target in zip(first, second, lengths, targets, strict=True):
        begin = int(length) - BLOCK - 1  # tokens that are written already
        assert row[1 : begin + 1].tolist() == target[:begin].tolist()
        assert row[begin + 1 : length].eq(pairs.mask).all()
        size = int((target != pairs.start).sum())
        block = again[begin + 1 : min(int(length), size + 1)]
        is_shown = block != pairs.mask
        assert block[is_shown].tolist() == target[begin : begin + len(block)][is_shown].tolist()
        shown, hidden = shown + int(is_shown.sum()), hidden + int((~is_shown).sum())
    assert 0.4 < shown / (shown + hidden) < 0.6, "an untrained model gets nearly all wrong"


def test_what_a_block_does_not_see_has_no_part_in_it(pairs: Pairs) -> None:
    """A position sees up to its block's end, and nothing of the padding behind."""
    torch.manual_seed(0)
    glancing = Glancing(pairs, new_translator(pairs, 1).float())
    sources = torch.tensor([pairs.encode("Mein Bruder")])
    states = glancing.model.get_encoder()(sources)
    tokens, changed = (torch.tensor([[pairs.start, 300, pairs.mask, x, y]])
                       for x, y in ((pairs.mask, 310), (320, 330)))  # fmt: skip
    length = torch.tensor([4])
    with torch.no_grad():
        one = glancing.logits(sources, states, tokens, length)[:, 2]
        inside = glancing.logits(sources, states, changed, length)[:, 2]
        changed[0, 3] = pairs.mask
        outside = glancing.logits(sources, states, changed, length)[:, 2]
    torch.testing.assert_close(one, outside)
    assert not torch.allclose(one, inside, atol=1e-4)


def test_the_recipe_writes_a_pair_that_loads_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    translation.train(tmp_path, 2, batch=2)
    engine = load_engine(tmp_path / "target", tmp_path / "drafter")
    assert "non_autoregressive" in engine.drafters
    assert (
        load_tokenizer(tmp_path / "drafter").vocabulary()
        == load_tokenizer(TRANSLATION_DIR / "drafter").vocabulary()
    )
    weights = (tmp_path / "drafter" / "model.safetensors").read_bytes()
    translation.train(tmp_path, 2, batch=2)
    assert "resumed at step 2" in capsys.readouterr().out
    assert (tmp_path / "drafter" / "model.safetensors").read_bytes() == weights
