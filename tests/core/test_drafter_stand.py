"""STAND: averaged rows, back-off, eviction, and what drawing from them is worth."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.acceptance.base import PathLogits
from paceline.config import SpeculationConfig
from paceline.drafters.stand import NGram, NGramTable, Stand
from paceline.plan import Plan, resolve
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.shapes.base import SparseRows
from paceline.types import Budget, Outcome
from tests.core.engines import Reference, small_engine
from tests.core.statistics import ALPHA, chi_square_p, standard_error
from tests.modelzoo import VOCAB_SIZE

CONFIG = SpeculationConfig(method="stand", length="fixed")
RULES = ("coupled", "recursive_rejection")
Table = npt.NDArray[np.float64]


def learn(table: NGramTable, rows: Sequence[tuple[NGram, Sequence[float]]]) -> None:
    """Observe whole distributions, in one batch."""
    top = [np.argsort(-np.asarray(probs), kind="stable")[: table.width] for _, probs in rows]
    probs = [np.asarray(probs, np.float32)[ids] for (_, probs), ids in zip(rows, top, strict=True)]
    table.learn([ngram for ngram, _ in rows], np.stack(top), np.stack(probs))


def stored(table: NGramTable, context: NGram) -> dict[int, float]:
    ids, probs = table.rows([table.find(context)])
    return {int(i): float(p) for i, p in zip(ids[0], probs[0], strict=True) if i >= 0}


def distributions(seed: int, count: int, size: int) -> Table:
    table: Table = np.random.default_rng([seed, size]).dirichlet(np.full(size, 0.5), count)
    return table


# --- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 3, 12])
def test_a_row_is_the_average_of_those_observed(batches: int) -> None:
    """Exactly, as long as no more than 10 tokens compete; however the rows come in."""
    rows = distributions(0, 12, 10)
    ngrams: list[NGram] = [(1,), (1, 2), (1,), (7,)] * 3
    table = NGramTable(10)
    for part in np.array_split(np.arange(12), batches):
        learn(table, [(ngrams[i], rows[i].tolist()) for i in part])
    assert len(table) == 3
    for ngram in set(ngrams):
        mean = rows[[i for i in range(12) if ngrams[i] == ngram]].mean(0)
        row = stored(table, ngram)
        assert len(row) == 10
        np.testing.assert_allclose([row[t] for t in range(10)], mean, atol=1e-6)


def test_a_row_keeps_the_10_most_likely_tokens() -> None:
    table = NGramTable(50)
    first, second = distributions(1, 2, 50)
    learn(table, [((4,), first.tolist())])
    best = np.argsort(-first)[:10]
    row = stored(table, (4,))
    assert list(row) == best.tolist()
    np.testing.assert_allclose(list(row.values()), first[best], atol=1e-6)
    learn(table, [((4,), second.tolist())])
    # What the second row has outside of its own best 10 was never observed.
    seen = np.zeros(50)
    seen[best] += first[best]
    best = np.argsort(-second)[:10]
    seen[best] += second[best]
    row, expected = stored(table, (4,)), np.argsort(-seen)[:10]
    assert list(row) == expected.tolist()
    np.testing.assert_allclose(list(row.values()), seen[expected] / 2, atol=1e-6)


def test_look_up_backs_off_to_shorter_suffixes() -> None:
    table = NGramTable(4)
    for ngram, token in (((1,), 0), ((2, 1), 1), ((3, 2, 1), 2)):
        learn(table, [(ngram, np.eye(4)[token].tolist())])
    assert stored(table, (3, 2, 1)) == {2: 1.0}
    assert stored(table, (0, 2, 1)) == {1: 1.0}
    assert stored(table, (0, 0, 1)) == {0: 1.0}
    assert table.find((1, 2, 3)) == -1
    assert stored(table, (1, 2, 3)) == {}


def test_the_least_recently_observed_ngram_makes_room() -> None:
    table = NGramTable(4, capacity=3)
    one = np.eye(4).tolist()
    for token in (0, 1, 2):
        learn(table, [((token,), one[token])])
    learn(table, [((0,), one[0])])
    learn(table, [((3,), one[3])])  # takes the place of 1, and nothing of its row
    assert len(table) == 3
    assert [stored(table, (token,)) for token in range(4)] == [{0: 1.0}, {}, {2: 1.0}, {3: 1.0}]


def test_a_batch_larger_than_the_table_leaves_whole_rows() -> None:
    table = NGramTable(8, capacity=3)
    rows = distributions(2, 8, 8)
    learn(table, [((token,), rows[token].tolist()) for token in range(8)])
    assert len(table) == 3
    for token in (5, 6, 7):
        row = stored(table, (token,))
        np.testing.assert_allclose([row[t] for t in range(8)], rows[token], atol=1e-6)


# --- learning from rounds ------------------------------------------------------------------------


class Watched(Stand):
    """Keeps every distribution after every n-gram."""

    def __init__(self, table: NGramTable) -> None:
        super().__init__(table)
        self.seen: dict[NGram, list[torch.Tensor]] = {}

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        for session, outcome in zip(sessions, outcomes, strict=True):
            paths = [session.token_ids[: session.length - len(outcome.token_ids)]]
            for token, parent in zip(
                outcome.draft.token_ids.tolist(), outcome.draft.parent_indices, strict=True
            ):
                paths.append([*paths[parent + 1], token])
            for path, row in zip(paths, outcome.verification.logits, strict=True):
                for length in range(1, min(3, len(path)) + 1):
                    self.seen.setdefault(tuple(path[-length:]), []).append(row.softmax(-1))
        super().observe(sessions, outcomes)


def test_every_node_teaches_all_ngrams_that_end_in_it(tiny_folder: Path) -> None:
    watched = Watched(NGramTable(VOCAB_SIZE))
    small = small_engine(tiny_folder, drafters={"stand": watched})
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    small.engine.generate([[70, 71, 72, 73], [5], [8, 9]], params, CONFIG)
    assert len(watched.table) == len(watched.seen) > 100
    averaged = 0
    for ngram, rows in watched.seen.items():
        row = stored(watched.table, ngram)
        if len(rows) == 1:
            top = torch.topk(rows[0], 10)
            assert list(row) == top.indices.tolist()
            np.testing.assert_allclose(list(row.values()), top.values, atol=1e-6)
        else:  # at most the mean: what a row has outside of its best 10 is not counted
            averaged += 1
            mean = torch.stack(rows).mean(0)
            assert all(p <= mean[token] + 1e-5 for token, p in row.items())
    assert averaged > 10
    small.assert_nothing_is_left()


def test_the_table_survives_a_request(tiny_folder: Path, reference: Reference) -> None:
    engine = small_engine(tiny_folder).engine
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)
    forwards = []
    for _ in range(2):
        session = engine.generate([[70, 71, 72, 73]], params, CONFIG)[0]
        assert session.output_ids == reference([70, 71, 72, 73], params)
        forwards.append(session.stats.num_target_forwards)
    assert forwards[1] < forwards[0]


# --- drawing -------------------------------------------------------------------------------------


def markov(q: Table) -> Stand:
    """A drafter that knows ``q[token]`` after each token."""
    table = NGramTable(len(q))
    learn(table, [((token,), row.tolist()) for token, row in enumerate(q)])
    return Stand(table)


def plan_of(acceptance: str, **knobs: int) -> Plan:
    return resolve(replace_config(acceptance=acceptance, shape="kary", **knobs))


def replace_config(**knobs: object) -> SpeculationConfig:
    return SpeculationConfig.model_validate({"method": "stand", **knobs})


@pytest.mark.parametrize("rule", RULES)
def test_children_are_drawn_without_replacement(rule: str) -> None:
    """The law of the first three children is that of sequential draws without replacement."""
    q = distributions(3, 5, 5)
    drafter, temperature = markov(q), 0.7
    plan, counts, total = plan_of(rule, branching=3), Counter[tuple[int, ...]](), 3000
    for seed in range(total):
        params = SamplingParams(temperature=temperature, seed=seed)
        session = Session("s", [1, 0], params, plan)
        draft = drafter.propose([session], [Budget(1, 3)])[0]
        counts[tuple(draft.token_ids.tolist())] += 1
        if draft.probs is not None:
            for node, left in enumerate((5, 4, 3)):
                assert len(draft.probs.row(node)[0]) == left
    weights = q[0] ** (1 / temperature)
    law = {}
    for order in itertools.permutations(range(5), 3):
        chance, left = 1.0, weights.sum()
        for token in order:
            chance, left = chance * weights[token] / left, left - weights[token]
        law[order] = chance
    keys = sorted(law)
    assert chi_square_p([counts[key] for key in keys], [law[key] for key in keys]) > ALPHA


class TopOnly(Stand):
    """Knows the most likely token of each row and nothing else: deterministic drafting."""

    def _rows(self, contexts: list[NGram]) -> SparseRows:
        rows = super()._rows(contexts)
        return SparseRows(rows.token_ids[:, :1], rows.logits[:, :1])


@pytest.mark.one_of(1, slow=2)
@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.0])
def test_drawing_is_accepted_at_least_as_often_as_the_best_guess(temperature: float) -> None:
    """Chains from one table, verified by a target that resembles it."""
    p = np.random.default_rng(4).dirichlet(np.full(10, 0.8), 10)
    q = 0.7 * p + 0.3 * distributions(5, 10, 10)
    plan, count = plan_of("coupled", branching=1), 600
    stochastic = markov(q)
    accepted = []
    for drafter in (stochastic, TopOnly(stochastic.table)):
        total = 0
        for seed in range(count):
            params = SamplingParams(temperature=temperature, seed=seed)
            session = Session("s", [1, seed % 10], params, plan)
            draft = drafter.propose([session], [Budget(4, 4)])[0]
            rows = np.log(p[[seed % 10, *draft.token_ids]])
            target = PathLogits(torch.from_numpy(rows).float(), params, session.token_ids)
            total += len(plan.rule.accept(draft, target).path)
        accepted.append(total / count)
    assert accepted[0] > accepted[1]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("rule", RULES)
def test_the_output_law_is_the_targets(rule: str) -> None:
    p, q = distributions(6, 4, 4), distributions(7, 4, 4)
    q = 0.5 * p + 0.5 * q
    drafter, plan, count = markov(q), plan_of(rule, branching=2), 2000
    first, second, accepted = np.zeros(4, int), np.zeros((4, 4), int), 0
    for seed in range(count):
        params = SamplingParams(temperature=1.0, seed=seed)
        session = Session("s", [3, 0], params, plan)
        draft = drafter.propose([session], [Budget(2, 6)])[0]
        rows = torch.from_numpy(np.log(p[[0, *draft.token_ids]])).float()
        verdict = plan.rule.accept(draft, PathLogits(rows, params, session.token_ids))
        tokens = [*draft.token_ids[list(verdict.path)].tolist(), verdict.next_token]
        first[tokens[0]] += 1
        accepted += len(tokens) > 1
        if len(tokens) > 1:
            second[tokens[0], tokens[1]] += 1
    assert chi_square_p(first, p[0]) > ALPHA
    weights = second.sum(1)
    assert chi_square_p(second.ravel(), ((weights / weights.sum())[:, None] * p).ravel()) > ALPHA
    # Two children are accepted more often than the best single one could be.
    overlap = float(np.minimum(p[0], q[0]).sum())
    assert accepted / count > overlap - 5 * standard_error(overlap, count)
