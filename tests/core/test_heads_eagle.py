"""EAGLE: drafting computes what training computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.models.heads.base import Head, HeadBatch, HeadTarget
from paceline.models.heads.eagle import Eagle, unrolled_mask
from paceline.models.llama import LlamaRunner
from paceline.models.native_ops import NativeOps
from paceline.models.torch_ops import TorchOps
from tests.core.toy_heads import (
    accepted_length,
    decode,
    demo_runner,
    demo_target,
    evaluate,
    read,
    train,
)
from tests.core.toy_heads import texts as demo_texts
from tests.heads import untrained

STEPS = 4


@pytest.fixture(scope="module")
def batch(tiny: LlamaRunner) -> HeadBatch:
    ids = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(1))
    return read(tiny, ids)


@pytest.fixture(scope="module", params=[("native", 1), ("native", 2), ("torch", 1)], ids=str)
def head(request: pytest.FixtureRequest, tiny_folder: Path, tiny: LlamaRunner) -> Iterator[Eagle]:
    """A head whose layers run in the C kernels, or in plain torch."""
    ops, num_layers = request.param
    result = untrained(
        "eagle", HeadTarget.of_runner(tiny_folder, tiny), noise=0.05, num_layers=num_layers
    )
    assert isinstance(result, Eagle)
    result.eval().requires_grad_(False)
    with pytest.MonkeyPatch.context() as patch:
        if ops == "torch":
            patch.setenv("PACELINE_KERNELS", "off")
        result.prepare()
    assert isinstance(result.stack.ops, NativeOps if ops == "native" else TorchOps)
    yield result
    assert result.stack.pool.num_free == result.stack.pool.capacity


def test_drafting_equals_the_training_forward(head: Eagle, batch: HeadBatch) -> None:
    """Fed the text's tokens, step by step, from several places on."""
    trained = head(batch.hidden[:, :-1], batch.token_ids[:, 1:], STEPS)
    for places in (1, 2, 7, 18):
        state = head.new_state()
        following = batch.token_ids[0, 1 : places + 1].tolist()
        logits = head.root([state], [batch.hidden[0, :places]], [following])
        drafted = [state.feature[-1]]
        expected_logits = [logits[0]]
        for node in range(STEPS - 1):
            token = int(batch.token_ids[0, places + 1 + node])
            expected_logits.append(head.expand([state], [[(node, token, node - 1)]])[0])
            drafted.append(state.feature[node])
        head.free(state)
        for step, (feature, logits) in enumerate(zip(drafted, expected_logits, strict=True)):
            expected = trained[step][0, places - 1 + step]
            torch.testing.assert_close(feature, expected, atol=1e-4, rtol=1e-4)
            assert int(logits.argmax()) == int(head.target.logits(expected).argmax())


def test_chains_equal_the_training_forward(head: Eagle, batch: HeadBatch) -> None:
    """Each token of a chain is the argmax that training would compute after the ones before."""
    for places in (1, 6, 12):
        state = head.new_state()
        following = batch.token_ids[0, 1 : places + 1].tolist()
        features = batch.hidden[0, :places]
        (chain,) = head.chains([state], [features], [following], STEPS + 1).tolist()
        head.free(state)
        padded = torch.cat([features, torch.zeros(STEPS, features.shape[1])])[None]
        fed = torch.tensor([[*following, *chain[:-1]]])
        steps = head(padded, fed, STEPS + 1)
        for step, token in enumerate(chain):
            assert int(head.target.logits(steps[step][0, places - 1 + step]).argmax()) == token


def test_the_kernel_makes_chains_in_one_call(
    head: Eagle, batch: HeadBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = 0
    run_layers = head.stack.ops.run_layers

    def counted(*arguments: object, **options: object) -> None:
        nonlocal runs
        runs += 1
        run_layers(*arguments, **options)  # type: ignore[arg-type]

    state = head.new_state()
    following = batch.token_ids[0, 1:9].tolist()
    given = [batch.hidden[0, :8]], [following]
    monkeypatch.setattr(head.stack.ops, "run_layers", counted)
    chain = head.chains([state], *given, 6).tolist()
    assert runs == (0 if isinstance(head.stack.ops, NativeOps) else 6)
    monkeypatch.undo()
    head.root([state], [batch.hidden[0, 8:9]], [[9]])  # the drafted entries go
    assert state.sequence.length == 9
    assert not state.sequence.num_pending
    head.free(state)
    again = head.new_state()
    assert Head.chains(head, [again], *given, 6).tolist() == chain
    head.free(again)


def test_what_an_unrolled_step_sees() -> None:
    """Against the definition: the target's inputs, then those of the chain's earlier steps."""
    length, steps = 5, 3
    for step in range(steps):
        mask = unrolled_mask(length, step).view(length, step + 1, length)
        for place in range(length):
            chain = {(j, place - step + j) for j in range(1, step + 1) if place - step + j >= 0}
            chain |= {(0, q) for q in range(place - step + 1)}
            found = {(j, q) for j, q in torch.nonzero(mask[place]).tolist()}
            assert found == chain


def test_noise_is_for_training_alone(tiny_folder: Path, batch: HeadBatch) -> None:
    head = untrained("eagle", HeadTarget.from_folder(tiny_folder))

    def loss(seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        value, _ = head.loss(
            HeadBatch(batch.token_ids, batch.hidden, batch.logits, None, generator)
        )
        return float(value.detach())

    head.train()
    assert loss(1) == loss(1) != loss(2)
    head.eval()
    assert loss(1) == loss(2)


def test_a_perfect_head_has_no_feature_loss(tiny_folder: Path, batch: HeadBatch) -> None:
    """Places are aligned: what is drafted at a place is compared with the next one's feature."""
    head = untrained("eagle", HeadTarget.from_folder(tiny_folder), token_weight=0.0)
    head.forward = (
        lambda f, ids, steps: [  # type: ignore[method-assign, assignment]
            batch.hidden[:, 1:] for _ in range(steps)
        ]
    )
    loss, metrics = head.eval().loss(batch)
    assert float(loss) == 0.0
    assert metrics["agreement"].tolist() == [1.0] * 5


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_training_makes_drafts_that_the_target_accepts(unroll: int, tmp_path: Path) -> None:
    """On the demo target and text of its own: chains and trees."""
    batch = read(demo_runner(), demo_texts())
    head = untrained("eagle", demo_target(), unroll=unroll)
    before, _ = evaluate(head, batch)
    train(head, batch, 48 // unroll)
    after, agreement = evaluate(head, batch)
    assert after < before
    assert float(agreement[0]) > 0.2
    chain = accepted_length(decode(head, tmp_path, "eagle"))
    tree = accepted_length(decode(head, tmp_path, "eagle2"))
    assert chain > 1.15
    assert tree > 1.15
