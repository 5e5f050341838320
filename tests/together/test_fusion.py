"""Generative Fusion Decoding: sums over spellings, and models fused byte by byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import InvalidArgument
from paceline.models.llama import LlamaRunner
from paceline.together.fusion import END, ByteModel, fuse, fused_scores
from paceline.together.reader import Reader
from paceline.tokenizer import load_tokenizer
from tests.modelzoo import END_OF_TEXT_ID, make_model

PIECES = (b"a", b"b", b"ab", b"ba", b"aab", b"bb", b"", b"abab")
STOP = 6
PROMPT = "aab"


class Pieces:
    """A tokenizer of eight pieces, which reads a prompt letter by letter."""

    vocab_size = len(PIECES)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ["ab".index(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(PIECES[token] for token in token_ids).decode()

    def vocabulary(self) -> dict[str, int]:
        return {piece.decode(): i for i, piece in enumerate(PIECES)}

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]

    def to_json(self) -> str | None:
        return None


@pytest.fixture(scope="module")
def pieces(zoo: Path) -> LlamaRunner:
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), STOP)
    sizes: dict[str, Any] = {"vocab_size": len(PIECES), "num_hidden_layers": 2, **special}
    return LlamaRunner(make_model("llama", zoo, **sizes))


@pytest.fixture(scope="module")
def byte_models(zoo: Path) -> tuple[LlamaRunner, LlamaRunner]:
    first, second = (make_model("llama", zoo, seed=seed, num_hidden_layers=2) for seed in (0, 1))
    return LlamaRunner(first), LlamaRunner(second)


def started(runner: LlamaRunner, beam: int = 0) -> ByteModel:
    model = ByteModel(runner, Pieces(), frozenset({STOP}), beam)
    model.start(PROMPT, 32)
    return model


def every_spelling(runner: LlamaRunner, text: bytes) -> float:
    """Probability that a text begins with these bytes, by enumeration of its spellings."""
    prompt = Pieces().encode(PROMPT)

    @cache
    def following(tokens: tuple[int, ...]) -> list[float]:
        reader = Reader(runner)
        probs = reader.logits([*prompt, *tokens]).double().softmax(-1).tolist()
        reader.close()
        return list(probs)

    def rest(tokens: tuple[int, ...], left: bytes) -> float:
        if not left:
            return 1.0
        total = 0.0
        for token, piece in enumerate(PIECES):
            chance = following(tokens)[token]
            if piece.startswith(left):
                total += chance
            elif piece and left.startswith(piece):
                total += chance * rest((*tokens, token), left[len(piece) :])
        return total

    return rest((), text)


@pytest.mark.parametrize("text", [b"a", b"ab", b"aba", b"aabab", b"bbab", b"abababb"])
def test_a_beginnings_probability_is_the_sum_over_its_spellings(
    pieces: LlamaRunner, text: bytes
) -> None:
    model = started(pieces)
    for byte in text:
        model.push(byte)
    expected = every_spelling(pieces, text)
    assert math.exp(model.log_probability) == pytest.approx(expected, rel=1e-5)
    assert model.lost == 0.0
    model.close()
    assert pieces.num_free == pieces.kv_capacity


def test_the_next_bytes_are_ratios_of_such_sums(pieces: LlamaRunner) -> None:
    model = started(pieces)
    for byte in b"ab":
        model.push(byte)
    probs = model.next_byte()
    before = every_spelling(pieces, b"ab")
    for byte in b"ab":
        ratio = every_spelling(pieces, b"ab" + bytes([byte])) / before
        assert probs[byte] == pytest.approx(ratio, rel=1e-5)
    assert probs.sum() == pytest.approx(1.0), "bytes and the end are all there is"
    assert 0.0 < probs[END] < 1.0
    model.close()


def test_a_beam_forgets_what_it_says(pieces: LlamaRunner) -> None:
    whole, narrow = started(pieces), started(pieces, beam=1)
    for byte in b"abab":
        whole.push(byte)
        narrow.push(byte)
    assert 0.0 < narrow.lost < 1.0
    assert narrow.num_forwards <= whole.num_forwards == 5, "all spellings share a forward"
    assert narrow.next_byte().sum() == pytest.approx(1.0)
    assert abs(narrow.next_byte() - whole.next_byte()).max() > 1e-4
    whole.close()
    narrow.close()


def test_models_of_single_bytes_are_fused_log_linearly(
    byte_models: tuple[LlamaRunner, LlamaRunner], zoo: Path
) -> None:
    """Token by token, as the models' own distributions say."""
    tokenizer = load_tokenizer(make_model("llama", zoo, num_hidden_layers=2))
    stops = frozenset({END_OF_TEXT_ID})
    weights = (0.6, 0.4)
    models = [ByteModel(runner, tokenizer, stops) for runner in byte_models]
    found = fuse(models, weights, "Hello", 12)
    text = tokenizer.encode("Hello")
    token_of = {tokenizer.token_bytes(token): token for token in range(256)}
    likelihoods = [0.0, 0.0]
    for byte in found.data:
        scores = np.zeros(256)
        rows = []
        for runner, weight in zip(byte_models, weights, strict=True):
            reader = Reader(runner)
            rows.append(reader.logits(text).double().log_softmax(-1).numpy())
            reader.close()
            scores += weight * np.array([rows[-1][token_of[bytes([b])]] for b in range(256)])
        assert int(scores.argmax()) == byte
        text.append(token_of[bytes([byte])])
        likelihoods = [sum_ + row[text[-1]] for sum_, row in zip(likelihoods, rows, strict=True)]
    assert len(found.data) == 12
    assert found.log_probabilities == pytest.approx(likelihoods, abs=1e-4)
    for model in models:
        model.close()


def test_a_weight_of_0_has_no_say(
    pieces: LlamaRunner, byte_models: tuple[LlamaRunner, LlamaRunner], zoo: Path
) -> None:
    """And models of different vocabularies write together, differently from each alone."""
    tokenizer = load_tokenizer(make_model("llama", zoo, num_hidden_layers=2))
    texts = {}
    for weights in ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5)):
        models = [ByteModel(pieces, Pieces(), frozenset({STOP})),
                  ByteModel(byte_models[0], tokenizer, frozenset({END_OF_TEXT_ID}))]  # fmt: skip
        texts[weights] = fuse(models, weights, PROMPT, 8)
        for model in models:
            model.close()
    alone = ByteModel(pieces, Pieces(), frozenset({STOP}))
    assert fuse([alone], [1.0], PROMPT, 8).data == texts[1.0, 0.0].data
    alone.close()
    mixed = texts[0.5, 0.5].data
    assert set(mixed) <= set(b"ab"), "what one model cannot spell is not written"
    assert not set(texts[0.0, 1.0].data) <= set(b"ab")


def test_fused_scores_by_hand() -> None:
    first, second = np.zeros(257), np.zeros(257)
    first[[97, 98, END]] = 0.5, 0.3, 0.2
    second[[97, 98, END]] = 0.1, 0.9, 0.0
    scores = fused_scores([first, second], [0.25, 0.75])
    assert scores[98] == pytest.approx(0.25 * math.log(0.3) + 0.75 * math.log(0.9))
    assert scores[END] == -math.inf
    assert fused_scores([first, second], [1.0, 0.0])[END] == pytest.approx(math.log(0.2))


def test_the_models_may_end_the_text(pieces: LlamaRunner) -> None:
    """A bias towards the stop token ends it at once."""
    model = ByteModel(pieces, Pieces(), frozenset(range(8)))
    found = fuse([model], [1.0], PROMPT, 8)
    assert (found.data, found.ended, found.text) == (b"", True, "")
    model.close()


def test_bad_input_is_named(pieces: LlamaRunner) -> None:
    model = ByteModel(pieces, Pieces())
    with pytest.raises(InvalidArgument, match=r"weights: got \[0\.5\]"):
        fuse([model], [0.5], PROMPT)
    with pytest.raises(InvalidArgument, match="weights"):
        fuse([model], [0.5, 0.5], PROMPT)
    with pytest.raises(InvalidArgument, match="prompt"):
        fuse([model], [1.0], "", 8)
    with pytest.raises(InvalidArgument, match="beam: got -1"):
        ByteModel(pieces, Pieces(), beam=-1)
    model.close()
