"""Tokenizers, decoding piece by piece, and sampling parameters as values."""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.errors import ModelNotFound, TokenizerMismatch
from paceline.loading import load_drafter
from paceline.sampling import (
    SamplingParams,
    coupled_sample,
    probabilities,
    process_logits,
    scaled_scores,
)
from paceline.tokenizer import (
    IncrementalDecoder,
    Tokenizer,
    check_same_tokenizer,
    eos_token_ids,
    load_tokenizer,
)
from tests.modelzoo import END_OF_TEXT_ID, make_model

texts = st.text(max_size=60) | st.text(
    st.sampled_from("aé€😀 \n\t\u200d\u0301👩🏽\ufffd中x"), max_size=60
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TARGET_DIR)


@pytest.fixture(scope="module")
def byte_tokenizer(tiny_folder: Path) -> Tokenizer:
    return load_tokenizer(tiny_folder)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


@settings(max_examples=150)
@given(texts)
def test_pieces_are_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(pieces(tokenizer, ids)) == text


@settings(max_examples=150)
@given(texts)
def test_a_character_split_over_tokens_comes_in_one_piece(
    byte_tokenizer: Tokenizer, text: str
) -> None:
    """Every byte is a token: no piece may hold half a character."""
    ids = byte_tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    parts = pieces(byte_tokenizer, ids)
    assert "".join(parts) == text
    shown = ""
    for part in parts:
        shown += part
        assert text.startswith(shown)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 257), max_size=60))
def test_pieces_of_arbitrary_bytes(byte_tokenizer: Tokenizer, ids: list[int]) -> None:
    """A model may write bytes that are no text: what is shown is still what decode shows."""
    assert "".join(pieces(byte_tokenizer, ids)) == byte_tokenizer.decode(ids)


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_pieces_of_arbitrary_tokens(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(60))]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_decoder_starts_over(tokenizer: Tokenizer) -> None:
    decoder = IncrementalDecoder(tokenizer)
    for text in ("first €", "second 😀"):
        decoder.reset()
        assert "".join(map(decoder.push, tokenizer.encode(text))) + decoder.flush() == text


# --- folders -------------------------------------------------------------------------------------


def test_the_demo_pair_shares_its_tokenizer(tokenizer: Tokenizer) -> None:
    check_same_tokenizer(tokenizer, load_tokenizer(DRAFTER_DIR))


def test_a_mismatch_names_the_entries(
    tokenizer: Tokenizer, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(TokenizerMismatch) as info:
        check_same_tokenizer(tokenizer, byte_tokenizer)
    assert "..." in str(info.value)
    # Two entries that changed places: exactly these are named.
    folder = Path(shutil.copytree(DRAFTER_DIR, tmp_path / "drafter"))
    data = json.loads((folder / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    first, second = (next(t for t, i in vocab.items() if i == number) for number in (1000, 2000))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(TokenizerMismatch) as info:
        check_same_tokenizer(tokenizer, load_tokenizer(folder))
    message = str(info.value)
    assert f"2 of {tokenizer.vocab_size} entries differ" in message
    assert f"{first!r} (target 1000, drafter 2000)" in message
    assert f"{second!r} (target 2000, drafter 1000)" in message
    with pytest.raises(TokenizerMismatch):
        load_drafter(folder, TARGET_DIR)


def test_missing_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_end_of_text_ids(zoo: Path, tmp_path: Path) -> None:
    assert eos_token_ids(make_model("llama", zoo)) == (END_OF_TEXT_ID,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert eos_token_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert eos_token_ids(tmp_path) == (5, 6)
    (tmp_path / "generation_config.json").write_text("{}")
    assert eos_token_ids(tmp_path) == (7,), "a file that says nothing decides nothing"
    assert eos_token_ids(tmp_path / "nothing") == ()


# --- sampling parameters -------------------------------------------------------------------------

parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.integers(0, 20),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 1.0),
    repetition_penalty=st.floats(0.5, 2.0),
    logit_bias=st.dictionaries(st.integers(0, 15), st.floats(-5, 5), max_size=3),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2),
    stop_token_ids=st.lists(st.integers(0, 15), max_size=2),
    seed=st.integers(0, 2**63 - 1),
    max_tokens=st.integers(10, 99),
    min_tokens=st.integers(0, 9),
    ignore_eos=st.booleans(),
    skip_special_tokens=st.booleans(),
    include_stop_str_in_output=st.booleans(),
)


@given(parameters)
def test_parameters_round_trip(params: SamplingParams) -> None:
    assert SamplingParams(**params.as_dict()) == params
    default = SamplingParams()
    assert all(params.as_dict()[n] != getattr(default, n) for n in params.as_dict())
    assert default.as_dict() == {}
    assert {f.name for f in fields(params)} >= params.as_dict().keys()


rows = st.lists(st.floats(-20, 20, width=32), min_size=16, max_size=16)


@given(rows, parameters, st.lists(st.integers(0, 15), max_size=8))
def test_processing_follows_its_definition(
    row: list[float], params: SamplingParams, history: list[int]
) -> None:
    logits = np.array(row, np.float32)
    before = logits.copy()
    processed = process_logits(logits, params, history)
    np.testing.assert_array_equal(logits, before)
    for token in range(16):
        value = float(logits[token])
        if token in history:
            value = (
                value / params.repetition_penalty
                if value > 0
                else (value * params.repetition_penalty)
            )
        value += params.logit_bias.get(token, 0.0)
        assert processed[token] == pytest.approx(value, rel=1e-5, abs=1e-5)


@given(rows, parameters)
def test_truncation_keeps_what_it_says(row: list[float], params: SamplingParams) -> None:
    if params.temperature == 0:
        params = replace(params, temperature=1.0)
    logits = np.array(row, np.float32)
    plain = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    plain /= plain.sum()
    for only in (
        replace(params, top_k=0, min_p=0.0),
        replace(params, top_p=1.0, min_p=0.0),
        replace(params, top_k=0, top_p=1.0),
    ):
        kept = np.isfinite(scaled_scores(logits, only))
        assert kept[logits.argmax()]
        if kept.all():
            continue
        assert plain[~kept].max() <= plain[kept].min() + 1e-15  # the most likely ones stay
        if only.top_k:
            assert kept.sum() >= only.top_k
        if only.top_p < 1.0 and len(set(row)) == 16:
            assert plain[kept].sum() >= only.top_p - 1e-9
            assert plain[kept].sum() - plain[kept].min() < only.top_p + 1e-9
        if only.min_p > 0.0:
            assert (plain[kept] >= only.min_p * plain.max() * (1 - 1e-9)).all()
            assert (plain[~kept] < only.min_p * plain.max() * (1 + 1e-9)).all()
    law = probabilities(logits, params)
    assert law.sum() == pytest.approx(1.0)
    token = coupled_sample(logits, params, 3)
    assert law[token] > 0


@given(rows, st.integers(0, 2**40))
def test_a_low_temperature_is_nearly_argmax(row: list[float], seed: int) -> None:
    logits = np.array(row, np.float32)
    gap = np.sort(logits)[-1] - np.sort(logits)[-2]
    token = coupled_sample(logits, SamplingParams(temperature=1e-4, seed=seed), 5)
    if gap > 0.02:  # 200 times the temperature
        assert token == int(logits.argmax())
    assert logits[token] > logits.max() - 0.02
    assert not math.isnan(probabilities(logits, SamplingParams(temperature=1e-4)).sum())
