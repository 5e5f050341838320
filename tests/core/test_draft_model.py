"""The draft model: chains in one call, and tokens that change under it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, RoundEvent
from paceline.models.llama import LlamaRunner
from paceline.plan import resolve
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.types import Budget, Draft

PLAN = resolve(SpeculationConfig(method="draft_model"))
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0, seed=5)
PROMPT = list(range(20, 60))


@pytest.fixture
def draft_runner(demo: Engine) -> Iterator[LlamaRunner]:
    drafter = demo.drafters["draft_model"]
    assert isinstance(drafter, DraftModel)
    assert isinstance(drafter.runner, LlamaRunner)
    yield drafter.runner
    assert drafter.runner.num_free == drafter.runner.kv_capacity


def fresh_draft(
    runner: LlamaRunner, tokens: list[int], params: SamplingParams, depth: int
) -> Draft:
    """What a draft model that sees these tokens for the first time proposes."""
    drafter, session = DraftModel(runner), Session("fresh", tokens, params, PLAN)
    drafter.open(session)
    (draft,) = drafter.propose([session], [Budget(depth, depth)])
    drafter.close(session)
    return draft


@pytest.mark.parametrize("depth", [2, 3, 9])
def test_a_chain_in_one_call_is_the_chain_token_by_token(
    draft_runner: LlamaRunner, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    prompts = [PROMPT, PROMPT[:7], [5] * 30]
    sessions = [Session(str(i), p, GREEDY, PLAN) for i, p in enumerate(prompts)]
    budgets = [Budget(depth, depth)] * len(sessions)
    drafted = []
    for in_one_call in (True, False):
        monkeypatch.setattr(LlamaRunner, "drafts_chains", in_one_call)
        drafter = DraftModel(draft_runner)
        for session in sessions:
            drafter.open(session)
        drafts = drafter.propose(sessions, budgets)
        drafted.append([draft.token_ids.tolist() for draft in drafts])
        for session in sessions:
            drafter.close(session)
    assert drafted[0] == drafted[1]
    assert all(len(tokens) == depth for tokens in drafted[0])


@pytest.mark.parametrize("threshold", [0.2, 0.6, 0.95])
def test_a_chain_in_one_call_ends_where_the_drafter_is_unsure(
    demo: Engine, draft_runner: LlamaRunner, monkeypatch: pytest.MonkeyPatch, threshold: float
) -> None:
    """Round after round the drafts, and with them the entries that are kept, are those of one token
    at a time."""
    assert demo.tokenizer is not None
    speculation = SpeculationConfig(
        method="draft_model", length="confidence", stop_threshold=threshold, length_max=9
    )
    prompts = [
        demo.tokenizer.encode(text)
        for text in ("def area(width, height):\n", "import os\nimport ", "class Queue:\n    ")
    ]
    runs = []
    for in_one_call in (True, False):
        monkeypatch.setattr(LlamaRunner, "drafts_chains", in_one_call)
        drafts: list[tuple[str, list[int]]] = []

        def note(event: RoundEvent, drafts: list[tuple[str, list[int]]] = drafts) -> None:
            assert event.outcome is not None
            drafts.append((event.session.params.stop[0], event.outcome.draft.token_ids.tolist()))

        engine = demo.sibling()
        sessions = [
            engine.submit(
                Request(
                    prompt,
                    SamplingParams(max_tokens=40, ignore_eos=True, stop=(f"<none {i}>",)),
                    speculation,
                ),
                on_event=note,
            )
            for i, prompt in enumerate(prompts)
        ]
        while engine.has_work:
            engine.step()
        assert not any(session.stats.drafter_lost for session in sessions)
        runs.append((drafts, [session.output_ids for session in sessions]))
    assert runs[0] == runs[1]
    lengths = {len(tokens) for _, tokens in runs[0][0]}
    assert len(lengths) > 2, "chains of several lengths were wanted"


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_may_change_between_two_drafts(
    draft_runner: LlamaRunner, params: SamplingParams
) -> None:
    """A guess that did not come true leaves nothing behind: drafts are those of a fresh one."""
    drafter, session = DraftModel(draft_runner), Session("s", list(PROMPT), params, PLAN)
    drafter.open(session)
    budget = [Budget(4, 4)]
    histories = [
        PROMPT,
        [*PROMPT, 7, 8, 9, 10],  # a guess: four more
        [*PROMPT, 7, 8, 300],  # half of it was right
        [*PROMPT, 7, 8, 300, 301, 302],
        [*PROMPT, 7],  # back by more than one round
        PROMPT[:10],
        [4, *PROMPT],  # other tokens from the start
    ]
    for tokens in histories:
        session.token_ids[:] = tokens
        (draft,) = drafter.propose([session], budget)
        expected = fresh_draft(draft_runner, tokens, params, 4)
        assert draft.token_ids.tolist() == expected.token_ids.tolist()
    drafter.close(session)
