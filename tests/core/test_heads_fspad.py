"""FSPAD: what its two parts do, and that each of them helps."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from paceline.models.heads.base import HeadTarget, load_head
from paceline.models.heads.eagle import Eagle, EagleOptions
from paceline.models.heads.fspad import Fspad, FspadOptions
from paceline.types import Need
from tests.core.toy_heads import (
    accepted_length,
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

IDS = list(range(40, 52))
PLAIN = {"feature_sampling": False, "partial_alignment": False}


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> HeadTarget:
    return HeadTarget.from_folder(tiny_folder)


def features(target: HeadTarget) -> torch.Tensor:
    size = target.config.hidden_size
    return torch.randn(len(IDS), size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", [PLAIN, {}], ids=["switched off", "untrained"])
def test_it_starts_from_eagle(options: dict[str, bool], target: HeadTarget, tmp_path: Path) -> None:
    """The same logits for whole drafts, given the weights that both have."""
    eagle = random_head(Eagle, target, EagleOptions())
    fspad = Fspad(target, FspadOptions(**options))
    missing = fspad.load_state_dict(eagle.state_dict(), strict=False)
    assert not missing.unexpected_keys and bool(missing.missing_keys) == (options == {})
    results = []
    for head in (eagle, fspad):
        head.save(tmp_path / head.kind)
        loaded = load_head(type(head), tmp_path / head.kind, target)
        results.append(drafted_logits(loaded, features(target), IDS, [[60, 61], [62, 63]]))
    assert torch.allclose(*results, atol=1e-5)


def test_the_token_decides_what_of_a_feature_gets_in(target: HeadTarget) -> None:
    """Two features that differ only where a token's gate is shut are one for this token."""
    head = random_head(Fspad, target, FspadOptions(partial_alignment=False))
    size = target.config.hidden_size
    with torch.no_grad():
        head.gate.weight.zero_()
        # Far below zero the gate is shut; token 7 opens it.
        head.gate.bias.fill_(-100.0)
        direction = target.embed(torch.tensor(7))
        head.gate.weight += 200.0 * direction / direction.square().sum()
        head.fc.weight[:, size:] = torch.eye(size)
        head.up.weight.zero_()
        head.up.weight[:size] = torch.eye(size)
        head.down.weight.zero_()
        head.down.weight[:, :size] = torch.eye(size)
    feature = torch.ones(1, size)
    shut, opened = (target.embed(torch.tensor([token])) for token in (8, 7))
    plain = Eagle.inputs(head, shut, feature)
    assert torch.allclose(head.inputs(shut, feature), plain, atol=1e-4)
    assert not torch.allclose(head.inputs(opened, feature), Eagle.inputs(head, opened, feature))


def test_logits_have_a_part_of_their_own(target: HeadTarget, tmp_path: Path) -> None:
    """What is aligned and read again does not notice the part that only logits come from."""
    head = random_head(Fspad, target, FspadOptions())
    token_ids = torch.tensor([IDS])
    before = head(features(target)[None], token_ids, 3)
    first = head.logits(before[0])
    with torch.no_grad():
        head.decouple.weight += torch.randn_like(head.decouple.weight)
    after = head(features(target)[None], token_ids, 3)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)
    assert not torch.allclose(head.logits(after[0]), first)


@cache
def trained(seed: int, options: tuple[tuple[str, bool], ...]) -> Fspad:
    torch.manual_seed(seed)
    head = Fspad(demo_target(), FspadOptions(**dict(options)))
    train(head, read(demo_runner(), texts()), 30, rate=2e-3, seed=seed)
    return head


@pytest.mark.slow
def test_training_makes_drafts_right() -> None:
    batch = read(demo_runner(), texts())
    torch.manual_seed(0)
    before, _ = evaluate(Fspad(demo_target(), FspadOptions()), batch)
    after, agreement = evaluate(trained(0, ()), batch)
    assert after < 0.5 * before
    assert agreement[0] > 0.7


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["feature_sampling", "partial_alignment"])
def test_without_either_part_less_is_accepted(part: str, tmp_path: Path) -> None:
    """Trained in the same way from the same seeds: as measured on text, and in the loop."""
    batch, seeds = read(demo_runner(), texts()), (0, 2, 3)
    measured, decoded = [], []
    for options in ((), ((part, False),)):
        heads = [trained(seed, options) for seed in seeds]
        agreements = [evaluate(head, batch)[1] for head in heads]
        measured.append(sum(1 + float(a.cumprod(0).sum()) for a in agreements) / len(seeds))
        folder = tmp_path / str(len(options))
        lengths = [accepted_length(decode(head, folder, "fspad")) for head in heads]
        decoded.append(sum(lengths) / len(seeds))
    assert measured[0] > measured[1] > 2.0
    assert decoded[0] > decoded[1] > 2.0


def test_needs() -> None:
    assert Fspad.needs == {Need.HIDDEN_STATES}
