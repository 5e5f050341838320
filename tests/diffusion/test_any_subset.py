"""ASSD: the any-subset model's conditionals, and the law and cost of its speculative sampler."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from paceline.demo import TARGET_DIR
from paceline.diffusion.any_subset import (
    MASK,
    AnySubsetModel,
    Infilled,
    SeededDice,
    infill,
    with_gaps,
)
from paceline.diffusion.train_any_subset import LENGTH, config, order_loss, random_order, untrained
from paceline.errors import InvalidArgument, ModelNotFound

SIZE = 3


class Table:
    """Random conditionals over three tokens: of a position, given any set of others."""

    vocab_size = SIZE

    def logits(
        self, tokens: Sequence[int], order: Sequence[int], first: int, count: int, *, joint: bool
    ) -> torch.Tensor:
        rows = []
        for place in range(first, first + count):
            known = order[: place if joint else first]
            rows.append(self.row(order[place], {at: tokens[at] for at in known}))
        return torch.stack(rows)

    def row(self, position: int, known: dict[int, int]) -> torch.Tensor:
        seed = hash((position, *sorted(known.items()))) % 2**31
        return 1.5 * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


class Branch:
    """Dice that follow a path of decisions, note the probability of it, and what else there is."""

    def __init__(self, path: Sequence[int]) -> None:
        self.path, self.probability = list(path), 1.0
        self.choices: list[int] = []  # how many outcomes each decision has

    def _decide(self, probs: list[float]) -> int:
        place = len(self.choices)
        if place == len(self.path):
            self.path.append(0)
        self.choices.append(len(probs))
        self.probability *= probs[self.path[place]]
        return self.path[place]

    def draw(self, probs: torch.Tensor) -> int:
        return self._decide(probs.tolist())

    def accept(self, probability: float) -> bool:
        return self._decide([1 - probability, probability]) == 1


def all_branches(run: Callable[[Branch], Infilled]) -> list[tuple[Infilled, float]]:
    """Every outcome of the sampler with its exact probability."""
    found, path = [], list[int]()
    while True:
        branch = Branch(path)
        result = run(branch)
        found.append((result, branch.probability))
        path = branch.path
        while path and path[-1] + 1 == branch.choices[len(path) - 1]:
            path.pop()
        if not path:
            return found
        path[-1] += 1


@pytest.mark.parametrize(
    ("text", "order", "draft_tokens"),
    [
        ([None, None, None], None, 2),
        ([None, None, None], [2, 0, 1], 3),
        ([None, 1, None, None], [3, 2, 0], 3),
        ([0, None, None, None, None], [4, 1, 3, 2], 2),
    ],
)
def test_the_joint_law_is_that_of_one_token_at_a_time(
    text: list[int | None], order: list[int] | None, draft_tokens: int
) -> None:
    """Enumerated over everything that the dice can say, against the order's chain rule."""
    table = Table()
    outcomes = all_branches(
        lambda dice: infill(table, text, order=order, draft_tokens=draft_tokens, dice=dice)
    )
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for result, probability in outcomes:
        law[tuple(result.token_ids)] += probability
    gaps = order or [place for place, token in enumerate(text) if token is None]
    for filled in itertools.product(range(SIZE), repeat=len(gaps)):
        known = {place: token for place, token in enumerate(text) if token is not None}
        expected = 1.0
        for place, token in zip(gaps, filled, strict=True):
            expected *= float(table.row(place, known).double().softmax(-1)[token])
            known[place] = token
        whole = tuple(known[place] for place in range(len(text)))
        assert law[whole] == pytest.approx(expected, abs=1e-9)


def test_a_forward_writes_at_least_a_token_in_every_branch() -> None:
    """And the first drafted token is always accepted, so two forwards write two tokens or more."""
    text: list[int | None] = [None] * 4
    for result, probability in all_branches(
        lambda dice: infill(Table(), text, draft_tokens=3, dice=dice)
    ):
        if probability > 0:
            assert result.forwards <= result.tokens == 4
            assert min(result.accepted) >= 1


# --- the model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> AnySubsetModel:
    return AnySubsetModel(untrained(config(2, 64), seed=1))


def test_the_first_tokens_conditional_is_the_same_in_both_forwards(model: AnySubsetModel) -> None:
    tokens, order = list(range(60, 80)), [7, 3, 12, 0, 19, 5, 1, 2, 4]
    drafted = model.logits(tokens, order, 4, 5, joint=False)
    joint = model.logits(tokens, order, 4, 5, joint=True)
    torch.testing.assert_close(drafted[0], joint[0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(drafted[1], joint[1], atol=1e-2)
    assert joint[:, MASK:].eq(-torch.inf).all()  # no text has these


def test_a_conditional_sees_what_is_before_it_in_the_order_and_nothing_else(
    model: AnySubsetModel,
) -> None:
    tokens, order = list(range(60, 80)), [7, 3, 12, 0, 19, 5]
    whole = model.logits(tokens, order, 2, 4, joint=True)
    for place, row in zip(range(2, 6), whole, strict=True):
        alone = model.logits(tokens, order, place, 1, joint=False)
        torch.testing.assert_close(row, alone[0], atol=1e-4, rtol=1e-4)
        before = list(tokens)
        before[order[place - 1]] += 1
        assert not torch.allclose(model.logits(before, order, place, 1, joint=False), alone)
        after = list(tokens)
        for later in (*order[place:], 1, 2):
            after[later] += 1
        assert torch.equal(model.logits(after, order, place, 1, joint=False), alone)


def test_the_loss_is_the_chain_rule_of_each_rows_order(model: AnySubsetModel) -> None:
    """What the packed forward of training computes, token by token."""
    import random

    rng = random.Random(0)
    tokens = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    orders = [random_order(12, rng) for _ in range(2)]
    assert orders[0] != orders[1]
    loss = order_loss(model.model, tokens, orders)
    total = 0.0
    for row, order in zip(tokens.tolist(), orders, strict=True):
        for place in range(12):
            seen = [row[at] for at in order[:place]]
            ids = torch.tensor([[*seen, MASK]])
            mask = torch.ones(place + 1, place + 1, dtype=torch.bool).tril()
            positions = torch.tensor(order[: place + 1])
            states, _ = model.model.forward(ids, positions, mask)
            logits = model.model.logits(states[0, -1])
            total -= float(logits.log_softmax(-1)[row[order[place]]])
    assert loss.item() == pytest.approx(total / 24, rel=1e-3)


@pytest.mark.parametrize("draft_tokens", [2, 4, 10])
def test_the_most_probable_tokens_are_those_of_one_at_a_time(
    model: AnySubsetModel, draft_tokens: int
) -> None:
    text: list[int | None] = [65, None, None, 66, None, None, None, 67, None, None]
    order = [4, 1, 9, 2, 8, 5, 6]
    alone = infill(model, text, order=order, draft_tokens=1, temperature=0.0)
    drafted = infill(model, text, order=order, draft_tokens=draft_tokens, temperature=0.0)
    assert drafted.token_ids == alone.token_ids
    assert alone.forwards == 7
    assert drafted.forwards <= 7
    assert MASK not in drafted.token_ids


def test_equal_seeds_give_equal_texts(model: AnySubsetModel) -> None:
    text: list[int | None] = [65, *[None] * 9]
    first, same, other = (infill(model, text, dice=SeededDice(seed)) for seed in (1, 1, 2))
    assert first.token_ids == same.token_ids != other.token_ids
    assert first.forwards <= 9


def test_the_model_that_ships_copies_in_fewer_forwards_than_tokens() -> None:
    shipped = AnySubsetModel.load()
    assert shipped.context_length == LENGTH
    text: list[int | None] = list(b"copy: c f a b -> ") + [None] * 7
    result = infill(shipped, text, temperature=0.0)
    alone = infill(shipped, text, temperature=0.0, draft_tokens=1)
    assert result.token_ids == alone.token_ids
    assert result.forwards < alone.forwards == 7


def test_bad_values_are_named(model: AnySubsetModel, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="draft_tokens"):
        infill(model, [None], draft_tokens=0)
    with pytest.raises(InvalidArgument, match="temperature"):
        infill(model, [None], temperature=-1.0)
    with pytest.raises(InvalidArgument, match="order"):
        infill(model, [None, 65, None], order=[0, 1])
    for text, blank, longest in (("a_", "__", 9), ("ab", "_", 9), ("ä__", "_", 3)):
        with pytest.raises(InvalidArgument, match=r"blank|text"):
            with_gaps(text, blank, longest)
    assert with_gaps("ä_", "_", 3) == [0xC3, 0xA4, None]
    with pytest.raises(ModelNotFound, match="any_subset"):
        AnySubsetModel.load(TARGET_DIR)
    with pytest.raises(ModelNotFound, match="does not exist"):
        AnySubsetModel.load(tmp_path)
