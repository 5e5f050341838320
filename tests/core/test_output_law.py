"""Above temperature 0 the output law is the target's: by enumeration, and by seeded samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.acceptance import rejection
from paceline.acceptance.base import PathLogits
from paceline.acceptance.exact_match import Coupled
from paceline.acceptance.rejection import Rejection
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
from paceline.shapes.kary import chain
from paceline.target import ModelTarget
from paceline.types import Budget, Draft, DraftProbs
from tests.core.statistics import ALPHA, chi_square_p, standard_error

Table = npt.NDArray[np.float64]  # [rows, vocab_size], rows sum to 1
AT_ONE = SamplingParams(temperature=1.0)


def distribution(rng: np.random.Generator, size: int, zeros: int = 0) -> npt.NDArray[np.float64]:
    weights = rng.dirichlet(np.full(size, 0.7))
    weights[rng.permutation(size)[:zeros]] = 0.0
    result: npt.NDArray[np.float64] = weights / weights.sum()
    return result


def log(probs: npt.NDArray[np.float64]) -> torch.Tensor:
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(probs)).float()


# --- rejection, by enumeration -------------------------------------------------------------------


class Enumerator:
    """Integrates a rule's accept/reject decisions instead of drawing them.

    The rule's own code runs; its uniforms come from here, and instead of drawing a token after a
    rejection it hands over the distribution it would have drawn from.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.uniforms: dict[int, float] = {}
        self.drawn_from: npt.NDArray[np.float64] = np.empty(0)
        patch.setattr(rejection, "uniform", self._uniform)
        patch.setattr(rejection, "sample_from", self._sample_from)

    def _uniform(self, seed: int, position: int, token: int, salt: int) -> float:
        assert salt == Salt.ACCEPT
        return self.uniforms[position]

    def _sample_from(
        self, probs: npt.NDArray[np.float64], seed: int, position: int, salt: int
    ) -> int:
        assert salt == Salt.RESIDUAL
        self.drawn_from = probs
        return 0

    def outcomes(
        self, draft: Draft, target: PathLogits
    ) -> Iterator[tuple[float, int, npt.NDArray[np.float64]]]:
        """Each possible verdict: its probability, accepted tokens, the next token's law."""
        reach = 1.0
        for depth in range(draft.num_nodes + 1):
            if depth == draft.num_nodes:
                self._accepted(draft, target, depth)
                yield reach, depth, self.drawn_from
                return
            accept = self._acceptance_probability(draft, target, depth)
            if accept < 1.0:
                self.uniforms = {target.position + i: 0.0 for i in range(depth)}
                self.uniforms[target.position + depth] = 1.0 - 1e-16
                assert len(Rejection().accept(draft, target).path) == depth
                yield reach * (1.0 - accept), depth, self.drawn_from
            reach *= accept
            if reach == 0.0:
                return

    def _accepted(self, draft: Draft, target: PathLogits, depth: int) -> None:
        self.uniforms = {target.position + i: 0.0 for i in range(depth)}
        assert len(Rejection().accept(draft, target).path) == depth

    def _acceptance_probability(self, draft: Draft, target: PathLogits, depth: int) -> float:
        """The threshold below which the uniform accepts token ``depth``, by bisection."""

        def accepts(u: float) -> bool:
            self.uniforms = {target.position + i: 0.0 for i in range(depth)}
            self.uniforms |= {target.position + i: 1.0 for i in range(depth + 1, draft.num_nodes)}
            self.uniforms[target.position + depth] = u
            return len(Rejection().accept(draft, target).path) > depth

        low, high = 0.0, 1.0
        if accepts(1.0 - 1e-16):
            return 1.0
        if not accepts(1e-300):
            return 0.0
        for _ in range(54):
            middle = (low + high) / 2
            low, high = (middle, high) if accepts(middle) else (low, middle)
        return low


@pytest.mark.parametrize("zeros", [0, 1])
@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_rejection_has_the_targets_law_exactly(
    seed: int, vocab: int, zeros: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All drafts of two tokens times all verdicts: the joint law of what a round commits."""
    rng = np.random.default_rng([seed, vocab, zeros])
    p = np.stack([distribution(rng, vocab, zeros) for _ in range(vocab + 1)])  # row 0 at the root
    q = np.stack([distribution(rng, vocab, zeros) for _ in range(vocab + 1)]).astype(np.float32)
    p2 = np.stack([distribution(rng, vocab) for _ in range(vocab * vocab)])
    enumerator = Enumerator(monkeypatch)
    first = np.zeros(vocab)  # law of the first token
    pairs = np.zeros((vocab, vocab))  # of the first two, where the round committed two
    triples = np.zeros((vocab, vocab, vocab))
    for a, b in itertools.product(range(vocab), repeat=2):
        drawn = float(q[0, a]) * float(q[a + 1, b])
        if drawn == 0.0:
            continue
        rows = [(np.flatnonzero(q[r]), q[r][q[r] > 0]) for r in (0, a + 1)]
        draft = Draft.chain([a, b], DraftProbs.stack(rows))
        logits = torch.stack([log(p[0]), log(p[a + 1]), log(p2[a * vocab + b])])
        target = PathLogits(logits, AT_ONE, [0] * 5)
        total = 0.0
        for chance, accepted, law in enumerator.outcomes(draft, target):
            total += chance
            assert law.sum() == pytest.approx(1.0, abs=1e-12)
            assert (law >= 0).all()
            weight = drawn * chance
            if accepted == 0:
                first += weight * law
            else:
                first[a] += weight
                if accepted == 1:
                    pairs[a] += weight * law
                else:
                    pairs[a, b] += weight
                    triples[a, b] += weight * law
        assert total == pytest.approx(1.0, abs=1e-9)
    np.testing.assert_allclose(first, p[0], atol=2e-7)
    np.testing.assert_allclose(pairs, pairs.sum(1, keepdims=True) * p[1:], atol=2e-7)
    after = p2.reshape(vocab, vocab, vocab)
    np.testing.assert_allclose(triples, triples.sum(2, keepdims=True) * after, atol=2e-7)
    # The chance that the first token is accepted is the overlap of p and q.
    assert pairs.sum() == pytest.approx(np.minimum(p[0], q[0]).sum(), abs=2e-7)


def test_rejection_of_a_point_mass_has_the_targets_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft without probs (a lookup): each drafted token counts as certain."""
    p = np.array([0.5, 0.3, 0.2])
    enumerator = Enumerator(monkeypatch)
    for token in range(3):
        target = PathLogits(torch.stack([log(p), log(p)]), AT_ONE, [0])
        law = np.zeros(3)
        for chance, accepted, drawn_from in enumerator.outcomes(Draft.chain([token]), target):
            law += chance * (np.eye(3)[token] if accepted else drawn_from)
        np.testing.assert_allclose(law, p, atol=1e-7)


def test_rejection_accepts_everything_when_q_is_p(monkeypatch: pytest.MonkeyPatch) -> None:
    p = np.array([0.25, 0.5, 0.125, 0.125])
    enumerator = Enumerator(monkeypatch)
    probs = DraftProbs.stack([(np.arange(4), p.astype(np.float32))])
    for token in range(4):
        target = PathLogits(torch.stack([log(p), log(p)]), AT_ONE, [0])
        verdicts = list(enumerator.outcomes(Draft.chain([token], probs), target))
        assert sum(chance for chance, accepted, _ in verdicts if accepted) == pytest.approx(1.0)


# --- seeded samples ------------------------------------------------------------------------------


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
            for i in range(6000)
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
    method: str, p: torch.Tensor, q: torch.Tensor, count: int, **knobs: int
) -> Iterator[tuple[int, tuple[int, ...], Draft]]:
    """Rounds with the row's own shape and rule: accepted tokens, committed tokens, draft."""
    plan = resolve(SpeculationConfig(method=method, num_speculative_tokens=2, **knobs))
    assert plan.shape == chain()
    for seed in range(count):
        session = Session("s", [3, 1, 0], SamplingParams(temperature=1.0, seed=seed), plan)
        draft = plan.shape.build(TableModel(q), [session], [Budget(2, 2)])[0]
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


@pytest.mark.parametrize(
    ("method", "vocab", "support"),
    [
        ("speculative_sampling", 4, 4),
        ("speculative_sampling", 16, 16),
        ("speculative_sampling", 16, 5),
        ("speculative_sampling", 64, 64),
        ("speculative_sampling", 64, 12),
        ("draft_model", 4, 4),
        ("draft_model", 16, 16),
        ("draft_model", 64, 64),
    ],
)
def test_drafts_from_the_shape_keep_the_targets_law(method: str, vocab: int, support: int) -> None:
    """Also with a truncated q: the rule must see the distribution that was drawn from."""
    p, q = tables(vocab, seed=1)
    sampled = method == "speculative_sampling"
    count = 5000
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
    if sampled:
        assert abs(rate - overlap) < slack
    else:
        assert overlap / (2 - overlap) - slack < rate < overlap + slack


def test_coupled_acceptance_is_near_the_optimum_for_many_pairs() -> None:
    """At least (1 - TV) / (1 + TV), at most 1 - TV: Daliri, Musco, Suresh 2024, theorem 2."""
    rule = Coupled()
    for seed in range(8):
        rng = np.random.default_rng(seed)
        p, q = distribution(rng, 12), distribution(rng, 12)
        count, accepted = 2000, 0
        for i in range(count):
            params = SamplingParams(temperature=1.0, seed=i)
            token = coupled_sample(log(q).numpy(), params, 7)
            target = PathLogits(torch.stack([log(p)] * 2), params, [0] * 7)
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


@pytest.mark.parametrize("method", [*LAW_ROWS, "ar", "draft_model_tree"])
def test_a_row_has_the_targets_law(method: str, tiny: LlamaRunner, tiny_folder: Path) -> None:
    """Three tokens of many seeds against probabilities computed from the model's own logits."""
    # The target's own weights with another final norm: right often, wrong often.
    other = LlamaRunner(tiny_folder)
    generator = torch.Generator().manual_seed(0)
    other._final_norm *= 1 + 0.35 * torch.randn(other._final_norm.shape, generator=generator)
    drafter = DraftModel(other)
    limits = EngineLimits(max_sessions=200, max_waiting=5000)
    engine = Engine(ModelTarget(tiny), {"draft_model": drafter}, limits=limits)
    prompt, count = [70, 71, 72, 73], 2000
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
