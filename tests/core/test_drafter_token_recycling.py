"""Token Recycling: what the matrix holds, and what that is good for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.drafters.token_recycling import UNKNOWN, TokenRecycling
from paceline.plan import resolve
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.types import Budget, Draft, Outcome, Verification
from tests.core.engines import Reference, small_engine
from tests.modelzoo import VOCAB_SIZE

CONFIG = SpeculationConfig(method="token_recycling", length="fixed")
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPT = [70, 71, 72, 73]


class Watched(TokenRecycling):
    """Keeps, for every token, the logits that its row must come from."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.latest: dict[int, torch.Tensor] = {}
        self.num_rejected = 0

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        for session, outcome in zip(sessions, outcomes, strict=True):
            before = session.token_ids[: session.length - len(outcome.token_ids)]
            tokens = [before[-1], *outcome.draft.token_ids.tolist()]
            for token, row in zip(tokens, outcome.verification.logits, strict=True):
                self.latest[token] = row.clone()
            self.num_rejected += outcome.draft.num_nodes - outcome.num_accepted
        super().observe(sessions, outcomes)
        self.compare()

    def compare(self) -> None:
        for token, row in self.latest.items():
            assert self.matrix[token].tolist() == torch.topk(row, 8).indices.tolist()
        unseen = np.setdiff1d(np.arange(len(self.matrix)), list(self.latest))
        assert (self.matrix[unseen] == UNKNOWN).all()


def outcome_of(draft: Draft, logits: torch.Tensor) -> Outcome:
    """A round that committed one token, 0."""
    return Outcome(draft, (), 0, (0,), 0, Verification(logits))


def session_after(tokens: Sequence[int], params: SamplingParams = GREEDY) -> Session:
    return Session("s", tokens, params, resolve(CONFIG))


def test_the_matrix_is_v_by_8_and_small() -> None:
    matrix = TokenRecycling(32000).matrix
    assert matrix.shape == (32000, 8)
    assert matrix.nbytes < 2_000_000
    assert (matrix == UNKNOWN).all()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rows_of_all_nodes_are_the_top_8_of_their_logits(
    temperature: float, tiny_folder: Path
) -> None:
    """After every round of a batch, rejected nodes included; the last node of a token counts."""
    watched = Watched(VOCAB_SIZE)
    small = small_engine(tiny_folder, drafters={"token_recycling": watched})
    params = replace(GREEDY, temperature=temperature)
    small.engine.generate([PROMPT, [1, 2], [9]], params, CONFIG)
    assert watched.num_rejected > 100
    small.assert_nothing_is_left()


def test_of_several_nodes_with_one_token_the_last_one_counts() -> None:
    drafter = TokenRecycling(16)
    logits = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    draft = Draft(np.array([5, 7, 5]), np.array([-1, -1, 1], np.int32))
    drafter.observe([session_after([3, 0])], [outcome_of(draft, logits)])
    for token, row in ((3, 0), (7, 2), (5, 3)):
        assert drafter.matrix[token].tolist() == torch.topk(logits[row], 8).indices.tolist()


def test_an_unknown_token_has_no_successors() -> None:
    drafter = TokenRecycling(16)
    session = session_after([3])
    assert drafter.propose([session], [Budget(6, 80)])[0].num_nodes == 0


def test_excluded_tokens_and_small_vocabularies_leave_places_unknown() -> None:
    drafter = TokenRecycling(5)
    logits = torch.tensor([[0.0, 3.0, -torch.inf, 1.0, 2.0]])
    drafter.observe([session_after([4, 0])], [outcome_of(Draft.chain([]), logits)])
    assert drafter.matrix[4].tolist() == [1, 4, 3, 0, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN]
    draft = drafter.propose([session_after([4])], [Budget(1, 80)])[0]
    assert set(draft.token_ids.tolist()) <= {0, 1, 3, 4}
    assert np.isfinite(drafter.root([session_after([4])]).logits).all()


def test_a_node_has_the_children_that_its_row_lists() -> None:
    """Node (parent, j) holds the j-th entry of the row of its parent's token."""
    drafter = TokenRecycling(64)
    rng = np.random.default_rng(0)
    drafter.matrix[:] = np.stack([rng.permutation(64)[:8] for _ in range(64)])
    draft = drafter.propose([session_after([3])], [Budget(6, 80)])[0]
    assert draft.num_nodes == 80
    places: dict[int, int] = {}
    for token, parent in zip(draft.token_ids, draft.parent_indices.tolist(), strict=True):
        row = drafter.matrix[3 if parent < 0 else draft.token_ids[parent]]
        assert token == row[places.get(parent, 0)]
        places[parent] = places.get(parent, 0) + 1


def test_scores_follow_the_observed_distances_and_keep_the_order() -> None:
    drafter = TokenRecycling(8)
    logits = torch.tensor([[4.0, 3.0, 3.0, 1.0, 1.0, 1.0, 0.0, -1.0]])
    for _ in range(3):
        drafter.observe([session_after([2, 0])], [outcome_of(Draft.chain([]), logits)])
    scores = drafter.root([session_after([2])]).logits[0]
    np.testing.assert_allclose(scores, [0, -1, -1, -3, -3, -3, -4, -5], atol=1e-2)
    assert (np.diff(scores) < 0).all()


def test_the_matrix_survives_a_request(tiny_folder: Path, reference: Reference) -> None:
    """The same request again needs fewer forwards, and has AR's tokens both times."""
    engine = small_engine(tiny_folder).engine
    forwards = []
    for _ in range(2):
        session = engine.generate([PROMPT], GREEDY, CONFIG)[0]
        assert session.output_ids == reference(PROMPT, GREEDY)
        forwards.append(session.stats.num_target_forwards)
    assert forwards[1] < forwards[0]
