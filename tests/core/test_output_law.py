"""Above temperature 0 the output law is the target's: by enumeration, and by seeded samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.acceptance.base import AcceptanceRule, PathLogits
from paceline.acceptance.block import BlockVerification
from paceline.acceptance.exact_match import Coupled
from paceline.acceptance.k_seq import KSeq
from paceline.acceptance.rejection import RecursiveRejection, Rejection
from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, EngineLimits
from paceline.methods import METHODS
from paceline.models.base import Segment
from paceline.models.llama import LlamaRunner
from paceline.plan import resolve
from paceline.sampling import (
    Salt,
    SamplingParams,
    coupled_sample,
    probabilities,
    sample_from,
    scaled_scores,
)
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.tree import subset
from paceline.types import Budget, Draft
from tests.core.statistics import ALPHA, chi_square_p, standard_error
from tests.core.verdicts import AT_ONE, Language, all_drafts, distribution, log, round_law

Table = npt.NDArray[np.float64]  # [rows, vocab_size], rows sum to 1

# --- by enumeration ------------------------------------------------------------------------------

CHAIN_RULES = (Rejection(), BlockVerification(), RecursiveRejection(), KSeq())
TREE_RULES = (RecursiveRejection(), KSeq())
TWO = (-1, 0)  # parent indices of a chain of two
TREES = {
    "2 siblings": (-1, -1),
    "3 siblings": (-1, -1, -1),
    "2 sequences": (-1, -1, 0, 1),
    "2 then 1 and 2": (-1, -1, 0, 1, 1),
}


def named(rule: AcceptanceRule) -> str:
    return rule.name


@pytest.mark.parametrize("rule", CHAIN_RULES, ids=named)
@pytest.mark.parametrize(("vocab", "zeros"), [(2, 0), (3, 0), (3, 1), (4, 1)])
def test_a_chain_has_the_targets_law_exactly(rule: AcceptanceRule, vocab: int, zeros: int) -> None:
    """All drafts times all verdicts: the joint law of what a round commits, AR after it."""
    for seed in range(3):
        rng = np.random.default_rng([seed, vocab, zeros])
        p, q = Language.random(rng, vocab, 2, zeros), Language.random(rng, vocab, 1, zeros)
        law, length = round_law(rule, p, all_drafts(q, TWO, replacement=True))
        np.testing.assert_allclose(law, p.joint(), atol=5e-7)
        overlap = np.minimum(p.after(()), q.after(())).sum()
        if rule.name != "block":  # the chance that the first token is accepted is 1 - TV(p, q)
            one_law, one = round_law(rule, p, all_drafts(q, (-1,), replacement=True))
            np.testing.assert_allclose(one_law, p.joint(), atol=5e-7)
            assert one == pytest.approx(overlap, abs=5e-7)
        assert length >= overlap - 5e-7


@pytest.mark.parametrize("seed", range(3))
def test_a_block_of_three_has_the_targets_law_exactly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = Language.random(rng, 3, 3), Language.random(rng, 3, 2)
    law, _ = round_law(BlockVerification(), p, all_drafts(q, (-1, 0, 1), replacement=True))
    np.testing.assert_allclose(law, p.joint(), atol=5e-7)


def cut_short(
    drafts: Iterator[tuple[float, Draft]], stops: set[tuple[int, ...]]
) -> Iterator[tuple[float, Draft]]:
    """The chains of ``drafts``, each of which ends with the first of its prefixes in ``stops``."""
    for chance, draft in drafts:
        tokens, length = tuple(draft.token_ids.tolist()), draft.num_nodes
        length = next((n for n in range(1, length) if tokens[:n] in stops), length)
        yield chance, subset(draft, np.arange(length))


@pytest.mark.parametrize("rule", CHAIN_RULES, ids=named)
@pytest.mark.parametrize("seed", range(4))
def test_a_chain_that_ends_early_has_the_targets_law_exactly(
    rule: AcceptanceRule, seed: int
) -> None:
    """Controllers end drafts by what was drafted: any set of prefixes after which they stop."""
    rng = np.random.default_rng(seed)
    p, q = Language.random(rng, 3, 3, zeros=seed % 2), Language.random(rng, 3, 2)
    prefixes = [t for n in (1, 2) for t in itertools.product(range(3), repeat=n)]
    stops = {prefix for prefix in prefixes if rng.random() < 0.4}
    drafts = list(cut_short(all_drafts(q, (-1, 0, 1), replacement=True), stops))
    assert len({draft.num_nodes for _, draft in drafts}) > 1
    law, _ = round_law(rule, p, iter(drafts))
    np.testing.assert_allclose(law, p.joint(), atol=5e-7)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("rule", TREE_RULES, ids=named)
@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
@pytest.mark.parametrize(("vocab", "zeros"), [(3, 0), (4, 1)])
@pytest.mark.parametrize("tree", TREES)
def test_a_tree_has_the_targets_law_exactly(
    rule: AcceptanceRule, replacement: bool, tree: str, vocab: int, zeros: int
) -> None:
    """Also with siblings drawn in the way that the rule does not ask for."""
    parents = TREES[tree]
    if vocab ** len(parents) > 300:
        vocab, zeros = 3, 0
    rng = np.random.default_rng([len(parents), vocab, replacement])
    p, q = Language.random(rng, vocab, 2, zeros), Language.random(rng, vocab, 1)
    law, _ = round_law(rule, p, all_drafts(q, parents, replacement=replacement))
    np.testing.assert_allclose(law, p.joint(), atol=5e-7)


@pytest.mark.parametrize("rule", CHAIN_RULES, ids=named)
def test_point_masses_have_the_targets_law(rule: AcceptanceRule) -> None:
    """Drafts without probs (lookups): each drafted token counts as certain, wherever it is from."""
    rng = np.random.default_rng(0)
    p = Language.random(rng, 3, 2, zeros=1)
    trees = [TWO] if rule.chain_only else [TWO, *TREES.values()]
    for parents in trees:
        for tokens in itertools.product(range(3), repeat=len(parents)):
            draft = Draft(np.array(tokens), np.array(parents, np.int32))
            law, _ = round_law(rule, p, iter([(1.0, draft)]))
            np.testing.assert_allclose(law, p.joint(), atol=5e-7)


@pytest.mark.parametrize("rule", CHAIN_RULES, ids=named)
def test_everything_is_accepted_when_q_is_p(rule: AcceptanceRule) -> None:
    p = Language([np.array([0.25, 0.5, 0.125, 0.125])])
    p.levels.append(np.stack([p.levels[0]] * 4))
    q = Language(p.levels[:1])
    _, length = round_law(rule, p, all_drafts(q, (-1,), replacement=True))
    assert length == pytest.approx(1.0, abs=1e-6)


def test_decisions_have_the_chance_that_they_are_given() -> None:
    """The enumeration above takes chances for granted; here they are tossed."""
    logits = torch.zeros(1, 3)
    for chance in (0.1, 0.5, 0.93):
        tosses = [
            [
                PathLogits(logits, replace(AT_ONE, seed=seed), [0] * 7).toss(chance, depth, number)
                for depth, number in ((0, 0), (0, 1), (1, 0))
            ]
            for seed in range(4000)
        ]
        rates = np.mean(tosses, axis=0)
        assert (abs(rates - chance) < 5 * standard_error(chance, 4000)).all()
        both = np.mean([a and b and c for a, b, c in tosses])
        assert abs(both - chance**3) < 5 * standard_error(chance**3, 4000)


# --- seeded samples ------------------------------------------------------------------------------


@pytest.mark.one_of(3, slow=2)
@pytest.mark.parametrize("vocab", [3, 4, 16, 64])
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_coupled_sampling_has_the_targets_law(vocab: int, over: str) -> None:
    rng = np.random.default_rng(vocab)
    logits = log(distribution(rng, vocab, zeros=1)).numpy()
    for params in (AT_ONE, replace(AT_ONE, temperature=0.5, top_k=3), replace(AT_ONE, top_p=0.8)):
        tokens = [
            coupled_sample(logits, replace(params, seed=i), 9)
            if over == "seeds"
            else coupled_sample(logits, replace(params, seed=5), i)
            for i in range(4000)
        ]
        counts = np.bincount(tokens, minlength=vocab)
        assert chi_square_p(counts, probabilities(logits, params)) > ALPHA


@pytest.mark.parametrize("salt", [Salt.DRAFT, Salt.RESIDUAL])
def test_sample_from_has_the_law_it_is_given(salt: int) -> None:
    probs = distribution(np.random.default_rng(3), 16, zeros=2)
    tokens = [sample_from(probs, seed, 4, salt) for seed in range(8000)]
    assert chi_square_p(np.bincount(tokens, minlength=16), probs) > ALPHA


def test_consecutive_tokens_are_independent_of_one_another() -> None:
    """Equal logits at neighbouring positions: pairs of tokens have the product law."""
    probs = np.array([0.5, 0.3, 0.2])
    logits, counts = log(probs).numpy(), np.zeros((3, 3), int)
    for seed in range(8000):
        params = replace(AT_ONE, seed=seed)
        counts[coupled_sample(logits, params, 20), coupled_sample(logits, params, 21)] += 1
    assert chi_square_p(counts.ravel(), np.outer(probs, probs).ravel()) > ALPHA


class TableModel:
    """An expander whose logits are a table indexed by the last token."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def root(self, sessions: Sequence[Session]) -> torch.Tensor:
        return self.table[[session.token_ids[-1] for session in sessions]]

    def expand(
        self, sessions: Sequence[Session], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> torch.Tensor:
        return self.table[[token for frontier in frontiers for _, token, _ in frontier]]


def sampled_rounds(
    method: str, p: torch.Tensor, q: torch.Tensor, count: int, **knobs: Any
) -> Iterator[tuple[int, tuple[int, ...], Draft]]:
    """Rounds with the row's own shape and rule: accepted tokens, committed tokens, draft."""
    plan = resolve(SpeculationConfig(method=method, num_speculative_tokens=2, **knobs))
    assert plan.shape is not None
    budget = Budget(2, plan.config.node_budget or 0)
    for seed in range(count):
        session = Session("s", [3, 1, 0], SamplingParams(temperature=1.0, seed=seed), plan)
        draft = plan.shape.build(TableModel(q), [session], [budget])[0]
        logits = p[[0, *draft.token_ids.tolist()]]
        verdict = plan.rule.accept(draft, PathLogits(logits, session.params, session.token_ids))
        tokens = [int(draft.token_ids[node]) for node in verdict.path]
        yield len(tokens), (*tokens, verdict.next_token), draft


def tables(vocab: int, seed: int) -> tuple[Table, Table]:
    """Two Markov chains: the target's, and a drafter's that resembles it."""
    rng = np.random.default_rng([seed, vocab])
    p = np.stack([distribution(rng, vocab) for _ in range(vocab)])
    q = np.stack([0.6 * row + 0.4 * distribution(rng, vocab) for row in p])
    return p, q


@pytest.mark.slow
@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("method", "vocab", "support"),
    [
        pytest.param("speculative_sampling", 4, 4, marks=pytest.mark.nightly),
        pytest.param("speculative_sampling", 16, 16, marks=pytest.mark.nightly),
        pytest.param("speculative_sampling", 16, 5, marks=pytest.mark.nightly),
        pytest.param("speculative_sampling", 64, 64, marks=pytest.mark.nightly),
        ("speculative_sampling", 64, 12),
        ("block_verification", 4, 4),
        pytest.param("block_verification", 16, 5, marks=pytest.mark.nightly),
        ("draft_model", 4, 4),
        pytest.param("draft_model", 16, 16, marks=pytest.mark.nightly),
        pytest.param("draft_model", 64, 64, marks=pytest.mark.nightly),
    ],
)
def test_drafts_from_the_shape_keep_the_targets_law(method: str, vocab: int, support: int) -> None:
    """Also with a truncated q: the rule must see the distribution that was drawn from."""
    p, q = tables(vocab, seed=1)
    sampled = method != "draft_model"
    count = 3000
    knobs = {"draft_support": support} if sampled else {}
    first, second = np.zeros(vocab, int), np.zeros((vocab, vocab), int)
    accepted = 0
    for num_accepted, tokens, draft in sampled_rounds(method, log(p), log(q), count, **knobs):
        first[tokens[0]] += 1
        accepted += num_accepted > 0
        if len(tokens) > 1:
            second[tokens[0], tokens[1]] += 1
        assert (draft.probs is not None) == sampled
        if draft.probs is not None:
            assert all(len(draft.probs.row(node)[0]) <= support for node in range(2))
    assert chi_square_p(first, p[0]) > ALPHA
    # Given a first token that was accepted, the second has its conditional law.
    weights = second.sum(1)
    law = (weights[:, None] / weights.sum()) * p
    assert chi_square_p(second.ravel(), law.ravel()) > ALPHA

    # How often the first drafted token is accepted.
    truncated = q[0].copy()
    truncated[np.argsort(-truncated)[support:]] = 0.0
    truncated /= truncated.sum()
    overlap = float(np.minimum(p[0], truncated).sum())  # 1 - TV, the best that is possible
    rate, slack = accepted / count, 5 * standard_error(overlap, count)
    if method == "block_verification":
        assert rate > overlap - slack  # a likely second token makes up for the first
    elif sampled:
        assert abs(rate - overlap) < slack
    else:
        assert overlap / (2 - overlap) - slack < rate < overlap + slack


@pytest.mark.slow
@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        ("recursive_rejection", "rsd_s"),
        ("block", "chain"),
        ("recursive_rejection", "kary"),
        pytest.param("recursive_rejection", "rsd_c", marks=pytest.mark.nightly),
        ("rejection", "chain"),
        pytest.param("recursive_rejection", "dyspec", marks=pytest.mark.nightly),
        pytest.param("k_seq", "kary", marks=pytest.mark.nightly),
        ("k_seq", "iid"),
    ],
)
@pytest.mark.parametrize("support", [pytest.param(4, marks=pytest.mark.nightly), 3])
def test_rounds_one_after_another_keep_the_targets_law(rule: str, shape: str, support: int) -> None:
    """Three tokens in two or three rounds: no noise may count in two of them."""
    p, q = tables(4, seed=2)
    config = SpeculationConfig(
        method="draft_model",
        shape=shape,
        acceptance=rule,
        num_speculative_tokens=None if shape == "rsd_c" else 2,
        draft_support=support,
    )
    plan = resolve(config)
    assert plan.shape is not None
    model, targets = TableModel(log(q)), log(p)
    count, accepted = 1200, 0
    triples = np.zeros((4, 4, 4), int)
    for seed in range(count):
        session = Session("s", [3, 1, 0], SamplingParams(temperature=1.0, seed=seed), plan)
        while session.length < 6:
            budget = Budget(2, plan.config.node_budget or 0)
            draft = plan.shape.build(model, [session], [budget])[0]
            assert draft.probs is not None
            logits = targets[[session.token_ids[-1], *draft.token_ids.tolist()]]
            target = PathLogits(logits, session.params, session.token_ids)
            verdict = plan.rule.accept(draft, target)
            accepted += session.length == 3 and len(verdict.path) > 0
            session.commit([*draft.token_ids[list(verdict.path)].tolist(), verdict.next_token])
        triples[tuple(session.token_ids[3:6])] += 1
    law = p[0][:, None, None] * p[:, :, None] * p
    assert chi_square_p(triples.ravel(), law.ravel()) > ALPHA
    # Several candidates are accepted more often than one.
    one = np.where(np.argsort(np.argsort(-q[0])) < support, q[0], 0.0)
    overlap = float(np.minimum(p[0], one / one.sum()).sum())
    error = standard_error(overlap, count)
    assert accepted / count > overlap + (-4 if rule in ("rejection", "block") else 2) * error


@pytest.mark.slow
@pytest.mark.one_of(3)
@pytest.mark.parametrize("rule", ["rejection", "block", "recursive_rejection", "k_seq"])
def test_rounds_with_drafts_that_end_early_keep_the_targets_law(rule: str) -> None:
    """A stop rule ends chains where the drafter is unsure: which tokens it drew decides."""
    p, q = tables(4, seed=2)
    plan = resolve(
        SpeculationConfig(
            method="draft_model",
            acceptance=rule,
            length="confidence",
            length_max=3,
            stop_threshold=float(np.median(q.max(1))),
        )
    )
    assert plan.shape is not None
    model, targets, lengths = TableModel(log(q)), log(p), set[int]()
    triples = np.zeros((4, 4, 4), int)
    for seed in range(1200):
        session = Session("s", [3, 1, 0], SamplingParams(temperature=1.0, seed=seed), plan)
        while session.length < 6:
            draft = plan.shape.build(model, [session], [Budget(3, 3)])[0]
            lengths.add(draft.num_nodes)
            logits = targets[[session.token_ids[-1], *draft.token_ids.tolist()]]
            verdict = plan.rule.accept(draft, PathLogits(logits, session.params, session.token_ids))
            session.commit([*draft.token_ids[list(verdict.path)].tolist(), verdict.next_token])
        triples[tuple(session.token_ids[3:6])] += 1
    assert lengths == {1, 2, 3}
    law = p[0][:, None, None] * p[:, :, None] * p
    assert chi_square_p(triples.ravel(), law.ravel()) > ALPHA


def test_two_drawn_candidates_of_two_tokens_are_always_enough() -> None:
    """Recursive rejection with real draws and tosses: no round ever ends before its leaves."""
    for table_seed in range(3):
        rng = np.random.default_rng(table_seed)
        p, q = (rng.dirichlet((4.0, 4.0), 2) for _ in range(2))
        counts = np.zeros((2, 2), int)
        for num_accepted, tokens, draft in sampled_rounds(
            "draft_model_tree", log(p), log(q), 400,
            acceptance="recursive_rejection", branching=2, node_budget=6, length="fixed",
        ):  # fmt: skip
            assert draft.num_nodes == 6
            assert num_accepted == 2
            counts[tokens[:2]] += 1
        assert chi_square_p(counts.ravel(), (p[0][:, None] * p).ravel()) > ALPHA


def test_coupled_acceptance_is_near_the_optimum_for_many_pairs() -> None:
    """At least (1 - TV) / (1 + TV), at most 1 - TV: Daliri, Musco, Suresh 2024, theorem 2."""
    rule = Coupled()
    for seed in range(8):
        rng = np.random.default_rng(seed)
        p, q = distribution(rng, 12), distribution(rng, 12)
        count, accepted = 1200, 0
        drafted, wanted = log(q).numpy(), torch.stack([log(p)] * 2)
        for i in range(count):
            params = SamplingParams(temperature=1.0, seed=i)
            token = coupled_sample(drafted, params, 7)
            target = PathLogits(wanted, params, [0] * 7)
            accepted += len(rule.accept(Draft.chain([token]), target).path)
        tv = float(np.abs(p - q).sum() / 2)
        low, high, slack = (1 - tv) / (1 + tv), 1 - tv, 5 * standard_error(0.5, count)
        assert low - slack < accepted / count < high + slack


# --- the whole engine ----------------------------------------------------------------------------

LAW_ROWS = [
    method.name
    for method in METHODS.values()
    if method.lossless and method.acceptance not in ("coupled", "greedy")
]


@pytest.mark.one_of(3, slow=3)
@pytest.mark.parametrize("method", [*LAW_ROWS, "ar", "draft_model_tree"])
def test_a_method_has_the_targets_law(method: str, tiny: LlamaRunner, tiny_folder: Path) -> None:
    """Three tokens of many seeds against probabilities computed from the model's own logits."""
    # The target's own weights with another final norm: right often, wrong often.
    other = LlamaRunner(tiny_folder)
    generator = torch.Generator().manual_seed(0)
    norm = other._weights.final_norm
    norm *= 1 + 0.35 * torch.randn(norm.shape, generator=generator)
    drafter = DraftModel(other)
    limits = EngineLimits(max_sessions=200, max_waiting=5000)
    engine = Engine(ModelTarget(tiny), {"draft_model": drafter}, limits=limits)
    prompt, count = [70, 71, 72, 73], 800
    params = SamplingParams(temperature=1.5, top_k=3, max_tokens=3)
    law: dict[tuple[int, ...], float] = {}
    for path in paths(tiny, prompt, params, 3):
        law[path[0]] = law.get(path[0], 0.0) + path[1]
    assert len(law) == 27
    sessions = engine.generate(
        [prompt] * count,
        [replace(params, seed=seed) for seed in range(count)],
        SpeculationConfig(method=method),
    )
    keys = sorted(law)
    counts = [0] * len(keys)
    for session in sessions:
        counts[keys.index(tuple(session.output_ids))] += 1
    assert chi_square_p(counts, [law[key] for key in keys]) > ALPHA
    drafted = sum(session.stats.num_drafted for session in sessions)
    if method != "ar":  # both verdicts took part
        assert 0.2 < sum(session.stats.num_accepted for session in sessions) / drafted < 0.95


def paths(
    runner: LlamaRunner, prompt: list[int], params: SamplingParams, depth: int
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every continuation of ``depth`` tokens with its probability."""
    if depth == 0:
        yield (), 1.0
        return
    sequence = runner.new_sequence()
    segment = Segment(sequence, np.asarray(prompt), logits="last")
    logits = runner.forward([segment]).logits[0].numpy()
    runner.free(sequence)
    probs = probabilities(logits, params)
    assert np.isfinite(scaled_scores(logits, params)).sum() == params.top_k
    for token in np.flatnonzero(probs):
        for rest, chance in paths(runner, [*prompt, int(token)], params, depth - 1):
            yield (int(token), *rest), float(probs[token]) * chance
