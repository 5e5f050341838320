"""Dovetail (arXiv 2412.18934): drafter and target on two devices, and a gate for features."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.drafters.head import HeadDrafter
from paceline.errors import InvalidArgument
from paceline.lengths.round_trip import RoundTripCosts, best_depth
from paceline.loading import load_engine
from paceline.models.heads import HeadLibrary
from paceline.models.heads.base import HeadTarget
from paceline.models.heads.dovetail import Dovetail, DovetailOptions
from paceline.models.heads.layer import distant_target
from paceline.sampling import SamplingParams
from tests.core.toy_heads import (
    PARAMS,
    PROMPT,
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

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("device", "drafter_device"),
    [
        ("cpu", "cpu"),
        pytest.param("cpu", "cuda", marks=needs_cuda),
        pytest.param("cuda", "cpu", marks=needs_cuda),
    ],
)
def test_tokens_are_those_of_the_target(
    device: str, drafter_device: str, temperature: float
) -> None:
    engine = load_engine(TARGET_DIR, DRAFTER_DIR, device=device, drafter_device=drafter_device)
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode("def read(path):\n")
    params = SamplingParams(max_tokens=32, temperature=temperature, seed=1, ignore_eos=True)
    drafted, headed, plain = (
        engine.generate([prompt], params, SpeculationConfig(length="fixed", method=method))[0]
        for method in ("draft_model", "dovetail", "ar")
    )
    assert drafted.output_ids == headed.output_ids == plain.output_ids
    assert drafted.stats.num_accepted > 0
    assert headed.stats.num_accepted > 0


@pytest.mark.parametrize("method", ["dovetail", "eagle", "moa"])
def test_a_head_has_its_own_parts_of_a_target_elsewhere(method: str) -> None:
    """What the target sends becomes the type and the device of those parts."""
    engine = load_engine(TARGET_DIR, DRAFTER_DIR)
    parts = distant_target(TARGET_DIR, dtype=torch.bfloat16, device="cpu", kv_tokens=None)
    own = engine.drafters.heads
    assert own is not None
    engine.drafters.heads = HeadLibrary(
        own.folder, TARGET_DIR, engine.local_target.runner, lambda: parts
    )
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode("def read(path):\n")
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    headed, plain = (
        engine.generate([prompt], params, SpeculationConfig(length="fixed", method=name))[0]
        for name in (method, "ar")
    )
    drafter = engine.drafters[method]
    assert isinstance(drafter, HeadDrafter)
    assert drafter._head.target is parts
    assert headed.output_ids == plain.output_ids
    assert not headed.stats.drafter_lost
    assert headed.stats.num_accepted > 0


def test_a_device_that_is_none() -> None:
    with pytest.raises(InvalidArgument, match="device"):
        load_engine(TARGET_DIR, DRAFTER_DIR, drafter_device="abacus")


@pytest.mark.parametrize("acceptance", [0.6, 0.8, 0.95])
def test_where_verification_grows_with_the_draft_the_best_draft_is_smaller(
    acceptance: float,
) -> None:
    """A CPU's forward takes longer for each further token, a GPU's hardly does."""
    gpu = RoundTripCosts(draft=0.001, verify_first=0.02)
    depths = [
        best_depth(acceptance, RoundTripCosts(0.001, 0.02, verify_each=each), 0, 32)
        for each in (0.0, 0.0005, 0.002, 0.005)
    ]
    assert depths[0] == best_depth(acceptance, gpu, 0, 32)
    assert depths == sorted(depths, reverse=True)
    assert depths[-1] < depths[0]


def test_each_component_lies_between_the_features_and_the_tokens(tiny_folder: Path) -> None:
    head = random_head(Dovetail, HeadTarget.from_folder(tiny_folder), DovetailOptions())
    size = head.target.config.hidden_size
    embedded, features = 3 * torch.randn(2, 50, size)
    feature, token, z = head.fusion(embedded, features)
    assert (z > 0).all() and (z < 1).all()
    mixed = head.inputs(embedded, features)
    slack = 1e-6
    assert (mixed >= torch.minimum(feature, token) - slack).all()
    assert (mixed <= torch.maximum(feature, token) + slack).all()
    # Each part alone where the gate is at one end.
    for bias, alone in ((-1e4, token), (1e4, feature)):
        with torch.no_grad():
            direction = torch.cat([feature, token], -1).reshape(-1, 2 * size)
            head.gate.weight.copy_(torch.linalg.lstsq(direction, bias * torch.ones(50, size))[0].T)
        assert torch.allclose(head.inputs(embedded, features), alone, atol=1e-4)


def test_a_node_of_a_tree_is_as_on_its_path_alone(tiny_folder: Path, tmp_path: Path) -> None:
    head = random_head(Dovetail, HeadTarget.from_folder(tiny_folder), DovetailOptions())
    head.prepare()
    ids = list(range(40, 52))
    features = torch.randn(len(ids), head.target.config.hidden_size)
    paths = [[60, 61, 62], [60, 63, 64], [65, 66, 67]]
    together = drafted_logits(head, features, ids, paths)
    alone = torch.cat([drafted_logits(head, features, ids, [path]) for path in paths])
    assert torch.allclose(together, alone, atol=1e-4)
    trained = head(features[None], torch.tensor([ids]))[0][0, -1]
    state = head.new_state()
    assert torch.allclose(head.root([state], [features], [ids])[0], head.logits(trained), atol=1e-4)


def test_exact_to_the_end_of_the_context(zoo: Path, tmp_path: Path) -> None:
    check_end_of_context(Dovetail, DovetailOptions(), zoo, tmp_path, num_speculative_tokens=6)


@pytest.mark.slow
def test_training_makes_drafts_right_and_a_round_moves_one_feature_for_each_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = read(demo_runner(), texts())
    torch.manual_seed(0)
    head = Dovetail(demo_target(), DovetailOptions())
    before, _ = evaluate(head, batch)
    train(head, batch, 30, rate=2e-3)
    after, agreement = evaluate(head, batch)
    assert after < 0.5 * before
    assert agreement[0] > 0.7
    moved = 0  # bytes of features that the drafter gets of the target
    root = Dovetail.root

    def watch(self: Dovetail, states, features, token_ids):  # type: ignore[no-untyped-def]
        nonlocal moved
        moved += sum(rows.numel() * rows.element_size() for rows in features)
        assert [len(rows) for rows in features] == [len(ids) for ids in token_ids]
        return root(self, states, features, token_ids)

    monkeypatch.setattr(Dovetail, "root", watch)
    sessions = decode(head, tmp_path, "dovetail")
    assert accepted_length(sessions) > 2.0
    # One row for each token, but the last round's, after which nothing is drafted.
    row = 4 * head.target.config.hidden_size
    assert 0 < moved <= len(sessions) * row * (PROMPT + PARAMS.max_tokens - 1)
