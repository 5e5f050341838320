"""Tree shapes over a drafter that is a table: forms, budgets, order, and what is drawn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import parse_speculation
from paceline.errors import InvalidArgument
from paceline.methods import SHAPES
from paceline.plan import Plan, resolve
from paceline.sampling import SamplingParams, gumbel, gumbel_at
from paceline.session import Session
from paceline.shapes.base import Level, Rows, SparseRows, TreeBuilder
from paceline.shapes.confidence import BestFirst, ConfidenceTree
from paceline.shapes.dyspec import DySpec
from paceline.shapes.iid import IndependentSequences
from paceline.shapes.kary import Kary, chain
from paceline.shapes.rsd_c import BranchingVector
from paceline.shapes.rsd_s import StochasticBeam, conditional_gumbel
from paceline.shapes.template import TEMPLATES, Template, best_first
from paceline.tree import depths, path_to
from paceline.types import Budget, Draft, DraftStep, Draws
from tests.core.statistics import ALPHA, chi_square_p

VOCAB = 6
GREEDY = SamplingParams()
AT_ONE = SamplingParams(temperature=1.0)


@dataclass
class TableDrafter:
    """What follows a token depends on that token alone.

    Attributes:
        logits: # [vocab, vocab]
        candidates: answer with so many per row instead of the whole vocabulary.
        asked: nodes of each call.
    """

    logits: torch.Tensor
    candidates: int | None = None
    asked: list[int] = field(default_factory=list)
    last_hidden: torch.Tensor | None = None

    def root(self, sessions: Sequence[Session]) -> Rows:
        return self._rows([session.token_ids[-1] for session in sessions])

    def expand(
        self, sessions: Sequence[Session], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> Rows:
        return self._rows([token for frontier in frontiers for _, token, _ in frontier])

    def _rows(self, tokens: list[int]) -> Rows:
        self.asked.append(len(tokens))
        self.last_hidden = torch.tensor([[float(token)] for token in tokens])
        dense = self.logits[tokens]
        if self.candidates is None:
            return dense
        top = dense.topk(self.candidates, sorted=False)
        padding = np.full((len(tokens), 1), -1)
        return SparseRows(
            np.concatenate([padding, top.indices.numpy()], 1),
            np.concatenate([padding * 0 + 99.0, top.values.numpy()], 1).astype(np.float32),
        )


def table(seed: int, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(vocab, vocab, generator=generator)


def session_with(params: SamplingParams = GREEDY, **speculation: Any) -> Session:
    return Session("s", [3, 1], params, _plan(repr(sorted(speculation.items())), **speculation))


_PLANS: dict[str, Plan] = {}


def _plan(key: str, **speculation: Any) -> Plan:
    if key not in _PLANS:
        _PLANS[key] = resolve(parse_speculation({"method": "draft_model", **speculation}))
    return _PLANS[key]


def sampled(seed: int, shape: str, rule: str, **speculation: Any) -> Session:
    params = replace(AT_ONE, seed=seed)
    return session_with(params, shape=shape, acceptance=rule, **speculation)


def token_paths(draft: Draft) -> list[tuple[int, ...]]:
    """Tokens from the root to each node."""
    return [
        tuple(draft.token_ids[list(path_to(draft.parent_indices, node))].tolist())
        for node in range(draft.num_nodes)
    ]


def siblings(draft: Draft) -> Iterator[list[int]]:
    """Nodes with one parent, in order."""
    for parent in range(-1, draft.num_nodes):
        nodes = np.flatnonzero(draft.parent_indices == parent).tolist()
        if nodes:
            yield nodes


# --- all shapes --------------------------------------------------------------------------------

RULE_OF = {"iid": "k_seq"}


@pytest.mark.parametrize("candidates", [None, 3])
@pytest.mark.parametrize("params", [GREEDY, AT_ONE], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_budgets_are_kept_and_several_sessions_grow_in_one_forward(
    shape: str, params: SamplingParams, candidates: int | None
) -> None:
    budgets = [Budget(4, 11), Budget(2, 5), Budget(3, 1), Budget(0, 0), Budget(5, 0), Budget(1, 9)]
    sessions = [
        session_with(replace(params, seed=i), shape=shape, acceptance=RULE_OF.get(shape, "coupled"))
        for i, _ in enumerate(budgets)
    ]
    built = sessions[0].plan.shape
    assert built is not None
    assert built == sessions[1].plan.shape
    drafter = TableDrafter(table(1), candidates)
    drafts = built.build(drafter, sessions, budgets)
    assert drafter.asked[0] == sum(budget.depth > 0 < budget.nodes for budget in budgets)
    for session, budget, draft in zip(sessions, budgets, drafts, strict=True):
        assert draft.is_sound(VOCAB)
        assert draft.num_nodes <= budget.nodes
        assert (draft.num_nodes > 0) == (budget.depth > 0 < budget.nodes)
        if draft.num_nodes:
            assert depths(draft.parent_indices).max() <= budget.depth
        alone = built.build(TableDrafter(table(1), candidates), [session], [budget])[0]
        assert token_paths(alone) == token_paths(draft)  # whatever grows beside it
        if shape != "iid":
            assert len(set(token_paths(draft))) == draft.num_nodes  # siblings are distinct


def test_a_shape_that_a_rule_cannot_verify_is_refused() -> None:
    for shape, rule in (("iid", "coupled"), ("confidence", "k_seq"), ("rsd_s", "k_seq")):
        with pytest.raises(InvalidArgument, match=f"shape: got '{shape}'"):
            session_with(shape=shape, acceptance=rule)


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({"shape": "template", "template": "oak"}, "medusa_63, token_recycling_80, or"),
        ({"shape": "template", "template": [[0], [1, 0]]}, "after the path of its parent"),
        ({"shape": "template", "template": [[0], [0]]}, "each once"),
        ({"shape": "template", "template": []}, "template"),
        ({"shape": "rsd_c", "branching_vector": [2, 0]}, "branching_vector.1"),
        ({"shape": "sequoia", "rank_acceptance": [1.5]}, "rank_acceptance.0"),
        ({"shape": "chain", "branching_vector": [2]}, "a knob of method 'draft_model'"),
        ({"method": "lookahead", "shape": "oak"}, "a knob of method 'lookahead'"),
    ],
)
def test_impossible_knobs_are_refused(speculation: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        session_with(**speculation)


# --- candidates ----------------------------------------------------------------------------------


def test_noise_of_a_subset_is_the_subset_of_the_noise() -> None:
    ids = np.array([7, 0, 31999, 12])
    np.testing.assert_allclose(gumbel_at(5, 9, ids), gumbel(5, 9, 32000)[ids], rtol=1e-12)


@pytest.mark.parametrize("params", [GREEDY, AT_ONE], ids=["greedy", "coupled"])
def test_sparse_rows_that_list_everything_draft_what_dense_rows_do(params: SamplingParams) -> None:
    for seed in range(10):
        session = session_with(replace(params, seed=seed), shape="kary", branching=2)
        dense, sparse = (
            Kary(2).build(TableDrafter(table(seed), count), [session], [Budget(3, 14)])[0]
            for count in (None, VOCAB)
        )
        assert token_paths(sparse) == token_paths(dense)


@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_of_equally_likely_tokens_the_first_comes_first(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(16, 4096, generator=generator).mul(4).round().div(4)  # ties everywhere
    level = Level(rows, count)
    order = np.argsort(-rows.numpy(), axis=-1, kind="stable")[:, :count]
    assert level.best == order.tolist()
    log_q = rows.log_softmax(-1).gather(1, torch.from_numpy(order))
    assert np.allclose(level.best_log_q, log_q.numpy(), atol=1e-5)


def test_a_row_of_padding_has_no_children() -> None:
    rows = SparseRows(np.array([[-1, -1], [4, -1]]), np.zeros((2, 2), np.float32))
    for params in (GREEDY, AT_ONE, replace(GREEDY, logit_bias={1: 1.0})):
        for rule in ("coupled", "rejection"):
            tree = TreeBuilder(session_with(params, acceptance=rule), Budget(1, 4))
            assert tree.add_children(-1, Level(rows, 2), 0, 2) == []
            assert tree.choose(-1, Level(rows, 2), 0, 2, weighted=True).confidences == []
            assert tree.token_ids == []
            tree.add_children(-1, Level(rows, 2), 1, 2)
            assert set(tree.token_ids) == {4}


@pytest.mark.parametrize("candidates", [None, 3])
def test_confidences_are_the_probabilities_of_the_choice(candidates: int | None) -> None:
    drafter = TableDrafter(table(3), candidates)
    known = torch.full((VOCAB,), -torch.inf)
    top = drafter.logits[1].topk(candidates or VOCAB)
    known[top.indices] = top.values
    for params in (GREEDY, replace(GREEDY, logit_bias={3: 0.0}), AT_ONE):
        session = session_with(params)
        level = Level(drafter.root([session]), 3)
        choices = TreeBuilder(session, Budget(1, 3)).choose(-1, level, 0, 3, weighted=True)
        scores = known.double()
        if params.temperature:
            scores = scores + torch.from_numpy(gumbel(params.seed, 2, VOCAB))
        best = scores.softmax(-1).topk(3)
        assert choices.tokens == best.indices.tolist()
        np.testing.assert_allclose(choices.confidences, best.values, rtol=1e-5)
        q = known.log_softmax(-1)[choices.tokens]
        np.testing.assert_allclose(choices.log_q, q, rtol=1e-4, atol=1e-5)


def test_draws_without_replacement_are_gumbel_top_k_and_carry_their_q() -> None:
    logits = table(4, vocab=4, spread=1.0)
    p = logits[1].double().softmax(-1).numpy()
    counts = np.zeros((4, 4), np.int64)
    for seed in range(1500):
        session = sampled(seed, "rsd_c", "recursive_rejection", branching_vector=[2])
        shape = session.plan.shape
        assert shape is not None
        (draft,) = shape.build(TableDrafter(logits), [session], [Budget(1, 2)])
        first, second = draft.token_ids.tolist()
        counts[first, second] += 1
        assert draft.probs is not None
        ids, q = draft.probs.row(0)
        np.testing.assert_allclose(q, p[ids], rtol=1e-5)
        ids, q = draft.probs.row(1)
        assert first not in ids
        np.testing.assert_allclose(q, p[ids] / (1 - p[first]), rtol=1e-5)
    law = np.outer(p, p) / (1 - p)[:, None]
    np.fill_diagonal(law, 0.0)
    assert chi_square_p(counts.ravel(), law.ravel()) > ALPHA
    assert chi_square_p(counts.sum(1), p) > ALPHA


def test_draws_with_replacement_are_independent() -> None:
    logits = table(5, vocab=4, spread=1.0)
    p = logits.double().softmax(-1).numpy()
    roots, seconds = np.zeros((4, 4), np.int64), np.zeros((4, 4), np.int64)
    for seed in range(1500):
        session = sampled(seed, "iid", "k_seq", branching=2)
        (draft,) = IndependentSequences(2).build(TableDrafter(logits), [session], [Budget(2, 4)])
        assert draft.parent_indices.tolist() == [-1, -1, 0, 1]
        a, b, after_a, after_b = draft.token_ids.tolist()
        roots[a, b] += 1
        if a == b:
            seconds[after_a, after_b] += a == 0
        assert draft.probs is not None
        np.testing.assert_allclose(draft.probs.row(3)[1], p[b], rtol=1e-5)
    assert chi_square_p(roots.ravel(), np.outer(p[1], p[1]).ravel()) > ALPHA
    assert chi_square_p(seconds.ravel(), np.outer(p[0], p[0]).ravel()) > ALPHA


def test_draft_support_truncates_q() -> None:
    for rule, shape in (("k_seq", "iid"), ("recursive_rejection", "dyspec")):
        session = sampled(1, shape, rule, draft_support=2)
        assert session.plan.shape is not None
        (draft,) = session.plan.shape.build(TableDrafter(table(1)), [session], [Budget(3, 8)])
        assert draft.probs is not None
        for node, parent in enumerate(draft.parent_indices):
            before = int(draft.token_ids[parent]) if parent >= 0 else 1
            ids, q = draft.probs.row(node)
            assert set(ids) <= set(table(1)[before].topk(2).indices.tolist())
            assert q.sum() == pytest.approx(1.0)
            assert draft.token_ids[node] in ids


# --- the chain and its stop rule -----------------------------------------------------------------


@dataclass
class StopAt:
    depth: int
    wants_hidden: bool = True
    drops: bool = False
    steps: list[DraftStep] = field(default_factory=list)

    def stop_after(self, step: DraftStep) -> bool:
        self.steps.append(step)
        return step.depth >= self.depth


@pytest.mark.parametrize("params", [GREEDY, AT_ONE], ids=["greedy", "coupled"])
def test_a_stop_rule_ends_a_chain_after_the_token_it_saw(params: SamplingParams) -> None:
    session, rule = session_with(params), StopAt(2)
    session.length_controller.stop_rule = rule
    full = session_with(params)
    drafter = TableDrafter(table(2))
    draft, whole = chain().build(drafter, [session, full], [Budget(5, 5)] * 2)
    assert draft.token_ids.tolist() == whole.token_ids[:2].tolist()
    assert whole.num_nodes == 5
    assert [step.depth for step in rule.steps] == [1, 2]
    before = 1
    for step, token in zip(rule.steps, draft.token_ids.tolist(), strict=True):
        assert step.token_id == token == int(np.argmax(step.scores))
        assert step.hidden is not None
        assert step.hidden.item() == before
        before = token
    rule = StopAt(1, wants_hidden=False)
    session.length_controller.stop_rule = rule
    assert chain().build(drafter, [session], [Budget(5, 5)])[0].num_nodes == 1
    assert rule.steps[0].hidden is None


# --- templates -----------------------------------------------------------------------------------


def test_the_node_of_a_template_holds_the_ranks_of_its_path() -> None:
    paths = ((0,), (1,), (0, 2), (1, 0), (0, 2, 1))
    logits = table(7)
    order = logits.argsort(-1, descending=True)
    session = session_with(shape="template", template=[list(path) for path in paths])
    assert session.plan.config.num_speculative_tokens == 3
    assert session.plan.config.node_budget == 5
    (draft,) = Template(paths).build(TableDrafter(logits), [session], [Budget(3, 5)])
    expected = set()
    for path in paths:
        tokens = [1]
        for rank in path:
            tokens.append(int(order[tokens[-1], rank]))
        expected.add(tuple(tokens[1:]))
    assert set(token_paths(draft)) == expected


def test_a_smaller_budget_takes_the_first_nodes_that_are_not_too_deep() -> None:
    template, session = Template(TEMPLATES["medusa_63"]), session_with(shape="template")
    drafter = TableDrafter(table(7, vocab=12), None)
    (whole,) = template.build(drafter, [session], [Budget(4, 63)])
    (part,) = template.build(drafter, [session], [Budget(2, 9)])
    assert part.num_nodes == 9
    assert set(token_paths(part)) < set(token_paths(whole))


def test_the_shipped_templates_have_their_papers_sizes() -> None:
    medusa, recycling = TEMPLATES["medusa_63"], TEMPLATES["token_recycling_80"]
    assert len(set(medusa)) == 63
    assert max(map(len, medusa)) == 4
    assert max(map(max, medusa)) < 10  # Medusa's heads give ten candidates
    widths = [sum(len(path) == depth for path in recycling) for depth in range(1, 8)]
    assert widths == [8, 21, 25, 15, 8, 3, 0]
    assert max(map(max, recycling)) < 8  # a row of the matrix
    for paths in TEMPLATES.values():
        Template(paths)  # is a tree
        for path in paths:  # whatever a node's earlier siblings are, they are there
            assert all((*path[:-1], rank) in paths for rank in range(path[-1]))


def test_best_first_templates_are_optimal() -> None:
    acceptance = [[0.6, 0.3, 0.05], [0.5, 0.2, 0.1]]
    nodes = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]

    def value(paths: Sequence[tuple[int, ...]]) -> float:
        return sum(math.prod(acceptance[i][r] for i, r in enumerate(path)) for path in paths)

    for size in range(1, 7):
        trees = (
            tree
            for tree in itertools.combinations(nodes, size)
            if all(len(path) == 1 or path[:-1] in tree for path in tree)
        )
        assert value(best_first(acceptance, size)) == pytest.approx(max(map(value, trees)))


# --- EAGLE-2's tree ------------------------------------------------------------------------------


def test_confidence_tree_keeps_the_most_probable_paths() -> None:
    """With enough branching, the draft is the best of all trees: brute force."""
    for seed in range(5):
        logits = table(seed, vocab=4)
        log_q = logits.log_softmax(-1)
        session = session_with(shape="confidence", branching=4)
        (draft,) = ConfidenceTree(4).build(TableDrafter(logits), [session], [Budget(2, 7)])

        def value(path: tuple[int, ...], log_q: torch.Tensor = log_q) -> float:
            return sum(float(log_q[a, b]) for a, b in itertools.pairwise((1, *path)))

        every = [p for d in (1, 2) for p in itertools.product(range(4), repeat=d)]
        assert set(token_paths(draft)) == set(sorted(every, key=value, reverse=True)[:7])


def test_confidence_tree_expands_only_the_best_of_a_level() -> None:
    drafter = TableDrafter(table(0))
    session = session_with(shape="confidence", branching=3)
    (draft,) = ConfidenceTree(3).build(drafter, [session], [Budget(4, 60)])
    assert drafter.asked == [1, 3, 3, 3]
    assert draft.num_nodes == 3 + 9 + 9 + 9


@pytest.mark.parametrize("nodes", [1, 3, 12, 30])
def test_best_first_is_the_best_tree_of_its_size(nodes: int) -> None:
    """Brute force, for two sessions at once; each level takes one forward at most."""
    for seed in range(4):
        drafter = TableDrafter(table(seed, vocab=5, spread=1.0))
        log_q = drafter.logits.log_softmax(-1)
        sessions = [session_with(shape="best_first", branching=5) for _ in range(2)]
        drafts = BestFirst(5).build(drafter, sessions, [Budget(3, nodes), Budget(3, 2)])

        def value(path: tuple[int, ...], log_q: torch.Tensor = log_q) -> float:
            return sum(float(log_q[a, b]) for a, b in itertools.pairwise((1, *path)))

        every = [p for d in (1, 2, 3) for p in itertools.product(range(5), repeat=d)]
        best = sorted(every, key=value, reverse=True)
        for draft, size in zip(drafts, (nodes, 2), strict=True):
            assert set(token_paths(draft)) == set(best[:size])
        assert len(drafter.asked) <= 3
        assert max(drafter.asked) <= nodes + 2


# --- DySpec --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["coupled", "recursive_rejection"])
@pytest.mark.parametrize("params", [GREEDY, AT_ONE], ids=["greedy", "sampled"])
def test_dyspec_fills_slots_in_the_order_of_their_values(params: SamplingParams, rule: str) -> None:
    for seed in range(20):
        session = session_with(replace(params, seed=seed), shape="dyspec", acceptance=rule)
        (growth,) = DySpec(4).grow(TableDrafter(table(seed)), [session], [Budget(5, 12)])
        values = [value for (value,) in growth.tree.values]
        assert values[0] == 1.0
        assert all(a >= b - 1e-12 for a, b in itertools.pairwise(values))
        assert all(parent < node for node, parent in enumerate(growth.tree.parents))


def _slots(
    q_of_depth: Sequence[torch.Tensor], path: tuple[int, ...], token: int, reach: float
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Values of the slots of all levels, by the ranks of their paths."""
    left, (q, *deeper) = reach, q_of_depth
    for rank, follower in enumerate(q[token].argsort(descending=True).tolist()):
        yield (*path, rank), left
        if deeper:
            yield from _slots(deeper, (*path, rank), follower, reach * float(q[token, follower]))
        left -= reach * float(q[token, follower])


def _fixed_trees(
    paths: Sequence[tuple[int, ...]], most: int
) -> Iterator[frozenset[tuple[int, ...]]]:
    """Every tree of 1 to ``most`` nodes in which earlier siblings are there, each once."""
    level = {frozenset({(0,)})}
    for _ in range(most):
        yield from level
        level = {
            tree | {path}
            for tree in level
            for path in paths
            if path not in tree
            and (len(path) == 1 or path[:-1] in tree)
            and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in tree)
        }


@pytest.mark.parametrize(("vocab", "depth", "most"), [(3, 3, 5), (2, 4, 7)])
@pytest.mark.parametrize("params", [GREEDY, AT_ONE], ids=["greedy", "coupled"])
def test_dyspec_is_the_best_tree_of_its_size(
    params: SamplingParams, vocab: int, depth: int, most: int
) -> None:
    """No fixed tree of as many nodes has a higher sum of values: brute force over all of them.

    By the drafter's own probabilities, which are those of the noisy scores where the noise of the
    target decides.
    """
    for seed in range(4):
        logits, session = table(seed, vocab, 1.0 + seed), session_with(params, shape="dyspec")
        noise = [
            torch.from_numpy(gumbel(params.seed, session.length + level, vocab))
            for level in range(depth)
        ]
        scores = [logits + (each if params.temperature else 0.0) for each in noise]
        values = dict(_slots([each.softmax(-1) for each in scores], (), 1, 1.0))
        best: dict[int, float] = {}
        for tree in _fixed_trees(tuple(values), most):
            value = sum(values[path] for path in tree)
            best[len(tree)] = max(best.get(len(tree), 0.0), value)
        for size, highest in best.items():
            (growth,) = DySpec(vocab).grow(TableDrafter(logits), [session], [Budget(depth, size)])
            assert growth.tree.draft().num_nodes == size
            mine = sum(value for (value,) in growth.tree.values)
            assert mine == pytest.approx(highest, abs=1e-5)


@pytest.mark.parametrize("rule", ["coupled", "recursive_rejection"])
def test_dyspec_with_one_node_is_one_drafted_token(rule: str) -> None:
    """The token of a chain of one, drawn from the same distribution."""
    for seed in range(10):
        (one,) = chain().build(
            TableDrafter(table(0)), [sampled(seed, "chain", rule)], [Budget(1, 1)]
        )
        (same,) = DySpec(4).build(
            TableDrafter(table(0)), [sampled(seed, "dyspec", rule)], [Budget(6, 1)]
        )
        assert same.token_ids.tolist() == one.token_ids.tolist()
        assert same.num_nodes == 1
        assert (same.probs is None) == (one.probs is None) == (rule == "coupled")
        if same.probs is not None and one.probs is not None:
            for ours, theirs in zip(same.probs.row(0), one.probs.row(0), strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_dyspec_needs_few_forwards() -> None:
    drafter = TableDrafter(table(0, spread=1.0))
    (draft,) = DySpec(4).build(drafter, [session_with(shape="dyspec")], [Budget(8, 24)])
    assert draft.num_nodes == 24
    assert len(drafter.asked) <= 9
    assert sum(drafter.asked) <= 24


# --- recursive speculative decoding --------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.sampled_from(["rsd_c", "rsd_s", "dyspec", "kary"]),
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.integers(1, 16),
    st.sampled_from([None, 1, 2, 4]),
)
def test_siblings_are_drawn_without_replacement(
    shape: str, seed: int, depth: int, nodes: int, support: int | None
) -> None:
    """They are distinct, and each carries q without its earlier siblings, renormalised."""
    logits = table(seed % 7)
    session = sampled(seed, shape, "recursive_rejection", draft_support=support)
    assert session.plan.shape is not None
    (draft,) = session.plan.shape.build(TableDrafter(logits), [session], [Budget(depth, nodes)])
    assert draft.probs is not None
    for family in siblings(draft):
        tokens = draft.token_ids[family].tolist()
        assert len(set(tokens)) == len(tokens)
        parent = draft.parent_indices[family[0]]
        q = logits[draft.token_ids[parent] if parent >= 0 else 1].double().softmax(-1).numpy()
        left = set(np.argsort(-q)[: support or VOCAB].tolist())
        for node, token in zip(family, tokens, strict=True):
            ids, row = draft.probs.row(node)
            assert set(ids.tolist()) == left
            np.testing.assert_allclose(row, q[ids] / q[ids].sum(), rtol=1e-5)
            left.discard(token)


def test_a_branching_vector_gives_each_level_its_width() -> None:
    session = session_with(shape="rsd_c", branching_vector=[3, 1, 2])
    assert session.plan.shape == BranchingVector((3, 1, 2))
    assert session.plan.config.node_budget == 3 + 3 + 6
    (draft,) = BranchingVector((3, 1, 2)).build(TableDrafter(table(0)), [session], [Budget(9, 99)])
    assert np.bincount(depths(draft.parent_indices)).tolist() == [0, 3, 3, 6]


@pytest.mark.parametrize("rule", ["coupled", "recursive_rejection"])
def test_branching_of_one_is_a_chain(rule: str) -> None:
    for seed in range(5):
        one = BranchingVector((1, 1, 1)).build(
            TableDrafter(table(0)), [sampled(seed, "rsd_c", rule)], [Budget(3, 3)]
        )
        same = chain().build(TableDrafter(table(0)), [sampled(seed, "chain", rule)], [Budget(3, 3)])
        beam = StochasticBeam(1).build(
            TableDrafter(table(0)), [sampled(seed, "rsd_s", rule)], [Budget(3, 3)]
        )
        assert token_paths(one[0]) == token_paths(same[0]) == token_paths(beam[0])


def test_a_beam_without_noise_is_beam_search() -> None:
    logits = table(6)
    log_q = logits.log_softmax(-1)
    session = session_with(shape="rsd_s", branching=3)
    (draft,) = StochasticBeam(3).build(TableDrafter(logits), [session], [Budget(3, 9)])
    beam: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    expected: set[tuple[int, ...]] = set()
    for _ in range(3):
        grown = [
            (value + float(log_q[(1, *path)[-1], token]), (*path, token))
            for value, path in beam
            for token in range(VOCAB)
        ]
        beam = sorted(grown, reverse=True)[:3]
        expected |= {path for _, path in beam}
    assert set(token_paths(draft)) == expected


def test_stochastic_beams_are_sequences_drawn_without_replacement() -> None:
    """The first two pairs of tokens have the law of two draws without replacement."""
    logits = table(8, vocab=3, spread=1.0)
    q = logits.double().softmax(-1).numpy()
    law = np.array([q[1, a] * q[a, b] for a in range(3) for b in range(3)])
    counts = np.zeros((9, 9), np.int64)
    for seed in range(1500):
        session = sampled(seed, "rsd_s", "recursive_rejection", branching=2)
        (draft,) = StochasticBeam(2).build(TableDrafter(logits), [session], [Budget(2, 4)])
        pairs = [3 * path[0] + path[1] for path in token_paths(draft) if len(path) == 2]
        counts[pairs[0], pairs[1]] += 1
    pairs_law = np.outer(law, law) / (1 - law)[:, None]
    np.fill_diagonal(pairs_law, 0.0)
    assert chi_square_p(counts.ravel(), pairs_law.ravel()) > ALPHA


def test_conditional_gumbels_keep_the_order_below_the_maximum() -> None:
    values = [2.0, 1.5, -3.0, -40.0]
    moved = [conditional_gumbel(-1.0, 2.0, value) for value in values]
    assert moved[0] == -1.0
    assert all(a > b for a, b in itertools.pairwise(moved))
    direct = [-math.log(math.exp(1.0) - math.exp(-2.0) + math.exp(-value)) for value in values[1:]]
    np.testing.assert_allclose(moved[1:], direct, rtol=1e-9)


def test_at_temperature_0_independent_sequences_start_with_the_best_tokens() -> None:
    session = session_with(shape="iid", acceptance="k_seq")
    (draft,) = IndependentSequences(3).build(TableDrafter(table(0)), [session], [Budget(2, 6)])
    assert draft.token_ids[:3].tolist() == table(0)[1].topk(3).indices.tolist()
    assert draft.token_ids[3:].tolist() == table(0)[draft.token_ids[:3]].argmax(-1).tolist()
    assert draft.probs is not None


def test_every_way_of_drawing_has_a_shape_beside_the_chain() -> None:
    shapes = [part.make(session_with().plan.config) for part in SHAPES.values()]
    for draws in Draws:
        assert sum(draws in shape.draws for shape in shapes) >= 3
