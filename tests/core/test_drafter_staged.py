"""Staged speculation: the same chains as the draft model's, from fewer of its forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config import SpeculationConfig
from paceline.drafters import staged as staged_module
from paceline.drafters.staged import Staged, _Ngrams
from paceline.engine import RoundEvent
from paceline.models.base import ForwardResult, KVSequence, Segment
from paceline.models.llama import LlamaRunner
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.types import Budget, DraftStep, IntArray
from tests.core.engines import Reference, Small, small_engine

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.7, seed=5)
# Strong biases make any model repeat itself, which is the text that n-grams are good at.
REPETITIVE = replace(GREEDY, logit_bias={70: 40.0})
ALTERNATING = replace(GREEDY, repetition_penalty=1.05, logit_bias={80: 30.0, 81: 29.5})
PROMPTS = [[65, 66, 67], [70] * 12, [80, 81, 82] * 12]


@dataclass
class Run:
    """What the draft model did in a run."""

    forwards: int = 0
    most_pending: int = 0
    drafts: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)


def watch(runner: LlamaRunner, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = runner.forward

    def counted(segments: Sequence[Segment], *arguments: Any) -> ForwardResult:
        run.forwards += 1
        result = forward(segments, *arguments)
        run.most_pending = max(run.most_pending, *(s.sequence.num_pending for s in segments))
        return result

    def counted_chain(
        sequences: Sequence[KVSequence], tokens: Sequence[int], num_steps: int, **options: Any
    ) -> IntArray:
        run.forwards += num_steps  # as many forwards in one call
        return chain(sequences, tokens, num_steps, **options)

    chain = runner.greedy_chain
    monkeypatch.setattr(runner, "forward", counted)
    monkeypatch.setattr(runner, "greedy_chain", counted_chain)


def generate(
    small: Small,
    params: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    **options: Any,
) -> Run:
    run = Run()

    def note(event: RoundEvent) -> None:
        assert event.outcome is not None
        draft = event.outcome.draft
        place = str(names.index(event.session.session_id))
        run.drafts.append((place, draft.token_ids.tolist(), draft.parent_indices.tolist()))
        staged = small.engine.drafters.get(event.session.plan.method.drafter)
        if isinstance(staged, Staged) and not event.finished:
            state = staged._states[event.session.session_id]
            run.behind.append(event.session.length - state.sequence.length)

    config = SpeculationConfig(**{"length": "fixed", **options})
    with monkeypatch.context() as patch:
        watch(small.drafter, run, patch)
        sessions = [small.engine.submit(Request(p, params, config), on_event=note) for p in prompts]
        names = [session.session_id for session in sessions]
        while small.engine.has_work:
            small.engine.step()
    assert not any(session.stats.drafter_lost for session in sessions)
    run.outputs = [session.output_ids for session in sessions]
    small.assert_nothing_is_left()
    return run


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, REPETITIVE, ALTERNATING])
def test_the_chain_is_the_draft_models_and_takes_no_more_forwards(
    params: SamplingParams,
    tiny_folder: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = small_engine(tiny_folder)
    alone = generate(small, params, monkeypatch, num_speculative_tokens=6)
    staged = generate(small, params, monkeypatch, method="staged")
    assert staged.drafts == alone.drafts
    assert staged.outputs == alone.outputs == [reference(p, params) for p in PROMPTS]
    assert staged.forwards <= alone.forwards


def test_repetitive_text_takes_strictly_fewer_forwards(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = small_engine(tiny_folder)
    for prompt in ([70] * 12, [80, 81] * 12):
        alone = generate(small, REPETITIVE, monkeypatch, [prompt], num_speculative_tokens=6)
        staged = generate(small, REPETITIVE, monkeypatch, [prompt], method="staged")
        assert staged.drafts == alone.drafts
        assert staged.forwards < 0.6 * alone.forwards


def test_without_the_second_stage_it_is_the_draft_model(
    tiny_folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = small_engine(tiny_folder)
    alone = generate(small, REPETITIVE, monkeypatch, num_speculative_tokens=6)
    off = generate(small, REPETITIVE, monkeypatch, method="staged", stage_tokens=0)
    assert off.drafts == alone.drafts
    assert off.outputs == alone.outputs == [reference(p, REPETITIVE) for p in PROMPTS]
    assert off.forwards == alone.forwards


@pytest.mark.parametrize(
    "options", [{"shape": "kary", "branching": 2}, {"shape": "confidence", "node_budget": 9}]
)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_trees_are_the_draft_models_too(
    params: SamplingParams,
    options: dict[str, Any],
    tiny_folder: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = small_engine(tiny_folder)
    options = {"num_speculative_tokens": 3, "node_budget": 14, **options}
    alone = generate(small, params, monkeypatch, PROMPTS[:2], **options)
    staged = generate(small, params, monkeypatch, PROMPTS[:2], method="staged", **options)
    assert staged.drafts == alone.drafts
    assert staged.outputs == [reference(p, params) for p in PROMPTS[:2]]
    assert staged.forwards == alone.forwards


@pytest.mark.parametrize("budget", [6, 8, 12, 30])
def test_guesses_stay_within_the_node_budget(
    budget: int, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where most of them are wrong: a noisy sample of a text that repeats itself."""
    small = small_engine(tiny_folder)
    params = replace(SAMPLED, temperature=1.0, logit_bias={80: 6.0, 81: 6.0}, max_tokens=60)
    run = generate(
        small, params, monkeypatch, [[80, 81] * 4],
        method="staged", num_speculative_tokens=6, node_budget=budget, stage_tokens=8,
    )  # fmt: skip
    prompt_and_catch_up = 8
    assert run.most_pending <= budget + prompt_and_catch_up
    assert max(run.behind) <= 2, "accepted tokens keep their KV"


def test_a_draft_that_is_asked_for_twice(tiny_folder: Path) -> None:
    """Its first outcome was lost: the second is the same, and no KV is left behind."""
    small = small_engine(tiny_folder)
    session = small.engine.submit(
        Request(PROMPTS[2], REPETITIVE, SpeculationConfig(length="fixed", method="staged"))
    )
    for _ in range(3):
        small.engine.step()
    staged = small.engine.drafters["staged"]
    assert isinstance(staged, Staged)
    first, second = (staged.propose([session], [Budget(5, 12)])[0] for _ in range(2))
    assert first.num_nodes == 5
    assert first.token_ids.tolist() == second.token_ids.tolist()
    small.engine.cancel(session.session_id)
    small.assert_nothing_is_left()


def test_a_long_prompt_near_the_end_of_the_context(
    tiny_folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt takes several chunks; at the end a whole draft does not fit any more."""
    monkeypatch.setattr(staged_module, "PREFILL_CHUNK", 100)
    small = small_engine(tiny_folder)
    assert small.drafter.context_length == 512
    prompt = [(7 * i * i) % 250 for i in range(490)]
    params = replace(GREEDY, max_tokens=22)
    run = generate(small, params, monkeypatch, [prompt], method="staged")
    assert run.outputs == [reference(prompt, params)]
    assert run.drafts[0][1]
    assert run.forwards > 4


def test_length_controllers_get_the_hidden_states_of_each_token(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of guessed tokens are remembered with their logits."""
    small = small_engine(tiny_folder)
    seen: dict[str, list[list[float]]] = {}

    class Watch:
        wants_hidden = True

        def __init__(self, name: str) -> None:
            self.name = name

        def stop_after(self, step: DraftStep) -> bool:
            assert step.hidden is not None
            seen.setdefault(self.name, []).append(step.hidden.tolist())
            return False

    for method in ("draft_model", "staged"):
        config = SpeculationConfig(length="fixed", method=method, num_speculative_tokens=6)
        session = small.engine.submit(Request([80, 81] * 12, REPETITIVE, config))
        monkeypatch.setattr(type(session.length_controller), "stop_rule", Watch(method))
        while small.engine.has_work:
            small.engine.step()
        assert not session.stats.drafter_lost
    assert seen["staged"] == seen["draft_model"]


def test_ngrams_back_off_and_follow_the_latest() -> None:
    ngrams = _Ngrams(1, 3)
    ngrams.extend([1, 2, 3, 4, 1, 2, 5])
    assert ngrams.guess([9, 1, 2], 1) == [5], "the latest of two"
    assert ngrams.guess([4, 1, 2], 1) == [5]
    assert ngrams.guess([1, 2, 3], 2) == [4, 1], "one guess leads to the next"
    assert ngrams.guess([9, 9, 3], 1) == [4], "back off to one token"
    assert ngrams.guess([9], 3) == []
    assert ngrams.guess([1], 0) == ngrams.guess([1], -2) == []
    ngrams.extend([1, 2, 3, 4, 1, 2, 5, 3, 9])
    assert ngrams.guess([3], 1) == [9]
    assert ngrams.guess([2, 3], 1) == [4], "longer n-grams know better"
