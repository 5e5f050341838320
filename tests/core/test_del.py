"""DEL: acceptance rates from shadow tokens, the exit and the length that they lead to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SpeculationConfig
from paceline.engine import Engine, RoundEvent
from paceline.lengths.base import LengthBounds, LengthContext
from paceline.lengths.del_ import (
    DECAY,
    DEEPEST_EXIT,
    WATCH_ALL,
    WATCH_EVERY,
    Del,
    best_exit,
    evenly_spread,
    tokens_per_layer,
)
from paceline.models.base import Segment
from paceline.models.llama import LlamaRunner
from paceline.plan import resolve
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.types import Budget, Draft, Load, Need, Outcome, Verification
from tests.core.engines import Reference
from tests.core.layer_watch import LayerWatch
from tests.core.runners import load_runner
from tests.modelzoo import make_model

NUM_LAYERS = 5
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=11)
PROMPTS = [list(b"def f(x): return x"), [65] * 20, list(b"0123456789")]
ALONE = Load(1, 0)


@pytest.fixture(scope="module")
def folder(zoo: Path) -> Path:
    return make_model("llama_gqa", zoo, num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def ar(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture
def runner(folder: Path) -> LlamaRunner:
    return load_runner(folder, kv_tokens=3000)


def new_session(**knobs: Any) -> Session:
    config = SpeculationConfig.model_validate({"method": "del", "length": "del", **knobs})
    context = LengthContext(num_layers=20, exit_logits=lambda states: states)
    params = SamplingParams(max_tokens=1_000_000)
    return Session("s", [1], params, resolve(config), length_context=context)


# --- tokens per layer -----------------------------------------------------------------------------

RATES = st.floats(0.0, 1.0)


@given(st.data(), st.integers(2, 40), st.integers(0, 3), st.integers(0, 12))
def test_the_choice_is_the_best_of_all(
    data: st.DataObject, num_layers: int, shortest: int, more: int
) -> None:
    exits = sorted(data.draw(st.sets(st.integers(1, num_layers), min_size=1, max_size=8)))
    rates = [data.draw(RATES) for _ in exits]
    longest = shortest + more

    def tpl(rate: float, exit_layer: int, depth: int) -> float:
        tokens = depth + 1 if rate == 1 else (1 - rate ** (depth + 1)) / (1 - rate)
        return tokens / (depth * exit_layer + num_layers)

    table = tokens_per_layer(rates, exits, num_layers, longest)
    for place, (rate, exit_layer) in enumerate(zip(rates, exits, strict=True)):
        for depth in range(longest + 1):
            assert table[depth, place] == pytest.approx(tpl(rate, exit_layer, depth), rel=1e-6)
    chosen = best_exit(rates, exits, num_layers, shortest, longest)
    best = max(table[depth].max() for depth in range(shortest, longest + 1))
    assert table[chosen[1], exits.index(chosen[0])] == best
    assert shortest <= chosen[1] <= longest


@given(st.integers(2, 40), st.integers(1, 20))
def test_hopeless_exits_mean_ar_and_perfect_ones_the_longest_draft(
    num_layers: int, longest: int
) -> None:
    exits = range(1, num_layers + 1)
    assert best_exit(np.zeros(num_layers), exits, num_layers, 0, longest)[1] == 0
    assert best_exit(np.ones(num_layers), exits, num_layers, 0, longest) == (1, longest)
    # Only the last layer is right: nothing is won by drafting with the whole model.
    only_last = np.arange(1, num_layers + 1) == num_layers
    assert best_exit(only_last, exits, num_layers, 0, longest)[1] == 0


@given(st.integers(0, 100), st.integers(1, 12))
def test_exits_are_spread_over_the_model(num_layers: int, count: int) -> None:
    exits = evenly_spread(num_layers, count)
    assert len(exits) <= count
    assert list(exits) == sorted(set(exits))
    assert all(1 <= layer < num_layers for layer in exits)
    assert all(layer <= DEEPEST_EXIT * num_layers + 0.5 for layer in exits)
    assert len(exits) == count or DEEPEST_EXIT * num_layers < count


# --- shadow tokens --------------------------------------------------------------------------------


@dataclass
class Run:
    session: Session
    sizes: list[int]  # tokens of each round


def generate(engine: Engine, prompt: list[int], params: SamplingParams, **knobs: Any) -> Run:
    sizes: list[int] = []

    def note(event: RoundEvent) -> None:
        assert event.outcome is not None
        sizes.append(len(event.outcome.path) + 1)

    config = SpeculationConfig.model_validate({"method": "del", "length": "del", **knobs})
    session = engine.submit(Request(prompt, params, config), on_event=note)
    while engine.has_work:
        engine.step()
    assert session.error is None
    assert not session.stats.drafter_lost
    return Run(session, sizes)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("shape", ["chain", "kary"])
def test_the_rates_are_how_often_an_exit_has_the_targets_token(
    shape: str, prompt: list[int], runner: LlamaRunner, ar: Reference
) -> None:
    """Recomputed from the finished text; the last layer is right each time, exactly."""
    exits = tuple(range(1, NUM_LAYERS + 1))
    run = generate(
        Engine(ModelTarget(runner)), prompt, GREEDY, exit_layers=exits, length_min=1, shape=shape
    )
    session, controller = run.session, run.session.length_controller
    assert session.output_ids == ar(prompt, GREEDY)
    sequence = runner.new_sequence()
    ids = np.asarray([*session.token_ids, 0, 0, 0], np.int64)
    result = runner.forward([Segment(sequence, ids)], frozenset({Need.LAYER_STATES}))
    states, truth = result.extras[Need.LAYER_STATES], result.logits.argmax(-1)
    right = np.stack(
        [(runner.logits_of(states[:, e - 1]).argmax(-1) == truth).numpy() for e in exits], 1
    )
    accepted, weight = np.asarray(exits) / NUM_LAYERS, 1.0
    place = len(prompt) - 1
    assert place + sum(run.sizes) == session.length - 1, "a stop cut a round: choose another seed"
    for number, size in enumerate(run.sizes, 1):
        if number <= WATCH_ALL or number % WATCH_EVERY == 0:
            accepted = DECAY * accepted + right[place : place + size].sum(0)
            weight = DECAY * weight + size
        place += size
    assert isinstance(controller, Del)
    assert controller.acceptance == pytest.approx(accepted / weight, rel=1e-12)
    assert controller.acceptance[-1] == 1.0
    assert 0.0 < controller.acceptance[0] < 1.0


def test_above_temperature_0_a_rate_is_an_overlap(runner: LlamaRunner, ar: Reference) -> None:
    exits = tuple(range(1, NUM_LAYERS + 1))
    run = generate(Engine(ModelTarget(runner)), PROMPTS[0], SAMPLED, exit_layers=exits)
    controller = run.session.length_controller
    assert isinstance(controller, Del)
    assert run.session.output_ids == ar(PROMPTS[0], SAMPLED)
    assert controller.acceptance[-1] == pytest.approx(1.0, abs=1e-5)
    assert (controller.acceptance <= 1.0).all()
    assert (controller.acceptance[:-1] > 0.0).all()
    assert controller.stop_threshold(1) == 0.0


def test_shadow_tokens_take_no_layer(runner: LlamaRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = LayerWatch(runner, monkeypatch)
    before: list[int] = []
    compared: list[bool] = []
    observe = Del.observe

    def watched(self: Del, *arguments: Any) -> None:
        before.append(watch.num_rows)
        values = self._rates.values
        observe(self, *arguments)
        assert watch.num_rows == before[-1]
        compared.append(not np.array_equal(self._rates.values, values))

    monkeypatch.setattr(Del, "observe", watched)
    run = generate(Engine(ModelTarget(runner)), PROMPTS[0], GREEDY)
    assert len(before) == len(compared) == run.session.stats.num_rounds > WATCH_ALL
    watched_rounds = [n <= WATCH_ALL or n % WATCH_EVERY == 0 for n in range(1, len(compared) + 1)]
    assert compared == watched_rounds


def test_without_layer_states_nothing_is_learnt() -> None:
    session = new_session()
    controller = session.length_controller
    first = controller.budget(session, ALONE)
    nothing = Verification(torch.zeros(1, 3))
    controller.observe(Outcome(Draft.chain(()), (), 0, (0,), 0, nothing), 0.001, 0.001)
    assert controller.budget(session, ALONE) == first
    blind = Del(LengthBounds(4, 0, 8, 8), None, LengthContext())
    assert blind.budget(session, ALONE).depth == 0, "no model, no exit"


# --- the choice over a text -----------------------------------------------------------------------


@dataclass
class Text:
    """A target of 20 layers without a model: a layer's state is its shadow token's logits."""

    rates: Sequence[float]  # of each layer: how often it has the target's token
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def play(self, session: Session, rounds: int) -> tuple[float, list[tuple[int | None, int]]]:
        """Tokens for each loaded layer, and what was chosen in each round."""
        tokens, layers, chosen = 0, 0, []
        for _ in range(rounds):
            budget = session.length_controller.budget(session, ALONE)
            depth, exit_layer = budget.depth, budget.exit_layer or 1
            right = self._random.random((depth + 1, 20)) < np.asarray(self.rates)
            drafted = right[:depth, exit_layer - 1]
            accepted = depth if drafted.all() else int(drafted.argmin())
            states = torch.zeros(depth + 1, 20, 2)  # token 0 is the right one
            states[..., 0] = torch.from_numpy(right).float()
            states[..., 1] = 1 - states[..., 0]
            logits = torch.tensor([[1.0, 0.0]]).expand(depth + 1, 2)
            path = tuple(range(accepted))
            verification = Verification(logits, {Need.LAYER_STATES: states})
            outcome = Outcome(
                Draft.chain([0] * depth), path, 0, (0,) * (accepted + 1), accepted, verification
            )
            # Each layer takes as long as any other, as in the paper.
            session.length_controller.observe(outcome, 1e-4 * depth * exit_layer, 1e-4 * 20)
            tokens += accepted + 1
            layers += depth * exit_layer + 20
            chosen.append((budget.exit_layer, depth))
        return tokens / layers, chosen


LAYERS = np.arange(1, 21)
EASY = 1.0 - 0.3 * 0.7**LAYERS  # nearly always right from the first layers on
HARD = 0.02 + 0.1 * LAYERS / 20
LATE = 1.0 / (1.0 + np.exp(8.0 - LAYERS))  # right from layer 8 on


@pytest.mark.parametrize("rates", [EASY, HARD, LATE], ids=["easy", "hard", "late"])
def test_it_is_as_good_as_the_best_fixed_choice_for_a_text(rates: Sequence[float]) -> None:
    session = new_session()
    controller = session.length_controller
    assert isinstance(controller, Del)
    exits = controller.exit_layers
    static = tokens_per_layer([rates[e - 1] for e in exits], exits, 20, 8).max()
    text = Text(rates)
    text.play(session, 30)
    found, _ = text.play(session, 1500)
    assert found > 0.96 * static


def test_it_is_better_than_any_fixed_choice_where_the_text_changes() -> None:
    session = new_session()
    controller = session.length_controller
    assert isinstance(controller, Del)
    exits, texts = controller.exit_layers, (Text(EASY), Text(HARD))
    found = np.mean([text.play(session, 200)[0] for _ in range(4) for text in texts])
    fixed = np.mean(
        [tokens_per_layer([text.rates[e - 1] for e in exits], exits, 20, 8) for text in texts],
        axis=0,
    )
    assert found > fixed.max()


def test_easy_and_hard_contexts_get_other_exits_and_lengths() -> None:
    chosen = {}
    for name, rates in (("easy", EASY), ("hard", HARD), ("late", LATE)):
        session = new_session()
        rounds = Text(rates).play(session, 200)[1][100:]
        chosen[name] = max(set(rounds), key=rounds.count)
    assert chosen["easy"] in ((2, 8), (4, 8)), "an early exit, the longest draft"
    assert chosen["hard"] == (None, 0)
    exit_layer, depth = chosen["late"]
    assert exit_layer is not None
    assert exit_layer > 4
    assert depth >= 3


def test_bounds_of_the_length() -> None:
    session = new_session(length_min=2, length_max=5)
    hopeless, perfect = Text(np.zeros(20)), Text(np.ones(20))
    assert {depth for _, depth in hopeless.play(session, 100)[1]} <= set(range(2, 6))
    assert hopeless.play(session, 20)[1][-1] == (2, 2), "the cheapest exit"
    assert perfect.play(session, 100)[1][-1] == (2, 5)


# --- dynamic draft exiting ------------------------------------------------------------------------


def test_the_threshold_is_the_confidence_of_wrong_tokens(
    runner: LlamaRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averaged over what the exit has said, the latest rounds weighing most."""
    learn, seen = Del._learn_confidence, []

    def watched(self: Del, confidence: Any, right: Any) -> None:
        seen.append((confidence, right))
        learn(self, confidence, right)

    monkeypatch.setattr(Del, "_learn_confidence", watched)
    params = replace(GREEDY, max_tokens=80)
    engine = Engine(ModelTarget(runner))
    run = generate(engine, PROMPTS[0], params, exit_layers=(3,), length_min=1)
    weights = DECAY ** np.arange(len(seen))[::-1]
    total = sum(
        w * confidence[right == 0].sum()
        for w, (confidence, right) in zip(weights, seen, strict=True)
    )
    count = sum(w * (right == 0).sum() for w, (_, right) in zip(weights, seen, strict=True))
    controller = run.session.length_controller
    assert isinstance(controller, Del)
    assert controller.stop_threshold(3) == pytest.approx(total / count)
    assert 0.0 < controller.stop_threshold(3) < 1.0
    assert run.session.stats.num_draft_nodes < 8 * run.session.stats.num_rounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threshold", [0.15, 0.3])
def test_drafts_end_where_the_exit_is_unsure(
    threshold: float, dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same token in one call of the kernel and token by token, in any batch."""

    def budget(self: Del, session: Session, load: Load) -> Budget:
        self._stop.threshold = threshold
        return Budget(7, 7, 2)

    monkeypatch.setattr(Del, "budget", budget)
    runner = load_runner(folder, kv_tokens=3000, dtype=dtype)
    config = SpeculationConfig(method="del", length_min=2)
    drafts: dict[bool, list[list[int]]] = {True: [], False: []}
    lengths: list[int] = []
    for in_one_call, found in drafts.items():
        target = ModelTarget(runner)
        if not in_one_call:
            monkeypatch.setattr(target, "draft_chains", lambda *arguments: None)

        def note(event: RoundEvent, found: list[list[int]] = found) -> None:
            session, outcome = event.session, event.outcome
            assert outcome is not None
            found.append([session.prompt_length, *outcome.draft.token_ids.tolist()])
            if session.remaining >= 8:
                lengths.append(outcome.draft.num_nodes)

        engine = Engine(target)
        for prompt in PROMPTS:
            engine.submit(Request(prompt, GREEDY, config), on_event=note)
        while engine.has_work:
            engine.step()
    assert drafts[True] == drafts[False]
    assert set(lengths) <= set(range(2, 8))
    assert len(set(lengths)) > 2, "all drafts are equally long: this shows nothing"


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(GREEDY, repetition_penalty=1.2)])
def test_a_batch_of_sessions_has_ars_tokens(
    params: SamplingParams, runner: LlamaRunner, ar: Reference
) -> None:
    engine = Engine(ModelTarget(runner))
    for knobs in ({}, {"length_min": 1, "shape": "kary", "node_budget": 7}):
        config = SpeculationConfig.model_validate({"method": "del", "length": "del", **knobs})
        for session in engine.generate(PROMPTS, params, config):
            assert not session.stats.drafter_lost
            assert session.output_ids == ar(session.token_ids[: session.prompt_length], params)
    assert engine.target.num_free == engine.target.kv_capacity
