"""DFlash, DSpark and xPress: drafting computes what training computed, and ends where unsure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.models.heads import HeadLibrary
from paceline.models.heads.base import HeadBatch, HeadTarget
from paceline.models.heads.blocks import BlockSight
from paceline.models.heads.dflash import DFlash, DFlashOptions
from paceline.models.heads.dflash2 import DFlash2
from paceline.models.heads.dspark import DSpark, DSparkOptions
from paceline.models.heads.xpress import XPress, XPressOptions
from paceline.models.llama import LlamaRunner
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from tests.core.toy_heads import check_end_of_context, read
from tests.heads import untrained

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {"block_size": 6}),
    "dflash2": ("dflash2", {"block_size": 6, "conv_taps": 3, "selector_rank": 8}),
    "dspark": ("dspark", {"markov_rank": 8}),
    "dspark, gated": ("dspark", {"markov_rank": 8, "markov_kind": "gated"}),
    "dspark, rnn": ("dspark", {"markov_rank": 8, "markov_kind": "rnn", "from_anchor": False}),
    "xpress": ("xpress", {"block_size": 6, "refiner_rank": 8}),
    "xpress, from the anchor": (
        "xpress", {"block_size": 5, "refiner_rank": 9, "refiner_ratio": 3, "from_anchor": True},
    ),
}  # fmt: skip
DEPTH, PLACE = 4, 9


@pytest.fixture(scope="module")
def target(tiny_folder: Path, tiny: LlamaRunner) -> HeadTarget:
    return HeadTarget.of_runner(tiny_folder, tiny)


@pytest.fixture(scope="module")
def batch(tiny: LlamaRunner) -> HeadBatch:
    return read(tiny, torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1)))


@pytest.fixture(params=[(kind, ops) for kind in KINDS for ops in ("native", "torch")], ids=str)
def head(
    request: pytest.FixtureRequest, target: HeadTarget, monkeypatch: pytest.MonkeyPatch
) -> DFlash:
    (kind, options), ops = KINDS[request.param[0]], request.param[1]
    if ops == "torch":
        monkeypatch.setenv("PACELINE_KERNELS", "off")
    made = untrained(kind, target, noise=0.1, num_layers=2, int8=False, **options)
    assert isinstance(made, DFlash)
    made.requires_grad_(False).eval().prepare()
    return made


def trained_logits(head: DFlash, batch: HeadBatch, row: int, fed: list[int]) -> torch.Tensor:
    """Logits of the block at ``PLACE``, as training computes them, given tokens behind it."""
    assert batch.layer_states is not None
    anchors = torch.tensor([3, PLACE, 11])  # other blocks change nothing
    hidden = head(head.select(batch.layer_states), batch.token_ids, anchors)[row, 1]
    before = [int(batch.token_ids[row, PLACE]), *fed]
    before += [0] * (head.max_depth - len(before))
    if isinstance(head, XPress):
        if head.first_place:
            before.insert(0, int(batch.token_ids[row, PLACE - 1]))
        before = before[: head.options.block_size]
        bias = head.biases(head.refiner_head.see(hidden), torch.tensor(before))
        return head.some_logits(hidden[head.first_place :]) + bias
    if not isinstance(head, DSpark):
        drafting = hidden[head.first_place :]
        logits = head.some_logits(drafting)
        if isinstance(head, DFlash2):
            return head.selected(logits, drafting, torch.tensor(before[: head.max_depth]))
        return logits
    return head.heads(hidden, torch.tensor(before[: head.max_depth]))[0]


def test_drafting_equals_the_training_forward(head: DFlash, batch: HeadBatch) -> None:
    """Two sessions at once, read in pieces, with a tree that is rejected in between."""
    assert batch.layer_states is not None
    features, ids = head.select(batch.layer_states), batch.token_ids.tolist()
    states = [head.new_state(), head.new_state()]
    for first, end in ((0, 4), (4, 5), (5, PLACE)):
        root = head.root(
            states, [rows[first:end] for rows in features], [x[first + 1 : end + 1] for x in ids]
        )
        head.expand(states, [[(0, 5, -1), (1, 9, -1)]] * 2)
        head.expand(states, [[(2, 5, 0), (3, 9, 1), (4, 5, 1)]] * 2)
    paths = [[7, 60, 130], [8, 61, 131]]
    rows = [root]
    for node in range(DEPTH - 1):
        step = [[(node, path[node], node - 1)] for path in paths]
        rows.append(head.expand(states, step))
    for row, path in enumerate(paths):
        wanted = trained_logits(head, batch, row, path)[:DEPTH]
        drafted = torch.stack([logits[row] for logits in rows])
        torch.testing.assert_close(drafted, wanted, atol=1e-4, rtol=1e-4)
    for state in states:
        head.free(state)
    assert head.stack.pool.num_free == head.stack.pool.capacity


def test_nodes_of_a_tree_equal_their_paths(head: DFlash, batch: HeadBatch) -> None:
    assert batch.layer_states is not None
    features, ids = head.select(batch.layer_states)[0, :PLACE], batch.token_ids[0].tolist()
    state = head.new_state()
    head.root([state], [features], [ids[1 : PLACE + 1]])
    head.expand([state], [[(0, 7, -1), (1, 8, -1)]])
    found = head.expand([state], [[(2, 60, 1), (3, 61, 0)]])
    for path, logits in zip([[8, 60], [7, 61]], found, strict=True):
        wanted = trained_logits(head, batch, 0, path)[2]
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    head.free(state)


def test_a_chain_is_the_best_token_of_each_place_and_ends_when_unsure(
    head: DFlash, batch: HeadBatch
) -> None:
    assert batch.layer_states is not None
    features, ids = head.select(batch.layer_states)[0, :PLACE], batch.token_ids[0].tolist()
    state = head.new_state()

    first = int(head.root([state], [features], [ids[1 : PLACE + 1]])[0].argmax())
    (chain,) = head.greedy_chains([state], [first], DEPTH).tolist()
    steps, sure = [first], []
    for node in range(DEPTH - 1):
        logits = head.expand([state], [[(node, steps[-1], node - 1)]])
        steps.append(int(logits[0].argmax()))
        sure.append(float(head.confidence(logits)[0]))
    assert chain == steps
    # Only the third token is not sure enough.
    limits = np.array([[0.0], [sure[1] * 1.01], [0.0]], np.float32)
    head.free(state)
    state = head.new_state()
    head.root([state], [features], [ids[1 : PLACE + 1]])
    (cut,) = head.greedy_chains([state], [first], DEPTH, limits).tolist()
    assert cut == [*steps[:3], -1]
    assert isinstance(head, DSpark) == (head.last_acceptance is not None)
    head.free(state)


@pytest.mark.parametrize(
    ("shape", "rule"), [("chain", "coupled"), ("best_first", "coupled"), ("chain", "rejection")]
)
def test_drafts_end_by_the_confidence_head_and_change_no_token(
    shape: str, rule: str, tiny_folder: Path, tmp_path: Path
) -> None:
    made = untrained("dspark", HeadTarget.from_folder(tiny_folder), num_layers=1, markov_rank=8)
    assert isinstance(made, DSpark)
    assert made.confidence_head is not None
    drafted = {}
    for bias in (-9.0, 9.0):  # never sure, always sure
        torch.nn.init.constant_(made.confidence_head.proj.bias, bias)
        made.save(tmp_path / "dspark")
        runner = LlamaRunner(tiny_folder, kv_tokens=600)
        engine = Engine(ModelTarget(runner), heads=HeadLibrary(tmp_path, tiny_folder, runner))
        temperature = 1.0 if rule == "rejection" else 0.0
        params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, seed=1)
        config = SpeculationConfig(
            method="dspark", shape=shape, acceptance=rule, length="confidence", length_max=5,
            num_speculative_tokens=5, node_budget=12 if shape != "chain" else None,
        )  # fmt: skip
        (session,) = engine.generate([list(b"some prompt")], params, config)
        assert session.error is None
        assert not session.stats.drafter_lost
        depths = session.stats.drafted_by_depth
        drafted[bias] = len([count for count in depths if count])
        if rule == "coupled":
            (plain,) = engine.generate(
                [list(b"some prompt")], params, SpeculationConfig(method="ar")
            )
            assert session.output_ids == plain.output_ids
        assert runner.num_free == runner.kv_capacity
    if shape == "chain":
        assert drafted == {9.0: 5, -9.0: 1}
    else:  # the rule is for chains alone
        assert drafted[-9.0] == drafted[9.0] > 1


def counting_head(target: HeadTarget, block_size: int, back: int, **options: Any) -> XPress:
    """A refiner whose next token is one more than the one ``back`` places before it."""
    rank, vocab_size = 128, target.config.vocab_size
    made = untrained(
        "xpress", target, num_layers=1, int8=False, block_size=block_size, refiner_rank=rank,
        **options,
    )  # fmt: skip
    assert isinstance(made, XPress)
    made.requires_grad_(False).eval()
    refiner = made.refiner_head
    for parameter in refiner.parameters():
        torch.nn.init.zeros_(parameter)
    names = torch.nn.functional.normalize(torch.randn(vocab_size, rank), dim=1)
    refiner.token_embed.weight.copy_(names)
    refiner.in_proj.weight[:, 2 * rank :] = torch.eye(rank)
    refiner.readout.weight.copy_(1000 * names.roll(1, 0))
    if back == 2:  # a place forgets its own token, and takes the one of the place before
        for place in range(1, block_size):
            refiner.mix_l[:, place, place] = -1
            refiner.mix_l[:, place, place - 1] = 1
    made.prepare()
    return made


@pytest.mark.parametrize("back", [1, 2])
def test_a_token_follows_those_that_the_mixer_weighs(
    back: int, target: HeadTarget, batch: HeadBatch
) -> None:
    made = counting_head(target, 6, back)
    assert batch.layer_states is not None
    features, ids = made.select(batch.layer_states)[0], batch.token_ids[0].tolist()
    state = made.new_state()
    for first, end in ((0, 5), (5, 6), (6, 8)):
        logits = made.root([state], [features[first:end]], [ids[first + 1 : end + 1]])
        (chain,) = made.greedy_chains([state], [int(logits[0].argmax())], 5).tolist()
        text = [*ids[: end + 1], *chain]
        for place in range(end + 1, len(text)):
            assert text[place] == (text[place - back] + 1) % target.config.vocab_size
    made.free(state)


@pytest.mark.parametrize("from_anchor", [False, True])
def test_each_jacobi_pass_settles_one_more_token(
    from_anchor: bool, target: HeadTarget, batch: HeadBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a pass the backbone chooses, and a pass that changes nothing is the last one."""
    depth, first, passes, vocab_size = 9, 7, 0, target.config.vocab_size
    made = counting_head(target, 10, 1, from_anchor=from_anchor)
    assert batch.layer_states is not None
    mix = made.refiner_head.mix

    def counted(inputs: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return mix(inputs)

    monkeypatch.setattr(made.refiner_head, "mix", counted)
    features, ids = made.select(batch.layer_states)[0, :PLACE], batch.token_ids[0].tolist()
    state, wanted = made.new_state(), list(range(first, first + depth))
    made.root([state], [features], [ids[1 : PLACE + 1]])
    backbone = made.some_logits(state.hidden[made.first_place :])[:depth].argmax(-1).tolist()
    for node in range(1, depth):  # one by one
        logits = made.expand([state], [[(node - 1, wanted[node - 1], node - 2)]])
        assert int(logits[0].argmax()) == wanted[node]
    for allowed in range(depth + 3):
        made.options = replace(made.options, jacobi_passes=allowed)
        passes = 0
        (chain,) = made.greedy_chains([state], [first], depth).tolist()
        # A place whose beginning the backbone chose counts on from there.
        assert chain == [
            wanted[i] if i <= allowed else (backbone[i - allowed] + allowed) % vocab_size
            for i in range(depth)
        ]
        assert passes == min(allowed, depth)
    made.free(state)


@pytest.mark.parametrize(
    "kind", [(DFlash, DFlashOptions), (DSpark, DSparkOptions), (XPress, XPressOptions)]
)
def test_sessions_draft_up_to_the_end_of_the_context(
    kind: tuple[type[DFlash], type[Any]], zoo: Path, tmp_path: Path
) -> None:
    cls, options = kind
    check_end_of_context(cls, options(num_layers=1, block_size=8), zoo, tmp_path)


def test_what_tokens_of_a_block_see() -> None:
    """Two blocks of two tokens at places 1 and 3 of a text of 4."""
    anchors = torch.tensor([1, 3])
    assert BlockSight().mask(anchors, 2, 4).int().tolist() == [
        [1, 0, 0, 0, 1, 1, 0, 0], [1, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0, 1, 1],
    ]  # fmt: skip
    assert BlockSight(window=2, causal=True).mask(anchors, 2, 4).int().tolist() == [
        [1, 0, 0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 1, 1, 0, 0],
        [0, 1, 1, 0, 0, 0, 1, 0], [0, 1, 1, 0, 0, 0, 1, 1],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("dflash", {"block_size": 1}, "2 or more"),
        ("dflash", {"features": (0,)}, "from 1 to"),
        ("dflash", {"mask_token": 10**6}, "a token id"),
        ("dflash2", {"conv_taps": 9}, "block_size, 8"),
        ("dflash2", {"conv_group": 5}, "a divisor of"),
        ("dflash2", {"candidates": 0}, "from 1 to"),
        ("dspark", {"markov_kind": "other"}, "vanilla, gated, rnn"),
        ("dspark", {"markov_rank": 0}, "above 0"),
        ("xpress", {"refiner_rank": 0}, "1 or more"),
        ("xpress", {"refiner_ratio": 0}, "1 or more"),
        ("xpress", {"jacobi_passes": -1}, "0 or more"),
    ],
)
def test_impossible_options_are_named(
    target: HeadTarget, kind: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        untrained(kind, target, **options)
