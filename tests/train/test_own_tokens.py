"""The recipe of the drafter with a tokenizer of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.demo import OWN_TOKENS_DIR, TARGET_DIR
from paceline.drafters.omnidraft import OmniDraft
from paceline.loading import load_engine
from paceline.sampling import SamplingParams
from paceline.tokenizer import load_tokenizer
from paceline.train import own_tokens
from paceline.train.checkpoints import all_logits, load_model


def test_the_recipe_writes_a_drafter_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    texts = [f"def number_{i}():\n    return {i}\n" * 20 for i in range(30)]
    own_tokens.train(tmp_path, 2, texts, batch=2, length=32)
    own_tokens.train(tmp_path, 3, texts, batch=2, length=32)
    drafter = tmp_path / "model"
    assert load_tokenizer(drafter).vocab_size <= own_tokens.VOCAB_SIZE
    engine = load_engine(TARGET_DIR, drafter, translate=True)
    assert isinstance(engine.drafters["omnidraft"], OmniDraft)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    plain, drafted = (
        engine.generate([[5, 6, 7]], params, SpeculationConfig(method=method, length="fixed"))[0]
        for method in ("ar", "omnidraft")
    )
    assert drafted.output_ids == plain.output_ids


@pytest.mark.slow
def test_the_recipe_learns_the_next_token(tmp_path: Path) -> None:
    text = "for name in sorted(names):\n    print(name, len(name))\n" * 200
    own_tokens.train(tmp_path, 40, [text], batch=4, length=64)
    ids = torch.tensor([load_tokenizer(tmp_path / "model").encode(text)[:60]])
    with torch.no_grad():
        best = all_logits(load_model(tmp_path / "model"), ids[:, :-1]).argmax(-1)
    assert (best == ids[:, 1:])[:, 10:].float().mean() > 0.9


def test_the_drafter_that_ships_is_small_and_has_other_tokens() -> None:
    size = (OWN_TOKENS_DIR / "model.safetensors").stat().st_size
    assert size < 600_000
    own, target = load_tokenizer(OWN_TOKENS_DIR), load_tokenizer(TARGET_DIR)
    assert own.vocab_size == own_tokens.VOCAB_SIZE
    assert own.vocabulary() != target.vocabulary()
