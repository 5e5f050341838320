"""Hydra and Hydra++: heads that see the tokens drafted before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paceline.models.heads.base import HeadBatch, HeadTarget
from paceline.models.heads.hydra import Hydra
from paceline.models.llama import LlamaRunner
from tests.core.toy_heads import evaluate, read, train
from tests.heads import untrained

KINDS = ["hydra", "hydra_pp"]


@pytest.fixture(scope="module")
def batch(tiny: LlamaRunner) -> HeadBatch:
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(1))
    return read(tiny, ids)


def new_head(kind: str, tiny_folder: Path, tiny: LlamaRunner) -> Hydra:
    head = untrained(kind, HeadTarget.of_runner(tiny_folder, tiny), noise=0.05)
    assert isinstance(head, Hydra)
    head.eval().requires_grad_(False).prepare()
    return head


def draft(head: Hydra, batch: HeadBatch, places: int, tokens: Sequence[int]) -> list[torch.Tensor]:
    """Logits after ``places`` places of the text, and after each of ``tokens`` from there."""
    state = head.new_state()
    following = batch.token_ids[0, 1 : places + 1].tolist()
    logits = [head.root([state], [batch.hidden[0, :places]], [following])[0]]
    for node, token in enumerate(tokens):
        logits.append(head.expand([state], [[(node, token, node - 1)]])[0])
    head.free(state)
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_drafting_equals_the_training_forward(
    kind: str, batch: HeadBatch, tiny_folder: Path, tiny: LlamaRunner
) -> None:
    head = new_head(kind, tiny_folder, tiny)
    trained = head(batch.hidden, batch.token_ids)
    for places in (1, 2, 9, 15):
        count = len(trained) - 1
        fed = batch.token_ids[0, places + 1 : places + 1 + count].tolist()
        for i, logits in enumerate(draft(head, batch, places, fed)):
            expected = trained[i][0, places - 1]
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_without_embeddings_the_drafted_tokens_do_not_matter(
    kind: str, batch: HeadBatch, tiny_folder: Path, tiny: LlamaRunner
) -> None:
    head = new_head(kind, tiny_folder, tiny)
    seen, other = (draft(head, batch, 9, tokens) for tokens in ([1, 2, 3], [4, 5, 6]))
    assert torch.equal(seen[0], other[0])
    assert all(not torch.allclose(a, b) for a, b in zip(seen[1:], other[1:], strict=True))
    size = head.target.config.hidden_size
    for part in head.heads:
        part.join.weight[:, size:] = 0.0
    blind, same = (draft(head, batch, 9, tokens) for tokens in ([1, 2, 3], [4, 5, 6]))
    assert all(torch.equal(a, b) for a, b in zip(blind, same, strict=True))


def test_the_prefix_attention_reads_the_whole_text(
    batch: HeadBatch, tiny_folder: Path, tiny: LlamaRunner
) -> None:
    """Hydra reads the last hidden state alone, Hydra++ those before it, too."""
    changed = HeadBatch(
        batch.token_ids, batch.hidden.clone(), batch.logits, None, torch.Generator()
    )
    changed.hidden[0, 3] += 1.0
    for kind, differs in (("hydra", False), ("hydra_pp", True)):
        head = new_head(kind, tiny_folder, tiny)
        before, after = draft(head, batch, 9, []), draft(head, changed, 9, [])
        assert torch.equal(before[0], after[0]) != differs


def test_hydra_beats_medusa_where_bigrams_are_strong(tiny_folder: Path) -> None:
    """A text in which a token has three successors: what comes after next depends on the next."""
    target = HeadTarget.from_folder(tiny_folder)
    generator = torch.Generator().manual_seed(2)
    count = 24
    successors = torch.stack([torch.randperm(count, generator=generator)[:3] for _ in range(count)])
    odds = torch.tensor([0.4, 0.3, 0.3])
    ids = torch.randint(0, count, (16, 40), generator=generator)
    for place in range(1, ids.shape[1]):
        choice = torch.multinomial(odds, len(ids), replacement=True, generator=generator)
        ids[:, place] = successors[ids[:, place - 1], choice]
    logits = torch.full((*ids.shape, target.config.vocab_size), -20.0)
    logits.scatter_(2, successors[ids], odds.log().expand(*ids.shape, 3))
    batch = HeadBatch(ids, 3 * target.embed(ids), logits, None, generator)
    agreement = {}
    for kind in ("medusa", "hydra"):
        head = untrained(kind, target)
        train(head, batch, 48, rate=1e-2, rows=8)
        agreement[kind] = evaluate(head, batch)[1]
    assert agreement["hydra"][1] > agreement["medusa"][1] + 0.2
    assert agreement["hydra"][0] > agreement["medusa"][0] + 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss(kind: str, tiny_folder: Path, tiny: LlamaRunner) -> None:
    head = untrained(kind, HeadTarget.from_folder(tiny_folder))
    text = read(tiny, torch.arange(40).remainder(7).repeat(4, 1) + 97)
    before, _ = evaluate(head, text)
    train(head, text, 30)
    after, _ = evaluate(head, text)
    assert after < 0.8 * before
