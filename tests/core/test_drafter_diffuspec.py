"""DiffuSpec: a masked model's lattice, the path through it, and the drafts in the loop."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.config import SpeculationConfig, parse_speculation
from paceline.demo import DIFFUSION_DIR, TARGET_DIR
from paceline.diffusion.runner import Context
from paceline.drafters.diffuspec import (
    DiffuSpec,
    Lattice,
    WittenBellNgrams,
    best_path,
    candidates,
    path_score,
)
from paceline.engine import Engine
from paceline.errors import InvalidArgument, TokenizerMismatch
from paceline.loading import load_drafter, load_engine
from paceline.plan import resolve
from paceline.sampling import SamplingParams, gumbel
from paceline.session import Session
from paceline.types import Budget
from tests.core.prompts import code_prompts
from tests.masked import masked_drafter
from tests.modelzoo import make_model

VOCAB = 40
TEXT = [5, 6, 7, 8, 5, 6, 9, 8, 5, 6, 7]
BASE = SamplingParams(max_tokens=24, ignore_eos=True)


def lattice_of(seed: int, depth: int = 4, width: int = 3) -> Lattice:
    """Random values, the best first."""
    random = np.random.default_rng(seed)
    columns = []
    for _ in range(depth):
        tokens = random.choice(VOCAB, width, replace=False).tolist()
        values = sorted((-random.exponential(1.0, width)).tolist(), reverse=True)
        columns.append(list(zip(tokens, values, strict=True)))
    return columns


def proxy_of(text: list[int], order: int = 3) -> WittenBellNgrams:
    proxy = WittenBellNgrams(order, VOCAB)
    proxy.learn(text)
    return proxy


def session_of(tokens: list[int], params: SamplingParams = BASE, **knobs: object) -> Session:
    plan = resolve(SpeculationConfig.model_validate({"method": "diffuspec", **knobs}))
    return Session("s", tokens, params, plan)


# --- the path search -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_path_scores_at_least_as_much_as_the_best_token_of_each_position(seed: int) -> None:
    random = np.random.default_rng(1000 + seed)
    text = random.integers(0, VOCAB, 400).tolist()  # every token follows some other
    lattice, proxy = lattice_of(seed, depth=6), proxy_of(text)
    greedy = [column[0][0] for column in lattice]
    least = path_score(lattice, greedy, TEXT, proxy, 1.5)
    for beam in (1, 2, 4):
        path = best_path(lattice, TEXT, proxy, 1.5, beam)
        assert path_score(lattice, path, TEXT, proxy, 1.5) >= least


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_of_all_paths_finds_the_best_of_them(seed: int) -> None:
    lattice, proxy = lattice_of(seed), proxy_of(TEXT)
    tokens = [[token for token, _ in column] for column in lattice]
    scores = {
        path: path_score(lattice, path, TEXT, proxy, 2.0) for path in itertools.product(*tokens)
    }
    assert tuple(best_path(lattice, TEXT, proxy, 2.0, 81)) == max(scores, key=scores.__getitem__)


def test_without_weight_it_is_the_best_token_of_each_position() -> None:
    lattice, proxy = lattice_of(0), proxy_of(TEXT)
    greedy = [column[0][0] for column in lattice]
    for beam in (1, 8):
        assert best_path(lattice, TEXT, proxy, 0.0, beam) == greedy


def test_the_proxy_turns_a_tie_to_what_the_text_has_said() -> None:
    lattice: Lattice = [[(1, -0.5), (8, -0.6)], [(2, -0.5), (5, -0.6)]]
    assert best_path(lattice, TEXT, proxy_of(TEXT), 1.0, 4) == [8, 5]


def test_candidates_are_the_most_probable_up_to_a_mass_and_a_number() -> None:
    values = np.log(np.array([0.1, 0.5, 0.15, 0.25]))
    assert [token for token, _ in candidates(values, 8, 0.7)] == [1, 3]
    assert [token for token, _ in candidates(values, 8, 0.8)] == [1, 3, 2]
    assert [token for token, _ in candidates(values, 2, 1.0)] == [1, 3]
    assert [token for token, _ in candidates(values, 8, 0.0)] == [1]
    impossible = np.array([-math.inf, 0.0, -math.inf])
    assert [token for token, _ in candidates(impossible, 3, 1.0)] == [1]


# --- the n-grams ---------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [[], [6], [5, 6], [1, 2], [9, 5, 6]])
def test_ngrams_are_a_distribution(context: list[int]) -> None:
    proxy = proxy_of(TEXT)
    assert sum(proxy.probability(t, context) for t in range(VOCAB)) == pytest.approx(1.0)


def test_ngrams_follow_the_counts_of_the_longest_context() -> None:
    proxy = proxy_of(TEXT)  # 5 6 was followed by 7, 9 and 7
    seven, nine, other = (proxy.probability(token, [5, 6]) for token in (7, 9, 30))
    assert seven > nine > other > 0
    assert seven > 0.4


def test_ngrams_of_a_text_that_grew_or_changed_are_those_of_the_text() -> None:
    grown = proxy_of(TEXT[:4])
    grown.learn(TEXT)
    changed = proxy_of([*TEXT[:6], 30, 31])
    changed.learn(TEXT)
    fresh = proxy_of(TEXT)
    for token, context in itertools.product(range(VOCAB), ([5, 6], [8], [30])):
        expected = fresh.probability(token, context)
        assert grown.probability(token, context) == expected
        assert changed.probability(token, context) == expected


# --- the drafter ---------------------------------------------------------------------------------


def draft(drafter: DiffuSpec, session: Session, depth: int) -> list[int]:
    (made,) = drafter.propose([session], [Budget(depth, depth)])
    tokens: list[int] = made.token_ids.tolist()
    return tokens


def reference(drafter: DiffuSpec, text: list[int], depth: int) -> torch.Tensor:
    """Logits of ``depth`` masks behind the text, from one forward without drafter or rewinds."""
    size, mask = drafter.runner.blocks.block_size, drafter.runner.blocks.mask_token_id
    whole, context = len(text) // size * size, Context()
    drafter.runner.append(context, text[:whole])
    state = torch.tensor([*text[whole:], *([mask] * depth)])
    logits = drafter.runner.predict(context, [state])[0][len(text) - whole :].clone()
    logits[:, mask] = -torch.inf
    return logits


def test_one_forward_drafts_the_argmax_of_every_mask() -> None:
    """Across block ends (of 8), after growing and after another text took the place of a part."""
    drafter = masked_drafter(VOCAB)
    session = session_of([1], proxy_weight=0.0)
    drafter.open(session)
    long = [int(t) for t in np.random.default_rng(0).integers(0, VOCAB - 1, 40)]
    for text in (long[:5], long[:37], long[:24], [*long[:18], 3, 4], long[:9], [7] * 20):
        session.token_ids = list(text)
        for depth in (1, 6, 11):
            expected = reference(drafter, text, depth).argmax(-1).tolist()
            assert draft(drafter, session, depth) == expected
    drafter.close(session)
    assert not drafter._states


def test_with_a_temperature_a_draft_follows_the_targets_noise() -> None:
    drafter = masked_drafter(VOCAB)
    for seed in (3, 4):
        params = replace(BASE, temperature=0.8, seed=seed)
        session = session_of(TEXT, params, proxy_weight=0.0)
        drafter.open(session)
        logits = reference(drafter, TEXT, 6).double().numpy()
        expected = [
            int((row / 0.8 + gumbel(seed, len(TEXT) + place, VOCAB)).argmax())
            for place, row in enumerate(logits)
        ]
        assert draft(drafter, session, 6) == expected


def test_rules_that_correct_for_q_get_drafts_without_noise() -> None:
    """A point mass is right for them only if the draft does not depend on the target's noise."""
    drafter, drafts = masked_drafter(VOCAB), []
    for seed in (3, 4):
        params = replace(BASE, temperature=0.8, seed=seed)
        session = session_of(TEXT, params, acceptance="rejection")
        drafter.open(session)
        drafts.append(draft(drafter, session, 6))
    assert drafts[0] == drafts[1]


def test_a_draft_ends_with_a_token_that_ends_the_text() -> None:
    drafter = masked_drafter(VOCAB)
    whole = session_of(TEXT, proxy_weight=0.0)
    drafter.open(whole)
    tokens = draft(drafter, whole, 6)
    end = next(token for token in tokens if token != tokens[0])
    session = session_of(TEXT, replace(BASE, stop_token_ids=(end,)), proxy_weight=0.0)
    drafter.open(session)
    assert draft(drafter, session, 6) == tokens[: tokens.index(end) + 1]


def test_no_draft_beyond_the_masked_models_context() -> None:
    drafter = masked_drafter(VOCAB)
    length = drafter.runner.context_length
    session = session_of([1] * (length - 3))
    drafter.open(session)
    assert len(draft(drafter, session, 3)) == 3
    assert draft(drafter, session, 4) == []


# --- in the loop ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_search_has_more_accepted_than_the_best_token_of_each_position(
    demo: Engine, temperature: float
) -> None:
    assert demo.tokenizer is not None
    prompts = code_prompts(demo.tokenizer, 2)
    params = replace(BASE, temperature=temperature, seed=1)
    engine = Engine(demo.target, demo.drafters)
    configs = [
        SpeculationConfig(method="ar"),
        SpeculationConfig(method="diffuspec", length="adl"),
        parse_speculation({"method": "diffuspec", "length": "adl", "proxy_weight": 0.0}),
    ]
    ar, searched, greedy = (engine.generate(prompts, [params] * 2, each) for each in configs)
    for one, other, third in zip(ar, searched, greedy, strict=True):
        assert one.output_ids == other.output_ids == third.output_ids
    rounds = [sum(s.stats.num_rounds for s in runs) for runs in (ar, searched, greedy)]
    assert rounds[1] < rounds[0]
    if not temperature:
        assert rounds[1] < rounds[2]
    assert not any(s.stats.drafter_failures for s in searched)


def test_a_masked_folder_as_drafter_drafts_for_a_target_of_ones_own(tmp_path: Path) -> None:
    engine = load_engine(TARGET_DIR, DIFFUSION_DIR)
    assert isinstance(engine.drafters["diffuspec"], DiffuSpec)
    assert "draft_model" not in engine.drafters
    with pytest.raises(InvalidArgument, match="diffuspec"):
        load_drafter(DIFFUSION_DIR, TARGET_DIR)
    with pytest.raises(TokenizerMismatch):
        load_engine(make_model("llama", tmp_path), DIFFUSION_DIR)
