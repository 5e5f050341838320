"""No method is slower than AR, whatever a verification costs: real rounds on a clock of our own.

The demo pair generates; only the seconds are made up. The clock goes on by what each forward would
cost on a machine that the test describes, so results are the same everywhere and in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.bench.prompts import builtin_prompts, limit_per_category
from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.drafters import auto
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, EngineLimits, drafting, loop
from paceline.engine import engine as engine_module
from paceline.lengths import goodput
from paceline.lengths.base import LengthContext
from paceline.methods import METHODS
from paceline.models.base import ModelRunner, Segment
from paceline.models.heads import HeadLibrary
from paceline.profile import LOAD_DEPTHS, LOAD_NODES, CostProfile, methods_with_draft_model
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.types import Draft, Need
from tests.core.engines import LOCAL_METHODS
from tests.heads import untrained_heads
from tests.masked import masked_drafters

PARAMS = SamplingParams(max_tokens=48, ignore_eos=True)
METHOD_NAMES = tuple(name for name in LOCAL_METHODS if name != "ar")


@dataclass(frozen=True)
class Machine:
    """What things cost here; a target forward over one row costs 1.

    Attributes:
        verify: a target forward, by its number of rows.
        draft: a row in the draft model, and a draft of any other drafter.
    """

    verify: Callable[[float], float]
    draft: float

    def profile(self) -> CostProfile:
        """What an engine would measure here."""
        return CostProfile(
            key={},
            batches=(1,),
            nodes=LOAD_NODES,
            verify_seconds=(tuple(self.verify(n) for n in LOAD_NODES),),
            depths=LOAD_DEPTHS,
            draft_seconds=(tuple(max(1e-6, self.draft * d) for d in LOAD_DEPTHS),),
            read_seconds=self.draft,
            methods=methods_with_draft_model(),
        )


# Two instruction sets: no row is cheaper than the next; and as measured with AVX2.
def linear(rows: float) -> float:
    return rows


def avx2(rows: float) -> float:
    costs = (0, 1, 1.6, 2.1, 3.2, 4.3, 5.4, 54)
    return float(np.interp(rows, (0, 1, 4, 6, 8, 12, 16, 160), costs))


MACHINES = {
    "linear": Machine(linear, 0.1),
    "linear, free drafts": Machine(linear, 0.0),
    "avx2": Machine(avx2, 0.15),
    "avx2, dear drafts": Machine(avx2, 0.6),
}
FLAT = Machine(lambda rows: 1.0 + 0.01 * rows, 0.05)


class Clock:
    """Seconds that pass where something is charged."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine = machine
        self.seconds = 0.0
        self._patch = monkeypatch
        for module in (loop, drafting, engine_module, goodput, auto):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.seconds))
        propose = drafting.Drafting.propose

        def charged(desk: Any, sessions: Any, budgets: Any) -> Any:
            if any(budget.depth and budget.portfolio is None for budget in budgets):
                self.seconds += machine.draft
            return propose(desk, sessions, budgets)

        monkeypatch.setattr(drafting.Drafting, "propose", charged)
        guarded = auto.AutoDrafter._guarded

        def charged_part(drafter: Any, name: str, sessions: Any, what: str, *arguments: Any) -> Any:
            if what == "propose":
                self.seconds += machine.draft
            return guarded(drafter, name, sessions, what, *arguments)

        monkeypatch.setattr(auto.AutoDrafter, "_guarded", charged_part)

    def charge(self, runner: ModelRunner, cost: Callable[[float], float], prompts: bool) -> None:
        """Let forwards take their time: by rows, those with some of the layers a share of it."""
        forward, num_layers = runner.forward, runner.config.num_layers  # type: ignore[attr-defined]

        def rows_of(segment: Segment) -> float:
            if segment.logits == "none" and not prompts:
                return 0.0
            layers = num_layers if segment.layers is None else len(segment.layers)
            return segment.num_rows * layers / num_layers

        def charged(segments: Sequence[Segment], *arguments: Any) -> Any:
            self.seconds += cost(sum(map(rows_of, segments)))
            return forward(segments, *arguments)

        self._patch.setattr(runner, "forward", charged)
        chain = getattr(runner, "greedy_chain", None)
        if chain is None:
            return

        def charged_chain(
            sequences: Any, given: Any, num_steps: int, *rest: Any, **more: Any
        ) -> Any:
            layers = rest[0] if rest and rest[0] else num_layers
            self.seconds += cost(sum(map(len, given))) * layers / num_layers
            self.seconds += (num_steps - 1) * cost(len(given)) * layers / num_layers
            return chain(sequences, given, num_steps, *rest, **more)

        self._patch.setattr(runner, "greedy_chain", charged_chain)


@pytest.fixture(scope="module")
def prompts(demo: Engine) -> list[list[int]]:
    assert demo.tokenizer is not None
    chosen = limit_per_category(builtin_prompts(), 1)[:3]
    return [demo.tokenizer.encode(prompt.text) for prompt in chosen]


@pytest.fixture(scope="module")
def heads() -> Path:
    return untrained_heads(TARGET_DIR)


@pytest.fixture(scope="module")
def expected(demo: Engine, prompts: list[list[int]]) -> list[list[int]]:
    engine = Engine(ModelTarget(demo.target.runner))  # type: ignore[attr-defined]
    return [s.output_ids for s in engine.generate(prompts, PARAMS, SpeculationConfig(method="ar"))]


class Run:
    """One method on one machine, with an engine of its own."""

    def __init__(
        self,
        demo: Engine,
        heads: Path,
        machine: Machine,
        monkeypatch: pytest.MonkeyPatch,
        profile: CostProfile | None,
    ) -> None:
        runner = demo.local_target.runner
        self.clock = Clock(machine, monkeypatch)
        draft_model = demo.drafters["draft_model"]
        assert isinstance(draft_model, DraftModel)
        self.clock.charge(runner, machine.verify, prompts=False)
        self.clock.charge(draft_model.runner, lambda rows: machine.draft * rows, prompts=True)
        self.engine = Engine(
            ModelTarget(runner),
            {**masked_drafters(demo.target.vocab_size), **demo.drafters},
            tokenizer=demo.tokenizer,
            limits=EngineLimits(prefix_cache=False),
            length_context=LengthContext(profile=profile, vocab_size=demo.target.vocab_size),
            heads=HeadLibrary(heads, TARGET_DIR, runner),
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], **knobs: Any
    ) -> tuple[list[Session], float]:
        """The sessions, one after the other, and how much faster than AR they were."""
        before = self.clock.seconds
        config = SpeculationConfig.model_validate(knobs)
        sessions = [self.engine.generate([prompt], PARAMS, config)[0] for prompt in prompts]
        ar = sum(s.stats.num_tokens for s in sessions) * self.clock.machine.verify(1.0)
        return sessions, ar / (self.clock.seconds - before)


@pytest.mark.one_of(6, slow=3)
@pytest.mark.parametrize(
    "machine",
    [
        "linear",
        pytest.param("avx2", marks=pytest.mark.nightly),
        pytest.param("linear, free drafts", marks=pytest.mark.nightly),
        pytest.param("avx2, dear drafts", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_no_method_is_slower_than_ar(
    method: str, machine: str, demo: Engine, heads: Path, prompts: list[list[int]],
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """From an engine's first request on."""
    run = Run(demo, heads, MACHINES[machine], monkeypatch, MACHINES[machine].profile())
    sessions, speed = run.generate(prompts, method=method)
    if METHODS[method].acceptance == "coupled":
        assert [session.output_ids for session in sessions] == expected
    assert speed >= 0.95


class Elsewhere(Drafter):
    """A drafter in another actor: drafts take a way there and back."""

    elsewhere = True
    needs: frozenset[Need] = frozenset()

    def __init__(self, drafter: DraftModel, clock: Clock, travel: float) -> None:
        self._drafter, self._clock, self._travel = drafter, clock, travel
        self.open, self.close, self.observe = drafter.open, drafter.close, drafter.observe

    def propose(self, sessions: Any, budgets: Any) -> list[Future[Draft]]:
        futures: list[Future[Draft]] = [Future() for _ in sessions]
        started = self._clock.seconds
        drafts = self._drafter.propose(sessions, budgets)
        if all(not session.output_ids for session in sessions):
            self._clock.seconds = started  # while the target reads its prompt, which is free here
        elif any(budget.depth for budget in budgets):
            self._clock.seconds += self._travel
        for future, draft in zip(futures, drafts, strict=True):
            future.set_result(draft)
        return futures


@pytest.mark.one_of(3, slow=2)
@pytest.mark.parametrize("machine", ["linear", "avx2"])
@pytest.mark.parametrize("travel", [0.1, 1.0])
def test_with_a_drafter_in_another_actor(
    travel: float, machine: str, demo: Engine, heads: Path, prompts: list[list[int]],
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The target's costs are measured, the drafter's and the way to it are learnt."""
    profile = replace(MACHINES[machine].profile(), methods=(), depths=(), draft_seconds=())
    run = Run(demo, heads, MACHINES[machine], monkeypatch, replace(profile, read_seconds=0.0))
    drafter = run.engine.drafters["draft_model"]
    assert isinstance(drafter, DraftModel)
    run.engine.drafters["draft_model"] = Elsewhere(drafter, run.clock, travel)
    sessions, first = run.generate(prompts, method="draft_model")
    assert [session.output_ids for session in sessions] == expected
    _, then = run.generate(prompts, method="draft_model")
    assert first >= 0.95
    assert then >= 0.95


# What is given up for it, where drafts do pay.
@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("method", ["draft_model", "sequoia", "token_recycling", "suffix_decoding"])
def test_where_verification_is_cheap_methods_lose_little_against_whole_drafts(
    method: str,
    demo: Engine,
    heads: Path,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speeds = []
    for knobs in ({}, {"length": "fixed"}):
        with monkeypatch.context() as patch:
            run = Run(demo, heads, FLAT, patch, FLAT.profile())
            speeds.append(run.generate(prompts, method=method, **knobs)[1])
    assert speeds[0] > max(1.0, 0.8 * speeds[1])


@pytest.mark.parametrize("method", ["draft_model", "token_recycling"])
def test_a_profile_of_another_machine_is_soon_put_right(
    method: str,
    demo: Engine,
    heads: Path,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says that rows are nearly free, and each costs as much as the first one."""
    run = Run(demo, heads, MACHINES["linear"], monkeypatch, FLAT.profile())
    run.generate(prompts, method=method)
    _, speed = run.generate(prompts, method=method)
    assert speed > 0.9
