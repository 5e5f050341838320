"""The target drafts with some of its own layers, or leaves layers out: what each paper says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.admission import most_entries
from paceline.config import SpeculationConfig, parse_speculation
from paceline.drafters.self_drafter import SelfDrafter
from paceline.engine import Engine, EngineLimits
from paceline.errors import InvalidArgument
from paceline.methods import METHODS
from paceline.models.base import KVSequence, Segment
from paceline.models.exits import D3, SkipDecode, UnifiedLayerSkipping, spread
from paceline.models.kv_cache import PooledSequence
from paceline.models.llama import LlamaRunner
from paceline.models.transformers import TransformersRunner
from paceline.plan import resolve
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.tree import clip, subset
from paceline.types import EMPTY_DRAFT, Budget, Draft, Need
from tests.core.engines import Reference, small_engine
from tests.core.layer_watch import LayerWatch
from tests.core.runners import load_runner, load_runner_without_kernels
from tests.modelzoo import make_model

NUM_LAYERS = 4
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=11)
PROMPTS = [list(b"def f(x): return x"), [65] * 20, list(b"0123456789")]
LOADERS = {"native": load_runner, "torch": load_runner_without_kernels}

# Methods and knobs by the way in which their drafts are computed.
DRAFTS: dict[str, dict[str, Any]] = {
    "chain": {"method": "layer_skip", "length": "fixed", "exit_layer": 2},
    "tree": {
        "method": "layer_skip", "length": "fixed", "exit_layer": 2, "shape": "kary",
        "node_budget": 6,
    },
    "repeating siblings": {
        "method": "layer_skip", "length": "fixed", "exit_layer": 1, "shape": "iid",
        "acceptance": "k_seq", "node_budget": 6,
    },
    "del": {"method": "del", "length": "del", "length_min": 2, "num_speculative_tokens": 3},
    "del tree": {
        "method": "del", "length": "del", "length_min": 1, "shape": "confidence",
        "node_budget": 6,
    },
    "combined": {
        "method": "combined", "length": "fixed", "drafters": ["early_exit", "prompt_lookup"],
    },
    "spread": {"method": "unified_layer_skipping", "length": "fixed"},
    "upper": {"method": "skipdecode", "length": "fixed"},
    "ends": {"method": "d3", "length": "fixed", "depth_decay": 0.9},
}  # fmt: skip
RESUMED = ("chain", "tree", "repeating siblings", "del", "del tree", "combined")


@pytest.fixture(scope="module")
def folder(zoo: Path) -> Path:
    return make_model("llama_gqa", zoo, num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def ar(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(params=LOADERS)
def runner(request: pytest.FixtureRequest, folder: Path) -> LlamaRunner:
    return LOADERS[request.param](folder, kv_tokens=4000, batch_invariant=True)


def new_engine(runner: LlamaRunner, **options: Any) -> Engine:
    return Engine(ModelTarget(runner), **options)


def sequence_of(engine: Engine, session: Session) -> PooledSequence:
    sequence = engine.target._sequences[session.session_id]
    assert isinstance(sequence, PooledSequence)
    return sequence


def steps(
    engine: Engine,
    speculation: dict[str, Any],
    params: SamplingParams,
    prompts: Sequence[list[int]],
) -> Iterator[list[Session]]:
    """The running sessions after each step; nothing may be lost or left behind."""
    config = parse_speculation(speculation)
    sessions = [engine.submit(Request(prompt, params, config)) for prompt in prompts]
    while engine.has_work:
        engine.step()
        yield [session for session in sessions if not session.finished]
    for session in sessions:
        assert session.error is None
        assert not session.stats.drafter_lost
    assert engine.target.num_free == engine.target.kv_capacity


def whole(runner: LlamaRunner, token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """KV of a fresh prefill."""
    sequence = runner.new_sequence()
    runner.forward([Segment(sequence, np.asarray(token_ids, np.int64), logits="none")])
    runner.commit(sequence, range(len(token_ids)))
    keys, values = runner.keys_and_values(sequence)
    result = keys.clone(), values.clone()
    runner.free(sequence)
    return result


# --- exits of the model ---------------------------------------------------------------------------


@pytest.mark.parametrize("exit_layer", range(1, NUM_LAYERS + 1))
def test_an_exit_is_the_first_layers_with_the_shared_norm_and_head(
    exit_layer: int, folder: Path, runner: LlamaRunner
) -> None:
    from transformers import LlamaForCausalLM

    short = LlamaForCausalLM.from_pretrained(folder, num_hidden_layers=exit_layer).eval()
    tokens = np.arange(40) * 7 % 250
    sequence = runner.new_sequence()
    segment = Segment(sequence, tokens, layers=range(exit_layer), resumable=exit_layer < NUM_LAYERS)
    logits = runner.forward([segment]).logits
    with torch.no_grad():
        expected = short(torch.from_numpy(tokens)[None]).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    states = runner.forward([Segment(runner.new_sequence(), tokens)], _STATES).extras
    shared = runner.logits_of(states[Need.LAYER_STATES][:, exit_layer - 1])
    assert torch.equal(shared, logits)


_STATES = frozenset({Need.LAYER_STATES, Need.HIDDEN_STATES})


@pytest.mark.parametrize("stops", [(1,), (2,), (3,), (1, 2), (1, 2, 3)])
def test_what_goes_on_from_an_exit_has_the_same_bits(
    stops: tuple[int, ...], runner: LlamaRunner
) -> None:
    """A tree that leaves at one exit after the other, beside a stranger; and some of it only."""
    prompt, tokens = np.arange(30), np.array([5, 9, 9, 40, 7, 5])
    parents = np.array([-1, 0, 0, 1, 1, 3], np.int32)

    def start() -> KVSequence:
        sequence = runner.new_sequence()
        runner.forward([Segment(sequence, prompt, logits="none")])
        runner.commit(sequence, range(len(prompt)))
        return sequence

    plain = start()
    expected = runner.forward([Segment(plain, tokens, parents)], _STATES)
    split, stranger = start(), start()
    nothing = np.empty(0, np.int64), np.empty(0, np.int32)
    runner.forward([Segment(split, tokens, parents, layers=range(stops[0]), resumable=True)])
    for stop in stops[1:]:
        again = Segment(split, *nothing, layers=range(stop), resumable=True, resume=range(6))
        runner.forward([again])
    # Entries 1 and 2 are siblings: 2 and what is not above 4 stays where it left.
    kept = [0, 1, 4]
    segments = [Segment(stranger, prompt[:3]), Segment(split, *nothing, resume=kept)]
    result = runner.forward(segments, _STATES)
    assert torch.equal(result.logits[result.rows(1)], expected.logits[kept])
    for need, extra in result.extras_of(1).items():
        assert torch.equal(extra, expected.extras[need][kept])
    runner.commit(split, kept)
    runner.commit(plain, kept)
    for one, other in zip(
        runner.keys_and_values(split), runner.keys_and_values(plain), strict=True
    ):
        assert torch.equal(one, other)


def test_an_early_exit_is_not_committed(runner: LlamaRunner) -> None:
    sequence = runner.new_sequence()
    runner.forward([Segment(sequence, np.arange(3), layers=range(2), resumable=True)])
    with pytest.raises(AssertionError, match="not resumed"):
        runner.commit(sequence, [0, 1])
    runner.commit(sequence, [])
    assert runner.num_free == runner.kv_capacity


# --- LayerSkip: drafting and verifying share layers -----------------------------------------------


@pytest.mark.one_of(5)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", DRAFTS)
def test_tokens_and_kv_are_those_of_a_fresh_prefill(
    name: str, params: SamplingParams, runner: LlamaRunner, ar: Reference
) -> None:
    """Bit for bit after every round, for all kinds of drafts."""
    if name == "repeating siblings" and params is GREEDY:
        params = replace(SAMPLED, seed=12)  # at temperature 0 siblings do not repeat
    engine = new_engine(runner)
    params = replace(params, max_tokens=10)
    drafted = 0
    for running in steps(engine, DRAFTS[name], params, PROMPTS[:2]):
        for session in running:
            sequence = sequence_of(engine, session)
            kept = [x.clone() for x in runner.keys_and_values(sequence)]
            fresh = whole(runner, session.token_ids[: sequence.length])
            assert all(torch.equal(a, b) for a, b in zip(kept, fresh, strict=True))
            drafted += session.stats.num_drafted
    assert drafted
    if METHODS[DRAFTS[name]["method"]].acceptance == DRAFTS[name].get("acceptance", "coupled"):
        config = parse_speculation(DRAFTS[name])
        for session in engine.generate(PROMPTS, params, config):
            assert session.output_ids == ar(session.token_ids[: session.prompt_length], params)


@pytest.mark.one_of(5)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", RESUMED)
def test_each_layer_computes_an_accepted_token_once(
    name: str, params: SamplingParams, runner: LlamaRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(runner)
    accepted = 0
    lengths: dict[str, int] = {}
    with monkeypatch.context() as patch:
        watch = LayerWatch(runner, patch)
        for running in steps(engine, DRAFTS[name], params, PROMPTS):
            for session in running:
                sequence = sequence_of(engine, session)
                before = lengths.get(session.session_id, 0)
                new = sequence.slots[before : sequence.length].tolist()
                assert not new or watch.times(new) == {1}
                lengths[session.session_id] = sequence.length
                accepted += session.stats.num_accepted
    assert accepted, "a draft that is never right shows nothing"


@pytest.mark.one_of(1, slow=2)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["chain", "tree", "del"])
def test_drafting_and_verifying_together_compute_what_verifying_alone_would(
    name: str, params: SamplingParams, runner: LlamaRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer once for the last committed token and for each node, accepted or not."""
    watch = LayerWatch(runner, monkeypatch)
    rows = nodes = drafts = 0
    for running in steps(new_engine(runner), DRAFTS[name], params, PROMPTS[:1]):
        for session in running:
            stats = session.stats
            if stats.num_rounds > 1:  # the prompt was read in the first step
                assert watch.num_rows - rows == NUM_LAYERS * (stats.num_draft_nodes - nodes + 1)
                drafts += stats.num_draft_nodes > nodes
            rows, nodes = watch.num_rows, stats.num_draft_nodes
    assert drafts > 3


@pytest.mark.one_of(1, slow=2)
@pytest.mark.parametrize("name", DRAFTS)
def test_no_layer_reads_keys_that_it_has_not_written(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_runner(folder, kv_tokens=2000)
    LayerWatch(runner, monkeypatch)
    for _ in steps(new_engine(runner), DRAFTS[name], SAMPLED, PROMPTS):
        pass


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", ["chain", "kary"])
def test_an_exit_after_the_last_layer_is_always_right(
    shape: str, params: SamplingParams, runner: LlamaRunner, ar: Reference
) -> None:
    config = SpeculationConfig(
        length="fixed", method="layer_skip", exit_layer=NUM_LAYERS, shape=shape
    )
    for session in new_engine(runner).generate(PROMPTS, params, config):
        assert session.output_ids == ar(session.token_ids[: session.prompt_length], params)
        assert session.stats.num_accepted == session.stats.num_drafted > 0


def test_sessions_with_different_exits_share_their_forwards(
    runner: LlamaRunner, ar: Reference
) -> None:
    """Beside AR, trees, a prompt that is still read, and a session that begins later."""
    engine = new_engine(runner, limits=EngineLimits(prefill_chunk=7))
    configs = [
        *(
            {"method": "layer_skip", "length": "fixed", "exit_layer": e}
            for e in range(1, NUM_LAYERS + 1)
        ),
        {"method": "ar"}, DRAFTS["tree"], DRAFTS["del"], DRAFTS["spread"], DRAFTS["upper"],
    ]  # fmt: skip
    sessions: list[Session] = []
    for i, config in enumerate(configs):
        params = replace(SAMPLED if i % 2 else GREEDY, max_tokens=16)
        prompt = PROMPTS[i % 3] + [i]
        sessions.append(engine.submit(Request(prompt, params, parse_speculation(config))))
        engine.step()
    while engine.has_work:
        engine.step()
    for session in sessions:
        assert not session.stats.drafter_lost
        assert session.output_ids == ar(session.token_ids[: session.prompt_length], session.params)
    assert engine.target.num_free == engine.target.kv_capacity


def _drop(draft: Draft, round_number: int) -> Draft:
    return EMPTY_DRAFT if round_number % 2 else draft


def _clip(draft: Draft, round_number: int) -> Draft:
    return clip(draft, 1 + round_number % 3, 4)


def _prune(draft: Draft, round_number: int) -> Draft:
    """Every other leaf goes, so that nodes have other numbers."""
    inner = set(draft.parent_indices.tolist())
    keep = [n for n in range(draft.num_nodes) if n in inner or (n + round_number) % 2]
    return subset(draft, np.asarray(keep, np.int64))


def _replace(draft: Draft, round_number: int) -> Draft:
    """Other tokens than the drafted ones; the same in front now and then."""
    tokens = draft.token_ids.copy()
    tokens[round_number % 2 :] = (tokens[round_number % 2 :] + 1) % 250
    return Draft(tokens, draft.parent_indices)


@pytest.mark.one_of(5)
@pytest.mark.parametrize("change", [_drop, _clip, _prune, _replace])
@pytest.mark.parametrize("name", ["chain", "tree", "spread"])
def test_what_is_verified_need_not_be_what_was_drafted(
    name: str, change: Callable[[Draft, int], Draft], runner: LlamaRunner, ar: Reference
) -> None:
    class Meddler(SelfDrafter):
        rounds = 0

        def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
            self.rounds += 1
            if self.rounds % 5 == 0:
                super().propose(sessions, budgets)  # and forgets it
            return [change(draft, self.rounds) for draft in super().propose(sessions, budgets)]

    target = ModelTarget(runner)
    meddler = Meddler(target)
    engine = Engine(target, {"early_exit": meddler, "fewer_layers": meddler})
    config = parse_speculation(DRAFTS[name])
    for session in engine.generate(PROMPTS, GREEDY, config):
        assert session.output_ids == ar(session.token_ids[: session.prompt_length], GREEDY)
        assert not session.stats.drafter_lost
    assert target.num_free == target.kv_capacity


@pytest.mark.parametrize("name", ["chain", "tree", "del", "spread"])
def test_truncate_after_drafting(name: str, runner: LlamaRunner, ar: Reference) -> None:
    """Also with a draft under way that is never verified."""
    engine = new_engine(runner)
    session = engine.submit(Request(PROMPTS[0], GREEDY, parse_speculation(DRAFTS[name])))
    while session.stats.num_rounds < 4:
        engine.step()
    drafter = engine.drafters[session.plan.method.drafter]
    assert isinstance(drafter, SelfDrafter)
    pending = set()
    for _ in range(3):
        drafter.propose([session], [Budget(3, 3)])
        pending.add(sequence_of(engine, session).num_pending)
    assert len(pending) == 1, "a draft that was not verified is forgotten by the next"
    engine.truncate(session.session_id, session.prompt_length + 2)
    while engine.has_work:
        engine.step()
    assert not session.stats.drafter_lost
    assert session.output_ids == ar(PROMPTS[0], GREEDY)
    assert engine.target.num_free == engine.target.kv_capacity


# --- layers that are left out ---------------------------------------------------------------------

WHOLE = {
    "unified_layer_skipping": {"speedup_ratio": 1.0},
    "skipdecode": {"min_layers": 1.0, "max_layers": 1.0},
    "d3": {"depth_decay": 1.0},
}


@pytest.mark.parametrize("name", WHOLE)
def test_policies_that_leave_nothing_out_are_the_whole_model(
    name: str, runner: LlamaRunner, ar: Reference
) -> None:
    for params in (GREEDY, SAMPLED):
        lossy = SpeculationConfig(method=f"{name}_lossy", allow_lossy=True, **WHOLE[name])  # type: ignore[arg-type]
        drafts = SpeculationConfig(method=name, length="fixed", **WHOLE[name])  # type: ignore[arg-type]
        for config in (lossy, drafts):
            for session in new_engine(runner).generate(PROMPTS, params, config):
                assert session.output_ids == ar(session.token_ids[: session.prompt_length], params)
                assert session.stats.num_accepted == session.stats.num_drafted
        assert session.stats.num_drafted > 0


@pytest.mark.parametrize("name", WHOLE)
def test_lossy_methods_save_layers_and_never_miss_keys(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_runner(folder, kv_tokens=2000)
    engine = new_engine(runner)
    knobs = {"depth_decay": 0.9} if name == "d3" else {}
    watch = LayerWatch(runner, monkeypatch)
    before = 0
    for _ in steps(
        engine, {"method": f"{name}_lossy", "allow_lossy": True} | knobs, GREEDY, PROMPTS
    ):
        before = before or watch.num_rows  # the first step reads the prompts
    generated = GREEDY.max_tokens * len(PROMPTS)
    assert generated * 2 <= watch.num_rows - before < 0.85 * generated * NUM_LAYERS


def test_a_lossy_token_is_computed_by_the_layers_of_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same ones for all sessions of a batch, whatever was generated."""
    runner = load_runner(folder, kv_tokens=2000)
    engine = new_engine(runner)
    config = {"method": "skipdecode_lossy", "allow_lossy": True, "min_layers": 0.5, "max_layers": 1}
    policy = SkipDecode(0.5, 1.0)
    watch = LayerWatch(runner, monkeypatch)
    checked = 0
    for running in steps(engine, config, GREEDY, PROMPTS):
        for session in running:
            index = len(session.output_ids) - 1
            if index >= 0:
                slot = int(sequence_of(engine, session).slots[session.length - 2])
                used = [layer for layer in range(NUM_LAYERS) if watch.computed[layer, slot]]
                assert used == list(policy.layers_at(index, GREEDY.max_tokens, NUM_LAYERS))
                checked += 1
    assert checked > 40


LAYERS = st.integers(1, 48)


@given(num_layers=LAYERS, ratio=st.floats(1.0, 8.0), index=st.integers(0, 200))
def test_unified_layer_skipping_keeps_the_same_even_layers(
    num_layers: int, ratio: float, index: int
) -> None:
    policy = UnifiedLayerSkipping(ratio)
    kept = list(policy.layers_at(index, 200, num_layers))
    assert kept == list(policy.layers_at(0, 7, num_layers))
    assert len(kept) == max(min(2, num_layers), round(num_layers / ratio))
    assert kept[0] == 0
    assert kept[-1] == num_layers - 1
    gaps = np.diff(kept)
    assert (gaps >= 1).all()
    assert not len(gaps) or gaps.max() - gaps.min() <= 1


@given(LAYERS, st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(1, 60))
def test_skipdecode_never_takes_a_layer_up_again(
    num_layers: int, one: float, other: float, length: int
) -> None:
    policy = SkipDecode(min(one, other), max(one, other))
    kept = [set(policy.layers_at(i, length, num_layers)) for i in range(length + 2)]
    assert all(later <= earlier for earlier, later in pairwise(kept))
    top = {0, num_layers - 1}  # warm-up below, and the upper ones
    assert all(top <= layers and layers <= set(range(num_layers)) for layers in kept)
    assert len(kept[length]) >= min(num_layers, int(min(one, other) * num_layers))


@given(LAYERS, st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_d3_is_a_power_law_with_a_floor(num_layers: int, decay: float, floor: float) -> None:
    policy = D3(decay, floor)
    kept = [list(policy.layers_at(i, 100, num_layers)) for i in range(100)]
    least = max(min(2, num_layers), floor * num_layers)
    for i, layers in enumerate(kept):
        law = int(num_layers * decay**i + 1e-9)
        assert len(layers) == max(law, int(np.ceil(least)))
        assert layers[0] == 0
        assert layers[-1] == num_layers - 1
    for earlier, later in pairwise(kept):
        assert set(later) <= set(earlier)


@given(st.integers(1, 60), LAYERS)
def test_spread_is_even(count: int, num_layers: int) -> None:
    layers = spread(count, num_layers)
    assert layers == sorted(set(layers))
    assert len(layers) == min(count, num_layers)
    assert layers[0] == 0


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 1.5, "2"])
def test_values_that_are_no_exit(value: object) -> None:
    for field, given_value in (("exit_layer", value), ("exit_layers", [value])):
        with pytest.raises(InvalidArgument) as caught:
            parse_speculation({"method": "layer_skip", field: given_value})
        assert caught.value.field.startswith(f"speculation.{field}")


@pytest.mark.parametrize(
    ("speculation", "field"),
    [
        ({"method": "layer_skip", "exit_layer": NUM_LAYERS + 1}, "exit_layer"),
        ({"method": "del", "exit_layers": [1, NUM_LAYERS + 1]}, "exit_layers[1]"),
        ({"method": "layer_skip", "length": "del", "exit_layers": [9]}, "exit_layers[0]"),
    ],
)
def test_exits_that_the_target_does_not_have(
    speculation: dict[str, Any], field: str, folder: Path
) -> None:
    small = small_engine(folder)
    with pytest.raises(InvalidArgument) as caught:
        small.engine.submit(Request(PROMPTS[0], GREEDY, parse_speculation(speculation)))
    assert caught.value.field == field
    assert f"1 to {NUM_LAYERS}" in str(caught.value)
    small.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("speculation", "field", "words"),
    [
        ({"method": "del", "exit_layer": 2}, "exit_layer", "exit_layers"),
        ({"method": "draft_model", "exit_layer": 2}, "exit_layer", "num_speculative_tokens"),
        ({"method": "draft_model", "length": "del"}, "length", "layer_skip"),
        ({"method": "s2d", "length": "del"}, "length", "fixed"),
        ({"method": "layer_skip", "exit_layers": [2]}, "exit_layers", "exit_layer"),
    ],
)
def test_knobs_that_belong_to_other_methods(
    speculation: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        resolve(parse_speculation(speculation))
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.fixture(scope="module")
def general(zoo: Path) -> TransformersRunner:
    return TransformersRunner(make_model("gptj", zoo), kv_tokens=500)


@pytest.mark.parametrize(
    "name", [name for name, row in METHODS.items() if Need.SHARED_MODEL in row.needs]
)
def test_attention_of_its_own_refuses_methods_that_share_layers(
    name: str, general: TransformersRunner
) -> None:
    engine = Engine(ModelTarget(general))
    config = SpeculationConfig(method=name, allow_lossy=not METHODS[name].lossless)
    with pytest.raises(InvalidArgument) as caught:
        engine.submit(Request(PROMPTS[0], GREEDY, config))
    assert caught.value.field == "method"
    for word in (name, "shared_model", "fast path", "attention is code of its own"):
        assert word in str(caught.value)
    reason = engine.refusal(METHODS[name])
    assert reason is not None
    assert "shared_model" in reason or METHODS[name].head
    assert engine.target.num_free == engine.target.kv_capacity


@pytest.mark.parametrize("shape", ["chain", "kary", "confidence", "dyspec", "rsd_s", "iid"])
@pytest.mark.parametrize("method", ["layer_skip", "unified_layer_skipping"])
def test_a_session_never_runs_out_of_the_memory_that_it_reserved(
    method: str, shape: str, folder: Path, ar: Reference
) -> None:
    """Shapes may expand more nodes than they draft in the end."""
    rule = {"acceptance": "k_seq"} if shape == "iid" else {}
    config = SpeculationConfig(
        method=method, length="fixed", shape=shape, num_speculative_tokens=5, node_budget=6, **rule
    )
    params = replace(GREEDY, max_tokens=12)
    reserved = most_entries(Session("s", PROMPTS[0], params, resolve(config)))
    engine = new_engine(load_runner(folder, kv_tokens=reserved))
    (session,) = engine.generate([PROMPTS[0]], params, config)
    assert not session.stats.drafter_lost
    assert session.output_ids == ar(PROMPTS[0], params)
