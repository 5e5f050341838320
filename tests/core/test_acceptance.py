"""What each acceptance rule promises beyond its law (for which see test_output_law.py)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from paceline.acceptance.base import AcceptanceRule, PathLogits
from paceline.acceptance.block import BlockVerification
from paceline.acceptance.exact_match import Coupled, Greedy
from paceline.acceptance.k_seq import KSeq, passed, ratio
from paceline.acceptance.rejection import RecursiveRejection, Rejection
from paceline.acceptance.tolerance import Tolerance
from paceline.acceptance.typical import Typical
from paceline.config import SpeculationConfig, parse_speculation
from paceline.errors import InvalidArgument
from paceline.methods import ACCEPTANCE_RULES, METHODS
from paceline.plan import resolve
from paceline.sampling import SamplingParams
from paceline.types import Acceptance, Draft
from tests.core.engines import small_engine
from tests.core.verdicts import (
    AT_ONE,
    Language,
    Law,
    all_drafts,
    distribution,
    logits_of,
    round_law,
)

GREEDY = SamplingParams()
BUSHY = (-1, -1, 0, 0, 1, 1, 2, 2, 3, 4, 6)


def pairs_of_laws(count: int, vocab: int) -> Iterator[tuple[Law, Law]]:
    rng = np.random.default_rng([count, vocab])
    for i in range(count):
        yield distribution(rng, vocab, zeros=i % 2), distribution(rng, vocab)


def verdict(
    rule: AcceptanceRule, p: Language, draft: Draft, params: SamplingParams = AT_ONE
) -> Acceptance:
    return rule.accept(draft, PathLogits(logits_of(p, draft), params, [0] * 5))


def random_tree(rng: np.random.Generator, vocab: int) -> Draft:
    return Draft(rng.integers(0, vocab, len(BUSHY)), np.array(BUSHY, np.int32))


# --- all rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [rule for name, rule in ACCEPTANCE_RULES.items() if name != "unverified"]
)
def test_every_rule_is_exact_match_at_temperature_0(rule: AcceptanceRule) -> None:
    """With the defaults of its knobs, and for drafts with and without probs."""
    rng = np.random.default_rng(1)
    for _ in range(30):
        p = Language.random(rng, 3, 4)
        draft = random_tree(rng, 3) if not rule.chain_only else Draft.chain(rng.integers(0, 3, 4))
        assert verdict(rule, p, draft, GREEDY) == verdict(Greedy(), p, draft, GREEDY)
    q = Language.random(rng, 3, 1)
    for _, draft in all_drafts(q, (-1, 0), replacement=True):
        p = Language.random(rng, 3, 2)
        assert verdict(rule, p, draft, GREEDY) == verdict(Greedy(), p, draft, GREEDY)


def test_greedy_is_for_temperature_0() -> None:
    target = PathLogits(torch.zeros(1, 4), AT_ONE, [1])
    with pytest.raises(InvalidArgument) as refused:
        Greedy().accept(Draft.chain([]), target)
    assert (refused.value.field, refused.value.value) == ("temperature", AT_ONE.temperature)


def test_argmaxes_of_the_whole_batch_take_the_place_of_logits() -> None:
    logits = torch.eye(4)[[2, 0, 3]]  # [num_nodes + 1, vocab_size]
    given, own = (PathLogits(logits, GREEDY, [1], known) for known in ([2, 0, 3], None))
    for node in (-1, 0, 1):
        assert given.argmax([], node) == own.argmax([], node)


def test_names_and_knobs_are_those_of_the_schema() -> None:
    for name, rule in ACCEPTANCE_RULES.items():
        assert rule.name == name
    fields = SpeculationConfig.model_fields.keys()
    knobs = {"typical_epsilon": 0.01, "typical_delta": 2.0}
    assert knobs.keys() <= fields
    config = SpeculationConfig(method="typical_acceptance", allow_lossy=True, **knobs)
    assert resolve(config).rule == Typical(**knobs)
    config = SpeculationConfig(method="prompt_lookup", acceptance="tolerance", allow_lossy=True)
    assert resolve(config).rule == Tolerance()
    assert resolve(config).config.tolerance_beta == 1  # the plan shows what applies


# --- block verification --------------------------------------------------------------------------


def test_a_block_is_accepted_at_least_as_far_as_token_by_token() -> None:
    rng = np.random.default_rng(4)
    gains = []
    for zeros in (0, 0, 0, 1, 1, 1):
        p, q = Language.random(rng, 3, 3, zeros), Language.random(rng, 3, 2)
        _, block = round_law(BlockVerification(), p, all_drafts(q, (-1, 0, 1), replacement=True))
        _, single = round_law(Rejection(), p, all_drafts(q, (-1, 0, 1), replacement=True))
        gains.append(block - single)
    assert min(gains) > -1e-6
    assert max(gains) > 0.02


def test_block_verification_gives_the_gain_of_the_papers_example() -> None:
    """Two tokens, p = (1/3, 2/3) and q = (2/3, 1/3) everywhere: 11/9 instead of 10/9."""
    p_row, q_row = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])

    def constant(row: Law, depth: int) -> Language:
        return Language([np.broadcast_to(row, (2,) * d + (2,)) for d in range(depth + 1)])

    for rule, expected in ((Rejection(), 10 / 9), (BlockVerification(), 11 / 9)):
        drafts = all_drafts(constant(q_row, 1), (-1, 0), replacement=True)
        _, length = round_law(rule, constant(p_row, 2), drafts)
        assert length == pytest.approx(expected, abs=1e-6)


# --- recursive rejection -------------------------------------------------------------------------


def test_two_candidates_of_two_tokens_are_always_enough() -> None:
    for p, q in pairs_of_laws(20, 2):
        if np.count_nonzero(q) < 2:
            continue
        drafts = all_drafts(Language([q]), (-1, -1), replacement=False)
        p_language = Language([p, np.stack([p, p])])
        _, length = round_law(RecursiveRejection(), p_language, drafts)
        assert length == pytest.approx(1.0, abs=1e-6)


def test_recursive_rejection_of_a_chain_is_standard_rejection() -> None:
    rng = np.random.default_rng(2)
    p, q = Language.random(rng, 4, 3), Language.random(rng, 4, 2)
    for i, (_, draft) in enumerate(all_drafts(q, (-1, 0, 1), replacement=False)):
        params = replace(AT_ONE, seed=i)
        expected = verdict(Rejection(), p, draft, params)
        assert verdict(RecursiveRejection(), p, draft, params) == expected


def test_candidates_without_replacement_are_accepted_more_often() -> None:
    rates = {True: [], False: []}  # type: dict[bool, list[float]]
    for p, q in pairs_of_laws(30, 4):
        p_language = Language([p, np.stack([p] * 4)])
        for replacement, found in rates.items():
            drafts = all_drafts(Language([q]), (-1, -1), replacement=replacement)
            found.append(round_law(RecursiveRejection(), p_language, drafts)[1])
    assert np.mean(rates[False]) > np.mean(rates[True]) + 0.02


# --- k-SEQ ---------------------------------------------------------------------------------------


def best_acceptance(p: Law, q: Law, k: int) -> float:
    """Optimal transport with membership cost (SpecTr, section 4), as a linear program.

    Variables: the joint law of k independent draws from q and of the token that is output.
    """
    vocab = len(p)
    draws = list(itertools.product(range(vocab), repeat=k))
    gain = np.array([[float(token in draw) for token in range(vocab)] for draw in draws])
    of_draw = np.kron(np.eye(len(draws)), np.ones(vocab))
    of_token = np.kron(np.ones(len(draws)), np.eye(vocab))
    result = linprog(
        -gain.ravel(),
        # The last equation follows from the others, and rounding must not contradict it.
        A_eq=np.vstack([of_draw, of_token])[:-1],
        b_eq=np.concatenate([[np.prod(q[list(draw)]) for draw in draws], p])[:-1],
    )
    assert result.success
    return float(-result.fun)


@pytest.mark.parametrize(("vocab", "k"), [(3, 2), (3, 3), (3, 4), (4, 2), (4, 3), (5, 2), (5, 3)])
def test_k_seq_is_near_the_optimum(vocab: int, k: int) -> None:
    """At least (1 - 1/e) of the linear program's acceptance, and no more than all of it."""
    for p, q in pairs_of_laws(12, vocab):
        rate = float(passed(p, q, ratio(p, q, k), k).sum())
        best = best_acceptance(p, q, k)
        assert (1 - 1 / math.e) * best - 1e-9 <= rate <= best + 1e-6


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_what_k_seq_passes_leaves_a_residual(k: int) -> None:
    for p, q in pairs_of_laws(20, 5):
        rho = ratio(p, q, k)
        assert 1.0 <= rho <= k
        mass = passed(p, q, rho, k)
        rate = mass.sum()
        assert (p - mass >= -1e-12).all()
        residual = (p - mass) / (1.0 - rate)
        assert residual.sum() == pytest.approx(1.0)
        # The fixed point, in the paper's two forms.
        assert rate == pytest.approx(np.minimum(rho * q, p).sum(), abs=1e-5)
        beta = np.minimum(q, p / rho).sum()
        assert rate == pytest.approx(1 - (1 - beta) ** k)
        assert rate >= np.minimum(q, p).sum() - 1e-6


def test_more_draws_are_accepted_more_often() -> None:
    for p, q in pairs_of_laws(20, 5):
        rates = [passed(p, q, ratio(p, q, k), k).sum() for k in (1, 2, 3, 5, 8)]
        assert (np.diff(rates) >= -1e-6).all()


def test_one_draw_is_the_standard_rule() -> None:
    rng = np.random.default_rng(6)
    p, q = Language.random(rng, 4, 3), Language.random(rng, 4, 2)
    for i, (_, draft) in enumerate(all_drafts(q, (-1, 0, 1), replacement=True)):
        params = replace(AT_ONE, seed=i)
        assert verdict(KSeq(), p, draft, params).path == verdict(Rejection(), p, draft, params).path
    assert ratio(p.after(()), q.after(()), 1) == 1.0


def test_k_seq_accepts_as_often_as_it_says() -> None:
    for p, q in pairs_of_laws(4, 3):
        p_language = Language([p, np.stack([p] * 3)])
        _, length = round_law(
            KSeq(), p_language, all_drafts(Language([q]), (-1, -1, -1), replacement=True)
        )
        expected = passed(p, q, ratio(p, q, 3), 3).sum()
        assert length == pytest.approx(expected, abs=1e-6)


def test_sequences_that_agree_are_verified_together() -> None:
    """Both first tokens are equal; the second sequence goes on as the target wants."""
    sure = np.array([0.0, 1.0])
    p = Language([sure, np.stack([sure] * 2), np.broadcast_to(sure, (2, 2, 2))])
    q = Language([np.array([0.5, 0.5]), np.full((2, 2), 0.5)])
    for _, draft in all_drafts(q, (-1, -1, 0, 1), replacement=True):
        if draft.token_ids.tolist() == [1, 1, 0, 1]:
            assert verdict(KSeq(), p, draft).path == (1, 3)


# --- typical acceptance --------------------------------------------------------------------------


def typical_lengths(**knobs: float) -> list[int]:
    rng = np.random.default_rng(3)
    rule, lengths = Typical(**knobs), []
    for _ in range(20):
        p = Language.random(rng, 3, 4)
        lengths.append(len(verdict(rule, p, random_tree(rng, 3)).path))
    return lengths


def test_typical_acceptance_at_the_ends_of_its_range() -> None:
    assert set(typical_lengths(typical_epsilon=0.0)) == {4}
    assert set(typical_lengths(typical_delta=0.0)) == {4}
    assert set(typical_lengths(typical_epsilon=1.0, typical_delta=1e6)) == {0}


@pytest.mark.parametrize("knob", ["typical_epsilon", "typical_delta"])
def test_typical_acceptance_falls_with_its_thresholds(knob: str) -> None:
    other = {"typical_epsilon": {"typical_delta": 1e6}, "typical_delta": {"typical_epsilon": 1.0}}
    lengths = [
        typical_lengths(**other[knob], **{knob: value})
        for value in (0.0, 0.03, 0.09, 0.2, 0.4, 0.7, 1.0)
    ]
    assert (np.diff(lengths, axis=0) <= 0).all()
    assert np.mean(lengths[0]) > np.mean(lengths[3]) > np.mean(lengths[-1])


def test_the_threshold_follows_the_entropy() -> None:
    rule = Typical(typical_epsilon=0.09, typical_delta=0.3)
    assert rule.threshold(np.array([1.0, 0.0])) == pytest.approx(0.09)  # min(0.09, 0.3)
    assert rule.threshold(np.full(100, 0.01)) == pytest.approx(0.3 / 100)


def test_the_longest_typical_path_wins_and_then_the_likeliest() -> None:
    rule = Typical()
    root, inner = np.array([0.5, 0.3, 0.2]), np.array([[0.1, 0.5, 0.4]] * 3)
    p = Language([root, inner, np.broadcast_to(root, (3, 3, 3))])
    shallow = Draft(np.array([0, 1, 2]), np.array([-1, -1, 1], np.int32))
    assert verdict(rule, p, shallow).path == (1, 2)  # 0.3 * 0.4 < 0.5, but longer
    equal = Draft(np.array([2, 0, 1, 2, 1]), np.array([-1, -1, 0, 1, 1], np.int32))
    assert verdict(rule, p, equal).path == (1, 4)  # 0.5 * 0.5 is the likeliest


def test_a_token_that_sampling_excludes_is_never_typical() -> None:
    p = Language([np.array([0.5, 0.4, 0.1]), np.full((3, 3), 1 / 3)])
    params = replace(AT_ONE, top_k=2)
    for token, length in ((1, 1), (2, 0)):
        found = verdict(Typical(typical_epsilon=0.0), p, Draft.chain([token]), params)
        assert len(found.path) == length


# --- tolerance -----------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, replace(AT_ONE, seed=4), replace(AT_ONE, top_k=2)])
def test_tolerance_is_exact_at_beta_1_or_tau_0(params: SamplingParams) -> None:
    rng = np.random.default_rng(7)
    for _ in range(60):
        p, draft = Language.random(rng, 3, 4), random_tree(rng, 3)
        expected = verdict(Coupled(), p, draft, params)
        assert verdict(Tolerance(1, 50.0), p, draft, params) == expected
        assert verdict(Tolerance(3, 0.0), p, draft, params) == expected


@pytest.mark.one_of(1, slow=2)
@pytest.mark.parametrize("params", [GREEDY, AT_ONE])
@pytest.mark.parametrize("knob", ["beta", "tau"])
def test_tolerance_accepts_more_with_larger_knobs(knob: str, params: SamplingParams) -> None:
    rules = (
        [Tolerance(beta, 2.0) for beta in (1, 2, 3, 4)]
        if knob == "beta"
        else [Tolerance(3, tau) for tau in (0.0, 0.5, 1.0, 3.0, 100.0)]
    )
    rng = np.random.default_rng(8)
    lengths = []
    for _ in range(30):
        p, draft = Language.random(rng, 4, 4), random_tree(rng, 4)
        lengths.append([len(verdict(rule, p, draft, params).path) for rule in rules])
    assert (np.diff(lengths, axis=1) >= 0).all()
    assert np.mean([row[-1] for row in lengths]) > np.mean([row[0] for row in lengths])


def test_tolerance_is_a_rank_and_a_gap_of_log_probabilities() -> None:
    p = Language([np.array([0.6, 0.3, 0.1]), np.full((3, 3), 1 / 3)])
    gap = math.log(0.6 / 0.3)

    def accepts(token: int, beta: int, tau: float) -> bool:
        return bool(verdict(Tolerance(beta, tau), p, Draft.chain([token]), GREEDY).path)

    assert accepts(1, 2, gap + 1e-4)
    assert not accepts(1, 2, gap - 1e-4)
    assert not accepts(2, 2, 10.0)
    assert accepts(2, 3, 10.0)
    both = Draft(np.array([2, 1]), np.array([-1, -1], np.int32))
    assert verdict(Tolerance(3, 10.0), p, both, GREEDY).path == (1,)  # the better of the two


# --- combinations --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "field", "says"),
    [
        ({"method": "typical_acceptance"}, "acceptance", "allow_lossy: true"),
        ({"method": "aggressive_tolerance"}, "acceptance", "allow_lossy: true"),
        ({"method": "draft_model", "acceptance": "typical"}, "acceptance", "a lossless rule (bl"),
        ({"method": "draft_model_tree", "acceptance": "block"}, "acceptance", "shape 'chain'"),
        ({"method": "block_verification", "shape": "kary"}, "acceptance", "recursive_rejection"),
        ({"method": "lookahead", "acceptance": "rejection"}, "acceptance", "are trees"),
        (
            {"method": "combined", "drafters": ("lookahead",), "acceptance": "rejection"},
            "acceptance",
            "with lookahead",
        ),
        ({"method": "draft_model", "typical_epsilon": 0.1}, "typical_epsilon", "a knob of method"),
        ({"method": "draft_model", "acceptance": "best"}, "acceptance", "one of block, coupled"),
        ({"method": "draft_model_confidence", "acceptance": "k_seq"}, "shape", "iid, kary"),
    ],
)
def test_impossible_combinations_say_what_would_work(
    knobs: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        resolve(SpeculationConfig(**knobs))
    assert caught.value.field == field
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("typical_epsilon", -0.1),
        ("typical_epsilon", 1.5),
        ("typical_delta", math.nan),
        ("tolerance_beta", 0),
        ("tolerance_beta", 1.5),
        ("tolerance_tau", -1.0),
        ("tolerance_tau", math.inf),
    ],
)
def test_knobs_have_bounds(knob: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_speculation({knob: value})
    assert caught.value.field == f"speculation.{knob}"


@pytest.mark.parametrize("method", [m.name for m in METHODS.values() if not m.lossless])
def test_the_engine_runs_a_lossy_method_only_when_asked_to(method: str, tiny_folder: Path) -> None:
    small = small_engine(tiny_folder)
    prompt, params = [5, 6, 7, 5, 6], SamplingParams(temperature=1.0, max_tokens=12)
    with pytest.raises(InvalidArgument) as caught:
        small.engine.generate([prompt], params, SpeculationConfig(method=method))
    assert caught.value.field in ("acceptance", "method")
    assert "allow_lossy: true" in caught.value.allowed
    small.assert_nothing_is_left()
    config = SpeculationConfig(method=method, allow_lossy=True)
    session = small.engine.generate([prompt], params, config)[0]
    assert len(session.output_ids) == 12
    small.assert_nothing_is_left()


def test_lossy_rules_in_an_engine_trade_exactness_for_length(tiny_folder: Path) -> None:
    """The loosest settings accept every drafted token, the strictest give AR's."""
    small = small_engine(tiny_folder)
    prompts = [[5, 6, 7, 5, 6], [90, 3, 90, 3, 90]]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24)

    def run(**knobs: Any) -> tuple[list[list[int]], int]:
        config = SpeculationConfig(allow_lossy=True, **knobs)
        sessions = small.engine.generate(prompts, params, config)
        drafted = sum(s.stats.num_drafted - s.stats.num_accepted for s in sessions)
        return [s.output_ids for s in sessions], drafted

    ar, _ = run(method="ar")
    strict, _ = run(method="aggressive_tolerance", tolerance_beta=1)
    assert strict == ar
    loose, rejected = run(method="aggressive_tolerance", tolerance_beta=1000, tolerance_tau=1e6)
    assert rejected == 0
    assert loose != ar
    _, rejected = run(method="typical_acceptance", typical_epsilon=0.0)
    assert rejected == 0


@pytest.mark.parametrize("rule", [name for name, r in ACCEPTANCE_RULES.items() if r.chain_only])
@pytest.mark.parametrize("method", ["aded", "suffix_decoding_tree", "prompt_lookup", "combined"])
def test_drafters_make_chains_for_rules_that_verify_only_those(
    method: str, rule: str, tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = small_engine(tiny_folder)
    params = SamplingParams(temperature=0.3, max_tokens=24, seed=1)
    lossy = not ACCEPTANCE_RULES[rule].lossless
    config = SpeculationConfig(method=method, length="fixed", acceptance=rule, allow_lossy=lossy)
    session = small.engine.generate([[5, 6, 7, 5, 6, 7, 5, 6]], params, config)[0]
    assert session.stats.num_drafted == session.stats.num_draft_nodes > 0
    assert not caplog.records  # no draft was dropped
