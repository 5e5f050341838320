"""Trees of the shape ``sequoia`` follow what sessions count of their drafter's candidates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.drafters.base import Drafter, grow
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.lengths.base import LengthContext
from paceline.lengths.experience import (
    PRIOR_DRAFTS,
    Experience,
    RankRates,
    experience_of,
)
from paceline.loading import load_engine
from paceline.methods import METHODS, Method
from paceline.plan import resolve
from paceline.profile import weights_digest
from paceline.sampling import SamplingParams
from paceline.shapes.base import SparseRows
from paceline.shapes.sequoia import FIRST_RATES, sequoia_paths
from paceline.shapes.template import Template
from paceline.target import ModelTarget
from paceline.types import Budget, Draft, Need
from paceline.view import SessionView
from tests.core.engines import Reference, small_engine
from tests.core.prompts import code_prompts
from tests.core.scripted import ScriptedRunner, chaotic, run, spoken

VOCAB_SIZE = 40
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=3)


# --- counting -------------------------------------------------------------------------------------


def tree_of(*parents: int) -> Draft:
    return Draft(np.zeros(len(parents), np.int64), np.array(parents, np.int32))


def test_only_what_follows_accepted_tokens_is_counted() -> None:
    ranks = RankRates()
    tree = tree_of(-1, -1, 0, 0, 1)  # 0 has children 2 and 3, 1 has child 4
    for path in (0, 3), (1,), ():
        ranks.observe(tree, path)
    offered, right = ranks.seen
    # Rank 0: node 0 thrice and right once, nodes 2 and 4 once. Rank 1: node 1 thrice and right
    # once, node 3 once and right. Children of a rejected node say nothing.
    assert np.round(offered).tolist() == [5, 4, 0, 0, 0, 0]
    assert np.round(right).tolist() == [1, 2, 0, 0, 0, 0]
    ranks.observe(Draft.chain(()), ())
    assert ranks.seen == (offered, right)


def test_the_rates_are_found_that_it_is_shown() -> None:
    rng = np.random.default_rng(0)
    rates = [0.45, 0.3]
    ranks = RankRates()
    for _ in range(4000):
        path: list[int] = []
        for first in (0, 2):  # nodes 2 and 3 follow node 0
            child = rng.choice(3, p=[*rates, 1 - sum(rates)])
            if child == 2:
                break
            path.append(first + int(child))
            if child == 1:
                break
        ranks.observe(tree_of(-1, -1, 0, 0), path)
    np.testing.assert_allclose(ranks.rates()[:2], rates, atol=0.03)
    assert ranks.rates()[2:] == FIRST_RATES[2:]  # of which nothing is known


def test_the_first_rates_count_as_some_drafts() -> None:
    ranks = RankRates()
    assert ranks.rates() == FIRST_RATES
    for _ in range(8):
        ranks.observe(tree_of(-1), ())
    known = FIRST_RATES[0] * PRIOR_DRAFTS / (8 + PRIOR_DRAFTS)
    assert ranks.rates()[0] == pytest.approx(known, abs=0.006)


def test_together_they_are_at_most_certain() -> None:
    ranks = RankRates()
    for _ in range(2000):
        ranks.observe(tree_of(-1), (0,))
    assert sum(ranks.rates()) <= 1.0
    assert ranks.rates()[0] > 0.98


def test_no_rank_is_likelier_than_the_one_before() -> None:
    ranks = RankRates()
    for _ in range(400):
        ranks.observe(tree_of(-1, -1, -1), (2,))
    rates = ranks.rates()
    assert list(rates) == sorted(rates, reverse=True)
    for nodes in range(1, 9):  # cut to any size, siblings stand in the order of their ranks
        paths = sequoia_paths(rates, 8, 3)[:nodes]
        assert all(p[-1] == 0 or (*p[:-1], p[-1] - 1) in paths for p in paths)


# --- trees ----------------------------------------------------------------------------------------


class Ranked(Drafter):
    """Knows the target's tokens, and has the right one at a rank of its choice."""

    def __init__(self, expected: Sequence[int], rank: int) -> None:
        self._expected, self.rank = list(expected), rank
        self._places: dict[int, int] = {}

    def _row(self, place: int) -> list[int]:
        right = self._expected[place] if place < len(self._expected) else 0
        wrong = [token for token in range(VOCAB_SIZE) if token != right][:5]
        return [*wrong[: self.rank], right, *wrong[self.rank :]]

    def _rows(self, places: Sequence[int]) -> SparseRows:
        ids = np.array([self._row(place) for place in places], np.int64)
        return SparseRows(ids, np.tile(-np.arange(6.0), (len(ids), 1)).astype(np.float32))

    def root(self, sessions: Sequence[SessionView]) -> SparseRows:
        (session,) = sessions
        self._places = {-1: session.length}
        return self._rows([session.length])

    def expand(
        self, sessions: Sequence[SessionView], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> SparseRows:
        for node, _, parent in frontiers[0]:
            self._places[node] = self._places[parent] + 1
        return self._rows([self._places[node] for node, _, _ in frontiers[0]])

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        return grow(self, sessions, budgets)


RANKED = Method(
    name="ranked", paper="for tests", summary="Right at a rank.", drafter="ranked",
    shape="sequoia", acceptance="coupled", length="fixed",
    defaults={"num_speculative_tokens": 3, "node_budget": 6},
)  # fmt: skip


def ranked_engine(expected: Sequence[int], rank: int, **options: Any) -> Engine:
    target = ModelTarget(ScriptedRunner(chaotic(VOCAB_SIZE), VOCAB_SIZE))  # type: ignore[arg-type]
    drafters = {"ranked": Ranked(expected, rank)}
    return Engine(target, drafters, catalogue={**METHODS, "ranked": RANKED}, **options)


PROMPT = [1, 2, 3]
EXPECTED = [*PROMPT, *spoken(chaotic(VOCAB_SIZE), PROMPT, 130)]
PARAMS = SamplingParams(max_tokens=120, ignore_eos=True)
MEASURED = SpeculationConfig(method="ranked")


@pytest.mark.parametrize("rank", [0, 2])
def test_later_sessions_get_the_tree_of_what_was_counted(rank: int) -> None:
    """A drafter whose third candidate is right gets wide trees, one that is right a chain."""
    engine = ranked_engine(EXPECTED, rank)
    lengths = []
    for _ in range(3):
        session, _ = run(engine, PROMPT, PARAMS, MEASURED)
        assert session.output_ids == EXPECTED[3:123]
        lengths.append(session.stats.mean_accepted_length)
    assert session.ranks is not None
    assert isinstance(session.shape, Template)
    paths = session.shape.paths
    assert paths == sequoia_paths(session.config.rank_acceptance, 6, 3)  # type: ignore[attr-defined]
    assert ((0, 0, 0) in paths) is (rank == 0)
    assert (2,) in paths or rank == 0
    assert lengths[-1] > lengths[0] or (rank == 0 and lengths[-1] >= lengths[0] > 3.5)


def test_a_list_stays_as_it_is_and_is_not_learnt_from() -> None:
    engine = ranked_engine(EXPECTED, 2)
    given = MEASURED.model_copy(update={"rank_acceptance": (0.9,)})
    session, _ = run(engine, PROMPT, PARAMS, given)
    assert session.ranks is None
    assert session.config.rank_acceptance == (0.9,)  # type: ignore[attr-defined]
    assert experience_of(engine.length_context).document()["ranks"] == []
    assert resolve(given, {"ranked": RANKED}).measures_ranks is False


def test_the_tree_travels_with_the_config() -> None:
    """Where the drafter is elsewhere, it gets the same tree: from the knob, not from counts."""
    engine = ranked_engine(EXPECTED, 2)
    run(engine, PROMPT, PARAMS, MEASURED)
    session, _ = run(engine, PROMPT, PARAMS, MEASURED)
    given = session.config.overrides()
    assert given["rank_acceptance"] != FIRST_RATES
    there = resolve(SpeculationConfig.model_validate(given), {"ranked": RANKED})
    assert there.shape == session.shape


def test_what_controllers_learn_does_not_depend_on_rates() -> None:
    """Sessions whose trees differ a little still share their controllers' knowledge."""
    keys: set[object] = set()

    class Watched(LengthContext):
        def shared(self, key: Any, make: Any) -> Any:
            keys.add(key)
            return super().shared(key, make)

    plan = resolve(SpeculationConfig(method="sequoia"))
    context = Watched()
    for rates in (0.5, 0.2), (0.6, 0.1):
        plan.with_ranks(rates).new_length_controller(context)
    assert len(keys) == 1


def test_constrained_sessions_do_not_count(demo: Engine) -> None:
    """A constraint takes nodes out of drafts, and siblings move up."""
    engine = demo.sibling()
    params = SamplingParams(max_tokens=12, regex="[a-z ]+")
    assert engine.tokenizer is not None
    session, _ = run(engine, engine.tokenizer.encode("def "), params,
                     SpeculationConfig(method="sequoia"))  # fmt: skip
    assert session.ranks is None


def test_ranks_are_kept_apart() -> None:
    """By drafter, its weights, and how candidates are chosen."""
    names = {"medusa": "one"}
    context = LengthContext(weights_of=lambda drafter: names.get(drafter, ""))
    engine = ranked_engine(EXPECTED, 2, length_context=context)
    intake = engine.intake
    plan = resolve(SpeculationConfig(method="medusa"))
    first = intake._ranks(plan, PARAMS)
    assert first is intake._ranks(plan, PARAMS)
    assert first is not intake._ranks(plan, replace(PARAMS, temperature=0.5))
    assert first is not intake._ranks(resolve(SpeculationConfig(method="hydra")), PARAMS)
    names["medusa"] = "two"
    assert first is not intake._ranks(plan, PARAMS)
    chain = SpeculationConfig(method="medusa", shape="chain")
    assert intake._ranks(resolve(chain), PARAMS) is None


def test_weights_are_told_apart_that_differ_in_a_number(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = {"first": torch.zeros(40_000), "last": torch.zeros(40_000)}
    digests = []
    for value in 0.0, 1.0:
        weights["last"][-1] = value
        save_file(weights, tmp_path / "model.safetensors")
        digests.append(weights_digest(tmp_path))
    assert digests[0] != digests[1]


# --- what outlives an engine ----------------------------------------------------------------------


def test_ranks_outlive_their_engine() -> None:
    engine = ranked_engine(EXPECTED, 2)
    session, _ = run(engine, PROMPT, PARAMS, MEASURED)
    assert session.ranks is not None
    document = json.loads(json.dumps(experience_of(engine.length_context).document()))
    later = ranked_engine(EXPECTED, 2)
    experience_of(later.length_context).merge(document)
    begins, _ = run(later, PROMPT, PARAMS, MEASURED)
    assert begins.config.rank_acceptance == session.ranks.rates()  # type: ignore[attr-defined]
    assert begins.config.rank_acceptance != FIRST_RATES  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "ranks",
    [
        [["medusa", "", "argmax", [1.0], [1.0]]],
        [["medusa", "", "argmax", [1.0] * 6, [2.0] * 6]],
        [["medusa", "", "argmax", [1.0] * 6]],
    ],
)
def test_damaged_ranks_are_refused(ranks: Any) -> None:
    experience = Experience()
    document = {"version": 2, "rates": [], "goes_on": [], "roster": [], "ranks": ranks}
    with pytest.raises(InvalidArgument, match="experience"):
        experience.merge(document)
    assert experience.document() == Experience().document()
    experience.merge({key: value for key, value in document.items() if key != "ranks"})


# --- exact ----------------------------------------------------------------------------------------


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("method", ["sequoia", "stand", "medusa", "hydra", "chimera", "falcon"])
def test_tokens_stay_those_of_ar_while_trees_change(
    tiny_folder: Path, reference: Reference, method: str
) -> None:
    """Session after session, with the draft model right and heads that know nothing."""
    small = small_engine(tiny_folder)
    config = SpeculationConfig(method=method, length="fixed", node_budget=12)
    trees = set()
    for seed in range(4):
        prompt = [5 + seed, 9, 2 * seed]
        for params in SamplingParams(max_tokens=24, ignore_eos=True), SAMPLED:
            (session,) = small.engine.generate([prompt], params, config)
            assert session.output_ids == reference(prompt, params)
            trees.add(session.shape)
    assert len(trees) > 1
    small.assert_nothing_is_left()


def test_the_demo_pair_learns_its_own_ranks() -> None:
    """As `paceline generate` runs it: from one session to the next."""
    engine = load_engine()
    assert engine.tokenizer is not None
    prompts = code_prompts(engine.tokenizer, 3, seed=1)
    config = SpeculationConfig(method="medusa", length="fixed")
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    for prompt in prompts:
        (session,) = engine.generate([prompt], params, config)
    assert session.ranks is not None
    key, *counts = experience_of(engine.length_context).document()["ranks"][0][:2]
    assert key == "medusa"
    assert counts != [""]  # the weights' digest
    assert session.ranks.rates() != FIRST_RATES
    assert Need.HIDDEN_STATES in session.needs
