"""OmniDraft: a drafter with another tokenizer than the target's."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config import SpeculationConfig
from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.drafters.omnidraft import OmniDraft, Translator
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.loading import load_engine
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.tokenizer import load_tokenizer
from tests.core.prompts import code_prompts

TEXTS = (
    "def read_config(path):\n    with open(path) as file:\n        return json.load(file)\n",
    "class Queue:\n    # Größe, 大小, 🙂\n    def __init__(self, maxsize=0):\n",
)
FLOORS = {0.0: 0.3, 1.0: 0.1}  # accepted tokens a round of the drafter that ships
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=48, ignore_eos=True, temperature=1.0, seed=3)


def copied(folder: Path, source: Path) -> Path:
    folder.mkdir()
    for file in source.glob("*.json"):
        shutil.copy(file, folder)
    shutil.copy(source / "model.safetensors", folder)
    return folder


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's drafter with its token ids in another order: the same texts and probabilities."""
    folder = copied(tmp_path_factory.mktemp("models") / "shuffled", DRAFTER_DIR)
    order = np.random.default_rng(0).permutation(4094)
    new = {old + 2: int(place) + 2 for old, place in enumerate(order)} | {0: 0, 1: 1}
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: new[i] for token, i in vocabulary.items()}
    file.write_text(json.dumps(tokenizer))
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            moved = torch.empty_like(weights[name])
            moved[[new[i] for i in range(4096)]] = weights[name]
            weights[name] = moved
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def finer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's drafter without the last merges of its tokenizer: it spells words in parts."""
    folder = copied(tmp_path_factory.mktemp("models") / "finer", DRAFTER_DIR)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:1200]
    vocabulary = tokenizer["model"]["vocab"]
    # The unused names stay in the vocabulary, under others, as its size is the model's.
    made = {"".join(m.split(" ") if isinstance(m, str) else m)
            for m in tokenizer["model"]["merges"]}  # fmt: skip
    tokenizer["model"]["vocab"] = {
        token if len(token) == 1 or token in made or i < 2 else f"<unused {i}>": i
        for token, i in vocabulary.items()
    }
    file.write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def plain() -> Engine:
    return load_engine(TARGET_DIR, DRAFTER_DIR)


@pytest.fixture(scope="module")
def own_tokens() -> Engine:
    """The demo target with the drafter that ships with tokens of its own."""
    return load_engine(translate=True)


@cache
def translating(folder: Path) -> Engine:
    return load_engine(TARGET_DIR, folder, translate=True)


def forget(engine: Engine) -> OmniDraft:
    """The engine's drafter, which has not seen any text yet."""
    drafter = engine.drafters["omnidraft"]
    assert isinstance(drafter, OmniDraft) and drafter.translator is not None
    drafter.translator = Translator(drafter.translator.target, drafter.translator.drafter)
    return drafter


def run(
    engine: Engine, method: str, params: SamplingParams = GREEDY, text: str = TEXTS[0]
) -> Session:
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(text)
    (session,) = engine.generate([prompt], params, SpeculationConfig(length="fixed", method=method))
    return session


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["shuffled", "finer"])
def test_tokens_are_those_of_ar(
    kind: str, params: SamplingParams, plain: Engine, request: pytest.FixtureRequest
) -> None:
    engine = translating(request.getfixturevalue(kind))
    forget(engine)
    for text in TEXTS:
        session = run(engine, "omnidraft", params, text)
        assert session.output_ids == run(plain, "ar", params, text).output_ids
        assert session.stats.num_accepted > 0
        assert not session.stats.drafter_failures


def test_with_the_same_tokenizer_it_is_plain_speculative_decoding(plain: Engine) -> None:
    one, other = (run(plain, method) for method in ("omnidraft", "draft_model"))
    assert one.output_ids == other.output_ids
    assert one.stats.num_drafted == other.stats.num_drafted
    assert one.stats.num_accepted == other.stats.num_accepted


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_another_order_of_tokens_costs_nothing_once_they_are_known(
    params: SamplingParams, plain: Engine, shuffled: Path
) -> None:
    """Above temperature 0 too: a translated token has the noise of the target's."""
    engine = translating(shuffled)
    forget(engine)
    first, second = (run(engine, "omnidraft", params) for _ in range(2))
    known = run(plain, "draft_model", params)
    assert second.output_ids == known.output_ids
    assert second.stats.num_accepted >= 0.9 * known.stats.num_accepted
    assert second.stats.num_accepted >= first.stats.num_accepted


@pytest.mark.parametrize("kind", ["shuffled", "finer"])
def test_a_translation_has_the_text_of_what_was_drafted(
    kind: str, request: pytest.FixtureRequest
) -> None:
    target = load_tokenizer(TARGET_DIR)
    drafter = load_tokenizer(request.getfixturevalue(kind))
    translator = Translator(target, drafter)
    for text in TEXTS:
        drafted = drafter.encode(text)
        for start in range(0, len(drafted), 3):
            part = drafted[start : start + 8]
            if "\ufffd" in drafter.decode(part):
                continue
            token_ids = translator.translate(part, 8)
            assert drafter.decode(part).startswith(target.decode(token_ids))
            assert 0 < len(token_ids) <= len(part)  # m <= k


def test_the_cache_learns(finer: Path) -> None:
    """What was seen once is translated without a look at the text; merges are among it."""
    target, drafter = load_tokenizer(TARGET_DIR), load_tokenizer(finer)
    translator = Translator(target, drafter)
    sizes = [0]
    for text in TEXTS:
        translator.learn_from(target.encode(text))
        sizes.append(len(translator.pairs))
    assert sizes == sorted(set(sizes))
    assert any(len(ours) > 1 and len(theirs) == 1 for ours, theirs in translator.pairs.items())
    for ours, theirs in translator.pairs.items():
        assert drafter.decode(ours) == target.decode(theirs)
    asked = translator.num_by_text
    drafted = drafter.encode(TEXTS[0])
    token_ids = translator.translate(drafted, len(drafted))
    assert target.decode(token_ids) == TEXTS[0]
    assert len(token_ids) < len(drafted)
    assert translator.num_by_text == asked


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_drafter_that_ships_with_tokens_of_its_own(
    params: SamplingParams, own_tokens: Engine
) -> None:
    engine, translator = own_tokens, forget(own_tokens).translator
    assert translator is not None
    assert translator.drafter.vocab_size == 768
    rounds = accepted = 0
    for prompt in code_prompts(translator.target, 4):
        plain, session = (
            engine.generate([prompt], params, SpeculationConfig(method=method, length="fixed"))[0]
            for method in ("ar", "omnidraft")
        )
        assert session.output_ids == plain.output_ids
        assert not session.stats.drafter_failures
        rounds += session.stats.num_target_forwards
        accepted += session.stats.num_accepted
    assert accepted > FLOORS[params.temperature] * rounds
    merged = [ours for ours in translator.pairs if len(ours) > 1]
    assert len(merged) > 10  # target tokens that the drafter spells in parts


def test_methods_for_the_same_tokenizer_are_refused(finer: Path) -> None:
    engine = translating(finer)
    assert isinstance(engine.drafters["omnidraft"], OmniDraft)
    with pytest.raises(InvalidArgument, match="omnidraft"):
        run(engine, "draft_model")
