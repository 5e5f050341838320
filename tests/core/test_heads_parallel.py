"""Medusa and blockwise parallel decoding: several tokens from one hidden state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.config import SpeculationConfig
from paceline.engine import Engine, RoundEvent
from paceline.models.base import Segment
from paceline.models.heads import HeadLibrary
from paceline.models.heads.base import HeadTarget
from paceline.models.heads.blockwise import Blockwise, BlockwiseOptions
from paceline.models.heads.layer import ResidualBlock
from paceline.models.heads.medusa import Medusa, MedusaOptions
from paceline.models.heads.parallel import ParallelHead
from paceline.models.llama import LlamaRunner
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.types import Need
from tests.core.engines import Reference
from tests.core.toy_heads import evaluate, read, train
from tests.heads import untrained

PROMPT = list(b"some prompt that is read at once")
PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)


def test_a_new_residual_block_is_the_identity() -> None:
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    block = ResidualBlock(16)
    assert torch.equal(block(x), x)
    with torch.no_grad():
        block.linear.weight[2, 3] = 1.0
    assert not torch.equal(block(x), x)


@pytest.mark.parametrize("own_output", [False, True])
def test_new_heads_say_what_the_target_says(
    own_output: bool, tiny_folder: Path, tiny: LlamaRunner
) -> None:
    target = HeadTarget.from_folder(tiny_folder)
    batch = read(tiny, torch.randint(0, 256, (1, 12)))
    heads: list[ParallelHead] = [
        Medusa(target, MedusaOptions(own_output=own_output)),
        Blockwise(target, BlockwiseOptions()),
    ]
    for head in heads:
        guesses = head.guesses(batch.hidden)
        assert len(guesses) == head.max_depth
        for logits in guesses:
            torch.testing.assert_close(logits, batch.logits, atol=1e-4, rtol=1e-4)


def engine_with(head: ParallelHead, tiny_folder: Path, tmp_path: Path) -> Engine:
    head.save(tmp_path / head.kind)
    runner = LlamaRunner(tiny_folder, kv_tokens=1000)
    return Engine(ModelTarget(runner), heads=HeadLibrary(tmp_path, tiny_folder, runner))


def test_a_node_uses_the_ranks_of_its_path(
    tiny_folder: Path, tiny: LlamaRunner, tmp_path: Path
) -> None:
    """Node (i1, .., id) of a template holds the candidate of rank ij of head j."""
    head = untrained("medusa", HeadTarget.from_folder(tiny_folder), noise=0.2)
    assert isinstance(head, Medusa)
    paths = ((0,), (1,), (3,), (0, 0), (1, 2), (3, 1), (0, 0, 4), (1, 2, 0), (0, 0, 4, 1))
    config = SpeculationConfig(
        method="medusa", shape="template", template=paths, node_budget=len(paths), length="fixed"
    )
    events: list[RoundEvent] = []
    engine = engine_with(head, tiny_folder, tmp_path)
    engine.submit(Request(PROMPT, PARAMS, config), on_event=events.append)
    while engine.has_work:
        engine.step()
    tokens, checked = list(PROMPT), 0
    for event in events:
        assert event.outcome is not None
        draft = event.outcome.draft
        sequence = tiny.new_sequence()
        hidden = tiny.forward(
            [Segment(sequence, np.array(tokens[:-1]))], frozenset({Need.HIDDEN_STATES})
        ).extras[Need.HIDDEN_STATES][-1]
        tiny.free(sequence)
        best = [logits.topk(5).indices.tolist() for logits in head.guesses(hidden)]
        expected = {
            tuple(best[level][rank] for level, rank in enumerate(path))
            for path in paths
            if len(path) <= PARAMS.max_tokens - (len(tokens) - len(PROMPT)) - 1
        }
        found = set()
        for node in range(draft.num_nodes):
            path, at = [], node
            while at >= 0:
                path.append(int(draft.token_ids[at]))
                at = int(draft.parent_indices[at])
            found.add(tuple(reversed(path)))
        assert found == expected
        checked += len(found)
        tokens += event.token_ids
    assert checked > 100


@pytest.mark.parametrize("block", [1, 2, 5])
def test_blockwise_takes_a_forward_for_each_block_and_one_for_the_prompt(
    block: int, tiny_folder: Path, tmp_path: Path, reference: Reference
) -> None:
    head = untrained("blockwise", HeadTarget.from_folder(tiny_folder))
    assert isinstance(head, Blockwise)
    engine = engine_with(head, tiny_folder, tmp_path)
    forwards, forward = 0, engine.target.runner.forward

    def counted(*arguments: object, **options: object) -> object:
        nonlocal forwards
        forwards += 1
        return forward(*arguments, **options)  # type: ignore[arg-type]

    engine.target.runner.forward = counted  # type: ignore[method-assign, assignment]
    config = SpeculationConfig(length="fixed", method="blockwise", num_speculative_tokens=block - 1)
    (session,) = engine.generate([PROMPT], PARAMS, config)
    assert session.output_ids == reference(PROMPT, PARAMS)
    assert forwards == session.stats.num_rounds + 1
    if block == 1:  # greedy decoding
        assert session.stats.num_rounds == PARAMS.max_tokens
    else:
        assert session.stats.drafted_by_depth[0] > 0
        assert len(session.stats.drafted_by_depth) == block - 1


def test_blockwise_trains_one_predictor_at_random(tiny_folder: Path, tiny: LlamaRunner) -> None:
    batch = read(tiny, torch.randint(0, 256, (2, 20)))
    target = HeadTarget.from_folder(tiny_folder)
    head = untrained("blockwise", target, one_head=True)
    assert isinstance(head, Blockwise)
    each = [
        F.cross_entropy(logits[:, : -i - 1].flatten(0, 1), batch.token_ids[:, i + 1 :].flatten())
        for i, logits in enumerate(head.guesses(batch.hidden), 1)
    ]
    head.train()
    seen = set()
    for _ in range(40):
        loss, metrics = head.loss(batch)
        (trained,) = torch.nonzero(~metrics["agreement"].isnan()).flatten().tolist()
        torch.testing.assert_close(loss, each[trained])
        seen.add(trained)
    assert seen == set(range(4))
    head.eval()
    torch.testing.assert_close(head.loss(batch)[0], torch.stack(each).mean())


@pytest.mark.parametrize("kind", ["medusa", "blockwise"])
def test_training_lowers_the_loss(kind: str, tiny_folder: Path, tiny: LlamaRunner) -> None:
    head = untrained(kind, HeadTarget.from_folder(tiny_folder))
    batch = read(tiny, torch.arange(40).remainder(7).repeat(4, 1) + 97)
    before, _ = evaluate(head, batch)
    train(head, batch, 30)
    after, agreement = evaluate(head, batch)
    assert after < 0.7 * before
    assert agreement.isfinite().all()
