"""Sessions found again behind rows of tokens, as vLLM's batches come and go."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from paceline.config import SpeculationConfig
from paceline.deployments.engines.batch_drafting import (
    ABSENT_STEPS,
    BatchDrafting,
    DraftOptions,
    first_path,
)
from paceline.deployments.vllm_plan import chain_plan
from paceline.drafters.prompt_lookup import PromptLookup
from paceline.errors import InvalidArgument
from paceline.methods import METHODS
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.types import Budget, Draft

VOCAB, LENGTH, DEPTH = 12, 200, 4


@dataclass
class Request:
    """What the target says, given beforehand, and how far it has come."""

    name: str
    truth: list[int]
    length: int
    draft: list[int] = field(default_factory=list)
    unread: int = 0  # steps until the prompt is read

    @property
    def done(self) -> bool:
        return self.length >= len(self.truth)


class Batch:
    """vLLM's input batch: rows that are filled up from the end, preempted, and read in chunks."""

    def __init__(self, size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.rows: list[Request] = []
        self.preempted: list[Request] = []
        self.tokens = np.zeros((size, LENGTH), np.int32)
        self.lengths = np.zeros(size, np.int32)
        self.size = size
        self.num_begun = 0

    def begin(self, period: int | None = None) -> None:
        period = period or self.random.randint(2, 6)
        unit = [self.random.randrange(VOCAB) for _ in range(period)]
        truth = [self.random.choice([*unit, *unit, i % VOCAB]) for i in range(30)] + unit * 10
        self.num_begun += 1
        length = self.random.randint(1, 20)
        self.rows.append(Request(f"r{self.num_begun}", truth, length, unread=1))

    def step(self) -> list[list[int]]:
        """Move requests between rows, verify the drafts of the others; the tokens of each row."""
        self.rows = [request for request in self.rows if not request.done]
        if len(self.rows) > 1 and self.random.random() < 0.2:
            self.preempted.append(self.rows.pop(self.random.randrange(len(self.rows))))
        if len(self.rows) > 2 and self.random.random() < 0.3:  # the last row fills a hole
            self.rows.insert(0, self.rows.pop())
        while len(self.rows) < self.size:
            if self.preempted and self.random.random() < 0.5:
                back = self.preempted.pop(0)
                back.unread, back.draft = self.random.randint(0, 2), []
                self.rows.append(back)
            elif self.random.random() < 0.6:
                self.begin()
            else:
                break
        sampled: list[list[int]] = []
        for i, request in enumerate(self.rows):
            new: list[int] = []
            if request.unread:
                request.unread -= 1
            else:
                rest = request.truth[request.length :]
                matched = 0
                while matched < min(len(request.draft), len(rest) - 1) and (
                    request.draft[matched] == rest[matched]
                ):
                    matched += 1
                new = rest[: matched + 1]
                request.length += len(new)
            self.tokens[i, : request.length] = request.truth[: request.length]
            self.lengths[i] = request.length
            sampled.append(new)
        return sampled


def drafting(method: str = "prompt_lookup", **knobs: object) -> BatchDrafting:
    config = SpeculationConfig(**{"method": method, "length": "fixed", **knobs})  # type: ignore[arg-type]
    return BatchDrafting(config, vocab_size=VOCAB, max_length=LENGTH, max_depth=DEPTH)


def expected(tokens: Sequence[int]) -> list[int]:
    """What prompt lookup drafts that has only ever seen these tokens."""
    plan = chain_plan(SpeculationConfig(method="prompt_lookup"), DEPTH)
    session = Session("s", list(tokens), SamplingParams(), plan)
    drafter = PromptLookup()
    drafter.open(session)
    depth = min(DEPTH, LENGTH - len(tokens) - 1)
    (draft,) = drafter.propose([session], [Budget(depth, depth)])
    return draft.token_ids.tolist()


@pytest.mark.one_of(3)
@pytest.mark.parametrize("told", [False, True], ids=["rows alone", "with request ids"])
@pytest.mark.parametrize("seed", range(8))
def test_each_row_is_drafted_for_from_its_own_tokens(seed: int, told: bool) -> None:
    """Rows that are reused, moved, preempted and filled in chunks: never another one's state."""
    rows, batch = drafting(), Batch(4, seed)
    num_drafted = 0
    for _ in range(150):
        sampled = batch.step()
        owners = [request.name for request in batch.rows] if told else []
        over = {r.name for r in (*batch.rows, *batch.preempted)}
        drafts = rows.propose(
            sampled, batch.lengths, batch.tokens, owners, is_over=lambda name, o=over: name not in o
        )
        for i, request in enumerate(batch.rows):
            request.draft = drafts[i]
            if not sampled[i]:
                assert drafts[i] == []
                continue
            assert drafts[i] == expected(request.truth[: request.length])
            num_drafted += len(drafts[i])
        assert rows.num_sessions <= 4 + ABSENT_STEPS * 4
    assert num_drafted > 200
    assert batch.num_begun > 20


def test_a_session_is_kept_over_a_preemption_and_given_up_after_a_while() -> None:
    rows = drafting()
    tokens = np.zeros((2, LENGTH), np.int32)
    tokens[0, :9] = tokens[1, :9] = [1, 2, 3, 4, 1, 2, 3, 4, 1]
    tokens[1, 0] = 7
    lengths = np.array([5, 5])
    rows.propose([[1], [1]], lengths, tokens)
    assert rows.num_sessions == 2
    first = rows._rows[0].session
    for length in range(6, 8):  # the first request is gone: the second has its row now
        rows.propose([[tokens[1, length - 1]]], np.array([length]), tokens[1:])
    assert rows.num_sessions == 2
    assert rows._rows[0].session is not first
    tokens[0, 5:7] = [2, 3]
    rows.propose([[2, 3], [4]], np.array([7, 8]), tokens)
    assert rows._rows[0].session is first
    for _ in range(ABSENT_STEPS + 1):
        lengths = np.array([lengths[0] + 1])
        rows.propose([[1]], np.array([9]), tokens[1:])
        tokens[1, 8] += 1  # looks like another request each time
    assert first not in [row.session for row in (*rows._rows.values(), *rows._parked)]


def test_a_request_that_has_ended_is_closed_at_once() -> None:
    rows = drafting()
    tokens = np.tile(np.arange(LENGTH, dtype=np.int32) % 3, (2, 1))
    rows.propose([[1], [1]], np.array([5, 5]), tokens, ["a", "b"])
    rows.propose([[1]], np.array([6]), tokens, ["b"], is_over=lambda name: name == "a")
    assert rows.num_sessions == 1
    assert rows._rows[0].owner == "b"


def test_equal_rows_of_two_requests_keep_their_own_options() -> None:
    rows = drafting()
    tokens = np.tile(np.arange(LENGTH, dtype=np.int32) % 3, (2, 1))
    options = [DraftOptions(SpeculationConfig(method="ar")), DraftOptions()]
    for length in range(6, 12):
        turn = length % 2  # they change places all the time
        owners = ["ar", "lookup"] if turn == 0 else ["lookup", "ar"]
        drafts = rows.propose(
            [[1], [1]], np.array([length, length]), tokens, owners,
            lambda i, turn=turn: options[(i + turn) % 2],
        )  # fmt: skip
        by_owner = dict(zip(owners, drafts, strict=True))
        assert by_owner["ar"] == []
        assert by_owner["lookup"] == tokens[0, length : length + 3].tolist()


def test_what_a_request_may_still_generate_bounds_its_draft() -> None:
    rows = drafting()
    tokens = np.tile(np.arange(LENGTH, dtype=np.int32) % 3, (1, 1))
    (draft,) = rows.propose(
        [[1]], np.array([10]), tokens, [], lambda i: DraftOptions(max_length=13)
    )
    assert len(draft) == 2  # and a token of the target's own
    (draft,) = drafting().propose([[1]], np.array([LENGTH - 1]), tokens)
    assert draft == []


def test_predicted_outputs_become_the_draft() -> None:
    rows = drafting("predicted_outputs")
    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, :5] = [9, 8, 7, 1, 2]
    options = DraftOptions(prediction=(1, 2, 3, 4, 5, 6), prompt_length=3)
    (draft,) = rows.propose([[2]], np.array([5]), tokens, [], lambda i: options)
    assert draft == [3, 4, 5, 6]


def test_token_recycling_learns_from_tokens_alone() -> None:
    rows = drafting("token_recycling", length="fixed")
    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, :8] = [1, 2, 3, 4, 1, 2, 3, 4]
    rows.propose([[3]], np.array([7]), tokens)
    (draft,) = rows.propose([[4]], np.array([8]), tokens)
    assert draft == [1, 2, 3, 4]


@pytest.mark.parametrize("length", ["goodput", "heuristic", "bass"])
def test_length_controllers_choose(length: str) -> None:
    rows = drafting(length=length)
    tokens = np.tile(np.arange(LENGTH, dtype=np.int32) % 3, (1, 1))
    lengths = []
    at = 10
    for _ in range(12):
        (draft,) = rows.propose([[1]], np.array([at]), tokens)
        lengths.append(len(draft))
        at += len(draft) + 1
    assert max(lengths) > 0


@pytest.mark.parametrize("method", METHODS)
def test_each_method_runs_as_a_chain_or_says_why_not(method: str) -> None:
    row = METHODS[method]
    config = SpeculationConfig(method=method, allow_lossy=not row.lossless)
    if row.needs - row.optional_needs or row.acceptance != "coupled":
        with pytest.raises(InvalidArgument, match="vLLM") as caught:
            chain_plan(config, DEPTH)
        assert caught.value.field in ("acceptance", "method")
    else:
        assert chain_plan(config, DEPTH).rule.chain_only
        assert row.lossless


def test_what_vllm_cannot_do_is_refused() -> None:
    for knobs, name, text in (
        ({"method": "draft_model", "shape": "kary"}, "shape", "no trees"),
        ({"method": "prompt_lookup", "num_speculative_tokens": 9}, "num_speculative_tokens", "4"),
        ({"method": "eagle"}, "method", "hidden_states"),
        ({"method": "speculative_sampling"}, "acceptance", "rule of its own"),
    ):
        with pytest.raises(InvalidArgument, match=text) as caught:
            chain_plan(SpeculationConfig(**knobs), DEPTH)  # type: ignore[arg-type]
        assert caught.value.field == name
    with pytest.raises(InvalidArgument, match="is not"):
        drafting("draft_model")


def test_the_best_branch_of_a_tree() -> None:
    tree = Draft(np.array([5, 6, 7, 8, 9]), np.array([-1, -1, 0, 0, 2]))
    assert first_path(tree, 4).token_ids.tolist() == [5, 7, 9]
    assert first_path(tree, 2).token_ids.tolist() == [5, 7]
    assert first_path(Draft.chain(np.array([1, 2, 3])), 2).token_ids.tolist() == [1, 2]


def test_options_that_cannot_be_met_are_no_drafts() -> None:
    rows = drafting()
    tokens = np.tile(np.arange(LENGTH, dtype=np.int32) % 3, (1, 1))
    options = DraftOptions(SpeculationConfig(method="draft_model"))  # not loaded here
    assert rows.propose([[1]], np.array([10]), tokens, ["r"], lambda i: options) == [[]]


def test_a_drafter_that_fails_leaves_its_rows_as_ar() -> None:
    class Broken(PromptLookup):
        def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
            raise RuntimeError("broken")

    config = SpeculationConfig(length="fixed", method="prompt_lookup")
    rows = BatchDrafting(
        config, vocab_size=VOCAB, max_length=LENGTH, max_depth=DEPTH,
        drafters={"prompt_lookup": Broken()},
    )  # fmt: skip
    tokens = np.tile(np.arange(LENGTH, dtype=np.int32) % 3, (1, 1))
    for length in range(6, 10):
        assert rows.propose([[1]], np.array([length]), tokens) == [[]]
    assert rows._rows[0].session.stats.drafter_lost
