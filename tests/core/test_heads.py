"""Draft heads: what holds for every kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from paceline.config import SpeculationConfig
from paceline.drafters.head import HeadDrafter
from paceline.engine import RoundEvent
from paceline.errors import InvalidArgument, ModelNotFound, PacelineError
from paceline.methods import METHODS
from paceline.models.heads import HEADS, HeadLibrary
from paceline.models.heads.base import Head, HeadBatch, HeadTarget, load_head
from paceline.models.heads.layer import LayerStack
from paceline.models.llama import LlamaRunner
from paceline.models.transformers import TransformersRunner
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.types import Need
from tests.core.engines import Reference, WatchedEngine, find_session
from tests.core.toy_heads import read
from tests.heads import save_untrained, untrained
from tests.modelzoo import make_model

# Those that draft from the states of committed tokens alone.
READERS = tuple(k for k, head in HEADS.items() if head.needs == {Need.HIDDEN_STATES})
METHOD_NAMES = tuple(
    n for n, m in METHODS.items() if m.head in READERS and m.lossless and not m.uses
)
PROMPTS = [list(b"a first prompt"), list(b"def f(x):"), list(b"ab"), list(b"z")]


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained head of each kind for the small random model."""
    result = tmp_path_factory.mktemp("heads")
    save_untrained(result, tiny_folder)
    return result


@pytest.fixture(scope="module")
def tiny_general(tiny_folder: Path) -> TransformersRunner:
    return TransformersRunner(tiny_folder, device="cpu")


@pytest.fixture(scope="module")
def texts(tiny: LlamaRunner) -> HeadBatch:
    """Two texts and what the small random model computes for them."""
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(3))
    return read(tiny, ids)


@cache
def _loaded(kind: str, tiny_folder: Path, tiny: LlamaRunner) -> Head:
    head = untrained(kind, HeadTarget.of_runner(tiny_folder, tiny), noise=0.05)
    head.eval().requires_grad_(False)
    head.prepare()
    return head


def heads_engine(folder: Path, tiny_folder: Path, **options: Any) -> WatchedEngine:
    runner = LlamaRunner(tiny_folder, kv_tokens=4000)
    heads = HeadLibrary(folder, tiny_folder, runner)
    return WatchedEngine(ModelTarget(runner), heads=heads, **options)


# --- drafting -------------------------------------------------------------------------------------


def read_up_to(head: Head, state: Any, texts: HeadBatch, row: int, first: int, end: int) -> Any:
    """``root`` with the features of places ``first`` to ``end - 1``."""
    ids = texts.token_ids[row, first + 1 : end + 1].tolist()
    return head.root([state], [texts.hidden[row, first:end]], [ids])


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
@settings(max_examples=6)
def test_nodes_of_a_tree_equal_their_paths_as_chains(
    kind: str, data: st.DataObject, tiny_folder: Path, tiny: LlamaRunner, texts: HeadBatch
) -> None:
    head = _loaded(kind, tiny_folder, tiny)
    depth = min(head.max_depth or 4, 4)
    paths = data.draw(
        st.lists(
            st.lists(st.integers(0, 3), min_size=1, max_size=depth - 1), min_size=1, max_size=5
        )
    )
    levels = [
        sorted({tuple(p[:level]) for p in paths if len(p) >= level}) for level in range(1, depth)
    ]
    numbers = {(): -1} | {path: i for i, path in enumerate(p for level in levels for p in level)}
    tokens = [7, 60, 130, 200]
    state = head.new_state()
    read_up_to(head, state, texts, 0, 0, 10)
    found = {}
    for level in filter(None, levels):
        frontier = [(numbers[p], tokens[p[-1]], numbers[p[:-1]]) for p in level]
        found |= dict(zip(level, head.expand([state], [frontier]), strict=True))
    head.free(state)
    for path, logits in found.items():
        alone = head.new_state()
        read_up_to(head, alone, texts, 0, 0, 10)
        for i, choice in enumerate(path):
            expected = head.expand([alone], [[(i, tokens[choice], i - 1)]])
        head.free(alone)
        torch.testing.assert_close(logits[None], expected, atol=1e-4, rtol=1e-4)
    assert not _kept_entries(head)


@pytest.mark.parametrize("kind", READERS)
def test_drafting_leaves_nothing_in_what_was_committed(
    kind: str, tiny_folder: Path, tiny: LlamaRunner, texts: HeadBatch
) -> None:
    """Reading in pieces, with drafts that were rejected in between, equals reading at once."""
    head = _loaded(kind, tiny_folder, tiny)
    state, fresh = head.new_state(), head.new_state()
    ends = [3, 4, 9, 12]
    for first, end in zip([0, *ends], ends, strict=False):
        if end == 9:  # a piece that is not the last one
            ids = texts.token_ids[1, first + 1 : end + 1].tolist()
            head.chains([state], [texts.hidden[1, first:end]], [ids], 3)
            continue
        pieces = read_up_to(head, state, texts, 1, first, end)
        head.expand([state], [[(0, 5, -1), (1, 9, -1)]])
        head.expand([state], [[(2, 5, 0), (3, 9, 1), (4, 5, 1)]])
    whole = read_up_to(head, fresh, texts, 1, 0, ends[-1])
    torch.testing.assert_close(pieces, whole, atol=1e-4, rtol=1e-4)
    stack = getattr(head, "stack", None)
    if isinstance(stack, LayerStack):
        # Both are asked for the next token, so that all of these entries are committed.
        for each in (state, fresh):
            read_up_to(head, each, texts, 1, ends[-1], ends[-1] + 1)
        slots = [s.sequence.slots[: ends[-1]].astype(np.int64) for s in (state, fresh)]
        for cache in (stack.pool.keys, stack.pool.values):
            kept, expected = (cache[:, torch.from_numpy(each)] for each in slots)
            torch.testing.assert_close(kept, expected, atol=1e-5, rtol=1e-5)
    head.free(state)
    head.free(fresh)
    assert not _kept_entries(head)


@pytest.mark.parametrize("kind", READERS)
def test_sessions_of_a_batch_draft_as_they_do_alone(
    kind: str, tiny_folder: Path, tiny: LlamaRunner, texts: HeadBatch
) -> None:
    head = _loaded(kind, tiny_folder, tiny)
    depth = min(head.max_depth or 5, 5)
    sizes = (8, 13)

    def draft(rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, Any]:
        states = [head.new_state() for _ in rows]
        features = [texts.hidden[row, : sizes[row]] for row in rows]
        following = [texts.token_ids[row, 1 : sizes[row] + 1].tolist() for row in rows]
        root = head.root(states, features, following)
        below = head.expand(states, [[(0, 3 + row, -1)] for row in rows])
        chains = head.chains(states, [texts.hidden[r, sizes[r] : sizes[r] + 1] for r in rows], [
            texts.token_ids[r, sizes[r] + 1 : sizes[r] + 2].tolist() for r in rows
        ], depth)  # fmt: skip
        for state in states:
            head.free(state)
        return root, below, chains

    together = draft([0, 1])
    for row in (0, 1):
        alone = draft([row])
        for whole, own in zip(together, alone, strict=True):
            np.testing.assert_allclose(whole[row], own[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ("first_limit", "limit"), [(0, None), (0, 0.0), (0.008, 0.008), (0, 1.0), (1.0, 1.0)]
)
def test_chains_in_one_go_equal_chains_step_by_step(
    kind: str,
    first_limit: float,
    limit: float | None,
    tiny_folder: Path,
    tiny: LlamaRunner,
    texts: HeadBatch,
) -> None:
    """Also where a token of a probability below the limit ends a chain."""
    head = _loaded(kind, tiny_folder, tiny)
    for depth in sorted({1, 2, min(head.max_depth or 6, 6)}):
        limits = None if limit is None else np.full((depth, 2), limit, np.float32)
        if limits is not None:
            limits[0] = first_limit
        states = [head.new_state(), head.new_state()]
        features = [texts.hidden[0, :9], texts.hidden[1, :5]]
        following = [texts.token_ids[0, 1:10].tolist(), texts.token_ids[1, 1:6].tolist()]
        chains = head.chains(states, features, following, depth, limits)
        for state in states:
            head.free(state)
        states = [head.new_state(), head.new_state()]
        logits = head.root(states, features, following)
        first, later = logits.argmax(-1).tolist(), None if limits is None else limits[1:]
        unsure = head.confidence(logits) < first_limit
        expected = Head.greedy_chains(head, states, first, depth, later)
        expected[unsure, 1:] = -1
        for state in states:
            head.free(state)
        assert chains.shape == (2, depth)
        assert chains.tolist() == expected.tolist()
        lengths = (chains >= 0).sum(1).tolist()
        if limit != 0.008:
            ends = 1 if first_limit == 1.0 else 2 if limit == 1.0 else depth
            assert lengths == [min(depth, ends)] * 2


def _kept_entries(head: Head) -> int:
    stack = getattr(head, "stack", None)
    return stack.pool.capacity - stack.pool.num_free if isinstance(stack, LayerStack) else 0


# --- in an engine ---------------------------------------------------------------------------------


@pytest.mark.one_of(1, slow=5)
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_tokens_in_a_batch_are_those_of_ar_and_nothing_is_left(
    method: str, folder: Path, tiny_folder: Path, reference: Reference
) -> None:
    engine = heads_engine(folder, tiny_folder)
    params = [
        SamplingParams(max_tokens=24, temperature=t, seed=i, ignore_eos=True)
        for i, t in enumerate((0.0, 0.8, 0.0, 1.0))
    ]
    config = SpeculationConfig(method=method, length="fixed")
    cancelled = engine.submit(Request(PROMPTS[0], params[0], config))
    engine.step()
    engine.step()
    engine.cancel(cancelled.session_id)
    sessions = engine.generate(PROMPTS, params, config)
    for session, prompt, wanted in zip(sessions, PROMPTS, params, strict=True):
        assert session.output_ids == reference(prompt, wanted)
        assert session.stats.num_drafted > 0
        assert not session.stats.drafter_lost
    drafter = engine.drafters[METHODS[method].drafter]
    assert isinstance(drafter, HeadDrafter)
    assert not drafter._readings
    assert not _kept_entries(drafter._head)
    assert find_session(drafter, engine.session_ids) is None
    assert engine.target.num_free == engine.target.kv_capacity


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_no_draft_is_deeper_than_the_head_can(method: str, folder: Path, tiny_folder: Path) -> None:
    engine = heads_engine(folder, tiny_folder)
    config = SpeculationConfig(method=method, length="fixed", num_speculative_tokens=9)
    (session,) = engine.generate(
        PROMPTS[:1], SamplingParams(max_tokens=16, ignore_eos=True), config
    )
    drafter = engine.drafters[METHODS[method].drafter]
    assert isinstance(drafter, HeadDrafter)
    assert 0 < len(session.stats.drafted_by_depth) <= (drafter._head.max_depth or 9)


def test_medusa_accepts_typically(folder: Path, tiny_folder: Path) -> None:
    """Threshold 0 accepts every draft whole, one that no probability exceeds accepts none."""
    for epsilon, expected in ((0.0, 3.0), (1.0, 0.0)):
        events: list[RoundEvent] = []
        engine = heads_engine(folder, tiny_folder)
        config = SpeculationConfig(
            method="medusa", shape="chain", num_speculative_tokens=3, node_budget=3,
            length="fixed", acceptance="typical", allow_lossy=True,
            typical_epsilon=epsilon, typical_delta=1e6,
        )  # fmt: skip
        params = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
        engine.submit(Request(PROMPTS[0], params, config), on_event=events.append)
        while engine.has_work:
            engine.step()
        whole = [e for e in events if e.outcome and e.outcome.draft.num_nodes == 3]
        assert len(whole) > 2
        assert {float(e.num_accepted) for e in whole} == {expected}


@pytest.mark.one_of(1, slow=5)
@pytest.mark.parametrize("method", [m for m in METHOD_NAMES if m != "longspec"])
def test_a_head_drafts_for_its_target_on_the_general_path(
    method: str, folder: Path, tiny_folder: Path, tiny_general: TransformersRunner
) -> None:
    """The same weights in transformers: no token changes, and drafts are those of the fast path."""
    heads = HeadLibrary(folder, tiny_folder, tiny_general)
    general = WatchedEngine(ModelTarget(tiny_general), heads=heads)
    fast = heads_engine(folder, tiny_folder)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    config = SpeculationConfig(method=method, length="fixed", num_speculative_tokens=3)
    ar = general.generate(PROMPTS, params, SpeculationConfig(method="ar"))
    drafted, same = (engine.generate(PROMPTS, params, config) for engine in (general, fast))
    assert [each.output_ids for each in drafted] == [each.output_ids for each in ar]
    assert [each.output_ids for each in same] == [each.output_ids for each in ar]
    accepted = [[each.stats.num_accepted for each in one] for one in (drafted, same)]
    assert accepted[0] == accepted[1]


def test_a_head_that_reads_kv_entries_needs_the_fast_path(
    folder: Path, tiny_folder: Path, tiny_general: TransformersRunner
) -> None:
    heads = HeadLibrary(folder, tiny_folder, tiny_general)
    engine = WatchedEngine(ModelTarget(tiny_general), heads=heads)
    with pytest.raises(InvalidArgument, match="kv_entries") as caught:
        engine.submit(Request(PROMPTS[0], speculation=SpeculationConfig(method="longspec")))
    assert caught.value.field == "method"


@pytest.mark.parametrize("kind", HEADS)
def test_a_missing_head_says_how_to_make_it(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    engine = heads_engine(tmp_path, tiny_folder)
    rows = [method for method in METHODS.values() if method.head == kind and method.lossless]
    assert rows
    for row in rows:
        with pytest.raises(InvalidArgument, match=f"paceline train {kind}"):
            engine.submit(Request(PROMPTS[0], speculation=SpeculationConfig(method=row.name)))
        refusal = engine.refusal(row)
        assert refusal is not None
        assert f"paceline train {kind}" in refusal


# --- on disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HEADS)
def test_save_and_load(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    target = HeadTarget.from_folder(tiny_folder)
    head = untrained(kind, target, seed=4)
    head.save(tmp_path / kind)
    loaded = load_head(HEADS[kind], tmp_path / kind, target)
    assert loaded.options == head.options
    before, after = head.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    stored = load_file(tmp_path / kind / "model.safetensors")
    assert {stored[name].dtype for name, _ in head.named_parameters()} == {torch.bfloat16}
    assert sorted(p.name for p in (tmp_path / kind).iterdir()) == [
        "config.json", "model.safetensors",
    ]  # fmt: skip
    # Weights of the target are not part of it; some heads have tables of tokens of their own.
    tables = ("markov_head.", "refiner_head.", "predecessor_codebook", "successor_codebook")
    own = [value for name, value in after.items() if not any(part in name for part in tables)]
    assert all(target.config.vocab_size not in value.shape for value in own)


def _other_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    a, b = list(vocabulary)[:2]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    file.write_text(json.dumps(content))


OTHER_TARGETS = {
    "hidden_size": {"hidden_size": 32, "num_hidden_layers": 2},
    "num_layers": {"num_hidden_layers": 3},
    "vocab_size": {"vocab_size": 300, "num_hidden_layers": 2},
    "other weights": {"seed": 1, "num_hidden_layers": 2},
    "another tokenizer": {"num_hidden_layers": 2},
}


@pytest.mark.parametrize("difference", OTHER_TARGETS)
def test_a_head_for_another_target_is_refused(
    difference: str, folder: Path, zoo: Path, tmp_path: Path
) -> None:
    other: dict[str, Any] = OTHER_TARGETS[difference]
    target = make_model("llama_gqa", zoo, **other)
    if difference == "another tokenizer":
        target = shutil.copytree(target, tmp_path / "target")
        _other_tokenizer(target)
    library = HeadLibrary(folder, target, LlamaRunner(target, kv_tokens=64))
    for kind in HEADS:
        with pytest.raises(InvalidArgument, match=difference) as caught:
            library.load(kind)
        assert caught.value.field == "head"
        assert str(folder / kind) in str(caught.value)


def _rewrite(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _smaller(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(str(folder / "model.safetensors"))
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, folder / "model.safetensors")


DAMAGE = {
    "has no model.safetensors": lambda folder: (folder / "model.safetensors").unlink(),
    "model.safetensors is damaged": lambda folder: _truncate(folder / "model.safetensors"),
    "does not fit its config.json": _smaller,
    "config.json is not valid JSON": lambda folder: _truncate(folder / "config.json"),
    "config.json does not describe a head": lambda folder: _rewrite(folder, options={"nose": 1}),
    "a strange head": lambda folder: _rewrite(folder, kind="strange"),
}


@pytest.mark.parametrize("reason", DAMAGE)
@pytest.mark.parametrize("kind", HEADS)
def test_a_damaged_head_says_which_file_and_why(
    kind: str, reason: str, folder: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(folder / kind, tmp_path / kind)
    DAMAGE[reason](copied)
    with pytest.raises(PacelineError, match=reason) as caught:
        load_head(HEADS[kind], copied, HeadTarget.from_folder(tiny_folder))
    assert str(copied) in str(caught.value)
    assert isinstance(caught.value, InvalidArgument if "strange" in reason else ModelNotFound)
