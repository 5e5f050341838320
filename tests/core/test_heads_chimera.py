"""Chimera: trigram states in the place of hidden states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.models.heads.base import HeadBatch, HeadTarget
from paceline.models.heads.chimera import Chimera, trigram_mask, trigrams_of
from paceline.models.llama import LlamaRunner
from tests.core.toy_heads import (
    accepted_length,
    decode,
    demo_runner,
    demo_target,
    evaluate,
    read,
    texts,
    train,
)
from tests.heads import untrained


@pytest.fixture(scope="module")
def batch(tiny: LlamaRunner) -> HeadBatch:
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(1))
    return read(tiny, ids)


def test_the_first_trigrams_are_padded(tiny_folder: Path) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    expected = [[-1, -1, -1], [-1, -1, 6], [-1, 6, 7], [6, 7, 8], [7, 8, 9]]
    assert trigrams_of(ids)[0].tolist() == expected
    head = untrained("chimera", HeadTarget.from_folder(tiny_folder))
    assert isinstance(head, Chimera)
    # Padding is nothing, whatever token stands for it in the embedding.
    blank = head.trigram_states(torch.tensor([-1, -1, 6]))
    seen = torch.stack([torch.zeros(64), torch.zeros(64), head.target.embedding[6]])
    torch.testing.assert_close(blank, head.trigram(seen))
    assert not torch.allclose(blank, head.trigram_states(torch.tensor([0, 0, 6])))


def test_what_trigram_states_see() -> None:
    length = 5
    for ahead in (1, 2, 4):
        mask = trigram_mask(length, ahead)
        for place in range(length):
            target = set(range(place - ahead + 1))
            trigrams = {length + p for p in range(max(0, place - ahead + 1), place + 1)}
            row = set(torch.nonzero(mask[length + place]).flatten().tolist())
            assert row == target | trigrams
            row = set(torch.nonzero(mask[place]).flatten().tolist())
            assert row == set(range(place + 1))


def test_drafting_equals_the_training_forward(
    batch: HeadBatch, tiny_folder: Path, tiny: LlamaRunner
) -> None:
    """From the second token on, where trigrams are padded, and later."""
    head = untrained("chimera", HeadTarget.of_runner(tiny_folder, tiny), noise=0.05)
    assert isinstance(head, Chimera)
    head.eval().requires_grad_(False).prepare()
    trained = {ahead: head(batch.hidden, batch.token_ids, ahead) for ahead in range(1, 5)}
    for places in (1, 2, 3, 11):
        state = head.new_state()
        # Read in two calls where there is more than one place.
        cut = places // 2
        if cut:
            ids = batch.token_ids[0, 1 : cut + 1].tolist()
            head.root([state], [batch.hidden[0, :cut]], [ids])
        ids = batch.token_ids[0, cut + 1 : places + 1].tolist()
        found = [head.root([state], [batch.hidden[0, cut:places]], [ids])[0]]
        for node in range(3):
            token = int(batch.token_ids[0, places + 1 + node])
            found.append(head.expand([state], [[(node, token, node - 1)]])[0])
        head.free(state)
        feature = batch.hidden[0, places - 1]
        for ahead, logits in enumerate(found, 1):
            predicted = trained[ahead][0, places - 1 + ahead]
            expected = head.target.logits(head.joined(feature, predicted))
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert head.stack.pool.num_free == head.stack.pool.capacity


@pytest.mark.nightly
@pytest.mark.parametrize("one_depth", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_predicted_states_get_better(one_depth: bool, tmp_path: Path) -> None:
    batch = read(demo_runner(), texts())
    head = untrained("chimera", demo_target(), one_depth=one_depth)

    def error() -> float:
        head.eval()
        return float(head.loss(batch)[1]["hidden_error"])

    before, (loss, _) = error(), evaluate(head, batch)
    train(head, batch, 50 if one_depth else 20)
    after, (trained_loss, agreement) = error(), evaluate(head, batch)
    assert after < 0.7 * before
    assert trained_loss < loss
    assert agreement.isfinite().all()
    assert accepted_length(decode(head, tmp_path, "chimera")) > 1.05
