"""Falcon: blocks of tokens in each pass of the head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.errors import InvalidArgument
from paceline.models.heads.base import HeadTarget, load_head
from paceline.models.heads.eagle import Eagle, EagleOptions
from paceline.models.heads.falcon import Falcon, FalconOptions, relaxed_mask
from tests.core.toy_heads import (
    accepted_length,
    check_end_of_context,
    decode,
    demo_runner,
    demo_target,
    drafted_logits,
    evaluate,
    random_head,
    read,
    texts,
    train,
)

IDS = list(range(40, 54))


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> HeadTarget:
    return HeadTarget.from_folder(tiny_folder)


@pytest.fixture
def features(target: HeadTarget) -> torch.Tensor:
    size = target.config.hidden_size
    return torch.randn(len(IDS), size, generator=torch.Generator().manual_seed(0))


def ready(target: HeadTarget, folder: Path, **options: int) -> Falcon:
    """A random head as it is loaded to draft."""
    random_head(Falcon, target, FalconOptions(**options)).save(folder)
    return load_head(Falcon, folder, target)


@pytest.mark.parametrize(("block", "phase"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 2)])
def test_a_place_sees_its_block_and_earlier_ones(
    block: int, phase: int, target: HeadTarget, features: torch.Tensor
) -> None:
    length = len(IDS)
    number = [(place + phase) // block for place in range(length)]
    sees = [[number[j] <= number[i] for j in range(length)] for i in range(length)]
    assert relaxed_mask(length, block, phase).tolist() == sees
    # And so it is in the head, as far as the LSTM does not carry what was before.
    head = random_head(Falcon, target, FalconOptions(block=block, lstm_layers=0))
    ids = torch.tensor([IDS])
    before = head(features[None], ids, phase)[0]
    for pair in range(length - block + 1):
        other = features.clone()
        other[pair] += 1.0
        after = head(other[None], ids, phase)[0]
        changed = [i for i in range(length) if not torch.equal(before[i], after[i])]
        # The pair stands block - 1 places further on, after the empty ones.
        assert changed == [i for i in range(length) if sees[i][pair + block - 1]]


def test_a_block_of_one_without_lstm_is_eagle(
    target: HeadTarget, features: torch.Tensor, tmp_path: Path
) -> None:
    eagle = random_head(Eagle, target, EagleOptions())
    falcon = Falcon(target, FalconOptions(block=1, lstm_layers=0))
    falcon.load_state_dict({**eagle.state_dict(), "steps_seen": torch.zeros(())})
    eagle.save(tmp_path / "eagle")
    falcon.save(tmp_path / "falcon")
    heads = (
        load_head(Eagle, tmp_path / "eagle", target),
        load_head(Falcon, tmp_path / "falcon", target),
    )
    paths = [[60, 61, 62], [60, 63, 64], [65, 66, 67]]
    first, second = (drafted_logits(head, features, IDS, paths) for head in heads)
    assert torch.allclose(first, second, atol=1e-5)
    chains = []
    for head in heads:
        state = head.new_state()
        token = int(head.root([state], [features], [IDS]).argmax())
        chains.append(head.greedy_chains([state], [token], 6).tolist())
    assert chains[0] == chains[1]


@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_a_draft_takes_as_many_passes_as_it_has_blocks(
    block: int, target: HeadTarget, features: torch.Tensor, tmp_path: Path
) -> None:
    head = ready(target, tmp_path, block=block)
    passes = []
    run = head.stack.run
    head.stack.run = lambda *arguments: passes.append(0) or run(*arguments)  # type: ignore
    for depth in range(1, 10):
        passes.clear()
        state = head.new_state()
        token = int(head.root([state], [features], [IDS]).argmax())
        head.greedy_chains([state], [token], depth)
        head.free(state)
        assert len(passes) == -(-depth // block)
    assert head.stack.pool.num_free == head.stack.pool.capacity


@pytest.mark.parametrize("block", [2, 3])
@pytest.mark.parametrize("lstm_layers", [0, 2])
def test_drafting_computes_what_training_does(
    block: int, lstm_layers: int, target: HeadTarget, features: torch.Tensor, tmp_path: Path
) -> None:
    head = ready(target, tmp_path, block=block, lstm_layers=lstm_layers)
    ids = torch.tensor([IDS])
    for last in range(block, len(IDS) - block):
        # A block of places begins with the one that the last pair drafts first.
        phase = -last % block
        drafted = head(features[None], ids, phase)[0, last : last + block]
        state = head.new_state()
        logits = [head.root([state], [features[: last + 1]], [IDS[: last + 1]])[0]]
        steps = [[[(node, 9, node - 1)]] for node in range(block - 1)]
        logits += [head.expand([state], step)[0] for step in steps]
        head.free(state)
        assert torch.allclose(torch.stack(logits), target.logits(drafted), atol=1e-4)


def test_rounds_leave_no_trace_of_their_drafts(
    target: HeadTarget, features: torch.Tensor, tmp_path: Path
) -> None:
    """Pairs that come a few at a time, with drafts in between, are pairs that come at once."""
    head = ready(target, tmp_path, block=3)
    state, done = head.new_state(), 0
    for count in (5, 1, 2, 1, 4):
        rows, ids = features[done : done + count], IDS[done : done + count]
        done += count
        fresh = head.new_state()
        logits = head.root([state], [rows], [ids])
        at_once = head.root([fresh], [features[:done]], [IDS[:done]])
        assert torch.allclose(logits, at_once, atol=1e-4)
        first = [int(logits.argmax())]
        chains = [head.greedy_chains([one], first, 7).tolist() for one in (state, fresh)]
        assert chains[0] == chains[1]
        head.free(fresh)
    head.free(state)
    assert head.stack.pool.num_free == head.stack.pool.capacity


def test_a_node_of_a_tree_is_as_on_its_path_alone(
    target: HeadTarget, features: torch.Tensor, tmp_path: Path
) -> None:
    head = ready(target, tmp_path, block=2)
    paths = [[60, 61, 62, 63, 64], [60, 61, 65, 66, 67], [68, 69, 70, 71, 72]]
    together = drafted_logits(head, features, IDS, paths)
    alone = torch.cat([drafted_logits(head, features, IDS, [path]) for path in paths])
    assert torch.allclose(together, alone, atol=1e-4)
    # What a block says does not depend on its own tokens; the next block does.
    for depth in (1, 2):
        one, other = (
            drafted_logits(head, features, IDS, [[first, 61][:depth]]) for first in (60, 90)
        )
        assert torch.equal(one, other) == (depth == 1)


def test_glancing_shows_fewer_true_pairs_as_training_goes_on() -> None:
    batch = read(demo_runner(), texts())
    head = random_head(Falcon, demo_target(), FalconOptions(glancing_steps=4, glancing_floor=0.25))
    head.train()
    shown = []
    original = head.forward

    def watch(features: torch.Tensor, *rest: object) -> torch.Tensor:
        same = (features == batch.hidden[:, :-1]).all(-1).float().mean()
        shown.append(float(same))
        return original(features, *rest)  # type: ignore[arg-type]

    head.forward = watch  # type: ignore[method-assign, assignment]
    shares = []
    for _ in range(6):
        head.loss(batch)
        shares.append(shown[-1])
    assert shares == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.25, 0.25], abs=0.06)
    assert int(head.steps_seen) == 6
    head.eval()
    head.loss(batch)
    assert shown[-1] == 1.0 and int(head.steps_seen) == 6


@pytest.mark.nightly
@pytest.mark.parametrize("block", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_training_makes_drafts_right(block: int, tmp_path: Path) -> None:
    batch = read(demo_runner(), texts())
    torch.manual_seed(0)
    head = Falcon(demo_target(), FalconOptions(block=block, glancing_steps=32))
    before, _ = evaluate(head, batch)
    train(head, batch, 48, rate=2e-3)
    after, agreement = evaluate(head, batch)
    assert after < 0.5 * before
    assert agreement.shape == (block,) and agreement.min() > 0.4
    assert accepted_length(decode(head, tmp_path, "falcon")) > 2.0


@pytest.mark.slow
@pytest.mark.one_of(3)
@pytest.mark.parametrize("block", [1, 2, 4])
def test_exact_to_the_end_of_the_context(block: int, zoo: Path, tmp_path: Path) -> None:
    options = FalconOptions(block=block)
    check_end_of_context(Falcon, options, zoo, tmp_path, num_speculative_tokens=12)


def test_a_block_is_at_least_one_token(target: HeadTarget) -> None:
    for block in (0, 17):
        with pytest.raises(InvalidArgument, match="block"):
            Falcon(target, replace(FalconOptions(), block=block))
