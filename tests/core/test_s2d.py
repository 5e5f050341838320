"""S2D: sub-models of one draft model, each token from the shallowest that is sure of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import SpeculationConfig, parse_speculation
from paceline.drafters import s2d as s2d_module
from paceline.drafters.base import Drafter, DrafterContext
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.s2d import S2D, halvings
from paceline.engine import Engine, RoundEvent
from paceline.errors import InvalidArgument
from paceline.methods import METHODS
from paceline.models.base import Segment
from paceline.models.llama import LlamaRunner
from paceline.models.transformers import TransformersRunner
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.types import Budget
from tests.core.engines import Reference, WatchedEngine, find_session
from tests.core.layer_watch import LayerWatch
from tests.core.runners import load_runner, load_runner_without_kernels
from tests.modelzoo import make_model

NUM_LAYERS = 4
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=11)
PROMPTS = [list(b"def f(x): return x"), [65] * 20, list(b"0123456789"), [7]]
LOADERS = {"native": load_runner, "torch": load_runner_without_kernels}

Drafts = dict[int, list[tuple[int, list[int]]]]  # by prompt: committed tokens before, draft


@pytest.fixture(scope="module")
def folder(zoo: Path) -> Path:
    """The target, and the draft model as well: right when it is asked in full."""
    return make_model("llama_gqa", zoo, num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def ar(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(params=LOADERS)
def drafter(request: pytest.FixtureRequest, folder: Path) -> LlamaRunner:
    return LOADERS[request.param](folder, kv_tokens=3000, batch_invariant=True)


@pytest.fixture(scope="module")
def target(folder: Path) -> LlamaRunner:
    return load_runner(folder, kv_tokens=3000)


def new_engine(target: LlamaRunner, drafter: LlamaRunner, **options: Any) -> WatchedEngine:
    return WatchedEngine(ModelTarget(target), {"draft_model": DraftModel(drafter)}, **options)


def generate(
    engine: Engine, params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS, **knobs: Any
) -> tuple[list[Session], Drafts]:
    drafts: Drafts = {}

    def note(event: RoundEvent) -> None:
        session, outcome = event.session, event.outcome
        assert outcome is not None
        before = session.length - len(outcome.token_ids)
        drafts.setdefault(session.token_ids[0], []).append(
            (before, outcome.draft.token_ids.tolist())
        )

    config = SpeculationConfig.model_validate({"method": "s2d", "length": "fixed", **knobs})
    sessions = [engine.submit(Request(prompt, params, config), on_event=note) for prompt in prompts]
    while engine.has_work:
        engine.step()
    assert not any(session.stats.drafter_lost for session in sessions)
    for runner in (engine.target.runner, engine.drafters["draft_model"].runner):  # type: ignore[union-attr]
        assert runner.num_free == runner.kv_capacity
    return sessions, drafts


def truncated(folder: Path, num_layers: int, place: Path) -> Path:
    """The checkpoint with its first layers alone."""
    from transformers import LlamaForCausalLM

    if not place.exists():
        short = LlamaForCausalLM.from_pretrained(folder, num_hidden_layers=num_layers)
        short.save_pretrained(place)
    return place


# --- sub-models -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("exits", "threshold", "layers"), [
    ((1, 2, 4), 0.0, 1), ((2, 4), 0.0, 2), ((3,), 0.7, 3), ((1, 3), 1.0, 3), ((1, 2, 4), 1.0, 4),
])  # fmt: skip
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_sub_model_is_the_first_layers_with_the_shared_norm_and_head(
    params: SamplingParams, exits: tuple[int, ...], threshold: float, layers: int,
    folder: Path, target: LlamaRunner, zoo: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Threshold 0 is always the shallowest, 1 always the deepest: the drafts of a shorter model."""
    drafter = load_runner(folder, kv_tokens=3000)
    short = load_runner(truncated(folder, layers, zoo / f"first {layers} layers"), kv_tokens=3000)
    watch = LayerWatch(drafter, monkeypatch)
    knobs = {"exit_layers": exits, "exit_threshold": threshold, "num_speculative_tokens": 4}
    _, drafts = generate(new_engine(target, drafter), params, **knobs)
    _, expected = generate(
        new_engine(target, short), params, method="draft_model", num_speculative_tokens=4
    )
    assert drafts == expected
    used = {layer for (layer, _), times in watch.computed.items() if times}
    assert used == set(range(layers)), "no other layer was computed"


@pytest.mark.one_of(5)
@pytest.mark.parametrize(
    ("drafter", "exits", "threshold"),
    [
        pytest.param(
            loader, exits, threshold,
            # torch's row-by-row attention takes long.
            marks=[pytest.mark.nightly] * (loader == "torch" and threshold < 0.25),
        )
        for loader in LOADERS
        for exits in ((1, 4), (2, 3, 4))
        for threshold in (0.1, 0.25)
    ],
    indirect=["drafter"],
)  # fmt: skip
def test_a_token_comes_from_the_shallowest_exit_that_is_sure(
    exits: tuple[int, ...], threshold: float, drafter: LlamaRunner, target: LlamaRunner
) -> None:
    """Asked of each sub-model by itself, with all of the text before: bit for bit the same."""
    knobs = {"exit_layers": exits, "exit_threshold": threshold}
    # At 0.25 few tokens use both exits; at 0.1 the deep one is rare.
    params = replace(GREEDY, max_tokens=12 if threshold == 0.25 else 24)
    sessions, drafts = generate(new_engine(target, drafter), params, **knobs)
    used: Counter[int] = Counter()
    for session in sessions:
        for before, draft in drafts[session.token_ids[0]]:
            text = [*session.token_ids[:before], *draft]
            rows = {e: logits_at(drafter, text, e)[before - 1 : -1] for e in exits}
            for i, token in enumerate(draft):
                chances = {e: float(rows[e][i].softmax(-1).max()) for e in exits}
                assert all(abs(p - threshold) > 1e-6 for p in chances.values()), "a close call"
                sure = [e for e in exits if chances[e] >= threshold]
                chosen = sure[0] if sure else exits[-1]
                assert token == int(rows[chosen][i].argmax())
                used[chosen] += 1
    assert len(used) > 1, "only one exit was ever used: this shows nothing"


def logits_at(runner: LlamaRunner, token_ids: Sequence[int], exit_layer: int) -> torch.Tensor:
    sequence = runner.new_sequence()
    ids = np.asarray(token_ids, np.int64)
    logits = runner.forward([Segment(sequence, ids, layers=range(exit_layer))]).logits
    runner.free(sequence)
    return logits


def test_exits_by_themselves() -> None:
    assert [halvings(n) for n in (1, 2, 3, 12)] == [(1,), (1, 2), (1, 3), (1, 3, 6, 12)]


# --- keys and values of layers that were left out -------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"shape": "kary", "branching": 2, "node_budget": 8},
    "confidence": {"shape": "confidence", "node_budget": 6},
    "repeating siblings": {
        "shape": "iid", "acceptance": "k_seq", "node_budget": 9, "num_speculative_tokens": 3,
    },
}  # fmt: skip


@pytest.mark.one_of(3, slow=2)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.25, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_no_layer_reads_keys_that_it_has_not_written(
    kind: str, threshold: float, params: SamplingParams, folder: Path, target: LlamaRunner,
    ar: Reference, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    drafter, params = load_runner(folder, kv_tokens=3000), replace(params, max_tokens=12)
    watch = LayerWatch(drafter, monkeypatch)
    knobs = {"exit_threshold": threshold, "exit_layers": (1, 2, 4), **KINDS[kind]}
    sessions, _ = generate(new_engine(target, drafter), params, **knobs)
    assert max(watch.computed.values()) == 1, "no layer computes a token twice"
    if "acceptance" not in knobs:
        for session in sessions:
            assert session.output_ids == ar(session.token_ids[: session.prompt_length], params)
    if threshold == 1.0 and kind == "chain":
        assert all(s.stats.num_accepted == s.stats.num_drafted for s in sessions)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("threshold", [0.06, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_kept_entries_are_those_of_a_fresh_prefill(
    kind: str, threshold: float, drafter: LlamaRunner, target: LlamaRunner
) -> None:
    engine = new_engine(target, drafter)
    knobs = {"exit_threshold": threshold, "exit_layers": (1, 2, 4), **KINDS[kind]}
    config = SpeculationConfig.model_validate({"method": "s2d", "length": "fixed", **knobs})
    sessions = [engine.submit(Request(p, replace(SAMPLED, max_tokens=10), config)) for p in PROMPTS]
    longest = 0
    while engine.has_work:
        engine.step()
        s2d = engine.drafters.get("s2d")
        for session in sessions:
            if s2d is None or session.finished:
                continue
            assert isinstance(s2d, S2D)
            sequence = s2d._states[session.session_id].sequence
            assert sequence.num_pending == 0
            kept = [x.clone() for x in drafter.keys_and_values(sequence)]
            fresh = drafter.new_sequence()
            tokens = np.asarray(session.token_ids[: sequence.length], np.int64)
            if len(tokens):
                drafter.forward([Segment(fresh, tokens, logits="none")])
                drafter.commit(fresh, range(len(tokens)))
            expected = drafter.keys_and_values(fresh)
            assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))
            drafter.free(fresh)
            longest = max(longest, sequence.length - session.prompt_length)
            assert session.stats.num_rounds == 0 or session.length - sequence.length <= 2
    assert longest > 4


# --- what may happen to a drafter -----------------------------------------------------------------


@pytest.mark.slow
def test_one_drafter_serves_two_targets(folder: Path, zoo: Path) -> None:
    """Two engines in turns over one S2D; each has its own target's tokens."""
    other = make_model("llama_gqa", zoo, seed=5, num_hidden_layers=2)
    drafter = DraftModel(load_runner(folder, kv_tokens=3000))
    first = WatchedEngine(ModelTarget(load_runner(folder)), {"draft_model": drafter})
    context = DrafterContext(
        first.target.vocab_size, lambda name: drafter, first.target, first.drafters._load_head
    )
    s2d = S2D(context)
    engines = [
        WatchedEngine(ModelTarget(load_runner(path)), {"draft_model": drafter, "s2d": s2d})
        for path in (folder, other)
    ]
    config = SpeculationConfig(method="s2d", length="fixed", exit_threshold=0.1)
    for params in (GREEDY, SAMPLED):
        sessions = [[e.submit(Request(p, params, config)) for p in PROMPTS] for e in engines]
        while any(engine.has_work for engine in engines):
            for engine in engines:
                engine.step()
        for path, members in zip((folder, other), sessions, strict=True):
            expected = Reference(path)
            for session in members:
                assert session.output_ids == expected(
                    session.token_ids[: session.prompt_length], params
                )
                assert not session.stats.drafter_lost
    assert not s2d._states
    assert s2d.runner.num_free == s2d.runner.kv_capacity


def test_sessions_with_other_exits_and_thresholds_draft_together(
    drafter: LlamaRunner, target: LlamaRunner, ar: Reference
) -> None:
    engine = new_engine(target, drafter)
    sessions = []
    for i, exits in enumerate([None, (1,), (1, 2), (3, 4), (2, 1, 2), (4,)]):
        config = SpeculationConfig(
            method="s2d",
            length="fixed",
            exit_layers=exits,
            exit_threshold=[0.0, 0.05, 0.3, 1.0][i % 4],
        )
        sessions.append(
            engine.submit(Request(PROMPTS[i % 4] + [i], SAMPLED if i % 2 else GREEDY, config))
        )
        engine.step()
    while engine.has_work:
        engine.step()
    for session in sessions:
        assert not session.stats.drafter_lost
        assert session.output_ids == ar(session.token_ids[: session.prompt_length], session.params)
    assert drafter.num_free == drafter.kv_capacity
    assert find_session(engine.drafters["s2d"], engine.session_ids) is None


def test_an_outcome_that_is_lost_and_a_session_that_is_cut(
    drafter: LlamaRunner, target: LlamaRunner, ar: Reference
) -> None:
    engine = new_engine(target, drafter)
    config = SpeculationConfig(method="s2d", length="fixed", exit_threshold=0.1)
    session = engine.submit(Request(PROMPTS[0], GREEDY, config))
    while len(session.output_ids) < 4:
        engine.step()
    s2d = engine.drafters["s2d"]
    assert isinstance(s2d, S2D)
    first, second = (s2d.propose([session], [Budget(5, 12)])[0] for _ in range(2))
    assert first.num_nodes == 5
    assert first.token_ids.tolist() == second.token_ids.tolist()
    engine.truncate(session.session_id, session.prompt_length + 3)
    while engine.has_work:
        engine.step()
    assert session.output_ids == ar(PROMPTS[0], GREEDY)
    assert not session.stats.drafter_lost
    assert drafter.num_free == drafter.kv_capacity


def test_a_long_prompt_near_the_end_of_the_context(
    drafter: LlamaRunner, target: LlamaRunner, ar: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt takes several chunks; at the end a whole draft does not fit any more."""
    monkeypatch.setattr(s2d_module, "PREFILL_CHUNK", 100)
    prompt = [(7 * i * i) % 250 for i in range(490)]
    params = replace(GREEDY, max_tokens=22)
    (session,), drafts = generate(new_engine(target, drafter), params, [prompt], exit_threshold=0.1)
    assert session.output_ids == ar(prompt, params)
    assert drafts[prompt[0]][0][1]


def test_vocabularies_that_are_padded_differently(
    folder: Path, zoo: Path, target: LlamaRunner, ar: Reference
) -> None:
    special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    for size in (250, 264):
        small = make_model("llama_gqa", zoo, num_hidden_layers=2, vocab_size=size, **special)
        engine = new_engine(target, load_runner(small, kv_tokens=2000))
        prompts = [[token % 240 for token in prompt] for prompt in PROMPTS]
        sessions, _ = generate(engine, GREEDY, prompts, exit_threshold=0.1)
        for session, prompt in zip(sessions, prompts, strict=True):
            assert session.output_ids == ar(prompt, GREEDY)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [-0.1, 1.1, "high"])
def test_thresholds_that_are_none(threshold: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_speculation({"method": "s2d", "exit_threshold": threshold})
    assert caught.value.field == "speculation.exit_threshold"


def test_exits_that_the_draft_model_does_not_have(folder: Path, zoo: Path) -> None:
    short = make_model("llama_gqa", zoo, num_hidden_layers=2)
    engine = new_engine(load_runner(folder), load_runner(short))
    with pytest.raises(InvalidArgument, match="the draft model, which has 2: 1 to 2") as caught:
        engine.submit(
            Request(PROMPTS[0], GREEDY, SpeculationConfig(method="s2d", exit_layers=(1, 3)))
        )
    assert caught.value.field == "exit_layers[1]"
    assert not engine.sessions


def test_a_draft_model_on_the_general_path_is_refused(folder: Path, zoo: Path) -> None:
    general = TransformersRunner(make_model("gpt2", zoo), kv_tokens=500)
    engine = Engine(ModelTarget(load_runner(folder)), {"draft_model": DraftModel(general)})
    with pytest.raises(InvalidArgument, match="fast path") as caught:
        engine.submit(Request(PROMPTS[0], GREEDY, SpeculationConfig(method="s2d")))
    assert caught.value.field == "method"
    assert not engine.sessions


def test_methods_over_a_draft_model_that_lives_elsewhere_are_not_offered(folder: Path) -> None:
    class Elsewhere(Drafter):
        elsewhere = True
        needs = frozenset()  # type: ignore[var-annotated]

        def propose(self, sessions: Any, budgets: Any) -> Any:
            raise NotImplementedError

        def open(self, session: Session) -> None: ...

        def close(self, session: Session) -> None: ...

        def observe(self, sessions: Any, outcomes: Any) -> None: ...

    engine = Engine(ModelTarget(load_runner(folder)), {"draft_model": Elsewhere()})
    for name in ("s2d", "staged"):
        assert "another process: draft_model" in (engine.refusal(METHODS[name]) or "")
        with pytest.raises(InvalidArgument):
            engine.submit(Request(PROMPTS[0], GREEDY, SpeculationConfig(method=name)))
    for name in ("layer_skip", "del", "d3", "skipdecode", "unified_layer_skipping"):
        assert engine.refusal(METHODS[name]) is None
        config = SpeculationConfig(method=name, length="fixed")
        (session,) = engine.generate([PROMPTS[0]], GREEDY, config)
        assert session.stats.num_drafted > 0, "these draft where the target is"
        assert not session.stats.drafter_lost
    assert not engine.sessions
