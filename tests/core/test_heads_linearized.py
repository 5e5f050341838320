"""Linearized: linear attention with a convolution that stays causal, along every path of a tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import SpeculationConfig
from paceline.errors import InvalidArgument
from paceline.loading import load_engine
from paceline.models.heads.base import HeadTarget
from paceline.models.heads.linearized import (
    LayerMemory,
    Linearized,
    LinearizedOptions,
    LinearLayer,
)
from paceline.models.llama_config import LlamaConfig
from paceline.models.rope import rope_table
from paceline.sampling import SamplingParams
from paceline.tree import path_to
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

GROUP, TAPS = 6, 4
SMALL = LinearizedOptions(group=GROUP, taps=TAPS)


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> HeadTarget:
    return HeadTarget.from_folder(tiny_folder)


@pytest.fixture(scope="module")
def layer(target: HeadTarget) -> LinearLayer:
    return new_layer(target.config)


def new_layer(config: LlamaConfig, options: LinearizedOptions = SMALL) -> LinearLayer:
    torch.manual_seed(0)
    made = LinearLayer(config, options).requires_grad_(False)
    for parameter in made.parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    return made


def convolution_alone(config: LlamaConfig) -> LinearLayer:
    """Its values are its input, nothing is attended to, and what the convolution gives is added."""
    made = new_layer(config)
    width = config.num_heads * config.head_dim
    for parameter in (made.scale, made.offset, made.down.weight):
        parameter.zero_()
    made.values.weight.copy_(torch.eye(width, config.hidden_size))
    made.out.weight.copy_(torch.eye(config.hidden_size, width))
    return made


def inputs(config: LlamaConfig, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, config.hidden_size, generator=generator)


def whole(layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
    """A text in one call.  # [length, hidden_size]"""
    return layer(x[None], rope_table(layer.config)[: len(x)])[0]


class Reading:
    """A session of one layer."""

    def __init__(self, layer: LinearLayer, like: torch.Tensor) -> None:
        self.layer, self.memory = layer, LayerMemory(layer.config, like)
        self.length, self.table = 0, rope_table(layer.config)

    def extend(
        self, x: torch.Tensor, places: list[int], paths: list[list[int]], pending: list[int]
    ) -> torch.Tensor:
        begin = self.length - self.length % self.layer.options.group
        every = torch.tensor([*range(begin, self.length), *pending, *places])
        own = torch.tensor(places)
        return self.layer.extend(x, self.table[own], own, paths, every, self.memory)

    def read(self, x: torch.Tensor, most: int = GROUP) -> torch.Tensor:
        """Committed places, at most ``most`` at a time."""
        options, found = self.layer.options, []
        while len(x):
            size = min(len(x), most, options.group - self.length % options.group)
            places = list(range(self.length, self.length + size))
            found.append(
                self.extend(x[:size], places, [list(range(r + 1)) for r in range(size)], [])
            )
            self.memory.absorb(options.group, options.taps)
            self.length, x = self.length + size, x[size:]
        return torch.cat(found)

    def draft(self, x: torch.Tensor, parents: list[int]) -> torch.Tensor:
        """A tree, a node at a time."""
        found: list[torch.Tensor] = []
        pending: list[int] = []
        for node in range(len(x)):
            path = list(path_to(torch.tensor(parents).numpy(), node))
            place = self.length + len(path) - 1
            found.append(self.extend(x[node : node + 1], [place], [path], pending))
            pending.append(place)
        self.memory.forget_new()
        return torch.cat(found)


# --- causality -----------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [0, 3, 5, 6, 11, 19])
def test_no_place_sees_a_later_one(changed: int, layer: LinearLayer) -> None:
    x = inputs(layer.config, 20)
    before, other = whole(layer, x), x.clone()
    other[changed] += 1.0
    after = whole(layer, other)
    assert torch.equal(before[:changed], after[:changed])
    assert not torch.allclose(before[changed:], after[changed:], atol=1e-4)


def test_the_convolution_is_one_whose_later_taps_are_masked_out(target: HeadTarget) -> None:
    """As the paper has it: a window around the place, and a mask over its later half."""
    config = target.config
    layer = convolution_alone(config)
    x = inputs(config, 15)
    values = layer.input_norm(x)[:, : config.num_heads * config.head_dim]
    kernel = torch.zeros(values.shape[1], 1, 2 * TAPS - 1)
    kernel[:, 0, :TAPS] = layer.taps.flatten(1).flip(0).T  # the rest is behind the mask
    expected = F.conv1d(values.T[None], kernel, padding=TAPS - 1, groups=len(kernel))[0].T
    gate = F.silu(layer.gate(layer.input_norm(x)))
    torch.testing.assert_close(whole(layer, x), x + layer.out(gate * expected))


# --- trees ---------------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 12))
    return [draw(st.integers(-1, node - 1)) for node in range(size)]


@pytest.mark.parametrize("part", ["convolution", "whole layer"])
@given(parents=trees(), committed=st.integers(0, 20))
@settings(max_examples=10)
def test_every_node_of_a_tree_is_as_its_path_would_be_in_order(
    part: str, parents: list[int], committed: int, target: HeadTarget
) -> None:
    """Behind texts of any length: shorter than the taps, and across the ends of groups."""
    config = target.config
    layer = convolution_alone(config) if part == "convolution" else new_layer(config)
    x = inputs(config, committed + len(parents))
    reading = Reading(layer, x)
    if committed:
        reading.read(x[:committed])
    found = reading.draft(x[committed:], parents)
    for node in range(len(parents)):
        path = list(path_to(torch.tensor(parents).numpy(), node))
        text = torch.cat([x[:committed], x[[committed + each for each in path]]])
        torch.testing.assert_close(found[node], whole(layer, text)[-1], atol=1e-4, rtol=1e-4)


def test_a_tree_leaves_nothing_in_the_memory(layer: LinearLayer) -> None:
    x = inputs(layer.config, 30)
    plain, drafted = Reading(layer, x), Reading(layer, x)
    for first in range(0, 20, 5):
        rows = [reading.read(x[first : first + 5]) for reading in (plain, drafted)]
        drafted.draft(x[20:26], [-1, 0, -1, 1, 2, 3])
        assert torch.equal(*rows)


# --- the memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 6])
def test_reading_in_pieces_is_reading_at_once(most: int, layer: LinearLayer) -> None:
    x = inputs(layer.config, 25)
    torch.testing.assert_close(
        Reading(layer, x).read(x, most), whole(layer, x), atol=1e-4, rtol=1e-4
    )


def test_the_memory_does_not_grow_with_the_context(target: HeadTarget) -> None:
    head = random_head(Linearized, target, SMALL)
    head.prepare()
    config, size = target.config, target.config.hidden_size
    state, kept = head.new_state(), []
    for _ in range(10):
        head.root([state], [torch.randn(GROUP, size)], [[5] * GROUP])
        kept.append(sum(memory.num_kept for memory in state.memories))
    width = config.num_heads * config.head_dim
    assert state.length == 10 * GROUP
    assert kept == [width * config.head_dim + (TAPS - 1) * width] * 10
    head.root([state], [torch.randn(GROUP - 1, size)], [[5] * (GROUP - 1)])
    assert state.memories[0].num_kept == kept[0] + 3 * (GROUP - 1) * width


def test_near_places_are_read_by_squares_and_far_ones_by_their_sum(target: HeadTarget) -> None:
    """The weights of single places, written out."""
    config = target.config
    layer = new_layer(config)
    length, dim = 15, config.head_dim
    queries, keys, _ = layer._project(inputs(config, length), rope_table(config)[:length])
    places = torch.arange(length)
    weights = layer._weights(queries, keys, places, places, places[None] <= places[:, None])
    for row, column in ((8, 7), (8, 6), (8, 5), (14, 0), (14, 11), (14, 12), (3, 4)):
        for head in range(config.num_heads):
            near, far = (float(queries[row, head, p] @ keys[column, head, p]) for p in (0, 1))
            expected = max(near / dim**0.5, 0.0) ** 2 / GROUP
            if row // GROUP != column // GROUP:
                expected = far / dim**0.5 / (GROUP * (row // GROUP))
            found = float(weights[row, head, column])
            assert found == pytest.approx(expected * (column <= row), abs=1e-5)


# --- the head ------------------------------------------------------------------------------------


def test_training_follows_what_drafting_computes(target: HeadTarget) -> None:
    """Step k of a place is the k-th token of a chain that begins k places before it."""
    head = random_head(Linearized, target, SMALL)
    ids = list(range(40, 56))
    features = torch.randn(len(ids), target.config.hidden_size, generator=torch.manual_seed(1))
    head.prepare()
    outputs = head(features[None], torch.tensor([ids]), 5)
    for place in (4, 5, 7, 12, 15):
        for step in range(1, 5):
            begin = place - step
            (found,) = drafted_logits(
                head, features[: begin + 1], ids[: begin + 1], [ids[begin + 1 : place + 1]]
            )
            expected = head.logits(outputs[step][0, place])
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_sessions_that_fill_the_context_keep_their_drafter(zoo: Path, tmp_path: Path) -> None:
    check_end_of_context(Linearized, SMALL, zoo, tmp_path)


@pytest.mark.parametrize("options", [{"group": 0}, {"taps": 0}], ids=str)
def test_bad_options_are_named(options: dict[str, Any], target: HeadTarget) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        Linearized(target, LinearizedOptions(**options))


@pytest.mark.slow
def test_training_makes_drafts_right(tmp_path: Path) -> None:
    """``decode`` checks that they change no token."""
    batch = read(demo_runner(), texts())
    torch.manual_seed(0)
    head = Linearized(demo_target(), LinearizedOptions(ffn=96))
    before, _ = evaluate(head, batch)
    train(head, batch, 40, rate=4e-3)
    after, agreement = evaluate(head, batch)
    assert after < 0.5 * before
    assert agreement[0] > 0.7
    assert accepted_length(decode(head, tmp_path, "linearized")) > 1.5


def test_it_drafts_for_a_target_in_bfloat16() -> None:
    engine = load_engine("demo", dtype="bfloat16")
    speculation = SpeculationConfig(method="linearized", length="fixed")
    prompt = list(range(100, 140))
    params = SamplingParams(max_tokens=40, ignore_eos=True)  # beyond the end of a group
    (drafted,) = engine.generate([prompt], params, speculation)
    (plain,) = engine.generate([prompt], params, SpeculationConfig(method="ar"))
    assert drafted.output_ids == plain.output_ids
    assert not drafted.stats.drafter_lost
    assert drafted.stats.num_drafted > 0
