"""LongSpec: entries of its own that do not grow, and attention in two parts that is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.drafters.head import MemoryHeadDrafter
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.models.base import Segment
from paceline.models.heads import HeadLibrary
from paceline.models.heads.base import HeadTarget, load_head
from paceline.models.heads.longspec import (
    LongSpec,
    LongSpecOptions,
    anchored_positions,
    attend,
    hybrid_attention,
)
from paceline.models.llama import LlamaRunner
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.tokenizer import load_tokenizer
from tests.core.prompts import code_prompts
from tests.core.toy_heads import (
    accepted_length,
    check_end_of_context,
    decode,
    demo_runner,
    demo_target,
    evaluate,
    random_head,
    read,
    texts,
    train,
)

IDS = list(range(40, 58))
WINDOW = 6


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> HeadTarget:
    return HeadTarget.from_folder(tiny_folder)


@pytest.fixture
def head(target: HeadTarget, tiny_folder: Path, tmp_path: Path) -> LongSpec:
    """A random head as it is loaded to draft."""
    random_head(LongSpec, target, LongSpecOptions(window=WINDOW, horizon=4)).save(tmp_path)
    loaded = load_head(LongSpec, tmp_path, target)
    assert isinstance(loaded, LongSpec)
    loaded.bind(tiny_folder)
    return loaded


@pytest.fixture
def states(target: HeadTarget) -> torch.Tensor:
    """# [length, num_layers, hidden_size]"""
    shape = len(IDS), target.config.num_layers, target.config.hidden_size
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def random_entries(length: int, kv_heads: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, length, kv_heads, 16, generator=generator)
    return keys, values


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("length", [0, 1, 5, 300])
def test_merged_attention_is_dense_attention_with_the_trees_mask(
    kv_heads: int, length: int
) -> None:
    parents = [-1, -1, 0, 0, 1, 2, 2, 5]
    visible = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        ancestor = node
        while ancestor >= 0:
            visible[node, ancestor] = True
            ancestor = parents[ancestor]
    q = torch.randn(len(parents), 4, 16, generator=torch.Generator().manual_seed(3))
    prefix, tree = random_entries(length, kv_heads, 1), random_entries(len(parents), kv_heads, 2)
    merged = hybrid_attention(q, prefix, tree, visible)
    keys, values = (torch.cat(each).transpose(0, 1) for each in zip(prefix, tree, strict=True))
    dense = F.scaled_dot_product_attention(
        q.transpose(0, 1), keys, values,
        attn_mask=torch.cat([torch.ones(len(parents), length, dtype=torch.bool), visible], 1),
        enable_gqa=True,
    )  # fmt: skip
    assert torch.allclose(merged, dense.transpose(0, 1), atol=1e-5)


def test_the_log_sum_exp_is_that_of_the_scores() -> None:
    q = 30.0 * torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(3))
    keys, values = random_entries(9, 2, 1)
    _, total = attend(q, keys, values)
    scores = (q[:, :, None] * keys.repeat_interleave(2, 1).transpose(0, 1)).double().sum(-1) / 4.0
    assert torch.allclose(total.double(), scores.logsumexp(-1), rtol=1e-5)
    none, total = attend(q, keys[:0], values[:0])
    assert torch.equal(none, torch.zeros_like(q))
    assert torch.equal(total, torch.full((3, 4), float("-inf")))


def test_the_entries_that_it_trains_on_are_the_caches(
    tiny: LlamaRunner, tiny_folder: Path, head: LongSpec
) -> None:
    batch = read(tiny, torch.tensor([IDS]))
    assert batch.layer_states is not None
    given = head.target_entries(batch.layer_states, torch.arange(len(IDS)))
    sequence = tiny.new_sequence()
    tiny.forward([Segment(sequence, batch.token_ids[0].numpy())])
    tiny.commit(sequence, range(len(IDS)))
    for made, cached in zip(given, tiny.keys_and_values(sequence, -1), strict=True):
        assert cached.shape[0] == 1
        assert torch.allclose(made[0], cached[0], atol=1e-5)
    tiny.free(sequence)


def test_drafting_computes_what_training_does(
    head: LongSpec, states: torch.Tensor, target: HeadTarget
) -> None:
    """Also where the text is longer than the window."""
    for last in range(len(IDS) - 4):
        phase = -last % 4  # a step begins with the last verified place
        drafted = head(states[None], torch.tensor([IDS]), phase)[0, last : last + 4]
        memory = head.target_entries(states[None, : last + 1], torch.arange(last + 1))
        state = head.new_state()
        state.memory = (memory[0][0], memory[1][0])
        logits = [head.root([state], [states[: last + 1, 0]], [IDS[: last + 1]])[0]]
        for node in range(3):
            step = (node, IDS[last + 1 + node], node - 1)
            logits.append(head.expand([state], [[step]])[0])
        assert torch.allclose(torch.stack(logits), target.logits(drafted), atol=1e-4)


@pytest.mark.parametrize("phase", range(4))
def test_a_place_reads_no_entry_behind_the_last_verified_one(
    phase: int, head: LongSpec, states: torch.Tensor
) -> None:
    length, ids = len(IDS), torch.tensor([IDS])
    before = head(states[None], ids, phase)[0]
    for place in range(length):
        other = states.clone()
        other[place] += 1.0
        after = head(other[None], ids, phase)[0]
        for row in range(length):
            start = max(0, (row + phase) // 4 * 4 - phase)
            assert torch.equal(before[row], after[row]) == (place > start)


def test_self_attention_sees_the_window_alone(head: LongSpec, states: torch.Tensor) -> None:
    length = len(IDS)
    before = head(states[None], torch.tensor([IDS]))[0]
    for place in range(length):
        other = torch.tensor([IDS])
        other[0, place] += 1
        after = head(states[None], other)[0]
        for row in range(length):
            start = row // 4 * 4
            seen = start - WINDOW < place <= row
            assert torch.equal(before[row], after[row]) != seen


def draft(head: LongSpec, memory: tuple[torch.Tensor, ...], paths: list[list[int]]) -> torch.Tensor:
    """Logits after each token of paths of one tree, in the order of the paths."""
    state = head.new_state()
    state.memory = (memory[0], memory[1])
    head.root([state], [torch.zeros(len(IDS), 1)], [IDS])
    nodes: dict[tuple[int, ...], int] = {(): -1}
    rows: dict[tuple[int, ...], torch.Tensor] = {}
    for depth in (1, 2, 3):
        level = list(dict.fromkeys(tuple(path[:depth]) for path in paths))
        for path in level:
            nodes[path] = len(nodes) - 1
        frontier = [(nodes[path], path[-1], nodes[path[:-1]]) for path in level]
        rows |= dict(zip(level, head.expand([state], [frontier]), strict=True))
    return torch.stack([rows[tuple(p[:d])] for p in paths for d in (1, 2, 3)])


def test_a_node_of_a_tree_is_as_on_its_path_alone(head: LongSpec, states: torch.Tensor) -> None:
    keys, values = head.target_entries(states[None], torch.arange(len(IDS)))
    memory = (keys[0], values[0])
    paths = [[60, 61, 62], [60, 61, 66], [60, 63, 64], [65, 61, 62]]
    together = draft(head, memory, paths)
    alone = torch.cat([draft(head, memory, [path]) for path in paths])
    assert torch.allclose(together, alone, atol=1e-4)


def test_sessions_do_not_mix_and_rounds_leave_no_trace(
    head: LongSpec, states: torch.Tensor
) -> None:
    keys, values = head.target_entries(states[None], torch.arange(len(IDS)))

    def rounds(count: int, first: int) -> list[torch.Tensor]:
        """The logits of ``count`` sessions together, the first of which read in three rounds."""
        sessions = [head.new_state() for _ in range(count)]
        for number, state in enumerate(sessions, first):
            done = 0
            for end in (5, 6, 9) if number == 0 else (7,):
                state.memory = (keys[0, :end], values[0, :end])
                head.root([state], [states[done:end, 0]], [IDS[done:end]])
                head.expand([state], [[(0, 90, -1), (1, 91, -1)]])
                done = end
            state.memory = (keys[0, : done + 1], values[0, : done + 1])
        ids = [IDS[9:10] if number == 0 else IDS[7:8] for number in range(first, first + count)]
        rooted = head.root(sessions, [states[:1, 0]] * count, ids)
        grown = head.expand(sessions, [[(0, 60, -1), (1, 61, -1)]] * count)
        return [torch.cat([rooted[i : i + 1], grown[2 * i : 2 * i + 2]]) for i in range(count)]

    together, alone = rounds(2, 0), [rounds(1, 0)[0], rounds(1, 1)[0]]
    for both, one in zip(together, alone, strict=True):
        assert torch.allclose(both, one, atol=1e-4)
    at_once = head.new_state()
    at_once.memory = (keys[0, :10], values[0, :10])
    assert torch.allclose(
        head.root([at_once], [states[:10, 0]], [IDS[:10]])[0], together[0][0], atol=1e-4
    )


def test_known_tokens_need_no_feature(head: LongSpec, states: torch.Tensor) -> None:
    """A session that begins with known tokens drafts as one that reads them."""
    keys, values = head.target_entries(states[None], torch.arange(len(IDS)))
    logits = []
    for known in (0, 11):
        state = head.new_state()
        if known:
            assert head.adopt(state, IDS[: known + 1], "x") == known
            assert head.num_known(IDS[: known + 1], "x") == known
        state.memory = (keys[0, :12], values[0, :12])
        ids = IDS[1:13][known:]
        logits.append(head.root([state], [states[: len(ids), 0]], [ids]))
    assert torch.allclose(logits[0], logits[1], atol=1e-5)
    assert head.adopt(head.new_state(), [7], "x") == 0


def test_the_first_tokens_keep_their_positions() -> None:
    assert anchored_positions(7, 4, 100).tolist() == [0, 1, 2, 3, 104, 105, 106]
    assert anchored_positions(7, 0, 3).tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert anchored_positions(5, 4, 0).tolist() == [0, 1, 2, 3, 4]


def test_training_shifts_positions_and_measuring_does_not(
    target: HeadTarget, tiny_folder: Path, tiny: LlamaRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = random_head(LongSpec, target, LongSpecOptions(max_offset=20))
    head.bind(tiny_folder)
    offsets: list[int] = []
    forward = head.forward

    def note(
        states: torch.Tensor, ids: torch.Tensor, phase: int = 0, offset: int = 0
    ) -> torch.Tensor:
        offsets.append(offset)
        return forward(states, ids, phase, offset)

    monkeypatch.setattr(head, "forward", note)
    batch = read(tiny, torch.tensor([IDS]))
    head.train()
    for _ in range(60):
        head.loss(batch)
    assert 0 <= min(offsets) < 5
    assert 15 < max(offsets) <= 20
    head.eval()
    head.loss(batch)
    assert offsets[-1] == 0


def test_an_offset_changes_the_anchors_distance_alone(head: LongSpec, states: torch.Tensor) -> None:
    ids = torch.tensor([IDS])
    object.__setattr__(head.options, "anchors", 0)
    plain, shifted = (head(states[None], ids, 0, offset) for offset in (0, 40))
    assert torch.allclose(plain, shifted, atol=1e-3), "rotary positions are relative"
    object.__setattr__(head.options, "anchors", 4)
    plain, shifted = (head(states[None], ids, 0, offset) for offset in (0, 40))
    assert torch.allclose(plain[:, :3], shifted[:, :3], atol=1e-3)
    assert not torch.allclose(plain[:, 8:], shifted[:, 8:], atol=1e-3)


# --- in the loop ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_its_own_entries_do_not_grow_with_the_context(tmp_path: Path) -> None:
    """And the tokens are AR's, at contexts far above the window."""
    random_head(LongSpec, demo_target(), LongSpecOptions(window=16)).save(tmp_path / "longspec")
    runner = demo_runner()
    engine = Engine(ModelTarget(runner), heads=HeadLibrary(tmp_path, TARGET_DIR, runner))
    text = code_text(700)
    drafter = engine.local_drafter("longspec")
    assert isinstance(drafter, MemoryHeadDrafter)
    sizes: dict[int, set[int]] = {}
    root = drafter._head.root

    def note(states: list[object], *arguments: object) -> torch.Tensor:
        logits: torch.Tensor = root(states, *arguments)  # type: ignore[arg-type]
        for state in states:
            sizes.setdefault(len(state.memory[0]) // 100, set()).add(len(state.keys))  # type: ignore[attr-defined]
        return logits

    drafter._head.root = note  # type: ignore[method-assign, assignment]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    config = SpeculationConfig(method="longspec", length="fixed")
    prompts = [text[:length] for length in (5, 150, 350, 700)]
    sessions = engine.generate(prompts, params, config)
    ar = engine.generate(prompts, params, SpeculationConfig(method="ar"))
    assert [s.output_ids for s in sessions] == [s.output_ids for s in ar]
    assert all(s.stats.num_drafted > 0 and not s.stats.drafter_lost for s in sessions)
    long = set().union(*(found for hundreds, found in sizes.items() if hundreds))
    assert long == {16}, "entries, whatever the context"
    assert max(sizes) == 7
    assert runner.num_free == runner.kv_capacity


def code_text(length: int) -> list[int]:
    tokenizer = load_tokenizer(TARGET_DIR)
    ids = [token for prompt in code_prompts(tokenizer, 12) for token in prompt]
    while len(ids) < length:
        ids += ids
    return ids[:length]


def test_the_targets_entries_are_not_kept_between_rounds(tmp_path: Path) -> None:
    random_head(LongSpec, demo_target(), LongSpecOptions()).save(tmp_path / "longspec")
    runner = demo_runner()
    engine = Engine(ModelTarget(runner), heads=HeadLibrary(tmp_path, TARGET_DIR, runner))
    drafter = engine.local_drafter("longspec")
    assert isinstance(drafter, MemoryHeadDrafter)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    config = SpeculationConfig(method="longspec", length="fixed")
    session = engine.submit(Request(code_text(40), params, config))
    while engine.has_work:
        engine.step()
        for reading in drafter._readings.values():
            assert len(reading.state.memory[0]) == 0
    assert session.stats.num_drafted > 0


def test_sessions_begin_with_cached_prompts(tmp_path: Path) -> None:
    """The target computes none of a cached prompt again for the head."""
    random_head(LongSpec, demo_target(), LongSpecOptions()).save(tmp_path / "longspec")
    runner = demo_runner()
    engine = Engine(ModelTarget(runner), heads=HeadLibrary(tmp_path, TARGET_DIR, runner))
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    config = SpeculationConfig(method="longspec", length="fixed")
    first = engine.generate([code_text(200)], params, config)[0]
    hits = runner.prefixes.num_hit if runner.prefixes else 0
    second = engine.generate([code_text(200)], params, config)[0]
    assert runner.prefixes is not None
    assert runner.prefixes.num_hit - hits >= 176
    assert second.output_ids == first.output_ids
    assert second.stats.num_rounds == first.stats.num_rounds


@pytest.mark.nightly
def test_it_learns_what_the_target_writes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    head = LongSpec(demo_target(), LongSpecOptions())
    head.bind(TARGET_DIR)
    batch = read(demo_runner(), texts())
    train(head, batch, 220, rate=5e-3)
    _, agreement = evaluate(head, batch)
    assert agreement[:4].min() > 0.7
    assert accepted_length(decode(head, tmp_path, "longspec")) > 2.5


@pytest.mark.slow
def test_the_end_of_the_context(zoo: Path, tmp_path: Path) -> None:
    check_end_of_context(LongSpec, LongSpecOptions(window=8), zoo, tmp_path)


@pytest.mark.parametrize("name", ["window", "horizon"])
def test_bad_options_are_named(name: str, target: HeadTarget) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}: got 0"):
        LongSpec(target, LongSpecOptions(**{name: 0}))
