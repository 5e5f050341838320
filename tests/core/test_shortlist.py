"""The shortlist of an output layer: which logits a head computes in full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from paceline.config import SpeculationConfig
from paceline.errors import InvalidArgument, ModelNotFound
from paceline.loading import load_engine
from paceline.models.heads.base import HeadTarget, load_head
from paceline.models.heads.eagle3 import Eagle3
from paceline.models.heads.shortlist import (
    FILE,
    FOUND,
    RANK,
    LowRankLogits,
    fit_shortlist,
    read_shortlist,
    save_shortlist,
)
from paceline.models.llama import LlamaRunner
from paceline.sampling import SamplingParams
from paceline.smollm2 import HEADS_DIR
from tests.chat.suite import is_here
from tests.core.toy_heads import read as read_texts
from tests.heads import untrained

HIDDEN, LOGITS = 48, 400


def numbers(*sizes: int, seed: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def test_states_of_a_low_rank_need_no_more_than_that() -> None:
    """Logits of such states are those of the output layer, and the best one looks the best."""
    states = numbers(500, 6, seed=1) @ numbers(6, HIDDEN, seed=2)
    weight = numbers(LOGITS, HIDDEN, seed=3)
    made = fit_shortlist(states, weight, 6)
    near = states @ made.encode.float().T @ made.rows(weight).T
    exact = states @ weight.T
    assert (near - exact).norm() < 0.02 * exact.norm()  # what bfloat16 leaves
    assert made.margin < 0.05 * float(exact.std())


def test_it_is_nearer_than_a_decomposition_of_the_weight_alone() -> None:
    """And so many states have their best token within the margin, also new ones."""
    scales = torch.logspace(0, -2, HIDDEN)[torch.randperm(HIDDEN)]
    states, fresh = (numbers(4000, HIDDEN, seed=seed) * scales for seed in (4, 5))
    weight = numbers(LOGITS, HIDDEN, seed=6)
    made = fit_shortlist(states, weight, 12)
    near, exact = fresh @ made.encode.float().T @ made.rows(weight).T, fresh @ weight.T
    _, _, right = torch.linalg.svd(weight, full_matrices=False)
    alone = fresh @ right[:12].T @ right[:12] @ weight.T
    assert (near - exact).norm() < 0.7 * (alone - exact).norm()
    below = near.amax(1) - near.gather(1, exact.argmax(1, keepdim=True))[:, 0]
    assert float((below <= made.margin).float().mean()) > FOUND - 0.01


def test_an_impossible_rank_is_named() -> None:
    with pytest.raises(InvalidArgument, match="from 1 to the hidden size, 48"):
        fit_shortlist(numbers(9, HIDDEN, seed=7), numbers(9, HIDDEN, seed=8), HIDDEN + 1)


@pytest.fixture
def head(tiny_folder: Path, tiny: LlamaRunner) -> Eagle3:
    target = HeadTarget.of_runner(tiny_folder, tiny)
    options: dict[str, Any] = {"features": (1, 2), "shallow_layers": 1, "int8": False}
    made = untrained("eagle3", target, vocabulary=100, **options)
    assert isinstance(made, Eagle3)
    return made.eval().requires_grad_(False)


@pytest.mark.parametrize("limit", [None, 0.015])
def test_chains_with_a_wide_margin_are_those_of_all_logits(
    limit: float | None, head: Eagle3, tiny: LlamaRunner
) -> None:
    """The shortlist computes with the output layer in bfloat16; so does the other one here."""
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(9))
    batch = read_texts(tiny, ids)
    assert batch.layer_states is not None
    features = head.select(batch.layer_states[:, :-1])
    limits = None if limit is None else np.full((5, 2), limit, np.float32)

    def chains() -> list[list[int]]:
        states = [head.new_state(), head.new_state()]
        following = [row[1:].tolist() for row in ids]
        made = head.chains(states, [features[0], features[1]], following, 5, limits).tolist()
        for state in states:
            head.free(state)
        return made

    hidden = tiny.config.hidden_size
    factors = numbers(8, hidden, seed=10), numbers(hidden, 8, seed=11)
    head.shortlist = LowRankLogits(*factors, 1e9)
    head.prepare()
    assert head.output is not None
    drafted = chains()
    assert head.output.shortlist is not None
    rounded = head.stack.ops.pack(head.output_rows.bfloat16().float())
    head.output = head.output._replace(weight=rounded, shortlist=None)
    assert drafted == chains()
    assert len({token for chain in drafted for token in chain}) > 2


def test_it_is_saved_read_and_removed_with_new_weights(
    head: Eagle3, tiny_folder: Path, tiny: LlamaRunner, tmp_path: Path
) -> None:
    target = HeadTarget.of_runner(tiny_folder, tiny)
    head.save(tmp_path)
    assert read_shortlist(tmp_path) is None
    made = fit_shortlist(numbers(50, tiny.config.hidden_size, seed=12), head.output_rows, 4)
    save_shortlist(tmp_path, made)
    read = load_head(Eagle3, tmp_path, target).shortlist
    assert read is not None
    assert torch.equal(read.encode, made.encode)
    assert torch.equal(read.decode, made.decode)
    assert read.margin == pytest.approx(made.margin)
    save_shortlist(tmp_path, LowRankLogits(numbers(4, 7, seed=1), numbers(7, 4, seed=2), 1.0))
    with pytest.raises(ModelNotFound, match="7 numbers of a state"):
        load_head(Eagle3, tmp_path, target)
    head.save(tmp_path)  # a shortlist belongs to the weights that it was fitted to
    assert not (tmp_path / FILE).exists()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    save_file({"encode": torch.zeros(2, 3), "decode": torch.zeros(2, 3)}, tmp_path / FILE)
    with pytest.raises(ModelNotFound, match=r"shortlist\.safetensors is damaged"):
        read_shortlist(tmp_path)
    (tmp_path / FILE).write_bytes(b"no tensors")
    with pytest.raises(ModelNotFound, match="damaged"):
        read_shortlist(tmp_path)


def test_smollm2_drafts_as_well_with_its_shortlist() -> None:
    """Rounds for the same tokens, with the shortlist that ships and without any."""
    shipped = read_shortlist(HEADS_DIR / "eagle3")
    assert shipped is not None
    assert len(shipped.encode) == RANK
    if not is_here():
        pytest.skip("not here: paceline models get smollm2")
    engine = load_engine("smollm2", dtype="auto")
    assert engine.tokenizer is not None
    prompts = [
        engine.tokenizer.encode(text)
        for text in ("The capital of France is", "def reverse(text):", "Once upon a time")
    ]
    speculation = SpeculationConfig(
        method="eagle3", length="fixed", num_speculative_tokens=2
    )  # fmt: skip

    def rounds() -> tuple[int, list[list[int]]]:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        sessions = engine.generate(prompts, params, speculation)
        assert all(session.stats.num_accepted for session in sessions)
        return (
            sum(session.stats.num_target_forwards for session in sessions),
            [session.output_ids for session in sessions],
        )

    with_it = rounds()
    drafter: Any = engine.drafters.get("eagle3")
    output = drafter._head.output
    assert output.shortlist is not None
    drafter._head.output = output._replace(shortlist=None)
    without = rounds()
    assert with_it[1] == without[1]
    assert with_it[0] <= 1.03 * without[0]
