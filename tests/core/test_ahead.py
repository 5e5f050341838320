"""PEARL in one process: a thread drafts while the target verifies, and no token changes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.lengths import pearl
from paceline.lengths.base import LengthBounds, LengthContext
from paceline.lengths.goodput import WhilePays
from paceline.lengths.pearl import (
    LEAST_GAIN,
    LEAST_ROUNDS,
    ROUNDS_BETWEEN,
    TRIAL_ROUNDS,
    Overlap,
    Pearl,
)
from paceline.models.base import ForwardResult, Segment
from paceline.plan import resolve
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.types import EMPTY_DRAFT, Budget, Draft, Load, Need, Outcome, Verification
from paceline.view import SessionView
from tests.core.engines import Reference, small_engine
from tests.core.scripted import ScriptedRunner, chaotic, run, spoken
from tests.fakes import WITH_FAKES, Mix

VOCAB_SIZE = 50
PROMPT = [1, 2, 3]
GAMMA = 4
TRUTH = spoken(chaotic(VOCAB_SIZE), PROMPT, 320)
IN_MIX = SpeculationConfig(method="mix", num_speculative_tokens=GAMMA, length="pearl")
IN_PEARL = SpeculationConfig(method="pearl", length="pearl")  # named: asked whether it pays or not
PAUSE_S = 20.0  # for what must come


class Always(Overlap):
    """Rounds overlap, whatever is faster."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self._left = True, None


@pytest.fixture
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pearl, "Overlap", Always)


class Ahead(Mix):
    """Knows what comes; tells in which thread it drafts, and may fail in the other one.

    Attributes:
        guesses: calls in another thread than the engine's.
        fails_at: the ones of these that fail; -1 is all.
    """

    rewinds = True

    def __init__(self, rho: float = 1.0, fails_at: Sequence[int] = ()) -> None:
        super().__init__({tuple(PROMPT): TRUTH}, VOCAB_SIZE, rho=rho)
        self.engine_thread = threading.get_ident()
        self.guesses, self.fails_at = 0, fails_at

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        if threading.get_ident() != self.engine_thread:
            self.guesses += 1
            if self.guesses in self.fails_at or -1 in self.fails_at:
                raise RuntimeError("the drafter fails")
        return super().propose(sessions, budgets)


def params(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def engine_of(drafter: Mix, runner: ScriptedRunner | None = None) -> Engine:
    target = ModelTarget(runner or ScriptedRunner(chaotic(VOCAB_SIZE), VOCAB_SIZE))  # type: ignore[arg-type]
    return Engine(target, {"mix": drafter}, catalogue=WITH_FAKES)


# --- rounds ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_always")
def test_drafter_and_target_work_at_the_same_time() -> None:
    """Each waits for the other to have begun: one after the other, neither would end."""
    drafting, verifying = threading.Event(), threading.Event()
    met: list[bool] = []

    class Waiting(ScriptedRunner):
        def forward(
            self, segments: Sequence[Segment], wants: frozenset[Need] = frozenset()
        ) -> ForwardResult:
            (segment,) = segments
            if segment.sequence.length and len(segment.token_ids) > 1:  # verifies a draft
                verifying.set()
                met.append(drafting.wait(PAUSE_S))
            return super().forward(segments, wants)

    class Beside(Ahead):
        def propose(
            self, sessions: Sequence[SessionView], budgets: Sequence[Budget]
        ) -> list[Draft]:
            if threading.get_ident() != self.engine_thread and self.guesses:
                drafting.set()
                met.append(verifying.wait(PAUSE_S))
            return super().propose(sessions, budgets)

    drafter = Beside()
    session, _ = run(
        engine_of(drafter, Waiting(chaotic(VOCAB_SIZE), VOCAB_SIZE)), PROMPT, params(20), IN_MIX
    )
    assert session.output_ids == TRUTH[:20]
    assert len(met) >= 2
    assert all(met)


@pytest.mark.usefixtures("_always")
def test_a_perfect_drafter_stays_in_post_verify() -> None:
    """One round finds the target here, one is pre-verify; then gamma + 1 tokens a forward."""
    drafter = Ahead()
    session, events = run(engine_of(drafter), PROMPT, params(2 + 5 * 12), IN_MIX)
    assert session.output_ids == TRUTH[:62]
    assert [len(event.token_ids) for event in events] == [1, 1, *[GAMMA + 1] * 12]
    # A drafter that has seen a guess looks at the tokens only; in two rounds it has seen none.
    assert drafter.observed == 2


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_after_a_rejection_the_target_goes_on_alone(rho: float) -> None:
    drafter = Ahead(rho)
    session, events = run(engine_of(drafter), PROMPT, params(300), IN_MIX)
    assert session.output_ids == TRUTH[:300]
    drafted = [event.outcome.draft.num_nodes for event in events if event.outcome is not None]
    for before, after in zip(events[1:-3], drafted[2:-2], strict=True):
        assert before.outcome is not None
        whole = before.num_accepted == before.outcome.draft.num_nodes
        assert after == 0 or whole  # and where the guess behind it is wrong, there is no draft
    runs = [0]
    for event in events:
        runs[-1] += event.num_accepted
        if event.outcome is not None and event.num_accepted < event.outcome.draft.num_nodes:
            runs.append(0)
    if rho == 0.9:
        assert max(runs) > GAMMA


# --- exact ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_many_rounds_of_many_sessions_have_the_tokens_of_ar(
    tiny_folder: Path, reference: Reference, temperature: float
) -> None:
    """With a real draft model, which is the target: right at 0, and mostly with coupled noise."""
    small = small_engine(tiny_folder)
    prompts = [[3 + seed, 7, 5 * seed] for seed in range(6)]
    each = replace(params(60), temperature=temperature, seed=4)
    sessions = small.engine.generate(prompts, each, IN_PEARL)
    for prompt, session in zip(prompts, sessions, strict=True):
        assert session.output_ids == reference(prompt, each)
        assert not session.stats.drafter_lost
        assert session.stats.num_target_forwards < 30
    small.assert_nothing_is_left()
    assert not small.engine.drafting._guesses


@pytest.mark.usefixtures("_always")
def test_rules_with_q_and_trees_draft_in_turn(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder)
    each = replace(params(20), temperature=0.8)
    for knobs in {"acceptance": "rejection"}, {"shape": "kary", "branching": 2, "node_budget": 8}:
        config = IN_PEARL.model_copy(update=knobs)
        (session,) = small.engine.generate([PROMPT], each, config)
        assert session.stats.drafted_by_depth[0] >= session.stats.num_rounds - 2
    small.assert_nothing_is_left()


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.usefixtures("_always")
def test_an_error_in_the_thread_costs_a_guess(caplog: pytest.LogCaptureFixture) -> None:
    drafter = Ahead(fails_at=[2, 5, 6])
    session, _ = run(engine_of(drafter), PROMPT, params(120), IN_MIX)
    assert session.output_ids == TRUTH[:120]
    assert caplog.text.count("cannot draft ahead") == 3
    assert session.stats.num_rounds < 40
    assert not session.stats.drafter_lost


@pytest.mark.usefixtures("_always")
def test_a_drafter_that_always_fails_there_drafts_in_turn() -> None:
    drafter = Ahead(fails_at=[-1])
    session, _ = run(engine_of(drafter), PROMPT, params(120), IN_MIX)
    assert session.output_ids == TRUTH[:120]
    assert session.stats.num_rounds < 50  # every other round has a draft


@pytest.mark.usefixtures("_always")
def test_a_failed_forward_ends_the_round_and_the_thread() -> None:
    working: list[int] = []

    class Failing(ScriptedRunner):
        def forward(
            self, segments: Sequence[Segment], wants: frozenset[Need] = frozenset()
        ) -> ForwardResult:
            if drafter.guesses >= 3:
                raise MemoryError("no memory")
            return super().forward(segments, wants)

    class Counting(Ahead):
        def propose(
            self, sessions: Sequence[SessionView], budgets: Sequence[Budget]
        ) -> list[Draft]:
            working.append(1)
            try:
                return super().propose(sessions, budgets)
            finally:
                working.pop()

    drafter = Counting()
    engine = engine_of(drafter, Failing(chaotic(VOCAB_SIZE), VOCAB_SIZE))
    session = engine.submit(Request(PROMPT, params(100), IN_MIX))
    while engine.has_work:
        engine.step()
        assert not working
    assert isinstance(session.error, MemoryError)
    assert not drafter.opened
    assert not engine.drafting._guesses


@pytest.mark.usefixtures("_always")
def test_sessions_that_are_cancelled_leave_nothing(tiny_folder: Path, reference: Reference) -> None:
    """After every step another one, whose next draft is there already."""
    small = small_engine(tiny_folder)
    engine, each = small.engine, params(60)
    prompts = [[3 + seed, 7, 5 * seed] for seed in range(12)]
    sessions = [engine.submit(Request(prompt, each, IN_PEARL)) for prompt in prompts]
    for leaving in sessions[:8]:
        engine.step()
        assert engine.cancel(leaving.session_id)
    while engine.has_work:
        engine.step()
    for prompt, session in zip(prompts[8:], sessions[8:], strict=True):
        assert session.output_ids == reference(prompt, each)
    small.assert_nothing_is_left()
    assert not engine.drafting._guesses


# --- when it pays ---------------------------------------------------------------------------------


def rounds_of(
    overlap: Overlap, count: int, in_turn: float, beside: float, disturbed: int = 0
) -> list[bool]:
    """The kinds of rounds that it wants, if they commit so many tokens a second.

    Args:
        disturbed: of so many rounds in turn one takes fifty times as long; 0: none does.
    """
    kinds = []
    for i in range(count):
        kinds.append(overlap.now)
        seconds = 4 / (beside if overlap.now else in_turn)
        if disturbed and not overlap.now and i % disturbed == 0:
            seconds *= 50
        overlap.observe(overlap.now, 4, seconds)
    return kinds


@pytest.fixture
def _two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pearl, "usable_cores", lambda: SimpleNamespace(usable=2))


@pytest.mark.usefixtures("_two_processors")
@pytest.mark.parametrize(("in_turn", "beside"), [(100.0, 60.0), (100.0, 102.0), (100.0, 150.0)])
def test_the_faster_kind_of_round_is_taken(in_turn: float, beside: float) -> None:
    overlap, pays = Overlap(), beside > LEAST_GAIN * in_turn
    first = rounds_of(overlap, 2 * LEAST_ROUNDS, in_turn, beside)
    assert first == [*[False] * TRIAL_ROUNDS, *[True] * TRIAL_ROUNDS] * 3
    many = rounds_of(overlap, 2600, in_turn, beside)
    share = TRIAL_ROUNDS / (TRIAL_ROUNDS + ROUNDS_BETWEEN[pays])
    assert many.count(not pays) == pytest.approx(share * len(many), rel=0.2)
    # It notices when that changes.
    turned = rounds_of(overlap, 5200, *((100.0, 60.0) if pays else (60.0, 100.0)))
    assert turned[-200:].count(pays) <= 3 * TRIAL_ROUNDS


@pytest.mark.usefixtures("_two_processors")
def test_disturbed_rounds_do_not_decide() -> None:
    kinds = rounds_of(Overlap(), 3000, 100.0, 80.0, disturbed=5)
    assert kinds.count(True) < 0.06 * len(kinds)


def test_one_processor_drafts_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pearl, "usable_cores", lambda: SimpleNamespace(usable=1))
    assert not any(rounds_of(Overlap(), 3000, 100.0, 200.0))


class Cheap:
    """A forward takes 10 ms, a drafted token one."""

    methods = ("pearl",)
    read_seconds = 0.0

    def verify(self, nodes: float, batch: int) -> float:
        return 0.01

    def draft(self, depth: int, batch: int) -> float:
        return 0.001 * depth


def test_rounds_that_overlap_do_not_count_as_costs_of_ar() -> None:
    """Their seconds are those of drafter and target together."""
    session = Session("s", PROMPT, params(50), resolve(IN_PEARL))
    bounds = LengthBounds(start=4, shortest=0, longest=4, nodes=4)
    context = LengthContext(profile=Cheap())
    controller = WhilePays(Pearl(4, 4, Always()), bounds, session.config, context)
    learnt, kinds = controller._learnt, []
    found, acceptance = learnt.found, learnt.acceptance.of(0).mean()
    for _ in range(60):
        beside = controller.budget(session, Load(1, 0)).beside
        nothing = Outcome(EMPTY_DRAFT, (), 0, (0,), 0, Verification(torch.empty(0, 1)))
        controller.observe(nothing, 0.0, 5.0 if beside else 0.01)
        kinds.append(beside)
        assert learnt.costs(lambda depth: depth)(0, Load(1, 0)) < 0.02
    assert kinds.count(True) > 50
    assert (learnt.found, learnt.acceptance.of(0).mean()) == (found, acceptance)
