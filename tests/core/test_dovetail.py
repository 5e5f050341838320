"""Dovetail (arXiv 2412.18934): drafter and target on devices of their own."""

from __future__ import annotations

import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.errors import InvalidArgument
from paceline.lengths.round_trip import RoundCosts, best_depth
from paceline.loading import load_engine
from paceline.sampling import SamplingParams

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
    drafted, plain = (
        engine.generate([prompt], params, SpeculationConfig(method=method))[0]
        for method in ("draft_model", "ar")
    )
    assert drafted.output_ids == plain.output_ids
    assert drafted.stats.num_accepted > 0


def test_a_device_that_is_none() -> None:
    with pytest.raises(InvalidArgument, match="device"):
        load_engine(TARGET_DIR, DRAFTER_DIR, drafter_device="abacus")


@pytest.mark.parametrize("acceptance", [0.6, 0.8, 0.95])
def test_where_verification_grows_with_the_draft_the_best_draft_is_smaller(
    acceptance: float,
) -> None:
    """A CPU's forward takes longer for each further token, a GPU's hardly does."""
    gpu = RoundCosts(draft=0.001, verify_first=0.02)
    depths = [
        best_depth(acceptance, RoundCosts(0.001, 0.02, verify_each=each), 0, 32)
        for each in (0.0, 0.0005, 0.002, 0.005)
    ]
    assert depths[0] == best_depth(acceptance, gpu, 0, 32)
    assert depths == sorted(depths, reverse=True)
    assert depths[-1] < depths[0]
